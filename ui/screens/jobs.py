"""The jobs tab: the fine-tuning and training jobs of this home, and what one of them is doing.

Jobs are started with `shoal finetune` and `shoal train`; here they are watched. Fine-tuning is paused, resumed and
stopped, training is left and removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from app.api.client import Client
from app.snapshot.codec import jobs_from, joinable_from, trainings_from
from app.snapshot.views import JobView, JoinableView, TrainingView
from ui.draw.jobs import (
    NO_JOBS,
    RESUMABLE,
    AnyJob,
    job_columns,
    job_facts,
    job_header,
    job_row,
    job_rows,
    job_title,
    joinable_rows,
    loss_rows,
    loss_title,
    name_of_job,
    trained_rows,
)
from ui.draw.rows import UNKNOWN, Row, row
from ui.draw.theme import style_of
from ui.draw.trainings import training_facts, training_rows, training_title
from ui.screens.frame import MainScreen
from ui.state.store import Store
from ui.widgets.panel import Panel, strip_of, title_of

_POLL_S = 1.0
_POLL_JOINABLE_S = 30.0  # the node asks every member for it


class JobsTable(ScrollView, can_focus=True):
    """The table of jobs; below them the jobs of others that train blocks of this node, or that it could join."""

    DEFAULT_CLASSES = "panel"
    HELP = (
        "The training jobs and the fine-tuning jobs of this home, the newest first, and below them the members whose "
        "jobs train blocks of this node, and training jobs of the swarm that this node could join. A fine-tuning job "
        "pauses after the step that it is at; what it had learned by then is kept."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "details", "details"),
        Binding("up,k", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("home", "move(-100000)", show=False),
        Binding("end", "move(100000)", show=False),
    ]

    def __init__(self, store: Store, *, id: str) -> None:
        super().__init__(id=id)
        self.store = store
        self._marked = ""  # id of the job under the cursor
        self._lines: list[Row] = []
        self._drawn: object = None

    @property
    def cursor(self) -> int:
        """Index of the job under the cursor; the first one if that job is gone."""
        jobs = self.store.jobs or ()
        return next((index for index, job in enumerate(jobs) if job.job == self._marked), 0)

    @property
    def chosen(self) -> AnyJob | None:
        """The job under the cursor."""
        return self.store.jobs[self.cursor] if self.store.jobs else None

    def show(self) -> None:
        """Redraw from the store, if something changed; the cursor stays on its job."""
        jobs = self.store.jobs
        self._marked = self.chosen.job if self.chosen is not None else self._marked
        columns = job_columns(self.size.width, [name_of_job(job) for job in jobs or ()])
        head = job_header(columns) if jobs else row((UNKNOWN if jobs is None else NO_JOBS, "dim"))
        trained = trained_rows(self.store.snapshot, self.store.peer_name)
        own = {job.job for job in jobs or ()}  # asked for more often: this node may have joined one since
        others = joinable_rows([job for job in self.store.joinable if job.job not in own])
        lines = [head, *(job_row(job, columns) for job in jobs or ()), *trained, *others]
        drawn = (lines, self.cursor, self.size, self.app.theme)
        if drawn == self._drawn:
            return
        self._drawn, self._lines = drawn, lines
        self.virtual_size = Size(0, len(lines))
        figures = UNKNOWN if jobs is None else f"{len(jobs)}"
        running = sum(job.status == "running" for job in jobs or ())
        title = row("jobs  ", (figures, "b"), f" · {running} running" if running else "")
        self.border_title = title_of(self.app.theme, title)
        self.refresh()

    def on_resize(self) -> None:
        """Choose the columns for the new width."""
        self.show()

    def on_mount(self) -> None:
        """Redraw whenever the theme changes."""
        self.watch(self.app, "theme", self.show, init=False)

    def render_line(self, y: int) -> Strip:
        """Paint the header, which does not scroll, or one row."""
        index = y + round(self.scroll_y) if y else 0
        line = self._lines[index] if index < len(self._lines) else []
        is_marked = bool(self.store.jobs) and index == self.cursor + 1
        base = self.rich_style + style_of(self.app.theme, "on cursor") if is_marked else self.rich_style
        return strip_of(self.app.theme, line, self.size.width, base)

    def action_move(self, rows: int) -> None:
        """Move the cursor and scroll to it."""
        jobs = self.store.jobs
        if not jobs:
            return
        at = max(0, min(len(jobs) - 1, self.cursor + rows))
        self._marked = jobs[at].job
        top, height = round(self.scroll_y), max(1, self.size.height - 1)
        if not top <= at < top + height:
            self.scroll_to(y=max(0, at - height // 2), animate=False, immediate=True)
        if isinstance(self.screen, Jobs):
            self.screen.show()

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked job."""
        offset = event.get_content_offset(self)
        if offset is not None and offset.y:
            self.action_move(offset.y - 1 + round(self.scroll_y) - self.cursor)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True unless the key would show a job and there is none."""
        return self.chosen is not None if action == "details" else True

    def action_details(self) -> None:
        """Show everything known about the job under the cursor."""
        from ui.widgets.dialogs import Facts

        job, name_of = self.chosen, self.store.peer_name
        if job is None:
            return
        facts = training_facts(job, name_of) if isinstance(job, TrainingView) else job_facts(job, name_of)
        self.app.push_screen(Facts("job", facts, copied=job.job))


class _ChosenJobPanel(Panel):
    """A panel about the job under the table's cursor."""

    @property
    def job(self) -> AnyJob | None:
        """The job under the cursor."""
        return self.screen.query_one(JobsTable).chosen


