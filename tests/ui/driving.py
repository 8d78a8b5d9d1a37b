"""A dashboard driven by keys against a scripted node, for the tests of what keys do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from textual import events
from textual.pilot import Pilot

from app.api.client import Client, Hangup
from app.core.errors import AppError
from app.snapshot.codec import to_json
from app.snapshot.views import (
    FitView,
    JobView,
    JoinableView,
    ModelView,
    OfferView,
    ProspectsView,
    Snapshot,
    TrainingView,
)
from tests.ui.fixed import HEALTHY, Clock, fill
from tests.ui.rendering import StillDashboard, settle, text_of_screen
from ui.state.store import Store

GB = 10**9
PATIENCE_S = 20.0
STARTER = OfferView("starter", "small", FitView(30, 30), 93 * 10**6, alone_tokens_per_s=25.0)


class ScriptedNode(Client):
    """A node that keeps its settings and does what it is asked at once."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", "token")
        self.config: dict[str, Any] = {"deny": ["10.0.0.0/8"], "max_vram": 7 * GB, "pause_on_battery": True}
        self.state = "serving"
        self.asked: list[str] = []
        self.prospects: ProspectsView | AppError = ProspectsView((STARTER,), None, 9 * GB, 14.0 * GB)
        self.done: dict[str, Any] = {}  # further figures of a reply
        self.dead: set[str] = set()  # swarms of which no member answers
        self.chats: list[dict[str, Any]] = []
        self.created: list[dict[str, Any]] = []
        self.pulling = threading.Event()  # a download waits until it is set
        self.pulling.set()
        self.jobs: list[JobView] | AppError = []
        self.trainings: list[TrainingView] = []
        self.joinable: list[JoinableView] = []
        self.reply: list[dict[str, Any] | AppError] = [{"text": "Because."}]  # pieces; an `AppError` is raised

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        if path == "/control/prospects":
            if isinstance(self.prospects, AppError):
                raise self.prospects
            return to_json(self.prospects)
        if path.startswith("/control/models"):
            self.asked.append(path)
            here = ModelView("/m/llama.gguf", "llama", 16 * GB, "GGUF", True)
            there = ModelView("org/qwen", "org/qwen")
            return [to_json(there if "search" in path else here)]
        if path == "/control/jobs":
            if isinstance(self.jobs, AppError):
                raise self.jobs
            return [to_json(job) for job in self.jobs]
        if path == "/control/train":
            return [to_json(job) for job in self.trainings]
        if path == "/control/train/joinable":
            return [to_json(job) for job in self.joinable]
        if path == "/v1/models":
            return {"data": [{"id": "reading-club"}, {"id": "reading-club+sonnets"}]}
        if path.startswith("/control/logs"):
            return {"pid": 1, "rows": []}
        assert path == "/control/config"
        return [{"name": name, "value": value} for name, value in self.config.items()]

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = 1.0) -> Any:
        if path == "/control/preview":
            return to_json(self._preview(**body))
        named = (body[name] for name in ("target", "model", "peer", "job") if body.get(name))
        self.asked.append(f"{path} {next(named, '')}".strip())
        if path == "/control/train/leave":
            self.trainings = [replace(job, status="left") for job in self.trainings]
            return to_json(self.trainings[0])
        if path == "/control/train/remove":
            removed, self.trainings = self.trainings[0], []
            return to_json(removed)
        if path.startswith("/control/jobs/"):
            return to_json(self._act_on_job(path.rpartition("/")[2], body["job"]))
        if path == "/control/invite":
            limits = {
                "id": "1a2b3c4d",
                "uses": 1,
                "expires_at_ms": int(time.time() * 1000) + 5_400_000,
                "approve": bool(body.get("approve")),
            }
            return {"invite": "shoal:a2b3", "name": "reef", "private": True, "limits": limits}
        if path == "/control/join" and body["target"] in self.dead and not body.get("force"):
            text = "birds: no member was found. This node stays in reef; `shoal join --force` moves it anyway"
            raise AppError(text, code="no_member")
        if path == "/control/pull":
            assert self.pulling.wait(PATIENCE_S)
        if path == "/control/create":
            self.created.append(body)
        if path in ("/control/join", "/control/create"):
            return {"swarm": {"name": body.get("name") or body.get("target")}, "state": "joining", "reason": ""}
        self.state = {"/control/pause": "paused", "/control/resume": "serving"}.get(path, self.state)
        return {}

    def _act_on_job(self, what: str, job_id: str) -> JobView:
        assert not isinstance(self.jobs, AppError)
        at = next(index for index, job in enumerate(self.jobs) if job.job == job_id)
        self.jobs[at] = replace(self.jobs[at], status={"pause": "paused", "resume": "running", "stop": "stopped"}[what])
        return self.jobs[at]

    def _preview(self, target: str = "", name: str = "", model: str = "") -> OfferView:
        if target.startswith("shoal:not") or " " in name or model.endswith("broken.gguf"):
            raise AppError(
                "the invite is mistyped or cut off; copy the whole line again" if target else "no such thing"
            )
        if target:
            return OfferView("reef#1a2b3c4d1a2b3c4d1a2b", "Llama-8B", FitView(8, 32), 5, members=3, size_bytes=16 * GB)
        return OfferView(name or model, "Llama-8B", FitView(8, 32), 0, size_bytes=16 * GB, context_length=8192)

    def set_config(self, name: str, value: str | None) -> Any:
        self.config[name] = value.split(",") if name == "deny" and value else value
        shown = int(value) if name == "max_vram" and value is not None else self.config[name]
        return {"name": name, "value": shown}

    def chat(
        self, request: dict[str, Any], *, silence_s: float = 1.0, hangup: Hangup | None = None
    ) -> Iterator[dict[str, Any]]:
        self.chats.append(request)
        for piece in self.reply:
            if isinstance(piece, AppError):
                raise piece
            yield piece
        figures = {"text": "", "token_ids": [1] * len(self.reply), "ttft_s": 0.5, "prompt_tokens": 12, **self.done}
        yield {"done": figures}

    def snapshot(self) -> Snapshot:
        return replace(HEALTHY, state=cast(Any, self.state))


