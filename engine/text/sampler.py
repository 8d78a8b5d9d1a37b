"""Samples the next token: a pure function of logits, history, settings and position.

The random number for a position depends only on the seed and the position, so a reply that is replayed after a failure
draws the same numbers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.errors import EngineError

HEAD = 512  # tokens that are sorted first; most draws need no more
_COLDEST = 1e-6  # logits divided by less could become infinite


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; temperature 0 is greedy. Raises `EngineError` for values out of range."""

    temperature: float = 0.7
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to the logits of these tokens
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time that the reply has it
    presence_penalty: float = 0.0  # and once if it has it at all

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.temperature <= 100, "temperature must be between 0 and 100"),
            (self.top_k >= 0, "top_k must be 0 or more"),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p must be between 0 and 1"),
            (0 < self.repetition_penalty <= 100, "repetition_penalty must be above 0 and at most 100"),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty must be between -2 and 2"),
            (-2 <= self.presence_penalty <= 2, "presence_penalty must be between -2 and 2"),
        )
        for passed, problem in checks:
            if not passed:
                raise EngineError(problem)

    @property
    def looks_back(self) -> bool:
        """True if what is drawn depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.counts_tokens

    @property
    def counts_tokens(self) -> bool:
        """True if it depends on how often the reply has a token."""
        return bool(self.frequency_penalty or self.presence_penalty)


class SampleRequest(NamedTuple):
    """One row of logits to sample from: the tokens before it, its settings, and its position in the text."""

    history: Sequence[int]
    settings: Sampling
    position: int
    allowed: bytes | None = None  # one bit for each token that may be drawn; None: all may
    prompt_tokens: int = 0  # of the history; the rest is the reply


def sample(logits: Tensor, history: Sequence[int], settings: Sampling, position: int) -> int:
    """Return the next token for logits (vocab,) after the tokens of `history`."""
    return int(sample_rows(logits[None], [SampleRequest(history, settings, position)]))


def sample_rows(logits: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """Return the next token of each row of logits (N, vocab): (N,) on the same device, computed without waiting."""
    logits = logits.float()
    if any(request.settings.repetition_penalty != 1.0 and request.history for request in requests):
        rows = [
            penalised(row, request.history, request.settings.repetition_penalty) if request.history else row
            for row, request in zip(logits, requests, strict=True)
        ]
        logits = torch.stack(rows)
    if any(request.settings.counts_tokens for request in requests):
        logits = logits - _penalties(requests, logits)
    if any(request.settings.logit_bias for request in requests):
        logits = logits + _bias(requests, logits)
    if any(request.allowed is not None for request in requests):
        logits = logits.masked_fill(~_allowed(requests, logits), -torch.inf)
    drawn = [row for row, request in enumerate(requests) if request.settings.temperature > 0]
    if not drawn:
        return logits.argmax(dim=-1)
    if len(drawn) == len(requests):
        return _draw(logits, requests)
    tokens = logits.argmax(dim=-1)
    tokens[drawn] = _draw(logits[drawn], [requests[row] for row in drawn])
    return tokens


def _bias(requests: Sequence[SampleRequest], logits: Tensor) -> Tensor:
    """Return what each row's settings add to its logits: (N, vocab)."""
    added = torch.zeros(logits.shape)
    for row, request in enumerate(requests):
        for token, bias in request.settings.logit_bias:
            added[row, token] = bias
    return added.to(logits.device)


def _penalties(requests: Sequence[SampleRequest], logits: Tensor) -> Tensor:
    """Return what each row's settings subtract from the logits of tokens that its reply has: (N, vocab)."""
    taken = torch.zeros(logits.shape)
    for row, request in enumerate(requests):
        counts = Counter(request.history[request.prompt_tokens :]) if request.settings.counts_tokens else {}
        if counts:
            tokens, times = torch.tensor(list(counts)), torch.tensor(list(counts.values()), dtype=torch.float32)
            settings = request.settings
            taken[row, tokens] = settings.frequency_penalty * times + settings.presence_penalty
    return taken.to(logits.device)


def _allowed(requests: Sequence[SampleRequest], logits: Tensor) -> Tensor:
    """Return which tokens each row may draw: (N, vocab) of bool, on the device of the logits."""
    width = logits.shape[1]
    allowed = np.ones((len(requests), width), np.bool_)
    for row, request in enumerate(requests):
        if request.allowed is not None:
            bits = np.unpackbits(np.frombuffer(request.allowed, np.uint8), count=width, bitorder="little")
            allowed[row] = bits.view(np.bool_)
    return torch.from_numpy(allowed).to(logits.device)


