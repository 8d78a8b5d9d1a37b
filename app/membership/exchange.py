"""Makes and answers the calls between members, and processes the statements that arrive with them.

It starts no tasks and keeps no schedule: `app.membership.failure_detector`, `app.membership.gossip` and
`app.membership.membership` decide when to probe, push or compare tables, and learn of the results through
`MembershipEvents`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol, TypeVar

import trio

from app.core.network import Network
from app.core.signal import Signal
from app.membership import wire
from app.membership.clocks import PeerClocks
from app.membership.gossip_queue import GossipQueue
from app.membership.guard import GuardedNetwork
from app.membership.member import Change
from app.membership.table import GONE, PRESENT, Table
from app.serving.homes import peer_home
from app.swarm.certificates import REVOCATIONS_DOMAIN
from app.swarm.records import (
    ANNOUNCEMENT_DOMAIN,
    SUSPICION_DOMAIN,
    Announcement,
    SwarmTerms,
    verify_announcement,
    verify_suspicion,
)
from p2p.envelope import Envelope, parse
from p2p.errors import (
    Denied,
    EnvelopeError,
    P2PError,
    PeerUnreachable,
    ProtocolError,
    QueueFull,
    Refused,
    RemoteError,
    Untimely,
)
from p2p.rate_limit import KeyedRateLimit, PeerRateLimit

log = logging.getLogger("shoal.membership")

CALL_TIMEOUT_S = 2.0
MEETING_TIMEOUT_S = 5.0  # for a stranger, which must be dialled first and is not urgent
TABLE_TIMEOUT_S = 5.0
FRESH_S = 1.0  # a suspicion of a member that was contacted within this time is ignored
# Changes that other members may not know yet. Deaths are not among them: suspicions report those.
_NEWS = ("joined", "moved", "draining", "updated", "left")
# What one peer may send or ask for: signatures are checked, and each table is compared as a whole.
ANNOUNCEMENTS_AT_ONCE, ANNOUNCEMENTS_PER_S = 2 * 2048, 64.0  # two whole tables at once
SUSPICIONS_AT_ONCE, SUSPICIONS_PER_S = 512, 32.0
INVALID_AT_ONCE, INVALID_PER_S = 512, 8.0  # statements; beyond it a peer misbehaves
TABLES_AT_ONCE, TABLES_PER_S = 16, 0.5
HOME_TABLES_AT_ONCE, HOME_TABLES_PER_S = 64, 4.0  # of all peers of one home (`app.serving.homes`)
_MISSING_CHECKED = 16  # members that a received vector lacks; a newcomer's vector lacks almost all
# Processed between two checkpoints: one takes up to half a millisecond, and many peers may send theirs at once.
STATEMENTS_AT_ONCE = 4


Request = TypeVar("Request", wire.Tell, wire.ProbeRequest, wire.TableRequest)


class ProbeOutcome(Enum):
    """Result of a call to a member."""

    ALIVE = "alive"
    FAILED = "failed"
    UNCLEAR = "unclear"  # the member or this node was too busy
    NO_MEMBER = "no member"


class MembershipEvents(Protocol):
    """Receiver of the results of calls; `Membership` implements it."""

    def changed(self, change: Change) -> None:
        """Handle a change of a member."""

    def check_liveness(self, peer: str, accusation: bytes | None = None) -> None:
        """Probe a member: another peer says that it is gone, or that one believed dead is alive."""

    def refute(self, number: int) -> None:
        """Announce again above `number`, at which a peer suspects this node or holds another announcement of it."""

    def misbehaved(self, peer: str, why: str) -> None:
        """Disconnect a peer that broke the protocol."""


class MembershipExchange:
    """The calls between this node and the other members of one swarm."""

    def __init__(
        self,
        network: Network,
        terms: SwarmTerms,
        table: Table,
        events: MembershipEvents,
        own: Callable[[], Announcement],
        now_ms: Callable[[], int],
        guard: GuardedNetwork | None = None,
        clocks: PeerClocks | None = None,
    ) -> None:
        self._guard, self._clocks = guard, clocks or PeerClocks()
        self.network, self.table, self.gossip_queue = network, table, GossipQueue()
        self._terms, self._events, self._own, self._now_ms = terms, events, own, now_ms
        self._id = bytes.fromhex(terms.swarm)
        self.listening = False
        self.urgent_added = Signal()
        self._announcement_limit = PeerRateLimit(ANNOUNCEMENTS_AT_ONCE, ANNOUNCEMENTS_PER_S)
        self._suspicion_limit = PeerRateLimit(SUSPICIONS_AT_ONCE, SUSPICIONS_PER_S)
        self._table_limit = PeerRateLimit(TABLES_AT_ONCE, TABLES_PER_S)
        self._home_table_limit = KeyedRateLimit[str](HOME_TABLES_AT_ONCE, HOME_TABLES_PER_S)
        self._piggyback_limit = PeerRateLimit(burst=4, per_s=1)  # answers to probes that take news along
        self._urgent_limit = PeerRateLimit(burst=5, per_s=0.5)  # pushes about one member
        self._invalid_limit = PeerRateLimit(INVALID_AT_ONCE, INVALID_PER_S)
        self._unpublished: set[str] = set()  # strangers to pass on once this node has contacted them

    def serve(self) -> None:
        """Start answering calls of other members."""
        self.listening = True
        self.network.serve(wire.TELL, self._on_tell)
        self.network.serve(wire.PROBE, self._on_probe)
        self.network.serve(wire.TABLE, self._on_table)

    # --- outgoing calls -----------------------------------------------------------------------------------------------

    async def probe(self, peer: str) -> ProbeOutcome:
        """Probe a member, exchange piggybacked statements with it, and record the contact and its round-trip time."""
        known = self.table.get(peer)
        # Strangers may be many and may not exist: no piggybacked statements are used up on them.
        is_stranger = known is None or not known.proven
        piggyback = [] if is_stranger else self.gossip_queue.take_piggyback()
        lost = known if known is not None and not known.present else None
        # Its own announcement, in case it has lost its sequence number.
        reminder = [] if lost is None else [lost.announcement.raw]
        number = 0 if lost is None else lost.announcement.sequence
        request = wire.ProbeRequest(self._id, number, [self._own().raw, *reminder, *piggyback])
        if known is not None and not self.network.source(peer):  # it has to be dialled, and others may fill the book
            self.network.learn(peer, known.announcement.addresses)
        timeout_s = MEETING_TIMEOUT_S if is_stranger else CALL_TIMEOUT_S
        try:
            body, rtt_s = await self._ask(peer, request.encode(), timeout_s)
            await self._receive_all(wire.unpack(body, wire.MAX_BATCH_BYTES), peer)
        except P2PError as error:
            return self._outcome_of(peer, error)
        self._record_contact(peer, rtt_s)
        return ProbeOutcome.ALIVE

    async def _ask(self, peer: str, body: bytes, timeout_s: float) -> tuple[bytes, float]:
        """Return the answer to a probe and the seconds it took; dials once more if the link ends.

        The other side closes idle links, possibly while this probe is on its way.
        """
        started_at = trio.current_time()
        try:
            answer = await self.network.call(peer, wire.PROBE, body, timeout_s=timeout_s)
        except PeerUnreachable:
            left_s = started_at + timeout_s - trio.current_time()
            if left_s <= 0:
                raise
            started_at = trio.current_time()
            answer = await self.network.call(peer, wire.PROBE, body, timeout_s=left_s)
        return answer, trio.current_time() - started_at

    def encode_tell(self, statements: list[bytes]) -> bytes:
        """Return the body of a `swarm.tell` with these statements."""
        return wire.Tell(self._id, statements).encode()

    async def tell(self, peer: str, body: bytes) -> ProbeOutcome:
        """Send a member the body that `encode_tell` returned."""
        try:
            await self.network.call(peer, wire.TELL, body, timeout_s=CALL_TIMEOUT_S)
        except P2PError as error:
            return self._outcome_of(peer, error)
        self._record_contact(peer)
        return ProbeOutcome.ALIVE

    async def compare(self, peer: str, timeout_s: float = TABLE_TIMEOUT_S) -> ProbeOutcome:
        """Compare tables with a peer, so that each receives what it lacks; a newcomer gets the whole table this way."""
        statements = wire.fitting([self._own().raw, *self._lists()], wire.MAX_BATCH_BYTES)
        request = wire.TableRequest(self._id, self.table.vector(), statements)
        try:
            body = await self.network.call(peer, wire.TABLE, request.encode(), timeout_s=timeout_s)
            answer = wire.TableAnswer.decode(body)
            await self._receive_all(answer.statements, peer, asked=True)
        except P2PError as error:
            return self._outcome_of(peer, error)
        self._record_contact(peer)
        wanted = [
            member.announcement.raw
            for name in self.table.peers_of(iter(answer.wanted))
            if (member := self.table.get(name))
        ]
        while wanted:
            batch = wire.fitting(wanted, wire.MAX_BATCH_BYTES)
            wanted = wanted[len(batch) :]
            if await self.tell(peer, self.encode_tell(batch)) is not ProbeOutcome.ALIVE:
                break
        return ProbeOutcome.ALIVE

    def _outcome_of(self, peer: str, error: P2PError) -> ProbeOutcome:
        log.debug("%s did not answer: %s", peer, error)
        if isinstance(error, ProtocolError):
            self._events.misbehaved(peer, str(error))
            return ProbeOutcome.FAILED
        if isinstance(error, RemoteError):
            codes = (wire.NOT_MEMBER, wire.NOT_ADMITTED, "unknown_method")
            return ProbeOutcome.NO_MEMBER if error.code in codes else ProbeOutcome.UNCLEAR
        if isinstance(error, Denied):  # it may be well, but it does nothing for this node
            return ProbeOutcome.NO_MEMBER
        return ProbeOutcome.UNCLEAR if isinstance(error, Refused | QueueFull) else ProbeOutcome.FAILED

    # --- incoming calls -----------------------------------------------------------------------------------------------

    async def _on_tell(self, peer: str, body: bytes) -> bytes:
        request = self._admit(peer, body, wire.Tell.decode)
        await self._receive_all(request.statements, peer)
        self._record_contact(peer)
        return b""

    async def _on_probe(self, peer: str, body: bytes) -> bytes:
        request = self._admit(peer, body, wire.ProbeRequest.decode)
        self._refute_if_current(request.suspected)
        is_known = self.table.seen_at(peer) is not None
        await self._receive_all(request.statements, peer)
        self._record_contact(peer)
        # News is given a few times only: a member that probes all the time must not use it up.
        takes_news = is_known and self._piggyback_limit.take(peer, trio.current_time())
        piggyback = self.gossip_queue.take_piggyback() if takes_news else []
        return wire.pack(wire.fitting([self._own().raw, *piggyback], wire.MAX_BATCH_BYTES))

    async def _on_table(self, peer: str, body: bytes) -> bytes:
        now, home = trio.current_time(), peer_home(self.network, peer)
        if not (self._table_limit.take(peer, now) and self._home_table_limit.take(home, now)):
            raise Refused("too many requests for the table of members; ask again later")
        request = self._admit(peer, body, wire.TableRequest.decode)
        await self._receive_all(request.statements, peer)
        self._record_contact(peer)
        if peer in self.table:
            for name in self._disputed(request.vector):
                self._events.check_liveness(name)
        statements = [self._own().raw, *self._lists(), *self.table.newer_than(request.vector)]
        newer = wire.fitting(statements, wire.MAX_TABLE_BYTES)
        return wire.TableAnswer(list(self.table.wanted_from(request.vector)), newer).encode()

    def _disputed(self, vector: Mapping[bytes, int]) -> list[str]:
        """Members that only the vector's owner believes alive, and a few that only this node believes alive."""
        revived = [name for name in self.table.peers_of(iter(vector)) if self.table.state(name) == "dead"]
        missing = [name for name in self.table.present() if self.table.key(name) not in vector]
        return [*revived, *missing[:_MISSING_CHECKED]]

    def _admit(self, peer: str, body: bytes, decode: Callable[[bytes], Request]) -> Request:
        """Decode a request; raises `RemoteError` if it is malformed or of a swarm that this node is not in."""
        try:
            request = decode(body)
        except ProtocolError as error:
            self._events.misbehaved(peer, str(error))
            raise RemoteError(str(error), code=wire.MALFORMED) from error
        if request.swarm != self._id or not self.listening:
            raise RemoteError("this node is not a member of that swarm", code=wire.NOT_MEMBER)
        return request

    # --- received statements ------------------------------------------------------------------------------------------

    async def _receive_all(self, statements: list[bytes], sender: str, *, asked: bool = False) -> None:
        for count, raw in enumerate(statements, 1):
            self.receive(raw, sender, asked=asked)
            if count % STATEMENTS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    def receive(self, raw: bytes, sender: str, *, asked: bool = False) -> None:
        """Process one statement; strangers in an answer that was `asked` for are known to others and not passed on.

        This is the only place that feeds the table: it parses and verifies the bytes of members. Invalid statements are
        dropped; a peer that sends too many of them misbehaves. Those that are not of this time do not count: they were
        good where the peer has them from, by another clock or a moment ago. Its own one tells how its clock goes.
        """
        now = trio.current_time()
        try:
            envelope = parse(raw)
            if envelope.domain == ANNOUNCEMENT_DOMAIN:
                if envelope.peer == sender:
                    self._clocks.heard(sender, envelope.sequence, self._now_ms() / 1000, now)
                self._receive_announcement(envelope, sender, now, asked)
            elif envelope.domain == SUSPICION_DOMAIN:
                if self._suspicion_limit.take(sender, now):
                    self._receive_suspicion(envelope, now)
            elif envelope.domain == REVOCATIONS_DOMAIN and self._guard is not None:
                self._guard.keep_from(sender, envelope)
        except EnvelopeError as error:
            log.debug("a statement from %s was refused: %s", sender, error)
            if not isinstance(error, Untimely) and not self._invalid_limit.take(sender, now):
                self._events.misbehaved(sender, f"too many invalid statements, the last one: {error}")

    def _receive_announcement(self, envelope: Envelope, sender: str, now: float, asked: bool) -> None:
        peer = envelope.peer
        if peer == self.network.peer_id:
            self._receive_own(envelope)
            return
        if envelope.sequence <= self.table.number(peer):
            if self.table.state(peer) == "dead" and sender != peer and sender in self.table:
                self._events.check_liveness(peer)
            return
        if not self._announcement_limit.take(sender, now) or (self._guard and self._guard.is_revoked(peer)):
            return
        home = peer_home(self.network, sender)
        if not self.table.has_place(peer, sender=sender, now=now, home=home):
            return  # before the signature is checked, so that a flood costs little CPU time
        announcement = verify_announcement(envelope, self._terms, self._now_ms())
        change = self.table.update(announcement, sender=sender, now=now, home=home)
        for evicted in self.table.take_evicted():
            self._publish(evicted, now)
        if change is not None:
            self.network.learn(peer, announcement.addresses)
            if not (asked or change.member.proven):
                self._unpublished.add(peer)
            self._publish(change, now)
            if sender == peer:
                self._record_contact(peer)

    def _receive_own(self, envelope: Envelope) -> None:
        """Refute an announcement of this node that is not its current one: it may have lost its sequence number.

        Those with a lower number are ignored unverified, so that replays cost nothing.
        """
        own = self._own()
        if envelope.sequence >= own.sequence and envelope.raw != own.raw:
            self._events.refute(verify_announcement(envelope, self._terms, self._now_ms()).sequence)

    def _refute_if_current(self, number: int) -> None:
        """Refute a suspicion of the current announcement; other numbers count only with a signed announcement."""
        if number == self._own().sequence:
            self._events.refute(number)

    def _receive_suspicion(self, envelope: Envelope, now: float) -> None:
        if self.table.state(envelope.peer) not in PRESENT:  # only suspicions from present members count
            return
        suspicion = verify_suspicion(envelope, self._terms, self._now_ms())
        accused = suspicion.accused
        if accused == self.network.peer_id:
            self._refute_if_current(suspicion.number)
        elif suspicion.number >= self.table.number(accused) and self.table.state(accused) in PRESENT:
            seen_at = self.table.seen_at(accused)
            if seen_at is not None and now - seen_at > FRESH_S:
                self._events.check_liveness(accused, suspicion.raw)

    def _record_contact(self, peer: str, rtt_s: float | None = None) -> None:
        """Record a contact; who is not counted yet counts only while it is linked, because its home is needed."""
        now, home = trio.current_time(), peer_home(self.network, peer)
        if not home and (self.table.state(peer) in GONE or self.table.seen_at(peer) is None):
            return
        change = self.table.seen(peer, now, rtt_s, home)
        if change is not None:
            self._publish(change, now)

    def _publish(self, change: Change, now: float) -> None:
        """Report a change to `MembershipEvents` and pass news on; news of a stranger waits until it was contacted."""
        member = change.member
        is_news = change.kind in _NEWS or (change.kind == "proven" and member.peer in self._unpublished)
        if member.proven or change.kind in GONE:
            self._unpublished.discard(member.peer)
        if member.proven and is_news:
            urgent = change.kind != "updated" and self._urgent_limit.take(member.peer, now)
            self._pass_on(ANNOUNCEMENT_DOMAIN, member.peer, member.announcement.raw, urgent)
        self._events.changed(change)

    def failed(self, peer: str) -> Change | None:
        """Record that a member could not be reached; returns the change of its state."""
        change = self.table.failed(peer, trio.current_time())
        if change is not None:
            self._publish(change, trio.current_time())
        return change

    def drop(self, peer: str) -> None:
        """Remove a peer that misbehaves or is no longer a member."""
        now = trio.current_time()
        change = self.table.drop(peer, now)
        if change is not None:
            self._unpublished.discard(peer)
            self._events.changed(change)

    def expire(self) -> None:
        """Remove expired and long-gone members from the table."""
        for change in self.table.expire(trio.current_time(), self._now_ms()):
            self._unpublished.discard(change.member.peer)
            self._events.changed(change)

    def queue_own(self, *, urgent: bool) -> None:
        """Queue this node's own announcement for other members."""
        self._pass_on(ANNOUNCEMENT_DOMAIN, self.network.peer_id, self._own().raw, urgent)

    def accuse(self, accused: str, accusation: bytes) -> None:
        """Queue a suspicion, this node's own or another's, that a probe of this node confirmed."""
        self._pass_on(SUSPICION_DOMAIN, accused, accusation, urgent=True)

    def pass_on_list(self, signer: str, raw: bytes) -> None:
        """Queue a revocation list that is new here."""
        self._pass_on(REVOCATIONS_DOMAIN, signer, raw, urgent=True)

    def _lists(self) -> list[bytes]:
        return [] if self._guard is None else list(self._guard.book.statements())

    def _pass_on(self, domain: str, about: str, raw: bytes, urgent: bool) -> None:
        self.gossip_queue.add((domain, about), raw, urgent=urgent)
        if urgent:
            self.urgent_added.notify()
