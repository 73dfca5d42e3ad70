"""Parallel builds: one process for each, isolated failures, and no build while a candidate is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gemmtune import backends
from gemmtune.backends.artifacts import artifacts_directory
from gemmtune.backends.base import Artifact
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Verdict
from gemmtune.core.problem import Operand, Problem
from gemmtune.core.target import Target, current_cpu
from gemmtune.testing import toy_compiler
from gemmtune.workers import builds, host_pool
from gemmtune.workers.builds import Builders, BuildLimits
from gemmtune.workers.contract import WorkerStartError
from gemmtune.workers.process_tags import tagged
from helpers import early_compiler

PROBLEM = Problem("mm", 5, 24, 32, Operand("float32"), Operand("float32"), "float32")
TARGET = current_cpu()
LIMITS = BuildLimits(build_s=2.0, builders=2, memory=1 << 30)


@pytest.fixture(autouse=True)
def toy_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "store.db"))
    monkeypatch.setitem(backends._PLUGINS, "toy", toy_compiler.ENTRY_POINT)
    backends.get.cache_clear()
    yield
    backends.get.cache_clear()


def toy_candidate(name: str, **config: str | float) -> Candidate:
    return Candidate.make("toy", name, kind=name, **config)


def prebuild(candidates: Iterable[Candidate], limits: BuildLimits | None = None) -> dict[str, Artifact | Verdict]:
    with Builders(limits) as builders:
        return builders(PROBLEM, candidates, TARGET)


def test_each_build_ends_in_an_artifact_or_a_verdict() -> None:
    results = prebuild(map(toy_candidate, toy_compiler.KINDS), limits=LIMITS)
    assert list(results) == [toy_candidate(name).id for name in toy_compiler.KINDS]
    kinds = {
        name: result.kind
        for name in toy_compiler.KINDS
        if isinstance(result := results[toy_candidate(name).id], Verdict)
    }
    assert kinds == {
        "fails": "build_failed", "unsupported": "unsupported", "segv": "crashed", "exit": "crashed", "hang": "hung",
        "greedy": "out_of_memory",
    }  # fmt: skip
    for name in ("good", "slow"):
        artifact = results[toy_candidate(name).id]
        assert isinstance(artifact, Artifact)
        assert artifact == backends.get("toy").build(PROBLEM, toy_candidate(name), TARGET)
        assert backends.get("toy").load(artifact, PROBLEM).candidate == toy_candidate(name)


def test_builds_run_in_parallel() -> None:
    pair = [toy_candidate("meets", me="a", other="b"), toy_candidate("meets", me="b", other="a")]
    results = prebuild(pair, limits=BuildLimits(build_s=30.0, builders=2))
    assert all(isinstance(artifact, Artifact) for artifact in results.values())


@pytest.mark.skipif(not hasattr(os, "nice") or os.nice(0) > 4, reason="the niceness cannot be raised by 15")
def test_builds_beside_a_gpu_leave_the_processors_to_what_is_needed_first() -> None:
    gpu = Target("cuda", "H200", "9.0")

    def written(name: str) -> int:
        deadline = time.monotonic() + 60.0
        while not (path := artifacts_directory() / name).exists() or not path.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int(path.read_text())

    with Builders(BuildLimits(builders=2)) as pool:
        pool(PROBLEM, [toy_candidate("nice", me="host")], TARGET)
        assert written("host") == os.nice(0)
        pool(PROBLEM, [toy_candidate("nice", me="now")], gpu)
        pool.ahead(PROBLEM, [toy_candidate("nice", me="soon")], gpu)
        pool.ahead(PROBLEM, [toy_candidate("nice", me="later")], gpu, later=True)
        steps = [written(name) - os.nice(0) for name in ("now", "soon", "later")]
    assert 0 < steps[0] < steps[1] < steps[2]


def test_each_build_has_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    host_events: list[str] = []

    class RecordingHost(host_pool.Host):
        def __init__(self, preload: Sequence[str] = ()) -> None:
            super().__init__(preload)
            host_events.append(self.tag)

        def fork(self, process: object, fds: list[int]) -> None:
            super().fork(process, fds)  # type: ignore[arg-type]
            host_events.append("fork")

    monkeypatch.setattr(host_pool, "Host", RecordingHost)
    prebuild([toy_candidate("slow", seconds=0.01 * i) for i in range(5)], limits=LIMITS)
    assert host_events[1:] == ["fork"] * 5
    assert tagged(host_events[0]) == []


def test_candidates_without_a_build_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "Host", None)
    candidate = Candidate.make("aten", "mm")
    assert isinstance(prebuild([candidate, candidate])[candidate.id], Artifact)
    assert prebuild([]) == {}


def test_build_process_that_cannot_start_raises_worker_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.workers.process._BOOT", "raise SystemExit('no python today')")
    with pytest.raises(WorkerStartError, match="no python today"):
        prebuild([toy_candidate("good")], limits=LIMITS)


def test_unknown_backend_raises_value_error() -> None:
    with pytest.raises(ValueError, match="unknown backend"):
        prebuild([Candidate.make("nowhere", "mm")])


# --- builds ahead ---------------------------------------------------------------------------------------------------

OTHER = PROBLEM.with_m(9)


@pytest.fixture
def started_builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the ids of the candidates whose builds began, in their order."""
    started: list[str] = []
    build = builds._Jobs.build

    def record_build(jobs: builds._Jobs, candidate: Candidate, turn: builds._Turn) -> Artifact | Verdict:
        started.append(candidate.id)
        return build(jobs, candidate, turn)

    monkeypatch.setattr(builds._Jobs, "build", record_build)
    return started


