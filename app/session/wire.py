"""Wire format of session streams: each message is one frame of `app.session.frame`. No I/O.

    session   made by the asker (`new_session_id`)
    epoch     raised only by the asker, at each change of the route or truncation
    position  token position, or as the kind says
    revision  of the tokens in this epoch: raised with each cut, below; 0 in all but DATA, RELAY and STATE
    rows      tokens in the body, or as the kind says

The asker (A) opens one stream to each hop (H) and sends its orders on it; a hop opens one stream to each successor and
sends `DATA` on it; the last hop answers on the asker's stream.

    TURN     A>H  a JSON object (`EpochOrder`): begin an epoch; position: truncate the cache to it (KEEP: do not)
    READY    H>A  the epoch has begun; position: cached tokens, rows: outputs are kept from this position on,
                  width: the sum of what the hop knows (1: revisions, 2: adapters, 4: GIVE)
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
    GIVE     A>H  a JSON object (`CacheGrant`): this peer may fetch the session's cache; until the next epoch or CLOSE

Rows have the number format that the frame says. `wire` in TURN orders the one of a hop's outputs: the asker chooses
`int8` where the link to the next hop is slow and both have announced that they understand it
(`app.routing.wire_choice`).

A cut needs no order of its own. DATA of a newer revision of the same epoch replaces everything from its position on:
the hop truncates its cache there, computes the rows, and sends its outputs with the same revision, so that the cut
travels with the rows. Every epoch begins with revision 0. Revisions are only for routes whose hops all know them.

A session with an adapter names it in each TURN by the root and size of its index (`app.session.adapter_index`), which
the hop fetches from the asker, and then the weights of its own blocks, before READY. A hop that does not know adapters
ignores the field: an asker must not send it a token.

A new hop may begin with the cache of a hop that leaves the route: GIVE orders the old one to hand it over, `cache` in
TURN tells the new one where it is. The new hop fetches it (`app.session.cache_wire`) before it answers with READY,
which says how many tokens it has then; the others are sent and computed again. Meanwhile it answers PROBE.

Unknown kinds are an error and end the stream, unknown JSON fields are ignored. A hop sends the rows of many askers over
one stream: rows that are not what their header says end their session at the receiver, not the stream.
`app.serving.hop_session` ignores frames that arrive late or from a peer that is not named in the epoch's TURN; what the
asker sends twice is answered from kept outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from app.core.canonical_json import Fields, check_version, decode_object
from app.core.errors import RecordError
from app.core.reasons import NEXT_STEPS, Reason, because
from app.core.span import MAX_BLOCKS, Span
from app.session.adapter_index import HASH_BYTES, MAX_INDEX_BYTES, AdapterRef
from app.session.frame import (
    DTYPES,
    MAX_JSON_BYTES,
    SESSION_BYTES,
    Frame,
    HopError,
    check_numbers,
    encode_error,
    plain,
    split,
    with_json,
)

PROTOCOL = "/shoal/1/session"
VERSION = 1
KEEP = 2**32 - 1  # position of a TURN that truncates nothing
MAX_TOKENS = 2**24  # of one session
MAX_REVISION = 2**16 - 1
KNOWS_REVISIONS, KNOWS_ADAPTERS, GIVES_CACHE = 1, 2, 4  # in READY

CACHE_EXCEEDED = "cache_exceeded"  # the hop's whole cache is smaller than the session
# Reason codes with which a hop refuses a session (`app.serving.admission`), and those of a session's adapter alone.
ADAPTER_REFUSALS = frozenset({"adapter_refused", "adapters_full"})
REFUSALS = ADAPTER_REFUSALS | {
    "sessions_full", "asker_sessions_full", "cache_full", "cache_reserved", "not_hosted", "context_exceeded",
    CACHE_EXCEEDED,
}  # fmt: skip


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
    GIVE = 11


_KINDS = frozenset(Kind)
_WITH_DATA = (Kind.DATA, Kind.RELAY)
_WITH_JSON = (Kind.TURN, Kind.TROUBLE, Kind.GIVE)


@dataclass(frozen=True)
class Prefix:
    """The first tokens of another session of the same asker, whose cache a new session begins with."""

    session: bytes
    tokens: int
    ends: bool  # the other session ends, and the new one takes its cache over


@dataclass(frozen=True)
class CacheGrant:
    """The peer at the other end of a hand-over, and the number of tokens whose cache it may fetch, or is to give."""

    peer: str
    tokens: int


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
    adapter: AdapterRef | None = None  # all tokens of the session are computed with it
    cache: CacheGrant | None = None  # a new session fetches the cache of its first tokens there


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
    if turn.adapter is not None:
        values |= {"adapter": turn.adapter.root.hex(), "index": turn.adapter.size_bytes}
    if turn.cache is not None:
        values["cache"] = _grant_values(turn.cache)
    return with_json(Kind.TURN, session, epoch, cut_to, values)


def encode_give(session: bytes, epoch: int, grant: CacheGrant) -> bytes:
    """Encode a GIVE frame, which allows a peer to fetch a session's cache."""
    return with_json(Kind.GIVE, session, epoch, 0, _grant_values(grant))


