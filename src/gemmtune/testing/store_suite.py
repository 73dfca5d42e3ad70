"""The conformance suite for implementations of ``Store``. Subclass it and define a fixture called ``store``.

class TestMyStore(StoreSuite):
    @pytest.fixture
    def store(self):
        with contextlib.closing(MyStore()) as store:
            yield store

The tests of plans are skipped for a store that does not define ``put_plan``.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from ..core.candidate import Candidate
from ..core.decision import Decision, Evidence, Sample, Verdict
from ..core.epilogue import Step
from ..core.errors import StoreError
from ..core.problem import Layout, Operand, Problem, Quant
from ..core.target import Target
from ..core.tuned_plan import PlanInterval, PlanKernel, TunedPlan
from ..store.base import Store

TARGET = Target("cpu", "suite cpu", "x86_64", ("avx2", "fma"), (1, 2, 3), 2, 2, 4, (("torch", "1"),), (("aten", "a"),))
PROBLEM = Problem(
    "mixed_mm", 3, 5, 64,
    Operand("bfloat16"),
    Operand("int8", Layout("col"), constant=True, quant=Quant(group=32, zero_point=True)),
    "bfloat16",
    (Step("bias", "col", "float32", 0.5), Step("clamp", lo=-1.0), Step("gelu")),
)  # fmt: skip
PLAIN = Candidate.make("aten", "mm")
PACKED = Candidate.make("native", "gemm", isa="avx2", mr=6, prefetch=True, ratio=0.5)
WIDE = Candidate.make("native", "gemm", isa="avx2", mr=12)
UNVERIFIED = Candidate.make("native", "gemm", isa="avx2", mr=1)


def make_decision(problem: Problem = PROBLEM, target: Target = TARGET, *, created: float = 1000.0) -> Decision:
    """Return a Decision like the tuner's.

    Its evidence has a winner with a packed weight, ATen's candidate as a finalist, and an illegal candidate.
    """
    sample = Sample(2e-3, 1.9e-3, 2.1e-3, 60, 0.5, 0.49, 0.51, (2e-3, 2.1e-3), packing_s=0.01, conditions={"load": "0"})
    illegal = Candidate.make("native", "gemm", isa="amx")
    evidence = (
        Evidence(
            PACKED.to_dict(), PACKED.id, "winner", "native:b16", "", Verdict("within_bound", worst=0.3), sample, 64
        ),
        Evidence(PLAIN.to_dict(), PLAIN.id, "finalist", None, "", Verdict("exact"), sample),
        Evidence(illegal.to_dict(), illegal.id, "illegal", reason="this CPU has no AMX"),
    )
    alternatives = {"": PLAIN.id, "native:b16": PACKED.id}
    return Decision(
        problem.key,
        problem.to_dict(),
        target.key,
        "winner",
        PACKED.id,
        evidence,
        alternatives,
        "decided",
        3.5,
        7,
        created,
    )


def make_plan(problem: Problem = PROBLEM, target: Target = TARGET, *, created: float = 1000.0) -> TunedPlan:
    """Return a plan like the tuner's, for M from 1 to 64.

    One kernel serves the unpacked weight and two serve the packed one. A fourth kernel was not verified.
    """
    verdict = Verdict("within_bound", worst=0.3)
    kernels = (
        PlanKernel(PLAIN.to_dict(), PLAIN.id, 1, None, True, {1: 2e-3, 64: 4e-3}, (1, 64), Verdict("exact")),
        PlanKernel(PACKED.to_dict(), PACKED.id, 3, "native:b16", True, {1: 1e-3, 64: 3e-3}, (1, 8), verdict),
        PlanKernel(WIDE.to_dict(), WIDE.id, 64, "native:b16", False, {1: 2e-3, 64: 2e-3}, (9, 64), verdict),
        PlanKernel(UNVERIFIED.to_dict(), UNVERIFIED.id, 1, "native:b16", times={1: 3e-3}),
    )
    intervals = {
        "": (PlanInterval(1, 64, PLAIN.id),),
        "native:b16": (PlanInterval(1, 8, PACKED.id), PlanInterval(9, 64, WIDE.id)),
    }
    return TunedPlan(
        problem.plan_key,
        problem.to_dict(),
        target.key,
        1,
        64,
        intervals,
        kernels,
        {1: 0.01, 64: 0.02},
        0.05,
        {1: 100, 7: 1},
        "decided",
        3.5,
        7,
        created,
    )


class StoreSuite:
    """The tests that every Store must pass. Subclasses define the fixture ``store``, which returns an empty Store."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("give the suite a fixture called `store` that returns an empty Store")

    @pytest.fixture
    def plan_store(self, store: Store) -> Store:
        """Return the store; skip the test when the store has the default implementation of ``put_plan``."""
        if type(store).put_plan is Store.put_plan:
            pytest.skip("this store keeps no plans")
        return store

    def test_a_decision_comes_back_as_it_went_in(self, store: Store) -> None:
        store.put(TARGET, make_decision())
        assert store.get(TARGET, PROBLEM.key) == make_decision()

    def test_an_unknown_problem_is_a_miss(self, store: Store) -> None:
        assert store.get(TARGET, PROBLEM.key) is None
        store.put(TARGET, make_decision())
        assert store.get(TARGET, PROBLEM.with_m(4).key) is None

    @pytest.mark.parametrize(
        "change",
        [
            {"device": "cuda"}, {"name": "other"}, {"capability": "9.0"}, {"isa": ("avx2",)}, {"caches": (1, 2, 4)},
            {"threads": 1}, {"cores": 4}, {"memory": 8}, {"versions": (("torch", "2"),)}, {"sources": (("aten", "b"),)},
        ],
        ids=lambda change: next(iter(change)),
    )  # fmt: skip
    def test_any_change_of_target_is_a_miss(self, store: Store, change: dict[str, object]) -> None:
        store.put(TARGET, make_decision())
        assert store.get(replace(TARGET, **change), PROBLEM.key) is None  # type: ignore[arg-type]

    def test_put_replaces(self, store: Store) -> None:
        store.put(TARGET, make_decision())
        newer = msgspec.structs.replace(make_decision(), stopped="again")
        store.put(TARGET, newer)
        assert store.get(TARGET, PROBLEM.key) == newer
        assert list(store.decisions()) == [newer]

    def test_put_refuses_another_targets_decision(self, store: Store) -> None:
        with pytest.raises(ValueError, match="was made for target"):
            store.put(replace(TARGET, threads=9), make_decision())

    @pytest.mark.parametrize(
        "change",
        [
            {"chosen": None}, {"chosen": "aten/none"}, {"problem_key": "mm|other"}, {"seconds": float("nan")},
            {"alternatives": {"": PACKED.id}}, {"alternatives": {"": "native/gemm[isa=amx]"}}, {"evidence": ()},
            {"outcome": "none_valid"}, {"problem": {}},
        ],
        ids=str,
    )  # fmt: skip
    def test_put_refuses_an_unsound_decision(self, store: Store, change: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="cannot be stored"):
            store.put(TARGET, msgspec.structs.replace(make_decision(), **change))
        assert list(store.decisions()) == []

    def test_decisions_are_newest_first_and_by_target(self, store: Store) -> None:
        other_target = replace(TARGET, threads=1)
        store.put(TARGET, make_decision(created=10.0))
        store.put(TARGET, make_decision(PROBLEM.with_m(8), created=30.0))
        store.put(other_target, make_decision(target=other_target, created=20.0))
        assert [row.created for row in store.decisions()] == [30.0, 20.0, 10.0]
        assert [row.created for row in store.decisions(TARGET)] == [30.0, 10.0]
        assert {target.key for target in store.targets()} == {TARGET.key, other_target.key}
        assert TARGET in store.targets()

    def test_failures_are_remembered_per_problem_and_target(self, store: Store) -> None:
        crashed, hung = Verdict("crashed", "signal 11"), Verdict("hung", "no answer in 2 s")
        store.remember_failure(TARGET, PROBLEM.key, "a", crashed)
        store.remember_failure(TARGET, PROBLEM.key, "b", crashed)
        store.remember_failure(TARGET, PROBLEM.key, "b", hung)
        assert store.failures(TARGET, PROBLEM.key) == {"a": crashed, "b": hung}
        assert store.failures(TARGET, PROBLEM.with_m(4).key) == {}
        assert store.failures(replace(TARGET, threads=1), PROBLEM.key) == {}
        assert store.targets() == []

    def test_export_and_import(self, store: Store, tmp_path: Path) -> None:
        other_target = replace(TARGET, threads=1)
        decisions = [make_decision(), make_decision(PROBLEM.with_m(8))]
        for row in decisions:
            store.put(TARGET, row)
        store.put(other_target, make_decision(target=other_target))
        assert store.export(tmp_path / "one.json", TARGET) == 2
        assert store.export(tmp_path / "all.json") == 3
        assert store.prune(keep=replace(TARGET, threads=5)) == 3
        assert store.import_(tmp_path / "one.json") == 2
        assert {row.problem_key: row for row in store.decisions()} == {row.problem_key: row for row in decisions}
        assert store.targets() == [TARGET]

    def test_import_is_all_or_nothing(self, store: Store, tmp_path: Path) -> None:
        for m in (1, 2):
            store.put(TARGET, make_decision(PROBLEM.with_m(m)))
        store.export(tmp_path / "good.json")
        store.prune(keep=replace(TARGET, threads=5))
        text = (tmp_path / "good.json").read_text()
        (tmp_path / "bad.json").write_text(text.replace(PROBLEM.with_m(1).key, PROBLEM.with_m(9).key))
        with pytest.raises(StoreError, match="nothing was imported"):
            store.import_(tmp_path / "bad.json")
        assert list(store.decisions()) == []

    def test_prune_by_target_and_by_age(self, store: Store) -> None:
        other_target = replace(TARGET, threads=1)
        store.put(TARGET, make_decision(created=time.time()))
        store.put(TARGET, make_decision(PROBLEM.with_m(8), created=time.time() - 1000))
        store.put(other_target, make_decision(target=other_target, created=time.time()))
        store.remember_failure(other_target, PROBLEM.key, "a", Verdict("hung"))
        assert store.prune() == 0
        assert store.prune(older_than_s=500) == 1
        assert store.prune(keep=TARGET) == 1
        assert store.failures(other_target, PROBLEM.key) == {}
        assert [row.problem_key for row in store.decisions()] == [PROBLEM.key]

    def test_a_plan_comes_back_as_it_went_in(self, plan_store: Store) -> None:
        plan_store.put_plan(TARGET, make_plan())
        assert plan_store.get_plan(TARGET, PROBLEM.plan_key) == make_plan()
        assert plan_store.get(TARGET, PROBLEM.key) is None
        assert list(plan_store.decisions()) == []
        assert plan_store.verify() == []

    def test_an_unknown_plan_is_a_miss(self, plan_store: Store) -> None:
        assert plan_store.get_plan(TARGET, PROBLEM.plan_key) is None
        plan_store.put(TARGET, make_decision())
        assert plan_store.get_plan(TARGET, PROBLEM.plan_key) is None
        plan_store.put_plan(TARGET, make_plan())
        assert plan_store.get_plan(TARGET, replace(PROBLEM, n=6).plan_key) is None
        assert plan_store.get_plan(replace(TARGET, threads=1), PROBLEM.plan_key) is None

    def test_put_plan_replaces(self, plan_store: Store) -> None:
        """The plan keys of Problems that differ in M only are equal."""
        plan_store.put_plan(TARGET, make_plan())
        newer = make_plan(PROBLEM.with_m(8))
        plan_store.put_plan(TARGET, newer)
        assert plan_store.get_plan(TARGET, PROBLEM.plan_key) == newer
        assert list(plan_store.plans()) == [newer]

    def test_remove_plan_leaves_other_records(self, plan_store: Store) -> None:
        other = make_plan(replace(PROBLEM, n=6))
        plan_store.put(TARGET, make_decision())
        for plan in (make_plan(), other):
            plan_store.put_plan(TARGET, plan)
        plan_store.remove_plan(TARGET, PROBLEM.plan_key)
        plan_store.remove_plan(TARGET, PROBLEM.plan_key)
        assert plan_store.get_plan(TARGET, PROBLEM.plan_key) is None
        assert list(plan_store.plans()) == [other]
        assert plan_store.get(TARGET, PROBLEM.key) == make_decision()

    def test_put_plan_refuses_another_targets_plan(self, plan_store: Store) -> None:
        with pytest.raises(ValueError, match="was made for target"):
            plan_store.put_plan(replace(TARGET, threads=9), make_plan())

    @pytest.mark.parametrize(
        "change",
        [
            {"plan_key": "mm|other"}, {"problem": {}}, {"first": 2}, {"last": 65}, {"seconds": float("nan")},
            {"kernels": ()}, {"intervals": {"": (PlanInterval(1, 64, PACKED.id),)}},
            {"intervals": {"native:b16": (PlanInterval(1, 64, UNVERIFIED.id),)}},
            {"scan": {64: 0.0}}, {"scan": {0: 1e-3}}, {"scan": {64: float("inf")}},
        ],
        ids=str,
    )  # fmt: skip
    def test_put_plan_refuses_an_unsound_plan(self, plan_store: Store, change: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="cannot be stored"):
            plan_store.put_plan(TARGET, msgspec.structs.replace(make_plan(), **change))
        assert list(plan_store.plans()) == []
        assert plan_store.targets() == []

    def test_plans_are_newest_first_and_by_target(self, plan_store: Store) -> None:
        other_target = replace(TARGET, threads=1)
        plan_store.put_plan(TARGET, make_plan(created=10.0))
        plan_store.put_plan(TARGET, make_plan(replace(PROBLEM, n=6), created=30.0))
        plan_store.put_plan(other_target, make_plan(target=other_target, created=20.0))
        assert [plan.created for plan in plan_store.plans()] == [30.0, 20.0, 10.0]
        assert [plan.created for plan in plan_store.plans(TARGET)] == [30.0, 10.0]
        assert {target.key for target in plan_store.targets()} == {TARGET.key, other_target.key}

    def test_targets_have_a_decision_or_a_plan(self, plan_store: Store) -> None:
        other_target = replace(TARGET, threads=1)
        plan_store.put(TARGET, make_decision())
        plan_store.put_plan(TARGET, make_plan())
        plan_store.put_plan(other_target, make_plan(target=other_target))
        assert len(plan_store.targets()) == 2
        assert {target.key for target in plan_store.targets()} == {TARGET.key, other_target.key}

    def test_plans_are_exported_and_imported(self, plan_store: Store, tmp_path: Path) -> None:
        other_target = replace(TARGET, threads=1)
        plan_store.put(TARGET, make_decision())
        plan_store.put_plan(TARGET, make_plan())
        plan_store.put_plan(other_target, make_plan(target=other_target))
        assert plan_store.export(tmp_path / "one.json", TARGET) == 1
        assert plan_store.export(tmp_path / "all.json") == 1
        assert plan_store.prune(keep=replace(TARGET, threads=5)) == 1
        assert plan_store.targets() == []
        assert plan_store.import_(tmp_path / "one.json") == 1
        assert list(plan_store.plans()) == [make_plan()]
        assert plan_store.import_(tmp_path / "all.json") == 1
        assert plan_store.get_plan(other_target, PROBLEM.plan_key) == make_plan(target=other_target)

    def test_import_of_a_bad_plan_imports_nothing(self, plan_store: Store, tmp_path: Path) -> None:
        plan_store.put(TARGET, make_decision())
        plan_store.put_plan(TARGET, make_plan())
        plan_store.export(tmp_path / "good.json")
        plan_store.prune(keep=replace(TARGET, threads=5))
        text = (tmp_path / "good.json").read_text()
        (tmp_path / "bad.json").write_text(text.replace(PROBLEM.plan_key, replace(PROBLEM, n=6).plan_key))
        with pytest.raises(StoreError, match="nothing was imported"):
            plan_store.import_(tmp_path / "bad.json")
        assert list(plan_store.decisions()) == []
        assert list(plan_store.plans()) == []

    def test_plans_are_pruned_by_target_and_by_age_and_are_not_counted(self, plan_store: Store) -> None:
        other_target = replace(TARGET, threads=1)
        plan_store.put_plan(TARGET, make_plan(created=time.time()))
        plan_store.put_plan(TARGET, make_plan(replace(PROBLEM, n=6), created=time.time() - 1000))
        plan_store.put_plan(other_target, make_plan(target=other_target, created=time.time()))
        assert plan_store.prune() == 0
        assert len(list(plan_store.plans())) == 3
        assert plan_store.prune(older_than_s=500) == 0
        assert len(list(plan_store.plans())) == 2
        assert plan_store.prune(keep=TARGET) == 0
        assert [plan.plan_key for plan in plan_store.plans()] == [PROBLEM.plan_key]
        assert plan_store.targets() == [TARGET]

    def test_one_holds_a_lease_and_others_do_not(self, store: Store) -> None:
        assert store.lease_remaining_s(TARGET, PROBLEM.key) is None
        lease = store.lease(TARGET, PROBLEM.key, 60.0)
        assert lease is not None
        assert 50.0 < (store.lease_remaining_s(TARGET, PROBLEM.key) or 0.0) <= 60.0
        assert store.lease(TARGET, PROBLEM.key, 60.0) is None
        assert store.lease(TARGET, PROBLEM.with_m(8).key, 60.0) is not None
        assert store.lease(replace(TARGET, threads=1), PROBLEM.key, 60.0) is not None
        assert store.targets() == []
        lease.release()
        lease.release()
        assert store.lease_remaining_s(TARGET, PROBLEM.key) is None
        assert store.lease(TARGET, PROBLEM.key, 60.0) is not None

    def test_a_lease_that_ran_out_is_somebody_elses(self, store: Store) -> None:
        first = store.lease(TARGET, PROBLEM.key, 0.05)
        assert first is not None
        time.sleep(0.1)
        assert store.lease_remaining_s(TARGET, PROBLEM.key) is None
        second = store.lease(TARGET, PROBLEM.key, 60.0)
        assert second is not None
        assert not first.renew()
        first.release()
        assert store.lease_remaining_s(TARGET, PROBLEM.key) is not None
        assert second.renew()

    def test_a_lease_in_a_with_block_renews_itself_and_is_released(self, store: Store) -> None:
        lease = store.lease(TARGET, PROBLEM.key, 1.5)
        assert lease is not None

        def remaining_s() -> float:
            return store.lease_remaining_s(TARGET, PROBLEM.key) or 0.0

        def wait_and_interrupt() -> None:
            before, deadline = remaining_s(), time.monotonic() + 30.0
            while (now := remaining_s()) <= before and time.monotonic() < deadline:
                before = now
                time.sleep(0.05)
            assert now > before
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), lease:
            wait_and_interrupt()
        assert store.lease_remaining_s(TARGET, PROBLEM.key) is None

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 4000.0])
    def test_a_lease_is_for_a_while(self, store: Store, ttl_s: float) -> None:
        with pytest.raises(ValueError, match="positive"):
            store.lease(TARGET, PROBLEM.key, ttl_s)

    def test_of_many_threads_one_gets_the_lease(self, store: Store) -> None:
        granted: list[bool] = []
        threads = [
            Thread(target=lambda: granted.append(store.lease(TARGET, PROBLEM.key, 60.0) is not None)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(granted) == [False] * 7 + [True]

    def test_a_sound_store_verifies(self, store: Store) -> None:
        store.put(TARGET, make_decision())
        assert store.verify() == []

    def test_a_store_that_can_be_read_and_written_says_so(self, store: Store) -> None:
        store.check()
        store.check_writable()
        assert list(store.decisions()) == []
        store.put(TARGET, make_decision())
        store.check()
        store.check_writable()
        with store.short_timeout():
            assert store.get(TARGET, PROBLEM.key) == make_decision()
        assert store.verify() == []
        assert store.damage == []

    def test_threads_share_a_store(self, store: Store) -> None:
        errors: list[BaseException] = []

        def work(worker: int) -> None:
            try:
                for step in range(5):
                    problem = PROBLEM.with_m(10 * worker + step)
                    store.put(TARGET, make_decision(problem))
                    assert store.get(TARGET, problem.key) == make_decision(problem)
            except BaseException as error:  # an exception in a thread does not reach the test, which reads this list
                errors.append(error)

        threads = [Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(list(store.decisions())) == 20

    def test_close_twice(self, store: Store) -> None:
        store.put(TARGET, make_decision())
        store.close()
        store.close()
