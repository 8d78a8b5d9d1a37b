"""The invite: one line, its QR code, and who came since it was shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from app.snapshot import PeerView
from ui.coverage import short_peer
from ui.dialogs import Dialog
from ui.ink import Row, clean, row
from ui.panel import Painted
from ui.store import Store

if TYPE_CHECKING:
    from ui.dashboard import Dashboard

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


def came_rows(store: Store, before: frozenset[str] | None) -> list[Row]:
    """Who is here that was not when the invite was shown, and how far they are."""
    known = store.snapshot
    if known is None or before is None:
        return [row(("the node is away", "dim"))]
    came = [peer for peer in known.peers if peer.peer not in before]
    if not came:
        return [row(("Nobody has come since you opened this.", "dim"))]
    return [_came_row(peer) for peer in came]


def _came_row(peer: PeerView) -> Row:
    name = clean(peer.name) or short_peer(peer.peer)
    span = f" {peer.start}:{peer.stop}" if peer.start is not None else ""
    sign, style = ("●", "success") if peer.state in ("serving", "client") else ("◐", "warning")
    why = f" · {clean(peer.why)}" if peer.why else ""
    return row((sign, style), " ", (name, "b"), f" {clean(peer.state) or '—'}{span}", (why, "dim"))


class Came(Painted):
    """Who came."""

    before: frozenset[str] | None = None

    def rows(self, width: int, height: int) -> list[Row]:
        """One row each."""
        return came_rows(self.store, self.before)[:height]


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
            yield Came(self.store, id="came")
            keys = (("y", "bold $mine"), " copy the line   ", ("esc", "bold $mine"), " close")
            yield Static(Content.assemble(*keys), id="invite-keys")

    def on_mount(self) -> None:
        """Ask the node for one."""
        came = self.query_one(Came)
        if self.store.snapshot is not None:
            came.before = frozenset(peer.peer for peer in self.store.snapshot.peers)
        dashboard = cast("Dashboard", self.app)
        dashboard.ask(lambda client: client.post("/api/invite", {"name": None}), self.take, self._failed)

    def take(self, told: Any) -> None:
        """Show what the node made."""
        self.line = clean(str(told["invite"]))
        known = self.store.snapshot
        private = known is not None and known.private
        whom = (
            "Whoever has this line can enter: it holds the swarm's secret." if private else "For anyone who is to come."
        )
        words = Content.assemble(
            (f"{clean(str(told['name']))}  ", "bold"), (whom, "$dim"), "\n\n", (self.line, "$mine")
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
        self.query_one("#invite-line", Static).update(Content.styled(clean(text), "$error"))

    def show(self) -> None:
        """Look at the store again."""
        self.query_one(Came).show()

    def action_copy(self) -> None:
        """The line into the terminal's clipboard."""
        if self.line:
            self.app.copy_to_clipboard(self.line)
            self.notify("the invite is in the clipboard", timeout=3)

    def action_close(self) -> None:
        """Back."""
        self.close()
