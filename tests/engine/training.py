"""Jobs in one process over small random models, for the tests of training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from engine.model.ends import load_ends
from engine.model.span import SpanOptions, load_span
from engine.sources.base import ModelSource
from engine.sources.huggingface import open_folder
from engine.training.adapters import AdapterSettings, layout, named
from engine.training.head import IGNORED, TrainingEnds
from engine.training.local_trainer import LocalTrainer, MicroBatch
from engine.training.optimiser import Schedule
from engine.training.peft_format import module_names
from engine.training.span import TrainedSpan
from tests.engine.models import VARIANT, VOCABULARY, write_folder

OPTIONS = SpanOptions(torch.device("cpu"), torch.float32, packed=True)
SCHEDULE = Schedule(2e-3, 50, 4)


def micro_batch(batch: int, length: int, seed: int, counted: float = 0.7) -> MicroBatch:
    """Random tokens; about `counted` of them count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    labels = ids.roll(-1, dims=1)
    labels[torch.rand(ids.shape, generator=generator) >= counted] = IGNORED
    labels[:, -1] = IGNORED
    return MicroBatch(ids, labels)


def trainer(
    source: ModelSource,
    settings: AdapterSettings,
    *,
    cuts: Sequence[int] = (),
    graph_bytes: int | None = 0,
    options: SpanOptions = OPTIONS,
    schedule: Schedule = SCHEDULE,
    clip: float | None = 1.0,
) -> LocalTrainer:
    """A job over spans that begin at block 0 and at `cuts`; without `graph_bytes`, every graph is kept."""
    spans = []
    for start, stop in pairwise((0, *cuts, source.config.n_blocks)):
        blocks = load_span(source, start, stop, options).blocks
        spans.append(TrainedSpan(source.config, blocks, settings, options, graph_bytes=graph_bytes))
    return LocalTrainer(TrainingEnds(load_ends(source, options)), spans, schedule, clip)


def stir(job: LocalTrainer, seed: int = 7) -> None:
    """Give the B's random numbers, so that the gradients of the A's are not zero; the same for every division."""
    for span in job.spans:
        for block in span.blocks:
            generator = torch.Generator().manual_seed(seed + block)
            values = span.values(block)
            for _, up in named(layout(span.config, span.settings.rank, span.settings.targets), values).values():
                up.copy_(0.1 * torch.randn(up.shape, generator=generator))
            span.set_values(block, values)


def gradients(job: LocalTrainer) -> dict[int, torch.Tensor]:
    """Summed gradients of every block."""
    return {block: span.gradient(block) for span in job.spans for block in span.blocks}


def model(folder: Path, name: str) -> tuple[ModelSource, Any]:
    """A small model of a family, and its `transformers` oracle."""
    theirs = write_folder(folder, VARIANT[name])
    return open_folder(folder), theirs


def peft_model(theirs: Any, settings: AdapterSettings) -> Any:
    """`peft`'s model with an adapter of these settings."""
    import peft

    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=int(settings.alpha),
        target_modules=[module_names()[role].rpartition(".")[2] for role in settings.targets],
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(theirs, config)


def assert_equals_peft(job: LocalTrainer, theirs: Any, batch: MicroBatch, tolerance: float) -> None:
    """Loss and gradients of a job over one span are those of `peft`, within a share of the largest of each tensor."""
    stir(job)
    span = job.spans[0]
    settings = span.settings
    theirs = peft_model(theirs, settings).to(theirs.dtype)
    groups = layout(span.config, settings.rank, settings.targets)
    parameters = dict(theirs.named_parameters())

    def parameter(block: int, role: str, which: str) -> Any:
        return parameters[f"base_model.model.model.layers.{block}.{module_names()[role]}.lora_{which}.default.weight"]

    with torch.no_grad():
        for block in span.blocks:
            for role, pair in named(groups, span.values(block)).items():
                for which, tensor in zip("AB", pair, strict=True):
                    parameter(block, role, which).copy_(tensor)
    logits = theirs(input_ids=batch.token_ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    expected.backward()
    assert abs(job.run(0, batch) - expected.item()) <= tolerance * expected.item()
    for block in span.blocks:
        for role, pair in named(groups, span.gradient(block)).items():
            for which, ours in zip("AB", pair, strict=True):
                grad = parameter(block, role, which).grad
                assert (ours - grad).abs().max() <= tolerance * grad.abs().max(), (block, role, which)
    theirs.unload()
