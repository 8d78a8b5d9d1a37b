"""The state of one session at one hop: which frames it accepts and which outputs it keeps. Pure: no I/O, no clock.

Invariants, by which duplicates, late frames and frames of dead routes do no harm:
- only the asker raises the epoch, and nothing of another epoch is accepted;
- `received` grows without gaps, and shrinks only by an explicit cut, in a new epoch or with rows of a new revision;
- outputs kept up to `length` are exactly what this hop computed for the tokens its cache holds.

A session that rests (`rest`) accepts nothing: its cache waits for a new session that begins with the same tokens, and
is the first to go when others need the room. One whose cache is on its way from another hop (`fetching`) accepts
nothing either until it is there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from app.core.smoothing import Ewma
from app.serving.adapters import LoadedAdapter
from app.serving.stats import SessionStats
from app.session.wire import KEEP, CacheGrant, EpochOrder, HopPace

SMOOTHING = 0.1  # of times a step
MAX_RECEIVERS = 8  # peers that may fetch one session's cache
RESTING_PLACE_TOKENS = 64  # a session's place counts as much as these tokens of cache
KEPT_BYTES = 64 * 2**20  # of one session's outputs; earlier ones are computed again where they are needed again


class FrameAction(Enum):
    """Verdict on a frame of hidden states."""

    COMPUTE = "compute"
    CUT = "cut"  # drop everything from its position on, then compute it
    REPEAT = "repeat"  # answer from the kept outputs
    DROP = "drop"
    GAP = "gap"  # refuse it and tell the asker


@dataclass(slots=True)
class SessionCounters:
    """The counters of one session."""

    opened_at: float
    worked_at: float = field(init=False)  # when its last step ended; until the first, when it was opened
    tokens: int = 0
    step_s: Ewma = field(default_factory=lambda: Ewma(SMOOTHING))  # a device step of single tokens
    queue_s: Ewma = field(default_factory=lambda: Ewma(SMOOTHING))  # a token's wait for it
    host_s: Ewma = field(default_factory=lambda: Ewma(SMOOTHING))  # from the step's end until its output was sent
    bytes_in: int = 0
    bytes_out: int = 0

    def __post_init__(self) -> None:
        self.worked_at = self.opened_at

    def stepped(self, rows: int, pace: HopPace, ended_at: float, *, urgent: bool) -> None:
        """Count a device step of `rows` tokens; only urgent ones tell how long a single token takes."""
        self.tokens += rows
        self.worked_at = ended_at
        if urgent:
            self.step_s.add(pace.step_s)
            self.queue_s.add(pace.queue_s)
            self.host_s.add(pace.host_s)

    @property
    def pace(self) -> HopPace:
        """The usual times of a single token."""
        return HopPace(self.step_s.value, self.queue_s.value, self.host_s.value)


class KeptOutputs:
    """The outputs of positions [start, stop), in the chunks in which they were computed, all of one number format.

    Chunks are never changed, so that forks share them, as do frames on their way.
    """

    __slots__ = ("_at", "_bytes", "_chunks", "dtype", "row_bytes", "start", "stop")

    def __init__(self, start: int = 0) -> None:
        self.start = self.stop = start
        self.row_bytes = 0  # of one output; known with the first
        self.dtype = ""
        self._at: list[int] = []  # the position at which each chunk begins
        self._chunks: list[bytes | memoryview] = []  # a view is of a chunk whose end was cut
        self._bytes = 0

    def __len__(self) -> int:
        """Bytes of memory that they take, whoever else shares it."""
        return self._bytes

    def append(self, rows: int, data: bytes, dtype: str) -> None:
        """Add the outputs of the next `rows` tokens; the first ones are forgotten beyond `KEPT_BYTES`."""
        self.row_bytes, self.dtype = len(data) // rows, dtype
        self._at.append(self.stop)
        self._chunks.append(data)
        self._bytes += len(data)
        self.stop += rows
        while self._bytes > KEPT_BYTES and len(self._at) > 1:
            self.forget_before(self._at[1])

    def parts(self, start: int, stop: int) -> tuple[bytes | memoryview, ...] | None:
        """The outputs of positions [start, stop), one part after another, or None if some are not kept."""
        if not self.start <= start < stop <= self.stop:
            return None
        first, last = bisect_right(self._at, start) - 1, bisect_right(self._at, stop - 1)
        chunks = self._chunks[first:last]
        chunks[-1] = _rows(chunks[-1], 0, (stop - self._at[last - 1]) * self.row_bytes)
        chunks[0] = _rows(chunks[0], (start - self._at[first]) * self.row_bytes, len(chunks[0]))
        return tuple(chunks)

    def forget_before(self, position: int) -> None:
        """Drop what comes before this position."""
        self.start = min(max(position, self.start), self.stop)
        whole = bisect_right(self._at, self.start) - (self.start < self.stop)
        if whole > 0:
            self._bytes -= sum(_memory_of(chunk) for chunk in self._chunks[:whole])
            del self._at[:whole], self._chunks[:whole]

    def cut(self, stop: int) -> None:
        """Drop what comes from this position on."""
        self._end_at(stop)
        if self._chunks and 2 * len(last := self._chunks[-1]) < (held := _memory_of(last)):
            self._chunks[-1] = bytes(last)  # else a few outputs could hold the memory of many
            self._bytes -= held - len(last)

    def fork(self, stop: int) -> KeptOutputs:
        """Those of them that come before this position, for another session."""
        fork = KeptOutputs(self.start)
        fork.row_bytes, fork.dtype, fork.stop = self.row_bytes, self.dtype, self.stop
        fork._at, fork._chunks, fork._bytes = self._at.copy(), self._chunks.copy(), self._bytes
        fork._end_at(stop)
        return fork

    def _end_at(self, stop: int) -> None:
        if stop <= self.start:
            self.start, self._bytes = stop, 0
            self._at.clear()
            self._chunks.clear()
        while self._at and self._at[-1] >= stop:
            self._at.pop()
            self._bytes -= _memory_of(self._chunks.pop())
        if self._at:
            self._chunks[-1] = _rows(self._chunks[-1], 0, (stop - self._at[-1]) * self.row_bytes)
        self.stop = stop


def _rows(chunk: bytes | memoryview, first: int, stop: int) -> bytes | memoryview:
    """Return a part of a chunk, without a copy."""
    return chunk if (first, stop) == (0, len(chunk)) else memoryview(chunk)[first:stop]


def _memory_of(chunk: bytes | memoryview) -> int:
    """Return the bytes that a chunk holds, with those that were cut off."""
    return len(chunk) if isinstance(chunk, bytes) else memoryview(chunk.obj).nbytes


def session_key(asker: str, id: bytes) -> bytes:
    """The key of a session at this hop."""
    return id + asker.encode()


class HopSession:
    """The state of one session at one hop."""

    __slots__ = (
        "adapter", "asker", "counters", "epoch", "fetching", "gap_told", "given_to", "heard_at", "home", "id",
        "is_over", "kept", "key", "length", "received", "rests_until", "revision", "send_from", "turn",
    )  # fmt: skip

    def __init__(
        self, id: bytes, asker: str, epoch: int, turn: EpochOrder, heard_at: float, home: str | None = None
    ) -> None:
        self.id, self.asker, self.epoch, self.turn = id, asker, epoch, turn
        self.home = asker if home is None else home  # `app.serving.homes`
        self.key = session_key(asker, id)
        self.revision = 0  # of the tokens within the epoch
        self.received = 0  # tokens accepted; those from `length` on wait for the device
        self.length = 0  # tokens in the cache
        self.send_from = turn.send_from  # the successor needs outputs from here on; None: not told yet
        self.kept = KeptOutputs()  # up to `length`
        self.heard_at = heard_at
        self.rests_until: float | None = None  # None: it is in use
        self.adapter: LoadedAdapter | None = None  # that `turn` names
        self.is_over = False  # it ends before the next step, and accepts nothing more
        self.fetching = False  # its cache is on its way from another hop
        self.gap_told = False  # the asker knows that the predecessor's rows do not follow, in this epoch
        self.given_to: dict[str, int] = {}  # peers that may fetch its cache, of so many tokens
        self.counters = SessionCounters(heard_at)

    def goes_on_with(self, turn: EpochOrder) -> bool:
        """True where a new order keeps what the session holds: cache room, blocks, adapter and the form of its outputs.

        Outputs of two formats must never lie in `kept` together: their rows differ in size.
        """
        old = self.turn
        kept = (turn.span, turn.tokens, turn.wire, turn.adapter)
        return (old.span, old.tokens, old.wire, old.adapter) == kept

    def shares_with(self, turn: EpochOrder) -> int:
        """Number of cached tokens that a session of this asker with this order can begin with."""
        own = self.turn
        if turn.prefix is None or (own.span, own.wire, own.adapter) != (turn.span, turn.wire, turn.adapter):
            return 0
        return min(turn.prefix.tokens, self.length, turn.tokens)

    def begin_with(self, source: HopSession, length: int) -> None:
        """Begin with the first `length` tokens of another session, as the cache does, and with what it keeps of them.

        That is nothing if it was cut to fewer tokens while the device was at work.
        """
        assert not self.received, "a session begins once"
        self.received = self.length = length
        self.kept = source.kept.fork(length) if length <= source.length else KeptOutputs(length)

    def took(self, rows: int) -> None:
        """Count `rows` more tokens, whose cache came from another hop; their outputs are not kept here."""
        assert self.received == self.length, "nothing is computed before the cache has come"
        self.length += rows
        self.received = self.length
        self.kept = KeptOutputs(self.length)

    def give_to(self, grant: CacheGrant) -> None:
        """Let a peer fetch the cache, as the asker orders; a few may, if they share the blocks among them."""
        if len(self.given_to) < MAX_RECEIVERS or grant.peer in self.given_to:
            self.given_to[grant.peer] = grant.tokens

    def took_nothing(self) -> None:
        """Forget all tokens: something was wrong with the cache that another hop sent."""
        self._drop_from(0)
        self.received = 0

    def rest(self, until: float) -> None:
        """Accept nothing more; the cache stays until then at most."""
        self.rests_until, self.received, self.fetching = until, self.length, False

    def begin_epoch(self, epoch: int, cut_to: int, turn: EpochOrder) -> None:
        """Take the asker's new order; what waits for the device is forgotten, and the cache is cut where it says so."""
        assert epoch > self.epoch, "an epoch begins once"
        self.epoch, self.revision, self.turn = epoch, 0, turn
        self.fetching = self.gap_told = False
        self.given_to.clear()
        if cut_to != KEEP and cut_to < self.length:
            self._drop_from(cut_to)
        self.received = self.length
        self.send_from = turn.send_from

    def begin_revision(self, revision: int, cut_to: int) -> None:
        """Drop the tokens from `cut_to` on, as rows of a new revision order; what waits for the device is forgotten."""
        assert revision > self.revision, "a revision begins once"
        assert cut_to <= self.length, "only tokens that were computed are cut"
        self.revision = revision
        self._drop_from(cut_to)
        self.received = cut_to
        if self.send_from is not None:
            self.send_from = min(self.send_from, cut_to)

    def _drop_from(self, position: int) -> None:
        self.length = position
        self.kept.cut(position)

    def hears(self, sender: str, epoch: int) -> bool:
        """True if this peer may send hidden states in this epoch, and the session is not over."""
        may_send = sender in (self.turn.predecessor or self.asker, self.asker)
        return epoch == self.epoch and may_send and not self.is_over and self.rests_until is None

    def judge(self, sender: str, epoch: int, position: int, rows: int, revision: int = 0) -> FrameAction:
        """What to do with hidden states for [position, position + rows) that `sender` sent.

        A gap in what another hop sends is told once an epoch: the asker has to begin another one.
        """
        if not self.hears(sender, epoch):
            return FrameAction.DROP
        action = self._judge(sender, position, rows, revision)
        if action is FrameAction.GAP and sender != self.asker:
            action, self.gap_told = FrameAction.DROP if self.gap_told else action, True
        return action

    def _judge(self, sender: str, position: int, rows: int, revision: int) -> FrameAction:
        if self.fetching:
            return FrameAction.DROP
        stop = position + rows
        if revision < self.revision:
            return FrameAction.DROP
        if revision > self.revision:
            return FrameAction.CUT if position <= self.length and stop <= self.turn.tokens else FrameAction.GAP
        if position == self.received:
            return FrameAction.COMPUTE if stop <= self.turn.tokens else FrameAction.GAP
        if stop <= self.length:
            # Only the asker has rows answered again: two hops that repeat to each other would never end.
            return FrameAction.REPEAT if sender == self.asker else FrameAction.DROP
        # What waits for the device already will be answered when it is done.
        return FrameAction.DROP if stop <= self.received else FrameAction.GAP

    def accepted(self, rows: int) -> None:
        """Count `rows` more tokens as received; they wait for the device."""
        self.received += rows

    def computed(self, rows: int, output: bytes, dtype: str) -> None:
        """The device is done with the next tokens: keep what came out."""
        self.length += rows
        self.kept.append(rows, output, dtype)

    def forget_before(self, position: int) -> None:
        """Drop kept outputs before this position: they will not be asked for."""
        self.kept.forget_before(position)

    def idle_s(self, now: float) -> float:
        """Seconds for which nothing was computed, and nothing of it waits for the device."""
        return 0.0 if self.received > self.length else now - self.counters.worked_at

    def stats(self, now: float) -> SessionStats:
        """The session's figures at this hop."""
        counters, span = self.counters, self.turn.span
        return SessionStats(
            session=self.id.hex(),
            asker=self.asker,
            start=span.start,
            stop=span.stop,
            tokens=counters.tokens,
            age_s=now - counters.opened_at,
            quiet_s=now - self.heard_at,
            step_s=counters.step_s.value,
            queue_s=counters.queue_s.value,
            bytes_in=counters.bytes_in,
            bytes_out=counters.bytes_out,
            rests=self.rests_until is not None,
        )

    def evict(self) -> int:
        """Drop all kept outputs; returns the number of bytes that this frees."""
        freed = len(self.kept)
        self.kept = KeptOutputs(self.length)
        return freed


