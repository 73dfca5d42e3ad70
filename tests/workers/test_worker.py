"""Workers: a candidate that damages its process has a verdict, and the next candidate is not affected."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gemmtune import backends
from gemmtune.backends.aten.kernel import AtenKernel
from gemmtune.backends.base import Artifact, Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.errors import WorkerError
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target, current_cpu
from gemmtune.testing import hostile_backend
from gemmtune.timing.outcome import LeaderUpdate
from gemmtune.workers import job
from gemmtune.workers.contract import Declined, Limits, WorkerLost, WorkerStartError
from gemmtune.workers.local_worker import LocalWorker
from gemmtune.workers.process_tags import tagged
from gemmtune.workers.protocol import SizedCandidate
from gemmtune.workers.worker import Worker
from helpers import context_loss
from helpers.gpus import H200

PROBLEM = Problem("mm", 5, 24, 32, Operand("float32"), Operand("float32", Layout("col"), constant=True), "float32")
FAST = Limits(try_s=2.0, race_slack_s=2.0)


def hostile_candidate(name: str) -> Candidate:
    return Candidate.make("hostile", name, kind=name)


@pytest.fixture(scope="module", autouse=True)
def register_hostile_backend() -> None:
    backends.register("hostile", hostile_backend.ENTRY_POINT)


@pytest.fixture(scope="module")
def target() -> Target:
    return replace(current_cpu(), threads=1)  # OpenMP barriers stall when other tests use the cores


@pytest.fixture(scope="module")
def shared_worker(target: Target) -> Iterator[Worker]:
    with Worker(target, limits=FAST) as worker:
        worker.open(PROBLEM, 1)
        worker.attempt(hostile_candidate("good"))  # a worker without a success is replaced sooner
        yield worker


def sized(*candidates: Candidate) -> list[SizedCandidate]:
    return [SizedCandidate(candidate.to_dict(), PROBLEM.m) for candidate in candidates]


def is_correct(worker: Worker | LocalWorker, name: str) -> bool:
    verdict = worker.attempt(hostile_candidate(name), 10.0).verdict
    return verdict is not None and verdict.ok


def descendants() -> list[psutil.Process]:
    """Return the descendants of this process without its children, which are the hosts."""
    return [process for host in psutil.Process().children() for process in host.children(recursive=True)]


def test_correct_candidate_is_timed_and_verified(shared_worker: Worker) -> None:
    result = shared_worker.attempt(hostile_candidate("good"))
    assert result.verdict is not None
    assert result.verdict.kind == "within_bound"
    assert result.packing is None
    assert len(result.times_s) == 3
    assert min(result.times_s) > 0
    assert shared_worker.confirm(hostile_candidate("good")).verdict.ok


def test_packed_candidate_has_its_layout_and_packing_time(shared_worker: Worker) -> None:
    result = shared_worker.attempt(hostile_candidate("packed"))
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
def test_failures_without_a_new_process(shared_worker: Worker, name: str, verdict: str, detail: str) -> None:
    pid = shared_worker.pid
    result = shared_worker.attempt(hostile_candidate(name))
    assert result.verdict is not None
    assert result.verdict.kind == verdict
    assert detail in result.verdict.detail
    assert shared_worker.pid == pid


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
def test_failures_with_a_new_process(shared_worker: Worker, name: str, verdict: str, detail: str) -> None:
    before = shared_worker.pid
    result = shared_worker.attempt(hostile_candidate(name))
    assert result.verdict is not None
    assert result.verdict.kind == verdict
    assert detail in result.verdict.detail
    assert shared_worker.pid is None
    assert is_correct(shared_worker, "good")
    assert shared_worker.pid not in (None, before)


def test_orphaned_child_is_killed_with_its_worker(shared_worker: Worker) -> None:
    result = shared_worker.attempt(hostile_candidate("orphan"), deadline_s=10.0)
    assert result.verdict is not None
    assert result.verdict.kind == "crashed"
    assert "status 7" in result.verdict.detail
    assert descendants() == []


@pytest.mark.parametrize("name", ["child", "daemon", "fork"])
def test_leftover_processes_are_killed_and_fail_the_candidate(shared_worker: Worker, name: str) -> None:
    assert is_correct(shared_worker, "good")
    pid = shared_worker.pid
    verdict = shared_worker.attempt(hostile_candidate(name), 10.0).verdict
    assert verdict is not None
    if name != "fork":  # a forked child that returns computes the product, too, and ends when it would reply
        assert verdict.kind == "crashed"
        assert "left" in verdict.detail
    assert [process.pid for process in descendants()] == [pid]
    assert is_correct(shared_worker, "good")
    assert shared_worker.pid == pid


def test_daemon_is_killed_when_its_worker_crashes(shared_worker: Worker) -> None:
    verdict = shared_worker.attempt(hostile_candidate("daemon_segv"), 10.0).verdict
    assert verdict is not None
    assert "SIGSEGV" in verdict.detail
    assert descendants() == []
    assert is_correct(shared_worker, "good")


# The heartbeat checks twice whether a worker computes, late on a loaded machine (test_process.py has both messages).
@pytest.mark.parametrize(("name", "pattern"), [("hold", "not computing|no sign of life"), ("stop", "stopped")])
def test_missing_heartbeats_are_detected_before_the_deadline(target: Target, name: str, pattern: str) -> None:
    with Worker(target, limits=Limits(silence_s=6.0)) as worker:
        worker.open(PROBLEM, 1)
        verdict = worker.attempt(hostile_candidate(name), 600.0).verdict
        assert verdict is not None
        assert verdict.kind == "hung"
        assert re.search(pattern, verdict.detail)
        assert is_correct(worker, "good")


def test_worker_with_a_poisoned_context_is_replaced(shared_worker: Worker) -> None:
    assert is_correct(shared_worker, "good")
    before = shared_worker.pid
    verdict = shared_worker.attempt(hostile_candidate("poison")).verdict
    assert verdict is not None
    assert verdict.kind == "crashed"
    assert shared_worker.pid == before
    assert is_correct(shared_worker, "packed")
    assert shared_worker.pid != before


def test_worker_exits_when_its_device_context_is_lost(target: Target) -> None:
    backends.register("context_loss", context_loss.ENTRY_POINT)
    with Worker(target, limits=FAST) as worker:
        worker.open(PROBLEM, 1)
        verdict = worker.attempt(Candidate.make("context_loss", "raise", kind="raise"), 10.0).verdict
        assert verdict is not None
        assert verdict.kind == "crashed"
        assert "status 5" in verdict.detail
        assert "context is lost (simulated): ValueError while running: not today" in verdict.detail
        assert worker.pid is None
        assert is_correct(worker, "good")


def test_candidate_that_fails_after_a_crash_is_tried_again(shared_worker: Worker) -> None:
    assert is_correct(shared_worker, "good")
    shared_worker.attempt(hostile_candidate("raise"))
    before = shared_worker.pid
    verdict = shared_worker.attempt(hostile_candidate("wrong")).verdict
    assert verdict is not None
    assert verdict.kind == "wrong"
    assert shared_worker.pid == before  # a candidate that was correct before still is: no new process is needed


def test_operands_that_a_candidate_modified_are_restored(shared_worker: Worker) -> None:
    assert is_correct(shared_worker, "good")
    pid = shared_worker.pid
    verdict = shared_worker.attempt(hostile_candidate("scribble")).verdict
    assert verdict is not None
    assert verdict.kind == "wrong"
    assert is_correct(shared_worker, "good")
    assert shared_worker.confirm(hostile_candidate("good")).verdict.ok
    assert shared_worker.pid == pid


def test_worker_has_the_highest_oom_score_and_no_core_dump(shared_worker: Worker) -> None:
    assert is_correct(shared_worker, "good")
    assert Path(f"/proc/{shared_worker.pid}/oom_score_adj").read_text().strip() == "1000"
    assert psutil.Process(shared_worker.pid).rlimit(psutil.RLIMIT_CORE)[0] == 0


def test_lost_worker_is_replaced_with_the_open_problem(target: Target) -> None:
    with Worker(target, limits=FAST) as worker:
        worker.open(PROBLEM, 1)
        worker.attempt(hostile_candidate("segv"))
        assert worker.pid is None
        assert is_correct(worker, "good")
        assert worker.starts == 2
        assert worker.tag is not None
        assert worker.pid in [process.pid for process in tagged(worker.tag)]
        tag = worker.tag
    assert tagged(tag) == []


def test_killed_host_ends_its_worker_and_is_replaced_without_blame_for_the_candidate(shared_worker: Worker) -> None:
    """Another process of the host may have killed it: the candidate is tried again."""
    assert is_correct(shared_worker, "good")
    for _ in range(2):
        worker = psutil.Process(shared_worker.pid)
        worker.parent().kill()
        psutil.wait_procs([worker], timeout=10)
        assert is_correct(shared_worker, "good")
        assert not worker.is_running()


def test_candidate_that_kills_its_host_again_is_to_blame(target: Target) -> None:
    with Worker(target, limits=FAST) as worker:
        worker.open(PROBLEM, 1)
        verdict = worker.attempt(hostile_candidate("kill_host")).verdict
        assert verdict is not None
        assert verdict.kind == "crashed"
        assert "SIGKILL" in verdict.detail
        assert is_correct(worker, "good")


PARENT_SCRIPT = """
import os, signal, sys
from dataclasses import replace
from gemmtune import backends
from gemmtune.backends.base import Candidate
from gemmtune.workers.process_tags import tagged
from gemmtune.workers.protocol import SizedCandidate
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


