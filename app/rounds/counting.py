"""Which rounds of others count for an island: those that enough of the islands which are there made, or went on from.

A log's entries say who made each round, and only their own members' words stand for it: a member alone can sign as many
rounds as it likes, one after the other. So an island that finds itself behind looks at every round of a log, not at the
first one only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from app.rounds.decisions import quorum
from app.rounds.log import RECENT_ROUNDS, RoundEntry, had_quorum, is_better, shared, took_part
from app.rounds.statements import GENESIS


class Before(NamedTuple):
    """Who may make a round, as the one before it says."""

    expected: set[str]
    recent: set[str]  # who took part in one of the last rounds
    left_out: set[str]


class Islands(NamedTuple):
    """The islands of a job as one of them knows them now."""

    own: str
    heads: Mapping[str, bytes]  # of the others that were heard lately: the round that each named last
    knows_others: bool = True  # it has listened for long enough to have heard all who are there
    homes: Mapping[str, str] = {}  # of the others; who has none here has its own


def counts(entry: RoundEntry, before: Before, met: set[str], gone_on: set[str], islands: Islands) -> bool:
    """True for a round which most of those who took part lately and are there made, or went on from: half at least.

    Newcomers that arrive at once would else outvote those that still make their steps. Besides it wants a quorum of
    those who were `met`, as long as others may be there that this island has not heard yet. Otherwise a round counts if
    all who were expected in it and are there made it or went on from it: nobody else can make it. To one that this
    island made itself it has agreed. `gone_on` are those whose newest round is this one or a later one.
    """
    made = {*entry.list.members}
    if islands.own in made:
        return True
    known = ({islands.own, *islands.heads} & before.recent) - before.left_out
    has_quorum = len(made | (gone_on & known)) >= quorum(len(met | made))
    is_made = 2 * len((made | gone_on) & known) >= len(known) and (has_quorum or islands.knows_others)
    return is_made or (islands.knows_others and before.expected & islands.heads.keys() <= made | gone_on)


def taken_over(log: Sequence[RoundEntry], entries: Sequence[RoundEntry], founder: str, islands: Islands) -> int | None:
    """Return how many of another history's rounds an island with this log goes on from; None if it stays with its own.

    Of a history that begins with the own one these are the rounds which count, one after the other: whoever made the
    rest made it past the others. Where the two parted it is all or nothing, and only if more of the others went that
    way than stayed: otherwise one that left early could make up a longer history than all who came since have made. An
    island whose own rounds had a quorum goes over only if all of the other's count. One that has made all of its rounds
    alone, and none of theirs, decides as one that has made none, if the other history is better: it founded the job,
    and has lost its disk since.
    """
    same = shared(log, entries)
    if log and not same and all(entry.list.members == [islands.own] for entry in log):
        return joined(log, entries, founder, islands) if entries and is_better(log, entries) else None
    count = _counted(entries[:same], entries[same:], founder, islands)
    if same == len(log):
        return same + count if count else None
    common, own, others = log[:same], log[same:], entries[same:]
    went, stayed, elsewhere = _sides(log, common, others, islands)
    most_went = went >= elsewhere and (went > stayed or (went == stayed and had_quorum(common, others)))
    may_go = most_went and (count == len(others) or not had_quorum(common, own))
    return len(entries) if may_go and is_better(log, entries) else None


def _sides(
    log: Sequence[RoundEntry], common: Sequence[RoundEntry], entries: Sequence[RoundEntry], islands: Islands
) -> tuple[int, int, int]:
    """How many of the others that took part lately, here or before the histories parted, went that way, and stayed.

    And how many are together in a third history.
    """
    known = {*took_part(log), *took_part(common)}
    made, hashes = {peer for entry in entries for peer in entry.list.members}, {entry.hash for entry in entries}
    stayed_at = {GENESIS, *(entry.hash for entry in log)}
    heads = {peer: head for peer, head in islands.heads.items() if peer in known}
    stayed = {peer for peer, head in heads.items() if head in stayed_at}
    went = {peer for peer, head in heads.items() if peer not in stayed and (head in hashes or peer in made)}
    elsewhere = Counter(head for peer, head in heads.items() if peer not in stayed | went)
    return len(went), len(stayed), max(elsewhere.values(), default=0)


def joined(log: Sequence[RoundEntry], entries: Sequence[RoundEntry], founder: str, islands: Islands) -> int | None:
    """Return how many rounds of a history an island begins with that has made none: all, or None.

    All must count, and half of all homes with a state must be of this history: names of one machine could make up one
    from an early round on, if those are away who made the rounds before it. One that has begun with another history
    leaves that only if more homes are of this one.
    """
    if _counted((), entries, founder, islands) < len(entries):
        return None
    hashes, own, same = {entry.hash for entry in entries}, {entry.hash for entry in log}, shared(log, entries)
    is_usual = islands.knows_others and of_half_of_homes(hashes, islands)
    is_more = same == len(log) or homes_at(hashes - own, islands) > homes_at(own - hashes, islands)
    return len(entries) if (is_usual and is_more) or not entries else None


def of_half_of_homes(heads: Collection[bytes], islands: Islands) -> bool:
    """True if half of all homes with a state named one of these rounds last."""
    return 2 * homes_at(heads, islands) >= len({_home(peer, islands) for peer in _with_state(islands)})


def homes_at(heads: Collection[bytes], islands: Islands) -> int:
    """Return how many homes named one of these rounds last; several islands of a home count once."""
    return len({_home(peer, islands) for peer in _with_state(islands) if islands.heads[peer] in heads})


def _with_state(islands: Islands) -> list[str]:
    return [peer for peer, head in islands.heads.items() if head != GENESIS]


def _home(peer: str, islands: Islands) -> str:
    return islands.homes.get(peer, peer)


def _counted(log: Sequence[RoundEntry], entries: Sequence[RoundEntry], founder: str, islands: Islands) -> int:
    """Return how many of these rounds after those of a log count, up to one that does not.

    Whoever made a later one has gone on from those before it.
    """
    after = {entry.hash: number for number, entry in enumerate(entries)}
    reached = {peer: number for number, entry in enumerate(entries) for peer in entry.list.members}
    reached |= {
        peer: after[head] for peer, head in islands.heads.items() if after.get(head, -1) > reached.get(peer, -1)
    }
    window = deque(({*entry.list.members} for entry in log[-RECENT_ROUNDS:]), RECENT_ROUNDS)
    expected, left_out = ({*log[-1].next}, {*log[-1].left_out}) if log else ({founder}, set[str]())
    for number, entry in enumerate(entries):
        recent = set().union(*window)
        last = window[-1] if window else {founder}
        met = {islands.own, *last, *(recent & islands.heads.keys())} & expected
        gone_on = {peer for peer, place in reached.items() if place >= number}
        if not counts(entry, Before(expected, recent, left_out), met, gone_on, islands):
            return number
        window.append({*entry.list.members})
        expected, left_out = {*entry.next}, {*entry.left_out}
    return len(entries)