def test_candidate_built_ahead_is_built_once(started_builds: list[str]) -> None:
    candidates = [toy_candidate("slow", seconds=0.01 * i) for i in range(4)] + [toy_candidate("fails")]
    with Builders(BuildLimits(build_s=10.0, builders=3)) as builders:
        builders.ahead(OTHER, candidates, TARGET)
        builders.ahead(OTHER, candidates, TARGET)
        results = builders(OTHER, candidates, TARGET)
    assert list(results) == [candidate.id for candidate in candidates]
    assert [isinstance(result, Artifact) for result in results.values()] == [True] * 4 + [False]
    assert sorted(started_builds) == sorted(candidate.id for candidate in candidates)


def test_requested_builds_precede_builds_ahead(started_builds: list[str]) -> None:
    ahead_candidates = [toy_candidate("slow", seconds=0.2 + 0.01 * i) for i in range(8)]
    requested = [toy_candidate("slow", seconds=0.01 * i) for i in range(3)]
    with Builders(BuildLimits(build_s=10.0, builders=2)) as builders:
        builders.ahead(OTHER, ahead_candidates, TARGET)
        results = builders(PROBLEM, requested, TARGET)
        assert all(isinstance(result, Artifact) for result in results.values())
    assert len(set(started_builds) & {candidate.id for candidate in ahead_candidates}) < len(ahead_candidates)


def test_builds_for_later_problems_go_last(started_builds: list[str]) -> None:
    later = [toy_candidate("slow", seconds=0.05 + 0.01 * i) for i in range(3)]
    soon = [toy_candidate("slow", seconds=0.03 + 0.001 * i) for i in range(3)]
    with Builders(BuildLimits(build_s=10.0, builders=2)) as builders:  # one of them is left free
        builders.ahead(PROBLEM, [toy_candidate("slow", seconds=0.5)], TARGET)
        builders.ahead(OTHER, later, TARGET, later=True)
        builders.ahead(PROBLEM, soon, TARGET)
        wait_until(lambda: len(started_builds) == 7)
    assert set(started_builds[1:4]) == {candidate.id for candidate in soon}
    assert set(started_builds[4:]) == {candidate.id for candidate in later}


