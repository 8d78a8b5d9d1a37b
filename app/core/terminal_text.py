"""Text from elsewhere, made safe for a terminal: a model, a peer or a file must not move the cursor or type."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

_SPACES = dict.fromkeys(map(ord, "\n\r\t\v\f"), " ")


@lru_cache(maxsize=4096)
def one_line(text: str) -> str:
    """The text on one line, without characters that could command a terminal or turn its direction."""
    if text.isascii() and text.isprintable():
        return text
    kinds = [(c, unicodedata.category(c)) for c in text.translate(_SPACES)]
    return "".join(" " if kind[0] == "Z" else c for c, kind in kinds if kind[0] != "C")


def short_peer(peer: str) -> str:
    """A peer id as it fits into a table: its last six characters tell ids apart."""
    return one_line(peer)[-6:]


_KEPT = (ord("\n"), ord("\t"))
# Escape begins sequences that move the cursor, change colours or titles, even type for the person; C1 codes likewise.
_CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000)) if code not in _KEPT)


def without_controls(text: str) -> str:
    """The text without control characters and lone surrogates; new lines and tabs stay."""
    return text.translate(_CONTROLS)
