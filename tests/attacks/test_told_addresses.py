"""Addresses that peers tell: forged ones do not count as theirs, and dialling them does not use a node up."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from app.membership import Membership
from app.swarm.records import sign_record
from p2p import sockets
from p2p.addresses import Address, Scope, address_of, parse_address, parse_known
from p2p.dht.host_view import network_of
from p2p.errors import P2PError
from p2p.host import dialer
from p2p.host.address_book import AddressBook
from p2p.host.heartbeat import Hello
from p2p.host.host import UNAWAITED_DIALS, Host
from p2p.identity import Identity
from p2p.nat.relay_client import RelayClient
from p2p.network import Libp2pNetwork, NetworkConfig
from tests.p2p.nodes import make_host, make_network, until
from tests.p2p.test_host import running
from tests.p2p.test_relay import behind_a_relay

OF_SOMEBODY_ELSE = "203.0.113.9"


async def test_a_peer_behind_a_relay_comes_from_where_the_relay_is() -> None:
    """A relay that is connected is not dialled again, so the address that names it can say anything."""
    async with behind_a_relay() as (relay, hidden, relayed):
        victim = make_network()
        async with victim.running():
            await victim.host.connect(relay.peer_id, relay.host.addresses)
            victim.learn(hidden.peer_id, [str(replace(relayed, host=OF_SOMEBODY_ELSE))])
            await victim.call(hidden.peer_id, "echo", b"", timeout_s=5)
            connection = victim.host.connection(hidden.peer_id)
            assert connection is not None
            assert connection.relayed
            assert connection.address.host == OF_SOMEBODY_ELSE
            assert victim.source(hidden.peer_id) == victim.source(relay.peer_id) == "127.0.0.1"
            assert network_of(victim.host, hidden.peer_id) is None, "a peer of this machine, not of a public network"
            counted = {str(ip) for ip, _ in victim.host.admission._connections}
            assert counted == {"127.0.0.1"}, "or somebody else would find its places taken"


async def test_a_host_name_is_not_where_a_peer_comes_from() -> None:
    """Whoever has a domain has as many names as it likes for one machine."""
    victim, peer = make_network(), make_network()
    async with victim.running(), peer.running():
        at = parse_address(peer.addresses()[0])
        victim.learn(peer.peer_id, [str(Address("dns4", "localhost", at.port, peer.peer_id))])
        await victim.host.connect(peer.peer_id)
        connection = victim.host.connection(peer.peer_id)
        assert connection is not None
        assert connection.address.host == "localhost"
        assert victim.source(peer.peer_id) == "127.0.0.1"


@pytest.mark.parametrize("name", ["relay.example.org", f"{'x' * 60}.{'y' * 60}.{'z' * 60}.example.org"])
def test_a_member_behind_a_router_announces_its_relays_however_many_addresses_its_machine_has(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its containers are of no use to others; nor may a relay with a long name keep out the next one."""
    identity, relay, other = (Identity.generate() for _ in range(3))
    machine = [ipaddress.ip_address(f"172.{number}.0.1") for number in range(17, 27)]
    monkeypatch.setattr(sockets, "own_ips", lambda: machine)
    network = Libp2pNetwork(identity, NetworkConfig())
    network.host._listening = [address_of("0.0.0.0", 7464)]
    at = (Address("dns4", name, 7464, relay.peer_id), Address("ip4", "203.0.113.9", 7464, other.peer_id))
    network.host.extra_addresses = [address.through(identity.peer_id) for address in at]
    record = sign_record(identity, "home", "ee" * 32, now_ms=1)
    announced = parse_known(Membership(network, identity, record, 4).own.addresses)
    assert other.peer_id in {address.relay for address in announced}
    assert Scope.LAN in {address.scope for address in announced}


async def test_peers_that_are_said_to_be_behind_each_other_are_not_all_dialled() -> None:
    """300 peers of which each is said to be behind twelve others, and to listen where nobody answers."""
    victim, silent = make_host(), socket.socket()
    RelayClient(victim)
    silent.bind(("127.0.0.1", 0))
    silent.listen(0)  # accepts nobody: dials wait
    port, made_up = silent.getsockname()[1], [Identity.generate().peer_id for _ in range(300)]
    with silent:
        async with running(victim):
            for number, peer in enumerate(made_up):
                others = [made_up[(number * 12 + step) % len(made_up)] for step in range(1, 13)]
                victim.book.add(peer, [Address("ip4", "127.0.0.1", port, peer, other) for other in others], 0.0)
            most = 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_dial_in_vain, victim, made_up[0], nursery.cancel_scope)
                while not nursery.cancel_scope.cancel_called:
                    most = max(most, len(victim._dials))
                    await trio.sleep(0.05)
            assert 1 < most <= 5, "itself and four relays"


