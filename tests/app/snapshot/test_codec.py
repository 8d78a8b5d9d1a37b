"""A snapshot survives the trip through JSON, between neighbouring versions too."""

from __future__ import annotations

import json

from app.core.reasons import Reason
from app.snapshot.codec import jobs_from, snapshot_from, to_json
from app.snapshot.views import (
    CourtesyView,
    DeviceView,
    HopView,
    JobHopView,
    JobView,
    NetworkView,
    PeerView,
    RouteView,
    RuleView,
    Snapshot,
    TrainedView,
)

FULL = Snapshot(
    peer_id="me",
    state="serving",
    reason="nobody else held 3:5",
    api_url="http://127.0.0.1:1",
    listen_addrs=("/ip4/127.0.0.1/tcp/1",),
    why=Reason("hole", "nobody else held 3:5", peers=("them",)),
    network=NetworkView(advertised=("/ip4/192.0.2.1/tcp/1",)),
    peers=(PeerView("them", start=0, stop=3),),
    hardware=DeviceView("cpu", load=0.5),
    route=RouteView("ab", (HopView("them", 0, 3, compute_s=0.01),), token_s=0.02),
    courtesy=CourtesyView(rules=(RuleView("battery", "on battery"),)),
    trained=(TrainedView("them", 3, 5),),
)


def test_what_is_sent_is_what_is_read() -> None:
    assert snapshot_from(json.loads(json.dumps(to_json(FULL)))) == FULL


def test_jobs_are_read_as_they_were_sent() -> None:
    job = JobView(
        job="ab" * 6, out="facts", model="0" * 64, model_name="tiny", data="facts.jsonl", swarm="s", status="running",
        step=2, steps=5, tokens=90, seconds=1.5, tokens_per_s=60.0, left_s=None, loss=1.5, losses=(2.0, 1.5),
        validation=(), why="", rank=8, alpha=16.0, targets=("q",), hops=(JobHopView("them", 0, 8),),
        rejected={"them": 2}, rejected_why={"them": "not finite"}, lost=("them: silent",),
    )  # fmt: skip
    assert jobs_from(json.loads(json.dumps([to_json(job)]))) == [job]


def test_unknown_fields_are_ignored_and_missing_ones_have_their_defaults() -> None:
    sent = to_json(FULL) | {"from_the_future": 1}
    sent["peers"] = [{"peer": "them", "mood": "fine"}]
    del sent["network"], sent["route"]
    read = snapshot_from(sent)
    assert read.peers == (PeerView("them"),)
    assert (read.network, read.route) == (NetworkView(), None)
