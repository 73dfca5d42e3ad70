"""``gemmtune explain`` for weights with planted plans."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from gemmtune.core.decision import Verdict
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import TunedPlan
from gemmtune.core.workloads import bmm_problem
from gemmtune.store import open_store
from helpers.command import CommandRunner
from helpers.factories import make_decision, make_target
from helpers.plans import LARGE, PLAIN, PROBLEM, SMALL, planted_plan, simulated, staircase

SIZES = [1, 8, 16, 32, 48, 64, 128]
PACKED = simulated("packed", staircase(2.0, 1.0, 16), rows=16, packing="panels")
WRONG = simulated("wrong", staircase(3.0, 1.0, 16), rows=16, packing="panels")
UNUSED = simulated("unused", staircase(30.0, 1.0))
WEIGHT = ("64", "96", "--dtype", "fp32", "--store")


def make_plan(target: Target) -> TunedPlan:
    """Return a plan with two layouts, a kernel that was wrong and one that was never the fastest."""
    intervals = {"": [(1, 40, SMALL), (41, 128, LARGE)], "panels": [(1, 128, PACKED)]}
    plan = planted_plan(PROBLEM, [SMALL, LARGE, PACKED, WRONG, UNUSED], intervals, SIZES, target_key=target.key)
    wrong = Verdict("wrong", "M = 8: an element is off", 9.0)
    kernels = [replace(row, verdict=wrong, verified=(8,)) if row.id == WRONG.id else row for row in plan.kernels]
    return replace(plan, kernels=tuple(kernels), counts={8: 3})


@pytest.fixture
def path(tmp_path: Path, target: Target) -> Path:
    store_path = tmp_path / "s.db"
    store = open_store(store_path)
    store.put_plan(target, make_plan(target))
    store.close()
    return store_path


def test_text_has_the_times_over_m(run: CommandRunner, path: Path) -> None:
    result = run("explain", 48, *WEIGHT, path)
    assert result.code == 0
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert "plan Mx64x96 fp32: M 1-128, 3 kernels in 3 intervals of 2 layouts, worst regret 11.1% at M = 48" in lines[0]
    assert lines[1] == f"M = 48, unpacked: {LARGE.id} serves, 10.0 us a call"
    assert lines[2] == f"M = 48, panels: {PACKED.id} serves, 5.00 us a call"
    assert "M that a model ran at, with calls: 8 (3)" in lines
    assert "noise of the times: +-0.5% in the median over 7 M (0.5% to 0.5%), with 95%" in lines
    assert "served by M: 1-40: A, 41-128: B" in lines
    assert "served by M: 1-128: C" in lines
    assert "M ATen A B serves regret" in lines
    assert "M ATen C serves regret" in lines
    assert "48 14.8 us 9.00 us 10.0 us B 11.1%" in lines
    assert "16 11.6 us 5.00 us 10.0 us A 0.0%" in lines


def test_text_says_which_kernels_come_from_decisions(run: CommandRunner, path: Path, target: Target) -> None:
    plan = make_plan(target)
    kernels = tuple(replace(row, tuned_m=40) if row.id == LARGE.id else row for row in plan.kernels)
    store = open_store(path)
    store.put_plan(target, replace(plan, kernels=kernels, tuned=(1, 128)))
    store.close()
    text = " ".join(run("explain", 48, *WEIGHT, path).out.split())
    assert f"{SMALL.id}: from the decision at M = 1;" in text
    assert f"{LARGE.id}: expected by its backend to be fast at M = 40;" in text


def test_text_has_by_how_much_kernels_are_slower_among_other_work(
    run: CommandRunner, path: Path, target: Target
) -> None:
    slower = "among other work kernels take longer than these times: 1.25x at M = 8"
    assert "among other work" not in run("explain", 48, *WEIGHT, path).out
    store = open_store(path)
    store.put_plan(target, replace(make_plan(target), surcharges={"packed": {8: 1.25, 48: 1.0}, "raw": {8: 1.0}}))
    store.close()
    lines = [" ".join(line.split()) for line in run("explain", 48, *WEIGHT, path).out.splitlines()]
    assert lines.count(slower) == 1
    assert lines.index(slower) > lines.index("served by M: 1-128: C")


def test_text_has_what_was_verified_and_what_cannot_serve(run: CommandRunner, path: Path) -> None:
    text = " ".join(run("explain", 48, *WEIGHT, path).out.split())
    right = "from the decision at M = 1; right at 7 M from 1 to 128 (worst error 0.25 of the bound)"
    for name, kernel in (("A", SMALL), ("B", LARGE), ("C", PACKED)):
        assert f"{name} {kernel.id}: {right}" in text
    assert f"cannot serve (1): {WRONG.id}: wrong: M = 8: an element is off" in text
    assert f"timed too, and not chosen (1): {UNUSED.id}" in text


def test_json_has_the_plan_and_the_times(run: CommandRunner, path: Path, target: Target) -> None:
    document = run("explain", 8, *WEIGHT, path, "--json").json
    assert document["decisions"] == []
    (plan,) = document["plans"]
    assert plan["plan_key"] == PROBLEM.plan_key
    assert plan["serves"] == {"unpacked": SMALL.id, "panels": PACKED.id}
    assert plan["cannot_serve"] == {WRONG.id: "wrong: M = 8: an element is off"}
    rows = plan["times_over_m"]["unpacked"]
    assert [row["m"] for row in rows] == SIZES
    (row,) = [row for row in rows if row["m"] == 48]
    assert row["serves"] == LARGE.id
    assert row["aten_s"] == pytest.approx(14.8e-6)
    assert row["seconds"] == pytest.approx({SMALL.id: 9e-6, LARGE.id: 10e-6})
    assert row["regret"] == pytest.approx(1 / 9)
    assert {kernel["id"] for kernel in plan["kernels"]} >= {UNUSED.id, PLAIN.id}


def test_brief_has_only_what_serves(run: CommandRunner, path: Path) -> None:
    lines = run("explain", 8, *WEIGHT, path, "--brief").out.splitlines()
    assert len(lines) == 3
    assert lines[1] == f"M = 8, unpacked: {SMALL.id} serves, 5.00 us a call"
    (plan,) = run("explain", 8, *WEIGHT, path, "--brief", "--json").json["plans"]
    assert plan == {"plan": PROBLEM.plan_key, "serves": {"unpacked": SMALL.id, "panels": PACKED.id}}


def test_m_that_was_not_measured_has_no_time(run: CommandRunner, path: Path) -> None:
    assert f"M = 9, unpacked: {SMALL.id} serves\n" in run("explain", 9, *WEIGHT, path).out


def test_decision_and_plan_are_both_shown(run: CommandRunner, path: Path, target: Target) -> None:
    open_store(path).put(target, make_decision(PROBLEM, target=target))
    text = run("explain", 8, *WEIGHT, path).out
    assert text.index("outcome: winner") < text.index("plan Mx64x96 fp32")


def test_plan_over_the_batch_is_shown_for_its_m(run: CommandRunner, tmp_path: Path, target: Target) -> None:
    problem, path = bmm_problem(6, 4, 64, 96, "float32"), tmp_path / "s.db"
    plan = planted_plan(problem, [SMALL, LARGE], {"": [(1, 40, SMALL), (41, 128, LARGE)]}, SIZES, target_key=target.key)
    store = open_store(path)
    store.put_plan(target, replace(plan, dim="batch", plan_key=problem.plan_key_over("batch"), counts={6: 2}))
    store.close()
    result = run("explain", 4, *WEIGHT, path)
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0].startswith("plan Bx4x64x96 fp32: batch 1-128, 2 kernels in 2 intervals")
    assert lines[1] == f"served by batch: 1-40: {SMALL.id}, 41-128: {LARGE.id}"
    assert "batch that a model ran at, with calls: 6 (2)" in lines
    assert "batch ATen A B serves regret" in lines
    assert run("explain", 5, *WEIGHT, path).code == 1
    brief = json.loads(run("explain", 4, *WEIGHT, path, "--json", "--brief").out)
    assert brief["plans"] == [
        {"plan": problem.plan_key_over("batch"), "serves": {"unpacked": [[1, 40, SMALL.id], [41, 128, LARGE.id]]}}
    ]
    listed = run("store", "ls", "--store", path).out
    assert "batch 1-128" in " ".join(listed.split())


@pytest.mark.parametrize(("m", "weight"), [
    (129, WEIGHT), (0, WEIGHT), (8, ("64", "97", "--dtype", "fp32", "--store")),
    (8, ("64", "96", "--dtype", "bf16", "--store")),
])  # fmt: skip
def test_plans_of_other_m_and_weights_are_not_shown(
    run: CommandRunner, path: Path, m: int, weight: tuple[str, ...]
) -> None:
    result = run("explain", m, *weight, path)
    assert result.code == 1
    assert "plan" not in result.out


def test_plans_of_other_machines(run: CommandRunner, tmp_path: Path) -> None:
    other, path = make_target(threads=64), tmp_path / "s.db"
    open_store(path).put_plan(other, make_plan(other))
    assert run("explain", 8, *WEIGHT, path).code == 1
    assert "plan Mx64x96 fp32" in run("explain", 8, *WEIGHT, path, "--any-machine").out


def test_table_is_thinned_and_has_the_worst_m(run: CommandRunner, tmp_path: Path, target: Target) -> None:
    sizes = list(range(1, 129))
    plan = planted_plan(PROBLEM, [SMALL, LARGE], {"": [(1, 48, SMALL), (49, 128, LARGE)]}, sizes, target_key=target.key)
    path = tmp_path / "s.db"
    open_store(path).put_plan(target, plan)
    lines = [line.split() for line in run("explain", 8, *WEIGHT, path).out.splitlines()]
    rows = [line for line in lines if len(line) == 9 and line[0].isdecimal()]
    assert len(rows) <= 24
    assert [rows[0][0], rows[-1][0]] == ["1", "128"]
    assert len(run("explain", 8, *WEIGHT, path, "--json").json["plans"][0]["times_over_m"]["unpacked"]) == 128


def test_text_says_by_which_key_a_plan_was_made(run: CommandRunner, path: Path, target: Target) -> None:
    line = "config_key: power_of_2; each interval has the kernel that was tuned for its key"
    assert line not in run("explain", 48, *WEIGHT, path).out
    store = open_store(path)
    store.put_plan(target, replace(make_plan(target), config_key="power_of_2"))
    store.close()
    result = run("explain", 48, *WEIGHT, path)
    assert line in result.out.splitlines()
    assert "M 1-128 by power_of_2" in result.out
