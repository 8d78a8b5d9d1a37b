"""Training data: reads files of records, turns them into tokens that count or not, and orders them into steps.

A file is JSONL with `messages`, with `prompt` and `completion`, or with `text` in each line, or it is plain text. Of
conversations only the assistant's answers count. The order depends on the seed and the epoch alone, so that the number
of a step says which records it takes, and a job that goes on needs no other position.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from app.core.errors import AppError
from app.core.units import format_size

MAX_FILE_BYTES = 2 * 10**9
_KINDS = "`messages`, `prompt` and `completion`, or `text`"
_ROLES = ("system", "user", "assistant", "tool")


class DataError(AppError):
    """The training data cannot be used; the message names the file and the line."""

    code = "bad_data"


class TextRules(Protocol):
    """A model's tokenizer and chat template; `engine.text.prompt.ModelText` has them."""

    def conversation_pieces(self, messages: Sequence[Mapping[str, str]]) -> list[tuple[list[int], bool]]:
        """Return the tokens of a conversation in pieces, each with whether it is an answer."""

    def document_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, with the marks of its beginning and end."""


@dataclass(frozen=True)
class Example:
    """One sequence: its tokens, and for each whether the model is to learn to write it."""

    token_ids: tuple[int, ...]
    counted: tuple[bool, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the loss counts; the first has nothing before it that could foretell it."""
        return sum(self.counted[1:])


@dataclass(frozen=True)
class Dataset:
    """The sequences of a file, and how many of its records were too long."""

    examples: tuple[Example, ...]
    cut: int = 0  # records that lost their end
    dropped: int = 0  # records that had no answer left

    @property
    def tokens(self) -> int:
        """Tokens that count, in all sequences."""
        return sum(example.tokens for example in self.examples)


@dataclass(frozen=True)
class Conversation:
    """The messages of one line."""

    line: int
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Document:
    """The text of one line, or of a whole file."""

    line: int
    text: str


Record = Conversation | Document


def read_records(path: Path) -> list[Record]:
    """Read the records of a file; raises `DataError`, which names the line that is wrong."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise DataError(f"{path} has {format_size(size)}, the limit is {format_size(MAX_FILE_BYTES)}: split it")
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 (byte {error.start}): save it as UTF-8") from error
    if not text.strip():
        raise DataError(f"{path} is empty: write one record a line, with {_KINDS}")
    is_json = path.suffix.lower() in (".jsonl", ".json", ".ndjson") or text.lstrip().startswith("{")
    return list(_parsed(path, text)) if is_json else [Document(1, text)]


def tokenised(records: Sequence[Record], text: TextRules, length: int) -> Dataset:
    """Turn records into sequences of at most `length` tokens; raises `DataError` if nothing is left to learn.

    A text that is longer becomes several sequences; a conversation that is longer loses its end.
    """
    examples: list[Example] = []
    cut = dropped = 0
    for record in records:
        if isinstance(record, Document):
            ids = text.document_ids(record.text)
            pieces = [ids[at : at + length] for at in range(0, len(ids), length)]
            examples += [Example(tuple(piece), (True,) * len(piece)) for piece in pieces if len(piece) > 1]
            continue
        whole = _example(record, text)
        short = Example(whole.token_ids[:length], whole.counted[:length])
        cut += len(whole.token_ids) > length
        if short.tokens:
            examples.append(short)
        else:
            dropped += 1
    if not examples:
        raise DataError(f"no record has an answer within its first {length} tokens: give a larger --length")
    return Dataset(tuple(examples), cut, dropped)


def split(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Divide the sequences into those to train on and a share to validate with, by lot; at least one is trained on."""
    count = min(math.ceil(share * len(dataset.examples)), len(dataset.examples) - 1) if share else 0
    chosen = set(order(len(dataset.examples), seed, "validation")[:count])
    held = tuple(example for index, example in enumerate(dataset.examples) if index in chosen)
    kept = tuple(example for index, example in enumerate(dataset.examples) if index not in chosen)
    return Dataset(kept, dataset.cut, dataset.dropped), Dataset(held)


