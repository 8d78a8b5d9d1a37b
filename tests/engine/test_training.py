"""Blocks in training: gradients bit for bit however the blocks are divided, near those of `peft`; versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.errors import NotFinite, TrainingError, TrainingFull
from engine.model.block import Quantisation
from engine.pieces import at_once
from engine.sources.base import ModelSource
from engine.training.adapters import AdapterSettings, drawn, layout, named
from engine.training.local_trainer import LocalTrainer, MicroBatch
from tests.engine.training import OPTIONS, assert_equals_peft, gradients, micro_batch, model, stir, trainer

FAMILIES = ("llama", "llama-biases", "smollm", "mistral-sliding", "qwen2", "qwen3")
SETTINGS = AdapterSettings(rank=4, alpha=8.0, seed=3)
BATCHES = (micro_batch(2, 17, 0), micro_batch(1, 24, 1), micro_batch(3, 9, 2))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSource, Any]:
    return model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSource, Any]:
    return model(tmp_path_factory.mktemp("model"), "llama-biases")


@pytest.fixture(scope="module")
def source(biased: tuple[ModelSource, Any]) -> ModelSource:
    return biased[0]


def passes(job: LocalTrainer, batches: Sequence[MicroBatch]) -> tuple[list[float], dict[int, torch.Tensor]]:
    """Losses and summed gradients of some micro-batches."""
    return [job.run(number, batch) for number, batch in enumerate(batches)], gradients(job)


def assert_same(found: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[block], expected[block]) for block in expected)


def assert_divisible(source: ModelSource, settings: AdapterSettings) -> None:
    """One span that keeps every graph gives the bits of several that keep none, or some."""
    whole = trainer(source, settings, graph_bytes=None)
    stir(whole)
    losses, expected = passes(whole, BATCHES)
    assert all(bool(gradient.any()) for gradient in expected.values())
    for cuts, graph_bytes in (((), 0), ((1,), None), ((1, 3), 0), ((2,), 60_000)):
        job = trainer(source, settings, cuts=cuts, graph_bytes=graph_bytes)
        stir(job)
        found = passes(job, BATCHES)
        assert found[0] == losses
        assert_same(found[1], expected)


def test_any_division_gives_the_same_bits_kept_or_computed_again(family: tuple[ModelSource, Any]) -> None:
    assert_divisible(family[0], SETTINGS)


def test_any_division_drops_the_same_numbers(source: ModelSource) -> None:
    assert_divisible(source, replace(SETTINGS, dropout=0.3, targets=("q", "k", "down")))


@pytest.mark.parametrize("quantisation", ["none", "int8"])
def test_steps_give_the_same_bits_in_any_division(source: ModelSource, quantisation: Quantisation) -> None:
    options = replace(OPTIONS, quantisation=quantisation, packed=False)
    one = trainer(source, SETTINGS, graph_bytes=None, options=options)
    three = trainer(source, SETTINGS, cuts=(1, 2), options=options)
    for _ in range(4):
        assert one.step(BATCHES) == three.step(BATCHES)
    assert one.states() == three.states()


def test_loss_and_gradients_equal_those_of_peft(family: tuple[ModelSource, Any]) -> None:
    job = trainer(family[0], SETTINGS)
    assert_equals_peft(job, family[1], BATCHES[0], 1e-5)


@pytest.mark.parametrize("target", SETTINGS.targets)
def test_each_target_alone_equals_peft(biased: tuple[ModelSource, Any], target: str) -> None:
    job = trainer(biased[0], replace(SETTINGS, targets=(target,)))
    assert_equals_peft(job, biased[1], BATCHES[0], 1e-5)


def test_a_served_block_is_not_changed(source: ModelSource) -> None:
    job = trainer(source, SETTINGS)
    blocks = [each.block for each in job.spans[0]._blocks]
    before = [[linear.weight.clone() for linear in (b.qkv, b.o, b.gate_up, b.down)] for b in blocks]  # type: ignore[union-attr]
    job.step(BATCHES)
    for block, weights in zip(blocks, before, strict=True):
        for linear, weight in zip((block.qkv, block.o, block.gate_up, block.down), weights, strict=True):
            assert torch.equal(linear.weight, weight)  # type: ignore[union-attr]


def test_every_holder_draws_the_same_and_no_two_blocks_or_roles_do(source: ModelSource) -> None:
    one, other = drawn(SETTINGS, source.config, 1), drawn(SETTINGS, source.config, 2)
    assert torch.equal(one, drawn(SETTINGS, source.config, 1))
    assert not torch.equal(one, other)
    assert not torch.equal(one, drawn(replace(SETTINGS, seed=4), source.config, 1))
    pairs = named(layout(source.config, SETTINGS.rank, SETTINGS.targets), one)
    assert not torch.equal(pairs["gate"][0], pairs["up"][0])
    for down, up in pairs.values():
        assert 0.8 / down.shape[1] ** 0.5 < float(down.abs().max()) <= 1 / down.shape[1] ** 0.5
        assert not up.any()
    # The same role draws the same whatever else is trained.
    alone = replace(SETTINGS, targets=("up",))
    only = named(layout(source.config, SETTINGS.rank, ("up",)), drawn(alone, source.config, 1))
    assert torch.equal(only["up"][0], pairs["up"][0])


@pytest.mark.parametrize("cut", [(8,), (1, 1, 1, 1, 1, 1, 1, 1), (3, 5)])
def test_a_step_is_the_same_however_its_sequences_are_cut(source: ModelSource, cut: tuple[int, ...]) -> None:
    whole = micro_batch(8, 12, 5, counted=0.4)
    parts = [MicroBatch(*pair) for pair in zip(whole.token_ids.split(cut), whole.labels.split(cut), strict=True)]
    assert len({part.counted for part in parts}) > 1 or len(parts) == 1
    one, other = trainer(source, SETTINGS), trainer(source, SETTINGS)
    stir(one)
    stir(other)
    (loss, expected), (losses, found) = passes(one, [whole]), passes(other, parts)
    assert sum(losses) == pytest.approx(loss[0], rel=1e-6)
    for block in expected:
        assert (found[block] - expected[block]).abs().max() <= 1e-6 * expected[block].abs().max()
    stepped, again = one.step([whole]), other.step(parts)
    assert again.tokens == stepped.tokens
    assert again.loss == pytest.approx(stepped.loss, rel=1e-6)
    assert again.norm == pytest.approx(stepped.norm, rel=1e-6)


def test_padding_behind_a_sequence_changes_nothing_that_counts(source: ModelSource) -> None:
    batch = micro_batch(2, 10, 6)
    pad = torch.zeros(2, 5, dtype=torch.int64)
    padded = MicroBatch(torch.cat((batch.token_ids, pad), 1), torch.cat((batch.labels, pad - 100), 1))
    one, other = trainer(source, SETTINGS).step([batch]), trainer(source, SETTINGS).step([padded])
    assert one.tokens == other.tokens
    assert one.loss == pytest.approx(other.loss)
    assert one.norm == pytest.approx(other.norm)


def test_a_micro_batch_counts_once_for_each_block(source: ModelSource) -> None:
    once, often = trainer(source, SETTINGS, cuts=(2,)), trainer(source, SETTINGS, cuts=(2,))
    _, expected = passes(once, BATCHES)
    answers = {often.run(0, BATCHES[0]) for _ in range(3)}
    assert len(answers) == 1
    hidden = often._ends.embed(BATCHES[1].token_ids)
    for _ in range(2):  # the second span fails once: the first has a forward pass more
        middle = often.spans[0].forward(1, hidden, 1)
    last = often.spans[1].forward(1, middle, 1)
    often.spans[1].backward(1, at_once(often._ends.loss(last, BATCHES[1].labels)).gradient)
    assert often.spans[1].counted(3) == {0, 1}
    assert often.spans[0].counted(0) == {0}
    often.run(1, BATCHES[1])
    often.run(2, BATCHES[2])
    assert_same(gradients(often), expected)


def test_blocks_that_another_holder_has_counted_are_left_out(source: ModelSource) -> None:
    job = trainer(source, SETTINGS)
    span = job.spans[0]
    hidden = job._ends.embed(BATCHES[0].token_ids)
    gradient = at_once(job._ends.loss(span.forward(0, hidden, 2), BATCHES[0].labels)).gradient
    answered = span.backward(0, gradient, uncounted={1, 2})
    assert [span.counted(block) for block in span.blocks] == [{0}, set(), set(), {0}]
    assert not span.gradient(1).any()
    span.forward(0, hidden, 2)
    assert torch.equal(span.backward(0, gradient), answered)
    assert [span.counted(block) for block in span.blocks] == [{0}] * 4


def test_holders_that_average_their_gradients_take_the_same_step(source: ModelSource) -> None:
    one, other, both = (trainer(source, SETTINGS) for _ in range(3))
    one.run(0, BATCHES[0])
    other.run(1, BATCHES[1])
    both.run(0, BATCHES[0])
    both.run(1, BATCHES[1])
    mine, theirs = one.spans[0], other.spans[0]
    for block in mine.blocks:
        total = mine.gradient(block) + theirs.gradient(block)
        mine.set_gradient(block, total)
        theirs.set_gradient(block, total)
        largest = both.spans[0].gradient(block).abs().max()
        assert (total - both.spans[0].gradient(block)).abs().max() <= 1e-6 * largest
    for span in (mine, theirs):
        span.step(1e-3, 0.1)
        span.commit()
    assert [mine.state(block) for block in mine.blocks] == [theirs.state(block) for block in theirs.blocks]


def test_a_job_in_16_bits_has_nearly_the_same_gradients(source: ModelSource) -> None:
    exact = trainer(source, SETTINGS)
    rounded = trainer(source, SETTINGS, options=replace(OPTIONS, dtype=torch.bfloat16, packed=False), cuts=(2,))
    stir(exact)
    stir(rounded)
    losses, expected = passes(exact, BATCHES[:1])
    found = passes(rounded, BATCHES[:1])
    assert found[0] == pytest.approx(losses, rel=0.02)
    for block, gradient in expected.items():
        assert found[1][block].dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(found[1][block], gradient, dim=0) > 0.98
    assert rounded.step(BATCHES).version == 1


def test_a_part_of_a_span_can_be_run(source: ModelSource) -> None:
    whole, part = trainer(source, SETTINGS).spans[0], trainer(source, SETTINGS, cuts=(1, 3)).spans[1]
    x, dy = torch.randn(12, 64), torch.randn(12, 64)
    assert torch.equal(whole.forward(0, x, 2, (1, 3)), part.forward(0, x, 2))
    assert torch.equal(whole.backward(0, dy), part.backward(0, dy))
    assert [whole.counted(block) for block in whole.blocks] == [set(), {0}, {0}, set()]
    assert torch.equal(whole.gradient(1), part.gradient(1))
    with pytest.raises(TrainingError, match="blocks 2:5 were asked for, but 0:4 are trained here"):
        whole.forward(0, x, 2, (2, 5))


def test_a_step_changes_nothing_until_it_is_committed(source: ModelSource) -> None:
    job = trainer(source, SETTINGS)
    span = job.spans[0]
    job.run(0, BATCHES[0])
    before, state, gradient = span.values(0), span.state(0), span.gradient(0)
    span.step(1e-3, 1 / BATCHES[0].counted)
    assert torch.equal(span.values(0), before)
    assert span.state(0) == state
    with pytest.raises(TrainingError, match="waits to be committed"):
        job.run(1, BATCHES[1])
    span.revert()
    assert span.state(0) == state
    assert torch.equal(span.gradient(0), gradient)
    span.step(1e-3, 1 / BATCHES[0].counted)
    span.commit()
    assert (span.version, span.counted(0)) == (1, frozenset())
    assert not torch.equal(span.values(0), before)
    with pytest.raises(TrainingError, match="no step to commit"):
        span.commit()


def test_a_job_goes_on_from_its_state_bit_for_bit(source: ModelSource) -> None:
    settings = replace(SETTINGS, dropout=0.1)
    job = trainer(source, settings)
    results = [job.step(BATCHES) for _ in range(3)]
    states = job.states()
    later = [job.step(BATCHES) for _ in range(3)]
    again = trainer(source, settings, cuts=(2,), graph_bytes=None)
    again.load(states)
    assert [again.step(BATCHES) for _ in range(3)] == later
    assert again.states() == job.states()
    assert results[0] != later[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda states: {**states, 2: states[2][:-4]}, "are not the state of an adapter"),
        (lambda states: {**states, 2: b"x" + states[2][1:]}, "are not the state of an adapter"),
        (lambda states: {**states, 2: states[2][:-4] + b"\0\0\xc0\x7f"}, "is damaged"),
        (lambda states: {**states, 2: states[2][:16] + b"\5" + states[2][17:]}, "of different versions"),
        (lambda states: {block: states[block] for block in (0, 1, 2)}, "do not make blocks 0:4"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(source: ModelSource, damage: Any, message: str) -> None:
    job = trainer(source, SETTINGS)
    before = job.states()
    with pytest.raises(TrainingError, match=message):
        job.spans[0].load(damage(before))
    assert job.states() == before


def test_input_that_does_not_fit_is_refused(source: ModelSource) -> None:
    span = trainer(source, SETTINGS).spans[0]
    x = torch.randn(6, 64)
    with pytest.raises(TrainingError, match=r"the input is \(6, 63\)"):
        span.forward(0, x[:, :63], 1)
    with pytest.raises(TrainingError, match="6 rows do not make 4 sequences"):
        span.forward(0, x, 4)
    with pytest.raises(TrainingError, match="no forward pass here"):
        span.backward(0, x)
    with pytest.raises(NotFinite):
        span.forward(0, x / 0, 1)
    span.forward(0, x, 1)
    with pytest.raises(TrainingError, match="has 6 rows, not 5"):
        span.backward(0, x[:5])
    with pytest.raises(NotFinite):
        span.backward(0, x / 0)
    span.backward(0, x)  # the pass was still there
    span.discard(17)


def test_a_gradient_whose_sums_are_not_finite_is_refused(source: ModelSource) -> None:
    """What goes on to the block before it is finite: in 16 bits 3000 is enough for that, here it takes more."""
    span = trainer(source, SETTINGS).spans[0]
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    y = span.forward(0, 10 * x, 1)
    with pytest.raises(NotFinite, match="sums"):
        span.backward(0, torch.full_like(y, 1e36))
    assert not span.gradient(span.start).any()
    assert not span.counted(span.start)


def test_a_loss_that_is_not_finite_stops_at_the_last_good_step(source: ModelSource) -> None:
    job = trainer(source, SETTINGS)
    job.step(BATCHES)
    states = job.states()
    for block in job.spans[0].blocks:
        job.spans[0].set_values(block, job.spans[0].values(block) * 1e30)
    with pytest.raises(NotFinite):
        job.step(BATCHES)
    assert job.version == 1
    job.load(states)
    assert job.step(BATCHES).version == 2


def test_a_full_span_says_so_before_it_accepts(source: ModelSource) -> None:
    whole = trainer(source, SETTINGS).spans[0]
    rows, room = 10, 2 * 4 * 10 * 64 * 4  # two micro-batches of ten rows in four blocks
    span = type(whole)(source.config, [each.block for each in whole._blocks], SETTINGS, OPTIONS, input_bytes=room)
    x = torch.randn(rows, 64)
    span.forward(0, x, 1)
    span.forward(1, x, 1)
    assert not span.has_room(rows)
    with pytest.raises(TrainingFull):
        span.forward(2, x, 1)
    span.forward(1, x, 1)  # in place of the one before
    span.backward(0, x)
    span.forward(2, x, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "outside 1 to 256"),
        ({"rank": 257}, "outside 1 to 256"),
        ({"alpha": 0.0}, "alpha must be a positive number"),
        ({"alpha": float("nan")}, "alpha must be a positive number"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"targets": ("q", "w")}, "unknown target 'w': choose from q, k, v"),
        ({"targets": ()}, "needs a target"),
    ],
)
def test_settings_that_make_no_adapter_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        AdapterSettings(**change)
