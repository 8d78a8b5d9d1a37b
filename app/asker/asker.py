"""The asker: generates replies to prompts over the hops of the swarm.

It runs embedding, head and sampler; `app.asker.route_session` runs the blocks in between over the hops. A reply is an
async iterator inside an async context: leaving the context frees the hops at once, whatever happened. The cache of a
reply that ended, or that nobody waits for any more, may rest at its hops (`app.asker.kept_sessions`): the next prompt
that begins with the same tokens has only the others read.

    async with asker.reply(prompt_ids, settings, max_tokens=50) as reply:
        async for piece in reply: ...
"""

from __future__ import annotations

import random
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from app.asker.audit import Auditor
from app.asker.drafting import Draft
from app.asker.evidence import Deviation, precisions
from app.asker.fair_queue import FairQueue, Turn
from app.asker.guessing import MAX_GUESSES, Guesser, GuessHistory
from app.asker.head_batcher import GoAhead, HeadBatcher
from app.asker.kept_sessions import (
    KEEP_S,
    MIN_SHARED,
    CachedSession,
    KeptSessions,
    SharedPrefix,
    best_prefix,
    packed,
    shared_tokens,
)
from app.asker.reply import AuditSample, AuditSampler, HiddenState, Reply, ReplyAdapter, hidden_states
from app.asker.route_session import (
    CachedPrefix,
    HopLinks,
    OwnNode,
    RouteSession,
    RouteSource,
    SessionSettings,
    SessionShape,
)
from app.asker.stats import AskedSession, AskerStats
from app.core.awake import may_stay_awake
from app.core.compute import Device, DraftModel, ReplyEnds, TokenChoice
from app.core.errors import AppError, NoAdapter
from app.core.network import FrameStream, Network
from app.core.span import Span
from app.routing.bans import Bans
from app.routing.planner import (
    Members,
    PinnedRoute,
    PrefixRoutes,
    PrivacyPreferences,
    RoutePlanner,
    SessionRoutes,
)
from app.routing.route import Privacy, Route, RouteRequest, RouteTimes
from app.routing.trust import TrustBook
from app.session.adapter_index import AdapterRef
from app.session.frame import DTYPES, row_bytes
from app.session.wire import CACHE_EXCEEDED, Prefix
from app.swarm.records import Announcement

if TYPE_CHECKING:
    from trio_typing import TaskStatus


class PromptTooLong(AppError):
    """The prompt, of so many tokens, leaves no room for a reply, in the model's context or in the members' caches."""

    code = "context_length_exceeded"

    def __init__(self, text: str, tokens: int) -> None:
        super().__init__(text)
        self.tokens = tokens


class ReplyTooLong(AppError):
    """Prompt and reply together are larger than the caches of the members."""

    code = CACHE_EXCEEDED


class CutOff(AppError):
    """The reply reserved far more room at hops than others, and one of them found none."""

    code = "busy"


@dataclass(frozen=True)
class AskerOptions:
    """Session settings, the user's privacy preferences, trust in peers, and a source of randomness."""

    session: SessionSettings = field(default_factory=SessionSettings)
    preferences: Callable[[], PrivacyPreferences] = PrivacyPreferences
    book: TrustBook = field(default_factory=TrustBook)
    rng: random.Random = field(default_factory=random.SystemRandom)
    keep_sessions: Callable[[], int] = lambda: 0  # whose cache may rest at the hops after their replies
    # The guesser of a reply to a prompt, or None for no guesses; and the model that guesses where the text is new.
    guesser: Callable[[Sequence[int], GuessHistory], Guesser | None] = Guesser
    draft: Callable[[], DraftModel | None] = lambda: None
    loading: Callable[[], int] = lambda: 0  # a number that grows as long as this node gets on with loading blocks
    # Use a core while a card chooses tokens, instead of sleeping.
    stays_awake: bool = field(default_factory=may_stay_awake)


