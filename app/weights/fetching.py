"""Getting parts from peers: several at once, every chunk checked on arrival, whoever lies or dawdles left out."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from app.errors import RecordError
from app.merkle import leaves_from
from app.model_manifest import Part
from app.network import Network, Priority
from app.weights import wire
from app.weights.extents import WeightsError, chunk_length
from app.weights.library import Library
from app.weights.part_files import NewPart
from app.weights.sharing import Sharing
from app.weights.work import Piece, Work
from p2p.errors import P2PError, Refused, RemoteError

log = logging.getLogger("shoal.weights")

MAX_PEERS = 8
WINDOW = 6  # chunks asked from one peer at once
LOOK_AHEAD = 16  # chunks that shall be ready to be asked for: the next part is begun in time
CHUNK_S = 20.0  # 1 MiB at 50 kB/s: slower peers are left out
LATE_S = 5.0
LOOK_AGAIN_S = 1.0
SHUN_S = 60.0  # a peer that failed is asked again after this long; one that lied never
BUSY_S = 0.5


@dataclass
class Progress:
    """How far a fetch is."""

    bytes_total: int = 0
    bytes_done: int = 0
    parts_total: int = 0
    parts_done: int = 0
    from_peers: dict[str, int] = field(default_factory=dict)  # bytes that came from each
    wanted: str = ""  # a part that nobody who is here has


class Fetching:
    """Gets parts of one model; `fetch` may run once at a time."""

    def __init__(
        self, network: Network, library: Library, sharing: Sharing, holders: Callable[[str], Sequence[str]]
    ) -> None:
        self._network, self._library, self._sharing, self._holders = network, library, sharing, holders
        self._work = Work(random.Random(network.peer_id))
        self._open: dict[str, NewPart] = {}
        self._shunned: dict[str, float] = {}  # peer -> until when
        self._busy: dict[str, int] = {}  # peer -> requests under way
        self._failure: WeightsError | None = None
        self._news = trio.Event()
        self._nursery: trio.Nursery
        self._writers = trio.CapacityLimiter(2)
        self._on_part: Callable[[str], None] = lambda name: None
        self.progress = Progress()

    async def fetch(self, names: Sequence[str], on_part: Callable[[str], None] = lambda name: None) -> None:
        """Get these parts, in about this order; waits for as long as nobody has one.

        Raises `WeightsError` where the disk refuses. `on_part` hears of each part that is whole.
        """
        parts = [self._library.manifest.by_name[name] for name in names]
        self.progress = Progress(sum(part.size_bytes for part in parts), parts_total=len(parts))
        self._on_part, self._failure = on_part, None
        coming = [part for part in parts if part.name in set(self._library.missing(names))]
        for part in parts:
            if part not in coming:
                self._count_part(part, part.size_bytes)
        try:
            with self._sharing.following(self._is_coming):
                async with trio.open_nursery() as self._nursery:
                    try:
                        await self._pursue(coming)
                    except WeightsError as error:
                        self._failure = error
                    self._nursery.cancel_scope.cancel()
        finally:
            for new in self._open.values():
                self._library.abandon(new)
            self._open.clear()
            self._work = Work(random.Random(self._network.peer_id))
        if self._failure is not None:
            raise self._failure

    async def _pursue(self, coming: list[Part]) -> None:
        while (coming or self._open) and self._failure is None:
            while coming and self._work.waiting < LOOK_AHEAD:
                if not await self._begin(coming):
                    break
            self._employ()
            await self._wait_news()

    # --- parts --------------------------------------------------------------------------------------------------------

    async def _begin(self, coming: list[Part]) -> bool:
        """Begin with the first part that somebody has; False where nobody has any."""
        for part in coming:
            leaves = await trio.to_thread.run_sync(self._library.leaves, part) or await self._ask_leaves(part)
            if leaves is None:
                self.progress.wanted = part.name
                continue
            coming.remove(part)
            self.progress.wanted = ""
            new = await trio.to_thread.run_sync(self._library.open_new, part, leaves)
            self._open[part.name] = new
            missing = new.missing()
            self._work.add(part.name, missing)
            if not missing:
                await self._finish(part)
            else:
                self.progress.bytes_done += part.size_bytes - _size_of(part, missing)
            return True
        return False

    async def _ask_leaves(self, part: Part) -> tuple[bytes, ...] | None:
        for peer in self._usable(part.name):
            try:
                raw = await self._network.call(peer, wire.LEAVES, part.root, timeout_s=CHUNK_S, priority=Priority.BULK)
                return leaves_from(raw, size_bytes=part.size_bytes, root=part.root)
            except RecordError as error:
                await self._accuse(peer, str(error))
            except P2PError as error:
                self._shun(peer, str(error))
        return None

    async def _finish(self, part: Part) -> None:
        await trio.to_thread.run_sync(self._library.finish, self._open[part.name])
        del self._open[part.name]
        self._count_part(part, 0)
        self._on_part(part.name)
        self._wake()

    def _count_part(self, part: Part, size: int) -> None:
        self.progress.parts_done += 1
        self.progress.bytes_done += size

    # --- peers --------------------------------------------------------------------------------------------------------

    def _usable(self, part: str) -> list[str]:
        now = trio.current_time()
        return [peer for peer in self._holders(part) if self._shunned.get(peer, 0.0) <= now]

    def _employ(self) -> None:
        """Ask as many peers for as many chunks as is good."""
        parts_of: dict[str, set[str]] = {}
        for name in self._open:
            for peer in self._usable(name):
                parts_of.setdefault(peer, set()).add(name)
        now = trio.current_time()
        for peer in sorted(parts_of, key=lambda peer: (-self._busy.get(peer, 0), peer))[:MAX_PEERS]:
            while self._busy.get(peer, 0) < WINDOW:
                piece = self._work.take(peer, parts_of[peer], late_before=now - LATE_S, now=now)
                if piece is None:
                    break
                self._busy[peer] = self._busy.get(peer, 0) + 1
                self._nursery.start_soon(self._get, peer, piece)

    async def _get(self, peer: str, piece: Piece) -> None:
        try:
            await self._get_one(peer, piece)
        except WeightsError as error:
            self._failure = error
        finally:
            self._busy[peer] -= 1
        if self._failure is None:
            self._employ()
        self._wake()

    async def _get_one(self, peer: str, piece: Piece) -> None:
        new = self._open.get(piece.part)
        size = None if new is None else await self._ask(peer, piece, new)
        if new is None or size is None:
            self._work.failed(piece, peer)
            return
        if not self._work.came(piece):
            return  # somebody else was quicker
        self.progress.bytes_done += size
        self._sharing.arrived()
        if self._work.is_over(piece.part):
            await self._finish(new.part)

    async def _ask(self, peer: str, piece: Piece, new: NewPart) -> int | None:
        """Have a chunk from a peer, or from the member it names: its size; None where neither helps."""
        answer = await self._call(peer, piece, new, tried=False)
        if isinstance(answer, str):
            if answer != self._network.peer_id and self._sharing.is_member(answer):
                given = await self._call(answer, piece, new, tried=True)
                if isinstance(given, int):
                    return given
            answer = await self._call(peer, piece, new, tried=True)
        if isinstance(answer, str):
            await self._accuse(peer, "it sends others round and round")
            return None
        return answer

    async def _call(self, peer: str, piece: Piece, new: NewPart, *, tried: bool) -> int | str | None:
        """The size of what a peer gave, which is right and on the disk; or the member it names."""
        body = wire.ChunkRequest(new.part.root, piece.index, tried).encode()
        try:
            raw = await self._network.call(peer, wire.CHUNK, body, timeout_s=CHUNK_S, priority=Priority.BULK)
            answer = wire.read_answer(raw)
            if isinstance(answer, str):
                return answer
            # Checked and written in one go: every change of threads costs a fast transfer more than the hash does.
            if not await trio.to_thread.run_sync(new.take, piece.index, answer, limiter=self._writers):
                raise RecordError(f"what it sent is not chunk {piece.index} of {piece.part}")
            self.progress.from_peers[peer] = self.progress.from_peers.get(peer, 0) + len(answer)
            return len(answer)
        except RecordError as error:
            await self._accuse(peer, str(error))
        except Refused:
            self._shunned[peer] = max(self._shunned.get(peer, 0.0), trio.current_time() + BUSY_S)
        except RemoteError as error:
            if not (tried and error.code == wire.ABSENT):
                self._shun(peer, str(error))
        except P2PError as error:
            self._shun(peer, str(error))
        return None

    def _shun(self, peer: str, why: str) -> None:
        log.info("parts are not asked from %s for %g s: %s", peer, SHUN_S, why)
        self._shunned[peer] = max(self._shunned.get(peer, 0.0), trio.current_time() + SHUN_S)

    async def _accuse(self, peer: str, why: str) -> None:
        log.warning("%s is not asked for parts any more: %s", peer, why)
        self._shunned[peer] = float("inf")
        await self._network.disconnect(peer, misbehaved=True)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _is_coming(self, root: bytes, index: int) -> bool:
        part = self._library.part(root)
        return part is not None and part.name in self._open and self._work.is_coming(Piece(part.name, index))

    def _wake(self) -> None:
        self._news.set()

    async def _wait_news(self) -> None:
        with trio.move_on_after(LOOK_AGAIN_S):
            await self._news.wait()
        self._news = trio.Event()


def _size_of(part: Part, chunks: Sequence[int]) -> int:
    return sum(chunk_length(part.size_bytes, index) for index in chunks)
