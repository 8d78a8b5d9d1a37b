"""This node as rows: gauges, pause rules, sessions, today's figures, weights, start-up steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from app.core.terminal_text import one_line
from app.snapshot.views import CourtesyView, DeviceView, Snapshot, StepView
from ui.draw.bars import Samples, bar, spark
from ui.draw.numbers import (
    clock,
    count,
    duration,
    gigabytes,
    many,
    memory_of,
    milliseconds,
    plural,
    progress,
    rate,
    size,
)
from ui.draw.rows import UNKNOWN, Row, cell, fit, row, tidy, width_of, wrap

_LABEL = 8
_STEP = 29  # cells for the title of a start-up step
RULES = {
    "pause_busy": "device busy",
    "pause_memory": "memory",
    "pause_active": "keyboard use",
    "pause_battery": "battery",
    "pause_heat": "heat",
    "pause_program": "program",
    "pause_schedule": "schedule",
    "pause_full_screen": "full screen",
    "pause_unused": "unused",
    "disk_floor": "disk nearly full",
}
_STEP_SIGNS = {"pending": ("○", "dim"), "running": ("◐", "primary"), "done": ("✓", "success"), "failed": ("×", "error")}


def labelled(label: str, *parts: tuple[str, str] | str) -> Row:
    """A row with a dim label at the left."""
    return [(label.ljust(_LABEL), "dim"), *row(*parts)]


# --- gauges ----------------------------------------------------------------------------------------------------------


def gauge_rows(snapshot: Snapshot | None, width: int, height: int) -> list[Row]:
    """Gauges of the device, speed and pause rules; where rows are few, the most important ones."""
    device = snapshot.hardware if snapshot is not None else None
    room = max(8, min(60, width - 33))
    heat = next((rule for rule in (snapshot.courtesy.rules if snapshot else ()) if rule.code.endswith("heat")), None)
    others = snapshot.devices[1:] if snapshot is not None else ()
    rows = [
        _memory(device, room),
        _memory_legend(device, width),
        _compute(device, snapshot, room),
        _gauge(
            "heat", device.temperature_c if device else None, 100.0, "°C", one_line(heat.text) if heat else "", room
        ),
        _power(device),
        _speed(snapshot, width),
        *(_memory(other, room, one_line(other.id)) for other in others),
        *(courtesy_rows(snapshot.courtesy, width) if snapshot is not None else [labelled("pauses", (UNKNOWN, "dim"))]),
    ]
    if height >= len(rows):
        return rows
    short = [rows[0], rows[2], rows[5], rows[6]] if height < 6 else [rows[0], *rows[2:4], rows[5], *rows[6:]]
    return short[:height]


def _memory(device: DeviceView | None, room: int, label: str = "memory") -> Row:
    if device is None or not device.memory_total_bytes:
        return labelled(label, *bar(None, room, "mine"), ("  —", "dim"))
    total, scale = device.memory_total_bytes, room / device.memory_total_bytes
    others = device.others_bytes or 0
    parts, at = [], 0
    for amount, mark, style in (
        (device.weights_bytes, "█", "mine"),
        (device.cache_held_bytes, "▓", "mine"),
        (device.reserved_bytes - device.held_bytes, "░", "mine"),
        (others, "▒", "dim"),
    ):
        cells = min(room - at, max(1, round(amount * scale)) if amount > 0.002 * total else 0)
        parts.append((mark * cells, f"{style} on trackbg"))
        at += cells
    if device.limit_bytes is not None:
        cap = min(room - 1, max(at, round((device.limit_bytes + others) * scale)))
        if cap >= at:
            parts += [(" " * (cap - at), "on trackbg"), ("┃", "b mine on trackbg")]
            at = cap + 1
    parts.append((" " * (room - at), "on trackbg"))
    whole, kind = (total, "") if device.limit_bytes is None else (device.limit_bytes, " cap")
    in_gigabytes = f"{gigabytes(device.held_bytes)} of {gigabytes(whole)} GB"  # as in the legend below
    held, rest = (in_gigabytes if whole >= 10**9 else memory_of(device.held_bytes, whole)).split(" ", 1)
    return labelled(label, *parts, (f"  {held}", "b"), (f" {rest}{kind}", "dim"))


def _memory_legend(device: DeviceView | None, width: int) -> Row:
    """Parts of the device's memory, which add up to all of it; and how much of the free part the cache may take."""
    if device is None or not device.memory_total_bytes:
        return []
    legend = labelled(
        "",
        ("█", "mine"),
        (f" weights {_short(device.weights_bytes)} ", "dim"),
        ("▓", "mine"),
        (f" cache {_short(device.cache_held_bytes)} ", "dim"),
        (f"▒ others {_short(device.others_bytes)} free {_short(device.memory_free_bytes)}", "dim"),
    )
    room = device.reserved_bytes - device.held_bytes
    more = row((" ░", "mine"), (f" reserves {_short(room)}", "dim")) if room else []
    unit = row((" GB", "dim"))
    ends = (more + unit, more, unit)
    return legend + next((end for end in ends if width_of(legend + end) <= width), [])


