"""The startup steps of a node: which are done, running (with progress) or failed; and a model that is prepared."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from app.snapshot.views import StepView

log = logging.getLogger("shoal.node")

TITLES = {
    "identity": "this node's identity",
    "peers": "members of the swarm",
    "manifest": "the model's manifest",
    "weights": "the model's files",
    "load": "loading blocks into memory",
    "measure": "warming up, measuring speed",
    "announce": "announcing to the swarm",
}
ASIDE = {"ends": "tokenizer, embedding and head"}  # runs in parallel; listed only if it has to be downloaded
HOSTING = ("weights", "load", "measure")  # steps of a node that hosts blocks


class StartupSteps:
    """The list of steps; calls `changed` at each change except progress."""

    def __init__(self, changed: Callable[[], None], now_s: Callable[[], float] = time.monotonic) -> None:
        self._changed, self._now_s = changed, now_s
        self._views = {key: StepView(key, title) for key, title in TITLES.items()}
        self._began_s: dict[str, float] = {}
        self.advances = 0  # changes and progress of all steps so far: as long as it grows, the node gets somewhere

    def views(self) -> tuple[StepView, ...]:
        """Return the steps in order."""
        return tuple(self._views.values())

    def begin(self, key: str, detail: str = "") -> None:
        """Mark a step as running and all later steps as pending."""
        later = list(TITLES)[list(TITLES).index(key) + 1 :]
        for name in later:
            self._views[name] = StepView(name, TITLES[name])
        aside = {name: view for name, view in self._views.items() if name in ASIDE}
        self._views = {name: self._views.get(name, StepView(name, TITLES[name])) for name in TITLES} | aside
        self._began_s[key] = self._now_s()
        self._set(key, "running", detail)

    def begin_aside(self, key: str, detail: str = "") -> None:
        """Mark a parallel step as running; the others keep their states."""
        self._began_s[key] = self._now_s()
        self._set(key, "running", detail)

    def leave_out(self, key: str) -> None:
        """Remove a step that is not needed."""
        self._views.pop(key, None)
        self._changed()

    def done(self, key: str, detail: str = "") -> None:
        """Mark a step as done."""
        self._set(key, "done", detail)

    def failed(self, detail: str) -> None:
        """Mark the running step as failed, until it begins again."""
        running = [key for key, view in self._views.items() if view.state == "running" and key not in ASIDE]
        for key in running[-1:]:
            self.fail(key, detail)

    def fail(self, key: str, detail: str) -> None:
        """Mark this step as failed, until it begins again."""
        self._set(key, "failed", detail)

    def leave_out_hosting(self) -> None:
        """Remove the hosting steps that are not done, because this node will not host; a former failure is over."""
        self._views = {key: view for key, view in self._views.items() if key not in HOSTING or view.state == "done"}
        self._changed()

    def progress(self, key: str, done: int, total: int) -> None:
        """Record how far a step is and estimate the time left; may be called from another thread."""
        view = self._views.get(key)
        if view is None:
            return
        self.advances += 1
        spent_s = self._now_s() - self._began_s.get(key, self._now_s())
        left_s = spent_s * (total - done) / done if done else None
        self._views[key] = dataclasses.replace(view, done=done, total=total, seconds_left=left_s)

    def _set(self, key: str, state: str, detail: str) -> None:
        self.advances += 1
        view = self._views.get(key, StepView(key, (TITLES | ASIDE)[key]))
        took_s = self._now_s() - self._began_s[key] if state == "done" and key in self._began_s else view.took_s
        if state == "done" and view.state != "done" and took_s is not None:
            log.info("%s: done in %.1f s %s", view.title, took_s, detail)
        self._views[key] = dataclasses.replace(view, state=state, detail=detail, seconds_left=None, took_s=took_s)
        self._changed()


class ModelPreparation:
    """Progress of the model that is downloaded or read before a swarm of it exists; may be set from another thread."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._began = (0.0, 0)  # time and bytes of the step's first progress
        self.view: StepView | None = None

    def fetching(self, done: int, total: int) -> None:
        """Record how many bytes of the download have arrived."""
        self._take("fetch", "downloading the model", done, total)

    def reading(self, done: int, total: int) -> None:
        """Record how many bytes of the model's files were read."""
        self._take("read", "reading the model", done, total)

    def over(self) -> None:
        """Forget the model: it is ready, or has failed."""
        self.view = None

    def _take(self, key: str, title: str, done: int, total: int) -> None:
        now_s = self._now_s()
        if self.view is None or self.view.key != key:
            self._began = (now_s, done)
        began_s, before = self._began
        left_s = (now_s - began_s) * (total - done) / (done - before) if done > before else None
        self.view = StepView(key, title, "running", done=done, total=total, seconds_left=left_s)
