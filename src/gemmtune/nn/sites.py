"""Sites: the weights of a model that gemmtune may serve, which are floating matrices and weight-only linears."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..core.checks import FLOATS
from ..core.memory import is_subclass, why_not_addressable
from ..core.problem import Problem
from ..ops.torchao_formats import QuantizedWeight, UnknownFormatError, is_from_torchao, read
from ..ops.weight_only import WeightOnly, recognise
from .packed_tensor import PackedTensor


@dataclass(slots=True)
class Site:
    """A weight that gemmtune may serve, and how the model used it on the example inputs.

    module: the weight-only linear, or a module that has the weight as a Parameter.
    name: the weight's name for the user.
    parents: every (parent module, attribute) that refers to ``module``.
    weight_only: the description of a weight-only linear; None for the weight of another module.
    tied: whether several modules have the weight.
    ran: how often the model ran each Problem with this weight.
    owners: every module that has the weight as a Parameter; empty for a weight-only linear.
    other_readers: the names of functions that read the weight and are not its product.
    aliases: the weight's other names, where several modules share it.
    parameter: the Parameter; None for a weight-only linear.
    reason: why gemmtune cannot serve the weight, where that is clear before the model runs; else empty.
    transposed: whether the weight is [K, N], as in ``x @ weight``.
    is_multiplied: whether a product that packed weights support took the weight.
    unpackable_products: the names of other products that took it: packed weights support no product by a part of a
        weight, and none in a batch.
    quantized: the contents of a weight of one of torchao's classes; None for other weights.
    """

    module: nn.Module
    name: str
    parents: list[tuple[nn.Module, str]]
    weight_only: WeightOnly | None
    tied: bool
    ran: Counter[Problem]
    owners: list[nn.Module] = field(default_factory=list)
    other_readers: set[str] = field(default_factory=set)
    aliases: list[str] = field(default_factory=list)
    parameter: Tensor | None = None
    reason: str = ""
    transposed: bool = False
    is_multiplied: bool = False
    unpackable_products: set[str] = field(default_factory=set)
    quantized: QuantizedWeight | None = None

    @property
    def weight(self) -> Tensor:
        """The weight, in its present form: packed or not."""
        if self.parameter is not None:
            return self.parameter
        weight = self.weight_only.weight if self.weight_only is not None else self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def matrix(self) -> Tensor:
        """The floating weight as a matrix [N, K] that shares the weight's memory."""
        return self.weight.detach().t() if self.transposed else self.weight.detach()

    @property
    def names(self) -> list[str]:
        """All names of the weight."""
        return [self.name, *self.aliases]

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return self.weight.device

    @property
    def shared(self) -> bool:
        """Whether anything besides the weight's product reads it, so that its unpacked form has to be kept too."""
        return self.tied or bool(self.other_readers)

    @property
    def is_product(self) -> bool:
        """Whether this is the weight of a product: its module is a linear, or the model multiplied by it."""
        if self.weight_only is not None or self.is_multiplied or self.unpackable_products:
            return True
        return isinstance(self.module, nn.Linear) and self.module._parameters.get("weight") is self.parameter


def find_sites(model: nn.Module, memory: float, reasons: dict[str, str]) -> list[Site]:
    """Return a Site for each weight-only linear of a model that gemmtune may serve, and for each Parameter that is a
    matrix. Which of the Parameters are weights of products is seen only when the model runs (``observe``).

    memory: as for ``optimize``. reasons: receives, by name, why gemmtune cannot serve a module.
    """
    parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        # Not named_children(), which names a module used twice only once.
        for attribute, child in parent._modules.items():
            if child is not None:
                parents.setdefault(child, []).append((parent, attribute))
    count = Counter(id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()))
    sites = []
    for name, module in model.named_modules():
        weight_only = recognise(module)
        reason = (
            _why_unknown_module(module)
            if weight_only is None
            else why_unswappable(module, weight_only, module not in parents)
        )
        if weight_only is not None and count[id(weight_only.weight)] > 1 and memory < 2:
            reason = reason or _TIED
        if reason:
            reasons[name] = reason
        elif weight_only is not None:
            tied = count[id(weight_only.weight)] > 1
            sites.append(Site(module, name, parents.get(module, []), weight_only, tied, Counter()))
    return [*sites, *_floating(model, memory, parents, count)]


