"""Jobs as rows: the table of all, the losses of one, and everything else that is known about a fine-tuning job.

What is known about a training job is drawn in `ui.draw.trainings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from app.core.terminal_text import one_line, with_names
from app.snapshot.views import JobHopView, JobView, JoinableView, Snapshot, TrainingView
from ui.draw.bars import bar, ceiling, plot
from ui.draw.numbers import count, duration, known_rate, many, plural, size
from ui.draw.rows import UNKNOWN, Row, cell, fit, row, shorten, text_of, tidy, width_of, wrap

NameOf = Callable[[str], str]
AnyJob = JobView | TrainingView
NO_JOBS = "This node has no jobs yet: `shoal finetune` and `shoal train` start one."
RESUMABLE = ("paused", "failed")
_NEXT = {  # what can be done with a fine-tuning job that does not run, by its status
    "finished": "`shoal chat --adapter {0}` uses it; in the chat ^g chooses it",
    "paused": "p goes on with it",
    "failed": "p tries again from the last step that was kept",
}
_SIGNS = {
    "running": ("●", "success"),
    "paused": ("‖", "warning"),
    "finished": ("✓", "success"),
    "stopped": ("○", "dim"),
    "left": ("○", "dim"),
    "failed": ("×", "error"),
}
_STEPS, _LOSS, _RATE, _LEFT, _STATUS = 16, 8, 7, 10, 8  # cells of the columns that are always shown
_ID, _BAR = 14, 14
LABEL = 11
PEER_NAME = 14  # most cells of a peer's name
_AXIS = 6  # cells of a plot's axis
_MOST_LINKS = 4
MOST_WHY = 3  # rows of one reason
MOST_FAILED = 8  # rows of what a job failed for: how to fix that comes last in it


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobColumns:
    """Width of a job's name in cells, and which of the columns that need room are shown."""

    name: int
    with_id: bool
    with_bar: bool


def job_columns(width: int, names: Sequence[str]) -> JobColumns:
    """Choose columns: name, steps, loss, tok/s, time left and status always; id and a bar if they fit."""
    room = width - 2 - _STEPS - _LOSS - _RATE - _LEFT - _STATUS
    longest = max((width_of([(one_line(name), "")]) for name in names), default=0)
    name = max(8, min(longest + 2, 26, room))
    room -= name
    with_id = room >= _ID
    room -= _ID if with_id else 0
    return JobColumns(name, with_id, room >= _BAR)


def name_of_job(job: AnyJob) -> str:
    """A training job's own name, or that of the adapter which a fine-tuning job makes."""
    return one_line(job.name if isinstance(job, TrainingView) else job.out)


def job_header(columns: JobColumns) -> Row:
    """The header of the table."""
    text = "  " + cell("name", columns.name) + (cell("job", _ID) if columns.with_id else "")
    text += cell("steps", _STEPS + (_BAR if columns.with_bar else 0))
    return row((text + cell("loss", _LOSS) + cell("tok/s", _RATE) + cell("left", _LEFT) + "status", "dim"))


def job_row(job: AnyJob, columns: JobColumns) -> Row:
    """The row of one job."""
    sign, style = _SIGNS.get(job.status, ("·", "dim"))
    name = cell(name_of_job(job), columns.name - 1)
    line = row((f"{sign} ", style), (name, "b" if job.status == "running" else ""), " ")
    if columns.with_id:
        line.append((cell(one_line(job.job), _ID), "dim"))
    if columns.with_bar:
        line += [*bar(share_done(job), _BAR - 2, "heat2"), ("  ", "")]
    line.append((cell(f"{count(job.step)} of {count(job.steps)}", _STEPS - 1) + " ", ""))
    line.append((cell(loss_text(job.loss), _LOSS), ""))
    line.append((cell(known_rate(job.tokens_per_s or 0.0), _RATE), ""))
    line.append((cell(duration(job.left_s), _LEFT), "" if job.left_s is not None else "dim"))
    line.append((one_line(job.status), style))
    return line


