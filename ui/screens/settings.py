"""The settings tab: every setting of the node with its value, origin and help.

The node checks what is typed; its error is shown under the setting's help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import events, on
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from app.core.terminal_text import one_line
from ui.draw.rows import Row, cell, row, shorten, wrap
from ui.draw.theme import style_of
from ui.screens.frame import MainScreen
from ui.state.store import Store
from ui.widgets.filter_field import FilterField
from ui.widgets.panel import Panel, strip_of, title_of
from ui.widgets.text_field import TextField

_NAME = 20


@dataclass(frozen=True)
class SettingView:
    """One setting, as `/control/config` describes it."""

    name: str
    value: Any
    default: Any
    origin: str
    live: bool
    help: str
    expected: str


def settings_in(answer: Any) -> list[SettingView]:
    """Settings in an answer of `/control/config`."""
    return [
        SettingView(
            str(entry["name"]),
            entry.get("value"),
            entry.get("default"),
            str(entry.get("origin", "")),
            bool(entry.get("live")),
            str(entry.get("help", "")),
            str(entry.get("expected", "")),
        )
        for entry in answer
        if isinstance(entry, Mapping) and "name" in entry
    ]


def value_text(setting: SettingView, value: Any) -> str:
    """A value in the form in which the user types it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value)
    if isinstance(value, int) and "size" in setting.expected:
        return _size_text(value)
    return str(value)


