"""The frame codec of a link: bytes in, frames out, no I/O. The layout is specified in the package docstring.

Every rule about a single frame is checked here, before its bytes are waited for; what a frame means for calls and
streams is for `p2p.link.link`. Whatever bytes come in, nothing but `ProtocolError` is raised.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from p2p.errors import P2PError, ProtocolError, Refused, RemoteError
from p2p.values import MAX_BODY_BYTES, MAX_NAME_BYTES, Buffer

if TYPE_CHECKING:
    pass

MAJOR, MINOR = 1, 0
MAGIC = b"shoal\0"
PREFACE = MAGIC + bytes((MAJOR, MINOR))
HEADER = struct.Struct(">BBHIIII")
CHUNK_BYTES = 256 * 1024
FIRST, LAST = 0x04, 0x08
WHOLE = FIRST | LAST
PRIORITY_MASK = 0x03
MAX_PARTIAL_MESSAGES = 256
MAX_TEXT_BYTES = 1024
OPTIONAL_KINDS = 128  # kinds from here on are skipped by whoever does not know them


class Kind(IntEnum):
    """What a frame is."""

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


_KINDS = frozenset(int(kind) for kind in Kind)
_CHUNKED = frozenset((Kind.REQUEST, Kind.ANSWER, Kind.MESSAGE))
_NAMED = frozenset((Kind.REQUEST, Kind.ERROR, Kind.OPEN, Kind.RESET))
_TEXT_BYTES = {
    Kind.ERROR: MAX_TEXT_BYTES,
    Kind.RESET: MAX_TEXT_BYTES,
}  # a body that must fit one frame; other kinds carry none


class Frame(NamedTuple):
    """One frame: `total` is the length of the whole message's body, `body` this chunk of it.

    A long chunk that came in pieces is in `pieces` instead, so that it is copied once, when its message is whole.
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
        """Whose turn the frame came in."""
        return self.flags & PRIORITY_MASK


def encode_header(kind: int, flags: int, id: int, length: int, total: int, arg: int = 0, name: bytes = b"") -> bytes:
    """The bytes before a chunk's body."""
    return HEADER.pack(kind, flags, len(name), id, length, total, arg) + name


def encode(frame: Frame) -> bytes:
    """A whole frame as bytes."""
    name = frame.name.encode("ascii")
    header = encode_header(frame.kind, frame.flags, frame.id, len(frame.body), frame.total, frame.arg, name)
    return header + frame.body


