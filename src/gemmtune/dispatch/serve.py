"""From operands to a result: what was prepared for operands like these, or the general path by a described Call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.aten.steps import dtype_of
from ..backends.base import Kernel
from ..core import checks
from ..core.call import Call
from ..core.errors import KernelError, UnsupportedError
from ..core.memory import is_subclass, require_memory
from ..core.problem import Problem
from ..core.torch_compat import DisableTorchFunction, RecordFunction, forward_ad, profiler
from ..core.torch_compat import increment_version as count_writes
from ..core.torch_compat import len_torch_dispatch_stack as _dispatch_modes
from ..fuse import Bound
from . import fallback as plain
from .guards import capturing, check_like, shape_only, special, special_state, unusual
from .runtime import RUNTIME, TABLE
from .specialize import (
    LAUNCH_ERRORS,
    Fallback,
    Pair,
    Serve,
    Take,
    Write,
    bound_launch,
    computing,
    dense,
    fresh_of,
    into_out,
    kernel_shape,
    launching,
    plainly,
    running,
    shares,
    taking,
    there,
    writing,
)

_lookup = TABLE.get


class Sight(NamedTuple):
    """The operands of a call that nothing in the table serves.

    key: under which what serves it may be remembered (None: the operands have none). given: the operands in the order
    that launches take them, then out. checked: the tensors among them (all but a PackedWeight).
    """

    key: Any
    given: tuple[Any, ...]
    checked: tuple[Any, ...]

    @property
    def ordinary(self) -> bool:
        """Whether a kernel may serve it. Raises TypeError for operands without memory (``memory.require_memory``)."""
        require_memory(*self.checked)
        if self.key is None or RUNTIME.observer is not None or special_state():
            return False
        return not any(unusual(tensor) for tensor in self.checked)


def serve(key: Any, given: tuple[Any, ...], checked: tuple[Any, ...]) -> Tensor | None:
    """The result of a call by what was prepared for operands like these (as Sight has them); None where nothing was.

    This is what every call pays.
    """
    try:
        variants = _lookup(key)
    except TypeError:  # it cannot be hashed: sizes that are symbols, arguments of a wrong type
        return None
    if variants is not None and not _dispatch_modes() and forward_ad._current_level < 0:
        for check, prepared in variants:
            if check(*checked):
                if profiler._is_profiler_enabled:
                    return shown(key, prepared, given)
                return prepared(*given)  # type: ignore[no-any-return]
        if not variants:  # they were more than are looked through one by one
            for check, prepared in variants.by_layout.get(layouts(checked), ()):  # type: ignore[attr-defined]
                if check(*checked):
                    if profiler._is_profiler_enabled:
                        return shown(key, prepared, given)
                    return prepared(*given)  # type: ignore[no-any-return]
    return None


def shown(key: Any, function: Serve, given: tuple[Any, ...]) -> Tensor:
    """Call the function; where a profiler is on, in an event ``gemmtune::<op>`` with the shapes of what is given.

    key: the call's in the table, or the op's name; None: the call has none, and shows no event.
    """
    if not profiler._is_profiler_enabled or key is None:
        return function(*given)
    while not isinstance(key, str):  # with_more puts keys into keys
        key = key[0]
    with RecordFunction(f"gemmtune::{key}", given):
        return function(*given)


def layouts(checked: tuple[Any, ...]) -> Any:
    """What tells a call from most others of its key: its operands' strides, and where and of what dtype the first is.
    None where one is no tensor."""
    try:
        first = checked[0]
        return (first.dtype, first.device, *[t.stride() for t in checked])
    except (AttributeError, RuntimeError):
        return None


def with_more(
    key: Any, given: tuple[Any, ...], packed: bool, epilogue: Sequence[Bound], out: Any, out_dtype: Any = None
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """A call's key, what is given, and what of it is checked, with the call's epilogue, out and out_dtype."""
    tags: Any = ()
    if epilogue:
        tags = tuple([bound.tag for bound in epilogue])
        given = (*given, *[bound.tensor for bound in epilogue if bound.tensor is not None])
    if out is not None:
        given = (*given, out)
    return (key, tags, out is None, out_dtype), given, (given[0], *given[2:]) if packed else given


def meet(
    sight: Sight, op: str, call: Call, pair: Pair, *, function: Serve | None = None, into: Write | None = None,
    differentiate: Serve | None = None, differentiable: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Serve a Call of ordinary operands met for the first time, and remember what served it if that will do again.

    pair: of the operands before the epilogue's, a and b as kernels take them. function: PyTorch's own op on the
    operands, into: the same that writes its first argument; without function it is put together by ``plain``.
    differentiate: called with what computes and the operands where one wants a gradient; without it PyTorch computes
    what has one. differentiable: False where nothing has one.
    """
    generation = RUNTIME.generation
    operands = sight.given if out is None else sight.given[:-1]
    count = len(operands)
    if passing(call) or not _lasting(sight, operands, call, out, differentiable):
        return execute(op, call, out, differentiable=differentiable)
    wants = _wants(sight.checked)
    kernel = None if _empty(call.problem) or (wants and differentiate is None) else _kernel_for(call)
    take = taking(call, operands, pair)
    if kernel is None and call.packed is not None:
        return execute(op, call, out, differentiable=differentiable)
    plain_op = plainly(call, take) if function is None or call.packed is not None else function
    fallback = partial(_without_kernel, kernel, plain_op)
    fresh, write, counted = plain_op, into, True
    if kernel is not None:
        try:
            fresh, write = _by_kernel(kernel, call, operands, take, fallback)
            counted = kernel.counts_writes
            if wants and differentiate is not None:
                fresh = partial(differentiate, fresh)
        except (KernelError, UnsupportedError) as error:  # it does not take operands of these sizes
            _warn_refused(kernel, error)
    prepared = fresh if out is None else into_out(fresh, write, call, count, fallback, counted)
    keep(sight, prepared, generation)
    return shown(op, prepared, sight.given)


