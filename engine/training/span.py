"""Blocks in training: passes forwards and backwards over micro-batches, summed gradients, and versions of adapters.

A forward pass keeps only each block's input; the backward pass computes one block at a time again, unless the budget
has room to keep what autograd needs. Both passes run the same operations, so the gradient is that of the answer that
was given, bit for bit, and it does not matter how the blocks are divided among spans.

Rules that a job relies on:

- a micro-batch is counted once for each block, however often it is run;
- a step makes the next version beside the current one; `commit` replaces it, `revert` drops it;
- the model's own weights are read and never written.

Not thread-safe: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.budget import block_graph_bytes, unquantised
from engine.config import ModelConfig
from engine.errors import NotFinite, TrainingError, TrainingFull
from engine.model.attention import attend_whole
from engine.model.block import Block, Matrix, WeightOptions, block_forward
from engine.model.rope import RotaryTable
from engine.training.adapters import AdapterSettings, Group, drawn, layout
from engine.training.optimiser import AdamW, Moments, adamw_step, are_moments
from engine.training.products import Dropout, LowRank, trained_products

_MAGIC = b"shoal adapter 1\n"


class _TrainedBlock:
    """One block with its adapter: the current state, the next one between a step and its commit, and the sums."""

    def __init__(self, block: Block, groups: tuple[Group, ...], settings: AdapterSettings, values: Tensor) -> None:
        self.block = block
        self.sums = torch.zeros_like(values)
        self.counted: set[int] = set()  # micro-batches in the sums
        self.next: Moments | None = None
        self.adapters: dict[Matrix, LowRank] = {
            group.matrix: LowRank(group, values, None, settings.scale) for group in groups
        }
        self.state = Moments.fresh(values)

    def set_state(self, state: Moments) -> None:
        """Make this state the current one; drop the next one and all sums."""
        self.state, self.next = state, None
        self.sums.zero_()
        self.counted.clear()
        for adapter in self.adapters.values():
            adapter.values = state.values

    def count(self, counts: bool) -> None:
        """Let the following backward pass add gradients to the sums, or not."""
        for adapter in self.adapters.values():
            adapter.sums = self.sums if counts else None


@dataclass
class _Pass:
    """What a forward pass left for the backward pass: each block's input, and its output where the graph is kept."""

    batch: int
    first: int
    inputs: list[Tensor]
    outputs: list[Tensor | None]


