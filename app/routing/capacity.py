"""Room for sessions at members: the largest session that fits anywhere, and hops that refused one lately. No I/O.

A refusal for want of room is about sessions of one size, and is no ban (`app.routing.bans`). While it is fresh,
sessions as large take another hop if there is one; where there is none they ask one after the other, a few times a
second in all. Smaller sessions are not concerned. A hop that refuses again and again what it announced to have room for
is left aside for longer each time, but never where there is no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from app.core.pieces import CHUNK, Pieces
from app.core.reasons import Reason
from app.routing.route import RouteRequest
from app.session.wire import CACHE_EXCEEDED
from app.swarm.records import Announcement
from p2p.rate_limit import backoff_s

ASK_S = 0.25  # after one session of this asker asked a full hop, another as large may
FRESH_S = 2.0  # a refusal counts for so long
LONGEST_DOUBT_S = 60.0  # or longer, doubled each time, of a hop that goes on to contradict its announcements
FADE_S = 600.0  # after which it is forgotten
MAX_HOPS, _MAX_SIZES = 256, 16
# Other refusals concern sessions of any size.
_OF_ONE_SIZE = frozenset({"cache_full", "cache_reserved", CACHE_EXCEEDED})


class _Sizes:
    """When something happened last to sessions of some sizes."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}  # tokens -> when; the larger, the later

    def note(self, tokens: int, now: float) -> None:
        """Note that it happened now: this outdates what is known of larger sessions, not of smaller ones."""
        smaller = sorted((size, at) for size, at in self._at.items() if size < tokens)
        self._at = {size: at for size, at in smaller[-_MAX_SIZES + 1 :]} | {tokens: now}

    def happened(self, tokens: int, since: float) -> bool:
        """True if it happened at `since` or later to a session of this size or a smaller one."""
        return any(size <= tokens and at >= since for size, at in self._at.items())

    def forget(self, tokens: int) -> None:
        """Forget what is known of sessions of this size and smaller ones."""
        self._at = {size: at for size, at in self._at.items() if size > tokens}

    def __bool__(self) -> bool:
        return bool(self._at)

    @property
    def latest(self) -> float:
        """When it happened last."""
        return max(self._at.values(), default=-math.inf)


@dataclass
class _FullHop:
    """A hop that refused sessions."""

    why: Reason  # the latest refusal
    refused: _Sizes = field(default_factory=_Sizes)
    asked: _Sizes = field(default_factory=_Sizes)
    ended_at: float = -math.inf  # when a session of this asker ended there last
    doubts: int = 0  # how often in a row it refused what it had announced to have room for
    doubted_until: float = -math.inf

    @property
    def doubt_s(self) -> float:
        """Seconds for which a refusal counts where there are other hops."""
        return backoff_s(FRESH_S, max(self.doubts, 1), LONGEST_DOUBT_S)


class FullHops:
    """The hops that refused sessions of one asker for want of room."""

    def __init__(self) -> None:
        self._hops: dict[str, _FullHop] = {}

    def refused(self, peer: str, tokens: int, why: Reason, now: float, *, contradicts: bool) -> bool:
        """Remember that a hop refused a session of so many tokens; `contradicts` if it had announced that much room.

        True if it is doubted for that now and was not before: all sessions that it refuses report the same.
        """
        known = self._hops.pop(peer, None)
        hop = known if known is not None and now < known.refused.latest + FADE_S else _FullHop(why)
        self._hops[peer] = hop  # the last in the order of the latest refusals
        if len(self._hops) > MAX_HOPS:
            del self._hops[next(iter(self._hops))]
        size = tokens if why.code in _OF_ONE_SIZE else 1
        hop.why = why
        hop.refused.note(size, now)
        hop.asked.note(size, now)
        if not contradicts or now < hop.doubted_until:
            return False
        hop.doubts += 1
        hop.doubted_until = now + hop.doubt_s
        return True

    def asks(self, peers: Iterable[str], tokens: int, now: float) -> None:
        """Note that a session is about to ask these hops: its answer will tell of others as large."""
        for peer in peers:
            if peer in self._hops:
                self._hops[peer].asked.note(tokens, now)

    def worked(self, peer: str, tokens: int) -> None:
        """Note that a hop did its part in a session: it had room for it, and is doubted for larger ones only."""
        hop = self._hops.get(peer)
        if hop is not None:
            hop.refused.forget(tokens)
            if not hop.refused:
                hop.doubts, hop.doubted_until = 0, -math.inf

    def ended(self, peers: Iterable[str], now: float) -> None:
        """Note that a session of this asker ended at these hops: there may be room again."""
        for hop in (self._hops[peer] for peer in peers if peer in self._hops):
            hop.asked, hop.ended_at = _Sizes(), now

    def ended_since(self, peer: str, then: float) -> bool:
        """True if a session of this asker has ended at a full hop since then."""
        return peer in self._hops and self._hops[peer].ended_at > then

    def full(self, tokens: int, now: float) -> dict[str, Reason]:
        """Return the hops that others are better than for a session of this size, with the reasons."""
        return {peer: hop.why for peer, hop in self._hops.items() if hop.refused.happened(tokens, now - hop.doubt_s)}

    def just_asked(self, tokens: int, now: float, refused: Mapping[str, float]) -> dict[str, Reason]:
        """Return the hops whose answer to another session is to be awaited, with the reasons.

        They refused a session of this size or a smaller one lately, or since this very one was `refused`.
        """
        return {
            peer: hop.why
            for peer, hop in self._hops.items()
            if hop.refused.happened(tokens, min(now - FRESH_S, refused.get(peer, now)))
            and hop.asked.happened(tokens, now - ASK_S)
        }


def largest_session(
    members: Sequence[Announcement],
    request: RouteRequest,
    room_of: Callable[[Announcement], int],
    doubtful: Collection[str] = (),
) -> Pieces[int | None]:
    """Return the tokens of the largest session for which every wanted block has a member with enough room.

    `room_of` says how many tokens fit at a member; those that are `doubtful` count only where nobody else serves a
    block. None if a block is served by nobody.
    """
    trusted = request.privacy.trusted
    # A span, and if its hosts are trusted, and doubtful -> the most room that one has
    most: dict[tuple[int, int, bool, bool], int] = {}
    for begin in range(0, len(members), CHUNK):
        for member in members[begin : begin + CHUNK]:
            if member.span is not None and member.serves:
                key = (member.span.start, member.span.stop, member.peer in trusted, member.peer in doubtful)
                room = room_of(member)
                if room > most.get(key, -1):
                    most[key] = room
        yield
    found: list[int] = []
    for block in request.wanted.blocks():
        is_private = request.privacy.is_private(block)
        rooms = [
            (not is_doubtful, room)
            for (start, stop, may, is_doubtful), room in most.items()
            if start <= block < stop and (may or not is_private)
        ]
        if not rooms:
            return None
        found.append(max(rooms)[1])
        yield
    return min(found)
