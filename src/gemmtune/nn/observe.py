"""``observe``, which runs a model on its example inputs to see which weights it multiplies by, in which Problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.memory import why_not_addressable
from ..core.problem import Problem
from ..core.torch_compat import DisableTorchFunction
from ..ops import linear
from ..ops.calls import run
from ..ops.composites import is_composite, without_override
from ..ops.products import FUNCTIONS, Product, product_of
from ..ops.record import Recording, has_subclass, module_problem, record
from ..ops.torchao_formats import QuantizedWeight
from ..ops.torchao_formats import problem as quantized_problem
from ..ops.weight_only import WeightOnly
from .packed_tensor import PackedTensor
from .sites import Site, weight_name


def observe(model: nn.Module, example_inputs: Any, sites: Sequence[Site], reasons: dict[str, str]) -> Recording:
    """Run a model on its example inputs, note in each site how it was used, and return all Problems of the model.

    reasons: receives, by name, why gemmtune cannot serve a Parameter that the model multiplies by and that is no site.
    """
    uses = _Uses(model, sites)
    hooks = [
        site.module.register_forward_pre_hook(_counting_hook(site, site.weight_only))
        for site in sites
        if site.weight_only is not None
    ]
    try:
        with record() as recorded, uses:
            run(model, example_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for name, functions in uses.others.items():
        reasons.setdefault(name, why_not_packed(functions))
    for site in sites:  # record() may describe the same call by another Problem; the one that is served has to be tuned
        recorded_problems = {problem for problem, _ in recorded.on(site.device)}
        for problem, count in site.ran.items():
            if problem not in recorded_problems:
                recorded.add(problem, count, site.device)
    return recorded


def why_not_packed(functions: set[str]) -> str:
    """Return the reason why gemmtune does not serve a weight that only these functions multiply by."""
    return f"is multiplied by {', '.join(sorted(functions))} in a way that no packed weight is (in parts, in batches)"


def _counting_hook(site: Site, weight_only: WeightOnly) -> Any:
    """Return a forward pre-hook that counts the Problems of a weight-only linear in its site."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and not has_subclass(args[:1]):
            site.ran.update(_problem(args[0], lambda x: module_problem(x, weight_only)))

    return hook


def _problem(x: Tensor, describe: Callable[[Tensor], Problem]) -> list[Problem]:
    """Return the Problem of activations x as a list. The list is empty for activations without elements, and where
    gemmtune has no such Problem.

    describe: the function that returns the Problem of activations.
    """
    try:
        with DisableTorchFunction():
            return [describe(x)] if x.numel() else []
    except (TypeError, ValueError, RuntimeError):
        return []


# Functions that read or set no value of a weight. A packed weight needs no unpacking for them.
_METADATA = frozenset(
    {
        "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "nelement", "numel",
        "requires_grad_", "size", "storage_offset", "stride",
    }
)  # fmt: skip
_VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})  # properties that return values
# Functions that return the weight itself where it has the dtype, device or strides that are asked for.
_CASTS = frozenset({"bfloat16", "contiguous", "cpu", "cuda", "double", "float", "half", "to", "type", "type_as"})
# Functions that may return the weight or its transpose as a view of the same memory.
_VIEWS = frozenset({"adjoint", "detach", "permute", "swapaxes", "swapdims", "t", "transpose", "__get__"})


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


def _property_of(func: Callable[..., Any]) -> str:
    """Return the name of the property that ``func`` gets; empty for other functions."""
    return getattr(getattr(func, "__self__", None), "__name__", "") if _name_of(func) == "__get__" else ""


def _is_metadata(func: Callable[..., Any]) -> bool:
    """Whether a function reads no value of a tensor. Setting a property counts as such a function."""
    name = _name_of(func)
    if name == "__get__":
        return _property_of(func) not in _VALUES
    return name in _METADATA or name == "__set__"


# The names of functions that multiply by a matrix: those in FUNCTIONS, and others.
_PRODUCTS = frozenset(
    {
        "addmm", "addmm_", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm", "__matmul__", "__rmatmul__",
        "_int_mm", "_scaled_mm", "grouped_mm", "_grouped_mm",
    }
)  # fmt: skip


