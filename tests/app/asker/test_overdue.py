"""What a late answer means, case by case."""

from __future__ import annotations

import pytest

from app.asker.recovery import SLOW_LINK_BYTES_PER_S, STEP_TOKENS, HopLoss, HopProgress
from app.asker.route_session import overdue_s
from app.core.span import Span
from app.routing.route import Hop
from app.session.frame import CHUNK_ROWS, Frame
from app.session.wire import Kind

ROUTE = (Hop("a", Span(0, 4)), Hop("b", Span(4, 8)))
FED = 10
EPOCH = 3


def state(cached: int, received: int, epoch: int = EPOCH) -> Frame:
    return Frame(b"", epoch, cached, Kind.STATE, 0, received, 0, memoryview(b""))


def loss(a: Frame, b: Frame, *, quiet_s: float) -> HopLoss | None:
    """What is made of these two states when nothing has moved for so long."""
    progress = HopProgress(0.0, row_bytes=1000, stuck_s=30.0)
    progress.loss(ROUTE, {"a": a, "b": b}, EPOCH, FED, 0.0)
    return progress.loss(ROUTE, {"a": a, "b": b}, EPOCH, FED, quiet_s)


@pytest.mark.parametrize(
    ("a", "b", "quiet_s", "peer", "sender", "blameless"),
    [
        (state(10, 10), state(0, 0, epoch=0), 1.0, "b", "", True),  # it came back without its sessions
        (state(9, 9), state(9, 9), 3.1, "a", "", True),  # the asker's own frame is lost
        (state(10, 10), state(9, 9), 3.1, "b", "a", True),  # between two hops
        (state(10, 10), state(10, 10), 3.1, "b", "", True),  # only the answer is missing
        (state(10, 10), state(9, 10), 31.0, "b", "", False),  # it has all it needs and does nothing
        (state(5, 10), state(5, 5), 31.0, "a", "", False),  # so does one whose outputs have all arrived
        (state(5, 10), state(0, 0), 31.0, "b", "a", True),  # its successor takes nothing, and it waits for that
    ],
)
def test_who_is_at_fault(a: Frame, b: Frame, quiet_s: float, peer: str, sender: str, blameless: bool) -> None:
    found = loss(a, b, quiet_s=quiet_s)
    assert found is not None
    assert (found.failure.peer, found.sender, found.failure.blameless) == (peer, sender, blameless)


@pytest.mark.parametrize(
    ("a", "b", "quiet_s"),
    [
        (state(9, 10), state(9, 9), 29.0),  # the device is at work
        (state(10, 10), state(0, 0), 0.03),  # ten rows of 1000 bytes may still be under way
        (state(10, 10), state(9, 9), 2.9),  # a single one may be behind what others send
        (state(10, 10), state(10, 10), 2.9),  # and so may the answer
    ],
)
def test_what_is_only_late(a: Frame, b: Frame, quiet_s: float) -> None:
    assert loss(a, b, quiet_s=quiet_s) is None


def test_no_prompt_is_so_long_that_hops_may_deny_it_for_minutes() -> None:
    """A slow link takes 22 minutes for all of these rows, but only 42 s for the next chunk."""
    progress, fed, row_bytes = HopProgress(0.0, row_bytes=8192, stuck_s=30.0), 8192, 8192
    chunk_s = CHUNK_ROWS * row_bytes / SLOW_LINK_BYTES_PER_S
    states = {"a": state(fed, fed), "b": state(0, 0)}
    assert progress.loss(ROUTE, states, EPOCH, fed, 0.0) is None
    assert progress.loss(ROUTE, states, EPOCH, fed, chunk_s + 29.0) is None
    lost = progress.loss(ROUTE, states, EPOCH, fed, chunk_s + 31.0)
    assert lost is not None
    assert (lost.sender, lost.stop) == ("a", fed)


def test_progress_gives_more_time() -> None:
    progress, fed = HopProgress(0.0, row_bytes=1000, stuck_s=30.0), 4 * STEP_TOKENS
    for steps, now in ((1, 20.0), (2, 45.0), (3, 70.0)):
        states = {"a": state(steps * STEP_TOKENS, fed), "b": state(0, 0)}
        assert progress.loss(ROUTE, states, EPOCH, fed, now) is None
    assert progress.loss(ROUTE, states, EPOCH, fed, 101.0) is not None


@pytest.mark.parametrize(("fed", "cached", "most_s"), [(10, 9, 31), (1000, 999, 31), (1000, 0, 500), (64, 0, 61)])
def test_a_hop_that_claims_one_token_at_a_time_is_waited_for_as_long_as_a_slow_one(
    fed: int, cached: int, most_s: int
) -> None:
    progress = HopProgress(0.0, row_bytes=1000, stuck_s=30.0, cached=cached)
    given_up_at = next(
        second
        for second in range(1, 10_000)
        if progress.loss(ROUTE, {"a": state(second // 20, fed), "b": state(0, 0)}, EPOCH, fed, second) is not None
    )
    assert 30 <= given_up_at <= most_s


def test_a_step_is_late_after_a_second_or_eight_times_its_usual_or_ten_seconds() -> None:
    assert [overdue_s(usual) for usual in (0.0, 0.01, 0.5, 30.0)] == [1.0, 1.0, 4.0, 10.0]
