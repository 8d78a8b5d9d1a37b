"""Answers other peers' questions about swarms: which swarms of a name this node knows, and their manifests.

Peers that are not members are answered too: joiners resolve bare names this way (`app.membership.swarm_search`).
A private swarm is mentioned only on a network that is gated by its secret.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import trio

from app.core.errors import UsageError
from app.core.network import Network
from app.manifest.manifest import Manifest
from app.membership import wire
from app.membership.membership import Membership
from app.swarm.names import SwarmName
from app.swarm.records import SwarmRecord
from p2p.errors import Refused, RemoteError
from p2p.rate_limit import PeerRateLimit

MAX_RECORDS = 8  # of one name
MAX_KNOWN = 1024
MEMBERS_NAMED = 16  # members whose announcements follow the records
MANIFESTS_AT_ONCE = 4
MANIFESTS_KEPT = 4  # in memory, 16 MiB at most
UNKNOWN = "unknown"


class Manifests(Protocol):
    """Storage of manifests by hash; load blocks."""

    def load(self, model_hash: str) -> Manifest | None: ...


class QueryService:
    """Serves `swarm.find` and `swarm.manifest` as long as its network runs."""

    def __init__(self, network: Network, manifests: Manifests, *, gated: bool = False) -> None:
        self._manifests, self._gated = manifests, gated
        self._records: dict[str, SwarmRecord] = {}  # by swarm id
        self._active: Membership | None = None
        self._busy = 0
        self._kept: dict[str, bytes] = {}
        self._asks = PeerRateLimit(burst=16, per_s=0.2)
        self._looks = PeerRateLimit(burst=8, per_s=1.0)
        network.serve(wire.FIND, self._on_find)
        network.serve(wire.MANIFEST, self._on_manifest)

    def know(self, record: SwarmRecord) -> None:
        """Include this swarm in answers from now on; of several records of one swarm the oldest is kept."""
        known = self._records.get(record.id)
        if known is None or (record.created_ms, record.creator) < (known.created_ms, known.creator):
            self._records[record.id] = record
        for oldest in list(self._records)[:-MAX_KNOWN]:
            del self._records[oldest]

    def take_part(self, swarm: Membership | None) -> None:
        """Set the swarm whose members are named in answers; None for no swarm."""
        self._active = swarm
        if swarm is not None:
            self.know(swarm.record)

    def keep(self, manifest: Manifest) -> None:
        """Keep a manifest in memory; every newcomer asks for that of the active swarm."""
        self._kept[manifest.hash] = manifest.raw
        for oldest in list(self._kept)[:-MANIFESTS_KEPT]:
            del self._kept[oldest]

    async def _on_find(self, peer: str, body: bytes) -> bytes:
        if not body:
            if not self._looks.take(peer, trio.current_time()):
                raise Refused("this node was asked for its swarm too often; ask again later")
            return wire.pack(wire.fitting(self._own_swarm(), wire.MAX_BATCH_BYTES))
        try:
            if len(body) > wire.MAX_NAME_BYTES:
                raise UsageError("too long")
            wanted = SwarmName.parse(body.decode("ascii", "replace"))
        except UsageError as error:
            raise RemoteError("not a swarm's name", code=wire.MALFORMED) from error
        return wire.pack(wire.fitting(self._known_of(wanted), wire.MAX_BATCH_BYTES))

    def _known_of(self, wanted: SwarmName) -> Iterator[bytes]:
        found = [
            record
            for record in self._records.values()
            if record.name == wanted.name and wanted.allows(record.model_hash) and (self._gated or not record.private)
        ]
        yield from (record.raw for record in found[:MAX_RECORDS])
        active = self._active
        if active is not None and active.record.id in {record.id for record in found}:
            yield active.own.raw
            for name in active.table.present()[:MEMBERS_NAMED]:
                member = active.table.get(name)
                if member is not None:
                    yield member.announcement.raw

    def _own_swarm(self) -> Iterator[bytes]:
        """Yield the record and all announcements of this node's swarm, for `app.joining.nearby` of another node."""
        active = self._active
        if active is None or (active.record.private and not self._gated):
            return
        yield from (active.record.raw, active.own.raw)
        for name in active.table.present():
            member = active.table.get(name)
            if member is not None:
                yield member.announcement.raw

    async def _on_manifest(self, peer: str, body: bytes) -> bytes:
        if len(body) != wire.HASH_BYTES:
            raise RemoteError("not the hash of a manifest", code=wire.MALFORMED)
        if self._busy >= MANIFESTS_AT_ONCE or not self._asks.take(peer, trio.current_time()):
            raise Refused("too many manifests are requested; ask another member, or later")
        kept = self._kept.get(body.hex())
        return kept if kept is not None else await self._load(body.hex())

    async def _load(self, model_hash: str) -> bytes:
        self._busy += 1
        try:
            # On a thread: it reads a file of up to 4 MiB and checks all of it.
            manifest = await trio.to_thread.run_sync(self._manifests.load, model_hash)
        finally:
            self._busy -= 1
        if manifest is None:
            raise RemoteError("this node does not have that manifest", code=UNKNOWN)
        self.keep(manifest)
        return manifest.raw
