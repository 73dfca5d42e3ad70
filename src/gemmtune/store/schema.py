"""The format of stored records: strict types, encoding, checks, and the SQL tables with their migrations."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from ..core.candidate import Candidate
from ..core.decision import Decision, Verdict
from ..core.epilogue import Axis, Kind
from ..core.problem import Order, Problem
from ..core.target import Target

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
