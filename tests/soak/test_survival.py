"""Twenty deaths and twenty freezes of hops between real processes: every reply is the undisturbed one."""

from __future__ import annotations

import random
import signal
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.config.home import cache_folder
from engine.errors import EngineError
from engine.sources.opening import open_source
from tests.process.node_process import wait_until
from tests.process.process_swarm import Node, ProcessSwarm, Yardstick, open_process_swarm, prompt_of

pytestmark = pytest.mark.soak

SEEDS = 20
TOKENS = 80
TURN_TOKENS = 16
MAX_TIES = 1  # in twenty replies
SPANS = {"tiny-random": ("0:3", "3:6", "6:8"), "starter": ("0:10", "10:20", "20:30")}


@pytest.fixture(scope="module", params=sorted(SPANS))
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ProcessSwarm, Yardstick]]:
    """Three spans, each held twice, and the whole model here."""
    model: str = request.param
    folder: Path = tmp_path_factory.mktemp("nodes")
    cache = cache_folder() if model == "starter" else folder / "cache"
    try:
        open_source(model, cache)
    except EngineError as error:
        pytest.skip(f"the model cannot be had: {error}")
    with open_process_swarm(folder, SPANS[model] * 2, model=model, cache=cache) as swarm:
        swarm.wait_covered(2)
        yield swarm, Yardstick(model, cache)


def run_seeds(
    stage: tuple[ProcessSwarm, Yardstick], act: Callable[[Node], object], mend: Callable[[Node], object]
) -> list[float]:
    """The longest pause of each seed's reply; checks the replies."""
    swarm, yardstick = stage
    pauses, ties = [], 0
    for seed in range(SEEDS):
        text = prompt_of(seed)
        expected = swarm.chat(text, TOKENS)["token_ids"]
        reply, hurt = swarm.hurt(seed, TOKENS, act, random.Random(seed).choice)
        print(
            f"seed {seed}: {hurt.victim.span} behind token {hurt.at}, pause {reply['longest_gap_s']:.3f} s", flush=True
        )
        assert reply["recoveries"] >= 1, "the victim was on the route"
        if reply["token_ids"] != expected:
            assert yardstick.is_tie(text, expected, reply["token_ids"]), f"seed {seed}: a wrong token"
            ties += 1
            print(f"seed {seed}: a tie", flush=True)
        pauses.append(reply["longest_gap_s"])
        mend(hurt.victim)
        swarm.wait_covered(2)
        wait_until(swarm.no_sessions, "every hop is free again")
    print(f"pauses: {min(pauses):.3f} / {statistics.median(pauses):.3f} / {max(pauses):.3f} s; {ties} ties", flush=True)
    assert ties <= MAX_TIES
    return pauses


@pytest.mark.timeout(1800)
def test_a_hop_is_killed_at_a_random_token(stage: tuple[ProcessSwarm, Yardstick]) -> None:
    pauses = run_seeds(stage, lambda victim: victim.signal(signal.SIGKILL), stage[0].revive)
    assert max(pauses) <= 2


@pytest.mark.timeout(1800)
def test_a_hop_freezes_at_a_random_token_and_wakes_in_the_reply(stage: tuple[ProcessSwarm, Yardstick]) -> None:
    swarm, _ = stage

    def freeze(victim: Node) -> None:
        victim.signal(signal.SIGSTOP)
        swarm.later(8, lambda: victim.signal(signal.SIGCONT))

    pauses = run_seeds(stage, freeze, lambda victim: None)
    assert max(pauses) <= 5


@pytest.mark.timeout(1800)
def test_a_hop_is_killed_between_two_turns(stage: tuple[ProcessSwarm, Yardstick]) -> None:
    """The cache of a turn rests at three hops, of which one dies: the next turn has the tokens of a fresh one."""
    swarm, yardstick = stage
    ties = reused = 0
    for seed in range(SEEDS):
        text, more = prompt_of(seed), prompt_of(seed + 1000)
        first = swarm.chat(text, TURN_TOKENS)
        chosen = random.Random(seed).choice(first["route"])["peer"]
        victim = next(node for node in swarm.nodes if node.peer == chosen)
        victim.signal(signal.SIGKILL)
        victim.ended()
        second = swarm.chat(f"{text} {more}", TURN_TOKENS)
        expected = yardstick.reply(f"{text} {more}", TURN_TOKENS)
        if second["token_ids"] != expected:
            assert yardstick.is_tie(f"{text} {more}", expected, second["token_ids"]), f"seed {seed}: a wrong token"
            ties += 1
        swarm.revive(victim)
        swarm.wait_covered(2)
        again = swarm.chat(f"{text} {more}", TURN_TOKENS)
        reused += again["cached_tokens"] > 0
        print(
            f"seed {seed}: {victim.span}, {second['ttft_s']:.3f} s, {again['cached_tokens']} cached later", flush=True
        )
    assert reused == SEEDS
    assert ties <= MAX_TIES
