"""A training job as rows: its rounds, islands, traffic, and who was left out and why."""

from __future__ import annotations

from app.core.terminal_text import one_line, with_names
from app.snapshot.views import IslandView, TrainingView
from ui.draw.bars import bar, spark
from ui.draw.jobs import (
    LABEL,
    MOST_FAILED,
    MOST_WHY,
    PEER_NAME,
    NameOf,
    entry,
    loss_text,
    plottable,
    reason,
    share_done,
)
from ui.draw.numbers import count, duration, known_rate, many, plural, size
from ui.draw.rows import Row, cell, fit, row, shorten, tidy, width_of, wrap

_SPARK = 40  # most cells of a sparkline
_NEXT = {  # what can be done with a job that does not run here, by its status
    "finished": "`shoal train export {0} FOLDER` writes the model, x removes it",
    "left": "`shoal train join {0}` goes on, `shoal train export {0} FOLDER` writes the model, x removes it",
}


def training_title(job: TrainingView) -> Row:
    """Title of the panel: the job's name and status."""
    return row("training  ", (one_line(job.name), "b"), f" · {one_line(job.status)}")


def training_rows(job: TrainingView, name_of: NameOf, width: int, height: int) -> list[Row]:
    """Everything known about a training job, the most urgent first.

    Where rows are few, reasons other than that of a failure are cut to one row each, and islands share rows; the last
    row counts those without one.
    """
    rows = _all_rows(job, name_of, width, MOST_WHY)
    if len(rows) > height:
        rows = _all_rows(job, name_of, width, 1, height)
    return [fit(line, width) for line in rows[:height]]


def training_facts(job: TrainingView, name_of: NameOf) -> list[tuple[str, str]]:
    """Everything known about a training job, as names and values."""
    coming = "" if job.status == "finished" else f", the next one of {plural(job.every, 'step')}"
    facts = [
        ("job", job.job),
        ("name", job.name),
        ("status", f"{job.status}: {job.why}" if job.why else job.status),
        ("round", f"{job.round}, step {job.step} of {job.steps}{coming}"),
        ("tokens", f"{job.tokens}, {known_rate(job.tokens_per_s)} tok/s in the last round"),
        ("computing", f"{_utilisation(job)} of the time; the rest goes to exchanges and waiting"),
        ("bytes", f"{job.bytes_per_round} in the last round, as {job.wire}"),
        ("checkpoint", f"{duration(job.checkpoint_age_s)} old"),
    ]
    if job.waiting:
        facts.append(("waiting", tidy(with_names(job.waiting, name_of))))
    if job.swarm:
        facts.append(("swarm", one_line(job.swarm)))
    if job.status in _NEXT:
        facts.append(("next", _next(job)))
    facts += [("island", f"{name_of(one.peer)}: {_figures(one)}{_text_of(one)}") for one in job.islands]
    facts += [(label, f"{name_of(peer)}: {tidy(with_names(why, name_of))}") for label, peer, why in _suspects(job)]
    facts += [("validation", f"{loss_text(loss)} after step {step}") for step, loss in job.validation[-8:]]
    return facts


def _all_rows(job: TrainingView, name_of: NameOf, width: int, most: int, height: int | None = None) -> list[Row]:
    """Every row about a job; a reason takes at most `most` of them. With `height` islands share rows."""
    room = max(8, width - LABEL)
    rows: list[Row] = []
    if job.why:
        rows += entry("failed", reason(job.why, name_of, room, MOST_FAILED, "error"))
    if job.waiting:
        rows += entry("waiting", reason(job.waiting.removeprefix("waits "), name_of, room, most, "warning"))
    if job.status in _NEXT:
        rows += entry("next", wrap(_next(job), room)[:most])
    rows += entry("rounds", [_rounds(job, room)]) + entry("speed", [_speed(job)])
    rows += entry("unseen", [_validation(job, room)]) + entry("exchange", [_exchange(job)])
    for label, peer, why in _suspects(job):
        words = f"{shorten(one_line(name_of(peer)), PEER_NAME)}: {why}"
        rows += entry(label, reason(words, name_of, room, most, "warning"))
    if height is None:
        islands = [_island(one, name_of) for one in job.islands]
    else:
        islands = _dense_islands(job, name_of, room, height - len(rows))
    return rows + entry("islands", islands or [row(("none", "dim"))])


