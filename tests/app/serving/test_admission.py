"""Which sessions a hop can never have, whose session makes way for others, and what counts as held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from app.core.span import Span
from app.serving import admission
from app.serving.admission import (
    IDLE_S,
    TURN_S,
    AdmissionLimits,
    CacheTurns,
    FrameBudget,
    HopRoom,
    place_to_free,
    sessions_in_the_way,
    why_not,
)
from app.serving.hop_session import HopSession
from app.session.wire import EpochOrder, HopPace
from tests.app.hash_model import HashRunner


def session(asker: str, tokens: int, number: int = 0, home: str | None = None, at: float = 0.0) -> HopSession:
    """A session for which nothing was computed since `at`."""
    order = EpochOrder(Span(0, 4), "", "", tokens, 0)
    return HopSession(bytes([number]) * 16, asker, 1, order, at, home)


def room_of(
    held: Sequence[HopSession], total: int = 1000, page: int = 1, limits: AdmissionLimits | None = None
) -> HopRoom:
    """A hop with these sessions."""
    runner = HashRunner(0, 4, kv_tokens=total, page_tokens=page)
    for one in held:
        runner.open(one.key, one.turn.tokens)
    return HopRoom(runner, held, limits or AdmissionLimits(), "own")


def chosen(held: Sequence[HopSession], tokens: int, times: list[float], total: int = 1000) -> list[HopSession]:
    """Who makes way at the last of these refusals, if all of these sessions work all the time."""
    turns, room = CacheTurns(), room_of(held, total)
    for one in held:
        one.counters.worked_at = max(times)
    found: list[HopSession] = []
    for now in times:
        found = turns.make_way("asker", tokens, room.homes, now)
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
    assert bool(chosen([session("hog", 1000)], 100, times)) == makes_way


LONG = [0.0, TURN_S / 2, TURN_S]


def test_the_largest_session_of_the_asker_with_the_most_makes_way() -> None:
    small, large, other = session("hog", 300, 1), session("hog", 350, 2), session("other", 350, 3)
    assert chosen([small, large, other], 100, LONG) == [large]


def test_nobody_makes_way_who_holds_less_than_the_asker_would() -> None:
    assert not chosen([session("one", 500), session("two", 500)], 600, LONG)


def test_nobody_makes_way_for_nothing() -> None:
    """An asker keeps its share, but for the last session: without more than that, 800 would not fit."""
    three = [session("hog", 300, n) for n in range(3)]
    assert not chosen(three, 800, LONG)
    assert len(chosen(three, 800, LONG, total=1100)) == 2


def test_many_small_sessions_make_way_as_a_large_one_does() -> None:
    """Each of them alone would not free enough, so none of them was ended."""
    assert len(chosen([session("hog", 50, n) for n in range(20)], 200, LONG)) == 4


def test_sessions_that_were_closed_and_opened_again_are_the_same_asker() -> None:
    turns = CacheTurns()
    for number, now in enumerate(LONG):
        held = [session("hog", 1000, number, at=now)]
        found = turns.make_way("asker", 100, room_of(held).homes, now)
    assert found


def test_an_asker_that_made_way_has_another_turn() -> None:
    times = [*LONG, TURN_S + 1, 2 * TURN_S, 2 * TURN_S + 1]
    assert not chosen([session("hog", 1000)], 100, times[:-1])
    assert chosen([session("hog", 1000)], 100, times)


def test_sessions_for_which_nothing_is_computed_make_way_sooner() -> None:
    idle, works, waits = (session("hog", 300, number) for number in range(3))
    turns, room = CacheTurns(), room_of([idle, works, waits])
    for now in (0.0, IDLE_S - 1, IDLE_S):
        works.counters.worked_at = now
        waits.received = 5  # and `length` is 0: the device is busy with others
        assert turns.make_way("asker", 200, room.homes, now) == ([idle] if now == IDLE_S else [])


def test_several_homes_make_way_together() -> None:
    """Four of them were above their share, and none had enough above it for a session that was within its share."""
    held = [session(f"hog {number // 12}", 20, number) for number in range(48)]
    ended = chosen(held, 150, LONG)
    assert sum(one.turn.tokens for one in ended) + 40 >= 150
    assert len({one.asker for one in ended}) == 2


def test_who_made_way_stays_within_its_share_until_nobody_was_refused_for_long() -> None:
    turns, hogs = CacheTurns(), [session("hog", 1000)]
    for now in (0.0, TURN_S - 1, TURN_S):
        turns.make_way("asker", 100, room_of(hogs).homes, now)
    assert turns.held_back(TURN_S) == ["hog"]
    turns.make_way("asker", 100, room_of([session("another", 1000)]).homes, 2 * TURN_S - 1)
    turns.make_way("hog", 100, room_of([session("another", 1000)]).homes, 2 * TURN_S)
    turns.make_way("asker", 900, room_of([session("another", 500)]).homes, 2 * TURN_S)
    assert turns.held_back(3 * TURN_S - 2) == ["hog"]
    assert not turns.held_back(3 * TURN_S - 1)

    room = HopRoom(HashRunner(0, 4, kv_tokens=1000), [], AdmissionLimits(), held_back=["hog"])
    assert room.load("hog", "hog").held_back
    assert not room.load("hog", "elsewhere").held_back


def test_no_more_than_some_are_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_HELD_BACK", 2)
    turns = CacheTurns()
    for number in range(4):
        for now in (number * TURN_S / 4, number * TURN_S / 4 + IDLE_S):
            turns.make_way("asker", 100, room_of([session(f"hog {number}", 1000)]).homes, now)
    assert turns.held_back(TURN_S) == ["hog 2", "hog 3"]


def test_of_a_home_the_asker_with_most_makes_way_first() -> None:
    small, large = session("one", 100, 1, "home"), session("one", 200, 2, "home")
    others = [session("two", 100, number, "home") for number in (3, 4)]
    assert chosen([*others, small, large], 300, LONG, total=520) == [large, others[1]]


def test_askers_of_a_home_make_way_for_each_other() -> None:
    hog, other = session("hog", 600, 1, "home"), session("other", 300, 2, "elsewhere")
    turns, room = CacheTurns(), room_of([hog, other])
    refusal = why_not(EpochOrder(Span(0, 4), "", "", 90, 0), "asker", "home", room)
    assert refusal is not None
    assert refusal.why == "cache_reserved"
    found = [sessions_in_the_way(refusal, "asker", "home", 90, room, turns, now) for now in (0.0, IDLE_S)]
    assert found == [[], [hog]]


def test_an_asker_does_not_make_way_for_itself() -> None:
    assert not chosen([session("asker", 1000)], 100, LONG)


def test_this_nodes_own_replies_make_way_for_nobody() -> None:
    assert not chosen([session("own", 1000)], 100, LONG)


def test_those_that_nobody_waits_for_any_more_are_forgotten() -> None:
    turns = CacheTurns()
    for number in range(100):
        turns.make_way("asker", 1, room_of([session(f"hog {number}", 1000)]).homes, number * 2 * TURN_S)
    assert len(turns._in_the_way) == 1


def test_a_session_larger_than_the_whole_cache_is_refused_for_good() -> None:
    runner = HashRunner(0, 4, kv_tokens=1000)
    runner.open(b"another", 900)

    def refusal(tokens: int) -> tuple[str, str] | None:
        why = why_not(
            EpochOrder(Span(0, 4), "", "", tokens, 0), "asker", "asker", HopRoom(runner, [], AdmissionLimits())
        )
        return None if why is None else (why.code, why.why)

    assert refusal(100) is None
    assert refusal(1000) == ("busy", "cache_full")
    assert refusal(1001) == ("refused", "cache_exceeded")
    assert refusal(5000) == ("refused", "context_exceeded")


# --- places -----------------------------------------------------------------------------------------------------------


def several(asker: str, count: int, first: int = 0) -> list[HopSession]:
    return [session(asker, 1, first + number) for number in range(count)]


FEW = AdmissionLimits(sessions=12, peer_sessions=12, own_share=0.0)


def refused(asker: str, held: Sequence[HopSession], limits: AdmissionLimits = FEW) -> str:
    why = why_not(EpochOrder(Span(0, 4), "", "", 1, 0), asker, asker, room_of(held, limits=limits))
    return "" if why is None else why.why


def test_who_holds_most_places_makes_way_at_once_for_who_holds_less_than_its_share() -> None:
    held = [*several("hog", 7), *several("other", 5, 7)]
    assert refused("asker", held) == "sessions_full"
    (found,) = place_to_free("asker", room_of(held, limits=FEW).homes)
    assert found.asker == "hog"


def test_places_that_are_shared_fairly_stay() -> None:
    held = [*several("one", 4), *several("two", 4, 4), *several("asker", 4, 8)]
    assert refused("asker", held) == "asker_sessions_full"
    assert not place_to_free("asker", room_of(held, limits=FEW).homes)


def test_one_place_each_is_taken_from_nobody() -> None:
    held = [session(f"asker {number}", 1, number) for number in range(12)]
    assert refused("newcomer", held) == "sessions_full"
    assert not place_to_free("newcomer", room_of(held, limits=FEW).homes)


def test_several_askers_of_one_home_have_its_share_of_places_alone() -> None:
    held = [session(f"hog {number % 4}", 1, number, "home") for number in range(8)]
    held += [session("other", 1, 8 + number) for number in range(4)]
    assert refused("asker", held) == "sessions_full"
    (found,) = place_to_free("asker", room_of(held, limits=FEW).homes)
    assert found.home == "home"
    room = room_of(held[:9], limits=FEW)
    why = why_not(EpochOrder(Span(0, 4), "", "", 1, 0), "hog 4", "home", room)
    assert why is not None
    assert why.why == "asker_sessions_full"
    assert not place_to_free("hog 4", room_of(held[:4], limits=FEW).askers_of("home")), "one place each"
    assert place_to_free("hog 4", room.askers_of("home"))


def test_an_unused_session_makes_way_first_then_the_one_that_rested_longest() -> None:
    held = several("hog", 12)
    for number, one in enumerate(held[2:]):
        one.counters.stepped(1, HopPace(0, 0), 100.0 - number, urgent=True)
    held[0].counters.opened_at = held[0].counters.worked_at = 60.0
    room = room_of(held, limits=FEW)
    assert place_to_free("asker", room.homes) == [held[1]], "the older one of those that were never used"
    for one in held[:2]:
        one.counters.stepped(1, HopPace(0, 0), 200.0, urgent=True)
    assert place_to_free("asker", room.homes) == [held[-1]], "the one for which nothing was computed for longest"


def test_a_place_is_not_freed_for_a_session_that_would_be_refused_all_the_same() -> None:
    """Orders for sessions too large for what is left would else end one session after another, and hold none."""
    room = room_of(several("hog", 12), total=20, limits=FEW)
    why = why_not(EpochOrder(Span(0, 4), "", "", 10, 0), "asker", "asker", room)
    assert why is not None
    assert why.why == "cache_full"


def test_some_places_are_kept_for_this_nodes_own_replies() -> None:
    limits = replace(FEW, own_share=0.25)
    held = [*several("one", 5), *several("two", 4, 5)]
    assert refused("asker", held, limits) == "sessions_full"
    assert refused("own", held, limits) == ""
    assert refused("asker", [*held[1:], *several("own", 2, 9)], limits) == "", "its own are in the kept places"
    assert refused("asker", [*held[1:], *several("own", 4, 9)], limits) == "sessions_full"


def test_places_that_this_node_holds_are_not_those_that_others_share() -> None:
    held = [*several("own", 8), *several("one", 2, 8), *several("two", 2, 10)]
    assert refused("asker", held) == "sessions_full"
    assert place_to_free("asker", room_of(held, limits=FEW).homes)


# --- pages ------------------------------------------------------------------------------------------------------------


def test_a_session_counts_as_the_pages_that_it_leases() -> None:
    """Sessions of one token counted as one: 64 of them leased a whole cache, and were below every share."""
    held = several("hog", 12)
    load = room_of(held, total=1024, page=64).load("hog", "hog")
    assert (load.peer_sessions, load.home_tokens, load.free_tokens) == (12, 768, 256)
    why = why_not(EpochOrder(Span(0, 4), "", "", 1, 0), "hog", "hog", room_of(held, total=1024, page=64))
    assert why is not None
    assert why.why == "cache_reserved"


@pytest.mark.parametrize(("tokens", "shared", "needed"), [(1, 0, 64), (64, 0, 64), (65, 0, 128), (100, 63, 128)])
def test_a_new_session_needs_whole_pages(tokens: int, shared: int, needed: int) -> None:
    assert room_of([], page=64).needed(tokens, shared) == needed


def test_only_whole_pages_are_shared() -> None:
    assert room_of([], page=64).needed(130, 127) == 128


def test_what_rests_is_not_held_but_what_it_shares_is() -> None:
    """A fork of a session that rests holds the pages of both: resting the source must not make them nobody's."""
    source, fork = session("hog", 512, 1), session("hog", 512, 2)
    source.rest(900.0)

    class Sharing(HashRunner):
        def tokens_freed_by(self, sessions: Iterable[bytes]) -> int:
            return 512 if {*sessions} == {source.key, fork.key} else 0

    assert (
        HopRoom(Sharing(0, 4, kv_tokens=1024), [source, fork], AdmissionLimits()).load("hog", "hog").home_tokens == 512
    )