def _size_text(value: int) -> str:
    """Bytes in the largest unit that gives them exactly with one decimal at most."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= factor and value % (factor // 10) == 0:
            return f"{value / factor:g}{unit}"
    return str(value)


def setting_row(setting: SettingView, width: int) -> Row:
    """Row of one setting: name, value, origin, and `restart` if a change needs one."""
    changed = setting.origin != "default"
    shown = value_text(setting, setting.value) or "not set"
    value = cell(one_line(shown), max(8, min(44, width - _NAME - 24)))
    note = setting.origin if changed else ""
    later = "" if setting.live else "restart"
    style = "mine" if changed else "dim" if shown == "not set" else ""
    return row(
        (cell(setting.name, _NAME), "b"), " ", (value, style), " ", (cell(note, 12), "secondary"), (later, "dim")
    )


class SettingsList(ScrollView, can_focus=True):
    """The list of settings."""

    DEFAULT_CLASSES = "panel"
    HELP = "Those marked `restart` apply after a node restart. After a search, esc shows all again."
    BINDINGS: ClassVar[list[BindingType]] = [
        # With priority: what is typed into the opened field must not be a command to the node.
        Binding("enter", "change", "edit", priority=True),
        Binding("x", "unset", "unset"),
        Binding("slash", "filter", "find", key_display="/", priority=True),
        Binding("r", "reload", "reload", show=False),
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("home", "move(-1000)", show=False),
        Binding("end", "move(1000)", show=False),
    ]

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.known: list[SettingView] = []  # all of them
        self.wanted = ""  # typed into the filter
        self.problem = ""
        self.from_file = False  # no node runs: they apply at its next start
        self.cursor = 0

    @property
    def settings(self) -> list[SettingView]:
        """The settings that match the filter."""
        wanted = self.wanted.casefold()
        return [setting for setting in self.known if wanted in f"{setting.name} {setting.help}".casefold()]

    @property
    def chosen(self) -> SettingView | None:
        """The setting under the cursor."""
        found = self.settings
        return found[self.cursor] if found else None

    def show(self) -> None:
        """Redraw title and rows."""
        found = self.settings
        self.cursor = max(0, min(self.cursor, len(found) - 1))
        self.virtual_size = Size(0, len(found))
        changed = sum(setting.origin != "default" for setting in self.known)
        amount = f"{len(found)} of {len(self.known)}" if self.wanted else f"{len(self.known)}"
        figures = f"{amount} · {changed} changed" if self.known else "—"
        where = " · from the file, for the next start" if self.from_file and self.known else ""
        self.border_title = title_of(self.app.theme, row("settings  ", (figures, "b"), where))
        self.refresh()

    def on_mount(self) -> None:
        """Redraw whenever the theme changes."""
        self.watch(self.app, "theme", self.show, init=False)

    def render_line(self, y: int) -> Strip:
        """Paint the row of one setting, or the reason why there are none."""
        index = y + round(self.scroll_y)
        theme, width, found = self.app.theme, self.size.width, self.settings
        if not 0 <= index < len(found):
            text = self._empty_words() if index == 0 and not found else ""
            return strip_of(theme, row((text, "dim")), width, self.rich_style)
        base = self.rich_style + style_of(theme, "on cursor") if index == self.cursor else self.rich_style
        return strip_of(theme, setting_row(found[index], width), width, base)

    def _empty_words(self) -> str:
        if self.known:
            return "No setting matches: esc shows all."
        return self.problem or "Asking the node…"

    def action_move(self, rows: int) -> None:
        """Move the cursor, scroll to it and show the setting's help."""
        if found := self.settings:
            self.cursor = max(0, min(len(found) - 1, self.cursor + rows))
            top, height = round(self.scroll_y), max(1, self.size.height)
            if not top <= self.cursor < top + height:
                self.scroll_to(y=max(0, self.cursor - height // 2), animate=False, immediate=True)
            self.refresh()
            self.screen.query_one(SettingHelp).show()

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked setting."""
        offset = event.get_content_offset(self)
        if offset is not None:
            self.action_move(offset.y + round(self.scroll_y) - self.cursor)

    def action_change(self) -> None:
        """Open the field with the setting's value."""
        field = self.screen.query_one("#value", Input)
        if self.chosen is not None:
            field.value = value_text(self.chosen, self.chosen.value)
            field.placeholder = self.chosen.expected
            self.screen.set_focus(field.add_class("-open"))

    def action_filter(self) -> None:
        """Open the filter field."""
        self.screen.query_one(FilterField).open()

    def action_unset(self) -> None:
        """Reset the setting to its default."""
        if self.chosen is not None and isinstance(self.screen, SettingsScreen):
            self.screen.write(self.chosen.name, None)

    def action_reload(self) -> None:
        """Load the settings again."""
        if isinstance(self.screen, SettingsScreen):
            self.screen.load()


class ValueField(TextField):
    """The field for a new value; its keys are in the footer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "save", key_display="⏎"),
        Binding("escape", "screen.give_up", "back", key_display="esc"),
    ]


class SettingHelp(Panel):
    """Help for the setting under the cursor."""

    can_focus = False
    problem = ""

    def title(self) -> Row:
        """The setting's name."""
        chosen = self.screen.query_one(SettingsList).chosen
        return row(chosen.name if chosen is not None else "")

    def rows(self, width: int, height: int) -> list[Row]:
        """Help, expected values, default and when a change applies; the node's last error takes their place."""
        chosen = self.screen.query_one(SettingsList).chosen
        if chosen is None:
            return []
        default = value_text(chosen, chosen.default) or "not set"
        away = self.store.link.kind != "live"
        when = "at the node's next start" if away else "at once" if chosen.live else "after a restart"
        rows = wrap(one_line(chosen.help), width)
        rows += [row(("expects ", "dim"), shorten(one_line(chosen.expected), width - 8))]
        rows += [
            row(("default: ", "dim"), shorten(one_line(default), max(4, width - 36)), (f" · applies {when}", "dim"))
        ]
        problem = wrap(one_line(self.problem), width, "error") if self.problem else []
        return [*rows[: max(0, height - len(problem))], *problem][:height]


class SettingsScreen(MainScreen):
    """The screen of the settings."""

    TAB = "settings"
    AUTO_FOCUS = "SettingsList"
    HELP_TEXT = "⏎ changes a setting, x resets it to its default, / finds one by its name or help, r loads all again."

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._wanted = ""  # to be edited once the settings have arrived
        self._loaded_for = ""  # connection, process and latest change that the settings are of

    def body(self) -> Iterable[Widget]:
        """The list, the filter field, the field for a new value, and the help."""
        yield SettingsList(id="settings")
        yield FilterField(placeholder="find by name or help", id="filter", compact=True)
        yield ValueField(id="value", compact=True)
        yield SettingHelp(self.store, id="setting-help")

    def on_mount(self) -> None:
        """Load the settings."""
        self.load()

    def show(self) -> None:
        """Redraw from the store; load the settings again if one was changed, or the node was restarted or has ended."""
        super().show()
        known = self.store.snapshot
        if known is not None:
            changes = [(event.at_ms, event.number) for event in self.store.notes if event.kind == "setting"]
            key = f"{known.pid} {max(changes, default=None)}"
        else:
            key = "file" if self.store.link.kind == "away" else self._loaded_for
        if key != self._loaded_for:
            self._loaded_for = key
            self.load()

    def edit(self, name: str) -> None:
        """Open the field of a setting, once the settings have arrived."""
        listed = self.query_one(SettingsList)
        self._wanted = "" if listed.known else name
        self._find("")
        self.query_one(FilterField).remove_class("-open")
        at = next((index for index, setting in enumerate(listed.settings) if setting.name == name), None)
        if at is not None:
            listed.action_move(at - listed.cursor)
            listed.action_change()

    def load(self) -> None:
        """Ask the node for its settings; while it is away, read its file."""
        if self.dashboard.door is not None:
            self.dashboard.ask_settings(None, self.take, self._failed)

    def take(self, answer: Any) -> None:
        """Show the settings in the node's answer."""
        listed = self.query_one(SettingsList)
        listed.known, listed.problem = settings_in(answer), ""
        listed.from_file = self.store.link.kind != "live"
        listed.show()
        self.query_one(SettingHelp).show()
        if self._wanted:
            self.edit(self._wanted)

    def _failed(self, text: str) -> None:
        listed = self.query_one(SettingsList)
        listed.known, listed.problem = [], text
        listed.show()

    @on(Input.Submitted, "#value")
    def submitted(self, event: Input.Submitted) -> None:
        """Send the typed value to the node, which checks it; a value that was not changed is not sent."""
        chosen = self.query_one(SettingsList).chosen
        if chosen is not None and event.value == value_text(chosen, chosen.value):
            self.action_give_up()
        elif chosen is not None:
            self.write(chosen.name, event.value)

    @on(Input.Changed, "#filter")
    def filter_changed(self, event: Input.Changed) -> None:
        """Filter while typing."""
        self._find(event.value)

    @on(Input.Submitted, "#filter")
    def filter_done(self) -> None:
        """Keep the filter, and focus the list."""
        self.query_one(FilterField).close(self.query_one(SettingsList))

    def on_key(self, event: events.Key) -> None:
        """Clear the filter on escape in the list."""
        field, listed = self.query_one(FilterField), self.query_one(SettingsList)
        if field.is_cleared_by(event, listed):
            event.stop()
            self._find("")
            field.close(listed)

    def _find(self, wanted: str) -> None:
        """List the settings whose name or help contains a text."""
        field, listed = self.query_one(FilterField), self.query_one(SettingsList)
        with field.prevent(Input.Changed):
            field.value = wanted
        listed.wanted = wanted
        listed.show()
        self.query_one(SettingHelp).show()

    def write(self, name: str, value: str | None) -> None:
        """Change a setting; None resets it to its default."""
        listed = self.query_one(SettingsList)
        before = next((value_text(known, known.value) for known in listed.known if known.name == name), "")

        def written(answer: Any) -> None:
            self._show_problem("")
            self._close()
            was = f"; it was {one_line(before)}" if before else ""
            self.dashboard.say(f"{name} is back at its default{was}" if value is None else f"{name} is set")
            self.take(answer)

        self.dashboard.ask_settings((name, value), written, self._show_problem)

    def _show_problem(self, text: str) -> None:
        shown = self.query_one(SettingHelp)
        shown.problem = text
        shown.show()

    def action_give_up(self) -> None:
        """Close the field without a change."""
        self._show_problem("")
        self._close()

    def _close(self) -> None:
        self.query_one("#value", Input).remove_class("-open")
        self.query_one(SettingsList).focus()
