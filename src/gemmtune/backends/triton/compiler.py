"""The compilation of a candidate to a cubin, which needs no GPU: the kernel's types and constants, Triton's compiler,
and the Header that launching needs.

Several Problems share an artifact: it depends on types, layouts and divisibility, not on sizes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.candidate import Candidate
from ...core.errors import KernelError, UnsupportedError
from ...core.problem import Problem
from ...core.target import Target
from ..gpu.artifact import Header, Tma, encode_kernel
from ..gpu.rules import (
    MAX_STEPS,
    DeviceLimits,
    aligned_leads,
    device_limits,
    float_at,
    leading_dimensions,
    step_constants,
)

TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "i8", "uint8": "u8", "int32": "i32",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5", "int4": "u8",
}  # fmt: skip
CONVERTED_ITEMS = 4096  # elements that a program converts: 16 bytes for each load of a thread
_OLDEST = (3, 6)  # the oldest Triton with which the kernels ran on a GPU; pyproject.toml has it, too
# Environment variables that name the assembler for Triton to use.
_ASSEMBLERS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
_PROMOTE = 128  # fp8 products that the matrix units add up themselves, with about 14 bits, before float32 addition
_KERNARG_SEGMENT_SIZE = re.compile(r"\.kernarg_segment_size:\s+(\d+)")
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(?:b8\s+\w+\[(?P<bytes>\d+)\]|(?P<type>[a-z]\d+)\b)")


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything that a compilation depends on.

    signature: types by argument, "constexpr" for constants. divisible: arguments known to be multiples of 16.
    before: the kernel that is launched before this one.
    """

    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, int] = field(default_factory=dict)
    before: Spec | None = None

    def key(self, capability: str, source: str) -> str:
        """Return the hex digest of everything that goes into the artifact."""
        parts = [
            self.kernel, list(self.signature.items()), sorted(self.constants.items()), self.divisible,
            sorted(self.options.items()), capability, source, triton_version(),
            None if self.before is None else self.before.key(capability, source),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def triton_version() -> str:
    """Return the version of the installed Triton, followed by the version of an assembler that replaces Triton's own,
    if the environment names one. The result is empty when there is no Triton. Triton is not imported."""
    version = _package_version()
    assemblers = [_tool_version(path) for name in _ASSEMBLERS if (path := os.environ.get(name))]
    return " with ".join((version, *assemblers)) if version else ""


def _package_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec("triton") is None:
            return ""
        import triton

        return str(triton.__version__)


def why_unusable(version: str) -> str:
    """Return why Triton of a version (``triton_version``) cannot compile the kernels and what the user can do, or
    empty.

    Older Tritons compile some of them, too. The version is compared since no kernel ran on a GPU with those.
    """
    if not version:
        return "Triton is not installed: pip install 'gemmtune[cuda]'"
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) >= _OLDEST:
        return ""
    return (
        f"needs Triton 3.6 or newer, which torch 2.10 and newer bring; Triton {version} is installed, with which "
        "gemmtune's kernels were never run"
    )


def _tool_version(path: str) -> str:
    """Return the version that an assembler reports, or the name of the error that running it raises (Triton then uses
    its own assembler)."""
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=10.0).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return type(error).__name__
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "unknown")


def make_spec(problem: Problem, candidate: Candidate) -> Spec:
    """Return the compilation of a candidate. Raises KernelError for a template that this backend does not have."""
    config = dict(candidate.config)
    if candidate.template == "tiled":
        result = _tiled_spec(problem, config)
    elif candidate.template == "persistent":
        result = _persistent_spec(problem, config, problem.b.dtype)
    elif candidate.template == "converted":
        result = replace(_persistent_spec(problem, config, problem.a.dtype), before=_conversion_spec(problem))
    else:
        templates = "tiled, persistent and converted"
        raise KernelError(f"the Triton backend has no template {candidate.template!r}; it has {templates}")
    return result


