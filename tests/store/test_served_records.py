"""A store that an earlier commit tuned is read, and its winners serve.

fixtures/served-776b196.db.gz: ``gemmtune.tune`` of fp32 and int8 weights of 512x512 at M = 1 and 16, one thread, by
commit 776b196 on an Intel Xeon with AVX512 and AMX. A Target has the digests of the sources, so the test stores these
decisions under the current Target. Two of their candidates are no longer legal; those of the layouts below are.
"""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import gemmtune
from gemmtune import backends
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision
from gemmtune.core.problem import Problem
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import MemoryStore, SqliteStore

FIXTURE = Path(__file__).parent / "fixtures" / "served-776b196.db.gz"


@pytest.fixture
def records(tmp_path: Path) -> list[Decision]:
    """Return the decisions of the store that commit 776b196 wrote."""
    (tmp_path / "store.db").write_bytes(gzip.decompress(FIXTURE.read_bytes()))
    with contextlib.closing(SqliteStore(tmp_path / "store.db")) as store:
        assert store.verify() == []
        return list(store.decisions())


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_records_are_read_with_their_evidence(records: list[Decision]) -> None:
    assert sorted(decision.problem_key.partition("|")[0] for decision in records) == ["mixed_mm"] * 2 + ["mm"] * 2
    for decision in records:
        assert decision.outcome == "winner"
        problem = Problem.from_dict(decision.problem)
        assert problem.key == decision.problem_key
        chosen = decision.find(decision.chosen)
        assert chosen is not None
        assert chosen.sample is not None
        assert chosen.sample.ratio_hi < 1.0
        assert Candidate.from_dict(chosen.candidate).id == decision.chosen


@pytest.mark.parametrize(("family", "layout"), [
    ("mm", "native:k1/float32/nr48"), ("mm", "native:k1/float32/nr32"), ("mixed_mm", "native:k2s/int8/nr48"),
])  # fmt: skip
def test_winners_of_each_layout_serve(
    records: list[Decision], family: str, layout: str, own_store: MemoryStore, one_thread: None
) -> None:
    target = current_target()
    decisions = {d.problem["m"]: d for d in records if d.problem_key.startswith(f"{family}|")}
    best_rows = {m: decision.find(decision.alternatives.get(layout)) for m, decision in decisions.items()}
    problem = Problem.from_dict(decisions[1].problem)
    if not {row.candidate["config"]["isa"] for row in best_rows.values() if row is not None} <= _isas(problem):
        pytest.skip("this machine lacks the instructions that the kernels of 776b196 use")
    for decision in decisions.values():
        own_store.put(target, msgspec.structs.replace(decision, target_key=target.key))
    RUNTIME.refresh(own_store)
    weight, scale = torch.randn(problem.n, problem.k), None
    if family == "mixed_mm":
        data, scale = torch.randint(-127, 128, weight.shape, dtype=torch.int8), torch.rand(problem.n).bfloat16() / 100
        packed = gemmtune.pack(data, scale=scale, m=[1, 16], layout=layout)
        weight = data.float() * scale.float()[:, None]
    else:
        packed = gemmtune.pack(weight, m=[1, 16], layout=layout)
    for m, row in best_rows.items():
        kernel = RUNTIME.kernel_for(problem.with_m(m), packed)
        assert kernel is not None
        assert row is not None
        assert kernel.candidate.id == row.id
        x = torch.randn(m, problem.k, dtype=getattr(torch, problem.a.dtype))
        expected = x.double() @ weight.double().t()
        out = gemmtune.mixed_mm(x, packed) if family == "mixed_mm" else gemmtune.linear(x, packed)
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error < (1e-2 if family == "mixed_mm" else 1e-5)


def _isas(problem: Problem) -> set[str]:
    """Return the instruction sets of the native candidates on this machine."""
    listed = backends.get("native").candidates(problem, current_target())
    return {str(dict(item.config).get("isa")) for item in listed if isinstance(item, Candidate)}
