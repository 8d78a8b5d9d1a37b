"""Forecasts over a running swarm, from a node's snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.reasons import because
from app.planning.forecast import Terms, forecast_replies
from app.planning.machines import Fleet, MachineSpec
from app.planning.replies import ReplyTask
from app.planning.running_swarm import forecast_running, members_of
from app.routing.cost import HOP_S
from app.snapshot.views import PeerView, Snapshot
from engine.sources.starter import SHAPE

HERE = MachineSpec("here", 10**9, 10e9, 50e9, kind="cpu", rtt_s=0.0)  # lacks the memory: a CPU keeps 1 GB free
NEAR = PeerView("near", start=0, stop=15, rtt_s=0.01, state="serving", tokens_per_s=100.0)
FAR = PeerView("far", start=15, stop=30, rtt_s=0.05, state="serving", tokens_per_s=50.0)
NODE = Snapshot("me", "client", "", "http://127.0.0.1", swarm="reef", peers=(NEAR, FAR), blocks_total=30)


def test_a_route_over_members() -> None:
    found = forecast_running(NODE, HERE, SHAPE, ReplyTask(), Terms(256))
    assert found.swarm is not None
    assert found.machines == ("near", "far")
    # me → near → far → me; the way between the two is that to the farther one.
    assert found.swarm.parts["links"] == pytest.approx(0.005 + 0.025 + 0.025)
    assert found.swarm.parts["blocks"] == pytest.approx(1 / 100 + 1 / 50)
    assert found.swarm.parts["hops"] == pytest.approx(2 * HOP_S)
    assert (found.advice, found.limit, found.swarm.first_token_s, found.swarm.energy_kwh) == (
        "swarm",
        "latency",
        None,
        None,
    )


def test_this_machine_alone_where_it_is_as_fast() -> None:
    strong = replace(HERE, memory_bytes=64 * 10**9)
    found = forecast_running(NODE, strong, SHAPE, ReplyTask(), Terms(256))
    assert found.advice == "alone"
    assert found.alone == forecast_replies(Fleet(strong, (strong,)), SHAPE, ReplyTask(), Terms(256)).alone


def test_what_this_node_measured_counts_for_it_alone() -> None:
    strong = replace(HERE, memory_bytes=64 * 10**9, block_floor_s=1.0)  # badly measured on a loaded machine
    whole = replace(NODE, state="serving", start=0, stop=30, tokens_per_s=40.0, peers=())
    found = forecast_running(whole, strong, SHAPE, ReplyTask(), Terms(256))
    assert found.swarm is not None
    assert found.swarm == found.alone
    assert found.swarm.parts["blocks"] == pytest.approx(1 / 40)
    assert (found.advice, found.why) == ("alone", "no other machine would make it faster.")
    half = forecast_running(replace(whole, stop=15, peers=(FAR,)), strong, SHAPE, ReplyTask(), Terms(256))
    assert half.alone is not None
    assert half.alone.parts["blocks"] == pytest.approx(2 / 40)  # twice the blocks that it serves now


@pytest.mark.parametrize(
    "missing",
    [
        replace(FAR, state="paused"),
        replace(FAR, unused=because("peer_full", "it is full")),
        replace(FAR, start=None, stop=None),
        replace(FAR, start=15, stop=10**9),
        replace(FAR, start=16),
    ],
)
def test_without_a_route_this_machine_is_forecast_and_that_is_said(missing: PeerView) -> None:
    strong = replace(HERE, memory_bytes=64 * 10**9)
    found = forecast_running(replace(NODE, peers=(NEAR, missing)), strong, SHAPE, ReplyTask(), Terms(256))
    assert found.swarm == found.alone
    assert found.assumed[0].startswith("no swarm: this machine alone is forecast (no route: nobody serves block 15")


def test_this_node_serves_too_and_unmeasured_members_are_named() -> None:
    node = replace(
        NODE, state="serving", start=0, stop=15, tokens_per_s=100.0, peers=(replace(FAR, tokens_per_s=0.0, rtt_s=None),)
    )
    assert [member.peer for member in members_of(node)] == ["far", "me"]
    found = forecast_running(node, HERE, SHAPE, ReplyTask(), Terms(256))
    assert found.machines == ("me", "far")
    assert any("`shoal bench`" in words and "far" in words for words in found.assumed)
    assert "the round trip to far" in found.assumed
