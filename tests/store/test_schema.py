"""Encoding and decoding of records, and the checks of damaged ones."""

from __future__ import annotations

import itertools
import re
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtune.core.decision import Verdict
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import PlanInterval, TunedPlan
from gemmtune.core.workloads import bmm_problem
from gemmtune.store import schema
from gemmtune.store.schema import (
    DamagedRecord,
    check_plan,
    decode_decision,
    decode_plan,
    decode_problem,
    decode_target,
    digest,
    encode_decision,
    encode_plan,
    encode_target,
)
from gemmtune.testing.store_suite import PACKED, PLAIN, PROBLEM, TARGET, UNVERIFIED, WIDE, make_decision, make_plan


def test_decoded_target_is_checked_against_its_key() -> None:
    body = encode_target(TARGET)
    assert decode_target(body, TARGET.key) == TARGET
    with pytest.raises(DamagedRecord, match="describes another"):
        decode_target(body, replace(TARGET, threads=1).key)


def test_problem_round_trips() -> None:
    assert decode_problem(PROBLEM.to_dict()) == PROBLEM


def test_problem_of_a_record_without_fields_that_have_a_default_can_be_built() -> None:
    """Everything that reads a record that a store returned, such as dispatch and the checks of an import."""
    data = {
        "family": "mixed_mm", "m": 3, "n": 5, "k": 64, "a": {"dtype": "bfloat16"}, "b": {"dtype": "int8", "quant": {}},
        "out_dtype": "bfloat16", "epilogue": [{"kind": "clamp"}],
    }  # fmt: skip
    expected = Problem(
        "mixed_mm", 3, 5, 64, Operand("bfloat16"), Operand("int8", quant=Quant()), "bfloat16", (Step("clamp"),)
    )
    assert decode_problem(data) == Problem.from_dict(data) == expected


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
        expected_problem = Problem(**{name: getattr(PROBLEM, name) for name in required})
        assert decode_problem(data) == Problem.from_dict(data) == expected_problem
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


def intervals(*parts: tuple[int, int, str], packing: str = "native:b16") -> dict[str, Any]:
    return {"intervals": {packing: tuple(PlanInterval(*part) for part in parts)}}


def kernel_with(index: int, **change: object) -> dict[str, Any]:
    """Return the change of a plan's kernels that changes one of them."""
    kernels = list(make_plan().kernels)
    kernels[index] = msgspec.structs.replace(kernels[index], **change)
    return {"kernels": tuple(kernels)}


