"""NVRTC through ctypes: it compiles CUDA C++ to a cubin without a GPU and without a CUDA toolkit. PyTorch's CUDA wheels
contain it."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.errors import KernelError, UnsupportedError
from ..gpu.wheels import build_of, file_of, load_first, wheel_libraries

MISSING = "NVRTC, NVIDIA's run-time compiler, was not found: pip install nvidia-cuda-nvrtc"
_NO_CACHE = "--no-cache"  # disables the driver's cache: cached kernels come without ptxas' log
_UNKNOWN_OPTION = 5  # NVRTC_ERROR_INVALID_OPTION: of NVRTC before it had a cache
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@functools.cache
def nvrtc() -> Any:
    """Return the library. Raises UnsupportedError when there is none."""
    return _declare_signatures(load_first(_library_names(), MISSING))


def _library_names() -> Iterator[str]:
    """Yield the library's possible names: absolute paths in its wheels, then the names that the linker looks up."""
    for name in _NAMES:
        yield from wheel_libraries(name)
    yield from _NAMES


def _declare_signatures(library: Any) -> Any:
    program, text = ctypes.c_void_p, ctypes.c_char_p
    names = ctypes.POINTER(text)
    library.nvrtcCreateProgram.argtypes = [ctypes.POINTER(program), text, text, ctypes.c_int, names, names]
    library.nvrtcCompileProgram.argtypes = [program, ctypes.c_int, names]
    for query in ("nvrtcGetProgramLog", "nvrtcGetCUBIN"):
        getattr(library, query).argtypes = [program, text]
        getattr(library, f"{query}Size").argtypes = [program, ctypes.POINTER(ctypes.c_size_t)]
    library.nvrtcDestroyProgram.argtypes = [ctypes.POINTER(program)]
    library.nvrtcGetErrorString.argtypes, library.nvrtcGetErrorString.restype = [ctypes.c_int], text
    return library


@functools.cache
def version() -> str:
    """Return the name of the library's file and its build, such as ``libnvrtc.so.13 (feebac3b...)``; empty without one.

    The build distinguishes releases of one minor version, which NVRTC's own version does not. A library in a wheel is
    not loaded for this, since serving a built kernel must not load a compiler.
    """
    first = next(_library_names(), "")
    if Path(first).is_absolute():
        return build_of(Path(first))
    try:
        return build_of(file_of(nvrtc().nvrtcVersion))
    except UnsupportedError:
        return ""


def compile_source(text: str, capability: tuple[int, int], arch: str = "", registers: int = 0) -> bytes:
    """Compile CUDA C++ to a cubin for one compute capability, with arch "a" including the features that only it has.

    registers: the registers with which each thread must start. Raises UnsupportedError without NVRTC. Raises
    KernelError with the compiler's message when it rejects the source, when registers do not suffice and the kernel
    would spill to memory, or when threads start with fewer than ``registers``.
    """
    library, program = nvrtc(), ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"gemmtune.cu", 0, None, None))
    try:
        major, minor = capability
        options = [f"--gpu-architecture=sm_{10 * major + minor}{arch}", "--std=c++17", "--ptxas-options=-v", _NO_CACHE]
        if registers:
            options.append(f"--maxrregcount={registers}")
        status = _compile(program, options)
        if status == _UNKNOWN_OPTION:
            options.remove(_NO_CACHE)
            status = _compile(program, options)
        log = _text(program, "nvrtcGetProgramLog").decode(errors="replace").strip("\0\n ")
        if status:
            raise KernelError(f"NVRTC cannot compile it: {_first_error(log) or _error_text(status)}")
        if "bytes spill" in log and " 0 bytes spill stores" not in log:
            raise KernelError("too many registers: it would spill to memory")
        if registers > _registers(log):
            raise KernelError(
                f"threads start with {_registers(log)} registers, and hand on what makes {registers} of each: others "
                f"would wait for them forever"
            )
        return _text(program, "nvrtcGetCUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _compile(program: ctypes.c_void_p, options: list[str]) -> int:
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    return int(nvrtc().nvrtcCompileProgram(program, len(options), arguments))


def _text(program: ctypes.c_void_p, query: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc(), f"{query}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc(), query)(program, buffer))
    return buffer.raw


def _registers(log: str) -> int:
    """Return the registers with which a thread starts, a multiple of 8, from ptxas' log."""
    return max((-(-int(used) // 8) * 8 for used in re.findall(r"Used (\d+) registers", log)), default=0)


def _first_error(log: str) -> str:
    return next((line.strip() for line in log.splitlines() if "error" in line), "")[:500]


def _error_text(status: int) -> str:
    return (nvrtc().nvrtcGetErrorString(status) or b"unknown error").decode()


def _check(status: int) -> None:
    if status:
        raise KernelError(f"NVRTC fails: {_error_text(status)}")
