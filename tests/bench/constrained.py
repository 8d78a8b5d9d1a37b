"""The price of a constraint: the time of a token of the starter model with a JSON schema, and without.

    python -m tests.bench.constrained [--json] [--model starter] [--rounds 5] [--tokens 64]

Both kinds of reply take turns, so that a noisy machine disturbs both alike; the figure is the median of the rounds'
ratios. `sample_ms` is the part that the constraint changes: finding the allowed tokens and drawing among them.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import NamedTuple

import torch

from app.config.home import cache_folder
from engine.local_model import LocalModel, load_local, local_options
from engine.sources.opening import open_source
from engine.text.output_form import Constraint
from engine.text.prompt import ModelText
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling, sample_rows

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 200},
        "year": {"type": "integer"},
        "people": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
    },
    "required": ["title", "year", "people"],
    "additionalProperties": False,
}


class Times(NamedTuple):
    """Milliseconds of a token, whole and in the sampler."""

    token_ms: float
    sample_ms: float


def measured(model: LocalModel, text: ModelText, prompt: list[int], how: ReplySettings) -> Times:
    """Write a reply; medians over its tokens after the first few."""
    writer = text.begin(prompt, how)
    lease = model.span.open(len(prompt) + writer.max_tokens)
    tokens, samples = [], []
    try:
        feed = prompt
        while writer.finish_reason is None:
            begin = time.perf_counter()
            logits = model.logits_after(lease, feed)
            computed = time.perf_counter()
            writer.accept(int(sample_rows(logits[None], writer.requests())))
            end = time.perf_counter()
            tokens.append(1000 * (end - begin))
            samples.append(1000 * (end - computed))
            feed = [writer.last_token]
    finally:
        lease.close()
    return Times(median(tokens[4:]), median(samples[4:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="starter")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    source = open_source(args.model, cache_folder())
    model = load_local(source, local_options(source, torch.device("cpu"), torch.float32, 4 << 30))
    text = ModelText(source)
    prompt = text.prompt_ids([{"role": "user", "content": "Describe a film about the sea as JSON."}])
    begin = time.perf_counter()
    grammar = text.grammars.compile(Constraint("json", json.dumps(SCHEMA), "response_format"))
    first_s = time.perf_counter() - begin
    begin = time.perf_counter()
    grammar = text.grammars.compile(Constraint("json", json.dumps(SCHEMA), "response_format"))
    compile_s = time.perf_counter() - begin
    plain = ReplySettings(args.tokens, Sampling(0.7, top_p=0.95))
    formed = ReplySettings(args.tokens, Sampling(0.7, top_p=0.95), grammar=grammar)
    rounds = [[measured(model, text, prompt, how) for how in (plain, formed)] for _ in range(args.rounds)]
    figures = {
        "model": source.label,
        "first_compile_s": round(first_s, 3),
        "compile_ms": round(1000 * compile_s, 2),
        "plain_token_ms": round(median(one.token_ms for one, _ in rounds), 2),
        "constrained_token_ms": round(median(other.token_ms for _, other in rounds), 2),
        "plain_sample_ms": round(median(one.sample_ms for one, _ in rounds), 3),
        "constrained_sample_ms": round(median(other.sample_ms for _, other in rounds), 3),
        "ratio": round(median(other.token_ms / one.token_ms for one, other in rounds), 3),
    }
    print(json.dumps(figures) if args.json else "\n".join(f"{name:24} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
