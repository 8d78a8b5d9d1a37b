"""Has texts of training read with tokenizers that others chose: in threads of their own, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import trio

from app.core.errors import AppError
from app.core.left_behind import left_behind

T = TypeVar("T")

READ_S = 60.0  # that a text may take, and besides
READ_BYTES_PER_S = 10_000  # of its files; slow machines read ten times as many, except beside much other work
READ_AT_ONCE = 4


class TextReading:
    """The threads in which one kind of jobs reads its texts."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(READ_AT_ONCE)

    async def run(self, files: Sequence[str], function: Callable[..., T], *args: Any) -> T:
        """Call a function that reads these files with a tokenizer; raises `AppError` if it takes too long."""
        within_s = READ_S + await trio.to_thread.run_sync(_size_bytes, files) / READ_BYTES_PER_S
        try:
            return await left_behind(self._threads, within_s, function, *args)
        except trio.TooSlowError:
            raise AppError(
                f"reading the text with the model's tokenizer takes more than {within_s:.0f} s: give less text, or "
                "choose another model or job"
            ) from None


def _size_bytes(files: Sequence[str]) -> int:
    size = 0
    for path in files:
        with suppress(OSError):  # whoever reads it says what is wrong
            size += Path(path).stat().st_size
    return size