def _tiled_spec(problem: Problem, config: dict[str, Any]) -> Spec:
    signature, constants = _epilogue_arguments(problem)
    quant, batched = problem.b.quant, problem.family == "bmm"
    split = int(config["split"])
    pointers: dict[str, str | None] = {
        "a_ptr": _pointer_type(problem.a.dtype),
        "b_ptr": _pointer_type(problem.b.dtype),
        "c_ptr": _pointer_type(problem.out_dtype),
        **_split_k_pointers(problem, split > 1),
        "s_ptr": _pointer_type(quant.scale_dtype) if quant is not None else None,
        "z_ptr": _pointer_type(quant.scale_dtype) if quant is not None and quant.zero_point else None,
    }
    numbers = dict.fromkeys(("M", "N", "K", "lda", "ldb", "ldc"), "i32")
    numbers |= dict.fromkeys(("batch_a", "batch_b", "batch_c"), "i64" if batched else "0")
    _declare(signature, constants, pointers, numbers)
    group = 0 if quant is None or quant.group is None else quant.group
    if problem.b.dtype == "int4":
        group = group or problem.k
    constants |= {
        "A_COL": problem.a.layout.order == "col",
        "B_COL": problem.b.layout.order == "col" or problem.b.dtype == "int4",
        "EVEN_N": problem.n % config["bn"] == 0,
        "EVEN_K": problem.k % config["bk"] == 0,
        "SPLIT": split,
        "SWAP": bool(config["swap"]),
        "QGROUP": group,
        "PTX": True,  # compile_spec sets it to False for AMD
        **_common_constants(problem, config),
    }
    a_ok, b_ok, out_ok = aligned_leads(problem)
    divisible = ["a_ptr", "b_ptr", "c_ptr", *(["ws_ptr"] if split > 1 else [])]
    alignments = zip(("lda", "ldb", "ldc"), (a_ok, b_ok, out_ok), leading_dimensions(problem, problem.m), strict=True)
    divisible += [name for name, ok, size in alignments if ok and size % 16 == 0]
    divisible += [name for name, size in (("N", problem.n), ("K", problem.k)) if size % 16 == 0]
    return Spec(
        "tiled", _in_parameter_order("tiled", signature, constants), constants, tuple(divisible), _options(config)
    )


def _persistent_spec(problem: Problem, config: dict[str, Any], b_dtype: str) -> Spec:
    """Return the compilation of a ``persistent`` kernel. b_dtype: the dtype of B as the kernel reads it."""
    signature, constants = _epilogue_arguments(problem)
    quant = problem.b.quant
    stream = bool(config["stream"])
    pointers = {
        "c_ptr": _pointer_type(problem.out_dtype),
        **_split_k_pointers(problem, stream),
        "s_ptr": _pointer_type(quant.scale_dtype) if quant is not None else None,
    }
    numbers = dict.fromkeys(("M", "N", "K", "ldc", "PROGRAMS"), "i32")
    for name, dtype, rows in (("a_desc", problem.a.dtype, config["bm"]), ("b_desc", b_dtype, config["bn"])):
        signature[name] = f"tensordesc<{TYPES[dtype]}[{rows}, {config['bk']}]>"
    _declare(signature, constants, pointers, numbers)
    constants |= {"STREAM": stream, **_common_constants(problem, config)}
    divisible = ["c_ptr", *(["ws_ptr"] if stream else [])]
    divisible += [name for name, size in (("N", problem.n), ("K", problem.k)) if size % 16 == 0]
    divisible += ["ldc"] if aligned_leads(problem)[2] and leading_dimensions(problem, problem.m)[2] % 16 == 0 else []
    return Spec(
        "persistent",
        _in_parameter_order("persistent", signature, constants),
        constants,
        tuple(divisible),
        _options(config),
    )


def _conversion_spec(problem: Problem) -> Spec:
    """Return the compilation of the kernel that converts B to A's dtype."""
    signature = {
        "source_ptr": _pointer_type(problem.b.dtype), "target_ptr": _pointer_type(problem.a.dtype), "COUNT": "i64",
        "ITEMS": "constexpr",
    }  # fmt: skip
    options = {"num_warps": 4, "num_stages": 1}
    return Spec("convert", signature, {"ITEMS": CONVERTED_ITEMS}, ("source_ptr", "target_ptr", "COUNT"), options)


def _common_constants(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "BM": config["bm"],
        "BN": config["bn"],
        "BK": config["bk"],
        "GROUP": config["group"],
        "INTEGER": problem.family == "int_mm",
        "QUANT": {"int8": 8, "int4": 4}[problem.b.dtype] if problem.family == "mixed_mm" else 0,
        "PROMOTE": min(_PROMOTE, config["bk"]) if problem.family == "scaled_mm" else 0,
        "FLOAT_AT": float_at(problem) if problem.family == "int_mm" else MAX_STEPS + 1,
    }


