"""``gemmtune.optimize()``: the weights of a model's products are packed for the tuned kernels.

A floating weight becomes a ``PackedTensor`` in place, and its module stays the module that it is. Weight-only int8 and
int4 linears are swapped for modules of gemmtune's own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.errors import GemmtuneError, PackedWeightError
from ..core.problem import Problem
from ..core.weights import PackedWeight
from ..dispatch.plan import Plan
from ..dispatch.portfolio import rank_packings
from ..dispatch.runtime import RUNTIME
from ..ops.calls import as_calls, calls_of
from ..ops.packing import pack
from ..ops.weight_only import WeightOnly
from .modules import RawLinear, RawWeightOnlyLinear, WeightOnlyLinear
from .observe import observe, why_not_packed
from .packed_tensor import PackedTensor, swap_tensors
from .quantized_tensor import QuantizedTensor, pack_quantized
from .sites import Site, find_sites, why_unswappable
from .whole_model import can_hold
from .whole_model import compare as compare_forms

if TYPE_CHECKING:
    from ..core.decision import Decision
    from ..core.events import Progress
    from ..store.base import Store

log = logging.getLogger("gemmtune")


_Module = WeightOnlyLinear | RawLinear | RawWeightOnlyLinear


@dataclass(slots=True)
class _Swap:
    """A module that was swapped in: how to find the original's tensors again.

    tensors: those of the original whose values the module has packed. keeps: whether they still hold their values,
    until the whole model has been timed in both forms.
    """

    site: Site
    module: _Module
    tensors: dict[str, Tensor]
    keeps: bool

    @property
    def layout(self) -> str:
        """The layout of its weight; ``raw`` when it lies as it did."""
        return self.module.packed.layout if isinstance(self.module, WeightOnlyLinear) else self.module.layout

    def set_form(self, ours: bool) -> None:
        """Put gemmtune's module or the original into the model, while the original has its tensors."""
        if self.keeps:
            self._put(self.module if ours else self.site.module)

    def settle(self) -> None:
        """Free the original's tensors, whose values the module has packed."""
        if self.keeps and not self.site.tied:
            for tensor in self.tensors.values():
                tensor.data = tensor.data.new_empty(0)
        self.keeps = False

    def undo(self) -> None:
        """Put the original module back."""
        if isinstance(self.module, RawLinear | RawWeightOnlyLinear):
            self.module.give_back(self.site.module)
        else:
            for name, value in self.module.raw().items():
                self.tensors[name].data = value.contiguous()
        self._put(self.site.module)
        self.site.module.train(self.module.training)

    def _put(self, module: nn.Module) -> None:
        for parent, attribute in self.site.places:
            setattr(parent, attribute, module)


@dataclass(slots=True)
class _Repacked:
    """A Parameter that became a PackedTensor, in place, and the hooks that save its unpacked values.

    other: what it was, until the whole model has been timed in both forms; then None.
    """

    site: Site
    weight: Tensor
    layout: str
    hooks: list[Any]
    other: Tensor | None

    def set_form(self, ours: bool) -> None:
        """Give the Parameter its packed or its ordinary form, while there are both. Raises PackedWeightError."""
        if self.other is not None and isinstance(self.weight, PackedTensor) != ours:
            swap_tensors(self.weight, self.other)

    def settle(self) -> None:
        """Let the form go that the Parameter has not."""
        self.other = None

    def undo(self) -> None:
        """Make the Parameter an ordinary one again, with its values of now. One that something else has made ordinary
        (``model.half()``, ``weight.data = ...``) stays as it is."""
        for hook in self.hooks:
            hook.remove()
        if not isinstance(self.weight, PackedTensor):
            return
        packed: Tensor = self.weight
        trainable = self.weight.trainable or packed.requires_grad
        plain = nn.Parameter(self.weight.original(), requires_grad=trainable)
        try:
            swap_tensors(packed, plain)
        except PackedWeightError:  # a compiled graph refers to it: its owners get a Parameter of their own
            for owner in self.site.owners:
                names = [name for name, parameter in owner._parameters.items() if parameter is packed]
                owner._parameters.update(dict.fromkeys(names, plain))


