"""``gemmtune.optimize()``: swap a model's linears for modules that hold their weight packed for the tuned kernels."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..backends.base import PackedWeight
from ..backends.memory import is_subclass, why_unknown
from ..checks import FLOATS
from ..dispatch.plan import Plan
from ..dispatch.portfolio import rank_packings
from ..dispatch.runtime import RUNTIME
from ..errors import GemmtuneError
from ..packing import pack
from ..problem import Problem
from .calls import as_calls, run
from .modules import Linear, RawLinear, RawWeightOnlyLinear, WeightOnlyLinear
from .record import Recording, foreign, linear_problem, record, weight_only_problem
from .weight_only import WeightOnly, recognise

if TYPE_CHECKING:
    from ..decision import Decision
    from ..events import Progress
    from ..store.base import Store

log = logging.getLogger("gemmtune")


@dataclass(slots=True)
class _Site:
    """A linear that may be swapped: the module, every (parent, attribute) that holds it, and what it ran."""

    module: nn.Module
    name: str
    places: list[tuple[nn.Module, str]]
    held: WeightOnly | None
    tied: bool
    ran: Counter[Problem]

    @property
    def device(self) -> torch.device:
        """Where its weight lies."""
        weight = self.held.weight if self.held is not None else self.module.weight
        assert isinstance(weight, Tensor)
        return weight.device


_Module = Linear | WeightOnlyLinear | RawLinear | RawWeightOnlyLinear


@dataclass(slots=True)
class _Swap:
    """A swap that was made: how to find the original's tensors again."""

    site: _Site
    module: _Module
    tensors: dict[str, Tensor]

    @property
    def layout(self) -> str:
        """The layout of its weight; ``raw`` when it lies as it did."""
        return self.module.packed.layout if isinstance(self.module, Linear | WeightOnlyLinear) else self.module.layout


