"""HTML tables of the report: headers, cells, and the script that sorts and filters rows without a network."""

from __future__ import annotations

from collections.abc import Sequence

from .escaped import escape
from .rows import time_text

# The input field above each table filters its rows. A click on a header sorts them; a second click reverses the order.
SCRIPT = """
document.querySelectorAll('table').forEach(function (table) {
  var body = table.tBodies[0], field = table.previousElementSibling;
  field.oninput = function () {
    Array.from(body.rows).forEach(function (row) {
      row.hidden = !row.textContent.toLowerCase().includes(field.value.toLowerCase());
    });
  };
  table.querySelectorAll('th').forEach(function (head, column) {
    head.onclick = function () {
      var way = head.dataset.way = head.dataset.way === '1' ? '-1' : '1';
      function value(row) {
        var cell = row.cells[column];
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
    """Return a table that the script makes sortable and filterable. body: the HTML of its rows."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    field = "<input type='search' placeholder='show rows with ...' aria-label='show rows with'>"
    return f"{field}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def number_cell(value: float, text: str = "") -> str:
    """Return a cell that is sorted by ``value`` and shows ``text`` (default: the value)."""
    return f"<td class='n' data-v='{value:.9g}'>{escape(text or str(value))}</td>"


def code_element(text: str) -> str:
    """Return a code element with a candidate's id, which the browser may wrap after commas."""
    return f"<code>{escape(text).replace(',', ',<wbr>')}</code>"


def time_cell(value: float | None) -> str:
    """Return a cell for a time in seconds. None, for what was not timed, is sorted first."""
    return number_cell(-1.0 if value is None else value, time_text(value))
