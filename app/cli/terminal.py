"""Text from elsewhere, made harmless for a terminal: what a model, a peer or a file says is never a command to it."""

from __future__ import annotations

_KEPT = (ord("\n"), ord("\t"))
# Escape begins sequences that move the cursor, change colours or titles, even type for the person; C1 codes likewise.
_CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if code not in _KEPT)


def harmless(text: str) -> str:
    """The text without control characters, but for new lines and tabs."""
    return text.translate(_CONTROLS)
