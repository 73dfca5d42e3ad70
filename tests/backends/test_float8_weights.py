"""float8_e4m3fn weights beside floating activations, in every native kernel: each byte is the number it stands for."""

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


def every_byte() -> Tensor:
    """float8 [N, K]: each row has all 256 bytes, every row in another order."""
    values = torch.arange(256, dtype=torch.uint8)
    return torch.stack([values.roll(place) for place in range(N)]).view(torch.float8_e4m3fn)


def one_of_a_kind(dtype: str) -> list[Candidate]:
    """A native candidate of each template, instruction set and panel width."""
    problem = weight_only_problem(K, N, K, float8=True, dtype=dtype, scale_dtype="float32")
    kinds: dict[tuple[object, ...], Candidate] = {}
    for item in backends.get("native").candidates(problem, current_target(torch.device("cpu"))):
        if isinstance(item, Candidate):
            kinds.setdefault((item.template, item["isa"], item["nr"]), item)
    return list(kinds.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_byte_is_converted_exactly(dtype: str) -> None:
    problem = weight_only_problem(K, N, K, float8=True, dtype=dtype, scale_dtype="float32")
    native, weight, scale = backends.get("native"), every_byte(), torch.rand(N) + 0.5
    is_nan = (weight.view(torch.uint8) & 0x7F) == 0x7F
    numbers = weight.view(torch.uint8).masked_fill(is_nan, 0).view(torch.float8_e4m3fn)
    x = torch.eye(K, dtype=getattr(torch, dtype))
    wanted = (numbers.float() * scale[:, None]).t().to(x.dtype)
    candidates = one_of_a_kind(dtype)
    assert {str(c["isa"]) for c in candidates} >= {"portable"}
    for candidate in candidates:
        kernel = native.load(Artifact(candidate, native.source_digest()), problem)
        packed = kernel.pack(quant_weight(weight.t(), scale, None, 8, None, K))
        assert torch.equal(native.unpack(packed).data.view(torch.uint8), weight.t().view(torch.uint8)), candidate.id
        out = torch.empty(K, N, dtype=x.dtype)
        kernel.run(x, packed, (), out)
        assert torch.equal(out.isnan().any(0), is_nan.any(1)), candidate.id
        kernel.run(x, kernel.pack(quant_weight(numbers.t(), scale, None, 8, None, K)), (), out)
        assert torch.equal(out, wanted), candidate.id


def test_scales_by_groups_agree_with_dequantised_values() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 96).to(torch.float8_e4m3fn)
    scale, x = torch.rand(3, 48) + 0.5, torch.randn(5, 96)
    packed = gemmtune.pack(weight, scale=scale, group_size=32)
    wanted = x @ (weight.float() * scale.t().repeat_interleave(32, 1)).t()
    torch.testing.assert_close(gemmtune.mixed_mm(x, packed), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gemmtune.mixed_mm(x, weight.t(), scale, group_size=32), wanted, rtol=1e-5, atol=1e-4)


def test_what_is_no_float8_weight_is_refused() -> None:
    x, scale = torch.randn(2, 16), torch.ones(4)
    with pytest.raises(DtypeError, match="int8, float8_e4m3fn"):
        gemmtune.mixed_mm(x, torch.zeros(4, 16, dtype=torch.float8_e5m2).t(), scale)
    with pytest.raises(ValueError, match="no zero point"):
        gemmtune.mixed_mm(x, torch.zeros(4, 16).to(torch.float8_e4m3fn).t(), scale, torch.ones(4))


def test_its_name_on_the_command_line() -> None:
    problem = build(8, 64, 64, "fp8wo")
    assert problem.b.dtype == "float8_e4m3fn"
    assert dtype_name(problem) == "fp8wo"
