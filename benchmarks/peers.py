"""Peers of benchmarks/cpu.py by family: PyTorch's functions for these products on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import Entrant
from torch import Tensor, nn

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROUP = 128  # int4: elements of K that share a scale and a zero point


@dataclass(frozen=True)
class Weights:
    """Copies of one constant operand, larger together than the cache. raw: [N, K] each (int4: uint8 [N, K / 2], pairs
    along K, low nibble first). scale, zero: one for each output channel [N] or group [groups, N]; None for floats."""

    family: str
    k: int
    n: int
    raw: list[Tensor]
    scale: Tensor | None = None
    zero: Tensor | None = None


def make_weights(family: str, k: int, n: int, copies: int) -> Weights:
    """Return random weights with the magnitudes of trained ones; all copies differ."""
    generator = torch.Generator().manual_seed(k * 7 + n)
    if family in FLOATS:
        base = torch.randn(n, k, generator=generator) / k**0.5
        return Weights(family, k, n, [base.roll(index, 0).to(FLOATS[family]) for index in range(copies)])
    width, dtype = (k // 2, torch.uint8) if family == "int4wo" else (k, torch.int8)
    base = torch.randint(0, 256, (n, width), generator=generator, dtype=torch.uint8).view(dtype)
    raw = [base.roll(index, 0) for index in range(copies)]
    if family == "int8":
        return Weights(family, k, n, raw)
    groups = k // GROUP if family == "int4wo" else 0
    shape = (groups, n) if groups else (n,)
    scale = ((torch.rand(shape, generator=generator) + 0.5) / (k**0.5 * 64)).bfloat16()
    zero = torch.full(shape, 8.0).bfloat16() if groups else None
    return Weights(family, k, n, raw, scale, zero)


def make_activations(family: str, m: int, k: int) -> Tensor:
    """Return random activations [m, k] of the family's dtype."""
    generator = torch.Generator().manual_seed(m)
    if family == "int8":
        return torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int8)
    return torch.randn(m, k, generator=generator).to(FLOATS.get(family, torch.bfloat16))


def eager_entrants(x: Tensor, w: Weights) -> dict[str, Entrant]:
    """Return PyTorch's eager functions for a family, and oneDNN on prepacked weights, which frozen graphs use."""
    return {
        "fp32": _eager_float,
        "bf16": _eager_float,
        "fp16": _eager_float,
        "int8": _eager_int8,
        "int8wo": _eager_int8wo,
        "int4wo": _eager_int4wo,
    }[w.family](x, w)


def _eager_float(x: Tensor, w: Weights) -> dict[str, Entrant]:
    entrants = {"F.linear": Entrant(lambda i: F.linear(x, w.raw[i]))}
    pack, run = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    try:
        packed = [pack(weight, x.shape[0]) for weight in w.raw]
        run(x, packed[0], None, "none", [], "")
    except RuntimeError as error:  # oneDNN lacks this kernel on this CPU (for example fp16 without AVX512-FP16)
        print(f"  oneDNN does not take {w.family} here: {str(error).splitlines()[0]}")
        return entrants
    return {**entrants, "oneDNN prepacked": Entrant(lambda i: run(x, packed[i], None, "none", [], ""))}


def _eager_int8(x: Tensor, w: Weights) -> dict[str, Entrant]:
    return {"_int_mm": Entrant(lambda i: torch._int_mm(x, w.raw[i].t()))}


def _eager_int8wo(x: Tensor, w: Weights) -> dict[str, Entrant]:
    scale = w.scale
    assert scale is not None
    return {
        "_weight_int8pack_mm": Entrant(lambda i: torch._weight_int8pack_mm(x, w.raw[i], scale)),
        "upcast": Entrant(lambda i: F.linear(x, w.raw[i].to(x.dtype)) * scale),
    }


def _eager_int4wo(x: Tensor, w: Weights) -> dict[str, Entrant]:
    """Return ATen's int4 kernel on its own packing, and the multiply by a dequantised weight."""
    assert w.scale is not None
    assert w.zero is not None
    scale, zero = w.scale, w.zero
    # [K / group, N, 2]; ATen dequantises (q - 8) * s + z, so a zero point of 8 corresponds to z = 0.
    pairs = torch.stack((scale, (8 - zero) * scale), dim=-1).contiguous()
    packed = [torch._convert_weight_to_int4pack_for_cpu(_nibbles(raw).int(), 1) for raw in w.raw]
    return {
        "_weight_int4pack_mm_for_cpu": Entrant(lambda i: torch._weight_int4pack_mm_for_cpu(x, packed[i], GROUP, pairs)),
        "upcast": Entrant(lambda i: F.linear(x, dequantise(w.raw[i], scale, zero))),
    }


def _nibbles(raw: Tensor) -> Tensor:
    """Unpack uint8 [N, K / 2] to the values 0..15, [N, K]."""
    return torch.stack((raw & 15, raw >> 4), dim=-1).flatten(1)


def dequantise(raw: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return int4 pairs [N, K / 2] with scale and zero point [groups, N] as a float weight [N, K]."""
    q = _nibbles(raw).to(scale.dtype).unflatten(1, (-1, GROUP))
    return ((q - zero.t()[:, :, None]) * scale.t()[:, :, None]).flatten(1)


class Copies(nn.Module):
    """Module that multiplies by every copy in turn, in one graph; the eager entrants use one copy per run."""

    def __init__(self, w: Weights, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.multiply = multiply
        for index, weight in enumerate(w.raw):
            self.register_buffer(f"weight{index}", weight)
        self.copies = len(w.raw)

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        return [self.multiply(x, getattr(self, f"weight{index}")) for index in range(self.copies)]


def compiled_entrants(x: Tensor, w: Weights) -> dict[str, Entrant]:
    """Return ``torch.compile`` with max-autotune and freezing (slow: seconds to minutes per shape)."""
    import torch._inductor.config as inductor

    scale, zero = w.scale, w.zero

    def multiply(a: Tensor, weight: Tensor) -> Tensor:
        if w.family == "int8":
            return torch._int_mm(a, weight.t())
        if w.family == "int8wo":
            return F.linear(a, weight.to(a.dtype)) * scale
        return F.linear(a, weight if scale is None or zero is None else dequantise(weight, scale, zero))

    torch._dynamo.reset()
    with inductor.patch(freezing=True), torch.no_grad():
        run = torch.compile(Copies(w, multiply).eval(), mode="max-autotune")
        run(x)

    def call(_: int) -> None:
        with torch.no_grad():
            run(x)

    return {"torch.compile": Entrant(call, calls=len(w.raw))}
