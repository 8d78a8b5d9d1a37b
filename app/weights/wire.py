"""Wire format of the chunk protocol: two calls with binary bodies. Numbers are big-endian.

    weights.leaves   root (32)                       -> the hashes of the part's chunks, 32 bytes each
    weights.chunk    root (32), index (4), count (1), tried (1)
                                                     -> 0x00 and the bytes of `count` chunks from `index` on, or
                                                        0x01 and a peer id: a redirect to a member that was sent
                                                        these chunks before

`count` is 1 to 4; a server that lacks some of the chunks sends those before the first missing one. With several clients
it sends each chunk once where possible and redirects the others. A client for which the redirect failed, or that does
not follow it, repeats its request with `tried` = 1, and must then be sent the data. A part or chunk that the server
does not have is refused with the code `absent`. The server is `chunk_server`, the client `chunk_client`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from app.core.errors import RecordError
from app.manifest.merkle import CHUNK_BYTES, HASH_BYTES

LEAVES = "weights.leaves"
CHUNK = "weights.chunk"
ABSENT = "absent"

MAX_RUN = 4  # chunks per request; one call per chunk would cost a fast link a tenth of its speed

_REQUEST = struct.Struct(f">{HASH_BYTES}sIBB")
_DATA = b"\x00"
_ELSEWHERE = b"\x01"
_MAX_PEER_BYTES = 64


class ChunkMethods(NamedTuple):
    """Names of the two calls; sets of parts that come and go apart are served under names of their own."""

    leaves: str
    chunk: str


WEIGHTS = ChunkMethods(LEAVES, CHUNK)


@dataclass(frozen=True)
class ChunkRequest:
    """A request for `count` consecutive chunks of a part; `tried` if a redirect for them has failed."""

    root: bytes
    index: int
    count: int = 1
    tried: bool = False

    def encode(self) -> bytes:
        """Return the request as wire bytes."""
        return _REQUEST.pack(self.root, self.index, self.count, self.tried)

    @classmethod
    def decode(cls, raw: bytes) -> ChunkRequest:
        """Parse wire bytes; raises `RecordError` for a wrong length or count."""
        if len(raw) != _REQUEST.size:
            raise RecordError(f"a request for a chunk has {_REQUEST.size} bytes, not {len(raw)}")
        root, index, count, tried = _REQUEST.unpack(raw)
        if not 1 <= count <= MAX_RUN:
            raise RecordError(f"a request for {count} chunks: 1 to {MAX_RUN} are allowed")
        return cls(root, index, count, bool(tried))


def chunk_answer(*chunks: bytes | bytearray) -> tuple[bytes | bytearray, ...]:
    """Build an answer that carries chunks."""
    return _DATA, *chunks


def elsewhere_answer(peer: str) -> bytes:
    """Build an answer that redirects to a member that was sent the chunks."""
    return _ELSEWHERE + peer.encode()


def read_answer(raw: bytes) -> memoryview | str:
    """Parse an answer: the chunks' bytes, or the peer we are redirected to; raises `RecordError`.

    The peer is any printable text: the caller must check that it is a member.
    """
    if raw[:1] == _DATA and 1 < len(raw) <= 1 + MAX_RUN * CHUNK_BYTES:
        return memoryview(raw)[1:]
    if raw[:1] == _ELSEWHERE and len(raw) <= 1 + _MAX_PEER_BYTES:
        peer = raw[1:].decode("ascii", "replace")
        if peer.isprintable():
            return peer
    raise RecordError("the answer to a request for a chunk is malformed")
