"""The interface through which the API uses a node; `app.node.node.Node` implements it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from app.api.event_log import EventLog
from app.asker.reply import ReplyEvent
from app.asker.reply_service import ReplyRequest
from app.config.file import Config
from app.config.settings import Value
from app.joining.admission import MadeInvite
from app.snapshot.views import (
    CourtesyView,
    GuestView,
    InviteView,
    JobView,
    JoinableView,
    ModelView,
    OfferView,
    ProspectsView,
    Snapshot,
    SwarmView,
)
from app.swarm.invitations import InviteLimits
from app.system.doctor import Check

if TYPE_CHECKING:
    from app.rounds.founding import TrainWish
    from app.training.material import TrainingWish
    from app.training.swarm_jobs import JobForecast


@dataclass(frozen=True)
class Joining:
    """Outcome of `create` or `join`: the swarm, the node's state afterwards, and the reason for that state."""

    swarm: SwarmView
    state: str
    reason: str


class Control(Protocol):
    """A running node; methods raise only `AppError`, `P2PError` or `EngineError`."""

    @property
    def event_log(self) -> EventLog:
        """The log of events, and the wake-up for state changes."""

    def snapshot(self) -> Snapshot:
        """Return the node's visible state at this moment."""

    async def create(self, name: str, model: str, *, private: bool) -> Joining:
        """Create a swarm for a model on this machine, and join it."""

    async def join(self, target: str, *, force: bool = False) -> Joining:
        """Leave the active swarm cleanly and join the one that a name or an invite stands for.

        Unless `force`, a node that has joined a swarm stays in it if no member of the other one answers.
        """

    async def leave(self, name: str) -> SwarmView:
        """Forget a swarm, leaving it first if it is the active one."""

    async def invite(self, name: str | None, limits: InviteLimits | None = None) -> MadeInvite:
        """Make an invite to a remembered swarm; None means the active one.

        `limits` apply to guarded swarms only; None means the usual ones there.
        """

    async def invites(self, name: str | None) -> list[InviteView]:
        """List the limited invites that this node made for a swarm; None means the active one."""

    async def decide(self, peer: str, *, approve: bool) -> GuestView:
        """Let a peer in that waits for approval, or refuse it; `peer` is its id, the end of it, or its name."""

    async def cancel_invite(self, identifier: str) -> InviteView:
        """Make an invite useless; those that joined with it stay."""

    async def revoked(self) -> tuple[str, ...]:
        """Return the peers that this node removed from the active swarm."""

    async def revoke(self, peer: str, *, remove: bool) -> tuple[str, ...]:
        """Remove a peer from the active swarm, or let it join again; return those that are removed."""

    def reply(self, request: ReplyRequest) -> AsyncGenerator[ReplyEvent, None]:
        """Return the swarm's reply: its pieces, then its figures."""

    async def tokenize(self, request: ReplyRequest, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a request's prompt; `add_special` adds the model's special tokens to a text."""

    async def detokenize(self, token_ids: Sequence[int], owner: str = "") -> str:
        """Return the text of token ids; `owner` is who asks, as in a `ReplyRequest`."""

    async def embed(self, prompt: str | tuple[int, ...], owner: str = "") -> tuple[list[float], int]:
        """Return the embedding of a text, and its number of tokens; `owner` is who asks."""

    async def adapters(self) -> list[str]:
        """Name the adapters of this home that were trained for the active swarm's model."""

    async def jobs(self) -> list[JobView]:
        """List the fine-tuning jobs of this home, the newest first."""

    async def start_job(self, wish: TrainingWish) -> JobView:
        """Begin a fine-tuning job over the active swarm."""

    async def forecast_job(self, wish: TrainingWish) -> JobForecast:
        """Say what a fine-tuning job over the active swarm would be, without beginning it."""

    async def resume_job(self, job: str) -> JobView:
        """Go on with a paused or failed job of the active swarm; `job` is the beginning of its id."""

    async def end_job(self, job: str, wish: Literal["pause", "stop"]) -> JobView:
        """Pause or stop a job after the step that it is at."""

    async def trainings(self) -> list[dict[str, Any]]:
        """List the training jobs of this home, the newest first."""

    async def joinable_trainings(self) -> list[JoinableView]:
        """List the training jobs of other members that this node could join."""

    async def found_training(self, wish: TrainWish) -> dict[str, Any]:
        """Found a training job in the active swarm and take part in it."""

    async def forecast_training(self, wish: TrainWish) -> dict[str, Any]:
        """Say what a training job would be, without founding it."""

    async def join_training(self, job: str, data: Sequence[str] = (), licence: str = "") -> dict[str, Any]:
        """Take part in a training job of the active swarm, by its name or hash, with a text of one's own if it asks."""

    async def leave_training(self, job: str) -> dict[str, Any]:
        """Take no more part in a training job of any swarm."""

    async def remove_training(self, job: str) -> dict[str, Any]:
        """Remove a training job in which this node takes no part, with its files."""

    def config(self) -> Config:
        """Return the settings in force."""

    async def set_config(self, name: str, text: str | None) -> Value:
        """Save one setting, and apply it at once if it can change while running; None resets it to its default."""

    async def prospects(self) -> ProspectsView:
        """List the swarms that this node could join, and how much of each model fits on this machine."""

    async def preview(self, target: str | None, name: str | None, model: str | None) -> OfferView:
        """Check an invite or a swarm's name, the name of a new swarm, or its model, and return what is known of it."""

    async def models(self, folder: str | None) -> list[ModelView]:
        """List the models on this machine, or those below one folder."""

    async def search_models(self, words: str) -> list[ModelView]:
        """List the models of the Hugging Face Hub that match some words."""

    async def pull(self, model: str) -> ModelView:
        """Download a model of the hub unless it is here, and return it."""

    async def recent(self) -> list[dict[str, Any]]:
        """Return the lines of a recording of the last minutes, decoded; empty before the first snapshot."""

    def network_checks(self) -> Sequence[Check]:
        """Return the checks of `shoal doctor` that only a running node can make."""

    async def pause(self, for_s: float | None) -> CourtesyView:
        """Move sessions to other members, then host nothing for `for_s` seconds, or until `resume` if None."""

    async def drain(self) -> CourtesyView:
        """Wait for sessions to finish, then host nothing until `resume`."""

    async def resume(self) -> CourtesyView:
        """Host again, unless a courtesy rule keeps the node paused."""

    def stop(self) -> None:
        """Start to drain, then end the node; returns at once."""
