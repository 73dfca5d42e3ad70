"""Faults of the arithmetic and of the addressing that kernels have had: each is a small change around a right answer.

``FAULTS`` maps a fault's name to a Fault. ``hostile.WRONG`` holds those that any random operands show; these here show
on some operands only: very large or small ones, ones that start off a boundary, extremes, ties, NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.problem import Problem, bits
from ..core.weights import QuantWeight
from ..verify.inputs import Inputs
from ..verify.oracle import INTEGERS, finish, is_integer, products
from ..verify.verify import Run
from .hostile import correct, store, value

ALIGNED_BYTES = 16

Change = Callable[[Inputs], Inputs]


@dataclass(frozen=True, slots=True)
class Fault:
    """make: the kernel with the fault, for a Problem. applies: whether the fault changes any result of the Problem."""

    make: Callable[[Problem], Run]
    applies: Callable[[Problem], bool]


# --- which Problems a fault applies to ---------------------------------------------------------------------------


def _float_a(problem: Problem) -> bool:
    return problem.a.dtype not in INTEGERS and bits(problem.a.dtype) > 8


def _float_b(problem: Problem) -> bool:
    return _float_a(problem) and problem.b.quant is None


def _quantized(problem: Problem) -> bool:
    return problem.b.quant is not None


def _zero_points(problem: Problem) -> bool:
    return problem.b.quant is not None and problem.b.quant.zero_point


def _has(*kinds: str) -> Callable[[Problem], bool]:
    """Whether the epilogue has a tensor of one of these steps."""
    return lambda problem: any(step.takes_tensor and step.kind in kinds for step in problem.epilogue)


def _activated(problem: Problem) -> bool:
    """Whether the epilogue has an activation, whose value at an infinity is open (``reference._activate``)."""
    return any(step.kind in ("gelu", "gelu_tanh", "silu") for step in problem.epilogue)


def _requantizes(problem: Problem) -> bool:
    """Whether the epilogue ends in an integer with scales that may be powers of two."""
    scaled = any(step.kind == "scale" and step.axis == "col" and step.takes_tensor for step in problem.epilogue)
    return is_integer(problem) and problem.out_dtype in ("int8", "uint8") and scaled


def _exceeds(limit: int) -> Callable[[Problem], bool]:
    """Whether a sum of K products can exceed ``limit``."""

    def applies(problem: Problem) -> bool:
        most = {"int8": 127, "uint8": 255}
        if not is_integer(problem) or problem.a.dtype not in most:
            return False
        seen = 1.1 if problem.out_dtype in ("int8", "uint8") else 1.01  # a tenth of 40 is a step of the output
        return problem.k * most[problem.a.dtype] * 127 > seen * limit

    return applies


def _pairs(problem: Problem) -> bool:
    return is_integer(problem) and problem.a.dtype == "uint8" and problem.k > 1


# --- other operands ----------------------------------------------------------------------------------------------


def _with(change: Change) -> Callable[[Problem], Run]:
    """A right kernel on changed operands."""

    def make(problem: Problem) -> Run:
        def run(inputs: Inputs, out: Tensor) -> None:
            store(problem, value(problem, change(inputs)), out)

        return run

    return make


def _on_a(change: Callable[[Tensor], Tensor]) -> Callable[[Problem], Run]:
    return _with(lambda inputs: replace(inputs, a=change(inputs.a)))


def _on_b(change: Callable[[Tensor], Tensor]) -> Callable[[Problem], Run]:
    return _with(lambda inputs: replace(inputs, b=change(_matrix(inputs))))


def _on_scale(change: Callable[[Tensor, list[float]], Tensor]) -> Callable[[Problem], Run]:
    """Changes B's scales; the list is the kernel's own, from call to call."""

    def make(problem: Problem) -> Run:
        seen: list[float] = []

        def changed(inputs: Inputs) -> Inputs:
            weight = _weight(inputs)
            return replace(inputs, b=replace(weight, scale=change(weight.scale, seen)))

        return _with(changed)(problem)

    return make


def _on_zero(change: Callable[[Tensor, int], Tensor]) -> Callable[[Problem], Run]:
    def changed(inputs: Inputs) -> Inputs:
        weight = _weight(inputs)
        zero = weight.zero_point
        assert zero is not None
        return replace(inputs, b=replace(weight, zero_point=change(zero, 15 if weight.dtype == "int4" else 127)))

    return _with(changed)


def _on_aux(change: Callable[[Tensor, list[float]], Tensor], *kinds: str) -> Callable[[Problem], Run]:
    """Changes the epilogue's tensors of these kinds; a list for each is the kernel's own, from call to call."""

    def make(problem: Problem) -> Run:
        steps = [step for step in problem.epilogue if step.takes_tensor]
        seen: list[list[float]] = [[] for _ in steps]

        def changed(inputs: Inputs) -> Inputs:
            each = zip(steps, inputs.aux, seen, strict=True)
            return replace(inputs, aux=tuple(change(t, own) if step.kind in kinds else t for step, t, own in each))

        return _with(changed)(problem)

    return make


def _matrix(inputs: Inputs) -> Tensor:
    assert isinstance(inputs.b, Tensor)
    return inputs.b


def _weight(inputs: Inputs) -> QuantWeight:
    assert isinstance(inputs.b, QuantWeight)
    return inputs.b


def _clamped(t: Tensor) -> Tensor:
    return t.clamp(-1e4, 1e4)


def _tf32(t: Tensor) -> Tensor:
    """Rounded to 11 significant bits."""
    mantissa, exponent = torch.frexp(t.double())
    rounded = torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)
    return torch.where(t.isfinite(), rounded, t.double())


def _no_nan(t: Tensor) -> Tensor:
    return torch.where(t.isnan(), torch.zeros_like(t), t)


def _no_inf(t: Tensor) -> Tensor:
    return torch.where(t.isinf(), torch.zeros_like(t), t)


def _beyond_usual(tiny: bool) -> Callable[[Tensor, list[float]], Tensor]:
    """Flushes what is far below the tensor that came first (or cuts off what is far above it)."""

    def change(t: Tensor, seen: list[float]) -> Tensor:
        wide = t.float()
        seen.append(float(wide.abs().nan_to_num(0.0).median()))
        usual = seen[0]
        if tiny:
            return torch.where(wide.abs() < usual * 2.0**-8, torch.zeros_like(t), t)
        return torch.where(wide.abs() > usual * 2.0**5, (wide.sign() * usual * 2.0**5).to(t.dtype), t)

    return change


def _zero_as_one(t: Tensor) -> Tensor:
    return torch.where(t == 0, torch.ones_like(t), t)


# --- other arithmetic --------------------------------------------------------------------------------------------


def _through(problem: Problem, acc: Tensor, inputs: Inputs, out: Tensor) -> None:
    """The epilogue on an accumulator of integers, into ``out``."""
    zeros = torch.zeros(acc.shape, dtype=torch.float32, device=acc.device)
    store(problem, finish(problem, acc, zeros, inputs.aux).value, out)


def saturating(limit: int) -> Callable[[Problem], Run]:
    """The accumulator stops at ``limit``, as float32 or 24-bit sums do."""

    def make(problem: Problem) -> Run:
        def run(inputs: Inputs, out: Tensor) -> None:
            acc, _ = products(problem, inputs.a, inputs.b)
            _through(problem, acc.clamp(-limit, limit), inputs, out)

        return run

    return make


def saturating_pairs(problem: Problem) -> Run:
    """Two products are added in 16 bits with saturation, as AVX2's vpmaddubsw does."""

    def run(inputs: Inputs, out: Tensor) -> None:
        a, b = inputs.a.double(), _matrix(inputs).double()
        acc = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
        for k in range(0, problem.k, 2):
            acc += (a[:, k : k + 2] @ b[k : k + 2]).clamp(-(2**15), 2**15 - 1)
        _through(problem, acc.to(torch.int64), inputs, out)

    return run