def _next(job: TrainingView) -> str:
    return _NEXT[job.status].format(one_line(job.name))


def _suspects(job: TrainingView) -> list[tuple[str, str, str]]:
    """Label, island and reason: who was left out, who rests, and whose change was doubted in the last round."""
    found = [("left out", peer, why) for peer, why in sorted(job.left_out.items())]
    for label, reasons in (("resting", job.resting), ("doubted", job.doubted)):
        found += [(label, peer, why) for peer, why in sorted((reasons or {}).items()) if peer not in job.left_out]
    return found


def _rounds(job: TrainingView, room: int) -> Row:
    alone = ", alone" if job.status == "running" and len(job.islands) < 2 else ""
    words = f"{plural(job.round, 'round')}, step {count(job.step)} of {count(job.steps)}{alone}"
    cells = min(30, room - len(words) - 2)
    return row(*(bar(share_done(job), cells, "heat2") if cells >= 8 else []), "  " if cells >= 8 else "", (words, "b"))


def _speed(job: TrainingView) -> Row:
    left = f" · {duration(job.left_s)} left" if job.left_s is not None else ""
    words = f" · {many(job.tokens)} tokens · {_utilisation(job)} computing{left}"
    return row((f"{known_rate(job.tokens_per_s)} tok/s", "b"), words)


def _utilisation(job: TrainingView) -> str:
    return "—" if job.utilisation is None else f"{100 * job.utilisation:.0f} %"


def _validation(job: TrainingView, room: int) -> Row:
    line = spark(plottable(loss for _, loss in job.validation), min(_SPARK, room - 10))
    return row((line, "plot3"), "  " if line else "", (loss_text(job.validation_loss), "b"))


def _exchange(job: TrainingView) -> Row:
    words = f" a round of {plural(job.every, 'step')}, as {one_line(job.wire)} · checkpoint "
    return row((size(job.bytes_per_round), "b"), words, (duration(job.checkpoint_age_s), "b"), " old")


def _figures(one: IslandView) -> str:
    """Steps, tokens, speed and lag of an island in the last round."""
    if not one.steps:
        return "not in the last round" + ("" if one.alive else ", silent")
    late = "" if one.lag_s is None else f", {one.lag_s:.1f} s late" if one.lag_s >= 0.05 else ", first"
    speed = "" if one.tokens_per_s is None else f", {known_rate(one.tokens_per_s)} tok/s"
    return f"{plural(one.steps, 'step')}, {many(one.tokens)} tokens{speed}{late}{'' if one.alive else ', silent'}"


def _text_of(one: IslandView) -> str:
    """What an island says of its own text, if it has one."""
    if one.data is None:
        return ""
    named = f"{one.data.get('tokens')} tokens of {one.data.get('source')}"
    return one_line(f"; reads {named} ({one.data.get('licence') or 'no licence'})")


def _named(one: IslandView, name_of: NameOf) -> tuple[str, str]:
    style = "mine" if one.here else "b" if one.alive else "warning"
    return shorten(one_line(name_of(one.peer)), PEER_NAME), style


def _island(one: IslandView, name_of: NameOf) -> Row:
    name, style = _named(one, name_of)
    return row((cell(name, PEER_NAME), style), _figures(one))


def _dense_islands(job: TrainingView, name_of: NameOf, room: int, height: int) -> list[Row]:
    """Islands one after the other, broken between two of them where a row is full; then how many have no room."""
    rows: list[Row] = []
    shown: list[int] = []  # islands up to the end of each row
    for number, one in enumerate(job.islands, 1):
        name, style = _named(one, name_of)
        speed = "" if one.tokens_per_s is None else f" {known_rate(one.tokens_per_s)} tok/s"
        late = "" if not one.lag_s else f" {one.lag_s:.1f} s late"
        part = row((name, style), (f" {many(one.tokens)} tokens{speed}{late}" if one.alive else " silent", "dim"))
        if rows and width_of([*rows[-1], *part]) + 3 <= room:
            rows[-1] += [(" · ", "dim"), *part]
            shown[-1] = number
        else:
            rows.append(part)
            shown.append(number)
    if len(rows) > height > 1:
        rows[height - 1 :] = [row((f"and {len(job.islands) - shown[height - 2]} more", "dim"))]
    return rows
