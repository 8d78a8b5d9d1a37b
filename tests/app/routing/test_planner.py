"""An asker's knowledge of its swarm, and what one reply may change in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.core import pieces
from app.core.reasons import because
from app.core.span import Span
from app.routing.broken_links import AVOIDED_S
from app.routing.planner import PrivacyPreferences, RoutePlanner, SessionRoutes
from app.routing.route import Hop, NoRoute, Route, RouteRequest
from app.swarm.records import Announcement
from p2p.values import LinkInfo
from tests.app.routing.test_search import BLOCKS, WHOLE, member


@pytest.mark.parametrize(("wanted", "edge"), [(None, 2), (0, 2), (1, 2), (2, 2), (5, 5)])
def test_a_reply_may_ask_for_more_privacy_than_the_settings_and_never_for_less(wanted: int | None, edge: int) -> None:
    network: Any = SimpleNamespace(peer_id="me")
    planner = RoutePlanner(network, tuple, lambda: PrivacyPreferences(2, frozenset({"friend"})))
    privacy = planner.privacy(30, wanted)
    assert (privacy.edge, privacy.blocks, privacy.trusted) == (edge, 30, frozenset({"me", "friend"}))


# --- members that rounded their weights to 4 bits ---------------------------------------------------------------------


def rough_and_fine() -> tuple[RoutePlanner, dict[str, Announcement]]:
    """A planner for one member of 4 bits that says it is fast, and one of float32."""
    network: Any = SimpleNamespace(peer_id="me", links=lambda: (), source=lambda peer: peer)
    said = replace(member("rough", 0, BLOCKS, 90.0), quantisation="int4")
    members = {"rough": said, "fine": member("fine", 0, BLOCKS, 10.0)}
    return RoutePlanner(network, lambda: [*members.values()]), members


async def test_a_cache_at_a_hop_of_four_bits_is_left_once_a_finer_one_has_room(autojump_clock: MockClock) -> None:
    planner, members = rough_and_fine()
    held, request = (Hop("rough", Span(0, BLOCKS)),), RouteRequest(Span(0, BLOCKS), 100, 80)
    assert [hop.peer for hop in await planner.find_first(held, 5, request, (), dict)] == ["fine"]
    members["fine"] = replace(members["fine"], kv_free_tokens=0)
    assert await planner.find_first(held, 5, request, (), dict) == held


async def test_a_hop_that_is_waited_for_in_vain_is_left_for_one_of_four_bits_too(autojump_clock: MockClock) -> None:
    planner, _ = rough_and_fine()
    assert await peers_of(planner) == ["fine"]
    assert not await planner.would_use(Hop("fine", Span(0, BLOCKS)), WHOLE, ())


async def test_a_session_goes_by_the_format_that_a_hop_announced_when_it_was_chosen(autojump_clock: MockClock) -> None:
    planner, members = rough_and_fine()
    session = SessionRoutes(planner, WHOLE)
    route = await session.route((), ())
    members["fine"] = replace(members["fine"], quantisation="int4")
    await session.route(route, ())
    assert session.formats == {("fine", "none f32")}


# --- links that broke -------------------------------------------------------------------------------------------------


def halves(
    *peers: tuple[str, float], machines: Mapping[str, str] | None = None, relayed: Sequence[str] = ()
) -> RoutePlanner:
    """A planner for members of such speeds; those named `a…` serve the first half of the blocks, others the rest."""
    links = [LinkInfo(peer, "relayed" if peer in relayed else "direct", None, 0, 0) for peer, _ in peers]
    network: Any = SimpleNamespace(
        peer_id="me", links=lambda: links, source=lambda peer: (machines or {}).get(peer, f"{peer}'s machine")
    )
    half = BLOCKS // 2
    members = [
        member(peer, *((0, half) if peer.startswith("a") else (half, BLOCKS)), speed=speed) for peer, speed in peers
    ]
    return RoutePlanner(network, lambda: members)


async def peers_of(planner: RoutePlanner, current: Route = ()) -> list[str]:
    return [hop.peer for hop in await planner.find(current, WHOLE, ())]


async def test_new_routes_go_round_a_link_that_broke_and_not_round_its_ends(autojump_clock: MockClock) -> None:
    planner = halves(("a1", 90.0), ("a2", 50.0), ("b1", 90.0), ("b2", 50.0))
    held = await planner.find((), WHOLE, ())
    assert [hop.peer for hop in held] == ["a1", "b1"]
    planner.link_broke("a1", "b1")
    assert await peers_of(planner) in (["a1", "b2"], ["a2", "b1"])
    assert await peers_of(planner, held) == ["a1", "b1"], "a session that uses the link keeps its hops"
    session = SessionRoutes(planner, WHOLE)
    session.link_broke("a1", "b1")
    assert await session.route((), ()) == held, "one that has tried it has its rows sent through this asker"
    assert not planner.avoided()
    await trio.sleep(AVOIDED_S)
    assert await peers_of(planner) == ["a1", "b1"]


async def test_a_link_that_broke_is_used_where_there_is_no_other(autojump_clock: MockClock) -> None:
    planner = halves(("a1", 90.0), ("b1", 90.0))
    planner.link_broke("a1", "b1")
    assert await peers_of(planner) == ["a1", "b1"]


async def test_routes_go_round_every_link_that_broke(autojump_clock: MockClock) -> None:
    planner = halves(("a1", 90.0), ("a2", 10.0), ("b1", 90.0), ("b2", 50.0))
    for receiver in ("b1", "b2"):
        planner.link_broke("a1", receiver)
    assert await peers_of(planner) == ["a2", "b1"]


@pytest.mark.parametrize(
    ("machines", "relayed", "used"),
    [
        ({}, "", "b2"),
        (dict.fromkeys(("a1", "a2", "a3"), "the attacker's machine"), "", "b1"),
        (dict.fromkeys(("a1", "a2", "a3"), ""), "", "b1"),
        ({}, "a1 a2 a3", "b1"),
        ({"a1": ""}, "a2", "b1"),
        ({"a1": ""}, "", "b2"),  # what is unknown counts as one machine
    ],
)
async def test_a_hop_whose_links_to_several_others_broke_is_gone_round(
    machines: dict[str, str], relayed: str, used: str, autojump_clock: MockClock
) -> None:
    """Not if the others may be on one machine: whoever has it would only have to say that these links broke."""
    planner = halves(
        *((f"a{n}", 50.0) for n in range(1, 4)),
        ("a4", 90.0),
        ("b1", 90.0),
        ("b2", 5.0),
        machines=machines,
        relayed=relayed.split(),
    )
    for sender in ("a1", "a2", "a3"):
        planner.link_broke(sender, "b1")
    assert await peers_of(planner) == ["a4", used]
    assert not planner.avoided()


# --- searches in pieces -----------------------------------------------------------------------------------------------


def planner_of(members: list[Announcement]) -> RoutePlanner:
    network: Any = SimpleNamespace(peer_id="me", links=lambda: (), source=lambda peer: "")
    return RoutePlanner(network, lambda: members)


@pytest.fixture
def breaks_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let other tasks run after every piece, however short."""
    monkeypatch.setattr(pieces, "LONGEST_S", -1.0)


