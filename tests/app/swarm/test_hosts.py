"""Which members run on one machine, by the addresses that they announce."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from app.swarm import records
from app.swarm.records import Announcement, read_announcement, sign_announcement
from p2p.addresses import Address, parse_known
from tests.app.swarms import identity


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


def test_the_machines_of_members_are_known_once_their_statements_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements are read a few at a time, the snapshot has all members at once: they may be new each time."""
    who = identity(1)
    addresses = ("/ip4/10.0.0.3/tcp/1",)
    said = Announcement(who.peer_id, 1000, 2000, "ab" * 16, "serving", addresses=addresses)
    announced = read_announcement(sign_announcement(who, said), now_ms=1500)
    monkeypatch.setattr(records, "parse_known", lambda texts: pytest.fail("they are read again"))
    assert announced.host == "10.0.0.3"
