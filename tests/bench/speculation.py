"""Replies with guesses beside the same replies without them, through three real nodes, in one run.

    python -m tests.bench.speculation [--json] [--quick] [--only near|far] [--rounds 3] [--tokens 96]

Both take turns, so that a noisy machine disturbs both alike; speed-ups are medians of the rounds' ratios. Replies must
have the same tokens. Where they first differ, the undisturbed model's two best logits must lie within `TIE`: rows that
are computed together are summed in another order. Such ties are counted; any other difference is an error.

The draft model is made for the bench's own texts (`tests.bench.made_draft`); `accepted_draft` says how often it was
right.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app.config.home import cache_folder
from engine.local_model import LocalModel, load_local, local_options
from engine.sources.opening import open_source
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from tests.bench.made_draft import make_draft
from tests.bench.swarm_nodes import BenchSwarm, open_bench_swarm
from tests.process.node_process import wait_until

HOPS = 3
RTT_S = 0.05
TIE = 1e-3

CODE = '''def total_price(items, discount):
    """Return the price of all items after the discount."""
    total = 0
    for item in items:
        total = total + item.price * item.count
    if discount is not None:
        total = total - total * discount
    return total


def print_invoice(customer, items, discount):
    """Print the invoice of a customer."""
    print("Invoice for", customer.name)
    for item in items:
        print(item.name, item.count, item.price)
    print("Total:", total_price(items, discount))
'''


ARTICLE = (
    "The harbour of the old town was built three hundred years ago. Fishing boats leave it before sunrise and come "
    "back in the afternoon. In summer, visitors walk along the wall and watch the boats. In winter, the wind is "
    "strong and the waves break over the wall. The town council wants to repair the wall next year. The repair will "
    "cost two million and take eight months. The fishermen ask that the work begin after the summer, because they "
    "need the harbour then."
)


@dataclass(frozen=True)
class Task:
    """One request; `seed` is None for a greedy reply."""

    name: str
    text: str
    seed: int | None = None

    @property
    def sampling(self) -> Sampling:
        """Greedy, or drawn with the seed."""
        return Sampling(temperature=0) if self.seed is None else Sampling(temperature=0.8, top_p=0.95, seed=self.seed)

    def request(self, tokens: int) -> dict[str, Any]:
        """The request as the API takes it."""
        how = self.sampling
        sampling = {"temperature": how.temperature, "top_p": how.top_p, "seed": how.seed}
        return {"messages": [{"role": "user", "content": self.text}], "max_tokens": tokens, **sampling}


REPEATING = (
    Task("article", f"Repeat the following text word for word:\n\n{ARTICLE}"),
    Task("article_seeded", f"Repeat the following text word for word:\n\n{ARTICLE}", seed=7),
    Task("code_seeded", f"Write this Python code again and change nothing:\n\n{CODE}", seed=7),
)
# Prose of high temperature hardly repeats itself; the model's greedy prose soon does.
FRESH = (
    Task("story", "Tell a story about a lighthouse keeper who finds a strange map.", seed=11),
    Task("letter", "Write a letter to a friend about a long walk in the mountains.", seed=12),
)


FRESH_ROUNDS = 4  # times as many: replies of one kind differ by a tenth from run to run, and a fiftieth is looked for


class Judge:
    """The whole model in this process, for replies that differ."""

    def __init__(self) -> None:
        self._source = source = open_source("starter", cache_folder())
        self._model: LocalModel = load_local(source, local_options(source, torch.device("cpu"), torch.float32, 1 << 33))

    def make_draft(self, folder: Path, tasks: Sequence[Task], tokens: int) -> None:
        """Write a draft model that knows the replies to these tasks."""
        texts = []
        for task in tasks:
            prompt = self._model.prompt_ids([{"role": "user", "content": task.text}])
            reply = self._model.reply(prompt, ReplySettings(tokens, task.sampling))
            "".join(reply)
            texts.append((len(prompt), [*prompt, *reply.writer.token_ids]))
        make_draft(folder, self._source, self._model, texts)

    def is_tie(self, task: Task, one: Sequence[int], other: Sequence[int]) -> bool:
        """True if two replies first differ where the model's two best logits are as good as equal."""
        at = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        prompt = self._model.prompt_ids([{"role": "user", "content": task.text}])
        lease = self._model.span.open(len(prompt) + at)
        try:
            best = self._model.logits_after(lease, [*prompt, *one[:at]])[[one[at], other[at]]]
            return abs(float(best[0] - best[1])) < TIE
        finally:
            lease.close()


