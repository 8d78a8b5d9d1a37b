"""A siege: a swarm of four nodes under all attacks at once while eight askers chat, beside a control without contact.

`SIEGE_S=300 make soak` shortens it. The attackers are one process (`tests.soak.siege_attackers`); in the control as
much CPU time is burned by a process that contacts nobody, so that what differs is what the attacks do.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.process.node_process import wait_until
from tests.process.process_swarm import ProcessSwarm, Yardstick, open_process_swarm, prompt_of

pytestmark = pytest.mark.soak

SIEGE_S = float(os.environ.get("SIEGE_S", "1800"))
CONTROL_S = min(SIEGE_S, 300.0)
ASKERS = 8
PROMPTS = 24
TOKENS = 48
STUCK_S = 90.0  # without a token
HURT_EVERY_S = 30.0
FREEZE_S = 6.0
WARM_S = min(120.0, SIEGE_S / 3)  # after which memory must be flat
GROWTH_BYTES = 48 * 2**20
LEAST_SPEED = 0.6  # of the control's
ROOT = Path(__file__).resolve().parents[2]
BURN = """
import sys, time
share = float(sys.argv[1])
while True:
    until = time.perf_counter() + 0.05 * share
    while time.perf_counter() < until:
        pass
    time.sleep(0.05 * max(0.0, 1 - share))
"""


@dataclass
class Tally:
    """What the askers saw; each thread adds to it under the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    replies: int = 0
    tokens: int = 0
    ties: int = 0
    recoveries: int = 0
    longest_gap_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest_first_s: float = 0.0  # wait for a reply's first token
    first_s: float = 0.0  # and all such waits together

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all askers together."""
        return self.tokens / self.seconds


def converse(
    swarm: ProcessSwarm, yardstick: Yardstick, expected: Mapping[str, Sequence[int]], tally: Tally, until: float
) -> None:
    """One reply after another, each compared with the one that a single process writes."""
    dice = random.Random(threading.get_ident())
    while time.monotonic() < until:
        text = dice.choice(list(expected))
        try:
            reply = swarm.chat(text, TOKENS, silence_s=STUCK_S)
        except Exception as error:
            with tally.lock:
                tally.failures.append(f"{text!r}: {type(error).__name__}: {error}")
            continue
        with tally.lock:
            tally.replies += 1
            tally.first_s += reply["ttft_s"]
            tally.slowest_first_s = max(tally.slowest_first_s, reply["ttft_s"])
            tally.tokens += len(reply["token_ids"])
            tally.recoveries += reply["recoveries"]
            tally.longest_gap_s = max(tally.longest_gap_s, reply["longest_gap_s"])
            if reply["token_ids"] != expected[text]:
                if yardstick.is_tie(text, expected[text], reply["token_ids"]):
                    tally.ties += 1
                else:
                    tally.failures.append(f"{text!r}: a wrong token in {reply['token_ids']}")


def memory(swarm: ProcessSwarm) -> dict[str, int]:
    """The resident bytes of the processes that live all the time."""
    always = {"asker": swarm.asker, "n0": swarm.nodes[0].serving, "n1": swarm.nodes[1].serving}
    return {
        name: psutil.Process(node.process.pid).memory_info().rss for name, node in always.items() if node is not None
    }


def hurt(swarm: ProcessSwarm, until: float, warm: dict[str, int]) -> None:
    """By turns freeze and kill the second holder of some blocks; a killed one comes back."""
    began, turn = time.monotonic(), 0
    while (next_at := began + (turn + 1) * HURT_EVERY_S) < until:
        time.sleep(max(0.0, next_at - time.monotonic()))
        victim = swarm.nodes[2 + turn % 2]
        if turn // 2 % 2 == 0:
            victim.signal(signal.SIGSTOP)
            time.sleep(FREEZE_S)
            victim.signal(signal.SIGCONT)
        else:
            victim.signal(signal.SIGKILL)
            victim.ended()
            swarm.revive(victim)
        turn += 1
        if not warm and time.monotonic() - began > WARM_S:
            warm.update(memory(swarm))
        print(f"{time.monotonic() - began:.0f} s: {memory(swarm)}", flush=True)


def chat_for(
    seconds: float,
    swarm: ProcessSwarm,
    yardstick: Yardstick,
    expected: Mapping[str, Sequence[int]],
    warm: dict[str, int],
) -> Tally:
    """Let all askers chat for a while, while hops are killed and frozen."""
    tally, began = Tally(), time.monotonic()
    threads = [
        threading.Thread(target=converse, args=(swarm, yardstick, expected, tally, began + seconds))
        for _ in range(ASKERS)
    ]
    for thread in threads:
        thread.start()
    hurt(swarm, began + seconds, warm)
    for thread in threads:
        thread.join(seconds + STUCK_S + 60)
    tally.seconds = time.monotonic() - began
    assert not any(thread.is_alive() for thread in threads), "a reply never ended"
    return tally


def plan(swarm: ProcessSwarm, folder: Path) -> Path:
    """What the attackers must know, in a file."""
    status = swarm.client.get("/control/status")
    victims = [
        {
            "peer": node.peer,
            "address": node.place.node_file()["listen_addrs"][0],
            "span": list(map(int, node.span.split(":"))),
        }
        for node in swarm.nodes
    ]
    asker = swarm.asker.place.node_file()
    victims.append({"peer": asker["peer_id"], "address": asker["listen_addrs"][0], "span": [0, 4]})
    path = folder / "siege.json"
    path.write_text(json.dumps({"swarm": status["swarm"], "model": status["manifest"], "victims": victims}))
    return path


@contextmanager
def running(*command: str, wait_for: str = "") -> Iterator[psutil.Process]:
    """A process that is killed at the end; with `wait_for`, once it has said so."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        if wait_for:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == wait_for
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def restarts(home: Path) -> list[str]:
    """Lines of a node's log that tell of a part that was restarted."""
    text = "".join(path.read_text(errors="replace") for path in sorted((home / "logs").glob("node.log*")))
    return [line for line in text.splitlines() if "it restarts in" in line or "is restarted" in line]


