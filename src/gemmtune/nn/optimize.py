"""``gemmtune.optimize()``, which packs the weights of a model for the kernels that won its tuning.

A floating weight is replaced in place by a ``PackedTensor``; its module is not changed. A weight-only int8 or int4
linear is replaced by one of gemmtune's modules.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..backends.cublaslt.choice import load_chosen_kernels
from ..core import devices
from ..core.devices import is_host, is_served
from ..core.errors import PackedWeightError
from ..core.weights import PackedWeight
from ..dispatch.plan import Plan
from ..dispatch.runtime import RUNTIME
from ..ops.calls import as_calls, calls_of
from ..ops.weight_only import WeightOnly
from .changes import Handle, PackedParameter, ReplacedModule
from .modules import RawLinear, RawWeightOnlyLinear, WeightOnlyLinear
from .observe import observe, why_not_packed
from .packed_sites import pack_best, ranked_layouts
from .packed_tensor import PackedTensor, swap_tensors
from .quantized_tensor import QuantizedTensor
from .same_results import computes_same, same_product
from .sites import Site, find_sites, why_unswappable
from .whole_model import compare as compare_forms
from .whole_model import fits_in_memory

if TYPE_CHECKING:
    from ..core.decision import Decision
    from ..core.events import Progress
    from ..core.problem import Problem
    from ..store.base import Store
    from ..tuning.config_keys import ConfigKey
    from ..tuning.sizes import Sizes

log = logging.getLogger("gemmtune")


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
    m: Sizes | None = "all",
    config_key: ConfigKey | None = None,
) -> Handle:
    """Pack in place each weight of a model for which a kernel was faster than PyTorch's, and return a Handle.

    Weights are those of ``nn.Linear`` and similar modules (transformers' Conv1D, the projections of
    ``nn.MultiheadAttention``), and of weight-only int8 or int4 linears. The model must be in eval mode, and on the
    devices (CPUs and GPUs) on which it is to serve.

    example_inputs: a Tensor, a tuple of arguments, a dict of keyword arguments, or a list of these (one per call). The
        values of M in these calls decide which layout is best.
    tune: whether to tune the Problems that the store has no decision for. Otherwise only stored decisions are used.
    memory: the most bytes that a packed weight may take, as a multiple of the raw weight's bytes. With 2 or more, a
        weight is kept in both forms, raw and packed, if the raw one is clearly faster at some M (5% and the noise), and
        each M is served by the faster form. The packed one may take ``memory - 1`` times the raw weight's bytes, and a
        quarter more for padding. Weight-only int8 and int4 weights, and fp8 ones, are served in one form.
    budget, store, backends, progress, latency: as for ``gemmtune.tune``.
    compare: whether to time the whole model afterwards on the examples, with and without gemmtune's weights (about
        2 s), and to restore it if they make all examples together slower, or one of them by more than 3%. By default
        as ``tune``. With ``latency="graph"`` a model on a GPU is not timed.
    m: the M that each weight is tuned for, as for ``gemmtune.tune``: ``"all"`` (1 to 512 on a CPU, 1 to 8192 on a GPU),
        a ``range`` or hints. The M in the examples weigh more than others; those outside of a ``range`` are not tuned.
        None, which takes less time: each product at its M in the examples only. Plans for a range of M that the store
        has are used in any case; on a GPU, all of their kernels are loaded at once, so that CUDA graphs can be captured
        at any M of the range.
    config_key: coarsens ``m``, as for ``gemmtune.tune``: None, ``"exact"``, ``"power_of_2"`` or a function of M.

    A Parameter [N, K] or [K, N] is packed if F.linear, matmul, mm or addmm multiplies by it in ``forward``. It is still
    a Parameter of its shape and dtype: reading it unpacks it, writing to it packs the new values, and ``state_dict()``
    has its values. On GPUs a linear may also keep its weight unpacked, when a kernel for unpacked weights is fastest.

    A weight is not changed when PyTorch's own kernel is best for it, when it is on a device of another type, or when a
    function besides its product reads it (unless memory >= 2, with which the raw weight is kept beside the packed one).
    Raises TypeError, ValueError, and what the model raises.
    """
    _require_valid(model, example_inputs, memory, m, config_key)
    handle = Handle()
    all_sites = find_sites(model, memory, handle.left)
    recorded = observe(model, example_inputs, all_sites, handle.left)
    sites = [site for site in all_sites if site.is_product]
    decisions: list[Decision] = []
    if tune:
        from ..tuning.api import tune as tune_now

        for device in recorded.devices:
            if is_served(device):
                decisions += tune_now(
                    recorded.on(device), budget=budget, store=store, backends=backends, progress=progress,
                    device=device, latency=latency, m=m, config_key=config_key,
                )  # fmt: skip
    else:
        RUNTIME.refresh(store)
    undecided = {d.problem_key for d in decisions if d.outcome == "inconclusive"}
    compare = (tune if compare is None else compare) and _comparable(sites, latency)
    with torch.inference_mode(False), torch.no_grad():
        for site in sites:
            reason = _optimize_site(site, handle, memory, keep_both=compare)
            if reason and undecided & {problem.key for problem in site.ran}:
                reason = "the machine was too busy to decide: optimize it again (what is decided is kept)"
            if reason:
                handle.left.update(dict.fromkeys(site.names, reason))
    if compare:
        _undo_what_is_slower(model, example_inputs, handle)
    _preload_plans(handle)
    return handle


def _require_valid(
    model: nn.Module, example_inputs: Any, memory: float, m: Sizes | None, config_key: ConfigKey | None
) -> None:
    """Raise TypeError or ValueError for arguments of ``optimize`` that are wrong, before the model runs."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize(): expected a torch.nn.Module, not {type(model).__name__}")
    if model.training:
        raise ValueError(
            "optimize(): the model is in training mode, and packed weights cannot train; call model.eval()"
        )
    if not memory >= 1:
        raise ValueError(f"optimize(): memory must be at least 1 (times the raw weight's bytes); got {memory!r}")
    as_calls(example_inputs)
    from ..tuning.config_keys import keyed, require_keyed_range

    require_keyed_range(config_key, m)
    if m is not None:
        from ..tuning.sizes import parse_sizes

        # Only to raise early: what is valid for the CPU's range, which is shorter than others, is likely to be valid.
        keyed(parse_sizes(m, devices.get("cpu").profile), config_key)


