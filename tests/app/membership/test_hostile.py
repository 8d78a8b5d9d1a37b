"""A live node among hostile ones: it keeps serving the others, believes nothing unsigned, and stays within bounds."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from app.core.span import Span
from app.manifest.manifest import Manifest
from app.membership import QueryService, exchange, wire
from app.membership.exchange import MembershipExchange
from app.swarm.records import Announcement, Suspicion, sign_announcement, sign_suspicion, verify_suspicion
from p2p.envelope import CLOCK_TOLERANCE_MS
from p2p.errors import P2PError, Refused, RemoteError
from p2p.identity import Identity
from tests.app.swarms import Sim, identity, open_sim, wall_clock

METHODS = (wire.TELL, wire.PROBE, wire.TABLE, wire.FIND, wire.MANIFEST)
BODIES = st.lists(st.tuples(st.sampled_from(METHODS), st.binary(max_size=200), st.booleans()), min_size=1, max_size=20)


class NoManifests:
    def load(self, model_hash: str) -> Manifest | None:
        return None


def announcement(who: Identity, swarm: str) -> bytes:
    now_ms = int(wall_clock() * 1000)
    said = Announcement(who.peer_id, now_ms, now_ms + 600_000, swarm, "serving", Span(0, 8))
    return sign_announcement(who, said)


def told(sim: Sim, statements: list[bytes]) -> list[bytes]:
    """The bodies that tell these statements."""
    bodies = []
    while statements:
        batch = wire.fitting(statements, wire.MAX_BATCH_BYTES)
        statements = statements[len(batch) :]
        bodies.append(wire.Tell(bytes.fromhex(sim.record.id), batch).encode())
    return bodies


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies=BODIES)
def test_garbage_at_every_method_costs_its_sender_and_nobody_else(bodies: list[tuple[str, bytes, bool]]) -> None:
    async def main() -> None:
        async with open_sim() as sim:
            nodes = await sim.grow(3)
            QueryService(nodes[0].network, NoManifests())
            codes = set()
            for number, (method, body, right_swarm) in enumerate(bodies):
                stranger = sim.fabric.node(f"stranger {number}")
                prefix = bytes.fromhex(sim.record.id) if right_swarm else b""
                try:
                    await stranger.call(nodes[0].peer, method, prefix + body, timeout_s=5)
                except RemoteError as error:
                    codes.add(error.code)
                except P2PError:
                    pass
            assert codes <= {"malformed", "not_member", "unknown"}
            assert nodes[0].knows() == {nodes[1].peer, nodes[2].peer}
            nodes[1].swarm.announce(state="draining")
            await sim.until(lambda: nodes[0].state_of(nodes[1].peer) == "draining", 5)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_peer_that_sends_garbage_is_held_off(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(3)
        stranger = sim.fabric.node("stranger")
        with pytest.raises(P2PError):
            await stranger.call(nodes[0].peer, wire.TELL, b"x", timeout_s=5)
        await trio.sleep(1)
        with pytest.raises(Refused):
            await stranger.call(nodes[0].peer, wire.TELL, b"x", timeout_s=5)


async def test_ten_thousand_identities_announced_at_once(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(8)
        target, hostile = nodes[0], nodes[7]
        good = {node.peer for node in nodes[1:]}
        sybils = [announcement(identity(1_000_000 + number), sim.record.id) for number in range(10_000)]
        for body in told(sim, sybils):
            await hostile.network.call(target.peer, wire.TELL, body, timeout_s=30)
        assert good <= target.knows()
        assert len(target.swarm.table) <= 1024 + 7
        newcomer = sim.add(50, [nodes[1].peer])  # somebody honest joins in the middle of it
        await sim.until(lambda: newcomer.peer in target.swarm.table.present(), 5)
        await sim.until(lambda: target.knows() == good | {newcomer.peer}, 60)
        # Nobody was heard to answer, so nobody was passed on.
        assert all(len(node.swarm.table) == 8 for node in nodes[1:7])


async def test_worthless_statements_without_end_are_cut_off(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(4)
        target, hostile = nodes[0], nodes[3]
        rng = random.Random(1)
        refused = 0
        for _ in range(20):
            junk = [rng.randbytes(200) for _ in range(100)]
            try:
                await hostile.network.call(target.peer, wire.TELL, told(sim, junk)[0], timeout_s=5)
            except P2PError:
                refused += 1
            await trio.sleep(0.01)
        assert refused > 10
        assert hostile.peer not in target.knows()
        assert target.knows() >= {nodes[1].peer, nodes[2].peer}


async def test_statements_that_expire_on_their_way_are_not_held_against_whoever_passed_them_on(
    autojump_clock: MockClock,
) -> None:
    """A crowd meets one node with announcements that are about to expire: others that ask it for its table keep it."""
    async with open_sim() as sim:
        victim, other, _ = await sim.grow(3)
        expires_at_ms = int(wall_clock() * 1000) - CLOCK_TOLERANCE_MS + 2000

        async def meet(who: Identity) -> None:
            said = Announcement(who.peer_id, expires_at_ms - 1, expires_at_ms, sim.record.id, "client")
            raw, node = sign_announcement(who, said), sim.fabric.node(who.peer_id)

            async def answer(peer: str, body: bytes) -> bytes:
                return wire.pack([raw])

            node.serve(wire.PROBE, answer)
            await node.call(victim.peer, wire.TELL, told(sim, [raw])[0], timeout_s=5)

        async with trio.open_nursery() as nursery:
            for number in range(exchange.INVALID_AT_ONCE + 100):
                nursery.start_soon(meet, identity(1000 + number))
        await sim.until(lambda: wall_clock() * 1000 >= expires_at_ms + CLOCK_TOLERANCE_MS, 5)
        assert len(victim.swarm.table.present()) > exchange.INVALID_AT_ONCE
        await other.swarm._exchange.compare(victim.peer)
        assert victim.peer in other.knows(), "an honest node is taken for one that misbehaves"


async def test_a_member_that_changes_its_mind_all_the_time_cannot_flood_the_others(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(10)
        await trio.sleep(60)
        before = sum(node.network.traffic.messages_out for node in nodes)
        for number in range(300):
            nodes[0].swarm.announce(state="serving", span=Span(number % 8, 9))
            await trio.sleep(0.1)
        sent = sum(node.network.traffic.messages_out for node in nodes) - before
        assert sent < 30 * 10 * 10  # ten messages a second and node, for two in peace
        await trio.sleep(20)
        assert all(node.swarm.table.number(nodes[0].peer) == nodes[0].swarm.own.sequence for node in nodes[1:])


async def test_what_is_kept_for_others_is_bounded(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        node = sim.add(0)
        await trio.sleep(1)
        exchange: MembershipExchange = node.swarm._exchange
        for number in range(6000):
            exchange._announcement_limit.take(f"peer {number}", 0.0)
            exchange.gossip_queue.add(("suspicion", f"peer {number}"), bytes(100), urgent=True)
        assert len(exchange._announcement_limit) <= 4096
        assert len(exchange.gossip_queue) <= 2048


async def test_a_peer_that_asks_for_the_table_all_the_time_is_refused_and_others_are_not(
    autojump_clock: MockClock,
) -> None:
    """Each answer compares whole tables, and may have a mebibyte."""
    async with open_sim() as sim:
        victim, mate = await sim.grow(2)
        stranger = sim.fabric.node("stranger")
        body = wire.TableRequest(bytes.fromhex(sim.record.id), {}, []).encode()
        answered = 0
        for _ in range(10 * exchange.TABLES_AT_ONCE):
            with suppress(Refused):
                await stranger.call(victim.peer, wire.TABLE, body, timeout_s=5)
                answered += 1
        assert exchange.TABLES_AT_ONCE <= answered <= 2 * exchange.TABLES_AT_ONCE
        assert await mate.network.call(victim.peer, wire.TABLE, body, timeout_s=5)
        await trio.sleep(1 / exchange.TABLES_PER_S)
        assert await stranger.call(victim.peer, wire.TABLE, body, timeout_s=5)


async def test_a_suspicion_that_is_sent_again_and_again_costs_little(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = 0

    def counted(*args: Any) -> Suspicion:
        nonlocal checked
        checked += 1
        return verify_suspicion(*args)

    monkeypatch.setattr(exchange, "verify_suspicion", counted)
    async with open_sim() as sim:
        victim, mate, accused = await sim.grow(3)
        now_ms = int(wall_clock() * 1000)
        raw = sign_suspicion(identity(mate.number), sim.record.id, accused.peer, now_ms, sequence=now_ms)
        began, stranger = trio.current_time(), sim.fabric.node("stranger")
        for body in told(sim, [raw] * 3000):
            await stranger.call(victim.peer, wire.TELL, body, timeout_s=5)
        most = exchange.SUSPICIONS_AT_ONCE + exchange.SUSPICIONS_PER_S * (trio.current_time() - began)
        assert 0 < checked <= most + 10  # and those among the members themselves
        assert victim.knows() == {mate.peer, accused.peer}


async def test_a_member_that_probes_all_the_time_does_not_use_up_the_news_for_others(
    autojump_clock: MockClock,
) -> None:
    async with open_sim() as sim:
        victim, hostile, *_ = await sim.grow(3)
        await trio.sleep(60)
        victim.swarm.announce(kv_free_tokens=7)
        body = wire.ProbeRequest(bytes.fromhex(sim.record.id), 0, []).encode()
        for _ in range(50):
            await hostile.network.call(victim.peer, wire.PROBE, body, timeout_s=5)
        news = victim.swarm._exchange.gossip_queue.take_piggyback()
        assert victim.swarm.own.raw in news
