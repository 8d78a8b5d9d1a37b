"""Attacks by anybody who can connect: floods of statements or questions, a full quota, made-up times, silence."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from app.joining.admission import Signer
from app.membership import Membership, exchange, wire
from app.membership.guard import GRACE_S, PRESENT_TIMEOUT_S, SWEEP_S
from app.swarm.records import sign_record
from p2p import sockets
from p2p.addresses import Address, parse_address
from p2p.discovery.seeker import ENOUGH_PEERS
from p2p.envelope import Envelope, parse
from p2p.errors import DeadlineExceeded, P2PError, ProtocolError
from p2p.host.admission import Admission, ConnectionLimits
from p2p.host.connection import Stream
from p2p.host.heartbeat import PROTOCOL as HEARTBEAT
from p2p.host.identify import IDENTIFY, PING, StandardProtocols
from p2p.host.messages import address_bytes
from p2p.identity import Identity
from p2p.link.frames import CHUNK_BYTES, FIRST, LAST, PREFACE, WHOLE, Frame, Kind, encode
from p2p.link.quota import Limits
from p2p.link.switchboard import LIVE_LANE
from p2p.memory.fabric import LinkProfile
from p2p.network import Libp2pNetwork
from p2p.values import MAX_BODY_BYTES
from tests.app.guarded import open_guarded
from tests.app.swarms import CREATOR, MODEL, N_BLOCKS, identity, open_sim
from tests.p2p.network_contract import PROTOCOL, Stall, echo, echo_stream
from tests.p2p.networks import TrioByteStream, WiredNode, WiredWorld, wired_world
from tests.p2p.nodes import make_host, make_network, until

HOUR_S = 3600.0


# --- C-1: punishments ------------------------------------------------------------------------------------------------


async def test_a_flood_of_worthless_statements_ends_the_strangers_link_and_not_the_membership() -> None:
    """A stranger makes 64 calls at once with 40 one-byte statements each: it is cut off, and others are answered."""
    record = sign_record(CREATOR, "attic", MODEL, now_ms=time.time_ns() // 10**6)
    swarm_id, who = bytes.fromhex(record.id), Identity.generate()
    nothing, worthless = wire.Tell(swarm_id, []).encode(), wire.Tell(swarm_id, [b"x"] * 40).encode()
    async with (
        make_network(identity=who).running() as victim,
        make_network().running() as stranger,
        make_network().running() as honest,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(Membership(victim, who, record, N_BLOCKS).run)
        for caller in (stranger, honest):
            caller.learn(victim.peer_id, victim.addresses())
            assert await caller.call(victim.peer_id, wire.TELL, nothing, timeout_s=5) == b""

        async def tell() -> None:
            with contextlib.suppress(P2PError):
                await stranger.call(victim.peer_id, wire.TELL, worthless, timeout_s=3)

        async with trio.open_nursery() as calls:
            for _ in range(64):
                calls.start_soon(tell)
        assert await honest.call(victim.peer_id, wire.TELL, nothing, timeout_s=5) == b""
        with pytest.raises(P2PError):
            await stranger.call(victim.peer_id, wire.TELL, nothing, timeout_s=5)
        nursery.cancel_scope.cancel()


def test_a_peer_that_misbehaves_thousands_of_times_is_held_off_for_the_longest_time() -> None:
    """A peer earns 2000 strikes: each is counted without an error, and the holdoff stays at its maximum."""
    admission, limits = Admission(), ConnectionLimits()
    seconds = [admission.punish("stranger", now=1.0) for _ in range(2000)]
    assert seconds[0] == limits.first_holdoff_s
    assert seconds[-1] == limits.longest_holdoff_s
    assert admission.refuse_peer("stranger", now=2.0) is not None


# --- C-2: the quota --------------------------------------------------------------------------------------------------


async def stranger(world: WiredWorld, victim: WiredNode, number: int, *frames: Frame) -> None:
    """Connect to the victim under a name of its own and send these frames."""
    here, there = trio.testing.memory_stream_pair()
    world.connect(victim, f"stranger {number}", LIVE_LANE, TrioByteStream(there))
    await here.send_all(PREFACE + b"".join(map(encode, frames)))


async def test_requests_that_are_begun_and_never_finished_starve_nobody(autojump_clock: MockClock) -> None:
    """Four strangers begin 16 requests of 64 MiB and stop after 256 KiB: an honest peer is served then and later."""
    async with wired_world() as world:
        honest, victim = await world.node(), await world.node()
        victim.serve("echo", echo)
        victim.accept(PROTOCOL, echo_stream)
        stream = await honest.open(victim.peer_id, PROTOCOL)
        begun = [
            Frame(Kind.REQUEST, FIRST, id, MAX_BODY_BYTES, 1000, "echo", bytes(CHUNK_BYTES)) for id in (1, 3, 5, 7)
        ]
        for number in range(4):
            await stranger(world, victim, number, *begun)
        for wait_s in (1.5, HOUR_S):  # the calls' own deadline is one second
            await trio.sleep(wait_s)
            assert await honest.call(victim.peer_id, "echo", b"a call", timeout_s=5) == b"a call"
            await stream.send(b"a message")
            assert await stream.receive() == b"a message"


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.OPEN])
async def test_sixteen_strangers_leave_calls_and_streams_for_others(autojump_clock: MockClock, kind: Kind) -> None:
    """Sixteen strangers hold as many calls or streams as one peer may have: an honest peer still gets its own."""
    async with wired_world() as world:
        honest, victim = await world.node(), await world.node()
        victim.serve("echo", echo)
        victim.serve("stall", Stall())
        victim.accept(PROTOCOL, echo_stream)
        limits, name = Limits(), "stall" if kind == Kind.REQUEST else PROTOCOL
        held = [Frame(kind, WHOLE, 2 * n + 1, 0, int(HOUR_S * 1000), name, b"") for n in range(limits.calls_per_peer)]
        for number in range(limits.calls // len(held)):
            await stranger(world, victim, number, *held)
        await trio.sleep(1)
        assert await honest.call(victim.peer_id, "echo", b"a call", timeout_s=5) == b"a call"
        stream = await honest.open(victim.peer_id, PROTOCOL)
        await stream.send(b"a message")
        assert await stream.receive() == b"a message"


async def test_a_call_that_runs_is_not_ended_while_others_can_make_way_at_once(autojump_clock: MockClock) -> None:
    """It takes a moment to end: whoever asked was refused meanwhile, although it was within its share."""
    async with wired_world() as world:
        world.limits = Limits(calls=8, calls_floor=0)
        honest, victim, stall = await world.node(), await world.node(), Stall()
        victim.serve("echo", echo)
        victim.serve("stall", stall)
        deadline_ms, size = int(HOUR_S * 1000), CHUNK_BYTES + 1
        runs = [
            Frame(Kind.REQUEST, FIRST, 1, size, deadline_ms, "stall", bytes(CHUNK_BYTES)),
            Frame(Kind.REQUEST, LAST, 1, size, 0, "", bytes(1)),
        ]
        begun = [
            Frame(Kind.REQUEST, FIRST, id, size, deadline_ms, "echo", bytes(CHUNK_BYTES)) for id in range(3, 13, 2)
        ]
        for number, frames in enumerate(([*runs, *begun], begun[:2])):
            await stranger(world, victim, number, *frames)
            await trio.sleep(1)
        assert await honest.call(victim.peer_id, "echo", b"a call", timeout_s=5) == b"a call"
        assert stall.started.is_set()
        assert not stall.cancelled.is_set()


# --- L-1: the round-trip time ----------------------------------------------------------------------------------------


async def test_a_dialler_does_not_choose_the_round_trip_time_that_is_measured_to_it() -> None:
    """A stranger pings with a claimed round trip of one microsecond: no such time shows among the victim's links."""
    ping = struct.pack("!II", 1, 1)  # its number, and the last round trip in microseconds
    evil = make_host()
    async with make_network().running() as victim, trio.open_nursery() as nursery:
        await nursery.start(evil.run)
        connection = await evil.connect(victim.peer_id, victim.host.addresses)
        stream = await connection.open_stream(HEARTBEAT)
        await stream.write(struct.pack("!BH", 2, len(ping)) + ping)
        received = b""
        with contextlib.suppress(P2PError), trio.move_on_after(1):
            while not received.endswith(ping):  # the answer; a node that refuses such a ping ends the stream
                received += await stream.read(4096)
        measured: list[float] = []
        with trio.fail_after(10):
            while not measured:
                measured = [link.rtt_s for link in victim.links() if link.peer == evil.peer_id and link.rtt_s]
                await trio.lowlevel.checkpoint()
        assert all(rtt_s > 1e-5 for rtt_s in measured), measured  # nothing in Python answers within 10 microseconds
        await evil.goodbye()
        nursery.cancel_scope.cancel()


