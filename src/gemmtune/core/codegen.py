"""Functions of the hot path that are generated as source text.

A call costs the host a few microseconds. A loop over operands, an argument list of any length or a test of what a
kernel has takes its share of that in each call, though its outcome never changes: it is decided when the source is
generated, as ``dataclasses`` and ``collections.namedtuple`` do.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any


@lru_cache(1024)  # every M has functions of its own with the same text, and compiling is most of their cost
def _code(name: str, source: str) -> CodeType:
    file = f"<gemmtune {name} {abs(hash(source)):x}>"
    # Without a modification time the entry stays: tracebacks and debuggers show the generated lines.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source, file, "exec")


def compile_function(name: str, *lines: str, **names: Any) -> Callable[..., Any]:
    """Return the function ``name`` that the lines of Python define. names: the values that the lines may use.

    The lines must be gemmtune's own: no text from a caller or a file may be in them.
    """
    exec(_code(name, "\n".join(lines)), names)
    function: Callable[..., Any] = names[name]
    return function
