"""The routes under `/control`, with `/healthz` and `/metrics`, and the application that holds all routes.

Each route checks its request's body, calls one method of `Control`, and returns facts as JSON.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api import anthropic, failures, ollama, openai, responses, tokens
from app.api.bodies import BodyRoute, BodyTurns
from app.api.control import Control
from app.api.error_forms import ANTHROPIC_PATH
from app.api.events import EventFeed
from app.api.guard import Application, Guard
from app.api.keys import KeyRing
from app.api.metrics import MEDIA_TYPE, exposition
from app.api.response_store import ResponseStore
from app.api.streaming import JSON_LINES, EventStream, json_lines
from app.asker.asker import USUAL_TOKENS
from app.asker.reply_service import ReplyRequest
from app.config.settings import SETTINGS
from app.courtesy.pause import LONGEST_S
from app.joining.admission import invite_facts
from app.routing.route import MAX_PRIVATE_BLOCKS
from app.snapshot.codec import coverage, status_facts, to_json
from app.swarm.invitations import MAX_EXPIRY_S, InviteLimits
from app.system.logs import RECENT
from app.training.job_view import hop_views
from engine.budget import ADAPTER_ROLES

if TYPE_CHECKING:
    from app.rounds.founding import TrainWish
    from app.training.material import TrainingWish

_MAX_TEXT = 4096
_MAX_PASTED = 4 * _MAX_TEXT  # a text with an invite in it
_MAX_PROMPT = 2**19
_MAX_NOTE = 2**53


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CreateRequest(_Body):
    """The new swarm's name and model."""

    name: str = Field(max_length=_MAX_TEXT)
    model: str = Field(max_length=_MAX_TEXT)
    private: bool = False


class JoinRequest(_Body):
    """A name, a name with a pinned model, or an invite; with `force`, also of a swarm of which no member answers."""

    target: str = Field(max_length=_MAX_PASTED)
    force: bool = False


class PreviewRequest(_Body):
    """What to check before joining or creating: an invite or a name; a new swarm's name; its model."""

    target: str | None = Field(default=None, max_length=_MAX_PASTED)
    name: str | None = Field(default=None, max_length=_MAX_TEXT)
    model: str | None = Field(default=None, max_length=_MAX_TEXT)


class PullRequest(_Body):
    """The model of the Hugging Face Hub to download."""

    model: str = Field(max_length=_MAX_TEXT)


class LeaveRequest(_Body):
    """The swarm to leave."""

    name: str = Field(max_length=_MAX_TEXT)


class InviteRequest(_Body):
    """The swarm to invite to, null means the active one; and limits of the invite, for swarms that have them."""

    name: str | None = Field(default=None, max_length=_MAX_TEXT)
    expires_in_s: float | None = Field(default=None, ge=1, le=MAX_EXPIRY_S)
    uses: int | None = None  # the node says what is allowed
    approve: bool = False
    delegate: bool = False

    def limits(self) -> InviteLimits | None:
        """Return the limits; None if the request names none."""
        if not self.model_fields_set & {"expires_in_s", "uses", "approve", "delegate"}:
            return None
        usual = InviteLimits()
        expires_in_s = self.expires_in_s or usual.expires_in_s
        uses = usual.uses if self.uses is None else self.uses
        return InviteLimits(expires_in_s, uses, self.approve, self.delegate)


class PeerRequest(_Body):
    """The peer that a decision is about."""

    peer: str = Field(max_length=_MAX_TEXT)


class RevokeRequest(PeerRequest):
    """The peer to remove from the swarm; with `remove`, to take off the list again."""

    remove: bool = False


class CancelRequest(_Body):
    """The invite to cancel, by its id."""

    id: str = Field(max_length=_MAX_TEXT)


class PauseRequest(_Body):
    """Seconds to pause; null means until `resume`."""

    for_s: float | None = Field(default=None, ge=1, le=LONGEST_S)


class Message(_Body):
    """One message of a conversation."""

    role: str = Field(max_length=32)
    content: str = Field(max_length=_MAX_PROMPT)


