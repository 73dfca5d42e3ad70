"""``gemmtune tune --m`` and ``--config-key``, with a fake tuner that stores a planted plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

import gemmtune.tuning.api
from gemmtune.cli.sizes import parse_config_key, parse_sizes
from gemmtune.core.events import PlanDone, PlanProgress, ProblemDone, ProblemStarted
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.dispatch import current_target
from gemmtune.report import ceilings
from gemmtune.store import open_store
from gemmtune.store.base import Store
from helpers.command import CommandRunner
from helpers.factories import make_decision
from helpers.plans import LARGE, SMALL, planted_plan


@pytest.mark.parametrize(("text", "expected"), [
    (None, None), ("all", "all"), ("1:8192", range(1, 8193)), ("7:7", range(7, 8)), ("64,256,4096", [64, 256, 4096]),
    ("64", [64]), ("64, 8", [64, 8]),
])  # fmt: skip
def test_parse_sizes(text: str | None, expected: Any) -> None:
    assert parse_sizes(text, "--m") == expected


@pytest.mark.parametrize(
    "text",
    ["", "ALL", "1:", ":8", "8:1", "0:8", "1:2:3", "-1:8", "1-8", "1,,2", "0", "1.5", "1:2147483648", "\u0661", "1_0"],
)
def test_wrong_m_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        parse_sizes(text, "--batch")
    assert repr(text)[1:-1] in str(caught.value)
    assert "--batch" in str(caught.value)


class FakeTuning:
    """Fake of ``tune_on_device`` that makes one plan. ``m``, ``batch``, ``config_key``: what it was called with."""

    m: Any = None
    batch: Any = None
    config_key: Any = None
    interrupted = False
    plans = True

    def __call__(
        self,
        problems: Sequence[tuple[Problem, int]],
        device: str,
        store: Store,
        *,
        progress: Any,
        m: Any,
        batch: Any,
        config_key: Any,
        **_: Any,
    ) -> None:
        self.m, self.batch, self.config_key = m, batch, config_key
        problem, target = problems[0][0], current_target()
        decisions = [make_decision(problem.with_m(size), target=target) for size in (1, 128)]
        for index, decision in enumerate(decisions):
            progress(ProblemStarted(index, 2, problem.with_m((1, 128)[index])))
            store.put(target, decision)
            progress(ProblemDone(index, 2, decision, None))
        progress(PlanProgress(problem.plan_key, 5, 7.6))
        progress(PlanProgress(problem.plan_key, 9, 4.0))
        if self.interrupted:
            raise KeyboardInterrupt
        plan = planted_plan(
            problem, [SMALL, LARGE], {"": [(1, 40, SMALL), (41, 128, LARGE)]}, [1, 16, 48, 128], target_key=target.key
        )
        progress(PlanDone(problem.plan_key, plan if self.plans else None, 0))


@pytest.mark.parametrize("text", [None, "exact", "power_of_2"])
def test_parse_config_key(text: str | None) -> None:
    assert parse_config_key(text, "all") == text


@pytest.mark.parametrize(("text", "m"), [("", "all"), ("power_of_3", "all"), ("None", "all"), ("exact", None)])
def test_wrong_config_key_is_wrong_usage(text: str, m: Any) -> None:
    with pytest.raises(typer.BadParameter, match="--config-key"):
        parse_config_key(text, m)


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> FakeTuning:
    fake = FakeTuning()
    monkeypatch.setattr(gemmtune.tuning.api, "tune_on_device", fake)
    monkeypatch.setattr(ceilings, "load_or_measure", lambda path, target: {})
    return fake


def test_progress_and_plans_are_printed(run: CommandRunner, tuning: FakeTuning, tmp_path: Path) -> None:
    result = run("tune", "8,64,96", "--dtype", "fp32", "--m", "1:128", "--store", tmp_path / "s.db")
    assert result.code == 0
    assert tuning.m == range(1, 129)
    lines = result.out.splitlines()
    line = "the kernels of Mx64x96 fp32 at other M: 5 values of M timed, at most 8 s left for this weight"
    assert lines.count(line) == 1
    assert sum("values of M timed" in text for text in lines) == 1
    # SMALL takes 9 us and LARGE 10 us at M = 48.
    assert "Mx64x96 fp32: M 1-128, 2 kernels in 2 intervals, worst regret 11.1% at M = 48" in lines
    assert ["Mx64x96", "fp32", "M", "1-128", "unpacked", "2", "2", "11.1%", "at", "M", "=", "48"] in [
        t.split() for t in lines
    ]


def test_json_has_the_plans(run: CommandRunner, tuning: FakeTuning, tmp_path: Path) -> None:
    args = ("tune", "8,64,96", "--dtype", "fp32", "--json", "--store", tmp_path / "s.db")
    (plan,) = run(*args, "--m", "all").json["plans"]
    assert tuning.m == "all"
    (layout,) = plan.pop("layouts")
    assert layout["intervals"] == [[1, 40, SMALL.id], [41, 128, LARGE.id]]
    assert layout["layout"] == "unpacked"
    assert layout["worst_regret"] == pytest.approx(1 / 9)
    assert layout["worst_regret_m"] == 48
    assert (plan["label"], plan["first"], plan["last"], plan["measured"]) == ("Mx64x96 fp32", 1, 128, 4)


def test_weight_without_a_plan(run: CommandRunner, tuning: FakeTuning, tmp_path: Path) -> None:
    tuning.plans = False
    args = ("tune", "8,64,96", "--dtype", "fp32", "--m", "4,64", "--store", tmp_path / "s.db")
    result = run(*args)
    assert result.code == 0
    assert tuning.m == [4, 64]
    assert "Mx64x96 fp32: no plan" in result.out
    assert run(*args, "--json").json["plans"] == []


def test_ctrl_c_keeps_the_decisions(run: CommandRunner, tuning: FakeTuning, tmp_path: Path, target: Target) -> None:
    tuning.interrupted = True
    path = tmp_path / "s.db"
    result = run("tune", "8,64,96", "--dtype", "fp32", "--m", "1:128", "--store", path)
    assert result.code == 1
    assert "interrupted: 2 problems are decided and kept in the store" in result.err
    assert len(list(open_store(path).decisions(target))) == 2


def test_wrong_m_is_exit_code_2(run: CommandRunner, tuning: FakeTuning) -> None:
    result = run("tune", "8,64,96", "--m", "8:1")
    assert result.code == 2
    assert "1:8" in result.err
    assert tuning.m is None


def test_without_m_there_are_no_plans(run: CommandRunner, tuning: FakeTuning, tmp_path: Path) -> None:
    run("tune", "8,64,96", "--dtype", "fp32", "--store", tmp_path / "s.db")
    assert tuning.m is None


def test_config_key_is_passed_on(run: CommandRunner, tuning: FakeTuning, tmp_path: Path) -> None:
    args = ("tune", "8,64,96", "--dtype", "fp32", "--store", tmp_path / "s.db", "--config-key", "power_of_2")
    assert run(*args, "--m", "1:128").code == 0
    assert (tuning.m, tuning.config_key) == (range(1, 129), "power_of_2")
    assert run(*args).code == 2
