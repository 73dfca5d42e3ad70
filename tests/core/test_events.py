"""Events of Problems that are tuned in turns are passed on as if one were tuned after another."""

from __future__ import annotations

import pytest

from gemmtune.core.events import BestSoFar, Event, EventsInOrder


@pytest.mark.parametrize(
    ("happened", "expected"),
    [
        ("a0 b0 a1 -0 b1 -1 c0", "a0 a1 b0 b1 c0"),
        ("a0 b0 c0 -1 c1 a1 -0 c2", "a0 a1 b0 c0 c1 c2"),
        ("b0 -1 -0 c0 -2", "b0 c0"),
        ("b0 a0", "a0"),
    ],
)
def test_events_of_a_problem_wait_for_the_ends_of_those_before_it(happened: str, expected: str) -> None:
    """A letter and a number is an event of the Problem a, b or c; ``-`` and an index the end of one."""
    reported: list[Event] = []
    events = EventsInOrder(reported.append)
    for word in happened.split():
        if word[0] == "-":
            events.end(int(word[1]))
        else:
            events.of("abc".index(word[0]))(BestSoFar(word, 1.0, 1.0))
    assert [event.candidate_id for event in reported if isinstance(event, BestSoFar)] == expected.split()
