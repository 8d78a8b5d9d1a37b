"""Which waiting tokens the next device step takes, and whom a hop admits. Pure: callers bring the time and the work.

Every step takes all the sessions that wait. Tokens that a reader awaits (urgent) go before those that fill a cache
(bulk); bulk goes in chunks and gets every second step at least, so neither waits for more than one step of the other.
Within each kind peers take turns, so that one greedy peer cannot starve the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

URGENT_ROWS = 8  # more tokens than this are bulk, whoever awaits them
RECENT = 32.0  # steps since a session was here last, for it to count as active
LONG_WAIT = 3.0  # steps that few may wait for many
PATIENT_EVERY = 16  # tokens between two such waits of a session
_SMOOTH = 0.25


@dataclass(frozen=True, slots=True)
class Waiting:
    """Tokens of one session that wait for the device."""

    session: bytes
    peer: str  # the asker, for fairness
    epoch: int
    position: int
    rows: int
    data: memoryview
    dtype: str
    urgent: bool
    arrived_at: float


@dataclass(frozen=True)
class BatchLimits:
    """How large a step may grow and how long it may wait for company."""

    chunk_rows: int = 256
    urgent_rows: int = 64
    max_step_s: float = 0.1  # a step longer than this is waited for no longer than such a one


class BatchQueue:
    """What waits for one device."""

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self._limits = limits or BatchLimits()
        self._queues: dict[bytes, deque[Waiting]] = {}  # per session, in order
        self._bulk_next = False
        self._served: dict[str, int] = {}  # when each peer was last served, in steps
        self._steps = 0
        self._step_s = 0.0  # a usual urgent step
        self._left_at: dict[bytes, float] = {}  # when a session's last urgent output went out
        self._away_s: dict[bytes, float] = {}  # how long it usually takes to come back
        self._patient_at: dict[bytes, int] = {}  # the position at which a session last waited for long
        self.rows = 0

    @property
    def sessions(self) -> int:
        """How many sessions wait."""
        return len(self._queues)

    def put(self, work: Waiting) -> None:
        """Add tokens behind those of the same session."""
        self._queues.setdefault(work.session, deque()).append(work)
        self.rows += work.rows
        left_at = self._left_at.pop(work.session, None)
        if left_at is not None and work.urgent:
            away_s = work.arrived_at - left_at
            usual_s = self._away_s.get(work.session, away_s)
            self._away_s[work.session] = usual_s + _SMOOTH * (away_s - usual_s)

    def drop(self, session: bytes) -> None:
        """Forget what waits of a session, and that it is on its way."""
        for work in self._queues.pop(session, ()):
            self.rows -= work.rows
        self._left_at.pop(session, None)
        self._away_s.pop(session, None)
        self._patient_at.pop(session, None)

    def done(self, works: Iterable[Waiting], seconds: float, now: float) -> None:
        """A step is over and its outputs are on their way."""
        urgent = [work for work in works if work.urgent]
        if urgent:
            self._step_s += (_SMOOTH if self._step_s else 1.0) * (seconds - self._step_s)
        for work in urgent:
            self._left_at[work.session] = now

    def take(self, now: float) -> list[Waiting] | float | None:
        """The next step's work, or when to ask again, or None where nothing waits."""
        if not self._queues:
            return None
        urgent = [queue[0] for queue in self._queues.values() if queue[0].urgent]
        some_bulk = len(urgent) < len(self._queues)
        if urgent and not (self._bulk_next and some_bulk):
            later = None if some_bulk else self._worth_waiting(urgent, now)
            if later is not None:
                return later
            self._bulk_next = some_bulk
            return self._pick(urgent, self._limits.urgent_rows)
        self._bulk_next = False
        return self._pick([q[0] for q in self._queues.values() if not q[0].urgent], self._limits.chunk_rows)

    def _worth_waiting(self, urgent: list[Waiting], now: float) -> float | None:
        """Until when to wait for sessions that are on their way; None: begin now.

        Waiting delays those who are here; not waiting costs a step for those who come. Sessions that once went together
        come back together, so what is gained lasts: now and then, few wait longer for many.
        """
        step_s = min(self._step_s, self._limits.max_step_s)
        oldest_at = min(work.arrived_at for work in urgent)
        if not step_s or sum(work.rows for work in urgent) >= self._limits.urgent_rows:
            return None
        # Those who went together arrive within a moment of each other, however long they were away.
        if now < oldest_at + step_s / 8 and any(now < left_at + RECENT * step_s for left_at in self._left_at.values()):
            return oldest_at + step_s / 8
        slack_s = step_s / 4
        coming = [left_at + self._away_s.get(session, float("inf")) for session, left_at in self._left_at.items()]
        due = sorted(back_at for back_at in coming if now <= back_at + slack_s and back_at <= now + LONG_WAIT * step_s)
        if not due:
            return None
        soon = (len(urgent) + 1) * (due[0] - now) < 2 * step_s and now < oldest_at + step_s
        if soon:
            return min(oldest_at + step_s, max(due[0], now) + slack_s)
        until = oldest_at + LONG_WAIT * step_s
        if len(due) < len(urgent) or now >= until or not all(self._may_be_patient(work) for work in urgent):
            return None
        return min(until, max(due[0], now) + slack_s)

    def _may_be_patient(self, work: Waiting) -> bool:
        """Whether a session has not waited long for a while."""
        last = self._patient_at.get(work.session, -PATIENT_EVERY)
        if work.position == last or work.position >= last + PATIENT_EVERY:
            self._patient_at[work.session] = work.position
            return True
        return False

    def _pick(self, heads: list[Waiting], max_rows: int) -> list[Waiting]:
        """One piece of each session, those of peers that waited longest first, up to `max_rows` in all."""
        by_peer: dict[str, deque[Waiting]] = {}
        for work in heads:
            by_peer.setdefault(work.peer, deque()).append(work)
        picked: list[Waiting] = []
        room = max_rows
        peers = deque(sorted(by_peer, key=lambda peer: self._served.get(peer, -1)))
        self._steps += 1
        while peers and room > 0:
            peer = peers.popleft()
            work = by_peer[peer].popleft()
            picked.append(self._take_rows(work, room))
            room -= picked[-1].rows
            self._served[peer] = self._steps
            if by_peer[peer]:
                peers.append(peer)
        if len(self._served) > 256:
            self._served = {peer: at for peer, at in self._served.items() if at > self._steps - 256}
        return picked

    def _take_rows(self, work: Waiting, room: int) -> Waiting:
        queue = self._queues[work.session]
        rows = min(work.rows, room)
        self.rows -= rows
        if rows < work.rows:
            cut = len(work.data) // work.rows * rows
            queue[0] = replace(work, position=work.position + rows, rows=work.rows - rows, data=work.data[cut:])
            return replace(work, rows=rows, data=work.data[:cut])
        queue.popleft()
        if not queue:
            del self._queues[work.session]
        return work