class ChatRequest(_Body):
    """A conversation, and how its next message is sampled."""

    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_tokens: int = Field(default=USUAL_TOKENS, ge=1, le=10**6)
    temperature: float = Field(default=0.7, ge=0, le=100)
    top_k: int = Field(default=0, ge=0, le=10**6)
    top_p: float = Field(default=0.95, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)
    seed: int = Field(default=0, ge=0, lt=2**64)
    stop: list[str] = Field(default=[], max_length=16)
    private_blocks: int | None = Field(default=None, ge=0, le=MAX_PRIVATE_BLOCKS)
    adapter: str | None = Field(default=None, max_length=_MAX_TEXT)
    swarm: str | None = Field(default=None, max_length=_MAX_TEXT)

    def request(self) -> ReplyRequest:
        """Convert to the node's own request."""
        values = self.model_dump(exclude={"messages", "stop"})
        messages = tuple(message.model_dump() for message in self.messages)
        is_usual = self.max_tokens == USUAL_TOKENS  # command line and dashboard send it if their user names no number
        return ReplyRequest(messages=messages, stop=tuple(self.stop), may_end_sooner=is_usual, **values)


class JobRequest(_Body):
    """A fine-tuning job: the files on this machine, the adapter and how it is trained."""

    out: str = Field(max_length=_MAX_TEXT)
    data: str = Field(max_length=_MAX_TEXT)
    validation_file: str | None = Field(default=None, max_length=_MAX_TEXT)
    validation: float = Field(default=0.05, ge=0, lt=1)
    rank: int = 8
    alpha: float = 16.0
    targets: list[str] = Field(default=list(ADAPTER_ROLES), max_length=64)
    dropout: float = 0.0
    epochs: int = Field(default=1, ge=1, le=10**6)
    batch: int = Field(default=8, ge=1, le=10**6)
    length: int = Field(default=256, ge=2, le=1 << 20)
    rate: float = 2e-4
    wire: Literal["auto", "f32", "bf16", "int8", "changes"] = "auto"
    seed: int = Field(default=0, ge=0, lt=2**63)


class TrainRequest(_Body):
    """A training job: files of text on this machine, the model it starts from, and how it is trained."""

    name: str = Field(max_length=_MAX_TEXT)
    data: list[str] = Field(min_length=1, max_length=1024)
    model: str | None = Field(default=None, max_length=_MAX_TEXT)
    shape: str | None = Field(default=None, max_length=_MAX_TEXT)
    steps: int = 1000
    every: int = 50
    batch: int = 4096
    length: int = 256
    optimizer: Literal["adamw", "muon"] = "adamw"
    rate: float = 1e-3
    wire: Literal["auto", "f32", "int8", "int4"] = "auto"
    significance: float = 0.0
    licence: str = Field(default="", max_length=100)
    seed: int = Field(default=0, ge=0, lt=2**63)
    own_data: bool = False
    validation: list[str] = Field(default=[], max_length=1024)


class TrainAction(_Body):
    """A training job, by its name or hash."""

    job: str = Field(min_length=1, max_length=64)


class TrainJoinRequest(TrainAction):
    """A training job to take part in, and files to train on if its members have texts of their own."""

    data: list[str] = Field(default=[], max_length=1024)
    licence: str = Field(default="", max_length=100)


class JobAction(_Body):
    """A fine-tuning job, by the beginning of its id."""

    job: str = Field(min_length=1, max_length=64)


class SettingRequest(_Body):
    """A setting's new value as the user writes it; null resets it to its default."""

    value: str | None = Field(max_length=_MAX_TEXT)


def _train_wish(request: TrainRequest) -> TrainWish:
    from app.rounds.founding import TrainWish  # loads torch, which an idle node does without

    values = request.model_dump()
    return TrainWish(**{**values, "data": tuple(values["data"]), "validation": tuple(values["validation"])})


