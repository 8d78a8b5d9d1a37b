"""Getting parts from peers: several at once, every chunk checked on arrival, whoever lies or dawdles left out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from app.core.network import Network
from app.manifest.manifest import Part
from app.manifest.merkle import leaf_hash
from app.weights.chunk_client import CHUNK_S, ChunkClient
from app.weights.chunk_schedule import ChunkQueue, ChunkRun, PeerPerformance
from app.weights.chunk_server import ChunkServer
from app.weights.chunk_writer import ChunkWriter
from app.weights.extents import WeightsError, chunk_length
from app.weights.library import Library
from app.weights.part_store import NewPart
from app.weights.wire import MAX_RUN

MAX_PEERS = 8
WINDOW = 2  # pieces asked from one peer at once
LOOK_AHEAD = 48  # chunks that shall be ready to be asked for: the next part is begun in time
LATE_S = 10.0
LOOK_AGAIN_S = 1.0
CHOOSE_S = 0.05  # whom to ask is decided no more often than this
NEXT_ASKED_S = 1.0  # after which another one is asked for a part's hashes as well


@dataclass
class DownloadProgress:
    """How far a fetch is."""

    bytes_total: int = 0
    bytes_done: int = 0
    parts_total: int = 0
    parts_done: int = 0
    from_peers: dict[str, int] = field(default_factory=dict)  # bytes that came from each
    wanted: str = ""  # a part that nobody who is here has


class Download:
    """Gets parts of one model; `fetch` may run once at a time."""

    def __init__(
        self, network: Network, library: Library, sharing: ChunkServer, holders: Callable[[str], Sequence[str]]
    ) -> None:
        self._network, self._library, self._sharing, self._holders = network, library, sharing, holders
        self._performance = PeerPerformance()
        self._queue = self._new_work()
        self._coming: list[Part] = []  # not begun yet
        self._open: dict[str, NewPart] = {}
        self._busy: dict[str, int] = {}  # peer -> tasks that ask it
        self._chosen: dict[str, set[str]] = {}  # peer -> parts to ask it for
        self._chosen_at = 0.0
        self._failure: WeightsError | None = None
        self._news = trio.Event()
        self._nursery: trio.Nursery
        self._asking: ChunkClient
        self._on_part: Callable[[str], None] = lambda name: None
        self.progress = DownloadProgress()

    async def fetch(self, names: Sequence[str], on_part: Callable[[str], None] = lambda name: None) -> None:
        """Get these parts, in about this order; waits for as long as nobody has one.

        Raises `WeightsError` where the disk refuses. `on_part` hears of each part that is whole.
        """
        parts = [self._library.manifest.by_name[name] for name in names]
        self.progress = DownloadProgress(sum(part.size_bytes for part in parts), parts_total=len(parts))
        self._on_part, self._failure = on_part, None
        missing = set(self._library.missing(names))
        self._coming = [part for part in parts if part.name in missing]
        for part in parts:
            if part.name not in missing:
                self._count_part(part, part.size_bytes)
        try:
            with self._sharing.following(self._is_coming):
                async with ChunkWriter.opened() as writer, trio.open_nursery() as self._nursery:
                    self._asking = ChunkClient(
                        self._network, self._sharing, writer, self._performance, self.progress.from_peers
                    )
                    try:
                        await self._run_until_complete()
                    except WeightsError as error:
                        self._failure = error
                    self._nursery.cancel_scope.cancel()
        finally:
            for new in self._open.values():
                self._library.abandon(new)
            self._open.clear()
            self._chosen.clear()
            self._queue = self._new_work()
        if self._failure is not None:
            raise self._failure

    async def _run_until_complete(self) -> None:
        while (self._coming or self._open) and self._failure is None:
            while self._coming and self._queue.waiting < LOOK_AHEAD:
                if not await self._begin():
                    break
            self._start_workers()
            with trio.move_on_after(LOOK_AGAIN_S):
                await self._news.wait()
            self._news = trio.Event()

    # --- parts --------------------------------------------------------------------------------------------------------

    async def _begin(self) -> bool:
        """Begin with the first part that somebody has; False where nobody has any."""
        for part in self._coming:
            leaves = await trio.to_thread.run_sync(self._library.leaves, part) or await self._ask_leaves(part)
            if leaves is None:
                self.progress.wanted = part.name
                continue
            self._coming.remove(part)
            self.progress.wanted = ""
            new = await trio.to_thread.run_sync(self._library.open_new, part, leaves)
            self._open[part.name] = new
            missing = new.missing()
            self._queue.add(part.name, missing)
            if not missing:
                await self._finish(part)
            else:
                self.progress.bytes_done += part.size_bytes - _size_of(part, missing)
                self._start_workers()
            return True
        return False

    async def _ask_leaves(self, part: Part) -> tuple[bytes, ...] | None:
        """The hashes of a part's chunks from whoever answers first; the silent are not waited for."""
        found: list[tuple[bytes, ...]] = []
        answered = trio.Event()
        pace_s = self._performance.pace_s
        asked = sorted(self._shuffled(self._usable(part.name)), key=lambda peer: pace_s.get(peer, CHUNK_S))
        async with trio.open_nursery() as nursery:

            async def ask(peer: str) -> None:
                leaves = await self._asking.leaves(peer, part)
                if leaves is not None:
                    found.append(leaves)
                    nursery.cancel_scope.cancel()
                answered.set()

            for peer in asked:
                answered = trio.Event()
                nursery.start_soon(ask, peer)
                with trio.move_on_after(NEXT_ASKED_S):
                    await answered.wait()
        return found[0] if found else None

    async def _finish(self, part: Part) -> None:
        await trio.to_thread.run_sync(self._library.finish, self._open[part.name])
        del self._open[part.name]
        self._count_part(part, 0)
        self._on_part(part.name)
        self._news.set()

    def _count_part(self, part: Part, size: int) -> None:
        self.progress.parts_done += 1
        self.progress.bytes_done += size

    # --- peers --------------------------------------------------------------------------------------------------------

    def _usable(self, part: str) -> list[str]:
        now = trio.current_time()
        return [peer for peer in self._holders(part) if self._performance.is_usable(peer, now)]

    def _start_workers(self) -> None:
        """Ask as many peers for as many pieces as is good."""
        parts_of: dict[str, set[str]] = {}
        for name in self._open:
            for peer in self._usable(name):
                parts_of.setdefault(peer, set()).add(name)
        chosen = self._performance.choose(self._shuffled(parts_of), MAX_PEERS)
        self._chosen = {peer: parts_of[peer] for peer in chosen}
        self._chosen_at = trio.current_time()
        for peer in chosen:
            while self._busy.get(peer, 0) < WINDOW and (piece := self._next_from(peer)) is not None:
                self._busy[peer] = self._busy.get(peer, 0) + 1
                self._nursery.start_soon(self._download_from, peer, piece)

    def _shuffled(self, peers: Iterable[str]) -> list[str]:
        """In an order of this node's own that stays the same: no name is asked first everywhere."""
        return sorted(peers, key=lambda peer: leaf_hash(f"{self._network.peer_id} {peer}".encode()))

    def _next_from(self, peer: str) -> ChunkRun | None:
        now = trio.current_time()
        if peer not in self._chosen or not self._performance.is_usable(peer, now):
            return None
        return self._queue.take(peer, self._chosen[peer], late_before=now - LATE_S, now=now)

    async def _download_from(self, peer: str, piece: ChunkRun | None) -> None:
        """Get one piece after the other from a peer, for as long as it is among those to ask."""
        try:
            while piece is not None and self._failure is None:
                await self._get(peer, piece)
                if trio.current_time() - self._chosen_at > CHOOSE_S:
                    self._start_workers()
                piece = self._next_from(peer)
        except WeightsError as error:
            self._failure = error
        finally:
            self._busy[peer] -= 1
        self._news.set()

    async def _get(self, peer: str, piece: ChunkRun) -> None:
        new = self._open.get(piece.part)
        count = None if new is None else await self._asking.chunks(peer, new, piece)
        if new is None or count is None:
            self._queue.failed(piece, peer)
            self._news.set()
            return
        if not self._queue.complete(piece, count):
            return  # somebody else was quicker
        self.progress.bytes_done += _size_of(new.part, range(piece.index, piece.index + count))
        self._sharing.arrived()
        if self._queue.is_over(piece.part):
            await self._finish(new.part)
        elif self._coming and self._queue.waiting < LOOK_AHEAD:
            self._news.set()

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _is_coming(self, root: bytes, index: int) -> bool:
        part = self._library.part(root)
        return part is not None and part.name in self._open and self._queue.is_coming(part.name, index)

    def _new_work(self) -> ChunkQueue:
        return ChunkQueue(random.Random(self._network.peer_id), MAX_RUN)


def _size_of(part: Part, chunks: Sequence[int]) -> int:
    return sum(chunk_length(part.size_bytes, index) for index in chunks)
