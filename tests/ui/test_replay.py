"""A recording in the dashboard: played, stepped through frame by frame, to a clear end, without a node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from app.snapshot.codec import to_json
from app.snapshot.recording import FrameEncoder, Recording, read_recording
from app.snapshot.views import FlowView, Snapshot
from tests.ui.fixed import HEALTHY, Clock
from tests.ui.rendering import text_of_screen
from ui.draw.numbers import duration
from ui.replay import FASTEST, SLOWEST, Player, Replay, samples_until
from ui.state.store import KEPT_SAMPLES

BEGAN_MS = 1_700_000_000_000
GONE = replace(HEALTHY, peers=HEALTHY.peers[1:])  # tern was killed
ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202enrut\u009b31m"


def recording_of(*frames: tuple[int, Snapshot], notes: tuple[tuple[int, str], ...] = ()) -> Recording:
    """A recording of snapshots at times in milliseconds, with events."""
    encoder = FrameEncoder(BEGAN_MS)
    lines = [encoder.header("0.1.0")]
    lines += [encoder.frame(BEGAN_MS + t_ms, json.loads(json.dumps(to_json(one)))) for t_ms, one in frames]
    for number, (t_ms, text) in enumerate(notes, 1):
        data = {"number": number, "at_ms": BEGAN_MS + t_ms, "kind": "peer", "text": text}
        lines.append(encoder.note(BEGAN_MS + t_ms, data))
    return read_recording(b"".join(lines), "test")


def kill() -> Recording:
    """A member goes after two seconds and comes back after another two."""
    frames = ((0, HEALTHY), (1000, replace(HEALTHY, sessions=9)), (2000, GONE), (4000, HEALTHY))
    return recording_of(*frames, notes=((2000, "tern fell silent"), (4000, "tern is back")))


def replayed(recording: Recording, drive: Callable[[Replay, Pilot[None], Clock], Awaitable[None]]) -> None:
    """Let keys be pressed in the dashboard of a recording, whose wall clock the test moves."""

    async def live() -> None:
        wall = Clock()
        app = Replay(recording, now=wall)
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            await drive(app, pilot, wall)

    asyncio.run(live())


def test_a_killed_member_goes_and_comes_back_frame_by_frame() -> None:
    async def drive(app: Replay, pilot: Pilot[None], wall: Clock) -> None:
        await pilot.press("2", "space")
        seen = []
        for key in ("right", "right", "right", "left", "left"):
            await pilot.press(key)
            await pilot.pause()
            snapshot = app.store.snapshot
            assert snapshot is not None
            assert f"frame {app.player.frame + 1} of 4" in text_of_screen(app)
            changed = {change.peer.name: change.kind for change in app.store.changes.values()}
            seen.append((len(snapshot.peers), changed, len(app.store.notes)))
        silent, back = (12, {"tern": "gone"}, 1), (13, {"tern": "new"}, 2)
        assert seen == [(13, {}, 0), silent, back, silent, (13, {}, 0)]
        assert "paused" in text_of_screen(app)

    replayed(kill(), drive)


def test_it_plays_at_its_speed_and_says_where_it_ends() -> None:
    async def drive(app: Replay, pilot: Pilot[None], wall: Clock) -> None:
        assert "RECORDING ▶ playing · frame 1 of 4 · 0:00 of 0:04 · 1×" in text_of_screen(app)
        wall.at += 1.5
        app.play()
        assert app.player.frame == 1
        await pilot.press("plus", "plus")
        wall.at += 0.2
        app.play()
        assert (app.player.frame, app.player.speed) == (2, 4.0)
        wall.at += 60
        app.play()
        await pilot.pause()
        assert "■ end of the recording · frame 4 of 4 · 0:04 of 0:04 · 4×" in text_of_screen(app)
        wall.at += 60
        app.play()
        assert app.player.frame == 3
        await pilot.press("space")  # from the beginning
        assert (app.player.frame, app.player.is_playing) == (0, True)
        assert len(app.store.notes) == 0

    replayed(kill(), drive)


def test_nothing_can_be_changed_and_other_tabs_are_not_there() -> None:
    async def drive(app: Replay, pilot: Pilot[None], wall: Clock) -> None:
        for key in ("3", "6", "i", "j", "c", "d", "g", "f5"):
            await pilot.press(key)
            await pilot.pause()
            assert (app.current_mode, len(app.screen_stack)) == ("overview", 1), key
        said: list[str] = []
        app.ask(lambda client: said.append("asked"), failed=said.append)
        assert said == ["this is a recording: nothing can be changed in it"]
        assert " 2 swarm " in text_of_screen(app)
        assert "chat" not in text_of_screen(app).splitlines()[0]

    replayed(kill(), drive)


def test_help_lists_each_key_that_works_in_a_recording_once() -> None:
    async def drive(app: Replay, pilot: Pilot[None], wall: Clock) -> None:
        for tab in ("1", "2"):
            await pilot.press(tab, "question_mark")
            await pilot.pause()
            rows = [str(line.content) for line in app.screen.query(Static)]
            words = [row.split()[-1] for row in rows if len(row) > 10 and row[:8].strip() and row[8:10] == "  "]
            assert {"overview", "swarm", "play/pause", "faster"} <= set(words)
            assert len(words) == len(set(words)), words
            assert not {"chat", "jobs", "logs", "settings", "ban", "pause", "invite", "cap"} & set(words)
            assert not any("pauses hosting" in row or "bans it" in row for row in rows)
            await pilot.press("escape")

    replayed(kill(), drive)


def test_times_are_those_of_the_recording() -> None:
    started = replace(HEALTHY, started_at_ms=BEGAN_MS - 90_000)

    async def drive(app: Replay, pilot: Pilot[None], wall: Clock) -> None:
        assert app.store.now_ms() == BEGAN_MS
        assert f"uptime  {duration(90.0)}" in text_of_screen(app)

    replayed(recording_of((0, started), (1000, HEALTHY)), drive)


def test_hostile_texts_reach_no_terminal() -> None:
    peers = tuple(replace(peer, name=ESCAPES, device=ESCAPES, why=ESCAPES) for peer in HEALTHY.peers)
    nasty = replace(HEALTHY, name=ESCAPES, swarm=ESCAPES, model=ESCAPES, reason=ESCAPES, peers=peers)

    async def drive(app: Replay, pilot: Pilot[None], wall: Clock) -> None:
        for key in ("1", "2", "w"):
            await pilot.press(key)
            await pilot.pause()
            shown = text_of_screen(app)
            assert not [c for c in shown if not c.isprintable() and c != "\n"]

    replayed(recording_of((0, nasty), (1, HEALTHY), notes=((0, ESCAPES),)), drive)


@pytest.mark.parametrize("extreme", [-(2**53), 2**53])
def test_extreme_figures_are_drawn(extreme: int) -> None:
    most = float(abs(extreme))  # seconds and speeds are not negative
    peers = tuple(replace(peer, rtt_s=most, tokens_per_s=most) for peer in HEALTHY.peers)
    flow = FlowView(*(most,) * 6, extreme)
    odd = replace(HEALTHY, sessions=extreme, tokens_per_s=most, flow=flow, peers=peers, blocks_total=10_000)

    async def drive(app: Replay, pilot: Pilot[None], wall: Clock) -> None:
        await pilot.press("2")
        await pilot.pause()
        assert "RECORDING" in text_of_screen(app)

    replayed(recording_of((0, odd), (1000, HEALTHY)), drive)


def test_frames_of_the_same_time_can_be_stepped_through_both_ways() -> None:
    player = Player(recording_of(*((0, replace(HEALTHY, sessions=number)) for number in range(3))))
    frames = []
    for step in (1, 1, 1, -1, -1, -1):
        player.step(step)
        frames.append(player.frame)
    assert frames == [1, 2, 2, 1, 0, 0]


def test_the_speed_has_limits() -> None:
    player = Player(kill())
    for factor, limit in ((2, FASTEST), (0.5, SLOWEST)):
        for _ in range(20):
            player.change_speed(factor)
        assert player.speed == limit


def test_plots_hold_one_sample_for_each_second() -> None:
    flows = [(1000 * second, replace(HEALTHY, flow=FlowView(float(second)))) for second in range(0, 1000, 2)]
    recording = recording_of(*flows)
    assert [sample.served_tokens_per_s for sample in samples_until(recording, 3500)] == [0.0, 0.0, 2.0, 2.0]
    late = samples_until(recording, recording.times_ms[-1])
    assert (len(late), late[-1].served_tokens_per_s) == (KEPT_SAMPLES, 998.0)
