"""Bounded outgoing queues: messages to a peer are sent at once if there is room, else as soon as there is.

More urgent messages overtake others on the link (`p2p.link.outbox`). Among equally urgent ones those for whom they are
take turns, by bytes (`app.core.turns`): one stream leads from a hop to the next for all askers, and a long prompt of
one of them must not hold up the tokens of another. So no more is given to a stream than leaves soon.

Knows streams and peers, not what the messages mean. A stream that breaks takes its unsent messages with it: the
protocol above repeats what matters.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

import trio

from app.core.network import FrameStream, Network, Priority
from app.core.signal import Signal
from app.core.turns import TurnQueue, Who
from p2p.errors import P2PError, QueueFull
from p2p.rate_limit import LogLimit, PeerRateLimit
from p2p.shares import Holder, Shares

log = logging.getLogger("shoal.sessions")
log.addFilter(LogLimit())  # peers can cause these lines

OPEN_TIMEOUT_S = 5.0
UNREACHABLE_S = 30.0  # a peer that could not be reached is not dialled again for so long
# A hop may compute a long prompt faster than its link carries it: 8192 tokens of 8192 numbers in 16 bits are 128 MiB.
MAX_WAITING_BYTES = 128 * 2**20  # for one peer, which may have many streams
MAX_WAITING_FRAMES = 16_384  # on one stream
MAX_WAITING_IN_ALL = 2**30
AHEAD_BYTES = 16 * 2**20  # of what is sent as fast as a stream takes it, on one stream
FRAME_COST_BYTES = 512  # of memory that a waiting frame takes besides its own bytes
MAX_DIALS = 32
MAX_DIALS_PER_ASKER = 4
# Beyond so many new successors of one asker, its outputs go through the asker: a dial may search the whole directory.
DIALS_BURST = 16.0
DIALS_PER_S = 0.5


class Sendable(Protocol):
    """One outgoing message; its sender may keep more beside what is sent."""

    @property
    def parts(self) -> tuple[bytes | memoryview, ...]: ...
    @property
    def priority(self) -> Priority: ...
    @property
    def owner(self) -> Who:
        """For whom it is sent, as `app.core.turns.TurnQueue` knows them."""

    @property
    def left(self) -> trio.Event | None:
        """Set once the stream has taken it, or it was dropped."""


class OutboundFrame(NamedTuple):
    """A message and its priority, for senders that need nothing beside them."""

    parts: tuple[bytes, ...]
    priority: Priority
    owner: Who = ("",)
    left: trio.Event | None = None


SendableT = TypeVar("SendableT", bound=Sendable)


class WaitingBytes:
    """Counts the memory of what waits for each peer, in bytes, over all the streams that share it."""

    def __init__(self) -> None:
        self._by_peer: Counter[str] = Counter()
        self._outboxes: weakref.WeakSet[PeerOutbox] = weakref.WeakSet()
        self._total = 0

    def count(self, outbox: PeerOutbox) -> None:
        """Let an outbox be among those that may have to make room."""
        self._outboxes.add(outbox)

    def to_relieve(self) -> PeerOutbox | None:
        """Return the fullest outbox of the peer for which most waits, if too many bytes wait in all.

        Not that of whoever comes next: peers that read nothing must not cost others their streams.
        """
        if self._total <= MAX_WAITING_IN_ALL:
            return None
        peer = max(self._by_peer, key=self._by_peer.__getitem__)
        own = (one for one in self._outboxes if one.stream.peer == peer)
        fullest = max(own, key=lambda one: one.waiting_bytes, default=None)
        return fullest if fullest is not None and fullest.waiting_bytes else None

    def add(self, peer: str, size: int) -> None:
        """Count bytes that wait for a peer, or, if negative, that wait no longer."""
        self._total += size
        self._by_peer[peer] += size
        if not self._by_peer[peer]:
            del self._by_peer[peer]

    def room_for(self, peer: str) -> int:
        """Return how many bytes more may wait for a peer."""
        return max(MAX_WAITING_BYTES - self._by_peer[peer], 0)

    def is_too_much(self, peer: str) -> bool:
        """True if too many bytes wait for this peer, or in all, and for this peer no fewer than for most."""
        own = self._by_peer[peer]
        is_hog = own * len(self._by_peer) >= self._total
        return own > MAX_WAITING_BYTES or (self._total > MAX_WAITING_IN_ALL and is_hog)


class _Backlog(Generic[SendableT]):
    """Messages to a peer that wait to be sent, and their bytes; those of one owner and priority are in order."""

    def __init__(self, peer: str, waiting: WaitingBytes) -> None:
        self._peer, self._waiting = peer, waiting
        self._queues: dict[Priority, TurnQueue[SendableT]] = {priority: TurnQueue() for priority in sorted(Priority)}
        self._frames = 0
        # Of an owner, and of all that it belongs to; of one priority, and (None) of all.
        self._bytes: Counter[tuple[Priority | None, Who]] = Counter()

    @property
    def bytes(self) -> int:
        """Bytes of all that waits."""
        return self.bytes_of(())

    @property
    def is_full(self) -> bool:
        """True if too many messages wait here, or too many bytes for this peer."""
        return self._frames > MAX_WAITING_FRAMES or self._waiting.is_too_much(self._peer)

    def bytes_of(self, owner: Who, priority: Priority | None = None) -> int:
        """Bytes of what waits for one owner and what belongs to it, of one priority or of all."""
        return self._bytes.get((priority, owner), 0)

    @property
    def most(self) -> Who:
        """The owner with the most bytes: of the home with the most, of its asker with the most, and so on."""
        sizes = {who: size for (priority, who), size in self._bytes.items() if priority is None}
        owner: Who = ()
        while inner := [who for who in sizes if who and who[:-1] == owner]:
            owner = max(inner, key=sizes.__getitem__)
        return owner

    def __iter__(self) -> Iterator[SendableT]:
        for queue in self._queues.values():
            yield from queue

    def has(self, priority: Priority) -> bool:
        """True if messages of this priority wait."""
        return bool(self._queues[priority])

    def append(self, frame: SendableT) -> None:
        """Add a message behind those of its owner."""
        self._queues[frame.priority].put(frame.owner, frame)
        self._count(frame, 1)

    def first(self, priority: Priority) -> SendableT | None:
        """Return the message of this priority that is to be sent next; None if none waits."""
        queue = self._queues[priority]
        return queue.first()[1] if queue else None

    def sent(self, frame: SendableT) -> None:
        """Remove a message, unless it was dropped meanwhile."""
        queue = self._queues[frame.priority]
        if queue.is_first(frame.owner, frame):
            queue.pop(frame.owner, _size_of(frame))
            self._count(frame, -1)
            _has_left(frame)

    def drop(self, owner: Who) -> None:
        """Forget the messages of an owner and of all that belongs to it."""
        for frame in self.take_all(owner):
            _has_left(frame)

    def take_all(self, owner: Who = ()) -> list[SendableT]:
        """Remove the messages of an owner, or all, and return them, the most urgent first."""
        taken = [frame for queue in self._queues.values() for frame in queue.drop(owner)]
        for frame in taken:
            self._count(frame, -1)
        return taken

    def _count(self, frame: SendableT, times: int) -> None:
        size = times * _size_of(frame)
        self._frames += times
        self._waiting.add(self._peer, size)
        for depth in range(len(frame.owner) + 1):
            for key in ((frame.priority, frame.owner[:depth]), (None, frame.owner[:depth])):
                self._bytes[key] += size
                if not self._bytes[key]:
                    del self._bytes[key]


class PeerOutbox:
    """Messages to one peer over one stream; a peer that does not read loses the stream.

    If homes share it (`is_shared`), what waits for the owner with most is dropped instead. `waiting` counts for this
    and other streams together.
    """

    def __init__(
        self,
        stream: FrameStream,
        nursery: trio.Nursery,
        *,
        waiting: WaitingBytes | None = None,
        is_shared: bool = False,
    ) -> None:
        self.stream = stream
        self._broken = False
        self._taken = Signal()  # the stream took a message, or broke
        self._nursery, self._is_shared = nursery, is_shared
        self._waiting = waiting or WaitingBytes()
        self._waiting.count(self)
        self._backlog: _Backlog[Sendable] = _Backlog(stream.peer, self._waiting)
        self._flushing: set[Priority] = set()
        self.used_at = trio.current_time()
        self.took_at = float("-inf")  # when the stream last had room for a message that had waited

    @property
    def broken(self) -> bool:
        """True once nothing can be sent any more."""
        return self._broken

    @broken.setter
    def broken(self, broken: bool) -> None:
        self._broken = broken
        self._taken.notify()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of messages for which the stream has no room yet."""
        return self._backlog.bytes

    def waiting_for(self, owner: Who, priority: Priority | None = None) -> int:
        """Bytes of those that are sent for one owner, of one priority or of all."""
        return self._backlog.bytes_of(owner, priority)

    async def push(self, frame: Sendable) -> None:
        """Send a message or queue it; never waits, and never raises what the network did."""
        self.used_at = trio.current_time()
        if self.broken or (not self._backlog.has(frame.priority) and await self._send(frame)):
            _has_left(frame)
            return
        self._backlog.append(frame)
        fullest = self._waiting.to_relieve()
        if fullest is not None:
            await fullest._make_room()
        if self._backlog.is_full and not self.broken:
            await self._make_room()
        if self.broken:
            self._backlog.drop(())
        elif frame.priority not in self._flushing:
            self._flushing.add(frame.priority)
            self._nursery.start_soon(self._flush, frame.priority)

    async def push_all(self, frames: Iterable[Sendable]) -> None:
        """Send messages as fast as the stream takes them, until it breaks: not more than `AHEAD_BYTES` wait."""
        for frame in frames:
            await self._taken.wait_for(lambda: self.broken or self.waiting_bytes <= AHEAD_BYTES)
            await self.push(frame)

    async def _send(self, frame: Sendable) -> bool:
        """Send a message now; False if it would wait in the stream, or that is broken."""
        if not self.stream.is_clear(frame.priority):
            return False
        try:
            await self.stream.send(frame.parts, frame.priority)
            return True
        except QueueFull:
            pass
        except P2PError:
            self.broken = True
        return False

    async def _make_room(self) -> None:
        owner, waiting = self._backlog.most, f"{self._backlog.bytes} bytes wait for it"
        if self._is_shared:
            log.warning("%s does not read: %s, what is for %s is dropped", self.stream.peer, waiting, owner[1])
            self._backlog.drop(owner)
        else:
            log.warning("%s does not read: %s, its stream is closed", self.stream.peer, waiting)
            await self.close()

    def drop(self, owner: Who) -> None:
        """Forget the queued messages of an owner and of all that belongs to it."""
        self._backlog.drop(owner)

    async def close(self) -> None:
        """Reset the stream and forget what waits; later messages are dropped."""
        self.broken = True
        self._backlog.drop(())
        await self.stream.reset()

    async def _flush(self, priority: Priority) -> None:
        """Send what waits of one priority until nothing is left or the stream breaks; one task at a time."""
        try:
            while not self.broken and (frame := self._backlog.first(priority)) is not None:
                if await self._send(frame):
                    self._backlog.sent(frame)
                    self._taken.notify()
                    self.took_at = trio.current_time()
                elif not self.broken:
                    await self.stream.wait_room(priority)
        except P2PError:
            self.broken = True
        self._flushing.discard(priority)
        if self.broken:
            self._backlog.drop(())


