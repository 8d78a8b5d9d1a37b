"""The dashboard app: one screen for each tab, and one store that receives the node's events.

Screens are built when they are first shown. Events arrive through `ui.state.follower`; requests to the node run in
threads (`ui.node_app`); what the keys do is in `ui.actions`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget

from app.core.errors import AppError
from app.snapshot.codec import snapshot_from
from app.snapshot.views import Snapshot
from ui import actions
from ui.draw.theme import NIGHT, THEMES
from ui.node_app import NodeApp
from ui.screens.frame import TABS, MainScreen
from ui.screens.registry import make_screen
from ui.state.follower import NOT_OURS, EventNote, Follower, Heard, NodeConnector, RawSnapshot
from ui.state.store import ConnectionState, LogRow, Store
from ui.terminal import TerminalWatch, on_end_signal

APART_S = 0.2  # least time between two repaints of a store that changes quickly


def keeps_running() -> str:
    """What the terminal says after the dashboard has closed, with a command that its shell finds."""
    shoal = Path(sys.executable).with_name("shoal")
    if shutil.which("shoal") or not shoal.exists():
        shoal = Path("shoal")
    elif shoal.is_relative_to(Path.cwd()):
        shoal = shoal.relative_to(Path.cwd())
    return f"The node keeps running: `{shoal} stop` ends it, `{shoal}` shows it again."


class NodeMessage(Message):
    """The follower's thread received something from the node: a snapshot, an event, or a changed connection."""

    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self.heard = heard


