"""Relays that mean harm, for a node that others reach only through relays."""

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


async def test_silent_relays_nearby_do_not_keep_a_node_from_one_that_answers(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest relay was asked again after a minute, in which half a dozen silent ones are waited for."""
    *silent, honest = (Identity.generate().peer_id for _ in range(9))
    rtts = {**dict.fromkeys(silent, 0.001), honest: 0.1}
    links = {
        relay: SimpleNamespace(rtt_s=rtt, address=parse_address("/ip4/9.9.9.9/tcp/1")) for relay, rtt in rtts.items()
    }
    host = SimpleNamespace(
        peer_id="12D3me", connection=links.get, connections=lambda: [], handle=lambda *_: None, extra_addresses=[]
    )
    client = RelayClient(cast(Host, host))

    async def ask(relay: str) -> HopMessage:
        if relay != honest:
            await trio.sleep(8)
            raise trio.TooSlowError
        return HopMessage(HopType.STATUS, status=Status.OK, reservation=Reservation(int(time.time()) + 3600))

    monkeypatch.setattr(client, "_ask_for_place", ask)
    for relay in (*silent, honest):
        client.heard_of(relay, parse_address(f"/ip4/9.9.9.9/tcp/1/p2p/{relay}"))
    client.needed = True
    with trio.move_on_after(600):
        await client.run()
    assert client.places == [honest]
