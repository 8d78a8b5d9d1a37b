"""The client side of the chunk protocol (`wire`): one request to one peer, its answer checked and written to disk.

Results and failures are recorded in `PeerPerformance`; peers are chosen in `download`, chunks in `chunk_schedule`.
"""

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
from p2p.errors import DeadlineExceeded, P2PError, Refused, RemoteError

log = logging.getLogger("shoal.weights")

CHUNK_S = 20.0  # deadline for a chunk: 1 MiB at 50 kB/s; extended for a peer as long as it sends at least
LEAST_BYTES_PER_S = 4000  # which includes other answers of it, as they come one after another, but
LONGER = 8  # times the deadline at most
ELSEWHERE_S = 16.0  # deadline for a peer we were redirected to: it may itself still be receiving the chunks
MISLED_S = 1.0  # a failed redirect that took longer than this counts against the peer that sent us there
LEAVES_S = 5.0  # deadline for a list of leaves, plus its transfer time at the slowest accepted rate


@dataclass
class ChunkClient:
    """Requests chunks and leaves from peers for one `Download` and stores what arrives."""

    network: Network
    sharing: ChunkServer
    writer: ChunkWriter
    performance: PeerPerformance
    from_peers: dict[str, int] = field(default_factory=dict)  # peer -> bytes received
    hangs_up: bool = True  # on peers whose answers do not fit

    async def chunks(self, peer: str, new: NewPart, piece: ChunkRun) -> int | None:
        """Fetch a run of chunks from a peer, or from the member it redirects to; None if neither delivers.

        Return the number of chunks that were verified and written. Raises `WeightsError` if the disk cannot be written.
        """
        performance = self.performance
        timeout_s = CHUNK_S * (piece.count if peer in performance.pace_s else 1)
        answer = await self._call(peer, new, piece, tried=performance.may_not_redirect(peer), timeout_s=timeout_s)
        if isinstance(answer, str):
            if self._may_ask(answer):
                begun = trio.current_time()
                given = await self._call(answer, new, piece, tried=True, timeout_s=ELSEWHERE_S)
                if isinstance(given, int):
                    performance.record_redirect(peer, succeeded=True)
                    return given
                if trio.current_time() - begun > MISLED_S:
                    performance.record_redirect(peer, succeeded=False)
            answer = await self._call(peer, new, piece, tried=True, timeout_s=timeout_s)
        if isinstance(answer, str):
            await self._ban(peer, "it redirects although it was asked to send the chunk itself")
            return None
        return answer

    async def leaves(self, peer: str, part: Part) -> tuple[bytes, ...] | None:
        """Return the hashes of a part's chunks, checked against its root; None if the peer does not deliver."""
        timeout_s = LEAVES_S + chunk_count(part.size_bytes) * HASH_BYTES * CHUNK_S / CHUNK_BYTES
        begun = trio.current_time()
        try:
            # Before the chunks that are on their way: on a slow link they take longer than `LEAVES_S`.
            raw = await self.network.call(peer, self.sharing.methods.leaves, part.root, timeout_s=timeout_s)
            leaves = leaves_from(raw, size_bytes=part.size_bytes, root=part.root)
            # A measured peer is chosen before untried ones, which may never answer.
            self.performance.gave(peer, trio.current_time() - begun)
            return leaves
        except RecordError as error:
            await self._ban(peer, str(error))
        except P2PError as error:
            self._back_off(peer, str(error))
        return None

    async def _call(
        self, peer: str, new: NewPart, piece: ChunkRun, *, tried: bool, timeout_s: float
    ) -> int | str | None:
        """Send one request: the number of chunks stored, the peer that we are redirected to, or None on failure."""
        request, begun = wire.ChunkRequest(new.part.root, piece.index, piece.count, tried), trio.current_time()
        try:
            answer = wire.read_answer(await self._call_slow(peer, request.encode(), timeout_s))
            if isinstance(answer, str):
                return answer
            chunks = _split(answer, new.part, piece)
            if not await self.writer.take(new, piece.index, chunks):
                raise RecordError(f"it sent wrong bytes for chunk {piece.index} of {new.part.name} or one of the next")
            self.performance.gave(peer, (trio.current_time() - begun) / len(chunks))
            self.from_peers[peer] = self.from_peers.get(peer, 0) + len(answer)
            return len(chunks)
        except RecordError as error:
            await self._ban(peer, str(error))
        except Refused:
            self.performance.refused_as_busy(peer, trio.current_time())
        except RemoteError as error:
            if not (tried and error.code == wire.ABSENT):
                self._back_off(peer, str(error))
        except P2PError as error:
            self._back_off(peer, str(error))
        return None

    async def _call_slow(self, peer: str, request: bytes, timeout_s: float) -> bytes:
        """Ask for chunks; a peer that is only slow has more time than `timeout_s`. Raises `P2PError`."""
        raw: bytes | None = None
        failure: P2PError = DeadlineExceeded(f"{peer} sent next to nothing for {timeout_s:g} s")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, peer, timeout_s, nursery.cancel_scope)
            try:
                method, longest_s = self.sharing.methods.chunk, LONGER * timeout_s
                raw = await self.network.call(peer, method, request, timeout_s=longest_s, priority=Priority.BULK)
            except P2PError as error:
                failure = error
            nursery.cancel_scope.cancel()
        if raw is None:
            raise failure
        return raw

    async def _watch(self, peer: str, period_s: float, scope: trio.CancelScope) -> None:
        """Cancel what waits for a peer when next to nothing came from it in a whole period."""
        enough, came = LEAST_BYTES_PER_S * period_s, self._came_from(peer)
        while True:
            await trio.sleep(period_s)
            before, came = came, self._came_from(peer)
            if came - before < enough:
                scope.cancel()

    def _came_from(self, peer: str) -> int:
        return sum(link.bytes_in for link in self.network.links() if link.peer == peer)

    def _may_ask(self, peer: str) -> bool:
        usable = self.performance.is_usable(peer, trio.current_time())
        return peer != self.network.peer_id and usable and self.sharing.is_member(peer)

    def _back_off(self, peer: str, why: str) -> None:
        if backoff_s := self.performance.failed(peer, trio.current_time()):
            log.info("no chunks are requested from %s for %g s: %s", peer, backoff_s, why)

    async def _ban(self, peer: str, why: str) -> None:
        log.warning("no chunks are requested from %s any more: %s", peer, why)
        self.performance.lied(peer)
        if self.hangs_up:
            await self.network.disconnect(peer, misbehaved=True)


def _split(answer: memoryview, part: Part, piece: ChunkRun) -> list[memoryview]:
    """Split an answer into chunks, at most `piece.count`; raises `RecordError` if its length fits no number of them."""
    chunks = []
    for index in range(piece.index, piece.index + piece.count):
        length = chunk_length(part.size_bytes, index)
        chunks.append(answer[:length])
        answer = answer[length:]
        if not answer:
            break
    if answer or len(chunks[-1]) != length:
        raise RecordError(f"it sent a wrong number of bytes for chunk {piece.index} of {part.name}")
    return chunks
