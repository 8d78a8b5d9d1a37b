"""Reading, classifying and advertising addresses; the book that keeps them; the file that remembers peers."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p import sockets
from p2p.addresses import (
    MAX_ADDRESSES_PER_PEER,
    Address,
    BadAddress,
    Scope,
    address_of,
    advertised,
    parse_address,
    parse_known,
    scope_of,
)
from p2p.discovery.known_peers import MAX_REMEMBERED, KnownPeer, load_peers, merge, save_peers
from p2p.host.address_book import AddressBook
from p2p.identity import peer_id_from_bytes, peer_id_of

PEER, OTHER = peer_id_of(bytes(32)), peer_id_of(bytes(31) + b"\1")


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/192.0.2.1/tcp/7464",
        f"/ip4/192.0.2.1/tcp/7464/p2p/{PEER}",
        f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}",
        f"/dns4/node.example.org/tcp/443/p2p/{PEER}",
        f"/ip4/192.0.2.1/tcp/7464/p2p/{PEER}/p2p-circuit/p2p/{OTHER}",
        f"/ip4/192.0.2.1/tcp/7464/p2p/{PEER}/p2p-circuit",
    ],
)
def test_an_address_comes_back_as_it_was(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "192.0.2.1:7464",
        "/ip4/192.0.2.1/udp/7464",
        "/ip4/192.0.2.1/tcp/70000",
        "/ip4/192.0.2.1/tcp/-1",
        "/ip4/192.0.2.1/tcp/٣",
        "/ip4/2001:db8::1/tcp/1",
        "/ip6/fe80::1%eth0/tcp/1",
        "/dns4/bad host/tcp/1",
        "/ip4/192.0.2.1/tcp/1/p2p/not-a-peer",
        "/ip4/192.0.2.1/tcp/1/ws",
        f"/ip4/192.0.2.1/tcp/1/p2p-circuit/p2p/{PEER}",
        "/ip4/192.0.2.1/tcp/1/" + "x" * 600,
    ],
)
def test_what_cannot_be_dialled_is_one_error(text: str) -> None:
    with pytest.raises(BadAddress):
        parse_address(text)


@given(st.text(max_size=200) | st.from_regex(r"/(ip4|ip6|dns)/[^/]{0,20}/tcp/[^/]{0,8}(/p2p/[^/]{0,60})?"))
def test_arbitrary_text_raises_nothing_else(text: str) -> None:
    try:
        parse_address(text)
    except BadAddress:
        pass


@pytest.mark.parametrize(
    ("ip", "scope"),
    [
        ("127.0.0.1", Scope.LOOPBACK),
        ("::1", Scope.LOOPBACK),
        ("::ffff:127.0.0.1", Scope.LOOPBACK),
        ("192.168.1.2", Scope.LAN),
        ("10.1.2.3", Scope.LAN),
        ("100.64.0.7", Scope.LAN),
        ("169.254.1.1", Scope.LAN),
        ("fd00::2", Scope.LAN),
        ("fe80::1", Scope.LAN),
        ("2002:c0a8:0101::1", Scope.LAN),  # 6to4 and NAT64 lead to an IPv4 address, whichever it is
        ("64:ff9b::192.168.1.1", Scope.UNUSABLE),
        ("8.8.8.8", Scope.PUBLIC),
        ("2606:4700::1111", Scope.PUBLIC),
        ("0.0.0.0", Scope.UNUSABLE),
        ("::", Scope.UNUSABLE),
        ("224.0.0.1", Scope.UNUSABLE),
        ("255.255.255.255", Scope.UNUSABLE),
    ],
)
def test_scopes(ip: str, scope: Scope) -> None:
    assert scope_of(ipaddress.ip_address(ip)) is scope


@pytest.mark.parametrize(("netmask", "prefix"), [("ffff:ffff:ffff::", 48), (None, 64)])
def test_the_network_of_an_ipv6_address_is_a_64_where_the_system_names_none(
    netmask: str | None, prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows names none, and a /32 is a whole provider, all of whose customers counted as this LAN."""
    card = SimpleNamespace(family=socket.AF_INET6, address="2600:1:1:1::2", netmask=netmask)
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"Ethernet": [card]})
    assert [own.network.prefixlen for own in sockets.own_interfaces()] == [prefix]


def test_a_wildcard_is_never_advertised() -> None:
    ips = [ipaddress.ip_address(ip) for ip in ("127.0.0.1", "192.168.1.5", "::1", "fe80::5", "2606:4700::5")]
    told = advertised([address_of("0.0.0.0", 7464, PEER), address_of("::", 7464, PEER)], ips)
    assert [str(address) for address in told] == [
        f"/ip4/192.168.1.5/tcp/7464/p2p/{PEER}",
        f"/ip6/2606:4700::5/tcp/7464/p2p/{PEER}",
    ]


