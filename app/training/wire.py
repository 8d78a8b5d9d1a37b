"""Wire format of `/shoal/1/train`, training through several nodes: frames of `app.session.frame`. No I/O.

A job trains adapters of the blocks that its hops host (`shoal finetune`), or all weights of blocks that are the job's
own (`shoal train`, by an island of several machines).

    session   the job's run, made by its owner (`new_session_id`)
    epoch     raised only by the owner, at each change of the route or return to an earlier version
    position  the version that the frame is about: the number of steps done
    revision  of FORWARD, BACK and EVALUATE: 16 times the micro-batch's number within the step, plus the attempt
    rows      of the same: tokens of one sequence, plus 65536 times the number of the micro-batch's way; the body holds
              whole sequences of this length

The owner (A) opens one stream to each hop (H) and sends its orders on it. A hop opens a stream to its neighbours and
sends FORWARD and EVALUATE to the next one and BACK to the one before; where it cannot reach a neighbour it sends them
to the owner, who passes them on. The last hop sends FORWARD and EVALUATE, and the first one BACK, to the owner. Where
several hops hold a block there are several ways, and a hop has neighbours and blocks of its own on each.

    OPEN      A>H  a JSON object (`JobOrder`): begin an epoch; what the hop has counted before is dropped
    READY     H>A  the epoch has begun, all blocks are at this version
    FORWARD   any  hidden states of a micro-batch
    BACK      any  the gradient of the loss by hidden states of a micro-batch, the other way
    EVALUATE  any  hidden states of data that is not trained on: as FORWARD, but nothing is kept or counted
    TALLY     A>H  ask what the sums of this version contain
    TALLY     H>A  a JSON object (`Tally`)
    REDUCE    A>H  a JSON object (`ReduceOrder`): hand over the sums of blocks that others hold too, and begin new ones;
                   once for each round, however often it is ordered
    SUMS      H>A  float32 numbers: the sums of the blocks that were asked for, one after another; revision: number of
                   the slice, width: number of the round
    SUMS      A>H  the same for all blocks that others hold too: the sums of all their holders, which replace its own
    REDUCE    H>A  it has the sums of all holders
    STEP      A>H  a JSON object (`StepOrder`): make the next version beside the current one
    STEP      H>A  a JSON object: `root`, the hash of the next version
    COMMIT    A>H  this version, the next one, is the current one from now on
    COMMIT    H>A  it is
    SNAPSHOT  A>H  keep the state of this version
    SNAPSHOT  H>A  a JSON object: `parts`, root and bytes of each block's state, which `train.chunk` serves
    KEEP      A>H  a JSON object: `parts` and `holders`; fetch and keep these states of other hops
    KEEP      H>A  they are here
    CLOSE     A>H  the job is over: free everything
    PROBE     A>H  ask for STATE
    STATE     H>A  position: version, rows: micro-batches that wait or are being computed, width: peers for which the
                   hop has something that it could not send yet
    TROUBLE   H>A  a JSON object (`HopError`)

In a job whose `wire` is `changes` (AQ-SGD), FORWARD and BACK have number format 5. Both ends of a link keep the hidden
states of a sequence as the receiver has them (`app.training.activations`), and later FORWARDs carry what has changed:

    FORWARD  2 bytes, the number of sequences; then for each of them
             4  sample  the owner's number of the sequence, the same at each visit
             1  form    `Form`
             2  known   rows at the beginning that are made from what the receiver keeps; the others are rows of int8
             8  base    the digest of what the receiver keeps (`digest_of`); zeros if `known` is 0
             the known rows as `engine.int4_changes`, or nothing if they are unchanged; then the others
    BACK     rows of int8 of all sequences; then for each sequence 1 byte: 1 if the sender of this BACK keeps its hidden
             states, so that the next FORWARD may build on them

EVALUATE has rows of int8. Every attempt of a micro-batch but the first is sent whole. A receiver that does not have
what a FORWARD builds on drops it and sends TROUBLE with the code `base`; the owner runs the micro-batch again.

Versions change in all blocks or in none: the owner commits a step once every hop has made it, and begins an epoch at an
earlier version if one of them died in between. Unknown kinds are an error, unknown JSON fields are ignored.
`app.training.ledger` decides which frames count.

The call `train.room` (an empty body) asks a node how many bytes of memory it would give to a job of the asker that
trains all weights, whose states its disk must hold too; the answer is a JSON object: `bytes`, and `refuses` with the
reason in words if it trains nothing for the asker, adapters neither.

Sums go through the owner and not from holder to holder. A holder sends and receives them once, which is no more than in
a butterfly of two holders and less than in one of three; the owner bears the rest. It sees every holder's sums whole,
which it needs to find who lied, no holder can falsify the sums of another, and all receive the same bits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple

from app.core.canonical_json import Fields, check_version, decode_object
from app.core.errors import RecordError
from app.core.span import MAX_BLOCKS, Span
from app.manifest.merkle import HASH_BYTES
from app.session.frame import (
    CHANGES,
    DTYPES,
    HEADER_BYTES,
    INT8,
    MAX_DATA_BYTES,
    MAX_ROWS,
    MAX_WIDTH,
    Frame,
    HopError,
    check_numbers,
    encode_error,
    header,
    row_bytes,
    split,
    with_json,
)

PROTOCOL = "/shoal/1/train"
ROOM = "train.room"
VERSION = 1
FORMATS = {**DTYPES, CHANGES: 5}  # number formats of passes and their codes
FORMAT_NAMES = {code: name for name, code in FORMATS.items()}
MAX_MICRO_BATCHES = 2**12  # of one step
MAX_ATTEMPTS = 2**4  # of one micro-batch in one epoch
MAX_STEPS = 2**31
MAX_RANK = 256
OPTIMISERS = ("adamw", "muon")
MAX_UNDER_WAY = 256
MAX_STATE_BYTES = 2**33  # of one block
STATE_WEIGHT_BYTES = 12  # that a weight takes in it, with both moments
_STATE_HEADING_BYTES = 2**16  # at most
MAX_HOLDERS = 8
MAX_WAYS = 2**6  # of one epoch
MAX_ROUNDS = 2**16  # of sums in one version
MAX_NEIGHBOURS = 2 * MAX_WAYS + 1  # of a hop: one on each side of each way, and the owner
SLICE_BYTES = 2**23  # of sums in one frame; only the last one of several is shorter
MAX_JSON_BYTES = 2**19  # a state's hash for each of `MAX_BLOCKS` blocks, or hundreds of bitmaps
FRAMES_AT_ONCE, FRAMES_PER_S = 4096, 1000  # of one peer; what comes faster is read later
FRAME_JSON_BYTES = 64  # of JSON that take about as long to read as another frame


class Kind(IntEnum):
    """Kinds of frames; the module docstring gives their fields."""

    OPEN = 1
    READY = 2
    FORWARD = 3
    BACK = 4
    TALLY = 5
    STEP = 6
    COMMIT = 7
    SNAPSHOT = 8
    KEEP = 9
    CLOSE = 10
    PROBE = 11
    STATE = 12
    TROUBLE = 13
    EVALUATE = 14
    REDUCE = 15
    SUMS = 16


class Form(IntEnum):
    """How a sequence's hidden states are written in a FORWARD of changes."""

    WHOLE = 0  # not to be kept
    KEEP = 1  # whole, to be kept
    CHANGED = 2
    UNCHANGED = 3


