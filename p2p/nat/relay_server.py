"""The server side of circuit relay v2: connects peers that cannot dial each other, within limits.

A peer makes a reservation and keeps its connection open; others then ask the relay to be connected to it. The relay
sees encrypted bytes only, and accepts no requests over a connection that is itself relayed. Reservations and dials of
this node at other relays are in `p2p.nat.relay_client`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import NamedTuple

import trio

from p2p.addresses import IPAddress
from p2p.errors import P2PError, ProtocolError, Refused
from p2p.host.admission import source_of
from p2p.host.connection import Connection, Stream
from p2p.host.host import Host
from p2p.host.messages import address_bytes, receive_message, send_message
from p2p.nat.relay_wire import HOP, STOP, HopMessage, HopType, Limit, Reservation, Status, StopMessage, StopType
from p2p.rate_limit import KeyedRateLimit

_ASK_TIMEOUT_S = 10.0
_PIECE_BYTES = 64 * 1024

log = logging.getLogger("shoal.p2p.relay")


@dataclass(frozen=True)
class RelayLimits:
    """Upper bounds on reservations, circuits and bytes that a node relays for others."""

    reservations: int = 64
    reservations_per_address: int = 16  # of peers that come from one address
    reservation_s: float = 3600.0
    circuits: int = 32
    circuits_per_peer: int = 4  # that it asks for
    circuits_per_address: int = 8  # that peers of one address ask for
    circuits_to_peer: int = 16
    circuits_to_peer_per_address: int = 4  # so that one address cannot keep all others from a peer
    requests_per_address: int = 64  # for circuits, at once
    requests_per_address_s: float = 4.0  # and a second after that
    circuit_s: float = 1800.0
    circuit_bytes: int = 256 << 20
    bytes_per_s: float = 4 << 20  # all circuits together


class _Circuit(NamedTuple):
    """Who asked for a circuit, from which address, and to whom it leads."""

    peer: str
    address: IPAddress | None
    target: str


class RelayServer:
    """Serves relay requests of a host's peers while `enabled`."""

    def __init__(self, host: Host, limits: RelayLimits | None = None) -> None:
        self._host = host
        self._limits = limits or RelayLimits()
        self._reserved: dict[str, float] = {}  # peer -> expiry, trio's clock
        self._circuits: list[_Circuit] = []
        self._requests: KeyedRateLimit[IPAddress | None] = KeyedRateLimit(
            self._limits.requests_per_address, self._limits.requests_per_address_s
        )
        self._budget_at = 0.0
        self.enabled = False
        self.carried_bytes = 0

    def enable(self) -> None:
        """Start to accept relay requests."""
        if not self.enabled:
            self.enabled = True
            self._host.handle(HOP, self._serve)

    def disable(self) -> None:
        """Accept no new relay requests; open circuits continue."""
        self.enabled = False
        self._host.unhandle(HOP)

    @property
    def reservations(self) -> int:
        """Number of peers with a reservation."""
        return len(self._reserved)

    @property
    def served(self) -> frozenset[str]:
        """Peers whose connections must stay open, because they have a reservation or a circuit."""
        return frozenset(self._reserved).union(*((circuit.peer, circuit.target) for circuit in self._circuits))

    async def _serve(self, stream: Stream) -> None:
        with trio.fail_after(_ASK_TIMEOUT_S):
            request = await receive_message(stream, HopMessage)
        if stream.connection.relayed:
            await self._answer(stream, Status.PERMISSION_DENIED)
        elif request.type is HopType.RESERVE:
            await self._reserve(stream)
        elif request.type is HopType.CONNECT and request.peer is not None:
            await self._connect(stream, request.peer)
        else:
            raise ProtocolError(f"{stream.peer} sent a message to a relay that is not a valid request")

    async def _reserve(self, stream: Stream) -> None:
        now = trio.current_time()
        self._drop_lost(now)
        if stream.peer not in self._reserved and not self._has_place(stream.connection):
            await self._answer(stream, Status.RESERVATION_REFUSED)
            return
        self._reserved[stream.peer] = now + self._limits.reservation_s
        reservation = Reservation(
            int(time.time() + self._limits.reservation_s),
            tuple(address_bytes(address) for address in self._host.addresses[:8]),
        )
        answer = HopMessage(HopType.STATUS, status=Status.OK, reservation=reservation, limit=self._limit())
        await send_message(stream, answer)
        await stream.close()
        log.info("%s made a relay reservation here", stream.peer)

    async def _connect(self, stream: Stream, target: str) -> None:
        now = trio.current_time()
        address = _counted(stream.connection)
        if not self._requests.take(address, now):
            await self._answer(stream, Status.RESOURCE_LIMIT_EXCEEDED)
            return
        self._drop_lost(now)
        connection = self._host.connection(target)
        if target not in self._reserved or connection is None or connection.relayed:
            await self._answer(stream, Status.NO_RESERVATION)
            return
        circuit = _Circuit(stream.peer, address, target)
        if not self._has_room(circuit):
            await self._answer(stream, Status.RESOURCE_LIMIT_EXCEEDED)
            return
        self._circuits.append(circuit)
        try:
            await self._open_and_relay(stream, connection)
        finally:
            self._circuits.remove(circuit)

    async def _open_and_relay(self, stream: Stream, connection: Connection) -> None:
        """Open a stream to the target and relay between it and the asker's until the circuit ends.

        The target's is reset whatever happens, also when this is cancelled: else the target would keep a circuit that
        no longer counts here.
        """
        onward: Stream | None = None
        try:
            try:
                with trio.fail_after(_ASK_TIMEOUT_S):
                    onward = await connection.open_stream(STOP)
                    await send_message(onward, StopMessage(StopType.CONNECT, stream.peer, self._limit()))
                    answer = await receive_message(onward, StopMessage)
                if answer.type is not StopType.STATUS or answer.status is not Status.OK:
                    raise Refused(f"{connection.peer} did not accept it")
            except (P2PError, trio.TooSlowError) as error:
                log.debug("a circuit was not opened: %s", error)
                await self._answer(stream, Status.CONNECTION_FAILED)
                return
            await send_message(stream, HopMessage(HopType.STATUS, status=Status.OK, limit=self._limit()))
            log.info("relaying between %s and %s", stream.peer, connection.peer)
            await self._relay(stream, onward)
            await stream.reset()
        finally:
            if onward is not None:
                await onward.reset()

    async def _relay(self, one: Stream, other: Stream) -> None:
        """Copy bytes in both directions until one side ends or a limit is reached."""
        left = [self._limits.circuit_bytes]
        with trio.move_on_after(self._limits.circuit_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, one, other, left, nursery.cancel_scope)
                nursery.start_soon(self._pump, other, one, left, nursery.cancel_scope)

    async def _pump(self, source: Stream, sink: Stream, left: list[int], scope: trio.CancelScope) -> None:
        try:
            while data := await source.read(_PIECE_BYTES):
                left[0] -= len(data)
                if left[0] < 0:
                    log.info("closing a circuit that reached its limit of %d bytes", self._limits.circuit_bytes)
                    break
                await self._pace(len(data))
                await sink.write(data)
        except P2PError as error:
            log.debug("a circuit ended: %s", error)
        scope.cancel()

    async def _pace(self, count: int) -> None:
        now = trio.current_time()
        self.carried_bytes += count
        # Up to 0.25 s of unused rate is saved up for bursts; beyond that all circuits wait for the shared rate.
        self._budget_at = max(self._budget_at, now - 0.25) + count / self._limits.bytes_per_s
        if self._budget_at > now:
            await trio.sleep(self._budget_at - now)

    def _has_room(self, circuit: _Circuit) -> bool:
        """True if one more circuit like this one is within the limits."""
        limits = self._limits
        of_address = [one for one in self._circuits if one.address == circuit.address]
        to_target = [one for one in self._circuits if one.target == circuit.target]
        return (
            len(self._circuits) < limits.circuits
            and sum(one.peer == circuit.peer for one in self._circuits) < limits.circuits_per_peer
            and len(of_address) < limits.circuits_per_address
            and len(to_target) < limits.circuits_to_peer
            and sum(one.target == circuit.target for one in of_address) < limits.circuits_to_peer_per_address
        )

    def _has_place(self, connection: Connection) -> bool:
        """True if a place is free for a new peer, and peers from its address do not have too many already."""
        address = _counted(connection)
        held = [self._host.connection(peer) for peer in self._reserved]
        alike = sum(other is not None and _counted(other) == address for other in held)
        return len(held) < self._limits.reservations and alike < self._limits.reservations_per_address

    def _drop_lost(self, now: float) -> None:
        for peer, until in list(self._reserved.items()):
            if until <= now or self._host.connection(peer) is None:
                del self._reserved[peer]

    def _limit(self) -> Limit:
        return Limit(int(self._limits.circuit_s), self._limits.circuit_bytes)

    @staticmethod
    async def _answer(stream: Stream, status: Status) -> None:
        await send_message(stream, HopMessage(HopType.STATUS, status=status))
        await stream.close()


def _counted(connection: Connection) -> IPAddress | None:
    return None if connection.ip is None else source_of(connection.ip)