def test_builds_ahead_leave_one_builder_free(started_builds: list[str]) -> None:
    """Each build of the pair waits for the other. The second does not begin while one of two slots is kept free."""
    pair = [toy_candidate("meets", me="a", other="b"), toy_candidate("meets", me="b", other="a")]
    with Builders(BuildLimits(build_s=30.0, builders=2)) as builders:
        builders.ahead(OTHER, pair, TARGET)
        time.sleep(0.5)
        assert len(started_builds) == 1
        results = builders(OTHER, pair, TARGET)
    assert all(isinstance(result, Artifact) for result in results.values())


def test_single_builder_builds_ahead(started_builds: list[str]) -> None:
    with Builders(BuildLimits(build_s=10.0, builders=1)) as builders:
        builders.ahead(OTHER, [toy_candidate("good")], TARGET)
        wait_until(lambda: started_builds == [toy_candidate("good").id])
        assert isinstance(builders(OTHER, [toy_candidate("good")], TARGET)[toy_candidate("good").id], Artifact)


def test_close_ends_started_builds(started_builds: list[str]) -> None:
    builders = Builders(BuildLimits(build_s=60.0, builders=2))
    builders.ahead(
        OTHER, [toy_candidate("hang"), toy_candidate("slow", seconds=0.01), toy_candidate("slow", seconds=0.02)], TARGET
    )
    wait_until(lambda: toy_candidate("hang").id in started_builds)
    tag = builders._host.tag if builders._host is not None else ""
    start = time.monotonic()
    builders.close()
    assert time.monotonic() - start < 10.0
    assert tagged(tag) == []
    assert isinstance(builders(PROBLEM, [toy_candidate("good")], TARGET)[toy_candidate("good").id], Artifact)
    builders.close()


def test_build_ahead_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    with Builders(LIMITS) as builders:
        builders.ahead(OTHER, [Candidate.make("nowhere", "mm")], TARGET)
        builders.ahead(OTHER, [Candidate.make("aten", "mm")], TARGET)
        monkeypatch.setattr("gemmtune.workers.process._BOOT", "raise SystemExit('no python today')")
        builders.ahead(OTHER, [toy_candidate("good")], TARGET)
        with pytest.raises(WorkerStartError, match="no python today"):
            builders(OTHER, [toy_candidate("good")], TARGET)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_candidates_of_several_problems_are_built_at_once() -> None:
    slow = [(replace(PROBLEM, m=m), toy_candidate("slow", number=m)) for m in (3, 7)]
    wanted = [*slow, (PROBLEM, toy_candidate("good")), (PROBLEM, toy_candidate("fails"))]
    with Builders(replace(LIMITS, builders=4)) as builders:
        built = {name: outcome.result() for name, outcome in builders.begin_each(wanted, TARGET).items()}
    assert set(built) == {candidate.id for _, candidate in wanted}
    verdict = built.pop(toy_candidate("fails").id)
    assert isinstance(verdict, Verdict)
    assert verdict.kind == "build_failed"
    assert all(isinstance(artifact, Artifact) for artifact in built.values())


def test_what_first_calls_of_prebuilt_candidates_compile_is_compiled_once_for_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own. Where that fails, the first call will compile it."""
    monkeypatch.setitem(backends._PLUGINS, "early", early_compiler.ENTRY_POINT)
    backends.get.cache_clear()
    log = tmp_path / "log"
    names = ("plain", "compiles", "raises", "crashes")
    candidates = [Candidate.make("early", name, log=str(log)) for name in names]
    with Builders(LIMITS) as builders:
        for _ in range(2):
            for outcome in builders(PROBLEM, candidates, TARGET).values():
                assert isinstance(outcome, Artifact)
                assert outcome.digest == "early"
        builders(replace(PROBLEM, m=6), candidates[1:2], TARGET)
    lines = [line.split() for line in log.read_text().splitlines()]
    # A crash ends no other build; the first of a host that did not end is not repeated.
    assert sorted((name, m) for name, m, _ in lines) == [
        ("compiles", "5"), ("compiles", "6"), ("crashes", "5"), ("raises", "5"),
    ]  # fmt: skip
    assert str(os.getpid()) not in {pid for _, _, pid in lines}
