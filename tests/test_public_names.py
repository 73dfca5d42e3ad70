"""Public names and signatures: a change of the API needs a change of this test."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import FunctionType

import pytest

import gemmtune

NAMES = [
    "GemmtuneError", "Handle", "KernelError", "PackedWeight", "PackedWeightError", "Recording", "StoreError",
    "UnsupportedError", "WeightOnly", "WorkerError", "addmm", "bmm", "compile", "current_target", "fuse", "inductor",
    "int_mm", "linear", "mixed_mm", "mm", "nn", "optimize", "pack", "policy", "record", "refresh",
    "register_weight_only", "scaled_mm", "tune", "unpack",
]  # fmt: skip

SIGNATURES = {
    "mm": "input mat2 out_dtype epilogue out",
    "addmm": "input mat1 mat2 beta alpha out",
    "bmm": "input mat2 out",
    "linear": "input weight bias epilogue out",
    "int_mm": "self mat2 out_dtype epilogue out",
    "mixed_mm": "mat1 mat2 scale zero_point bits group_size bias out_dtype epilogue out",
    "scaled_mm": "mat1 mat2 scale_a scale_b bias scale_result out_dtype use_fast_accum",
    "pack": "weight scale zero_point bits group_size m layout",
    "tune": "model_or_problems example_inputs budget store backends progress force operands device latency search m"
    " batch config_key",
    "optimize": "model example_inputs tune memory budget store backends progress latency compare m config_key",
    "compile": "model fullgraph dynamic mode options",
}


def test_public_names_are_listed() -> None:
    assert sorted(gemmtune.__all__) == sorted(NAMES)
    assert all(getattr(gemmtune, name) is not None for name in NAMES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_have_pytorchs_order(name: str) -> None:
    assert " ".join(inspect.signature(getattr(gemmtune, name)).parameters) == SIGNATURES[name]


def _is_constructor(value: FunctionType) -> bool:
    return value.__module__ == "gemmtune.fuse" and not value.__name__.startswith("_")


def test_fuse_functions_are_listed() -> None:
    constructors = [
        name for name, value in vars(gemmtune.fuse).items() if inspect.isfunction(value) and _is_constructor(value)
    ]
    assert sorted(constructors) == sorted(
        ["bias", "add", "mul", "scale", "relu", "gelu", "silu", "clamp", "cast", "resolve"]
    )  # fmt: skip


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'matmul'"):
        gemmtune.matmul  # noqa: B018


def test_import_loads_no_heavy_module() -> None:
    code = (
        "import sys, gemmtune; early = 'torch' in sys.modules; gemmtune.mm; "
        "heavy = ('triton', 'cutlass', 'sklearn', 'plotly', 'rich', 'typer', 'sqlite3', 'msgspec', 'gemmtune.tuning', "
        "'gemmtune.workers', 'gemmtune.timing', 'gemmtune.verify', 'gemmtune.report', 'torch._dynamo'); "
        "print(early, [name for name in heavy if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "False []"
    assert process.stderr == ""
