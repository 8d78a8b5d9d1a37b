"""The invite: one line, its QR code, and who came since it was shown."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from app.core.terminal_text import one_line, short_peer
from app.snapshot.views import PeerView, Snapshot
from ui.draw.node import now_ms
from ui.draw.numbers import rate
from ui.draw.rows import Row, row
from ui.node_app import NodeApp
from ui.state.store import Store
from ui.widgets.dialogs import Dialog
from ui.widgets.panel import RowWidget

_QUIET = 2  # light cells around the code


def qr_rows(text: str) -> list[str]:
    """A QR code in half blocks, two modules a row; dark modules are drawn, light ones are blank."""
    import segno

    matrix = [[bool(module) for module in line] for line in segno.make(text, error="l", micro=False).matrix]
    side = len(matrix[0]) + 2 * _QUIET
    blank = [False] * side
    padded = [blank] * _QUIET + [[False] * _QUIET + line + [False] * _QUIET for line in matrix] + [blank] * _QUIET
    if len(padded) % 2:
        padded.append(blank)
    halves = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
    return [
        "".join(halves[pair] for pair in zip(upper, lower, strict=True))
        for upper, lower in zip(padded[::2], padded[1::2], strict=True)
    ]


class GuestList:
    """Who came since the invite was shown, and how far each has come; who goes again stays listed."""

    def __init__(self, known: Snapshot) -> None:
        self._before = {peer.peer for peer in known.peers} | set(known.network.strangers)
        self._members: dict[str, PeerView] = {}
        self._knocking: dict[str, None] = {}

    def look(self, known: Snapshot) -> None:
        """See who is here now."""
        for peer in known.peers:
            if peer.peer not in self._before:
                self._members[peer.peer] = peer
        self._knocking |= dict.fromkeys(peer for peer in known.network.strangers if peer not in self._before)

    def rows(self, known: Snapshot) -> list[Row]:
        """One row for each, those who are on their way first."""
        here = {peer.peer for peer in known.peers}
        linked = set(known.network.strangers)
        knocking = [peer for peer in self._knocking if peer not in self._members]
        rows = [
            row(("◌", "primary"), " ", (short_peer(peer), "b"), " connecting")
            if peer in linked
            else row(("×", "error"), " ", (short_peer(peer), "b"), " failed: went again before it had joined")
            for peer in knocking
        ]
        return [*rows, *(guest_row(peer, peer.peer in here) for peer in self._members.values())]


def guest_row(peer: PeerView, here: bool) -> Row:
    """How far somebody is who came."""
    name = one_line(peer.name) or short_peer(peer.peer)
    span = f" {peer.start}:{peer.stop}" if peer.start is not None else ""
    if not here or peer.state in ("dead", "left"):
        how = "left" if peer.state == "left" else "fell silent"
        served = f" after it served{span}" if peer.state == "serving" and span else ""
        why = one_line(peer.unused.text) if peer.unused is not None else f"{how}{served}"
        return row(("×", "error"), " ", (name, "b"), f" failed: {why}")
    if peer.state == "serving":
        return row(
            ("●", "success"), " ", (name, "b"), f" serving{span}", (f" · {rate(peer.tokens_per_s)} tok/s", "dim")
        )
    if peer.state == "client":
        return row(("●", "success"), " ", (name, "b"), " is here, and hosts nothing")
    if peer.state in ("fetching", "loading"):
        share = f" {peer.fetched:.0%}".replace("%", " %") if peer.fetched is not None else ""
        return row(("◐", "primary"), " ", (name, "b"), f" loading{span}{share}")
    words = {"joining": "looks at what others host", "": "is here"}.get(peer.state, one_line(peer.state))
    return row(("◐", "warning"), " ", (name, "b"), f" {words}")


class Guest(RowWidget):
    """Who came."""

    guests: GuestList | None = None
    opened_ms = 0

    def rows(self, width: int, height: int) -> list[Row]:
        """One row each; who was turned away comes last."""
        known = self.store.snapshot
        if known is None:
            return [row(("the node is away", "dim"))]
        if self.guests is None:
            self.guests = GuestList(known)
        self.guests.look(known)
        rows = self.guests.rows(known)
        turned = [note for note in self.store.notes if note.kind == "knock" and note.at_ms >= self.opened_ms]
        rows += [row(("×", "error"), f" {one_line(turned[-1].text)}")] if turned else []
        return (rows or [row(("Nobody has come since you opened this.", "dim"))])[-height:]


class InviteScreen(Dialog[None]):
    """The invite, live."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,i", "close", "close"),
        Binding("y", "copy", "copy"),
    ]

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.line = ""

    def compose(self) -> ComposeResult:
        """Line, code, who came."""
        with VerticalScroll(classes="dialog", id="invite-box") as box:
            box.border_title = "invite"
            yield Static("Asking the node…", id="invite-line")
            yield Static("", id="invite-code")
            yield Guest(self.store, id="came")
            keys = (("y", "bold $mine"), " copy the line   ", ("esc", "bold $mine"), " close")
            yield Static(Content.assemble(*keys), id="invite-keys")

    def on_mount(self) -> None:
        """Ask the node for one."""
        self.query_one(Guest).opened_ms = now_ms()
        dashboard = cast(NodeApp, self.app)
        dashboard.ask(lambda client: client.post("/api/invite", {"name": None}), self.take, self._failed)

    def take(self, told: Any) -> None:
        """Show what the node made."""
        self.line = one_line(str(told["invite"]))
        known = self.store.snapshot
        private = known is not None and known.private
        whom = (
            "Whoever has this line can enter: it holds the swarm's secret." if private else "For anyone who is to come."
        )
        words = Content.assemble(
            (f"{one_line(str(told['name']))}  ", "bold"), (whom, "$dim"), "\n\n", (self.line, "$mine")
        )
        self.query_one("#invite-line", Static).update(words)
        code = self.query_one("#invite-code", Static)
        rows = qr_rows(self.line)
        room = self.app.size
        if len(rows) + 12 > room.height or len(rows[0]) + 8 > room.width:
            need = f"{len(rows[0]) + 8}x{len(rows) + 12}"
            code.update(Content.styled(f"The QR code needs a window of {need}; `shoal invite --qr` prints it.", "$dim"))
        else:
            code.update(Content.styled("\n".join(rows), "#000000 on #ffffff"))

    def _failed(self, text: str) -> None:
        self.query_one("#invite-line", Static).update(Content.styled(one_line(text), "$error"))

    def show(self) -> None:
        """Look at the store again."""
        self.query_one(Guest).show()

    def action_copy(self) -> None:
        """The line into the terminal's clipboard."""
        if self.line:
            self.app.copy_to_clipboard(self.line)
            self.notify("the invite is in the clipboard", timeout=3)

    def action_close(self) -> None:
        """Back."""
        self.close()
