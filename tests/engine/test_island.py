"""An island's model: rounds between islands without a network are what synchronous training would be."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

import pytest
import torch

from app.core.pieces import at_once
from engine.budget import plan_full, unquantised
from engine.config import ModelConfig, Rope
from engine.errors import TrainingError
from engine.island import LEAF, IslandModel, IslandTerms, first_states, unpacked
from engine.model.block import WeightOptions
from engine.training.codecs import Codec, decode
from engine.training.optimiser import AdamW, Muon, Schedule
from engine.training.outer import Nesterov
from engine.training.parameters import drawn_model, joined
from engine.training.sketches import NUMBERS, sketch_of
from tests.engine.memory import PeakBytes

CONFIG = ModelConfig(
    family="llama", n_blocks=2, hidden_size=32, n_heads=2, n_kv_heads=1, head_dim=16, intermediate_size=64,
    vocab_size=260, context_length=64, norm_eps=1e-5, rope=Rope(),
)  # fmt: skip
CPU = WeightOptions(torch.device("cpu"), torch.float32)
TERMS = IslandTerms(Schedule(1e-2, 10**6), 1.0, AdamW(), Nesterov(), "int8", True, rows=64)
# AdamW without first moment and with a huge eps is plain gradient descent, for which averaging weights is averaging
# gradients.
PLAIN = replace(
    TERMS, schedule=Schedule(3e7, 10**9), clip=1e9, optimiser=AdamW(beta1=0.0, eps=1e8), outer=Nesterov(1.0, 0.0),
    codec="f32", robust=False,
)  # fmt: skip


def made(terms: IslandTerms = TERMS) -> IslandModel:
    return IslandModel(CONFIG, drawn_model(CONFIG, 1), CPU, terms)


def sequences(seed: int, count: int = 2) -> list[list[int]]:
    drawn: Any = torch.randint(0, 256, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [[int(token) for token in row] for row in drawn]


def merge_all(islands: list[IslandModel]) -> list[bytes]:
    """One round of these islands; returns the merged leaves."""
    sent = [island.change() for island in islands]
    leaves = islands[0].merge(sent, 0, [1.0] * len(islands)).leaves
    states = [island.advance(leaves) for island in islands]
    assert all(state == states[0] for state in states)
    for island in islands:
        island.commit(counted=True)
    return leaves


@pytest.mark.parametrize("codec", ["int8", "f32"])
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_a_round_takes_no_more_memory_than_is_counted(count: int, codec: Codec) -> None:
    """For the whole of it, with all that is written and sent: `tests/attacks/test_training_memory.py`."""
    config = replace(CONFIG, hidden_size=256, intermediate_size=1024, n_heads=4, n_kv_heads=4, head_dim=64)
    plan, vectors = plan_full(config, unquantised(4), 64, 0), drawn_model(config, 1)
    most, past = 0, list[bytes]()
    with PeakBytes() as memory:
        island = IslandModel(config, vectors, CPU, replace(TERMS, codec=codec), graph_bytes=0)
        for number in range(2):  # the second one has a merged change to compare with
            at_once(island.step(sequences(number), number))
            memory.peak = 0
            sent = island.change()
            share = len(sent) // count
            merged = island.merge([sent[:share] for _ in range(count)], 0, [1.0] * count).leaves
            most, memory.peak = max(most, memory.peak + size_bytes(sent, sent, past)), 0
            past, before = merged + sent[share:], past
            states = island.advance(past)
            island.commit(counted=True)
            most = max(most, memory.peak + size_bytes(sent, past, before, states))
    assert 0.75 * (plan.state_bytes + plan.round_bytes) <= most <= plan.state_bytes + plan.round_bytes


def size_bytes(*lists: Sequence[bytes]) -> int:
    """Bytes of all members of some lists."""
    return sum(len(data) for some in lists for data in some)


def test_a_round_after_every_step_is_synchronous_training() -> None:
    two, one = [made(PLAIN), made(PLAIN)], made(PLAIN)
    for step in range(50):
        halves = [sequences(2 * step), sequences(2 * step + 1)]
        for island, half in zip(two, halves, strict=True):
            at_once(island.step(half, step))
        at_once(one.step([*halves[0], *halves[1]], step))
        merge_all(two)
    start = joined(CONFIG, drawn_model(CONFIG, 1))
    one.advance(one.change())
    one.commit(counted=True)
    ours, theirs = (unpacked(CONFIG, island.states())[0] for island in (two[0], one))
    assert float((theirs - start).abs().max()) > 1e-2  # it has learned something
    assert float((ours - theirs).abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("decays", "steps", "last", "kept"),
    [
        (False, range(10, 20), range(10), 1.0),
        (False, range(10, 15), range(10), 0.5),  # fewer steps
        (False, range(10, 40), range(10), 1.0),
        (False, range(10), range(0), 1.0),  # the first round
        (True, range(10, 20), range(10), 0.246061),  # smaller steps, by half a cosine
        (True, range(20, 20), range(10, 20), 0.0),
    ],
)
def test_a_round_of_fewer_or_smaller_steps_keeps_less_momentum(
    decays: bool, steps: range, last: range, kept: float
) -> None:
    island = made(replace(TERMS, schedule=Schedule(1e-2, 20 if decays else 10**9)))
    at_once(island.step(sequences(1), 0))
    merge_all([island])
    before, momentum = unpacked(CONFIG, island.states())
    assert bool(momentum.any())
    island.begin_round(1, "f32", steps, last)
    leaves = island.change()
    change = torch.cat([decode(leaf, len(leaf) // 4, "f32") for leaf in leaves])
    island.advance(leaves)
    island.commit(counted=True)
    after, left = unpacked(CONFIG, island.states())
    assert torch.allclose(left, 0.9 * kept * momentum + change, atol=1e-7)
    assert torch.allclose(after, before - 0.7 * (change + 0.9 * left), atol=1e-7)


def test_what_rounding_keeps_back_is_sent_later() -> None:
    island = made()
    at_once(island.step(sequences(1), 0))
    island.change()
    wanted = island._sent
    leaves = merge_all([island])
    assert wanted is not None
    assert bool(island._residual.any())
    # nothing was trained since, so the next change is the residual alone
    island.change()
    assert island._sent is not None
    assert torch.allclose(island._sent, island._residual)
    assert len(leaves) == island.leaves


def test_a_change_that_did_not_count_leaves_no_residual() -> None:
    island, other = made(), made()
    for number, each in enumerate((island, other)):
        at_once(each.step(sequences(number), 0))
    leaves = other.change()
    island.change()
    island.advance(leaves)
    island.commit(counted=False)
    assert not bool(island._residual.any())


def test_states_are_loaded_as_they_were() -> None:
    island, other = made(), made()
    at_once(island.step(sequences(1), 0))
    merge_all([island])
    other.load(island.states())
    assert other.states() == island.states()
    assert at_once(other.loss(sequences(5))) == at_once(island.loss(sequences(5)))
    assert first_states(CONFIG, drawn_model(CONFIG, 1)) == made().states()


def test_bytes_that_are_no_leaves_or_states_are_refused() -> None:
    island = made()
    leaves = island.change()
    with pytest.raises(TrainingError):
        island.check([leaves[0][:-1]], 0)
    with pytest.raises(TrainingError):
        island.check(leaves, 1)  # one leaf too many
    with pytest.raises(TrainingError):
        island.advance(leaves[:-1])
    states = island.states()
    for wrong in (states[:-1], [*states[:-1], states[-1][:-4]], [b"\xff" * len(state) for state in states]):
        with pytest.raises(TrainingError):
            island.load(wrong)


def trained(steps: int, every: int, count: int = 3, seed: int = 0) -> list[IslandModel]:
    """Islands after some steps with rounds; their texts are random, with one order in them."""
    islands = [made() for _ in range(count)]
    for step in range(steps):
        for number, island in enumerate(islands):
            at_once(island.step(lesson(seed + 100 * step + number), step))
        if (step + 1) % every == 0:
            merge_all(islands)
    return islands


def lesson(seed: int) -> list[list[int]]:
    """Sequences in which each token follows from the one before."""
    return [[(start[0] + 7 * at) % 256 for at in range(16)] for start in sequences(seed, 4)]


def newcomer_agreement(
    islands: list[IslandModel], newcomer: IslandModel, steps: int, first: int
) -> tuple[float, float]:
    """Agreement of a newcomer's change with the others', and the usual one, after some steps."""
    everybody = [*islands, newcomer]
    for step in range(first, first + steps):
        for number, island in enumerate(everybody):
            at_once(island.step(lesson(7000 + 100 * step + number), step))
    found = islands[0].merge([island.change() for island in everybody], 0, [1.0] * len(everybody)).report
    return found[-1][1], sorted(cosine for _, cosine in found)[len(found) // 2]


def test_with_the_moments_of_another_a_newcomer_agrees_as_usual() -> None:
    islands = trained(40, 2)
    agreements = []
    for with_moments in (True, False):
        newcomer = made()
        newcomer.load(islands[0].states())
        if with_moments:
            newcomer.take_moments(islands[0].moments())
            assert newcomer.has_moments
        own = [made() for _ in islands]
        for copy, island in zip(own, islands, strict=True):
            copy.load(island.states())
            copy.take_moments(island.moments())
        agreements.append(newcomer_agreement(own, newcomer, 2, 40))
    (taken, usual), (fresh, _) = agreements
    assert taken > 0.8 * usual
    assert fresh < taken


def test_moments_are_the_same_but_for_rounding() -> None:
    island, other = made(), made()
    for step in range(6):
        at_once(island.step(sequences(step), step))
    merge_all([island])
    other.load(island.states())
    other.take_moments(island.moments())
    assert other._model.version == 6
    for mine, theirs in zip(island._model.moments().values(), other._model.moments().values(), strict=True):
        for one, another in zip(mine, theirs, strict=True):
            assert torch.allclose(one, another, rtol=2**-8, atol=0)
    losses = [at_once(each.step(sequences(9), 6)).loss for each in (island, other)]
    assert losses[0] == losses[1]  # of the same weights
    after = [at_once(each.step(sequences(10), 7)).loss for each in (island, other)]
    assert after[0] == pytest.approx(after[1], rel=1e-3)


def test_moments_that_are_none_are_refused() -> None:
    island, other = made(), made()
    assert not island.has_moments
    at_once(island.step(sequences(1), 0))
    right = island.moments()
    parts = list(right.parts)
    nan, negative = b"\xff\x7f" * (len(parts[0]) // 2), b"\x80\xbf" * (len(parts[0]) // 2)
    for wrong in (
        right._replace(parts=parts[:-1]),
        right._replace(parts=[parts[0][:-2], *parts[1:]]),
        right._replace(parts=[nan, *parts[1:]]),
        right._replace(parts=[negative, *parts[1:]]),
        right._replace(norms=(2 * right.norms[0], right.norms[1])),
        right._replace(steps=0),
    ):
        with pytest.raises(TrainingError):
            other.take_moments(wrong)
    assert not other.has_moments
    assert not any(bool(each.any()) for pair in other._model.moments().values() for each in pair)
    other.take_moments(right)


def test_a_trial_says_what_a_change_does_and_leaves_the_island_as_it_was() -> None:
    island, other = made(), made()
    states, text = island.states(), [lesson(1), lesson(2)]
    for step in range(5):
        at_once(island.step(lesson(1), step))
        at_once(other.step(lesson(3), step))
    own = joined(CONFIG, other._model.vectors())
    (read, unseen) = at_once(other.trial(states, [island.change(), other.change()], "int8", text))
    assert [[len(losses) for losses in found] for found in (read, unseen)] == [[4] * 3] * 2
    before, after, by_other = map(mean, read)
    assert after < min(before, by_other)
    assert before == pytest.approx(at_once(made().loss(lesson(1))))
    assert after == pytest.approx(at_once(island.loss(lesson(1))), rel=1e-3)
    assert by_other == pytest.approx(at_once(other.loss(lesson(1))), rel=1e-3)
    assert unseen[0] == [pytest.approx(at_once(made().loss([one]))) for one in lesson(2)]
    assert torch.equal(joined(CONFIG, other._model.vectors()), own)
    with pytest.raises(TrainingError):
        at_once(other.trial(states, [island.change()[:-1]], "int8", text))
    assert torch.equal(joined(CONFIG, other._model.vectors()), own)


# --- steps that are computed again ------------------------------------------------------------------------------------

SEED = b"a seed"


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    return math.dist(one, other) / max(math.hypot(*one), math.hypot(*other))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
@pytest.mark.parametrize(
    ("optimiser", "dtype"),
    [
        *((AdamW(), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        (Muon(), torch.bfloat16),
        *(pytest.param(Muon(), dtype, marks=pytest.mark.soak) for dtype in (torch.float32, torch.float16)),
    ],
)
def test_another_machine_finds_the_gradient_of_a_step(seed: int, dtype: torch.dtype, optimiser: AdamW | Muon) -> None:
    """Also if one computes in 16 bits and the other in 32, where a gradient of other text is far away."""
    terms = replace(TERMS, optimiser=optimiser)
    vectors = drawn_model(CONFIG, seed)
    island = IslandModel(CONFIG, vectors, WeightOptions(torch.device("cpu"), dtype), terms)
    tester = IslandModel(CONFIG, vectors, CPU, terms)
    honest, others = [], []
    for number in range(2):  # the second round begins with moments
        states = island.states()
        for step in range(20):
            text, other = sequences(1000 * seed + 100 * number + step), sequences(10**6 + step)
            trace = island.trace()
            claimed = at_once(island.step(text, step, SEED)).sketch
            before, after, found = at_once(tester.retrace(states, trace, text, SEED))
            assert after <= 2 * before + 1
            honest.append(apart(claimed, found))
            others.append(apart(claimed, at_once(tester.retrace(states, trace, other, SEED))[2]))
        island.advance(island.change())
        island.commit(counted=True)
    assert max(honest) < 0.15
    assert median(others) > 0.5


def test_a_trace_and_a_sketch_change_nothing() -> None:
    island, other, tester = made(), made(), made()
    for step in range(3):
        assert sum(map(len, island.trace())) == (island.trace_bytes if step else 0)
        traced, plain = at_once(island.step(sequences(step), step, SEED)), at_once(other.step(sequences(step), step))
        assert replace(traced, sketch=()) == plain
    assert island.change() == other.change()
    at_once(tester.step(sequences(9), 0))
    own = joined(CONFIG, tester._model.vectors())
    at_once(tester.retrace(made().states(), island.trace(), sequences(1), SEED))
    assert torch.equal(joined(CONFIG, tester._model.vectors()), own)
    assert not any(bool(sums.any()) for sums in tester._model.gradients().values())
    with pytest.raises(TrainingError):
        at_once(tester.retrace(made().states(), island.trace()[:-1], sequences(1), SEED))
    assert torch.equal(joined(CONFIG, tester._model.vectors()), own)


def test_sketches_are_as_far_from_each_other_as_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    ratios = []
    for number in range(200):
        one, other = ({"a": torch.randn(777, generator=generator)} for _ in range(2))
        pair = [at_once(sketch_of(each, 0.5, bytes([number]))) for each in (one, other)]
        ratios.append(math.dist(*pair) / (0.5 * float((one["a"] - other["a"]).norm())))
    assert len(pair[0]) == NUMBERS
    assert mean(ratios) == pytest.approx(1, rel=0.05)
    assert max(abs(ratio - 1) for ratio in ratios) < 0.6
    assert at_once(sketch_of(one, 1.0, b"x")) != at_once(sketch_of(one, 1.0, b"y"))


# --- leaves that wait -------------------------------------------------------------------------------------------------


def waiting(significance: float = 1.0) -> IslandModel:
    return made(replace(TERMS, significance=significance))


def round_of(islands: list[IslandModel], number: int) -> list[bytes]:
    """Make the round of this number; returns the merged leaves."""
    for island in islands:
        island.round = number
    return merge_all(islands)


def test_a_small_change_waits_a_round_and_is_sent_then() -> None:
    island = waiting()
    assert island.leaves > 2
    at_once(island.step(sequences(1), 0))
    first = round_of([island], 0)
    assert [bool(leaf) for leaf in first] == [number % 2 == 0 for number in range(island.leaves)]
    kept = island._residual.split(LEAF)
    wanted = [part.clone() for part in kept]
    assert all(bool(part.any()) for part in wanted[1::2])
    second = round_of([island], 1)  # nothing was trained since: what is sent is what waited
    assert [bool(leaf) for leaf in second] == [number % 2 == 1 for number in range(island.leaves)]
    for leaf, part in zip(second[1::2], wanted[1::2], strict=True):
        scale = float(part.abs().max()) / 127
        assert float((decode(leaf, part.numel(), "int8") - part).abs().max()) <= 0.51 * scale


def test_a_large_change_does_not_wait() -> None:
    island = waiting(significance=1e-6)
    at_once(island.step(sequences(1), 0))
    assert all(round_of([island], 0))


def test_one_who_waits_counts_as_no_change() -> None:
    islands, alone = [waiting(), waiting(1e-6)], waiting(1e-6)
    for each in (islands[1], alone):
        at_once(each.step(sequences(1), 0))
    sent = [island.change() for island in islands]
    assert not any(sent[0][1::2])
    merged = islands[1].merge(sent, 0, [1.0, 1.0])
    single = alone.merge([alone.change()], 0, [1.0])
    half, full = (decode(found.leaves[1], LEAF, "int8") for found in (merged, single))
    assert torch.allclose(2 * half, full, rtol=0.0, atol=float(full.abs().max()) / 100)


def test_comparisons_are_of_the_leaves_that_all_must_send() -> None:
    islands = [waiting(), waiting(1e-6), waiting(1e-6)]
    for number, island in enumerate(islands):
        at_once(island.step(sequences(number), 0))
    sent = [island.change() for island in islands]
    assert not any(sent[0][1::2])
    assert all(sent[1])
    norms = [norm for norm, _ in islands[1].merge(sent, 0, [1.0] * 3).report]
    assert max(norms) < 2 * min(norms)  # the one that waits is like the others
    assert islands[1].merge([row[1:2] for row in sent], 1, [1.0] * 3).report == []


def test_only_the_leaves_of_the_round_may_be_empty() -> None:
    island = waiting()
    island.check([b""], 1)
    with pytest.raises(TrainingError, match="0 bytes"):
        island.check([b""], 0)
    island.round = 1
    island.check([b""], 0)
    with pytest.raises(TrainingError, match="0 bytes"):
        island.check([b""], 1)
    with pytest.raises(TrainingError, match="0 bytes"):
        made().check([b""], 1)  # in this job none may wait


# --- pieces -----------------------------------------------------------------------------------------------------------


def everything(island: IslandModel) -> list[bytes]:
    """The bits of all weights, moments and gradients of an island."""
    model, found = island._model, list[bytes]()
    for part in model._parts.values():
        gradients = [leaf.grad for leaf in part.leaves.values() if leaf.grad is not None]
        for vector in (part.values, part.first, part.second, part.sums, *part.leaves.values(), *gradients):
            found.append(vector.detach().float().numpy().tobytes())
    return [*found, str(model.version).encode()]


def kinds_of_work(island: IslandModel) -> dict[str, Generator[None, None, Any]]:
    """What an island computes in pieces, each of them to be begun anew."""
    states, text = made().states(), sequences(3, count=8)
    return {
        "step": island.step(text, 1),
        "traced step": island.step(text, 1, SEED),
        "loss": island.loss(text),
        "trial": island.trial(states, [made().change()], "int8", [text, text[:2]]),
        "retrace": island.retrace(states, made().trace(), text, SEED),
    }


def stepped_once(optimiser: AdamW | Muon = TERMS.optimiser, dtype: torch.dtype = torch.float32) -> IslandModel:
    terms = replace(TERMS, optimiser=optimiser)
    island = IslandModel(CONFIG, drawn_model(CONFIG, 1), WeightOptions(torch.device("cpu"), dtype), terms)
    at_once(island.step(sequences(1), 0))
    return island


@pytest.mark.parametrize("kind", ["step", "traced step", "loss", "trial", "retrace"])
def test_work_is_computed_in_pieces_between_which_no_mode_of_torch_is_left_on(kind: str) -> None:
    island, other = stepped_once(), stepped_once()
    pieces, count, result = kinds_of_work(island)[kind], 0, None
    while result is None:
        try:
            next(pieces)
        except StopIteration as end:
            result = end.value
        count += 1
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        with torch.inference_mode():  # as replies compute in the same thread
            torch.ones(2) @ torch.ones(2)
    assert result == at_once(kinds_of_work(other)[kind])
    assert everything(island) == everything(other)
    micro_batches = 8 * 16 // TERMS.rows
    assert count >= micro_batches * (CONFIG.n_blocks + 1)


@pytest.mark.parametrize(
    ("optimiser", "dtype"),
    [(AdamW(), torch.bfloat16), pytest.param(Muon(), torch.float32, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("kind", ["step", "traced step", "loss", "trial", "retrace"])
def test_work_that_is_given_up_changes_nothing_or_makes_a_whole_step(
    kind: str, optimiser: AdamW | Muon, dtype: torch.dtype
) -> None:
    before, ended = stepped_once(optimiser, dtype), stepped_once(optimiser, dtype)
    at_once(kinds_of_work(ended)[kind])
    count, found = 0, list[bool]()
    while True:
        island = stepped_once(optimiser, dtype)
        pieces = kinds_of_work(island)[kind]
        try:
            for _ in range(count + 1):
                next(pieces)
        except StopIteration:
            break
        pieces.close()
        is_made = everything(island) == everything(ended)
        assert is_made or everything(island) == everything(before), f"after {count} pieces"
        found.append(is_made)
        count += 1
    if "step" in kind:
        assert found == sorted(found)
        assert sum(found) == len(ended._model._parts)  # once the first weights are changed, all are
