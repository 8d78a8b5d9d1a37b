"""Forecasts over a running swarm, from a node's snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.reasons import because
from app.core.span import Span
from app.planning.devices import CROWDED_PASSES, PASSES_ON_CPU, trained_head_s
from app.planning.forecast import Terms, forecast_replies
from app.planning.machines import Fleet, MachineSpec
from app.planning.replies import ReplyTask
from app.planning.running_swarm import (
    GRID_PASSES,
    MeasuredMembers,
    forecast_running,
    members_of,
    step_of_members,
)
from app.planning.training_step import AGREEING, StepTask
from app.routing.cost import HOP_S
from app.routing.route import Hop
from app.snapshot.views import HopView, PeerView, RouteView, Snapshot
from app.swarm.records import Announcement
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
    replied = replace(whole, route=RouteView("s", (HopView("me", 0, 30, compute_s=0.05),)))
    again = forecast_running(replied, strong, SHAPE, ReplyTask(), Terms(256))
    assert again.swarm is not None
    assert again.swarm == again.alone
    assert again.swarm.parts["blocks"] == pytest.approx(0.05)
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


def test_the_first_token_comes_when_the_members_have_read_the_prompt() -> None:
    reading = (replace(NEAR, prefill_tokens_per_s=400.0), replace(FAR, prefill_tokens_per_s=200.0))
    fast = tuple(replace(peer, down_bytes_per_s=1e12) for peer in reading)
    found = forecast_running(replace(NODE, peers=fast), HERE, SHAPE, ReplyTask(prompt_tokens=512), Terms(256))
    assert found.swarm is not None
    assert found.swarm.first_token_s is not None
    # Two chunks of 256: the second follows the slower member.
    computing_s = 256 / 400 + 256 / 200 + 256 / 200
    beside_s = sum(found.swarm.parts.values()) - found.swarm.parts["blocks"]
    assert found.swarm.first_token_s == pytest.approx(computing_s + beside_s, rel=0.01)
    assert not any("prompts" in words for words in found.assumed)
    shared = tuple(replace(peer, host="127.0.0.1") for peer in fast)
    crowded = forecast_running(replace(NODE, peers=shared), HERE, SHAPE, ReplyTask(prompt_tokens=512), Terms(256)).swarm
    assert crowded is not None
    assert crowded.first_token_s == pytest.approx(found.swarm.first_token_s + 256 / 400, rel=0.01)  # no overlap
    slow = forecast_running(replace(NODE, peers=reading), HERE, SHAPE, ReplyTask(prompt_tokens=512), Terms(256)).swarm
    assert slow is not None
    assert slow.first_token_s is not None
    assert slow.first_token_s > found.swarm.first_token_s  # connections that nobody measured are assumed to be slow


@pytest.mark.parametrize(("tokens", "times"), [(256, 2.0), (100, 0.5), (63, 1.0)])
def test_an_earlier_prompt_on_the_same_way_says_how_fast_the_next_is(tokens: int, times: float) -> None:
    peers = tuple(
        replace(peer, prefill_tokens_per_s=speed, down_bytes_per_s=1e12)
        for peer, speed in ((NEAR, 400.0), (FAR, 200.0))
    )
    hops = (HopView("near", 0, 15, link_s=0.005), HopView("far", 15, 30, link_s=0.025))
    beside_s = 0.005 + 2 * 0.025 + 2 * HOP_S
    read_s = beside_s + times * tokens * (1 / 400 + 1 / 200)
    read = RouteView("s", hops, return_s=0.025, prompt_tokens=tokens, prompt_s=read_s)
    claimed, found, elsewhere = (
        forecast_running(replace(NODE, peers=peers, route=route), HERE, SHAPE, ReplyTask(512), Terms(256)).swarm
        for route in (None, read, replace(read, hops=hops[:1]))
    )
    assert claimed is not None
    assert found is not None
    assert claimed.first_token_s is not None
    computing_s = 256 / 400 + 2 * 256 / 200
    assert found.first_token_s == pytest.approx(claimed.first_token_s + (times - 1) * computing_s, rel=0.01)
    assert elsewhere == claimed


def test_a_connection_that_nobody_measured_is_in_the_time_of_the_earlier_prompt() -> None:
    """The earlier prompt took so long with its connections: the next takes as long a token, whatever is assumed."""
    peers = tuple(replace(peer, prefill_tokens_per_s=speed) for peer, speed in ((NEAR, 400.0), (FAR, 200.0)))
    hops = (HopView("near", 0, 15, link_s=0.005), HopView("far", 15, 30, link_s=0.025))
    beside_s, read_s = 0.005 + 2 * 0.025 + 2 * HOP_S, 160 * (1 / 400 + 1 / 200)
    read = RouteView("s", hops, return_s=0.025, prompt_tokens=160, prompt_s=beside_s + read_s)
    node = replace(NODE, peers=tuple(replace(peer, host="desk") for peer in peers), route=read)
    unmeasured, measured = (
        forecast_running(one, HERE, SHAPE, ReplyTask(prompt_tokens=512), Terms(256)).swarm
        for one in (node, replace(node, peers=tuple(replace(peer, down_bytes_per_s=1e12) for peer in node.peers)))
    )
    assert unmeasured is not None
    assert measured is not None
    beside_s = sum(unmeasured.parts.values()) - unmeasured.parts["blocks"]
    assert unmeasured.first_token_s == pytest.approx(512 / 160 * read_s + beside_s, rel=0.01)
    assert unmeasured.first_token_s == pytest.approx(measured.first_token_s, rel=0.01)


def test_a_member_that_says_nothing_of_prompts_is_named() -> None:
    peers = (replace(NEAR, prefill_tokens_per_s=400.0), FAR)
    found = forecast_running(replace(NODE, peers=peers), HERE, SHAPE, ReplyTask(), Terms(256))
    assert found.swarm is not None
    assert found.swarm.first_token_s is None
    assert "the speed of prompts of far, which announces none" in found.assumed


def trained(*members: Announcement, here: MachineSpec = HERE, rows: int = 256, rtt_s: float = 0.01) -> float:
    """Seconds of a step over these members, in their order."""
    measured = MeasuredMembers(lambda peer: rtt_s / 2, {member.peer: 1e12 for member in members})
    route = tuple(Hop(member.peer, member.span) for member in members if member.span is not None)
    return step_of_members(route, members, here, measured, SHAPE, StepTask(8, rows, 1)).seconds


def member(name: str, start: int, stop: int, prefill: float, device: str = "cpu") -> Announcement:
    return Announcement(name, 0, 0, "", "serving", Span(start, stop), 50.0, prefill, device=device)


def test_a_step_over_members_takes_their_passes_and_the_owner_s_head() -> None:
    left, right = member("left", 0, 15, 400.0), member("right", 15, 30, 200.0)
    passes = PASSES_ON_CPU[False, False]
    blocks_s = passes * (256 / 400 + 256 / 200)
    head_s = trained_head_s(SHAPE, HERE, rows=256, all_weights=False)
    links_s = 4 * 0.01 / 2 + (1 + AGREEING) * 0.01 + 4 * 256 * 576 * 2 / HERE.bytes_per_s / 2
    assert trained(left, right) == pytest.approx(blocks_s + head_s + links_s, rel=0.02)
    assert trained(left, right, rtt_s=1.0) > trained(left, right) + 2.5


def test_micro_batches_overlap_between_machines_only() -> None:
    members = [member(name, 10 * at, 10 * at + 10, 600.0) for at, name in enumerate("abc")]
    route = tuple(Hop(one.peer, one.span) for one in members if one.span is not None)
    task = StepTask(8, 256, 8)
    rates = {one.peer: 1e12 for one in members}
    apart, shared = (
        step_of_members(
            route,
            members,
            HERE,
            MeasuredMembers(lambda peer: 0.0, rates, hosts=dict.fromkeys("abc", host)),
            SHAPE,
            task,
        ).seconds
        for host in ("", "127.0.0.1")
    )
    assert shared > 2 * apart


def test_nodes_of_one_machine_wait_longer_for_their_threads() -> None:
    members = [member("left", 0, 15, 400.0), member("right", 15, 30, 400.0)]
    route = tuple(Hop(one.peer, one.span) for one in members if one.span is not None)
    rates, task = {one.peer: 1e12 for one in members}, StepTask(8, 256, 1)
    blocks_s = {
        host: step_of_members(
            route,
            members,
            HERE,
            MeasuredMembers(lambda peer: 0.0, rates, hosts={"left": "10.0.0.1", "right": host}),
            SHAPE,
            task,
        ).parts["blocks"]
        for host in ("10.0.0.1", "10.0.0.2")
    }
    assert blocks_s["10.0.0.1"] == pytest.approx(CROWDED_PASSES * blocks_s["10.0.0.2"], rel=0.01)


def test_prompts_of_few_bits_are_slower_than_passes_on_a_cpu_only() -> None:
    def seconds(quantisation: str, device: str) -> float:
        both = member("left", 0, 15, 400.0, device), member("right", 15, 30, 400.0, device)
        return trained(*(replace(one, quantisation=quantisation) for one in both))

    assert seconds("stored", "cpu") == pytest.approx(GRID_PASSES * seconds("none", "cpu"), rel=0.1)
    assert seconds("stored", "cuda:0") == seconds("none", "cuda:0")


def test_a_step_of_many_rows_is_computed_again() -> None:
    left, right = member("left", 0, 15, 400.0), member("right", 15, 30, 200.0)
    kept_s, again_s = (trained(left, right, rows=rows) / rows for rows in (256, 4096))
    assert again_s / kept_s == pytest.approx(PASSES_ON_CPU[False, True] / PASSES_ON_CPU[False, False], rel=0.2)


def test_the_owner_may_train_blocks_itself_and_a_boast_counts_little() -> None:
    own, other = member(HERE.name, 0, 15, 400.0), member("other", 15, 30, 400.0)
    alike = trained(own, other)
    assert alike > 0
    assert trained(own, replace(other, prefill_tokens_per_s=1e9)) > 0.5 * alike


def test_what_the_latest_reply_took_counts_instead_of_claims() -> None:
    hops = (HopView("near", 0, 15, compute_s=0.03), HopView("far", 15, 30, compute_s=0.06))
    reading = tuple(replace(peer, prefill_tokens_per_s=400.0) for peer in (NEAR, FAR))
    claimed = forecast_running(replace(NODE, peers=reading), HERE, SHAPE, ReplyTask(512), Terms(256)).swarm
    used = replace(NODE, peers=reading, route=RouteView("s", hops, ends_s=0.004))
    found = forecast_running(used, HERE, SHAPE, ReplyTask(512), Terms(256)).swarm
    assert found is not None
    assert claimed is not None
    assert found.parts["blocks"] == pytest.approx(0.03 + 0.06)  # three times what each claims
    assert found.parts["hops"] == pytest.approx(2 * HOP_S)
    assert found.parts["head"] == 0.004
    assert found.first_token_s is not None
    assert claimed.first_token_s is not None
    assert found.first_token_s == pytest.approx(claimed.first_token_s, rel=0.02)  # prompts wait less for memory
    waits = (replace(hops[0], queue_s=0.002, host_s=0.003), replace(hops[1], queue_s=0.0, host_s=0.0))
    held_up = replace(used, route=RouteView("s", waits, ends_s=0.004, host_s=0.001))
    slower = forecast_running(held_up, HERE, SHAPE, ReplyTask(512), Terms(256)).swarm
    assert slower is not None
    assert slower.parts["hops"] == pytest.approx(0.005 + HOP_S)  # nobody is believed to take less
    assert slower.parts["head"] == pytest.approx(0.005)
    lying = replace(used, route=RouteView("s", (replace(hops[0], compute_s=1e-9), hops[1]), ends_s=0.004))
    doubted = forecast_running(lying, HERE, SHAPE, ReplyTask(512), Terms(256)).swarm
    assert doubted is not None
    assert doubted.parts["blocks"] == pytest.approx(0.06 * (1 + 1 / 8))
