"""Getting parts from peers: several at once, every chunk checked on arrival, whoever lies or dawdles left out."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from app.errors import RecordError
from app.merkle import CHUNK_BYTES, HASH_BYTES, chunk_count, leaf_hash, leaves_from
from app.model_manifest import Part
from app.network import Network, Priority
from app.weights import wire
from app.weights.extents import WeightsError, chunk_length
from app.weights.library import Library
from app.weights.part_files import NewPart
from app.weights.sharing import Sharing
from app.weights.work import Piece, Work, choose_peers
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
ELSEWHERE_S = 10.0  # for a member that another one named: it may wait for the chunk itself
MISLED_S = 1.0  # what it costs to be sent to somebody who does not help
MISLED_AT_MOST = 3  # times in a row, after which a peer is told to give, not to name others
LEAVES_S = 5.0  # and as long as they take at the slowest pace
NEXT_ASKED_S = 1.0  # after which another one is asked as well


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
        self._failures: dict[str, int] = {}  # in a row
        self._pace_s: dict[str, float] = {}  # how long a chunk takes, by those who gave some
        self._misled: dict[str, int] = {}  # how often a peer named a member who did not help
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
        """The hashes of a part's chunks from whoever answers first; the silent are not waited for."""
        peers = self._usable(part.name)
        found: list[tuple[bytes, ...]] = []
        answered = trio.Event()
        asked = sorted(self._shuffled(peers), key=lambda peer: self._pace_s.get(peer, CHUNK_S))
        async with trio.open_nursery() as nursery:

            async def ask(peer: str) -> None:
                leaves = await self._leaves_of(peer, part)
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

    async def _leaves_of(self, peer: str, part: Part) -> tuple[bytes, ...] | None:
        timeout_s = LEAVES_S + chunk_count(part.size_bytes) * HASH_BYTES * CHUNK_S / CHUNK_BYTES
        begun = trio.current_time()
        try:
            raw = await self._network.call(peer, wire.LEAVES, part.root, timeout_s=timeout_s, priority=Priority.BULK)
            leaves = leaves_from(raw, size_bytes=part.size_bytes, root=part.root)
            self._note_pace(peer, trio.current_time() - begun)  # who answers here comes before those who are silent
            return leaves
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
        for peer in choose_peers(self._shuffled(parts_of), self._pace_s, MAX_PEERS):
            while self._busy.get(peer, 0) < WINDOW:
                piece = self._work.take(peer, parts_of[peer], late_before=now - LATE_S, now=now)
                if piece is None:
                    break
                self._busy[peer] = self._busy.get(peer, 0) + 1
                self._nursery.start_soon(self._get, peer, piece)

    def _shuffled(self, peers: Iterable[str]) -> list[str]:
        """In an order of this node's own that stays the same: no name is asked first everywhere."""
        return sorted(peers, key=lambda peer: leaf_hash(f"{self._network.peer_id} {peer}".encode()))

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
        answer = await self._call(peer, piece, new, tried=self._misled.get(peer, 0) >= MISLED_AT_MOST)
        if isinstance(answer, str):
            if self._may_ask(answer):
                begun = trio.current_time()
                given = await self._call(answer, piece, new, tried=True, timeout_s=ELSEWHERE_S)
                if isinstance(given, int):
                    self._misled.pop(peer, None)
                    return given
                if trio.current_time() - begun > MISLED_S:
                    self._misled[peer] = self._misled.get(peer, 0) + 1
            answer = await self._call(peer, piece, new, tried=True)
        if isinstance(answer, str):
            await self._accuse(peer, "it sends others round and round")
            return None
        return answer

    def _may_ask(self, peer: str) -> bool:
        shunned = self._shunned.get(peer, 0.0) > trio.current_time()
        return peer != self._network.peer_id and not shunned and self._sharing.is_member(peer)

    async def _call(
        self, peer: str, piece: Piece, new: NewPart, *, tried: bool, timeout_s: float | None = None
    ) -> int | str | None:
        """The size of what a peer gave, which is right and on the disk; or the member it names."""
        body, begun = wire.ChunkRequest(new.part.root, piece.index, tried).encode(), trio.current_time()
        try:
            raw = await self._network.call(
                peer, wire.CHUNK, body, timeout_s=timeout_s or CHUNK_S, priority=Priority.BULK
            )
            answer = wire.read_answer(raw)
            if isinstance(answer, str):
                return answer
            # Checked and written in one go: every change of threads costs a fast transfer more than the hash does.
            if not await trio.to_thread.run_sync(new.take, piece.index, answer, limiter=self._writers):
                raise RecordError(f"what it sent is not chunk {piece.index} of {piece.part}")
            self._note_pace(peer, trio.current_time() - begun)
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

    def _note_pace(self, peer: str, taken_s: float) -> None:
        self._pace_s[peer] = (3 * self._pace_s.get(peer, taken_s) + taken_s) / 4
        self._failures.pop(peer, None)

    def _shun(self, peer: str, why: str) -> None:
        """For twice as long each time: however many are silent, the others have their turn."""
        if self._shunned.get(peer, 0.0) > trio.current_time():
            return  # one failure of several calls at once
        failures = self._failures[peer] = self._failures.get(peer, 0) + 1
        shun_s = SHUN_S * 2.0 ** min(failures - 1, 10)
        log.info("parts are not asked from %s for %g s: %s", peer, shun_s, why)
        self._shunned[peer] = trio.current_time() + shun_s

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
