"""`/metrics`: a snapshot in Prometheus' text format (version 0.0.4).

Labels are bounded, whatever the swarm does: the first peers of a fixed number have their own, the others are summed
up as `other`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.snapshot.views import STATES, Snapshot

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_PEERS = 32
MAX_HOPS = 32

_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
_HELP_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n"})


@dataclass(frozen=True)
class Sample:
    """One value under its labels."""

    value: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Family:
    """A metric: its name, kind and samples."""

    name: str
    kind: str  # counter, gauge
    help: str
    samples: Sequence[Sample]


def exposition(snapshot: Snapshot) -> str:
    """Everything, as Prometheus reads it."""
    families = (*_node(snapshot), *_flow(snapshot), *_device(snapshot), *_links(snapshot), *_route(snapshot))
    return "".join(_text(family) for family in families if family.samples)


def _text(family: Family) -> str:
    lines = [f"# HELP {family.name} {family.help.translate(_HELP_ESCAPES)}", f"# TYPE {family.name} {family.kind}"]
    for sample in family.samples:
        labels = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sample.labels)
        lines.append(f"{family.name}{'{' + labels + '}' if labels else ''} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    return repr(value)


def _one(name: str, kind: str, help: str, value: float | None) -> Family:
    return Family(name, kind, help, () if value is None else (Sample(value),))


def _node(snapshot: Snapshot) -> Iterable[Family]:
    ever = snapshot.ever
    states = tuple(Sample(int(snapshot.state == state), (("state", state),)) for state in STATES)
    roles = ("asking", "serving")
    sessions = [Sample(sum(s.role == role for s in snapshot.active_sessions), (("role", role),)) for role in roles]
    yield Family("shoal_info", "gauge", "The version that runs.", (Sample(1, (("version", snapshot.version),)),))
    yield Family("shoal_state", "gauge", "1 for the state that the node is in.", states)
    yield _one("shoal_paused", "gauge", "1 while hosting is paused.", int(snapshot.courtesy.paused))
    yield _one("shoal_start_time_seconds", "gauge", "When the node started.", snapshot.started_at_ms / 1000)
    yield _one("shoal_blocks_hosted", "gauge", "Blocks that this node hosts.", _hosted(snapshot))
    yield _one("shoal_blocks_total", "gauge", "Blocks of the model.", snapshot.blocks_total)
    yield _one("shoal_peers", "gauge", "Other members that are known.", len(snapshot.peers))
    yield _one("shoal_links", "gauge", "Open links.", snapshot.network.links)
    yield Family("shoal_sessions", "gauge", "Sequences that are being generated.", sessions)
    yield _one("shoal_served_tokens_total", "counter", "Tokens computed for others.", ever.served_tokens)
    yield _one("shoal_asked_tokens_total", "counter", "Tokens asked by this node's user.", ever.asked_tokens)
    yield _one("shoal_sent_bytes_total", "counter", "Bytes sent to peers.", ever.up_bytes)
    yield _one("shoal_received_bytes_total", "counter", "Bytes received from peers.", ever.down_bytes)
    if snapshot.weights is not None:
        weights = snapshot.weights
        yield _one("shoal_weights_held_bytes", "gauge", "The model's parts on this disk.", weights.bytes_held)
        yield _one("shoal_weights_given_bytes_total", "counter", "Parts given to peers.", weights.given_bytes)
        yield _one("shoal_weights_came_bytes_total", "counter", "Parts that came from peers.", weights.from_peers_bytes)
    yield _one("shoal_audits_total", "counter", "Audits of other members.", ever.audits)
    yield _one("shoal_audits_passed_total", "counter", "Audits that found nothing wrong.", ever.audits_passed)


def _hosted(snapshot: Snapshot) -> int:
    return 0 if snapshot.start is None or snapshot.stop is None else snapshot.stop - snapshot.start


def _flow(snapshot: Snapshot) -> Iterable[Family]:
    flow = snapshot.flow
    yield _one("shoal_served_tokens_per_second", "gauge", "Tokens for others, lately.", flow.served_tokens_per_s)
    yield _one(
        "shoal_asked_tokens_per_second", "gauge", "Tokens for this node's user, lately.", flow.asked_tokens_per_s
    )
    yield _one("shoal_sent_bytes_per_second", "gauge", "Bytes sent, lately.", flow.up_bytes_per_s)
    yield _one("shoal_received_bytes_per_second", "gauge", "Bytes received, lately.", flow.down_bytes_per_s)
    yield _one("shoal_steps_per_second", "gauge", "Device steps, lately.", flow.steps_per_s)
    yield _one("shoal_batch_rows", "gauge", "Mean sessions of a device step, lately.", flow.batch_rows)
    yield _one("shoal_queued_sessions", "gauge", "Sessions that wait for a device step.", flow.queued)


def _device(snapshot: Snapshot) -> Iterable[Family]:
    device = snapshot.hardware
    if device is None:
        return
    yield _one("shoal_kv_bytes", "gauge", "Memory set aside for sessions.", device.cache_bytes)
    yield _one("shoal_kv_used_bytes", "gauge", "Memory that sessions have leased.", device.cache_used_bytes)
    yield _one("shoal_weights_bytes", "gauge", "Memory of the hosted blocks.", device.weights_bytes)
    yield _one("shoal_step_seconds", "gauge", "A usual decode step.", device.step_s)
    yield _one("shoal_device_memory_bytes", "gauge", "The device's memory.", device.memory_total_bytes)
    yield _one("shoal_device_free_bytes", "gauge", "The device's free memory.", device.memory_free_bytes)
    yield _one("shoal_device_load", "gauge", "The device's load, 0 to 1.", device.load)
    yield _one("shoal_device_temperature_celsius", "gauge", "The device's temperature.", device.temperature_c)
    yield _one("shoal_device_power_watts", "gauge", "The device's power.", device.power_w)


def _links(snapshot: Snapshot) -> Iterable[Family]:
    linked = sorted((peer for peer in snapshot.peers if peer.link is not None), key=lambda peer: peer.peer)
    named, others = linked[:MAX_PEERS], linked[MAX_PEERS:]

    counted = [(peer.peer, peer.up_bytes, peer.down_bytes) for peer in named]
    if others:
        counted.append(("other", sum(peer.up_bytes for peer in others), sum(peer.down_bytes for peer in others)))
    carried = [
        Sample(size, (("peer", name), ("way", way)))
        for name, up, down in counted
        for way, size in (("up", up), ("down", down))
    ]
    rtts = [Sample(peer.rtt_s, (("peer", peer.peer),)) for peer in named if peer.rtt_s is not None]
    yield Family("shoal_link_bytes", "gauge", "Bytes over each open link since it opened.", carried)
    yield Family("shoal_link_rtt_seconds", "gauge", "Round trip to each linked peer.", rtts)


def _route(snapshot: Snapshot) -> Iterable[Family]:
    route = snapshot.route
    if route is None:
        return
    samples = [
        Sample(seconds, (("hop", str(index)), ("peer", hop.peer), ("part", part)))
        for index, hop in enumerate(route.hops[:MAX_HOPS])
        for part, seconds in (("link", hop.link_s), ("compute", hop.compute_s), ("queue", hop.queue_s))
        if seconds is not None
    ]
    yield Family("shoal_hop_seconds", "gauge", "Where a token's time went, on the latest reply's route.", samples)
    yield _one("shoal_return_seconds", "gauge", "From the last hop back.", route.return_s)
    yield _one("shoal_ends_seconds", "gauge", "Embedding, head and sampling here.", route.ends_s)
    yield _one("shoal_token_seconds", "gauge", "A usual token of the latest reply.", route.token_s)
