"""Which machines an island of several is made of: those that give room to this node's job, asked whenever steps begin.

The owner divides the blocks among as few machines as hold them, itself first and then near ones, as evenly as their
room allows. What a machine gives is decided by its user, as for fine-tuning (`app.training.consent`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import trio

from app.core.errors import AppError, RecordError
from app.core.network import Network
from app.core.span import Span
from app.core.units import format_size
from app.routing.route import Hop, Route
from app.training.consent import ask_room
from app.training.trainer import OwnServer, RouteFinder
from p2p.errors import P2PError

log = logging.getLogger("shoal.rounds")

ASK_S = 5.0
ASK_AGAIN_S = 5.0
MOST_ASKED = 64  # members
NEAR_S = 0.005  # round trips of machines that are equally near
_MOST_ROOM_BYTES = 2**60

Needs = Callable[[int, int], int]  # (blocks, micro-batches under way) -> bytes


class Room(NamedTuple):
    """What a machine gives to an island."""

    peer: str
    room_bytes: int
    rtt_s: float


class NoMachines(AppError):
    """The machines that would train together do not have room for all blocks of a model."""


@dataclass(frozen=True)
class Helpers:
    """Who may help this node's islands, and this node as one of their machines."""

    network: Network
    members: Callable[[], Sequence[str]]
    own_room: Callable[[], Awaitable[int]]
    own_server: OwnServer


def divided_blocks(blocks: int, rooms: Sequence[Room], needs: Needs) -> Route | None:
    """Return which machine trains which blocks: the fewest machines, the first of these; None if they do not suffice.

    The blocks are divided evenly as far as there is room. A machine keeps one more micro-batch than there are machines.
    """
    needed = cache(needs)  # or many small rooms would take a second of the event loop
    for count in range(1, len(rooms) + 1):
        capacities = {one.peer: _capacity(blocks, one.room_bytes, needed, count + 1) for one in rooms}
        # python's sort is stable: of machines with as much room the first ones are chosen, and the order stays
        chosen = {one.peer for one in sorted(rooms, key=lambda one: -capacities[one.peer])[:count]}
        peers = [one.peer for one in rooms if one.peer in chosen]
        if sum(capacities[peer] for peer in peers) < blocks:
            continue
        taken = dict.fromkeys(peers, 0)
        for _ in range(blocks):
            taken[min((p for p in peers if taken[p] < capacities[p]), key=lambda peer: taken[peer])] += 1
        route, start = list[Hop](), 0
        for peer, some in taken.items():
            if some:
                route.append(Hop(peer, Span(start, start + some)))
                start += some
        return tuple(route)
    return None


def _capacity(blocks: int, room_bytes: int, needs: Needs, under_way: int) -> int:
    low, high = 0, blocks  # needs grow with the number of blocks
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needs(middle, under_way) <= room_bytes else (low, middle - 1)
    return low


def machine_routes(helpers: Helpers, blocks: int, needs: Needs) -> RouteFinder:
    """Return a function that asks members for room and divides the blocks; it raises `NoMachines` if it is too little.

    What a member answered holds for some seconds, whomever the next question avoids, but only until there is a route.
    """
    known, again_at = dict[str, Room](), -math.inf

    async def find(avoid: frozenset[str]) -> Route:
        nonlocal again_at
        if trio.current_time() >= again_at:
            known.clear()
        is_first = not known
        rooms = await ask_rooms(helpers, avoid, known)
        if is_first:
            again_at = trio.current_time() + ASK_AGAIN_S
        route = divided_blocks(blocks, rooms, needs)
        if route is None:
            offered = ", ".join(f"{one.peer} {format_size(one.room_bytes)}" for one in rooms) or "nobody anything"
            raise NoMachines(
                f"the {blocks} blocks take {format_size(needs(blocks, 2))} in training, but members offer too little: "
                f"{offered}; they can set train and train_memory"
            )
        known.clear()  # whoever needs another route has lost one of these
        return route

    return find


async def ask_rooms(helpers: Helpers, avoid: frozenset[str], known: dict[str, Room]) -> list[Room]:
    """Return who gives how much to a job of this node: this node first, then the nearest.

    Whose answer is `known` is not asked again; the answers of the others are added.
    """
    network = helpers.network
    rtts = {link.peer: link.rtt_s for link in network.links()}

    async def ask(peer: str) -> None:
        room_bytes = 0  # if it is gone, or of an older version
        try:
            answer = await ask_room(network, peer, timeout_s=ASK_S)
            room_bytes = answer.integer("bytes", 0, _MOST_ROOM_BYTES)
        except (P2PError, RecordError) as error:
            log.debug("%s offers no room: %s", peer, error)
        known[peer] = Room(peer, room_bytes, rtts.get(peer) or ASK_S)

    async def look_here() -> None:
        known[network.peer_id] = Room(network.peer_id, await helpers.own_room(), 0.0)

    asked = [peer for peer in helpers.members() if peer not in avoid][:MOST_ASKED]
    async with trio.open_nursery() as nursery:
        if network.peer_id not in known:
            nursery.start_soon(look_here)
        for peer in asked:
            if peer not in known:
                nursery.start_soon(ask, peer)
    useful = [one for peer in (network.peer_id, *asked) if (one := known[peer]).room_bytes and peer not in avoid]
    order = {one.peer: (one.peer != network.peer_id, int(one.rtt_s / NEAR_S), -one.room_bytes) for one in useful}
    return sorted(useful, key=lambda one: (*order[one.peer], one.peer))