def _by_kernel(
    kernel: Kernel, call: Call, operands: Sequence[Any], take: Take, fallback: Fallback
) -> tuple[Serve, Write]:
    """Return what serves such operands by a kernel: into a new tensor, and into its first argument."""
    launch, count = bound_launch(kernel, call, operands), len(operands)
    if launch is None:
        return computing(kernel, call, take, fallback), running(kernel, call, take)
    return launching(launch, kernel, call, count, fallback), writing(launch, kernel, call, count)


def _without_kernel(kernel: Kernel | None, plain_op: Serve, error: BaseException, *operands: Any) -> Tensor:
    """Serve by PyTorch's own op a call whose kernel could not be launched (its memory could not be had, say).

    Raises what that op raises: torch.OutOfMemoryError where there is no memory for it either.
    """
    error.__traceback__ = None  # its frames hold the memory that the launch could get
    if kernel is not None:
        _warn_refused(kernel, error)
    return plain_op(*operands)


def _warn_refused(kernel: Kernel, error: BaseException) -> None:
    text = str(error).partition("\n")[0]
    RUNTIME.warn_once(f"{kernel.candidate.id} cannot be launched ({text}); PyTorch's own op serves such calls")


def keep(sight: Sight, prepared: Serve, generation: int) -> None:
    """Remember what serves operands like these, in a state like this one, where a check of them would find it again."""
    if sight.key is None or any(is_subclass(tensor) for tensor in sight.checked):
        return
    check = check_like(*sight.checked)
    if check(*sight.checked) and not _dispatch_modes() and forward_ad._current_level < 0:
        try:
            RUNTIME.remember(sight.key, (check, prepared), generation, lambda: layouts(sight.checked))
        except TypeError:  # a key that cannot be hashed
            return


def _lasting(sight: Sight, operands: Sequence[Any], call: Call, out: Tensor | None, differentiable: bool) -> bool:
    """Whether what serves this call serves all like it: no error comes of it, and nothing has to be copied."""
    count = len(operands) - len(call.aux)
    if not _as_given(operands[count:], call.aux) or (out is not None and not _fits(out, call)):
        return False
    return not _wants(sight.checked) or (differentiable and call.packed is None and out is None)


def _wants(tensors: Sequence[Tensor]) -> bool:
    """Whether a gradient is wanted of one."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _as_given(tensors: Sequence[Tensor], aux: Sequence[Tensor]) -> bool:
    """Whether the epilogue's tensors are views of what the caller holds: of the same elements in the same order."""
    return all(
        t.numel() == u.numel() and t.is_contiguous() and t.data_ptr() == u.data_ptr()
        for t, u in zip(tensors, aux, strict=True)
    )


