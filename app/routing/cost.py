"""The seconds that a hop costs a token: computing, waiting, and the link to it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high

from app.routing.route import KnownCosts, RouteRequest
from app.swarm.records import Announcement

HOP_S = 0.001  # what a hop costs besides its link and its blocks
UNKNOWN_LINK_S = 0.05  # one way, where nothing was measured
SLOWEST_TOKENS_PER_S = 0.1  # for members that announce no figure
BELIEVED_TIMES = 8.0  # a claim counts for at most so many times the usual speed, until it is measured
BUSIEST = 0.95


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


def believed_seconds(members: Sequence[Announcement], request: RouteRequest, known: KnownCosts) -> dict[str, float]:
    """Seconds a token and block of each member: what was measured, else what is claimed as far as it is credible."""
    reply_tokens = max(request.tokens - request.prompt_tokens, 1)
    claimed = {m.peer: block_seconds(m, request.prompt_tokens, reply_tokens) for m in members}
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
