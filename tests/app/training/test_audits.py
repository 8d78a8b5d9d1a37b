"""Whom a job audits, and who is found to have lied."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy
import pytest

from app.core.span import Span
from app.training.audits import Answer, AuditLots, AuditVerdict, Caution, Suspect, judge, other_causes
from app.training.reduction import HolderSums
from tests.app.training.test_reduction import ATTACKS, attacked, honest

RUN = Span(0, 4)
RIGHT = numpy.ones(10, numpy.float32)
WRONG = -RIGHT


@pytest.mark.parametrize(
    ("sums", "not_accused", "liar", "agree"),
    [
        pytest.param([RIGHT, RIGHT * 1.0001], (), None, True, id="rounding"),
        pytest.param([WRONG, RIGHT], (), None, False, id="two cannot tell"),
        pytest.param([WRONG, RIGHT], ("p1",), "p0", False, id="two, one of them is trusted"),
        pytest.param([RIGHT, WRONG], ("p0",), "p1", False, id="the witness lied"),
        pytest.param([WRONG, RIGHT, RIGHT], (), "p0", False, id="the suspect lied"),
        pytest.param([RIGHT, WRONG, RIGHT], (), "p1", False, id="of three, the witness lied"),
        pytest.param([RIGHT, WRONG, RIGHT * 5], (), None, False, id="all differ"),
        pytest.param([WRONG, RIGHT, RIGHT], ("p0",), None, False, id="who is trusted stands alone"),
        pytest.param([RIGHT * numpy.float32("nan"), RIGHT, RIGHT], (), "p0", False, id="not finite"),
        pytest.param([RIGHT * 0, RIGHT * 0], (), None, True, id="zeros"),
    ],
)
def test_who_lied(sums: list[numpy.ndarray], not_accused: tuple[str, ...], liar: str | None, agree: bool) -> None:
    answers = [Answer(f"p{index}", each.astype(numpy.float32)) for index, each in enumerate(sums)]
    homes = {answer.peer: f"the home of {answer.peer}" for answer in answers}
    verdict = judge(answers, homes, not_accused)
    assert (verdict.liar, verdict.agree) == (liar, agree)
    assert liar not in verdict.accusers
    assert bool(verdict.accusers) == (liar is not None)


@pytest.mark.parametrize(
    ("met", "homes", "others"),
    [
        pytest.param({"liar": [], "w1": [], "w2": []}, {}, set(), id="nobody else"),
        pytest.param({"liar": ["a"], "w1": [], "w2": []}, {}, {"a"}, id="before the accused"),
        pytest.param({"liar": [], "w1": ["a"], "w2": ["a"]}, {}, {"a"}, id="before all accusers"),
        pytest.param({"liar": [], "w1": ["a"], "w2": ["b"]}, {}, set(), id="before one accuser each"),
        pytest.param({"liar": [], "w1": ["a"], "w2": ["b"]}, {"b": "a"}, {"a", "b"}, id="of one home, before all"),
        pytest.param({"liar": [], "w1": ["w2"], "w2": []}, {}, {"w2"}, id="an accuser before the other"),
    ],
)
def test_who_else_may_have_caused_a_contradiction(
    met: dict[str, list[str]], homes: dict[str, str], others: set[str]
) -> None:
    everywhere = {peer: {peer, *hops} for peer, hops in met.items()}
    verdict = AuditVerdict("liar", False, ("w1", "w2"))
    assert other_causes(verdict, everywhere, lambda peer: homes.get(peer, peer)) == others


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_a_liar_is_audited_within_twenty_steps(attack: str, noise: float) -> None:
    lots = AuditLots(Caution())
    for version in range(20):
        shares = attacked(honest(3, noise=noise, seed=version), attack)
        suspects = lots.choose({RUN: shares}, version)
        if "p2" in {one.peer for one in suspects}:
            return
        for one in suspects:
            lots.cleared(one, version)
    pytest.fail("the liar was not audited")


@pytest.mark.parametrize("peers", [2, 3, 4])
def test_audits_of_honest_holders_are_few_and_go_round(peers: int) -> None:
    lots, audited = AuditLots(Caution(), random.Random(0)), list[str]()
    for version in range(100):
        for one in lots.choose({RUN: honest(peers, seed=version)}, version):
            audited.append(one.peer)
            lots.cleared(one, version)
    everybody = {f"p{index}" for index in range(peers)}
    assert set(audited[:peers]) == everybody  # each once at first
    assert set(audited[peers:]) == everybody  # then in turn, and now and then somebody else
    assert peers + (100 - peers) // 10 <= len(audited) <= peers + 25


def test_who_was_cleared_rests() -> None:
    lots = AuditLots(Caution(audit_every=1000, rest=5), random.Random(0))
    for peer in ("p0", "p1", "p2"):
        lots.cleared(Suspect(peer, RUN), -5)
    apart = attacked(honest(3, noise=0.2), "flipped")
    audited = []
    for version in range(1000):
        if any(one.peer == "p2" for one in lots.choose({RUN: apart}, version)):
            audited.append(version)
            lots.cleared(Suspect("p2", RUN), version)
    pauses = [later - earlier for earlier, later in pairwise(audited)]
    assert set(pauses) == {1, 2, 3, 4, 5}
    assert pauses.count(5) > len(pauses) / 3


@pytest.mark.parametrize("peers", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_liar_that_waits_for_audits_to_be_over_is_audited_too(peers: int, seed: int) -> None:
    """Holders see who is audited: one that lied just after it was cleared, and never else, was never found."""
    lots, cleared_at = AuditLots(Caution(), random.Random(seed)), dict[str, int]()
    liar = f"p{peers - 1}"
    for version in range(200):
        lies = 0 < version - cleared_at.get(liar, version) < Caution().rest
        shares = honest(peers, noise=0.2, seed=version)
        suspects = lots.choose({RUN: attacked(shares, "flipped x 10") if lies else shares}, version)
        if lies and liar in {one.peer for one in suspects}:
            return
        for one in suspects:
            cleared_at[one.peer] = version
            lots.cleared(one, version)
    pytest.fail("the liar was not audited")


@pytest.mark.parametrize("peers", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_liar_that_knows_when_audits_are_due_is_audited_too(peers: int, seed: int) -> None:
    """Its lies hide in the noise, and every tenth step, after which somebody is audited, it did not lie."""
    lots, audited_at, cleared = AuditLots(Caution(), random.Random(seed)), 0, set[str]()
    liar = f"p{peers - 1}"
    for version in range(1000):
        lies = liar in cleared and 0 < version - audited_at < 10
        shares = honest(peers, noise=0.2, seed=version)
        if lies:
            shares[-1] = shares[-1]._replace(sums=shares[-1].sums * numpy.float32(1.5))
        suspects = lots.choose({RUN: shares}, version)
        if lies and liar in {one.peer for one in suspects}:
            return
        for one in suspects:
            audited_at = version
            cleared.add(one.peer)
            lots.cleared(one, version)
    pytest.fail("the liar was not audited")


@pytest.mark.parametrize("seed", range(5))
def test_a_holder_that_lies_in_one_of_its_runs_is_audited_for_that_one(seed: int) -> None:
    """Each was audited for the last of its runs alone, and cleared for all of them."""
    lots, lied = AuditLots(Caution(), random.Random(seed)), Suspect("p1", RUN)
    for version in range(200):
        first = honest(2, noise=0.2, seed=version)
        if lots._last_cleared(lied) >= 0:  # it waits until it was cleared once
            first[-1] = first[-1]._replace(sums=first[-1].sums * numpy.float32(1.5))
        suspects = lots.choose({RUN: first, Span(4, 8): honest(3, seed=version)}, version)
        if lots._last_cleared(lied) >= 0 and lied in suspects:
            return
        for one in suspects:
            lots.cleared(one, version)
    pytest.fail("the liar was not audited")


def test_those_that_stand_apart_leave_room_for_others() -> None:
    """Two holders with noise between them kept all others from being audited."""
    lots, audited = AuditLots(Caution(rest=1), random.Random(0)), set[Suspect]()
    runs = {RUN: attacked(honest(2), "flipped x 10"), Span(4, 8): honest(3, noise=0.2)}
    for version in range(5):
        for one in lots.choose(runs, version):
            audited.add(one)
            lots.cleared(one, version)
    assert audited == {Suspect(share.peer, span) for span, shares in runs.items() for share in shares}


def test_who_was_cleared_stays_so_if_others_divide_its_blocks_anew() -> None:
    lots = AuditLots(Caution(), random.Random(0))
    for one in ("p0", "p1", "p2"):
        lots.cleared(Suspect(one, RUN), 0)
    halves = {Span(0, 2): honest(3, noise=0.2), Span(2, 4): honest(3, noise=0.2)}
    audited = [one for version in range(1, 6) for one in lots.choose(halves, version)]
    assert len(audited) <= 2  # by lot


def test_who_takes_turns_is_audited_too() -> None:
    """With one micro-batch a step, there is nobody to compare with."""
    lots = AuditLots(Caution(audit_every=4), random.Random(0))
    audited = []
    for version in range(20):
        for one in lots.choose({RUN: [honest(2)[version % 2]]}, version):
            audited.append(one.peer)
            lots.cleared(one, version)
    assert audited[:2] == ["p0", "p1"]
    assert 2 + 18 // 4 <= len(audited) <= 10


def test_a_job_without_audits_has_none() -> None:
    lots = AuditLots(Caution(audit_every=None))
    shares: list[HolderSums] = attacked(honest(3), "flipped")
    assert not [one for version in range(30) for one in lots.choose({RUN: shares}, version)]
    assert not AuditLots(Caution()).choose({}, 0)
