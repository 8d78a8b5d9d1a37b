"""What a hostile peer may try against single parts of the network, each at its own boundary."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import trio
import trio.testing
from Crypto.Util.asn1 import DerSequence
from libp2p.crypto.pb import crypto_pb2
from libp2p.security.noise.pb import noise_pb2
from trio.testing import MockClock

from p2p.addresses import MAX_ADDRESSES_PER_PEER, Address, parse_address
from p2p.channel.yamux import YamuxConnection
from p2p.channel.yamux_flow import UnreadBytes, WindowBudget
from p2p.channel.yamux_wire import SYN, WINDOW_UPDATE, pack_header
from p2p.dht.directory import Directory
from p2p.dht.wire import Contact, Message, Op, decode
from p2p.discovery.known_peers import MAX_UNREACHED, KnownPeer, load_peers, merge, save_peers
from p2p.discovery.seeker import Seeker
from p2p.errors import HandshakeError, P2PError, ProtocolError, Refused, StreamClosed
from p2p.host import messages
from p2p.host.address_book import AddressBook
from p2p.host.admission import Admission, ConnectionLimits
from p2p.host.heartbeat import Heartbeat, Hello
from p2p.host.messages import address_bytes
from p2p.identity import Identity, peer_id_bytes, peer_id_of
from p2p.link import frames, link
from p2p.link.frames import FIRST, LAST, PREFACE, WHOLE, Frame, Kind
from p2p.link.link import PeerLink
from p2p.link.outbox import MAX_URGENT_ANSWERS, Outbox, Outgoing
from p2p.link.quota import Limits, Quota
from p2p.link.streams import MessageStream
from p2p.link.switchboard import LIVE_LANE
from p2p.network import NetworkConfig
from p2p.protobuf import encode
from tests.p2p.channels import attacked, close_sockets, socket_pair, transport
from tests.p2p.network_contract import echo
from tests.p2p.networks import TrioByteStream, wired_world

__all__ = ["close_sockets"]

PLACE = parse_address("/ip4/198.51.100.7/tcp/7464")


def peer(number: int) -> str:
    return peer_id_of(number.to_bytes(32))


def slow_rsa_key() -> bytes:
    """A libp2p key that says RSA and holds a *private* key of primes whose test takes seconds."""
    p, q, e = 2**4423 - 1, 2**4253 - 1, 65537
    d = pow(e, -1, (p - 1) * (q - 1))
    der = DerSequence([0, p * q, e, d, p, q, d % (p - 1), d % (q - 1), pow(q, -1, p)]).encode()
    return bytes(crypto_pb2.PublicKey(key_type=crypto_pb2.KeyType.RSA, data=der).SerializeToString())


async def test_an_identity_that_takes_seconds_to_read_is_refused_unread() -> None:
    dialling, listening = Identity.generate(), Identity.generate()
    raw = socket_pair()
    hostile = transport(dialling)
    payload = noise_pb2.NoiseHandshakePayload(identity_key=slow_rsa_key(), identity_sig=bytes(64))
    hostile._payload = payload.SerializeToString()
    began = time.process_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hostile.secure_outbound, raw[0], listening.peer_id)
        with pytest.raises(HandshakeError, match="not an Ed25519 key"):
            await transport(listening).secure_inbound(raw[1])
        nursery.cancel_scope.cancel()
    assert time.process_time() - began < 1


def test_dropping_what_is_queued_does_not_search_the_queue() -> None:
    outbox = Outbox()
    for id in range(8000):
        outbox.put(Outgoing(Kind.PONG, id, 0))
    began = time.process_time()
    for _ in range(100_000):
        outbox.drop(10_000_000)
    for id in range(8000):
        outbox.drop(id)
    assert outbox.urgency() is None
    assert time.process_time() - began < 2


def test_what_a_node_asks_of_a_frozen_peer_is_not_held_against_the_peer() -> None:
    outbox = Outbox()
    for id in range(1, 2 * MAX_URGENT_ANSWERS, 2):
        outbox.put(Outgoing(Kind.REQUEST, id, 0, name=b"ping"))
        outbox.drop(id)
        outbox.put(Outgoing(Kind.CANCEL, id, 0))
        outbox.put(Outgoing(Kind.PONG, id + 1, 0))
        assert not outbox.overrun()
    outbox.put(Outgoing(Kind.PONG, 0, 0))
    assert outbox.overrun()
    while outbox.urgency() is not None:
        outbox.take()
    assert not outbox.overrun()


def test_a_new_link_is_no_new_start() -> None:
    quota = Quota(Limits(requests_per_s=1, request_burst=3, refusals=4, refusals_forgiven_per_s=0))
    assert [quota.request("a", 0.0) is None for _ in range(4)] == [True, True, True, False]
    assert not any(quota.refused("a", 0.0) for _ in range(4))
    quota.forget("a")
    assert quota.request("a", 0.1) is not None
    assert quota.refused("a", 0.1)
    for number in range(10_000):
        quota.request(str(number), 0.1)
        quota.forget(str(number))
    assert len(quota._peers) + len(quota._gone) <= 4097


async def test_malformed_calls_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with wired_world() as world:
        a, b = await world.node(), await world.node()

        async def picky(peer: str, body: bytes) -> bytes:
            raise ProtocolError("this is no request")

        b.serve("picky", picky)
        b.serve("echo", echo)
        with caplog.at_level(logging.INFO, "shoal"), pytest.raises(Exception, match="this is no request"):
            await a.call(b.peer_id, "picky", b"", timeout_s=5)
        assert not caplog.records
        assert await a.call(b.peer_id, "echo", b"on", timeout_s=5) == b"on"


async def give_nothing(peer: str, body: bytes) -> bytes:
    return b""


async def test_a_call_counts_until_its_answer_has_left() -> None:
    async with wired_world() as world:
        world.limits = Limits(calls_per_peer=4, bytes_per_peer=2**20)
        a, b = await world.node(), await world.node()
        b.serve("echo", echo)
        for _ in range(20):
            assert len(await a.call(b.peer_id, "echo", bytes(100_000), timeout_s=5)) == 100_000
        await trio.testing.wait_all_tasks_blocked()
        assert b.services.quota.under_way(a.peer_id) == (0, 0, 0)


async def test_an_answer_that_waits_to_be_read_counts_whatever_else_comes_for_its_call() -> None:
    """A peer that reads nothing sends more of a request that was answered, beyond what it may have here."""
    async with wired_world() as world:
        world.limits = Limits(bytes_per_peer=2**20)
        node = await world.node()

        async def give(peer: str, body: bytes) -> bytes:
            return bytes(2**19)

        node.serve("give", give)
        here, there = trio.testing.lockstep_stream_pair()
        world.connect(node, "liar", LIVE_LANE, TrioByteStream(there))
        asked = Frame(Kind.REQUEST, WHOLE, 1, 0, 60_000, "give", b"")
        await here.send_all(PREFACE + frames.encode(asked))
        await trio.testing.wait_all_tasks_blocked()
        assert node.services.quota.under_way("liar") == (1, 0, 2**19)
        for _ in range(5):
            await here.send_all(frames.encode(Frame(Kind.REQUEST, 0, 1, 2**25, 0, "", bytes(2**18))))
        await trio.testing.wait_all_tasks_blocked()
        assert node.services.quota.under_way("liar") == (1, 0, 2**19)


@pytest.mark.parametrize("what", ["requests that are not finished", "messages that are not finished", "answers"])
async def test_what_one_address_holds_makes_way_for_a_peer_at_another(what: str) -> None:
    """A peer keeps what its address may have at most: requests and messages without end, or answers that it leaves."""
    async with wired_world() as world:
        world.limits = Limits(bytes=2**20, bytes_floor=0)
        node, friend = await world.node(), await world.node()
        size = 250_000

        async def give(peer: str, body: bytes) -> bytes:
            return bytes(size)

        async def read(stream: MessageStream) -> None:
            await stream.receive()

        node.serve("give", give)
        node.serve("take", give_nothing)
        node.accept("read", read)
        here, there = trio.testing.lockstep_stream_pair()
        world.connect(node, "liar", LIVE_LANE, TrioByteStream(there))
        ids, begun = (1, 3, 5), bytes(size)
        if what == "answers":
            sent = [Frame(Kind.REQUEST, WHOLE, id, 0, 60_000, "give", b"") for id in ids]
        elif what == "requests that are not finished":
            sent = [Frame(Kind.REQUEST, FIRST, id, 2**20, 60_000, "take", begun) for id in ids]
        else:
            sent = [Frame(Kind.OPEN, WHOLE, id, 0, 0, "read", b"") for id in ids]
            sent += [Frame(Kind.MESSAGE, FIRST, id, 2**20, 0, "", begun) for id in ids]
        await here.send_all(PREFACE + b"".join(frames.encode(frame) for frame in sent))
        await trio.testing.wait_all_tasks_blocked()
        assert node.services.quota.under_way("liar")[2] >= 3 * size
        await friend.call(node.peer_id, "take", bytes(320 * 1024), timeout_s=5)
        assert 2 * size <= node.services.quota.under_way("liar")[2] < 3 * size
        await here.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert node.services.quota.under_way("liar") == (0, 0, 0)


@pytest.mark.parametrize(
    "useless",
    [
        Frame(Kind.REQUEST, LAST, 77, 0, 0, "", b""),
        Frame(Kind.REQUEST, LAST, 1, 0, 0, "", b""),
        Frame(200, WHOLE, 1, 0, 0, "", b""),
    ],
    ids=["of an unknown request", "of a request that is complete", "of an unknown kind"],
)
async def test_frames_that_achieve_nothing_cut_the_sender_off(
    useless: Frame, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    monkeypatch.setattr(link, "IDLE_FRAMES", 1000)
    async with wired_world() as world:
        node = await world.node()

        async def wait(peer: str, body: bytes) -> NoReturn:
            await trio.sleep_forever()

        node.serve("wait", wait)
        here, there = trio.testing.memory_stream_pair()
        world.connect(node, "liar", LIVE_LANE, TrioByteStream(there))
        asked = Frame(Kind.REQUEST, WHOLE, 1, 0, 60_000, "wait", b"")
        await here.send_all(PREFACE + frames.encode(asked) + frames.encode(useless) * 1000)
        await trio.testing.wait_all_tasks_blocked()
        assert node.reports == []
        await here.send_all(frames.encode(useless) * 1000)
        await trio.testing.wait_all_tasks_blocked()
        assert node.reports == [("liar", "floods this node with frames that do nothing")]


@pytest.mark.parametrize("fails", [False, True])
async def test_calls_of_a_link_that_ended_count_no_more(fails: bool) -> None:
    """Handlers that were not started yet when the peer closed, or that cannot be interrupted, run to their end."""
    async with wired_world() as world:
        a, b = await world.node(), await world.node()
        runs, ended = list[bytes](), trio.Event()

        async def handler(peer: str, body: bytes) -> bytes:
            if body:
                with trio.CancelScope(shield=True):
                    await ended.wait()
            runs.append(body)
            if fails:
                raise ProtocolError("this is no request")
            return bytes(100_000)

        b.serve("give", handler)
        here, there = trio.testing.memory_stream_pair()
        world.connect(b, a.peer_id, LIVE_LANE, TrioByteStream(there))
        calls = [Frame(Kind.REQUEST, WHOLE, id, len(body), 60_000, "give", body) for id, body in ((1, b""), (3, b"x"))]
        await here.send_all(PREFACE + b"".join(frames.encode(call) for call in calls))
        await here.send_stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        ended.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(runs) == 2
        assert b.services.quota.under_way(a.peer_id) == (0, 0, 0)
        assert not b.services.quota._peers


async def test_a_message_that_was_only_begun_counts_no_more_once_its_stream_is_closed() -> None:
    async with wired_world() as world:
        a, b = await world.node(), await world.node()

        async def read(stream: MessageStream) -> None:
            with pytest.raises(StreamClosed):
                await stream.receive()

        b.accept("read", read)
        here, there = trio.testing.memory_stream_pair()
        world.connect(b, a.peer_id, LIVE_LANE, TrioByteStream(there))
        opened = Frame(Kind.OPEN, WHOLE, 1, 0, 0, "read", b"")
        begun = Frame(Kind.MESSAGE, FIRST, 1, 2**20, 0, "", bytes(16 * 1024))
        await here.send_all(PREFACE + frames.encode(opened) + frames.encode(begun))
        await trio.testing.wait_all_tasks_blocked()
        assert b.services.quota.under_way(a.peer_id)[2] > 16 * 1024
        await here.send_all(frames.encode(Frame(Kind.CLOSE, WHOLE, 1, 0, 0, "", b"")))
        await trio.testing.wait_all_tasks_blocked()
        assert b.services.quota.under_way(a.peer_id) == (0, 0, 0)


@pytest.mark.parametrize("how", ["an error", "a whole answer", "nothing more"])
async def test_chunks_of_an_answer_that_ends_otherwise_are_not_kept(how: str, autojump_clock: trio.abc.Clock) -> None:
    async with wired_world() as world:
        a, b = await world.node(), await world.node()
        here, there = trio.testing.memory_stream_pair()
        calling = PeerLink(b.peer_id, TrioByteStream(there), a.services, initiator=True, paced=False, exempt=False)

        async def answer() -> None:
            await here.send_all(PREFACE)
            decoder = frames.FrameDecoder()
            while True:
                for asked in decoder.feed(await here.receive_some(2**16)):
                    if asked.kind != Kind.REQUEST:
                        continue
                    for number in range(3):
                        begun = Frame(Kind.ANSWER, FIRST, asked.id, 2**20, 0, "", bytes(16 * 1024))
                        await here.send_all(frames.encode(begun if not number else begun._replace(flags=0)))
                    if how == "an error":
                        await here.send_all(frames.encode(Frame(Kind.ERROR, WHOLE, asked.id, 0, 0, "busy", b"")))
                    elif how == "a whole answer":
                        await here.send_all(frames.encode(Frame(Kind.ANSWER, WHOLE | 1, asked.id, 0, 0, "", b"")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(calling.run)
            nursery.start_soon(answer)
            with contextlib.suppress(P2PError):
                await calling.call("echo", b"", timeout_s=5)
            assert not calling._assembler
            assert a.services.quota.under_way(b.peer_id) == (0, 0, 0)
            nursery.cancel_scope.cancel()


def test_a_whole_ipv6_network_counts_as_one_address() -> None:
    admission = Admission(ConnectionLimits(handshakes_per_ip=3, accepts_per_ip_burst=5))
    network = ipaddress.ip_network("2001:db8:1:2::/64")
    assert [admission.begin_handshake(network[n], 0.0) is None for n in range(5)] == [True] * 3 + [False] * 2
    for n in range(3):
        admission.end_handshake(network[n])
    assert [admission.begin_handshake(network[n], 0.0) is None for n in range(9, 13)] == [True] * 2 + [False] * 2
    assert admission.begin_handshake(ipaddress.ip_address("2001:db8:1:3::1"), 0.0) is None


async def test_a_stream_number_of_the_other_side_costs_the_connection() -> None:
    async with attacked() as (victim, hostile):
        await hostile.session.write(pack_header(WINDOW_UPDATE, SYN, 2, 0))
        with trio.fail_after(5):
            await victim.event_closed.wait()
        assert not victim.table.open


def test_the_connection_that_holds_most_has_to_go_when_memory_is_short() -> None:
    node = UnreadBytes(1000)
    greedy, modest = WindowBudget(node), WindowBudget(node)
    modest.hold(100)
    greedy.hold(890)
    modest.hold(20)  # over the sum, but below its share
    with pytest.raises(ProtocolError, match="unread bytes"):
        greedy.hold(1)
    greedy.leave()
    assert (node.total, node.connections) == (120, 1)
    greedy.let_go(891)  # its readers may still read what came
    assert node.total == 120
    modest.hold(800)


async def test_unread_bytes_are_counted_exactly_once() -> None:
    node = UnreadBytes()
    async with attacked() as (victim, _):
        connection = YamuxConnection(victim.session, unread=node)
        connection.table.budget.admit()
        stream = await connection.open_stream()
        stream.on_body(b"x" * 100)
        assert node.total == 100
        await stream.read(30)
        assert node.total == 70
        await stream.reset()
        assert node.total == 0
        connection.abort()
        assert (node.total, node.connections) == (0, 0)


def test_strangers_cannot_push_remembered_peers_out(tmp_path: Path) -> None:
    home = [KnownPeer(peer(number), (PLACE,), 1000.0) for number in range(1, 201)]
    crowd = home
    for wave in range(10):
        strangers = [
            KnownPeer(peer(10_000 + 1000 * wave + n), (PLACE,), 2000.0 + wave, reached=False) for n in range(150)
        ]
        crowd = merge(crowd, strangers)
    save_peers(tmp_path / "peers.json", crowd)
    kept = load_peers(tmp_path / "peers.json")
    assert sum(entry.reached for entry in kept) == 150
    assert sum(not entry.reached for entry in kept) == MAX_UNREACHED
    again = merge(kept, [KnownPeer(kept[0].peer, (PLACE,), 3000.0, reached=True)])
    assert again[0].reached


class Alone:
    """A directory node that knows its peers' addresses and is connected to nobody."""

    def __init__(self) -> None:
        self.book = AddressBook()

    def addresses(self) -> list[object]:
        return []

    def addresses_of(self, peer: str) -> list[object]:
        return []

    def network_of(self, peer: str) -> str | None:
        return None

    def record_of(self, peer: str) -> bytes:
        return b""

    def learn(self, contact: Contact) -> None:
        pass

    def is_connected(self, peer: str) -> bool:
        return False

    def is_server(self, peer: str) -> bool:
        return True


