"""Captured steps on a real CUDA device against ordinary ones; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from engine.model.attention import Segment
from tests.engine.random_spans import CASES, random_span

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("lengths", [[70], [3, 200, 64, 1100, 11]])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_captured_step_equals_an_ordinary_one(
    fused: bool, case: str, lengths: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    span = random_span(CASES[case], "cuda", dtype, quantisation="int8" if case == "int8" else "none")
    assert span._graphs is not None
    if fused and not span._graphs.fused:
        pytest.skip("Triton's kernels do not work here")
    span._graphs.fused = fused
    leases = [span.open(length + 8) for length in lengths]
    hidden = span.config.hidden_size
    for lease, length in zip(leases, lengths, strict=True):
        span.step(torch.randn(length, hidden, device="cuda", dtype=dtype), [Segment(lease, 0, length)])
    for _ in range(3):
        x = torch.randn(len(lengths), hidden, device="cuda", dtype=dtype)
        segments = [Segment(lease, lease.length, 1) for lease in leases]
        captured = span.step(x, segments).float()
        with torch.inference_mode():
            expected = span._run(x, segments, slice(0, 2)).float().cpu()
        assert (captured - expected).norm() <= tolerance * expected.norm()