async def test_a_relay_that_is_no_peer_does_not_silence_the_directory() -> None:
    """A stranger says that it is behind a relay whose name is no peer id: a node that knows it still answers others."""
    victim, stranger, honest = make_network("dht"), make_network("dht"), make_network("dht")
    nobody = Address("ip4", OF_SOMEBODY_ELSE, 7464, stranger.peer_id, "1" * 40)
    stranger.traversal.hello = lambda connection: Hello((nobody,))  # type: ignore[method-assign]
    async with victim.running(), stranger.running(), honest.running():
        await stranger.host.connect(victim.peer_id, victim.host.addresses)
        assert victim._directory is not None
        table = victim._directory.table
        await until(lambda: stranger.peer_id in table)
        await honest.host.connect(victim.peer_id, victim.host.addresses)
        assert honest._directory is not None
        assert await honest._directory.greet(victim.peer_id), "everybody near it in the table has to be named"
        assert stranger.peer_id in table


async def test_dials_that_nobody_waits_for_are_few() -> None:
    """As in a look-up, where a node that lies names one peer after another, none of which answers."""
    victim, silent = make_host(), socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(0)  # accepts nobody: dials wait
    port, made_up = silent.getsockname()[1], [Identity.generate().peer_id for _ in range(40)]
    with silent, socket.create_connection(("127.0.0.1", port)):
        async with running(victim), trio.open_nursery() as nursery:
            waiting = Identity.generate().peer_id
            victim.book.add(waiting, [Address("ip4", "127.0.0.1", port, waiting)], 0.0)
            nursery.start_soon(victim.connect, waiting)
            for peer in made_up:
                victim.book.add(peer, [Address("ip4", "127.0.0.1", port, peer)], 0.0)
                with trio.move_on_after(0.01):
                    await victim.connect(peer)
            await until(lambda: len(victim._dials) <= UNAWAITED_DIALS + 1)
            left = [peer for peer, _ in victim._dials]
            assert left == [waiting, *made_up[-UNAWAITED_DIALS:]], "the one that is waited for, and the latest"
            nursery.cancel_scope.cancel()


async def _dial_in_vain(host: Host, peer: str, then: trio.CancelScope) -> None:
    with pytest.raises(P2PError):
        await host.connect(peer)
    then.cancel()


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The names that a server was asked for which never answers, as somebody's own can be."""
    asked: list[bytes] = []
    given_up = threading.Event()
    look_up = socket.getaddrinfo

    def getaddrinfo(host: bytes, port: int, family: int = 0, kind: int = 0, proto: int = 0, flags: int = 0) -> object:
        if flags & socket.AI_NUMERICHOST or not host.endswith(b".example"):
            return look_up(host, port, family, kind, proto, flags)
        asked.append(host)
        given_up.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, os.strerror(0))

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield asked
    given_up.set()


async def test_names_that_are_never_answered_leave_threads_for_others(unanswered: list[bytes]) -> None:
    """Whoever tells of peers at such names must not stop what else the node does in threads."""
    victim = make_host()
    threads = trio.to_thread.current_default_thread_limiter()
    before, threads.total_tokens = threads.total_tokens, 8
    try:
        async with running(victim), trio.open_nursery() as nursery:
            for _ in range(8):
                peer = Identity.generate().peer_id
                victim.book.add(peer, [Address("dns4", f"{n}.{peer}.example", 7464, peer) for n in range(16)], 0.0)
                nursery.start_soon(_dial_in_vain, victim, peer, trio.CancelScope())
            await until(lambda: len(unanswered) >= threads.total_tokens)
            with trio.fail_after(5):
                assert await trio.to_thread.run_sync(lambda: "done") == "done"
            nursery.cancel_scope.cancel()
    finally:
        threads.total_tokens = before


@pytest.mark.parametrize("own", ["/ip4/8.8.8.8/tcp/7464", "/ip4/9.9.9.9/tcp/1/p2p/{relay}/p2p-circuit"])
async def test_made_up_addresses_of_the_local_network_do_not_delay_the_dial_of_a_peers_own(
    autojump_clock: MockClock, own: str
) -> None:
    """16 told addresses of this LAN were dialled first, 0.15 s each: longer than the 2 s that a question may take."""
    here = [ipaddress.ip_interface("192.168.1.9/24")]
    peer, relay, book = Identity.generate().peer_id, Identity.generate().peer_id, AddressBook()
    proven = parse_address(own.format(relay=relay)).of(peer)
    book.succeeded(proven, 1.0)
    for number in range(16):
        book.add(peer, [parse_address(f"/ip4/192.168.1.{100 + number}/tcp/7464")], 2.0 + number)

    async def dial(address: Address) -> Address:
        await trio.sleep(0.1 if address == proven else 5)
        return address

    began = trio.current_time()
    attempts = dialer.order(book.addresses(peer), here, book.told(peer))
    assert await dialer.first_of(peer, attempts, dial, lambda late: None) == proven
    assert trio.current_time() - began < 1.1
    assert len(attempts) == dialer.MAX_ATTEMPTS, "the others are tried too"
