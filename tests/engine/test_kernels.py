"""Captured CUDA steps, fused and plain, against the ordinary step; Triton's interpreter stands in for a missing GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
triton = pytest.importorskip("triton")

from engine.model import grid_kernels  # noqa: E402
from engine.model import triton_kernels as kernels  # noqa: E402
from engine.model.cuda_graphs import BATCHES, SpanParts, fused_step, plain_step  # noqa: E402
from engine.model.grid_tiles import tiled  # noqa: E402
from engine.model.kv_cache import PAGE_TOKENS, BlockCache, Segment, page_table  # noqa: E402
from engine.model.linear import GridLinear  # noqa: E402
from engine.model.span import SpanRunner  # noqa: E402
from engine.model.tile_choice import GATED_TILES, PLAIN_TILES, WORTH, choose_tiles, fastest  # noqa: E402
from engine.model.triton_trials import grids_are_right, int8_cache_is_right  # noqa: E402
from engine.sources.grid import Grid, quantise  # noqa: E402
from tests.engine.random_spans import CASES, random_span, small_config  # noqa: E402


def _grid(bits: Literal[4, 8], group: int, zero: int, factors: torch.dtype, *, minima: bool = False) -> Grid:
    columns = max(96, 3 * group)
    random = torch.Generator().manual_seed(bits + group)
    quantised = torch.randint(0, 256, (96, columns * bits // 8), dtype=torch.uint8, generator=random)
    scale, minimum = (torch.rand(96, columns // group, generator=random).to(factors) / 64 for _ in range(2))
    return Grid(bits, group, zero, quantised, scale, minimum if minima else None)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def _quick_interpreter() -> Iterator[None]:
    """Triton's interpreter patches its language at each call of a function in a kernel; once for each function will do,
    because the kernel has patched it for all of them."""
    if DEVICE == "cuda":
        yield
        return
    from triton.runtime import interpreter

    patched: set[Any] = set()

    def call(function: Any, *args: Any, **options: Any) -> Any:
        if function.fn not in patched:
            patched.add(function.fn)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield


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
        pytest.param("fused", "biases", [3, 70], marks=pytest.mark.soak),
        pytest.param("fused", "qk_norm", [3], marks=pytest.mark.soak),
        ("fused", "window", [130]),
        pytest.param("fused", "int8", [3], marks=pytest.mark.soak),
        ("fused", "int8", [3, 70]),
        *(("plain", case, lengths) for case in sorted(CASES) for lengths in ([130], [3, 130, 64])),
    ],
)
def test_a_captured_step_equals_an_ordinary_one(flavour: str, case: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    span = random_span(CASES[case], DEVICE, quantisation="int8" if case == "int8" else "none")
    assert_same(flavour, span, _sessions(span, lengths, [1] * len(lengths)))


@pytest.mark.parametrize(
    ("flavour", "case", "lengths", "counts"),
    [
        ("fused", "plain", [3, 62], [1, 3]),  # one session with guesses, across the end of a page, and one without
        ("fused", "qk_norm", [5], [2]),
        pytest.param("fused", "window", [9], [2], marks=pytest.mark.soak),
        *(("plain", case, [3, 130, 60], [4, 1, 9]) for case in sorted(CASES)),
    ],
)
def test_guesses_go_along_in_a_captured_step(flavour: str, case: str, lengths: list[int], counts: list[int]) -> None:
    torch.manual_seed(0)
    span = random_span(CASES[case], DEVICE)
    assert_same(flavour, span, _sessions(span, lengths, counts))


@pytest.mark.parametrize(
    ("flavour", "case", "lengths", "counts"),
    [
        pytest.param("fused", "plain", [130], [1], marks=pytest.mark.soak),
        ("fused", "plain", [3, 62], [1, 3]),
        pytest.param("fused", "qk_norm", [5], [2], marks=pytest.mark.soak),
        pytest.param("fused", "window", [70], [1], marks=pytest.mark.soak),
        *(("plain", case, [3, 130, 60], [4, 1, 9]) for case in sorted(CASES)),
    ],
)
def test_a_captured_step_reads_and_writes_a_cache_of_8_bits(
    flavour: str, case: str, lengths: list[int], counts: list[int]
) -> None:
    torch.manual_seed(0)
    span = random_span(CASES[case], DEVICE, cache="int8")
    segments = _sessions(span, lengths, counts)
    # A key that differs in the last bit can be rounded to another multiple.
    assert_same(flavour, span, segments, tolerance=1e-3)
    written = [cache.stored(segments[0].lease.slots(0, segments[0].stop)) for cache in span.pool.blocks]
    assert_same(flavour, span, segments, tolerance=1e-3)
    again = [cache.stored(segments[0].lease.slots(0, segments[0].stop)) for cache in span.pool.blocks]
    assert not torch.equal(written[0][0], again[0][0]), "other rows have other keys"


def test_the_self_test_of_the_cache_of_8_bits_finds_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    assert int8_cache_is_right(torch.device(DEVICE))
    right = kernels.attend

    def wrong(qkv: torch.Tensor, cache: BlockCache, out: torch.Tensor, *others: Any, written: bool) -> None:
        right(qkv, cache, out, *others, written=written)
        out[-1, -1] += 0.1

    monkeypatch.setattr(kernels, "attend", wrong)
    assert not int8_cache_is_right(torch.device(DEVICE))


def assert_same(flavour: str, span: SpanRunner, segments: list[Segment], tolerance: float = 2e-5) -> None:
    for cache in span.pool.blocks:  # slots that nobody wrote are zero, as they are in a CUDA pool
        for kept in cache.tensors:
            seen = [segment.lease.slots(0, segment.start) for segment in segments]
            unseen = torch.ones(kept.shape[2], dtype=torch.bool, device=DEVICE).index_fill_(0, torch.cat(seen), False)
            kept[:, :, unseen] = 0
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
    assert (captured - expected).abs().max() <= tolerance * expected.abs().max()


KINDS = {  # 96 rows, and 3 groups or more
    "4 bits, minima": quantise(torch.randn(96, 96, generator=torch.Generator().manual_seed(3))),
    "4 bits": _grid(4, 32, 8, torch.float16),
    "4 bits, a scale for 64": _grid(4, 64, 8, torch.float16, minima=True),
    "4 bits, a scale for 128": _grid(4, 128, 8, torch.float16, minima=True),
    "4 bits, finer scales": _grid(4, 32, 8, torch.float32, minima=True),
    "8 bits": _grid(8, 32, 128, torch.float16),
    "6 bits": _grid(8, 16, 32, torch.float32),
    "8 bits, minima": _grid(8, 32, 0, torch.float32, minima=True),
}

FOLDS = ("plain", "norm and gate", "bias and residual")


def _products() -> Iterator[Any]:
    """What comes before and after a product does not depend on the grid: kinds of 4 and of 8 bits have it each time."""
    for kind, fold, rows in product(sorted(KINDS), FOLDS, (1, 11, 50)):
        usual = (1, 11) if fold == "plain" else (11,) if kind in ("4 bits, minima", "8 bits") else ()
        yield pytest.param(kind, fold, rows, marks=() if rows in usual else pytest.mark.soak)


@pytest.mark.parametrize(("kind", "fold", "rows"), _products())
def test_a_product_with_a_grid_is_that_with_its_numbers(kind: str, rows: int, fold: str) -> None:
    torch.manual_seed(0)
    grid = tiled(KINDS[kind]).to(torch.device(DEVICE))
    n_in = grid.shape[1]
    gated, extra = fold == "norm and gate", fold == "bias and residual"
    n_out = 48 if gated else 96
    x, bias = torch.randn(rows, n_in, device=DEVICE), torch.randn(96, device=DEVICE) if extra else None
    norm = torch.rand(n_in, device=DEVICE) + 0.5 if gated else None
    residual = torch.randn(rows, n_out, device=DEVICE) if extra else None
    out = torch.empty(rows, n_out, device=DEVICE)
    kernels.product(x, GridLinear(grid, bias), out, kernels.Fold(norm, 1e-5, gated, residual))
    normed = x if norm is None else torch.nn.functional.rms_norm(x, (n_in,), norm, 1e-5)
    expected = torch.nn.functional.linear(normed, grid.dense(torch.float32), bias)
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    expected = expected if residual is None else expected + residual
    assert (out - expected).abs().max() <= 2e-5 * expected.abs().max()


_NO_BFLOAT16 = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies bfloat16 as integers")


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=_NO_BFLOAT16)])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rows_of_16_bits_give_the_same_product(kind: str, dtype: torch.dtype) -> None:
    grid = tiled(KINDS[kind]).to(torch.device(DEVICE))
    x = torch.randn(2, grid.shape[1], generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    out = torch.empty(2, 96, device=DEVICE)
    kernels.product(x, GridLinear(grid), out, kernels.Fold())
    expected = x.float() @ grid.dense(torch.float32).t()  # integers and rows are exact, so that sums are too
    assert (out - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("tile", [(1, 1, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (2, 2, 1)])
def test_any_tile_gives_the_same_product(tile: tuple[int, int, int]) -> None:
    grid = tiled(KINDS["4 bits, minima"]).to(torch.device(DEVICE))
    x, out = torch.randn(3, 96, device=DEVICE), torch.empty(3, 96, device=DEVICE)
    grid_kernels.multiply(x, grid, out, None, None, gated=False, tile=grid_kernels.ProductTile(*tile))
    expected = x @ grid.dense(torch.float32).t()
    assert (out - expected).abs().max() <= 2e-5 * expected.abs().max()


class _FakeTimer:
    """Runs each tile, and says that it took what the test wants; the tiles come in the order of the module's table."""

    def __init__(self, *seconds: float, fails_at: int = -1, computes: bool = True) -> None:
        self._seconds, self._fails_at, self._computes, self.runs = seconds, fails_at, computes, 0

    def __call__(self, run: Any, device: torch.device) -> float:
        self.runs += 1
        if self.runs - 1 == self._fails_at:
            raise RuntimeError("out of resource: shared memory")
        if self._computes:
            run()
        return self._seconds[self.runs - 1] if self.runs <= len(self._seconds) else 1.0


