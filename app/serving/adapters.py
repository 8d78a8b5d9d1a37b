"""Adapters of sessions at a hop: fetched from their askers, loaded on the device, and dropped again.

Sessions of one asker share an adapter; another asker's sessions never do. Adapters that no session uses stay loaded
until others need their room. Few are on their way at a time: one that comes more slowly than it has to makes way for an
asker that has none on its way. How an adapter gets here is left to an `AdapterSource`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import trio

from app.core.compute import BlockRunner, Device
from app.core.errors import AppError
from app.core.signal import Signal
from app.core.span import Span
from app.core.units import format_size
from app.session.adapter_index import AdapterIndex, AdapterRef
from app.session.frame import HopError
from engine.errors import DeviceFull, EngineError
from p2p.errors import P2PError

log = logging.getLogger("shoal.sessions")

_TOO_LATE = HopError("busy", "the adapter came slowly, and others waited for its place", "adapters_full")
_GIVEN_UP = HopError("busy", "this node now hosts other blocks", "not_hosted")


class AdapterSource(Protocol):
    """Gets the parts of adapters from their askers; both methods raise `AppError`, `P2PError` or `TooSlowError`."""

    async def index(self, asker: str, adapter: AdapterRef) -> AdapterIndex:
        """Return an adapter's index."""

    async def vectors(self, asker: str, index: AdapterIndex, span: Span, arrived: Callable[[int], None]) -> list[bytes]:
        """Return the weights of these blocks; `arrived` is called with the bytes that have come, meanwhile."""


@dataclass(frozen=True)
class AdapterLimits:
    """Limits of the adapters at one hop."""

    asker_bytes: int = 256 * 2**20  # of the adapters of one asker, as they are sent
    total_bytes: int = 512 * 2**20  # of all of them
    loading: int = 8  # at the same time
    asker_loading: int = 2  # of one asker
    fetch_s: float = 280.0
    index_s: float = 30.0  # of these until the index is here
    late_s: float = 20.0  # behind `bytes_per_s`: makes way for an asker with none on its way, which waits twice as long
    bytes_per_s: float = 125_000.0


class AdapterKey(NamedTuple):
    """Names an adapter at this hop."""

    asker: str
    root: bytes
    span: Span


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter on this hop's device."""

    runner: BlockRunner
    weights: Any  # for `BlockRunner.open`
    size_bytes: int
    users: int = 0  # sessions, and orders that wait to be carried out
    used_at: float = 0.0


@dataclass(eq=False)
class _Load:
    """An adapter on its way."""

    begun_at: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    arrived_bytes: float = 0.0
    makes_way: bool = False

    def arrived(self, size: float) -> None:
        """Count bytes that have come."""
        self.arrived_bytes += size

    @property
    def why_cancelled(self) -> HopError:
        """Why it is cancelled, if it is."""
        return _TOO_LATE if self.makes_way else _GIVEN_UP

    def late_s(self, now: float, bytes_per_s: float) -> float:
        """By how much it has taken longer than what arrived would take at this rate."""
        return now - self.begun_at - self.arrived_bytes / bytes_per_s


