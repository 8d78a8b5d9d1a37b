"""What a block server has done and is doing, in numbers: counted as it happens, read as frozen values.

Counting costs a few additions a step. Rates are for the reader: two readings and the time between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_SMOOTH = 0.1
_REMEMBERED_ASKERS = 4096


@dataclass(frozen=True)
class SessionStats:
    """One session at this hop."""

    session: str  # the session's id in hex
    asker: str
    start: int  # blocks that it uses here
    stop: int
    tokens: int  # computed here, the prompt's included
    age_s: float
    quiet_s: float  # since something came for it
    step_s: float  # a usual device step of single tokens
    queue_s: float  # how long a token usually waits for it
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class ServerStats:
    """All of a block server since it started, and how it stands now."""

    steps: int = 0
    rows: int = 0  # tokens that went through the hosted blocks
    urgent_steps: int = 0  # of tokens that a reader awaits
    urgent_rows: int = 0
    busy_s: float = 0.0
    dropped_frames: int = 0
    bytes_in: int = 0  # hidden states that came, headers included
    bytes_out: int = 0
    opened: int = 0  # sessions
    askers: int = 0  # different peers that opened them
    usual_step_s: float = 0.0
    queued_rows: int = 0
    queued_sessions: int = 0
    kv_free_tokens: int = 0
    kv_total_tokens: int = 0
    sessions: tuple[SessionStats, ...] = ()
    served: Mapping[str, int] = field(default_factory=dict)  # tokens by asker

    @property
    def batch_rows(self) -> float:
        """Mean sessions in a step of awaited tokens."""
        return self.urgent_rows / self.urgent_steps if self.urgent_steps else 0.0


@dataclass(slots=True)
class SessionCounters:
    """The counters of one session."""

    opened_at: float
    tokens: int = 0
    step_s: float = 0.0
    queue_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    _timed: bool = False

    def stepped(self, rows: int, step_s: float, queue_s: float, *, urgent: bool) -> None:
        """A device step took these many of its tokens; only awaited ones tell what a token usually takes."""
        self.tokens += rows
        if urgent:
            share = _SMOOTH if self._timed else 1.0
            self.step_s += share * (step_s - self.step_s)
            self.queue_s += share * (queue_s - self.queue_s)
            self._timed = True


@dataclass(slots=True)
class ServerCounters:
    """The counters of a server; those of sessions that ended stay in its sums."""

    steps: int = 0
    rows: int = 0
    urgent_steps: int = 0
    urgent_rows: int = 0
    busy_s: float = 0.0
    dropped_frames: int = 0
    opened: int = 0
    usual_step_s: float = 0.0
    _bytes_in: int = 0  # of sessions that ended
    _bytes_out: int = 0
    _askers: set[str] = field(default_factory=set)
    _served: dict[str, int] = field(default_factory=dict)

    def opened_by(self, asker: str) -> None:
        """A session began."""
        self.opened += 1
        if len(self._askers) < _REMEMBERED_ASKERS:
            self._askers.add(asker)

    def served(self, asker: str, rows: int) -> None:
        """Tokens of this peer went through the blocks."""
        if asker in self._served or len(self._served) < _REMEMBERED_ASKERS:
            self._served[asker] = self._served.get(asker, 0) + rows

    def ended(self, session: SessionCounters) -> None:
        """A session's counters will not change any more."""
        self._bytes_in += session.bytes_in
        self._bytes_out += session.bytes_out

    def stepped(self, rows: int, seconds: float, *, urgent: bool) -> None:
        """A device step is over."""
        self.steps += 1
        self.rows += rows
        self.busy_s += seconds
        if urgent:
            self.urgent_steps += 1
            self.urgent_rows += rows
            self.usual_step_s += (_SMOOTH if self.usual_step_s else 1.0) * (seconds - self.usual_step_s)

    def read(self, sessions: Iterable[SessionStats], *, queued: tuple[int, int], kv: tuple[int, int]) -> ServerStats:
        """The figures as they stand: `queued` rows and sessions, `kv` free and total tokens."""
        sessions = tuple(sessions)
        return ServerStats(
            self.steps,
            self.rows,
            self.urgent_steps,
            self.urgent_rows,
            self.busy_s,
            self.dropped_frames,
            self._bytes_in + sum(session.bytes_in for session in sessions),
            self._bytes_out + sum(session.bytes_out for session in sessions),
            self.opened,
            len(self._askers),
            self.usual_step_s,
            *queued,
            *kv,
            sessions,
            dict(self._served),
        )
