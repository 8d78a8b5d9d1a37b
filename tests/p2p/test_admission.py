"""Who may connect: rates, bounds, deny lists, growing holdoffs. And what keeps services alive."""

from __future__ import annotations

import ipaddress
import itertools

import pytest
import trio

from p2p.addresses import Address, parse_address
from p2p.discovery.seeker import ENOUGH_PEERS, Seeker
from p2p.host.admission import MAX_TRACKED, Admission, ConnectionLimits, DenyList
from p2p.identity import peer_id_of
from p2p.supervise import guarded, supervise

IP = ipaddress.ip_address("203.0.113.7")
PEER = peer_id_of(bytes(32))


def test_one_address_may_not_connect_too_often() -> None:
    admission = Admission(ConnectionLimits(accepts_per_ip_s=2, accepts_per_ip_burst=3))
    for _ in range(3):
        assert admission.begin_handshake(IP, now=0) is None
        admission.end_handshake(IP)
    assert "too often" in (admission.begin_handshake(IP, now=0) or "")
    assert admission.begin_handshake(ipaddress.ip_address("203.0.113.8"), now=0) is None
    assert admission.begin_handshake(IP, now=0.6) is None


def test_a_crowd_outside_leaves_room_for_own_dials() -> None:
    admission = Admission(ConnectionLimits(connections=8, inbound_share=0.75, accepts_per_ip_burst=100))
    for _ in range(6):
        assert admission.begin_handshake(IP, 0) is None
        admission.end_handshake(IP)
        assert admission.opened(IP, dialled=False)
    assert "too many connections" in (admission.begin_handshake(IP, 0) or "")
    assert admission.opened(IP, dialled=True)


def test_half_open_handshakes_are_bounded_for_each_address_and_in_all() -> None:
    admission = Admission(ConnectionLimits(handshakes=4, handshakes_per_ip=2))
    assert [admission.begin_handshake(IP, 0) is None for _ in range(3)] == [True, True, False]
    others = [ipaddress.ip_address(f"203.0.113.{n}") for n in (8, 9, 10)]
    assert [admission.begin_handshake(ip, 0) is None for ip in others] == [True, True, False]
    admission.end_handshake(IP)
    assert admission.begin_handshake(others[2], 0) is None
    assert admission.handshakes_in_flight == 4


def test_open_connections_are_bounded() -> None:
    admission = Admission(ConnectionLimits(connections=5, connections_per_ip=2, inbound_share=1.0))
    for dialled in (False, True):
        assert admission.opened(IP, dialled=dialled)
        assert admission.opened(IP, dialled=dialled)
        assert not admission.opened(IP, dialled=dialled)
    assert "from its address" in (admission.begin_handshake(IP, 0) or "")
    assert admission.opened(ipaddress.ip_address("203.0.113.8"), dialled=True)
    assert not admission.opened(ipaddress.ip_address("203.0.113.9"), dialled=True)
    admission.closed(IP, dialled=True)
    assert not admission.opened(IP, dialled=False)
    assert admission.opened(IP, dialled=True)
    assert admission.connections_open == 5


def test_the_deny_list_knows_peers_and_networks_in_both_families() -> None:
    deny = DenyList.parse(["203.0.113.0/24", "2001:db8::/32", PEER])
    assert deny.denies_ip(IP)
    assert deny.denies_ip(ipaddress.ip_address("::ffff:203.0.113.7"))
    assert deny.denies_ip(ipaddress.ip_address("2001:db8::1"))
    for leads_there in ("64:ff9b::203.0.113.7", "2002:cb00:7107::1"):  # by NAT64 and 6to4
        assert deny.denies_ip(ipaddress.ip_address(leads_there))
    assert not deny.denies_ip(ipaddress.ip_address("64:ff9b::203.0.114.7"))
    assert not deny.denies_ip(ipaddress.ip_address("203.0.114.7"))
    admission = Admission(deny=deny)
    assert "deny list" in (admission.begin_handshake(IP, 0) or "")
    assert "deny list" in (admission.refuse_peer(PEER, 0) or "")
    with pytest.raises(ValueError, match="300"):
        DenyList.parse(["300.0.0.0/8"])


