"""float8_e4m3fn weights with floating-point activations in the native kernels: each byte is converted exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gemmtune
from gemmtune import backends
from gemmtune.backends.base import Artifact
from gemmtune.core.candidate import Candidate
from gemmtune.core.checks import DtypeError
from gemmtune.core.workloads import build, dtype_name, weight_only_problem
from gemmtune.dispatch import current_target
from gemmtune.ops.mixed_mm import quant_weight

K, N = 256, 70


def weight_of_all_bytes() -> Tensor:
    """Return a float8 matrix [N, K] whose rows have all 256 bytes, each row in another order."""
    values = torch.arange(256, dtype=torch.uint8)
    return torch.stack([values.roll(shift) for shift in range(N)]).view(torch.float8_e4m3fn)


def native_candidates(dtype: str) -> list[Candidate]:
    """Return a native candidate for each template, instruction set and panel width."""
    problem = weight_only_problem(K, N, K, float8=True, dtype=dtype, scale_dtype="float32")
    by_kind: dict[tuple[object, ...], Candidate] = {}
    for item in backends.get("native").candidates(problem, current_target(torch.device("cpu"))):
        if isinstance(item, Candidate):
            by_kind.setdefault((item.template, item["isa"], item["nr"]), item)
    return list(by_kind.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_byte_is_converted_exactly(dtype: str) -> None:
    problem = weight_only_problem(K, N, K, float8=True, dtype=dtype, scale_dtype="float32")
    native, weight, scale = backends.get("native"), weight_of_all_bytes(), torch.rand(N) + 0.5
    is_nan = (weight.view(torch.uint8) & 0x7F) == 0x7F
    numbers = weight.view(torch.uint8).masked_fill(is_nan, 0).view(torch.float8_e4m3fn)
    x = torch.eye(K, dtype=getattr(torch, dtype))
    expected = (numbers.float() * scale[:, None]).t().to(x.dtype)
    candidates = native_candidates(dtype)
    assert {str(c["isa"]) for c in candidates} >= {"portable"}
    for candidate in candidates:
        kernel = native.load(Artifact(candidate, native.source_digest()), problem)
        packed = kernel.pack(quant_weight(weight.t(), scale, None, 8, None, K))
        assert torch.equal(native.unpack(packed).data.view(torch.uint8), weight.t().view(torch.uint8)), candidate.id
        out = torch.empty(K, N, dtype=x.dtype)
        kernel.run(x, packed, (), out)
        assert torch.equal(out.isnan().any(0), is_nan.any(1)), candidate.id
        kernel.run(x, kernel.pack(quant_weight(numbers.t(), scale, None, 8, None, K)), (), out)
        assert torch.equal(out, expected), candidate.id


def test_group_scales_match_the_dequantised_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 96).to(torch.float8_e4m3fn)
    scale, x = torch.rand(3, 48) + 0.5, torch.randn(5, 96)
    packed = gemmtune.pack(weight, scale=scale, group_size=32)
    expected = x @ (weight.float() * scale.t().repeat_interleave(32, 1)).t()
    torch.testing.assert_close(gemmtune.mixed_mm(x, packed), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gemmtune.mixed_mm(x, weight.t(), scale, group_size=32), expected, rtol=1e-5, atol=1e-4)


def test_other_float8_weights_and_zero_points_raise_errors() -> None:
    x, scale = torch.randn(2, 16), torch.ones(4)
    with pytest.raises(DtypeError, match="int8, float8_e4m3fn"):
        gemmtune.mixed_mm(x, torch.zeros(4, 16, dtype=torch.float8_e5m2).t(), scale)
    with pytest.raises(ValueError, match="no zero point"):
        gemmtune.mixed_mm(x, torch.zeros(4, 16).to(torch.float8_e4m3fn).t(), scale, torch.ones(4))


def test_fp8wo_is_the_short_dtype_of_float8_weights() -> None:
    problem = build(8, 64, 64, "fp8wo")
    assert problem.b.dtype == "float8_e4m3fn"
    assert dtype_name(problem) == "fp8wo"
