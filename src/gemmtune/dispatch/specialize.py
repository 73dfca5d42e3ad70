"""Functions specialised for operands like those of one Call.

Each function serves every later call whose operands have the same shapes, strides, dtypes and devices. A functional
variant returns a new tensor; an out variant writes its first argument. ``args`` are the operands in the order of
launches: the op's own (a PackedWeight in the weight's position), then the epilogue's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.aten.steps import dtype_of
from ..backends.base import Kernel, Launch
from ..core import devices
from ..core.call import Call
from ..core.codegen import compile_function, function_maker
from ..core.errors import KernelError, UnsupportedError
from ..core.memory import require_kernel_operands
from ..core.problem import Problem
from ..core.torch_compat import increment_version
from .fallback import run_fallback, specialize_fallback
from .runtime import RUNTIME

KernelFunctional = Callable[[Tensor, Any, Sequence[Tensor]], Tensor]
FunctionalFn = Callable[..., Tensor]  # of args
OutFn = Callable[..., object]  # of out and args
ArgAdapter = Callable[..., tuple[Tensor, Any, Sequence[Tensor]]]
FallbackFn = Callable[..., Tensor]  # of an error and args
FunctionOfM = Callable[[int, tuple[int, ...]], FunctionalFn]  # of M and the shape of the result

# What a GPU kernel raises before any of its results is written: its memory cannot be allocated, its library has no
# algorithm, or the driver refuses the launch. PyTorch's own op needs none of these.
LAUNCH_ERRORS = (KernelError, UnsupportedError, torch.OutOfMemoryError)


class TorchFunction(NamedTuple):
    """PyTorch's own function for an op. All three take the op's operands in the order of launches.

    functional: returns a new tensor. out: writes its first argument; None where PyTorch has no such variant. backward:
    called with the function that computes the result, then the operands, and returns the result with its gradient.
    required: whether only PyTorch can compute the call.
    """

    functional: FunctionalFn
    out: OutFn | None = None
    backward: FunctionalFn | None = None
    required: bool = False


def specialize(
    call: Call, args: Sequence[Any], kernel: Kernel | None, torch_function: TorchFunction | None, *, needs_grad: bool,
    has_out: bool,
) -> FunctionalFn:  # fmt: skip
    """Return the function that serves a Call and later ones like it: of args, and of out where ``has_out``.

    call: its Problem may have another M than its operands, if a kernel or ``torch_function`` serves.
    kernel: None where PyTorch serves. torch_function: PyTorch's function for just this call; None where there is none:
    the fallback is then composed from several. needs_grad: whether a gradient is wanted, which needs a ``backward``.
    """
    adapt = adapt_args(call, args)
    plain: FunctionalFn
    write: OutFn | None = None
    backward: FunctionalFn | None = None
    if torch_function is not None and call.packed is None:
        plain, write, backward = torch_function.functional, torch_function.out, torch_function.backward
    elif kernel is None:
        plain = bound_fallback(call, adapt)
    else:  # it may never be called
        plain = partial(_run_plainly, call.problem, call.shape, adapt)
    fallback = partial(_after_refusal, kernel, plain)
    functional, counted = plain, True
    if kernel is not None:
        try:
            functional, write = _kernel_variants(kernel, call, args, adapt, fallback, has_out)
            counted = kernel.counts_writes
            if needs_grad and backward is not None:
                functional = partial(backward, functional)
        except (KernelError, UnsupportedError) as error:  # it does not take operands of these sizes
            warn_refused(kernel, error)
    return bound_out(functional, write, call, len(args), fallback, counted) if has_out else functional


def _kernel_variants(
    kernel: Kernel, call: Call, args: Sequence[Any], adapt: ArgAdapter, fallback: FallbackFn, has_out: bool
) -> tuple[FunctionalFn, OutFn | None]:
    """Return the functional variant that runs the kernel, and the out variant where ``has_out``."""
    launch, count = bind_launch(kernel, call, args), len(args)
    if launch is None:
        return run_functional(kernel, call, adapt, fallback), run_out(kernel, call, adapt) if has_out else None
    functional = launch_functional_maker(launch, kernel, call, count, fallback)(call.problem.m, call.shape)
    return functional, launch_out(launch, kernel, call, count) if has_out else None


def _after_refusal(kernel: Kernel | None, plain: FunctionalFn, error: BaseException, *args: Any) -> Tensor:
    """Serve by PyTorch's own op a call whose kernel could not be launched (its memory could not be allocated, say).

    Raises what that op raises: torch.OutOfMemoryError where there is no memory for it either.
    """
    error.__traceback__ = None  # its frames hold the memory that the launch could allocate
    if kernel is not None:
        warn_refused(kernel, error)
    return plain(*args)


def warn_refused(kernel: Kernel, error: BaseException) -> None:
    """Log, once, that a kernel could not be launched."""
    text = str(error).partition("\n")[0]
    RUNTIME.warn_once(f"{kernel.candidate.id} cannot be launched ({text}); PyTorch's own op serves such calls")


def raw_reader(raw: str, count: int) -> Callable[[FunctionalFn], FunctionalFn]:
    """Return a function from a FunctionalFn to one of ``count`` args, the second of them a PackedWeight, that calls it
    with the PackedWeight's attribute ``raw`` in its place."""
    names = _names(count)
    passed = ", ".join([names[0], f"{names[1]}.{raw}", *names[2:]])
    return function_maker("run", ("function",), f"def run({', '.join(names)}):", f"    return function({passed})")


