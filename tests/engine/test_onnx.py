"""Blocks of 4 and 8 bits on the CPU by ONNX Runtime, beside the same blocks by torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.budget import INT4_BYTES, CacheFormat, block_bytes, grid_weights
from engine.model import onnx_graph
from engine.model.block import Quantisation
from engine.model.kv_cache import Segment
from engine.model.linear import DenseLinear, GridLinear, Linear
from engine.model.onnx_block import BlockGraphs
from engine.model.onnx_graph import GridProduct
from engine.model.span import SpanOptions, SpanRunner, load_span
from engine.sources.gguf import open_gguf
from engine.sources.grid import quantise
from tests.engine.gguf_models import write_gguf
from tests.engine.models import VARIANT
from tests.engine.random_spans import random_span, small_config
from tests.engine.test_gguf import WIDE as WIDE_FILE
from tests.engine.test_grid import COLUMNS, ROWS, random_grid
from tests.engine.test_hosting import resident_bytes

pytest.importorskip("onnxruntime", reason="ONNX Runtime, the optional package for 4-bit blocks on a CPU, is not here")

WIDE = {"hidden_size": 96, "intermediate_size": 160}  # whole groups, an odd number of them
CONFIGS = {
    "plain": small_config(**WIDE),
    "biases": small_config(**WIDE, qkv_bias=True, o_bias=True, mlp_bias=True),
    "qk_norm": small_config(**WIDE, family="qwen3", qk_norm=True),
    "window": small_config(**WIDE, family="mistral", sliding_window=40),
}
# The runtime rounds the rows to 8 bits in groups of 32 (16 for Q6_K): 0.4 % of a random row's length.
ROUNDING = 0.012


@pytest.fixture(params=[1, 10**6], ids=["in float32", "rounded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both ways to multiply, whichever this machine would choose."""
    rows: int = request.param
    for module in ("onnx_graph", "onnx_block", "onnx_session"):
        monkeypatch.setattr(f"engine.model.{module}.many_rows", lambda: rows)
    return rows


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_product_is_the_dense_one_but_for_rounded_rows(kind: str, rows: int, way: int) -> None:
    torch.manual_seed(0)
    linear = GridLinear(random_grid(kind), torch.randn(ROWS))
    x, residual = torch.randn(rows, COLUMNS), torch.randn(rows, ROWS)
    expected = residual + torch.nn.functional.linear(x, linear.grid.dense(torch.float32), linear.bias)
    off = (linear(x, residual) - expected).norm() / expected.norm()
    assert off <= (ROUNDING if way > rows else 1e-5)


def _spans(case: str) -> tuple[SpanRunner, SpanRunner]:
    """The same blocks of 4 bits, run by graphs, and by torch with the numbers that the grids mean."""
    spans = []
    for by_graphs in (True, False):
        torch.manual_seed(0)
        span = random_span(CONFIGS[case], quantisation="int4")
        assert len(span._cpu_graphs) == 2
        if not by_graphs:
            span._cpu_graphs.keep(0, 0)
            span._session_graph = None
            for block in span.blocks:
                block.qkv, block.o = _dense(block.qkv), _dense(block.o)
                block.gate_up, block.down = _dense(block.gate_up), _dense(block.down)
        spans.append(span)
    return spans[0], spans[1]


def _dense(linear: Linear) -> DenseLinear:
    assert isinstance(linear, GridLinear)
    return DenseLinear(linear.grid.dense(torch.float32), linear.bias)


@pytest.mark.parametrize("case", sorted(CONFIGS))
def test_a_block_computes_what_torch_computes(case: str, way: int) -> None:
    ours, plain = _spans(case)
    lengths = [3, 70]
    results = []
    for span in (ours, plain):
        torch.manual_seed(1)
        leases = [span.open(length + 4) for length in lengths]
        outs = [
            span.step(torch.randn(length, 96), [Segment(lease, 0, length)])
            for lease, length in zip(leases, lengths, strict=True)
        ]
        for _ in range(2):  # sessions of unlike lengths in one step
            segments = [Segment(lease, lease.length, 1) for lease in leases]
            outs.append(span.step(torch.randn(2, 96), segments))
        outs.append(span.step(torch.randn(1, 96), [Segment(leases[0], leases[0].length, 1)], (1, 2)))  # a part of it
        results.append(torch.cat(outs))
    off = (results[0] - results[1]).norm() / results[1].norm()
    assert off <= (0.03 if way > 70 else 1e-5)


