"""What a node tells anybody who asks about swarms: which ones of a name it knows, and their models' manifests.

Answers peers that are no members too: that is how a bare name is resolved. A private swarm is spoken of only on a
network that its secret gates.
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
MEMBERS_NAMED = 16
MANIFESTS_AT_ONCE = 4
MANIFESTS_KEPT = 4  # in memory, 16 MiB at most
UNKNOWN = "unknown"


class Manifests(Protocol):
    """Where manifests are kept."""

    def load(self, model_hash: str) -> Manifest | None: ...


class QueryService:
    """Answers questions about swarms, for as long as its network runs."""

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
        """Answer for this swarm from now on."""
        known = self._records.get(record.id)
        if known is None or (record.created_ms, record.creator) < (known.created_ms, known.creator):
            self._records[record.id] = record
        for oldest in list(self._records)[:-MAX_KNOWN]:
            del self._records[oldest]

    def forget(self, swarm_id: str) -> None:
        """Answer for a swarm no more."""
        self._records.pop(swarm_id, None)

    def take_part(self, swarm: Membership | None) -> None:
        """Name members of this swarm to those who ask for it."""
        self._active = swarm
        if swarm is not None:
            self.know(swarm.record)

    def keep(self, manifest: Manifest) -> None:
        """Have a manifest at hand: the active swarm's is asked for by every newcomer."""
        self._kept[manifest.hash] = manifest.raw
        for oldest in list(self._kept)[:-MANIFESTS_KEPT]:
            del self._kept[oldest]

    async def _on_find(self, peer: str, body: bytes) -> bytes:
        if not body:
            if not self._looks.take(peer, trio.current_time()):
                raise Refused("this node was asked for its swarm too often; ask later")
            return wire.pack(wire.fitting(self._own_swarm(), wire.MAX_BATCH_BYTES))
        try:
            if len(body) > wire.MAX_NAME_BYTES:
                raise UsageError("too long")
            wanted = SwarmName.parse(body.decode("ascii", "replace"))
        except UsageError as error:
            raise RemoteError("that is not a swarm's name", code=wire.MALFORMED) from error
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
            yield active.own_raw
            for name in active.table.present()[:MEMBERS_NAMED]:
                member = active.table.get(name)
                if member is not None:
                    yield member.raw

    def _own_swarm(self) -> Iterator[bytes]:
        """The swarm that this node is in, with all its members: a neighbour looks around before it joins any."""
        active = self._active
        if active is None or (active.record.private and not self._gated):
            return
        yield from (active.record.raw, active.own_raw)
        for name in active.table.present():
            member = active.table.get(name)
            if member is not None:
                yield member.raw

    async def _on_manifest(self, peer: str, body: bytes) -> bytes:
        if len(body) != wire.HASH_BYTES:
            raise RemoteError("that is not the hash of a manifest", code=wire.MALFORMED)
        if self._busy >= MANIFESTS_AT_ONCE or not self._asks.take(peer, trio.current_time()):
            raise Refused("too many manifests are asked for; ask another member, or later")
        kept = self._kept.get(body.hex())
        return kept if kept is not None else await self._load(body.hex())

    async def _load(self, model_hash: str) -> bytes:
        self._busy += 1
        try:
            # On a thread: it reads a file, and checks it as if a stranger had sent it.
            manifest = await trio.to_thread.run_sync(self._manifests.load, model_hash)
        finally:
            self._busy -= 1
        if manifest is None:
            raise RemoteError("this node has not that manifest", code=UNKNOWN)
        self.keep(manifest)
        return manifest.raw
