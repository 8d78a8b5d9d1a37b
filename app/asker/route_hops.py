"""The hops of one session as its asker speaks with them: links, epochs, and what each of them said last.

It begins epochs, sends tokens and questions, and keeps the answers. What to do about a failure, and which route to
take, is for `app.asker.route_session`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from app.asker.hop_links import HopLink, HopLinks
from app.asker.recovery import HopFailed, HopState, ResumePlan
from app.core.errors import reason_of
from app.core.network import Priority
from app.core.reasons import Reason, because
from app.routing.reroute import RunningRoute
from app.routing.route import Route
from app.session.wire import (
    DTYPES,
    SESSION_BYTES,
    EpochOrder,
    Frame,
    HopError,
    Kind,
    decode_pace,
    decode_trouble,
    encode_turn,
    header,
    plain,
    reason_told,
)
from p2p.errors import P2PError

log = logging.getLogger("shoal.asker")


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


@dataclass(frozen=True)
class SessionShape:
    """What a session needs room for: tokens, and the hidden state of each."""

    tokens: int
    width: int
    dtype: str


class RouteSource(Protocol):
    """What a session asks about the swarm."""

    def route(self, current: Route, avoid: Sequence[str]) -> Route:
        """A route to take now, keeping what can be kept of the current one; raises `NoRoute`."""

    def failed(self, peer: str, why: Reason, *, busy: bool) -> None:
        """A hop could not be used."""

    def worked(self, peer: str) -> None:
        """A hop did its part."""

    def better(self, standing: RunningRoute) -> Route | None:
        """A route for which a session that runs well should leave its own, if there is one."""


class RouteHops:
    """The hops of one session; satisfies `app.asker.hop_links.Listener`."""

    def __init__(self, links: HopLinks, guide: RouteSource, shape: SessionShape, settings: SessionSettings) -> None:
        self.id = secrets.token_bytes(SESSION_BYTES)
        self._links, self._guide, self._settings, self._shape = links, guide, settings, shape
        self._dtype = DTYPES[shape.dtype]
        self._open: dict[str, HopLink] = {}
        self._ready: dict[str, HopState] = {}
        self._relayed: set[tuple[str, str]] = set()  # links that go through this asker
        self._bad_links: dict[tuple[str, str], int] = {}
        self._event = trio.Event()
        self.route: Route = ()  # in use, or being set up
        self.epoch = 0
        self.urgent_from = 0  # tokens from here on are awaited by a reader
        self.awaited = 0  # the answer must be the output behind so many tokens
        self.answer: Frame | None = None
        self.trouble: HopFailed | None = None
        self.states: dict[str, Frame] = {}
        self.leaving: set[str] = set()  # hops that are draining
        self.paces: dict[str, tuple[float, float]] = {}  # peer -> seconds of a usual step, and of the wait for it

    # --- what hops say ------------------------------------------------------------------------------------------------

    async def heard(self, peer: str, frame: Frame) -> None:
        """Take a frame from a hop; anything that is not of this epoch, or not this hop's to say, is dropped."""
        if peer not in self._open:
            return
        if frame.kind == Kind.STATE:
            self.states[peer] = frame
        elif frame.epoch != self.epoch:
            return
        elif frame.kind == Kind.DATA:
            is_last = bool(self.route) and peer == self.route[-1].peer
            if not is_last or frame.position + frame.rows != self.awaited or frame.width != self._shape.width:
                return
            self.answer = frame
        elif frame.kind == Kind.RELAY:
            await self._pass_on(peer, frame)
            return
        elif frame.kind == Kind.PACE:
            self.paces[peer] = decode_pace(frame)
            return
        elif frame.kind == Kind.READY:
            self._ready[peer] = HopState(frame.position, frame.rows)
        elif frame.kind == Kind.TROUBLE:
            self._complained(peer, decode_trouble(frame))
        self._event.set()

    def lost(self, peer: str) -> None:
        """The stream to a hop broke."""
        if any(hop.peer == peer for hop in self.route):
            self.trouble = HopFailed(peer, because("hop_lost", "its stream broke", peer))
            self._event.set()
        else:
            self._open.pop(peer, None)

    def _complained(self, peer: str, trouble: HopError) -> None:
        log.info("session %s: %s says %s: %s", self.id.hex()[:8], peer, trouble.code, trouble.text)
        if trouble.code == "evicted":
            return
        why = reason_told(peer, trouble)
        if trouble.code in ("busy", "refused", "failed"):
            self.trouble = HopFailed(peer, why, busy=trouble.code == "busy")
            return
        if trouble.code == "draining":
            self.leaving.add(peer)
        elif trouble.code == "link":
            self.note_bad_link(peer)
        self.trouble = self.trouble or HopFailed(peer, why, blameless=True)

    def note_bad_link(self, peer: str) -> None:
        """A link between hops that fails twice while both answer us goes through this asker from then on."""
        after = self._after(peer)
        if after:
            times = self._bad_links[peer, after] = self._bad_links.get((peer, after), 0) + 1
            if times >= 2:
                self._relayed.add((peer, after))

    async def _pass_on(self, peer: str, frame: Frame) -> None:
        """Carry what a hop cannot send to its successor itself."""
        after = self._after(peer)
        if after in self._open:
            self._relayed.add((peer, after))
            await self._send_data(after, frame.position, frame.rows, frame.dtype, bytes(frame.body))

    def _after(self, peer: str) -> str:
        peers = [hop.peer for hop in self.route]
        index = peers.index(peer) if peer in peers else len(peers)
        return peers[index + 1] if index + 1 < len(peers) else ""

    # --- what hops are told -------------------------------------------------------------------------------------------

    async def feed(self, position: int, rows: int, data: bytes) -> None:
        """Send embedded tokens to the first hop."""
        await self._send_data(self.route[0].peer, position, rows, self._dtype, data)

    async def _send_data(self, peer: str, position: int, rows: int, dtype: int, data: bytes) -> None:
        width = self._shape.width
        head = header(Kind.DATA, self.id, self.epoch, position, dtype=dtype, rows=rows, width=width, length=len(data))
        priority = Priority.DECODE if position >= self.urgent_from else Priority.PREFILL
        await self._open[peer].send(self.id, head, data, priority=priority)

    async def ask_paces(self) -> None:
        """Ask every hop how long this session's tokens take there; nobody waits for the answers."""
        for hop in self.route:
            await self._open[hop.peer].send(self.id, plain(Kind.PACE, self.id, self.epoch))

    async def settle(self, within_s: float) -> None:
        """Wait for the answer or for trouble, so long at most."""
        with trio.move_on_after(within_s):
            while self.answer is None and self.trouble is None:
                await self._news()

    async def probe(self) -> None:
        """Ask every hop how far it is, and wait until all have said it, or an answer or trouble came instead."""
        self.states.clear()
        for hop in self.route:
            await self._open[hop.peer].send(self.id, plain(Kind.PROBE, self.id, self.epoch, self.awaited))
        with trio.move_on_after(self._settings.probe_s):
            while self.answer is None and self.trouble is None and len(self.states) < len(self.route):
                await self._news()

    async def _news(self) -> None:
        self._event = trio.Event()
        await self._event.wait()

    async def reach(self, route: Route) -> None:
        """Open the links that this route needs; raises `HopFailed`."""
        self.route = route
        failures: list[HopFailed] = []

        async def reach(peer: str) -> None:
            try:
                link = await self._links.to(peer, timeout_s=self._settings.open_s)
            except P2PError as error:
                failures.append(HopFailed(peer, reason_of(error, peer)))
                return
            self._open[peer] = link
            link.listeners[self.id] = self

        async with trio.open_nursery() as nursery:
            for hop in route:
                link = self._open.get(hop.peer)
                if link is None or link.outbox.broken:
                    if link is not None:
                        link.listeners.pop(self.id, None)  # its late end is not the end of the link that follows
                    nursery.start_soon(reach, hop.peer)
        self._raise_first(failures)

    def _raise_first(self, failures: Sequence[HopFailed]) -> None:
        """Of several failures the first is for whoever mends; the others are blamed at once."""
        for failure in failures[1:]:
            self._guide.failed(failure.peer, failure.why, busy=failure.busy)
        if failures:
            raise failures[0]

    async def turn(self, cuts: Sequence[int], known: ResumePlan | None) -> list[HopState]:
        """Begin an epoch at every hop: what each of them holds; raises `HopFailed`."""
        self.epoch += 1
        self._ready.clear()
        self.trouble = None
        peers = ["", *(hop.peer for hop in self.route), ""]
        for index, hop in enumerate(self.route):
            before, after = peers[index], peers[index + 2]
            send_from = known.send_from[index] if known is not None else None
            relay = (hop.peer, after) in self._relayed
            turn = EpochOrder(hop.span, before, after, self._shape.tokens, self.urgent_from, send_from, relay)
            await self._open[hop.peer].send(self.id, encode_turn(self.id, self.epoch, cuts[index], turn))
        with trio.move_on_after(self._settings.ready_s):
            while self.trouble is None and len(self._ready) < len(self.route):
                await self._news()
        if self.trouble is not None:
            raise self.trouble
        silent = [hop.peer for hop in self.route if hop.peer not in self._ready]
        late = "it did not open the session in time"
        self._raise_first([HopFailed(peer, because("hop_unopened", late, peer)) for peer in silent])
        return [self._ready[hop.peer] for hop in self.route]

    async def go(self, plan: ResumePlan) -> None:
        """Tell every hop from where its successor needs outputs."""
        for hop, send_from in zip(self.route, plan.send_from, strict=True):
            await self._open[hop.peer].send(self.id, plain(Kind.GO, self.id, self.epoch, send_from))

    async def leave_others(self) -> None:
        """Free the hops that are not on the route."""
        staying = {hop.peer for hop in self.route}
        for peer in [peer for peer in self._open if peer not in staying]:
            await self._leave(peer)

    async def close(self) -> None:
        """Free all hops."""
        for peer in list(self._open):
            await self._leave(peer)

    async def _leave(self, peer: str) -> None:
        link = self._open.pop(peer)
        link.listeners.pop(self.id, None)
        await link.send(self.id, plain(Kind.CLOSE, self.id, self.epoch))