class Handle:
    """What ``optimize`` returns. ``swapped`` and ``left`` say what became of each linear; ``restore()`` undoes it all.

    As a context manager it restores the model at the end of the block.
    """

    def __init__(self) -> None:
        self.left: dict[str, str] = {}
        self._swaps: list[_Swap] = []

    @property
    def swapped(self) -> dict[str, str]:
        """Layout by the name of the module that now holds it; ``raw`` for a weight that lies as it did."""
        return {swap.site.name: swap.layout for swap in self._swaps}

    def restore(self) -> None:
        """Put the original modules back, with their very Parameters, their values unpacked (with any state loaded
        since). Idempotent."""
        with torch.inference_mode(False), torch.no_grad():
            for swap in reversed(self._swaps):
                if isinstance(swap.module, RawLinear | RawWeightOnlyLinear):
                    swap.module.give_back(swap.site.module)
                else:
                    for name, value in swap.module.raw().items():
                        swap.tensors[name].data = value.contiguous()
                for parent, attribute in swap.site.places:
                    setattr(parent, attribute, swap.site.module)
                swap.site.module.train(swap.module.training)
        self._swaps.clear()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"<Handle: {len(self._swaps)} linears swapped, {len(self.left)} left as they were>"


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    tune: bool = True,
    memory: float = 1.25,
    budget: float | None = None,
    store: Store | None = None,
    backends: Sequence[str] | None = None,
    progress: Progress | None = None,
    latency: Literal["graph", "eager"] = "graph",
) -> Handle:
    """Swap, in place, every ``nn.Linear`` and weight-only int8/int4 linear for which something beats PyTorch.

    example_inputs: a Tensor, a tuple of arguments, a dict of keyword arguments, or a list of these (one per call); they
    decide which M count. tune: tune what the store does not know (else only use what it knows). memory: how many times
    a raw weight's bytes its packed form may take. budget, latency: as for ``gemmtune.tune``. The model must be in eval
    mode, on CPUs and GPUs as it is to serve.

    On GPUs a linear may also keep its weight as it lies, when a kernel that takes it so is fastest. A linear is left
    alone when plain PyTorch is best for it, when it has hooks, is on another kind of device, or shares its weight
    (unless memory >= 2, as the raw weight then stays too). Raises TypeError, ValueError, and what the model raises.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize(): expected a torch.nn.Module, not {type(model).__name__}")
    if model.training:
        raise ValueError(
            "optimize(): the model is in training mode, and packed weights cannot train; call model.eval()"
        )
    if not memory >= 1:
        raise ValueError(f"optimize(): memory must be at least 1 (times the raw weight's bytes); got {memory!r}")
    as_calls(example_inputs)
    handle = Handle()
    sites = list(_sites(model, handle, memory))
    recorded = _observe(model, example_inputs, sites)
    decisions: list[Decision] = []
    if tune:
        from ..api import tune as tune_now

        for device in recorded.devices:
            if device.type in ("cpu", "cuda"):
                decisions += tune_now(
                    recorded.on(device), budget=budget, store=store, backends=backends, progress=progress,
                    device=device, latency=latency,
                )  # fmt: skip
    else:
        RUNTIME.refresh(store)
    undecided = {d.problem_key for d in decisions if d.outcome == "inconclusive"}
    with torch.inference_mode(False), torch.no_grad():
        for site in sites:
            reason = _swap(site, handle, memory)
            if reason and undecided & {problem.key for problem in site.ran}:
                reason = "the machine was too busy to decide: optimize it again (what is decided is kept)"
            if reason:
                handle.left[site.name] = reason
    return handle


def _sites(model: nn.Module, handle: Handle, memory: float) -> Iterator[_Site]:
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        # Not named_children(), which names a module used twice only once.
        for attribute, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, attribute))
    owners = Counter(id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()))
    for name, module in model.named_modules():
        held = recognise(module)
        if held is None and type(module) is not nn.Linear:
            continue
        reason = _unfit(module, held, module not in places)
        weight = held.weight if held is not None else module.weight
        tied = isinstance(weight, Tensor) and owners[id(weight)] > 1
        if tied and memory < 2:
            reason = reason or "shares its weight with another module (memory=2 would keep both forms)"
        if reason:
            handle.left[name] = reason
        else:
            yield _Site(module, name, places[module], held, tied, Counter())


# The dicts of nn.Module's hooks that are not swapped along.
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def _unfit(module: nn.Module, held: WeightOnly | None, root: bool) -> str:
    """Why a linear cannot be swapped at all, or empty."""
    if root:
        return "is the model itself, which has no parent to swap it in"
    if any(vars(module).get(hooks) for hooks in _HOOKS):
        return "has hooks, which a swapped module would not run"
    if "forward" in vars(module):
        return "has a forward of its own (somebody replaced it on this very module)"
    named = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    if held is not None:  # an adapter may have taken them from elsewhere
        of_held = {"weight": held.weight, "scale": held.scale, "zero point": held.zero_point}
        named.update({name: tensor for name, tensor in of_held.items() if tensor is not None})
    for name, tensor in named.items():
        if is_subclass(tensor):
            return f"its {name} is {why_unknown(tensor)}"
    tensors = tuple(named.values())
    if any(t.device.type not in ("cpu", "cuda") or t.layout != torch.strided for t in tensors):
        return "is not in dense CPU or CUDA tensors"
    if len({t.device for t in tensors}) > 1:
        return "has tensors on several devices"
    for name, tensor in named.items():
        if why_unknown(tensor):
            return f"its {name} is {why_unknown(tensor)}"
    weight = module.weight
    if type(module) is nn.Linear and isinstance(weight, Tensor) and weight.dtype not in FLOATS:
        return f"holds {weight.dtype}, which is not a dtype gemmtune packs"
    return ""


def _observe(model: nn.Module, example_inputs: Any, sites: Sequence[_Site]) -> Recording:
    """Run the examples; count what each site ran, and return every Problem of the model."""
    handles = [site.module.register_forward_pre_hook(_counter(site)) for site in sites]
    try:
        with record() as recorded:
            run(model, example_inputs)
    finally:
        for handle in handles:
            handle.remove()
    return recorded


def _counter(site: _Site) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor) or foreign(args[:1]) or args[0].numel() == 0:
            return
        try:
            with torch._C.DisableTorchFunction():
                problem = _site_problem(site, args[0])
        except (TypeError, ValueError, RuntimeError):
            return
        site.ran[problem] += 1

    return hook


def _site_problem(site: _Site, x: Tensor) -> Problem:
    if site.held is not None:
        return weight_only_problem(x, site.held)
    bias = site.module.bias
    weight = site.module.weight
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return linear_problem(x, weight, bias)


def _swap(site: _Site, handle: Handle, memory: float) -> str:
    """Swap one site in, or say why it stays."""
    if not site.ran:
        return "did not run on the example inputs"
    plans = {problem.plan_key for problem in site.ran}
    if len(plans) > 1:
        return "ran with inputs of several dtypes"
    plan_key = plans.pop()
    points = RUNTIME.index(site.device).points(plan_key)
    if not points:
        return "has no decision in the store (tune=True would make one)"
    counts = {problem.m: float(count) for problem, count in site.ran.items()}
    points = [p for p in points if p.m in counts] or points
    layouts = [name for name in rank_packings(points, counts) if name is not None]
    packed = next(filter(None, (_packed(site, layout, memory) for layout in layouts)), None)
    if packed is not None:
        return _place(site, packed, handle)
    if site.device.type == "cuda" and _ours(RUNTIME.index(site.device).plan(plan_key, None)):
        return _place_raw(site, handle)
    if not layouts:
        return "plain PyTorch is best"
    return f"no winning layout fits in {memory} times the raw weight's bytes"


def _ours(plan: Plan | None) -> bool:
    """Whether a kernel that is not ATen's serves some M of a raw weight."""
    entries = () if plan is None else plan.entries
    return any(entry.candidate is not None and entry.candidate.backend != "aten" for entry in entries)


