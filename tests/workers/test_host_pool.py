"""Hosts that are kept for the next tuning, and those that are not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gemmtune import backends
from gemmtune.backends.base import Artifact
from gemmtune.core.candidate import Candidate
from gemmtune.core.problem import Operand, Problem
from gemmtune.core.target import current_cpu
from gemmtune.testing import toy_compiler
from gemmtune.tuning import worker_pool
from gemmtune.tuning.worker_pool import WorkerPool
from gemmtune.workers import host_pool
from gemmtune.workers.builds import Builders, BuildLimits
from gemmtune.workers.host_pool import HostPool
from gemmtune.workers.process import Process
from gemmtune.workers.process_tags import tagged
from gemmtune.workers.worker import Worker

PROBLEM = Problem("mm", 5, 24, 32, Operand("float32"), Operand("float32"), "float32")
TARGET = current_cpu()
ATEN = Candidate.make("aten", "mm")


@pytest.fixture
def hosts() -> Iterator[HostPool]:
    hosts = HostPool()
    yield hosts
    hosts.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def use_worker(hosts: HostPool) -> str:
    """Start a worker and end it. Return the tag of its host."""
    with Worker(TARGET, hosts=hosts) as worker:
        worker.wait()
        assert worker.tag is not None
        return worker.tag


def test_next_worker_has_the_host_of_the_last_one_in_the_same_settings(
    hosts: HostPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = use_worker(hosts)
    assert len(tagged(first)) == 1  # the host, without a worker
    assert use_worker(hosts) == first
    with monkeypatch.context() as changed:
        changed.setenv("OMP_NUM_THREADS", "1")
        other = use_worker(hosts)
        assert other != first
    monkeypatch.chdir(tmp_path)
    third = use_worker(hosts)
    assert third not in (first, other)
    assert len(hosts._kept) == 2  # the oldest has ended
    assert tagged(first) == []
    hosts.close()
    assert tagged(other) == tagged(third) == []


def test_host_stays_when_a_worker_is_ended_that_it_was_about_to_fork(hosts: HostPool) -> None:
    """As ``Builders.close`` ends those whose builds have just begun."""
    tag = use_worker(hosts)
    host = hosts.take(hosts._kept[0].host.settings.preload)
    try:
        assert host.tag == tag
        for _ in range(5):
            Process(host, 30.0).close()
            assert host.alive
        assert len(tagged(tag)) == 1
    finally:
        host.close()


def test_unused_host_ends_by_itself_and_is_not_taken_shortly_before(
    hosts: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "KEPT_S", 1.0)
    monkeypatch.setattr(host_pool, "_MARGIN_S", -1000.0)
    tag = use_worker(hosts)
    with Worker(TARGET, hosts=hosts) as worker:  # a host that forks goes on
        worker.wait()
        assert worker.tag == tag
        time.sleep(2.5)
        assert worker.pid in [process.pid for process in tagged(tag)]
    wait_until(lambda: not hosts._kept[0].host.alive)
    monkeypatch.setattr(host_pool, "KEPT_S", 60.0)
    second = use_worker(hosts)
    assert second != tag
    monkeypatch.setattr(hosts, "_kept", [kept._replace(until=time.monotonic()) for kept in hosts._kept])
    assert use_worker(hosts) != second
    assert tagged(second) == []


def test_host_is_shared_while_it_is_in_use_and_kept_after_its_last_user(hosts: HostPool) -> None:
    with Worker(TARGET, hosts=hosts) as worker:
        worker.wait()
        with Worker(TARGET, hosts=hosts) as other:
            other.wait()
            assert other.tag == worker.tag
            assert other.pid != worker.pid
        assert not hosts._kept
        assert worker.pid in [process.pid for process in tagged(worker.tag or "")]
        host = hosts.take(["json"])  # other settings
        assert host.tag != worker.tag
        hosts.put_back(host)
        tag = worker.tag
    assert [kept.host.tag for kept in hosts._kept] == [tag]


def test_host_that_ended_in_use_is_not_shared(hosts: HostPool) -> None:
    host = hosts.take(())
    host.close()
    other = hosts.take(())
    assert other is not host
    for item in (host, other):
        hosts.put_back(item)
        assert not item.alive


def test_host_that_forked_no_worker_is_not_kept(hosts: HostPool) -> None:
    host = hosts.take(())
    hosts.put_back(host)
    assert not host.alive
    assert not hosts._kept


def test_host_that_is_gone_is_not_kept(hosts: HostPool) -> None:
    with Worker(TARGET, hosts=hosts) as worker:
        worker.wait()
        assert worker.tag is not None
        host_pid = next(process.ppid() for process in tagged(worker.tag) if process.pid == worker.pid)
        next(process for process in tagged(worker.tag) if process.pid == host_pid).kill()
        wait_until(lambda: not worker._host or not worker._host.alive)
    assert not hosts._kept


def test_a_forked_process_leaves_the_hosts_to_its_parent(hosts: HostPool) -> None:
    tag = use_worker(hosts)
    kept = hosts._kept
    hosts.after_fork()
    hosts.close()
    assert len(tagged(tag)) == 1
    hosts._kept = kept


def test_builds_in_progress_end_and_their_host_is_kept(
    hosts: HostPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "store.db"))
    monkeypatch.setitem(backends._PLUGINS, "toy", toy_compiler.ENTRY_POINT)
    backends.get.cache_clear()

    def toy(name: str, **config: float) -> Candidate:
        return Candidate.make("toy", name, kind=name, **config)

    builders = Builders(BuildLimits(build_s=60.0, builders=3), hosts=hosts)
    (artifact,) = builders(PROBLEM, [toy("good")], TARGET).values()
    assert isinstance(artifact, Artifact)
    assert builders._host is not None
    tag = builders._host.tag
    builders.ahead(PROBLEM, [toy("hang"), toy("slow", seconds=30.0), toy("slow", seconds=31.0)], TARGET)
    wait_until(lambda: len(tagged(tag)) == 3)  # the host, and two builds: one builder is left free
    started = time.monotonic()
    builders.close()
    assert time.monotonic() - started < 10.0
    assert len(tagged(tag)) == 1
    assert [kept.host.tag for kept in hosts._kept] == [tag]
    assert len(builders(PROBLEM, [toy("slow", seconds=0.01)], TARGET)) == 1
    assert builders._host is not None
    assert builders._host.tag == tag
    builders.close()
    backends.get.cache_clear()


def test_worker_and_builders_share_a_host(hosts: HostPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on when the other loses its host."""
    monkeypatch.setenv("GEMMTUNE_STORE", str(tmp_path / "store.db"))
    monkeypatch.setitem(backends._PLUGINS, "toy", toy_compiler.ENTRY_POINT)
    backends.get.cache_clear()
    candidate = Candidate.make("toy", "slow", kind="slow", seconds=0.5)
    with Worker(TARGET, hosts=hosts) as worker, Builders(BuildLimits(build_s=60.0), hosts=hosts) as builders:
        worker.open(PROBLEM, 1)
        tag = worker.tag or ""
        (outcome,) = builders.begin_each([(PROBLEM, candidate)], TARGET).values()
        wait_until(lambda: len(tagged(tag)) == 3)  # the host, the worker and the build
        host_pid = psutil.Process(worker.pid).ppid()
        psutil.Process(host_pid).kill()
        assert isinstance(outcome.result(), Artifact)
        verdict = worker.attempt(ATEN).verdict
        assert verdict is None or verdict.ok
        assert builders._host is not None
        assert builders._host.tag == worker.tag != tag
    backends.get.cache_clear()


def test_tunings_share_hosts(hosts: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "HOST_POOL", hosts)
    tags = []
    for _ in range(2):
        pool = WorkerPool(TARGET, True, None, "graph")
        worker = pool.worker()
        assert isinstance(worker, Worker)
        worker.wait()
        tags.append(worker.tag)
        pool.close()
    assert tags[0] == tags[1]
