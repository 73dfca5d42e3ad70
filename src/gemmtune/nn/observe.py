"""Running a model on its example inputs to see which of its weights are multiplied by, and what they multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.memory import why_unknown
from ..core.problem import Problem
from ..core.torch_compat import DisableTorchFunction
from ..ops import linear
from ..ops.calls import run
from ..ops.composites import is_composite, without_override
from ..ops.products import FUNCTIONS, Product, product_of
from ..ops.record import Recording, foreign, record, weight_only_problem
from ..ops.torchao_formats import QuantizedWeight
from ..ops.torchao_formats import problem as quantized_problem
from ..ops.weight_only import WeightOnly
from .packed_tensor import PackedTensor
from .sites import Site, name_of


def observe(model: nn.Module, example_inputs: Any, sites: Sequence[Site], left: dict[str, str]) -> Recording:
    """Run the examples, note in each site what it ran, and return every Problem of the model. left: gets the names of
    Parameters that are multiplied by and are no sites."""
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
        left.setdefault(name, why_not_packed(functions))
    for site in sites:  # what is served is tuned, though record() may describe the very call in another way
        recorded_there = {problem for problem, _ in recorded.on(site.device)}
        for problem, count in site.ran.items():
            if problem not in recorded_there:
                recorded.add(problem, count, site.device)
    return recorded


def why_not_packed(functions: set[str]) -> str:
    """The reason of a weight that these functions multiply by."""
    return f"is multiplied by {', '.join(sorted(functions))} in a way that no packed weight is (in parts, in batches)"


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
# What may give the weight or its transpose, as a view of the same memory.
_CASTS = frozenset(
    {"bfloat16", "contiguous", "cpu", "cuda", "double", "float", "half", "to", "type", "type_as"}
)  # return the weight itself where it is so already
_VIEWS = frozenset({"adjoint", "detach", "permute", "swapaxes", "swapdims", "t", "transpose", "__get__"})


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


def _property_of(func: Callable[..., Any]) -> str:
    return getattr(getattr(func, "__self__", None), "__name__", "") if _name_of(func) == "__get__" else ""


def _is_metadata(func: Callable[..., Any]) -> bool:
    name = _name_of(func)
    if name == "__get__":
        return _property_of(func) not in _VALUES
    return name in _METADATA or name == "__set__"


# Functions that multiply by a matrix, those of FUNCTIONS and others.
_PRODUCTS = frozenset(
    {
        "addmm", "addmm_", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm", "__matmul__", "__rmatmul__",
        "_int_mm", "_scaled_mm", "grouped_mm", "_grouped_mm",
    }
)  # fmt: skip


class _Uses(TorchFunctionMode):
    """Sees what takes the weight of a site: a product by it, whose Problem is counted, or something else.

    others: the functions that multiply by another Parameter, by its name.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site]) -> None:
        super().__init__()
        # The weight's site, and whether the tensor is its transpose; views are kept, so that no id is used again.
        self._weights = {id(site.weight): (site, False) for site in sites if site.held is None}
        self._views: list[Tensor] = []
        self.others: dict[str, set[str]] = {}
        self._names = {
            id(parameter): name_of(name, attribute)
            for name, module in model.named_modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None
            and not isinstance(parameter, PackedTensor)
            and parameter.dim() >= 2
            and id(parameter) not in self._weights
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return without_override(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        if not _is_metadata(func):
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        product = product_of(FUNCTIONS, func, args, kwargs)
        counted = None if product is None else self._count(product)
        for tensor in _tensors((*args, *kwargs.values())):
            if tensor is counted:
                counted = None  # once: the same weight may be an operand in another place, too
                continue
            site, turned = self._weights.get(id(tensor), (None, False))
            if site is not None:
                if not self._follow(func, site, turned, tensor, result):
                    self._note_other(func, site)
            elif _name_of(func) in _PRODUCTS:
                self._note_part(func, tensor)

    def _count(self, product: Product) -> Tensor | None:
        """Count a product by a site's weight, and return the operand that is the weight; None for other products."""
        weight = product.weight
        site, turned = self._weights.get(id(weight), (None, False))
        if site is None:
            return None
        transposed = product.transposed != turned
        if site.multiplied and site.transposed != transposed:  # it is packed in one orientation
            return None
        if site.quantized is not None and transposed:
            return None
        site.multiplied, site.transposed = True, transposed
        if not site.reason and not foreign((product.input,)):
            site.ran.update(_problem(product.input, lambda x: _product_problem(x, product, site.quantized)))
        return weight

    def _follow(self, func: Callable[..., Any], site: Site, turned: bool, tensor: Tensor, result: Any) -> bool:
        """Whether the result is the weight itself or its transpose, which is then a weight of the site, too."""
        if result is tensor:
            return _name_of(func) in _CASTS
        if _name_of(func) not in _VIEWS or not isinstance(result, Tensor) or why_unknown(tensor):
            return False
        if result.data_ptr() != tensor.data_ptr() or result.dtype != tensor.dtype:
            return False
        form, wanted = (result.shape, result.stride()), (tensor.shape, tensor.stride())
        if form != wanted and form != (tensor.shape[::-1], tensor.stride()[::-1]):
            return False
        self._views.append(result)
        self._weights[id(result)] = (site, turned if form == wanted else not turned)
        return True

    def _note_other(self, func: Callable[..., Any], site: Site) -> None:
        site.reads.add(_property_of(func) or _name_of(func))
        if _name_of(func) in _PRODUCTS:
            site.otherwise.add(_name_of(func))

    def _note_part(self, func: Callable[..., Any], tensor: Tensor) -> None:
        """A product took another Parameter, or a view of one."""
        base = tensor._base
        site, _ = self._weights.get(id(base), (None, False))
        if site is not None:
            site.otherwise.add(_name_of(func))
            return
        name = self._names.get(id(tensor)) or self._names.get(id(base))
        if name is not None:
            self.others.setdefault(name, set()).add(_name_of(func))


def _product_problem(x: Tensor, product: Product, quantized: QuantizedWeight | None) -> Problem:
    if quantized is not None:
        return quantized_problem(x, quantized, product.bias)
    weight = product.weight.t() if product.transposed else product.weight
    return linear.describe(x, weight, product.bias, constant=True).problem


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists among them."""
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                yield item
