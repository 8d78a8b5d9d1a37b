"""The dashboard: one app, a screen for each tab, and one store that the node's events go into.

Screens are made when they are first looked at. Whatever the node is asked runs in a thread of its own; its answer
comes back as a message.
"""

from __future__ import annotations

import json
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

from app.snapshot.codec import snapshot_from
from app.snapshot.views import Snapshot
from ui import actions
from ui.draw.theme import NIGHT, THEMES
from ui.node_app import NodeApp
from ui.screens.frame import TABS
from ui.screens.registry import make_screen
from ui.state.follower import NOT_OURS, EventNote, Follower, Heard, NodeConnector, RawSnapshot
from ui.state.store import ConnectionState, LogRow, Store

APART_S = 0.2  # between two looks at a store that changes quickly


class NodeMessage(Message):
    """Something came from the node."""

    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self.heard = heard


class Dashboard(NodeApp):
    """The swarm you can see."""

    TITLE = "shoal"
    CSS_PATH = Path(__file__).with_name("dashboard.tcss")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (150, "-wide")]  # noqa: RUF012 (as in the base)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-medium"), (44, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"go('{name}')", name, show=False) for number, name in enumerate(TABS, 1)),
        Binding("p", "pause", "pause"),
        Binding("p", "resume", "resume"),
        Binding("d", "drain", "drain", show=False),
        Binding("i", "invite", "invite"),
        Binding("j", "join", "join"),
        Binding("c", "create", "create"),
        Binding("plus,equals_sign", "cap(1)", "cap", key_display="+/-"),
        Binding("minus", "cap(-1)", "cap", show=False),
        Binding("w", "why", "why"),
        Binding("z", "zoom", "zoom"),
        Binding("ctrl+o", "jump", "jump", key_display="^o"),
        Binding("ctrl+t", "next_theme", "theme", show=False),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "leave", "leave"),
    ]

    def __init__(self, door: NodeConnector | None, *, store: Store | None = None, folder: Path | None = None) -> None:
        super().__init__(door, store or Store(), folder)
        self._follower = None if door is None else Follower(door, self._hear)
        self._shown_at = float("-inf")
        self._show_pending = False
        self._latest: RawSnapshot | None = None
        self._footer_of: tuple[str, str | None] = ("", None)
        self.asked_first_run = False
        self._modes = {name: partial(make_screen, name, self.store) for name in TABS}
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = self._kept_theme = actions.kept_theme(folder)

    def _hear(self, heard: Heard) -> None:
        self.post_message(NodeMessage(heard))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our own names, for themes that do not have them."""
        return dict(NIGHT.variables)

    # --- its life ----------------------------------------------------------------------------------------------------

    async def on_mount(self) -> None:
        """Show the overview at once; the node may still be far away."""
        self.begin_capture_print(self)
        await self.switch_mode("overview")
        self.set_interval(1.0, self._tick)
        if self._follower is not None:
            self._follower.start()

    def on_unmount(self) -> None:
        """Hang up; the node stays."""
        if self._follower is not None:
            self._follower.close()

    def _tick(self) -> None:
        self.store.sample()
        self.show_soon()

    def on_print(self, event: events.Print) -> None:
        """A stray print becomes a row of the log."""
        from ui.draw.node import now_ms

        level = "warning" if event.stderr else "info"
        for line in event.text.splitlines():
            if line.strip():
                self.store.log(LogRow(now_ms(), level, "dashboard", line))
        self.show_soon()

    # --- what comes from the node ------------------------------------------------------------------------------------

    def on_news(self, message: NodeMessage) -> None:
        """Take it into the store, and show it with what comes right after."""
        message.stop()
        match message.heard:
            case ConnectionState() as link:
                self._latest = None
                self.store.connected(link)
                self.show_now()  # all of the screen at once: nothing of a node that is away may linger
                return
            case RawSnapshot() as told:
                self._latest = told
            case EventNote() as note:
                self.store.note(note.data)
        self.show_soon()

    def show_soon(self) -> None:
        """Let the screen look at the store, a few times a second at most."""
        if self._show_pending:
            return
        left_s = self._shown_at + APART_S - self.store.now()
        self._show_pending = True
        if left_s > 0:
            self.set_timer(left_s, self.show_now)
        else:
            self.call_later(self.show_now)

    def show_now(self) -> None:
        """Let what is seen look at the store."""
        self._show_pending = False
        self._shown_at = self.store.now()
        if self._latest is not None:
            told, self._latest = self._latest, None
            self._take(told)
        if not self.screen_stack:
            return  # not up yet, or on the way out
        if self.store.snapshot is not None:
            self._offer_first_run(self.store.snapshot)
        for screen in self.screen_stack:
            show = getattr(screen, "show", None)
            if show is not None and screen.is_mounted:
                show()
        state = self.store.snapshot.state if self.store.snapshot is not None else None
        if (self.store.link.kind, state) != self._footer_of:  # the footer is costly to make anew
            self._footer_of = (self.store.link.kind, state)
            self.refresh_bindings()

    def _take(self, told: RawSnapshot) -> None:
        try:
            snapshot = snapshot_from(json.loads(told.text))
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
        """Go to the chat, and ask."""
        from ui.widgets.ask_box import AskBox

        await self.switch_mode("chat")
        self.screen.query_one(AskBox).post_message(AskBox.Asked(question))

    # --- keys --------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The footer shows only the keys that work now."""
        return actions.allowed(self, action)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette knows the state."""
        return actions.commands(self)

    async def action_go(self, name: str) -> None:
        """To another screen."""
        if self.current_mode != name:
            await self.switch_mode(name)

    def action_pause(self) -> None:
        """Stop hosting until resumed."""
        actions.pause(self)

    def action_resume(self) -> None:
        """Host again."""
        actions.resume(self)

    def action_drain(self) -> None:
        """Let sessions finish, then host nothing."""
        actions.drain(self)

    def action_join(self) -> None:
        """Go to a swarm."""
        actions.join(self)

    def action_create(self) -> None:
        """Found a swarm."""
        actions.create(self)

    def action_why(self) -> None:
        """Why the node is as it is."""
        actions.why(self)

    def action_cap(self, steps: int) -> None:
        """More or less of the device's memory."""
        actions.cap(self, steps)

    def action_invite(self) -> None:
        """Invite others."""
        from ui.screens.invite import InviteScreen

        self.push_screen(InviteScreen(self.store))

    def action_start_node(self) -> None:
        """Start a node where none runs."""
        if self.door is not None and self._follower is not None:
            self.door.start()
            self._follower.hurry()

    def action_zoom(self) -> None:
        """The focused panel alone, or all of them again."""
        screen = self.screen
        if screen.maximized is not None:
            screen.minimize()
        elif screen.focused is not None:
            screen.maximize(screen.focused, container=False)

    def action_jump(self) -> None:
        """Letters over the panels."""
        from ui.widgets.dialogs import Jump

        self.push_screen(Jump(actions.panels_of(self.screen)), lambda panel: panel.focus() if panel else None)

    def action_help(self) -> None:
        """This panel first."""
        actions.help_for(self)

    def action_next_theme(self) -> None:
        """Night, day, contrast."""
        names = [theme.name for theme in THEMES]
        self.choose_theme(names[(names.index(self.theme) + 1) % len(names)] if self.theme in names else names[0])

    def choose_theme(self, name: str) -> None:
        """Wear a theme, and remember it."""
        self.theme = self._kept_theme = name
        actions.keep_theme(self.folder, name)

    def on_command_palette_option_highlighted(self, event: CommandPalette.OptionHighlighted) -> None:
        """A theme is worn while it is looked at."""
        self.theme = actions.theme_of(event.highlighted_event.option) or self._kept_theme

    def on_command_palette_closed(self, event: CommandPalette.Closed) -> None:
        """What was only looked at is put off again."""
        if not event.option_selected:
            self.theme = self._kept_theme

    def action_leave(self) -> None:
        """Leave the dashboard; the node stays."""
        self.exit()
