"""Generation of hot-path functions from Python source text.

A call takes a few microseconds of host time. A loop over operands, an argument list of variable length, or a test of a
kernel's properties would take a considerable part of that in every call, although its outcome never changes. So it is
evaluated when the source is generated, as ``dataclasses`` and ``collections.namedtuple`` do.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
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
    exec(_code(name, "\n".join(lines)), names)
    function: Callable[..., Any] = names[name]
    return function


def function_maker(
    name: str, variables: Sequence[str], *lines: str, setup: Sequence[str] = (), **names: Any
) -> Callable[..., Callable[..., Any]]:
    """Return a function that takes the values of ``variables``, in order, and returns the function ``name`` with them.

    For a source that is used with several values of its variables: making another function takes a tenth of the time
    that ``compile_function`` takes. setup: lines that run when a function is made; ``lines`` may use the variables that
    they assign. lines, names: as for ``compile_function``.
    """
    body = (f"    {line}" for line in (*setup, *lines))
    code = _code(name, "\n".join((f"def make({', '.join(variables)}):", *body, f"    return {name}")))
    exec(code, names)
    make: Callable[..., Callable[..., Any]] = names["make"]
    return make
