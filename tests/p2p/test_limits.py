"""Quotas and bandwidth: pure, so time is a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.link.bandwidth import BURST_S, RECHECK_S, Bandwidth, TokenBucket
from p2p.link.quota import Limits, Quota

TIGHT = Limits(
    calls_per_peer=2, calls=3, streams_per_peer=1, streams=2, bytes_per_peer=100, bytes=150, requests_per_s=10,
    request_burst=5, refusals=3, refusals_forgiven_per_s=1,
)  # fmt: skip


def test_calls_are_bounded_for_one_peer_and_for_all() -> None:
    quota = Quota(TIGHT)
    assert [quota.begin_call("a", 1, 0.0) for _ in range(3)] == [None, None, "too many calls at once"]
    assert quota.begin_call("b", 1, 0.0) is None
    assert quota.begin_call("c", 1, 0.0) == "too many calls at once"
    quota.end_call("a", 1)
    assert quota.begin_call("c", 1, 0.0) is None


def test_bytes_are_bounded_for_one_peer_and_for_all() -> None:
    quota = Quota(TIGHT)
    assert quota.hold("a", 100, 0.0)
    assert not quota.hold("a", 1, 0.0)
    assert quota.begin_call("b", 51, 0.0) == "too many bytes in flight"
    assert quota.under_way("b") == (0, 0, 0)
    assert quota.begin_call("b", 50, 0.0) is None
    quota.release("a", 100)
    assert quota.hold("a", 100, 0.0)


def test_streams_are_bounded() -> None:
    quota = Quota(TIGHT)
    assert quota.begin_stream("a", 0.0) is None
    assert quota.begin_stream("a", 0.0) is not None
    assert quota.begin_stream("b", 0.0) is None
    assert quota.begin_stream("c", 0.0) is not None
    quota.end_stream("a")
    assert quota.begin_stream("c", 0.0) is None


def test_requests_a_second_are_bounded_and_recover() -> None:
    quota = Quota(TIGHT)

    def ask(now: float) -> bool:
        if quota.begin_call("a", 0, now) is None:
            quota.end_call("a", 0)
            return True
        return False

    assert [ask(0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert ask(0.1)
    assert not ask(0.1)
    assert [ask(100.0) for _ in range(7)] == [True] * 5 + [False] * 2


def test_refusals_are_forgiven_with_time_and_reported_when_they_pile_up() -> None:
    quota = Quota(TIGHT)
    assert not any(quota.refused("a", float(now)) for now in range(20))
    assert [quota.refused("b", 0.0) for _ in range(4)] == [False, False, False, True]


def test_a_peer_with_nothing_under_way_is_forgotten() -> None:
    quota = Quota(TIGHT)
    quota.begin_call("a", 5, 0.0)
    quota.forget("a")
    assert quota.under_way("a") == (1, 0, 5)
    quota.end_call("a", 5)
    quota.forget("a")
    assert quota.under_way("a") == (0, 0, 0)
    quota.forget("never seen")


@given(st.lists(st.integers(1, 300_000), min_size=20, max_size=60), st.integers(10_000, 10_000_000))
def test_a_limited_rate_is_kept_within_one_piece_and_a_burst(sizes: list[int], rate: int) -> None:
    bucket, now = TokenBucket(), 1000.0
    bucket.set_rate(rate)
    for size in sizes:
        while (wait_s := bucket.wait_s(now)) > 0:
            assert wait_s <= RECHECK_S
            now += wait_s
        bucket.spend(size, now)
    went = sum(sizes[:-1])
    assert went <= rate * (now - 1000.0 + BURST_S) + max(sizes) + 1


def test_no_limit_never_waits_and_a_limit_can_be_changed_at_any_time() -> None:
    bandwidth = Bandwidth()
    bandwidth.up.spend(10**12, 0.0)
    assert bandwidth.up.wait_s(0.0) == 0
    bandwidth.set_limits(1000.0, None)
    bandwidth.up.spend(100_000, 1.0)
    assert bandwidth.up.wait_s(1.0) == RECHECK_S
    bandwidth.set_limits(1_000_000.0, None)
    assert bandwidth.up.wait_s(1.0) == 0
    with pytest.raises(ValueError, match="above zero"):
        bandwidth.set_limits(0, None)
