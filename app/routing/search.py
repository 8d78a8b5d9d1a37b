"""Which peers a session goes through: the cheapest path over what members announce and what was measured. Pure.

Cost is seconds a token: links one way, compute through the blocks, the wait for a busy device, and the prompt's share.
What the asker measured itself counts for more than what a member claims, and a claim far above all others' is not
believed. Blocks that shall stay private go to trusted peers alone. Whom to avoid, and for how long, is kept in `Bans`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high
from typing import NamedTuple

from app.core.errors import AppError
from app.core.reasons import Reason, because
from app.core.span import Span
from app.swarm.records import Announcement

HOP_S = 0.001  # what a hop costs besides its link and its blocks
UNKNOWN_LINK_S = 0.05  # one way, where nothing was measured
SLOWEST_TOKENS_PER_S = 0.1  # for members that announce no figure
BELIEVED_TIMES = 8.0  # a claim counts for at most so many times the usual speed, until it is measured
BUSIEST = 0.95
MAX_PRIVATE_BLOCKS = 4096  # that anybody may ask for at either end

FULL = "peer_full"
_RESTING = {  # of a member that does not serve, by its state
    "paused": ("peer_paused", "its owner has paused it"),
    "draining": ("peer_draining", "it is about to leave"),
    "joining": ("peer_loading", "it is choosing its blocks"),
    "fetching": ("peer_loading", "it is fetching its blocks"),
    "loading": ("peer_loading", "it is loading its blocks"),
}

LinkSeconds = Callable[[str, str], float]  # one way between two peers; "" is the asker


class Hop(NamedTuple):
    """One node's share of a route."""

    peer: str
    span: Span


Route = tuple[Hop, ...]


class NoRoute(AppError):
    """Some block is served by nobody that can be used now."""

    code = "no_route"

    def __init__(
        self, block: int, why: str = "", *, busy: bool = False, code: str | None = None, peers: Iterable[str] = ()
    ) -> None:
        text = f"no route: nobody serves block {block}{why or ' now; wait for a member to take it over'}"
        super().__init__(text, code="busy" if busy else code, peers=tuple(peers))
        self.block = block
        self.busy = busy  # its holders are well, but have no room


@dataclass(frozen=True)
class Privacy:
    """Which blocks may run only on trusted peers: the first and the last, where a text can be told from the states."""

    edge: int = 0  # so many at either end
    blocks: int = 0  # of the whole model
    trusted: frozenset[str] = frozenset()

    def allows(self, peer: str, block: int) -> bool:
        """Whether this peer may run this block."""
        return self.edge <= block < self.blocks - self.edge or not self.edge or peer in self.trusted


@dataclass(frozen=True)
class Demand:
    """What a session asks of its route."""

    wanted: Span
    tokens: int  # cache room at each hop
    prompt_tokens: int = 0
    origin: str = ""  # who sends to the first hop
    target: str = ""  # whom the last hop answers
    privacy: Privacy = Privacy()


@dataclass(frozen=True)
class Known:
    """What an asker knows by itself, whatever members claim."""

    block_s: Mapping[str, float] = field(default_factory=dict)  # measured: one token through one block of a peer
    penalty_s: Mapping[str, float] = field(default_factory=dict)  # what it would pay to go without a peer


class _Path(NamedTuple):
    cost_s: float
    peer: str
    begin: int  # the first block of this peer's share
    before: _Path | None


def find_route(
    members: Iterable[Announcement],
    demand: Demand,
    link_s: LinkSeconds,
    *,
    avoid: Collection[str] = (),
    known: Known | None = None,
) -> Route:
    """The cheapest route over members that serve; those without room only where there is no other. Raises `NoRoute`."""
    judged = [(m, why_unused(m, demand)) for m in members if m.peer not in avoid]
    known = known or Known()
    try:
        return _cheapest([m for m, why in judged if why is None], demand, link_s, known)
    except NoRoute:
        usable = [m for m, why in judged if why is None or why.code == FULL]
        return _cheapest(usable, demand, link_s, known)


def why_unused(member: Announcement, demand: Demand) -> Reason | None:
    """Why no session of this demand goes through a member, by what it says of itself; None where one may."""
    peer, span = member.peer, member.span
    if not member.serves or span is None:
        code, text = _RESTING.get(member.state, ("peer_client", "it hosts no blocks"))
        return because(code, text, peer)
    if not any(demand.privacy.allows(peer, block) for block in span.blocks()):
        return because("peer_private", f"blocks {span} go to trusted peers alone", peer)
    if member.kv_free_tokens < demand.tokens:
        return because(FULL, f"it has room for {member.kv_free_tokens} tokens, {demand.tokens} are needed", peer)
    return None


def block_seconds(member: Announcement, prompt_tokens: int = 0, reply_tokens: int = 1) -> float:
    """Seconds that one token of a reply spends in one block of this member, its share of the prompt included."""
    assert member.span is not None
    decode_s = 1 / max(member.decode_tokens_per_s, SLOWEST_TOKENS_PER_S)
    prompt_s = prompt_tokens / max(member.prefill_tokens_per_s, member.decode_tokens_per_s, SLOWEST_TOKENS_PER_S)
    return (decode_s + prompt_s / max(reply_tokens, 1)) / len(member.span)


