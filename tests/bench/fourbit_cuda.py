"""Weights of 4 bits on a CUDA device: right results, and the time of a decode step of a Llama-8B-shaped span.

    python -m tests.bench.fourbit_cuda [--json] [--blocks 32] [--context 512] [--steps 100] [--tiles]

`error_*` are products beside those with the weights as numbers, relative to their length. Times are medians by CUDA
events around the public step, host work included, as in `tests.bench.cuda`. `--tiles` also times other tiles of the
product, by replays of a captured graph, as GB/s of weights, to choose from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from engine.model import grid_kernels
from engine.model import triton_kernels as kernels
from engine.model.grid_kernels import ProductTile
from engine.model.grid_tiles import TiledGrid, tiled
from engine.model.kv_cache import Segment
from engine.model.linear import GridLinear
from engine.model.span import SpanRunner
from engine.model.tile_choice import replayed_s
from engine.sources.grid import Grid, quantise
from tests.bench.cuda import bandwidth, by_events, decode_ms, llama_8b
from tests.engine.random_spans import random_span

# (out, in, gated): Llama-8B's products
SHAPES = {"qkv": (6144, 4096, False), "gate_up": (28672, 4096, True), "down": (4096, 14336, False)}
FORMS: dict[str, tuple[Any, ...]] = {"q4_0": (4, 32, 8), "q8_0": (8, 32, 128), "q6_k": (8, 16, 32)}


def random_grid(form: str, n_out: int, n_in: int) -> TiledGrid:
    """A grid with random integers, or one rounded from random numbers."""
    if form == "int4":
        return tiled(quantise(torch.randn(n_out, n_in, device="cuda") * 0.02))
    bits, group, zero = FORMS[form]
    integers = torch.randint(0, 256, (n_out, n_in * bits // 8), device="cuda", dtype=torch.uint8)
    scale = (0.5 + torch.rand(n_out, n_in // group, device="cuda")) / 1024
    return tiled(Grid(bits, group, zero, integers, scale.half() if group == 32 else scale, None))


def multiply(grid: TiledGrid, x: torch.Tensor, out: torch.Tensor, *, gated: bool) -> None:
    """The product as a decode step computes it."""
    kernels.product(x, GridLinear(grid), out, kernels.Fold(gated=gated))


def errors() -> dict[str, float]:
    """The largest relative error of each form over all shapes, and of the conversion for prompts."""
    found: dict[str, float] = {}
    for form, rows in product(("int4", *FORMS), (1, 8, 32)):
        for n_out, n_in, gated in SHAPES.values():
            torch.manual_seed(1)
            grid = random_grid(form, n_out, n_in)
            x = torch.randn(rows, n_in, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(rows, n_out // 2 if gated else n_out, device="cuda", dtype=torch.bfloat16)
            multiply(grid, x, out, gated=gated)
            dense = grid.dense(torch.float32)
            expected = x.float() @ dense.t()
            if gated:
                gate, up = expected.chunk(2, dim=-1)
                expected = torch.nn.functional.silu(gate) * up
            name = f"error_{form}_rows{rows}"
            error = float((out.float() - expected).norm() / expected.norm())
            found[name] = max(found.get(name, 0.0), error)
            converted = (grid_kernels.dense(grid, torch.float32) - dense).norm() / dense.norm()
            found[f"error_{form}_numbers"] = max(found.get(f"error_{form}_numbers", 0.0), float(converted))
    return found


def prefill_ms(span: SpanRunner, rows: int, count: int) -> float:
    """A prompt chunk of one session; each is undone."""
    lease = span.open(rows)
    x = torch.randn(rows, span.config.hidden_size, device="cuda", dtype=span.options.dtype)

    def step() -> None:
        span.step(x, [Segment(lease, 0, rows)])
        lease.length = 0

    milliseconds = by_events(step, count)
    lease.close()
    return milliseconds


def span_figures(blocks: int, context: int, count: int, prefix: str, quantisation: Any) -> dict[str, float]:
    """Step times of a whole span, and its bytes."""
    span = random_span(llama_8b(blocks), "cuda", torch.bfloat16, kv_bytes=4 << 30, quantisation=quantisation)
    figures = {
        f"{prefix}_weights_gb": span.weight_bytes / 1e9,
        f"{prefix}_batch1_ms": decode_ms(span, 1, context, count),
        f"{prefix}_batch8_ms": decode_ms(span, 8, context, count),
        f"{prefix}_prefill256_ms": prefill_ms(span, 256, max(5, count // 10)),
    }
    del span
    torch.cuda.empty_cache()
    return figures


def _rate(grids: list[TiledGrid], rows: int, tile: ProductTile, *, gated: bool) -> float:
    """GB of weights a second, over matrices that do not fit into the cache together."""
    n_out = grids[0].shape[0]
    x = torch.randn(rows, grids[0].shape[1], device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, n_out // 2 if gated else n_out, device="cuda", dtype=torch.bfloat16)

    def all_of_them() -> None:
        for grid in grids:
            grid_kernels.multiply(x, grid, out, None, None, gated=gated, tile=tile)

    return sum(grid.nbytes for grid in grids) / 1e9 / replayed_s(all_of_them, torch.device("cuda"))


def tiles() -> dict[str, dict[str, float]]:
    """GB/s of the best tiles, for each shape and number of rows."""
    found: dict[str, dict[str, float]] = {}
    for shape, (n_out, n_in, gated) in SHAPES.items():
        grids = [random_grid("int4", n_out, n_in) for _ in range(4 if gated else 12)]
        for rows in (1, 8):  # they share what is compiled, which takes a second for each tile
            warps = ((1, 4), (1, 8), (1, 16), (2, 2), (2, 4), (4, 2))
            choices = [(n, *shape, depth) for n in ((2,) if gated else (1, 2)) for shape in warps for depth in (1, 3)]
            rates = {
                str(choice): _tried(partial(_rate, grids, rows, ProductTile(*choice), gated=gated))
                for choice in choices
            }
            best = sorted(rates, key=rates.__getitem__, reverse=True)[:6]
            found[f"{shape}_rows{rows}"] = {tile: round(rates[tile], 1) for tile in best}
    return found


def _tried(rate: Callable[[], float]) -> float:
    try:
        return rate()
    except Exception:  # a tile that needs more shared memory or registers than the card has
        return 0.0


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy_gb_per_s": bandwidth() / 1e9}
    torch.cuda.empty_cache()
    figures |= errors()
    figures |= span_figures(args.blocks, args.context, args.steps, "int4", "int4")
    figures |= span_figures(args.blocks, args.context, args.steps, "bf16", "none")
    figures["int4_batch8_ratio"] = figures["int4_batch8_ms"] / figures["int4_batch1_ms"]
    figures["int4_vs_bf16"] = figures["bf16_batch1_ms"] / figures["int4_batch1_ms"]
    if args.tiles:
        figures["tiles"] = tiles()
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>24}  {value:.4g}" if isinstance(value, float) else f"{name:>24}  {value}")


if __name__ == "__main__":
    main()
