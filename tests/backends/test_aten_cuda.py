"""ATen's candidates on a GPU: legality, reasons of illegal ones, and their arithmetic on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemmtune.backends.aten import AtenBackend, is_fallback, padding, quantized
from gemmtune.backends.aten.cpu_rules import scaled_mm_takes_rows
from gemmtune.backends.aten.cuda_narrow import levels
from gemmtune.backends.aten.padding import as_rows, int_product, padded, scaled_product
from gemmtune.backends.base import Artifact, Kernel, Rounding
from gemmtune.backends.cublaslt import choice
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.epilogue import Step, epilogue_key
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target, current_cpu
from gemmtune.core.weights import QuantWeight
from gemmtune.core.workloads import bmm_problem, fp8_problem, int_problem, linear_problem, weight_only_problem
from gemmtune.verify.inputs import Inputs, make_inputs
from gemmtune.verify.row_stack import RowCountVerifier
from gemmtune.verify.verify import make_reference_cases, verify

ATEN = AtenBackend()
H200 = Target("cuda", "H200", "9.0", caches=(232448, 0, 62914560), cores=132)
A100 = replace(H200, name="A100", capability="8.0")
E4M3 = torch.float8_e4m3fn


def legal_candidates(problem: Problem, target: Target = H200) -> dict[str, Candidate]:
    return {item.id: item for item in ATEN.candidates(problem, target) if isinstance(item, Candidate)}


def illegal_reasons(problem: Problem, target: Target = H200) -> dict[str, str]:
    return {item.candidate.id: item.reason for item in ATEN.candidates(problem, target) if isinstance(item, Illegal)}


def load(problem: Problem, name: str) -> Kernel:
    return ATEN.load(Artifact(legal_candidates(problem)[name], ""), problem)


def run_kernel(kernel: Kernel, inputs: Inputs, out: torch.Tensor) -> None:
    kernel.run(inputs.a, kernel.pack(inputs.b) if kernel.packing else inputs.b, inputs.aux, out)


def check(problem: Problem, kernel: Kernel) -> None:
    """Verify the kernel on CPU operands. Assert that the functional variant of a padded one returns a dense tensor."""

    run = partial(run_kernel, kernel)
    verdict = verify(run, problem, make_reference_cases(problem, 1), rounding=kernel.rounding)
    assert verdict.ok, f"{kernel.candidate.id} on {problem.key}: {verdict}"
    if "_pad" in kernel.candidate.template:
        inputs = make_inputs(problem, 5)
        weight = kernel.pack(inputs.b) if kernel.packing else inputs.b
        assert kernel.functional(inputs.a, weight, inputs.aux).is_contiguous()  # type: ignore[attr-defined]


def with_steps(problem: Problem, *steps: Step) -> Problem:
    return replace(problem, epilogue=steps)


BIAS = Step("bias", "col", "bfloat16")


def test_cpu_templates_are_not_listed_on_a_gpu() -> None:
    assert "aten/mkldnn" not in illegal_reasons(linear_problem(16, 64, 64, "bfloat16"))
    assert "aten/int4pack" not in illegal_reasons(weight_only_problem(1, 64, 128, bits=4, group=32))


def test_int8pack_is_illegal_where_it_reads_the_weight_for_each_row() -> None:
    assert "once for every row" in illegal_reasons(weight_only_problem(17, 64, 128))["aten/int8pack"]
    assert "aten/int8pack" in legal_candidates(weight_only_problem(16, 64, 128))


def test_gpu_templates_are_not_listed_on_a_cpu() -> None:
    cpu = current_cpu()
    for problem in (linear_problem(16, 63, 65, "bfloat16"), int_problem(3, 9, 9), weight_only_problem(3, 8, 16)):
        listed = {*legal_candidates(problem, cpu), *illegal_reasons(problem, cpu)}
        for name in ("mm_wide", "addmm_act", "mm_pad", "int_mm_pad", "upcast", "scaled_mm_pad"):
            assert not any(name in candidate for candidate in listed)


def test_default_candidate_is_listed_first() -> None:
    defaults = {
        linear_problem(1, 64, 64, "bfloat16", bias=True): "aten/mm",
        int_problem(64, 64, 64): "aten/int_mm",
        int_problem(1, 64, 64): "aten/int_mm_pad[turned=False]",
        weight_only_problem(1, 64, 128): "aten/upcast",
        weight_only_problem(1, 64, 128, bits=4, group=32, zero_point=True): "aten/composite",
        fp8_problem(16, 64, 64): "aten/scaled_mm",
        fp8_problem(16, 63, 64): "aten/scaled_mm_pad",
        bmm_problem(2, 3, 8, 8, "float16"): "aten/bmm",
    }
    for problem, name in defaults.items():
        assert ATEN.default_candidate(problem, H200).id == name
        assert name == "aten/composite" or next(iter(legal_candidates(problem))) == name
    assert ATEN.default_candidate(weight_only_problem(1, 64, 128)).id == "aten/int8pack"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 5])
def test_templates_with_a_float32_output_match_the_oracle(dtype: str, m: int) -> None:
    base = linear_problem(m, 24, 48, dtype)
    assert "rounded to the operands' dtype at once" in illegal_reasons(base)["aten/mm_wide"]
    scaled = with_steps(base, Step("scale", "row", "float32"), Step("gelu"), Step("add", "full", dtype))
    for problem in (scaled, replace(base, out_dtype="float32")):
        check(problem, load(problem, "aten/mm_wide"))
    batches = with_steps(bmm_problem(3, m, 10, 12, dtype), Step("silu"))
    check(batches, load(batches, "aten/bmm_wide"))
    assert (
        "bfloat16 and float16"
        in illegal_reasons(with_steps(linear_problem(m, 8, 8, "float32"), Step("silu")))["aten/mm_wide"]
    )


def test_addmm_activation_is_legal_for_a_bias_and_an_activation_only() -> None:
    base = linear_problem(5, 24, 48, "bfloat16")
    relu = with_steps(base, BIAS, Step("relu"))
    check(relu, load(relu, "aten/addmm_act"))
    doubled = with_steps(base, Step("scale", "tensor", value=0.5), BIAS, Step("relu"))
    check(doubled, load(doubled, "aten/addmm_act"))
    assert "aten/addmm_act" in legal_candidates(with_steps(base, BIAS, Step("gelu_tanh")))
    for steps in ((BIAS,), (BIAS, Step("gelu")), (Step("relu"),), (Step("bias", "col", "float32"), Step("relu"))):
        assert "aten/addmm_act" in illegal_reasons(with_steps(base, *steps))
    assert (
        "rounds to bfloat16"
        in illegal_reasons(with_steps(base, BIAS, Step("relu"), Step("mul", "full", "bfloat16")))["aten/addmm_act"]
    )


NORM = Step("rms_norm", "inner", "bfloat16", value=1e-5)
RESIDUAL = Step("add", "full", "bfloat16")


@pytest.mark.parametrize(
    "steps",
    [
        (Step("gelu"),), (BIAS, Step("silu"), Step("mul", "full", "bfloat16")), (Step("swiglu"),),
        (NORM, Step("geglu")), (NORM, BIAS, Step("gelu_tanh"), RESIDUAL), (Step("scale", "col", "float32"), RESIDUAL),
    ],
    ids=epilogue_key,
)  # fmt: skip
@pytest.mark.parametrize("m", [1, 20])
def test_steps_behind_a_rounded_product_are_right_but_for_its_rounding(steps: tuple[Step, ...], m: int) -> None:
    base = with_steps(linear_problem(m, 48, 64, "bfloat16"), *steps)
    kernel = load(base, "aten/mm_rounded")
    check(base, kernel)
    before = steps.index(BIAS) + 1 if BIAS in steps else int(NORM in steps)
    assert kernel.rounding == Rounding(before, "bfloat16")
    cases = make_reference_cases(base, 0)
    verifier = RowCountVerifier(base, cases)
    run = partial(run_kernel, kernel)
    assert verifier.verify(run, kernel.candidate, 5.0, rounding=kernel.rounding).ok
    if NORM not in steps:  # whose bound is wider
        assert verify(run, base, cases, 0.0).kind == "wrong"
    assert is_fallback("mm_rounded", base)
    if NORM not in steps and "scale" not in steps[0].kind:
        weight_only = with_steps(weight_only_problem(m, 48, 64), *steps)
        kernel = load(weight_only, "aten/upcast_rounded")
        assert kernel.rounding == Rounding(0, "bfloat16")
        check(weight_only, kernel)


def test_rounded_product_of_fp8_has_its_scales_and_bias_in_the_product() -> None:
    base = fp8_problem(20, 48, 64, rowwise=False)
    for steps in ((Step("swiglu"),), (RESIDUAL,), (BIAS, Step("silu"))):
        problem = replace(base, epilogue=(*base.epilogue, *steps))
        kernel = load(problem, "aten/scaled_mm_rounded")
        assert kernel.rounding == Rounding(3 if BIAS in steps else 2, "bfloat16")
        check(problem, kernel)
    assert "computes all" in illegal_reasons(base)["aten/scaled_mm_rounded"]


def test_rounded_products_are_for_bfloat16_and_steps_that_addmm_does_not_compute() -> None:
    assert "addmm computes all" in illegal_reasons(linear_problem(4, 8, 8, "bfloat16", bias=True))["aten/mm_rounded"]
    half = with_steps(linear_problem(4, 8, 8, "float16"), Step("gelu"))
    assert "bfloat16 operands" in illegal_reasons(half)["aten/mm_rounded"]
    assert ATEN.default_candidate(with_steps(BFLOAT16, Step("swiglu")), H200).id == "aten/mm_rounded"


@pytest.mark.parametrize(("n", "k"), [(23, 48), (24, 47), (9, 7), (1, 1)])
@pytest.mark.parametrize("order", ["row", "col"])
def test_padded_products_match_the_oracle_and_unpack(n: int, k: int, order: str) -> None:
    base = linear_problem(5, n, k, "bfloat16")
    base = replace(base, b=replace(base.b, layout=Layout(order)))  # type: ignore[arg-type]
    for problem in (base, with_steps(base, BIAS, Step("silu")), replace(base, out_dtype="float32")):
        for name in ("aten/mm_pad", "aten/mm_pad_copy"):
            kernel = load(problem, name)
            check(problem, kernel)
    raw = make_inputs(base, 3).b
    packed = load(base, "aten/mm_pad_copy").pack(raw)
    assert packed.data[0].shape == (-(-k // 16) * 16, -(-n // 16) * 16)
    unpacked = ATEN.unpack(packed)
    assert torch.equal(unpacked, raw)
    assert unpacked.stride() == raw.stride()  # type: ignore[union-attr]
    assert "nothing to pad" in illegal_reasons(linear_problem(5, 24, 48, "bfloat16"))["aten/mm_pad"]
    changing = replace(base, b=replace(base.b, constant=False))
    assert "not constant" in illegal_reasons(changing)["aten/mm_pad_copy"]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 20), st.integers(0, 40), st.integers(0, 20), st.sampled_from((torch.int8, torch.uint8)),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_int_product_is_exact_for_all_sizes_and_layouts(
    m: int, k: int, n: int, dtype: torch.dtype, turned: bool, flip_a: bool, flip_b: bool
) -> None:
    info = torch.iinfo(dtype)
    a = torch.randint(info.min, info.max + 1, (k, m) if flip_a else (m, k), dtype=dtype)
    b = torch.randint(-128, 128, (n, k) if flip_b else (k, n), dtype=torch.int8)
    a, b = a.t() if flip_a else a, b.t() if flip_b else b
    product = int_product(a, b, turned=turned)
    assert product.dtype == torch.int32
    assert torch.equal(product.long(), a.long() @ b.long())


def test_int_product_pads_operands_to_the_sizes_that_cuda_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[torch.Size, torch.Size]] = []
    original = torch._int_mm

    def checked_int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.append((a.shape, b.shape))
        assert a.dtype == b.dtype == torch.int8
        assert a.shape[0] > 16
        assert a.shape[1] % 8 == 0
        assert b.shape[1] % 8 == 0
        assert a.stride(1) == b.stride(0) == 1
        return original(a, b)

    monkeypatch.setattr(padding, "int_mm", checked_int_mm)
    for m, k, n in ((1, 4096, 64), (17, 9, 15), (16, 16, 8), (300, 8, 1)):
        for turned in (False, True):
            for dtype in (torch.int8, torch.uint8):
                a = torch.ones(m, k, dtype=dtype)
                assert int_product(a, torch.ones(k, n, dtype=torch.int8), turned=turned).eq(k).all()
    aligned = torch.ones(32, 64, dtype=torch.int8)
    shapes.clear()
    int_product(aligned, aligned.t())
    assert shapes == [((32, 64), (64, 32))]  # no padding is added to aligned operands


@pytest.mark.parametrize("m", [1, 8, 17])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (23, 40), (24, 33)])
def test_integer_products_match_the_oracle(m: int, n: int, k: int) -> None:
    for a_dtype in ("int8", "uint8"):
        exact = int_problem(m, n, k, a_dtype=a_dtype)
        scaled = replace(exact, out_dtype="bfloat16", epilogue=(Step("scale", "col", "float32"), Step("relu")))
        for problem in (exact, scaled):
            names = {name: candidate for name, candidate in legal_candidates(problem).items() if "int_mm" in name}
            assert names
            for name in names:
                check(problem, load(problem, name))


def test_int_mm_templates_are_legal_for_the_sizes_that_cuda_requires() -> None:
    assert "more than 16 rows" in illegal_reasons(int_problem(16, 64, 64))["aten/int_mm"]
    assert "multiples of 8" in illegal_reasons(int_problem(64, 60, 64))["aten/int_mm"]
    assert "aten/int_mm_t" in legal_candidates(int_problem(8, 64, 64))
    assert "16 rows or fewer" in illegal_reasons(int_problem(64, 64, 64))["aten/int_mm_t"]
    assert "nothing to pad" in illegal_reasons(int_problem(64, 64, 64))["aten/int_mm_pad[turned=False]"]
    assert "int8 x int8" in illegal_reasons(int_problem(64, 64, 64, a_dtype="uint8"))["aten/int_mm"]
    row_major = replace(int_problem(64, 64, 64), b=Operand("int8", constant=True))
    assert "column-major" in illegal_reasons(row_major)["aten/int_mm"]
    assert "column-major" in illegal_reasons(int_problem(64, 64, 64))["aten/int_mm_copy[order=row]"]
    for name in ("aten/int_mm_copy[order=col]", "aten/int_mm_pad[turned=False]"):
        check(row_major, load(row_major, name))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bits", [8, 4])
def test_upcast_templates_match_the_oracle_and_unpack(dtype: str, bits: int) -> None:
    base = weight_only_problem(3, 24, 63, bits=bits, dtype=dtype)
    for problem in (base, with_steps(base, Step("bias", "col", dtype), Step("gelu"))):
        for name in ("aten/upcast", "aten/upcast_once"):
            check(problem, load(problem, name))
    kernel, raw = load(base, "aten/upcast_once"), make_inputs(base, 3).b
    assert isinstance(raw, QuantWeight)
    unpacked = ATEN.unpack(kernel.pack(raw))
    assert torch.equal(unpacked.data, raw.data)
    assert torch.equal(unpacked.scale, raw.scale)
    assert levels(raw, torch.float64).abs().max() <= 128
    grouped = weight_only_problem(3, 24, 64, bits=bits, group=32, dtype=dtype)
    assert "one scale per output channel" in illegal_reasons(grouped)["aten/upcast"]


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
def test_what_pytorch_runs_for_int8_weights_is_right_but_for_its_rounding(scale_dtype: str) -> None:
    base = weight_only_problem(20, 48, 512)
    quant = base.b.quant
    assert quant is not None
    problem = replace(base, b=replace(base.b, quant=replace(quant, scale_dtype=scale_dtype)))
    kernel, cases = load(problem, "aten/upcast_rounded"), make_reference_cases(problem, 0)

    def run(inputs: Inputs, out: torch.Tensor) -> None:
        kernel.run(inputs.a, inputs.b, inputs.aux, out)

    assert kernel.rounding == Rounding(0, "bfloat16")
    assert verify(run, problem, cases, 0.0).kind == "wrong"
    assert verify(run, problem, cases, 0.0, rounding=kernel.rounding).ok
    assert RowCountVerifier(problem, cases).verify(run, kernel.candidate, 5.0, rounding=kernel.rounding).ok
    assert RowCountVerifier(problem, cases).verify(run, kernel.candidate, 5.0).kind == "wrong"
    inputs = cases[0].inputs
    assert isinstance(inputs.b, QuantWeight)
    expected = torch.mm(inputs.a, inputs.b.data.bfloat16()) * inputs.b.scale
    assert torch.equal(kernel.functional(inputs.a, inputs.b, ()), expected.bfloat16())


def test_norm_in_front_of_what_pytorch_runs_for_int8_weights_keeps_its_rounding() -> None:
    norm = Step("rms_norm", "inner", "bfloat16", value=1e-5)
    problem = replace(weight_only_problem(20, 48, 512), epilogue=(norm,))
    kernel = load(problem, "aten/upcast_rounded")
    assert kernel.rounding == Rounding(1, "bfloat16")
    check(problem, kernel)
    assert load(problem, "aten/upcast").rounding is None


def test_one_op_is_what_pytorch_runs_for_weight_only_problems() -> None:
    plain = weight_only_problem(20, 48, 512)
    for problem in (
        plain, plain.with_m(1), with_steps(plain, Step("gelu")), weight_only_problem(20, 48, 512, dtype="float16"),
        weight_only_problem(20, 48, 512, bits=4),
    ):  # fmt: skip
        names = [name for name in ("upcast", "upcast_rounded", "upcast_once") if is_fallback(name, problem)]
        legal = {name for name in names if f"aten/{name}" in legal_candidates(problem)}
        is_usual = problem.a.dtype == "bfloat16" and problem.b.dtype == "int8"
        assert legal == ({"upcast_rounded"} if is_usual else {"upcast"})


def test_int4pack_cuda_is_legal_for_its_sizes_and_dtypes() -> None:
    problem = weight_only_problem(1, 64, 256, bits=4, group=128)
    assert "aten/int4pack_cuda" in legal_candidates(problem)
    for other, reason in (
        (weight_only_problem(1, 64, 256, bits=4, group=128, zero_point=True), "rounded"),
        (weight_only_problem(1, 60, 256, bits=4, group=128), "multiple of 8"),
        (weight_only_problem(1, 64, 256, bits=4, group=128, dtype="float16"), "bfloat16"),
        (weight_only_problem(1, 64, 256), "takes int4"),
    ):
        assert reason in illegal_reasons(other)["aten/int4pack_cuda"]


# Templates for GPUs run on a CPU here, whose operator supports less in torch 2.10.
needs_rows = pytest.mark.skipif(
    not scaled_mm_takes_rows(), reason=f"torch {torch.__version__}: _scaled_mm takes one scale per tensor on CPUs"
)
SCALES = {"rows": ("row", "col"), "tensors": ("tensor", "tensor"), "mixed": ("row", "tensor")}


@pytest.mark.parametrize("scales", [pytest.param("rows", marks=needs_rows), "tensors", "mixed"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (31, 64), (32, 50), (1, 1)])
def test_fp8_products_match_the_oracle(scales: str, bias: bool, n: int, k: int) -> None:
    steps = tuple(Step("scale", axis, "float32") for axis in SCALES[scales])  # type: ignore[arg-type]
    problem = replace(fp8_problem(5, n, k), epilogue=steps + ((BIAS,) if bias else ()))
    names = [name for name in legal_candidates(problem) if "scaled" in name]
    assert len(names) == 1
    for name in names:
        check(problem, load(problem, name))


@needs_rows
def test_fp8_layouts_and_outputs_have_a_legal_template() -> None:
    base = fp8_problem(5, 32, 64)
    row_major = replace(base, b=Operand("float8_e4m3fn"))
    assert "column-major" in illegal_reasons(row_major)["aten/scaled_mm"]
    for problem in (row_major, replace(row_major, a=Operand("float8_e4m3fn", Layout("col")))):
        check(problem, load(problem, "aten/scaled_mm_pad"))
    assert "8.9" in illegal_reasons(base, A100)["aten/scaled_mm"]
    assert "aten/composite" in legal_candidates(base, A100)
    e5m2 = Operand("float8_e5m2")
    assert "e5m2" in illegal_reasons(replace(base, a=e5m2, b=replace(e5m2, layout=Layout("col"))))["aten/scaled_mm"]
    wide = replace(base, out_dtype="float32", epilogue=(*base.epilogue, BIAS))
    assert "no bias into float32" in illegal_reasons(wide)["aten/scaled_mm"]
    check(wide, load(wide, "aten/scaled_mm_wide"))


def test_padded_fp8_operands_have_equal_values() -> None:
    a, b = torch.randn(3, 20).to(E4M3), torch.randn(5, 20).to(E4M3).t()
    scale = torch.tensor(0.5)
    product = scaled_product(a, b, scale, scale, torch.ones(5).bfloat16(), torch.bfloat16)
    assert product.shape == (3, 5)
    torch.testing.assert_close(product.float(), a.float() @ b.float() * 0.25 + 1, rtol=1e-2, atol=1e-2)
    padded_a = padded(a, 4, 32)
    assert padded_a.dtype == E4M3
    assert padded_a[:3, :20].view(torch.uint8).equal(a.view(torch.uint8))
    assert padded_a.float().sum() == a.float().sum()


@pytest.mark.parametrize("moved", ["", "a", "b", "a scale"])
def test_fp8_operands_at_16_byte_boundaries_are_passed_on(moved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands that start off such a boundary are copied to one."""
    passed: list[Tensor] = []

    def multiply(*operands: Tensor, **_: Any) -> Tensor:
        passed.extend(operands)
        return operands[0].float() @ operands[1].float() * operands[2] * operands[3]

    def placed(values: Tensor, name: str) -> Tensor:
        storage = torch.empty(values.numel() + 32, dtype=values.dtype)
        start = -storage.data_ptr() % 16 // values.itemsize + (1 if name == moved else 0)
        return storage[start : start + values.numel()].view(values.shape).copy_(values)

    monkeypatch.setattr(padding, "scaled_mm", multiply)
    a, b = placed(torch.randn(3, 32).to(E4M3), "a"), placed(torch.randn(48, 32).to(E4M3), "b").t()
    rows, columns = placed(torch.rand(3, 1), "a scale"), placed(torch.rand(1, 48), "scale of b")
    product = scaled_product(a, b, rows, columns, None, torch.float32)
    torch.testing.assert_close(product, (a.float() @ b.float()) * rows * columns)
    assert not any(operand.data_ptr() % 16 for operand in passed)
    addresses = [operand.data_ptr() for operand in passed]
    same = [x == operand.data_ptr() for x, operand in zip(addresses, (a, b, rows, columns), strict=True)]
    assert same == [moved != "a", moved != "b", moved != "a scale", True]


