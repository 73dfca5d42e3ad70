"""Calls that cycle among many layouts of one key are prepared once each, like those that have one."""

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


def layouts(count: int) -> list[Tensor]:
    """Matrices [4, 16] of as many leading dimensions."""
    return [torch.randn(4, 16 + more)[:, :16] for more in range(count)]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was prepared and remembered since, by its key."""
    keys: list[object] = []
    remember = RUNTIME.cache_entry

    def remembering(key: object, *rest: object) -> None:
        keys.append(key)
        remember(key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(RUNTIME, "cache_entry", remembering)
    return keys


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("count", [8, 9, 12, 40])
def test_a_cycle_is_prepared_once(name: str, count: int, prepared: list[object]) -> None:
    (mine, torchs), forms = CALLS[name], layouts(count)
    for _ in range(2):
        for x in forms:
            torch.testing.assert_close(mine(x), torchs(x))
    prepared.clear()
    for _ in range(3):
        for x in forms:
            torch.testing.assert_close(mine(x), torchs(x))
    assert prepared == []


def test_other_dtypes_and_gradients_of_a_layout(prepared: list[object]) -> None:
    forms = [
        x.to(dtype).detach().requires_grad_(wants)
        for x in layouts(10) for dtype in (torch.float32, torch.float64) for wants in (False, True)
    ]  # fmt: skip

    def call(x: Tensor) -> Tensor:
        return gemmtune.linear(x, WEIGHT.to(x.dtype))

    for _ in range(2):
        for x in forms:
            call(x)
    prepared.clear()
    for x in forms:
        got = call(x)
        assert got.dtype == x.dtype
        assert got.requires_grad == x.requires_grad
        torch.testing.assert_close(got, F.linear(x, WEIGHT.to(x.dtype)))
    assert prepared == []


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_STRIDES", 5)
    for x in layouts(30):
        torch.testing.assert_close(gemmtune.mm(x, WEIGHT.t()), torch.mm(x, WEIGHT.t()))
    (many,) = DISPATCH_CACHE.values()
    assert isinstance(many, EntriesByStrides)
    assert len(many.by_strides) == 5


def test_a_refresh_forgets_them(prepared: list[object]) -> None:
    forms = layouts(12)
    for _ in range(2):
        for x in forms:
            gemmtune.mm(x, WEIGHT.t())
    RUNTIME.refresh()
    prepared.clear()
    gemmtune.mm(forms[0], WEIGHT.t())
    assert len(prepared) == 1
    (variants,) = DISPATCH_CACHE.values()
    assert len(variants) == 1


def test_odd_operands_of_such_a_key_are_refused_as_ever() -> None:
    for x in layouts(12):
        gemmtune.mm(x, WEIGHT.t())

    class Shaped:
        shape = torch.Size((4, 16))

    with pytest.raises(TypeError, match="must be Tensor"):
        gemmtune.mm(Shaped(), WEIGHT.t())  # type: ignore[arg-type]
