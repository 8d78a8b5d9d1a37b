"""Training data: every kind of record, which tokens count, bad input, and the order of steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.training import dataset as training_dataset
from app.training.dataset import (
    Conversation,
    DataError,
    Dataset,
    Document,
    Example,
    grouped,
    order,
    read_records,
    split,
    step_batches,
    steps_per_epoch,
    tokenised,
    tokens_before,
)  # fmt: skip
from engine.sources.tiny import open_tiny
from engine.text.prompt import ModelText


class Letters:
    """A model whose tokens are letters and whose template writes `<role>` before each message and `.` behind it."""

    def conversation_pieces(self, messages: Sequence[Mapping[str, str]]) -> list[tuple[list[int], bool]]:
        return [([ord(c) for c in m["content"]], m["role"] == "assistant") for m in messages]

    def document_ids(self, text: str) -> list[int]:
        return [ord(c) for c in text]


def write(tmp_path: Path, *lines: object, name: str = "data.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return path


def test_each_kind_of_record_is_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path, {"messages": chat}, "", {"prompt": "a", "completion": "b"}, {"text": "ab"})
    assert read_records(path) == [Conversation(1, tuple(chat)), Conversation(3, tuple(chat)), Document(4, "ab")]
    assert read_records(write(tmp_path, "once", "upon", name="book.txt")) == [Document(1, "once\nupon")]
    assert read_records(write(tmp_path, {"text": "ab"}, name="data")) == [Document(1, "ab")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "{no"], "line 2 is not JSON"),
        (["[1]"], "line 1 is not a JSON object"),
        (["[" * 100_000], "line 1 is not JSON"),
        (["", "  "], "is empty: write one record a line"),
        ([{"question": "a"}], "line 1 has none of `messages`, `prompt` and `completion`, or `text`"),
        ([{"prompt": "a"}], "`completion` is missing"),
        ([{"text": 7}], "`text` is missing, empty or not text"),
        ([{"messages": "a"}], "`messages` is not a list"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "no message of the assistant"),
        ([{"messages": [{"role": "assistant", "content": None}]}], "`content` is missing"),
        ([{"messages": [{"role": "a", "content": "b"}, {"role": "assistant", "content": "b"}]}], "the role 'a'"),
    ],
)
def test_a_bad_record_is_named_with_its_line(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        read_records(write(tmp_path, *lines))
    assert str(tmp_path) in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl cannot be read"):
        read_records(tmp_path / "nothing.jsonl")
    (tmp_path / "data.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not text in UTF-8"):
        read_records(tmp_path / "data.jsonl")


def talk(*texts: str) -> Conversation:
    """A conversation that the user begins."""
    roles = ("user", "assistant")
    return Conversation(1, tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts)))


def test_only_answers_count_and_long_records_are_cut() -> None:
    data = tokenised([talk("ab", "cd", "e", "f"), talk("abcd", "ef"), talk("abcdef", "g")], Letters(), 5)
    assert [example.counted for example in data.examples] == [(False, False, True, True, False), (False,) * 4 + (True,)]
    assert (data.cut, data.dropped, data.tokens) == (3, 1, 3)
    with pytest.raises(DataError, match="within its first 3 tokens"):
        tokenised([talk("abcd", "e")], Letters(), 3)


def test_a_long_text_becomes_several_sequences_and_all_of_it_counts() -> None:
    data = tokenised([Document(1, "abcdefgh" + "i")], Letters(), 4)
    assert [len(example.token_ids) for example in data.examples] == [4, 4]  # a single letter has nothing to foretell
    assert (data.cut, data.tokens) == (0, 6)


def test_the_templates_own_words_do_not_count(tmp_path: Path) -> None:
    text = ModelText(open_tiny(tmp_path))
    messages = [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"},
    ]  # fmt: skip
    pieces = text.conversation_pieces(messages)
    answers = [text.tokenizer.decode(ids, skip_special=False) for ids, counts in pieces if counts]
    assert answers == ["two<|im_end|>", "four<|im_end|>"]
    whole = [token for ids, _ in pieces for token in ids]
    assert whole[: len(text.prompt_ids(messages[:1]))] == text.prompt_ids(messages[:1])
    assert "one<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>" in text.tokenizer.decode(whole, skip_special=False)


def dataset(count: int) -> Dataset:
    """Sequences of differing lengths, told apart by their first token."""
    lengths = [2 + index * 7 % 11 for index in range(count)]
    return Dataset(tuple(Example((i,) * n, (True,) * n) for i, n in enumerate(lengths)))


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 2**40), st.integers(2, 60))
def test_every_epoch_takes_every_record_once(count: int, batch: int, seed: int, rows: int) -> None:
    data = dataset(count)
    per_epoch = steps_per_epoch(count, batch)
    for epoch in range(2):
        taken: list[int] = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            groups = step_batches(data, step, batch=batch, seed=seed, rows=rows)
            assert groups == step_batches(data, step, batch=batch, seed=seed, rows=rows)
            before = epoch * data.tokens + sum(data.examples[index].tokens for index in taken)
            assert tokens_before(data, step, batch=batch, seed=seed) == before
            for group in groups:
                longest = max(len(example.token_ids) for example in group)
                assert len(group) == 1 or len(group) * longest <= rows
                taken += [example.token_ids[0] for example in group]
        assert sorted(taken) == list(range(count))


def test_epochs_and_seeds_differ_in_their_order() -> None:
    assert order(50, 1, 0) != order(50, 1, 1)
    assert order(50, 1, 0) != order(50, 2, 0)
    assert order(50, 1, 0) == order(50, 1, 0)


def test_the_order_of_an_epoch_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are put together on the loop, which stood still for 2 s a step with a million records."""
    hashed = 0

    def counted(data: bytes) -> Any:
        nonlocal hashed
        hashed += 1
        return hashlib.sha256(data)

    monkeypatch.setattr(training_dataset, "hashlib", SimpleNamespace(sha256=counted))
    data = dataset(40)
    for step in range(10):
        step_batches(data, step, batch=4, seed=987654321, rows=64)
    assert hashed == 40


def test_validation_takes_its_share_and_leaves_at_least_one() -> None:
    kept, held = split(dataset(40), 0.05, 3)
    assert (len(kept.examples), len(held.examples)) == (38, 2)
    assert set(kept.examples) | set(held.examples) == set(dataset(40).examples)
    assert len(split(dataset(1), 0.5, 3)[0].examples) == 1
    assert split(dataset(5), 0.0, 3)[1].examples == ()


def test_sequences_of_like_length_go_together() -> None:
    data = dataset(11).examples
    groups = grouped(data, 24)
    lengths = [len(example.token_ids) for group in groups for example in group]
    assert lengths == sorted((len(example.token_ids) for example in data), reverse=True)
