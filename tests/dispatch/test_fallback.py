"""The fallback's integer product, also in versions of torch whose ``_int_mm`` takes no uint8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemmtune.backends.aten import padding
from gemmtune.core.torch_compat import int_mm
from gemmtune.dispatch import fallback


def int8_only(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != torch.int8:
        raise RuntimeError("expected int8")
    result: Tensor = int_mm(a, b)
    return result


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_integer_products_are_exact_where_torch_takes_int8_only(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fallback, padding):
        monkeypatch.setattr(module, "int_mm", int8_only)
        monkeypatch.setattr(module, "int_mm_takes_uint8", lambda: False)
    a, b = torch.arange(96).view(8, 12).to(dtype), (torch.arange(96) % 13 - 6).view(12, 8).to(torch.int8)
    assert torch.equal(fallback.int_product(a)(a, b), (a.long() @ b.long()).int())
