"""Trust: scores from observations, and who must have lied for answers to differ as they do."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.asker.evidence import (
    COARSE,
    EXACT,
    ROUGH,
    ROUNDED,
    Deviation,
    Observation,
    beside,
    blame,
    comparable,
    computes_alike,
    is_confirmed,
    minimal_liar_sets,
    occasional_liar_sets,
    precisions,
    tolerance,
    worst_case_remaining,
    wrong_answers,
)
from app.core.span import Span
from app.routing.estimates import BELIEVED_S, MeasuredSpeeds
from app.routing.route import Hop, ReadingPace
from app.routing.trust import DISTRUSTED, HOUR_S, KEPT, TrustBook, TrustEvent, added, standing
from tests.app.routing.test_search import member

DAY_S = 24 * HOUR_S


def seen(*answers: tuple[str, int]) -> list[Observation]:
    return [Observation(frozenset(peers.split()), group) for peers, group in answers]


def liars(*answers: tuple[str, int], not_accused: str = "") -> tuple[set[str], bool]:
    stories, always = minimal_liar_sets(seen(*answers), not_accused.split())
    return {" ".join(sorted(story)) for story in stories}, always


def on_routes(*answers: tuple[str, int]) -> list[Observation]:
    """Answers over routes: the peers in their order, and the group."""
    return [
        replace(one, links=frozenset(frozenset(link) for link in pairwise(peers.split())))
        for one, (peers, _) in zip(seen(*answers), answers, strict=True)
    ]


def homes_beside(accused: str, *answers: tuple[str, int], not_accused: str = "") -> dict[str, frozenset[str]]:
    """A peer's home is its first letter."""
    return beside(frozenset({accused}), on_routes(*answers), not_accused.split(), lambda peer: peer[0])


FRAMED = (("m1 x a", 0), ("m2 y b", 1), ("m3 z a", 1), ("m4 x b", 0))  # they lie to x alone


def test_a_home_that_is_beside_a_peer_in_every_wrong_answer_may_be_the_liar() -> None:
    assert liars(*FRAMED) == ({"x"}, True)
    assert homes_beside("x", *FRAMED) == {"m": {"m1", "m4"}}
    assert homes_beside("x", *FRAMED, ("n x b", 0)) == {}  # wrong beside others too
    assert homes_beside("x", *FRAMED, ("n x b", 1)) == {"m": {"m1", "m4"}}  # right beside others
    assert homes_beside("x", *FRAMED, not_accused="m1") == {}  # nor does a trusted peer lie
    assert homes_beside("x", ("m1 x a1", 0), ("m2 x a2", 0), ("n y b", 1)) == {
        "m": {"m1", "m2"}, "a": {"a1", "a2"},
    }  # fmt: skip


def test_an_answer_that_agrees_with_others_is_not_wrong() -> None:
    answers = seen(("m1 x a", 0), ("m2 y b", 1), ("n x b", 1))
    assert wrong_answers(frozenset("x"), answers) == 1


def test_a_lie_is_not_forgiven_for_agreeing_but_for_time() -> None:
    lie = [TrustEvent(0.0, "lied", 1.0, "returned wrong activations")]
    assert standing(lie, 60.0).score < DISTRUSTED
    assert standing(lie, 60.0).why == "returned wrong activations, 1 minute ago"
    assert standing([*lie, *(TrustEvent(1.0, "agreed") for _ in range(20))], 60.0).score < DISTRUSTED
    assert standing(lie, 8 * DAY_S).trusted
    assert standing([*lie, TrustEvent(8 * DAY_S, "lied")], 16 * DAY_S).score < DISTRUSTED


