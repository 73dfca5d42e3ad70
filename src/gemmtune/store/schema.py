"""The format of stored records: strict types, encoding, checks, and the SQL tables with their migrations."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

from ..core.candidate import Candidate
from ..core.decision import Decision, Verdict
from ..core.epilogue import Axis, Kind
from ..core.plan_times import PACKED, RAW
from ..core.problem import Order, Problem
from ..core.target import Target
from ..core.tuned_plan import PlanInterval, PlanKernel, TunedPlan

# MIGRATIONS[i] converts a store from version i to i + 1. A released entry is never edited: changes need a new entry.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE gemmtune_schema (version INTEGER NOT NULL)",
        "INSERT INTO gemmtune_schema VALUES (0)",
        "CREATE TABLE targets (key TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID",
        "CREATE TABLE decisions (target_key TEXT NOT NULL, problem_key TEXT NOT NULL, created REAL NOT NULL,"
        " digest TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (target_key, problem_key))",
        "CREATE TABLE failures (target_key TEXT NOT NULL, problem_key TEXT NOT NULL, candidate_id TEXT NOT NULL,"
        " created REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY (target_key, problem_key, candidate_id))"
        " WITHOUT ROWID",
    ),
    (
        "CREATE TABLE leases (target_key TEXT NOT NULL, problem_key TEXT NOT NULL, owner TEXT NOT NULL,"
        " token TEXT NOT NULL, expires REAL NOT NULL, PRIMARY KEY (target_key, problem_key)) WITHOUT ROWID",
    ),
    (
        "CREATE TABLE plans (target_key TEXT NOT NULL, plan_key TEXT NOT NULL, created REAL NOT NULL,"
        " digest TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (target_key, plan_key))",
    ),
)
SCHEMA_VERSION = len(MIGRATIONS)


# Records have the defaults of the dataclasses that they describe: a field that is added to a dataclass later, with a
# default and without a part in the key at that default, is added here with the same default, and the records written
# before still serve (tests/store/test_schema.py).


class TargetRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of a Target, with typed fields: ``Target.to_dict()``."""

    device: str
    name: str
    capability: str
    isa: tuple[str, ...] = ()
    caches: tuple[int, ...] = ()
    threads: int = 1
    cores: int = 1
    memory: int = 0
    versions: dict[str, str] = {}
    sources: dict[str, str] = {}


class LayoutRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of a Layout."""

    order: Order = "row"
    ld: int | None = None


class QuantRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of a Quant."""

    group: int | None = None
    scale_dtype: str = "float32"
    zero_point: bool = False


class OperandRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of an Operand."""

    dtype: str
    layout: LayoutRecord = LayoutRecord()
    constant: bool = False
    align: int = 0
    quant: QuantRecord | None = None


class StepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of a Step; its limits are text, since JSON has no infinities."""

    kind: Kind
    axis: Axis = "full"
    dtype: str | None = None
    value: float = 1.0
    lo: str = "-inf"
    hi: str = "inf"


class ProblemRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of a Problem, with typed fields: ``Problem.to_dict()``."""

    family: str
    m: int
    n: int
    k: int
    a: OperandRecord
    b: OperandRecord
    out_dtype: str
    epilogue: tuple[StepRecord, ...] = ()
    batch: int = 1
    out: LayoutRecord = LayoutRecord()
    acc: str = "float32"


class DamagedRecord(ValueError):
    """A stored record that is malformed or fails a check; the message says why."""


# The errors that decoding untrusted bytes can raise: invalid JSON, wrong types, too deep nesting, too large numbers.
DAMAGE = (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError, OverflowError)

_decision_decoder = msgspec.json.Decoder(Decision)
_plan_decoder = msgspec.json.Decoder(TunedPlan)
_target_decoder = msgspec.json.Decoder(TargetRecord)
_verdict_decoder = msgspec.json.Decoder(Verdict)


def digest(*parts: str | bytes) -> str:
    """Return a checksum of the parts of a row, which reveals a flipped bit even when the JSON stays well formed."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.hexdigest()


def encode_target(target: Target) -> bytes:
    """Return the canonical JSON of a Target."""
    return msgspec.json.encode(target.to_dict(), order="deterministic")


def decode_target(body: bytes | str, key: str | None = None) -> Target:
    """Decode a Target. Raises DamagedRecord when it is malformed, or when its key is not ``key``."""
    try:
        target = Target.from_dict(msgspec.to_builtins(_target_decoder.decode(body)))
    except DAMAGE as error:
        raise DamagedRecord(f"malformed target: {error}") from error
    if key is not None and target.key != key:
        raise DamagedRecord(f"the target stored as {key} describes another one ({target.key})")
    return target


