"""Is the peer alive, how far away is it, and what does it say about itself: one small stream per connection.

`/shoal/1/link` is opened by whoever dialled. Each frame is a kind (1 byte), a length (2 bytes, at most 4096) and a
body. `HELLO` (JSON: `version`, `addresses`, `observed`, `relay`) is sent first by both sides and again when it
changes. The dialling side sends `PING` (a number and its last round trip in microseconds, 4 bytes each) every five
seconds, the other side answers `PONG` with the same body; so both know the round trip for the price of one exchange.
A side that hears nothing for fifteen seconds closes the raw socket, which also frees whoever was writing to it.
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
_SECOND_LOOK_S = 1.0
_VERSION = 1
_HEADER = struct.Struct("!BH")
_PING = struct.Struct("!II")
_KIND_HELLO, _KIND_PING, _KIND_PONG = 1, 2, 3
_RTT_MEMORY = 0.75
_BURST_FRAMES = 256  # a side that says more than this at once ...
_FRAMES_PER_S = 64  # ... and this much ever after only means to keep the other one busy

log = logging.getLogger("shoal.p2p.heartbeat")


@dataclass(frozen=True)
class Hello:
    """What a node says about itself and about the other side."""

    addresses: tuple[Address, ...] = ()
    observed: Address | None = None  # where the other side is seen from here
    relay: bool = False  # whether this node relays for others

    def encode(self) -> bytes:
        """The body of a HELLO frame."""
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
        """Read a HELLO of `peer`; unknown fields are ignored, anything malformed raises `ProtocolError`."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError(f"{peer} sent a hello that is not JSON") from None
        if not isinstance(fields, dict) or fields.get("version") != _VERSION:
            raise ProtocolError(f"{peer} speaks another version of {PROTOCOL}")
        addresses, observed = fields.get("addresses", []), fields.get("observed", "")
        if not isinstance(addresses, list) or not all(isinstance(text, str) for text in addresses):
            raise ProtocolError(f"{peer} sent a hello whose addresses are not a list of texts")
        seen = parse_known([observed]) if isinstance(observed, str) else []
        return cls(tuple(parse_known(addresses, peer)), seen[0] if seen else None, fields.get("relay") is True)


class Heartbeat:
    """Runs the link stream of every connection; plug `dialled` and `accepted` into a host."""

    def __init__(
        self,
        hello: Callable[[Connection], Hello],
        heard: Callable[[Connection, Hello], None],
        period_s: float = PERIOD_S,
    ) -> None:
        self._hello = hello
        self._heard = heard
        self._period_s = period_s
        self._silence_s = SILENCE_S * period_s / PERIOD_S
        self._linked: dict[Connection, Stream] = {}
        self._pings: dict[Connection, tuple[int, float]] = {}

    async def accompany(self, connection: Connection) -> None:
        """The companion of a connection: ping it if this side dialled, else see to it that the other side does."""
        if connection.initiated:
            try:
                stream = await connection.open_stream(PROTOCOL)
            except P2PError as error:
                log.debug("%s has no heartbeat (%s); the kernel's timeout watches it", connection.peer, error)
                return
            await self._run(stream, pinging=True)
        else:
            await self._wait_for_link(connection)

    async def accepted(self, stream: Stream) -> None:
        """The handler of `/shoal/1/link`."""
        if stream.connection.initiated or stream.connection in self._linked:
            raise ProtocolError(f"{stream.peer} opened a second link stream")
        await self._run(stream, pinging=False)

    async def say_hello(self) -> None:
        """Tell every peer again what this node says about itself, because it changed."""
        for connection, stream in list(self._linked.items()):
            with trio.move_on_after(_SECOND_LOOK_S):
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
                    # The peer ends this stream only together with the connection.
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
            flood.count(trio.current_time())
            if kind == _KIND_HELLO:
                self._heard(connection, Hello.decode(body, stream.peer))
            elif kind == _KIND_PING and not connection.initiated and len(body) == _PING.size:
                rtt_us = _PING.unpack(body)[1]
                if rtt_us:
                    connection.rtt_s = rtt_us / 1e6
                await _send(stream, _KIND_PONG, body)
            elif kind == _KIND_PONG and connection.initiated and len(body) == _PING.size:
                self._pong(connection, _PING.unpack(body)[0])
            else:
                raise ProtocolError(f"{stream.peer} sent frame kind {kind} of {len(body)} bytes on its link stream")

    async def _next_frame(self, stream: Stream, received: bytearray) -> tuple[int, bytes]:
        silent_for_s = 0.0
        while True:
            frame = _take_frame(received, stream.peer)
            if frame is not None:
                return frame
            # The second look forgives a pause of this process itself, after which the bytes are already here.
            patience_s = _SECOND_LOOK_S if silent_for_s else self._silence_s - _SECOND_LOOK_S
            with trio.move_on_after(patience_s) as scope:
                chunk = await read_some(stream, _HEADER.size + MAX_BODY_BYTES)
                if not chunk:
                    raise StreamClosed(f"{stream.peer} ended its link stream")
                received += chunk
                silent_for_s = 0.0
            if scope.cancelled_caught:
                if silent_for_s:
                    raise StreamClosed(f"{stream.peer} was silent for {self._silence_s:.0f} s")
                silent_for_s = patience_s

    async def _ping(self, stream: Stream) -> None:
        number = 0
        connection = stream.connection
        try:
            while True:
                number = (number + 1) & 0xFFFFFFFF
                self._pings[connection] = (number, trio.current_time())
                rtt_us = min(int((connection.rtt_s or 0) * 1e6), 0xFFFFFFFF)
                await _send(stream, _KIND_PING, _PING.pack(number, rtt_us))
                # The second one comes soon, so that the other side learns the round trip too.
                await trio.sleep(self._period_s if number > 1 else self._period_s / 10)
        except StreamClosed as error:
            log.debug("pinging %s: %s", stream.peer, error)  # the reading side ends the connection
        finally:
            self._pings.pop(connection, None)

    def _pong(self, connection: Connection, number: int) -> None:
        sent_number, sent_at = self._pings.get(connection, (-1, 0.0))
        if number != sent_number:
            return
        sample_s = trio.current_time() - sent_at
        known_s = connection.rtt_s
        # A faster answer is believed at once, a slower one by and by: queueing here is not distance.
        slower = known_s is not None and sample_s > known_s
        connection.rtt_s = known_s * _RTT_MEMORY + sample_s * (1 - _RTT_MEMORY) if slower and known_s else sample_s


async def _send(stream: Stream, kind: int, body: bytes) -> None:
    assert len(body) <= MAX_BODY_BYTES
    await stream.write(_HEADER.pack(kind, len(body)) + body)


def _take_frame(received: bytearray, peer: str) -> tuple[int, bytes] | None:
    """The first whole frame of `received`, taken out of it."""
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
