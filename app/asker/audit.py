"""Audits: answers of a reply's hops are computed again over other hops and compared.

After a reply has ended, it is now and then repeated over another route with as few of the same peers as possible. A
few outputs of the last block, from a random place, must equal those of the reply (`app.asker.evidence` says how
exactly). If they differ, further routes with some of these peers and not others show which peer is wrong, and one more
confirms it; if no route can, all remaining ones are doubted a little. Doubts add up: a peer that is among the suspects
again and again takes an ever larger part of them, until it is no longer used. This node's own blocks, and peers that
the user trusts, are never accused, which makes them the best judges.

A verdict needs the compared outputs alone, not the end of the session. They are taken from a part of the reply that the
other route can repeat in time, and a session that breaks off before it has them is replaced by one over other hops.

How far answers may differ depends on the number formats that peers announce, and anybody can announce any. Where one
side alone rounded its weights to 4 bits, honest answers differ so much that alike ones show nothing: such an audit
neither passes nor fails, and nobody has agreed.

What a hop can see. A reply's hops cannot know that it will be audited: that is decided when they are done. The hops of
an audit see a whole reply, opened by the same code: its prompt, then its tokens with the same guesses and the time
between them that choosing a token takes, to its end; room for a whole reply, a close. So does a user who asks the same
again with the same seed. Only a peer that took part in both can tell that the tokens are the same; it can lie in the
reply and not in the audit, and shares the doubt with the other hops of that reply: here doubts must add up. Peers that
together hold all copies of a block and tell the same lie agree with each other. An audit never begins with the cache of
another session, as replies may: a peer that lies only in sessions that do is found by doubts as well. And an audit
shows the tokens to more peers than the reply did; private blocks stay private.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import trio

from app.asker.evidence import (
    COARSE,
    Deviation,
    Explanation,
    Observation,
    beside,
    blame,
    blame_of_homes,
    comparable,
    computes_alike,
    is_confirmed,
    minimal_liar_sets,
    occasional_liar_sets,
    precisions,
    tolerance,
    worst_case_remaining,
    wrong_answers,
)
from app.asker.guessing import right_guesses
from app.asker.recovery import OVERDUE_TIMES
from app.asker.reply import AuditSample, HiddenState, ReplyAdapter, Window
from app.asker.route_session import RouteSession
from app.asker.stats import AuditCounts
from app.core.pieces import by_chunks, in_pieces
from app.core.signal import Signal
from app.core.span import Span
from app.routing.estimates import link_seconds
from app.routing.route import KnownCosts, NoRoute, Route, RouteRequest, RouteTimes
from app.routing.search import search_route
from app.routing.trust import REMEMBERED_PEERS, TrustBook
from app.swarm.records import Announcement

log = logging.getLogger("shoal.trust")

SHARE = 0.05  # audits take at most this share of the tokens and sessions of replies
KEPT_REPLIES = 8
MEAN_DELAY_S = 4.0  # between a reply and an audit, as between two messages of a user
# Answers that a route gives later than in half of this time, as is believed, are not asked of it; a session that lasts
# for longer, or for more than `OVERDUE_TIMES` what is believed, and a while to open, is given up.
AUDIT_S = 3600.0
OPENING_S, ADAPTER_S = 60.0, 600.0
MOST_ROUTES = 8  # in one audit
MOST_BROKEN = 4  # sessions
TRIES = 12  # random routes, of which the one that tells most is taken
FIRST_TRIES = 4  # of which one is taken that can give the reply's latest answers
_AVOID_S = 100.0  # extra cost of a peer to avoid, more than any route costs
_ROUTE_S, _COARSE_TIMES = 1.0, 10.0  # least cost of all blocks of a route, and how much more it is at 4 bits
_HOP_S = 0.1  # extra cost of each hop, so that routes are no longer than those of replies
_WITHIN_HOME_S = 0.001  # largest difference between peers of one home
# Share of the routes that go over hops of the reply's formats where there are such. Those that announce a format would
# else be the only judges of one another.
_ALIKE = 0.5


class AuditContext(Protocol):
    """Opens sessions and computes heads on behalf of an audit."""

    def members(self) -> Sequence[Announcement]: ...
    def not_accused(self) -> frozenset[str]:
        """Peers that are never accused: this node, and those that the user trusts."""

    def home(self, peer: str) -> str:
        """Where a peer is: those of one home may be one."""

    def avoided(self) -> frozenset[str]:
        """Peers that cannot be used now."""

    def full(self, tokens: int) -> frozenset[str]:
        """Peers that lately had no room for a session of so many tokens."""

    async def times(self, prompt_tokens: int, room: int) -> Callable[[Route], RouteTimes]:
        """Return a function for how long a reply to so many tokens takes over a route."""

    def pinned(
        self, route: Route, room: int, adapter: ReplyAdapter | None
    ) -> AbstractAsyncContextManager[RouteSession]:
        """Open a session on this route and no other; raises `AppError` if the adapter is offered no more."""

    async def sample_and_discard(
        self, answers: Sequence[HiddenState], tokens: Sequence[int], guesses: Sequence[int], settings: Any
    ) -> None:
        """Run head and sampler and drop the result, so that an audit's timing looks like a reply's."""

    async def answers_of(
        self, session: RouteSession, tokens: Sequence[int], guesses: Sequence[int]
    ) -> list[HiddenState]:
        """Feed tokens and guesses; return the answer after the tokens and, unless the route broke, each guess."""

    async def deviation(self, one: Sequence[HiddenState], other: Sequence[HiddenState]) -> Deviation: ...


@dataclass
class _AuditAnswer:
    answers: tuple[HiddenState, ...]
    precisions: tuple[str, ...]
    seen: Observation


@dataclass
class _AuditRun:
    """One audited sample, and all answers to it so far."""

    sample: AuditSample
    answered: list[_AuditAnswer]  # the reply's own first
    window: Window | None = None  # that is compared; None: no other route has answered yet
    broken: int = 0  # sessions that broke before they had given these answers
    broke: Counter[str] = field(default_factory=Counter)  # homes with hops that may have broken them, and how often

    @property
    def seen(self) -> list[Observation]:
        return [one.seen for one in self.answered]


class _Plan(NamedTuple):
    """The next session of an audit: its route, the window that is compared, and how long it may last."""

    route: Route
    window: Window
    limit_s: float


class Auditor:
    """Audits replies within `SHARE` of the traffic; `run` must be running."""

    def __init__(self, context: AuditContext, book: TrustBook, rng: random.Random) -> None:
        self._context, self._book, self._rng = context, book, rng
        self._kept: list[AuditSample] = []
        self._under_way: _AuditRun | None = None
        self._asked_tokens = self._replies = 0
        self._wake = Signal()
        self._tokens = self._sessions = self._passed = self._failed = 0
        self._unclear: dict[str, int] = {}  # peer -> audits of it that showed nothing; the latest last

    @property
    def counts(self) -> AuditCounts:
        """Totals of auditing."""
        return AuditCounts(self._sessions, self._tokens, self._passed, self._failed)

    def ended(self, sample: AuditSample | None, tokens: int) -> None:
        """Note that a reply of `tokens` tokens has ended; `sample` is None if nothing of it can be audited."""
        self._asked_tokens += tokens
        self._replies += 1
        if sample is not None:
            self._kept = [*self._kept[-KEPT_REPLIES + 1 :], sample]
        self._wake.notify()

    async def run(self) -> None:
        """Audit until cancelled."""
        seen = 0
        while True:
            await self._wake.wait_beyond(seen)
            seen = self._wake.version
            await self._pause()
            while await self._next():
                await self._pause()
            document = self._book.unsaved()
            if document is not None:
                await trio.to_thread.run_sync(self._book.write, document)

    async def _pause(self) -> None:
        """Let some time pass, as between two messages of a user."""
        await trio.sleep(min(self._rng.expovariate(1 / MEAN_DELAY_S), 8 * MEAN_DELAY_S))

    async def _next(self) -> bool:
        """Do one session of auditing if the share allows it; True if there may be more to do."""
        if self._under_way is None:
            self._under_way = self._choose()
        run = self._under_way
        if run is None or not self._affordable(run.sample):
            return False
        plan = await self._next_session(run)
        if plan is None:
            self._conclude(run)
            return True
        try:
            await self._weigh(run, plan, *await self._compute(run, plan))
        except Exception as error:  # torch raises errors of its own if this device is full
            log.info("an audit broke off: %r", error)
            run.broken += 1  # a hop failed, or this device did: try again later, `MOST_BROKEN` times at most
            if run.broken >= MOST_BROKEN:
                self._conclude(run)
            return False
        if self._under_way is run and self._is_settled(run):
            self._conclude(run)  # now, even if the share is used up
        return True

    def _is_settled(self, run: _AuditRun) -> bool:
        """True if no further answer could change the verdict."""
        stories, always = minimal_liar_sets(run.seen, self._context.not_accused())
        if len(stories) != 1 or not always or self._is_proved(run, stories[0]):
            return len(stories) < 2
        # One more answer confirms it, unless it says nothing: then others would not either.
        return any(one.unclear and not one.peers.isdisjoint(stories[0]) for one in run.seen)

    def _is_proved(self, run: _AuditRun, liars: Explanation) -> bool:
        return is_confirmed(liars, run.seen) and not self._beside(run, liars)

    def _beside(self, run: _AuditRun, liars: Explanation) -> dict[str, frozenset[str]]:
        """Homes, with their peers, that could have made these seem to lie."""
        return beside(liars, run.seen, self._context.not_accused(), self._context.home)

    def _affordable(self, sample: AuditSample) -> bool:
        tokens_fit = self._tokens + sample.cost <= SHARE * self._asked_tokens
        return tokens_fit and self._sessions + 1 <= SHARE * self._replies

    def _choose(self) -> _AuditRun | None:
        """Choose the kept sample whose peers were audited least; its own answers are the first."""
        # Samples of a peer that is known to lie tell nothing new.
        self._kept = [one for one in self._kept if all(self._book.standing(peer).trusted for peer in one.peers)]
        fresh = [one for one in self._kept if self._suspects(one.peers) and self._affordable(one)]
        if not fresh:
            return None

        def audited(sample: AuditSample) -> tuple[int, float]:
            times = [self._book.agreed(one) + self._unclear.get(one, 0) for one in self._suspects(sample.peers)]
            return min(times), self._rng.random()

        sample = min(fresh, key=audited)
        self._kept.remove(sample)
        own = _AuditAnswer((), sample.precisions, Observation(sample.peers, 0, links=links_of(sample.routes)))
        return _AuditRun(sample, [own])

    def _suspects(self, peers: frozenset[str]) -> frozenset[str]:
        return peers - self._context.not_accused()

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _next_session(self, run: _AuditRun) -> _Plan | None:
        """Return the session whose answers would tell most, or None if none would tell anything more."""
        sample = run.sample
        times = await self._context.times(sample.prompt_tokens, sample.room)
        if len(run.answered) == 1:
            return await self._first_session(run, times)
        stories, _ = minimal_liar_sets(run.seen, self._context.not_accused())
        if self._is_settled(run) or len(run.answered) >= MOST_ROUTES:
            return None
        if len(stories) == 1:
            route = await self._route_with(run, stories[0])
            return None if route is None else _plan(run, route, times(route))
        suspects = sorted(blame(stories))
        best: tuple[int, _Plan | None] = (len(stories), None)
        for _ in range(TRIES):
            avoid = self._rng.sample(suspects, self._rng.randint(0, len(suspects)))
            route = await self._random_route(run, avoid)
            plan = None if route is None else _plan(run, route, times(route))
            if plan is not None:
                left = worst_case_remaining([hop.peer for hop in plan.route], stories, run.seen)
                best = min(best, (left, plan), key=lambda one: one[0])
            await trio.lowlevel.checkpoint()
        return best[1]

    async def _first_session(self, run: _AuditRun, times: Callable[[Route], RouteTimes]) -> _Plan | None:
        """Return a session over other peers than the reply's, which can give late answers of it in time.

        Else one that can give the latest of those that were found.
        """
        best: _Plan | None = None
        for _ in range(FIRST_TRIES):
            route = await self._random_route(run, avoid=run.sample.peers)
            if route is None or run.sample.peers.issuperset(hop.peer for hop in route):
                break
            plan = _plan(run, route, times(route))
            if plan is not None and (best is None or plan.window.stop > best.window.stop):
                best = plan
            if best is not None and best.window == run.sample.windows[-1]:
                break
        return best

    async def _route_with(self, run: _AuditRun, liars: Explanation) -> Route | None:
        """Return a route with one of these peers and as few others of the reply as possible, past the homes beside it.

        None if there is none, or if it would show no more than the answers so far.
        """
        homes = self._beside(run, liars)
        members = {member.peer for member in self._context.members()} if homes else set[str]()
        others = frozenset(peer for peer in members if self._context.home(peer) in homes)
        route = await self._random_route(run, (run.sample.peers | others) - liars, prefer=liars)
        if route is None or liars.isdisjoint(hop.peer for hop in route):
            return None
        near = {peer for link in links_of([route]) if link & liars for peer in link} - liars
        shows_more = not is_confirmed(liars, run.seen) or not homes.keys() <= {self._context.home(one) for one in near}
        return route if shows_more else None

    async def _random_route(
        self, run: _AuditRun, avoid: Sequence[str] | frozenset[str], prefer: frozenset[str] = frozenset()
    ) -> Route | None:
        """Return a random route; the peers to avoid are used only if there are no others.

        Each home has one voice, however many peers it has and how many blocks they hold. Homes that may have broken
        sessions of this audit are avoided too. Often the route goes over hops that compute in the formats of the reply,
        if there is one: that shows most. Those to prefer are used whatever their format.
        """
        sample, members, excluded = run.sample, self._context.members(), self._context.avoided()
        wanted, full = Span(0, len(sample.precisions)), self._context.full(sample.room)
        homes = await in_pieces(by_chunks(lambda some: {m.peer: self._context.home(m.peer) for m in some}, members))
        drawn_s = {home: self._rng.random() for home in dict.fromkeys(homes.values())}

        def block_s(member: Announcement) -> float:
            route_s = _ROUTE_S + drawn_s[homes[member.peer]] + _WITHIN_HOME_S * self._rng.random()
            return route_s * (_COARSE_TIMES if member.is_coarse else 1.0) / len(wanted)

        blocks_s = {m.peer: block_s(m) for m in members}
        hops_s = {peer: _HOP_S + _AVOID_S * run.broke[home] for peer, home in homes.items()}
        hops_s |= {peer: _AVOID_S + hops_s.get(peer, 0.0) for peer in avoid}
        blocks_s |= dict.fromkeys(prefer, 0.0)
        hops_s |= dict.fromkeys(prefer, 0.0)
        request = RouteRequest(wanted, sample.room, privacy=sample.privacy, full=full, finest_first=False)
        no_links = link_seconds("", dict.fromkeys(homes, 0.0), ())  # distances do not matter
        unlike = await in_pieces(
            by_chunks(lambda some: {m.peer: m for m in some if not computes_alike(m, sample.precisions)}, members)
        )
        attempts = [excluded]
        if unlike and not prefer and self._rng.random() < _ALIKE:
            attempts.insert(0, excluded | unlike.keys() | frozenset(avoid))
        for avoided in attempts:
            with suppress(NoRoute):
                known = KnownCosts(blocks_s, hops_s)
                return await in_pieces(search_route(members, request, no_links, avoid=avoided, known=known))
        return None

    # --- answers ------------------------------------------------------------------------------------------------------

    async def _compute(self, run: _AuditRun, plan: _Plan) -> tuple[tuple[HiddenState, ...], tuple[str, ...]]:
        """Repeat the reply on this route; return the answers of the window, if they came before the session ended.

        Also returns the formats in which the blocks were computed, as announced before. Raises if the route breaks, or
        takes too long, before the answers are there.
        """
        announced = [(member.peer, member.number_format) for member in self._context.members()]
        answers: list[HiddenState] = []
        blamed, wires = frozenset[str](), False
        self._sessions += 1
        try:
            with trio.fail_after(plan.limit_s):
                async with self._context.pinned(plan.route, run.sample.room, run.sample.adapter) as session:
                    try:
                        await self._repeat(run.sample, plan.window, session, answers)
                    finally:
                        blamed, wires = session.blamed, bool(session.wires)
        except Exception as error:
            if len(answers) < len(plan.window.answers):
                peers = blamed or {hop.peer for hop in plan.route}
                run.broke.update({self._context.home(peer) for peer in peers})
                raise
            log.info("an audit broke off once its answers were there: %r", error)
        return tuple(answers), precisions([plan.route], announced, rounded=wires)

    async def _repeat(
        self, sample: AuditSample, window: Window, session: RouteSession, answers: list[HiddenState]
    ) -> None:
        """Repeat a reply to its end, and take the answers of the window."""
        wanted = range(window.first, window.stop + 1)
        fed, until = 0, sample.prompt_tokens
        rounds = iter(sample.rounds)
        while until <= sample.stop:
            guesses = next(rounds, ())
            self._tokens += until - fed + len(guesses)
            states = await self._context.answers_of(session, sample.tokens[fed:until], guesses)
            guesses = guesses[: len(states) - 1]
            await self._context.sample_and_discard(states, sample.tokens[:until], guesses, sample.settings)
            right = right_guesses(guesses, sample.tokens[until:])
            if right < len(guesses):
                session.cut(until + right)
            answers += [state for at, state in enumerate(states[: right + 1], until) if at in wanted]
            fed, until = until + right, until + right + 1

    async def _weigh(
        self, run: _AuditRun, plan: _Plan, answers: tuple[HiddenState, ...], numbers: tuple[str, ...]
    ) -> None:
        """Add answers to the group that they agree with; if the first two do not disagree, the audit is over."""
        route, run.window = plan.route, plan.window
        run.answered[0].answers = plan.window.answers
        group, unclear = 1 + max(one.seen.group for one in run.answered), set[int]()
        for one in run.answered:
            apart, allowed = await self._context.deviation(answers, one.answers), tolerance(numbers, one.precisions)
            if apart.within(allowed) and allowed == COARSE:
                unclear.add(one.seen.group)
            elif apart.within(allowed):
                group, unclear = one.seen.group, set()
                break
        peers = frozenset(hop.peer for hop in route)
        seen = Observation(peers, group, frozenset(unclear), links_of([route]))
        run.answered.append(_AuditAnswer(answers, numbers, seen))
        if len(run.answered) > 2:
            return
        suspects, in_both = self._suspects(peers | run.sample.peers), peers & run.sample.peers
        if group == 0:
            self._passed += 1
            self._under_way = None
            for peer in suspects - in_both:  # who computed both agrees with itself
                self._book.note(peer, "agreed", "agreed with others")
            self._note_unclear(suspects & in_both)
        elif unclear:
            self._under_way = None
            self._note_unclear(suspects)
        else:
            self._failed += 1
            log.warning("an audit of %s disagrees with what %s answered", sorted(peers), sorted(run.sample.peers))

    def _note_unclear(self, peers: Iterable[str]) -> None:
        for peer in peers:
            self._unclear[peer] = self._unclear.pop(peer, 0) + 1
        self._unclear = dict([*self._unclear.items()][-REMEMBERED_PEERS:])

    def _conclude(self, run: _AuditRun) -> None:
        """Record the verdict on every peer that took part."""
        self._under_way = None
        if len(run.answered) < 2:
            return  # no other peer serves these blocks
        stories, always = minimal_liar_sets(run.seen, self._context.not_accused())
        routes = len(run.answered)
        if len(stories) == 1 and always and not is_confirmed(stories[0], run.seen):
            stories, always = occasional_liar_sets(run.seen, self._context.not_accused()), False
        if len(stories) == 1 and (homes := self._beside(run, stories[0])):
            shares, always = blame_of_homes([*stories, *homes.values()], self._book.doubt), False
        else:
            shares = blame(stories, self._book.doubt)
        if len(stories) == 1 and always:
            for peer in stories[0]:
                log.warning("%s returns wrong activations: %d routes were compared", peer, routes)
                self._book.note(peer, "lied", f"returned wrong activations ({_against(run, stories[0])})")
        else:
            for peer, share in shares.items():
                self._book.note(peer, "doubted", f"part of answers that {routes} routes disagree about", share)
        compared = frozenset[str]().union(*(one.peers for one in comparable(run.seen)))
        cleared = self._suspects(compared) - shares.keys()
        for peer in cleared if stories else ():
            self._book.note(peer, "agreed", "agreed with others")


def _plan(run: _AuditRun, route: Route, times: RouteTimes) -> _Plan | None:
    """Return a session on this route that gives the latest answers that it can give in time; None if it gives none."""
    sample = run.sample

    def seconds(stop: int) -> float:
        return times.first_token_s + (stop - sample.prompt_tokens) * times.token_s

    windows = sample.windows if run.window is None else (run.window,)
    window = next((one for one in reversed(windows) if seconds(one.stop) <= AUDIT_S / 2), None)
    if window is None:
        return None
    opening_s = OPENING_S if sample.adapter is None else ADAPTER_S
    return _Plan(route, window, min(opening_s + OVERDUE_TIMES * seconds(sample.stop), AUDIT_S))


def links_of(routes: Iterable[Route]) -> frozenset[frozenset[str]]:
    """Return the pairs of peers that follow each other on one of these routes."""
    return frozenset(frozenset((one.peer, other.peer)) for route in routes for one, other in pairwise(route))


def _against(run: _AuditRun, liars: Explanation) -> str:
    with_them = sum(not one.peers.isdisjoint(liars) for one in run.seen)
    wrong, agree = wrong_answers(liars, run.seen), len(run.answered) - with_them
    return f"wrong in {wrong} of {with_them} answers, while {agree} without it agree"
