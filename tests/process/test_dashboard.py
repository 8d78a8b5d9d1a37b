"""The dashboard, driven by keys, against real nodes: from the first run to leaving, and a node that dies under it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Static

from app.cli.dashboard import HomeConnector
from tests.process.node_process import LOOPBACK, PATIENCE_S, Place, Serving
from tests.ui.rendering import text_of_screen
from ui.app import Dashboard
from ui.screens.chat import Chat
from ui.screens.first_run import FirstRun
from ui.screens.invite import InviteScreen
from ui.state.conversations import Conversations
from ui.state.reply_stream import Sampling
from ui.widgets.ask_box import AskBox, LiveLine

SIZE = (120, 40)
LONG_REPLY = 400  # some three seconds: a hop is killed meanwhile


async def until(pilot: Pilot[None], check: Callable[[], object], what: str) -> None:
    """Let the dashboard live until something is so."""
    deadline = time.monotonic() + 3 * PATIENCE_S  # a node that the dashboard starts has no priority of ours
    while not check():
        assert time.monotonic() < deadline, f"{what}\n{text_of_screen(pilot.app)}"
        await pilot.pause(0.05)


@dataclass(frozen=True)
class Pond:
    """A swarm of two nodes that hold all blocks each."""

    invite: str
    nodes: dict[str, Serving]  # by peer id


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Pond]:
    """Two nodes that hold all blocks each, and the invite to their swarm."""
    places = [Place(tmp_path / name, tmp_path / "cache") for name in ("left", "right")]
    assert places[0].shoal("create", "pond", "--model", "tiny-random").status == 0
    with Serving(places[0], "--discovery=invite", "--blocks=0:8", "--device=cpu", max_vram="1GB") as left:
        left.ready()
        invite = places[0].shoal("invite").out.strip()
        more = {"SHOAL_INVITE": invite}
        with Serving(places[1], "--discovery=invite", "--blocks=0:8", "--device=cpu", max_vram="1GB", **more) as right:
            right.ready()
            peers = [str(place.node_file()["peer_id"]) for place in places]
            yield Pond(invite, dict(zip(peers, (left, right), strict=True)))


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HomeConnector]:
    """The way to a node that the dashboard starts; it is ended at the end."""
    folder = tmp_path / "home"
    folder.mkdir()
    settings = {"LISTEN": LOOPBACK, "API_PORT": "0", "DISCOVERY": "invite", "DEVICE": "cpu", "BLOCKS": "2:6"}
    for name, value in {**settings, "MAX_VRAM": "1GB", "CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(f"SHOAL_{name}", value)
    kept = Conversations(folder)
    kept.choose("sampling", asdict(Sampling(temperature=0.0, max_tokens=16)))
    kept.close()
    door = HomeConnector(folder)
    yield door
    if door.process is not None:
        door.process.terminate()
        assert door.process.wait(PATIENCE_S) == 0


@pytest.mark.timeout(400)
def test_from_the_first_run_to_leaving(
    door: HomeConnector, two_nodes: Pond, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    inherited = os.open(tmp_path / "inherited", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(inherited, True)

    async def live() -> None:
        app = Dashboard(door, folder=door.folder)
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: isinstance(app.screen, FirstRun), "the first run is offered")
            await _first_run(app, pilot, two_nodes.invite)
            await _chat(app, pilot)
            await _hop_dies(app, pilot, two_nodes)
            await _second_thoughts(app, pilot)
            await _pause_and_resume(app, pilot)
            await _invite_and_leave(app, pilot)

    asyncio.run(live())
    assert door.process is not None
    assert door.process.poll() is None  # the dashboard has gone, the node stays
    assert _shared_files(door.process.pid, str(tmp_path / "inherited")) == []
    os.close(inherited)


def _shared_files(pid: int, inherited: str) -> list[str]:
    """What a process has open of a terminal, of a pipe to whoever started it, or of a file that was inheritable."""
    folder = Path(f"/proc/{pid}/fd")
    targets = [os.readlink(entry) for entry in folder.iterdir() if entry.is_symlink()] if folder.exists() else []
    return [target for target in targets if target.startswith(("/dev/pts", "/dev/tty", "pipe:", inherited))]


async def _first_run(app: Dashboard, pilot: Pilot[None], invite: str) -> None:
    first = cast(FirstRun, app.screen)
    await until(pilot, lambda: first.state.pauses, "the settings are known")
    first.post_message(events.Paste(invite))
    await until(pilot, lambda: first.state.step == 1, "the invite is taken")
    await pilot.press("enter")
    await until(pilot, lambda: first.state.step == 2 or first.state.problem, "the swarm is joined")
    assert first.state.problem == ""
    await until(pilot, lambda: app.store.snapshot and app.store.snapshot.state == "serving", "the node serves")


async def _chat(app: Dashboard, pilot: Pilot[None]) -> None:
    await pilot.press(*"hello", "enter")
    await until(pilot, lambda: isinstance(app.screen, Chat), "the chat is open")
    chat = cast(Chat, app.screen)
    await until(pilot, lambda: len(chat._messages) == 2, "the reply has ended")
    question, reply = chat._messages
    assert question.content == "hello"
    assert (reply.figures["finish_reason"], len(reply.figures["token_ids"])) == ("length", 16)
    assert not reply.figures.get("error")
    await pilot.pause()
    assert " s · 16 tokens · " in text_of_screen(app)
    assert "read " in text_of_screen(app)
    await pilot.press("escape", "escape", "2")
    await until(pilot, lambda: "peers  2" in text_of_screen(app), "both peers are shown")
    assert "you 2:6" in text_of_screen(app)


async def _hop_dies(app: Dashboard, pilot: Pilot[None], pond: Pond) -> None:
    await pilot.press("3")
    chat = cast(Chat, app.screen)
    chat.query_one(AskBox).focus()
    short, chat.sampling = chat.sampling, replace(chat.sampling, max_tokens=LONG_REPLY)
    await pilot.press(*"more", "enter")
    live = chat.query_one(LiveLine)
    await until(pilot, lambda: live.progress and live.progress.tokens >= 5 and chat._route, "the reply has begun")
    victim = next(hop["peer"] for hop in chat._route if hop["peer"] in pond.nodes)
    pond.nodes[victim].process.kill()
    await until(pilot, lambda: "the reply continues" in text_of_screen(app), "the loss is shown")
    assert live.progress is not None  # while it was still coming
    assert victim not in {hop["peer"] for hop in chat._route}
    await until(pilot, lambda: len(chat._messages) == 4, "the reply has ended")
    figures = chat._messages[-1].figures
    assert (len(figures["token_ids"]), figures.get("error")) == (LONG_REPLY, None)
    assert figures["recoveries"] >= 1
    await until(pilot, lambda: "failed; the reply continued" in text_of_screen(app), "it is told at the end")
    chat.sampling = short


async def _second_thoughts(app: Dashboard, pilot: Pilot[None]) -> None:
    chat = cast(Chat, app.screen)
    await pilot.press("ctrl+r")  # which is shorter this time
    await until(pilot, lambda: len(chat._messages[-1].figures.get("token_ids", ())) == 16, "it is asked again")
    assert (len(chat._messages), chat._messages[-2].content) == (4, "more")
    await pilot.press("ctrl+y")
    assert app.clipboard == chat._messages[-1].content
    await pilot.press("ctrl+e")
    box = chat.query_one(AskBox)
    await until(pilot, lambda: box.text == "more", "the question is in the input")
    await pilot.press(*" fish", "enter")

    def is_answered() -> bool:
        return len(chat._messages) == 4 and chat._messages[2].content == "more fish"

    await until(pilot, is_answered, "the edited question is answered")
    assert len(chat._kept.branches(1)) == 3  # the first reply, the second, and the edited question
    await pilot.press("ctrl+x", "ctrl+x")
    first, second = sorted(Path.home().glob("*.md"))
    assert first.read_text() == second.read_text()
    assert "more fish" in first.read_text()
    await pilot.press("escape", "escape")


async def _pause_and_resume(app: Dashboard, pilot: Pilot[None]) -> None:
    await pilot.press("1")
    await pilot.press("p")
    await until(pilot, lambda: app.store.snapshot and app.store.snapshot.state == "paused", "it is paused")
    await until(pilot, lambda: "‖ paused" in text_of_screen(app), "it says so")
    assert "by hand" in text_of_screen(app)
    await until(pilot, lambda: "p resume" in text_of_screen(app), "the footer offers to resume")
    await pilot.press("p")
    await until(pilot, lambda: app.store.snapshot and app.store.snapshot.state == "serving", "it serves again")


async def _invite_and_leave(app: Dashboard, pilot: Pilot[None]) -> None:
    await pilot.press("i")
    await until(pilot, lambda: isinstance(app.screen, InviteScreen), "the invite is open")
    screen = cast(InviteScreen, app.screen)
    await until(pilot, lambda: screen.line.startswith("shoal:"), "the invite is there")
    assert str(screen.query_one("#invite-line", Static).visual)
    await pilot.press("escape", "ctrl+p")
    await pilot.press(*"leave the swarm")
    await until(pilot, lambda: "And forget it" in text_of_screen(app), "the palette finds it")
    await pilot.press("enter")
    await until(pilot, lambda: "Leave pond?" in text_of_screen(app), "it asks first")
    await pilot.press("enter")
    await until(pilot, lambda: app.store.snapshot and app.store.snapshot.swarm is None, "the swarm is left")
    await until(pilot, lambda: "○ idle" in text_of_screen(app), "it says so")


@pytest.mark.timeout(400)
def test_a_node_that_dies_is_missed_and_found_again(tmp_path: Path) -> None:
    place = Place(tmp_path / "home", tmp_path / "cache")
    assert place.shoal("create", "pond", "--model", "tiny-random").status == 0

    async def live() -> None:
        with Serving(place, "--discovery=invite") as node:
            node.ready()
            app = Dashboard(HomeConnector(place.home), folder=place.home)
            async with app.run_test(size=SIZE) as pilot:
                await until(pilot, lambda: "○ client" in text_of_screen(app), "the node is seen")
                node.end(signal.SIGKILL)
                await until(pilot, lambda: "× node away, retry in" in text_of_screen(app), "the node is missed")
                shown = text_of_screen(app).partition("what happened")[0]
                assert "client" not in shown  # nothing of its last word is shown as true
                assert "pond" not in shown
                with Serving(place, "--discovery=invite") as again:
                    again.ready()
                    await until(pilot, lambda: "○ client" in text_of_screen(app), "the node is found again")
                    assert app.store.snapshot is not None
                    assert app.store.snapshot.pid == again.process.pid

    asyncio.run(live())
