"""Records: strict in, strict out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_a_target_is_checked_against_its_key() -> None:
    body = encode_target(TARGET)
    assert decode_target(body, TARGET.key) == TARGET
    with pytest.raises(DamagedRecord, match="describes another"):
        decode_target(body, replace(TARGET, threads=1).key)


def test_a_problem_round_trips() -> None:
    assert decode_problem(PROBLEM.to_dict()) == PROBLEM


def test_digest_knows_where_parts_end() -> None:
    assert digest("ab", "c") != digest("a", "bc")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_bytes_are_the_decision_or_damage(data: st.DataObject) -> None:
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
