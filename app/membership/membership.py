"""`Membership`: one node in one swarm, with its own announcement, the table of members, and the tasks that keep it.

Works on any `Network`. Intervals use trio's clock; only sequence numbers and expiry use the wall clock, which the
caller provides. Subscribers in `app.hosting`, `app.routing` and `app.node` decide what follows from the announcements.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict, Unpack

import trio

from app.core.network import Network
from app.core.signal import Signal
from app.core.span import Span
from app.membership.bootstrap import Bootstrap
from app.membership.clocks import PeerClocks
from app.membership.exchange import MembershipExchange, ProbeOutcome
from app.membership.failure_detector import FailureDetector, Timing
from app.membership.gossip import Gossip
from app.membership.guard import GuardedNetwork
from app.membership.link_probe import LinkProbe
from app.membership.member import Change, Listener, Member, kind_of_news
from app.membership.table import PRESENT, Table
from app.membership.twins import TwinWatch
from app.swarm.records import (
    Announcement,
    SwarmRecord,
    SwarmTerms,
    announceable,
    read_announcement,
    sign_announcement,
    sign_suspicion,
)
from p2p.envelope import CLOCK_TOLERANCE_MS, Envelope, Sequence
from p2p.errors import EnvelopeError, P2PError
from p2p.identity import Identity
from p2p.rate_limit import LogLimit, PeerRateLimit
from p2p.supervise import guarded

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger("shoal.membership")
log.addFilter(LogLimit())  # peers can cause these lines

FAREWELL_S = 2.0  # limit for sending the goodbye
EXPEL_TIMEOUT_S = 2.0
COMPARE_AFTER_DEATH_S = 20.0  # from a death to the next comparison of tables


class AnnouncementFields(TypedDict, total=False):
    """Fields that `Membership.announce` accepts; named and typed as in `Announcement`."""

    state: str
    span: Span | None
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    kv_free_tokens: int
    kv_total_tokens: int
    quantisation: str
    cache: str
    device: str
    name: str
    app_version: str
    growing: Span | None
    held: tuple[Span, ...]
    holds_ends: bool
    busy: float
    dtype: str
    rtts: tuple[tuple[str, float], ...]
    rates: tuple[tuple[str, float], ...]
    wires: tuple[str, ...]
    train: str


@dataclass(frozen=True)
class MembershipSetup:
    """Options of a membership; tests replace the wall clock and the random generator.

    `sequence` continues from the last number saved in the home folder; the caller that created it saves its last one.
    """

    secret: bytes | None = field(default=None, repr=False)
    sequence: Sequence = field(default_factory=Sequence)
    wall_clock: Callable[[], float] = time.time
    rng: random.Random = field(default_factory=random.Random)
    timing: Timing = field(default_factory=Timing)
    clocks: PeerClocks = field(default_factory=PeerClocks)


class Membership:
    """This node in one swarm; it takes part while `run` runs."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        record: SwarmRecord,
        n_blocks: int,
        setup: MembershipSetup | None = None,
    ) -> None:
        assert network.peer_id == identity.peer_id, "the network uses another identity than the node"
        self.record, self.n_blocks = record, n_blocks
        self._network, self._identity, self._setup = network, identity, setup or MembershipSetup()
        terms = SwarmTerms(record.id, n_blocks)
        self.table = Table(network.peer_id)
        self._guard = network if isinstance(network, GuardedNetwork) else None
        self._exchange = MembershipExchange(
            network, terms, self.table, self, lambda: self._own, self._now_ms, self._guard, self._setup.clocks
        )
        timing, rng = self._setup.timing, self._setup.rng
        self._detector = FailureDetector(self._exchange, timing, rng, self._sign_suspicion)
        self._gossip = Gossip(self._exchange, timing.push_delay_s, rng, self._detector)
        self._link_probe = LinkProbe(network, lambda: self._detector.neighbours)
        self._bootstrap = Bootstrap(self._exchange, record, self._setup.secret, self._setup.wall_clock, timing, rng)
        self._listeners: list[Listener] = []
        self._nursery: trio.Nursery | None = None
        self._refutations = PeerRateLimit(burst=2, per_s=0.2)
        self._twins = TwinWatch()
        self._disconnecting: set[str] = set()
        self._member_died = Signal()
        self._own = Announcement(network.peer_id, 0, 1, record.id, "joining")
        self.announce()

    # --- used by other packages ---------------------------------------------------------------------------------------

    @property
    def own(self) -> Announcement:
        """This node's current announcement."""
        return self._own

    def members(self) -> tuple[Member, ...]:
        """Return every other member that is not dead or left; those not `proven` are known from others only."""
        members = self.table.members()
        if all(member.rtt_s is not None for member in members):
            return members
        # Contacted but not probed yet: use the round-trip time of the link's heartbeat, if there is one.
        rtt_of = {link.peer: link.rtt_s for link in self._network.links()}
        return tuple(m if m.rtt_s is not None else replace(m, rtt_s=rtt_of.get(m.peer)) for m in members)

    @property
    def has_twin(self) -> bool:
        """True if another node signs with this node's key."""
        return self._twins.is_seen(trio.current_time())

    def announcements(self) -> tuple[Announcement, ...]:
        """Return the announcements of the other members that are alive or draining."""
        return self.table.announcements()

    def announce(self, **changes: Unpack[AnnouncementFields]) -> Announcement:
        """Sign and send a new announcement of this node; another state or span reaches all members within seconds.

        Other changes (speed, free KV tokens) are piggybacked on probes: make them at most twice a minute.
        """
        before = self._own
        number = self._setup.sequence.next(self._now_ms())
        expires_at_ms = number + int(self._setup.timing.lifetime_s * 1000)
        addresses = announceable(self._network.addresses(), self._network.peer_id)
        self._sign_own(replace(before, **changes, sequence=number, expires_at_ms=expires_at_ms, addresses=addresses))
        self._exchange.queue_own(urgent=kind_of_news(before, self._own) != "updated")
        return self._own

    def homes(self) -> Mapping[str, str]:
        """Return the home of each member in `announcements`; one that is not named is to count as a home of its own."""
        return self.table.homes()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every change; returns a function that unsubscribes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def set_neighbours(self, peers: Iterable[str]) -> None:
        """Set the members that this node's routes depend on; they are probed every period."""
        self._detector.neighbours = frozenset(peers) - {self._network.peer_id}

    def join_via(self, peers: Iterable[str]) -> None:
        """Add peers that may be members; they are asked as long as this node knows no other member."""
        self._bootstrap.try_first(peers)

    async def joined(self) -> None:
        """Wait until this node has been in contact with another member."""
        await self._bootstrap.met.wait()

    async def leave(self) -> None:
        """Announce that this node leaves; takes at most `FAREWELL_S`. Cancel `run` afterwards."""
        self.announce(state="left", span=None)
        with trio.move_on_after(FAREWELL_S):
            await self._gossip.farewell(self._own.raw)
        self._exchange.listening = False

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled; reports started once it answers other members."""
        self._exchange.serve()
        self._link_probe.serve()
        stop_listening = self._network.on_link_lost(self._on_link_lost)
        if self._guard is not None:
            self._guard.listeners.append(self._on_list)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for part in (self._detector, self._gossip, self._bootstrap, self._link_probe):
                    nursery.start_soon(part.run)
                nursery.start_soon(self._maintain)
                task_status.started()
        finally:
            self._nursery = None
            self._exchange.listening = False
            stop_listening()
            if self._guard is not None:
                self._guard.listeners.remove(self._on_list)

    # --- `MembershipEvents` -------------------------------------------------------------------------------------------

    def changed(self, change: Change) -> None:
        """Pass a change on to bootstrap, failure detector and subscribers."""
        if change.kind == "dead" and change.member.proven:
            self._member_died.notify()
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
            except Exception:  # a listener's error must not end the call that caused the change
                log.exception("a listener failed on %s of %s", change.kind, change.member.peer)

    def check_liveness(self, peer: str, accusation: bytes | None = None) -> None:
        """Probe a member that another peer reported something about."""
        self._detector.check_liveness(peer, accusation)

    def refute(self, number: int) -> None:
        """Re-announce with a sequence number above `number`, to refute a suspicion of this node; rate-limited."""
        self._twins.heard(number, self._setup.sequence.last, trio.current_time())  # only its key signs a higher one
        # Any peer can claim a number: one too far ahead would make members whose clocks lag reject this node.
        if self._own.sequence <= number < self._now_ms() + CLOCK_TOLERANCE_MS // 2 and self._may_refute():
            self._setup.sequence.last = max(self._setup.sequence.last, number)
            self.announce()
            self._exchange.queue_own(urgent=True)

    def misbehaved(self, peer: str, why: str) -> None:
        """Remove a peer that broke the protocol from the table and disconnect it.

        Further reports are ignored until it is disconnected: hundreds of its calls may still be running.
        """
        if peer in self._disconnecting:
            return
        log.warning("%s misbehaves: %s", peer, why)
        self._exchange.drop(peer)
        if self._nursery is not None:
            self._disconnecting.add(peer)
            self._nursery.start_soon(guarded, f"disconnecting {peer}", self._disconnect, peer)

    # --- internal -----------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return int(self._setup.wall_clock() * 1000)

    def _may_refute(self) -> bool:
        return self._refutations.take("", trio.current_time())

    def _sign_own(self, announcement: Announcement) -> None:
        """Sign and keep this node's announcement; drops from the end until it is short enough.

        First speeds of links, then RTTs, then addresses.
        """
        while True:
            raw = sign_announcement(self._identity, announcement)
            try:
                self._own = read_announcement(raw, now_ms=announcement.sequence)
                return
            except EnvelopeError:
                if not (announcement.rates or announcement.rtts or announcement.addresses):
                    raise
                if announcement.rates:
                    announcement = replace(announcement, rates=announcement.rates[:-1])
                elif announcement.rtts:
                    announcement = replace(announcement, rtts=announcement.rtts[:-1])
                else:
                    announcement = replace(announcement, addresses=announcement.addresses[:-1])

    def _sign_suspicion(self, accused: str, number: int) -> bytes:
        sequence = self._setup.sequence.next(self._now_ms())
        return sign_suspicion(self._identity, self.record.id, accused, number, sequence=sequence)

    def _on_link_lost(self, peer: str) -> None:
        if self._nursery is not None and self.table.state(peer) in PRESENT:
            self._detector.lost_link(peer)

    def _on_list(self, envelope: Envelope) -> None:
        """Pass a new revocation list on, and remove the members that it revokes."""
        assert self._guard is not None
        self._exchange.pass_on_list(envelope.peer, envelope.raw)
        for member in self.table.members():
            if self._guard.is_revoked(member.peer):
                log.warning("%s was revoked and is no longer a member", member.peer)
                self._exchange.drop(member.peer)
                if self._nursery is not None:
                    self._nursery.start_soon(guarded, f"parting from {member.peer}", self._expel, member.peer)

    async def _expel(self, peer: str) -> None:
        """Tell a peer that it was revoked, if it still listens, and close its link."""
        assert self._guard is not None
        with suppress(P2PError):
            await self._guard.present(peer, EXPEL_TIMEOUT_S)
        await self._network.disconnect(peer, misbehaved=True)

    async def _disconnect(self, peer: str) -> None:
        try:
            await self._network.disconnect(peer, misbehaved=True)
        finally:
            self._disconnecting.discard(peer)

    async def _maintain(self) -> None:
        """Compare tables with a random member every minute, and renew this node's announcement before it expires.

        Tables are also compared soon after a death: when many members die at once, some gossip is lost. The age of the
        announcement is taken from the wall clock, as other members do: trio's clock may stop while a laptop sleeps.
        """
        timing, rng = self._setup.timing, self._setup.rng
        refresh_ms = 1000 * timing.refresh_s * rng.uniform(0.8, 1.0)
        seen = 0
        while True:
            with trio.move_on_after(timing.compare_s * rng.uniform(0.8, 1.2)):
                await self._member_died.wait_beyond(seen)
                await trio.sleep(COMPARE_AFTER_DEATH_S * rng.uniform(0.8, 1.2))
            seen = self._member_died.version
            self._exchange.expire()
            if abs(self._now_ms() - self._own.sequence) >= refresh_ms:
                self.announce()
                refresh_ms = 1000 * timing.refresh_s * rng.uniform(0.8, 1.0)
            present = self.table.present()
            if present:
                peer = rng.choice(present)
                if await self._exchange.compare(peer) is ProbeOutcome.FAILED:
                    self._detector.probe(peer)