def test_failures_never_amount_to_a_lie_and_doubts_only_if_they_are_many() -> None:
    failures = [TrustEvent(float(index), "failed", 1.0, "failed: it is gone") for index in range(KEPT)]
    assert standing(failures, KEPT).trusted
    assert standing(failures, 3 * HOUR_S).score > 0.95
    doubts = [TrustEvent(0.0, "doubted", 1.0, "in doubt")] * KEPT
    assert standing(doubts[:2], 0.0).trusted
    assert standing(doubts[:2], 0.0).penalty_s > 0.1
    assert not standing(doubts, 0.0).trusted
    assert standing(doubts[:4], 2 * DAY_S).trusted
    shared = [TrustEvent(0.0, "doubted", 0.25, "in doubt")] * 6
    assert standing(shared, 0.0).trusted
    assert standing([*doubts, *failures], 0.0).score > 0
    assert standing([*doubts[:1], *[TrustEvent(0.0, "agreed")] * 4], 0.0).score == 1


@given(st.lists(st.sampled_from(["agreed", "doubted", "failed", "lied"]), max_size=3 * KEPT))
def test_lies_are_remembered_longest(verdicts: list[str]) -> None:
    kept: tuple[TrustEvent, ...] = ()
    for index, verdict in enumerate(verdicts):
        kept = added(kept, TrustEvent(float(index), verdict))  # type: ignore[arg-type]
    assert len(kept) <= KEPT
    assert sum(o.verdict == "lied" for o in kept) == min(verdicts.count("lied"), KEPT)
    assert 0 <= standing(kept, 100.0).score <= 1


def test_the_book_survives_a_restart_and_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    book = TrustBook(path, clock=lambda: 5.0)
    assert book.unsaved() is None
    book.note("liar", "lied", "returned wrong activations")
    document = book.unsaved()
    assert document is not None
    book.write(document)
    assert book.unsaved() is None
    assert TrustBook(path, clock=lambda: 6.0).standing("liar") == book.standing("liar")
    path.write_bytes(document.replace(b"lied", b"lies"))
    assert TrustBook(path).standing("liar").score == 1


def test_the_third_decides_between_two() -> None:
    assert liars(("a", 0), ("b", 1)) == ({"a", "b"}, True)
    assert liars(("a", 0), ("b", 1), ("c", 0)) == ({"b"}, True)
    assert liars(("a", 0), ("b", 1), not_accused="b") == ({"a"}, True)


def test_routes_that_share_peers_single_out_the_liar() -> None:
    first = (("a l c", 0), ("x y z", 1))
    assert len(liars(*first)[0]) == 6
    assert liars(*first, ("a y z", 1)) == ({"l", "c", "y", "z"}, True)
    assert liars(*first, ("a y z", 1), ("x l z", 2)) == ({"l", "z"}, True)
    assert liars(*first, ("a y z", 1), ("x l z", 2), ("x y c", 1)) == ({"l"}, True)
    # A peer that lied in the reply but not in the audit leaves every peer of its route in doubt.
    assert liars(*first, ("a y z", 1), ("x l z", 1), ("x y c", 1)) == ({"a", "l", "c"}, False)


def test_two_who_tell_the_same_lie_are_found_where_a_judge_is_beyond_doubt() -> None:
    answers = (("a l c", 0), ("a m c", 0), ("a k c", 1))
    assert liars(*answers, not_accused="a c") == ({"k"}, True)
    assert liars(*answers, not_accused="a c k") == ({"l m"}, True)


def test_an_answer_that_is_too_coarse_to_compare_contradicts_nobody_and_clears_nobody() -> None:
    """A reply of 4 bits; a lie that is apart from it; and a right answer that is apart from the lie alone."""
    answers = [*seen(("a i", 0), ("c l", 1)), Observation(frozenset("ef"), 2, frozenset({0}))]
    assert minimal_liar_sets(answers, ()) == ([frozenset("c"), frozenset("l")], True)
    assert comparable(answers) == answers[1:2], "nobody has agreed with the reply, and it with nobody"
    answers.append(Observation(frozenset("gl"), 3, frozenset({0})))
    assert minimal_liar_sets(answers, ()) == ([frozenset("l")], True)
    assert is_confirmed(frozenset("l"), answers), "wrong twice, beside the answer of e and f"
    assert wrong_answers(frozenset("l"), answers) == 2


