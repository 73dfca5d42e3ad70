"""A call that the dispatch cache does not serve: a kernel or PyTorch is chosen, specialised, cached and run.

``serve_miss`` is for ordinary operands, ``run_uncached`` for all others and for what must not be remembered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.aten.steps import dtype_of
from ..backends.base import Kernel
from ..core import checks, devices
from ..core.call import Call
from ..core.memory import require_memory
from ..core.torch_compat import DisableTorchFunction, RecordFunction, increment_version, profiler
from .another_m import described_entry
from .fallback import run_fallback
from .forms import Forms
from .profiling import run_profiled
from .runtime import RUNTIME, Choice
from .specialize import (
    LAUNCH_ERRORS,
    FunctionalFn,
    TorchFunction,
    raw_reader,
    shares_storage,
    specialize,
    warn_refused,
    with_device_guard,
)
from .torch_state import are_ordinary, is_shape_only, needs_torch


class CacheMiss(NamedTuple):
    """A call that the dispatch cache does not serve.

    key: under which its specialised function may be cached (None: the operands have no key). args: the operands in the
    order of launches, then the epilogue's tensors and out. guarded: the tensors among them (all but a PackedWeight).
    raw: the attribute of the PackedWeight among ``args`` that serves in its place, for a weight that is kept in both
    forms; empty where the args are the operands. forms: which of the two serves each M; None for other weights.
    """

    key: Any
    args: tuple[Any, ...]
    guarded: tuple[Any, ...]
    raw: str = ""
    forms: Forms | None = None

    @property
    def is_ordinary(self) -> bool:
        """Whether a kernel may serve the call. Raises TypeError for operands without memory (``require_memory``)."""
        require_memory(*self.guarded)
        return self.key is not None and RUNTIME.observer is None and are_ordinary(self.guarded)


def serve_miss(
    miss: CacheMiss, op: str, call: Call, torch_function: TorchFunction | None = None, *, differentiable: bool = True,
    out: Tensor | None = None, described_key: Any = None, sized: Collection[int] = (),
) -> Tensor:  # fmt: skip
    """Serve a Call of ordinary operands, and cache the function that served it unless only this call may have it.

    torch_function: PyTorch's function for just this call; None where there is none. differentiable: False for ops
    without a gradient. described_key: of ``cache.DESCRIBED_CALLS``, for calls with other M; None where none may be
    served by this one. sized: as for ``described_entry``. Raises GradError, and what ``checks.require_output`` raises.
    """
    generation = RUNTIME.generation
    args = miss.args if out is None else miss.args[:-1]
    if miss.raw:
        args = (args[0], getattr(args[1], miss.raw), *args[2:])
    if devices.is_capturing(call.a.device) or not _is_cacheable(miss, args, call, out, differentiable):
        return run_uncached(op, call, out, differentiable=differentiable)
    grad_is_wanted = needs_grad(miss.guarded)
    has_backward = torch_function is not None and torch_function.backward is not None
    takes_kernel = not call.problem.is_empty and (has_backward or not grad_is_wanted)
    choice = RUNTIME.choose(call.problem, call.packed, call.a.device) if takes_kernel else Choice(None)
    kernel = choice.kernel
    if kernel is None and call.packed is not None:
        return run_uncached(op, call, out, differentiable=differentiable)
    run = specialize(call, args, kernel, torch_function, needs_grad=grad_is_wanted, has_out=out is not None)
    if miss.raw:
        run = raw_reader(miss.raw, len(miss.args))(run)
    described = described_entry(
        described_key, call, args, miss.guarded, choice.plan, torch_function, needs_grad=grad_is_wanted, out=out,
        raw=miss.raw, forms=miss.forms, sized=sized,
    )  # fmt: skip
    RUNTIME.cache_entry(miss.key, run, miss.guarded, generation, described)
    return run_profiled(op, run, miss.args)


def serve_with_torch(miss: CacheMiss, function: FunctionalFn) -> Tensor:
    """Serve a call that only PyTorch can serve, and cache ``function``, which takes operands in any state."""
    require_memory(*miss.args)
    generation = RUNTIME.generation
    result = run_profiled(miss.key, function, miss.args)
    RUNTIME.cache_entry(miss.key, function, miss.guarded, generation)
    return result


def _is_cacheable(miss: CacheMiss, args: Sequence[Any], call: Call, out: Tensor | None, differentiable: bool) -> bool:
    """Whether what serves this call serves all like it: no error comes of it, and no operand has to be copied."""
    count = len(args) - len(call.aux)
    if not _are_views(args[count:], call.aux) or (out is not None and not _is_writable(out, call)):
        return False
    return not needs_grad(miss.guarded) or (differentiable and call.packed is None and out is None)


def needs_grad(tensors: Sequence[Tensor]) -> bool:
    """Whether gradients are on and a tensor requires one."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _are_views(tensors: Sequence[Tensor], aux: Sequence[Tensor]) -> bool:
    """Whether the Call's epilogue tensors are views of the caller's: of the same elements in the same order."""
    return all(
        t.numel() == u.numel() and t.is_contiguous() and t.data_ptr() == u.data_ptr()
        for t, u in zip(tensors, aux, strict=True)
    )


