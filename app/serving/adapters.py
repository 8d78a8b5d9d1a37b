"""Adapters of sessions at a hop: fetched from their askers, loaded on the device, and dropped again.

Sessions of one asker share an adapter; another asker's sessions never do. Adapters that no session uses stay loaded
until others need their room. Orders that wait, places of adapters on their way, and room for adapters are shared among
homes (`p2p.shares`): what a home has beyond its fair share makes way for others. An adapter that comes more
slowly than it has to makes way for a home that has none on its way. How an adapter gets here is left to an
`AdapterSource`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import trio

from app.core.compute import BlockRunner, Device
from app.core.errors import AppError
from app.core.signal import Signal
from app.core.span import Span
from app.core.units import format_size
from app.serving.homes import Homes
from app.session.adapter_index import AdapterIndex, AdapterRef
from app.session.frame import HopError
from engine.errors import DeviceFull, EngineError
from p2p.errors import P2PError
from p2p.shares import Holder, Shares

log = logging.getLogger("shoal.sessions")

MADE_WAY = HopError("busy", "the adapter made way for one of others, who have less here", "adapters_full")
_TOO_MANY_WAIT = HopError("busy", "too many orders wait for adapters at this node", "adapters_full")
_TOO_MANY_COME = HopError("busy", "too many adapters are on their way to this node", "adapters_full")
_OWN_FULL = HopError("busy", "the adapters of your other sessions leave no room for this one", "adapters_full")
_OTHERS_FULL = HopError("busy", "the adapters of other sessions leave no room for this one", "adapters_full")
_GIVEN_UP = HopError("busy", "this node now hosts other blocks", "not_hosted")


class AdapterSource(Protocol):
    """Gets the parts of adapters from their askers; both methods raise `AppError`, `P2PError` or `TooSlowError`."""

    async def index(self, asker: str, adapter: AdapterRef) -> AdapterIndex:
        """Return an adapter's index."""

    async def vectors(self, asker: str, index: AdapterIndex, span: Span, arrived: Callable[[int], None]) -> list[bytes]:
        """Return the weights of these blocks; `arrived` is called with the bytes that have come, meanwhile."""


class AdapterUsers(Protocol):
    """What is needed of the sessions at this hop (`app.serving.block_server.BlockServer`)."""

    def idle_since(self, adapter: LoadedAdapter) -> float:
        """Return the last time when a session in use had something computed with an adapter.

        It is -inf if no more than resting sessions hold it, and inf if a session of this node itself uses it.
        """

    async def end_users(self, adapters: Collection[LoadedAdapter]) -> None:
        """End the sessions that use these adapters, which make way for others."""


@dataclass(frozen=True)
class AdapterLimits:
    """Limits of the adapters at one hop."""

    asker_bytes: int = 256 * 2**20  # of the adapters of one asker, as they are sent
    total_bytes: int = 384 * 2**20  # of all of them: well below the memory that a device keeps free for others
    loading: int = 8  # at the same time
    asker_loading: int = 2  # of one asker
    orders: int = 256  # that wait for an adapter
    asker_orders: int = 64  # of one asker
    fetch_s: float = 280.0
    index_s: float = 30.0  # of these until the index is here
    late_s: float = 20.0  # behind `bytes_per_s`: makes way for a home with none on its way, which waits twice as long
    bytes_per_s: float = 125_000.0
    # An adapter of a home above its fair share makes way for others once its sessions were idle for so long, or once
    # the home has had adapters for so long.
    idle_s: float = 60.0
    turn_s: float = 600.0


class AdapterKey(NamedTuple):
    """Names an adapter at this hop."""

    asker: str
    root: bytes
    span: Span


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter on this hop's device."""

    key: AdapterKey
    holder: Holder
    weights: Any  # for `BlockRunner.open`
    size_bytes: int
    since: float  # its home has used adapters
    users: int = 0  # sessions, and orders that wait to be carried out
    used_at: float = 0.0
    is_dropped: bool = False  # no new session may use it


@dataclass(eq=False)
class _Order:
    """An order that waits for its adapter."""

    key: AdapterKey
    holder: Holder
    begun_at: float = 0.0  # its adapter is on its way since then
    arrived_bytes: float = 0.0
    size_bytes: int = 0  # reserved; known with the index
    since: float = 0.0  # its home has used adapters
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    why_ended: HopError | None = None

    def arrived(self, size: float) -> None:
        """Count bytes that have come."""
        self.arrived_bytes += size

    def late_at(self, limits: AdapterLimits) -> float:
        """Return when its adapter is late if nothing more comes."""
        return self.begun_at + self.arrived_bytes / limits.bytes_per_s + limits.late_s

    def end(self, why: HopError) -> None:
        """End it; what it holds is free at once."""
        self.why_ended, self.size_bytes = why, 0
        self.scope.cancel()


_InUse = LoadedAdapter | _Order