def encode_decision(decision: Decision) -> bytes:
    """Return the JSON of a Decision. Raises ValueError, naming the fault, when the Decision fails a check.

    The JSON is decoded again for the check, since JSON preserves neither NaN nor infinity: ``decode_decision`` reads
    everything that this function accepts.
    """
    body = msgspec.json.encode(decision)
    try:
        check_decision(_decision_decoder.decode(body))
    except DAMAGE as error:
        raise ValueError(f"the decision for {decision.problem_key} cannot be stored: {error}") from error
    return body


def decode_decision(body: bytes, target_key: str, problem_key: str) -> Decision:
    """Decode a Decision. Raises DamagedRecord when it is malformed, fails a check, or is another problem's."""
    try:
        decision = _decision_decoder.decode(body)
        _check_problem(decision)
        _check_choice(decision)
    except DAMAGE as error:
        raise DamagedRecord(f"malformed decision for {problem_key}: {error}") from error
    if (decision.target_key, decision.problem_key) != (target_key, problem_key):
        raise DamagedRecord(f"the decision stored for {problem_key} is one for {decision.problem_key}")
    return decision


def encode_plan(plan: TunedPlan) -> bytes:
    """Return the JSON of a TunedPlan. Raises ValueError, naming the fault, when the plan fails a check.

    The JSON is decoded again for the check, as in ``encode_decision``: ``decode_plan`` reads everything that this
    function accepts.
    """
    body = msgspec.json.encode(plan)
    try:
        check_plan(_plan_decoder.decode(body))
    except DAMAGE as error:
        raise ValueError(f"the plan for {plan.plan_key} cannot be stored: {error}") from error
    return body


def decode_plan(body: bytes, target_key: str, plan_key: str) -> TunedPlan:
    """Decode a TunedPlan. Raises DamagedRecord when it is malformed, fails a check, or is another weight's.

    Only the Problem, the intervals and the kernels that serve are checked: ``check_plan`` checks the rest.
    """
    try:
        plan = _plan_decoder.decode(body)
        _check_plan_problem(plan)
        _check_intervals(plan)
    except DAMAGE as error:
        raise DamagedRecord(f"malformed plan for {plan_key}: {error}") from error
    if (plan.target_key, plan.plan_key) != (target_key, plan_key):
        raise DamagedRecord(f"the plan stored for {plan_key} is one for {plan.plan_key}")
    return plan


def encode_verdict(verdict: Verdict) -> bytes:
    return msgspec.json.encode(verdict)


def decode_verdict(body: bytes) -> Verdict:
    """Decode a Verdict. Raises DamagedRecord when it is malformed."""
    try:
        return _verdict_decoder.decode(body)
    except DAMAGE as error:
        raise DamagedRecord(f"malformed verdict: {error}") from error


def check_decision(decision: Decision) -> None:
    """Check that all parts of a Decision are consistent. Raises ValueError, TypeError or KeyError."""
    _check_problem(decision)
    for row in decision.evidence:
        if Candidate.from_dict(row.candidate).id != row.id:
            raise ValueError(f"the evidence called {row.id!r} holds another candidate: {row.candidate!r}")
    if len({row.id for row in decision.evidence}) != len(decision.evidence):
        raise ValueError("two pieces of evidence share one candidate id")
    _check_choice(decision)


def _check_problem(decision: Decision) -> None:
    problem = decode_problem(decision.problem)
    if problem.key != decision.problem_key:
        raise ValueError(f"problem_key is {decision.problem_key!r}, but the problem's own key is {problem.key!r}")


def decode_problem(data: dict[str, Any]) -> Problem:
    """Build a Problem from the data of ``Problem.to_dict()`` and check all fields.

    Raises ValueError, TypeError or KeyError.
    """
    return Problem.from_dict(msgspec.to_builtins(msgspec.convert(data, ProblemRecord)))


def _check_choice(decision: Decision) -> None:
    """Raise ValueError unless every candidate that may be served has evidence with a passing verdict."""
    if decision.outcome == "inconclusive":
        raise ValueError("an inconclusive measurement is no decision")
    if (decision.outcome == "none_valid") != (decision.chosen is None):
        raise ValueError(f"outcome {decision.outcome!r} with chosen = {decision.chosen!r}")
    rows = {row.id: row for row in decision.evidence}
    served = set(decision.alternatives.items())
    served |= {(packing, layout.candidate) for packing, layout in decision.layouts.items()}
    if decision.chosen is not None:
        row = rows.get(decision.chosen)
        served.add(((row.packing or "") if row is not None else "", decision.chosen))
    for packing, candidate_id in sorted(served):
        row = rows.get(candidate_id)
        if row is None or row.verdict is None or not row.verdict.ok:
            raise ValueError(f"{candidate_id!r} is to be served without evidence that it is correct")
        if Candidate.from_dict(row.candidate).id != candidate_id:
            raise ValueError(f"the evidence for {candidate_id!r} holds another candidate: {row.candidate!r}")
        if (row.packing or "") != packing:
            raise ValueError(f"{candidate_id!r} is listed for packing {packing!r}, but wants {row.packing!r}")


