"""Chooses the links to close so that a node keeps few of them open. Pure; the caller closes them.

An idle link costs both nodes a socket, heartbeats and one of a limited number of connections; reopening it costs a
handshake. So up to `ENOUGH_LINKS` stay open. Beyond that links are closed, except those in use and those that this node
asked to keep: first of the address with most of them, as one machine may be many peers, and there the one used longest
ago.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass

ENOUGH_LINKS = 40


@dataclass(frozen=True, slots=True)
class LinkUse:
    """A peer and its address, the last use of its link (on trio's clock), and if a call or stream is active on it."""

    peer: str
    source: str
    used_at: float
    busy: bool


def surplus(links: Iterable[LinkUse], kept: Container[str], enough: int = ENOUGH_LINKS) -> list[str]:
    """Return the peers whose links are to be closed; `kept` peers are never among them."""
    links = list(links)
    at = Counter(use.source for use in links)
    idle = sorted((use for use in links if not use.busy and use.peer not in kept), key=lambda use: use.used_at)
    closed = []
    for _ in range(min(len(links) - enough, len(idle))):
        use = max(idle, key=lambda use: at[use.source])  # of several, the first
        idle.remove(use)
        at[use.source] -= 1
        closed.append(use.peer)
    return closed