class HopAdapters:
    """The adapters at one hop."""

    def __init__(
        self, device: Device, source: AdapterSource | None, limits: AdapterLimits, homes: Homes, users: AdapterUsers
    ) -> None:
        self._device, self._source, self._limits, self._homes, self._users = device, source, limits, homes, users
        self._runner: BlockRunner | None = None
        self._loaded: dict[AdapterKey, LoadedAdapter] = {}
        self._orders: list[_Order] = []  # the oldest first
        self._places: dict[AdapterKey, _Order] = {}  # those whose adapters are on their way
        self._over = Signal()  # an order with a place is over

    @property
    def is_served(self) -> bool:
        """True if sessions with adapters are served here."""
        return self._source is not None

    @property
    def total_bytes(self) -> int:
        """Bytes of all adapters that are loaded or on their way."""
        return sum(one.size_bytes for one in self._all)

    @property
    def _all(self) -> list[_InUse]:
        return [*self._loaded.values(), *self._orders]

    @property
    def _in_use(self) -> list[_InUse]:
        """Adapters that others may need to wait for: not those that at most resting sessions hold."""
        coming = (order for order in self._coming if order.size_bytes)
        used = (one for one in self._loaded.values() if one.users and self._users.idle_since(one) > -math.inf)
        return [*coming, *used]

    @property
    def _waiting(self) -> list[_Order]:
        return [order for order in self._orders if order.why_ended is None]

    @property
    def _coming(self) -> list[_Order]:
        return [order for order in self._places.values() if order.why_ended is None]

    def host(self, runner: BlockRunner | None) -> None:
        """Load adapters for these blocks from now on; drop all others, those on their way too."""
        self._runner = runner
        self._drop(list(self._loaded.values()), math.inf)
        for order in self._waiting:
            order.end(_GIVEN_UP)

    def may_load(self, span: Span) -> bool:
        """True if adapters for these blocks are loaded here."""
        runner = self._runner
        return self.is_served and runner is not None and runner.start <= span.start < span.stop <= runner.stop

    def held(self, key: AdapterKey) -> LoadedAdapter | None:
        """Return an adapter that is loaded, held until `release`; None if it is not.

        One that nobody uses is left alone if that would be more than its asker may have.
        """
        found = self._loaded.get(key)
        if found is None:
            return None
        in_use = self._in_use
        if found not in in_use and not self._shares_of(in_use).fits(found.holder, found.size_bytes):
            return None
        found.users += 1
        return found

    def release(self, adapter: LoadedAdapter | None) -> None:
        """Note that a session or an order does not use an adapter any more."""
        if adapter is not None:
            adapter.users -= 1
            adapter.used_at = trio.current_time()

    async def load(self, key: AdapterKey, ref: AdapterRef) -> LoadedAdapter | HopError:
        """Fetch and load an adapter unless it is here, and hold it until `release`; or say why not.

        Waits for a place for a short time, and for the same adapter as long as it is on its way.
        """
        if not self.may_load(key.span):
            return _GIVEN_UP
        order = _Order(key, Holder(self._homes.of(key.asker), key.asker))
        if not self._may_wait(order.holder):
            return _TOO_MANY_WAIT
        self._orders.append(order)
        try:
            with order.scope:
                found = await self._wait_for_place(order)
                return await self._fetch(order, ref) if found is None else found
            assert order.why_ended is not None, "only `end` cancels an order alone"
            return order.why_ended
        finally:
            self._orders.remove(order)
            if self._places.get(key) is order:
                del self._places[key]
                self._over.notify()

    def _may_wait(self, holder: Holder) -> bool:
        """True if one more order may wait; the newest of those who have too many makes way."""
        limits, waiting = self._limits, self._waiting
        if sum(order.holder.asker == holder.asker for order in waiting) >= limits.asker_orders:
            return False
        shares = Shares(limits.orders, ((order.holder, 1) for order in waiting))
        if shares.fits(holder, 1):
            return True
        crowding = shares.in_the_way(holder, 1)
        to_end = [order for order in waiting if order.holder in crowding and self._places.get(order.key) is not order]
        if to_end:
            to_end[-1].end(_TOO_MANY_WAIT)
        return bool(to_end)

    async def _wait_for_place(self, order: _Order) -> LoadedAdapter | HopError | None:
        """Wait until an order has a place: None; or until its adapter is here, or it has waited for too long."""
        until = trio.current_time() + 2 * self._limits.late_s
        while True:
            if (found := self.held(order.key)) is not None:
                return found
            if order.key not in self._places:
                if trio.current_time() >= until:
                    return _TOO_MANY_COME
                if self._take_place(order):
                    return None
            with trio.move_on_after(self._limits.late_s / 5):  # one may be late by then
                await self._over.wait()

    def _take_place(self, order: _Order) -> bool:
        """Let an order's adapter be on its way if there is a place, or if one that is in the way or late can go."""
        limits, now, coming = self._limits, trio.current_time(), self._coming
        if sum(other.key.asker == order.key.asker for other in coming) >= limits.asker_loading:
            return False
        shares = Shares(limits.loading, ((other.holder, 1) for other in coming))
        if not shares.fits(order.holder, 1):
            crowding = shares.in_the_way(order.holder, 1)
            has_none = all(other.holder.home != order.holder.home for other in coming)
            latest = min(coming, key=lambda other: (other.holder not in crowding, other.late_at(limits)))
            if latest.holder not in crowding and (latest.late_at(limits) > now or not has_none):
                return False
            latest.end(MADE_WAY)
        self._places[order.key], order.begun_at = order, now
        return True

    async def _fetch(self, order: _Order, ref: AdapterRef) -> LoadedAdapter | HopError:
        """Fetch and load an order's adapter, or say why not."""
        try:
            with trio.fail_after(self._limits.fetch_s):
                return await self._load(order, ref)
        except DeviceFull as error:
            return HopError("busy", f"no room for the adapter: {error}", "adapters_full")
        except trio.TooSlowError:
            return HopError("refused", "the adapter did not arrive in time", "adapter_refused")
        except (AppError, EngineError, P2PError) as error:
            return HopError("refused", f"the adapter cannot be loaded: {error}", "adapter_refused")
        except Exception as error:  # torch raises errors of every kind; they must cost no other session
            log.exception("an adapter could not be loaded")
            return HopError("refused", f"{type(error).__name__} while loading the adapter", "adapter_refused")

    async def _load(self, order: _Order, ref: AdapterRef) -> LoadedAdapter | HopError:
        key, runner = order.key, self._runner
        assert self._source is not None, "a hop without a source refuses adapters"
        assert runner is not None, "orders end with the blocks that they are for"
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
        refusal = await self._make_room(order, size)
        if refusal is not None:
            return refusal
        vectors = await self._source.vectors(key.asker, index, key.span, order.arrived)
        order.arrived(math.inf)
        blocks = dict(zip(key.span.blocks(), vectors, strict=True))
        weights = await self._device.run_later(runner.load_adapter, index.rank, index.alpha, index.targets, blocks)
        if order.why_ended is not None:
            return order.why_ended
        self._loaded[key] = loaded = LoadedAdapter(key, order.holder, weights, size, order.since, users=1)
        return loaded

    async def _make_room(self, order: _Order, size: int) -> HopError | None:
        """Reserve room for an adapter, for which those that nobody uses make way, and those of others in its way.

        Says why there is none.
        """
        asker, limits, in_use = order.key.asker, self._limits, self._in_use
        if size + sum(one.size_bytes for one in in_use if one.key.asker == asker) > limits.asker_bytes:
            return _OWN_FULL
        making_way = self._in_the_way(order.holder, size, in_use)
        if making_way is None:
            return _OTHERS_FULL
        now = trio.current_time()
        order.since = min((one.since for one in in_use if one.holder.home == order.holder.home), default=now)
        order.size_bytes = size
        for one in making_way:
            if isinstance(one, _Order):
                one.end(MADE_WAY)
        unused = sorted({*self._loaded.values()} - {*in_use}, key=lambda one: one.used_at)
        own = [one for one in unused if one.key.asker == asker]
        dropped = self._drop((one for one in making_way if isinstance(one, LoadedAdapter)), math.inf)
        dropped += self._drop((one for one in own if one.key == order.key), math.inf)  # `held` left it alone
        dropped += self._drop(own, self._bytes_of(asker) - limits.asker_bytes)
        dropped += self._drop(unused, self.total_bytes - limits.total_bytes)
        if any(one.users for one in dropped):
            await self._users.end_users(dropped)
        return None

    def _in_the_way(self, holder: Holder, size: int, in_use: list[_InUse]) -> list[_InUse] | None:
        """Return what has to make way so that somebody has room, those that were idle longest first; None: too little.

        What is at or below its home's fair share never does.
        """
        now, left, going = trio.current_time(), sorted(in_use, key=self._makes_way_at), list[_InUse]()
        while not (shares := self._shares_of(left)).fits(holder, size):
            crowding = shares.in_the_way(holder, size)
            first = next((one for one in left if one.holder in crowding), None)
            if first is None or self._makes_way_at(first) > now:
                return None
            left.remove(first)
            going.append(first)
        return going

    def _shares_of(self, in_use: Iterable[_InUse]) -> Shares:
        return Shares(self._limits.total_bytes, ((one.holder, one.size_bytes) for one in in_use))

    def _makes_way_at(self, one: _InUse) -> float:
        """Return when an adapter may have to make way, if its home has more than its share then."""
        limits, turn_ends = self._limits, one.since + self._limits.turn_s
        if isinstance(one, _Order):
            return min(one.late_at(limits), turn_ends)
        idle_since = self._users.idle_since(one)
        return max(idle_since, min(idle_since + limits.idle_s, turn_ends))

    def _bytes_of(self, asker: str) -> int:
        return sum(one.size_bytes for one in self._all if one.key.asker == asker)

    def _drop(self, adapters: Iterable[LoadedAdapter], size: float) -> list[LoadedAdapter]:
        """Drop the first of these adapters, as far as they are here, that are so large together; returns them."""
        dropped: list[LoadedAdapter] = []
        for one in adapters:
            if size <= 0:
                break
            if not one.is_dropped:
                del self._loaded[one.key]
                one.is_dropped = True
                size -= one.size_bytes
                dropped.append(one)
        return dropped