def is_plain(request: SampleRequest) -> bool:
    """True if logits are taken as they are: nothing is forbidden, biased or penalised."""
    return request.allowed is None and not request.settings.logit_bias and not request.settings.looks_back


def draw_columns(requests: Sequence[SampleRequest], vocab: int) -> Tensor:
    """Return what `draw` needs of each request: (N, 5), in one tensor because it is uploaded at once."""
    return torch.tensor(
        [
            (s.temperature, s.top_k or vocab, s.top_p, s.min_p, uniform(s.seed, position))
            for s, position in ((request.settings, request.position) for request in requests)
        ],
        dtype=torch.float64,
    )


def _draw(logits: Tensor, requests: Sequence[SampleRequest], head: int = HEAD) -> Tensor:
    """Draw a token for each row (N, vocab) by its request's random number: (N,)."""
    columns = draw_columns(requests, logits.shape[1]).to(logits.device, non_blocking=True)
    filters = any(s.top_p < 1 or s.min_p > 0 for s in (request.settings for request in requests))
    masked = any(request.allowed is not None for request in requests)
    return draw(logits, columns, filters=filters, masked=masked, head=head)


def draw(logits: Tensor, columns: Tensor, *, filters: bool, masked: bool = False, head: int = HEAD) -> Tensor:
    """Draw a token for each row (N, vocab) by its columns (N, 5): (N,).

    Without `filters` no row has top-p or min-p; with `masked` some tokens may not be drawn.
    """
    temperature, top_k, top_p, min_p, number = columns.split(1, dim=1)
    probabilities = torch.softmax(logits / temperature.float().clamp(min=_COLDEST), dim=-1)
    likeliest = _likeliest(probabilities, columns, head) if logits.device.type == "cpu" else None
    probabilities, tokens = likeliest or probabilities.sort(descending=True, stable=True)
    mass = probabilities.double().cumsum(-1)
    # Each filter is applied to the full distribution: the first top_k, the smallest head whose mass reaches top_p, and
    # those of at least min_p times the highest.
    count = top_k.long()
    if filters:
        before = mass - probabilities.double()
        within = (before < top_p).sum(-1, keepdim=True)
        count = torch.where(top_p < 1, torch.minimum(count, within), count)
        likely = (probabilities >= min_p.float() * probabilities[:, :1]).sum(-1, keepdim=True)
        count = torch.minimum(count, likely)
    if masked:  # no rounding may reach a token that is not allowed
        count = torch.minimum(count, (probabilities > 0).sum(-1, keepdim=True))
    last = count.clamp(1, probabilities.shape[1]) - 1
    draw = number * mass.gather(1, last)
    chosen = torch.minimum(torch.searchsorted(mass, draw, right=True), last)
    return tokens.gather(1, chosen).squeeze(1)


def _likeliest(probabilities: Tensor, columns: Tensor, head: int) -> tuple[Tensor, Tensor] | None:
    """Return the `head` most likely tokens of each row, sorted, if no row's filters leave others; None if one does.

    Sorting a whole vocabulary takes most of a draw's time on a CPU; on a GPU the look at the result would cost more.
    """
    if probabilities.shape[1] <= 4 * head:
        return None
    top, tokens = probabilities.topk(head, dim=-1, sorted=False)
    tokens, order = tokens.sort(dim=-1)  # first by token, so that equal probabilities stay in that order
    top, order = top.gather(1, order).sort(descending=True, stable=True)
    # Of those as likely as the last, some may be missing: only the others are sure to be complete.
    complete = (top > top[:, -1:]).sum(-1, keepdim=True)
    _, top_k, top_p, min_p, _ = columns.split(1, dim=1)
    mass = top.double().cumsum(-1).gather(1, (complete - 1).clamp_min(0))
    enough = (top_k <= complete) | ((top_p < 1) & (mass >= top_p))
    enough |= (min_p > 0) & (top[:, -1:] < min_p.float() * top[:, :1])
    return (top, tokens.gather(1, order)) if bool((enough & (complete > 0)).all()) else None


def penalised(logits: Tensor, history: Sequence[int], penalty: float) -> Tensor:
    """Return logits (vocab,) with each token of `history` less likely: positive ones divided, negative multiplied."""
    seen = torch.tensor(sorted(set(history)), device=logits.device)
    values = logits[seen]
    return logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on seed and position and is the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
