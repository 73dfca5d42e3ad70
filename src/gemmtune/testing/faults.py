"""Faults of arithmetic and addressing that real kernels have had, each a small change to a correct kernel.

``FAULTS`` maps the name of a fault to a Fault. Any random operands reveal the faults in ``hostile.FAULTY_KERNELS``. The
faults here are revealed by special operands only: very large or small values, misaligned start addresses, extremes,
ties, NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.problem import Problem, bits
from ..core.weights import QuantWeight
from ..verify.inputs import Inputs
from ..verify.oracle import INTEGERS, apply_epilogue, is_integer, products
from ..verify.verify import Run
from .hostile import correct, stateless, store, value

ALIGNED_BYTES = 16

Change = Callable[[Inputs], Inputs]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a kernel.

    make: returns a kernel with the fault for a Problem. applies: whether the fault changes any result of a Problem.
    """

    make: Callable[[Problem], Run]
    applies: Callable[[Problem], bool]


# --- which Problems a fault applies to ---------------------------------------------------------------------------


def _has_wide_float_a(problem: Problem) -> bool:
    return problem.a.dtype not in INTEGERS and bits(problem.a.dtype) > 8


def _has_wide_float_b(problem: Problem) -> bool:
    return _has_wide_float_a(problem) and problem.b.quant is None


def _has_quantized_b(problem: Problem) -> bool:
    return problem.b.quant is not None


def _has_zero_points(problem: Problem) -> bool:
    return problem.b.quant is not None and problem.b.quant.zero_point


def _has_step_tensor(*kinds: str) -> Callable[[Problem], bool]:
    """Return a predicate of a Problem: whether its epilogue has a step of one of these kinds that takes a tensor."""
    return lambda problem: any(step.takes_tensor and step.kind in kinds for step in problem.epilogue)


def _has_activation(problem: Problem) -> bool:
    """Whether the epilogue has an activation whose value at an infinity is unspecified (``reference._activate``)."""
    return any(step.kind in ("gelu", "gelu_tanh", "silu") for step in problem.epilogue)


def _requantizes(problem: Problem) -> bool:
    """Whether an integer product is scaled per column into an integer output. Such scales may be powers of two."""
    scaled = any(step.kind == "scale" and step.axis == "col" and step.takes_tensor for step in problem.epilogue)
    return is_integer(problem) and problem.out_dtype in ("int8", "uint8") and scaled


def _may_exceed(limit: int) -> Callable[[Problem], bool]:
    """Return a predicate of a Problem: whether a sum of K products can exceed ``limit`` far enough to be detected."""

    def applies(problem: Problem) -> bool:
        largest = {"int8": 127, "uint8": 255}
        if not is_integer(problem) or problem.a.dtype not in largest:
            return False
        margin = 1.1 if problem.out_dtype in ("int8", "uint8") else 1.01  # a tenth of 40 is a step of the output
        return problem.k * largest[problem.a.dtype] * 127 > margin * limit

    return applies


def _has_uint8_pairs(problem: Problem) -> bool:
    return is_integer(problem) and problem.a.dtype == "uint8" and problem.k > 1


# --- other operands ----------------------------------------------------------------------------------------------


def _change_inputs(change: Change) -> Callable[[Problem], Run]:
    """Return a maker of kernels that compute the correct result of changed operands."""

    @stateless
    def make(problem: Problem, inputs: Inputs, out: Tensor) -> None:
        store(problem, value(problem, change(inputs)), out)

    return make


def _change_a(change: Callable[[Tensor], Tensor]) -> Callable[[Problem], Run]:
    return _change_inputs(lambda inputs: replace(inputs, a=change(inputs.a)))


def _change_b(change: Callable[[Tensor], Tensor]) -> Callable[[Problem], Run]:
    return _change_inputs(lambda inputs: replace(inputs, b=change(_matrix(inputs))))


def _change_b_scale(change: Callable[[Tensor, list[float]], Tensor]) -> Callable[[Problem], Run]:
    """Return a maker of kernels that change B's scales.

    change: called with the scales and a list in which a kernel can keep state between calls.
    """

    def make(problem: Problem) -> Run:
        state: list[float] = []

        def change_inputs(inputs: Inputs) -> Inputs:
            weight = _weight(inputs)
            return replace(inputs, b=replace(weight, scale=change(weight.scale, state)))

        return _change_inputs(change_inputs)(problem)

    return make


def _change_b_zero_point(change: Callable[[Tensor, int], Tensor]) -> Callable[[Problem], Run]:
    def change_inputs(inputs: Inputs) -> Inputs:
        weight = _weight(inputs)
        zero = weight.zero_point
        assert zero is not None
        return replace(inputs, b=replace(weight, zero_point=change(zero, 15 if weight.dtype == "int4" else 127)))

    return _change_inputs(change_inputs)


def _change_aux(change: Callable[[Tensor, list[float]], Tensor], *kinds: str) -> Callable[[Problem], Run]:
    """Return a maker of kernels that change the tensors of the epilogue's steps of these kinds.

    change: called with the tensor and a list in which a kernel can keep state between calls, one list per step.
    """

    def make(problem: Problem) -> Run:
        steps = [step for step in problem.epilogue if step.takes_tensor]
        states: list[list[float]] = [[] for _ in steps]

        def change_inputs(inputs: Inputs) -> Inputs:
            triples = zip(steps, inputs.aux, states, strict=True)
            return replace(
                inputs, aux=tuple(change(t, state) if step.kind in kinds else t for step, t, state in triples)
            )

        return _change_inputs(change_inputs)(problem)

    return make


def _matrix(inputs: Inputs) -> Tensor:
    assert isinstance(inputs.b, Tensor)
    return inputs.b


def _weight(inputs: Inputs) -> QuantWeight:
    assert isinstance(inputs.b, QuantWeight)
    return inputs.b


def _clamp_1e4(t: Tensor) -> Tensor:
    return t.clamp(-1e4, 1e4)


def _round_to_tf32(t: Tensor) -> Tensor:
    """Round to 11 significant bits, in float64."""
    mantissa, exponent = torch.frexp(t.double())
    rounded = torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)
    return torch.where(t.isfinite(), rounded, t.double())


def _nan_to_zero(t: Tensor) -> Tensor:
    return torch.where(t.isnan(), torch.zeros_like(t), t)


def _inf_to_zero(t: Tensor) -> Tensor:
    return torch.where(t.isinf(), torch.zeros_like(t), t)


def _limit_to_first_magnitude(tiny: bool) -> Callable[[Tensor, list[float]], Tensor]:
    """Return a change that limits values relative to the median magnitude of the first tensor that it was called with.

    tiny: values below 2^-8 times this median become 0; otherwise values above 2^5 times the median are clamped to it.
    """

    def change(t: Tensor, state: list[float]) -> Tensor:
        values = t.float()
        state.append(float(values.abs().nan_to_num(0.0).median()))
        first_median = state[0]
        if tiny:
            return torch.where(values.abs() < first_median * 2.0**-8, torch.zeros_like(t), t)
        return torch.where(values.abs() > first_median * 2.0**5, (values.sign() * first_median * 2.0**5).to(t.dtype), t)

    return change


def _zero_to_one(t: Tensor) -> Tensor:
    return torch.where(t == 0, torch.ones_like(t), t)


# --- other arithmetic --------------------------------------------------------------------------------------------


def _store_through_epilogue(problem: Problem, acc: Tensor, inputs: Inputs, out: Tensor) -> None:
    """Apply the epilogue to an integer accumulator and store the result in ``out``."""
    zeros = torch.zeros(acc.shape, dtype=torch.float32, device=acc.device)
    store(problem, apply_epilogue(problem, acc, zeros, inputs.aux).value, out)


def saturating(limit: int) -> Callable[[Problem], Run]:
    """Return a maker of kernels whose accumulator stops at ``limit``, as float32 or 24-bit sums do."""

    @stateless
    def make(problem: Problem, inputs: Inputs, out: Tensor) -> None:
        acc, _ = products(problem, inputs.a, inputs.b)
        _store_through_epilogue(problem, acc.clamp(-limit, limit), inputs, out)

    return make


