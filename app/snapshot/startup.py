"""The steps of coming up, in one list: what is done, what is under way and how far, what failed and stays failed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from app.snapshot.views import StepView

TITLES = {
    "identity": "this node's identity",
    "peers": "members of the swarm",
    "manifest": "what the model is made of",
    "weights": "the model's files",
    "load": "blocks into memory",
    "measure": "how fast they run",
    "announce": "told to the others",
}
ASIDE = {"ends": "tokenizer, embedding and head"}  # beside the others, and listed only where they have to come
HOSTING = ("weights", "load", "measure")  # what only a node that hosts goes through


class StartupSteps:
    """The list; `changed` is called at each change but for mere progress."""

    def __init__(self, changed: Callable[[], None], now_s: Callable[[], float] = time.monotonic) -> None:
        self._changed, self._now_s = changed, now_s
        self._views = {key: StepView(key, title) for key, title in TITLES.items()}
        self._began_s: dict[str, float] = {}

    def views(self) -> tuple[StepView, ...]:
        """The steps in their order."""
        return tuple(self._views.values())

    def begin(self, key: str, detail: str = "") -> None:
        """A step is under way; what comes after it lies ahead again."""
        later = list(TITLES)[list(TITLES).index(key) + 1 :]
        for name in later:
            self._views[name] = StepView(name, TITLES[name])
        aside = {name: view for name, view in self._views.items() if name in ASIDE}
        self._views = {name: self._views.get(name, StepView(name, TITLES[name])) for name in TITLES} | aside
        self._began_s[key] = self._now_s()
        self._set(key, "running", detail)

    def begin_aside(self, key: str, detail: str = "") -> None:
        """A step is under way beside the others, which stay as they are."""
        self._began_s[key] = self._now_s()
        self._set(key, "running", detail)

    def leave_out(self, key: str) -> None:
        """A step was not needed."""
        self._views.pop(key, None)
        self._changed()

    def done(self, key: str, detail: str = "") -> None:
        """A step is over."""
        self._set(key, "done", detail)

    def failed(self, detail: str) -> None:
        """The step that is under way failed; it stays so until it begins again."""
        running = [key for key, view in self._views.items() if view.state == "running" and key not in ASIDE]
        for key in running[-1:]:
            self.fail(key, detail)

    def fail(self, key: str, detail: str) -> None:
        """This step failed; it stays so until it begins again."""
        self._set(key, "failed", detail)

    def leave_out_hosting(self) -> None:
        """This node will not host, so that nothing of it lies ahead."""
        self._views = {
            key: view for key, view in self._views.items() if key not in HOSTING or view.state in ("done", "failed")
        }
        self._changed()

    def progress(self, key: str, done: int, total: int) -> None:
        """How far a step is; may be called from another thread."""
        view = self._views.get(key)
        if view is None:
            return
        spent_s = self._now_s() - self._began_s.get(key, self._now_s())
        left_s = spent_s * (total - done) / done if done else None
        self._views[key] = dataclasses.replace(view, done=done, total=total, seconds_left=left_s)

    def _set(self, key: str, state: str, detail: str) -> None:
        view = self._views.get(key, StepView(key, (TITLES | ASIDE)[key]))
        self._views[key] = dataclasses.replace(view, state=state, detail=detail, seconds_left=None)
        self._changed()
