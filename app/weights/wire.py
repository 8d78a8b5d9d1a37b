"""What peers say to each other about parts: two calls, fixed bytes, nothing to parse.

    weights.leaves   root (32)                       -> the hashes of the part's chunks, 32 bytes each
    weights.chunk    root (32), index (4), tried (1) -> 0x00 and the chunk's bytes, or
                                                        0x01 and a peer id: that member was given this chunk

A giver with several askers sends each chunk out once where it can, and names who got it; an asker whom that member
did not help says so with `tried` = 1 and is served. Numbers are big-endian. A part or chunk that is not here is refused
with the code `absent`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from app.errors import RecordError
from app.merkle import CHUNK_BYTES, HASH_BYTES

LEAVES = "weights.leaves"
CHUNK = "weights.chunk"
ABSENT = "absent"

_REQUEST = struct.Struct(f">{HASH_BYTES}sIB")
_DATA = b"\x00"
_ELSEWHERE = b"\x01"
_MAX_PEER_BYTES = 64


@dataclass(frozen=True)
class ChunkRequest:
    """One chunk of a part; `tried` where the member that was named could not help."""

    root: bytes
    index: int
    tried: bool = False

    def encode(self) -> bytes:
        """As it travels."""
        return _REQUEST.pack(self.root, self.index, self.tried)

    @classmethod
    def decode(cls, raw: bytes) -> ChunkRequest:
        """The request in `raw`; raises `RecordError`."""
        if len(raw) != _REQUEST.size:
            raise RecordError(f"a request for a chunk has {_REQUEST.size} bytes, not {len(raw)}")
        root, index, tried = _REQUEST.unpack(raw)
        return cls(root, index, bool(tried))


def chunk_answer(chunk: bytes | bytearray) -> tuple[bytes, bytes | bytearray]:
    """An answer that gives the chunk."""
    return _DATA, chunk


def elsewhere_answer(peer: str) -> bytes:
    """An answer that names a member who was given the chunk."""
    return _ELSEWHERE + peer.encode()


def read_answer(raw: bytes) -> memoryview | str:
    """The chunk's bytes, or the peer to ask instead (any text: is it a member?); raises `RecordError`."""
    if raw[:1] == _DATA and 1 < len(raw) <= 1 + CHUNK_BYTES:
        return memoryview(raw)[1:]
    if raw[:1] == _ELSEWHERE and len(raw) <= 1 + _MAX_PEER_BYTES:
        peer = raw[1:].decode("ascii", "replace")
        if peer.isprintable():
            return peer
    raise RecordError("this is no answer to a request for a chunk")
