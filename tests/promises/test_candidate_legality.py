"""Tests that dispatch serves only candidates that their backend lists for the Problem, with the packing of the Plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

import gemmtune
from gemmtune import backends
from gemmtune.backends.base import Backend
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import MemoryStore, SqliteStore
from helpers.gpus import H200
from helpers.serving import decide, evidence

RAW = Problem("mm", 24, 80, 96, Operand("float32"), Operand("float32", Layout("col")), "float32")
CONSTANT = replace(RAW, b=replace(RAW.b, constant=True))
WEIGHT = torch.randn(80, 96)
X = torch.randn(24, 96)

# Each changes one entry of a real native config; ``nr=7`` ended the process, ``kc=-2**31`` gave wrong results.
MUTATIONS: list[dict[str, object]] = [
    {"nr": 7}, {"nr": 0}, {"nr": -16}, {"nr": 80}, {"nr": 2**31}, {"mr": 0}, {"mr": 99}, {"mr": -1}, {"kc": -(2**31)},
    {"kc": 2**40}, {"kc": 3}, {"mc": -1}, {"mc": 2**40}, {"nc": 0}, {"nc": 2**40}, {"prefetch": 2**40},
    {"grid": "0x1x1"}, {"grid": "-1x1x1"}, {"grid": "1x1"}, {"grid": "99999999999x1x1"}, {"order": "c"},
    {"pack_a": "rowz"}, {"isa": "sse"}, {"nr": True}, {"mr": 4.0}, {"nr": "16"}, {"extra": 1},
]  # fmt: skip


def native(problem: Problem, template: str) -> Candidate:
    """Return the first native candidate of a template."""
    listed = backends.get("native").candidates(problem, current_target())
    return next(item for item in listed if isinstance(item, Candidate) and item.template == template)


def with_config(candidate: Candidate, changes: dict[str, object]) -> Candidate:
    """Return the candidate with these entries of its config replaced or added."""
    return Candidate.make(candidate.backend, candidate.template, **{**dict(candidate.config), **changes})  # type: ignore[arg-type]


def put(store: MemoryStore | SqliteStore, problem: Problem, candidate: Candidate, packing: str | None = None) -> None:
    """Store a decision with this winner, as an editor of the store file would, and refresh dispatch."""
    row = msgspec.structs.replace(evidence(candidate, 0.1), packing=packing)
    store.put(current_target(), decide(problem, row, chosen=candidate))
    RUNTIME.refresh(store)


@pytest.mark.parametrize("changes", MUTATIONS, ids=str)
def test_a_stored_native_kernel_with_a_forged_config_is_not_served(
    changes: dict[str, object], own_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    put(own_store, RAW, with_config(native(RAW, "raw"), changes))
    torch.testing.assert_close(gemmtune.mm(X, WEIGHT.t()), X @ WEIGHT.t())
    assert RUNTIME.kernel_for(RAW) is None
    assert "not legal there" in caplog.text


def test_a_legal_stored_kernel_is_served(own_store: MemoryStore) -> None:
    put(own_store, RAW, native(RAW, "raw"))
    kernel = RUNTIME.kernel_for(RAW)
    assert kernel is not None
    assert kernel.candidate == native(RAW, "raw")


def test_a_kernel_for_a_packed_weight_is_not_served_for_a_raw_one(
    own_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a kernel read past the end of the weight and returned NaN."""
    put(own_store, CONSTANT, native(CONSTANT, "packed"))
    torch.testing.assert_close(gemmtune.mm(X, WEIGHT.t()), X @ WEIGHT.t())
    assert RUNTIME.kernel_for(CONSTANT) is None
    assert "takes its weight packed as" in caplog.text


def test_a_kernel_of_another_layout_is_not_served_for_a_packed_weight(own_store: MemoryStore) -> None:
    wide, narrow = (with_config(native(CONSTANT, "packed"), {"nr": nr}) for nr in (64, 16))
    layout = backends.get("native").packing_of(CONSTANT, native(CONSTANT, "packed"))
    put(own_store, CONSTANT, wide if str(layout).endswith("nr16") else narrow, layout)
    packed = gemmtune.pack(WEIGHT, layout=layout)
    torch.testing.assert_close(gemmtune.linear(X, packed), X @ WEIGHT.t())
    kernel = RUNTIME.kernel_for(CONSTANT, packed)
    assert kernel is not None
    assert kernel.packing == layout


def test_a_packed_weight_with_a_forged_kernel_is_served_by_another_kernel_of_its_layout(own_store: MemoryStore) -> None:
    right = native(CONSTANT, "packed")
    layout = backends.get("native").packing_of(CONSTANT, right)
    put(own_store, CONSTANT, with_config(right, {"kc": -(2**31)}), layout)
    listed = _listed(backends.get("native"), one := CONSTANT.with_m(1), current_target())
    put(own_store, one, next(c for c in listed if backends.get("native").packing_of(one, c) == layout), layout)
    packed = gemmtune.pack(WEIGHT, layout=layout)
    torch.testing.assert_close(gemmtune.linear(X, packed), X @ WEIGHT.t())
    kernel = RUNTIME.kernel_for(CONSTANT, packed)
    assert kernel is not None
    assert kernel.problem.m == 1


def test_a_gpu_candidate_for_a_cpu_target_is_not_served(own_store: MemoryStore) -> None:
    for backend, template in (("triton", "tiled"), ("cuda", "skinny"), ("cublaslt", "ranked")):
        put(own_store, RAW, Candidate.make(backend, template, rank=0))
        assert RUNTIME.kernel_for(RAW) is None


# A candidate is legal if and only if its backend lists it.


