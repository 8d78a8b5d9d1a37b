"""The parts of a node that its network owner, active swarm, hosting loop and upkeep share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from app.api.supervisor import ApiHealth
from app.config.file import Config
from app.config.home import Home
from app.courtesy.pause import PauseControl
from app.routing.trust import TrustBook
from app.swarm.saved import SavedSwarm, SavedSwarms
from app.weights.manifest_store import ManifestStore
from p2p.envelope import Sequence
from p2p.identity import Identity


@dataclass(frozen=True)
class NodeContext:
    """Identity, settings, storage, trust, pause and event log of one node; built once by `app.node.node`."""

    identity: Identity
    home: Home
    peers_file: Path  # where addresses of peers are remembered
    manifests: ManifestStore  # in the cache folder
    sequence: Sequence
    config: Callable[[], Config]  # the settings in force
    reload: Callable[[], Awaitable[None]]  # read the configuration file again
    known: Callable[[], SavedSwarms]
    app_version: str
    changed: Callable[[], None]  # call it after a change of visible state
    note: Callable[[str, str], None]  # (kind, text): record an event for the user
    remember: Callable[[SavedSwarm], Awaitable[None]]  # save a swarm in the home folder, as the active one
    remember_aside: Callable[[SavedSwarm], Awaitable[None]]  # the same, and the active one stays
    count_reply: Callable[[int, Iterable[str]], None]  # count tokens that the user received through these peers
    pause_control: PauseControl
    api: ApiHealth
    trust: TrustBook
    is_visit: bool = False  # a visitor asks; it goes on with no job of this home