class Rounds:
    """Turns of the same tasks with and without guesses, and what came out of them."""

    def __init__(self, swarm: BenchSwarm, judge: Judge, tokens: int) -> None:
        self._swarm, self._judge, self._tokens = swarm, judge, tokens
        self.ties = self.differences = 0
        self.acceptance: dict[str, list[float]] = {}

    def speedups(self, tasks: Sequence[Task], rounds: int, draft: str = "auto") -> list[float]:
        """The speed of each reply with guesses over that without."""
        ratios = []
        self._reply(tasks[0], draft)  # warm-up: loads the draft model, and teaches the asker what a row costs
        for number in range(rounds):
            for task in tasks:
                order = ("off", draft) if number % 2 else (draft, "off")
                done = {setting: self._reply(task, setting) for setting in order}
                plain, guessed = done["off"], done[draft]
                self._compare(task, plain["token_ids"], guessed["token_ids"])
                ratios.append(guessed["tokens_per_s"] / plain["tokens_per_s"])
                if guessed["guessed_tokens"]:
                    rate = guessed["accepted_tokens"] / guessed["guessed_tokens"]
                    self.acceptance.setdefault(task.name, []).append(rate)
        return ratios

    def _reply(self, task: Task, draft: str) -> dict[str, Any]:
        self._set_draft(task, draft)
        for piece in self._swarm.client.chat(task.request(self._tokens)):
            if "done" in piece:
                done: dict[str, Any] = piece["done"]
        guesses = f"{done['accepted_tokens']} of {done['guessed_tokens']} guesses right"
        print(f"{task.name} {draft}: {done['tokens_per_s']:.2f} tokens/s, {guesses}", file=sys.stderr, flush=True)
        return done

    def _set_draft(self, task: Task, draft: str) -> None:
        """Change the setting; a draft model is loaded with the next request, so let one wait for it."""
        client = self._swarm.client
        client.set_config("draft", draft)
        if draft not in ("auto", "off"):
            list(client.chat(task.request(1)))
            wait_until(lambda: client.snapshot().guesses.draft_model != "", "the draft model is loaded")

    def _compare(self, task: Task, one: Sequence[int], other: Sequence[int]) -> None:
        if one != other:
            tie = self._judge.is_tie(task, one, other)
            self.ties += tie
            self.differences += not tie


def measure_near(judge: Judge, rounds: int, tokens: int) -> tuple[dict[str, float], Rounds]:
    """Speed-ups of look-up on loopback."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_bench_swarm(Path(folder, "near"), cache_folder(), "starter", nodes=HOPS) as swarm,
    ):
        turns = Rounds(swarm, judge, tokens)
        repeating, fresh = turns.speedups(REPEATING, rounds), turns.speedups(FRESH, FRESH_ROUNDS * rounds)
        return {"lookup_speedup": median(repeating), "lookup_speedup_fresh": median(fresh)}, turns


def measure_far(judge: Judge, rounds: int, tokens: int) -> tuple[dict[str, float], Rounds]:
    """Speed-ups of look-up, and of a draft model where the text does not repeat, over links of 50 ms."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_bench_swarm(Path(folder, "far"), cache_folder(), "starter", nodes=HOPS, rtt_s=RTT_S) as swarm,
    ):
        turns = Rounds(swarm, judge, tokens)
        looked_up, fresh = turns.speedups(REPEATING, rounds), turns.speedups(FRESH, rounds)
        judge.make_draft(Path(folder, "draft"), FRESH, tokens)
        turns.acceptance.clear()
        drafted = turns.speedups(FRESH, rounds, str(Path(folder, "draft")))
        figures = {
            "delay50_lookup_speedup": median(looked_up),
            "delay50_lookup_speedup_fresh": median(fresh),
            "delay50_draft_speedup": median(drafted),
        }
        rates = [rate for rates in turns.acceptance.values() for rate in rates]
        return {**figures, "accepted_draft": median(rates) if rates else 0.0}, turns


def measure(rounds: int, tokens: int, only: str) -> dict[str, Any]:
    """Both swarms, one after the other, or only one."""
    judge = Judge()
    figures: dict[str, Any] = {}
    ties = differences = 0
    for name, part in (("near", measure_near), ("far", measure_far)):
        if only in ("", name):
            speedups, turns = part(judge, rounds, tokens)
            figures |= {label: round(value, 3) for label, value in speedups.items()}
            if name == "near":
                accepted = {f"accepted_{task}": round(median(rates), 3) for task, rates in turns.acceptance.items()}
                figures |= accepted
            ties, differences = ties + turns.ties, differences + turns.differences
    return {**figures, "ties": ties, "different_tokens": differences}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one round of short replies")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--only", choices=("near", "far"), default="", help="one of the two swarms")
    arguments = parser.parse_args()
    rounds, tokens = (1, 48) if arguments.quick else (arguments.rounds, arguments.tokens)
    figures = measure(rounds, tokens, arguments.only)
    print(json.dumps(figures) if arguments.json else "\n".join(f"{name:32} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
