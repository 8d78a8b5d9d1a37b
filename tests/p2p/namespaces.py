"""Networks made of network namespaces: hosts on a switch, and hosts behind routers; nothing leaves the machine.

It takes root and `ip`; `made` skips the test where that is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def command(*words: str, given: str | None = None) -> None:
    """Run a command, and fail if it does."""
    subprocess.run(words, check=True, capture_output=True, text=True, input=given, timeout=20)


class Namespaces:
    """Some network namespaces, one of which may be a switch that others are plugged into."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}{os.getpid()}"
        self._made: list[str] = []

    def name(self, name: str) -> str:
        """The whole name of a namespace, as `ip netns` knows it."""
        return f"{self._prefix}{name}"

    def path(self, name: str) -> Path:
        """The file by which a process enters a namespace."""
        return Path("/run/netns") / self.name(name)

    def add(self, *names: str) -> None:
        """Make namespaces, each with nothing but its loopback."""
        for name in names:
            command("ip", "netns", "add", self.name(name))
            self._made.append(name)
            self.inside(name, "ip", "link", "set", "lo", "up")

    def add_switch(self) -> None:
        """Make the namespace of the switch."""
        self.add("switch")
        self.inside("switch", "ip", "link", "add", "bridge", "type", "bridge")
        self.inside("switch", "ip", "link", "set", "bridge", "up")

    def inside(self, name: str, *words: str, given: str | None = None) -> None:
        """Run a command inside a namespace."""
        command("ip", "netns", "exec", self.name(name), *words, given=given)

    def plug(self, name: str, card: str, ip: str) -> None:
        """Connect a namespace to the switch through a network card of this name and address."""
        port = f"to-{name}"
        self.inside("switch", "ip", "link", "add", port, "type", "veth", "peer", "name", card)
        self.inside("switch", "ip", "link", "set", card, "netns", self.name(name))
        self.inside("switch", "ip", "link", "set", port, "master", "bridge", "up")
        self.inside(name, "ip", "addr", "add", ip, "dev", card)
        self.inside(name, "ip", "link", "set", card, "up")

    def plug_far(self, name: str, ip: str, *, up: str, down: str) -> None:
        """Connect a namespace to the switch as if it were far away: no network in common, and so fast up and down.

        Speeds are as `tc` writes them. What does not fit waits for up to 200 ms, as in a router.
        """
        self.plug(name, "eth0", f"{ip}/32")
        self.inside(name, "ip", "route", "add", f"{ip.partition('.')[0]}.0.0.0/8", "dev", "eth0")
        for where, card, speed in ((name, "eth0", up), ("switch", f"to-{name}", down)):
            shape = ("tbf", "rate", speed, "burst", "20kb", "latency", "200ms")
            self.inside(where, "tc", "qdisc", "add", "dev", card, "root", *shape)

    def wire(self, router: str, router_ip: str, host: str, host_ip: str) -> None:
        """Put a host behind a router: the card `lan` of the router leads to the card `eth` of the host."""
        self.inside(router, "ip", "link", "add", "lan", "type", "veth", "peer", "name", "eth")
        self.inside(router, "ip", "link", "set", "eth", "netns", self.name(host))
        for name, card, ip in ((router, "lan", router_ip), (host, "eth", host_ip)):
            self.inside(name, "ip", "addr", "add", ip, "dev", card)
            self.inside(name, "ip", "link", "set", card, "up")
        self.inside(host, "ip", "route", "add", "default", "via", router_ip.partition("/")[0])
        self.inside(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")

    def carried_bytes(self, name: str, card: str) -> int:
        """Bytes that a card has received and sent."""
        counters = Path(f"/sys/class/net/{card}/statistics")
        words = ["ip", "netns", "exec", self.name(name), "cat", str(counters / "rx_bytes"), str(counters / "tx_bytes")]
        said = subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout
        return sum(map(int, said.split()))

    def remove(self) -> None:
        """Remove all namespaces."""
        for name in self._made:
            subprocess.run(["ip", "netns", "del", self.name(name)], check=False, capture_output=True)


@contextmanager
def made(prefix: str, make: Callable[[Namespaces], None], *tools: str) -> Iterator[Namespaces]:
    """Namespaces that `make` has arranged; removed at the end. Skips the test where they cannot be made."""
    missing = [tool for tool in ("ip", "sysctl", *tools) if shutil.which(tool) is None]
    if missing or not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip(f"network namespaces need root and {', '.join(missing) or 'ip'}")
    networks = Namespaces(prefix)
    try:
        try:
            make(networks)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield networks
    finally:
        networks.remove()
