"""Wire format of session streams: each message is one frame, a fixed binary header and then raw bytes. No I/O.

    offset  size  field
    0       16    session   8 random bytes, then 8 that bind them to the asker's peer id (`new_session_id`)
    16      4     epoch     raised only by the asker, at each change of the route or truncation
    20      4     position  token position, or as the kind says
    24      1     kind
    25      1     dtype     of the numbers in the body (0: no numbers)
    26      2     revision  of the tokens in this epoch: raised with each cut, below; 0 in all but DATA, RELAY and STATE
    28      4     rows      tokens in the body, or as the kind says
    32      4     width     numbers in a row
    36      4     length    bytes that follow

All integers are little-endian. The asker (A) opens one stream to each hop (H) and sends its orders on it; a hop opens
one stream to each successor and sends `DATA` on it; the last hop answers on the asker's stream.

    TURN     A>H  a JSON object (`EpochOrder`): begin an epoch; position: truncate the cache to it (KEEP: do not)
    READY    H>A  the epoch has begun; position: cached tokens, rows: outputs are kept from this position on,
                  width: 1 if the hop knows revisions, 0 if not
    GO       A>H  position: the successor needs outputs from here on; kept ones are sent at once
    DATA     any  hidden states of `rows` tokens, the first at position
    RELAY    H>A  the same, for the asker to pass on to the hop's successor, which the hop cannot reach
    CLOSE    A>H  the session is over; rows: seconds for which the hop may keep its cache, as long as nobody needs the
                  room, for a new session of this asker that begins with it (0: free it at once)
    PROBE    A>H  ask for STATE
    STATE    H>A  position: cached tokens, rows: received tokens, width: rows in the hop's queue
    TROUBLE  H>A  a JSON object (`HopError`): an error that the asker must act on
    PACE     A>H  ask for PACE
    PACE     H>A  position: microseconds of a usual step, rows: microseconds that a token usually waits for it,
                  width: microseconds that the hop takes to send its output on (0: not said)

A cut needs no order of its own. DATA of a newer revision of the same epoch replaces everything from its position on:
the hop truncates its cache there, computes the rows, and sends its outputs with the same revision, so that the cut
travels with the rows. Every epoch begins with revision 0. Revisions are only for routes whose hops all know them.

Unknown kinds are an error, unknown JSON fields are ignored. `app.serving.hop_session` ignores frames that arrive late
or from a peer that is not named in the epoch's TURN; what the asker sends twice is answered from kept outputs.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.errors import RecordError
from app.core.reasons import NEXT_STEPS, Reason, because
from app.core.span import MAX_BLOCKS, Span

PROTOCOL = "/shoal/1/session"
VERSION = 1
SESSION_BYTES = 16
KEEP = 2**32 - 1  # position of a TURN that truncates nothing
MAX_TOKENS = 2**24  # of one session
MAX_ROWS = 4096  # in one frame
MAX_WIDTH = 2**16
MAX_JSON_BYTES = 1024
MAX_DATA_BYTES = 48 * 2**20
MAX_REVISION = 2**16 - 1
KNOWS_REVISIONS = 1  # in READY

# Reason codes with which a hop refuses a session (`app.serving.admission`).
REFUSALS = frozenset(
    {"sessions_full", "asker_sessions_full", "cache_full", "cache_reserved", "not_hosted", "context_exceeded"}
)

_HEADER = struct.Struct("<16sIIBBHIII")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """Kinds of frames; the module docstring gives their fields."""

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


# Number formats and their codes; new formats get new codes.
DTYPES = {"f32": 1, "bf16": 2, "f16": 3}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}
_ITEM_BYTES = {1: 4, 2: 2, 3: 2}
_KINDS = frozenset(Kind)
_WITH_DATA = (Kind.DATA, Kind.RELAY)
_WITH_JSON = (Kind.TURN, Kind.TROUBLE)


class Frame(NamedTuple):
    """One decoded frame; `body` is a view into the message, not a copy."""

    session: bytes
    epoch: int
    position: int
    kind: int
    dtype: int
    rows: int
    width: int
    body: memoryview
    revision: int = 0


@dataclass(frozen=True)
class Prefix:
    """The first tokens of another session of the same asker, whose cache a new session begins with."""

    session: bytes
    tokens: int
    ends: bool  # the other session ends, and the new one takes its cache over


@dataclass(frozen=True)
class EpochOrder:
    """The asker's order to a hop for one epoch; an empty peer id stands for the asker."""

    span: Span
    predecessor: str
    successor: str
    tokens: int  # cache to reserve for the whole session
    urgent_from: int  # a reply waits for tokens from this position on; earlier ones only fill the cache
    send_from: int | None = None  # position of GO, if known already
    relay: bool = False  # send outputs to the asker, which passes them on to the successor
    wire: str = ""  # number format of the outputs; empty: the hop's own
    prefix: Prefix | None = None  # a new session begins with these tokens, if the hop has them


