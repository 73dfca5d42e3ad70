"""Finding the linears of a model that may be served, and seeing on example inputs what each of them multiplies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..backends.memory import why_unknown
from ..checks import FLOATS
from ..problem import Problem
from ..torch_internals import DisableTorchFunction
from .calls import run
from .packed_tensor import PackedTensor
from .record import Recording, foreign, linear_problem, record, weight_only_problem
from .weight_only import WeightOnly, recognise


@dataclass(slots=True)
class Site:
    """A linear that may be served: the module, every (parent, attribute) that holds it, and what it ran.

    held: what it is as a weight-only linear; None for a floating one. owners: every module that has its weight as a
    Parameter, of a floating one. reads: the functions besides F.linear that took the weight in a forward.
    """

    module: nn.Module
    name: str
    places: list[tuple[nn.Module, str]]
    held: WeightOnly | None
    tied: bool
    ran: Counter[Problem]
    owners: list[nn.Module] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)

    @property
    def weight(self) -> Tensor:
        """The weight, packed or not."""
        weight = self.held.weight if self.held is not None else self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def device(self) -> torch.device:
        """Where its weight lies."""
        return self.weight.device

    @property
    def shared(self) -> bool:
        """Whether something else than its product reads the weight, which then has to stay unpacked, too."""
        return self.tied or bool(self.reads)


def find_sites(model: nn.Module, memory: float, left: dict[str, str]) -> Iterator[Site]:
    """Every linear of a model that may be served. left: gets the names of the others, with the reason. memory: as for
    ``optimize``."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        # Not named_children(), which names a module used twice only once.
        for attribute, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, attribute))
    count = Counter(id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()))
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(module)
    for name, module in model.named_modules():
        held = recognise(module)
        if held is None and (not isinstance(module, nn.Linear) or _is_packed(module)):
            continue
        reason = _why_unpackable(module) if held is None else why_unswappable(module, held, module not in places)
        weight = held.weight if held is not None else module._parameters.get("weight")
        tied = isinstance(weight, Tensor) and count[id(weight)] > 1
        if tied and memory < 2:
            reason = reason or "shares its weight with another module (memory=2 would keep both forms)"
        if reason:
            left[name] = reason
        else:
            yield Site(module, name, places.get(module, []), held, tied, Counter(), owners.get(id(weight), []))


def _is_packed(module: nn.Linear) -> bool:
    return isinstance(module._parameters.get("weight"), PackedTensor)


def _why_unpackable(module: nn.Module) -> str:
    """Why the weight of a floating linear cannot be packed at all, or empty."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "has no Parameter 'weight' of its own (a parametrization or a hook computes it)"
    if why_unknown(weight):
        return f"its weight is {why_unknown(weight)}"
    if weight.dtype not in FLOATS:
        return f"holds {weight.dtype}, which is not a dtype gemmtune packs"
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


def observe(model: nn.Module, example_inputs: Any, sites: Sequence[Site], left: dict[str, str]) -> Recording:
    """Run the examples, count what each site ran, and return every Problem of the model. left: gets the names of other
    Parameters that something multiplies by."""
    uses = _Uses(model, sites)
    hooks = [
        site.module.register_forward_pre_hook(_counter(site, site.held)) for site in sites if site.held is not None
    ]
    try:
        with record() as recorded, uses:
            run(model, example_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for name, functions in uses.others.items():
        if name not in left:
            left[name] = f"is multiplied by {', '.join(sorted(functions))}; only weights of nn.Linear are packed"
    return recorded


def _counter(site: Site, held: WeightOnly) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and not foreign(args[:1]):
            site.ran.update(_problem(args[0], lambda x: weight_only_problem(x, held)))

    return hook


def _problem(x: Tensor, described: Callable[[Tensor], Problem]) -> list[Problem]:
    """What is multiplied by activations x; nothing where it is empty, or no Problem that gemmtune knows."""
    try:
        with DisableTorchFunction():
            return [described(x)] if x.numel() else []
    except (TypeError, ValueError, RuntimeError):
        return []


# What is asked of a weight and costs nothing, packed or not.
_METADATA = frozenset(
    {
        "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "nelement", "numel",
        "requires_grad_", "size", "storage_offset", "stride",
    }
)  # fmt: skip
_VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})  # properties that give values


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


def _is_metadata(func: Callable[..., Any]) -> bool:
    name = _name_of(func)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES
    return name in _METADATA or name == "__set__"


# Besides F.linear: what multiplies by a Parameter.
_PRODUCTS = frozenset(
    {
        "addmm", "addmm_", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm", "multi_head_attention_forward",
        "__matmul__", "__rmatmul__", "_int_mm", "_scaled_mm", "grouped_mm", "_grouped_mm",
    }
)  # fmt: skip


class _Uses(TorchFunctionMode):
    """Sees what takes the weight of a site: F.linear, whose Problems are counted, or something else.

    others: the functions that multiply by another Parameter, by the name of its module (of the Parameter, where the
    module has several).
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site]) -> None:
        super().__init__()
        self._sites = {id(site.weight): site for site in sites if site.held is None}
        self.others: dict[str, set[str]] = {}
        told = {id(m._parameters.get("weight")) for m in model.modules() if isinstance(m, nn.Linear)}
        self._names = {
            id(parameter): name.removesuffix(".weight")
            for name, parameter in model.named_parameters()
            if parameter.dim() >= 2 and id(parameter) not in told
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            self._count(*args, **kwargs)
            args_read: Sequence[Any] = (*args[:1], *args[2:])
        else:
            args_read = () if _is_metadata(func) else (*args, *kwargs.values())
        for value in args_read:
            for item in value if isinstance(value, list | tuple) else (value,):
                site = self._sites.get(id(item))
                if site is not None:
                    site.reads.add(_name_of(func))
        if _name_of(func) in _PRODUCTS:
            for value in (*args, *kwargs.values()):
                name = self._names.get(id(value)) or self._names.get(id(getattr(value, "_base", None)))
                if name is not None:
                    self.others.setdefault(name, set()).add(_name_of(func))
        return func(*args, **kwargs)

    def _count(self, input: Any = None, weight: Any = None, bias: Any = None, **_: Any) -> None:
        site = self._sites.get(id(weight))
        if site is not None and isinstance(input, Tensor) and not foreign((input,)):
            site.ran.update(_problem(input, lambda x: linear_problem(x, weight, bias)))
