"""The directory of the in-memory network: one shared table with the latency, staleness and losses of a real DHT."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio


@dataclass(frozen=True)
class DirectoryProfile:
    """Latency, staleness and loss of the simulated directory."""

    latency_s: float = 0.3
    visible_after_s: float = 0.0  # a new record is found only from this age on
    expires_after_s: float = 5400.0  # 90 minutes, as in `p2p.dht.store`
    loss: float = 0.0  # share of stores, and of look-ups, that silently do nothing
    max_providers: int = 20


@dataclass(frozen=True)
class _Record:
    owner: str
    stored_at: float
    value: bytes = b""


class MemoryDirectory:
    """Providers and values by key, with each asker's view of them."""

    def __init__(self, profile: DirectoryProfile, seed: int) -> None:
        self.profile = profile
        self._seed = seed
        self._operations: dict[str, int] = {}
        self._providers: dict[bytes, dict[str, _Record]] = {}
        self._values: dict[bytes, list[_Record]] = {}  # oldest first
        self._group_of: Mapping[str, int] = {}
        self._partitioned_at = 0.0

    def partition(self, group_of: Mapping[str, int], now: float) -> None:
        """Split the directory: from `now` on each group sees older records and its own new ones only."""
        self._group_of, self._partitioned_at = group_of, now

    async def provide(self, owner: str, key: bytes) -> None:
        """Record that `owner` provides `key`."""
        await trio.sleep(self.profile.latency_s)
        if not self._lost(owner):
            self._providers.setdefault(key, {})[owner] = _Record(owner, trio.current_time())

    async def find_providers(self, asker: str, key: bytes, timeout_s: float) -> Sequence[str]:
        """Return the first `max_providers` providers of `key` that `asker` can see; none if the look-up is lost."""
        if not await self._answered(asker, timeout_s):
            return ()
        found = [record.owner for record in self._providers.get(key, {}).values() if self._visible(asker, record)]
        return tuple(found[: self.profile.max_providers])

    async def put_value(self, owner: str, key: bytes, value: bytes) -> None:
        """Store a value under `key` in place of the owner's earlier one."""
        await trio.sleep(self.profile.latency_s)
        if not self._lost(owner):
            kept = [record for record in self._values.get(key, []) if record.owner != owner]
            self._values[key] = [*kept, _Record(owner, trio.current_time(), value)]

    async def get_value(self, asker: str, key: bytes, timeout_s: float) -> bytes | None:
        """Return the newest value under `key` that `asker` can see, or None."""
        if not await self._answered(asker, timeout_s):
            return None
        for record in reversed(self._values.get(key, [])):
            if self._visible(asker, record):
                return record.value
        return None

    async def _answered(self, asker: str, timeout_s: float) -> bool:
        await trio.sleep(min(timeout_s, self.profile.latency_s))
        return timeout_s >= self.profile.latency_s and not self._lost(asker)

    def _visible(self, asker: str, record: _Record) -> bool:
        age_s = trio.current_time() - record.stored_at
        if not self.profile.visible_after_s <= age_s <= self.profile.expires_after_s:
            return False
        same_group = self._group_of.get(asker, 0) == self._group_of.get(record.owner, 0)
        return same_group or record.stored_at <= self._partitioned_at

    def _lost(self, node: str) -> bool:
        number = self._operations[node] = self._operations.get(node, 0) + 1
        return zlib.crc32(f"{self._seed}/directory/{node}/{number}".encode()) / 2**32 < self.profile.loss
