"""What this node still has to pass on, and to whom. Pure: the caller sends.

Changes are urgent: each is pushed once, in a batch with others, to the next member on the ring of all peer ids and to
a few at random among those at hand. The ring leaves nobody out, chance makes it quick. What is lesser, and a few
repeats of every change, ride on probes: they cost no message of their own.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections import OrderedDict
from collections.abc import Sequence

from app.membership.wire import MAX_BATCH_BYTES, fitting

FAN_OUT = 4
RIDES = 6
RIDERS_PER_MESSAGE = 8
MAX_RUMOURS = 1024

Topic = tuple[str, str]  # the statement's domain, and whom it is about: a newer one replaces it


class GossipQueue:
    """Statements on their way to other members."""

    def __init__(self) -> None:
        self._urgent: OrderedDict[Topic, bytes] = OrderedDict()
        self._piggyback: OrderedDict[Topic, tuple[bytes, int]] = OrderedDict()  # with the rides it has left

    def __len__(self) -> int:
        return len(self._urgent) + len(self._piggyback)

    @property
    def pressing(self) -> bool:
        """Whether something waits to be pushed."""
        return bool(self._urgent)

    def add(self, topic: Topic, raw: bytes, *, urgent: bool) -> None:
        """Pass a statement on."""
        if urgent:
            self._urgent[topic] = raw
            if len(self._urgent) > MAX_RUMOURS:
                self._urgent.popitem(last=False)
        self._piggyback[topic] = (raw, RIDES)
        if len(self._piggyback) > MAX_RUMOURS:
            self._piggyback.popitem(last=False)

    def take_batch(self) -> list[bytes]:
        """The next batch to be pushed."""
        batch = fitting(self._urgent.values(), MAX_BATCH_BYTES)
        for _ in batch:
            self._urgent.popitem(last=False)
        return batch

    def take_piggyback(self) -> list[bytes]:
        """What goes along with the next probe or its answer."""
        riders = []
        for _ in range(min(RIDERS_PER_MESSAGE, len(self._piggyback))):
            topic, (raw, rides) = self._piggyback.popitem(last=False)
            riders.append(raw)
            if rides > 1:
                self._piggyback[topic] = (raw, rides - 1)
        return riders


def targets(own_peer: str, members: Sequence[str], company: Sequence[str], rng: random.Random) -> list[str]:
    """Whom to push to: the next of the (sorted) members on the ring, and at random others that are at hand."""
    if len(members) <= FAN_OUT:
        return list(members)
    successor = members[bisect(members, own_peer) % len(members)]
    others = [peer for peer in rng.sample(company, min(FAN_OUT, len(company))) if peer != successor]
    return [successor, *others[: FAN_OUT - 1]]
