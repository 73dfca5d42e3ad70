"""Verification of the Triton kernels in Triton's interpreter, on the CPU.

test_triton.py starts it with TRITON_INTERPRET=1. The interpreter (3.6) multiplies bfloat16 as if it were integers, and
truncates to it instead of rounding: float16 replaces bfloat16 here, and tests/gpu tests bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from gemmtune.backends.aten.steps import apply_steps, normalize_rows
from gemmtune.backends.gpu.int4 import shuffle_int4
from gemmtune.backends.gpu.rules import leading_dimensions, why_no_gpu_kernel
from gemmtune.backends.triton import kernels
from gemmtune.backends.triton.compiler import make_spec
from gemmtune.backends.triton.conversion import Conversion
from gemmtune.backends.triton.pointwise import pointwise_of
from gemmtune.backends.triton.row_norm import RowNorm
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import GATES, Epilogue, Step
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.weights import QuantWeight
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, int_problem, weight_only_problem
from gemmtune.verify.inputs import Inputs
from gemmtune.verify.verify import make_reference_cases, verify
from helpers.integers import exact_cases, rounding_cases


def tiled(bm: int = 16, bn: int = 64, bk: int = 64, split: int = 1, swap: int = 0) -> Candidate:
    return Candidate.make("triton", "tiled", bm=bm, bn=bn, bk=bk, split=split, swap=swap, group=2, stages=3, warps=4)


def persistent(stream: int = 0, bk: int = 64, template: str = "persistent") -> Candidate:
    config = {"bm": 64, "bn": 64, "bk": bk, "group": 2, "stages": 3, "warps": 4, "stream": stream}
    return Candidate.make("triton", template, **config)


def cases() -> Iterator[tuple[Problem, Candidate]]:
    fp16_problem = build(5, 96, 160, "fp16")
    for split, swap in ((1, 0), (2, 0), (1, 1), (3, 1)):
        yield fp16_problem, tiled(split=split, swap=swap)
        yield int_problem(5, 96, 160), tiled(split=split, swap=swap)
    yield build(35, 70, 75, "fp16"), tiled()  # no size is a multiple of a tile's
    yield build(35, 70, 75, "fp16"), tiled(swap=1)
    yield replace(build(20, 64, 96, "fp16"), a=Operand("float16", Layout("col"))), tiled()
    yield replace(build(20, 64, 96, "fp16"), b=Operand("float16", Layout("row"))), tiled(split=1)
    yield bmm_problem(3, 20, 40, 64, "float16"), tiled()
    yield bmm_problem(2, 20, 40, 256, "float16"), tiled(split=2)
    yield build(70, 130, 128, "fp16"), persistent()
    yield int_problem(70, 130, 128), persistent()
    for m, n, k in ((70, 130, 160), (200, 130, 64), (20, 190, 600), (400, 70, 136), (130, 320, 72)):
        yield build(m, n, k, "fp16"), persistent(stream=1)
    yield int_problem(70, 130, 160), persistent(stream=1)
    yield weight_only_problem(70, 96, 160, dtype="float16"), persistent(stream=1)
    yield fp8_problem(5, 64, 256, out_dtype="float32"), tiled(bk=128, swap=1)
    yield fp8_problem(5, 64, 256, rowwise=False, out_dtype="float16"), tiled(bk=128)
    yield weight_only_problem(5, 96, 256, dtype="float16"), tiled()
    yield weight_only_problem(5, 96, 256, dtype="float16"), tiled(split=2)
    yield weight_only_problem(70, 96, 256, dtype="float16"), persistent()
    yield weight_only_problem(200, 96, 272, dtype="float16"), persistent(template="converted")
    yield weight_only_problem(5, 96, 256, group=64, dtype="float16"), tiled()
    yield weight_only_problem(5, 96, 256, group=64, zero_point=True, dtype="float16"), tiled(split=2)
    for group, zero in ((128, False), (64, False), (None, False), (128, True)):
        yield weight_only_problem(5, 64, 256, bits=4, group=group, zero_point=zero, dtype="float16"), tiled(bk=128)
    yield weight_only_problem(5, 64, 512, bits=4, group=128, dtype="float16"), tiled(bk=256, split=2)
    yield weight_only_problem(5, 64, 256, bits=4, group=128, dtype="float16"), tiled(bk=256)
    epilogues = (
        (Step("bias", "col", "float16"), Step("gelu_tanh")),
        (Step("scale", "row", "float32"), Step("add", "full", "float16", value=0.5), Step("silu")),
        (Step("scale", "tensor", value=0.25), Step("relu"), Step("mul", "full", "float16")),
        (Step("gelu"), Step("clamp", lo=-0.5, hi=2.0), Step("cast", dtype="float16")),
    )
    for steps in epilogues:
        yield replace(fp16_problem, epilogue=steps), tiled(swap=1)
        yield replace(build(70, 130, 128, "fp16"), epilogue=steps), persistent()
        yield replace(build(70, 130, 160, "fp16"), epilogue=steps), persistent(stream=1)
    requantised = (Step("scale", "col", "float32"), Step("bias", "col", "float32"))
    yield replace(int_problem(5, 96, 160), epilogue=requantised, out_dtype="int8"), tiled()
    yield replace(int_problem(5, 96, 160), epilogue=requantised, out_dtype="float16"), tiled(split=2)
    yield replace(int_problem(5, 96, 160), epilogue=(Step("bias", "col", "int32"), Step("relu"))), tiled()


def run(problem: Problem, candidate: Candidate, inputs: Inputs, out: Tensor) -> None:
    """Run one interpreted launch with the constants that compiling would use."""
    spec = make_spec(problem, candidate)
    config = dict(candidate.config)
    grid: tuple[int, ...]
    a, b = inputs.a, inputs.b
    if candidate.template != "tiled":  # TMA needs 16-byte alignment; kernel.py copies misaligned operands
        a = a.clone(memory_format=torch.contiguous_format)
    quant_tensors: tuple[Tensor, ...] = ()
    if problem.b.dtype == "int4":
        packed = shuffle_int4(b, problem, int(config["bk"]))  # type: ignore[arg-type]
        raw, quant_tensors = packed.data[0], packed.data[1:]
    else:
        raw = b.data if isinstance(b, QuantWeight) else b
        if isinstance(b, QuantWeight):
            quant_tensors = (b.scale,) if b.zero_point is None else (b.scale, b.zero_point)
    if candidate.template != "tiled":
        raw = torch.empty_strided(raw.shape, raw.stride(), dtype=raw.dtype).copy_(raw)
    lda, ldb, ldc = leading_dimensions(problem, problem.m)
    values: dict[str, Any] = {
        "a_ptr": a, "b_ptr": raw, "c_ptr": out, "M": problem.m, "N": problem.n, "K": problem.k, "lda": lda, "ldb": ldb,
        "ldc": ldc, "s_ptr": quant_tensors[0] if quant_tensors else None,
        "z_ptr": quant_tensors[1] if len(quant_tensors) > 1 else None,
        "batch_a": a.stride(0), "batch_b": raw.stride(0), "batch_c": out.stride(0),
    }  # fmt: skip
    tensors = iter(inputs.aux)
    for index, step in enumerate(problem.epilogue):
        if step.takes_tensor:
            values[f"t{index}"] = next(tensors)
            values[f"ld{index}"] = problem.n
    if spec.before is not None:
        raw, count = torch.full((problem.n, problem.k), 77, dtype=a.dtype).t(), problem.n * problem.k
        grid = (-(-count // spec.before.constants["ITEMS"]),)
        kernels.convert[grid](b.data, raw, count, **spec.before.constants)  # type: ignore[union-attr]
    tiles = -(-problem.m // config["bm"]) * -(-problem.n // config["bn"])
    sums = torch.int32 if problem.family == "int_mm" else torch.float32
    # The numbers of slots for partial sums and of counters are those of kernel.py.
    slots, counters = tiles * problem.batch * config.get("split", 1), tiles * problem.batch
    if candidate.template == "tiled":
        grid = (tiles * config["split"], problem.batch)
    else:
        programs = 5 if config["stream"] else min(3, tiles)
        slots, counters = 2 * programs, 2 * programs
        blocks = ([config["bm"], config["bk"]], [config["bn"], config["bk"]])
        values["a_desc"] = TensorDescriptor(a, [problem.m, problem.k], [lda, 1], blocks[0])
        values["b_desc"] = TensorDescriptor(raw.t(), [problem.n, problem.k], [ldb, 1], blocks[1])
        values["PROGRAMS"] = programs
        grid = (programs,)
    values["ws_ptr"] = torch.full((slots * config["bm"] * config["bn"],), 77, dtype=sums)
    values["lock_ptr"] = torch.zeros(counters, dtype=torch.int32)
    arguments = {name: values[name] for name, kind in spec.signature.items() if kind != "constexpr"}
    getattr(kernels, spec.kernel)[grid](**arguments, **spec.constants)
    assert not values["lock_ptr"].any(), "a kernel left its counters"


def patch_interpreter() -> None:
    """Patch the interpreter: Triton 3.6 calls int() on arrays, which numpy 2.4 refuses, and has no NaN of fp8."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    convert = interpreter._convert_float

    def with_nan(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        """Convert fp8's NaN to NaN, which the interpreter converts to a number."""
        result = convert(values, source, target, rounding)
        if source.primitive_bitwidth == 8:
            raw = np.frombuffer(values.tobytes(), dtype=np.uint8) & 0x7F
            nan = (raw == 0x7F) if source.fp_mantissa_width == 3 else (raw > 0x7C)
            bits = (1 << (target.primitive_bitwidth - 1)) - 1
            result = np.where(nan.reshape(result.shape), np.array(bits, dtype=result.dtype), result)
        return result

    interpreter._convert_float = with_nan


def main() -> None:
    """Verify all cases. Raise an AssertionError that names the first wrong one."""
    patch_interpreter()
    count = 0
    for problem, candidate in cases():
        reason = why_no_gpu_kernel(problem)
        assert not reason, f"{problem.key}: {reason}"
        test_cases = make_reference_cases(problem, 0)

        def launch(inputs: Inputs, out: Tensor, problem: Problem = problem, candidate: Candidate = candidate) -> None:
            run(problem.with_m(inputs.a.shape[-2]), candidate, inputs, out)

        verdict = verify(launch, problem, test_cases, time_limit_s=0.0)
        assert verdict.ok, f"{candidate.id} on {problem.key}: {verdict.kind} {verdict.detail}"
        count += 1
    for swap in (0, 1):
        for name, problem, inputs, expected in exact_cases(5, 40):
            out = torch.empty_like(expected)
            run(problem, tiled(swap=swap), inputs, out)
            assert torch.equal(out, expected), f"{name}: {out} {expected}"
            count += 1
        for problem, inputs, expected in rounding_cases(8, 40, 64):
            out = torch.full_like(expected, 77)
            run(problem, tiled(swap=swap), inputs, out)
            assert torch.equal(out, expected), f"{problem.out_dtype}: {out} {expected}"
            count += 1
    count += check_pointwise() + check_row_norm() + check_conversion()
    print(f"{count} problems right")


def check_pointwise() -> int:
    """Compare the kernel of an epilogue's steps with ATen's operators. Return the number of epilogues."""
    bias, scales = Step("bias", "col", "float32"), Step("scale", "row", "float32")
    epilogues: tuple[tuple[Step, ...], ...] = (
        (bias, Step("gelu")), (Step("silu"), Step("mul", "full", "float16"), Step("relu")), (Step("swiglu"),),
        (scales, Step("scale", "col", "float32"), Step("add", "full", "float16", value=0.5)),
        (scales, bias, Step("geglu_tanh")), (Step("clamp", lo=-0.5), Step("geglu")),
        (Step("scale", "tensor", value=3.0), Step("cast", dtype="float16"), Step("add", "tensor", "float32")),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for steps in epilogues:
        for acc_dtype in ("float32", "float16", "int32"):
            for m, n in ((1, 24), (5, 1500), (70, 40)):
                gated = steps[-1].kind in GATES
                wide = 2 * n if gated else n
                shapes = {"col": (wide,), "row": (m,), "full": (m, wide), "tensor": (1,)}
                acc = (4 * torch.randn(m, wide, generator=generator)).to(getattr(torch, acc_dtype))
                aux = [
                    torch.randn(shapes[s.axis], generator=generator).to(getattr(torch, str(s.dtype)))
                    for s in steps
                    if s.takes_tensor
                ]
                kernel = pointwise_of(steps, acc_dtype, "float16")
                assert kernel is not None
                out = torch.full((m, n), 77.0, dtype=torch.float16)
                kernel.launch(acc, aux, out)
                expected = apply_steps(acc.float(), steps, aux).half()
                assert torch.allclose(out.float(), expected.float(), atol=2e-3, rtol=2e-3), (steps, acc_dtype, m, n)
    return len(epilogues)


def check_row_norm() -> int:
    """Compare the kernels of norms with ATen's operators. Return the number of comparisons."""
    shapes = ((1, 20), (3, 1000), (5, 4096), (2, 5000))
    norm, bias = Step("layer_norm", "inner", "float32", value=1e-3), Step("norm_bias", "inner", "float32")
    norms: list[Epilogue] = [(Step("rms_norm", "inner", "float32", value=1e-3),), (norm,), (norm, bias)]
    generator = torch.Generator().manual_seed(1)
    for (m, k), steps in itertools.product(shapes, norms):
        a = (torch.randn(m, k + 3, generator=generator) + 0.7).half()[:, :k]  # rows that are not next to one another
        tensors = [torch.randn(k, generator=generator) for _ in steps]
        out = torch.full((m, k), 77.0, dtype=torch.float16)
        RowNorm(steps[0].kind, 1e-3).launch(a, tensors, out)
        expected = normalize_rows(a, steps, tensors)
        assert torch.allclose(out.float(), expected.float(), atol=2e-3, rtol=2e-3), (m, k, steps)
    return len(shapes) * len(norms)


def check_conversion() -> int:
    """Compare the kernel that converts a weight with ``Tensor.to``. Return the number of weights."""
    generator = torch.Generator().manual_seed(2)
    for k, n in ((1, 1), (7, 24), (128, 96)):
        for source in (
            torch.randint(-128, 128, (k, n), generator=generator, dtype=torch.int8),
            torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8).t(),
        ):
            target = torch.empty_like(source, dtype=torch.float16).fill_(0.5)
            Conversion().launch(source, target)
            assert torch.equal(target, source.half()), (k, n)
    return 6
