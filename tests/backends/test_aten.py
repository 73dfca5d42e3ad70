"""ATen's candidates on the CPU: verification against the oracle, legality, and packing and unpacking."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtune import backends
from gemmtune.backends.aten import AtenBackend, cpu_rules, is_fallback, padding
from gemmtune.backends.aten.quantized import dequantize, nibbles
from gemmtune.backends.base import Artifact, Kernel
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.epilogue import Kind, Step
from gemmtune.core.errors import KernelError, PackedWeightError
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target, current_cpu
from gemmtune.core.weights import PackedWeight, QuantWeight
from gemmtune.core.workloads import bmm_problem, fp8_problem, int_problem, linear_problem, weight_only_problem
from gemmtune.verify.inputs import make_inputs
from gemmtune.verify.verify import Inputs, make_reference_cases, verify
from helpers.gpus import H200

ATEN = AtenBackend()
TARGET = current_cpu()


def load_kernels(problem: Problem) -> list[Kernel]:
    candidates = [candidate for candidate in ATEN.candidates(problem, TARGET) if isinstance(candidate, Candidate)]
    return [ATEN.load(Artifact(candidate, ""), problem) for candidate in candidates]


def raw_candidates(problem: Problem, target: Target = TARGET) -> list[Candidate]:
    """Return ATen's legal candidates on the raw weight."""
    listed = (item for item in ATEN.candidates(problem, target) if isinstance(item, Candidate))
    return [item for item in listed if ATEN.packing_of(problem, item) is None]


def illegal_reasons(problem: Problem) -> dict[str, str]:
    rows = [item for item in ATEN.candidates(problem, TARGET) if isinstance(item, Illegal)]
    return {row.candidate.id: row.reason for row in rows}


def check(problem: Problem, kernel: Kernel) -> None:
    def run(inputs: Inputs, out: torch.Tensor) -> None:
        kernel.run(inputs.a, kernel.pack(inputs.b) if kernel.packing else inputs.b, inputs.aux, out)

    verdict = verify(run, problem, make_reference_cases(problem, 1), rounding=kernel.rounding)
    assert verdict.ok, f"{kernel.candidate.id} on {problem.key}: {verdict}"


EPILOGUES: dict[str, tuple[Step, ...]] = {
    "none": (),
    "bias": (Step("bias", "col", "DTYPE"),),
    "alpha beta": (Step("scale", "tensor", value=0.5), Step("add", "row", "DTYPE", value=2.0)),
    "bias gelu": (Step("bias", "col", "DTYPE"), Step("gelu")),
    "bias gelu_tanh": (Step("bias", "col", "float32"), Step("gelu_tanh")),
    "silu": (Step("silu"),),
    "relu": (Step("relu"),),
    "residual": (Step("bias", "col", "DTYPE"), Step("add", "full", "DTYPE")),
    "gate": (Step("mul", "full", "DTYPE"),),
    "long": (
        Step("scale", "row", "float32"),
        Step("clamp", lo=-1.0, hi=1.0),
        Step("add", "full", "float32", value=0.5),
    ),
    "cast first": (Step("cast", dtype="DTYPE"), Step("relu"), Step("mul", "col", "float32")),
}


def with_epilogue(problem: Problem, name: str) -> Problem:
    steps = tuple(replace(s, dtype=problem.a.dtype) if s.dtype == "DTYPE" else s for s in EPILOGUES[name])
    return replace(problem, epilogue=steps)


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("m", [1, 5])
def test_floating_point_products_match_the_oracle(dtype: str, name: str, m: int) -> None:
    problem = with_epilogue(linear_problem(m, 24, 48, dtype), name)
    kernels = load_kernels(problem)
    assert "composite" in {kernel.candidate.template for kernel in kernels}
    for kernel in kernels:
        check(problem, kernel)


