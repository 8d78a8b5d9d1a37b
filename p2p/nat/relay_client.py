"""The client side of circuit relay v2: reserves places at relays, accepts circuits, and dials through relays.

`p2p.nat.relay_server` is the other side; `p2p.nat.traversal` decides when a node needs relays.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import trio

from p2p.addresses import Address, Scope, network_of
from p2p.errors import P2PError, PeerUnreachable, ProtocolError, Refused
from p2p.host.connection import Connection, Stream
from p2p.host.host import Host
from p2p.host.messages import receive_message, send_message
from p2p.nat.relay_wire import HOP, STOP, HopMessage, HopType, Status, StopMessage, StopType

PLACES = 3  # reservations that a node holds at a time, at relays of different networks if it can
MAX_RELAYS = 64
MAX_CIRCUITS_A_RELAY = 32  # so that one relay cannot use up all connections of this node
_ASK_TIMEOUT_S = 8.0
_FIRST_ASK_TIMEOUT_S = 2.0  # for a new place; as much longer each time that the relay gave none
_ASK_AGAIN_S = 60.0  # after a relay gave no place
_CHECK_S = 5.0
_SHORTEST_PLACE_S = 600.0  # one that ends sooner is none: whoever gives such ones would be asked again and again
_LONGEST_PLACE_S = 7200.0

log = logging.getLogger("shoal.p2p.relay")


class Circuit:
    """A stream through a relay as a raw connection, which has no socket of its own; `remote` is the relay's."""

    socket = None

    def __init__(self, stream: Stream, *, is_initiator: bool) -> None:
        self.is_initiator = is_initiator
        self.remote = stream.connection.raw.remote
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        """Read some bytes, at most `n`; empty at the end. Raises `StreamReset`."""
        return await self._stream.read(n)

    async def write(self, data: bytes) -> None:
        """Send all of `data`; raises `StreamReset`."""
        await self._stream.write(data)

    async def close(self) -> None:
        """Reset both directions; a raw connection cannot be half open."""
        await self._stream.reset()

    def abort(self) -> None:
        """Reset the stream without waiting."""
        self._stream.muxed.abort("the circuit was aborted")


def best_relay(candidates: Iterable[str], whereabouts: Callable[[str], tuple[str, float]], used: Iterable[str]) -> str:
    """Return the relay to reserve a place at: one of a network without a place yet, of those the nearest."""
    taken = {whereabouts(relay)[0] for relay in used}
    return min(candidates, key=lambda relay: (whereabouts(relay)[0] in taken, whereabouts(relay)[1], random.random()))


class _Place(NamedTuple):
    """A reservation, by trio's clock: the relay's own may be minutes off."""

    renew_at: float
    ends_at: float


