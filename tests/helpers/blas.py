"""A cuBLASLt that multiplies on the CPU, as cublasLt.h says: column-major, with scales, a bias and an activation."""

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
class Thing:
    """A description: what it was made with, and its attributes."""

    kind: str
    made: tuple[int, ...]
    attributes: dict[int, int] = field(default_factory=dict)


class FakeBlas:
    """count: algorithms that it has for a product; each wants 256 bytes more workspace than the one before it.

    chosen: the number of each algorithm that was run, with the stream; statuses: what the next calls return instead of
    running; picky: numbers of algorithms that only do with the M they were ranked for.
    """

    def __init__(self, count: int = 3) -> None:
        self.count, self.chosen, self.statuses = count, list[tuple[int, int]](), list[int]()
        self.picky: set[int] = set()
        self.things: dict[int, Thing] = {}
        self.asked: list[Thing] = []
        self.scratch: list[tuple[int, int]] = []

    def cublasLtCreate(self, handle: Any) -> int:
        handle._obj.value = 99
        return 0

    def _make(self, kind: str, pointer: Any, *made: int) -> int:
        pointer._obj.value = 1000 + len(self.things)
        self.things[pointer._obj.value] = Thing(kind, made)
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
            if name == f"cublasLt{kind}Create":
                return lambda pointer, *made: self._make(kind, pointer, *made)
            if name == f"cublasLt{kind}SetAttribute":
                return self._set
            if name == f"cublasLt{kind}Destroy":
                return self._destroy
        raise AttributeError(name)

    def _set(self, pointer: int, attribute: int, place: int, size: int) -> int:
        self.things[pointer].attributes[attribute] = _WIDTHS[size].from_address(place).value
        return 0

    def _destroy(self, pointer: int) -> int:
        self.things[pointer].kind = "destroyed"
        return 0

    def _m(self, layout: int) -> int:
        return self.things[layout].made[2]

    def cublasLtMatmulAlgoGetHeuristic(self, *given: int) -> int:
        handle, operation, _, _, _, d, preference, wanted, place, count = given
        if handle != 99:
            return 1
        if self.statuses:
            return self.statuses.pop(0)
        asked = self.things[preference]
        self.asked.append(asked)
        if any(self.things[operation].attributes.get(at) == 0 for at in (8, 17, 18)):
            return 7
        there = min(wanted, self.count)
        results = (Ranked * wanted).from_address(place)
        for number in range(there):
            results[number].algorithm.data[0], results[number].algorithm.data[1] = number, self._m(d)
            results[number].workspace = 256 * number
        ctypes.c_int.from_address(count).value = there
        return 0

    def cublasLtMatmulAlgoCheck(self, *given: int) -> int:
        algorithm, place = given[-2:]
        number, m = (ctypes.c_uint64 * 2).from_address(algorithm)
        if number in self.picky and m != self._m(given[5]):
            return 15
        Ranked.from_address(place).workspace = 256 * number
        return 0

    def cublasLtMatmul(self, *given: int) -> int:
        _, operation, alpha, a, a_at, b, b_at, beta, c, c_at, d, d_at, algorithm, scratch, workspace, stream = given
        if self.statuses:
            return self.statuses.pop(0)
        described = self.things[operation]
        assert (c, c_at) == (d, d_at)
        whole = described.made[1] == 10
        number = ctypes.c_int32 if whole else ctypes.c_float
        assert (number.from_address(alpha).value, number.from_address(beta).value) == (1, 0)
        self.chosen.append((ctypes.c_uint64.from_address(algorithm).value, stream))
        self.scratch.append((scratch, workspace))
        options = described.attributes
        left, right = self._matrices(a, a_at), self._matrices(b, b_at)
        left = left.mT if options[3] else left
        right = right.mT if options[4] else right
        exact = torch.int64 if whole else torch.float64
        made = left.to(exact) @ right.to(exact)
        if 31 in options:
            made = made * self._scale(options[17], options[31], made.shape[-2])[:, None]
            made = made * self._scale(options[18], options[32], made.shape[-1])
        epilogue = options[7]
        if epilogue & 4:
            made = made + _memory(options[8], made.shape[-2], DTYPES[options[26]]).to(exact)[:, None]
        if epilogue & 2:
            made = torch.relu(made)
        out = self._matrices(d, d_at)
        out.copy_(made.to(out.dtype))
        return 0

    def _scale(self, address: int, mode: int, count: int) -> Tensor:
        return _memory(address, count if mode == 3 else 1, torch.float32).double()

    def _matrices(self, address: int, layout: int) -> Tensor:
        thing = self.things[layout]
        dtype, rows, columns, lead = thing.made
        batches, stride = thing.attributes.get(5, 1), thing.attributes.get(6, 0)
        # Algorithms were asked for at this alignment; they assume as much of every matrix of a batch.
        assert address % 16 == 0
        assert not batches > 1 or not stride * DTYPES[dtype].itemsize % math.gcd(16, lead * DTYPES[dtype].itemsize)
        flat = _memory(address, (batches - 1) * stride + (columns - 1) * lead + rows, DTYPES[dtype])
        return flat.as_strided((batches, rows, columns), (stride, 1, lead)).squeeze(0)


def _memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    held = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(held, dtype=dtype)
