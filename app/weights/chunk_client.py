"""Asking one peer for a few chunks, or for the hashes of a part's chunks; whoever lies or dawdles is left out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import trio

from app.core.errors import RecordError
from app.core.network import Network, Priority
from app.manifest.manifest import Part
from app.manifest.merkle import CHUNK_BYTES, HASH_BYTES, chunk_count, leaves_from
from app.weights import wire
from app.weights.chunk_schedule import ChunkRun, PeerPerformance
from app.weights.chunk_server import ChunkServer
from app.weights.chunk_writer import ChunkWriter
from app.weights.extents import chunk_length
from app.weights.part_store import NewPart
from p2p.errors import P2PError, Refused, RemoteError

log = logging.getLogger("shoal.weights")

CHUNK_S = 20.0  # 1 MiB at 50 kB/s: slower peers are left out
ELSEWHERE_S = 16.0  # for a member that another one named: it may wait for the chunks itself
MISLED_S = 1.0  # what it costs to be sent to somebody who does not help
LEAVES_S = 5.0  # and as long as they take at the slowest pace


@dataclass
class ChunkClient:
    """Asks peers on behalf of one fetch, and keeps what they give."""

    network: Network
    sharing: ChunkServer
    writer: ChunkWriter
    performance: PeerPerformance
    from_peers: dict[str, int] = field(default_factory=dict)  # bytes that came from each

    async def chunks(self, peer: str, new: NewPart, piece: ChunkRun) -> int | None:
        """Have a piece from a peer, or from the member it names: how many chunks of it came; None where neither helps.

        They are right and on the disk. Raises `WeightsError` where the disk refuses.
        """
        performance = self.performance
        patience_s = CHUNK_S * (piece.count if peer in performance.pace_s else 1)
        answer = await self._call(peer, new, piece, tried=performance.may_not_redirect(peer), timeout_s=patience_s)
        if isinstance(answer, str):
            if self._may_ask(answer):
                begun = trio.current_time()
                given = await self._call(answer, new, piece, tried=True, timeout_s=ELSEWHERE_S)
                if isinstance(given, int):
                    performance.named(peer, helped=True)
                    return given
                if trio.current_time() - begun > MISLED_S:
                    performance.named(peer, helped=False)
            answer = await self._call(peer, new, piece, tried=True, timeout_s=patience_s)
        if isinstance(answer, str):
            await self._accuse(peer, "it sends others round and round")
            return None
        return answer

    async def leaves(self, peer: str, part: Part) -> tuple[bytes, ...] | None:
        """The hashes of a part's chunks, which are right; None where the peer does not help."""
        timeout_s = LEAVES_S + chunk_count(part.size_bytes) * HASH_BYTES * CHUNK_S / CHUNK_BYTES
        begun = trio.current_time()
        try:
            raw = await self.network.call(peer, wire.LEAVES, part.root, timeout_s=timeout_s, priority=Priority.BULK)
            leaves = leaves_from(raw, size_bytes=part.size_bytes, root=part.root)
            self.performance.gave(
                peer, trio.current_time() - begun
            )  # who answers here comes before those who are silent
            return leaves
        except RecordError as error:
            await self._accuse(peer, str(error))
        except P2PError as error:
            self._shun(peer, str(error))
        return None

    async def _call(
        self, peer: str, new: NewPart, piece: ChunkRun, *, tried: bool, timeout_s: float
    ) -> int | str | None:
        """How many chunks a peer gave, or the member it names."""
        request, begun = wire.ChunkRequest(new.part.root, piece.index, piece.count, tried), trio.current_time()
        try:
            raw = await self.network.call(
                peer, wire.CHUNK, request.encode(), timeout_s=timeout_s, priority=Priority.BULK
            )
            answer = wire.read_answer(raw)
            if isinstance(answer, str):
                return answer
            chunks = _cut(answer, new.part, piece)
            if not await self.writer.take(new, piece.index, chunks):
                raise RecordError(f"what it sent is not chunk {piece.index} of {new.part.name}, or one after it")
            self.performance.gave(peer, (trio.current_time() - begun) / len(chunks))
            self.from_peers[peer] = self.from_peers.get(peer, 0) + len(answer)
            return len(chunks)
        except RecordError as error:
            await self._accuse(peer, str(error))
        except Refused:
            self.performance.is_busy(peer, trio.current_time())
        except RemoteError as error:
            if not (tried and error.code == wire.ABSENT):
                self._shun(peer, str(error))
        except P2PError as error:
            self._shun(peer, str(error))
        return None

    def _may_ask(self, peer: str) -> bool:
        usable = self.performance.is_usable(peer, trio.current_time())
        return peer != self.network.peer_id and usable and self.sharing.is_member(peer)

    def _shun(self, peer: str, why: str) -> None:
        if shun_s := self.performance.failed(peer, trio.current_time()):
            log.info("parts are not asked from %s for %g s: %s", peer, shun_s, why)

    async def _accuse(self, peer: str, why: str) -> None:
        log.warning("%s is not asked for parts any more: %s", peer, why)
        self.performance.lied(peer)
        await self.network.disconnect(peer, misbehaved=True)


def _cut(answer: memoryview, part: Part, piece: ChunkRun) -> list[memoryview]:
    """The chunks in an answer, at most as many as were asked for; raises `RecordError`."""
    chunks = []
    for index in range(piece.index, piece.index + piece.count):
        length = chunk_length(part.size_bytes, index)
        chunks.append(answer[:length])
        answer = answer[length:]
        if not answer:
            break
    if answer or len(chunks[-1]) != length:
        raise RecordError(f"what it sent is not chunk {piece.index} of {part.name}: the length is wrong")
    return chunks
