"""Pure decisions of a round, and which sequences an island reads."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rounds.decisions import (
    KEPT_RESTS,
    MOST_REST,
    Measured,
    Missed,
    Rest,
    copied,
    doubted,
    exchange_limit_s,
    few_steps,
    first_to_commit,
    grace_s,
    in_line,
    lasting_overhead_s,
    leading_order,
    left_out_after,
    measured,
    merge_weights,
    missed_after,
    next_codec,
    next_every,
    odd_norms,
    past_likeness,
    quorum,
    replayed,
    request_leaves,
    request_timeout_s,
    resting,
    rests_after,
    share_ranges,
    standings_of,
    to_leave_out,
)
from app.rounds.reading import next_start, permuted, positions_of, sequence_at

KEY = b"k" * 32


@given(st.integers(1, 3000))
def test_a_permutation_takes_each_number_once(count: int) -> None:
    assert sorted(permuted(index, count, KEY) for index in range(count)) == list(range(count))


def test_every_pass_has_an_order_of_its_own() -> None:
    first, second = ([sequence_at(at + epoch * 50, 50, 7) for at in range(50)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))
    assert first != [sequence_at(at, 50, 8) for at in range(50)]
    # the same on every machine and in every version
    assert first[:6] == [11, 48, 46, 27, 4, 37]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 7), st.integers(0, 10**9))
def test_members_divide_the_positions_of_a_round(members: int, batch: int, steps: int, start: int) -> None:
    peers = [f"peer{number}" for number in range(members)]
    read = [at for peer in peers for step in range(steps) for at in positions_of(start, peers, peer, step, batch)]
    assert sorted(read) == list(range(start, next_start(start, members, steps, batch)))


@given(st.sets(st.text("abcXYZ012", min_size=1, max_size=5), min_size=1, max_size=8), st.integers(0, 1000))
def test_the_order_of_leading_depends_on_the_round_alone(peers: set[str], number: int) -> None:
    order = leading_order(KEY, number, peers)
    assert sorted(order) == sorted(peers)
    assert order == leading_order(KEY, number, reversed(sorted(peers)))


def test_everybody_leads_in_turn() -> None:
    firsts = [leading_order(KEY, number, "abcd")[0] for number in range(400)]
    assert all(60 < firsts.count(peer) < 140 for peer in "abcd")


@pytest.mark.parametrize(
    ("lags", "wanted"),
    [
        ([], 30),
        ([2.0], 2),
        ([0.0, 0.0, 0.0], 1),
        ([1.0, 2.0, 3.0, 2.0, 2.0], 2),
        ([1.0, 3.0, 5.0], 9),
        ([100.0] * 3, 30),
    ],
)
def test_the_grace_is_the_median_and_three_deviations(lags: list[float], wanted: float) -> None:
    assert grace_s(lags, least_s=1.0, most_s=30.0) == pytest.approx(wanted)


def test_one_slow_island_does_not_stretch_the_grace() -> None:
    assert grace_s([1.0] * 7 + [500.0], least_s=0.5, most_s=600.0) == 1.0


@pytest.mark.parametrize(("expected", "wanted"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (8, 5), (9, 5)])
def test_the_quorum_is_more_than_half(expected: int, wanted: int) -> None:
    assert quorum(expected) == wanted


def test_claimed_tokens_weigh_at_most_twice_the_median() -> None:
    assert merge_weights({"a": 100, "b": 110, "c": 10**9, "d": 50}) == {"a": 100, "b": 110, "c": 210, "d": 50}


@given(st.integers(0, 500), st.integers(1, 32))
def test_shares_cover_all_leaves(leaves: int, members: int) -> None:
    ranges = share_ranges(leaves, members)
    assert [leaf for one in ranges for leaf in one] == list(range(leaves))
    assert len(ranges) == members
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    ("accusations", "wanted"),
    [
        ({}, set()),
        ({"a": ["d"], "b": ["d"], "c": ["d"]}, {"d"}),
        ({"a": ["b", "c", "d"]}, {"a"}),  # who hears nobody is cut off itself
        ({"a": ["b", "c", "d"], "b": ["a"]}, {"a"}),
        ({"a": ["b"]}, {"a", "b"}),  # nobody can tell which of the two is at fault
        ({"a": ["d"], "b": ["d"]}, {"d"}),
        ({"a": ["a"]}, {"a"}),  # it could not merge its share
        ({"stranger": ["a"]}, set()),
        ({"a": ["stranger"]}, set()),
    ],
)
def test_who_is_left_out_of_a_repeated_exchange(accusations: dict[str, list[str]], wanted: set[str]) -> None:
    assert to_leave_out(["a", "b", "c", "d"], accusations, {}) == wanted


@pytest.mark.parametrize(
    ("accuser", "accused", "repeated", "wanted"),
    [
        (0, 16, False, "a"),  # a newcomer takes nobody with it
        (7, 16, True, "a"),
        (8, 16, False, "ab"),
        (16, 8, False, "ab"),
        (16, 7, False, "b"),
        (16, 0, True, "ab"),  # it cannot keep a newcomer out for ever
        (0, 0, False, "ab"),
    ],
)
def test_who_has_far_less_standing_goes_alone(accuser: float, accused: float, repeated: bool, wanted: str) -> None:
    standings, before = {"a": accuser, "b": accused, "c": 16.0, "d": 16.0}, {("a", "b")} if repeated else set()
    found = to_leave_out(["a", "b", "c", "d"], {"a": ["b"]}, {}, standings=standings, repeated=before)
    assert found == {*wanted}


def test_a_standing_is_earned_by_rounds_and_lost_by_failures() -> None:
    counted, failed = [{"a", "b", "c"}] * 15 + [{"a"}], [{"b", "c"}, {"c"}, {"new"}]
    assert standings_of(["a", "b", "c", "new"], counted, failed) == {"a": 16.0, "b": 7.5, "c": 5.0, "new": 0.0}


def test_newcomers_that_fail_in_turn_take_nobody_with_them() -> None:
    """Six come to six that have made some rounds, and one in each round accuses a member: no honest change is lost."""
    honest, liars = "abcdef", "uvwxyz"
    counted, failed, rests = (
        deque[set[str]]([{*honest}] * 16, 16),
        deque[set[str]](maxlen=KEPT_RESTS),
        dict[str, Rest](),
    )
    lost = 0
    for number in range(16, 216):
        there = ({*honest} | {*liars}) - resting(rests, number)
        liar, victim = liars[number % 6], honest[number // 6 % 6]
        standings = standings_of(there, counted, failed)
        out = to_leave_out(sorted(there), {liar: [victim]} if liar in there else {}, {}, standings=standings)
        lost += len({*honest} - (there - out))
        rests = rests_after(rests, number, failed=out, counted=there - out)
        counted.append(there - out)
        failed.append(out)
    assert lost == 0


def test_of_two_the_accused_is_left_out() -> None:
    assert to_leave_out(["a", "b"], {"a": ["b"]}, {}) == {"b"}


@pytest.mark.parametrize(
    ("roots", "wanted"),
    [
        ("xxxx", ""),
        ("xxxy", "d"),  # another result
        ("xxx-", "d"),  # did not finish
        ("---x", "d"),  # gave the others nothing
        ("xx--", "cd"),
    ],
)
def test_without_accusations_the_minority_is_left_out(roots: str, wanted: str) -> None:
    ended = {peer: b"" if root == "-" else root.encode() for peer, root in zip("abcd", roots, strict=True)}
    assert to_leave_out(["a", "b", "c", "d"], {}, ended) == set(wanted)


@pytest.mark.parametrize(("speed", "wanted"), [(None, 30), (125e6, 256), (2.5e6, 256), (1e5, 12), (1.0, 1), (2e6, 244)])
def test_a_request_asks_for_what_comes_within_moments(speed: float | None, wanted: int) -> None:
    assert request_leaves(16388, speed, 256) == wanted


def test_an_answer_is_waited_for_as_long_as_it_may_take() -> None:
    def timeout_s(size: int, speed: float | None, **more: Any) -> float:
        return request_timeout_s(size, speed, **{"wait_s": 2.0, "lost": 0, "left_s": 60.0, **more})

    assert timeout_s(0, None) == 3.0
    assert timeout_s(5 * 10**6, 2.5e6) == 9.0
    assert timeout_s(0, None, lost=1) == 6.0  # the link may have become slow
    assert timeout_s(10**9, 2.5e6) == 15.0
    assert timeout_s(0, None, left_s=8.0) == 3.0  # never less than the other waits
    assert timeout_s(0, None, left_s=1.0) == 1.0
    assert timeout_s(0, None, left_s=-1.0) > 0


@given(st.integers(0, 2**26), st.floats(1e3, 1e9), st.sampled_from([20.0, 60.0, 600.0]))
def test_two_lost_answers_leave_half_of_an_exchange(size: int, speed: float, exchange_s: float) -> None:
    left = exchange_s
    for lost in range(2):
        left -= request_timeout_s(size, speed, wait_s=2.0, lost=lost, left_s=left)
    assert left >= exchange_s / 2


@pytest.mark.parametrize(
    ("change_bytes", "steps_s", "wanted_s"),
    [(0, 1e4, 60), (134_700_000, 0, 60), (134_700_000, 600, 660), (134_700_000, 1e4, 60 + 2155.2)],
)
def test_an_exchange_may_take_as_long_as_its_bytes_need_and_the_steps_took(
    change_bytes: int, steps_s: float, wanted_s: float
) -> None:
    assert exchange_limit_s(change_bytes, steps_s, least_s=60) == pytest.approx(wanted_s)


def failing_rounds(rounds: int) -> list[int]:
    """The rounds in which a member fails that fails whenever it is expected."""
    rests: dict[str, Rest] = {}
    found = []
    for number in range(rounds):
        failed = {"d"} - resting(rests, number)
        found += [number] * len(failed)
        rests = rests_after(rests, number, failed=failed, counted="abc")
    return found


def test_who_fails_every_exchange_rests_longer_each_time_up_to_a_bound() -> None:
    found = failing_rounds(400)
    pauses = [second - first - 1 for first, second in pairwise(found)]
    assert pauses[:2] == [0, 2]  # once is no reason
    assert pauses[2] in (3, 4)
    assert all(MOST_REST / 2 < pause <= MOST_REST for pause in pauses[4:])
    assert len(found) <= 45
    assert len(set(pauses[4:])) > 1  # drawn


def test_places_go_to_those_of_the_last_rounds_then_to_newcomers_and_last_to_who_does_not_arrive() -> None:
    missed = {"late": Missed(1, 3), "idle": Missed(2, 5), "idle of late": Missed(3, 9), "recent and late": Missed(1, 3)}
    peers = ["new", "late", "idle", "idle of late", "recent", "recent and late"]
    recent = ["recent", "recent and late", "idle of late", "away"]
    lines = [in_line(peers, recent=recent, missed=missed, lot=bytes([lot])) for lot in range(32)]
    for line in lines:
        assert {*line[:2]} == {"recent", "recent and late"}
        assert {*line[2:4]} == {"new", "late"}
        assert line[4:] == ["idle of late", "idle"]
    assert {line[2] for line in lines} == {"new", "late"}  # by lot
    assert in_line(reversed(peers), recent=recent, missed=missed, lot=b"\0") == lines[0]


def test_missed_rounds_count_in_a_row_until_the_member_arrives_or_was_long_gone() -> None:
    missed = missed_after({}, 4, absent=["idle", "late"], counted=["here"])
    missed = missed_after(missed, 5, absent=["idle"], counted=["here", "late"])
    assert missed == {"idle": Missed(2, 5)}
    assert missed_after(missed, 5 + KEPT_RESTS - 1, absent=[], counted=["here"]) == missed  # it had no place
    assert missed_after(missed, 5 + KEPT_RESTS, absent=[], counted=["here"]) == {}


def test_one_round_that_counts_ends_all_rest() -> None:
    rests = {"d": Rest(5, 30), "e": Rest(2, 13)}
    assert rests_after(rests, 10, failed=(), counted="abcd") == {"e": Rest(2, 13)}
    assert rests_after({}, 10, failed="d", counted="abc") == {"d": Rest(1, 11)}
    assert resting({"d": Rest(1, 11)}, 11) == set()
    assert resting(rests, 13) == {"d"}


def test_failures_of_one_that_never_came_back_are_forgotten() -> None:
    assert rests_after({"d": Rest(5, 30)}, 30 + KEPT_RESTS, failed=(), counted="abc") == {}


def test_of_two_that_fail_with_each_other_one_takes_part() -> None:
    """One accuses the other whenever both are there: neither can cost the others many rounds, nor are both kept out."""
    for start in range(0, 2000, 200):
        rests: dict[str, Rest] = {}
        repeated = 0
        took_part: Counter[str] = Counter()
        for number in range(start, start + 200):
            there = {"c", "d"} - resting(rests, number)
            failed = there if len(there) == 2 else set[str]()
            repeated += bool(failed)
            took_part.update(there - failed)
            rests = rests_after(rests, number, failed=failed, counted={"a", "b", *(there - failed)})
        assert repeated <= 40
        assert max(took_part.values()) >= 100


def test_reports_are_joined_by_their_median() -> None:
    honest = {"a": (1.0, 0.5), "b": (2.0, 0.6)}
    lie = {"a": (900.0, -1.0), "b": (2.0, 0.6)}
    assert measured("ab", [honest, honest, lie]) == {"a": Measured(1.0, 0.5), "b": Measured(2.0, 0.6)}


def test_reports_on_peers_that_took_no_part_do_not_count() -> None:
    honest = {"a": (1.0, 0.5), "b": (1.1, 0.6), "c": (0.9, 0.5)}
    ghosts = {f"ghost{number}": (1e9, 1.0) for number in range(9)}
    figures = measured("abc", [honest, honest, {**honest, **ghosts}])
    assert figures.keys() == {"a", "b", "c"}
    assert doubted(figures) == {}


@pytest.mark.parametrize(
    ("liar", "found"),
    [
        (Measured(1.0, -0.4), True),  # flipped
        (Measured(10.0, -0.4), True),  # flipped and enlarged
        (Measured(1.0, 0.01), True),  # noise
        (Measured(0.0, 0.0), True),  # zeros
        (Measured(1.4, 0.3), False),  # other data
    ],
)
def test_changes_unlike_the_others_are_doubted(liar: Measured, found: bool) -> None:
    figures = {"a": Measured(1.0, 0.5), "b": Measured(1.1, 0.4), "c": Measured(0.9, 0.45), "d": liar}
    assert set(doubted(figures)) == ({"d"} if found else set())


def test_directions_that_differ_by_chance_are_not_doubted() -> None:
    """Where little is left to learn, an honest island's change may point anywhere; a liar's stands out nevertheless."""
    agreements = dict(zip("abcdefgh", [0.42, 0.50, 0.35, -0.04, 0.55, 0.20, 0.10, 0.60], strict=True))
    assert doubted({peer: Measured(1.0, one) for peer, one in agreements.items()}) == {}
    assert doubted({peer: Measured(1.0, one) for peer, one in (agreements | {"d": -0.45}).items()}).keys() == {"d"}


def test_two_cannot_doubt_each_other() -> None:
    assert doubted({"a": Measured(1.0, -0.5), "b": Measured(50.0, -0.5)}) == {}


def test_members_that_send_one_change_twice_are_doubted() -> None:
    assert copied({"a": b"1", "b": b"2", "c": b"3"}) == {}
    assert copied({"a": b"1", "b": b"2", "c": b"1"}).keys() == {"a", "c"}
    assert copied({"a": b"1", "b": b"1"}) == {}  # nobody would be left
    assert copied({"a": b"1"}) == {}


def test_who_commits_first_counts() -> None:
    assert first_to_commit({"a": b"1", "b": b"2", "c": b"1"}) == ["a", "b"]
    assert first_to_commit({"c": b"1", "b": b"2", "a": b"1"}) == ["c", "b"]
    assert first_to_commit({}) == []


@pytest.mark.parametrize(
    ("likeness", "wanted"),
    [
        ([0.7, 0.65, 0.72, 1.0], "d"),
        ([0.7, 0.65, 0.72, 0.99], "d"),  # with some noise
        ([0.7, 0.65, 1.0, 1.0], ""),  # `copied` finds these
        ([0.44, 0.995, 0.99], ""),  # the first one is unlike for a reason of its own
        ([0.96, 0.97, 0.96, 1.0], "d"),
        ([0.95, 0.97, 0.96, 0.976], ""),  # all learn something simple
        ([0.7, 0.65, 0.72, 0.98], ""),
        ([0.7, 0.65, 0.72, -1.0], ""),  # flipped, which the agreement with the others tells
        ([1.0, 1.0, 1.0, 1.0], ""),
        ([0.99, 0.99, 0.99, 1.0], ""),  # nobody can tell
        ([0.7, 1.0], ""),
    ],
)
def test_who_sends_the_last_merged_change_again_is_doubted(likeness: list[float], wanted: str) -> None:
    assert set(replayed(dict(zip("abcd", likeness, strict=False)))) == set(wanted)


@given(st.floats(0.0, 1.0), st.lists(st.floats(1.0, 4.9), min_size=3, max_size=16))
def test_members_whose_changes_are_about_as_like_the_last_one_are_not_doubted(
    least: float, factors: list[float]
) -> None:
    assert replayed({str(at): 1 - least * factor / 5 for at, factor in enumerate(factors)}) == {}


def test_a_replay_is_found_by_most_of_those_who_report() -> None:
    report = {"a": (1.0, 0.5)}
    honest, lie = [700, 650, 1000], [1000, 650, 0]
    assert past_likeness("abc", [report] * 3, [honest, honest, lie]) == {"a": 0.7, "b": 0.65, "c": 1.0}
    assert past_likeness("abc", [report] * 3, [lie, (), ()]) == {}  # newcomers do not know the last change
    assert past_likeness("abc", [report, {}, {}], [honest, (), ()]) == {"a": 0.7, "b": 0.65, "c": 1.0}
    assert past_likeness("abc", [report] * 3, [honest[:2], honest[:2], lie]) == {}
    assert past_likeness("abc", [report, {}, {}], [(), lie, lie]) == {}  # of a share that they did not merge
    assert past_likeness("abc", [{}] * 3, [(), (), ()]) == {}


def test_one_is_left_out_after_two_doubted_rounds() -> None:
    assert left_out_after([["d"]]) == set()
    assert left_out_after([["d"], []]) == set()
    assert left_out_after([["d"], [], ["d"]]) == set()
    assert left_out_after([["c"], ["d"], ["d", "c"]]) == {"d"}


def test_of_many_members_one_is_left_out_after_three_doubted_rounds() -> None:
    assert left_out_after([["d"], ["d"]], members=9) == set()
    assert left_out_after([["d"], [], ["d"], ["d"]], members=9) == set()
    assert left_out_after([["c"], ["d"], ["d", "c"], ["d"]], members=9) == {"d"}
    assert left_out_after([["d"], ["d"]], members=8) == {"d"}


def test_the_change_of_few_steps_need_not_agree_with_the_others() -> None:
    figures = {"a": Measured(1.0, 0.4), "b": Measured(1.0, 0.5), "c": Measured(1.0, 0.4), "d": Measured(0.1, -0.1)}
    assert few_steps({"a": 10, "b": 10, "c": 6, "d": 4}) == set()
    few = few_steps({"a": 10, "b": 10, "c": 6, "d": 3})
    assert few == {"d"}
    assert doubted(figures).keys() == {"d"}
    assert not doubted(figures, few)
    assert doubted(figures | {"d": Measured(6.0, -0.1)}, few).keys() == {"d"}  # but not be far longer


def test_the_change_of_one_that_makes_more_steps_is_longer() -> None:
    """Two slow islands stop after two steps of twelve, a fast card makes all of them."""
    figures = {"a": Measured(0.3, 0.4), "b": Measured(0.31, 0.5), "card": Measured(1.97, 0.4)}
    steps = {"a": 2, "b": 2, "card": 12}
    assert odd_norms(figures).keys() == {"card"}
    assert not odd_norms(figures, (), steps)
    assert odd_norms(figures | {"card": Measured(4.0, 0.4)}, (), steps).keys() == {"card"}
    cards = {f"card {number}": Measured(3.14, 0.4) for number in range(3)}
    slow = {f"slow {number}": Measured(0.59, 0.4) for number in range(4)}
    half = {peer: 24 if peer in cards else 2 for peer in (*cards, *slow)} | {"liar": 24}
    assert not odd_norms(cards | slow | {"liar": Measured(0.34, 0.4)}, (), half), "one short change convicts nobody"
    more = {"c": Measured(0.29, 0.4), "long": Measured(1.97, 0.4)}
    assert odd_norms(figures | more, (), steps | {"c": 2, "long": 2}).keys() == {"long"}


@pytest.mark.parametrize(
    ("step_s", "overhead_s", "wanted"),
    [(1.0, 5.0, 66), (1.0, 100.0, 100), (1.0, 0.1, 40), (0.0, 5.0, 50), (0.01, 5.0, 100)],
)
def test_the_steps_of_a_round_follow_its_overhead(step_s: float, overhead_s: float, wanted: int) -> None:
    assert next_every(50, step_s, overhead_s, least=10, most=500) == wanted


@given(st.integers(1, 1000), st.floats(1e-3, 10), st.floats(0, 1000))
def test_the_steps_of_a_round_settle_where_nine_tenths_of_the_time_are_steps(
    every: int, step_s: float, overhead_s: float
) -> None:
    for _ in range(60):
        every = next_every(every, step_s, overhead_s, least=10, most=10**5)
    assert every == 10**5 or every * step_s >= 0.9 * (every * step_s + overhead_s)


def test_the_steps_of_a_round_stay_in_their_bounds() -> None:
    assert next_every(50, 1.0, 500.0, least=10, most=55) == 55
    assert next_every(12, 1.0, 0.0, least=10, most=55) == 10


@pytest.mark.parametrize(
    ("here_s", "past_s", "wanted"),
    [
        (1.0, [], 1.0),
        (1.0, [150.0], 1.0),  # once, and not again
        (1.0, [1.0, 150.0, 1.1, 1.2], 1.2),
        (150.0, [1.0, 1.0], 150.0),
        (1.0, [9.0, 1.0, 10.0, 1.0], 9.0),  # every other round is led elsewhere, from where the exchange took longer
    ],
)
def test_the_longest_of_the_last_rounds_does_not_count(here_s: float, past_s: list[float], wanted: float) -> None:
    assert lasting_overhead_s(here_s, past_s) == wanted


def test_rounds_that_got_long_get_short_again() -> None:
    every, past_s, seen = 20, [150.0, 150.0, 0.5, 0.5], list[int]()
    while every > 20 or not seen:
        overhead_s = lasting_overhead_s(0.5, past_s)
        every = next_every(200 if not seen else every, 1.0, overhead_s, least=20, most=200)
        past_s = [*past_s, 0.5][-4:]
        seen.append(every)
    assert seen[:3] == [200, 160, 128]
    assert len(seen) < 15


@pytest.mark.parametrize(
    ("codec", "overhead_s", "wanted"),
    [("int8", 0.18, "f32"), ("int8", 0.5, "int8"), ("f32", 0.7, "f32"), ("f32", 0.9, "int8"), ("f32", 50.0, "int8")],
)
def test_changes_are_float32_where_the_shortest_round_bears_it(codec: str, overhead_s: float, wanted: str) -> None:
    assert next_codec(codec, 1.0, overhead_s, least=10, known=("int8", "f32")) == wanted


@pytest.mark.parametrize(
    ("codec", "overhead_s", "wanted"),
    [("f32", 50.0, "int8"), ("int8", 1.6, "int4"), ("int8", 1.4, "int8"), ("int8", 0.18, "f32"), ("int4", 0.8, "int4"),
     ("int4", 0.7, "int8"), ("int4", 50.0, "int4")],
)  # fmt: skip
def test_changes_are_int4_where_rounds_of_int8_would_be_long(codec: str, overhead_s: float, wanted: str) -> None:
    assert next_codec(codec, 1.0, overhead_s, least=10, known=("int8", "f32", "int4")) == wanted


def test_a_fixed_number_format_stays() -> None:
    assert next_codec("int8", 1.0, 0.0, least=10, known=("int8",)) == "int8"
    assert next_codec("f32", 1.0, 99.0, least=10, known=("f32",)) == "f32"
    assert next_codec("f32", 0.0, 99.0, least=10, known=("int8", "f32")) == "f32"  # nothing was measured yet


@given(
    st.floats(1e-3, 10),
    st.floats(1e-4, 100),
    st.floats(0.0, 1.0),
    st.sampled_from([("int8", "f32"), ("int8", "f32", "int4")]),
    st.data(),
)
def test_the_number_format_does_not_swing(
    step_s: float, f32_s: float, fixed: float, known: tuple[str, ...], data: st.DataObject
) -> None:
    """Whatever share of the overhead depends on the bytes, the format settles after as many rounds as there are."""
    codec = data.draw(st.sampled_from(known))
    seen = [codec]
    for _ in range(8):
        overhead_s = f32_s * (fixed + (1 - fixed) * {"f32": 1.0, "int8": 0.25, "int4": 0.133}[codec])
        codec = next_codec(codec, step_s, overhead_s, least=20, known=known)
        seen.append(codec)
    assert len(set(seen[len(known) - 1 :])) == 1