def test_an_answer_that_is_too_coarse_to_compare_confirms_no_guilt() -> None:
    """The hop of 4 bits lies in the reply by more than formats differ, and in audits by less."""
    answers = [*seen(("a i", 0), ("c d", 1), ("a d", 1)), Observation(frozenset("gi"), 2, frozenset({1}))]
    assert minimal_liar_sets(answers, ()) == ([frozenset("i")], True)
    assert not is_confirmed(frozenset("i"), answers)
    answers[-1] = Observation(frozenset("gi"), 2)
    assert is_confirmed(frozenset("i"), answers)


def test_a_route_that_was_asked_already_tells_nothing() -> None:
    answers = seen(("a", 0), ("b", 1))
    stories, _ = minimal_liar_sets(answers, ())
    assert worst_case_remaining(["a"], stories, answers) == 2
    assert worst_case_remaining(["c"], stories, answers) == 1
    assert blame(stories) == {"a": 0.5, "b": 0.5}


def test_a_peer_that_is_always_among_the_suspects_takes_an_ever_larger_part_of_the_doubt() -> None:
    book = TrustBook(clock=lambda: 0.0)
    shares = []
    for company in ("a b", "c d", "a d", "b c", "a c", "b d"):
        stories = [frozenset({peer}) for peer in ("liar", *company.split())]
        found = blame(stories, book.doubt)
        assert sum(found.values()) == pytest.approx(1)
        shares.append(found["liar"])
        for peer, share in found.items():
            book.note(peer, "doubted", "in doubt", share)
    assert shares[0] == pytest.approx(1 / 3)
    assert min(shares[1:]) > 0.4
    assert shares[-1] > 0.5
    assert not book.standing("liar").trusted
    assert all(book.standing(peer).trusted for peer in "abcd")


def test_rounding_is_tolerated_where_it_is_announced() -> None:
    exact, int8, half = ("none f32",) * 2, ("none f32", "int8 f32"), ("none bf16",) * 2
    assert tolerance(exact, exact) == tolerance(int8, int8) == EXACT
    assert tolerance(exact, int8) == tolerance(half, half) == ROUGH
    rounded, rough = (tuple(f"{text} over int8" for text in one) for one in (exact, half))
    assert tolerance(exact, rounded) == tolerance(rounded, exact) == tolerance(rounded, rounded) == ROUNDED
    assert tolerance(rough, rough) == tolerance(rounded, int8) == tolerance(rounded, half) == ROUGH
    stored, int4 = ("stored f32",) * 2, ("none f32", "int4 f32")
    assert tolerance(stored, stored) == tolerance(stored, exact) == tolerance(int4, int4) == ROUNDED
    assert tolerance(stored, int8) == tolerance(stored, ("stored bf16",) * 2) == ROUGH
    assert tolerance(int4, exact) == tolerance(half, int4) == tolerance(("int4 bf16 or none bf16",) * 2, half) == COARSE
    assert tolerance(("int4 bf16",), ("int4 bf16",)) == ROUGH
    beside = ("int4 f32", "none bf16")
    assert tolerance(int4[::-1], beside) == ROUGH, "the blocks of 4 bits are the same"
    cached = ("none f32", "none f32 int8 cache")
    assert tolerance(cached, cached) == tolerance(cached, exact) == tolerance(exact, cached) == ROUNDED
    assert tolerance(cached, stored) == tolerance(("stored f32 int8 cache over int8",) * 2, rounded) == ROUNDED
    assert tolerance(cached, int8) == tolerance(("none bf16 int8 cache",) * 2, half) == ROUGH
    assert tolerance(("none f32 or none f32 int8 cache",) * 2, exact) == ROUGH
    assert Deviation(0.03, -0.001).within(ROUGH)
    assert not Deviation(0.03, -0.001).within(EXACT)
    assert not Deviation(0.05, 0.05).within(ROUGH)
    assert not Deviation(float("nan"), 0.0).within(ROUGH)


