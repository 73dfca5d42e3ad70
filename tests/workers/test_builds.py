"""Builds side by side: each in a process of its own, whose end costs no other, and none left when anything is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gemmtune import backends
from gemmtune.backends.base import Artifact
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Verdict
from gemmtune.core.problem import Operand, Problem
from gemmtune.core.target import current_cpu
from gemmtune.testing import toy_compiler
from gemmtune.workers import builds
from gemmtune.workers.builds import Builders, BuildLimits, prebuild
from gemmtune.workers.process_tags import tagged
from gemmtune.workers.worker import WorkerStartError

PROBLEM = Problem("mm", 5, 24, 32, Operand("float32"), Operand("float32"), "float32")
TARGET = current_cpu()
LIMITS = BuildLimits(build_s=2.0, builders=2, memory=1 << 30)


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "store.db"))
    monkeypatch.setitem(backends._PLUGINS, "toy", toy_compiler.ENTRY_POINT)
    backends.get.cache_clear()
    yield
    backends.get.cache_clear()


def kind(name: str, **config: str | float) -> Candidate:
    return Candidate.make("toy", name, kind=name, **config)


def test_each_build_ends_in_an_artifact_or_a_verdict() -> None:
    built = prebuild(PROBLEM, map(kind, toy_compiler.KINDS), TARGET, limits=LIMITS)
    assert list(built) == [kind(name).id for name in toy_compiler.KINDS]
    kinds = {name: what.kind for name in toy_compiler.KINDS if isinstance(what := built[kind(name).id], Verdict)}
    assert kinds == {
        "fails": "build_failed", "unsupported": "unsupported", "segv": "crashed", "exit": "crashed", "hang": "hung",
        "greedy": "out_of_memory",
    }  # fmt: skip
    for name in ("good", "slow"):
        artifact = built[kind(name).id]
        assert isinstance(artifact, Artifact)
        assert artifact == backends.get("toy").build(PROBLEM, kind(name), TARGET)
        assert backends.get("toy").load(artifact, PROBLEM).candidate == kind(name)


def test_builds_run_side_by_side() -> None:
    pair = [kind("meets", me="a", other="b"), kind("meets", me="b", other="a")]
    built = prebuild(PROBLEM, pair, TARGET, limits=BuildLimits(build_s=30.0, builders=2))
    assert all(isinstance(artifact, Artifact) for artifact in built.values())


def test_every_build_has_a_fresh_process_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []

    class Watched(builds.Host):
        def __init__(self, preload: Sequence[str] = ()) -> None:
            super().__init__(preload)
            hosts.append(self.tag)

        def fork(self, process: object, fds: list[int]) -> None:
            super().fork(process, fds)  # type: ignore[arg-type]
            hosts.append("fork")

    monkeypatch.setattr(builds, "Host", Watched)
    prebuild(PROBLEM, [kind("slow", seconds=0.01 * i) for i in range(5)], TARGET, limits=LIMITS)
    assert hosts[1:] == ["fork"] * 5
    assert tagged(hosts[0]) == []


def test_what_came_prebuilt_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "Host", None)
    candidate = Candidate.make("aten", "mm")
    assert isinstance(prebuild(PROBLEM, [candidate, candidate], TARGET)[candidate.id], Artifact)
    assert prebuild(PROBLEM, [], TARGET) == {}


def test_no_process_to_build_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.workers.process._BOOT", "raise SystemExit('no python today')")
    with pytest.raises(WorkerStartError, match="no python today"):
        prebuild(PROBLEM, [kind("good")], TARGET, limits=LIMITS)


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="unknown backend"):
        prebuild(PROBLEM, [Candidate.make("nowhere", "mm")], TARGET)


# --- ahead of their time --------------------------------------------------------------------------------------------

OTHER = PROBLEM.with_m(9)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of what was built in a process, in the order of beginning."""
    begun: list[str] = []
    build = builds._Jobs.build

    def note(jobs: builds._Jobs, candidate: Candidate) -> Artifact | Verdict:
        begun.append(candidate.id)
        return build(jobs, candidate)

    monkeypatch.setattr(builds._Jobs, "build", note)
    return begun


def test_what_was_built_ahead_is_built_once(built: list[str]) -> None:
    wanted = [kind("slow", seconds=0.01 * i) for i in range(4)] + [kind("fails")]
    with Builders(BuildLimits(build_s=10.0, builders=3)) as builders:
        builders.ahead(OTHER, wanted, TARGET)
        builders.ahead(OTHER, wanted, TARGET)
        found = builders(OTHER, wanted, TARGET)
    assert list(found) == [candidate.id for candidate in wanted]
    assert [isinstance(what, Artifact) for what in found.values()] == [True] * 4 + [False]
    assert sorted(built) == sorted(candidate.id for candidate in wanted)


def test_what_is_waited_for_goes_first(built: list[str]) -> None:
    early = [kind("slow", seconds=0.2 + 0.01 * i) for i in range(8)]
    now = [kind("slow", seconds=0.01 * i) for i in range(3)]
    with Builders(BuildLimits(build_s=10.0, builders=2)) as builders:
        builders.ahead(OTHER, early, TARGET)
        done = builders(PROBLEM, now, TARGET)
        assert all(isinstance(what, Artifact) for what in done.values())
    assert len(set(built) & {candidate.id for candidate in early}) < len(early)


def test_one_processor_is_left_alone(built: list[str]) -> None:
    """The other half of a pair that can only end together does not begin while one of two slots is spared."""
    pair = [kind("meets", me="a", other="b"), kind("meets", me="b", other="a")]
    with Builders(BuildLimits(build_s=30.0, builders=2)) as builders:
        builders.ahead(OTHER, pair, TARGET)
        time.sleep(0.5)
        assert len(built) == 1
        found = builders(OTHER, pair, TARGET)
    assert all(isinstance(what, Artifact) for what in found.values())


def test_a_single_builder_builds_ahead_too(built: list[str]) -> None:
    with Builders(BuildLimits(build_s=10.0, builders=1)) as builders:
        builders.ahead(OTHER, [kind("good")], TARGET)
        until(lambda: built == [kind("good").id])
        assert isinstance(builders(OTHER, [kind("good")], TARGET)[kind("good").id], Artifact)


def test_closing_ends_what_was_begun_and_leaves_nothing(built: list[str]) -> None:
    builders = Builders(BuildLimits(build_s=60.0, builders=2))
    builders.ahead(OTHER, [kind("hang"), kind("slow", seconds=0.01), kind("slow", seconds=0.02)], TARGET)
    until(lambda: kind("hang").id in built)
    tag = builders._host.tag if builders._host is not None else ""
    began = time.monotonic()
    builders.close()
    assert time.monotonic() - began < 10.0
    assert tagged(tag) == []
    assert isinstance(builders(PROBLEM, [kind("good")], TARGET)[kind("good").id], Artifact)
    builders.close()


def test_ahead_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Builders(LIMITS) as builders:
        builders.ahead(OTHER, [Candidate.make("nowhere", "mm")], TARGET)
        builders.ahead(OTHER, [Candidate.make("aten", "mm")], TARGET)
        monkeypatch.setattr("gemmtune.workers.process._BOOT", "raise SystemExit('no python today')")
        builders.ahead(OTHER, [kind("good")], TARGET)
        with pytest.raises(WorkerStartError, match="no python today"):
            builders(OTHER, [kind("good")], TARGET)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
