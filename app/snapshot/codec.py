"""Converts snapshots to and from JSON, for the API, the command line and the dashboard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from app.snapshot.views import (
    JobView,
    JoinableView,
    ModelView,
    OfferView,
    PeerView,
    ProspectsView,
    Snapshot,
    TrainingView,
)

_T = TypeVar("_T")
STATUS_FIELDS = (
    "peer_id",
    "name",
    "state",
    "reason",
    "swarm",
    "manifest",
    "private",
    "model",
    "context_length",
    "blocks_total",
    "start",
    "stop",
    "listen_addrs",
    "api_url",
    "lan_url",
    "lan_fingerprint",
    "device",
    "sessions",
    "version",
    "pid",
    "started_at_ms",
)


def to_json(value: Any) -> dict[str, Any]:
    """Return a view as JSON values."""
    return dataclasses.asdict(value)


def status_facts(snapshot: Snapshot) -> dict[str, Any]:
    """Return what `shoal status` prints: the snapshot without the lists that have their own commands."""
    devices = [to_json(device) for device in snapshot.devices]
    given = {
        "why": snapshot.why and to_json(snapshot.why),
        "warnings": [to_json(warning) for warning in snapshot.warnings],
        "devices": devices,
        "weights": "none" if snapshot.hardware is None else snapshot.hardware.quantisation,
        "cache": "own" if snapshot.hardware is None else snapshot.hardware.cache,
        "reuse": to_json(snapshot.reuse),
        "guesses": to_json(snapshot.guesses),
        "today": to_json(snapshot.today),
        "ever": to_json(snapshot.ever),
        "visit": snapshot.visit and to_json(snapshot.visit),
    }
    return {**{name: getattr(snapshot, name) for name in STATUS_FIELDS}, **given}


def coverage(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return what `shoal blocks` prints: for every block the peers that serve it, fastest first."""
    serving = [peer for peer in snapshot.peers if peer.state == "serving"]
    if snapshot.state == "serving":
        own = PeerView(snapshot.peer_id, start=snapshot.start, stop=snapshot.stop, tokens_per_s=snapshot.tokens_per_s)
        serving.append(own)
    serving.sort(key=lambda peer: (-peer.tokens_per_s, peer.peer))
    return [{"block": block, "holders": _holders(block, serving)} for block in range(snapshot.blocks_total or 0)]


def sole_blocks(snapshot: Snapshot) -> list[tuple[int, int]]:
    """Return the runs of blocks that this node serves and no other member, as (start, stop)."""
    runs: list[tuple[int, int]] = []
    for one in coverage(snapshot):
        if [holder["peer"] for holder in one["holders"]] == [snapshot.peer_id]:
            start = runs.pop()[0] if runs and runs[-1][1] == one["block"] else one["block"]
            runs.append((start, one["block"] + 1))
    return runs


def _holders(block: int, serving: Sequence[PeerView]) -> list[dict[str, Any]]:
    return [
        {"peer": peer.peer, "tokens_per_s": peer.tokens_per_s}
        for peer in serving
        if peer.start is not None and peer.stop is not None and peer.start <= block < peer.stop
    ]


def snapshot_from(values: Mapping[str, Any]) -> Snapshot:
    """Build a snapshot from the JSON that a node sent."""
    return _read(Snapshot, values)


def prospects_from(values: Mapping[str, Any]) -> ProspectsView:
    """Build the prospects from the JSON that a node sent."""
    return _read(ProspectsView, values)


def offer_from(values: Mapping[str, Any]) -> OfferView:
    """Build an offer from the JSON that a node sent."""
    return _read(OfferView, values)


def models_from(values: Sequence[Mapping[str, Any]]) -> list[ModelView]:
    """Build a list of models from the JSON that a node sent."""
    return [_read(ModelView, value) for value in values]


def jobs_from(values: Sequence[Mapping[str, Any]]) -> list[JobView]:
    """Build a list of fine-tuning jobs from the JSON that a node sent."""
    return [_read(JobView, value) for value in values]


def trainings_from(values: Sequence[Mapping[str, Any]]) -> list[TrainingView]:
    """Build a list of training jobs from the JSON that a node sent."""
    return [_read(TrainingView, value) for value in values]


def joinable_from(values: Sequence[Mapping[str, Any]]) -> list[JoinableView]:
    """Build a list of training jobs that could be joined from the JSON that a node sent."""
    return [_read(JoinableView, value) for value in values]


@cache
def _shapes(kind: type) -> tuple[frozenset[str], Mapping[str, tuple[type | None, bool]]]:
    """Return the field names of a view and, for fields that JSON cannot hold, the inner view and if it is a tuple."""
    shapes: dict[str, tuple[type | None, bool]] = {}
    hints = get_type_hints(kind)
    for name, hint in hints.items():
        inner = [part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)]
        if inner or get_origin(hint) is tuple:
            shapes[name] = (inner[0] if inner else None, get_origin(hint) is tuple)  # type: ignore[assignment]
    return frozenset(hints), shapes


def _read(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Build a view, ignoring unknown fields; missing ones get their defaults."""
    names, shapes = _shapes(kind)  # type: ignore[arg-type]
    plain = all(values.get(name) is None and not several for name, (_, several) in shapes.items())
    if plain and names >= values.keys():
        return kind(**values)  # fast path: a snapshot may hold hundreds of peers
    known = {name: value for name, value in values.items() if name in names}
    for name in shapes.keys() & known.keys():
        known[name] = _value(known[name], *shapes[name])
    return kind(**known)


def _value(value: Any, kind: type | None, several: bool) -> Any:
    if several:
        return tuple(value if kind is None else (_read(kind, item) for item in value or ()))
    return value if kind is None or value is None else _read(kind, value)
