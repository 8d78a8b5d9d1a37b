"""Audits: what a reply's hops answered is computed again by others and compared.

After a reply has ended, its tokens are now and then sent over another route, with as few of the same peers as can be:
some of them as a prompt, the next few one by one, as in a reply. The last block's outputs must be those that the reply
got (`app.asker.evidence` says how exactly). Where they differ, further routes with some of these peers and not others
tell who lied; where no route can, all that are left are doubted a little. This node's own blocks, and peers that the
person trusts, are never suspected, so they are the best judges.

What a hop can see. A reply's hops cannot know that it will be audited: that is decided when they are done. The hops of
an audit see an ordinary session, opened by the same code: a prompt, tokens one at a time after as long as it takes to
choose one, room for a whole reply, a close. That a prompt has been seen before means nothing, as every further message
of a conversation repeats it. Not hidden: audits are short (a few tokens after the prompt), so a peer that lies late
in a session only is caught in replies but not in audits; it shares the blame with the other hops of those replies until
it is the only one left in all of them. Peers that together hold all copies of a block and tell the same lie agree with
each other. And what is audited is shown to more peers than the reply was; private blocks stay private.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from app.asker.audit_sample import AuditSample, HiddenStates
from app.asker.evidence import (
    Deviation,
    Explanation,
    Observation,
    blame,
    explanations,
    precisions,
    tolerance,
    undecided,
)
from app.asker.route_session import RouteSession
from app.asker.stats import AuditCounts
from app.core.errors import AppError
from app.core.span import Span
from app.routing.route import KnownCosts, NoRoute, Route, RouteRequest
from app.routing.search import find_route
from app.routing.trust import TrustBook
from app.swarm.records import Announcement
from p2p.errors import P2PError

log = logging.getLogger("shoal.trust")

SHARE = 0.05  # of the tokens that are asked for, and of the sessions
KEPT_REPLIES = 8
MEAN_DELAY_S = 4.0  # between a reply and an audit: people, too, think before they go on
AUDIT_S = 120.0
MOST_ROUTES = 8  # in one inquiry
MOST_BROKEN = 4  # sessions
TRIES = 12  # random routes, of which the most telling is taken
_SHUN_S = 100.0  # more than any route costs


class AuditContext(Protocol):
    """What auditing needs of its asker."""

    def members(self) -> Sequence[Announcement]: ...
    def not_accused(self) -> frozenset[str]:
        """Peers that are never suspected: this node, and those that the person trusts."""

    def avoided(self) -> frozenset[str]:
        """Peers that cannot be used now."""

    def pinned(self, route: Route, room: int) -> AbstractAsyncContextManager[RouteSession]:
        """A session on this route and no other."""

    async def sample_and_discard(self, answer: HiddenStates, tokens: Sequence[int], settings: Any) -> None:
        """Take as long as it takes to choose a token."""

    async def answer_of(self, session: RouteSession, tokens: Sequence[int]) -> HiddenStates: ...
    async def deviation(self, one: Sequence[HiddenStates], other: Sequence[HiddenStates]) -> Deviation: ...


@dataclass
class _AuditAnswer:
    route: Route | None  # None: the reply itself
    answers: tuple[HiddenStates, ...]
    precisions: tuple[str, ...]
    seen: Observation


@dataclass
class _AuditRun:
    """One exchange, and all answers to it so far."""

    exchange: AuditSample
    answered: list[_AuditAnswer] = field(default_factory=list)
    broken: int = 0  # sessions that did not come to their end

    @property
    def seen(self) -> list[Observation]:
        return [one.seen for one in self.answered]


class Auditor:
    """Audits replies within its share of the traffic; `run` must be running."""

    def __init__(self, bench: AuditContext, book: TrustBook, rng: random.Random) -> None:
        self._context, self._book, self._rng = bench, book, rng
        self._kept: list[AuditSample] = []
        self._inquiry: _AuditRun | None = None
        self._asked_tokens = self._replies = 0
        self._wake = trio.Event()
        self._tokens = self._sessions = self._passed = self._failed = 0

    @property
    def counts(self) -> AuditCounts:
        """How much was audited."""
        return AuditCounts(self._sessions, self._tokens, self._passed, self._failed)

    def ended(self, exchange: AuditSample | None, tokens: int) -> None:
        """A reply of so many tokens has ended; None: nothing of it can be audited."""
        self._asked_tokens += tokens
        self._replies += 1
        if exchange is not None:
            self._kept = [*self._kept[-KEPT_REPLIES + 1 :], exchange]
        self._wake.set()

    async def run(self) -> None:
        """Audit until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            await trio.sleep(min(self._rng.expovariate(1 / MEAN_DELAY_S), 8 * MEAN_DELAY_S))
            while await self._next():
                pass
            document = self._book.unsaved()
            if document is not None:
                await trio.to_thread.run_sync(self._book.write, document)

    async def _next(self) -> bool:
        """One session's worth of auditing, if the share allows it; whether there may be more to do."""
        if self._inquiry is None:
            self._inquiry = self._choose()
        inquiry = self._inquiry
        if inquiry is None or not self._affordable(inquiry.exchange):
            return False
        route = await self._next_route(inquiry)
        if route is None:
            self._conclude(inquiry)
            return True
        answers = await self._compute(inquiry.exchange, route)
        if answers is None:  # somebody failed: another time, but not for ever
            inquiry.broken += 1
            if inquiry.broken >= MOST_BROKEN or len(inquiry.answered) == 1:
                self._conclude(inquiry)
            return False
        await self._weigh(inquiry, route, answers)
        if self._inquiry is inquiry and len(explanations(inquiry.seen, self._context.not_accused())[0]) < 2:
            self._conclude(inquiry)  # at once, though the share may be spent
        return True

    def _affordable(self, exchange: AuditSample) -> bool:
        tokens_fit = self._tokens + exchange.cost <= SHARE * self._asked_tokens
        return tokens_fit and self._sessions + 1 <= SHARE * self._replies

    def _choose(self) -> _AuditRun | None:
        """The kept reply whose hops were audited least; its own answer is the first."""
        # Replies of a peer that is known to lie teach nothing new.
        self._kept = [one for one in self._kept if all(self._book.standing(peer).trusted for peer in one.peers)]
        fresh = [one for one in self._kept if self._suspects(one.peers) and self._affordable(one)]
        if not fresh:
            return None

        def audited(exchange: AuditSample) -> tuple[int, float]:
            return min(self._book.agreed(peer) for peer in self._suspects(exchange.peers)), self._rng.random()

        exchange = min(fresh, key=audited)
        self._kept.remove(exchange)
        own = _AuditAnswer(None, exchange.answers, exchange.precisions, Observation(exchange.peers, 0))
        return _AuditRun(exchange, [own])

    def _suspects(self, peers: frozenset[str]) -> frozenset[str]:
        return peers - self._context.not_accused()

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _next_route(self, inquiry: _AuditRun) -> Route | None:
        """The route whose answer would tell most, or None where no route tells anything more."""
        if len(inquiry.answered) == 1:
            route = self._random_route(inquiry.exchange, shun=inquiry.exchange.peers)
            others = frozenset() if route is None else frozenset(hop.peer for hop in route)
            return route if others - inquiry.exchange.peers else None
        stories, _ = explanations(inquiry.seen, self._context.not_accused())
        if len(stories) < 2 or len(inquiry.answered) >= MOST_ROUTES:
            return None
        suspects = sorted(blame(stories))
        best: tuple[int, Route | None] = (len(stories), None)
        for _ in range(TRIES):
            shun = self._rng.sample(suspects, self._rng.randint(0, len(suspects)))
            route = self._random_route(inquiry.exchange, shun)
            if route is not None:
                left = undecided([hop.peer for hop in route], stories, inquiry.seen)
                best = min(best, (left, route), key=lambda one: one[0])
            await trio.lowlevel.checkpoint()
        return best[1]

    def _random_route(self, exchange: AuditSample, shun: Sequence[str] | frozenset[str]) -> Route | None:
        """Any route, with the peers to shun only where there are no others."""
        members = self._context.members()
        costs = {m.peer: self._rng.random() * _SHUN_S / 100 for m in members}
        costs |= {peer: _SHUN_S for peer in shun}
        demand = RouteRequest(Span(0, len(exchange.precisions)), exchange.room, privacy=exchange.privacy)
        try:
            return find_route(
                members, demand, lambda a, b: 0.0, avoid=self._context.avoided(), known=KnownCosts(penalty_s=costs)
            )
        except NoRoute:
            return None

    # --- answers ------------------------------------------------------------------------------------------------------

    async def _compute(self, exchange: AuditSample, route: Route) -> tuple[HiddenStates, ...] | None:
        """What this route answers; None where it breaks before the end."""
        answers: list[HiddenStates] = []
        fed, until = 0, exchange.first
        self._sessions += 1
        try:
            with trio.fail_after(AUDIT_S):
                async with self._context.pinned(route, exchange.room) as session:
                    while len(answers) < len(exchange.answers):
                        new = exchange.tokens[fed:until]
                        self._tokens += len(new)
                        answers.append(await self._context.answer_of(session, new))
                        await self._context.sample_and_discard(answers[-1], exchange.tokens[:until], exchange.settings)
                        fed, until = until, until + 1
        except (AppError, P2PError, trio.TooSlowError) as error:
            log.info("an audit did not come to its end: %s", error)
            return None
        return tuple(answers)

    async def _weigh(self, inquiry: _AuditRun, route: Route, answers: tuple[HiddenStates, ...]) -> None:
        """Add an answer to those that it agrees with; when the first two agree, the audit is over."""
        numbers = precisions(route, self._context.members())
        group = 1 + max(one.seen.group for one in inquiry.answered)
        for one in inquiry.answered:
            apart = await self._context.deviation(answers, one.answers)
            if apart.within(tolerance(numbers, one.precisions)):
                group = one.seen.group
                break
        peers = frozenset(hop.peer for hop in route)
        inquiry.answered.append(_AuditAnswer(route, answers, numbers, Observation(peers, group)))
        if len(inquiry.answered) == 2 and group == 0:
            self._passed += 1
            self._inquiry = None
            for peer in self._suspects(peers | inquiry.exchange.peers):
                self._book.note(peer, "agreed", "agreed with others")
        elif len(inquiry.answered) == 2:
            self._failed += 1
            log.warning("an audit of %s disagrees with what %s answered", sorted(peers), sorted(inquiry.exchange.peers))

    def _conclude(self, inquiry: _AuditRun) -> None:
        """Nothing more can be learnt about these answers: draw the conclusion."""
        self._inquiry = None
        if len(inquiry.answered) < 2:
            return  # nobody else holds these blocks
        stories, always = explanations(inquiry.seen, self._context.not_accused())
        routes = len(inquiry.answered)
        if len(stories) == 1 and always:
            for peer in stories[0]:
                log.warning("%s returns wrong activations: %d routes were compared", peer, routes)
                self._book.note(peer, "lied", f"returned wrong activations ({_against(inquiry, stories[0])})")
        else:
            for peer, share in blame(stories).items():
                self._book.note(peer, "doubted", f"part of answers that {routes} routes disagree about", share)
        cleared = self._suspects(frozenset[str]().union(*(one.peers for one in inquiry.seen))) - blame(stories).keys()
        for peer in cleared if stories else ():
            self._book.note(peer, "agreed", "agreed with others")


def _against(inquiry: _AuditRun, liars: Explanation) -> str:
    with_them = sum(not one.peers.isdisjoint(liars) for one in inquiry.seen)
    agree = len(inquiry.answered) - with_them
    return f"wrong in {with_them} of {with_them} answers, while {agree} without it agree"