# Changes of a plan that would serve something else than what was verified, with the fault that is named.
SERVED_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another weight's problem": ({"problem": replace(PROBLEM, n=6).to_dict()}, "the problem's own plan key is"),
    "a range that begins at 0": ({"first": 0}, "the range of M is from 0 to 64"),
    "an empty range": ({"first": 65}, "the range of M is from 65 to 64"),
    "a range beyond the intervals": ({"last": 100}, "end at 64, not at 100"),
    "a first M without an interval": (intervals((2, 64, PACKED.id)), "where one from 1 is due"),
    "a last M without an interval": (intervals((1, 63, PACKED.id)), "end at 63, not at 64"),
    "intervals beyond the range": (intervals((1, 65, PACKED.id)), "end at 65, not at 64"),
    "a gap": (intervals((1, 8, PACKED.id), (10, 64, WIDE.id)), "where one from 9 is due"),
    "an overlap": (intervals((1, 9, PACKED.id), (9, 64, WIDE.id)), "where one from 10 is due"),
    "a descending order": (intervals((9, 64, WIDE.id), (1, 8, PACKED.id)), "where one from 1 is due"),
    "an interval that ends before its start": (intervals((1, 0, PACKED.id), (1, 64, WIDE.id)), "from 1 to 0"),
    "a layout without intervals": (intervals(), "end at 0, not at 64"),
    "an unknown kernel": (intervals((1, 64, "aten/other")), "without a verdict that it is correct"),
    "an unverified kernel": (intervals((1, 64, UNVERIFIED.id)), "without a verdict that it is correct"),
    "a wrong kernel": (kernel_with(1, verdict=Verdict("wrong")), "without a verdict that it is correct"),
    "a kernel of another layout": (intervals((1, 64, PLAIN.id)), "listed for packing 'native:b16', but wants None"),
    "a packed kernel for the raw weight": (intervals((1, 64, PACKED.id), packing=""), "listed for packing ''"),
    "another candidate": (kernel_with(1, candidate=WIDE.to_dict()), "holds another candidate"),
    "a candidate without a backend": (kernel_with(1, candidate={}), "backend"),
    "two kernels of one id": ({"kernels": (*make_plan().kernels, make_plan().kernels[3])}, "share one candidate id"),
    "a serving kernel tuned at no M": (kernel_with(1, tuned_m=0), "was tuned at M = 0"),
    "a serving kernel's time of zero": (kernel_with(1, times={1: 0.0}), "not positive and finite"),
}
# Changes of what does not serve: a read accepts them.
OTHER_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another candidate": (kernel_with(3, candidate=WIDE.to_dict()), "holds another candidate"),
    "a negative time": (kernel_with(3, times={1: -1e-3}), "not positive and finite"),
    "a time at no M": (kernel_with(3, times={0: 1e-3}), "an M below 1"),
    "verified at descending M": (kernel_with(3, verified=(8, 1)), "do not ascend"),
    "verified twice at one M": (kernel_with(3, verified=(8, 8)), "do not ascend"),
    "a negative noise": ({"noise": {1: -0.1}}, "noise has a value"),
    "a negative bound": ({"bound": -0.1}, "bound has a value"),
    "a surcharge below 1": ({"surcharges": {"packed": {8: 0.9}}}, "not finite factors"),
    "a surcharge of an unknown form": ({"surcharges": {"other": {8: 1.1}}}, "not finite factors"),
    "a negative count": ({"counts": {1: -1}}, "counts has"),
}


@pytest.mark.parametrize(("change", "fault"), SERVED_FAULTS.values(), ids=SERVED_FAULTS.keys())
def test_plan_that_would_serve_what_was_not_verified_is_damaged(change: dict[str, Any], fault: str) -> None:
    plan = msgspec.structs.replace(make_plan(), **change)
    with pytest.raises(DamagedRecord, match=re.escape(fault)):
        decode_plan(msgspec.json.encode(plan), TARGET.key, PROBLEM.plan_key)
    with pytest.raises(ValueError, match=re.escape(fault)):
        encode_plan(plan)


BATCHED = bmm_problem(3, 2, 24, 32, "bfloat16")


@pytest.mark.parametrize(("problem", "key", "change", "fault"), [
    (BATCHED, BATCHED.plan_key_over("batch"), {"dim": "m"}, "the problem's own plan key is"),
    (BATCHED, BATCHED.plan_key, {"dim": "batch"}, "the problem's own plan key is"),
    (PROBLEM, PROBLEM.plan_key, {"dim": "batch"}, "has no batch"),
    (PROBLEM, PROBLEM.plan_key, {"dim": "k"}, "dim"),
    (BATCHED, BATCHED.plan_key_over("batch"), {"dim": "batch"}, "serves unpacked weights only"),
])  # fmt: skip
def test_plan_of_another_dimension_is_damaged(problem: Problem, key: str, change: dict[str, Any], fault: str) -> None:
    plan = msgspec.structs.replace(make_plan(problem), plan_key=key, **change)
    with pytest.raises(DamagedRecord, match=re.escape(fault)):
        decode_plan(msgspec.json.encode(plan), TARGET.key, key)


def test_plan_over_the_batch_is_stored_and_read() -> None:
    plan = make_plan(BATCHED)
    raw = {"": plan.intervals[""]}
    plan = msgspec.structs.replace(plan, plan_key=BATCHED.plan_key_over("batch"), dim="batch", intervals=raw)
    assert decode_plan(encode_plan(plan), TARGET.key, plan.plan_key) == plan