def _grant_values(grant: CacheGrant) -> dict[str, object]:
    return {"peer": grant.peer, "tokens": grant.tokens}


def decode_give(frame: Frame) -> CacheGrant:
    """Decode a GIVE frame's body; raises `RecordError` if a field is missing or out of bounds."""
    return _decode_grant(decode_object(bytes(frame.body), "give", max_bytes=MAX_JSON_BYTES))


def _decode_grant(fields: Fields) -> CacheGrant:
    return CacheGrant(fields.text("peer", 128), fields.integer("tokens", 1, MAX_TOKENS))


def encode_hop_error(session: bytes, epoch: int, position: int, trouble: HopError) -> bytes:
    """Encode a TROUBLE frame; its text is cut to 400 characters."""
    return encode_error(Kind.TROUBLE, session, epoch, position, trouble)


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


class RowsError(RecordError):
    """The rows of a frame are not what its header says; only the frame's session is concerned, not its stream."""

    def __init__(self, frame: Frame, text: str) -> None:
        super().__init__(text)
        self.frame = frame


def decode(message: bytes) -> Frame:
    """Decode and check one message; raises `RecordError` if it is not a valid frame, `RowsError` for its rows alone."""
    frame = split(message, "session")
    if frame.kind in _WITH_DATA:
        try:
            check_numbers(frame, "session", frame.rows)
        except RecordError as error:
            raise RowsError(frame, str(error)) from None
        if frame.position + frame.rows > MAX_TOKENS:
            raise RowsError(frame, f"session frame: {frame.rows} rows at {frame.position} are out of bounds")
    elif frame.kind not in _KINDS or len(frame.body) > (MAX_JSON_BYTES if frame.kind in _WITH_JSON else 0):
        raise RecordError(
            f"session frame: kind {frame.kind} with {len(frame.body)} bytes is not understood; update Shoal"
        )
    return frame


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
    tokens = fields.integer("tokens", 1, MAX_TOKENS)
    cache = _decode_grant(fields.inner("cache")) if "cache" in fields.values else None
    if cache is not None and cache.tokens > tokens:
        fields.refuse("cache", "no more tokens than the session may have")
    return EpochOrder(
        Span(start, stop),
        fields.text("before", 128),
        fields.text("after", 128),
        tokens,
        fields.integer("urgent", 0, MAX_TOKENS, 0),
        fields.integer("send", 0, MAX_TOKENS) if "send" in fields.values else None,
        fields.flag("relay", False),
        wire,
        _decode_prefix(fields),
        _decode_adapter(fields),
        cache,
    )


def _decode_prefix(fields: Fields) -> Prefix | None:
    if "from" not in fields.values:
        return None
    session, tokens = fields.hex_bytes("from", SESSION_BYTES), fields.integer("share", 1, MAX_TOKENS)
    return Prefix(session, tokens, fields.flag("take", False))


def _decode_adapter(fields: Fields) -> AdapterRef | None:
    if "adapter" not in fields.values:
        return None
    return AdapterRef(fields.hex_bytes("adapter", HASH_BYTES), fields.integer("index", 1, MAX_INDEX_BYTES))


def hop_error_reason(peer: str, trouble: HopError) -> Reason:
    """Return a hop's error as a reason about `peer`; an unknown code becomes `hop_failed`."""
    kind = f"hop_{trouble.code}"
    code = trouble.why if trouble.why in REFUSALS else kind if kind in NEXT_STEPS else "hop_failed"
    return because(code, trouble.text or "it gave no reason", peer)