def check_plan(plan: TunedPlan) -> None:
    """Check that all parts of a TunedPlan are consistent. Raises ValueError, TypeError or KeyError."""
    _check_plan_problem(plan)
    for kernel in plan.kernels:
        _check_kernel(kernel)
    _check_surcharges(plan)
    if not all(m >= 1 and 0.0 < seconds < math.inf for m, seconds in plan.scan.items()):
        raise ValueError("scan has a time that is not positive and finite, or an M below 1")
    _check_intervals(plan)
    for name, shares in (("noise", plan.noise), ("bound", {plan.first: plan.bound})):
        if not all(m >= 1 and 0.0 <= share < math.inf for m, share in shares.items()):
            raise ValueError(f"{name} has a value that is negative or not finite, or an M below 1")
    if not 0.0 <= plan.overhead_s < math.inf:
        raise ValueError(f"overhead_s is negative or not finite: {plan.overhead_s}")
    if not all(m >= 0 and count >= 0 for m, count in plan.counts.items()):
        raise ValueError("counts has a negative M or a negative number of calls")


def _check_plan_problem(plan: TunedPlan) -> None:
    problem = decode_problem(plan.problem)
    own_key = problem.plan_key_over(plan.dim)
    if own_key != plan.plan_key:
        raise ValueError(f"plan_key is {plan.plan_key!r}, but the problem's own plan key is {own_key!r}")
    if plan.dim == "batch" and set(plan.intervals) - {""}:
        raise ValueError(
            f"a plan over the batch serves unpacked weights only; it has intervals of {list(plan.intervals)}"
        )


def _check_surcharges(plan: TunedPlan) -> None:
    """Raise ValueError unless the surcharges are factors of 1 or more by form of the weight and M."""
    for form, by_m in plan.surcharges.items():
        if form not in (RAW, PACKED) or not all(m >= 1 and 1.0 <= value < math.inf for m, value in by_m.items()):
            raise ValueError(f"the surcharges of {form!r} weights are not finite factors of 1 or more by M: {by_m}")


def _check_kernel(kernel: PlanKernel) -> None:
    """Raise ValueError unless a kernel's id, its M and its times are valid."""
    if Candidate.from_dict(kernel.candidate).id != kernel.id:
        raise ValueError(f"the kernel called {kernel.id!r} holds another candidate: {kernel.candidate!r}")
    if kernel.tuned_m < 1:
        raise ValueError(f"{kernel.id!r} was tuned at M = {kernel.tuned_m}")
    if not 1.0 <= kernel.surcharge < math.inf:
        raise ValueError(f"the surcharge of {kernel.id!r} is not a finite factor of 1 or more: {kernel.surcharge}")
    if not all(m >= 1 and 0.0 < seconds < math.inf for m, seconds in kernel.times.items()):
        raise ValueError(f"{kernel.id!r} has a time that is not positive and finite, or an M below 1")
    if list(kernel.verified) != sorted({m for m in kernel.verified if m >= 1}):
        raise ValueError(f"the M at which {kernel.id!r} was verified do not ascend from 1: {kernel.verified!r}")


def _check_intervals(plan: TunedPlan) -> None:
    """Raise ValueError unless the intervals of each layout cover the range of M with verified kernels."""
    if not 1 <= plan.first <= plan.last:
        raise ValueError(f"the range of M is from {plan.first} to {plan.last}")
    kernels = {kernel.id: kernel for kernel in plan.kernels}
    if len(kernels) != len(plan.kernels):
        raise ValueError("two kernels share one candidate id")
    for packing, intervals in plan.intervals.items():
        _check_cover(plan, packing, intervals)
        for kernel_id in sorted({interval.kernel for interval in intervals}):
            kernel = kernels.get(kernel_id)
            if kernel is None or kernel.verdict is None or not kernel.verdict.ok or kernel.reason:
                raise ValueError(f"{kernel_id!r} is to be served without a verdict that it is correct")
            if (kernel.packing or "") != packing:
                raise ValueError(f"{kernel_id!r} is listed for packing {packing!r}, but wants {kernel.packing!r}")
            _check_kernel(kernel)


def _check_cover(plan: TunedPlan, packing: str, intervals: tuple[PlanInterval, ...]) -> None:
    """Raise ValueError unless the intervals ascend from the plan's first M to its last, without gaps."""
    following = plan.first
    for interval in intervals:
        if interval.first != following or interval.last < interval.first:
            raise ValueError(
                f"an interval of packing {packing!r} is from {interval.first} to {interval.last}, where one from "
                f"{following} is due"
            )
        following = interval.last + 1
    if following != plan.last + 1:
        raise ValueError(f"the intervals of packing {packing!r} end at {following - 1}, not at {plan.last}")
