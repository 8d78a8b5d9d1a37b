"""Routes: the cheapest possible one, missing blocks named, and repairs with as little change as possible."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.pieces import at_once
from app.core.reasons import because
from app.core.span import Span
from app.routing import vector_search
from app.routing.bans import FADE_S, FAILING, Bans
from app.routing.cost import HOP_S, believed_seconds, entry_seconds, route_seconds, wait_seconds
from app.routing.estimates import LinkEstimates, link_seconds
from app.routing.route import Hop, KnownCosts, LinkSeconds, NoRoute, Privacy, Route, RouteRequest, Visit
from app.routing.search import _try_each_pair, find_route, repair_route, why_unused
from app.routing.vector_search import cheapest_visits
from app.swarm.records import Announcement, tail

BLOCKS = 6
WHOLE = RouteRequest(Span(0, BLOCKS), tokens=100)


def member(
    peer: str, start: int, stop: int, speed: float = 10.0, kv: int = 1000, state: str = "serving"
) -> Announcement:
    return Announcement(peer, 1, 0, "", state, Span(start, stop), speed, 10 * speed, kv)


def near(a: str, b: str) -> float:
    return 0.0 if a == b else 0.01


def shape(route: Route) -> list[tuple[str, int, int]]:
    return [(hop.peer, hop.span.start, hop.span.stop) for hop in route]


def repaired(
    route: Route,
    members: list[Announcement],
    request: RouteRequest,
    link_s: LinkSeconds,
    avoid: Collection[str],
    formats: dict[str, str] | None = None,
) -> Route:
    return at_once(repair_route(route, members, request, link_s, avoid=avoid, formats=formats))


def with_arrays(
    members: list[Announcement],
    request: RouteRequest,
    links: LinkEstimates,
    block_s: dict[str, float],
    entry_s: dict[str, float],
) -> list[Visit]:
    return at_once(cheapest_visits(members, request, links, block_s, entry_s))


def cost_s(route: Route, members: list[Announcement]) -> float:
    by_peer = {m.peer: m for m in members}
    links = [near(a, b) for a, b in itertools.pairwise(["", *(hop.peer for hop in route), ""])]
    block_s = believed_seconds(list(by_peer.values()), WHOLE, KnownCosts())
    compute = sum(len(hop.span) * block_s[hop.peer] for hop in route)
    return sum(links) + HOP_S * len(route) + compute


def all_routes(
    members: list[Announcement], block: int = 0, used: tuple[str, ...] = ()
) -> list[list[tuple[str, int, int]]]:
    if block == BLOCKS:
        return [[]]
    routes = []
    for m in members:
        assert m.span is not None
        if block in m.span and m.peer not in used:
            for stop in range(block + 1, m.span.stop + 1):
                rest = all_routes(members, stop, (*used, m.peer))
                routes += [[(m.peer, block, stop), *tail] for tail in rest]
    return routes


spans = st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS), st.floats(1, 200))


@given(st.lists(spans, min_size=1, max_size=4))
def test_the_cheapest_route_is_found_or_the_missing_block_named(drawn: list[tuple[int, int, float]]) -> None:
    members = [
        member(f"p{index}", start, min(start + length, BLOCKS), speed)
        for index, (start, length, speed) in enumerate(drawn)
    ]
    possible = all_routes(members)
    covered = {block for m in members if m.span for block in m.span.blocks()}
    if len(covered) < BLOCKS:
        with pytest.raises(NoRoute) as missing:
            find_route(members, WHOLE, near)
        assert missing.value.block not in covered
        assert f"block {missing.value.block} " in str(missing.value)
        return
    route = find_route(members, WHOLE, near)
    assert shape(route) in possible
    as_routes = [tuple(Hop(peer, Span(start, stop)) for peer, start, stop in hops) for hops in possible]
    best_s = min(cost_s(other, members) for other in as_routes)
    # A peer cannot appear twice; the search merges its parts afterwards, so it runs the blocks in between too.
    twice = any(m.span is not None and len(m.span) > 2 for m in members)
    assert cost_s(route, members) <= best_s * (1.5 if twice else 1) + 1e-9


def test_a_node_that_serves_no_longer_is_not_used() -> None:
    members = [member("a", 0, 6, 1000, state="draining"), member("b", 0, 6, 1)]
    assert shape(find_route(members, WHOLE, near)) == [("b", 0, 6)]
    assert shape(find_route(members, WHOLE, near, avoid=["x"])) == [("b", 0, 6)]
    with pytest.raises(NoRoute, match="block 0 "):
        find_route(members, WHOLE, near, avoid=["b"])


def test_a_full_node_is_the_last_resort() -> None:
    members = [member("full", 0, 6, 1000, kv=10), member("roomy", 0, 6, 1)]
    assert shape(find_route(members, WHOLE, near)) == [("roomy", 0, 6)]
    assert shape(find_route(members[:1], WHOLE, near)) == [("full", 0, 6)]


def test_a_far_node_loses_to_a_slower_one_nearby() -> None:
    members = [member("far", 0, 6, 20), member("slow", 0, 6, 12)]

    def link_s(a: str, b: str) -> float:
        return 0.2 if "far" in (a, b) else 0.001

    assert shape(find_route(members, WHOLE, link_s)) == [("slow", 0, 6)]


def test_a_long_prompt_prefers_who_reads_fast() -> None:
    reader = Announcement("reader", 1, 0, "", "serving", Span(0, 6), 10.0, 10_000.0, 10_000)
    writer = Announcement("writer", 1, 0, "", "serving", Span(0, 6), 12.0, 12.0, 10_000)
    assert shape(find_route([reader, writer], RouteRequest(Span(0, 6), 100), near)) == [("writer", 0, 6)]
    assert shape(find_route([reader, writer], RouteRequest(Span(0, 6), 1000, 900), near)) == [("reader", 0, 6)]


def test_mending_keeps_the_hops_that_live() -> None:
    members = [member("a", 0, 2), member("b", 2, 4), member("c", 4, 6), member("d", 1, 5), member("e", 0, 6, 1000)]
    route = find_route(members[:3], WHOLE, near)
    assert shape(repaired(route, members[:4], WHOLE, near, avoid=["b"])) == [("a", 0, 2), ("d", 2, 4), ("c", 4, 6)]
    # Two neighbours that die are one gap, which one node may fill.
    assert shape(repaired(route, members, WHOLE, near, avoid=["b", "c"])) == [("a", 0, 2), ("e", 2, 6)]
    assert shape(repaired(route, [*members[:3], members[4]], WHOLE, near, avoid=["a", "b", "c"])) == [("e", 0, 6)]


def test_a_hop_is_replaced_by_one_of_its_number_format_if_there_is_one() -> None:
    slow, fast = replace(member("c", 2, 6, 1.0), quantisation="int8"), member("d", 2, 6, 50.0)
    first = member("a", 0, 2)
    route = (Hop("a", Span(0, 2)), Hop("b", Span(2, 6)))
    for formats, expected in (({"b": "int8 f32"}, "c"), ({"b": "none f32"}, "d"), ({"b": "int8 bf16"}, "d"), ({}, "d")):
        found = repaired(route, [first, slow, fast], WHOLE, near, avoid=["b"], formats=formats)
        assert shape(found) == [("a", 0, 2), (expected, 2, 6)]
    alone = repaired(route, [first, fast], WHOLE, near, avoid=["b"], formats={"b": "int8 f32"})
    assert shape(alone) == [("a", 0, 2), ("d", 2, 6)]


def test_a_hop_that_serves_other_blocks_now_is_replaced_and_may_still_serve_the_rest() -> None:
    route = (Hop("a", Span(0, 6)),)
    members = [member("a", 0, 4, 100.0), member("b", 0, 6, 1.0), member("c", 4, 6, 100.0)]
    assert shape(repaired(route, members, WHOLE, near, avoid=[])) == [("a", 0, 4), ("c", 4, 6)]
    assert repaired(route, members[1:], WHOLE, near, avoid=[]) == route, "one that announces nothing may be late"


def test_mending_gives_up_the_old_route_where_only_a_new_one_will_do() -> None:
    # b's blocks are held by nobody but a and c, who are in the route already, with other shares.
    members = [member("a", 0, 3), member("b", 2, 4), member("c", 3, 6)]
    route = find_route([member("a", 0, 2), member("b", 2, 4), member("c", 4, 6)], WHOLE, near)
    assert shape(repaired(route, members, WHOLE, near, avoid=["b"])) == [("a", 0, 3), ("c", 3, 6)]


def test_bans_grow_and_are_forgiven() -> None:
    bans = Bans(first_s=5, longest_s=15)
    frozen = because("hop_silent", "frozen", "a")
    bans.ban("a", 0.0, frozen)
    assert bans.active(4.9) == {"a": frozen}
    assert bans.active(5.1) == {}
    bans.ban("a", 10.0, frozen)
    assert "a" in bans.active(19.9)
    bans.ban("a", 20.0, frozen)
    assert "a" in bans.active(34.9)
    assert not bans.ban("a", 30.0, frozen), "all sessions report the same failure"
    assert "a" not in bans.active(35.1)
    bans.forgive("a")
    bans.ban("a", 40.0, frozen)
    assert "a" in bans.active(44.9)
    assert "a" not in bans.active(45.1)


def test_a_peer_that_failed_some_times_in_a_row_counts_as_one_that_fails() -> None:
    bans, now, broken = Bans(), 0.0, because("hop_lost", "its stream broke", "a")
    for _ in range(FAILING):
        assert not bans.failing(now)
        assert bans.ban("a", now, broken)
        now += 301
    assert bans.failing(now) == {"a"}


def test_a_member_whose_whole_cache_is_too_small_is_never_used() -> None:
    small, full = replace(member("small", 0, 6), kv_total_tokens=99), replace(member("full", 0, 6), kv_free_tokens=99)
    request = replace(WHOLE, tokens=100)
    assert getattr(why_unused(small, request), "code", None) == "cache_exceeded"
    assert shape(find_route([small, full], request, near)) == [("full", 0, 6)]
    with pytest.raises(NoRoute):
        find_route([small], request, near)
    assert why_unused(small, replace(request, tokens=99)) is None


def test_a_member_that_refused_such_a_session_is_used_where_there_is_no_other() -> None:
    fast, slow = member("fast", 0, 6, 100.0), member("slow", 0, 6, 1.0)
    request = replace(WHOLE, full={"fast"})
    assert shape(find_route([fast, slow], request, near)) == [("slow", 0, 6)]
    assert shape(find_route([fast], request, near)) == [("fast", 0, 6)]


def rough(peer: str, start: int, stop: int, speed: float = 100.0) -> Announcement:
    """A member that says that it rounded its weights to 4 bits, and that it is fast."""
    return replace(member(peer, start, stop, speed), quantisation="int4")


def test_members_of_four_bits_get_only_the_blocks_that_nobody_else_serves_and_has_room_for() -> None:
    fine, full = member("fine", 0, 4, 0.2), replace(member("full", 4, 6), kv_free_tokens=99)
    said = rough("rough", 0, 6)
    for link_s in (near, link_seconds("me", {}, ())):
        assert shape(find_route([said, fine], WHOLE, link_s)) == [("fine", 0, 4), ("rough", 4, 6)]
        assert shape(find_route([said, fine, full], WHOLE, link_s)) == [("fine", 0, 4), ("rough", 4, 6)]
        assert shape(find_route([said, member("slow", 0, 6, 0.1)], WHOLE, link_s)) == [("slow", 0, 6)]
        quick = replace(WHOLE, finest_first=False)
        assert shape(find_route([said, fine], quick, link_s)) == [("rough", 0, 6)]


def test_a_long_prompt_and_a_short_reply_are_no_reason_to_ask_a_member_of_four_bits() -> None:
    request = RouteRequest(Span(0, BLOCKS), 900, 899)
    assert shape(find_route([rough("rough", 0, 6, 1e6), member("slow", 0, 6, 0.1)], request, near)) == [("slow", 0, 6)]


def test_members_of_four_bits_that_are_trusted_or_hold_the_bits_of_their_file_are_used_like_others() -> None:
    slow, fast = member("slow", 0, 6), rough("fast", 0, 6)
    trusting = replace(WHOLE, privacy=Privacy(trusted=frozenset({"fast"})))
    assert shape(find_route([slow, fast], trusting, near)) == [("fast", 0, 6)]
    assert shape(find_route([slow, replace(fast, quantisation="stored")], WHOLE, near)) == [("fast", 0, 6)]


@given(st.lists(spans, min_size=1, max_size=4))
def test_a_swarm_of_four_bits_alone_has_the_routes_of_any_other(drawn: list[tuple[int, int, float]]) -> None:
    fine = [member(f"p{n}", a, b, speed) for n, (a, b, speed) in enumerate(drawn) if a < b]
    try:
        found = find_route(fine, WHOLE, near)
    except NoRoute:
        return
    coarse = find_route([replace(m, quantisation="int4") for m in fine], WHOLE, near)
    assert cost_s(coarse, fine) == pytest.approx(cost_s(found, fine), abs=1e-6)


def test_a_hop_of_four_bits_is_replaced_by_a_finer_one_else_by_one_of_its_own_format() -> None:
    route = (Hop("a", Span(0, 2)), Hop("b", Span(2, 6)))
    first, fine, formats = member("a", 0, 2), member("fine", 2, 6, 1.0), {"b": "int4 f32"}
    same, other = rough("same", 2, 6, 1.0), replace(rough("other", 2, 6), dtype="bf16")
    assert shape(repaired(route, [first, fine, same, other], WHOLE, near, ["b"], formats))[1][0] == "fine"
    assert shape(repaired(route, [first, same, other], WHOLE, near, ["b"], formats))[1][0] == "same"


def test_failures_fade() -> None:
    bans, now = Bans(), 0.0
    why = because("hop_lost", "its stream broke", "a")
    for _ in range(12):
        bans.ban("a", now, why)
        now += 301
    bans.ban("a", now + FADE_S, why)
    assert not bans.failing(now + FADE_S)
    assert not bans.active(now + FADE_S + 1.1), "the first ban is a short one"


def test_what_was_measured_counts_and_what_is_claimed_is_doubted() -> None:
    braggart, honest = member("braggart", 0, 6, 1e9), member("honest", 0, 6, 10)
    believed = believed_seconds([braggart, honest, member("other", 0, 6, 10)], WHOLE, KnownCosts())
    assert believed["braggart"] == pytest.approx(believed["honest"] / 8)
    # A peer measured to be slow is avoided, whatever it claims.
    slow = KnownCosts({"braggart": 2 * honest.decode_block_s})
    assert shape(find_route([braggart, honest], WHOLE, near)) == [("braggart", 0, 6)]
    assert shape(find_route([braggart, honest], WHOLE, near, known=slow)) == [("honest", 0, 6)]
    # A peer measured to be fast is used, although it claims little.
    fast = KnownCosts({"honest": 1e-6})
    assert shape(find_route([member("a", 0, 6, 12), honest], WHOLE, near, known=fast)) == [("honest", 0, 6)]


def test_a_busy_node_loses_to_an_idle_one_that_is_not_much_slower() -> None:
    busy, idle = replace(member("busy", 0, 6, 20), busy=0.9), member("idle", 0, 6, 15)
    assert shape(find_route([busy, idle], WHOLE, near)) == [("idle", 0, 6)]
    assert shape(find_route([busy, member("idle", 0, 6, 1)], WHOLE, near)) == [("busy", 0, 6)]


def test_a_doubted_peer_is_used_only_where_the_others_cost_more() -> None:
    members = [member("doubted", 0, 6, 12), member("other", 0, 6, 10)]
    assert shape(find_route(members, WHOLE, near, known=KnownCosts(penalty_s={"doubted": 0.1}))) == [("other", 0, 6)]
    assert shape(find_route(members[:1], WHOLE, near, known=KnownCosts(penalty_s={"doubted": 9.0}))) == [
        ("doubted", 0, 6)
    ]


def test_private_blocks_run_on_trusted_peers_alone() -> None:
    members = [member("fast", 0, 6, 1000), member("mine", 0, 2, 1), member("friend", 4, 6, 1)]

    def private(edge: int, *trusted: str) -> RouteRequest:
        return RouteRequest(Span(0, BLOCKS), 100, privacy=Privacy(edge, BLOCKS, frozenset(trusted)))

    assert shape(find_route(members, private(0), near)) == [("fast", 0, 6)]
    assert shape(find_route(members, private(1, "mine", "friend"), near)) == [
        ("mine", 0, 1),
        ("fast", 1, 5),
        ("friend", 5, 6),
    ]
    with pytest.raises(NoRoute, match=r"no trusted peer serves block 5.*`shoal config set trusted`"):
        find_route(members, private(1, "mine"), near)
    with pytest.raises(NoRoute, match=r"no trusted peer serves block 2.*last 3 blocks"):
        find_route(members, private(3, "mine", "friend"), near)


@given(
    st.lists(spans, min_size=1, max_size=5),
    st.integers(1, BLOCKS),
    st.sets(st.sampled_from([f"p{index}" for index in range(5)])),
    st.sets(st.sampled_from([f"p{index}" for index in range(5)]), max_size=2),
)
def test_no_route_and_no_mended_route_shows_private_blocks_to_strangers(
    drawn: list[tuple[int, int, float]], edge: int, trusted: set[str], dead: set[str]
) -> None:
    members = [
        member(f"p{index}", start, min(start + length, BLOCKS), speed)
        for index, (start, length, speed) in enumerate(drawn)
    ]
    privacy = Privacy(edge, BLOCKS, frozenset(trusted))
    demand = RouteRequest(Span(0, BLOCKS), 100, privacy=privacy)

    def held(block: int, avoid: set[str]) -> bool:
        return any(m.span and block in m.span and privacy.allows(m.peer, block) for m in members if m.peer not in avoid)

    missing: int | None = None
    try:
        route = find_route(members, demand, near)
        assert all(privacy.allows(hop.peer, block) for hop in route for block in hop.span.blocks())
        route = repaired(route, members, demand, near, avoid=dead)
        assert all(privacy.allows(hop.peer, block) for hop in route for block in hop.span.blocks())
        assert not dead & {hop.peer for hop in route}
    except NoRoute as error:
        missing = error.block
    assert missing is None or not held(missing, dead)


# --- the search with arrays beside the one that tries each pair -------------------------------------------------------

ME = "12D3KooWasker"
NAMES = [ME, *(f"12D3KooW{letter}{number:08d}" for number in range(7) for letter in "ab")]  # pairs share a tail
seconds = st.one_of(st.sampled_from([0.0, 0.01, 0.02, 0.1]), st.floats(0, 0.5))


@st.composite
def swarms(draw: st.DrawFn) -> list[Announcement]:
    """Up to twelve members, some full or busy, with claims about each other, also longer than likely."""
    members = []
    peers = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=12, unique=True))
    for index, peer in enumerate(peers):
        start, length = 2 * (index % 3), draw(st.integers(2, 4))  # short, so that routes have several hops
        claims = draw(st.dictionaries(st.sampled_from(peers), seconds, max_size=6))
        kv = draw(st.sampled_from([999] * 9 + [10]))
        said = member(peer, start, min(start + length, BLOCKS), draw(st.floats(20, 200)), kv)
        rtts = tuple((tail(other), rtt_s) for other, rtt_s in claims.items())
        members.append(replace(said, busy=draw(st.sampled_from([0.0, 0.5])), rtts=rtts))
    return members


names = st.sets(st.sampled_from(NAMES), max_size=2)
requests = st.builds(
    RouteRequest,
    st.sampled_from([Span(0, BLOCKS), Span(2, 5), Span(3, 4)]),
    tokens=st.just(100),
    prompt_tokens=st.sampled_from([0, 60]),
    origin=st.sampled_from(["", *NAMES]),
    target=st.sampled_from(["", *NAMES]),
    privacy=st.builds(
        Privacy,
        st.sampled_from([0, 0, 0, 1, 2]),
        st.just(BLOCKS),
        st.sets(st.sampled_from(NAMES), min_size=6).map(frozenset),
    ),
)
costs = st.builds(
    KnownCosts,
    st.dictionaries(st.sampled_from(NAMES), st.floats(1e-4, 0.1), max_size=3),
    st.dictionaries(st.sampled_from(NAMES), seconds, max_size=3),
)


def visits_s(
    visits: list[tuple[str, int]],
    members: list[Announcement],
    request: RouteRequest,
    links: LinkEstimates,
    known: KnownCosts,
) -> float:
    """The cost of a path, with the last visit first as the searches give it."""
    by_peer = {m.peer: m for m in members}
    block_s = believed_seconds(members, request, known)
    forwards = [*reversed(visits)]
    stops = [*(begin for _, begin in forwards[1:]), request.wanted.stop]
    ends = [request.origin, *(peer for peer, _ in forwards), request.target]
    hops_s = [
        HOP_S + wait_seconds(by_peer[peer]) + known.penalty_s.get(peer, 0.0) + (stop - begin) * block_s[peer]
        for (peer, begin), stop in zip(forwards, stops, strict=True)
    ]
    return sum(hops_s) + sum(links(a, b) for a, b in itertools.pairwise(ends))


def visits_or_missing_block(search: Callable[[], list[tuple[str, int]]]) -> list[tuple[str, int]] | int:
    try:
        return search()
    except NoRoute as error:
        return error.block


@settings(max_examples=60)
@given(swarms(), st.dictionaries(st.sampled_from(NAMES), seconds), requests, names, costs, st.sampled_from([0, 8]))
def test_the_search_with_arrays_finds_paths_as_cheap_as_trying_each_pair(
    members: list[Announcement],
    measured: dict[str, float],
    request: RouteRequest,
    avoid: set[str],
    known: KnownCosts,
    few: int,
) -> None:
    links = link_seconds(ME, measured, members)
    usable = [m for m in members if m.peer not in avoid and why_unused(m, request) is None]
    block_s = believed_seconds(usable, request, known)
    enter_s = {m.peer: HOP_S + wait_seconds(m) + known.penalty_s.get(m.peer, 0.0) for m in usable}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vector_search, "_FEW", few)  # 0: every correction goes by the table of minima
        found = visits_or_missing_block(lambda: with_arrays(usable, request, links, block_s, enter_s))
    expected = visits_or_missing_block(lambda: _try_each_pair(usable, request, links, block_s, enter_s))
    if isinstance(found, int) or isinstance(expected, int):
        assert found == expected
        return
    found_s, expected_s = (visits_s(visits, usable, request, links, known) for visits in (found, expected))
    assert found_s == pytest.approx(expected_s, rel=1e-12)


def as_hops(visits: list[tuple[str, int]], stop: int) -> Route:
    """The hops of a path, with the last visit first; a peer may be there twice, as no visits are merged."""
    hops: list[Hop] = []
    for peer, begin in visits:
        hops.insert(0, Hop(peer, Span(begin, stop)))
        stop = begin
    return tuple(hops)


def all_paths(members: list[Announcement], request: RouteRequest) -> list[Route]:
    """Every way to run the wanted blocks one after the other, private ones on trusted peers only."""
    holders = [
        [m.peer for m in members if m.span and block in m.span and request.privacy.allows(m.peer, block)]
        for block in request.wanted.blocks()
    ]
    paths = []
    for peers in itertools.product(*holders):
        begins = [0, *(at for at in range(1, len(peers)) if peers[at] != peers[at - 1])]
        visits = [(peers[at], request.wanted.start + at) for at in reversed(begins)]
        paths.append(as_hops(visits, request.wanted.stop))
    return paths


@given(swarms(), st.dictionaries(st.sampled_from(NAMES), seconds), requests, costs)
def test_both_searches_find_the_least_route_seconds(
    members: list[Announcement], measured: dict[str, float], request: RouteRequest, known: KnownCosts
) -> None:
    links = link_seconds(ME, measured, members)
    usable = [m for m in members if why_unused(m, request) is None][:6]
    block_s, entry_s = believed_seconds(usable, request, known), entry_seconds(usable, known, request)
    paths = all_paths(usable, request)
    for search in (with_arrays, _try_each_pair):
        visits = visits_or_missing_block(lambda search=search: search(usable, request, links, block_s, entry_s))  # type: ignore[misc]
        if isinstance(visits, int):
            assert not paths
            continue
        found_s = route_seconds(as_hops(visits, request.wanted.stop), usable, request, links, known)
        assert found_s == pytest.approx(visits_s(visits, usable, request, links, known), rel=1e-12)
        least_s = min(route_seconds(path, usable, request, links, known) for path in paths)
        assert found_s == pytest.approx(least_s, rel=1e-12)


@given(swarms(), st.dictionaries(st.sampled_from(NAMES), seconds), requests, names, costs)
def test_every_route_by_estimates_covers_the_blocks_and_visits_no_peer_twice(
    members: list[Announcement], measured: dict[str, float], request: RouteRequest, avoid: set[str], known: KnownCosts
) -> None:
    links, by_peer = link_seconds(ME, measured, members), {m.peer: m for m in members}
    try:
        route = find_route(members, request, links, avoid=avoid, known=known)
    except NoRoute as error:
        with pytest.raises(NoRoute, match=re.escape(str(error))):
            find_route(members, request, lambda a, b: links(a, b), avoid=avoid, known=known)
        return
    assert len({hop.peer for hop in route}) == len(route)
    assert not avoid & {hop.peer for hop in route}
    assert [block for hop in route for block in hop.span.blocks()] == [*request.wanted.blocks()]
    for hop in route:
        span = by_peer[hop.peer].span
        assert span is not None
        assert all(block in span and request.privacy.allows(hop.peer, block) for block in hop.span.blocks())


@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_with_many_claims_is_routed_as_cheaply_as_by_trying_each_pair(seed: int) -> None:
    """Everybody makes claims about the same few members, so that many of a block's hosts have to be corrected."""
    rng = random.Random(seed)
    names = [f"12D3KooW{number:08d}" for number in range(60)]
    members = []
    for name in names:
        start = rng.randrange(BLOCKS - 1)
        said = member(name, start, rng.randint(start + 1, BLOCKS), rng.uniform(20, 40))
        rtts = tuple((tail(other), rng.uniform(0, 0.4)) for other in rng.sample(names[:20], 12))
        members.append(replace(said, rtts=rtts))
    links = link_seconds(ME, {name: rng.uniform(0, 0.2) for name in names if rng.random() < 0.7}, members)
    block_s, enter_s = believed_seconds(members, WHOLE, KnownCosts()), dict.fromkeys(names, HOP_S)
    found_s, expected_s = (
        visits_s(search(members, WHOLE, links, block_s, enter_s), members, WHOLE, links, KnownCosts())
        for search in (with_arrays, _try_each_pair)
    )
    assert found_s == pytest.approx(expected_s, rel=1e-12)
