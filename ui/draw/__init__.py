"""Pure functions that turn state into rows of styled text.

They take snapshots (`app.snapshot.views`) and values of `ui.state`, and return rows as `ui.draw.rows` defines them.
Painting, focus and keys are left to `ui.widgets` and `ui.screens`; `ui.draw.theme` maps style words to colours.
"""
