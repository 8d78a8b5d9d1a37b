"""An island's model: rounds between islands without a network are what synchronous training would be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.config import ModelConfig, Rope
from engine.errors import TrainingError
from engine.island import LEAF, IslandModel, IslandTerms, first_states, unpacked
from engine.model.block import WeightOptions
from engine.training.codecs import decode
from engine.training.optimiser import AdamW, Schedule
from engine.training.outer import Nesterov
from engine.training.parameters import drawn_model, joined

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


def test_a_round_after_every_step_is_synchronous_training() -> None:
    two, one = [made(PLAIN), made(PLAIN)], made(PLAIN)
    for step in range(50):
        halves = [sequences(2 * step), sequences(2 * step + 1)]
        for island, half in zip(two, halves, strict=True):
            island.step(half, step)
        one.step([*halves[0], *halves[1]], step)
        merge_all(two)
    start = joined(CONFIG, drawn_model(CONFIG, 1))
    one.advance(one.change())
    one.commit(counted=True)
    ours, theirs = (unpacked(CONFIG, island.states())[0] for island in (two[0], one))
    assert float((theirs - start).abs().max()) > 1e-2  # it has learned something
    assert float((ours - theirs).abs().max()) <= 1e-4


def test_what_rounding_keeps_back_is_sent_later() -> None:
    island = made()
    island.step(sequences(1), 0)
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
        each.step(sequences(number), 0)
    leaves = other.change()
    island.change()
    island.advance(leaves)
    island.commit(counted=False)
    assert not bool(island._residual.any())


def test_states_are_loaded_as_they_were() -> None:
    island, other = made(), made()
    island.step(sequences(1), 0)
    merge_all([island])
    other.load(island.states())
    assert other.states() == island.states()
    assert other.loss(sequences(5)) == island.loss(sequences(5))
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
    island.step(sequences(1), 0)
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
    island.step(sequences(1), 0)
    assert all(round_of([island], 0))


def test_one_who_waits_counts_as_no_change() -> None:
    islands, alone = [waiting(), waiting(1e-6)], waiting(1e-6)
    for each in (islands[1], alone):
        each.step(sequences(1), 0)
    sent = [island.change() for island in islands]
    assert not any(sent[0][1::2])
    merged = islands[1].merge(sent, 0, [1.0, 1.0])
    whole = alone.merge([alone.change()], 0, [1.0])
    half, full = (decode(found.leaves[1], LEAF, "int8") for found in (merged, whole))
    assert torch.allclose(2 * half, full, rtol=0.0, atol=float(full.abs().max()) / 100)


def test_comparisons_are_of_the_leaves_that_all_must_send() -> None:
    islands = [waiting(), waiting(1e-6), waiting(1e-6)]
    for number, island in enumerate(islands):
        island.step(sequences(number), 0)
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
