"""Replaces a relayed connection by a direct one: both sides dial each other at the same moment (libp2p's DCUtR).

The side that was dialled through the relay opens `/libp2p/dcutr` on that connection. Both sides send the public
addresses at which they are seen; after a SYNC both dial, each from the port it listens on, so that each NAT takes the
other's packets for answers. If the two dials meet in one TCP connection (simultaneous open), the side that had dialled
through the relay starts the handshake.

Both messages, CONNECT and SYNC, are protobuf: 1 `type` (100 CONNECT, 300 SYNC), 2 `ObsAddrs` (binary multiaddrs).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self
from weakref import WeakValueDictionary

import trio

from p2p import sockets as sockopts
from p2p.addresses import Address, BadAddress, IPAddress, Scope
from p2p.channel.raw import SocketConnection
from p2p.errors import P2PError, ProtocolError, Refused
from p2p.host.connection import Connection, Stream
from p2p.host.host import Host
from p2p.host.messages import address_bytes, address_from_bytes, receive_message, send_message
from p2p.protobuf import Fields, encode
from p2p.rate_limit import PeerRateLimit, TokenBucket

PROTOCOL = "/libp2p/dcutr"
ATTEMPTS = 3
_ANSWER_S = 8.0
_DIAL_S = 2.5
_RETRY_S = 0.05
_MAX_ADDRESSES = 6
# A peer chooses the addresses that are dialled, up to 50 times each: so with few peers at once, and not without end.
PUNCHES_AT_ONCE = 16
PUNCH_AGAIN_S = 30.0  # beyond `ATTEMPTS` of one peer
# For those who come through relays, all together: identities are free, and so are new circuits.
COMERS_AT_ONCE = 48
COMERS_AGAIN_S = 10.0
_LOOK_S = 1.0

log = logging.getLogger("shoal.p2p.holepunch")


class PunchType(IntEnum):
    """The two messages of hole punching."""

    CONNECT = 100
    SYNC = 300


@dataclass(frozen=True)
class HolePunch:
    """One message of hole punching, with the sender's public addresses in a CONNECT."""

    type: PunchType
    addresses: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """Return the message's bytes."""
        return encode((1, self.type), (2, self.addresses))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Parse a message; raises `ProtocolError` if it is malformed or of another type."""
        fields = Fields(body)
        return cls(fields.type(1, PunchType, "a hole punching message"), tuple(fields.repeated(2)[:_MAX_ADDRESSES]))


class HolePuncher:
    """Punches holes for the relayed connections of a host."""

    def __init__(self, host: Host, seen_at: Callable[[], Sequence[Address]]) -> None:
        self._host = host
        self._seen_at = seen_at
        self._busy: set[str] = set()
        self._tries = PeerRateLimit(ATTEMPTS, 1 / PUNCH_AGAIN_S)  # whichever side dialled through the relay
        self._comers = TokenBucket(1 / COMERS_AGAIN_S, COMERS_AT_ONCE, 0.0)
        # Who comes through a relay waits for those who came through it before; the first of all relays take turns.
        self._queues: WeakValueDictionary[IPAddress | None, trio.Lock] = WeakValueDictionary()
        self._first = trio.Lock()
        host.handle(PROTOCOL, self._serve)

    async def accompany(self, connection: Connection) -> None:
        """Run beside a connection: if it was accepted through a relay, try up to `ATTEMPTS` times to make it direct."""
        if not connection.relayed or connection.initiated:
            return
        for attempt in range(ATTEMPTS):
            while not self._tries.take(connection.peer, trio.current_time()):  # noqa: ASYNC110 - only time ends this
                await trio.sleep(PUNCH_AGAIN_S)
            async with self._queues.setdefault(connection.ip, trio.Lock()), self._first:
                if not await self._turn(connection):
                    return
            try:
                if await self._initiate(connection):
                    return
            except (P2PError, trio.TooSlowError) as error:
                log.debug("hole punching towards %s: %s", connection.peer, error)
            await trio.sleep(0.5 * 2**attempt)

    async def _turn(self, connection: Connection) -> bool:
        """Wait until those who come may try again; False if this connection has no need of it any more."""
        while connection.is_open and not self._has_direct(connection.peer):
            if self._comers.take(trio.current_time()):
                return True
            await trio.sleep(_LOOK_S)
        return False

    async def _initiate(self, connection: Connection) -> bool:
        stream = await connection.open_stream(PROTOCOL)
        try:
            with trio.fail_after(_ANSWER_S):
                asked_at = trio.current_time()
                await send_message(stream, self._connect_message())
                theirs = _addresses(await receive_message(stream, HolePunch))
                round_trip_s = trio.current_time() - asked_at
                await send_message(stream, HolePunch(PunchType.SYNC))
            await trio.sleep(round_trip_s / 2)
            return await self._punch(connection.peer, theirs, initiator=False)
        finally:
            await stream.reset()

    async def _serve(self, stream: Stream) -> None:
        if not stream.connection.relayed or not stream.connection.initiated:
            raise ProtocolError(f"{stream.peer} asked for hole punching on a connection not dialled through a relay")
        if not self._tries.take(stream.peer, trio.current_time()):
            raise Refused(f"{stream.peer} asks for hole punching too often")
        with trio.fail_after(_ANSWER_S):
            theirs = _addresses(await receive_message(stream, HolePunch))
            await send_message(stream, self._connect_message())
            sync = await receive_message(stream, HolePunch)
        if sync.type is not PunchType.SYNC:
            raise ProtocolError(f"{stream.peer} sent no SYNC for hole punching")
        await self._punch(stream.peer, theirs, initiator=True)

    def _connect_message(self) -> HolePunch:
        seen = [address_bytes(address.of(None)) for address in self._seen_at()]
        return HolePunch(PunchType.CONNECT, tuple(seen[:_MAX_ADDRESSES]))

    async def _punch(self, peer: str, theirs: Sequence[Address], *, initiator: bool) -> bool:
        """Dial all addresses in parallel from the listening port, repeatedly for `_DIAL_S`; True if one succeeds."""
        deny = self._host.admission.deny
        theirs = [address for address in theirs if address.ip is not None and not deny.denies_ip(address.ip)]
        if peer in self._busy or len(self._busy) >= PUNCHES_AT_ONCE or not theirs:
            return False
        self._busy.add(peer)
        try:
            with trio.move_on_after(_DIAL_S + self._host.admission.limits.handshake_timeout_s):
                async with trio.open_nursery() as nursery:
                    for address in theirs:
                        nursery.start_soon(self._dial, address, peer, initiator, nursery.cancel_scope)
        finally:
            self._busy.discard(peer)
        if self._has_direct(peer):
            log.info("direct connection to %s after hole punching", peer)
            return True
        return False

    async def _dial(self, address: Address, peer: str, initiator: bool, won: trio.CancelScope) -> None:
        source = next((own.port for own in self._host.listening if own.kind == address.kind), None)
        give_up_at = trio.current_time() + _DIAL_S
        while trio.current_time() < give_up_at and not self._has_direct(peer):
            try:
                with trio.fail_at(give_up_at):
                    stream = await sockopts.connect(address.host, address.port, source)
            except (OSError, trio.TooSlowError):
                await trio.sleep(_RETRY_S)  # a refusal only means that the other side has not dialled yet
                continue
            try:
                await self._secure(stream, address, peer, initiator)
            except (P2PError, OSError, trio.TooSlowError) as error:
                sockopts.abort(stream.socket)
                log.debug("a punched connection to %s failed: %s", peer, error)
                await trio.sleep(_RETRY_S)  # whoever answers there need not be the peer, and did not ask for dials
                continue
            except BaseException:
                sockopts.abort(stream.socket)
                raise
            if self._has_direct(peer):
                won.cancel()
            return

    async def _secure(self, stream: trio.SocketStream, address: Address, peer: str, initiator: bool) -> None:
        """Let the host adopt a punched connection; one to a peer that came through a relay counts as accepted."""
        raw = SocketConnection(stream, is_initiator=initiator)
        if initiator:
            await self._host.adopt(raw, address.of(peer), peer)
            return
        admission, ip = self._host.admission, address.ip
        assert ip is not None, "only IP addresses are dialled"
        refusal = admission.begin_handshake(ip, trio.current_time())
        if refusal is not None:
            raise Refused(f"a punched connection from {ip} is refused: {refusal}")
        try:
            await self._host.adopt(raw, address.of(peer), None)
        finally:
            admission.end_handshake(ip)

    def _has_direct(self, peer: str) -> bool:
        connection = self._host.connection(peer)
        return connection is not None and not connection.relayed


def _addresses(message: HolePunch) -> list[Address]:
    if message.type is not PunchType.CONNECT:
        raise ProtocolError("a hole punching message is not of type CONNECT")
    found = []
    for data in message.addresses:
        try:
            address = address_from_bytes(data)
        except BadAddress:
            continue
        # Public addresses only: a peer must not make this node dial hosts of its own LAN.
        if address.scope is Scope.PUBLIC and address.ip is not None and address.port:
            found.append(address)
    return found
