"""One dashboard process behind a page: its output as it comes, and the input that it gets.

The process talks over its standard streams in packets, as Textual's `WebDriver` does (`ui.page_driver`): a letter, the
length in four bytes (big-endian), the payload. `D` is what a terminal would get or send, `M` a JSON object such as a
new size.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress

import trio

GREETING = b"__GANGLION__\n"  # what the driver writes first
MAX_GREETING_BYTES = 65_536
MAX_PACKET_BYTES = 16 * 2**20
QUIT_S = 2.0  # for a dashboard to close by itself

Packet = tuple[bytes, bytes]


class ScreenFailed(Exception):
    """The dashboard's process wrote something that is not its protocol, or did not start."""


class PacketReader:
    """Bytes in, packets out; raises `ScreenFailed` for what is no packet."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._is_greeted = False

    def feed(self, data: bytes) -> list[Packet]:
        """Return the packets that are complete now."""
        self._buffer += data
        if not self._is_greeted:
            at = self._buffer.find(GREETING)
            if at < 0:
                if len(self._buffer) > MAX_GREETING_BYTES:
                    raise ScreenFailed("the dashboard did not start as expected")
                return []
            del self._buffer[: at + len(GREETING)]
            self._is_greeted = True
        packets: list[Packet] = []
        while len(self._buffer) >= 5:
            size = int.from_bytes(self._buffer[1:5], "big")
            if size > MAX_PACKET_BYTES:
                raise ScreenFailed("the dashboard sent a packet that is too long")
            if len(self._buffer) < 5 + size:
                break
            packets.append((bytes(self._buffer[:1]), bytes(self._buffer[5 : 5 + size])))
            del self._buffer[: 5 + size]
        return packets


def packet(kind: bytes, payload: bytes) -> bytes:
    """Return a packet for the process."""
    return kind + len(payload).to_bytes(4, "big") + payload


class ScreenProcess:
    """A running dashboard; made by `open_screen`."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process

    async def packets(self) -> AsyncGenerator[Packet, None]:
        """Yield the packets of the process until it ends."""
        reader = PacketReader()
        assert self._process.stdout is not None
        async for data in self._process.stdout:
            for one in reader.feed(data):
                yield one

    async def keys(self, text: str) -> None:
        """Pass on what a terminal would send."""
        await self._send(packet(b"D", text.encode("utf-8", "replace")))

    async def resize(self, width: int, height: int) -> None:
        """Pass on a new size."""
        await self._send(packet(b"M", json.dumps({"type": "resize", "width": width, "height": height}).encode()))

    async def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(trio.BrokenResourceError):  # it has ended, which `packets` says
            await self._process.stdin.send_all(data)

    async def close(self) -> None:
        """End the process: in order if it answers, else by force."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(QUIT_S):
                await self._send(packet(b"M", b'{"type": "quit"}'))
                assert self._process.stdout is not None
                async for _ in self._process.stdout:  # it may wait for its output to be read
                    pass
                await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    await stream.aclose()


async def open_screen(command: Sequence[str], environment: Mapping[str, str], width: int, height: int) -> ScreenProcess:
    """Start a dashboard of this size; raises `ScreenFailed`."""
    more = {
        "TEXTUAL_DRIVER": "ui.page_driver:PageDriver",
        "TEXTUAL_COLOR_SYSTEM": "truecolor",
        "COLUMNS": str(width),
        "ROWS": str(height),
    }
    try:
        process = await trio.lowlevel.open_process(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**environment, **more}
        )
    except OSError as error:
        raise ScreenFailed(f"the dashboard cannot be started: {error.strerror or error}") from error
    return ScreenProcess(process)
