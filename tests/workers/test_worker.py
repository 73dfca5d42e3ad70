"""Workers: what a candidate does to its process costs that candidate, and the next one is served as if nothing was."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from gemmtune import backends
from gemmtune.core.candidate import Candidate
from gemmtune.core.errors import WorkerError
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target, current_cpu
from gemmtune.testing import hostile_backend
from gemmtune.timing.outcome import LeaderUpdate
from gemmtune.workers.process_tags import tagged
from gemmtune.workers.worker import Limits, LocalWorker, Worker, WorkerLost, WorkerStartError
from helpers import losing

PROBLEM = Problem("mm", 5, 24, 32, Operand("float32"), Operand("float32", Layout("col"), constant=True), "float32")
FAST = Limits(try_s=2.0, race_slack_s=2.0)


def kind(name: str) -> Candidate:
    return Candidate.make("hostile", name, kind=name)


@pytest.fixture(scope="module", autouse=True)
def room() -> None:
    backends.register("hostile", hostile_backend.ENTRY_POINT)


@pytest.fixture(scope="module")
def target() -> Target:
    return replace(current_cpu(), threads=1)  # OpenMP barriers stall when other tests keep the cores busy


@pytest.fixture(scope="module")
def shared(target: Target) -> Iterator[Worker]:
    with Worker(target, limits=FAST) as worker:
        worker.open(PROBLEM, 1)
        worker.attempt(kind("good"))  # a worker that nothing has gone well in yet is replaced sooner
        yield worker


def works(worker: Worker | LocalWorker, name: str) -> bool:
    verdict = worker.attempt(kind(name), 10.0).verdict
    return verdict is not None and verdict.ok


def descendants() -> list[psutil.Process]:
    """What runs below this process, hosts (its children) not counted."""
    return [process for host in psutil.Process().children() for process in host.children(recursive=True)]


def test_an_honest_candidate(shared: Worker) -> None:
    result = shared.attempt(kind("good"))
    assert result.verdict is not None
    assert result.verdict.kind == "within_bound"
    assert result.packing is None
    assert len(result.times_s) == 3
    assert min(result.times_s) > 0
    assert shared.confirm(kind("good")).verdict.ok


def test_a_packed_candidate(shared: Worker) -> None:
    result = shared.attempt(kind("packed"))
    assert result.verdict is not None
    assert result.verdict.ok
    assert result.packing == hostile_backend.PACKING
    assert result.packing_s > 0


@pytest.mark.parametrize(
    ("name", "verdict", "detail"),
    [
        ("wrong", "wrong", "expected"),
        ("raise", "crashed", "ValueError while running: not today"),
        ("sys_exit", "crashed", "SystemExit"),
        ("oom", "out_of_memory", "allocate"),
        ("unbuildable", "build_failed", "does not compile"),
        ("unsupported", "unsupported", "not on this machine"),
    ],
)
def test_failures_that_leave_the_worker_alive(shared: Worker, name: str, verdict: str, detail: str) -> None:
    pid = shared.pid
    result = shared.attempt(kind(name))
    assert result.verdict is not None
    assert result.verdict.kind == verdict
    assert detail in result.verdict.detail
    assert shared.pid == pid


@pytest.mark.parametrize(
    ("name", "verdict", "detail"),
    [
        ("segv", "crashed", "SIGSEGV"),
        ("exit", "crashed", "status 0"),
        ("hang", "hung", "no answer within 2.0 s"),
        ("babble", "crashed", "not a message"),
        ("unasked", "crashed", "answered Ready where Attempted was expected"),
        ("garble", "hung", "no answer within 2.0 s"),
        ("spin", "hung", "no answer within 2.0 s"),
        ("close", "crashed", "Bad file descriptor"),
    ],
)
def test_failures_that_end_the_worker(shared: Worker, name: str, verdict: str, detail: str) -> None:
    before = shared.pid
    result = shared.attempt(kind(name))
    assert result.verdict is not None
    assert result.verdict.kind == verdict
    assert detail in result.verdict.detail
    assert shared.pid is None
    assert works(shared, "good")
    assert shared.pid not in (None, before)


def test_a_child_left_behind_dies_with_its_worker(shared: Worker) -> None:
    result = shared.attempt(kind("orphan"), deadline_s=10.0)
    assert result.verdict is not None
    assert result.verdict.kind == "crashed"
    assert "status 7" in result.verdict.detail
    assert descendants() == []


@pytest.mark.parametrize("name", ["child", "daemon", "fork"])
def test_what_a_candidate_leaves_running_is_ended_and_costs_it(shared: Worker, name: str) -> None:
    assert works(shared, "good")
    pid = shared.pid
    verdict = shared.attempt(kind(name), 10.0).verdict
    assert verdict is not None
    if name != "fork":  # a fork that returns does the job as well, and ends when it would answer
        assert verdict.kind == "crashed"
        assert "left" in verdict.detail
    assert [process.pid for process in descendants()] == [pid]
    assert works(shared, "good")
    assert shared.pid == pid


def test_a_daemon_without_a_trace_dies_with_the_worker_that_made_it(shared: Worker) -> None:
    verdict = shared.attempt(kind("daemon_segv"), 10.0).verdict
    assert verdict is not None
    assert "SIGSEGV" in verdict.detail
    assert descendants() == []
    assert works(shared, "good")


# Whether it computes takes a second look, which a loaded machine may be late for (test_process.py has both wordings).
@pytest.mark.parametrize(("name", "words"), [("hold", "not computing|no sign of life"), ("stop", "stopped")])
def test_silence_is_found_out_long_before_the_deadline(target: Target, name: str, words: str) -> None:
    with Worker(target, limits=Limits(silence_s=6.0)) as worker:
        worker.open(PROBLEM, 1)
        verdict = worker.attempt(kind(name), 600.0).verdict
        assert verdict is not None
        assert verdict.kind == "hung"
        assert re.search(words, verdict.detail)
        assert works(worker, "good")


def test_a_worker_whose_context_is_lost_is_replaced(shared: Worker) -> None:
    assert works(shared, "good")
    before = shared.pid
    verdict = shared.attempt(kind("poison")).verdict
    assert verdict is not None
    assert verdict.kind == "crashed"
    assert shared.pid == before
    assert works(shared, "packed")
    assert shared.pid != before


def test_a_worker_that_finds_its_device_lost_ends_itself(target: Target) -> None:
    backends.register("losing", losing.ENTRY_POINT)
    with Worker(target, limits=FAST) as worker:
        worker.open(PROBLEM, 1)
        verdict = worker.attempt(Candidate.make("losing", "raise", kind="raise"), 10.0).verdict
        assert verdict is not None
        assert verdict.kind == "crashed"
        assert "status 5" in verdict.detail
        assert "context is lost (simulated): ValueError while running: not today" in verdict.detail
        assert worker.pid is None
        assert works(worker, "good")


def test_a_candidate_that_fails_after_anothers_crash_is_heard_once_more(shared: Worker) -> None:
    assert works(shared, "good")
    shared.attempt(kind("raise"))
    before = shared.pid
    verdict = shared.attempt(kind("wrong")).verdict
    assert verdict is not None
    assert verdict.kind == "wrong"
    assert shared.pid == before  # what was right before still is: no need for another process


def test_what_a_candidate_did_to_the_operands_is_mended(shared: Worker) -> None:
    assert works(shared, "good")
    pid = shared.pid
    verdict = shared.attempt(kind("scribble")).verdict
    assert verdict is not None
    assert verdict.kind == "wrong"
    assert works(shared, "good")
    assert shared.confirm(kind("good")).verdict.ok
    assert shared.pid == pid


def test_a_worker_is_first_to_die_of_want_and_leaves_no_image(shared: Worker) -> None:
    assert works(shared, "good")
    assert Path(f"/proc/{shared.pid}/oom_score_adj").read_text().strip() == "1000"
    assert psutil.Process(shared.pid).rlimit(psutil.RLIMIT_CORE)[0] == 0


def test_a_problem_is_taken_up_by_another_worker_when_this_one_is_lost(target: Target) -> None:
    with Worker(target, limits=FAST) as worker:
        worker.open(PROBLEM, 1)
        worker.attempt(kind("segv"))
        assert worker.pid is None
        assert works(worker, "good")
        assert worker.starts == 2
        assert worker.tag is not None
        assert worker.pid in [process.pid for process in tagged(worker.tag)]
        tag = worker.tag
    assert tagged(tag) == []


def test_a_host_that_is_killed_takes_its_worker_along_and_is_replaced(shared: Worker) -> None:
    assert works(shared, "good")
    worker = psutil.Process(shared.pid)
    worker.parent().kill()
    psutil.wait_procs([worker], timeout=10)
    verdict = shared.attempt(kind("good")).verdict
    assert verdict is not None
    assert "SIGKILL" in verdict.detail
    assert not worker.is_running()
    assert works(shared, "good")


PARENT = """
import os, signal, sys
from dataclasses import replace
from gemmtune import backends
from gemmtune.backends.base import Candidate
from gemmtune.workers.process_tags import tagged
from gemmtune.workers.worker import Worker
from gemmtune.core.problem import Problem
from gemmtune.core.target import current_cpu
from gemmtune.testing import hostile_backend
import json
backends.register("hostile", hostile_backend.ENTRY_POINT)
worker = Worker(replace(current_cpu(), threads=1))
worker.open(Problem.from_dict(json.loads(sys.argv[1])), 1)
print(worker.tag, flush=True)
if sys.argv[2] == "SIGKILL":
    worker._process.send(__import__("gemmtune.workers.protocol").workers.protocol.Attempt(
        Candidate.make("hostile", sys.argv[3], kind=sys.argv[3]).to_dict()))
    import time; time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "doing"), [("SIGKILL", "hang"), ("SIGKILL", "hold"), ("SIGKILL", "stop"), ("", "")])
