"""Values shared by all networks of this package: payloads, priorities, message bounds and link figures. No I/O."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Literal

Buffer = bytes | bytearray | memoryview
Payload = Buffer | Sequence[Buffer]  # one buffer, or several that arrive joined

MAX_BODY_BYTES = 64 * 2**20  # a request, an answer or one message of a stream
MAX_NAME_BYTES = 128  # a method or protocol name, an error code
MESSAGE_COST_BYTES = 256  # added to each body when queues are measured, so that tiny messages are bounded too
WINDOW_BYTES = 4 * 2**20  # that one side of a stream may have sent and that the other has not consumed

CONTROL, DECODE, PREFILL, BULK = range(4)  # a lower number overtakes a higher one at every chunk
PRIORITIES = 4

_SMALL_PIECE_BYTES = 2048
_JOINED_BYTES = 64 * 1024  # about the most that small pieces are joined to

LinkKind = Literal["direct", "lan", "relayed"]


@dataclass(frozen=True)
class LinkInfo:
    """The link to one peer: its kind, round-trip time in seconds, bytes carried, and how fast it delivers them.

    Times and speeds are None before they are measured.
    """

    peer: str
    kind: LinkKind
    rtt_s: float | None
    bytes_in: int
    bytes_out: int
    down_bytes_per_s: float | None = None


def buffers_of(payload: Payload) -> tuple[Sequence[Buffer], int]:
    """Return the payload's buffers and their total length; raises `ValueError` above `MAX_BODY_BYTES`."""
    parts: Sequence[Buffer] = (payload,) if isinstance(payload, bytes | bytearray | memoryview) else payload
    size = 0
    for part in parts:
        size += part.nbytes if isinstance(part, memoryview) else len(part)
    if size > MAX_BODY_BYTES:
        raise ValueError(f"a message of {size} bytes is above the bound of {MAX_BODY_BYTES}; send it in pieces")
    return parts, size


def joined(payload: Payload) -> bytes:
    """Return the payload as one `bytes`, without a copy if it already is one; raises `ValueError` if too large."""
    if isinstance(payload, bytes) and len(payload) <= MAX_BODY_BYTES:
        return payload
    return b"".join(buffers_of(payload)[0])


def append_piece(pieces: MutableSequence[Buffer], piece: Buffer) -> None:
    """Append what was read; small pieces are joined, so that many cost little more memory than their bytes."""
    if not pieces or len(piece) > _SMALL_PIECE_BYTES:
        pieces.append(piece)
    elif type(tail := pieces[-1]) is bytearray and len(tail) < _JOINED_BYTES:
        tail += piece
    else:
        pieces.append(bytearray(piece))


def fits_window(outstanding: int, cost: int, priority: int = DECODE) -> bool:
    """True if a message of `cost` bytes may be sent on a stream with `outstanding` bytes not yet consumed.

    A window that is less than half used accepts a message of any size. So a message larger than the window can pass,
    and a sender never waits for a reader that grants credit only at every half window. The other half is for messages
    that overtake: they need not wait until the bytes of a prompt have crossed a slow link.
    """
    return outstanding < WINDOW_BYTES // 2 or (priority < PREFILL and outstanding + cost <= WINDOW_BYTES)


def check_name(name: str) -> bytes:
    """Return a method, protocol or error name as wire bytes; raises `ValueError` if it is not a valid name."""
    raw = name.encode("ascii", "replace")
    if not 0 < len(raw) <= MAX_NAME_BYTES or not name.isascii() or not name.isprintable():
        raise ValueError(f"{name!r} is not a valid name: use 1 to {MAX_NAME_BYTES} printable ASCII characters")
    return raw
