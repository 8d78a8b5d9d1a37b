"""A reply being received: its sampling settings, the thread that reads it, and its progress so far."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from textual.message import Message

from app.api.client import Client, Hangup
from app.core.errors import AppError
from app.core.terminal_text import without_controls

_SPEED_WINDOW_S = 2.0


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a request, with the system prompt."""

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 512
    seed: int | None = None
    system: str = ""

    @classmethod
    def chosen(cls, kept: Any) -> Sampling:
        """The settings that were saved last; names that this version does not know are ignored."""
        known = {field.name for field in fields(cls)}
        return (
            cls(**{name: value for name, value in kept.items() if name in known}) if isinstance(kept, dict) else cls()
        )

    def request(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """Body of an `/control/chat` request; without a seed, the clock gives one."""
        values = asdict(self)
        system = values.pop("system")
        values["seed"] = (time.time_ns() if self.seed is None else self.seed) % 2**63
        opening = [{"role": "system", "content": system}] if system else []
        return {"messages": [*opening, *messages], **values}


@dataclass(frozen=True)
class Replier:
    """Who replies in the chat: the own swarm, it with an adapter, or another swarm."""

    swarm: str | None = None
    adapter: str | None = None

    def request(self) -> dict[str, str]:
        """The fields of a `/control/chat` request that say so."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def repliers(models: Sequence[str], own: str, others: Sequence[str]) -> list[tuple[Replier, str]]:
    """Return everybody who can reply, with words: the models that the node offers, then the other saved swarms."""
    adapters = [name.removeprefix(f"{own}+") for name in models if name.startswith(f"{own}+")]
    return [
        (Replier(), own),
        *((Replier(adapter=name), f"{own} with the adapter {name}") for name in adapters),
        *((Replier(swarm=name), f"{name}, while this node goes on hosting in {own}") for name in others),
    ]


BOUNDS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 2, "0 always takes the likeliest token; 0.7 is usual"),
    "top_p": (0.01, 1, "only the likeliest tokens that together have this probability"),
    "top_k": (0, 10**6, "only this many of the likeliest tokens; 0: all"),
    "min_p": (0, 1, "only tokens with at least this share of the likeliest one's probability"),
    "repetition_penalty": (0.01, 10, "above 1: fewer repetitions"),
    "max_tokens": (1, 10**6, "the longest reply"),
    "seed": (0, 2**63, "the same seed gives the same reply; empty: random"),
}


def sampling_value(name: str, text: str) -> float | int | str | None:
    """Parse a typed sampling setting; raises `ValueError` with a text for the user."""
    text = text.strip()
    if name == "system":
        return text
    if name == "seed" and not text:
        return None
    low, high, _ = BOUNDS[name]
    whole = name in ("top_k", "max_tokens", "seed")
    try:
        value: float | int = int(text) if whole else float(text)
    except ValueError:
        raise ValueError(f"{name} must be a {'whole ' if whole else ''}number") from None
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low:g} to {high:g}")
    return value


MAX_FILE_BYTES = 200_000


def read_text_file(path: Path) -> dict[str, str]:
    """Read a file to attach; raises `ValueError` with a text for the user if it cannot be one."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8")
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder: name one file") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {(error.strerror or 'unknown error').lower()}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is not a text file in UTF-8") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_FILE_BYTES // 1000} kB")
    if "\0" in text:
        raise ValueError(f"{path.name} is not a text file")
    return {"name": path.name, "text": text}


@dataclass
class ReplyProgress:
    """Progress of a reply: tokens so far and when they arrived."""

    began_at: float
    tokens: int = 0
    waiting: str = ""  # what the reply waits for before its first token
    has_waited: bool = False
    arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=400))
    speeds: deque[float | None] = field(default_factory=lambda: deque(maxlen=24))

    def take(self, piece: dict[str, Any], now: float) -> str:
        """Count a piece of the reply and return the text that it adds, without control characters."""
        if "text" not in piece:
            said = piece.get("waiting")
            self.waiting = without_controls(str(said.get("text", ""))) if isinstance(said, dict) else ""
            self.has_waited |= bool(self.waiting)
            return ""
        self.tokens += 1
        self.waiting = ""
        self.arrivals.append(now)
        return without_controls(str(piece["text"]))

    def silent_s(self, now: float) -> float:
        """Seconds since the last token, or since the question was sent."""
        return now - (self.arrivals[-1] if self.arrivals else self.began_at)

    def speed(self, now: float) -> float | None:
        """Tokens per second over the last 2 seconds; None before the second token."""
        fresh = [at for at in self.arrivals if now - at <= _SPEED_WINDOW_S]
        if len(self.arrivals) < 2:
            return None
        return len(fresh) / min(_SPEED_WINDOW_S, max(now - self.arrivals[0], 1e-6))


class ReplyThread:
    """Reads one reply in its own thread; every piece goes to `tell`, in that thread."""

    def __init__(self, client_of: Callable[[], Client], request: dict[str, Any], tell: Callable[[Any], None]) -> None:
        self._client_of, self._request, self._tell = client_of, request, tell
        self._hangup = Hangup()
        self._thread = threading.Thread(target=self._run, name="reply", daemon=True)

    def start(self) -> None:
        """Send the request."""
        self._thread.start()

    def stop(self) -> None:
        """Break the connection; the node then frees the session at once."""
        self._hangup.hang_up()

    def _run(self) -> None:
        try:
            for piece in self._client_of().chat(self._request, hangup=self._hangup):
                if self._hangup.is_over:
                    break
                self._tell(piece)
        except (AppError, ValueError) as error:
            if not self._hangup.is_over:
                self._tell({"error": str(error), "code": error.code if isinstance(error, AppError) else ""})
        if self._hangup.is_over:
            self._tell({"stopped": True})


class ReplyPiece(Message):
    """A piece of the reply has arrived: text, route, figures at the end, or an error."""

    def __init__(self, thread: ReplyThread, piece: dict[str, Any]) -> None:
        super().__init__()
        self.thread, self.piece = thread, piece
