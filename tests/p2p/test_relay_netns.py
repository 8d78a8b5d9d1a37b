"""Two nodes behind two NATs find each other through a third, then punch through to a direct link.

The networks are made of network namespaces, which takes root, `ip` and `nft`; without them this is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.p2p.nodes import Process, node_process

KEY = "cd" * 32
# Public addresses, as far as anybody inside can tell; nothing leaves the namespaces.
RELAY, NAT_A, NAT_B = "5.5.5.1", "5.5.5.2", "5.5.5.3"
ANYWHERE = ("--listen", "/ip4/0.0.0.0/tcp/0", "--discovery", "dht")

RULES = """
table ip nat {
  chain out { type nat hook postrouting priority 100; oifname "wan" masquerade; }
  chain in { type filter hook input priority 0; iifname "wan" ct state established,related accept
    iifname "wan" drop
  }
  chain through { type filter hook forward priority 0; iifname "wan" ct state established,related accept
    iifname "wan" drop
  }
}
"""


def command(*words: str, given: str | None = None) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, input=given, timeout=20)


class Internet:
    """A switch with a public host and two NATs on it, each NAT with one host behind."""

    def __init__(self) -> None:
        self._prefix = f"shoal{os.getpid()}"
        self._made: list[str] = []

    def path(self, name: str) -> Path:
        return Path("/run/netns") / f"{self._prefix}{name}"

    def make(self) -> None:
        for name in ("switch", "relay", "nata", "natb", "a", "b"):
            command("ip", "netns", "add", self.path(name).name)
            self._made.append(name)
            self._inside(name, "ip", "link", "set", "lo", "up")
        self._inside("switch", "ip", "link", "add", "bridge", "type", "bridge")
        self._inside("switch", "ip", "link", "set", "bridge", "up")
        for name, ip in (("relay", RELAY), ("nata", NAT_A), ("natb", NAT_B)):
            self._plug(name, "wan", f"{ip}/24")
        for nat, host, network in (("nata", "a", "10.1.0"), ("natb", "b", "10.2.0")):
            self._wire(nat, f"{network}.1/24", host, f"{network}.2/24")
            self._inside(host, "ip", "route", "add", "default", "via", f"{network}.1")
            self._inside(nat, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            self._inside(nat, "nft", "-f", "-", given=RULES)

    def remove(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", self.path(name).name], check=False, capture_output=True)

    def _inside(self, name: str, *words: str, given: str | None = None) -> None:
        command("ip", "netns", "exec", self.path(name).name, *words, given=given)

    def _plug(self, name: str, card: str, ip: str) -> None:
        port = f"to-{name}"
        self._inside("switch", "ip", "link", "add", port, "type", "veth", "peer", "name", card)
        self._inside("switch", "ip", "link", "set", card, "netns", self.path(name).name)
        self._inside("switch", "ip", "link", "set", port, "master", "bridge", "up")
        self._inside(name, "ip", "addr", "add", ip, "dev", card)
        self._inside(name, "ip", "link", "set", card, "up")

    def _wire(self, nat: str, nat_ip: str, host: str, host_ip: str) -> None:
        self._inside(nat, "ip", "link", "add", "lan", "type", "veth", "peer", "name", "eth")
        self._inside(nat, "ip", "link", "set", "eth", "netns", self.path(host).name)
        for name, card, ip in ((nat, "lan", nat_ip), (host, "eth", host_ip)):
            self._inside(name, "ip", "addr", "add", ip, "dev", card)
            self._inside(name, "ip", "link", "set", card, "up")


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    missing = [tool for tool in ("ip", "nft", "sysctl") if shutil.which(tool) is None]
    if missing or not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip(f"network namespaces need root and {', '.join(missing) or 'ip and nft'}")
    made = Internet()
    try:
        made.make()
    except (subprocess.SubprocessError, OSError) as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.remove()


async def ask_until(node: Process, question: str, wanted: str, within_s: float) -> str:
    """Ask until the answer contains `wanted`."""
    answer = ""
    with trio.move_on_after(within_s):
        while wanted not in answer:
            answer = await node.ask(question)
            if wanted not in answer:
                await trio.sleep(0.1)
    assert wanted in answer, f"{question}: {answer!r} does not contain {wanted!r}"
    return answer


async def test_two_nodes_behind_nats_meet_through_a_relay_and_then_directly(internet: Internet) -> None:
    async with node_process("--netns", str(internet.path("relay")), *ANYWHERE) as relay:
        assert RELAY in relay.addresses[0]
        seek = (*ANYWHERE, "--peer", relay.addresses[0])
        async with (
            node_process("--netns", str(internet.path("a")), *seek) as a,
            node_process("--netns", str(internet.path("b")), *seek) as b,
        ):
            # The public node finds out by itself that it is reachable and offers to relay; the others are not.
            await ask_until(relay, "reach", "verified relay=True", 20)
            await ask_until(a, "reach", "unverified relay=False", 20)
            relayed = await ask_until(a, "addresses", "p2p-circuit", 20)
            assert relay.peer_id in relayed
            assert await a.ask(f"provide {KEY}") == "provided"
            assert await b.ask(f"find {KEY}") == a.peer_id
            assert await b.ask(f"echo {a.peer_id} hello") == "hello"
            await ask_until(b, "kinds", f"{a.peer_id}=direct", 30)
            await ask_until(a, "kinds", f"{b.peer_id}=direct", 30)
            # The direct link does not need the relay any more.
            await relay.quit()
            assert await b.ask(f"echo {a.peer_id} directly") == "directly"
