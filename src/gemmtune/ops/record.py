"""``gemmtune.record()``: which matrix multiplies a piece of code runs, as Problems with counts."""

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

from ..core.errors import GemmtuneError
from ..core.memory import is_subclass
from ..core.problem import Problem
from ..dispatch.guards import is_shape_only
from ..dispatch.runtime import RUNTIME
from ..dispatch.targets import CPU
from ..fuse import bias as bias_step
from .composites import is_composite, without_override
from .mixed_mm import describe_product, quant_weight
from .table import DESCRIBERS
from .torchao_formats import UnknownFormatError, is_torchaos, read
from .torchao_formats import problem as quantized_problem
from .weight_only import WeightOnly, recognise


class Recording:
    """What was recorded: ``problems``, a list of (Problem, count), in the order they first came up; ``devices``, where
    they ran, and ``on(device)``, the problems of one of these.

    where: what whoever runs the code says of the place that it is at (which call, which module); counted with it.
    """

    def __init__(self) -> None:
        self.where: tuple[int, str] = (0, "")
        self._places: Counter[tuple[torch.device, tuple[int, str], Problem]] = Counter()
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
        """The problems that ran on one device, as ``problems`` has them."""
        return list(self._counts.get(torch.device(device), Counter()).items())

    def add(self, problem: Problem, count: int = 1, device: torch.device = CPU) -> None:
        """Count a Problem; an empty one (M, N, K or batch 0) needs no kernel and is left out."""
        if min(problem.m, problem.n, problem.k, problem.batch) > 0:
            with self._lock:
                self._counts.setdefault(device, Counter())[problem] += count
                self._places[device, self.where, problem] += count

    def places(self, device: torch.device | None = None) -> list[tuple[tuple[int, str], Problem, int]]:
        """(where, Problem, count) of one device, or of all."""
        return [(w, problem, n) for (place, w, problem), n in self._places.items() if device in (None, place)]

    def __len__(self) -> int:
        return len(self.problems)

    def __repr__(self) -> str:
        return f"<Recording: {len(self)} problems, {sum(count for _, count in self.problems)} calls>"


class record:
    """Context manager that collects the Problems of F.linear, matmul, mm, addmm, bmm, _int_mm, of weight-only modules
    and of gemmtune's own ops, run by this thread inside the block; and those of F.linear by torchao's tensors.

    Weights that are ``nn.Parameter``s, and quantised ones, are recorded as constant. Calls with other tensor
    subclasses (DTensors, say) are not recorded: what these run is their own. Nothing changes in what runs.
    One at a time in a process: raises GemmtuneError when another is active.
    """

    def __init__(self) -> None:
        self.recording = Recording()
        self._mode = _Mode(self.recording)
        self._handles: list[Any] = []

    def __enter__(self) -> Recording:
        if not RUNTIME.observe(lambda problem, device: self.recording.add(problem, device=device)):
            raise GemmtuneError("gemmtune.record() is already active in this process; end that block first")
        self._handles = [
            hooks.register_module_forward_pre_hook(self._mode.before),
            hooks.register_module_forward_hook(self._mode.after, always_call=True),
        ]
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self.recording

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        RUNTIME.observe(None)


class _Mode(TorchFunctionMode):
    """Sees every torch function of this thread before it runs, and records the multiplies among them."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self._inside = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return without_override(func)(*args, **kwargs)
        describer = DESCRIBERS.get(func)
        if describer is not None and not self._inside:
            if func is functional.linear and is_torchaos(args[1] if len(args) > 1 else kwargs.get("weight")):
                self._note(_quantized_linear, args, kwargs, _device(args, kwargs))
            elif not foreign((*args, *kwargs.values())):
                self._note(describer, args, kwargs, _device(args, kwargs))
        return func(*args, **kwargs)

    def _note(
        self, describer: Callable[..., Problem | None], args: Sequence[Any], kwargs: dict[str, Any],
        device: torch.device,
    ) -> None:  # fmt: skip
        try:
            problem = describer(*args, **kwargs)
        except (TypeError, ValueError, GemmtuneError, RuntimeError):
            # Not a multiply gemmtune knows (integers through matmul, say), or a call PyTorch itself will refuse.
            return
        if problem is not None:
            self._recording.add(problem, device=device)

    def before(self, module: nn.Module, args: Any) -> None:
        """A module's forward begins: a weight-only one is recorded whole, and what it runs inside is not."""
        held = recognise(module)
        if held is not None:
            if not self._inside and args and isinstance(args[0], Tensor) and not foreign(args):
                self._note(lambda: weight_only_problem(args[0], held), (), {}, args[0].device)
            self._inside += 1

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward ended, or raised."""
        if self._inside and recognise(module) is not None:
            self._inside -= 1


def foreign(values: Iterable[Any]) -> bool:
    """Whether one is a tensor of a subclass: its arithmetic is its own, and not the Problem that its shape and dtype
    suggest. (Those without values, as fake tensors are, stand for ordinary ones.)"""
    return any(isinstance(value, Tensor) and is_subclass(value) and not is_shape_only(value) for value in values)


def _device(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Where a function's operands lie: its first tensor's device."""
    return next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), CPU)


def weight_only_problem(x: Tensor, held: WeightOnly) -> Problem:
    """The Problem of activations x [.., K] by a recognised weight-only module."""
    flat = x.reshape(-1, x.shape[-1])
    weight = quant_weight(
        held.weight.detach().t(), held.scale.detach(), held.zero_point, held.bits, held.group_size, x.shape[-1]
    )
    steps = () if held.bias is None else (bias_step(held.bias),)
    return describe_product(flat, weight, steps, constant=True).problem


def _quantized_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Problem | None:
    """Return the Problem of ``F.linear`` by one of torchao's tensors; None for a format without one."""
    try:
        stored = read(weight)
    except UnknownFormatError:
        return None
    return quantized_problem(input, stored, bias)