@pytest.mark.parametrize("identities", [1, 10, 60])
def test_identities_at_one_address_have_one_budget_for_frames(identities: int) -> None:
    limits, spent = AdmissionLimits(frames_burst=100.0, frames_per_s=50.0), 0
    budget = FrameBudget(limits, lambda asker: asker.split()[0])
    for tenths in range(100):
        now = tenths / 10
        for number in range(identities):
            while not budget.delay_s(f"crowd {number}", now, 0.0):
                budget.delay_s(f"crowd {number}", now, 1.0)
                spent += 1
        assert not budget.delay_s("honest 1", now, 1.0)
    earned = limits.frames_burst + 10 * limits.frames_per_s
    assert earned / 2 < spent < 2 * earned + identities


def test_an_asker_that_sends_little_waits_for_none_of_its_neighbours() -> None:
    budget = FrameBudget(AdmissionLimits(frames_burst=100.0, frames_per_s=50.0), lambda asker: "one relay")
    for tenths in range(100):
        budget.delay_s("busy", tenths / 10, 50.0)
        assert not budget.delay_s("quiet", tenths / 10, 1.0)
    assert budget.delay_s("busy", 10.0, 0.0)


def test_what_others_make_an_asker_send_costs_no_more_for_its_neighbours() -> None:
    limits = AdmissionLimits(frames_burst=100.0, frames_per_s=50.0)
    budget = FrameBudget(limits, lambda asker: "one relay")
    for number in range(12):
        budget.delay_s(f"neighbour {number}", 0.0, 1.0)
    assert not budget.delay_s("honest", 0.0, limits.frames_burst, alone=True)
