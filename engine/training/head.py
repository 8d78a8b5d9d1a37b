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

IGNORED = -100  # label of a token that does not count, as in PyTorch


class Loss(NamedTuple):
    """Summed loss of a micro-batch's counted tokens, and its gradient by the hidden states (N, hidden)."""

    total: float
    tokens: int
    gradient: Tensor


class TrainingEnds:
    """Embedding and loss of a model whose ends themselves are not trained."""

    def __init__(self, ends: EmbeddingAndHead) -> None:
        self._ends = ends

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed token ids (batch, length): (batch * length, hidden)."""
        return F.embedding(token_ids.reshape(-1).to(self._ends.embedding.device), self._ends.embedding)

    def loss(self, hidden: Tensor, labels: Tensor, *, gradient: bool = True) -> Loss:
        """Compute the loss of the last hidden states (N, hidden) for labels (N,), where `IGNORED` rows do not count.

        The gradient is zero in rows that do not count, and empty if it is not asked for. It is that of the sum: the
        step divides by the counted tokens of all its micro-batches.
        """
        loss = self.begin_loss(hidden, labels, gradient=gradient)
        while loss.advance():
            pass
        return loss.result()

    def begin_loss(self, hidden: Tensor, labels: Tensor, *, gradient: bool = True) -> LossPass:
        """Begin to compute a loss slice by slice, so that other work of the device can go between them."""
        return LossPass(self._ends, hidden, labels, gradient)


class LossPass:
    """The loss of one micro-batch on its way through the head; only rows that count pass through it."""

    @torch.no_grad()
    def __init__(self, ends: EmbeddingAndHead, hidden: Tensor, labels: Tensor, gradient: bool) -> None:
        self._ends, self._gradient = ends, gradient
        norm = ends.final_norm
        labels = labels.reshape(-1).to(norm.device)
        self._counted = (labels != IGNORED).nonzero().view(-1)
        self._hidden = hidden.to(norm.device, norm.dtype)
        self._is_whole = len(self._counted) == len(labels)
        rows = self._hidden if self._is_whole else self._hidden.index_select(0, self._counted)
        targets = labels[self._counted]
        self._slices = list(zip(rows.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True))
        self._total = torch.zeros((), dtype=torch.float64, device=norm.device)
        self._gradients: list[Tensor] = []
        self._next = 0

    @torch.no_grad()
    def advance(self) -> bool:
        """Compute the next slice; False if that was the last one, or there was none."""
        if self._next < len(self._slices):
            self._compute(*self._slices[self._next])
            self._next += 1
        return self._next < len(self._slices)

    def _compute(self, x: Tensor, target: Tensor) -> None:
        norm, weight = self._ends.final_norm, self._ends.output.weight
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(self._gradient)
            normed = F.rms_norm(leaf, (x.shape[1],), norm, self._ends.config.norm_eps)
        logits = torch.mm(normed.detach(), weight.t()).float()  # (slice, vocab)
        chosen = logits.gather(1, target[:, None])
        largest = logits.amax(1, keepdim=True)
        exps = logits.sub_(largest).exp_()
        sums = exps.sum(1, keepdim=True)
        self._total += (sums.log() + largest - chosen).double().sum()
        if self._gradient:
            d_logits = exps.div_(sums)  # the softmax
            d_logits.scatter_add_(1, target[:, None], torch.full_like(chosen, -1.0))
            d_normed = torch.mm(d_logits.to(weight.dtype), weight)
            self._gradients += torch.autograd.grad(normed, leaf, d_normed)

    @torch.no_grad()
    def result(self) -> Loss:
        """Return the loss once all slices are computed."""
        assert self._next == len(self._slices), "some slices are not computed yet"
        tokens = len(self._counted)
        if not self._gradient:
            return Loss(float(self._total), tokens, self._hidden.new_empty(0))
        if self._is_whole and self._gradients:
            return Loss(float(self._total), tokens, torch.cat(self._gradients))
        whole = torch.zeros_like(self._hidden)
        if self._gradients:
            whole[self._counted] = torch.cat(self._gradients)
        return Loss(float(self._total), tokens, whole)
