"""Whose reply begins next: programs with keys of their own take turns, so that none keeps another's replies waiting.

Each owner's replies begin in the order in which they were asked for. An owner has at most `READING_TOKENS` of prompts
under way, or one longer prompt, besides those that are late, and hops read the prompts of one asker in turn: a short
prompt never waits for all the long ones of another owner. Nor does it for those of its own: `SHORT_AT_ONCE` of at most
`SHORT_TOKENS` pass prompts that wait, and are read beside the one that is being read.

Places for replies go first to those who have fewest. Where hops are full, owners that reserve as much room there begin
no further reply until one that has none has found some, for `ROOM_S` at most. Who reserves far more has replies cut
off, the newest first: a reply may reserve whole caches, and last for as long as its client likes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from itertools import islice

import trio

from app.asker.text_places import NODE_OWNER

READING_TOKENS = 2048  # of prompts under way, by owner: some steps of a hop
SHORT_TOKENS = 512  # of a prompt that may pass: two steps of a hop
SHORT_AT_ONCE = 4  # of one owner
MOST_SEEN = 8  # prompts that wait, among which one is looked for that may pass
LOOK_AGAIN_S = 1.0  # at how much is unread of one of these
PLACES = 48  # replies being written at once; below the number of sessions that a hop takes from one asker
RESERVE = 0.25  # of the places, kept for owners below their fair share
EXTRA_PLACES = 8  # for owners that have no reply under way
ROOM_S = 20.0
CUT_OFF_AFTER_S = 10.0  # without room
CUT_OFF_EVERY_S = 2.0  # whoever waits
FAR_MORE = 2  # times as many tokens reserved
LEAST_CUT_OFF = 512  # tokens reserved by an owner: so few are never far more


class Turn:
    """One reply: it waits, then its prompt is read, then it is written."""

    def __init__(self, queue: FairQueue, owner: str, unread: Callable[[], int], tokens: int) -> None:
        self._queue, self.owner, self.tokens = queue, owner, tokens  # that it reserves at hops
        self.cut_off: Callable[[], None] | None = None  # ends the reply; None: it cannot be ended, or has been
        self.unread = unread  # tokens of its prompt that no hop has cached
        self.reading = 0  # as many as these were when it began, until the prompt was read
        self.passes = False  # it is short, and began beside prompts that it would else have waited for
        self.begun = trio.Event()
        self._looked = (-math.inf, 0)  # when, and what `unread` said then
        self.is_without_room = False  # it needs room, and all hops are full
        self._room_of: set[str] = set()  # the owners that had as much room there meanwhile as this one would have
        self._room_until = self._may_cut_off_at = 0.0

    def look(self) -> int:
        """Return what `unread` says now."""
        self._looked = trio.current_time(), self.unread()
        return self._looked[1]

    def unread_lately(self) -> int:
        """What `unread` said within the last second: prompts that wait are looked at often, and to look takes time."""
        return self.look() if trio.current_time() - self._looked[0] >= LOOK_AGAIN_S else self._looked[1]

    def late(self) -> None:
        """Note that the prompt takes too long: the owner's other ones do not wait for it."""
        self.reading = 0
        self._queue.update()

    def read(self) -> None:
        """Note that the prompt was read: the owner's next one may be."""
        self.reading, self.is_without_room, self._room_of = 0, False, set()
        self._queue.update()

    def needs_room(self) -> bool:
        """Note that all hops are full; True if they may have room once replies of other owners end, or have ended.

        Meanwhile those of them with as much room begin no further reply, for `ROOM_S` at most.
        """
        now, self.is_without_room = trio.current_time(), True
        if not self._room_of:
            self._room_until, self._may_cut_off_at = now + ROOM_S, now + CUT_OFF_AFTER_S
        others = self._queue.reserved()
        own = others.pop(self.owner, 0) + self.tokens
        self._room_of |= {owner for owner, tokens in others.items() if tokens >= own}
        if now >= self._may_cut_off_at:
            far_more = max(FAR_MORE * own, LEAST_CUT_OFF)
            self._queue.cut_off_one({owner for owner, tokens in others.items() if tokens > far_more})
        self._queue.update()
        return bool(others) or (bool(self._room_of) and now < self._room_until)

    def keeps_back(self, owner: str) -> bool:
        """True if no reply of another owner is to begin, because this one needs the room."""
        return owner in self._room_of and trio.current_time() < self._room_until


