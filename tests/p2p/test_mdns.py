"""Announcing a node on the local network and finding others, over a network in memory under a clock that jumps."""

from __future__ import annotations

import ipaddress
import random
import socket
import struct
import sys

import dns.message
import dns.name
import dns.rdatatype
import pytest
import trio

from p2p.addresses import Address
from p2p.discovery import mdns_packets as packets
from p2p.discovery.mdns import AGAIN_S, MulticastSockets
from p2p.identity import Identity
from tests.p2p.lan import Lan

# What the former version of Shoal sent, with the zeroconf library: a node that is in use may still be one.
OLD_PEER = "12D3KooWGC6TvWhfapngX6wvJHMYvKpDMXPb3ZnCZ6dMoaMtimQ5"
OLD_ANNOUNCEMENT = bytes.fromhex(
    "000084000000000500000000065f73686f616c045f756470056c6f63616c00000c000100001194002320583677764a484d59764b70444d"
    "585062335a6e435a36644d6f614d74696d5135c00cc02900218001000000780029000000001d2820583677764a484d59764b70444d5850"
    "62335a6e435a36644d6f614d74696d5135c018c029001080010000119400545361303d2f6970342f3139322e302e322e322f7463702f37"
    "3436342f7032702f313244334b6f6f57474336547657686661706e67583677764a484d59764b70444d585062335a6e435a36644d6f614d"
    "74696d5135c05e00018001000000780004c0000202c05e002f8001000000780005c05e000140"
)
OLD_FIRST_QUESTION = bytes.fromhex(  # to be answered to it alone, and not by itself
    "000000000001000100000000065f73686f616c045f756470056c6f63616c00000c8001c00c000c000100001193002320583677764a484d"
    "59764b70444d585062335a6e435a36644d6f614d74696d5135c00c"
)
OLD_QUESTION = bytes.fromhex(
    "000000000001000100000000065f73686f616c045f756470056c6f63616c00000c0001c00c000c000100001192002320583677764a484d"
    "59764b70444d585062335a6e435a36644d6f614d74696d5135c00c"
)
OLD_ANSWER = bytes.fromhex(
    "000084000000000100000004065f73686f616c045f756470056c6f63616c00000c000100001194002320583677764a484d59764b70444d"
    "585062335a6e435a36644d6f614d74696d5135c00c20583677764a484d59764b70444d585062335a6e435a36644d6f614d74696d5135c0"
    "1800018001000000780004c0000202c04c002f8001000000780005c04c000140c02900218001000000780008000000001d28c04cc02900"
    "1080010000119400545361303d2f6970342f3139322e302e322e322f7463702f373436342f7032702f313244334b6f6f57474336547657"
    "686661706e67583677764a484d59764b70444d585062335a6e435a36644d6f614d74696d5135"
)
OLD_GOODBYE = bytes.fromhex(
    "000084000000000500000000065f73686f616c045f756470056c6f63616c00000c000100000000002320583677764a484d59764b70444d"
    "585062335a6e435a36644d6f614d74696d5135c00cc02900218001000000000029000000001d2820583677764a484d59764b70444d5850"
    "62335a6e435a36644d6f614d74696d5135c018c029001080010000000000a85361303d2f6970342f3139322e302e322e322f7463702f37"
    "3436342f7032702f313244334b6f6f57474336547657686661706e67583677764a484d59764b70444d585062335a6e435a36644d6f614d"
    "74696d51355361313d2f6970342f3139322e302e322e322f7463702f373436352f7032702f313244334b6f6f5747433654765768666170"
    "6e67583677764a484d59764b70444d585062335a6e435a36644d6f614d74696d5135c05e00018001000000000004c0000202c05e002f80"
    "01000000000005c05e000140"
)
OLD_NAME = packets.service_name(OLD_PEER[-32:])


def peer_ids(count: int) -> list[str]:
    """So many nodes."""
    return [Identity.generate().peer_id for _ in range(count)]


def test_packets_of_the_former_version_are_understood() -> None:
    entry = f"a0=/ip4/192.0.2.2/tcp/7464/p2p/{OLD_PEER}".encode()
    for packet in (OLD_ANNOUNCEMENT, OLD_ANSWER):
        heard = packets.read(packet)
        assert heard.texts == {OLD_NAME: [entry]}
        assert not heard.asked
        assert not heard.bare
    for packet in (OLD_FIRST_QUESTION, OLD_QUESTION):
        heard = packets.read(packet)
        assert (heard.asked, heard.known, heard.texts) == ({packets.SERVICE_NAME}, {OLD_NAME}, {})
    assert packets.read(OLD_GOODBYE) == packets.Heard()


