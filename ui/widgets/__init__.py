"""Widgets of the screens: panels, lists, the footer, parts of the chat, dialogs.

They read `ui.state.store` and paint rows from `ui.draw`. Which widgets a tab has, and what is asked of the node, is
decided in `ui.screens`.
"""
