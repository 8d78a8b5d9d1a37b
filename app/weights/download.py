"""Downloads parts of a set (`part_set`) from several peers at once, verifying every chunk on arrival.

Peers that send wrong data are excluded, first from the part concerned; slow and silent ones get a back-off
(`PeerPerformance`). The order of chunks is decided in `chunk_schedule`, a single request is made in `chunk_client`, and
files are written by `chunk_writer`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from app.core.network import Network
from app.core.signal import Signal
from app.manifest.manifest import Part
from app.manifest.merkle import leaf_hash
from app.weights.chunk_client import CHUNK_S, ChunkClient
from app.weights.chunk_schedule import ChunkQueue, ChunkRun, PeerPerformance, in_turns
from app.weights.chunk_server import ChunkServer
from app.weights.chunk_writer import ChunkWriter
from app.weights.extents import WeightsError, chunk_length
from app.weights.part_set import PartSet
from app.weights.part_store import NewPart
from app.weights.wire import MAX_RUN

MAX_PEERS = 8  # peers to download from at the same time
WINDOW = 2  # open requests to one peer
MAX_ELSEWHERE, MAX_AT_ONE = 8, 4  # open requests to members that holders redirect to: to all, and to one of them
ROOM_S = 0.25  # longest wait until one more may be open; then the holder is asked to send the chunks once more
LOOK_AHEAD = 48  # start the next part when fewer chunks than this are left to request
LATE_S = 10.0  # an open request older than this may be repeated to a second peer
LOOK_AGAIN_S = 1.0  # between two looks for peers while nothing happens
CHOOSE_S = 0.05  # shortest time between two choices of peers
NEXT_ASKED_S = 1.0  # wait for a part's leaves before asking a further peer in parallel
WAITS_S = 10.0  # with nobody to ask, after which the download is said to wait


class PartsAbsent(WeightsError):
    """None of the members that were to have a part has it any more."""


@dataclass
class DownloadProgress:
    """Progress of one download, in bytes and parts; parts that were here before count as done."""

    bytes_total: int = 0
    bytes_done: int = 0
    parts_total: int = 0
    parts_done: int = 0
    from_peers: dict[str, int] = field(default_factory=dict)  # peer -> bytes received
    wanted: tuple[str, ...] = ()  # parts that nobody gives, while nothing comes; empty as long as something may
    is_refused: bool = False  # some members say that they have one of these


class Download:
    """Downloads parts of one set; `fetch` must not run twice at the same time."""

    def __init__(
        self,
        network: Network,
        parts: PartSet,
        sharing: ChunkServer,
        holders: Callable[[str], Sequence[str]],
        *,
        homes: Callable[[], Mapping[str, str]] = dict,
        hangs_up: bool = True,
        waits: bool = True,
        arrived: Callable[[int], None] = lambda size: None,
    ) -> None:
        """`hangs_up` on peers that send wrong data; not if roots and sizes are the word of somebody who may lie.

        A root says nothing of a part's size, so with a wrong one the answers of honest peers do not fit either.
        It `waits` until somebody has a part; if not, a part that all holders say they lack is given up.
        `homes` has the home of each peer: their untried peers have turns, so that the silent ones of one machine,
        however many, hold up no other. `arrived` is called with the size of whatever has come and was checked.
        """
        self._network, self._parts, self._sharing, self._holders = network, parts, sharing, holders
        self._homes = homes
        self._hangs_up, self._waits, self._arrived = hangs_up, waits, arrived
        self._performance = PeerPerformance(random.Random(network.peer_id))
        self._queue = self._new_queue()
        self._pending: list[Part] = []  # not started yet
        self._open: dict[str, NewPart] = {}
        self._busy: dict[str, int] = {}  # peer -> open requests
        self._elsewhere = 0  # open requests to members that holders redirect to
        self._redirected: set[ChunkRun] = set()  # a holder has redirected these, and must send them the next time
        self._chosen: dict[str, set[str]] = {}  # peer -> parts to request from it
        self._chosen_at = 0.0
        self._failure: WeightsError | None = None
        self._waits_since: float | None = None  # nobody was left to ask
        self._news = Signal()
        self._nursery: trio.Nursery
        self._asking: ChunkClient
        self._on_part: Callable[[str], None] = lambda name: None
        self.progress = DownloadProgress()

    async def fetch(self, names: Sequence[str], on_part: Callable[[str], None] = lambda name: None) -> None:
        """Download these parts, roughly in this order.

        `on_part` is called with the name of each completed part. Raises `WeightsError` if the disk cannot be written,
        `PartsAbsent` if a part is given up.
        """
        parts = [self._parts.by_name[name] for name in names]
        self.progress = DownloadProgress(sum(part.size_bytes for part in parts), parts_total=len(parts))
        self._on_part, self._failure = on_part, None
        missing = set(self._parts.missing(names))
        self._pending = [part for part in parts if part.name in missing]
        for part in parts:
            if part.name not in missing:
                self._count_part(part, part.size_bytes)
        try:
            with self._sharing.following(self._is_coming):
                async with ChunkWriter.opened() as writer, trio.open_nursery() as self._nursery:
                    self._asking = ChunkClient(
                        self._network,
                        self._sharing,
                        writer,
                        self._performance,
                        self.progress.from_peers,
                        self._hangs_up,
                    )
                    try:
                        await self._run_until_complete()
                    except WeightsError as error:
                        self._failure = error
                    self._nursery.cancel_scope.cancel()
        finally:
            for new in self._open.values():
                self._parts.abandon(new)
            self._open.clear()
            self._chosen.clear()
            self._redirected.clear()
            self._queue = self._new_queue()
        if self._failure is not None:
            raise self._failure

    async def _run_until_complete(self) -> None:
        while (self._pending or self._open) and self._failure is None:
            seen = self._news.version
            if not any(self._busy.values()):
                await self._count_those_here()
            self._performance.retry((self._givers(part.name) for part in self._unfinished()), trio.current_time())
            while self._pending and self._needs_next_part():
                if not await self._start_part():
                    break
            self._start_workers()
            self._note_wait()
            if not self._waits:
                self._require_holders()
            with trio.move_on_after(LOOK_AGAIN_S):
                await self._news.wait_beyond(seen)

    def _unfinished(self) -> list[Part]:
        return [*self._pending, *(new.part for new in self._open.values())]

    def _note_wait(self) -> None:
        """Name the parts that nobody can be asked for, once it has been so for `WAITS_S` and nothing is under way.

        Holders that failed are asked again meanwhile; until they give something, that ends no wait.
        """
        now, failed = trio.current_time(), self._performance.has_failed
        is_idle = not any(count for peer, count in self._busy.items() if not failed(peer))
        givers = {part.name: self._givers(part.name) for part in self._unfinished()} if is_idle else {}
        wanted = tuple(
            name
            for name, peers in givers.items()
            if not any(self._performance.is_usable(peer, now) and not failed(peer) for peer in peers)
        )
        if not wanted:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        is_waiting = self._waits_since is not None and now - self._waits_since >= WAITS_S
        self.progress.wanted = wanted if is_waiting else ()
        self.progress.is_refused = any(self._holders(name) for name in self.progress.wanted)

    def _require_holders(self) -> None:
        for part in self._unfinished():
            if self._asking.lacking.get(part.name, set()).issuperset(self._givers(part.name)):
                raise PartsAbsent(f"nobody has {part.name} any more")

    # --- parts --------------------------------------------------------------------------------------------------------

    async def _count_those_here(self) -> None:
        """Count parts that came here in another way while no peer sends any, as from a disk that was mounted late."""
        parts = self._unfinished()
        missing = set(await trio.to_thread.run_sync(self._parts.missing, [part.name for part in parts]))
        for part in parts:
            if part.name in missing:
                continue
            new = self._open.pop(part.name, None)
            if new is None:
                self._pending.remove(part)
            else:
                self._queue.drop(part.name)
                self._parts.abandon(new)
            self._count_part(part, part.size_bytes if new is None else _size_of(part, new.missing()))
            self._on_part(part.name)

    async def _start_part(self) -> bool:
        """Start the first pending part whose leaves can be had; False if there is none."""
        for part in self._pending:
            leaves = await trio.to_thread.run_sync(self._parts.leaves, part) or await self._ask_leaves(part)
            if leaves is None:
                continue
            self._pending.remove(part)
            new = await trio.to_thread.run_sync(self._parts.open_new, part, leaves)
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
        """Return a part's leaves from the peer that answers first; a further peer is asked every `NEXT_ASKED_S`."""
        found: list[tuple[bytes, ...]] = []
        answered = Signal()
        pace_s = self._performance.pace_s
        asked = sorted(self._in_turns(self._usable(part.name)), key=lambda peer: pace_s.get(peer, CHUNK_S))
        async with trio.open_nursery() as nursery:

            async def ask(peer: str) -> None:
                leaves = await self._asking.leaves(peer, part)
                if leaves is not None:
                    found.append(leaves)
                    nursery.cancel_scope.cancel()
                answered.notify()

            for peer in asked:
                nursery.start_soon(ask, peer)
                with trio.move_on_after(NEXT_ASKED_S):
                    await answered.wait()
        return found[0] if found else None

    async def _finish(self, part: Part) -> None:
        await trio.to_thread.run_sync(self._parts.finish, self._open[part.name])
        del self._open[part.name]
        self._count_part(part, 0)
        self._on_part(part.name)
        self._news.notify()

    def _count_part(self, part: Part, size: int) -> None:
        self.progress.parts_done += 1
        self.progress.bytes_done += size

    def _needs_next_part(self) -> bool:
        """True if few chunks are left to request; those of parts that nobody can be asked for do not count."""
        return self._queue.waiting(name for name in self._open if self._usable(name)) < LOOK_AHEAD

    # --- peers --------------------------------------------------------------------------------------------------------

    def _usable(self, part: str) -> list[str]:
        now = trio.current_time()
        return [peer for peer in self._givers(part) if self._performance.is_usable(peer, now)]

    def _givers(self, part: str) -> list[str]:
        """List the members that say they have a part, without those that sent wrong chunks of it."""
        return [peer for peer in self._holders(part) if not self._performance.has_wrong(peer, part)]

    def _start_workers(self) -> None:
        """Choose up to `MAX_PEERS` peers, those that failed last, and keep up to `WINDOW` requests in flight with each.

        One with a slow or a new peer.
        """
        parts_of: dict[str, set[str]] = {}
        for name in self._open:
            for peer in self._usable(name):
                parts_of.setdefault(peer, set()).add(name)
        ordered = sorted(self._in_turns(parts_of), key=self._performance.has_failed)
        chosen = self._performance.choose(ordered, MAX_PEERS)
        self._chosen = {peer: parts_of[peer] for peer in chosen}
        self._chosen_at = trio.current_time()
        for peer in chosen:
            while (piece := self._next_from(peer)) is not None:
                self._nursery.start_soon(self._download_from, peer, piece)

    def _in_turns(self, peers: Iterable[str]) -> list[str]:
        """Sort peers by turns of their homes, of each home those first that have answered something.

        The order differs between nodes, so that they do not all start with the same peer.
        """

        def place(peer: str) -> tuple[bool, bytes]:
            drawn = leaf_hash(f"{self._network.peer_id} {peer}".encode())
            return peer not in self._performance.pace_s, drawn

        return in_turns(sorted(peers, key=place), self._homes())

    def _has_room(self, peer: str, window: int) -> bool:
        """True if one more request to a peer may be open: up to `window`, one to a slow peer."""
        return self._busy.get(peer, 0) < (1 if self._performance.is_slow(peer) else window)

    def _next_from(self, peer: str) -> ChunkRun | None:
        """Take a run to request from a peer, counted as open from now on; None if there is none for it."""
        now, is_new = trio.current_time(), self._performance.is_new(peer)
        is_over = self._failure is not None or peer not in self._chosen
        window = 1 if is_new else WINDOW
        if is_over or not self._has_room(peer, window) or not self._performance.is_usable(peer, now):
            return None
        at_most = 1 if is_new or self._performance.is_slow(peer) else MAX_RUN
        parts = {part for part in self._chosen[peer] if not self._performance.has_wrong(peer, part)}
        piece = self._queue.take(peer, parts, at_most=at_most, late_before=now - LATE_S, now=now)
        if piece is not None:
            self._busy[peer] = self._busy.get(peer, 0) + 1
        return piece

    async def _download_from(self, peer: str, piece: ChunkRun | None) -> None:
        """Request one run after another from a peer for as long as it is among the chosen."""
        while piece is not None:
            try:
                await self._get(peer, piece)
            except WeightsError as error:
                self._failure = error
            finally:
                self._busy[peer] -= 1
            if trio.current_time() - self._chosen_at > CHOOSE_S:
                self._start_workers()
            piece = self._next_from(peer)
        self._news.notify()

    async def _get(self, peer: str, piece: ChunkRun) -> None:
        new = self._open.get(piece.part)
        answer = None if new is None else await self._asking.chunks(peer, new, piece, tried=piece in self._redirected)
        if new is not None and isinstance(answer, str):
            self._redirected.add(piece)
            if await self._may_go_elsewhere(answer, peer, piece.part) and self._queue.redirect(piece, peer, answer):
                self._busy[answer] = self._busy.get(answer, 0) + 1
                self._elsewhere += 1
                self._nursery.start_soon(self._get_elsewhere, answer, new, piece, peer)
                return
            answer = await self._asking.chunks(peer, new, piece, tried=True)
        await self._take(peer, new, piece, answer if isinstance(answer, int) else None)

    async def _may_go_elsewhere(self, peer: str, named_by: str, part: str) -> bool:
        """True if a peer that a holder named may be asked, at once or within `ROOM_S`."""

        def may_ask() -> bool:
            return self._asking.may_ask(peer, part) and not self._performance.may_not_redirect(named_by)

        def has_room() -> bool:
            return self._elsewhere < MAX_ELSEWHERE and self._has_room(peer, MAX_AT_ONE)

        with trio.move_on_after(ROOM_S):
            await self._news.wait_for(lambda: has_room() or not may_ask())
        return has_room() and may_ask()

    async def _get_elsewhere(self, peer: str, new: NewPart, piece: ChunkRun, named_by: str) -> None:
        """Request a run from a member that a holder named, while that one sends others: it may be slow or silent."""
        try:
            count = await self._asking.chunks_elsewhere(peer, new, piece, named_by=named_by)
            await self._take(peer, new, piece, count)
        except WeightsError as error:
            self._failure = error
        finally:
            self._busy[peer] -= 1
            self._elsewhere -= 1
        self._news.notify()

    async def _take(self, peer: str, new: NewPart | None, piece: ChunkRun, count: int | None) -> None:
        """Count the chunks of a run that a peer has sent, or queue it again if there are none."""
        if new is None or count is None:
            self._queue.failed(piece, peer)
            self._news.notify()
            return
        if not self._queue.complete(piece, count):
            return  # a second peer was faster
        size = _size_of(new.part, range(piece.index, piece.index + count))
        self.progress.bytes_done += size
        self._arrived(size)
        self._sharing.arrived()
        if self._queue.is_over(piece.part):
            await self._finish(new.part)
        elif self._pending and self._needs_next_part():
            self._news.notify()

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _is_coming(self, root: bytes, index: int) -> bool:
        part = self._parts.part(root)
        return part is not None and part.name in self._open and self._queue.is_coming(part.name, index)

    def _new_queue(self) -> ChunkQueue:
        return ChunkQueue(random.Random(self._network.peer_id), MAX_RUN)


def _size_of(part: Part, chunks: Sequence[int]) -> int:
    return sum(chunk_length(part.size_bytes, index) for index in chunks)
