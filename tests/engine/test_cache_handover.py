"""A session's cache that is exported by one runner and imported by another gives the same outputs bit for bit."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.compute import StepWork
from engine.budget import CacheFormat
from engine.errors import EngineError, NotFinite, SessionError
from engine.model.block import Quantisation
from engine.model.hosted_span import HostedSpan
from engine.model.kv_cache import PAGE_TOKENS
from engine.model.span import SpanOptions, SpanRunner
from engine.session_runner import SessionRunner
from tests.engine.random_spans import random_block, small_config

CONFIG = small_config(n_blocks=4)
SESSION = b"a session"


def runner_of(
    parts: tuple[int, ...],
    start: int = 0,
    quantisation: Quantisation = "none",
    dtype: torch.dtype = torch.float32,
    cache: CacheFormat = "own",
) -> SessionRunner:
    """Blocks from `start` on, on as many "devices" as there are parts; block n is always the same."""
    options = SpanOptions(torch.device("cpu"), dtype, quantisation, False, 1 << 23, cache=cache)
    spans = []
    for count in parts:
        blocks = []
        for index in range(start, start + count):
            torch.manual_seed(index)
            blocks.append(random_block(CONFIG, index, options))
        spans.append(SpanRunner(CONFIG, start, blocks, options))
        start += count
    return SessionRunner(HostedSpan(spans))


def feed(runner: SessionRunner, blocks: tuple[int, int], position: int, rows: torch.Tensor) -> bytes:
    """Run rows through these blocks."""
    data = memoryview(rows.numpy().tobytes())
    return runner.step([StepWork(SESSION, *blocks, position, len(rows), data, "f32", "f32")])[0].data


def rows_of(count: int) -> torch.Tensor:
    """Random hidden states."""
    return torch.randn(count, CONFIG.hidden_size, generator=torch.Generator().manual_seed(7))


def hand_over(old: SessionRunner, new: SessionRunner, blocks: tuple[int, int], tokens: int, chunk: int) -> None:
    """Move the cache of so many tokens, in chunks."""
    assert old.cache_format == new.cache_format
    for first in range(0, tokens, chunk):
        stop = min(first + chunk, tokens)
        data = old.export_cache(SESSION, blocks, first, stop)
        assert len(data) == (stop - first) * (blocks[1] - blocks[0]) * old.cache_row_bytes
        new.import_cache(SESSION, blocks, first, memoryview(bytes(data)))


@pytest.mark.parametrize("cache", get_args(CacheFormat))
@pytest.mark.parametrize("quantisation", ["none", "int8"])
@pytest.mark.parametrize(("old_parts", "new_parts"), [((4,), (4,)), ((1, 3), (4,)), ((4,), (2, 2)), ((3, 1), (1, 3))])
def test_the_next_outputs_are_the_same_bit_for_bit(
    old_parts: tuple[int, ...], new_parts: tuple[int, ...], quantisation: Quantisation, cache: CacheFormat
) -> None:
    old, new = (runner_of(parts, 0, quantisation, cache=cache) for parts in (old_parts, new_parts))
    tokens, rows = PAGE_TOKENS + 21, rows_of(PAGE_TOKENS + 27)
    for runner in (old, new):
        runner.open(SESSION, 200)
    feed(old, (0, 4), 0, rows[:tokens])
    hand_over(old, new, (0, 4), tokens, 50)
    assert feed(new, (0, 4), tokens, rows[tokens:]) == feed(old, (0, 4), tokens, rows[tokens:])
    new.truncate(SESSION, tokens)
    new.truncate(SESSION, 10)
    old.truncate(SESSION, 10)
    assert feed(new, (0, 4), 10, rows[10:20]) == feed(old, (0, 4), 10, rows[10:20])
    new.close(SESSION)
    assert new.kv_free_tokens == new.kv_total_tokens


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 150),
    chunk=st.integers(1, 150),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda pair: (min(pair), max(pair) + 1)),
    scattered=st.booleans(),
    cache=st.sampled_from(get_args(CacheFormat)),
)
def test_part_of_a_span_goes_to_a_smaller_one(
    tokens: int, chunk: int, blocks: tuple[int, int], scattered: bool, cache: CacheFormat
) -> None:
    """A session through blocks 1:4 of a node with all, to a node with some of these, whatever pages either has."""
    old, new = runner_of((2, 2), cache=cache), runner_of((blocks[1] - blocks[0],), blocks[0], cache=cache)
    if scattered:
        new.open(b"first", 1)
        new.open(SESSION, 1)
        new.open(b"between", 1)
        new.close(b"first")
    else:
        new.open(SESSION, 200)
    old.open(SESSION, 200)
    rows = rows_of(tokens + 2)
    feed(old, (1, 4), 0, rows[:tokens])
    hand_over(old, new, blocks, tokens, chunk)
    again = runner_of((blocks[1] - blocks[0],), blocks[0], cache=cache)
    again.open(SESSION, 200)
    own = old.export_cache(SESSION, blocks, 0, tokens)
    assert bytes(new.export_cache(SESSION, blocks, 0, tokens)) == bytes(own)
    again.import_cache(SESSION, blocks, 0, memoryview(bytes(own)))
    assert feed(new, blocks, tokens, rows[tokens:]) == feed(again, blocks, tokens, rows[tokens:])


def test_16_bit_caches_move_too() -> None:
    old, new = runner_of((4,), dtype=torch.bfloat16), runner_of((4,), dtype=torch.bfloat16)
    for runner in (old, new):
        runner.open(SESSION, 64)
    feed(old, (0, 4), 0, rows_of(20))
    hand_over(old, new, (0, 4), 20, 64)
    assert feed(new, (0, 4), 20, rows_of(1)) == feed(old, (0, 4), 20, rows_of(1))


def test_a_cache_of_another_form_has_another_format() -> None:
    formats = {
        runner_of((4,)).cache_format,
        runner_of((4,), 0, "int8").cache_format,
        runner_of((4,), dtype=torch.bfloat16).cache_format,
        runner_of((4,), cache="int8").cache_format,
        runner_of((4,), dtype=torch.bfloat16, cache="int8").cache_format,
    }
    assert len(formats) == 5
    assert max(map(len, formats)) <= 64, "longer ones are refused by `app.session.cache_wire`"
    assert runner_of((2, 2)).cache_format in formats


def test_a_cache_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    old, new = runner_of((4,)), runner_of((2, 2))
    for runner in (old, new):
        runner.open(SESSION, 40)
    feed(old, (0, 4), 0, rows_of(20))
    data = bytes(old.export_cache(SESSION, (0, 4), 0, 20))
    for position, wrong in ((0, data[:-1]), (0, b""), (1, data)):
        with pytest.raises(SessionError):
            new.import_cache(SESSION, (0, 4), position, memoryview(wrong))
    for number in (float("nan"), float("inf")):
        bad = bytearray(data)
        bad[400:404] = torch.tensor([number]).numpy().tobytes()
        with pytest.raises(NotFinite):
            new.import_cache(SESSION, (0, 4), 0, memoryview(bad))
    with pytest.raises(SessionError):
        new.import_cache(SESSION, (2, 6), 0, memoryview(data))
    with pytest.raises(EngineError):
        new.import_cache(b"unknown", (0, 4), 0, memoryview(data))
    hand_over(old, new, (0, 4), 20, 20)
    assert feed(new, (0, 4), 20, rows_of(2)) == feed(old, (0, 4), 20, rows_of(2))


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 1e37), (torch.float16, 1e3)])
def test_scales_that_give_no_finite_numbers_are_refused(dtype: torch.dtype, large: float) -> None:
    old, new = (runner_of((4,), dtype=dtype, cache="int8") for _ in range(2))
    for runner in (old, new):
        runner.open(SESSION, 40)
    feed(old, (0, 4), 0, rows_of(20))
    data = bytes(old.export_cache(SESSION, (0, 4), 0, 20))
    row = CONFIG.head_dim + 4
    for number in (float("nan"), float("inf"), -float("inf"), large):
        bad = bytearray(data)
        bad[3 * row - 4 : 3 * row] = torch.tensor([number]).numpy().tobytes()
        with pytest.raises(NotFinite):
            new.import_cache(SESSION, (0, 4), 0, memoryview(bad))
    hand_over(old, new, (0, 4), 20, 20)
    assert feed(new, (0, 4), 20, rows_of(2)) == feed(old, (0, 4), 20, rows_of(2))


def test_tokens_that_are_not_cached_are_not_exported() -> None:
    old = runner_of((4,))
    old.open(SESSION, 40)
    feed(old, (1, 3), 0, rows_of(20))
    for blocks, start, stop in (((1, 3), 0, 21), ((1, 3), 5, 5), ((1, 3), -1, 5), ((1, 5), 0, 5)):
        with pytest.raises(SessionError):
            old.export_cache(SESSION, blocks, start, stop)
