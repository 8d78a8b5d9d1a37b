"""One link of the in-memory network, and the message streams on it.

It models delay, bandwidth, loss, resets, and silence: during a partition, or while a process is frozen, messages are
held back and delivered afterwards, as with TCP. `p2p.memory.fabric` decides which nodes are linked.
"""

from __future__ import annotations

import heapq
import math
import zlib
from dataclasses import dataclass, field

import trio

from p2p.errors import QueueFull, StreamClosed, StreamReset
from p2p.host.pruning import LinkUse
from p2p.link.outbox import CHUNK_S
from p2p.link.receive_rate import ENOUGH_BYTES, SKIPPED_BYTES, ReceiveRate
from p2p.memory.timer import Timer
from p2p.values import DECODE, MESSAGE_COST_BYTES, PREFILL, WINDOW_BYTES, LinkKind, Payload, fits_window, joined


@dataclass(frozen=True)
class LinkProfile:
    """One-way delay, random extra delay up to `jitter_s`, rate in each direction, and share of messages lost."""

    delay_s: float = 0.005
    jitter_s: float = 0.0
    bytes_per_s: float = math.inf
    loss: float = 0.0
    kind: LinkKind = "direct"


@dataclass
class Traffic:
    """Messages and bytes of one node; each request, answer and stream message counts as one message."""

    messages_out: int = 0
    messages_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0


@dataclass
class Lane:
    """One direction of a link: the times until which it is busy, and counts of its traffic."""

    seed: str
    traffic_from: Traffic
    traffic_to: Traffic
    busy_until: float = 0.0
    urgent_until: float = 0.0  # with what overtakes the rest
    sent_bytes: int = 0
    sent_messages: int = 0
    receive_rate: ReceiveRate = field(default_factory=ReceiveRate)

    def crossing_s(self, profile: LinkProfile, size: int, priority: int) -> float | None:
        """Count a message and return the seconds until it arrives, or None if it is lost."""
        now = trio.current_time()
        self.sent_messages += 1
        self.sent_bytes += size
        self.traffic_from.messages_out += 1
        self.traffic_from.bytes_out += size
        if profile.loss and self._random("loss") < profile.loss:
            return None
        delay_s = profile.delay_s
        if profile.jitter_s:
            delay_s += profile.jitter_s * self._random("jitter")
        if profile.bytes_per_s != math.inf:
            wire_s = size / profile.bytes_per_s
            self.busy_until = max(now, self.busy_until) + wire_s
            if priority < PREFILL:  # control and decode messages overtake the others
                self.urgent_until = max(now, self.urgent_until) + wire_s
            delay_s += self.free_at(priority) - now
        return delay_s

    def free_at(self, priority: int) -> float:
        """Return when the last message that this priority does not overtake has left."""
        return self.urgent_until if priority < PREFILL else self.busy_until

    def waiting_bytes(self, profile: LinkProfile) -> int:
        """Return how many of the bytes that were sent have not crossed a slow link yet."""
        left_s = self.busy_until - trio.current_time()
        return int(left_s * profile.bytes_per_s) if left_s > 0 and profile.bytes_per_s != math.inf else 0

    def arrived(self, size: int, profile: LinkProfile) -> None:
        """Count a message as received; a long one tells the link's speed."""
        if size >= SKIPPED_BYTES + ENOUGH_BYTES and profile.bytes_per_s != math.inf:
            self.receive_rate.count(size, size / profile.bytes_per_s)
        self.traffic_to.messages_in += 1
        self.traffic_to.bytes_in += size

    def _random(self, what: str) -> float:
        # A hash of the message's number instead of a shared generator, so that the order in which the event loop runs
        # the tasks of other links does not change the outcome.
        return zlib.crc32(f"{self.seed}/{what}/{self.sent_messages}".encode()) / 2**32


@dataclass(eq=False)
class MemoryLink:
    """A connection between two nodes; `lanes[x]` is the direction that starts at node `x`."""

    profile: LinkProfile
    lanes: dict[str, Lane]
    timer: Timer
    silent_since: float | None = None
    broken: bool = False
    calls: dict[trio.CancelScope, None] = field(default_factory=dict)  # ordered, so that runs are reproducible
    pipes: dict[MemoryPipe, None] = field(default_factory=dict)
    used_at: float = field(default_factory=trio.current_time)
    _unsilenced: trio.Event = field(default_factory=trio.Event)

    def use(self, peer: str, source: str) -> LinkUse:
        """Return the last use of this link to `peer` at an address, for choosing links to close."""
        return LinkUse(peer, source, self.used_at, bool(self.calls or self.pipes))

    async def cross(self, source: str, size: int, priority: int) -> None:
        """Carry one message of a call from `source`: sleep until it arrives, or forever if it is lost."""
        lane = self.lanes[source]
        self.used_at = trio.current_time()
        crossing_s = lane.crossing_s(self.profile, size, priority)
        if crossing_s is None:
            await trio.sleep_forever()
            return
        await self.timer.sleep(crossing_s)
        while self.silent_since is not None:
            await self._unsilenced.wait()
        lane.arrived(size, self.profile)

    def set_silent(self, silent: bool) -> None:
        """Hold back everything on the link, or deliver what was held back."""
        if silent and self.silent_since is None:
            self.silent_since = trio.current_time()
            self._unsilenced = trio.Event()
        elif not silent and self.silent_since is not None:
            self.silent_since = None
            self._unsilenced.set()
            for pipe in self.pipes:
                pipe.wake()

    def snap(self) -> None:
        """Break the link: cancel the calls on it and reset its streams."""
        self.broken = True
        for scope in list(self.calls):
            scope.cancel()
        for pipe in list(self.pipes):
            pipe.break_off()