def _packed(site: _Site, layout: str, memory: float) -> PackedWeight | None:
    held, problems = site.held, list(site.ran)
    raw = problems[0].weight_bytes
    try:
        if held is None:
            weight = site.module.weight
            assert isinstance(weight, Tensor)
            packed = pack(weight, m=problems, layout=layout)
        else:
            packed = pack(
                held.weight, scale=held.scale, zero_point=held.zero_point, bits=held.bits, group_size=held.group_size,
                m=problems, layout=layout,
            )  # fmt: skip
    except GemmtuneError as error:
        log.debug("%s cannot be packed as %s: %s", site.name, layout, error)
        return None
    return packed if packed.nbytes <= memory * raw * (2 if site.tied else 1) - (raw if site.tied else 0) else None


def _place(site: _Site, packed: PackedWeight, handle: Handle) -> str:
    original, held = site.module, site.held
    bias = original.bias if held is None else held.bias
    assert bias is None or isinstance(bias, Tensor)
    if held is None:
        weight = original.weight
        assert isinstance(weight, nn.Parameter)
        module: _Module = Linear(packed, bias, trainable=_trainable(weight, bias))
        tensors: dict[str, Tensor] = {"weight": weight}
    else:
        module = WeightOnlyLinear(packed, bias, names=held.names, transposed_scale=held.transposed_scale)
        tensors = {name: getattr(original, name) for name in held.names.values()}
        if not _agrees(original, module, next(iter(site.ran))):
            return "looks like a weight-only linear and computes something else"
    _put(site, module, tensors, handle)
    if not site.tied:
        for tensor in tensors.values():
            tensor.data = tensor.data.new_empty(0)
    return ""


def _place_raw(site: _Site, handle: Handle) -> str:
    """Serve a weight that stays as it lies."""
    original, held = site.module, site.held
    if held is None:
        assert isinstance(original, nn.Linear)
        _put(site, RawLinear(original), {}, handle)
        return ""
    if held.transposed_scale:
        return "has its scales the other way round than the fastest kernel takes them"
    module = RawWeightOnlyLinear(original, held)
    if not _agrees(original, module, next(iter(site.ran))):
        return "looks like a weight-only linear and computes something else"
    _put(site, module, {}, handle)
    return ""


def _put(site: _Site, module: _Module, tensors: dict[str, Tensor], handle: Handle) -> None:
    for parent, attribute in site.places:
        setattr(parent, attribute, module)
    handle._swaps.append(_Swap(site, module, tensors))


def _trainable(weight: Tensor, bias: Tensor | None) -> bool:
    return weight.requires_grad or (bias is not None and bias.requires_grad)


def _agrees(original: nn.Module, module: nn.Module, problem: Problem) -> bool:
    """Whether a module recognised by its attributes computes what they suggest: two random rows, within a few percent
    (it may round its weight to the activations' dtype)."""
    x = torch.randn(2, problem.k, generator=torch.Generator().manual_seed(0)).to(getattr(torch, problem.a.dtype))
    x = x.to(next(t.device for t in (*original.parameters(False), *original.buffers(False))))
    try:
        wanted, got = original(x).double(), module(x).double()
    except (RuntimeError, TypeError, ValueError) as error:
        log.debug("%s could not be compared: %s", type(original).__name__, error)
        return False
    return wanted.shape == got.shape and bool((wanted - got).norm() <= 0.05 * wanted.norm())
