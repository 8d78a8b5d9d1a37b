"""Statements about a swarm that nobody can check at once: a backdated record of it, and members that do not exist."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from app.core.errors import UsageError
from app.core.span import Span
from app.hosting.block_host import BlockHost, HostingOptions
from app.joining.nearby import NearbySwarms
from app.manifest.manifest import Manifest
from app.membership import fetch_manifest, resolve_swarm, wire
from app.routing.route import RouteRequest
from app.routing.search import find_route
from app.swarm.names import SwarmName
from app.swarm.records import Announcement, SwarmRecord, sign_announcement, sign_record
from p2p.identity import Identity
from p2p.memory.fabric import LinkProfile, open_fabric
from tests.app.membership.test_hostile import told
from tests.app.membership.test_swarm_search import manifest, serve
from tests.app.swarms import CREATOR, MODEL, N_BLOCKS, START_S, Sim, SimNode, identity, open_sim, wall_clock
from tests.sim.twin import SimLoader
from tests.sim.world import NodeSpec

__all__ = ["manifest"]

# --- M-8: a backdated record -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "private"), [("reef", True), (f"reef#{MODEL}", True), ("reef", False)])
async def test_a_strangers_backdated_record_does_not_replace_the_one_that_members_name(
    autojump_clock: MockClock, asked: str, private: bool
) -> None:
    """A stranger answers first with its own record of 1970: a newcomer finds the public one that nine members name."""
    real = sign_record(CREATOR, "reef", MODEL, now_ms=int(START_S * 1000))
    fake = sign_record(Identity(b"e" * 32), "reef", MODEL, now_ms=1, private=private)
    async with open_fabric() as fabric:
        peers = [f"member {number}" for number in range(9)]
        for peer in peers:
            serve(fabric.node(peer), real)
        serve(fabric.node("stranger"), fake, gated=True)  # who does not hide that its record says private
        fabric.set_link("newcomer", "stranger", LinkProfile(delay_s=0.001))
        via = ["stranger", *peers]
        newcomer = fabric.node("newcomer")
        found = await resolve_swarm(newcomer, SwarmName.parse(asked), via=via, wall_clock=wall_clock)
        assert not found.record.private
        assert found.record == real


# --- made-up hashes that fit a pin -----------------------------------------------------------------------------------


NOW_MS = int(START_S * 1000)


def true_record(manifest: Manifest) -> tuple[SwarmRecord, SwarmName, str]:
    """The record of a swarm with this model, its name with the pin, and the pin."""
    record = sign_record(CREATOR, "reef", manifest.hash, now_ms=NOW_MS)
    asked = SwarmName.parse(str(record))
    assert asked.pin is not None
    return record, asked, asked.pin


async def test_records_that_claim_hashes_with_a_pins_digits_do_not_make_it_a_conflict(
    autojump_clock: MockClock, manifest: Manifest
) -> None:
    """Three strangers each send eight records whose hashes begin with the pin: only the true one has a manifest."""
    record, asked, pin = true_record(manifest)
    async with open_fabric() as fabric:
        serve(fabric.node("member"), record).keep(manifest)
        liars = [f"liar {number}" for number in range(3)]
        claimed = [pin + f"{number:x}" * (64 - len(pin)) for number in range(8)]
        fakes = [sign_record(Identity(b"e" * 32), "reef", model, now_ms=NOW_MS) for model in claimed]
        for liar in liars:
            serve(fabric.node(liar), *fakes)
            fabric.set_link("newcomer", liar, LinkProfile(delay_s=0.001))
        newcomer = fabric.node("newcomer")
        found = await resolve_swarm(newcomer, asked, via=[*liars, "member"], wall_clock=wall_clock)
        assert (found.record, found.peers) == (record, ("member",))


async def test_identities_of_one_machine_that_claim_many_such_hashes_keep_nobody_from_the_true_model(
    autojump_clock: MockClock, manifest: Manifest
) -> None:
    """Each hash has more votes than the true one, and their manifests never come: eight were asked for, and no more."""
    record, asked, pin = true_record(manifest)
    async with open_fabric() as fabric:
        serve(fabric.node("member"), record).keep(manifest)
        for number in range(32):
            liar = fabric.node(f"liar {number}")
            fabric.machine_of[liar.peer_id] = "one machine"
            claimed = pin + f"{number % 10}" * (64 - len(pin))
            serve(liar, sign_record(Identity(b"e" * 32), "reef", claimed, now_ms=NOW_MS))
            liar.serve(wire.MANIFEST, never)
        newcomer = fabric.node("newcomer")
        via = [*(f"liar {number}" for number in range(32)), "member"]
        assert (await resolve_swarm(newcomer, asked, via=via, wall_clock=wall_clock)).record == record


async def never(peer: str, body: bytes) -> bytes:
    """A handler that never answers."""
    await trio.sleep_forever()
    raise AssertionError("unreachable")


def test_a_pin_of_so_few_digits_that_a_model_can_be_made_for_it_is_refused() -> None:
    """8 digits are found in minutes: what is shown has 20, and fewer are not taken."""
    shown = SwarmName.parse(f"{sign_record(CREATOR, 'reef', MODEL, now_ms=1)}")
    assert (shown.pin, shown.allows(MODEL[:8] + "f" * 56)) == (MODEL[:20], False)
    for digits in (8, 19):
        with pytest.raises(UsageError, match="20 to 64 hex digits after '#', because another model can be made"):
            SwarmName.parse(f"reef#{MODEL[:digits]}")


# --- swarms that do not exist, told to a neighbour -------------------------------------------------------------------


@pytest.mark.parametrize("identities", [1, 5])
async def test_a_neighbour_that_names_many_swarms_does_not_hide_those_of_others(
    autojump_clock: MockClock, identities: int
) -> None:
    """The first eight swarms were listed, whoever named them, and one neighbour may send 200."""
    now_ms = int(START_S * 1000)
    fakes = [sign_record(CREATOR, f"x{number}", MODEL, now_ms=now_ms).raw for number in range(40)]

    async def lie(peer: str, body: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return wire.pack(fakes)

    async with open_sim() as sim:
        (honest,) = await sim.grow(1)
        serve(honest)
        looker, liars = sim.fabric.node("looker"), [f"liar {number}" for number in range(identities)]
        for liar in liars:
            sim.fabric.node(liar).serve(wire.FIND, lie)
            sim.fabric.machine_of[liar] = "one machine"
            sim.fabric.set_link("looker", liar, LinkProfile(delay_s=0.001))
        for peer in (*liars, honest.peer):
            await sim.fabric.dial(looker, peer)
        found = await NearbySwarms(wall_clock).look(looker)
        assert sim.record in [one.record for one in found]
        assert len(found) == 3


# --- members that do not exist, told to a newcomer -------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
async def test_made_up_members_do_not_keep_a_newcomer_from_the_models_manifest(
    autojump_clock: MockClock, manifest: Manifest, named: bool
) -> None:
    """A stranger answers first, with 40 members that never answer: each was given two seconds before a real one."""
    record = sign_record(CREATOR, "reef", manifest.hash, now_ms=int(START_S * 1000))
    now_ms = int(START_S * 1000)
    async with open_fabric() as fabric:
        serve(fabric.node("member"), record).keep(manifest)
        ghosts = []
        for who in map(identity, range(1000, 1040)):
            fabric.node(who.peer_id)
            fabric.freeze(who.peer_id)
            said = Announcement(who.peer_id, now_ms, now_ms + 600_000, record.id, "serving", Span(0, 4))
            ghosts.append(sign_announcement(who, said))

        async def tell(peer: str, body: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            return wire.pack([record.raw, *ghosts])

        fabric.node("stranger").serve(wire.FIND, tell)
        fabric.set_link("newcomer", "stranger", LinkProfile(delay_s=0.001))
        newcomer, via = fabric.node("newcomer"), ["stranger", "member"]
        found = await resolve_swarm(newcomer, SwarmName("reef"), via=via, wall_clock=wall_clock)
        assert (set(found.peers[:2]), len(found.peers)) == ({"stranger", "member"}, 42), "those that answered first"
        with trio.fail_after(10):
            peers = found.peers if named else [*found.peers[2:], "member"]
            assert await fetch_manifest(newcomer, peers, manifest.hash) == manifest


# --- H-7: members that do not exist ----------------------------------------------------------------------------------

HALF = N_BLOCKS // 2
FAST, SLOW = 500.0, 50.0


def serving(node: SimNode, span: Span) -> None:
    """Let a member say that it serves these blocks."""
    node.swarm.announce(
        state="serving", span=span, decode_tokens_per_s=SLOW, prefill_tokens_per_s=10 * SLOW, kv_free_tokens=1 << 20
    )


async def tell_of_ghosts(sim: Sim, hostile: SimNode, victim: SimNode, count: int) -> None:
    """Tell the victim of made-up members that serve the second half; their addresses swallow whatever is sent there."""
    now_ms = int(wall_clock() * 1000)
    statements = []
    for number in range(1000, 1000 + count):
        who = identity(number)
        sim.fabric.node(who.peer_id)
        sim.fabric.freeze(who.peer_id)
        said = Announcement(
            who.peer_id,
            now_ms,
            now_ms + 600_000,
            sim.record.id,
            "serving",
            Span(HALF, N_BLOCKS),
            FAST,
            10 * FAST,
            1 << 20,
        )
        statements.append(sign_announcement(who, said))
    for body in told(sim, statements):
        await hostile.network.call(victim.peer, "swarm.tell", body, timeout_s=5)


async def test_a_newcomer_fills_the_hole_that_made_up_members_claim_to_serve(autojump_clock: MockClock) -> None:
    """A member tells a newcomer of 64 made-up holders of the second half: the newcomer takes that half nevertheless."""
    async with open_sim() as sim, trio.open_nursery() as nursery:
        victim, mate, hostile = await sim.grow(3)
        for node in (mate, hostile):
            serving(node, Span(0, HALF))
        await trio.sleep(5)
        await tell_of_ghosts(sim, hostile, victim, 64)
        spec = NodeSpec(victim.number, HALF, SLOW, load_s=1.0, place=(0.0, 0.0))
        host = BlockHost(victim.network, victim.swarm, SimLoader(spec), HostingOptions(), lambda state, why: None)
        nursery.start_soon(host.run)
        await sim.until(lambda: victim.swarm.own.serves, 10)
        assert victim.swarm.own.span == Span(HALF, N_BLOCKS)
        nursery.cancel_scope.cancel()


async def test_a_route_goes_through_members_that_were_met_alone(autojump_clock: MockClock) -> None:
    """A member tells of made-up holders ten times as fast as the real one: the route still takes the real one."""
    async with open_sim() as sim:
        victim, mate, hostile = await sim.grow(3)
        serving(mate, Span(0, HALF))
        serving(hostile, Span(HALF, N_BLOCKS))
        await trio.sleep(5)
        await tell_of_ghosts(sim, hostile, victim, 4)
        demand = RouteRequest(Span(0, N_BLOCKS), tokens=10)
        route = find_route(victim.swarm.announcements(), demand, lambda a, b: 0.01)
        assert [hop.peer for hop in route] == [mate.peer, hostile.peer]
