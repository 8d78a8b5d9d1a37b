"""Devices of the local network that say they are a router, and answer UPnP, PCP and NAT-PMP with whatever they like."""

from __future__ import annotations

import ipaddress
import tracemalloc
from collections.abc import Callable

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair

from p2p import sockets
from p2p.addresses import Address
from p2p.nat import port_mapping, upnp
from p2p.nat.port_control import Mapping, MappingRefused, PortControl
from p2p.nat.upnp import Page
from tests.p2p.routers import REFUSAL, Answer, Lan, Router, description, found_at, http, say

GATEWAY, OTHER, OWN = "192.168.1.1", "192.168.1.66", "192.168.1.2"
PAGE = Page(GATEWAY, 80, "/")
ROUTE = port_mapping.Route(GATEWAY, OWN)
ENTITIES = b'<!ENTITY a "aaaaaaaaaa">' + b"".join(
    b'<!ENTITY %c "%b">' % (name, b"&%c;" % (name - 1) * 10) for name in range(ord("b"), ord("k"))
)


async def refuse(*_: object, **__: object) -> None:
    """Answer like a router that knows neither PCP nor NAT-PMP."""
    raise MappingRefused("no PCP")


@pytest.fixture
def lan(nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> Lan:
    """A local network on which the gateway answers searches, and nothing but UPnP."""

    async def search(gateway: str, own_ip: str) -> list[Page]:
        return [PAGE]

    monkeypatch.setattr(upnp, "search", search)
    monkeypatch.setattr(PortControl, "map", refuse)
    return Lan(nursery, monkeypatch)


def endless(first: bytes, again: bytes, pause_s: float = 0.0) -> Answer:
    """Return a device whose answer has no end."""

    async def answer(request: bytes, stream: trio.abc.Stream) -> None:
        await stream.send_all(first)
        while True:
            await stream.send_all(again)
            await trio.sleep(pause_s)

    return answer


async def silent(request: bytes, stream: trio.abc.Stream) -> None:
    """Say nothing, and stay."""
    await trio.sleep_forever()


HEAD = b"HTTP/1.1 200 OK\r\n"
HOSTILE: dict[str, Answer] = {
    "a body without an end": endless(HEAD + b"\r\n", b" " * 1000),
    "a body as long as it says": endless(HEAD + b"Content-Length: 4294967295\r\n\r\n", b" " * 1000),
    "headers without an end": endless(HEAD, b"a: b\r\n" * 100),
    "a header without an end": endless(HEAD, b"a" * 1000),
    "chunks without an end": endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 100),
    "a chunk without an end": endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n", b" " * 1000),
    "preliminary answers without an end": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
    "a byte now and then": endless(HEAD + b"\r\n", b" ", 0.5),
    "silence": silent,
    "nothing": say(b""),
    "an empty body": say(http(b"")),
    "half a body": say(HEAD + b"Content-Length: 9\r\n\r\n<a/>"),
    "another protocol": say(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "a change of protocols": say(b"HTTP/1.1 101 Go\r\nUpgrade: x\r\n\r\n"),
    "a page elsewhere": say(b"HTTP/1.1 302 Found\r\nLocation: http://192.168.1.66/\r\nContent-Length: 0\r\n\r\n"),
    "an error": say(http(description(), "404 Not Found")),
    "broken XML": say(http(description()[:-9])),
    "no XML": say(http(bytes(range(256)))),
    "entities that multiply": say(http(b"<!DOCTYPE e [" + ENTITIES + b"]><e>&j;</e>")),
    "entities in another encoding": say(http(("<!DOCTYPE e [" + ENTITIES.decode() + "]><e>&j;</e>").encode("utf-16"))),
    "many elements in each other": say(http(b"<a>" * 9000 + b"</a>" * 9000)),
    "many services in each other": say(http(b"<service>" * 3000 + b"</service>" * 3000)),
    "a long namespace": say(
        http(b'<a xmlns="%b">' % (b"n" * 30000) + b"".join(b"<b%x/>" % n for n in range(4000)) + b"</a>")
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_description_that_makes_no_sense_is_a_refusal(what: str, lan: Lan, autojump_clock: MockClock) -> None:
    lan.devices[GATEWAY, 80] = HOSTILE[what]
    began = trio.current_time()
    with pytest.raises(MappingRefused):
        await upnp.find_router(GATEWAY, OWN)
    assert trio.current_time() - began <= upnp.ANSWER_S + 1
    assert set(lan.asked) == {(GATEWAY, 80)}


@pytest.mark.parametrize("what", HOSTILE)
async def test_an_outcome_that_makes_no_sense_is_a_refusal(what: str, lan: Lan, autojump_clock: MockClock) -> None:
    lan.devices[GATEWAY, 80] = HOSTILE[what]
    router = upnp.UpnpRouter(PAGE, upnp.SERVICES[0], OWN)
    for asking in (router.external_ip, lambda: router.map(1, 1, 1), lambda: router.remove(1)):
        began = trio.current_time()
        with pytest.raises(MappingRefused):
            await asking()
        assert trio.current_time() - began <= upnp.ANSWER_S + 1


@pytest.mark.parametrize(("first", "limit"), [(HEAD + b"\r\n", upnp.MAX_ANSWER_BYTES), (HEAD, upnp.MAX_HEADER_BYTES)])
async def test_an_answer_without_an_end_is_read_no_further_than_its_limit(first: bytes, limit: int, lan: Lan) -> None:
    sent = 0

    async def answer(request: bytes, stream: trio.abc.Stream) -> None:
        nonlocal sent
        await stream.send_all(first)
        while True:
            sent += 1000
            await stream.send_all(b"a" * 1000)

    lan.devices[GATEWAY, 80] = answer
    with pytest.raises(MappingRefused):
        await upnp.ask(PAGE, {})
    assert limit - 2000 < sent <= limit + 2000


def test_of_many_services_few_are_tried() -> None:
    service = f"<service><serviceType>{upnp.SERVICES[0]}</serviceType></service>".encode()
    assert len(upnp.read_description(b"<e>" + service * 600 + b"</e>", PAGE)) == upnp.MAX_SERVICES


@pytest.mark.parametrize(
    "code", ["9" * 5000, "\N{ARABIC-INDIC DIGIT ONE}", "-1", "7\n18", "\N{SUPERSCRIPT TWO}"], ids=range(5)
)
def test_a_code_that_is_none_does_not_reach_the_log(code: str) -> None:
    with pytest.raises(MappingRefused, match="UPnP error 0"):
        upnp.read_outcome("AddPortMapping", 500, f"<e><errorCode>{code}</errorCode></e>".encode(), GATEWAY)


@pytest.mark.parametrize("what", ["many elements in each other", "many services in each other", "a long namespace"])
async def test_an_answer_takes_not_much_more_memory_than_its_bytes(what: str, lan: Lan) -> None:
    lan.devices[GATEWAY, 80] = HOSTILE[what]
    tracemalloc.start()
    with pytest.raises(MappingRefused):
        await upnp.find_router(GATEWAY, OWN)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


@pytest.mark.parametrize(
    "url",
    [
        "http://192.168.1.66/control",
        "http://127.0.0.1:7465/control",
        "http://localhost/control",
        "http://router.example/control",
        "//192.168.1.66/control",
        "http://192.168.1.1@192.168.1.66/control",
        "http://192.168.1.1.example/control",
        "http://192.168.001.001/control",
        "http://[::ffff:192.168.1.1]/control",
        "http://[/control",
        "https://192.168.1.1/control",
        "file:///etc/passwd",
        "http://192.168.1.1:99999/control",
        "http://192.168.1.1:x/control",
        "http://192.168.1.1/a b",
        "http://192.168.1.1/a\r\nHost: 192.168.1.66",
        "http://192.168.1.1/é",
        "http://192.168.1.1/" + "a" * 5000,
    ],
    ids=lambda url: repr(url[:40]),
)
async def test_a_device_names_no_pages_of_others(url: str, lan: Lan) -> None:
    with pytest.raises(MappingRefused):
        upnp.page_of_answer(found_at(url.replace("\r\n", "\n")), GATEWAY)
    for said in (description(url), description("c", f"<URLBase>{url}</URLBase>")):
        lan.devices[GATEWAY, 80] = say(http(said))
        with pytest.raises(MappingRefused):
            await upnp.find_router(GATEWAY, OWN)
    assert set(lan.asked) == {(GATEWAY, 80)}


def test_only_other_machines_of_the_network_are_asked() -> None:
    interfaces = [
        ipaddress.ip_interface(text) for text in ("192.168.1.2/24", "10.0.0.2/8", "fe80::1/64", "127.0.0.1/8")
    ]
    answers = ["192.168.1.1", "192.168.1.2", "10.0.0.1", "10.0.0.2", "127.0.0.1", "127.0.0.9", "192.168.2.1", "8.8.8.8"]
    assert [host for host in answers if upnp.is_neighbour(host, OWN, interfaces)] == ["192.168.1.1"]
    assert not any(upnp.is_neighbour(host, "127.0.0.1", interfaces) for host in answers)


def test_many_devices_that_answer_take_no_places_of_the_gateway() -> None:
    found: list[Page] = []
    crowd = [Page(f"192.168.1.{number}", 80, f"/{path}") for number in range(3, 99) for path in range(9)]
    for page in (*crowd, PAGE, *(Page(GATEWAY, 80, f"/{path}") for path in range(9))):
        if upnp.has_place(page, found, GATEWAY):
            found.append(page)
    assert len(found) == upnp.MAX_PAGES
    assert sum(page.host == GATEWAY for page in found) == upnp.MAX_PAGES_OF_DEVICE
    assert max(sum(page.host == one.host for page in found) for one in found) == upnp.MAX_PAGES_OF_DEVICE


async def test_devices_that_take_their_time_hold_up_a_search_for_half_a_minute(
    lan: Lan, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    pages = [Page(f"192.168.1.{number}", 80, "/") for number in range(3, 19)]

    async def search(gateway: str, own_ip: str) -> list[Page]:
        return pages

    monkeypatch.setattr(upnp, "search", search)
    lan.devices = {(page.host, page.port): silent for page in pages}
    began = trio.current_time()
    with pytest.raises(MappingRefused, match="within 5 s"):
        await upnp.find_router(GATEWAY, OWN)
    assert trio.current_time() - began == upnp.FIND_S


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(said: bytes) -> None:
    readers: list[Callable[[], object]] = [
        lambda: upnp.page_of_answer(said, GATEWAY),
        lambda: upnp.page_of_answer(found_at("http://192.168.1.1/").replace(b"1.1/", said), GATEWAY),
        lambda: upnp.read_description(said, PAGE),
        lambda: upnp.read_description(description().replace(b"/control", said), PAGE),
        lambda: upnp.read_outcome("AddPortMapping", 200, said, GATEWAY),
        lambda: upnp.read_outcome("AddPortMapping", 500, b"<e><errorCode>" + said + b"</errorCode></e>", GATEWAY),
        lambda: trio.run(ask_one_who_says, said),
        lambda: trio.run(ask_one_who_says, HEAD + said),
    ]
    for read in readers:
        try:
            read()
        except MappingRefused:
            pass


async def ask_one_who_says(answer: bytes) -> None:
    """Ask a device that says these bytes."""
    ours, theirs = memory_stream_pair()
    await theirs.send_all(answer)
    await theirs.send_eof()

    async def connect(host: str, port: int) -> trio.abc.Stream:
        return ours

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "connect", connect)
        await upnp.ask(PAGE, {})


@pytest.mark.parametrize("said", ["", "0.0.0.0", "::1", "5.5.5.5/24", "999.5.5.5", "5.5.5.5 or so", "5" * 5000])
async def test_what_is_no_address_outside_is_a_refusal(said: str, lan: Lan) -> None:
    values = f"<NewExternalIPAddress>{said}</NewExternalIPAddress>"
    lan.devices[GATEWAY, 80] = say(http(f"<e><GetExternalIPAddressResponse/>{values}</e>".encode()))
    with pytest.raises(MappingRefused, match="no address outside"):
        await upnp.UpnpRouter(PAGE, upnp.SERVICES[0], OWN).external_ip()


def mapper_of(told: list[Address | None], changed: trio.Event) -> port_mapping.PortMapper:
    """Return a node's port mapping, which tells of changes."""

    def on_change(address: Address | None) -> None:
        told.append(address)
        changed.set()

    return port_mapping.PortMapper(4001, b"key", on_change, lambda: ROUTE)


async def test_a_device_that_never_ends_its_answer_does_not_keep_the_node_from_stopping(
    lan: Lan, autojump_clock: MockClock
) -> None:
    asked = trio.Event()

    async def answer(request: bytes, stream: trio.abc.Stream) -> None:
        asked.set()
        await trio.sleep_forever()

    lan.devices[GATEWAY, 80] = answer
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mapper_of([], trio.Event()).run)
        await asked.wait()
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() == began


async def test_a_device_that_never_ends_its_answer_is_left_for_the_router_that_comes_after_it(
    lan: Lan, autojump_clock: MockClock
) -> None:
    told, changed = list[Address | None](), trio.Event()
    mapper = mapper_of(told, changed)
    lan.devices[GATEWAY, 80] = HOSTILE["a byte now and then"]
    assert await mapper._map_along(ROUTE) > 0
    assert "within 5 s" in mapper.problem
    lan.devices[GATEWAY, 80] = Router().answer
    assert await mapper._map_along(ROUTE) == 1800
    assert told == [Address("ip4", "5.5.5.5", 4001)]


async def test_a_router_that_falls_silent_holds_up_the_end_of_the_node_for_two_seconds(
    lan: Lan, autojump_clock: MockClock
) -> None:
    changed = trio.Event()
    lan.devices[GATEWAY, 80] = Router().answer
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mapper_of([], changed).run)
        await changed.wait()
        lan.devices[GATEWAY, 80] = silent
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began == pytest.approx(2)


@pytest.mark.parametrize(("port", "lifetime_s", "again_s"), [(7000, 2**32 - 1, 1800), (7000, 0, 60), (0, 3600, 20)])
async def test_whatever_a_router_answers_it_is_asked_again_and_no_port_0_is_told(
    monkeypatch: pytest.MonkeyPatch, port: int, lifetime_s: int, again_s: float
) -> None:
    """A lifetime of 136 years was believed, and so was port 0."""

    async def said(self: PortControl, external_port: int, lifetime_s_: int = 0) -> Mapping:
        return Mapping("PCP", "5.5.5.5", port, lifetime_s)

    monkeypatch.setattr(PortControl, "map", said)
    told: list[Address | None] = []
    mapper = port_mapping.PortMapper(4001, b"key", told.append, lambda: None)
    pause_s = await mapper._map_along(ROUTE)
    assert pause_s == pytest.approx(again_s, rel=0.5)
    assert [address.port for address in told if address is not None] == [port] * bool(port)


class Hesitant(Router):
    """Fails the first time that it is asked to forward a port."""

    failures = 1

    def said(self, request: str) -> bytes:
        if "#AddPortMapping" in request and self.failures:
            self.failures -= 1
            return http(REFUSAL.format(code=501).encode(), "500 Internal Server Error")
        return super().said(request)


async def test_a_router_that_failed_is_not_asked_to_forward_a_port_for_ever(lan: Lan) -> None:
    router = Hesitant()
    lan.devices[GATEWAY, 80] = router.answer
    assert await mapper_of([], trio.Event())._map_along(ROUTE) == 1800
    assert [lifetime_s for _, _, lifetime_s in router.forwarded.values()] == ["3600"]


class SecondNat(Router):
    """Has no public address outside: its provider shares one among customers."""

    def said(self, request: str) -> bytes:
        return super().said(request).replace(b"5.5.5.5", b"10.5.5.5").replace(b"Content-Length", b"X")


async def test_a_mapping_behind_a_second_nat_is_removed_although_it_is_of_no_use(lan: Lan) -> None:
    router, told = SecondNat(), list[Address | None]()
    lan.devices[GATEWAY, 80] = router.answer
    mapper = mapper_of(told, trio.Event())
    await mapper._map_along(ROUTE)
    assert "behind a NAT itself" in mapper.problem
    assert router.forwarded
    await mapper._remove()
    assert (router.forwarded, told) == ({}, [])