USUAL_TOKENS = 512  # of a reply
SHARE = 0.25  # of the caches, for a reply that may be as long as fits
SWEEP_S = 30.0  # between two looks for kept sessions that are too old
WAIT_FOR_READING_S = 60.0  # at most, for another reply that reads the same prompt
MIN_WAITED = 64  # tokens; fewer are read sooner than waited for


class Asker:
    """Generates replies over the swarm; `run` must be running."""

    def __init__(
        self,
        network: Network,
        ends: ReplyEnds,
        device: Device,
        members: Members,
        *,
        own_server: Callable[[FrameStream], Awaitable[None]] | None = None,
        go_ahead: GoAhead | None = None,
        options: AskerOptions | None = None,
    ) -> None:
        options = options or AskerOptions()
        self._network, self._ends, self._device, self._own_server = network, ends, device, own_server
        self._head_batcher = HeadBatcher(ends, device, go_ahead, stays_awake=options.stays_awake)
        self._settings, self._rng, self._loading = options.session, options.rng, options.loading
        self._guesser, self._draft_model, self._history = options.guesser, options.draft, GuessHistory()
        self.planner = RoutePlanner(network, members, options.preferences, options.book, options.rng)
        self._auditor = Auditor(_AuditContext(self), options.book, options.rng)
        self._nursery: trio.Nursery | None = None
        self._links: HopLinks | None = None
        self._keep_sessions = options.keep_sessions
        self._kept = KeptSessions()
        self._queue = FairQueue()
        self._replies: dict[bytes, RunningReply] = {}
        self._latest: AskedSession | None = None
        self._begun = self._asked_tokens = self._prompt_tokens = self._cached_tokens = 0
        self._guessed_tokens = self._accepted_tokens = 0
        self.active = 0

    @property
    def bans(self) -> Bans:
        """Peers that routes avoid for a while."""
        return self.planner.bans

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the streams to hops open, and audit, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            links_open = await nursery.start(self._run_links)
            nursery.start_soon(self._auditor.run)
            task_status.started()
            try:
                while True:
                    await trio.sleep(SWEEP_S)
                    await self._drop_kept(self._keep_sessions())
            finally:
                with trio.CancelScope(shield=True):
                    await self._drop_kept(0)
                links_open.cancel()

    async def _run_links(self, *, task_status: TaskStatus[trio.CancelScope]) -> None:
        """Keep the streams open until the scope is cancelled: the last orders go out before."""
        with trio.CancelScope(shield=True) as scope:
            async with trio.open_nursery() as nursery:
                self._links = HopLinks(self._network, nursery, self._own_server)
                task_status.started(scope)
                try:
                    await trio.sleep_forever()
                finally:
                    self._links.is_closed = True

    @asynccontextmanager
    async def reply(
        self,
        prompt_ids: Sequence[int],
        settings: Any,
        *,
        max_tokens: int,
        private_blocks: int | None = None,
        adapter: ReplyAdapter | None = None,
        owner: str = "",
    ) -> AsyncIterator[Reply]:
        """Begin a reply of at most `max_tokens` once it is the owner's turn; `settings` go to head and sampler.

        With an adapter, its hops compute every token with it. Raises `PromptTooLong` or `ReplyTooLong`, and `CutOff`
        while it is read.
        """
        begin, prompt = trio.current_time(), len(prompt_ids)
        most = await self._largest_session(prompt, private_blocks)
        tokens = min(prompt + max_tokens, self._ends.context_length)
        if tokens > most:
            # Clients of Anthropic's API look for these words, and ask for fewer tokens.
            raise ReplyTooLong(
                f"input length and `max_tokens` exceed context limit: {prompt} + {tokens - prompt} > {most}, which is "
                f"what the caches of the members hold; lower max_tokens to {most - prompt}, or shorten the conversation"
            )
        request = self._route_request(tokens, prompt, private_blocks)
        unread = partial(
            self._unread, packed(prompt_ids), request.privacy, None if adapter is None else adapter.ref, owner
        )
        async with (
            self._queue.turn(owner, unread, tokens) as turn,
            self._reply(prompt_ids, settings, request, adapter, turn, begin) as reply,
        ):
            yield reply

    @asynccontextmanager
    async def _reply(
        self,
        prompt_ids: Sequence[int],
        settings: Any,
        request: RouteRequest,
        adapter: ReplyAdapter | None,
        turn: Turn,
        begin: float,
    ) -> AsyncIterator[Reply]:
        """Begin a reply that was asked for at `begin` and whose turn it is."""
        text, ref = self._ends.begin(prompt_ids, settings), None if adapter is None else adapter.ref
        packed_ids = packed(prompt_ids)
        prefix = await self._shared_prefix(packed_ids, request.privacy, ref, turn.owner)
        routes = self._routes(request, prefix, ref)
        own_node, taken = OwnNode(self._loading, turn.needs_room), self._taken(prefix)
        async with self._counted(routes, request.tokens, taken, ref, own_node) as session:
            assert self._nursery is not None, "the asker is not running"
            self._nursery.start_soon(_note_reading, session, turn)
            turn.cut_off = partial(self._nursery.start_soon, self._cut_off, session, request.tokens)
            sampler = AuditSampler(self._rng)
            if prefix is not None:
                begun = prefix.source
                sampler = AuditSampler(self._rng, begun.routes, begun.formats, rounded=bool(begun.wires))
            guesser = self._guesser(prompt_ids, self._history)
            draft = None if guesser is None else self._begin_draft(prompt_ids, request.tokens, settings)
            reply = Reply(
                session,
                text,
                self._head_batcher,
                prompt_ids,
                sampler,
                begin,
                routes.notices,
                guesser,
                draft,
                request.tokens,
                adapter,
            )
            running = RunningReply(reply, session, routes, packed_ids, request.privacy, ref, turn.owner)
            self._replies[session.id] = running
            self._begun += 1
            is_sound = True
            try:
                yield reply
            except Exception:  # perhaps because of what the hops have cached
                is_sound = False
                raise
            finally:
                if draft is not None:
                    draft.end()
                del self._replies[session.id]
                self._ended(running, request, settings, adapter)
                if prefix is not None and taken is not None and taken.wire.ends and not session.epoch:
                    self._kept.add(prefix.source)  # no hop has heard of the new session
                elif is_sound:
                    with trio.CancelScope(shield=True):  # messages are queued, and nothing is waited for
                        await self._keep(running)

    async def _cut_off(self, session: RouteSession, tokens: int) -> None:
        """End the session of a reply that reserves so many tokens, though its client may not be reading it."""
        text = f"the room of {tokens} tokens that this reply reserved is needed by others: ask for fewer, or ask again"
        await session.end(CutOff(text))
        self.planner.full_hops.ended([hop.peer for hop in session.route], trio.current_time())

    # --- caches that outlive a reply ----------------------------------------------------------------------------------

    async def _shared_prefix(
        self, prompt_ids: array[int], privacy: Privacy, adapter: AdapterRef | None, owner: str
    ) -> SharedPrefix | None:
        """Return what is cached of an owner's prompt; waits for its reply under way that reads mostly the same tokens.

        Reading them side by side would take all of these replies as long, and as much cache each.
        """
        if not self._keep_sessions():
            return None
        with trio.move_on_after(WAIT_FOR_READING_S):
            while True:
                best = self._best_prefix(prompt_ids, privacy, adapter, owner)
                known = max(0 if best is None else best.tokens, MIN_WAITED)
                alike = [one for one in self._replies.values() if (one.adapter, one.owner) == (adapter, owner)]
                reading = next((one for one in alike if one.reads(prompt_ids, privacy, known)), None)
                if reading is None:
                    return best
                await reading.session.first_answer.wait()
        return self._best_prefix(prompt_ids, privacy, adapter, owner)

    def _best_prefix(
        self, prompt_ids: array[int], privacy: Privacy, adapter: AdapterRef | None, owner: str
    ) -> SharedPrefix | None:
        running = [one.cached() for one in self._replies.values() if one.owner == owner]
        sessions = [one for one in (*self._kept, *running) if self._is_trusted(one.routes)]
        return best_prefix(prompt_ids, privacy, sessions, adapter, owner)

    def _is_trusted(self, routes: Sequence[Route]) -> bool:
        """True unless a peer was caught at wrong results since it computed a cache."""
        peers = {hop.peer for route in routes for hop in route} - self.planner.not_accused()
        return all(self.planner.book.standing(peer).trusted for peer in peers)

    def _taken(self, prefix: SharedPrefix | None) -> CachedPrefix | None:
        """Return the order to the hops to begin with a prefix; a kept session that is replaced is kept no longer."""
        if prefix is None:
            return None
        source = prefix.source
        ends = prefix.replaces and source in self._kept
        if ends:
            self._kept.remove(source)
        return CachedPrefix(Prefix(source.id, prefix.tokens, ends), source.epoch, source.route, source.wires)

    def _routes(self, request: RouteRequest, prefix: SharedPrefix | None, adapter: AdapterRef | None) -> SessionRoutes:
        if prefix is None:
            return SessionRoutes(self.planner, request, adapter)
        unread = request.prompt_tokens - prefix.tokens
        return PrefixRoutes(self.planner, request, prefix.source.route, unread, adapter)

    def _unread(self, prompt_ids: array[int], privacy: Privacy, adapter: AdapterRef | None, owner: str) -> int:
        """Return how many tokens of an owner's prompt are not cached for it at any hop now."""
        known = self._best_prefix(prompt_ids, privacy, adapter, owner) if self._keep_sessions() else None
        return len(prompt_ids) - (0 if known is None else known.tokens)

    async def _keep(self, running: RunningReply) -> None:
        """Let the cache of a reply that is over rest at its hops, if the setting allows it and it is of use."""
        limit, resting = self._keep_sessions(), running.resting(trio.current_time())
        known = [one for one in self._kept if self._is_trusted(one.routes)]
        if limit and len(resting.tokens) >= MIN_SHARED and not any(one.has_all_of(resting) for one in known):
            self._kept.add(resting)
            await running.session.close(KEEP_S)
        await self._drop_kept(limit)

    async def _drop_kept(self, limit: int) -> None:
        """Keep at most so many sessions, and none that is too old."""
        assert self._links is not None, "the asker is not running"
        for session in self._kept.surplus(limit, trio.current_time()):
            await self._links.close_session(session.route, session.id, session.epoch)

    def _begin_draft(self, prompt_ids: Sequence[int], tokens: int, settings: Any) -> Draft | None:
        model = self._draft_model()
        if model is None or not self._history.wants_draft():
            return None
        assert self._nursery is not None, "the asker is not running"
        draft = Draft(self._device, partial(model.begin, tokens, settings))
        self._nursery.start_soon(draft.run, prompt_ids)
        return draft

    @asynccontextmanager
    async def session(self, tokens: int, prompt_tokens: int = 0) -> AsyncIterator[RouteSession]:
        """Open a session of at most `tokens` tokens, for callers that choose the tokens themselves."""
        async with self._counted(
            SessionRoutes(self.planner, self._route_request(tokens, prompt_tokens)), tokens
        ) as session:
            yield session

    async def hidden_states(self, token_ids: Sequence[int], owner: str = "") -> list[HiddenState]:
        """Return the last block's output for each token of a text, once it is the owner's turn. Raises `PromptTooLong`.

        Hops send outputs of the latest tokens only, so a few tokens go at a time, the later ones as guesses. Audits
        take it for a reply to the first token.
        """
        tokens = len(token_ids)
        await self._largest_session(tokens)
        request, states, rounds = self._route_request(tokens, tokens), list[HiddenState](), list[tuple[int, ...]]()
        guide, sampler = SessionRoutes(self.planner, request), AuditSampler(self._rng)
        async with (
            self._queue.turn(owner, lambda: tokens, tokens),
            self._counted(guide, tokens) as session,
        ):
            while len(states) < tokens:
                first = len(states)
                guesses = tuple(token_ids[first + 1 : first + 1 + MAX_GUESSES])
                frame = await session.advance(token_ids[first : first + 1], guesses=guesses)
                answers = hidden_states(frame)[: len(guesses) + 1]
                for state in answers:
                    sampler.note(state, session.routes, rounded=bool(session.wires))
                states += answers
                rounds.append(guesses[: len(answers) - 1])
        as_reply = replace(request, prompt_tokens=1)
        self._auditor.ended(_audit_sample(sampler, guide.formats, as_reply, token_ids, rounds), tokens)
        return states

    async def fitting_tokens(self, prompt: int, wanted: int, private_blocks: int | None = None) -> int:
        """Return how many tokens of a reply fit behind a prompt, for one that may end sooner than after `wanted`.

        The usual number if members' caches ever hold it; more as far as there is room now, and a share of the caches at
        most: all of it is reserved, and other replies need room beside it. Raises `PromptTooLong`.
        """
        most = await self._largest_session(prompt, private_blocks)
        if wanted > USUAL_TOKENS:
            free = await self.planner.largest_session(self._route_request(1, prompt, private_blocks), now_free=True)
            wanted = min(wanted, max(USUAL_TOKENS, min(int(SHARE * most), free - prompt)))
        return min(wanted, most - prompt)

    async def _largest_session(self, prompt: int, private_blocks: int | None = None) -> int:
        """Return the tokens of the largest session that some route can ever have; raises `PromptTooLong`."""
        context = self._ends.context_length
        if prompt >= context:
            text = f"the prompt has {prompt} tokens, but the model's context is {context}: shorten it"
            raise PromptTooLong(text, prompt)
        most = min(await self.planner.largest_session(self._route_request(1, prompt, private_blocks)), context)
        if prompt >= most:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens, but the caches of the members hold {most}: shorten it, or let "
                "members with more memory join",
                prompt,
            )
        return most

    def stats(self) -> AskerStats:
        """Figures of replies under way, and totals."""
        link_s, now = self.planner.link_s(), trio.current_time()
        replies = [running.reply for running in self._replies.values()]
        read = [reply.stats for reply in replies if reply.stats.was_read]
        return AskerStats(
            sessions=tuple(reply.seen(link_s, now) for reply in replies),
            latest=self._latest,
            replies=self._begun,
            asked_tokens=self._asked_tokens + sum(len(reply.stats.token_ids) for reply in replies),
            prompt_tokens=self._prompt_tokens + sum(stats.prompt_tokens for stats in read),
            cached_tokens=self._cached_tokens + sum(stats.cached_tokens for stats in read),
            kept_sessions=len(self._kept),
            kept_tokens=self._kept.tokens,
            audits=self._auditor.counts,
            guessed_tokens=self._guessed_tokens + sum(reply.stats.guessed_tokens for reply in replies),
            accepted_tokens=self._accepted_tokens + sum(reply.stats.accepted_tokens for reply in replies),
        )

    def _route_request(self, tokens: int, prompt_tokens: int, private_blocks: int | None = None) -> RouteRequest:
        blocks = self._ends.n_blocks
        privacy = self.planner.privacy(blocks, private_blocks)
        size = row_bytes(DTYPES[self._ends.dtype], self._ends.hidden_size)
        return RouteRequest(Span(0, blocks), tokens, prompt_tokens, privacy=privacy, row_bytes=size)

    def _ended(self, running: RunningReply, request: RouteRequest, settings: Any, adapter: ReplyAdapter | None) -> None:
        """Count a reply, learn the speed of its hops from it, and keep a sample for an audit."""
        reply, stats = running.reply, running.reply.stats
        self._latest = reply.seen(self.planner.link_s(), trio.current_time())
        self._asked_tokens += len(stats.token_ids)
        if stats.was_read:
            self._prompt_tokens += stats.prompt_tokens
            self._cached_tokens += stats.cached_tokens
        self._guessed_tokens += stats.guessed_tokens
        self._accepted_tokens += stats.accepted_tokens
        if adapter is None:  # adapters take time of their own
            self.planner.record_times(running.session.times(), request)
        sample = _audit_sample(reply.sampler, running.formats, request, reply.tokens, reply.rounds)
        if sample is not None:
            sample = replace(sample, settings=settings, adapter=adapter)
        self._auditor.ended(sample, len(reply.tokens))

    @asynccontextmanager
    async def _counted(
        self,
        source: RouteSource,
        tokens: int,
        prefix: CachedPrefix | None = None,
        adapter: AdapterRef | None = None,
        own_node: OwnNode | None = None,
    ) -> AsyncIterator[RouteSession]:
        self.active += 1
        try:
            async with self.open(source, tokens, self._settings, prefix, adapter, own_node) as session:
                yield session
        finally:
            self.active -= 1

    @asynccontextmanager
    async def open(
        self,
        source: RouteSource,
        tokens: int,
        settings: SessionSettings,
        prefix: CachedPrefix | None = None,
        adapter: AdapterRef | None = None,
        own_node: OwnNode | None = None,
    ) -> AsyncIterator[RouteSession]:
        """Open a session over the routes that `source` proposes; it is closed at the end."""
        assert self._links is not None, "the asker is not running"
        shape = SessionShape(tokens, self._ends.hidden_size, self._ends.dtype, adapter)
        session = RouteSession(self._links, source, self._embed, shape, settings, prefix, own_node)
        try:
            yield session
        finally:
            with trio.CancelScope(shield=True):
                await session.close()
                if session.answered:
                    self.planner.full_hops.ended([hop.peer for hop in session.route], trio.current_time())
                # Hops that the session did not use still keep the other one.
                if prefix is not None and prefix.wire.ends and session.epoch:
                    await self._links.close_session(prefix.route, prefix.wire.session, prefix.epoch)

    async def _embed(self, token_ids: Sequence[int], wire: str) -> bytes:
        return await self._device.run(self._ends.embed, token_ids, wire)


