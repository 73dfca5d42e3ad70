"""The oracle against loops and torch, and its error bounds against measured errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gemmtune.core import devices
from gemmtune.core.epilogue import Kind, Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.weights import QuantWeight
from gemmtune.verify import oracle
from gemmtune.verify.inputs import Inputs, make_inputs
from gemmtune.verify.oracle import reference, to_integer
from gemmtune.verify.verify import make_reference_cases, verify


def float_problem(
    m: int, n: int, k: int, dtype: str = "float32", epilogue: tuple[Step, ...] = (), acc: str = "float32"
) -> Problem:
    return Problem("mm", m, n, k, Operand(dtype), Operand(dtype, Layout("col")), dtype, epilogue, acc=acc)


def integer_problem(m: int, n: int, k: int, epilogue: tuple[Step, ...] = (), out: str = "int32") -> Problem:
    return Problem("int_mm", m, n, k, Operand("int8"), Operand("int8"), out, epilogue, acc="int32")


def test_reference_matches_a_triple_loop() -> None:
    problem = float_problem(3, 4, 5)
    inputs = make_inputs(problem, 1)
    value = reference(problem, inputs.a, inputs.b).value
    for i in range(3):
        for j in range(4):
            terms = [float(inputs.a[i, k]) * float(inputs.b[k, j]) for k in range(5)]
            assert float(value[i, j]) == pytest.approx(math.fsum(terms), rel=1e-12)


def test_magnitude_is_the_product_of_absolute_values() -> None:
    problem = float_problem(5, 7, 33, "bfloat16")
    inputs = make_inputs(problem, 2)
    magnitude = reference(problem, inputs.a, inputs.b).magnitude
    torch.testing.assert_close(magnitude, inputs.a.float().abs() @ inputs.b.float().abs(), rtol=1e-5, atol=0.0)


def test_blocks_of_columns_do_not_change_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = float_problem(4, 100, 64)
    inputs = make_inputs(problem, 3)
    single = reference(problem, inputs.a, inputs.b)
    monkeypatch.setattr(oracle, "_BLOCK_BYTES", 8 * 64 * 16)
    blocked = reference(problem, inputs.a, inputs.b)
    torch.testing.assert_close(single.value, blocked.value, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(single.magnitude, blocked.magnitude)


NORM = Step("rms_norm", "inner", "bfloat16", value=1e-5)


def test_norm_in_front_of_a_product() -> None:
    problem = float_problem(4, 6, 33, "bfloat16", (NORM, Step("bias", "col", "bfloat16")))
    inputs = make_inputs(problem, 1)
    a, (gain, bias) = inputs.a.double(), (t.double() for t in inputs.aux)
    assert isinstance(inputs.b, torch.Tensor)
    expected = (a / (a.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain) @ inputs.b.double() + bias
    torch.testing.assert_close(reference(problem, inputs.a, inputs.b, inputs.aux).value, expected)


LAYER_NORM = (Step("layer_norm", "inner", "bfloat16", value=1e-5), Step("norm_bias", "inner", "bfloat16"))


@pytest.mark.parametrize("steps", [LAYER_NORM, LAYER_NORM[:1]], ids=["biased", "no bias"])
def test_layer_norm_in_front_of_a_product(steps: tuple[Step, ...]) -> None:
    problem = float_problem(4, 6, 33, "bfloat16", (*steps, Step("bias", "col", "bfloat16")))
    inputs = make_inputs(problem, 1)
    a, tensors = inputs.a.double(), [t.double() for t in inputs.aux]
    assert isinstance(inputs.b, torch.Tensor)
    shift = tensors[1] if len(steps) > 1 else None
    normed = torch.nn.functional.layer_norm(a, (33,), tensors[0], shift, 1e-5)
    expected = normed @ inputs.b.double() + tensors[-1]
    torch.testing.assert_close(reference(problem, inputs.a, inputs.b, inputs.aux).value, expected)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("nothing", False), ("no mean", True), ("no gain", True), ("no bias", True), ("no eps", True),
        ("half of the row", True),
    ],
)  # fmt: skip
def test_wrong_layer_norms_are_outside_of_the_bound(wrong: str, found: bool) -> None:
    problem = replace(float_problem(5, 48, 512, "bfloat16", LAYER_NORM), b=Operand("bfloat16", Layout("col"), True))

    def run(inputs: Inputs, out: torch.Tensor) -> None:
        a, gain, bias = (t.float() for t in (inputs.a, *inputs.aux))
        assert isinstance(inputs.b, torch.Tensor)
        used = a[:, ::2] if wrong == "half of the row" else a
        mean = 0.0 if wrong == "no mean" else used.mean(1, keepdim=True)
        eps = 0.0 if wrong == "no eps" else 1e-5
        normed = (a - mean) * torch.rsqrt((used - mean).square().mean(1, keepdim=True) + eps)
        normed = normed * (1.0 if wrong == "no gain" else gain) + (0.0 if wrong == "no bias" else bias)
        out.copy_(normed.bfloat16().float() @ inputs.b.float())

    verdict = verify(run, problem, make_reference_cases(problem, 0), time_limit_s=0.0)
    assert verdict.ok != found, verdict.detail


def test_layer_norm_of_rows_far_from_zero_is_within_the_bound() -> None:
    """A mean in float32 has an error that is large beside the row's small differences."""
    problem = float_problem(4, 24, 256, "float32", (replace(LAYER_NORM[0], dtype="float32"),))
    inputs = make_inputs(problem, 1)
    a = inputs.a * 1e-3 + 1000.0
    assert isinstance(inputs.b, torch.Tensor)
    exact = reference(problem, a, inputs.b, inputs.aux)
    result = torch.nn.functional.layer_norm(a, (256,), inputs.aux[0], None, 1e-5) @ inputs.b
    error = (result.double() - exact.value).abs()
    assert (error > 1e-4).any()
    assert (error <= exact.magnitude * exact.unit).all()


