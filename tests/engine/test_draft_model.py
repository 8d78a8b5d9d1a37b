"""The draft model: guesses what a model like it would draw, whatever it read before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draft_model import READ_ROWS, DraftModel, load_draft
from engine.hosting import CPU_ENDS
from engine.local_model import LocalModel, load_local, local_options
from engine.sources.opening import open_source
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling

PROMPT = [72, 101, 108, 108, 111, 32] * 14  # more than one reading
SETTINGS = [
    ReplySettings(24, Sampling(temperature=0)),
    ReplySettings(24, Sampling(temperature=0.8, top_p=0.9, seed=5)),
    ReplySettings(24, Sampling(temperature=1.0, repetition_penalty=1.3, seed=6)),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[DraftModel, LocalModel]:
    source = open_source("tiny-random", tmp_path_factory.mktemp("cache"))
    local = load_local(source, local_options(source, torch.device("cpu"), torch.float32, 1 << 30))
    return load_draft(source, CPU_ENDS, source.config.vocab_size), local


def reply_of(model: LocalModel, how: ReplySettings) -> list[int]:
    reply = model.reply(PROMPT, how)
    "".join(reply)
    return reply.writer.token_ids


@pytest.mark.parametrize("how", SETTINGS)
def test_a_draft_of_the_same_model_guesses_every_token(tiny: tuple[DraftModel, LocalModel], how: ReplySettings) -> None:
    draft, model = tiny
    tokens = [*PROMPT, *reply_of(model, how)]
    reply = draft.begin(200, how)
    assert reply is not None
    for at in range(len(PROMPT), len(tokens) - 4, 5):
        assert reply.guess(tokens[:at], 4) == tokens[at : at + 4]
    reply.close()


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 5)), max_size=6))
def test_guesses_do_not_depend_on_what_was_read_before(
    tiny: tuple[DraftModel, LocalModel], texts: list[tuple[int, int, int]]
) -> None:
    """Each text has `same` tokens in common with the one before; guesses are those of a fresh reply."""
    draft, _ = tiny
    used = draft.begin(200, SETTINGS[1])
    assert used is not None
    text: list[int] = []
    for number, (same, more, count) in enumerate(texts):
        text = [*text[:same], *((7 * number + n) % 90 + 33 for n in range(more + 1))]
        fresh = draft.begin(200, SETTINGS[1])
        assert fresh is not None
        assert used.guess(text, count) == fresh.guess(text, count)
        fresh.close()
    used.close()


def test_a_prompt_is_read_in_short_calls(tiny: tuple[DraftModel, LocalModel]) -> None:
    draft, _ = tiny
    reply = draft.begin(300, SETTINGS[0])
    assert reply is not None
    calls = 1
    while not reply.read([65] * (3 * READ_ROWS + 2)):
        calls += 1
    assert calls == 4
    reply.close()


def test_guesses_end_where_the_cache_does(tiny: tuple[DraftModel, LocalModel]) -> None:
    draft, _ = tiny
    reply = draft.begin(10, SETTINGS[0])
    assert reply is not None
    assert len(reply.guess([65] * 8, 5)) == 2
    assert reply.guess([65] * 10, 5) == []
    assert reply.guess([65] * 12, 5) == []
    reply.close()


def test_without_room_in_the_cache_there_is_no_draft_and_an_ended_reply_makes_room(
    tiny: tuple[DraftModel, LocalModel],
) -> None:
    draft, _ = tiny
    context = draft.context_length
    replies = [draft.begin(context, SETTINGS[0]) for _ in range(8)]
    held = [reply for reply in replies if reply is not None]
    assert 1 <= len(held) < 8
    held[0].close()
    again = draft.begin(context, SETTINGS[0])
    assert again is not None
    for reply in (*held[1:], again):
        reply.close()


def test_guesses_are_tokens_of_the_large_model(tmp_path: Path) -> None:
    source = open_source("tiny-random", tmp_path)
    draft = load_draft(source, CPU_ENDS, 100)
    reply = draft.begin(100, ReplySettings(8, Sampling(temperature=5.0, seed=1)))
    assert reply is not None
    assert all(token < 100 for token in reply.guess([65] * 5, 20))
    reply.close()
