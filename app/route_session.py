"""One sequence of tokens and the hops that hold its cache, as its asker sees them.

It begins epochs, feeds tokens, waits for the last hop's answer, and mends the route when a hop dies, freezes, leaves or
forgets. It knows no text: `app.asker` chooses the tokens. Which route to take is a question to its `Guide`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from app.errors import AppError
from app.hop_links import HopLink, HopLinks
from app.network import Priority
from app.resume import HopState, Resume, plan_resume
from app.routing import NoRoute, Route
from app.session_wire import (
    DTYPES,
    KEEP,
    SESSION_BYTES,
    Frame,
    Kind,
    Trouble,
    Turn,
    decode_trouble,
    encode_turn,
    header,
    plain,
    row_bytes,
)
from p2p.errors import P2PError

log = logging.getLogger("shoal.asker")

MIN_OVERDUE_S = 1.0
OVERDUE_TIMES = 8.0
_SMOOTH = 0.2
SLOW_LINK_BYTES_PER_S = 250_000  # tokens on their way over such a link are not lost yet
LOOK_AGAIN_S = 1.0
_ROUNDS = 3  # epochs until hops and plan agree


@dataclass(frozen=True)
class SessionSettings:
    """How patient a session is."""

    chunk_rows: int = 256
    open_s: float = 5.0  # to reach a hop
    ready_s: float = 5.0  # for a hop to begin an epoch
    probe_s: float = 1.0  # for a hop to say how far it is
    stuck_s: float = 30.0  # for a hop that answers but does not advance
    first_route_s: float = 3.0  # to wait for a route at the beginning
    new_route_s: float = 60.0  # and in the middle of a reply
    attempts_without_progress: int = 64


class Guide(Protocol):
    """What a session asks about the swarm."""

    def route(self, current: Route, avoid: Sequence[str]) -> Route:
        """A route to take now, keeping what can be kept of the current one; raises `NoRoute`."""

    def failed(self, peer: str, why: str, *, busy: bool) -> None:
        """A hop could not be used."""

    def worked(self, peer: str) -> None:
        """A hop did its part."""


class SessionLost(AppError):
    """A session could not be kept alive; the message says why."""


class _HopFailed(Exception):
    def __init__(self, peer: str, why: str, *, busy: bool = False, blameless: bool = False) -> None:
        super().__init__(why)
        self.peer, self.why, self.busy, self.blameless = peer, why, busy, blameless


class RouteSession:
    """A session over a route; `close` must be awaited at its end, whatever happened."""

    def __init__(
        self,
        links: HopLinks,
        guide: Guide,
        embed: Callable[[Sequence[int]], Awaitable[bytes]],
        *,
        tokens: int,
        width: int,
        dtype: str,
        settings: SessionSettings,
    ) -> None:
        self.id = secrets.token_bytes(SESSION_BYTES)
        self._links, self._guide, self._embed, self._settings = links, guide, embed, settings
        self._tokens, self._width, self._dtype = tokens, width, DTYPES[dtype]
        self._history: list[int] = []
        self._route: Route = ()  # in use, or being set up
        self._settled: Route = ()  # the last one that stood
        self._hops: dict[str, HopLink] = {}
        self._epoch = 0
        self._flowing = False  # the route is set up and has been fed all tokens
        self._usual_s = 0.0  # a usual single-token step
        self._answer: Frame | None = None
        self._trouble: _HopFailed | None = None
        self._ready: dict[str, HopState] = {}
        self._states: dict[str, Frame] = {}
        self._leaving: set[str] = set()  # hops that are draining
        self._cut_to = KEEP  # hops may still cache other tokens from this position on
        self._relayed: set[tuple[str, str]] = set()  # links that go through this asker
        self._bad_links: dict[tuple[str, str], int] = {}
        self._event = trio.Event()
        self._urgent_from = 0
        self._look_again_at = 0.0  # for somebody to take over from hops that leave
        self._advanced_at, self._progress = 0.0, -1  # when hops last got further, and how far
        self.recoveries = 0

    @property
    def route(self) -> Route:
        """The hops in use."""
        return self._route

    async def advance(self, token_ids: Sequence[int], embedded: bytes | None = None) -> Frame:
        """Feed the next tokens: the frame with the last block's output behind the last of them.

        Raises `NoRoute` or `SessionLost` where the swarm cannot carry the session any longer.
        """
        first = len(self._history)
        self._history += token_ids
        self._answer = None
        begin = trio.current_time()
        if self._leaving and self._can_leave():
            self._flowing = False
        smooth = self._flowing and self._trouble is None
        if smooth:
            await self._feed(first, embedded)
        for _ in range(self._settings.attempts_without_progress):
            if self._trouble is not None or not self._flowing:
                smooth = False
                await self._mend()
            answer = await self._wait_answer()
            if answer is not None:
                for hop in () if smooth else self._route:
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
            for peer in list(self._hops):
                await self._leave(peer)

    # --- what hops say ------------------------------------------------------------------------------------------------

    async def heard(self, peer: str, frame: Frame) -> None:
        """Take a frame from a hop; anything that is not of this epoch, or not this hop's to say, is dropped."""
        if peer not in self._hops:
            return
        if frame.kind == Kind.STATE:
            self._states[peer] = frame
        elif frame.epoch != self._epoch:
            return
        elif frame.kind == Kind.DATA:
            wanted = len(self._history)
            if peer != self._route[-1].peer or frame.position + frame.rows != wanted or frame.width != self._width:
                return
            self._answer = frame
        elif frame.kind == Kind.RELAY:
            await self._pass_on(peer, frame)
            return
        elif frame.kind == Kind.READY:
            self._ready[peer] = HopState(frame.position, frame.rows)
        elif frame.kind == Kind.TROUBLE:
            self._complained(peer, decode_trouble(frame))
        self._event.set()

    def lost(self, peer: str) -> None:
        """The stream to a hop broke."""
        if any(hop.peer == peer for hop in self._route):
            self._trouble = _HopFailed(peer, "its stream broke")
            self._event.set()
        else:
            self._hops.pop(peer, None)

    def _complained(self, peer: str, trouble: Trouble) -> None:
        log.info("session %s: %s says %s: %s", self.id.hex()[:8], peer, trouble.code, trouble.text)
        if trouble.code == "evicted":
            return
        if trouble.code == "draining":
            self._leaving.add(peer)
            self._trouble = self._trouble or _HopFailed(peer, trouble.text, blameless=True)
        elif trouble.code == "link":
            self._note_bad_link(peer)
            self._trouble = self._trouble or _HopFailed(peer, trouble.text, blameless=True)
        elif trouble.code in ("busy", "refused"):
            self._trouble = _HopFailed(peer, trouble.text, busy=trouble.code == "busy")
        elif trouble.code == "failed":
            self._trouble = _HopFailed(peer, trouble.text)
        else:
            self._trouble = self._trouble or _HopFailed(peer, trouble.text, blameless=True)

    def _note_bad_link(self, peer: str) -> None:
        """A link between hops that fails twice while both answer us goes through this asker from then on."""
        after = self._after(peer)
        if after:
            times = self._bad_links[peer, after] = self._bad_links.get((peer, after), 0) + 1
            if times >= 2:
                self._relayed.add((peer, after))

    async def _pass_on(self, peer: str, frame: Frame) -> None:
        """Carry what a hop cannot send to its successor itself."""
        after = self._after(peer)
        link = self._hops.get(after)
        if link is not None:
            self._relayed.add((peer, after))
            await self._send_data(link, frame.position, frame.rows, frame.dtype, bytes(frame.body))

    def _after(self, peer: str) -> str:
        peers = [hop.peer for hop in self._route]
        index = peers.index(peer) if peer in peers else len(peers)
        return peers[index + 1] if index + 1 < len(peers) else ""

    # --- feeding and waiting ------------------------------------------------------------------------------------------

    async def _feed(self, first: int, embedded: bytes | None = None) -> None:
        """Send tokens from position `first` on to the first hop, in chunks."""
        link, epoch = self._hops[self._route[0].peer], self._epoch
        for start in range(first, len(self._history), self._settings.chunk_rows):
            chunk = self._history[start : start + self._settings.chunk_rows]
            data = embedded if embedded is not None and len(chunk) == len(self._history) - first else None
            if data is None:
                data = await self._embed(chunk)
            if self._trouble is not None or epoch != self._epoch:
                return
            await self._send_data(link, start, len(chunk), self._dtype, data)

    async def _send_data(self, link: HopLink, position: int, rows: int, dtype: int, data: bytes) -> None:
        head = header(
            Kind.DATA, self.id, self._epoch, position, dtype=dtype, rows=rows, width=self._width, length=len(data)
        )
        priority = Priority.DECODE if position >= self._urgent_from else Priority.PREFILL
        await link.send(self.id, head, data, priority=priority)

    async def _wait_answer(self) -> Frame | None:
        """The awaited frame, or None where the route needs mending."""
        self._advanced_at, self._progress = trio.current_time(), -1
        while True:
            with trio.move_on_after(max(MIN_OVERDUE_S, OVERDUE_TIMES * self._usual_s)):
                while self._answer is None and self._trouble is None:
                    self._event = trio.Event()
                    await self._event.wait()
            if self._answer is not None:
                return self._answer
            if self._trouble is None:
                await self._probe()
            if self._trouble is not None:
                return None

    async def _probe(self) -> None:
        """Ask every hop how far it is; whoever is silent, or a link that lost something, is the trouble."""
        self._states.clear()
        for hop in self._route:
            await self._hops[hop.peer].send(self.id, plain(Kind.PROBE, self.id, self._epoch, len(self._history)))
        with trio.move_on_after(self._settings.probe_s):
            while self._answer is None and self._trouble is None and len(self._states) < len(self._route):
                self._event = trio.Event()
                await self._event.wait()
        if self._answer is not None or self._trouble is not None:
            return
        for hop in self._route:
            if hop.peer not in self._states:
                why = f"it has not answered for {self._settings.probe_s:g} s"
                self._guide.failed(hop.peer, why, busy=False)
                self._trouble = _HopFailed(hop.peer, why, blameless=True)  # blamed already, as others may be
        if self._trouble is None:
            self._trouble = self._find_loss(trio.current_time())

    def _find_loss(self, now: float) -> _HopFailed | None:
        """What went missing between hops that all answer; None while somebody is at work or may still receive."""
        fed = len(self._history)
        progress = sum(state.position + state.rows for state in self._states.values())
        if progress > self._progress:
            self._advanced_at, self._progress = now, progress
        quiet_s = now - self._advanced_at
        before = ""
        for hop in self._route:
            state = self._states[hop.peer]
            if state.epoch != self._epoch:
                return _HopFailed(hop.peer, "it has forgotten the session", blameless=True)
            if state.rows < fed:
                missing_bytes = (fed - state.rows) * row_bytes(self._dtype, self._width)
                if quiet_s < missing_bytes / SLOW_LINK_BYTES_PER_S:
                    return None
                if before:
                    self._note_bad_link(before)
                return _HopFailed(hop.peer, "what was sent to it is lost", blameless=True)
            if state.position < fed:
                stuck = quiet_s > self._settings.stuck_s
                return _HopFailed(hop.peer, "it answers but does not advance") if stuck else None
            before = hop.peer
        return _HopFailed(before, "its answer is lost", blameless=True)

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _mend(self) -> None:
        """Set up a route on which all tokens so far are cached or under way."""
        begin = trio.current_time()
        wait_s = self._settings.new_route_s if self._settled else self._settings.first_route_s
        self.recoveries += bool(self._settled) and self._trouble is not None
        while True:
            self._note_failure()
            try:
                await self._set_up(self._next_route())
                return
            except NoRoute:
                if trio.current_time() - begin > wait_s:
                    raise
                self._trouble = None
                await trio.sleep(0.2)
            except _HopFailed as failure:
                self._trouble = failure

    def _next_route(self) -> Route:
        """A route without the hops that leave; one that still has them where there is no other yet."""
        try:
            return self._guide.route(self._settled, sorted(self._leaving))
        except NoRoute:
            if not self._leaving:
                raise
            return self._guide.route(self._settled, [])

    def _can_leave(self) -> bool:
        """Whether the route has hops that are about to go and, looked up now and then, others could take over."""
        now = trio.current_time()
        if now < self._look_again_at or not any(hop.peer in self._leaving for hop in self._route):
            return False
        self._look_again_at = now + LOOK_AGAIN_S
        try:
            self._guide.route(self._settled, sorted(self._leaving))
        except NoRoute:
            return False
        return True

    def _note_failure(self) -> None:
        trouble, self._trouble = self._trouble, None
        if trouble is not None and not trouble.blameless:
            log.warning("session %s: %s failed: %s", self.id.hex()[:8], trouble.peer, trouble.why)
            self._guide.failed(trouble.peer, trouble.why, busy=trouble.busy)

    async def _set_up(self, route: Route) -> None:
        """Begin an epoch on this route and get all tokens under way; raises `_HopFailed`.

        Hops of the old route are left when the new one stands: until then they may be needed again.
        """
        self._flowing = False
        self._route = route
        self._urgent_from = len(self._history)
        await self._reach_all()
        fresh = not self._epoch
        fed = len(self._history)
        # Where every hop is new, it is known beforehand from where each must send.
        known = plan_resume([HopState(0, 0)] * len(route), fed) if fresh else None
        cuts = [self._cut_to] * len(route)
        for _ in range(_ROUNDS):
            states = await self._turn(cuts, known)
            plan = plan_resume(states, fed)
            held = zip(route, states, plan.lengths, strict=True)
            wrong = [hop.peer for hop, state, length in held if state.length != length]
            if not wrong:
                break
            cuts, known = list(plan.lengths), None
        else:
            raise _HopFailed(wrong[0], "it does not cut its cache as told")
        if known is None:
            await self._go(plan)
        self._flowing, self._cut_to, self._settled = True, KEEP, route
        await self._feed(plan.feed_from)
        staying = {hop.peer for hop in route}
        for peer in [peer for peer in self._hops if peer not in staying]:
            await self._leave(peer)

    async def _reach_all(self) -> None:
        failures: list[_HopFailed] = []

        async def reach(peer: str) -> None:
            try:
                link = await self._links.to(peer, timeout_s=self._settings.open_s)
            except P2PError as error:
                failures.append(_HopFailed(peer, str(error)))
                return
            self._hops[peer] = link
            link.listeners[self.id] = self

        async with trio.open_nursery() as nursery:
            for hop in self._route:
                link = self._hops.get(hop.peer)
                if link is None or link.outlet.broken:
                    nursery.start_soon(reach, hop.peer)
        for failure in failures[1:]:
            self._guide.failed(failure.peer, failure.why, busy=False)
        if failures:
            raise failures[0]

    async def _turn(self, cuts: Sequence[int], known: Resume | None) -> list[HopState]:
        """Begin an epoch at every hop: what each of them holds."""
        self._epoch += 1
        self._ready.clear()
        self._trouble = None
        peers = ["", *(hop.peer for hop in self._route), ""]
        for index, hop in enumerate(self._route):
            before, after = peers[index], peers[index + 2]
            send_from = known.send_from[index] if known is not None else None
            relay = (hop.peer, after) in self._relayed
            turn = Turn(hop.span, before, after, self._tokens, self._urgent_from, send_from, relay)
            await self._hops[hop.peer].send(self.id, encode_turn(self.id, self._epoch, cuts[index], turn))
        with trio.move_on_after(self._settings.ready_s):
            while self._trouble is None and len(self._ready) < len(self._route):
                self._event = trio.Event()
                await self._event.wait()
        if self._trouble is not None:
            raise self._trouble
        silent = [hop.peer for hop in self._route if hop.peer not in self._ready]
        for peer in silent[1:]:
            self._guide.failed(peer, "it did not open the session in time", busy=False)
        if silent:
            raise _HopFailed(silent[0], "it did not open the session in time")
        return [self._ready[hop.peer] for hop in self._route]

    async def _go(self, plan: Resume) -> None:
        for hop, send_from in zip(self._route, plan.send_from, strict=True):
            await self._hops[hop.peer].send(self.id, plain(Kind.GO, self.id, self._epoch, send_from))

    async def _leave(self, peer: str) -> None:
        link = self._hops.pop(peer)
        link.listeners.pop(self.id, None)
        await link.send(self.id, plain(Kind.CLOSE, self.id, self._epoch))