class FairQueue:
    """The replies of one asker, by owner: those that wait and those under way."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Turn]] = {}
        self._active: list[Turn] = []
        self._cut_off_at = -math.inf  # when the last reply was

    @asynccontextmanager
    async def turn(self, owner: str, unread: Callable[[], int], tokens: int = 0) -> AsyncIterator[Turn]:
        """Wait until a reply of this owner may begin, and hold its place; `unread` says how much is to be read.

        It reserves room for so many `tokens` at hops.
        """
        turn = Turn(self, owner, unread, tokens)
        self._waiting.setdefault(owner, deque()).append(turn)
        self.update()
        try:
            await turn.begun.wait()
            yield turn
        finally:
            self._remove(turn)
            self.update()

    def reserved(self) -> Counter[str]:
        """Return the tokens that replies under way have reserved, by owner; without those that need room."""
        tokens: Counter[str] = Counter()
        for turn in self._active:
            if not turn.is_without_room:
                tokens[turn.owner] += turn.tokens
        return tokens

    def cut_off_one(self, owners: Collection[str]) -> None:
        """Cut off the newest reply of one of these owners that has room, if no other one was just cut off.

        This node's owner makes way for nobody.
        """
        if trio.current_time() < self._cut_off_at + CUT_OFF_EVERY_S:
            return
        for turn in reversed(self._active):
            is_node_owner = turn.owner in (NODE_OWNER, "")
            if turn.owner in owners and not is_node_owner and not turn.is_without_room and turn.cut_off:
                cut_off, turn.cut_off, turn.tokens = turn.cut_off, None, 0
                self._cut_off_at = trio.current_time()
                return cut_off()

    def update(self) -> None:
        """Let those begin that may, owners with the fewest replies first."""
        while True:
            counts = Counter(turn.owner for turn in self._active)
            queues = [queue for _, queue in sorted(self._waiting.items(), key=lambda item: counts[item[0]])]
            turn = next((turn for queue in queues if (turn := self._next(queue, counts)) is not None), None)
            if turn is None:
                return
            self._remove(turn)
            self._active.append(turn)
            turn.reading = max(1, turn.unread_lately())
            turn.begun.set()

    def _next(self, queue: deque[Turn], counts: Counter[str]) -> Turn | None:
        """Return the owner's reply that may begin now: the first one, or a short one that passes it."""
        first = queue[0]
        if not self._has_place(first.owner, counts):
            return None
        unread, under_way = first.look(), [one for one in self._active if one.owner == first.owner and one.reading]
        # Those that passed do not count: a long prompt would wait for ever behind short ones that keep coming.
        reading = [one.reading for one in under_way if not one.passes]
        if not reading or sum(reading) + unread <= READING_TOKENS:
            return first
        if max(unread, *reading) <= SHORT_TOKENS or sum(one.passes for one in under_way) >= SHORT_AT_ONCE:
            return None
        passing = next((one for one in islice(queue, MOST_SEEN) if one.unread_lately() <= SHORT_TOKENS), None)
        if passing is not None:
            passing.passes = True
        return passing

    def _has_place(self, owner: str, counts: Counter[str]) -> bool:
        if any(one.keeps_back(owner) for one in self._active):
            return False
        own, others = counts[owner], len({*counts, *self._waiting} - {owner})
        if not own:
            return len(self._active) < PLACES + EXTRA_PLACES
        has_share = own < PLACES / (others + 2)  # for this owner, the others, and one that may still come
        return len(self._active) < (PLACES if has_share else (1 - RESERVE) * PLACES)

    def _remove(self, turn: Turn) -> None:
        queue = self._waiting.get(turn.owner, deque())
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[turn.owner]
        elif turn in self._active:
            self._active.remove(turn)
