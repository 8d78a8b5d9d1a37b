"""`/metrics`: a snapshot in Prometheus' text format (version 0.0.4).

The number of labels is bounded however large the swarm is: the first `MAX_PEERS` peers have labels of their own, the
others are summed up as `other`.
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
    """One value with its labels."""

    value: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Family:
    """One metric: its name, kind, help text and samples."""

    name: str
    kind: str  # counter, gauge
    help: str
    samples: Sequence[Sample]


def exposition(snapshot: Snapshot) -> str:
    """Return all metrics of a snapshot as the body of `/metrics`."""
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
    yield Family("shoal_info", "gauge", "The running version.", (Sample(1, (("version", snapshot.version),)),))
    yield Family("shoal_state", "gauge", "1 for the node's current state, 0 for the others.", states)
    yield _one("shoal_paused", "gauge", "1 while hosting is paused.", int(snapshot.courtesy.paused))
    yield _one("shoal_start_time_seconds", "gauge", "Unix time of the node's start.", snapshot.started_at_ms / 1000)
    yield _one("shoal_blocks_hosted", "gauge", "Blocks that this node hosts.", _hosted(snapshot))
    yield _one("shoal_blocks_total", "gauge", "Blocks of the model.", snapshot.blocks_total)
    yield _one("shoal_peers", "gauge", "Other known members of the swarm.", len(snapshot.peers))
    yield _one("shoal_links", "gauge", "Open connections to peers.", snapshot.network.links)
    yield Family("shoal_sessions", "gauge", "Sessions that are open now.", sessions)
    yield _one("shoal_served_tokens_total", "counter", "Tokens computed for others.", ever.served_tokens)
    yield _one("shoal_asked_tokens_total", "counter", "Tokens generated for this node's user.", ever.asked_tokens)
    yield _one("shoal_sent_bytes_total", "counter", "Bytes sent to peers.", ever.up_bytes)
    yield _one("shoal_received_bytes_total", "counter", "Bytes received from peers.", ever.down_bytes)
    if snapshot.weights is not None:
        weights = snapshot.weights
        yield _one("shoal_weights_held_bytes", "gauge", "Model weights on this disk.", weights.bytes_held)
        yield _one("shoal_weights_given_bytes_total", "counter", "Model weights sent to peers.", weights.given_bytes)
        downloaded = weights.from_peers_bytes
        yield _one("shoal_weights_came_bytes_total", "counter", "Model weights downloaded from peers.", downloaded)
    yield _one("shoal_audits_total", "counter", "Audits of other members.", ever.audits)
    yield _one("shoal_audits_passed_total", "counter", "Audits that found nothing wrong.", ever.audits_passed)


def _hosted(snapshot: Snapshot) -> int:
    return 0 if snapshot.start is None or snapshot.stop is None else snapshot.stop - snapshot.start


def _flow(snapshot: Snapshot) -> Iterable[Family]:
    flow = snapshot.flow
    yield _one("shoal_served_tokens_per_second", "gauge", "Tokens for others, recent mean.", flow.served_tokens_per_s)
    yield _one(
        "shoal_asked_tokens_per_second", "gauge", "Tokens for this node's user, recent mean.", flow.asked_tokens_per_s
    )
    yield _one("shoal_sent_bytes_per_second", "gauge", "Bytes sent, recent mean.", flow.up_bytes_per_s)
    yield _one("shoal_received_bytes_per_second", "gauge", "Bytes received, recent mean.", flow.down_bytes_per_s)
    yield _one("shoal_steps_per_second", "gauge", "Device steps, recent mean.", flow.steps_per_s)
    yield _one("shoal_batch_rows", "gauge", "Sessions in a device step, recent mean.", flow.batch_rows)
    yield _one("shoal_queued_sessions", "gauge", "Sessions waiting for a device step.", flow.queued)


def _device(snapshot: Snapshot) -> Iterable[Family]:
    device = snapshot.hardware
    if device is None:
        return
    yield _one("shoal_kv_bytes", "gauge", "Memory reserved for the sessions' KV cache.", device.cache_bytes)
    yield _one("shoal_kv_used_bytes", "gauge", "KV cache memory in use by sessions.", device.cache_used_bytes)
    yield _one("shoal_weights_bytes", "gauge", "Memory of the hosted blocks.", device.weights_bytes)
    yield _one("shoal_step_seconds", "gauge", "Typical time of a decode step.", device.step_s)
    yield _one("shoal_device_memory_bytes", "gauge", "The device's total memory.", device.memory_total_bytes)
    yield _one("shoal_device_free_bytes", "gauge", "The device's free memory.", device.memory_free_bytes)
    yield _one("shoal_device_load", "gauge", "The device's load, 0 to 1.", device.load)
    yield _one("shoal_device_temperature_celsius", "gauge", "The device's temperature.", device.temperature_c)
    yield _one("shoal_device_power_watts", "gauge", "The device's power draw.", device.power_w)


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
    yield Family("shoal_link_rtt_seconds", "gauge", "Round-trip time to each connected peer.", rtts)


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
    yield Family("shoal_hop_seconds", "gauge", "Time of a token at each hop of the latest reply's route.", samples)
    yield _one("shoal_return_seconds", "gauge", "Time from the last hop back to this node.", route.return_s)
    yield _one("shoal_ends_seconds", "gauge", "Time of embedding, head and sampling on this node.", route.ends_s)
    yield _one("shoal_token_seconds", "gauge", "Typical time of a token of the latest reply.", route.token_s)
