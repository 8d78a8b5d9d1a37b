"""Sessions batched in one step see exactly what each would see alone, gathered or one by one."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from engine.budget import CacheFormat
from engine.model.attention import GatheredPlan, StepPlan, continued
from engine.model.kv_cache import PAGE_TOKENS, KVLease, Segment
from engine.model.span import SpanRunner
from tests.engine.random_spans import CASES, random_span

# Rows computed together or alone differ in the last bit, and a few numbers are rounded to another multiple in a cache
# of 8 bits then.
ONE_STEP = 6e-4
SHORT, LONG = (5, 60, 1, 33), (5, 300, 1, 33)  # short enough to be gathered, and too long


def fill(span: SpanRunner, lengths: tuple[int, ...], *, jumbled: bool) -> list[KVLease]:
    """Sessions with a past of these lengths; jumbled ones have pages all over the pool."""
    leases = [span.open(0 if jumbled else length + 8) for length in lengths]
    generator = torch.Generator().manual_seed(1)
    pasts = [torch.randn(length, span.config.hidden_size, generator=generator) for length in lengths]
    for begin in range(0, max(lengths), PAGE_TOKENS):  # in turns, so that the pages of the leases interleave
        for lease, past in zip(leases, pasts, strict=True):
            rows = past[begin : begin + PAGE_TOKENS]
            if len(rows):
                span.step(rows, [Segment(lease, begin, len(rows))])
    return leases


@pytest.mark.parametrize("form", get_args(CacheFormat))
@pytest.mark.parametrize("jumbled", [False, True])
@pytest.mark.parametrize("lengths", [SHORT, LONG])
@pytest.mark.parametrize("case", CASES)
def test_a_token_sees_the_same_past_together_as_alone(
    case: str, lengths: tuple[int, ...], jumbled: bool, form: CacheFormat
) -> None:
    torch.manual_seed(0)
    span = random_span(CASES[case], quantisation="int8" if case == "int8" else "none", cache=form)
    leases = fill(span, lengths, jumbled=jumbled)
    rows = torch.randn(len(lengths), span.config.hidden_size)
    together = span.step(rows, [Segment(lease, lease.length, 1) for lease in leases])
    for row, lease, expected in zip(rows, leases, together, strict=True):
        lease.truncate(lease.length - 1)
        alone = span.step(row[None], [Segment(lease, lease.length, 1)])
        assert (alone[0] - expected).norm() <= (1e-5 if form == "own" else ONE_STEP) * expected.norm()


@pytest.mark.parametrize("form", get_args(CacheFormat))
@pytest.mark.parametrize("case", CASES)
def test_a_prompt_gives_the_same_in_chunks_as_token_by_token(case: str, form: CacheFormat) -> None:
    torch.manual_seed(0)
    span = random_span(CASES[case], quantisation="int8" if case == "int8" else "none", cache=form)
    prompt = torch.randn(150, span.config.hidden_size)
    found = []
    for chunk in (150, 64, 1):
        lease = span.open()
        steps = [span.step(rows, [Segment(lease, lease.length, len(rows))]) for rows in prompt.split(chunk)]
        found.append(torch.cat(steps))
        lease.close()
    for other in found[1:]:
        assert (other - found[0]).norm() <= (1e-5 if form == "own" else ONE_STEP) * found[0].norm()


def test_a_cache_of_8_bits_moves_results_by_a_little() -> None:
    """By more than `ONE_STEP`, so that the tests above would find a token that sees itself unrounded."""
    outs = []
    for form in get_args(CacheFormat):
        torch.manual_seed(0)
        span = random_span(CASES["plain"], cache=form)
        outs.append(span.step(torch.randn(150, span.config.hidden_size), [Segment(span.open(), 0, 150)]))
    assert 3 * ONE_STEP < (outs[1] - outs[0]).norm() / outs[0].norm() < 0.02


def test_only_short_pasts_of_several_sessions_are_gathered() -> None:
    span = random_span(CASES["plain"])
    for lengths, gathered in ((SHORT, True), (LONG, False), ((60,), False)):
        leases = fill(span, lengths, jumbled=False)
        plan = StepPlan([Segment(lease, lease.length, 1) for lease in leases], torch.device("cpu"))
        assert isinstance(plan.for_window(None), GatheredPlan) is gathered
        for lease in leases:
            lease.close()


def test_what_lies_in_slots_that_are_not_seen_does_not_matter() -> None:
    span = random_span(CASES["plain"])
    leases = fill(span, SHORT, jumbled=False)
    seen = {slot for lease in leases for slot in lease.slots(0, lease.length + 1).tolist()}
    unseen = torch.tensor([slot not in seen for slot in range(span.pool.blocks[0].keys.shape[2])])
    for cache in span.pool.blocks:
        cache.keys[:, :, unseen] = cache.values[:, :, unseen] = torch.nan
    out = span.step(torch.randn(len(SHORT), 48), [Segment(lease, lease.length, 1) for lease in leases])
    assert out.isfinite().all()


@pytest.mark.parametrize("count", [1, 5, 12])
def test_rows_that_continue_a_session_see_its_past_and_themselves(count: int) -> None:
    torch.manual_seed(0)
    q, keys, values = torch.randn(1, 8, count, 16), torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12, 16)
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(q[:, :, [row]], keys[:, :, :seen], values[:, :, :seen], enable_gqa=True)
            for row, seen in enumerate(range(12 - count + 1, 13))
        ],
        dim=2,
    )
    assert torch.allclose(continued(q, keys, values), expected, atol=1e-6)
