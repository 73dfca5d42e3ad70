"""A call that the dispatch cache does not serve: a kernel or PyTorch is chosen, specialised, cached and run.

``serve_miss`` is for ordinary operands, ``run_uncached`` for all others and for what must not be remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.aten.steps import dtype_of
from ..backends.base import Kernel
from ..core import checks, devices
from ..core.call import Call
from ..core.errors import KernelError, UnsupportedError
from ..core.memory import is_subclass, require_memory
from ..core.torch_compat import DisableTorchFunction, RecordFunction, increment_version, profiler
from .cache import is_reachable, run_profiled
from .fallback import run_fallback
from .guards import is_capturing, is_shape_only, is_unusual, make_guard, needs_torch, state_needs_torch
from .runtime import RUNTIME
from .specialize import (
    LAUNCH_ERRORS,
    ArgAdapter,
    FallbackFn,
    FunctionalFn,
    OperandAdapter,
    OutFn,
    adapt_args,
    bind_launch,
    bound_fallback,
    bound_out,
    launch_functional,
    launch_out,
    run_functional,
    run_out,
    shares_storage,
    with_device_guard,
)


class CacheMiss(NamedTuple):
    """A call that the dispatch cache does not serve.

    key: under which its specialised function may be cached (None: the operands have no key). args: the operands in the
    order of launches, then the epilogue's tensors and out. guarded: the tensors among them (all but a PackedWeight).
    """

    key: Any
    args: tuple[Any, ...]
    guarded: tuple[Any, ...]

    @property
    def is_ordinary(self) -> bool:
        """Whether a kernel may serve the call. Raises TypeError for operands without memory (``require_memory``)."""
        require_memory(*self.guarded)
        if self.key is None or RUNTIME.observer is not None or state_needs_torch():
            return False
        return not any(is_unusual(tensor) for tensor in self.guarded)


class TorchFunction(NamedTuple):
    """PyTorch's own function for an op. All three take the op's operands in the order of ``CacheMiss.args``.

    functional: returns a new tensor. out: writes its first argument; None where PyTorch has no such variant. backward:
    called with the function that computes the result, then the operands, and returns the result with its gradient.
    """

    functional: FunctionalFn
    out: OutFn | None = None
    backward: FunctionalFn | None = None


def serve_miss(
    miss: CacheMiss, op: str, call: Call, operands: OperandAdapter, torch_function: TorchFunction | None = None,
    *, differentiable: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Serve a Call of ordinary operands, and cache the function that served it unless only this call may have it.

    operands: from the args before the epilogue's tensors to the a and b that kernels take. torch_function: PyTorch's
    function for just this call; None where there is none: the fallback is then composed from several. differentiable:
    False for ops without a gradient. Raises GradError, and what ``checks.require_output`` raises.
    """
    generation = RUNTIME.generation
    args = miss.args if out is None else miss.args[:-1]
    if is_transient(call) or not _is_cacheable(miss, args, call, out, differentiable):
        return run_uncached(op, call, out, differentiable=differentiable)
    backward = None if torch_function is None else torch_function.backward
    needs_grad = _needs_grad(miss.guarded)
    kernel = None if call.problem.is_empty or (needs_grad and backward is None) else _find_kernel(call)
    if kernel is None and call.packed is not None:
        return run_uncached(op, call, out, differentiable=differentiable)
    adapt = adapt_args(call, args, operands)
    if torch_function is None or call.packed is not None:
        plain, write = bound_fallback(call, adapt), None
    else:
        plain, write = torch_function.functional, torch_function.out
    fallback = partial(_after_refusal, kernel, plain)
    functional, counted = plain, True
    if kernel is not None:
        try:
            functional, write = _kernel_variants(kernel, call, args, adapt, fallback)
            counted = kernel.counts_writes
            if needs_grad and backward is not None:
                functional = partial(backward, functional)
        except (KernelError, UnsupportedError) as error:  # it does not take operands of these sizes
            _warn_refused(kernel, error)
    run = functional if out is None else bound_out(functional, write, call, len(args), fallback, counted)
    add_to_cache(miss, run, generation)
    return run_profiled(op, run, miss.args)


