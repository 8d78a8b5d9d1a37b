"""Swarms of a few nodes on the in-memory network: joining, changes, deaths, partitions, and what is passed on."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from app.core.span import Span
from app.membership import Timing, wire
from app.membership.bootstrap import ASK_AGAIN_AT_MOST_S, ASK_TIMEOUT_S
from app.membership.member import describe
from app.swarm.records import Announcement, sign_announcement, sign_suspicion
from p2p.envelope import CLOCK_TOLERANCE_MS
from p2p.identity import SIGNATURE_BYTES, is_signed
from p2p.memory.fabric import DirectoryProfile, LinkProfile
from tests.app.swarms import RECORD, Sim, SimNode, identity, open_sim, wall_clock


def kinds(node: SimNode, about: SimNode) -> list[str]:
    return [change.kind for _, change in node.changes if change.member.peer == about.peer]


def all_see(nodes: list[SimNode], peer: str, state: str | None) -> bool:
    return all(node.state_of(peer) == state for node in nodes)


async def test_a_newcomer_knows_the_swarm_within_a_second_and_is_known(autojump_clock: MockClock) -> None:
    async with open_sim(link=LinkProfile(delay_s=0.02)) as sim:
        nodes = await sim.grow(20)
        await trio.sleep(60)
        newcomer = sim.add(99, [nodes[7].peer])
        took_s = await sim.until(lambda: newcomer.knows() == {node.peer for node in nodes}, 1.0)
        assert took_s <= 1.0
        await newcomer.swarm.joined()
        await sim.until(lambda: all(newcomer.peer in node.knows() for node in nodes), 3.0)
        await sim.until(lambda: all(member.rtt_s is not None for member in newcomer.swarm.members()), 5.0)
        assert all(kinds(node, newcomer) == ["joined", "proven"] for node in nodes)


async def test_a_change_is_heard_once_by_everybody(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(30)
        await trio.sleep(60)
        mover, others = nodes[4], nodes[:4] + nodes[5:]
        for node in nodes:
            node.changes.clear()
        for changes, kind in (
            ({"state": "serving", "span": Span(0, 8)}, "moved"),
            ({"state": "draining"}, "draining"),
            ({"state": "serving", "span": Span(8, 16)}, "moved"),
        ):
            mover.swarm.announce(**changes)
            await sim.until(lambda kind=kind: all(kinds(node, mover)[-1:] == [kind] for node in others), 3.0)  # type: ignore[misc]
            await trio.sleep(10)
        assert all(kinds(node, mover) == ["moved", "draining", "moved"] for node in others)
        told = [describe(change) for _, change in others[0].changes if change.member.peer == mover.peer]
        does = ("serves blocks 0:8", "is about to stop serving its blocks", "serves blocks 8:16")
        assert told == [f"{mover.peer} {did}" for did in does]
        assert all(node.swarm.table.get(mover.peer).announcement == mover.swarm.own for node in others)  # type: ignore[union-attr]


async def test_each_node_verifies_an_announcement_once_and_passes_its_bytes_on(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures: list[bytes] = []

    def counted(public_key: bytes, data: bytes, signature: bytes) -> bool:
        signatures.append(signature)
        return is_signed(public_key, data, signature)

    monkeypatch.setattr("p2p.envelope.is_signed", counted)
    async with open_sim() as sim:
        nodes = await sim.grow(12)
        mover, others = nodes[0], nodes[1:]
        raw = mover.swarm.announce(state="serving", span=Span(0, 8)).raw
        await trio.sleep(60)  # pushed, piggybacked on probes, and in compared tables
        assert all(node.swarm.table.get(mover.peer).announcement.raw == raw for node in others)  # type: ignore[union-attr]
        assert signatures.count(raw[-SIGNATURE_BYTES:]) == len(nodes)


async def test_lesser_changes_ride_along_and_cost_no_message(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(20)
        await trio.sleep(120)
        await trio.sleep(10)
        before = sum(node.network.traffic.messages_out for node in nodes)
        await trio.sleep(20)
        middle = sum(node.network.traffic.messages_out for node in nodes)
        nodes[0].swarm.announce(decode_tokens_per_s=12.5)
        await trio.sleep(20)
        after = sum(node.network.traffic.messages_out for node in nodes)
        assert all(kinds(node, nodes[0])[-1] == "updated" for node in nodes[1:])
        assert after - middle <= 1.2 * (middle - before)


async def test_who_leaves_is_gone_at_once_and_nobody_suspects_it(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(12)
        leaver, others = nodes.pop(), nodes
        await leaver.swarm.leave()
        sim.kill(leaver)
        await sim.until(lambda: all_see(others, leaver.peer, "left"), 3.0)
        await trio.sleep(30)
        assert all("suspected" not in kinds(node, leaver) for node in others)
        assert all(leaver.peer not in node.knows() for node in others)


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_silent_node_is_found_dead_by_neighbours_first(how: str, autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(30)
        victim, others = nodes.pop(), nodes
        neighbours = others[3:6]
        for node in neighbours:
            node.swarm.set_neighbours([victim.peer, node.peer])
        await trio.sleep(20)
        sim.kill(victim) if how == "killed" else sim.fabric.freeze(victim.peer)
        soon_s = await sim.until(lambda: all_see(neighbours, victim.peer, "dead"), 10.0)
        await sim.until(lambda: all_see(others, victim.peer, "dead"), 30.0 - soon_s)
        assert all(kinds(node, victim)[-2:] == ["suspected", "dead"] for node in others)


async def test_a_frozen_node_that_goes_on_is_taken_back_by_all(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(15)
        victim, others = nodes.pop(), nodes
        sim.fabric.freeze(victim.peer)
        await sim.until(lambda: all_see(others, victim.peer, "dead"), 30.0)
        sim.fabric.resume(victim.peer)
        await sim.until(lambda: all_see(others, victim.peer, "alive"), 30.0)
        await sim.until(lambda: len(victim.swarm.table.present()) == 14, 30.0)


async def test_a_node_that_slept_for_an_hour_finds_its_swarm_again_without_help(autojump_clock: MockClock) -> None:
    async with open_sim(directory=DirectoryProfile(loss=1.0), timing=Timing(period_s=20.0)) as sim:
        nodes = await sim.grow(4)
        sleeper, others = nodes.pop(), nodes
        sim.fabric.freeze(sleeper.peer)
        await trio.sleep(3000)
        assert all(sleeper.peer not in node.swarm.table for node in others)  # long forgotten
        assert len(sleeper.swarm.table) == 0
        sim.fabric.resume(sleeper.peer)
        # It may have asked its old peers just before it woke: the next round is one full back-off later.
        await sim.until(lambda: len(sleeper.swarm.table.present()) == 3, ASK_AGAIN_AT_MOST_S + ASK_TIMEOUT_S)
        await sim.until(lambda: all(sleeper.peer in node.knows() for node in others), 5)


async def test_a_lost_link_alone_is_no_death(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(5)
        a, b = nodes[:2]
        await trio.sleep(10)
        a.changes.clear()
        sim.fabric.unlink(a.peer, b.peer, tell=(a.peer, b.peer))
        await trio.sleep(10)
        assert a.state_of(b.peer) == "alive"
        assert kinds(a, b) == []


async def test_a_partition_is_seen_and_heals(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(16)
        left, right = nodes[:8], nodes[8:]
        sim.fabric.partition([node.peer for node in left])
        await sim.until(lambda: all(len(node.swarm.table.present()) == 7 for node in nodes), 60.0)
        moved = left[0].swarm.announce(state="serving", span=Span(3, 9))  # said while nobody over there could hear
        gone = right.pop()
        sim.kill(gone)
        await trio.sleep(300)
        sim.fabric.heal()
        nodes = left + right
        await sim.until(lambda: all(len(node.swarm.table.present()) == 14 for node in nodes), 60.0)
        await sim.until(lambda: all(node.swarm.table.number(left[0].peer) >= moved.sequence for node in right), 60.0)
        assert all(gone.peer not in node.knows() for node in nodes)


async def test_what_gossip_lost_is_found_by_comparing_tables(autojump_clock: MockClock) -> None:
    async with open_sim(
        timing=Timing(probes_per_period=0, push_delay_s=1e6)
    ) as sim:  # nothing is pushed, nothing rides
        nodes = await sim.grow(10)
        nodes[0].swarm.announce(state="serving", span=Span(0, 8))
        await trio.sleep(30)
        assert any(node.state_of(nodes[0].peer) and not kinds(node, nodes[0])[-1] == "moved" for node in nodes[1:])
        await sim.until(lambda: all(kinds(node, nodes[0])[-1] == "moved" for node in nodes[1:]), 600)


@pytest.mark.soak
async def test_on_links_that_lose_much_suspicions_do_not_breed_suspicions(autojump_clock: MockClock) -> None:
    async with open_sim(link=LinkProfile(loss=0.3)) as sim:
        first = sim.add(0)
        nodes = [first, *(sim.add(number, [first.peer]) for number in range(1, 10))]
        await trio.sleep(60)
        before = sum(node.network.traffic.messages_out for node in nodes)
        await trio.sleep(60)
        rate = (sum(node.network.traffic.messages_out for node in nodes) - before) / 60 / 10
        assert rate < 10  # 2 in peace, 7.7 where every third message is lost; hundreds where they breed


async def test_members_find_each_other_by_rendezvous_alone(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = [sim.add(number) for number in range(6)]
        await sim.until(lambda: all(len(node.swarm.table.present()) == 5 for node in nodes), 15.0)
        late = sim.add(50)
        await sim.until(lambda: len(late.swarm.table.present()) == 6, 5.0)


async def test_a_connected_peer_is_asked_without_being_named(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        a, b = sim.add(1), sim.add(2)
        sim.fabric.partition([a.peer], [b.peer])  # so that the directory cannot help
        await trio.sleep(1)
        sim.fabric.heal()
        await sim.fabric.dial(a.network, b.peer)  # as mDNS would
        await sim.until(lambda: a.peer in b.knows() and b.peer in a.knows(), 5.0)


async def test_a_clock_that_is_five_minutes_off_does_no_harm_and_one_that_is_twenty_is_refused(
    autojump_clock: MockClock,
) -> None:
    async with open_sim(timing=Timing(period_s=10.0)) as sim:
        nodes = [
            sim.add(0),
            sim.add(1, [identity(0).peer_id], skew_s=290),
            sim.add(2, [identity(0).peer_id], skew_s=-290),
        ]
        await sim.until(lambda: all(len(node.swarm.table.present()) == 2 for node in nodes), 5.0)
        await trio.sleep(2700)
        assert all(len(node.swarm.table.present()) == 2 for node in nodes)
        far = sim.add(3, [identity(0).peer_id], skew_s=1200)
        await trio.sleep(60)
        assert all(far.peer not in node.knows() for node in nodes)


async def test_an_hour_of_peace_keeps_everybody_and_renews_their_words(autojump_clock: MockClock) -> None:
    async with open_sim(timing=Timing(period_s=10.0)) as sim:
        nodes = await sim.grow(6)
        await trio.sleep(3600)
        now_ms = wall_clock() * 1000
        for node in nodes:
            members = node.swarm.members()
            assert len(members) == 5
            assert all(member.announcement.expires_at_ms > now_ms for member in members)
            assert not [change for _, change in node.changes if change.kind in ("suspected", "dead", "left")]


# --- what is believed ------------------------------------------------------------------------------------------------


async def tell(sim: Sim, liar: SimNode, target: SimNode, *statements: bytes) -> None:
    body = wire.Tell(bytes.fromhex(sim.record.id), list(statements)).encode()
    await liar.network.call(target.peer, wire.TELL, body, timeout_s=5)


async def test_a_false_suspicion_harms_nobody_and_goes_no_further(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(10)
        await trio.sleep(60)
        liar, victim, *others = nodes
        for node in nodes:
            node.changes.clear()
        number = victim.swarm.own.sequence
        lie = sign_suspicion(identity(0), sim.record.id, victim.peer, number, sequence=int(wall_clock() * 1000))
        before = sum(node.network.traffic.messages_out for node in nodes)
        await tell(sim, liar, others[0], lie)
        await trio.sleep(1)
        assert sum(node.network.traffic.messages_out for node in nodes) - before < 50
        await trio.sleep(10)
        assert all(kinds(node, victim) in ([], ["updated"]) for node in others)
        assert all(node.state_of(victim.peer) == "alive" for node in others)


async def test_a_doubted_node_says_something_newer(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(6)
        liar, victim = nodes[:2]
        number = victim.swarm.own.sequence
        for _ in range(20):  # and does not let itself be driven
            lie = sign_suspicion(
                identity(0), sim.record.id, victim.peer, victim.swarm.own.sequence, sequence=int(wall_clock() * 1000)
            )
            await tell(sim, liar, victim, lie)
        assert number < victim.swarm.own.sequence <= number + 2000
        first = victim.swarm.own
        await sim.until(
            lambda: all(n.swarm.table.number(victim.peer) >= first.sequence for n in nodes if n is not victim), 5
        )


async def test_a_claimed_number_that_this_node_never_gave_moves_nothing(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(4)
        liar, victim = nodes[:2]
        before = victim.swarm.own
        swarm, claimed = bytes.fromhex(sim.record.id), before.sequence + 60_000
        lie = sign_suspicion(identity(0), sim.record.id, victim.peer, claimed, sequence=int(wall_clock() * 1000))
        forged = bytearray(victim.swarm.own.raw)
        forged[-70] ^= 1
        body = wire.ProbeRequest(swarm, claimed, [lie, bytes(forged)]).encode()
        await liar.network.call(victim.peer, wire.PROBE, body, timeout_s=5)
        await trio.sleep(5)
        assert victim.swarm.own == before


async def test_a_node_that_forgot_its_number_outbids_its_own_past(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(5)
        ahead_ms = CLOCK_TOLERANCE_MS // 2
        forgetful = sim.add(50, [nodes[0].peer], skew_s=ahead_ms / 1000)
        await sim.until(lambda: all(forgetful.peer in node.knows() for node in nodes), 5)
        sim.kill(forgetful)
        await sim.until(lambda: all_see(nodes, forgetful.peer, "dead"), 30)
        again = sim.add(50, [nodes[0].peer])  # its clock is right now, so its numbers are lower
        assert again.swarm.own.sequence < nodes[0].swarm.table.number(again.peer)
        await sim.until(lambda: all(again.peer in node.knows() for node in nodes), 30)
        await sim.until(lambda: all(n.swarm.table.number(again.peer) == again.swarm.own.sequence for n in nodes), 90)


async def test_replayed_and_foreign_statements_change_nothing(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(6)
        liar, victim, target = nodes[:3]
        old = victim.swarm.own.raw
        victim.swarm.announce(state="serving", span=Span(0, 8))
        await trio.sleep(5)
        target.changes.clear()
        forged = bytearray(victim.swarm.own.raw)
        forged[-80] ^= 1
        await tell(sim, liar, target, old, bytes(forged), b"\0" * 200, liar.swarm.own.raw)
        assert target.swarm.table.get(victim.peer).announcement == victim.swarm.own  # type: ignore[union-attr]
        assert [change for _, change in target.changes if change.kind != "updated"] == []
        assert target.state_of(liar.peer) == "alive"


async def test_a_listener_that_fails_and_one_that_stops_listening(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_sim() as sim:
        a = sim.add(1)
        heard: list[str] = []

        def broken(change: object) -> None:
            raise KeyError("a bug")

        a.swarm.subscribe(broken)
        stop = a.swarm.subscribe(lambda change: heard.append(change.kind))
        b = sim.add(2, [a.peer])
        await sim.until(lambda: a.peer in b.knows() and b.peer in a.knows(), 5)
        assert heard[:2] == ["joined", "proven"]
        assert "a listener failed" in caplog.text
        stop()
        heard.clear()
        sim.kill(b)
        await sim.until(lambda: a.state_of(b.peer) == "dead", 10)
        assert heard == []


async def test_members_that_nobody_met_are_not_mentioned(autojump_clock: MockClock) -> None:
    """A member tells of one that does not exist: no event says that it joined, nor that it is gone."""
    async with open_sim() as sim:
        node, other = await sim.grow(2)
        met = [describe(change) for _, change in node.changes]
        assert met.count(f"{other.peer} joined") == 1
        node.changes.clear()
        ghost, now_ms = identity(77), int(1000 * wall_clock())
        said = Announcement(ghost.peer_id, now_ms, now_ms + 600_000, RECORD.id, "serving", Span(0, 4))
        body = wire.Tell(bytes.fromhex(RECORD.id), [sign_announcement(ghost, said)]).encode()
        await other.network.call(node.peer, wire.TELL, body, timeout_s=5)
        await sim.until(lambda: any(change.kind == "dead" for _, change in node.changes), 30)
        assert not any(describe(change) for _, change in node.changes if change.member.peer == ghost.peer_id)