def wait_seconds(member: Announcement) -> float:
    """Seconds that a token waits on average for a device that is busy so often."""
    busy = min(member.busy, BUSIEST)
    return busy / (1 - busy) / 2 / max(member.decode_tokens_per_s, SLOWEST_TOKENS_PER_S)


def believed_seconds(members: Sequence[Announcement], demand: Demand, known: Known) -> dict[str, float]:
    """Seconds a token and block of each member: what was measured, else what is claimed as far as it is credible."""
    reply_tokens = max(demand.tokens - demand.prompt_tokens, 1)
    claimed = {m.peer: block_seconds(m, demand.prompt_tokens, reply_tokens) for m in members}
    if not claimed:
        return claimed
    least_s = median_high(claimed.values()) / BELIEVED_TIMES
    believed = {peer: max(seconds, least_s) for peer, seconds in claimed.items()}
    for member in members:
        measured_s = known.block_s.get(member.peer)
        if measured_s is not None:
            # Only single tokens are measured; the prompt's share grows by the same factor.
            believed[member.peer] = measured_s * claimed[member.peer] / block_seconds(member)
    return believed


def _cheapest(members: Sequence[Announcement], demand: Demand, link_s: LinkSeconds, known: Known) -> Route:
    block_s = believed_seconds(members, demand, known)
    enter_s = {m.peer: HOP_S + wait_seconds(m) + known.penalty_s.get(m.peer, 0.0) for m in members}
    paths: dict[str, _Path] = {}  # the cheapest ways to have run all blocks so far, by the last peer
    for block in demand.wanted.blocks():
        following: dict[str, _Path] = {}
        holders = [m.peer for m in members if m.span is not None and block in m.span]
        for peer in holders:
            if not demand.privacy.allows(peer, block):
                continue
            ways = [_moved(path, peer, block, link_s, enter_s[peer]) for path in paths.values()]
            if block == demand.wanted.start:
                ways.append(_Path(link_s(demand.origin, peer) + enter_s[peer], peer, block, None))
            if ways:
                best = min(ways, key=lambda path: (path.cost_s, path.begin))
                following[peer] = best._replace(cost_s=best.cost_s + block_s[peer])
        if not following:
            raise _missing(block, demand.privacy)
        paths = following
    last = min(paths.values(), key=lambda path: (path.cost_s + link_s(path.peer, demand.target), path.peer))
    return _as_route(last, demand.wanted.stop)


def _missing(block: int, privacy: Privacy) -> NoRoute:
    if privacy.allows("", block):
        return NoRoute(block)
    return NoRoute(
        block,
        f" that is trusted, and the first and last {privacy.edge} blocks shall stay private: host it here, name one of "
        "its holders with `shoal config set trusted`, or lower private_blocks",
        code="private_blocks",
    )


def _moved(path: _Path, peer: str, block: int, link_s: LinkSeconds, enter_s: float) -> _Path:
    if path.peer == peer:
        return path
    return _Path(path.cost_s + link_s(path.peer, peer) + enter_s, peer, block, path)


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
    route: Route,
    members: Sequence[Announcement],
    demand: Demand,
    link_s: LinkSeconds,
    *,
    avoid: Collection[str],
    known: Known | None = None,
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
            part = replace(demand, wanted=span, origin=origin, target=target)
            others = {hop.peer for hop in mended} | kept | set(avoid)
            mended += find_route(members, part, link_s, avoid=others, known=known)
        return tuple(mended)
    except NoRoute:
        return find_route(members, demand, link_s, avoid=avoid, known=known)


class Bans:
    """Peers to avoid for a while: longer each time, forgiven by success."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 300.0) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._bans: dict[str, tuple[int, float, Reason | None]] = {}  # peer -> (how often, until, why)
        self._busy: set[str] = set()

    def ban(self, peer: str, now: float, why: Reason, *, brief: bool = False) -> bool:
        """Avoid a peer, `brief` where it is busy rather than broken; False where it is avoided already.

        All sessions over a hop tell of the same failure, which counts once.
        """
        times, until, _ = self._bans.get(peer, (0, float("-inf"), None))
        if now < until and (brief or peer not in self._busy):
            return False
        (self._busy.add if brief else self._busy.discard)(peer)
        first_s = self._first_s / 2 if brief else self._first_s
        self._bans[peer] = (times + 1, now + min(first_s * 2**times, self._longest_s), why)
        return True

    def forgive(self, peer: str) -> None:
        """It worked: forget the past."""
        self._bans.pop(peer, None)
        self._busy.discard(peer)

    def is_busy(self, peer: str) -> bool:
        """Whether it was last avoided for want of room."""
        return peer in self._busy

    def active(self, now: float) -> dict[str, Reason]:
        """Who is avoided now, and why."""
        return {peer: why for peer, (_, until, why) in self._bans.items() if why is not None and now < until}