def adapt_args(call: Call, args: Sequence[Any], *, any_m: bool = False) -> ArgAdapter:
    """Return a function from args to the a, b and aux that ``Kernel.run`` takes. aux has the shapes of the Call's.

    any_m: whether the function also takes args with another M (unlike 0).
    """
    count = len(args) - len(call.aux)
    adapt_a, adapt_b, copies_a = call.adapt_a, call.adapt_b, call.copies_a
    shapes = [tuple(tensor.shape) for tensor in call.aux]
    reshapes = bool(shapes) and shapes != [tensor.shape for tensor in args[count:]]
    if any_m:
        adapt_a = None if adapt_a is None else methodcaller("reshape", -1, call.problem.k)
        steps = [step for step in call.problem.epilogue if step.takes_tensor]
        shapes = [
            (-1, *shape[1:]) if step.axis in ("row", "full") else shape
            for step, shape in zip(steps, shapes, strict=True)
        ]  # fmt: skip

    def adapt(*args: Any) -> tuple[Tensor, Any, Sequence[Tensor]]:
        a = args[0] if adapt_a is None else adapt_a(args[0])
        b = args[1] if adapt_b is None else adapt_b(*args[1:count])
        aux: Sequence[Tensor] = args[count:]
        if reshapes:
            aux = [tensor.view(shape) for tensor, shape in zip(aux, shapes, strict=True)]
        return a.contiguous() if copies_a else a, b, aux

    return adapt


def bound_fallback(call: Call, adapt: ArgAdapter) -> FunctionalFn:
    """Return the functional variant that is plain PyTorch."""
    compute = specialize_fallback(call)
    return lambda *args: compute(*adapt(*args))


def _run_plainly(problem: Problem, shape: tuple[int, ...], adapt: ArgAdapter, *args: Any) -> Tensor:
    """Compute by plain PyTorch, which is specialised in every call: for calls of which few go there. problem: with any
    M."""
    a, b, aux = adapt(*args)
    return run_fallback(Call(problem.with_m(a.shape[-2]), a, b, tuple(aux), shape))


def bind_launch(kernel: Kernel, call: Call, args: Sequence[Any]) -> Launch | None:
    """Return the kernel's launch for args (a PackedWeight's tensors in its place).

    None when the kernel has no launch by address, or when the Call's tensors are copies of the args rather than views.
    """
    if call.copies_a:
        return None
    launch = kernel.bind(call.a, call.b, call.aux)
    if launch is None:
        return None
    passed, tensors = args, call.tensors
    if call.packed is not None:
        data = call.packed.data
        passed, tensors = (args[0], *data, *args[2:]), (call.a, *data, *call.aux)
    are_views = len(tensors) == len(passed) and all(
        x.data_ptr() == y.data_ptr() for x, y in zip(tensors, passed, strict=True)
    )
    return launch if are_views else None


