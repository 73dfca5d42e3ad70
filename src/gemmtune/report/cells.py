"""Tables of the report, which sort and filter without a network: heads, cells and the script for them."""

from __future__ import annotations

from collections.abc import Sequence

from .escaped import escape
from .rows import duration

# Each table has a field above it that filters its rows; a click on a head sorts them, a second one the other way.
SCRIPT = """
document.querySelectorAll('table').forEach(function (table) {
  var body = table.tBodies[0], field = table.previousElementSibling;
  field.oninput = function () {
    Array.from(body.rows).forEach(function (row) {
      row.hidden = !row.textContent.toLowerCase().includes(field.value.toLowerCase());
    });
  };
  table.querySelectorAll('th').forEach(function (head, place) {
    head.onclick = function () {
      var way = head.dataset.way = head.dataset.way === '1' ? '-1' : '1';
      function value(row) {
        var cell = row.cells[place];
        return 'v' in cell.dataset ? +cell.dataset.v : cell.textContent;
      }
      Array.from(body.rows).sort(function (a, b) {
        var p = value(a), q = value(b);
        return way * (typeof p === 'number' ? p - q : p.localeCompare(q));
      }).forEach(function (row) { body.append(row); });
    };
  });
});
"""


def rows_table(heads: Sequence[str], body: str) -> str:
    """A table that sorts and filters."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    field = "<input type='search' placeholder='show rows with ...' aria-label='show rows with'>"
    return f"{field}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def number(value: float, text: str = "") -> str:
    """A cell that sorts by its value."""
    return f"<td class='n' data-v='{value:.9g}'>{escape(text or str(value))}</td>"


def seconds(value: float | None) -> str:
    """A time's cell; what was not timed comes first."""
    return number(-1.0 if value is None else value, duration(value))
