"""The frame codec of a link: bytes in, frames out, no I/O. The docstring of `p2p` specifies the layout.

Every rule about a single frame is checked here, as soon as its header has arrived; `p2p.link.link` gives frames their
meaning for calls and streams. Whatever the bytes are, only `ProtocolError` is raised.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from p2p.errors import P2PError, ProtocolError, Refused, RemoteError
from p2p.values import MAX_BODY_BYTES, MAX_NAME_BYTES, Buffer, append_piece

MAJOR, MINOR = 1, 1
SMALL_CHUNKS = 1  # the minor version from which a peer accepts chunks of less than `CHUNK_BYTES`
MAGIC = b"shoal\0"
PREFACE = MAGIC + bytes((MAJOR, MINOR))
HEADER = struct.Struct(">BBHIIII")
CHUNK_BYTES = 256 * 1024
SMALLEST_CHUNK_BYTES = 16 * 1024  # but for the last one of a message
FIRST, LAST = 0x04, 0x08
WHOLE = FIRST | LAST
PRIORITY_MASK = 0x03
MAX_PARTIAL_MESSAGES = 256
MAX_TEXT_BYTES = 1024
OPTIONAL_KINDS = 128  # unknown kinds from this number on mean nothing, and break nothing


class Kind(IntEnum):
    """The kind of a frame, its first byte."""

    REQUEST = 1
    ANSWER = 2
    ERROR = 3
    CANCEL = 4
    OPEN = 5
    OPENED = 6
    MESSAGE = 7
    CREDIT = 8
    CLOSE = 9
    RESET = 10
    PING = 11
    PONG = 12
    SWITCH = 128


_KINDS = frozenset(int(kind) for kind in Kind)
_CHUNKED = frozenset((Kind.REQUEST, Kind.ANSWER, Kind.MESSAGE))
_NAMED = frozenset((Kind.REQUEST, Kind.ERROR, Kind.OPEN, Kind.RESET, Kind.SWITCH))
_TEXT_BYTES = {
    Kind.ERROR: MAX_TEXT_BYTES,
    Kind.RESET: MAX_TEXT_BYTES,
}  # bounds of bodies that must fit into one frame; the other kinds that are not chunked have no body


class Frame(NamedTuple):
    """One frame: `total` is the length of the whole message's body, `body` is this chunk of it.

    A large chunk that arrived in several reads is in `pieces` instead, so that it is copied only once, when its message
    is complete.
    """

    kind: int
    flags: int
    id: int
    total: int
    arg: int
    name: str
    body: bytes
    pieces: tuple[Buffer, ...] = ()

    @property
    def priority(self) -> int:
        """The priority, 0 (control) to 3 (bulk)."""
        return self.flags & PRIORITY_MASK


def encode_header(kind: int, flags: int, id: int, length: int, total: int, arg: int = 0, name: bytes = b"") -> bytes:
    """Return the header and the name, which come before a chunk's body."""
    return HEADER.pack(kind, flags, len(name), id, length, total, arg) + name


def encode(frame: Frame) -> bytes:
    """Return a frame's bytes, header and body."""
    name = frame.name.encode("ascii")
    header = encode_header(frame.kind, frame.flags, frame.id, len(frame.body), frame.total, frame.arg, name)
    return header + frame.body


