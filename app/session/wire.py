"""What goes over a session's streams: one frame a message, a fixed binary header and then raw bytes. No I/O.

    offset  size  field
    0       16    session   random, chosen by the asker
    16      4     epoch     raised by the asker alone, at each change of the route or truncation
    20      4     position  see the kinds
    24      1     kind
    25      1     dtype     of the numbers in the body (0 where there are none)
    26      2     flags     0
    28      4     rows      tokens in the body, or as the kind says
    32      4     width     numbers in a row
    36      4     length    bytes that follow

All integers are little-endian. An asker (A) opens one stream to each hop (H) and sends its orders there; a hop opens
one stream to each successor and sends `DATA` there; the last hop answers on the asker's stream.

    TURN     A>H  a JSON object (`EpochOrder`): begin an epoch; position: cut the cache to it (KEEP: leave it as it is)
    READY    H>A  the epoch has begun; position: cached tokens, rows: outputs are kept from this position on
    GO       A>H  position: from here on the successor needs outputs; what is kept of them is sent at once
    DATA     any  hidden states of `rows` tokens, the first at position
    RELAY    H>A  the same, to be passed on to the hop's successor, which it cannot reach
    CLOSE    A>H  the session is over: free it
    PROBE    A>H  how far are you?
    STATE    H>A  position: cached tokens, rows: received tokens, width: rows that wait before it
    TROUBLE  H>A  a JSON object (`HopError`): what the asker must act upon
    PACE     A>H  how long do this session's tokens take at your place?
    PACE     H>A  position: microseconds of a usual step, rows: microseconds that a token usually waits for it

Unknown kinds are refused, unknown JSON fields ignored. What arrives twice, late or from anybody but the peers named in
the turn changes nothing (`app.serving.hop_session`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from app.core.canonical_json import canonical, check_version, decode_object
from app.core.errors import RecordError
from app.core.reasons import NEXT_STEPS, Reason, because
from app.core.span import MAX_BLOCKS, Span

PROTOCOL = "/shoal/1/session"
VERSION = 1
SESSION_BYTES = 16
KEEP = 2**32 - 1  # in a TURN: cut nothing
MAX_TOKENS = 2**24  # of one session
MAX_ROWS = 4096  # in one frame
MAX_WIDTH = 2**16
MAX_JSON_BYTES = 1024
MAX_DATA_BYTES = 48 * 2**20

# Why a hop turns a session away (`app.serving.admission`).
REFUSALS = frozenset(
    {"sessions_full", "asker_sessions_full", "cache_full", "cache_reserved", "not_hosted", "context_exceeded"}
)

_HEADER = struct.Struct("<16sIIBBHIII")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """What a frame says."""

    TURN = 1
    READY = 2
    GO = 3
    DATA = 4
    RELAY = 5
    CLOSE = 6
    PROBE = 7
    STATE = 8
    TROUBLE = 9
    PACE = 10


# Number formats on the wire; quantised ones may follow under new codes.
DTYPES = {"f32": 1, "bf16": 2, "f16": 3}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}
_ITEM_BYTES = {1: 4, 2: 2, 3: 2}
_KINDS = frozenset(Kind)
_WITH_DATA = (Kind.DATA, Kind.RELAY)
_WITH_JSON = (Kind.TURN, Kind.TROUBLE)


class Frame(NamedTuple):
    """One frame as it arrived; `body` is a view into the message."""

    session: bytes
    epoch: int
    position: int
    kind: int
    dtype: int
    rows: int
    width: int
    body: memoryview


@dataclass(frozen=True)
class EpochOrder:
    """What the asker tells a hop at the beginning of an epoch; an empty peer is the asker itself."""

    span: Span
    predecessor: str
    successor: str
    tokens: int  # room that the whole session needs
    urgent_from: int  # tokens before this position catch up, later ones are awaited by a reader
    send_from: int | None = None  # as in GO, where it is known already
    relay: bool = False  # send to the successor through the asker
    wire: str = ""  # number format of the outputs; empty: the hop's own


@dataclass(frozen=True)
class HopError:
    """What went wrong at a hop: what kind of trouble it is, which its asker acts upon, and words for a person."""

    code: str  # busy, refused, draining; gap, link, missing, closed, failed; evicted (kept outputs, for information)
    text: str
    why: str = ""  # of the reason, where it says more than the kind of trouble


def row_bytes(dtype: int, width: int) -> int:
    """What one token's hidden state takes on the wire."""
    return _ITEM_BYTES[dtype] * width


def header(
    kind: int, session: bytes, epoch: int, position: int, *, dtype: int = 0, rows: int = 0, width: int = 0, length: int
) -> bytes:
    """The bytes before a body of `length` bytes."""
    return _HEADER.pack(session, epoch, position, kind, dtype, 0, rows, width, length)


def plain(kind: int, session: bytes, epoch: int, position: int = 0, rows: int = 0, width: int = 0) -> bytes:
    """A frame without a body."""
    return _HEADER.pack(session, epoch, position, kind, 0, 0, rows, width, 0)


