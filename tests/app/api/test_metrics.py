"""Prometheus' text format: what its own parser reads back, with labels that no swarm can make grow."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from app.api.metrics import MAX_PEERS, exposition
from app.snapshot.views import (
    DeviceView,
    FlowView,
    GivenView,
    GuessView,
    HopView,
    NetworkView,
    PeerView,
    ReuseView,
    RouteView,
    SessionView,
    Snapshot,
    WeightsView,
)


def read(snapshot: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample, by its name and labels."""
    text = exposition(snapshot).decode()
    assert text.endswith("\n")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples), "a sample stands twice"
    return found


def busy(peers: int = 2) -> Snapshot:
    return Snapshot(
        "me",
        "serving",
        "",
        "http://127.0.0.1:1",
        blocks_total=8,
        start=2,
        stop=8,
        version='1 "quoted" \\ back\nslash',
        network=NetworkView(links=3),
        peers=tuple(PeerView(f"peer{i:03}", link="lan", rtt_s=0.001, up_bytes=10, down_bytes=i) for i in range(peers)),
        active_sessions=(SessionView("ab", "serving", "peer000"), SessionView("cd", "asking", "me")),
        hardware=DeviceView("cpu", cache_bytes=100, cache_used_bytes=40, step_s=0.01, load=None),
        flow=FlowView(served_tokens_per_s=3.5, batch_rows=2.0, queued=1),
        guesses=GuessView(30, 21),
        ever=GivenView(served_tokens=12, up_bytes=5),
        reuse=ReuseView(prompt_tokens=90, cached_tokens=60, resting_tokens=128),
        weights=WeightsView(bytes_held=70, from_peers_bytes=60, given_bytes=2**40 + 1),
        route=RouteView("ab", (HopView("peer000", 0, 2, "lan", 0.001, 0.02, None),), token_s=0.05),
    )


def test_what_is_written_is_read_back() -> None:
    found = read(busy())
    assert found["shoal_state", (("state", "serving"),)] == 1
    assert found["shoal_state", (("state", "paused"),)] == 0
    assert found["shoal_info", (("version", '1 "quoted" \\ back\nslash'),)] == 1
    assert found["shoal_served_tokens_total", ()] == 12
    assert found["shoal_served_tokens_per_second", ()] == 3.5
    assert (found["shoal_prompt_tokens_total", ()], found["shoal_prompt_cached_tokens_total", ()]) == (90, 60)
    assert found["shoal_resting_tokens", ()] == 128
    assert (found["shoal_guessed_tokens_total", ()], found["shoal_accepted_tokens_total", ()]) == (30, 21)
    assert found["shoal_weights_downloaded_bytes_total", ()] == 60
    assert found["shoal_weights_given_bytes_total", ()] == 2**40 + 1
    assert (found["shoal_kv_used_bytes", ()], found["shoal_kv_bytes", ()]) == (40, 100)
    assert found["shoal_link_bytes", (("peer", "peer001"), ("way", "down"))] == 1
    assert found["shoal_hop_seconds", (("hop", "0"), ("part", "compute"), ("peer", "peer000"))] == 0.02
    assert found["shoal_sessions", (("role", "asking"),)] == 1
    assert found["shoal_blocks_hosted", ()] == 6
    assert ("shoal_device_load", ()) not in found, "what nobody measured is not there"
    assert all(math.isfinite(value) for value in found.values())


def test_an_idle_node_has_no_route_and_no_device() -> None:
    names = {name for name, _ in read(Snapshot("me", "idle", "", ""))}
    assert "shoal_peers" in names
    assert not names & {"shoal_hop_seconds", "shoal_kv_bytes", "shoal_link_bytes"}


def test_labels_do_not_grow_with_the_swarm() -> None:
    found = read(busy(peers=MAX_PEERS + 100))
    peers = {dict(labels)["peer"] for name, labels in found if name == "shoal_link_bytes"}
    assert len(peers) == MAX_PEERS + 1
    assert found["shoal_link_bytes", (("peer", "other"), ("way", "up"))] == 1000
    assert len(found) < 300
