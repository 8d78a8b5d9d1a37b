"""Small values that every network of this package speaks of: payloads, priorities and link figures. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Buffer = bytes | bytearray | memoryview
Payload = Buffer | Sequence[Buffer]  # one buffer, or several that arrive joined

MAX_BODY_BYTES = 64 * 2**20  # a request, an answer or one message of a stream
MAX_NAME_BYTES = 128  # a method or protocol name, an error code
MESSAGE_COST_BYTES = 256  # what a message weighs in a queue besides its body, so that tiny ones are bounded too
WINDOW_BYTES = 4 * 2**20  # what one side of a stream may have sent and not yet seen consumed

CONTROL, DECODE, PREFILL, BULK = range(4)  # a lower number overtakes a higher one at every chunk
PRIORITIES = 4

LinkKind = Literal["direct", "lan", "relayed"]


@dataclass(frozen=True)
class LinkInfo:
    """What is known of the link to one peer."""

    peer: str
    kind: LinkKind
    rtt_s: float | None
    bytes_in: int
    bytes_out: int


def buffers_of(payload: Payload) -> tuple[Sequence[Buffer], int]:
    """The payload as flat byte buffers and their length; refuses what no peer would take."""
    parts: Sequence[Buffer] = (payload,) if isinstance(payload, bytes | bytearray | memoryview) else payload
    size = 0
    for part in parts:
        size += part.nbytes if isinstance(part, memoryview) else len(part)
    if size > MAX_BODY_BYTES:
        raise ValueError(f"a message of {size} bytes is above the bound of {MAX_BODY_BYTES}; send it in pieces")
    return parts, size


def joined(payload: Payload) -> bytes:
    """The payload as one `bytes`, without a copy where it already is."""
    if isinstance(payload, bytes) and len(payload) <= MAX_BODY_BYTES:
        return payload
    return b"".join(buffers_of(payload)[0])


def fits_window(outstanding: int, cost: int) -> bool:
    """Whether a stream with this much not yet consumed takes one more message.

    A window that is less than half used takes a message of any size: a message larger than the window can pass, and a
    reader that grants credit at every half window never leaves its sender waiting for nothing.
    """
    return outstanding + cost <= WINDOW_BYTES or outstanding < WINDOW_BYTES // 2


def check_name(name: str) -> bytes:
    """A method, protocol or error name as it goes over the wire."""
    raw = name.encode("ascii", "replace")
    if not 0 < len(raw) <= MAX_NAME_BYTES or not name.isascii() or not name.isprintable():
        raise ValueError(f"{name!r} is no name: use 1 to {MAX_NAME_BYTES} printable ASCII characters")
    return raw