@pytest.mark.parametrize(
    ("signal_name", "candidate_kind"), [("SIGKILL", "hang"), ("SIGKILL", "hold"), ("SIGKILL", "stop"), ("", "")]
)
def test_workers_end_with_their_parent(signal_name: str, candidate_kind: str) -> None:
    script = [sys.executable, "-c", PARENT_SCRIPT, json.dumps(PROBLEM.to_dict()), signal_name, candidate_kind]
    process = subprocess.run(
        script, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    assert process.returncode == (-signal.SIGKILL if signal_name else 0), process.stderr
    deadline = time.monotonic() + 10
    while remaining := tagged(process.stdout.strip()):
        assert time.monotonic() < deadline, remaining
        time.sleep(0.05)


OVERLAP_SCRIPT = """
import os
from gemmtune.workers import worker_main
worker_main._serve = lambda *_: print(os.environ["GEMMTUNE_OVERLAP"])
(read, _), (_, write) = os.pipe(), os.pipe()
worker_main.main(read, write, os.dup(read))
"""


def test_workers_disable_overlap() -> None:
    """A kernel that overlaps the previous one takes less time than it costs after any other work."""
    process = subprocess.run(
        [sys.executable, "-c", OVERLAP_SCRIPT], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "GEMMTUNE_OVERLAP": "1"},
    )  # fmt: skip
    assert process.stdout.strip() == "0", process.stderr


