"""Adapters of replies over the swarm: this home's are offered to hops, and those of other askers are fetched.

An adapter travels as parts by hash: its index (`app.session.adapter_index`) and the weights of each block. The exchange
is that of the states of jobs (`app.training.states`). Hops keep no file of what they have loaded.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from app.asker.reply import ReplyAdapter
from app.config.home import Home
from app.core.errors import NoAdapter
from app.core.span import Span
from app.session.adapter_index import AdapterIndex, AdapterRef, decode_index
from app.training.states import StateStore, part_of
from app.training.wire import StatePart
from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from engine.training.peft_format import Adapter

SWEEP_S = 60.0
OFFERED_S = 1800.0  # that an adapter is offered after the last reply that used it: audits may still need it
MAX_OFFERED = 4  # adapters that no reply uses
RUN_BYTES = 16


@dataclass(eq=False)
class _Offer:
    adapter: ReplyAdapter
    stamp: tuple[int, ...]  # of its files
    run: bytes
    users: int = 0
    used_at: float = 0.0


class HomeAdapters:
    """Offers the adapters of this home to the hops of replies; satisfies `app.asker.reply_service.AdapterOffers`."""

    def __init__(self, home: Home, states: StateStore, config: ModelConfig, model: str) -> None:
        self._home, self._states, self._config, self._model = home, states, config, model
        self._offers: list[_Offer] = []
        self._lock = trio.Lock()

    async def run(self) -> None:
        """Withdraw adapters that were not used for long, until cancelled."""
        while True:
            await trio.sleep(SWEEP_S)
            async with self._lock:
                await self._withdraw_unused()

    @asynccontextmanager
    async def offered(self, name: str) -> AsyncIterator[ReplyAdapter]:
        """Offer an adapter while the context is open, and `OFFERED_S` longer unless many others are used meanwhile.

        Raises `NoAdapter` if there is none of this name for the swarm's model, `WeightsError` if the disk is full.
        """
        async with self._lock:
            offer = await self._offer(name)
            offer.users += 1
        try:
            yield offer.adapter
        finally:
            offer.users -= 1
            offer.used_at = trio.current_time()
            with trio.CancelScope(shield=True):
                async with self._lock:
                    await self._withdraw_unused()

    async def _offer(self, name: str) -> _Offer:
        stamp = await trio.to_thread.run_sync(_stamp, self._home, name)
        for offer in self._offers:
            if (offer.adapter.name, offer.stamp) == (name, stamp):
                return offer
        adapter = await trio.to_thread.run_sync(_load, self._home, name, self._config, self._model)
        run = secrets.token_bytes(RUN_BYTES)
        try:
            vectors = [adapter.vectors[block].numpy().tobytes() for block in range(self._config.n_blocks)]
            parts = [await self._states.keep(run, vector) for vector in vectors]
            index = await self._states.keep(run, _index_of(adapter, parts).encoded())
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._states.forget(run)
            raise
        offer = _Offer(ReplyAdapter(name, AdapterRef(index.root, index.size_bytes)), stamp, run)
        self._offers.append(offer)
        return offer

    async def _withdraw_unused(self) -> None:
        """Withdraw the adapters that no reply has used for long, and the longest unused beyond `MAX_OFFERED`."""
        unused = sorted((one for one in self._offers if not one.users), key=lambda one: -one.used_at)
        oldest = trio.current_time() - OFFERED_S
        for offer in [one for place, one in enumerate(unused) if place >= MAX_OFFERED or one.used_at < oldest]:
            self._offers.remove(offer)
            offer.adapter.withdrawn = True
            await self._states.forget(offer.run)


def adapter_ref(adapter: Adapter) -> AdapterRef:
    """Return the name by which hops know an adapter, from its weights."""
    parts = [part_of(vector.numpy().tobytes())[0] for _, vector in sorted(adapter.vectors.items())]
    index = part_of(_index_of(adapter, parts).encoded())[0]
    return AdapterRef(index.root, index.size_bytes)


def _index_of(adapter: Adapter, parts: Sequence[StatePart]) -> AdapterIndex:
    settings = adapter.settings
    roots = tuple(part.root for part in parts)
    return AdapterIndex(settings.rank, settings.alpha, settings.targets, parts[0].size_bytes, roots)


def _stamp(home: Home, name: str) -> tuple[int, ...]:
    """Return the times and sizes of an adapter's files; raises `NoAdapter` if there is none of this name."""
    from app.training.adapter_store import FILES, AdapterStore  # loads torch, which an idle node does without

    folder = AdapterStore(home).require(name)
    try:
        found = [(folder / file).stat() for file in FILES]
    except OSError as error:
        raise NoAdapter(f"the adapter {name} cannot be read: {error}") from error
    return tuple(number for one in found for number in (one.st_mtime_ns, one.st_size))


def _load(home: Home, name: str, config: ModelConfig, model: str) -> Adapter:
    from app.training.adapter_store import AdapterStore

    try:
        return AdapterStore(home).load(name, config, model)
    except EngineError as error:
        raise NoAdapter(str(error)) from error


class AdapterFetcher:
    """Fetches adapters from their askers; satisfies `app.serving.adapters.AdapterSource`."""

    def __init__(self, states: StateStore) -> None:
        self._states = states

    async def index(self, asker: str, adapter: AdapterRef) -> AdapterIndex:
        """Return an adapter's index; raises `AppError` if it cannot be had or is none."""
        (raw,) = await self._fetch(asker, [StatePart(adapter.root, adapter.size_bytes)])
        return decode_index(raw)

    async def vectors(self, asker: str, index: AdapterIndex, span: Span, arrived: Callable[[int], None]) -> list[bytes]:
        """Return the weights of these blocks; raises `AppError` if they cannot be had."""
        roots = index.roots[span.start : span.stop]
        return await self._fetch(asker, [StatePart(root, index.vector_bytes) for root in roots], arrived)

    async def _fetch(
        self, asker: str, parts: Sequence[StatePart], arrived: Callable[[int], None] = lambda size: None
    ) -> list[bytes]:
        run = secrets.token_bytes(RUN_BYTES)
        if asker != self._states.peer_id:
            async with self._states.apart() as states:
                return await states.fetch(run, parts, [asker], arrived=arrived)
        try:
            return await self._states.fetch(run, parts, [asker])
        finally:
            with trio.CancelScope(shield=True):
                await self._states.forget(run)
