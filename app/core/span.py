"""`Span`, a contiguous range of blocks, and its text form `A:B`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.core.errors import UsageError

MAX_BLOCKS = 4096
_TEXT = re.compile(r"(\d{1,4}):(\d{1,4})", re.ASCII)


@dataclass(frozen=True, order=True)
class Span:
    """Blocks `start` to `stop - 1`, never empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert self.is_possible(self.start, self.stop), f"no span: [{self.start}, {self.stop})"

    @staticmethod
    def is_possible(start: int, stop: int) -> bool:
        """True if these bounds make a span of some model, of at most `MAX_BLOCKS` blocks."""
        return 0 <= start < stop <= MAX_BLOCKS

    @classmethod
    def parse(cls, text: str) -> Span:
        """Parse `A:B` as typed by a user; raises `UsageError`."""
        match = _TEXT.fullmatch(text.strip())
        bounds = (int(match[1]), int(match[2])) if match else (0, 0)
        if not cls.is_possible(*bounds):
            raise UsageError(f"{text[:40]!r} is not a span of blocks: write 0:12 for blocks 0 to 11")
        return cls(*bounds)

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, block: int) -> bool:
        return self.start <= block < self.stop

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def covers(self, part: Span) -> bool:
        """True if all blocks of `part` are among these."""
        return self.start <= part.start and part.stop <= self.stop

    def overlap(self, other: Span) -> Span | None:
        """Return the blocks of both; None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def blocks(self) -> range:
        """The numbers of its blocks."""
        return range(self.start, self.stop)
