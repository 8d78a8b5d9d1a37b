"""Bounded outgoing queues: messages to a peer are sent at once if there is room, else as soon as there is.

More urgent messages go first, as on the link, and among equally urgent ones their owners take turns: one stream leads
from a hop to the next for all askers, and a long prompt of one of them must not hold up the tokens of another.

Knows streams and peers, not what the messages mean. A stream that breaks takes its unsent messages with it: the
protocol above repeats what matters.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

import trio

from app.core.network import FrameStream, Network, Priority
from app.core.signal import Signal
from p2p.errors import P2PError, QueueFull
from p2p.rate_limit import LogLimit, PeerRateLimit

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
    def parts(self) -> tuple[bytes, ...]: ...
    @property
    def priority(self) -> Priority: ...
    @property
    def owner(self) -> str:
        """The peer for whom it is sent, with which others share the stream; empty if all of it is for one."""


class OutboundFrame(NamedTuple):
    """A message and its priority, for senders that need nothing beside them."""

    parts: tuple[bytes, ...]
    priority: Priority
    owner: str = ""


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

    def is_too_much(self, peer: str) -> bool:
        """True if too many bytes wait for this peer, or in all, and for this peer no fewer than for most."""
        own = self._by_peer[peer]
        is_hog = own * len(self._by_peer) >= self._total
        return own > MAX_WAITING_BYTES or (self._total > MAX_WAITING_IN_ALL and is_hog)


class _Backlog(Generic[SendableT]):
    """Messages to a peer that wait to be sent, and their bytes; those of one owner and priority are in order."""

    def __init__(self, peer: str, waiting: WaitingBytes) -> None:
        self._peer, self._waiting = peer, waiting
        # Priority -> owner -> its messages; the owner whose turn it is comes first.
        self._queues: dict[Priority, dict[str, deque[SendableT]]] = {priority: {} for priority in sorted(Priority)}
        self._frames = 0
        self._bytes: Counter[str] = Counter()  # by owner

    @property
    def bytes(self) -> int:
        """Bytes of all that waits."""
        return self._bytes.total()

    @property
    def is_full(self) -> bool:
        """True if too many messages wait here, or too many bytes for this peer."""
        return self._frames > MAX_WAITING_FRAMES or self._waiting.is_too_much(self._peer)

    def bytes_of(self, owner: str) -> int:
        """Bytes of what waits for one owner."""
        return self._bytes[owner]

    @property
    def most(self) -> str:
        """The owner with the most bytes."""
        return max(self._bytes, key=self._bytes.__getitem__, default="")

    def __iter__(self) -> Iterator[SendableT]:
        for owners in self._queues.values():
            for queue in owners.values():
                yield from queue

    def append(self, frame: SendableT) -> None:
        """Add a message behind those of its owner."""
        self._queues[frame.priority].setdefault(frame.owner, deque()).append(frame)
        self._frames += 1
        self._bytes[frame.owner] += _size_of(frame)
        self._waiting.add(self._peer, _size_of(frame))

    def first(self) -> SendableT | None:
        """Return the message that is to be sent next; None if none waits."""
        for owners in self._queues.values():
            if owners:
                return next(iter(owners.values()))[0]
        return None

    def overtakes(self, frame: Sendable) -> bool:
        """True if nothing waits that is as urgent as this message."""
        first = self.first()
        return first is None or frame.priority < first.priority

    def sent(self, frame: SendableT) -> None:
        """Remove a message, if it is still the next of its owner, whose turn comes after that of all others then."""
        owners = self._queues[frame.priority]
        queue = owners.get(frame.owner)
        if queue is None or queue[0] is not frame:
            return  # it was dropped meanwhile
        del owners[frame.owner]
        queue.popleft()
        if queue:
            owners[frame.owner] = queue
        self._forget(frame)

    def drop(self, unwanted: Callable[[Sendable], bool]) -> int:
        """Forget the messages that are not wanted any more; returns how many were looked at."""
        looked_at = self._frames
        for owners in self._queues.values():
            for owner, queue in list(owners.items()):
                dropped = [frame for frame in queue if unwanted(frame)]
                for frame in dropped:
                    self._forget(frame)
                if len(dropped) == len(queue):
                    del owners[owner]
                elif dropped:
                    owners[owner] = deque(frame for frame in queue if not unwanted(frame))
        return looked_at

    def take_all(self) -> list[SendableT]:
        """Remove all messages and return them, the most urgent first."""
        taken = list(self)
        self.drop(lambda frame: True)
        return taken

    def _forget(self, frame: SendableT) -> None:
        self._frames -= 1
        self._bytes[frame.owner] -= _size_of(frame)
        self._waiting.add(self._peer, -_size_of(frame))
        if not self._bytes[frame.owner]:
            del self._bytes[frame.owner]


class PeerOutbox:
    """Messages to one peer over one stream; a peer that does not read loses the stream.

    If owners share it (`is_shared`), the one for whom most waits loses that instead. `waiting` counts for this and
    other streams together.
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
        self._flushing = False
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

    def waiting_for(self, owner: str) -> int:
        """Bytes of those that are sent for one owner."""
        return self._backlog.bytes_of(owner)

    async def push(self, frame: Sendable) -> None:
        """Send a message or queue it; never waits, and never raises what the network did."""
        if self.broken:
            return
        self.used_at = trio.current_time()
        if self._backlog.overtakes(frame) and await self._send(frame):
            return
        if self.broken:
            return
        self._backlog.append(frame)
        fullest = self._waiting.to_relieve()
        if fullest is not None:
            await fullest._make_room()
        if self._backlog.is_full and not self.broken:
            await self._make_room()
        if not self._flushing and not self.broken:
            self._flushing = True
            self._nursery.start_soon(self._flush)

    async def push_all(self, frames: Iterable[Sendable]) -> None:
        """Send messages as fast as the stream takes them, until it breaks: not more than `AHEAD_BYTES` wait."""
        for frame in frames:
            await self._taken.wait_for(lambda: self.broken or self.waiting_bytes <= AHEAD_BYTES)
            await self.push(frame)

    async def _send(self, frame: Sendable) -> bool:
        """Send a message now; False if there is no room or the stream is broken."""
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
            log.warning("%s does not read: %s, what is for %s is dropped", self.stream.peer, waiting, owner)
            self._backlog.drop(lambda frame: frame.owner == owner)
        else:
            log.warning("%s does not read: %s, its stream is closed", self.stream.peer, waiting)
            await self.close()

    def drop(self, unwanted: Callable[[Sendable], bool]) -> int:
        """Forget the queued messages that are not wanted any more; returns how many were looked at."""
        return self._backlog.drop(unwanted)

    async def close(self) -> None:
        """Reset the stream and forget what waits; later messages are dropped."""
        self.broken = True
        self._backlog.take_all()
        await self.stream.reset()

    async def _flush(self) -> None:
        """Send what waits until nothing is left or the stream breaks; one task at a time."""
        try:
            while not self.broken and (frame := self._backlog.first()) is not None:
                if await self._send(frame):
                    self._backlog.sent(frame)
                    self._taken.notify()
                    self.took_at = trio.current_time()
                elif not self.broken:
                    await self.stream.wait_room(frame.priority)
        except P2PError:
            self.broken = True
        self._flushing = False
        if self.broken:
            self._backlog.take_all()


