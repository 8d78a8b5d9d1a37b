"""PCP and NAT-PMP: the messages as the RFCs have them, against a router of the test's own over real UDP sockets."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from p2p import sockets
from p2p.nat import port_mapping
from p2p.nat.port_control import (
    Mapping,
    MappingRefused,
    OnlyNatPmp,
    PortControl,
    pcp_answer,
    pcp_request,
    pmp_address,
    pmp_answer,
    pmp_request,
)
from p2p.nat.port_mapping import PortMapper, Route, parse_netstat, parse_routes

NONCE = b"twelve bytes"


def test_the_requests_are_those_of_the_rfcs() -> None:
    assert pmp_request(7464, 7000, 3600) == bytes.fromhex("000200001d281b5800000e10")
    assert pmp_request(7464, 7000, 0) == bytes.fromhex("000200001d28000000000000")  # RFC 6886, 3.4
    body = pcp_request(NONCE, "192.168.1.2", 7464, 7000, 3600)
    assert body[:24] == bytes.fromhex("0201000000000e1000000000000000000000ffffc0a80102")
    assert body[24:] == NONCE + bytes.fromhex("060000001d281b5800000000000000000000ffff00000000")


def pcp_said(result: int = 0, nonce: bytes = NONCE, port: int = 7464, external: int = 7000) -> bytes:
    header = struct.pack("!BBBBII12s", 2, 129, 0, result, 1800, 1, b"")
    address = ipaddress.IPv6Address("::ffff:5.5.5.5").packed
    return header + nonce + struct.pack("!B3sHH16s", 6, b"", port, external, address)


def test_answers_and_refusals() -> None:
    assert pcp_answer(pcp_said(), NONCE, 7464) == Mapping("PCP", "5.5.5.5", 7000, 1800)
    assert pcp_answer(pcp_said(nonce=b"another's 12"), NONCE, 7464) is None
    assert pcp_answer(pcp_said(port=1), NONCE, 7464) is None
    with pytest.raises(MappingRefused, match="result 2"):
        pcp_answer(pcp_said(2), NONCE, 7464)
    for old in (bytes([0, 129, 0, 1, 0, 0, 0, 9]), pcp_said(1)):
        with pytest.raises(OnlyNatPmp):
            pcp_answer(old, NONCE, 7464)
    assert pmp_answer(struct.pack("!BBHIHHI", 0, 130, 0, 1, 7464, 7001, 1800), 7464) == (7001, 1800)
    assert pmp_answer(struct.pack("!BBHIHHI", 0, 130, 0, 1, 80, 7001, 1800), 7464) is None
    with pytest.raises(MappingRefused, match="result 3"):
        pmp_answer(struct.pack("!BBHI", 0, 130, 3, 1), 7464)
    assert pmp_address(struct.pack("!BBHI4s", 0, 128, 0, 1, bytes([5, 5, 5, 5]))) == "5.5.5.5"


@given(st.binary(max_size=80))
def test_arbitrary_answers_are_no_answers_or_refusals(data: bytes) -> None:
    for decode in (lambda: pcp_answer(data, NONCE, 1), lambda: pmp_answer(data, 1), lambda: pmp_address(data)):
        try:
            decode()
        except MappingRefused:
            pass


@asynccontextmanager
async def router(answer: Callable[[bytes], bytes | None]) -> AsyncIterator[int]:
    """A UDP server on loopback that answers each request with `answer`; yields its port."""
    sock = trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    await sock.bind(("127.0.0.1", 0))

    async def serve() -> None:
        while True:
            data, sender = await sock.recvfrom(2000)
            said = answer(data)
            if said is not None:
                await sock.sendto(said, sender)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        yield sock.getsockname()[1]
        nursery.cancel_scope.cancel()
    sock.close()


class NatPmpRouter:
    """Knows NAT-PMP only, and loses every first packet of a kind."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        self._seen: set[bytes] = set()

    def answer(self, data: bytes) -> bytes | None:
        if data not in self._seen:
            self._seen.add(data)
            return None
        if data[0] == 2:
            return bytes([0, 129, 0, 1, 0, 0, 0, 9])
        if data[1] == 0:
            return struct.pack("!BBHI4s", 0, 128, 0, 1, bytes([5, 5, 5, 5]))
        _, _, _, internal, external, lifetime_s = struct.unpack("!BBHHHI", data)
        if lifetime_s:
            self.mapped[internal] = external
        else:
            self.mapped.pop(internal, None)
        return struct.pack("!BBHIHHI", 0, 130, 0, 1, internal, external, lifetime_s)


async def test_a_port_is_mapped_and_removed_by_nat_pmp_although_packets_are_lost() -> None:
    theirs = NatPmpRouter()
    async with router(theirs.answer) as port:
        control = PortControl("127.0.0.1", "127.0.0.1", 7464, b"key", port)
        assert await control.map(7464) == Mapping("NAT-PMP", "5.5.5.5", 7464, 3600)
        assert theirs.mapped == {7464: 7464}
        await control.map(7464, lifetime_s=0)
        assert theirs.mapped == {}