def _epilogue_arguments(problem: Problem) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the types and the constants of the epilogue's arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    integers = float_at(problem) if problem.family == "int_mm" else 0
    for index in range(MAX_STEPS):
        step = problem.epilogue[index] if index < len(problem.epilogue) else None
        values = zip(("KIND", "AXIS", "VALUE", "LO", "HI"), step_constants(step, index < integers), strict=True)
        constants |= {f"{name}{index}": value for name, value in values}
        if step is not None and step.takes_tensor:
            signature[f"t{index}"] = _pointer_type(str(step.dtype))
        else:
            constants[f"t{index}"] = None
        if step is not None and step.takes_tensor and step.axis == "full":
            signature[f"ld{index}"] = "i64"
        else:
            constants[f"ld{index}"] = 0
    return signature, constants


def _declare(
    signature: dict[str, str], constants: dict[str, Any], pointers: dict[str, str | None], numbers: dict[str, str]
) -> None:
    for name, type_ in pointers.items():
        if type_ is None:
            constants[name] = None
        else:
            signature[name] = type_
    for name, type_ in numbers.items():
        if type_ == "0":
            constants[name] = 0
        else:
            signature[name] = type_


def _in_parameter_order(kernel: str, signature: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    """Return the signature in the order of the kernel's parameters."""
    return {name: "constexpr" if name in constants else signature[name] for name in ARGUMENTS[kernel]}


_STEP_NAMES = tuple(f"{name}{index}" for index in range(MAX_STEPS) for name in ("KIND", "AXIS", "VALUE", "LO", "HI"))
# The kernels' parameters in kernels.py (a test compares them). That module is imported only in order to compile.
ARGUMENTS = {
    "tiled": (
        "a_ptr", "b_ptr", "c_ptr", "ws_ptr", "lock_ptr", "s_ptr", "z_ptr", "t0", "t1", "t2", "t3", "t4",
        "M", "N", "K", "lda", "ldb", "ldc", "batch_a", "batch_b", "batch_c", "ld0", "ld1", "ld2", "ld3", "ld4",
        "A_COL", "B_COL", "EVEN_N", "EVEN_K", "BM", "BN", "BK", "GROUP", "SPLIT", "SWAP", "INTEGER", "QUANT",
        "QGROUP", "PTX", "PROMOTE", "FLOAT_AT", *_STEP_NAMES,
    ),
    "persistent": (
        "a_desc", "b_desc", "c_ptr", "ws_ptr", "lock_ptr", "s_ptr", "t0", "t1", "t2", "t3", "t4", "M", "N", "K", "ldc",
        "ld0", "ld1", "ld2", "ld3", "ld4", "PROGRAMS", "BM", "BN", "BK", "GROUP", "STREAM", "INTEGER", "QUANT",
        "PROMOTE", "FLOAT_AT", *_STEP_NAMES,
    ),
    "convert": ("source_ptr", "target_ptr", "COUNT", "ITEMS"),
}  # fmt: skip


def _split_k_pointers(problem: Problem, shares_tiles: bool) -> dict[str, str | None]:
    """Return the types of the workspace and semaphore pointers, through which programs that share a tile exchange
    partial sums; None where programs do not share tiles."""
    if not shares_tiles:
        return {"ws_ptr": None, "lock_ptr": None}
    return {
        "ws_ptr": _pointer_type("int32" if problem.family == "int_mm" else "float32"),
        "lock_ptr": _pointer_type("int32"),
    }


def _pointer_type(dtype: str) -> str:
    return f"*{TYPES[dtype]}"


def _options(config: dict[str, Any]) -> dict[str, int]:
    return {"num_warps": int(config["warps"]), "num_stages": int(config["stages"])}


def gpu_target(target: Target) -> Any:
    """Return Triton's description of a GPU."""
    from triton.backends.compiler import GPUTarget

    device = device_limits(target)
    if device.arch:
        return GPUTarget("hip", device.arch, device.warp)
    return GPUTarget("cuda", 10 * device.capability[0] + device.capability[1], device.warp)


def compile_spec(compilation: Spec, target: Target) -> bytes:
    """Return the artifact: for each kernel in launch order the length of its Header's JSON, the JSON, and its cubin.

    Raises UnsupportedError without Triton 3.6 or newer, KernelError when the compiler fails.
    """
    reason = why_unusable(triton_version())
    if reason:
        raise UnsupportedError(reason)
    import triton
    from triton.compiler import ASTSource

    from . import kernels

    function = getattr(kernels, compilation.kernel)
    indices = {name: index for index, name in enumerate(function.arg_names)}
    attributes = {(indices[name],): [["tt.divisibility", 16]] for name in compilation.divisible}
    device = device_limits(target)
    constants = compilation.constants
    if device.arch:
        constants = {**constants, "PTX": False}
    source = ASTSource(fn=function, signature=compilation.signature, constexprs=constants, attrs=attributes)
    options = {**compilation.options, "enable_fp_fusion": True}  # Triton 3.10 will not fuse unless asked to
    try:
        compiled = triton.compile(source, target=gpu_target(target), options=options)
    except Exception as error:  # Triton's compiler has no exception class of its own
        raise KernelError(f"Triton cannot compile it: {_last_line(error)}") from error
    cubin = bytes(compiled.asm["hsaco" if device.arch else "cubin"])
    preceding = compile_spec(compilation.before, target) if compilation.before is not None else b""
    return preceding + encode_kernel(_header(compilation, compiled, len(cubin), device), cubin)


def _header(compilation: Spec, compiled: Any, size: int, device: DeviceLimits) -> Header:
    """Return the kernel's Header, from its code and Triton's metadata. Raises KernelError for a kernel that cannot be
    launched through the driver as this package does it."""
    metadata = compiled.metadata
    if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
        raise KernelError("it wants scratch memory of Triton's own")
    descriptors = [name for name, type_ in compilation.signature.items() if type_.startswith("tensordesc")]
    metas = list(getattr(metadata, "tensordesc_meta", None) or [])
    if len(metas) != len(descriptors) or any(meta is None for meta in metas):
        raise KernelError("Triton passes its descriptors in a way that is not known here")
    arguments: list[str] = []
    for name, type_ in compilation.signature.items():
        if name in descriptors:  # the descriptor, its shape and its strides
            arguments += [name, *(f"{name}.{part}" for part in ("shape0", "shape1", "stride0", "stride1"))]
        elif type_ != "constexpr":
            arguments.append(name)
    if device.arch:
        scratch = _amd_scratch(compiled.asm["amdgcn"], [compilation.signature[name] for name in arguments])
    else:
        scratch = len(_entry_parameters(compiled.asm["ptx"])) - len(arguments)
    if scratch < 0:
        raise KernelError(
            f"the kernel takes {len(arguments) + scratch} parameters where {len(arguments)} were expected"
        )
    return Header(
        str(metadata.name),
        size,
        int(metadata.shared),
        int(metadata.num_warps),
        tuple(arguments),
        scratch,
        {name: _tma_descriptor(meta) for name, meta in zip(descriptors, metas, strict=True)},
        lanes=device.warp,
        arch=device.arch,
    )


def _tma_descriptor(meta: Any) -> Tma:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if meta["fp4_padded"]:
        raise KernelError("no padded fp4 descriptors")
    dtype = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    block = tuple(int(x) for x in meta["block_size"])
    return Tma(int(meta["swizzle"]), int(meta["elem_size"]), int(dtype), block)


def _entry_parameters(ptx: str) -> list[str]:
    """Return the parameters that the kernel's entry declares."""
    entry = ptx[ptx.index(".entry") :]
    return [match[0] for match in _PARAM.finditer(entry[: entry.index(")")])]


def _amd_scratch(code: str, kinds: list[str]) -> int:
    """Return how many pointers a code object's kernel takes after its arguments of these types; -1 where the sizes do
    not agree."""
    match, offset = _KERNARG_SEGMENT_SIZE.search(code), 0
    for type_ in kinds:
        size = 8 if type_.startswith("*") or type_ == "i64" else 4
        offset = -(-offset // size) * size + size
    remaining = (int(match[1]) if match else -1) - -(-offset // 8) * 8
    return remaining // 8 if remaining >= 0 and remaining % 8 == 0 else -1


def _last_line(error: Exception) -> str:
    """Return the cause of an error in one line: Triton's messages begin with quoted source, and a caret below it."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip(" ^")]
    return f"{type(cause).__name__}: {lines[-1] if lines else ''}"[:500]
