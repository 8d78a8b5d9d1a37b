"""Chunks of prompts through captured blocks: the same rows as without, on a device that repeats what it is told."""

from __future__ import annotations

import pytest
import torch

from engine.model.cuda_graphs import Replay
from engine.model.kv_cache import Segment
from engine.model.prompt_graphs import SIZES, PromptGraphs
from engine.model.span import SpanRunner
from tests.engine.random_spans import CASES, random_span, small_config

CPU = torch.device("cpu")


def repeated(run: object) -> Replay:
    """A graph of a device that has none: what was captured runs again."""
    assert callable(run)
    return lambda: run()


def pair(case: str) -> tuple[SpanRunner, SpanRunner]:
    """Two spans of the same weights; the second runs chunks through captured blocks."""
    plain, captured = (random_span(CASES[case], "cpu", torch.float32) for _ in range(2))
    captured.blocks[:] = plain.blocks
    captured._prompt_graphs = PromptGraphs(captured.config, CPU, torch.float32, repeated)
    captured._prompt_graphs.add(captured.blocks)
    return plain, captured


@pytest.mark.parametrize("case", sorted(set(CASES) - {"int8"}))
@pytest.mark.parametrize(
    "chunks",
    [[(20,)], [(64,), (1,), (70,)], [(256,), (256,), (40,)], [(30, 50), (9, 100)], [(10, 40, 14), (64,), (5, 5)]],
)
def test_chunks_give_the_rows_that_they_give_without_graphs(case: str, chunks: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    plain, captured = pair(case)
    count = max(map(len, chunks))
    leases = [[span.open(700) for _ in range(count)] for span in (plain, captured)]
    for rows in chunks:
        x = torch.randn(sum(rows), plain.config.hidden_size)
        expected, own_rows = (
            span.step(x, [Segment(lease, lease.length, own) for lease, own in zip(own_leases, rows, strict=False)])
            for span, own_leases in zip((plain, captured), leases, strict=True)
        )
        assert torch.allclose(own_rows, expected, atol=1e-4), "captured blocks give other rows"


def test_rows_of_an_earlier_chunk_reach_nobody() -> None:
    torch.manual_seed(0)
    plain, captured = pair("biases")
    loud, quiet = captured.open(300), captured.open(300)
    captured.step(torch.full((200, 48), float("nan")), [Segment(loud, 0, 200)])
    x = torch.randn(70, 48)
    own = captured.step(x, [Segment(quiet, 0, 70)])
    assert torch.allclose(own, plain.step(x, [Segment(plain.open(300), 0, 70)]), atol=1e-4)


def test_blocks_that_are_given_back_are_forgotten_and_longer_chunks_are_not_covered() -> None:
    _, span = pair("plain")
    graphs, blocks = span._prompt_graphs, span.blocks
    assert graphs.covers(blocks, 1)
    assert graphs.covers(blocks, SIZES[-1])
    assert not graphs.covers(blocks, SIZES[-1] + 1)
    graphs.keep(1, 2)
    assert graphs.covers(blocks[1:], 100)
    assert not graphs.covers(blocks, 100)


def test_weights_in_eight_bits_are_left_to_ordinary_steps() -> None:
    span = random_span(small_config(), "cpu", torch.float32, quantisation="int8")
    graphs = PromptGraphs(span.config, CPU, torch.float32, repeated)
    graphs.add(span.blocks)
    assert not graphs.covers(span.blocks, 10)