def half_away(problem: Problem) -> Run:
    """Rounds ties away from zero where they go to even."""

    def run(inputs: Inputs, out: Tensor) -> None:
        exact = value(problem, inputs).double()
        away = exact.sign() * (exact.abs() + 0.5).floor()
        store(problem, torch.where(exact.isnan(), 0.0, away), out)

    return run


def nan_as_least(problem: Problem) -> Run:
    """Makes the least integer of NaN."""

    def run(inputs: Inputs, out: Tensor) -> None:
        exact = value(problem, inputs).double()
        least = float(torch.iinfo(out.dtype).min or 255)
        store(problem, torch.where(exact.isnan(), least, exact), out)

    return run


# --- addressing --------------------------------------------------------------------------------------------------


def needs_alignment(of: str) -> Callable[[Problem], Run]:
    """Leaves its output at 0 where an operand starts off a 16-byte boundary."""

    def make(problem: Problem) -> Run:
        def run(inputs: Inputs, out: Tensor) -> None:
            b = inputs.b.data if isinstance(inputs.b, QuantWeight) else inputs.b
            named = {"A": (inputs.a,), "B": (b,), "out": (out,), "epilogue": inputs.aux}[of]
            correct(problem)(inputs, out)
            if any(t.data_ptr() % ALIGNED_BYTES for t in named):
                out.zero_()

        return run

    return make


def one_epilogue_tensor_aligned(place: int) -> Callable[[Problem], Run]:
    """The same for one of the epilogue's tensors."""

    def make(problem: Problem) -> Run:
        def run(inputs: Inputs, out: Tensor) -> None:
            correct(problem)(inputs, out)
            if inputs.aux[place].data_ptr() % ALIGNED_BYTES:
                out.zero_()

        return run

    return make


