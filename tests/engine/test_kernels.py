"""Captured CUDA steps, fused and plain, against the ordinary step; Triton's interpreter stands in for a missing GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
triton = pytest.importorskip("triton")

from engine.model.attention import Segment  # noqa: E402
from engine.model.cuda_graphs import SpanParts, fused_step, page_table, plain_step  # noqa: E402
from engine.model.kv_cache import PAGE_TOKENS  # noqa: E402
from engine.model.span import SpanRunner  # noqa: E402
from tests.engine.random_spans import CASES, random_span  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _sessions(span: SpanRunner, lengths: list[int], scatter: bool) -> list[Segment]:
    """Sessions with random pasts of the given lengths; `scatter` makes their pages a jumble."""
    leases = [span.open(0 if scatter else length + 1) for length in lengths]
    if scatter:
        for tokens in range(PAGE_TOKENS, max(lengths) + 2 * PAGE_TOKENS, PAGE_TOKENS):
            for lease, length in zip(leases, lengths, strict=True):
                lease.reserve(min(tokens, length + 1))
    for lease, length in zip(leases, lengths, strict=True):
        span.step(torch.randn(length, span.config.hidden_size, device=DEVICE), [Segment(lease, 0, length)])
    return [Segment(lease, lease.length, 1) for lease in leases]


@pytest.mark.parametrize(
    ("flavour", "case", "lengths"),
    [
        ("fused", "plain", [130]),  # one row, several programs a head
        ("fused", "plain", [3, 130, 64]),  # a padded batch of scattered pages
        ("fused", "plain", [1 + 5 * k for k in range(20)]),  # more rows than one tile
        ("fused", "int8", [1 + 5 * k for k in range(20)]),
        ("fused", "biases", [3]),
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
    segments = _sessions(span, lengths, scatter=len(lengths) > 1)
    parts = SpanParts(span.config, span.blocks, span.pool, span._rope)
    x = torch.randn(len(lengths), span.config.hidden_size, device=DEVICE)
    rows = len(lengths) if len(lengths) < 3 else 4 if len(lengths) == 3 else 32
    padded = torch.cat((x, x.new_zeros(rows - len(lengths), x.shape[1])))
    where = page_table(rows, 4, segments, span.pool.scratch_page).to(DEVICE)
    with torch.inference_mode():
        for segment in segments:
            segment.lease.reserve(segment.stop)
        captured = (fused_step if flavour == "fused" else plain_step)(parts, slice(0, 2), padded, where)[: len(lengths)]
        expected = span._run(x, segments, slice(0, 2))
    assert (captured - expected).abs().max() <= 2e-5 * expected.abs().max()
