"""Chooses the links to close so that a node keeps few of them open. Pure; the caller closes them.

An idle link costs both nodes a socket, heartbeats and one of a limited number of connections; reopening it costs a
handshake. So up to `ENOUGH_LINKS` stay open; beyond that the links used longest ago are closed, except those in use
and those that this node asked to keep.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

ENOUGH_LINKS = 40


@dataclass(frozen=True, slots=True)
class LinkUse:
    """The last use of a link (on trio's clock), and whether a call or stream is active on it."""

    peer: str
    used_at: float
    busy: bool


def surplus(links: Iterable[LinkUse], kept: Container[str], enough: int = ENOUGH_LINKS) -> list[str]:
    """Return the peers whose links should be closed, the longest unused first; `kept` peers are never among them."""
    links = list(links)
    idle = sorted((use for use in links if not use.busy and use.peer not in kept), key=lambda use: use.used_at)
    return [use.peer for use in idle[: max(0, len(links) - enough)]]
