"""Functions compiled from generated source text."""

from __future__ import annotations

import pytest

from gemmtune.core.codegen import compile_function, function_maker


def test_compile_function_binds_values_and_caches_the_code() -> None:
    lines = ("def add(a):", "    return a + value")
    add_1, add_2 = (compile_function("add", *lines, value=value) for value in (1, 2))
    assert (add_1(5), add_2(5)) == (6, 7)
    assert add_1.__code__ is add_2.__code__  # compiled once
    with pytest.raises(NameError, match="value"):
        compile_function("add", *lines)(5)
    with pytest.raises(KeyError, match="other"):
        compile_function("other", *lines, value=1)


def test_function_maker_makes_functions_of_several_values_from_one_source() -> None:
    lines = ("def add(a):", "    return a + value + double + offset")
    make = function_maker("add", ("value",), *lines, setup=["double = 2 * value"], offset=10)
    add_1, add_2 = make(1), make(2)
    assert (add_1(5), add_2(5)) == (18, 21)
    assert add_1.__code__ is add_2.__code__
    assert add_1.__globals__ is add_2.__globals__  # nothing but the value is stored for each