@dataclass(frozen=True)
class RunningReply:
    """A reply under way, the session that carries it, and what proposes its routes."""

    reply: Reply
    session: RouteSession
    guide: SessionRoutes
    prompt: array[int]
    privacy: Privacy
    adapter: AdapterRef | None = None
    owner: str = ""

    @property
    def formats(self) -> frozenset[tuple[str, str]]:
        """All peers that computed its cache, each with its number format when it was chosen."""
        return self.reply.sampler.formats | self.guide.formats

    def cached(self) -> CachedSession:
        """What a reply that begins now may share: the tokens for which an answer has come."""
        return self._record(self.session.route, self.session.tokens[: self.session.answered])

    def resting(self, now: float) -> CachedSession:
        """What its hops may keep once it is over: the tokens that they are known to have cached."""
        return replace(self._record(*self.session.cached()), at=now)

    def _record(self, route: Route, tokens: array[int]) -> CachedSession:
        session = self.session
        return CachedSession(
            session.id,
            session.epoch,
            tokens,
            self.privacy,
            route,
            tuple(dict.fromkeys((*self.reply.sampler.routes, *session.routes))),
            adapter=self.adapter,
            wires=session.wires,
            owner=self.owner,
            formats=self.formats,
        )

    def reads(self, prompt: array[int], privacy: Privacy, more_than: int) -> bool:
        """True if it reads a prompt of which this one shares more than so many tokens, and at least half."""
        if self.session.answered or self.session.first_answer.is_set() or self.privacy != privacy:
            return False
        shared = shared_tokens(prompt, self.prompt)
        return shared > more_than and 2 * shared >= len(self.prompt)