class Dashboard(NodeApp):
    """The Textual app: its modes are the tabs, its bindings the keys that work on every screen."""

    TITLE = "shoal"
    tabs: ClassVar[tuple[str, ...]] = TABS
    CSS_PATH = Path(__file__).with_name("dashboard.tcss")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (150, "-wide")]  # noqa: RUF012 (as in the base)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-medium"), (44, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        # With priority: what is typed after the chat's digit must not be a command to the node on the old tab.
        *(Binding(str(at), f"go('{name}')", name, show=False, priority=True) for at, name in enumerate(TABS, 1)),
        Binding("f5,s", "start_node", "start again", key_display="F5"),  # s where letters are not text
        Binding("p", "pause", "pause"),
        Binding("p", "resume", "resume"),
        Binding("d", "drain", "drain", show=False),
        Binding("i", "invite", "invite"),
        Binding("j", "join", "join"),
        Binding("c", "create", "create"),
        Binding("g", "switch", "swarms", show=False),
        Binding("plus,equals_sign", "cap(1)", "cap", key_display="+/-"),
        Binding("minus", "cap(-1)", "cap", show=False),
        Binding("w", "why", "why"),
        Binding("z", "zoom", "zoom"),
        # With priority: the key typed after it chooses a panel or a tab, and is neither text nor a command.
        Binding("ctrl+o", "jump", "jump", key_display="^o", priority=True),
        Binding("ctrl+t", "next_theme", "theme", show=False),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("f1", "help", "help", show=False),
        Binding("q", "leave", "quit"),
    ]

    def __init__(self, door: NodeConnector | None, *, store: Store | None = None, folder: Path | None = None) -> None:
        super().__init__(door, store or Store(), folder)
        self._follower = None if door is None else Follower(door, self._post)
        self._shown_at = float("-inf")
        self._show_pending = False
        self._latest: RawSnapshot | None = None
        self._footer_state: tuple[str, str | None] = ("", None)  # connection and node state it was made for
        self._is_leaving = False
        self.asked_first_run = False
        self.first_tab = "overview"
        self._modes = {name: partial(make_screen, name, self.store) for name in self.tabs}
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = self._kept_theme = actions.kept_theme(folder)

    def _post(self, heard: Heard) -> None:
        self.post_message(NodeMessage(heard))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Colours for the variables that only our own themes define, for use with Textual's themes."""
        return dict(NIGHT.variables)

    # --- start and end -----------------------------------------------------------------------------------------------

    async def on_mount(self) -> None:
        """Show the overview at once, then connect: starting a node can take seconds."""
        self.begin_capture_print(self)
        self._terminal = TerminalWatch()
        on_end_signal(self.action_leave)
        await self.switch_mode(self.first_tab)
        self.set_interval(1.0, self._tick)
        if self._follower is not None:
            self._follower.start()

    def on_unmount(self) -> None:
        """Close the connection; the node keeps running."""
        if self._follower is not None:
            self._follower.close()

    def _tick(self) -> None:
        if self._terminal.is_gone:
            self.action_leave()
        self.store.sample()
        self.show_soon()

    def on_print(self, event: events.Print) -> None:
        """Turn a stray print into a row of the log, so that it does not garble the screen."""
        from ui.draw.node import now_ms

        level = "warning" if event.stderr else "info"
        for line in event.text.splitlines():
            if line.strip():
                self.store.log(LogRow(now_ms(), level, "dashboard", line))
        self.show_soon()

    # --- messages from the node --------------------------------------------------------------------------------------

    def on_node_message(self, message: NodeMessage) -> None:
        """Store what the node sent and repaint soon; a changed connection is shown at once."""
        message.stop()
        match message.heard:
            case ConnectionState() as link:
                self._latest = None
                self.store.connected(link)
                if link.kind == "live":
                    self.ask_settings(None, self._settings_listed, lambda text: None)
                self.show_now()  # at once and completely: no figure of a lost node may stay on the screen
                return
            case RawSnapshot() as raw:
                self._latest = raw
            case EventNote() as note:
                self.store.note(note.data)
        self.show_soon()

    def _settings_listed(self, answer: Any) -> None:
        self.store.settings = tuple((str(entry["name"]), str(entry.get("help", ""))) for entry in answer)

    def show_soon(self) -> None:
        """Schedule a repaint, so that two of them are at least `APART_S` apart."""
        if self._show_pending:
            return
        left_s = self._shown_at + APART_S - self.store.now()
        self._show_pending = True
        if left_s > 0:
            self.set_timer(left_s, self.show_now)
        else:
            self.call_later(self.show_now)

    def show_now(self) -> None:
        """Parse the latest snapshot and let every screen on the stack repaint from the store."""
        self._show_pending = False
        self._shown_at = self.store.now()
        if self._latest is not None:
            raw, self._latest = self._latest, None
            self._take(raw)
        if not self.screen_stack:
            return  # before the first screen or after the last
        if self.store.snapshot is not None:
            self._offer_first_run(self.store.snapshot)
        for screen in self.screen_stack:
            show = getattr(screen, "show", None)
            if show is not None and screen.is_mounted:
                show()
        state = self.store.snapshot.state if self.store.snapshot is not None else None
        if (self.store.link.kind, state) != self._footer_state:  # rebuilding the footer is costly
            self._footer_state = (self.store.link.kind, state)
            self.refresh_bindings()

    def _take(self, raw: RawSnapshot) -> None:
        try:
            snapshot = snapshot_from(json.loads(raw.text))
        except (ValueError, TypeError):
            self.store.connected(ConnectionState("away", NOT_OURS))
        else:
            self.store.take(snapshot)

    def _offer_first_run(self, snapshot: Snapshot) -> None:
        if self.asked_first_run or snapshot.state != "idle":
            return
        self.asked_first_run = True
        from ui.screens.first_run import FirstRun

        self.push_screen(FirstRun(self.store))

    async def say_hello(self, question: str) -> None:
        """Switch to the chat and send a question."""
        from ui.widgets.ask_box import AskBox

        await self.action_go("chat")
        self.screen.query_one(AskBox).post_message(AskBox.Asked(question))

    # --- keys --------------------------------------------------------------------------------------------------------

    async def on_event(self, event: events.Event) -> None:
        """Let the tab see a key before the widget that has the focus; drop keys that come after the one that leaves."""
        if isinstance(event, events.Key) and self._is_leaving:
            return
        if isinstance(event, events.Key) and not event.is_forwarded and self.screen_stack:
            if isinstance(self.screen, MainScreen):
                self.screen.before_key(event)
        await super().on_event(event)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True if the action works now; the footer shows only such keys."""
        if action == "go" and parameters and parameters[0] not in self.tabs:
            return False  # a recording has fewer tabs
        tab = self.screen_stack[0] if self.screen_stack else None
        if action in actions.LETTERS and isinstance(tab, MainScreen) and tab.TYPES:
            return False
        return actions.allowed(self, action)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Entries of the command palette for the current state."""
        return actions.commands(self)

    async def action_go(self, name: str) -> None:
        """Switch to the screen of a tab."""
        if name not in self.tabs:
            return
        if self.current_mode != name:
            await self.switch_mode(name)
        if isinstance(self.screen, MainScreen):
            self.screen.arrive()

    def action_pause(self) -> None:
        """Stop hosting until resumed."""
        actions.pause(self)

    def action_resume(self) -> None:
        """Host again."""
        actions.resume(self)

    def action_drain(self) -> None:
        """Let sessions finish, then stop hosting."""
        actions.drain(self)

    def action_join(self) -> None:
        """Join a swarm."""
        actions.join(self)

    def action_create(self) -> None:
        """Create a swarm."""
        actions.create(self)

    def action_switch(self) -> None:
        """Go to another of the saved swarms."""
        actions.switch(self)

    def action_why(self) -> None:
        """Show the reason for the node's state."""
        actions.why(self)

    def action_cap(self, steps: int) -> None:
        """Move the cap on the device's memory."""
        actions.cap(self, steps)

    def action_invite(self) -> None:
        """Open the invite dialog."""
        from ui.screens.invite import InviteScreen

        self.push_screen(InviteScreen(self.store))

    def action_start_node(self) -> None:
        """Start a node if none runs, and connect without waiting for the next retry."""
        if self.door is None or self._follower is None:
            return
        try:
            self.door.start()
        except AppError as error:
            self.complain(str(error))
        self._follower.hurry()

    def action_zoom(self) -> None:
        """Show the focused panel alone, or all panels again."""
        screen = self.screen
        if screen.maximized is not None:
            screen.minimize()
        elif screen.focused is not None:
            screen.maximize(screen.focused, container=False)

    def action_jump(self) -> None:
        """Show a letter over each panel; pressing it focuses that panel. A digit goes to its tab."""
        from ui.widgets.dialogs import Jump

        self.push_screen(Jump(actions.panels_of(self.screen)), self._jumped)

    def _jumped(self, chosen: Widget | str | None) -> None:
        """Focus the panel of the letter that was pressed, or go to the tab of the digit."""
        if isinstance(chosen, Widget):
            chosen.focus()
        elif chosen is not None and chosen.isdecimal() and 1 <= int(chosen) <= len(self.tabs):
            self.call_later(self.action_go, self.tabs[int(chosen) - 1])

    def action_help(self) -> None:
        """Show help for the focused panel and the keys."""
        actions.help_for(self)

    def action_next_theme(self) -> None:
        """Switch to the next of night, day and contrast."""
        names = [theme.name for theme in THEMES]
        self.choose_theme(names[(names.index(self.theme) + 1) % len(names)] if self.theme in names else names[0])

    def choose_theme(self, name: str) -> None:
        """Switch to a theme and remember it for the next start."""
        self.theme = self._kept_theme = name
        actions.keep_theme(self.folder, name)

    def on_command_palette_option_highlighted(self, event: CommandPalette.OptionHighlighted) -> None:
        """Preview a theme while its entry is highlighted."""
        self.theme = actions.theme_of(event.highlighted_event.option) or self._kept_theme

    def on_command_palette_closed(self, event: CommandPalette.Closed) -> None:
        """Undo a preview that was not chosen."""
        if not event.option_selected:
            self.theme = self._kept_theme

    def action_leave(self) -> None:
        """Close the dashboard, once; the node keeps running, which the terminal says afterwards."""
        if self._is_leaving:
            return
        self._is_leaving = True
        is_own = self.door is not None and self.door.can_start and self.store.link.kind == "live"
        self.exit(message=keeps_running() if is_own else None)

    async def action_quit(self) -> None:
        """Leave by Textual's own key, ctrl+q, as by `q`."""
        self.action_leave()

    def action_help_quit(self) -> None:
        """Say after Ctrl-C, which in other programs ends them, how to leave."""
        self.say("^q leaves the dashboard; the node keeps running")
