"""cuBLASLt by ctypes: what of its C API (cublasLt.h, CUDA 12 and 13) products need. PyTorch's CUDA wheels bring it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...core.errors import KernelError, UnsupportedError
from ..gpu.wheels import build_of, file_of, load_first, wheel_libraries
from .product import BIAS_AT, TYPES, Matrix, Product

MISSING = "cuBLASLt was not found: it comes with PyTorch's CUDA wheels"
_TURN_A, _TURN_B, _EPILOGUE, _BIAS_TYPE, _MODE_A, _MODE_B = 3, 4, 7, 26, 31, 32  # CUBLASLT_MATMUL_DESC_*
_SOMEWHERE = 1 << 20
_BATCHES, _BATCH_STRIDE = 5, 6  # CUBLASLT_MATRIX_LAYOUT_*
_WORKSPACE, _REDUCTIONS, _ALIGNMENT_A = 1, 3, 5  # CUBLASLT_MATMUL_PREF_*; B, C and D come behind A
_IN_FLOAT = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: parts of a split K are not rounded before they are added
_NO_CONTEXT, _NOT_SUPPORTED = 1, 15  # CUBLAS_STATUS_*
_STATUS = {
    1: "not initialized", 3: "out of memory", 7: "invalid value", 8: "not for this GPU", 11: "memory mapping failed",
    13: "execution failed", 14: "internal error", 15: "not supported", 16: "licence",
}  # fmt: skip


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Ranked(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def library() -> Any:
    """The one that PyTorch uses; its functions keep the interpreter's lock, since they return at once.

    Raises UnsupportedError where there is none.
    """
    return _declared(load_first(_places(), MISSING, ctypes.PyDLL))


@functools.cache
def version() -> str:
    """Return the library's version as it says itself, such as ``130100`` for 13.1.0, and the build of its file."""
    found = library().cublasLtGetVersion
    return f"{found()} {build_of(file_of(found))}"


def _places() -> Iterator[str]:
    """What is loaded already has its name; then the wheels that it comes in."""
    major = (torch.version.cuda or "").partition(".")[0]
    if not major:
        return
    name = f"libcublasLt.so.{major}"
    yield name
    yield from wheel_libraries(name)


def _declared(found: Any) -> Any:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    found.cublasLtGetVersion.restype = size
    found.cublasLtCreate.argtypes = [pointer]
    found.cublasLtMatmulDescCreate.argtypes = [pointer, number, number]
    found.cublasLtMatrixLayoutCreate.argtypes = [pointer, number, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
    found.cublasLtMatmulPreferenceCreate.argtypes = [pointer]
    for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        getattr(found, f"cublasLt{kind}SetAttribute").argtypes = [pointer, number, pointer, size]
        getattr(found, f"cublasLt{kind}Destroy").argtypes = [pointer]
    found.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[pointer] * 7, number, pointer, pointer]
    found.cublasLtMatmulAlgoCheck.argtypes = [pointer] * 8
    found.cublasLtMatmul.argtypes = [*[pointer] * 14, size, pointer]
    return found


def check(status: int, doing: str) -> None:
    """Raises KernelError for a cublasStatus_t that is not success."""
    if status:
        raise KernelError(f"{doing}: cuBLASLt says {_STATUS.get(status, 'unknown error')} (status {status})")


@functools.cache
def handle_of(device: int) -> int:
    """The device's cublasLtHandle_t; never given back."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context current on this thread
        made = ctypes.c_void_p()
        check(library().cublasLtCreate(ctypes.byref(made)), "starting cuBLASLt")
        return int(made.value or 0)


class _Owned:
    """An object of the library's, destroyed with this one."""

    def __init__(self, kind: str, *arguments: int) -> None:
        self._kind, self._destroy = kind, getattr(library(), f"cublasLt{kind}Destroy")
        self.pointer, made = 0, ctypes.c_void_p()
        check(getattr(library(), f"cublasLt{kind}Create")(ctypes.byref(made), *arguments), f"making a {kind}")
        self.pointer = int(made.value or 0)

    def set(self, attribute: int, value: Any) -> None:
        """value: of ctypes, as wide as the attribute."""
        put = getattr(library(), f"cublasLt{self._kind}SetAttribute")
        status = put(self.pointer, attribute, ctypes.addressof(value), ctypes.sizeof(value))
        check(status, f"setting attribute {attribute} of a {self._kind}")

    def __del__(self) -> None:
        if getattr(self, "pointer", 0):
            self._destroy(self.pointer)