def problems() -> Iterator[Problem]:
    """Yield float, integer and weight-only problems with 1, 24 and 200 rows."""
    half = Operand("bfloat16")
    for m in (1, 24, 200):
        yield RAW.with_m(m)
        yield CONSTANT.with_m(m)
        yield Problem("mm", m, 512, 1024, half, Operand("bfloat16", Layout("col"), constant=True), "bfloat16")
        yield Problem(
            "int_mm", m, 512, 1024, Operand("int8"), Operand("int8", Layout("col"), constant=True), "int32", acc="int32"
        )
        for width in ("int8", "int4"):
            weight = Operand(width, Layout("col"), constant=True, quant=Quant(128))
            yield Problem("mixed_mm", m, 512, 1024, half, weight, "bfloat16")


def mutants(candidate: Candidate, others: list[Candidate]) -> Iterator[Candidate]:
    """Yield candidates that differ from a listed one in one entry of the config, in the template or in the backend."""
    config = dict(candidate.config)
    for name, value in config.items():
        values: list[object] = [0, -1, 7, 2**31, True, 1.0, "1", str(value), float(len(str(value)))]
        values += [dict(other.config).get(name, 0) for other in others]
        if isinstance(value, int):
            values += [float(value), value * 2, bool(value)]
        for other in values:
            yield with_config(candidate, {name: other})
        yield Candidate.make(
            candidate.backend,
            candidate.template,
            **{key: kept_value for key, kept_value in config.items() if key != name},
        )
    for other in others:
        yield replace(candidate, template=other.template)
    yield replace(candidate, template="*")
    yield replace(candidate, backend="other")


@pytest.mark.parametrize(
    ("name", "target"),
    [("aten", None), ("native", None), ("aten", H200), ("triton", H200), ("cuda", H200), ("cublaslt", H200)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_candidate_is_legal_exactly_when_its_backend_lists_it(name: str, target: Target | None) -> None:
    backend, rng, refused = backends.get(name), random.Random(0), 0
    for problem in problems():
        listed = _listed(backend, problem, target or current_target())
        legal = {candidate.identity for candidate in listed}
        for candidate in rng.sample(listed, min(len(listed), 2)):
            assert backend.why_illegal(problem, candidate, target or current_target()) == ""
            for mutant in mutants(candidate, rng.sample(listed, min(len(listed), 3))):
                why = backend.why_illegal(problem, mutant, target or current_target())
                assert (why == "") == (mutant.identity in legal), (problem.key, mutant, why)
                refused += bool(why)
    assert refused > 50


def _listed(backend: Backend, problem: Problem, target: Target) -> list[Candidate]:
    return [item for item in backend.candidates(problem, target) if isinstance(item, Candidate)]


def test_packing_of_equals_the_packing_of_the_loaded_kernel() -> None:
    for problem in problems():
        for name in ("aten", "native"):
            backend, seen = backends.get(name), set()
            for candidate in _listed(backend, problem, current_target()):
                if candidate.template not in seen:
                    seen.add(candidate.template)
                    kernel = backend.load(backend.build(problem, candidate, current_target()), problem)
                    assert backend.packing_of(problem, candidate) == kernel.packing


def test_native_legality_depends_on_the_isa_of_the_target() -> None:
    """A target without AVX-512 has no AVX-512 candidates, even on a machine with AVX-512."""
    without_avx512 = replace(current_target(), name="an old CPU", isa=("avx2", "fma", "f16c"))
    names = {candidate["isa"] for candidate in _listed(backends.get("native"), RAW, without_avx512)}
    assert names == {"avx2", "portable"}
    avx512_candidate = Candidate.make("native", "raw", **{**dict(native(RAW, "raw").config), "isa": "avx512"})  # type: ignore[arg-type]
    assert backends.get("native").why_illegal(RAW, avx512_candidate, without_avx512)


# Stores.


def forged_decisions() -> list[Decision]:
    """Return decisions whose candidate is illegal, or whose recorded packing is not that of the candidate."""
    raw, packed = native(RAW, "raw"), native(CONSTANT, "packed")
    rows: list[tuple[Problem, Evidence]] = [
        (RAW.with_m(1), evidence(with_config(raw, {"nr": 7}), 0.1)),
        (RAW.with_m(2), evidence(with_config(raw, {"mr": 4.0}), 0.1)),
        (CONSTANT.with_m(3), evidence(packed, 0.1)),
        (CONSTANT.with_m(4), msgspec.structs.replace(evidence(packed, 0.1), packing="native:k1/float32/nr48")),
        (RAW.with_m(5), evidence(Candidate.make("aten", "gone"), 0.1)),
    ]
    return [decide(problem, row, chosen=Candidate.from_dict(row.candidate)) for problem, row in rows]


def test_store_verify_names_every_forged_decision(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    store.put(current_target(), decide(RAW.with_m(9)))
    for decision in forged_decisions():
        store.put(current_target(), decision)
    lines = store.verify()
    store.close()
    for decision in forged_decisions():
        assert any(line.startswith(f"decision {decision.problem_key}: {decision.chosen} ") for line in lines)
    assert len(lines) == len(forged_decisions())


def test_import_skips_forged_decisions(tmp_path: Path) -> None:
    store, messages = MemoryStore(), list[str]()
    for decision in (decide(RAW.with_m(9)), *forged_decisions()):
        store.put(current_target(), decision)
    store.export(tmp_path / "all.json")
    imported = SqliteStore(tmp_path / "store.db")
    assert imported.import_(tmp_path / "all.json", messages.append) == 1
    assert [decision.problem["m"] for decision in imported.decisions()] == [9]
    assert imported.verify() == []
    imported.close()
    assert len(messages) == len(forged_decisions())
