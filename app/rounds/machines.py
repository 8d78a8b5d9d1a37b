"""Which machines an island of several is made of: those that give room to this node's job, asked whenever steps begin.

The owner divides the blocks among as few machines as hold them, itself first and then near ones, as evenly as their
room allows. What a machine gives is decided by its user, as for fine-tuning (`app.training.consent`), and said only
when it is asked. So members are asked in batches until they offer enough: those that have helped before and trusted
ones first, the others in an order that is drawn anew each time, so that nobody is always asked too late.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
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
ASKED_AT_ONCE = 64  # members
SEARCH_S = 20.0  # for all members that are asked: silent ones make a search no longer
ASK_AGAIN_S, ASK_AGAIN_MOST_S = 5.0, 60.0  # after `ASKED_AT_ONCE` members or fewer; and however many they were
MOST_ROOMS = 64  # that blocks are divided among; to try more takes the event loop too long
_MOST_HELPED = 16  # machines of the latest routes
_NAMED = 8  # rooms, in an error
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
    members: Callable[[], Sequence[str]]  # that do not announce that they train for nobody
    own_room: Callable[[], Awaitable[int]]
    own_server: OwnServer
    is_trusted: Callable[[str], bool] = lambda peer: False  # by this node's user


def divided_blocks(blocks: int, rooms: Sequence[Room], needs: Needs) -> Route | None:
    """Return which machine trains which blocks: the fewest machines, the first of these; None if they do not suffice.

    The blocks are divided evenly as far as there is room. A machine keeps one more micro-batch than there are machines.
    """
    needed = cache(needs)  # or many small rooms would take a second of the event loop
    for count in range(1, min(blocks, len(rooms)) + 1):
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


def machine_routes(helpers: Helpers, blocks: int, needs: Needs, helped: Sequence[str] = ()) -> RouteFinder:
    """Return a function that asks members for room and divides the blocks; it raises `NoMachines` if it is too little.

    `helped` are machines of earlier routes, which are asked first. What a member answered holds for some seconds,
    longer after many were asked, whomever the next question avoids, but only until there is a route.
    """
    known, again_at = dict[str, Room](), -math.inf
    latest = list(helped)[:_MOST_HELPED]

    async def find(avoid: frozenset[str]) -> Route:
        nonlocal again_at
        if trio.current_time() >= again_at:
            known.clear()
        is_first, route = not known, None

        def suffices(rooms: Sequence[Room]) -> bool:
            nonlocal route
            route = divided_blocks(blocks, rooms, needs)
            return route is not None

        rooms = await ask_rooms(helpers, avoid, known, latest, suffices)
        if is_first:
            again_s = ASK_AGAIN_S * max(1.0, len(known) / ASKED_AT_ONCE)
            again_at = trio.current_time() + min(again_s, ASK_AGAIN_MOST_S)
        if route is None:
            not_asked = len({*helpers.members()} - avoid - known.keys())
            raise NoMachines(
                f"the {blocks} blocks take {format_size(needs(blocks, 2))} in training, but members offer too little: "
                f"{_offered(rooms)}; they can set train and train_memory"
                + (f"; {not_asked} could not be asked in time" if not_asked else "")
            )
        known.clear()  # whoever needs another route has lost one of these
        chosen = [hop.peer for hop in route]
        latest[:] = [*chosen, *(peer for peer in latest if peer not in chosen)][:_MOST_HELPED]
        return route

    return find


def _offered(rooms: Sequence[Room]) -> str:
    named = ", ".join(f"{one.peer} {format_size(one.room_bytes)}" for one in rooms[:_NAMED])
    return f"{named} and {len(rooms) - _NAMED} more" if len(rooms) > _NAMED else named or "nobody anything"


async def ask_rooms(
    helpers: Helpers,
    avoid: frozenset[str],
    known: dict[str, Room],
    helped: Collection[str] = (),
    suffices: Callable[[Sequence[Room]], bool] = lambda rooms: False,
) -> list[Room]:
    """Return who gives how much to a job of this node: this node first, then the nearest.

    Members are asked in batches until what they give `suffices`, nobody is left or `SEARCH_S` are over. Whose answer is
    `known` is not asked again; the answers of the others are added.
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

    if network.peer_id not in known:
        known[network.peer_id] = Room(network.peer_id, await helpers.own_room(), 0.0)
    members = [peer for peer in helpers.members() if peer not in avoid]
    first = {peer for peer in members if peer in helped or helpers.is_trusted(peer)}
    left = [peer for peer in members if peer not in known]
    random.shuffle(left)
    left.sort(key=lambda peer: (peer not in helped, peer not in first))
    until = trio.current_time() + SEARCH_S
    while True:
        there = [known[peer] for peer in (network.peer_id, *members) if peer in known and peer not in avoid]
        rooms = _nearest_first(_useful(there, {network.peer_id, *first}), network.peer_id)
        if suffices(rooms) or not left or trio.current_time() >= until:
            return rooms
        batch, left = left[:ASKED_AT_ONCE], left[ASKED_AT_ONCE:]
        with trio.move_on_at(until):
            async with trio.open_nursery() as nursery:
                for peer in batch:
                    nursery.start_soon(ask, peer)


def _useful(rooms: Sequence[Room], first: Collection[str]) -> list[Room]:
    """Those that give anything; of too many, these first ones and then the largest."""
    some = [one for one in rooms if one.room_bytes]
    return sorted(some, key=lambda one: (one.peer not in first, -one.room_bytes))[:MOST_ROOMS]


def _nearest_first(rooms: Sequence[Room], here: str) -> list[Room]:
    return sorted(rooms, key=lambda one: (one.peer != here, int(one.rtt_s / NEAR_S), -one.room_bytes, one.peer))