def _layout(matrix: Matrix) -> _Owned:
    made = _Owned("MatrixLayout", matrix.dtype, matrix.rows, matrix.columns, matrix.lead)
    if matrix.batches > 1:
        made.set(_BATCHES, ctypes.c_int32(matrix.batches))
        made.set(_BATCH_STRIDE, ctypes.c_int64(matrix.stride))
    return made


class Call:
    """One product as cuBLASLt is told of it, on one device: not for two threads at a time, alive while it runs."""

    def __init__(self, product: Product, device: int) -> None:
        self._device, self._handle = device, handle_of(device)
        self._operation = _Owned("MatmulDesc", product.compute, product.scale)
        self._operation.set(_TURN_A, ctypes.c_int32(product.turned[0]))
        self._operation.set(_TURN_B, ctypes.c_int32(product.turned[1]))
        self._operation.set(_EPILOGUE, ctypes.c_int32(product.epilogue))
        if BIAS_AT in product.pointers:
            self._operation.set(_BIAS_TYPE, ctypes.c_int32(product.d.dtype))
        if product.scaling is not None:
            self._operation.set(_MODE_A, ctypes.c_int32(product.scaling))
            self._operation.set(_MODE_B, ctypes.c_int32(product.scaling))
        self._layouts = [_layout(matrix) for matrix in (product.a, product.b, product.d)]
        one = (ctypes.c_int32 if product.scale == TYPES["int32"] else ctypes.c_float)(1)
        self._numbers = (one, type(one)(0))
        a, b, d = (layout.pointer for layout in self._layouts)
        self._descriptors = (self._handle, self._operation.pointer, a, b, d, d)
        self._place = ctypes.c_uint64()
        self._pointers: dict[int, int] = {}
        # Algorithms are asked for before there are tensors, and those with a bias or scales want to know of some.
        for attribute in product.pointers:
            self.point(attribute, _SOMEWHERE)

    def point(self, attribute: int, address: int) -> None:
        """Say where a bias or scales are."""
        if self._pointers.get(attribute) != address:
            self._place.value = address
            self._operation.set(attribute, self._place)
            self._pointers[attribute] = address

    def ranked(self, count: int, workspace: int, alignment: int) -> list[Ranked]:
        """cuBLASLt's first algorithms for it, best first, that do with so much workspace (bytes) and operands at
        multiples of ``alignment`` (bytes), and add parts of a split K up in float32."""
        wanted = _Owned("MatmulPreference")
        wanted.set(_WORKSPACE, ctypes.c_uint64(workspace))
        wanted.set(_REDUCTIONS, ctypes.c_uint32(_IN_FLOAT))
        for operand in range(4):
            wanted.set(_ALIGNMENT_A + operand, ctypes.c_uint32(alignment))
        found, there = (Ranked * count)(), ctypes.c_int()
        status = library().cublasLtMatmulAlgoGetHeuristic(
            *self._descriptors, wanted.pointer, count, ctypes.addressof(found), ctypes.addressof(there)
        )
        if status != _NOT_SUPPORTED:
            check(status, "asking cuBLASLt for its algorithms")
        usable = [item for item in found[: there.value] if item.state == 0]
        if not usable:
            raise UnsupportedError("cuBLASLt has no algorithm for this product")
        return usable

    def fits(self, algorithm: Algorithm) -> int | None:
        """The bytes of workspace that an algorithm chosen elsewhere wants here; None where it cannot be used."""
        result = Ranked()
        status = library().cublasLtMatmulAlgoCheck(
            *self._descriptors, ctypes.addressof(algorithm), ctypes.addressof(result)
        )
        return None if status or result.state else int(result.workspace)

    def runner(self, algorithm: Algorithm, workspace: int) -> Callable[[int, int, int, int, int], int]:
        """``run(a, b, d, scratch, stream)``: addresses of cuBLASLt's A, B and D, of the workspace (0: none) and the
        stream; returns a status for ``check``."""
        go, (handle, operation, a_at, b_at, d_at, _) = library().cublasLtMatmul, self._descriptors
        one, zero = map(ctypes.addressof, self._numbers)
        self._chosen, chosen = algorithm, ctypes.addressof(algorithm)

        def run(a: int, b: int, d: int, scratch: int, stream: int) -> int:
            return int(
                go(handle, operation, one, a, a_at, b, b_at, zero, d, d_at, d, d_at, chosen, scratch, workspace, stream)
            )

        return run

    def failed(self, status: int, again: Callable[[], int]) -> None:
        """Run once more where that may help; raises KernelError where cuBLASLt refuses."""
        if status == _NO_CONTEXT:  # a thread that has not used CUDA yet
            torch.cuda.current_stream(self._device).query()
            status = again()
        check(status, "multiplying")
