"""Training of all weights: gradients and steps beside `torch` and `transformers`, memory, and exported models."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.core.pieces import at_once
from engine.budget import plan_full, unquantised
from engine.errors import NotFinite, SourceError, TrainingError
from engine.model.block import WeightOptions
from engine.sources.base import ModelSource
from engine.sources.huggingface import open_folder, tensor_name
from engine.sources.layout import part_names
from engine.sources.shape import config_values, open_shape
from engine.sources.tiny import open_tiny
from engine.training.export import folder_files
from engine.training.full import FullModel
from engine.training.optimiser import AdamW, Muon, Schedule, muon_step
from engine.training.parameters import (
    divided,
    drawn_model,
    joined,
    model_weights,
    part_slots,
    read_model,
    views,
)
from tests.engine.memory import PeakBytes
from tests.engine.models import VARIANTS, Variant, write_folder
from tests.engine.training import micro_batch, model

CPU = WeightOptions(torch.device("cpu"), torch.float32)
FAMILIES = ("llama", "llama-tied", "llama-biases", "smollm", "mistral-sliding", "qwen2", "qwen2-sliding", "qwen3")
SCHEDULE = Schedule(1e-3, 50, 4)


def full(source: ModelSource, **more: Any) -> FullModel:
    return FullModel(source.config, read_model(source), CPU, **more)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("graph_bytes", [None, 0])
def test_gradients_of_all_weights_are_those_of_transformers(
    tmp_path: Path, family: str, graph_bytes: int | None
) -> None:
    source, theirs = model(tmp_path, family)
    batch = micro_batch(3, 17, seed=5)
    logits = theirs(input_ids=batch.token_ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    expected.backward()
    ours = full(source, graph_bytes=graph_bytes)
    assert at_once(ours.run(batch)) == pytest.approx(expected.item(), rel=1e-5)
    parameters = dict(theirs.named_parameters())
    for part, sums in ours.gradients().items():
        for role, gradient in views(source.config, part, sums).items():
            wanted = parameters[tensor_name(part, role)].grad
            assert (gradient - wanted).abs().max() <= 1e-4 * wanted.abs().max(), (part, role)


def test_fifty_steps_equal_those_of_torch(tmp_path: Path) -> None:
    source, theirs = model(tmp_path, "llama")
    ours = full(source, optimiser=AdamW(weight_decay=0.1))
    groups = [
        {"params": [one for one in theirs.parameters() if (one.dim() == 2) == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    optimiser = torch.optim.AdamW(groups, lr=1.0)
    for number in range(50):
        batch = micro_batch(2, 9, seed=number)
        optimiser.zero_grad()
        logits = theirs(input_ids=batch.token_ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="mean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = SCHEDULE.at(number)
        optimiser.step()
        result = at_once(ours.step([batch], SCHEDULE, number, 1.0))
        assert result.loss == pytest.approx(loss.item(), rel=1e-4)
        assert (result.version, result.tokens) == (number + 1, batch.counted)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_muon_equals_torch_in_float32(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    # torch's Muon rounds to bfloat16 before it computes; in float32 it is the same algorithm
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    generator = torch.Generator().manual_seed(2)
    theirs = torch.nn.Parameter(torch.randn(shape, generator=generator))
    ours, momentum = theirs.detach().clone(), torch.zeros(shape)
    optimiser = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(50):
        gradient = torch.randn(shape, generator=generator)
        theirs.grad = gradient.clone()
        optimiser.step()
        ours, momentum = muon_step(ours, momentum, gradient, 1e-2, Muon(weight_decay=0.1))
        assert (ours - theirs.detach()).abs().max() <= 1e-6 * max(1.0, float(theirs.detach().abs().max()))


def test_muon_changes_matrices_one_by_one_and_adamw_the_rest(tmp_path: Path) -> None:
    source = open_tiny(tmp_path)
    before = read_model(source)
    ours = FullModel(source.config, before, CPU, optimiser=Muon())
    batch = micro_batch(2, 9, seed=1)
    batch = batch._replace(token_ids=batch.token_ids % 256, labels=batch.labels.clamp(max=255))
    at_once(ours.run(batch))
    gradients = {part: sums.clone() for part, sums in ours.gradients().items()}
    at_once(ours.apply(1e-2, 0.5))
    after = ours.vectors()
    for slot in part_slots(source.config, "block.3"):
        old, new, gradient = (
            vectors["block.3"][slot.first : slot.stop].view(slot.shape) for vectors in (before, after, gradients)
        )
        if slot.is_matrix:
            wanted, _ = muon_step(old, torch.zeros(slot.shape), gradient * 0.5, 1e-2, Muon())
            assert torch.allclose(new, wanted, atol=1e-7), slot.role
        else:  # the first step of AdamW has the size of the rate, whatever the gradient is
            assert torch.allclose((new - old).abs(), torch.full(slot.shape, 1e-2), rtol=1e-3), slot.role


@pytest.mark.parametrize("optimiser", [AdamW(weight_decay=0.1), Muon(weight_decay=0.1)])
def test_a_drawn_model_learns(tmp_path: Path, optimiser: AdamW | Muon) -> None:
    config = replace(open_tiny(tmp_path).config, n_blocks=2)
    ours = FullModel(config, drawn_model(config, 1), CPU, optimiser=optimiser)
    text = b"the quick brown fox jumps over the lazy dog. " * 4
    batch = micro_batch(1, len(text), seed=0)
    batch = batch._replace(token_ids=torch.tensor([list(text)]), labels=torch.tensor([[*text[1:], -100]]))
    losses = [at_once(ours.step([batch], Schedule(1e-2, 60), number, 1.0)).loss for number in range(20)]
    assert losses[0] == pytest.approx(5.58, abs=0.1)  # the logarithm of the vocabulary: it knows nothing yet
    assert losses[-1] < 0.5 * losses[0]


def test_micro_batches_of_a_step_count_by_their_tokens(tmp_path: Path) -> None:
    source, _ = model(tmp_path, "llama")
    batches = [micro_batch(1, 9, 1), micro_batch(2, 5, 2, counted=0.3)]
    ours, again = full(source), full(source)
    result = at_once(ours.step(batches, SCHEDULE, 0, None))
    total = sum(at_once(again.run(batch)) for batch in batches)
    assert result.loss == pytest.approx(total / sum(batch.counted for batch in batches), rel=1e-6)


def test_the_weights_of_the_model_are_not_touched(tmp_path: Path) -> None:
    source, _ = model(tmp_path, "llama")
    vectors = read_model(source)
    kept = joined(source.config, vectors).clone()
    at_once(FullModel(source.config, vectors, CPU).step([micro_batch(2, 9, 1)], SCHEDULE, 0, 1.0))
    assert torch.equal(joined(source.config, vectors), kept)
    assert torch.equal(joined(source.config, read_model(source)), kept)


def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    source, _ = model(tmp_path, "llama")
    vectors = read_model(source)
    vectors["head"][0] = float("inf")
    ours = FullModel(source.config, vectors, CPU)
    with pytest.raises(NotFinite):
        at_once(ours.step([micro_batch(1, 5, 1)], SCHEDULE, 0, 1.0))
    assert all(torch.equal(vector, ours.vectors()[part]) for part, vector in vectors.items())
    assert all(not bool(sums.any()) for sums in ours.gradients().values())


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    source, _ = model(tmp_path, "llama")
    vectors = read_model(source)
    with pytest.raises(TrainingError, match=r"block\.0"):
        FullModel(source.config, {**vectors, "block.0": torch.zeros(3)}, CPU)
    with pytest.raises(TrainingError, match="context"):
        at_once(FullModel(source.config, vectors, CPU).run(micro_batch(1, 300, 1)))


def test_weights_are_drawn_from_shape_and_seed_alone(tmp_path: Path) -> None:
    config = open_tiny(tmp_path).config
    one, two, other = drawn_model(config, 3), drawn_model(config, 3), drawn_model(config, 4)
    assert all(torch.equal(one[part], two[part]) for part in part_names(config))
    assert not torch.equal(one["block.0"], other["block.0"])
    assert not torch.equal(one["block.0"], one["block.1"])
    block = views(config, "block.0", one["block.0"])
    assert float(block["q"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(block["down"].std()) == pytest.approx(0.005, rel=0.05)
    assert bool((block["attn_norm"] == 1).all())
    # the same bits on every machine
    assert hashlib.sha256(one["block.0"].numpy().tobytes()).hexdigest()[:16] == "921f8d1a334a90f3"


def test_parts_are_joined_and_divided(tmp_path: Path) -> None:
    config = open_tiny(tmp_path).config
    vectors = drawn_model(config, 3)
    whole = joined(config, vectors)
    assert whole.numel() == model_weights(config)
    assert all(torch.equal(part, vectors[name]) for name, part in divided(config, whole).items())


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_shape_is_written_as_it_is_read(tmp_path: Path, variant: Variant) -> None:
    write_folder(tmp_path, variant)
    source = open_folder(tmp_path)
    again = tmp_path / "again"
    again.mkdir()
    for name, data in folder_files(source.config, read_model(source), source.tokenizer).items():
        (again / name).write_bytes(data)
    opened = open_folder(again)
    assert opened.config == source.config
    assert opened.tokenizer == source.tokenizer


@pytest.mark.parametrize(
    "family", ["llama-tied", "llama-biases", "llama-yarn", "mistral-sliding", "qwen2-sliding", "qwen3"]
)
def test_an_exported_model_has_the_same_loss_in_transformers(tmp_path: Path, family: str) -> None:
    import transformers

    source, _ = model(tmp_path / "model", family)
    ours = full(source)
    for number in range(3):
        at_once(ours.step([micro_batch(2, 12, number)], SCHEDULE, number, 1.0))
    out = tmp_path / "out"
    out.mkdir()
    for name, data in folder_files(source.config, ours.vectors(), source.tokenizer).items():
        (out / name).write_bytes(data)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    batch = micro_batch(2, 20, seed=9)
    with torch.no_grad():
        logits = theirs(input_ids=batch.token_ids).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    assert at_once(ours.loss([batch])) == pytest.approx(float(wanted), rel=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("A fish.")["input_ids"]) == "A fish."


@pytest.mark.parametrize("graph_bytes", [0, None])
def test_memory_stays_within_the_budget(tmp_path: Path, graph_bytes: int | None) -> None:
    source, _ = model(tmp_path, "llama")
    config, rows = source.config, 4 * 64
    usable = 0 if graph_bytes == 0 else 2**40
    plan = plan_full(config, unquantised(4), rows, usable)
    assert plan.weights == model_weights(config)
    vectors = drawn_model(config, 0)
    batch = micro_batch(4, 64, 1)
    with PeakBytes() as memory:
        ours = FullModel(config, vectors, CPU, graph_bytes=plan.graph_bytes)
        for number in range(2):
            at_once(ours.step([batch], SCHEDULE, number, 1.0))
    assert 0.5 * plan.step_bytes <= memory.peak <= plan.step_bytes


def test_a_shape_without_a_tokenizer_has_bytes_as_tokens(tmp_path: Path) -> None:
    config = open_tiny(tmp_path).config
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(config_values(config)))
    source = open_shape(path)
    assert source.config == config
    assert source.tokenizer.tokenizer_json == open_tiny(tmp_path).tokenizer.tokenizer_json
    path.write_text(json.dumps(config_values(config) | {"vocab_size": 200}))
    with pytest.raises(SourceError, match="too small for bytes"):
        open_shape(path)
    path.write_text(json.dumps(config_values(config) | {"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(SourceError, match="not supported"):
        open_shape(path)
    with pytest.raises(SourceError, match="not a file"):
        open_shape(tmp_path / "none.json")


def test_bfloat16_passes_train_float32_weights(tmp_path: Path) -> None:
    source, _ = model(tmp_path, "llama-tied")
    short = FullModel(source.config, read_model(source), WeightOptions(torch.device("cpu"), torch.bfloat16))
    batch = micro_batch(2, 9, seed=1)
    assert at_once(short.run(batch)) == pytest.approx(at_once(full(source).run(batch)), rel=0.03)
    before = short.vectors()
    at_once(short.apply(1e-2, 1 / batch.counted))
    short.clear()
    assert all(vector.dtype == torch.float32 for vector in short.vectors().values())
    assert all(not torch.equal(before[part], vector) for part, vector in short.vectors().items())
