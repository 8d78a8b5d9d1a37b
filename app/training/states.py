"""States of jobs as parts by hash: a block's adapter and moments, kept on disk and exchanged in checked chunks.

The exchange is that of a model's parts (`app.weights`), under methods of its own, because the parts of a job come and
go with it. The adapters of replies travel in the same way (`app.training.reply_adapters`).
"""

from __future__ import annotations

import math
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from app.core.network import Network
from app.core.signal import Signal
from app.core.units import format_size
from app.manifest.manifest import Part
from app.manifest.merkle import CHUNK_BYTES, leaf_hash, root_of
from app.training.wire import StatePart
from app.weights.chunk_client import while_it_comes
from app.weights.chunk_server import ChunkServer
from app.weights.download import Download
from app.weights.extents import WeightsError
from app.weights.part_set import PartSet
from app.weights.wire import ChunkMethods
from engine.device.sensors import disk_free_bytes

METHODS = ChunkMethods("train.leaves", "train.chunk")
FETCH_S = 45.0  # until a holder that sends nothing is given up; a frozen one must not hold up a job for minutes
SILENT_S = 240.0  # the same for the patient, who count what was checked alone: a slow link takes long for a request
SLOWEST_BYTES_PER_S = 125_000  # so much longer is waited for large states


class StateStore:
    """The states that this node keeps, for its own jobs and for those of others; a state belongs to some runs."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        is_member: Callable[[str], bool],
        in_thread: Callable[..., Awaitable[Any]] | None = None,
        *,
        floor_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`floor_bytes` of the disk are left to others: the setting `disk_floor`."""
        shutil.rmtree(folder, ignore_errors=True)  # what a killed node has left
        self._network, self._folder, self._floor_bytes = network, folder, floor_bytes
        self._in_thread = in_thread or trio.to_thread.run_sync
        self._parts = PartSet(folder, (), "a training job")
        self._server = ChunkServer(self._parts, is_member, methods=METHODS)
        self._runs: dict[bytes, set[bytes]] = {}  # root -> runs that need it
        self._downloads: Counter[tuple[bytes, bytes]] = Counter()  # of a run's root, under way
        self._removing: set[bytes] = set()  # roots
        self._removed = Signal()
        self._is_member = is_member

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[StateStore]:
        """An empty store while the context is open, for states whose hashes and sizes a stranger names.

        Here they could be those of a job, which would then have another size, or wait for a download without end.
        """
        folder = self._folder / "apart" / secrets.token_hex(8)
        try:
            yield StateStore(self._network, folder, self._is_member, self._in_thread, floor_bytes=self._floor_bytes)
        finally:
            with trio.CancelScope(shield=True):
                await self._in_thread(partial(shutil.rmtree, folder, ignore_errors=True))

    @property
    def peer_id(self) -> str:
        """This node's peer id."""
        return self._network.peer_id

    def serve(self) -> None:
        """Answer requests of members for the states that are here."""
        self._server.serve(self._network)

    async def keep(self, run: bytes, data: bytes) -> StatePart:
        """Keep a state for a run; raises `WeightsError` if the disk cannot be written."""
        made: tuple[StatePart, list[bytes]] = await self._in_thread(part_of, data)
        state, leaves = made
        part = self._part(run, state)
        await self._removed.wait_for(lambda: state.root not in self._removing)
        if not self._parts.files.holds(part):
            await self._in_thread(self._parts.files.keep, part, leaves, data)
        self._add([part])
        return state

    async def fetch(
        self,
        run: bytes,
        states: Sequence[StatePart],
        holders: Sequence[str],
        gave: Counter[str] | None = None,
        *,
        is_patient: bool = False,
        waits: bool = False,
        arrived: Callable[[int], None] = lambda size: None,
    ) -> list[bytes]:
        """Return the bytes of states, all of them in memory; raises as `obtain` does."""
        await self.obtain(run, states, holders, gave, is_patient=is_patient, waits=waits, arrived=arrived)
        return [await self.read(state) for state in states]

    async def read(self, state: StatePart, some: range | None = None) -> bytes:
        """Return the bytes of a state that is here, or some of them; raises `WeightsError` if it is not."""
        data: bytes = await self._in_thread(self._parts.whole, _part(state), some)
        return data

    async def room(self) -> int:
        """Return how many bytes of the disk states may take, so that as many are left to others as should be."""
        free: int = await self._in_thread(disk_free_bytes, self._folder)
        return free - self._floor_bytes()

    def given_bytes(self, peer: str) -> int:
        """Return how many bytes of states a peer has fetched from here."""
        given = self._server.given.get(peer)
        return 0 if given is None else given.bytes

    def absent_bytes(self, states: Iterable[StatePart]) -> int:
        """Return how many bytes of these states are not here, each counted once."""
        parts = [_part(state) for state in set(states)]
        return sum(part.size_bytes for part in parts if not self._parts.files.holds(part))

    def present_bytes(self, states: Iterable[StatePart]) -> int:
        """Return how many bytes of these states are here or have come so far, each counted once."""
        return sum(self._parts.present_bytes(_part(state)) for state in set(states))

    async def require_room(self, size_bytes: int) -> None:
        """Raise `WeightsError` if so many bytes would leave less of the disk than is to stay free."""
        await self._in_thread(_require_room, self._folder, size_bytes, self._floor_bytes())

    def fetched_at(self, states: Iterable[StatePart]) -> float:
        """Return when those who fetched one of these states from here fetched something last; -inf if nobody did."""
        return max((self._server.asked_at(state.root) for state in states), default=-math.inf)

    async def obtain(
        self,
        run: bytes,
        states: Sequence[StatePart],
        holders: Sequence[str],
        gave: Counter[str] | None = None,
        *,
        is_patient: bool = False,
        waits: bool = False,
        arrived: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Keep states, downloaded from their holders to the disk as far as they are not here.

        What each holder has given, in bytes, is added to `gave`; meanwhile `arrived` is called with the size of what
        comes. Who `is_patient` waits for as long as they come, however slowly, but not for holders that do not have
        them, unless it `waits` for others: `holders` may grow meanwhile.

        Raises `WeightsError` if the disk cannot be written or no holder is a member, `trio.TooSlowError` if nobody
        sends them in time; to the patient, `PartsAbsent` and `DeadlineExceeded`.
        """
        parts = {state.root: self._part(run, state) for state in states}  # blocks may have equal states
        names = [part.name for part in parts.values()]

        def others(name: str = "") -> list[str]:
            return [peer for peer in holders if peer != self._network.peer_id and self._is_member(peer)]

        limit_s = FETCH_S + sum(state.size_bytes for state in states) / SLOWEST_BYTES_PER_S
        with trio.fail_after(math.inf if is_patient else limit_s):
            await self._removed.wait_for(lambda: self._removing.isdisjoint(parts))
            self._add(parts.values())
            if missing := self._parts.missing(names):
                if not others():
                    raise WeightsError(f"{missing[0]} is not here, and no member that has it is named")
                absent = [part.size_bytes for part in parts.values() if part.name in set(missing)]
                await self.require_room(sum(absent))
                under_way = [(run, root) for root in parts]
                self._downloads.update(under_way)
                try:
                    self._add(parts.values())  # another run may have named other sizes meanwhile
                    download = Download(
                        self._network, self._parts, self._server, others,
                        arrived=arrived, hangs_up=False, waits=waits or not is_patient,
                    )  # fmt: skip
                    if is_patient:
                        fetch = partial(download.fetch, names)
                        await while_it_comes(lambda: sum(download.progress.from_peers.values()), SILENT_S, fetch)
                    else:
                        await download.fetch(names)
                    if gave is not None:
                        gave.update(download.progress.from_peers)
                finally:
                    self._downloads.subtract(under_way)
                    self._downloads = +self._downloads
                self._add(parts.values())

    def _add(self, parts: Iterable[Part]) -> None:
        """Let these parts have the sizes named here; raises `WeightsError` if one is here and has another size.

        Runs may name different sizes of a part: a wrong one, which nobody has, must not stand in the way of the right
        one, neither before that one is here nor afterwards.
        """
        for part in parts:
            known = self._parts.part(part.root)
            if known is not None and known.size_bytes != part.size_bytes and self._parts.files.holds(known):
                raise WeightsError(f"{part.name} has {known.size_bytes} bytes, not {part.size_bytes}")
            self._parts.add(part)

    async def forget(self, run: bytes, keep: Sequence[StatePart] = ()) -> None:
        """Remove the states that no run needs any more but this one, except those to keep or on their way here."""
        needed = {state.root for state in keep}
        gone = set()
        for root, runs in list(self._runs.items()):
            if root not in needed and not self._downloads[run, root]:
                runs.discard(run)
            if not runs:
                del self._runs[root]
                self._parts.drop(root)
                self._server.asked_by.pop(root, None)
                gone.add(root)
        if gone:
            self._removing |= gone
            try:
                await self._in_thread(self._parts.files.remove, [root.hex() for root in gone])
            finally:
                self._removing -= gone
                self._removed.notify()

    def _part(self, run: bytes, state: StatePart) -> Part:
        part = _part(state)
        self._add([part])
        self._runs.setdefault(state.root, set()).add(run)
        return part


def _require_room(folder: Path, size_bytes: int, floor_bytes: int) -> None:
    missing = size_bytes + floor_bytes - disk_free_bytes(folder)
    if missing > 0:
        raise WeightsError(  # without the folder's name: owners of jobs are told
            f"no room on the disk for states of a training job: {format_size(size_bytes)} would leave less than "
            f"{format_size(floor_bytes)} free: free {format_size(missing)}, or lower disk_floor",
            code="disk_full",
        )


def _part(state: StatePart) -> Part:
    return Part(f"the state {state.root.hex()}", state.size_bytes, state.root)


def part_of(data: bytes) -> tuple[StatePart, list[bytes]]:
    """Return the part that some bytes are, and the hashes of its chunks."""
    leaves = [leaf_hash(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    return StatePart(root_of(leaves), len(data)), leaves
