"""One reply as it is written: its tokens, the times they took, and the sample of answers that an audit may check.

A `RouteSession` carries the tokens and a `HeadBatcher` chooses them; both are passed in.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import trio

from app.asker.head_batcher import HeadBatcher
from app.asker.route_session import RouteSession
from app.asker.stats import AskedSession, HopStats
from app.core.compute import TextPiece, TokenChoice
from app.core.smoothing import Ewma
from app.routing.route import LinkSeconds, Privacy, Route
from app.session.frame import DTYPE_NAMES, Frame

_SMOOTHING = 0.1


@dataclass
class ReplyStats:
    """Figures of a reply; complete when it has ended."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None  # after the first token; None if there was only one
    recoveries: int = 0
    moves: int = 0  # to better routes while nothing was wrong
    longest_gap_s: float = 0.0
    route: Route = ()


@dataclass(frozen=True)
class ReplyText:
    """A piece of a reply's text; `route` is set on the first piece and whenever the route has changed."""

    text: str
    route: Route | None = None

    def as_json(self) -> dict[str, Any]:
        """The piece as the API sends it."""
        return {"text": self.text} if self.route is None else {"text": self.text, "route": _hops(self.route)}


@dataclass(frozen=True)
class ReplyWaiting:
    """The reply cannot begin yet: a block has no member that can be used."""

    block: int
    wait_s: float  # at most, from the beginning of the reply

    @property
    def text(self) -> str:
        """The sentence for the user."""
        return f"waiting up to {self.wait_s:g} s for a member that serves block {self.block}"

    def as_json(self) -> dict[str, Any]:
        """The wait as the API sends it."""
        return {"waiting": {"block": self.block, "text": self.text}}


@dataclass(frozen=True)
class ReplyDone:
    """The end of a reply: its whole text and its figures."""

    text: str
    stats: ReplyStats

    def as_json(self) -> dict[str, Any]:
        """The end as the API sends it; the fields of `shoal chat --json`."""
        return {"done": {"text": self.text, **asdict(self.stats), "route": _hops(self.stats.route)}}


ReplyEvent = ReplyText | ReplyWaiting | ReplyDone


def _hops(route: Route) -> list[dict[str, Any]]:
    return [{"peer": hop.peer, "start": hop.span.start, "stop": hop.span.stop} for hop in route]


class Reply:
    """Iterates over the pieces of one reply, one for each token."""

    def __init__(
        self,
        session: RouteSession,
        text: Any,
        head_batcher: HeadBatcher,
        prompt_ids: Sequence[int],
        sampler: AuditSampler,
    ) -> None:
        self._session, self._text, self._head_batcher, self.sampler = session, text, head_batcher, sampler
        self._prompt_ids = tuple(prompt_ids)
        self._next: tuple[Sequence[int], bytes | None] = (list(prompt_ids), None)
        self._begin = self._last_at = trio.current_time()
        self._first_at = 0.0
        self._route_s = Ewma(_SMOOTHING)  # a token through the hops of the present route
        self._ends_s = Ewma(_SMOOTHING)  # and through head, sampler and embedding
        self.stats = ReplyStats(len(prompt_ids))

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> TextPiece:
        """Return the next token; raises `NoRoute` or `SessionLost` if the swarm cannot carry the session."""
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
            self._route_s = Ewma(_SMOOTHING)
        elif self.stats.token_ids and self._session.recoveries == self.stats.recoveries:
            self._route_s.add(answered - begin)
            self._ends_s.add(now - answered)
        self._note(piece, now)
        return piece

    async def waiting(self) -> ReplyWaiting | None:
        """Return what the reply waits for before its first token; None once it can begin, or will fail."""
        missing = await self._session.missing_block()
        return None if missing is None else ReplyWaiting(missing.block, self._session.first_route_s)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the prompt and of the reply so far."""
        return (*self._prompt_ids, *self.stats.token_ids)

    def seen(self, link_s: LinkSeconds, now: float) -> AskedSession:
        """The reply's present figures, with the time that a token spends at each hop and link."""
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
            self._route_s.value if self._route_s else None,
            self._ends_s.value if self._ends_s else None,
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


WINDOW = 8  # answers of a reply that are kept for an audit


class HiddenState(NamedTuple):
    """One hidden state as it was received: its bytes and number format."""

    data: bytes
    dtype: str


@dataclass(frozen=True)
class AuditSample:
    """What an audit needs of a reply: its tokens, the peers that took part, and `WINDOW` answers in a row."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    first: int  # number of tokens before the first kept answer
    answers: tuple[HiddenState, ...]  # of consecutive tokens
    peers: frozenset[str]
    precisions: tuple[str, ...]  # for each block, of all peers that computed it
    room: int  # tokens that the session could hold
    privacy: Privacy
    settings: Any  # of the reply, for head and sampler

    @property
    def cost(self) -> int:
        """Tokens that an audit sends through the swarm: all but the last, which the reply did not feed either."""
        return max(len(self.tokens) - 1, self.first + len(self.answers) - 1)


class AuditSampler:
    """Reservoir sampling: keeps one window of `WINDOW` consecutive answers, every window with equal probability."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._count = 0
        self.first = 0  # number of the first kept answer
        self.answers: list[HiddenState] = []
        # In order. Answers depend on every route before them: an earlier hop's results are in the caches of later ones.
        self.routes: list[Route] = []

    def note(self, answer: HiddenState, route: Route) -> None:
        """Take the reply's next answer, which came over this route."""
        if not self.routes or self.routes[-1] != route:
            self.routes.append(route)
        stretch, at = divmod(self._count, WINDOW)
        if at == 0 and self._rng.random() < 1 / (stretch + 1):
            self.first, self.answers = self._count, []
        if self._count < self.first + WINDOW:
            self.answers.append(answer)
        self._count += 1


def last_state(frame: Frame) -> HiddenState:
    """Return the hidden state of the last token of a frame."""
    size = len(frame.body) // frame.rows
    return HiddenState(bytes(frame.body[-size:]), DTYPE_NAMES[frame.dtype])
