"""Replies between real processes that live through a frozen, a killed and a leaving hop, and the death of a holder.

One swarm goes through all of it in turn: the tests are in order, and each leaves it poorer. The long form, over many
seeds, is `tests/soak/test_survival.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli.demo_swarm import memory_for
from app.snapshot.recording import read_recording
from app.snapshot.views import Snapshot
from app.system.bug_report import RECORDING
from tests.process.node_process import PATIENCE_S, Place, start, wait_until
from tests.process.process_swarm import Node, ProcessSwarm, Yardstick, open_process_swarm, prompt_of
from tests.ui.rendering import text_of_screen
from ui.replay import Replay

TOKENS = 80
RECORDED_TOKENS = 400  # some seconds, of which a recording has several frames
NODES = ("0:4", "4:8", "4:8", "4:8", "")  # the last one chooses by itself


class Recording:
    """A `shoal record` process beside the asker, ended with Ctrl-C."""

    def __init__(self, place: Place, path: Path) -> None:
        self.path = path
        self._errors = tempfile.TemporaryFile("w+")
        with open(os.devnull, "w+") as nothing:
            streams = (nothing, nothing, self._errors)
            self._process = start(["record", str(path)], place.environment(), streams)

    def latest(self) -> Snapshot:
        """The frame that was written last."""
        recording = read_recording(self.path.read_bytes(), self.path.name)
        return recording.snapshot(len(recording) - 1)

    def latest_members(self) -> list[str]:
        """The members in that frame."""
        return [peer.peer for peer in self.latest().peers]

    def latest_hops(self) -> list[str]:
        """The hops of the latest reply in that frame."""
        route = self.latest().route
        return [] if route is None else [hop.peer for hop in route.hops]

    def __enter__(self) -> Recording:
        wait_until(lambda: self.path.exists() and self.path.stat().st_size, "the first frame is recorded")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        status = self._process.wait(PATIENCE_S)
        self._errors.seek(0)
        assert (status, self._errors.read()) == (0, "")
        self._errors.close()


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSwarm]:
    """Every block is held twice; the last node has room for half of them, and takes what is held least."""
    room, _ = memory_for("tiny-random", 0.5)
    with open_process_swarm(tmp_path_factory.mktemp("nodes"), NODES, spare_memory=room) as swarm:
        swarm.wait_covered(2)
        yield swarm


@pytest.fixture(scope="module")
def yardstick(swarm: ProcessSwarm) -> Yardstick:
    return Yardstick("tiny-random", swarm.asker.place.cache)


def check(swarm: ProcessSwarm, yardstick: Yardstick, seed: int, reply: dict[str, Any], tokens: int = TOKENS) -> None:
    """The reply is the undisturbed one, or differs first where two tokens were all but equal."""
    text = prompt_of(seed)
    expected = yardstick.reply(text, tokens)
    assert reply["token_ids"] == expected or yardstick.is_tie(text, expected, reply["token_ids"])
    assert reply["recoveries"] >= 1
    wait_until(swarm.no_sessions, "every hop is free again")


def one_of_many(nodes: list[Node]) -> Node:
    """A hop of a route that runs the second half, or a part of it: a busy machine may divide it between two."""
    return next(node for node in nodes if node.span == "4:8")


def test_a_frozen_hop_costs_seconds_and_does_no_harm_when_it_wakes(swarm: ProcessSwarm, yardstick: Yardstick) -> None:
    def freeze(victim: Node) -> None:
        victim.signal(signal.SIGSTOP)
        swarm.later(8, lambda: victim.signal(signal.SIGCONT))

    reply, _ = swarm.hurt(1, TOKENS, freeze, random.Random(1).choice)
    check(swarm, yardstick, 1, reply)
    assert reply["longest_gap_s"] <= 5


def test_a_killed_hop_costs_hardly_anything_and_is_recorded(
    swarm: ProcessSwarm, yardstick: Yardstick, tmp_path: Path
) -> None:
    with Recording(swarm.asker.place, tmp_path / "kill.shoal") as recording:

        def kill_once_recorded(victim: Node) -> None:
            if victim.peer in recording.latest_hops():
                victim.signal(signal.SIGKILL)
            else:
                swarm.later(10, lambda: kill_once_recorded(victim))

        reply, hurt = swarm.hurt(2, RECORDED_TOKENS, kill_once_recorded, one_of_many)
        check(swarm, yardstick, 2, reply, RECORDED_TOKENS)
        assert reply["longest_gap_s"] <= 2
        assert hurt.victim.peer not in {hop["peer"] for hop in reply["route"]}
        wait_until(lambda: hurt.victim.peer not in recording.latest_members(), "the recording shows who has gone")
    replays_frame_by_frame(recording.path, hurt.victim.peer)


def replays_frame_by_frame(path: Path, victim: str) -> None:
    """Each frame of the recording is shown, forward and back: the victim serves, is of the route, and is gone."""
    recording = read_recording(path.read_bytes(), path.name)

    async def live() -> None:
        app = Replay(recording, now=lambda: 0.0)
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("2", "space")
            shown: list[tuple[bool, bool]] = []
            last = len(recording) - 1
            for key in ["right"] * last + ["left"] * last:
                known = app.store.snapshot
                assert known is not None
                member = any(peer.peer == victim and peer.state == "serving" for peer in known.peers)
                shown.append((member, known.route is not None and any(hop.peer == victim for hop in known.route.hops)))
                await pilot.press(key)
                assert f"frame {app.player.frame + 1} of {last + 1}" in text_of_screen(app)
            forward, back = shown[:last], shown[last:]
            assert (True, True) in forward
            assert back[0] == (False, False)
            assert back[1:] == forward[1:][::-1]

    asyncio.run(live())


def test_a_leaving_hop_hands_over_and_exits_in_order(swarm: ProcessSwarm, yardstick: Yardstick) -> None:
    reply, hurt = swarm.hurt(3, TOKENS, lambda victim: victim.signal(signal.SIGTERM), one_of_many)
    check(swarm, yardstick, 3, reply)
    assert reply["longest_gap_s"] <= 1
    assert hurt.victim.ended() == 0


def test_the_only_holder_dies_and_a_spare_node_takes_its_place(swarm: ProcessSwarm, yardstick: Yardstick) -> None:
    """The reply waits, and goes on where the spare node, which held other blocks, now serves the lost ones."""
    spare = swarm.nodes[-1]
    assert spare.facts()["start"] == 0
    reply, _ = swarm.hurt(4, TOKENS, lambda victim: victim.signal(signal.SIGKILL), one_of_many)
    check(swarm, yardstick, 4, reply)
    assert reply["longest_gap_s"] <= 15
    assert [hop["peer"] for hop in reply["route"]] == [swarm.nodes[0].peer, spare.peer]


def test_a_bug_report_holds_the_last_minutes_and_a_cast_shows_the_dashboard(
    swarm: ProcessSwarm, tmp_path: Path
) -> None:
    place, report, cast = swarm.asker.place, tmp_path / "bug.zip", tmp_path / "shoal.cast"
    place.shoal("doctor", "--bundle", str(report))
    with zipfile.ZipFile(report) as archive:
        recording = read_recording(archive.read(RECORDING), RECORDING)
    dead = {node.peer for node in swarm.nodes if not node.is_running}
    seen = [{peer.peer for peer in recording.snapshot(index).peers} for index in range(len(recording))]
    assert dead
    assert any(dead <= members for members in seen)
    facts = place.facts("record", "--cast", "--for=2s", str(cast))
    header, *lines = [json.loads(line) for line in cast.read_text("utf-8").splitlines()]
    assert (facts["ended"], facts["bytes"]) == ("the time is over", cast.stat().st_size)
    assert (header["version"], header["width"], header["height"]) == (2, 120, 36)
    shown = "".join(text for _, _, text in lines)
    assert "reef" in shown
    assert "38;2;" in shown  # in colour


def test_more_than_the_caches_can_hold_is_refused_with_the_number_that_fits(swarm: ProcessSwarm) -> None:
    begin = time.monotonic()
    answer = swarm.asker.place.shoal("chat", "hello", "--temperature=0", "--max-tokens=4000")
    assert (answer.status, answer.err.count("\n")) == (1, 1)
    needed = re.search(r"(\d+) \+ 4000 > (\d+), which is what the caches of the members hold", answer.err)
    assert needed is not None, answer.err
    prompt, held = map(int, needed.groups())
    assert f"lower max_tokens to {held - prompt}" in answer.err
    assert time.monotonic() - begin < 15


def test_a_frozen_only_holder_is_named_in_time(swarm: ProcessSwarm) -> None:
    spare = swarm.nodes[-1]
    spare.signal(signal.SIGSTOP)
    begin = time.monotonic()
    answer = swarm.asker.place.shoal("chat", "hello", "--temperature=0", "--max-tokens=4")
    assert (answer.status, answer.err.count("\n")) == (1, 1)
    assert "block 4" in answer.err
    assert time.monotonic() - begin < 20