class RelayClient:
    """Holds reservations at up to `PLACES` relays while `needed`, and dials other peers through relays."""

    def __init__(self, host: Host, changed: Callable[[], None] = lambda: None) -> None:
        self._host = host
        self._changed = changed
        self._offering: dict[str, Address] = {}  # relay -> its address
        self._places: dict[str, _Place] = {}
        # Relays that gave no place -> how often in a row, and when they may be asked again; the latest last.
        self._refusals: dict[str, tuple[int, float]] = {}
        self._circuits: Counter[str] = Counter()
        self._wake = trio.Event()
        self._needed = False
        host.relay_dial = self.dial
        host.handle(STOP, self._stop)

    @property
    def places(self) -> list[str]:
        """Relays at which this node has a reservation."""
        return list(self._places)

    @property
    def relays(self) -> frozenset[str]:
        """Relays whose connections must stay open: for reservations, circuits, or relayed connections of this node."""
        carrying = {c.address.relay for c in self._host.connections() if c.address.relay is not None}
        return frozenset(self._places) | frozenset(self._circuits) | carrying

    @property
    def needed(self) -> bool:
        """True if this node should be reachable through relays."""
        return self._needed

    @needed.setter
    def needed(self, value: bool) -> None:
        self._needed = value
        self._wake.set()

    def heard_of(self, peer: str, address: Address) -> None:
        """Record that `peer` offers relaying and listens at `address`.

        At most `MAX_RELAYS` are remembered; if there are more, one that is no longer connected is forgotten.
        """
        if address.scope is Scope.RELAY:
            return
        if peer not in self._offering and len(self._offering) >= MAX_RELAYS:
            gone = next((relay for relay in self._offering if self._host.connection(relay) is None), None)
            if gone is None:
                return
            del self._offering[gone]
        self._offering[peer] = address.of(peer)
        self._wake.set()

    def withdrawn(self, peer: str) -> None:
        """Record that `peer` no longer offers relaying."""
        self._offering.pop(peer, None)

    async def run(self) -> None:
        """Make and renew reservations while they are needed, until cancelled."""
        while True:
            self._drop_lost()
            if self.needed and len(self._places) < PLACES:
                await self._reserve_more()
            now = trio.current_time()
            for relay in [relay for relay, place in self._places.items() if place.renew_at <= now]:
                await self._reserve(relay)
            with trio.move_on_after(_CHECK_S * random.uniform(0.5, 1.0)):
                await self._wake.wait()
            self._wake = trio.Event()

    async def dial(self, address: Address) -> Connection:
        """Connect to `address.peer` through the relay in `address`.

        Raises `PeerUnreachable`, `Refused` if the relay declines, or `trio.TooSlowError`.
        """
        relay, peer = address.relay, address.peer
        if relay is None or peer is None or peer == self._host.peer_id:
            raise PeerUnreachable(f"{address} is not an address of another peer through a relay")
        if relay == self._host.peer_id:
            raise PeerUnreachable("a node cannot be its own relay")
        relay_address = Address(address.kind, address.host, address.port, relay)
        connection = await self._host.connect(relay, [relay_address], as_relay=True)
        stream = await connection.open_stream(HOP)
        try:
            with trio.fail_after(_ASK_TIMEOUT_S):
                await send_message(stream, HopMessage(HopType.CONNECT, peer))
                answer = await receive_message(stream, HopMessage)
            if answer.status is not Status.OK:
                raise Refused(f"the relay {relay} did not connect to {peer}: {answer.status.name}")
            return await self._host.adopt(Circuit(stream, is_initiator=True), address, peer)
        except BaseException:
            await stream.reset()
            raise

    async def _stop(self, stream: Stream) -> None:
        """Handle a relay's request to connect another peer to this node."""
        with trio.fail_after(_ASK_TIMEOUT_S):
            request = await receive_message(stream, StopMessage)
        if request.type is not StopType.CONNECT or request.peer is None:
            raise ProtocolError(f"{stream.peer} sent a relay STOP message that is not a valid CONNECT")
        if stream.peer not in self._places:
            await send_message(stream, StopMessage(StopType.STATUS, status=Status.PERMISSION_DENIED))
            return
        if self._circuits[stream.peer] >= MAX_CIRCUITS_A_RELAY or not self._host.admission.has_room_inbound:
            await send_message(stream, StopMessage(StopType.STATUS, status=Status.RESOURCE_LIMIT_EXCEEDED))
            return
        self._circuits[stream.peer] += 1
        try:
            await self._accept_circuit(stream, request.peer)
        finally:
            self._circuits[stream.peer] -= 1
            if not self._circuits[stream.peer]:
                del self._circuits[stream.peer]

    async def _accept_circuit(self, stream: Stream, source: str) -> None:
        await send_message(stream, StopMessage(StopType.STATUS, status=Status.OK))
        circuit = stream.connection.address.of(stream.peer).through(source)
        connection = await self._host.adopt(Circuit(stream, is_initiator=False), circuit, None)
        # The stream belongs to this handler's task, so the task must last as long as the circuit.
        await connection.closed.wait()

    async def _reserve_more(self) -> None:
        """Ask as many relays as there are places to fill, at once: the best of those that refused least often.

        Else a few that are near and never answer would be asked in turn for ever, and no other one.
        """
        now, never = trio.current_time(), (0, 0.0)
        refusals = {
            relay: count
            for relay in self._offering
            for count, until in [self._refusals.get(relay, never)]
            if relay not in self._places and until <= now and self._host.connection(relay)
        }
        candidates = {relay for relay, count in refusals.items() if count == min(refusals.values())}
        asked: set[str] = set()
        async with trio.open_nursery() as nursery:
            while len(self._places) + len(asked) < PLACES and asked < candidates:
                relay = best_relay(candidates - asked, self._whereabouts, asked.union(self._places))
                asked.add(relay)
                patience_s = min(_FIRST_ASK_TIMEOUT_S * (1 + refusals[relay]), _ASK_TIMEOUT_S)
                nursery.start_soon(self._reserve, relay, patience_s)

    def _whereabouts(self, relay: str) -> tuple[str, float]:
        """Return the network of a relay and the round trip to it in seconds, infinity if it is not measured yet."""
        address, connection = self._offering.get(relay), self._host.connection(relay)
        network = "" if address is None or address.ip is None else network_of(address.ip)
        rtt_s = None if connection is None else connection.rtt_s
        return network, math.inf if rtt_s is None else rtt_s

    async def _reserve(self, relay: str, patience_s: float = _ASK_TIMEOUT_S) -> None:
        try:
            with trio.fail_after(patience_s):
                answer = await self._ask_for_place(relay)
            if answer.status is not Status.OK or answer.reservation is None:
                raise Refused(f"the relay refused the reservation: {answer.status.name}")
            lasts_s = min(answer.reservation.expires_at - time.time(), _LONGEST_PLACE_S)
            if lasts_s < _SHORTEST_PLACE_S:
                raise Refused(f"the reservation ends in {lasts_s:.0f} s")
        except (P2PError, trio.TooSlowError) as error:
            log.info("no reservation at the relay %s: %s", relay, error)
            self._places.pop(relay, None)
            count, _ = self._refusals.pop(relay, (0, 0.0))
            self._refusals[relay] = (count + 1, trio.current_time() + _ASK_AGAIN_S)
            if len(self._refusals) > MAX_RELAYS:
                del self._refusals[next(iter(self._refusals))]
            self._publish()
            return
        self._refusals.pop(relay, None)
        now = trio.current_time()
        self._places[relay] = _Place(now + lasts_s / 2, now + lasts_s)
        log.info("reachable through the relay %s", relay)
        self._publish()

    async def _ask_for_place(self, relay: str) -> HopMessage:
        stream = await self._host.open_stream(relay, HOP)
        try:
            await send_message(stream, HopMessage(HopType.RESERVE))
            return await receive_message(stream, HopMessage)
        finally:
            await stream.reset()  # a relay that does not close it would use up the streams of the connection

    def _drop_lost(self) -> None:
        now = trio.current_time()
        lost = [r for r, place in self._places.items() if place.ends_at <= now or self._host.connection(r) is None]
        for relay in lost:
            del self._places[relay]
        if lost or (self._places and not self.needed):
            if not self.needed:
                self._places.clear()
            self._publish()

    def _publish(self) -> None:
        addresses = [
            self._offering[relay].through(self._host.peer_id) for relay in self._places if relay in self._offering
        ]
        if addresses != self._host.extra_addresses:
            self._host.extra_addresses = addresses
            self._changed()
