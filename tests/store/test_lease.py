"""Leases: the remaining time, and an owner that lost its lease."""

from __future__ import annotations

from typing import NoReturn

import pytest

from gemmtune.core.errors import StoreError
from gemmtune.store.lease import MAX_TTL_S, Lease, check_ttl, remaining_s


@pytest.mark.parametrize(
    ("expires", "remaining"), [(MAX_TTL_S, MAX_TTL_S), (0.5, 0.5), (0.0, None), (-1.0, None), (MAX_TTL_S + 1.0, None)]
)
def test_lease_remains_for_an_hour_at_most(expires: float, remaining: float | None) -> None:
    assert remaining_s(100.0 + expires, 100.0) == remaining


def test_hour_is_an_allowed_duration() -> None:
    check_ttl(MAX_TTL_S)
    with pytest.raises(ValueError, match="at most 3600"):
        check_ttl(MAX_TTL_S + 1.0)


def test_store_that_cannot_be_written_ends_a_lease_without_an_exception() -> None:
    def fail() -> NoReturn:
        raise StoreError("disk full")

    lease = Lease(60.0, fail, fail)
    assert lease.renew() is False
    lease.release()
