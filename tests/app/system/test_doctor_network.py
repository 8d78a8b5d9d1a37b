"""The doctor's lines about the network, from facts."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli.doctor import examine_network
from app.config.home import Home, write_sequence
from app.core.reasons import because
from app.snapshot.views import NetworkView, PeerView, PublicView, Snapshot, State
from app.system.doctor import (
    check_addresses,
    check_clock,
    check_nat,
    check_peer,
    check_peers,
    check_state,
    is_free,
    network_checks,
    running_checks,
)

NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("last_said_s", "ahead_s", "status", "detail"),
    [
        (-3600, None, "ok", "plausible; no member to compare with"),
        (0, 0.0, "ok", "agrees with the other members"),
        (0, -90.0, "warn", "about 90 s behind the other members"),
        (0, 300.0, "warn", "about 5 min ahead of the other members"),
        (0, -900.0, "fail", "about 15 min behind the other members: it refuses what they say"),
        (0, 10_800.0, "fail", "about 3.0 h ahead of the other members: they refuse what it says"),
        (300, None, "warn", "it was set back by 300 s since this node last ran"),
        (300, 0.0, "warn", "it was set back by 300 s since this node last ran"),
    ],
)
def test_the_clock_is_judged_by_what_others_say(
    last_said_s: int, ahead_s: float | None, status: str, detail: str
) -> None:
    check = check_clock(NOW_MS, NOW_MS + last_said_s * 1000, ahead_s)
    assert (check.status, check.detail) == (status, detail)
    assert bool(check.mend) == (status != "ok")


def test_a_clock_long_past_is_wrong() -> None:
    assert check_clock(10**12, 0, None).status == "fail"


@pytest.mark.parametrize(
    ("reach", "relayed", "status"),
    [("verified", False, "ok"), ("unverified", True, "ok"), ("unverified", False, "warn"), ("unknown", False, "skip")],
)
def test_nat(reach: str, relayed: bool, status: str) -> None:
    assert check_nat(reach, relayed=relayed, relaying=False).status == status


def test_a_verified_address_is_marked() -> None:
    check = check_addresses(
        ["/ip4/1.2.3.4/tcp/1/p2p/x", "/ip4/1.2.3.45/tcp/1/p2p/x"], ["/ip4/1.2.3.4/tcp/1"], "verified"
    )
    assert check.detail.startswith("/ip4/1.2.3.4/tcp/1/p2p/x (verified) /ip4/1.2.3.45/tcp/1/p2p/x (unverified);")


@pytest.mark.parametrize(("links", "members", "status"), [(0, 0, "warn"), (1, 0, "ok"), (1, 1, "ok"), (0, 3, "ok")])
def test_company(links: int, members: int, status: str) -> None:
    found = check_peers(links, members, "home", ("dht",))
    assert found.status == status
    assert ("1 other member of home" in found.detail) == (members == 1)


def test_a_running_node_has_every_line() -> None:
    network = NetworkView(advertised=("/ip4/1.2.3.4/tcp/1",), links=1)
    snapshot = Snapshot(
        "12D3",
        "client",
        "",
        "",
        swarm="home",
        listen_addrs=("/ip4/0.0.0.0/tcp/1",),
        network=network,
        peers=(PeerView("a"),),
    )
    checks = list(running_checks(snapshot, now_ms=NOW_MS, last_said_ms=0, ahead_s=None))
    assert [check.name for check in checks] == [
        "state",
        "listen",
        "addresses",
        "nat",
        "port mapping",
        "lan",
        "clock",
        "peers",
        "peer a",
    ]
    assert {check.name for check in checks if check.status != "ok"} == {"nat", "port mapping"}  # not known yet, and off


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        ("client", "limit_zero", "ok"),
        ("client", "disk_full", "warn"),
        ("client", "device_full", "warn"),
        ("client", "no_room", "warn"),
        ("joining", "looking_around", "ok"),
        ("joining", "looking", "warn"),
        ("joining", "bad_home", "warn"),
        ("loading", "probe_api", "warn"),
        ("serving", "worst_served", "ok"),
        ("paused", "pause_battery", "ok"),
    ],
)
def test_a_node_that_does_not_do_what_it_should_deserves_a_warning(state: State, code: str, status: str) -> None:
    check = check_state(Snapshot("12D3", state, "why", "", why=because(code, "why")))
    assert (check.status, check.mend != "") == (status, True)


def test_each_warning_has_a_line() -> None:
    both = (because("model_gone", "the model's folder is gone"), because("wrong_secret", "it has another secret"))
    checks = list(
        running_checks(Snapshot("12D3", "client", "", "", warnings=both), now_ms=NOW_MS, last_said_ms=0, ahead_s=None)
    )
    assert [(check.status, check.detail) for check in checks if check.name == "warning"] == [
        ("fail", "the model's folder is gone"),
        ("warn", "it has another secret"),
    ]


HOME = NetworkView(reach="unverified")


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (
            replace(HOME, mapping="UPnP 5.5.5.5:7464", relays=("12D3abcdefgh",)),
            {"port mapping": "ok", "relays": "ok", "ipv6": "skip", "public": "skip"},
        ),
        (
            replace(HOME, mapping_problem="no router answers", public=PublicView(nodes=9)),
            {"port mapping": "warn", "relays": "warn", "ipv6": "skip", "public": "warn"},
        ),
        (
            replace(HOME, advertised=("/ip6/2a00::1/tcp/1",), public=PublicView()),
            {"port mapping": "skip", "relays": "warn", "ipv6": "warn", "public": "warn"},
        ),
        (
            NetworkView(
                reach="verified",
                advertised=("/ip6/2a00::1/tcp/1",),
                verified=("/ip6/2a00::1/tcp/1",),
                public=PublicView(nodes=9, published=2),
            ),
            {"port mapping": "ok", "relays": "skip", "ipv6": "ok", "public": "ok"},
        ),
    ],
)
def test_the_picture_of_how_others_reach_this_machine(network: NetworkView, expected: dict[str, str]) -> None:
    snapshot = Snapshot("12D3", "client", "", "", listen_addrs=("/ip4/0.0.0.0/tcp/1",), network=network)
    checks = list(network_checks(snapshot))
    assert [check.name for check in checks] == ["listen", "addresses", "nat", *expected, "peers"]
    assert {check.name: check.status for check in checks if check.name in expected} == expected
    assert all(check.mend for check in checks if check.status == "warn")


@pytest.mark.parametrize(
    ("peer", "status", "detail"),
    [
        (
            PeerView("12D3abcdefgh", rtt_s=0.0123, link="relayed", state="serving"),
            "ok",
            "relayed, 12.3 ms",
        ),
        (PeerView("12D3abcdefgh", rtt_s=0.001, link="direct", state="client"), "ok", "direct, 1.0 ms"),
        (PeerView("12D3abcdefgh", state="client"), "ok", "no link is open; client"),
        (
            PeerView("12D3abcdefgh", state="dead", unused=because("peer_dead", "it has not answered for a while")),
            "warn",
            "no link is open; dead; not used: it has not answered for a while",
        ),
        (
            PeerView("12D3abcdefgh", state="paused", unused=because("peer_paused", "its owner has paused it")),
            "ok",
            "no link is open; paused; not used: its owner has paused it",
        ),
    ],
)
def test_how_each_peer_is_reached(peer: PeerView, status: str, detail: str) -> None:
    check = check_peer(peer)
    assert (check.name, check.status) == ("peer abcdefgh", status)
    assert check.detail.startswith(detail)


def test_a_taken_port_is_seen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


def test_without_a_node_ports_and_clock_are_looked_at(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        (tmp_path / "config.toml").write_text(f"version = 1\napi_port = {taken.getsockname()[1]}\n")
        write_sequence(Home(tmp_path), 2**52)
        checks = {check.name: check for check in examine_network(tmp_path)}
    assert checks["api"].status == "warn"
    assert checks["clock"].status == "warn"
    assert "no node runs here" in checks["peers"].detail


def test_a_broken_configuration_is_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("this is no TOML")
    [check] = examine_network(tmp_path)
    assert (check.name, check.status) == ("network", "fail")
