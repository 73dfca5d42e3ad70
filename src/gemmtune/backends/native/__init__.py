"""Our own CPU micro-kernels: prebuilt C++, selected by CPUID. Their sources are in native/ in the repository."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.candidate import Candidate, Illegal
from ...core.epilogue import GATES
from ...core.errors import KernelError
from ...core.problem import Problem
from ...core.target import Target, current_cpu
from ...core.weights import PackedWeight
from ..base import Artifact, Availability, Backend, Kernel
from . import layout, space
from .traits import UNITS

# The instruction sets in ascending order; GEMMTUNE_ISA=avx2 disables all that follow it (for tests, and for users who
# need it).
ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
_ISA_VARIABLE = "GEMMTUNE_ISA"
_DIGEST_LENGTH = 16
# The flags of ``target.ISA_FLAGS`` that each one requires (native/frame/isa.cpp queries the CPU for them).
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_bf16"}
_REQUIRED_FEATURES = {
    "portable": set[str](), "avx2": _AVX2, "avx512": _AVX512, "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx512_bf16": _BF16, "amx": _BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
}  # fmt: skip


def usable_isas() -> tuple[str, ...]:
    """Return the instruction sets that the kernels may use on this CPU. Raises KernelError when there are no kernels,
    or when GEMMTUNE_ISA is not the name of an instruction set."""
    built = _built_isas()
    if isinstance(built, str):
        raise KernelError(built)
    limit = os.environ.get(_ISA_VARIABLE)
    if limit is None:
        return built
    if limit not in ISAS:
        raise KernelError(f"{_ISA_VARIABLE}={limit!r} is not one of {', '.join(ISAS)}")
    return tuple(isa for isa in built if ISAS.index(isa) <= ISAS.index(limit))


def isas_of(target: Target) -> tuple[str, ...]:
    """Return the instruction sets that the kernels may use on a CPU target.

    If this CPU has the target's features and limit, the result is that of ``usable_isas``. Otherwise it is derived from
    the features that the target lists (``target.ISA_FLAGS``) and from its limit. Raises KernelError as ``usable_isas``
    does.
    """
    if target.isa == current_cpu().isa and _isa_limit(target) == os.environ.get(_ISA_VARIABLE, ""):
        return usable_isas()
    features, limit = set(target.isa), _isa_limit(target)
    usable = [isa for isa in ISAS if _REQUIRED_FEATURES[isa] <= features]
    return tuple(isa for isa in usable if limit not in ISAS or ISAS.index(isa) <= ISAS.index(limit))


def _isa_limit(target: Target) -> str:
    """Return the value of GEMMTUNE_ISA where the target was described (``source_digest`` ends with it)."""
    digest = dict(target.sources).get(space.NAME)
    return os.environ.get(_ISA_VARIABLE, "") if digest is None else digest[_DIGEST_LENGTH:]


@functools.cache
def _built_isas() -> tuple[str, ...] | str:
    """Return the instruction sets that this build and this CPU can run, or why there are none."""
    try:
        from . import _native
    except ImportError as error:
        return (
            f"the native kernels were not built or cannot be loaded ({error}). Install a C++ compiler with OpenMP "
            "(Debian: apt-get install g++), then reinstall gemmtune"
        )
    return tuple(_native.usable_isas())


class NativeBackend(Backend):
    """Prebuilt kernels for the CPU; unavailable without a build, and on other devices."""

    name = space.NAME
    special_steps = frozenset(GATES)

    def available(self, target: Target) -> Availability:
        if not target.is_cpu:
            return Availability(False, f"the native kernels run on CPUs, and the target is {target.device}")
        try:
            usable_isas()
        except KernelError as error:
            return Availability(False, str(error))
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return space.candidates(problem, target, isas_of(target))

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        if not target.is_cpu:
            return self.available(target).reason
        try:
            return space.why_illegal(problem, candidate, target, isas_of(target))
        except KernelError as error:
            return str(error)

    def packing_of(self, problem: Problem, candidate: Candidate) -> str | None:
        if candidate.template in ("raw", "dot"):
            return None
        from .kernel import packing_of

        return packing_of(problem, candidate)

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        from .kernel import load

        candidate = artifact.candidate
        isa = dict(candidate.config).get("isa")
        if candidate.template not in space.TEMPLATES or isa is None:
            raise KernelError(f"{candidate.id} is no native kernel; templates: {', '.join(space.TEMPLATES)}")
        if isa not in usable_isas():
            raise KernelError(f"{candidate.id} needs {isa}, which is not usable here")
        return load(problem, candidate)

    def source_digest(self) -> str:
        return f"{_digest()}{os.environ.get(_ISA_VARIABLE, '')}"

    def default_packing(self, problem: Problem, target: Target) -> Candidate | None:
        try:
            isas = usable_isas()
        except KernelError:
            return None
        return space.default_candidate(problem, target, isas)

    def why_unreadable(self, packed: PackedWeight) -> str:
        try:
            isas = usable_isas()
        except KernelError as error:
            return str(error)
        packing = layout.Packing.parse(packed.layout)
        for unit in UNITS:
            widths = {*unit.rows, *unit.tile_rows(packing.dtype, expanded=False)}
            supported = packing.dtype in (*unit.reads, *unit.expands) and packing.nr in widths and unit.isa in isas
            if supported and layout.Packing.of(unit.compute, packing.dtype, packing.nr, packing.halves) == packing:
                return ""
        return f"no instruction set of this CPU reads {packed.layout} (usable: {', '.join(isas)})"

    def unpack(self, packed: PackedWeight) -> Any:
        return layout.unpack(packed)


@functools.cache
def _digest() -> str:
    """Return a hash of the compiled kernels and of the Python that configures them."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*package.glob("*.py"), *package.glob("_native*.so"), *package.glob("_native*.pyd")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:_DIGEST_LENGTH]
