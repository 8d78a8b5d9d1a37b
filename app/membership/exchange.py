"""Conversations between members: asking and answering, and what is made of the statements that are heard.

It keeps no time of its own and starts nothing: when to probe, push or compare tables is for
`app.membership.failure_detector` and `app.membership.membership`, which hear of what follows through
`MembershipEvents`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol, TypeVar

import trio

from app.core.network import Network
from app.membership import wire
from app.membership.gossip_queue import GossipQueue
from app.membership.member import Change
from app.membership.table import GONE, PRESENT, Table
from app.membership.verification import SwarmTerms, check_announcement, check_suspicion, statement
from app.swarm.records import ANNOUNCEMENT_DOMAIN, SUSPICION_DOMAIN
from p2p.envelope import Envelope
from p2p.errors import EnvelopeError, P2PError, PeerUnreachable, ProtocolError, QueueFull, Refused, RemoteError
from p2p.rate_limit import PeerRateLimit

log = logging.getLogger("shoal.membership")

CALL_TIMEOUT_S = 2.0
MEETING_TIMEOUT_S = 5.0  # for a stranger, who must first be dialled, and is not urgent
TABLE_TIMEOUT_S = 5.0
FRESH_S = 1.0  # a suspicion of somebody that was met so lately is not looked into
_NEWS = ("joined", "moved", "draining", "updated", "left")
_MISSING_LOOKED_AT = 16  # of those that a table handed in lacks: it may be a newcomer's
_STATEMENTS_AT_ONCE = 32  # verified between two checkpoints


Request = TypeVar("Request", wire.Tell, wire.ProbeRequest, wire.TableRequest)


class ProbeOutcome(Enum):
    """What came of an attempt to reach a member."""

    ALIVE = "alive"
    FAILED = "failed"
    UNCLEAR = "unclear"  # it, or this node, is too busy to say
    NO_MEMBER = "no member"


class MembershipEvents(Protocol):
    """Who is told of what a conversation brought."""

    def changed(self, change: Change) -> None: ...
    def look_at(self, peer: str, accusation: bytes | None = None) -> None:
        """Somebody says that a member is gone, or that one held for dead is not: see for yourself."""

    def refute(self, number: int) -> None:
        """This node is doubted, or was heard, under a number as high as its present one: say something newer."""

    def misbehaved(self, peer: str, why: str) -> None: ...


class MembershipExchange:
    """Everything that this node says to, and hears from, other members of one swarm."""

    def __init__(
        self,
        network: Network,
        terms: SwarmTerms,
        table: Table,
        hooks: MembershipEvents,
        own: Callable[[], bytes],
        now_ms: Callable[[], int],
    ) -> None:
        self.network, self.table, self.gossip_queue = network, table, GossipQueue()
        self._terms, self._events, self._own, self._now_ms = terms, hooks, own, now_ms
        self._id = bytes.fromhex(terms.swarm)
        self.listening = False
        self.pressing = trio.Event()  # set while there is something to push
        # A table of 2048 at once, then some; and what is heard in vain before a peer counts as misbehaving.
        self._news = PeerRateLimit(burst=2 * 2048, per_s=64)
        self._changes = PeerRateLimit(burst=5, per_s=0.5)
        self._errors = PeerRateLimit(burst=512, per_s=8)
        self._untold: set[str] = set()  # strangers whose coming is news, once this node has met them

    def serve(self) -> None:
        """Answer other members from now on."""
        self.listening = True
        self.network.serve(wire.TELL, self._on_tell)
        self.network.serve(wire.PROBE, self._on_probe)
        self.network.serve(wire.TABLE, self._on_table)

    # --- asking ------------------------------------------------------------------------------------------------------

    async def probe(self, peer: str) -> ProbeOutcome:
        """See whether a member answers, and swap news with it."""
        known = self.table.get(peer)
        # Strangers are met in crowds, and may be nobody: no news is spent on them.
        is_stranger = known is None or not known.proven
        riders = [] if is_stranger else self.gossip_queue.take_piggyback()
        lost = known if known is not None and not known.present else None
        # Its own word under which it was lost: it may have forgotten it.
        reminder = [] if lost is None else [lost.raw]
        number = 0 if lost is None else lost.announcement.sequence
        request = wire.ProbeRequest(self._id, number, [self._own(), *reminder, *riders])
        timeout_s = MEETING_TIMEOUT_S if is_stranger else CALL_TIMEOUT_S
        try:
            body, rtt_s = await self._ask(peer, request.encode(), timeout_s)
            await self._hear_all(wire.unpack(body, wire.MAX_BATCH_BYTES), peer)
        except P2PError as error:
            return self._outcome_of(peer, error)
        self._met(peer, rtt_s)
        return ProbeOutcome.ALIVE

    async def _ask(self, peer: str, body: bytes, timeout_s: float) -> tuple[bytes, float]:
        """The answer to a probe, and how long it took; a link that ends is dialled once more.

        The other side closes links that it has not used for long, perhaps just as this probe is on its way.
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

    def telling(self, statements: list[bytes]) -> bytes:
        """The body that passes these statements on."""
        return wire.Tell(self._id, statements).encode()

    async def tell(self, peer: str, body: bytes) -> ProbeOutcome:
        """Pass statements on, as `telling` wrote them."""
        try:
            await self.network.call(peer, wire.TELL, body, timeout_s=CALL_TIMEOUT_S)
        except P2PError as error:
            return self._outcome_of(peer, error)
        self._met(peer)
        return ProbeOutcome.ALIVE

    async def compare(self, peer: str, timeout_s: float = TABLE_TIMEOUT_S) -> ProbeOutcome:
        """Compare tables with a peer, so that both know what either knew; works for a newcomer too."""
        request = wire.TableRequest(self._id, self.table.vector(), [self._own()])
        try:
            body = await self.network.call(peer, wire.TABLE, request.encode(), timeout_s=timeout_s)
            answer = wire.TableAnswer.decode(body)
            await self._hear_all(answer.statements, peer, asked=True)
        except P2PError as error:
            return self._outcome_of(peer, error)
        self._met(peer)
        wanted = [member.raw for name in self.table.peers_of(iter(answer.wanted)) if (member := self.table.get(name))]
        while wanted:
            batch = wire.fitting(wanted, wire.MAX_BATCH_BYTES)
            wanted = wanted[len(batch) :]
            if await self.tell(peer, self.telling(batch)) is not ProbeOutcome.ALIVE:
                break
        return ProbeOutcome.ALIVE

    def _outcome_of(self, peer: str, error: P2PError) -> ProbeOutcome:
        log.debug("%s gave no answer: %s", peer, error)
        if isinstance(error, ProtocolError):
            self._events.misbehaved(peer, str(error))
            return ProbeOutcome.FAILED
        if isinstance(error, RemoteError):
            return ProbeOutcome.NO_MEMBER if error.code in (wire.NOT_MEMBER, "unknown_method") else ProbeOutcome.UNCLEAR
        return ProbeOutcome.UNCLEAR if isinstance(error, Refused | QueueFull) else ProbeOutcome.FAILED

    # --- answering ---------------------------------------------------------------------------------------------------

    async def _on_tell(self, peer: str, body: bytes) -> bytes:
        request = self._admit(peer, body, wire.Tell.decode)
        await self._hear_all(request.statements, peer)
        self._met(peer)
        return b""

    async def _on_probe(self, peer: str, body: bytes) -> bytes:
        request = self._admit(peer, body, wire.ProbeRequest.decode)
        self._doubted(request.suspected)
        is_known = self.table.seen_at(peer) is not None
        await self._hear_all(request.statements, peer)
        self._met(peer)
        riders = self.gossip_queue.take_piggyback() if is_known else []
        return wire.pack(wire.fitting([self._own(), *riders], wire.MAX_BATCH_BYTES))

    async def _on_table(self, peer: str, body: bytes) -> bytes:
        request = self._admit(peer, body, wire.TableRequest.decode)
        await self._hear_all(request.statements, peer)
        self._met(peer)
        if peer in self.table:
            for name in self._disputed(request.vector):
                self._events.look_at(name)
        newer = wire.fitting([self._own(), *self.table.newer_than(request.vector)], wire.MAX_TABLE_BYTES)
        return wire.TableAnswer(list(self.table.wanted_from(request.vector)), newer).encode()

    def _disputed(self, vector: Mapping[bytes, int]) -> list[str]:
        """Whom another member holds for alive and this node for dead; and a few of whom it is the other way round."""
        revived = [name for name in self.table.peers_of(iter(vector)) if self.table.state(name) == "dead"]
        missing = [name for name in self.table.present() if self.table.key(name) not in vector]
        return [*revived, *missing[:_MISSING_LOOKED_AT]]

    def _admit(self, peer: str, body: bytes, decode: Callable[[bytes], Request]) -> Request:
        try:
            request = decode(body)
        except ProtocolError as error:
            self._events.misbehaved(peer, str(error))
            raise RemoteError(str(error), code=wire.MALFORMED) from error
        if request.swarm != self._id or not self.listening:
            raise RemoteError("this node is no member of that swarm", code=wire.NOT_MEMBER)
        return request

    # --- hearing -----------------------------------------------------------------------------------------------------

    async def _hear_all(self, statements: list[bytes], sender: str, *, asked: bool = False) -> None:
        for count, raw in enumerate(statements, 1):
            self.hear(raw, sender, asked=asked)
            if count % _STATEMENTS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    def hear(self, raw: bytes, sender: str, *, asked: bool = False) -> None:
        """Take one statement for what it is worth; what was `asked` for is not news to pass on."""
        now = trio.current_time()
        try:
            envelope = statement(raw)
            if envelope.domain == ANNOUNCEMENT_DOMAIN:
                self._hear_announcement(envelope, sender, now, asked)
            elif envelope.domain == SUSPICION_DOMAIN:
                self._hear_suspicion(envelope, now)
        except EnvelopeError as error:
            log.debug("a statement from %s was refused: %s", sender, error)
            if not self._errors.take(sender, now):
                self._events.misbehaved(sender, f"too many worthless statements, the last: {error}")

    def _hear_announcement(self, envelope: Envelope, sender: str, now: float, asked: bool) -> None:
        peer = envelope.peer
        if peer == self.network.peer_id:
            self._hear_of_self(envelope)
            return
        if envelope.sequence <= self.table.number(peer):
            if self.table.state(peer) == "dead" and sender != peer and sender in self.table:
                self._events.look_at(peer)
            return
        if not self._news.take(sender, now):
            return
        change = self.table.offer(envelope.raw, sender=sender, now=now, now_ms=self._now_ms())
        for evicted in self.table.take_evicted():
            self._note(evicted, now)
        if change is not None:
            self.network.learn(peer, change.member.announcement.addresses)
            if not (asked or change.member.proven):
                self._untold.add(peer)
            self._note(change, now)

    def _hear_of_self(self, envelope: Envelope) -> None:
        """An announcement of this node's own: newer ones than it remembers were made before its memory was lost."""
        if envelope.raw != self._own():
            self._events.refute(check_announcement(envelope.raw, self._terms, self._now_ms()).sequence)

    def _doubted(self, number: int) -> None:
        """Somebody lost this node under a number; one that it does not remember must be shown with its signature."""
        if number == statement(self._own()).sequence:
            self._events.refute(number)

    def _hear_suspicion(self, envelope: Envelope, now: float) -> None:
        if self.table.state(envelope.peer) not in PRESENT:  # the word of members counts, and of nobody else
            return
        said = check_suspicion(envelope.raw, self._terms, self._now_ms())
        if said.accused == self.network.peer_id:
            self._doubted(said.number)
        elif said.number >= self.table.number(said.accused) and self.table.state(said.accused) in PRESENT:
            seen_at = self.table.seen_at(said.accused)
            if seen_at is not None and now - seen_at > FRESH_S:
                self._events.look_at(said.accused, envelope.raw)

    def _met(self, peer: str, rtt_s: float | None = None) -> None:
        now = trio.current_time()
        change = self.table.seen(peer, now, rtt_s)
        if change is not None:
            self._note(change, now)

    def _note(self, change: Change, now: float) -> None:
        """Tell this node of a change, and others too, unless it is about a stranger: that waits until it was met."""
        member = change.member
        is_news = change.kind in _NEWS or (change.kind == "proven" and member.peer in self._untold)
        if member.proven or change.kind in GONE:
            self._untold.discard(member.peer)
        if member.proven and is_news:
            urgent = change.kind != "updated" and self._changes.take(member.peer, now)
            self._pass_on(ANNOUNCEMENT_DOMAIN, member.peer, member.raw, urgent)
        self._events.changed(change)

    def failed(self, peer: str) -> Change | None:
        """This node could not reach a member."""
        change = self.table.failed(peer, trio.current_time())
        if change is not None:
            self._note(change, trio.current_time())
        return change

    def drop(self, peer: str) -> None:
        """Give up a member that misbehaves or is no member any more."""
        now = trio.current_time()
        change = self.table.drop(peer, now)
        if change is not None:
            self._untold.discard(peer)
            self._events.changed(change)

    def expire(self) -> None:
        """Forget what is too old."""
        for change in self.table.expire(trio.current_time(), self._now_ms()):
            self._events.changed(change)

    def said(self, raw: bytes, *, urgent: bool) -> None:
        """Pass on what this node itself announced."""
        self._pass_on(ANNOUNCEMENT_DOMAIN, self.network.peer_id, raw, urgent)

    def accuse(self, accused: str, accusation: bytes) -> None:
        """Pass on a suspicion that this node found confirmed, its own or another's."""
        self._pass_on(SUSPICION_DOMAIN, accused, accusation, urgent=True)

    def _pass_on(self, domain: str, about: str, raw: bytes, urgent: bool) -> None:
        self.gossip_queue.add((domain, about), raw, urgent=urgent)
        if urgent:
            self.pressing.set()
