"""Checks of stores with forged candidates: an unlisted config is refused, and none ends a process."""

from __future__ import annotations

import functools
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gemmtune import backends
from gemmtune.backends.base import Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.errors import KernelError
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import MemoryStore
from gemmtune.store.legality import review
from gemmtune.verify.inputs import Inputs
from gemmtune.verify.verify import make_reference_cases, verify
from helpers.gpus import H200
from helpers.serving import decide, evidence

from .checks import Outcome, check
from .store_children import start

Forgery = tuple[Problem, Candidate, str | None]  # the last is the packing that the record claims

_NUMBERS = (
    0,
    -1,
    1,
    3,
    7,
    17,
    80,
    4096,
    2**31 - 1,
    2**31,
    -(2**31),
    2**40,
    2**62,
    -(2**63),
    True,
    1.0,
    0.5,
    "1",
    "x",
    "",
)
_GRIDS = ("0x1x1", "-1x1x1", "1x1", "axbxc", "99999999999x1x1", "1x1x99999999", "65537x1x1", "1x2x1x1", "", 1)
_STRINGS = {"isa": ("sse", "amx", "", 1), "order": ("c", "", True), "pack_a": ("rowz", "", 0), "grid": _GRIDS}


def _native_problems() -> list[Problem]:
    """Return problems of the native backend: float, integer and weight-only, raw and constant."""
    half, int8 = Operand("bfloat16"), Operand("int8")
    col = Layout("col")
    return [
        Problem("mm", 24, 80, 96, Operand("float32"), Operand("float32", col), "float32"),
        Problem("mm", 24, 80, 96, Operand("float32"), Operand("float32", col, constant=True), "float32"),
        Problem("mm", 3, 80, 96, half, Operand("bfloat16", col, constant=True), "bfloat16", (Step("relu"),)),
        Problem("int_mm", 24, 80, 96, int8, Operand("int8", col, constant=True), "int32", acc="int32"),
        Problem(
            "mixed_mm", 24, 80, 96, half, Operand("int4", col, constant=True, quant=Quant(32, "bfloat16")), "bfloat16"
        ),
    ]  # fmt: skip


def _gpu_problems() -> list[Problem]:
    """Return problems of the GPU backends: float, integer and weight-only."""
    half, col = Operand("bfloat16"), Layout("col")
    weight = Operand("bfloat16", col, constant=True)
    quant = Operand("int4", col, constant=True, quant=Quant(128, "bfloat16"))
    return [
        *(Problem("mm", m, 1024, 1024, half, weight, "bfloat16") for m in (8, 512)),
        Problem("int_mm", 64, 1024, 1024, Operand("int8"), Operand("int8", col, constant=True), "int32", acc="int32"),
        Problem("mixed_mm", 64, 1024, 1024, half, quant, "bfloat16"),
    ]


def _mutants(rng: random.Random, backend: str, problem: Problem, target: Target) -> Iterator[Candidate]:
    """Yield listed candidates of each template with one entry changed, left out or added, and with another template."""
    listed = [item for item in backends.get(backend).candidates(problem, target) if isinstance(item, Candidate)]
    templates = {item.template for item in listed} | {"packed", "expand", "raw", "dot", "tiled", "slab", "*"}
    for template in sorted({item.template for item in listed}):
        candidate = rng.choice([item for item in listed if item.template == template])
        config = dict(candidate.config)
        for name, value in config.items():
            values: list[Any] = list(_STRINGS.get(name, _NUMBERS))
            values += [str(value), dict(rng.choice(listed).config).get(name, 0)]
            if isinstance(value, int):
                values += [float(value), -value, 2 * value, value + 1, value << 33]
            for other in values:
                yield Candidate.make(backend, template, **{**config, name: other})
            yield Candidate.make(
                backend, template, **{key: kept_value for key, kept_value in config.items() if key != name}
            )
        yield Candidate.make(backend, template, **config, extra=1)
        for other_template in sorted(templates - {template}):
            yield Candidate.make(backend, other_template, **config)


