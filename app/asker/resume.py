"""How a session goes on after its route has changed: who still knows what, and who has to send what again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class HopState(NamedTuple):
    """What a hop said it holds: cached tokens, and outputs kept for [kept_from, length)."""

    length: int
    kept_from: int


class Resume(NamedTuple):
    """What each hop must do, and from where the asker feeds the first."""

    lengths: tuple[int, ...]  # cached tokens that each hop may keep; less than it has: cut
    send_from: tuple[int, ...]  # from where each hop's successor needs outputs
    feed_from: int


def plan_resume(states: Sequence[HopState], fed: int) -> Resume:
    """The least work after which the output of token `fed - 1` reaches the asker and every hop has cached all tokens.

    A hop that is ahead of its successor replays what it kept; where it kept too little, it is cut back so that it
    computes those outputs again from its own predecessor, in the end from the asker's tokens.
    """
    needed = fed - 1  # the asker needs the last output alone
    lengths, send_from = [], []
    for state in reversed(states):
        length = min(state.length, fed)
        if length > needed and state.kept_from > needed:
            length = needed
        lengths.append(length)
        send_from.append(needed)
        needed = length
    return Resume(tuple(reversed(lengths)), tuple(reversed(send_from)), needed)
