"""Encrypts and decrypts Noise transport records, without I/O.

A record is a two-byte big-endian length and that many bytes: ciphertext and a 16-byte tag. The nonce is the number of
the record in its direction, in the byte order that Noise prescribes for the cipher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from p2p.errors import ProtocolError

TAG_BYTES: Final = 16
MAX_RECORD_BYTES: Final = 65535
MAX_PLAIN_BYTES: Final = MAX_RECORD_BYTES - TAG_BYTES
_LENGTH_BYTES: Final = 2
_OVERHEAD: Final = _LENGTH_BYTES + TAG_BYTES

Aead = AESGCM | ChaCha20Poly1305
Buffer = bytes | bytearray | memoryview


class Sealer:
    """Encrypts what this side sends."""

    __slots__ = ("_aead", "_big_endian", "_number")

    def __init__(self, aead: Aead, number: int = 0) -> None:
        self._aead = aead
        self._big_endian = isinstance(aead, AESGCM)
        self._number = number

    def seal(self, parts: Sequence[Buffer]) -> bytearray:
        """Encrypt the concatenation of `parts`; returns the records, one after another, in one buffer."""
        size = 0
        for part in parts:
            size += part.nbytes if isinstance(part, memoryview) else len(part)
        sealed = bytearray(size + _OVERHEAD * -(-size // MAX_PLAIN_BYTES))
        out, at = memoryview(sealed), 0
        # Most writes are small and fit one record. Of larger ones only records that span several parts are copied.
        for plain in _cut(parts) if size > MAX_PLAIN_BYTES else (b"".join(parts),) if size else ():
            end = at + len(plain) + _OVERHEAD
            out[at : at + _LENGTH_BYTES] = (len(plain) + TAG_BYTES).to_bytes(_LENGTH_BYTES, "big")
            nonce = _nonce(self._number, self._big_endian)
            self._aead.encrypt_into(nonce, plain, None, out[at + _LENGTH_BYTES : end])
            self._number += 1
            at = end
        return sealed


class Opener:
    """Decrypts what the peer sends; keeps less than one record between calls."""

    __slots__ = ("_aead", "_big_endian", "_number", "_partial", "_plain", "empty")

    def __init__(self, aead: Aead, number: int = 0) -> None:
        self._aead = aead
        self._big_endian = isinstance(aead, AESGCM)
        self._number = number
        self._partial = bytearray()
        self._plain = bytearray(MAX_RECORD_BYTES)
        self.empty = 0  # records without content so far

    def feed(self, data: bytes) -> memoryview:
        """Return the plaintext of all records that `data` completes; it is valid until the next call.

        Raises `ProtocolError` at a record that is too short or was not encrypted by the peer.
        """
        sealed = memoryview(data)
        needed = len(self._partial) + len(sealed)
        if needed > len(self._plain):
            self._plain = bytearray(needed)
        out = memoryview(self._plain)
        size = offset = 0
        if self._partial:
            offset = self._complete(sealed)
            record = bytes(self._partial)
            if not _is_whole(record):
                return out[:0]
            self._partial.clear()
            size = self._open_all(memoryview(record), out, 0)[1]
        used, size = self._open_all(sealed[offset:], out, size)
        self._partial += sealed[offset + used :]
        return out[:size]

    def forget(self) -> None:
        """Free the buffers; the connection has ended."""
        self._partial, self._plain = bytearray(), bytearray()

    def _complete(self, sealed: memoryview) -> int:
        """Append to the partial record the bytes that it lacks; returns how many bytes of `sealed` that took."""
        partial, offset = self._partial, 0
        if len(partial) < _LENGTH_BYTES:
            offset = _LENGTH_BYTES - len(partial)
            partial += sealed[:offset]
        if len(partial) < _LENGTH_BYTES:
            return len(sealed)
        stop = offset + _LENGTH_BYTES + int.from_bytes(partial[:_LENGTH_BYTES], "big") - len(partial)
        partial += sealed[offset:stop]
        return min(stop, len(sealed))

    def _open_all(self, sealed: memoryview, out: memoryview, size: int) -> tuple[int, int]:
        """Decrypt the complete records at the front of `sealed` into `out` from offset `size` on.

        Returns the number of bytes used and the end of the plaintext in `out`.
        """
        at, end = 0, len(sealed)
        while end - at >= _LENGTH_BYTES:
            length = sealed[at] << 8 | sealed[at + 1]
            start, stop = at + _LENGTH_BYTES, at + _LENGTH_BYTES + length
            if stop > end:
                break
            if length < TAG_BYTES:
                raise ProtocolError(f"sent a Noise record of {length} bytes; the shortest has {TAG_BYTES}")
            plain_end = size + length - TAG_BYTES
            nonce = _nonce(self._number, self._big_endian)
            try:
                self._aead.decrypt_into(nonce, sealed[start:stop], None, out[size:plain_end])
            except InvalidTag as error:
                raise ProtocolError("sent a Noise record that is forged or damaged") from error
            self._number += 1
            self.empty += length == TAG_BYTES
            at, size = stop, plain_end
        return at, size


def _cut(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yield the concatenation of `parts` in pieces of `MAX_PLAIN_BYTES`, the last one shorter."""
    held: list[Buffer] = []
    room = MAX_PLAIN_BYTES
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view) >= room:
            yield b"".join((*held, view[:room])) if held else view[:room]
            view, room = view[room:], MAX_PLAIN_BYTES
            held.clear()
        if view:
            held.append(view)
            room -= len(view)
    if held:
        yield b"".join(held) if len(held) > 1 else held[0]


def _is_whole(record: bytes) -> bool:
    return len(record) >= _LENGTH_BYTES and len(record) == _LENGTH_BYTES + int.from_bytes(record[:2], "big")


def _nonce(number: int, big_endian: bool) -> bytes:
    return number.to_bytes(12, "big") if big_endian else b"\0\0\0\0" + number.to_bytes(8, "little")
