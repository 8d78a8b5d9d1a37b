"""Which rounds of others count for an island: those that enough of the islands which are there made, or went on from.

A log's entries say who made each round, and only their own members' words stand for it: a member alone can sign as many
rounds as it likes, one after the other. So an island that finds itself behind looks at every round of a log, not at the
first one only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.rounds.decisions import quorum
from app.rounds.log import RECENT_ROUNDS, RoundEntry, had_quorum, is_better, shared


class Islands(NamedTuple):
    """The islands of a job as one of them knows them now."""

    own: str
    heads: Mapping[str, bytes]  # of the others that were heard lately: the round that each named last
    knows_others: bool = True  # it has listened for long enough to have heard all who are there


def counts(
    entry: RoundEntry, expected: set[str], recent: set[str], met: set[str], gone_on: set[str], islands: Islands
) -> bool:
    """True for a round which those who took part lately, are there and were expected in it made, or went on from: half.

    Newcomers that arrive at once would else outvote those that still make their steps. Besides it wants a quorum of
    those who were met, as long as others may be there that this island has not heard yet. `gone_on` are those whose
    newest round is this one or a later one.
    """
    made = {*entry.list.members}
    known = {islands.own, *islands.heads} & recent & expected
    if islands.own not in made and 2 * len((made | gone_on) & known) < len(known):
        return False
    return islands.knows_others or len(made | (gone_on & known)) >= quorum(len(met | made))


def taken_over(log: Sequence[RoundEntry], entries: Sequence[RoundEntry], founder: str, islands: Islands) -> int | None:
    """Return how many of another history's rounds an island with this log goes on from; None if it stays with its own.

    Of a history that begins with the own one these are the rounds which count, one after the other: whoever made the
    rest made it past the others. Where the two parted it is all or nothing, and an island whose own rounds since then
    had a quorum goes over only if all of the other's count.
    """
    same = shared(log, entries)
    count = _counted(entries[:same], entries[same:], founder, islands)
    if same == len(log):
        return same + count if count else None
    is_sure = same + count == len(entries) or not had_quorum(log[:same], log[same:])
    return len(entries) if is_sure and is_better(log, entries) else None


def joined(entries: Sequence[RoundEntry], founder: str, islands: Islands) -> int | None:
    """Return how many rounds of a history an island without a state begins with; None if some of it does not count."""
    return len(entries) if _counted((), entries, founder, islands) == len(entries) else None


def _counted(log: Sequence[RoundEntry], entries: Sequence[RoundEntry], founder: str, islands: Islands) -> int:
    """Return how many of these rounds after those of a log count, up to one that does not."""
    after = {entry.hash: number for number, entry in enumerate(entries)}
    reached = {peer: after[head] for peer, head in islands.heads.items() if head in after}
    window = deque(({*entry.list.members} for entry in log[-RECENT_ROUNDS:]), RECENT_ROUNDS)
    expected = {*log[-1].next} if log else {founder}
    for number, entry in enumerate(entries):
        recent = set().union(*window)
        last = window[-1] if window else {founder}
        met = {islands.own, *last, *(recent & islands.heads.keys())} & expected
        gone_on = {peer for peer, place in reached.items() if place >= number}
        if not counts(entry, expected, recent, met, gone_on, islands):
            return number
        window.append({*entry.list.members})
        expected = {*entry.next}
    return len(entries)