def _steps(span: SpanRunner, rows: Sequence[int], *, before: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of steps of one session, behind a session with so many tokens, and its keys and values."""
    torch.manual_seed(1)
    if before:
        span.step(torch.randn(before, 96), [Segment(span.open(before), 0, before)])
    lease = span.open(sum(rows))
    outs = [span.step(torch.randn(count, 96), [Segment(lease, lease.length, count)]) for count in rows]
    return torch.cat(outs), lease.read(slice(0, 2), 0, lease.length)


@pytest.mark.parametrize("case", sorted(set(CONFIGS) - {"window"}))
@pytest.mark.parametrize("before", [0, 100])
def test_steps_of_one_session_are_one_graph(case: str, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("onnx_graph", "onnx_block", "onnx_session"):
        monkeypatch.setattr(f"engine.model.{module}.many_rows", lambda: 32)
    ours, plain = _spans(case)
    assert ours._session_graph is not None
    rows = [70, 1, 1, 3, 8, 20, 1]  # by blocks, in one graph, by blocks, in one graph
    (found, cached), (expected, right) = _steps(ours, rows, before=before), _steps(plain, rows, before=before)
    assert (found - expected).norm() <= 0.03 * expected.norm()
    assert (cached - right).norm() <= 0.03 * right.norm()
    for start in range(0, sum(rows), 8):  # no row is far off
        part = slice(start, start + 8)
        assert (found[part] - expected[part]).norm() <= 0.06 * expected[part].norm()


def test_one_graph_touches_the_slots_of_its_session_only() -> None:
    span = random_span(CONFIGS["plain"], quantisation="int4")
    assert span._session_graph is not None
    leases = [span.pool.open(length) for length in (64, 128, 64)]
    last = [span.pool.open(64) for _ in range(span.pool.free_tokens // 64)][-1]  # up to the end of the pool
    for cache in span.pool.blocks:
        for kept in cache.tensors:
            kept.fill_(7)
    for lease in (leases[1], last):
        lease.length = lease.capacity - 2
        before = [kept.clone() for cache in span.pool.blocks for kept in cache.tensors]
        out = span.step(torch.randn(1, 96), [Segment(lease, lease.length, 1)])
        assert out.isfinite().all()
        written = lease.slots(lease.length - 1, lease.length)
        for kept, was in zip((k for cache in span.pool.blocks for k in cache.tensors), before, strict=True):
            changed = (kept != was).any(dim=-1).any(dim=1)[0].nonzero()[:, 0]
            assert changed.tolist() == written.tolist()


def test_a_session_in_scattered_pages_is_computed_by_blocks() -> None:
    results = []
    for each in _spans("plain"):
        torch.manual_seed(1)
        lease, between = each.open(64), each.open(64)
        each.step(torch.randn(64, 96), [Segment(lease, 0, 64)])
        results.append(torch.cat([each.step(torch.randn(1, 96), [Segment(lease, 64 + i, 1)]) for i in range(3)]))
        assert lease.first_slot is None
        between.close()
    assert (results[0] - results[1]).norm() <= 0.03 * results[1].norm()


@pytest.mark.parametrize(("case", "cache"), [("window", "own"), ("plain", "int8")])
def test_windows_and_caches_in_8_bits_are_computed_by_blocks(case: str, cache: CacheFormat) -> None:
    span = random_span(CONFIGS[case], quantisation="int4")
    other = SpanRunner(span.config, 0, span.blocks, replace(span.options, cache=cache))
    assert other._session_graph is None
    assert other.step(torch.randn(1, 96), [Segment(other.open(4), 0, 1)]).isfinite().all()


def test_blocks_that_cannot_be_one_graph_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this machine")

    monkeypatch.setattr("engine.model.span.SessionGraph", fails)
    span = random_span(CONFIGS["plain"], quantisation="int4")
    assert span._session_graph is None
    assert span.step(torch.randn(1, 96), [Segment(span.open(4), 0, 1)]).isfinite().all()


def test_a_graphs_threads_are_on_other_cores_than_a_thread_that_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda thread: {3}, raising=False)
    monkeypatch.setenv("OMP_PLACES", "{3},{0},{12}")
    assert onnx_graph._other_cores() == [0, 12]
    monkeypatch.setattr("os.sched_getaffinity", lambda thread: {0, 3}, raising=False)
    assert onnx_graph._other_cores() == []  # the system chooses


def test_a_span_that_grew_or_shrank_is_one_graph_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, VARIANT["llama"], "Q8_0")
    source = open_gguf(path)
    options = SpanOptions(torch.device("cpu"), torch.float32, "stored", kv_bytes=1 << 22, room=2)
    span, whole = load_span(source, 0, 1, options), load_span(source, 0, 2, options)
    assert span._session_graph is None
    span.grow(source)
    x = torch.randn(1, source.config.hidden_size)
    found, expected = (each.step(x, [Segment(each.open(4), 0, 1)]) for each in (span, whole))
    assert torch.equal(found, expected)
    span.keep(1, 2)
    alone = load_span(source, 1, 2, replace(options, room=0))
    found, expected = (each.step(x, [Segment(each.open(4), 0, 1)]) for each in (span, alone))
    assert torch.equal(found, expected)


FILES = [
    ("llama", "Q8_0"), ("llama", "Q4_0"), ("llama-biases", "Q4_1"), ("llama-mqa", "Q5_0"), ("mistral", "Q5_1"),
    ("qwen2", "Q8_0"), ("qwen3", "Q4_0"), ("wide", "Q4_K"), ("wide", "Q5_K"), ("wide", "Q6_K"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_every_family_and_type_computes_what_its_decoded_file_computes(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, WIDE_FILE if name == "wide" else VARIANT[name], kind)
    source = open_gguf(path)
    options = SpanOptions(torch.device("cpu"), torch.float32, kv_bytes=1 << 22)
    plain = load_span(source, 0, source.config.n_blocks, options)
    ours = load_span(source, 0, source.config.n_blocks, replace(options, quantisation="stored"))
    assert len(ours._cpu_graphs) == source.config.n_blocks
    x = torch.randn(12, source.config.hidden_size, generator=torch.Generator().manual_seed(1))
    for rows, allowed in ((1, 1e-4), (10**6, 0.08)):
        for module in ("onnx_graph", "onnx_block", "onnx_session"):
            monkeypatch.setattr(f"engine.model.{module}.many_rows", lambda rows=rows: rows)
        found, expected = (span.step(x, [Segment(span.open(12), 0, 12)]) for span in (ours, plain))
        assert (found - expected).norm() <= allowed * expected.norm()


def test_blocks_that_go_take_their_graphs_along() -> None:
    span = random_span(CONFIGS["plain"], quantisation="int4")
    whole = span.weight_bytes
    span.keep(1, 2)
    assert len(span._cpu_graphs) == 1
    assert span.step(torch.randn(1, 96), [Segment(span.open(4), 0, 1)]).isfinite().all()
    assert span.weight_bytes == whole // 2


def test_a_span_is_measured_while_another_thread_loads_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    span = random_span(CONFIGS["plain"], quantisation="int4")
    whole = span.weight_bytes
    span._cpu_graphs.keep(0, 1)
    nbytes = vars(BlockGraphs)["nbytes"].fget

    def loaded_meanwhile(graphs: BlockGraphs) -> int:
        if len(span._cpu_graphs) == 1:
            span._cpu_graphs.add(span.blocks[1])
        return int(nbytes(graphs))

    monkeypatch.setattr(BlockGraphs, "nbytes", property(loaded_meanwhile))
    assert span.weight_bytes < whole, "the block that came meanwhile is in the next measurement"
    assert span.weight_bytes == whole


def test_graphs_take_no_more_memory_than_the_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.onnx_block.many_rows", lambda: 32)
    span = random_span(CONFIGS["plain"], quantisation="int4")
    for rows in (1, 40):  # both ways to multiply
        span.step(torch.randn(rows, 96), [Segment(span.open(64), 0, rows)])
    assert span.weight_bytes <= 2 * block_bytes(span.config, grid_weights(INT4_BYTES, 4, on_cpu=True))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_graphs_need_the_memory_of_one_for_what_they_compute() -> None:
    grid, rows = quantise(torch.randn(4096, 64)), torch.randn(1000, 64)
    products = [GridProduct(grid) for _ in range(12)]
    products[0](rows)
    before = resident_bytes()
    for product in products:
        product(rows)
    assert resident_bytes() - before < 4 * 4 * 1000 * 4096


@pytest.mark.parametrize("quantisation", ["none", "int8", "stored"])
def test_other_blocks_have_no_graphs(quantisation: Quantisation) -> None:
    assert not random_span(CONFIGS["plain"], quantisation=quantisation)._cpu_graphs


def test_without_the_runtime_torch_computes_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _spans("plain")[1]
    torch.manual_seed(0)
    monkeypatch.setattr("engine.model.onnx_block.runtime", lambda: None)
    monkeypatch.setattr("engine.model.linear.runtime", lambda: None)
    span = random_span(CONFIGS["plain"], quantisation="int4")
    assert not span._cpu_graphs
    x = torch.randn(2, 96)
    found, expected = (each.step(x, [Segment(each.open(4), 0, 2)]) for each in (span, plain))
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_runtime_that_fails_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this machine")

    monkeypatch.setattr(onnx_graph, "product_graph", fails)
    onnx_graph.grid_gain.cache_clear()
    try:
        assert not onnx_graph.grids_pay()
    finally:
        onnx_graph.grid_gain.cache_clear()