def dense_batches(of: str) -> Callable[[Problem], Run]:
    """Takes the matrices of A (or B) to lie one behind another."""

    def make(problem: Problem) -> Run:
        def run(inputs: Inputs, out: Tensor) -> None:
            t = inputs.a if of == "A" else _matrix(inputs)
            step = max(size * stride for size, stride in zip(t.shape[1:], t.stride()[1:], strict=True))
            wrong = t.as_strided(t.shape, (step, *t.stride()[1:]), t.storage_offset())
            changed = replace(inputs, a=wrong) if of == "A" else replace(inputs, b=wrong)
            store(problem, value(problem, changed), out)

        return run

    return make


def _two_batches(problem: Problem) -> bool:
    return problem.family == "bmm" and problem.batch > 1 and min(problem.m, problem.n, problem.k) > 0


def _can_shift(problem: Problem) -> bool:
    return problem.a.align == 0


def _tensors(problem: Problem) -> bool:
    return any(step.takes_tensor for step in problem.epilogue)


FAULTS: dict[str, Fault] = {
    "A beyond 1e4 clamped": Fault(_on_a(_clamped), _float_a),
    "B beyond 1e4 clamped": Fault(_on_b(_clamped), _float_b),
    "A multiplied as float16": Fault(_on_a(Tensor.half), lambda p: _float_a(p) and p.a.dtype != "float16"),
    "B multiplied as float16": Fault(_on_b(Tensor.half), lambda p: _float_b(p) and p.b.dtype != "float16"),
    "A multiplied as tf32": Fault(_on_a(_tf32), lambda p: _float_a(p) and p.a.dtype == "float32"),
    "B multiplied as tf32": Fault(_on_b(_tf32), lambda p: _float_b(p) and p.b.dtype == "float32"),
    "sums saturate at 2^23": Fault(saturating(2**23), _exceeds(2**23)),
    "sums saturate at 2^24": Fault(saturating(2**24), _exceeds(2**24)),
    "pairs saturate at 16 bits": Fault(saturating_pairs, _pairs),
    "A must be aligned": Fault(needs_alignment("A"), _can_shift),
    "B must be aligned": Fault(needs_alignment("B"), lambda p: True),
    "out must be aligned": Fault(needs_alignment("out"), lambda p: True),
    "the epilogue's tensors must be aligned": Fault(needs_alignment("epilogue"), _tensors),
    "batches of A must be dense": Fault(dense_batches("A"), _two_batches),
    "batches of B must be dense": Fault(dense_batches("B"), _two_batches),
    "NaN in B swallowed": Fault(_on_b(_no_nan), _float_b),
    "infinity in B swallowed": Fault(_on_b(_no_inf), lambda p: _float_b(p) and not _activated(p)),
    "NaN in the epilogue swallowed": Fault(
        _on_aux(lambda t, _: _no_nan(t), "scale", "bias", "add", "mul"),
        lambda p: _tensors(p) and p.out_dtype not in INTEGERS,  # which make 0 of NaN
    ),
    "infinity in the epilogue swallowed": Fault(
        _on_aux(lambda t, _: _no_inf(t), "bias", "add"),
        lambda p: _has("bias", "add")(p) and not _activated(p) and p.out_dtype not in INTEGERS,
    ),
    "sign of B's scales ignored": Fault(_on_scale(lambda t, _: t.abs()), _quantized),
    "B's tiny scales flushed": Fault(_on_scale(_beyond_usual(tiny=True)), _quantized),
    "B's huge scales clamped": Fault(_on_scale(_beyond_usual(tiny=False)), _quantized),
    "B's zero scales taken for one": Fault(_on_scale(lambda t, _: _zero_as_one(t)), _quantized),
    "zero points rounded": Fault(_on_zero(lambda z, _: z.round()), _zero_points),
    "zero points clamped": Fault(_on_zero(lambda z, top: z.clamp(-top - 1 if top > 15 else 0, top)), _zero_points),
    "sign of scales ignored": Fault(_on_aux(lambda t, _: t.abs(), "scale"), _has("scale")),
    "tiny scales flushed": Fault(
        _on_aux(_beyond_usual(tiny=True), "scale"),
        lambda p: _has("scale")(p) and p.out_dtype not in INTEGERS,  # where what they scale rounds to 0
    ),
    "huge scales clamped": Fault(_on_aux(_beyond_usual(tiny=False), "scale"), _has("scale")),
    "zero scales taken for one": Fault(_on_aux(lambda t, _: _zero_as_one(t), "scale"), _has("scale")),
    "ties rounded away from zero": Fault(half_away, _requantizes),
    "NaN made the least integer": Fault(
        nan_as_least, lambda p: p.out_dtype in INTEGERS and any(s.dtype in ("float32", "bfloat16") for s in p.epilogue)
    ),
}
