"""What a late answer means, case by case."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.asker.recovery import SLOW_LINK_BYTES_PER_S, STEP_TOKENS, HopLoss, HopProgress, LostSeconds
from app.asker.route_session import overdue_s
from app.core.span import Span
from app.routing.route import Hop, ReadingPace
from app.session.frame import CHUNK_ROWS, Frame
from app.session.wire import Kind

ROUTE = (Hop("a", Span(0, 4)), Hop("b", Span(4, 8)))
FED = 10
EPOCH = 3


def state(cached: int, received: int, epoch: int = EPOCH) -> Frame:
    return Frame(b"", epoch, cached, Kind.STATE, 0, received, 0, memoryview(b""))


def following(unread: int, row_bytes: int = 16, pace: ReadingPace | None = None) -> HopProgress:
    """Both hops have to read so many tokens."""
    paces = {} if pace is None else dict.fromkeys("ab", pace)
    progress = HopProgress(row_bytes, 30.0)
    progress.begin(EPOCH, ROUTE, dict.fromkeys("ab", unread), paces, 0.0)
    return progress


def loss(a: Frame, b: Frame, *, quiet_s: float) -> HopLoss | None:
    """What is made of these two states when nothing has moved for so long."""
    progress = following(FED, row_bytes=1000)
    progress.loss(ROUTE, {"a": a, "b": b}, FED, 0.0)
    return progress.loss(ROUTE, {"a": a, "b": b}, FED, quiet_s)


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
    fed, row_bytes = 8192, 8192
    progress = following(fed, row_bytes)
    chunk_s = CHUNK_ROWS * row_bytes / SLOW_LINK_BYTES_PER_S
    states = {"a": state(fed, fed), "b": state(0, 0)}
    assert progress.loss(ROUTE, states, fed, 0.0) is None
    assert progress.loss(ROUTE, states, fed, chunk_s + 29.0) is None
    lost = progress.loss(ROUTE, states, fed, chunk_s + 31.0)
    assert lost is not None
    assert (lost.sender, lost.stop) == ("a", fed)


def test_progress_gives_more_time() -> None:
    fed = 4 * STEP_TOKENS
    progress = following(fed)
    for steps, now in ((1, 20.0), (2, 45.0), (3, 70.0)):
        states = {"a": state(steps * STEP_TOKENS, fed), "b": state(0, 0)}
        assert progress.loss(ROUTE, states, fed, now) is None
    assert progress.loss(ROUTE, states, fed, 101.0) is not None


@pytest.mark.parametrize(("fed", "cached", "most_s"), [(10, 9, 32), (1000, 999, 32), (1000, 0, 1906), (64, 0, 151)])
def test_a_hop_that_claims_one_token_at_a_time_is_waited_for_as_long_as_a_slow_one(
    fed: int, cached: int, most_s: int
) -> None:
    progress = following(fed - cached)
    given_up_at = next(
        second
        for second in range(1, 10_000)
        if progress.loss(ROUTE, {"a": state(second // 20, fed), "b": state(0, 0)}, fed, second) is not None
    )
    assert 30 <= given_up_at <= most_s


PACE = ReadingPace(step_s=0.1, token_s=0.01, times=1.0, block_s=0.1)  # 10.1 s for 1000 tokens


def watched(progress: HopProgress, states: Callable[[int], dict[str, Frame]], fed: int, seconds: int) -> int:
    """The second at which a hop is late, looking every second; as many as there are if none is."""
    for second in range(seconds):
        assert progress.loss(ROUTE, states(second), fed, second) is None
        if progress.late:
            return second
    return seconds


def crawls(second: int) -> dict[str, Frame]:
    """The first hop claims a token now and then."""
    return {"a": state(second // 20, 1000), "b": state(0, second // 20)}


@pytest.mark.parametrize(("times", "overdue_at"), [(1.0, 84), (3.0, 246)])
def test_a_hop_is_late_by_its_own_word_and_overdue_by_what_was_measured(times: float, overdue_at: int) -> None:
    progress = following(1000, pace=PACE._replace(times=times))
    assert watched(progress, crawls, 1000, 200) == 111
    progress = following(1000, pace=PACE._replace(times=times))
    for second in range(overdue_at):
        assert progress.loss(ROUTE, crawls(second), 1000, second) is None
        assert not progress.overdue()
    progress.loss(ROUTE, crawls(overdue_at), 1000, overdue_at)
    assert [late.hop.peer for late in progress.overdue()] == ["a"]


def test_a_hop_is_not_late_while_its_rows_come_as_over_a_slow_link() -> None:
    fed, row_bytes = 1000, 8192  # 164 s

    def come(second: int) -> dict[str, Frame]:
        rows = min(int(second * SLOW_LINK_BYTES_PER_S / row_bytes), fed)
        return {"a": state(rows, rows), "b": state(0, 0)}

    progress = following(fed, row_bytes)
    assert watched(progress, come, fed, 160) == 160
    assert not progress.overdue()
    progress = following(fed, row_bytes)
    assert watched(progress, lambda second: come(0), fed, 60) == 60
    (late,) = progress.overdue()
    assert (late.hop.peer, late.unread) == ("a", fed)
    assert late.waited_s == pytest.approx(60 - 45, abs=1), "a chunk takes 42 s"


@pytest.mark.parametrize(("a", "b"), [((500, 1000), (100, 100)), ((1000, 1000), (500, 500))])
def test_both_ends_of_a_link_share_a_wait_that_was_given_up(a: tuple[int, int], b: tuple[int, int]) -> None:
    """Nobody knows which of them is slow, or says so."""
    progress = following(1000, row_bytes=8192, pace=ReadingPace(0.01))
    assert watched(progress, lambda second: {"a": state(*a), "b": state(*b)}, 1000, 31) == 31
    assert not progress.overdue()
    shares = {late.hop.peer: late.waited_s for late in progress.overdue(links=True)}
    assert shares == {"a": 15.0, "b": 15.0}


def test_a_step_is_late_after_a_second_or_eight_times_its_usual_or_ten_seconds() -> None:
    assert [overdue_s(usual) for usual in (0.0, 0.01, 0.5, 30.0)] == [1.0, 1.0, 4.0, 10.0]


def test_lost_seconds_are_put_down_to_those_that_may_have_cost_them() -> None:
    lost = LostSeconds()
    lost.begin(100.0)
    lost.opened({"a": 0.5, "b": 0.5, "late": 4.5})
    assert lost.so_far(110.0, 0.0) == pytest.approx({"a": 0.5 / 3, "b": 0.5 / 3, "late": 4.0 + 0.5 / 3})
    lost.answered(110.0, 0.1)
    lost.begin(120.0)
    lost.failed(("a", "b"))  # a link broke, and
    lost.opened({"a": 0.0, "b": 0.0, "late": 2.0})  # this one has the others wait
    lost.answered(125.0, 1.0)
    assert lost.so_far(130.0, 0.0) == pytest.approx({"a": 1.0 + 0.5 / 3, "b": 1.0 + 0.5 / 3, "late": 6.0 + 0.5 / 3})
    assert lost.total_s == pytest.approx(6.5 + 2.0)
    lost.begin(200.0)
    assert lost.so_far(203.0, 0.0, {"gone"})["gone"] == pytest.approx(3.0), "it has not begun so far"
