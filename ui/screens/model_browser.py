"""The model browser: the models that a swarm could be created of, with size, format and whether they fit here.

The node lists and opens the models (`/control/models`, `/control/preview`), since they are on its machine. A typed path
lists a folder of that machine; other words filter the list, and can be searched for on the Hugging Face Hub.
"""

from __future__ import annotations

from math import ceil
from typing import Any, ClassVar, cast
from urllib.parse import quote

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from app.api.client import PATIENT_S
from app.core.terminal_text import one_line
from app.snapshot.codec import models_from, offer_from
from app.snapshot.views import FitView, ModelView, OfferView
from ui.draw.numbers import count, plural, rate, size
from ui.draw.state_line import preparing_words
from ui.node_app import NodeApp
from ui.widgets.dialogs import Dialog, key_line
from ui.widgets.text_field import TextField

_HUB = "search the hub"
_DOWNLOAD_S = 24 * 3600.0


def fit_sentence(fit: FitView | None) -> str:
    """How much of a model this machine holds: it fits here, or how many more machines like this one are needed."""
    if fit is None:
        return "not known if it fits"
    if fit.blocks >= fit.blocks_total:
        return "fits here"
    if fit.blocks == 0:
        return "no block of it fits here: others have to host it"
    more = ceil(fit.blocks_total / fit.blocks) - 1
    return f"{fit.blocks} of {fit.blocks_total} blocks fit: needs {plural(more, 'more machine')} like this one"


def offer_words(offer: OfferView) -> str:
    """What is known of a model, in one line."""
    parts = [one_line(offer.model) or one_line(offer.target)]
    parts += [size(offer.size_bytes)] if offer.size_bytes else []
    parts += [f"context {count(offer.context_length)} tokens"] if offer.context_length else []
    parts += [fit_sentence(offer.fit)]
    parts += [f"about {rate(offer.alone_tokens_per_s)} tok/s alone"] if offer.alone_tokens_per_s else []
    return " · ".join(parts)