async def found_during(planner: RoutePlanner, change: Callable[[], object]) -> list[str]:
    """The peers of a route during whose search something changes."""
    route: list[Route] = []

    async def search() -> None:
        route.append(await planner.find((), WHOLE, ()))
        assert changed

    changed: list[bool] = []

    async def disturb() -> None:
        for _ in range(3):  # the search has begun, after at most two
            await trio.lowlevel.checkpoint()
        change()
        changed.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(search)
        nursery.start_soon(disturb)
    return [hop.peer for hop in route[0]]


async def test_a_large_swarm_is_searched_while_other_tasks_run() -> None:
    rng = random.Random(1)
    members = [member(f"p{n}", start := rng.randrange(BLOCKS), rng.randint(start + 1, BLOCKS)) for n in range(2000)]
    turns, ended = 0, False

    async def other() -> None:
        nonlocal turns
        while not ended:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        assert await planner_of(members).find((), WHOLE, ())
        ended = True
    assert turns >= 4, "the search kept the event loop all the time"


@pytest.mark.usefixtures("breaks_everywhere")
async def test_a_peer_that_is_banned_during_a_search_is_not_proposed() -> None:
    planner = planner_of([member("fast", 0, BLOCKS, 100.0), member("slow", 0, BLOCKS, 1.0)])
    assert [hop.peer for hop in await planner.find((), WHOLE, ())] == ["fast"]
    why = because("hop_lost", "its stream broke", "fast")
    assert await found_during(planner, lambda: planner.bans.ban("fast", trio.current_time(), why)) == ["slow"]


async def test_no_route_names_each_unusable_peer_once() -> None:
    planner = planner_of([member("fast", 0, BLOCKS), member("slow", 0, BLOCKS)])
    planner.bans.ban("fast", trio.current_time(), because("unreachable", "fast could not be reached", "fast"))
    planner.bans.ban("slow", trio.current_time(), because("hop_lost", "its stream broke", "slow"))
    with pytest.raises(NoRoute) as caught:
        await planner.find((), WHOLE, ())
    assert str(caught.value).endswith("serves block 0: fast could not be reached; slow (its stream broke)")


@pytest.mark.usefixtures("breaks_everywhere")
@pytest.mark.parametrize("after", [None, member("fast", 0, 2, 100.0), member("fast", 0, BLOCKS, state="draining")])
async def test_a_peer_that_gives_up_its_blocks_during_a_search_is_not_proposed(after: Announcement | None) -> None:
    members = [member("slow", 0, BLOCKS, 1.0), member("fast", 0, BLOCKS, 100.0)]
    planner = planner_of(members)

    def change() -> None:
        members[1:] = [] if after is None else [after]

    assert (await found_during(planner, change))[-1] == "slow"


@pytest.mark.usefixtures("breaks_everywhere")
async def test_a_stranger_is_tried_by_one_session_though_two_search_at_the_same_time() -> None:
    planner = planner_of([member("stranger", 0, BLOCKS, 20.0), member("known", 0, BLOCKS, 10.0)])
    planner.worked("known")
    found: list[str] = []

    async def search() -> None:
        found.append((await planner.find((), WHOLE, ()))[0].peer)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(search)
        nursery.start_soon(search)
    assert sorted(found) == ["known", "stranger"]


@pytest.mark.usefixtures("breaks_everywhere")
async def test_a_search_that_is_cancelled_does_not_hold_up_the_next() -> None:
    planner = planner_of([member("a", 0, BLOCKS)])
    with trio.CancelScope() as scope:
        scope.cancel()
        await planner.find((), WHOLE, ())
    assert scope.cancelled_caught
    assert [hop.peer for hop in await planner.find((), WHOLE, ())] == ["a"]
