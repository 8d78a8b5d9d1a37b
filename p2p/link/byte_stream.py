"""The two-way byte stream that links run over, and its adapter for trio's own streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import trio

from p2p.errors import StreamReset
from p2p.values import Buffer


class ByteStream(Protocol):
    """An ordered, reliable stream of bytes; a libp2p stream, a socket and a memory pipe all fit through adapters."""

    async def write_parts(self, parts: Sequence[Buffer]) -> None:
        """Write all of them; raises `StreamReset` where the stream is gone. Never called by two tasks at once."""

    async def read(self, max_bytes: int) -> bytes:
        """At least one byte, or b"" at the end; raises `StreamReset` where the stream broke."""

    async def close(self) -> None:
        """End the stream in order."""

    async def reset(self) -> None:
        """Break the stream at once; reads and writes under way end with `StreamReset`."""


class TrioByteStream:
    """A `trio.abc.Stream` (TCP, memory) as a `ByteStream`."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def write_parts(self, parts: Sequence[Buffer]) -> None:
        """Write all of them."""
        try:
            await self._stream.send_all(b"".join(parts))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise StreamReset("the byte stream broke while writing") from error

    async def read(self, max_bytes: int) -> bytes:
        """Some bytes, or b"" at the end."""
        try:
            return bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise StreamReset("the byte stream broke while reading") from error

    async def close(self) -> None:
        """Close both directions."""
        await self._stream.aclose()

    async def reset(self) -> None:
        """Close without ceremony."""
        await trio.aclose_forcefully(self._stream)
