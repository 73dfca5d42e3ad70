"""What serves operands like those of a Call, made when they are first seen: a kernel's launch or PyTorch's own op, into
a new tensor or into ``out``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends.aten.steps import dtype_of
from ..backends.base import Kernel, Launch
from ..core.call import Call
from ..core.codegen import written
from ..core.errors import KernelError, UnsupportedError
from ..core.memory import require_kernel_operands
from ..core.torch_compat import current_device, empty_cpu, empty_cuda
from ..core.torch_compat import increment_version as count_writes
from . import fallback as plain

Fresh = Callable[[Tensor, Any, Sequence[Tensor]], Tensor]
Serve = Callable[..., Tensor]
Write = Callable[..., object]  # of out and the operands
Pair = Callable[..., tuple[Tensor, Any]]
Take = Callable[..., tuple[Tensor, Any, Sequence[Tensor]]]
Fallback = Callable[..., Tensor]  # of the error and the operands

# What a GPU kernel raises before any of its results is written: its memory cannot be had, its library has no algorithm,
# or the driver refuses the launch. PyTorch's own op needs none of these.
LAUNCH_ERRORS = (KernelError, UnsupportedError, torch.OutOfMemoryError)


def taking(call: Call, operands: Sequence[Any], pair: Pair) -> Take:
    """What is given as kernels take it: a and b, and the epilogue's tensors in their steps' shapes."""
    count = len(operands) - len(call.aux)
    shapes = [u.shape for u in call.aux]
    if not shapes:
        return lambda *given: (*pair(*given), ())
    if all(t.shape == shape for t, shape in zip(operands[count:], shapes, strict=True)):
        return lambda *given: (*pair(*given[:count]), given[count:])
    return lambda *given: (
        *pair(*given[:count]),
        [t.view(shape) for t, shape in zip(given[count:], shapes, strict=True)],
    )


def plainly(call: Call, take: Take) -> Serve:
    """Plain PyTorch on the operands."""
    compute = plain.settled(call)
    return lambda *operands: compute(*take(*operands))


def bound_launch(kernel: Kernel, call: Call, operands: Sequence[Any]) -> Launch | None:
    """A launch that takes the operands (a PackedWeight's tensors in its place) as they are; None where the kernel has
    none, or the Call's are copies of these (views will do)."""
    given, tensors = operands, call.tensors
    if call.packed is not None:
        data = call.packed.data
        given, tensors = (operands[0], *data, *operands[2:]), (call.a, *data, *call.aux)
    if (call.problem.b.constant and not call.a.is_contiguous()) or len(tensors) != len(given):
        return None
    launch = kernel.bind(call.a, call.b, call.aux)
    if launch is None or any(x.data_ptr() != y.data_ptr() for x, y in zip(tensors, given, strict=True)):
        return None
    return launch


def launching(launch: Launch, kernel: Kernel, call: Call, count: int, fallback: Fallback) -> Serve:
    """Such a launch of so many operands, into a new tensor. fallback: serves a call whose launch is refused."""
    device = call.a.device
    (names, data, passed), elsewhere = _passing(call, count), _elsewhere(kernel, device)
    switch = [
        "    if current() != index:",
        "        with device(index):",
        f"            return prepared({names})",
    ]
    return written(
        "prepared",
        f"def prepared({names}):",
        *(switch if elsewhere else []),
        *data,
        "    out = empty()",
        "    try:",
        f"        launch(out, {passed})",
        "    except errors as error:",
        "        del out",
        f"        return fallback(error, {names})",
        "    return out",
        launch=launch, errors=LAUNCH_ERRORS, fallback=fallback, empty=_outputs(call, call.shape, elsewhere),
        current=current_device, index=device.index, device=torch.cuda.device,
    )  # fmt: skip


def writing(launch: Launch, kernel: Kernel, call: Call, count: int) -> Write:
    """The same into ``out``, its first argument."""
    names, data, passed = _passing(call, count)
    write = launch
    if data:
        write = written("write", f"def write(out, {names}):", *data, f"    launch(out, {passed})", launch=launch)
    return there(write, kernel, call.a.device)


def _passing(call: Call, count: int) -> tuple[str, list[str], str]:
    """Of so many operands: their names, what finds a PackedWeight's tensors among them, and all that a launch takes."""
    names = _names(count)
    if call.packed is None:
        return ", ".join(names), [], ", ".join(names)
    data = [f"d{place}" for place in range(len(call.packed.data))]
    return ", ".join(names), [f"    {', '.join(data)}, = t1.data"], ", ".join([names[0], *data, *names[2:]])


def _names(count: int) -> list[str]:
    """Of so many operands; the weight is t1."""
    return [f"t{place}" for place in range(count)]


def computing(kernel: Kernel, call: Call, take: Take, fallback: Fallback) -> Serve:
    """The kernel on operands as it takes them, into a new tensor. fallback: as for ``launching``."""
    own, inner, shape = getattr(kernel, "fresh", None), kernel_shape(call), call.shape
    run, empty, same = there(kernel.run, kernel, call.a.device), _outputs(call, inner), shape == inner

    def allocate(*operands: Any) -> Tensor:
        out = empty()
        try:
            run(*take(*operands), out)
        except LAUNCH_ERRORS as error:
            del out
            return fallback(error, *operands)
        return out if same else out.view(shape)

    if own is None:
        return allocate
    fresh: Fresh = there(own, kernel, call.a.device)

    def ask(*operands: Any) -> Tensor:
        out = fresh(*take(*operands))
        return out if same else out.view(shape)

    return ask


def running(kernel: Kernel, call: Call, take: Take) -> Write:
    """The same into ``out``."""
    inner, run = kernel_shape(call), there(kernel.run, kernel, call.a.device)

    def write(out: Tensor, *operands: Any) -> None:
        run(*take(*operands), out.view(inner))

    return write


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


def into_out(
    fresh: Serve, write: Write | None, call: Call, count: int, fallback: Fallback, counted: bool
) -> Serve:  # fmt: skip
    """What serves so many operands and an out behind them: ``write``; ``fresh`` where they share memory, or nothing
    writes. fallback: as for ``launching``. counted: whether ``write`` counts itself in out's version counter."""
    if write is None:

        def copy(*given: Any) -> Tensor:
            require_kernel_operands(given[-1])
            return given[-1].copy_(fresh(*given[:-1]))  # type: ignore[no-any-return]

        return copy
    names = ", ".join(_names(count))
    tensors = [name for name in _names(count) if call.packed is None or name != "t1"]
    shared = " or ".join(f"{name}.untyped_storage().data_ptr() == storage" for name in tensors)
    return written(
        "prepared",
        f"def prepared({names}, out):",
        "    storage = out.untyped_storage().data_ptr()",
        "    if not storage:",
        "        require(out)",
        f"    if {shared}:",  # as shares has it
        f"        return out.copy_(fresh({names}))",
        "    try:",
        f"        write(out, {names})",
        "    except errors as error:",
        f"        return out.copy_(fallback(error, {names}))",
        *([] if counted else ["    count((out,))"]),
        "    return out",
        fresh=fresh, write=write, errors=LAUNCH_ERRORS, fallback=fallback, count=count_writes,
        require=require_kernel_operands,
    )  # fmt: skip


def shares(out: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor has its storage in common with another (PackedWeights are nobody's output)."""
    storage = out.untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == storage for tensor in tensors)


def _outputs(call: Call, shape: tuple[int, ...], current: bool = False) -> Callable[[], Tensor]:
    """Makes a tensor of such a shape for the Call's result. current: its device is whenever one is made."""
    dtype, device = dtype_of(call.problem.out_dtype), call.a.device
    strides = torch.empty(shape, device="meta").stride()
    if device.type == "cpu":
        return partial(empty_cpu, shape, strides, dtype)
    if current or torch.cuda.device_count() == 1:
        return partial(empty_cuda, shape, strides, dtype)
    return partial(torch.empty, shape, dtype=dtype, device=device)


def there(function: Callable[..., Any], kernel: Kernel, device: torch.device) -> Callable[..., Any]:
    """The function, made to run with ``device`` current where it need not be."""
    if not _elsewhere(kernel, device):
        return function
    index, current = device.index, current_device

    def there(*operands: Any) -> Any:
        if current() == index:
            return function(*operands)
        with torch.cuda.device(index):
            return function(*operands)

    return there


def _elsewhere(kernel: Kernel, device: torch.device) -> bool:
    """Whether another device may be current, and the kernel minds (ATen's ops see to that themselves)."""
    return device.type == "cuda" and kernel.candidate.backend != "aten" and torch.cuda.device_count() > 1


def kernel_shape(call: Call) -> tuple[int, ...]:
    problem = call.problem
    return (problem.batch, problem.m, problem.n) if problem.family == "bmm" else (problem.m, problem.n)


def dense(a: Tensor) -> Tensor:
    """Activations as constant-weight problems describe them: rows one after another."""
    return a if a.is_contiguous() else a.contiguous()