@pytest.mark.parametrize(
    ("wrong", "found"),
    [("nothing", False), ("no gain", True), ("no factor", True), ("no eps", True), ("a last element", True)],
)
def test_wrong_norms_are_outside_of_the_bound(wrong: str, found: bool) -> None:
    problem = replace(float_problem(5, 48, 512, "bfloat16", (NORM,)), b=Operand("bfloat16", Layout("col"), True))

    def run(inputs: Inputs, out: torch.Tensor) -> None:
        a, gain = inputs.a.float(), inputs.aux[0].float()
        assert isinstance(inputs.b, torch.Tensor)
        b = inputs.b.float()
        factor = torch.rsqrt(a.square().mean(1, keepdim=True) + (0.0 if wrong == "no eps" else 1e-5))
        if wrong == "a last element":
            b[-1] = 0.0
        scaled = (a * (1.0 if wrong == "no gain" else gain)).bfloat16().float()
        out.copy_(scaled @ b * (1.0 if wrong == "no factor" else factor))

    verdict = verify(run, problem, make_reference_cases(problem, 0), time_limit_s=0.0)
    assert verdict.ok != found, verdict.detail


def test_norm_of_rows_whose_squares_exceed_float32_accepts_every_result() -> None:
    problem = float_problem(2, 3, 16, "bfloat16", (NORM,))
    inputs = make_inputs(problem, 1)
    inputs.a[0] *= 2.0**70
    magnitude = reference(problem, inputs.a, inputs.b, inputs.aux).magnitude
    assert magnitude[0].isinf().all()
    assert magnitude[1].isfinite().all()


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_tanh"])
def test_gate_multiplies_the_halves_of_the_columns(kind: Kind) -> None:
    problem = float_problem(4, 10, 33, "float32", (Step("bias", "col", "float32"), Step(kind)))
    inputs = make_inputs(problem, 1)
    assert isinstance(inputs.b, torch.Tensor)
    acc = inputs.a.double() @ inputs.b.double() + inputs.aux[0].double()
    activation = torch.nn.functional.silu if kind == "swiglu" else torch.nn.functional.gelu
    options = {"approximate": "tanh"} if kind == "geglu_tanh" else {}
    expected = activation(acc[:, :5], **options) * acc[:, 5:]
    oracle = reference(problem, inputs.a, inputs.b, inputs.aux)
    torch.testing.assert_close(oracle.value, expected)
    assert oracle.magnitude.shape == (4, 5)
    assert oracle.magnitude.isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "found"), [("nothing", False), ("swapped halves", True), ("no activation", True), ("a column", True)]
)
def test_wrong_gates_are_outside_of_the_bound(wrong: str, found: bool) -> None:
    problem = float_problem(5, 48, 64, "bfloat16", (Step("swiglu"),))

    def run(inputs: Inputs, out: torch.Tensor) -> None:
        assert isinstance(inputs.b, torch.Tensor)
        gate, value = (inputs.a.float() @ inputs.b.float()).chunk(2, 1)
        if wrong == "swapped halves":
            gate, value = value, gate
        out.copy_((gate if wrong == "no activation" else torch.nn.functional.silu(gate)) * value)
        if wrong == "a column":
            out[:, -1] = 0.0

    verdict = verify(run, problem, make_reference_cases(problem, 0), time_limit_s=0.0)
    assert verdict.ok != found, verdict.detail


