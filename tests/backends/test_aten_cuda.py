"""What ATen offers on a GPU: who is listed and why not, and the arithmetic of it all on CPU tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtune.backends.aten import AtenBackend, padding, quantized
from gemmtune.backends.aten.cpu_rules import scaled_mm_takes_rows
from gemmtune.backends.aten.cuda_narrow import levels
from gemmtune.backends.aten.padding import as_rows, int_product, padded, scaled_product
from gemmtune.backends.base import Artifact, Kernel
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target, current_cpu
from gemmtune.core.weights import QuantWeight
from gemmtune.core.workloads import bmm_problem, fp8_problem, int_problem, linear_problem, weight_only_problem
from gemmtune.verify.inputs import Inputs, make_inputs
from gemmtune.verify.verify import make_reference_cases, verify

ATEN = AtenBackend()
H200 = Target("cuda", "H200", "9.0", caches=(232448, 0, 62914560), cores=132)
A100 = replace(H200, name="A100", capability="8.0")
E4M3 = torch.float8_e4m3fn


def legal(problem: Problem, target: Target = H200) -> dict[str, Candidate]:
    return {one.id: one for one in ATEN.candidates(problem, target) if isinstance(one, Candidate)}


def reasons(problem: Problem, target: Target = H200) -> dict[str, str]:
    return {one.candidate.id: one.reason for one in ATEN.candidates(problem, target) if isinstance(one, Illegal)}


def load(problem: Problem, name: str) -> Kernel:
    return ATEN.load(Artifact(legal(problem)[name], ""), problem)


def check(problem: Problem, kernel: Kernel) -> None:
    """The kernel's arithmetic, on CPU operands, by the rules every candidate is checked by; and ``fresh`` is dense."""

    def run(inputs: Inputs, out: torch.Tensor) -> None:
        kernel.run(inputs.a, kernel.pack(inputs.b) if kernel.packing else inputs.b, inputs.aux, out)

    verdict = verify(run, problem, make_reference_cases(problem, 1))
    assert verdict.ok, f"{kernel.candidate.id} on {problem.key}: {verdict}"
    if "_pad" in kernel.candidate.template:
        inputs = make_inputs(problem, 5)
        weight = kernel.pack(inputs.b) if kernel.packing else inputs.b
        assert kernel.functional(inputs.a, weight, inputs.aux).is_contiguous()  # type: ignore[attr-defined]


def with_steps(problem: Problem, *steps: Step) -> Problem:
    return replace(problem, epilogue=steps)


BIAS = Step("bias", "col", "bfloat16")


def test_templates_that_only_cpus_have_are_not_listed() -> None:
    assert "aten/mkldnn" not in reasons(linear_problem(16, 64, 64, "bfloat16"))
    assert "aten/int4pack" not in reasons(weight_only_problem(1, 64, 128, bits=4, group=32))


def test_int8pack_is_refused_where_it_reads_the_weight_for_every_row() -> None:
    assert "once for every row" in reasons(weight_only_problem(17, 64, 128))["aten/int8pack"]
    assert "aten/int8pack" in legal(weight_only_problem(16, 64, 128))


def test_what_only_gpus_have_is_not_mentioned_on_a_cpu() -> None:
    cpu = current_cpu()
    for problem in (linear_problem(16, 63, 65, "bfloat16"), int_problem(3, 9, 9), weight_only_problem(3, 8, 16)):
        named = {*legal(problem, cpu), *reasons(problem, cpu)}
        for name in ("mm_wide", "addmm_act", "mm_pad", "int_mm_pad", "upcast", "scaled_mm_pad"):
            assert not any(name in candidate for candidate in named)