class TrainedSpan:
    """Consecutive blocks of a model with the adapters that a job trains; knows no tokens and no peers.

    `input_bytes` bounds the inputs that passes keep, and `graph_bytes` what is kept beyond them to save computing a
    block again; None sets no bound.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: Sequence[Block],
        settings: AdapterSettings,
        options: WeightOptions,
        *,
        input_bytes: int | None = None,
        graph_bytes: int | None = None,
        optimiser: AdamW | None = None,
    ) -> None:
        self.config = config
        self.settings = settings
        self.options = options
        self.start = blocks[0].index
        self.version = 0
        self._input_bytes, self._graph_bytes = input_bytes, graph_bytes
        self._optimiser = optimiser or AdamW()
        self._rope = RotaryTable(config.rope, config.head_dim, options.device, options.dtype)
        self._precision = unquantised(options.dtype.itemsize)
        self._passes: dict[tuple[int, int], _Pass] = {}  # by micro-batch and way
        groups = layout(config, settings.rank, settings.targets)
        self._blocks = [
            _TrainedBlock(block, groups, settings, drawn(settings, config, block.index).to(options.device))
            for block in blocks
        ]

    @property
    def stop(self) -> int:
        """One past the last block."""
        return self.start + len(self._blocks)

    @property
    def blocks(self) -> range:
        """Indices of the blocks."""
        return range(self.start, self.stop)

    @property
    def numbers(self) -> int:
        """Trained numbers of one block."""
        return self._blocks[0].sums.numel()

    # Passes

    def has_room(self, rows: int, blocks: tuple[int, int] | None = None) -> bool:
        """True if a micro-batch of so many rows fits into the memory for inputs."""
        start, stop = self._range(blocks)
        return (
            self._input_bytes is None
            or self._kept_inputs + (stop - start) * self._row_bytes * rows <= self._input_bytes
        )

    @torch.no_grad()
    def forward(
        self, number: int, x: Tensor, batch: int, blocks: tuple[int, int] | None = None, *, way: int = 0
    ) -> Tensor:
        """Run micro-batch `number` through the span, or through blocks [start, stop) of it: (N, hidden) -> (N, hidden).

        The rows are `batch` sequences of one length. A repeated number replaces the earlier pass on the same way: what
        others send under this number on theirs does not touch it. Raises `TrainingError` for input that does not fit,
        `NotFinite` for NaN, and `TrainingFull` without memory.
        """
        start, stop = self._range(blocks)
        self._admit(x, "input")
        self._check_batch(x.shape[0], batch)
        self.discard(number, way)
        if not self.has_room(x.shape[0], (start, stop)):
            raise TrainingFull(f"no memory to keep another micro-batch of {x.shape[0]} rows")
        x = self._on_device(x)
        rope = self._turns(x.shape[0], batch)
        made = self._passes[number, way] = _Pass(batch, start, [], [])
        for index in range(start, stop):
            keep = self._keeps_graph(x.shape[0])
            with torch.set_grad_enabled(keep):
                leaf = x.detach().requires_grad_(keep)
                y = self._run(index, number, leaf, batch, rope)
            made.inputs.append(leaf)
            made.outputs.append(y if keep else None)
            x = y.detach()
        return x

    @torch.no_grad()
    def backward(self, number: int, dy: Tensor, uncounted: Collection[int] = (), *, way: int = 0) -> Tensor:
        """Run a micro-batch backwards from the gradient of its output; return that of its input, both (N, hidden).

        The adapters' gradients are added to the sums of each block that has not counted this micro-batch yet and is not
        among the `uncounted`. Raises `TrainingError` if its forward pass is not here, `NotFinite` for NaN, also if the
        sums become such: then all of this version is dropped.
        """
        kept = self._passes.get((number, way))
        if kept is None:
            raise TrainingError(f"micro-batch {number} has no forward pass here: send it forward first")
        self._admit(dy, "gradient")
        if dy.shape != kept.inputs[0].shape:
            raise TrainingError(f"micro-batch {number} has {kept.inputs[0].shape[0]} rows, not {dy.shape[0]}")
        del self._passes[number, way]
        dy = self._on_device(dy)
        rope = self._turns(dy.shape[0], kept.batch)
        try:
            for index in reversed(range(kept.first, kept.first + len(kept.inputs))):
                dy = self._back(index, number, (kept.inputs.pop(), kept.outputs.pop()), dy, kept.batch, rope, uncounted)
        except BaseException:
            self.clear()  # a block may have counted half of it
            raise
        return dy

    @torch.no_grad()
    def evaluate(self, x: Tensor, batch: int) -> Tensor:
        """Run rows through the span without keeping anything and without dropout; raises as `forward` does."""
        self._admit(x, "input")
        self._check_batch(x.shape[0], batch)
        x = self._on_device(x)
        rope = self._turns(x.shape[0], batch)
        for index in self.blocks:
            x = self._run(index, None, x, batch, rope)
        return x

    def discard(self, number: int, way: int = 0) -> None:
        """Drop what a micro-batch's forward pass has kept; unknown numbers are ignored."""
        self._passes.pop((number, way), None)

    def counted(self, block: int) -> frozenset[int]:
        """Micro-batches that this version's sums of a block contain."""
        return frozenset(self._at(block).counted)

    def clear(self) -> None:
        """Drop all passes and sums of this step, and the next version if there is one."""
        self._passes.clear()
        for each in self._blocks:
            each.set_state(each.state)

    # Steps

    def squared_norms(self) -> dict[int, float]:
        """Squared norm of each block's summed gradients, in float64; not finite if a gradient is not."""
        return {each.block.index: float(each.sums.double().square().sum()) for each in self._blocks}

    def gradient(self, block: int) -> Tensor:
        """A copy of the summed gradients of a block's adapter, on the CPU."""
        return self._at(block).sums.cpu().clone()

    def set_gradient(self, block: int, gradient: Tensor) -> None:
        """Replace the summed gradients of a block, by those that all its holders have agreed on."""
        self._at(block).sums.copy_(gradient)

    def take_gradient(self, block: int) -> Tensor:
        """Return the summed gradients of a block as `gradient` does, and begin new sums, which may count all again."""
        own = self._at(block)
        taken = own.sums.cpu().clone()
        own.sums.zero_()
        own.counted.clear()
        return taken

    @torch.no_grad()
    def step(self, rate: float, scale: float, clip: float = 1.0) -> None:
        """Make the next version from the sums times `scale` and `clip`; a repeated step replaces it.

        Raises `NotFinite` and makes nothing if the gradients or the result are not finite.
        """
        made = []
        for each in self._blocks:
            made.append(adamw_step(each.state, each.sums * (scale * clip), self.version + 1, rate, self._optimiser))
            if not bool(torch.isfinite(made[-1].values).all()):
                raise NotFinite(f"the step of block {each.block.index} gives numbers that are not finite")
        for each, state in zip(self._blocks, made, strict=True):
            each.next = state

    def commit(self) -> None:
        """Make the next version the current one; sums and passes of the old one are dropped."""
        if any(each.next is None for each in self._blocks):
            raise TrainingError(f"version {self.version} has no step to commit")
        self._passes.clear()
        for each in self._blocks:
            assert each.next is not None
            each.set_state(each.next)
        self.version += 1

    def revert(self) -> None:
        """Drop the next version; the current one and its sums stay."""
        for each in self._blocks:
            each.next = None

    # State

    def state(self, block: int) -> bytes:
        """Adapter and moments of a block in the current version, as bytes."""
        return _pack(self.version, self._at(block).state)

    def load(self, states: Mapping[int, bytes]) -> None:
        """Replace the current version of all blocks, all by states of one version; sums and passes are dropped.

        Raises `TrainingError` and changes nothing if a block is missing, the versions differ or bytes are damaged.
        """
        if set(states) != set(self.blocks):
            raise TrainingError(f"states of blocks {sorted(states)} do not make blocks {self.start}:{self.stop}")
        unpacked = [unpack_state(states[index], self._at(index).state.values.numel()) for index in self.blocks]
        if len({version for version, _ in unpacked}) != 1:
            raise TrainingError("the states of the blocks are of different versions")
        self._passes.clear()
        self.version = unpacked[0][0]
        for each, (_, state) in zip(self._blocks, unpacked, strict=True):
            each.set_state(Moments(*(vector.to(each.sums.device) for vector in state)))

    def values(self, block: int) -> Tensor:
        """A copy of the current weights of a block's adapter, on the CPU."""
        return self._at(block).state.values.cpu().clone()

    def set_values(self, block: int, values: Tensor) -> None:
        """Start from these weights of a block's adapter, with fresh moments; its sums are dropped."""
        own = self._at(block)
        own.set_state(Moments.fresh(values.to(own.sums).clone()))

    # Inside

    @property
    def _row_bytes(self) -> int:
        return self.config.hidden_size * self._precision.compute_bytes

    @property
    def _kept_inputs(self) -> int:
        return sum(sum(x.nbytes for x in each.inputs) for each in self._passes.values())

    def _keeps_graph(self, rows: int) -> bool:
        if self._graph_bytes is None:
            return True
        kept = sum(
            block_graph_bytes(self.config, self._precision, x.shape[0])
            for each in self._passes.values()
            for x, y in zip(each.inputs, each.outputs, strict=True)
            if y is not None
        )
        return kept + block_graph_bytes(self.config, self._precision, rows) <= self._graph_bytes

    def _at(self, block: int) -> _TrainedBlock:
        if block not in self.blocks:
            raise TrainingError(f"block {block} is not trained here: blocks {self.start}:{self.stop} are")
        return self._blocks[block - self.start]

    def _range(self, blocks: tuple[int, int] | None) -> tuple[int, int]:
        start, stop = blocks or (self.start, self.stop)
        if not self.start <= start < stop <= self.stop:
            raise TrainingError(f"blocks {start}:{stop} were asked for, but {self.start}:{self.stop} are trained here")
        return start, stop

    def _admit(self, rows: Tensor, what: str) -> None:
        """Check the numbers that arrive for a pass, which runs at the current version only."""
        if self._blocks[0].next is not None:
            raise TrainingError(f"a step of version {self.version} waits to be committed: no passes until then")
        if rows.dim() != 2 or rows.shape[1] != self.config.hidden_size or not rows.shape[0]:
            raise TrainingError(f"the {what} is {tuple(rows.shape)}, not (rows, {self.config.hidden_size})")
        if not bool(torch.isfinite(rows).all()):
            raise NotFinite(f"the {what} has numbers that are not finite")

    def _check_batch(self, rows: int, batch: int) -> None:
        if batch < 1 or rows % batch or rows // batch > self.config.context_length:
            raise TrainingError(f"{rows} rows do not make {batch} sequences of one length within the context")

    def _on_device(self, rows: Tensor) -> Tensor:
        moved = rows.to(self.options.device, self.options.dtype)
        # autograd cannot save a tensor that was made in inference mode
        return moved.clone() if moved.is_inference() else moved.detach()

    def _turns(self, rows: int, batch: int) -> tuple[Tensor, Tensor]:
        return self._rope.at(torch.arange(rows // batch, device=self.options.device).repeat(batch))

    def _run(
        self,
        index: int,
        number: int | None,
        x: Tensor,
        batch: int,
        rope: tuple[Tensor, Tensor],
        *,
        again: bool = False,
    ) -> Tensor:
        own = self._at(index)
        window = self.config.window_of(index)
        dropout = None if number is None else Dropout(self.settings.dropout, self.settings.seed, self.version, number)
        multiply = trained_products(own.block, own.adapters, dropout, again=again)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_whole(q, k, v, batch, window)

        return block_forward(own.block, self.config, x, rope, attend, multiply)

    def _back(
        self,
        index: int,
        number: int,
        kept: tuple[Tensor, Tensor | None],
        dy: Tensor,
        batch: int,
        rope: tuple[Tensor, Tensor],
        uncounted: Collection[int],
    ) -> Tensor:
        own, (leaf, y) = self._at(index), kept
        if y is None:
            with torch.enable_grad():
                y = self._run(index, number, leaf.requires_grad_(), batch, rope, again=True)
        counts = index not in uncounted and number not in own.counted
        own.count(counts)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        if counts:
            own.counted.add(number)
            if not bool(torch.isfinite(own.sums).all()):  # products may have no place in 16 bits where `dx` has
                raise NotFinite(f"the gradient of micro-batch {number} makes sums that are not finite")
        return dx


def _pack(version: int, state: Moments) -> bytes:
    """Bytes of a block's state: a magic, the version and the number of weights, then three float32 vectors."""
    return b"".join(_parts(version, state))


def _parts(version: int, state: Moments) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a block's state one after the other, without copying its vectors."""
    yield _MAGIC + version.to_bytes(8, "little") + state.values.numel().to_bytes(8, "little")
    for vector in state:
        yield vector.cpu().numpy().astype("<f4", copy=False).data


def unpack_state(data: bytes, count: int) -> tuple[int, Moments]:
    """Return the version and the state, on the CPU, in the bytes of a block whose adapter has `count` weights.

    Raises `TrainingError` if they are not such a state.
    """
    header = len(_MAGIC) + 16
    if len(data) != header + 12 * count or data[: len(_MAGIC)] != _MAGIC:
        raise TrainingError(f"{len(data)} bytes are not the state of an adapter of {count} weights a block")
    version, held = (int.from_bytes(data[at : at + 8], "little") for at in (len(_MAGIC), len(_MAGIC) + 8))
    numbers = torch.frombuffer(bytearray(data[header:]), dtype=torch.float32)
    if held != count or not bool(torch.isfinite(numbers).all()):
        raise TrainingError("the state of an adapter is damaged")
    state = Moments(*(part.clone() for part in numbers.split(count)))
    if not are_moments(state.first, state.second):
        raise TrainingError("the moments of an adapter are none that training makes")
    return version, state
