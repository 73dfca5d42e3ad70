"""The options ``--m``, ``--batch`` and ``--config-key``: the M or the batches that a weight is tuned for, and which of
them share a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .usage import fail_usage

if TYPE_CHECKING:
    from ..tuning.sizes import Sizes

MOption = Annotated[
    str | None,
    typer.Option(
        "--m", metavar="RANGE",
        help="Tune each weight for many M: 1:8192 (both included), all, or hints such as 64,256,4096 [default: the "
        "problems' own M].",
    ),
]  # fmt: skip

BatchOption = Annotated[
    str | None,
    typer.Option(
        "--batch", metavar="RANGE",
        help="Tune each batched product for many batches: 1:128, all, or hints such as 8,64 [default: the problems' "
        "own batch].",
    ),
]  # fmt: skip

ConfigKeyOption = Annotated[
    str | None,
    typer.Option(
        "--config-key", metavar="KEY",
        help="With --m: which M share a kernel. power_of_2: those with the same next power of two; exact: none, other "
        "M than the tuned ones are left to ATen [default: intervals found by measurements].",
    ),
]  # fmt: skip

_ALLOWED = "is a range as 1:8192 (both ends included), all, or hints as 64,256,4096"
_LIMIT = 1 << 31
_KEYS: Mapping[str, Literal["exact", "power_of_2"]] = {"exact": "exact", "power_of_2": "power_of_2"}


def parse_sizes(text: str | None, name: str) -> Sizes | None:
    """Return the ``m`` or ``batch`` for ``gemmtune.tune`` that an option stands for; None without the option.

    name: of the option.

    Exit with wrong usage unless it is ``all``, ``FIRST:LAST``, or a list of integers separated by commas, all from 1 to
    2^31 - 1.
    """
    if text is None or text == "all":
        return "all" if text else None
    first, colon, last = text.partition(":")
    parts = [first, last] if colon else text.split(",")
    # int() alone would accept other digits, signs, spaces and underscores.
    if not all(part.strip().isascii() and part.strip().isdecimal() for part in parts):
        fail_usage(f"{name} {_ALLOWED}; got {text!r}")
    sizes = [int(part) for part in parts]
    if min(sizes) < 1 or max(sizes) >= _LIMIT:
        fail_usage(f"every size of {name} must be from 1 to 2^31 - 1; got {text!r}")
    if not colon:
        return sizes
    if sizes[0] > sizes[1]:
        fail_usage(f"a range of {name} begins with its least: {sizes[1]}:{sizes[0]}; got {text!r}")
    return range(sizes[0], sizes[1] + 1)


def parse_config_key(text: str | None, m: Sizes | None) -> Literal["exact", "power_of_2"] | None:
    """Return the ``config_key`` for ``gemmtune.tune`` that the option stands for; None without the option.

    m: what ``parse_sizes`` returned for ``--m``. Exit with wrong usage for an unknown key, and without ``--m``.
    """
    if text is None:
        return None
    if m is None:
        fail_usage("--config-key divides a range of M: it needs --m")
    if text not in _KEYS:
        fail_usage(f"--config-key is {' or '.join(_KEYS)}; got {text!r}")
    return _KEYS[text]
