"""The heartbeat of a connection: liveness, round-trip time, and each side's addresses, on the stream `/shoal/1/link`.

The dialling side opens the stream. Each frame is a kind (1 byte), a length (2 bytes, big-endian, at most 4096) and a
body. Both sides send `HELLO` (JSON: `version`, `addresses`, `observed`, `relay`) first and again when it changes. The
dialling side sends `PING` (a number and its last round trip in microseconds, 4 bytes each) every 5 s, and the other
side answers `PONG` with the same body. That round trip is only a claim, so the accepting side ignores it and measures
its own with the multiplexer's ping, which every version and every libp2p node answers. A side that receives nothing on
the whole connection for 15 s closes the raw socket, which also ends writes that are blocked on it. What the hello leads
to is up to the caller (`p2p.network`, `p2p.nat.traversal`).
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from p2p.addresses import MAX_ADDRESSES_PER_PEER, Address, parse_known
from p2p.channel.multistream import read_some
from p2p.errors import P2PError, ProtocolError, StreamClosed
from p2p.host.connection import Connection, Stream
from p2p.rate_limit import FloodGuard

PROTOCOL = "/shoal/1/link"
PERIOD_S = 5.0
SILENCE_S = 15.0
IDLE_S = 30.0
MAX_BODY_BYTES = 4096
_LAST_WAIT_S = 1.0
_HELLO_TIMEOUT_S = 1.0
_VERSION = 1
_HEADER = struct.Struct("!BH")
_PING = struct.Struct("!II")
_KIND_HELLO, _KIND_PING, _KIND_PONG = 1, 2, 3
_RTT_WEIGHT = 0.75
# A peer that sends more than this is flooding; an honest one sends a few frames in 5 s.
_BURST_FRAMES = 256
_FRAMES_PER_S = 64
_HELLO_FRAMES = 16  # that a hello counts as: its addresses take milliseconds to read, and change rarely

log = logging.getLogger("shoal.p2p.heartbeat")


@dataclass(frozen=True)
class Hello:
    """A node's own addresses, the address at which it sees the other side, and whether it relays."""

    addresses: tuple[Address, ...] = ()
    observed: Address | None = None  # where this side sees the receiver
    relay: bool = False  # this node relays for others

    def encode(self) -> bytes:
        """Return the body of a HELLO frame."""
        fields: dict[str, Any] = {
            "version": _VERSION,
            "addresses": [str(address) for address in self.addresses[:MAX_ADDRESSES_PER_PEER]],
            "relay": self.relay,
        }
        if self.observed is not None:
            fields["observed"] = str(self.observed)
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, body: bytes, peer: str) -> Hello:
        """Parse a HELLO body sent by `peer`, ignoring unknown fields; raises `ProtocolError` if it is malformed."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError(f"{peer} sent a hello that is not JSON") from None
        if not isinstance(fields, dict) or fields.get("version") != _VERSION:
            raise ProtocolError(f"{peer} sent a hello of an unsupported version of {PROTOCOL}")
        addresses, observed = fields.get("addresses", []), fields.get("observed", "")
        if not isinstance(addresses, list) or not all(isinstance(text, str) for text in addresses):
            raise ProtocolError(f"{peer} sent a hello whose addresses are not a list of strings")
        seen = parse_known([observed]) if isinstance(observed, str) else []
        known = parse_known(addresses[:MAX_ADDRESSES_PER_PEER], peer)
        return cls(tuple(known), seen[0] if seen else None, fields.get("relay") is True)


class Heartbeat:
    """Runs the heartbeat of every connection; calls `on_other` for each peer that was dialled and speaks none.

    Register `accompany` as a companion and `accepted` as the handler of `PROTOCOL` with a host.
    """

    def __init__(
        self,
        hello: Callable[[Connection], Hello],
        on_hello: Callable[[Connection, Hello], None],
        on_other: Callable[[str], None] = lambda peer: None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._hello = hello
        self._on_hello = on_hello
        self._on_other = on_other
        self._period_s = period_s
        self._silence_s = SILENCE_S * period_s / PERIOD_S
        self._linked: dict[Connection, Stream] = {}
        self._pings: dict[Connection, tuple[int, float]] = {}

    async def accompany(self, connection: Connection) -> None:
        """Run beside a connection: ping it, and close it if it was accepted and is idle without a heartbeat."""
        if connection.initiated:
            try:
                stream = await connection.open_stream(PROTOCOL)
            except P2PError as error:
                log.debug(
                    "%s has no heartbeat (%s); only the TCP timeout will detect its loss",
                    connection.peer,
                    error,
                )
                if connection.is_open:
                    self._on_other(connection.peer)
                return
            await self._run(stream, pinging=True)
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._measure, connection)
                await self._wait_for_link(connection)

    async def accepted(self, stream: Stream) -> None:
        """Handle an inbound `/shoal/1/link` stream; raises `ProtocolError` for a second one on a connection."""
        if stream.connection.initiated or stream.connection in self._linked:
            raise ProtocolError(f"{stream.peer} opened a second link stream")
        await self._run(stream, pinging=False)

    def is_linked(self, peer: str) -> bool:
        """True if a connection to `peer` has a heartbeat, which only Shoal nodes have."""
        return any(connection.peer == peer for connection in self._linked)

    async def say_hello(self) -> None:
        """Send a new HELLO to every peer, because this node's addresses or its relay offer changed."""
        async with trio.open_nursery() as nursery:
            for connection, stream in self._linked.items():
                nursery.start_soon(self._say_hello, connection, stream)

    async def _say_hello(self, connection: Connection, stream: Stream) -> None:
        with trio.move_on_after(_HELLO_TIMEOUT_S):
            try:
                await _send(stream, _KIND_HELLO, self._hello(connection).encode())
            except StreamClosed as error:
                log.debug("%s", error)

    async def _wait_for_link(self, connection: Connection) -> None:
        while True:
            await trio.sleep(IDLE_S)
            if connection not in self._linked and not connection.inbound_streams:
                connection.abort("it was idle and sent no heartbeat")

    async def _run(self, stream: Stream, *, pinging: bool) -> None:
        connection = stream.connection
        self._linked[connection] = stream
        try:
            async with trio.open_nursery() as nursery:
                if pinging:
                    nursery.start_soon(self._ping, stream)
                try:
                    await _send(stream, _KIND_HELLO, self._hello(connection).encode())
                    await self._listen(stream)
                except P2PError as error:
                    # A peer ends this stream only together with the connection.
                    connection.abort(str(error))
                nursery.cancel_scope.cancel()
        finally:
            self._linked.pop(connection, None)

    async def _listen(self, stream: Stream) -> None:
        connection = stream.connection
        received = bytearray()
        flood = FloodGuard(_BURST_FRAMES, _FRAMES_PER_S, trio.current_time())
        while True:
            kind, body = await self._next_frame(stream, received)
            flood.count(trio.current_time(), _HELLO_FRAMES if kind == _KIND_HELLO else 1)
            if kind == _KIND_HELLO:
                await connection.in_turn(self._hear, connection, body)
            elif kind == _KIND_PING and not connection.initiated and len(body) == _PING.size:
                await _send(stream, _KIND_PONG, body)
            elif kind == _KIND_PONG and connection.initiated and len(body) == _PING.size:
                self._pong(connection, _PING.unpack(body)[0])
            else:
                raise ProtocolError(f"{stream.peer} sent frame kind {kind} of {len(body)} bytes on its link stream")
            await trio.lowlevel.checkpoint()  # frames that came together are read as if one after another

    async def _hear(self, connection: Connection, body: bytes) -> None:
        self._on_hello(connection, Hello.decode(body, connection.peer))

    async def _next_frame(self, stream: Stream, received: bytearray) -> tuple[int, bytes]:
        connection, is_last_wait = stream.connection, False
        while (frame := _take_frame(received, stream.peer)) is None:
            # Any byte counts: on a slow link those of this stream wait behind many others.
            heard_at = connection.heard_at
            until = trio.current_time() + _LAST_WAIT_S if is_last_wait else heard_at + self._silence_s - _LAST_WAIT_S
            with trio.move_on_at(until) as scope:
                chunk = await read_some(stream, _HEADER.size + MAX_BODY_BYTES)
                if not chunk:
                    raise StreamClosed(f"{stream.peer} ended its link stream")
                received += chunk
            is_silent = scope.cancelled_caught and connection.heard_at == heard_at
            if is_silent and is_last_wait:
                raise StreamClosed(f"{stream.peer} was silent for {self._silence_s:.0f} s")
            # If this process itself was suspended, the bytes are already here: the last second's wait then finds them.
            is_last_wait = is_silent
        return frame

    async def _ping(self, stream: Stream) -> None:
        number = 0
        connection = stream.connection
        try:
            while True:
                number = (number + 1) & 0xFFFFFFFF
                self._pings[connection] = (number, trio.current_time())
                rtt_us = min(int((connection.rtt_s or 0) * 1e6), 0xFFFFFFFF)
                await _send(stream, _KIND_PING, _PING.pack(number, rtt_us))
                # The second ping follows soon, because older nodes learn the first round trip from it.
                await trio.sleep(self._period_s if number > 1 else self._period_s / 10)
        except StreamClosed as error:
            log.debug("pinging %s: %s", stream.peer, error)  # the task that reads ends the connection
        finally:
            self._pings.pop(connection, None)

    def _pong(self, connection: Connection, number: int) -> None:
        sent_number, sent_at = self._pings.get(connection, (-1, 0.0))
        if number != sent_number:
            return
        _note_rtt(connection, trio.current_time() - sent_at)

    async def _measure(self, connection: Connection) -> None:
        """Measure the round trip of an accepted connection, by this node's own clock, until the connection ends."""
        while connection.is_open:
            with trio.move_on_after(self._silence_s):
                try:
                    _note_rtt(connection, await connection.ping())
                except P2PError as error:
                    log.debug("pinging %s: %s", connection.peer, error)
                    return
            await trio.sleep(self._period_s)


def _note_rtt(connection: Connection, sample_s: float) -> None:
    """Take a round trip: a lower one counts at once, a higher one in part, as it may be queueing, not distance."""
    known_s = connection.rtt_s
    slower = known_s is not None and sample_s > known_s
    connection.rtt_s = known_s * _RTT_WEIGHT + sample_s * (1 - _RTT_WEIGHT) if slower and known_s else sample_s


async def _send(stream: Stream, kind: int, body: bytes) -> None:
    assert len(body) <= MAX_BODY_BYTES
    await stream.write(_HEADER.pack(kind, len(body)) + body)


def _take_frame(received: bytearray, peer: str) -> tuple[int, bytes] | None:
    """Remove the first complete frame from `received` and return (kind, body); None if there is none yet."""
    if len(received) < _HEADER.size:
        return None
    kind, length = _HEADER.unpack_from(received)
    if length > MAX_BODY_BYTES:
        raise ProtocolError(f"{peer} announced a link frame of {length} bytes")
    end = _HEADER.size + length
    if len(received) < end:
        return None
    body = bytes(received[_HEADER.size : end])
    del received[:end]
    return kind, body
