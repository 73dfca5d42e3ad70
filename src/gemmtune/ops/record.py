"""``gemmtune.record()``, which counts the Problems of the matrix multiplies that a piece of code runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from ..core.devices import CPU
from ..core.errors import GemmtuneError
from ..core.memory import is_subclass
from ..core.problem import Problem
from ..dispatch.runtime import RUNTIME
from ..dispatch.torch_state import is_shape_only
from ..fuse import bias as bias_step
from .composites import is_composite, without_override
from .mixed_mm import describe_product, quant_weight
from .table import DESCRIBERS
from .torchao_formats import UnknownFormatError, is_from_torchao, read
from .torchao_formats import problem as quantized_problem
from .weight_only import WeightOnly, recognise


class Recording:
    """The Problems that a piece of code ran, with counts.

    problems: a list of (Problem, count), in the order of their first calls. devices: the devices on which they ran;
    ``on(device)`` returns the problems of one device. where: the caller may set it while the code runs, to (number of
    the call, name of the module); each Problem is counted under the value that ``where`` has at that moment.
    """

    def __init__(self) -> None:
        self.where: tuple[int, str] = (0, "")
        self._located_counts: Counter[tuple[torch.device, tuple[int, str], Problem]] = Counter()
        self._counts: dict[torch.device, Counter[Problem]] = {}
        self._lock = threading.Lock()

    @property
    def problems(self) -> list[tuple[Problem, int]]:
        total: Counter[Problem] = Counter()
        for counts in self._counts.values():
            total.update(counts)
        return list(total.items())

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(self._counts)

    def on(self, device: str | torch.device) -> list[tuple[Problem, int]]:
        """Return a list of (Problem, count) for the problems that ran on one device, in the order of ``problems``."""
        return list(self._counts.get(torch.device(device), Counter()).items())

    def add(self, problem: Problem, count: int = 1, device: torch.device = CPU) -> None:
        """Count a Problem. An empty one (M, N, K or batch is 0) needs no kernel and is not counted."""
        if min(problem.m, problem.n, problem.k, problem.batch) > 0:
            with self._lock:
                self._counts.setdefault(device, Counter())[problem] += count
                self._located_counts[device, self.where, problem] += count

    def places(self, device: torch.device | None = None) -> list[tuple[tuple[int, str], Problem, int]]:
        """Return a list of (where, Problem, count), for one device or for all."""
        return [(where, problem, n) for (d, where, problem), n in self._located_counts.items() if device in (None, d)]

    def __len__(self) -> int:
        return len(self.problems)

    def __repr__(self) -> str:
        return f"<Recording: {len(self)} problems, {sum(count for _, count in self.problems)} calls>"


class record:
    """Context manager that collects the Problems that this thread runs inside the block, in a Recording.

    These are the Problems of F.linear, matmul, mm, addmm, bmm and _int_mm, of F.linear by torchao's tensors, of
    weight-only modules, and of gemmtune's own ops. Weights that are ``nn.Parameter``s, and quantised ones, are recorded
    as constant. Calls with other tensor subclasses (DTensors, say) are not recorded, because the subclass decides what
    they compute. The code computes the same as without ``record()``.

    Only one can be active in a process: raises GemmtuneError when another is.
    """

    def __init__(self) -> None:
        self.recording = Recording()
        self._mode = _Mode(self.recording)
        self._handles: list[Any] = []

    def __enter__(self) -> Recording:
        if not RUNTIME.observe(lambda problem, device: self.recording.add(problem, device=device)):
            raise GemmtuneError("gemmtune.record() is already active in this process; end that block first")
        self._handles = [
            hooks.register_module_forward_pre_hook(self._mode.on_forward_start),
            hooks.register_module_forward_hook(self._mode.on_forward_end, always_call=True),
        ]
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self.recording

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(error_type, error, trace)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        RUNTIME.observe(None)


class _Mode(TorchFunctionMode):
    """A torch function mode that records the matrix multiplies of this thread before they run.

    Inside the forward of a weight-only module (``_depth`` of them are nested) it records nothing, because the module
    is recorded as a whole.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self._depth = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return without_override(func)(*args, **kwargs)
        describer = DESCRIBERS.get(func)
        if describer is not None and not self._depth:
            if func is functional.linear and is_from_torchao(args[1] if len(args) > 1 else kwargs.get("weight")):
                self._note(_quantized_linear, args, kwargs, _device(args, kwargs))
            elif not has_subclass((*args, *kwargs.values())):
                self._note(describer, args, kwargs, _device(args, kwargs))
        return func(*args, **kwargs)

    def _note(
        self, describer: Callable[..., Problem | None], args: Sequence[Any], kwargs: dict[str, Any],
        device: torch.device,
    ) -> None:  # fmt: skip
        """Record the Problem that ``describer`` returns for a call's arguments, if it returns one."""
        try:
            problem = describer(*args, **kwargs)
        except (TypeError, ValueError, GemmtuneError, RuntimeError):
            # A multiply that is no Problem (integers through matmul, say), or a call that PyTorch itself will refuse.
            return
        if problem is not None:
            self._recording.add(problem, device=device)

    def on_forward_start(self, module: nn.Module, args: Any) -> None:
        """Record a weight-only module, and stop recording until its forward ends. A forward pre-hook of all modules."""
        weight_only = recognise(module)
        if weight_only is not None:
            if not self._depth and args and isinstance(args[0], Tensor) and not has_subclass(args):
                self._note(lambda: module_problem(args[0], weight_only), (), {}, args[0].device)
            self._depth += 1

    def on_forward_end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Resume recording when the forward of a weight-only module ends or raises. A forward hook of all modules."""
        if self._depth and recognise(module) is not None:
            self._depth -= 1


def has_subclass(values: Iterable[Any]) -> bool:
    """Whether one of the values is of a tensor subclass. A subclass decides itself what a call computes, which need not
    be the Problem that shapes and dtypes suggest. Tensors without values, as fake tensors are, count as ordinary."""
    return any(isinstance(value, Tensor) and is_subclass(value) and not is_shape_only(value) for value in values)


def _device(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Return the device of the first tensor among a function's arguments; the CPU if there is none."""
    return next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), CPU)


def module_problem(x: Tensor, weight_only: WeightOnly) -> Problem:
    """Return the Problem of activations x [.., K] by a recognised weight-only module."""
    flat = x.reshape(-1, x.shape[-1])
    weight = quant_weight(
        weight_only.weight.detach().t(),
        weight_only.scale.detach(),
        weight_only.zero_point,
        weight_only.bits,
        weight_only.group_size,
        x.shape[-1],
    )
    steps = () if weight_only.bias is None else (bias_step(weight_only.bias),)
    return describe_product(flat, weight, steps, constant=True).problem


def _quantized_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Problem | None:
    """Return the Problem of ``F.linear`` by one of torchao's tensors; None for a format without one."""
    try:
        contents = read(weight)
    except UnknownFormatError:
        return None
    return quantized_problem(input, contents, bias)
