"""One node's membership of one swarm: its own announcement, who else is there, and how they find each other.

Works on any `Network`. Time is trio's clock; only the numbers and expiry of statements use the wall clock, which is
given. What the members host and what follows from it is for others, who listen.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict, Unpack

import trio

from app.core.network import Network
from app.core.span import Span
from app.membership.bootstrap import Bootstrap
from app.membership.exchange import MembershipExchange, ProbeOutcome
from app.membership.failure_detector import FailureDetector, Timing
from app.membership.gossip import Gossip
from app.membership.member import Change, Listener, Member, kind_of_news
from app.membership.table import PRESENT, Table
from app.membership.verification import SwarmTerms
from app.swarm.records import (
    MAX_ADDRESSES,
    Announcement,
    SwarmRecord,
    read_announcement,
    sign_announcement,
    sign_suspicion,
)
from p2p.envelope import CLOCK_TOLERANCE_MS, Sequence
from p2p.errors import EnvelopeError
from p2p.identity import Identity
from p2p.rate_limit import LogLimit, PeerRateLimit
from p2p.supervise import guarded

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger("shoal.membership")
log.addFilter(LogLimit())  # peers can bring these lines about

FAREWELL_S = 2.0
COMPARE_AFTER_DEATH_S = 20.0


class AnnouncementFields(TypedDict, total=False):
    """What a node may announce of itself; the names are those of `Announcement`."""

    state: str
    span: Span | None
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    kv_free_tokens: int
    quantisation: str
    device: str
    name: str
    app_version: str
    growing: Span | None
    held: tuple[Span, ...]
    holds_ends: bool
    busy: float
    dtype: str
    rtts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class MembershipSetup:
    """What a membership needs besides its network; tests choose the clock and chance.

    `sequence` goes on from the last number that the home folder remembers; whoever made it stores its last one.
    """

    secret: bytes | None = field(default=None, repr=False)
    sequence: Sequence = field(default_factory=Sequence)
    wall_clock: Callable[[], float] = time.time
    rng: random.Random = field(default_factory=random.Random)
    timing: Timing = field(default_factory=Timing)


class Membership:
    """This node in a swarm; `run` takes part until cancelled."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        record: SwarmRecord,
        n_blocks: int,
        setup: MembershipSetup | None = None,
    ) -> None:
        assert network.peer_id == identity.peer_id, "a node's network and its statements have one identity"
        self.record, self.n_blocks = record, n_blocks
        self._network, self._identity, self._setup = network, identity, setup or MembershipSetup()
        terms = SwarmTerms(record.id, n_blocks)
        self.table = Table(network.peer_id, terms)
        self._exchange = MembershipExchange(network, terms, self.table, self, lambda: self._own_raw, self._now_ms)
        timing, rng = self._setup.timing, self._setup.rng
        self._detector = FailureDetector(self._exchange, timing, rng, self._sign_suspicion)
        self._gossip = Gossip(self._exchange, timing.push_delay_s, rng, self._detector)
        self._bootstrap = Bootstrap(self._exchange, record, self._setup.secret, self._setup.wall_clock, timing, rng)
        self._listeners: list[Listener] = []
        self._nursery: trio.Nursery | None = None
        self._refutations = PeerRateLimit(burst=2, per_s=0.2)
        self._hanging_up: set[str] = set()
        self._member_died = trio.Event()
        self._own_raw = b""
        self._own = Announcement(network.peer_id, 0, 1, record.id, "joining")
        self.announce()

    # --- what others use ---------------------------------------------------------------------------------------------

    @property
    def own(self) -> Announcement:
        """What this node says of itself."""
        return self._own

    @property
    def own_raw(self) -> bytes:
        """The signed form of it."""
        return self._own_raw

    def members(self) -> tuple[Member, ...]:
        """Every other member that is not gone; those not `proven` are known from others only."""
        members = self.table.members()
        if all(member.rtt_s is not None for member in members):
            return members
        # Not probed yet, only heard from: the link's heartbeat may know.
        rtt_of = {link.peer: link.rtt_s for link in self._network.links()}
        return tuple(m if m.rtt_s is not None else replace(m, rtt_s=rtt_of.get(m.peer)) for m in members)

    def announcements(self) -> tuple[Announcement, ...]:
        """What the other members that take part say of themselves."""
        return self.table.announcements()

    def announce(self, **changes: Unpack[AnnouncementFields]) -> Announcement:
        """Say something new of this node; another state or span reaches everybody within seconds.

        Lesser changes (speed, room) ride along with probes: make them rarely, twice a minute at most.
        """
        before = self._own
        number = self._setup.sequence.next(self._now_ms())
        expires_at_ms = number + int(self._setup.timing.lifetime_s * 1000)
        addresses = tuple(self._network.addresses())[:MAX_ADDRESSES]
        self._say(replace(before, **changes, sequence=number, expires_at_ms=expires_at_ms, addresses=addresses))
        self._exchange.said(self._own_raw, urgent=kind_of_news(before, self._own) != "updated")
        return self._own

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` of every change at once; call what is returned to stop that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def set_neighbours(self, peers: Iterable[str]) -> None:
        """The members that this node's routes depend on: they are probed every period."""
        self._detector.neighbours = frozenset(peers) - {self._network.peer_id}

    def join_via(self, peers: Iterable[str]) -> None:
        """Peers that may be members; they are asked as long as this node is alone."""
        self._bootstrap.try_first(peers)

    async def joined(self) -> None:
        """Wait until another member was met."""
        await self._bootstrap.met.wait()

    async def leave(self) -> None:
        """Tell the others goodbye; takes two seconds at most. Cancel `run` afterwards."""
        self.announce(state="left", span=None)
        with trio.move_on_after(FAREWELL_S):
            await self._gossip.farewell(self._own_raw)
        self._exchange.listening = False

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled; reports started once it answers others."""
        self._exchange.serve()
        stop_listening = self._network.on_link_lost(self._on_link_lost)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for task in (self._detector.run, self._gossip.run, self._bootstrap.run, self._keep_up):
                    nursery.start_soon(task)
                task_status.started()
        finally:
            self._nursery = None
            self._exchange.listening = False
            stop_listening()

    # --- what conversations bring about ------------------------------------------------------------------------------

    def changed(self, change: Change) -> None:
        """Pass a change on to the listeners."""
        if change.kind == "dead" and change.member.proven:
            self._member_died.set()
        if change.member.present:
            if change.member.proven:
                self._bootstrap.met.set()
                if change.kind == "proven":
                    self._bootstrap.remember(change.member.peer)
            else:
                self._detector.wake()
        for listener in tuple(self._listeners):
            try:
                listener(change)
            except Exception:  # a listener's error must not end the conversation that brought the news
                log.exception("a listener failed on %s of %s", change.kind, change.member.peer)

    def look_at(self, peer: str, accusation: bytes | None = None) -> None:
        """See for oneself."""
        self._detector.look_at(peer, accusation)

    def refute(self, number: int) -> None:
        """Announce again, above `number`, so that doubts about this node end."""
        # Anybody can claim a number: one near the edge would make members whose clock lags refuse this node.
        if self._own.sequence <= number < self._now_ms() + CLOCK_TOLERANCE_MS // 2 and self._may_refute():
            self._setup.sequence.last = max(self._setup.sequence.last, number)
            self.announce()
            self._exchange.said(self._own_raw, urgent=True)

    def misbehaved(self, peer: str, why: str) -> None:
        """Drop a peer that sends what no member would, and hang up on it; once until it is gone.

        What it still says meanwhile counts for nothing: hundreds of its calls may be under way.
        """
        if peer in self._hanging_up:
            return
        log.warning("%s misbehaves: %s", peer, why)
        self._exchange.drop(peer)
        if self._nursery is not None:
            self._hanging_up.add(peer)
            self._nursery.start_soon(guarded, f"hanging up on {peer}", self._hang_up, peer)

    # --- within ------------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return int(self._setup.wall_clock() * 1000)

    def _may_refute(self) -> bool:
        return self._refutations.take("", trio.current_time())

    def _say(self, said: Announcement) -> None:
        """Sign an announcement with as much of it as fits, and keep it as others will read it."""
        while True:
            raw = sign_announcement(self._identity, said)
            try:
                self._own, self._own_raw = read_announcement(raw, now_ms=said.sequence), raw
                return
            except EnvelopeError:
                if not said.rtts and not said.addresses:
                    raise
                if said.rtts:
                    said = replace(said, rtts=said.rtts[:-1])
                else:
                    said = replace(said, addresses=said.addresses[:-1])

    def _sign_suspicion(self, accused: str, number: int) -> bytes:
        sequence = self._setup.sequence.next(self._now_ms())
        return sign_suspicion(self._identity, self.record.id, accused, number, sequence=sequence)

    def _on_link_lost(self, peer: str) -> None:
        if self._nursery is not None and self.table.state(peer) in PRESENT:
            self._detector.lost_link(peer)

    async def _hang_up(self, peer: str) -> None:
        try:
            await self._network.disconnect(peer, misbehaved=True)
        finally:
            self._hanging_up.discard(peer)

    async def _keep_up(self) -> None:
        """Compare tables with one member a minute, and renew the own announcement before it expires.

        A table is also compared soon after a death: where many die at once, some gossip is lost. How old the own
        announcement is, the wall clock says, as others do: a laptop that slept must not go on with an expired one.
        """
        timing, rng = self._setup.timing, self._setup.rng
        refresh_ms = 1000 * timing.refresh_s * rng.uniform(0.8, 1.0)
        while True:
            with trio.move_on_after(timing.compare_s * rng.uniform(0.8, 1.2)):
                await self._member_died.wait()
                await trio.sleep(COMPARE_AFTER_DEATH_S * rng.uniform(0.8, 1.2))
            self._member_died = trio.Event()
            self._exchange.expire()
            if abs(self._now_ms() - self._own.sequence) >= refresh_ms:
                self.announce()
                refresh_ms = 1000 * timing.refresh_s * rng.uniform(0.8, 1.0)
            present = self.table.present()
            if present:
                peer = rng.choice(present)
                if await self._exchange.compare(peer) is ProbeOutcome.FAILED:
                    self._detector.probe(peer)