def _short(size_bytes: int | None) -> str:
    """Gigabytes without decimals from 10 GB up."""
    return gigabytes(size_bytes) if size_bytes is None or size_bytes < 10**10 else f"{size_bytes / 10**9:.0f}"


def _compute(device: DeviceView | None, snapshot: Snapshot | None, room: int) -> Row:
    load = device.load if device else None
    step = f" · {milliseconds(device.step_s)} ms a step" if device and device.step_s is not None else ""
    if load is None:
        return labelled("compute", *bar(None, room, "primary"), ("  —", "dim"), (step, "dim"))
    return labelled("compute", *bar(load, room, "primary"), (f"  {load:.0%}".replace("%", " %"), "b"), (step, "dim"))


def _gauge(label: str, value: float | None, top: float, unit: str, note: str, room: int) -> Row:
    if value is None:
        return labelled(label, *bar(None, room, "success"), ("  —", "dim"))
    tail = (f" · {note}" if note else "", "dim")
    return labelled(label, *bar(value / top, room, "success"), (f"  {value:.0f} {unit}", "b"), tail)


def _power(device: DeviceView | None) -> Row:
    watts = device.power_w if device else None
    return labelled("power", (UNKNOWN, "dim") if watts is None else (f"{watts:.0f} W", "b"))


def _speed(snapshot: Snapshot | None, width: int) -> Row:
    if snapshot is None or snapshot.start is None or snapshot.stop is None:
        return labelled("speed", (UNKNOWN, "dim"))
    blocks = f"{snapshot.stop - snapshot.start} of {count(snapshot.blocks_total)} blocks"
    if not snapshot.tokens_per_s:
        return labelled("speed", (f"— · {blocks}", "dim"))
    is_whole = snapshot.stop - snapshot.start == snapshot.blocks_total
    where = row(" alone", (" · ", "dim")) if is_whole else row(" in your ")
    line = labelled("speed", (f"{rate(snapshot.tokens_per_s)} tok/s", "b"), *where, blocks)
    if width_of(line) > width:
        line[-1] = (blocks.removesuffix(" blocks"), "")
    return line


def courtesy_rows(courtesy: CourtesyView, width: int) -> list[Row]:
    """The enabled pause rules, which of them apply now, and which this machine cannot obey."""
    is_by_hand = courtesy.paused and courtesy.by == "hand"
    rules = [rule for rule in courtesy.rules if rule.enabled and rule.available]
    if not rules and not is_by_hand:
        return [labelled("pauses", ("only by hand" if courtesy.rules else UNKNOWN, "dim"))]
    line = labelled("pauses", ("when", "dim"))
    for number, rule in enumerate(rules):
        sign = ("●", "warning") if rule.applies else ("○", "success")
        part = row(" ", sign, f" {RULES.get(rule.code, one_line(rule.label))}")
        more = f" +{len(rules) - number}"
        if width_of(line) + width_of(part) + (len(more) if number < len(rules) - 1 else 0) > width:
            line += row((more, "dim"))
            break
        line += part
    applies = [one_line(rule.text or rule.label) for rule in rules if rule.applies]
    reasons = [*(["paused by hand"] if is_by_hand else []), *applies]
    status = labelled("", (", ".join(reasons) or "now: no", "warning" if reasons else "dim"))
    blind = [rule for rule in courtesy.rules if rule.enabled and not rule.available]
    lacking = ", ".join(RULES.get(rule.code, one_line(rule.label)) for rule in blind)
    sensors = (f"no sensor for: {lacking}", f"no sensor for {plural(len(blind), 'rule')}") if blind else ()
    for texts in ((one_line(courtesy.next_text),), sensors):
        parts = [row((f" · {words}", "dim")) for words in texts if words]
        status += next((part for part in parts if width_of(status) + width_of(part) <= width), [])
    return [line, status]


# --- sessions, today's figures, weights ------------------------------------------------------------------------------


def session_rows(
    snapshot: Snapshot | None,
    speeds: Mapping[str, Samples],
    name_of: Callable[[str], str],
    width: int,
    height: int,
) -> list[Row]:
    """Sessions that this node serves or asks for, the oldest first."""
    if snapshot is None:
        return [row((UNKNOWN, "dim"))]
    sessions = sorted(snapshot.active_sessions, key=lambda s: -s.age_s)
    if not sessions:
        idle = "None now. Sessions that use your blocks appear here."
        return wrap(idle, width, "dim")[:height]
    name_width = max(7, min(16, width - 31))
    rows: list[Row] = [row((f"{cell('asker', name_width)} {'tokens':>7} {'age':>7} {'tok/s':>5}", "dim"))]
    shown = sessions if len(sessions) < height else sessions[: max(0, height - 2)]
    for session in shown:
        is_own = session.role == "asking" or session.asker == snapshot.peer_id
        name = "you" if is_own else one_line(name_of(session.asker))
        written = session.tokens - (session.prompt_tokens or 0)
        figures = f" {count(written):>7} {clock(session.age_s):>7} {rate(session.tokens_per_s or None):>5}"
        line = row((cell(name, name_width), "mine" if is_own else ""), figures)
        line += row((f" ↻{session.recoveries}" if session.recoveries else "   ", "warning"))
        if width >= name_width + 30:
            line += row((spark(speeds.get(session.id, ()), width - name_width - 25), "plot3"))
        rows.append(line)
    if len(shown) < len(sessions):
        rows.append(row((f"and {len(sessions) - len(shown)} more", "dim")))
    return rows


