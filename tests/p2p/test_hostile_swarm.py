"""Hostile members and directory peers over real libp2p: nothing is believed that its owner did not sign, now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil
import pytest
import trio

from app.core.span import Span
from app.membership import Membership, wire
from app.swarm.records import (
    ANNOUNCEMENT_DOMAIN,
    SUSPICION_DOMAIN,
    Announcement,
    SwarmRecord,
    sign_announcement,
    sign_record,
    sign_suspicion,
)
from p2p.addresses import parse_address
from p2p.channel import multistream
from p2p.channel.noise import NoiseTransport
from p2p.channel.raw import RawConnection, SocketConnection
from p2p.dht import streams as kad
from p2p.dht.wire import Contact, Message, Op, provider_key
from p2p.envelope import CLOCK_TOLERANCE_MS
from p2p.errors import HandshakeError, P2PError
from p2p.host.messages import receive_bytes, send_bytes
from p2p.identity import Identity
from p2p.network import Libp2pNetwork
from tests.p2p.channels import close_sockets, socket_pair, transport
from tests.p2p.hostile import MIB, Victim, connection_to, open_protocol, under_attack
from tests.p2p.nodes import make_network, until

__all__ = ["close_sockets"]

MODEL = "1a2b3c4d" * 8
N_BLOCKS = 24
SYBILS = 10_000
LIFETIME_MS = 10 * 60 * 1000
DEAD_PROVIDERS = 120
KEY = b"rendezvous of a swarm..........."


@dataclass
class Member:
    """One node of a swarm on real sockets."""

    identity: Identity
    network: Libp2pNetwork
    swarm: Membership

    @property
    def peer(self) -> str:
        return self.network.peer_id


@asynccontextmanager
async def members(count: int) -> AsyncIterator[tuple[SwarmRecord, list[Member]]]:
    """So many members that have met each other."""
    record = sign_record(Identity.generate(), "attic", MODEL, now_ms=now_ms())
    found: list[Member] = []
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            found.append(await join(nursery, record, found[:1]))
        await until(lambda: all(len(member.swarm.table.present()) == count - 1 for member in found), 20)
        yield record, found
        for member in found:
            await member.network.stop()
        nursery.cancel_scope.cancel()


async def join(nursery: trio.Nursery, record: SwarmRecord, others: list[Member]) -> Member:
    identity = Identity.generate()
    network = make_network(identity=identity)
    await nursery.start(network.run)
    swarm = Membership(network, identity, record, N_BLOCKS)
    for other in others:
        network.learn(other.peer, other.network.addresses())
    swarm.join_via([other.peer for other in others])
    await nursery.start(swarm.run)
    return Member(identity, network, swarm)


@asynccontextmanager
async def stranger(target: Member) -> AsyncIterator[Libp2pNetwork]:
    """Somebody that knows where the target is, and means harm."""
    async with make_network().running() as network:
        network.learn(target.peer, target.network.addresses())
        yield network


def now_ms() -> int:
    return time.time_ns() // 10**6


def announcement(who: Identity, swarm: str, at_ms: int, lifetime_ms: int = LIFETIME_MS) -> bytes:
    return sign_announcement(who, Announcement(who.peer_id, at_ms, at_ms + lifetime_ms, swarm, "serving", Span(0, 8)))


async def tell(network: Libp2pNetwork, target: Member, statements: list[bytes]) -> None:
    """Tell a member all of it, whatever it thinks of that."""
    swarm = bytes.fromhex(target.swarm.record.id)
    while statements:
        batch = wire.fitting(statements, wire.MAX_BATCH_BYTES)
        statements = statements[len(batch) :]
        try:
            await network.call(target.peer, wire.TELL, wire.Tell(swarm, batch).encode(), timeout_s=20)
        except P2PError:
            return


async def test_nothing_is_believed_that_its_owner_did_not_sign_now() -> None:
    async with members(3) as (record, (target, friend, other)), stranger(target) as attacker:
        genuine = friend.swarm.own.raw
        friend.swarm.announce(state="client")
        await until(lambda: target.swarm.table.number(friend.peer) == friend.swarm.own.sequence)
        before = {member.peer: member.swarm.own.raw for member in (friend, other)}
        at, nobody = now_ms(), Identity.generate()
        forged = bytearray(announcement(nobody, record.id, at + 5000))
        start = 4 + len(ANNOUNCEMENT_DOMAIN)
        forged[start : start + 32] = friend.identity.public_key  # somebody else's name over one's own signature
        flipped = bytearray(friend.swarm.own.raw)
        flipped[-70] ^= 1
        hour = 60 * 60 * 1000
        lies = {
            "forged": bytes(forged),
            "changed": bytes(flipped),
            "replayed": genuine,
            "expired": announcement(nobody, record.id, at - hour),
            "from the future": announcement(nobody, record.id, at + CLOCK_TOLERANCE_MS + 60_000),
            "for ever": announcement(nobody, record.id, at, 2 * hour),
            "of another swarm": announcement(nobody, "00" * 16, at),
            "accused by nobody": sign_suspicion(nobody, record.id, friend.peer, 2**62, sequence=at),
        }
        for lie in lies.values():
            await tell(attacker, target, [lie])
        assert nobody.peer_id not in target.swarm.table
        for peer, raw in before.items():
            known = target.swarm.table.get(peer)
            assert known is not None
            assert known.announcement.raw == raw
            assert known.present
        friend.swarm.announce(state="draining", span=None)  # and the honest are heard as ever
        await until(lambda: target.swarm.table.state(friend.peer) == "draining")


async def test_ten_thousand_identities_announce_at_once() -> None:
    """Memory: 64 MiB, with the attacker's own share in it; a newcomer is met in the middle of it."""
    async with members(3) as (record, (target, friend, _)), stranger(target) as attacker:
        at = now_ms()
        sybils = [announcement(Identity.generate(), record.id, at) for _ in range(SYBILS)]
        before = psutil.Process().memory_info().rss
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell, attacker, target, sybils)
            newcomer = await join(nursery, record, [target])
            await until(lambda: newcomer.peer in target.swarm.table.present(), 20)
            friend.swarm.announce(state="draining")
            await until(lambda: target.swarm.table.state(friend.peer) == "draining", 20)
            nursery.cancel_scope.cancel()
        await newcomer.network.stop()
        assert len(target.swarm.table) <= 1024 + 3
        assert len(friend.swarm.table) <= 4  # what nobody has met is passed on to nobody
        assert psutil.Process().memory_info().rss - before < 64 * MIB


