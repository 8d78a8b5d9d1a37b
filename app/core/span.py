"""A contiguous run of blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.core.errors import UsageError

MAX_BLOCKS = 4096
_TEXT = re.compile(r"(\d{1,4}):(\d{1,4})", re.ASCII)


@dataclass(frozen=True, order=True)
class Span:
    """Blocks `start` to `stop`, the last one not included."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert self.is_possible(self.start, self.stop), f"no span: [{self.start}, {self.stop})"

    @staticmethod
    def is_possible(start: int, stop: int) -> bool:
        """Whether these bounds make a span of any model."""
        return 0 <= start < stop <= MAX_BLOCKS

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read `A:B` as a person writes it."""
        match = _TEXT.fullmatch(text.strip())
        bounds = (int(match[1]), int(match[2])) if match else (0, 0)
        if not cls.is_possible(*bounds):
            raise UsageError(f"{text[:40]!r} is not a span of blocks: write it like 0:12, the last one not included")
        return cls(*bounds)

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, block: int) -> bool:
        return self.start <= block < self.stop

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def blocks(self) -> range:
        """Every block of the span."""
        return range(self.start, self.stop)

    def overlaps(self, other: Span) -> bool:
        """Whether they share a block."""
        return self.start < other.stop and other.start < self.stop
