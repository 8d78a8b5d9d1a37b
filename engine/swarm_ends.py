"""The asker's half of a model: tokenizer, embedding, head and sampler.

The blocks run in the swarm, so hidden states leave and arrive as bytes in the formats of `engine.wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.head_graphs import ChosenTokens, HeadGraphs
from engine.model.block import WeightOptions
from engine.model.cuda_graphs import BATCHES
from engine.model.ends import EmbeddingAndHead, load_ends
from engine.sources.base import ModelSource
from engine.text.output_form import TokenLogprob
from engine.text.prompt import ModelText
from engine.text.reply import ReplySettings, ReplyWriter
from engine.text.sampler import SampleRequest, Sampling, sample_rows
from engine.wire import to_bytes, to_tensor, wire_name


class Token(NamedTuple):
    """One generated token of a reply; `embedding` is the next input of the first block."""

    token_id: int
    text: str
    finish_reason: str | None
    embedding: bytes
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class ChoiceUnderWay:
    """Tokens that the device is about to choose."""

    is_done: Callable[[], bool]
    # The tokens of these replies, once it is done; once for each. Replies with guesses are taken all, in order.
    take: Callable[[Sequence[int]], list[list[Token]]]
    next_rows: Tensor | None  # all tokens' embeddings on the device, (N, hidden)


class TokenChoice(Protocol):
    """A reply waiting for its next token, with the last block's output for it and for the guesses after it."""

    @property
    def reply(self) -> Any: ...
    @property
    def hidden(self) -> memoryview: ...
    @property
    def dtype(self) -> str: ...
    @property
    def guesses(self) -> Sequence[int]: ...


class AfterChoice(NamedTuple):
    """A reply whose token after the next is chosen."""

    reply: Any
    hidden: memoryview = memoryview(b"")
    dtype: str = ""
    guesses: Sequence[int] = ()


class HiddenState(Protocol):
    """Hidden states as received, with their wire format."""

    @property
    def data(self) -> bytes: ...
    @property
    def dtype(self) -> str: ...


