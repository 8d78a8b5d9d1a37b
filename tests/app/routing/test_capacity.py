"""Room at members: what a refusal says about other sessions and for how long, and the largest session that fits."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from app.core.pieces import at_once
from app.core.reasons import Reason, because
from app.core.span import Span
from app.routing.capacity import ASK_S, FADE_S, FRESH_S, LONGEST_DOUBT_S, FullHops, largest_session
from app.routing.route import Privacy, RouteRequest
from app.swarm.records import Announcement

NO_ROOM = because("cache_full", "no room", "hop")
NO_PLACE = because("asker_sessions_full", "no place", "hop")


def refused(*sizes: tuple[int, float], why: Reason = NO_ROOM, contradicts: bool = False) -> FullHops:
    """A memory of a hop that refused sessions of these sizes at these times."""
    full = FullHops()
    for tokens, now in sizes:
        full.refused("hop", tokens, why, now, contradicts=contradicts)
    return full


def is_full(full: FullHops, tokens: int, now: float) -> bool:
    return full.full(tokens, now) == {"hop": NO_ROOM}


def must_wait(full: FullHops, tokens: int, now: float, refused_at: float | None = None) -> bool:
    return "hop" in full.just_asked(tokens, now, {} if refused_at is None else {"hop": refused_at})


def test_a_refusal_is_about_sessions_as_large_and_for_a_moment() -> None:
    full = refused((100, 0.0))
    assert [is_full(full, tokens, 1.0) for tokens in (99, 100, 5000)] == [False, True, True]
    assert not is_full(full, 5000, FRESH_S + 0.1)


def test_a_refusal_for_want_of_a_place_is_about_all_sessions() -> None:
    assert refused((100, 0.0), why=NO_PLACE).full(1, 1.0) == {"hop": NO_PLACE}


def test_larger_sessions_that_are_refused_later_say_nothing_about_smaller_ones() -> None:
    full = refused(*[(100, 0.0), *((1000, n / 10) for n in range(100))])
    assert is_full(full, 1000, 10.0)
    assert not is_full(full, 999, 10.0)
    assert is_full(refused((1000, 0.0), (100, 1.0)), 1000, FRESH_S + 0.5), "what is too large now was too large before"


def test_sessions_ask_a_full_hop_one_after_the_other() -> None:
    full = refused((100, 0.0))
    assert must_wait(full, 100, 0.1)
    assert not must_wait(full, 99, 0.1)
    now = 0.1 + ASK_S + 0.01
    assert not must_wait(full, 500, now)
    full.asks(["hop", "another"], 500, now)
    assert must_wait(full, 500, now + 0.1)
    assert not must_wait(full, 400, now + 0.1), "a smaller one may fit where the larger one does not"
    assert not must_wait(full, 500, now + ASK_S + 0.01)


def test_those_that_were_refused_wait_for_smaller_ones_that_ask() -> None:
    full, now = refused((200, 0.0), (1000, FRESH_S)), FRESH_S + 1
    full.asks(["hop"], 150, now)
    assert not must_wait(full, 200, now), "nothing of its size was refused lately"
    assert must_wait(full, 200, now, 0.0)
    assert not must_wait(full, 149, now, 0.0)


def test_once_one_has_found_room_the_others_ask_at_the_same_time() -> None:
    full = refused((100, 0.0), (1000, 0.1))
    full.asks(["hop"], 100, 0.2)
    assert must_wait(full, 100, 0.2, 0.0)
    full.worked("hop", 500)
    assert not must_wait(full, 100, 0.2, 0.0)
    assert not must_wait(full, 500, 0.2, 0.0)
    assert must_wait(full, 1000, 0.2, 0.1)
    assert not is_full(full, 500, 0.2)
    assert is_full(full, 1000, 0.2)


def test_a_session_that_ends_lets_the_next_one_ask_at_once() -> None:
    full = refused((100, 1.0))
    assert not full.ended_since("hop", 1.0)
    full.ended(["hop", "another"], 1.1)
    assert not must_wait(full, 100, 1.1, 1.0)
    assert full.ended_since("hop", 1.0)
    assert not full.ended_since("hop", 1.1)
    assert not full.ended_since("another", 0.0)


def test_a_hop_that_contradicts_itself_is_doubted_for_longer_each_time_until_it_works() -> None:
    full, now, times = FullHops(), 0.0, []
    for _ in range(8):
        begin = now
        assert full.refused("hop", 100, NO_ROOM, now, contradicts=True)
        assert not full.refused("hop", 100, NO_ROOM, now, contradicts=True), "all report the same"
        while is_full(full, 100, now):
            now += 0.5
        times.append(now - begin - 0.5)
    assert times == [2, 4, 8, 16, 32, 60, 60, 60]
    assert LONGEST_DOUBT_S == 60
    full.worked("hop", 99)
    full.refused("hop", 100, NO_ROOM, now, contradicts=True)
    assert is_full(full, 100, now + FRESH_S), "it works for small sessions alone"
    full.worked("hop", 100)
    full.refused("hop", 100, NO_ROOM, now, contradicts=True)
    assert not is_full(full, 100, now + FRESH_S + 0.1)


def test_a_hop_that_announces_to_be_full_is_not_doubted() -> None:
    full = refused(*((100, float(n)) for n in range(100)))
    assert not is_full(full, 100, 99.1 + FRESH_S)


def test_what_is_remembered_is_bounded_and_fades() -> None:
    full = refused(*((tokens, 0.0) for tokens in range(1000)))
    full.asks(["hop"], 5, 1.0)
    assert len(full._hops["hop"].refused._at) < 20
    for number in range(1000):
        full.refused(f"hop {number}", 1, NO_ROOM, 2.0, contradicts=True)
    assert len(full._hops) <= 256
    for now in (3.0, 3.0 + 2 * FRESH_S, 10.0 + FADE_S):
        full.refused("hop", 100, NO_ROOM, now, contradicts=True)
    assert not is_full(full, 100, now + FRESH_S + 0.1)


# --- the largest session ----------------------------------------------------------------------------------------------


def member(peer: str, start: int, stop: int, room: int, state: str = "serving") -> Announcement:
    return Announcement(peer, 1, 0, "", state, Span(start, stop), kv_free_tokens=room // 2, kv_total_tokens=room)


def largest(members: list[Announcement], privacy: Privacy | None = None, doubtful: str = "") -> int | None:
    request = RouteRequest(Span(0, 4), 1, privacy=privacy or Privacy())
    return at_once(largest_session(members, request, lambda one: one.kv_total_tokens, doubtful))


def test_the_largest_session_fits_at_some_member_for_every_block() -> None:
    assert largest([member("a", 0, 2, 500), member("b", 0, 4, 100), member("c", 3, 4, 900)]) == 100
    assert largest([member("a", 0, 3, 500), member("b", 0, 4, 100), member("c", 3, 4, 900)]) == 500
    assert largest([member("a", 0, 3, 500)]) is None
    assert largest([member("a", 0, 4, 500, "loading")]) is None


def test_the_word_of_a_doubtful_member_counts_where_nobody_else_serves_a_block() -> None:
    members = [member("a", 0, 4, 100), member("d", 0, 4, 900)]
    assert largest(members, doubtful="d") == 100
    assert largest([*members, member("e", 0, 3, 500)], doubtful="de") == 100
    assert largest([member("a", 0, 2, 1000), member("d", 0, 4, 900)], doubtful="d") == 900


def test_strangers_with_room_do_not_count_for_private_blocks() -> None:
    members = [member("stranger", 0, 4, 900), member("friend", 0, 4, 100)]
    assert largest(members, Privacy(1, 4, frozenset({"friend"}))) == 100
    assert largest(members, Privacy(1, 4, frozenset())) is None


@given(st.integers(0, 10**6))
def test_it_is_what_a_look_at_every_member_and_block_finds(seed: int) -> None:
    rng = random.Random(seed)
    members = []
    for number in range(rng.randrange(12)):
        start = rng.randrange(4)
        members.append(member(f"p{number}", start, rng.randint(start + 1, 5), rng.randrange(1, 10)))
    privacy = Privacy(rng.randrange(3), 4, frozenset(rng.sample([f"p{n}" for n in range(12)], 4)))
    rooms = [
        [m.kv_total_tokens for m in members if m.span and block in m.span and privacy.allows(m.peer, block)]
        for block in range(4)
    ]
    assert largest(members, privacy) == (min(map(max, rooms)) if all(rooms) else None)