def specialize_any_m(call: Call, args: Sequence[Any], kernel: Kernel, plain: FunctionalFn) -> FunctionOfM | None:
    """Return what ``specialize`` does, as a function of M, for args that differ from a Call's in M only; None where it
    depends on more than M.

    plain: computes args with any M where a launch is refused. Where tensors of aux depend on M, M is not 1.
    """
    fallback = partial(_after_refusal, kernel, plain)
    if bind_launch(kernel, call, args) is not None:
        launch = kernel.bind_any_m(call.a, call.b, call.aux)
        return None if launch is None else launch_functional_maker(launch, kernel, call, len(args), fallback)
    dtype, device = dtype_of(call.problem.out_dtype), call.a.device
    kind = devices.get(device.type)
    adapt = adapt_args(call, args, any_m=True)
    run = with_device_guard(kernel.functional if kernel.has_functional else kernel.run, kernel, device)
    is_current = not kind.needs_guard()

    def make_for(m: int, shape: tuple[int, ...]) -> FunctionalFn:
        kernel_shape = (m, shape[-1])
        viewed = None if shape == kernel_shape else shape
        if kernel.has_functional:
            return _compute_functional(run, adapt, viewed)
        empty = kind.allocator(kernel_shape, _dense_strides(kernel_shape), dtype, device, is_current)
        return _allocate_and_run(run, empty, adapt, fallback, viewed)

    return make_for


def launch_functional_maker(
    launch: Launch, kernel: Kernel, call: Call, count: int, fallback: FallbackFn
) -> FunctionOfM:
    """Return a function from M, and the shape of the result, to a function of ``count`` args that calls ``launch``.

    fallback: called with the error and the args when the launch is refused.
    """
    device, kind = call.a.device, devices.get(call.a.device.type)
    names, unpacking, passed = _launch_args(call, count)
    needs_guard = _needs_device_guard(kernel, device)
    is_current = needs_guard or kind.count() == 1  # with the guard, the device is the current one by then
    switch = [
        "    if current() != index:",
        "        with guard(device):",
        f"            return run({names})",
    ]
    return function_maker(
        "run",
        ("m", "shape"),
        f"def run({names}):",
        *(switch if needs_guard else []),
        *unpacking,
        "    out = empty()",
        "    try:",
        f"        launch(out, {passed})",
        "    except errors as error:",
        "        del out",
        f"        return fallback(error, {names})",
        "    return out",
        setup=[
            "strides = (shape[1], 1) if len(shape) == 2 else dense_strides(shape)",
            "empty = allocator(shape, strides, dtype, device, is_current)",
        ],
        launch=launch, errors=LAUNCH_ERRORS, fallback=fallback, current=kind.current_index, index=device.index,
        guard=kind.guard, device=device, allocator=kind.allocator, dense_strides=_dense_strides,
        dtype=dtype_of(call.problem.out_dtype), is_current=is_current,
    )  # fmt: skip


def launch_out(launch: Launch, kernel: Kernel, call: Call, count: int) -> OutFn:
    """Return a function of out and ``count`` args that calls ``launch``."""
    names, unpacking, passed = _launch_args(call, count)
    write = launch
    if unpacking:
        write = compile_function(
            "write", f"def write(out, {names}):", *unpacking, f"    launch(out, {passed})", launch=launch
        )
    return with_device_guard(write, kernel, call.a.device)


def _launch_args(call: Call, count: int) -> tuple[str, list[str], str]:
    """Return, as source text: the names of ``count`` args, the lines that read a PackedWeight's tensors, and all that a
    launch takes behind out."""
    names = _names(count)
    if call.packed is None:
        return ", ".join(names), [], ", ".join(names)
    data = [f"d{index}" for index in range(len(call.packed.data))]
    return ", ".join(names), [f"    {', '.join(data)}, = t1.data"], ", ".join([names[0], *data, *names[2:]])


def _names(count: int) -> list[str]:
    """Return the names of ``count`` args in generated source; the weight is t1."""
    return [f"t{index}" for index in range(count)]


def run_functional(kernel: Kernel, call: Call, adapt: ArgAdapter, fallback: FallbackFn) -> FunctionalFn:
    """Return the functional variant that calls ``Kernel.run`` (``Kernel.functional`` where the kernel has its own).

    fallback: as for ``launch_functional_maker``.
    """
    kernel_shape, device = _kernel_shape(call), call.a.device
    shape = None if call.shape == kernel_shape else call.shape
    if kernel.has_functional:
        return _compute_functional(with_device_guard(kernel.functional, kernel, device), adapt, shape)
    run, empty = with_device_guard(kernel.run, kernel, device), _allocator(call, kernel_shape)
    return _allocate_and_run(run, empty, adapt, fallback, shape)


def _compute_functional(functional: KernelFunctional, adapt: ArgAdapter, shape: tuple[int, ...] | None) -> FunctionalFn:
    """Return a function of args that calls ``functional`` and views its result in ``shape`` (None: as it is)."""

    def compute(*args: Any) -> Tensor:
        out = functional(*adapt(*args))
        return out if shape is None else out.view(shape)

    return compute


