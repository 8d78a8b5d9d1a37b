"""Nodes of the directory that send all that a message may hold, at the same moment: this node goes on meanwhile."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio

from p2p.dht.directory import Directory
from p2p.dht.store import MAX_VALUE_RECORDS, ValueStore
from p2p.dht.wire import MAX_PEERS, MAX_PROVIDERS, Contact, Message, Op, decode, provider_key
from p2p.host import messages
from p2p.host.messages import address_bytes
from p2p.host.peer_record import open_record
from p2p.identity import peer_id_bytes, peer_id_from_bytes
from p2p.protobuf import encode, varint
from tests.p2p.test_dht import KEY, PLACE, Surroundings, World, peer_named, providing

_IDS = random.Random(7)


class Counting(Surroundings):
    """A host that counts the contacts that are learnt, and opens their records as a real one does."""

    learnt = 0

    def learn(self, contact: Contact) -> None:
        self.learnt += 1
        open_record(contact.record, contact.peer)

    def is_server(self, peer: str) -> bool:
        return True


async def most_between_turns(host: Counting, work: Callable[[], Awaitable[object]]) -> int:
    """The most contacts that were read while another task of the node waited for its turn."""
    most = 0
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            nonlocal most
            while True:
                before = host.learnt
                try:
                    await trio.lowlevel.checkpoint()
                finally:
                    most = max(most, host.learnt - before)

        nursery.start_soon(watch)
        await work()
        nursery.cancel_scope.cancel()
    return most


def full_answer(op: Op, key: bytes) -> bytes:
    """Names as many peers as an answer may, none of which was ever heard of."""
    contacts = [Contact(peer_named(_IDS.getrandbits(200)), (PLACE,)) for _ in range(MAX_PEERS + MAX_PROVIDERS)]
    return Message(op, key, tuple(contacts[:MAX_PEERS]), tuple(contacts[MAX_PEERS:])).encode()


async def test_answers_that_all_come_at_the_same_moment_are_read_one_contact_at_a_time() -> None:
    """One machine with many identities holds back its answers' last bytes; each answer alone took a tenth of a second.

    Many look-ups are under way at once, and all of their answers were read before anything else had its turn.
    """
    host, waiting, all_asked = Counting(World(), peer_named(1)), 0, trio.Event()

    async def ask(peer: str, request: Message, timeout_s: float) -> bytes | None:
        nonlocal waiting
        waiting += 1
        if waiting >= 18:  # six under way in each of three look-ups
            all_asked.set()
        await all_asked.wait()
        return full_answer(request.op, request.key)

    directory = Directory(peer_named(1), ask, host)
    for number in range(2, 20):
        directory.table.saw(peer_named(number), None)

    async def look_up() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(lambda number: directory.find_providers(bytes([number]) * 32, timeout_s=20), number)
            while host.learnt < 18 * (MAX_PEERS + MAX_PROVIDERS):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    assert await most_between_turns(host, look_up) <= 4


async def test_requests_that_all_come_at_the_same_moment_are_answered_one_at_a_time() -> None:
    """A request carries a signed record of the sender, which takes a millisecond to open."""
    host = Counting(World(), peer_named(1))

    async def ask(peer: str, request: Message, timeout_s: float) -> bytes | None:
        return None

    directory = Directory(peer_named(1), ask, host)

    async def answer() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(2, 66):
                body = Message(Op.FIND_NODE, b"any", sender=b"record").encode()
                nursery.start_soon(directory.handle, peer_named(number), body)

    assert await most_between_turns(host, answer) <= 2
    assert host.learnt == 64


def test_few_peer_ids_of_a_contact_are_written_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longest of all that is read: an address could have a dozen of them, and a contact 32 such addresses."""
    written: list[bytes] = []

    def writing(raw: bytes) -> str:
        written.append(raw)
        return peer_id_from_bytes(raw)

    monkeypatch.setattr(messages, "peer_id_from_bytes", writing)

    def peer() -> bytes:
        raw = peer_id_bytes(peer_named(_IDS.getrandbits(200)))
        return varint(421) + varint(len(raw)) + raw

    places = [
        address_bytes(PLACE),
        address_bytes(PLACE) + peer() + varint(290) + peer(),
        address_bytes(PLACE) + b"".join(peer() for _ in range(11)),
        address_bytes(PLACE) + (varint(290) + peer()) * 10,
        b"".join(peer() for _ in range(11)),
    ]
    for place in places:
        written.clear()
        entry = encode((1, peer_id_bytes(peer_named(1))), (2, [place + varint(6) + bytes([0, n]) for n in range(200)]))
        (contact,) = decode(encode((1, Op.FIND_NODE), (8, [entry]))).closer
        assert len(contact.addresses) <= 8
        assert len(written) <= 2 * 16


class Networked(Surroundings):
    """A host to which the honest are connected from networks of their own, and all others from one."""

    honest = frozenset(peer_named(number) for number in range(2, 12))

    def network_of(self, peer: str) -> str | None:
        return peer if peer in self.honest else "theirs"

    def is_server(self, peer: str) -> bool:
        return True


@pytest.mark.parametrize("of_one_key", [True, False])
async def test_identities_of_one_network_drive_out_their_own_provider_records(
    of_one_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 of them stored 256 made-up keys each, or all of them the key that others look for: no provider was left."""
    monkeypatch.setattr("p2p.dht.store.MAX_RECORDS", 200)

    async def ask(*_: object) -> None:
        return None

    directory = Directory(peer_named(1), ask, Networked(World(), peer_named(1)))
    for member in Networked.honest:
        await directory.handle(member, providing(KEY, member))
    for number in range(300):
        liar, key = peer_named(1000 + number % 100), KEY if of_one_key else number.to_bytes(32)
        await directory.handle(liar, providing(key, liar))
    found = directory.providers.get(provider_key(KEY), trio.current_time(), Networked.honest.__contains__)
    assert {contact.peer for contact in found} >= Networked.honest
    newcomer = peer_named(20)
    await directory.handle(newcomer, providing(KEY, newcomer))
    found = directory.providers.get(provider_key(KEY), trio.current_time(), lambda peer: peer == newcomer)
    assert found[0].peer == newcomer


@pytest.mark.parametrize("networks", [1, 2])
def test_one_network_that_fills_the_directory_drives_out_its_own_values(networks: int) -> None:
    """32 identities with 64 values each drove out a record that members of five networks had stored before."""
    store, rare = ValueStore(), [(f"member {number}", b"rare %d" % number) for number in range(100)]
    for number in range(5):
        store.put(b"home", f"founder {number}", b"record", now=0, network=f"net {number}")
    for member, value in rare:
        store.put(value, member, value, now=1, network=member)
    for number in range(MAX_VALUE_RECORDS + 64):
        for network in range(networks):
            store.put(b"key %d" % number, f"liar {number // 32} {network}", b"lie", now=2, network=f"theirs {network}")
    assert len(store) == MAX_VALUE_RECORDS
    assert store.get(b"home", 3) == [b"record"]
    assert all(store.get(value, 3) == [value] for _, value in rare)
    assert store.put(b"late", "newcomer", b"late", now=3, network="net 9")
    assert store.get(b"late", 3) == [b"late"]
