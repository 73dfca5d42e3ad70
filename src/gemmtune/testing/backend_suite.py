"""The conformance suite of a Backend: subclass it, give it a fixture called ``backend``, and pytest does the rest.

class TestMyBackend(BackendSuite):
    @pytest.fixture
    def backend(self):
        return MyBackend()

``CandidateSuite`` is the half that runs nothing: for a backend whose device is not here, with a fixture called
``target`` that returns a Target of it.

By default a suite asks for 40 random problems of all families and some with nothing to multiply; a fixture called
``problems`` returns others. Every problem it lists a legal candidate for must be solved: right by ``verify.verify``,
which also finds writes beyond the output and into (or beside) the inputs.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ..backends.base import Artifact, Backend, Kernel
from ..core.candidate import Candidate, Illegal
from ..core.errors import GemmtuneError
from ..core.problem import FAMILIES, Problem
from ..core.target import Target, current_cpu
from ..core.weights import QuantWeight
from ..core.workloads import bmm_problem, int_problem, linear_problem, weight_only_problem
from ..verify.inputs import Inputs, make_inputs
from ..verify.verify import prepare, verify
from .problems import random_problem

_EMPTY = (
    linear_problem(0, 8, 16, "float32"),
    linear_problem(3, 8, 0, "bfloat16"),
    int_problem(3, 0, 16),
    bmm_problem(0, 3, 8, 16, "float32"),
)
# Large enough for a hidden copy of the weight to stand out from what torch allocates anyway.
_ROOMY = (
    linear_problem(16, 512, 1024, "bfloat16"),
    linear_problem(16, 512, 1024, "float32"),
    int_problem(16, 512, 1024),
    weight_only_problem(16, 512, 1024),
    weight_only_problem(16, 512, 1024, bits=4, group=128, zero_point=True),
)
_SLACK_BYTES = 256 << 10


class CandidateSuite:
    """What every Backend must do before anything is built. The fixture ``backend`` returns it; ``sampled``: candidates
    tried on each problem."""

    sampled = 3

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("give the suite a fixture called `backend` that returns a Backend")

    @pytest.fixture
    def target(self) -> Target:
        """Where the kernels run. Default: this CPU, with torch's threads."""
        return replace(current_cpu(), threads=torch.get_num_threads())

    @pytest.fixture
    def problems(self) -> Sequence[Problem]:
        """What it is asked to solve. Keep them small."""
        rounds = range(8)
        return (*(random_problem(random.Random(i), 64, family) for i in rounds for family in FAMILIES), *_EMPTY)

    # What it offers

    def test_it_is_available_or_says_why_not(self, backend: Backend, target: Target) -> None:
        for place in (target, replace(target, device="cuda", name="none"), replace(target, isa=())):
            answer = backend.available(place)
            assert bool(answer) == (answer.reason == "")

    def test_the_backend_has_a_name_and_a_digest_that_stay(self, backend: Backend) -> None:
        assert backend.name.isidentifier()
        assert backend.source_digest()
        assert backend.source_digest() == backend.source_digest()

    def test_candidates_come_one_by_one(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem in problems:
            assert isinstance(backend.candidates(problem, target), Iterator)

    def test_it_solves_something(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        assert any(self._legal(backend, problem, target) for problem in problems)

    def test_candidates_are_data_with_stable_ids_of_their_own(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> None:
        for problem in problems:
            listed = list(backend.candidates(problem, target))
            assert listed == list(backend.candidates(problem, target))
            found = [item.candidate if isinstance(item, Illegal) else item for item in listed]
            assert len({candidate.id for candidate in found}) == len(found)
            for candidate in found:
                assert candidate.backend == backend.name
                again = Candidate.from_dict(json.loads(json.dumps(candidate.to_dict())))
                assert (again, again.id) == (candidate, candidate.id)

    def test_what_is_illegal_has_a_reason(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem in problems:
            for item in backend.candidates(problem, target):
                assert not isinstance(item, Illegal) or item.reason.strip()

    def test_what_is_listed_is_legal_and_nothing_else(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> None:
        """Stored candidates are served only if the backend says so; values of another type are another candidate."""
        for problem, candidate in self._some(backend, target, problems):
            assert backend.why_illegal(problem, candidate, target) == ""
            others = [replace(candidate, template="no_such_template"), replace(candidate, backend="no_such_backend")]
            others.append(Candidate.make(backend.name, candidate.template, **dict(candidate.config), no_such_entry=1))
            for name, value in candidate.config:
                retyped = float(value) if isinstance(value, int) else f"{value}?"
                others.append(
                    Candidate.make(backend.name, candidate.template, **{**dict(candidate.config), name: retyped})
                )
            for other in others:
                assert backend.why_illegal(problem, other, target).strip(), other

    def _some(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> Iterator[tuple[Problem, Candidate]]:
        """The first candidate of each problem, which is what most calls get, and a few others."""
        for number, problem in enumerate(problems):
            legal = self._legal(backend, problem, target)
            others = random.Random(number).sample(legal[1:], min(self.sampled - 1, max(0, len(legal) - 1)))
            for candidate in legal[:1] + others:
                yield problem, candidate

    def _legal(self, backend: Backend, problem: Problem, target: Target) -> list[Candidate]:
        return [item for item in backend.candidates(problem, target) if isinstance(item, Candidate)]


class BackendSuite(CandidateSuite):
    """What every Backend must do, on the device that runs its kernels."""

    # Building and loading

    def test_building_is_pure(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem, candidate in self._some(backend, target, problems):
            before = (problem.key, candidate.id, target.key)
            artifact = backend.build(problem, candidate, target)
            assert artifact.candidate == candidate
            assert artifact == backend.build(problem, candidate, target)
            assert artifact == pickle.loads(pickle.dumps(artifact))
            assert before == (problem.key, candidate.id, target.key)
            assert artifact.path is None or artifact.path.exists()

    def test_kernels_say_what_they_are(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem, candidate in self._some(backend, target, problems):
            kernel = _load(backend, problem, candidate, target)
            assert kernel.candidate == candidate
            assert kernel.problem == problem
            assert kernel.workspace_bytes >= 0
            assert kernel.packing is None or kernel.packing.startswith(f"{backend.name}:")
            with contextlib.suppress(NotImplementedError):
                assert backend.packing_of(problem, candidate) == kernel.packing

    def test_what_it_cannot_load_is_refused_by_name(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> None:
        """Loading raises an error of gemmtune's own (KernelError, UnsupportedError) and nothing else."""
        for problem, candidate in self._some(backend, target, problems):
            unknown = replace(candidate, template="no_such_template")
            bare = Candidate.make(backend.name, "no_such_template")
            for wrong in (unknown, bare):
                with pytest.raises(GemmtuneError):
                    backend.load(Artifact(wrong, backend.source_digest()), problem)

    def test_what_it_called_illegal_loads_or_is_refused(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> None:
        for problem in problems:
            rows = [item.candidate for item in backend.candidates(problem, target) if isinstance(item, Illegal)]
            for candidate in rows[: self.sampled]:
                with contextlib.suppress(GemmtuneError):
                    assert isinstance(_load(backend, problem, candidate, target), Kernel)

    # Running

    def excuse(self, problem: Problem) -> str:
        """Why results on this machine are not checked; empty where they are. For faults of libraries, which a test can
        tell from the backend's own."""
        return ""

    def test_legal_candidates_are_right(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem, candidate in self._some(backend, target, problems):
            if not self.excuse(problem):
                _check(_load(backend, problem, candidate, target), problem)

    def test_a_kernel_serves_any_number_of_rows(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> None:
        for problem, candidate in self._some(backend, target, problems):
            served = min(problem.m, problem.n, problem.k, problem.batch) and not self.excuse(problem)
            if served and problem.a.layout.ld is None:
                kernel = _load(backend, problem, candidate, target)
                for m in (1, problem.m + 3):
                    _check(kernel, problem.with_m(m))

    def test_packing_is_undone_bit_for_bit(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem, candidate in self._some(backend, target, problems):
            kernel = _load(backend, problem, candidate, target)
            if kernel.packing is None or not problem.b.constant:
                continue
            raw = make_inputs(problem, 3).b
            packed = kernel.pack(raw)
            assert (packed.layout, packed.n, packed.k) == (kernel.packing, problem.n, problem.k)
            assert packed.dtype == problem.b.dtype
            assert backend.why_unreadable(packed) == ""
            _same_weight(backend.unpack(packed), raw)

    def test_scratch_is_not_more_than_declared(self, backend: Backend, target: Target) -> None:
        """Of what torch allocates in a call, less a result in float32 before it is copied into the output."""
        for problem, candidate in self._some(backend, target, _ROOMY):
            kernel = _load(backend, problem, candidate, target)
            inputs = make_inputs(problem, 1)
            b = kernel.pack(inputs.b) if kernel.packing else inputs.b
            out = torch.empty(problem.m, problem.n, dtype=getattr(torch, problem.out_dtype))
            kernel.run(inputs.a, b, inputs.aux, out)  # sets up what it keeps
            with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
                kernel.run(inputs.a, b, inputs.aux, out)
            allowed = kernel.workspace_bytes + 4 * problem.m * problem.n + _SLACK_BYTES
            assert _most_allocated(profile) <= allowed, f"{candidate.id} on {problem.key}"

    def test_the_default_packing_packs(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem in (*problems, *_ROOMY):
            candidate = backend.default_packing(problem, target) if problem.b.constant else None
            if candidate is not None:
                kernel = _load(backend, problem, candidate, target)
                assert kernel.packing is not None
                assert kernel.pack(make_inputs(problem, 2).b).layout == kernel.packing

    def _legal(self, backend: Backend, problem: Problem, target: Target) -> list[Candidate]:
        if not backend.available(target):
            pytest.skip(backend.available(target).reason)
        return super()._legal(backend, problem, target)


def _load(backend: Backend, problem: Problem, candidate: Candidate, target: Target) -> Kernel:
    return backend.load(backend.build(problem, candidate, target), problem)


def _check(kernel: Kernel, problem: Problem) -> None:
    def run(inputs: Inputs, out: Tensor) -> None:
        kernel.run(inputs.a, kernel.pack(inputs.b) if kernel.packing else inputs.b, inputs.aux, out)

    verdict = verify(run, problem, prepare(problem, 1))
    assert verdict.ok, f"{kernel.candidate.id} on {problem.key}: {verdict}"


def _same_weight(found: object, raw: Tensor | QuantWeight) -> None:
    if isinstance(raw, Tensor):
        assert isinstance(found, Tensor)
        pairs = [(found, raw)]
    else:
        assert isinstance(found, QuantWeight)
        assert (found.k, found.quant, found.dtype) == (raw.k, raw.quant, raw.dtype)
        assert (found.zero_point is None) == (raw.zero_point is None)
        pairs = [(found.data, raw.data), (found.scale, raw.scale)]
        if found.zero_point is not None and raw.zero_point is not None:
            pairs.append((found.zero_point, raw.zero_point))
    for got, wanted in pairs:
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def _most_allocated(profile: torch.profiler.profile) -> int:
    """Bytes that torch held at most at one time within a profile, beyond what it held before."""
    results: Any = profile.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
