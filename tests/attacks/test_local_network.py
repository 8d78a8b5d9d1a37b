"""Somebody on the local network who answers mDNS and UPnP queries with whatever it likes."""

from __future__ import annotations

import itertools
import random
import struct
import tracemalloc

import dns.name
import dns.rdata
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from p2p.addresses import Address
from p2p.discovery import mdns
from p2p.discovery import mdns_packets as packets
from p2p.discovery.mdns import WaitingPackets
from p2p.discovery.seeker import ENOUGH_PEERS, MAX_NEIGHBOURS, NEIGHBOUR_DIALS, Seeker
from p2p.errors import ProtocolError
from p2p.host.address_book import AddressBook
from p2p.identity import peer_id_of
from tests.p2p.lan import Lan
from tests.p2p.test_mdns import OLD_ANNOUNCEMENT, OLD_ANSWER, OLD_QUESTION

# Names of services that are none: of another type, without a type, too long, with control characters.
NAMES = (
    "printer._ipp._tcp.local.",
    "nothing.local.",
    "nowhere.",
    f"{'x' * 60}.{'y' * 60}.{packets.SERVICE}",
    f"a\x07b.{packets.SERVICE}",
)
ADDRESS = Address("ip4", "127.0.0.1", 4001)
HERE, ATTACKER, HONEST = "192.168.0.1", "192.168.0.66", "192.168.0.2"
PATIENCE_S = 60.0


def made_up_peers(first: int, count: int) -> list[str]:
    """Peers that do not exist."""
    return [peer_id_of(number.to_bytes(32, "big")) for number in range(first, first + count)]


def announced(peer: str, ip: str = ATTACKER) -> bytes:
    """An announcement of a peer."""
    return packets.announcement(peer[-32:], [Address("ip4", ip, 4001, peer)])


def names(texts: list[str]) -> bytes:
    """Say that there are services of Shoal with these names."""
    data = [dns.name.from_text(text).to_wire() or b"" for text in texts]
    service = dns.name.from_text(packets.SERVICE).to_wire() or b""
    records = [service + struct.pack("!HHIH", packets.PTR, 1, 2**32 - 1, len(name)) + name for name in data]
    return struct.pack("!6H", 0, 0x8400, 0, len(records), 0, 0) + b"".join(records)


async def test_names_that_are_no_services_do_not_end_the_search(autojump_clock: trio.abc.Clock) -> None:
    """A neighbour names services that do not exist: this node goes on, and finds the next real one."""
    lan, (here, first, second) = Lan(), made_up_peers(0, 3)
    found: dict[str, list[Address]] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node(HERE, here, found.__setitem__).run)
        for peer in (first, second):
            nursery.start_soon(lan.node(HONEST, peer).run)
            await trio.sleep(1)
            assert peer in found
            lan.say(ATTACKER, names(list(NAMES)))
            lan.say(ATTACKER, names(["."]))
            lan.say(ATTACKER, b"_shoal")
            await trio.sleep(1)
        nursery.cancel_scope.cancel()


@given(st.data())
def test_a_damaged_packet_is_refused_or_read_and_nothing_else(data: st.DataObject) -> None:
    packet = bytearray(data.draw(st.sampled_from((OLD_ANNOUNCEMENT, OLD_ANSWER, OLD_QUESTION, names(list(NAMES))))))
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, len(packet) - 1), st.integers(0, 255)), max_size=8)):
        packet[place] = byte
    cut = data.draw(st.integers(0, len(packet)))
    try:
        heard = packets.read(bytes(packet[:cut] if data.draw(st.booleans()) else packet))
    except ProtocolError:
        return
    assert len(heard.texts) <= packets.MAX_NAMES
    assert len(heard.bare) <= packets.MAX_NAMES


def test_a_packet_of_more_records_than_any_neighbour_sends_is_refused() -> None:
    assert len(packets.read(names([f"{n}.{packets.SERVICE}" for n in range(64)])).bare) == packets.MAX_NAMES
    with pytest.raises(ProtocolError):
        packets.read(names([f"{n}.{packets.SERVICE}" for n in range(65)]))


def test_made_up_types_and_classes_of_records_leave_nothing_behind() -> None:
    """dnspython would keep an entry for each of them, for ever."""
    before = len(dns.rdata._rdata_classes)
    for number in range(100):
        record = b"\6_shoal\0" + struct.pack("!HHIH", 60000 + number, 60000 + number, 120, 0)
        packets.read(struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0) + record)
    assert len(dns.rdata._rdata_classes) == before