def test_a_peer_counts_as_computing_in_all_formats_that_it_announced() -> None:
    route = (Hop("a", Span(0, 1)), Hop("b", Span(1, 3)))
    announced = [("a", "none f32"), ("b", "none f32"), ("b", "int4 f32"), ("c", "int8 f32")]
    assert precisions([route], announced) == ("none f32", *("int4 f32 or none f32",) * 2)
    assert precisions([route], announced[:1]) == ("none f32", "?", "?")


def test_a_member_computes_alike_if_all_its_blocks_were_computed_in_its_format() -> None:
    computed = ("none f32 over int8", "none f32 over int8", "int4 f32 over int8")
    rough = replace(member("r", 2, 6), quantisation="int4")
    assert computes_alike(member("a", 0, 2), computed)
    assert computes_alike(rough, computed)
    assert not computes_alike(member("b", 0, 3), computed)
    assert not computes_alike(replace(rough, dtype="bf16"), computed)


def test_who_is_slow_in_every_company_stands_out() -> None:
    actual_s = {"a": 0.001, "b": 0.001, "slow": 0.1, "c": 0.001}
    claims_s = {"a": 0.001, "b": 0.001, "slow": 1e-9, "c": 0.001}
    measured = MeasuredSpeeds()
    for first in ("a", "b"):
        for second in ("slow", "c") * 8:
            route = (Hop(first, Span(0, 4)), Hop(second, Span(4, 8)))
            measured.note(route, 0.002 + sum(4 * actual_s[hop.peer] for hop in route), 0.0, claims_s, 0.0)
    assert measured.block_s(0.0)["slow"] == pytest.approx(0.1, rel=0.3)
    assert max(measured.block_s(0.0)["a"], measured.block_s(0.0)["c"]) < 0.03


def test_who_was_slow_once_is_tried_again_later() -> None:
    """A peer is measured only in replies that use it: one slow reply kept a fast one out until the asker restarted."""
    measured = MeasuredSpeeds()
    stalled, steady = (Hop("stalled", Span(0, 8)),), (Hop("steady", Span(0, 8)),)
    measured.note(stalled, 5.0, 0.0, {}, 0.0)
    measured.note(steady, 0.1, 0.0, {}, BELIEVED_S - 1)
    assert set(measured.block_s(BELIEVED_S)) == {"stalled", "steady"}
    measured.note(stalled, 5.0, 0.0, {}, BELIEVED_S)
    assert set(measured.block_s(2 * BELIEVED_S - 0.5)) == {"stalled"}
    assert measured.block_s(3 * BELIEVED_S + 1) == {}


def test_a_peer_that_was_waited_for_counts_as_slower_for_a_while() -> None:
    """Ten times as slow as was believed; nobody else, and not for what is measured of single tokens."""
    speeds, route = MeasuredSpeeds(), (Hop("a", Span(0, 4)), Hop("b", Span(4, 8)))
    speeds.note(route, 0.08, 0.0, {"a": 0.01, "b": 0.01}, 0.0)
    before = speeds.block_s(0.0)
    pace = ReadingPace(step_s=0.04, token_s=0.01, block_s=before["b"])  # 1.04 s for 100 tokens
    speeds.note_wait(route[1], pace, 100, 10.4, 0.0)
    assert speeds.block_s(0.0) == {"a": before["a"], "b": pytest.approx(10 * before["b"])}
    speeds.note_wait(route[1], pace, 100, 5.2, 10.0)
    assert speeds.block_s(10.0)["b"] == pytest.approx(10 * before["b"]), "what is shorter says nothing new"
    speeds.note(route, 0.08, 0.0, {}, 20.0)
    assert speeds.block_s(20.0)["a"] == pytest.approx(before["a"], rel=0.2), (
        "the next measurement is not compared to it"
    )
    assert speeds.block_s(BELIEVED_S + 1)["b"] == pytest.approx(before["b"], rel=0.2)


