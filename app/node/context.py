"""What a node's time in a swarm needs of the node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from app.api.supervisor import ApiHealth
from app.config.file import Config
from app.courtesy.pause import PauseControl
from app.routing.trust import TrustBook
from app.swarm.saved import SavedSwarm, SavedSwarms
from app.weights.manifest_store import ManifestStore
from p2p.envelope import Sequence
from p2p.identity import Identity


@dataclass(frozen=True)
class NodeContext:
    """The node around a stay."""

    identity: Identity
    manifests: ManifestStore
    sequence: Sequence
    config: Callable[[], Config]
    known: Callable[[], SavedSwarms]
    app_version: str
    changed: Callable[[], None]  # something that can be seen has changed
    note: Callable[[str, str], None]  # (kind, text): something happened
    remember: Callable[[SavedSwarm], Awaitable[None]]
    pause_control: PauseControl
    api: ApiHealth
    trust: TrustBook