class Handle:
    """What ``optimize`` returns. ``swapped`` and ``left`` say what became of each weight that the model multiplies by;
    ``restore()`` undoes it all. A weight has the name of its module, or of its Parameter if that is not "weight".

    ``ratio``: the time of the whole model with gemmtune's weights over its time without, as (estimate, low, high) of a
    95% interval of paired runs on all example inputs; None where it was not timed. ``ratios``: the same for each
    example. As a context manager it restores the model at the end of the block.
    """

    def __init__(self) -> None:
        self.left: dict[str, str] = {}
        self.ratio: tuple[float, float, float] | None = None
        self.ratios: tuple[tuple[float, float, float], ...] = ()
        self._swaps: list[_Swap | _Repacked] = []

    @property
    def swapped(self) -> dict[str, str]:
        """Layout of the weight by its name; ``raw`` for a weight that lies as it did."""
        return {name: swap.layout for swap in self._swaps for name in swap.site.names}

    def restore(self) -> None:
        """Unpack the very Parameters that were packed, with the values that they have now (written, loaded), and put
        the modules back that were swapped. Idempotent."""
        with torch.inference_mode(False), torch.no_grad():
            for swap in reversed(self._swaps):
                swap.undo()
        self._swaps.clear()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        timed = (
            "" if self.ratio is None else ", {:.2f}x the time of the whole model ({:.2f}..{:.2f})".format(*self.ratio)
        )
        return f"<Handle: {len(self.swapped)} weights swapped, {len(self.left)} left as they were{timed}>"


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
    compare: bool | None = None,
) -> Handle:
    """Pack, in place, the weight of every product for which something beats PyTorch: of ``nn.Linear`` and modules like
    it (transformers' Conv1D, the projections of ``nn.MultiheadAttention``), and of weight-only int8 or int4 linears.

    example_inputs: a Tensor, a tuple of arguments, a dict of keyword arguments, or a list of these (one per call); they
    decide which M count. tune: tune what the store does not know (else only use what it knows). memory: how many times
    a raw weight's bytes its packed form may take. budget, latency: as for ``gemmtune.tune``. compare: whether
    the whole model is then timed on the examples with and without gemmtune's weights (about 2 s), and restored when
    they make all examples together slower, or one of them by more than 3% (default: as ``tune``; not for CUDA graphs).
    The model must be in eval mode, on CPUs and GPUs as it is to serve.

    Any Parameter [N, K] or [K, N] is packed that F.linear, matmul, mm or addmm multiplies by in forward. It is still a
    Parameter with its shape and dtype: reading it unpacks it, writing to it packs it again, ``state_dict()`` has its
    values. On GPUs a linear may also keep its weight as it lies, when a kernel that takes it so is fastest. A weight is
    left alone when plain PyTorch is best for it, when it is on another kind of device, or when something else reads it
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
    matrices = find_sites(model, memory, handle.left)
    recorded = observe(model, example_inputs, matrices, handle.left)
    sites = [site for site in matrices if site.is_product]
    decisions: list[Decision] = []
    if tune:
        from ..tuning.api import tune as tune_now

        for device in recorded.devices:
            if device.type in ("cpu", "cuda"):
                decisions += tune_now(
                    recorded.on(device), budget=budget, store=store, backends=backends, progress=progress,
                    device=device, latency=latency,
                )  # fmt: skip
    else:
        RUNTIME.refresh(store)
    undecided = {d.problem_key for d in decisions if d.outcome == "inconclusive"}
    compare = (tune if compare is None else compare) and _comparable(sites, latency)
    with torch.inference_mode(False), torch.no_grad():
        for site in sites:
            reason = _swap(site, handle, memory, keeps=compare)
            if reason and undecided & {problem.key for problem in site.ran}:
                reason = "the machine was too busy to decide: optimize it again (what is decided is kept)"
            if reason:
                handle.left.update(dict.fromkeys(site.names, reason))
    if compare:
        _undo_what_is_slower(model, example_inputs, handle)
    return handle


def _comparable(sites: Sequence[Site], latency: str) -> bool:
    """Whether the whole model can be timed with and without gemmtune's weights: both fit into memory. (Where launches
    are captured into CUDA graphs, a timing of eager calls would say nothing.)"""
    weights: dict[torch.device, int] = {}
    for site in sites:
        if site.ran and not site.reason:
            weights[site.device] = weights.get(site.device, 0) + site.weight.nbytes
    if any(device.type == "cuda" for device in weights) and latency == "graph":
        return False
    return bool(weights) and all(can_hold(2 * size, device) for device, size in weights.items())


def _undo_what_is_slower(model: nn.Module, example_inputs: Any, handle: Handle) -> None:
    """Time the whole model with and without gemmtune's weights, and restore it where they are slower."""

    def set_form(ours: bool) -> None:
        for swap in handle._swaps:
            swap.set_form(ours)

    found = None
    if handle._swaps:
        devices = sorted({swap.site.device for swap in handle._swaps}, key=str)
        found = compare_forms(calls_of(model, example_inputs), set_form, devices)
        try:
            set_form(True)
        except PackedWeightError as error:  # a part of the model compiled itself, and its guards refer to weights
            stuck = [s for s in handle._swaps if isinstance(s, _Repacked) and not isinstance(s.weight, PackedTensor)]
            for repacked in stuck:
                repacked.undo()
                handle.left.update(dict.fromkeys(repacked.site.names, f"cannot be packed in place ({error})"))
            handle._swaps = [swap for swap in handle._swaps if swap not in stuck]
            for swap in handle._swaps:
                swap.set_form(True)
    for swap in handle._swaps:
        swap.settle()
    if found is None:
        return
    handle.ratio = (found.total.center, found.total.lo, found.total.hi)
    handle.ratios = tuple((item.center, item.lo, item.hi) for item in found.examples)
    if found.loss:
        names = [name for swap in handle._swaps for name in swap.site.names]
        reason = f"the whole model is slower with packed weights {found.loss}"
        handle.restore()
        handle.left.update(dict.fromkeys(names, reason))
        log.warning("optimize(): %s; its %d weights stay as they were", reason, len(names))


