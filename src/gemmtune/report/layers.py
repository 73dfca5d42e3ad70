"""The layers of a tuned model: which problems they run, how often, and how much time the decisions save in a forward.

``gemmtune tune`` of a model writes its layers to a small JSON file beside the store, so that a report can be made from
files alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..core.files import write_whole
from .rows import DecisionSummary

if TYPE_CHECKING:
    from ..store.base import Store

_NUMBER_IN_NAME = re.compile(r"(?<![^.])\d+(?![^.])")


class Use(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a module runs a problem in a forward. call: index of the example call; layer: the module's name."""

    call: int
    layer: str
    problem_key: str
    count: int


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The problems that a model's example calls run on one target. inputs: a description of each call's arguments."""

    inputs: tuple[str, ...]
    uses: tuple[Use, ...]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int = 1
    models: dict[str, dict[str, Model]] = {}  # by the model's name, then by the target's key


def layers_path(store: Store) -> Path | None:
    """Return the path of the layers file of a store; None for a store without a file."""
    path = getattr(store, "path", None)
    return Path(path).with_suffix(".layers.json") if path is not None else None


def load(path: Path | None) -> dict[str, dict[str, Model]]:
    """Return the models by name, then by target key. Empty if the file is missing or damaged."""
    if path is None:
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).models
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def save(path: Path, name: str, target_key: str, model: Model) -> None:
    """Write a model's layers on one target to the file, replacing earlier ones. An error in writing is ignored."""
    models = load(path)
    models.setdefault(name, {})[target_key] = model
    with contextlib.suppress(OSError):
        write_whole(path, msgspec.json.format(msgspec.json.encode(_File(models=models)), indent=1))


@dataclass(frozen=True, slots=True)
class Layer:
    """The layers that run one problem in a forward, grouped by name with numbers replaced: ``layers.*.mlp.up_proj``.

    Times are in seconds for all calls of the group. aten_s: with ATen. served_s: with the chosen candidate; lo_s, hi_s:
    its 95% interval. row: the summary of the decision. It is None, and the times are 0, if the problem has no decision
    or nothing was timed. modules: number of modules. calls: number of calls.
    """

    name: str
    modules: int
    problem_key: str
    calls: int
    row: DecisionSummary | None
    aten_s: float = 0.0
    served_s: float = 0.0
    lo_s: float = 0.0
    hi_s: float = 0.0

    @property
    def saved_s(self) -> float:
        return self.aten_s - self.served_s


def forward(model: Model, call: int, rows: Mapping[str, DecisionSummary]) -> list[Layer]:
    """Return the layers of one example call, sorted by their time with ATen, largest first.

    rows: the summaries of the decisions, by problem key.
    """
    groups: dict[tuple[str, str], list[Use]] = {}
    for use in model.uses:
        if use.call == call:
            groups.setdefault((_NUMBER_IN_NAME.sub("*", use.layer), use.problem_key), []).append(use)
    layers = [_layer(name, key, uses, rows.get(key)) for (name, key), uses in groups.items()]
    return sorted(layers, key=lambda layer: -layer.aten_s)


def _layer(name: str, problem_key: str, uses: Sequence[Use], row: DecisionSummary | None) -> Layer:
    calls, modules = sum(use.count for use in uses), len({use.layer for use in uses})
    if row is None or row.aten_s is None:
        return Layer(name, modules, problem_key, calls, None)
    aten_s = calls * row.aten_s  # the kernel's time is this over the paired speed-up
    return Layer(
        name, modules, problem_key, calls, row, aten_s, aten_s / row.speedup, aten_s / row.hi, aten_s / row.lo
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Saving:
    """The time that a forward saves, in seconds for all its decided matrix multiplies.

    aten_s, served_s: the time with ATen and with the chosen candidates. lo_s, hi_s: the saved time if all layers were
    at the same end of their intervals, which is a wider interval than one of 95%. undecided: number of calls without a
    decision.
    """

    aten_s: float
    served_s: float
    lo_s: float
    hi_s: float
    undecided: int


def saving(layers: Iterable[Layer]) -> Saving:
    """Return the sums over a forward's layers."""
    all_layers = list(layers)
    aten_s = sum(layer.aten_s for layer in all_layers)
    return Saving(
        aten_s,
        sum(layer.served_s for layer in all_layers),
        aten_s - sum(layer.hi_s for layer in all_layers),
        aten_s - sum(layer.lo_s for layer in all_layers),
        sum(layer.calls for layer in all_layers if layer.row is None),
    )