def trained_rows(snapshot: Snapshot | None, name_of: NameOf) -> list[Row]:
    """One row for each job of another member that trains blocks of this node."""
    if snapshot is None:
        return []
    return [
        row(("◆ ", "mine"), f"trains blocks {job.start}:{job.stop} for ", (one_line(name_of(job.owner)), "b"))
        for job in snapshot.trained
        if job.owner != snapshot.peer_id
    ]


def joinable_rows(jobs: Sequence[JoinableView]) -> list[Row]:
    """One row for each training job of other members that this node could join."""
    return [
        row(("○ ", "dim"), (one_line(job.name), "b"), f" can be joined: {one_line(job.join_command)}") for job in jobs
    ]


def share_done(job: AnyJob) -> float | None:
    """Share of a job's steps that are done."""
    return job.step / job.steps if job.steps > 0 else None


def loss_text(loss: float | None) -> str:
    """A loss with three decimals."""
    return UNKNOWN if loss is None or not math.isfinite(loss) else f"{loss:.3f}"


def plottable(losses: Iterable[float | None]) -> list[float | None]:
    """Losses for a plot: None for those that are no number, which the API writes as null."""
    return [None if loss is None or not math.isfinite(loss) else loss for loss in losses]


# --- the losses ------------------------------------------------------------------------------------------------------


def loss_title(job: AnyJob) -> Row:
    """Title of the plot: the latest loss, and the first and latest one on what is not trained on."""
    title = row("loss  ", (loss_text(job.loss), "b"))
    if not job.validation:
        return title
    losses = [loss_text(job.validation[0][1]), loss_text(job.validation[-1][1])]
    unseen = "unseen text" if isinstance(job, TrainingView) else "unseen records"
    return [*title, *row(f" · {unseen} ", (" to ".join(losses[: len(job.validation)]), "b"))]


