"""The first run: three steps from a node without a swarm to a first question.

The page is drawn by `ui.draw.first_run`; which swarms are offered is decided by the node (`/control/prospects`).
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.timer import Timer

from app.api.client import PATIENT_S, Client
from app.snapshot.codec import prospects_from
from app.snapshot.views import OfferView, Snapshot
from ui.draw.first_run import HELLO, PAUSES, STEP_BYTES, FirstState, first_rows, pauses_from, proposed_bytes
from ui.draw.first_run_offers import STARTER
from ui.draw.rows import Row
from ui.node_app import NodeApp
from ui.screens.model_browser import ModelBrowser
from ui.state.store import Store
from ui.widgets.dialogs import Dialog, TextDialog
from ui.widgets.panel import RowWidget

LOOK_AGAIN_S = 2.0
INVITE = "shoal:"
TYPED_S = 0.5  # after the last key of an invite that a terminal pastes as if it were typed
LONGEST_S = 3600.0  # creating a swarm may download and import a model
ELSEWHERE_S = 1.0  # a swarm that was not joined after all is shown for a moment


class FirstPage(RowWidget):
    """The page with all three steps."""

    def __init__(self, store: Store, state: FirstState) -> None:
        super().__init__(store, id="first")
        self.state = state

    def rows(self, width: int, height: int) -> list[Row]:
        """Draw the page for this size."""
        return first_rows(self.state, self.store.snapshot, width, height, self.store.link)[:height]


class FirstRun(Dialog[None]):
    """Dialog of the first run: choose a swarm, choose memory and pauses, ask a question."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "next", "continue"),
        Binding("escape", "back", "back"),
        Binding("f5", "app.start_node", "start again"),
    ]

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.state = FirstState()
        self._loading_offers = False
        self._preview: OfferView | None = None
        self._configured_memory = True  # until the settings have arrived
        self._typed_invite = ""
        self._typing: Timer | None = None
        self._known_swarm = _swarm_in(store.snapshot)  # the one from which the page was opened, or that was tried here
        self._elsewhere_at: float | None = None  # since when the node is in another one

    @property
    def dashboard(self) -> NodeApp:
        """The app with its own type."""
        return cast(NodeApp, self.app)

    def compose(self) -> ComposeResult:
        """The page in its frame."""
        yield Container(FirstPage(self.store, self.state), id="firstbox")

    def on_mount(self) -> None:
        """Ask the node for its settings and, every `LOOK_AGAIN_S`, for the swarms it could join."""
        self.dashboard.ask(lambda client: client.get("/control/config"), self._configured)
        self._load_offers()
        self.set_interval(LOOK_AGAIN_S, self._load_offers)

    def _load_offers(self) -> None:
        """Ask for the offers, one request at a time and only while the first step is open."""
        if self._loading_offers or self.state.step > 0:
            return
        self._loading_offers = True
        path = "/control/prospects"
        self.dashboard.ask(lambda client: client.get(path, timeout_s=PATIENT_S), self._offered, self._offers_failed)

    def _configured(self, answer: Any) -> None:
        config = {entry["name"]: entry["value"] for entry in answer}
        self.state.pauses = pauses_from(config)
        self.state.public = "public" in config["discovery"] if "discovery" in config else None
        self.state.memory_bytes = config.get("max_vram")
        self._configured_memory = self.state.memory_bytes is not None
        self._propose_memory()
        self.show()

    def _propose_memory(self) -> None:
        """Begin with a share of the free memory, unless the user has a cap already or has moved it."""
        if not self._configured_memory and self.state.memory_bytes is None:
            self.state.memory_bytes = proposed_bytes(self.state.device(self.store.snapshot))

    def _offered(self, answer: Any) -> None:
        self._loading_offers = False
        self.state.take(prospects_from(answer))
        self._propose_memory()
        self.show()

    def _offers_failed(self, text: str) -> None:
        self._loading_offers, self.state.trouble = False, text
        self.show()

    def show(self) -> None:
        """Redraw the page from the store; close it if the node is in a swarm that was not chosen here."""
        if not self.is_attached:  # an answer may arrive after the dialog was closed
            return
        if self._is_elsewhere() and self.app.screen is self:
            self.close()
        else:
            self.query_one(FirstPage).show()

    def _is_elsewhere(self) -> bool:
        """True once the node has been for a moment in a swarm that another terminal or program chose."""
        swarm, is_entering = _swarm_in(self.store.snapshot), self.state.step == 1 and self.state.busy
        if is_entering and swarm is not None:
            self._known_swarm = swarm
        if self.state.step == 2 or swarm in (None, self._known_swarm):
            self._elsewhere_at = None
        elif self._elsewhere_at is None:
            self._elsewhere_at = self.store.now()
        return self._elsewhere_at is not None and self.store.now() - self._elsewhere_at >= ELSEWHERE_S

    # --- keys --------------------------------------------------------------------------------------------------------

    def on_paste(self, event: events.Paste) -> None:
        """Take pasted text as an invite in the first step, as part of the question in the third."""
        event.stop()
        if self.state.step == 0 and event.text.strip():
            self._look_at(event.text.strip())
        elif self.state.step == 2:
            self.state.typed += " ".join(event.text.split())
            self.show()

    def on_key(self, event: events.Key) -> None:
        """Handle the keys of the open step."""
        handler = (self._where_key, self._memory_key, self._hello_key)[self.state.step]
        if handler(event):
            event.stop()
            self.show()

    def _where_key(self, event: events.Key) -> bool:
        if self._is_of_invite(event):
            return True
        if event.key == "q":
            self.dashboard.action_leave()
        elif event.key == "j":
            check = self.dashboard.check("target", self._found)
            dialog = TextDialog("A swarm's name, or an invite", hint="reading-club or shoal:…", check=check)
            self.app.push_screen(dialog, lambda target: self._go_to(target, self._preview) if target else None)
        elif event.key == "c":
            self.app.push_screen(ModelBrowser(), self._create)
        elif event.key == "l":
            self.close()
        elif event.key.isdecimal() and int(event.key) > 0 and int(event.key) in self.state.choices:
            self._choose(int(event.key))
        else:
            return False
        return True

    def _is_of_invite(self, event: events.Key) -> bool:
        """True if a key continues an invite: terminals without bracketed paste send pasted text as keys."""
        if event.key == "enter":  # ends it: `action_next`
            return False
        typed = self._typed_invite + (event.character or "")
        is_invite = typed.startswith(INVITE) and event.is_printable
        self._typed_invite = typed if is_invite or INVITE.startswith(typed) else ""
        if self._typing is not None:
            self._typing.stop()
        self._typing = self.set_timer(TYPED_S, self._take_typed) if is_invite else None
        return len(self._typed_invite) > 1

    def _take_typed(self) -> None:
        target, self._typed_invite = self._typed_invite, ""
        if target and self.state.step == 0:
            self._look_at(target)

    def _found(self, offer: OfferView) -> None:
        self._preview = offer

    def _look_at(self, target: str) -> None:
        """Ask the node where a pasted invite leads before it is taken."""
        if self.state.busy:
            return
        self.state.busy, self.state.problem = "looking where this leads", ""

        def right() -> None:
            self.state.busy = ""
            self._go_to(target, self._preview)

        def wrong(text: str) -> None:
            self.state.busy, self.state.problem = "", text
            self.show()

        self.dashboard.check("target", self._found)(target, right, wrong)
        self.show()

    def _go_to(self, target: str, preview: OfferView | None) -> None:
        self.state.target, self.state.preview, self.state.create = target, preview, None
        self._advance()

    def _create(self, model: str | None) -> None:
        def named(name: str | None) -> None:
            if name and model:
                self.state.target, self.state.preview, self.state.create = "", None, (name, model)
                self._advance()

        if model:
            check = self.dashboard.check("name")
            self.app.push_screen(TextDialog("Name the swarm", value="home", check=check), named)

    def _memory_key(self, event: events.Key) -> bool:
        state = self.state
        if event.key == "q":
            self.dashboard.action_leave()
        elif event.key in ("up", "down", "tab"):
            state.cursor = (state.cursor + (-1 if event.key == "up" else 1)) % (len(state.toggles) + 1)
        elif event.key in ("left", "right"):
            self._change_memory(-STEP_BYTES if event.key == "left" else STEP_BYTES)
        elif event.key == "space" and state.cursor:
            name = state.toggles[state.cursor - 1]
            if name == "public":
                state.public = not state.public
            elif name == "private":
                state.private = not state.private
            else:
                state.pauses[name] = not state.pauses[name]
        else:
            return False
        return True

    def _change_memory(self, by: int) -> None:
        device = self.state.device(self.store.snapshot)
        total = device.memory_total_bytes if device is not None else None
        if device is None or not total:
            return
        start = self.state.memory_bytes
        if start is None:
            start = (device.memory_free_bytes or total) // STEP_BYTES * STEP_BYTES
        self.state.memory_bytes = max(0, min(total // STEP_BYTES * STEP_BYTES, start + by))

    def _hello_key(self, event: events.Key) -> bool:
        if event.key == "backspace":
            self.state.typed = self.state.typed[:-1]
        elif event.is_printable and event.character:
            self.state.typed += event.character
        else:
            return False
        return True

    # --- steps -------------------------------------------------------------------------------------------------------

    async def action_next(self) -> None:
        """Confirm the open step."""
        if self.state.busy:
            return
        if self.state.step == 0 and self._typed_invite.startswith(INVITE):
            self._take_typed()
        elif self.state.step == 0:
            self._choose(0)
        elif self.state.step == 1:
            self._enter()
        else:
            await self._hello()

    def _choose(self, index: int) -> None:
        """Take an offer; if the offers could not be loaded, take the starter model."""
        chosen = self.state.choices.get(index)
        if chosen is not None and chosen.target != STARTER:
            self._go_to(chosen.target, None)
        elif chosen is not None or self.state.trouble:
            self.state.target, self.state.preview, self.state.create = "", None, ("home", STARTER)
            self._advance()

    def _advance(self) -> None:
        self.state.step, self.state.problem = 1, ""
        self.show()

    def action_back(self) -> None:
        """Go back to the step before; once the node is in its swarm nothing is left to choose, and the page closes.

        A question that was typed then waits in the chat.
        """
        if self.state.step == 2:
            self.dashboard.unsent = self.state.typed.strip()
            self.close()
        elif not self.state.busy:
            self.state.step, self.state.problem = 0, ""
            self.show()

    def _enter(self) -> None:
        """Write the changed settings, then join or create the swarm."""
        state = self.state
        verb = "creating" if state.create is not None else "joining"
        state.busy, state.problem = f"{verb} {state.where}", ""
        changes = {name: on if state.pauses[name] else off for name, _, on, off in PAUSES if name in state.pauses}
        memory, target, create, public = state.memory_bytes, state.target, state.create, state.public
        private = state.private

        def work(client: Client) -> Any:
            kept = {entry["name"]: entry["value"] for entry in client.get("/control/config")}
            for name, value in changes.items():
                if bool(kept.get(name)) != (value not in ("0", "false")):
                    client.set_config(name, value)
            means = [name for name in kept.get("discovery", ()) if name != "public"] + ["public"] * bool(public)
            if public is not None and set(means) != set(kept["discovery"]):
                client.set_config("discovery", ",".join(means))
            if memory != kept.get("max_vram"):
                client.set_config("max_vram", None if memory is None else str(memory))
            if create is not None:
                body = {"name": create[0], "model": create[1], "private": private}
                return client.post("/control/create", body, timeout_s=LONGEST_S)
            return client.post("/control/join", {"target": target})

        self.dashboard.ask(work, lambda _: self._entered(), self._enter_failed)
        self.show()

    def _entered(self) -> None:
        self.state.busy, self.state.step = "", 2
        self.show()

    def _enter_failed(self, text: str) -> None:
        """Go back to the first step: the reason is nearly always there."""
        self.state.busy, self.state.problem, self.state.step = "", text, 0
        self.show()

    async def _hello(self) -> None:
        question = self.state.typed.strip() or HELLO
        self.close()
        await self.dashboard.say_hello(question)


def _swarm_in(snapshot: Snapshot | None) -> tuple[str, str | None] | None:
    """The swarm that a node is in."""
    return None if snapshot is None or snapshot.swarm is None else (snapshot.swarm, snapshot.manifest)
