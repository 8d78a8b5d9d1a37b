"""A finished adapter in replies: the products of served blocks with what the adapter adds to them.

Given to `SpanRunner.step` for the sessions that use it; sessions without an adapter are computed as if there were none.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from engine.config import ModelConfig
from engine.errors import TrainingError
from engine.model.block import Block, Matrix, Multiply, WeightOptions
from engine.training.adapters import layout
from engine.training.peft_format import Adapter
from engine.training.products import LowRank


class ServedAdapter:
    """The adapters of some blocks, each on the device that serves the block, in its dtype."""

    def __init__(self, adapter: Adapter, config: ModelConfig, places: Mapping[int, WeightOptions]) -> None:
        settings = adapter.settings
        groups = layout(config, settings.rank, settings.targets)
        if missing := set(places) - set(adapter.vectors):
            raise TrainingError(f"the adapter has no weights for block {min(missing)}")
        self._blocks: dict[int, dict[Matrix, LowRank]] = {}
        for block, options in places.items():
            vector = adapter.vectors[block].to(options.device, options.dtype)
            self._blocks[block] = {group.matrix: LowRank(group, vector, None, settings.scale) for group in groups}

    @property
    def nbytes(self) -> int:
        """Bytes of the adapter's weights on all devices."""
        return sum(next(iter(adapters.values())).values.nbytes for adapters in self._blocks.values())

    def __call__(self, block: Block) -> Multiply:
        """Return the products of a block with the adapter; raises `TrainingError` for one of other blocks."""
        adapters = self._blocks.get(block.index)
        if adapters is None:
            raise TrainingError(f"the adapter was loaded for other blocks than {block.index}")

        def multiply(matrix: Matrix, x: Tensor, residual: Tensor | None) -> Tensor:
            out = block.multiply(matrix, x, residual)
            if (adapter := adapters.get(matrix)) is not None:
                adapter.add(adapter.low(x), out)
            return out

        return multiply
