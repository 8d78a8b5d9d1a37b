"""The index of an adapter: its shape, and the hash of each block's weights. No I/O.

An asker names an adapter by the root hash of its index, so two adapters never have one name. A hop fetches the index
and then the weights of its own blocks from the asker, as parts by hash (`app.training.reply_adapters`). The index is a
JSON object:

    v        1
    rank     of the adapter
    alpha    what the adapter adds is multiplied by alpha / rank
    targets  the roles that it changes
    size     bytes of one block's weights: a vector of float32, laid out as in `engine.training.adapters`
    roots    the root hash of each block's weights in hex, from block 0 on
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.span import MAX_BLOCKS

VERSION = 1
HASH_BYTES = 32
MAX_INDEX_BYTES = 70 * MAX_BLOCKS + 1024
MAX_RANK = 256
MAX_VECTOR_BYTES = 2**30
MAX_TARGETS = 16
SHORT_DIGITS = 16  # of a root, for people


class AdapterRef(NamedTuple):
    """Root hash and size of an adapter's index."""

    root: bytes
    size_bytes: int

    @property
    def short(self) -> str:
        """The beginning of the root, for people."""
        return self.root.hex()[:SHORT_DIGITS]


@dataclass(frozen=True)
class AdapterIndex:
    """An adapter's shape, and the root hash of each block's weights."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    vector_bytes: int  # of one block
    roots: tuple[bytes, ...]

    def encoded(self) -> bytes:
        """The index as bytes, whose hash names the adapter."""
        return canonical(
            {
                "v": VERSION,
                "rank": self.rank,
                "alpha": float(self.alpha),
                "targets": list(self.targets),
                "size": self.vector_bytes,
                "roots": [root.hex() for root in self.roots],
            }
        )


def decode_index(raw: bytes) -> AdapterIndex:
    """Decode an adapter's index; raises `RecordError` if a field is missing or out of bounds."""
    fields = decode_object(raw, "the adapter's index", max_bytes=MAX_INDEX_BYTES)
    check_version(fields, "v", VERSION)
    roots: Sequence[str] = fields.texts("roots", MAX_BLOCKS, 2 * HASH_BYTES)
    return AdapterIndex(
        fields.integer("rank", 1, MAX_RANK),
        fields.number("alpha", sys.float_info.min, sys.float_info.max),
        fields.texts("targets", MAX_TARGETS, 16),
        fields.integer("size", 4, MAX_VECTOR_BYTES),
        tuple(Fields(fields.what, {"roots": root}).hex_bytes("roots", HASH_BYTES) for root in roots),
    )
