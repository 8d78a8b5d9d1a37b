"""Captured steps on a real CUDA device against ordinary ones; skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.core.compute import StepWork, TokenChoice
from engine.benchmark import Throughput
from engine.budget import CacheFormat
from engine.errors import DeviceFull
from engine.hosting import Hosted
from engine.model.attention import continued
from engine.model.block import Quantisation, WeightOptions
from engine.model.cuda_graphs import CAPTURE_AT
from engine.model.ends import EmbeddingAndHead
from engine.model.hosted_span import HostedSpan, SessionRows
from engine.model.kv_cache import Segment
from engine.model.linear import DenseLinear
from engine.model.span import SpanOptions, SpanRunner, load_span
from engine.session_runner import SessionRunner
from engine.sources.opening import open_source
from engine.swarm_ends import load_swarm_ends
from engine.text.reply import ReplySettings, ReplyWriter
from engine.text.sampler import Sampling
from tests.engine.random_spans import CASES, random_span, small_config

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


CUDA_CASES = CASES | {"int4": small_config(hidden_size=64, intermediate_size=96)}
QUANTISED: dict[str, Quantisation] = {"int8": "int8", "int4": "int4"}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", sorted(CUDA_CASES))
@pytest.mark.parametrize("lengths", [[70], [3, 200, 64, 1100, 11]])
@pytest.mark.parametrize("guesses", [0, 5])
@pytest.mark.parametrize("cache", get_args(CacheFormat))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_captured_step_equals_an_ordinary_one(
    fused: bool, case: str, lengths: list[int], guesses: int, cache: CacheFormat, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    if cache == "int8":  # a key that differs in the last bit can be rounded to another multiple
        tolerance = max(tolerance, 1e-3)
    span = random_span(CUDA_CASES[case], "cuda", dtype, quantisation=QUANTISED.get(case, "none"), cache=cache)
    assert span._graphs is not None
    if fused and not span._graphs.fused:
        pytest.skip("Triton's kernels do not work here")
    span._graphs.fused = fused
    leases = [span.open(length + 3 * (1 + guesses)) for length in lengths]
    hidden = span.config.hidden_size
    for lease, length in zip(leases, lengths, strict=True):
        span.step(torch.randn(length, hidden, device="cuda", dtype=dtype), [Segment(lease, 0, length)])
    for _ in range(3):
        x = torch.randn(len(lengths) * (1 + guesses), hidden, device="cuda", dtype=dtype)
        segments = [Segment(lease, lease.length, 1 + guesses) for lease in leases]
        captured = span.step(x, segments).float()
        with torch.inference_mode():
            expected = span._run(x, segments, slice(0, 2)).float().cpu()
        # A grid's integers are multiplied as 128 + integer: that costs float32, which has no tensor cores, a few bits.
        allowed = 4 * tolerance if case == "int4" else tolerance
        assert (captured - expected).norm() <= allowed * expected.norm()


@pytest.mark.parametrize("fused", [True, False])
def test_a_cache_of_8_bits_gives_replies_next_to_those_of_the_own_format(fused: bool) -> None:
    """A prompt, single tokens by captured steps, and a session that shares its pages; scales are kept in every slot."""
    outs: list[Tensor] = []
    for cache in get_args(CacheFormat):
        torch.manual_seed(0)
        span = random_span(WIDE, "cuda", torch.bfloat16, cache=cache)
        assert span._graphs is not None
        if fused and not span._graphs.fused:
            pytest.skip("Triton's kernels do not work here")
        span._graphs.fused = fused
        span.pool.clears_slots = not fused
        span.warm_up()
        generator = torch.Generator().manual_seed(1)
        lease = span.open(400)
        steps = [span.step(torch.randn(300, WIDE.hidden_size, generator=generator), [Segment(lease, 0, 300)]).cpu()]
        fork = lease.fork(200, 300)
        for _ in range(20):
            x = torch.randn(2, WIDE.hidden_size, generator=generator)
            steps.append(span.step(x, [Segment(one, one.length, 1) for one in (lease, fork)]).cpu())
        outs.append(torch.cat(steps).float())
    assert 0 < (outs[1] - outs[0]).norm() <= 3e-2 * outs[0].norm()


WIDE = small_config(n_blocks=4, hidden_size=1024, n_heads=16, n_kv_heads=4, head_dim=64, intermediate_size=4096)


def parts_of(span: SpanRunner, middle: int, second: str = "cuda") -> HostedSpan:
    """The blocks of a span as two parts, each with a cache of its own, the second maybe on another device."""
    options = replace(span.options, device=torch.device(second))
    moved = random_span(span.config, second, span.options.dtype).blocks[middle:] if second != "cuda" else None
    if moved is not None:
        for new, old in zip(moved, span.blocks[middle:], strict=True):
            for name in ("attn_norm", "mlp_norm"):
                setattr(new, name, getattr(old, name).to(second))
            for name in ("qkv", "o", "gate_up", "down"):
                getattr(new, name).weight = getattr(old, name).weight.to(second)
    return HostedSpan(
        [
            SpanRunner(span.config, 0, span.blocks[:middle], span.options),
            SpanRunner(span.config, middle, moved or span.blocks[middle:], options),
        ]
    )


def prompt_and_tokens(span: HostedSpan) -> torch.Tensor:
    """The outputs of a prompt and of twenty single tokens, of two sessions in one batch."""
    span.warm_up()
    generator = torch.Generator().manual_seed(7)
    leases = [span.open(64), span.open(64)]
    width, outs = span.config.hidden_size, []
    for lease in leases:
        x = torch.randn(16, width, generator=generator)
        outs.append(span.step(x, [SessionRows(lease, 0, 16)]).float().cpu())
    for position in range(16, 36):
        x = torch.randn(2, width, generator=generator)
        outs.append(span.step(x, [SessionRows(lease, position, 1) for lease in leases]).float().cpu())
    return torch.cat(outs)


@pytest.mark.parametrize(("second", "tolerance"), [("cuda", 0.0), ("cpu", 1e-4)])
def test_two_devices_compute_what_one_computes(second: str, tolerance: float) -> None:
    torch.manual_seed(0)
    span = random_span(WIDE, "cuda", torch.float32)
    expected = prompt_and_tokens(HostedSpan([span]))
    found = prompt_and_tokens(parts_of(span, 2, second))
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("middle", [None, 2])
def test_blocks_that_are_given_back_free_memory_at_once(middle: int | None) -> None:
    torch.manual_seed(0)
    whole = random_span(WIDE, "cuda", torch.bfloat16, kv_bytes=1 << 26)
    span = HostedSpan([whole]) if middle is None else parts_of(whole, middle)
    hosted = Hosted(SessionRunner(span), Throughput(1.0, 1.0, None), span)
    span.warm_up()
    lease = span.open(64)
    width = WIDE.hidden_size
    x = torch.randn(8, width)
    span.step(x, [SessionRows(lease, 0, 8)], (0, 2))
    expected = span.step(x[:1], [SessionRows(lease, 8, 1)], (0, 2))
    lease.truncate(8)
    before, free_before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    block_bytes = whole.blocks[0].nbytes
    del whole
    smaller = hosted.keep(0, 2)
    assert torch.cuda.memory_allocated() <= before - 2 * block_bytes
    assert torch.cuda.mem_get_info()[0] > free_before
    assert (smaller.runner.start, smaller.runner.stop) == (0, 2)
    found = span.step(x[:1], [SessionRows(lease, 8, 1)])
    assert torch.allclose(found.float(), expected.float(), atol=2e-2)
    while smaller.runner.prepare():
        pass
    lease.truncate(8)
    assert torch.allclose(span.step(x[:1], [SessionRows(lease, 8, 1)]).float(), expected.float(), atol=2e-2)


def test_a_step_without_memory_is_an_error_and_the_next_one_works() -> None:
    torch.manual_seed(0)
    span = HostedSpan([random_span(WIDE, "cuda", torch.bfloat16, kv_bytes=1 << 26)])
    runner = SessionRunner(span)
    runner.open(b"a", 2048)
    data = memoryview(bytes(2048 * WIDE.hidden_size * 2))

    def work(rows: int) -> list[StepWork]:
        return [StepWork(b"a", 0, 4, 0, rows, data[: rows * WIDE.hidden_size * 2], "bf16", "bf16")]

    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        with pytest.raises(DeviceFull, match="memory is full"):
            runner.step(work(2048))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(runner.step(work(2048))) == 1


@pytest.mark.parametrize("sessions", [1, 3])
def test_a_launched_step_gives_the_bytes_of_one_that_is_waited_for(sessions: int) -> None:
    torch.manual_seed(0)
    span = HostedSpan([random_span(WIDE, "cuda", torch.bfloat16)])
    span.warm_up()
    runner = SessionRunner(span)
    names = [bytes([number]) * 16 for number in range(sessions)]

    def work(position: int, rows: int, stop: int = 4) -> list[StepWork]:
        generator = torch.Generator().manual_seed(position)
        numbers = torch.randn(sessions, rows, WIDE.hidden_size, generator=generator).bfloat16()
        data = [memoryview(own.view(torch.uint8).numpy()).cast("B") for own in numbers]
        return [StepWork(name, 0, stop, position, rows, own, "bf16", "") for name, own in zip(names, data, strict=True)]

    for name in names:
        runner.open(name, 64)
    runner.step(work(0, 20))
    for position in range(20, 24):
        expected = runner.step(work(position, 1))
        for name in names:
            runner.truncate(name, position)
        started = runner.launch(work(position, 1))
        assert started is not None
        while not started.is_done():
            pass
        assert started.result() == expected
    assert runner.launch(work(24, 1, stop=3)) is None, "this part of the span is not captured"
    runner.step(work(24, 1))  # and nothing has changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunks", [[(200,), (256,), (33,)], [(30, 200), (40, 9, 100)], [(17,), (64,), (65,)]])
def test_a_chunk_through_captured_blocks_equals_an_ordinary_one(
    chunks: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = random_span(WIDE, "cuda", dtype)
    captured = SpanRunner(WIDE, 0, plain.blocks, plain.options)
    captured.warm_up()
    assert captured._prompt_graphs.covers(captured.blocks, 256)
    assert not plain._prompt_graphs.covers(plain.blocks, 256)
    count = max(map(len, chunks))
    leases = [[span.open(500) for _ in range(count)] for span in (plain, captured)]
    for rows in chunks:
        x = torch.randn(sum(rows), WIDE.hidden_size, device="cuda", dtype=dtype)
        expected, got = (
            span.step(x, [Segment(lease, lease.length, own) for lease, own in zip(both, rows, strict=False)]).float()
            for span, both in zip((plain, captured), leases, strict=True)
        )
        assert (got - expected).norm() <= (1e-2 if dtype is torch.bfloat16 else 1e-4) * expected.norm()


def test_a_part_that_runs_often_is_captured_without_a_quiet_moment() -> None:
    torch.manual_seed(0)
    span = random_span(WIDE, "cuda", torch.bfloat16)
    span.warm_up()
    graphs = span._graphs
    assert graphs is not None
    lease = span.open(64)
    hidden = torch.randn(40, WIDE.hidden_size, device="cuda", dtype=torch.bfloat16)
    span.step(hidden[:20], [Segment(lease, 0, 20)])
    runs = []
    for _ in range(2 * CAPTURE_AT):
        lease.length = 20
        runs.append((graphs.has_pending, span.step(hidden[20:21], [Segment(lease, 20, 1)], (1, 3))))
    assert [pending for pending, _ in runs] == [False] + (CAPTURE_AT - 1) * [True] + CAPTURE_AT * [False]
    assert all(torch.equal(rows, runs[0][1]) for _, rows in runs)


@pytest.mark.parametrize("sessions", [1, 3])
def test_a_step_ahead_gives_the_bytes_of_one_that_was_asked_for(sessions: int) -> None:
    torch.manual_seed(0)
    span = HostedSpan([random_span(WIDE, "cuda", torch.bfloat16)])
    span.warm_up()
    runner, other = SessionRunner(span), SessionRunner(span)
    names = [bytes([number]) * 16 for number in range(sessions)]

    def work(position: int, rows: Tensor) -> list[StepWork]:
        data = [memoryview(own.contiguous().view(torch.uint8).numpy()).cast("B") for own in rows]
        count = rows.shape[1]
        return [StepWork(n, 0, 4, position, count, own, "bf16", "") for n, own in zip(names, data, strict=True)]

    for name in names:
        runner.open(name, 64)
        other.open(name, 64)
    prompt = torch.randn(sessions, 20, WIDE.hidden_size).bfloat16()
    assert runner.step(work(0, prompt)) == other.step(work(0, prompt))
    for position in range(20, 26):
        rows = torch.randn(sessions, 1, WIDE.hidden_size).bfloat16()
        expected = other.step(work(position, rows))
        blank = [item._replace(data=memoryview(b"")) for item in work(position, rows)]
        started = runner.launch_ahead(blank, rows[:, 0].cuda())
        assert started is not None
        while not started.is_done():
            pass
        assert started.result() == expected
        if position % 2:  # another frame came instead: the step is computed as if nothing had been
            assert runner.step(work(position, rows)) == expected
        else:
            for name in names:
                runner.accept(name, position + 1)
    assert runner.launch_ahead(blank, None) is None
    assert runner.launch_ahead(blank, rows[:, 0].cuda().float()) is None


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_p=0.9, min_p=0.05, seed=3)])
@pytest.mark.parametrize("replies", [1, 3])
def test_a_card_that_goes_round_by_itself_writes_the_same_tokens(
    sampling: Sampling, replies: int, tmp_path: Path
) -> None:
    source, how = open_source("tiny-random", tmp_path), WeightOptions(torch.device("cuda"), torch.bfloat16)
    ends, blocks = load_swarm_ends(source, how), source.config.n_blocks
    span = HostedSpan([load_span(source, 0, blocks, SpanOptions(how.device, how.dtype, kv_bytes=1 << 26))])
    span.warm_up()
    runner, prompts = SessionRunner(span), [[5, 6, 7 + number] for number in range(replies)]

    def begin(session: bytes) -> tuple[list[StepWork], list[ReplyWriter], list[memoryview]]:
        names = [session + bytes([number]) for number in range(replies)]
        for name in names:
            runner.open(name, 64)
        work = [
            StepWork(name, 0, blocks, 0, 3, memoryview(ends.embed(prompt)), "bf16", "")
            for name, prompt in zip(names, prompts, strict=True)
        ]
        outputs = [memoryview(output.data)[-2 * ends.hidden_size :] for output in runner.step(work)]
        return (
            work,
            [ends.begin(prompt, ReplySettings(sampling=sampling, max_tokens=20)) for prompt in prompts],
            outputs,
        )

    work, writers, outputs = begin(b"a")
    for position in range(3, 13):
        pieces = ends.choose([TokenChoice(*one, "bf16") for one in zip(writers, outputs, strict=True)])
        fed = [memoryview(one[-1].embedding) for one in pieces]
        steps = [item._replace(position=position, rows=1, data=data) for item, data in zip(work, fed, strict=True)]
        outputs = [memoryview(output.data) for output in runner.step(steps)]
    expected = [writer.token_ids for writer in writers]

    work, writers, outputs = begin(b"b")
    choices = [TokenChoice(*one, "bf16") for one in zip(writers, outputs, strict=True)]
    chosen = ends.launch(choices)
    assert chosen is not None
    step = runner.launch_ahead([i._replace(position=3, rows=1, data=memoryview(b"")) for i in work], chosen.next_rows)
    for position in range(4, 13):
        assert step is not None
        after = ends.launch_ahead(choices, step.rows)
        assert after is not None
        ahead = [item._replace(position=position, rows=1, data=memoryview(b"")) for item in work]
        step_after = runner.launch_ahead(ahead, after.next_rows)
        while not (chosen.is_done() and step.is_done()):
            pass
        chosen.take(range(replies))
        step.result()
        for item in work:
            runner.accept(item.session, position)
        chosen, step = after, step_after
    torch.cuda.synchronize()
    chosen.take(range(replies))
    assert [writer.token_ids for writer in writers] == expected


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_are_embedded_where_they_are_chosen(tied: bool) -> None:
    weight = torch.randn(300, 192).bfloat16()
    output = DenseLinear(weight.cuda())
    embedding = output.weight if tied else torch.randn(300, 192).bfloat16()
    ends = EmbeddingAndHead(WIDE, embedding, torch.ones(192, dtype=torch.bfloat16, device="cuda"), output)
    if not tied:
        assert not ends.reaches_embedding
    ends.share_embedding()
    ends.share_embedding()
    assert ends.reaches_embedding
    rows = torch.empty(4, 192, dtype=torch.bfloat16, device="cuda")
    ends.look_up(torch.tensor([3, 299, 0, 3], device="cuda"), rows)
    assert torch.equal(rows.cpu(), embedding.cpu()[[3, 299, 0, 3]])


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_p=0.9, min_p=0.05, seed=3)])
def test_a_launched_choice_gives_the_tokens_of_one_that_is_waited_for(sampling: Sampling, tmp_path: Path) -> None:
    ends = load_swarm_ends(open_source("tiny-random", tmp_path), WeightOptions(torch.device("cuda"), torch.bfloat16))
    prompts = [[1, 2, 3], [5, 6]]
    settings = ReplySettings(sampling=sampling, max_tokens=20)
    waited, launched = ([ends.begin(prompt, settings) for prompt in prompts] for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        numbers = torch.randn(2, ends.hidden_size, generator=generator).bfloat16()
        rows = [memoryview(row.view(torch.uint8).numpy()).cast("B") for row in numbers]
        expected = ends.choose([TokenChoice(*one, "bf16") for one in zip(waited, rows, strict=True)])
        started = ends.launch([TokenChoice(*one, "bf16") for one in zip(launched, rows, strict=True)])
        assert started is not None
        while not started.is_done():
            pass
        assert started.take([1, 0]) == [expected[1], expected[0]]
    guessing = [TokenChoice(writer, memoryview(bytes(rows[0]) * 2), "bf16", (9,)) for writer in (*waited, *launched)]
    expected = ends.choose(guessing[:2])
    started = ends.launch(guessing[2:])
    assert started is not None
    torch.cuda.synchronize()
    assert started.take([0, 1]) == expected
    picky = ends.begin([1], ReplySettings(sampling=sampling, logprobs=2))
    assert ends.launch([TokenChoice(picky, rows[0], "bf16")]) is None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("head_dim", [12, 64, 128])
def test_rows_that_continue_a_session_see_its_past_and_themselves(
    head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    q, keys, values = (torch.randn(1, n, rows, head_dim, device="cuda") for n, rows in ((8, 70), (2, 300), (2, 300)))
    mask = torch.ones(70, 300, device="cuda", dtype=torch.bool).tril(230)
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    out = continued(q.to(dtype), keys.to(dtype), values.to(dtype)).float()
    assert (out - expected).norm() <= tolerance * expected.norm()


def test_a_start_does_not_load_torchs_compiler() -> None:
    program = """
import sys, torch
from engine.model.kv_cache import Segment
from tests.engine.random_spans import random_span, small_config
span = random_span(small_config(), "cuda", torch.bfloat16)
span.warm_up()
lease = span.open(600)
for start in (0, 300):
    span.step(torch.randn(300, span.config.hidden_size, dtype=torch.bfloat16), [Segment(lease, start, 300)])
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
