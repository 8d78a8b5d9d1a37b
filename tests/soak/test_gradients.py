"""Gradients of the real starter model beside `transformers` with `peft`, in float64 and in float32.

In float32 `peft` itself is about 3e-4 of a tensor's largest away from float64, ten times as far as this engine, so
float64 is the oracle.
"""

from __future__ import annotations

import pytest
import torch

from app.config.home import cache_folder
from engine.errors import EngineError
from engine.sources.base import ModelSource
from engine.sources.opening import open_source
from engine.text.prompt import ModelText
from engine.training.adapters import AdapterSettings
from engine.training.head import IGNORED
from engine.training.local_trainer import MicroBatch
from tests.bench.finetune import in_transformers
from tests.engine.training import assert_equals_peft, trainer

pytestmark = pytest.mark.soak

TEXT = "A shoal of herring turns as one, although no fish among them knows where all the others are going to swim next."


@pytest.fixture(scope="module")
def source() -> ModelSource:
    try:
        return open_source("starter", cache_folder())
    except EngineError as error:
        pytest.skip(f"the starter model cannot be had: {error}")


@pytest.mark.parametrize("graph_bytes", [0, None], ids=["computed again", "kept"])
def test_gradients_are_those_of_peft_in_float64(source: ModelSource, graph_bytes: int | None) -> None:
    ids = torch.tensor([ModelText(source).tokenizer.encode(TEXT)])
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = IGNORED
    job = trainer(source, AdapterSettings(rank=4), graph_bytes=graph_bytes)
    assert_equals_peft(job, in_transformers(source).double(), MicroBatch(ids, labels), 1e-4)
