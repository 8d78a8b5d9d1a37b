"""What the API needs of a node, declared by its consumer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.api.event_log import EventLog
from app.asker.reply_service import ReplyRequest
from app.config.file import Config
from app.config.settings import Value
from app.snapshot.views import CourtesyView, ProspectsView, Snapshot, SwarmView
from app.swarm.invite import Invite
from app.system.doctor import Check


@dataclass(frozen=True)
class Joining:
    """What became of a wish to be in a swarm: the node's state then, and why."""

    swarm: SwarmView
    state: str
    reason: str


class Control(Protocol):
    """A running node as the API commands it; failures are `AppError`, `P2PError` or `EngineError`."""

    @property
    def event_log(self) -> EventLog:
        """What changes."""

    def snapshot(self) -> Snapshot:
        """The state at this moment."""

    async def create(self, name: str, model: str, *, private: bool) -> Joining:
        """Make a swarm of a model on this machine, and go there."""

    async def join(self, target: str) -> Joining:
        """Leave the active swarm in order and go to the one that a name or an invite means."""

    async def leave(self, name: str) -> SwarmView:
        """Forget a swarm, leaving it first where it is the active one."""

    async def invite(self, name: str | None) -> Invite:
        """An invite to a remembered swarm, or to the active one."""

    def reply(self, request: ReplyRequest) -> AsyncGenerator[dict[str, Any], None]:
        """The swarm's reply: `{"text": …}` for each piece, then `{"done": …}` with what can be said of it."""

    def config(self) -> Config:
        """The settings in force."""

    async def set_config(self, name: str, text: str | None) -> Value:
        """Write one setting, and apply it where that can be done at once; None is the default again."""

    async def prospects(self) -> ProspectsView:
        """What it could go to, and whether that fits."""

    def network_checks(self) -> Sequence[Check]:
        """The doctor's lines about the network."""

    async def pause(self, for_s: float | None) -> CourtesyView:
        """Let sessions move on, then host nothing until `resume`, or for so long."""

    async def drain(self) -> CourtesyView:
        """Let sessions finish, then host nothing until `resume`."""

    async def resume(self) -> CourtesyView:
        """Host again, unless a rule says otherwise."""

    def stop(self) -> None:
        """Drain and end."""
