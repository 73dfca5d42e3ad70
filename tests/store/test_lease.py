"""Leases: the remaining time, and an owner that lost its lease."""

from __future__ import annotations

import threading
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


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_duration_must_be_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive and at most 3600"):
        check_ttl(seconds)


@pytest.mark.parametrize("renewed", [True, False])
def test_renewal_tells_whether_the_lease_is_still_held(renewed: bool) -> None:
    assert Lease(60.0, lambda: renewed, lambda: None).renew() is renewed


def test_block_renews_the_lease_until_its_end_and_releases_it() -> None:
    renewals, releases = threading.Semaphore(0), list[int]()

    def renew() -> bool:
        renewals.release()
        return True

    lease = Lease(0.003, renew, lambda: releases.append(1))
    with lease as entered:
        assert entered is lease
        for _ in range(3):
            assert renewals.acquire(timeout=10.0)
        assert releases == []
    assert releases == [1]
    while renewals.acquire(blocking=False):
        pass
    assert not renewals.acquire(timeout=0.05)


def test_lease_that_was_not_entered_is_released_at_the_end() -> None:
    releases: list[int] = []
    lease = Lease(60.0, lambda: True, lambda: releases.append(1))
    lease.__exit__(None, None, None)
    assert releases == [1]
