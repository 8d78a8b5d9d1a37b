"""Prompts that fill a gap: the tokens of each family's form, and models that have none."""

from __future__ import annotations

import json

import pytest

from engine.sources.base import TokenizerSpec
from engine.sources.tiny import byte_tokenizer
from engine.text.infill import FORMS, InfillForm, infill_prompt
from engine.text.output_form import FieldError
from engine.text.reply import ReplySettings, ReplyWriter
from engine.text.sampler import Sampling
from engine.text.tokenizer import Tokenizer


def tokenizer_with(tokens: tuple[str, ...], *, bos: str | None = None) -> Tokenizer:
    """A tokenizer of bytes that has these tokens too."""
    rules, _ = byte_tokenizer()
    added = rules["added_tokens"]
    assert isinstance(added, list)
    first = max(entry["id"] for entry in added) + 1
    more = [{**added[0], "id": first + place, "content": text} for place, text in enumerate(tokens)]
    rules["added_tokens"] = [entry for entry in added if entry["content"] not in tokens] + more
    return Tokenizer(TokenizerSpec(json.dumps(rules), None, bos, "<|im_end|>", {}, add_bos=bos is not None))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bos", [None, "<|im_start|>"])
def test_the_gap_stands_behind_the_text_on_both_sides(form: InfillForm, bos: str | None) -> None:
    tokenizer = tokenizer_with((form.before, form.after, form.gap, form.ends[0]), bos=bos)
    made = infill_prompt(tokenizer, " def f(x):\n", "\n    return y ")
    assert tokenizer.decode(made.ids, skip_special=False) == (
        f"{bos or ''}{form.before} def f(x):\n{form.after}\n    return y {form.gap}"
    )
    assert made.end_ids == {tokenizer.token_id(form.ends[0])}


def test_an_empty_text_on_one_side_is_fine() -> None:
    tokenizer = tokenizer_with(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    made = infill_prompt(tokenizer, "", "x")
    assert tokenizer.decode(made.ids, skip_special=False) == "<fim_prefix><fim_suffix>x<fim_middle>"


@pytest.mark.parametrize("tokens", [(), ("<|fim_prefix|>",), ("<|fim_prefix|>", "<fim_suffix>", "<fim_middle>")])
def test_a_model_without_these_tokens_is_refused_by_the_fields_name(tokens: tuple[str, ...]) -> None:
    with pytest.raises(FieldError, match="suffix: is not supported: this model has no tokens to fill a gap") as refused:
        infill_prompt(tokenizer_with(tokens), "a", "b")
    assert refused.value.field == "suffix"


def test_a_reply_ends_at_the_forms_own_end_as_well() -> None:
    tokenizer = tokenizer_with(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"))
    made = infill_prompt(tokenizer, "a", "b")
    how = ReplySettings(8, Sampling(temperature=0), end_ids=made.end_ids)
    eos, pad = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|fim_pad|>")
    assert eos is not None
    assert pad is not None
    for end in (eos, pad):
        writer = ReplyWriter(tokenizer, made.ids, how, [eos])
        assert writer.accept(ord("x")) + writer.accept(end) == "x"
        assert writer.finish_reason == "stop"
