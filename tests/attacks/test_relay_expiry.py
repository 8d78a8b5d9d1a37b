"""Relays whose places end at once, for a node that others reach only through relays."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from p2p.addresses import parse_address
from p2p.host.host import Host
from p2p.identity import Identity
from p2p.nat.relay_client import RelayClient
from p2p.nat.relay_wire import HopMessage, HopType, Reservation, Status


async def test_one_relay_whose_places_end_at_once_does_not_keep_a_node_from_the_others(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest relay's place had expired when it came, so it was asked again every few seconds, and no other one."""
    liar, *honest = (Identity.generate().peer_id for _ in range(9))
    links = {
        relay: SimpleNamespace(rtt_s=0.001 if relay == liar else 0.02, address=parse_address("/ip4/9.9.9.9/tcp/1"))
        for relay in (liar, *honest)
    }
    host = SimpleNamespace(
        peer_id="12D3me", connection=links.get, connections=lambda: [], handle=lambda *_: None, extra_addresses=[]
    )
    told: list[int] = []
    client = RelayClient(cast(Host, host), lambda: told.append(1))
    asked: list[str] = []

    async def ask(relay: str) -> HopMessage:
        asked.append(relay)
        ends_at = int(time.time()) + (-1 if relay == liar else 3600)
        return HopMessage(HopType.STATUS, status=Status.OK, reservation=Reservation(ends_at))

    monkeypatch.setattr(client, "_ask_for_place", ask)
    for number, relay in enumerate((liar, *honest)):
        client.heard_of(relay, parse_address(f"/ip4/9.{number}.9.9/tcp/1/p2p/{relay}"))
    client.needed = True
    with trio.move_on_after(3600):
        await client.run()
    assert set(client.places) & set(honest), "no honest relay was ever asked for a place"
