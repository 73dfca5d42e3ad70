import pytest

from gemmtune.core import workloads
from gemmtune.core.problem import Layout, Problem, Quant


def test_linear_weight_is_a_constant_column_major_operand() -> None:
    problem = workloads.linear_problem(16, 4096, 11008, "bfloat16", bias=True)
    assert problem.b.layout == Layout("col")
    assert problem.b.constant
    assert [step.key for step in problem.epilogue] == ["bias.col.bfloat16"]
    assert problem.acc == "float32"
    assert workloads.linear_problem(1, 1, 1, "float64").acc == "float64"


@pytest.mark.parametrize(
    ("name", "family", "a", "b", "out"),
    [
        ("fp64", "mm", "float64", "float64", "float64"),
        ("fp32", "mm", "float32", "float32", "float32"),
        ("bf16", "mm", "bfloat16", "bfloat16", "bfloat16"),
        ("fp16", "mm", "float16", "float16", "float16"),
        ("int8", "int_mm", "int8", "int8", "int32"),
        ("int8wo", "mixed_mm", "bfloat16", "int8", "bfloat16"),
        ("int4wo", "mixed_mm", "bfloat16", "int4", "bfloat16"),
        ("fp8", "scaled_mm", "float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
    ],
)
def test_short_dtypes_have_their_family_and_operand_dtypes(name: str, family: str, a: str, b: str, out: str) -> None:
    problem = workloads.build(3, 5, 7, name)
    assert (problem.family, problem.a.dtype, problem.b.dtype, problem.out_dtype) == (family, a, b, out)
    assert (problem.m, problem.n, problem.k) == (3, 5, 7)
    assert workloads.dtype_name(problem) == name
    assert Problem.from_dict(problem.to_dict()) == problem


def test_build_accepts_all_documented_dtypes() -> None:
    for name in workloads.DTYPES:
        workloads.build(1, 1, 1, name)


def test_weight_only_problems_have_their_quant_parameters() -> None:
    int8, int4 = workloads.build(1, 8, 256, "int8wo"), workloads.build(1, 8, 256, "int4wo")
    assert int8.b.quant == Quant(None, "bfloat16", False)
    assert int4.b.quant == Quant(128, "bfloat16", True)
    assert workloads.weight_only_problem(1, 8, 64, dtype="float32", group=32).b.quant == Quant(32, "float32", False)


def test_unknown_names_raise_value_error_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known dtypes: fp64, fp32"):
        workloads.build(1, 1, 1, "int7")
    with pytest.raises(ValueError, match="known workloads: llama, llama-small, odd, dynamic"):
        workloads.workload("lama")
    with pytest.raises(ValueError, match="bits must be 8 or 4"):
        workloads.weight_only_problem(1, 1, 1, bits=3)
    with pytest.raises(ValueError, match="bias goes with"):
        workloads.build(1, 1, 1, "int8", bias=True)


def test_llama_small_has_the_reference_shapes() -> None:
    problems = [problem for problem, _ in workloads.workload("llama-small", "int8wo")]
    assert {(p.k, p.n) for p in problems} == {(4096, 4096), (11008, 4096), (4096, 11008)}
    assert sorted({p.m for p in problems}) == [1, 4, 16, 64, 256]
    assert len(problems) == 15
    assert len(workloads.workload("llama")) == 30


@pytest.mark.parametrize("name", workloads.names())
@pytest.mark.parametrize("dtype", workloads.DTYPES)
def test_problems_of_a_workload_are_distinct(name: str, dtype: str) -> None:
    keys = [problem.key for problem, _ in workloads.workload(name, dtype)]
    assert len(set(keys)) == len(keys) > 5


def test_odd_workload_has_empty_strided_and_batched_problems() -> None:
    problems = [problem for problem, _ in workloads.workload("odd", "bf16")]
    assert {0, 1, 3, 7} <= {p.m for p in problems} | {p.n for p in problems}
    assert any((p.n, p.k, p.m) == (3073, 768, 512) for p in problems)
    assert {p.batch for p in problems if p.family == "bmm"} == {0, 1}
    assert {p.a.layout.order for p in problems} == {"row", "col"}
    assert "strided" in {p.b.layout.order for p in problems}


def test_dynamic_workload_has_many_m_in_a_repeatable_random_order() -> None:
    ms = [problem.m for problem, _ in workloads.workload("dynamic", "bf16")]
    assert (min(ms), len(set(ms))) == (1, len(ms))
    assert max(ms) > 4000
    assert ms != sorted(ms)
    assert ms == [problem.m for problem, _ in workloads.workload("dynamic", "bf16")]


def test_labels_and_dtype_names() -> None:
    assert workloads.label(workloads.build(16, 4096, 11008, "bf16", bias=True)) == "16x4096x11008 bf16 +bias"
    assert workloads.label(workloads.bmm_problem(8, 1, 2, 3, "float32")) == "8x1x2x3 fp32"
    assert workloads.dtype_name(workloads.int_problem(1, 2, 3, a_dtype="uint8")) == "uint8 x int8 -> int32"


def test_fp8_problems_equal_those_of_scaled_mm() -> None:
    import torch

    import gemmtune

    a, b = torch.zeros(3, 16).to(torch.float8_e4m3fn), torch.zeros(32, 16).to(torch.float8_e4m3fn).t()
    scalar, rows, columns = torch.ones(()), torch.ones(3, 1), torch.ones(1, 32)
    with gemmtune.record() as recording:
        gemmtune.scaled_mm(a, b, rows, columns, out_dtype=torch.bfloat16)
        gemmtune.scaled_mm(a, b, scalar, scalar, out_dtype=torch.bfloat16)
    expected = [workloads.fp8_problem(3, 32, 16), workloads.fp8_problem(3, 32, 16, rowwise=False)]
    assert [problem for problem, _ in recording.problems] == expected
