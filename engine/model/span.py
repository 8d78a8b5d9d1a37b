"""A span of consecutive blocks on one device: steps over cached sessions.

Knows no tokens and no peers: hidden states go in, hidden states come out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.budget import CacheFormat
from engine.config import ModelConfig
from engine.device.kinds import kind_of
from engine.errors import EngineError, SessionError
from engine.model.attention import Plans, StepPlan, attend_cached, write_cache
from engine.model.block import Attend, Block, Multiply, WeightOptions, block_forward, build_block
from engine.model.cuda_graphs import MAX_AHEAD, DecodeGraphs, SpanParts, StepUnderWay, on_device
from engine.model.grid_tiles import TiledGrid
from engine.model.kv_cache import BlockCache, KVLease, KVPool, Segment
from engine.model.linear import GridLinear
from engine.model.onnx_block import SpanGraphs
from engine.model.onnx_session import SessionGraph, can_join
from engine.model.prompt_graphs import PromptGraphs
from engine.model.rope import RotaryTable
from engine.model.triton_trials import triton_grids_work
from engine.sources.base import ModelSource, block_part
from engine.sources.device_reader import DeviceReader
from engine.sources.tensors import PartReader

log = logging.getLogger("shoal.engine.onnx")

PREFILL_ROWS = 256  # rows of the largest step that a server runs
BlockAdapter = Callable[[Block], Multiply]  # the products of a block with an adapter
LoadProgress = Callable[[int, int], None]  # (blocks loaded, blocks in all)


@dataclass(frozen=True)
class SpanOptions(WeightOptions):
    """Weight options plus the memory of the KV cache, the number of blocks that it is laid out for, and its form."""

    kv_bytes: int = 0
    room: int = 0  # blocks that the cache is laid out for, if the span will grow; 0: no growth
    cache: CacheFormat = "own"


class SpanRunner:
    """Blocks [start, stop) of a model, loaded, with their KV cache."""

    def __init__(self, config: ModelConfig, start: int, blocks: Sequence[Block], options: SpanOptions) -> None:
        self.config = config
        self.start = start
        self.options = options
        self.blocks = list(blocks)
        self._cpu_graphs = SpanGraphs(config)
        self._prepare(blocks)
        room = max(len(blocks), options.room)
        self.pool = KVPool(config, room, options.kv_bytes, options.device, options.dtype, options.cache)
        self._rope = RotaryTable(config.rope, config.head_dim, options.device, options.dtype)
        self._session_graph: SessionGraph | None = None
        self._join()
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs = PromptGraphs(config, options.device, options.dtype)
        if kind_of(options.device).captures_steps:
            torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for every new length: 0.1 s and more
            self._graphs = self._new_graphs()

    def _new_graphs(self) -> DecodeGraphs:
        return DecodeGraphs(SpanParts(self.config, self.blocks, self.pool, self._rope))

    @property
    def stop(self) -> int:
        """One past the last loaded block."""
        return self.start + len(self.blocks)

    @property
    def is_complete(self) -> bool:
        """True if all blocks are loaded that the cache was laid out for."""
        return len(self.blocks) == len(self.pool.blocks)

    def grow(self, source: ModelSource) -> None:
        """Load one more block after the last; open sessions continue with the blocks that they use."""
        assert len(self.blocks) < len(self.pool.blocks), "a span grows as far as its cache was laid out for"
        new = list(_load_blocks(source, range(self.stop, self.stop + 1), self.options))
        self._prepare(new)
        self.blocks += new
        self._join()

    def _prepare(self, blocks: Sequence[Block]) -> None:
        """Compile what new blocks with weights in a grid are computed with."""
        for block in blocks:
            self._cpu_graphs.add(block)
            for linear in block.linears:
                if isinstance(linear, GridLinear) and isinstance(linear.grid, TiledGrid) and triton_grids_work():
                    from engine.model.grid_kernels import dense  # imports Triton, which a CPU does without

                    linear.convert = dense

    def _join(self) -> None:
        """Compile all blocks as one graph for steps of a single session, where a CPU can."""
        if self.is_complete and self._cpu_graphs.covers(self.blocks) and can_join(self.config, self.blocks, self.pool):
            weights = self._cpu_graphs.weights(self.blocks)
            try:
                self._session_graph = SessionGraph(self.config, self.blocks, weights, self.pool)
            except Exception as error:  # the runtime of an unknown machine can raise almost any exception
                log.warning("the blocks cannot be one graph on this machine (%s): they are computed one by one", error)

    def keep(self, start: int, stop: int) -> None:
        """Free all blocks but [start, stop), with their cache; sessions that use others must be closed before.

        A span that still grows ends to, and what its cache was laid out for is free too. The memory is the allocator's
        until `engine.hosting.release`. Steps run uncaptured until they are captured again.
        """
        assert self.start <= start < stop <= self.stop, "a span keeps blocks that it has"
        part = slice(start - self.start, stop - self.start)
        self._graphs = self._session_graph = None  # they hold the old blocks
        self.blocks = self.blocks[part]
        self._cpu_graphs.keep(start, stop)
        self._prompt_graphs.keep(start, stop)
        self.pool.keep(part)
        self.start = start
        self._join()
        if kind_of(self.options.device).captures_steps:
            self._graphs = self._new_graphs()

    @torch.inference_mode()
    def warm_up(self, *, chooses_tiles: bool = True) -> None:
        """Load library kernels for prompts, capture chunks and decoding steps, so that no reply waits for them.

        Also reserves the memory of the largest step, so that later ones need no more. Only for CUDA; the caller closes
        no sessions meanwhile. Without `chooses_tiles` the blocks are no real ones, and say nothing of the fastest.
        """
        if self._graphs is None:
            return
        if self._graphs.fused and chooses_tiles:
            from engine.model.tile_choice import choose_tiles  # imports Triton, which a CPU does without

            with on_device(self.options.device):
                choose_tiles(self.blocks, self.options.dtype)
        self._prompt_graphs.add(self.blocks)
        tokens = min(self.config.context_length, self.pool.free_tokens)
        chunk = min(PREFILL_ROWS, tokens)
        if chunk:
            lease = self.pool.open(tokens)
            lease.mark_written(0, tokens)
            for start, count in ((0, chunk), (tokens - chunk, chunk), (tokens - 2, min(2, tokens))):
                lease.length = max(start, 0)
                x = torch.zeros(count, self.config.hidden_size, device=self.options.device, dtype=self.options.dtype)
                self._run(x, [Segment(lease, lease.length, count)], slice(0, len(self.blocks)))
            lease.close()
        self._graphs.capture(slice(0, len(self.blocks)))

    @torch.inference_mode()
    def capture_pending(self) -> bool:
        """Capture one decode step that ran uncaptured so far; False if there is none left to capture."""
        return self._graphs is not None and self._graphs.capture_pending()

    @property
    def has_pending(self) -> bool:
        """True if `capture_pending` has something to do."""
        return self._graphs is not None and self._graphs.has_pending

    @property
    def weight_bytes(self) -> int:
        """Bytes of all loaded weights, with the copies that a CPU's products are computed with."""
        joined = self._session_graph  # read once: `keep` may run in another thread
        graphs = self._cpu_graphs.nbytes + (0 if joined is None else joined.nbytes)
        return sum(block.nbytes for block in self.blocks) + graphs

    def open(self, expected_tokens: int = 0) -> KVLease:
        """Lease cache for a new session.

        Raises `CacheFull` without room, and `SessionError` if the tokens exceed the model's context.
        """
        if expected_tokens > self.config.context_length:
            raise SessionError(
                f"{expected_tokens} tokens are more than this model's context of {self.config.context_length}"
            )
        return self.pool.open(expected_tokens)

    @torch.inference_mode()
    def step(
        self,
        hidden: Tensor,
        segments: Sequence[Segment],
        blocks: tuple[int, int] | None = None,
        adapter: BlockAdapter | None = None,
    ) -> Tensor:
        """Run rows of several sessions through the span, or a part [start, stop) of it: (N, hidden) -> (N, hidden).

        Either every session advances by its segment or, on an error, none does. The adapter is for all sessions of the
        step; a session must use the same part and the same adapter in every step. Raises `SessionError` for input that
        does not fit, `CacheFull` without room for the new tokens.
        """
        start, stop = blocks or (self.start, self.stop)
        if not self.start <= start < stop <= self.stop:
            raise SessionError(f"blocks {start}:{stop} were asked for, but {self.start}:{self.stop} are loaded")
        self._admit(hidden, segments)
        part = slice(start - self.start, stop - self.start)
        if self._graphs is not None and adapter is None and self._graphs.covers(segments):
            x = self._graphs.step(hidden, segments, part)
        else:
            x = self._run(hidden.to(self.options.device, self.options.dtype), list(segments), part, adapter)
        for segment in segments:
            segment.lease.length = segment.stop
        return x

    @torch.inference_mode()
    def launch(
        self, hidden: Tensor, segments: Sequence[Segment], blocks: tuple[int, int], *, ahead: bool = False
    ) -> StepUnderWay[Tensor] | None:
        """Start a step without waiting for it, if it is captured; the caller sets the leases' lengths at its end.

        With `ahead`, other steps ahead may be under way that write the tokens before. Raises as `step` does. None:
        nothing was started.
        """
        if self._graphs is None or not self._graphs.covers(segments):
            return None
        self._admit(hidden, segments, ahead=ahead)
        return self._graphs.launch(hidden, segments, slice(blocks[0] - self.start, blocks[1] - self.start))

    def _admit(self, hidden: Tensor, segments: Sequence[Segment], *, ahead: bool = False) -> None:
        """Check the input of a step and reserve cache for it; raises before any session has changed its length."""
        rows = sum(segment.count for segment in segments)
        if hidden.shape != (rows, self.config.hidden_size):
            raise SessionError(f"a step needs ({rows}, {self.config.hidden_size}) numbers, not {tuple(hidden.shape)}")
        for segment in segments:
            missing = segment.start - segment.lease.length
            if segment.count < 1 or not 0 <= missing <= (MAX_AHEAD - 1 if ahead else 0):
                raise SessionError(
                    f"a step at position {segment.start} does not continue a session of {segment.lease.length} tokens"
                )
            if segment.stop > self.config.context_length:
                raise SessionError(f"position {segment.stop} is past the context of {self.config.context_length}")
        for segment in segments:
            segment.lease.reserve(segment.stop)
            segment.lease.mark_written(segment.start, segment.stop)

    def _run(self, x: Tensor, segments: list[Segment], part: slice, adapter: BlockAdapter | None = None) -> Tensor:
        blocks, caches = self.blocks[part], self.pool.blocks[part]
        joined = self._session_graph if adapter is None and len(blocks) == len(self.blocks) else None
        if joined is not None and joined.covers(segments):
            turns = self._rope.turns(torch.arange(segments[0].start, segments[0].stop))
            return joined.run(x, *turns, segments[0])
        plan = StepPlan(segments, self.options.device, self.options.dtype)
        attends = {
            block.index: _cached(cache, plan, plan.for_window(self.config.window_of(block.index)))
            for block, cache in zip(blocks, caches, strict=True)
        }
        if adapter is None and self._cpu_graphs.covers(blocks):
            return self._cpu_graphs.run(x, *self._rope.turns(plan.positions), attends)
        rope = self._rope.at(plan.positions)
        if adapter is None and self._prompt_graphs.covers(blocks, len(x)):
            return self._prompt_graphs.run(x, rope, blocks, attends)
        for block in blocks:
            multiply = None if adapter is None else adapter(block)
            x = block_forward(block, self.config, x, rope, attends[block.index], multiply)
        return x


