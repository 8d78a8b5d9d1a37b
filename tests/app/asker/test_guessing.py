"""Guesses: what the look-up finds, how many are worth sending, and what is learned from rounds."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.asker.guessing import (
    DRAFT_EVERY,
    INDEXED_AT_ONCE,
    LEAST_GAIN,
    LONGEST_MATCH,
    LONGEST_PATIENCE,
    MAX_GUESSES,
    PLAIN_EVERY,
    SHORTEST_MATCH,
    SHORTEST_PATIENCE,
    Guesser,
    GuessHistory,
    HitRate,
    Match,
    PromptLookup,
    best_count,
    right_guesses,
)

tokens = st.lists(st.integers(0, 3), max_size=60)


@pytest.mark.parametrize(
    ("text", "count", "found"),
    [
        ([], 3, None),
        ([1], 3, None),
        ([1, 2, 3, 4], 3, None),
        ([1, 2, 3, 1, 2], 1, Match(2, (3,))),
        ([1, 2, 3, 4, 5, 1, 2], 3, Match(2, (3, 4, 5))),
        ([1, 2, 3, 1, 2], 5, Match(2, (3, 1, 2, 3, 1))),  # runs into itself: it repeats
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, Match(2, (9,))),  # of equal matches the latest
        ([7, 1, 2, 8, 6, 1, 2, 9, 7, 1, 2], 1, Match(3, (8,))),  # the longest match before the latest
        ([5, 5, 5, 5], 3, Match(3, (5, 5, 5))),
        ([1, 2, 3, 1, 2], 0, None),
    ],
)
def test_the_look_up_finds_what_followed_the_longest_match(text: list[int], count: int, found: Match | None) -> None:
    assert PromptLookup(text).find(count) == found


@given(tokens, st.integers(1, MAX_GUESSES))
def test_the_look_up_agrees_with_a_search_of_every_place(text: list[int], count: int) -> None:
    places = range(SHORTEST_MATCH, len(text))

    def same(place: int) -> int:
        longest = 0
        while longest < min(place, LONGEST_MATCH) and text[place - longest - 1] == text[len(text) - longest - 1]:
            longest += 1
        return longest

    longest = max(map(same, places), default=0)
    found = PromptLookup(text).find(count)
    if longest < SHORTEST_MATCH:
        assert found is None
    else:
        assert found is not None
        recent = [place for place in places if same(place) >= SHORTEST_MATCH][-24:]
        assert found.length == max(map(same, recent))
        period = text[max(place for place in recent if same(place) == found.length) :]
        assert list(found.tokens) == (period * count)[:count]


@given(tokens, tokens, st.integers(0, MAX_GUESSES))
def test_a_look_up_that_grows_finds_what_a_new_one_finds(text: list[int], more: list[int], count: int) -> None:
    grown = PromptLookup(text)
    for token in more:
        grown.extend([token])
    assert grown.find(count) == PromptLookup(text + more).find(count)


def test_a_long_prompt_is_looked_through_in_parts() -> None:
    text = [*range(4 * INDEXED_AT_ONCE), 3 * INDEXED_AT_ONCE, 3 * INDEXED_AT_ONCE + 1]
    lookup = PromptLookup(text)
    found = [lookup.find(1) for _ in range(5)]
    assert found == [None, None, None, *[Match(2, (3 * INDEXED_AT_ONCE + 2,))] * 2]


@pytest.mark.parametrize(
    ("rate", "row_s", "count"),
    [
        (0.9, 0.0, MAX_GUESSES),  # rows that cost nothing
        (0.0, 0.0, 0),
        (0.2, 0.25, 0),  # right too rarely for what it costs
        (0.9, 1.0, 0),  # a row costs as much as a round: nothing can be gained
        (0.5, 0.1, 2),
        (0.99, 0.25, MAX_GUESSES),
    ],
)
def test_the_number_of_guesses_follows_rate_and_cost(rate: float, row_s: float, count: int) -> None:
    assert best_count([rate] * MAX_GUESSES, 1.0, row_s).guesses == count


@given(st.lists(st.floats(0, 1), max_size=MAX_GUESSES), st.floats(0, 2), st.floats(0, 4))
def test_guesses_never_promise_less_than_none(rates: list[float], row_s: float, fixed_s: float) -> None:
    promise = best_count(rates, 1.0, row_s, fixed_s)
    assert promise.guesses <= len(rates)
    assert promise.speed == 1.0 if not promise.guesses else promise.speed >= LEAST_GAIN

    def speed(count: int) -> float:
        guessed = sum(prod(rates[: n + 1]) for n in range(count))
        return (1 + guessed) / (1 + fixed_s * (count > 0) + count * row_s)

    best = max(speed(count) for count in range(len(rates) + 1))
    assert promise.speed == pytest.approx(best) or best < LEAST_GAIN * 1.000001


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=50))
def test_a_rate_stays_a_probability_and_follows_what_it_sees(prior: float, hits: list[bool]) -> None:
    rate = HitRate(prior)
    for hit in hits:
        before = rate.value
        rate.note(hit)
        assert 0 <= rate.value <= 1
        assert rate.value >= before if hit else rate.value <= before


def history_of(round_s: float, row_s: float) -> GuessHistory:
    history = GuessHistory()
    for _ in range(20):
        history.note(1, round_s)
        history.note(4, round_s + 3 * row_s)
    return history


def test_more_guesses_go_along_after_rounds_that_were_right_and_few_after_one_that_was_wrong() -> None:
    guesser = Guesser([*range(40)] * 3, history_of(1.0, 0.01))
    at, sent = 0, []

    def follows(count: int) -> list[int]:
        return [(at + n) % 40 for n in range(count)]

    for is_right in (True, True, True, True, False, True, True):
        guesses = guesser.propose(room=100).tokens
        sent.append(len(guesses))
        guesser.note(guesses, drawn := follows(len(guesses) + 1) if is_right else [99], 1.0)
        if not is_right:
            guesser.note((), drawn := follows(4), 1.0)
        at = (at + len(drawn)) % 40
    assert sent == [2, 4, 8, MAX_GUESSES, MAX_GUESSES, 2, 4]


def test_the_cost_of_a_row_is_what_rounds_with_more_rows_take_longer() -> None:
    history = history_of(0.1, 0.02)
    assert history.round_s == pytest.approx(0.1)
    assert history.row_s == pytest.approx(0.02)
    history.note_draft(4, 0.04)
    assert history.draft_s == pytest.approx(0.01)


def test_a_stall_of_the_machine_does_not_keep_guesses_away() -> None:
    history = GuessHistory()
    history.note(1, 0.1)
    history.note(3, 7.0)  # as if guesses took many rounds
    history.note(8, 7.0)
    assert history.row_s < 0.05
    assert history.fixed_s == 0
    history = history_of(0.1, 0.01)
    history.note(1, 9.0)
    assert history.round_s == pytest.approx(0.1)


def test_guesses_for_which_a_device_begins_again_cost_the_same_however_many_they_are() -> None:
    history = GuessHistory()
    for guesses in 3 * (1, 1, 8, 2, 1, 15, 4, 1, 2, 12, 6, 1, 1, 15):
        history.note(1, 0.004)
        history.note(1 + guesses, 0.012 + 0.0002 * guesses)
    assert history.fixed_s == pytest.approx(0.008, rel=0.1)
    assert history.row_s == pytest.approx(0.0002, rel=0.2)
    assert history.promise([0.9]).guesses == 0, "one right token saves less than it costs to begin again"
    assert history.promise([0.9] * MAX_GUESSES).guesses == MAX_GUESSES


def tries_of(history: GuessHistory, rounds: int, guessed_s: float) -> list[int]:
    """The rounds in which a guess that is mostly right is tried, if a round with it takes so long."""
    tries = []
    for number in range(rounds):
        guesses = history.promise([0.9]).guesses
        history.note(1 + guesses, guessed_s if guesses else 0.1)
        tries += [number] * guesses
    return tries


def test_what_guesses_cost_is_measured_again_less_and_less_often() -> None:
    tries = tries_of(GuessHistory(), 10_000, 0.33)
    assert 5 <= len(tries) <= 12
    assert tries[-1] - tries[-2] > LONGEST_PATIENCE


def test_guesses_that_pay_again_are_made_again() -> None:
    history = GuessHistory()
    tries_of(history, 1000, 0.33)
    assert len(tries_of(history, LONGEST_PATIENCE + 100, 0.11)) > 90
    assert len(tries_of(history, SHORTEST_PATIENCE, 0.11)) == SHORTEST_PATIENCE


def write(guesser: Guesser, text: Sequence[int]) -> tuple[int, int, int]:
    """Write a text that is known beforehand; returns rounds, guesses sent and guesses right."""
    at = rounds = sent = right = 0
    while at < len(text):
        guesses = guesser.propose(len(text) - at - 1).tokens
        drawn = text[at : at + 1 + right_guesses(guesses, text[at:])]
        guesser.note(guesses, drawn, None)
        at, rounds, sent, right = at + len(drawn), rounds + 1, sent + len(guesses), right + len(drawn) - 1
    return rounds, sent, right


def test_nothing_is_guessed_before_the_time_of_a_round_is_known() -> None:
    assert write(Guesser([1, 2, 3] * 20, GuessHistory()), [1, 2, 3] * 10)[1] == 0


def test_text_that_repeats_is_written_in_few_rounds() -> None:
    passage = list(range(100))
    rounds, sent, right = write(Guesser([*passage, 7, 8], history_of(0.1, 0.01)), passage[9:])
    assert rounds < 15
    assert right > 0.8 * sent


def test_text_whose_matches_mislead_soon_gets_no_guesses() -> None:
    """Pairs occur again and again, but what follows them is never the same."""
    text = [token for index in range(200) for token in (1, 2, 1000 + index)]
    rounds, sent, right = write(Guesser(text[:60], history_of(0.1, 0.04)), text[60:])
    assert sent <= 3
    assert rounds == len(text) - 60 - right


def test_now_and_then_a_round_goes_without_guesses() -> None:
    guesser = Guesser([1, 2, 3] * 20, history_of(0.1, 0.001))
    sent = []
    for _ in range(3 * PLAIN_EVERY):
        guesses = guesser.propose(1000).tokens
        guesser.note(guesses, ([1, 2, 3] * 6)[: len(guesses) + 1], 0.1)
        sent.append(len(guesses))
    assert sum(count == 0 for count in sent) == 3


def test_a_draft_that_is_never_right_is_asked_less_and_less() -> None:
    history = history_of(0.1, 0.01)
    history.note_draft(1, 0.01)
    guesser = Guesser(range(50), history)
    asked = []
    for index in range(600):
        count = guesser.propose(1000, can_draft=True).draft
        guesser.note([-1] * count, [10_000 + index], None, 0.01 * count if count else None)
        asked.append(count)
    assert asked[0] > 0  # it was given a chance
    assert sum(count > 0 for count in asked[:100]) < 12
    assert 1 <= sum(count > 0 for count in asked[300:]) <= 3  # and is given one now and then


def test_a_draft_that_is_always_right_is_asked_for_more() -> None:
    history = history_of(0.1, 0.01)
    history.note_draft(1, 0.01)
    guesser = Guesser([], history)
    for index in range(40):
        count = guesser.propose(1000, can_draft=True).draft
        drawn = list(range(100 * index, 100 * index + count + 1))
        guesser.note(drawn[:count], drawn, None, 0.01 * count if count else None)
    assert guesser.propose(1000, can_draft=True).draft >= 8


def test_a_reply_has_no_draft_beside_it_while_drafts_promise_nothing() -> None:
    history = history_of(0.005, 0.0005)
    assert history.wants_draft()  # nothing is known yet
    assert history.draft_promise(MAX_GUESSES).guesses == 1  # and one guess tells
    history.note_draft(1, 0.02)
    asked = [history.wants_draft() for _ in range(3 * (DRAFT_EVERY + 1))]
    assert sum(asked) == 3
    for _ in range(9):
        history.note_draft(1, 0.0005)
    assert history.wants_draft()


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_right_guesses_are_the_common_prefix(guesses: list[int], came: list[int]) -> None:
    right = right_guesses(guesses, came)
    assert guesses[:right] == came[:right]
    assert right in (len(guesses), len(came)) or guesses[right] != came[right]


@given(st.lists(st.integers(0, 4), max_size=40), st.lists(st.integers(0, 4), min_size=1, max_size=80))
def test_whatever_the_text_the_rounds_add_up(prompt: list[int], text: list[int]) -> None:
    guesser = Guesser(prompt, history_of(0.1, 0.01))
    rounds, _, right = write(guesser, text)
    assert rounds + right == len(text)
