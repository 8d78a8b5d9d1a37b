"""The cost of a hop in seconds per token: compute, waiting for a busy device, and fixed overhead.

Link times are in `app.routing.estimates`, extra cost for low trust in `app.routing.trust`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high

from app.routing.route import KnownCosts, RouteRequest
from app.swarm.records import Announcement

HOP_S = 0.001  # fixed overhead of a hop, besides its link and its blocks
UNKNOWN_LINK_S = 0.05  # one way, assumed until measured
SLOWEST_TOKENS_PER_S = 0.1  # assumed for members that announce no speed
BELIEVED_TIMES = 8.0  # an unmeasured claim counts for at most this multiple of the median speed
BUSIEST = 0.95  # cap on the announced busy share, so that the waiting time stays finite


def block_seconds(member: Announcement, prompt_tokens: int = 0, reply_tokens: int = 1) -> float:
    """Seconds that one token of a reply takes in one block of this member, including its share of the prompt."""
    assert member.span is not None
    decode_s = 1 / max(member.decode_tokens_per_s, SLOWEST_TOKENS_PER_S)
    prompt_s = prompt_tokens / max(member.prefill_tokens_per_s, member.decode_tokens_per_s, SLOWEST_TOKENS_PER_S)
    return (decode_s + prompt_s / max(reply_tokens, 1)) / len(member.span)


def wait_seconds(member: Announcement) -> float:
    """Mean seconds that a token waits for the device: M/D/1 queue with the announced busy share as its load."""
    busy = min(member.busy, BUSIEST)
    return busy / (1 - busy) / 2 / max(member.decode_tokens_per_s, SLOWEST_TOKENS_PER_S)


def believed_seconds(members: Sequence[Announcement], request: RouteRequest, known: KnownCosts) -> dict[str, float]:
    """Seconds per token and block of each member: measured if known, else its claim, limited by `BELIEVED_TIMES`."""
    reply_tokens = max(request.tokens - request.prompt_tokens, 1)
    claimed = {m.peer: block_seconds(m, request.prompt_tokens, reply_tokens) for m in members}
    if not claimed:
        return claimed
    least_s = median_high(claimed.values()) / BELIEVED_TIMES
    believed = {peer: max(seconds, least_s) for peer, seconds in claimed.items()}
    for member in members:
        measured_s = known.block_s.get(member.peer)
        if measured_s is not None:
            # Only decode steps are measured; the prompt's share is scaled by the same factor.
            believed[member.peer] = measured_s * claimed[member.peer] / block_seconds(member)
    return believed
