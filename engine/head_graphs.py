"""Head, sampler and embedding of a card captured as CUDA graphs: one launch a pass instead of a dozen.

Only for replies whose next token depends on nothing but logits, temperature, top-k, top-p and min-p; others take the
uncaptured way of `engine.swarm_ends`. Both choose the same tokens. A pass may begin with outputs that the device is yet
to compute: it can go on without the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.cuda_graphs import BATCHES, MAX_AHEAD, UnderWay, captured, on_device, pinned
from engine.model.ends import EmbeddingAndHead
from engine.text.sampler import SampleRequest, draw, draw_columns, is_plain

log = logging.getLogger("shoal.engine.graphs")

# Larger batches take so long that launches do not matter, and sorting their logits takes memory.
GREEDY_BATCHES = tuple(rows for rows in BATCHES if rows <= 32)
DRAWN_BATCHES = tuple(rows for rows in BATCHES if rows <= 8)


@dataclass
class _HostBuffers:
    """Pinned host memory of one pass that is under way."""

    hidden: Tensor  # (rows, hidden)
    columns: Tensor  # (rows, 5): what `draw` needs of each request
    tokens: Tensor  # (rows,)
    embedded: Tensor  # (rows, hidden); unused if the embedding lies in host memory
    event: Any = None  # set by the device once both are written


@dataclass
class _PassBuffers:
    """Fixed memory of all passes of one batch size: on the device, and on the host for each that may be under way."""

    hidden: Tensor
    columns: Tensor
    tokens: Tensor
    embedded: Tensor
    hosts: list[_HostBuffers]  # taken in turn, the first next


class ChosenTokens(NamedTuple):
    """A pass under way: its tokens with their embeddings on the CPU, and their embeddings on the device."""

    read: UnderWay[tuple[list[int], Tensor]]
    embedded: Tensor | None


class HeadGraphs:
    """Captured passes of one model's ends, by batch size and by whether tokens are drawn."""

    def __init__(self, ends: EmbeddingAndHead) -> None:
        self._ends = ends
        self._embeds = ends.reaches_embedding
        self._buffers: dict[int, _PassBuffers] = {}
        self._captured: dict[tuple[int, bool], Callable[[], None]] = {}
        self._memory: Any = None  # memory pool shared by all graphs

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture passes of the usual batch sizes; without them, replies are only slower."""
        try:
            for batches, drawn in ((GREEDY_BATCHES, False), (DRAWN_BATCHES, True)):
                for rows in batches:
                    self._captured[rows, drawn] = self._capture(rows, drawn)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch raises errors of every kind
            log.warning("head and sampler cannot be captured on this device: %s", error)

    @torch.inference_mode()
    def launch(self, hidden: Tensor, requests: Sequence[SampleRequest]) -> ChosenTokens | None:
        """Start a pass for rows (N, hidden) on the CPU or on the device; None if it is not captured.

        At most `MAX_AHEAD` passes may be under way.
        """
        used = len(requests)
        kinds = {request.settings.temperature > 0 for request in requests}
        rows = next((size for size in BATCHES if size >= used), 0)
        drawn = True in kinds
        replay = self._captured.get((rows, drawn)) if len(kinds) == 1 and all(map(is_plain, requests)) else None
        if replay is None:
            return None
        ends, buffers = self._ends, self._buffers[rows]
        host = buffers.hosts.pop(0)
        buffers.hosts.append(host)
        with on_device(ends.device):
            if hidden.device == buffers.hidden.device:
                buffers.hidden[:used].copy_(hidden)
            else:
                host.hidden[:used].copy_(hidden)
                buffers.hidden.copy_(host.hidden, non_blocking=True)
            if drawn:
                host.columns[:used].copy_(draw_columns(requests, ends.config.vocab_size))
                buffers.columns.copy_(host.columns, non_blocking=True)
            replay()
            host.tokens.copy_(buffers.tokens, non_blocking=True)
            table = ends.embedding if ends.embedding.device.type == "cpu" else None
            if table is None:
                host.embedded.copy_(buffers.embedded, non_blocking=True)
            event = host.event = host.event or torch.cuda.Event()
            event.record()

        def read() -> tuple[list[int], Tensor]:
            ids = host.tokens[:used]
            return ids.tolist(), host.embedded[:used] if table is None else F.embedding(ids, table)

        return ChosenTokens(UnderWay(event.query, read), buffers.embedded[:used] if self._embeds else None)

    def _capture(self, rows: int, drawn: bool) -> Callable[[], None]:
        """Run a pass once to warm up, then capture it."""
        device, buffers = self._ends.device, self._buffers_of(rows)
        with on_device(device):
            graph = captured(lambda: self._run(buffers, drawn), device, self._memory)
        self._memory = self._memory or graph.pool()
        return graph.replay

    def _run(self, buffers: _PassBuffers, drawn: bool) -> None:
        """The pass itself, from `_PassBuffers.hidden` and `columns` to `tokens` and `embedded`."""
        logits = self._ends.logits(buffers.hidden)
        buffers.tokens.copy_(draw(logits, buffers.columns, filters=True) if drawn else logits.argmax(dim=-1))
        if self._embeds:
            self._ends.look_up(buffers.tokens, buffers.embedded)

    def _buffers_of(self, rows: int) -> _PassBuffers:
        if rows not in self._buffers:
            ends, device = self._ends, self._ends.device
            hidden = torch.zeros(rows, ends.config.hidden_size, dtype=ends.final_norm.dtype)
            columns = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]], dtype=torch.float64).repeat(rows, 1)
            tokens = torch.zeros(rows, dtype=torch.int64)
            embedded = torch.zeros(rows, ends.config.hidden_size, dtype=ends.embedding.dtype)
            parts = (hidden, columns, tokens, embedded)
            hosts = [_HostBuffers(*(pinned(part.clone(), device) for part in parts)) for _ in range(MAX_AHEAD + 1)]
            on_card = [part.to(device) for part in parts]
            self._buffers[rows] = _PassBuffers(on_card[0], on_card[1], on_card[2], on_card[3], hosts)
        return self._buffers[rows]
