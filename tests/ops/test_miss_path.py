"""A call that misses the dispatch cache enters each module twice at most, so that a reader can follow its path."""

from __future__ import annotations

import pytest
import torch

from gemmtune.ops import mm
from helpers.miss_path import CALLS, MOST_ENTRIES, entries, entries_of_miss, is_counted
from helpers.serving import TOY_RUNS


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_miss_enters_each_module_twice_at_most(name: str, tuned: bool, described: bool) -> None:
    TOY_RUNS.clear()
    found = entries_of_miss(CALLS[name], tuned=tuned, described=described)
    assert bool(TOY_RUNS) == tuned
    # A call that passes a tensor twice is described each time; others with another M have their guard already.
    has_guard = described and name != "linear with a bias and an epilogue"
    assert found["gemmtune.dispatch.cache"] == (["lookup"] if has_guard else ["lookup", "insert"])
    assert {module: names for module, names in found.items() if is_counted(module) and len(names) > MOST_ENTRIES} == {}


def test_calls_from_another_module_are_entries() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    found = entries(lambda: [mm.describe(a, b) for _ in range(3)])
    assert {module: names for module, names in found.items() if is_counted(module)} == {
        "gemmtune.ops.operands": ["matrix_call"] * 3,
        "gemmtune.fuse": ["resolve"] * 3,
    }
