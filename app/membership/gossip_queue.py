"""Statements that this node has yet to send to other members, and the choice of receivers. Pure: callers send.

Urgent statements (joins, moves, deaths) are pushed once, in a batch, to the next member on the ring of all sorted peer
ids and to a few random contacts: the ring reaches every member, the random ones make it fast. Minor updates, and
`PIGGYBACK_REPEATS` copies of every urgent statement, are piggybacked on probes and need no message of their own.
`app.membership.gossip` pushes, `app.membership.exchange` piggybacks.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections import OrderedDict
from collections.abc import Sequence

from app.membership.wire import MAX_BATCH_BYTES, fitting

FAN_OUT = 4  # members that a batch is pushed to
PIGGYBACK_REPEATS = 6  # probes or answers that carry each statement
PIGGYBACK_PER_MESSAGE = 8
MAX_QUEUED = 1024

Topic = tuple[str, str]  # (domain, peer that the statement is about): a newer statement replaces an older one


class GossipQueue:
    """Statements waiting to be pushed or piggybacked, at most `MAX_QUEUED` of each."""

    def __init__(self) -> None:
        self._urgent: OrderedDict[Topic, bytes] = OrderedDict()
        self._piggyback: OrderedDict[Topic, tuple[bytes, int]] = OrderedDict()  # with the repeats left

    def __len__(self) -> int:
        return len(self._urgent) + len(self._piggyback)

    @property
    def has_urgent(self) -> bool:
        """True if a statement waits to be pushed."""
        return bool(self._urgent)

    def add(self, topic: Topic, raw: bytes, *, urgent: bool) -> None:
        """Queue a statement for piggybacking and, if `urgent`, for a push; a full queue drops its oldest one."""
        if urgent:
            self._urgent[topic] = raw
            if len(self._urgent) > MAX_QUEUED:
                self._urgent.popitem(last=False)
        self._piggyback[topic] = (raw, PIGGYBACK_REPEATS)
        if len(self._piggyback) > MAX_QUEUED:
            self._piggyback.popitem(last=False)

    def take_batch(self) -> list[bytes]:
        """Remove and return the next batch to push, `MAX_BATCH_BYTES` at most."""
        batch = fitting(self._urgent.values(), MAX_BATCH_BYTES)
        for _ in batch:
            self._urgent.popitem(last=False)
        return batch

    def take_piggyback(self) -> list[bytes]:
        """Return statements to piggyback on the next probe or answer, each `PIGGYBACK_REPEATS` times in all."""
        statements = []
        for _ in range(min(PIGGYBACK_PER_MESSAGE, len(self._piggyback))):
            topic, (raw, repeats) = self._piggyback.popitem(last=False)
            statements.append(raw)
            if repeats > 1:
                self._piggyback[topic] = (raw, repeats - 1)
        return statements


def targets(own_peer: str, members: Sequence[str], contacts: Sequence[str], rng: random.Random) -> list[str]:
    """Choose up to `FAN_OUT` receivers: the successor of `own_peer` in the sorted `members`, and random contacts."""
    if len(members) <= FAN_OUT:
        return list(members)
    successor = members[bisect(members, own_peer) % len(members)]
    others = [peer for peer in rng.sample(contacts, min(FAN_OUT, len(contacts))) if peer != successor]
    return [successor, *others[: FAN_OUT - 1]]
