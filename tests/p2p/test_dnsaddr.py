"""Lists of entry points in DNS: followed, bounded, and never more than addresses that this node can dial."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from p2p import dnsaddr
from p2p.addresses import BadAddress, check_entry, parse_dnsaddr
from p2p.dnsaddr import MAX_FOUND, MAX_NAMES, resolve
from p2p.identity import Identity

ONE, TWO = Identity(bytes(32)).peer_id, Identity(bytes([1]) * 32).peer_id
RSA = "QmNnooDu7bfjPFoTZYxMNLWUQJyrVwtbZg5gBMjTezGAJN"


class Names:
    """A DNS of the test's own, which counts what it is asked."""

    def __init__(self, **records: list[str]) -> None:
        self._records = {name.replace("__", "."): texts for name, texts in records.items()}
        self.asked: list[str] = []

    async def look_up(self, name: str) -> list[str]:
        await trio.lowlevel.checkpoint()
        self.asked.append(name)
        if name not in self._records:
            raise OSError(f"no such name: {name}")
        return self._records[name]


async def test_lists_are_followed_and_what_cannot_be_dialled_is_left_out() -> None:
    names = Names(
        _dnsaddr__start__org=[
            f"dnsaddr=/dnsaddr/a.start.org/p2p/{RSA}",
            "dnsaddr=/dnsaddr/missing.start.org",
            f"dnsaddr=/ip4/192.0.2.9/udp/4001/quic-v1/p2p/{ONE}",
            "v=spf1 -all",
        ],
        _dnsaddr__a__start__org=[
            f"dnsaddr=/ip4/192.0.2.1/tcp/4001/p2p/{RSA}",
            f"dnsaddr=/ip6/2001:db8::1/tcp/4001/p2p/{RSA}",
            f"dnsaddr=/ip4/192.0.2.2/tcp/4001/p2p/{ONE}",
            "dnsaddr=/ip4/192.0.2.3/tcp/4001",
        ],
    )
    entries = ["/dnsaddr/start.org", f"/ip4/192.0.2.7/tcp/4001/p2p/{TWO}"]
    found = await resolve(entries, names.look_up)
    assert [str(address) for address in found] == [
        f"/ip4/192.0.2.7/tcp/4001/p2p/{TWO}",
        f"/ip4/192.0.2.1/tcp/4001/p2p/{RSA}",
        f"/ip6/2001:db8::1/tcp/4001/p2p/{RSA}",
    ]


async def test_circles_and_floods_end() -> None:
    circle = Names(_dnsaddr__a__org=["dnsaddr=/dnsaddr/b.org"], _dnsaddr__b__org=["dnsaddr=/dnsaddr/a.org"])
    assert await resolve(["/dnsaddr/a.org"], circle.look_up) == []
    assert circle.asked == ["_dnsaddr.a.org", "_dnsaddr.b.org"]
    wide = Names(_dnsaddr__a__org=[f"dnsaddr=/dnsaddr/n{number}.org" for number in range(1000)])
    assert await resolve(["/dnsaddr/a.org"], wide.look_up) == []
    assert len(wide.asked) == MAX_NAMES
    many = Names(_dnsaddr__a__org=[f"dnsaddr=/ip4/192.0.2.1/tcp/{port}/p2p/{ONE}" for port in range(1, 1000)])
    assert len(await resolve(["/dnsaddr/a.org"], many.look_up)) == MAX_FOUND


async def test_a_name_server_that_is_silent_is_not_waited_for(autojump_clock: trio.abc.Clock) -> None:
    async def silence(name: str) -> list[str]:
        await trio.sleep_forever()
        raise AssertionError

    started_at = trio.current_time()
    assert await resolve(["/dnsaddr/a.org"], silence) == []
    assert trio.current_time() - started_at <= dnsaddr.TIMEOUT_S


@given(st.lists(st.text(max_size=60), max_size=5))
def test_arbitrary_records_are_skipped(texts: list[str]) -> None:
    async def look_up(name: str) -> list[str]:
        await trio.lowlevel.checkpoint()
        return [f"dnsaddr={text}" for text in texts]

    assert trio.run(resolve, ["/dnsaddr/a.org"], look_up) == []


def test_entries_of_the_setting() -> None:
    assert parse_dnsaddr(f"/dnsaddr/bootstrap.libp2p.io/p2p/{RSA}") == ("bootstrap.libp2p.io", RSA)
    for entry in ("/dnsaddr/bootstrap.libp2p.io", f"/ip4/192.0.2.1/tcp/4001/p2p/{ONE}"):
        assert check_entry(entry) == entry
    for wrong in ("/dnsaddr/", "/dnsaddr/a b", "/ip4/192.0.2.1/tcp/4001", "/dnsaddr/a.org/p2p/short", "bootstrap"):
        with pytest.raises(BadAddress):
            check_entry(wrong)