def given_rows(snapshot: Snapshot | None, now_ms: int, width: int, height: int) -> list[Row]:
    """Tokens and bytes given and taken today, uptime, audits, and the model's files on this machine."""
    if snapshot is None:
        return [row((UNKNOWN, "dim"))]
    today = snapshot.today
    uptime_s = (now_ms - snapshot.started_at_ms) / 1000 if snapshot.started_at_ms else None
    peers = (f" for {plural(today.peers, 'peer')}", "dim") if today.peers else ("", "")
    rows = [
        labelled("gave", (f"{many(today.served_tokens)}", "b"), " tokens", peers),
        labelled("used", many(today.asked_tokens), " tokens"),
        labelled("sent", size(today.up_bytes), (" · received ", "dim"), size(today.down_bytes)),
        labelled("uptime", duration(uptime_s)),
    ]
    if today.audits:
        style = "" if today.audits == today.audits_passed else "warning"
        rows.append(labelled("audits", (f"{count(today.audits_passed)} of {count(today.audits)} passed", style)))
    return [fit(line, width) for line in [*rows, *weight_rows(snapshot, width)]][:height]


def weight_rows(snapshot: Snapshot, width: int) -> list[Row]:
    """The model's files on this machine: parts, verification, bytes fetched from and given to peers, disk cache."""
    weights = snapshot.weights
    if weights is None or not weights.parts_total:
        return []
    held = labelled("weights", f"{count(weights.parts_held)} of {count(weights.parts_total)} parts")
    if weights.parts_verified == weights.parts_held and weights.parts_held:
        held += row(" ", ("✓", "success"), (" verified", "dim"))
    elif weights.parts_held:
        held += row((f" · {count(weights.parts_verified)} verified", "dim"))
    rows = [held]
    if weights.bytes_total:
        share = weights.bytes_held / weights.bytes_total
        tail = f" {size(weights.bytes_held)} of {size(weights.bytes_total)}"
        rows.append(labelled("held", *bar(share, max(6, min(24, width - 26)), "primary"), (tail, "")))
    if weights.from_peers_bytes:
        rows.append(labelled("fetched", size(weights.from_peers_bytes), (" from peers", "dim")))
    if weights.given_bytes:
        rows.append(labelled("passed", size(weights.given_bytes), (" on to peers", "dim")))
    if weights.giving:
        rows.append(labelled("giving", ", ".join(one_line(peer)[-6:] for peer in weights.giving[:4])))
    if weights.cache_bytes:
        cap = f" of {size(weights.cache_limit_bytes)}" if weights.cache_limit_bytes is not None else ""
        rows.append(labelled("cache", size(weights.cache_bytes), (f"{cap} on disk", "dim")))
    return rows


# --- start-up --------------------------------------------------------------------------------------------------------


def is_coming_up(steps: Sequence[StepView]) -> bool:
    """True if a start-up step is not done."""
    return any(step.state != "done" for step in steps)


def step_rows(steps: Sequence[StepView], width: int) -> list[Row]:
    """One row for each start-up step: sign, progress, time left, detail."""
    rows: list[Row] = []
    room = _STEP if width >= 2 * _STEP else 18
    for step in steps:
        sign, style = _STEP_SIGNS.get(step.state, ("?", "dim"))
        name = (
            cell(one_line(step.title), room),
            "b" if step.state == "running" else "dim" if step.state == "pending" else "",
        )
        line = row((f"{sign} ", style), name)
        if step.state == "running" and step.done is not None and step.total:
            gauge = bar(step.done / step.total, max(8, min(30, width - 44 - room)), "primary")
            line += row(" ", *gauge, " ", progress(step.done, step.total))
        if step.seconds_left is not None and step.state == "running" and step.done != step.total:
            line += row((f" · {duration(step.seconds_left)} left", "dim"))
        if step.detail:
            detail = tidy(one_line(step.detail))
            line += row((f" {detail}", "error" if step.state == "failed" else "dim"))
        rows.append(fit(line, width))
    return rows


def now_ms() -> int:
    """Wall clock in milliseconds since 1970, as in the node's own times."""
    return time.time_ns() // 10**6