@pytest.mark.parametrize("gain", ["bfloat16", "float32"])
@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("kinds", [("rms_norm",), ("layer_norm",), ("layer_norm", "norm_bias")], ids="+".join)
def test_products_of_normalised_rows_match_the_oracle(m: int, gain: str, kinds: tuple[Kind, ...]) -> None:
    norm = tuple(Step(kind, "inner", gain, value=1.0 if kind == "norm_bias" else 1e-5) for kind in kinds)
    # 64 elements of K: with other sizes, oneDNN's AMX products read beyond a row, so that a NaN spoils the row before.
    for problem in (linear_problem(m, 24, 64, "bfloat16"), weight_only_problem(m, 24, 64)):
        normed = replace(problem, epilogue=(*norm, Step("bias", "col", "bfloat16"), Step("gelu")))
        plain, kernels = load_kernels(normed.without_norm()), load_kernels(normed)
        assert [kernel.candidate for kernel in kernels] == [kernel.candidate for kernel in plain]
        assert [kernel.packing for kernel in kernels] == [kernel.packing for kernel in plain]
        for kernel in kernels:
            check(normed, kernel)


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("m", [1, 6])
def test_gated_products_match_the_oracle(m: int, kind: Kind) -> None:
    for problem in (linear_problem(m, 24, 64, "bfloat16"), linear_problem(m, 24, 64, "float32"),
                    weight_only_problem(m, 24, 64)):  # fmt: skip
        gated = replace(problem, epilogue=(Step("bias", "col", "bfloat16"), Step(kind)))
        kernels = load_kernels(gated)
        assert kernels
        for kernel in kernels:
            check(gated, kernel)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN computes no bfloat16 on CPUs without AVX-512"
)
def test_onednn_template_is_listed_for_epilogues_that_onednn_fuses() -> None:
    templates = {
        name: {
            kernel.candidate.template
            for kernel in load_kernels(with_epilogue(linear_problem(4, 16, 32, "bfloat16"), name))
        }
        for name in EPILOGUES
    }
    # oneDNN fuses these as post-ops on its float32 accumulator; addmm would round before them.
    for name in ("bias gelu", "bias gelu_tanh", "silu", "residual", "gate"):
        assert "mkldnn" in templates[name]
        assert "mm" not in templates[name]
    assert templates["long"] == {"composite", "mm_rounded"}
    assert {"mm", "mkldnn"} <= templates["relu"]
    assert {"mm", "mkldnn", "mm_t"} <= templates["cast first"]


@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("uint8", "int8")])
def test_integer_products_match_the_oracle(dtypes: tuple[str, str], order: str, out: str) -> None:
    exact = replace(int_problem(5, 24, 40, a_dtype=dtypes[0]), b=Operand("int8", Layout(order), constant=True))  # type: ignore[arg-type]
    scaled = replace(exact, out_dtype=out, epilogue=(Step("scale", "col", "float32"), Step("relu")))
    requantised = replace(exact, out_dtype="int8", epilogue=(Step("scale", "tensor", "float32"),))
    for problem in (exact, scaled, requantised):
        for kernel in load_kernels(problem):
            check(problem, kernel)


def test_integer_output_with_padded_rows_matches_the_oracle() -> None:
    problem = replace(int_problem(5, 24, 40), out=Layout("row", 27))
    for kernel in load_kernels(problem):
        check(problem, kernel)


def test_nan_from_gelu_of_infinity_is_no_fault() -> None:
    """torch returns NaN, where the limit is infinite, even if a clamp hides the infinity."""
    steps = (Step("gelu"), Step("clamp", lo=-0.5, hi=1.5))
    for seed in range(4):
        problem = replace(linear_problem(40 + seed, 45, 80, "float32"), epilogue=steps)
        for kernel in load_kernels(problem):
            check(problem, kernel)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weight_only_products_match_the_oracle(bits: int, group: int | None, zero_point: bool, dtype: str) -> None:
    problem = weight_only_problem(3, 32, 64, bits=bits, group=group, dtype=dtype, zero_point=zero_point)
    kernels = load_kernels(problem)
    names = {kernel.candidate.template for kernel in kernels}
    assert {"composite", "dequant"} <= names
    assert ("int8pack" in names) == (bits == 8 and group is None and not zero_point)
    assert ("int4pack" in names) == (bits == 4 and group == 32 and not (zero_point and dtype != "float32"))
    for kernel in kernels:
        check(problem, kernel)


@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize(("k", "group"), [(64, None), (64, 32), (72, 32), (24, 32)])
@pytest.mark.parametrize("bits", [8, 4])
def test_dequantize_matches_the_formula_and_leaves_the_weight_unchanged(
    order: str, k: int, group: int | None, bits: int
) -> None:
    problem = weight_only_problem(3, 48, k, bits=bits, group=group, dtype="float32", zero_point=True)
    problem = replace(problem, b=replace(problem.b, layout=Layout("row" if order == "row" else "col")))
    weight = make_inputs(problem, 0).b
    assert isinstance(weight, QuantWeight)
    assert weight.zero_point is not None
    before = weight.data.clone()
    scale, zero = (
        tensor.reshape(-1, 48).repeat_interleave(group or k, 0)[:k] for tensor in (weight.scale, weight.zero_point)
    )
    assert torch.equal(dequantize(weight, torch.float32), (nibbles(weight).float() - zero) * scale)
    assert torch.equal(weight.data, before)


