"""The swarm tab: coverage, the table of peers, and the route of the latest reply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, cast

from rich.style import Style
from textual import events, on
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from app.snapshot.views import PeerView
from ui.draw.coverage import MARGIN, legend, strip_rows, weak_sentence
from ui.draw.numbers import count, rate
from ui.draw.peers import (
    SORTS,
    TableLook,
    arranged,
    columns_for,
    header_row,
    look_of,
    peer_facts,
    peer_row,
    table_peers,
)
from ui.draw.route import route_rows, title_row
from ui.draw.rows import Row, beside, fit, row
from ui.draw.theme import style_of
from ui.node_app import NodeApp
from ui.screens.frame import MainScreen
from ui.screens.overview import CoveragePanel
from ui.state.store import Store
from ui.widgets.filter_field import FilterField
from ui.widgets.panel import Panel, changed_lines, strip_of, title_of


class TallCoverage(CoveragePanel):
    """The coverage panel with highest and mean figures and a sentence about the weak stretch."""

    def subtitle(self) -> Row:
        """Total number of block copies in the swarm."""
        cover = self.store.cover()
        return row(f"{count(sum(cover.holders))} copies of blocks") if cover is not None else []

    def rows(self, width: int, height: int) -> list[Row]:
        """The strip, as tall as the panel allows, and the sentence."""
        cover = self.store.cover()
        if cover is None:
            return super().rows(width, height)
        narrow = width < 90
        tall = max(1, height - 4)
        rows = strip_rows(cover, width, tall, gutter=not narrow, margin=0 if narrow else MARGIN)
        if height < 5:
            return rows[-height:]
        best = max(range(len(cover.holders)), key=lambda block: cover.tokens_per_s[block])
        mean = sum(cover.holders) / len(cover.holders)
        notes = [
            [],
            legend(),
            row(("most ", "dim"), f"{rate(cover.tokens_per_s[best] or None)} tok/s, block {best}"),
            row(("mean ", "dim"), f"{mean:.1f} holders"),
        ]
        return [*(beside(rows, notes, width) if not narrow else rows), weak_sentence(cover, width)][:height]


class PeersTable(ScrollView, can_focus=True):
    """The table of members; only visible rows are painted, so that hundreds of peers cost little."""

    DEFAULT_CLASSES = "panel"
    HELP = (
        "Every member as this node sees it. The line shows where its span lies in the model; rtt is measured from "
        "here, tok/s is reported by the peer."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/", priority=True),  # what is typed after it is no command
        Binding("s", "sort", "sort"),
        Binding("enter", "details", "details", show=False),
        Binding("y", "copy_id", "copy id", show=False),
        Binding("b", "ban", "ban", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move(-20)", show=False),
        Binding("pagedown", "move(20)", show=False),
        Binding("home", "move(-100000)", show=False),
        Binding("end", "move(100000)", show=False),
    ]

    def __init__(self, store: Store, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.store = store
        self.sort = SORTS[0]
        self.wanted = ""
        self._peers: list[PeerView] = []
        self.cursor = 0
        self._marked = ""
        self._look: TableLook | None = None
        self._base = Style()
        self._titles: object = None
        self._columns = columns_for(0, [])
        self._drawn: tuple[object, Sequence[object]] = (None, [])  # what affects all rows, and the visible rows

    def show(self) -> None:
        """Redraw from the store; the cursor stays on its peer."""
        self._base = self.rich_style  # costly to compute, and the same for every row
        known = self.store.snapshot
        peers = arranged(table_peers(known, self.store.glowing()), self.sort, self.wanted)
        self._look = None if known is None else look_of(known, self.store.cover())
        self._columns = columns_for(self.size.width, [peer.name for peer in peers])
        if len(peers) != len(self._peers):
            self.virtual_size = Size(0, len(peers) + 1)
        self._peers = peers
        at = next((i for i, peer in enumerate(peers) if peer.peer == self._marked), None)
        self.cursor = at if at is not None else max(0, min(self.cursor, len(peers) - 1))
        self._marked = peers[self.cursor].peer if peers else ""
        self._show_titles(len(known.peers) if known is not None else None)
        self._refresh_changed()

    def _refresh_changed(self) -> None:
        """Repaint the changed rows, or all rows if something changed that affects every row."""
        top, (width, height) = round(self.scroll_y), self.size
        whole = (top, self.size, self._columns, self._look, self._base, self.app.theme)
        seen = self._peers[top : top + height - 1]
        rows = [None, *((peer, self.store.changes.get(peer.peer), peer.peer == self._marked) for peer in seen)]
        before, self._drawn = self._drawn, (whole, rows)
        if before[0] != whole or not seen:
            self.refresh()
        elif changed := changed_lines(before[1], rows, width):
            self.refresh(*changed)

    def _show_titles(self, members: int | None) -> None:
        titles = (members, len(self._peers), self.sort, self.wanted, self.app.theme)
        if titles == self._titles:
            return
        self._titles = titles
        shown = count(members) if not self.wanted else f"{len(self._peers)} of {count(members)}"
        self.border_title = title_of(self.app.theme, row("peers  ", (shown, "b")))
        tail = row(f"by {self.sort} ▴ · ", (f"“{self.wanted}”", "mine") if self.wanted else "/ filter")
        self.border_subtitle = title_of(self.app.theme, tail)

    @property
    def chosen(self) -> PeerView | None:
        """The peer under the cursor."""
        return self._peers[self.cursor] if self._peers else None

    def on_resize(self) -> None:
        """Choose the columns for the new width."""
        self.show()

    def on_mount(self) -> None:
        """Redraw whenever the theme changes."""
        self.watch(self.app, "theme", self.show, init=False)

    def render_line(self, y: int) -> Strip:
        """Paint the header, which does not scroll, or the row of one peer."""
        width, theme = self.size.width, self.app.theme
        if y == 0:
            blocks = self._look.blocks if self._look is not None else None
            line = header_row(columns_for(width, []) if not self._peers else self._columns, blocks)
            return strip_of(theme, line, width, self._base)
        index = y - 1 + round(self.scroll_y)
        if self._look is None or not 0 <= index < len(self._peers):
            text = self._nothing() if y == 1 and not self._peers else ""
            return strip_of(theme, row((text, "dim")), width, self._base)
        peer = self._peers[index]
        line = peer_row(peer, self._columns, self._look, self.store.changes.get(peer.peer))
        marked = index == self.cursor and self.has_focus
        return strip_of(theme, line, width, self._base + style_of(theme, "on cursor") if marked else self._base)

    def _nothing(self) -> str:
        if self.store.snapshot is None:
            return "—"
        return "No peer matches: esc in the filter shows all." if self.wanted else "No other members are known yet."

    def action_move(self, rows: int) -> None:
        """Move the cursor and scroll to it."""
        if not self._peers:
            return
        self.cursor = max(0, min(len(self._peers) - 1, self.cursor + rows))
        self._marked = self._peers[self.cursor].peer
        height = max(1, self.size.height - 1)
        top = round(self.scroll_y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False, immediate=True)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False, immediate=True)
        self._refresh_changed()

    def on_click(self, event: events.Click) -> None:
        """Sort by the next column on a click on the header; move the cursor on a click on a row."""
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if offset.y == 0:
            self.action_sort()
        else:
            self.action_move(offset.y - 1 + round(self.scroll_y) - self.cursor)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True unless the key would sort while no peers are known (it starts the node then), or ban in a recording."""
        if action == "ban":
            return not self.store.marker
        return self.store.snapshot is not None if action == "sort" else True

    def action_sort(self) -> None:
        """Sort by the next column."""
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.show()

    def action_filter(self) -> None:
        """Open the filter field."""
        self.screen.query_one(FilterField).open()

    def action_copy_id(self) -> None:
        """Copy the peer's id to the terminal's clipboard."""
        if self.chosen is not None:
            cast(NodeApp, self.app).copy(self.chosen.peer, "the peer's id", "`shoal peers` prints it")

    def action_details(self) -> None:
        """Show everything known about the peer under the cursor."""
        from ui.widgets.dialogs import Facts

        if self.chosen is not None:
            self.app.push_screen(Facts("peer", peer_facts(self.chosen), copied=self.chosen.peer))

    def action_ban(self) -> None:
        """Ban the peer under the cursor, after confirmation."""
        screen = self.screen
        if self.chosen is not None and isinstance(screen, Swarm) and self.chosen.link != "you":
            from ui.screens.bans import offer_ban

            offer_ban(screen.dashboard, self.chosen)


