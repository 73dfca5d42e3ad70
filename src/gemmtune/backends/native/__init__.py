"""Our own CPU micro-kernels, prebuilt C++ chosen by CPUID: see native/ in the repository."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import KernelError
from ...problem import Problem
from ...target import Target
from ..base import Artifact, Availability, Backend, Candidate, Illegal, Kernel, PackedWeight
from . import layout, space
from .traits import UNITS

# The instruction sets in order; GEMMTUNE_ISA=avx2 leaves out everything after it (tests, and users who must).
ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
_LIMIT = "GEMMTUNE_ISA"


def usable_isas() -> tuple[str, ...]:
    """The instruction sets that the kernels may use here. Raises KernelError when there are no kernels, or when
    GEMMTUNE_ISA names none."""
    built = _built()
    if isinstance(built, str):
        raise KernelError(built)
    limit = os.environ.get(_LIMIT)
    if limit is None:
        return built
    if limit not in ISAS:
        raise KernelError(f"{_LIMIT}={limit!r} is not one of {', '.join(ISAS)}")
    return tuple(isa for isa in built if ISAS.index(isa) <= ISAS.index(limit))


@functools.cache
def _built() -> tuple[str, ...] | str:
    """What this build and CPU can run, or why there is nothing."""
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

    def available(self, target: Target) -> Availability:
        if target.device != "cpu":
            return Availability(False, f"the native kernels run on CPUs, and the target is {target.device}")
        try:
            usable_isas()
        except KernelError as error:
            return Availability(False, str(error))
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return space.candidates(problem, target, usable_isas())

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
        return f"{_digest()}{os.environ.get(_LIMIT, '')}"

    def default_packing(self, problem: Problem, target: Target) -> Candidate | None:
        try:
            isas = usable_isas()
        except KernelError:
            return None
        return space.default(problem, target, isas)

    def rejects(self, packed: PackedWeight) -> str:
        try:
            isas = usable_isas()
        except KernelError as error:
            return str(error)
        packing = layout.Packing.parse(packed.layout)
        for unit in UNITS:
            widths = {*unit.rows, *unit.tile_rows(packing.dtype, expanded=False)}
            known = packing.dtype in (*unit.reads, *unit.expands) and packing.nr in widths and unit.isa in isas
            if known and layout.Packing.of(unit.compute, packing.dtype, packing.nr) == packing:
                return ""
        return f"no instruction set of this CPU reads {packed.layout} (usable: {', '.join(isas)})"

    def unpack(self, packed: PackedWeight) -> Any:
        return layout.unpack(packed)


@functools.cache
def _digest() -> str:
    """Of the compiled kernels and of the Python that configures them."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *here.glob("_native*.so"), *here.glob("_native*.pyd")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