def serve_with_torch(miss: CacheMiss, function: FunctionalFn) -> Tensor:
    """Serve a call that only PyTorch can serve, and cache ``function``, which takes operands in any state."""
    require_memory(*miss.args)
    generation = RUNTIME.generation
    result = run_profiled(miss.key, function, miss.args)
    add_to_cache(miss, function, generation)
    return result


def add_to_cache(miss: CacheMiss, function: FunctionalFn, generation: int) -> None:
    """Cache what serves operands like these in a state like this one, where a guard of them would find it again."""
    if miss.key is None or any(is_subclass(tensor) for tensor in miss.guarded):
        return
    guard = make_guard(*miss.guarded)
    if guard(*miss.guarded) and is_reachable():
        RUNTIME.cache_entry(miss.key, (guard, function), miss.guarded, generation)


def _kernel_variants(
    kernel: Kernel, call: Call, args: Sequence[Any], adapt: ArgAdapter, fallback: FallbackFn
) -> tuple[FunctionalFn, OutFn]:
    """Return the functional and the out variant that run the kernel."""
    launch, count = bind_launch(kernel, call, args), len(args)
    if launch is None:
        return run_functional(kernel, call, adapt, fallback), run_out(kernel, call, adapt)
    return launch_functional(launch, kernel, call, count, fallback), launch_out(launch, kernel, call, count)


def _after_refusal(kernel: Kernel | None, plain: FunctionalFn, error: BaseException, *args: Any) -> Tensor:
    """Serve by PyTorch's own op a call whose kernel could not be launched (its memory could not be allocated, say).

    Raises what that op raises: torch.OutOfMemoryError where there is no memory for it either.
    """
    error.__traceback__ = None  # its frames hold the memory that the launch could allocate
    if kernel is not None:
        _warn_refused(kernel, error)
    return plain(*args)


def _warn_refused(kernel: Kernel, error: BaseException) -> None:
    text = str(error).partition("\n")[0]
    RUNTIME.warn_once(f"{kernel.candidate.id} cannot be launched ({text}); PyTorch's own op serves such calls")


def _is_cacheable(miss: CacheMiss, args: Sequence[Any], call: Call, out: Tensor | None, differentiable: bool) -> bool:
    """Whether what serves this call serves all like it: no error comes of it, and no operand has to be copied."""
    count = len(args) - len(call.aux)
    if not _are_views(args[count:], call.aux) or (out is not None and not _is_writable(out, call)):
        return False
    return not _needs_grad(miss.guarded) or (differentiable and call.packed is None and out is None)


def _needs_grad(tensors: Sequence[Tensor]) -> bool:
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
            error.__traceback__ = None  # as in _after_refusal
            _warn_refused(kernel, error)
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
    if call.problem.is_empty or state_needs_torch() or any(needs_torch(tensor) for tensor in call.tensors):
        return True
    return _needs_grad(call.tensors)


def _find_kernel(call: Call) -> Kernel | None:
    return RUNTIME.kernel_for(call.problem, call.packed, call.a.device)


def is_transient(call: Call) -> bool:
    """Whether what serves this call must not be cached: a graph is being captured, or its tensors on a device are
    unusual (their device may not even exist)."""
    if not devices.is_served(call.a.device) or devices.is_host(call.a.device.type):
        return False
    return state_needs_torch() or any(needs_torch(tensor) for tensor in call.tensors) or is_capturing(call.a.device)


def _shape_only_result(call: Call, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the result's shape and dtype without values, for operands without values."""
    if call.packed is not None or not call.problem.a.dtype.startswith(("float32", "float64", "bfloat16", "float16")):
        return call.a.new_empty(call.shape, dtype=dtype)
    return run_fallback(call)
