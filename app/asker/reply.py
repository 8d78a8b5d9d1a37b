"""One reply as it is written: its tokens, the times they took, and the sample of answers that an audit may check.

A `RouteSession` carries the tokens, a `HeadBatcher` chooses them and a `Guesser` guesses which they will be; all are
passed in. Guesses change no token: each is chosen from the same outputs, history and random number as without them
(`ReplyEnds.choose`), and what was computed for wrong guesses is cut.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import trio

from app.asker.drafting import Draft
from app.asker.guessing import Guesser
from app.asker.head_batcher import HeadBatcher
from app.asker.route_session import RouteSession
from app.asker.stats import AskedSession, HopStats
from app.core.compute import TextPiece, TokenChoice
from app.core.smoothing import Ewma
from app.routing.route import LinkSeconds, Privacy, Route
from app.session.adapter_index import AdapterRef
from app.session.frame import DTYPE_NAMES, Frame
from engine.text.output_form import ReplyPart, SaidText, TokenLogprob

_SMOOTHING = 0.1


@dataclass(eq=False)
class ReplyAdapter:
    """An adapter of this home that hops can fetch from this node."""

    name: str
    ref: AdapterRef
    withdrawn: bool = False  # it cannot be fetched any more


@dataclass
class ReplyStats:
    """Figures of a reply; complete when it has ended."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None  # the one that ended the reply, if one did
    ttft_s: float | None = None
    tokens_per_s: float | None = None  # after the first token; None if there was only one
    recoveries: int = 0
    moves: int = 0  # to better routes while nothing was wrong
    longest_gap_s: float = 0.0
    route: Route = ()
    notices: Sequence[str] = ()  # that the user should know, such as another number format after a hop died
    cached_tokens: int = 0  # of the prompt, that the hops had cached; the others were read
    guessed_tokens: int = 0  # sent through the hops together with the token before them
    accepted_tokens: int = 0  # of these, those that were right
    adapter: str | None = None  # its name, if the reply used one
    adapter_root: str | None = None  # the beginning of its hash

    @property
    def was_read(self) -> bool:
        """True if the hops have read the prompt: the first token is there."""
        return bool(self.token_ids)


class RouteChanges:
    """Finds the changes of a reply's route from one piece to the next."""

    def __init__(self) -> None:
        self._route: Route = ()
        self._recoveries = 0

    def since(self, stats: ReplyStats) -> tuple[Route | None, bool]:
        """The route if it is another one than at the last call, and True if it changed although no hop had failed."""
        before, self._route = self._route, stats.route
        has_failed, self._recoveries = stats.recoveries > self._recoveries, stats.recoveries
        if before == self._route:
            return None, False
        return self._route, before != () and not has_failed


@dataclass(frozen=True)
class ReplyText:
    """A piece of a reply's text; `route` is set on the first piece and whenever the route has changed."""

    text: str
    route: Route | None = None
    notice: str = ""  # that the user should know, from this piece on
    parts: tuple[ReplyPart, ...] | None = None  # the text split into text, thoughts and calls, if that was asked for
    logprob: TokenLogprob | None = None  # of the piece's token, if that was asked for
    moved: bool = False  # the route has changed although no hop had failed

    @property
    def read_parts(self) -> tuple[ReplyPart, ...]:
        """The parts, or all of the text if it was not split."""
        if self.parts is not None:
            return self.parts
        return (SaidText(self.text),) if self.text else ()

    def as_json(self) -> dict[str, Any]:
        """The piece as the API sends it."""
        route = {} if self.route is None else {"route": _hops(self.route)}
        moved = {"moved": True} if self.moved else {}
        return {"text": self.text, **route, **moved, **({"notice": self.notice} if self.notice else {})}


@dataclass(frozen=True)
class ReplyWaiting:
    """The reply cannot begin yet: a block has no member that can be used."""

    block: int
    wait_s: float  # at most, from the beginning of the reply; longer while this node gets on with loading the block
    loading_here: bool = False  # this node fetches or loads the block

    @property
    def text(self) -> str:
        """The sentence for the user."""
        if self.loading_here:
            return f"waiting until this node has loaded block {self.block}"
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


class RoundTimes(NamedTuple):
    """When a round began, was sent with its guesses, was answered by the last hop, and its tokens were chosen."""

    begun: float
    sent: float
    answered: float
    chosen: float