@lru_cache(maxsize=2)  # every step asks for that of its epoch, and 100,000 records take 0.2 s
def order(count: int, seed: int, epoch: int | str) -> tuple[int, ...]:
    """Return the numbers below `count` in an order that depends on the seed and the epoch alone."""
    return tuple(sorted(range(count), key=lambda index: hashlib.sha256(f"{seed}/{epoch}/{index}".encode()).digest()))


def steps_per_epoch(examples: int, batch: int) -> int:
    """Steps in which every sequence is taken once."""
    return -(-examples // batch)


def step_batches(dataset: Dataset, number: int, *, batch: int, seed: int, rows: int) -> list[list[Example]]:
    """Return the sequences of step `number` (from 0), grouped into micro-batches of at most `rows` rows.

    A micro-batch is padded to its longest sequence, so those of like length go together; a long one may go alone.
    """
    per_epoch = steps_per_epoch(len(dataset.examples), batch)
    epoch, position = divmod(number, per_epoch)
    chosen = order(len(dataset.examples), seed, epoch)[position * batch : (position + 1) * batch]
    return grouped([dataset.examples[index] for index in chosen], rows)


def tokens_before(dataset: Dataset, number: int, *, batch: int, seed: int) -> int:
    """Tokens that count in all steps before step `number`."""
    epoch, position = divmod(number, steps_per_epoch(len(dataset.examples), batch))
    begun = order(len(dataset.examples), seed, epoch)[: position * batch]
    return epoch * dataset.tokens + sum(dataset.examples[index].tokens for index in begun)


def grouped(examples: Sequence[Example], rows: int) -> list[list[Example]]:
    """Group sequences of like length, each group of at most `rows` rows once it is padded."""
    groups: list[list[Example]] = []
    for example in sorted(examples, key=lambda each: len(each.token_ids), reverse=True):
        if groups and (len(groups[-1]) + 1) * len(groups[-1][0].token_ids) <= rows:
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups


def _example(record: Conversation, text: TextRules) -> Example:
    ids: list[int] = []
    counted: list[bool] = []
    for piece, is_answer in text.conversation_pieces(record.messages):
        ids += piece
        counted += [is_answer] * len(piece)
    return Example(tuple(ids), tuple(counted))


def _parsed(path: Path, text: str) -> Iterator[Record]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON ({str(error)[:80]}): write one object a line") from error
        if not isinstance(value, dict):
            raise DataError(f"{where} is not a JSON object: write {_KINDS} in it")
        yield _record(where, number, value)


def _record(where: str, number: int, value: dict[str, Any]) -> Record:
    if "messages" in value:
        return Conversation(number, tuple(_messages(where, value["messages"])))
    if "prompt" in value or "completion" in value:
        prompt, completion = (_text(where, value, name) for name in ("prompt", "completion"))
        messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": completion})
        return Conversation(number, messages)
    if "text" in value:
        return Document(number, _text(where, value, "text"))
    raise DataError(f"{where} has none of {_KINDS}")


def _messages(where: str, value: Any) -> Iterator[dict[str, str]]:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise DataError(f"{where}: `messages` is not a list of objects with `role` and `content`")
    if not any(message.get("role") == "assistant" for message in value):
        raise DataError(f"{where} has no message of the assistant, so there is nothing to learn from it")
    for message in value:
        if message.get("role") not in _ROLES:
            raise DataError(f"{where}: the role {str(message.get('role'))[:40]!r} is not one of {', '.join(_ROLES)}")
        yield {"role": message["role"], "content": _text(where, message, "content")}


def _text(where: str, value: dict[str, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not text:
        raise DataError(f"{where}: `{name}` is missing, empty or not text")
    return text