def _wide() -> Any:
    """A matrix whose rows are long enough for every tile of the table."""
    generator = torch.Generator().manual_seed(0)
    return tiled(quantise(torch.randn(32, 8192, generator=generator))).to(torch.device(DEVICE))


def _span_in_tiles() -> SpanRunner:
    """Blocks as they are built for CUDA."""
    span = random_span(small_config(hidden_size=64, intermediate_size=96), DEVICE, quantisation="int4")
    for block in span.blocks:
        for linear in block.linears:
            assert isinstance(linear, GridLinear)
            linear.grid = tiled(linear.grid) if isinstance(linear.grid, Grid) else linear.grid
    return span


@pytest.mark.parametrize(
    ("seconds", "place"),
    [
        ((1.0, 2.0, 0.9), 1),
        pytest.param((1.0, 0.98, 0.99), None, marks=pytest.mark.soak),
        pytest.param((1.0, WORTH, 1.0), None, marks=pytest.mark.soak),
    ],
)
def test_the_fastest_tile_is_taken_if_it_is_worth_it(seconds: tuple[float, ...], place: int | None) -> None:
    grid, timer = _wide(), _FakeTimer(*seconds)
    usual = grid_kernels.product_tile(torch.device(DEVICE), grid_kernels.FEW_ROWS, 8192, gated=False)
    expected = usual if place is None else grid_kernels.ProductTile(*PLAIN_TILES[place])
    product = grid_kernels.product_of(torch.float16, grid, gated=False)
    assert fastest(product, [grid, grid], timer) == expected
    assert timer.runs == 1 + len(PLAIN_TILES)


