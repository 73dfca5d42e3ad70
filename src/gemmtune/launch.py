"""From a described Call to a result: the general path, and the prepared entries of the hot one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import checks, plain
from .backends.aten.steps import dtype_of
from .backends.base import Kernel, Launch
from .describe import Call
from .dispatch.guards import capturing, special, special_state, unusual
from .dispatch.runtime import RUNTIME
from .problem import Problem

_empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]

Fresh = Callable[[Tensor, Any, Sequence[Tensor]], Tensor]
Entry = Callable[..., Tensor]
Prepare = Callable[[Tensor, Any, Tensor | None], tuple[Tensor, Any, Sequence[Tensor]]]


def execute(op: str, call: Call, out: Tensor | None = None, *, differentiable: bool = True) -> Tensor:
    """Run a Call by the kernel that serves it, or by plain PyTorch. out: written and returned when given.

    Raises GradError for gradients through packed or integer weights, and what ``checks.output`` raises.
    """
    observer = RUNTIME.observer  # read once: another thread may end its recording
    if observer is not None:
        observer(call.problem, call.a.device)
        with torch._C.DisableTorchFunction():
            return _execute(op, call, out, differentiable)
    return _execute(op, call, out, differentiable)


def _execute(op: str, call: Call, out: Tensor | None, differentiable: bool) -> Tensor:
    if call.packed is not None or not differentiable:
        checks.no_grad_for(op, "a packed weight" if call.packed is not None else "this product", *call.tensors)
    dtype = dtype_of(call.problem.out_dtype)
    if out is not None:
        checks.no_out_with_grad(op, out, *call.tensors)
        checks.output(out, call.shape, dtype, call.a.device)
    kernel = _kernel(call)
    if kernel is None:
        result = _shape_only(call, dtype) if _fake(call.a) else plain.run(call)
    elif out is not None and _direct(out, call):
        run = _there(kernel.run, kernel, call.a.device)
        run(_operand(call), call.b, call.aux, out.view(_kernel_shape(call)))
        return out
    else:
        fresh = _there(fresh_of(kernel), kernel, call.a.device)
        result = fresh(_operand(call), call.b, call.aux).view(call.shape)
    return result if out is None else out.copy_(result)


def _kernel(call: Call) -> Kernel | None:
    if _empty(call.problem) or special_state() or any(special(tensor) for tensor in call.tensors):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors):
        return None
    return RUNTIME.kernel_for(call.problem, call.packed, call.a.device)


def passing(call: Call) -> bool:
    """Whether what serves this call must not be remembered: a CUDA graph is being captured, or its CUDA tensors are
    no ordinary ones (whose device may not even exist)."""
    if not call.a.is_cuda:
        return False
    return special_state() or any(special(tensor) for tensor in call.tensors) or capturing(call.a.device)


def _there(function: Callable[..., Any], kernel: Kernel, device: torch.device) -> Callable[..., Any]:
    """The function, made to run with ``device`` current where there are several GPUs (ATen's ops see to that)."""
    if device.type != "cuda" or kernel.candidate.backend == "aten" or torch.cuda.device_count() < 2:
        return function
    index, current = device.index, torch.cuda.current_device

    def there(*operands: Any) -> Any:
        if current() == index:
            return function(*operands)
        with torch.cuda.device(index):
            return function(*operands)

    return there


def _empty(problem: Problem) -> bool:
    return min(problem.m, problem.n, problem.k, problem.batch) == 0


def _operand(call: Call) -> Tensor:
    return dense(call.a) if call.problem.b.constant else call.a


def dense(a: Tensor) -> Tensor:
    """Activations as constant-weight problems describe them: rows one after another."""
    return a if a.is_contiguous() else a.contiguous()


def _kernel_shape(call: Call) -> tuple[int, ...]:
    problem = call.problem
    return (problem.batch, problem.m, problem.n) if problem.family == "bmm" else (problem.m, problem.n)


def _direct(out: Tensor, call: Call) -> bool:
    """Whether a kernel may write ``out`` itself: row-major, ordinary, and sharing no memory with what it reads."""
    if not out.is_contiguous() or special(out):
        return False
    storage = out.untyped_storage().data_ptr()
    return all(storage != tensor.untyped_storage().data_ptr() for tensor in call.tensors)


def _fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values (meta, or torch's FakeTensor)."""
    if tensor.is_meta:
        return True
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def _shape_only(call: Call, dtype: torch.dtype) -> Tensor:
    """The result's shape and dtype; packed weights have values and fake inputs none, so nothing is computed."""
    if call.packed is not None or not call.problem.a.dtype.startswith(("float32", "float64", "bfloat16", "float16")):
        return call.a.new_empty(call.shape, dtype=dtype)
    return plain.run(call)


def fresh_of(kernel: Kernel) -> Fresh:
    """The kernel as a function that returns a new tensor."""
    own: Fresh | None = getattr(kernel, "fresh", None)
    if own is not None:
        return own
    dtype, run, batched = dtype_of(kernel.problem.out_dtype), kernel.run, kernel.problem.family == "bmm"
    n = kernel.problem.n

    def fresh(a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        shape = (a.shape[0], a.shape[1], n) if batched else (a.shape[0], n)
        out = torch.empty(shape, dtype=dtype, device=a.device)
        run(a, b, aux, out)
        return out

    return fresh


def prepared(
    call: Call, given: tuple[Any, ...], prepare: Prepare, differentiate: Entry, plainly: Entry
) -> Entry | None:
    """``entry(x, weight, extra=None)`` for operands of just these shapes, or None when plain PyTorch serves.

    given: such operands, as the caller holds them. prepare: the operands as the kernel takes them. differentiate:
    called with ``compute`` and the operands when one requires grad. plainly: serves whatever is no ordinary tensor.
    """
    kernel = _kernel_now(call)
    if kernel is None:
        return None
    packed, grad_on = call.packed is not None, torch.is_grad_enabled
    compute = _bound_entry(kernel, call, given) or _computing(kernel, call, prepare)

    def entry(x: Tensor, weight: Any, extra: Tensor | None = None) -> Tensor:
        if special_state() or unusual(x) or not (packed or not unusual(weight)):
            return plainly(x, weight, extra)
        if extra is not None and unusual(extra):
            return plainly(x, weight, extra)
        if grad_on() and _requires_grad(x, None if packed else weight, extra):
            return differentiate(compute, x, weight, extra)
        return compute(x, weight, extra)

    return entry


def _kernel_now(call: Call) -> Kernel | None:
    return None if _empty(call.problem) else RUNTIME.kernel_for(call.problem, call.packed, call.a.device)


def serving(call: Call, given: Sequence[Tensor], prepare: Callable[..., tuple[Tensor, Any, Sequence[Tensor]]]) -> Entry:
    """``compute(*given)`` for tensors of just these shapes, by what serves the Call now: its kernel, or plain PyTorch.

    given: every tensor, in the order of ``Call.tensors``. prepare: the operands as kernels take them, of ``given``.
    Looks at nothing: the caller has seen that they are ordinary and want no gradient.
    """
    kernel = _kernel_now(call)
    if kernel is None:
        problem, shape = call.problem, call.shape

        def plainly(*tensors: Tensor) -> Tensor:
            a, b, aux = prepare(*tensors)
            return plain.run(Call(problem, a, b, tuple(aux), shape))

        return plainly
    launch = _bound(kernel, call, given)
    if launch is None:
        return _computing(kernel, call, prepare)
    fresh = _outputs(call)

    def direct(*tensors: Tensor) -> Tensor:
        out = fresh()
        launch(out, *tensors)
        return out

    return direct


def _outputs(call: Call) -> Callable[[], Tensor]:
    """Makes a tensor for the Call's result."""
    if call.a.is_cuda and torch.cuda.device_count() == 1:  # on the current device; half of what torch.empty costs
        strides = torch.empty(call.shape, device="meta").stride()
        return partial(_empty_strided_cuda, call.shape, strides, dtype_of(call.problem.out_dtype))
    return partial(torch.empty, call.shape, dtype=dtype_of(call.problem.out_dtype), device=call.a.device)


def _bound(kernel: Kernel, call: Call, given: Sequence[Tensor]) -> Launch | None:
    """A launch that takes the tensors ``given`` as they are; None where the kernel has none, or the Call's operands are
    copies of these (views will do)."""
    tensors = call.tensors if call.packed is None else (call.a, *call.packed.data, *call.aux)
    if (call.problem.b.constant and not call.a.is_contiguous()) or len(tensors) != len(given):
        return None
    launch = kernel.bind(call.a, call.b, call.aux)
    if launch is None or any(x.data_ptr() != y.data_ptr() for x, y in zip(tensors, given, strict=True)):
        return None
    return _there(launch, kernel, call.a.device)


def _bound_entry(kernel: Kernel, call: Call, given: tuple[Any, ...]) -> Entry | None:
    """``compute(x, weight, extra)`` by such a launch."""
    packed, (x, weight, *extra) = call.packed is not None, given
    rest = [tensor for tensor in extra if tensor is not None]
    launch = _bound(kernel, call, (x, *(weight.data if packed else (weight,)), *rest))
    if launch is None:
        return None
    fresh = _outputs(call)

    def compute(x: Tensor, weight: Any, extra: Any) -> Tensor:
        out = fresh()
        if packed:
            launch(out, x, *weight.data, *(() if extra is None else (extra,)))
        elif extra is None:
            launch(out, x, weight)
        else:
            launch(out, x, weight, extra)
        return out

    return compute


def _computing(kernel: Kernel, call: Call, prepare: Callable[..., tuple[Tensor, Any, Sequence[Tensor]]]) -> Entry:
    """``compute(*operands)``: the kernel on prepared operands, into a new tensor of the Call's shape."""
    device, own = call.a.device, getattr(kernel, "fresh", None)
    inner, shape, run = _kernel_shape(call), call.shape, _there(kernel.run, kernel, call.a.device)
    dtype, empty, same = dtype_of(call.problem.out_dtype), torch.empty, shape == inner

    def allocate(*operands: Any) -> Tensor:
        a, b, aux = prepare(*operands)
        out = empty(inner, dtype=dtype, device=device)
        run(a, b, aux, out)
        return out if same else out.view(shape)

    if own is None:
        return allocate
    fresh: Fresh = _there(own, kernel, device)

    def ask(*operands: Any) -> Tensor:
        out = fresh(*prepare(*operands))
        return out if same else out.view(shape)

    return ask


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
