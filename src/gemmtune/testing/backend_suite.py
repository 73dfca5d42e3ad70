"""The conformance suite for implementations of ``Backend``. Subclass it and define a fixture called ``backend``.

class TestMyBackend(BackendSuite):
    @pytest.fixture
    def backend(self):
        return MyBackend()

``CandidateSuite`` has the tests that build and run nothing. Use it for a backend whose device this machine lacks, and
define a fixture called ``target`` that returns a Target of that device.

By default a suite asks the backend for candidates for 40 random problems of all families, and for some problems in
which a size is 0. Override the fixture ``problems`` to use others. For each problem with legal candidates,
``BackendSuite`` runs a few of them and checks the results with ``verify.verify``, which also detects writes beyond the
output and writes into or beside the inputs.
"""

from __future__ import annotations

import contextlib
import functools
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
from ..verify.reference_cases import ReferenceCase, make_reference_cases
from ..verify.verify import allowed_rounding, verify
from .problems import random_problem

_EMPTY_PROBLEMS = (
    linear_problem(0, 8, 16, "float32"),
    linear_problem(3, 8, 0, "bfloat16"),
    int_problem(3, 0, 16),
    bmm_problem(0, 3, 8, 16, "float32"),
)
# Large enough that a hidden copy of the weight stands out from what torch allocates anyway.
_LARGE = (
    linear_problem(16, 512, 1024, "bfloat16"),
    linear_problem(16, 512, 1024, "float32"),
    int_problem(16, 512, 1024),
    weight_only_problem(16, 512, 1024),
    weight_only_problem(16, 512, 1024, bits=4, group=128, zero_point=True),
)
_SLACK_BYTES = 256 << 10