class SwarmEnds:
    """Tokenizer, embedding and head of a model whose blocks other peers run."""

    def __init__(self, source: ModelSource, ends: EmbeddingAndHead, dtype: torch.dtype) -> None:
        self.config = source.config
        self.n_blocks = source.config.n_blocks
        self.hidden_size = source.config.hidden_size
        self.context_length = source.config.context_length
        self.dtype = wire_name(dtype)
        self.text = ModelText(source)
        self._ends = ends
        self._graphs: HeadGraphs | None = None  # on CUDA

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's reply."""
        return self.text.prompt_ids(messages)

    def text_ids(self, text: str | Sequence[int]) -> list[int]:
        """Return the token ids of a text to continue without a chat template; given ids are only checked.

        Raises `ContextExceeded` for a text that cannot fit into the context.
        """
        if isinstance(text, str):
            self.text.check_length(text)
            return self.text.tokenizer.encode(text)
        self.check_ids(text)
        return list(text)

    def prompt_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; raises `EngineError` if one is out of range."""
        self.check_ids(token_ids)
        return self.text.tokenizer.decode(token_ids, skip_special=False)

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise `EngineError` if the model does not have one of these tokens."""
        if not all(0 <= token_id < self.config.vocab_size for token_id in token_ids):
            raise EngineError(f"a token id is out of range: the model has {self.config.vocab_size} tokens, from 0")

    def embed(self, token_ids: Sequence[int], wire: str = "") -> bytes:
        """Return the embeddings of these tokens, (N, hidden) in this wire format, or else in this node's own."""
        return bytes(to_bytes(self._ends.embed(token_ids), wire or self.dtype))

    def begin(self, prompt_ids: Sequence[int], settings: ReplySettings) -> ReplyWriter:
        """Start a reply; raises `EngineError` if the prompt is empty or leaves no room in the context."""
        return self.text.begin(prompt_ids, settings)

    def choose(self, choices: Sequence[TokenChoice]) -> list[list[Token]]:
        """Choose the next tokens of each reply from the last rows of its hidden states; one head product for all.

        A reply gets one token, and one more for each guess that equals the token sampled in its place.
        """
        hidden, requests = self._rows(choices), _requests(choices)
        wanted = [choice.reply.logprobs for choice in choices for _ in range(_count(choice))]
        return self._accept(choices, *self._sample(hidden, requests, wanted))

    @torch.inference_mode()
    def launch(self, choices: Sequence[TokenChoice]) -> ChoiceUnderWay | None:
        """Start what `choose` does without waiting for it.

        None if it cannot: the head is on the CPU, or a reply wants more than tokens.
        """
        ends = self._ends
        if ends.device.type != "cuda" or not all(choice.reply.is_plain for choice in choices):
            return None
        hidden, requests = self._rows(choices), _requests(choices)
        captured = None if self._graphs is None else self._graphs.launch(hidden, requests)
        if captured is None:
            captured = ChosenTokens(ends.fetch_later(sample_rows(ends.logits(hidden), requests)), None)
        return self._under_way(choices, captured)

    def launch_ahead(self, choices: Sequence[TokenChoice], rows: Any) -> ChoiceUnderWay | None:
        """Start to choose the tokens after those that are being chosen now, one for each reply; None if it cannot.

        `rows` are the outputs for those on the device, which need not be computed yet (`StepUnderWay.rows`). The result
        may be taken once that of `choices` was, for the replies that go on with just these rows.
        """
        requests = [request for choice in choices if (request := choice.reply.request_after()) is not None]
        if self._graphs is None or rows is None or len(requests) < len(choices):
            return None
        captured = self._graphs.launch(rows, requests)
        after = [AfterChoice(choice.reply) for choice in choices]
        return None if captured is None else self._under_way(after, captured)

    def _under_way(self, choices: Sequence[TokenChoice], captured: ChosenTokens) -> ChoiceUnderWay:
        def take(indices: Sequence[int]) -> list[list[Token]]:
            found, embedded = captured.read.result()
            if any(choice.guesses for choice in choices):  # the only ones with several rows; all are taken together
                return self._accept(choices, found, embedded, [None] * len(found))
            tokens = [found[index] for index in indices]
            return self._accept([choices[i] for i in indices], tokens, embedded[list(indices)], [None] * len(tokens))

        return ChoiceUnderWay(captured.read.is_done, take, captured.embedded)

    def _rows(self, choices: Sequence[TokenChoice]) -> Tensor:
        """The hidden states to choose from: the last of each reply, and one for each guess after it."""
        dtype = torch.float32 if len({choice.dtype for choice in choices}) > 1 else None
        rows = [to_tensor([choice.hidden], choice.dtype, self.hidden_size)[-_count(choice) :] for choice in choices]
        return torch.cat([row.to(dtype) if dtype else row for row in rows]) if len(rows) > 1 else rows[0]

    def _accept(
        self,
        choices: Sequence[TokenChoice],
        tokens: Sequence[int],
        embedded: Tensor,
        logprobs: Sequence[TokenLogprob | None],
    ) -> list[list[Token]]:
        """Append the sampled tokens to their replies, as far as the guesses before them were right."""
        data = bytes(to_bytes(embedded, self.dtype))
        size, first = len(data) // len(tokens), 0
        chosen = []
        for choice in choices:
            count, writer = _count(choice), choice.reply
            texts = writer.accept_run(tokens[first : first + count], choice.guesses)
            ends = [None] * (len(texts) - 1) + [writer.finish_reason]
            places = range(first, first + len(texts))
            chosen.append(
                [
                    Token(tokens[place], text, end, data[place * size : (place + 1) * size], logprobs[place])
                    for place, text, end in zip(places, texts, ends, strict=True)
                ]
            )
            first += count
        return chosen

    @torch.inference_mode()
    def _sample(
        self, hidden: Tensor, requests: Sequence[SampleRequest], wanted: Sequence[int | None] = ()
    ) -> tuple[list[int], Tensor, list[TokenLogprob | None]]:
        """Return the tokens, their embeddings, and the probabilities of the rows that want them."""
        logits = self._ends.logits(hidden)
        tokens, embedded = self._ends.fetch(sample_rows(logits, requests))
        logprobs = [
            None if count is None else self._logprob(logits[row], tokens[row], count)
            for row, count in enumerate(wanted or [None] * len(tokens))
        ]
        return tokens, embedded, logprobs

    def _logprob(self, logits: Tensor, token: int, count: int) -> TokenLogprob:
        """Return the log probability of a token by its logits (vocab,), and the `count` likeliest tokens."""
        values = logits.float().log_softmax(-1)
        top = values.topk(count)
        likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        read = self.text.tokenizer.token_bytes
        return TokenLogprob(
            token,
            read(token),
            float(values[token]),
            tuple(TokenLogprob(index, read(index), value) for index, value in likeliest),
        )

    def mean(self, states: Sequence[HiddenState]) -> list[float]:
        """Return the mean of hidden states, divided by its length: an embedding of the text."""
        rows = [to_tensor([memoryview(state.data)], state.dtype, self.hidden_size).double() for state in states]
        mean = torch.cat(rows).mean(dim=0)
        return [float(value) for value in mean / mean.norm().clamp_min(1e-12)]

    def move(self, how: WeightOptions) -> None:
        """Move the head to another device; the wire format stays that of the start, which running sessions use.

        Raises `EngineError` if the device has no room for it.
        """
        try:
            self._ends, self._graphs = self._ends.moved(how), None  # replaced, not changed: a pass may be under way
            self.warm_up()
        except torch.OutOfMemoryError as error:
            self._ends, self._graphs = self._ends.moved(WeightOptions(torch.device("cpu"), torch.float32)), None
            raise EngineError("the device has no room for the head") from error

    @property
    def both(self) -> EmbeddingAndHead:
        """The weights of both ends."""
        return self._ends

    @property
    def device(self) -> str:
        """The device that computes the logits, by torch's name."""
        return str(self._ends.device)

    def warm_up(self) -> None:
        """Run head and sampler once for each batch size, so that no reply waits for kernels to load; only for CUDA."""
        if self._ends.device.type == "cuda":
            self._ends.share_embedding()
            self._graphs = HeadGraphs(self._ends)
            self._graphs.capture()
            for rows in BATCHES:
                for sampling in (Sampling(temperature=0), Sampling(top_p=0.9, min_p=0.1)):
                    self._sample(torch.zeros(rows, self.hidden_size), [SampleRequest((), sampling, 0)] * rows)

    def deviation(self, one: Sequence[HiddenState], other: Sequence[HiddenState]) -> tuple[float, float]:
        """Compare the hidden states of two runs.

        Returns the mean relative distance of the rows, and the least-squares factor between the runs less 1.
        """
        a, b = (
            torch.cat([to_tensor([memoryview(s.data)], s.dtype, self.hidden_size).double() for s in run])
            for run in (one, other)
        )
        distance = (a - b).norm(dim=1) / torch.minimum(a.norm(dim=1), b.norm(dim=1))
        return float(distance.mean()), float((a * b).sum() / (b * b).sum()) - 1


def _count(choice: TokenChoice) -> int:
    """Tokens that are sampled for a reply: the next, and one after each guess."""
    return 1 + len(choice.guesses)


def _requests(choices: Sequence[TokenChoice]) -> list[SampleRequest]:
    return [request for choice in choices for request in choice.reply.requests(choice.guesses)]


def load_swarm_ends(source: ModelSource, how: WeightOptions) -> SwarmEnds:
    """Read the embedding and the head of a model; no blocks are read."""
    try:
        ends = SwarmEnds(source, load_ends(source, how), how.dtype)
        ends.warm_up()
    except torch.OutOfMemoryError as error:
        raise EngineError("the device has no room for the head") from error
    return ends
