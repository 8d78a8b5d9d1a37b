"""`/metrics`: a snapshot in Prometheus' text format (version 0.0.4).

The number of labels is bounded however large the swarm is: the first `MAX_PEERS` peers have labels of their own, the
others are summed up as `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.snapshot.views import STATES, Snapshot

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_PEERS = 32
MAX_HOPS = 32


@dataclass(frozen=True)
class Metric:
    """One metric with its samples: the values of its labels, and the number."""

    kind: str  # gauge or counter
    name: str
    help: str
    labels: Sequence[str]
    samples: Sequence[tuple[Sequence[str], float]]

    def text(self) -> str:
        """Return the lines of the text format."""
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {self.kind}"]
        for values, number in self.samples:
            pairs = ",".join(f'{label}="{_escape(value)}"' for label, value in zip(self.labels, values, strict=True))
            lines.append(f"{self.name}{f'{{{pairs}}}' if pairs else ''} {float(number)!r}")
        return "".join(f"{line}\n" for line in lines)


def exposition(snapshot: Snapshot) -> bytes:
    """Return all metrics of a snapshot that have a value as the body of `/metrics`."""
    parts = (_node, _flow, _reuse, _guesses, _device, _links, _route)
    return "".join(metric.text() for part in parts for metric in part(snapshot) if metric.samples).encode()


def _escape(value: str) -> str:
    """Return the value of a label as it stands between quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _gauge(name: str, help: str, value: float | None) -> Metric:
    return Metric("gauge", name, help, (), [] if value is None else [((), value)])


def _counter(name: str, help: str, value: float) -> Metric:
    return Metric("counter", name, help, (), [((), value)])


def _labelled(name: str, help: str, labels: Sequence[str], samples: Sequence[tuple[Sequence[str], float]]) -> Metric:
    return Metric("gauge", name, help, labels, samples)


def _node(snapshot: Snapshot) -> Iterable[Metric]:
    ever = snapshot.ever
    states = [((state,), snapshot.state == state) for state in STATES]
    sessions = [((role,), sum(s.role == role for s in snapshot.active_sessions)) for role in ("asking", "serving")]
    yield _labelled("shoal_info", "The running version.", ("version",), [((snapshot.version,), 1)])
    yield _labelled("shoal_state", "1 for the node's current state, 0 for the others.", ("state",), states)
    yield _gauge("shoal_paused", "1 while hosting is paused.", int(snapshot.courtesy.paused))
    yield _gauge("shoal_start_time_seconds", "Unix time of the node's start.", snapshot.started_at_ms / 1000)
    yield _gauge("shoal_blocks_hosted", "Blocks that this node hosts.", _hosted(snapshot))
    yield _gauge("shoal_blocks_total", "Blocks of the model.", snapshot.blocks_total)
    yield _gauge("shoal_peers", "Other known members of the swarm.", len(snapshot.peers))
    yield _gauge("shoal_links", "Open connections to peers.", snapshot.network.links)
    yield _labelled("shoal_sessions", "Sessions that are open now.", ("role",), sessions)
    yield _counter("shoal_served_tokens_total", "Tokens computed for others.", ever.served_tokens)
    yield _counter("shoal_asked_tokens_total", "Tokens generated for this node's user.", ever.asked_tokens)
    yield _counter("shoal_sent_bytes_total", "Bytes sent to peers.", ever.up_bytes)
    yield _counter("shoal_received_bytes_total", "Bytes received from peers.", ever.down_bytes)
    if snapshot.weights is not None:
        weights = snapshot.weights
        yield _gauge("shoal_weights_held_bytes", "Model weights on this disk.", weights.bytes_held)
        yield _counter("shoal_weights_given_bytes_total", "Model weights sent to peers.", weights.given_bytes)
        downloaded = weights.from_peers_bytes
        yield _counter("shoal_weights_downloaded_bytes_total", "Model weights downloaded from peers.", downloaded)
    yield _counter("shoal_audits_total", "Audits of other members.", ever.audits)
    yield _counter("shoal_audits_passed_total", "Audits that found nothing wrong.", ever.audits_passed)


def _hosted(snapshot: Snapshot) -> int:
    return 0 if snapshot.start is None or snapshot.stop is None else snapshot.stop - snapshot.start