async def test_one_liar_cannot_hide_a_provider_behind_dead_ones(autojump_clock: trio.abc.Clock) -> None:
    """It answers at once with a full list of the dead; the honest nodes answer later, with the one that lives."""
    liar, honest, living = peer(1), [peer(n) for n in range(2, 8)], peer(99)
    dead = tuple(Contact(peer(1000 + n), (PLACE,)) for n in range(32))

    async def ask(name: str, request: Message, timeout_s: float) -> bytes:
        if name == liar:
            return Message(Op.GET_PROVIDERS, providers=dead).encode()
        await trio.sleep(0.3)
        return Message(Op.GET_PROVIDERS, providers=(Contact(living, (PLACE,)),)).encode()

    directory = Directory(Identity.generate().peer_id, ask, Alone())  # type: ignore[arg-type]
    for name in (liar, *honest):
        directory.saw(name)
    found = await directory.find_providers(bytes(32), timeout_s=5)
    assert found[0] == living


def test_long_addresses_are_not_kept_in_memory() -> None:
    """A stranger's requests to the directory have 64 KiB each, and what was decoded is remembered."""
    tracemalloc.start()
    try:
        for number in range(200):
            contact = encode((1, peer_id_bytes(peer(1))), (2, [number.to_bytes(4) + bytes(60_000)]))
            assert decode(encode((1, Op.PING), (9, [contact]))).providers == (Contact(peer(1)),)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 2**20