def _preload_plans(handle: Handle) -> None:
    """Load the kernels of each served weight's plan for a range of M, and cuBLAS's where PyTorch serves: on a GPU, a
    CUDA graph that is captured at an M can only have kernels that are loaded."""
    for change in handle.changes:
        device, layout = change.site.device, None if change.layout == "raw" else change.layout
        problem = next(iter(change.site.ran))
        if not is_host(device.type) and RUNTIME.index(device).tuned_plan(problem.plan_key) is not None:
            RUNTIME.preload(problem, layout, device)
            if layout is None:
                _load_library_kernels(problem, change.site)
            if isinstance(change, PackedParameter) and change.keeps_raw:
                RUNTIME.preload(problem, None, device)


def _load_library_kernels(problem: Problem, site: Site) -> None:
    """Have cuBLAS load the kernels that it chooses for the M that PyTorch's own op serves by the weight's plan."""
    plan, weight = RUNTIME.index(site.device).plan(problem.plan_key, None), site.weight
    if plan is not None and problem.is_mm_alone and site.device.type == "cuda":
        load_chosen_kernels(problem, plan.plain_sizes(), weight if site.transposed else weight.t())


def _comparable(sites: Sequence[Site], latency: str) -> bool:
    """Whether the whole model can be timed with and without gemmtune's weights, which needs memory for both forms.
    False where launches will be captured into CUDA graphs: a timing of eager calls would say nothing about those."""
    weights: dict[torch.device, int] = {}
    for site in sites:
        if site.ran and not site.reason:
            weights[site.device] = weights.get(site.device, 0) + site.weight.nbytes
    if latency == "graph" and not all(is_host(device.type) for device in weights):
        return False
    return bool(weights) and all(fits_in_memory(2 * size, device) for device, size in weights.items())


