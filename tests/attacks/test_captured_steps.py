"""Attacks on captured steps: sessions over many parts of a span neither displace nor delay the steps of others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model import cuda_graphs as graphs
from engine.model.cuda_graphs import CAPTURE_AT, Replay, ShapeKey, SpanParts
from engine.model.kv_cache import Segment
from engine.model.span import SpanRunner
from tests.attacks.test_nan import EagerGraphs
from tests.engine.random_spans import random_span, small_config

BLOCKS = 6
PARTS = [(start, stop) for start in range(BLOCKS) for stop in range(start + 1, BLOCKS + 1) if stop - start < BLOCKS]


class CountedGraphs(EagerGraphs):
    """Captured steps, and how often something was captured."""

    def __init__(self, parts: SpanParts) -> None:
        super().__init__(parts)
        self.by_blocks = True  # as with fused kernels
        self.captures: list[ShapeKey] = []
        self.is_full = False

    def _capture(self, key: ShapeKey, *, in_place: bool = False) -> Replay:
        if self.is_full:
            raise torch.OutOfMemoryError("the card is full")
        self.captures.append(key)
        return super()._capture(key, in_place=in_place)


@pytest.fixture
def span(monkeypatch: pytest.MonkeyPatch) -> SpanRunner:
    monkeypatch.setattr(graphs, "triton_works", lambda: False)
    torch.manual_seed(0)
    made = random_span(small_config(n_blocks=BLOCKS), kv_bytes=1 << 20)
    for cache in made.pool.blocks:  # as a CUDA pool begins
        cache.keys.zero_()
        cache.values.zero_()
    made._graphs = CountedGraphs(SpanParts(made.config, made.blocks, made.pool, made._rope))
    made._graphs.capture(slice(0, BLOCKS))
    made._graphs.captures.clear()
    return made


def captures(span: SpanRunner) -> list[ShapeKey]:
    assert isinstance(span._graphs, CountedGraphs)
    return span._graphs.captures


def tokens(span: SpanRunner, part: tuple[int, int], count: int) -> Tensor:
    """The last of some tokens of a session over a part of the span, which ends then."""
    lease = span.open(count)
    x = torch.ones(1, span.config.hidden_size)
    for position in range(count):
        out = span.step(x, [Segment(lease, position, 1)], part)
    lease.close()
    return out


def test_a_part_that_is_not_captured_runs_from_its_captured_blocks(span: SpanRunner) -> None:
    by_blocks = [tokens(span, part, 3) for part in PARTS]
    span._graphs = None
    for part, out in zip(PARTS, by_blocks, strict=True):
        torch.testing.assert_close(tokens(span, part, 3), out)


def test_a_card_that_was_full_for_a_moment_has_blocks_captured_later(span: SpanRunner) -> None:
    """Steps of parts took ten times as long until the blocks were loaded anew."""
    assert isinstance(span._graphs, CountedGraphs)
    span._graphs.is_full = True
    tokens(span, (0, 2), 1)
    span._graphs.is_full = False
    tokens(span, (0, 2), 1)
    assert captures(span) == [], "not tried again with each step"
    assert span.capture_pending()
    tokens(span, (1, 3), 1)
    assert [key[2:] for key in captures(span)] == [(0, 2), (1, 2), (2, 3)]


def test_an_asker_with_another_part_for_each_reply_has_little_captured_while_others_wait(span: SpanRunner) -> None:
    """Each fourth token over a new part had a capture, for which everybody waited as for many steps."""
    for _ in range(3):
        for part in PARTS:
            tokens(span, part, 4)
    assert len(captures(span)) == BLOCKS


def test_what_is_used_stays_captured(span: SpanRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that was captured first went, however often it was used."""
    monkeypatch.setattr(graphs, "CAPTURE_AT", 1)
    monkeypatch.setattr(graphs, "MAX_CAPTURED", len(graphs.BATCHES) + 2)
    honest = PARTS[0]
    for part in PARTS[1:]:
        tokens(span, honest, 2)
        tokens(span, part, 2)
    assert [key[2:] for key in captures(span)].count(honest) == 1


def test_parts_that_were_used_once_keep_no_other_from_being_captured(
    span: SpanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_PENDING", 3)
    for part in PARTS[1:]:
        tokens(span, part, 1)
    captures(span).clear()
    tokens(span, PARTS[0], CAPTURE_AT)
    assert [key[2:] for key in captures(span)] == [PARTS[0]]