class CandidateSuite:
    """The tests of a Backend that neither build nor run a kernel.

    Subclasses define the fixture ``backend``. ``sampled`` is the number of candidates tested for each problem.
    """

    sampled = 3

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("give the suite a fixture called `backend` that returns a Backend")

    @pytest.fixture
    def target(self) -> Target:
        """Return the Target whose kernels are tested. Default: this CPU, with torch's number of threads."""
        return replace(current_cpu(), threads=torch.get_num_threads())

    @pytest.fixture
    def problems(self) -> Sequence[Problem]:
        """Return the problems that the backend is tested with. Keep them small."""
        rounds = range(8)
        return (
            *(random_problem(random.Random(i), 64, family) for i in rounds for family in FAMILIES),
            *_EMPTY_PROBLEMS,
        )

    # Availability and candidates

    def test_it_is_available_or_says_why_not(self, backend: Backend, target: Target) -> None:
        for variant in (target, replace(target, device="cuda", name="none"), replace(target, isa=())):
            answer = backend.available(variant)
            assert bool(answer) == (answer.reason == "")

    def test_the_backend_has_a_name_and_a_digest_that_stay(self, backend: Backend) -> None:
        assert backend.name.isidentifier()
        assert backend.source_digest()
        assert backend.source_digest() == backend.source_digest()

    def test_candidates_come_one_by_one(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem in problems:
            assert isinstance(backend.candidates(problem, target), Iterator)

    def test_it_solves_something(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        assert any(self._legal_candidates(backend, problem, target) for problem in problems)

    def test_candidates_are_data_with_stable_ids_of_their_own(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> None:
        for problem in problems:
            listed = list(backend.candidates(problem, target))
            assert listed == list(backend.candidates(problem, target))
            candidates = [item.candidate if isinstance(item, Illegal) else item for item in listed]
            assert len({candidate.id for candidate in candidates}) == len(candidates)
            for candidate in candidates:
                assert candidate.backend == backend.name
                decoded = Candidate.from_dict(json.loads(json.dumps(candidate.to_dict())))
                assert (decoded, decoded.id) == (candidate, candidate.id)

    def test_what_is_illegal_has_a_reason(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem in problems:
            for item in backend.candidates(problem, target):
                assert not isinstance(item, Illegal) or item.reason.strip()

    def test_what_is_listed_is_legal_and_nothing_else(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> None:
        """``why_illegal`` accepts every listed candidate and rejects all others.

        Dispatch serves a stored candidate only if its backend accepts it. A config value of another type makes a
        different candidate.
        """
        for problem, candidate in self._sample(backend, target, problems):
            assert backend.why_illegal(problem, candidate, target) == ""
            unlisted = [replace(candidate, template="no_such_template"), replace(candidate, backend="no_such_backend")]
            unlisted.append(Candidate.make(backend.name, candidate.template, **dict(candidate.config), no_such_entry=1))
            for name, value in candidate.config:
                retyped = float(value) if isinstance(value, int) else f"{value}?"
                unlisted.append(
                    Candidate.make(backend.name, candidate.template, **{**dict(candidate.config), name: retyped})
                )
            for variant in unlisted:
                assert backend.why_illegal(problem, variant, target).strip(), variant

    def _sample(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> Iterator[tuple[Problem, Candidate]]:
        """Yield each problem's first legal candidate, which serves most calls, and a few random others."""
        for seed, problem in enumerate(problems):
            legal = self._legal_candidates(backend, problem, target)
            others = random.Random(seed).sample(legal[1:], min(self.sampled - 1, max(0, len(legal) - 1)))
            for candidate in legal[:1] + others:
                yield problem, candidate

    def _legal_candidates(self, backend: Backend, problem: Problem, target: Target) -> list[Candidate]:
        return [item for item in backend.candidates(problem, target) if isinstance(item, Candidate)]


class BackendSuite(CandidateSuite):
    """The tests of a Backend on a machine with the device that runs its kernels."""

    # Building and loading

    def test_building_is_pure(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem, candidate in self._sample(backend, target, problems):
            before = (problem.key, candidate.id, target.key)
            artifact = backend.build(problem, candidate, target)
            assert artifact.candidate == candidate
            assert artifact == backend.build(problem, candidate, target)
            assert artifact == pickle.loads(pickle.dumps(artifact))
            assert before == (problem.key, candidate.id, target.key)
            assert artifact.path is None or artifact.path.exists()

    def test_kernels_say_what_they_are(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem, candidate in self._sample(backend, target, problems):
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
        """``load`` raises an error of gemmtune's own (KernelError, UnsupportedError), and no other, for a candidate
        that it does not know."""
        for problem, candidate in self._sample(backend, target, problems):
            with_config = replace(candidate, template="no_such_template")
            without_config = Candidate.make(backend.name, "no_such_template")
            for wrong in (with_config, without_config):
                with pytest.raises(GemmtuneError):
                    backend.load(Artifact(wrong, backend.source_digest()), problem)

    def test_what_it_called_illegal_loads_or_is_refused(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> None:
        for problem in problems:
            illegal = [item.candidate for item in backend.candidates(problem, target) if isinstance(item, Illegal)]
            for candidate in illegal[: self.sampled]:
                with contextlib.suppress(GemmtuneError):
                    assert isinstance(_load(backend, problem, candidate, target), Kernel)

    # Running

    def excuse(self, problem: Problem) -> str:
        """Return why this machine's results for a problem are not checked; empty if they are checked.

        Override it for faults of a library that the test can tell apart from faults of the backend.
        """
        return ""

    def test_legal_candidates_are_right(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem, candidate in self._sample(backend, target, problems):
            if not self.excuse(problem):
                _assert_correct(_load(backend, problem, candidate, target), problem)

    def test_a_kernel_serves_any_number_of_rows(
        self, backend: Backend, target: Target, problems: Sequence[Problem]
    ) -> None:
        for problem, candidate in self._sample(backend, target, problems):
            served = min(problem.m, problem.n, problem.k, problem.batch) and not self.excuse(problem)
            if served and problem.a.layout.ld is None:
                kernel = _load(backend, problem, candidate, target)
                for m in (1, problem.m + 3):
                    _assert_correct(kernel, problem.with_m(m))

    def test_packing_is_undone_bit_for_bit(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem, candidate in self._sample(backend, target, problems):
            kernel = _load(backend, problem, candidate, target)
            if kernel.packing is None or not problem.b.constant:
                continue
            raw = make_inputs(problem, 3).b
            packed = kernel.pack(raw)
            assert (packed.layout, packed.n, packed.k) == (kernel.packing, problem.n, problem.k)
            assert packed.dtype == problem.b.dtype
            assert backend.why_unreadable(packed) == ""
            _assert_same_weight(backend.unpack(packed), raw)

    def test_scratch_is_not_more_than_declared(self, backend: Backend, target: Target) -> None:
        """The peak of what torch allocates during a call is within ``workspace_bytes``.

        A result in float32 that is then copied into the output is not counted.
        """
        for problem, candidate in self._sample(backend, target, _LARGE):
            kernel = _load(backend, problem, candidate, target)
            inputs = make_inputs(problem, 1)
            b = kernel.pack(inputs.b) if kernel.packing else inputs.b
            out = torch.empty(problem.m, problem.n, dtype=getattr(torch, problem.out_dtype))
            kernel.run(inputs.a, b, inputs.aux, out)  # the first call may allocate what the kernel keeps between calls
            with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
                kernel.run(inputs.a, b, inputs.aux, out)
            allowed = kernel.workspace_bytes + 4 * problem.m * problem.n + _SLACK_BYTES
            assert _peak_allocated_bytes(profile) <= allowed, f"{candidate.id} on {problem.key}"

    def test_the_default_packing_packs(self, backend: Backend, target: Target, problems: Sequence[Problem]) -> None:
        for problem in (*problems, *_LARGE):
            candidate = backend.default_packing(problem, target) if problem.b.constant else None
            if candidate is not None:
                kernel = _load(backend, problem, candidate, target)
                assert kernel.packing is not None
                assert kernel.pack(make_inputs(problem, 2).b).layout == kernel.packing

    def _legal_candidates(self, backend: Backend, problem: Problem, target: Target) -> list[Candidate]:
        if not backend.available(target):
            pytest.skip(backend.available(target).reason)
        return super()._legal_candidates(backend, problem, target)


def _load(backend: Backend, problem: Problem, candidate: Candidate, target: Target) -> Kernel:
    return backend.load(backend.build(problem, candidate, target), problem)


def _assert_correct(kernel: Kernel, problem: Problem) -> None:
    def run(inputs: Inputs, out: Tensor) -> None:
        kernel.run(inputs.a, kernel.pack(inputs.b) if kernel.packing else inputs.b, inputs.aux, out)

    verdict = verify(run, problem, _reference_cases(problem), rounding=allowed_rounding(kernel))
    assert verdict.ok, f"{kernel.candidate.id} on {problem.key}: {verdict}"


@functools.lru_cache(maxsize=4)  # the candidates of one problem follow one another
def _reference_cases(problem: Problem) -> tuple[ReferenceCase, ...]:
    return make_reference_cases(problem, 1)


def _assert_same_weight(unpacked: object, raw: Tensor | QuantWeight) -> None:
    if isinstance(raw, Tensor):
        assert isinstance(unpacked, Tensor)
        pairs = [(unpacked, raw)]
    else:
        assert isinstance(unpacked, QuantWeight)
        assert (unpacked.k, unpacked.quant, unpacked.dtype) == (raw.k, raw.quant, raw.dtype)
        assert (unpacked.zero_point is None) == (raw.zero_point is None)
        pairs = [(unpacked.data, raw.data), (unpacked.scale, raw.scale)]
        if unpacked.zero_point is not None and raw.zero_point is not None:
            pairs.append((unpacked.zero_point, raw.zero_point))
    for actual, expected in pairs:
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def _peak_allocated_bytes(profile: torch.profiler.profile) -> int:
    """Return the peak of torch's allocated bytes during a profile, relative to the amount at its start."""
    results: Any = profile.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak
