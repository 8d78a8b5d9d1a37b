"""Blocks of random weights that stand for a model which is not here yet."""

from __future__ import annotations

import pytest
import torch

from engine.benchmark import measure_shape
from tests.engine.random_spans import CASES


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_block_can_be_measured(name: str) -> None:
    speed = measure_shape(CASES[name], "cpu", torch.float32, 1 << 33)
    assert speed is not None
    assert min(speed.reading_bytes_per_s, speed.flops_per_s, speed.few_rows_flops_per_s) > 0


def test_without_memory_nothing_is_measured() -> None:
    assert measure_shape(CASES["plain"], "cpu", torch.float32, 1000) is None
