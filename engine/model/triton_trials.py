"""What Triton can do on this machine: each kind of its kernels is tried once and its result compared."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.config import ModelConfig, Rope
from engine.model.block import Block
from engine.model.grid_tiles import tiled
from engine.model.kv_cache import PAGE_TOKENS, KVPool, Segment, page_table
from engine.model.linear import DenseLinear, GridLinear
from engine.sources.grid import quantise

log = logging.getLogger("shoal.engine.graphs")


@functools.cache
def triton_works() -> bool:
    """True if Triton can build and run a kernel on this machine; if not, logs the cause once."""
    return _is_right(products_are_right, "multiply", "decode steps use torch's own operations")


@functools.cache
def triton_grids_work() -> bool:
    """True if Triton's products with weights in a grid are right on this machine; if not, logs the cause once."""
    return triton_works() and _is_right(grids_are_right, "multiply with weights in a grid", "torch converts them")


@functools.cache
def triton_int8_cache_works() -> bool:
    """True if Triton's attention over a cache in 8 bits is right on this machine; if not, logs the cause once."""
    return _is_right(int8_cache_is_right, "read a cache in 8 bits", "decode steps use torch's own operations")


def _is_right(check: Callable[[torch.device], bool], what: str, instead: str) -> bool:
    why = "wrong results"
    try:
        if check(torch.device("cuda")):
            return True
    except Exception as error:  # a compiler that fails, or is missing, can raise almost any exception
        why = str(error)
    log.warning("Triton cannot %s on this machine (%s): %s", what, why, instead)
    return False


def products_are_right(device: torch.device) -> bool:
    """Compare the product of a row of ones."""
    from engine.model import triton_kernels as kernels

    x = torch.ones(1, 64, device=device, dtype=torch.float16)
    out = torch.empty(1, 64, device=device, dtype=torch.float16)
    kernels.product(x, DenseLinear(x.expand(64, 64).contiguous()), out, kernels.Fold())
    return bool((out == 64).all())


def grids_are_right(device: torch.device) -> bool:
    """Compare products of one row and of two, and the conversion, with those of the same numbers."""
    from engine.model import grid_kernels
    from engine.model import triton_kernels as kernels

    generator = torch.Generator().manual_seed(0)
    grid = tiled(quantise(torch.randn(64, 256, generator=generator))).to(device)
    dense = grid.dense(torch.float32)
    right = torch.allclose(grid_kernels.dense(grid, torch.float32), dense, atol=1e-5)
    # As blocks are computed: with rows of 16 bits, whose products tensor cores compute.
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    for dtype in (torch.float16, torch.bfloat16) if has_bfloat16 else (torch.float16,):
        for rows in (1, 2):
            x = torch.randn(rows, 256, generator=generator).to(device, dtype)
            out = torch.empty(rows, 64, device=device)
            kernels.product(x, GridLinear(grid), out, kernels.Fold())
            right = right and torch.allclose(out, x.float() @ dense.t(), atol=1e-2)
    return right


def int8_cache_is_right(device: torch.device) -> bool:
    """Compare attention of one row, and of two that are written first, with torch's over the same cache."""
    from engine.model import triton_kernels as kernels

    config = ModelConfig(
        family="llama", vocab_size=64, hidden_size=64, n_blocks=1, n_heads=4, n_kv_heads=2, head_dim=32,
        intermediate_size=64, context_length=2 * PAGE_TOKENS, norm_eps=1e-5, rope=Rope(),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    norm, linear = torch.ones(64), DenseLinear(torch.zeros(64, 64))
    block = Block(0, norm, linear, linear, None, None, norm, linear, linear)  # attention reads none of its weights
    right = True
    for rows in (1, 2):
        pool = KVPool(config, 1, 1 << 20, device, torch.float16, "int8")
        lease = pool.open(config.context_length)
        past, new = PAGE_TOKENS + 5, torch.randn(rows, 8, 1, 32, generator=generator).to(device, torch.float16)
        cache, old = pool.blocks[0], torch.randn(2, 2, past, 32, generator=generator).to(device, torch.float16)
        cache.write(lease.slots(0, past), old[:1], old[1:])
        where = page_table(rows, 2, [Segment(lease, past, rows)], pool.scratch_page).to(device)
        turns = (torch.full((rows, 16), value, device=device) for value in (1.0, 0.0))  # none
        paged = kernels.PagedRows(where[:, 0].contiguous(), where[:, 1:].contiguous(), *turns)
        out = torch.empty(rows, 4 * 32, device=device, dtype=torch.float16)
        qkv, scratch = new.view(rows, -1), kernels.AttentionScratch(rows, config, device)
        if rows > 1:
            kernels.write(qkv, cache, block, config, paged)
        kernels.attend(qkv, cache, out, block, config, paged, scratch, written=rows > 1)
        q, k, v = new.split((4, 2, 2), dim=1)
        cache.write(lease.slots(past, past + rows), k.transpose(0, 2), v.transpose(0, 2))
        keys, values = cache.read(lease.slots(0, past + rows), torch.float16)
        mask = torch.arange(past + rows, device=device) <= where[:, :1].long()
        expected = F.scaled_dot_product_attention(
            q.transpose(0, 2).float(), keys.float(), values.float(), attn_mask=mask, enable_gqa=True
        )
        right = right and torch.allclose(out.float(), expected.transpose(0, 2).reshape(rows, -1), atol=1e-2)
    return right
