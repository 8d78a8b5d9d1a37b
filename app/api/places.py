"""Places for requests under way: the owner of the node has some that keys cannot take, and keys share the others.

The server (`app.api.server`) gives each connection a place, and the application takes it for a request once it knows
whose it is. Where all are taken, the newest request of the key with most of them gives way to one of a key that has at
least two fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import trio

MAX_REQUESTS = 112  # under way; the connections beyond are those that ask nothing now
OWN_REQUESTS = 16  # of these, which keys leave free
STATE = "place"  # where the state of a connection has its place


class Places:
    """All places of one server."""

    def __init__(self) -> None:
        self._taken: dict[Place, tuple[str | None, trio.CancelScope]] = {}  # the oldest request first

    def take(self, place: Place, owner: str | None, hold: trio.CancelScope) -> bool:
        """Take a place if there is one, or another gives way; `hold` is cancelled once this one gives way."""
        counts = Counter(one for one, _ in self._taken.values() if one is not None)
        is_full = len(self._taken) >= MAX_REQUESTS
        if is_full or (owner is not None and counts.total() >= MAX_REQUESTS - OWN_REQUESTS):
            most = max(counts, key=counts.__getitem__, default=None)
            if owner is None or most is None or counts[most] < counts[owner] + 2:
                return False
            newest = next(one for one in reversed(self._taken) if self._taken[one][0] == most)
            self._taken.pop(newest)[1].cancel()
        self._taken[place] = owner, hold
        return True

    def leave(self, place: Place) -> None:
        """Leave a place; one that gave way has none."""
        self._taken.pop(place, None)

    def is_taken(self, place: Place) -> bool:
        """True while a request holds the place."""
        return place in self._taken


class Place:
    """The place of one connection, which has at most one request under way."""

    def __init__(self, places: Places) -> None:
        self._places = places

    @property
    def is_taken(self) -> bool:
        """True while a request of the connection holds a place."""
        return self._places.is_taken(self)

    @contextmanager
    def taken(self, owner: str | None) -> Iterator[trio.CancelScope]:
        """Hold the place for a request of a key, or of the node's owner if None; the scope is cancelled without it."""
        with trio.CancelScope() as hold:
            if not self._places.take(self, owner, hold):
                hold.cancel()
            try:
                yield hold
            finally:
                self._places.leave(self)


def place_of(scope: Mapping[str, Any]) -> Place:
    """Return the place of a request's connection; without the server, one of its own."""
    place: Place | None = scope.get("state", {}).get(STATE)
    return place or Place(Places())