class HopAdapters:
    """The adapters at one hop; `make_way` ends resting sessions that hold one, of one asker or of all."""

    def __init__(
        self,
        device: Device,
        source: AdapterSource | None,
        limits: AdapterLimits,
        make_way: Callable[[str | None], Awaitable[None]],
    ) -> None:
        self._device, self._source, self._limits, self._make_way = device, source, limits, make_way
        self._loaded: dict[AdapterKey, LoadedAdapter] = {}
        self._loading: dict[AdapterKey, _Load] = {}
        self._in_line: Counter[str] = Counter()  # askers without any of these that wait for a place
        self._over = Signal()  # a load is over, or its blocks are given up
        self._generation = 0  # of the blocks that adapters are loaded for
        self._reserved: dict[AdapterKey, int] = {}  # bytes of adapters on their way

    @property
    def is_served(self) -> bool:
        """True if sessions with adapters are served here."""
        return self._source is not None

    @property
    def total_bytes(self) -> int:
        """Bytes of all adapters that are loaded or on their way."""
        return sum(self._reserved.values()) + sum(one.size_bytes for one in self._loaded.values())

    def _bytes_of(self, asker: str) -> int:
        on_their_way = sum(size for key, size in self._reserved.items() if key.asker == asker)
        return on_their_way + sum(one.size_bytes for key, one in self._loaded.items() if key.asker == asker)

    def clear(self) -> None:
        """Drop all adapters, those on their way too: the blocks that they were loaded for are given up."""
        self._loaded.clear()
        self._generation += 1
        for load in self._loading.values():
            load.scope.cancel()
        self._over.notify()

    def held(self, key: AdapterKey, runner: BlockRunner) -> LoadedAdapter | None:
        """Return an adapter that is loaded for these blocks, held until `release`; None if it is not."""
        found = self._loaded.get(key)
        if found is None or found.runner is not runner:
            return None
        found.users += 1
        return found

    def release(self, adapter: LoadedAdapter | None) -> None:
        """Note that a session or an order does not use an adapter any more."""
        if adapter is not None:
            adapter.users -= 1
            adapter.used_at = trio.current_time()

    async def load(self, key: AdapterKey, ref: AdapterRef, runner: BlockRunner) -> LoadedAdapter | HopError:
        """Fetch and load an adapter unless it is here, and hold it until `release`; or say why not.

        Waits for other loads of the same asker, and for a short time for those of others if it has none.
        """
        generation, until = self._generation, trio.current_time() + 2 * self._limits.late_s
        while True:
            await self._over.wait_for(lambda: generation != self._generation or self._may_load(key))
            if generation != self._generation:
                return _GIVEN_UP
            if (found := self.held(key, runner)) is not None:
                return found
            if self._has_place(key.asker):
                break
            if self._loads_of(key.asker) or trio.current_time() >= until:
                return HopError("busy", "too many adapters are on their way to this node", "adapters_full")
            await self._wait_in_line(key.asker)
        load = self._loading[key] = _Load(trio.current_time())
        try:
            with load.scope, trio.fail_after(self._limits.fetch_s):
                return await self._load(key, ref, runner)
            return load.why_cancelled
        except DeviceFull as error:
            return HopError("busy", f"no room for the adapter: {error}", "adapters_full")
        except trio.TooSlowError:
            return HopError("refused", "the adapter did not arrive in time", "adapter_refused")
        except (AppError, EngineError, P2PError) as error:
            return HopError("refused", f"the adapter cannot be loaded: {error}", "adapter_refused")
        except Exception as error:  # torch raises errors of every kind; they must cost no other session
            log.exception("an adapter could not be loaded")
            return HopError("refused", f"{type(error).__name__} while loading the adapter", "adapter_refused")
        finally:
            del self._loading[key]
            self._over.notify()

    def _may_load(self, key: AdapterKey) -> bool:
        return key not in self._loading and self._loads_of(key.asker) < self._limits.asker_loading

    def _loads_of(self, asker: str) -> int:
        return sum(one.asker == asker for one in self._loading)

    def _has_place(self, asker: str) -> bool:
        """True if another adapter may be on its way; for an asker that has none, the latest one may make way."""
        limits = self._limits
        coming = [load for load in self._loading.values() if not load.makes_way]
        if self._loads_of(asker):
            return len(coming) + len(self._in_line) < limits.loading
        if len(coming) < limits.loading:
            return True
        now = trio.current_time()
        latest = max(coming, key=lambda load: load.late_s(now, limits.bytes_per_s))
        if latest.late_s(now, limits.bytes_per_s) < limits.late_s:
            return False
        latest.makes_way = True
        latest.scope.cancel()
        return True

    async def _wait_in_line(self, asker: str) -> None:
        """Wait until a load is over, or for a moment: one may be late by then."""
        self._in_line[asker] += 1
        try:
            with trio.move_on_after(self._limits.late_s / 5):
                await self._over.wait()
        finally:
            self._in_line -= Counter([asker])

    async def _load(self, key: AdapterKey, ref: AdapterRef, runner: BlockRunner) -> LoadedAdapter | HopError:
        assert self._source is not None, "a hop without a source refuses adapters"
        with trio.fail_after(self._limits.index_s):
            index = await self._source.index(key.asker, ref)
        expected = runner.adapter_bytes(index.rank, index.targets)
        if index.vector_bytes != expected or key.span.stop > len(index.roots):
            text = (
                f"the adapter has {index.vector_bytes} bytes for each of {len(index.roots)} blocks, but here it would "
                f"have {expected} for each block up to {key.span.stop}: it belongs to another model"
            )
            return HopError("refused", text, "adapter_refused")
        size = expected * len(key.span)
        if size > self._limits.asker_bytes:
            limit = format_size(self._limits.asker_bytes)
            text = f"the adapter takes {format_size(size)} here, and this node takes adapters up to {limit}"
            return HopError("refused", text, "adapter_refused")
        if not self._has_room(key.asker, size):
            is_own = self._bytes_of(key.asker) + size > self._limits.asker_bytes
            await self._make_way(key.asker if is_own else None)
            if not self._has_room(key.asker, size):
                whose = "your other sessions" if is_own else "other sessions"
                return HopError("busy", f"the adapters of {whose} leave no room for this one", "adapters_full")
        self._reserved[key] = size
        try:
            load = self._loading[key]
            vectors = await self._source.vectors(key.asker, index, key.span, load.arrived)
            load.arrived(math.inf)
            blocks = dict(zip(key.span.blocks(), vectors, strict=True))
            weights = await self._device.run_later(runner.load_adapter, index.rank, index.alpha, index.targets, blocks)
        finally:
            del self._reserved[key]
        if load.scope.cancel_called:
            return load.why_cancelled
        self._loaded[key] = loaded = LoadedAdapter(runner, weights, size, users=1)
        return loaded

    def _has_room(self, asker: str, size: int) -> bool:
        """Drop adapters that nobody uses, the longest unused first, until there is room; False if there is none.

        An asker's own ones make way first where its share is full, so that it takes no room of others.
        """
        limits = self._limits
        unused = sorted((key for key, one in self._loaded.items() if not one.users), key=self._used_at)
        for key in unused:
            if key.asker == asker and self._bytes_of(asker) + size > limits.asker_bytes:
                del self._loaded[key]
        if self._bytes_of(asker) + size > limits.asker_bytes:
            return False
        for key in unused:
            if key in self._loaded and self.total_bytes + size > limits.total_bytes:
                del self._loaded[key]
        return self.total_bytes + size <= limits.total_bytes

    def _used_at(self, key: AdapterKey) -> float:
        return self._loaded[key].used_at