class ScriptedDoor:
    """Leads to the scripted node."""

    can_start = True

    def __init__(self, node: ScriptedNode) -> None:
        self.node = node
        self.started = 0
        self.file = {"listen": {"name": "listen", "value": "7464", "default": "7464", "expected": "addresses"}}

    def client(self) -> Client:
        return self.node

    def coming_up(self) -> bool:
        return False

    def ended(self) -> str | None:
        return None

    def start(self) -> None:
        self.started += 1

    def settings(self) -> list[dict[str, Any]]:
        return list(self.file.values())

    def set_setting(self, name: str, text: str | None) -> None:
        if text == "nonsense":
            raise AppError(f"the setting {name} cannot be {text!r}")
        self.file[name] = {**self.file[name], "value": text or self.file[name]["default"]}


class DrivenDashboard(StillDashboard):
    """A dashboard with a door, but without the line of events."""

    def __init__(self, node: ScriptedNode, folder: Path | None = None) -> None:
        store = Store(Clock())
        fill(store, "healthy")
        super().__init__(None, store=store, folder=folder)
        self.door = ScriptedDoor(node)
        self.asked_first_run = True
        self.said: list[str] = []  # notifications, which are not painted in a test

    def say(self, text: str) -> None:
        self.said.append(text)

    def complain(self, text: str) -> None:
        self.said.append(text)


Drive = Callable[[DrivenDashboard, Pilot[None]], Awaitable[None]]


def driven(node: ScriptedNode, drive: Drive, folder: Path | None = None, size: tuple[int, int] = (120, 40)) -> None:
    """Let keys be pressed in a dashboard of this node."""

    async def live() -> None:
        app = DrivenDashboard(node, folder)
        async with app.run_test(size=size) as pilot:
            await settle(app, pilot)
            await drive(app, pilot)

    asyncio.run(live())


async def until(app: DrivenDashboard, pilot: Pilot[None], holds: Callable[[], object]) -> None:
    """Let the dashboard work until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, text_of_screen(app)
        await pilot.pause(0.01)


def press_at_once(app: DrivenDashboard, *keys: str) -> None:
    """Let keys arrive faster than they are handled, as from a slow connection or a busy machine."""
    for key in keys:
        app.post_message(events.Key({"/": "slash", "\r": "enter"}.get(key, key), key))
