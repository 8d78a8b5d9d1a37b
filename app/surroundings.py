"""What a node's time in a swarm needs of the node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from app.config import Config
from app.manifest_store import ManifestStore
from app.node_api import ApiHealth
from app.pausing import Pausing
from app.remembered import Memberships, Remembered
from app.trust_book import TrustBook
from p2p.envelope import Sequence
from p2p.identity import Identity


@dataclass(frozen=True)
class Surroundings:
    """The node around a stay."""

    identity: Identity
    manifests: ManifestStore
    sequence: Sequence
    config: Callable[[], Config]
    known: Callable[[], Memberships]
    app_version: str
    changed: Callable[[], None]  # something that can be seen has changed
    note: Callable[[str, str], None]  # (kind, text): something happened
    remember: Callable[[Remembered], Awaitable[None]]
    pausing: Pausing
    api: ApiHealth
    trust: TrustBook
