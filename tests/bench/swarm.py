"""Replies through three real nodes on loopback, beside `transformers` and Shoal in one process, in one run.

    python -m tests.bench.swarm [--json] [--quick] [--rounds 3] [--tokens 64]

The contestants take turns, so that a noisy machine disturbs all alike; ratios are medians over the rounds. The last
part is a second swarm whose nodes are 50 ms (there and back) apart: what a token takes there is compared with one way
over each link and what it took without delay, which holds only where hops push to each other directly.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app.config.home import cache_folder
from engine.local_model import LocalModel, load_local, local_options
from engine.sources.opening import open_source
from engine.sources.starter import starter_file
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from tests.bench.swarm_nodes import BenchSwarm, Told, open_bench_swarm

HOPS = 3
RTT_S = 0.05
LONG_PROMPT = 512
QUESTION = "Explain to a child why fish swim in shoals, in ten long sentences."
ANIMALS = ("a herring", "an otter", "a crab", "a whale", "a gull", "a seal", "an eel", "a shark")
GREEDY = Sampling(temperature=0)


class Transformers:
    """The starter model in `transformers`, used as its own generation loop uses it."""

    def __init__(self) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        file = starter_file(cache_folder())
        loader: Any = transformers.AutoModelForCausalLM
        self._model = loader.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()

    @torch.inference_mode()
    def tokens_per_s(self, prompt: Sequence[int], tokens: int) -> float:
        """The speed of a greedy reply behind its first token."""
        out = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        begin = time.perf_counter()
        for _ in range(tokens - 1):
            out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
        return (tokens - 1) / (time.perf_counter() - begin)


class OneProcess:
    """Shoal with the whole model in this process."""

    def __init__(self) -> None:
        source = open_source("starter", cache_folder())
        options = local_options(source, torch.device("cpu"), torch.float32, 1 << 33)
        self._model: LocalModel = load_local(source, options)

    def prompt(self, text: str) -> list[int]:
        """The tokens of a question."""
        return self._model.prompt_ids([{"role": "user", "content": text}])

    def reply(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], float, float]:
        """A greedy reply: its tokens, the time to the first, and the speed behind it."""
        reply = self._model.reply(prompt, ReplySettings(tokens, GREEDY))
        "".join(reply)
        assert reply.stats is not None
        return reply.writer.token_ids, reply.stats.ttft_s, reply.stats.tokens_per_s or 0.0

    def long_text(self) -> str:
        """A question of `LONG_PROMPT` tokens."""
        words = 1
        while len(self.prompt("fish " * (words + 1))) <= LONG_PROMPT:
            words += 1
        return "fish " * words


def together_tokens_per_s(replies: Sequence[Told]) -> float:
    """What all replies got in sum while all of them were being written."""
    begin, end = max(told.times[0] for told in replies), min(told.times[-1] for told in replies)
    tokens = sum(begin < at <= end for told in replies for at in told.times)
    return tokens / (end - begin)


class Rounds:
    """The contestants' turns and what came out of them."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._theirs, self._local = Transformers(), OneProcess()
        self._prompt = self._local.prompt(QUESTION)
        self._long_text = self._local.long_text()
        self.series: dict[str, list[float]] = {}
        self.batch_rows: list[list[float]] = []
        self.same = True
        self.recoveries = 0

    def _note(self, **values: float) -> None:
        for name, value in values.items():
            self.series.setdefault(name, []).append(value)

    def warm_up(self, swarm: BenchSwarm) -> None:
        """Everybody's first reply does not count."""
        self._theirs.tokens_per_s(self._prompt, 4)
        self._local.reply(self._prompt, 4)
        swarm.reply(QUESTION, 4)

    def one(self, swarm: BenchSwarm) -> None:
        """One turn of each."""
        theirs = self._theirs.tokens_per_s(self._prompt, self._tokens)
        ids, _, local = self._local.reply(self._prompt, self._tokens)
        alone = swarm.reply(QUESTION, self._tokens).done
        stories = [f"Tell a very long story about {animal}." for animal in ANIMALS]
        many, batch_rows = swarm.replies(stories, self._tokens)
        together = together_tokens_per_s(many)
        long_ids, local_ttft_s, _ = self._local.reply(self._local.prompt(self._long_text), 2)
        long = swarm.reply(self._long_text, 2).done
        self.same = self.same and alone["token_ids"] == ids and long["token_ids"] == long_ids
        self.recoveries += alone["recoveries"] + sum(told.done["recoveries"] for told in many)
        self.batch_rows.append(batch_rows)
        self._note(
            transformers=theirs,
            local=local,
            swarm=alone["tokens_per_s"],
            streams8=together,
            swarm3_vs_transformers=alone["tokens_per_s"] / theirs,
            swarm3_vs_local=alone["tokens_per_s"] / local,
            streams8_vs_transformers=together / theirs,
            streams8_vs_local=together / local,
            ttft_512_vs_local=long["ttft_s"] / local_ttft_s,
        )

    def figures(self) -> dict[str, Any]:
        """Medians of all."""
        middle = {name: median(values) for name, values in self.series.items()}
        speeds = {f"{name}_tokens_per_s": middle.pop(name) for name in ("transformers", "local", "swarm", "streams8")}
        overheads = zip(self.series["swarm"], self.series["local"], strict=True)
        overhead_s = median(1 / swarm - 1 / local for swarm, local in overheads) / HOPS
        rounded = {name: round(value, 3) for name, value in {**middle, **speeds}.items()}
        return {
            **rounded,
            "overhead_ms_per_hop": round(1000 * overhead_s, 2),
            "same_tokens": self.same,
            "recoveries": self.recoveries,
            "batch_rows": self.batch_rows[-1],
        }