_LENGTHS = 2**16  # more than the tokens of any sequence in a frame
_KINDS = frozenset(Kind)
PASSES = (Kind.FORWARD, Kind.BACK, Kind.EVALUATE)
_WITH_JSON = (Kind.OPEN, Kind.TALLY, Kind.STEP, Kind.SNAPSHOT, Kind.KEEP, Kind.TROUBLE, Kind.REDUCE)


class StatePart(NamedTuple):
    """Root and size of one block's state: its adapter, or its weights, and moments."""

    root: bytes
    size_bytes: int


class HopWay(NamedTuple):
    """A hop's part of one way; an empty peer id stands for the owner."""

    number: int
    span: Span
    predecessor: str
    successor: str


@dataclass(frozen=True)
class JobOrder:
    """The owner's order to a hop for one epoch; an empty peer id stands for the owner."""

    span: Span
    predecessor: str
    successor: str
    rank: int  # of the adapters; 0: all weights are trained, in blocks of the job's own, and the next four mean nothing
    alpha: float
    targets: tuple[str, ...]
    dropout: float
    seed: int
    weight_decay: float
    rows: int  # most rows of a micro-batch
    under_way: int  # most micro-batches between their two passes
    wire: str  # of `FORMATS`
    states: tuple[StatePart, ...] = ()  # of each block; empty: as drawn, at version 0
    holders: tuple[str, ...] = ()  # peers that have the states
    ways: tuple[HopWay, ...] = ()  # empty: one way, numbered 0, through all blocks
    shared: tuple[Span, ...] = ()  # blocks that others hold too, in runs with equal holders
    keeps: bool = False  # the hop goes on with the version that it has, and `states` are empty
    shape: Mapping[str, Any] | None = None  # a config.json, if all weights are trained
    optimiser: str = "adamw"

    @property
    def is_full(self) -> bool:
        """True if all weights are trained rather than adapters."""
        return self.shape is not None

    @property
    def sends_changes(self) -> bool:
        """True if hidden states of data that was seen before are sent as changes."""
        return self.wire == CHANGES

    @property
    def row_format(self) -> str:
        """The number format of rows, which changes are made from."""
        return INT8 if self.sends_changes else self.wire

    def format_of(self, kind: Kind) -> str:
        """The number format of a FORWARD, BACK or EVALUATE: the last one always carries rows."""
        return self.row_format if kind == Kind.EVALUATE else self.wire

    def way(self, number: int) -> HopWay | None:
        """Return the hop's part of a way; None if it has none."""
        if not self.ways:
            return HopWay(0, self.span, self.predecessor, self.successor) if number == 0 else None
        return next((way for way in self.ways if way.number == number), None)

    @property
    def neighbours(self) -> frozenset[str]:
        """The peers before and after this hop, on all ways."""
        named = ((way.predecessor, way.successor) for way in self.ways)
        return frozenset(peer for pair in (*named, (self.predecessor, self.successor)) for peer in pair if peer)

    def runs(self) -> list[Span]:
        """The hop's blocks, divided into those that others hold too, run by run, and those that are its own."""
        bounds = {self.span.start, self.span.stop, *(bound for run in self.shared for bound in (run.start, run.stop))}
        return [Span(start, stop) for start, stop in pairwise(sorted(bounds))]


