"""Coverage by announcements: summed up plainly, and kept up to date as members come and go."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.span import Span
from app.swarm.coverage import COMING, LEVEL_SHARE, MEDIANS, UNMEASURED_TOKENS_PER_S, CoverageTally, coverage_of
from app.swarm.records import Announcement

BLOCKS = 8

spans = st.tuples(st.integers(0, BLOCKS + 1), st.integers(1, BLOCKS)).map(lambda drawn: Span(drawn[0], sum(drawn)))
speeds = st.sampled_from([0.0, 0.25, 1.0, 7.3, 10.0, 1e3, 1e9])
states = st.sampled_from(["serving", "loading", "joining", "draining", "client"])
members = st.lists(
    st.builds(
        lambda peer, span, growing, speed, state: Announcement(peer, 1, 0, "", state, span, speed, growing=growing),
        st.sampled_from("abcde"),
        st.none() | spans,
        st.none() | spans,
        speeds,
        states,
    )
)
HOMES = {"a": "first", "b": "first", "c": "second"}  # "d" and "e" are homes of their own


@given(members, speeds)
def test_each_block_has_the_speed_of_its_homes_and_no_claim_counts_beyond_the_cap(
    swarm: list[Announcement], own: float
) -> None:
    found = coverage_of(swarm, BLOCKS, own, HOMES)
    holders = [(HOMES.get(m.peer, m.peer), m, m.growing or m.span) for m in swarm if m.state in COMING]
    held = {
        (home, block): [m for its_home, m, span in holders if its_home == home and span is not None and block in span]
        for home, _, _ in holders
        for block in range(BLOCKS)
    }
    held = {place: found_there for place, found_there in held.items() if found_there}
    fastest = {
        home: max(m.decode_tokens_per_s for at, b in held for m in held[at, b] if at == home) for home, _ in held
    }
    measured = sorted(speed for speed in (*fastest.values(), own) if speed)
    usual = measured[len(measured) // 2] if measured else UNMEASURED_TOKENS_PER_S
    claimed = {place: sum(m.decode_tokens_per_s for m in there) or usual for place, there in held.items()}
    work = sum(min(speed, MEDIANS * usual) for speed in claimed.values())
    cap = max(MEDIANS * usual, LEVEL_SHARE * work / BLOCKS)
    assert found.usual == usual
    assert found.cap == pytest.approx(cap)
    for block in range(BLOCKS):
        places = [(home, at) for home, at in held if at == block]
        assert found.holders[block] == len(places)
        serving = [any(m.state == "serving" and m.growing is None for m in held[place]) for place in places]
        assert found.serving[block] == sum(serving)
        assert found.speeds[block] == pytest.approx(sum(min(claimed[place], cap) for place in places), abs=1e-4)


@given(members, members, speeds, st.randoms(use_true_random=False))
def test_a_tally_kept_up_to_date_gives_exactly_the_coverage_of_those_who_are_left(
    stay: list[Announcement], go: list[Announcement], own: float, rng: random.Random
) -> None:
    tally = CoverageTally(BLOCKS, go, HOMES)
    steps = [(tally.add, m) for m in stay] + [(tally.remove, m) for m in go]
    rng.shuffle(steps)
    for step, member in steps:
        step(member)
    assert tally.coverage(own) == coverage_of(stay, BLOCKS, own, HOMES)
