"""Replies: end tokens, limits, stop strings that arrive in pieces, and a local model from prompt to figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.local_model import LocalModel, load_local, local_options
from engine.sources.base import TokenizerSpec
from engine.sources.opening import open_source
from engine.text.chat_template import ChatError
from engine.text.reply import ReplySettings, ReplyWriter
from engine.text.sampler import Sampling
from engine.text.tokenizer import Tokenizer
from tests.engine.models import byte_tokenizer

TOKENIZER = Tokenizer(TokenizerSpec(byte_tokenizer().to_str(), None, None, "<|im_end|>", {}))
GREEDY = Sampling(temperature=0)


def write(text: str, settings: ReplySettings) -> tuple[list[str], ReplyWriter]:
    """Feed a writer logits that spell `text` and then the end token; the pieces that it showed."""
    end = TOKENIZER.eos_id
    assert end is not None
    writer = ReplyWriter(TOKENIZER, [], settings, [end])
    pieces = []
    for token in [*TOKENIZER.encode(text), end]:
        pieces.append(writer.choose(torch.nn.functional.one_hot(torch.tensor(token), TOKENIZER.vocab_size).float()))
        if writer.finish_reason is not None:
            break
    return pieces, writer


def test_an_end_token_stops_and_is_counted_but_not_shown() -> None:
    pieces, writer = write("hé!", ReplySettings(100, GREEDY))
    assert "".join(pieces) == "hé!"
    assert (writer.finish_reason, len(writer.token_ids)) == ("stop", 5)
    assert all("\ufffd" not in piece for piece in pieces)


def test_the_limit_ends_a_reply() -> None:
    pieces, writer = write("hello", ReplySettings(3, GREEDY))
    assert ("".join(pieces), writer.finish_reason) == ("hel", "length")


def test_text_held_back_for_a_stop_string_is_shown_when_the_limit_comes() -> None:
    pieces, writer = write("abcd", ReplySettings(3, GREEDY, ("bcx",)))
    assert ("".join(pieces), writer.finish_reason) == ("abc", "length")


@given(
    st.text(st.sampled_from("ab§\n"), max_size=12),
    st.lists(st.text(st.sampled_from("ab§\n"), min_size=1, max_size=4), max_size=3),
)
def test_nothing_from_a_stop_string_on_is_ever_shown(text: str, stops: list[str]) -> None:
    pieces, writer = write(text, ReplySettings(100, GREEDY, tuple(stops)))
    shown = "".join(pieces)
    # The first stop string to be complete ends the reply; of several that end together, the earliest start counts.
    ends = {at + len(stop): at for stop in stops if (at := text.find(stop)) >= 0}
    expected = text
    if ends:
        first_end = min(ends)
        expected = text[: min(text.find(stop) for stop in stops if 0 <= text.find(stop) <= first_end - len(stop))]
    assert shown == expected
    assert writer.finish_reason == "stop"


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"stop": ("",)}])
def test_senseless_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(EngineError):
        ReplySettings(**bad)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    source = open_source("tiny-random", Path(tmp_path_factory.mktemp("cache")))
    return load_local(source, local_options(source, torch.device("cpu"), torch.float32, 1 << 32))


def test_a_local_reply_is_repeatable_and_frees_its_cache(tiny: LocalModel) -> None:
    prompt = tiny.prompt_ids([{"role": "user", "content": "hello"}])
    settings = ReplySettings(12, Sampling(temperature=0.9, seed=3))
    replies = [tiny.reply(prompt, settings) for _ in range(2)]
    texts = ["".join(reply) for reply in replies]
    assert texts[0] == texts[1]
    assert replies[0].writer.token_ids == replies[1].writer.token_ids
    assert replies[0].stats is not None
    assert tiny.span.pool.free_tokens == tiny.span.pool.total_tokens


def test_a_reply_that_is_abandoned_frees_its_cache(tiny: LocalModel) -> None:
    pieces = iter(tiny.reply(tiny.prompt_ids([{"role": "user", "content": "hello"}]), ReplySettings(50)))
    next(pieces)
    assert tiny.span.pool.free_tokens < tiny.span.pool.total_tokens
    pieces.close()  # type: ignore[attr-defined]
    assert tiny.span.pool.free_tokens == tiny.span.pool.total_tokens


def test_a_prompt_beyond_the_context_is_refused_and_a_long_reply_ends_at_it(tiny: LocalModel) -> None:
    context = tiny.config.context_length
    with pytest.raises(EngineError, match=f"the model's context is {context}"):
        tiny.reply([1] * context, ReplySettings(5))
    with pytest.raises(EngineError, match="empty"):
        tiny.reply([], ReplySettings(5))
    reply = tiny.reply([1] * (context - 3), ReplySettings(50, GREEDY))
    "".join(reply)
    assert len(reply.writer.token_ids) <= 3


def test_a_reply_to_continue_follows_the_beginning_of_a_reply(tiny: LocalModel) -> None:
    """Its text stands where a reply begins, so that greedy decoding goes on as if it had been generated."""
    question = {"role": "user", "content": "hello"}
    plain = tiny.prompt_ids([question])
    continued = tiny.prompt_ids([question, {"role": "assistant", "content": "once upon"}])
    assert continued[: len(plain)] == plain
    assert tiny._text.tokenizer.decode(continued[len(plain) :]) == "once upon"
    assert tiny.prompt_ids([question, {"role": "assistant", "content": ""}]) == plain
    with pytest.raises(ChatError, match="cannot begin with the reply to continue"):
        tiny.prompt_ids([{"role": "assistant", "content": "once"}])
