"""A running session moves to a clearly better route, once, and never loses or changes a token by it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from app.asker.asker import Asker
from app.asker.reply import Reply, RouteChanges
from app.core.span import Span
from app.routing.reroute import CLEAR_GAIN, RECHECK_S, RerouteTimer, RouteComparison, RunningRoute, is_worth_moving
from app.routing.route import Hop, KnownCosts, Route, RouteRequest
from app.session.wire import PROTOCOL
from app.swarm.records import Announcement
from p2p.memory.fabric import LinkProfile
from tests.app.hash_model import HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, no_leaks, open_swarm

LONG = 900  # tokens: some simulated minutes
USUAL_S = 0.06  # of a step


def member(peer: str, speed: float = 10.0, busy: float = 0.0) -> Announcement:
    return Announcement(peer, 1, 0, "", "serving", Span(0, 4), speed, 10 * speed, 10_000, busy=busy)


def over(peer: str) -> Route:
    return (Hop(peer, Span(0, 4)),)


def scales(*members: Announcement, tokens: int = 2000, prompt: int = 10) -> RouteComparison:
    return RouteComparison(
        members, RouteRequest(Span(0, 4), tokens, prompt), lambda a, b: 0.0 if a == b else 0.005, KnownCosts()
    )


@pytest.mark.parametrize(
    ("other", "token_s", "fed", "moves"),
    [
        (member("other", 20.0), 0.11, 500, True),
        (member("other", 12.0), 0.11, 500, False),  # better, but not clearly
        (member("other", 20.0, busy=0.8), 0.11, 500, False),
        (member("other", 20.0), 0.06, 500, False),  # the current route is measured to be as fast
        (member("other", 20.0), 9.0, 500, True),
        (member("other", 20.0), 0.11, 1998, False),  # it is almost finished
        (member("other", 20.0), 0.11, 12, False),  # it has just begun, so its length is unknown
        (replace(member("other", 20.0), state="draining"), 0.11, 500, False),
        (replace(member("other", 20.0), span=Span(1, 4)), 0.11, 500, False),
    ],
)
def test_only_a_clear_gain_that_pays_is_worth_a_move(
    other: Announcement, token_s: float, fed: int, moves: bool
) -> None:
    standing = RunningRoute(over("current"), token_s, fed)
    assert is_worth_moving(standing, over("other"), scales(member("current"), other)) is moves


def test_a_hop_that_is_busy_with_this_session_is_not_left_for_an_idle_one() -> None:
    current, other = member("current", busy=0.9), member("other")
    assert not is_worth_moving(RunningRoute(over("current"), 0.11, 500), over("other"), scales(current, other))
    assert is_worth_moving(RunningRoute(over("current"), 0.5, 500), over("other"), scales(current, other))


def test_a_session_does_not_move_to_a_hop_of_four_bits_from_another_one() -> None:
    """Its own hop has no room for another one like it, and so is not among those that a new route may use."""
    current, rough = member("current"), replace(member("other", 100.0), quantisation="int4")
    standing = RunningRoute(over("current"), 0.11, 500)
    assert not is_worth_moving(standing, over("other"), scales(current, rough))
    assert is_worth_moving(standing, over("other"), scales(replace(current, quantisation="int4"), rough))


@given(st.floats(1, 100), st.floats(1, 100), st.floats(0, 1), st.floats(0, 1), st.integers(11, 1999))
def test_no_two_routes_are_each_worth_leaving_for_the_other(a: float, b: float, x: float, y: float, fed: int) -> None:
    one, other = member("one", a, x), member("other", b, y)
    both = scales(one, other)
    there, back = (
        is_worth_moving(RunningRoute(over(here), both.token_s(over(here)) or 0.0, fed), over(goal), both)
        for here, goal in (("one", "other"), ("other", "one"))
    )
    assert not (there and back)
    assert CLEAR_GAIN > 1


def test_each_move_makes_the_next_look_come_later() -> None:
    recheck = RerouteTimer(0.0)
    assert [recheck.is_due(at) for at in (RECHECK_S - 1, RECHECK_S, RECHECK_S + 1, 2 * RECHECK_S)] == [0, 1, 0, 1]
    recheck.moved(100.0)
    assert not recheck.is_due(100.0 + 2 * RECHECK_S - 1)
    assert recheck.is_due(100.0 + 2 * RECHECK_S)


# --- whole sessions on the in-memory network --------------------------------------------------------------------------


async def acquainted(swarm: SessionSwarm) -> Asker:
    """An asker that has a link to everybody, as members of a small swarm have; they take their time."""
    asker = await swarm.asker()
    for name in swarm.servers:
        await meet(swarm, name)
        slow_down(swarm, name, 1.0)
        said, speed = swarm.announcements[name], 1 / USUAL_S
        swarm.announcements[name] = replace(said, decode_tokens_per_s=speed, prefill_tokens_per_s=10 * speed)
    return asker


async def meet(swarm: SessionSwarm, name: str) -> None:
    stream = await swarm.fabric.nodes["asker"].open(name, PROTOCOL)
    await stream.aclose()


async def read(reply: Reply, tokens: int) -> None:
    """Read `tokens` more tokens."""
    for _ in range(tokens):
        await reply.__anext__()


async def finish(swarm: SessionSwarm, reply: Reply, count: int) -> None:
    async for _ in reply:
        pass
    assert reply.stats.token_ids == greedy(PROMPT, count)
    assert reply.stats.recoveries == 0


def slow_down(swarm: SessionSwarm, name: str, times: float, *, tells: bool = True) -> None:
    """Make a node `times` as slow from now on, as if another program computed there."""
    swarm.devices[name].seconds = times * USUAL_S
    if tells:
        swarm.announcements[name] = replace(swarm.announcements[name], busy=1 - 1 / times)


@pytest.mark.parametrize("tells", [True, False])
async def test_a_session_leaves_a_hop_that_became_slow(autojump_clock: MockClock, tells: bool) -> None:
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        asker = await acquainted(swarm)
        async with asker.reply(PROMPT, LONG, max_tokens=LONG) as reply:
            await read(reply, 100)
            slow = reply.stats.route[1].peer
            slow_down(swarm, slow, 8.0, tells=tells)
            changes = RouteChanges()
            assert changes.since(reply.stats) == (reply.stats.route, False)  # the first route
            assert changes.since(reply.stats) == (None, False)
            await finish(swarm, reply, LONG)
        assert reply.stats.moves == 1
        assert changes.since(reply.stats) == (reply.stats.route, True)
        failed = replace(reply.stats, recoveries=1, route=reply.stats.route[:1])
        assert changes.since(failed) == (failed.route, False)
        assert slow not in {hop.peer for hop in reply.stats.route}
        assert reply.stats.longest_gap_s < 1.0
        await no_leaks(swarm)


async def test_a_session_leaves_a_link_that_became_long(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8), (0, 8)) as swarm:
        asker = await acquainted(swarm)
        async with asker.reply(PROMPT, LONG, max_tokens=LONG) as reply:
            await read(reply, 100)
            far = reply.stats.route[0].peer
            swarm.fabric.set_link("asker", far, LinkProfile(delay_s=0.4))
            await finish(swarm, reply, LONG)
        assert reply.stats.moves == 1
        assert reply.stats.route[0].peer != far
        await no_leaks(swarm)


async def test_equal_routes_are_never_exchanged_however_busy_they_say_they_are(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8), (0, 8)) as swarm:
        asker = await acquainted(swarm)
        async with asker.reply(PROMPT, LONG, max_tokens=LONG) as reply:
            while reply.stats.finish_reason is None:
                await reply.__anext__()
                for name in ("n0", "n1"):  # the nodes that serve this session announce that they are busy
                    busy = 0.9 if name == reply.stats.route[0].peer else 0.0
                    swarm.announcements[name] = replace(swarm.announcements[name], busy=busy)
        assert reply.stats.token_ids == greedy(PROMPT, LONG)
        assert reply.stats.moves == 0


async def test_a_braggart_is_tried_once_and_left(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8)) as swarm:
        asker = await acquainted(swarm)
        slow_down(swarm, "n0", 4.0, tells=False)
        async with asker.reply(PROMPT, LONG, max_tokens=LONG) as reply:
            await read(reply, 100)
            await swarm.serve("braggart", HashRunner(0, 8), speed=1e6)
            await meet(swarm, "braggart")
            slow_down(swarm, "braggart", 12.0, tells=False)
            await finish(swarm, reply, LONG)
        assert reply.stats.moves == 2
        assert reply.stats.route[0].peer == "n0"
        await no_leaks(swarm)


async def test_a_better_hop_that_cannot_be_reached_costs_no_pause(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8), (0, 8)) as swarm:
        asker = await acquainted(swarm)
        async with asker.reply(PROMPT, LONG, max_tokens=LONG) as reply:
            await read(reply, 100)
            current = reply.stats.route[0].peer
            swarm.kill("n1" if current == "n0" else "n0")
            slow_down(swarm, current, 4.0)
            await finish(swarm, reply, LONG)
        assert reply.stats.moves == 0
        assert reply.stats.longest_gap_s < 0.3
        await no_leaks(swarm)


async def speeds_change(swarm: SessionSwarm, dice: random.Random, deaths: int) -> None:
    """Hops become slow and fast again, and a few die, at any time."""
    names = sorted(swarm.servers)
    for _ in range(20):
        await trio.sleep(dice.uniform(1, 15))
        name = dice.choice(names)
        slow_down(swarm, name, dice.choice([1.0, 2.0, 4.0, 8.0]), tells=dice.random() < 0.5)
        if deaths and dice.random() < 0.2 and name in swarm.fabric.nodes:
            twin = names[(names.index(name) + 3) % 6]
            if twin in swarm.fabric.nodes:
                deaths -= 1
                swarm.kill(name)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3))])
async def test_moves_among_deaths_and_changes_of_speed_never_cost_a_token(autojump_clock: MockClock, seed: int) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8), (0, 3), (3, 6), (6, 8)) as swarm:
        asker = await acquainted(swarm)
        swarm.nursery.start_soon(speeds_change, swarm, random.Random(seed), 2)
        async with asker.reply(PROMPT, LONG, max_tokens=LONG) as reply:
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, LONG)
        assert reply.stats.moves <= 5
        await no_leaks(swarm)
