"""Which rounds of others count: those that enough of the islands which are there made, or went on from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from app.rounds.counting import Islands, joined, taken_over
from app.rounds.log import RoundEntry, beginning, replay
from app.rounds.statements import GENESIS
from p2p.identity import Identity
from tests.app.rounds.statements import PEOPLE, RECORD, STRANGERS, history, round_of
from tests.app.swarms import identity

FOUNDER, OWN = PEOPLE[0].peer_id, PEOPLE[1].peer_id
ALL = [one.peer_id for one in PEOPLE]


def going_on(log: Sequence[RoundEntry], *rounds: Sequence[Identity], present: Sequence[str] = ()) -> list[RoundEntry]:
    """A log that goes on with rounds of these."""
    entries, standing = list(log), replay(RECORD, log)
    for people in rounds:
        entry, standing = round_of(standing, people, every=5, present=present)
        entries.append(entry)
    return entries


def islands(heads: dict[int, bytes] | None = None, *, knows_others: bool = True) -> Islands:
    """The islands that are there beside the second one, and the head that each has named."""
    return Islands(OWN, {PEOPLE[number].peer_id: head for number, head in (heads or {}).items()}, knows_others)


COMMON = history(2, PEOPLE[:4], every=5)
HEAD = COMMON[-1].hash
OTHERS = dict.fromkeys((0, 2, 3), HEAD)  # they are where this island is


def test_rounds_of_most_who_are_there_count() -> None:
    entries = going_on(COMMON, PEOPLE[2:4], [PEOPLE[0], *PEOPLE[2:4]], present=ALL[:2])
    assert taken_over(COMMON, entries, FOUNDER, islands(OTHERS)) == len(entries)


def test_of_rounds_that_one_made_past_the_others_only_those_before_count() -> None:
    entries = going_on(COMMON, PEOPLE[:4], PEOPLE[3:4], PEOPLE[3:4])
    assert taken_over(COMMON, entries, FOUNDER, islands(OTHERS | {3: entries[-1].hash})) == len(COMMON) + 1
    assert taken_over(entries[:-2], entries, FOUNDER, islands(OTHERS | {3: entries[-1].hash})) is None


def test_rounds_of_one_count_if_the_others_went_on_from_them() -> None:
    entries = going_on(COMMON, PEOPLE[3:4], PEOPLE[3:4], present=ALL[:3])
    assert taken_over(COMMON, entries, FOUNDER, islands(OTHERS)) is None
    assert taken_over(COMMON, entries, FOUNDER, islands(dict.fromkeys((0, 2, 3), entries[-1].hash))) == len(entries)


@pytest.mark.parametrize(("knows_others", "count"), [(True, len(COMMON) + 2), (False, None)])
def test_rounds_of_one_count_if_nobody_else_is_there_and_there_was_time_to_hear_others(
    knows_others: bool, count: int | None
) -> None:
    entries = going_on(COMMON, PEOPLE[3:4], PEOPLE[3:4])
    there = islands({3: entries[-1].hash}, knows_others=knows_others)
    assert taken_over(COMMON, entries, FOUNDER, there) == count


def test_a_round_counts_that_all_made_who_were_expected_in_it() -> None:
    """Three of five were away. Two are back where this island is, and cannot make that round either."""
    two, common = PEOPLE[3:5], history(2, PEOPLE[:5], every=5)
    mine, entries = going_on(common, two), going_on(common, two, two)
    there = {0: mine[-1].hash, 2: mine[-1].hash, 3: entries[-1].hash, 4: entries[-1].hash}
    assert taken_over(mine, entries, FOUNDER, islands(there)) == len(entries)
    assert taken_over(mine, entries, FOUNDER, islands(there | {4: mine[-1].hash})) == len(entries)
    alone = going_on(common, two, two[:1])
    assert taken_over(mine, alone, FOUNDER, islands(there | {3: alone[-1].hash, 4: mine[-1].hash})) is None


def test_to_a_round_that_an_island_made_it_has_agreed() -> None:
    entries = going_on(COMMON, PEOPLE[1:3])
    assert taken_over(COMMON, entries, FOUNDER, islands(OTHERS)) == len(entries)


def test_a_history_that_parted_is_taken_over_whole_or_not_at_all() -> None:
    """The own one had a quorum since then: the other's last rounds were made past islands that are there."""
    mine = going_on(COMMON, PEOPLE[:3])
    theirs = going_on(COMMON, PEOPLE[:4], PEOPLE[3:4])
    went = dict.fromkeys((0, 2, 3), theirs[-2].hash)
    assert taken_over(mine, theirs[:-1], FOUNDER, islands(went)) == len(theirs) - 1
    assert taken_over(mine, theirs, FOUNDER, islands(went | {3: theirs[-1].hash})) is None


def test_an_island_alone_goes_over_to_a_better_history_of_others_alone_if_most_went_that_way() -> None:
    """Neither had a quorum. One that made rounds past those who stayed takes nobody along."""
    mine = going_on(COMMON, PEOPLE[1:2])
    theirs = going_on(COMMON, PEOPLE[2:3], PEOPLE[2:3])
    went = {2: theirs[-1].hash}
    assert taken_over(mine, theirs, FOUNDER, islands(went)) == len(theirs)
    assert taken_over(mine, theirs, FOUNDER, islands(went | {3: b"elsewhere"})) == len(theirs)
    assert taken_over(mine, theirs, FOUNDER, islands(went | {3: theirs[-2].hash, 0: HEAD})) == len(theirs)
    assert taken_over(mine, theirs, FOUNDER, islands(went | {3: HEAD})) is None
    assert taken_over(mine, theirs, FOUNDER, islands(went | {3: b"elsewhere", 0: b"elsewhere"})) is None