def _swap(site: Site, handle: Handle, memory: float, keeps: bool) -> str:
    """Have one site served, or say why it stays. keeps: the ordinary form, for the whole model to be timed in both."""
    if site.reason:
        return site.reason
    if site.otherwise and not site.multiplied:
        return why_not_packed(site.otherwise)
    if site.reads and memory < 2:
        names = ", ".join(sorted(site.reads))
        return f"its weight is read besides its product, by {names} (memory=2 would keep both forms)"
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
    serves_raw = site.device.type == "cuda"  # on a CPU a module whose weight stays as it lies runs plain PyTorch
    ranked = rank_packings(points, counts, raw_kernels=serves_raw)
    layouts = [name for name in ranked if name is not None]
    packed = next(filter(None, (_packed(site, layout, memory) for layout in layouts)), None)
    if site.quantized is not None:
        return _repack(site, QuantizedTensor.of_weight(site.quantized, packed), handle, keeps)
    if packed is not None and site.held is None:
        raw = site.matrix if site.shared else None
        return _repack(site, PackedTensor.of(packed, raw, transposed=site.transposed), handle, keeps)
    if packed is not None and site.held is not None:
        return _place(site, site.held, packed, handle, keeps)
    if serves_raw and _ours(RUNTIME.index(site.device).plan(plan_key, None)):
        return _place_raw(site, handle, keeps)
    if not layouts:
        return "plain PyTorch is best"
    return f"no winning layout fits in {memory} times the raw weight's bytes"


def _ours(plan: Plan | None) -> bool:
    """Whether a kernel that is not ATen's serves some M of a raw weight."""
    entries = () if plan is None else plan.entries
    return any(entry.candidate is not None and entry.candidate.backend != "aten" for entry in entries)


