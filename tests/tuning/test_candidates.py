"""enumerate_candidates: ATen first, the others in turn, every refusal with its reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemmtune import backends
from gemmtune.backends.base import Artifact, Availability, Backend, Kernel
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.problem import Problem
from gemmtune.testing.store_suite import PROBLEM, TARGET
from gemmtune.tuning.candidates import enumerate_candidates


class Listing(Backend):
    """A backend that lists what it is given; an exception in the list is raised when it is reached."""

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


def make(name: str, count: int) -> list[Candidate]:
    return [Candidate.make(name, "t", i=i) for i in range(count)]


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
    found: dict[str, Backend] = {}
    monkeypatch.setattr(backends, "get", found.__getitem__)
    return found


def test_aten_first_then_round_robin(rooms: dict[str, Backend]) -> None:
    rooms["aten"] = Listing(*make("aten", 3))
    rooms["x"] = Listing(*make("x", 3))
    rooms["y"] = Listing(*make("y", 1))
    legal, illegal = enumerate_candidates(PROBLEM, TARGET, ["x", "aten", "y", "x"])
    assert [c.backend for c in legal] == ["aten"] * 3 + ["x", "y", "x", "x"]
    assert [c["i"] for c in legal] == [0, 1, 2, 0, 0, 1, 2]
    assert illegal == []


def test_illegal_ones_keep_their_reason(rooms: dict[str, Backend]) -> None:
    refused = Illegal(Candidate.make("x", "t", i=9), "too large")
    rooms["x"] = Listing(refused, *make("x", 1))
    assert enumerate_candidates(PROBLEM, TARGET, ["x"]) == (make("x", 1), [refused])


def test_an_unavailable_backend_says_why(rooms: dict[str, Backend]) -> None:
    rooms["x"] = Listing(*make("x", 1), reason="no compiler")
    legal, illegal = enumerate_candidates(PROBLEM, TARGET, ["x"])
    assert legal == []
    assert illegal == [Illegal(Candidate.make("x", "*"), "backend unavailable: no compiler")]


def test_a_broken_backend_costs_only_itself(rooms: dict[str, Backend]) -> None:
    rooms["x"] = Listing(*make("x", 1), RuntimeError("boom"))
    rooms["y"] = Listing(*make("y", 1))
    legal, illegal = enumerate_candidates(PROBLEM, TARGET, ["x", "y"])
    assert legal == make("x", 1) + make("y", 1)
    assert "boom" in illegal[0].reason


def test_duplicates_are_one(rooms: dict[str, Backend]) -> None:
    rooms["x"] = Listing(*make("x", 2), *make("x", 2))
    assert enumerate_candidates(PROBLEM, TARGET, ["x"])[0] == make("x", 2)


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown backend 'nope'"):
        enumerate_candidates(PROBLEM, TARGET, ["nope"])
