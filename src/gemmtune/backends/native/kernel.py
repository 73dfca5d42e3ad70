"""Loaded native kernels: a C++ object, and the pointers that it is called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...core.candidate import Candidate
from ...core.epilogue import GATES, Epilogue, gate_of
from ...core.errors import KernelError
from ...core.memory import LOWEST_USUAL_ADDRESS, require_kernel_operands
from ...core.problem import Problem
from ...core.weights import PackedWeight, QuantWeight
from ..base import Kernel
from .layout import Packing, pack
from .space import why_not_direct
from .traits import (
    AMX_BLOCK_BYTES,
    AMX_LEAST_ROWS,
    AMX_TILE_ROWS,
    AXES,
    DTYPES,
    GATE_ACTIVATIONS,
    LANES,
    PACK_A,
    STEP_KINDS,
    UNITS,
    Unit,
    can_multiply,
)

# "Per channel" in the C++ code: one group that is longer than any K.
_ONE_GROUP = 1 << 40
_MAX_ROWS = 1024  # of A in a block


def unit_of(problem: Problem, candidate: Candidate) -> Unit:
    """Return the Unit that a candidate names. Raises KernelError when no unit has its instruction set for these
    dtypes."""
    for unit in UNITS:
        if unit.isa == candidate["isa"] and can_multiply(unit, problem.a.dtype, problem.b.dtype):
            return unit
    raise KernelError(f"{candidate.id} does not multiply {problem.a.dtype} by {problem.b.dtype}")


def load(problem: Problem, candidate: Candidate) -> Kernel:
    """Return the kernel of a candidate. Raises KernelError when its configuration cannot run on this CPU."""
    from . import _native

    unit = unit_of(problem, candidate)
    try:
        native = _native.Kernel(str(candidate["isa"]), _config(problem, candidate, unit))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise KernelError(f"{candidate.id} cannot run {problem.key}: {error}") from None
    if candidate.template in ("raw", "dot"):
        return RawKernel(problem, candidate, native)
    return PackedKernel(problem, candidate, native, unit)


def packing_of(problem: Problem, candidate: Candidate) -> str:
    """Return the layout that a ``packed`` or ``expand`` kernel reads. Raises KernelError when no unit has its
    instruction set for these dtypes."""
    return _packing(problem, candidate, unit_of(problem, candidate)).name


def _packing(problem: Problem, candidate: Candidate, unit: Unit) -> Packing:
    halves = problem.gate is not None
    return Packing.of(unit.compute, problem.b.dtype, int(candidate["nr"]), halves)


def _config(problem: Problem, candidate: Candidate, unit: Unit) -> dict[str, Any]:
    config = dict(candidate.config)
    quant = problem.b.quant
    tm, tn, tk = (int(part) for part in str(config["grid"]).split("x"))
    if config["pack_a"] == "none" and why_not_direct(problem, unit):
        raise KernelError(f"{candidate.id}: {why_not_direct(problem, unit)}")
    nr, nc = int(config["nr"]), int(config["nc"])
    if nr % LANES or config["order"] not in ("a", "b"):
        raise KernelError(f"{candidate.id}: nr must be a multiple of {LANES}, and order a or b")
    return {
        "a": DTYPES[problem.a.dtype],
        "b": DTYPES[problem.b.dtype],
        "out": DTYPES[problem.out_dtype],
        "compute": unit.compute.code,
        "n": problem.n,
        "k": problem.k,
        "nv": nr // LANES,
        "mr": int(config["mr"]),
        "kc": int(config["kc"]),
        "mc": _rows_of_a_block(problem, candidate, unit),
        "nc": nc,
        "order": 1 if config["order"] == "a" else 0,
        "tm": tm,
        "tn": tn,
        "tk": tk,
        "pack_a": PACK_A.index(str(config["pack_a"])),
        "prefetch": int(config["prefetch"]),
        "expand": candidate.template == "expand",
        "raw": candidate.template in ("raw", "dot"),
        "dot": candidate.template == "dot",
        "group": 0 if quant is None else min(quant.group or _ONE_GROUP, _ONE_GROUP),
        "scale_dtype": DTYPES[quant.scale_dtype] if quant is not None else 0,
        "zero_point": quant is not None and quant.zero_point,
        "zero_offset": 8.0 if problem.b.dtype == "int4" else 0.0,
        **encoded_steps(problem.epilogue),
    }


def _rows_of_a_block(problem: Problem, candidate: Candidate, unit: Unit) -> int:
    """Return how many rows of A, at most, are multiplied by all of B before the next ones.

    With AMX, so many that their part of a K block fits ``AMX_BLOCK_BYTES``: the tiles multiply faster than the caches
    behind the L2 deliver A. An expanded block of B would be expanded again for each block of rows. Otherwise 1024, so
    that scratch memory stays bounded for any M.
    """
    if candidate["mc"] or unit.isa != "amx" or candidate.template != "packed":
        return int(candidate["mc"]) or _MAX_ROWS
    row_bytes = unit.compute.nbytes * min(int(candidate["kc"]) or problem.k, problem.k)
    fitting = AMX_BLOCK_BYTES // row_bytes // AMX_TILE_ROWS * AMX_TILE_ROWS
    return min(max(fitting, AMX_LEAST_ROWS), _MAX_ROWS)


def encoded_steps(epilogue: Epilogue) -> dict[str, Any]:
    """Return the entries ``steps`` and ``gate`` of a C++ configuration."""
    gate = gate_of(epilogue)
    steps = [
        (
            STEP_KINDS.index(step.kind),
            AXES.index(step.axis),
            DTYPES[step.dtype or "float32"],
            step.takes_tensor,
            step.value,
            step.lo,
            step.hi,
        )
        for step in (epilogue if gate is None else epilogue[:-1])
    ]
    return {"steps": steps, "gate": GATE_ACTIVATIONS.index("" if gate is None else GATES[gate.kind])}


def aux_pointers(aux: Sequence[Tensor]) -> list[int]:
    """Return (address, row stride, batch stride) of each epilogue tensor, in one flat list."""
    flat: list[int] = []
    for tensor in aux:
        strides = tensor.stride()
        row = strides[-2] if len(strides) > 1 else 0
        address = tensor.data_ptr()
        if address < LOWEST_USUAL_ADDRESS:
            require_kernel_operands(tensor)
        flat += (address, row, strides[0] if len(strides) > 2 else 0)
    return flat


class PackedKernel(Kernel):
    """A kernel that reads a constant weight in its packed layout."""

    def __init__(self, problem: Problem, candidate: Candidate, native: Any, unit: Unit) -> None:
        self.problem, self.candidate = problem, candidate
        self._packing = _packing(problem, candidate, unit)
        self.packing = self._packing.name
        self._launch = native.run_packed
        # Which of (compensation | scales | zeros) PackedWeight.data contains.
        self._has_compensation = self._packing.kp == 4
        self._is_quantised = problem.b.quant is not None
        self._has_zero_points = problem.b.quant is not None and problem.b.quant.zero_point
        self.workspace_bytes = _scratch_bytes(problem, candidate)

    def run(self, a: Tensor, b: PackedWeight, aux: Sequence[Tensor], out: Tensor) -> None:
        data = b.data
        rows, columns = a.stride()  # stride(0), size(0) or len() would take twice as long
        a_ptr, b_ptr = a.data_ptr(), data[0].data_ptr()
        if a_ptr < LOWEST_USUAL_ADDRESS or b_ptr < LOWEST_USUAL_ADDRESS:
            require_kernel_operands(a, *data)
        if len(data) == 1:
            self._launch(
                a.shape[0], a_ptr, rows, columns, b_ptr, 0, 0, 0,
                out.data_ptr(), out.stride()[0], aux_pointers(aux) if aux else [],
            )  # fmt: skip
            return
        self._launch(
            a.shape[0], a_ptr, rows, columns, b_ptr,
            data[1].data_ptr() if self._is_quantised else 0,
            data[2].data_ptr() if self._has_zero_points else 0,
            data[1].data_ptr() if self._has_compensation else 0,
            out.data_ptr(), out.stride()[0], aux_pointers(aux) if aux else [],
        )  # fmt: skip

    def pack(self, b: Tensor | QuantWeight) -> PackedWeight:
        return pack(self._packing, b, self.problem)


class RawKernel(Kernel):
    """A kernel that reads an unpacked B, block by block through scratch memory or along its K.

    It is for operands that change from call to call, batched ones too.
    """

    def __init__(self, problem: Problem, candidate: Candidate, native: Any) -> None:
        self.problem, self.candidate = problem, candidate
        self._launch = native.run_raw
        self.workspace_bytes = _scratch_bytes(problem, candidate)

    def run(self, a: Tensor, b: Tensor, aux: Sequence[Tensor], out: Tensor) -> None:
        a_ptr, b_ptr, out_ptr = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if a_ptr < LOWEST_USUAL_ADDRESS or b_ptr < LOWEST_USUAL_ADDRESS:
            require_kernel_operands(a, b)
        if a.dim() == 2:
            left, right = (a_ptr, *a.stride(), 0), (b_ptr, *b.stride(), 0)
            self._launch(1, a.shape[0], left, right, out_ptr, out.stride()[0], 0, aux_pointers(aux))
            return
        batch, rows, columns = a.stride()
        left = (a_ptr, rows, columns, batch)
        batch, rows, columns = b.stride()
        right = (b_ptr, rows, columns, batch)
        pointers = aux_pointers(aux)
        self._launch(a.shape[0], a.shape[1], left, right, out_ptr, out.stride(1), out.stride(0), pointers)


def _scratch_bytes(problem: Problem, candidate: Candidate) -> int:
    """Return the approximate bytes of scratch memory per thread: packed rows of A, accumulators and an expanded
    block."""
    rows = min(problem.m, _rows_of_a_block(problem, candidate, unit_of(problem, candidate)))
    packed = 0 if candidate["pack_a"] == "none" else rows * problem.k * 4
    block = 0 if candidate.template in ("packed", "dot") else int(candidate["kc"]) * int(candidate["nr"]) * 4
    return packed + block + rows * int(candidate["nr"]) * int(candidate["nc"]) * 4
