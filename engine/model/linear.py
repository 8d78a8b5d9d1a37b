"""Matrix products with model weights, kept dense, in int8, or in the grid of their file.

On CPUs the fastest method depends on the number of rows and on the BLAS behind torch (OpenBLAS takes three times as
long for two rows as for one), so the methods are timed once per process and the resulting table decides.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.budget import CONVERTED_NUMBERS, CONVERTED_ROWS
from engine.device.kinds import kind_of
from engine.model.grid_tiles import TILE_ROWS, TiledGrid
from engine.model.onnx_graph import GridProduct, runtime
from engine.sources.grid import Grid

Product = Callable[[Tensor, Tensor], Tensor]  # x (N, in), weight (out, in) -> (N, out)

QUANTISED_ROWS = 1024  # rows of a matrix that are quantised at a time
# Row counts at which the methods are timed; a count in between uses the entry below it.
TIMED_ROWS = (1, 2, 3, 4, 8, 12, 16, 32, 64, 128)
SLOW_S, MOST_TIMED_S = 0.25, 4.0  # for one method and count, and in all, after which the timing ends


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _row_by_row(x: Tensor, weight: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for row in range(x.shape[0]):
        torch.mv(weight, x[row], out=out[row])
    return out


def _transposed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(weight, x.t()).t().contiguous()


def _candidates(rows: int) -> tuple[Product, ...]:
    if rows == 1:
        return (_plain,)
    return (_plain, _row_by_row, _transposed) if rows <= 4 else (_plain, _transposed)


def _best_of(product: Product, x: Tensor, weights: list[Tensor]) -> float:
    """Seconds of the fastest pass over the weights; the first pass is warm-up and counts only if it is very slow."""
    times: list[float] = []
    while len(times) < 4 and sum(times) < SLOW_S:
        start = time.perf_counter()
        for weight in weights:
            product(x, weight)
        times.append(time.perf_counter() - start)
    return min(times[1:] or times)


@functools.cache
def cpu_products(dtype: torch.dtype) -> tuple[Product, ...]:
    """Return the fastest method for each entry of `TIMED_ROWS`, measured on this machine (0.2 s, once per process).

    A processor without instructions for a number format can take minutes for that: then the plain one stays.
    """
    weights = [torch.ones(768, 768, dtype=dtype) for _ in range(4)]
    chosen: list[Product] = []
    began = time.perf_counter()
    with torch.inference_mode():
        for rows in TIMED_ROWS:
            methods = _candidates(rows) if time.perf_counter() - began < MOST_TIMED_S else (_plain,)
            if len(methods) == 1:
                chosen.append(methods[0])
                continue
            x = torch.ones(rows, 768, dtype=dtype)
            # Another method must win by 8 %, so that noise does not decide a tie.
            seconds = [_best_of(method, x, weights) * (1.0 if method is _plain else 1.08) for method in methods]
            chosen.append(methods[seconds.index(min(seconds))])
    return tuple(chosen)


def _entry_of(rows: int) -> int:
    """Index in `TIMED_ROWS` of the largest count that is not above `rows`."""
    return max(i for i, timed in enumerate(TIMED_ROWS) if timed <= rows)


_ENTRY = tuple(_entry_of(max(rows, 1)) for rows in range(TIMED_ROWS[-1] + 1))


def packed(weight: Tensor) -> Tensor | None:
    """Return a copy of a float32 CPU weight in oneDNN's own layout, or None if this torch has no such layout.

    The copy takes the weight's memory a second time; eight rows then take 0.75 and four rows 0.65 of the time.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    try:
        copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(2, weight.shape[1]), copy, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return copy


