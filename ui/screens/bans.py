"""Bans: the node's setting `deny`, changed with a key in the peers table or from the palette."""

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
from app.core.terminal_text import one_line, peer_words_with_id, quoted
from app.snapshot.views import PeerView
from ui.node_app import NodeApp
from ui.widgets.dialogs import Dialog, Question

DENY = "deny"


def denied(config: Sequence[dict[str, Any]]) -> list[str]:
    """Peer ids and networks that the node's settings deny."""
    found = next((setting["value"] for setting in config if setting["name"] == DENY), None)
    return [str(item) for item in found or ()]


def ban(client: Client, peer: str) -> None:
    """Add a peer to the setting `deny`."""
    kept = [item for item in denied(client.get("/control/config")) if item != peer]
    client.set_config(DENY, ",".join([*kept, peer]))


def unban(client: Client, entry: str) -> None:
    """Remove an entry from the setting `deny`."""
    kept = [item for item in denied(client.get("/control/config")) if item != entry]
    client.set_config(DENY, ",".join(kept) if kept else None)


def offer_ban(app: NodeApp, peer: PeerView) -> None:
    """Ban a peer after confirmation."""
    name = peer_words_with_id(peer.peer, peer.name)

    def answered(sure: bool | None) -> None:
        if sure:
            app.ask(lambda client: ban(client, peer.peer), lambda _: app.say(f"{name} is banned; ^p unban undoes it"))

    app.push_screen(
        Question(f"Never speak with {name} again? “Unban a peer” in the palette (^p) takes it back.", "Ban"), answered
    )


def offer_unban(app: NodeApp) -> None:
    """Let the user choose a banned peer or network, and unban it."""

    def chosen(entry: str | None) -> None:
        if entry is not None:
            app.ask(lambda client: unban(client, entry), lambda _: app.say(f"{one_line(entry)} is no longer banned"))

    def listed(config: Any) -> None:
        names = {peer.peer: peer.name for peer in app.store.snapshot.peers} if app.store.snapshot else {}
        app.push_screen(BanPicker(denied(config), names), chosen)

    app.ask(lambda client: client.get("/control/config"), listed)


class BanPicker(Dialog[str | None]):
    """Dialog that lists the banned peers and networks; returns the chosen one, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "back")]

    def __init__(self, entries: list[str], names: dict[str, str]) -> None:
        super().__init__()
        self._entries, self._names = entries, names

    def compose(self) -> ComposeResult:
        """One option for each ban, with the peer's name if it is known."""
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
        return f"{quoted(name)} · {one_line(entry)}" if name else one_line(entry)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Close with the chosen entry."""
        self.close(event.option_id)

    def action_cancel(self) -> None:
        """Close without a choice."""
        self.close(None)