class _Uses(TorchFunctionMode):
    """A torch function mode that notes in each site which functions take its weight, and counts their Problems.

    others: for each Parameter that is no site's, the names of the functions that multiply by it, by its name.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site]) -> None:
        super().__init__()
        # By id of a weight or a view of one: the site, and whether the tensor is the weight's transpose. The views are
        # kept alive, so that no other tensor gets the id of one.
        self._weights = {id(site.weight): (site, False) for site in sites if site.weight_only is None}
        self._views: list[Tensor] = []
        self.others: dict[str, set[str]] = {}
        self._names = {
            id(parameter): weight_name(name, attribute)
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
        """Note in the sites what a call of ``func`` did with their weights."""
        product = product_of(FUNCTIONS, func, args, kwargs)
        counted = None if product is None else self._count(product)
        for tensor in _tensors((*args, *kwargs.values())):
            if tensor is counted:
                counted = None  # skip it once only: the weight may be another operand of the same call, too
                continue
            site, is_transpose = self._weights.get(id(tensor), (None, False))
            if site is not None:
                if not self._follow(func, site, is_transpose, tensor, result):
                    self._note_other(func, site)
            elif _name_of(func) in _PRODUCTS:
                self._note_part(func, tensor)

    def _count(self, product: Product) -> Tensor | None:
        """Count a product by a site's weight. Return the operand that is the weight; None for other products."""
        weight = product.weight
        site, is_transpose = self._weights.get(id(weight), (None, False))
        if site is None:
            return None
        transposed = product.transposed != is_transpose
        if site.is_multiplied and site.transposed != transposed:  # a weight is packed in one orientation only
            return None
        if site.quantized is not None and transposed:
            return None
        site.is_multiplied, site.transposed = True, transposed
        if not site.reason and not has_subclass((product.input,)):
            site.ran.update(_problem(product.input, lambda x: _product_problem(x, product, site.quantized)))
        return weight

    def _follow(self, func: Callable[..., Any], site: Site, is_transpose: bool, tensor: Tensor, result: Any) -> bool:
        """Whether the result of a call is the weight itself or its transpose. Note the result as the site's, too.

        tensor: the weight, or a view of it. is_transpose: whether that is the transpose of the site's weight.
        """
        if result is tensor:
            return _name_of(func) in _CASTS
        if _name_of(func) not in _VIEWS or not isinstance(result, Tensor) or why_not_addressable(tensor):
            return False
        if result.data_ptr() != tensor.data_ptr() or result.dtype != tensor.dtype:
            return False
        result_form, tensor_form = (result.shape, result.stride()), (tensor.shape, tensor.stride())
        if result_form != tensor_form and result_form != (tensor.shape[::-1], tensor.stride()[::-1]):
            return False
        self._views.append(result)
        self._weights[id(result)] = (site, is_transpose if result_form == tensor_form else not is_transpose)
        return True

    def _note_other(self, func: Callable[..., Any], site: Site) -> None:
        """Note that a function took the weight of a site and is no product that packed weights support."""
        site.other_readers.add(_property_of(func) or _name_of(func))
        if _name_of(func) in _PRODUCTS:
            site.unpackable_products.add(_name_of(func))

    def _note_part(self, func: Callable[..., Any], tensor: Tensor) -> None:
        """Note that a product took a tensor that is no site's weight: a part of one, another Parameter, or a part of
        that."""
        base = tensor._base
        site, _ = self._weights.get(id(base), (None, False))
        if site is not None:
            site.unpackable_products.add(_name_of(func))
            return
        name = self._names.get(id(tensor)) or self._names.get(id(base))
        if name is not None:
            self.others.setdefault(name, set()).add(_name_of(func))


def _product_problem(x: Tensor, product: Product, quantized: QuantizedWeight | None) -> Problem:
    """Return the Problem of a product by activations x. quantized: the contents of a weight of torchao's."""
    if quantized is not None:
        return quantized_problem(x, quantized, product.bias)
    weight = product.weight.t() if product.transposed else product.weight
    return linear.describe(x, weight, product.bias, constant=True).problem


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in lists and tuples."""
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                yield item
