"""Captured CUDA steps, fused and plain, against the ordinary step; Triton's interpreter stands in for a missing GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
triton = pytest.importorskip("triton")

from engine.model.attention import Segment  # noqa: E402
from engine.model.cuda_graphs import BATCHES, SpanParts, fused_step, page_table, plain_step  # noqa: E402
from engine.model.kv_cache import PAGE_TOKENS  # noqa: E402
from engine.model.span import SpanRunner  # noqa: E402
from tests.engine.random_spans import CASES, random_span  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _sessions(span: SpanRunner, lengths: list[int], counts: list[int]) -> list[Segment]:
    """Sessions with random pasts of the given lengths, and how many tokens come next; many have their pages jumbled."""
    scatter = len(lengths) > 1
    stops = [length + count for length, count in zip(lengths, counts, strict=True)]
    leases = [span.open(0 if scatter else stop) for stop in stops]
    if scatter:
        for tokens in range(PAGE_TOKENS, max(stops) + 2 * PAGE_TOKENS, PAGE_TOKENS):
            for lease, stop in zip(leases, stops, strict=True):
                lease.reserve(min(tokens, stop))
    for lease, length in zip(leases, lengths, strict=True):
        span.step(torch.randn(length, span.config.hidden_size, device=DEVICE), [Segment(lease, 0, length)])
    return [Segment(lease, lease.length, count) for lease, count in zip(leases, counts, strict=True)]


@pytest.mark.parametrize(
    ("flavour", "case", "lengths"),
    [
        ("fused", "plain", [130]),  # one row, several programs a head
        ("fused", "plain", [3, 130, 64]),  # a padded batch of scattered pages
        pytest.param("fused", "plain", [1 + 5 * k for k in range(17)], marks=pytest.mark.soak),  # more than one tile
        pytest.param("fused", "biases", [3], marks=pytest.mark.soak),
        ("fused", "biases", [3, 70]),
        ("fused", "qk_norm", [3]),
        ("fused", "window", [130]),
        ("fused", "int8", [3]),
        ("fused", "int8", [3, 70]),
        *(("plain", case, lengths) for case in sorted(CASES) for lengths in ([130], [3, 130, 64])),
    ],
)
def test_a_captured_step_equals_an_ordinary_one(flavour: str, case: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    span = random_span(CASES[case], DEVICE, quantisation="int8" if case == "int8" else "none")
    for cache in span.pool.blocks:  # zeroed, as a CUDA pool is at first
        cache.keys.zero_(), cache.values.zero_()
    assert_same(flavour, span, _sessions(span, lengths, [1] * len(lengths)))


@pytest.mark.parametrize(
    ("flavour", "case", "lengths", "counts"),
    [
        ("fused", "plain", [3, 62], [1, 3]),  # one session with guesses, across the end of a page, and one without
        ("fused", "qk_norm", [5], [2]),
        ("fused", "window", [9], [2]),
        *(("plain", case, [3, 130, 60], [4, 1, 9]) for case in sorted(CASES)),
    ],
)
def test_guesses_go_along_in_a_captured_step(flavour: str, case: str, lengths: list[int], counts: list[int]) -> None:
    torch.manual_seed(0)
    span = random_span(CASES[case], DEVICE)
    for cache in span.pool.blocks:
        cache.keys.zero_(), cache.values.zero_()
    assert_same(flavour, span, _sessions(span, lengths, counts))


def assert_same(flavour: str, span: SpanRunner, segments: list[Segment]) -> None:
    parts = SpanParts(span.config, span.blocks, span.pool, span._rope)
    used = sum(segment.count for segment in segments)
    x = torch.randn(used, span.config.hidden_size, device=DEVICE)
    rows = next(size for size in BATCHES if size >= used)
    padded = torch.cat((x, x.new_zeros(rows - used, x.shape[1])))
    where = page_table(rows, 4, segments, span.pool.scratch_page).to(DEVICE)
    with torch.inference_mode():
        for segment in segments:
            segment.lease.reserve(segment.stop)
        captured = (fused_step if flavour == "fused" else plain_step)(parts, slice(0, 2), padded, where)[:used]
        expected = span._run(x, segments, slice(0, 2))
    assert (captured - expected).abs().max() <= 2e-5 * expected.abs().max()
