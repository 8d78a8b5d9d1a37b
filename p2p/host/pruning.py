"""Which links to close so that a node keeps few of them open, however many peers it speaks to. Pure.

A link that carries nothing costs its two nodes a socket, heartbeats and a place that somebody else may need; a new one
costs a handshake. So as many as `ENOUGH_LINKS` stay open, and beyond that the one that was used longest ago goes,
provided that nothing runs on it and nobody here asked to keep it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

ENOUGH_LINKS = 40


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What one link was used for, and when last (on trio's clock)."""

    peer: str
    used_at: float
    busy: bool


def surplus(links: Iterable[LinkUse], kept: Container[str], enough: int = ENOUGH_LINKS) -> list[str]:
    """The peers whose links are to be closed now, the longest unused first."""
    links = list(links)
    idle = sorted((use for use in links if not use.busy and use.peer not in kept), key=lambda use: use.used_at)
    return [use.peer for use in idle[: max(0, len(links) - enough)]]
