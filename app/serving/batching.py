"""Batching: which queued tokens the next device step takes. Pure: callers pass the time and the work.

The policy:

1. Every step takes all the sessions that wait, within `BatchLimits`. Homes take turns (`app.core.turns`), so that
   none with many peers or sessions can starve the rest; so do the peers of a home, and the sessions of a peer, so that
   a short prompt waits for no long one. Sessions over other blocks or with other adapters are computed apart: a step
   takes one such group of each home, that of the peer whose turn it is.
2. Tokens that a reply waits for (urgent) go before tokens that fill a cache (bulk); bulk runs in chunks and gets every
   second step at least, so neither waits for more than one step of the other. While replies are written, a chunk has
   as many rows as run in `BULK_STRETCH` urgent steps (`_bulk_rows`).
3. A token that comes with guesses has as many rows more. Sessions with few rows do not wait for those with many: the
   step gives each session its share of the rows, and guesses make it at most `GUESSES_STRETCH` times as long as it
   would be without them (`_row_limit`). What is left goes into the next step.
4. A step of many rows costs little more than one of few, so a step waits a fraction of its own time for sessions that
   are about to return (`_until_sessions_return`), and in all at most `MAX_WAIT_STEPS` times as long as it takes.
5. Rarely, and only where their routes begin, few sessions wait up to a whole trip of a token for many, so
   that they stay in step from then on (`_until_long_wait_ends`).
6. Sessions of one asker arrive in a burst; a step waits for its end (`_burst_ends_at`).
7. On a card, a chunk waits a moment for this node's own replies to choose their next tokens (`_until_chosen`): the
   head's pass would stand behind it, and they would wait for this chunk and, coming too late for a step, the next one.

8. Prompts wait while their outputs pile up before a slow link, and so do tokens (`is_behind`).

A session that is alone never waits but for the last.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from app.core.smoothing import Ewma, LinearTrend
from app.core.turns import TurnQueue, Turns
from p2p.shares import Holder

URGENT_ROWS = 16  # more tokens than this in one frame are bulk
GUESSES_STRETCH = 1.5  # a step of several sessions takes at most so many times as long with guesses as without
LONG_WAIT_EVERY = (4, 32)  # tokens between two long waits of a session: at first, and at most after doubling
MAX_LONG_WAIT_S = 0.5
MAX_WAIT_STEPS = 8.0  # however many sessions are about to return: an asker decides when its own do
BULK_STRETCH = 2.0  # a chunk takes at most so many times as long as the steps of the replies that wait for its end
LEAST_BULK_ROWS = 64  # a chunk of fewer rows reads the weights for too little
WRITING_S = 1.0  # a reply that got its last token so long ago is still written
BURST_GAP_S = 0.001  # requests of one burst arrive within this of each other
BEHIND_S = 0.02  # between two looks at a link that is behind
CHOOSING_S = 0.002  # a reply of this node itself has chosen its next token on the card by then
STEPS_SHARED = 2.0  # sessions batched once tend to stay in step, so a saving counts for two steps
_SMOOTHING = 0.25
_TREND_MEMORY = 0.98


@dataclass(frozen=True, slots=True)
class QueuedTokens:
    """Tokens of one session that wait for the device."""

    session: bytes
    peer: str  # the asker, for fairness
    home: str  # the asker's, for the same
    epoch: int
    position: int
    rows: int
    data: memoryview
    dtype: str
    urgent: bool
    arrived_at: float
    first: bool = False  # this hop is the first of the session's route
    revision: int = 0
    group: object = None  # sessions of the same one are computed together: blocks and adapter
    shares_device: bool = False  # a reply of this node itself, over this hop alone, whose head is on the same card


@dataclass(frozen=True)
class BatchLimits:
    """Largest steps, and the longest step time that waiting is based on."""

    chunk_rows: int = 256
    urgent_rows: int = 64
    max_step_s: float = 0.1  # a longer step counts as this long when a wait is computed


@dataclass(slots=True)
class _ReturningSession:
    """A session whose last urgent output was sent, and whose next token is expected."""

    peer: str
    left_at: float
    due_at: float
    first: bool
    shares_device: bool


class BatchQueue:
    """Tokens that wait for one device."""

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self._limits = limits or BatchLimits()
        self._queues: dict[bytes, deque[QueuedTokens]] = {}  # of each session, in order
        self._bulk_next = False
        self._turns = Turns()
        self._done_at = float("-inf")  # when the last step's outputs were sent
        self._step_s = Ewma(_SMOOTHING)  # an urgent step
        self._step_trend = LinearTrend(_TREND_MEMORY)  # its seconds by its rows
        self._bulk_row_s = Ewma(_SMOOTHING)  # of a bulk step
        self._bulk_trend = LinearTrend(_TREND_MEMORY)  # its seconds by its rows
        self._returning: dict[bytes, _ReturningSession] = {}
        self._round_s: dict[bytes, Ewma] = {}  # from a session's output to its next token
        self._long_waits: dict[bytes, tuple[int, int]] = {}  # position of the last long wait; tokens until the next
        self.rows = 0
        self.bytes = 0  # of these rows

    @property
    def sessions(self) -> int:
        """Number of sessions that wait."""
        return len(self._queues)

    @property
    def heads(self) -> list[QueuedTokens]:
        """The next tokens of each session."""
        return [queue[0] for queue in self._queues.values()]

    def remove(self, work: QueuedTokens) -> None:
        """Take the next tokens of a session out of the queue: they are computed already."""
        assert self._queues[work.session][0] is work, "a session's tokens are computed in order"
        self._take_rows(work, work.rows)

    def put(self, work: QueuedTokens) -> None:
        """Queue tokens after those of the same session."""
        self._queues.setdefault(work.session, deque()).append(work)
        self.rows += work.rows
        self.bytes += len(work.data)
        returned = self._returning.pop(work.session, None)
        if returned is not None and work.urgent:
            self._note_return(work, returned)

    def _note_return(self, work: QueuedTokens, returned: _ReturningSession) -> None:
        """Learn the session's round time, and expect those that left in the same step accordingly."""
        round_s = work.arrived_at - returned.left_at
        average = self._round_s.setdefault(work.session, Ewma(_SMOOTHING))
        usual_s = average.value if average else round_s
        average.add(round_s)
        # They were delayed as this one was. Sessions of one asker take the same way; others differ by their averages.
        for session, other in self._returning.items():
            if other.left_at == returned.left_at:
                others = self._round_s.get(session)
                later_s = 0.0 if other.peer == work.peer or not others else others.value - usual_s
                other.due_at = work.arrived_at + max(later_s, 0.0)

    def drop_rows(self, session: bytes) -> None:
        """Forget everything that waits of a session."""
        for work in self._queues.pop(session, ()):
            self.rows -= work.rows
            self.bytes -= len(work.data)

    @property
    def largest(self) -> bytes:
        """The session with the most bytes among those of the peer with the most, at the home with the most."""
        sizes = {session: sum(len(work.data) for work in queue) for session, queue in self._queues.items()}
        held: Counter[tuple[str, ...]] = Counter()
        for session, size in sizes.items():
            first = self._queues[session][0]
            held[first.home,] += size
            held[first.home, first.peer] += size

        def rank(session: bytes) -> tuple[int, ...]:
            first = self._queues[session][0]
            return held[first.home,], held[first.home, first.peer], sizes[session]

        return max(sizes, key=rank)

    def drop(self, session: bytes) -> None:
        """Forget a session and everything that waits of it."""
        self.drop_rows(session)
        self._returning.pop(session, None)
        self._round_s.pop(session, None)
        self._long_waits.pop(session, None)

    def done(self, works: Sequence[QueuedTokens], seconds: float, now: float) -> None:
        """Note that a step took `seconds` and its outputs were sent at `now`."""
        urgent = [work for work in works if work.urgent]
        rows = sum(work.rows for work in works)
        self._done_at = now
        if urgent:
            self._step_s.add(seconds)
            self._step_trend.add(rows, seconds)
        elif rows:
            self._bulk_row_s.add(seconds / rows)
            self._bulk_trend.add(rows, seconds)
        for work in urgent:
            if work.session in self._queues:
                continue  # the rest of its rows is here
            average = self._round_s.get(work.session)
            due_at = now + average.value if average else float("inf")
            self._returning[work.session] = _ReturningSession(work.peer, now, due_at, work.first, work.shares_device)

    def take(
        self,
        now: float,
        is_behind: Callable[[QueuedTokens], bool] = lambda work: False,
        held: Container[bytes] = (),
    ) -> list[QueuedTokens] | float | None:
        """Return the next step's work, or the time to ask again, or None if nothing waits.

        What comes before a link that `is_behind` waits: it takes long to send what was computed before. So do tokens of
        the sessions `held`.
        """
        heads = [queue[0] for session, queue in self._queues.items() if session not in held]
        if not heads:
            return None
        ready = [work for work in heads if not is_behind(work)]
        urgent = [work for work in ready if work.urgent]
        bulk = [work for work in ready if not work.urgent]
        if not ready:
            return now + BEHIND_S
        some_bulk = bool(bulk)
        if urgent and not (self._bulk_next and some_bulk):
            wait_until = None if some_bulk else self._wait_until(urgent, now)
            if wait_until is not None:
                return wait_until
            self._bulk_next = some_bulk
            return self._pick(urgent, min(self._limits.urgent_rows, self._row_limit(urgent)), in_shares=True)
        chosen_at = self._until_chosen(now)
        if chosen_at is not None:
            return chosen_at
        self._bulk_next = False
        return self._pick(bulk, self._bulk_rows(sum(work.rows for work in bulk), bool(urgent), now))

    def _until_chosen(self, now: float) -> float | None:
        """Return the time until which a chunk waits for replies that choose their next tokens; None: start it now."""
        ends = (one.left_at + CHOOSING_S for one in self._returning.values() if one.shares_device)
        return max((end for end in ends if now < end), default=None)

    def _bulk_rows(self, waiting: int, replies_wait: bool, now: float) -> int:
        """Rows of the next chunk: fewer while replies are written, which all wait for its end.

        But enough that its rows take as long as what a chunk of any size takes: fewer would make prompts much slower.
        The rows that wait are then divided evenly: a large chunk and a small rest would be longer at the most.
        """
        most = self._limits.chunk_rows
        if not replies_wait and all(one.left_at + WRITING_S < now for one in self._returning.values()):
            return most
        row_s, fixed_s = self._bulk_trend.slope, self._bulk_trend.at(0)
        if row_s is None or fixed_s is None:  # all chunks were alike so far
            row_s, fixed_s = self._bulk_row_s.value, 0.0
        if not self._step_s or row_s <= 0:
            return most
        fixed_s = max(fixed_s, 0.0)
        rows = max((BULK_STRETCH * self._step_s.value - fixed_s) / row_s, fixed_s / row_s, LEAST_BULK_ROWS)
        return min(most, max(LEAST_BULK_ROWS, even_part(waiting, int(min(rows, most)))))

    def _row_limit(self, urgent: list[QueuedTokens]) -> int:
        """Rows of a step such that guesses of some sessions do not make it much longer for the others."""
        sessions, rows = len(urgent), sum(work.rows for work in urgent)
        if sessions < 2 or rows == sessions:
            return rows  # nobody waits for somebody else's guesses
        row_s, plain_s = self._step_trend.slope, self._step_trend.at(sessions)
        if row_s is None or plain_s is None or row_s <= 0 or plain_s <= 0:
            return rows
        return sessions + max(1, int((GUESSES_STRETCH - 1) * plain_s / row_s))

    def _wait_until(self, urgent: list[QueuedTokens], now: float) -> float | None:
        """Return the time until which a step waits for further sessions; None: start it now."""
        step_s = min(self._step_s.value, self._limits.max_step_s)
        if not step_s or not self._returning or sum(work.rows for work in urgent) >= self._limits.urgent_rows:
            return None
        begun_at = max(self._done_at, min(work.arrived_at for work in urgent))
        until = None
        if now < begun_at + MAX_WAIT_STEPS * step_s:
            until = self._until_sessions_return(urgent, now, step_s)
        if until is None:
            until = self._until_long_wait_ends(urgent, now, begun_at, step_s)
        if until is None and now < (burst_end := self._burst_ends_at(urgent, step_s)):
            # Only for sessions of the same asker: they take the same way. Waiting for others at each hop costs more
            # than it gains.
            askers = {work.peer for work in urgent}
            if any(now < one.due_at + step_s / 2 and one.peer in askers for one in self._returning.values()):
                until = burst_end
        return until

    def _until_sessions_return(self, urgent: list[QueuedTokens], now: float, step_s: float) -> float | None:
        """Return the time at which sessions that are due soon are here, if waiting saves more than it costs.

        Waiting delays the sessions that are here; not waiting costs each that comes the rest of a step. The time waited
        so far is ignored here. A session that is half a step overdue is no longer waited for.
        """
        dues = sorted(one.due_at for one in self._returning.values() if now < one.due_at + step_s / 2)
        until = None
        for coming, due_at in enumerate(dues, 1):
            wait_s = max(due_at - now, 0.0) + step_s / 8
            if len(urgent) * wait_s < STEPS_SHARED * coming * (step_s - wait_s):
                until = now + wait_s
        return until

    def _until_long_wait_ends(
        self, urgent: list[QueuedTokens], now: float, begun_at: float, step_s: float
    ) -> float | None:
        """Return the end of a long wait: now and then few sessions wait for many, for one trip of a token at most.

        Only at the first hop of their routes: if two hops waited for each other's sessions, both would wait for
        nothing.
        """
        latest = begun_at + MAX_LONG_WAIT_S
        dues = [one.due_at for one in self._returning.values() if one.first and now < one.due_at < latest]
        if len(dues) < len(urgent) or not all(work.first and self._may_wait_long(work) for work in urgent):
            return None
        return min(dues) + step_s / 8

    def _may_wait_long(self, work: QueuedTokens) -> bool:
        """True if a session has not waited long for a while.

        Exponential back-off: a session whose long waits gain no partner waits long less and less often.
        """
        soonest, latest = LONG_WAIT_EVERY
        last, pause = self._long_waits.get(work.session, (-soonest, soonest))
        if work.position != last:
            if work.position < last + pause:
                return False
            self._long_waits[work.session] = (work.position, min(2 * pause, latest))
        return True

    def _burst_ends_at(self, urgent: list[QueuedTokens], step_s: float) -> float:
        """The end of the burst: `BURST_GAP_S` after its last arrival, at most half a step after its first."""
        arrivals = [work.arrived_at for work in urgent]
        return min(max(arrivals) + min(BURST_GAP_S, step_s / 8), min(arrivals) + step_s / 2)

    def _pick(self, heads: list[QueuedTokens], max_rows: int, *, in_shares: bool = False) -> list[QueuedTokens]:
        """Take tokens of one group of sessions of each home, up to `max_rows`, in turns.

        With `in_shares` no session takes rows that another one with fewer could have.
        """
        if len({(work.peer, work.group) for work in heads}) == 1 and sum(work.rows for work in heads) <= max_rows:
            self._turns.took(Holder(heads[0].home, heads[0].peer), len(heads))  # nobody else wants one: the usual case
            return [self._take_rows(work, work.rows) for work in heads]
        homes: dict[str, list[QueuedTokens]] = {}
        for work in heads:
            homes.setdefault(work.home, []).append(work)
        groups = {home: self._in_turns(works).first()[1].group for home, works in homes.items()}
        heads = [work for work in heads if work.group == groups[work.home]]
        share = fair_share([work.rows for work in heads], max_rows) if in_shares else max_rows
        waiting = self._in_turns(heads)
        picked: list[QueuedTokens] = []
        room = max_rows
        while waiting and room > 0:
            work = waiting.pop(waiting.first()[0])
            picked.append(self._take_rows(work, min(room, share)))
            room -= picked[-1].rows
        return picked

    def _in_turns(self, heads: Iterable[QueuedTokens]) -> TurnQueue[QueuedTokens]:
        """Return these tokens, to be taken in turns; of one peer those of the session that waited longest first."""
        waiting = TurnQueue[QueuedTokens](self._turns)
        for work in heads:
            waiting.put(Holder(work.home, work.peer), work)
        return waiting

    def _take_rows(self, work: QueuedTokens, room: int) -> QueuedTokens:
        queue = self._queues[work.session] = self._queues.pop(work.session)  # behind the others of its peer
        rows = min(work.rows, room)
        self.rows -= rows
        cut = len(work.data) // work.rows * rows
        self.bytes -= cut
        if rows < work.rows:
            queue[0] = replace(work, position=work.position + rows, rows=work.rows - rows, data=work.data[cut:])
            return replace(work, rows=rows, data=work.data[:cut])
        queue.popleft()
        if not queue:
            del self._queues[work.session]
        return work


def even_part(rows: int, most: int) -> int:
    """Return the rows of one of as few equal parts as possible, each of at most `most` rows."""
    return -(-rows // -(-rows // most))


def fair_share(rows: Sequence[int], room: int) -> int:
    """Return the most rows that one session may take so that all of them fit into `room`; 1 at least."""
    share = max(rows, default=1)
    while share > 1 and sum(min(count, share) for count in rows) > room:
        share -= 1
    return share
