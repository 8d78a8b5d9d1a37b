"""Builds the screen of a tab, importing its module only then: importing all six would delay the first paint."""

from __future__ import annotations

from ui.screens.frame import MainScreen
from ui.state.store import Store


def make_screen(name: str, store: Store) -> MainScreen:
    """Build the screen of a tab."""
    if name == "overview":
        from ui.screens.overview import Overview

        return Overview(store)
    if name == "swarm":
        from ui.screens.swarm import Swarm

        return Swarm(store)
    if name == "chat":
        from ui.screens.chat import Chat

        return Chat(store)
    if name == "jobs":
        from ui.screens.jobs import Jobs

        return Jobs(store)
    if name == "logs":
        from ui.screens.logs import Logs

        return Logs(store)
    from ui.screens.settings import SettingsScreen

    return SettingsScreen(store)
