"""Quotas and bandwidth: pure, so time is a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.channel.pipe import MOST_UNSENT_BYTES, UnsentBound
from p2p.link.bandwidth import (
    BURST_S,
    LONGEST_PAUSE_S,
    MEASURE_AGAIN_S,
    RECHECK_S,
    REPLY_S,
    SHARE,
    WINDOW_S,
    Bandwidth,
    ByteRateLimit,
    SpareUpload,
)
from p2p.link.quota import Limits, Quota, Resource, SharedLimit
from p2p.shares import Holder

TIGHT = Limits(
    calls_per_peer=2, calls=4, calls_floor=0, streams_per_peer=1, streams=2, streams_floor=0, bytes_per_peer=100,
    bytes=200, bytes_floor=0, requests_per_s=10, request_burst=5, refusals=3, refusals_forgiven_per_s=1,
)  # fmt: skip


def test_calls_are_bounded_for_one_peer_and_for_all() -> None:
    quota = Quota(TIGHT)
    assert [quota.begin_call("a", 1, 0.0) for _ in range(3)] == [None, None, "too many calls at once"]
    assert quota.begin_call("b", 1, 0.0) is None
    assert quota.begin_call("c", 1, 0.0) is None
    assert quota.begin_call("d", 1, 0.0) == "too many calls at once"
    quota.end_call("b", 1)
    assert quota.begin_call("d", 1, 0.0) is None


def test_bytes_are_bounded_for_one_peer_and_for_all() -> None:
    quota = Quota(TIGHT)
    assert quota.hold("a", 100)
    assert not quota.hold("a", 1)
    assert quota.begin_call("b", 100, 0.0) is None
    assert quota.begin_call("c", 1, 0.0) == "too many bytes in flight"
    assert quota.under_way("c") == (0, 0, 0)
    quota.release("a", 1)
    assert quota.begin_call("c", 1, 0.0) is None


def test_streams_are_bounded() -> None:
    quota = Quota(TIGHT)
    assert quota.begin_stream("a") is None
    assert quota.begin_stream("a") is not None
    assert quota.begin_stream("b") is None
    assert quota.begin_stream("c") is not None
    quota.end_stream("a")
    assert quota.begin_stream("c") is None


def test_who_holds_too_much_makes_way_for_another_home_and_for_a_peer_of_the_same() -> None:
    def make_way(peer: str, resource: Resource, amount: int) -> None:
        assert resource is Resource.BYTES
        quota.release(peer, 10)

    quota = Quota(TIGHT, lambda peer: Holder(peer[0], peer), make_way)
    for _ in range(15):  # three quarters of the pool, which one home may have
        assert quota.hold("a1", 5)
        assert quota.hold("a2", 5)
    assert not quota.hold("a1", 5)  # nobody has more
    assert quota.hold("a3", 5)
    assert sorted(quota.under_way(peer)[2] for peer in ("a1", "a2")) == [65, 75]
    assert quota.hold("b", 80)
    assert sum(quota.under_way(peer)[2] for peer in ("a1", "a2", "a3")) == 115
    assert not quota.hold("b", 20)  # it would have more than its share


def test_a_floor_is_left_for_each_peer_whatever_others_use() -> None:
    limit = SharedLimit(per_peer=64, pool=128, floor=4)
    for stranger in range(200):
        while limit.take(f"stranger {stranger}", 1):
            pass
    assert limit.take("honest", 4)
    assert not limit.take("honest", 1)
    limit.give_back("honest", 4)
    assert limit.used("honest") == 0


def test_late_comers_get_their_share_of_a_pool_that_early_ones_would_fill() -> None:
    limit = SharedLimit(per_peer=64, pool=128, floor=0)
    while limit.take("early", 1):
        pass
    assert limit.used("early") == 64
    for late in ("b", "c"):
        while limit.take(late, 1):
            pass
        assert limit.used(late) >= 10, late


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(-40, 40)), max_size=80), st.integers(0, 8))
def test_a_shared_limit_never_gives_more_than_it_has_and_always_gives_the_floor(
    steps: list[tuple[str, int]], floor: int
) -> None:
    limit, per_peer, pool = SharedLimit(32, 48, floor), 32, 48
    for peer, amount in steps:
        if amount < 0:
            limit.give_back(peer, min(-amount, limit.used(peer)))
        else:
            before = limit.used(peer)
            took = limit.take(peer, amount)
            assert limit.used(peer) == before + amount * took
            assert took or before + amount > floor
        used = [limit.used(peer) for peer in "abcdef"]
        assert max(used) <= per_peer
        assert sum(max(0, amount - floor) for amount in used) <= pool
    for peer in "abcdef":
        limit.give_back(peer, limit.used(peer))
    assert limit.take("g", 24 + floor if 24 + floor <= per_peer else per_peer)


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
    assert quota.under_way("a") == (0, 0, 0)
    assert not quota._peers
    quota.forget("never seen")


@given(st.lists(st.integers(1, 300_000), min_size=20, max_size=60), st.integers(10_000, 10_000_000))
def test_a_limited_rate_is_kept_within_one_piece_and_a_burst(sizes: list[int], rate: int) -> None:
    bucket, now = ByteRateLimit(), 1000.0
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


@pytest.mark.parametrize(("speed", "wanted"), [(100e3, 16), (250e3, 16), (1e6, 32), (1e7, 128), (1e9, 128)])
def test_the_kernel_holds_as_many_unsent_bytes_as_it_sends_in_a_moment(speed: float, wanted: int) -> None:
    bound, now = UnsentBound(), 0.0
    for _ in range(10):
        bound.has_room(now, was_full=True)
        bound.gave(3 * bound.size)
        now += 3 * bound.size / speed
        assert bound.size <= wanted << 10
    assert bound.size == wanted << 10
    for _ in range(10):  # it became fast, and never holds anything when it is looked at
        bound.has_room(now, was_full=False)
    assert bound.size == MOST_UNSENT_BYTES


class Upload:
    """Links of a node that send bulk over an upload of some speed, as fast as it and `SpareUpload` allow."""

    def __init__(self, bytes_per_s: float) -> None:
        self.spare, self.bytes_per_s, self.now = SpareUpload(), bytes_per_s, 100.0

    def bulk(self, seconds: float, *, replies: bool = False, pause_s: float = 0.0) -> float:
        """Send for so long, and return the bytes a second."""
        sent, until = 0, self.now + seconds
        while self.now < until:
            if replies:
                self.spare.replied(100, self.now)
            if (wait_s := self.spare.wait_s(self.now)) > 0:
                self.now += wait_s
                continue
            self.spare.begin(self.now)
            self.now += CHUNK / self.bytes_per_s
            self.spare.end(CHUNK, self.now)
            sent += CHUNK
            self.now += pause_s
        return sent / seconds


CHUNK = 16 * 1024


def test_bulk_leaves_a_part_of_a_slow_upload_to_replies() -> None:
    upload = Upload(250e3)
    assert upload.bulk(5) == pytest.approx(250e3, rel=0.1)
    assert upload.bulk(20, replies=True) == pytest.approx(SHARE * 250e3, rel=0.1)
    upload.now += REPLY_S + 0.1
    assert upload.bulk(5) == pytest.approx(250e3, rel=0.1)


def test_bulk_beside_replies_is_free_until_the_upload_was_measured() -> None:
    upload = Upload(250e3)
    assert upload.bulk(WINDOW_S / 2, replies=True) == pytest.approx(250e3, rel=0.2)
    assert upload.bulk(20, replies=True) < 0.7 * 250e3


def test_a_fast_upload_is_not_slowed_down() -> None:
    upload = Upload(5e7)
    upload.bulk(5)
    assert upload.bulk(20, replies=True) == pytest.approx(5e7, rel=0.1)


def test_bulk_with_pauses_says_nothing_of_the_upload() -> None:
    """Else a node with little to send would be held to that little, beside replies."""
    upload = Upload(5e7)
    upload.bulk(10, pause_s=0.5)
    assert upload.bulk(10, replies=True) == pytest.approx(5e7, rel=0.1)


def test_an_upload_that_became_faster_or_slower_is_measured_again_beside_replies() -> None:
    upload = Upload(100e3)
    upload.bulk(5)
    upload.bulk(10, replies=True)
    upload.bytes_per_s = 400e3
    upload.bulk(MEASURE_AGAIN_S, replies=True)
    assert upload.bulk(10, replies=True) == pytest.approx(SHARE * 400e3, rel=0.15)
    upload.bytes_per_s = 200e3
    upload.bulk(20 * MEASURE_AGAIN_S, replies=True)
    assert upload.bulk(10, replies=True) == pytest.approx(SHARE * 200e3, rel=0.2)


def test_one_that_reads_slowly_does_not_stop_what_others_are_sent() -> None:
    upload = Upload(1e3)  # all that a peer takes, minute after minute, and a node's only bulk
    upload.bulk(3600)
    upload.bytes_per_s = 1e6
    assert upload.bulk(10, replies=True) >= 0.9 * CHUNK / LONGEST_PAUSE_S
    upload.bulk(MEASURE_AGAIN_S, replies=True)
    assert upload.bulk(10, replies=True) == pytest.approx(SHARE * 1e6, rel=0.15)


def test_links_that_write_at_once_are_measured_together() -> None:
    spare, now = SpareUpload(), 0.0
    spare.begin(now)
    for step in range(100):  # two links, of which one is always writing
        now = 0.1 * step
        spare.begin(now)
        spare.end(CHUNK, now + 0.05)
    spare.replied(100, now)
    waits = 0
    for _ in range(10):
        waits += spare.wait_s(now) > 0
        spare.begin(now)
        spare.end(CHUNK, now)
    assert waits  # 164 kB/s were measured, of which bulk may have 98


def test_bulk_makes_way_for_a_prompt_and_does_not_stop() -> None:
    upload, prompt = Upload(250e3), 0
    upload.bulk(5)
    began, sent = upload.now, 0.0
    while upload.now < began + 10:
        upload.spare.replied(64 * 1024, upload.now)
        prompt += 64 * 1024
        upload.now += 64 * 1024 / upload.bytes_per_s
        sent += upload.bulk(CHUNK / upload.bytes_per_s) * CHUNK / upload.bytes_per_s
    assert 0.5 * CHUNK / LONGEST_PAUSE_S <= sent / 10 <= 1.5 * CHUNK / LONGEST_PAUSE_S
    assert prompt >= 7 * 250e3