def test_an_announcement_is_what_other_software_expects() -> None:
    """Read by dnspython's own means; the numbers are those of the former version for the same node."""
    said = dns.message.from_wire(packets.announcement(OLD_PEER[-32:], [Address("ip4", "192.0.2.2", 7464, OLD_PEER)]))
    assert (said.id, said.flags) == (0, 0x8400)
    host, text = f"{OLD_PEER[-32:]}.local.", f"a0=/ip4/192.0.2.2/tcp/7464/p2p/{OLD_PEER}"
    assert [(str(one.name), one.rdtype, one.rdclass, one.ttl) for one in said.answer] == [
        (packets.SERVICE, dns.rdatatype.PTR, 1, 4500),
        (str(OLD_NAME), dns.rdatatype.SRV, 0x8001, 120),
        (str(OLD_NAME), dns.rdatatype.TXT, 0x8001, 4500),
        (host, dns.rdatatype.A, 0x8001, 120),
    ]
    pointer, server, texts, ip = (one[0] for one in said.answer)
    assert str(pointer) == str(OLD_NAME)
    assert server.to_wire() == struct.pack("!HHH", 0, 0, 7464) + (dns.name.from_text(host).to_wire() or b"")
    assert str(texts) == f'"{text}"'
    assert ip.to_wire() == bytes([192, 0, 2, 2])


def test_eight_addresses_fit_into_one_ethernet_frame() -> None:
    addresses = [Address("ip6", f"2001:db8:1111:2222:3333:4444:5555:666{n}", 65535, OLD_PEER) for n in range(9)]
    packet = packets.announcement(OLD_PEER[-32:], addresses)
    assert len(packet) <= 1500 - 28
    assert len(packets.read(packet).texts[OLD_NAME]) == packets.MAX_ADDRESSES


async def test_nodes_find_each_other_whoever_came_first_and_a_new_address_is_told(
    autojump_clock: trio.abc.Clock,
) -> None:
    lan, (one, other) = Lan(), peer_ids(2)
    found: dict[str, list[list[Address]]] = {one: [], other: []}
    addresses = [Address("ip4", "192.168.0.2", 4001, other)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node("192.168.0.1", one, lambda peer, at: found[peer].append(at)).run)
        await trio.sleep(30)
        node = lan.node("192.168.0.2", other, lambda peer, at: found[peer].append(at), lambda: list(addresses))
        nursery.start_soon(node.run)
        await trio.sleep(1)
        assert found[one] == [[Address("ip4", "192.168.0.1", 4001, one)]]
        assert found[other] == [addresses]
        addresses.append(Address("ip4", "192.168.0.3", 4001, other))
        await trio.sleep(12)
        assert found[other][1:] == [addresses]
        nursery.cancel_scope.cancel()
    last = packets.read(lan.sent[-1][2])
    assert lan.sent[-2:] == [(trio.current_time(), ip, packet) for _, ip, packet in lan.sent[-2:]]
    assert last == packets.Heard()  # a goodbye: all records with no time to live


async def test_whoever_is_known_to_the_one_that_asks_does_not_answer(autojump_clock: trio.abc.Clock) -> None:
    lan = Lan()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node("192.168.0.1", OLD_PEER).run)
        await trio.sleep(10)
        for question, answers in ((OLD_FIRST_QUESTION, 0), (packets.question("a stranger"), 1)):
            before = len(lan.sent)
            lan.say("192.168.0.2", question)
            await trio.sleep(0.5)
            assert len(lan.sent) - before == answers
        assert OLD_NAME in packets.read(lan.sent[-1][2]).texts
        lan.say("192.168.0.2", packets.text_question(OLD_NAME))
        await trio.sleep(2)
        assert len(lan.sent) - before == 2
        nursery.cancel_scope.cancel()


async def test_a_node_that_is_named_without_its_text_is_asked_for_it_once(autojump_clock: trio.abc.Clock) -> None:
    """Some mDNS software puts each record into a packet of its own."""
    lan, (here,) = Lan(), peer_ids(1)
    named = dns.message.from_wire(packets.announcement(OLD_PEER[-32:], [Address("ip4", "192.0.2.2", 7464, OLD_PEER)]))
    del named.answer[1:]  # the PTR record is left
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node("192.168.0.1", here).run)
        await trio.sleep(10)
        before = len(lan.sent)
        for _ in range(3):
            lan.say("192.168.0.2", named.to_wire())
            await trio.sleep(1)
        assert [packet for _, _, packet in lan.sent[before:]] == [packets.text_question(OLD_NAME)]
        nursery.cancel_scope.cancel()


