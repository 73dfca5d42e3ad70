"""Functions of the hot path, written out for the case at hand.

A call of ours costs the host a few microseconds. A loop over operands, an argument list of any length or a test of
what a kernel has takes its share of that each time, though nothing about it changes from call to call: it is settled
when the function is written (as ``dataclasses`` and ``collections.namedtuple`` write theirs).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any


@lru_cache(1024)  # every M has functions of its own, of the same text, whose compiling is most of making them
def _code(source: str) -> CodeType:
    return compile(source, "<gemmtune.core.codegen>", "exec")


def written(name: str, *lines: str, **known: Any) -> Callable[..., Any]:
    """The function of that name that these lines of Python define; ``known`` are the names that they may use.

    The lines are ours: nothing that a caller gave may be among them.
    """
    exec(_code("\n".join(lines)), known)
    function: Callable[..., Any] = known[name]
    return function
