"""Whom this node's routes depend on, and whose silence it must therefore notice soonest. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from app.core.span import Span
from app.swarm.records import Announcement

MOST = 12


def route_neighbours(hosted: Span | None, hops: Iterable[str], members: Iterable[Announcement]) -> list[str]:
    """The hops of this node's own replies first, then those who serve the blocks just before and behind its own."""
    chosen = dict.fromkeys(hops)
    if hosted is not None:
        beside = (hosted.start - 1, hosted.stop)
        for member in members:
            if member.serves and member.span is not None and any(block in member.span for block in beside):
                chosen.setdefault(member.peer)
    return list(chosen)[:MOST]
