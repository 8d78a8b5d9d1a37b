"""The server side of the chunk protocol (`wire`): sends chunks and chunk hashes to members of the swarm.

If several peers request the same chunk, it is sent once and the others are redirected to the receiver, so that the
upload of a popular part is spread over its downloaders. Chunks of a part that is still being downloaded here are served
too. `is_member` decides who is served; who may connect at all is decided in `p2p`.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import trio

from app.core.errors import RecordError
from app.core.network import Network, Payload
from app.core.signal import Signal
from app.manifest.manifest import Part
from app.manifest.merkle import HASH_BYTES, chunk_count
from app.weights import wire
from app.weights.part_set import PartSet
from p2p.errors import Refused, RemoteError

SLOTS = 8  # chunks read from disk at the same time
SLOTS_PER_PEER = 8  # open requests of one peer; an honest one has fewer
MAX_WAITING = 64  # requests waiting for the disk; more are refused
ACTIVE_S = 15.0  # a peer counts as downloading for this long after its last request
REMEMBERED = 4096  # bound of both tables: peers served, and chunks whose receiver is known
NAMED_AT_MOST = 2  # peers redirected to one receiver of a chunk
COMING_S = 12.0  # longest wait for a requested chunk that this node is itself still receiving


@dataclass
class BytesGiven:
    """Upload counters of one peer: bytes sent, time of its last request, requests being served."""

    bytes: int = 0
    at: float = 0.0
    waiting: int = 0


@dataclass
class ChunkServer:
    """Answers requests of members for the parts of one set."""

    parts: PartSet
    is_member: Callable[[str], bool]
    given: OrderedDict[str, BytesGiven] = field(default_factory=OrderedDict)
    total_bytes: int = 0
    methods: wire.ChunkMethods = wire.WEIGHTS

    def __post_init__(self) -> None:
        self._slots = trio.CapacityLimiter(SLOTS)
        self._receivers: OrderedDict[tuple[bytes, int], tuple[str, int]] = OrderedDict()  # chunk -> peer, redirects
        self._arrived = Signal()
        self._coming: list[Callable[[bytes, int], bool]] = []
        self.asked_by: dict[bytes, str] = {}  # root -> the last peer that was sent some of it

    def serve(self, network: Network) -> None:
        """Register both methods with the network."""
        network.serve(self.methods.leaves, self._on_leaves)
        network.serve(self.methods.chunk, self._on_chunk)

    def receivers(self) -> tuple[str, ...]:
        """Peers that requested something within the last `ACTIVE_S` seconds."""
        now = trio.current_time()
        return tuple(peer for peer, given in self.given.items() if now - given.at < ACTIVE_S)

    def asked_at(self, root: bytes) -> float:
        """Return when the last peer that was sent some of a part has requested anything; -inf if there is none."""
        given = self.given.get(self.asked_by.get(root, ""))
        return -math.inf if given is None else given.at

    @contextlib.contextmanager
    def following(self, coming: Callable[[bytes, int], bool]) -> Iterator[None]:
        """While this context is open, requests for chunks with `coming(root, index)` true wait for their arrival."""
        self._coming.append(coming)
        try:
            yield
        finally:
            self._coming.remove(coming)

    def arrived(self) -> None:
        """Wake requests that wait for a chunk: one has just been stored."""
        self._arrived.notify()

    async def _on_leaves(self, peer: str, body: bytes) -> Payload:
        given = self._admit(peer)
        part = self.parts.part(body) if len(body) == HASH_BYTES else None
        if part is None:
            raise RemoteError("this swarm has no such part", wire.ABSENT)
        with self._waiting(given):
            leaves = await trio.to_thread.run_sync(self.parts.leaves, part, limiter=self._slots)
        if leaves is None:
            raise RemoteError("the chunk hashes of this part are unknown here", wire.ABSENT)
        return b"".join(leaves)

    async def _on_chunk(self, peer: str, body: bytes) -> Payload:
        given = self._admit(peer)
        try:
            request = wire.ChunkRequest.decode(body)
        except RecordError as error:
            raise RemoteError(str(error), "bad_request") from error
        part = self.parts.part(request.root)
        if part is None or request.index >= chunk_count(part.size_bytes):
            raise RemoteError("this swarm has no such chunk", wire.ABSENT)
        other = self._redirect_target(peer, request)
        if other is not None:
            return wire.elsewhere_answer(other)
        with self._waiting(given):
            self._record_receiver(peer, request)
            self.asked_by[part.root] = peer
            chunks = await self._chunks(part, request)
        size = sum(len(chunk) for chunk in chunks)
        given.bytes += size
        self.total_bytes += size
        return wire.chunk_answer(*chunks)

    @contextlib.contextmanager
    def _waiting(self, given: BytesGiven) -> Iterator[None]:
        if given.waiting >= SLOTS_PER_PEER or self._slots.statistics().tasks_waiting >= MAX_WAITING:
            raise Refused("too many chunks are requested at the same time")
        given.waiting += 1
        try:
            yield
        finally:
            given.waiting -= 1

    async def _chunks(self, part: Part, request: wire.ChunkRequest) -> list[bytes | bytearray]:
        """Read the requested chunks up to the first that is missing here; raises `RemoteError` if that is the first."""
        with trio.move_on_after(COMING_S):
            await self._arrived.wait_for(lambda: not any(coming(part.root, request.index) for coming in self._coming))
        chunks: list[bytes | bytearray] = []
        for index in range(request.index, min(request.index + request.count, chunk_count(part.size_bytes))):
            # Copying from the page cache is faster than waking a thread.
            chunk: bytes | bytearray | None = self.parts.chunk_at_hand(part, index)
            if chunk is None:
                chunk = await trio.to_thread.run_sync(self.parts.chunk, part, index, limiter=self._slots)
            if chunk is None:
                break
            chunks.append(chunk)
            await trio.lowlevel.checkpoint()  # each copy of 1 MiB blocks the event loop for a moment
        if not chunks:
            raise RemoteError(f"chunk {request.index} of {part.name} is not here", wire.ABSENT)
        return chunks

    def _admit(self, peer: str) -> BytesGiven:
        if not self.is_member(peer):
            raise Refused("only members of this swarm may download its model")
        given = self.given.setdefault(peer, BytesGiven())
        given.at = trio.current_time()
        self.given.move_to_end(peer)
        if len(self.given) > REMEMBERED:
            self.given.popitem(last=False)
        return given

    def _redirect_target(self, peer: str, request: wire.ChunkRequest) -> str | None:
        """Return an active peer that was already sent this chunk; None if this node should send it."""
        key = (request.root, request.index)
        other, named = self._receivers.get(key, (peer, 0))
        if request.tried or other == peer:
            return None
        recent = self.given.get(other)
        if recent is None or trio.current_time() - recent.at > ACTIVE_S:
            return None
        # The redirected peer will soon hold the chunk too, so the next ones are redirected to it: a chain of uploads,
        # in which no peer serves all the others.
        self._receivers[key] = (other, named + 1) if named + 1 < NAMED_AT_MOST else (peer, 0)
        return other

    def _record_receiver(self, peer: str, request: wire.ChunkRequest) -> None:
        """Remember who is sent a chunk.

        Called before sending, so that peers requesting it meanwhile are redirected there and wait for its arrival.
        """
        self._receivers[request.root, request.index] = (peer, 0)
        self._receivers.move_to_end((request.root, request.index))
        if len(self._receivers) > REMEMBERED:
            self._receivers.popitem(last=False)
