"""Which waiting tokens the next device step takes. Pure: callers bring the time and the work.

Every step takes all the sessions that wait. Tokens that a reader awaits (urgent) go before those that fill a cache
(bulk); bulk goes in chunks and gets every second step at least, so neither waits for more than one step of the other.
Within each kind peers take turns, so that one greedy peer cannot starve the rest.

A step of many rows costs little more than one of few, so sessions are made to travel together: a step waits for those
who are due within a fraction of its own time, and now and then, where their route begins, few wait for many a whole
round. A session without company never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

URGENT_ROWS = 8  # more tokens than this are bulk, whoever awaits them
PATIENT_AFTER = (4, 32)  # tokens between two long waits of a session: at first, doubled after each, and at most
MAX_WAIT_S = 0.5  # of a long wait, however long the rounds are
MOMENT_S = 0.001  # who travels together arrives one after another, but not further apart than this
COMPANY_LASTS = 2.0  # who goes together comes back together: what is saved once is saved again
_SMOOTH = 0.25


@dataclass(frozen=True, slots=True)
class QueuedTokens:
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
    first: bool = False  # the session's route begins here


@dataclass(frozen=True)
class BatchLimits:
    """How large a step may grow and how long it may wait for company."""

    chunk_rows: int = 256
    urgent_rows: int = 64
    max_step_s: float = 0.1  # a step longer than this is waited for no longer than such a one


@dataclass(slots=True)
class _ReturningSession:
    """A session whose last output went out."""

    peer: str
    left_at: float
    due_at: float
    first: bool


class BatchQueue:
    """What waits for one device."""

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self._limits = limits or BatchLimits()
        self._queues: dict[bytes, deque[QueuedTokens]] = {}  # per session, in order
        self._bulk_next = False
        self._served: dict[str, int] = {}  # when each peer was last served, in steps
        self._steps = 0
        self._step_s = 0.0  # a usual urgent step
        self._away: dict[bytes, _ReturningSession] = {}  # sessions whose last urgent output went out
        self._away_s: dict[bytes, float] = {}  # how long each usually takes to come back
        self._patience: dict[bytes, tuple[int, int]] = {}  # where a session last waited for long; tokens until the next
        self.rows = 0

    @property
    def sessions(self) -> int:
        """How many sessions wait."""
        return len(self._queues)

    def put(self, work: QueuedTokens) -> None:
        """Add tokens behind those of the same session."""
        self._queues.setdefault(work.session, deque()).append(work)
        self.rows += work.rows
        away = self._away.pop(work.session, None)
        if away is not None and work.urgent:
            self._came_back(work, away)

    def _came_back(self, work: QueuedTokens, away: _ReturningSession) -> None:
        away_s = work.arrived_at - away.left_at
        usual_s = self._away_s.get(work.session, away_s)
        self._away_s[work.session] = usual_s + _SMOOTH * (away_s - usual_s)
        # Who left with it was held up, or sped up, as it was. One asker's sessions go all the way together; the ways
        # of others differ by what they usually do.
        for session, mate in self._away.items():
            if mate.left_at == away.left_at:
                later_s = 0.0 if mate.peer == work.peer else self._away_s.get(session, usual_s) - usual_s
                mate.due_at = work.arrived_at + max(later_s, 0.0)

    def drop(self, session: bytes) -> None:
        """Forget what waits of a session, and that it is on its way."""
        for work in self._queues.pop(session, ()):
            self.rows -= work.rows
        self._away.pop(session, None)
        self._away_s.pop(session, None)
        self._patience.pop(session, None)

    def done(self, works: Iterable[QueuedTokens], seconds: float, now: float) -> None:
        """A step is over and its outputs are on their way."""
        urgent = [work for work in works if work.urgent]
        if urgent:
            self._step_s += (_SMOOTH if self._step_s else 1.0) * (seconds - self._step_s)
        for work in urgent:
            usual_s = self._away_s.get(work.session, float("inf"))
            self._away[work.session] = _ReturningSession(work.peer, now, now + usual_s, work.first)

    def take(self, now: float) -> list[QueuedTokens] | float | None:
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

    def _worth_waiting(self, urgent: list[QueuedTokens], now: float) -> float | None:
        """Until when to wait for sessions that are on their way; None: begin now.

        Waiting costs those who are here; not waiting costs those who come the rest of a step. What it has cost so far
        does not count: it ends because nobody is waited for long after he was due.
        """
        step_s = min(self._step_s, self._limits.max_step_s)
        if not step_s or not self._away or sum(work.rows for work in urgent) >= self._limits.urgent_rows:
            return None
        jitter_s = step_s / 8
        dues = sorted(away.due_at for away in self._away.values() if now < away.due_at + step_s / 2)
        until = None
        for coming, due_at in enumerate(dues, 1):
            wait_s = max(due_at - now, 0.0) + jitter_s
            if len(urgent) * wait_s < COMPANY_LASTS * coming * (step_s - wait_s):
                until = now + wait_s
        if until is None:
            until = self._long_wait(urgent, now, jitter_s)
        if until is None and now < (moment := self._moment(urgent, step_s)):
            # One asker's sessions go all the way together; to wait for others' at each hop costs more than it gives.
            askers = {work.peer for work in urgent}
            if any(now < away.due_at + step_s / 2 and away.peer in askers for away in self._away.values()):
                until = moment
        return until

    def _moment(self, urgent: list[QueuedTokens], step_s: float) -> float:
        """When nobody has come for a moment: those who were sent together are in hand then."""
        arrivals = [work.arrived_at for work in urgent]
        return min(max(arrivals) + min(MOMENT_S, step_s / 8), min(arrivals) + step_s / 2)

    def _long_wait(self, urgent: list[QueuedTokens], now: float, jitter_s: float) -> float | None:
        """Now and then few wait for many, for a round at most.

        Only where a route begins: were two hops to wait for each other's sessions, both would wait in vain.
        """
        dues = [away.due_at for away in self._away.values() if away.first and now < away.due_at < now + MAX_WAIT_S]
        if len(dues) < len(urgent) or not all(work.first and self._may_be_patient(work) for work in urgent):
            return None
        return min(dues) + jitter_s

    def _may_be_patient(self, work: QueuedTokens) -> bool:
        """Whether a session has not waited long for a while; who found no lasting company tries less and less often."""
        soonest, latest = PATIENT_AFTER
        last, pause = self._patience.get(work.session, (-soonest, soonest))
        if work.position != last:
            if work.position < last + pause:
                return False
            self._patience[work.session] = (work.position, min(2 * pause, latest))
        return True

    def _pick(self, heads: list[QueuedTokens], max_rows: int) -> list[QueuedTokens]:
        """One piece of each session, those of peers that waited longest first, up to `max_rows` in all."""
        by_peer: dict[str, deque[QueuedTokens]] = {}
        for work in heads:
            by_peer.setdefault(work.peer, deque()).append(work)
        picked: list[QueuedTokens] = []
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

    def _take_rows(self, work: QueuedTokens, room: int) -> QueuedTokens:
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
