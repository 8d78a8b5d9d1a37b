"""The Textual dashboard, a client of the node's control API (`app.api`).

`ui.state` keeps the node's latest snapshot, `ui.draw` turns it into rows of styled text with pure functions, and
`ui.widgets` and `ui.screens` paint these rows and handle keys. How a node is found and started is left to
`app.cli.dashboard`. Nothing here imports torch or trio.
"""