class ModelBrowser(Dialog[str | None]):
    """Dialog that returns the model to create a swarm of, as the node's `create` takes it, or None."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "back"),
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._models: list[ModelView] = []
        self._folder = ""  # that is listed; empty: the usual places
        self._previewed = ""
        self._is_downloading = False

    @property
    def dashboard(self) -> NodeApp:
        """The app with its own type."""
        return cast(NodeApp, self.app)

    def compose(self) -> ComposeResult:
        """A field, the list, and what is known of the highlighted model."""
        with Vertical(classes="dialog", id="models") as box:
            box.border_title = "which model?"
            yield TextField(placeholder="filter, or a folder like ~/models", id="wanted", compact=True)
            yield OptionList(id="found")
            yield Static("asking the node for its models…", id="known")
            yield Static(key_line(("⏎", "choose"), ("↑ ↓", "move"), ("esc", "back")))

    def on_mount(self) -> None:
        """List the models."""
        self.query_one(OptionList).can_focus = False
        self._load("")

    def _load(self, folder: str) -> None:
        self._folder = folder
        path = f"/control/models?folder={quote(folder)}" if folder else "/control/models"
        self.dashboard.ask(lambda client: client.get(path, timeout_s=PATIENT_S), self._listed, self._say)

    def _listed(self, answer: Any) -> None:
        self._models = models_from(answer)
        self._say("" if self._models else "no model found there")
        self._show()

    def _say(self, text: str) -> None:
        if self.is_attached:
            self.query_one("#known", Static).update(Content(one_line(text)))

    def _show(self, *, is_at_hub: bool = False) -> None:
        """Show the models that match what is typed, and the search of the hub; highlight that or the first row."""
        if not self.is_attached:
            return
        wanted = "" if self._folder else self._typed
        shown = [m for m in self._models if wanted.casefold() in f"{m.title} {m.name}".casefold()]
        options = [Option(self._row(model), id=model.name) for model in shown]
        if wanted and not self._is_path(wanted):
            options.append(Option(Content(f"search the Hugging Face Hub for “{one_line(wanted)}”"), id=_HUB))
        found = self.query_one(OptionList)
        found.clear_options()
        found.add_options(options)
        found.highlighted = None if not options else len(options) - 1 if is_at_hub else 0

    @property
    def _typed(self) -> str:
        return self.query_one("#wanted", Input).value.strip()

    def _row(self, model: ModelView) -> Content:
        about = [model.format, size(model.size_bytes) if model.size_bytes else "", "" if model.here else "to download"]
        tail = "  ".join(part for part in about if part)
        return Content.assemble(one_line(model.title), (f"   {tail}", "$dim"))

    @on(Input.Changed, "#wanted")
    def typed(self) -> None:
        """Filter while typing; a path lists its folder once it is entered."""
        if self._folder and not self._is_path(self._typed):
            self._load("")
        else:
            self._show()
            if self._is_path(self._typed):
                self._previewed = self._typed
                self._say("⏎ takes this file" if self._typed.endswith(".gguf") else "⏎ lists this folder")

    def _is_path(self, text: str) -> bool:
        return text.startswith(("/", "~", ".")) or text[1:3] in (":\\", ":/")

    @on(OptionList.OptionHighlighted)
    def highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Ask the node what the highlighted model needs, unless it would have to be downloaded for that."""
        name = event.option_id or ""
        if name == _HUB and self._previewed:
            self._previewed = ""
            self._say("")  # what was known of the model that was highlighted before
        model = next((m for m in self._models if m.name == name), None)
        if model is None or name == self._previewed:
            return
        self._previewed = name
        if not model.here and "/" in name:
            self._say(f"{name} · to download")
            return
        self._say("…")
        self.dashboard.ask(
            lambda client: client.post("/control/preview", {"model": name}),
            lambda answer: self._say(offer_words(offer_from(answer))) if self._previewed == name else None,
            lambda text: self._say(text) if self._previewed == name else None,
        )

    @on(Input.Submitted, "#wanted")
    def entered(self) -> None:
        """List a typed folder, search the hub, or choose the highlighted model."""
        found = self.query_one(OptionList)
        option = None if found.highlighted is None else found.get_option_at_index(found.highlighted)
        if self._is_path(self._typed) and self._typed != self._folder:
            if self._typed.endswith(".gguf"):
                self._choose(self._typed)
            else:
                self._say("looking")
                self._load(self._typed)
        elif option is not None and option.id == _HUB:
            self._search_hub()
        elif option is not None and option.id is not None:
            self._choose(option.id)

    @on(OptionList.OptionSelected)
    def clicked(self, event: OptionList.OptionSelected) -> None:
        """Choose a clicked model, or search the hub."""
        if event.option_id == _HUB:
            self._search_hub()
        elif event.option_id is not None:
            self._choose(event.option_id)

    def _search_hub(self) -> None:
        """Replace the list by what the hub has under the typed words; if that fails, put words and list back."""
        words, listed, field = self._typed, self._models, self.query_one("#wanted", Input)
        path = f"/control/models/search?words={quote(words)}"
        self._say(f"searching the Hugging Face Hub for “{words}”…")
        self._models, field.value = [], ""

        def failed(text: str) -> None:
            if not self.is_attached:
                return
            if not self._typed and not self._models:
                with field.prevent(Input.Changed):
                    field.value = words
                self._models = listed
                self._show(is_at_hub=True)
            self._say(text)

        self.dashboard.ask(lambda client: client.get(path, timeout_s=PATIENT_S), self._listed, failed)

    def _choose(self, name: str) -> None:
        """Close with a model that the node can open; one of the hub is downloaded first."""
        model = next((m for m in self._models if m.name == name), None)
        is_hub = model is not None and not model.here and "/" in name
        self._is_downloading = is_hub
        self._say(f"downloading {name}: this may take a while" if is_hub else "opening it")

        def work(client: Any) -> Any:
            if is_hub:
                client.post("/control/pull", {"model": name}, timeout_s=_DOWNLOAD_S)
            return client.post("/control/preview", {"model": name})

        def failed(text: str) -> None:
            self._is_downloading = False
            self._say(text)

        self.dashboard.ask(work, lambda _: self.close(name), failed)

    def show(self) -> None:
        """Redraw the progress of a download."""
        words = preparing_words(self.dashboard.store.snapshot)
        if self._is_downloading and words:
            self._say(words)

    def action_move(self, rows: int) -> None:
        """Move the highlight while the field keeps the focus."""
        found = self.query_one(OptionList)
        if found.option_count:
            found.highlighted = max(0, min(found.option_count - 1, (found.highlighted or 0) + rows))

    def action_cancel(self) -> None:
        """Close without a choice."""
        self.close(None)