def test_a_tile_that_fails_or_has_another_result_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, timer = _wide(), _FakeTimer(1.0, 0.1, 0.2, 0.9, fails_at=1)
    real, wrong = grid_kernels.multiply, grid_kernels.ProductTile(*GATED_TILES[1])

    def multiply(x: Any, grid: Any, out: torch.Tensor, *rest: Any, **options: Any) -> None:
        real(x, grid, out, *rest, **options)
        if options["tile"] == wrong:
            out.mul_(1.1)

    monkeypatch.setattr(grid_kernels, "multiply", multiply)
    product = grid_kernels.product_of(torch.float16, grid, gated=True)
    assert fastest(product, [grid], timer) == grid_kernels.ProductTile(*GATED_TILES[2])


def test_tiles_are_measured_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_kernels, "chosen_tiles", {})
    blocks = _span_in_tiles().blocks
    file, timer = tmp_path / "kernels" / "tiles.json", _FakeTimer(computes=False)
    choose_tiles(blocks, torch.float16, timer, file)
    chosen, runs = dict(grid_kernels.chosen_tiles), timer.runs
    assert runs
    assert file.is_file()
    choose_tiles(blocks, torch.float16, timer, file)  # they are known
    grid_kernels.chosen_tiles.clear()
    choose_tiles(blocks, torch.float16, timer, file)  # a later start
    assert timer.runs == runs
    assert grid_kernels.chosen_tiles == chosen


