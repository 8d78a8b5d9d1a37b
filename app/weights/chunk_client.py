"""The client side of the chunk protocol (`wire`): one request to one peer, its answer checked and written to disk.

Results and failures are recorded in `PeerPerformance`; peers are chosen in `download`, chunks in `chunk_schedule`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import trio

from app.core.errors import AppError, RecordError
from app.core.network import Network, Priority
from app.manifest.manifest import Part
from app.manifest.merkle import HASH_BYTES, chunk_count, leaves_from
from app.weights import wire
from app.weights.chunk_schedule import ChunkRun, PeerPerformance
from app.weights.chunk_server import ChunkServer
from app.weights.chunk_writer import ChunkWriter
from app.weights.extents import chunk_length
from app.weights.part_store import NewPart
from p2p.errors import DeadlineExceeded, P2PError, Refused, RemoteError

log = logging.getLogger("shoal.weights")
T = TypeVar("T")

SLOWEST_BYTES_PER_S = 4000  # of a link to a peer; slower ones count as failed
CHUNK_S = 20.0  # a request is given up when the link was slower for so long, or silent
ELSEWHERE_S = 16.0  # the same for a peer we were redirected to: it may itself still be receiving the chunks
LONGEST_S = 180.0  # the same for a request, however much comes from the peer
TRIAL_S = 30.0  # the same for each chunk of the first request to a peer, which may have none
PROMPT_S = 1.0  # a refusal that took longer counts as a failure, a failed redirect against the peer that sent us there
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
    lacking: dict[str, set[str]] = field(default_factory=dict)  # part -> peers that said that it is not there

    async def chunks(self, peer: str, new: NewPart, piece: ChunkRun, *, tried: bool) -> int | str | None:
        """Request a run of chunks from a holder; who redirects those that were `tried` elsewhere misbehaves.

        Return the number of chunks that were verified and written, the peer that it redirects to, or None if it does
        not deliver. Raises `WeightsError` if the disk cannot be written.
        """
        return await self._call(peer, new, piece, tried=tried or self.performance.may_not_redirect(peer))

    async def chunks_elsewhere(self, peer: str, new: NewPart, piece: ChunkRun, *, named_by: str) -> int | None:
        """Request a run of chunks from the peer that a holder redirected to; as `chunks`, without further redirects."""
        begun = trio.current_time()
        given = await self._call(peer, new, piece, tried=True, is_named=True)
        if given is not None or trio.current_time() - begun > PROMPT_S:
            self.performance.record_redirect(named_by, succeeded=given is not None)
        return given if isinstance(given, int) else None

    def may_ask(self, peer: str, part: str) -> bool:
        """True if a peer that somebody redirects to for a part is another member, and may be asked for it."""
        usable = self.performance.is_usable(peer, trio.current_time()) and not self.performance.has_wrong(peer, part)
        return peer != self.network.peer_id and usable and self.sharing.is_member(peer)

    async def leaves(self, peer: str, part: Part) -> tuple[bytes, ...] | None:
        """Return the hashes of a part's chunks, checked against its root; None if the peer does not deliver."""
        timeout_s = LEAVES_S + chunk_count(part.size_bytes) * HASH_BYTES / SLOWEST_BYTES_PER_S
        begun = trio.current_time()
        try:
            # Before the chunks that are on their way: on a slow link they take longer than `LEAVES_S`.
            raw = await self.network.call(peer, self.sharing.methods.leaves, part.root, timeout_s=timeout_s)
            leaves = leaves_from(raw, size_bytes=part.size_bytes, root=part.root)
            # Of a home, a measured peer is chosen before untried ones, which may never answer.
            self.performance.answered(peer, trio.current_time() - begun)
            return leaves
        except RecordError as error:
            await self._ban(peer, str(error))
        except P2PError as error:
            self._note_lack(peer, part, error)
            self._back_off(peer, str(error))
        return None

    async def _call(
        self, peer: str, new: NewPart, piece: ChunkRun, *, tried: bool, is_named: bool = False
    ) -> int | str | None:
        """Send one request: the number of chunks stored, the peer that we are redirected to, or None on failure."""
        request, begun = wire.ChunkRequest(new.part.root, piece.index, piece.count, tried), trio.current_time()
        try:
            silent_s = ELSEWHERE_S if is_named else CHUNK_S
            longest_s = min(LONGEST_S, TRIAL_S * piece.count) if self.performance.is_new(peer) else LONGEST_S
            ask = partial(self.network.call, peer, self.sharing.methods.chunk, request.encode(), timeout_s=longest_s)
            raw = await while_it_comes(partial(self._came_from, peer), silent_s, partial(ask, priority=Priority.BULK))
            answer = wire.read_answer(raw)
            if isinstance(answer, str):
                if tried:
                    raise RecordError("it redirects although it was asked to send the chunk itself")
                return answer
            chunks = _split(answer, new.part, piece)
            if not await self.writer.take(new, piece.index, chunks):
                await self._note_wrong(peer, new.part, piece)
                return None
            self.lacking.get(new.part.name, set()).discard(peer)
            self.performance.gave(peer, (trio.current_time() - begun) / len(chunks))
            self.from_peers[peer] = self.from_peers.get(peer, 0) + len(answer)
            return len(chunks)
        except RecordError as error:
            await self._ban(peer, str(error))
        except Refused as error:
            if trio.current_time() - begun > PROMPT_S:
                self._back_off(peer, str(error))
            else:
                self.performance.refused_as_busy(peer, trio.current_time())
        except P2PError as error:
            self._note_lack(peer, new.part, error)
            # Who was named to us never said that it has these chunks.
            if not (is_named and _is_absent(error)):
                self._back_off(peer, str(error))
        return None

    def _came_from(self, peer: str) -> int:
        return sum(link.bytes_in for link in self.network.links() if link.peer == peer)

    def _note_lack(self, peer: str, part: Part, error: P2PError) -> None:
        if _is_absent(error):
            self.lacking.setdefault(part.name, set()).add(peer)

    def _back_off(self, peer: str, why: str) -> None:
        if backoff_s := self.performance.failed(peer, trio.current_time()):
            log.info("no chunks are requested from %s for %.0f s: %s", peer, backoff_s, why)

    async def _note_wrong(self, peer: str, part: Part, piece: ChunkRun) -> None:
        why = f"it sent wrong bytes for chunk {piece.index} of {part.name} or one of the next"
        if self.performance.sent_wrong(peer, part.name):
            await self._ban(peer, why)
        else:
            log.warning("no more chunks of %s are requested from %s: %s", part.name, peer, why)

    async def _ban(self, peer: str, why: str) -> None:
        log.warning("no chunks are requested from %s any more: %s", peer, why)
        self.performance.lied(peer)
        if self.hangs_up:
            await self.network.disconnect(peer, misbehaved=True)


def _is_absent(error: P2PError) -> bool:
    return isinstance(error, RemoteError) and error.code == wire.ABSENT


async def while_it_comes(came: Callable[[], int], silent_s: float, function: Callable[[], Awaitable[T]]) -> T:
    """Return what a function fetches, as long as the bytes that `came` are more than `SLOWEST_BYTES_PER_S`.

    Raises `DeadlineExceeded` if it was slower for `silent_s`, or what the function raises of `P2PError` and `AppError`.
    """
    found: list[T] = []
    failures: list[Exception] = []

    async def fetch() -> None:
        try:
            found.append(await function())
        except (P2PError, AppError) as error:
            failures.append(error)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetch)
        is_coming = True
        while is_coming:
            before = came()
            await trio.sleep(silent_s)
            # fewer than before: a link was replaced
            is_coming = not 0 <= came() - before < silent_s * SLOWEST_BYTES_PER_S
        nursery.cancel_scope.cancel()
    if failures:
        raise failures[0]
    if not found:
        raise DeadlineExceeded(f"next to nothing came for {silent_s:g} s")
    return found[0]


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
