"""What peers say to each other about parts: two calls, fixed bytes, nothing to parse.

    weights.leaves   root (32)                       -> the hashes of the part's chunks, 32 bytes each
    weights.chunk    root (32), index (4), count (1), tried (1)
                                                     -> 0x00 and the bytes of `count` chunks from `index` on, or
                                                        0x01 and a peer id: that member was given these chunks

A giver that has not all of `count` chunks (at most 4) gives those before the first that it lacks. With several askers
it sends each chunk out once where it can, and names who got it; an asker whom that member did not help says so with
`tried` = 1 and is served. Numbers are big-endian. A part or chunk that is not here is refused with the code `absent`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from app.core.errors import RecordError
from app.manifest.merkle import CHUNK_BYTES, HASH_BYTES

LEAVES = "weights.leaves"
CHUNK = "weights.chunk"
ABSENT = "absent"

MAX_RUN = 4  # chunks of one request: each is checked by itself, but a call for each would cost a fast link a tenth

_REQUEST = struct.Struct(f">{HASH_BYTES}sIBB")
_DATA = b"\x00"
_ELSEWHERE = b"\x01"
_MAX_PEER_BYTES = 64


@dataclass(frozen=True)
class ChunkRequest:
    """Some chunks of a part, one after the other; `tried` where the member that was named could not help."""

    root: bytes
    index: int
    count: int = 1
    tried: bool = False

    def encode(self) -> bytes:
        """As it travels."""
        return _REQUEST.pack(self.root, self.index, self.count, self.tried)

    @classmethod
    def decode(cls, raw: bytes) -> ChunkRequest:
        """The request in `raw`; raises `RecordError`."""
        if len(raw) != _REQUEST.size:
            raise RecordError(f"a request for a chunk has {_REQUEST.size} bytes, not {len(raw)}")
        root, index, count, tried = _REQUEST.unpack(raw)
        if not 1 <= count <= MAX_RUN:
            raise RecordError(f"a request for {count} chunks: 1 to {MAX_RUN} are given at once")
        return cls(root, index, count, bool(tried))


def chunk_answer(*chunks: bytes | bytearray) -> tuple[bytes | bytearray, ...]:
    """An answer that gives chunks."""
    return _DATA, *chunks


def elsewhere_answer(peer: str) -> bytes:
    """An answer that names a member who was given the chunk."""
    return _ELSEWHERE + peer.encode()


def read_answer(raw: bytes) -> memoryview | str:
    """The chunks' bytes, or the peer to ask instead (any text: is it a member?); raises `RecordError`."""
    if raw[:1] == _DATA and 1 < len(raw) <= 1 + MAX_RUN * CHUNK_BYTES:
        return memoryview(raw)[1:]
    if raw[:1] == _ELSEWHERE and len(raw) <= 1 + _MAX_PEER_BYTES:
        peer = raw[1:].decode("ascii", "replace")
        if peer.isprintable():
            return peer
    raise RecordError("this is no answer to a request for a chunk")