@stateless
def saturating_pairs(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel that adds pairs of products in 16 bits with saturation, as AVX2's vpmaddubsw does."""
    a, b = inputs.a.double(), _matrix(inputs).double()
    acc = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for k in range(0, problem.k, 2):
        acc += (a[:, k : k + 2] @ b[k : k + 2]).clamp(-(2**15), 2**15 - 1)
    _store_through_epilogue(problem, acc.to(torch.int64), inputs, out)


@stateless
def half_away(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel that rounds ties away from zero instead of to even."""
    exact = value(problem, inputs).double()
    rounded = exact.sign() * (exact.abs() + 0.5).floor()
    store(problem, torch.where(exact.isnan(), 0.0, rounded), out)


@stateless
def nan_as_least(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A kernel that converts NaN to the least integer (255 for uint8) instead of 0."""
    exact = value(problem, inputs).double()
    least = float(torch.iinfo(out.dtype).min or 255)
    store(problem, torch.where(exact.isnan(), least, exact), out)


# --- addressing --------------------------------------------------------------------------------------------------


def needs_alignment(of: str) -> Callable[[Problem], Run]:
    """Return a maker of kernels whose output is 0 if an operand's address is not a multiple of 16 bytes.

    of: the operand: A, B, out or epilogue (any of its tensors).
    """

    @stateless
    def make(problem: Problem, inputs: Inputs, out: Tensor) -> None:
        b = inputs.b.data if isinstance(inputs.b, QuantWeight) else inputs.b
        tensors = {"A": (inputs.a,), "B": (b,), "out": (out,), "epilogue": inputs.aux}[of]
        correct(problem)(inputs, out)
        if any(t.data_ptr() % ALIGNED_BYTES for t in tensors):
            out.zero_()

    return make


def dense_batches(of: str) -> Callable[[Problem], Run]:
    """Return a maker of kernels that ignore the batch stride of A (or B) and read its matrices as contiguous."""

    @stateless
    def make(problem: Problem, inputs: Inputs, out: Tensor) -> None:
        t = inputs.a if of == "A" else _matrix(inputs)
        step = max(size * stride for size, stride in zip(t.shape[1:], t.stride()[1:], strict=True))
        wrong = t.as_strided(t.shape, (step, *t.stride()[1:]), t.storage_offset())
        changed = replace(inputs, a=wrong) if of == "A" else replace(inputs, b=wrong)
        store(problem, value(problem, changed), out)

    return make


def _has_batches(problem: Problem) -> bool:
    return problem.family == "bmm" and problem.batch > 1 and min(problem.m, problem.n, problem.k) > 0


def _may_be_misaligned(problem: Problem) -> bool:
    return problem.a.align == 0


def _has_epilogue_tensor(problem: Problem) -> bool:
    return any(step.takes_tensor for step in problem.epilogue)


FAULTS: dict[str, Fault] = {
    "A beyond 1e4 clamped": Fault(_change_a(_clamp_1e4), _has_wide_float_a),
    "B beyond 1e4 clamped": Fault(_change_b(_clamp_1e4), _has_wide_float_b),
    "A multiplied as float16": Fault(_change_a(Tensor.half), lambda p: _has_wide_float_a(p) and p.a.dtype != "float16"),
    "B multiplied as float16": Fault(_change_b(Tensor.half), lambda p: _has_wide_float_b(p) and p.b.dtype != "float16"),
    "A multiplied as tf32": Fault(_change_a(_round_to_tf32), lambda p: _has_wide_float_a(p) and p.a.dtype == "float32"),
    "B multiplied as tf32": Fault(_change_b(_round_to_tf32), lambda p: _has_wide_float_b(p) and p.b.dtype == "float32"),
    "sums saturate at 2^23": Fault(saturating(2**23), _may_exceed(2**23)),
    "sums saturate at 2^24": Fault(saturating(2**24), _may_exceed(2**24)),
    "pairs saturate at 16 bits": Fault(saturating_pairs, _has_uint8_pairs),
    "A must be aligned": Fault(needs_alignment("A"), _may_be_misaligned),
    "B must be aligned": Fault(needs_alignment("B"), lambda p: True),
    "out must be aligned": Fault(needs_alignment("out"), lambda p: True),
    "the epilogue's tensors must be aligned": Fault(needs_alignment("epilogue"), _has_epilogue_tensor),
    "batches of A must be dense": Fault(dense_batches("A"), _has_batches),
    "batches of B must be dense": Fault(dense_batches("B"), _has_batches),
    "NaN in B swallowed": Fault(_change_b(_nan_to_zero), _has_wide_float_b),
    "infinity in B swallowed": Fault(
        _change_b(_inf_to_zero), lambda p: _has_wide_float_b(p) and not _has_activation(p)
    ),
    "NaN in the epilogue swallowed": Fault(
        _change_aux(lambda t, _: _nan_to_zero(t), "scale", "bias", "add", "mul"),
        lambda p: _has_epilogue_tensor(p) and p.out_dtype not in INTEGERS,  # integer outputs convert NaN to 0
    ),
    "infinity in the epilogue swallowed": Fault(
        _change_aux(lambda t, _: _inf_to_zero(t), "bias", "add"),
        lambda p: _has_step_tensor("bias", "add")(p) and not _has_activation(p) and p.out_dtype not in INTEGERS,
    ),
    "sign of B's scales ignored": Fault(_change_b_scale(lambda t, _: t.abs()), _has_quantized_b),
    "B's tiny scales flushed": Fault(_change_b_scale(_limit_to_first_magnitude(tiny=True)), _has_quantized_b),
    "B's huge scales clamped": Fault(_change_b_scale(_limit_to_first_magnitude(tiny=False)), _has_quantized_b),
    "B's zero scales taken for one": Fault(_change_b_scale(lambda t, _: _zero_to_one(t)), _has_quantized_b),
    "zero points rounded": Fault(_change_b_zero_point(lambda z, _: z.round()), _has_zero_points),
    "zero points clamped": Fault(
        _change_b_zero_point(lambda z, top: z.clamp(-top - 1 if top > 15 else 0, top)), _has_zero_points
    ),
    "sign of scales ignored": Fault(_change_aux(lambda t, _: t.abs(), "scale"), _has_step_tensor("scale")),
    "tiny scales flushed": Fault(
        _change_aux(_limit_to_first_magnitude(tiny=True), "scale"),
        lambda p: (
            _has_step_tensor("scale")(p) and p.out_dtype not in INTEGERS
        ),  # to integers, values with such scales round to 0
    ),
    "huge scales clamped": Fault(
        _change_aux(_limit_to_first_magnitude(tiny=False), "scale"), _has_step_tensor("scale")
    ),
    "zero scales taken for one": Fault(_change_aux(lambda t, _: _zero_to_one(t), "scale"), _has_step_tensor("scale")),
    "ties rounded away from zero": Fault(half_away, _requantizes),
    "NaN made the least integer": Fault(
        nan_as_least, lambda p: p.out_dtype in INTEGERS and any(s.dtype in ("float32", "bfloat16") for s in p.epilogue)
    ),
}
