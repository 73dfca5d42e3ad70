"""The changes that ``optimize()`` makes to a model, and the handle that undoes them."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import PackedWeightError
from .modules import RawLinear, RawWeightOnlyLinear, WeightOnlyLinear, return_tensors
from .packed_tensor import PackedTensor, swap_tensors
from .sites import Site

Replacement = WeightOnlyLinear | RawLinear | RawWeightOnlyLinear


@dataclass(slots=True)
class ReplacedModule:
    """A module of the model that gemmtune has replaced, and what is needed to put it back.

    site: the weight, and the original module. module: the replacement. tensors: the original's tensors that the
    replacement has packed, by attribute name. has_original_values: whether ``tensors`` still hold their values. They
    do until the whole model has been timed in both forms; then they are freed.
    """

    site: Site
    module: Replacement
    tensors: dict[str, Tensor]
    has_original_values: bool

    @property
    def layout(self) -> str:
        """The name of the weight's packed layout; ``raw`` for a weight that is not packed."""
        return self.module.packed.layout if isinstance(self.module, WeightOnlyLinear) else self.module.layout

    def set_form(self, optimized: bool) -> None:
        """Install the replacement or the original module. Does nothing once the original's tensors are freed."""
        if self.has_original_values:
            self._install(self.module if optimized else self.site.module)

    def discard_original(self) -> None:
        """Free the original's tensors that the replacement has packed, unless another module shares them."""
        if self.has_original_values and not self.site.tied:
            for tensor in self.tensors.values():
                tensor.data = tensor.data.new_empty(0)
        self.has_original_values = False

    def undo(self) -> None:
        """Reinstall the original module, with the replacement's present values and training mode."""
        if isinstance(self.module, RawLinear | RawWeightOnlyLinear):
            return_tensors(self.module, self.site.module)
        else:
            for name, value in self.module.raw().items():
                self.tensors[name].data = value.contiguous()
        self._install(self.site.module)
        self.site.module.train(self.module.training)

    def _install(self, module: nn.Module) -> None:
        for parent, attribute in self.site.parents:
            setattr(parent, attribute, module)


@dataclass(slots=True)
class PackedParameter:
    """A Parameter that gemmtune has turned into a PackedTensor in place.

    site: the weight and its modules. weight: the Parameter. layout: the name of its packed layout. hooks: handles of
    the hooks that put its unpacked values into ``state_dict()``. other_form: the tensor that is swapped with ``weight``
    to change its form, until the whole model has been timed in both forms; then None.
    """

    site: Site
    weight: Tensor
    layout: str
    hooks: list[Any]
    other_form: Tensor | None

    @property
    def keeps_raw(self) -> bool:
        """Whether the Parameter is packed now and keeps its raw form too."""
        weight = self.weight
        return isinstance(weight, PackedTensor) and weight.layout_name != "raw" and weight.packed.raw is not None

    def set_form(self, optimized: bool) -> None:
        """Give the Parameter its packed or its ordinary form, while both exist. Raises PackedWeightError."""
        if self.other_form is not None and isinstance(self.weight, PackedTensor) != optimized:
            swap_tensors(self.weight, self.other_form)

    def discard_original(self) -> None:
        """Free the form that the Parameter does not have."""
        self.other_form = None

    def undo(self) -> None:
        """Make the Parameter an ordinary one again, with its present values. A Parameter that something else has made
        ordinary (``model.half()``, ``weight.data = ...``) is not changed."""
        for hook in self.hooks:
            hook.remove()
        if not isinstance(self.weight, PackedTensor):
            return
        packed: Tensor = self.weight
        trainable = self.weight.trainable or packed.requires_grad
        plain = nn.Parameter(self.weight.original(), requires_grad=trainable)
        try:
            swap_tensors(packed, plain)
        except PackedWeightError:  # a compiled graph refers to the Parameter: its modules get a new one
            for owner in self.site.owners:
                names = [name for name, parameter in owner._parameters.items() if parameter is packed]
                owner._parameters.update(dict.fromkeys(names, plain))


class Handle:
    """The result of ``optimize``: a report of what it did with each weight, and ``restore()``, which undoes all of it.

    swapped: the layout of each weight that gemmtune serves, by name. left: for each other weight that the model
    multiplies by, the reason why gemmtune does not serve it, by name. A weight's name is that of its module; if its
    Parameter is not called "weight", the Parameter's name is appended. ratio: the time of the whole model with
    gemmtune's weights over its time without, as (estimate, low, high) of a 95% confidence interval of paired runs on
    all example inputs; None where the model was not timed. ratios: the ratio on each example alone.

    A Handle is also a context manager, which restores the model at the end of the block.
    """

    def __init__(self) -> None:
        self.left: dict[str, str] = {}
        self.ratio: tuple[float, float, float] | None = None
        self.ratios: tuple[tuple[float, float, float], ...] = ()
        self.changes: list[ReplacedModule | PackedParameter] = []

    @property
    def swapped(self) -> dict[str, str]:
        """The layout of each weight that gemmtune serves, by its name; ``raw`` for a weight that is not packed."""
        return {name: change.layout for change in self.changes for name in change.site.names}

    def restore(self) -> None:
        """Undo ``optimize``: unpack in place each Parameter that was packed, and reinstall each module that was
        replaced. Values that were written or loaded since are kept. A second call does nothing."""
        with torch.inference_mode(False), torch.no_grad():
            for change in reversed(self.changes):
                change.undo()
        self.changes.clear()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        timed = (
            "" if self.ratio is None else ", {:.2f}x the time of the whole model ({:.2f}..{:.2f})".format(*self.ratio)
        )
        return f"<Handle: {len(self.swapped)} weights swapped, {len(self.left)} left as they were{timed}>"
