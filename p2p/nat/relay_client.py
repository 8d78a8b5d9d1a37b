"""Being reachable through relays, and reaching others through theirs (circuit relay v2)."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable

import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Status, StopMessage

from p2p.addresses import Address, Scope
from p2p.channel import raw as rawio
from p2p.errors import P2PError, PeerUnreachable, ProtocolError, Refused
from p2p.host.connection import Connection, Stream
from p2p.host.host import Host
from p2p.host.protobuf import receive_message, send_message
from p2p.nat.relay_server import HOP, STOP

PLACES = 2
MAX_CIRCUITS_A_RELAY = 32  # a relay decides who comes through it; it must not be able to take every place here
_ASK_TIMEOUT_S = 8.0
_CHECK_S = 5.0

log = logging.getLogger("shoal.p2p.relay")


class CircuitBytes:
    """The bytes of a stream through a relay, in the shape that a raw connection needs."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        """Some bytes, nothing at the end."""
        try:
            return await self._stream.read(n)
        except P2PError as error:
            raise ConnectionClosedError(str(error)) from error

    async def write(self, data: bytes) -> None:
        """Send all of `data`."""
        try:
            await self._stream.write(data)
        except P2PError as error:
            raise ConnectionClosedError(str(error)) from error

    async def close(self) -> None:
        """End both directions: half a connection is of no use."""
        await self._stream.reset()

    def abort(self) -> None:
        """End it without waiting."""
        muxed = self._stream.muxed
        muxed.muxed_conn.reset_stream(muxed, "the circuit was cut")

    def get_remote_address(self) -> tuple[str, int] | None:
        """A circuit has no address of its own."""
        return None


class RelayClient:
    """Holds places at relays while this node needs them, and dials through relays."""

    def __init__(self, host: Host, changed: Callable[[], None] = lambda: None) -> None:
        self._host = host
        self._changed = changed
        self._offering: dict[str, Address] = {}  # relays heard of, and where they listen
        self._places: dict[str, float] = {}  # relay -> until, unix seconds
        self._refused_until: dict[str, float] = {}
        self._circuits: Counter[str] = Counter()
        self._wake = trio.Event()
        self._needed = False
        host.relay_dial = self.dial
        host.handle(STOP, self._stop)

    @property
    def places(self) -> list[str]:
        """The relays that hold a place for this node."""
        return list(self._places)

    @property
    def relays(self) -> frozenset[str]:
        """The relays whose connections carry something, or will."""
        carrying = {c.address.relay for c in self._host.connections() if c.address.relay is not None}
        return frozenset(self._places) | frozenset(self._circuits) | carrying

    @property
    def needed(self) -> bool:
        """Whether this node wants places at relays."""
        return self._needed

    @needed.setter
    def needed(self, value: bool) -> None:
        self._needed = value
        self._wake.set()

    def heard_of(self, peer: str, address: Address) -> None:
        """`peer` relays for others and listens at `address`."""
        if address.scope is not Scope.RELAY and len(self._offering) < 64:
            self._offering[peer] = address.of(peer)
            self._wake.set()

    def withdrawn(self, peer: str) -> None:
        """`peer` no longer relays."""
        self._offering.pop(peer, None)

    async def run(self) -> None:
        """Keep places at a few relays for as long as they are needed."""
        while True:
            self._drop_lost()
            if self.needed and len(self._places) < PLACES:
                await self._reserve_one()
            for relay in [r for r, until in self._places.items() if until - time.time() < 300]:
                await self._reserve(relay)
            with trio.move_on_after(_CHECK_S * random.uniform(0.5, 1.0)):
                await self._wake.wait()
            self._wake = trio.Event()

    async def dial(self, address: Address) -> Connection:
        """A connection to `address.peer` through the relay that the address names."""
        relay, peer = address.relay, address.peer
        if relay is None or peer is None or peer == self._host.peer_id:
            raise PeerUnreachable(f"{address} is not an address behind a relay")
        if relay == self._host.peer_id:
            raise PeerUnreachable("this node does not relay to itself")
        way = Address(address.kind, address.host, address.port, relay)
        connection = await self._host.connect(relay, [way])
        stream = await connection.open_stream(HOP)
        try:
            with trio.fail_after(_ASK_TIMEOUT_S):
                target = PeerId(id=ID.from_base58(peer).to_bytes())
                await send_message(stream, HopMessage(type=HopMessage.CONNECT, peer=target))
                answer = await receive_message(stream, HopMessage)
            if answer.status != Status.OK:
                raise Refused(f"the relay {relay} does not connect to {peer}: {Status.Name(answer.status)}")
            raw = rawio.relayed_connection(CircuitBytes(stream), initiator=True, circuit=address)
            return await self._host.adopt(raw, address, peer)
        except BaseException:
            await stream.reset()
            raise

    async def _stop(self, stream: Stream) -> None:
        """A relay says that somebody wants to be connected to this node."""
        with trio.fail_after(_ASK_TIMEOUT_S):
            request = await receive_message(stream, StopMessage)
        if request.type != StopMessage.CONNECT or not 0 < len(request.peer.id) <= 64:
            raise ProtocolError(f"{stream.peer} sent a stop message that connects nobody")
        if stream.peer not in self._places:
            await send_message(stream, StopMessage(type=StopMessage.STATUS, status=Status.PERMISSION_DENIED))
            return
        if self._circuits[stream.peer] >= MAX_CIRCUITS_A_RELAY:
            await send_message(stream, StopMessage(type=StopMessage.STATUS, status=Status.RESOURCE_LIMIT_EXCEEDED))
            return
        self._circuits[stream.peer] += 1
        try:
            await self._attend(stream, request)
        finally:
            self._circuits[stream.peer] -= 1
            if not self._circuits[stream.peer]:
                del self._circuits[stream.peer]

    async def _attend(self, stream: Stream, request: StopMessage) -> None:
        source = str(ID(request.peer.id))
        await send_message(stream, StopMessage(type=StopMessage.STATUS, status=Status.OK))
        circuit = stream.connection.address.of(stream.peer).through(source)
        raw = rawio.relayed_connection(CircuitBytes(stream), initiator=False, circuit=circuit)
        connection = await self._host.adopt(raw, circuit, None)
        # The handler's task owns the stream for as long as the circuit lasts.
        await connection.closed.wait()

    async def _reserve_one(self) -> None:
        now = trio.current_time()
        candidates = [
            relay
            for relay in self._offering
            if relay not in self._places and self._refused_until.get(relay, 0) <= now and self._host.connection(relay)
        ]
        if candidates:
            await self._reserve(random.choice(candidates))

    async def _reserve(self, relay: str) -> None:
        try:
            stream = await self._host.open_stream(relay, HOP)
            with trio.fail_after(_ASK_TIMEOUT_S):
                await send_message(stream, HopMessage(type=HopMessage.RESERVE))
                answer = await receive_message(stream, HopMessage)
            if answer.status != Status.OK:
                raise Refused(f"the relay {relay} has no place: {Status.Name(answer.status)}")
        except (P2PError, trio.TooSlowError) as error:
            log.info("no place at the relay %s: %s", relay, error)
            self._places.pop(relay, None)
            self._refused_until[relay] = trio.current_time() + 60
            self._publish()
            return
        self._places[relay] = min(float(answer.reservation.expire), time.time() + 7200)
        log.info("reachable through the relay %s", relay)
        self._publish()

    def _drop_lost(self) -> None:
        now = time.time()
        lost = [r for r, until in self._places.items() if until <= now or self._host.connection(r) is None]
        for relay in lost:
            del self._places[relay]
        if lost or (self._places and not self.needed):
            if not self.needed:
                self._places.clear()
            self._publish()

    def _publish(self) -> None:
        ways = [self._offering[relay].through(self._host.peer_id) for relay in self._places if relay in self._offering]
        if ways != self._host.extra_addresses:
            self._host.extra_addresses = ways
            self._changed()
