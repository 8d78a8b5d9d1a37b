"""Replies between real processes that live through a frozen, a killed and a leaving hop, and the death of a holder.

One swarm goes through all of it in turn: the tests are in order, and each leaves it poorer. The long form, over many
seeds, is `tests/soak/test_survival.py`.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from app.cli.demo_swarm import memory_for
from tests.process.node_process import wait_until
from tests.process.process_swarm import Node, ProcessSwarm, Yardstick, open_process_swarm, prompt_of

TOKENS = 80
NODES = ("0:4", "4:8", "4:8", "4:8", "")  # the last one chooses by itself


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSwarm]:
    """Every block is held twice; the last node has room for half of them, and takes what is held least."""
    room, _ = memory_for("tiny-random", 0.5)
    with open_process_swarm(tmp_path_factory.mktemp("nodes"), NODES, spare_memory=room) as swarm:
        swarm.wait_covered(2)
        yield swarm


@pytest.fixture(scope="module")
def yardstick(swarm: ProcessSwarm) -> Yardstick:
    return Yardstick("tiny-random", swarm.asker.place.cache)


def check(swarm: ProcessSwarm, yardstick: Yardstick, seed: int, reply: dict[str, Any]) -> None:
    """The reply is the undisturbed one, or differs first where two tokens were all but equal."""
    text = prompt_of(seed)
    expected = yardstick.reply(text, TOKENS)
    assert reply["token_ids"] == expected or yardstick.is_tie(text, expected, reply["token_ids"])
    assert reply["recoveries"] >= 1
    wait_until(swarm.no_sessions, "every hop is free again")


def one_of_many(nodes: list[Node]) -> Node:
    """A hop of a route that runs the second half, or a part of it: a busy machine may divide it between two."""
    return next(node for node in nodes if node.span == "4:8")


def test_a_frozen_hop_costs_seconds_and_does_no_harm_when_it_wakes(swarm: ProcessSwarm, yardstick: Yardstick) -> None:
    def freeze(victim: Node) -> None:
        victim.signal(signal.SIGSTOP)
        swarm.later(8, lambda: victim.signal(signal.SIGCONT))

    reply, _ = swarm.hurt(1, TOKENS, freeze, random.Random(1).choice)
    check(swarm, yardstick, 1, reply)
    assert reply["longest_gap_s"] <= 5


def test_a_killed_hop_costs_hardly_anything(swarm: ProcessSwarm, yardstick: Yardstick) -> None:
    reply, hurt = swarm.hurt(2, TOKENS, lambda victim: victim.signal(signal.SIGKILL), one_of_many)
    check(swarm, yardstick, 2, reply)
    assert reply["longest_gap_s"] <= 2
    assert hurt.victim.peer not in {hop["peer"] for hop in reply["route"]}


def test_a_leaving_hop_hands_over_and_exits_in_order(swarm: ProcessSwarm, yardstick: Yardstick) -> None:
    reply, hurt = swarm.hurt(3, TOKENS, lambda victim: victim.signal(signal.SIGTERM), one_of_many)
    check(swarm, yardstick, 3, reply)
    assert reply["longest_gap_s"] <= 1
    assert hurt.victim.ended() == 0


def test_the_only_holder_dies_and_a_spare_node_takes_its_place(swarm: ProcessSwarm, yardstick: Yardstick) -> None:
    """The reply waits, and goes on where the spare node, which held other blocks, now serves the lost ones."""
    spare = swarm.nodes[-1]
    assert spare.facts()["start"] == 0
    reply, _ = swarm.hurt(4, TOKENS, lambda victim: victim.signal(signal.SIGKILL), one_of_many)
    check(swarm, yardstick, 4, reply)
    assert reply["longest_gap_s"] <= 15
    assert [hop["peer"] for hop in reply["route"]] == [swarm.nodes[0].peer, spare.peer]


def test_more_than_the_cache_can_hold_names_the_block_and_the_peer(swarm: ProcessSwarm) -> None:
    begin = time.monotonic()
    answer = swarm.asker.place.shoal("chat", "hello", "--temperature=0", "--max-tokens=4000")
    assert (answer.status, answer.err.count("\n")) == (1, 1)
    assert "block 4" in answer.err
    assert swarm.nodes[-1].peer in answer.err
    assert "no room for" in answer.err
    assert time.monotonic() - begin < 15


def test_a_frozen_only_holder_is_named_in_time(swarm: ProcessSwarm) -> None:
    spare = swarm.nodes[-1]
    spare.signal(signal.SIGSTOP)
    begin = time.monotonic()
    answer = swarm.asker.place.shoal("chat", "hello", "--temperature=0", "--max-tokens=4")
    assert (answer.status, answer.err.count("\n")) == (1, 1)
    assert "block 4" in answer.err
    assert time.monotonic() - begin < 20
