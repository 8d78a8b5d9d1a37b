"""One sequence of tokens and the hops that hold its cache, as its asker sees them.

It feeds tokens, waits for the last hop's answer, and mends the route when a hop dies, freezes, leaves or forgets. It
knows no text: `app.asker.asker` chooses the tokens. How hops are spoken with is in `app.asker.route_hops`, what a late
answer means in `app.asker.recovery`, who must send what again in `app.asker.recovery`; which route to take is a
question to its `RouteSource`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from app.asker.hop_links import HopLinks
from app.asker.recovery import HopFailed, HopProgress, HopState, overdue_s, plan_resume
from app.asker.route_hops import RouteHops, RouteSource, SessionSettings, SessionShape
from app.core.errors import AppError
from app.core.reasons import because
from app.routing.reroute import RerouteTimer, RunningRoute
from app.routing.route import NoRoute, Route
from app.session.wire import DTYPES, KEEP, Frame, row_bytes

log = logging.getLogger("shoal.asker")

_SMOOTH = 0.2
LOOK_AGAIN_S = 1.0
PACE_EVERY = 16  # tokens, between two questions to the hops about their pace
WAIT_FOR_HOLDER_S = 0.2  # between two looks for somebody who serves a block
_ROUNDS = 3  # epochs until hops and plan agree


class SessionLost(AppError):
    """A session could not be kept alive; the message says why."""

    code = "session_lost"


class RouteSession:
    """A session over a route; `close` must be awaited at its end, whatever happened."""

    def __init__(
        self,
        links: HopLinks,
        guide: RouteSource,
        embed: Callable[[Sequence[int]], Awaitable[bytes]],
        shape: SessionShape,
        settings: SessionSettings,
    ) -> None:
        self._hops = RouteHops(links, guide, shape, settings)
        self._guide, self._embed, self._settings = guide, embed, settings
        self._row_bytes = row_bytes(DTYPES[shape.dtype], shape.width)
        self._history: list[int] = []
        self._settled: Route = ()  # the last one that stood
        self._flowing = False  # the route is set up and has been fed all tokens
        self._usual_s = 0.0  # a usual single-token step
        self._cut_to = KEEP  # hops may still cache other tokens from this position on
        self._look_again_at = 0.0  # for somebody to take over from hops that leave
        self._links = links
        self._recheck = RerouteTimer(trio.current_time())
        self._better: Route = ()  # to be taken once its hops are linked
        self._better_until = 0.0
        self.recoveries = 0
        self.moves = 0  # to better routes, of its own accord
        self.reached: int | None = (
            None  # tokens that went through all blocks, as the last hop said while it was awaited
        )

    @property
    def id(self) -> bytes:
        """The session's name at its hops."""
        return self._hops.id

    @property
    def route(self) -> Route:
        """The hops in use."""
        return self._hops.route

    @property
    def paces(self) -> Mapping[str, tuple[float, float]]:
        """For each hop that said it: seconds of a usual step there, and of the wait for it."""
        return self._hops.paces

    async def advance(self, token_ids: Sequence[int], embedded: bytes | None = None) -> Frame:
        """Feed the next tokens: the frame with the last block's output behind the last of them.

        Raises `NoRoute` or `SessionLost` where the swarm cannot carry the session any longer.
        """
        first, hops = len(self._history), self._hops
        self._history += token_ids
        hops.answer, hops.awaited, self.reached = None, len(self._history), None
        begin = trio.current_time()
        if hops.leaving and self._can_leave():
            self._flowing = False
        if self._flowing and hops.trouble is None and self._finds_better():
            await self._move()
            smooth = False
        else:
            smooth = self._flowing and hops.trouble is None
        if smooth:
            await self._feed(first, embedded)
            if len(self._history) % PACE_EVERY == 0:
                await hops.ask_paces()
        for _ in range(self._settings.attempts_without_progress):
            if hops.trouble is not None or not self._flowing:
                smooth = False
                await self._repair()
            answer = await self._wait_answer()
            if answer is not None:
                for hop in () if smooth else self.route:
                    self._guide.worked(hop.peer)
                if smooth and len(token_ids) == 1:
                    took_s = trio.current_time() - begin
                    self._usual_s += (_SMOOTH if self._usual_s else 1.0) * (took_s - self._usual_s)
                return answer
        raise SessionLost("the route failed again and again without a single token; try again later")

    def cut(self, length: int) -> None:
        """Forget the tokens from position `length` on; the hops are told with the next tokens, in a new epoch."""
        assert 0 <= length <= len(self._history), "only what was fed can be forgotten"
        del self._history[length:]
        self._cut_to = min(self._cut_to, length)
        self._flowing = False

    async def close(self) -> None:
        """Free all hops at once; never waits for them."""
        with trio.CancelScope(shield=True):
            await self._hops.close()

    # --- feeding and waiting ------------------------------------------------------------------------------------------

    async def _feed(self, first: int, embedded: bytes | None = None) -> None:
        """Send tokens from position `first` on to the first hop, in chunks."""
        hops, epoch = self._hops, self._hops.epoch
        for start in range(first, len(self._history), self._settings.chunk_rows):
            chunk = self._history[start : start + self._settings.chunk_rows]
            data = embedded if embedded is not None and len(chunk) == len(self._history) - first else None
            if data is None:
                data = await self._embed(chunk)
            if hops.trouble is not None or epoch != hops.epoch:
                return
            await hops.feed(start, len(chunk), data)

    async def _wait_answer(self) -> Frame | None:
        """The awaited frame, or None where the route needs mending."""
        hops = self._hops
        progress = HopProgress(trio.current_time(), self._row_bytes, self._settings.stuck_s)
        while True:
            await hops.settle(overdue_s(self._usual_s))
            if hops.answer is None and hops.trouble is None:
                await self._probe(progress)
            if hops.answer is not None:
                return hops.answer
            if hops.trouble is not None:
                return None

    async def _probe(self, progress: HopProgress) -> None:
        """Find out why nothing comes: whoever is silent, or a link that lost something, is the trouble."""
        hops = self._hops
        await hops.probe()
        if hops.answer is not None or hops.trouble is not None:
            return
        last = hops.states.get(hops.route[-1].peer)
        if last is not None and last.epoch == hops.epoch:
            self.reached = min(last.position, len(self._history))
        for hop in hops.route:
            if hop.peer not in hops.states:
                why = because("hop_silent", f"it has not answered for {self._settings.probe_s:g} s", hop.peer)
                self._guide.failed(hop.peer, why, busy=False)
                hops.trouble = HopFailed(hop.peer, why, blameless=True)  # blamed already, as others may be
        if hops.trouble is None:
            loss = progress.loss(hops.route, hops.states, hops.epoch, len(self._history), trio.current_time())
            if loss is not None:
                hops.note_bad_link(loss.sender)
                hops.trouble = loss.failure

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _repair(self) -> None:
        """Set up a route on which all tokens so far are cached or under way."""
        begin, hops = trio.current_time(), self._hops
        wait_s = self._settings.new_route_s if self._settled else self._settings.first_route_s
        self.recoveries += bool(self._settled) and hops.trouble is not None
        self._better = ()
        while True:
            self._note_failure()
            try:
                await self._set_up(self._next_route())
                return
            except NoRoute:
                if trio.current_time() - begin > wait_s:
                    raise
                hops.trouble = None
                await trio.sleep(WAIT_FOR_HOLDER_S)
            except HopFailed as failure:
                hops.trouble = failure

    def _next_route(self) -> Route:
        """A route without the hops that leave; one that still has them where there is no other yet."""
        leaving = self._hops.leaving
        try:
            return self._guide.route(self._settled, sorted(leaving))
        except NoRoute:
            if not leaving:
                raise
            return self._guide.route(self._settled, [])

    def _can_leave(self) -> bool:
        """Whether the route has hops that are about to go and, looked up now and then, others could take over."""
        now, leaving = trio.current_time(), self._hops.leaving
        if now < self._look_again_at or not any(hop.peer in leaving for hop in self.route):
            return False
        self._look_again_at = now + LOOK_AGAIN_S
        try:
            self._guide.route(self._settled, sorted(leaving))
        except NoRoute:
            return False
        return True

    def _finds_better(self) -> bool:
        """Whether a better route is there to be taken now: it was looked for a while ago, and its hops are linked."""
        now = trio.current_time()
        if self._better:
            if all(self._links.is_open(hop.peer) for hop in self._better):
                return True
            if now >= self._better_until:
                self._better = ()
        elif self._usual_s and self._recheck.is_due(now):
            standing = RunningRoute(self.route, self._usual_s, len(self._history))
            self._better = self._guide.better(standing) or ()
            self._better_until = now + self._settings.open_s
            for hop in self._better:
                self._links.prepare(hop.peer, timeout_s=self._settings.open_s)
        return False

    async def _move(self) -> None:
        """Go over to the better route; where that fails, what is left of the old one is mended."""
        route, self._better = self._better, ()
        log.info("session %s: moves to %s, which is better", self.id.hex()[:8], ", ".join(hop.peer for hop in route))
        self._recheck.moved(trio.current_time())
        self._usual_s = 0.0
        try:
            await self._set_up(route)
            self.moves += 1
        except HopFailed as failure:
            self._hops.trouble = failure
            self._note_failure()

    def _note_failure(self) -> None:
        trouble, self._hops.trouble = self._hops.trouble, None
        if trouble is not None and not trouble.blameless:
            log.warning("session %s: %s failed: %s", self.id.hex()[:8], trouble.peer, trouble.why.text)
            self._guide.failed(trouble.peer, trouble.why, busy=trouble.busy)

    async def _set_up(self, route: Route) -> None:
        """Begin an epoch on this route and get all tokens under way; raises `HopFailed`.

        Hops of the old route are left when the new one stands: until then they may be needed again.
        """
        hops, fed = self._hops, len(self._history)
        self._flowing = False
        hops.urgent_from = fed
        await hops.reach(route)
        # Where every hop is new, it is known beforehand from where each must send.
        known = plan_resume([HopState(0, 0)] * len(route), fed) if not hops.epoch else None
        cuts = [self._cut_to] * len(route)
        for _ in range(_ROUNDS):
            states = await hops.turn(cuts, known)
            plan = plan_resume(states, fed)
            held = zip(route, states, plan.lengths, strict=True)
            wrong = [hop.peer for hop, state, length in held if state.length != length]
            if not wrong:
                break
            cuts, known = list(plan.lengths), None
        else:
            raise HopFailed(wrong[0], because("hop_miscut", "it does not cut its cache as told", wrong[0]))
        if known is None:
            await hops.go(plan)
        self._flowing, self._cut_to, self._settled = True, KEEP, route
        await self._feed(plan.feed_from)
        await hops.leave_others()
