"""The cost of a route in seconds per token, for all who search, compare or learn from routes. Pure.

Each hop costs its link, an entry (fixed overhead, waiting for a busy device, low trust, the bytes that it receives and
sends) and the compute of its blocks. A prompt's tokens are spread over those of the reply. Link times and speeds are in
`app.routing.estimates`, the extra cost of low trust in `app.routing.trust`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median_high

from app.core.pieces import CHUNK, Pieces, at_once, by_chunks
from app.routing.route import Hop, KnownCosts, LinkSeconds, ReadingPace, Route, RouteRequest
from app.swarm.records import SLOWEST_TOKENS_PER_S, Announcement

HOP_S = 0.001  # overhead of a hop, besides its link and its blocks, until measured
UNKNOWN_LINK_S = 0.05  # one way, assumed until measured
BELIEVED_TIMES = 8.0  # an unmeasured claim counts for at most this multiple of the median speed
ENOUGH_HOMES = 3  # with measured members: then claims count up to the fastest of these
ASSUMED_BYTES_PER_S = 12.5e6  # of a connection that nobody measured: 100 Mbit/s
MOST_BELIEVED_BYTES_PER_S = 125e6  # a claim counts for at most this: faster links make no difference to a route
BUSIEST = 0.95  # cap on the announced busy share, so that the waiting time stays finite
BUSIEST_READING = 0.875  # the same for prompts, whose rows go along in the steps of others: 8 times as long at most


def route_seconds(
    route: Route, members: Sequence[Announcement], request: RouteRequest, link_s: LinkSeconds, known: KnownCosts
) -> float:
    """Seconds that one token of a reply takes over a route whose hops are among the members."""
    links_s = links_seconds(route, link_s, request.origin, request.target)
    overhead_s = overhead_seconds(route, links_s, entry_seconds(members, known, request))
    return overhead_s + compute_seconds(route, believed_seconds(members, request, known))


def links_seconds(route: Route, link_s: LinkSeconds, origin: str = "", target: str = "") -> float:
    """Seconds that one token spends on the links of a route, from the asker and back unless the ends are others."""
    return sum(link_s(a, b) for a, b in pairwise([origin, *(hop.peer for hop in route), target]))


def overhead_seconds(route: Route, links_s: float, entry_s: Mapping[str, float]) -> float:
    """Seconds per token of a route besides the compute of its blocks: its links, and the entry of each hop."""
    return links_s + sum(entry_s[hop.peer] for hop in route)


def compute_seconds(route: Route, block_s: Mapping[str, float]) -> float:
    """Seconds per token that the blocks of a route take."""
    return sum(len(hop.span) * block_s[hop.peer] for hop in route)


def entry_seconds(members: Sequence[Announcement], known: KnownCosts, request: RouteRequest) -> dict[str, float]:
    """Seconds per token that each member adds as a hop, besides its link and its blocks."""
    unknown_s, bytes_per_token = 2 / ASSUMED_BYTES_PER_S, request.bytes_per_token
    penalty_s, byte_s = known.penalty_s.get, known.byte_s.get
    return {
        m.peer: known.hop_s.get(m.peer, HOP_S)
        + (wait_seconds(m) if m.busy else 0.0)
        + penalty_s(m.peer, 0.0)
        + bytes_per_token * byte_s(m.peer, unknown_s)
        for m in members
    }


# A member that is a last resort counts as so many times as slow, which is more than a claim that was not measured is
# believed: so others are used unless they are far slower, as measured.
LAST_RESORT_TIMES = 12.0


def is_last_resort(member: Announcement, request: RouteRequest) -> bool:
    """True if a route uses a member only for blocks that others serve far slower, or not, or have no room for.

    It says that it rounded its weights to 4 bits. That changes results most, and an audit by other formats cannot tell
    it from a lie. This node and peers that the user trusts are used like others.
    """
    return request.finest_first and member.is_coarse and member.peer not in request.privacy.trusted


def last_resort_blocks(route: Route, serving: Mapping[str, Announcement], request: RouteRequest) -> int:
    """Number of blocks that a route leaves to members that are a last resort."""
    known = [hop for hop in route if hop.peer in serving]
    return sum(len(hop.span) for hop in known if is_last_resort(serving[hop.peer], request))


def prompt_block_seconds(member: Announcement) -> float:
    """Seconds that one token of a prompt takes in one block of this member, beside what keeps its device busy.

    Those who choose it count as many as those who wait for it: else to call itself busy would cost a peer nothing, and
    win it time.
    """
    return member.prefill_block_s / (1 - min(member.busy, BUSIEST_READING))


def wait_seconds(member: Announcement) -> float:
    """Mean seconds that a token waits for the device: M/D/1 queue with the announced busy share as its load."""
    busy = min(member.busy, BUSIEST)
    return busy / (1 - busy) / 2 / max(member.decode_tokens_per_s, SLOWEST_TOKENS_PER_S)


def believed_seconds(members: Sequence[Announcement], request: RouteRequest, known: KnownCosts) -> dict[str, float]:
    """Seconds per token and block of each member: measured if known, else its claim, limited by `BELIEVED_TIMES`.

    The members of `known.to_try` are limited by the fastest that was measured, and not by the median.
    """
    return at_once(believed_in_pieces(members, request, known))


def believed_in_pieces(
    members: Sequence[Announcement], request: RouteRequest, known: KnownCosts
) -> Pieces[dict[str, float]]:
    """Compute `believed_seconds` in pieces."""
    prompt = request.prompt_tokens / max(request.tokens - request.prompt_tokens, 1)  # for each token of the reply
    claimed = yield from by_chunks(
        lambda some: {m.peer: m.decode_block_s + prompt * prompt_block_seconds(m) for m in some}, members
    )
    # Only decode steps are measured; the prompt's share is scaled by the same factor.
    measured = yield from by_chunks(
        lambda some: {
            m.peer: known.block_s[m.peer] * claimed[m.peer] / m.decode_block_s for m in some if m.peer in known.block_s
        },
        members,
    )
    of_claims = yield from _voices(claimed, known.homes)
    least_s = _least_seconds(of_claims, (yield from _voices(measured, known.homes)))
    believed = yield from by_chunks(lambda some: _at_least(least_s, some), [*claimed.items()])
    fastest_s = min(least_s, min(measured.values(), default=math.inf) / BELIEVED_TIMES)
    believed |= _at_least(fastest_s, [(peer, claimed[peer]) for peer in known.to_try if peer in claimed])
    return believed | measured


def hidden_by_others(members: Sequence[Announcement], request: RouteRequest, known: KnownCosts) -> Pieces[list[str]]:
    """Return the members that would count as faster if they were tried: that others are slow hides them."""
    believed = yield from believed_in_pieces(members, request, known)
    tried = yield from believed_in_pieces(members, request, replace(known, to_try=believed.keys()))
    return [peer for peer in believed if tried[peer] < believed[peer]]


def reading_pace(hop: Hop, member: Announcement, measured_s: float | None) -> ReadingPace:
    """How fast a hop reads beside what keeps its device busy: by its own word, or slower if `measured_s` says so.

    `measured_s` are seconds per token and block.
    """
    block_s = max(member.decode_block_s, measured_s or 0.0)
    step_s = member.decode_block_s / (1 - min(member.busy, BUSIEST_READING))
    times, blocks = block_s / member.decode_block_s, len(hop.span)
    return ReadingPace(blocks * step_s, blocks * prompt_block_seconds(member), times, block_s)


def believed_prompt_seconds(members: Sequence[Announcement]) -> dict[str, float]:
    """Seconds per token of a prompt and block of each member, by its claim, limited by `BELIEVED_TIMES`."""
    return limited({m.peer: m.prefill_block_s for m in members if m.span is not None})


def limited(claimed: Mapping[str, float]) -> dict[str, float]:
    """Return claimed seconds, none of them less than the median over `BELIEVED_TIMES`."""
    return _at_least(_least_seconds([*claimed.values()], []), claimed.items())


def _least_seconds(of_claims: Sequence[float], of_measured: Sequence[float]) -> float:
    """Return the least seconds that are believed of a member that was not measured, by what homes claim and take.

    That follows from the median of those measured, or of all claims if it is faster: neither who claims a crawl nor a
    few slow hops then make the others seem slow. Each home has one voice. Where enough were measured, claims count up
    to the fastest of these: whoever is many cannot lift the limit for a liar.
    """
    usual_s = min((median_high(voices) for voices in (of_measured, of_claims) if voices), default=0.0)
    if len(of_measured) >= ENOUGH_HOMES:
        usual_s = max(usual_s, min(of_measured))
    return usual_s / BELIEVED_TIMES


def _voices(seconds: Mapping[str, float], homes: Mapping[str, str]) -> Pieces[list[float]]:
    """Return the median of each home."""
    of_home: defaultdict[str, list[float]] = defaultdict(list)
    for number, (peer, one_s) in enumerate(seconds.items()):
        of_home[homes.get(peer, peer)].append(one_s)
        if number % CHUNK == CHUNK - 1:
            yield
    yield
    return [median_high(several) for several in of_home.values()]


def _at_least(least_s: float, claimed: Iterable[tuple[str, float]]) -> dict[str, float]:
    return {peer: seconds if seconds > least_s else least_s for peer, seconds in claimed}
