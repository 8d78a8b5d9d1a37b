"""The two ends of a model, which the asker runs itself: tokens to hidden states, hidden states to logits.

`engine.swarm_ends` adds text and bytes to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.model.block import WeightOptions
from engine.model.linear import DenseLinear, packed
from engine.sources.base import EMBEDDING_PART, HEAD_PART, ModelSource
from engine.sources.tensors import load_part


class EmbeddingAndHead:
    """Embedding, final norm and output matrix (the embedding matrix itself if they are tied)."""

    def __init__(self, config: ModelConfig, embedding: Tensor, final_norm: Tensor, output: DenseLinear) -> None:
        self.config = config
        self._embedding = embedding
        self._final_norm = final_norm
        self._output = output

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Embed token ids: (N, hidden)."""
        return F.embedding(torch.tensor(token_ids, device=self._embedding.device), self._embedding)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Turn the last block's output (N, hidden) into float32 logits (N, vocab)."""
        hidden = hidden.to(self._embedding.device, self._embedding.dtype)
        normed = F.rms_norm(hidden, (self.config.hidden_size,), self._final_norm, self.config.norm_eps)
        return self._output(normed).float()


def load_ends(source: ModelSource, how: WeightOptions) -> EmbeddingAndHead:
    """Read the embedding and the head, never quantised; no blocks are read."""
    embedding = load_part(source, EMBEDDING_PART, how.dtype)["embedding"].to(how.device, how.dtype)
    head = load_part(source, HEAD_PART, how.dtype)
    output = head["output"].to(how.device, how.dtype) if "output" in head else embedding
    linear = DenseLinear(output, packed=packed(output) if how.packed else None)
    return EmbeddingAndHead(source.config, embedding, head["final_norm"].to(how.device, how.dtype), linear)