def loss_rows(job: AnyJob, width: int, height: int) -> list[Row]:
    """Plot of the latest losses over the whole width, with the steps below it if there is room."""
    losses = plottable(job.losses)
    if not losses:
        words = "No step is done yet." if not job.step else "No step was made here since the node started."
        return [row((words, "dim"))]
    columns = 2 * max(1, width - _AXIS)  # a braille cell is two samples wide
    if len(losses) < columns:
        losses = [losses[index * len(losses) // columns] for index in range(columns)]
    peak = max((loss for loss in losses if loss is not None), default=0.0)
    top = ceiling(losses) if peak >= 100 else max(0.1, math.ceil(10 * peak) / 10)
    if height <= 3:
        return plot(losses, width, height, top)
    first, last = f"step {count(job.step - len(job.losses) + 1)}", count(job.step)
    if isinstance(job, TrainingView):  # its step is that of the last round
        first, last = f"latest {plural(len(job.losses), 'step')} here", ""
    axis = " " * _AXIS + first.ljust(max(len(first) + 1, width - _AXIS - len(last))) + last
    return [*plot(losses, width, height - 1, top), fit(row((axis, "dim")), width)]


# --- one job ---------------------------------------------------------------------------------------------------------


def job_title(job: JobView) -> Row:
    """Title of the panel: the adapter's name and the job's status."""
    return row("job  ", (one_line(job.out), "b"), f" · {one_line(job.status)}")


def job_rows(job: JobView, name_of: NameOf, width: int, height: int) -> list[Row]:
    """Everything known about a job, the most urgent first; if rows are few, other reasons are cut to one row each."""
    rows = _all_rows(job, name_of, width, MOST_WHY)
    if len(rows) > height:
        rows = _all_rows(job, name_of, width, 1)
    return [fit(line, width) for line in rows[:height]]


def _all_rows(job: JobView, name_of: NameOf, width: int, most: int) -> list[Row]:
    """Every row about a job; a reason takes at most `most` of them, that of a failure `MOST_FAILED`."""
    room = max(8, width - LABEL)
    rows: list[Row] = []
    if job.why:
        rows += entry("failed", reason(job.why, name_of, room, MOST_FAILED, "error"))
    if job.waiting:
        rows += entry("waiting", reason(job.waiting.removeprefix("waits "), name_of, room, most, "warning"))
    rows += entry("next", wrap(_next(job), room)[:most]) if job.status in _NEXT else []
    rows += entry("steps", [_steps(job, room)]) + entry("speed", [_speed(job)])
    rows += entry("hops", _hops(job, name_of, room))
    if job.hops:
        rows += entry("sent", [row(size(job.bytes_out), ("  received ", "dim"), size(job.bytes_in))])
        rows += entry("links", _links(job, name_of))
        rows += entry("recovered", _recoveries(job, name_of, room, most))
        rows += entry("rejected", _rejections(job, name_of, room, most))
        for peer, why in sorted((job.left_out or {}).items()):
            words = f"{shorten(one_line(name_of(peer)), PEER_NAME)}: {why}"
            rows += entry("left out", reason(words, name_of, room, most, "warning"))
    rows += entry("adapter", [row(f"rank {job.rank}, alpha {job.alpha:g}, {','.join(job.targets)}")])
    rows += entry("model", [row(one_line(_model(job)))])
    return rows + entry("data", [row(_end_of(one_line(job.data), room))])


def job_facts(job: JobView, name_of: NameOf) -> list[tuple[str, str]]:
    """Everything known about a job, as names and values."""
    hops = ", ".join(f"{name_of(hop.peer)} {hop.start}:{hop.stop}" for hop in job.hops)
    facts = [
        ("job", job.job),
        ("adapter", f"{job.out}: rank {job.rank}, alpha {job.alpha:g}, {','.join(job.targets)}"),
        ("model", _model(job)),
        ("data", job.data),
        ("status", f"{job.status}: {job.why}" if job.why else job.status),
        *([("waiting", tidy(with_names(job.waiting, name_of)))] if job.waiting else []),
        *([("next", _next(job))] if job.status in _NEXT else []),
        ("steps", f"{job.step} of {job.steps}, {job.tokens} tokens in {duration(job.seconds)}"),
        ("hops", hops or _where(job)),
    ]
    facts += [
        ("link", f"{size(link.bytes)} from {name_of(link.sender)} to {name_of(link.receiver)}")
        for link in job.bytes_per_link
    ]
    facts += [("lost", tidy(with_names(why, name_of))) for why in job.lost]
    facts += [("rejected", f"{name_of(peer)} {words}") for peer, words in _rejected(job)]
    facts += [("left out", tidy(with_names(f"{peer}: {why}", name_of))) for peer, why in (job.left_out or {}).items()]
    facts += [("validation", f"{loss_text(loss)} after step {step}") for step, loss in job.validation[-8:]]
    return facts


def _next(job: JobView) -> str:
    if not job.swarm and job.status in RESUMABLE:
        return f"`shoal jobs resume {one_line(job.job)}` goes on with it"
    return _NEXT[job.status].format(one_line(job.out))


def entry(label: str, lines: Sequence[Row]) -> list[Row]:
    """Rows with a dim label before the first one."""
    return [[(cell("" if index else label, LABEL), "dim"), *line] for index, line in enumerate(lines)]


def _steps(job: JobView, room: int) -> Row:
    words = f"{count(job.step)} of {count(job.steps)}"
    cells = min(40, room - len(words) - 2)
    return row(*(bar(share_done(job), cells, "heat2") if cells >= 8 else []), "  " if cells >= 8 else "", (words, "b"))


def _speed(job: JobView) -> Row:
    spent = f" · {many(job.tokens)} tokens in {duration(job.seconds)}"
    left = f" · {duration(job.left_s)} left" if job.left_s is not None else ""
    return row((f"{known_rate(job.tokens_per_s or 0.0)} tok/s", "b"), spent, left)


def _model(job: JobView) -> str:
    """Name and short hash of the model; a model without a name is called by its hash already."""
    short = job.model[:8]
    return job.model_name if short in job.model_name else f"{job.model_name} ({short})"


def _where(job: JobView) -> str:
    return "over the swarm" if job.swarm else "in one process"


def _hops(job: JobView, name_of: NameOf, room: int) -> list[Row]:
    """The chain of hops with their blocks, broken between two hops where it is too long.

    A dot instead of an arrow stands before one that trains blocks of the one before it too.
    """
    if not job.hops:
        return [row(_where(job))]
    rejected = job.rejected or {}
    rows: list[Row] = [[]]
    for index, hop in enumerate(job.hops):
        part = _hop(hop, name_of, marked=bool(rejected.get(hop.peer)))
        arrow: Row = []
        if index < len(job.hops) - 1:
            arrow = row((" ▸ " if job.hops[index + 1].start >= hop.stop else " · ", "dim"))
        if rows[-1] and width_of([*rows[-1], *part, *arrow]) > room:
            rows.append([])
        rows[-1] += [*part, *arrow]
    return rows


def _hop(hop: JobHopView, name_of: NameOf, *, marked: bool) -> Row:
    name = one_line(name_of(hop.peer))
    style = "warning" if marked else "mine" if name == "you" else "b"
    return row((shorten(name, PEER_NAME), style), (f" {hop.start}:{hop.stop}", "dim"))


def _links(job: JobView, name_of: NameOf) -> list[Row]:
    """The links that carried most, each with its bytes."""

    def name(peer: str) -> str:
        return shorten(one_line(name_of(peer)), PEER_NAME)

    busiest = sorted(job.bytes_per_link, key=lambda link: -link.bytes)[:_MOST_LINKS]
    return [row(name(one.sender), (" ▸ ", "dim"), name(one.receiver), "  ", (size(one.bytes), "b")) for one in busiest]


def _recoveries(job: JobView, name_of: NameOf, room: int, most: int) -> list[Row]:
    again = f", {plural(job.micro_batches_again, 'micro-batch', 'micro-batches')} computed again"
    again = again if job.micro_batches_again else ""
    if not job.recoveries:
        return [row((f"never{again}", "dim"))]
    times = "once" if job.recoveries == 1 else f"{count(job.recoveries)} times"
    rows = [row((times, "warning"), again)]
    return [*rows, *(reason(f"from {job.lost[-1]}", name_of, room, most, "dim") if job.lost else [])]


def _rejections(job: JobView, name_of: NameOf, room: int, most: int) -> list[Row]:
    rows: list[Row] = []
    for peer, words in _rejected(job):
        rows += reason(f"{shorten(one_line(name_of(peer)), PEER_NAME)} {words}", name_of, room, most, "warning")
    return rows or [row(("nothing", "dim"))]


def _rejected(job: JobView) -> list[tuple[str, str]]:
    """Hop, and what was rejected of it and why; the hop with the most first."""
    reasons = job.rejected_why or {}
    found = sorted((job.rejected or {}).items(), key=lambda item: (-item[1], item[0]))
    said = {peer: f": {tidy(one_line(why))}" for peer, why in reasons.items() if why}
    return [(peer, f"{plural(times, 'frame')}{said.get(peer, '')}") for peer, times in found]


def reason(text: str, name_of: NameOf, room: int, most: int, style: str) -> list[Row]:
    """A reason with the names of peers instead of their ids, on at most `most` rows."""
    rows = wrap(one_line(tidy(with_names(text, name_of))), room, style)
    if len(rows) <= most:
        return rows
    rest = " ".join(text_of(line) for line in rows[most - 1 :])
    return [*rows[: most - 1], [(shorten(rest, room), style)]]


def _end_of(text: str, width: int) -> str:
    """The end of a path, which says more than its beginning."""
    if width_of([(text, "")]) <= width:
        return text
    while text and width_of([(text, "")]) > width - 1:
        text = text[1:]
    return f"…{text}"
