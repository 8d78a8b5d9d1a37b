"""Keys of programs: which one a request has, and whether its limits allow one more.

Tokens of the last minute count: those written as they come, those of the prompt at the end of the reply. Of a reply
that is broken off, the prompt counts by its length; one that is refused as too long counts like one that was read.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from pathlib import Path

import trio

from app.asker.asker import PromptTooLong
from app.asker.reply import ReplyDone, ReplyEvent, ReplyText
from app.config.keys import ApiKey, KeyFileError, digest_of, read_keys
from app.core.reasons import Reason, because
from engine.errors import ContextExceeded

WINDOW_S = 60.0
CHARS_PER_TOKEN = 4
TOO_LONG = (PromptTooLong, ContextExceeded)  # prompts whose tokens were found, or would take long to find

log = logging.getLogger("shoal.api")


class KeyMeter:
    """What one key has used."""

    def __init__(self) -> None:
        self.active = 0
        self._spent: deque[tuple[float, int]] = deque()  # (time, tokens), the latest last

    def spend(self, tokens: int, now: float) -> None:
        """Count tokens."""
        if self._spent and self._spent[-1][0] == now:
            tokens += self._spent.pop()[1]
        self._spent.append((now, tokens))

    def refusal(self, key: ApiKey, now: float) -> tuple[Reason, int] | None:
        """Return why one more request is refused, and the seconds after which to try again; None if it is not."""
        while self._spent and self._spent[0][0] <= now - WINDOW_S:
            self._spent.popleft()
        if key.at_once is not None and self.active >= key.at_once:
            text = f"the key {key.name} may have {key.at_once} requests under way: wait until one has ended"
            return because("rate_limited", text), 1
        if key.tokens_per_minute is None or sum(tokens for _, tokens in self._spent) < key.tokens_per_minute:
            return None
        wait_s = max(1, math.ceil(self._spent[0][0] + WINDOW_S - now))
        text = f"the key {key.name} has used its {key.tokens_per_minute} tokens of this minute: wait {wait_s} s"
        return because("rate_limited", text), wait_s


class KeyRing:
    """The keys of one home, read again when their file changes, and the meter of each."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seen: tuple[int, int] | None = None  # time and size of the file that was read
        self._keys: tuple[ApiKey, ...] = ()
        self._meters: dict[str, KeyMeter] = {}

    def find(self, given: bytes) -> ApiKey | None:
        """Return the key of this text."""
        digest = digest_of(given)
        return next((key for key in self._current() if hmac.compare_digest(key.digest, digest)), None)

    def meter(self, key: ApiKey) -> KeyMeter:
        """Return the meter of a key."""
        return self._meters.setdefault(key.digest, KeyMeter())

    def _current(self) -> tuple[ApiKey, ...]:
        if self._file is None:
            return ()
        try:
            facts = self._file.stat()
            seen = (facts.st_mtime_ns, facts.st_size)
            if seen != self._seen:
                self._keys, self._seen = read_keys(self._file), seen
                kept = {key.digest for key in self._keys}
                self._meters = {digest: meter for digest, meter in self._meters.items() if digest in kept}
        except FileNotFoundError:
            self._keys, self._seen = (), None
        except (OSError, KeyFileError) as error:
            log.error("no key is accepted: %s", error)
            return ()
        return self._keys


_meter: ContextVar[KeyMeter | None] = ContextVar("_meter", default=None)
_owner: ContextVar[str] = ContextVar("_owner", default="")


@contextmanager
def owned_by(owner: str) -> Iterator[None]:
    """Handle a request as one of its owner's: the hash of a key, or a name for all with or without the token."""
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


def current_owner() -> str:
    """Return whose request the present one is: what it keeps belongs to that program alone."""
    return _owner.get()


@contextmanager
def using(meter: KeyMeter) -> Iterator[None]:
    """Count a request and its replies for a key."""
    meter.active += 1
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)
        meter.active -= 1


def count_tokens(tokens: int) -> None:
    """Count tokens for the key of the present request, if it has one."""
    meter = _meter.get()
    if meter is not None:
        meter.spend(tokens, trio.current_time())


def metered(events: AsyncGenerator[ReplyEvent, None], prompt_chars: int) -> AsyncGenerator[ReplyEvent, None]:
    """Return a reply whose tokens count for the key of the present request, if it has one."""
    meter = _meter.get()
    return events if meter is None else _counted(events, meter, prompt_chars)


async def _counted(
    events: AsyncGenerator[ReplyEvent, None], meter: KeyMeter, prompt_chars: int
) -> AsyncGenerator[ReplyEvent, None]:
    is_over = False
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ReplyText):
                    meter.spend(1, trio.current_time())
                elif isinstance(event, ReplyDone):
                    is_over = True
                    meter.spend(event.stats.prompt_tokens - event.stats.cached_tokens, trio.current_time())
                yield event
    except TOO_LONG as error:
        meter.spend(error.tokens, trio.current_time())
        raise
    except (GeneratorExit, trio.Cancelled):
        if not is_over:
            meter.spend(prompt_chars // CHARS_PER_TOKEN, trio.current_time())
        raise
