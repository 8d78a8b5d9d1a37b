"""Conversations and agents over three real nodes on loopback: what they read with kept sessions, and without.

    python -m tests.bench.conversation [--json] [--tokens 24]

Every part runs twice over the same nodes with the starter model, first with `keep_sessions` at its default and then
at 0, which also ends what the first run kept.

- A conversation of five turns and about 1500 tokens, four with a text and a question and a fifth with a question alone,
  greedy and with a seed: the time to the first token of the fifth turn, and whether all replies have the same tokens.
- Eight agents with one system prompt of 1000 tokens, all at once: the tokens of their prompts that were read. The
  nodes' own counters must agree.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.config.home import cache_folder
from app.config.settings import SETTINGS
from tests.bench.swarm_nodes import BenchSwarm, open_bench_swarm

SPANS = ("0:10", "10:20", "20:30")
MEMORY = "900MB"  # ten blocks, and cache for eight agents that share nothing, within one asker's share
AGENTS = 8
SYSTEM_TOKENS = 1000
TURNS = 5
TEXT_WORDS = 310
PATIENCE_S = 600.0  # eight agents that share nothing take long on a busy machine
KEEP = str(SETTINGS["keep_sessions"].default)
STYLES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 7}}
TOPICS = ("the tide", "a reef", "kelp", "salt", "gulls", "a harbour", "nets", "foam")
WORDS = "the boat went out with the tide and came back with a net full of small silver fish while gulls cried".split()


def words(count: int, first: int = 0) -> str:
    """So many words of text, others for each `first`."""
    return " ".join(WORDS[(first + index * (1 + first % 3)) % len(WORDS)] for index in range(count))


class Conversations:
    """Chats with a swarm, and what each turn gave."""

    def __init__(self, swarm: BenchSwarm, tokens: int) -> None:
        self._swarm, self._tokens = swarm, tokens

    def keep(self, sessions: str) -> None:
        """Keep so many sessions from now on, and none of those before."""
        self._swarm.client.set_config("keep_sessions", "0")
        self.reply([{"role": "user", "content": "Say nothing."}], tokens=1)  # its end drops what was kept
        self._swarm.client.set_config("keep_sessions", sessions)

    def reply(self, messages: Sequence[dict[str, str]], tokens: int = 0, **style: Any) -> dict[str, Any]:
        """A whole reply and its figures."""
        request = {"messages": list(messages), "max_tokens": tokens or self._tokens, "temperature": 0.0, **style}
        for piece in self._swarm.client.chat(request, silence_s=PATIENCE_S):
            if "done" in piece:
                done: dict[str, Any] = piece["done"]
                return done
        raise AssertionError("a reply ends with its figures")

    def turns(self, **style: Any) -> list[dict[str, Any]]:
        """Five turns of one conversation."""
        messages: list[dict[str, str]] = []
        told = []
        for turn in range(TURNS):
            text = f"{words(TEXT_WORDS, turn)}. " if turn < TURNS - 1 else ""
            question = f"{text}What did they say about {TOPICS[turn]}?"
            messages.append({"role": "user", "content": question})
            told.append(self.reply(messages, **style))
            read, ttft_s = told[-1]["prompt_tokens"] - told[-1]["cached_tokens"], told[-1]["ttft_s"]
            print(f"turn {turn + 1}: read {read} of {told[-1]['prompt_tokens']} in {ttft_s:.2f} s", file=sys.stderr)
            messages.append({"role": "assistant", "content": told[-1]["text"]})
        return told

    def agents(self, system: str) -> tuple[list[dict[str, Any]], int]:
        """Replies to all agents at once, and the tokens that went through each node's blocks for them."""
        told: list[dict[str, Any]] = [{} for _ in range(AGENTS)]

        def agent(number: int) -> None:
            question = {"role": "user", "content": f"Agent {number}: report on {TOPICS[number]} in a few words."}
            told[number] = self.reply([{"role": "system", "content": system}, question])

        before = self._served()
        threads = [threading.Thread(target=agent, args=(number,)) for number in range(AGENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(told), "a reply failed"
        print(f"agents: read {read_tokens(told)} tokens", file=sys.stderr)
        return told, self._served() - before

    def _served(self) -> int:
        """Tokens that went through all nodes' blocks, on average."""
        served = [node.snapshot().ever.served_tokens for node in self._swarm.nodes]
        return round(sum(served) / len(served))

    def system_prompt(self) -> str:
        """Text of about `SYSTEM_TOKENS` tokens."""
        count = SYSTEM_TOKENS // 2
        sample = self.reply([{"role": "system", "content": words(count, 1)}], tokens=1)["prompt_tokens"]
        return words(round(count * SYSTEM_TOKENS / sample))


def same_tokens(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> bool:
    """True if all replies have the same tokens."""
    return [told["token_ids"] for told in one] == [told["token_ids"] for told in other]


def read_tokens(told: Sequence[dict[str, Any]]) -> int:
    """Tokens of the prompts that were read."""
    return sum(reply["prompt_tokens"] - reply["cached_tokens"] for reply in told)


def measure(tokens: int) -> dict[str, Any]:
    """Everything, with and without."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_bench_swarm(
            Path(folder), cache_folder(), "starter", memory=MEMORY, spans=SPANS, keep_sessions=None
        ) as swarm,
    ):
        chats = Conversations(swarm, tokens)
        system = chats.system_prompt()
        turns: dict[str, dict[str, list[dict[str, Any]]]] = {}
        agents: dict[str, tuple[list[dict[str, Any]], int]] = {}
        for kept in (KEEP, "0"):
            chats.keep(kept)
            turns[kept] = {name: chats.turns(**style) for name, style in STYLES.items()}
            agents[kept] = chats.agents(system)
    with_it, without = turns[KEEP], turns["0"]
    (kept_agents, kept_served), (lone_agents, lone_served) = agents[KEEP], agents["0"]
    figures: dict[str, Any] = {}
    for name in STYLES:
        last, plain = with_it[name][-1], without[name][-1]
        prefix = "" if name == "greedy" else f"{name}_"
        figures |= {
            f"{prefix}turn5_ttft_ratio": round(last["ttft_s"] / plain["ttft_s"], 3),
            f"{prefix}turn5_ttft_s": [round(told["ttft_s"], 3) for told in (last, plain)],
            f"{prefix}turn5_read": [last["prompt_tokens"] - last["cached_tokens"], last["prompt_tokens"]],
            f"{prefix}same_tokens": same_tokens(with_it[name], without[name]),
            f"{prefix}tokens_per_s": [round(told["tokens_per_s"] or 0.0, 1) for told in (last, plain)],
        }
    decoded = AGENTS * tokens
    return {
        **figures,
        "agents_prefill_ratio": round(read_tokens(kept_agents) / read_tokens(lone_agents), 3),
        "agents_read": [read_tokens(kept_agents), read_tokens(lone_agents)],
        "agents_served": [kept_served, lone_served],
        "agents_served_less_replies_ratio": round((kept_served - decoded) / (lone_served - decoded), 3),
        "agents_same_tokens": same_tokens(kept_agents, lone_agents),
        "agents_recoveries": sum(told["recoveries"] for told in (*kept_agents, *lone_agents)),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=24, help="of each reply")
    arguments = parser.parse_args()
    figures = measure(arguments.tokens)
    print(json.dumps(figures) if arguments.json else "\n".join(f"{name:34} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
