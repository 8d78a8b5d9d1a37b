"""The yamux wire format: bytes in, frames out. Streams and windows are in `yamux_flow` and `yamux`.

Every frame starts with twelve bytes, big-endian: version (0), kind, flags (16 bits), stream id (32), length (32).

| kind | length means | |
|---|---|---|
| 0 DATA | bytes of body that follow | spends the receiver's window of that stream |
| 1 WINDOW_UPDATE | bytes of credit granted | carries SYN, ACK, FIN and RST where there is no body |
| 2 PING | an opaque number | SYN asks, ACK answers with the same number |
| 3 GO_AWAY | a reason code | the sender closes the connection |

A body is returned in the pieces in which it arrives, so a peer that announces much and sends little costs no memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from p2p.errors import ProtocolError

HEADER_BYTES: Final = 12
BASE_WINDOW_BYTES: Final = 256 << 10  # the credit of every stream at its start, by the protocol
MAX_BODY_BYTES: Final = 16 << 20  # this node grants no larger window, so no honest body is larger

_HEADER = struct.Struct("!BBHII")
_ALL_FLAGS = 0xF


class YamuxKind(IntEnum):
    """The kind of a frame."""

    DATA = 0
    WINDOW_UPDATE = 1
    PING = 2
    GO_AWAY = 3


class Flag(IntFlag):
    """The flags of a frame: opening, acknowledging, closing or resetting its stream."""

    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


# Plain integers for the hot path: an enum member costs a microsecond wherever two flags are combined.
DATA, WINDOW_UPDATE, PING, GO_AWAY = (int(kind) for kind in YamuxKind)
SYN, ACK, FIN, RST = (int(flag) for flag in Flag)


class YamuxFrame(NamedTuple):
    """One frame, or one piece of a DATA frame: `length` is the whole announced length on the first piece, then 0."""

    kind: int
    flags: int
    stream_id: int
    length: int
    body: bytes


def pack_header(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """Return the twelve bytes of a frame's header."""
    return _HEADER.pack(0, kind, flags, stream_id, length)


class FrameParser:
    """Cuts a byte stream into frames; keeps at most one partial header between calls."""

    __slots__ = ("_announced", "_first_flags", "_last_flags", "_left", "_partial", "_stream_id")

    def __init__(self) -> None:
        self._partial = b""
        self._left = 0  # bytes of the current body still to come
        self._announced = 0
        self._first_flags = 0
        self._last_flags = 0
        self._stream_id = 0

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[YamuxFrame]:
        """Yield the frames that `data` completes or continues; raises `ProtocolError` at an invalid header.

        Exhaust the iterator before the next call. Frames are parsed one by one, so that the caller can let other tasks
        run between thousands of tiny ones.
        """
        view = memoryview(data)
        offset, size = 0, len(view)
        if self._partial:
            offset = min(HEADER_BYTES - len(self._partial), size)
            self._partial += bytes(view[:offset])
            if len(self._partial) < HEADER_BYTES:
                return
            header, self._partial = self._partial, b""
            if frame := self._begin(header, 0):
                yield frame
        while True:
            if self._left:
                if offset >= size:
                    return
                stop = min(offset + self._left, size)
                yield self._continue(bytes(view[offset:stop]))
                offset = stop
            elif size - offset < HEADER_BYTES:
                self._partial = bytes(view[offset:])
                return
            else:
                frame = self._begin(view, offset)
                offset += HEADER_BYTES
                if frame is not None:
                    yield frame

    def _begin(self, buffer: bytes | memoryview, offset: int) -> YamuxFrame | None:
        """Parse a header; returns the frame if it has no body, else None, and its body is expected next."""
        version, kind, flags, stream_id, length = _HEADER.unpack_from(buffer, offset)
        if version or kind > GO_AWAY or flags > _ALL_FLAGS:
            raise ProtocolError(f"sent an invalid yamux frame: version {version}, kind {kind}, flags {flags:#x}")
        if kind <= WINDOW_UPDATE and stream_id == 0:
            raise ProtocolError("sent a yamux stream frame for stream 0")
        if kind != DATA or length == 0:
            return YamuxFrame(kind, flags, stream_id, length, b"")
        if length > MAX_BODY_BYTES:
            raise ProtocolError(f"sent a yamux frame of {length} bytes; {MAX_BODY_BYTES} are allowed")
        self._left = self._announced = length
        self._stream_id = stream_id
        self._first_flags = flags & (SYN | ACK)
        self._last_flags = flags & (FIN | RST)
        return None

    def _continue(self, body: bytes) -> YamuxFrame:
        self._left -= len(body)
        flags = self._first_flags if self._left else self._first_flags | self._last_flags
        piece = YamuxFrame(DATA, flags, self._stream_id, self._announced, body)
        self._announced = self._first_flags = 0
        return piece
