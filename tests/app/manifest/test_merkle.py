"""Chunks and roots: the same however bytes arrive, and no list of hashes but the true one leads to a root."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import RecordError
from app.manifest import merkle
from app.manifest.merkle import ChunkHasher, chunk_count, leaf_hash, leaves_from, root_of

HASHES = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40)


def node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def test_the_tree_by_hand() -> None:
    a, b, c, d, e = (leaf_hash(bytes([value])) for value in range(5))
    assert a == hashlib.sha256(b"\x00\x00").digest()
    assert root_of([a]) == a
    assert root_of([a, b, c]) == node(node(a, b), c)
    assert root_of([a, b, c, d, e]) == node(node(node(a, b), node(c, d)), e)


@given(st.data())
def test_pieces_of_any_size_give_the_same_leaves(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merkle, "CHUNK_BYTES", 16)
        whole = data.draw(st.binary(min_size=1, max_size=100))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
        hasher = ChunkHasher()
        for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            hasher.update(whole[start:stop])
        leaves = hasher.finish()
        assert leaves == tuple(leaf_hash(whole[start : start + 16]) for start in range(0, len(whole), 16))
        assert len(leaves) == chunk_count(len(whole))


@given(HASHES, st.data())
def test_only_the_true_list_is_taken(leaves: list[bytes], data: st.DataObject) -> None:
    root, size = root_of(leaves), len(leaves) * merkle.CHUNK_BYTES
    raw = b"".join(leaves)
    assert leaves_from(raw, size_bytes=size, root=root) == tuple(leaves)
    place = data.draw(st.integers(0, len(raw) - 1))
    wrong = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
    for bad in (wrong, raw[:-1], raw + bytes(32), b""):
        with pytest.raises(RecordError):
            leaves_from(bad, size_bytes=size, root=root)


def test_a_node_cannot_pass_for_a_leaf() -> None:
    leaves = [leaf_hash(bytes([value])) for value in range(4)]
    inner = node(leaves[0], leaves[1]) + node(leaves[2], leaves[3])
    # The two inner hashes lead to the root as well; the part's size says that four leaves are needed.
    with pytest.raises(RecordError, match="instead of 4 hashes"):
        leaves_from(inner, size_bytes=3 * merkle.CHUNK_BYTES + 1, root=root_of(leaves))
