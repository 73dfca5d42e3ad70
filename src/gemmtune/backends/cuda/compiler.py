"""NVRTC by ctypes: from CUDA C++ to a cubin, with no GPU and no CUDA toolkit. PyTorch's CUDA wheels bring it."""

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
_NO_CACHE = "--no-cache"  # of the driver: from it kernels come without what ptxas says of them
_UNKNOWN_OPTION = 5  # NVRTC_ERROR_INVALID_OPTION: NVRTC before it cached
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@functools.cache
def nvrtc() -> Any:
    """The library. Raises UnsupportedError when there is none."""
    return _declared(load_first(_places(), MISSING))


def _places() -> Iterator[str]:
    """Where it may be: in the wheels it comes in (absolute paths), where the linker looks."""
    for name in _NAMES:
        yield from wheel_libraries(name)
    yield from _NAMES


def _declared(library: Any) -> Any:
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
    """Return the file that the library is, and its build, such as ``libnvrtc.so.13 (feebac3b...)``; empty without one.

    The build tells releases of one minor version apart, which NVRTC itself does not. A library of a wheel is not loaded
    for that: serving what was built loads no compiler.
    """
    first = next(_places(), "")
    if Path(first).is_absolute():
        return build_of(Path(first))
    try:
        return build_of(file_of(nvrtc().nvrtcVersion))
    except UnsupportedError:
        return ""


def compile_source(text: str, capability: tuple[int, int], arch: str = "", registers: int = 0) -> bytes:
    """The cubin of CUDA C++ for one compute capability, with ("a") what it alone has.

    registers: what a thread must start with. Raises UnsupportedError without NVRTC, KernelError with what the compiler
    says when it refuses, when registers do not suffice and the kernel would spill to memory, or when threads start with
    fewer.
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
        said = _text(program, "nvrtcGetProgramLog").decode(errors="replace").strip("\0\n ")
        if status:
            raise KernelError(f"NVRTC cannot compile it: {_first_error(said) or _words(status)}")
        if "bytes spill" in said and " 0 bytes spill stores" not in said:
            raise KernelError("too many registers: it would spill to memory")
        if registers > _handed_out(said):
            raise KernelError(
                f"threads start with {_handed_out(said)} registers, and hand on what makes {registers} of each: others "
                f"would wait for them forever"
            )
        return _text(program, "nvrtcGetCUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _compile(program: ctypes.c_void_p, options: list[str]) -> int:
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    return int(nvrtc().nvrtcCompileProgram(program, len(options), given))


def _text(program: ctypes.c_void_p, query: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc(), f"{query}Size")(program, ctypes.byref(size)))
    held = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc(), query)(program, held))
    return held.raw


def _handed_out(said: str) -> int:
    """Registers a thread starts with, which come in eights, by what ptxas says."""
    return max((-(-int(used) // 8) * 8 for used in re.findall(r"Used (\d+) registers", said)), default=0)


def _first_error(said: str) -> str:
    return next((line.strip() for line in said.splitlines() if "error" in line), "")[:500]


def _words(status: int) -> str:
    return (nvrtc().nvrtcGetErrorString(status) or b"unknown error").decode()


def _check(status: int) -> None:
    if status:
        raise KernelError(f"NVRTC fails: {_words(status)}")