def test_a_newcomer_begins_with_a_history_in_which_all_rounds_count() -> None:
    entries = going_on(COMMON, *[PEOPLE[3:4]] * 4)
    there = dict.fromkeys((0, 2, 3), COMMON[-1].hash)
    own = PEOPLE[4].peer_id
    assert joined([], COMMON, FOUNDER, islands(there)._replace(own=own)) == len(COMMON)
    assert joined([], entries, FOUNDER, islands(there)._replace(own=own)) is None
    made = dict.fromkeys((0, 2), entries[-1].hash)
    assert joined([], entries, FOUNDER, islands(made | {3: GENESIS})._replace(own=own)) == len(entries)
    assert joined([], [], FOUNDER, islands({0: HEAD})._replace(own=own)) == 0


def test_who_made_a_later_round_has_gone_on_from_those_before_it() -> None:
    """Two of five went on alone. The others came back, and have made more rounds with them than are shown here."""
    entries = going_on(history(2, PEOPLE, every=5), PEOPLE[:2], PEOPLE[:2], PEOPLE, present=ALL)
    there = Islands(STRANGERS[0].peer_id, dict.fromkeys(ALL, b"a later round".ljust(32)))
    assert taken_over([], entries[:-1], FOUNDER, there) == 2
    assert taken_over([], entries, FOUNDER, there) == len(entries)


def test_who_made_rounds_past_the_others_has_no_voice_for_them() -> None:
    first, _ = round_of(beginning(RECORD), PEOPLE[:1], present=[one.peer_id for one in STRANGERS])
    made_up = going_on([first], *[STRANGERS] * 4)
    heads = dict.fromkeys(ALL, HEAD) | {one.peer_id: made_up[-1].hash for one in STRANGERS}
    assert joined([], made_up, FOUNDER, Islands(identity(99).peer_id, heads)) is None
    assert joined([], made_up, FOUNDER, Islands(identity(99).peer_id, heads, knows_others=False)) is None


def test_a_newcomer_begins_with_the_history_of_half_of_all_homes() -> None:
    """The founder, which made the only round that both histories have, is away: rounds of anybody count after that."""
    first, _ = round_of(beginning(RECORD), PEOPLE[:1], present=[one.peer_id for one in STRANGERS])
    made_up = going_on([first], *[STRANGERS] * 4)
    true = going_on(history(2, PEOPLE[:4], every=5), PEOPLE[1:4])
    heads = dict.fromkeys(ALL[1:4], true[-1].hash) | {one.peer_id: made_up[-1].hash for one in STRANGERS}
    of_one = {one.peer_id: "one machine" for one in STRANGERS}
    there = Islands(identity(99).peer_id, heads, homes=of_one)
    assert joined([], made_up, FOUNDER, there) is None
    assert joined([], true, FOUNDER, there) == len(true)
    assert joined([], true, FOUNDER, there._replace(knows_others=False)) is None


def test_a_founder_that_began_anew_alone_goes_over_to_those_who_went_on_but_gives_up_no_longer_history() -> None:
    """It has lost its disk. Others can show what it once made, or nothing at all."""
    first, _ = round_of(beginning(RECORD), PEOPLE[:1], present=ALL[1:4])
    others = going_on([first], PEOPLE[:4], PEOPLE[:4], PEOPLE[1:4])
    short, long = going_on([], PEOPLE[:1]), going_on([], *[PEOPLE[:1]] * 6)
    there = Islands(FOUNDER, dict.fromkeys(ALL[1:4], others[-1].hash))
    assert taken_over(short, others, FOUNDER, there) == len(others)
    assert taken_over(long, others, FOUNDER, there) is None
    for log in (short, long):
        assert taken_over(log, [], FOUNDER, there) is None
    assert taken_over(long, [first], FOUNDER, there._replace(heads=dict.fromkeys(ALL[1:4], first.hash))) is None


def test_a_newcomer_leaves_a_history_that_it_has_begun_with_for_one_of_more_homes_only() -> None:
    common = history(2, PEOPLE[:4], every=5)
    left, right = going_on(common, PEOPLE[:2], PEOPLE[:2]), going_on(common, PEOPLE[2:4], PEOPLE[2:4])
    heads = dict.fromkeys(ALL[:2], left[-1].hash) | dict.fromkeys(ALL[2:4], right[-1].hash)
    there = Islands(identity(99).peer_id, heads)
    assert joined([], left, FOUNDER, there) == len(left)
    assert joined([], right, FOUNDER, there) == len(right)
    assert joined(left, right, FOUNDER, there) is None
    assert joined(right, left, FOUNDER, there) is None
    assert joined(left[:-1], left, FOUNDER, there) == len(left)
    assert joined(left, right, FOUNDER, there._replace(heads=heads | {ALL[0]: right[-1].hash})) == len(right)
