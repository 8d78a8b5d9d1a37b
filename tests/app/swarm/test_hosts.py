"""Which members run on one machine, by the addresses that they announce."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from app.swarm import records
from app.swarm.records import Announcement
from p2p.addresses import Address, parse_known


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
def test_the_machine_of_a_member(addresses: tuple[str, ...], host: str) -> None:
    assert Announcement("peer", 0, 0, "", "serving", addresses=addresses).host == host


def test_the_addresses_of_a_member_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every snapshot has the machines of all members, thousands perhaps, and is made between two tokens."""
    read: list[object] = []

    def reading(texts: Iterable[str]) -> list[Address]:
        read.append(texts)
        return parse_known(texts)

    monkeypatch.setattr(records, "parse_known", reading)
    announced = Announcement("peer", 0, 0, "", "serving", addresses=("/ip4/10.0.0.2/tcp/1",))
    assert [announced.host for _ in range(3)] == ["10.0.0.2"] * 3
    assert len(read) == 1
