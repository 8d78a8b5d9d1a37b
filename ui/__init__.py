"""The Textual dashboard: a client of the control API.

Rows of styled words (`ui.draw.rows`) are drawn by pure functions from the snapshot that `ui.state.store` keeps; panels
turn them into strips with the colours of the theme. Nothing here imports torch, trio or libp2p.
"""
