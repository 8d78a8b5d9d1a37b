"""Finished adapters: PEFT's files there and back, replies with an adapter, memory in training within the budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.budget import FLOAT32, TrainingTask, adapter_weights, plan_training
from engine.config import ModelConfig
from engine.errors import EngineError
from engine.model.block import Quantisation
from engine.model.hosted_span import HostedSpan
from engine.model.kv_cache import Segment
from engine.model.span import SpanOptions, load_span
from engine.session_runner import SessionRunner
from engine.sources.base import ModelSource
from engine.training.adapters import AdapterSettings, drawn, layout, named, weight_count
from engine.training.peft_format import CONFIG_FILE, WEIGHTS_FILE, Adapter, peft_files, read_peft
from engine.training.serving import ServedAdapter
from engine.training.span import TrainedSpan
from engine.wire import to_bytes
from tests.engine.memory import PeakBytes
from tests.engine.models import VOCABULARY
from tests.engine.random_spans import CASES, random_span
from tests.engine.training import model

OPTIONS = SpanOptions(torch.device("cpu"), torch.float32, kv_bytes=1 << 22)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSource, Any]:
    return model(tmp_path_factory.mktemp("model"), "qwen2")


def random_adapter(config: ModelConfig, targets: tuple[str, ...] = ("q", "v", "gate", "up", "down")) -> Adapter:
    """An adapter with random B's, so that it changes something."""
    settings = AdapterSettings(rank=4, alpha=6.0, targets=targets)
    vectors = {block: drawn(settings, config, block) for block in range(config.n_blocks)}
    groups = layout(config, settings.rank, settings.targets)
    for block, vector in vectors.items():
        for _, up in named(groups, vector).values():
            up.copy_(0.1 * torch.randn(up.shape, generator=torch.Generator().manual_seed(block)))
    return Adapter(settings, vectors, "ab" * 32)


def write(folder: Path, adapter: Adapter, config: ModelConfig) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in peft_files(adapter, config, "a model").items():
        (folder / name).write_bytes(data)
    return folder


def test_an_adapter_is_read_as_it_was_written(trained: tuple[ModelSource, Any], tmp_path: Path) -> None:
    config = trained[0].config
    adapter = random_adapter(config)
    found = read_peft(write(tmp_path, adapter, config), config)
    assert (found.settings, found.model) == (adapter.settings, adapter.model)
    assert all(torch.equal(found.vectors[block], adapter.vectors[block]) for block in adapter.vectors)
    assert peft_files(found, config, "a model") == peft_files(adapter, config, "a model")


def test_peft_gives_the_same_logits_and_its_own_files_are_read(
    trained: tuple[ModelSource, Any], tmp_path: Path
) -> None:
    import peft

    source, theirs = trained
    adapter = random_adapter(source.config)
    write(tmp_path, adapter, source.config)
    ids = torch.randint(0, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(0))
    loaded = peft.PeftModel.from_pretrained(theirs, str(tmp_path))
    hidden = loaded.model.model(ids).last_hidden_state[0].detach()
    span = load_span(source, 0, source.config.n_blocks, OPTIONS)
    served = ServedAdapter(adapter, source.config, dict.fromkeys(range(source.config.n_blocks), OPTIONS))
    embedded = theirs.get_input_embeddings()(ids)[0].detach()
    out = span.step(embedded, [Segment(span.open(), 0, 20)], adapter=served)
    norm = theirs.model.norm(out)
    assert (norm - hidden).abs().max() <= 1e-5 * hidden.abs().max()
    loaded.save_pretrained(str(tmp_path / "again"))
    again = read_peft(tmp_path / "again", source.config)
    assert again.model is None
    assert all(torch.equal(again.vectors[block], adapter.vectors[block]) for block in adapter.vectors)
    loaded.unload()


@dataclass(frozen=True)
class Item:
    """One session's part of a step."""

    session: bytes
    position: int
    rows: int
    data: memoryview
    start: int = 0
    stop: int = 4
    dtype: str = "f32"
    wire: str = ""


@pytest.mark.parametrize("quantisation", ["none", "int8"])
def test_a_reply_without_an_adapter_is_not_touched_by_one_with_it(
    trained: tuple[ModelSource, Any], quantisation: Quantisation
) -> None:
    source = trained[0]
    options = replace(OPTIONS, quantisation=quantisation)
    span = load_span(source, 0, 4, options)
    adapter = ServedAdapter(random_adapter(source.config), source.config, dict.fromkeys(range(4), options))
    prompt, token = torch.randn(9, 64), torch.randn(1, 64)

    def run(**adapters: ServedAdapter | None) -> dict[str, list[bytes]]:
        runner = SessionRunner(HostedSpan([span]))
        outputs: dict[str, list[bytes]] = {name: [] for name in adapters}
        for name, own in adapters.items():
            runner.open(name.encode(), 16, own)
        for position, rows in ((0, prompt), (9, token)):
            work = [Item(name.encode(), position, len(rows), to_bytes(rows, "f32")) for name in adapters]
            for name, result in zip(adapters, runner.step(work), strict=True):
                outputs[name].append(result.data)
        for name in adapters:
            runner.close(name.encode())
        return outputs

    both = run(plain=None, adapted=adapter)
    assert both["plain"] == run(plain=None)["plain"]
    assert both["adapted"] == run(adapted=adapter)["adapted"]
    assert both["adapted"] != both["plain"]


