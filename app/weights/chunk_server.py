"""Giving chunks to peers: what lies here, a few at a time, and where several want the same, each chunk once.

A node that is fetching a part gives what it has of it already. Members only: who may connect is decided elsewhere.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import trio

from app.core.errors import RecordError
from app.core.network import Network, Payload
from app.manifest.manifest import Part
from app.manifest.merkle import HASH_BYTES, chunk_count
from app.weights import wire
from app.weights.library import Library
from p2p.errors import Refused, RemoteError

SLOTS = 8  # chunks that are read from a disk at once
SLOTS_PER_PEER = 8  # requests: more than an honest peer makes at once
MAX_WAITING = 64
ACTIVE_S = 15.0  # a peer that asked so recently is still fetching
REMEMBERED = 4096  # chunks of which it is known who got them
NAMED_AT_MOST = 2  # peers that are sent to one who got a chunk
COMING_S = 12.0  # to wait for a chunk that this node is itself being sent


@dataclass
class BytesGiven:
    """What was given to one peer."""

    bytes: int = 0
    at: float = 0.0
    waiting: int = 0


@dataclass
class ChunkServer:
    """Answers peers' requests for one model's parts."""

    library: Library
    is_member: Callable[[str], bool]
    given: OrderedDict[str, BytesGiven] = field(default_factory=OrderedDict)
    total_bytes: int = 0

    def __post_init__(self) -> None:
        self._slots = trio.CapacityLimiter(SLOTS)
        self._went_to: OrderedDict[tuple[bytes, int], tuple[str, int]] = OrderedDict()  # whom, named how often
        self._arrived = trio.Event()
        self._coming: list[Callable[[bytes, int], bool]] = []

    def serve(self, network: Network) -> None:
        """Answer from now on."""
        network.serve(wire.LEAVES, self._on_leaves)
        network.serve(wire.CHUNK, self._on_chunk)

    def receivers(self) -> tuple[str, ...]:
        """The peers that fetch from here at the moment."""
        now = trio.current_time()
        return tuple(peer for peer, given in self.given.items() if now - given.at < ACTIVE_S)

    @contextlib.contextmanager
    def following(self, coming: Callable[[bytes, int], bool]) -> Iterator[None]:
        """For as long as this lasts, `coming(root, index)` says whether a chunk is on its way to this node."""
        self._coming.append(coming)
        try:
            yield
        finally:
            self._coming.remove(coming)

    def arrived(self) -> None:
        """A chunk that was on its way is here."""
        self._arrived.set()
        self._arrived = trio.Event()

    async def _on_leaves(self, peer: str, body: bytes) -> Payload:
        given = self._admit(peer)
        part = self.library.part(body) if len(body) == HASH_BYTES else None
        if part is None:
            raise RemoteError("there is no such part in this model", wire.ABSENT)
        with self._waiting(given):
            leaves = await trio.to_thread.run_sync(self.library.leaves, part, limiter=self._slots)
        if leaves is None:
            raise RemoteError("this part's chunks are not known here", wire.ABSENT)
        return b"".join(leaves)

    async def _on_chunk(self, peer: str, body: bytes) -> Payload:
        given = self._admit(peer)
        try:
            request = wire.ChunkRequest.decode(body)
        except RecordError as error:
            raise RemoteError(str(error), "bad_request") from error
        part = self.library.part(request.root)
        if part is None or request.index >= chunk_count(part.size_bytes):
            raise RemoteError("there is no such chunk in this model", wire.ABSENT)
        other = self._who_got(peer, request)
        if other is not None:
            return wire.elsewhere_answer(other)
        with self._waiting(given):
            self._note(peer, request)
            chunks = await self._chunks(part, request)
        size = sum(len(chunk) for chunk in chunks)
        given.bytes += size
        self.total_bytes += size
        return wire.chunk_answer(*chunks)

    @contextlib.contextmanager
    def _waiting(self, given: BytesGiven) -> Iterator[None]:
        if given.waiting >= SLOTS_PER_PEER or self._slots.statistics().tasks_waiting >= MAX_WAITING:
            raise Refused("too many chunks were asked for at once")
        given.waiting += 1
        try:
            yield
        finally:
            given.waiting -= 1

    async def _chunks(self, part: Part, request: wire.ChunkRequest) -> list[bytes | bytearray]:
        """Those that were asked for, up to the first that is not here."""
        with trio.move_on_after(COMING_S):
            while any(coming(part.root, request.index) for coming in self._coming):
                await self._arrived.wait()
        chunks: list[bytes | bytearray] = []
        for index in range(request.index, min(request.index + request.count, chunk_count(part.size_bytes))):
            # What lies in memory is copied in less time than it takes to wake a thread.
            chunk: bytes | bytearray | None = self.library.chunk_at_hand(part, index)
            if chunk is None:
                chunk = await trio.to_thread.run_sync(self.library.chunk, part, index, limiter=self._slots)
            if chunk is None:
                break
            chunks.append(chunk)
            await trio.lowlevel.checkpoint()  # each copy holds up everybody else a little
        if not chunks:
            raise RemoteError(f"chunk {request.index} of {part.name} is not here", wire.ABSENT)
        return chunks

    def _admit(self, peer: str) -> BytesGiven:
        if not self.is_member(peer):
            raise Refused("only members of this swarm are given its model")
        given = self.given.setdefault(peer, BytesGiven())
        given.at = trio.current_time()
        self.given.move_to_end(peer)
        if len(self.given) > REMEMBERED:
            self.given.popitem(last=False)
        return given

    def _who_got(self, peer: str, request: wire.ChunkRequest) -> str | None:
        """Another peer, fetching here too, that was sent this chunk; None where the asker is to be served."""
        key = (request.root, request.index)
        other, named = self._went_to.get(key, (peer, 0))
        if request.tried or other == peer:
            return None
        recent = self.given.get(other)
        if recent is None or trio.current_time() - recent.at > ACTIVE_S:
            return None
        # Who is sent there will soon have it too: from hand to hand, so that nobody has to give to all the others.
        self._went_to[key] = (other, named + 1) if named + 1 < NAMED_AT_MOST else (peer, 0)
        return other

    def _note(self, peer: str, request: wire.ChunkRequest) -> None:
        """Before it is sent: whoever asks for the same meanwhile waits for it there, where it arrives first."""
        self._went_to[request.root, request.index] = (peer, 0)
        self._went_to.move_to_end((request.root, request.index))
        if len(self._went_to) > REMEMBERED:
            self._went_to.popitem(last=False)