def test_workers_die_with_their_parent(end: str, doing: str) -> None:
    script = [sys.executable, "-c", PARENT, json.dumps(PROBLEM.to_dict()), end, doing]
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == (-signal.SIGKILL if end else 0), done.stderr
    deadline = time.monotonic() + 10
    while left := tagged(done.stdout.strip()):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


ALONE = """
import os
from gemmtune.workers import worker_main
worker_main._serve = lambda *_: print(os.environ["GEMMTUNE_OVERLAP"])
(read, _), (_, write) = os.pipe(), os.pipe()
worker_main.main(read, write, os.dup(read))
"""


def test_kernels_are_timed_alone() -> None:
    """One that begins before the one before it has ended takes less time than it costs behind anything else."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "GEMMTUNE_OVERLAP": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "0", done.stderr


def test_flooded_output_goes_nowhere(shared: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    assert works(shared, "flood")
    assert capfd.readouterr() == ("", "")


def test_the_slow_are_timed_but_not_checked(shared: Worker) -> None:
    result = shared.attempt(kind("wrong"), worth_s=0.0)
    assert result.verdict is None
    assert result.times_s
    assert not shared.confirm(kind("wrong")).verdict.ok


def test_more_scratch_than_tuning_allows(shared: Worker) -> None:
    refused = shared.attempt(kind("greedy"), worth_s=1.0)
    assert refused.verdict is not None
    assert refused.verdict.kind == "unsupported"
    assert "MB of scratch" in refused.verdict.detail
    assert works(shared, "greedy")  # with nothing to compare it with


def test_a_race_tells_who_leads_and_who_came_where(shared: Worker) -> None:
    seen: list[LeaderUpdate] = []
    names = [kind("good"), kind("packed"), Candidate.make("aten", "mm")]
    raced = shared.race(names, 0.3, 0, seen.append)
    assert {place.id for place in raced.placed} == {candidate.id for candidate in names}
    assert raced.leader in {candidate.id for candidate in names}
    assert all(place.sample is not None for place in raced.placed)
    assert set(raced.groups) == {"", hostile_backend.PACKING}
    assert {leading.id for leading in seen} <= {candidate.id for candidate in names}


def test_a_death_in_a_race_names_its_cause(shared: Worker) -> None:
    names = [kind("good"), kind("late_segv"), Candidate.make("aten", "mm")]
    with pytest.raises(WorkerLost, match="SIGSEGV") as caught:
        shared.race(names, 0.5, 0)
    assert caught.value.candidate_id == kind("late_segv").id
    assert shared.race([names[0], names[2]], 0.2, 0).leader is not None


def test_being_killed_from_outside_is_a_crash(shared: Worker) -> None:
    shared.attempt(kind("good"))
    assert shared.pid is not None
    os.kill(shared.pid, signal.SIGKILL)
    verdict = shared.attempt(kind("good")).verdict
    assert verdict is not None
    assert "SIGKILL" in verdict.detail
    assert works(shared, "good")


def test_another_problem_in_the_same_process(shared: Worker) -> None:
    shared.attempt(kind("good"))
    pid = shared.pid
    shared.open(PROBLEM.with_m(7), 1)
    assert works(shared, "good")
    assert shared.pid == pid
    shared.open(PROBLEM, 1)


def test_local_work_uses_the_targets_threads_and_gives_them_back(target: Target) -> None:
    threads = torch.get_num_threads()
    with LocalWorker(replace(target, threads=threads + 1)):
        assert torch.get_num_threads() == threads + 1
    assert torch.get_num_threads() == threads


def test_local_work_is_the_same_work(target: Target) -> None:
    with LocalWorker(target) as worker:
        worker.open(PROBLEM, 1)
        assert works(worker, "packed")
        assert not works(worker, "wrong")
        assert not works(worker, "raise")
        assert worker.confirm(kind("good")).verdict.ok
        assert worker.race([kind("good"), Candidate.make("aten", "mm")], 0.2, 0).leader is not None


def test_nothing_is_left_after_close(target: Target) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Worker(target) as worker:
        worker.open(PROBLEM, 1)
        pid = worker.pid
        assert pid is not None
    worker.close()
    assert not psutil.pid_exists(pid)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_worker_that_cannot_start(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["/nowhere"])
    with Worker(target) as worker, pytest.raises(WorkerStartError, match="ModuleNotFoundError"):
        worker.open(PROBLEM, 1)


def test_a_problem_that_cannot_be_made(target: Target) -> None:
    huge = Problem("mm", 1 << 22, 1 << 22, 1 << 22, Operand("float32"), Operand("float32"), "float32")
    with Worker(target, limits=Limits(memory=1 << 30)) as worker, pytest.raises(WorkerError, match="allocate"):
        worker.open(huge, 1)


def test_a_candidate_before_a_problem(target: Target) -> None:
    with Worker(target) as worker, pytest.raises(WorkerError, match="open"):
        worker.attempt(kind("good"))
