"""Prompts to fill a gap in a text (`suffix`), for models that have tokens for it.

The forms are those of the families' own documentation; a tokenizer that spells bytes as letters encodes the text on
either side of the gap as it is. Others would add a space, so models with such a tokenizer are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.text.output_form import FieldError
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class InfillForm:
    """The tokens around the text before the gap, the text after it, and the gap; and those that end a reply."""

    before: str
    after: str
    gap: str
    ends: tuple[str, ...]


FORMS = (
    InfillForm(  # Qwen 2.5 Coder and later
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>"),
    ),
    InfillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>")),
    InfillForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>", "<|EOT|>")),  # noqa: RUF001
)


@dataclass(frozen=True)
class InfillPrompt:
    """The token ids of a prompt, and the tokens that end its reply besides the model's own."""

    ids: list[int]
    end_ids: frozenset[int]


def infill_prompt(tokenizer: Tokenizer, before: str, after: str) -> InfillPrompt:
    """Return the prompt for the text between two others; raises `FieldError` if the model has no tokens for it."""
    for form in FORMS if tokenizer.is_byte_level else ():
        marks = [tokenizer.token_id(mark) for mark in (form.before, form.after, form.gap)]
        first, second, third = marks
        if first is None or second is None or third is None:
            continue
        one, two = (tokenizer.encode(text, add_special=False) for text in (before, after))
        ends = frozenset(index for end in form.ends if (index := tokenizer.token_id(end)) is not None)
        return InfillPrompt([*tokenizer.encode(""), first, *one, second, *two, third], ends)
    raise FieldError("suffix", "is not supported: this model has no tokens to fill a gap")
