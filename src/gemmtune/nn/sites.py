"""Finding the weights of a model that may be served: floating matrices, and weight-only linears."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..core.checks import FLOATS
from ..core.memory import is_subclass, why_unknown
from ..core.problem import Problem
from ..ops.torchao_formats import QuantizedWeight, UnknownFormatError, is_torchaos, read
from ..ops.weight_only import WeightOnly, recognise
from .packed_tensor import PackedTensor


@dataclass(slots=True)
class Site:
    """A weight that may be served, and what a model did with it on the example inputs.

    module: the weight-only linear, or a module that has the floating weight as a Parameter. name: what the user knows
    it by; aliases: its other names, where several modules share it. places: every (parent, attribute) that holds the
    module. held: what it is as a weight-only linear; None for a floating weight. tied: whether several modules have it.
    ran: the Problems that it was the weight of. owners: every module that has a floating weight as a Parameter. reads:
    the functions besides products that took the weight. parameter: the floating weight. reason: why it cannot be
    served, known before the model ran. transposed: whether it is [K, N], as ``x @ weight`` takes it. multiplied:
    whether a product took it. otherwise: the products that packed weights have not (of a part of it, in a batch).
    quantized: what the weight stores, of one of torchao's classes.
    """

    module: nn.Module
    name: str
    places: list[tuple[nn.Module, str]]
    held: WeightOnly | None
    tied: bool
    ran: Counter[Problem]
    owners: list[nn.Module] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    aliases: list[str] = field(default_factory=list)
    parameter: Tensor | None = None
    reason: str = ""
    transposed: bool = False
    multiplied: bool = False
    otherwise: set[str] = field(default_factory=set)
    quantized: QuantizedWeight | None = None

    @property
    def weight(self) -> Tensor:
        """The weight, packed or not."""
        if self.parameter is not None:
            return self.parameter
        weight = self.held.weight if self.held is not None else self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def matrix(self) -> Tensor:
        """The floating weight as [N, K], in the same memory."""
        return self.weight.detach().t() if self.transposed else self.weight.detach()

    @property
    def names(self) -> list[str]:
        """Every name of it."""
        return [self.name, *self.aliases]

    @property
    def device(self) -> torch.device:
        """Where its weight lies."""
        return self.weight.device

    @property
    def shared(self) -> bool:
        """Whether something else than its product reads the weight, which then has to stay unpacked, too."""
        return self.tied or bool(self.reads)

    @property
    def is_product(self) -> bool:
        """Whether it is the weight of a product: by what its module is, or by what the model did."""
        if self.held is not None or self.multiplied or self.otherwise:
            return True
        return isinstance(self.module, nn.Linear) and self.module._parameters.get("weight") is self.parameter


def find_sites(model: nn.Module, memory: float, left: dict[str, str]) -> list[Site]:
    """Every weight-only linear of a model that may be served, and every Parameter that is a matrix; observing the model
    tells which of these are weights of products. left: gets the names of modules that cannot be served, with the
    reason. memory: as for ``optimize``."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        # Not named_children(), which names a module used twice only once.
        for attribute, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, attribute))
    count = Counter(id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()))
    sites = []
    for name, module in model.named_modules():
        held = recognise(module)
        reason = _why_unknown_module(module) if held is None else why_unswappable(module, held, module not in places)
        if held is not None and count[id(held.weight)] > 1 and memory < 2:
            reason = reason or _TIED
        if reason:
            left[name] = reason
        elif held is not None:
            tied = count[id(held.weight)] > 1
            sites.append(Site(module, name, places.get(module, []), held, tied, Counter()))
    return [*sites, *_floating(model, memory, places, count)]


_TIED = "shares its weight with another module (memory=2 would keep both forms)"


def _floating(
    model: nn.Module, memory: float, places: Mapping[nn.Module, list[tuple[nn.Module, str]]], count: Mapping[int, int]
) -> list[Site]:
    """A Site for each Parameter that is a matrix, whatever it is for."""
    homes: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, PackedTensor) and parameter.dim() == 2:
                homes.setdefault(id(parameter), []).append((name, module, attribute))
    sites = []
    for key, modules in homes.items():
        owners = [module for _, module, _ in modules]
        # An embedding that a linear shares its weight with is not what multiplies by it.
        named = (
            [home for home in modules if isinstance(home[1], nn.Linear) and home[2] == "weight"]
            or [home for home in modules if not isinstance(home[1], nn.Embedding)]
            or modules
        )
        name, *aliases = [name_of(module_name, attribute) for module_name, _, attribute in named]
        module = named[0][1]
        weight = module._parameters[named[0][2]]
        assert weight is not None
        tied = count[key] > 1
        quantized, reason = _quantized(weight) if is_torchaos(weight) else (None, _why_unpackable(weight))
        reason = reason or (_TIED if tied and memory < 2 else "")
        site = Site(module, name, places.get(module, []), None, tied, Counter(), owners)
        site.aliases, site.parameter, site.reason, site.quantized = aliases, weight, reason, quantized
        sites.append(site)
    return sites


def _quantized(weight: Tensor) -> tuple[QuantizedWeight | None, str]:
    """What a weight of one of torchao's classes stores, or why it cannot be served."""
    try:
        return read(weight), ""
    except UnknownFormatError as error:
        return None, f"its weight {error}"


def name_of(module: str, attribute: str) -> str:
    """The name of a module's weight: the module's own, or that of another Parameter."""
    return module if attribute == "weight" else f"{module}.{attribute}".removeprefix(".")


def _why_unpackable(weight: Tensor) -> str:
    """Why a Parameter cannot be packed at all, or empty."""
    if why_unknown(weight):
        return f"its weight is {why_unknown(weight)}"
    if weight.dtype not in FLOATS:
        return f"holds {weight.dtype}, which is not a dtype gemmtune packs"
    return ""


_QUANTISED = (torch.int8, torch.uint8, torch.int16, torch.int32)


def _why_unknown_module(module: nn.Module) -> str:
    """Why a module that holds a product, and no Parameter that tells so, cannot be served; empty for other modules."""
    if isinstance(module, nn.Linear):
        if module._parameters.get("weight") is None:
            return "has no Parameter 'weight' of its own (a parametrization or a hook computes it)"
        return ""
    if type(module).__module__.startswith("gemmtune."):
        return ""
    tensors = {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
    scaled = any("scale" in name for name in tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in _QUANTISED or tensor.dim() != 2:
            continue
        if is_subclass(tensor) and "weight" in name:
            return f"its {name} is {why_unknown(tensor)}"
        if scaled:
            return (
                f"holds a quantised weight that gemmtune does not know ({name}, {tensor.dtype}); "
                "gemmtune.register_weight_only() teaches it"
            )
    return ""


# The dicts of nn.Module's hooks that are not swapped along.
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def why_unswappable(module: nn.Module, held: WeightOnly | None, root: bool) -> str:
    """Why another module cannot take the place of this one, or empty."""
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
        if why_unknown(tensor):
            return f"its {name} is {why_unknown(tensor)}"
    return "has tensors on several devices" if len({tensor.device for tensor in named.values()}) > 1 else ""
