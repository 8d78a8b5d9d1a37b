"""One machine that comes as many peers, each within its limits: together they take a tenth of the loop, no more."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from p2p.addresses import MAX_ADDRESSES_PER_PEER, Address, address_of
from p2p.dht import streams as kad
from p2p.dht.streams import RequestServer
from p2p.errors import ProtocolError
from p2p.host import heartbeat
from p2p.host.admission import Admission, ConnectionLimits
from p2p.host.connection import Connection, Stream
from p2p.host.heartbeat import MAX_BODY_BYTES, Heartbeat, Hello
from p2p.host.turns import Turns
from p2p.identity import peer_id_of
from p2p.protobuf import varint
from tests.p2p.nodes import make_host
from tests.p2p.test_host import running

LIMITS = ConnectionLimits()
SHARE, BURST_S = LIMITS.loop_share_per_ip, LIMITS.loop_burst_per_ip_s
STREAMS = 8
REQUEST = varint(4) + b"ping"


class Machine:
    """This node, of which nothing is real but its turns: work takes as long as it says."""

    def __init__(self) -> None:
        self.worked_s = 0.0
        self.admission = Admission()
        self.turns = Turns(self.admission, lambda: self.worked_s)

    def connection(self, ip: str) -> Connection:
        muxed = SimpleNamespace(peer=ip, session=SimpleNamespace(heard_at=0.0))
        raw = SimpleNamespace(remote=(ip, 7464), is_initiator=False)
        return Connection(cast(Any, muxed), cast(Any, raw), address_of(ip, 7464), self.turns, max_streams=1)

    async def work(self, seconds: float) -> float:
        self.worked_s += seconds
        await trio.sleep(0.01)  # for an answer to be sent, which takes nothing of the loop
        return trio.current_time()


async def keep_on(connection: Connection, work: Callable[[], Awaitable[Any]]) -> None:
    while True:
        await connection.in_turn(cast(Any, work))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.001, 0.03)), min_size=1, max_size=8), st.integers(1, 3))
def test_all_that_peers_at_one_address_send_takes_no_more_than_its_share(
    connections: list[tuple[int, float]], streams: int
) -> None:
    spent: defaultdict[int, float] = defaultdict(float)

    async def main() -> None:
        machine = Machine()

        def work_for(address: int, seconds: float) -> Callable[[], Awaitable[float]]:
            async def work() -> float:
                spent[address] += seconds
                return await machine.work(seconds)

            return work

        with trio.move_on_after(4):
            async with trio.open_nursery() as nursery:
                for address, seconds in connections:
                    connection = machine.connection(f"9.1.1.{address}")
                    for _ in range(streams):
                        nursery.start_soon(keep_on, connection, work_for(address, seconds))
        assert not machine.turns._queues, "nothing is kept of those who have gone"

    trio.run(main, clock=MockClock(autojump_threshold=0))
    for address, total in spent.items():
        longest_s = max(seconds for number, seconds in connections if number == address)
        most = BURST_S + 4 * SHARE + 3 * longest_s
        alone = sum(streams * 4 * seconds / 0.01 for number, seconds in connections if number == address)
        assert total <= most
        assert total >= min(most, alone) / 2, "what is left over is wasted"


async def test_a_neighbour_behind_the_same_address_has_its_turn_and_others_do_not_wait(
    autojump_clock: MockClock,
) -> None:
    machine = Machine()
    async with trio.open_nursery() as nursery:
        for _ in range(LIMITS.connections_per_ip - 1):
            flooder = machine.connection("9.1.1.1")
            for _ in range(4):
                nursery.start_soon(keep_on, flooder, lambda: machine.work(0.001))
        await trio.sleep(5)
        for ip, longest_s in (("9.1.1.1", 1.0), ("9.1.1.2", 0.02)):
            begin = trio.current_time()
            assert await machine.connection(ip).in_turn(machine.work, 0.001) - begin <= longest_s
        nursery.cancel_scope.cancel()


async def test_work_that_fails_or_is_given_up_is_counted_and_holds_nobody_up(autojump_clock: MockClock) -> None:
    machine = Machine()
    connection = machine.connection("2600:1:1:1::1")

    async def fail() -> None:
        machine.worked_s += 1.0
        await trio.lowlevel.checkpoint()
        raise ProtocolError("it cannot be read")

    async def give_up() -> None:
        try:
            await trio.sleep(100)
        finally:
            machine.worked_s += 1.0

    with pytest.raises(ProtocolError):
        await connection.in_turn(fail)
    with trio.move_on_after(1) as waits:
        await connection.in_turn(give_up)
    assert waits.cancelled_caught
    assert machine.worked_s == 1.0, "it had no turn"
    with trio.move_on_after(60) as works:
        await connection.in_turn(give_up)
    assert works.cancelled_caught
    assert machine.worked_s == 2.0
    begin = trio.current_time()
    same_customer = machine.connection("2600:1:1:1::2")
    assert await same_customer.in_turn(machine.work, 0.0) - begin == pytest.approx((1.0 - BURST_S) / SHARE, abs=0.1)


# --- protocols --------------------------------------------------------------------------------------------------------


class Endless:
    """A stream of a peer that sends the same without end."""

    def __init__(self, connection: Connection, message: bytes) -> None:
        self.connection, self.peer, self._message, self._at = connection, connection.peer, message, 0

    async def read(self, n: int) -> bytes:
        piece = self._message[self._at : self._at + n]
        self._at = (self._at + len(piece)) % len(self._message)
        await trio.sleep(0.001 if self._at == 0 else 0)
        return piece

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()


async def test_directory_requests_of_many_identities_wait_unread(autojump_clock: MockClock) -> None:
    machine, cost_s, answered = Machine(), 0.002, 0

    async def handle(peer: str, body: bytes) -> bytes:
        nonlocal answered
        answered += 1
        machine.worked_s += cost_s
        return body

    with trio.move_on_after(10):
        async with trio.open_nursery() as nursery:
            for number in range(32):
                server = RequestServer(handle, lambda peer: None)  # so that the limit of one identity is never reached
                stream = Endless(machine.connection("9.1.1.1"), REQUEST)
                stream.peer = f"identity {number}"
                nursery.start_soon(server.serve, cast(Stream, stream))
    assert 0.5 <= answered * cost_s / (BURST_S + 10 * SHARE) <= 1.1


async def test_hellos_over_all_connections_of_an_address_wait_unread(autojump_clock: MockClock) -> None:
    machine, cost_s, heard = Machine(), 0.002, 0
    body = Hello().encode()

    def hear(connection: Connection, hello: Hello) -> None:
        nonlocal heard
        heard += 1
        machine.worked_s += cost_s

    beat = Heartbeat(lambda connection: Hello(), hear)
    with trio.move_on_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(LIMITS.connections_per_ip):
                stream = Endless(machine.connection("9.1.1.1"), b"\x01" + len(body).to_bytes(2) + body)
                nursery.start_soon(beat._listen, cast(Stream, stream))
    assert 0.5 <= heard * cost_s / (BURST_S + 10 * SHARE) <= 1.1


async def most_in_a_pass(protocol: str, handler: Any, handled: Callable[[], int], message: bytes) -> int:
    """Over real sockets, send 15 messages at once on each of 8 streams; how many were handled between two passes."""
    victim, flooders = make_host(), [make_host() for _ in range(STREAMS // 2)]
    victim.handle(protocol, handler)
    most = before = 0
    async with running(victim, *flooders):
        connections = [
            await flooder.dial(victim.addresses[0], victim.peer_id) for flooder in flooders for _ in range(2)
        ]
        streams = [await connection.open_stream(protocol) for connection in connections]
        await wait_all_tasks_blocked()
        for stream in streams:
            await stream.write(message * 15)
        with trio.fail_after(30):
            while handled() < 15 * STREAMS:
                await trio.lowlevel.checkpoint()
                most, before = max(most, handled() - before), handled()
    return most


async def test_requests_that_arrive_together_are_answered_one_in_a_pass_of_the_scheduler() -> None:
    answered = 0

    async def handle(peer: str, body: bytes) -> bytes:
        nonlocal answered
        answered += 1
        return body

    server = RequestServer(handle, lambda peer: None)
    most = await most_in_a_pass(kad.PROTOCOL, server.serve, lambda: answered, REQUEST)
    assert most <= 2  # whoever counts may itself come first in one pass, and last in the next


async def test_hellos_that_arrive_together_are_read_one_in_a_pass_of_the_scheduler() -> None:
    heard: list[Hello] = []
    beat = Heartbeat(lambda connection: Hello(), lambda connection, hello: heard.append(hello))
    body = Hello().encode()
    frame = b"\x01" + len(body).to_bytes(2) + body
    assert await most_in_a_pass(heartbeat.PROTOCOL, beat.accepted, lambda: len(heard), frame) <= 2


@pytest.mark.parametrize(("before", "is_read"), [(0, True), (15, True), (16, False), (60, False)])
def test_of_a_hello_sixteen_texts_are_looked_at(before: int, is_read: bool) -> None:
    good = address_of("9.1.1.1", 7464)
    texts = ["no address"] * before + [str(good)]
    hello = Hello.decode(json.dumps({"version": 1, "addresses": texts}).encode(), "peer")
    assert bool(hello.addresses) == is_read


def test_the_longest_hello_of_an_honest_node_is_read_whole() -> None:
    here, relay = (peer_id_of(os.urandom(32)) for _ in range(2))
    ips = [f"2600:{'ffff:' * 6}ff{number:02x}" for number in range(16, 16 + MAX_ADDRESSES_PER_PEER)]
    hello = Hello(tuple(Address("ip6", ip, 65535, here, relay) for ip in ips), Address("ip6", ips[0], 65535), True)
    body = hello.encode()
    assert len(body) <= MAX_BODY_BYTES
    assert Hello.decode(body, here) == hello
