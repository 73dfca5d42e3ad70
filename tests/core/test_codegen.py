"""Functions that are written out."""

from __future__ import annotations

import pytest

from gemmtune.core.codegen import written


def test_a_function_knows_what_it_was_given() -> None:
    lines = ("def add(a):", "    return a + more")
    one, two = (written("add", *lines, more=more) for more in (1, 2))
    assert (one(5), two(5)) == (6, 7)
    assert one.__code__ is two.__code__  # compiled once
    with pytest.raises(NameError, match="more"):
        written("add", *lines)(5)
    with pytest.raises(KeyError, match="other"):
        written("other", *lines, more=1)