class LossPanel(_ChosenJobPanel):
    """Plot of the chosen job's losses."""

    HELP = "The loss of each of the latest steps: how badly the model predicts the counted tokens. Lower is better."

    def title(self) -> Row:
        """The latest loss, and that on what is not trained on."""
        return loss_title(self.job) if self.job is not None else []

    def rows(self, width: int, height: int) -> list[Row]:
        """The plot."""
        return loss_rows(self.job, width, height) if self.job is not None else []


class JobPanel(_ChosenJobPanel):
    """Speed, traffic, hops or islands of the chosen job, and what went wrong."""

    HELP = (
        "A fine-tuning job recovers when a hop fails: it goes back to the last state that all blocks have, and takes "
        "another route. Rejected are numbers of a hop that are not finite or far beyond the usual; they are never "
        "used. The islands of a training job merge what they have learned in rounds; one whose changes are unlike "
        "those of the others in two rounds is left out."
    )

    def title(self) -> Row:
        """The job's name and status."""
        job = self.job
        return [] if job is None else training_title(job) if isinstance(job, TrainingView) else job_title(job)

    def rows(self, width: int, height: int) -> list[Row]:
        """As much as fits."""
        job, name_of = self.job, self.store.peer_name
        if isinstance(job, TrainingView):
            return training_rows(job, name_of, width, height)
        return [] if job is None else job_rows(job, name_of, width, height)


