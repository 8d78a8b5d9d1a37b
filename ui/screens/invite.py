"""The invite dialog: the invite as a line and as a QR code, its limits, and the peers that ask to join or arrived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from app.api.client import Client
from app.core.terminal_text import one_line, peer_words, peer_words_with_id, qr_code, short_peer
from app.snapshot.views import GuestView, PeerView, Snapshot
from ui.draw.node import now_ms
from ui.draw.numbers import duration, plural, rate
from ui.draw.rows import Row, row
from ui.node_app import NodeApp
from ui.state.store import Store
from ui.widgets.dialogs import Dialog
from ui.widgets.panel import RowWidget

_QUIET = 2  # width of the quiet zone around the code, in modules


def qr_rows(text: str) -> list[str]:
    """The QR code of an invite in half blocks, two modules to a row; dark modules are drawn, light ones are blank."""
    matrix = [[bool(module) for module in line] for line in qr_code(text).matrix]
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
    """Peers that arrived since the invite was opened and their progress; peers that leave again stay listed."""

    def __init__(self, known: Snapshot) -> None:
        self._before = {peer.peer for peer in known.peers} | set(known.network.strangers)
        self._members: dict[str, PeerView] = {}
        self._knocking: dict[str, None] = {}

    def look(self, known: Snapshot) -> None:
        """Record who is connected or a member now."""
        for peer in known.peers:
            if peer.peer not in self._before:
                self._members[peer.peer] = peer
        self._knocking |= dict.fromkeys(peer for peer in known.network.strangers if peer not in self._before)

    def rows(self, known: Snapshot) -> list[Row]:
        """One row for each arrived peer: those still connecting first, then members."""
        here = {peer.peer for peer in known.peers}
        linked = set(known.network.strangers)
        knocking = [peer for peer in self._knocking if peer not in self._members]
        rows = [
            row(("◌", "primary"), " ", (short_peer(peer), "b"), " connecting")
            if peer in linked
            else row(("×", "error"), " ", (short_peer(peer), "b"), " failed: disconnected before it had joined")
            for peer in knocking
        ]
        return [*rows, *(guest_row(peer, peer.peer in here) for peer in self._members.values())]


def guest_row(peer: PeerView, here: bool) -> Row:
    """Progress of a member that arrived: joining, loading, serving, or failed; `here` if it is still a member."""
    name = peer_words(peer.peer, peer.name)
    span = f" {peer.start}:{peer.stop}" if peer.start is not None else ""
    if not here or peer.state in ("dead", "left"):
        how = "left" if peer.state == "left" else "stopped answering"
        served = f" after it served{span}" if peer.state == "serving" and span else ""
        why = one_line(peer.unused.text) if peer.unused is not None else f"{how}{served}"
        return row(("×", "error"), " ", (name, "b"), f" failed: {why}")
    if peer.state == "serving":
        return row(
            ("●", "success"), " ", (name, "b"), f" serving{span}", (f" · {rate(peer.tokens_per_s)} tok/s", "dim")
        )
    if peer.state == "client":
        return row(("●", "success"), " ", (name, "b"), " joined, hosts nothing")
    if peer.state in ("fetching", "loading"):
        share = f" {peer.fetched:.0%}".replace("%", " %") if peer.fetched is not None else ""
        return row(("◐", "primary"), " ", (name, "b"), f" loading{span}{share}")
    words = {"joining": "is choosing blocks", "": "joined"}.get(peer.state, one_line(peer.state))
    return row(("◐", "warning"), " ", (name, "b"), f" {words}")


def invite_words(answer: Mapping[str, Any], now_ms: int) -> str:
    """Who can join with an invite, from where and until when, from the node's answer."""
    words = _limit_words(answer, now_ms)
    if answer.get("only_here"):
        words += " Only nodes on this machine can use it, as it has loopback addresses alone: check the setting listen."
    return words


def _limit_words(answer: Mapping[str, Any], now_ms: int) -> str:
    limits = answer.get("limits")
    if limits is not None:
        who = "One node" if limits["uses"] == 1 else f"{limits['uses']} nodes"
        left = duration((limits["expires_at_ms"] - now_ms) / 1000)
        approval = " You are asked first." if limits["approve"] else ""
        return f"{who} can join with it, within {left}, while this node is online.{approval}"
    if answer.get("private"):
        return "Whoever has this line has the swarm's secret, for good; it cannot be limited or taken back."
    return "Send this line to whoever should join."


def request_row(guest: GuestView) -> Row:
    """A peer that waits for approval."""
    return row(("?", "warning"), " ", (peer_words_with_id(guest.peer, guest.name), "b"), " asks to join")


def nobody_new(known: Snapshot) -> str:
    """Words for a list without arrivals; it is empty each time the dialog is opened, whoever joined before."""
    others = sum(peer.state not in ("dead", "left") for peer in known.peers)
    now = f"{plural(others, 'other member')} now" if others else "No other member yet"
    return f"{now}. New ones appear here."


