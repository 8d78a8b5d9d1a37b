"""The asker: prompts in, replies out, through whatever hops the swarm offers.

It runs the model's two ends and chooses the tokens; `app.asker.route_session` keeps the hops. A reply is an async
iterator inside an async context, so that leaving the context frees the hops at once, whatever happened.

    async with asker.reply(prompt_ids, settings, max_tokens=50) as reply:
        async for piece in reply: ...
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import trio

from app.asker.audit import Auditor
from app.asker.audit_sample import Exchange, Recording, State, last_state
from app.asker.evidence import Deviation, precisions
from app.asker.head_batcher import Chooser
from app.asker.hop_links import HopLinks
from app.asker.reply import Reply
from app.asker.route_hops import Guide, SessionSettings, Shape
from app.asker.route_session import RouteSession
from app.asker.stats import AskedSession, AskerFigures
from app.core.compute import Choice, Device, ReplyEnds
from app.core.errors import AppError
from app.core.network import FrameStream, Network
from app.core.span import Span
from app.routing.bans import Bans
from app.routing.planner import Guidance, Members, PinnedGuide, SessionGuide, Wishes
from app.routing.route import Demand, Route
from app.routing.trust import TrustBook
from app.swarm.records import Announcement

if TYPE_CHECKING:
    from trio_typing import TaskStatus


class PromptTooLong(AppError):
    """The prompt leaves no room for a reply in the model's context."""

    code = "context_length_exceeded"