@dataclass
class DenseLinear:
    """y = x Wᵀ + b with W (out, in) in the compute dtype."""

    weight: Tensor
    bias: Tensor | None = None
    # A second copy in oneDNN's layout, used for two rows and more; a single row is faster without it.
    packed: Tensor | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, training: bool = False) -> Tensor:
        """Return the product for rows x (N, in), plus the residual if given.

        With `training`, the method depends on nothing that was measured, so that a pass that is computed again, in
        another process too, gives the same bits.
        """
        rows = x.shape[0]
        if rows == 1 and self.bias is None and residual is not None:
            return torch.addmm(residual, x, self.weight.t())  # fused: overhead matters for one row
        out = F.linear(x, self.weight, self.bias) if training else self._product(x, rows)
        return out if residual is None else residual + out

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the rows x for that of the product, (N, out) -> (N, in)."""
        return torch.mm(gradient, self.weight)

    def _product(self, x: Tensor, rows: int) -> Tensor:
        if rows == 1 or x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        if self.packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            return out
        product = cpu_products(x.dtype)[_ENTRY[min(rows, TIMED_ROWS[-1])]]
        return product(x, self.weight) if self.bias is None else product(x, self.weight) + self.bias

    @property
    def nbytes(self) -> int:
        """Bytes of weight, packed copy and bias."""
        copies = 1 if self.packed is None else 2
        return copies * self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass
class Int8Linear:
    """y = x Wᵀ + b with W in int8, one float scale per output row (symmetric, weight-only)."""

    quantised: Tensor  # (out, in) int8
    scale: Tensor  # (out,) in the compute dtype
    bias: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
        """Quantise a dense weight; the largest absolute value of each row becomes 127."""
        made = cls.empty(weight.shape[0], weight.shape[1], weight, bias)
        made.fill(0, weight)
        return made

    @classmethod
    def empty(cls, n_out: int, n_in: int, like: Tensor, bias: Tensor | None = None) -> Int8Linear:
        """Return a product whose weights `fill` will set, with scales of the dtype and on the device of `like`."""
        return cls(like.new_empty(n_out, n_in, dtype=torch.int8), like.new_empty(n_out), bias)

    def fill(self, first: int, weight: Tensor) -> None:
        """Quantise a dense weight into the rows from `first` on; in slices, because it makes float32 copies."""
        for rows in weight.split(QUANTISED_ROWS):
            values = rows.float()
            scale = values.abs().amax(dim=1).clamp_min(1e-12) / 127
            self.quantised[first : first + len(rows)] = (values / scale[:, None]).round_().clamp_(-127, 127)
            self.scale[first : first + len(rows)] = scale
            first += len(rows)

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, training: bool = False) -> Tensor:
        """Return the product for rows x (N, in), plus the residual if given; `training` as for dense weights."""
        # torch's packed product reads int8 directly but processes rows one by one, so it is faster for few rows only.
        if x.shape[0] <= 4 and not training and kind_of(x.device).int8_product:
            out = torch._weight_int8pack_mm(x, self.quantised, self.scale)
        else:
            # In slices, so that the converted weights take little memory.
            slices = self.quantised.split(CONVERTED_ROWS)
            out = torch.cat([F.linear(x, rows.to(x.dtype)) for rows in slices], dim=1) * self.scale
        out = out if self.bias is None else out + self.bias
        return out if residual is None else residual + out

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the rows x for that of the product, (N, out) -> (N, in)."""
        scaled = gradient * self.scale
        dx = scaled.new_zeros(scaled.shape[0], self.quantised.shape[1])
        for first in range(0, len(self.quantised), CONVERTED_ROWS):  # in slices, as above
            rows = self.quantised[first : first + CONVERTED_ROWS]
            dx.addmm_(scaled[:, first : first + len(rows)], rows.to(scaled.dtype))
        return dx

    @property
    def nbytes(self) -> int:
        """Bytes of weights, scales and bias."""
        return self.quantised.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass
class GridLinear:
    """y = x Wᵀ + b with W in a grid of 4 or 8 bits (`engine.sources.grid`).

    On a CPU, ONNX Runtime multiplies with the integers themselves where it is there. Elsewhere, and in training, a part
    of the matrix after the other is converted to the numbers of x; CUDA's decode steps have kernels of their own.
    """

    grid: Grid | TiledGrid
    bias: Tensor | None = None
    convert: Callable[[TiledGrid, torch.dtype], Tensor] = TiledGrid.dense  # a kernel is faster than torch's operations
    _product: GridProduct | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, training: bool = False) -> Tensor:
        """Return the product for rows x (N, in), plus the residual if given; `training` as for dense weights."""
        with_integers = x.device.type == "cpu" and x.dtype == torch.float32 and not training
        if with_integers and isinstance(self.grid, Grid) and runtime() is not None:
            self._product = self._product or GridProduct(self.grid, self.bias)
            out = self._product(x)
        else:
            parts = [F.linear(x, self._numbers(part, x.dtype)) for part in self._parts]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            out = out if self.bias is None else out + self.bias
        return out if residual is None else residual + out

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the rows x for that of the product, (N, out) -> (N, in)."""
        dx, first = gradient.new_zeros(gradient.shape[0], self.grid.shape[1]), 0
        for part in self._parts:
            last = first + part.shape[0]
            dx.addmm_(gradient[:, first:last], self._numbers(part, gradient.dtype))
            first = last
        return dx

    def _numbers(self, part: Grid | TiledGrid, dtype: torch.dtype) -> Tensor:
        """Return a part of the matrix as numbers; give it no name, so that its memory is free for the next part's."""
        return part.dense(dtype) if isinstance(part, Grid) else self.convert(part, dtype)

    @functools.cached_property
    def _parts(self) -> list[Grid | TiledGrid]:
        """The grid in as few parts of equal size as the limit allows; made once, since a prompt's pass is short."""
        (n_out, n_in), on_gpu = self.grid.shape, isinstance(self.grid, TiledGrid)
        count = -(-n_out * n_in // CONVERTED_NUMBERS) if on_gpu else -(-n_out // CONVERTED_ROWS)
        rows = -(-n_out // (count * TILE_ROWS)) * TILE_ROWS
        if count == 1:
            return [self.grid]
        return [self.grid.rows(slice(first, first + rows)) for first in range(0, n_out, rows)]

    @property
    def nbytes(self) -> int:
        """Bytes of weights and bias, and of the runtime's copy if there is one."""
        copy = 0 if self._product is None else self._product.nbytes
        return self.grid.nbytes + copy + (0 if self.bias is None else self.bias.nbytes)


Linear = DenseLinear | Int8Linear | GridLinear