def _forgeries(seed: int, backend: str, problems: list[Problem], target: Target) -> Iterator[Forgery]:
    """Yield mutants with the packing that a forger would claim, and one listed candidate with a wrong packing."""
    rng = random.Random(seed)
    for problem in problems:
        for mutant in _mutants(rng, backend, problem, target):
            yield problem, mutant, _claimed_packing(backend, problem, mutant)
        for item in backends.get(backend).candidates(problem, target):
            if isinstance(item, Candidate):
                packing = backends.get(backend).packing_of(problem, item)
                yield problem, item, "native:k1/float32/nr64" if packing is None else None
                break


def _claimed_packing(backend: str, problem: Problem, candidate: Candidate) -> str | None:
    """Return the packing of a mutant; None if the backend raises for it."""
    try:
        return backends.get(backend).packing_of(problem, candidate)
    except Exception:  # a forger may claim any packing
        return None


def _is_legal(problem: Problem, candidate: Candidate, packing: str | None, target: Target) -> bool:
    """Return whether the backend lists the forged candidate, and the claimed packing is the candidate's."""
    if candidate.identity not in _listed(candidate.backend, problem, target):
        return False
    return backends.get(candidate.backend).packing_of(problem, candidate) == packing


@functools.lru_cache(maxsize=16)  # the forgeries of one problem follow one another
def _listed(backend: str, problem: Problem, target: Target) -> frozenset[Hashable]:
    """Return the identities of a backend's legal candidates."""
    items = backends.get(backend).candidates(problem, target)
    return frozenset(item.identity for item in items if isinstance(item, Candidate))


def _is_reported(problem: Problem, candidate: Candidate, packing: str | None, target: Target) -> bool:
    """Return whether ``store verify`` reports the record."""
    row = msgspec.structs.replace(evidence(candidate, 0.1), packing=packing)
    decision = msgspec.structs.replace(decide(problem, row, chosen=candidate), target_key=target.key)
    return any(candidate.id in line for line in review(target, decision).illegal)


def read_native(folder: str, seed: int) -> None:
    """Serve each forgery from a store, then load it without the checks of dispatch. Runs in a separate process."""
    tally: Counter[str] = Counter()
    findings: list[str] = []
    target, problems = current_target(), _native_problems()
    RUNTIME.verify_hook = None
    logging.getLogger("gemmtune").setLevel(logging.CRITICAL)  # each forgery logs a line
    test_cases = {problem.key: make_reference_cases(problem, 1) for problem in problems}
    packed = {problem.key: _pack_weight(problem, test_cases[problem.key][0].inputs) for problem in problems}
    for number, (problem, candidate, packing) in enumerate(_forgeries(seed, "native", problems, target)):
        (Path(folder) / "at").write_text(f"{number} {candidate.id} for {problem.key}")
        tally["forged"] += 1
        legal = _is_legal(problem, candidate, packing, target)
        weight = packed[problem.key]
        is_asked_for = packing is None or (weight is not None and weight.layout == packing)
        served = _serve(problem, candidate, packing, weight if is_asked_for and packing is not None else None)
        serves_itself = served is not None and served.candidate.identity == candidate.identity
        if (serves_itself and not legal) or (legal and is_asked_for and not serves_itself):
            findings.append(f"{candidate.id} {'served' if serves_itself else 'not served'} for {problem.key}")
        if legal == _is_reported(problem, candidate, packing, target):
            findings.append(f"store verify {'names' if legal else 'misses'} {candidate.id} for {problem.key}")
        tally["sound"] += legal
        tally[_load(problem, candidate, test_cases[problem.key])] += 1
    print(json.dumps({"tally": tally, "findings": findings}))


def _pack_weight(problem: Problem, inputs: Inputs) -> Any:
    """Return the weight in the native default layout; None for a problem whose weight is not constant."""
    if not problem.b.constant:
        return None
    backend, target = backends.get("native"), current_target()
    candidate = backend.default_packing(problem, target)
    assert candidate is not None
    return backend.load(backend.build(problem, candidate, target), problem).pack(inputs.b)