def encode_turn(session: bytes, epoch: int, cut_to: int, turn: EpochOrder) -> bytes:
    """The frame that begins an epoch at a hop."""
    values: dict[str, object] = {
        "v": VERSION, "start": turn.span.start, "stop": turn.span.stop, "before": turn.predecessor,
        "after": turn.successor, "tokens": turn.tokens, "urgent": turn.urgent_from, "relay": turn.relay,
        "wire": turn.wire,
    }  # fmt: skip
    if turn.send_from is not None:
        values["send"] = turn.send_from
    body = canonical(values)
    return header(Kind.TURN, session, epoch, cut_to, length=len(body)) + body


def encode_trouble(session: bytes, epoch: int, position: int, trouble: HopError) -> bytes:
    """The frame that tells the asker of trouble."""
    values = {"code": trouble.code, "text": trouble.text[:400], **({"why": trouble.why} if trouble.why else {})}
    body = canonical(values)
    return header(Kind.TROUBLE, session, epoch, position, length=len(body)) + body


def encode_pace(session: bytes, epoch: int, step_s: float, queue_s: float) -> bytes:
    """The frame that tells an asker how long its tokens take at a hop."""
    step_us, queue_us = (min(round(1e6 * seconds), 2**32 - 1) for seconds in (step_s, queue_s))
    return plain(Kind.PACE, session, epoch, step_us, queue_us)


def decode_pace(frame: Frame) -> tuple[float, float]:
    """Seconds of a usual step, and of the usual wait for it, in a hop's PACE frame."""
    return frame.position / 1e6, frame.rows / 1e6


def decode(message: bytes) -> Frame:
    """The frame in a message; raises `RecordError` for any other bytes."""
    if len(message) < HEADER_BYTES:
        raise RecordError(f"session frame: {len(message)} bytes are too few")
    session, epoch, position, kind, dtype, _flags, rows, width, length = _HEADER.unpack_from(message)
    if length != len(message) - HEADER_BYTES:
        raise RecordError(f"session frame: {length} bytes are announced, {len(message) - HEADER_BYTES} came")
    if kind in _WITH_DATA:
        _check_data(position, dtype, rows, width, length)
    elif kind not in _KINDS or length > (MAX_JSON_BYTES if kind in _WITH_JSON else 0):
        raise RecordError(f"session frame: kind {kind} with {length} bytes is not understood; update Shoal")
    return Frame(session, epoch, position, kind, dtype, rows, width, memoryview(message)[HEADER_BYTES:])


def _check_data(position: int, dtype: int, rows: int, width: int, length: int) -> None:
    if dtype not in _ITEM_BYTES:
        raise RecordError(f"session frame: number format {dtype} is not understood; update Shoal")
    if not (0 < rows <= MAX_ROWS and 0 < width <= MAX_WIDTH and position + rows <= MAX_TOKENS):
        raise RecordError(f"session frame: {rows} rows of {width} at {position} are out of bounds")
    if length != rows * width * _ITEM_BYTES[dtype] or length > MAX_DATA_BYTES:
        raise RecordError(f"session frame: {rows} rows of {width} do not make {length} bytes")


def decode_turn(frame: Frame) -> EpochOrder:
    """The order in a TURN frame; raises `RecordError`."""
    fields = decode_object(bytes(frame.body), "turn", max_bytes=MAX_JSON_BYTES)
    check_version(fields, "v", VERSION)
    start, stop = fields.integer("start", 0, MAX_BLOCKS), fields.integer("stop", 0, MAX_BLOCKS)
    if not Span.is_possible(start, stop):
        fields.refuse("stop", "more than start")
    wire = fields.text("wire", 8, "")
    if wire and wire not in DTYPES:
        fields.refuse("wire", f"one of {', '.join(DTYPES)}")
    return EpochOrder(
        Span(start, stop),
        fields.text("before", 128),
        fields.text("after", 128),
        fields.integer("tokens", 1, MAX_TOKENS),
        fields.integer("urgent", 0, MAX_TOKENS, 0),
        fields.integer("send", 0, MAX_TOKENS) if "send" in fields.values else None,
        fields.flag("relay", False),
        wire,
    )


def decode_trouble(frame: Frame) -> HopError:
    """The words in a TROUBLE frame; raises `RecordError`."""
    fields = decode_object(bytes(frame.body), "trouble", max_bytes=MAX_JSON_BYTES)
    text = fields.text("text", 400, "")
    words = "".join(c if c.isprintable() else " " for c in text)
    return HopError(fields.text("code", 16), words, fields.text("why", 32, ""))


def reason_told(peer: str, trouble: HopError) -> Reason:
    """What a hop said of itself, as a reason; a code that this node does not know counts as the kind of trouble."""
    kind = f"hop_{trouble.code}"
    code = trouble.why if trouble.why in REFUSALS else kind if kind in NEXT_STEPS else "hop_failed"
    return because(code, trouble.text or "it did not say why", peer)
