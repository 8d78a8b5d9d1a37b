"""Triton kernels for weights in a grid (`engine.model.grid_tiles`): products with few rows, and conversion to numbers.

A product of few rows is limited by memory bandwidth if unpacking takes fewer instructions than reading does cycles: on
an H200 about two for each weight. So integers are unpacked two at a time, and not converted: an integer under the right
exponent is the number offset + integer, which a tensor core multiplies exactly. The offset's part of the sum, and the
minima, are a multiple of the sum of the row, and scales are applied to the sums of a group. Each warp works alone on
its part of the columns; the tensors' dimensions repeat what a thread holds, so that no data moves between threads.

These products are short, and between two of them a card would be idle. Where it can (`overlaps`), each kernel of a step
begins before the one before it has ended, asks for its first weights, and waits only then for the input.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.grid_tiles import TILE_ROWS, TiledGrid, TileForm

MOST_ROWS = 32  # of one program; more rows take several
_MASK = 0x000F000F  # the lowest four bits of both halves of a word
# How many neighbouring columns a thread has in the compiler's order for the product's operands. Another number than the
# compiler's gives the same result, with numbers exchanged between threads.
RUN = 2 if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8) else 4


@triton.jit
def _pairs(words, mask, SHIFT: tl.constexpr, EXPONENT: tl.constexpr, NUMBER: tl.constexpr):
    # Four bits of both halves of each word as two numbers of 16 bits, offset + integer: (...) -> (..., 2). The mask is
    # an argument, because with two constants the compiler needs two instructions instead of one.
    both = ((words >> SHIFT) & mask) | EXPONENT
    low = both.to(tl.int16).to(NUMBER, bitcast=True)
    high = (both >> 16).to(tl.int16).to(NUMBER, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _unpacked(words, mask, BITS: tl.constexpr, HIGH: tl.constexpr, EXPONENT: tl.constexpr, NUMBER: tl.constexpr):
    # All integers of 4 bits, or the low or high 4 bits of those of 8: (..., 2 halves, integers of a half).
    numbers = tl.join(_pairs(words, mask, HIGH, EXPONENT, NUMBER), _pairs(words, mask, BITS + HIGH, EXPONENT, NUMBER))
    if BITS == 4:
        others = tl.join(_pairs(words, mask, 8, EXPONENT, NUMBER), _pairs(words, mask, 12, EXPONENT, NUMBER))
        numbers = tl.join(numbers, others)  # (..., half, integer % 2, integer // 2)
    return numbers


@triton.jit
def _weights(
    words, mask, TILES: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr,
    HIGH: tl.constexpr, EXPONENT: tl.constexpr, NUMBER: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    # The left side of a product: (tiles, 2, warps, 8, 4, 4) -> (parts * warps, rows, columns of a part).
    WORDS: tl.constexpr = 4 // PARTS
    numbers = _unpacked(words, mask, BITS, HIGH, EXPONENT, NUMBER)
    if BITS == 4:
        if RUN == 2:
            numbers = tl.permute(numbers, (5, 2, 0, 1, 3, 8, 7, 4, 6))
        else:
            numbers = tl.permute(numbers, (5, 2, 0, 1, 3, 8, 4, 7, 6))
    else:
        numbers = tl.reshape(numbers, (TILES, 2, WARPS, 8, 4, PARTS, WORDS, 2, 2))
        if RUN == 2:
            numbers = tl.permute(numbers, (5, 2, 0, 1, 3, 6, 8, 4, 7))
        else:
            numbers = tl.permute(numbers, (5, 2, 0, 1, 3, 6, 4, 8, 7))
    # (parts, warps, tiles, half, row, run of a thread's columns, thread, columns of the run)
    return tl.reshape(numbers, (PARTS * WARPS, TILES * 16, WORDS * 128 // BITS))


@triton.jit
def _rows(x, WARPS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, RUN: tl.constexpr):
    # The right side of a product: (parts, R, warps, 8, 4, columns of a thread) -> (parts * warps, columns, rows). Its
    # columns are ordered as tensor cores share them among four threads, in runs of RUN, so that none moves.
    x = tl.permute(tl.reshape(x, (PARTS, R, WARPS, 8, 4, PART // 4 // RUN, RUN)), (0, 2, 5, 4, 6, 1, 3))
    return tl.reshape(x, (PARTS * WARPS, PART, R * 8))


@triton.jit
def _spread(factors, TILES: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr, FACTORS: tl.constexpr):
    # Scales as what a thread has of the sums: (tiles, 2, warps, 8, 4, factors) -> (parts, warps, tiles, 2, 8, 1, 4, 1).
    factors = factors.to(tl.float32)
    if FACTORS < PARTS:
        shape: tl.constexpr = (TILES, 2, WARPS, 8, 4, FACTORS, PARTS // FACTORS)
        factors = tl.reshape(tl.broadcast_to(factors[:, :, :, :, :, :, None], shape), (TILES, 2, WARPS, 8, 4, PARTS))
    return tl.permute(factors, (5, 2, 0, 1, 3, 4))[:, :, :, :, :, None, :, None]


@triton.jit
def _chunk_product(
    acc, words, scale, minimum, x, mask,
    BITS: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    FACTORS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, R: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    # The sums of one chunk, added to those before: (warps, tiles, 2 halves, 8 rows, R, 4 threads, 2 columns).
    dtype = x.dtype
    HALF: tl.constexpr = dtype == tl.float16
    NUMBER: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    LOW: tl.constexpr = 0x64006400 if HALF else 0x43004300  # the exponents of 1024 and 128, whose last bit counts 1
    HIGH: tl.constexpr = 0x74007400 if HALF else 0x45004500  # of 16384 and 2048, whose last bit counts 16
    PLANES: tl.constexpr = (1024 if HALF else 128) + (0 if BITS == 4 else (16384 if HALF else 2048))
    OFFSET: tl.constexpr = PLANES + (0 if MINIMUM else ZERO)
    SAME: tl.constexpr = 1 if MINIMUM else TILES  # the sums of x are alike in all rows, so those of one tile do for all
    constant = tl.full((PARTS * WARPS, SAME * 16, PART), 1.0 if MINIMUM else -OFFSET, dtype)
    sums = tl.dot(constant, _rows(x, WARPS, PART, PARTS, R, 2), input_precision="ieee")
    right = _rows(x, WARPS, PART, PARTS, R, RUN)
    left = _weights(words, mask, TILES, WARPS, PARTS, BITS, 0, LOW, NUMBER, RUN).to(dtype)
    if MINIMUM:
        part = tl.dot(left, right, input_precision="ieee")
    else:
        part = tl.dot(left, right, sums, input_precision="ieee")
    if BITS == 8:
        left = _weights(words, mask, TILES, WARPS, PARTS, BITS, 4, HIGH, NUMBER, RUN).to(dtype)
        part = tl.dot(left, right, part, input_precision="ieee")
    by = _spread(scale, TILES, WARPS, PARTS, FACTORS)
    product = tl.reshape(part, (PARTS, WARPS, TILES, 2, 8, R, 4, 2)) * by
    if MINIMUM:
        rest = _spread(minimum, TILES, WARPS, PARTS, FACTORS) - OFFSET * by
        product += tl.reshape(sums, (PARTS, WARPS, 1, 2, 8, R, 4, 2)) * rest
    acc += tl.sum(product, axis=0)
    return acc


@triton.jit
def _place(
    thread, n_out, CHUNKS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    # The place of a row in the first chunk of its tile; `thread` counts (tiles, 2 halves, warps, 8 rows, 4 threads).
    WARPS: tl.constexpr = WIDTH * SPLITS
    which = thread // (WARPS * 64)
    wide = tl.program_id(1) * WIDTH + thread // (SPLITS * 32) % WIDTH
    if GATED:
        tile = tl.minimum(wide, n_out // 16 - 1) + which * (n_out // 16)
    else:
        tile = tl.minimum(wide * TILES + which, n_out // 16 - 1)
    return tile * (CHUNKS * 16) + thread // (WARPS * 32) % 2 * 8 + thread // 4 % 8


@triton.jit
def _chunk(split, done, CHUNKS: tl.constexpr, EVEN: tl.constexpr):
    # The chunk of a warp; past the last it is the last.
    chunk = split + done
    if not EVEN:
        chunk = tl.minimum(chunk, CHUNKS - 1)
    return chunk


@triton.jit
def _chunk_weights(
    words_ptr, scale_ptr, minimum_ptr, word, word_split, factor, factor_split, done,
    CHUNKS: tl.constexpr, EVEN: tl.constexpr, FACTORS: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    # Integers, scales and minima of the chunks that the warps take after `done` of them.
    words = tl.load(words_ptr + word + _chunk(word_split, done, CHUNKS, EVEN) * 256, eviction_policy="evict_first")
    factors = factor + _chunk(factor_split, done, CHUNKS, EVEN) * 16 * FACTORS
    scale = tl.load(scale_ptr + factors)
    minimum = scale
    if MINIMUM:
        minimum = tl.load(minimum_ptr + factors)
    return words, scale, minimum


@triton.jit
def _chunk_sums(
    acc, words, scale, minimum, x_ptr, at, column, done, mask,
    K_SIZE: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, FACTORS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
    R: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    # Load the rows of the same chunks, multiply, and add to the sums.
    if EVEN:
        x = tl.load(x_ptr + at + done * PART * PARTS)
    else:
        x = tl.load(x_ptr + at + done * PART * PARTS, mask=column + done * PART * PARTS < K_SIZE, other=0.0)
    words = tl.reshape(words, (TILES, 2, WARPS, 8, 4, 4))
    scale = tl.reshape(scale, (TILES, 2, WARPS, 8, 4, FACTORS))
    minimum = tl.reshape(minimum, (TILES, 2, WARPS, 8, 4, FACTORS))
    x = tl.reshape(x, (PARTS, R, WARPS, 8, 4, PART // 4))
    return _chunk_product(
        acc, words, scale, minimum, x, mask, BITS, ZERO, MINIMUM, PART, PARTS, FACTORS, TILES, WARPS, R, RUN
    )


@triton.jit(do_not_specialize=["rows"])
def _grid_product_kernel(
    x_ptr, words_ptr, out_ptr, scale_ptr, minimum_ptr, bias_ptr, residual_ptr, rows, n_out, mask,
    K_SIZE: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, RUN: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    # WIDTH * SPLITS warps: each multiplies TILES tiles with every SPLITS-th chunk of columns. With a gate, a warp's two
    # tiles are one of the gate and one of what it gates. What lies past the last row, tile or chunk is replaced by the
    # last: such rows and tiles are not stored, and past the last column x is zero.
    WARPS: tl.constexpr = WIDTH * SPLITS
    CHUNK: tl.constexpr = PART * PARTS
    CHUNKS: tl.constexpr = (K_SIZE + CHUNK - 1) // CHUNK
    STEPS: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    EVEN: tl.constexpr = STEPS * SPLITS * CHUNK == K_SIZE
    FACTORS: tl.constexpr = CHUNK // GROUP
    LANE: tl.constexpr = PART // 4
    R: tl.constexpr = ROWS // 8

    # All loads are of one dimension, so that their order among threads is that of the numbers: a thread has what is
    # contiguous, and then come the threads of a row, the rows, and the warps. The hints keep it from taking more.
    i = tl.arange(0, TILES * WARPS * 256)  # (tiles, 2 halves, warps, 8 rows, 4 threads, 4 words)
    word = _place(i // 4, n_out, CHUNKS, TILES, WIDTH, SPLITS, GATED) * 16 + i % 16
    word = tl.multiple_of(tl.max_contiguous(word, 4), 4)
    word_split = i // 128 % SPLITS
    i = tl.arange(0, TILES * WARPS * 64 * FACTORS)  # (tiles, 2 halves, warps, 8 rows, 4 threads, factors)
    factor = _place(i // FACTORS, n_out, CHUNKS, TILES, WIDTH, SPLITS, GATED) * FACTORS + i % FACTORS
    factor = tl.multiple_of(tl.max_contiguous(factor, FACTORS), FACTORS)
    factor_split = i // (32 * FACTORS) % SPLITS
    i = tl.arange(0, ROWS * WARPS * CHUNK)  # (parts, R, warps, 8 rows, 4 threads, columns of a thread)
    row = i // (WARPS * PART * 8) % R * 8 + i // PART % 8
    row = tl.minimum(row + tl.program_id(0) * ROWS, rows - 1)
    split = i // (PART * 8) % SPLITS
    column = i // (R * WARPS * PART * 8) * PART + i % PART + split * CHUNK
    at = tl.multiple_of(tl.max_contiguous(row * K_SIZE + column, LANE), LANE)
    column = tl.max_contiguous(column, LANE)

    acc = tl.zeros((WARPS, TILES, 2, 8, R, 4, 2), tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    if STAGES == 1:
        # Each chunk is loaded while the one before it is multiplied, the first before the input is there.
        words, scale, minimum = _chunk_weights(
            words_ptr, scale_ptr, minimum_ptr, word, word_split, factor, factor_split, 0, CHUNKS, EVEN, FACTORS, MINIMUM
        )
        if OVERLAPS:
            tl.extra.cuda.gdc_wait()
        for step in tl.range(0, STEPS - 1, num_stages=1):
            done = step * SPLITS
            next_words, next_scale, next_minimum = _chunk_weights(
                words_ptr, scale_ptr, minimum_ptr, word, word_split, factor, factor_split, done + SPLITS,
                CHUNKS, EVEN, FACTORS, MINIMUM,
            )  # fmt: skip
            acc = _chunk_sums(
                acc, words, scale, minimum, x_ptr, at, column, done, mask,
                K_SIZE, EVEN, BITS, ZERO, MINIMUM, PART, PARTS, FACTORS, TILES, WARPS, R, RUN,
            )  # fmt: skip
            words, scale, minimum = next_words, next_scale, next_minimum
        acc = _chunk_sums(
            acc, words, scale, minimum, x_ptr, at, column, (STEPS - 1) * SPLITS, mask,
            K_SIZE, EVEN, BITS, ZERO, MINIMUM, PART, PARTS, FACTORS, TILES, WARPS, R, RUN,
        )  # fmt: skip
    else:
        if OVERLAPS:
            tl.extra.cuda.gdc_wait()
        for step in tl.range(0, STEPS, num_stages=STAGES):
            done = step * SPLITS
            words, scale, minimum = _chunk_weights(
                words_ptr, scale_ptr, minimum_ptr, word, word_split, factor, factor_split, done,
                CHUNKS, EVEN, FACTORS, MINIMUM,
            )  # fmt: skip
            acc = _chunk_sums(
                acc, words, scale, minimum, x_ptr, at, column, done, mask,
                K_SIZE, EVEN, BITS, ZERO, MINIMUM, PART, PARTS, FACTORS, TILES, WARPS, R, RUN,
            )  # fmt: skip

    total = tl.reshape(acc, (WIDTH, SPLITS, TILES, 2, 8, R, 4, 2))
    total = tl.sum(total, axis=1)  # (width, tiles, 2, 8, R, 4, 2)
    N: tl.constexpr = WIDTH * 16 * (1 if GATED else TILES)
    n = tl.program_id(1) * N + tl.arange(0, N)
    if GATED:
        both = tl.reshape(tl.permute(total, (4, 5, 6, 0, 2, 3, 1)), (ROWS, N, 2))
        gate, up = tl.split(both)
        if BIAS:
            gate += tl.load(bias_ptr + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + n_out + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
        result = gate * tl.sigmoid(gate) * up
    else:
        result = tl.reshape(tl.permute(total, (4, 5, 6, 0, 1, 2, 3)), (ROWS, N))
        if BIAS:
            result += tl.load(bias_ptr + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    where = r[:, None] * n_out + n[None, :]
    mine = (r[:, None] < rows) & (n[None, :] < n_out)
    if RESIDUAL:
        result += tl.load(residual_ptr + where, mask=mine, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, result.to(out_ptr.dtype.element_ty), mask=mine)


@triton.jit
def _grid_dense_kernel(
    words_ptr, out_ptr, scale_ptr, minimum_ptr, mask,
    K_SIZE: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    # One program converts one chunk of a tile for each of its warps.
    CHUNK: tl.constexpr = PART * PARTS
    CHUNKS: tl.constexpr = (K_SIZE + CHUNK - 1) // CHUNK
    FACTORS: tl.constexpr = CHUNK // GROUP
    LANE: tl.constexpr = PART // 4
    OFFSET: tl.constexpr = 128 + (0 if BITS == 4 else 2048) + (0 if MINIMUM else ZERO)
    tile = tl.program_id(0)
    i = tl.arange(0, WARPS * 256)  # (2 halves, warps, 8 rows, 4 threads, 4 words)
    chunk = tl.minimum(tl.program_id(1) * WARPS + i // 128 % WARPS, CHUNKS - 1)
    place = ((tile * CHUNKS + chunk) * 2 + i // (WARPS * 128)) * 8 + i // 16 % 8
    word = tl.multiple_of(tl.max_contiguous(place * 16 + i % 16, 4), 4)
    words = tl.load(words_ptr + word, eviction_policy="evict_first")
    words = tl.reshape(words, (2, WARPS, 8, 4, 4))
    numbers = _unpacked(words, mask, BITS, 0, 0x43004300, tl.bfloat16).to(tl.float32) - OFFSET
    if BITS == 4:
        numbers = tl.permute(numbers, (0, 1, 2, 3, 4, 7, 6, 5))  # (2, warps, 8, 4, parts, the columns of a word)
    else:
        numbers += _unpacked(words, mask, BITS, 4, 0x45004500, tl.bfloat16).to(tl.float32)
        numbers = tl.permute(numbers, (0, 1, 2, 3, 4, 6, 5))
    numbers = tl.reshape(numbers, (2, WARPS, 8, 4, PARTS, LANE))
    i = tl.arange(0, WARPS * 64 * PARTS)  # (2 halves, warps, 8 rows, 4 threads, parts)
    chunk = tl.minimum(tl.program_id(1) * WARPS + i // (32 * PARTS) % WARPS, CHUNKS - 1)
    place = ((tile * CHUNKS + chunk) * 2 + i // (WARPS * 32 * PARTS)) * 8 + i // (4 * PARTS) % 8
    TOGETHER: tl.constexpr = PARTS if FACTORS == PARTS else 1
    factor = tl.max_contiguous(place * FACTORS + i % PARTS * PART // GROUP, TOGETHER)
    factor = tl.multiple_of(factor, TOGETHER)
    numbers *= tl.reshape(tl.load(scale_ptr + factor).to(tl.float32), (2, WARPS, 8, 4, PARTS, 1))
    if MINIMUM:
        numbers += tl.reshape(tl.load(minimum_ptr + factor).to(tl.float32), (2, WARPS, 8, 4, PARTS, 1))
    numbers = tl.reshape(tl.permute(numbers, (0, 2, 1, 4, 3, 5)), (16, WARPS * CHUNK)).to(out_ptr.dtype.element_ty)
    row = (tile * 16 + tl.arange(0, 16)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * WARPS * CHUNK + tl.arange(0, WARPS * CHUNK))[None, :]
    tl.store(out_ptr + row * K_SIZE + column, numbers, mask=column < K_SIZE)


class ProductTile(NamedTuple):
    """Shape of the work of one program: its warps take `width` × `tiles` tiles, each of them split by columns."""

    tiles: int
    width: int
    splits: int
    stages: int = 1  # loads under way through shared memory; one: in registers, a chunk ahead
    registers: int | None = None  # of a thread, at most; none is for the compiler to say


class Product(NamedTuple):
    """A product of a decode step of at most `FEW_ROWS` rows, as far as its speed depends on it."""

    dtype: torch.dtype
    form: TileForm
    has_minimum: bool
    shape: tuple[int, int]
    gated: bool


FEW_ROWS = 8
chosen_tiles: dict[Product, ProductTile] = {}  # the fastest on this machine's card, as `engine.model.tile_choice` finds


def product_of(dtype: torch.dtype, grid: TiledGrid, *, gated: bool) -> Product:
    """Return what the tile of a product with rows of this type is chosen by."""
    return Product(dtype, grid.form, grid.minimum is not None, grid.shape, gated)


@functools.cache
def product_tile(device: torch.device, rows: int, k_size: int, *, gated: bool) -> ProductTile:
    """Return the tile of a product for at most `rows` rows, if none was chosen by measurement.

    The fastest for Llama-8B's shapes on an H200: many warps share long sums, and more rows need registers for their
    own sums.
    """
    most = triton.next_power_of_2(max(1, k_size // 512))
    if gated:
        if rows <= FEW_ROWS:
            return ProductTile(2, 4, min(2, most))
        return ProductTile(2, 2, 1, 3 if shared_bytes(device) > 128 << 10 else 1)
    if rows <= FEW_ROWS:
        return ProductTile(1, 1, min(8 if most >= 16 else 4, most), registers=None if torch.version.hip else 112)
    return ProductTile(1, 1, min(8 if rows <= 16 and most >= 16 else 4, most))


@functools.cache
def overlaps(device: torch.device) -> bool:
    """True if kernels of a step can begin before the one before has ended: on NVIDIA's cards from Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(x: Tensor) -> dict[str, bool]:
    """What a kernel of a step with these rows is launched with; for more than eight, overlapping makes it slower."""
    return {"OVERLAPS": True, "launch_pdl": True} if len(x) <= FEW_ROWS and overlaps(x.device) else {"OVERLAPS": False}


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use: 227 KiB on an H200, 99 KiB on most consumer cards."""
    if device.type != "cuda":
        return 1 << 17  # Triton's interpreter has no such limit
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) or 48 << 10


def multiply(
    x: Tensor,
    grid: TiledGrid,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    gated: bool,
    tile: ProductTile | None = None,
) -> None:
    """Compute out (rows, n_out) = x Wᵀ with bias, gate and residual; with a gate, n_out is half the rows of W."""
    rows, n_out = out.shape
    assert n_out % TILE_ROWS == 0, "a tile has rows of the gate, or of what it gates"
    padded = min(MOST_ROWS, max(FEW_ROWS, triton.next_power_of_2(rows)))
    if tile is None and padded == FEW_ROWS:
        tile = chosen_tiles.get(product_of(x.dtype, grid, gated=gated))
    tile = tile or product_tile(x.device, padded, grid.shape[1], gated=gated)
    per_program = TILE_ROWS * tile.width * (1 if gated else tile.tiles)
    limits = {} if tile.registers is None else {"maxnreg": tile.registers}
    _grid_product_kernel[(triton.cdiv(rows, padded), triton.cdiv(n_out, per_program))](
        x, grid.integers, out, grid.scale, _or(grid.minimum, grid.scale), _or(bias, x), _or(residual, x), rows, n_out,
        _MASK, **_form(grid), ROWS=padded, TILES=tile.tiles, WIDTH=tile.width, SPLITS=tile.splits,
        STAGES=tile.stages, RUN=RUN, GATED=gated, BIAS=bias is not None, RESIDUAL=residual is not None,
        num_warps=tile.width * tile.splits, **limits, **launch_options(x),
    )  # fmt: skip


def dense(grid: TiledGrid, dtype: torch.dtype) -> Tensor:
    """Return a grid as numbers, (out, in)."""
    warps, (n_out, k_size) = 4, grid.shape
    out = torch.empty(n_out, k_size, device=grid.scale.device, dtype=dtype)
    tiles, chunks = grid.integers.shape[:2]
    _grid_dense_kernel[(tiles, triton.cdiv(chunks, warps))](
        grid.integers, out, grid.scale, _or(grid.minimum, grid.scale), _MASK, **_form(grid), WARPS=warps,
        num_warps=warps,
    )  # fmt: skip
    return out


def _form(grid: TiledGrid) -> dict[str, int | bool]:
    return {
        "K_SIZE": grid.shape[1],
        "GROUP": grid.form.group,
        "BITS": grid.form.bits,
        "ZERO": grid.zero,
        "MINIMUM": grid.minimum is not None,
        "PART": grid.form.part,
        "PARTS": grid.form.parts,
    }


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel takes a pointer even for what it never reads."""
    return other if tensor is None else tensor