class ReduceOrder(NamedTuple):
    """Which sums to hand over: those of `round`, counted from 0 in each version, of these blocks."""

    round: int
    wanted: tuple[Span, ...]


class Tally(NamedTuple):
    """What the sums of a hop's blocks contain."""

    counted: tuple[tuple[Span, frozenset[int]], ...]  # micro-batches, for each run of blocks
    squared_norms: tuple[float, ...]  # of the summed gradients, block by block
    sent_bytes: tuple[tuple[str, int], ...] = ()  # of the hop in this epoch: to each neighbour, "" is the owner


class StepOrder(NamedTuple):
    """How to make the next version: the learning rate, and factors on the summed gradients."""

    rate: float
    scale: float
    clip: float


# --- passes -----------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """The heading of a FORWARD or BACK frame: which micro-batch at which version, in which attempt."""

    version: int
    number: int
    attempt: int
    way: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Micro-batch and way: a later attempt replaces an earlier one here, and nothing that comes on another way."""
        return self.number, self.way


def pass_of(frame: Frame) -> Pass:
    """Return which pass a FORWARD or BACK frame belongs to."""
    return Pass(frame.position, frame.revision // MAX_ATTEMPTS, frame.revision % MAX_ATTEMPTS, frame.rows // _LENGTHS)


def length_of(frame: Frame) -> int:
    """Return the tokens of one sequence in a FORWARD or BACK frame."""
    return frame.rows % _LENGTHS


def sequences_of(frame: Frame) -> int:
    """Return the number of sequences in the body of a FORWARD or BACK frame."""
    if frame.dtype != FORMATS[CHANGES]:
        return len(frame.body) // (length_of(frame) * row_bytes(frame.dtype, frame.width))
    if frame.kind == Kind.FORWARD:
        return int.from_bytes(frame.body[: _COUNT.size], "little")
    return len(frame.body) // (length_of(frame) * row_bytes(DTYPES[INT8], frame.width) + 1)


def pass_header(
    kind: Kind, run: bytes, epoch: int, heading: Pass, *, dtype: str, rows: int, width: int, length: int
) -> bytes:
    """Encode the header of a FORWARD or BACK frame; `rows` are those of one sequence."""
    version, number, attempt, way = heading
    return header(
        kind, run, epoch, version, dtype=FORMATS[dtype], revision=number * MAX_ATTEMPTS + attempt,
        rows=way * _LENGTHS + rows, width=width, length=length,
    )  # fmt: skip


def decode(message: bytes) -> Frame:
    """Decode and check one message; raises `RecordError` if it is not a valid frame."""
    frame = split(message, "training")
    if frame.kind in (Kind.FORWARD, Kind.BACK) and frame.dtype == FORMATS[CHANGES]:
        _check_changes(frame)
    elif frame.kind in PASSES:
        sequences = 0
        if frame.dtype in DTYPES.values() and length_of(frame) and frame.width:
            sequences = sequences_of(frame)
        check_numbers(frame, "training", sequences * length_of(frame))
    elif frame.kind == Kind.SUMS:
        length = len(frame.body)
        if frame.dtype != DTYPES["f32"] or not 0 < length <= SLICE_BYTES or length % 4:
            raise RecordError(f"training frame: {length} bytes are no slice of sums")
    elif frame.kind not in _KINDS or len(frame.body) > (MAX_JSON_BYTES if frame.kind in _WITH_JSON else 0):
        raise RecordError(
            f"training frame: kind {frame.kind} with {len(frame.body)} bytes is not understood; update Shoal"
        )
    return frame


# --- changes ----------------------------------------------------------------------------------------------------------

_COUNT, _SEQUENCE = struct.Struct("<H"), struct.Struct("<IBH8s")
DIGEST_BYTES = 8
NO_BASE = bytes(DIGEST_BYTES)
MAX_SAMPLES = 2**32


class SequenceRows(NamedTuple):
    """One sequence in a FORWARD of changes."""

    sample: int
    form: Form
    known: int  # rows that are made from what the receiver keeps
    base: bytes  # digest of that
    changes: bytes | memoryview  # of the known rows
    rest: bytes | memoryview  # the other rows, as int8


def digest_of(rows: bytes | memoryview) -> bytes:
    """Return the digest by which two ends of a link make sure that they keep the same rows."""
    return hashlib.blake2b(rows, digest_size=DIGEST_BYTES).digest()


def join_sequences(sequences: Sequence[SequenceRows]) -> bytes:
    """Encode the body of a FORWARD of changes."""
    parts: list[bytes | memoryview] = [_COUNT.pack(len(sequences))]
    for one in sequences:
        parts += (_SEQUENCE.pack(one.sample, one.form, one.known, one.base), one.changes, one.rest)
    return b"".join(parts)


def split_sequences(frame: Frame) -> list[SequenceRows]:
    """Decode the body of a FORWARD of changes; raises `RecordError` if it is not one."""
    from engine import int4_changes  # loads numpy, which light starts do without

    length, at, found = length_of(frame), _COUNT.size, []
    changed_bytes, whole_bytes = int4_changes.row_bytes(frame.width), row_bytes(DTYPES[INT8], frame.width)
    for _ in range(sequences_of(frame)):
        if at + _SEQUENCE.size > len(frame.body):
            raise RecordError("training frame: changes of fewer sequences than it says")
        sample, form, known, base = _SEQUENCE.unpack_from(frame.body, at)
        is_known = form in (Form.CHANGED, Form.UNCHANGED)
        if form > Form.UNCHANGED or known > length or is_known != (known > 0) or is_known != (base != NO_BASE):
            raise RecordError(f"training frame: {known} known rows of {length} in form {form} are not possible")
        first = at + _SEQUENCE.size
        second = first + known * changed_bytes * (form == Form.CHANGED)
        at = second + (length - known) * whole_bytes
        found.append(SequenceRows(sample, Form(form), known, base, frame.body[first:second], frame.body[second:at]))
    if at != len(frame.body):
        raise RecordError(f"training frame: {len(frame.body)} bytes do not match {len(found)} sequences of changes")
    return found


def with_kept(rows: bytes, kept: Sequence[bool]) -> bytes:
    """Encode the body of a BACK in a job of changes: rows of int8, and which sequences are kept."""
    return rows + bytes(kept)


def split_kept(frame: Frame) -> tuple[Frame, list[bool]]:
    """Return a BACK of a job of changes as one with rows of int8, and which sequences its sender keeps."""
    at = len(frame.body) - sequences_of(frame)
    return frame._replace(dtype=DTYPES[INT8], body=frame.body[:at]), [flag == 1 for flag in frame.body[at:]]


def _check_changes(frame: Frame) -> None:
    """Raise `RecordError` unless a frame of changes is consistent and within the bounds of others."""
    length = length_of(frame)
    rows = length * sequences_of(frame) if length and 0 < frame.width <= MAX_WIDTH else 0
    if not (0 < rows <= MAX_ROWS and len(frame.body) <= MAX_DATA_BYTES):
        raise RecordError(f"training frame: {rows} rows of changes of {frame.width} numbers are out of bounds")
    if frame.kind == Kind.FORWARD:
        split_sequences(frame)
    elif len(frame.body) != rows * row_bytes(DTYPES[INT8], frame.width) + rows // length:
        raise RecordError(f"training frame: {len(frame.body)} bytes do not match {rows} rows of {frame.width} numbers")


# --- orders and answers -----------------------------------------------------------------------------------------------


def encode_open(run: bytes, epoch: int, version: int, order: JobOrder) -> bytes:
    """Encode an OPEN frame, which begins an epoch at a hop."""
    values: dict[str, object] = {
        "v": VERSION, "start": order.span.start, "stop": order.span.stop, "before": order.predecessor,
        "after": order.successor, "decay": order.weight_decay, "rows": order.rows, "under_way": order.under_way,
        "wire": order.wire, "states": _parts_json(order.states), "holders": list(order.holders),
    }  # fmt: skip
    if order.shape is not None:  # a hop that trains adapters only misses the rank, and refuses
        values |= {"shape": dict(order.shape), "optimiser": order.optimiser}
    else:
        values |= {"rank": order.rank, "alpha": order.alpha, "targets": list(order.targets)}
        values |= {"dropout": order.dropout, "seed": order.seed}
    if order.ways:
        values["ways"] = [[w.number, w.span.start, w.span.stop, w.predecessor, w.successor] for w in order.ways]
    if order.shared:
        values["shared"] = _spans_json(order.shared)
    if order.keeps:
        values["keep"] = True
    return with_json(Kind.OPEN, run, epoch, version, values)


def decode_open(frame: Frame) -> JobOrder:
    """Decode an OPEN frame's order; raises `RecordError` if a field is missing or out of bounds."""
    fields = _fields(frame, "open")
    check_version(fields, "v", VERSION)
    span = _span(fields, fields.integer("start", 0, MAX_BLOCKS), fields.integer("stop", 0, MAX_BLOCKS))
    wire = fields.text("wire", 8)
    if wire not in FORMATS or (wire == CHANGES and "shape" in fields.values):
        fields.refuse("wire", f"one of {', '.join(FORMATS)}, and not {CHANGES} if all weights are trained")
    states, keeps = _parts_from(fields), fields.flag("keep", False)
    if len(states) != (len(span) if frame.position and not keeps else 0):
        fields.refuse("states", "one for each block, or none at version 0")
    shared = _spans(fields, "shared", span)
    is_full = "shape" in fields.values
    optimiser = fields.text("optimiser", 8) if is_full else "adamw"
    if optimiser not in OPTIMISERS:
        fields.refuse("optimiser", f"one of {', '.join(OPTIMISERS)}")
    return JobOrder(
        span=span,
        predecessor=fields.text("before", 128),
        successor=fields.text("after", 128),
        rank=0 if is_full else fields.integer("rank", 1, MAX_RANK),
        alpha=0.0 if is_full else fields.number("alpha", 1e-6, 1e6),
        targets=() if is_full else fields.texts("targets", 16, 16),
        dropout=0.0 if is_full else fields.number("dropout", 0, 0.99),
        seed=0 if is_full else fields.integer("seed", 0, 2**63),
        weight_decay=fields.number("decay", 0, 1e3),
        rows=fields.integer("rows", 1, MAX_ROWS),
        under_way=fields.integer("under_way", 1, MAX_UNDER_WAY),
        wire=wire,
        states=states,
        holders=fields.texts("holders", MAX_HOLDERS, 128),
        ways=_ways(fields, span, shared),
        shared=shared,
        keeps=keeps,
        shape=dict(fields.inner("shape").values) if is_full else None,
        optimiser=optimiser,
    )


