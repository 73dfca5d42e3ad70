"""Native kernels against the oracle: instruction sets, templates, epilogues, layouts and odd shapes."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtune import backends
from gemmtune.backends.base import Kernel
from gemmtune.backends.native import space
from gemmtune.backends.native.layout import Packing, aligned_bytes
from gemmtune.backends.native.traits import UNITS, can_multiply
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.epilogue import Step
from gemmtune.core.errors import KernelError
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target, current_cpu
from gemmtune.verify.inputs import Inputs
from gemmtune.verify.verify import make_reference_cases, verify

native = pytest.importorskip("gemmtune.backends.native._native")
BACKEND = backends.get("native")
ISAS = tuple(native.usable_isas())

FLOAT_STEPS = [
    Step("scale", "tensor", None, 0.5),
    Step("scale", "row", "float32"),
    Step("scale", "col", "bfloat16"),
    Step("bias", "col", "float32"),
    Step("bias", "col", "bfloat16"),
    Step("add", "full", "float16", 0.25),
    Step("add", "row", "float32"),
    Step("mul", "full", "float32"),
    Step("relu"),
    Step("gelu"),
    Step("gelu_tanh"),
    Step("silu"),
    Step("clamp", lo=-0.5, hi=1.5),
    Step("cast", dtype="bfloat16"),
]


def target(threads: int = 2) -> Target:
    return replace(current_cpu(), threads=threads)


def check(problem: Problem, candidate: Candidate, seed: int) -> None:
    kernel = BACKEND.load(BACKEND.build(problem, candidate, target()), problem)

    def run(inputs: Inputs, out: torch.Tensor) -> None:
        b = kernel.pack(inputs.b) if kernel.packing is not None else inputs.b
        kernel.run(inputs.a, b, inputs.aux, out)

    verdict = verify(run, problem, make_reference_cases(problem, seed))
    assert verdict.ok, f"{candidate.id} on {problem.key}: {verdict}"


def sample_candidates(problem: Problem, isa: str, template: str, count: int, seed: int) -> list[Candidate]:
    """Return the first legal candidate of one instruction set and template, and a random sample of the others."""
    legal = [
        item
        for item in space.candidates(problem, target(), [isa])
        if isinstance(item, Candidate) and item.template == template
    ]
    return legal[:1] + random.Random(seed).sample(legal, min(count, len(legal)))


def dense(m: int, n: int, k: int, dtype: str, **changes: object) -> Problem:
    b = Operand(dtype, Layout("col"), constant=True)
    return replace(Problem("mm", m, n, k, Operand(dtype), b, dtype), **changes)  # type: ignore[arg-type]


def weight_only(m: int, n: int, k: int, a: str, b: str, quant: Quant) -> Problem:
    return Problem("mixed_mm", m, n, k, Operand(a), Operand(b, Layout("col"), constant=True, quant=quant), a)


def integer(m: int, n: int, k: int, a: str, out: str = "int32") -> Problem:
    b = Operand("int8", Layout("col"), constant=True)
    return Problem("int_mm", m, n, k, Operand(a), b, out, acc="int32")


sizes = st.sampled_from([1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 64, 65, 97, 128, 130])
row_counts = st.sampled_from([1, 2, 3, 4, 6, 7, 8, 11, 13, 16, 25, 33, 70])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    m, n, k = draw(row_counts), draw(sizes), draw(sizes | st.sampled_from([257, 520, 1030]))
    family = draw(st.sampled_from(["dense", "weight", "integer"]))
    steps = tuple(draw(st.lists(st.sampled_from(FLOAT_STEPS), max_size=3)))
    if family == "dense":
        problem = dense(m, n, k, draw(st.sampled_from(["float32", "bfloat16", "float16"])))
        out = draw(st.sampled_from([problem.out_dtype, "float32"]))
        return replace(problem, epilogue=steps, out_dtype=out, a=_operand(draw, problem.a, m, k))
    if family == "weight":
        bits = draw(st.sampled_from(["int8", "int4"]))
        group = draw(st.sampled_from([None, 32, 64, 128]))
        quant = Quant(group, draw(st.sampled_from(["float32", "bfloat16", "float16"])), draw(st.booleans()))
        a = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
        return replace(weight_only(m, n, k, a, bits, quant), epilogue=steps)
    a = draw(st.sampled_from(["int8", "uint8"]))
    if draw(st.booleans()):
        return integer(m, n, k, a)
    scale = Step("scale", "col", "float32", 0.001)
    return replace(integer(m, n, k, a, draw(st.sampled_from(["int8", "uint8", "float32"]))), epilogue=(scale,))


def _operand(draw: st.DrawFn, operand: Operand, m: int, k: int) -> Operand:
    layout = draw(st.sampled_from([Layout(), Layout("row", k + 3), Layout("col"), Layout("col", m + 5)]))
    return replace(operand, layout=layout)


@pytest.mark.parametrize("isa", ISAS)
@given(problem=problems(), seed=st.integers(0, 1 << 20))
@settings(max_examples=80, deadline=None)
def test_kernels_with_packed_weights_match_the_oracle(isa: str, problem: Problem, seed: int) -> None:
    for template in ("packed", "expand"):
        for candidate in sample_candidates(problem, isa, template, 2, seed):
            check(problem, candidate, seed)


@st.composite
def gated_problems(draw: st.DrawFn) -> Problem:
    """Problems whose last step is a gate; N is a multiple of 16."""
    problem = replace(draw(problems()), n=draw(st.sampled_from([16, 32, 48, 64, 96, 112, 192])))
    gate = Step(draw(st.sampled_from(["swiglu", "geglu", "geglu_tanh"])))
    out = problem.out_dtype if problem.family != "int_mm" else "float32"
    return replace(problem, epilogue=(*problem.epilogue, gate), out_dtype=out)


@pytest.mark.parametrize("isa", ISAS)
@given(problem=gated_problems(), seed=st.integers(0, 1 << 20))
@settings(max_examples=60, deadline=None)
def test_gates_match_the_oracle(isa: str, problem: Problem, seed: int) -> None:
    candidates = [
        each for template in ("packed", "expand") for each in sample_candidates(problem, isa, template, 2, seed)
    ]
    assert candidates or isa not in {unit.isa for unit in UNITS if can_multiply(unit, problem.a.dtype, problem.b.dtype)}
    for candidate in candidates:
        assert problem.n % int(candidate["nr"]) == 0
        check(problem, candidate, seed)


@pytest.mark.parametrize("grid", ["1x1x2", "2x3x1"])
def test_gates_match_the_oracle_on_several_threads(grid: str) -> None:
    """Among others with K split between threads: the gate then follows the sum of their parts."""
    steps = (Step("bias", "col", "float32"), Step("add", "full", "float16", 0.25), Step("swiglu"))
    problem = dense(19, 320, 1100, "float32", epilogue=steps)
    first = sample_candidates(problem, "portable", "packed", 0, 0)[0]
    for kc in (0, 256):
        check(problem, Candidate.make("native", "packed", **{**dict(first.config), "grid": grid, "kc": kc}), 3)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "amx"])
@given(
    problem=problems(), batch=st.sampled_from([0, 1, 3]), order=st.sampled_from(["row", "col"]), seed=st.integers(0, 99)
)
@settings(max_examples=40, deadline=None)
def test_kernels_with_a_changing_b_match_the_oracle(
    isa: str, problem: Problem, batch: int, order: str, seed: int
) -> None:
    if problem.family == "mixed_mm":
        return
    changing = replace(problem, b=Operand(problem.b.dtype, Layout(order)))  # type: ignore[arg-type]
    if batch and changing.family == "mm":
        changing = replace(changing, family="bmm", batch=batch, a=Operand(changing.a.dtype))
        steps = tuple(step for step in changing.epilogue if step.axis != "row")
        changing = replace(changing, epilogue=steps)
    for template in ("raw", "dot"):
        for candidate in sample_candidates(changing, isa, template, 2, seed):
            check(changing, candidate, seed)


def _supported_products() -> Iterator[tuple[str, str, str]]:
    for unit in UNITS:
        for a in ("float32", "bfloat16", "float16", "int8", "uint8"):
            for b in ("float32", "bfloat16", "float16", "int8", "int4"):
                if unit.isa in ISAS and can_multiply(unit, a, b):
                    yield unit.isa, a, b


@pytest.mark.parametrize(("isa", "a", "b"), sorted(set(_supported_products())))
def test_each_tile_of_each_instruction_set_matches_the_oracle(isa: str, a: str, b: str) -> None:
    """Check each (nr, mr) of the search space at an M that has full and partial tiles."""
    m = 70 if isa == "amx" else 29  # AMX's tiles have 32 rows, and a weight is not expanded for one of them
    if a.endswith("int8"):
        problem = integer(m, 83, 140, a)
    elif b in ("int8", "int4"):
        problem = weight_only(m, 83, 140, a, b, Quant(64, "float32", True))
    elif a == b:
        problem = dense(m, 83, 140, a)
    else:
        return
    checked = set()
    for item in space.candidates(problem, target(), [isa]):
        if isinstance(item, Candidate) and (item.template, item["nr"], item["mr"]) not in checked:
            checked.add((item.template, item["nr"], item["mr"]))
            check(problem, item, 5)
    assert checked


@pytest.mark.parametrize("grid", ["1x1x2", "2x1x1", "1x8x1", "2x2x2", "3x5x1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_thread_grids_match_the_oracle(grid: str, dtype: str) -> None:
    problem = dense(19, 200, 1100, dtype, epilogue=(Step("bias", "col", "float32"), Step("silu")))
    first = sample_candidates(problem, "avx512" if "avx512" in ISAS else "portable", "packed", 0, 0)[0]
    for kc in (0, 256):
        config = {**dict(first.config), "grid": grid, "kc": kc, "pack_a": "rows"}
        check(problem, Candidate.make("native", "packed", **config), 3)


@pytest.mark.parametrize(
    ("m", "n", "k", "is_single_threaded"), [(3, 96, 112, True), (16, 256, 256, True), (16, 2048, 2048, False)]
)
def test_single_thread_grid_is_listed_for_small_problems(m: int, n: int, k: int, is_single_threaded: bool) -> None:
    """One thread is the first grid of small problems; large problems have no grid of one of two threads."""
    grids = [
        str(item["grid"])
        for item in space.candidates(dense(m, n, k, "float32"), replace(target(), threads=2), ["portable"])
        if isinstance(item, Candidate) and item.template == "packed"
    ]
    assert ("1x1x1" in grids) == is_single_threaded
    assert (grids[0] == "1x1x1") == is_single_threaded
    assert "1x2x1" in grids


@pytest.mark.parametrize(
    ("problem", "template", "entry", "values"),
    [
        (dense(16, 4096, 4096, "bfloat16"), "packed", "prefetch", [16384, 8192, 3072]),
        (dense(64, 4096, 4096, "bfloat16"), "packed", "prefetch", [-1, 3072, 8192]),
        (dense(512, 4096, 768, "bfloat16"), "packed", "prefetch", [3072, 8192, -1]),
        (dense(512, 4096, 768, "bfloat16"), "packed", "order", ["a", "b"]),
        (dense(512, 4096, 768, "bfloat16"), "packed", "mc", [1024, 0]),
        (dense(512, 4096, 768, "bfloat16"), "packed", "kc", [0, 512]),
        (dense(512, 4096, 2048, "bfloat16"), "packed", "order", ["b", "a"]),  # four panels exceed an eighth of the L2
        (dense(192, 4096, 768, "bfloat16"), "packed", "order", ["b", "a"]),
        (dense(16, 4096, 11008, "bfloat16"), "packed", "kc", [0]),
        (dense(96, 4096, 4096, "bfloat16"), "packed", "kc", [0, 1024, 512, 2048]),
        (dense(192, 4096, 4096, "bfloat16"), "packed", "kc", [1024, 512, 2048, 0]),
        (dense(512, 4096, 4096, "bfloat16"), "packed", "kc", [512, 1024, 2048, 0]),
        (dense(192, 4096, 4096, "bfloat16"), "packed", "nc", [8, 16, 4, 1]),
        (integer(256, 4096, 4096, "int8"), "packed", "kc", [0, 2048, 1024, 512]),
        (integer(256, 4096, 11008, "int8"), "packed", "kc", [2048, 1024, 512, 4096, 0]),
        (weight_only(64, 4096, 4096, "bfloat16", "int8", Quant(None, "bfloat16")), "expand", "kc", [512, 256, 1024]),
        (weight_only(256, 4096, 4096, "bfloat16", "int8", Quant(None, "bfloat16")), "expand", "kc", [1024, 512, 256]),
    ],
)
def test_amx_lists_the_likeliest_values_first(problem: Problem, template: str, entry: str, values: list[int]) -> None:
    """A search starts from the first candidates, and a short budget tries few others."""
    values_in_order = [
        item[entry]
        for item in space.candidates(problem, target(), ["amx"])
        if isinstance(item, Candidate) and item.template == template
    ]
    assert list(dict.fromkeys(values_in_order)) == values


@pytest.mark.parametrize("isa", ISAS)
def test_split_k_is_exact_for_integers(isa: str) -> None:
    problem = integer(9, 70, 1300, "int8")
    for first in sample_candidates(problem, isa, "packed", 0, 0):
        check(problem, Candidate.make("native", "packed", **{**dict(first.config), "grid": "1x1x2", "kc": 256}), 1)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().clone().view(torch.int8)


@given(
    n=sizes, k=sizes, order=st.sampled_from(["row", "col"]), nr=st.sampled_from([16, 32, 48, 64]),
    kind=st.sampled_from(
        [
            ("1", "float32"), ("1", "bfloat16"), ("2", "bfloat16"), ("1", "float16"),
            ("1", "int8"), ("2", "int8"), ("2s", "int8"), ("4", "int8"),
        ]
    ),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_unpacking_restores_a_packed_weight(n: int, k: int, order: str, nr: int, kind: tuple[str, str]) -> None:
    from gemmtune.backends.native.layout import pack, unpack

    k_group, dtype = kind
    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    raw = torch.randint(-128, 128, (n, k * size), dtype=torch.int8).view(getattr(torch, dtype))
    b = raw.t() if order == "col" else raw.t().contiguous()
    operand = Operand(dtype, Layout(order), constant=True)  # type: ignore[arg-type]
    packed = pack(Packing(k_group, dtype, nr), b, Problem("mm", 1, n, k, Operand(dtype), operand, dtype))
    unpacked = unpack(packed)
    assert unpacked.shape == b.shape
    assert unpacked.stride() == b.stride() or min(n, k) == 1
    assert torch.equal(_as_bytes(unpacked), _as_bytes(b))


@given(n=sizes, k=sizes, group=st.sampled_from([None, 32, 64]), zero=st.booleans(), nr=st.sampled_from([16, 64]))
@settings(max_examples=40, deadline=None)
def test_unpacking_restores_a_packed_int4_weight(n: int, k: int, group: int | None, zero: bool, nr: int) -> None:
    from gemmtune.backends.native.layout import pack, unpack
    from gemmtune.core.weights import QuantWeight

    data = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8)
    if k % 2:
        data[:, -1] &= 15
    shape = (n,) if group is None else (-(-k // group), n)
    quant = Quant(group, "bfloat16", zero)
    scale = torch.rand(shape).bfloat16()
    weight = QuantWeight(data.t(), scale, scale + 7 if zero else None, k, quant, "int4")
    operand = Operand("int4", Layout("col"), constant=True, quant=quant)
    problem = Problem("mixed_mm", 1, n, k, Operand("bfloat16"), operand, "bfloat16")
    unpacked = unpack(pack(Packing("1", "int4", nr), weight, problem))
    assert torch.equal(unpacked.data, weight.data)
    assert torch.equal(unpacked.scale, weight.scale)
    assert (unpacked.zero_point is None) == (not zero)
    if zero:
        assert torch.equal(unpacked.zero_point, weight.zero_point)


@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("nr", [16, 48, 64])
def test_a_weight_for_a_gate_is_packed_by_halves(order: str, nr: int) -> None:
    """A panel has nr / 2 columns of either half; unpacking restores the weight, its scales and its zero points."""
    from gemmtune.backends.native.layout import pack, unpack
    from gemmtune.core.weights import QuantWeight

    n, k = 384, 40
    raw = torch.arange(n * k, dtype=torch.float32).reshape(n, k)
    b = raw.t() if order == "col" else raw.t().contiguous()
    problem = dense(1, n, k, "float32", epilogue=(Step("swiglu"),))
    packing = Packing("1", "float32", nr, halves=True)
    assert Packing.parse(packing.name) == packing
    packed = pack(packing, b, problem)
    first_panel = packed.data[0].view(torch.float32)[: nr * k].reshape(k, nr)
    assert torch.equal(first_panel, torch.cat([b[:, : nr // 2], b[:, n // 2 : n // 2 + nr // 2]], 1))
    assert torch.equal(unpack(packed), b)
    assert unpack(packed).stride() == b.stride()

    quant = Quant(8, "float32", True)
    scale = torch.rand(k // 8, n)
    data = torch.randint(-128, 128, (n, k), dtype=torch.int8).t()
    weight = QuantWeight(data, scale, scale + 7, k, quant, "int8")
    problem = replace(weight_only(1, n, k, "bfloat16", "int8", quant), epilogue=(Step("geglu"),))
    unpacked = unpack(pack(Packing("1", "int8", nr, halves=True), weight, problem))
    assert torch.equal(unpacked.data, data)
    assert torch.equal(unpacked.scale, scale)
    assert torch.equal(unpacked.zero_point, scale + 7)


@pytest.mark.parametrize("n", [3073, 4096, 4093])
@pytest.mark.parametrize(("bits", "group"), [("int8", None), ("int4", 32), ("int4", 128)])
def test_packed_weights_have_little_padding(n: int, bits: str, group: int | None) -> None:
    k = 768
    problem = weight_only(16, n, k, "bfloat16", bits, Quant(group, "bfloat16", False))
    candidate = BACKEND.default_packing(problem, current_cpu())
    assert candidate is not None
    kernel = BACKEND.load(BACKEND.build(problem, candidate, target()), problem)
    from gemmtune.verify.inputs import make_inputs

    packed = kernel.pack(make_inputs(problem, 0).b)
    assert packed.nbytes <= 1.06 * problem.weight_bytes


def test_unsupported_problems_have_a_reason() -> None:
    cases = {
        "fp8": Problem("scaled_mm", 4, 4, 4, Operand("float8_e4m3fn"), Operand("float8_e4m3fn"), "bfloat16"),
        "one dtype": Problem("mm", 4, 4, 4, Operand("float32"), Operand("bfloat16"), "float32"),
        "nothing to multiply": dense(4, 4, 0, "float32"),
        "float64": dense(4, 4, 4, "float64"),
        "packed first": replace(
            weight_only(4, 8, 8, "bfloat16", "int8", Quant()), b=Operand("int8", Layout("col"), quant=Quant())
        ),
        "multiples of 8": weight_only(4, 8, 40, "bfloat16", "int8", Quant(20)),
        "accumulates": dense(4, 4, 4, "float16", acc="float16"),
        "row-major outputs": dense(4, 4, 4, "float32", out=Layout("col")),
        "a gate needs whole panels": dense(4, 24, 4, "float32", epilogue=(Step("swiglu"),)),
        "it must be constant": dense(4, 16, 4, "float32", epilogue=(Step("swiglu"),), b=Operand("float32")),
    }
    for expected, problem in cases.items():
        (item,) = space.candidates(problem, target(), ISAS)
        assert isinstance(item, Illegal)
        assert expected in item.reason


def test_illegal_configs_have_a_reason() -> None:
    items = list(space.candidates(dense(4, 4, 33, "bfloat16"), target(), ["avx512_bf16"]))
    reasons = {item.reason for item in items if isinstance(item, Illegal)}
    assert any("K = 33 is not a multiple of 2" in reason for reason in reasons)
    assert any("no avx2" in reason for reason in reasons)


def test_gemmtune_isa_restricts_the_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMTUNE_ISA", "portable")
    legal = [item for item in BACKEND.candidates(dense(4, 64, 64, "float32"), target()) if isinstance(item, Candidate)]
    assert {item["isa"] for item in legal} == {"portable"}
    digest = BACKEND.source_digest()
    monkeypatch.setenv("GEMMTUNE_ISA", "avx9000")
    assert "avx9000" in BACKEND.available(target()).reason
    assert BACKEND.source_digest() != digest


def test_candidate_for_another_cpu_does_not_load() -> None:
    problem = dense(4, 64, 64, "float32")
    candidate = BACKEND.default_packing(problem, current_cpu())
    assert candidate is not None
    foreign = Candidate.make("native", "packed", **{**dict(candidate.config), "isa": "sve2"})
    with pytest.raises(KernelError, match="sve2"):
        BACKEND.load(BACKEND.build(problem, foreign, target()), problem)


def test_weight_packed_for_another_cpu_is_unreadable() -> None:
    problem = dense(4, 64, 64, "float32")
    candidate = BACKEND.default_packing(problem, current_cpu())
    assert candidate is not None
    kernel: Kernel = BACKEND.load(BACKEND.build(problem, candidate, target()), problem)
    packed = kernel.pack(torch.randn(64, 64))
    assert BACKEND.why_unreadable(packed) == ""
    assert "no instruction set" in BACKEND.why_unreadable(replace(packed, layout="native:k4/float32/nr64"))


@pytest.mark.parametrize("threads", [1, 2])
def test_results_are_repeatable_and_independent_of_other_rows(threads: int) -> None:
    original_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        problem = dense(13, 130, 520, "bfloat16")
        for candidate in sample_candidates(problem, ISAS[-1], "packed", 3, 0):
            kernel = BACKEND.load(BACKEND.build(problem, candidate, target(threads)), problem)
            a, b = torch.randn(13, 520).bfloat16(), torch.randn(130, 520).bfloat16().t()
            packed, out, second_out = kernel.pack(b), torch.empty(13, 130).bfloat16(), torch.empty(13, 130).bfloat16()
            kernel.run(a, packed, (), out)
            kernel.run(a, packed, (), second_out)
            assert torch.equal(out, second_out)
            single = torch.empty(1, 130).bfloat16()
            kernel.run(a[5:6], packed, (), single)
            assert torch.equal(single[0], out[5])
    finally:
        torch.set_num_threads(original_threads)


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")
@pytest.mark.parametrize("size", [100, (2 << 20) - 1, 2 << 20, (5 << 20) + 64])
def test_packed_weights_are_aligned_to_cache_lines_or_large_pages(size: int) -> None:
    data = aligned_bytes(size)
    assert data.data_ptr() % (2 << 20 if size >= 2 << 20 else 64) == 0
    assert data.numel() == size
    assert data.untyped_storage().nbytes() <= size + 64  # at most 64 bytes for the alignment
    data.fill_(7)
    assert int(data.min()) == 7