def test_a_wait_says_no_more_than_that_not_a_single_token_came() -> None:
    speeds, hop = MeasuredSpeeds(), Hop("a", Span(0, 4))
    speeds.note_wait(hop, ReadingPace(1e-9, 1e-9, 1.0, 1e-3), 1000, 40.0, 0.0)
    assert speeds.block_s(0.0) == {"a": 10.0}


def test_elimination_alone_convicts_nobody() -> None:
    """A liar that answers well in audits leaves another peer of its route as the only one not tried again."""
    answers = seen(("a l c", 0), ("x y z", 1), ("w l z", 1), ("w y c", 1))
    stories, always = minimal_liar_sets(answers, ())
    assert (stories, always) == ([frozenset({"a"})], True)
    assert not is_confirmed(stories[0], answers)
    assert set(occasional_liar_sets(answers, ())) == {frozenset({peer}) for peer in "alc"}
    again = [*answers, *seen(("a y z", 2))]
    assert is_confirmed(frozenset({"a"}), again)
    cleared = (("a l c", 0), ("x y z", 1), ("w l z", 1), ("w y c", 1), ("a y z", 1))
    assert liars(*cleared) == ({"a", "l", "c"}, False)


def plain_liar_sets(answers: list[Observation], not_accused: set[str], size: int, always: bool) -> set[frozenset[str]]:
    """All sets of so many peers that explain the answers, tried one by one."""

    def explains(suspects: tuple[str, ...]) -> bool:
        clean = {one.group for one in answers if one.peers.isdisjoint(suspects)}
        lied = {one.group for one in answers if not one.peers.isdisjoint(suspects)}
        return len(clean) <= 1 and not (always and clean & lied)

    peers = sorted({peer for one in answers for peer in one.peers} - not_accused)
    return {frozenset(suspects) for suspects in combinations(peers, size) if explains(suspects)}


routes = st.frozensets(st.sampled_from("abcdefg"), min_size=1, max_size=4)


@given(
    st.lists(st.builds(Observation, routes, st.integers(0, 2)), min_size=1, max_size=6), st.sets(st.sampled_from("ab"))
)
def test_the_smallest_sets_of_liars_are_those_found_by_trying_all(
    answers: list[Observation], trusted: set[str]
) -> None:
    kinds = [(size, always) for size in (1, 2) for always in (True, False)]
    expected = next(
        ((sets, kind[1]) for kind in kinds if (sets := plain_liar_sets(answers, trusted, *kind))), (set(), False)
    )
    found, always = minimal_liar_sets(answers, trusted)
    assert (set(found), len(found), always) == (expected[0], len(expected[0]), expected[1])
    sometimes = next((sets for size in (1, 2) if (sets := plain_liar_sets(answers, trusted, size, False))), set())
    assert set(occasional_liar_sets(answers, trusted)) == sometimes


def test_liars_on_long_routes_are_found_without_trying_all_pairs() -> None:
    """Nine answers over forty hops each, and two liars in different routes: a few kinds of peers explain them."""
    answers = [Observation(frozenset(f"{route}-{hop}" for hop in range(40)), 0) for route in range(7)]
    answers += [Observation(frozenset({"x", *(f"8-{hop}" for hop in range(39))}), 1)]
    answers += [Observation(frozenset({"y", *(f"9-{hop}" for hop in range(39))}), 2)]
    took_s = []
    for _ in range(3):  # a processor that others use too is slower at times
        began_s = time.process_time()
        stories, always = minimal_liar_sets(answers, ())
        took_s.append(time.process_time() - began_s)
    assert min(took_s) < 0.1  # trying all pairs takes half a second
    assert (len(stories), always) == (1600, True)