# --- questions of other libp2p nodes ----------------------------------------------------------------------------------


@dataclass
class Asking:
    """A stream of a peer that asks without end, and what it was answered."""

    peer: str = "stranger"
    connection: Any = field(
        default_factory=lambda: SimpleNamespace(
            relayed=False,
            address=parse_address("/ip4/198.51.100.7/tcp/7464"),
            in_turn=lambda work, *arguments: work(*arguments),
        )
    )
    answers: list[bytes] = field(default_factory=list)

    async def read(self, n: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes(n)

    async def write(self, data: bytes) -> None:
        self.answers.append(data)
        assert len(self.answers) < 1000

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("protocol", [IDENTIFY, PING])
async def test_a_flood_of_questions_who_a_node_is_and_of_pings_ends_with_the_connection(protocol: str) -> None:
    stranger, honest = make_host(), make_host()
    async with make_network().running() as victim, trio.open_nursery() as nursery:
        await nursery.start(stranger.run)
        await nursery.start(honest.run)
        flood, quiet = [await host.connect(victim.peer_id, victim.host.addresses) for host in (stranger, honest)]
        with contextlib.suppress(P2PError):
            for _ in range(500):
                await (await flood.open_stream(protocol)).reset()
        with trio.fail_after(5):
            await flood.closed.wait()
        assert (await quiet.open_stream(protocol)).protocol == protocol
        nursery.cancel_scope.cancel()


async def test_many_who_ask_a_node_who_it_is_make_it_look_up_its_addresses_once_a_second(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer had all interfaces of the machine read."""
    host, own_ips, reads = make_host(), sockets.own_ips, 0

    def counted() -> Any:
        nonlocal reads
        reads += 1
        return own_ips()

    monkeypatch.setattr(sockets, "own_ips", counted)
    StandardProtocols(host, Identity.generate())

    async def ask() -> bytes:
        stream = Asking(Identity.generate().peer_id)
        await host._handlers[IDENTIFY](cast(Stream, stream))
        return b"".join(stream.answers)

    first = await ask()
    assert {await ask() for _ in range(100)} == {first}
    assert reads == 1
    new = Address("ip4", "203.0.113.9", 7464)
    host.confirmed.append(new)
    await trio.sleep(1.5)
    assert address_bytes(new) in await ask()


async def test_pings_without_pause_are_answered_at_a_bounded_rate(autojump_clock: MockClock) -> None:
    host = make_host()
    StandardProtocols(host, Identity.generate())
    streams = [Asking() for _ in range(3)]
    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(host._handlers[PING], cast(Stream, stream))
    assert 60 <= sum(len(stream.answers) for stream in streams) <= 400


# --- peers without a certificate --------------------------------------------------------------------------------------


async def say_nothing(peer: str, body: bytes) -> bytes:
    """Never answer."""
    await trio.sleep_forever()
    raise AssertionError


@pytest.mark.parametrize("patience_s", [1e6, PRESENT_TIMEOUT_S - 1])
async def test_a_silent_peer_with_many_calls_and_no_certificate_does_not_stop_the_sweep(
    autojump_clock: MockClock, tmp_path: Path, patience_s: float
) -> None:
    """Its calls each waited for it in turn, the check of the sweep behind them, and the links of all others stayed."""
    async with open_guarded(tmp_path) as sim, trio.open_nursery() as nursery:
        creator, member = await sim.grow(2)
        silent, quiet = (sim.fabric.node(identity(number).peer_id) for number in (50, 51))
        silent.serve(wire.PRESENT, say_nothing)

        async def call(starts_after_s: float) -> None:
            await trio.sleep(starts_after_s)
            while member.peer in silent.linked:
                with contextlib.suppress(P2PError):
                    await silent.call(member.peer, wire.TABLE, b"", timeout_s=patience_s)

        for node in (silent, quiet):
            await sim.fabric.dial(node, member.peer)
        for number in range(60):
            nursery.start_soon(call, number / 12)
        await trio.sleep(GRACE_S + 2 * SWEEP_S + 1)
        assert {link.peer for link in member.raw.links()} == {creator.peer}
        nursery.cancel_scope.cancel()


async def test_all_calls_to_a_peer_that_shows_no_certificate_fail_at_once(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with open_guarded(tmp_path) as sim:
        _, member = await sim.grow(2)
        silent = sim.fabric.node(identity(50).peer_id)
        silent.serve(wire.PRESENT, say_nothing)
        began, took_s = trio.current_time(), []

        async def call() -> None:
            with pytest.raises(DeadlineExceeded):
                await member.guard.call(silent.peer_id, wire.TABLE, b"", timeout_s=60)
            took_s.append(trio.current_time() - began)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(call)
        assert len(took_s) == 20
        assert max(took_s) <= PRESENT_TIMEOUT_S + 1


# --- statements that come at the same moment -------------------------------------------------------------------------


async def most_between_turns(looked_at: list[bytes], *works: Callable[[], Awaitable[object]]) -> int:
    """The most statements that were looked at while another task of the node waited for its turn."""
    most = 0
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            nonlocal most
            while True:
                before = len(looked_at)
                try:
                    await trio.lowlevel.checkpoint()
                finally:
                    most = max(most, len(looked_at) - before)

        nursery.start_soon(watch)
        async with trio.open_nursery() as working:
            for work in works:
                working.start_soon(work)
        nursery.cancel_scope.cancel()
    return most


async def test_statements_of_many_strangers_at_once_leave_turns_for_all_else(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 64 strangers had 32 statements looked at in one turn: half a second of announcements to verify."""
    looked_at: list[bytes] = []

    def look(raw: bytes) -> Envelope:
        looked_at.append(raw)
        return parse(raw)

    async with open_sim() as sim:
        (node,) = await sim.grow(1)
        monkeypatch.setattr(exchange, "parse", look)
        tell = [partial(node.swarm._exchange._receive_all, [b"x"] * 40, f"stranger {n}") for n in range(64)]
        assert await most_between_turns(looked_at, *tell) <= 2 * 64 * 4  # each has one turn or two meanwhile
        assert len(looked_at) == 64 * 40


async def test_an_answer_that_names_nobody_does_not_end_a_newcomers_questions(autojump_clock: MockClock) -> None:
    """It comes from nearer than those of the members, which the newcomer would ask again only seconds later."""
    async with open_sim() as sim:
        nodes = await sim.grow(3)
        near, newcomer = sim.fabric.node("near"), identity(77).peer_id

        async def names_nobody(peer: str, body: bytes) -> bytes:
            return wire.TableAnswer([], []).encode()

        near.serve(wire.TABLE, names_nobody)
        for node in nodes:
            sim.fabric.set_link(node.peer, newcomer, LinkProfile(delay_s=0.15))
        added = sim.add(77, ["near", *(node.peer for node in nodes)])
        await sim.until(lambda: bool(added.swarm.table.present()), 1)


async def test_revocation_lists_are_verified_one_at_a_time(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[bytes] = []
    async with open_guarded(tmp_path) as sim:
        creator = sim.add(0)
        signer = Signer.of(creator.home, creator.who, creator.swarm)
        lists = [signer.revoke((identity(9).peer_id,), now_ms) for now_ms in range(1, 61)]
        monkeypatch.setattr(creator.guard, "keep", lambda envelope: looked_at.append(envelope.raw))
        take = partial(creator.guard._receive, lists, "stranger", asked=True)
        assert await most_between_turns(looked_at, take) <= 2
        assert len(looked_at) == 60


def test_a_message_of_thousands_of_statements_that_hold_nothing_is_refused() -> None:
    """A table of members has 1 MiB: as many as 350,000 of one byte each, which took a tenth of a second."""
    for kind, head, most in (
        (wire.TableAnswer, bytes(2), wire.MAX_TABLE_BYTES),
        (wire.Tell, bytes(16), wire.MAX_BATCH_BYTES),
    ):
        assert len(kind.decode(head + wire.pack([b"x"] * 1000)).statements) == 1000
        with pytest.raises(ProtocolError, match="more than"):
            kind.decode(head + wire.pack([b"x"] * (most // 3)))


# --- peers that are wanted ------------------------------------------------------------------------------------------


def connect(stranger: Libp2pNetwork, victim: Libp2pNetwork) -> None:
    """Let a stranger dial the node."""
    stranger.seek(victim.addresses()[0])


def announce_nearby(stranger: Libp2pNetwork, victim: Libp2pNetwork) -> None:
    """Let mDNS report a stranger, whom the node dials."""
    victim._seeker.want_neighbour(stranger.peer_id, stranger.host.addresses)


@pytest.mark.parametrize("appear", [connect, announce_nearby])
async def test_strangers_do_not_keep_a_node_from_dialling_its_own_peers(
    appear: Callable[[Libp2pNetwork, Libp2pNetwork], None],
) -> None:
    """Eight connections of anybody were enough for it, and a node that had just started stayed alone with them."""
    victim, friend = make_network(), make_network()
    strangers = [make_network() for _ in range(ENOUGH_PEERS)]
    with trio.fail_after(30):
        async with AsyncExitStack() as stack:
            for network in (victim, friend, *strangers):
                await stack.enter_async_context(network.running())
            for stranger in strangers:
                appear(stranger, victim)
            await until(lambda: len(victim.links()) == ENOUGH_PEERS)
            victim.seek(friend.addresses()[0], keep=False)  # as it does with each peer that it remembers
            await until(lambda: friend.peer_id in {link.peer for link in victim.links()})