class Reply:
    """Iterates over the pieces of one reply, one for each token."""

    def __init__(
        self,
        session: RouteSession,
        text: Any,
        head_batcher: HeadBatcher,
        prompt_ids: Sequence[int],
        sampler: AuditSampler,
        begin: float,
        notices: Sequence[str] = (),
        guesser: Guesser | None = None,
        draft: Draft | None = None,
        room: int = 0,
        adapter: ReplyAdapter | None = None,
    ) -> None:
        self._session, self._text, self._head_batcher, self.sampler = session, text, head_batcher, sampler
        self._prompt_ids = tuple(prompt_ids)
        self._next: tuple[Sequence[int], bytes | None] = (list(prompt_ids), None)
        self._guesser, self._draft, self._room = guesser, draft, room  # tokens that the session can hold
        self._unread: deque[TextPiece] = deque()  # chosen, but not returned yet
        self.rounds: list[tuple[int, ...]] = []  # the guesses that went along with the prompt, then with each token fed
        self._begin = self._last_at = begin
        self._first_at = 0.0
        self._prompt_s: float | None = None  # the prompt through the hops, once these were open
        self._route_s = Ewma(_SMOOTHING)  # a token through the hops of the present route
        self._ends_s = Ewma(_SMOOTHING)  # and through head, sampler and embedding
        self._host_s = Ewma(_SMOOTHING)  # and in this node's own hands
        self._token_s = Ewma(_SMOOTHING)  # from one token to the next
        self.stats = ReplyStats(len(prompt_ids), notices=notices)
        if adapter is not None:
            self.stats.adapter, self.stats.adapter_root = adapter.name, adapter.ref.short

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> TextPiece:
        """Return the next token; raises `NoRoute` or `SessionLost` if the swarm cannot carry the session."""
        if not self._unread:
            if self.stats.finish_reason is not None:
                raise StopAsyncIteration
            self._unread += await self._round()
        return self._unread.popleft()

    async def _round(self) -> Sequence[TextPiece]:
        """Send the latest token and guesses through the hops; return the next token and those after right guesses."""
        token_ids, embedded = self._next
        fed = self._token_count
        begin = trio.current_time()
        guesses, drafted = await self._guesses()
        sent = trio.current_time()
        frame = await self._session.advance(token_ids, embedded, guesses)
        answered = trio.current_time()
        guesses = guesses[: frame.position + frame.rows - fed]  # a repaired route drops them
        next_step = self._session.next_step if not guesses and fed + 1 < self._room else None
        choice = TokenChoice(self._text, frame.body, DTYPE_NAMES[frame.dtype], guesses, next_step)
        pieces = await self._head_batcher.choose(choice)
        for state in hidden_states(frame)[: len(pieces)]:
            self.sampler.note(state, self._session.routes, rounded=bool(self._session.wires))
        if len(pieces) <= len(guesses):
            self._session.cut(fed + len(pieces) - 1)
        self._next = ([pieces[-1].token_id], pieces[-1].embedding)
        self.rounds.append(guesses)
        self._note_round(guesses, pieces, RoundTimes(begin, sent, answered, trio.current_time()), drafted=drafted)
        return pieces

    async def _guesses(self) -> tuple[tuple[int, ...], bool]:
        """Guesses to send with the next token, and whether the draft model made them.

        None with the prompt, and never more than the reply can still take.
        """
        if self._guesser is None or not self.stats.token_ids:
            return (), False
        can_draft = self._draft is not None and self._draft.is_ready
        proposal = self._guesser.propose(self._room - self._token_count - 1, can_draft=can_draft)
        if self._draft is None or not proposal.draft:
            return proposal.tokens, False
        return await self._draft.guess(self.tokens, proposal.draft), True

    def _note_round(
        self, guesses: tuple[int, ...], pieces: Sequence[TextPiece], times: RoundTimes, *, drafted: bool
    ) -> None:
        """Count a round and learn from it."""
        stats = self.stats
        smooth = False
        if not stats.token_ids and not self._session.recoveries:
            self._prompt_s = times.answered - self._session.prompt_fed_at
        if stats.route != self._session.route:
            self._route_s = Ewma(_SMOOTHING)
        elif stats.token_ids and self._session.recoveries == stats.recoveries:
            smooth = True
        if smooth and not guesses:
            self._route_s.add(times.answered - times.sent)
            self._ends_s.add(times.chosen - times.answered)
            self._host_s.add(times.begun - self._last_at + self._session.own_s)
            self._token_s.add(times.chosen - self._last_at)
        if self._guesser is not None:
            drawn = [piece.token_id for piece in pieces]
            draft_s = times.sent - times.begun if drafted else None
            self._guesser.note(guesses, drawn, times.chosen - times.sent if smooth else None, draft_s)
        stats.guessed_tokens += len(guesses)
        stats.accepted_tokens += len(pieces) - 1
        for piece in pieces:
            self._note(piece, times.chosen)

    async def waiting(self) -> ReplyWaiting | None:
        """Return what the reply waits for before its first token; None once it can begin, or will fail."""
        missing = await self._session.missing_block()
        if missing is None:
            return None
        return ReplyWaiting(missing.block, self._session.first_route_s, missing.loading_here)

    @property
    def problem(self) -> Exception:
        """The reason for the end of a reply that failed although the swarm carried it."""
        problem: Exception = self._text.problem
        return problem

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply, if one did."""
        found: str | None = self._text.stop_string
        return found

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the prompt and of the reply so far."""
        return (*self._prompt_ids, *self.stats.token_ids)

    @property
    def _token_count(self) -> int:
        return len(self._prompt_ids) + len(self.stats.token_ids)

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
                HopStats(hop.peer, hop.span.start, hop.span.stop, link_s(here, hop.peer), *paces.get(hop.peer, ()))
                for here, hop in zip(before, route, strict=False)
            ),
            link_s(before[-1], "") if route else None,
            self._route_s.value if self._route_s else None,
            self._ends_s.value if self._ends_s else None,
            self._host_s.value if self._host_s else None,
            self._token_s.value if self._token_s else None,
            self._prompt_s,
            self._session.reused,
            stats.guessed_tokens,
            stats.accepted_tokens,
        )

    def _note(self, piece: TextPiece, now: float) -> None:
        stats = self.stats
        stats.token_ids.append(piece.token_id)
        stats.finish_reason = piece.finish_reason
        stats.recoveries, stats.moves = self._session.recoveries, self._session.moves
        stats.route, stats.cached_tokens = self._session.route, self._session.reused
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


