"""What the training jobs of one swarm run with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.core.network import Network
from app.courtesy.pause import PauseControl
from app.planning.machines import MachineSpec
from app.rounds.machines import Helpers
from app.training.states import StateStore
from app.training.trainer import TrustNotes
from p2p.identity import Identity

if TYPE_CHECKING:
    from app.rounds.island import RoundTiming


@dataclass(frozen=True)
class TrainPlace:
    """A node in a swarm, as its training jobs see it."""

    swarm: str  # its id
    public: bool
    network: Network
    identity: Identity
    states: StateStore
    members: Callable[[], Sequence[str]]  # other members of the swarm
    is_member: Callable[[str], bool]
    cache: Path
    memory_limit: Callable[[], int | None]  # the user's
    look: Callable[[], MachineSpec]  # measures this machine, which takes a moment the first time
    pause: PauseControl  # of the node
    swarm_name: str = ""  # by which people know it
    helpers: Helpers | None = None  # for islands of several machines
    trust: TrustNotes | None = None  # where it is noted who was left out
    timing: RoundTiming | None = None  # of rounds; None: the usual