def _audit_sample(
    sampler: AuditSampler,
    formats: frozenset[tuple[str, str]],
    request: RouteRequest,
    tokens: Sequence[int],
    rounds: Sequence[tuple[int, ...]],
) -> AuditSample | None:
    """Return what an audit needs of tokens that went through the swarm, but for what a reply has besides.

    None if there was no answer.
    """
    windows = sampler.windows(request.prompt_tokens)
    if not windows:
        return None
    return AuditSample(
        tokens=tuple(tokens),
        prompt_tokens=request.prompt_tokens,
        windows=windows,
        peers=frozenset(hop.peer for route in sampler.routes for hop in route),
        precisions=precisions(sampler.routes, formats, rounded=sampler.rounded),
        room=request.tokens,
        privacy=request.privacy,
        rounds=tuple(rounds),
        routes=tuple(sampler.routes),
    )


async def _note_reading(session: RouteSession, turn: Turn) -> None:
    """Let the owner's next reply begin once the prompt of this one was read or is late, or its session is closed."""
    await session.first_is_late.wait()
    turn.late()
    await session.first_answer.wait()
    turn.read()


class _AuditContext:
    """Opens sessions and computes heads for audits; satisfies `app.asker.audit.AuditContext`."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def members(self) -> Sequence[Announcement]:
        return self._asker.planner.members()

    def not_accused(self) -> frozenset[str]:
        return self._asker.planner.not_accused()

    def home(self, peer: str) -> str:
        return self._asker.planner.homes.of(peer)

    def avoided(self) -> frozenset[str]:
        return frozenset(self._asker.planner.avoided())

    def full(self, tokens: int) -> frozenset[str]:
        return frozenset(self._asker.planner.full_hops.full(tokens, trio.current_time()))

    async def times(self, prompt_tokens: int, room: int) -> Callable[[Route], RouteTimes]:
        return await self._asker.planner.times(self._asker._route_request(room, prompt_tokens))

    @asynccontextmanager
    async def pinned(self, route: Route, room: int, adapter: ReplyAdapter | None) -> AsyncIterator[RouteSession]:
        if adapter is not None and adapter.withdrawn:
            raise NoAdapter(f"the adapter {adapter.name} is not offered to hops any more")
        asker, ref = self._asker, None if adapter is None else adapter.ref
        source = PinnedRoute(asker.planner, asker._route_request(room, 0), route, ref)
        # An audit is about this route: if it breaks, no other is taken.
        settings = replace(asker._settings, first_route_s=0.0, new_route_s=0.0)
        async with asker.open(source, room, settings, adapter=ref) as session:
            yield session

    async def answers_of(
        self, session: RouteSession, tokens: Sequence[int], guesses: Sequence[int]
    ) -> list[HiddenState]:
        return hidden_states(await session.advance(tokens, guesses=guesses))

    async def sample_and_discard(
        self, answers: Sequence[HiddenState], tokens: Sequence[int], guesses: Sequence[int], settings: Any
    ) -> None:
        if settings is None:
            return
        text = self._asker._ends.begin(tokens, settings)
        hidden = memoryview(b"".join(answer.data for answer in answers))
        await self._asker._head_batcher.choose(TokenChoice(text, hidden, answers[0].dtype, guesses))

    async def deviation(self, one: Sequence[HiddenState], other: Sequence[HiddenState]) -> Deviation:
        ends = self._asker._ends
        return Deviation(*await self._asker._device.run(ends.deviation, one, other))