@pytest.mark.parametrize(("change", "fault"), OTHER_FAULTS.values(), ids=OTHER_FAULTS.keys())
def test_read_checks_only_what_serves(change: dict[str, Any], fault: str) -> None:
    plan = msgspec.structs.replace(make_plan(), **change)
    assert decode_plan(msgspec.json.encode(plan), TARGET.key, PROBLEM.plan_key) == plan
    with pytest.raises(ValueError, match=re.escape(fault)):
        check_plan(plan)
    with pytest.raises(ValueError, match=f"cannot be stored: .*{re.escape(fault)}"):
        encode_plan(plan)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_plan_with_a_time_that_is_not_finite_is_not_stored(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        encode_plan(msgspec.structs.replace(make_plan(), **kernel_with(0, times={1: seconds})))


def test_record_of_another_plan_is_damaged() -> None:
    body = encode_plan(make_plan())
    for keys in ((TARGET.key, replace(PROBLEM, n=6).plan_key), ("other", PROBLEM.plan_key)):
        with pytest.raises(DamagedRecord, match="is one for"):
            decode_plan(body, *keys)


@st.composite
def plans(draw: st.DrawFn) -> TunedPlan:
    """Return plans with any valid division of any range of M."""
    first = draw(st.integers(1, 2**31))
    lengths = draw(st.lists(st.integers(1, 2**16), min_size=1, max_size=6))
    bounds = [first]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    rows = [
        PlanInterval(begin, end - 1, draw(st.sampled_from([PACKED.id, WIDE.id])))
        for begin, end in itertools.pairwise(bounds)
    ]
    times = draw(st.dictionaries(st.integers(1, 2**40), st.floats(1e-300, 1e300), max_size=4))
    kernels = kernel_with(3, times=times)["kernels"]
    return msgspec.structs.replace(
        make_plan(), first=first, last=bounds[-1] - 1, intervals={"native:b16": tuple(rows)}, kernels=kernels
    )


@settings(max_examples=200, deadline=None)
@given(plans(), st.data())
def test_valid_plan_round_trips_and_serves_its_range(plan: TunedPlan, data: st.DataObject) -> None:
    decoded = decode_plan(encode_plan(plan), TARGET.key, PROBLEM.plan_key)
    assert decoded == plan
    m = data.draw(st.integers(plan.first, plan.last))
    kernel = decoded.serving(m, "native:b16")
    assert kernel is not None
    assert any(row.first <= m <= row.last and row.kernel == kernel.id for row in plan.intervals["native:b16"])


@settings(max_examples=200, deadline=None)
@given(plans(), st.data())
def test_moved_bound_of_an_interval_is_damage(plan: TunedPlan, data: st.DataObject) -> None:
    rows = list(plan.intervals["native:b16"])
    index = data.draw(st.integers(0, len(rows) - 1))
    name = data.draw(st.sampled_from(["first", "last"]))
    moved = getattr(rows[index], name) + data.draw(st.integers(-3, 3).filter(bool))
    rows[index] = msgspec.structs.replace(rows[index], **{name: moved})
    body = msgspec.json.encode(msgspec.structs.replace(plan, intervals={"native:b16": tuple(rows)}))
    with pytest.raises(DamagedRecord):
        decode_plan(body, TARGET.key, PROBLEM.plan_key)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_bytes_decode_to_a_valid_plan_or_are_damaged(data: st.DataObject) -> None:
    body = bytearray(encode_plan(make_plan()))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        plan = decode_plan(bytes(body), TARGET.key, PROBLEM.plan_key)
    except DamagedRecord:
        return
    assert plan.plan_key == PROBLEM.plan_key
    for packing in plan.intervals:
        for m in (plan.first, plan.last, data.draw(st.integers(plan.first, plan.last))):
            kernel = plan.serving(m, packing)
            assert kernel is not None
            assert kernel.verdict is not None
            assert kernel.verdict.ok
            assert (kernel.packing or "") == packing


def test_plan_from_before_config_key_is_read() -> None:
    record = msgspec.json.decode(encode_plan(make_plan()))
    del record["config_key"]
    assert decode_plan(msgspec.json.encode(record), TARGET.key, PROBLEM.plan_key) == make_plan()
