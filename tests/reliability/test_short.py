"""Tests that run the short form of every check that times nothing."""

from __future__ import annotations

import pytest

from reliability.checks import Check, all_checks


@pytest.mark.parametrize("check", [c for c in all_checks().values() if not c.timed], ids=lambda c: c.name)
def test_the_bar_of_a_check_holds_in_its_short_form(check: Check) -> None:
    outcome = check.run(False)
    assert outcome.ok, outcome.measured
