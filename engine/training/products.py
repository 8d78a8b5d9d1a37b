"""A block's products with adapters: differentiable ones for training, and those that serve a reply.

Written as one autograd function for each matrix: the A's of a fused matrix are one product, each B adds to its slice of
the output in place, and the adapter's gradients are added to their sums at once, so that nothing is joined or copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.model.block import Block, Matrix, Multiply
from engine.model.linear import Linear
from engine.training.adapters import Group, generator

Mask = Callable[[], Tensor]  # makes the dropout mask of an input, the same one at each call


@dataclass
class LowRank:
    """The adapter of one fused matrix: views of its block's vectors of weights and of summed gradients."""

    group: Group
    values: Tensor
    sums: Tensor | None  # None: gradients are not counted
    scale: float

    def low(self, x: Tensor) -> Tensor:
        """Return x Aᵀ times the scale, (N, roles * rank)."""
        return torch.mm(x, self.group.down(self.values).to(x.dtype).t()).mul_(self.scale)

    def add(self, low: Tensor, out: Tensor) -> None:
        """Add the adapter's part to the product's output (N, out) in place."""
        for index, ((first, stop), up) in enumerate(zip(self.group.columns, self.group.ups(self.values), strict=True)):
            own = low.narrow(1, index * self.group.rank, self.group.rank)
            out[:, first:stop].addmm_(own, up.to(low.dtype).t())

    def gradients(self, x: Tensor, low: Tensor, dy: Tensor) -> Tensor:
        """Add the gradients of A and B to their sums; return that of x Aᵀ (N, roles * rank)."""
        d_low = torch.empty_like(low)
        ups = self.group.ups(self.values)
        up_sums = self.group.ups(self.values if self.sums is None else self.sums)
        for index, ((first, stop), up, up_sum) in enumerate(zip(self.group.columns, ups, up_sums, strict=True)):
            at, rank = index * self.group.rank, self.group.rank
            own = dy[:, first:stop]
            torch.mm(own, up.to(dy.dtype), out=d_low[:, at : at + rank])
            if self.sums is not None:
                up_sum += torch.mm(own.t(), low[:, at : at + rank])
        d_low.mul_(self.scale)
        if self.sums is not None:
            self.group.down(self.sums).add_(torch.mm(d_low.t(), x))
        return d_low


class _Product(torch.autograd.Function):
    """y = x Wᵀ + b + adapter(x) + residual; the weights get no gradient, the adapter's are summed by the way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        linear: Linear,
        adapter: LowRank | None,
        mask: Mask | None,
        unread: bool,
    ) -> Tensor:
        ctx.linear, ctx.adapter, ctx.mask, ctx.has_residual = linear, adapter, mask, residual is not None
        low = None if adapter is None else adapter.low(x if mask is None else x * mask())
        if low is not None:
            ctx.save_for_backward(x, low)
        if unread:  # the product is known already; only its backward pass is wanted
            assert residual is not None
            return torch.empty_like(residual)
        out = linear(x, residual, training=True)
        if adapter is not None and low is not None:
            adapter.add(low, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        dx = ctx.linear.input_gradient(dy)
        adapter: LowRank | None = ctx.adapter
        if adapter is not None:
            x, low = ctx.saved_tensors
            mask = None if ctx.mask is None else ctx.mask()
            d_low = adapter.gradients(x if mask is None else x * mask, low, dy)
            down = adapter.group.down(adapter.values).to(dy.dtype)
            if mask is None:
                dx.addmm_(d_low, down)
            else:
                dx.addcmul_(torch.mm(d_low, down), mask)
        return dx, dy if ctx.has_residual else None, None, None, None, None


class Dropout(NamedTuple):
    """The share of an adapter's inputs that is dropped, and what the choice depends on besides block and matrix."""

    share: float
    seed: int
    version: int
    number: int  # of the micro-batch

    def mask(self, block: int, matrix: Matrix, x: Tensor) -> Tensor:
        """Factors (N, in) on an adapter's input: the same ones whoever computes them, and however often."""
        draws = torch.rand(x.shape, generator=generator(self.seed, self.version, self.number, block, matrix))
        return (draws >= self.share).to(x.device, x.dtype).div_(1 - self.share)


def trained_products(
    block: Block, adapters: Mapping[Matrix, LowRank], dropout: Dropout | None, *, again: bool = False
) -> Multiply:
    """Return a block's products for a pass in training; `again` leaves out the last, whose output was answered already.

    The adapters' gradients go to the `sums` that they have in the moment of the backward pass.
    """

    def multiply(matrix: Matrix, x: Tensor, residual: Tensor | None) -> Tensor:
        adapter = adapters.get(matrix)
        mask = None
        if dropout is not None and dropout.share and adapter is not None:
            mask = functools.partial(dropout.mask, block.index, matrix, x.detach())
        unread = again and matrix == "down"
        out: Tensor = _Product.apply(x, residual, getattr(block, matrix), adapter, mask, unread)  # type: ignore[no-untyped-call]
        return out

    return multiply
