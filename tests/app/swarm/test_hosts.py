"""Which members run on one machine, by the addresses that they announce."""

from __future__ import annotations

import pytest

from app.swarm.records import Announcement, host_of


@pytest.mark.parametrize(
    ("addresses", "host"),
    [
        ((), ""),
        (("/ip4/127.0.0.1/tcp/4001",), "127.0.0.1"),
        (("/ip4/192.168.1.7/tcp/1", "/ip4/8.8.8.8/tcp/1"), "192.168.1.7"),
        (("/ip4/8.8.8.8/tcp/4001",), ""),  # that of a house, maybe
        (("/ip6/fd00::1/tcp/1", "/ip4/10.0.0.2/tcp/1"), "10.0.0.2 fd00::1"),
        (("/ip4/10.0.0.2/tcp/1/p2p/xyz/p2p-circuit",), ""),  # the relay's
        (("/ip4/nonsense/tcp/1", "", "/", "/dns4/reef.example/tcp/1"), ""),
    ],
)
def test_host_of(addresses: tuple[str, ...], host: str) -> None:
    assert host_of(Announcement("peer", 0, 0, "", "serving", addresses=addresses)) == host