async def test_a_flood_of_made_up_names_takes_no_memory_and_hides_nobody(autojump_clock: trio.abc.Clock) -> None:
    """200 packets a second; without bounds, 50 names in each took 300 MiB in 40 s, and nobody else was found."""
    lan, (here, honest) = Lan(), made_up_peers(0, 2)
    found: dict[str, list[Address]] = {}

    async def flood(seconds: int) -> None:
        for _ in range(seconds * 10):
            for _ in range(20):
                lan.say(ATTACKER, names([f"{random.getrandbits(64):x}.{packets.SERVICE}"]))
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node(HERE, here, found.__setitem__).run)
        await flood(10)
        tracemalloc.start()
        nursery.start_soon(lan.node(HONEST, honest).run)
        await flood(5)
        assert honest in found
        grown_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert grown_bytes < 1 << 20
        lan.sent.clear()
        await flood(5)
        asked = [packet for _, ip, packet in lan.sent if ip == HERE and not packets.read(packet).texts]
        assert len(asked) <= 3  # it asks for few of the texts that these names lack
        nursery.cancel_scope.cancel()


async def test_packets_from_outside_the_own_networks_are_dropped(autojump_clock: trio.abc.Clock) -> None:
    lan, (here, far, near) = Lan(), made_up_peers(0, 3)
    found: dict[str, list[Address]] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node(HERE, here, found.__setitem__).run)
        await trio.sleep(10)
        lan.sent.clear()
        for source in ("192.0.2.1", "10.0.0.1", "192.169.0.1"):
            lan.say(source, announced(far))
            lan.say(source, packets.question("a stranger"))
        await trio.sleep(2)
        assert not found
        assert not lan.sent
        lan.say(HONEST, announced(near))
        await trio.sleep(2)
        assert list(found) == [near]
        nursery.cancel_scope.cancel()


async def test_however_many_ask_a_node_answers_once_a_second_and_never_to_one_address(
    autojump_clock: trio.abc.Clock,
) -> None:
    lan, (here,) = Lan(), made_up_peers(0, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node(HERE, here).run)
        await trio.sleep(10)
        lan.sent.clear()
        for number in range(200):
            lan.say(f"192.168.7.{number}", packets.question(f"stranger {number}"))
            await trio.sleep(0.05)
        assert 5 <= len(lan.sent) <= 11
        nursery.cancel_scope.cancel()


async def test_one_address_names_few_peers_and_others_are_reported_meanwhile(autojump_clock: trio.abc.Clock) -> None:
    lan, (here, honest, *made_up) = Lan(), made_up_peers(0, 402)
    found: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node(HERE, here, lambda peer, _: found.append(peer)).run)
        await trio.sleep(5)
        for number, peer in enumerate(made_up):
            if number == 200:
                lan.say(HONEST, announced(honest, HONEST))
            lan.say(ATTACKER, announced(peer))
            await trio.sleep(0.25)  # as many as are read
        assert found.count(honest) == 1
        assert len(found) <= 1 + mdns.PEERS_AT_ONCE + len(made_up) * 0.25 * mdns.PEERS_PER_S + 1
        before = len(found)
        for _ in range(40):  # nor does it report one again and again
            lan.say(ATTACKER, announced(made_up[0]))
            await trio.sleep(0.25)
        assert len(found) <= before + 2
        nursery.cancel_scope.cancel()


async def test_addresses_take_turns_however_many_packets_each_has_sent() -> None:
    waiting = WaitingPackets()
    for number, _ in itertools.product(range(100), range(50)):
        waiting.add(f"192.168.6.{number}", bytes(mdns.MAX_PACKET_BYTES))
    waiting.add(HONEST, b"honest")
    taken = [await waiting.take() for _ in range(101)]
    assert taken[-1] == (HONEST, b"honest")
    for number in range(2000):
        waiting.add(f"192.168.{number // 250}.{number % 250}", bytes(mdns.MAX_PACKET_BYTES))
    with trio.move_on_after(0.1):
        for count in itertools.count():
            assert count <= mdns.MAX_SOURCES * mdns.SOURCE_BYTES / mdns.MAX_PACKET_BYTES
            await waiting.take()


async def test_an_announcement_names_one_peer_and_addresses_of_this_network(autojump_clock: trio.abc.Clock) -> None:
    """One packet named eight peers, at addresses anywhere on the internet, and all of them were dialled."""
    lan, (here, one, other) = Lan(), made_up_peers(0, 3)
    found: dict[str, list[Address]] = {}
    near, far = Address("ip4", "192.168.7.7", 4001), Address("ip4", "8.8.8.8", 4001)
    name = Address("dns4", "example.org", 4001)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.node(HERE, here, found.__setitem__).run)
        await trio.sleep(1)
        lan.say(ATTACKER, packets.announcement("any", [far.of(one), near.of(one), near.of(other), name.of(one)]))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert found == {one: [near.of(one)]}