@pytest.mark.parametrize("damage", ["{", "[]", '{"NAME": [0, 1, 1, 1, null]}', '{"NAME": "tile"}', '{"NAME": [64]}'])
def test_damaged_tiles_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr(grid_kernels, "chosen_tiles", {})
    blocks, file, timer = _span_in_tiles().blocks, tmp_path / "tiles.json", _FakeTimer(computes=False)
    choose_tiles(blocks, torch.float16, timer, file)
    runs, first = timer.runs, next(iter(json.loads(file.read_text())))
    file.write_text(damage.replace("NAME", first))
    grid_kernels.chosen_tiles.clear()
    choose_tiles(blocks, torch.float16, timer, file)
    assert timer.runs > runs
    assert json.loads(file.read_text())[first]


def test_a_card_without_room_to_measure_keeps_the_usual_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that fill a card must not lose their place to a measurement."""
    monkeypatch.setattr(grid_kernels, "chosen_tiles", {})

    def timed(run: Any, device: torch.device) -> float:
        raise torch.OutOfMemoryError

    choose_tiles(_span_in_tiles().blocks, torch.float16, timed, tmp_path / "tiles.json")
    assert not grid_kernels.chosen_tiles
    assert not list(tmp_path.iterdir())


def test_tiles_that_cannot_be_written_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_kernels, "chosen_tiles", {})
    (tmp_path / "file").write_text("")
    blocks = _span_in_tiles().blocks
    choose_tiles(blocks, torch.float16, _FakeTimer(computes=False), tmp_path / "file" / "tiles.json")
    assert grid_kernels.chosen_tiles


def test_kernels_compile_and_weights_are_not_moved_between_threads() -> None:
    """A new Triton may share numbers among threads in another way: results stay right, and products become slow.

    The interpreter takes what the compiler refuses, such as results of different types.
    """
    place = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.compiled_grid"]
    root = Path(__file__).parents[2]
    answer = subprocess.run(command, capture_output=True, text=True, env=place, cwd=root, check=False)
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert figures["products"] >= 16
    assert figures["shuffles"] <= 8  # of the sums at the end
    assert figures["copies"] == 0
    assert figures["vectors"] >= 6  # weights and rows are read 16 bytes at a time
    overlapping = figures["overlapping"]
    assert overlapping["loads_before"] >= 6  # weights of both tiles, before the input is waited for
    assert overlapping["loads_after"] > overlapping["loads_before"]  # those of the next chunk, and the input
    assert overlapping["copies"] == 0
    assert overlapping["products"] == 2 * (4 * 2 * 2 + 4 * 2)  # weights of two tiles, and the input's sums once
    assert figures["attention"]["int8"] == figures["attention"]["own"] > 0  # over a cache of either form


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_grid_becomes_numbers(kind: str) -> None:
    grid = tiled(KINDS[kind]).to(torch.device(DEVICE))
    expected = grid.dense(torch.float32)
    assert (grid_kernels.dense(grid, torch.float32) - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_the_self_test_of_grids_finds_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grids_are_right(torch.device(DEVICE))
    right = kernels.product

    def wrong(x: torch.Tensor, linear: GridLinear, out: torch.Tensor, fold: kernels.Fold) -> None:
        right(x, linear, out, fold)
        out[-1, -1] += 1

    monkeypatch.setattr(kernels, "product", wrong)
    assert not grids_are_right(torch.device(DEVICE))


@pytest.mark.parametrize("lengths", [pytest.param([3], marks=pytest.mark.soak), [3, 70]])
def test_a_captured_step_of_four_bits_equals_an_ordinary_one(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.onnx_block.runtime", lambda: None)  # which would round the rows
    monkeypatch.setattr("engine.model.linear.runtime", lambda: None)
    torch.manual_seed(0)
    span = _span_in_tiles()
    assert_same("fused", span, _sessions(span, lengths, [1] * len(lengths)))