@dataclass(frozen=True)
class Outlook:
    """What an asker takes from its node besides the network: settings of sessions, the person's wishes, and trust."""

    session: SessionSettings = field(default_factory=SessionSettings)
    wishes: Callable[[], Wishes] = Wishes
    book: TrustBook = field(default_factory=TrustBook)
    dice: random.Random = field(default_factory=random.SystemRandom)


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
        outlook: Outlook | None = None,
    ) -> None:
        outlook = outlook or Outlook()
        self._network, self._ends, self._device, self._own_server = network, ends, device, own_server
        self._chooser = Chooser(ends, device)
        self._settings, self._dice = outlook.session, outlook.dice
        self.guidance = Guidance(network, members, outlook.wishes, outlook.book)
        self._auditor = Auditor(_Bench(self), outlook.book, outlook.dice)
        self._links: HopLinks | None = None
        self._replies: dict[bytes, Reply] = {}
        self._latest: AskedSession | None = None
        self._begun = self._asked_tokens = self._prompt_tokens = 0
        self.active = 0

    @property
    def bans(self) -> Bans:
        """Who is avoided for a while."""
        return self.guidance.bans

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the streams to hops until cancelled."""
        async with trio.open_nursery() as nursery:
            self._links = HopLinks(self._network, nursery, self._own_server)
            nursery.start_soon(self._auditor.run)
            task_status.started()
            await trio.sleep_forever()

    @asynccontextmanager
    async def reply(
        self, prompt_ids: Sequence[int], settings: Any, *, max_tokens: int, private_blocks: int | None = None
    ) -> AsyncIterator[Reply]:
        """Begin a reply of at most `max_tokens`; `settings` go to the ends as they are."""
        context = self._ends.context_length
        if len(prompt_ids) >= context:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens, but the model's context is {context}: shorten it"
            )
        text = self._ends.begin(prompt_ids, settings)
        demand = self._demand(min(len(prompt_ids) + max_tokens, context), len(prompt_ids), private_blocks)
        async with self._counted(SessionGuide(self.guidance, demand), demand.tokens) as session:
            reply = self._replies[session.id] = Reply(session, text, self._chooser, prompt_ids, Recording(self._dice))
            self._begun += 1
            try:
                yield reply
            finally:
                self._ended(self._replies.pop(session.id), demand, settings)

    @asynccontextmanager
    async def session(self, tokens: int, prompt_tokens: int = 0) -> AsyncIterator[RouteSession]:
        """A session of at most `tokens` tokens, for those who choose them themselves."""
        async with self._counted(SessionGuide(self.guidance, self._demand(tokens, prompt_tokens)), tokens) as session:
            yield session

    def figures(self) -> AskerFigures:
        """What this asker does and did."""
        link_s, now = self.guidance.link_s(), trio.current_time()
        replies = list(self._replies.values())
        return AskerFigures(
            sessions=tuple(reply.seen(link_s, now) for reply in replies),
            latest=self._latest,
            replies=self._begun,
            asked_tokens=self._asked_tokens + sum(len(reply.figures.token_ids) for reply in replies),
            prompt_tokens=self._prompt_tokens + sum(reply.figures.prompt_tokens for reply in replies),
            audits=self._auditor.counts,
        )

    def _demand(self, tokens: int, prompt_tokens: int, private_blocks: int | None = None) -> Demand:
        blocks = self._ends.n_blocks
        privacy = self.guidance.privacy(blocks, private_blocks)
        return Demand(Span(0, blocks), tokens, prompt_tokens, privacy=privacy)

    def _ended(self, reply: Reply, demand: Demand, settings: Any) -> None:
        """Count a reply, learn from it how fast its hops are, and keep something to audit."""
        figures = reply.figures
        self._latest = seen = reply.seen(self.guidance.link_s(), trio.current_time())
        self._asked_tokens += len(figures.token_ids)
        self._prompt_tokens += figures.prompt_tokens
        if seen.route_s is not None and not figures.recoveries:
            self.guidance.took(figures.route, seen.route_s, demand)
        exchange = None
        if reply.recording.answers:
            exchange = Exchange(
                reply.tokens,
                figures.prompt_tokens + reply.recording.first,
                tuple(reply.recording.answers),
                frozenset(reply.recording.peers),
                precisions(figures.route, self.guidance.members()),
                demand.tokens,
                demand.privacy,
                settings,
            )
        self._auditor.ended(exchange, len(reply.tokens))

    @asynccontextmanager
    async def _counted(self, guide: Guide, tokens: int) -> AsyncIterator[RouteSession]:
        self.active += 1
        try:
            async with self.open(guide, tokens, self._settings) as session:
                yield session
        finally:
            self.active -= 1

    @asynccontextmanager
    async def open(self, guide: Guide, tokens: int, settings: SessionSettings) -> AsyncIterator[RouteSession]:
        """A session that takes the ways its guide shows, freed at the end."""
        assert self._links is not None, "the asker is not running"
        shape = Shape(tokens, self._ends.hidden_size, self._ends.dtype)
        session = RouteSession(self._links, guide, self._embed, shape, settings)
        try:
            yield session
        finally:
            await session.close()

    async def _embed(self, token_ids: Sequence[int]) -> bytes:
        return await self._device.run(self._ends.embed, token_ids)


class _Bench:
    """What auditing needs of an asker; see `app.asker.audit.Bench`."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    def members(self) -> Sequence[Announcement]:
        return self._asker.guidance.members()

    def innocent(self) -> frozenset[str]:
        return self._asker.guidance.innocent()

    def shunned(self) -> frozenset[str]:
        return frozenset(self._asker.guidance.shunned())

    @asynccontextmanager
    async def pinned(self, route: Route, room: int) -> AsyncIterator[RouteSession]:
        asker = self._asker
        guide = PinnedGuide(asker.guidance, asker._demand(room, 0), route)
        # A route that breaks is no longer the one that is asked about.
        settings = replace(asker._settings, first_route_s=0.0, new_route_s=0.0)
        async with asker.open(guide, room, settings) as session:
            yield session

    async def answer_of(self, session: RouteSession, tokens: Sequence[int]) -> State:
        return last_state(await session.advance(tokens))

    async def think(self, answer: State, tokens: Sequence[int], settings: Any) -> None:
        text = self._asker._ends.begin(tokens, settings)
        await self._asker._chooser.choose(Choice(text, memoryview(answer.data), answer.dtype))

    async def deviation(self, one: Sequence[State], other: Sequence[State]) -> Deviation:
        ends = self._asker._ends
        return Deviation(*await self._asker._device.run(ends.deviation, one, other))
