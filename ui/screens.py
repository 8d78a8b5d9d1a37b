"""The screens by their tabs, each imported when it is first looked at: all at once would delay the first paint."""

from __future__ import annotations

from ui.frame import MainScreen
from ui.store import Store


def make_screen(name: str, store: Store) -> MainScreen:
    """The screen of a tab."""
    if name == "overview":
        from ui.overview import Overview

        return Overview(store)
    if name == "swarm":
        from ui.swarm import Swarm

        return Swarm(store)
    if name == "chat":
        from ui.chat import Chat

        return Chat(store)
    if name == "logs":
        from ui.logs import Logs

        return Logs(store)
    from ui.settings import SettingsScreen

    return SettingsScreen(store)
