"""A machine that moves to another network finds its peers again, and they find it, before the heartbeat notices.

So do machines that had no network at first, and such that all move at once, by mDNS: nobody's old address is of use.
Nor does somebody on their network who makes up names keep them apart.

The network is made of network namespaces, which takes root and `ip`; without them this is skipped.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from p2p.host.heartbeat import SILENCE_S
from tests.p2p.namespaces import Namespaces, made
from tests.p2p.nodes import node_process
from tests.p2p.test_discovery import linked
from tests.p2p.test_relay_netns import ask_until

PATIENCE_S = 60.0
STAYS, BEFORE, AFTER = "5.5.4.1", "5.5.4.2", "5.5.4.77"


def make_network(networks: Namespaces) -> None:
    """Two machines on a switch."""
    networks.add_switch()
    networks.add("moves", "stays")
    networks.plug("moves", "wan", f"{BEFORE}/24")
    networks.plug("stays", "wan", f"{STAYS}/24")


@pytest.fixture
def network() -> Iterator[Namespaces]:
    with made("shoalmove", make_network) as networks:
        yield networks


async def test_calls_in_both_directions_work_again_soon_after_the_address_changed(network: Namespaces) -> None:
    listen = ("--listen", "/ip4/0.0.0.0/tcp/0")
    async with (
        node_process("--netns", str(network.path("stays")), *listen) as stays,
        node_process("--netns", str(network.path("moves")), *listen) as moves,
    ):
        await moves.ask(f"learn {stays.peer_id} {stays.addresses[0]}")
        assert await moves.ask(f"count {stays.peer_id}") == "counting"
        await ask_until(stays, f"echo {moves.peer_id} hello", "hello", 10)
        started_at = trio.current_time()
        network.inside("moves", "ip", "addr", "del", f"{BEFORE}/24", "dev", "wan")
        network.inside("moves", "ip", "addr", "add", f"{AFTER}/24", "dev", "wan")
        assert (await moves.ask("broken")).startswith("failed")  # a stream ends soon: its reply can go on elsewhere
        await ask_until(moves, f"echo {stays.peer_id} again", "again", SILENCE_S)
        await ask_until(stays, f"echo {moves.peer_id} again", "again", SILENCE_S)
        assert trio.current_time() - started_at < SILENCE_S
        assert AFTER in await moves.ask("addresses")


def make_lonely_machines(networks: Namespaces) -> None:
    """A switch, and two machines that are not plugged in yet."""
    networks.add_switch()
    networks.add("one", "two")


@pytest.fixture
def unplugged() -> Iterator[Namespaces]:
    with made("shoalmdns", make_lonely_machines) as networks:
        yield networks


async def test_machines_whose_networks_come_late_or_all_change_find_each_other_by_mdns(unplugged: Namespaces) -> None:
    """As after a power cut: nodes start before their machines have addresses. Then the router gives out others."""
    flags = ("--listen", "/ip4/0.0.0.0/tcp/0", "--discovery", "mdns")
    async with (
        node_process("--netns", str(unplugged.path("one")), *flags) as one,
        node_process("--netns", str(unplugged.path("two")), *flags) as two,
    ):
        unplugged.plug("one", "lan", "10.77.1.1/24")
        unplugged.plug("two", "lan", "10.77.1.2/24")
        await linked(one, two.peer_id, PATIENCE_S)
        for name, before, after in (("one", "10.77.1.1", "10.77.2.3"), ("two", "10.77.1.2", "10.77.2.4")):
            unplugged.inside(name, "ip", "addr", "add", f"{after}/24", "dev", "lan")
            unplugged.inside(name, "ip", "addr", "del", f"{before}/24", "dev", "lan")
        await ask_until(one, f"echo {two.peer_id} again", "again", PATIENCE_S)


FLOOD = """
import os, socket, struct, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("10.77.1.3"))
service = b"\\6_shoal\\4_udp\\5local\\0"
print("flooding", flush=True)
while True:
    names = [bytes([12]) + os.urandom(6).hex().encode() + b"\\xc0\\x0c" for _ in range(50)]
    records = [b"\\xc0\\x0c" + struct.pack("!HHIH", 12, 1, 4500, len(name)) + name for name in names]
    head = struct.pack("!6H", 0, 0x8400, 1, len(records), 0, 0) + service + struct.pack("!HH", 12, 1)
    sock.sendto(head + b"".join(records), ("224.0.0.251", 5353))
    time.sleep(0.001)
"""


@contextmanager
def flooded(networks: Namespaces, name: str) -> Iterator[None]:
    """Let a machine send made-up names to its network until the end."""
    words = ["ip", "netns", "exec", networks.name(name), sys.executable, "-c", FLOOD]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as flood:
        try:
            assert flood.stdout is not None
            assert flood.stdout.readline()
            yield
            assert flood.poll() is None
        finally:
            flood.kill()


async def test_a_flood_of_made_up_mdns_names_hides_nobody(unplugged: Namespaces) -> None:
    unplugged.add("noisy")
    for number, name in enumerate(("one", "two", "noisy"), 1):
        unplugged.plug(name, "lan", f"10.77.1.{number}/24")
    flags = ("--listen", "/ip4/0.0.0.0/tcp/0", "--discovery", "mdns")
    with flooded(unplugged, "noisy"):
        async with (
            node_process("--netns", str(unplugged.path("one")), *flags) as one,
            node_process("--netns", str(unplugged.path("two")), *flags) as two,
        ):
            await linked(one, two.peer_id)
