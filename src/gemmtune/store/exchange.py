"""Export and import of decisions and plans as one readable, versioned JSON file.

The file is written atomically, and validated completely before any record is returned.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core.decision import Decision
from ..core.errors import StoreError
from ..core.files import sweep, write_whole
from ..core.target import Target
from ..core.tuned_plan import TunedPlan
from .legality import Record
from .schema import DAMAGE, DamagedRecord, check_decision, check_plan, decode_target

FORMAT = "gemmtune-decisions"
VERSION = 1
MAX_BYTES = 1 << 30


class _Header(msgspec.Struct):
    """The fields that tell whether the rest of the file can be decoded; other fields are ignored."""

    format: str
    version: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    targets: dict[str, msgspec.Raw]
    decisions: list[Decision]
    plans: list[TunedPlan] = []


class Export(NamedTuple):
    """The validated records of an exported file, each with its target."""

    decisions: list[tuple[Target, Decision]]
    plans: list[tuple[Target, TunedPlan]]


def write_export(
    path: Path, pairs: Iterable[tuple[Target, Decision]], plan_pairs: Iterable[tuple[Target, TunedPlan]] = ()
) -> int:
    """Write decisions, plans and their targets. Returns the number of decisions.

    A file without plans can be read by versions of gemmtune that know none. Raises StoreError when writing fails.
    """
    targets: dict[str, Any] = {}
    decisions: list[Decision] = []
    plans: list[TunedPlan] = []
    for target, decision in pairs:
        targets[target.key] = target.to_dict()
        decisions.append(decision)
    for target, plan in plan_pairs:
        targets[target.key] = target.to_dict()
        plans.append(plan)
    data = {"format": FORMAT, "version": VERSION, "targets": targets, "decisions": decisions}
    if plans:
        data["plans"] = plans
    body = msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"
    try:
        destination = Path(path).absolute()
        write_whole(destination, body)
    except OSError as error:
        raise StoreError(f"cannot write the export {path}: {error}") from error
    with contextlib.suppress(OSError):  # the export is complete; removing old files may fail
        sweep(destination.parent, destination.name)
    return len(decisions)


def read_export(path: Path) -> Export:
    """Return the validated records of an exported file. Raises StoreError naming the first error."""
    try:
        if os.path.getsize(path) > MAX_BYTES:
            raise StoreError(f"cannot import {path}: it is larger than {MAX_BYTES >> 20} MiB")
        body = Path(path).read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    try:
        return _parse(body)
    except DAMAGE as error:
        raise StoreError(f"cannot import {path}: {error}; nothing was imported") from error


def _parse(body: bytes) -> Export:
    header = msgspec.json.decode(body, type=_Header)
    if header.format != FORMAT:
        raise ValueError(f"its format is {header.format!r}, expected {FORMAT!r} (made by `gemmtune store export`)")
    if header.version != VERSION:
        raise ValueError(f"its version is {header.version}, this gemmtune reads version {VERSION}")
    content = msgspec.json.decode(body, type=_File)
    targets = {key: decode_target(bytes(raw), key) for key, raw in content.targets.items()}
    decisions, plans = enumerate(content.decisions), enumerate(content.plans)
    return Export(
        [(_owner(f"decision {index}", check_decision, row, targets), row) for index, row in decisions],
        [(_owner(f"plan {index}", check_plan, row, targets), row) for index, row in plans],
    )


def _owner(name: str, check: Callable[[Record], None], record: Record, targets: dict[str, Target]) -> Target:
    """Check a record and return its target. Raises DamagedRecord."""
    try:
        check(record)
    except DAMAGE as error:
        raise DamagedRecord(f"{name}: {error}") from error
    if record.target_key not in targets:
        raise DamagedRecord(f"{name}: its target {record.target_key!r} is not in the file")
    return targets[record.target_key]