def resting_to_end(sessions: Iterable[HopSession]) -> HopSession | None:
    """The resting session that makes room for others: of the home with the most cache at rest, and of its asker with
    the most, the oldest.

    Whoever opens and rests many sessions so displaces its own, and not those of others.
    """
    resting = [session for session in sessions if session.rests_until is not None]
    if not resting:
        return None
    held = _by_holder((session, session.length + RESTING_PLACE_TOKENS) for session in resting)
    return min(resting, key=lambda one: (-held[one.home, ""], -held[one.home, one.asker], one.heard_at, one.id))


def first_to_evict(sessions: list[HopSession]) -> HopSession:
    """The session whose kept outputs are dropped first: of the home with the most of them, and of its asker with the
    most, the one silent for longest.

    Whoever opens many sessions so loses its own outputs, and not those of others.
    """
    held = _by_holder((session, len(session.kept)) for session in sessions)
    kept = (session for session in sessions if session.kept)
    return min(kept, key=lambda one: (-held[one.home, ""], -held[one.home, one.asker], one.heard_at, one.id))


def _by_holder(amounts: Iterable[tuple[HopSession, int]]) -> Counter[tuple[str, str]]:
    """Sums of what sessions have, by home and asker, and by home and ""."""
    held: Counter[tuple[str, str]] = Counter()
    for session, amount in amounts:
        held[session.home, session.asker] += amount
        held[session.home, ""] += amount
    return held
