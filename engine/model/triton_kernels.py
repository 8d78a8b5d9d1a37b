"""Triton kernels for a decode step: products with few rows, and attention over the paged cache.

A decode step reads every weight once and computes little, so memory bandwidth is the limit: norms, gates, residuals,
rotations and cache writes are folded into the kernel that touches the data anyway. Kernels that overlap
(`grid_kernels.overlaps`) make steps of weights in a grid faster, and those of 16 bits slower.

Needs Triton and its C compiler; without them `engine.model.cuda_graphs` uses torch's own operations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import ModelConfig
from engine.model import grid_kernels
from engine.model.block import Block
from engine.model.grid_tiles import TiledGrid
from engine.model.kv_cache import PAGE_TOKENS, SMALLEST_SCALE, BlockCache
from engine.model.linear import GridLinear, Int8Linear, Linear

ATTEND_WARPS = 4
MAX_ROWS = 64
TILE_ROWS = 16  # rows of one tensor-core tile; fewer rows are padded to it
MAX_SPLITS = 16  # programs that share one head of one row
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _load_rows(x_ptr, rows, k, K_SIZE: tl.constexpr, ROWS: tl.constexpr):
    r = tl.arange(0, ROWS)
    mask = (r[:, None] < rows) & (k[None, :] < K_SIZE)
    return tl.load(x_ptr + r[:, None] * K_SIZE + k[None, :], mask=mask, other=0.0)


@triton.jit
def _load_weight(w_ptr, n, k, N_SIZE, K_SIZE: tl.constexpr, EVEN: tl.constexpr):
    address = w_ptr + n[:, None].to(tl.int64) * K_SIZE + k[None, :]
    if EVEN:
        return tl.load(address, eviction_policy="evict_first")
    return tl.load(address, mask=(n[:, None] < N_SIZE) & (k[None, :] < K_SIZE), other=0.0)


@triton.jit
def _await_input():
    # Let the kernel after this one begin, and wait until those before it have ended. What they read or wrote may be
    # used only from here on; weights, and what was there before the step began, earlier.
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def _norm_kernel(x_ptr, norm_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    weight = tl.load(norm_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)
    if OVERLAPS:
        _await_input()
    x = tl.load(x_ptr + row * SIZE + k, mask=k < SIZE, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    x *= weight
    tl.store(out_ptr + row * SIZE + k, x.to(out_ptr.dtype.element_ty), mask=k < SIZE)


@triton.jit
def _look_up_kernel(token_ptr, table_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + token * SIZE + k, mask=k < SIZE, other=0.0)
    tl.store(out_ptr + row * SIZE + k, x, mask=k < SIZE)


@triton.jit
def _product_kernel(
    x_ptr, w_ptr, out_ptr, scale_ptr, bias_ptr, residual_ptr, rows, n_out,
    K_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, INT8: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Several rows, padded to whole tensor-core tiles. The norm is not folded in: that would halve the speed.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for k0 in tl.range(0, K_SIZE, BLOCK_K, num_stages=STAGES):
        k = k0 + tl.arange(0, BLOCK_K)
        w = _load_weight(w_ptr, n, k, n_out, K_SIZE, EVEN)
        x = _load_rows(x_ptr, rows, k, K_SIZE, ROWS)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision="ieee")
        if GATED:
            up = _load_weight(w_ptr + n_out.to(tl.int64) * K_SIZE, n, k, n_out, K_SIZE, EVEN)
            acc_up = tl.dot(x, tl.trans(up.to(x.dtype)), acc_up, input_precision="ieee")
    if INT8:
        acc *= tl.load(scale_ptr + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up *= tl.load(scale_ptr + n_out + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias_ptr + n_out + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    where = r[:, None] * n_out + n[None, :]
    mask = (r[:, None] < rows) & (n[None, :] < n_out)
    if RESIDUAL:
        acc += tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _vector_kernel(
    x_ptr, w_ptr, out_ptr, norm_ptr, scale_ptr, bias_ptr, residual_ptr, n_out, eps,
    K_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, INT8: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    # One row needs no tensor core: multiply elementwise and reduce once at the end.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    squares = tl.zeros([BLOCK_K], dtype=tl.float32)
    k = tl.arange(0, BLOCK_K)
    # Each tile is loaded one iteration before its use.
    w = _load_weight(w_ptr, n, k, n_out, K_SIZE, EVEN)
    up_ptr = w_ptr + n_out.to(tl.int64) * K_SIZE
    if GATED:
        up = _load_weight(up_ptr, n, k, n_out, K_SIZE, EVEN)
    for k0 in range(0, K_SIZE, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < K_SIZE, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + k, mask=k < K_SIZE, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += up.to(tl.float32) * x[None, :]
        following = k + BLOCK_K
        more = (n[:, None] < n_out) & (following[None, :] < K_SIZE)
        offset = n[:, None].to(tl.int64) * K_SIZE + following[None, :]
        w = tl.load(w_ptr + offset, mask=more, other=0.0, eviction_policy="evict_first")
        if GATED:
            up = tl.load(up_ptr + offset, mask=more, other=0.0, eviction_policy="evict_first")
    total = tl.sum(acc, axis=1)
    total_up = tl.sum(acc_up, axis=1)
    if INT8:
        total *= tl.load(scale_ptr + n, mask=n < n_out, other=0.0).to(tl.float32)
        if GATED:
            total_up *= tl.load(scale_ptr + n_out + n, mask=n < n_out, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K_SIZE + eps)
        total *= rstd
        total_up *= rstd
    if BIAS:
        total += tl.load(bias_ptr + n, mask=n < n_out, other=0.0).to(tl.float32)
        if GATED:
            total_up += tl.load(bias_ptr + n_out + n, mask=n < n_out, other=0.0).to(tl.float32)
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    if RESIDUAL:
        total += tl.load(residual_ptr + n, mask=n < n_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=n < n_out)


@triton.jit
def _normed(low, high, norm_ptr, dims, eps, HALF: tl.constexpr):
    rstd = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)[:, None]
    weight_low = tl.load(norm_ptr + dims).to(tl.float32)[None, :]
    weight_high = tl.load(norm_ptr + HALF + dims).to(tl.float32)[None, :]
    return low * rstd * weight_low, high * rstd * weight_high


@triton.jit
def _new_key(
    qkv_row, kv_head, cos, sin, k_norm_ptr, eps, HEADS: tl.constexpr, HALF: tl.constexpr, QK_NORM: tl.constexpr
):
    dims = tl.arange(0, HALF)
    k_at = qkv_row + (HEADS + kv_head) * 2 * HALF + dims[None, :]
    k_low, k_high = tl.load(k_at).to(tl.float32), tl.load(k_at + HALF).to(tl.float32)
    if QK_NORM:
        k_low, k_high = _normed(k_low, k_high, k_norm_ptr, dims, eps, HALF)
    return k_low * cos - k_high * sin, k_high * cos + k_low * sin


@triton.jit
def _rounded(x, scale):
    # To the nearest whole multiple, and halves to the even one, as torch does: float32 has no digits from 2**23 on.
    return (x / scale + 12582912.0) - 12582912.0


@triton.jit
def _multiples(low, high, value, INT8: tl.constexpr):
    # A new key and value as the cache keeps them, and the scale of each, (1, 1); numbers have no scales.
    if INT8:
        key_largest = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))[:, None]
        value_largest = tl.max(tl.abs(value), axis=1)[:, None]
        key_scale = tl.maximum(key_largest / 127.0, _SMALLEST)
        value_scale = tl.maximum(value_largest / 127.0, _SMALLEST)
        low, high, value = _rounded(low, key_scale), _rounded(high, key_scale), _rounded(value, value_scale)
        return low, high, value, key_scale, value_scale
    else:  # what follows a return is compiled too, and would have to be of the same types
        return low, high, value, low, value


@triton.jit
def _cached(at, scale_at, mask, INT8: tl.constexpr):
    # Cached keys or values (tokens, dims) as numbers.
    stored = tl.load(at, mask=mask, other=0.0)
    if INT8:
        return stored.to(tl.float32) * tl.load(scale_at, mask=mask, other=0.0)
    else:
        return stored


@triton.jit
def _store_new(
    keys, values, key_scales, value_scales, slot, low, high, value, key_scale, value_scale,
    HALF: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    # With INT8, the numbers are whole multiples of the scales, each (1, 1).
    at = slot * 2 * HALF
    dims = tl.arange(0, HALF)[None, :]
    dtype = keys.dtype.element_ty
    tl.store(keys + at + dims, low.to(dtype))
    tl.store(keys + at + HALF + dims, high.to(dtype))
    tl.store(values + at + tl.arange(0, 2 * HALF)[None, :], value.to(dtype))
    if INT8:
        one = tl.arange(0, 1)[:, None]
        tl.store(key_scales + slot + one, key_scale)
        tl.store(value_scales + slot + one, value_scale)


@triton.jit
def _write_kernel(
    qkv_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, pages_ptr, position_ptr, cos_ptr, sin_ptr,
    k_norm_ptr, eps, slots, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, QK_NORM: tl.constexpr,
    INT8: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    # One program writes the new key and value of one row and one kv head.
    if OVERLAPS:
        _await_input()
    row, kv_head = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_ptr + row)
    dims = tl.arange(0, HALF)
    head_dim: tl.constexpr = 2 * HALF
    qkv_row = qkv_ptr + row * (HEADS + 2 * KV_HEADS) * head_dim
    cos = tl.load(cos_ptr + row * HALF + dims)[None, :]
    sin = tl.load(sin_ptr + row * HALF + dims)[None, :]
    low, high = _new_key(qkv_row, kv_head, cos, sin, k_norm_ptr, eps, HEADS, HALF, QK_NORM)
    v_at = qkv_row + (HEADS + KV_HEADS + kv_head) * head_dim + tl.arange(0, head_dim)[None, :]
    low, high, value, key_scale, value_scale = _multiples(low, high, tl.load(v_at).to(tl.float32), INT8)
    page = tl.load(pages_ptr + row * max_pages + position // PAGE).to(tl.int64)
    head = kv_head.to(tl.int64) * slots
    _store_new(
        keys_ptr + head * head_dim, values_ptr + head * head_dim, key_scales_ptr + head, value_scales_ptr + head,
        page * PAGE + position % PAGE, low, high, value, key_scale, value_scale, HALF, INT8,
    )  # fmt: skip


@triton.jit
def _attend_kernel(
    qkv_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, out_ptr, partial_ptr, stats_ptr, counter_ptr,
    pages_ptr, position_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, scale, slots, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, QK_NORM: tl.constexpr, WRITTEN: tl.constexpr, INT8: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    # One program handles one row, one kv head with its group of query heads, and one part of the pages.
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(position_ptr + row)
    oldest = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
    first_page = oldest // PAGE
    n_pages = position // PAGE + 1 - first_page
    split_pages = (n_pages + SPLITS - 1) // SPLITS  # the row's own length decides, so any batch gives it the same sums
    n_splits = (n_pages + split_pages - 1) // split_pages
    if split >= n_splits:
        return
    group_size: tl.constexpr = HEADS // KV_HEADS
    g = tl.arange(0, GROUP)
    dims = tl.arange(0, HALF)
    head_dim: tl.constexpr = 2 * HALF
    in_group = g < group_size
    qkv_row = qkv_ptr + row * (HEADS + 2 * KV_HEADS) * head_dim
    cos = tl.load(cos_ptr + row * HALF + dims)[None, :]
    sin = tl.load(sin_ptr + row * HALF + dims)[None, :]
    if OVERLAPS:
        _await_input()

    q_at = qkv_row + (kv_head * group_size + g)[:, None] * head_dim + dims[None, :]
    q_low = tl.load(q_at, mask=in_group[:, None], other=0.0).to(tl.float32)
    q_high = tl.load(q_at + HALF, mask=in_group[:, None], other=0.0).to(tl.float32)
    if QK_NORM:
        q_low, q_high = _normed(q_low, q_high, q_norm_ptr, dims, eps, HALF)
    dtype = qkv_ptr.dtype.element_ty
    new_low, new_high = _new_key(qkv_row, kv_head, cos, sin, k_norm_ptr, eps, HEADS, HALF, QK_NORM)
    v_at = qkv_row + (HEADS + KV_HEADS + kv_head) * head_dim + tl.arange(0, head_dim)[None, :]
    new_v = tl.load(v_at).to(tl.float32)
    new_low, new_high, new_v, key_scale, value_scale = _multiples(new_low, new_high, new_v, INT8)
    q_low_rotated, q_high_rotated = (q_low * cos - q_high * sin).to(dtype), (q_high * cos + q_low * sin).to(dtype)

    head = kv_head.to(tl.int64) * slots
    keys, values = keys_ptr + head * head_dim, values_ptr + head * head_dim
    key_scales, value_scales = key_scales_ptr + head, value_scales_ptr + head
    if not WRITTEN:
        if split == n_splits - 1:
            page = tl.load(pages_ptr + row * max_pages + position // PAGE).to(tl.int64)
            _store_new(
                keys, values, key_scales, value_scales, page * PAGE + position % PAGE,
                new_low, new_high, new_v, key_scale, value_scale, HALF, INT8,
            )  # fmt: skip
    if INT8:  # as they are read back later
        new_low, new_high, new_v = new_low * key_scale, new_high * key_scale, new_v * value_scale
    new_low, new_high, new_v = new_low.to(dtype), new_high.to(dtype), new_v.to(dtype)

    best = tl.full([GROUP], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP], dtype=tl.float32)
    acc = tl.zeros([GROUP, head_dim], dtype=tl.float32)
    begin = first_page + split * split_pages
    for index in range(begin, tl.minimum(begin + split_pages, position // PAGE + 1)):
        page = tl.load(pages_ptr + row * max_pages + index).to(tl.int64)
        t = tl.arange(0, PAGE)
        at = index * PAGE + t
        is_new = (at == position)[:, None]
        # The newest token's key and value come from registers: their store may not be visible yet.
        old = (at < position)[:, None]
        slot = (page * PAGE + t)[:, None]
        key_at = keys + slot * head_dim + dims[None, :]
        key_low = tl.where(is_new, new_low, _cached(key_at, key_scales + slot, old, INT8).to(dtype))
        key_high = tl.where(is_new, new_high, _cached(key_at + HALF, key_scales + slot, old, INT8).to(dtype))
        value_at = values + slot * head_dim + tl.arange(0, head_dim)[None, :]
        value = tl.where(is_new, new_v, _cached(value_at, value_scales + slot, old, INT8).to(dtype))
        scores = tl.dot(q_low_rotated, tl.trans(key_low), input_precision="ieee")
        scores = tl.dot(q_high_rotated, tl.trans(key_high), scores, input_precision="ieee") * scale
        visible = at <= position
        if WINDOW:
            visible = visible & (at >= oldest)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(dtype), value, acc * shrink[:, None], input_precision="ieee")
        best = higher

    all_dims = tl.arange(0, head_dim)
    out_at = out_ptr + (row * HEADS + kv_head * group_size + g)[:, None] * head_dim + all_dims[None, :]
    if n_splits == 1:
        tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=in_group[:, None])
        return
    # Several programs share this head: each stores its partial result, and the last one to finish combines them.
    task = row * KV_HEADS + kv_head
    part = (task * SPLITS + split) * group_size + g
    tl.store(partial_ptr + part[:, None] * head_dim + all_dims[None, :], acc, mask=in_group[:, None])
    tl.store(stats_ptr + part * 2, best, mask=in_group)
    tl.store(stats_ptr + part * 2 + 1, total, mask=in_group)
    tl.debug_barrier()
    finished = tl.atomic_add(counter_ptr + task, 1, sem="acq_rel")
    if finished == n_splits - 1:
        splits = tl.arange(0, SPLITS)
        all_parts = (task * SPLITS + splits)[:, None] * group_size + g[None, :]  # (splits, group)
        there = (splits < n_splits)[:, None] & in_group[None, :]
        highest = tl.max(tl.load(stats_ptr + all_parts * 2, mask=there, other=float("-inf")), axis=0)
        total = tl.zeros([GROUP], dtype=tl.float32)
        acc = tl.zeros([GROUP, head_dim], dtype=tl.float32)
        # Unrolled, so that the loads of all parts overlap.
        for other in tl.static_range(0, SPLITS):
            part = (task * SPLITS + other) * group_size + g
            its = g < tl.where(n_splits > other, group_size, 0)
            share = tl.exp(tl.load(stats_ptr + part * 2, mask=its, other=float("-inf")) - highest)
            total += tl.load(stats_ptr + part * 2 + 1, mask=its, other=0.0) * share
            its_acc = tl.load(partial_ptr + part[:, None] * head_dim + all_dims[None, :], mask=its[:, None], other=0.0)
            acc += its_acc * share[:, None]
        tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=in_group[:, None])
        tl.store(counter_ptr + task, 0)  # reset for the next replay of the graph


def look_up(tokens: Tensor, table: Tensor, out: Tensor) -> None:
    """Copy row `tokens[i]` of a table, on the device or in pinned host memory, to row i of `out`."""
    size = table.shape[1]
    _look_up_kernel[len(tokens), triton.cdiv(size, 1024)](tokens, table, out, size, 1024)


@dataclass(frozen=True)
class Fold:
    """Operations folded into a product: the norm before it, the gate and the residual after it."""

    norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    residual: Tensor | None = None


def product(x: Tensor, linear: Linear, out: Tensor, fold: Fold) -> None:
    """Compute out (rows, n_out) = linear(norm(x)) with gate and residual as `fold` says; rows <= `MAX_ROWS`."""
    if isinstance(linear, GridLinear):
        assert isinstance(linear.grid, TiledGrid), "kernels read grids in tiles"
        x = x if fold.norm is None else _normalised(x, fold.norm, fold.eps, overlaps=True)
        grid_kernels.multiply(x, linear.grid, out, linear.bias, fold.residual, gated=fold.gated)
        return
    weight = linear.quantised if isinstance(linear, Int8Linear) else linear.weight
    scale = linear.scale if isinstance(linear, Int8Linear) else x
    rows, n_out = out.shape
    k_size = weight.shape[1]
    # The kernel takes a pointer even for what it never reads; x is the placeholder.
    bias, residual = _or(linear.bias, x), _or(fold.residual, x)
    flags = {
        "GATED": fold.gated,
        "INT8": isinstance(linear, Int8Linear),
        "BIAS": linear.bias is not None,
        "RESIDUAL": fold.residual is not None,
    }
    if rows == 1:
        block_n, block_k = _vector_tile(k_size, weight.dtype == torch.int8, fold.gated)
        even = n_out % block_n == 0 and k_size >= block_k
        _vector_kernel[(triton.cdiv(n_out, block_n),)](
            x, weight, out, _or(fold.norm, x), scale, bias, residual, n_out, fold.eps,
            K_SIZE=k_size, BLOCK_N=block_n, BLOCK_K=block_k, EVEN=even, NORM=fold.norm is not None,
            **flags, num_warps=4,
        )  # fmt: skip
        return
    if fold.norm is not None:
        x = _normalised(x, fold.norm, fold.eps, overlaps=False)
    tile = _product_tile(x.device, triton.next_power_of_2(max(rows, TILE_ROWS)), weight.dtype, fold.gated)
    even = n_out % tile.block_n == 0 and k_size % tile.block_k == 0
    _product_kernel[(triton.cdiv(n_out, tile.block_n),)](
        x, weight, out, scale, bias, residual, rows, n_out,
        K_SIZE=k_size, ROWS=tile.rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, EVEN=even, STAGES=tile.stages,
        **flags, num_warps=4, num_stages=tile.stages,
    )  # fmt: skip


def _normalised(x: Tensor, norm: Tensor, eps: float, *, overlaps: bool) -> Tensor:
    out, size, options = torch.empty_like(x), x.shape[1], _launch_options(x, overlaps)
    _norm_kernel[(x.shape[0],)](x, norm, out, eps, SIZE=size, BLOCK=triton.next_power_of_2(size), **options)
    return out


def _launch_options(x: Tensor, overlaps: bool) -> dict[str, bool]:
    return grid_kernels.launch_options(x) if overlaps else {"OVERLAPS": False}


class _Tile(NamedTuple):
    """Shape of the work of one program of `_product_kernel`, and how many loads it keeps under way."""

    rows: int
    block_n: int
    block_k: int
    stages: int


@functools.cache
def _product_tile(device: torch.device, rows: int, weight: torch.dtype, gated: bool) -> _Tile:
    """The fastest tile measured on an H200 for Llama-8B's shapes, made smaller where a card has less shared memory."""
    int8 = weight == torch.int8
    block_n, stages = (64, 3) if gated else (32, 5)
    block_k = 128 if gated and not int8 else 256
    room = grid_kernels.shared_bytes(device) - (8 << 10)  # some is left for the compiler's own use

    def stage_bytes() -> int:
        inputs = 2 if int8 else weight.itemsize
        return block_k * (block_n * (2 if gated else 1) * weight.itemsize + rows * inputs)

    while block_k > 32 and 2 * stage_bytes() > room:
        block_k //= 2
    return _Tile(rows, block_n, block_k, max(1, min(stages, room // stage_bytes())))


def _vector_tile(k_size: int, int8: bool, gated: bool) -> tuple[int, int]:
    """Rows and columns of weights per program: the fastest measured on an H200 for Llama-8B's shapes."""
    block_k = min(triton.next_power_of_2(k_size), 512 if int8 and gated else 1024)
    return (8 if int8 else 4), block_k


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


class AttentionScratch:
    """Buffers of one attention kernel: partial results, their softmax statistics, and a count of finished programs."""

    def __init__(self, rows: int, config: ModelConfig, device: torch.device) -> None:
        self.group = max(16, triton.next_power_of_2(config.n_heads // config.n_kv_heads))
        parts = (rows, MAX_SPLITS, config.n_heads)
        self.partial = torch.empty(*parts, config.head_dim, device=device, dtype=torch.float32)
        self.stats = torch.empty(*parts, 2, device=device, dtype=torch.float32)
        self.counter = torch.zeros(rows, config.n_kv_heads, device=device, dtype=torch.int32)


@dataclass(frozen=True)
class PagedRows:
    """Position, pages and rotation of the session that each row belongs to."""

    positions: Tensor  # (rows,) int32
    pages: Tensor  # (rows, max_pages) int32
    cos: Tensor  # (rows, head_dim / 2) float32
    sin: Tensor


def write(qkv: Tensor, cache: BlockCache, block: Block, config: ModelConfig, where: PagedRows) -> None:
    """Rotate the new keys, and write them and the new values to the cache."""
    _write_kernel[(qkv.shape[0], config.n_kv_heads)](
        qkv, cache.keys, cache.values, _or(cache.key_scales, qkv), _or(cache.value_scales, qkv), where.pages,
        where.positions, where.cos, where.sin, _or(block.k_norm, qkv), config.norm_eps, cache.keys.shape[2],
        where.pages.shape[1],
        HEADS=config.n_heads, KV_HEADS=config.n_kv_heads, HALF=config.head_dim // 2, PAGE=PAGE_TOKENS,
        QK_NORM=block.k_norm is not None, INT8=cache.key_scales is not None, num_warps=1,
        **_launch_options(qkv, isinstance(block.qkv, GridLinear)),
    )  # fmt: skip


def attend(
    qkv: Tensor, cache: BlockCache, out: Tensor, block: Block, config: ModelConfig, where: PagedRows,
    scratch: AttentionScratch, *, written: bool,
) -> None:  # fmt: skip
    """Attend to each row's past: out (rows, heads * head_dim); first write what is new, unless it is written."""
    window = config.window_of(block.index)
    _attend_kernel[(out.shape[0], config.n_kv_heads, MAX_SPLITS)](
        qkv, cache.keys, cache.values, _or(cache.key_scales, qkv), _or(cache.value_scales, qkv), out, scratch.partial,
        scratch.stats, scratch.counter, where.pages, where.positions, where.cos, where.sin, _or(block.q_norm, qkv),
        _or(block.k_norm, qkv), config.norm_eps, config.head_dim**-0.5, cache.keys.shape[2], where.pages.shape[1],
        HEADS=config.n_heads, KV_HEADS=config.n_kv_heads, HALF=config.head_dim // 2, GROUP=scratch.group,
        PAGE=PAGE_TOKENS, SPLITS=MAX_SPLITS, WINDOW=window or 0, QK_NORM=block.q_norm is not None,
        WRITTEN=written, INT8=cache.key_scales is not None, num_warps=ATTEND_WARPS,
        **_launch_options(qkv, isinstance(block.qkv, GridLinear)),
    )  # fmt: skip


def supports(config: ModelConfig) -> bool:
    """True if the kernels fit the model's shape: half a head must be a power of two, at least 16."""
    half = config.head_dim // 2
    return half >= 16 and half & (half - 1) == 0