class PeerOutboxes(Generic[SendableT]):
    """One stream to each successor, opened when it is first needed and kept.

    `lost` is called when a stream breaks, `undeliverable` with the messages for a peer that could not be reached. An
    asker chooses successors, so dials are bounded, in all and for each asker.
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
        self._dials: Counter[str] = Counter()  # under way, by asker
        self._dial_limit = PeerRateLimit(DIALS_BURST, DIALS_PER_S)
        self._unreachable: dict[str, float] = {}  # peer -> until when

    def prepare(self, peer: str, asker: str) -> None:
        """Start to open the stream to a peer that will be needed, if it may be dialled now."""
        if peer in self._open or peer in self._opening or self._is_unreachable(peer):
            return
        if len(self._opening) >= MAX_DIALS or self._dials[asker] >= MAX_DIALS_PER_ASKER:
            return
        if self._dial_limit.take(asker, trio.current_time()):
            self._opening[peer] = _Backlog(peer, self._waiting)
            self._dials[asker] += 1
            self._nursery.start_soon(self._connect, peer, asker)

    async def push(self, peer: str, frame: SendableT, asker: str) -> bool:
        """Send a message, now or once the stream is open; False if the peer cannot be reached for the time being."""
        outbox = self._open.get(peer)
        if outbox is not None and not outbox.broken:
            await outbox.push(frame)
            return True
        self.prepare(peer, asker)
        waiting = self._opening.get(peer)
        if waiting is None or waiting.is_full:
            return False
        waiting.append(frame)
        return True

    def has_waiting(self, peer: str) -> bool:
        """True if messages wait for the stream to a peer, or for room on it."""
        return peer in self._opening or (peer in self._open and self._open[peer].waiting_bytes > 0)

    def waiting_for(self, peer: str, owner: str) -> int:
        """Bytes that wait to be sent to a peer for one owner."""
        if peer in self._open:
            return self._open[peer].waiting_for(owner)
        return self._opening[peer].bytes_of(owner) if peer in self._opening else 0

    def drop(self, peer: str, unwanted: Callable[[Sendable], bool]) -> int:
        """Forget queued messages to a peer that are not wanted any more; returns how many were looked at."""
        if peer in self._open:
            return self._open[peer].drop(unwanted)
        return self._opening[peer].drop(unwanted) if peer in self._opening else 0

    async def close_idle(self, needed: Collection[str], used_before: float) -> None:
        """Close the streams to peers that are not needed and were last used before this time."""
        idle = [peer for peer, outbox in self._open.items() if peer not in needed and outbox.used_at < used_before]
        for outbox in [self._open.pop(peer) for peer in idle]:
            await outbox.close()

    def _is_unreachable(self, peer: str) -> bool:
        if len(self._unreachable) > 1024:
            self._unreachable.clear()
        return trio.current_time() < self._unreachable.get(peer, float("-inf"))

    async def _connect(self, peer: str, asker: str) -> None:
        try:
            stream = await self._network.open(peer, self._protocol, timeout_s=OPEN_TIMEOUT_S)
        except P2PError as error:
            log.warning("the next hop %s cannot be reached: %s", peer, error)
            self._unreachable[peer] = trio.current_time() + UNREACHABLE_S
            self._undeliverable(peer, self._opening.pop(peer).take_all())
            return
        finally:
            self._dials[asker] -= 1
            if not self._dials[asker]:
                del self._dials[asker]
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


def _size_of(frame: Sendable) -> int:
    return sum(len(part) for part in frame.parts) + FRAME_COST_BYTES
