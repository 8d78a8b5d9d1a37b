"""Homes with 2 Mbit/s up and 10 down: replies, long prompts, and a newcomer that fetches the model meanwhile.

The networks are made of network namespaces, which takes root, `ip` and `tc`; without them this is skipped. What it
rests on is shown in `make test` by `tests/p2p/test_frames.py` and `tests/p2p/test_limits.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from app.api.client import client_of
from app.config.home import cache_folder
from engine.errors import EngineError
from engine.sources.opening import open_source
from tests.p2p.namespaces import Namespaces, made
from tests.process.namespace_node import Inside
from tests.process.node_process import wait_until
from tests.process.process_swarm import MANY_READY_S, ProcessSwarm, prompt_of

pytestmark = pytest.mark.soak

UP, DOWN = "2mbit", "10mbit"
SPANS = {"a": "0:10", "b": "10:20", "c": "20:30"}
# 660 tokens each, 1.5 MB between two hops in float32
LONG, OTHER_LONG = (" ".join(prompt_of(first + seed) for seed in range(50)) for first in (0, 1000))
REPLIES, TOKENS = 12, 30
FETCHED_S = 900.0  # the model has 98 MB, and each of three members sends 250 kB/s


@pytest.fixture
def homes() -> Iterator[Namespaces]:
    def make(networks: Namespaces) -> None:
        networks.add_switch()
        for number, name in enumerate((*SPANS, "asker", "late"), 1):
            networks.add(name)
            networks.plug_far(name, f"51.{number}.0.1", up=UP, down=DOWN)

    with made("shoals", make, "tc") as networks:
        yield networks


@pytest.mark.timeout(2400)
def test_replies_and_a_newcomer_over_slow_links(
    homes: Namespaces, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    try:
        open_source("starter", cache_folder())
    except EngineError as error:
        pytest.skip(f"the model cannot be had: {error}")
    hosts = [Inside(homes, name, tmp_path, f"--blocks={span}", max_vram="400MB") for name, span in SPANS.items()]
    asker = Inside(homes, "asker", tmp_path)
    late = Inside(homes, "late", tmp_path, max_vram="2GB", cache=tmp_path / "empty")
    assert hosts[0].place.shoal("create", "reef", "--model", "starter").status == 0
    with ExitStack() as stack:
        first = stack.enter_context(hosts[0].start())
        first.ready(MANY_READY_S)
        invite = hosts[0].invite()
        nodes = [stack.enter_context(node.start(SHOAL_INVITE=invite)) for node in (*hosts[1:], asker)]
        for node in nodes:
            node.ready(MANY_READY_S)
        swarm = asker.run(lambda: ProcessSwarm(nodes[-1], []))
        asker.run(lambda: swarm.wait_covered(1))

        def chat(text: str) -> dict[str, Any]:
            began = time.monotonic()
            found: dict[str, Any] = asker.run(lambda: swarm.chat(text, TOKENS))
            return {**found, "total_s": time.monotonic() - began}

        chat(prompt_of(0))  # loads what the asker needs itself
        quiet = [chat(prompt_of(seed)) for seed in range(1, 4)]
        prompt = chat(LONG)
        newcomer = stack.enter_context(late.start(SHOAL_INVITE=invite))
        newcomer.up()
        beside = [chat(prompt_of(100 + seed)) for seed in range(REPLIES)]
        second = chat(OTHER_LONG)
        wait_until(
            lambda: late.run(lambda: client_of(late.place.home).get("/control/status"))["stop"] == 30,
            "the newcomer serves the model",
            FETCHED_S,
        )
    for name, told in (("quiet", quiet), ("beside_a_download", beside)):
        record_property(f"seconds_{name}", median(one["total_s"] for one in told))
    record_property("prompt_s", prompt["ttft_s"])
    record_property("prompt_beside_a_download_s", second["ttft_s"])
    record_property("recoveries_beside_a_download", sum(one["recoveries"] for one in (*beside, second)))
    assert [one["recoveries"] for one in (*quiet, prompt)] == [0] * 4
    assert sum(one["recoveries"] for one in (*beside, second)) <= 2  # eight in one reply before links were fitted