class StrictRouter:
    """Refuses another nonce for a mapping that lives (RFC 6887, 11.3)."""

    def __init__(self) -> None:
        self.nonces: dict[int, bytes] = {}  # by internal port

    def answer(self, data: bytes) -> bytes:
        nonce, port = data[24:36], int.from_bytes(data[40:42])
        return pcp_said(0 if self.nonces.setdefault(port, nonce) == nonce else 2, nonce, port)


async def test_after_a_crash_a_node_may_renew_its_mapping_and_nobody_else() -> None:
    theirs = StrictRouter()
    async with router(theirs.answer) as port:
        for _ in range(2):
            assert (await PortControl("127.0.0.1", "127.0.0.1", 7464, b"key", port).map(7464)).port == 7000
        with pytest.raises(MappingRefused, match="result 2"):
            await PortControl("127.0.0.1", "127.0.0.1", 7464, b"another's", port).map(7464)
    nonces = {
        PortControl(gateway, own_ip, port, b"key").nonce
        for gateway in ("10.0.0.1", "10.0.0.2")
        for own_ip in ("10.0.0.3", "10.0.0.4")
        for port in (1, 2)
    }
    assert len(nonces) == 8


async def test_a_router_that_is_silent_or_absent_is_given_up_on() -> None:
    async with router(lambda data: None) as port:
        with trio.fail_after(3), pytest.raises(MappingRefused, match="answers neither"):
            await PortControl("127.0.0.1", "127.0.0.1", 7464, b"key", port).map(7464)
    with trio.fail_after(3), pytest.raises(MappingRefused, match="does not answer"):
        await PortControl("127.0.0.1", "127.0.0.1", 7464, b"key", port).map(7464)


def test_the_gateway_in_netstat() -> None:
    mac = "Destination        Gateway            Flags\ndefault            192.168.1.1        UGScg   en0\n"
    windows = "Network Destination  Netmask  Gateway  Interface\n  0.0.0.0  0.0.0.0  192.168.0.1  192.168.0.7  25\n"
    assert (parse_netstat(mac), parse_netstat(windows), parse_netstat("default link#4")) == (
        ["192.168.1.1"],
        ["192.168.0.1"],
        [],
    )


def test_the_gateways_of_several_uplinks_on_linux() -> None:
    said = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
wlan0 00000000 0101A8C0 0003 0 0 600 00000000 0 0 0
eth0 00000000 0100000A 0003 0 0 100 00000000 0 0 0
eth0 0000000A 00000000 0001 0 0 100 00FFFFFF 0 0 0
torn 00000000
"""
    assert parse_routes(said) == ["10.0.0.1", "192.168.1.1"]


async def test_after_sleep_the_port_is_mapped_again_at_once(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Trio's clock stands still meanwhile and the router's does not: the port was closed for half an hour after it."""
    slept_s, mapped_at, mapped = 0.0, list[float](), trio.Event()

    async def say_mapped(self: PortControl, external_port: int, lifetime_s: int = 3600) -> Mapping:
        mapped_at.append(trio.current_time())
        mapped.set()
        return Mapping("PCP", "5.5.5.5", external_port, lifetime_s)

    monkeypatch.setattr(PortControl, "map", say_mapped)
    monkeypatch.setattr(port_mapping, "time", SimpleNamespace(time=lambda: trio.current_time() + slept_s))
    mapper = PortMapper(7464, b"key", lambda address: None, lambda: Route("192.168.1.1", "192.168.1.2"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mapper.run)
        await mapped.wait()
        await trio.sleep(300)
        assert len(mapped_at) == 1
        slept_s, mapped, woke_at = 7200.0, trio.Event(), trio.current_time()
        await mapped.wait()
        assert mapped_at[-1] - woke_at <= 10
        nursery.cancel_scope.cancel()


def test_of_two_cards_in_the_routers_network_the_one_that_speaks_to_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Routers refuse to forward a port to a machine other than the one that asks (a laptop on cable and Wi-Fi)."""
    cards = [ipaddress.ip_interface(f"192.168.1.{number}/24") for number in (30, 40)]
    monkeypatch.setattr(sockets, "own_interfaces", lambda: cards)
    monkeypatch.setattr(sockets, "source_towards", {"192.168.1.1": "192.168.1.40"}.__getitem__, raising=False)
    monkeypatch.setattr(port_mapping, "_linux_gateways", lambda: ["192.168.1.1"])
    monkeypatch.setattr("sys.platform", "linux")
    assert port_mapping.route_out(0) == Route("192.168.1.1", "192.168.1.40")
    assert port_mapping.route_out(1) is None


def test_the_address_towards_a_host_is_that_of_the_card_that_sends() -> None:
    assert sockets.source_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for netstat")
def test_netstat_is_read_in_whatever_encoding_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows' programs write in another code page than Python reads: a Turkish heading ended the port mapping."""
    program = tmp_path / "netstat"
    program.write_bytes(b"#!/bin/sh\nprintf ' 0.0.0.0 0.0.0.0 192.168.1.1 192.168.1.2 25\nKal\\215c\\215 Yollar:\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert port_mapping._netstat_gateways() == ["192.168.1.1"]
