"""Tests that calls of one key with operands of many strides are cached once for each combination of strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gemmtune
from gemmtune.dispatch import RUNTIME, cache
from gemmtune.dispatch.cache import DISPATCH_CACHE, EntriesByStrides

WEIGHT, BIAS = torch.randn(8, 16), torch.randn(8)
Call = Callable[[Tensor], Tensor]
CALLS: dict[str, tuple[Call, Call]] = {
    "linear": (lambda x: gemmtune.linear(x, WEIGHT, BIAS), lambda x: F.linear(x, WEIGHT, BIAS)),
    "mm": (lambda x: gemmtune.mm(x, WEIGHT.t()), lambda x: torch.mm(x, WEIGHT.t())),
    "addmm": (lambda x: gemmtune.addmm(BIAS, x, WEIGHT.t()), lambda x: torch.addmm(BIAS, x, WEIGHT.t())),
    "mm, out=": (
        lambda x: gemmtune.mm(x, WEIGHT.t(), out=torch.empty(4, 8)), lambda x: torch.mm(x, WEIGHT.t()),
    ),
}  # fmt: skip


def strided_matrices(count: int) -> list[Tensor]:
    """Return ``count`` matrices [4, 16], each with its own leading dimension."""
    return [torch.randn(4, 16 + padding)[:, :16] for padding in range(count)]


@pytest.fixture
def cached_keys(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list to which the key of every new cache entry is appended."""
    keys: list[object] = []
    cache_entry = RUNTIME.cache_entry

    def record_key(key: object, *rest: object, **options: object) -> None:
        keys.append(key)
        cache_entry(key, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(RUNTIME, "cache_entry", record_key)
    return keys


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("count", [8, 9, 12, 40])
def test_calls_of_many_strides_are_cached_once_each(name: str, count: int, cached_keys: list[object]) -> None:
    (ours, reference), inputs = CALLS[name], strided_matrices(count)
    for _ in range(2):
        for x in inputs:
            torch.testing.assert_close(ours(x), reference(x))
    cached_keys.clear()
    for _ in range(3):
        for x in inputs:
            torch.testing.assert_close(ours(x), reference(x))
    assert cached_keys == []


def test_dtypes_and_requires_grad_of_many_strides_are_cached(cached_keys: list[object]) -> None:
    inputs = [
        x.to(dtype).detach().requires_grad_(wants)
        for x in strided_matrices(10) for dtype in (torch.float32, torch.float64) for wants in (False, True)
    ]  # fmt: skip

    def call(x: Tensor) -> Tensor:
        return gemmtune.linear(x, WEIGHT.to(x.dtype))

    for _ in range(2):
        for x in inputs:
            call(x)
    cached_keys.clear()
    for x in inputs:
        got = call(x)
        assert got.dtype == x.dtype
        assert got.requires_grad == x.requires_grad
        torch.testing.assert_close(got, F.linear(x, WEIGHT.to(x.dtype)))
    assert cached_keys == []


def test_the_cached_strides_of_a_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_STRIDES", 5)
    for x in strided_matrices(30):
        torch.testing.assert_close(gemmtune.mm(x, WEIGHT.t()), torch.mm(x, WEIGHT.t()))
    (entries,) = DISPATCH_CACHE.values()
    assert isinstance(entries, EntriesByStrides)
    assert len(entries.by_strides) == 5


def test_refresh_empties_the_entries_of_all_strides(cached_keys: list[object]) -> None:
    inputs = strided_matrices(12)
    for _ in range(2):
        for x in inputs:
            gemmtune.mm(x, WEIGHT.t())
    RUNTIME.refresh()
    cached_keys.clear()
    gemmtune.mm(inputs[0], WEIGHT.t())
    assert len(cached_keys) == 1
    (entries,) = DISPATCH_CACHE.values()
    assert len(entries) == 1


def test_an_operand_that_is_no_tensor_is_refused_for_a_key_of_many_strides() -> None:
    for x in strided_matrices(12):
        gemmtune.mm(x, WEIGHT.t())

    class Shaped:
        shape = torch.Size((4, 16))

    with pytest.raises(TypeError, match="must be Tensor"):
        gemmtune.mm(Shaped(), WEIGHT.t())  # type: ignore[arg-type]