def _config(folder: Path, **changes: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / CONFIG_FILE).unlink(), "has no adapter_config.json"),
        (lambda folder: (folder / WEIGHTS_FILE).unlink(), "adapter_model.safetensors is missing"),
        (lambda folder: (folder / CONFIG_FILE).write_text("{"), "is not valid JSON"),
        (lambda folder: _config(folder, peft_type="IA3"), "only LORA is supported"),
        (lambda folder: _config(folder, use_dora=True), "sets use_dora"),
        (lambda folder: _config(folder, r=0), "r is 0, expected a whole number from 1 to 256"),
        (lambda folder: _config(folder, r=8), "belongs to another model"),
        (lambda folder: _config(folder, bias="all"), "changes biases"),
        (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"\0" * 7), "cut short"),
    ],
)
def test_a_folder_that_is_no_adapter_is_refused(
    trained: tuple[ModelSource, Any], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    config = trained[0].config
    write(tmp_path, random_adapter(config), config)
    damage(tmp_path)
    with pytest.raises(EngineError, match=message):
        read_peft(tmp_path, config)


def test_an_adapter_of_another_shape_or_with_nan_is_refused(trained: tuple[ModelSource, Any], tmp_path: Path) -> None:
    config = trained[0].config
    adapter = random_adapter(config)
    write(tmp_path, adapter, config)
    for other in (replace(config, hidden_size=32), replace(config, n_blocks=3), replace(config, n_kv_heads=4)):
        with pytest.raises(EngineError, match=r"belongs to another model|not part of an adapter for this model"):
            read_peft(tmp_path, other)
    adapter.vectors[1][0] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        read_peft(write(tmp_path, adapter, config), config)


def test_a_served_adapter_needs_its_blocks(trained: tuple[ModelSource, Any]) -> None:
    config = trained[0].config
    adapter = random_adapter(config)
    with pytest.raises(EngineError, match="no weights for block 4"):
        ServedAdapter(adapter, config, dict.fromkeys(range(5), OPTIONS))
    served = ServedAdapter(adapter, config, dict.fromkeys(range(2), OPTIONS))
    assert served.nbytes == 2 * 4 * adapter_weights(config, 4, adapter.settings.targets)
    span = load_span(trained[0], 2, 3, OPTIONS)
    with pytest.raises(EngineError, match="other blocks than 2"):
        span.step(torch.zeros(1, 64), [Segment(span.open(), 0, 1)], adapter=served)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("keeps", [0.0, pytest.param(0.5, marks=pytest.mark.soak), 1.0])
def test_training_takes_no_more_memory_than_planned(name: str, keeps: float) -> None:
    config = replace(CASES[name], n_blocks=3, intermediate_size=160)
    span = random_span(config, quantisation="int8" if name == "int8" else "none")
    settings, batch, rows, under_way = AdapterSettings(8), 2, 96, 3
    task = TrainingTask(config.n_blocks, settings.rank, settings.targets, rows, under_way)
    least, most = (plan_training(config, FLOAT32, task, usable).total_bytes for usable in (0, 1 << 40))
    plan = plan_training(config, FLOAT32, task, int(least + keeps * (most - least)))
    with PeakBytes() as measured:
        trained_span = TrainedSpan(
            config,
            span.blocks,
            settings,
            span.options,
            input_bytes=plan.input_bytes,
            graph_bytes=plan.graph_bytes,
        )
        for _ in range(2):
            for number in range(under_way):
                trained_span.forward(number, torch.randn(rows, config.hidden_size), batch)
            for number in range(under_way):
                trained_span.backward(number, torch.randn(rows, config.hidden_size))
            trained_span.squared_norms()
            trained_span.step(1e-3, 1.0)
            trained_span.commit()
    planned = plan.total_bytes - plan.weight_bytes
    assert 0.5 * planned < measured.peak <= planned


def test_the_count_of_weights_is_that_of_the_vector(trained: tuple[ModelSource, Any]) -> None:
    for targets in (("q",), ("k", "down"), AdapterSettings().targets):
        groups = layout(trained[0].config, 4, targets)
        assert weight_count(groups) == adapter_weights(trained[0].config, 4, targets)
