"""Which sequences an island reads: a pure function of the job's seed, the position of the round, and the member list.

Positions count all sequences that the job has ever assigned. Each pass over the data has an order of its own, a
permutation that is computed and never stored (a Feistel network with cycle walking).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_ROUNDS = 6


def sequence_at(position: int, count: int, seed: int) -> int:
    """Return the number of the sequence at a position, among `count` of them; every pass takes each once."""
    epoch, at = divmod(position, count)
    return permuted(at, count, hashlib.sha256(f"shoal order/{seed}/{epoch}".encode()).digest())


def permuted(index: int, count: int, key: bytes) -> int:
    """Return where a permutation of the numbers below `count` moves one of them."""
    assert 0 <= index < count, (index, count)
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:  # the network permutes a square that is at most four times as large; walk until inside again
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mixed(key, number, right) & mask)
        index = left << half | right
        if index < count:
            return index


def positions_of(start: int, members: Sequence[str], member: str, step: int, batch: int) -> list[int]:
    """Return the positions of the sequences that a member reads in a step (from 0) of a round that begins at `start`.

    Members take turns, so that the round's positions are divided among them without gaps.
    """
    turn = members.index(member)
    return [start + (step * batch + row) * len(members) + turn for row in range(batch)]


def next_start(start: int, members: int, steps: int, batch: int) -> int:
    """Return the position at which the round after this one begins."""
    return start + members * steps * batch


def _mixed(key: bytes, number: int, value: int) -> int:
    digest = hashlib.blake2s(value.to_bytes(8, "little"), key=key, salt=bytes([number]), digest_size=8).digest()
    return int.from_bytes(digest, "little")
