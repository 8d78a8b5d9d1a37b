"""Numbers that are none: what one session writes into the cache must never reach another session's answer."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from app.core.compute import StepWork
from engine.errors import EngineError, SessionError
from engine.model import cuda_graphs as graphs
from engine.model.cuda_graphs import DecodeGraphs, Replay, ShapeKey, SpanParts
from engine.model.hosted_span import HostedSpan
from engine.model.kv_cache import KVLease, Segment
from engine.model.span import SpanRunner
from engine.session_runner import SessionRunner
from tests.engine.random_spans import random_span, small_config

PROMPT_TOKENS = 5


class EagerGraphs(DecodeGraphs):
    """Decode steps as on CUDA without Triton, but on the CPU: each replay of a captured step computes it anew."""

    def _capture(self, key: ShapeKey, *, in_place: bool = False) -> Replay:
        return partial(self._run, self._buffers_of(key.rows), key, in_place=in_place)

    def _wait(self) -> None:
        pass


@pytest.fixture
def span(monkeypatch: pytest.MonkeyPatch) -> SpanRunner:
    """A span whose single tokens take the way of a CUDA device without Triton."""
    monkeypatch.setattr(graphs, "triton_works", lambda: False)
    torch.manual_seed(0)
    made = random_span(small_config(), kv_bytes=1 << 20)
    for cache in made.pool.blocks:  # as a CUDA pool begins
        cache.keys.zero_()
        cache.values.zero_()
    made._graphs = EagerGraphs(SpanParts(made.config, made.blocks, made.pool, made._rope))
    return made


def prompted(span: SpanRunner, seed: int) -> KVLease:
    """An honest session that has read its prompt."""
    lease = span.open(100)
    states = torch.randn(PROMPT_TOKENS, span.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    span.step(states, [Segment(lease, 0, PROMPT_TOKENS)])
    return lease


def decode(span: SpanRunner, states: Tensor, *leases: KVLease) -> Tensor:
    """One more token for each of these sessions."""
    return span.step(states, [Segment(lease, lease.length, 1) for lease in leases])


def honest_answer(span: SpanRunner) -> Tensor:
    """What an honest session gets for its first token after the prompt."""
    lease = prompted(span, seed=1)
    answer = decode(span, torch.ones(1, span.config.hidden_size), lease)
    lease.close()
    return answer


def nan_rows(span: SpanRunner, rows: int) -> Tensor:
    return torch.full((rows, span.config.hidden_size), math.nan)


def test_nan_from_one_session_does_not_reach_the_next_one_that_leases_its_pages(span: SpanRunner) -> None:
    """A peer sends hidden states of NaN and closes its session: the next session gets the answer it got before."""
    before = honest_answer(span)
    evil = span.open(100)
    with contextlib.suppress(EngineError):  # it may be refused
        for _ in range(10):
            decode(span, nan_rows(span, 1), evil)
    evil.close()
    torch.testing.assert_close(honest_answer(span), before)


def test_an_overflow_in_one_session_does_not_reach_the_next_one_that_leases_its_pages(span: SpanRunner) -> None:
    """A session's own values overflow to infinity, as float16 does: the next session gets the answer it got before."""
    before = honest_answer(span)
    lease = prompted(span, seed=2)
    lease.reserve(100)
    lease.mark_written(0, 100)  # as a step does
    for cache in span.pool.blocks:
        cache.keys[:, :, lease.slots(0, 100)] = math.inf
        cache.values[:, :, lease.slots(0, 100)] = math.inf
    lease.close()
    torch.testing.assert_close(honest_answer(span), before)


def test_nan_from_a_session_that_left_its_batch_does_not_reach_those_that_stay(span: SpanRunner) -> None:
    """A peer sends NaN in a batch of four and leaves: the three others, padded up to four, get finite answers."""
    honest, evil = [prompted(span, seed) for seed in range(3)], prompted(span, seed=3)
    ones = torch.ones(3, span.config.hidden_size)
    with contextlib.suppress(EngineError):  # it may be refused
        decode(span, torch.cat((ones, nan_rows(span, 1))), *honest, evil)
    evil.close()
    for _ in range(2):  # the first of these steps may still write what the second one reads
        assert decode(span, ones, *honest).isfinite().all()


def test_nan_that_a_session_dropped_again_does_not_reach_its_next_token(span: SpanRunner) -> None:
    """A session overflows and takes the token back, as a resumed reply does: it goes on as if it had not been."""
    before = honest_answer(span)
    lease = prompted(span, seed=1)
    decode(span, torch.ones(1, span.config.hidden_size), lease)
    decode(span, nan_rows(span, 1), lease)
    lease.truncate(PROMPT_TOKENS)
    torch.testing.assert_close(decode(span, torch.ones(1, span.config.hidden_size), lease), before)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e6], ids=str)
def test_input_that_is_not_finite_is_refused_for_the_session_that_sent_it(number: float) -> None:
    """A peer sends NaN, infinity, or what becomes infinity in float16: its session is named, and nobody advances."""
    runner = SessionRunner(HostedSpan([random_span(small_config(), dtype=torch.float16, kv_bytes=1 << 20)]))
    rows = {b"good": torch.ones(2, runner.hidden_size), b"evil": torch.ones(3, runner.hidden_size)}
    rows[b"evil"][1, 7] = number

    def work(session: bytes) -> StepWork:
        data = memoryview(rows[session].numpy().tobytes())
        return StepWork(session, 0, 2, 0, len(rows[session]), data, "f32", "f32")

    for session in rows:
        runner.open(session, 10)
    with pytest.raises(SessionError, match=f"session {b'evil'.hex()} sent numbers that are not finite in f16"):
        runner.step([work(b"good"), work(b"evil")])
    (output,) = runner.step([work(b"good")])
    assert torch.frombuffer(bytearray(output.data), dtype=torch.float32).isfinite().all()


def test_input_that_is_not_finite_costs_others_no_pass_through_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer sends NaN for other blocks than those of an honest session: nothing is computed and then thrown away."""
    span = HostedSpan([random_span(small_config(), kv_bytes=1 << 20)])
    runner, passes = SessionRunner(span), Mock(wraps=span.step)
    monkeypatch.setattr(span, "step", passes)
    rows = {b"good": (torch.ones(1, runner.hidden_size), 0), b"evil": (nan_rows(span.parts[0], 1), 1)}
    for session in rows:
        runner.open(session, 10)
    work = [
        StepWork(session, start, 2, 0, 1, memoryview(row.numpy().tobytes()), "f32", "f32")
        for session, (row, start) in rows.items()
    ]
    with pytest.raises(SessionError, match="not finite"):
        runner.step(work)
    passes.assert_not_called()
