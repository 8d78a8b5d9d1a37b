"""Blocks of drawn weights that stand for a model which is not here yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.benchmark import measure_shape
from engine.config import ModelConfig
from engine.sources import starter
from engine.sources.grid import GRID_KINDS
from engine.stored_form import StoredForm, stored_form
from tests.engine.random_spans import CASES


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_block_can_be_measured(name: str) -> None:
    speed = measure_shape(CASES[name], "cpu", torch.float32, 1 << 33)
    assert speed is not None
    assert min(speed.reading_bytes_per_s, speed.flops_per_s, speed.few_rows_flops_per_s) > 0
    assert speed.head_bytes_per_s == 0.0


def two_blocks(kind: str) -> tuple[ModelConfig, StoredForm]:
    """A small model whose matrices are of one type, but for a finer one in its second block."""
    config = replace(starter.SHAPE, n_blocks=2, hidden_size=512, n_heads=8, n_kv_heads=2, intermediate_size=1024)

    def tensors_of(part: str) -> list[starter.KnownTensor]:
        finer = {"down": "Q6_K"} if part == "block.1" else {}
        return [tensor._replace(kind=finer.get(tensor.role, kind)) for tensor in starter.tensors_of(part)]

    form = stored_form(config, tensors_of)
    assert form is not None
    return config, form


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("AWQ_64", "GPTQ_64", "Q4_0", "Q6_K") else pytest.param(kind, marks=pytest.mark.soak)
        for kind in sorted(GRID_KINDS)
    ],
)
def test_blocks_in_every_grid_can_be_measured(kind: str) -> None:
    config, form = two_blocks(kind)
    assert form.blocks[0]["down"] == form.head == kind
    assert form.blocks[1]["down"] == "Q6_K"
    speed = measure_shape(config, "cpu", torch.float32, 1 << 33, form)
    assert speed is not None
    assert speed.precision == form.precision
    assert min(speed.reading_bytes_per_s, speed.flops_per_s, speed.few_rows_flops_per_s, speed.head_bytes_per_s) > 0


def test_without_memory_nothing_is_measured() -> None:
    assert measure_shape(CASES["plain"], "cpu", torch.float32, 1000) is None