def _serve(problem: Problem, candidate: Candidate, packing: str | None, packed: Any) -> Kernel | None:
    """Return the kernel that dispatch serves from a store with the forged decision."""
    store = MemoryStore()
    row = msgspec.structs.replace(evidence(candidate, 0.1), packing=packing)
    store.put(current_target(), decide(problem, row, chosen=candidate))
    RUNTIME.refresh(store)
    return RUNTIME.kernel_for(problem, packed)


def _load(problem: Problem, candidate: Candidate, test_cases: Any) -> str:
    """Load a forgery without the checks of dispatch, verify it, and return the result as text."""
    try:
        kernel = backends.get("native").load(
            backends.get("native").build(problem, candidate, current_target()), problem
        )
    except (KernelError, ValueError, LookupError, TypeError, OverflowError):
        return "refused by the kernels"
    try:
        b = test_cases[0].inputs.b if kernel.packing is None else kernel.pack(test_cases[0].inputs.b)
        verdict = verify(lambda inputs, out: kernel.run(inputs.a, b, inputs.aux, out), problem, test_cases[:1], 0.0)
    except (MemoryError, ValueError, RuntimeError):
        return "refused by the kernels"
    return "right" if verdict.ok else "wrong past every check"


@check(
    "stores with forged native kernels: one entry of a real config out of range, negative, zero, huge, of another "
    "type, left out or added; another template; another packing",
    "every one refused or just what is listed; none ends the process, none wrong even when loaded past the checks; "
    "store verify names all",
)
def forged_native_kernels(full: bool) -> Outcome:
    tally: Counter[str] = Counter()
    findings: list[str] = []
    for seed in range(4 if full else 1):
        with tempfile.TemporaryDirectory() as folder:
            process = start(read_native, folder, seed)
            out, _ = process.communicate()
            if process.returncode != 0:
                at = Path(folder) / "at"
                position = at.read_text() if at.exists() else "its start"
                findings.append(f"the process ended with {process.returncode} at {position}")
                continue
            result = json.loads(out.splitlines()[-1])
            tally.update(result["tally"])
            findings += result["findings"]
    return _outcome(tally, findings)


@check(
    "the same of GPU kernels (triton, cuda, cublaslt) in the store of an H200 that is not there",
    "every one refused or just what is listed, store verify names all",
)
def forged_gpu_kernels(full: bool) -> Outcome:
    tally: Counter[str] = Counter()
    findings: list[str] = []
    names = ("triton", "cuda", "cublaslt")
    target = replace(H200, sources=tuple(sorted(backends.sources(names).items())))
    for seed in range(4 if full else 1):
        for name in names:
            problems = [p for p in _gpu_problems() if _lists(name, p, target)]
            for problem, candidate, packing in _forgeries(seed, name, problems, target):
                tally["forged"] += 1
                legal = _is_legal(problem, candidate, packing, target)
                tally["sound"] += legal
                if legal == _is_reported(problem, candidate, packing, target):
                    findings.append(f"store verify {'names' if legal else 'misses'} {candidate.id} for {problem.key}")
    return _outcome(tally, findings)


def _lists(name: str, problem: Problem, target: Target) -> bool:
    """Return whether a backend lists a legal candidate for the problem."""
    return any(isinstance(item, Candidate) for item in backends.get(name).candidates(problem, target))


def _outcome(tally: Counter[str], findings: list[str]) -> Outcome:
    wrong = tally["wrong past every check"]
    counts = ", ".join(f"{count} {name}" for name, count in tally.items() if name != "forged")
    text = f"{tally['forged']} forgeries ({counts}): {len(findings)} faults"
    first_findings = "" if not findings else ": " + "; ".join(findings[:3])
    return Outcome(
        text + first_findings, not findings and not wrong and tally["forged"] > 300, {"findings": findings, **tally}
    )