def test_dequantize_allocates_one_wide_copy() -> None:
    k, n = 512, 512
    weight = make_inputs(weight_only_problem(1, n, k, group=32, zero_point=True), 0).b
    assert isinstance(weight, QuantWeight)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        dequantize(weight, torch.float32)
    allocated = sum(event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0)
    assert allocated < 1.5 * 4 * k * n


def test_workspace_bytes_include_the_dequantised_weight() -> None:
    problem = weight_only_problem(3, 32, 64)
    by_name = {kernel.candidate.template: kernel for kernel in load_kernels(problem)}
    assert by_name["dequant"].workspace_bytes >= 4 * 32 * 64
    assert by_name["int8pack"].workspace_bytes == 0


@pytest.mark.parametrize("k", [8, 24, 33])
def test_int8pack_is_illegal_where_it_reads_out_of_bounds(k: int) -> None:
    assert "out of bounds" in illegal_reasons(weight_only_problem(3, 8, k))["aten/int8pack"]


@pytest.mark.parametrize("epilogue", ["none", "long"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_batched_products_match_the_oracle(dtype: str, epilogue: str) -> None:
    problem = with_epilogue(bmm_problem(3, 4, 10, 12, dtype), epilogue)
    if epilogue == "none":
        for operand in (Operand(dtype, Layout("col")), Operand(dtype, Layout("row", 40))):
            changed = replace(problem, a=operand)
            for kernel in load_kernels(changed):
                check(changed, kernel)
    for kernel in load_kernels(problem):
        check(problem, kernel)


@pytest.mark.parametrize("scales", [("tensor", "tensor"), ("row", "col"), ("row", "tensor")])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ld", [None, 37])
def test_fp8_products_match_the_oracle(scales: tuple[str, str], bias: bool, ld: int | None) -> None:
    """Check an output with padding between its rows (ld), which torch._scaled_mm(out=) overwrites."""
    steps = tuple(Step("scale", axis, "float32") for axis in scales)  # type: ignore[arg-type]
    steps += (Step("bias", "col", "bfloat16"),) if bias else ()
    e4m3 = Operand("float8_e4m3fn")
    problem = Problem("scaled_mm", 5, 32, 64, e4m3, replace(e4m3, layout=Layout("col")), "bfloat16", steps)
    problem = replace(problem, out=Layout("row", ld))
    kernels = load_kernels(problem)
    is_supported = scales == ("tensor", "tensor") or (scales == ("row", "col") and cpu_rules.scaled_mm_takes_rows())
    assert ("scaled_mm" in {kernel.candidate.template for kernel in kernels}) == is_supported
    for kernel in kernels:
        check(problem, kernel)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 20), st.integers(1, 40), st.sampled_from(("row", "col", "strided")),
    st.sampled_from(("float32", "bfloat16")), st.booleans(),
)  # fmt: skip
def test_odd_shapes_and_layouts_match_the_oracle(
    m: int, n: int, k: int, order: str, dtype: str, constant: bool
) -> None:
    lead = {"row": n + 3, "col": k + 1, "strided": 2 * n + 1}[order]
    b = Operand(dtype, Layout(order, lead), constant=constant)  # type: ignore[arg-type]
    problem = Problem("mm", m, n, k, Operand(dtype, Layout("row", k + 5)), b, dtype)
    for kernel in load_kernels(problem):
        check(problem, kernel)


@pytest.mark.parametrize(
    "problem",
    [linear_problem(0, 4, 8, "float32"), linear_problem(3, 4, 0, "bfloat16", bias=True), int_problem(2, 4, 0),
     weight_only_problem(2, 4, 0), bmm_problem(0, 2, 3, 4, "float32")],
    ids=lambda problem: problem.key,
)  # fmt: skip
def test_empty_operands_return_the_bias_or_zeros(problem: Problem) -> None:
    a = torch.zeros((problem.batch, problem.m, problem.k) if problem.family == "bmm" else (problem.m, problem.k))
    inputs = make_inputs(problem, 1)
    for kernel in load_kernels(problem):
        shape = (*a.shape[:-1], problem.n)
        out = torch.empty(shape, dtype=getattr(torch, problem.out_dtype))
        if kernel.packing is None:
            kernel.run(inputs.a, inputs.b, inputs.aux, out)
            expected = inputs.aux[0].expand(shape) if inputs.aux else torch.zeros(shape, dtype=out.dtype)
            assert torch.equal(out, expected)