def _undo_what_is_slower(model: nn.Module, example_inputs: Any, handle: Handle) -> None:
    """Time the whole model with and without gemmtune's weights. Restore it if they make it slower."""

    def set_form(optimized: bool) -> None:
        for change in handle.changes:
            change.set_form(optimized)

    comparison = None
    if handle.changes:
        devices = sorted({change.site.device for change in handle.changes}, key=str)
        comparison = compare_forms(calls_of(model, example_inputs), set_form, devices)
        try:
            set_form(True)
        except PackedWeightError as error:  # a part of the model compiled itself, and guards refer to its weights
            still_unpacked = [
                s for s in handle.changes if isinstance(s, PackedParameter) and not isinstance(s.weight, PackedTensor)
            ]
            for parameter in still_unpacked:
                parameter.undo()
                handle.left.update(dict.fromkeys(parameter.site.names, f"cannot be packed in place ({error})"))
            handle.changes = [change for change in handle.changes if change not in still_unpacked]
            for change in handle.changes:
                change.set_form(True)
    for change in handle.changes:
        change.discard_original()
    if comparison is None:
        return
    handle.ratio = (comparison.total.center, comparison.total.lo, comparison.total.hi)
    handle.ratios = tuple((ratio.center, ratio.lo, ratio.hi) for ratio in comparison.examples)
    if comparison.loss:
        names = [name for change in handle.changes for name in change.site.names]
        reason = f"the whole model is slower with packed weights {comparison.loss}"
        handle.restore()
        handle.left.update(dict.fromkeys(names, reason))
        log.warning("optimize(): %s; its %d weights stay as they were", reason, len(names))


def _optimize_site(site: Site, handle: Handle, memory: float, keep_both: bool) -> str:
    """Have gemmtune serve the weight of ``site``. Return why it cannot, or an empty string.

    keep_both: whether to keep the original form too, so that the whole model can be timed in both.
    """
    if site.reason:
        return site.reason
    if site.unpackable_products and not site.is_multiplied:
        return why_not_packed(site.unpackable_products)
    if site.other_readers and memory < 2:
        names = ", ".join(sorted(site.other_readers))
        return f"its weight is read besides its product, by {names} (memory=2 would keep both forms)"
    if not site.ran:
        return "did not run on the example inputs"
    plans = {problem.plan_key for problem in site.ran}
    if len(plans) > 1:
        return "ran with inputs of several dtypes"
    plan_key = plans.pop()
    index = RUNTIME.index(site.device)
    if not index.knows(plan_key):
        return "has no decision in the store (tune=True would make one)"
    serves_raw = not is_host(site.device.type)  # on a CPU a module with an unpacked weight runs PyTorch's own kernel
    layouts = ranked_layouts(site, index, plan_key, memory, raw_kernels=serves_raw)
    packed, keeps_raw = pack_best(site, layouts, memory)
    if site.quantized is not None:
        form = QuantizedTensor.of_weight(site.quantized, packed, keeps_raw=keeps_raw)
        return _pack_in_place(site, form, handle, keep_both)
    if packed is not None and site.weight_only is None:
        raw = site.matrix if site.shared or keeps_raw else None
        return _pack_in_place(site, PackedTensor.of(packed, raw, transposed=site.transposed), handle, keep_both)
    if packed is not None and site.weight_only is not None:
        return _replace_module(site, site.weight_only, packed, handle, keep_both)
    if serves_raw and _has_tuned_kernel(index.plan(plan_key, None)):
        return _serve_unpacked(site, handle, keep_both)
    if not layouts:
        return "plain PyTorch is best"
    return f"no winning layout fits in {memory} times the raw weight's bytes"


