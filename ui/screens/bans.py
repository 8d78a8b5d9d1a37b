"""Whom this node never speaks with: the setting `deny`, changed by a key or from the palette."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from app.api.client import Client
from app.core.terminal_text import one_line
from app.snapshot.views import PeerView
from ui.node_app import NodeApp
from ui.widgets.dialogs import Dialog, Question

DENY = "deny"


def denied(config: Sequence[dict[str, Any]]) -> list[str]:
    """The peers and networks that are denied by the node's settings."""
    found = next((setting["value"] for setting in config if setting["name"] == DENY), None)
    return [str(item) for item in found or ()]


def ban(client: Client, peer: str) -> None:
    """Deny a peer too."""
    kept = [item for item in denied(client.get("/api/config")) if item != peer]
    client.set_config(DENY, ",".join([*kept, peer]))


def unban(client: Client, entry: str) -> None:
    """Deny it no more."""
    kept = [item for item in denied(client.get("/api/config")) if item != entry]
    client.set_config(DENY, ",".join(kept) if kept else None)


def offer_ban(app: NodeApp, peer: PeerView) -> None:
    """Ban a peer, once the person is sure."""
    name = one_line(peer.name) or peer.peer

    def answered(sure: bool | None) -> None:
        if sure:
            app.ask(lambda client: ban(client, peer.peer), lambda _: app.say(f"{name} is banned; ^p unban undoes it"))

    app.push_screen(Question(f"Never speak with {name} again? The setting `deny` keeps the list.", "Ban"), answered)


def offer_unban(app: NodeApp) -> None:
    """Let the person choose whom to speak with again."""

    def chosen(entry: str | None) -> None:
        if entry is not None:
            app.ask(lambda client: unban(client, entry), lambda _: app.say(f"{one_line(entry)} may come again"))

    def listed(config: Any) -> None:
        names = {peer.peer: one_line(peer.name) for peer in app.store.snapshot.peers} if app.store.snapshot else {}
        app.push_screen(BanPicker(denied(config), names), chosen)

    app.ask(lambda client: client.get("/api/config"), listed)


class BanPicker(Dialog[str | None]):
    """The denied ones in a window."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "back")]

    def __init__(self, entries: list[str], names: dict[str, str]) -> None:
        super().__init__()
        self._entries, self._names = entries, names

    def compose(self) -> ComposeResult:
        """One line each."""
        with Vertical(classes="dialog") as box:
            box.border_title = "unban"
            if not self._entries:
                yield Static("Nobody is banned.")
                return
            yield OptionList(*(Option(Content(self._words(entry)), id=entry) for entry in self._entries))
            yield Static(
                Content.assemble(("⏎", "bold $mine"), " speak with it again   ", ("esc", "bold $mine"), " back")
            )

    def _words(self, entry: str) -> str:
        name = self._names.get(entry)
        return f"{name} · {one_line(entry)}" if name else one_line(entry)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """That one."""
        self.close(event.option_id)

    def action_cancel(self) -> None:
        """None."""
        self.close(None)
