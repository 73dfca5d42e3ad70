"""Encoding and decoding of records, and the checks of damaged ones."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target
from gemmtune.store import schema
from gemmtune.store.schema import (
    DamagedRecord,
    decode_decision,
    decode_problem,
    decode_target,
    digest,
    encode_decision,
    encode_target,
)
from gemmtune.testing.store_suite import PROBLEM, TARGET, make_decision


def test_decoded_target_is_checked_against_its_key() -> None:
    body = encode_target(TARGET)
    assert decode_target(body, TARGET.key) == TARGET
    with pytest.raises(DamagedRecord, match="describes another"):
        decode_target(body, replace(TARGET, threads=1).key)


def test_problem_round_trips() -> None:
    assert decode_problem(PROBLEM.to_dict()) == PROBLEM


@pytest.mark.parametrize(
    ("record", "described"),
    [
        (schema.TargetRecord, Target), (schema.ProblemRecord, Problem), (schema.OperandRecord, Operand),
        (schema.LayoutRecord, Layout), (schema.QuantRecord, Quant), (schema.StepRecord, Step),
    ],
)  # fmt: skip
def test_records_have_the_fields_and_defaults_of_what_they_describe(
    record: type[msgspec.Struct], described: type[Any]
) -> None:
    """So that a record without a field that was added later means that field's default."""
    required = {field.name for field in msgspec.structs.fields(record) if field.required}
    public = [field for field in fields(described) if not field.name.startswith("_")]
    assert {field.name for field in msgspec.structs.fields(record)} == {field.name for field in public}
    assert required == {field.name for field in public if field.default is MISSING}
    minimum = {"target": TARGET.to_dict(), "problem": PROBLEM.to_dict()}
    if described is Problem:
        data = {name: minimum["problem"][name] for name in required}
        assert decode_problem(data) == Problem(**{name: getattr(PROBLEM, name) for name in required})
    if described is Target:
        data = {name: minimum["target"][name] for name in required}
        expected = Target(**data)
        assert decode_target(msgspec.json.encode(data), expected.key) == expected


def test_a_field_that_a_target_gets_later_keeps_the_keys_of_targets_without_it() -> None:
    @dataclass(frozen=True, slots=True)
    class Later(Target):
        nodes: int = field(default=1, metadata={"later": True})

    values = {item.name: getattr(TARGET, item.name) for item in fields(TARGET) if not item.name.startswith("_")}
    assert Later(**values).key == TARGET.key
    assert Later(**values, nodes=2).key != TARGET.key


def test_digest_separates_its_parts() -> None:
    assert digest("ab", "c") != digest("a", "bc")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_bytes_decode_to_a_valid_decision_or_are_damaged(data: st.DataObject) -> None:
    body = bytearray(encode_decision(make_decision()))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decision = decode_decision(bytes(body), TARGET.key, PROBLEM.key)
    except DamagedRecord:
        return
    row = decision.find(decision.chosen)
    assert decision.problem_key == PROBLEM.key
    assert decision.chosen is None or (row is not None and row.verdict is not None and row.verdict.ok)


def test_record_of_another_problem_is_damaged() -> None:
    """A forged record can have a valid checksum, but not the key of another problem."""
    other = PROBLEM.with_m(4).to_dict()
    body = msgspec.json.encode(msgspec.structs.replace(make_decision(), problem=other))
    with pytest.raises(DamagedRecord, match="the problem's own key is"):
        decode_decision(body, TARGET.key, PROBLEM.key)


@pytest.mark.parametrize(
    "change", [{"backend": "aten"}, {"template": "other"}, {"config": {}}, {"config": {"mr": [1]}}]
)
def test_record_whose_candidate_was_changed_is_damaged(change: dict[str, object]) -> None:
    decision = make_decision()
    first, *rest = decision.evidence
    forged = msgspec.structs.replace(first, candidate={**first.candidate, **change})
    body = msgspec.json.encode(msgspec.structs.replace(decision, evidence=(forged, *rest)))
    with pytest.raises(DamagedRecord, match=r"another candidate|malformed candidate"):
        decode_decision(body, TARGET.key, PROBLEM.key)