def _is_writable(out: Tensor, call: Call) -> bool:
    """Whether a kernel may write ``out`` where it shares no memory with an operand."""
    same = out.shape == call.shape and out.dtype == dtype_of(call.problem.out_dtype) and out.device == call.a.device
    return same and out.is_contiguous()


def run_uncached(op: str, call: Call, out: Tensor | None = None, *, differentiable: bool = True) -> Tensor:
    """Run a Call by the kernel that serves it, or by plain PyTorch, and cache nothing. out: written and returned.

    Raises GradError for gradients through packed or integer weights, and what ``checks.require_output`` raises.
    """
    if profiler._is_profiler_enabled:
        operands = (call.a, call.b, *call.aux)
        with RecordFunction(f"gemmtune::{op}", operands if out is None else (*operands, out)):
            return _run_observed(op, call, out, differentiable)
    return _run_observed(op, call, out, differentiable)


def _run_observed(op: str, call: Call, out: Tensor | None, differentiable: bool) -> Tensor:
    observer = RUNTIME.observer  # read once: another thread may end its recording
    if observer is not None:
        observer(call.problem, call.a.device)
        with DisableTorchFunction():
            return _run(op, call, out, differentiable)
    return _run(op, call, out, differentiable)


def _run(op: str, call: Call, out: Tensor | None, differentiable: bool) -> Tensor:
    if call.packed is not None or not differentiable:
        checks.require_no_grad(op, "a packed weight" if call.packed is not None else "this product", *call.tensors)
    dtype = dtype_of(call.problem.out_dtype)
    if out is not None:
        checks.require_no_grad_with_out(op, out, *call.tensors)
        checks.require_output(out, call.shape, dtype, call.a.device)
        require_memory(out)
    kernel = None if _is_for_torch(call) else _find_kernel(call)
    if kernel is None:
        require_memory(*call.tensors)
        result = _shape_only_result(call, dtype) if is_shape_only(call.a) else run_fallback(call)
    else:
        try:
            return _run_kernel(kernel, call, out)
        except LAUNCH_ERRORS as error:
            error.__traceback__ = None  # its frames hold the memory that the launch could allocate
            warn_refused(kernel, error)
            result = run_fallback(call)
    return result if out is None else out.copy_(result)


def _run_kernel(kernel: Kernel, call: Call, out: Tensor | None) -> Tensor:
    a = call.a.contiguous() if call.problem.b.constant else call.a
    if out is not None and out.is_contiguous() and not needs_torch(out) and not shares_storage(out, call.tensors):
        run = with_device_guard(kernel.run, kernel, call.a.device)
        run(a, call.b, call.aux, out.view(call.problem.out_shape))
        if not kernel.counts_writes:
            increment_version((out,))
        return out
    functional = with_device_guard(kernel.functional, kernel, call.a.device)
    result: Tensor = functional(a, call.b, call.aux).view(call.shape)
    return result if out is None else out.copy_(result)


def _is_for_torch(call: Call) -> bool:
    """Whether only PyTorch can serve the Call: nothing to compute, unusual operands or state, or a gradient."""
    return call.problem.is_empty or needs_grad(call.tensors) or needs_torch(*call.tensors)


def _find_kernel(call: Call) -> Kernel | None:
    return RUNTIME.kernel_for(call.problem, call.packed, call.a.device)


def _shape_only_result(call: Call, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the result's shape and dtype without values, for operands without values."""
    if call.packed is not None or not call.problem.a.dtype.startswith(("float32", "float64", "bfloat16", "float16")):
        return call.a.new_empty(call.shape, dtype=dtype)
    return run_fallback(call)
