"""A node that the API's tests command: it remembers what it was asked and answers at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import trio

from app.api.client import Client
from app.api.control import Joining
from app.api.event_log import EventLog
from app.api.keys import KeyRing
from app.api.routes import build_application
from app.api.server import open_socket, serve, url_of
from app.asker.asker import PromptTooLong, ReplyTooLong
from app.asker.reply import ReplyDone, ReplyEvent, ReplyStats, ReplyText, ReplyWaiting
from app.asker.reply_service import ReplyRequest
from app.config.file import Config
from app.config.settings import Settings, Value
from app.core.errors import AppError, NoAdapter, UnknownSwarm
from app.core.span import Span
from app.joining.admission import MadeInvite
from app.rounds.founding import TrainWish
from app.rounds.train_store import facts_of
from app.routing.route import Hop, NoRoute
from app.snapshot.codec import to_json
from app.snapshot.recording import RecentFrames
from app.snapshot.views import (
    CourtesyView,
    FitView,
    GuestView,
    InviteView,
    JobView,
    JoinableView,
    ModelView,
    OfferView,
    PeerView,
    ProspectsView,
    Snapshot,
    SwarmView,
)
from app.swarm.invitations import InviteLimits
from app.swarm.invite import Invite
from app.system.doctor import Check
from app.training.material import TrainingWish
from app.training.swarm_jobs import JobForecast
from engine.errors import EngineError
from engine.text.output_form import CallPiece, ConstraintError, ReplyPart, ThoughtText, TokenLogprob
from tests.app.rounds.statements import RECORD

TOKEN = "a-token-that-is-long-enough"
HASH = "ab" * 32
SWARM = SwarmView("home", HASH, "home#abababababababababab", active=True)
INVITE = InviteView("1a2b3c4d", "open", 1, 2, 1, approve=True, waiting=(GuestView("12D3guest", "guest", 1),))
# What a reply of so many tokens at most ends with.
FAILURES: dict[int, AppError | EngineError] = {
    1: AppError("no route: nobody serves block 3"),
    2: PromptTooLong("the prompt has 9 tokens, but the model's context is 8: shorten it", 9),
    3: NoRoute(3),
    4: NoRoute(3, busy=True),
    5: NoAdapter("no adapter is named pond: there are none yet"),
    6: ConstraintError("guided_regex", "unclosed group"),
    70: ReplyTooLong("input length and `max_tokens` exceed context limit: 9 + 70 > 12"),
    80: NoRoute(3, code="cache_exceeded"),
}

# Words of a prompt that the double takes as parts of its reply.
PARTS: dict[str, tuple[ReplyPart, ...]] = {
    "hm": (ThoughtText("hm"),),
    "call": (CallPiece(0, "call_1", "clock", ""), CallPiece(0, "call_1", None, '{"zone"')),
    "go": (CallPiece(0, "call_1", None, ': "UTC"}'),),
    "again": (CallPiece(1, "call_2", "clock", "{}"),),
}


def _logprob(word: str, top: int | None) -> TokenLogprob | None:
    if top is None:
        return None
    likely = tuple(TokenLogprob(number, word.encode(), -0.5) for number in range(top))
    return TokenLogprob(7, word.encode(), -0.5, likely)


JOB = JobView(
    job="ab" * 6, out="facts", model=HASH, model_name="tiny", data="facts.jsonl", swarm="s", status="running", step=2,
    steps=5, tokens=90, seconds=1.5, tokens_per_s=60.0, left_s=2.5, loss=1.5, losses=(2.0, 1.5), validation=((0, 2.1),),
    why="", rank=8, alpha=16.0, targets=("q", "v"),
)  # fmt: skip
TRAINING = facts_of(RECORD) | {"status": "running", "round": 3}


class DoubleNode:
    """Satisfies `app.api.control.Control`."""

    def __init__(self) -> None:
        self.event_log = EventLog()
        self.asked: list[tuple[object, ...]] = []
        self.stopped = trio.Event()
        self.begun, self.freed = trio.Event(), trio.Event()
        self.state = "client"

    def snapshot(self) -> Snapshot:
        peers = (PeerView("12D3other", "box", 0, 4, 0.001, "lan", 1.0, "serving"),)
        return Snapshot(
            "12D3me",
            "client",
            self.state,
            "http://127.0.0.1:1",
            swarm="home",
            manifest=HASH,
            peers=peers,
            swarms=(SWARM,),
        )

    async def create(self, name: str, model: str, *, private: bool) -> Joining:
        self.asked.append(("create", name, model, private))
        return Joining(SWARM, "client", "")

    async def join(self, target: str, *, force: bool = False) -> Joining:
        self.asked.append(("join", target))
        if target == "nowhere":
            raise UnknownSwarm("nobody knows\n the swarm nowhere")
        if target == "broken":
            raise ZeroDivisionError("a bug")
        return Joining(SWARM, "client", "joined")

    async def leave(self, name: str) -> SwarmView:
        self.asked.append(("leave", name))
        return SWARM

    async def invite(self, name: str | None, limits: InviteLimits | None = None) -> MadeInvite:
        self.asked.append(("invite", name, limits))
        return MadeInvite(Invite(name or "home", HASH))

    async def invites(self, name: str | None) -> list[InviteView]:
        return [INVITE]

    async def decide(self, peer: str, *, approve: bool) -> GuestView:
        self.asked.append(("decide", peer, approve))
        return INVITE.waiting[0]

    async def cancel_invite(self, identifier: str) -> InviteView:
        self.asked.append(("cancel", identifier))
        return INVITE

    async def revoked(self) -> tuple[str, ...]:
        return ("12D3gone",)

    async def revoke(self, peer: str, *, remove: bool) -> tuple[str, ...]:
        self.asked.append(("revoke", peer, remove))
        return ("12D3gone",)

    async def tokenize(self, request: ReplyRequest, *, add_special: bool = True) -> list[int]:
        text = request.prompt if isinstance(request.prompt, str) else " ".join(m["content"] for m in request.messages)
        return [1] * add_special + [len(word) for word in text.split()]

    async def detokenize(self, token_ids: Sequence[int], owner: str = "") -> str:
        return " ".join(map(str, token_ids))

    async def embed(self, prompt: str | tuple[int, ...], owner: str = "") -> tuple[list[float], int]:
        return [0.6, 0.8], len(prompt)

    async def adapters(self) -> list[str]:
        return ["pond"]

    async def trainings(self) -> list[dict[str, Any]]:
        return [TRAINING]

    async def joinable_trainings(self) -> list[JoinableView]:
        return [JoinableView("1a2b", "birds", "12D3KooWAnna", 40)]

    async def found_training(self, wish: TrainWish) -> dict[str, Any]:
        self.asked.append(("found_training", wish))
        return TRAINING

    async def forecast_training(self, wish: TrainWish) -> dict[str, Any]:
        return {"name": wish.name, "rounds": 20}

    async def join_training(self, job: str, data: Sequence[str] = (), licence: str = "") -> dict[str, Any]:
        self.asked.append(("join_training", job))
        return TRAINING

    async def leave_training(self, job: str) -> dict[str, Any]:
        self.asked.append(("leave_training", job))
        return TRAINING

    async def remove_training(self, job: str) -> dict[str, Any]:
        self.asked.append(("remove_training", job))
        return TRAINING

    async def jobs(self) -> list[JobView]:
        return [JOB]

    async def start_job(self, wish: TrainingWish) -> JobView:
        self.asked.append(("start_job", wish))
        return JOB

    async def forecast_job(self, wish: TrainingWish) -> JobForecast:
        return JobForecast(40, 2, 1, 0, 900, 5, (Hop("12D3other", Span(0, 4)),))

    async def resume_job(self, job: str) -> JobView:
        self.asked.append(("resume_job", job))
        return JOB

    async def end_job(self, job: str, wish: Literal["pause", "stop"]) -> JobView:
        self.asked.append((wish, job))
        return JOB

    async def reply(self, request: ReplyRequest) -> AsyncGenerator[ReplyEvent, None]:
        self.asked.append(("chat", request))
        if request.max_tokens in FAILURES:
            raise FAILURES[request.max_tokens]
        text = request.messages[-1]["content"] if request.messages else request.prompt
        words = text.split() if isinstance(text, str) else [str(token_id) for token_id in text or ()]
        self.begun.set()
        try:
            for word in words:
                if word == "late":
                    yield ReplyWaiting(3, 15.0)
                    continue
                if word == "never":
                    raise NoRoute(3)
                if word == "wait" and word is words[0]:
                    await trio.sleep_forever()
                yield ReplyText(word, parts=PARTS.get(word), logprob=_logprob(word, request.logprobs))
                if word == "break":
                    raise AppError("block 3 was lost")
                if word == "wait":
                    await trio.sleep_forever()
            yield ReplyDone("".join(words), ReplyStats(3, list(range(len(words))), "stop", cached_tokens=2))
        finally:
            self.freed.set()

    def config(self) -> Config:
        return Config(Settings(), {})

    async def set_config(self, name: str, text: str | None) -> Value:
        self.asked.append(("set", name, text))
        return text

    async def prospects(self) -> ProspectsView:
        return ProspectsView((OfferView("starter", "small", FitView(3, 3), 12),), None, 34)

    async def preview(self, target: str | None, name: str | None, model: str | None) -> OfferView:
        return OfferView(target or name or model or "", "small", FitView(3, 3), 12)

    async def models(self, folder: str | None) -> list[ModelView]:
        return [ModelView("starter", "small", 12, "GGUF", folder is None)]

    async def search_models(self, words: str) -> list[ModelView]:
        return [ModelView(words, words)]

    async def pull(self, model: str) -> ModelView:
        return ModelView(model, model, here=True)

    async def recent(self) -> list[dict[str, Any]]:
        ring = RecentFrames(600_000, 10**6)
        ring.take(1_700_000_000_000, to_json(self.snapshot()))
        return ring.entries("0.1.0")

    def network_checks(self) -> Sequence[Check]:
        return [Check("clock", "ok", "fine")]

    async def pause(self, for_s: float | None) -> CourtesyView:
        self.asked.append(("pause", for_s))
        return CourtesyView(True, "hand")

    async def drain(self) -> CourtesyView:
        self.asked.append(("drain",))
        return CourtesyView(True, "hand")

    async def resume(self) -> CourtesyView:
        self.asked.append(("resume",))
        return CourtesyView()

    def stop(self) -> None:
        self.stopped.set()


@asynccontextmanager
async def running_api(node: DoubleNode, keys: KeyRing | None = None) -> AsyncIterator[Client]:
    """The real server on a free port, and a client with the right token."""
    sock = open_socket(0, explicit=True)
    client = Client(url_of(sock), TOKEN)
    over = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, build_application(node, TOKEN, "0", keys=keys), sock, over.wait)
        try:
            yield client
        finally:
            node.event_log.close()
            over.set()


def post_scope(path: str) -> dict[str, Any]:
    """The ASGI scope of a request with JSON and the right token, for tests without a socket."""
    headers = {"host": "127.0.0.1", "authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