def _wish(request: JobRequest) -> TrainingWish:
    from app.training.material import wish_of  # loads torch, which an idle node does without

    return wish_of(request.model_dump())


def build_application(
    control: Control,
    token: str,
    version: str,
    *,
    everywhere: bool = False,
    store: ResponseStore | None = None,
    keys: KeyRing | None = None,
) -> Application:
    """Return the whole API behind its `Guard`; `everywhere` is for an API that listens on more than loopback.

    Without a store, responses that a later one may continue are kept in memory; without keys, only the token counts.
    """
    application = FastAPI(title="Shoal", version=version, redoc_url=None)
    application.state.body_turns = BodyTurns()
    failures.install(application)

    @application.head("/", include_in_schema=False)
    @application.get("/")
    async def root() -> dict[str, str]:
        """What answers here, for programs that look; without a token."""
        return {"name": "Shoal", "openai": openai.PREFIX, "docs": "/docs"}

    @application.head("/health", include_in_schema=False)
    @application.get("/health")
    async def health() -> dict[str, str]:
        """`ok` while the API answers; without a token."""
        return {"status": "ok"}

    @application.get("/healthz")
    async def healthz() -> dict[str, bool]:
        """True while the API answers; without a token."""
        return {"ok": True}

    @application.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures of the node for Prometheus."""
        return Response(exposition(control.snapshot()), media_type=MEDIA_TYPE)

    application.include_router(_read_routes(control), prefix=failures.CONTROL_PREFIX)
    application.include_router(_command_routes(control), prefix=failures.CONTROL_PREFIX)
    application.include_router(_config_routes(control), prefix=failures.CONTROL_PREFIX)
    application.include_router(openai.routes(control), prefix=openai.PREFIX)
    application.include_router(tokens.routes(control))
    application.include_router(anthropic.routes(control), prefix=ANTHROPIC_PATH)
    application.include_router(responses.routes(control, store or ResponseStore(None)), prefix="/v1/responses")
    application.include_router(ollama.routes(control, version), prefix="/api")
    return Guard(application, token, control.config, everywhere=everywhere, keys=keys)


def _read_routes(control: Control) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)
    feed = EventFeed(control)

    @router.get("/snapshot")
    async def snapshot() -> dict[str, Any]:
        """The whole state of the node."""
        return to_json(control.snapshot())

    @router.get("/events", response_class=Response)
    async def events(last_event_id: Annotated[int, Header(ge=0, le=_MAX_NOTE)] = 0) -> Response:
        """Server-sent events: snapshots as they change, and log entries."""
        return EventStream(feed.stream(last_event_id), "text/event-stream", failures.response_to)

    @router.get("/status")
    async def status() -> dict[str, Any]:
        """What this node is doing: the fields of `shoal status --json`."""
        return status_facts(control.snapshot())

    @router.get("/peers")
    async def peers() -> list[dict[str, Any]]:
        """The members of the swarm, with speed, link, score and state."""
        return [to_json(peer) for peer in control.snapshot().peers]

    @router.get("/blocks")
    async def blocks() -> list[dict[str, Any]]:
        """For each block, the members that serve it."""
        return coverage(control.snapshot())

    @router.get("/sessions")
    async def sessions() -> list[dict[str, Any]]:
        """Sessions that this node asks for or serves."""
        return [to_json(session) for session in control.snapshot().active_sessions]

    @router.get("/swarms")
    async def swarms() -> list[dict[str, Any]]:
        """The swarms that this node has saved."""
        return [to_json(swarm) for swarm in control.snapshot().swarms]

    @router.get("/invites")
    async def invites(name: Annotated[str | None, Query(max_length=_MAX_TEXT)] = None) -> list[dict[str, Any]]:
        """The limited invites that this node made, with those that joined and those that wait."""
        return [to_json(invite) for invite in await control.invites(name)]

    @router.get("/revoked")
    async def revoked() -> dict[str, Any]:
        """The peers that this node removed from the swarm."""
        return {"revoked": list(await control.revoked())}

    @router.get("/jobs")
    async def jobs() -> list[dict[str, Any]]:
        """The fine-tuning jobs of this home, the newest first."""
        return [to_json(job) for job in await control.jobs()]

    @router.get("/train")
    async def trainings() -> list[dict[str, Any]]:
        """The training jobs of this home, the newest first."""
        return await control.trainings()

    @router.get("/train/joinable")
    async def joinable_trainings() -> list[dict[str, Any]]:
        """The training jobs of other members that this node never took part in, by name."""
        return [to_json(job) for job in await control.joinable_trainings()]

    @router.get("/prospects")
    async def prospects() -> dict[str, Any]:
        """Swarms nearby and models on this machine, with the speed to expect."""
        return to_json(await control.prospects())

    @router.get("/models")
    async def models(folder: Annotated[str | None, Query(max_length=_MAX_TEXT)] = None) -> list[dict[str, Any]]:
        """Models on this machine that a swarm could be created of, or those below one folder."""
        return [to_json(model) for model in await control.models(folder)]

    @router.get("/models/search")
    async def search_models(words: Annotated[str, Query(min_length=1, max_length=200)]) -> list[dict[str, Any]]:
        """Models of the Hugging Face Hub that match some words."""
        return [to_json(model) for model in await control.search_models(words)]

    @router.get("/id")
    async def identity() -> dict[str, str]:
        """The node's peer id."""
        return {"peer_id": control.snapshot().peer_id}

    @router.get("/logs")
    async def logs(after: Annotated[int, Query(ge=0, le=_MAX_NOTE)] = 0) -> dict[str, Any]:
        """Log entries after a number."""
        return {"pid": os.getpid(), "rows": [dataclasses.asdict(row) for row in RECENT.after(after)]}

    @router.get("/recording")
    async def recording() -> list[dict[str, Any]]:
        """The lines of a recording of the last ten minutes, which `shoal doctor --bundle` packs."""
        return await control.recent()

    @router.get("/doctor")
    async def doctor() -> list[dict[str, Any]]:
        """The network checks of `shoal doctor`."""
        return [dataclasses.asdict(check) for check in control.network_checks()]

    return router