async def test_a_request_to_the_directory_costs_little_whatever_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger may send hundreds at once; 52 contacts of 64 addresses took a tenth of a second of all the node."""
    read: list[bytes] = []
    address_from_bytes = messages.address_from_bytes

    def reading(data: bytes) -> Address:
        read.append(data)
        return address_from_bytes(data)

    def contact(number: int) -> bytes:
        places = [parse_address(f"/ip4/198.51.{number}.{host}/tcp/1") for host in range(64)]
        return encode((1, peer_id_bytes(peer(number))), (2, [address_bytes(place) for place in places]))

    async def ask(peer: str, request: Message, timeout_s: float) -> bytes | None:
        return None

    monkeypatch.setattr(messages, "address_from_bytes", reading)
    directory = Directory(Identity.generate().peer_id, ask, Alone())  # type: ignore[arg-type]
    for op in Op:
        read.clear()
        named = [contact(number) for number in range(1, 53)]
        body = encode((1, op or None), (2, b"key"), (8, named[:20]), (9, named[20:]))
        with contextlib.suppress(Refused):
            await directory.handle(peer(30), body)
        assert len(read) <= (MAX_ADDRESSES_PER_PEER if op is Op.ADD_PROVIDER else 0)


async def test_few_hellos_of_a_peer_are_read(autojump_clock: trio.abc.Clock) -> None:
    """One with many addresses takes milliseconds; an honest peer sends a few, when its own addresses change."""
    heard: list[Hello] = []
    body = Hello((PLACE,)).encode()
    frame = b"\x01" + len(body).to_bytes(2) + body
    pause_s = 1.0

    async def read(count: int | None = None) -> bytes:
        await trio.sleep(pause_s)
        connection.heard_at = trio.current_time()
        return frame

    connection: Any = SimpleNamespace(
        initiated=False, peer=peer(1), heard_at=0.0, in_turn=lambda work, *arguments: work(*arguments)
    )
    stream: Any = SimpleNamespace(peer=peer(1), connection=connection, read=read)
    beat = Heartbeat(lambda connection: Hello(), lambda connection, hello: heard.append(hello))
    with trio.move_on_after(100):
        await beat._listen(stream)
    assert len(heard) >= 99
    pause_s = 0.001
    with pytest.raises(ProtocolError, match="floods"):
        await beat._listen(stream)
    assert len(heard) < 99 + 20


async def test_peers_that_read_nothing_keep_no_other_from_hearing_of_a_new_address(autojump_clock: MockClock) -> None:
    told: list[float] = []

    async def wait(data: bytes) -> None:
        await trio.sleep_forever()

    async def hear(data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        told.append(trio.current_time())

    beat = Heartbeat(lambda connection: Hello(), lambda connection, hello: None)
    beat._linked = {number: SimpleNamespace(write=hear if number == 64 else wait) for number in range(65)}  # type: ignore
    begun = trio.current_time()
    await beat.say_hello()
    assert told == [begun]
    assert trio.current_time() - begun < 2


async def test_a_wanted_peer_that_is_forgotten_before_its_turn_harms_nobody() -> None:
    tried: list[str] = []

    async def connect(name: str, addresses: list[object]) -> bool:
        tried.append(name)
        return False

    seeker = Seeker(connect, lambda name: False, set)  # type: ignore[arg-type]
    seeker.want("a", [PLACE])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(seeker._try, "a")
        seeker._forget("a")
    assert tried == ["a"]


def test_a_secret_is_in_no_repr() -> None:
    secret = b"the secret of us...."
    assert repr(secret) not in repr(NetworkConfig(secret=secret))
    assert secret.decode() not in repr(NetworkConfig(secret=secret))