PACKABLE = [
    linear_problem(4, 24, 40, "bfloat16"),
    replace(linear_problem(4, 24, 40, "float32"), b=Operand("float32", Layout("row"), constant=True)),
    int_problem(4, 24, 40),
    weight_only_problem(4, 32, 64, bits=4, group=32),
    weight_only_problem(4, 32, 63, bits=4, zero_point=True),
]


@pytest.mark.parametrize("problem", PACKABLE, ids=lambda problem: problem.key)
def test_unpacking_restores_a_packed_weight_bit_for_bit(problem: Problem) -> None:
    raw = make_inputs(problem, 3).b
    packing_kernels = [kernel for kernel in load_kernels(problem) if kernel.packing]
    assert packing_kernels
    for kernel in packing_kernels:
        packed = kernel.pack(raw)
        assert packed.layout == kernel.packing
        assert packed.nbytes > 0
        unpacked = ATEN.unpack(packed)
        if isinstance(raw, QuantWeight):
            assert torch.equal(unpacked.data, raw.data)
            assert torch.equal(unpacked.scale, raw.scale)
            assert (unpacked.zero_point is None) == (raw.zero_point is None)
        else:
            assert torch.equal(unpacked, raw)
            assert unpacked.stride() == raw.stride()


def test_default_candidate_is_the_function_that_users_call() -> None:
    assert ATEN.default_candidate(linear_problem(1, 8, 8, "bfloat16", bias=True)).id == "aten/mm"
    assert ATEN.default_candidate(int_problem(1, 8, 8)).id == "aten/int_mm"
    assert ATEN.default_candidate(weight_only_problem(1, 8, 16)).id == "aten/int8pack"
    assert ATEN.default_candidate(weight_only_problem(1, 8, 16, bits=4)).id == "aten/composite"
    assert ATEN.default_candidate(bmm_problem(2, 3, 4, 5, "float32")).id == "aten/bmm"


GELU = (Step("gelu"),)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (linear_problem(4, 8, 8, "bfloat16"), {"mm"}),
        (linear_problem(4, 8, 8, "float16", bias=True), {"mm"}),
        (linear_problem(4, 8, 8, "float32"), {"mm", "composite"}),  # nothing is converted
        (linear_problem(4, 8, 8, "float64"), {"mm", "composite"}),
        (replace(linear_problem(4, 8, 8, "bfloat16"), out_dtype="float32"), {"composite"}),  # mm rounds before
        (replace(linear_problem(4, 8, 8, "bfloat16"), epilogue=GELU), {"mm_rounded"}),
        (replace(linear_problem(4, 8, 8, "float16"), epilogue=GELU), {"composite"}),
        (bmm_problem(2, 4, 8, 8, "bfloat16"), {"bmm"}),
        (replace(bmm_problem(2, 4, 8, 8, "bfloat16"), epilogue=GELU), {"composite"}),
        (int_problem(4, 8, 8), {"int_mm", "int_mm_pad"}),
        (int_problem(64, 8, 8), {"int_mm", "int_mm_pad"}),
        (weight_only_problem(4, 8, 16, dtype="float32"), {"int8pack", "upcast", "composite"}),
        (weight_only_problem(4, 8, 16, bits=4), {"upcast", "composite"}),
        (weight_only_problem(4, 8, 64, bits=4, group=32), {"composite"}),
        (fp8_problem(4, 16, 16), {"scaled_mm", "composite"}),
    ],
)
def test_templates_that_plain_pytorch_runs(problem: Problem, expected: set[str]) -> None:
    """The composite is one of them only where plain PyTorch converts the operands, too."""
    templates = {"composite", *(item.template for m in (problem.m, 64) for target in (TARGET, H200)
                                for item in raw_candidates(problem.with_m(m), target))}  # fmt: skip
    assert {name for name in templates if is_fallback(name, problem)} == expected
    assert not is_fallback("no such template", problem)


def test_norm_does_not_change_what_plain_pytorch_runs() -> None:
    norm = Step("rms_norm", "inner", "float32", value=1e-5)
    for problem in (linear_problem(4, 8, 8, "bfloat16"), linear_problem(4, 8, 8, "bfloat16", bias=True)):
        normed = replace(problem, epilogue=(norm, *problem.epilogue))
        assert (is_fallback("mm", normed), is_fallback("composite", normed)) == (True, False)


