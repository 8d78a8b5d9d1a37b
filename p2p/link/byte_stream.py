"""The interface of the two-way byte stream that links run over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from p2p.values import Buffer


class ByteStream(Protocol):
    """An ordered, reliable stream of bytes, such as a yamux stream, a socket or a pipe in memory."""

    async def write_parts(self, parts: Sequence[Buffer]) -> None:
        """Write all of `parts`; raises `StreamReset` if the stream is broken. Called by one task at a time."""

    async def read(self, max_bytes: int) -> bytes:
        """Return 1 to `max_bytes` bytes, or b"" at the end; raises `StreamReset` if the stream is broken."""

    async def close(self) -> None:
        """Close the stream after everything written before."""

    async def reset(self) -> None:
        """Break the stream at once; reads and writes in progress raise `StreamReset`."""