@needs_rows
def test_scaled_product_pads_the_scales() -> None:
    a, b = torch.randn(3, 20).to(E4M3), torch.randn(5, 20).to(E4M3).t()
    rows, columns = torch.rand(3, 1) + 0.5, torch.rand(1, 5) + 0.5
    product = scaled_product(a, b, rows, columns, None, torch.float32)
    torch.testing.assert_close(product, (a.float() @ b.float()) * rows * columns, rtol=1e-3, atol=1e-3)


def test_scaled_product_writes_into_an_aligned_output() -> None:
    """A race times ``run``. A copy after the product would cost ATen's op races that it wins when it serves."""
    a, b = torch.randn(4, 32).to(E4M3), torch.randn(48, 32).to(E4M3).t()
    scale, storage = torch.ones(()), torch.empty(4 * 48 + 9, dtype=torch.bfloat16)
    start = -(storage.data_ptr() // 2) % 8  # elements to a boundary of 16 bytes
    out = storage[start : start + 4 * 48].view(4, 48)
    assert scaled_product(a, b, scale, scale, None, torch.bfloat16, out) is out
    torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=1e-2, atol=1e-2)
    misaligned = storage[start + 1 : start + 1 + 4 * 48].view(4, 48)
    assert scaled_product(a, b, scale, scale, None, torch.bfloat16, misaligned) is not misaligned
    narrow = torch.empty(4, 5, dtype=torch.bfloat16)
    assert scaled_product(a, b[:, :5], scale, scale, None, torch.bfloat16, narrow) is not narrow