@pytest.mark.parametrize("family", ["mm", "bmm", "int_mm", "mixed_mm", "scaled_mm"])
def test_template_that_plain_pytorch_runs_does_not_depend_on_m(family: str) -> None:
    """A plan for many M has one op of PyTorch's."""
    problem = {
        "mm": linear_problem(1, 64, 64, "bfloat16"), "bmm": bmm_problem(2, 1, 64, 64, "bfloat16"),
        "int_mm": int_problem(1, 64, 64), "mixed_mm": weight_only_problem(1, 64, 64),
        "scaled_mm": fp8_problem(1, 64, 64),
    }[family]  # fmt: skip
    listed = {item.template for m in (1, 64) for item in raw_candidates(problem.with_m(m), H200)}
    at_one = {name for name in listed if is_fallback(name, problem)}
    for m in (2, 16, 17, 4096):
        assert {name for name in listed if is_fallback(name, problem.with_m(m))} == at_one


@pytest.mark.parametrize("m", [1, 16, 17, 64])
def test_raw_weight_has_a_template_that_plain_pytorch_runs_on_every_device(m: int) -> None:
    problems = [
        linear_problem(m, 64, 64, "bfloat16"), linear_problem(m, 63, 65, "float16", bias=True),
        replace(linear_problem(m, 64, 64, "bfloat16"), epilogue=GELU), bmm_problem(2, m, 64, 64, "bfloat16"),
        int_problem(m, 64, 64), int_problem(m, 63, 65), int_problem(m, 64, 64, a_dtype="uint8"),
        weight_only_problem(m, 64, 64), weight_only_problem(m, 64, 64, bits=4, group=32), fp8_problem(m, 64, 64),
        fp8_problem(m, 63, 65), replace(fp8_problem(m, 64, 64), epilogue=(*fp8_problem(m, 64, 64).epilogue, *GELU)),
    ]  # fmt: skip
    for problem in problems:
        for target in (TARGET, H200):
            assert any(is_fallback(item.template, problem) for item in raw_candidates(problem, target)), problem.key


def test_load_run_and_unpack_raise_errors_for_wrong_arguments() -> None:
    problem = linear_problem(2, 8, 8, "float32")
    with pytest.raises(KernelError, match="no template 'magic'"):
        ATEN.load(Artifact(Candidate.make("aten", "magic"), ""), problem)
    with pytest.raises(KernelError, match="takes int8 weights"):
        ATEN.load(Artifact(Candidate.make("aten", "int8pack"), ""), weight_only_problem(1, 8, 16, bits=4))
    kernel = next(kernel for kernel in load_kernels(problem) if kernel.packing == "aten:row")
    with pytest.raises(PackedWeightError, match="expected a weight packed as 'aten:row'"):
        kernel.run(torch.ones(2, 8), torch.ones(8, 8), (), torch.empty(2, 8))
    with pytest.raises(PackedWeightError, match="not one of the ATen"):
        ATEN.unpack(PackedWeight("aten:unknown", (), 1, 1, "float32"))
    assert backends.get("aten").available(TARGET)


def test_candidates_that_torch_2_10_lacks_are_illegal_and_the_composite_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CPUs, torch 2.10 has no uint8 in ``_int_mm`` and takes one scale per operand in ``_scaled_mm``."""
    monkeypatch.setattr(cpu_rules, "int_mm_takes_uint8", lambda: False)
    monkeypatch.setattr(cpu_rules, "scaled_mm_takes_rows", lambda: False)
    monkeypatch.setattr(padding, "int_mm_takes_uint8", lambda: False)
    wide = int_problem(4, 64, 64)
    for problem, name, reason in (
        (replace(wide, a=replace(wide.a, dtype="uint8")), "aten/int_mm", "takes no uint8 on CPUs"),
        (fp8_problem(4, 64, 64), "aten/scaled_mm", "takes one scale per tensor on CPUs"),
    ):
        assert reason in illegal_reasons(problem)[name]
        assert torch.__version__ in illegal_reasons(problem)[name]
        assert ATEN.default_candidate(problem).template == "composite"
        assert is_fallback("composite", problem)
    a, b = torch.randint(0, 256, (5, 33), dtype=torch.uint8), torch.randint(-128, 128, (33, 7), dtype=torch.int8)
    assert torch.equal(padding.cpu_int_mm(a, b).long(), a.long() @ b.long())
