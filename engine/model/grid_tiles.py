"""Grids in the order in which a GPU's tensor cores take them.

A tensor core multiplies 16 rows of weights at a time, and fixes which thread of a warp holds which of their numbers.
Here the integers of one thread lie side by side, 16 bytes for each chunk of columns, so that a warp reads a tile of 16
rows and one chunk (1 KiB) in whole vectors and multiplies it as it is: no weight passes through shared memory. The
products are in `engine.model.grid_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.sources.grid import Grid, numbers_of, row_slices

TILE_ROWS = 16  # rows of the matrix in a tile


@dataclass(frozen=True)
class TileForm:
    """How the columns of a tile are laid out, which follows from the bits and the group of its grid.

    A chunk of columns consists of `parts`, each with one scale and as long as one or two steps of a tensor core. Of a
    part, each of four threads has `lane` columns, in `words` words of 32 bits.
    """

    bits: Literal[4, 8]
    group: int

    @property
    def part(self) -> int:
        """Columns that are multiplied before a scale is applied."""
        return min(self.group, 32)

    @property
    def lane(self) -> int:
        """Columns of a part in one thread."""
        return self.part // 4

    @property
    def words(self) -> int:
        """Words of a part in one thread."""
        return self.lane * self.bits // 32

    @property
    def parts(self) -> int:
        """Parts of a chunk: a thread has four words of it."""
        return 4 // self.words

    @property
    def chunk(self) -> int:
        """Columns of a chunk."""
        return self.parts * self.part

    @property
    def factors(self) -> int:
        """Scales of one row in a chunk."""
        return self.chunk // self.group


@dataclass(frozen=True)
class TiledGrid:
    """A matrix (out, in) as in `Grid`, in tiles of 16 rows and one chunk of columns; the last chunk may be padded."""

    form: TileForm
    zero: int
    shape: tuple[int, int]
    integers: Tensor  # int32 (tiles, chunks, 2 halves, 8 rows, 4 threads, 4 words)
    scale: Tensor  # (tiles, chunks, 2 halves, 8 rows, factors), float16 or float32
    minimum: Tensor | None  # like `scale`

    @property
    def nbytes(self) -> int:
        """Bytes of integers, scales and minima."""
        return self.integers.nbytes + self.scale.nbytes + (0 if self.minimum is None else self.minimum.nbytes)

    def to(self, device: torch.device) -> TiledGrid:
        """Return the grid on a device."""
        minimum = None if self.minimum is None else self.minimum.to(device)
        return replace(self, integers=self.integers.to(device), scale=self.scale.to(device), minimum=minimum)

    def rows(self, which: slice) -> TiledGrid:
        """Return the grid of some rows; the first must begin a tile, and the last end one."""
        first, last, _ = which.indices(self.shape[0])
        assert first % TILE_ROWS == last % TILE_ROWS == 0, "a tile is not cut"
        tiles = slice(first // TILE_ROWS, last // TILE_ROWS)
        minimum = None if self.minimum is None else self.minimum[tiles]
        shape = (last - first, self.shape[1])
        return replace(self, shape=shape, integers=self.integers[tiles], scale=self.scale[tiles], minimum=minimum)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix as numbers, computed in float32."""
        form, (n_out, n_in) = self.form, self.shape
        tiles, chunks = self.integers.shape[:2]
        halves = self.integers.contiguous().view(torch.uint8).view(-1, 2, 2)
        pairs = halves.transpose(1, 2)  # (words, bytes of a half, 2 halves)
        if form.bits == 4:
            pairs = torch.stack((pairs & 15, pairs >> 4), dim=2)  # (words, 2 bytes, 2 integers, 2 halves)
        columns = pairs.reshape(tiles, chunks, TILE_ROWS, 4, form.parts, form.lane)
        integers = columns.permute(0, 2, 1, 4, 3, 5).reshape(n_out, chunks * form.chunk)[:, :n_in]
        minimum = None if self.minimum is None else self._by_rows(self.minimum)
        return numbers_of(integers, form.group, self.zero, self._by_rows(self.scale), minimum).to(dtype)

    def _by_rows(self, factors: Tensor) -> Tensor:
        """Scales or minima as (out, in / group)."""
        tiles, chunks = factors.shape[:2]
        rows = factors.reshape(tiles, chunks, TILE_ROWS, -1).transpose(1, 2).reshape(self.shape[0], -1)
        return rows[:, : self.shape[1] // self.form.group]


def padded_share(config: ModelConfig) -> float:
    """Return what a block's matrices in tiles take, with their last chunks padded, in proportion to their weights."""
    c, chunk = config, TileForm(4, 32).chunk
    q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    rows = {c.hidden_size: q_size + 2 * kv_size + 2 * c.intermediate_size}  # by their number of columns
    for columns in (q_size, c.intermediate_size):
        rows[columns] = rows.get(columns, 0) + c.hidden_size
    padded = sum(count * -(-columns // chunk) * chunk for columns, count in rows.items())
    return padded / sum(count * columns for columns, count in rows.items())


def fits_tiles(grid: Grid) -> bool:
    """True if a grid can be put into tiles: whole tiles of rows, and groups that are not cut by a chunk."""
    form = TileForm(grid.bits, grid.group)
    return grid.shape[0] % TILE_ROWS == 0 and form.words in (1, 2) and form.chunk % grid.group == 0


def tiled(grid: Grid) -> TiledGrid:
    """Put a grid into tiles: integer i of both halves of a word are two neighbouring columns."""
    assert fits_tiles(grid), "the grid has another form"
    first, *others = (_tiled(grid.rows(rows)) for rows in row_slices(*grid.shape))
    if not others:
        return first
    parts = [first, *others]
    if grid.scale.is_cuda:  # what stays must not lie among what was needed to make it, or memory is lost between them
        torch.cuda.empty_cache()
    minima = [part.minimum for part in parts if part.minimum is not None]
    return replace(
        first,
        shape=grid.shape,
        integers=torch.cat([part.integers for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        minimum=torch.cat(minima) if minima else None,
    )


def _tiled(grid: Grid) -> TiledGrid:
    form, (n_out, n_in) = TileForm(grid.bits, grid.group), grid.shape
    chunks = -(-n_in // form.chunk)
    tiles = n_out // TILE_ROWS
    integers = F.pad(grid.integers(), (0, chunks * form.chunk - n_in))
    # (tiles, chunks, rows, threads, parts, columns of a thread)
    integers = integers.view(tiles, TILE_ROWS, chunks, form.parts, 4, form.lane).permute(0, 2, 1, 4, 3, 5)
    pairs = integers.reshape(-1, 16 // form.bits, 2)  # (words, integers of a half, 2 halves)
    if form.bits == 4:
        pairs = pairs[:, 0::2] | (pairs[:, 1::2] << 4)  # (words, bytes of a half, 2 halves)
    words = pairs.transpose(1, 2).contiguous().view(-1).view(torch.int32)

    def by_tiles(factors: Tensor) -> Tensor:
        whole = F.pad(factors, (0, chunks * form.factors - factors.shape[1]))
        parts = whole.view(tiles, TILE_ROWS, chunks, form.factors).transpose(1, 2)
        return parts.reshape(tiles, chunks, 2, 8, form.factors).contiguous()

    minimum = None if grid.minimum is None else by_tiles(grid.minimum)
    return TiledGrid(form, grid.zero, grid.shape, words.view(tiles, chunks, 2, 8, 4, 4), by_tiles(grid.scale), minimum)