def test_as_rows_copies_only_unsupported_strides() -> None:
    base = torch.zeros(9, 64, dtype=torch.bfloat16)
    assert as_rows(base) is base
    assert as_rows(base[:, :32]).data_ptr() == base.data_ptr()
    assert as_rows(base[:, :33]).data_ptr() == base.data_ptr()
    for view in (base.t(), base[:, 1:33], base[:, ::2]):
        copy = as_rows(view)
        assert copy.is_contiguous()
        assert copy.data_ptr() != view.data_ptr()
        assert torch.equal(copy, view)


def test_transposed_templates_are_legal_for_few_rows() -> None:
    assert "aten/mm_t" in legal_candidates(linear_problem(16, 64, 64, "bfloat16"))
    assert "transposing copy" in illegal_reasons(linear_problem(17, 64, 64, "bfloat16"))["aten/mm_t"]
    assert "aten/bmm_t" in legal_candidates(bmm_problem(2, 4, 64, 64, "bfloat16"))


class OnGpu(torch.Tensor):
    """CPU tensor whose ``is_cuda`` is true."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


BFLOAT16 = linear_problem(16, 64, 64, "bfloat16")


@pytest.mark.parametrize(("problem", "name", "keeps"), [
    (BFLOAT16, "aten/mm", True), (BFLOAT16, "aten/mm_t", False),
    (with_steps(BFLOAT16, Step("rms_norm", "inner", "bfloat16", value=1e-5)), "aten/mm", True),
    (weight_only_problem(16, 64, 64), "aten/upcast_rounded", True),
])  # fmt: skip
def test_torch_flags_are_kept_only_where_plain_pytorch_runs_the_op_and_after_they_were_asked_for(
    problem: Problem, name: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, original = torch.backends.cuda.matmul, torch.mm
    seen: list[bool] = []

    def mm(*args: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        seen.append(flags.allow_bf16_reduced_precision_reduction)
        return original(*args, **options)

    monkeypatch.setattr(torch, "mm", mm)
    kernel, inputs = load(problem, name), make_inputs(problem, 0)
    a, out = inputs.a.as_subclass(OnGpu), torch.empty(16, 64, dtype=torch.bfloat16)
    assert flags.allow_bf16_reduced_precision_reduction
    for _ in range(2):
        kernel.run(a, inputs.b, inputs.aux, out)
        kernel.keep_torch_flags()
    assert seen == [False, keeps]
    assert flags.allow_bf16_reduced_precision_reduction


NORM, GELU = Step("rms_norm", "inner", "bfloat16", value=1e-5), Step("gelu")


@pytest.mark.parametrize(("problem", "name", "product"), [
    (BFLOAT16, "aten/mm", BFLOAT16),
    (with_steps(BFLOAT16, BIAS), "aten/mm", with_steps(BFLOAT16, BIAS)),
    (with_steps(BFLOAT16, NORM, BIAS, GELU), "aten/mm_rounded", with_steps(BFLOAT16, BIAS)),
    (with_steps(BFLOAT16, Step("swiglu")), "aten/mm_rounded", BFLOAT16),
    (int_problem(32, 64, 64), "aten/int_mm", int_problem(32, 64, 64)),
    (fp8_problem(32, 64, 64), "aten/scaled_mm", fp8_problem(32, 64, 64)),
    (with_steps(weight_only_problem(16, 64, 64), GELU), "aten/upcast_rounded",
     replace(BFLOAT16, b=Operand("bfloat16", Layout("col")))),
    (BFLOAT16, "aten/mm_t", None),  # not the op that PyTorch runs
    (with_steps(BFLOAT16, GELU), "aten/mm_wide", None),
])  # fmt: skip
def test_library_chooses_an_algorithm_for_the_product_of_the_op_that_pytorch_runs(
    problem: Problem, name: str, product: Problem | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[Problem, int]]()

    def chosen(problem: Problem, m: int) -> str:
        asked.append((problem, m))
        return f"algorithm for {m}"

    monkeypatch.setattr(choice, "chosen_algorithm", chosen)
    assert load(problem, name).library_algorithm(48) == ("" if product is None else "algorithm for 48")
    assert asked == ([] if product is None else [(product, 48)])


@pytest.mark.parametrize("m", [1, 9, 16, 17, 40])
@pytest.mark.parametrize("tuned", [8, 64])
def test_kernels_tuned_at_one_m_serve_every_m(m: int, tuned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``_int_mm`` restricts M on CUDA, and a Plan picks the nearest tuned M."""
    original = torch._int_mm

    def checked_int_mm(a: torch.Tensor, b: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        assert a.shape[0] > 16
        assert a.shape[1] % 8 == b.shape[1] % 8 == 0
        return original(a, b, **options)

    for module in (padding, quantized):
        monkeypatch.setattr(module, "int_mm", checked_int_mm)
    a = torch.randint(-128, 128, (m, 64), dtype=torch.int8)
    b = torch.randint(-128, 128, (48, 64), dtype=torch.int8).t()
    expected = (a.long() @ b.long()).int()
    problem = int_problem(tuned, 48, 64)
    for name in legal_candidates(problem):
        if "int_mm" in name:
            kernel = load(problem, name)
            weight = kernel.pack(b) if kernel.packing else b
            out = torch.empty(m, 48, dtype=torch.int32)
            kernel.run(a.as_subclass(OnGpu), weight, (), out)
            assert torch.equal(out, expected)
            result = kernel.functional(a.as_subclass(OnGpu), weight, ())  # type: ignore[attr-defined]
            assert torch.equal(result.as_subclass(torch.Tensor), expected)
            assert result.is_contiguous()


def test_operands_are_converted_to_a_wide_dtype_only_where_pytorch_has_no_narrower_product() -> None:
    assert illegal_reasons(BFLOAT16)["aten/composite"] == "mm multiplies narrower operands"
    assert "int_mm_pad" in illegal_reasons(int_problem(1, 64, 64))["aten/composite"]
    weight_only = weight_only_problem(1, 64, 128)
    for name in ("aten/dequant", "aten/composite"):
        assert illegal_reasons(weight_only)[name] == "upcast_rounded multiplies narrower operands"
    assert "aten/upcast_once" in legal_candidates(weight_only)
    for problem in (
        linear_problem(4, 8, 8, "float32"),  # nothing to convert
        replace(BFLOAT16, out_dtype="float32"),  # torch.mm rounds
        weight_only_problem(1, 64, 128, bits=4, group=32, zero_point=True),
    ):
        assert "aten/composite" in legal_candidates(problem)
    assert "aten/dequant" in legal_candidates(weight_only_problem(1, 64, 128, bits=4, group=32, zero_point=True))
    assert "aten/composite" in legal_candidates(BFLOAT16, current_cpu())