def full_order(
    shape: Mapping[str, Any], *, blocks: int, optimiser: str, weight_decay: float, rows: int, wire: str
) -> JobOrder:
    """Return the order of a job that trains all weights, for all blocks; the owner fills in each hop's part."""
    return JobOrder(
        Span(0, blocks), "", "", rank=0, alpha=0.0, targets=(), dropout=0.0, seed=0, weight_decay=weight_decay,
        rows=rows, under_way=1, wire=wire, shape=shape, optimiser=optimiser,
    )  # fmt: skip


def encode_reduce(run: bytes, epoch: int, version: int, order: ReduceOrder) -> bytes:
    """Encode the owner's REDUCE frame."""
    values: dict[str, object] = {"round": order.round, "wanted": _spans_json(order.wanted)}
    return with_json(Kind.REDUCE, run, epoch, version, values)


def decode_reduce(frame: Frame, order: JobOrder) -> ReduceOrder:
    """Decode the owner's REDUCE frame; raises `RecordError` unless others hold the wanted blocks too."""
    fields = _fields(frame, "reduce")
    wanted = _spans(fields, "wanted", order.span)
    if not set(wanted) <= set(order.shared):
        fields.refuse("wanted", "runs of blocks that others hold too")
    return ReduceOrder(fields.integer("round", 0, MAX_ROUNDS), wanted)