@pytest.mark.timeout(3 * SIEGE_S + 1800)
def test_a_swarm_under_siege_serves_everybody(tmp_path: Path) -> None:
    # A small cache: its pages are touched one after another, which would look like growth for an hour.
    with open_process_swarm(tmp_path, ("0:4", "4:8") * 2, memory="40MB") as swarm:
        swarm.wait_covered(2)
        yardstick = Yardstick("tiny-random", tmp_path / "cache")
        expected = {prompt_of(seed): yardstick.reply(prompt_of(seed), TOKENS) for seed in range(PROMPTS)}
        warm: dict[str, int] = {}
        with running("-m", "tests.soak.siege_attackers", str(plan(swarm, tmp_path)), wait_for="besieging") as attackers:
            before, began = attackers.cpu_times(), time.monotonic()
            siege = chat_for(SIEGE_S, swarm, yardstick, expected, warm)
            after = attackers.cpu_times()
            share = (after.user + after.system - before.user - before.system) / (time.monotonic() - began)
            grown = {name: now - warm[name] for name, now in memory(swarm).items()}
        print(f"siege: {siege}, {siege.tokens_per_s:.1f} tokens/s; attackers use {share:.2f} of a core", flush=True)
        print(f"memory grew by {grown}", flush=True)
        wait_until(swarm.no_sessions, "every lease was given back", seconds=200)
        with running("-c", BURN, str(min(share, 1.0))):
            control = chat_for(CONTROL_S, swarm, yardstick, expected, {"": 0})
        print(f"control: {control}, {control.tokens_per_s:.1f} tokens/s", flush=True)
        found = [
            line
            for home in (swarm.asker.place.home, *(node.place.home for node in swarm.nodes))
            for line in restarts(home)
        ]
        print(f"speed: {siege.tokens_per_s / control.tokens_per_s:.2f} of the control", flush=True)
        assert not siege.failures
        assert not control.failures
        assert siege.ties <= max(1, siege.replies // 20)
        assert not found
        assert all(growth < GROWTH_BYTES for growth in grown.values())
        assert siege.tokens_per_s >= LEAST_SPEED * control.tokens_per_s