@dataclass(frozen=True)
class HopError:
    """An error at a hop: a code that the asker acts on, and a text for the user."""

    # busy, refused, draining; gap, link, missing, closed, failed; input (it received numbers that are not finite);
    # evicted (kept outputs, for information)
    code: str
    text: str
    why: str = ""  # reason code, if it is more specific than `code`


def new_session_id(asker: str, nonce: bytes | None = None) -> bytes:
    """Return an id for a session of this asker: eight random bytes, and eight that bind them to its peer id.

    Every hop of a route learns the id, and hidden states carry nothing else: a hop that opened the same id elsewhere
    could read or change what goes there.
    """
    nonce = secrets.token_bytes(SESSION_BYTES // 2) if nonce is None else nonce
    return nonce + hashlib.sha256(b"shoal session" + nonce + asker.encode()).digest()[: SESSION_BYTES // 2]


def belongs_to(session: bytes, asker: str) -> bool:
    """True if this asker made the session's id."""
    return session == new_session_id(asker, session[: SESSION_BYTES // 2])


def row_bytes(dtype: int, width: int) -> int:
    """Bytes of one token's hidden state on the wire."""
    return _ITEM_BYTES[dtype] * width


# For each number format: the integers that its bytes are read as, and the bits that are all set in NaN and infinity.
_NOT_FINITE = {1: ("<u4", 0x7F800000), 2: ("<u2", 0x7F80), 3: ("<u2", 0x7C00)}


def is_finite(frame: Frame) -> bool:
    """True if no number of a frame's body is NaN or infinity."""
    import numpy  # light starts do without

    kind, exponent = _NOT_FINITE[frame.dtype]
    numbers = numpy.frombuffer(frame.body, kind)
    return bool((numbers & exponent).max(initial=0) < exponent)


def header(
    kind: int,
    session: bytes,
    epoch: int,
    position: int,
    *,
    dtype: int = 0,
    rows: int = 0,
    width: int = 0,
    length: int,
    revision: int = 0,
) -> bytes:
    """Encode the header of a frame whose body has `length` bytes."""
    return _HEADER.pack(session, epoch, position, kind, dtype, revision, rows, width, length)


def plain(
    kind: int, session: bytes, epoch: int, position: int = 0, rows: int = 0, width: int = 0, revision: int = 0
) -> bytes:
    """Encode a frame without a body."""
    return _HEADER.pack(session, epoch, position, kind, 0, revision, rows, width, 0)


def encode_turn(session: bytes, epoch: int, cut_to: int, turn: EpochOrder) -> bytes:
    """Encode a TURN frame, which begins an epoch at a hop."""
    values: dict[str, object] = {
        "v": VERSION, "start": turn.span.start, "stop": turn.span.stop, "before": turn.predecessor,
        "after": turn.successor, "tokens": turn.tokens, "urgent": turn.urgent_from, "relay": turn.relay,
        "wire": turn.wire,
    }  # fmt: skip
    if turn.send_from is not None:
        values["send"] = turn.send_from
    if turn.prefix is not None:
        values |= {"from": turn.prefix.session.hex(), "share": turn.prefix.tokens, "take": turn.prefix.ends}
    body = canonical(values)
    return header(Kind.TURN, session, epoch, cut_to, length=len(body)) + body


def encode_hop_error(session: bytes, epoch: int, position: int, trouble: HopError) -> bytes:
    """Encode a TROUBLE frame; its text is cut to 400 characters."""
    values = {"code": trouble.code, "text": trouble.text[:400], **({"why": trouble.why} if trouble.why else {})}
    body = canonical(values)
    return header(Kind.TROUBLE, session, epoch, position, length=len(body)) + body


class HopPace(NamedTuple):
    """Usual seconds of a token at a hop: its device step, the wait for it, and sending the output on."""

    step_s: float
    queue_s: float
    host_s: float = 0.0


def encode_pace(session: bytes, epoch: int, pace: HopPace) -> bytes:
    """Encode a hop's PACE frame."""
    return plain(Kind.PACE, session, epoch, *(min(round(1e6 * seconds), 2**32 - 1) for seconds in pace))


def decode_pace(frame: Frame) -> HopPace:
    """Decode a hop's PACE frame."""
    return HopPace(frame.position / 1e6, frame.rows / 1e6, frame.width / 1e6)


def decode(message: bytes) -> Frame:
    """Decode and check one message; raises `RecordError` if it is not a valid frame."""
    if len(message) < HEADER_BYTES:
        raise RecordError(f"session frame: {len(message)} bytes are less than a header")
    session, epoch, position, kind, dtype, revision, rows, width, length = _HEADER.unpack_from(message)
    if length != len(message) - HEADER_BYTES:
        raise RecordError(f"session frame: its header says {length} bytes follow, but {len(message) - HEADER_BYTES} do")
    if kind in _WITH_DATA:
        _check_data(position, dtype, rows, width, length)
    elif kind not in _KINDS or length > (MAX_JSON_BYTES if kind in _WITH_JSON else 0):
        raise RecordError(f"session frame: kind {kind} with {length} bytes is not understood; update Shoal")
    body = memoryview(message)[HEADER_BYTES:]
    return Frame(session, epoch, position, kind, dtype, rows, width, body, revision)


def _check_data(position: int, dtype: int, rows: int, width: int, length: int) -> None:
    if dtype not in _ITEM_BYTES:
        raise RecordError(f"session frame: number format {dtype} is not understood; update Shoal")
    if not (0 < rows <= MAX_ROWS and 0 < width <= MAX_WIDTH and position + rows <= MAX_TOKENS):
        raise RecordError(f"session frame: {rows} rows of {width} numbers at {position} are out of bounds")
    if length != rows * width * _ITEM_BYTES[dtype] or length > MAX_DATA_BYTES:
        raise RecordError(f"session frame: {length} bytes do not match {rows} rows of {width} numbers")


def decode_turn(frame: Frame) -> EpochOrder:
    """Decode a TURN frame's order; raises `RecordError` if a field is missing or out of bounds."""
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
        _decode_prefix(fields),
    )


def _decode_prefix(fields: Fields) -> Prefix | None:
    if "from" not in fields.values:
        return None
    session, tokens = fields.hex_bytes("from", SESSION_BYTES), fields.integer("share", 1, MAX_TOKENS)
    return Prefix(session, tokens, fields.flag("take", False))


def decode_hop_error(frame: Frame) -> HopError:
    """Decode a TROUBLE frame's error, with unprintable characters blanked; raises `RecordError`."""
    fields = decode_object(bytes(frame.body), "trouble", max_bytes=MAX_JSON_BYTES)
    text = "".join(c if c.isprintable() else " " for c in fields.text("text", 400, ""))
    return HopError(fields.text("code", 16), text, fields.text("why", 32, ""))


def hop_error_reason(peer: str, trouble: HopError) -> Reason:
    """Return a hop's error as a reason about `peer`; an unknown code becomes `hop_failed`."""
    kind = f"hop_{trouble.code}"
    code = trouble.why if trouble.why in REFUSALS else kind if kind in NEXT_STEPS else "hop_failed"
    return because(code, trouble.text or "it gave no reason", peer)
