"""The Merkle tree over a part's bytes, cut into chunks of 1 MiB; the last chunk may be shorter.

A leaf is ``sha256(0x00 + chunk)``, a node is ``sha256(0x01 + left + right)``; an odd last hash of a level moves up
unchanged. A manifest holds only the root. The list of leaves (32 bytes each) is downloaded from any peer and checked
against the root; after that, every chunk can be checked by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from app.core.errors import RecordError

CHUNK_BYTES = 2**20
HASH_BYTES = 32


def chunk_count(size_bytes: int) -> int:
    """Number of chunks of a part of this size."""
    return -(-size_bytes // CHUNK_BYTES)


def leaf_hash(chunk: bytes | bytearray | memoryview) -> bytes:
    """Return the leaf hash of one chunk."""
    digest = hashlib.sha256(b"\x00")
    digest.update(chunk)
    return digest.digest()


def root_of(leaves: Sequence[bytes]) -> bytes:
    """Return the root over the leaves of a part, of which there is at least one."""
    assert leaves, "a part without bytes has no root"
    level = list(leaves)
    while len(level) > 1:
        paired = [hashlib.sha256(b"\x01" + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def leaves_from(raw: bytes, *, size_bytes: int, root: bytes) -> tuple[bytes, ...]:
    """Parse a list of leaves from a peer or a file; raises `RecordError` unless they hash to `root`."""
    count = chunk_count(size_bytes)
    if len(raw) != count * HASH_BYTES:
        raise RecordError(f"the chunk list of part {root.hex()[:8]} has {len(raw)} bytes instead of {count} hashes")
    leaves = tuple(raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES))
    if not leaves or root_of(leaves) != root:
        raise RecordError(f"the chunk list does not belong to part {root.hex()[:8]}")
    return leaves


class ChunkHasher:
    """Computes the leaves of a part from its bytes, fed in pieces of any size."""

    def __init__(self) -> None:
        self._leaves: list[bytes] = []
        self._digest = hashlib.sha256(b"\x00")
        self._room = CHUNK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Hash the next bytes of the part."""
        view = memoryview(data)
        while len(view):
            piece = view[: self._room]
            self._digest.update(piece)
            self._room -= len(piece)
            view = view[len(piece) :]
            if not self._room:
                self._close_chunk()

    def finish(self) -> tuple[bytes, ...]:
        """Return the leaves of all bytes fed; call it once, at the end."""
        if self._room < CHUNK_BYTES:
            self._close_chunk()
        return tuple(self._leaves)

    def _close_chunk(self) -> None:
        self._leaves.append(self._digest.digest())
        self._digest = hashlib.sha256(b"\x00")
        self._room = CHUNK_BYTES
