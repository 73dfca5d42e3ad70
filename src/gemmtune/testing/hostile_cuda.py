"""A guest backend whose candidates misbehave on a GPU in the ways that a worker must survive, beside honest ones.

backends.register("hostile_cuda", "gemmtune.testing.hostile_cuda:HostileCudaBackend")

Its bad kernels are PTX that the driver compiles (NVIDIA GPUs since Ampere).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends.base import Artifact, Availability, Backend, Kernel
from ..core.candidate import Candidate, Illegal
from ..core.errors import KernelError
from ..core.problem import Problem
from ..core.target import Target

PLACE = "gemmtune.testing.hostile_cuda:HostileCudaBackend"

# Each takes the address of some zeros. illegal: writes 4 TB behind them. misaligned: a word at an odd address. overrun:
# 8 MB behind the start of shared memory. spin: waits until they are no zeros.
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
    """Run one thread of a kernel of ``_PTX`` on the current stream."""
    zeros = ctypes.c_void_p(_zeros().data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(zeros))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _check(_driver().cuLaunchKernel(_function(name), 1, 1, 1, 1, 1, 1, _SHARED_BYTES, stream, arguments, None))


def _oom() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def _raise() -> None:
    raise ValueError("not today")


ACTS: dict[str, Callable[[], None]] = {
    "illegal": lambda: _launch("illegal"),
    "misaligned": lambda: _launch("misaligned"),
    "overrun": lambda: _launch("overrun"),
    "trap": lambda: _launch("trap"),
    "spin": lambda: _launch("spin"),
    "oom": _oom,
    "raise": _raise,
    "waits": torch.cuda.synchronize,
}
"""What a candidate of that kind does before it computes the right answer, if it gets there."""

LETHAL = ("illegal", "misaligned", "overrun", "trap")  # these cost the process its context
HONEST = ("good", "waits", "elsewhere")


def _in_a_race() -> bool:
    """Whether the kernel that asks is being called by a race."""
    return str(sys._getframe(2).f_globals["__name__"]).endswith(".timing")


class HostileCudaKernel(Kernel):
    """Does its ``kind`` of mischief, then the product by ATen.

    ``late_...`` behaves while it is checked, and turns bad when it races; ``replayed_...`` when it is captured, so that
    what goes wrong does so in a replay. ``waits``: honest, but cannot be captured. ``elsewhere``: computes on the
    default stream, whatever the current one is. ``wrong``: leaves zeros. ``spills``: right, and writes 100 elements
    behind its output.
    """

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        self.when, _, self.kind = ("_" + str(candidate["kind"])).rpartition("_")
        _zeros()  # now: what is captured must not allocate it
        if self.kind in (*LETHAL, "spin"):
            _function(self.kind)

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        late = {"_late": _in_a_race(), "_replayed": torch.cuda.is_current_stream_capturing()}
        if self.kind in ACTS and late.get(self.when, True):
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
    """Lists one candidate for each of ``kinds``."""

    name = "hostile_cuda"
    kinds: ClassVar[tuple[str, ...]] = ("good", "wrong", *LETHAL, "spin", "oom", "late_illegal", "replayed_illegal")

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