class GuestPanel(RowWidget):
    """Shows the peers that ask to join, and those that arrived since the invite was opened."""

    guests: GuestList | None = None
    opened_ms = 0

    def rows(self, width: int, height: int) -> list[Row]:
        """One row for each arrived peer, or the last one that was turned away; then those that ask to join."""
        known = self.store.snapshot
        if known is None:
            return [row(("the node is away", "dim"))]
        if self.guests is None:
            self.guests = GuestList(known)
        self.guests.look(known)
        rows = self.guests.rows(known)
        if not rows:  # whoever joined may have knocked just before, without the secret: mDNS shows it this node
            knocks = [note for note in self.store.notes if note.kind == "knock" and note.at_ms >= self.opened_ms]
            rows = [row(("·", "dim"), f" {one_line(note.text)}") for note in knocks[-1:]]
        rows += [request_row(guest) for guest in known.requests]
        return (rows or [row((nobody_new(known), "dim"))])[-height:]


def _is_unused(client: Client, identifier: str) -> bool:
    """True if an invite to the active swarm can still be used, and nobody has come with it."""
    invites = client.get("/control/invites")
    return any(
        one["id"] == identifier and one["state"] == "open" and not one["admitted"] and not one["waiting"]
        for one in invites
    )


class InviteScreen(Dialog[None]):
    """Dialog with the invite, its QR code and the peers that arrive."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,i", "close", "close"),
        Binding("y", "copy", "copy"),
        Binding("a", "decide(True)", "let in"),
        Binding("x", "decide(False)", "refuse"),
        Binding("o", "ask_first", "ask me first"),
    ]

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.line = ""
        self._limits: Mapping[str, Any] | None = None  # of the invite that is shown

    def compose(self) -> ComposeResult:
        """Invite, QR code, arrived peers and keys."""
        with VerticalScroll(classes="dialog", id="invite-box") as box:
            box.border_title = "invite"
            yield Static("Asking the node…", id="invite-line")
            yield Static("", id="invite-code")
            yield GuestPanel(self.store, id="came")
            yield Static(self._keys(), id="invite-keys")

    def on_mount(self) -> None:
        """Ask the node for an invite."""
        self.query_one(GuestPanel).opened_ms = now_ms()
        dashboard, here = cast(NodeApp, self.app), self._addresses()

        def work(client: Client) -> Any:
            kept = dashboard.invite
            if kept is not None and kept[0] == here and _is_unused(client, kept[1]["limits"]["id"]):
                return kept[1]
            return client.post("/control/invite", {"name": None})

        dashboard.ask(work, self.take, self._failed)

    def _addresses(self) -> tuple[object, ...]:
        """What the addresses in an invite follow from."""
        known = self.store.snapshot
        return () if known is None else (known.listen_addrs, known.network.reach, known.network.mapping)

    def on_resize(self) -> None:
        """Show the QR code as soon as the window is large enough."""
        if self.line:
            self._show_code()

    def _keys(self) -> Content:
        keys = [("y", "copy"), ("esc", "close")]
        if self._limits is not None:
            keys.insert(1, ("o", "do not ask" if self._limits["approve"] else "ask me first"))
        known = self.store.snapshot
        if known is not None and known.requests:
            keys = [("a", "let in"), ("x", "refuse"), *keys]
        parts = [part for key, words in keys for part in ((key, "bold $mine"), f" {words}   ")]
        return Content.assemble(*parts).rstrip()

    def take(self, answer: Any) -> None:
        """Show the node's invite, with the QR code if the window is large enough."""
        self.line = one_line(str(answer["invite"]))
        self._limits = answer.get("limits")
        if self._limits is not None:
            cast(NodeApp, self.app).invite = (self._addresses(), answer)
        hint = invite_words(answer, now_ms())
        words = Content.assemble(
            (f"{one_line(str(answer['name']))}  ", "bold"), (hint, "$dim"), "\n\n", (self.line, "$mine")
        )
        self.query_one("#invite-keys", Static).update(self._keys())
        self.query_one("#invite-line", Static).update(words)
        self._show_code()

    def _show_code(self) -> None:
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
        """Redraw the arrived peers from the store."""
        for guests in self.query(GuestPanel):  # none while the app closes
            guests.show()
        for keys in self.query("#invite-keys").results(Static):
            keys.update(self._keys())

    def action_decide(self, approve: bool) -> None:
        """Let the first peer in that asks to join, or refuse it."""
        known, dashboard = self.store.snapshot, cast(NodeApp, self.app)
        if known is None or not known.requests:
            return
        guest = known.requests[0]
        who, path = peer_words_with_id(guest.peer, guest.name), "approve" if approve else "refuse"
        done = f"{who} may join now" if approve else f"{who} is refused"
        dashboard.ask(
            lambda client: client.post(f"/control/invites/{path}", {"peer": guest.peer}), lambda _: dashboard.say(done)
        )

    def action_ask_first(self) -> None:
        """Replace the invite by one whose guests wait for approval, or by one whose guests do not."""
        limits = self._limits
        if limits is None:
            return
        dashboard, body = cast(NodeApp, self.app), {"name": None, "approve": not limits["approve"]}

        def replace(client: Client) -> Any:
            client.post("/control/invites/cancel", {"id": limits["id"]})
            return client.post("/control/invite", body)

        dashboard.ask(replace, self.take, self._failed)

    def action_copy(self) -> None:
        """Copy the invite to the terminal's clipboard."""
        if self.line:
            cast(NodeApp, self.app).copy(self.line, "the invite", "`shoal invite` prints one")

    def action_close(self) -> None:
        """Close the dialog."""
        self.close()
