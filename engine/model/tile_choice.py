"""Which tiles multiply with weights in a grid fastest on this card: measured at a first start, kept on disk.

`grid_kernels.product_tile` has the tiles for an H200, and another card may want others. So a few are timed for each
matrix of a block, in steps of up to eight rows, and the fastest is written to a file beside the compiled kernels. Later
starts only read that file. A tile with other results than the usual one, or that does not fit the card, is not taken;
nor is one that is hardly faster, so that equal cards choose alike.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

from engine.model import grid_kernels
from engine.model.block import Block
from engine.model.cuda_graphs import captured
from engine.model.grid_kernels import FEW_ROWS, Product, ProductTile, product_of, product_tile
from engine.model.grid_tiles import TiledGrid
from engine.model.linear import GridLinear
from engine.sources.cache import publish, write_whole

log = logging.getLogger("shoal.engine.graphs")

WORTH = 0.97  # of the usual tile's time, at most, that another one must take
MOST_MATRICES = 16  # that one measurement multiplies with: the card's cache holds no more than a few
REPLAYS = 12
# Beside the usual ones: (tiles, width, splits, stages).
PLAIN_TILES = ((1, 1, 4), (1, 1, 8), (1, 1, 16), (1, 2, 4), (1, 1, 8, 3))
GATED_TILES = ((2, 2, 2), (2, 2, 4), (2, 4, 1), (2, 2, 2, 3))

Run = Callable[[], None]
Timer = Callable[[Run, torch.device], float]  # seconds that a device takes


def replayed_s(run: Run, device: torch.device) -> float:
    """Return the seconds of something on a card, without the host's part."""
    event: Any = torch.cuda.Event
    graph, times = captured(run, device, None), list[float]()
    for _ in range(REPLAYS):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def choose_tiles(
    blocks: Sequence[Block], dtype: torch.dtype, timed: Timer = replayed_s, file: Path | None = None
) -> None:
    """Find the fastest tiles for all matrices of blocks, in the file or by measurement, and use them from now on.

    It takes no memory worth mentioning, because the blocks' own matrices are multiplied: a card may be full of them.
    """
    alike = _alike(blocks, dtype)
    if alike.keys() <= grid_kernels.chosen_tiles.keys():
        return
    file = file or _tiles_file()
    known = _read(file)
    found: dict[str, ProductTile] = {}
    for product, grids in alike.items():
        if product in grid_kernels.chosen_tiles:
            continue
        name = _name(product, grids[0].scale.device)
        tile = known.get(name)
        if tile is None:
            with contextlib.suppress(torch.OutOfMemoryError):  # a later start may have room to measure
                tile = found[name] = fastest(product, grids[:MOST_MATRICES], timed)
        if tile is not None:
            grid_kernels.chosen_tiles[product] = tile
    if found:
        _write(file, known | found)


def _alike(blocks: Sequence[Block], dtype: torch.dtype) -> dict[Product, list[TiledGrid]]:
    """Return the matrices of blocks that are in a grid, by the product that they are used in."""
    found: dict[Product, list[TiledGrid]] = {}
    for linear, gated in ((linear, linear is block.gate_up) for block in blocks for linear in block.linears):
        if isinstance(linear, GridLinear) and isinstance(linear.grid, TiledGrid):
            found.setdefault(product_of(dtype, linear.grid, gated=gated), []).append(linear.grid)
    return found


def fastest(product: Product, grids: Sequence[TiledGrid], timed: Timer) -> ProductTile:
    """Return the tile with which a row is multiplied fastest with these matrices, which are alike."""
    (n_out, n_in), gated, device = product.shape, product.gated, grids[0].scale.device
    x = torch.randn(1, n_in, device=device, dtype=product.dtype)
    out = torch.empty(1, n_out // 2 if gated else n_out, device=device, dtype=product.dtype)

    def multiply_all(tile: ProductTile) -> None:
        for grid in grids:
            grid_kernels.multiply(x, grid, out, None, None, gated=gated, tile=tile)

    usual = product_tile(device, FEW_ROWS, n_in, gated=gated)
    best, best_s = usual, WORTH * timed(lambda: multiply_all(usual), device)
    expected = out.float()
    for shape in GATED_TILES if gated else PLAIN_TILES:
        tile = ProductTile(*shape)
        if tile.splits > 1 and tile.splits * 512 > n_in:
            continue  # a warp would have nothing to add
        try:
            seconds = timed(lambda tile=tile: multiply_all(tile), device)  # type: ignore[misc]
        except Exception as error:  # it needs more registers or shared memory than the card has
            log.debug("%s does not work here: %s", tile, error)
            continue
        is_right = float((out.float() - expected).norm()) <= 0.02 * float(expected.norm())
        if seconds < best_s and is_right:
            best, best_s = tile, seconds
    log.info("the fastest tile for %s is %s", product, best)
    return best


def _name(product: Product, device: torch.device) -> str:
    """The product's name in the file; it changes with the card, the compiler and the kernel."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kernel = str(getattr(grid_kernels._grid_product_kernel, "cache_key", ""))[:16]
    form = f"{product.form.bits} bits by {product.form.group}{' with minima' if product.has_minimum else ''}"
    shape = f"{product.shape[0]}x{product.shape[1]}{' gated' if product.gated else ''}"
    return f"{card}, triton {triton.__version__} {kernel}, {product.dtype}, {form}, {shape}"


def _tiles_file() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache") / "tiles.json"


def _read(file: Path) -> dict[str, ProductTile]:
    """Return the tiles in a file; none if it is missing or damaged, so that they are measured again."""
    try:
        told = json.loads(file.read_text())
        return {name: ProductTile(*numbers) for name, numbers in told.items() if _is_tile(numbers)}
    except (OSError, ValueError, AttributeError):
        return {}


def _is_tile(numbers: Any) -> bool:
    """True for what `_write` writes: a kernel must not be built from anything else."""
    if not isinstance(numbers, list) or len(numbers) != len(ProductTile._fields):
        return False
    *shape, registers = numbers
    return all(type(one) is int and 1 <= one <= 32 for one in shape) and (
        registers is None or (type(registers) is int and 16 <= registers <= 255)
    )


def _write(file: Path, tiles: Mapping[str, ProductTile]) -> None:
    """Replace the file; a disk that is full costs only the time of measuring again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        write_whole(part, json.dumps(tiles, indent=1).encode())
        publish(part, file)
    except OSError as error:
        log.warning("the fastest tiles could not be written to %s: %s", file, error)
