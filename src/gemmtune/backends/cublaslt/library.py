"""cuBLASLt through ctypes: the part of its C API (cublasLt.h, CUDA 12 and 13) that products need. PyTorch's CUDA wheels
contain the library."""

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
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_TYPE, _MODE_A, _MODE_B = 3, 4, 7, 26, 31, 32  # CUBLASLT_MATMUL_DESC_*
_PLACEHOLDER_ADDRESS = 1 << 20
_BATCHES = 5  # CUBLASLT_MATRIX_LAYOUT_*
_FIELDS = {"rows": 2, "columns": 3, "lead": 4, "stride": 6}  # CUBLASLT_MATRIX_LAYOUT_*, all of 64 bits
_WORKSPACE, _REDUCTIONS, _ALIGNMENT_A = 1, 3, 5  # CUBLASLT_MATMUL_PREF_*; B, C and D follow A
# With this scheme the partial sums of a split-K product are not rounded before they are added.
_REDUCE_IN_COMPUTE_TYPE = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
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
    """Return the library that PyTorch uses. Its functions do not release the interpreter's lock, since they return at
    once.

    Raises UnsupportedError where there is none.
    """
    return _declare_signatures(load_first(_library_names(), MISSING, ctypes.PyDLL))


@functools.cache
def version() -> str:
    """Return the version that the library reports, such as ``130100`` for 13.1.0, and the build of its file."""
    get_version = library().cublasLtGetVersion
    return f"{get_version()} {build_of(file_of(get_version))}"


def _library_names() -> Iterator[str]:
    """Yield the library's name, which selects a library that is loaded already, then its paths in the wheels."""
    major = (torch.version.cuda or "").partition(".")[0]
    if not major:
        return
    name = f"libcublasLt.so.{major}"
    yield name
    yield from wheel_libraries(name)


def _declare_signatures(library: Any) -> Any:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.cublasLtGetVersion.restype = size
    library.cublasLtCreate.argtypes = [pointer]
    library.cublasLtMatmulDescCreate.argtypes = [pointer, number, number]
    library.cublasLtMatrixLayoutCreate.argtypes = [pointer, number, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
    library.cublasLtMatmulPreferenceCreate.argtypes = [pointer]
    for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        getattr(library, f"cublasLt{kind}SetAttribute").argtypes = [pointer, number, pointer, size]
        getattr(library, f"cublasLt{kind}Destroy").argtypes = [pointer]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[pointer] * 7, number, pointer, pointer]
    library.cublasLtMatmulAlgoCheck.argtypes = [pointer] * 8
    library.cublasLtMatmul.argtypes = [*[pointer] * 14, size, pointer]
    return library


def check(status: int, action: str) -> None:
    """Raise KernelError for a cublasStatus_t that is not success."""
    if status:
        raise KernelError(f"{action}: cuBLASLt says {_STATUS.get(status, 'unknown error')} (status {status})")


@functools.cache
def handle_of(device: int) -> int:
    """Return the device's cublasLtHandle_t, which is never destroyed."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context current on this thread
        handle = ctypes.c_void_p()
        check(library().cublasLtCreate(ctypes.byref(handle)), "starting cuBLASLt")
        return int(handle.value or 0)


class _LibraryObject:
    """A cuBLASLt object (descriptor, layout or preference), which is destroyed with this Python object."""

    def __init__(self, kind: str, *arguments: int) -> None:
        self._kind, self._destroy = kind, getattr(library(), f"cublasLt{kind}Destroy")
        self.pointer, pointer = 0, ctypes.c_void_p()
        check(getattr(library(), f"cublasLt{kind}Create")(ctypes.byref(pointer), *arguments), f"making a {kind}")
        self.pointer = int(pointer.value or 0)

    def set(self, attribute: int, value: Any) -> None:
        """Set an attribute. value: a ctypes value of the attribute's size."""
        set_attribute = getattr(library(), f"cublasLt{self._kind}SetAttribute")
        status = set_attribute(self.pointer, attribute, ctypes.addressof(value), ctypes.sizeof(value))
        check(status, f"setting attribute {attribute} of a {self._kind}")

    def __del__(self) -> None:
        if getattr(self, "pointer", 0):
            self._destroy(self.pointer)