def test_loopback_is_advertised_where_there_is_nothing_else() -> None:
    told = advertised([address_of("0.0.0.0", 1, PEER)], [ipaddress.ip_address("127.0.0.1")])
    assert [address.host for address in told] == ["127.0.0.1"]


def test_explicit_addresses_replace_the_guessed_ones() -> None:
    explicit = parse_address(f"/dns4/me.example.org/tcp/7464/p2p/{PEER}")
    assert advertised([address_of("127.0.0.1", 1, PEER)], [], [explicit, explicit]) == [explicit]


def test_a_peers_own_list_is_bounded_and_names_nobody_else() -> None:
    texts = [f"/ip4/10.0.0.{n}/tcp/7464" for n in range(1, 200)]
    assert len(parse_known(texts, PEER)) == MAX_ADDRESSES_PER_PEER
    assert parse_known([f"/ip4/10.0.0.1/tcp/1/p2p/{OTHER}", "/ip4/0.0.0.0/tcp/1", "junk"], PEER) == []


def test_the_book_prefers_what_was_proven_and_then_the_newest() -> None:
    book = AddressBook()
    a, b, c = (Address("ip4", f"10.0.0.{n}", 1, PEER) for n in (1, 2, 3))
    book.add(PEER, [a, b], now=1)
    assert book.addresses(PEER) == [a, b]
    book.add(PEER, [c], now=2)
    assert book.addresses(PEER) == [c, a, b]
    book.succeeded(b, now=3)
    assert book.addresses(PEER)[0] == b
    book.failed(b)
    assert book.addresses(PEER) == [c, a, b]


def test_the_book_is_bounded_and_keeps_who_was_reached() -> None:
    book = AddressBook(max_peers=50)
    friend = Address("ip4", "10.9.9.9", 1, PEER)
    book.succeeded(friend, now=0)
    for number in range(10_000):
        stranger = peer_id_of(number.to_bytes(32, "little"))
        if stranger != PEER:
            book.add(stranger, [Address("ip4", "10.0.0.1", 1 + number % 60_000)], now=number)
    assert len(book) <= 50
    assert book.addresses(PEER) == [friend]
    for number in range(100):
        book.add(PEER, [Address("ip4", "10.1.0.1", 1 + number)], now=20_000)
    assert len(book.addresses(PEER)) == MAX_ADDRESSES_PER_PEER
    assert friend in book.addresses(PEER)


def test_no_crowd_displaces_those_who_were_reached() -> None:
    """A hundred peers were reached; then thousands of others are reported, as whoever connects to a node can do."""
    book, friends = AddressBook(max_peers=300), [peer_id_of(bytes(31) + bytes([number])) for number in range(100)]
    for friend in friends:
        book.succeeded(Address("ip4", "10.9.9.9", 1, friend), now=0)
    for number in range(1000, 5000):
        book.add(peer_id_of(number.to_bytes(32, "little")), [Address("ip4", "10.0.0.1", number)], now=number)
    assert len(book) == 300
    assert all(book.addresses(friend) for friend in friends)


def test_remembered_peers_come_back(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    assert load_peers(path) == []
    entry = KnownPeer(PEER, (Address("ip4", "10.0.0.1", 1, PEER),), 1000.0)
    save_peers(path, [entry])
    assert load_peers(path) == [entry]
    newer = KnownPeer(PEER, (Address("ip4", "10.0.0.2", 1, PEER),), 2000.0)
    assert merge([entry], [newer]) == [newer]
    assert merge([newer], [entry]) == [newer]
    crowd = [KnownPeer(peer_id_of(n.to_bytes(32)), (), float(n)) for n in range(1000)]
    save_peers(path, crowd)
    assert [e.seen_at for e in load_peers(path)] == [float(n) for n in range(999, 999 - MAX_REMEMBERED, -1)]


def test_remembered_peers_come_back_however_long_their_addresses_are(tmp_path: Path) -> None:
    """Peers choose the addresses. The file was longer than what is read of it, and all peers were forgotten."""
    path, name, longest_id = tmp_path / "peers.json", ("x" * 49 + ".") * 5, peer_id_from_bytes(b"\0\x2a" + b"\xff" * 42)
    entries = []
    for number in range(MAX_REMEMBERED):
        peer = peer_id_of(number.to_bytes(32))
        places = (Address("dns4", f"{name}{n:03}", 65535, peer, longest_id) for n in range(MAX_ADDRESSES_PER_PEER))
        entries.append(KnownPeer(peer, tuple(places), 2e9))
    save_peers(path, entries)
    assert load_peers(path) == entries


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "peers": []}',
        b'{"version": 1, "peers": [1, {"id": 5}, {"id": "x"}]}',
        b"\xff",
    ],
)
def test_a_damaged_memory_is_no_memory(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    assert load_peers(path) == []
