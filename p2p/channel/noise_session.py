"""The encrypted connection after a Noise handshake, which encrypts each write in one buffer.

The negotiation of the multiplexer uses `read` and `write`; the multiplexer itself uses `receive`, which returns
plaintext as it arrives, and sends batches with `send_now` and `flush`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from p2p.channel.noise_records import Buffer, Opener, Sealer
from p2p.channel.pipe import SocketPipe
from p2p.channel.raw import ConnectionClosed

_MIN_READ_BYTES: Final = 16 << 10
_MAX_READ_BYTES: Final = 256 << 10


@dataclass(frozen=True)
class Secured:
    """Result of a handshake: the peer's proven id, both ciphers, and bytes that arrived after the last message."""

    peer: str
    is_initiator: bool
    sealer: Sealer
    opener: Opener
    early: bytes


class NoiseSession:
    """The encrypted connection to one peer; one task may read and one may write at a time."""

    def __init__(self, pipe: SocketPipe, secured: Secured) -> None:
        self.peer = secured.peer
        self.is_initiator = secured.is_initiator
        self.pipe = pipe
        self.heard_at = trio.current_time()  # when bytes of the peer last came
        self._sealer = secured.sealer
        self._opener = secured.opener
        self._early = secured.early
        self._plain = b""  # decrypted, not yet returned by `read`
        self._unsent: memoryview = memoryview(b"")
        self._read_bytes = _MIN_READ_BYTES
        self._broken = False

    async def receive(self) -> memoryview | bytes:
        """Return the next plaintext, valid until the next call; raises `ConnectionClosed` or `ProtocolError`.

        It is empty if only records without content came: see `empty_records`.
        """
        if self._plain:
            plain, self._plain = self._plain, b""
            return plain
        while True:
            if self._early:
                sealed, self._early = self._early, b""
            else:
                sealed = await self.pipe.receive(self._read_bytes)
                self.heard_at = trio.current_time()
                # Small reads are fast for small messages; large reads save system calls in bulk transfers.
                if len(sealed) == self._read_bytes:
                    self._read_bytes = min(2 * self._read_bytes, _MAX_READ_BYTES)
                elif len(sealed) < self._read_bytes // 4:
                    self._read_bytes = max(self._read_bytes // 2, _MIN_READ_BYTES)
            before = self._opener.empty
            plaintext = self._opener.feed(sealed)
            if plaintext or self._opener.empty > before:
                return plaintext

    async def read(self, n: int | None = None) -> bytes:
        """Return exactly `n` bytes, fewer only at the end of the connection; any number if `n` is None."""
        if n == 0:
            return b""
        while not self._plain or (n is not None and len(self._plain) < n):
            held, self._plain = self._plain, b""
            try:
                self._plain = held + bytes(await self.receive())
            except ConnectionClosed:
                if held:
                    return held
                raise
            except BaseException:
                self._plain = held
                raise
        n = len(self._plain) if n is None else n
        taken, self._plain = self._plain[:n], self._plain[n:]
        return taken

    async def write(self, data: Buffer) -> None:
        """Encrypt and send `data`; if this is cancelled half-way, all further writes raise an error."""
        self.send_now([data])
        await self.flush()

    @property
    def empty_records(self) -> int:
        """Number of records without content that have come."""
        return self._opener.empty

    @property
    def has_unsent(self) -> bool:
        """True if `send_now` left bytes to `flush`."""
        return bool(self._unsent)

    def send_now(self, parts: Sequence[Buffer]) -> bool:
        """Encrypt `parts` and give the kernel what it accepts; True if that was all, else `flush` the rest."""
        if self._broken:
            raise ConnectionClosed("an earlier write was cancelled half-way")
        assert not self._unsent, "flush before sending more"
        sealed = self._sealer.seal(parts)
        self._unsent = memoryview(sealed)[self.pipe.send_now(sealed) :]
        return not self._unsent

    async def flush(self) -> None:
        """Send the bytes that `send_now` left."""
        if not self._unsent:
            return
        self._broken = True
        await self.pipe.send(self._unsent)
        self._unsent = memoryview(b"")
        self._broken = False

    async def close(self) -> None:
        """Close the connection without waiting for the peer."""
        self._opener.forget()
        await self.pipe.close()