def _layout_of(matrix: Matrix) -> _LibraryObject:
    layout = _LibraryObject("MatrixLayout", matrix.dtype, matrix.rows, matrix.columns, matrix.lead)
    if matrix.batches > 1:
        layout.set(_BATCHES, ctypes.c_int32(matrix.batches))
        layout.set(_FIELDS["stride"], ctypes.c_int64(matrix.stride))
    return layout


def _preference_of(workspace: int, alignment: int) -> _LibraryObject:
    preference = _LibraryObject("MatmulPreference")
    preference.set(_WORKSPACE, ctypes.c_uint64(workspace))
    preference.set(_REDUCTIONS, ctypes.c_uint32(_REDUCE_IN_COMPUTE_TYPE))
    for operand in range(4):
        preference.set(_ALIGNMENT_A + operand, ctypes.c_uint32(alignment))
    return preference


class Operation:
    """The cuBLASLt descriptor of what a product computes, for products of any sizes. Two threads must not use one at
    the same time, since it stores the addresses of a bias and scales."""

    def __init__(self, product: Product) -> None:
        self._descriptor = _LibraryObject("MatmulDesc", product.compute, product.scale)
        self._descriptor.set(_TRANSPOSE_A, ctypes.c_int32(product.turned[0]))
        self._descriptor.set(_TRANSPOSE_B, ctypes.c_int32(product.turned[1]))
        self._descriptor.set(_EPILOGUE, ctypes.c_int32(product.epilogue))
        if BIAS_AT in product.pointers:
            self._descriptor.set(_BIAS_TYPE, ctypes.c_int32(product.d.dtype))
        if product.scaling is not None:
            self._descriptor.set(_MODE_A, ctypes.c_int32(product.scaling))
            self._descriptor.set(_MODE_B, ctypes.c_int32(product.scaling))
        self.pointer = self._descriptor.pointer
        self._address = ctypes.c_uint64()
        self._pointers: dict[int, int] = {}
        # Algorithms are queried before there are tensors; with a bias or scales the query needs non-null addresses.
        for attribute in product.pointers:
            self.set_pointer(attribute, _PLACEHOLDER_ADDRESS)

    def set_pointer(self, attribute: int, address: int) -> None:
        """Set the address of a bias or of scales."""
        if self._pointers.get(attribute) != address:
            self._address.value = address
            self._descriptor.set(attribute, self._address)
            self._pointers[attribute] = address


