"""The number format of hidden states on each link of a route. Pure.

Rows are `int8` (`engine.int8_rows`, about a quarter of float32's bytes) where a link is known to be slower than
`SLOW_BYTES_PER_S` and both ends understand them; everywhere else they stay what the sender computes in. Rounding
changes numbers a little, so what a session rounds must not change while it lasts: formats belong to the boundaries
between blocks, and a route that takes the place of another one rounds at the same boundaries and at no new ones. A
reply whose hop is replaced by others for the same blocks so has the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from app.routing.route import Route
from app.session.frame import INT8

SLOW_BYTES_PER_S = 12.5e6  # 100 Mbit/s
Wires = Mapping[int, str]  # the block before which rows are in a format other than the sender's own -> that format
LinkRate = Callable[[str, str], float | None]  # bytes a second from one peer to another; "" is the asker


class Crossing(NamedTuple):
    """A link of a route: its ends, and the block whose input crosses it; an empty peer id stands for the asker."""

    block: int
    sender: str
    receiver: str


def crossings(route: Route) -> Iterator[Crossing]:
    """The links of a route, from the asker and back to it."""
    blocks = [route[0].span.start, *(hop.span.stop for hop in route)]
    for block, (sender, receiver) in zip(blocks, pairwise(["", *(hop.peer for hop in route), ""]), strict=True):
        yield Crossing(block, sender, receiver)


def choose_wires(route: Route, rate: LinkRate, able: Collection[str]) -> Wires:
    """Return the formats for a new session; `able` are the peers that understand `int8`, as this node does."""

    def is_slow(link: Crossing) -> bool:
        bytes_per_s = rate(link.sender, link.receiver)
        return bytes_per_s is not None and bytes_per_s < SLOW_BYTES_PER_S

    return {link.block: INT8 for link in crossings(route) if _is_able(link, able) and is_slow(link)}


def keep_wires(route: Route, wires: Wires, able: Collection[str]) -> Wires:
    """Return the formats for another route of a session that has begun with `wires`."""
    return {link.block: wires[link.block] for link in crossings(route) if link.block in wires and _is_able(link, able)}


def _is_able(link: Crossing, able: Collection[str]) -> bool:
    return {link.sender, link.receiver} <= {"", *able}