def _has_tuned_kernel(plan: Plan | None) -> bool:
    """Whether the plan of an unpacked weight has, for some M, a kernel that is not ATen's."""
    if plan is None:
        return False
    entries = [*plan.entries, *(interval.entry for interval in plan.intervals)]
    return any(entry.candidate is not None and entry.candidate.backend != "aten" for entry in entries)


def _pack_in_place(site: Site, form: PackedTensor, handle: Handle, keep_both: bool) -> str:
    """Turn the Parameter of ``site`` into ``form`` in place, for everything that refers to it. Return why this is
    impossible, or an empty string."""
    weight = site.weight
    if isinstance(form, QuantizedTensor) and not same_product(weight, form, next(iter(site.ran))):
        return f"its weight looks like a {type(weight).__qualname__} that gemmtune knows and computes something else"
    try:
        other = nn.Parameter(form, requires_grad=False)
        other.trainable = weight.requires_grad  # type: ignore[attr-defined]
        swap_tensors(weight, other)
    except PackedWeightError as error:
        return f"cannot be packed in place ({error})"
    hooks = [owner._register_state_dict_hook(_save_unpacked) for owner in site.owners]  # type: ignore[no-untyped-call]
    handle.changes.append(PackedParameter(site, weight, form.layout_name, hooks, other if keep_both else None))
    return ""


def _save_unpacked(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace packed weights in a module's ``state_dict`` by copies in their original form, which code that loads the
    state expects. This is a state dict hook."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, PackedTensor) and isinstance(state.get(prefix + name), PackedTensor):
            state[prefix + name] = parameter.original()


def _replace_module(site: Site, weight_only: WeightOnly, packed: PackedWeight, handle: Handle, keep_both: bool) -> str:
    """Replace the weight-only linear of ``site`` by one with the packed weight. Return why this is impossible, or an
    empty string."""
    original = site.module
    module = WeightOnlyLinear(
        packed, weight_only.bias, names=weight_only.names, transposed_scale=weight_only.transposed_scale
    )
    tensors: dict[str, Tensor] = {name: getattr(original, name) for name in weight_only.names.values()}
    if not computes_same(original, module, next(iter(site.ran))):
        return "looks like a weight-only linear and computes something else"
    _install_replacement(ReplacedModule(site, module, tensors, has_original_values=True), handle, keep_both)
    return ""


def _serve_unpacked(site: Site, handle: Handle, keeps: bool) -> str:
    """Have a tuned kernel serve the weight of ``site`` unpacked. Return why this is impossible, or an empty string."""
    original, weight_only = site.module, site.weight_only
    if weight_only is None:
        reason = why_unswappable(original, None, not site.parents)
        if reason or type(original) is not nn.Linear or site.aliases:
            return reason or f"is a {type(original).__name__}, and its weight is best served as it lies"
        _install_replacement(ReplacedModule(site, RawLinear(original), {}, has_original_values=True), handle, keeps)
        return ""
    if weight_only.transposed_scale:
        return "has its scales the other way round than the fastest kernel takes them"
    module = RawWeightOnlyLinear(original, weight_only)
    if not computes_same(original, module, next(iter(site.ran))):
        return "looks like a weight-only linear and computes something else"
    _install_replacement(ReplacedModule(site, module, {}, has_original_values=True), handle, keeps)
    return ""


def _install_replacement(change: ReplacedModule, handle: Handle, keep_both: bool) -> None:
    """Install a replacement module. keep_both: whether to keep the original's tensors, so that the whole model can be
    timed in both forms."""
    change.set_form(True)
    if not keep_both:
        change.discard_original()
    handle.changes.append(change)
