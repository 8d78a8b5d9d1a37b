"""An asker's session: one sequence of tokens over the hops that hold its KV cache.

Three classes, from the wire up:

- `HopLinks`: one stream to each hop, shared by all sessions of this asker;
- `RouteHops`: the hops of one session: epochs, orders, and the last word of each hop;
- `RouteSession`: feeds tokens, waits for the last hop's answer, and repairs the route when a hop dies, freezes, leaves
  or forgets. `_repair` is where a reply survives a dead hop.

It knows no text (`app.asker.reply` chooses the tokens) and no swarm (a `RouteSource` proposes routes). What a late
answer means, and which hop must send what again, are pure decisions in `app.asker.recovery`.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import trio

from app.asker.kept_sessions import packed
from app.asker.recovery import (
    OVERDUE_TIMES,
    HopFailed,
    HopLoss,
    HopProgress,
    HopState,
    LostSeconds,
    ResumePlan,
    cache_sources,
    longest_quiet_s,
    plan_resume,
)
from app.core.compute import NextStep
from app.core.errors import AppError, RecordError, reason_of
from app.core.network import FrameStream, Network, Priority
from app.core.reasons import Reason, because
from app.core.signal import Signal
from app.core.smoothing import Ewma
from app.core.turns import Who
from app.routing.reroute import RerouteTimer, RunningRoute
from app.routing.route import Hop, NoRoute, ReadingPace, Route
from app.routing.wire_choice import Wires
from app.session.adapter_index import AdapterRef
from app.session.cache_wire import HANDOVER_S, MIN_TOKENS
from app.session.frame import (
    CHUNK_ROWS,
    DTYPES,
    Frame,
    HopError,
    decode_hop_error,
    header,
    is_finite,
    new_session_id,
    plain,
    row_bytes,
)
from app.session.loop_stream import LoopStream, each_message, loop_streams
from app.session.outbound import OutboundFrame, PeerOutbox
from app.session.wire import (
    ADAPTER_REFUSALS,
    GIVES_CACHE,
    KEEP,
    KNOWS_ADAPTERS,
    KNOWS_REVISIONS,
    MAX_REVISION,
    MAX_TOKENS,
    PROTOCOL,
    CacheGrant,
    EpochOrder,
    HopPace,
    Kind,
    Prefix,
    decode,
    decode_pace,
    encode_give,
    encode_turn,
    hop_error_reason,
)
from p2p.errors import P2PError
from p2p.rate_limit import LogLimit, backoff_s
from p2p.supervise import guarded

log = logging.getLogger("shoal.asker")
log.addFilter(LogLimit())  # hops can cause these lines

LEFT = "this node has left the swarm; ask again once it is in one"
IDLE_LINK_S = 60.0  # a stream without sessions for so long is closed
FEED_AHEAD_BYTES = 16 * 2**20  # of embedded tokens that wait for a hop's stream, and a chunk more
FEED_TOGETHER_BYTES = 64 * 2**20  # the same for sessions of which nothing waits there
_LOOK_FOR_ROOM_S = 0.02
PROBE_ROUND_TRIPS, LONGEST_PROBE_S = 4, 5.0
PROMPT_ROWS, PROMPT_PATIENCE = 16, 3


class Listener(Protocol):
    """Receives the frames of one session, and the end of streams that it uses."""

    async def on_frame(self, peer: str, frame: Frame) -> None: ...
    def on_stream_end(self, peer: str) -> None: ...


class HopLink:
    """The stream to one hop."""

    def __init__(self, stream: FrameStream, nursery: trio.Nursery) -> None:
        self.peer = stream.peer
        self.outbox = PeerOutbox(stream, nursery)
        self.listeners: dict[bytes, Listener] = {}

    async def send(self, *parts: bytes, priority: Priority = Priority.CONTROL, owner: Who = ("",)) -> None:
        """Send one frame; if it cannot be sent, the hop will be reported as lost. Owners take turns."""
        await self.outbox.push(OutboundFrame(parts, priority, owner))

    async def read(self) -> None:
        """Pass each frame to the session that it names, until the stream ends."""
        try:
            await each_message(self.outbox.stream, self._take)
        except RecordError as error:
            log.warning("%s sent a malformed frame, its stream is closed: %s", self.peer, error)
            await self.outbox.stream.reset()
        except P2PError:
            pass
        finally:
            self.outbox.broken = True
            for listener in list(self.listeners.values()):
                listener.on_stream_end(self.peer)

    async def _take(self, message: bytes) -> None:
        frame = decode(message)
        listener = self.listeners.get(frame.session)
        if listener is not None:
            await listener.on_frame(self.peer, frame)


class _Opening:
    """An attempt to open the stream to one hop, for whose end other sessions wait."""

    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.failure: P2PError | None = None


class HopLinks:
    """One stream to each hop; this node's own block server is reached without the network."""

    def __init__(
        self, network: Network, nursery: trio.Nursery, own_server: Callable[[FrameStream], Awaitable[None]] | None
    ) -> None:
        self._network, self._nursery, self._own_server = network, nursery, own_server
        self._links: dict[str, HopLink] = {}
        self._opening: dict[str, _Opening] = {}
        self.is_closed = False  # this node leaves the swarm: nothing can be opened or begun any more
        nursery.start_soon(self._close_idle)

    @property
    def peer_id(self) -> str:
        """This node's peer id."""
        return self._network.peer_id

    async def to(self, peer: str, *, timeout_s: float) -> HopLink:
        """Return the link to a peer, opened if need be; raises `P2PError` if the peer cannot be reached.

        Sessions that want it at the same time share one attempt and its failure: in turn, each would wait for those of
        all others before its own.
        """
        link = self._links.get(peer)
        if link is not None and not link.outbox.broken:
            return link
        opening = self._opening.setdefault(peer, _Opening())
        try:
            async with opening.lock:
                link = self._links.get(peer)
                if link is not None and not link.outbox.broken:
                    return link
                if opening.failure is not None:
                    raise opening.failure
                try:
                    stream = await self._open(peer, timeout_s)
                except P2PError as error:
                    opening.failure = error
                    raise
                link = self._links[peer] = HopLink(stream, self._nursery)
                self._nursery.start_soon(link.read)
                return link
        finally:
            if not opening.lock.locked():  # nobody else waits for it
                self._opening.pop(peer, None)

    def is_open(self, peer: str) -> bool:
        """True if a link to the peer is open."""
        link = self._links.get(peer)
        return link is not None and not link.outbox.broken

    async def close_session(self, route: Route, session: bytes, epoch: int) -> None:
        """Tell the hops of a resting session to free it; at hops without an open link it ends by itself."""
        for hop in route:
            if self.is_open(hop.peer):
                await self._links[hop.peer].send(plain(Kind.CLOSE, session, epoch))

    def round_trip_s(self, route: Route) -> float:
        """The longest round trip to a hop of the route; what waits on the way counts."""
        hops = {hop.peer for hop in route}
        return max((link.rtt_s or 0.0 for link in self._network.links() if link.peer in hops), default=0.0)

    def prepare(self, peer: str, *, timeout_s: float) -> None:
        """Start to open a link that may be needed later."""
        if not self.is_open(peer) and not self.is_closed:
            self._nursery.start_soon(self._prepare, peer, timeout_s)

    def in_background(self, what: str, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task that no session waits for; if it fails, that is only logged."""
        if not self.is_closed:
            self._nursery.start_soon(guarded, what, task)

    async def _close_idle(self) -> None:
        """Close streams that no session has used for a while: an open stream keeps its link from being pruned."""
        while True:
            await trio.sleep(IDLE_LINK_S / 2)
            idle_since = trio.current_time() - IDLE_LINK_S
            idle = [
                peer for peer, link in self._links.items() if not link.listeners and link.outbox.used_at < idle_since
            ]
            for link in [self._links.pop(peer) for peer in idle]:
                await link.outbox.close()

    async def _prepare(self, peer: str, timeout_s: float) -> None:
        try:
            await self.to(peer, timeout_s=timeout_s)
        except P2PError as error:
            log.info("%s cannot be reached for a better route: %s", peer, error)

    async def _open(self, peer: str, timeout_s: float) -> FrameStream:
        if self.is_closed:
            raise P2PError(LEFT)
        if peer == self._network.peer_id and self._own_server is not None:
            here, there = loop_streams(peer)
            self._nursery.start_soon(self._attend, self._own_server, there)
            return here
        stream = await self._network.open(peer, PROTOCOL, timeout_s=timeout_s)
        if self.is_closed:
            await stream.reset()
            raise P2PError(LEFT)
        return stream

    async def _attend(self, server: Callable[[FrameStream], Awaitable[None]], stream: LoopStream) -> None:
        """Run the server's handler and then end the stream, as a network does."""
        try:
            await server(stream)
        finally:
            with trio.CancelScope(shield=True):
                await stream.reset()


@dataclass(frozen=True)
class SessionSettings:
    """Deadlines and sizes of a session."""

    chunk_rows: int = CHUNK_ROWS
    open_s: float = 5.0  # to reach a hop
    ready_s: float = 5.0  # for a hop to begin an epoch, and `stuck_s` more if it answers probes and is needed
    adapter_s: float = 300.0  # for a hop that answers probes to fetch an adapter before
    probe_s: float = 1.0  # for a hop to say how far it is; longer where round trips are long
    stuck_s: float = 30.0  # for a hop that answers probes but does not advance
    first_route_s: float = 15.0  # to wait for a route at the beginning: a member may be joining or slow to answer
    new_route_s: float = 60.0  # and in the middle of a reply
    repair_s: float = 60.0  # to try routes whose hops fail one after another
    attempts_without_progress: int = 64
    urgent: bool = False  # its first tokens, if they are few, go before the prompts of others


@dataclass(frozen=True)
class SessionShape:
    """Size of a session: tokens, and width and format of a hidden state; and the adapter that computes all of it."""

    tokens: int
    width: int
    dtype: str
    adapter: AdapterRef | None = None


@dataclass(frozen=True)
class CachedPrefix:
    """Tokens that a new session begins with, from the cache that another one left at the hops of `route`."""

    wire: Prefix
    epoch: int  # the last one of the other session
    route: Route
    wires: Wires  # number formats of its rows, which the new session keeps


@dataclass(frozen=True)
class OwnNode:
    """What this node does itself for a session that has no route."""

    loading: Callable[[], int] = lambda: 0  # a number that grows as long as this node gets on with loading blocks
    makes_room: Callable[[], bool] = lambda: False  # asked while all hops are full: True if other replies here give way


class RouteSource(Protocol):
    """Proposes routes, and learns how hops did."""

    async def route(self, current: Route, avoid: Sequence[str]) -> Route:
        """Return a route that keeps as much of the current one as possible; raises `NoRoute`."""

    def failed(self, peer: str, why: Reason, *, busy: bool) -> None:
        """Record that a hop failed, or was too busy."""

    def leaves(self, peer: str, why: Reason) -> None:
        """Record that a hop says that it is about to leave."""

    def link_broke(self, sender: str, receiver: str) -> None:
        """Record that rows were lost between two hops, of which neither may be at fault."""

    def worked(self, peer: str) -> None:
        """Record that a hop did its part."""

    async def better(self, running: RunningRoute) -> Route | None:
        """Return a route that is worth moving a healthy session to, if there is one."""

    def wires(self, route: Route, before: Wires | None) -> Wires:
        """Return the number formats of rows on a route; `before` are those that the session has had so far."""

    def paces(self, route: Route) -> Mapping[str, ReadingPace]:
        """Return how fast hops were believed to read when the route was proposed, as far as that is known."""

    def waited(self, hop: Hop, tokens: int, waited_s: float, *, given_up: bool = False) -> None:
        """Record that a hop was waited for so long, and had not read these tokens by then; `given_up`: in vain."""

    async def would_use(self, hop: Hop, avoid: Sequence[str]) -> bool:
        """Return True if a new session would use this hop: the others, if any, are believed slower."""

    def lacks_adapter(self, peer: str) -> None:
        """Record that the session's adapter did not get to a peer."""

    def without_adapter(self) -> Collection[str]:
        """Return the peers to which it did not get lately."""


def _lost(peer: str) -> HopFailed:
    return HopFailed(peer, because("hop_lost", "its stream broke", peer))


def _not_finite(peer: str) -> HopFailed:
    return HopFailed(peer, because("hop_failed", "it sent numbers that are not finite", peer))


class RouteHops:
    """The hops of one session: sends orders and tokens, and keeps the last word of each hop. A `Listener`."""

    def __init__(
        self,
        links: HopLinks,
        guide: RouteSource,
        shape: SessionShape,
        settings: SessionSettings,
        prefix: CachedPrefix | None = None,
    ) -> None:
        self.id = new_session_id(links.peer_id)
        self._owner = (self.id.hex(),)  # of rows in outboxes, where sessions take turns
        self.prefix = prefix
        self._links, self._guide, self._settings, self._shape = links, guide, settings, shape
        self._dtype = DTYPES[shape.dtype]
        self._row_bytes = row_bytes(self._dtype, shape.width)
        self._open: dict[str, HopLink] = {}
        self._ready: dict[str, HopState] = {}
        self._turned_at = 0.0  # when the present epoch was ordered
        self._ready_at: dict[str, float] = {}
        self._fetching: Collection[str] = ()  # hops that fetch a cache before they begin it
        self._relayed: set[tuple[str, str]] = set()  # links that go through this asker, from the next epoch on
        # Those of the present epoch: the first hop was told to relay, the second accepts data from this asker alone.
        self._ordered: frozenset[tuple[str, str]] = frozenset()
        self._bad_links: dict[tuple[str, str], int] = {}
        self._forwarded: dict[str, int] = {}  # hop -> position from which its next outputs follow, in this epoch
        self._took_at: dict[str, float] = {}  # as in `took_at`
        self._heard = Signal()
        self.wires: Wires | None = None if prefix is None else prefix.wires  # of the present epoch; None: before any
        self.route: Route = ()  # in use, or being set up
        self._epoch_route: Route = ()  # the route of the present epoch
        self._revisers: set[str] = set()  # hops that know revisions
        self.unable: dict[str, Reason] = {}  # peers that cannot serve this session's adapter
        self._givers: set[str] = set()  # hops that can hand their cache over
        self._sources: set[tuple[str, str]] = set()  # (new hop, old hop): hand-overs that were ordered, each once
        self.epoch = 0
        self.revision = 0  # of the tokens within the epoch
        self._revised_at = 0  # the first position of that revision
        self.urgent_from = 0  # a reply waits for the tokens from this position on
        self._wanted = range(0)  # positions whose outputs are the answer
        self._outputs = bytearray()  # of the first of them, of one number format
        self._outputs_dtype = 0
        self.answer: Frame | None = None
        self.trouble: HopFailed | None = None
        self.states: dict[str, Frame] = {}
        self.leaving: set[str] = set()  # hops that are draining
        self._late: set[str] = set()  # hops that were left because they did not begin: they are no better than others
        self.answered_at = 0.0  # when `answer` arrived
        self.paces: dict[str, HopPace] = {}
        # Hop -> tokens that it has cached, by its last word. Those of `prefix` are believed until it says otherwise.
        self.cached = {hop.peer: prefix.wire.tokens for hop in prefix.route} if prefix is not None else {}

    # --- what hops say ------------------------------------------------------------------------------------------------

    async def on_frame(self, peer: str, frame: Frame) -> None:
        """Take a frame from a hop; frames of another epoch, or that this hop may not send, are dropped.

        A hop that has left the route may still be connected, and must not decide how the others do.
        """
        if peer not in self._open:
            return
        if not self._is_on_route(peer) or (frame.epoch != self.epoch and frame.kind != Kind.STATE):
            self._on_late_frame(peer, frame)
            return
        if frame.kind == Kind.STATE:
            self.states[peer] = state = self._without_cut(frame)
            if frame.epoch == self.epoch:
                self.cached[peer] = state.position
        elif frame.kind == Kind.DATA:
            is_last = peer == self.route[-1].peer
            if not is_last or frame.revision != self.revision or frame.width != self._shape.width:
                return
            if frame.position + frame.rows > self._wanted.stop:
                return
            if is_finite(frame):
                self._take_outputs(frame)
                self.answered_at = trio.current_time()
            else:
                self.trouble = _not_finite(peer)
        elif frame.kind == Kind.RELAY:
            await self._forward(peer, frame)
            return
        elif frame.kind == Kind.PACE:
            self.paces[peer] = decode_pace(frame)
            return
        elif frame.kind == Kind.READY:
            if peer in self._ready:
                return  # it says so once an epoch, and cannot take back then what it said
            self._ready[peer], self._ready_at[peer] = HopState(frame.position, frame.rows), trio.current_time()
            self.cached[peer] = frame.position
            for flag, peers in ((KNOWS_REVISIONS, self._revisers), (GIVES_CACHE, self._givers)):
                (peers.add if frame.width & flag else peers.discard)(peer)
            if self._shape.adapter is not None and not frame.width & KNOWS_ADAPTERS:
                self._cannot_adapt(peer, because("hop_without_adapters", "its version knows no adapters", peer))
        elif frame.kind == Kind.TROUBLE:
            self._on_error(peer, decode_hop_error(frame))
        self._heard.notify()

    def want(self, first: int, stop: int) -> None:
        """Wait from now on for the outputs of positions [first, stop): together they are the answer."""
        self._wanted, self._outputs, self.answer = range(first, stop), bytearray(), None

    def _take_outputs(self, frame: Frame) -> None:
        """Add outputs to the answer; a hop may send those of one chunk in several frames."""
        if frame.dtype != self._outputs_dtype:
            self._outputs, self._outputs_dtype = bytearray(), frame.dtype
        first, stop = self._wanted.start, self._wanted.stop
        size = row_bytes(frame.dtype, frame.width)
        next_position = first + len(self._outputs) // size
        if frame.position > next_position:
            return  # what comes before it is missing
        self._outputs += frame.body[(next_position - frame.position) * size :]
        if first + len(self._outputs) // size == stop:
            self.answer = frame._replace(position=first, rows=stop - first, body=memoryview(bytes(self._outputs)))

    @property
    def know_revisions(self) -> bool:
        """True if all hops of the route know revisions."""
        return all(hop.peer in self._revisers for hop in self.route)

    @property
    def can_revise(self) -> bool:
        """True if rows of a new revision can be sent: all hops know revisions, and this epoch has one left."""
        return self.revision < MAX_REVISION and self.know_revisions

    def revise(self, position: int) -> None:
        """Let the next rows, which begin at this position, replace what hops cache from there on."""
        assert self.can_revise, "an epoch's revisions are numbers of two bytes"
        self.revision, self._revised_at = self.revision + 1, position
        self._forwarded = dict.fromkeys(self._forwarded, position)
        self.cached = {peer: min(tokens, position) for peer, tokens in self.cached.items()}

    def _without_cut(self, state: Frame) -> Frame:
        """Leave out of a hop's progress what the rows of the present revision, which it has not seen yet, replace."""
        if state.epoch != self.epoch or state.revision == self.revision:
            return state
        return state._replace(position=min(state.position, self._revised_at), rows=min(state.rows, self._revised_at))

    def _is_on_route(self, peer: str) -> bool:
        """True if a peer is a hop of the route in use, or of the one that is being set up."""
        return any(hop.peer == peer for hop in self.route)

    def _on_late_frame(self, peer: str, frame: Frame) -> None:
        """Heed of other epochs and former hops only that a hop is leaving: that is true of any route."""
        if frame.kind == Kind.TROUBLE and (error := decode_hop_error(frame)).code == "draining":
            self._note_leaving(peer, hop_error_reason(peer, error))

    def on_stream_end(self, peer: str) -> None:
        """Note that the stream to a hop broke."""
        if self._is_on_route(peer):
            self.trouble = _lost(peer)
            self._heard.notify()
        else:
            self._open.pop(peer, None)

    def _on_error(self, peer: str, error: HopError) -> None:
        log.info("session %s: %s reports %s: %s", self.id.hex()[:8], peer, error.code, error.text)
        if error.code == "evicted":
            return
        why = hop_error_reason(peer, error)
        if why.code in ADAPTER_REFUSALS and self._shape.adapter is not None:
            self._cannot_adapt(peer, why)
            return
        if error.code in ("busy", "refused", "failed"):
            # A hop that no longer hosts these blocks has said so in an announcement that may still be under way.
            gone = error.why == "not_hosted"
            self.trouble = HopFailed(peer, why, busy=gone or error.code == "busy", blameless=gone)
            return
        link = None
        if error.code == "draining":
            if peer in self.leaving and peer in self._ready:
                return  # it says so in each epoch, and carries the session on for want of another hop
            self._note_leaving(peer, why)
        elif error.code == "link":
            if (peer, self._successor(peer)) in self._ordered:
                return  # nothing of this session goes over it
            link = self._note_bad_link(peer)
        elif error.code in ("input", "gap"):
            link = self._suspect_link_to(peer)
            if link is None:
                self.trouble = HopFailed(peer, why)
                return
        self.trouble = self.trouble or HopFailed(peer, why, blameless=True, link=link)

    def _note_leaving(self, peer: str, why: Reason) -> None:
        self.leaving.add(peer)
        self._guide.leaves(peer, why)

    def _cannot_adapt(self, peer: str, why: Reason) -> None:
        """Use a peer no more in this session: it cannot compute with the adapter. Other sessions are not concerned."""
        self.unable[peer] = why
        self.trouble = HopFailed(peer, why, blameless=True)
        self._guide.lacks_adapter(peer)

    def _leave_late(self, peer: str) -> None:
        """Leave a hop that answers but does not begin, for another one: it counts as busy, and not as failed."""
        if self._shape.adapter is not None:
            self._cannot_adapt_yet(peer)
            return
        self._late.add(peer)
        self.trouble = HopFailed(peer, because("hop_unopened", "it is too busy to open the session", peer), busy=True)

    def _cannot_adapt_yet(self, peer: str) -> None:
        """Leave a peer to which the adapter does not get, for one that may have it sooner."""
        self._guide.lacks_adapter(peer)
        why = because("hop_unopened", "the adapter has not got to it so far", peer)
        self.trouble = HopFailed(peer, why, blameless=True)

    def _note_bad_link(self, peer: str) -> tuple[str, str] | None:
        """Count a failure of the link from a hop to its successor; after the second, relay it through this asker.

        Returns the link; None for the last hop, which has none.
        """
        link = peer, self._successor(peer)
        if not link[1]:
            return None
        self._bad_links[link] = self._bad_links.get(link, 0) + 1
        if self._bad_links[link] >= 2:
            self._relayed.add(link)
        return link

    def _suspect_link_to(self, peer: str) -> tuple[str, str] | None:
        """Let what a hop receives go through this asker from now on: it says that it is bad, or that some is missing.

        Either that hop or its predecessor lies, or the link between them is bad; what goes through this asker shows
        which. Returns the link; None if all that the hop received in this epoch came from this asker.
        """
        link = self._predecessor(peer), peer
        if not link[0] or link in self._ordered:
            return None
        self._relayed.add(link)
        return link

    def blame_for(self, loss: HopLoss) -> HopFailed:
        """Return the failure for tokens that were lost between two hops.

        Nobody is blamed for the link's first loss. Once it goes through this asker, a sender whose outputs have not
        arrived here is blamed: it said that it has computed them.
        """
        peer, sender = loss.failure.peer, loss.sender
        if sender and (link := self._suspect_link_to(peer)):
            return HopFailed(peer, loss.failure.why, blameless=True, link=link)
        if sender and self._forwarded.get(sender, 0) < loss.stop:
            why = because("hop_failed", "it does not send what it says it has computed", sender)
            return HopFailed(sender, why)
        return loss.failure

    async def _forward(self, peer: str, frame: Frame) -> None:
        """Forward outputs that a hop cannot send to its successor itself.

        The successor would take a frame that does not fit for this asker's fault, so it is checked here.
        """
        if frame.revision != self.revision:
            return
        if frame.width != self._shape.width or frame.position + frame.rows > self._wanted.stop:
            why = because("hop_failed", "it sent outputs that do not fit the session", peer)
            self.trouble = HopFailed(peer, why)
            self._heard.notify()
            return
        if not is_finite(frame):
            self.trouble = _not_finite(peer)
            self._heard.notify()
            return
        successor, following = self._successor(peer), self._forwarded.get(peer, frame.position)
        if successor not in self._open or frame.position < following:
            return  # each position once an epoch, however often it is sent
        if frame.position > following and (peer, successor) in self._ordered:  # else it sent those before directly
            self.trouble = HopFailed(peer, because("hop_failed", f"it left out the outputs from {following} on", peer))
            self._heard.notify()
            return
        self._relayed.add((peer, successor))
        self._forwarded[peer] = frame.position + frame.rows
        await self._send_data(successor, frame.position, frame.rows, frame.dtype, bytes(frame.body))

    def _successor(self, peer: str) -> str:
        """The hop after `peer` on the route of this epoch; a route that is being set up does not count yet."""
        peers = [hop.peer for hop in self._epoch_route]
        index = peers.index(peer) if peer in peers else len(peers)
        return peers[index + 1] if index + 1 < len(peers) else ""

    def _predecessor(self, peer: str) -> str:
        """The hop before `peer` on the route of this epoch; empty for the first."""
        peers = [hop.peer for hop in self._epoch_route]
        index = peers.index(peer) if peer in peers else 0
        return peers[index - 1] if index else ""

    # --- what hops are told -------------------------------------------------------------------------------------------

    @property
    def feed_wire(self) -> str:
        """The number format in which the first hop gets embedded tokens; empty: the asker's own."""
        return (self.wires or {}).get(self.route[0].span.start, "")

    def took_at(self) -> dict[str, float]:
        """Return when streams to hops last took something that had waited, up to the latest rows of this session.

        Of the hops that get rows from this asker. Later times would excuse a hop that denies rows which it has.
        """
        relayed = {peer for _, peer in self._ordered}
        fed = [hop.peer for index, hop in enumerate(self.route) if not index or hop.peer in relayed]
        for peer in fed:
            if peer in self._open and self._open[peer].outbox.waiting_for(self._owner):
                self._took_at[peer] = self._open[peer].outbox.took_at
        return {peer: self._took_at[peer] for peer in fed if peer in self._took_at}

    def has_room(self) -> bool:
        """True if the first hop has taken most of what was sent to it.

        The stream is shared by all sessions, and would be closed if a long prompt waited in it as a whole. What others
        sent may fill it again and again: a session of which nothing waits has more room, and so its turn.
        """
        outbox = self._open[self.route[0].peer].outbox
        most = FEED_AHEAD_BYTES if outbox.waiting_for(self._owner) else FEED_TOGETHER_BYTES
        return outbox.waiting_bytes <= most or outbox.broken

    def check_room(self, since: float) -> None:
        """Let a first hop without room be `trouble` if it has taken nothing for long, and not since then."""
        hop, quiet_s = self.route[0].peer, longest_quiet_s(self._row_bytes, self._settings.stuck_s)
        if not self.has_room() and trio.current_time() - max(since, self._open[hop].outbox.took_at) > quiet_s:
            self.trouble = HopFailed(hop, because("hop_stuck", "it does not read what is sent to it", hop))

    async def feed(self, position: int, rows: int, data: bytes) -> None:
        """Send embedded tokens to the first hop, in the format `feed_wire`."""
        dtype = DTYPES[self.feed_wire] if self.feed_wire else self._dtype
        await self._send_data(self.route[0].peer, position, rows, dtype, data)

    async def _send_data(self, peer: str, position: int, rows: int, dtype: int, data: bytes) -> None:
        width = self._shape.width
        head = header(
            Kind.DATA,
            self.id,
            self.epoch,
            position,
            dtype=dtype,
            rows=rows,
            width=width,
            length=len(data),
            revision=self.revision,
        )
        priority = Priority.DECODE if position >= self.urgent_from else Priority.PREFILL
        link = self._open[peer]
        await link.send(head, data, priority=priority, owner=self._owner)
        self._took_at[peer] = link.outbox.took_at

    async def ask_paces(self) -> None:
        """Ask every hop how long this session's tokens take there, without waiting for the answers."""
        for hop in self.route:
            await self._open[hop.peer].send(plain(Kind.PACE, self.id, self.epoch))

    async def settle(self, within_s: float) -> None:
        """Wait for the answer or a failure, `within_s` at most."""
        with trio.move_on_after(within_s):
            await self._heard.wait_for(lambda: self.answer is not None or self.trouble is not None)

    def probe_s(self, rows: int = 1) -> float:
        """Seconds in which every hop must say how far it is while so many rows are under way: a prompt fills links."""
        crowded_s = min(PROBE_ROUND_TRIPS * self._links.round_trip_s(self.route), LONGEST_PROBE_S)
        return max(self._settings.probe_s * (PROMPT_PATIENCE if rows > PROMPT_ROWS else 1), crowded_s)

    async def probe(self, patience_s: float) -> None:
        """Ask every hop how far it is, and wait for all their states, the answer or a failure, `patience_s` at most."""
        self.states.clear()
        for hop in self.route:
            await self._open[hop.peer].send(plain(Kind.PROBE, self.id, self.epoch, self._wanted.stop))
        with trio.move_on_after(patience_s):
            while self.answer is None and self.trouble is None and len(self.states) < len(self.route):
                await self._heard.wait()

    async def reach(self, route: Route) -> None:
        """Open the links that a route needs; raises `HopFailed`, or `SessionLost` if this node has left the swarm."""
        if self._links.is_closed:
            raise SessionLost(LEFT)
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
        """Raise the first of several failures; report the others to the route source here."""
        for failure in failures[1:]:
            self._guide.failed(failure.peer, failure.why, busy=failure.busy)
        if failures:
            raise failures[0]

    async def order_handovers(self, sources: Mapping[str, str], tokens: int) -> dict[str, CacheGrant]:
        """Tell hops that leave the route who may fetch their cache; returns what the new hops are to be told."""
        grants: dict[str, CacheGrant] = {}
        for peer, source in sources.items():
            link = self._open.get(source)
            if (peer, source) in self._sources or source not in self._givers or link is None or link.outbox.broken:
                continue
            self._sources.add((peer, source))
            grants[peer] = CacheGrant(source, tokens)
            await link.send(encode_give(self.id, self.epoch, CacheGrant(peer, tokens)))
        return grants

    async def turn(
        self, cuts: Sequence[int], known: ResumePlan | None, caches: Mapping[str, CacheGrant]
    ) -> list[HopState]:
        """Begin an epoch at every hop and return what each of them holds; raises `HopFailed`.

        New hops first fetch the caches that they are told of.
        """
        self.epoch, self.revision = self.epoch + 1, 0
        self._epoch_route, self._ordered = self.route, frozenset(self._relayed)
        self.wires = self._guide.wires(self.route, self.wires)
        self._ready.clear()
        self._ready_at.clear()
        self._turned_at, self._fetching = trio.current_time(), set(caches)
        self._forwarded = self._first_outputs(known)
        self.trouble = None
        for hop in self.route:  # one may have been lost while another was dialled
            if self._open[hop.peer].outbox.broken:
                raise _lost(hop.peer)
            self._drop_waiting(self._open[hop.peer])
        peers = ["", *(hop.peer for hop in self.route), ""]
        for index, hop in enumerate(self.route):
            predecessor, successor = peers[index], peers[index + 2]
            send_from = known.send_from[index] if known is not None else None
            relay = (hop.peer, successor) in self._ordered
            if (predecessor, hop.peer) in self._ordered:
                predecessor = ""
            turn = EpochOrder(
                hop.span,
                predecessor,
                successor,
                self._shape.tokens,
                self.urgent_from,
                send_from,
                relay,
                self.wires.get(hop.span.stop, ""),
                adapter=self._shape.adapter,
            )
            if self.prefix is not None and hop in self.prefix.route:
                turn = replace(turn, prefix=self.prefix.wire)
            turn = replace(turn, cache=caches.get(hop.peer))
            self.cached[hop.peer] = min(self.cached.get(hop.peer, 0), cuts[index])
            await self._open[hop.peer].send(encode_turn(self.id, self.epoch, cuts[index], turn))
        silent = await self._wait_ready(self._fetching)
        if self.trouble is not None:
            raise self.trouble
        if self._shape.adapter is not None:
            for peer in silent:
                self._guide.lacks_adapter(peer)
        late = "it did not open the session in time"
        self._raise_first([HopFailed(peer, because("hop_unopened", late, peer)) for peer in silent])
        return [self._ready[hop.peer] for hop in self.route]

    @property
    def unready(self) -> Collection[str]:
        """The hops that have not begun the present epoch."""
        return {hop.peer for hop in self._epoch_route} - self._ready.keys()

    def opening_s(self, now: float) -> dict[str, float]:
        """Return how long each hop took to begin the present epoch, beside the round trip to it, or takes up to now.

        Not of hops that had to fetch something before.
        """
        hops = () if self._shape.adapter is not None else self._epoch_route
        return {
            hop.peer: max(self._ready_at.get(hop.peer, now) - self._turned_at - self._links.round_trip_s((hop,)), 0.0)
            for hop in hops
            if hop.peer not in self._fetching
        }

    async def _wait_ready(self, fetching: Collection[str]) -> Sequence[str]:
        """Wait until all hops are ready or one has failed, and return those that took too long.

        A hop that answers probes has `stuck_s` more than `ready_s`: it may be in a step of a prompt, and begins a
        session between two of them. It has less if others can take its place, and more if it fetches a cache or an
        adapter.
        """

        def is_settled() -> bool:
            return self.trouble is not None or len(self._ready) == len(self.route)

        settings, adapted = self._settings, self._shape.adapter is not None
        longer_s = max(settings.stuck_s, HANDOVER_S if fetching else 0.0) + (settings.adapter_s if adapted else 0.0)
        until = trio.current_time() + settings.ready_s + longer_s
        look_at = trio.current_time() + settings.ready_s + (settings.stuck_s if adapted else 0.0)
        with trio.move_on_after(settings.ready_s):
            await self._heard.wait_for(is_settled)
        while not is_settled() and trio.current_time() < until:
            missing = {hop.peer for hop in self.route} - set(self._ready)
            self.states.clear()
            for peer in missing:
                await self._open[peer].send(plain(Kind.PROBE, self.id, self.epoch))
            with trio.move_on_after(self.probe_s()):
                await self._heard.wait_for(is_settled)
            # A hop that has not begun the epoch tells another one, or none: that it answers is what counts.
            if unheard := missing - set(self.states) - set(self._ready):
                return sorted(unheard)
            if not is_settled() and trio.current_time() >= look_at:
                look_at = trio.current_time() + LOOK_FOR_OTHERS_S
                for hop in self.route:
                    may_wait = hop.peer in self._ready or (hop.peer in fetching and not adapted)
                    if not may_wait and await self._is_replaceable(hop.peer):
                        self._leave_late(hop.peer)
        return [hop.peer for hop in self.route if hop.peer not in self._ready]

    async def _is_replaceable(self, peer: str) -> bool:
        """True if a hop that is late to begin can be replaced by one that may be sooner."""
        avoid = {peer, *self.leaving, *self.unable, *self._late, *self._guide.without_adapter()}
        try:
            await self._guide.route(self.route, sorted(avoid))
        except NoRoute:
            return False
        return peer not in self._ready

    def _first_outputs(self, plan: ResumePlan | None) -> dict[str, int]:
        """The position from which each hop must send outputs; without a plan it must send nothing yet."""
        first = plan.send_from if plan is not None else [MAX_TOKENS] * len(self.route)
        return {hop.peer: position for hop, position in zip(self.route, first, strict=True)}

    async def go(self, plan: ResumePlan) -> None:
        """Tell every hop from which position on its successor needs outputs."""
        self._forwarded = self._first_outputs(plan)
        for hop, send_from in zip(self.route, plan.send_from, strict=True):
            await self._open[hop.peer].send(plain(Kind.GO, self.id, self.epoch, send_from))

    async def leave_others(self) -> None:
        """Close the session at hops that are not on the route."""
        staying = {hop.peer for hop in self.route}
        for peer in [peer for peer in self._open if peer not in staying]:
            await self._leave(peer)

    async def let_go(self) -> None:
        """Close the session at the hops that are leaving."""
        for peer in [peer for peer in self._open if peer in self.leaving]:
            await self._leave(peer)
            self.leaving.discard(peer)

    async def close(self, rest_s: int = 0, rest_at: Route = ()) -> None:
        """Close the session at all hops; those of `rest_at` may keep its cache for `rest_s` seconds."""
        resting = {hop.peer for hop in rest_at}
        for peer in list(self._open):
            await self._leave(peer, rest_s if peer in resting else 0)

    async def _leave(self, peer: str, rest_s: int = 0) -> None:
        link = self._open.pop(peer, None)
        if link is None:
            return  # its stream ended while another hop was told
        self.cached.pop(peer, None)
        link.listeners.pop(self.id, None)
        self._drop_waiting(link)
        await link.send(plain(Kind.CLOSE, self.id, self.epoch, rows=rest_s))

    def _drop_waiting(self, link: HopLink) -> None:
        """Forget rows that wait for a hop's stream: the hop would drop them, and others wait behind them."""
        link.outbox.drop(self._owner)


_SMOOTHING = 0.2
LOOK_AGAIN_S = 1.0
LOOK_FOR_OTHERS_S = 5.0  # between two looks for hops that would be faster than one that is late
PACE_EVERY = 16  # tokens between two questions to the hops about their speed
WAIT_FOR_HOLDER_S = 0.2  # between two looks for a member that serves a missing block
REFUSED_ROUTE_S = 3.0  # to wait for a first route where members serve every block but have no room or no permission
REPORT_AFTER_S = 1.0  # a shorter wait for a missing block is not worth a message
MIN_OVERDUE_S = 1.0  # an answer is overdue after this, or after `OVERDUE_TIMES` the average step, if that is longer,
LONGEST_OVERDUE_S = 10.0  # but no later: hops decide how long steps take
UNCOMPUTED_BYTES = 2**26  # of a prompt's rows that are sent before all hops have computed what came before
LOOK_AT_HOPS_S = 0.1  # between two questions whether they have
_ROUNDS = 3  # epochs until hops and plan agree
_EXCUSES = 3  # failures that are not held against a hop; they are forgotten
_FORGOTTEN_AFTER = 16  # after so many answers in a row without any, which take as long as all failures did, or
_LEAST_TOKENS = 16  # among which lost seconds are divided, at least
_OWN_PAUSE_S = 30.0  # if this asker had no token for so long: hops close what is not used
_PAUSE_S = 0.1  # after the second, doubled each time, up to
_LONGEST_PAUSE_S = 0.8


def overdue_s(step_s: float) -> float:
    """Seconds after which a step that takes `step_s` on average counts as late."""
    return min(max(MIN_OVERDUE_S, OVERDUE_TIMES * step_s), LONGEST_OVERDUE_S)


class SessionLost(AppError):
    """The session cannot go on; the message says why."""

    code = "session_lost"


class RouteSession:
    """One sequence of tokens over a route; `close` must be awaited at its end, whatever happened."""

    def __init__(
        self,
        links: HopLinks,
        guide: RouteSource,
        embed: Callable[[Sequence[int], str], Awaitable[bytes]],
        shape: SessionShape,
        settings: SessionSettings,
        prefix: CachedPrefix | None = None,
        own_node: OwnNode | None = None,
    ) -> None:
        self._hops = RouteHops(links, guide, shape, settings, prefix)
        self._guide, self._embed, self._settings = guide, embed, settings
        self._repair_s = settings.repair_s + (settings.adapter_s if shape.adapter is not None else 0.0)
        self._own_node = own_node or OwnNode()
        self._loading_seen, self._loading_at = self._own_node.loading(), 0.0  # when it grew while this session waited
        self._row_bytes = row_bytes(DTYPES[shape.dtype], shape.width)
        self._history = packed(())
        self._settled: Route = ()  # the last one that worked
        # All that were set up, each once: what hops of earlier ones computed may be in the caches of later ones.
        self.routes: list[Route] = []
        self._first: Route = ()  # found by `missing_block` and not used yet
        self._begun_at = trio.current_time()
        self._reported: tuple[int, bool] | None = None  # what `missing_block` returned last: block, loading here
        self._flowing = False  # the route is set up and has been fed all tokens
        self._step_s = Ewma(_SMOOTHING)  # a single token through all hops
        self._steps, self._steps_s = 0, 0.0  # single tokens over the settled route, and their seconds
        self._lost = LostSeconds()
        self._opened_at = 0.0  # when all hops had begun the present epoch
        self._hop_of: dict[str, Hop] = {}  # all that this session has asked
        self._excuses: dict[str, int] = {}  # failures of each hop that are not forgotten yet
        self._smooth_answers, self._smooth_s = 0, 0.0  # in a row, and their seconds
        self._unsound: set[str] = set()  # hops that failed: no other goes on with their cache
        self._failed: set[str] = set()  # those of them that failed since the last answer
        self._cut_to = KEEP  # hops may still cache other tokens from this position on
        self._believed: Mapping[str, ReadingPace] = {}  # of the route's hops, when it was proposed
        self._progress: HopProgress | None = None  # while an answer is late
        self._look_at_hops_at = self._look_for_others_at = 0.0
        self._look_again_at = 0.0  # for hops that could replace those that are leaving
        self._links = links
        self._recheck = RerouteTimer(trio.current_time())
        self._better: Route = ()  # to be taken once its links are open
        self._better_until = 0.0
        self.own_s = 0.0  # of the last token's time: sending it, and coming back to the answer
        self.recoveries = 0
        self.moves = 0  # to better routes while nothing was wrong
        self._advancing: trio.CancelScope | None = None  # while tokens are under way
        self._ended: AppError | None = None
        self._prompt_tokens = 0  # answered first
        self.answered = 0  # tokens that all hops of the route have cached: an answer came back for them
        self.first_answer = trio.Event()  # also set when the session is closed
        self.first_is_late = trio.Event()  # also set by the first answer
        self.reused = 0  # tokens that every hop had cached when the session began
        self.prompt_fed_at = 0.0  # when the first route was open and the prompt began to go through it
        self.reached: int | None = (
            None  # tokens that went through all blocks, as the last hop said while it was awaited
        )

    @property
    def id(self) -> bytes:
        """The session's id, random and the same at all hops."""
        return self._hops.id

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self._hops.epoch

    @property
    def tokens(self) -> array[int]:
        """The tokens that were fed and not dropped."""
        return self._history

    @property
    def first_route_s(self) -> float:
        """Seconds that this session waits for its first route, at most."""
        return self._settings.first_route_s

    @property
    def route(self) -> Route:
        """The hops in use."""
        return self._hops.route

    @property
    def wires(self) -> Wires:
        """The number formats of rows at the boundaries between blocks where they are not the sender's own."""
        return self._hops.wires or {}

    @property
    def paces(self) -> Mapping[str, HopPace]:
        """The usual times of a token at each hop that reported them."""
        return self._hops.paces

    @property
    def next_step(self) -> NextStep | None:
        """The step that the next token will be, if this node's own blocks are the first hop and nothing is wrong."""
        hops = self._hops
        if not self._flowing or hops.trouble is not None or hops.leaving or self._better or self._cut_to != KEEP:
            return None
        if self.route[0].peer != self._links.peer_id or hops.feed_wire:
            return None
        return NextStep(self.id, len(self._history), len(self.route) == 1 and not self.wires)

    @property
    def blamed(self) -> frozenset[str]:
        """The hops that may have caused the failure of the present tokens, if there was any."""
        return frozenset(self._lost.causers)

    async def missing_block(self) -> NoRoute | None:
        """Wait for the first route, and return early with a block that nobody serves, so that the user can be told.

        Call it until it returns None: there is a route then, or `first_route_s` are over, since the beginning or since
        this node last got on with loading the block, and `advance` will raise. A block is returned once, or twice if
        this node begins to load it, and only after `REPORT_AFTER_S`.
        """
        while not self._settled:
            try:
                self._first = await self._find_route()
                return None
            except NoRoute as error:
                if self._is_over(error, self._begun_at):
                    return None
                waited_s = trio.current_time() - self._begun_at
                found = (error.block, error.loading_here)
                if error.is_hole and waited_s >= REPORT_AFTER_S and found != self._reported:
                    self._reported = found
                    return error
            await trio.sleep(WAIT_FOR_HOLDER_S)
        return None

    def _is_over(self, error: NoRoute, begin: float) -> bool:
        """True if a wait for a route since `begin` is too long; not while this node gets on with loading the block."""
        now = trio.current_time()
        if error.loading_here and self._loading_seen != (seen := self._own_node.loading()):
            self._loading_seen, self._loading_at = seen, now
        return now - max(begin, self._loading_at) > self._patience_s(error)

    def _patience_s(self, error: NoRoute) -> float:
        """Seconds to wait for a route: long where a member may still come, short where those that came refuse."""
        if self._settled or error.loading_here or (error.busy and self._own_node.makes_room()):
            return self._settings.new_route_s
        if error.is_too_large:
            return 0.0
        longest_s = self._settings.first_route_s
        return longest_s if error.is_hole else min(longest_s, REFUSED_ROUTE_S)

    async def advance(
        self, token_ids: Sequence[int], embedded: bytes | None = None, guesses: Sequence[int] = ()
    ) -> Frame:
        """Feed the next tokens and return a frame with the last block's output for the last of them.

        Guesses go with them, at the positions that follow; the frame then has their outputs too, one row each, unless
        the route had to be repaired, which drops them. Guesses that turn out wrong are to be cut.

        Repairs the route as often as needed. Raises `NoRoute` or `SessionLost` if the swarm cannot carry the session,
        and what it was ended with.
        """
        if self._ended is None:
            with trio.CancelScope() as self._advancing:
                frame = await self._advance(token_ids, embedded, guesses)
            self._advancing = None
            if self._ended is None:
                return frame
        await self.close()
        raise self._ended

    async def end(self, why: AppError) -> None:
        """Close the session at all hops, before its user does; `advance` raises `why` from now on."""
        self._ended = why
        if self._advancing is None:
            await self.close()
        else:
            self._advancing.cancel()

    async def _advance(self, token_ids: Sequence[int], embedded: bytes | None, guesses: Sequence[int]) -> Frame:
        first, hops = len(self._history), self._hops
        known = first + len(token_ids)
        self._history.extend(token_ids)
        self.reached = self._progress = None
        hops.want(known - 1, known)
        if self._cut_to != KEEP and not hops.can_revise:
            self._flowing = False
        begin = trio.current_time()
        self._lost.begin(begin)
        if begin > hops.answered_at + _OWN_PAUSE_S:
            self._excuses.clear()
        if hops.leaving and await self._can_leave():
            self._flowing = False
        if self._flowing and hops.trouble is None and self._finds_better():
            await self._move()
            smooth = False
        else:
            smooth = self._flowing and hops.trouble is None
        fed_at = begin
        if smooth:
            if self._cut_to != KEEP:
                hops.revise(first)
            if guesses and hops.know_revisions:
                self._history.extend(guesses)
                hops.want(known - 1, len(self._history))
                embedded = None
            await self._feed(first, embedded)
            fed_at = trio.current_time()
            if first // PACE_EVERY < len(self._history) // PACE_EVERY:
                await hops.ask_paces()
        for _ in range(self._settings.attempts_without_progress):
            if hops.trouble is not None or not self._flowing:
                smooth = False
                if len(self._history) > known:
                    self.cut(known)
                    hops.want(known - 1, known)
                await self._repair()
            answer = await self._wait_answer()
            if answer is not None:
                self._cut_to = KEEP  # it passed all hops, and so did the cut
                if not smooth:
                    self._failed.clear()
                    for hop in self.route:
                        self._guide.worked(hop.peer)
                self._note_times(begin, len(self._history) - first, smooth=smooth)
                if smooth:
                    self.own_s = fed_at - begin + trio.current_time() - hops.answered_at
                self.answered = first + len(token_ids)  # guesses may be wrong
                hops.cached = {hop.peer: self.answered for hop in self.route}
                self._progress = None
                self._note_first_answer()
                return answer
        raise SessionLost("the route failed again and again without a single token; try again later")

    def _note_times(self, begin: float, rows: int, *, smooth: bool) -> None:
        """Learn from an answer to what was sent at `begin`: so many rows, of which all but the first are guesses."""
        now = trio.current_time()
        took_s = now - begin
        if self.first_answer.is_set() and rows == 1:
            self._recheck.took(took_s, now)
        if smooth and rows == 1:
            self._step_s.add(took_s)
            self._steps, self._steps_s = self._steps + 1, self._steps_s + took_s
        elif smooth and self._steps:  # rows take no longer together than one by one
            self._steps_s += max(took_s - rows * self._step_s.value, 0.0)
        self._lost.answered(*self._until(now))
        self._smooth_answers = self._smooth_answers + 1 if smooth else 0
        self._smooth_s = self._smooth_s + took_s if smooth else 0.0
        if self._smooth_answers >= _FORGOTTEN_AFTER and self._smooth_s >= self._lost.total_s:
            self._excuses.clear()

    def _until(self, now: float) -> tuple[float, float]:
        """Return the end of the time that the present tokens may have lost, and what they usually take of it.

        Nobody knows how long a prompt usually takes, but all time before its last epoch was of no use.
        """
        if self._hops.unready:
            return now, MIN_OVERDUE_S
        return (now, self._step_s.value) if self.first_answer.is_set() else (self._opened_at, MIN_OVERDUE_S)

    def times(self) -> RunningRoute:
        """Return what a token took over the route in use, and what each hop may have cost besides."""
        token_s = self._steps_s / self._steps if self._steps else None
        return RunningRoute(self._settled, token_s, len(self._history), self._lost_per_token())

    def _lost_per_token(self) -> dict[Hop, float]:
        tokens = max(self.answered - self._prompt_tokens, _LEAST_TOKENS)
        lost = self._lost.so_far(*self._until(trio.current_time()), self._hops.unready)
        return {self._hop_of[peer]: seconds / tokens for peer, seconds in lost.items() if seconds > 0}

    def cut(self, length: int) -> None:
        """Drop the tokens from position `length` on; the hops learn it with the next tokens."""
        assert 0 <= length <= len(self._history), "only tokens that were fed can be dropped"
        del self._history[length:]
        self.answered = min(self.answered, length)
        self._cut_to = min(self._cut_to, length)

    def cached(self) -> tuple[Route, array[int]]:
        """The route that worked last, and the tokens that its hops are known to have cached by now.

        Until one has worked, that is the one of the prefix. Hops that failed or were let go do not count: another hop
        takes the place of one, and what the others have is as good without it.
        """
        route, hops = self._latest_route(), self._hops
        known = [hops.cached[hop.peer] for hop in self._sound(route) if hop.peer in hops.cached]
        return route, self._history[: min(*known, self._cut_to) if known else 0]

    def _latest_route(self) -> Route:
        prefix = self._hops.prefix
        return self._settled or (prefix.route if prefix is not None else ())

    def _sound(self, route: Route) -> Route:
        """The hops of a route that have not failed since the last answer."""
        trouble = self._hops.trouble
        failed = self._failed | ({trouble.peer} if trouble is not None else set())
        return tuple(hop for hop in route if hop.peer not in failed)

    async def close(self, rest_s: int = 0) -> None:
        """Close the session at all hops, without waiting for them; sound ones may keep its cache for `rest_s` seconds.

        Those of the route that worked last, as in `cached`.
        """
        self._note_first_answer()
        self._note_given_up()
        self._flowing = False
        with trio.CancelScope(shield=True):
            await self._hops.close(rest_s, self._sound(self._latest_route()))

    # --- feeding and waiting ------------------------------------------------------------------------------------------

    async def _feed(self, first: int, embedded: bytes | None = None) -> None:
        """Send tokens from position `first` on to the first hop, in chunks; what waits at a hop takes its memory."""
        hops, epoch, begin = self._hops, self._hops.epoch, trio.current_time()
        ahead = max(self._settings.chunk_rows, UNCOMPUTED_BYTES // self._row_bytes)
        self._look_at_hops_at = begin + MIN_OVERDUE_S
        for start in range(first, len(self._history), self._settings.chunk_rows):
            await self._wait_to_feed(begin, start, start - ahead if start - first >= ahead else 0)
            chunk = self._history[start : start + self._settings.chunk_rows]
            is_given = embedded is not None and len(chunk) == len(self._history) - first and not hops.feed_wire
            data = embedded if is_given else None
            if data is None:
                data = await self._embed(chunk.tolist(), hops.feed_wire)
            if hops.trouble is not None or epoch != hops.epoch:
                return
            await hops.feed(start, len(chunk), data)

    async def _wait_to_feed(self, begin: float, fed: int, computed: int) -> None:
        """Wait until the first hop has room and all hops have cached so many of the `fed` tokens, or one is in trouble.

        The hops are followed meanwhile, since `begin`, as they are while an answer is late: a client may give up before
        all of a prompt was sent.
        """
        hops, full_since = self._hops, trio.current_time()
        while hops.trouble is None and (computed or not hops.has_room()):
            now = trio.current_time()
            if hops.has_room():
                full_since = now
            hops.check_room(full_since)
            if computed or now >= self._look_at_hops_at:
                progress = self._progress
                if progress is None or progress.epoch != hops.epoch:
                    progress = self._follow_hops(begin)
                await self._ask_hops()
                if not all(state.position >= fed for state in hops.states.values()):
                    await self._find_loss(progress, fed)
                if all(state.position >= computed for state in hops.states.values()):
                    computed = 0
                self._look_at_hops_at = trio.current_time() + MIN_OVERDUE_S
            await hops.settle(LOOK_AT_HOPS_S if computed else _LOOK_FOR_ROOM_S)

    async def _wait_answer(self) -> Frame | None:
        """Wait for the answer; None if the route needs repair."""
        hops = self._hops
        progress: HopProgress | None = None
        begin = trio.current_time()
        while True:
            await hops.settle(overdue_s(self._step_s.value))
            if hops.answer is None and hops.trouble is None:
                progress = progress or self._follow_hops(begin)
                await self._ask_hops()
                await self._find_loss(progress, len(self._history))
            if hops.answer is not None:
                return hops.answer
            if hops.trouble is not None:
                return None

    async def _ask_hops(self) -> None:
        """Ask all hops how far they are; one that is silent becomes `hops.trouble`."""
        hops = self._hops
        patience_s = hops.probe_s(len(self._history) - self.answered)
        await hops.probe(patience_s)
        if hops.answer is not None or hops.trouble is not None:
            return
        last = hops.states.get(hops.route[-1].peer)
        if last is not None and last.epoch == hops.epoch:
            self.reached = min(last.position, len(self._history))
        for hop in hops.route:
            if hop.peer not in hops.states:
                why = because("hop_silent", f"it has not answered for {patience_s:.0f} s", hop.peer)
                self._guide.failed(hop.peer, why, busy=False)
                self._lost.failed((hop.peer,))
                hops.trouble = HopFailed(hop.peer, why, blameless=True)  # reported above, as others may be

    def _follow_hops(self, begin: float | None = None) -> HopProgress:
        """Follow the progress of the hops with the tokens under way since `begin`, or from now on.

        What they were waited for before counts too; not the time in which this asker was busy with sending.
        """
        begin = trio.current_time() if begin is None else begin
        hops, tokens = self._hops, len(self._history)
        if self._progress is None:
            self._progress = HopProgress(self._row_bytes, self._settings.stuck_s)
        if self._progress.epoch != hops.epoch:
            unread = {hop.peer: max(tokens - hops.cached.get(hop.peer, 0), 1) for hop in hops.route}
            self._progress.begin(hops.epoch, hops.route, unread, self._believed, begin)
        self._progress.resume(begin)
        return self._progress

    async def _find_loss(self, progress: HopProgress, fed: int) -> None:
        """Find out why no answer to the `fed` tokens comes: what a link lost, or a late hop, becomes `hops.trouble`."""
        hops, now = self._hops, trio.current_time()
        if hops.answer is not None or hops.trouble is not None:
            return
        loss = progress.loss(hops.route, hops.states, fed, now, hops.took_at())
        if loss is not None:
            hops.trouble = hops.blame_for(loss)
        elif progress.late:
            self.first_is_late.set()
            if now >= self._look_for_others_at:
                self._look_for_others_at = now + LOOK_FOR_OTHERS_S
                await self._leave_if_outdone(progress.late)

    async def _leave_if_outdone(self, peer: str) -> None:
        """Count a late hop as failed if others are faster, by what it was waited for; else leaving it helps nobody."""
        hops, hop = self._hops, self._note_wait_for(peer)
        if hop is None or await self._guide.would_use(hop, sorted({*hops.leaving, *hops.unable})):
            return
        if hops.answer is None and hops.trouble is None:
            hops.trouble = HopFailed(peer, because("hop_stuck", "it takes far longer than it was believed to", peer))

    def _note_wait_for(self, peer: str) -> Hop | None:
        """Report a hop, and return it, if the present answer was waited for it much longer than was believed."""
        overdue = [] if self._progress is None else self._progress.overdue()
        for late in overdue:
            if late.hop.peer == peer:
                self._guide.waited(late.hop, late.unread, late.waited_s)
                return late.hop
        return None

    def _note_given_up(self) -> None:
        """Report all such hops: nobody will find out which of them is at fault, but the next reply can avoid them."""
        progress, self._progress = self._progress, None
        for late in [] if progress is None else progress.overdue(links=True):
            self._guide.waited(late.hop, late.unread, late.waited_s, given_up=True)

    def _note_first_answer(self) -> None:
        self._prompt_tokens = self._prompt_tokens or self.answered
        self.first_answer.set()
        self.first_is_late.set()

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _repair(self) -> None:
        """Set up a route on which all tokens so far are cached or under way.

        Raises `NoRoute` after `first_route_s` or `new_route_s` without one, and `SessionLost` if routes failed for
        `repair_s`, or `adapter_s` longer where hops fetch an adapter. While there is no route, hops that are leaving
        are let go: they could not carry the session on, and one may have to unload these blocks to host others.
        """
        hops = self._hops
        begin = trio.current_time() if self._settled else self._begun_at
        wait_s = self._settings.new_route_s if self._settled else self._settings.first_route_s
        tried_at: float | None = None  # the first route
        if hops.trouble is not None:
            self._note_wait_for(hops.trouble.peer)
        self.recoveries += bool(self._settled) and hops.trouble is not None
        self._better = ()
        while True:
            await trio.sleep(self._note_failure())
            try:
                route = await self._next_route()
                tried_at = trio.current_time() if tried_at is None else tried_at
                await self._set_up(route, hops.leaving - self._unsound)
                return
            except NoRoute as error:
                if self._is_over(error, begin):
                    raise
                hops.trouble = None
                await hops.let_go()
                await trio.sleep(WAIT_FOR_HOLDER_S)
            except HopFailed as failure:
                hops.trouble = failure
                # A hop that died is tried again now and then, which must not end a wait for this node's own blocks.
                assert tried_at is not None, "a hop failed on a route"
                if trio.current_time() - max(tried_at, self._loading_at) > max(wait_s, self._repair_s):
                    self._note_failure()
                    raise SessionLost(f"no route worked for {self._repair_s:g} s: {failure}") from failure

    async def _next_route(self) -> Route:
        """Return a route; raises `NoRoute` with the reasons why peers cannot serve the session's adapter, if any."""
        first, self._first = self._first, ()
        try:
            return first or await self._find_route()
        except NoRoute as error:
            raise self._explained(error) from None

    async def _find_route(self) -> Route:
        """Return a route without hops that are leaving or lack the adapter, or with them if there is no other yet."""
        hops, late = self._hops, {*self._guide.without_adapter(), *self._hops.leaving}
        for left_out in dict.fromkeys(map(frozenset, (late, hops.leaving, ()))):
            try:
                return await self._guide.route(self._settled, sorted(left_out | hops.unable.keys()))
            except NoRoute:
                if not left_out:
                    raise
        raise AssertionError("the last attempt leaves nobody out")

    def _explained(self, error: NoRoute) -> NoRoute:
        """Return the error with the reasons why peers cannot serve the session's adapter, if there are any."""
        unable = self._hops.unable
        if not unable:
            return error
        reasons = "; ".join(f"{peer} ({why.text})" for peer, why in unable.items())
        return NoRoute(
            error.block,
            f" with the adapter: {reasons}",
            who="no usable peer",
            code="no_adapter_route",
            peers=unable,
        )

    async def _can_leave(self) -> bool:
        """True if hops of the route are leaving and others could take over; looked up once a second at most."""
        now, leaving = trio.current_time(), self._hops.leaving
        if now < self._look_again_at or not any(hop.peer in leaving for hop in self.route):
            return False
        self._look_again_at = now + LOOK_AGAIN_S
        try:
            await self._guide.route(self._settled, sorted({*leaving, *self._hops.unable}))
        except NoRoute:
            return False
        return True

    def _finds_better(self) -> bool:
        """True if a better route was found earlier and its links are open by now; looks for one now and then."""
        now = trio.current_time()
        if self._better:
            if all(self._links.is_open(hop.peer) for hop in self._better):
                return True
            if now >= self._better_until:
                self._better = ()
        elif self._step_s and self._recheck.is_due(now):
            running = replace(self.times(), token_s=self._step_s.value)
            self._links.in_background("looking for a better route", partial(self._look_for_better, running))
        return False

    async def _look_for_better(self, running: RunningRoute) -> None:
        """Search for a better route and begin to open its links, while tokens go on over the present one."""
        better = await self._guide.better(running) or ()
        unable = {*self._hops.unable, *self._guide.without_adapter()}
        if self.route != running.route or not self._flowing or any(hop.peer in unable for hop in better):
            return
        self._better, self._better_until = better, trio.current_time() + self._settings.open_s
        for hop in better:
            self._links.prepare(hop.peer, timeout_s=self._settings.open_s)

    async def _move(self) -> None:
        """Move to the better route; if that fails, the next `advance` repairs the old one."""
        route, self._better = self._better, ()
        log.info("session %s: moves to a better route over %s", self.id.hex()[:8], ", ".join(hop.peer for hop in route))
        self._recheck.moved(trio.current_time())
        self._step_s = Ewma(_SMOOTHING)
        try:
            await self._set_up(route, {hop.peer for hop in self._settled} - self._unsound)
            self.moves += 1
        except HopFailed as failure:
            self._hops.trouble = failure
            self._note_failure()

    def _note_failure(self) -> float:
        """Report the present failure to the route source; returns how many seconds to pause before the next attempt.

        A failure that is not the hop's fault is excused `_EXCUSES` times: after that the hop is avoided like any other
        that does not work, whatever it says, and be it that it gives a token in between. All lost links together count
        as one failure of either end: others may have broken them, and rows go through this asker after the second time.
        """
        failure, self._hops.trouble = self._hops.trouble, None
        if failure is None:
            return 0.0
        self._lost.failed(failure.link or (failure.peer,))
        if failure.link is not None:
            log.info("session %s: the link from %s to %s: %s", self.id.hex()[:8], *failure.link, failure.why.text)
            self._guide.link_broke(*failure.link)
            self._excuses = dict.fromkeys(failure.link, 1) | self._excuses
            return 0.0
        times = self._excuses[failure.peer] = self._excuses.get(failure.peer, 0) + 1
        if failure.blameless and times <= _EXCUSES:
            log.info("session %s: %s is tried again: %s", self.id.hex()[:8], failure.peer, failure.why.text)
            return 0.0 if times == 1 else backoff_s(_PAUSE_S, times - 1, _LONGEST_PAUSE_S)
        self._unsound.add(failure.peer)
        self._failed.add(failure.peer)
        log.warning("session %s: %s failed: %s", self.id.hex()[:8], failure.peer, failure.why.text)
        self._guide.failed(failure.peer, failure.why, busy=failure.busy)
        return 0.0

    def _note_opening(self) -> None:
        """Count what hops took to begin an epoch; to begin a session, they may first end the step that they are in."""
        self._opened_at = trio.current_time()
        free_s = 0.0 if self._settled else MIN_OVERDUE_S
        opening_s = self._hops.opening_s(self._opened_at)
        self._lost.opened({peer: max(seconds - free_s, 0.0) for peer, seconds in opening_s.items()})

    async def _set_up(self, route: Route, givers: Collection[str]) -> None:
        """Begin an epoch on this route and get all tokens under way; raises `HopFailed`.

        Hops that take the place of `givers` begin with their cache, as far as it is sure to be that of these tokens.
        Hops of the old route are closed only when the new one works: they may be needed again until then.
        """
        hops, fed = self._hops, len(self._history)
        self._flowing = False
        self._hop_of |= {hop.peer: hop for hop in route}
        hops.urgent_from = 0 if self._settings.urgent else fed
        await hops.reach(route)
        # If every hop is new, it is known beforehand from which position each must send.
        fresh = not hops.epoch and hops.prefix is None
        known = plan_resume([HopState(0, 0)] * len(route), fed) if fresh else None
        cuts = [self._cut_to] * len(route)
        cached = min(fed - 1, self._cut_to)
        sources = cache_sources(self._settled, route, givers) if cached >= MIN_TOKENS else {}
        caches = await hops.order_handovers(sources, cached)
        for number in range(_ROUNDS):
            states = await hops.turn(cuts, known, caches)
            self._note_opening()
            caches = {}
            plan = plan_resume(states, fed)
            held = list(zip(route, states, plan.lengths, cuts, strict=True))
            to_cut = [hop.peer for hop, state, length, _ in held if state.length != length]
            if not to_cut:
                break
            # One that holds less than it was told makes its predecessors cut more, which is not their fault.
            wrong = [hop.peer for hop, state, _, told in held if number and state.length != told]
            cuts, known = list(plan.lengths), None
        else:
            peer = (wrong or to_cut)[0]
            why = because("hop_miscut", "it does not cut its cache as ordered", peer)
            raise HopFailed(peer, why, blameless=not wrong)
        if known is None:
            await hops.go(plan)
        if not self._settled:
            self.reused, self.prompt_fed_at = min(plan.lengths), trio.current_time()
        if route != self._settled:
            self._steps, self._steps_s = 0, 0.0
        self._flowing, self._cut_to, self._settled = True, KEEP, route
        self._believed = self._guide.paces(route)
        if route not in self.routes:
            self.routes.append(route)
        await self._feed(plan.feed_from)
        await hops.leave_others()