def sums_frames(run: bytes, epoch: int, version: int, number: int, data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield header and body of each SUMS frame that the numbers of a round take."""
    for index, at in enumerate(range(0, len(data), SLICE_BYTES)):
        body = data[at : at + SLICE_BYTES]
        head = header(
            Kind.SUMS, run, epoch, version, dtype=DTYPES["f32"], revision=index, width=number, length=len(body)
        )  # fmt: skip
        yield head, body


class SumsBuffer:
    """Puts the slices of sums together; the first slice begins anew."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._data = bytearray()
        self._next = 0

    def add(self, frame: Frame) -> bytes | None:
        """Take a slice; return the whole once it is complete. Raises `RecordError` for a slice that does not follow."""
        if frame.revision == 0:
            self._data, self._next = bytearray(), 0
        self._data += frame.body
        left = self._size_bytes - len(self._data)
        if frame.revision != self._next or left < 0 or (left and len(frame.body) != SLICE_BYTES):
            raise RecordError(f"sums: slice {frame.revision} of {len(frame.body)} bytes does not follow")
        self._next += 1
        return None if left else bytes(self._data)


def encode_tally(run: bytes, epoch: int, version: int, tally: Tally) -> bytes:
    """Encode a hop's TALLY frame."""
    counted = [[span.start, span.stop, _bitmap(numbers)] for span, numbers in tally.counted]
    norms = list(tally.squared_norms)
    values: dict[str, object] = {"counted": counted, "norms": norms, "sent": [list(one) for one in tally.sent_bytes]}
    return with_json(Kind.TALLY, run, epoch, version, values)


def decode_tally(frame: Frame, runs: Sequence[Span]) -> Tally:
    """Decode the TALLY of a hop that trains these runs; raises `RecordError` unless it is about exactly these."""
    fields = _fields(frame, "tally")
    counted, items = [], fields.items("counted", len(runs))
    for run, item in zip(runs, items, strict=False):
        match item:
            case [int(start), int(stop), str(bits)] if (start, stop) == (run.start, run.stop):
                counted.append((run, _numbers(fields, bits)))
            case _:
                fields.refuse("counted", f"the runs {', '.join(map(str, runs))}")
    norms = fields.items("norms", MAX_BLOCKS)
    if len(items) != len(runs) or len(norms) != sum(map(len, runs)):
        fields.refuse("counted", f"the runs {', '.join(map(str, runs))}, and a norm for each block")
    sent = []
    for item in fields.items("sent", MAX_NEIGHBOURS, []):
        match item:
            case [str(peer), int(size)] if 0 <= size < 2**62:
                sent.append((peer, size))
            case _:
                fields.refuse("sent", "peers and numbers of bytes")
    return Tally(tuple(counted), tuple(_number(fields, "norms", value) for value in norms), tuple(sent))


def encode_step(run: bytes, epoch: int, version: int, order: StepOrder) -> bytes:
    """Encode the owner's STEP frame."""
    return with_json(Kind.STEP, run, epoch, version, dict(order._asdict()))


def decode_step(frame: Frame) -> StepOrder:
    """Decode the owner's STEP frame; raises `RecordError`."""
    fields = _fields(frame, "step")
    return StepOrder(fields.number("rate", 0, 1e3), fields.number("scale", 0, 1), fields.number("clip", 0, 1))


def encode_parts(
    kind: Kind, run: bytes, epoch: int, version: int, parts: Iterable[StatePart], holders: Iterable[str] = ()
) -> bytes:
    """Encode a hop's SNAPSHOT or the owner's KEEP frame."""
    return with_json(kind, run, epoch, version, {"parts": _parts_json(parts), "holders": list(holders)})


def decode_parts(frame: Frame) -> tuple[tuple[StatePart, ...], tuple[str, ...]]:
    """Decode a SNAPSHOT or KEEP frame: states and peers that have them; raises `RecordError`."""
    fields = _fields(frame, "parts")
    return _parts_from(fields, "parts"), fields.texts("holders", MAX_HOLDERS, 128, [])


def encode_trouble(run: bytes, epoch: int, version: int, trouble: HopError) -> bytes:
    """Encode a TROUBLE frame; its text is cut to 400 characters."""
    return encode_error(Kind.TROUBLE, run, epoch, version, trouble)


def most_state_bytes(sums_bytes: int) -> int:
    """Bytes of a block's state: adapter or weights, and both moments, each as many numbers as its sums; a heading."""
    return STATE_WEIGHT_BYTES // 4 * sums_bytes + _STATE_HEADING_BYTES


def reading_cost(frame: Frame) -> float:
    """Return as how many frames one counts at the limit of `FRAMES_PER_S`: JSON takes long to read."""
    return 1 + len(frame.body) / FRAME_JSON_BYTES if frame.kind in _WITH_JSON else 1


def frame_bytes(frame: Frame) -> int:
    """Bytes of a frame on the wire."""
    return HEADER_BYTES + len(frame.body)


# --- fields -----------------------------------------------------------------------------------------------------------


def _fields(frame: Frame, what: str) -> Fields:
    return decode_object(bytes(frame.body), what, max_bytes=MAX_JSON_BYTES)


def _span(fields: Fields, start: int, stop: int) -> Span:
    if not Span.is_possible(start, stop):
        fields.refuse("stop", "more than start")
    return Span(start, stop)


def _spans_json(spans: Iterable[Span]) -> list[list[int]]:
    return [[span.start, span.stop] for span in spans]


def _spans(fields: Fields, name: str, within: Span) -> tuple[Span, ...]:
    """Return runs of blocks that follow each other within some blocks."""
    spans: list[Span] = []
    for item in fields.items(name, MAX_BLOCKS, []):
        match item:
            case [int(start), int(stop)] if (spans[-1].stop if spans else within.start) <= start < stop <= within.stop:
                spans.append(Span(start, stop))
            case _:
                fields.refuse(name, f"runs of the blocks {within}, one after another")
    return tuple(spans)


def _ways(fields: Fields, span: Span, shared: tuple[Span, ...]) -> tuple[HopWay, ...]:
    ways: dict[int, HopWay] = {}
    within_runs = {block for run in shared for block in range(run.start + 1, run.stop)}  # no way begins or ends there
    for item in fields.items("ways", MAX_WAYS, []):
        match item:
            case [int(number), int(start), int(stop), str(before), str(after)] if (
                0 <= number < MAX_WAYS
                and number not in ways
                and span.start <= start < stop <= span.stop
                and max(len(before), len(after)) <= 128
                and within_runs.isdisjoint((start, stop))
            ):
                ways[number] = HopWay(number, Span(start, stop), before, after)
            case _:
                fields.refuse("ways", f"ways through whole runs of the blocks {span}")
    return tuple(ways.values())


def _parts_json(parts: Iterable[StatePart]) -> list[list[object]]:
    return [[part.root.hex(), part.size_bytes] for part in parts]


def _parts_from(fields: Fields, name: str = "states") -> tuple[StatePart, ...]:
    parts = []
    for item in fields.items(name, MAX_BLOCKS):
        match item:
            case [str(text), int(size)] if len(text) == 2 * HASH_BYTES and 0 < size <= MAX_STATE_BYTES:
                one = Fields(fields.what, {name: text})
                parts.append(StatePart(one.hex_bytes(name, HASH_BYTES), size))
            case _:
                fields.refuse(name, "pairs of a hash and a number of bytes")
    return tuple(parts)


def _bitmap(numbers: Iterable[int]) -> str:
    bits = sum(1 << number for number in numbers)
    return bits.to_bytes(-(-bits.bit_length() // 8), "little").hex()


def _numbers(fields: Fields, text: str) -> frozenset[int]:
    try:
        raw = bytes.fromhex(text[: MAX_MICRO_BATCHES // 4 + 2])
    except ValueError:
        raw = b""
    if raw.hex() != text or len(raw) > MAX_MICRO_BATCHES // 8:
        fields.refuse("counted", f"a bitmap of at most {MAX_MICRO_BATCHES} bits in lower-case hex")
    bits = f"{int.from_bytes(raw, 'little'):b}"
    return frozenset(number for number, bit in enumerate(reversed(bits)) if bit == "1")


def _number(fields: Fields, name: str, value: Any) -> float:
    return Fields(fields.what, {name: value}).number(name, 0, 1e300)