class PeerOutboxes(Generic[SendableT]):
    """One stream to each successor, opened when it is first needed and kept.

    `lost` is called when a stream breaks, `undeliverable` with the messages for a peer that could not be reached. An
    asker chooses successors, so dials are bounded, in all and for each asker, and shared among homes.
    """

    def __init__(
        self,
        network: Network,
        protocol: str,
        nursery: trio.Nursery,
        *,
        lost: Callable[[str], None],
        undeliverable: Callable[[str, list[SendableT]], None],
        waiting: WaitingBytes | None = None,
    ) -> None:
        self._network, self._protocol, self._nursery = network, protocol, nursery
        self._lost, self._undeliverable = lost, undeliverable
        self._waiting = waiting or WaitingBytes()
        self._open: dict[str, PeerOutbox] = {}
        self._opening: dict[str, _Backlog[SendableT]] = {}
        self._dials: dict[str, tuple[Holder, trio.CancelScope]] = {}  # by peer
        self._dial_limit = PeerRateLimit(DIALS_BURST, DIALS_PER_S)
        self._unreachable: dict[str, float] = {}  # peer -> until when

    def prepare(self, peer: str, who: Holder) -> None:
        """Start to open the stream to a peer that will be needed, if it may be dialled now."""
        if peer in self._open or peer in self._opening or self._is_unreachable(peer) or not self._may_dial(who):
            return
        self._opening[peer] = _Backlog(peer, self._waiting)
        scope = trio.CancelScope()
        self._dials[peer] = who, scope
        self._nursery.start_soon(self._connect, peer, scope)

    def _may_dial(self, who: Holder) -> bool:
        """True if one more peer may be dialled for an asker; the newest dial of those who have too many makes way."""
        dialling = [holder for holder, _ in self._dials.values()]
        if dialling.count(who) >= MAX_DIALS_PER_ASKER:
            return False
        shares = Shares(MAX_DIALS, ((holder, 1) for holder in dialling))
        making_way = None
        if not shares.fits(who, 1):
            crowding = shares.in_the_way(who, 1)
            making_way = next((peer for peer, (holder, _) in reversed(self._dials.items()) if holder in crowding), None)
            if making_way is None:
                return False
        if not self._dial_limit.take(who.asker, trio.current_time()):
            return False
        if making_way is not None:
            self._dials.pop(making_way)[1].cancel()
        return True

    async def push(self, peer: str, frame: SendableT, who: Holder) -> bool:
        """Send a message, now or once the stream is open; False if the peer cannot be reached for the time being."""
        outbox = self._open.get(peer)
        if outbox is not None and not outbox.broken:
            await outbox.push(frame)
            return True
        self.prepare(peer, who)
        waiting = self._opening.get(peer)
        if waiting is None or waiting.is_full:
            return False
        waiting.append(frame)
        return True

    def has_waiting(self, peer: str) -> bool:
        """True if messages wait for the stream to a peer, or for room on it."""
        return peer in self._opening or (peer in self._open and self._open[peer].waiting_bytes > 0)

    def waiting_for(self, peer: str, owner: Who, priority: Priority | None = None) -> int:
        """Bytes that wait to be sent to a peer for one owner, of one priority or of all."""
        if peer in self._open:
            return self._open[peer].waiting_for(owner, priority)
        return self._opening[peer].bytes_of(owner, priority) if peer in self._opening else 0

    def room_for(self, peer: str) -> int:
        """Return how many bytes more may wait for a peer."""
        return self._waiting.room_for(peer)

    def drop(self, peer: str, owner: Who) -> None:
        """Forget the queued messages to a peer of one owner and of all that belongs to it."""
        for queued in (self._open.get(peer), self._opening.get(peer)):
            if queued is not None:
                queued.drop(owner)

    async def close_idle(self, needed: Collection[str], used_before: float) -> None:
        """Close the streams to peers that are not needed and were last used before this time."""
        idle = [peer for peer, outbox in self._open.items() if peer not in needed and outbox.used_at < used_before]
        for outbox in [self._open.pop(peer) for peer in idle]:
            await outbox.close()

    def _is_unreachable(self, peer: str) -> bool:
        if len(self._unreachable) > 1024:
            self._unreachable.clear()
        return trio.current_time() < self._unreachable.get(peer, float("-inf"))

    async def _connect(self, peer: str, scope: trio.CancelScope) -> None:
        stream = None
        try:
            with scope:
                stream = await self._network.open(peer, self._protocol, timeout_s=OPEN_TIMEOUT_S)
        except P2PError as error:
            log.warning("the next hop %s cannot be reached: %s", peer, error)
            self._unreachable[peer] = trio.current_time() + UNREACHABLE_S
        finally:
            self._dials.pop(peer, None)
        if stream is None:
            self._undeliverable(peer, self._opening.pop(peer).take_all())
            return
        outbox = self._open[peer] = PeerOutbox(stream, self._nursery, waiting=self._waiting, is_shared=True)
        for frame in self._opening.pop(peer).take_all():
            await outbox.push(frame)
        try:
            while True:
                await stream.receive()  # nothing is ever sent this way: it only tells of the stream's end
        except P2PError:
            await outbox.close()  # this side too, else half of the stream stays open
            if self._open.get(peer) is outbox:  # else it was closed as idle
                del self._open[peer]
                self._lost(peer)


def _has_left(frame: Sendable) -> None:
    if frame.left is not None:
        frame.left.set()


def _size_of(frame: Sendable) -> int:
    return sum(len(part) for part in frame.parts) + FRAME_COST_BYTES
