"""The dashboard of a recording: plays it, steps through it, and changes nothing.

The store's clock is the recording's, so that highlights, plots and times look as they did. Only the tabs that a
snapshot fills are here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from app.api.client import Client
from app.snapshot.recording import FlowSample, Recording
from ui.app import Dashboard
from ui.draw.numbers import clock, time_of_day
from ui.state.store import KEPT_NOTES, KEPT_SAMPLES, ConnectionState, Store

SLOWEST, FASTEST = 0.25, 64.0
_PLAY_S = 0.1  # between two looks at the clock while it plays
# Actions on a node.
_CHANGES = ("pause", "resume", "drain", "invite", "join", "create", "cap", "switch", "start_node")


class Player:
    """The position in a recording: which frame is shown, and how fast time passes."""

    def __init__(self, recording: Recording, speed: float = 1.0) -> None:
        self.recording, self.speed = recording, speed
        self.is_playing = True
        self._go(0)

    def _go(self, frame: int) -> None:
        self.frame = max(0, min(len(self.recording) - 1, frame))
        self.t_ms = float(self.recording.times_ms[self.frame])

    @property
    def is_at_end(self) -> bool:
        """True if the last frame is reached."""
        return self.frame == len(self.recording) - 1

    def advance(self, seconds: float) -> None:
        """Let time pass if it plays; stops at the last frame."""
        if self.is_playing:
            self.t_ms = min(self.t_ms + seconds * 1000 * self.speed, float(self.recording.times_ms[-1]))
            self.frame = self.recording.frame_at(self.t_ms)
            self.is_playing = not self.is_at_end

    def toggle(self) -> None:
        """Pause or play; from the last frame, play from the beginning."""
        if not self.is_playing and self.is_at_end:
            self._go(0)
        self.is_playing = not self.is_playing

    def step(self, frames: int) -> None:
        """Pause, and go forward or back by some frames."""
        self.is_playing = False
        self._go(self.frame + frames)

    def change_speed(self, factor: float) -> None:
        """Multiply the speed, within limits."""
        self.speed = max(SLOWEST, min(FASTEST, self.speed * factor))

    def words(self) -> str:
        """The position for the marker: what happens, the time, the frame."""
        recording = self.recording
        state = "▶ playing" if self.is_playing else "■ end of the recording" if self.is_at_end else "‖ paused"
        gone = clock((self.t_ms - recording.times_ms[0]) / 1000)
        at = time_of_day(recording.began_at_ms + int(self.t_ms))
        parts = [f"RECORDING {state}", f"frame {self.frame + 1} of {len(recording)}"]
        return " · ".join([*parts, f"{gone} of {clock(recording.duration_ms / 1000)}", f"{self.speed:g}×", at])


def samples_until(recording: Recording, t_ms: float) -> list[FlowSample]:
    """The rates of each second up to a time, the latest last, as many as the plots keep."""
    first_ms = recording.times_ms[0]
    seconds = int(t_ms - first_ms) // 1000
    begin = max(0, seconds - KEPT_SAMPLES + 1)
    return [recording.flows[recording.frame_at(first_ms + second * 1000)] for second in range(begin, seconds + 1)]


class Replay(Dashboard):
    """A dashboard that shows a recording instead of a node."""

    tabs: ClassVar[tuple[str, ...]] = ("overview", "swarm")
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space,p", "play_or_pause", "play/pause", key_display="space"),
        Binding("right", "step(1)", "forward", key_display="→", priority=True),
        Binding("left", "step(-1)", "back", key_display="←", priority=True),
        Binding("plus,equals_sign", "speed(2)", "faster", key_display="+"),
        Binding("minus", "speed(0.5)", "slower", key_display="-"),
        Binding("home", "step(-1000000)", "begin", show=False),
        Binding("end", "step(1000000)", "end", show=False),
    ]

    def __init__(self, recording: Recording, speed: float = 1.0, now: Callable[[], float] = time.monotonic) -> None:
        self.player = Player(recording, speed)
        self._wall = now
        self._looked_at = now()
        self._frame, self._noted, self._sampled_s = -1, 0, -1  # what the store was filled with
        store = Store(
            lambda: self.player.t_ms / 1000,
            lambda: recording.began_at_ms + int(self.player.t_ms),
            self.player.words(),
        )
        store.connected(ConnectionState("live"))
        super().__init__(None, store=store)
        self.asked_first_run = True
        self._show_position()

    async def on_mount(self) -> None:
        """Begin to play."""
        self._looked_at = self._wall()
        self.set_interval(_PLAY_S, self.play)

    def _tick(self) -> None:
        """Leave the samples to the recording's own time."""

    def play(self) -> None:
        """Let the recording go on by the time since the last look, and show where it is."""
        now = self._wall()
        passed_s, self._looked_at = now - self._looked_at, now
        if self.player.is_playing:
            self.player.advance(passed_s)
            self._show_position()

    def _show_position(self) -> None:
        """Fill the store with the frame at this position, and repaint."""
        store, recording, frame = self.store, self.player.recording, self.player.frame
        if frame not in (self._frame, self._frame + 1):
            store.rewind()
            self._noted, self._sampled_s = 0, -1
            if frame > 0:  # so that what this frame changed is highlighted
                store.take(recording.snapshot(frame - 1))
        if frame != self._frame:
            store.take(recording.snapshot(frame))
        self._frame = frame
        self._add_notes()
        self._sample()
        store.marker = self.player.words()
        self.show_now()

    def _add_notes(self) -> None:
        """Add the events up to this position that are not shown yet."""
        notes, begin = self.player.recording.notes, self._noted
        while self._noted < len(notes) and notes[self._noted].t_ms <= self.player.t_ms:
            self._noted += 1
        for note in notes[max(begin, self._noted - KEPT_NOTES) : self._noted]:
            self.store.note(note.data)

    def _sample(self) -> None:
        """Let the plots show the seconds before this position, once for each second of the recording."""
        store, recording = self.store, self.player.recording
        second = int(self.player.t_ms - recording.times_ms[0]) // 1000
        if second == self._sampled_s:
            return
        self._sampled_s = second
        store.sample()  # for the speeds of sessions; the other plots follow from the recording
        samples = samples_until(recording, self.player.t_ms)
        store.replace_plots(
            [sample.served_tokens_per_s for sample in samples],
            [sample.up_bytes_per_s for sample in samples],
            [sample.down_bytes_per_s for sample in samples],
        )

    def action_play_or_pause(self) -> None:
        """Pause or play."""
        self.player.toggle()
        self._looked_at = self._wall()
        self._show_position()

    def action_step(self, frames: int) -> None:
        """Go forward or back by some frames."""
        self.player.step(frames)
        self._show_position()

    def action_speed(self, factor: float) -> None:
        """Play faster or slower."""
        self.player.change_speed(factor)
        self._show_position()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True unless the action would change the node."""
        return False if action in _CHANGES else super().check_action(action, parameters)

    def ask(
        self,
        work: Callable[[Client], Any],
        then: Callable[[Any], None] = lambda answer: None,
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """Refuse: there is no node behind a recording."""
        (failed or self.complain)("this is a recording: nothing can be changed in it")