async def test_two_hundred_neighbours_that_answer_at_once_are_all_found(autojump_clock: trio.abc.Clock) -> None:
    """A hundred have an address each; of the others twenty each are on one machine."""
    lan, (here, *peers) = Lan(), peer_ids(201)
    found: set[str] = set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node("192.168.0.1", here, lambda peer, _: found.add(peer)).run)
        await trio.sleep(10)
        for number, peer in enumerate(peers):
            ip = f"192.168.1.{number}" if number < 100 else f"192.168.2.{number // 20}"
            lan.say(ip, packets.announcement(peer[-32:], [Address("ip4", ip, 4001, peer)]))
            await trio.sleep(random.uniform(0, 0.001))
        await trio.sleep(5)
        assert found == set(peers)
        nursery.cancel_scope.cancel()


async def test_of_many_nodes_one_asks_and_all_are_heard_about_once_a_minute(autojump_clock: trio.abc.Clock) -> None:
    lan, peers = Lan(), peer_ids(4)
    async with trio.open_nursery() as nursery:
        for number, peer in enumerate(peers):
            nursery.start_soon(lan.node(f"192.168.0.{number}", peer).run)
        await trio.sleep(60)
        lan.sent.clear()
        minutes = 5
        await trio.sleep(minutes * AGAIN_S)
        heard = [packets.read(packet) for _, _, packet in lan.sent]
        assert sum(bool(one.asked) for one in heard) <= 2.5 * minutes
        assert minutes * len(peers) / 2 <= sum(bool(one.texts) for one in heard) <= 3 * minutes * len(peers)
        nursery.cancel_scope.cancel()


async def test_a_node_without_networks_or_addresses_waits_for_them(autojump_clock: trio.abc.Clock) -> None:
    lan, (one, other) = Lan(), peer_ids(2)
    found: list[str] = []
    addresses: list[Address] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node("192.168.0.1", one, lambda peer, _: found.append(peer)).run)
        nursery.start_soon(lan.node("192.168.0.2", other, addresses=lambda: list(addresses)).run)
        await trio.sleep(30)
        assert not found
        addresses.append(Address("ip4", "192.168.0.2", 4001, other))
        await trio.sleep(12)
        assert set(found) == {other}
        nursery.cancel_scope.cancel()


async def test_a_network_that_is_gone_does_not_keep_others_from_being_used() -> None:
    own = {ipaddress.IPv4Interface(text) for text in ("127.0.0.1/8", "203.0.113.77/24")}  # this machine has one of them
    sockets = MulticastSockets(own)
    try:
        assert len(sockets._senders) == 1
        closed = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        closed.close()
        gone = ipaddress.IPv4Interface("203.0.113.78/24")
        sockets._senders = {gone: closed, **sockets._senders}  # sending raises an error, as when a cable is pulled
        sockets.send(OLD_ANNOUNCEMENT)
        with trio.fail_after(10):
            while OLD_ANNOUNCEMENT not in [packet for _, packet in await sockets.receive()]:
                pass
    finally:
        sockets.close()


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has one address on loopback")
async def test_a_node_speaks_over_each_address_of_a_card() -> None:
    """Only the first one joined the group, and neighbours drop what comes from a network that they are not in."""
    sockets = MulticastSockets([ipaddress.IPv4Interface(f"127.0.0.{number}/8") for number in (1, 2)])
    try:
        sockets.send(OLD_ANNOUNCEMENT)
        heard: set[str] = set()
        with trio.fail_after(10):
            while not heard >= {"127.0.0.1", "127.0.0.2"}:
                heard.update(source for source, packet in await sockets.receive() if packet == OLD_ANNOUNCEMENT)
    finally:
        sockets.close()


async def test_of_many_addresses_that_of_the_network_is_announced_there(autojump_clock: trio.abc.Clock) -> None:
    """A machine with nine networks of containers announced eight of these, at none of which others reach it."""
    lan, (here, there) = Lan(), peer_ids(2)
    own = [Address("ip4", f"172.{17 + number}.0.1", 4001, there) for number in range(9)]
    own.append(Address("ip4", "192.168.0.2", 4001, there))
    found: dict[str, list[Address]] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node("192.168.0.1", here, found.__setitem__).run)
        nursery.start_soon(lan.node("192.168.0.2", there, addresses=lambda: own).run)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert found[there][0] == own[-1]