def test_every_problem_has_a_candidate_and_its_plain_form_is_what_users_run() -> None:
    plain = {
        linear_problem(1, 64, 64, "bfloat16", bias=True): "aten/mm",
        int_problem(64, 64, 64): "aten/int_mm",
        int_problem(1, 64, 64): "aten/int_mm_pad[turned=False]",
        weight_only_problem(1, 64, 128): "aten/upcast",
        weight_only_problem(1, 64, 128, bits=4, group=32, zero_point=True): "aten/composite",
        fp8_problem(16, 64, 64): "aten/scaled_mm",
        fp8_problem(16, 63, 64): "aten/scaled_mm_pad",
        bmm_problem(2, 3, 8, 8, "float16"): "aten/bmm",
    }
    for problem, name in plain.items():
        assert ATEN.default_candidate(problem, H200).id == name
        assert name == "aten/composite" or next(iter(legal(problem))) == name
    assert ATEN.default_candidate(weight_only_problem(1, 64, 128)).id == "aten/int8pack"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 5])
def test_products_from_the_wide_accumulator(dtype: str, m: int) -> None:
    base = linear_problem(m, 24, 48, dtype)
    assert "rounded to the operands' dtype at once" in reasons(base)["aten/mm_wide"]
    scaled = with_steps(base, Step("scale", "row", "float32"), Step("gelu"), Step("add", "full", dtype))
    for problem in (scaled, replace(base, out_dtype="float32")):
        check(problem, load(problem, "aten/mm_wide"))
    batches = with_steps(bmm_problem(3, m, 10, 12, dtype), Step("silu"))
    check(batches, load(batches, "aten/bmm_wide"))
    assert (
        "bfloat16 and float16" in reasons(with_steps(linear_problem(m, 8, 8, "float32"), Step("silu")))["aten/mm_wide"]
    )


def test_fused_activations() -> None:
    base = linear_problem(5, 24, 48, "bfloat16")
    relu = with_steps(base, BIAS, Step("relu"))
    check(relu, load(relu, "aten/addmm_act"))
    doubled = with_steps(base, Step("scale", "tensor", value=0.5), BIAS, Step("relu"))
    check(doubled, load(doubled, "aten/addmm_act"))
    assert "aten/addmm_act" in legal(with_steps(base, BIAS, Step("gelu_tanh")))
    for steps in ((BIAS,), (BIAS, Step("gelu")), (Step("relu"),), (Step("bias", "col", "float32"), Step("relu"))):
        assert "aten/addmm_act" in reasons(with_steps(base, *steps))
    assert (
        "rounds to bfloat16"
        in reasons(with_steps(base, BIAS, Step("relu"), Step("mul", "full", "bfloat16")))["aten/addmm_act"]
    )


@pytest.mark.parametrize(("n", "k"), [(23, 48), (24, 47), (9, 7), (1, 1)])
@pytest.mark.parametrize("order", ["row", "col"])
def test_padded_products(n: int, k: int, order: str) -> None:
    base = linear_problem(5, n, k, "bfloat16")
    base = replace(base, b=replace(base.b, layout=Layout(order)))  # type: ignore[arg-type]
    for problem in (base, with_steps(base, BIAS, Step("silu")), replace(base, out_dtype="float32")):
        for name in ("aten/mm_pad", "aten/mm_pad_copy"):
            kernel = load(problem, name)
            check(problem, kernel)
    raw = make_inputs(base, 3).b
    packed = load(base, "aten/mm_pad_copy").pack(raw)
    assert packed.data[0].shape == (-(-k // 16) * 16, -(-n // 16) * 16)
    back = ATEN.unpack(packed)
    assert torch.equal(back, raw)
    assert back.stride() == raw.stride()  # type: ignore[union-attr]
    assert "nothing to pad" in reasons(linear_problem(5, 24, 48, "bfloat16"))["aten/mm_pad"]
    changing = replace(base, b=replace(base.b, constant=False))
    assert "not constant" in reasons(changing)["aten/mm_pad_copy"]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 20), st.integers(0, 40), st.integers(0, 20), st.sampled_from((torch.int8, torch.uint8)),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_int_products_of_all_sizes(
    m: int, k: int, n: int, dtype: torch.dtype, turned: bool, flip_a: bool, flip_b: bool
) -> None:
    info = torch.iinfo(dtype)
    a = torch.randint(info.min, info.max + 1, (k, m) if flip_a else (m, k), dtype=dtype)
    b = torch.randint(-128, 128, (n, k) if flip_b else (k, n), dtype=torch.int8)
    a, b = a.t() if flip_a else a, b.t() if flip_b else b
    got = int_product(a, b, turned=turned)
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), a.long() @ b.long())