def test_the_holdoff_doubles_and_is_forgiven_in_the_end() -> None:
    admission = Admission(ConnectionLimits(first_holdoff_s=10, longest_holdoff_s=100))
    now = 0.0
    for expected in (10, 20, 40, 80, 100, 100):
        assert admission.punish(PEER, now) == expected
        assert "held off" in (admission.refuse_peer(PEER, now) or "")
        now += expected
        assert admission.refuse_peer(PEER, now) is None
    assert admission.punish(PEER, now + 101) == 10


def test_ten_thousand_offenders_cost_a_bounded_table() -> None:
    admission = Admission()
    for number in range(10_000):
        admission.punish(peer_id_of(number.to_bytes(32)), 0)
        admission.begin_handshake(ipaddress.ip_address(number), 0)
        admission.end_handshake(ipaddress.ip_address(number))
    assert len(admission._holdoffs) == MAX_TRACKED
    assert len(admission._accepts) == MAX_TRACKED
    assert admission.handshakes_in_flight == 0
    assert not admission._handshakes


async def test_a_service_that_fails_runs_again_with_growing_pauses(autojump_clock: trio.abc.Clock) -> None:
    runs: list[float] = []

    async def service() -> None:
        runs.append(trio.current_time())
        if len(runs) < 5:
            raise RuntimeError("boom")

    await supervise("a service", service)
    pauses = [later - earlier for earlier, later in itertools.pairwise(runs)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8])


async def test_a_service_that_ran_well_for_a_minute_is_restarted_soon(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[float] = []
    pauses: list[float] = []

    async def service() -> None:
        if ended:
            pauses.append(trio.current_time() - ended[-1])
        if len(ended) == 5:
            return
        await trio.sleep(60 if len(ended) == 3 else 1)
        ended.append(trio.current_time())
        raise RuntimeError("boom")

    await supervise("a service", service)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.1, 0.2])
    assert [record.getMessage().split()[-2] for record in caplog.records] == ["0.1", "0.2", "0.4", "0.1", "0.2"]


async def test_an_error_beside_a_cancellation_does_not_escape(autojump_clock: trio.abc.Clock) -> None:
    async def fails_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise RuntimeError("while cancelled")

    async def task() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_when_cancelled)
            nursery.start_soon(trio.sleep_forever)

    for keep in (guarded, supervise):
        with trio.move_on_after(1) as scope:
            await keep("a task", task)
        assert scope.cancelled_caught


class Neighbourhood:
    def __init__(self) -> None:
        self.connected: set[str] = set()
        self.reachable: set[str] = set()
        self.dialled: list[tuple[str, float]] = []

    async def connect(self, peer: str, addresses: list[Address]) -> bool:
        self.dialled.append((peer, trio.current_time()))
        await trio.sleep(0.1)
        if peer in self.reachable:
            self.connected.add(peer)
        return peer in self.reachable

    def seeker(self) -> Seeker:
        return Seeker(self.connect, self.connected.__contains__, lambda: set(self.connected))


async def test_a_peer_is_dialled_for_ever_with_growing_pauses(autojump_clock: trio.abc.Clock) -> None:
    around = Neighbourhood()
    seeker = around.seeker()
    seeker.want(PEER, [parse_address("/ip4/10.0.0.1/tcp/1")], sticky=True)
    with trio.move_on_after(600):
        await seeker.run()
    times = [at for _, at in around.dialled]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert 10 < len(times) < 30
    assert pauses[0] < 1.0
    assert 45 < pauses[-1] < 80
    around.reachable.add(PEER)
    with trio.move_on_after(100):
        await seeker.run()
    assert PEER in around.connected
    around.connected.clear()
    with trio.move_on_after(10):
        await seeker.run()
    assert PEER in around.connected  # a sticky one is connected to again


async def test_with_company_enough_only_the_sticky_are_sought(autojump_clock: trio.abc.Clock) -> None:
    around = Neighbourhood()
    around.connected.update(f"friend {n}" for n in range(ENOUGH_PEERS))
    seeker = around.seeker()
    seeker.want(PEER, [])
    seeker.want("sticky", [], sticky=True)
    with trio.move_on_after(60):
        await seeker.run()
    assert {peer for peer, _ in around.dialled} == {"sticky"}