_TIED = "shares its weight with another module (memory=2 would keep both forms)"


def _floating(
    model: nn.Module, memory: float, parents: Mapping[nn.Module, list[tuple[nn.Module, str]]], count: Mapping[int, int]
) -> list[Site]:
    """Return a Site for each Parameter that is a matrix.

    parents: every (parent module, attribute) that refers to a module. count: in how many modules each Parameter or
    buffer is, by id.
    """
    owners_of: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, PackedTensor) and parameter.dim() == 2:
                owners_of.setdefault(id(parameter), []).append((name, module, attribute))
    sites = []
    for key, modules in owners_of.items():
        owners = [module for _, module, _ in modules]
        # Where an embedding and a linear share a weight, the linear is the one that multiplies by it.
        named = (
            [owner for owner in modules if isinstance(owner[1], nn.Linear) and owner[2] == "weight"]
            or [owner for owner in modules if not isinstance(owner[1], nn.Embedding)]
            or modules
        )
        name, *aliases = [weight_name(module_name, attribute) for module_name, _, attribute in named]
        module = named[0][1]
        weight = module._parameters[named[0][2]]
        assert weight is not None
        tied = count[key] > 1
        quantized, reason = _quantized(weight) if is_from_torchao(weight) else (None, _why_unpackable(weight))
        reason = reason or (_TIED if tied and memory < 2 else "")
        site = Site(module, name, parents.get(module, []), None, tied, Counter(), owners)
        site.aliases, site.parameter, site.reason, site.quantized = aliases, weight, reason, quantized
        sites.append(site)
    return sites


def _quantized(weight: Tensor) -> tuple[QuantizedWeight | None, str]:
    """Return the contents of a weight of one of torchao's classes, and why gemmtune cannot serve it. Either the first
    is None, or the second is empty."""
    try:
        return read(weight), ""
    except UnknownFormatError as error:
        return None, f"its weight {error}"


def weight_name(module: str, attribute: str) -> str:
    """Return a weight's name for the user: the module's name, followed by the Parameter's unless that is "weight"."""
    return module if attribute == "weight" else f"{module}.{attribute}".removeprefix(".")


def _why_unpackable(weight: Tensor) -> str:
    """Return why a Parameter cannot be packed in any layout; empty if it can."""
    if why_not_addressable(weight):
        return f"its weight is {why_not_addressable(weight)}"
    if weight.dtype not in FLOATS:
        return f"holds {weight.dtype}, which is not a dtype gemmtune packs"
    return ""


_QUANTISED = (torch.int8, torch.uint8, torch.int16, torch.int32)


def _why_unknown_module(module: nn.Module) -> str:
    """Return why gemmtune cannot serve a module that seems to be a linear, but has no floating Parameter as its weight:
    one whose weight is computed, or a quantised one of an unsupported format. Empty for other modules."""
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
            return f"its {name} is {why_not_addressable(tensor)}"
        if scaled:
            return (
                f"holds a quantised weight that gemmtune does not know ({name}, {tensor.dtype}); "
                "gemmtune.register_weight_only() teaches it"
            )
    return ""


# The dicts of an nn.Module's hooks. A replacement module would not run them.
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def why_unswappable(module: nn.Module, weight_only: WeightOnly | None, root: bool) -> str:
    """Return why a module cannot be replaced by one of gemmtune's; empty if it can.

    weight_only: the description of a weight-only linear; None for other modules. root: whether the module is the whole
    model.
    """
    if root:
        return "is the model itself, which has no parent to swap it in"
    if any(vars(module).get(hooks) for hooks in _HOOKS):
        return "has hooks, which a swapped module would not run"
    if "forward" in vars(module):
        return "has a forward of its own (somebody replaced it on this very module)"
    named = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    if weight_only is not None:  # an adapter may have taken its tensors from other objects than the module
        described = {"weight": weight_only.weight, "scale": weight_only.scale, "zero point": weight_only.zero_point}
        named.update({name: tensor for name, tensor in described.items() if tensor is not None})
    for name, tensor in named.items():
        if why_not_addressable(tensor):
            return f"its {name} is {why_not_addressable(tensor)}"
    return "has tensors on several devices" if len({tensor.device for tensor in named.values()}) > 1 else ""
