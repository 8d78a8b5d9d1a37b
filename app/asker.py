"""The asker: prompts in, replies out, through whatever hops the swarm offers.

It runs the model's two ends and chooses the tokens; `app.route_session` keeps the hops. A reply is an async iterator
inside an async context, so that leaving the context frees the hops at once, whatever happened.

    async with asker.reply(prompt_ids, settings, max_tokens=50) as reply:
        async for piece in reply: ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from app.asker_figures import AskedSession, AskerFigures, HopFigures
from app.choosing import Chooser
from app.errors import AppError
from app.hop_links import HopLinks
from app.network import FrameStream, Network
from app.records import Announcement
from app.route_hops import SessionSettings, Shape
from app.route_session import RouteSession
from app.routing import UNKNOWN_LINK_S, Bans, Demand, Hop, NoRoute, Route, find_route, mend_route
from app.runner import Choice, Device, Piece, ReplyEnds
from app.session_wire import DTYPE_NAMES
from app.span import Span

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_SMOOTH = 0.1

Members = Callable[[], Sequence[Announcement]]


class PromptTooLong(AppError):
    """The prompt leaves no room for a reply in the model's context."""


@dataclass
class ReplyFigures:
    """How a reply goes; complete when it has ended."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None  # behind the first token; None where there was only one
    recoveries: int = 0
    longest_gap_s: float = 0.0
    route: Route = ()


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
        settings: SessionSettings | None = None,
    ) -> None:
        self._network, self._ends, self._device, self._members = network, ends, device, members
        self._own_server = own_server
        self._chooser = Chooser(ends, device)
        self._settings = settings or SessionSettings()
        self._links: HopLinks | None = None
        self._replies: dict[bytes, Reply] = {}
        self._latest: AskedSession | None = None
        self._begun = self._asked_tokens = self._prompt_tokens = 0
        self.bans = Bans()
        self.active = 0

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the streams to hops until cancelled."""
        async with trio.open_nursery() as nursery:
            self._links = HopLinks(self._network, nursery, self._own_server)
            task_status.started()
            await trio.sleep_forever()

    @asynccontextmanager
    async def reply(self, prompt_ids: Sequence[int], settings: Any, *, max_tokens: int) -> AsyncIterator[Reply]:
        """Begin a reply of at most `max_tokens`; `settings` go to the ends as they are."""
        context = self._ends.context_length
        if len(prompt_ids) >= context:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens, but the model's context is {context}: shorten it"
            )
        text = self._ends.begin(prompt_ids, settings)
        tokens = min(len(prompt_ids) + max_tokens, context)
        async with self.session(tokens, len(prompt_ids)) as session:
            reply = self._replies[session.id] = Reply(session, text, self._chooser, prompt_ids)
            self._begun += 1
            try:
                yield reply
            finally:
                self._ended(self._replies.pop(session.id))

    def _ended(self, reply: Reply) -> None:
        self._latest = reply.seen(self.link_s(), trio.current_time())
        self._asked_tokens += len(reply.figures.token_ids)
        self._prompt_tokens += reply.figures.prompt_tokens

    def figures(self) -> AskerFigures:
        """What this asker does and did."""
        link_s, now = self.link_s(), trio.current_time()
        replies = list(self._replies.values())
        return AskerFigures(
            sessions=tuple(reply.seen(link_s, now) for reply in replies),
            latest=self._latest,
            replies=self._begun,
            asked_tokens=self._asked_tokens + sum(len(reply.figures.token_ids) for reply in replies),
            prompt_tokens=self._prompt_tokens + sum(reply.figures.prompt_tokens for reply in replies),
        )

    @asynccontextmanager
    async def session(self, tokens: int, prompt_tokens: int = 0) -> AsyncIterator[RouteSession]:
        """A session of at most `tokens` tokens, for those who choose them themselves."""
        assert self._links is not None, "the asker is not running"
        session = RouteSession(
            self._links,
            _Guide(self, Demand(Span(0, self._ends.n_blocks), tokens, prompt_tokens)),
            self._embed,
            Shape(tokens, self._ends.hidden_size, self._ends.dtype),
            self._settings,
        )
        self.active += 1
        try:
            yield session
        finally:
            self.active -= 1
            await session.close()

    async def _embed(self, token_ids: Sequence[int]) -> bytes:
        return await self._device.run(self._ends.embed, token_ids)

    def members(self) -> Sequence[Announcement]:
        """Who is in the swarm now."""
        return self._members()

    def link_s(self) -> Callable[[str, str], float]:
        """One-way seconds between two peers, as far as this node can tell; "" is this node."""
        own = self._network.peer_id
        rtt_s = {link.peer: link.rtt_s for link in self._network.links() if link.rtt_s is not None}

        def to(peer: str) -> float:
            return 0.0 if peer in ("", own) else rtt_s.get(peer, 2 * UNKNOWN_LINK_S) / 2

        # Two peers are taken to be as far from each other as the farther one is from here.
        return lambda a, b: 0.0 if a == b else max(to(a), to(b))


