"""Fake cuBLASLt that multiplies on the CPU, as cublasLt.h specifies: column-major, with scales, bias and activation."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gemmtune.backends.cublaslt.library import Ranked

DTYPES = {
    0: torch.float32, 2: torch.float16, 3: torch.int8, 10: torch.int32, 14: torch.bfloat16, 28: torch.float8_e4m3fn,
    29: torch.float8_e5m2,
}  # fmt: skip
_WIDTHS = {1: ctypes.c_uint8, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


@dataclass
class Descriptor:
    """Descriptor of cuBLASLt: its kind, the arguments of its creation, and its attributes by number."""

    kind: str
    arguments: tuple[int, ...]
    attributes: dict[int, int] = field(default_factory=dict)


class FakeBlas:
    """Fake cuBLASLt library with ``count`` algorithms; algorithm i needs 256 * i bytes of workspace for a product of up
    to 64 rows, as many for each 64 rows of others.

    launches: the algorithm and the stream of each product that was run.
    statuses: what the next calls return instead of running; after a 0 they run.
    single_m_algorithms: algorithms that support only the M that the heuristic was called with.
    descriptors: the descriptors by handle.
    preferences: the preference descriptor of each call of the heuristic.
    workspaces: the workspace's address and size in each product.
    """

    def __init__(self, count: int = 3) -> None:
        self.count, self.launches, self.statuses = count, list[tuple[int, int]](), list[int]()
        self.single_m_algorithms: set[int] = set()
        self.descriptors: dict[int, Descriptor] = {}
        self.preferences: list[Descriptor] = []
        self.workspaces: list[tuple[int, int]] = []

    def cublasLtCreate(self, handle: Any) -> int:
        handle._obj.value = 99
        return 0

    def _create(self, kind: str, pointer: Any, *arguments: int) -> int:
        pointer._obj.value = 1000 + len(self.descriptors)
        self.descriptors[pointer._obj.value] = Descriptor(kind, arguments)
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
            if name == f"cublasLt{kind}Create":
                return lambda pointer, *arguments: self._create(kind, pointer, *arguments)
            if name == f"cublasLt{kind}SetAttribute":
                return self._set
            if name == f"cublasLt{kind}Destroy":
                return self._destroy
        raise AttributeError(name)

    def _set(self, pointer: int, attribute: int, address: int, size: int) -> int:
        self.descriptors[pointer].attributes[attribute] = _WIDTHS[size].from_address(address).value
        return 0

    def _destroy(self, pointer: int) -> int:
        self.descriptors[pointer].kind = "destroyed"
        return 0

    def _sizes(self, layout: int) -> tuple[int, int, int]:
        """Return a matrix's rows, columns and leading dimension: those of its creation, or set later."""
        description = self.descriptors[layout]
        rows, columns, lead = (description.attributes.get(2 + i, description.arguments[1 + i]) for i in range(3))
        return rows, columns, lead

    def _columns(self, layout: int) -> int:
        return self._sizes(layout)[1]

    def _required_workspace(self, algorithm: int, d: int) -> int:
        return 256 * ctypes.c_uint64.from_address(algorithm).value * -(-self._columns(d) // 64)

    def _is_supported(self, algorithm: int, d: int) -> bool:
        number, m = (ctypes.c_uint64 * 2).from_address(algorithm)
        return number not in self.single_m_algorithms or m == self._columns(d)

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: int) -> int:
        handle, operation, _, _, _, d, preference, requested, results_address, count_address = arguments
        if handle != 99:
            return 1
        if self.statuses and (status := self.statuses.pop(0)):
            return status
        preference_descriptor = self.descriptors[preference]
        self.preferences.append(preference_descriptor)
        if any(self.descriptors[operation].attributes.get(attribute) == 0 for attribute in (8, 17, 18)):
            return 7
        returned = min(requested, self.count)
        results = (Ranked * requested).from_address(results_address)
        for position in range(returned):
            results[position].algorithm.data[0], results[position].algorithm.data[1] = position, self._columns(d)
            results[position].workspace = self._required_workspace(ctypes.addressof(results[position].algorithm), d)
        ctypes.c_int.from_address(count_address).value = returned
        return 0

    def cublasLtMatmulAlgoCheck(self, *arguments: int) -> int:
        algorithm, result_address = arguments[-2:]
        if not self._is_supported(algorithm, arguments[5]):
            return 15
        Ranked.from_address(result_address).workspace = self._required_workspace(algorithm, arguments[5])
        return 0

    def cublasLtMatmul(self, *arguments: int) -> int:
        (
            _,
            operation,
            alpha,
            a,
            a_at,
            b,
            b_at,
            beta,
            c,
            c_at,
            d,
            d_at,
            algorithm,
            workspace_address,
            workspace_bytes,
            stream,
        ) = arguments
        if self.statuses and (status := self.statuses.pop(0)):
            return status
        assert self._is_supported(algorithm, d_at)
        assert workspace_bytes >= self._required_workspace(algorithm, d_at)
        description = self.descriptors[operation]
        assert (c, c_at) == (d, d_at)
        is_integer = description.arguments[1] == 10
        number = ctypes.c_int32 if is_integer else ctypes.c_float
        assert (number.from_address(alpha).value, number.from_address(beta).value) == (1, 0)
        self.launches.append((ctypes.c_uint64.from_address(algorithm).value, stream))
        self.workspaces.append((workspace_address, workspace_bytes))
        options = description.attributes
        a_matrix, b_matrix = self._matrices(a, a_at), self._matrices(b, b_at)
        a_matrix = a_matrix.mT if options[3] else a_matrix
        b_matrix = b_matrix.mT if options[4] else b_matrix
        exact = torch.int64 if is_integer else torch.float64
        result = a_matrix.to(exact) @ b_matrix.to(exact)
        if 31 in options:
            result = result * self._scale(options[17], options[31], result.shape[-2])[:, None]
            result = result * self._scale(options[18], options[32], result.shape[-1])
        epilogue = options[7]
        if epilogue & 4:
            result = result + _memory(options[8], result.shape[-2], DTYPES[options[26]]).to(exact)[:, None]
        if epilogue & 2:
            result = torch.relu(result)
        out = self._matrices(d, d_at)
        out.copy_(result.to(out.dtype))
        return 0

    def _scale(self, address: int, mode: int, count: int) -> Tensor:
        return _memory(address, count if mode == 3 else 1, torch.float32).double()

    def _matrices(self, address: int, layout: int) -> Tensor:
        description = self.descriptors[layout]
        dtype, (rows, columns, lead) = description.arguments[0], self._sizes(layout)
        batches, stride = description.attributes.get(5, 1), description.attributes.get(6, 0)
        # Algorithms were requested for this alignment, and assume it for every matrix of a batch.
        assert address % 16 == 0
        assert not batches > 1 or not stride * DTYPES[dtype].itemsize % math.gcd(16, lead * DTYPES[dtype].itemsize)
        flat = _memory(address, (batches - 1) * stride + (columns - 1) * lead + rows, DTYPES[dtype])
        return flat.as_strided((batches, rows, columns), (stride, 1, lead)).squeeze(0)


def _memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)