def test_integer_reference_is_exact_and_wraps_as_int32() -> None:
    problem = integer_problem(2, 3, 4000)
    inputs = make_inputs(problem, 4)
    assert isinstance(inputs.b, torch.Tensor)
    result = reference(problem, inputs.a, inputs.b)
    assert torch.equal(result.value, inputs.a.long() @ inputs.b.long())
    big = torch.full((1, 140_000), -128, dtype=torch.int8)
    wrapped = reference(integer_problem(1, 1, 140_000), big, big.t()).value
    assert int(wrapped) == (140_000 * 2**14 + 2**31) % 2**32 - 2**31


def test_int64_reference_uses_integer_products() -> None:
    problem = Problem("mm", 2, 2, 3, Operand("int64"), Operand("int64"), "int64", acc="int64")
    a = torch.tensor([[2**40, 1, 1], [1, 1, 2**52 + 1]])
    b = torch.tensor([[2**15 + 1, 0], [0, 1], [1, 1]])
    assert torch.equal(reference(problem, a, b).value, a @ b)


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize(("dtype", "k"), [("int8", 70), ("int4", 70), ("int4", 71)])
@pytest.mark.parametrize("zero_point", [False, True])
def test_reference_of_quantised_weights(dtype: str, k: int, group: int | None, zero_point: bool) -> None:
    quant = Quant(group, "float32", zero_point)
    problem = Problem("mixed_mm", 3, 5, k, Operand("bfloat16"), Operand(dtype, Layout("col"), quant=quant), "bfloat16")
    inputs = make_inputs(problem, 5)
    weight = inputs.b
    assert isinstance(weight, QuantWeight)
    dense = torch.zeros(k, 5, dtype=torch.float64)
    for row in range(k):
        stored = weight.data[row // 2 if dtype == "int4" else row].long()
        code = (stored >> (4 * (row % 2))) & 15 if dtype == "int4" else stored
        index = (row // group,) if group else ()
        zero = weight.zero_point[index].double() if weight.zero_point is not None else (8.0 if dtype == "int4" else 0.0)
        dense[row] = (code - zero) * weight.scale[index].double()
    torch.testing.assert_close(reference(problem, inputs.a, weight).value, inputs.a.double() @ dense)


def test_reference_applies_epilogue_steps_in_order() -> None:
    steps = (
        Step("scale", "row", "float32"),
        Step("bias", "col", "bfloat16", value=0.5),
        Step("gelu_tanh"),
        Step("mul", "full", "float32"),
        Step("scale", "tensor", "float32", value=2.0),
        Step("add", "full", "bfloat16", value=-1.5),
        Step("scale", "tensor", value=0.25),
        Step("silu"),
        Step("gelu"),
        Step("clamp", lo=-0.1, hi=0.4),
        Step("relu"),
    )
    problem = float_problem(4, 6, 8, epilogue=steps)
    inputs = make_inputs(problem, 6)
    row, col, mul, scalar, add = (tensor.double() for tensor in inputs.aux)
    expected = inputs.a.double() @ inputs.b.double()  # type: ignore[union-attr]
    expected = (
        torch.nn.functional.gelu(expected * row[:, None] + 0.5 * col, approximate="tanh") * mul * 2.0 * scalar
        - 1.5 * add
    )
    expected = torch.nn.functional.gelu(torch.nn.functional.silu(expected * 0.25)).clamp(-0.1, 0.4).relu()
    torch.testing.assert_close(reference(problem, inputs.a, inputs.b, inputs.aux).value, expected)


def test_batches_share_the_epilogue_tensors() -> None:
    steps = (Step("scale", "row", "float32"), Step("add", "full", "float32"))
    problem = Problem("bmm", 3, 4, 5, Operand("float32"), Operand("float32"), "float32", steps, batch=2)
    inputs = make_inputs(problem, 7)
    assert isinstance(inputs.b, torch.Tensor)
    row, full = (t.double() for t in inputs.aux)
    expected = (inputs.a.double() @ inputs.b.double()) * row[:, None] + full
    torch.testing.assert_close(reference(problem, inputs.a, inputs.b, inputs.aux).value, expected)


def test_reference_of_k_zero_is_the_epilogue_of_zero() -> None:
    problem = float_problem(2, 3, 0, epilogue=(Step("bias", "col", "float32"),))
    inputs = make_inputs(problem, 8)
    result = reference(problem, inputs.a, inputs.b, inputs.aux)
    assert torch.equal(result.value, inputs.aux[0].double().expand(2, 3))


def test_to_integer_rounds_half_to_even_and_saturates() -> None:
    assert to_integer(torch.tensor([0.5, 1.5, -2.5, 200.0, -200.0]).double(), "int8").tolist() == [0, 2, -2, 127, -128]


def test_integer_epilogues_are_exact_without_a_float_step() -> None:
    exact = integer_problem(2, 3, 64, (Step("bias", "col", "int32"), Step("relu"), Step("cast", dtype="int8")))
    inputs = make_inputs(exact, 9)
    result = reference(exact, inputs.a, inputs.b, inputs.aux)
    assert float(result.magnitude.max()) == 0.0
    scaled = replace(exact, epilogue=(Step("scale", "tensor", value=0.01),), out_dtype="float32")
    assert float(reference(scaled, inputs.a, inputs.b).magnitude.min()) > 0.0


def test_bound_of_an_integer_cast_is_nonzero_only_near_a_tie() -> None:
    problem = integer_problem(1, 2, 1, (Step("scale", "tensor", value=0.1), Step("cast", dtype="int8")), out="int8")
    a = torch.tensor([[1]], dtype=torch.int8)
    result = reference(problem, a, torch.tensor([[25, 24]], dtype=torch.int8))  # 2.5 is a tie, 2.4 is not
    assert result.value.tolist() == [[2.0, 2.0]]
    assert (result.magnitude * result.unit).round().tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("k", [1, 64, 4096])
def test_error_bound_holds_for_a_sequential_float32_sum(dtype: str, k: int) -> None:
    problem = float_problem(4, 16, k, dtype)
    a, b = torch.rand(4, k), torch.rand(k, 16)  # one sign: the worst case for a sequential sum
    a, b = a.to(getattr(torch, dtype)), b.to(getattr(torch, dtype))
    result = reference(problem, a, b)
    total = torch.zeros(4, 16)
    for i in range(k):
        total += a[:, i : i + 1].float() * b[i : i + 1].float()
    assert bool(((total.double() - result.value).abs() <= result.magnitude.double() * result.unit).all())


def hopper_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A [M, K] @ B [K, N], both in float64, as float32 with the sums of an H200's tensor cores.

    A tensor core adds up to 16 float16 products. It aligns them by the operands' encoded exponents (-14 for a
    subnormal), and truncates them 25 bits below the largest.
    """

    def exponent(tensor: torch.Tensor) -> torch.Tensor:
        return (torch.frexp(tensor).exponent - 1).clamp(min=-14).double()

    products = a[:, :, None] * b[None]
    aligned = torch.where(products == 0, -1000.0, exponent(a)[:, :, None] + exponent(b)[None])
    last = torch.exp2(aligned.amax(1, keepdim=True) - 25)
    mantissa, power = torch.frexp((torch.trunc(products / last) * last).sum(1))
    return (torch.trunc(mantissa * 2**24) * torch.exp2(power.double() - 24)).float()


@pytest.mark.parametrize("scaled_operand", ["a", "b"])
def test_error_bound_holds_for_tensor_cores_with_subnormals(
    scaled_operand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(float_problem(200, 300, 5, "float16"), out_dtype="float32")
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(200, 5, generator=generator), torch.randn(5, 300, generator=generator)
    a, b = (
        (a * 2.0**-16).half() if scaled_operand == "a" else a.half(),
        (b * 2.0**-16).half() if scaled_operand == "b" else b.half(),
    )
    a[:, 0], b[0] = 0.0, 30000.0  # times 0 it raises no exponent
    on_cpu = reference(problem, a, b)
    monkeypatch.setattr(devices.HostDevice, "aligns_fp16_products", True)  # as for a GPU
    result = reference(problem, a, b)
    gap = (hopper_matmul(a.double(), b.double()).double() - result.value).abs() - 2.0**-24 * result.value.abs()
    magnitude = a.double().abs() @ b.double().abs()
    assert float((gap / (magnitude * result.unit)).max()) > 1.0  # the bound by the values' magnitudes does not hold
    assert bool((gap <= result.magnitude.double() * result.unit).all())
    normal = (a[:, 1:].abs() >= 2.0**-14).all(1)[:, None] & (b.abs() >= 2.0**-14).all(0)
    assert bool((result.magnitude[normal].double() <= 1.001 * magnitude[normal]).all())
    assert bool((on_cpu.magnitude.double() <= 1.001 * magnitude).all())


def test_large_problems_use_certified_float32_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "_FULL_ROWS", 8)
    monkeypatch.setattr(oracle, "_FULL_FLOPS", 1.0)
    problem = float_problem(40, 50, 300)
    inputs = make_inputs(problem, 10)
    assert isinstance(inputs.b, torch.Tensor)
    exact = inputs.a.double() @ inputs.b.double()
    result = reference(problem, inputs.a, inputs.b)
    assert result.value.dtype == torch.float32
    torch.testing.assert_close(result.value.double(), exact, rtol=1e-4, atol=1e-4)


def test_no_problem_is_large_for_float64_on_a_gpu() -> None:
    problem = float_problem(4096, 4096, 4096)
    assert oracle.is_large(problem, torch.device("cpu"))
    assert not oracle.is_large(problem, torch.device("cuda"))
    assert not oracle.is_large(replace(problem, m=256), torch.device("cpu"))


def test_wrong_float32_block_is_recomputed() -> None:
    class WrongProduct(torch.Tensor):
        """Matrix whose float32 products have one wrong element."""

        def __matmul__(self, other: torch.Tensor) -> torch.Tensor:
            result = self.as_subclass(torch.Tensor) @ other
            if result.dtype == torch.float32:
                result[3, 2] += 0.1
            return result

    a, block = torch.randn(20, 128), torch.randn(128, 30, dtype=torch.float64)
    magnitude = a.double().abs() @ block.abs()
    unit = oracle.error_unit(float_problem(20, 30, 128))
    found = oracle._certified(a.as_subclass(WrongProduct), block, magnitude, unit)
    torch.testing.assert_close(found.as_subclass(torch.Tensor).double(), a.double() @ block, rtol=1e-4, atol=1e-4)


def test_unknown_accumulator_raises_value_error() -> None:
    with pytest.raises(ValueError, match="accumulator 'posit8'"):
        reference(float_problem(1, 1, 1, acc="posit8"), torch.ones(1, 1), torch.ones(1, 1))