class FrameDecoder:
    """Cuts a byte stream into frames; keeps at most one incomplete frame, in large pieces as they arrived."""

    def __init__(self) -> None:
        self._parts: list[Buffer] = []
        self._held = 0
        self._needed = len(PREFACE)
        self._greeted = False
        self.minor = 0  # the minor version that the peer speaks, once its first bytes have come

    @property
    def is_inside(self) -> bool:
        """True if a frame has begun and not ended."""
        return bool(self._held)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes; do not use the decoder after a `ProtocolError`."""
        if not self._greeted:
            data = b"".join((*self._parts, data))
            self._parts = []
            if not self._greet(data):
                return []
            data = data[len(PREFACE) :]
        frames: list[Frame] = []
        start, size = 0, len(data)
        while self._held:
            if (start := self._resume(data, start, frames)) >= size:
                return frames
        while True:
            end = _end_of_frame(data, start, size)
            if end > size:
                break
            frames.append(_parse(data, start, end))
            start = end
        self._parts = [_piece(data, start, size)] if start < size else []
        self._held, self._needed = size - start, end - start
        return frames

    def _resume(self, data: bytes, start: int, frames: list[Frame]) -> int:
        """Add the bytes of `data` from `start` to the incomplete frame; returns where its part of `data` ends."""
        stop = min(start + self._needed - self._held, len(data))
        append_piece(self._parts, _piece(data, start, stop))
        self._held += stop - start
        if self._held < self._needed:
            return stop
        if self._held == HEADER.size:  # the header is complete and gives the length of the frame
            self._parts = [b"".join(self._parts)]
            self._needed = _end_of_frame(self._parts[0], 0, HEADER.size)
            if self._needed > HEADER.size:
                return stop
        frames.append(_assemble(self._parts))
        self._parts, self._held = [], 0
        return stop

    def _greet(self, data: bytes) -> bool:
        size = min(len(data), len(MAGIC))
        if data[:size] != MAGIC[:size]:
            raise ProtocolError("the peer does not speak Shoal's link protocol")
        if len(data) > len(MAGIC) and data[len(MAGIC)] != MAJOR:
            raise ProtocolError(f"the peer speaks version {data[len(MAGIC)]} of the link protocol, this node {MAJOR}")
        self._greeted = len(data) >= len(PREFACE)
        if self._greeted:
            self.minor = data[len(PREFACE) - 1]
        else:
            self._parts = [data]
        return self._greeted


def _end_of_frame(data: Buffer, start: int, size: int) -> int:
    """Return the offset at which the frame at `start` ends, or its header if that is incomplete; checks the header."""
    if size - start < HEADER.size:
        return start + HEADER.size
    kind, flags, name_length, _, length, total, _ = HEADER.unpack_from(data, start)
    if length > CHUNK_BYTES or total > MAX_BODY_BYTES or length > total or name_length > MAX_NAME_BYTES:
        raise ProtocolError(f"a frame of kind {kind} declares {length} of {total} bytes, name {name_length}")
    if kind in _CHUNKED:
        _check_chunk(flags, length, total, name_length, kind)
    elif kind in _KINDS:
        if flags & WHOLE != WHOLE or length != total or length > _TEXT_BYTES.get(kind, 0):
            raise ProtocolError(f"a frame of kind {kind} must be whole and have no body beyond its text")
        if bool(name_length) != (kind in _NAMED):
            raise ProtocolError(f"a frame of kind {kind} has a name of {name_length} bytes")
    elif kind < OPTIONAL_KINDS:
        raise ProtocolError(f"unknown frame kind {kind}; the peer may run a newer version")
    return start + int(HEADER.size + name_length + length)


def _check_chunk(flags: int, length: int, total: int, name_length: int, kind: int) -> None:
    whole = flags & WHOLE == WHOLE
    # A bound for every chunk but the last, so that a message cannot be cut into millions of tiny frames.
    if (whole and length != total) or (not flags & LAST and length < SMALLEST_CHUNK_BYTES):
        raise ProtocolError(f"a chunk of {length} bytes of a message of {total} is cut wrongly")
    if bool(name_length) != (kind == Kind.REQUEST and bool(flags & FIRST)):
        raise ProtocolError(f"a chunk of kind {kind} has a name of {name_length} bytes")


def _piece(data: bytes, start: int, stop: int) -> Buffer:
    """Return a slice of `data`: a view if it is half of it or more, else a copy, which keeps less in memory."""
    return memoryview(data)[start:stop] if 2 * (stop - start) >= len(data) else data[start:stop]


def _assemble(parts: list[Buffer]) -> Frame:
    """Build a frame from its pieces; a chunk of a longer message stays in pieces and is joined with the others."""
    head = parts[0]
    _, flags, name_length, *_ = HEADER.unpack_from(head)
    body_at = HEADER.size + name_length
    if flags & WHOLE == WHOLE or len(head) < body_at:
        data = b"".join(parts)
        return _parse(data, 0, len(data))
    frame = _parse(bytes(head[:body_at]), 0, body_at)
    return frame._replace(pieces=(memoryview(head)[body_at:], *parts[1:]))


def _parse(data: bytes, start: int, end: int) -> Frame:
    kind, flags, name_length, id, _, total, arg = HEADER.unpack_from(data, start)
    body_at = start + HEADER.size + name_length
    name = ""
    if name_length:
        raw = data[body_at - name_length : body_at]
        if not raw.isascii() or not (name := raw.decode("ascii")).isprintable():
            raise ProtocolError("a frame's name is not printable ASCII")
    return Frame(kind, flags, id, total, arg, name, data[body_at:end])


def body_bytes(frame: Frame) -> int:
    """Return the number of body bytes in this frame."""
    return sum(len(piece) for piece in frame.pieces) if frame.pieces else len(frame.body)


class _Partial:
    __slots__ = ("chunks", "first", "received", "received_before")

    def __init__(self, first: Frame) -> None:
        self.first, self.received = first, 0
        self.received_before = -1  # at the last call of `Assembler.stalled`
        self.chunks: list[Buffer] = []

    def add(self, frame: Frame) -> None:
        self.chunks += frame.pieces or (frame.body,)
        self.received += body_bytes(frame)


class Assembler:
    """Joins the chunks of messages that interleave on one link; a message is identified by its id and priority."""

    def __init__(self) -> None:
        self._partials: dict[tuple[int, int], _Partial] = {}

    def __len__(self) -> int:
        return len(self._partials)

    def expects(self, frame: Frame) -> bool:
        """True if this chunk continues an unfinished message that was not dropped."""
        return (frame.id, frame.flags & PRIORITY_MASK) in self._partials

    def add(self, frame: Frame) -> Frame | None:
        """Add a chunk; returns the whole message as one frame if this chunk completes it.

        A later chunk of an unknown or dropped message is ignored: a refused sender may still be sending it. Raises
        `ProtocolError` if the chunks do not add up, or if too many messages are unfinished.
        """
        if frame.flags & WHOLE == WHOLE and not self._partials:
            return frame
        key = (frame.id, frame.flags & PRIORITY_MASK)
        partial = self._partials.get(key)
        if frame.flags & FIRST:
            if partial is not None:
                raise ProtocolError(f"message {frame.id} starts again before its end")
            if frame.flags & LAST:
                return frame
            if len(self._partials) >= MAX_PARTIAL_MESSAGES:
                raise ProtocolError(f"more than {MAX_PARTIAL_MESSAGES} messages are unfinished")
            partial = self._partials[key] = _Partial(frame)
            partial.add(frame)
            return None
        if partial is None:
            return None
        return self._extend(key, partial, frame)

    def drop(self, id: int) -> None:
        """Drop the chunks of unfinished messages with this id."""
        for key in [key for key in self._partials if key[0] == id]:
            del self._partials[key]

    def stalled(self) -> list[Frame]:
        """Return the first frame of each unfinished message that got no chunk since the last call."""
        found = [partial.first for partial in self._partials.values() if partial.received == partial.received_before]
        for partial in self._partials.values():
            partial.received_before = partial.received
        return found

    def _extend(self, key: tuple[int, int], partial: _Partial, frame: Frame) -> Frame | None:
        first = partial.first
        partial.add(frame)
        done = bool(frame.flags & LAST)
        if (frame.kind, frame.total) != (first.kind, first.total) or (partial.received == first.total) != done:
            raise ProtocolError(f"the chunks of message {frame.id} do not add up to {first.total} bytes")
        if not done:
            return None
        del self._partials[key]
        return first._replace(flags=first.flags | LAST, body=b"".join(partial.chunks), pieces=())


BUSY, MALFORMED = "busy", "malformed"


def failure_of(frame: Frame) -> P2PError:
    """Return the exception for a peer's error or reset frame; unprintable characters of its text become "?"."""
    text = "".join(c if c.isprintable() else "?" for c in frame.body.decode("utf-8", "replace"))
    return Refused(text) if frame.name == BUSY else RemoteError(text, frame.name)