def test_output_of_a_candidate_is_not_printed(shared_worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    assert is_correct(shared_worker, "flood")
    assert capfd.readouterr() == ("", "")


def test_candidates_beyond_the_cutoff_are_timed_but_not_verified(shared_worker: Worker) -> None:
    result = shared_worker.attempt(hostile_candidate("wrong"), cutoff_s=0.0)
    assert result.verdict is None
    assert result.times_s
    assert not shared_worker.confirm(hostile_candidate("wrong")).verdict.ok


def test_too_large_a_workspace_is_unsupported(shared_worker: Worker) -> None:
    result = shared_worker.attempt(hostile_candidate("greedy"), cutoff_s=1.0)
    assert result.verdict is not None
    assert result.verdict.kind == "unsupported"
    assert "MB of scratch" in result.verdict.detail
    assert is_correct(shared_worker, "greedy")  # without a cutoff


def test_race_returns_the_leader_and_all_placements(shared_worker: Worker) -> None:
    updates: list[LeaderUpdate] = []
    candidates = [hostile_candidate("good"), hostile_candidate("packed"), Candidate.make("aten", "mm")]
    result = shared_worker.race(candidates, 0.3, 0, updates.append)
    assert {placement.id for placement in result.evidence.values()} == {candidate.id for candidate in candidates}
    assert result.leader in {candidate.id for candidate in candidates}
    assert all(placement.sample is not None for placement in result.evidence.values())
    assert set(result.alternatives) == {"", hostile_backend.PACKING}
    assert {update.id for update in updates} <= {candidate.id for candidate in candidates}


def test_crash_in_a_race_has_its_candidate(shared_worker: Worker) -> None:
    candidates = [hostile_candidate("good"), hostile_candidate("late_segv"), Candidate.make("aten", "mm")]
    with pytest.raises(WorkerLost, match="SIGSEGV") as error:
        shared_worker.race(candidates, 0.5, 0)
    assert error.value.candidate_id == hostile_candidate("late_segv").id
    assert shared_worker.race([candidates[0], candidates[2]], 0.2, 0).leader is not None


def test_killed_worker_is_a_crash(shared_worker: Worker) -> None:
    shared_worker.attempt(hostile_candidate("good"))
    assert shared_worker.pid is not None
    os.kill(shared_worker.pid, signal.SIGKILL)
    verdict = shared_worker.attempt(hostile_candidate("good")).verdict
    assert verdict is not None
    assert "SIGKILL" in verdict.detail
    assert is_correct(shared_worker, "good")


def test_worker_opens_another_problem_in_its_process(shared_worker: Worker) -> None:
    shared_worker.attempt(hostile_candidate("good"))
    pid = shared_worker.pid
    shared_worker.open(PROBLEM.with_m(7), 1)
    assert is_correct(shared_worker, "good")
    assert shared_worker.pid == pid
    shared_worker.open(PROBLEM, 1)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the M of the problems that a LocalWorker prepared, as it prepares them."""
    sizes: list[int] = []
    original = job.make_reference_cases

    def make(problem: Problem, *args: Any, **more: Any) -> Any:
        sizes.append(problem.m)
        return original(problem, *args, **more)

    monkeypatch.setattr(job, "make_reference_cases", make)
    return sizes


def test_paused_problem_is_resumed_without_preparing_it_again(target: Target, prepared: list[int]) -> None:
    with closing(LocalWorker(target)) as worker:
        worker.open(PROBLEM, 1)
        worker.pause()
        worker.open(PROBLEM.with_m(7), 1)
        assert is_correct(worker, "good")
        worker.pause()
        worker.resume(PROBLEM)
        assert is_correct(worker, "good")
        worker.resume(PROBLEM.with_m(7))
        assert is_correct(worker, "good")
        assert prepared == [5, 7]


def test_operands_that_another_problems_kernel_modified_are_prepared_again(target: Target, prepared: list[int]) -> None:
    """Expected results, too, which are in memory beside them."""
    with closing(LocalWorker(target)) as worker:
        worker.open(PROBLEM, 1)
        session = worker._handler._job
        assert session is not None
        worker.pause()
        worker.open(PROBLEM.with_m(7), 1)
        session._get_test_cases()[0].value.fill_(1.0)
        worker.resume(PROBLEM)
        assert is_correct(worker, "good")
        assert prepared == [5, 7, 5]


def test_only_paused_problems_are_kept(target: Target, prepared: list[int]) -> None:
    """The first is left without a pause, and the second is opened from the start although it was paused before."""
    with closing(LocalWorker(target)) as worker:
        worker.open(PROBLEM, 1)
        worker.open(PROBLEM.with_m(7), 1)
        worker.pause()
        worker.resume(PROBLEM.with_m(7))
        worker.open(PROBLEM, 1)
        worker.open(PROBLEM.with_m(7), 1)
        assert prepared == [5, 7, 5, 7]
        with pytest.raises(KeyError):
            worker.resume(PROBLEM)


def test_paused_problem_is_opened_again_in_a_new_worker(target: Target) -> None:
    with Worker(target, limits=FAST) as worker:
        worker.open(PROBLEM, 1)
        worker.pause()
        worker.open(PROBLEM.with_m(7), 1)
        assert is_correct(worker, "good")
        pid = worker.pid
        assert pid is not None
        assert not is_correct(worker, "abort")
        worker.resume(PROBLEM)
        assert is_correct(worker, "good")
        assert worker.pid != pid


def test_paused_problem_is_resumed_in_the_same_process(target: Target) -> None:
    """Also after a candidate that failed without damaging it."""
    with Worker(target, limits=FAST) as worker:
        worker.open(PROBLEM, 1)
        pid = worker.pid
        worker.pause()
        worker.open(PROBLEM.with_m(7), 1)
        assert not is_correct(worker, "wrong")
        worker.resume(PROBLEM)
        assert is_correct(worker, "good")
        assert worker.confirm(hostile_candidate("good")).verdict.ok
        assert worker.pid == pid


def test_local_worker_sets_and_restores_the_thread_count(target: Target) -> None:
    threads = torch.get_num_threads()
    with LocalWorker(replace(target, threads=threads + 1)):
        assert torch.get_num_threads() == threads + 1
    assert torch.get_num_threads() == threads


def test_local_worker_verifies_confirms_and_races(target: Target) -> None:
    with LocalWorker(target) as worker:
        worker.open(PROBLEM, 1)
        assert is_correct(worker, "packed")
        assert not is_correct(worker, "wrong")
        assert not is_correct(worker, "raise")
        assert worker.confirm(hostile_candidate("good")).verdict.ok
        assert worker.race([hostile_candidate("good"), Candidate.make("aten", "mm")], 0.2, 0).leader is not None


def test_close_leaves_no_process_and_no_file_descriptor(target: Target) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Worker(target) as worker:
        worker.open(PROBLEM, 1)
        pid = worker.pid
        assert pid is not None
    worker.close()
    assert not psutil.pid_exists(pid)
    assert set(os.listdir("/proc/self/fd")) == before


def test_worker_that_cannot_start_raises_worker_start_error(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["/nowhere"])
    with Worker(target) as worker, pytest.raises(WorkerStartError, match="ModuleNotFoundError"):
        worker.open(PROBLEM, 1)


def test_problem_beyond_the_memory_limit_raises_worker_error(target: Target) -> None:
    huge = Problem("mm", 1 << 22, 1 << 22, 1 << 22, Operand("float32"), Operand("float32"), "float32")
    with Worker(target, limits=Limits(memory=1 << 30)) as worker, pytest.raises(WorkerError, match="allocate"):
        worker.open(huge, 1)


def test_attempt_without_an_open_problem_raises_worker_error(target: Target) -> None:
    with Worker(target) as worker, pytest.raises(WorkerError, match="open"):
        worker.attempt(hostile_candidate("good"))


# --- several M

ATEN = Candidate.make("aten", "mm")


def test_candidates_are_timed_at_several_m(shared_worker: Worker) -> None:
    candidates = [ATEN, hostile_candidate("good"), hostile_candidate("packed")]
    ids = [candidate.id for candidate in candidates]
    timed = shared_worker.time_sizes(sized(*candidates), {1: [0, 1, 2], 40: [0, 2], 70: [1]}, 70, 0.1, 0)
    assert {m: set(times) for m, times in timed.times.items()} == {1: set(ids), 40: {ids[0], ids[2]}, 70: {ids[1]}}
    assert all(seconds > 0.0 for times in timed.times.values() for seconds in times.values())
    assert set(timed.noise) == {1, 40, 70}
    assert (timed.faults, timed.excluded) == ({}, {})


def test_plain_op_is_timed_at_several_m_with_the_flags_of_torch_and_verified_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(AtenKernel, "keep_torch_flags", lambda kernel: kept.append(kernel.candidate.id))
    with closing(LocalWorker(current_cpu())) as worker:
        worker.open(PROBLEM, 0)
        (item,) = sized(ATEN)
        assert worker.verify_sizes(item, [3]).verdict.ok
        assert kept == []
        worker.time_sizes([item], {3: [0]}, 3, 0.0, 0)
        assert kept == [ATEN.id]


def test_candidates_that_raise_or_cannot_be_loaded_are_faults(shared_worker: Worker) -> None:
    names = ("unsupported", "unbuildable", "good", "raise")
    candidates = sized(*map(hostile_candidate, names))
    for _ in range(2):
        timed = shared_worker.time_sizes(candidates, {5: [0, 1, 2, 3], 6: [2, 3]}, 6, 0.0, 0)
        kinds = {name: verdict.kind for name, verdict in timed.faults.items()}
        expected = {"unsupported": "unsupported", "unbuildable": "build_failed", "raise": "crashed"}
        assert kinds == {hostile_candidate(name).id: kind for name, kind in expected.items()}
        good = {hostile_candidate("good").id}
        assert {m: set(times) for m, times in timed.times.items()} == {5: good, 6: good}


@pytest.mark.parametrize("first", ["good", "unbuildable"])
def test_crash_while_timed_at_several_m_has_its_candidate(shared_worker: Worker, first: str) -> None:
    """The number that the worker notes is that of the candidate in the request, also where others were not loaded."""
    candidates = sized(hostile_candidate(first), ATEN, hostile_candidate("late_segv"), hostile_candidate("packed"))
    with pytest.raises(WorkerLost, match="SIGSEGV") as error:
        shared_worker.time_sizes(candidates, {1: [0, 1], 7: [1, 2, 3]}, 7, 0.1, 0)
    assert error.value.candidate_id == hostile_candidate("late_segv").id
    timed = shared_worker.time_sizes(candidates, {7: [1, 3]}, 7, 0.1, 0)
    assert set(timed.times[7]) == {ATEN.id, hostile_candidate("packed").id}


def test_hang_while_timed_at_several_m_has_its_candidate(target: Target) -> None:
    with Worker(target, limits=Limits(open_s=5.0)) as worker:
        worker.open(PROBLEM, 1)
        candidates = sized(hostile_candidate("good"), hostile_candidate("hang"))
        with pytest.raises(WorkerLost, match="no answer within") as error:
            worker.time_sizes(candidates, {3: [0, 1]}, 3, 0.1, 0)
    assert error.value.candidate_id == hostile_candidate("hang").id
    assert error.value.verdict.kind == "hung"


@pytest.mark.parametrize(
    ("name", "kind", "failed_m"),
    [
        ("good", "within_bound", 0),
        ("packed", "within_bound", 0),
        ("wrong", "wrong", 7),
        ("raise", "crashed", 7),
        ("unbuildable", "build_failed", 0),
        ("segv", "crashed", 0),
        ("daemon", "crashed", 0),
    ],
)
def test_candidate_is_verified_at_several_m(shared_worker: Worker, name: str, kind: str, failed_m: int) -> None:
    result = shared_worker.verify_sizes(sized(hostile_candidate(name))[0], [7, 1, 64])
    assert (result.verdict.kind, result.failed_m) == (kind, failed_m)
    if failed_m:
        assert result.verdict.detail.startswith("M = 7: ")
    assert shared_worker.verify_sizes(sized(hostile_candidate("good"))[0], [33]).verdict.ok


def test_algorithms_of_a_library_are_named_by_m(shared_worker: Worker) -> None:
    (good,) = sized(hostile_candidate("good"))
    assert shared_worker.library_algorithms(good, [1, 64]) == {}  # no library chooses
    (crashing,) = sized(hostile_candidate("segv"))
    assert shared_worker.library_algorithms(crashing, [1]) == {}
    assert shared_worker.verify_sizes(good, [33]).verdict.ok


def test_algorithms_of_the_op_that_pytorch_runs_are_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AtenKernel, "library_algorithm", lambda kernel, m: "even" if m % 2 == 0 else "")
    with LocalWorker(target) as worker:
        worker.open(PROBLEM, 1)
        assert worker.library_algorithms(sized(ATEN)[0], [1, 2, 3, 4]) == {2: "even", 4: "even"}


def test_declined_request_for_algorithms_names_none(shared_worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def decline(*arguments: object) -> None:
        raise Declined("the worker could not do it: RuntimeError")

    monkeypatch.setattr(shared_worker, "_ask", decline)
    assert shared_worker.library_algorithms(sized(ATEN)[0], [1, 2]) == {}


def test_timing_and_verifying_alternate(target: Target) -> None:
    candidates = sized(ATEN, hostile_candidate("packed"))
    with LocalWorker(target) as worker:
        worker.open(PROBLEM, 1)
        for m in (3, 50):
            assert set(worker.time_sizes(candidates, {m: [0, 1]}, 64, 0.0, 0).times[m]) == {
                ATEN.id, hostile_candidate("packed").id,
            }  # fmt: skip
            assert worker.verify_sizes(candidates[1], [m, m + 1]).verdict.ok
            assert not worker.verify_sizes(sized(hostile_candidate("scribble"))[0], [m]).verdict.ok
        assert is_correct(worker, "packed")
        assert worker.race([hostile_candidate("good"), ATEN], 0.2, 0).leader is not None


def test_operands_are_kept_for_requests_with_the_same_candidates(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    original = hostile_backend.HostileBackend.load

    def load(self: hostile_backend.HostileBackend, artifact: Artifact, problem: Problem) -> Kernel:
        loaded.append(f"{artifact.candidate['kind']} {problem.m}")
        return original(self, artifact, problem)

    monkeypatch.setattr(hostile_backend.HostileBackend, "load", load)
    kinds = ("good", "unsupported", "packed")
    candidates = [SizedCandidate(hostile_candidate(kind).to_dict(), 8 + i) for i, kind in enumerate(kinds)]
    with LocalWorker(target) as worker:
        worker.open(PROBLEM, 1)
        for m in (1, 2, 3):
            worker.time_sizes(candidates, {m: [0, 2]}, 64, 0.0, 0)
        assert loaded == ["good 8", "unsupported 9", "packed 10"]
        worker.time_sizes(candidates[:2], {4: [0]}, 64, 0.0, 0)
        assert loaded[3:] == ["good 8", "unsupported 9"]


def test_m_that_the_layout_of_a_does_not_permit_are_not_verified(target: Target) -> None:
    problem = replace(PROBLEM, a=Operand("float32", Layout("col", ld=8)))
    with LocalWorker(target) as worker:
        worker.open(problem, 1)
        assert worker.verify_sizes(sized(hostile_candidate("wrong"))[0], [9, 100]).verdict.ok
        assert worker.verify_sizes(sized(hostile_candidate("wrong"))[0], [9, 8]).failed_m == 8


def test_host_imports_what_kernels_for_the_device_need_first(monkeypatch: pytest.MonkeyPatch) -> None:
    preloaded: list[list[str]] = []

    class FakeHost:
        def __init__(self, preload: list[str]) -> None:
            preloaded.append(preload)
            raise WorkerError("no process is needed here")

    monkeypatch.setattr("gemmtune.workers.host_pool.Host", FakeHost)
    for target in (H200, current_cpu()):
        with pytest.raises(WorkerError, match="no process"):
            Worker(target).start()
    assert preloaded == [["gemmtune.backends.triton.preloaded"], []]
