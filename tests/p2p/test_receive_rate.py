"""The speed of a link, from what arrives on it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.link.receive_rate import ENOUGH_BYTES, SKIPPED_BYTES, ReceiveRate
from tests.p2p.nodes import measured_bandwidth

KIB = 1024


def burst(rate: ReceiveRate, sizes: list[int], bytes_per_s: float, at: float = 0.0) -> float:
    """Let pieces arrive one after another at this speed; returns when the last has arrived."""
    for index, size in enumerate(sizes):
        at += size / bytes_per_s
        rate.arrived(size, at, more=index + 1 < len(sizes))
    return at


@given(
    st.lists(st.integers(1, 300 * KIB), min_size=1, max_size=40),
    st.floats(1e4, 1e9),
    st.floats(0, 100),
)
def test_a_steady_burst_tells_its_speed(sizes: list[int], bytes_per_s: float, at: float) -> None:
    rate = ReceiveRate()
    burst(rate, sizes, bytes_per_s, at)
    if rate.bytes_per_s is not None:
        assert rate.bytes_per_s == pytest.approx(bytes_per_s, rel=0.05)
    else:
        assert sum(sizes) < SKIPPED_BYTES + ENOUGH_BYTES + 2 * 300 * KIB


def test_the_time_between_bursts_and_small_messages_do_not_count() -> None:
    rate = ReceiveRate()
    at = 0.0
    for _ in range(5):
        at = burst(rate, [32 * KIB] * 12, 1e6, at + 60)
        for _ in range(100):
            at += 0.01
            rate.arrived(1000, at, more=False)
    assert rate.bytes_per_s == pytest.approx(1e6, rel=0.05)


def test_only_small_messages_tell_nothing() -> None:
    rate = ReceiveRate()
    for number in range(1000):
        rate.arrived(4 * KIB, 0.001 * number, more=False)
    assert rate.bytes_per_s is None


def test_a_link_that_becomes_slower_is_noticed_within_some_megabytes() -> None:
    rate = ReceiveRate()
    at = burst(rate, [64 * KIB] * 1000, 10e6)
    burst(rate, [64 * KIB] * 400, 1e6, at)
    assert rate.bytes_per_s == pytest.approx(1e6, rel=0.1)


def test_the_slow_beginning_of_a_burst_does_not_count() -> None:
    rate = ReceiveRate()
    at = burst(rate, [8 * KIB] * 7 + [KIB], 1e5)
    rate.arrived(8 * KIB, at, more=True)
    burst(rate, [32 * KIB] * 20, 1e7, at)
    assert rate.bytes_per_s == pytest.approx(1e7, rel=0.1)


async def test_the_speed_of_a_narrow_link_between_real_nodes() -> None:
    assert await measured_bandwidth(5e6, 0.01, 2 * 2**20) == pytest.approx(5e6, rel=0.35)
