"""Every family against `transformers` in float32, from safetensors: prefill, decode, splits, batches, truncation."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.ends import EmbeddingAndHead, load_ends
from engine.model.kv_cache import Segment
from engine.model.span import SpanOptions, SpanRunner, load_span
from engine.sources.base import ModelSource
from engine.sources.huggingface import open_folder
from tests.engine.models import VARIANT, VARIANTS, VOCABULARY, Variant, write_folder

CPU = torch.device("cpu")
OPTIONS = SpanOptions(CPU, torch.float32, kv_bytes=1 << 24)
TOLERANCE = 1e-5  # of the largest logit
PROMPT, DECODED = 48, 32


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()


def load(source: ModelSource) -> tuple[EmbeddingAndHead, SpanRunner]:
    """The ends and all blocks of a model."""
    return load_ends(source, OPTIONS), load_span(source, 0, source.config.n_blocks, OPTIONS)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Within the tolerance, which is relative to the largest logit."""
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_prefill_and_decode_equal_transformers(variant: Variant, tmp_path: Path) -> None:
    model = write_folder(tmp_path, variant)
    ends, span = load(open_folder(tmp_path))
    ids = tokens(PROMPT + DECODED)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    lease = span.open()
    first = span.step(ends.embed(ids[:PROMPT]), [Segment(lease, 0, PROMPT)])
    steps = [span.step(ends.embed([ids[at]]), [Segment(lease, at, 1)]) for at in range(PROMPT, len(ids))]
    assert_close(ends.logits(torch.cat((first, *steps))), expected)


@pytest.fixture(scope="module", params=["llama-biases", "qwen3", "mistral-sliding"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder, VARIANT[request.param])
    return open_folder(folder)


def test_any_split_in_spans_gives_the_same_bits(model: ModelSource) -> None:
    ends, whole = load(model)
    blocks = model.config.n_blocks
    ids = tokens(PROMPT + 4)
    expected = run(ends, [whole], ids)
    for cut in range(1, blocks):
        for second in range(cut + 1, blocks + 1):
            bounds = sorted({0, cut, second, blocks})
            spans = [load_span(model, a, b, OPTIONS) for a, b in pairwise(bounds)]
            assert torch.equal(run(ends, spans, ids), expected), bounds


def run(ends: EmbeddingAndHead, spans: list[SpanRunner], ids: list[int]) -> Tensor:
    """Logits of a prefill of `PROMPT` tokens and single steps behind it, through a chain of spans."""
    leases = [span.open() for span in spans]
    outputs = []
    for begin, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, len(ids)))]:
        x = ends.embed(ids[begin:end])
        for span, lease in zip(spans, leases, strict=True):
            x = span.step(x, [Segment(lease, begin, end - begin)])
        outputs.append(x)
    return ends.logits(torch.cat(outputs))


def test_a_batch_gives_each_session_what_it_gets_alone(model: ModelSource) -> None:
    ends, span = load(model)
    lengths = [1, 2, 5, 17, 33, 48, 63, 64]
    sequences = [tokens(length + 3, seed) for seed, length in enumerate(lengths)]
    alone = [run_alone(ends, span, sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]
    leases = [span.open() for _ in lengths]
    for lease, sequence, length in zip(leases, sequences, lengths, strict=True):
        span.step(ends.embed(sequence[:length]), [Segment(lease, 0, length)])
    for step in range(3):
        x = ends.embed([sequence[length + step] for sequence, length in zip(sequences, lengths, strict=True)])
        logits = ends.logits(span.step(x, [Segment(lease, lease.length, 1) for lease in leases]))
        for row in range(len(lengths)):
            assert_close(logits[row], alone[row][step])


def run_alone(ends: EmbeddingAndHead, span: SpanRunner, sequence: list[int], length: int) -> Tensor:
    """Logits of the tokens behind the first `length`, one session by itself."""
    lease = span.open()
    span.step(ends.embed(sequence[:length]), [Segment(lease, 0, length)])
    steps = [span.step(ends.embed([token]), [Segment(lease, lease.length, 1)]) for token in sequence[length:]]
    lease.close()
    return ends.logits(torch.cat(steps))


def test_prefill_and_decode_share_one_step(model: ModelSource) -> None:
    ends, span = load(model)
    decoding, prefilling = tokens(20, 1), tokens(30, 2)
    expected = run_alone(ends, span, decoding, 19), run_alone(ends, span, prefilling, 1)[-1]
    first, second = span.open(), span.open()
    span.step(ends.embed(decoding[:19]), [Segment(first, 0, 19)])
    x = ends.embed([decoding[19], *prefilling])
    logits = ends.logits(span.step(x, [Segment(first, 19, 1), Segment(second, 0, 30)]))
    assert_close(logits[0], expected[0][0])
    assert_close(logits[-1], expected[1])


@pytest.mark.parametrize("cut", [0, 1, 30, 63, 64, 65, 80])
def test_truncating_and_replaying_gives_the_same(model: ModelSource, cut: int) -> None:
    ends, span = load(model)
    ids = tokens(81)
    lease = span.open()
    span.step(ends.embed(ids[:80]), [Segment(lease, 0, 80)])
    expected = ends.logits(span.step(ends.embed(ids[80:]), [Segment(lease, 80, 1)]))
    lease.truncate(cut)
    logits = ends.logits(span.step(ends.embed(ids[cut:]), [Segment(lease, cut, 81 - cut)]))
    assert_close(logits[-1:], expected)


def test_chunked_prefill_equals_one_prefill(model: ModelSource) -> None:
    ends, span = load(model)
    ids = tokens(100)
    whole, chunked = span.open(), span.open()
    expected = span.step(ends.embed(ids), [Segment(whole, 0, 100)])
    parts = [span.step(ends.embed(ids[a : a + 40]), [Segment(chunked, a, len(ids[a : a + 40]))]) for a in (0, 40, 80)]
    assert_close(torch.cat(parts), expected)


def test_a_jumble_of_pages_changes_nothing(model: ModelSource) -> None:
    ends, span = load(model)
    ids = tokens(200)
    expected = run_alone(ends, span, ids, 199)
    first, second = span.open(), span.open()
    for length in (64, 128, 192, 200):  # two sessions grow in turns, so that neither gets a run of pages
        first.reserve(length)
        second.reserve(length)
    assert first.first_slot is None
    span.step(ends.embed(ids[:199]), [Segment(first, 0, 199)])
    logits = ends.logits(span.step(ends.embed(ids[199:]), [Segment(first, 199, 1)]))
    assert_close(logits, expected)