class MemoryPipe:
    """One direction of a stream, with a window on the bytes that the reader has not consumed."""

    def __init__(self, link: MemoryLink, source: str) -> None:
        self.link, self.lane = link, link.lanes[source]
        self.waiting: list[tuple[float, int, bytes | None]] = []  # heap of (arrives_at, number, message or end)
        self.outstanding_bytes = 0
        self.ended = self.broken = False
        self._last_at = [0.0] * 4  # by priority: when the last message arrives
        self._clear_at = [0.0] * 4  # and from when on next to nothing waits for the link
        self._changed = trio.Event()
        link.pipes[self] = None

    def wake(self) -> None:
        """Wake the tasks that wait for a change of this pipe."""
        self._changed.set()
        self._changed = trio.Event()

    def has_room(self, cost: int = WINDOW_BYTES, priority: int = DECODE) -> bool:
        """True if a message of `cost` bytes fits the window now."""
        return fits_window(self.outstanding_bytes, cost, priority)

    def is_clear(self, priority: int) -> bool:
        """True if next to nothing of this priority still waits for the link."""
        return self._clear_at[priority] <= trio.current_time()

    async def changed(self, priority: int) -> None:
        """Wait for the next change of this pipe, or until it is clear."""
        with trio.move_on_at(math.inf if self.is_clear(priority) else self._clear_at[priority]):
            await self._changed.wait()

    def put(self, message: bytes, priority: int) -> None:
        """Send one message; reset this direction if the link loses it."""
        crossing_s = self.lane.crossing_s(self.link.profile, len(message), priority)
        if crossing_s is None:
            self.break_off()
            return
        self.outstanding_bytes += len(message) + MESSAGE_COST_BYTES
        arrives_at = max(trio.current_time() + crossing_s, self._last_at[priority])
        self._last_at[priority] = arrives_at
        self._clear_at[priority] = self.lane.free_at(priority) - CHUNK_S
        heapq.heappush(self.waiting, (arrives_at, self.lane.sent_messages, message))
        self.wake()

    def end(self) -> None:
        """Mark the end; the reader gets `StreamClosed` after the last message."""
        self.ended = True
        arrives_at = max(*self._last_at, trio.current_time() + self.link.profile.delay_s)
        heapq.heappush(self.waiting, (arrives_at, self.lane.sent_messages + 1, None))
        self.wake()

    def break_off(self) -> None:
        """Reset this direction at once."""
        self.broken = True
        self.waiting.clear()
        self.wake()

    async def get(self, peer: str) -> bytes:
        """Wait for the next message; raises `StreamReset` or `StreamClosed`."""
        while True:
            if self.broken:
                raise StreamReset(f"the stream with {peer} was reset; open another one")
            next_at = math.inf
            if self.waiting and self.link.silent_since is None:
                next_at, _, message = self.waiting[0]
                if next_at <= trio.current_time():
                    if message is None:  # it stays in the heap, so that later reads end too
                        self.link.pipes.pop(self, None)
                        raise StreamClosed(f"{peer} closed the stream")
                    heapq.heappop(self.waiting)
                    return self._consumed(message)
            with trio.move_on_at(next_at):
                await self._changed.wait()

    def _consumed(self, message: bytes) -> bytes:
        self.outstanding_bytes -= len(message) + MESSAGE_COST_BYTES
        self.lane.arrived(len(message), self.link.profile)
        self.wake()
        return message


class MemoryStream:
    """One end of a message stream between two nodes."""

    def __init__(self, peer: str, outgoing: MemoryPipe, incoming: MemoryPipe) -> None:
        self._peer, self._out, self._in = peer, outgoing, incoming

    @property
    def peer(self) -> str:
        """Name of the node at the other end."""
        return self._peer

    async def send(self, message: Payload, priority: int = DECODE) -> None:
        """Send one message without waiting; raises `QueueFull`, `StreamReset` or `StreamClosed`."""
        body = joined(message)
        self._check_open()
        if not self._out.has_room(len(body) + MESSAGE_COST_BYTES, priority):
            raise QueueFull(f"{self._peer} has not read {self._out.outstanding_bytes} bytes yet; slow down")
        self._out.put(body, priority)
        if self._out.broken:
            await self.reset()

    def is_clear(self, priority: int = DECODE) -> bool:
        """True if next to nothing of this priority that was sent on this stream still waits for the link."""
        return self._out.is_clear(priority)

    async def wait_room(self, priority: int = DECODE) -> None:
        """Wait until the window has room for a message of any size, and the stream is clear.

        Raises `StreamReset` or `StreamClosed`.
        """
        await trio.lowlevel.checkpoint()
        pipe = self._out
        while not (pipe.broken or pipe.ended or (pipe.has_room(priority=priority) and pipe.is_clear(priority))):
            await pipe.changed(priority)
        self._check_open()

    async def receive(self) -> bytes:
        """Wait for the next message; raises `StreamReset` or `StreamClosed`."""
        await trio.lowlevel.checkpoint()
        return await self._in.get(self._peer)

    async def aclose(self) -> None:
        """Close this side for sending; messages already sent are still delivered."""
        if not self._out.ended and not self._out.broken:
            self._out.end()
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """Reset both directions at once."""
        self._out.break_off()
        self._in.break_off()
        for pipe in (self._out, self._in):
            pipe.link.pipes.pop(pipe, None)
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self._out.broken:
            raise StreamReset(f"the stream with {self._peer} was reset; open another one")
        if self._out.ended:
            raise StreamClosed(f"this side of the stream with {self._peer} is closed")
