"""Text from models, peers and files made safe to print: without sequences that a terminal would execute."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

_SPACES = dict.fromkeys(map(ord, "\n\r\t\v\f"), " ")


@lru_cache(maxsize=4096)
def one_line(text: str) -> str:
    """Return the text on one line, without control characters and without marks that reverse its direction."""
    if text.isascii() and text.isprintable():
        return text
    kinds = [(c, unicodedata.category(c)) for c in text.translate(_SPACES)]
    return "".join(" " if kind[0] == "Z" else c for c, kind in kinds if kind[0] != "C")


def short_peer(peer: str) -> str:
    """Return the last six characters of a peer id, which tell peers apart in a table; all ids begin alike."""
    return one_line(peer)[-6:]


_KEPT = (ord("\n"), ord("\t"))
# ESC and the C1 codes start sequences that move the cursor, change the title, or even enter text as if typed.
_CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000)) if code not in _KEPT)


def without_controls(text: str) -> str:
    """Return the text without control characters and lone surrogates; line breaks and tabs are kept."""
    return text.translate(_CONTROLS)
