"""Functions that are generated as source text."""

from __future__ import annotations

import pytest

from gemmtune.core.codegen import compile_function


def test_a_function_knows_what_it_was_given() -> None:
    lines = ("def add(a):", "    return a + more")
    one, two = (compile_function("add", *lines, more=more) for more in (1, 2))
    assert (one(5), two(5)) == (6, 7)
    assert one.__code__ is two.__code__  # compiled once
    with pytest.raises(NameError, match="more"):
        compile_function("add", *lines)(5)
    with pytest.raises(KeyError, match="other"):
        compile_function("other", *lines, more=1)
