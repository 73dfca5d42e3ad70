"""enumerate_candidates: ATen's first, then the other backends' in turn, and illegal candidates with their reasons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemmtune import backends
from gemmtune.backends.base import Artifact, Availability, Backend, Kernel
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.problem import Problem
from gemmtune.testing.store_suite import PROBLEM, TARGET
from gemmtune.tuning import candidates
from gemmtune.tuning.candidates import enumerate_candidates


class ListBackend(Backend):
    """Backend that lists ``items``; an exception among them is raised at its position."""

    name = "listing"

    def __init__(self, *items: Candidate | Illegal | Exception, reason: str = "") -> None:
        self._items, self._reason = items, reason

    def available(self, target: object) -> Availability:
        return Availability(not self._reason, self._reason)

    def candidates(self, problem: Problem, target: object) -> Iterator[Candidate | Illegal]:
        for item in self._items:
            if isinstance(item, Exception):
                raise item
            yield item

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        raise NotImplementedError

    def source_digest(self) -> str:
        return ""


def make_candidates(name: str, count: int) -> list[Candidate]:
    return [Candidate.make(name, "t", i=i) for i in range(count)]


@pytest.fixture
def backends_by_name(monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
    registered: dict[str, Backend] = {}
    monkeypatch.setattr(backends, "get", registered.__getitem__)
    return registered


def test_candidates_are_atens_then_round_robin(backends_by_name: dict[str, Backend]) -> None:
    backends_by_name["aten"] = ListBackend(*make_candidates("aten", 3))
    backends_by_name["x"] = ListBackend(*make_candidates("x", 3))
    backends_by_name["y"] = ListBackend(*make_candidates("y", 1))
    legal, illegal = enumerate_candidates(PROBLEM, TARGET, ["x", "aten", "y", "x"])
    assert [candidate.backend for candidate in legal] == ["aten"] * 3 + ["x", "y", "x", "x"]
    assert [candidate["i"] for candidate in legal] == [0, 1, 2, 0, 0, 1, 2]
    assert illegal == []


def test_illegal_candidates_have_their_reason(backends_by_name: dict[str, Backend]) -> None:
    illegal = Illegal(Candidate.make("x", "t", i=9), "too large")
    backends_by_name["x"] = ListBackend(illegal, *make_candidates("x", 1))
    assert enumerate_candidates(PROBLEM, TARGET, ["x"]) == (make_candidates("x", 1), [illegal])


def test_unavailable_backend_is_one_illegal_candidate(backends_by_name: dict[str, Backend]) -> None:
    backends_by_name["x"] = ListBackend(*make_candidates("x", 1), reason="no compiler")
    legal, illegal = enumerate_candidates(PROBLEM, TARGET, ["x"])
    assert legal == []
    assert illegal == [Illegal(Candidate.make("x", "*"), "backend unavailable: no compiler")]


def test_exception_of_a_backend_affects_no_other_backend(backends_by_name: dict[str, Backend]) -> None:
    backends_by_name["x"] = ListBackend(*make_candidates("x", 1), RuntimeError("boom"))
    backends_by_name["y"] = ListBackend(*make_candidates("y", 1))
    legal, illegal = enumerate_candidates(PROBLEM, TARGET, ["x", "y"])
    assert legal == make_candidates("x", 1) + make_candidates("y", 1)
    assert "boom" in illegal[0].reason


def test_duplicate_candidates_are_listed_once(backends_by_name: dict[str, Backend]) -> None:
    backends_by_name["x"] = ListBackend(*make_candidates("x", 2), *make_candidates("x", 2))
    assert enumerate_candidates(PROBLEM, TARGET, ["x"])[0] == make_candidates("x", 2)


def test_unknown_backend_raises_value_error() -> None:
    with pytest.raises(ValueError, match="unknown backend 'nope'"):
        enumerate_candidates(PROBLEM, TARGET, ["nope"])


def test_family_that_a_backend_does_not_take_is_one_illegal_candidate(backends_by_name: dict[str, Backend]) -> None:
    class OtherFamily(ListBackend):
        def takes(self, family: str) -> bool:
            return False

    backends_by_name["x"] = OtherFamily(*make_candidates("x", 1))
    reason = f"listing does not take problems of the family {PROBLEM.family}"
    expected: tuple[list[Candidate], list[Illegal]] = ([], [Illegal(Candidate.make("x", "*"), reason)])
    assert enumerate_candidates(PROBLEM, TARGET, ["x"]) == expected


def test_list_of_one_backend_is_cut_off(backends_by_name: dict[str, Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "MAX_PER_BACKEND", 3)
    illegal = Illegal(Candidate.make("x", "t", i=9), "too large")
    backends_by_name["x"] = ListBackend(*make_candidates("x", 5), illegal)
    backends_by_name["y"] = ListBackend(*make_candidates("y", 3))
    legal, refused = enumerate_candidates(PROBLEM, TARGET, ["x", "y"])
    assert [candidate.backend for candidate in legal] == ["x", "y"] * 3
    assert refused == [illegal]