def test_int_products_stay_within_cudas_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Size, torch.Size]] = []
    real = torch._int_mm

    def strict(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((a.shape, b.shape))
        assert a.dtype == b.dtype == torch.int8
        assert a.shape[0] > 16
        assert a.shape[1] % 8 == 0
        assert b.shape[1] % 8 == 0
        assert a.stride(1) == b.stride(0) == 1
        return real(a, b)

    monkeypatch.setattr(padding, "int_mm", strict)
    for m, k, n in ((1, 4096, 64), (17, 9, 15), (16, 16, 8), (300, 8, 1)):
        for turned in (False, True):
            for dtype in (torch.int8, torch.uint8):
                a = torch.ones(m, k, dtype=dtype)
                assert int_product(a, torch.ones(k, n, dtype=torch.int8), turned=turned).eq(k).all()
    aligned = torch.ones(32, 64, dtype=torch.int8)
    seen.clear()
    int_product(aligned, aligned.t())
    assert seen == [((32, 64), (64, 32))]  # nothing is added where nothing is missing


@pytest.mark.parametrize("m", [1, 8, 17])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (23, 40), (24, 33)])
def test_integers(m: int, n: int, k: int) -> None:
    for a_dtype in ("int8", "uint8"):
        exact = int_problem(m, n, k, a_dtype=a_dtype)
        scaled = replace(exact, out_dtype="bfloat16", epilogue=(Step("scale", "col", "float32"), Step("relu")))
        for problem in (exact, scaled):
            found = {name: one for name, one in legal(problem).items() if "int_mm" in name}
            assert found
            for name in found:
                check(problem, load(problem, name))


def test_the_rules_of_int_mm_on_cuda() -> None:
    assert "more than 16 rows" in reasons(int_problem(16, 64, 64))["aten/int_mm"]
    assert "multiples of 8" in reasons(int_problem(64, 60, 64))["aten/int_mm"]
    assert "aten/int_mm_t" in legal(int_problem(8, 64, 64))
    assert "16 rows or fewer" in reasons(int_problem(64, 64, 64))["aten/int_mm_t"]
    assert "nothing to pad" in reasons(int_problem(64, 64, 64))["aten/int_mm_pad[turned=False]"]
    assert "int8 x int8" in reasons(int_problem(64, 64, 64, a_dtype="uint8"))["aten/int_mm"]
    row_major = replace(int_problem(64, 64, 64), b=Operand("int8", constant=True))
    assert "column-major" in reasons(row_major)["aten/int_mm"]
    assert "column-major" in reasons(int_problem(64, 64, 64))["aten/int_mm_copy[order=row]"]
    for name in ("aten/int_mm_copy[order=col]", "aten/int_mm_pad[turned=False]"):
        check(row_major, load(row_major, name))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bits", [8, 4])
def test_integers_widened_exactly(dtype: str, bits: int) -> None:
    base = weight_only_problem(3, 24, 63, bits=bits, dtype=dtype)
    for problem in (base, with_steps(base, Step("bias", "col", dtype), Step("gelu"))):
        for name in ("aten/upcast", "aten/upcast_once"):
            check(problem, load(problem, name))
    kernel, raw = load(base, "aten/upcast_once"), make_inputs(base, 3).b
    assert kernel.reduced  # type: ignore[attr-defined]
    assert isinstance(raw, QuantWeight)
    back = ATEN.unpack(kernel.pack(raw))
    assert torch.equal(back.data, raw.data)
    assert torch.equal(back.scale, raw.scale)
    assert levels(raw, torch.float64).abs().max() <= 128
    grouped = weight_only_problem(3, 24, 64, bits=bits, group=32, dtype=dtype)
    assert "one scale per output channel" in reasons(grouped)["aten/upcast"]


def test_int4_on_cuda_has_its_own_form() -> None:
    problem = weight_only_problem(1, 64, 256, bits=4, group=128)
    assert "aten/int4pack_cuda" in legal(problem)
    for other, word in (
        (weight_only_problem(1, 64, 256, bits=4, group=128, zero_point=True), "rounded"),
        (weight_only_problem(1, 60, 256, bits=4, group=128), "multiple of 8"),
        (weight_only_problem(1, 64, 256, bits=4, group=128, dtype="float16"), "bfloat16"),
        (weight_only_problem(1, 64, 256), "takes int4"),
    ):
        assert word in reasons(other)["aten/int4pack_cuda"]


# What runs on GPUs runs here on a CPU, whose operator takes less in torch 2.10.
needs_rows = pytest.mark.skipif(
    not scaled_mm_takes_rows(), reason=f"torch {torch.__version__}: _scaled_mm takes one scale per tensor on CPUs"
)
SCALES = {"rows": ("row", "col"), "tensors": ("tensor", "tensor"), "mixed": ("row", "tensor")}


@pytest.mark.parametrize("scales", [pytest.param("rows", marks=needs_rows), "tensors", "mixed"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (31, 64), (32, 50), (1, 1)])
def test_fp8(scales: str, bias: bool, n: int, k: int) -> None:
    steps = tuple(Step("scale", axis, "float32") for axis in SCALES[scales])  # type: ignore[arg-type]
    problem = replace(fp8_problem(5, n, k), epilogue=steps + ((BIAS,) if bias else ()))
    found = [name for name in legal(problem) if "scaled" in name]
    assert len(found) == 1
    for name in found:
        check(problem, load(problem, name))


@needs_rows
def test_fp8_of_any_layout_and_output() -> None:
    base = fp8_problem(5, 32, 64)
    row_major = replace(base, b=Operand("float8_e4m3fn"))
    assert "column-major" in reasons(row_major)["aten/scaled_mm"]
    for problem in (row_major, replace(row_major, a=Operand("float8_e4m3fn", Layout("col")))):
        check(problem, load(problem, "aten/scaled_mm_pad"))
    assert "8.9" in reasons(base, A100)["aten/scaled_mm"]
    assert "aten/composite" in legal(base, A100)
    e5m2 = Operand("float8_e5m2")
    assert "e5m2" in reasons(replace(base, a=e5m2, b=replace(e5m2, layout=Layout("col"))))["aten/scaled_mm"]
    wide = replace(base, out_dtype="float32", epilogue=(*base.epilogue, BIAS))
    assert "no bias into float32" in reasons(wide)["aten/scaled_mm"]
    check(wide, load(wide, "aten/scaled_mm_wide"))


def test_padding_fp8_keeps_the_values() -> None:
    a, b = torch.randn(3, 20).to(E4M3), torch.randn(5, 20).to(E4M3).t()
    one = torch.tensor(0.5)
    got = scaled_product(a, b, one, one, torch.ones(5).bfloat16(), torch.bfloat16)
    assert got.shape == (3, 5)
    torch.testing.assert_close(got.float(), a.float() @ b.float() * 0.25 + 1, rtol=1e-2, atol=1e-2)
    bigger = padded(a, 4, 32)
    assert bigger.dtype == E4M3
    assert bigger[:3, :20].view(torch.uint8).equal(a.view(torch.uint8))
    assert bigger.float().sum() == a.float().sum()


@needs_rows
def test_padding_fp8_pads_the_scales() -> None:
    a, b = torch.randn(3, 20).to(E4M3), torch.randn(5, 20).to(E4M3).t()
    rows, columns = torch.rand(3, 1) + 0.5, torch.rand(1, 5) + 0.5
    got = scaled_product(a, b, rows, columns, None, torch.float32)
    torch.testing.assert_close(got, (a.float() @ b.float()) * rows * columns, rtol=1e-3, atol=1e-3)


def test_fp8_products_are_written_where_they_belong() -> None:
    """A race times ``run``: with a copy behind it ATen's own op would lose races that it wins where it serves."""
    a, b = torch.randn(4, 32).to(E4M3), torch.randn(48, 32).to(E4M3).t()
    one, place = torch.ones(()), torch.empty(4 * 48 + 9, dtype=torch.bfloat16)
    start = -(place.data_ptr() // 2) % 8  # elements to a boundary of 16 bytes
    out = place[start : start + 4 * 48].view(4, 48)
    assert scaled_product(a, b, one, one, None, torch.bfloat16, out) is out
    torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=1e-2, atol=1e-2)
    off = place[start + 1 : start + 1 + 4 * 48].view(4, 48)
    assert scaled_product(a, b, one, one, None, torch.bfloat16, off) is not off
    narrow = torch.empty(4, 5, dtype=torch.bfloat16)
    assert scaled_product(a, b[:, :5], one, one, None, torch.bfloat16, narrow) is not narrow


def test_rows_are_copied_only_when_they_must_be() -> None:
    base = torch.zeros(9, 64, dtype=torch.bfloat16)
    assert as_rows(base) is base
    assert as_rows(base[:, :32]).data_ptr() == base.data_ptr()
    assert as_rows(base[:, :33]).data_ptr() == base.data_ptr()
    for view in (base.t(), base[:, 1:33], base[:, ::2]):
        copy = as_rows(view)
        assert copy.is_contiguous()
        assert copy.data_ptr() != view.data_ptr()
        assert torch.equal(copy, view)


def test_few_rows_turned_around() -> None:
    assert "aten/mm_t" in legal(linear_problem(16, 64, 64, "bfloat16"))
    assert "transposing copy" in reasons(linear_problem(17, 64, 64, "bfloat16"))["aten/mm_t"]
    assert "aten/bmm_t" in legal(bmm_problem(2, 4, 64, 64, "bfloat16"))


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize("m", [1, 9, 16, 17, 40])
@pytest.mark.parametrize("tuned", [8, 64])
def test_kernels_tuned_at_one_m_serve_every_m(m: int, tuned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``_int_mm`` has rules about M on CUDA, and a Plan picks the nearest M."""
    real = torch._int_mm

    def strict(a: torch.Tensor, b: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        assert a.shape[0] > 16
        assert a.shape[1] % 8 == b.shape[1] % 8 == 0
        return real(a, b, **more)

    for module in (padding, quantized):
        monkeypatch.setattr(module, "int_mm", strict)
    a = torch.randint(-128, 128, (m, 64), dtype=torch.int8)
    b = torch.randint(-128, 128, (48, 64), dtype=torch.int8).t()
    wanted = (a.long() @ b.long()).int()
    problem = int_problem(tuned, 48, 64)
    for name in legal(problem):
        if "int_mm" in name:
            kernel = load(problem, name)
            weight = kernel.pack(b) if kernel.packing else b
            out = torch.empty(m, 48, dtype=torch.int32)
            kernel.run(a.as_subclass(OnGpu), weight, (), out)
            assert torch.equal(out, wanted)
            fresh = kernel.functional(a.as_subclass(OnGpu), weight, ())  # type: ignore[attr-defined]
            assert torch.equal(fresh.as_subclass(torch.Tensor), wanted)
            assert fresh.is_contiguous()
