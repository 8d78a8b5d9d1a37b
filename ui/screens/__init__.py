"""The six tabs (overview, swarm, chat, jobs, logs, settings) and the dialogs.

Screens compose widgets, handle their keys and send requests to the node through `ui.node_app`. What a row looks like
is left to `ui.draw`; widgets that several screens use are in `ui.widgets`.
"""