def _cached(cache: BlockCache, plan: StepPlan, plans: Plans) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        write_cache(cache, plan, k, v)
        return attend_cached(cache, plans, q)

    return attend


def load_span(
    source: ModelSource,
    start: int,
    stop: int,
    options: SpanOptions,
    progress: LoadProgress | None = None,
    before_cache: Callable[[], object] = lambda: None,
) -> SpanRunner:
    """Load blocks [start, stop) of a model onto a device; nothing else of its files is read.

    `before_cache` is called once the blocks are there, before the KV cache takes its memory.
    """
    if not 0 <= start < stop <= source.config.n_blocks:
        raise EngineError(f"blocks {start}:{stop} do not exist: the model has {source.config.n_blocks} blocks")
    blocks: list[Block] = []
    for block in _load_blocks(source, range(start, stop), options):
        blocks.append(block)
        if progress is not None:
            progress(len(blocks), stop - start)
    before_cache()
    return SpanRunner(source.config, start, blocks, options)


def _load_blocks(source: ModelSource, indices: range, options: SpanOptions) -> Iterator[Block]:
    reader = DeviceReader(options.device) if kind_of(options.device).direct_reads else None
    try:
        for index in indices:
            yield build_block(index, PartReader(source, block_part(index), reader), options)
    finally:
        if reader is not None:
            reader.close()
