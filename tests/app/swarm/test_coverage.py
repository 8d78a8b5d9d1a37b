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
        lambda span, growing, speed, state: Announcement("p", 1, 0, "", state, span, speed, growing=growing),
        st.none() | spans,
        st.none() | spans,
        speeds,
        states,
    )
)


@given(members, speeds)
def test_each_block_has_the_speed_of_its_holders_and_no_claim_counts_beyond_the_cap(
    swarm: list[Announcement], own: float
) -> None:
    found = coverage_of(swarm, BLOCKS, own)
    spans = {number: m.growing or m.span for number, m in enumerate(swarm) if m.state in COMING}
    held = {n: [b for b in span.blocks() if b < BLOCKS] for n, span in spans.items() if span is not None}
    held = {number: blocks for number, blocks in held.items() if blocks}
    claimed = {number: swarm[number].decode_tokens_per_s for number in held}
    measured = sorted(speed for speed in (*claimed.values(), own) if speed)
    usual = measured[len(measured) // 2] if measured else UNMEASURED_TOKENS_PER_S
    counted = {number: min(speed or usual, MEDIANS * usual) for number, speed in claimed.items()}
    work = sum(speed * len(held[number]) for number, speed in counted.items())
    cap = max(MEDIANS * usual, LEVEL_SHARE * work / BLOCKS)
    assert found.usual == usual
    assert found.cap == pytest.approx(cap)
    for block in range(BLOCKS):
        holders = [number for number, blocks in held.items() if block in blocks]
        assert found.holders[block] == len(holders)
        served = [n for n in holders if swarm[n].state == "serving" and swarm[n].growing is None]
        assert found.serving[block] == len(served)
        total = sum(min(claimed[number] or usual, cap) for number in holders)
        assert found.speeds[block] == pytest.approx(total, abs=1e-4)


@given(members, members, speeds, st.randoms(use_true_random=False))
def test_a_tally_kept_up_to_date_gives_exactly_the_coverage_of_those_who_are_left(
    stay: list[Announcement], go: list[Announcement], own: float, rng: random.Random
) -> None:
    tally = CoverageTally(BLOCKS, go)
    steps = [(tally.add, m) for m in stay] + [(tally.remove, m) for m in go]
    rng.shuffle(steps)
    for step, member in steps:
        step(member)
    assert tally.coverage(own) == coverage_of(stay, BLOCKS, own)