async def test_somebody_elses_peer_id_cannot_be_worn() -> None:
    attacker, owner, listening = Identity.generate(), Identity.generate(), Identity.generate()
    for secret in (None, b"the secret of us...."):
        protocol = "/noise" if secret is None else "/shoal/1/noise-psk"
        raw = socket_pair()
        mask = transport(attacker, protocol, secret)
        mask._payload = transport(owner, protocol, secret)._payload  # the owner's key and signature, replayed
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wear, mask, raw[0], listening.peer_id)
            with pytest.raises(HandshakeError, match="did not sign"):
                await transport(listening, protocol, secret).secure_inbound(raw[1])
            nursery.cancel_scope.cancel()


async def test_somebody_elses_peer_id_worn_against_a_live_member() -> None:
    """In the handshake, in announcements and in what calls name as their author; the owner is served meanwhile."""
    async with members(2) as (record, (target, owner)), stranger(target) as attacker:
        address = parse_address(target.network.addresses()[0])
        liar, honest = Identity.generate(), owner.identity
        mask = transport(liar, "/noise", None)
        mask._payload = transport(honest, "/noise", None)._payload
        socket = await trio.open_tcp_stream(address.host, address.port)
        await knock_as_another(
            transport(liar, "/noise", None), SocketConnection(socket, is_initiator=True), target.peer
        )
        await trio.aclose_forcefully(socket)  # under its own name it is let in
        for _ in range(20):
            socket = await trio.open_tcp_stream(address.host, address.port)
            with pytest.raises(P2PError), trio.fail_after(5):
                await knock_as_another(mask, SocketConnection(socket, is_initiator=True), target.peer)
            await trio.aclose_forcefully(socket)
        assert [link.peer for link in target.network.links()].count(owner.peer) == 1
        # An announcement in the owner's name, and a suspicion by the owner of itself, both signed by somebody else.
        nobody, at = Identity.generate(), now_ms()
        lies = []
        for statement, domain in (
            (announcement(nobody, record.id, at + 5000), ANNOUNCEMENT_DOMAIN),
            (sign_suspicion(nobody, record.id, target.peer, 2**40, sequence=at), SUSPICION_DOMAIN),
        ):
            start = 4 + len(domain)
            lies.append(statement[:start] + owner.identity.public_key + statement[start + 32 :])
        said, known = target.swarm.own, owner.swarm.own.raw
        await tell(attacker, target, lies)
        probe = wire.ProbeRequest(bytes.fromhex(record.id), 0, lies).encode()
        with contextlib.suppress(P2PError):
            await attacker.call(target.peer, wire.PROBE, probe, timeout_s=5)
        assert target.swarm.own == said
        member = target.swarm.table.get(owner.peer)
        assert member is not None
        assert member.present
        assert member.announcement.raw == known
        assert attacker.peer_id not in target.swarm.table.present()
        owner.swarm.announce(state="draining", span=None)
        await until(lambda: target.swarm.table.state(owner.peer) == "draining")


async def knock_as_another(mask: NoiseTransport, raw: RawConnection, peer: str) -> None:
    await multistream.propose(raw, ["/noise"])
    secured = await mask.secure_outbound(raw, peer)
    await multistream.propose(secured, ["/yamux/1.0.0"])  # the third message is judged only now


async def wear(mask: NoiseTransport, raw: RawConnection, peer: str) -> None:
    try:
        await mask.secure_outbound(raw, peer)
    except HandshakeError:
        return


async def test_dead_providers_do_not_hide_a_living_one() -> None:
    """Memory: 24 MiB; each of them connects, says that it can be found there, and is gone."""
    await hide_a_provider(DEAD_PROVIDERS, grows_by=24 * MIB)


async def hide_a_provider(dead: int, grows_by: int) -> None:
    async with under_attack(grows_by=grows_by) as victim, make_network("dht").running() as member:
        member.seek(str(victim.address))
        await until(lambda: any(link.rtt_s is not None for link in member.links()))
        await member.provide(KEY)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(provide_and_go, victim, dead // 4)
        async with make_network("dht").running() as joiner:
            joiner.seek(str(victim.address))
            await until(lambda: any(link.rtt_s is not None for link in joiner.links()))
            found = await joiner.find_providers(KEY, timeout_s=3)
            assert member.peer_id in found[:3]
            assert len(found) <= 64


async def provide_and_go(victim: Victim, count: int) -> None:
    place = parse_address("/ip4/127.0.0.1/tcp/1")
    for _ in range(count):
        identity = Identity.generate()
        async with connection_to(victim, identity) as connection:
            stream = await open_protocol(connection, kad.PROTOCOL)
            provider = Contact(identity.peer_id, (place,))
            await send_bytes(stream, Message(Op.ADD_PROVIDER, provider_key(KEY), providers=(provider,)).encode())
            assert await receive_bytes(stream, MIB)
