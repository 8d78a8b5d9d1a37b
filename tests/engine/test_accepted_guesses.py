"""Guesses change no reply: head and sampler on several rows at once give the tokens of one row at a time."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.hosting import CPU_ENDS
from engine.local_model import LocalModel, load_local, local_options
from engine.model.kv_cache import Segment
from engine.sources.opening import open_source
from engine.swarm_ends import SwarmEnds, load_swarm_ends
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from engine.wire import to_bytes, to_tensor

PROMPT = [72, 101, 108, 108, 111, 32, 119]
TOKENS = 20
SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=0.9, top_p=0.9, seed=3),
    Sampling(temperature=1.0, top_k=20, min_p=0.01, repetition_penalty=1.3, seed=4),
    Sampling(temperature=0, frequency_penalty=0.7),
    Sampling(temperature=0.8, repetition_penalty=1.1, frequency_penalty=-0.4, presence_penalty=1.5, seed=5),
]


class Choice(NamedTuple):
    """What a reply waits for."""

    reply: object
    hidden: memoryview
    dtype: str
    guesses: tuple[int, ...]


class Written(NamedTuple):
    """A whole reply."""

    tokens: list[int]
    text: str
    finish_reason: str | None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[SwarmEnds, LocalModel]:
    source = open_source("tiny-random", tmp_path_factory.mktemp("cache"))
    local = load_local(source, local_options(source, torch.device("cpu"), torch.float32, 1 << 30))
    return load_swarm_ends(source, CPU_ENDS), local


def alone(model: LocalModel, how: ReplySettings) -> Written:
    """The reply of one process, one token at a time."""
    reply = model.reply(PROMPT, how)
    text = "".join(reply)
    return Written(reply.writer.token_ids, text, reply.writer.finish_reason)


def with_guesses(
    tiny: tuple[SwarmEnds, LocalModel], how: ReplySettings, right: list[int], script: list[tuple[int, int]]
) -> Written:
    """The same through the ends of a swarm; each round guesses so many tokens right and so many wrong."""
    ends, model = tiny
    writer = ends.begin(PROMPT, how)
    lease = model.span.open(len(PROMPT) + TOKENS + 20)
    tokens: list[int] = []
    pieces = []
    new, rounds = list(PROMPT), [(0, 0), *script]
    while writer.finish_reason is None:
        hits, misses = rounds.pop(0) if rounds else (0, 0)
        guesses = (*right[len(tokens) : len(tokens) + hits], *[1] * misses)
        rows = to_tensor([memoryview(ends.embed([*new, *guesses]))], "f32", ends.hidden_size)
        hidden = model.span.step(rows, [Segment(lease, lease.length, len(rows))])
        (chosen,) = ends.choose([Choice(writer, to_bytes(hidden, "f32"), "f32", guesses)])
        assert all(piece.finish_reason is None for piece in chosen[:-1])
        tokens += [piece.token_id for piece in chosen]
        pieces += [piece.text for piece in chosen]
        lease.truncate(len(PROMPT) + len(tokens) - 1)
        new = [tokens[-1]]
        assert chosen[-1].embedding == ends.embed(new)
    lease.close()
    return Written(tokens, "".join(pieces), writer.finish_reason)


scripts = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=TOKENS)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=6)
@given(script=scripts)
def test_no_guesses_change_a_reply(
    tiny: tuple[SwarmEnds, LocalModel], sampling: Sampling, script: list[tuple[int, int]]
) -> None:
    how = ReplySettings(TOKENS, sampling)
    expected = alone(tiny[1], how)
    assert with_guesses(tiny, how, expected.tokens, script) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
@pytest.mark.parametrize("at", [1, 6, 11, 12])
def test_a_stop_string_ends_a_reply_in_the_middle_of_right_guesses(
    tiny: tuple[SwarmEnds, LocalModel], sampling: Sampling, at: int
) -> None:
    whole = alone(tiny[1], ReplySettings(TOKENS, sampling))
    how = ReplySettings(TOKENS, sampling, stop=(whole.text[at : at + 3],))
    expected = alone(tiny[1], how)
    assert expected.finish_reason == "stop"
    assert with_guesses(tiny, how, whole.tokens, [(5, 0)] * TOKENS) == expected


@pytest.mark.parametrize("most", [2, 5, 6, 7])
def test_a_reply_ends_at_its_length_in_the_middle_of_right_guesses(
    tiny: tuple[SwarmEnds, LocalModel], most: int
) -> None:
    whole = alone(tiny[1], ReplySettings(TOKENS, SAMPLINGS[1]))
    how = ReplySettings(most, SAMPLINGS[1])
    expected = alone(tiny[1], how)
    assert expected.finish_reason == "length"
    assert with_guesses(tiny, how, whole.tokens, [(6, 2)] * TOKENS) == expected


def test_replies_with_and_without_guesses_share_a_pass(tiny: tuple[SwarmEnds, LocalModel]) -> None:
    ends, model = tiny
    expected = [alone(model, ReplySettings(TOKENS, sampling)).tokens for sampling in SAMPLINGS]
    writers = [ends.begin(PROMPT, ReplySettings(TOKENS, sampling)) for sampling in SAMPLINGS]
    guesses = [tuple(expected[0][:3]), (), (expected[2][0], 1, 1), (), ()]
    choices = []
    for writer, guessed in zip(writers, guesses, strict=True):
        lease = model.span.open(64)
        rows = to_tensor([memoryview(ends.embed([*PROMPT, *guessed]))], "f32", ends.hidden_size)
        hidden = model.span.step(rows, [Segment(lease, 0, len(rows))])
        lease.close()
        choices.append(Choice(writer, to_bytes(hidden, "f32"), "f32", guessed))
    chosen = [[piece.token_id for piece in pieces] for pieces in ends.choose(choices)]
    assert chosen == [expected[0][:4], expected[1][:1], expected[2][:2], expected[3][:1], expected[4][:1]]