class Reply:
    """An iterator over the pieces of one reply."""

    def __init__(self, session: RouteSession, text: Any, chooser: Chooser, prompt_ids: Sequence[int]) -> None:
        self._session, self._text, self._chooser = session, text, chooser
        self._next: tuple[Sequence[int], bytes | None] = (list(prompt_ids), None)
        self._begin = self._last_at = trio.current_time()
        self._first_at = 0.0
        self._route_s: float | None = None  # of a usual token, on its way through the hops
        self._ends_s: float | None = None  # and here
        self.figures = ReplyFigures(len(prompt_ids))

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> Piece:
        """The next token; raises `NoRoute` or `SessionLost` where the swarm cannot go on."""
        if self.figures.finish_reason is not None:
            raise StopAsyncIteration
        token_ids, embedded = self._next
        begin = trio.current_time()
        frame = await self._session.advance(token_ids, embedded)
        answered = trio.current_time()
        piece = await self._chooser.choose(Choice(self._text, frame.body, DTYPE_NAMES[frame.dtype]))
        self._next = ([piece.token_id], piece.embedding)
        now = trio.current_time()
        if self.figures.token_ids and self._session.recoveries == self.figures.recoveries:
            self._route_s = _smoothed(self._route_s, answered - begin)
            self._ends_s = _smoothed(self._ends_s, now - answered)
        self._note(piece, now)
        return piece

    def seen(self, link_s: Callable[[str, str], float], now: float) -> AskedSession:
        """How it stands."""
        figures, route, paces = self.figures, self._session.route, self._session.paces
        before = ["", *(hop.peer for hop in route)]
        return AskedSession(
            self._session.id.hex(),
            figures.prompt_tokens,
            len(figures.token_ids),
            now - self._begin,
            figures.tokens_per_s or 0.0,
            self._session.recoveries,
            figures.longest_gap_s,
            tuple(
                HopFigures(
                    hop.peer, hop.span.start, hop.span.stop, link_s(here, hop.peer), *paces.get(hop.peer, (None, None))
                )
                for here, hop in zip(before, route, strict=False)
            ),
            link_s(before[-1], "") if route else None,
            self._route_s,
            self._ends_s,
        )

    def _note(self, piece: Piece, now: float) -> None:
        figures = self.figures
        figures.token_ids.append(piece.token_id)
        figures.finish_reason = piece.finish_reason
        figures.recoveries = self._session.recoveries
        figures.route = self._session.route
        if figures.ttft_s is None:
            figures.ttft_s, self._first_at = now - self._begin, now
        else:
            figures.longest_gap_s = max(figures.longest_gap_s, now - self._last_at)
            figures.tokens_per_s = (len(figures.token_ids) - 1) / max(now - self._first_at, 1e-9)
        self._last_at = now


def _smoothed(usual_s: float | None, took_s: float) -> float:
    return took_s if usual_s is None else usual_s + _SMOOTH * (took_s - usual_s)


class _Guide:
    """Routes for one session, from what its asker knows."""

    def __init__(self, asker: Asker, demand: Demand) -> None:
        self._asker, self._demand = asker, demand

    def route(self, current: Route, avoid: Sequence[str]) -> Route:
        members, link_s = self._asker.members(), self._asker.link_s()
        banned = self._asker.bans.active(trio.current_time())
        shunned = {*avoid, *banned}
        try:
            if current:
                return mend_route(current, members, self._demand, link_s, avoid=shunned)
            return find_route(members, self._demand, link_s, avoid=shunned)
        except NoRoute as error:
            holders = [m.peer for m in members if m.serves and m.span is not None and error.block in m.span]
            reasons = [f"{peer} ({banned[peer]})" for peer in holders if peer in banned]
            busy = bool(reasons) and all(self._asker.bans.is_busy(peer) for peer in holders)
            why = f" that can be used now: {'; '.join(reasons)}" if reasons else ""
            raise NoRoute(error.block, why, busy=busy) from None

    def failed(self, peer: str, why: str, *, busy: bool) -> None:
        self._asker.bans.ban(peer, trio.current_time(), why, brief=busy)

    def worked(self, peer: str) -> None:
        self._asker.bans.forgive(peer)


__all__ = ["Asker", "Hop", "PromptTooLong", "Reply", "ReplyFigures", "Route"]