def measure_delayed(swarm: BenchSwarm, token_s: float, tokens: int, rounds: int) -> dict[str, Any]:
    """What delay does to a token, and what a token costs on each link."""
    swarm.reply(QUESTION, 4)
    speeds, token_bytes = [], []
    for _ in range(rounds):
        short = swarm.carried_bytes()
        swarm.reply(QUESTION, 2)
        begin = swarm.carried_bytes()
        speeds.append(swarm.reply(QUESTION, tokens).done["tokens_per_s"])
        # Opening the session and the prompt cost both replies the same; a token passes each link once.
        extra = (swarm.carried_bytes() - begin) - (begin - short)
        token_bytes.append(extra / (tokens - 2) / (HOPS + 1))
    took_s = 1 / median(speeds)
    expected_s = (HOPS + 1) * RTT_S / 2 + token_s
    return {
        "delay50_token_ms": round(1000 * took_s, 1),
        "delay50_vs_model": round(took_s / expected_s, 3),
        "bytes_per_token_per_link": round(median(token_bytes)),
    }


def measure(rounds: int, tokens: int) -> dict[str, Any]:
    """Everything, one after the other."""
    turns = Rounds(tokens)
    with tempfile.TemporaryDirectory() as folder:
        with open_bench_swarm(Path(folder, "near"), cache_folder(), "starter", nodes=HOPS) as swarm:
            spans = swarm.spans()
            turns.warm_up(swarm)
            for _ in range(rounds):
                turns.one(swarm)
        figures = turns.figures()
        with open_bench_swarm(Path(folder, "far"), cache_folder(), "starter", nodes=HOPS, rtt_s=RTT_S) as swarm:
            token_s = 1 / figures["swarm_tokens_per_s"]
            delayed = measure_delayed(swarm, token_s, tokens // 2, max(rounds // 2, 1))
    return {**figures, **delayed, "spans": [f"{start}:{stop}" for start, stop in spans]}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one round of short replies")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    figures = measure(1, 32) if arguments.quick else measure(arguments.rounds, arguments.tokens)
    print(json.dumps(figures) if arguments.json else "\n".join(f"{name:28} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
