"""The commands ``tune`` and ``bench`` with a fake tuner that decides at once; one test runs the real tuner."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gemmtune.tuning.tuner
from gemmtune import backends
from gemmtune.core.decision import Decision
from gemmtune.core.events import Event, ProblemDone, ProblemStarted
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.report import ceilings
from gemmtune.store import open_store
from gemmtune.store.base import Store
from helpers.command import CommandRunner
from helpers.factories import make_decision


class FakeTuner:
    """Tuner that decides each problem with ``outcome``, and raises KeyboardInterrupt after ``interrupt_after``."""

    outcome = "winner"
    interrupt_after = 10**9
    arguments: tuple[Target, tuple[str, ...], float, bool] | None = None
    latency = ""

    def __init__(
        self,
        target: Target,
        names: Sequence[str],
        store: Store,
        budget: Any,
        progress: Callable[[Event], None],
        *,
        force: bool = False,
        hot: bool = False,
        latency: str = "graph",
        search: str = "local",
    ) -> None:
        FakeTuner.arguments = (target, tuple(names), budget.seconds, force)
        FakeTuner.latency = latency
        self.target, self.store, self.progress = target, store, progress

    def new_pool(self) -> Any:
        return SimpleNamespace(close=lambda: None)

    def tune(self, problems: Iterable[tuple[Problem, int]], pool: Any) -> list[Decision]:
        counted_problems, decisions = list(problems), []
        for index, (problem, _) in enumerate(counted_problems):
            if index >= self.interrupt_after:
                raise KeyboardInterrupt
            self.progress(ProblemStarted(index, len(counted_problems), problem))
            decisions.append(make_decision(problem, self.outcome, self.target))
            self.store.put(self.target, decisions[-1])
            self.progress(ProblemDone(index, len(counted_problems), decisions[-1], 0.0))
        return decisions


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> type[FakeTuner]:
    subclass = type("Fresh", (FakeTuner,), {})
    monkeypatch.setattr(gemmtune.tuning.tuner, "Tuner", subclass)
    monkeypatch.setattr(ceilings, "load_or_measure", lambda path, target: {})
    return subclass


def test_shapes_are_tuned_stored_and_printed(
    run: CommandRunner, tuner: type[FakeTuner], tmp_path: Path, target: Target
) -> None:
    path = tmp_path / "s.db"
    result = run("tune", "4,64,32", "8x64x32", "--dtype", "fp32", "--budget", "1.5", "--store", path)
    assert result.code == 0
    assert "4x64x32 fp32" in result.out
    assert "8x64x32 fp32" in result.out
    assert "2.00x [1.96-2.04]" in result.out
    assert len(list(open_store(path).decisions(target))) == 2
    assert FakeTuner.arguments == (target, backends.names("cpu"), 1.5, False)
    assert FakeTuner.latency == "graph"


def test_json_is_one_document(run: CommandRunner, tuner: type[FakeTuner], tmp_path: Path) -> None:
    result = run("tune", "4,64,32", "--json", "--force", "--backends", "aten", "--store", tmp_path / "s.db")
    assert result.code == 0
    assert result.json["interrupted"] is False
    (row,) = result.json["decisions"]
    assert row["label"] == "4x64x32 bf16"
    assert row["speedup"] == pytest.approx(2.0)
    assert FakeTuner.arguments is not None
    assert FakeTuner.arguments[1:] == (("aten",), None, True)


def test_empty_problems_of_a_workload_are_omitted(run: CommandRunner, tuner: type[FakeTuner], tmp_path: Path) -> None:
    result = run("tune", "--workload", "odd", "--dtype", "int8", "--json", "--store", tmp_path / "s.db")
    assert result.code == 0
    assert not any(row["label"].startswith("0x") for row in result.json["decisions"])


def test_ctrl_c_keeps_finished_decisions(
    run: CommandRunner, tuner: type[FakeTuner], tmp_path: Path, target: Target
) -> None:
    tuner.interrupt_after = 2
    path = tmp_path / "s.db"
    result = run("tune", "1,8,8", "2,8,8", "3,8,8", "--store", path)
    assert result.code == 1
    assert "2 of 3 problems are decided and kept" in result.err
    assert len(list(open_store(path).decisions(target))) == 2
    assert run("tune", "1,8,8", "2,8,8", "3,8,8", "--json", "--store", path).json["interrupted"] is True


def test_none_valid_is_exit_code_1(run: CommandRunner, tuner: type[FakeTuner], tmp_path: Path) -> None:
    tuner.outcome = "none_valid"
    result = run("tune", "1,8,8", "--store", tmp_path / "s.db")
    assert result.code == 1
    assert "nothing valid" in result.out


def test_empty_problem_alone_is_an_error(run: CommandRunner, tuner: type[FakeTuner], tmp_path: Path) -> None:
    result = run("tune", "0,8,8", "--store", tmp_path / "s.db")
    assert result.code == 1
    assert "nothing to tune" in result.err


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("1,2",),
        ("1,2,3", "--dtype", "fp7"),
        ("1,2,3", "--device", "gpu"),
        ("1,2,3", "--latency", "fast"),
        ("1,2,3", "--backends", "cutlas"),
        ("1,2,3", "--workload", "odd"),
        ("--workload", "lama"),
        ("1,2,3", "--threads", "0"),
        ("1,2,3", "--budget", "-1"),
        ("1,2,3", "--budget", "nan"),
        ("1,2,3", "--threads", "4096"),
        ("no_such_file.py:factory",),
        ("1,2,3", "--dtype", "int8", "--bias"),
    ],
)
def test_wrong_usage_is_exit_code_2(run: CommandRunner, tuner: type[FakeTuner], args: tuple[str, ...]) -> None:
    result = run("tune", *args)
    assert result.code == 2
    assert result.err.count("\n") < 8
    assert "Traceback" not in result.err


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_shape_beyond_the_memory_is_refused_before_tuning(
    run: CommandRunner, tuner: type[FakeTuner], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(FakeTuner, "arguments", None)
    result = run(command, "1,8,8", "2147483647,2147483647,1", "--json")
    assert result.code == 1
    assert (
        "2147483647x2147483647x1 bf16 needs 8,589,934,592.0 GiB for its operands; this machine has"
        in (result.json["error"])
    )
    assert FakeTuner.arguments is None


def test_bench_stores_nothing_and_compares_backends(
    run: CommandRunner, tuner: type[FakeTuner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "s.db"))
    result = run("bench", "4,64,32", "--backends", "native", "--json")
    assert result.code == 0
    (row,) = result.json["results"]
    assert set(row["backends"]) == {"aten", "native"}
    assert row["backends"]["native"]["median_s"] < row["backends"]["aten"]["median_s"]
    assert not (tmp_path / "s.db").exists()
    text = run("bench", "4,64,32").out
    assert "native" in text
    assert "4x64x32 bf16" in text


MODEL = """
import torch

def factory(dtype="fp32"):
    return torch.nn.Linear(32, 48, bias=False), (torch.ones(4, 32),)
"""


def test_model_is_recorded_and_tuned_by_the_real_tuner(
    run: CommandRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "load_or_measure", lambda path, target: {})
    file, path = tmp_path / "tiny_model_for_tests.py", tmp_path / "s.db"
    file.write_text(MODEL)
    for _ in range(5):  # a race on a loaded machine may be inconclusive
        result = run("tune", f"{file}:factory", "--backends", "aten", "--budget", "0.5", "--json", "--store", path)
        assert result.code == 0
        if result.json["decisions"][0]["outcome"] != "inconclusive":
            break
    else:
        pytest.skip("others use this machine: five tunings in a row were inconclusive")
    assert [row["label"] for row in result.json["decisions"]] == ["4x48x32 fp32"]
    again = run("tune", f"{file}:factory", "--backends", "aten", "--json", "--store", path)
    assert again.json["from_store"] == 1
    assert run("explain", 4, 48, 32, "--dtype", "fp32", "--store", path).code == 0
