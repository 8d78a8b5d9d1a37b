"""The two ends of a model in training: embeddings of token ids, and the loss with the gradient of its hidden states.

The asker runs them; the blocks between them may be anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.budget import LOSS_ROWS
from engine.model.ends import EmbeddingAndHead
from engine.pieces import Pieces

IGNORED = -100  # label of a token that does not count, as in PyTorch


class Loss(NamedTuple):
    """Summed loss of a micro-batch's counted tokens, and its gradient by the hidden states (N, hidden)."""

    total: float
    tokens: int
    gradient: Tensor


class TrainingEnds:
    """Embedding and loss of a model whose ends themselves are not trained; only rows that count pass the head."""

    def __init__(self, ends: EmbeddingAndHead) -> None:
        self._ends = ends

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed token ids (batch, length): (batch * length, hidden)."""
        return F.embedding(token_ids.reshape(-1).to(self._ends.embedding.device), self._ends.embedding)

    @torch.no_grad()
    def loss(self, hidden: Tensor, labels: Tensor, *, gradient: bool = True) -> Pieces[Loss]:
        """Compute the loss of the last hidden states (N, hidden) for labels (N,), where `IGNORED` rows do not count.

        The gradient is zero in rows that do not count, and empty if it is not asked for. It is that of the sum: the
        step divides by the counted tokens of all its micro-batches.
        """
        norm = self._ends.final_norm
        labels = labels.reshape(-1).to(norm.device)
        counted = (labels != IGNORED).nonzero().view(-1)
        hidden = hidden.to(norm.device, norm.dtype)
        whole = torch.zeros_like(hidden) if gradient else hidden.new_empty(0)
        total = torch.zeros((), dtype=torch.float64, device=norm.device)
        for rows in counted.split(LOSS_ROWS):
            loss, slice_gradient = self._loss(hidden[rows], labels[rows], gradient)
            total += loss
            if slice_gradient is not None:
                whole[rows] = slice_gradient
            yield
        return Loss(float(total), len(counted), whole)

    def _loss(self, x: Tensor, target: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
        norm, weight = self._ends.final_norm, self._ends.output.weight
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(gradient)
            normed = F.rms_norm(leaf, (x.shape[1],), norm, self._ends.config.norm_eps)
        logits = torch.mm(normed.detach(), weight.t()).float()  # (slice, vocab)
        chosen = logits.gather(1, target[:, None])
        largest = logits.amax(1, keepdim=True)
        exps = logits.sub_(largest).exp_()
        sums = exps.sum(1, keepdim=True)
        loss = (sums.log() + largest - chosen).double().sum()
        if not gradient:
            return loss, None
        d_logits = exps.div_(sums)  # the softmax
        d_logits.scatter_add_(1, target[:, None], torch.full_like(chosen, -1.0))
        d_normed = torch.mm(d_logits.to(weight.dtype), weight)
        (found,) = torch.autograd.grad(normed, leaf, d_normed)
        return loss, found
