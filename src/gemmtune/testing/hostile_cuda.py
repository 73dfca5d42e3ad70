"""A plug-in backend whose candidates misbehave on a GPU in the ways that a worker must survive, and some that do not.

backends.register("hostile_cuda", "gemmtune.testing.hostile_cuda:HostileCudaBackend")

The misbehaving kernels are PTX that the driver compiles (NVIDIA GPUs since Ampere).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends.base import Artifact, Availability, Backend, Kernel
from ..core.candidate import Candidate, Illegal
from ..core.errors import KernelError
from ..core.problem import Problem
from ..core.target import Target
from .hostile_backend import is_racing

ENTRY_POINT = "gemmtune.testing.hostile_cuda:HostileCudaBackend"

# Each kernel takes the address of a buffer of zeros. illegal writes 4 TB behind the buffer. misaligned writes a word at
# an odd address. overrun writes 8 MB behind the start of shared memory. spin waits until the buffer is not zero.
_PTX = """
.version 7.8
.target sm_80
.address_size 64

.visible .entry illegal(.param .u64 zeros) {
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [zeros];
    add.s64 %rd2, %rd1, 4398046511104;
    mov.u32 %r1, 1;
    st.volatile.global.u32 [%rd2], %r1;
    ret;
}

.visible .entry misaligned(.param .u64 zeros) {
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [zeros];
    mov.u32 %r1, 1;
    st.volatile.global.u32 [%rd1+1], %r1;
    ret;
}

.visible .entry overrun(.param .u64 zeros) {
    .reg .b32 %r<2>;
    mov.u32 %r1, 8388608;
    st.volatile.shared.u32 [%r1], %r1;
    ret;
}

.visible .entry trap(.param .u64 zeros) {
    trap;
    ret;
}

.visible .entry spin(.param .u64 zeros) {
    .reg .pred %p<2>;
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [zeros];
AGAIN:
    ld.volatile.global.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    ret;
}
"""
_SHARED_BYTES = 1024


def _check(status: int) -> None:
    if status:
        raise KernelError(f"the CUDA driver answered {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _zeros() -> Tensor:
    return torch.zeros(64, dtype=torch.int32, device="cuda")


@functools.cache
def _function(name: str) -> ctypes.c_void_p:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), _PTX.encode()))
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    return function


def _launch(name: str) -> None:
    """Launch a kernel of ``_PTX`` with one thread on the current stream."""
    zeros = ctypes.c_void_p(_zeros().data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(zeros))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _check(_driver().cuLaunchKernel(_function(name), 1, 1, 1, 1, 1, 1, _SHARED_BYTES, stream, arguments, None))


def _run_out_of_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def _raise() -> None:
    raise ValueError("not today")


ACTS: dict[str, Callable[[], None]] = {
    "illegal": lambda: _launch("illegal"),
    "misaligned": lambda: _launch("misaligned"),
    "overrun": lambda: _launch("overrun"),
    "trap": lambda: _launch("trap"),
    "spin": lambda: _launch("spin"),
    "oom": _run_out_of_memory,
    "raise": _raise,
    "waits": torch.cuda.synchronize,
}
"""What a candidate of each kind does before it computes the correct result, if it still can."""

CONTEXT_LOSING_KINDS = ("illegal", "misaligned", "overrun", "trap")  # these lose the process's CUDA context
CORRECT_KINDS = ("good", "waits", "elsewhere")


class HostileCudaKernel(Kernel):
    """A kernel that does what its ``kind`` says (``ACTS``), then computes the product with ATen.

    A kind ``late_...`` is correct while it is verified, and misbehaves when it races. ``replayed_...`` misbehaves when
    it is captured, so that the fault happens in a replay. ``waits`` is correct, but cannot be captured. ``elsewhere``
    computes on the default stream, whatever the current stream is. ``wrong`` writes zeros. ``spills`` is correct, and
    also writes one element 100 elements behind its output.
    """

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        self.phase, _, self.kind = ("_" + str(candidate["kind"])).rpartition("_")
        _zeros()  # allocated here, because a graph capture must not allocate it
        if self.kind in (*CONTEXT_LOSING_KINDS, "spin"):
            _function(self.kind)

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        active = {"_late": is_racing(), "_replayed": torch.cuda.is_current_stream_capturing()}
        if self.kind in ACTS and active.get(self.phase, True):
            ACTS[self.kind]()
        if self.kind == "wrong":
            out.zero_()
        elif self.kind == "elsewhere":
            with torch.cuda.stream(torch.cuda.default_stream()):
                torch.mm(a, b, out=out)
        else:
            torch.mm(a, b, out=out)
        if self.kind == "spills":
            out.as_strided((1,), (1,), out.storage_offset() + out.numel() + 100).zero_()


class HostileCudaBackend(Backend):
    """A backend that lists one candidate for each of ``kinds``."""

    name = "hostile_cuda"
    kinds: ClassVar[tuple[str, ...]] = (
        "good",
        "wrong",
        *CONTEXT_LOSING_KINDS,
        "spin",
        "oom",
        "late_illegal",
        "replayed_illegal",
    )

    def available(self, target: Target) -> Availability:
        if target.device != "cuda":
            return Availability(False, "its kernels are wrong on GPUs alone")
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for kind in self.kinds:
            yield Candidate.make(self.name, kind, kind=kind)

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        return HostileCudaKernel(problem, artifact.candidate)

    def source_digest(self) -> str:
        return "hostile_cuda"
