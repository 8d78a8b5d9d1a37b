"""multistream-select 1.0.0 with bounds: two sides agree on the protocol that follows on a byte stream.

Each message is a varint length and a line that ends in a newline. The initiator sends the greeting and its first
proposal in one write, so that an accepted proposal costs a single round trip. The length and number of lines are
bounded, since the peer is not authenticated yet.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from p2p.errors import P2PError, ProtocolError, Refused, StreamClosed
from p2p.protobuf import varint

GREETING = "/multistream/1.0.0"
NOT_AVAILABLE = "na"
MAX_LINE_BYTES = 256
MAX_PROPOSALS = 16


class NegotiationStream(Protocol):
    """A stream to negotiate on: `read` returns at most `n` bytes, and b"" at the end."""

    async def read(self, n: int | None = None) -> bytes: ...
    async def write(self, data: bytes) -> None: ...


async def propose(stream: NegotiationStream, protocols: Sequence[str]) -> str:
    """Offer `protocols` in turn and return the one that the peer accepts; raises `Refused` if it accepts none."""
    await _write(stream, _line(GREETING) + _line(protocols[0]))
    await _expect_greeting(stream)
    for index, protocol in enumerate(protocols):
        if index:
            await _write(stream, _line(protocol))
        answer = await _read_line(stream)
        if answer == protocol:
            return protocol
        if answer != NOT_AVAILABLE:
            raise ProtocolError(f"the peer answered {answer!r} to the proposal of {protocol!r}")
    raise Refused(f"the peer supports none of {', '.join(protocols)}; it may run another version")


async def choose(stream: NegotiationStream, supported: Container[str]) -> str:
    """Answer the peer's proposals and return the first supported one; raises `ProtocolError` after 16 others."""
    await _write(stream, _line(GREETING))
    await _expect_greeting(stream)
    for _ in range(MAX_PROPOSALS):
        proposal = await _read_line(stream)
        if proposal in supported:
            await _write(stream, _line(proposal))
            return proposal
        await _write(stream, _line(NOT_AVAILABLE))
    raise ProtocolError(f"the peer proposed {MAX_PROPOSALS} protocols, none of which this node supports")


async def read_exactly(stream: NegotiationStream, count: int) -> bytes:
    """Read exactly `count` bytes; raises `StreamClosed` if the stream ends first."""
    parts = bytearray()
    while len(parts) < count:
        chunk = await read_some(stream, count - len(parts))
        if not chunk:
            raise StreamClosed(f"the stream ended {count - len(parts)} bytes too early")
        parts += chunk
    return bytes(parts)


async def read_some(stream: NegotiationStream, limit: int) -> bytes:
    """Read 1 to `limit` bytes, or b"" at the end; any error of libp2p is raised as `StreamClosed`."""
    try:
        return await stream.read(limit)
    except P2PError:
        raise
    except Exception as error:
        # Each multiplexer has its own exceptions for a broken stream.
        raise StreamClosed(f"the stream broke while reading ({type(error).__name__})") from error


async def _write(stream: NegotiationStream, data: bytes) -> None:
    try:
        await stream.write(data)
    except P2PError:
        raise
    except Exception as error:
        raise StreamClosed(f"the stream broke while writing ({type(error).__name__})") from error


def _line(text: str) -> bytes:
    data = text.encode() + b"\n"
    assert len(data) <= MAX_LINE_BYTES, text
    return varint(len(data)) + data


async def _expect_greeting(stream: NegotiationStream) -> None:
    greeting = await _read_line(stream)
    if greeting != GREETING:
        raise ProtocolError(f"the peer greeted with {greeting[:40]!r}; it does not speak libp2p")


async def _read_line(stream: NegotiationStream) -> str:
    length = (await read_exactly(stream, 1))[0]
    if length >= 128:
        length = (length & 127) | (await read_exactly(stream, 1))[0] << 7
    if not 0 < length <= MAX_LINE_BYTES:
        raise ProtocolError(f"the peer announced a line of {length} bytes; at most {MAX_LINE_BYTES} are allowed")
    line = await read_exactly(stream, length)
    if line[-1:] != b"\n":
        raise ProtocolError("the peer's line does not end in a newline")
    try:
        return line[:-1].decode()
    except UnicodeDecodeError:
        raise ProtocolError("the peer's line is not text") from None