class FrameDecoder:
    """Cuts a byte stream into frames; holds at most one incomplete frame, in the pieces that it came in."""

    def __init__(self) -> None:
        self._parts: list[Buffer] = []
        self._held = 0
        self._needed = len(PREFACE)
        self._greeted = False

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes; after a `ProtocolError` the decoder is of no more use."""
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
            if (frame := _parse(data, start, end)) is not None:
                frames.append(frame)
            start = end
        self._parts = [_piece(data, start, size)] if start < size else []
        self._held, self._needed = size - start, end - start
        return frames

    def _resume(self, data: bytes, start: int, frames: list[Frame]) -> int:
        """Add to the frame that is held what `data` has of it: where the rest of `data` begins."""
        stop = min(start + self._needed - self._held, len(data))
        self._parts.append(_piece(data, start, stop))
        self._held += stop - start
        if self._held < self._needed:
            return stop
        if self._held == HEADER.size:  # now that the header is here, it is known how much is to come
            self._parts = [b"".join(self._parts)]
            self._needed = _end_of_frame(self._parts[0], 0, HEADER.size)
            if self._needed > HEADER.size:
                return stop
        if (frame := _assemble(self._parts)) is not None:
            frames.append(frame)
        self._parts, self._held = [], 0
        return stop

    def _greet(self, data: bytes) -> bool:
        size = min(len(data), len(MAGIC))
        if data[:size] != MAGIC[:size]:
            raise ProtocolError("the peer does not speak Shoal's link protocol")
        if len(data) > len(MAGIC) and data[len(MAGIC)] != MAJOR:
            raise ProtocolError(f"the peer speaks version {data[len(MAGIC)]} of the link protocol, this node {MAJOR}")
        self._greeted = len(data) >= len(PREFACE)
        if not self._greeted:
            self._parts = [data]
        return self._greeted


def _end_of_frame(data: Buffer, start: int, size: int) -> int:
    """Where the frame at `start` ends, or its header where that is not there yet."""
    if size - start < HEADER.size:
        return start + HEADER.size
    kind, flags, name_length, _, length, total, _ = HEADER.unpack_from(data, start)
    if length > CHUNK_BYTES or total > MAX_BODY_BYTES or length > total or name_length > MAX_NAME_BYTES:
        raise ProtocolError(f"a frame of kind {kind} declares {length} of {total} bytes, name {name_length}")
    if kind in _CHUNKED:
        _check_chunk(flags, length, total, name_length, kind)
    elif kind in _KINDS:
        if flags & WHOLE != WHOLE or length != total or length > _TEXT_BYTES.get(kind, 0):
            raise ProtocolError(f"a frame of kind {kind} must be whole and carry no more than its text")
        if bool(name_length) != (kind in _NAMED):
            raise ProtocolError(f"a frame of kind {kind} has a name of {name_length} bytes")
    elif kind < OPTIONAL_KINDS:
        raise ProtocolError(f"unknown frame kind {kind}; the peer may run a newer version")
    return start + int(HEADER.size + name_length + length)


def _check_chunk(flags: int, length: int, total: int, name_length: int, kind: int) -> None:
    whole = flags & WHOLE == WHOLE
    # Every chunk but the last is full: so a message cannot be cut into millions of tiny frames.
    if (whole and length != total) or (not flags & LAST and length != CHUNK_BYTES):
        raise ProtocolError(f"a chunk of {length} bytes of a message of {total} is cut wrongly")
    if bool(name_length) != (kind == Kind.REQUEST and bool(flags & FIRST)):
        raise ProtocolError(f"a chunk of kind {kind} has a name of {name_length} bytes")


def _piece(data: bytes, start: int, stop: int) -> Buffer:
    """Some of `data`, as it lies there; but a small piece must not keep much else in memory."""
    return memoryview(data)[start:stop] if 2 * (stop - start) >= len(data) else data[start:stop]


def _assemble(parts: list[Buffer]) -> Frame | None:
    """The frame that these pieces are; a chunk of a longer message stays in pieces, to be joined once, at its end."""
    head = parts[0]
    _, flags, name_length, *_ = HEADER.unpack_from(head)
    body_at = HEADER.size + name_length
    if flags & WHOLE == WHOLE or len(head) < body_at:
        data = b"".join(parts)
        return _parse(data, 0, len(data))
    frame = _parse(bytes(head[:body_at]), 0, body_at)
    return frame and frame._replace(pieces=(memoryview(head)[body_at:], *parts[1:]))


def _parse(data: bytes, start: int, end: int) -> Frame | None:
    kind, flags, name_length, id, _, total, arg = HEADER.unpack_from(data, start)
    if kind >= OPTIONAL_KINDS:
        return None
    body_at = start + HEADER.size + name_length
    name = ""
    if name_length:
        raw = data[body_at - name_length : body_at]
        if not raw.isascii() or not (name := raw.decode("ascii")).isprintable():
            raise ProtocolError("a frame's name is not printable ASCII")
    return Frame(kind, flags, id, total, arg, name, data[body_at:end])


def body_bytes(frame: Frame) -> int:
    """How many bytes of its message this frame carries."""
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
    """Joins the chunks of messages that interleave on one link; each key is a message's id and priority."""

    def __init__(self) -> None:
        self._partials: dict[tuple[int, int], _Partial] = {}

    def __len__(self) -> int:
        return len(self._partials)

    def expects(self, frame: Frame) -> bool:
        """True where the message that this chunk continues was begun and not dropped."""
        return (frame.id, frame.flags & PRIORITY_MASK) in self._partials

    def add(self, frame: Frame) -> Frame | None:
        """The whole message as one frame when this chunk completes it.

        A later chunk of a message that was dropped, or never begun, is ignored: a refused sender may still send it.
        """
        if frame.flags & WHOLE == WHOLE and not self._partials:
            return frame
        key = (frame.id, frame.flags & PRIORITY_MASK)
        partial = self._partials.get(key)
        if frame.flags & FIRST:
            if partial is not None:
                raise ProtocolError(f"message {frame.id} begins again before its end")
            if frame.flags & LAST:
                return frame
            if len(self._partials) >= MAX_PARTIAL_MESSAGES:
                raise ProtocolError(f"more than {MAX_PARTIAL_MESSAGES} messages are begun and not finished")
            partial = self._partials[key] = _Partial(frame)
            partial.add(frame)
            return None
        if partial is None:
            return None
        return self._extend(key, partial, frame)

    def drop(self, id: int) -> None:
        """Forget what has arrived of the messages with this id."""
        for key in [key for key in self._partials if key[0] == id]:
            del self._partials[key]

    def stalled(self) -> list[Frame]:
        """The first frames of all messages of which nothing has arrived since the last call."""
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
    """The error that a peer answered with; its words are shown, never trusted."""
    text = "".join(c if c.isprintable() else "?" for c in frame.body.decode("utf-8", "replace"))
    return Refused(text) if frame.name == BUSY else RemoteError(text, frame.name)