class RoutePanel(Panel):
    """The route of this node's latest reply."""

    HELP = "Milliseconds on the arrows are one way; solid is computing, hatched is a relay or waiting."

    def title(self) -> Row:
        """Hops, milliseconds per token, tokens per second."""
        return title_row(self.store.snapshot)

    def rows(self, width: int, height: int) -> list[Row]:
        """The hops, and the time of a token to scale."""
        if self.store.snapshot is None:
            return [row(("—", "dim"))]
        return [fit(line, width) for line in route_rows(self.store.snapshot.route, self.store.peer_name, width, height)]


class Swarm(MainScreen):
    """The screen of the swarm."""

    TAB = "swarm"
    HELP_TEXT = "s sorts the peers, / filters them, enter shows all that is known of one, y copies its id, b bans it."
    AUTO_FOCUS = "PeersTable"

    def body(self) -> Iterable[Widget]:
        """Coverage, peers, the filter field, route."""
        yield TallCoverage(self.store, id="covert")
        yield PeersTable(self.store, id="peers")
        yield FilterField(placeholder="filter by name, id, span, link, state or device", id="filter", compact=True)
        yield RoutePanel(self.store, id="route")

    def show(self) -> None:
        """Redraw every widget from the store."""
        super().show()
        for table in self.query(PeersTable):  # none while the app closes
            table.show()

    @on(Input.Changed, "#filter")
    def filter_changed(self, event: Input.Changed) -> None:
        """Filter while typing."""
        table = self.query_one(PeersTable)
        table.wanted = event.value
        table.show()

    @on(Input.Submitted, "#filter")
    def filter_done(self) -> None:
        """Keep the filter, and focus the table."""
        self.query_one(FilterField).close(self.query_one(PeersTable))

    def on_key(self, event: events.Key) -> None:
        """Clear the filter on escape in the table."""
        field, table = self.query_one(FilterField), self.query_one(PeersTable)
        if field.is_cleared_by(event, table):
            event.stop()
            field.value = ""
            field.close(table)