class Jobs(MainScreen):
    """The screen of the jobs; asks the node for them while it is shown."""

    TAB = "jobs"
    AUTO_FOCUS = "JobsTable"
    HELP_TEXT = (
        "p pauses or resumes the job under the cursor, x stops it for good, or leaves or removes one of training, "
        "⏎ shows all facts."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause_job", "pause job"),
        Binding("p", "resume_job", "resume job"),
        Binding("p", "refuse", show=False),
        Binding("x", "stop_job", "stop job"),
        Binding("x", "leave_job", "leave job"),
        Binding("x", "remove_job", "remove job"),
    ]

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._asking = self._asking_joinable = False
        self._last_error = ""  # shown once, not at every poll
        self._keys_for: tuple[str, str] | None = None  # job and status that the footer was made for

    def body(self) -> Iterable[Widget]:
        """The table; below it the losses and the rest of one job."""
        yield JobsTable(self.store, id="jobs")
        yield Horizontal(LossPanel(self.store, id="loss"), JobPanel(self.store, id="job"), id="job-figures")

    def on_mount(self) -> None:
        """Ask for the jobs every second, and now and then for those that could be joined."""
        self.set_interval(_POLL_S, self._poll)
        self.set_interval(_POLL_JOINABLE_S, self._poll_joinable)

    def on_screen_resume(self) -> None:
        """Redraw, and ask for the jobs at once."""
        super().on_screen_resume()
        self._poll()
        self._poll_joinable()

    def show(self) -> None:
        """Redraw from the store; without a job only the table is shown."""
        if not self.query(JobsTable):
            return  # the app closes
        table = self.query_one(JobsTable)
        table.show()
        self.query_one("#job-figures").display = table.chosen is not None
        super().show()
        keys_for = None if table.chosen is None else (table.chosen.job, table.chosen.status)
        if keys_for != self._keys_for:
            self._keys_for = keys_for
            self.refresh_bindings()

    # --- asking the node ---------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        if self._asking or not self.is_current or self.dashboard.door is None or self.store.link.kind != "live":
            return
        self._asking = True
        self.dashboard.ask(self._jobs_of, self._take, self._failed)

    def _poll_joinable(self) -> None:
        if self._asking_joinable or not self.is_current or self.dashboard.door is None:
            return
        self._asking_joinable = True
        path = "/control/train/joinable"
        self.dashboard.ask(lambda client: joinable_from(client.get(path)), self._take_joinable, self._failed_joinable)

    def _take_joinable(self, jobs: list[JoinableView]) -> None:
        self._asking_joinable = False
        self.store.take_joinable(jobs)
        self.show()

    def _failed_joinable(self, text: str) -> None:
        self._asking_joinable = False  # the jobs of this home fail for the same reasons, and say so

    @staticmethod
    def _jobs_of(client: Client) -> list[AnyJob]:
        """Ask the node for its training jobs and its fine-tuning jobs."""
        return [*trainings_from(client.get("/control/train")), *jobs_from(client.get("/control/jobs"))]

    def _take(self, jobs: list[AnyJob]) -> None:
        self._asking, self._last_error = False, ""
        self.store.take_jobs(jobs)
        self.show()

    def _failed(self, text: str) -> None:
        self._asking = False
        if text != self._last_error:
            self._last_error = text
            self.dashboard.complain(text)

    # --- keys --------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True if a key makes sense for the chosen job; `p` never reaches the app, where it pauses hosting."""
        job = self.query_one(JobsTable).chosen if self.is_mounted else None
        status = "" if job is None else job.status
        if action in ("leave_job", "remove_job") or isinstance(job, TrainingView):
            return self._check_training(action, job)
        if action == "pause_job":
            return status == "running"
        if action == "resume_job":
            return status in RESUMABLE
        if action == "refuse":
            return status != "running" and status not in RESUMABLE
        if action == "stop_job":
            return status == "running" or status in RESUMABLE
        return True

    @staticmethod
    def _check_training(action: str, job: AnyJob | None) -> bool:
        """True if a key makes sense for a training job: left, then removed, and paused together with hosting alone."""
        if action in ("leave_job", "remove_job"):
            takes_part = job is not None and job.status in ("running", "paused")
            return isinstance(job, TrainingView) and takes_part == (action == "leave_job")
        return action not in ("pause_job", "resume_job", "stop_job")

    def action_pause_job(self) -> None:
        """Pause the chosen job after the step that it is at."""
        self._act("pause", lambda job: f"job {job.job} pauses after the step that it is at")

    def action_resume_job(self) -> None:
        """Go on with the chosen job."""
        self._act("resume", lambda job: f"job {job.job} goes on after step {job.step}")

    def action_refuse(self) -> None:
        """Say why nothing is paused."""
        job = self.query_one(JobsTable).chosen
        words = "there is no job to pause" if job is None else f"job {job.job} is {job.status}: nothing to pause"
        if isinstance(job, TrainingView):
            words = f"{name_of_job(job)} is a training job, which pauses together with hosting"
        self.dashboard.say(f"{words}; hosting is paused on the other tabs")

    def action_stop_job(self) -> None:
        """Stop the chosen job for good, after confirmation."""
        from ui.widgets.dialogs import Question

        job = self.query_one(JobsTable).chosen
        if job is None:
            return

        def answered(sure: bool | None) -> None:
            if sure:
                self._act("stop", self._stopped, job)

        words = f"Stop job {job.job} for good? What it has learned for the adapter {name_of_job(job)} is removed."
        self.app.push_screen(Question(words, "Stop it"), answered)

    def action_leave_job(self) -> None:
        """Take no more part in the chosen training job, after confirmation."""
        from ui.widgets.dialogs import Question

        job = self.query_one(JobsTable).chosen
        if job is None:
            return
        job_id, name = job.job, name_of_job(job)

        def left(answer: Any) -> None:
            self.dashboard.say(f"this node takes no more part in {name}; `shoal train join {name}` goes on with it")
            self._poll()

        def answered(sure: bool | None) -> None:
            if sure:
                self.dashboard.ask(lambda client: client.post("/control/train/leave", {"job": job_id}), left)

        alone = isinstance(job, TrainingView) and not any(one.alive and not one.here for one in job.islands)
        rest = "nobody else trains it, so it rests until you join again" if alone else "the other islands go on"
        words = f"Leave {name}? Steps that are not merged yet are lost; {rest}."
        self.app.push_screen(Question(words, "Leave it"), answered)

    def action_remove_job(self) -> None:
        """Remove the chosen training job with its files, after confirmation."""
        from ui.widgets.dialogs import Question

        job = self.query_one(JobsTable).chosen
        if job is None:
            return
        job_id, name = job.job, name_of_job(job)

        def removed(answer: Any) -> None:
            self.dashboard.say(f"the training job {name} is removed with its files")
            self._poll()

        def answered(sure: bool | None) -> None:
            if sure:
                self.dashboard.ask(lambda client: client.post("/control/train/remove", {"job": job_id}), removed)

        words = f"Remove {name} with its files? `shoal train export {name} FOLDER` writes the model before."
        self.app.push_screen(Question(words, "Remove it"), answered)

    @staticmethod
    def _stopped(job: JobView) -> str:
        if job.status == "stopped":
            return f"job {job.job} is stopped, and what it had learned is removed"
        return f"job {job.job} stops after the step that it is at"

    def _act(self, what: str, words: Callable[[JobView], str], job: AnyJob | None = None) -> None:
        """Send an order about a fine-tuning job, the chosen one by default; `words` confirm it, given the job then."""
        job = job or self.query_one(JobsTable).chosen
        if job is None:
            return
        job_id = job.job

        def done(answer: Any) -> None:
            (after,) = jobs_from([answer])
            self.dashboard.say(words(after))
            self._poll()

        self.dashboard.ask(lambda client: client.post(f"/control/jobs/{what}", {"job": job_id}), done)
