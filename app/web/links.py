"""Who may open a page: one-time codes, the sessions that they are exchanged for, and the token of read-only views.

A code is good once and for ten minutes, so that a link in a browser's history, a terminal's scrollback or a list of
processes is worth nothing afterwards. Only digests of the secrets are kept.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

CODE_S = 600.0
MAX_SESSIONS = 32
MAX_SECRET = 256  # characters that a page may send

Mode = Literal["own", "view"]


@dataclass(frozen=True)
class Pass:
    """What a page may do, and the secret that it may come again with."""

    mode: Mode
    session: str


class Links:
    """The secrets of one `shoal web`, valid as long as it runs; `now` is a clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._codes: dict[str, float] = {}  # digest -> end of its time
        self._sessions: dict[str, None] = {}  # digests, the oldest first
        self._views: set[str] = set()

    def one_time_code(self) -> str:
        """Make a code that opens the dashboard once."""
        code = secrets.token_urlsafe(32)
        self._codes[_digest(code)] = self._now() + CODE_S
        return code

    def view_token(self) -> str:
        """Make a token that opens read-only views, any number of times."""
        token = secrets.token_urlsafe(32)
        self._views.add(_digest(token))
        return token

    def admit(self, *, code: object = None, session: object = None, view: object = None) -> Pass | None:
        """Return what the first of these secrets allows; None if it is unknown, used or too old."""
        if isinstance(code, str) and len(code) <= MAX_SECRET:
            return self._exchange(code)
        if isinstance(session, str) and len(session) <= MAX_SECRET:
            return Pass("own", session) if _digest(session) in self._sessions else None
        if isinstance(view, str) and len(view) <= MAX_SECRET:
            return Pass("view", view) if _digest(view) in self._views else None
        return None

    def _exchange(self, code: str) -> Pass | None:
        ends_at = self._codes.pop(_digest(code), None)
        if ends_at is None or self._now() > ends_at:
            return None
        session = secrets.token_urlsafe(32)
        self._sessions[_digest(session)] = None
        while len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return Pass("own", session)


def _digest(secret: str) -> str:
    """Return a hash, so that looking a secret up takes no time that depends on how much of it was right."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