async def test_names_on_the_local_network_push_out_each_other_only() -> None:
    async def connect(peer: str, addresses: list[Address]) -> bool:
        return False

    seeker = Seeker(connect, lambda peer: False, set)
    seeker.want("remembered", [ADDRESS])
    for number in range(2000):
        seeker.want_neighbour(f"invented {number}", [ADDRESS])
    assert "remembered" in seeker._wanted
    assert len(seeker._wanted) == 1 + MAX_NEIGHBOURS


async def test_peers_that_are_reported_again_and_again_do_not_keep_others_waiting(
    autojump_clock: trio.abc.Clock,
) -> None:
    """32 peers that nobody reaches were due at any time, and came before everybody who was heard of later."""
    reached = trio.Event()

    async def connect(peer: str, addresses: list[Address]) -> bool:
        if peer == "honest":
            reached.set()
            return True
        await trio.sleep(5)
        return False

    async def report() -> None:
        for number in itertools.count():
            seeker.want_neighbour(f"invented {number % mdns.PEERS_AT_ONCE}", [ADDRESS])
            if number > 200:
                seeker.want_neighbour("honest", [ADDRESS])
            await trio.sleep(0.05)

    seeker = Seeker(connect, lambda peer: False, set)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(seeker.run)
        nursery.start_soon(report)
        with trio.fail_after(10 + mdns.PEERS_AT_ONCE / NEIGHBOUR_DIALS * 5 + 5):
            await reached.wait()
        nursery.cancel_scope.cancel()


async def test_announcements_displace_no_address_that_the_user_named(autojump_clock: trio.abc.Clock) -> None:
    """Two packets of one machine took the place of the address in the settings, until the node was started again."""
    lan, (here, configured) = Lan(), made_up_peers(0, 2)
    named = Address("ip4", "9.1.1.1", 7464, configured)
    remembered = [Address("ip4", "9.1.1.2", 4000 + number, configured) for number in range(16)]
    book, dialled = AddressBook(), list[list[Address]]()

    async def connect(peer: str, addresses: list[Address]) -> bool:
        book.add(peer, addresses, trio.current_time())  # as a host does
        dialled.append(book.addresses(peer))
        return False

    seeker = Seeker(connect, lambda peer: False, set)
    seeker.want(configured, [named], sticky=True)
    seeker.want(configured, remembered)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(seeker.run)
        nursery.start_soon(lan.node(HERE, here, seeker.want_neighbour).run)
        for port in (4000, 5000):
            await trio.sleep(3)
            false = [Address("ip4", f"10.9.9.{number}", port, configured) for number in range(8)]
            lan.say(ATTACKER, packets.announcement(configured[-32:], false))
        await trio.sleep(600)
        nursery.cancel_scope.cancel()
    assert all(named in addresses for addresses in dialled)
    assert any(false[0] in addresses for addresses in dialled)  # those are tried too


async def test_neighbours_that_were_reached_count_as_such_however_many_come_after_them(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Eight that mDNS alone had named were enough peers once 128 others were named, and nobody else was dialled."""
    connected, dialled = set[str](), list[str]()

    async def connect(peer: str, addresses: list[Address]) -> bool:
        dialled.append(peer)
        if peer in reachable:
            connected.add(peer)
        return peer in reachable

    reachable = {f"neighbour {number}" for number in range(ENOUGH_PEERS)}
    seeker = Seeker(connect, connected.__contains__, lambda: set(connected))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(seeker.run)
        for number in range(ENOUGH_PEERS + MAX_NEIGHBOURS):
            seeker.want_neighbour(f"neighbour {number}", [ADDRESS])
            await trio.sleep(0.1)
        assert connected == reachable
        seeker.want("remembered", [ADDRESS])
        await trio.sleep(10)
        assert "remembered" in dialled
        nursery.cancel_scope.cancel()


async def test_neighbours_that_never_answer_leave_places_for_other_dials(autojump_clock: trio.abc.Clock) -> None:
    """A peer of the settings waited for two minutes behind 128 names, each of which took ten seconds."""
    dialled_at = list[float]()

    async def connect(peer: str, addresses: list[Address]) -> bool:
        if peer == "configured":
            dialled_at.append(trio.current_time())
            return True
        await trio.sleep(10)
        return False

    seeker = Seeker(connect, lambda peer: False, set)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(seeker.run)
        for number in range(3 * MAX_NEIGHBOURS):
            seeker.want_neighbour(f"invented {number}", [ADDRESS])
            await trio.sleep(0.1)
        wanted_at = trio.current_time()
        seeker.want("configured", [ADDRESS], sticky=True)
        await trio.sleep(60)
        assert dialled_at[0] - wanted_at < 1
        nursery.cancel_scope.cancel()