def _allocate_and_run(
    run: Callable[..., None], empty: Callable[[], Tensor], adapt: ArgAdapter, fallback: FallbackFn,
    shape: tuple[int, ...] | None,
) -> FunctionalFn:  # fmt: skip
    """Return a function of args that allocates the output, calls ``run`` and returns the output, viewed in ``shape``
    (None: as it is). fallback: as for ``launch_functional_maker``."""

    def allocate_and_run(*args: Any) -> Tensor:
        out = empty()
        try:
            run(*adapt(*args), out)
        except LAUNCH_ERRORS as error:
            del out
            return fallback(error, *args)
        return out if shape is None else out.view(shape)

    return allocate_and_run


def run_out(kernel: Kernel, call: Call, adapt: ArgAdapter) -> OutFn:
    """Return the out variant that calls ``Kernel.run``."""
    kernel_shape, run = _kernel_shape(call), with_device_guard(kernel.run, kernel, call.a.device)

    def write(out: Tensor, *args: Any) -> None:
        run(*adapt(*args), out.view(kernel_shape))

    return write


def bound_out(
    functional: FunctionalFn, write: OutFn | None, call: Call, count: int, fallback: FallbackFn, counted: bool
) -> FunctionalFn:
    """Return a function of ``count`` args and out that writes and returns out.

    write: the out variant; where it is None, or out shares memory with an arg, out is a copy of ``functional``'s
    result. fallback: as for ``launch_functional_maker``. counted: whether ``write`` bumps out's version counter itself.
    """
    if write is None:

        def copy(*args: Any) -> Tensor:
            require_kernel_operands(args[-1])
            return args[-1].copy_(functional(*args[:-1]))  # type: ignore[no-any-return]

        return copy
    names = ", ".join(_names(count))
    tensors = [name for name in _names(count) if call.packed is None or name != "t1"]
    shared = " or ".join(f"{name}.untyped_storage().data_ptr() == storage" for name in tensors)
    return compile_function(
        "run",
        f"def run({names}, out):",
        "    storage = out.untyped_storage().data_ptr()",
        "    if not storage:",
        "        require(out)",
        f"    if {shared}:",  # as shares_storage
        f"        return out.copy_(functional({names}))",
        "    try:",
        f"        write(out, {names})",
        "    except errors as error:",
        f"        return out.copy_(fallback(error, {names}))",
        *([] if counted else ["    increment_version((out,))"]),
        "    return out",
        functional=functional, write=write, errors=LAUNCH_ERRORS, fallback=fallback,
        increment_version=increment_version, require=require_kernel_operands,
    )  # fmt: skip


def shares_storage(out: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether ``out`` has its storage in common with another tensor (a PackedWeight is nobody's output)."""
    storage = out.untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == storage for tensor in tensors)


def _kernel_shape(call: Call) -> tuple[int, ...]:
    """Return the shape in which kernels write the Call's result."""
    return call.shape if call.adapt_a is None else (*call.a.shape[:-1], call.problem.columns)


def _allocator(call: Call, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    """Return a function that allocates the Call's result in ``shape``."""
    dtype, device = dtype_of(call.problem.out_dtype), call.a.device
    return devices.get(device.type).allocator(shape, _dense_strides(shape), dtype, device, False)


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that ``torch.empty`` gives a tensor, at a sixth of the time that making one would take."""
    strides: tuple[int, ...] = ()
    count = 1
    for size in shape[::-1]:
        strides = (count, *strides)
        count *= size or 1
    return strides


def with_device_guard(function: Callable[..., Any], kernel: Kernel, device: torch.device) -> Callable[..., Any]:
    """Return ``function``, made to run with ``device`` as the current one where another may be."""
    if not _needs_device_guard(kernel, device):
        return function
    kind = devices.get(device.type)
    index, current = device.index, kind.current_index

    def guarded(*args: Any) -> Any:
        if current() == index:
            return function(*args)
        with kind.guard(device):
            return function(*args)

    return guarded


def _needs_device_guard(kernel: Kernel, device: torch.device) -> bool:
    """Whether another device of the kind may be current and the kernel depends on it. ATen's ops switch devices
    themselves."""
    return kernel.candidate.backend != "aten" and devices.get(device.type).needs_guard()