def _command_routes(control: Control) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/create")
    async def create(request: CreateRequest) -> dict[str, Any]:
        """Create a swarm of a model on this machine and join it."""
        return to_json(await control.create(request.name, request.model, private=request.private))

    @router.post("/preview")
    async def preview(request: PreviewRequest) -> dict[str, Any]:
        """Check an invite, a name or a model before joining or creating, and tell what is known of it."""
        return to_json(await control.preview(request.target, request.name, request.model))

    @router.post("/pull")
    async def pull(request: PullRequest) -> dict[str, Any]:
        """Download a model of the Hugging Face Hub."""
        return to_json(await control.pull(request.model))

    @router.post("/join")
    async def join(request: JoinRequest) -> dict[str, Any]:
        """Join a swarm by name or invite."""
        return to_json(await control.join(request.target, force=request.force))

    @router.post("/leave")
    async def leave(request: LeaveRequest) -> dict[str, Any]:
        """Leave a swarm and forget it."""
        return to_json(await control.leave(request.name))

    @router.post("/invite")
    async def invite(request: InviteRequest) -> dict[str, Any]:
        """Make an invite to a swarm."""
        return invite_facts(await control.invite(request.name, request.limits()))

    @router.post("/invites/approve")
    async def approve(request: PeerRequest) -> dict[str, Any]:
        """Let a peer in that waits for approval."""
        return to_json(await control.decide(request.peer, approve=True))

    @router.post("/invites/refuse")
    async def refuse(request: PeerRequest) -> dict[str, Any]:
        """Refuse a peer that waits for approval."""
        return to_json(await control.decide(request.peer, approve=False))

    @router.post("/invites/cancel")
    async def cancel(request: CancelRequest) -> dict[str, Any]:
        """Make an invite useless; those that joined with it stay."""
        return to_json(await control.cancel_invite(request.id))

    @router.post("/revoke")
    async def revoke(request: RevokeRequest) -> dict[str, Any]:
        """Remove a peer from the swarm, or let it join again."""
        return {"revoked": list(await control.revoke(request.peer, remove=request.remove))}

    @router.post("/jobs")
    async def start_job(request: JobRequest) -> dict[str, Any]:
        """Begin a fine-tuning job over the swarm."""
        return to_json(await control.start_job(_wish(request)))

    @router.post("/jobs/forecast")
    async def forecast_job(request: JobRequest) -> dict[str, Any]:
        """What a fine-tuning job would be: its steps and how long they take, and the members that would train it."""
        forecast = await control.forecast_job(_wish(request))
        route = [to_json(hop) for hop in hop_views(forecast.route)]
        return {**dataclasses.asdict(forecast), "seconds": forecast.seconds, "route": route}

    @router.post("/jobs/resume")
    async def resume_job(request: JobAction) -> dict[str, Any]:
        """Go on with a job that was paused, or that failed."""
        return to_json(await control.resume_job(request.job))

    @router.post("/jobs/pause")
    async def pause_job(request: JobAction) -> dict[str, Any]:
        """Pause a job after the step that it is at."""
        return to_json(await control.end_job(request.job, "pause"))

    @router.post("/jobs/stop")
    async def stop_job(request: JobAction) -> dict[str, Any]:
        """Stop a job for good; what it has learned is removed."""
        return to_json(await control.end_job(request.job, "stop"))

    @router.post("/train")
    async def found_training(request: TrainRequest) -> dict[str, Any]:
        """Found a training job in the swarm and take part in it."""
        return await control.found_training(_train_wish(request))

    @router.post("/train/forecast")
    async def forecast_training(request: TrainRequest) -> dict[str, Any]:
        """What a training job would be: its text, weights, memory and rounds."""
        return await control.forecast_training(_train_wish(request))

    @router.post("/train/join")
    async def join_training(request: TrainJoinRequest) -> dict[str, Any]:
        """Take part in a training job of the swarm; while its text is fetched, `waiting` of the answer says so."""
        return await control.join_training(request.job, request.data, request.licence)

    @router.post("/train/leave")
    async def leave_training(request: TrainAction) -> dict[str, Any]:
        """Take no more part in a training job; steps that were not merged yet are lost."""
        return await control.leave_training(request.job)

    @router.post("/train/remove")
    async def remove_training(request: TrainAction) -> dict[str, Any]:
        """Remove a training job in which this node takes no part, with its files."""
        return await control.remove_training(request.job)

    @router.post("/chat", response_class=Response)
    async def chat(request: ChatRequest) -> Response:
        """A reply of the swarm, as JSON lines."""
        lines = json_lines(control.reply(request.request()))
        return EventStream(lines, "application/x-ndjson", failures.response_to, form=JSON_LINES)

    @router.post("/pause")
    async def pause(request: PauseRequest) -> dict[str, Any]:
        """Pause hosting, for a while or until resumed."""
        return to_json(await control.pause(request.for_s))

    @router.post("/drain")
    async def drain() -> dict[str, Any]:
        """Let sessions finish, then pause hosting."""
        return to_json(await control.drain())

    @router.post("/resume")
    async def resume() -> dict[str, Any]:
        """Host again."""
        return to_json(await control.resume())

    @router.post("/stop", status_code=202)
    async def stop() -> dict[str, bool]:
        """Drain and end the node."""
        control.stop()
        return {"stopping": True}

    return router


def _config_routes(control: Control) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.get("/config")
    async def config() -> list[dict[str, Any]]:
        """All settings with value, default and origin."""
        return [control.config().facts(name) for name in SETTINGS]

    @router.put("/config/{name}")
    async def set_config(name: str, request: SettingRequest) -> dict[str, Any]:
        """Change one setting, or reset it to its default."""
        await control.set_config(name, request.value)
        return control.config().facts(name)

    return router