class Window(NamedTuple):
    """Answers to consecutive tokens of a reply."""

    first: int  # number of tokens before the first answer
    answers: tuple[HiddenState, ...]

    @property
    def stop(self) -> int:
        """Number of tokens before the last answer."""
        return self.first + len(self.answers) - 1


@dataclass(frozen=True)
class AuditSample:
    """What an audit needs of a reply: its tokens, the peers that took part, and some of its answers."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    # In order: each one was any window up to its end with equal probability, so the last one any of the reply.
    windows: tuple[Window, ...]
    peers: frozenset[str]
    precisions: tuple[str, ...]  # for each block, of all peers that computed it
    room: int  # tokens that the session could hold
    privacy: Privacy
    settings: Any = None  # of the reply, for head and sampler; None for embeddings, which need neither
    rounds: tuple[tuple[int, ...], ...] = ()  # guesses that the reply sent with the prompt, then with each token fed
    adapter: ReplyAdapter | None = None
    routes: tuple[Route, ...] = ()

    @property
    def stop(self) -> int:
        """Tokens that an audit repeats: all but the last, which the reply did not feed either."""
        return max(len(self.tokens) - 1, self.windows[-1].stop)

    @property
    def cost(self) -> int:
        """Tokens that an audit sends through the swarm at most, with guesses."""
        return self.stop + sum(map(len, self.rounds))


class AuditSampler:
    """Reservoir sampling: keeps one window of `WINDOW` consecutive answers, every window with equal probability.

    Those that it kept before stay too, for audits that cannot repeat a whole reply. They are few: of 1000 windows about
    seven were kept at some time.
    """

    def __init__(
        self,
        rng: random.Random,
        routes: Iterable[Route] = (),
        formats: frozenset[tuple[str, str]] = frozenset(),
        *,
        rounded: bool = False,
    ) -> None:
        self._rng = rng
        self._count = 0
        self._windows: list[tuple[int, list[HiddenState]]] = []  # number of the first answer, and the answers
        # In order. Answers depend on every route before them: an earlier hop's results are in the caches of later ones,
        # and those of `routes` in the cache that the session began with.
        self.routes: list[Route] = list(routes)
        self.formats = formats  # peers of the routes that it began with, each with its number format at that time
        self.rounded = rounded  # rows of the session were rounded on the way, at any time

    def note(self, answer: HiddenState, routes: Iterable[Route], *, rounded: bool) -> None:
        """Take the reply's next answer, and the routes that its session has had so far."""
        self.rounded = self.rounded or rounded
        self.routes += [route for route in routes if route not in self.routes]
        stretch, at = divmod(self._count, WINDOW)
        if at == 0 and self._rng.random() < 1 / (stretch + 1):
            self._windows.append((self._count, []))
        first, answers = self._windows[-1]
        if self._count < first + WINDOW:
            answers.append(answer)
        self._count += 1

    def windows(self, prompt_tokens: int) -> tuple[Window, ...]:
        """Return the windows of a reply to so many tokens."""
        return tuple(Window(prompt_tokens + first, tuple(answers)) for first, answers in self._windows)


def hidden_states(frame: Frame) -> list[HiddenState]:
    """Return the hidden state of each token of a frame."""
    size, body = len(frame.body) // frame.rows, bytes(frame.body)
    return [HiddenState(body[at : at + size], DTYPE_NAMES[frame.dtype]) for at in range(0, len(body), size)]