def _packed(site: Site, layout: str, memory: float) -> PackedWeight | None:
    held, problems = site.held, list(site.ran)
    raw = problems[0].weight_bytes
    try:
        if site.quantized is not None:
            packed = pack_quantized(site.quantized, layout=layout, problems=problems)
            raw = site.quantized.nbytes
        elif held is None:
            packed = pack(site.matrix, m=problems, layout=layout)
        else:
            packed = pack(
                held.weight, scale=held.scale, zero_point=held.zero_point, bits=held.bits, group_size=held.group_size,
                m=problems, layout=layout,
            )  # fmt: skip
    except GemmtuneError as error:
        log.debug("%s cannot be packed as %s: %s", site.name, layout, error)
        return None
    return packed if packed.nbytes <= memory * raw * (2 if site.shared else 1) - (raw if site.shared else 0) else None


def _repack(site: Site, form: PackedTensor, handle: Handle, keeps: bool) -> str:
    """Make the site's very Parameter a packed one, whoever refers to it."""
    weight = site.weight
    if isinstance(form, QuantizedTensor) and not _same_product(weight, form, next(iter(site.ran))):
        return f"its weight looks like a {type(weight).__qualname__} that gemmtune knows and computes something else"
    try:
        other = nn.Parameter(form, requires_grad=False)
        other.trainable = weight.requires_grad  # type: ignore[attr-defined]
        swap_tensors(weight, other)
    except PackedWeightError as error:
        return f"cannot be packed in place ({error})"
    hooks = [owner._register_state_dict_hook(_save_unpacked) for owner in site.owners]  # type: ignore[no-untyped-call]
    handle._swaps.append(_Repacked(site, weight, form.layout_name, hooks, other if keeps else None))
    return ""


def _same_product(weight: Tensor, form: QuantizedTensor, problem: Problem) -> bool:
    """Whether torchao's linear by ``weight`` and ours by ``form`` agree within a few percent, on two random rows."""
    x = torch.randn(2, problem.k, generator=torch.Generator().manual_seed(0)).to(weight.dtype).to(weight.device)
    try:
        wanted, got = functional.linear(x, weight).double(), functional.linear(x, form).double()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        log.debug("a %s could not be compared: %s", type(weight).__name__, error)
        return False
    return wanted.shape == got.shape and bool((wanted - got).norm() <= 0.05 * wanted.norm())


def _save_unpacked(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A module's state has the values of packed weights (copies of them), as those who load it expect."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, PackedTensor) and isinstance(state.get(prefix + name), PackedTensor):
            state[prefix + name] = parameter.copied()


def _place(site: Site, held: WeightOnly, packed: PackedWeight, handle: Handle, keeps: bool) -> str:
    original = site.module
    module = WeightOnlyLinear(packed, held.bias, names=held.names, transposed_scale=held.transposed_scale)
    tensors: dict[str, Tensor] = {name: getattr(original, name) for name in held.names.values()}
    if not _agrees(original, module, next(iter(site.ran))):
        return "looks like a weight-only linear and computes something else"
    _put(_Swap(site, module, tensors, keeps=True), handle, keeps)
    return ""


def _place_raw(site: Site, handle: Handle, keeps: bool) -> str:
    """Serve a weight that stays as it lies."""
    original, held = site.module, site.held
    if held is None:
        reason = why_unswappable(original, None, not site.places)
        if reason or type(original) is not nn.Linear or site.aliases:
            return reason or f"is a {type(original).__name__}, and its weight is best served as it lies"
        _put(_Swap(site, RawLinear(original), {}, keeps=True), handle, keeps)
        return ""
    if held.transposed_scale:
        return "has its scales the other way round than the fastest kernel takes them"
    module = RawWeightOnlyLinear(original, held)
    if not _agrees(original, module, next(iter(site.ran))):
        return "looks like a weight-only linear and computes something else"
    _put(_Swap(site, module, {}, keeps=True), handle, keeps)
    return ""


def _put(swap: _Swap, handle: Handle, keeps: bool) -> None:
    """Put a module into the model. keeps: its original's tensors, for the whole model to be timed in both forms."""
    swap.set_form(True)
    if not keeps:
        swap.settle()
    handle._swaps.append(swap)


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