def _fits(out: Tensor, call: Call) -> bool:
    """Whether a kernel may write ``out``, if it shares no memory with an operand. (The others are for ``execute``.)"""
    fits = out.shape == call.shape and out.dtype == dtype_of(call.problem.out_dtype) and out.device == call.a.device
    return fits and out.is_contiguous()


def execute(op: str, call: Call, out: Tensor | None = None, *, differentiable: bool = True) -> Tensor:
    """Run a Call by the kernel that serves it, or by plain PyTorch. out: written and returned when given.

    Raises GradError for gradients through packed or integer weights, and what ``checks.output`` raises.
    """
    if profiler._is_profiler_enabled:
        operands = (call.a, call.b, *call.aux)
        with RecordFunction(f"gemmtune::{op}", operands if out is None else (*operands, out)):
            return _observed(op, call, out, differentiable)
    return _observed(op, call, out, differentiable)


def _observed(op: str, call: Call, out: Tensor | None, differentiable: bool) -> Tensor:
    observer = RUNTIME.observer  # read once: another thread may end its recording
    if observer is not None:
        observer(call.problem, call.a.device)
        with DisableTorchFunction():
            return _execute(op, call, out, differentiable)
    return _execute(op, call, out, differentiable)


def _execute(op: str, call: Call, out: Tensor | None, differentiable: bool) -> Tensor:
    if call.packed is not None or not differentiable:
        checks.no_grad_for(op, "a packed weight" if call.packed is not None else "this product", *call.tensors)
    dtype = dtype_of(call.problem.out_dtype)
    if out is not None:
        checks.no_out_with_grad(op, out, *call.tensors)
        checks.output(out, call.shape, dtype, call.a.device)
        require_memory(out)
    kernel = _kernel(call)
    if kernel is None:
        require_memory(*call.tensors)
        result = _shape_only(call, dtype) if shape_only(call.a) else plain.run(call)
    else:
        try:
            return _run_kernel(kernel, call, out)
        except LAUNCH_ERRORS as error:
            error.__traceback__ = None  # as in _without_kernel
            _warn_refused(kernel, error)
            result = plain.run(call)
    return result if out is None else out.copy_(result)


def _run_kernel(kernel: Kernel, call: Call, out: Tensor | None) -> Tensor:
    if out is not None and _direct(out, call):
        run = there(kernel.run, kernel, call.a.device)
        run(_operand(call), call.b, call.aux, out.view(kernel_shape(call)))
        if not kernel.counts_writes:
            count_writes((out,))
        return out
    fresh = there(fresh_of(kernel), kernel, call.a.device)
    result = fresh(_operand(call), call.b, call.aux).view(call.shape)
    return result if out is None else out.copy_(result)


def _kernel(call: Call) -> Kernel | None:
    if _empty(call.problem) or special_state() or any(special(tensor) for tensor in call.tensors):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors):
        return None
    return _kernel_for(call)


def _kernel_for(call: Call) -> Kernel | None:
    return RUNTIME.kernel_for(call.problem, call.packed, call.a.device)


def passing(call: Call) -> bool:
    """Whether what serves this call must not be remembered: a CUDA graph is being captured, or its CUDA tensors are
    no ordinary ones (whose device may not even exist)."""
    if not call.a.is_cuda:
        return False
    return special_state() or any(special(tensor) for tensor in call.tensors) or capturing(call.a.device)


def _empty(problem: Problem) -> bool:
    return min(problem.m, problem.n, problem.k, problem.batch) == 0


def _operand(call: Call) -> Tensor:
    return dense(call.a) if call.problem.b.constant else call.a


def _direct(out: Tensor, call: Call) -> bool:
    """Whether a kernel may write ``out`` itself: row-major, ordinary, and sharing no memory with what it reads."""
    return out.is_contiguous() and not special(out) and not shares(out, call.tensors)


def _shape_only(call: Call, dtype: torch.dtype) -> Tensor:
    """The result's shape and dtype; packed weights have values and fake inputs none, so nothing is computed."""
    if call.packed is not None or not call.problem.a.dtype.startswith(("float32", "float64", "bfloat16", "float16")):
        return call.a.new_empty(call.shape, dtype=dtype)
    return plain.run(call)