def _flow(snapshot: Snapshot) -> Iterable[Metric]:
    flow = snapshot.flow
    yield _gauge("shoal_served_tokens_per_second", "Tokens for others, recent mean.", flow.served_tokens_per_s)
    yield _gauge("shoal_asked_tokens_per_second", "Tokens for this node's user, recent mean.", flow.asked_tokens_per_s)
    yield _gauge("shoal_sent_bytes_per_second", "Bytes sent, recent mean.", flow.up_bytes_per_s)
    yield _gauge("shoal_received_bytes_per_second", "Bytes received, recent mean.", flow.down_bytes_per_s)
    yield _gauge("shoal_steps_per_second", "Device steps, recent mean.", flow.steps_per_s)
    yield _gauge("shoal_batch_rows", "Sessions in a device step, recent mean.", flow.batch_rows)
    yield _gauge("shoal_queued_sessions", "Sessions waiting for a device step.", flow.queued)


def _reuse(snapshot: Snapshot) -> Iterable[Metric]:
    reuse = snapshot.reuse
    yield _counter("shoal_prompt_tokens_total", "Prompt tokens of this node's user.", reuse.prompt_tokens)
    yield _counter("shoal_prompt_cached_tokens_total", "Of these, cached at the hops.", reuse.cached_tokens)
    yield _gauge("shoal_kept_sessions", "Sessions of this node's user that rest at hops.", reuse.kept_sessions)
    yield _gauge("shoal_resting_sessions", "Sessions that rest at this node.", reuse.resting_sessions)
    yield _gauge("shoal_resting_tokens", "Tokens of KV cache that only resting sessions hold.", reuse.resting_tokens)
    yield _counter("shoal_reused_tokens_total", "Tokens cached here that new sessions began with.", reuse.reused_tokens)


def _guesses(snapshot: Snapshot) -> Iterable[Metric]:
    guesses = snapshot.guesses
    yield _counter("shoal_guessed_tokens_total", "Guessed tokens sent through the hops.", guesses.guessed_tokens)
    yield _counter("shoal_accepted_tokens_total", "Guessed tokens that were right.", guesses.accepted_tokens)


def _device(snapshot: Snapshot) -> Iterable[Metric]:
    device = snapshot.hardware
    if device is None:
        return
    yield _gauge("shoal_kv_bytes", "Memory reserved for the sessions' KV cache.", device.cache_bytes)
    yield _gauge("shoal_kv_used_bytes", "KV cache memory in use by sessions.", device.cache_used_bytes)
    yield _gauge("shoal_weights_bytes", "Memory of the hosted blocks.", device.weights_bytes)
    yield _gauge("shoal_step_seconds", "Typical time of a decode step.", device.step_s)
    yield _gauge("shoal_device_memory_bytes", "The device's total memory.", device.memory_total_bytes)
    yield _gauge("shoal_device_free_bytes", "The device's free memory.", device.memory_free_bytes)
    yield _gauge("shoal_device_load", "The device's load, 0 to 1.", device.load)
    yield _gauge("shoal_device_temperature_celsius", "The device's temperature.", device.temperature_c)
    yield _gauge("shoal_device_power_watts", "The device's power draw.", device.power_w)


def _links(snapshot: Snapshot) -> Iterable[Metric]:
    linked = sorted((peer for peer in snapshot.peers if peer.link is not None), key=lambda peer: peer.peer)
    named, others = linked[:MAX_PEERS], linked[MAX_PEERS:]

    counted = [(peer.peer, peer.up_bytes, peer.down_bytes) for peer in named]
    if others:
        counted.append(("other", sum(peer.up_bytes for peer in others), sum(peer.down_bytes for peer in others)))
    carried = [((name, way), size) for name, up, down in counted for way, size in (("up", up), ("down", down))]
    rtts = [((peer.peer,), peer.rtt_s) for peer in named if peer.rtt_s is not None]
    yield _labelled("shoal_link_bytes", "Bytes over each open link since it opened.", ("peer", "way"), carried)
    yield _labelled("shoal_link_rtt_seconds", "Round-trip time to each connected peer.", ("peer",), rtts)


def _route(snapshot: Snapshot) -> Iterable[Metric]:
    route = snapshot.route
    if route is None:
        return
    samples = [
        ((str(index), hop.peer, part), seconds)
        for index, hop in enumerate(route.hops[:MAX_HOPS])
        for part, seconds in (
            ("link", hop.link_s),
            ("compute", hop.compute_s),
            ("queue", hop.queue_s),
            ("host", hop.host_s),
        )
        if seconds is not None
    ]
    help = "Time of a token at each hop of the latest reply's route."
    yield _labelled("shoal_hop_seconds", help, ("hop", "peer", "part"), samples)
    yield _gauge("shoal_return_seconds", "Time from the last hop back to this node.", route.return_s)
    yield _gauge("shoal_ends_seconds", "Time of embedding, head and sampling on this node.", route.ends_s)
    yield _gauge("shoal_token_seconds", "Typical time of a token of the latest reply.", route.token_s)