@dataclass(frozen=True)
class Load:
    """How full a hop is."""

    sessions: int
    peer_sessions: int  # of the peer that asks
    peers: int  # that hold sessions, the one that asks not counted
    peer_tokens: int  # leased to the peer that asks
    free_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class AdmissionLimits:
    """What a hop takes on."""

    sessions: int = 256
    peer_sessions: int = 64
    reserve: float = 0.25  # of the cache, kept for peers that hold less than their share


def why_busy(load: Load, tokens: int, limits: AdmissionLimits) -> str | None:
    """Why a session of this many tokens is not admitted now, or None where it is."""
    if load.sessions >= limits.sessions:
        return f"{load.sessions} sessions are open already"
    if load.peer_sessions >= limits.peer_sessions:
        return f"{load.peer_sessions} sessions of yours are open already"
    if tokens > load.free_tokens:
        return f"no room for {tokens} tokens, {load.free_tokens} of {load.total_tokens} cache slots are free"
    fair_share = load.total_tokens / (load.peers + 2)  # itself, the others, and one who may come
    within_share = load.peer_tokens + tokens <= fair_share
    if load.peer_sessions and not within_share and load.free_tokens - tokens < limits.reserve * load.total_tokens:
        return f"the last cache slots are kept for others, {load.peer_tokens} are yours already"
    return None
