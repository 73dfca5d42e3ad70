"""Generation of hot-path functions from Python source text.

A call takes a few microseconds of host time. A loop over operands, an argument list of variable length, or a test of a
kernel's properties would take a considerable part of that in every call, although its outcome never changes. So it is
evaluated when the source is generated, as ``dataclasses`` and ``collections.namedtuple`` do.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any


@lru_cache(1024)  # functions of different M have equal sources, and compilation dominates their cost
def _code(name: str, source: str) -> CodeType:
    file = f"<gemmtune {name} {abs(hash(source)):x}>"
    # Without a modification time the entry stays: tracebacks and debuggers show the generated lines.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source, file, "exec")


def compile_function(name: str, *lines: str, **names: Any) -> Callable[..., Any]:
    """Compile Python source and return the function ``name`` that it defines.

    names: the global variables of the source. The source is executed, so that it must never contain text from a caller
    or a file.
    """
    return function_maker(name, *lines)(**names)


def function_maker(name: str, *lines: str) -> Callable[..., Callable[..., Any]]:
    """Return a function that takes the global variables of a source and returns the function ``name`` with them, as
    ``compile_function`` does: for a source that is used with several values of its variables."""
    code = _code(name, "\n".join(lines))

    def make(**names: Any) -> Callable[..., Any]:
        exec(code, names)
        function: Callable[..., Any] = names[name]
        return function

    return make
