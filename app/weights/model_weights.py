"""One model's parts for a node that is in its swarm: what is here, what is on its way, and what others are given.

Who has a part is known from announcements; what this node has, it announces.
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
from app.core.span import Span
from app.manifest.manifest import Manifest
from app.membership import Membership
from app.membership.table import GONE
from app.snapshot.views import WeightsView
from app.weights.chunk_server import ChunkServer
from app.weights.disk_space import DiskRoom, InUseMarker, claiming, make_room
from app.weights.download import Download, DownloadProgress
from app.weights.library import ENDS, Library, span_parts
from engine.sources.base import ModelSource
from engine.sources.layout import block_index

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger("shoal.weights")

ANNOUNCE_S = 1.0  # between two announcements of what has come meanwhile
LOOK_S = 20.0  # between two looks at the disk, from which others may have taken something
MAX_SPANS = 16  # of an announcement


class ModelWeights:
    """The parts of one swarm's model; `run` until cancelled."""

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
        self._fetches: dict[Download, frozenset[str]] = {}  # which parts each gets
        self._from_peers = 0
        self._claim: InUseMarker | None = None
        self._hosted: set[str] = set()
        self._coming: Counter[str] = Counter()  # in how many fetches
        self._news = trio.Event()
        self._seen = WeightsView()
        self._said: tuple[tuple[Span, ...], bool] = ((), False)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Give parts to members, and tell them what is here."""
        self.sharing.serve(self._network)
        with claiming(self._cache, self._network.peer_id) as self._claim:
            task_status.started()
            while True:
                await self._announce()
                with trio.move_on_after(LOOK_S):
                    await self._news.wait()
                self._news = trio.Event()
                await trio.sleep(ANNOUNCE_S)

    async def need(
        self, names: Sequence[str], on_part: Callable[[str], None] = lambda name: None, *, hosted: bool = False
    ) -> ModelSource:
        """The model with these parts, fetched from members where they are not here; waits until somebody has them.

        Raises `WeightsError` where they cannot be kept.
        """
        wrong = await trio.to_thread.run_sync(self.library.check, names)
        if hosted:
            self._hosted.update(names)
        self._coming.update(wrong)
        try:
            await trio.to_thread.run_sync(self._claim_parts, self._hosted | set(self._coming))
            if wrong:
                await self._fetch(wrong, on_part)
        finally:
            self._coming.subtract(wrong)
            self._coming += Counter()  # without those that come no more
        return await trio.to_thread.run_sync(self.library.source, names)

    def release(self, names: Iterable[str]) -> None:
        """These parts are hosted no longer, and may go when the disk is full."""
        self._hosted.difference_update(names)

    def progress(self, names: Iterable[str]) -> DownloadProgress | None:
        """How far the latest fetch of some of these parts is, while one is under way."""
        wanted = set(names)
        found = [fetch.progress for fetch, parts in self._fetches.items() if not parts.isdisjoint(wanted)]
        return found[-1] if found else None

    def view(self) -> WeightsView:
        """What a person sees of it; the disk was looked at a moment ago."""
        came = self._from_peers + sum(_received(fetch) for fetch in self._fetches)
        giving = self.sharing
        return dataclasses.replace(
            self._seen, from_peers_bytes=came, giving=giving.receivers(), given_bytes=giving.total_bytes
        )

    def _look(self) -> frozenset[str]:
        """What lies on the disk now."""
        held = self.library.held()
        parts = self.manifest.parts
        self._seen = WeightsView(
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
        fetching = Download(self._network, self.library, self.sharing, self._holders)
        self._fetches[fetching] = frozenset(names)

        def came(name: str) -> None:
            self._news.set()
            on_part(name)

        try:
            await fetching.fetch(names, came)
        finally:
            del self._fetches[fetching]
            self._from_peers += _received(fetching)

    def _claim_parts(self, names: Iterable[str]) -> None:
        if self._claim is not None:
            self._claim.hold([self.manifest.by_name[name].root for name in names])

    def _make_room(self, names: Iterable[str]) -> None:
        """For all that is on its way, whoever asked for it, less what has come of it."""
        on_disk = dict(self.library.files.names())
        coming = [self.manifest.by_name[name] for name in names]
        wanted = sum(max(0, part.size_bytes - on_disk.get(part.root.hex(), 0)) for part in coming)
        make_room(self._cache, wanted, self._room())

    def _is_member(self, peer: str) -> bool:
        state = self._swarm.table.state(peer)
        return state is not None and state not in GONE

    def _holders(self, part: str) -> list[str]:
        """Members that say they have a part; those that were heard from most lately answer soonest."""
        block = block_index(part)
        return [
            member.peer
            for member in self._swarm.members()
            if member.present
            and (member.announcement.holds_ends if block is None else _within(block, member.announcement.held))
        ]

    async def _announce(self) -> None:
        held = await trio.to_thread.run_sync(self._look)
        blocks = sorted(index for name in held if (index := block_index(name)) is not None)
        said = (runs(blocks)[:MAX_SPANS], held.issuperset(ENDS))
        if said != self._said:
            self._said = said
            self._swarm.announce(held=said[0], holds_ends=said[1])


def runs(blocks: Sequence[int]) -> tuple[Span, ...]:
    """Sorted numbers as spans, the longest first."""
    spans: list[Span] = []
    for block in blocks:
        if spans and spans[-1].stop == block:
            spans[-1] = Span(spans[-1].start, block + 1)
        else:
            spans.append(Span(block, block + 1))
    return tuple(sorted(spans, key=lambda span: (-len(span), span.start)))


def _within(block: int, spans: Collection[Span]) -> bool:
    return any(block in span for span in spans)


def _received(fetching: Download) -> int:
    return sum(fetching.progress.from_peers.values())


__all__ = ["ENDS", "ModelWeights", "runs", "span_parts"]
