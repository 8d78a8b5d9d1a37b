"""Token buckets: what they hand out is bounded, and what they owe is handed out in time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.rate_limit import KeyedRateLimit, TokenBucket

RATES = st.floats(0.01, 1000)
BURSTS = st.floats(1, 1000)
PAUSES_S = st.floats(0, 100)
STEPS = st.lists(st.tuples(PAUSES_S, st.floats(0, 200)), max_size=60)


@given(RATES, BURSTS, STEPS)
def test_no_period_yields_more_than_the_burst_and_what_its_seconds_earn(
    rate: float, burst: float, steps: list[tuple[float, float]]
) -> None:
    now = 50.0
    bucket = TokenBucket(rate, burst, now)
    taken: list[tuple[float, float]] = []  # (when, how much)
    for pause_s, amount in steps:
        now += pause_s
        taken.append((now, amount if bucket.take(now, amount) else 0.0))
    for first, (begins_at, _) in enumerate(taken):
        total = 0.0
        for at, amount in taken[first:]:
            total += amount
            assert total <= burst + rate * (at - begins_at) + 1e-6 * (total + 1)


@given(RATES, BURSTS, STEPS)
def test_a_bucket_refuses_only_what_it_does_not_have(
    rate: float, burst: float, steps: list[tuple[float, float]]
) -> None:
    now, level = 50.0, burst
    bucket = TokenBucket(rate, burst, now)
    for pause_s, amount in steps:
        now, level = now + pause_s, min(burst, level + pause_s * rate)
        if bucket.take(now, amount):
            assert amount <= level + 1e-6 * burst
            level -= amount
        else:
            assert amount > level - 1e-6 * burst


@given(RATES, BURSTS, st.floats(0, 1000), st.floats(0, 1))
def test_the_announced_wait_is_long_enough_and_no_longer(rate: float, burst: float, debt: float, part: float) -> None:
    amount, now = part * burst, 50.0
    bucket = TokenBucket(rate, burst, now)
    bucket.spend(now, burst + debt)
    wait_s = bucket.wait_s(now, amount)
    assert wait_s == pytest.approx((amount + debt) / rate)
    assert not bucket.take(now + 0.99 * wait_s, amount) or wait_s < 1e-6
    assert bucket.take(now + 1.01 * wait_s + 1e-6, amount)


@given(RATES, BURSTS, st.lists(st.floats(0, 100), max_size=40))
def test_a_clock_that_jumps_back_and_forth_earns_no_more_than_its_highest_time(
    rate: float, burst: float, times: list[float]
) -> None:
    bucket, total = TokenBucket(rate, burst, 0.0), 0
    for now in times:
        while total < 500 and bucket.take(now):
            total += 1
    assert total <= burst + rate * max(times, default=0.0) + 1e-6 * (total + 1)


def test_more_than_the_burst_never_comes_and_a_rate_of_zero_refills_nothing() -> None:
    assert TokenBucket(1.0, 5.0, 0.0).wait_s(0.0, 6.0) == math.inf
    bucket = TokenBucket(0.0, 1.0, 0.0)
    assert bucket.take(0.0)
    assert not bucket.take(1e9)
    assert bucket.wait_s(1e9) == math.inf


def test_a_new_rate_begins_empty_and_without_debt() -> None:
    bucket = TokenBucket(1.0, 10.0, 0.0)
    bucket.spend(0.0, 1000.0)
    bucket.set_rate(4.0, 8.0)
    assert not bucket.take(0.0)
    assert bucket.wait_s(0.0) == 0.25
    assert bucket.take(1.0, 4.0)
    assert bucket.take(100.0, 8.0)
    assert not bucket.take(100.0, 0.5)


@given(st.lists(st.integers(0, 30), max_size=200))
def test_a_keyed_limit_is_bounded_and_drops_the_key_that_was_unused_for_longest(keys: list[int]) -> None:
    limit: KeyedRateLimit[int] = KeyedRateLimit(burst=1, per_s=0.0, max_keys=8)
    recent: list[int] = []  # oldest first
    for key in keys:
        assert limit.has_token(key, 0.0) == (key not in recent)
        assert limit.take(key, 0.0) == (key not in recent)
        recent = [*(one for one in recent if one != key), key][-8:]
        assert len(limit) == len(recent)


def test_a_keyed_limit_on_credit_tells_when_it_is_paid_for() -> None:
    limit: KeyedRateLimit[str] = KeyedRateLimit(burst=4, per_s=2.0)
    assert [limit.delay_s("a", 0.0) for _ in range(6)] == [0.0, 0.0, 0.0, 0.0, 0.5, 1.0]
    assert limit.delay_s("b", 0.0, 6.0) == 1.0
    assert limit.delay_s("a", 1.5, 0.0) == 0.0
    assert limit.delay_s("a", 1.5, 2.0) == 0.5
