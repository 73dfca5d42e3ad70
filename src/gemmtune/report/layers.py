"""Which layers of a model run which problems, how often, and what a forward of it saves by the decisions.

``gemmtune tune`` of a model keeps the layers in a small JSON file beside the store, so that a report can be made from
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
from .rows import Row

if TYPE_CHECKING:
    from ..store.base import Store

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Use(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One module running one problem in one forward. call: which of the example calls; layer: the module's name."""

    call: int
    layer: str
    problem_key: str
    count: int


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model's example calls run on one target. inputs: each call's arguments, in words."""

    inputs: tuple[str, ...]
    uses: tuple[Use, ...]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int = 1
    models: dict[str, dict[str, Model]] = {}  # by the model's name, then by the target's key


def beside(store: Store) -> Path | None:
    """The file that goes with a store; None for a store without a file."""
    path = getattr(store, "path", None)
    return Path(path).with_suffix(".layers.json") if path is not None else None


def load(path: Path | None) -> dict[str, dict[str, Model]]:
    """Models by name, then by target key. Damage reads as none."""
    if path is None:
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).models
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def remember(path: Path, name: str, target_key: str, model: Model) -> None:
    """Keep a model's layers in place of what was known of it. A file that cannot be written is left alone."""
    models = load(path)
    models.setdefault(name, {})[target_key] = model
    with contextlib.suppress(OSError):
        write_whole(path, msgspec.json.format(msgspec.json.encode(_File(models=models)), indent=1))


@dataclass(frozen=True, slots=True)
class Layer:
    """Layers of one name but for their numbers that run one problem in a forward. Seconds are of all their calls.

    served_s: by what the decision chose; lo_s, hi_s: its 95% interval. row is None, and the times 0, when the problem
    is not decided or nothing was timed.
    """

    name: str
    modules: int
    problem_key: str
    calls: int
    row: Row | None
    aten_s: float = 0.0
    served_s: float = 0.0
    lo_s: float = 0.0
    hi_s: float = 0.0

    @property
    def saved_s(self) -> float:
        return self.aten_s - self.served_s


def forward(model: Model, call: int, rows: Mapping[str, Row]) -> list[Layer]:
    """The layers of one of the example calls, what costs most first. rows: decisions in short by problem key."""
    groups: dict[tuple[str, str], list[Use]] = {}
    for use in model.uses:
        if use.call == call:
            groups.setdefault((_NUMBER.sub("*", use.layer), use.problem_key), []).append(use)
    found = [_layer(name, key, uses, rows.get(key)) for (name, key), uses in groups.items()]
    return sorted(found, key=lambda layer: -layer.aten_s)


def _layer(name: str, problem_key: str, uses: Sequence[Use], row: Row | None) -> Layer:
    calls, modules = sum(use.count for use in uses), len({use.layer for use in uses})
    if row is None or row.aten_s is None:
        return Layer(name, modules, problem_key, calls, None)
    aten_s = calls * row.aten_s  # the paired ratio says what the kernel takes of it
    return Layer(
        name, modules, problem_key, calls, row, aten_s, aten_s / row.speedup, aten_s / row.hi, aten_s / row.lo
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Saving:
    """What a forward saves: seconds of all its decided matrix multiplies. lo_s, hi_s: were every interval's end true at
    once, which is wider than 95%."""

    aten_s: float
    served_s: float
    lo_s: float
    hi_s: float
    undecided: int


def saving(layers: Iterable[Layer]) -> Saving:
    """The sums of a forward's layers."""
    every = list(layers)
    aten_s = sum(layer.aten_s for layer in every)
    return Saving(
        aten_s,
        sum(layer.served_s for layer in every),
        aten_s - sum(layer.hi_s for layer in every),
        aten_s - sum(layer.lo_s for layer in every),
        sum(layer.calls for layer in every if layer.row is None),
    )
