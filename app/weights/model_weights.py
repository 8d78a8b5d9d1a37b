"""The weights of one swarm's model on a member: downloads what is needed, serves and announces what is here.

Holders of a part are found in the members' announcements (`app.membership`). Which parts are needed is decided by
hosting (`app.hosting`) and asking (`app.asker`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from app.core.network import Network
from app.core.reasons import Reason, because
from app.core.signal import Signal
from app.core.span import Span
from app.manifest.manifest import Manifest
from app.membership import Membership
from app.membership.table import GONE
from app.snapshot.views import WeightsView
from app.weights.chunk_server import ChunkServer
from app.weights.disk_space import DiskRoom, InUseMarker, claiming, make_room, room_beside_used
from app.weights.download import Download, DownloadProgress
from app.weights.extents import WeightsError
from app.weights.library import ENDS, Library, span_parts
from engine.sources.base import ModelSource
from engine.sources.layout import block_index

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger("shoal.weights")

ANNOUNCE_S = 1.0  # shortest time between two announcements of held blocks
LOOK_S = 20.0  # between two scans of the disk, where other processes may have deleted parts
MAX_SPANS = 16  # most spans of held blocks in an announcement


class ModelWeights:
    """Holds the parts of one swarm's model; `run` serves and announces them until cancelled."""

    def __init__(
        self,
        network: Network,
        swarm: Membership,
        manifest: Manifest,
        cache: Path,
        room: Callable[[], DiskRoom] = DiskRoom,
    ) -> None:
        self._network, self._swarm, self.manifest, self._cache, self._room = network, swarm, manifest, cache, room
        self.library = Library(cache, manifest)
        self.sharing = ChunkServer(self.library, self._is_member)
        self._fetches: dict[Download, frozenset[str]] = {}  # running download -> its parts
        self._from_peers = 0  # bytes received by finished downloads
        self._marker: InUseMarker | None = None
        self._hosted: frozenset[str] = frozenset()
        self._coming: Counter[str] = Counter()  # part -> running downloads that get it
        self._news = Signal()
        self._last_scan = WeightsView()
        self._announced: tuple[tuple[Span, ...], bool] = ((), False)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve parts to members and announce which are held here, until cancelled."""
        self.sharing.serve(self._network)
        name = f"{self._network.peer_id}-{self._swarm.record.id[:16]}"
        with claiming(self._cache, name) as self._marker:
            task_status.started()
            while True:
                seen = self._news.version
                await self._announce()
                with trio.move_on_after(LOOK_S):
                    await self._news.wait_beyond(seen)
                await trio.sleep(ANNOUNCE_S)

    async def need(self, names: Sequence[str], on_part: Callable[[str], None] = lambda name: None) -> ModelSource:
        """Return the model with these parts, after downloading the missing ones; waits while no member has them.

        `on_part` is called with the name of each downloaded part. Raises `WeightsError` if the disk is full or cannot
        be written.
        """
        wrong = await trio.to_thread.run_sync(self.library.check, names)
        self._coming.update(wrong)
        try:
            await self._mark_in_use({*ENDS, *self._hosted, *self._coming}, needed=bool(wrong))
            if wrong:
                await self._fetch(wrong, on_part)
        finally:
            self._coming.subtract(wrong)
            self._coming += Counter()  # drops entries whose count is 0
        return await trio.to_thread.run_sync(self.library.source, names)

    async def fitting(self, span: Span) -> Span | None:
        """Return the longest part of a span whose blocks are on the disk or fit there; None if no block does."""
        return await trio.to_thread.run_sync(self._fitting, span)

    def host(self, names: Iterable[str]) -> None:
        """Keep these parts from eviction, from the next `need` on, instead of those that were hosted before.

        Besides them, only what every reply of this node needs (`ENDS`) and what is being downloaded is kept.
        """
        self._hosted = frozenset(names)

    def progress(self, names: Iterable[str]) -> DownloadProgress | None:
        """Return the progress of the latest running download of any of these parts; None if there is none."""
        wanted = set(names)
        found = [fetch.progress for fetch, parts in self._fetches.items() if not parts.isdisjoint(wanted)]
        return found[-1] if found else None

    def trouble(self) -> Reason | None:
        """Return why running downloads do not go on: nobody gives these parts; None if they do, or none runs."""
        waiting = [fetch.progress for fetch in self._fetches if fetch.progress.wanted]
        if not waiting:
            return None
        names = {name for progress in waiting for name in progress.wanted}
        wanted = [part.name for part in self.manifest.parts if part.name in names]
        who = f"no member that is here has {part_words(wanted)}"
        if any(progress.is_refused for progress in waiting):
            who = f"the members that have {part_words(wanted)} do not send them"
        gone = self.library.gone(wanted)
        return because("model_gone", f"{gone} is gone, and {who}") if gone else because("weights_wanted", who)

    def view(self) -> WeightsView:
        """Return the figures for the snapshot; those of the disk are from the last scan, up to `LOOK_S` old."""
        received = self._from_peers + sum(_received(fetch) for fetch in self._fetches)
        return dataclasses.replace(
            self._last_scan,
            from_peers_bytes=received,
            giving=self.sharing.receivers(),
            given_bytes=self.sharing.total_bytes,
        )

    def _scan(self) -> frozenset[str]:
        """Read from disk which parts are held, keep the figures for `view`, and return their names."""
        held = self.library.held()
        parts = self.manifest.parts
        self._last_scan = WeightsView(
            parts_total=len(parts),
            parts_held=len(held),
            parts_verified=len(held),
            bytes_total=self.manifest.size_bytes,
            bytes_held=sum(part.size_bytes for part in parts if part.name in held),
            cache_bytes=sum(size for _, size in self.library.files.names()),
            cache_limit_bytes=self._room().limit_bytes,
        )
        return held

    # --- within -------------------------------------------------------------------------------------------------------

    async def _fetch(self, names: Sequence[str], on_part: Callable[[str], None]) -> None:
        await trio.to_thread.run_sync(self._make_room, list(self._coming))
        fetching = Download(self._network, self.library, self.sharing, self._holders, homes=self._swarm.homes)
        self._fetches[fetching] = frozenset(names)

        def on_part_stored(name: str) -> None:
            self._news.notify()
            on_part(name)

        try:
            await fetching.fetch(names, on_part_stored)
        finally:
            del self._fetches[fetching]
            self._from_peers += _received(fetching)

    async def _mark_in_use(self, names: Iterable[str], *, needed: bool) -> None:
        """List the parts in use; raises `WeightsError` if that fails and it is `needed`, because some are to come."""
        roots = [self.manifest.by_name[name].root for name in names]
        try:
            if self._marker is not None:
                await trio.to_thread.run_sync(self._marker.replace, roots)
        except WeightsError as error:
            if needed:
                raise
            log.warning("another node of this machine may remove weights that this one uses: %s", error)

    def _make_room(self, names: Iterable[str]) -> None:
        """Evict until the rest of all running downloads fits, less the bytes they have written already."""
        make_room(self._cache, sum(self._left_to_write(names)), self._room())

    def _left_to_write(self, names: Iterable[str]) -> list[int]:
        """Return the bytes of each of these parts that downloads have not written yet."""
        on_disk = dict(self.library.files.names())
        parts = [self.manifest.by_name[name] for name in names]
        return [max(0, part.size_bytes - on_disk.get(part.root.hex(), 0)) for part in parts]

    def _fitting(self, span: Span) -> Span | None:
        names, held = span_parts(span.start, span.stop), self.library.held()
        others = sum(self._left_to_write(name for name in self._coming if name not in names))
        room_bytes = max(0, room_beside_used(self._cache, self._room()) - others)
        left = zip(names, self._left_to_write(names), strict=True)
        return longest_run(span.start, [0 if name in held else size for name, size in left], room_bytes)

    def _is_member(self, peer: str) -> bool:
        state = self._swarm.table.state(peer)
        return state is not None and state not in GONE

    def _holders(self, part: str) -> list[str]:
        """Return the present members that announce a part; those that only others tell of may not exist."""
        block = block_index(part)
        return [
            announced.peer
            for announced in self._swarm.announcements()
            if (announced.holds_ends if block is None else _within(block, announced.held))
        ]

    async def _announce(self) -> None:
        held = await trio.to_thread.run_sync(self._scan)
        blocks = sorted(index for name in held if (index := block_index(name)) is not None)
        spans, holds_ends = runs(blocks)[:MAX_SPANS], held.issuperset(ENDS)
        if (spans, holds_ends) != self._announced:
            self._announced = (spans, holds_ends)
            self._swarm.announce(held=spans, holds_ends=holds_ends)


def runs(blocks: Sequence[int]) -> tuple[Span, ...]:
    """Group sorted block numbers into spans, the longest first."""
    spans: list[Span] = []
    for block in blocks:
        if spans and spans[-1].stop == block:
            spans[-1] = Span(spans[-1].start, block + 1)
        else:
            spans.append(Span(block, block + 1))
    return tuple(sorted(spans, key=lambda span: (-len(span), span.start)))


def longest_run(first: int, sizes: Sequence[int], most: int) -> Span | None:
    """Return the most consecutive blocks, of those from `first` on, whose sizes add up to `most` or less.

    Of several that are as long, the smallest; None if no block fits.
    """
    start, total = 0, 0
    best: tuple[int, int, Span] | None = None
    for stop, size in enumerate(sizes, 1):
        total += size
        while total > most:
            total -= sizes[start]
            start += 1
        if start < stop and (best is None or (stop - start, -total) > best[:2]):
            best = (stop - start, -total, Span(first + start, first + stop))
    return None if best is None else best[2]


def part_words(names: Sequence[str]) -> str:
    """Name parts for the user, blocks by their spans: "blocks 0:8, the embedding and the head"."""
    blocks = sorted(index for name in names if (index := block_index(name)) is not None)
    spans = sorted(runs(blocks), key=lambda span: span.start)
    shown = ", ".join(map(str, spans[:MAX_SPANS])) + ", …" * (len(spans) > MAX_SPANS)
    words = [f"blocks {shown}"] if spans else []
    words += [f"the {name}" for name in names if block_index(name) is None]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _within(block: int, spans: Collection[Span]) -> bool:
    return any(block in span for span in spans)


def _received(fetching: Download) -> int:
    return sum(fetching.progress.from_peers.values())


__all__ = ["ENDS", "ModelWeights", "runs", "span_parts"]
