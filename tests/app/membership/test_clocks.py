"""Clocks that are wrong: whose it is, how far it is off, and no false alarm."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from app.membership import PeerClocks
from app.membership.clocks import AGE_S, MAX_READINGS
from tests.app.swarms import Sim, SimNode, open_sim, wall_clock

HOUR_S, LIMIT_S = 3600.0, 600.0


def ahead_s(sim: Sim, node: SimNode, tolerance_s: float = LIMIT_S) -> float | None:
    """How far a node finds its clock to be ahead of those of the peers that it is connected to."""
    sources = {link.peer: node.network.source(link.peer) for link in node.network.links()}
    now_s = node.swarm._now_ms() / 1000
    return node.swarm._setup.clocks.ahead_s(sources, now_s, trio.current_time(), tolerance_s)


async def swarm_and_newcomer(sim: Sim, skew_s: float, *, found_within_s: float) -> tuple[list[SimNode], SimNode]:
    """Let a node whose clock is off join a swarm, and see it find by how much."""
    nodes = await sim.grow(4)
    await trio.sleep(900)
    wrong = sim.add(9, [node.peer for node in nodes], skew_s=skew_s)
    await sim.until(lambda: bool(ahead_s(sim, wrong)), found_within_s)
    assert ahead_s(sim, wrong) == pytest.approx(skew_s, abs=AGE_S / 2)
    return nodes, wrong


@pytest.mark.parametrize(
    "skew_s",
    [
        3 * HOUR_S,
        -100 * 24 * HOUR_S,
        *(pytest.param(skew_s, marks=pytest.mark.soak) for skew_s in (-3 * HOUR_S, 100 * 24 * HOUR_S)),
    ],
)
async def test_a_node_whose_clock_is_far_off_learns_so_from_the_first_answers(
    skew_s: float, autojump_clock: MockClock
) -> None:
    """It refuses what others say, or they what it says, so it sees no members."""
    async with open_sim() as sim:
        nodes, wrong = await swarm_and_newcomer(sim, skew_s, found_within_s=30)
        assert wrong.knows() == set()
        assert all(ahead_s(sim, node) == 0 for node in nodes)


@pytest.mark.parametrize("skew_s", [20 * 60.0, -20 * 60.0])
async def test_a_clock_that_is_off_by_little_more_than_is_allowed_is_found_when_others_renew_what_they_say(
    skew_s: float, autojump_clock: MockClock
) -> None:
    async with open_sim() as sim:
        await swarm_and_newcomer(sim, skew_s, found_within_s=AGE_S)


async def test_right_clocks_give_no_alarm(autojump_clock: MockClock) -> None:
    """Others renew what they say in their own time, and a newcomer hears what was said before."""
    async with open_sim() as sim:
        nodes = await sim.grow(3)
        await trio.sleep(500)
        nodes += [sim.add(9, [nodes[0].peer], skew_s=40.0), sim.add(10, [nodes[0].peer], skew_s=-40.0)]
        for _ in range(45):
            await trio.sleep(30)
            assert {ahead_s(sim, node, 90.0) for node in nodes} <= {0.0, None}


async def test_a_clock_that_is_set_while_the_node_runs_is_noticed_and_forgiven(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(4)
        await trio.sleep(900)
        sim.clock_off_s[nodes[0].number] = 3 * HOUR_S
        await sim.until(lambda: bool(ahead_s(sim, nodes[0])), 120)
        assert ahead_s(sim, nodes[0]) == pytest.approx(3 * HOUR_S, abs=AGE_S / 2)
        del sim.clock_off_s[nodes[0].number]
        await sim.until(lambda: ahead_s(sim, nodes[0]) == 0, 120)


async def test_a_member_whose_clock_jumped_is_known_for_it(autojump_clock: MockClock) -> None:
    """Its statements are refused from then on, so that it seemed to be about to serve until the last one expired."""
    async with open_sim() as sim:
        nodes = await sim.grow(4)
        other, jumped = nodes[0], nodes[1]
        sim.clock_off_s[jumped.number] = 3 * HOUR_S
        jumped.swarm.announce(state="serving")
        await trio.sleep(60)
        known = other.swarm.table.get(jumped.peer)
        assert known is not None
        assert known.announcement.state == "joining"
        clocks = other.swarm._setup.clocks
        found = clocks.ahead_s({jumped.peer: "x"}, wall_clock(), trio.current_time(), LIMIT_S)
        assert found == pytest.approx(-3 * HOUR_S, abs=AGE_S / 2)
        assert ahead_s(sim, other) == 0


# --- votes -----------------------------------------------------------------------------------------------------------

NOW_S = 1_800_000_000.0


def read(offsets: dict[str, float]) -> PeerClocks:
    """Clocks of peers that are ahead of this machine's by so many seconds, heard twice."""
    clocks = PeerClocks()
    for at in (0.0, 10.0):
        for peer, offset_s in offsets.items():
            clocks.heard(peer, int(1000 * (NOW_S + at + offset_s)), NOW_S + at, at)
    return clocks


@pytest.mark.parametrize(
    ("offsets", "found"),
    [
        ({}, None),
        ({"a": 0.0}, 0.0),
        ({"a": HOUR_S}, -HOUR_S),
        ({"a": HOUR_S, "b": 0.0}, 0.0),  # one of two may lie
        ({"a": HOUR_S, "b": HOUR_S}, -HOUR_S),
        ({"a": HOUR_S, "b": -HOUR_S}, 0.0),
        ({"a": HOUR_S, "b": HOUR_S, "c": 0.0}, -HOUR_S),
        ({"a": -HOUR_S, "b": 0.0, "c": 0.0}, 0.0),
        ({"a": -HOUR_S, "b": -HOUR_S, "c": HOUR_S, "d": 0.0}, 0.0),
    ],
)
def test_most_peers_must_agree(offsets: dict[str, float], found: float | None) -> None:
    judged = read(offsets).ahead_s({peer: peer for peer in offsets}, NOW_S + 10, 10.0, LIMIT_S)
    assert judged == (None if found is None else pytest.approx(found, abs=20))


def test_peers_of_one_address_have_one_vote() -> None:
    offsets = {f"liar {number}": HOUR_S for number in range(20)} | {"a": 0.0, "b": 1.0}
    sources = {peer: "10.0.0.6" if peer.startswith("liar") else peer for peer in offsets}
    assert read(offsets).ahead_s(sources, NOW_S + 10, 10.0, LIMIT_S) == 0


def test_peers_that_are_not_connected_have_no_vote() -> None:
    assert read({"a": HOUR_S, "b": 0.0}).ahead_s({"a": "a"}, NOW_S + 10, 10.0, LIMIT_S) == pytest.approx(
        -HOUR_S, abs=20
    )


def test_what_was_read_before_the_machine_slept_counts_for_nothing() -> None:
    """The wall clock goes on while it sleeps, the other one does not."""
    assert read({"a": 0.0}).ahead_s({"a": "a"}, NOW_S + 10 + 8 * HOUR_S, 10.0, LIMIT_S) is None


def test_an_old_statement_of_a_peer_that_is_heard_late_is_no_reading_of_its_clock() -> None:
    clocks = read({"a": 0.0})
    clocks.heard("a", int(1000 * (NOW_S - 500)), NOW_S + 20, 20.0)
    assert clocks.ahead_s({"a": "a"}, NOW_S + 20, 20.0, 60.0) == 0


def test_the_readings_are_bounded() -> None:
    clocks = read({f"peer {number}": 0.0 for number in range(MAX_READINGS + 50)})
    assert len(clocks._readings) == MAX_READINGS
