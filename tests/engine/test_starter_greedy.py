"""The starter model's greedy tokens against `transformers` on the same GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.config.home import cache_folder
from engine.errors import SourceError
from engine.local_model import LocalModel, load_local, local_options
from engine.sources.opening import open_source
from engine.sources.starter import starter_file
from engine.stored_form import source_form, starter_form
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling

QUESTION = "What is a peer-to-peer network?"
PROMPTS = (
    QUESTION,
    "Write a haiku about the sea.",
    "List three prime numbers and explain why they are prime.",
    "Translate 'good morning' into French, German and Spanish.",
    "def fibonacci(n):",
    "Warum ist der Himmel blau? 🌊 Please answer in English.",
)


@pytest.fixture(scope="module")
def model() -> LocalModel:
    try:
        source = open_source("starter", cache_folder())
    except SourceError as error:
        pytest.skip(f"the starter model cannot be had: {error}")
    return load_local(source, local_options(source, torch.device("cpu"), torch.float32, 1 << 34))


def test_its_form_is_known_before_its_download(model: LocalModel) -> None:
    known, found = starter_form(), source_form(open_source("starter", cache_folder()))
    assert found is not None
    assert (found.head, found.weight_bytes) == (known.head, known.weight_bytes)
    for theirs, ours in zip(found.blocks, known.blocks, strict=True):
        assert {role: theirs[role] for role in ours} == ours


@pytest.fixture(scope="module")
def oracle(model: LocalModel) -> Any:
    import transformers

    file: Path = starter_file(cache_folder())
    loader: Any = transformers.AutoModelForCausalLM
    return loader.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()


def greedy(model: LocalModel, prompt: str, count: int) -> tuple[list[int], list[int], str]:
    """Prompt ids, reply ids and text."""
    prompt_ids = model.prompt_ids([{"role": "user", "content": prompt}])
    reply = model.reply(prompt_ids, ReplySettings(count, Sampling(temperature=0)))
    text = "".join(reply)
    return prompt_ids, reply.writer.token_ids, text


def theirs(oracle: Any, prompt_ids: list[int], count: int) -> list[int]:
    """Tokens that `transformers` generates."""
    with torch.inference_mode():
        out = oracle.generate(
            torch.tensor([prompt_ids]), attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
            max_new_tokens=count, do_sample=False,
        )  # fmt: skip
    return list(out[0, len(prompt_ids) :].tolist())


def test_a_question_gets_sense(model: LocalModel) -> None:
    assert "decentralized" in greedy(model, QUESTION, 24)[2]


@pytest.mark.soak
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_transformers(model: LocalModel, oracle: Any, prompt: str) -> None:
    prompt_ids, ours, _ = greedy(model, prompt, 48)
    assert ours == theirs(oracle, prompt_ids, 48)
