"""The logs tab: the node's log and the dashboard's own, with a search and a lowest level."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, cast

from textual import events, on
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input

from app.core.terminal_text import one_line, with_names
from ui.draw.numbers import plural, time_of_day
from ui.draw.rows import Row, cut, row, tidy, width_of
from ui.node_app import NodeApp
from ui.screens.frame import MainScreen
from ui.state.store import LogRow, Store
from ui.widgets.filter_field import FilterField
from ui.widgets.following_list import FollowingList

LEVELS = ("debug", "info", "warning", "error")
_STYLES = {"warning": "warning", "error": "error", "critical": "error", "debug": "dim"}
_POLL_S = 1.0
_INDENT = 9  # of the further rows of an entry: under its level


def log_row(kept: LogRow, wanted: str = "") -> Row:
    """One row of the log, with the searched text highlighted."""
    style = _STYLES.get(kept.level, "")
    source = one_line(kept.source).removeprefix("shoal.")
    line = row(
        (time_of_day(kept.at_ms), "dim"), " ", (f"{kept.level:<7}", style or "dim"), " ", (f"{source}: ", "secondary")
    )
    text = one_line(kept.text)
    at = text.casefold().find(wanted.casefold()) if wanted else -1
    if at < 0:
        return [*line, (text, style)]
    end = at + len(wanted)
    return [*line, (text[:at], style), (text[at:end], "b background on mine"), (text[end:], style)]


def log_rows(kept: LogRow, width: int, wanted: str = "") -> list[Row]:
    """One entry of the log in rows of at most `width` cells, the further ones indented."""
    line = log_row(kept, wanted)
    rows: list[Row] = []
    indent: Row = [(" " * _INDENT, "")]
    while width_of(line) > width > 2 * _INDENT:
        head, line = cut(line, width)
        rows.append(head)
        line = [*indent, *line]
    return [*rows, line]


def matching(rows: Iterable[LogRow], level: str, wanted: str) -> list[LogRow]:
    """Rows of at least this level that contain the searched text, in any case."""
    least = LEVELS.index(level)
    wanted = wanted.casefold()
    return [
        kept
        for kept in rows
        if (LEVELS.index(kept.level) if kept.level in LEVELS else len(LEVELS)) >= least
        and (not wanted or wanted in f"{kept.source} {kept.text}".casefold())
    ]


class LogList(FollowingList):
    """The list of log rows."""

    HELP = "What the node and this dashboard wrote, the newest last. Scroll up to stop following, end follows again."
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "find", key_display="/", priority=True),  # what is typed after it is no command
        Binding("l", "level", "level"),
        Binding("f", "follow", "follow", show=False),
        Binding("y", "copy", "copy", show=False),
    ]

    def __init__(self, store: Store, *, id: str | None = None) -> None:
        super().__init__(store, id=id)
        self.level = "info"
        self.wanted = ""
        self._found = 0

    def key(self) -> object:
        """Number of rows, level, search and width: the list is rebuilt when one of them changes."""
        return (self.store.logs_seen, self.level, self.wanted, self._room)

    def lines(self) -> list[Row]:
        """The rows that match, or a line that says that none do."""
        found = matching(self.store.logs, self.level, self.wanted)
        self._found = len(found)
        if not found:
            return [row(("Nothing of this level yet." if not self.wanted else "Nothing matches.", "dim"))]
        named = (replace(kept, text=tidy(with_names(kept.text, self.store.peer_name))) for kept in found)
        return [line for kept in named for line in log_rows(kept, self._room, self.wanted)]

    @property
    def _room(self) -> int:
        """Cells of a row beside the scrollbar."""
        return self.scrollable_content_region.width

    def title(self) -> Row:
        """Number of rows, and the lowest level shown."""
        return row("log  ", (plural(self._found, "row"), "b"), f" · {self.level} and above")

    def subtitle(self) -> Row:
        """Number of new rows while scrolled up, else a note that the list follows its end."""
        return super().subtitle() or row("following" if self.following else "", (" · / search", "dim"))

    def action_search(self) -> None:
        """Open the search field."""
        self.screen.query_one(FilterField).open()

    def action_level(self) -> None:
        """Raise the lowest level shown; after the highest, start at the lowest again."""
        self.level = LEVELS[(LEVELS.index(self.level) + 1) % len(LEVELS)]
        self.following = True
        self.show()

    def action_follow(self) -> None:
        """Go to the end and follow it."""
        self.following = True
        self.show()

    def action_copy(self) -> None:
        """Copy the last 500 of the shown rows to the terminal's clipboard."""
        from ui.draw.rows import text_of

        rows = "\n".join(text_of(line) for line in self._lines[-500:])
        cast(NodeApp, self.app).copy(rows, "the last rows", "`shoal logs` prints them")


class Logs(MainScreen):
    """The screen of the logs; polls the node for new rows while it is shown."""

    TAB = "logs"
    AUTO_FOCUS = "LogList"
    HELP_TEXT = "/ searches, l changes the level, f follows the end, y copies."

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._after, self._pid = 0, 0
        self._asking = False
        self._last_error = ""  # shown once, not at every poll

    def body(self) -> Iterable[Widget]:
        """The rows and the search field."""
        yield LogList(self.store, id="log")
        yield FilterField(placeholder="search", id="search", compact=True)

    def on_mount(self) -> None:
        """Poll for rows every second."""
        self.set_interval(_POLL_S, self._poll)
        self._poll()

    def _poll(self) -> None:
        if self._asking or not self.is_current or self.dashboard.door is None or self.store.link.kind != "live":
            return
        self._asking = True
        self.dashboard.ask(lambda client: client.get(f"/control/logs?after={self._after}"), self._take, self._failed)

    def _take(self, answer: Any) -> None:
        self._asking = False
        if answer["pid"] != self._pid:
            again = self._pid != 0 and self._after > 0
            self._pid, self._after = answer["pid"], 0
            if again:
                return  # another run of the node, whose rows are numbered from 1: the next poll gets all of them
        for kept in answer["rows"]:
            self._after = max(self._after, int(kept["number"]))
            level, source = str(kept["level"]), str(kept["source"])
            self.store.log(LogRow(int(kept["at_ms"]), level, source, str(kept["text"])))
        if answer["rows"]:
            self.query_one(LogList).show()

    def _failed(self, text: str) -> None:
        self._asking = False
        if text != self._last_error:
            self._last_error = text
            self.dashboard.complain(text)

    @on(Input.Changed, "#search")
    def search_changed(self, event: Input.Changed) -> None:
        """Search while typing."""
        rows = self.query_one(LogList)
        rows.wanted = event.value
        rows.show()

    @on(Input.Submitted, "#search")
    def search_done(self) -> None:
        """Keep the search, and focus the rows."""
        self.query_one(FilterField).close(self.query_one(LogList))

    def on_key(self, event: events.Key) -> None:
        """Clear the search on escape in the rows."""
        field, rows = self.query_one(FilterField), self.query_one(LogList)
        if field.is_cleared_by(event, rows):
            event.stop()
            field.value = ""
            field.close(rows)
