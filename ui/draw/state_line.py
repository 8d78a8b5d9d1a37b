"""The state line: the node's state and the reason for it."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from app.core.terminal_text import one_line, peer_words_with_id, short_peer, with_names
from app.snapshot.views import Snapshot, StepView
from ui.draw.events import DECIDES
from ui.draw.numbers import duration, plural, progress
from ui.draw.rows import Row, row, tidy
from ui.state.coverage import coverage_of
from ui.state.store import ConnectionState

_SIGNS = {
    "serving": ("●", "success"),
    "client": ("○", "primary"),
    "idle": ("○", "primary"),
    "paused": ("‖", "warning"),
    "draining": ("⇣", "warning"),
    "stopping": ("⇣", "warning"),
}
# Reasons for the choice of blocks: nothing has to be done, and the swarm tab shows who hosts what.
_CHOSEN = ("asked_for", "worst_served", "growing", "hole", "make_way", "lone_holder", "gain")
# Next steps that have a key of their own here.
_KEYS = {"pause_by_hand": "p on the overview hosts again", "drained_by_hand": "p on the overview hosts again"}
_REASONS = {
    "starting": "the node is starting",
    "idle": "in no swarm yet",
    "joining": "looking for members",
    "fetching": "weights are being downloaded",
    "loading": "blocks are being loaded",
    "serving": "ready for sessions",
    "client": "this node hosts nothing",
    "paused": "by hand",
    "draining": "sessions finish or are handed over",
    "stopping": "the node is shutting down",
}


def pill(link: ConnectionState, snapshot: Snapshot | None, now: float) -> tuple[str, str]:
    """The state in two or three words, and its colour."""
    if link.kind == "starting":
        return "◐ starting", "primary"
    if link.kind == "connecting":
        return "◐ connecting", "primary"
    if link.kind == "refused":
        return "× refused", "error"
    if link.kind == "away":
        left = max(0, ceil(link.retry_at - now))
        return f"× node away, retry in {left} s", "error"
    if snapshot is None:
        return "◐ connected", "primary"
    if snapshot.preparing is not None and _is_without_swarm(snapshot):
        return "◐ preparing", "primary"
    sign, style = _SIGNS.get(snapshot.state, ("◐", "primary"))
    words: str = snapshot.state
    if snapshot.state == "serving" and snapshot.start is not None:
        words += f" {snapshot.start}:{snapshot.stop}"
    step = running_step(snapshot)
    if snapshot.state in ("fetching", "loading") and step is not None:
        words += step_figures(step)
    return f"{sign} {words}", style


def running_step(snapshot: Snapshot) -> StepView | None:
    """The start-up step that is running, or None."""
    return next((step for step in snapshot.steps if step.state == "running"), None)


def step_figures(step: StepView) -> str:
    """Progress of a step: ` 5/12, 41 s`."""
    far = f" {step.done}/{step.total}" if step.done is not None and step.total and step.total < 10_000 else ""
    left = f", {duration(step.seconds_left)}" if step.seconds_left is not None and step.done != step.total else ""
    return far + left


def reason(link: ConnectionState, snapshot: Snapshot | None) -> str:
    """The reason for the state, as the node or the connection gives it; a default for each state if there is none."""
    if link.kind != "live":
        return one_line(link.text)
    if snapshot is None:
        return "waiting for the first snapshot"
    if _is_without_swarm(snapshot):
        return preparing_words(snapshot) or "Not in a swarm. Press j to join, c to create"
    words = snapshot.why.text if snapshot.why is not None else snapshot.reason
    return tidy(one_line(words)) or _REASONS[snapshot.state]


def next_step(code: str, step: str) -> str:
    """What the user can do about a reason of this code, with the dashboard's key if it has one."""
    return _KEYS.get(code) or one_line(step)


def preparing_words(snapshot: Snapshot | None) -> str:
    """The model that is downloaded or read for a new swarm, with its progress; empty if there is none."""
    step = None if snapshot is None else snapshot.preparing
    if step is None:
        return ""
    left = f" · {duration(step.seconds_left)} left" if step.seconds_left else ""
    return f"{one_line(step.title)}: {progress(step.done, step.total)}{left}"


def _is_without_swarm(snapshot: Snapshot) -> bool:
    """True if the reason is that the node is in no swarm, which the dashboard's own keys change."""
    return snapshot.swarm is None and snapshot.why is not None and snapshot.why.code == "no_swarm"


def _needs_something(snapshot: Snapshot) -> bool:
    """True if the next step of the state's reason is shown: for a choice of blocks and without a swarm it is not."""
    return snapshot.why is not None and snapshot.why.code not in _CHOSEN and not _is_without_swarm(snapshot)


def _lack(snapshot: Snapshot) -> str:
    """The blocks that nobody hosts while this node serves others: no reply can be made; empty if there are none."""
    cover = coverage_of(snapshot) if snapshot.state == "serving" else None
    lack = cover.lack if cover is not None else ""
    return f"nobody hosts {lack}: replies wait for a member that does" if lack else ""


def state_row(
    link: ConnectionState,
    snapshot: Snapshot | None,
    now: float,
    *,
    wide: bool,
    name_of: Callable[[str], str] = short_peer,
) -> Row:
    """The whole line: state, warnings, reason, who asks to join, the next step if there is no warning, more if `wide`.

    More is sessions and the next pause; `name_of` gives the name of a peer that a warning names by its id.
    """
    words, style = pill(link, snapshot, now)
    lack = _lack(snapshot) if snapshot is not None and link.kind == "live" else ""
    style = "warning" if lack else style
    because = reason(link, snapshot)
    if snapshot is not None and snapshot.state == "paused":
        because = because.removeprefix("paused ")  # the state says so
    line = row(" ", (f" {words} ", f"b background on {style}"), "  " if wide else " ")
    warnings = snapshot.warnings if snapshot is not None and link.kind == "live" else ()
    for warning in warnings:  # first, as a narrow terminal shows little of the line
        line.append((f"▲ {one_line(with_names(warning.text, name_of))} · ", "warning"))
    line.append((because, ""))
    if link.next_step:
        line.append((f" · {link.next_step}", "secondary"))
    if snapshot is None or link.kind != "live":
        return line
    why = snapshot.why
    if snapshot.requests:
        guest = snapshot.requests[0]
        line.append((f" · ? {peer_words_with_id(guest.peer, guest.name)} asks to join: {DECIDES}", "warning"))
    if lack and not warnings:
        line.append((f" · ▲ {lack}", "warning"))
    elif not warnings and why is not None and why.next_step and _needs_something(snapshot):
        line.append((f" · {next_step(why.code, why.next_step)}", "secondary"))
    extra = []
    if snapshot.swarm is not None and snapshot.preparing is not None:
        extra.append(preparing_words(snapshot))
    if snapshot.sessions:
        extra.append(plural(snapshot.sessions, "session"))
    if snapshot.courtesy.next_text:
        extra.append(one_line(snapshot.courtesy.next_text))
    if wide and extra:
        line.append((" · " + " · ".join(extra), "dim"))
    return line


def swarm_label(snapshot: Snapshot | None, *, with_hash: bool = True) -> str:
    """The swarm's name, or with its hash the pinned name, which `shoal join` takes."""
    if snapshot is None or not snapshot.swarm:
        return ""
    pinned = next((swarm.pinned for swarm in snapshot.swarms if swarm.active), snapshot.swarm)
    return one_line(pinned if with_hash else snapshot.swarm)
