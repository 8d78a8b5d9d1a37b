"""Matrices in the grid of their file: the same numbers as decoded ones, fewer bytes, and products with them."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import torch

from engine.errors import SourceError
from engine.model.grid_tiles import fits_tiles, padded_share, tiled
from engine.model.linear import GridLinear
from engine.sources import grid as grid_module
from engine.sources.base import BLOCK_ROLES, ModelSource, block_part
from engine.sources.dequant import dequantise
from engine.sources.gguf import open_gguf
from engine.sources.grid import GRID_KINDS, Grid, decode_grid, grid_bytes_per_weight, join, pack, quantise, row_slices
from engine.sources.layout import KIND_SIZES, PACKED_GROUPS
from engine.sources.tensors import PartReader, load_part
from tests.engine.gguf_models import write_gguf
from tests.engine.models import VARIANT
from tests.engine.random_spans import small_config

ROWS, COLUMNS = 48, 512
_FACTORS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block has its float16 numbers


def raw_matrix(kind: str) -> torch.Tensor:
    """Bytes of a random matrix of a type; those of types that `gguf` cannot write have random integers."""
    elements, size = KIND_SIZES[kind]
    if kind not in _FACTORS:
        values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
        number: Any = gguf.GGMLQuantizationType[kind]
        return torch.from_numpy(gguf.quantize(values, number).copy()).view(-1)
    random = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (ROWS * COLUMNS // elements, size), dtype=torch.uint8, generator=random)
    for place in _FACTORS[kind]:
        factor = torch.rand(raw.shape[0], 1, generator=random).half() / 64
        raw[:, place : place + 2] = factor.view(torch.uint8)
    return raw.view(-1)


def random_grid(kind: str) -> Grid:
    return decode_grid(raw_matrix(kind), kind, (ROWS, COLUMNS))


@pytest.mark.parametrize("kind", sorted(GRID_KINDS - PACKED_GROUPS.keys()))
def test_a_grid_has_the_very_numbers_of_its_file(kind: str) -> None:
    grid = random_grid(kind)
    expected = dequantise(raw_matrix(kind), kind, torch.float32).view(ROWS, COLUMNS)
    assert torch.equal(grid.dense(torch.float32), expected)
    assert grid.nbytes == grid_bytes_per_weight(kind) * ROWS * COLUMNS < expected.nbytes / 3
    assert torch.equal(grid.rows(slice(3, 9)).dense(torch.float32), expected[3:9])
    tiles = tiled(grid)
    assert torch.equal(tiles.dense(torch.float32), expected)
    assert torch.equal(tiles.rows(slice(16, 48)).dense(torch.float32), expected[16:48])
    assert tiles.nbytes == grid.nbytes


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 16)])
@pytest.mark.parametrize("columns", [128, 384, 576, 64])
def test_tiles_have_the_numbers_of_their_grid(bits: Literal[4, 8], group: int, columns: int) -> None:
    if columns % group:
        pytest.skip("a row consists of whole groups")
    random = torch.Generator().manual_seed(columns)
    integers = torch.randint(0, 256, (32, columns * bits // 8), dtype=torch.uint8, generator=random)
    scale, minimum = (torch.rand(32, columns // group, generator=random) for _ in range(2))
    for minima in (None, minimum):
        grid = Grid(bits, group, 8, integers, scale, minima)
        assert fits_tiles(grid)
        assert torch.equal(tiled(grid).dense(torch.float32), grid.dense(torch.float32))


def test_a_thread_of_a_tensor_core_has_its_integers_side_by_side() -> None:
    integers = torch.randint(0, 16, (32, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = tiled(Grid(4, 32, 8, pack(integers), torch.ones(32, 8), None)).integers
    tile, chunk, half, row, thread, part = 1, 1, 0, 5, 2, 3
    word = int(words[tile, chunk, half, row, thread, part]) & 0xFFFFFFFF
    first = 128 * chunk + 32 * part + 8 * thread  # of the eight columns that the thread multiplies in one part
    own = integers[16 * tile + 8 * half + row, first : first + 8].tolist()
    assert [(word >> shift) & 15 for shift in (0, 16, 4, 20, 8, 24, 12, 28)] == own


@pytest.mark.parametrize(("hidden", "inner"), [(576, 1536), (4096, 14336), (960, 2560), (128, 96)])
def test_padding_is_counted(hidden: int, inner: int) -> None:
    config = small_config(hidden_size=hidden, intermediate_size=inner, n_heads=8, n_kv_heads=2, head_dim=32)
    shapes = [(256 + 128, hidden), (hidden, 256), (2 * inner, hidden), (hidden, inner)]
    grids = [Grid(4, 32, 8, torch.zeros(n, k // 2, dtype=torch.uint8), torch.ones(n, k // 32), None) for n, k in shapes]
    held = sum(tiled(grid).nbytes for grid in grids) / sum(grid.nbytes for grid in grids)
    assert padded_share(config) == pytest.approx(held)


def test_large_matrices_are_rounded_and_put_into_tiles_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
    at_once = quantise(weight)
    in_tiles = tiled(at_once)
    monkeypatch.setattr(grid_module, "_SLICE_ELEMENTS", 40 * 256)
    assert row_slices(*weight.shape) == [slice(0, 32), slice(32, 64), slice(64, 96)]
    by_parts = quantise(weight)
    assert by_parts.shape == at_once.shape
    assert torch.equal(by_parts.dense(torch.float32), at_once.dense(torch.float32))
    tiles = tiled(by_parts)
    assert tiles.shape == in_tiles.shape
    assert torch.equal(tiles.integers, in_tiles.integers)
    assert torch.equal(tiles.dense(torch.float32), in_tiles.dense(torch.float32))


def test_rows_that_are_no_whole_tiles_stay_as_they_are() -> None:
    assert not fits_tiles(Grid(4, 32, 8, torch.zeros(24, 64, dtype=torch.uint8), torch.ones(24, 4), None))


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q4_0", "Q4_1"), ("Q8_0", "Q6_K")])
def test_unlike_grids_are_joined_without_rounding_again(kinds: tuple[str, ...]) -> None:
    expected = torch.cat([random_grid(kind).dense(torch.float32) for kind in kinds])
    found = join([random_grid(kind) for kind in kinds]).dense(torch.float32)
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_grids_of_one_form_are_joined_as_they_are() -> None:
    one = random_grid("Q4_0")
    assert torch.equal(join([one, one]).dense(torch.float32), torch.cat([one.dense(torch.float32)] * 2))
    assert join([one, one]).nbytes == 2 * one.nbytes


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e4])
def test_four_bits_are_off_by_half_a_step_at_most(scale: float) -> None:
    weight = scale * torch.randn(8, 96, generator=torch.Generator().manual_seed(2))
    groups = weight.view(8, -1, 32)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    off = (quantise(weight).dense(torch.float32).view_as(groups) - groups).abs().amax(-1)
    rounding = 2e-3 * groups.abs().amax(-1) + 1e-7  # of scale and minimum to float16
    assert bool((off <= 0.5 * step + rounding).all())


def test_a_constant_matrix_survives_four_bits() -> None:
    weight = torch.full((2, 64), -0.25)
    assert torch.equal(quantise(weight).dense(torch.float32), weight)


def test_no_more_than_one_part_of_a_matrix_is_held_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.linear.CONVERTED_ROWS", 16)
    monkeypatch.setattr("engine.model.linear.runtime", lambda: None)
    linear = GridLinear(random_grid("Q4_1"))
    made: list[weakref.ref[torch.Tensor]] = []
    dense = Grid.dense

    def watched(grid: Grid, dtype: torch.dtype) -> torch.Tensor:
        assert not any(numbers() is not None for numbers in made), "the part before is still held"
        numbers = dense(grid, dtype)
        made.append(weakref.ref(numbers))
        return numbers

    monkeypatch.setattr(Grid, "dense", watched)
    linear(torch.randn(2, COLUMNS))
    linear.input_gradient(torch.randn(2, ROWS))
    assert len(made) == 2 * ROWS // 16


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_products_and_gradients_are_those_of_the_dense_matrix(kind: str) -> None:
    linear = GridLinear(random_grid(kind), torch.randn(ROWS))
    dense = linear.grid.dense(torch.float32)
    x, residual, dy = torch.randn(5, COLUMNS), torch.randn(5, ROWS), torch.randn(5, ROWS)
    expected = residual + torch.nn.functional.linear(x, dense, linear.bias)
    assert torch.allclose(linear(x, residual, training=True), expected, atol=1e-4)
    assert torch.allclose(linear.input_gradient(dy), dy @ dense, atol=1e-4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path = tmp_path_factory.mktemp("grid") / "model.gguf"
    write_gguf(path, VARIANT["llama"], "Q8_0")
    return open_gguf(path)


def test_matrices_of_a_file_are_read_as_grids_in_the_order_of_their_rows(source: ModelSource) -> None:
    reader, dense = PartReader(source, block_part(0)), load_part(source, block_part(0))
    grids = {role: reader.grid(role) for role in reader.shapes}
    matrices = [role for role in BLOCK_ROLES if role in dense and dense[role].ndim == 2]
    assert {role for role, grid in grids.items() if grid is not None} == set(matrices)
    for role in matrices:
        grid = grids[role]
        assert grid is not None
        assert torch.equal(grid.dense(torch.float32), dense[role]), role


def test_a_damaged_file_gives_no_grid(source: ModelSource, tmp_path: Path) -> None:
    whole = source.parts[block_part(1)][1].file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole)
    damaged = open_gguf(cut)
    cut.write_bytes(whole[: len(whole) // 2])
    last = block_part(source.config.n_blocks - 1)
    with pytest.raises(SourceError):
        PartReader(damaged, last).grid("down")
