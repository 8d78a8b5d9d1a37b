"""Which peers a session goes through: the cheapest path over what members announce and what was measured. Pure.

Cost is seconds a token: links one way, compute through the blocks, and the prompt's share. Whom to avoid, and for how
long, is kept in `Bans`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.errors import AppError
from app.records import Announcement
from app.span import Span

HOP_S = 0.001  # what a hop costs besides its link and its blocks
UNKNOWN_LINK_S = 0.05  # one way, where nothing was measured
SLOWEST_TOKENS_PER_S = 0.1  # for members that announce no figure

LinkSeconds = Callable[[str, str], float]  # one way between two peers; "" is the asker


class Hop(NamedTuple):
    """One node's share of a route."""

    peer: str
    span: Span


Route = tuple[Hop, ...]


class NoRoute(AppError):
    """Some block is served by nobody that can be used now."""

    def __init__(self, block: int, why: str = "", *, busy: bool = False) -> None:
        super().__init__(f"no route: nobody serves block {block}{why or ' now'}; wait for a member to take it over")
        self.block = block
        self.busy = busy  # its holders are well, but have no room


@dataclass(frozen=True)
class Demand:
    """What a session asks of its route."""

    wanted: Span
    tokens: int  # cache room at each hop
    prompt_tokens: int = 0
    origin: str = ""  # who sends to the first hop
    target: str = ""  # whom the last hop answers


class _Path(NamedTuple):
    cost_s: float
    peer: str
    begin: int  # the first block of this peer's share
    before: _Path | None


def find_route(
    members: Iterable[Announcement], demand: Demand, link_s: LinkSeconds, *, avoid: Collection[str] = ()
) -> Route:
    """The cheapest route over members that serve; those without room only where there is no other. Raises `NoRoute`."""
    usable = [m for m in members if m.serves and m.peer not in avoid]
    roomy = [m for m in usable if m.kv_free_tokens >= demand.tokens]
    try:
        return _cheapest(roomy, demand, link_s)
    except NoRoute:
        return _cheapest(usable, demand, link_s)


def block_seconds(member: Announcement, prompt_tokens: int = 0, reply_tokens: int = 1) -> float:
    """Seconds that one token of a reply spends in one block of this member, its share of the prompt included."""
    assert member.span is not None
    decode_s = 1 / max(member.decode_tokens_per_s, SLOWEST_TOKENS_PER_S)
    prompt_s = prompt_tokens / max(member.prefill_tokens_per_s, member.decode_tokens_per_s, SLOWEST_TOKENS_PER_S)
    return (decode_s + prompt_s / max(reply_tokens, 1)) / len(member.span)


def _cheapest(members: Sequence[Announcement], demand: Demand, link_s: LinkSeconds) -> Route:
    reply_tokens = max(demand.tokens - demand.prompt_tokens, 1)
    block_s = {m.peer: block_seconds(m, demand.prompt_tokens, reply_tokens) for m in members}
    paths: dict[str, _Path] = {}  # the cheapest ways to have run all blocks so far, by the last peer
    for block in demand.wanted.blocks():
        following: dict[str, _Path] = {}
        for member in members:
            assert member.span is not None
            if block not in member.span:
                continue
            ways = [_moved(path, member.peer, block, link_s) for path in paths.values()]
            if block == demand.wanted.start:
                ways.append(_Path(link_s(demand.origin, member.peer) + HOP_S, member.peer, block, None))
            if ways:
                best = min(ways, key=lambda path: (path.cost_s, path.begin))
                following[member.peer] = best._replace(cost_s=best.cost_s + block_s[member.peer])
        if not following:
            raise NoRoute(block)
        paths = following
    last = min(paths.values(), key=lambda path: (path.cost_s + link_s(path.peer, demand.target), path.peer))
    return _as_route(last, demand.wanted.stop)


def _moved(path: _Path, peer: str, block: int, link_s: LinkSeconds) -> _Path:
    if path.peer == peer:
        return path
    return _Path(path.cost_s + link_s(path.peer, peer) + HOP_S, peer, block, path)


def _as_route(path: _Path | None, stop: int) -> Route:
    hops: list[Hop] = []
    while path is not None:
        hops.insert(0, Hop(path.peer, Span(path.begin, stop)))
        stop, path = path.begin, path.before
    # A session is known by one id at each peer, so a peer that comes twice runs what lies between as well.
    for index, hop in enumerate(hops):
        again = next((i for i in range(len(hops) - 1, index, -1) if hops[i].peer == hop.peer), None)
        if again is not None:
            hops[index : again + 1] = [Hop(hop.peer, Span(hop.span.start, hops[again].span.stop))]
            break
    return tuple(hops)


def mend_route(
    route: Route, members: Sequence[Announcement], demand: Demand, link_s: LinkSeconds, *, avoid: Collection[str]
) -> Route:
    """The route with the hops in `avoid` replaced and the others kept where that is possible, else a new one."""
    kept = {hop.peer for hop in route if hop.peer not in avoid}
    mended: list[Hop] = []
    index = 0
    try:
        while index < len(route):
            if route[index].peer in kept:
                mended.append(route[index])
                index += 1
                continue
            gap = index
            while index < len(route) and route[index].peer not in kept:
                index += 1
            span = Span(route[gap].span.start, route[index - 1].span.stop)
            origin = mended[-1].peer if mended else ""
            target = route[index].peer if index < len(route) else ""
            part = Demand(span, demand.tokens, demand.prompt_tokens, origin, target)
            others = {hop.peer for hop in mended} | kept | set(avoid)
            mended += find_route(members, part, link_s, avoid=others)
        return tuple(mended)
    except NoRoute:
        return find_route(members, demand, link_s, avoid=avoid)


class Bans:
    """Peers to avoid for a while: longer each time, forgiven by success."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 300.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._bans: dict[str, tuple[int, float, str]] = {}  # peer -> (how often, until, why)
        self._busy: set[str] = set()

    def ban(self, peer: str, now: float, why: str, *, brief: bool = False) -> None:
        """Avoid a peer; `brief` where it is busy rather than broken."""
        times = self._bans.get(peer, (0, 0.0, ""))[0]
        (self._busy.add if brief else self._busy.discard)(peer)
        first_s = self._first_s / 2 if brief else self._first_s
        self._bans[peer] = (times + 1, now + min(first_s * 2**times, self._longest_s), why)

    def forgive(self, peer: str) -> None:
        """It worked: forget the past."""
        self._bans.pop(peer, None)
        self._busy.discard(peer)

    def is_busy(self, peer: str) -> bool:
        """Whether it was last avoided for want of room."""
        return peer in self._busy

    def active(self, now: float) -> dict[str, str]:
        """Who is avoided now, and why."""
        return {peer: why for peer, (_, until, why) in self._bans.items() if now < until}
