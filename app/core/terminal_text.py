"""Text for terminals: made safe to print, without sequences that a terminal would execute; and QR codes of a line."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import segno

_PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
_SPACES = dict.fromkeys(map(ord, "\n\r\t\v\f"), " ")
_QUOTES = dict.fromkeys(map(ord, '"“”„‟\u2033\u275d\u275e\u301d\u301e\uff02'), "'")


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


def quoted(name: str) -> str:
    """Return a name that somebody else chose, in quotes that it cannot end: it passes for no words but a name."""
    return f"“{one_line(name).translate(_QUOTES)}”"


def peer_words(peer: str, name: str) -> str:
    """Return the name that another peer gave itself, in quotes, or the last characters of its id if it has none."""
    return quoted(name) if name else short_peer(peer)


def peer_words_with_id(peer: str, name: str) -> str:
    """Return the same with the last characters of the id after the name, for decisions: anybody can take a name."""
    return f"{quoted(name)} ({short_peer(peer)})" if name else short_peer(peer)


def with_names(text: str, name_of: Callable[[str], str] = short_peer) -> str:
    """Return the text with each peer id replaced by the peer's name, or by its last six characters."""
    return _PEER_ID.sub(lambda found: name_of(found.group()), text)


def qr_code(invite: str) -> segno.QRCode:
    """Return the QR code of an invite: in upper case, which readers of invites accept and which takes fewer modules."""
    import segno  # importing it takes 50 ms, which only this call needs

    return segno.make(invite.upper(), error="l", micro=False)


_KEPT = (ord("\n"), ord("\t"))
# ESC and the C1 codes start sequences that move the cursor, change the title, or even enter text as if typed.
_CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000)) if code not in _KEPT)


def without_controls(text: str) -> str:
    """Return the text without control characters and lone surrogates; line breaks and tabs are kept."""
    return text.translate(_CONTROLS)
