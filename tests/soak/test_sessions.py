"""Many sessions at once for minutes, while nodes come and go: no wrong token, nothing leaks, nothing sticks."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.process.node_process import wait_until
from tests.process.process_swarm import ProcessSwarm, Yardstick, open_process_swarm, prompt_of

pytestmark = pytest.mark.soak

SESSIONS = 32
SECONDS = 300.0
RESTART_EVERY_S = 30.0
PROMPTS = 48
TOKENS = 48
STUCK_S = 60.0  # without a token
WARM_S = 60.0  # after which memory must be flat
GROWTH_BYTES = 40 * 2**20


@dataclass
class Tally:
    """What the sessions saw; each thread adds to it under the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    replies: int = 0
    recoveries: int = 0
    ties: int = 0
    longest_gap_s: float = 0.0
    failures: list[str] = field(default_factory=list)


def converse(
    swarm: ProcessSwarm, yardstick: Yardstick, expected: Mapping[str, Sequence[int]], tally: Tally, until: float
) -> None:
    """One reply after another, each compared with the one that a single process writes."""
    dice = random.Random(threading.get_ident())
    while time.monotonic() < until and not tally.failures:
        text = dice.choice(list(expected))
        try:
            reply = swarm.chat(text, TOKENS, silence_s=STUCK_S)
        except Exception as error:
            with tally.lock:
                tally.failures.append(f"{text!r}: {type(error).__name__}: {error}")
            return
        with tally.lock:
            tally.replies += 1
            tally.recoveries += reply["recoveries"]
            tally.longest_gap_s = max(tally.longest_gap_s, reply["longest_gap_s"])
            if reply["token_ids"] != expected[text]:
                if yardstick.is_tie(text, expected[text], reply["token_ids"]):
                    tally.ties += 1
                else:
                    tally.failures.append(f"{text!r}: a wrong token in {reply['token_ids']}")


def memory(swarm: ProcessSwarm) -> dict[str, int]:
    """The resident bytes of the processes that live all the time."""
    always = {"asker": swarm.asker, "n0": swarm.nodes[0].serving}
    return {
        name: psutil.Process(node.process.pid).memory_info().rss for name, node in always.items() if node is not None
    }


def restart_one_after_another(swarm: ProcessSwarm, tally: Tally, until: float) -> dict[str, int]:
    """Every half minute another node leaves or is killed, and comes back; the memory when the swarm was warm."""
    began, turn = time.monotonic(), 0
    warm: dict[str, int] = {}
    while (next_at := began + (turn + 1) * RESTART_EVERY_S) < until and not tally.failures:
        time.sleep(max(0.0, next_at - time.monotonic()))
        victim = swarm.nodes[1 + turn % (len(swarm.nodes) - 1)]
        how = (signal.SIGKILL, signal.SIGTERM)[turn // 3 % 2]
        victim.signal(how)
        status = victim.ended()
        assert how == signal.SIGKILL or status == 0, "a node that is asked to leave leaves in order"
        swarm.revive(victim)
        turn += 1
        if not warm and time.monotonic() - began > WARM_S:
            warm = memory(swarm)
        print(f"{time.monotonic() - began:.0f} s: {tally.replies} replies, {memory(swarm)}", flush=True)
    return warm


@pytest.mark.timeout(1200)
def test_many_sessions_live_through_restarts(tmp_path: Path) -> None:
    with open_process_swarm(tmp_path, ("0:4", "4:8") * 2) as swarm:
        swarm.wait_covered(2)
        yardstick = Yardstick("tiny-random", tmp_path / "cache")
        expected = {prompt_of(seed): yardstick.reply(prompt_of(seed), TOKENS) for seed in range(PROMPTS)}
        tally, until = Tally(), time.monotonic() + SECONDS
        threads = [
            threading.Thread(target=converse, args=(swarm, yardstick, expected, tally, until)) for _ in range(SESSIONS)
        ]
        for thread in threads:
            thread.start()
        warm = restart_one_after_another(swarm, tally, until)
        for thread in threads:
            thread.join(STUCK_S + 30)
        print(tally, flush=True)
        assert not any(thread.is_alive() for thread in threads), "no session is stuck"
        assert not tally.failures
        assert tally.recoveries > 0
        assert tally.ties <= max(1, tally.replies // 20)
        wait_until(swarm.no_sessions, "every lease was given back")
        grown = {name: now - warm[name] for name, now in memory(swarm).items()}
        print(f"memory grew by {grown}", flush=True)
        assert all(growth < GROWTH_BYTES for growth in grown.values())
