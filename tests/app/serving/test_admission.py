"""Which sessions a hop can never have, and whose session makes way for others when the cache is full for long."""

from __future__ import annotations

import pytest

from app.core.span import Span
from app.serving.admission import TURN_S, AdmissionLimits, CacheTurns, why_not
from app.serving.hop_session import HopSession
from app.session.wire import EpochOrder
from tests.app.hash_model import HashRunner


def session(asker: str, tokens: int, number: int = 0) -> HopSession:
    order = EpochOrder(Span(0, 4), "", "", tokens, 0)
    return HopSession(bytes([number]) * 16, asker, 1, order, 0.0)


def chosen(held: list[HopSession], tokens: int, times: list[float], free: int = 0) -> HopSession | None:
    """Who makes way at the last of these refusals."""
    turns, found = CacheTurns(), None
    for now in times:
        found = turns.makes_way("asker", tokens, held, free, 1000, now)
    return found


@pytest.mark.parametrize(
    ("times", "makes_way"),
    [
        pytest.param([0.0], False, id="at once"),
        pytest.param([0.0, TURN_S - 1], False, id="not long enough"),
        pytest.param([0.0, TURN_S / 2, TURN_S], True, id="long enough"),
        pytest.param([0.0, TURN_S + 1], False, id="nobody was refused in between"),
    ],
)
def test_it_takes_refusals_for_some_time(times: list[float], makes_way: bool) -> None:
    assert (chosen([session("hog", 1000)], 100, times) is not None) == makes_way


LONG = [0.0, TURN_S / 2, TURN_S]


def test_the_largest_session_of_the_asker_with_the_most_makes_way() -> None:
    small, large, other = session("hog", 300, 1), session("hog", 350, 2), session("other", 350, 3)
    assert chosen([small, large, other], 100, LONG) is large


def test_nobody_makes_way_who_holds_less_than_the_asker_would() -> None:
    assert chosen([session("one", 500), session("two", 500)], 600, LONG) is None


def test_nobody_makes_way_for_nothing() -> None:
    assert chosen([session("hog", 500, n) for n in range(2)], 600, LONG) is None
    assert chosen([session("hog", 500, n) for n in range(2)], 600, LONG, free=100) is not None


def test_sessions_that_were_closed_and_opened_again_are_the_same_asker() -> None:
    turns = CacheTurns()
    for number, now in enumerate(LONG):
        found = turns.makes_way("asker", 100, [session("hog", 1000, number)], 0, 1000, now)
    assert found is not None


def test_an_asker_that_made_way_has_another_turn() -> None:
    times = [*LONG, TURN_S + 1, 2 * TURN_S, 2 * TURN_S + 1]
    assert chosen([session("hog", 1000)], 100, times[:-1]) is None
    assert chosen([session("hog", 1000)], 100, times) is not None


def test_an_asker_does_not_make_way_for_itself() -> None:
    assert chosen([session("asker", 1000)], 100, LONG) is None


def test_those_that_nobody_waits_for_any_more_are_forgotten() -> None:
    turns = CacheTurns()
    for number in range(100):
        turns.makes_way("asker", 1, [session(f"hog {number}", 1000)], 0, 1000, number * 2 * TURN_S)
    assert len(turns._in_the_way) == 1


def test_a_session_larger_than_the_whole_cache_is_refused_for_good() -> None:
    runner = HashRunner(0, 4, kv_tokens=1000)
    runner.open(b"another", 900)

    def refusal(tokens: int) -> tuple[str, str] | None:
        why = why_not(EpochOrder(Span(0, 4), "", "", tokens, 0), "asker", runner, [], AdmissionLimits())
        return None if why is None else (why.code, why.why)

    assert refusal(100) is None
    assert refusal(1000) == ("busy", "cache_full")
    assert refusal(1001) == ("refused", "cache_exceeded")
    assert refusal(5000) == ("refused", "context_exceeded")
