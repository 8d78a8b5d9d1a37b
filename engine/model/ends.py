"""The two ends of a model, which the asker runs itself: tokens to hidden states, hidden states to logits.

`engine.swarm_ends` adds text and bytes to them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.model.block import WeightOptions
from engine.model.cuda_graphs import UnderWay, on_device, pinned
from engine.model.linear import DenseLinear, packed
from engine.model.onnx_graph import GridProduct, grids_pay
from engine.model.triton_trials import triton_works
from engine.sources.base import EMBEDDING_PART, HEAD_PART, ModelSource
from engine.sources.grid import GRID_KINDS
from engine.sources.tensors import PartReader, load_part

log = logging.getLogger("shoal.engine.ends")


class EmbeddingAndHead:
    """Embedding, final norm and output matrix (the embedding matrix itself if they are tied).

    `fast_output` is the product with the output matrix in the grid of its file, for logits computed on a CPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        final_norm: Tensor,
        output: DenseLinear,
        fast_output: GridProduct | None = None,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.final_norm = final_norm
        self.output = output
        self._fast_output = fast_output
        self._is_shared = False  # the card can read the embedding in host memory

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Embed token ids: (N, hidden)."""
        return F.embedding(torch.tensor(token_ids, device=self.embedding.device), self.embedding)

    @torch.inference_mode()
    def fetch(self, tokens: Tensor) -> tuple[list[int], Tensor]:
        """Return sampled tokens (N,) as ids, and their embeddings (N, hidden) on the CPU; waits for the device once."""
        if self.embedding.device.type == "cpu":
            tokens = tokens.cpu()
            return tokens.tolist(), F.embedding(tokens, self.embedding)
        embedded = F.embedding(tokens, self.embedding).to("cpu", non_blocking=True)
        return tokens.tolist(), embedded  # reading the ids waits for the copy before it

    def fetch_later(self, tokens: Tensor) -> UnderWay[tuple[list[int], Tensor]]:
        """Start what `fetch` does, without waiting for the device; only on CUDA."""
        ids = tokens.to("cpu", non_blocking=True)  # to pinned memory, so that nothing waits
        moved = None
        if self.embedding.device.type != "cpu":
            moved = F.embedding(tokens, self.embedding).to("cpu", non_blocking=True)
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tokens.device))

        def read() -> tuple[list[int], Tensor]:
            return ids.tolist(), F.embedding(ids, self.embedding) if moved is None else moved

        return UnderWay(event.query, read)

    def share_embedding(self) -> None:
        """Let the card that computes the logits read an embedding that lies in host memory, for `look_up`."""
        if self.embedding.device.type != "cpu" or not triton_works():
            return
        try:
            if not self.embedding.is_pinned():
                pinned(self.embedding, self.device)
            self._is_shared = True
        except RuntimeError as error:
            log.info("the embedding stays out of the card's reach: %s", error)

    @property
    def reaches_embedding(self) -> bool:
        """True if the card that computes the logits can embed tokens too."""
        return self._is_shared or self.embedding.device == self.device

    @torch.inference_mode()
    def look_up(self, tokens: Tensor, out: Tensor) -> None:
        """Start to embed tokens (N,) that the card is about to know, into `out` (N, hidden) there."""
        assert self.reaches_embedding, "the embedding is out of the card's reach"
        if self.embedding.device == tokens.device:
            torch.index_select(self.embedding, 0, tokens, out=out)
            return
        from engine.model import triton_kernels as kernels

        with on_device(tokens.device):
            kernels.look_up(tokens, self.embedding, out)

    @property
    def device(self) -> torch.device:
        """The device that computes the logits."""
        return self.output.weight.device

    def moved(self, how: WeightOptions) -> EmbeddingAndHead:
        """Return the same ends on another device; the embedding of an untied model stays on the CPU."""
        tied = self.output.weight is self.embedding
        output = self.output.weight.to(how.device, how.dtype)
        linear = DenseLinear(output, packed=packed(output) if how.packed else None)
        embedding = output if tied else self.embedding.to("cpu", how.dtype)
        return EmbeddingAndHead(self.config, embedding, self.final_norm.to(how.device, how.dtype), linear)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Turn the last block's output (N, hidden) into float32 logits (N, vocab)."""
        hidden = hidden.to(self.final_norm.device, self.final_norm.dtype, non_blocking=True)
        normed = F.rms_norm(hidden, (self.config.hidden_size,), self.final_norm, self.config.norm_eps)
        if self._fast_output is not None and normed.device.type == "cpu" and normed.dtype == torch.float32:
            return self._fast_output(normed)
        return self.output(normed).float()


def load_ends(source: ModelSource, how: WeightOptions) -> EmbeddingAndHead:
    """Read the embedding and the head, never quantised here; no blocks are read.

    With "stored" weights on a CPU, logits are computed with the grid of the file, if it has one and that is faster. A
    model whose output matrix is not its embedding keeps the embedding on the CPU: looking up a row needs no device.
    """
    embedding = load_part(source, EMBEDDING_PART, how.dtype)["embedding"].to(how.dtype)
    head = load_part(source, HEAD_PART, how.dtype)
    if "output" in head:
        output = head["output"].to(how.device, how.dtype)
    else:
        output = embedding = embedding.to(how.device)
    linear = DenseLinear(output, packed=packed(output) if how.packed else None)
    fast = None
    if how.quantisation == "stored" and how.device.type == "cpu" and how.dtype == torch.float32:
        part, role = (HEAD_PART, "output") if "output" in head else (EMBEDDING_PART, "embedding")
        fast = _grid_product(PartReader(source, part), role)
    return EmbeddingAndHead(source.config, embedding, head["final_norm"].to(how.device, how.dtype), linear, fast)


def _grid_product(reader: PartReader, role: str) -> GridProduct | None:
    """Return the product with a matrix in its file's grid; None if it has none, or if torch is faster here."""
    if reader.kinds[role] not in GRID_KINDS or not grids_pay():
        return None
    grid = reader.grid(role)
    return None if grid is None else GridProduct(grid)
