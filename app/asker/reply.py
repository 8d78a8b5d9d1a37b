"""One reply as it is being written: its tokens, how they came, and how long they took.

A session carries the tokens (`app.asker.route_session`), a chooser picks them (`app.asker.head_batcher`); both are
given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from app.asker.audit_sample import AuditSampler, last_state
from app.asker.head_batcher import HeadBatcher
from app.asker.route_session import RouteSession
from app.asker.stats import AskedSession, HopStats
from app.core.compute import TextPiece, TokenChoice
from app.routing.route import LinkSeconds, Route
from app.session.wire import DTYPE_NAMES

_SMOOTH = 0.1


@dataclass
class ReplyStats:
    """How a reply goes; complete when it has ended."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None  # behind the first token; None where there was only one
    recoveries: int = 0
    moves: int = 0  # to better routes while nothing was wrong
    longest_gap_s: float = 0.0
    route: Route = ()


class Reply:
    """An iterator over the pieces of one reply."""

    def __init__(
        self, session: RouteSession, text: Any, chooser: HeadBatcher, prompt_ids: Sequence[int], sampler: AuditSampler
    ) -> None:
        self._session, self._text, self._head_batcher, self.sampler = session, text, chooser, sampler
        self._prompt_ids = tuple(prompt_ids)
        self._next: tuple[Sequence[int], bytes | None] = (list(prompt_ids), None)
        self._begin = self._last_at = trio.current_time()
        self._first_at = 0.0
        self._route_s: float | None = None  # of a usual token, on its way through the hops
        self._ends_s: float | None = None  # and here
        self.stats = ReplyStats(len(prompt_ids))

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> TextPiece:
        """The next token; raises `NoRoute` or `SessionLost` where the swarm cannot go on."""
        if self.stats.finish_reason is not None:
            raise StopAsyncIteration
        token_ids, embedded = self._next
        begin = trio.current_time()
        frame = await self._session.advance(token_ids, embedded)
        answered = trio.current_time()
        self.sampler.note(last_state(frame), self._session.route)
        piece = await self._head_batcher.choose(TokenChoice(self._text, frame.body, DTYPE_NAMES[frame.dtype]))
        self._next = ([piece.token_id], piece.embedding)
        now = trio.current_time()
        if self.stats.route != self._session.route:
            self._route_s = None
        elif self.stats.token_ids and self._session.recoveries == self.stats.recoveries:
            self._route_s = _smoothed(self._route_s, answered - begin)
            self._ends_s = _smoothed(self._ends_s, now - answered)
        self._note(piece, now)
        return piece

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the reply so far."""
        return (*self._prompt_ids, *self.stats.token_ids)

    def seen(self, link_s: LinkSeconds, now: float) -> AskedSession:
        """How it stands."""
        stats, route, paces = self.stats, self._session.route, self._session.paces
        before = ["", *(hop.peer for hop in route)]
        return AskedSession(
            self._session.id.hex(),
            stats.prompt_tokens,
            len(stats.token_ids),
            None if stats.token_ids else self._session.reached,
            now - self._begin,
            stats.tokens_per_s or 0.0,
            self._session.recoveries,
            stats.longest_gap_s,
            tuple(
                HopStats(
                    hop.peer, hop.span.start, hop.span.stop, link_s(here, hop.peer), *paces.get(hop.peer, (None, None))
                )
                for here, hop in zip(before, route, strict=False)
            ),
            link_s(before[-1], "") if route else None,
            self._route_s,
            self._ends_s,
        )

    def _note(self, piece: TextPiece, now: float) -> None:
        stats = self.stats
        stats.token_ids.append(piece.token_id)
        stats.finish_reason = piece.finish_reason
        stats.recoveries, stats.moves = self._session.recoveries, self._session.moves
        stats.route = self._session.route
        if stats.ttft_s is None:
            stats.ttft_s, self._first_at = now - self._begin, now
        else:
            stats.longest_gap_s = max(stats.longest_gap_s, now - self._last_at)
            stats.tokens_per_s = (len(stats.token_ids) - 1) / max(now - self._first_at, 1e-9)
        self._last_at = now


def _smoothed(usual_s: float | None, took_s: float) -> float:
    return took_s if usual_s is None else usual_s + _SMOOTH * (took_s - usual_s)
