"""A snapshot survives the trip through JSON, between neighbouring versions too."""

from __future__ import annotations

import json

from app.core.reasons import Reason
from app.snapshot.codec import snapshot_from, to_json
from app.snapshot.views import CourtesyView, DeviceView, HopView, NetworkView, PeerView, RouteView, RuleView, Snapshot

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
)


def test_what_is_sent_is_what_is_read() -> None:
    assert snapshot_from(json.loads(json.dumps(to_json(FULL)))) == FULL


def test_unknown_fields_are_ignored_and_missing_ones_have_their_defaults() -> None:
    sent = to_json(FULL) | {"from_the_future": 1}
    sent["peers"] = [{"peer": "them", "mood": "fine"}]
    del sent["network"], sent["route"]
    read = snapshot_from(sent)
    assert read.peers == (PeerView("them"),)
    assert (read.network, read.route) == (NetworkView(), None)
