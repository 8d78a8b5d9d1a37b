"""What a hop has is shared among homes: more askers of one home gain nothing, and no home takes everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.shares import RESERVE, Holder, Shares

TOTAL = 16
A, B, C, TWIN = Holder("a", "1"), Holder("b", "2"), Holder("c", "3"), Holder("a", "4")


def shares(**held: int) -> Shares:
    names = {"a": A, "b": B, "c": C, "twin": TWIN}
    return Shares(TOTAL, ((names[name], amount) for name, amount in held.items()))


def test_a_part_is_kept_for_homes_within_their_share() -> None:
    assert shares(a=11).fits(A, 1)
    assert not shares(a=12).fits(A, 1)
    assert not shares(a=12).fits(TWIN, 1)  # another asker of the same home
    assert shares(a=12).fits(B, 4)
    assert not shares(a=12).fits(B, 5)
    assert not shares(a=10, b=2).fits(B, 4)  # it would have more than a third


def test_who_has_more_than_a_share_is_in_the_way_of_those_who_have_less() -> None:
    assert shares(a=12, b=4).in_the_way(C, 1) == {A}
    assert shares(a=8, twin=4, b=4).in_the_way(C, 1) == {A, TWIN}
    assert shares(a=12, b=4).in_the_way(C, 12) == set()  # it would have as much
    assert shares(a=8, b=8).in_the_way(B, 1) == set()
    assert shares(a=4, b=6, c=6).in_the_way(A, 1) == set()  # its home has its share


def test_what_a_home_has_is_shared_among_its_askers() -> None:
    assert shares(a=12).in_the_way(TWIN, 1) == {A}
    assert shares(a=6, twin=6).in_the_way(TWIN, 1) == set()


@settings(max_examples=100)
@given(st.lists(st.sampled_from([A, B, C, TWIN, Holder("d", "5"), Holder("e", "6")]), max_size=200))
def test_whoever_comes_finds_room(wishes: list[Holder]) -> None:
    held: list[tuple[Holder, int]] = []
    for who in wishes:
        now = Shares(TOTAL, held)
        if not now.fits(who, 1) and (crowding := now.in_the_way(who, 1)):
            held.remove(next(one for one in held if one[0] in crowding))
            now = Shares(TOTAL, held)
            assert now.fits(who, 1)
        if now.fits(who, 1):
            held.append((who, 1))
    homes = [holder.home for holder, _ in held]
    assert len(homes) <= TOTAL * (1 - RESERVE if len({*homes}) == 1 else 1)
    now, last = Shares(TOTAL, held), Holder("f", "7")
    assert now.fits(last, 1) or now.in_the_way(last, 1)