class Call:
    """The cuBLASLt descriptors of a product on one device, for one M at a time: they must stay alive, and ``m`` as it
    is, while the product runs. Two threads must not use a Call at the same time.

    operation: what the product computes; two threads must not use it at the same time either. m: the rows of the
    Problem's A that the descriptors have now.
    """

    def __init__(self, product: Product, device: int, operation: Operation) -> None:
        self.m, self._device, self._handle, self._operation = product.m, device, handle_of(device), operation
        layouts = {name: _layout_of(getattr(product, name)) for name in ("a", "b", "d")}
        one = (ctypes.c_int32 if product.scale == TYPES["int32"] else ctypes.c_float)(1)
        self._layouts, self._alpha_beta = layouts, (one, type(one)(0))
        self._preferences: dict[tuple[int, int], _LibraryObject] = {}  # by workspace and alignment
        a, b, d = (layout.pointer for layout in layouts.values())
        self._descriptors = (self._handle, self._operation.pointer, a, b, d, d)
        self._checked = Ranked()  # the result of ``_check_algorithm``, whose last argument is its address
        self._check_algorithm = functools.partial(library().cublasLtMatmulAlgoCheck, *self._descriptors)
        self._checked_at = ctypes.addressof(self._checked)
        # What depends on M: the value, that for one row, and a function that sets the attribute to the value.
        self._by_m: list[tuple[ctypes.c_int64, int, Callable[[], int]]] = []
        set_attribute = library().cublasLtMatrixLayoutSetAttribute
        for name, field, per_row in product.by_m:
            value = ctypes.c_int64()
            arguments = layouts[name].pointer, _FIELDS[field], ctypes.addressof(value), ctypes.sizeof(value)
            self._by_m.append((value, per_row, functools.partial(set_attribute, *arguments)))

    def set_m(self, m: int) -> None:
        """Change the descriptors to those of a product with ``m`` rows."""
        for value, per_row, set_attribute in self._by_m:
            value.value = m * per_row
            if status := set_attribute():
                check(status, "setting the number of rows")
        self.m = m

    def ranked_algorithms(self, count: int, workspace: int, alignment: int) -> list[Ranked]:
        """Return at most ``count`` algorithms in cuBLASLt's order, best first.

        They need at most ``workspace`` bytes of workspace, take operands at multiples of ``alignment`` bytes, and add
        the partial sums of a split-K product in float32. Raises UnsupportedError where there are none.
        """
        key = workspace, alignment
        preference = self._preferences.get(key)
        if preference is None:
            preference = self._preferences[key] = _preference_of(workspace, alignment)
        results, returned = (Ranked * count)(), ctypes.c_int()

        def ask() -> int:
            get_heuristic, preferred = library().cublasLtMatmulAlgoGetHeuristic, preference.pointer
            addresses = ctypes.addressof(results), ctypes.addressof(returned)
            return int(get_heuristic(*self._descriptors, preferred, count, *addresses))

        status = self._retried(ask(), ask)
        if status != _NOT_SUPPORTED:
            check(status, "asking cuBLASLt for its algorithms")
        usable = [item for item in results[: returned.value] if item.state == 0]
        if not usable:
            raise UnsupportedError("cuBLASLt has no algorithm for this product")
        return usable

    def required_workspace(self, algorithm: Algorithm) -> int | None:
        """Return the bytes of workspace that an algorithm chosen for another product requires here; None where it
        cannot be used."""
        result = self._checked
        result.state = 0
        if self._check_algorithm(ctypes.addressof(algorithm), self._checked_at) or result.state:
            return None
        workspace: int = result.workspace
        return workspace

    def bind_run(self) -> Callable[[int, int, int, int, int, int, int], int]:
        """Return ``run(algorithm, a, b, d, scratch, workspace, stream)``, which starts the product and returns a status
        for ``check``.

        Its arguments are the addresses of an Algorithm, of cuBLASLt's A, B and D and of the workspace (0: none), the
        workspace's bytes, and the stream.
        """
        matmul, (handle, operation, a_at, b_at, d_at, _) = library().cublasLtMatmul, self._descriptors
        one, zero = map(ctypes.addressof, self._alpha_beta)

        def run(algorithm: int, a: int, b: int, d: int, scratch: int, workspace: int, stream: int) -> int:
            matrices = a, a_at, b, b_at, zero, d, d_at, d, d_at
            return int(matmul(handle, operation, one, *matrices, algorithm, scratch, workspace, stream))

        return run

    def retry_or_raise(self, status: int, run_again: Callable[[], int]) -> None:
        """Run once more where that may help; raise KernelError where cuBLASLt rejects the product."""
        check(self._retried(status, run_again), "multiplying")

    def _retried(self, status: int, call_again: Callable[[], int]) -> int:
        """Return the status of a second call where the first one failed because this thread has not used CUDA yet."""
        if status != _NO_CONTEXT:
            return status
        torch.cuda.current_stream(self._device).query()  # makes the device's context current on this thread
        return call_again()
