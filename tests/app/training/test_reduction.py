"""One sum of several holders' sums: the plain one of two, a clipped one of more, and who stands apart."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.training.reduction import TOLERANCE, HolderSums, Numbers, agreement, deviation, reduced, standing_apart

TRUTH = numpy.random.default_rng(0).normal(size=400).astype(numpy.float32)


def honest(peers: int, tokens: tuple[int, ...] = (40, 60, 50), noise: float = 0.5, seed: int = 1) -> list[HolderSums]:
    """Sums of gradients that are the truth and some noise, less the more tokens there are."""
    rng = numpy.random.default_rng(seed)
    made = []
    for index in range(peers):
        count = tokens[index % len(tokens)]
        mean = TRUTH + noise * math.sqrt(50 / count) * rng.normal(size=TRUTH.size)
        made.append(HolderSums(f"p{index}", count, (mean * count).astype(numpy.float32)))
    return made


def attacked(shares: list[HolderSums], attack: str) -> list[HolderSums]:
    """The same with the last one poisoned."""
    *others, last = shares
    noise = numpy.random.default_rng(9).normal(size=TRUTH.size) * numpy.abs(last.sums).mean()
    poisoned: dict[str, Numbers] = {
        "flipped": -last.sums,
        "flipped x 10": -10 * last.sums,
        "noise": noise.astype(numpy.float32),
        "zeros": numpy.zeros_like(last.sums),
    }
    return [*others, last._replace(sums=poisoned[attack])]


ATTACKS = ("flipped", "flipped x 10", "noise", "zeros")


@pytest.mark.parametrize("peers", [1, 2])
def test_one_or_two_are_added_up_in_the_order_of_their_ids(peers: int) -> None:
    shares = honest(peers)
    total = shares[0].sums if peers == 1 else shares[0].sums + shares[1].sums
    assert reduced(shares).tobytes() == reduced(shares[::-1]).tobytes() == total.tobytes()


@pytest.mark.parametrize("peers", [3, 4, 7])
def test_clipping_hardly_changes_the_sum_of_honest_ones(peers: int) -> None:
    shares = honest(peers)
    plain = reduced(shares, clipped=False)
    assert deviation(reduced(shares), plain) < 0.1
    assert reduced(shares).tobytes() == reduced(shares[::-1]).tobytes()


@pytest.mark.parametrize("attack", ATTACKS)
def test_clipping_bounds_what_one_of_three_can_do(attack: str) -> None:
    shares = honest(3)
    wanted = TRUTH * sum(share.tokens for share in shares)
    assert deviation(reduced(attacked(shares, attack)), wanted) < 0.5
    if attack == "flipped x 10":
        assert deviation(reduced(attacked(shares, attack), clipped=False), wanted) > 1


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("peers", [3, 4, 6])
def test_the_liar_stands_apart_and_agrees_least(attack: str, peers: int) -> None:
    shares = attacked(honest(peers, noise=0.3), attack)
    assert standing_apart(shares)[:1] == [f"p{peers - 1}"]
    found = agreement(shares)
    assert min(found, key=lambda peer: found[peer]) == f"p{peers - 1}"


@pytest.mark.parametrize("attack", ["flipped", "flipped x 10", "zeros"])
def test_of_two_that_disagree_both_stand_apart(attack: str) -> None:
    assert standing_apart(attacked(honest(2), attack)) == ["p0", "p1"]


@pytest.mark.parametrize("peers", [1, 2, 3, 5])
def test_honest_holders_do_not_stand_apart(peers: int) -> None:
    assert not [peer for seed in range(50) for peer in standing_apart(honest(peers, seed=seed))]


def test_equal_and_zero_sums_do_no_harm() -> None:
    same = [HolderSums(f"p{index}", 10, TRUTH * 10) for index in range(3)]
    assert deviation(reduced(same), TRUTH * 30) < 1e-6
    assert not standing_apart(same)
    zeros = [HolderSums(f"p{index}", 10, numpy.zeros_like(TRUTH)) for index in range(3)]
    assert not reduced(zeros).any()
    assert not standing_apart(zeros)
    assert set(agreement(zeros).values()) == {0.0}


@given(st.floats(-0.01, 0.01), st.integers(0, 100))
def test_rounding_is_within_the_tolerance_and_attacks_are_not(rounding: float, seed: int) -> None:
    noise = numpy.random.default_rng(seed).normal(size=TRUTH.size).astype(numpy.float32)
    assert deviation(TRUTH, TRUTH + rounding * noise) < TOLERANCE
    for attack in ATTACKS:
        share = HolderSums("p", 1, TRUTH)
        assert deviation(TRUTH, attacked([share], attack)[0].sums) > TOLERANCE
    assert deviation(TRUTH, TRUTH * numpy.float32("nan")) == math.inf
