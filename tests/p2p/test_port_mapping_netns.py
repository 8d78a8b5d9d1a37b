"""A node behind a real router (`miniupnpd` in a network namespace) opens its port there and closes it on exit.

It takes root, `ip`, `nft` and `miniupnpd`; without them this is skipped.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.p2p.namespaces import Namespaces, made
from tests.p2p.nodes import node_process
from tests.p2p.test_relay_netns import ask_until

# Public addresses, as far as anybody inside can tell; nothing leaves the namespaces.
ROUTER, OUTSIDE, PORT = "5.5.1.1", "5.5.1.2", 7464
RULES = """
table inet filter {
  chain forward { type filter hook forward priority 0; policy drop;
    iifname "lan" accept
    ct state established,related accept
    jump miniupnpd
  }
  chain miniupnpd { }
  chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
  chain postrouting { type nat hook postrouting priority 100; jump postrouting_miniupnpd; oifname "wan" masquerade; }
  chain prerouting_miniupnpd { }
  chain postrouting_miniupnpd { }
}
"""
CONFIG = """
ext_ifname=wan
listening_ip=lan
enable_upnp={upnp}
enable_natpmp={pcp}
secure_mode=yes
min_lifetime=120
uuid=2f3c6f2e-0000-4000-8000-000000000001
upnp_table_name=filter
upnp_nat_table_name=filter
upnp_forward_chain=miniupnpd
upnp_nat_chain=prerouting_miniupnpd
upnp_nat_postrouting_chain=postrouting_miniupnpd
allow 1024-65535 192.168.77.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


def make_home(networks: Namespaces) -> None:
    """A home router with one machine behind it, and one machine outside."""
    networks.add_switch()
    networks.add("router", "home", "out")
    networks.plug("router", "wan", f"{ROUTER}/24")
    networks.plug("out", "wan", f"{OUTSIDE}/24")
    networks.wire("router", "192.168.77.1/24", "home", "192.168.77.2/24")
    networks.inside("router", "nft", "-f", "-", given=RULES)


@pytest.fixture(scope="module")
def home() -> Iterator[Namespaces]:
    with made("shoalport", make_home, "nft", "miniupnpd") as networks:
        yield networks


@asynccontextmanager
async def router_service(home: Namespaces, folder: Path, **switches: str) -> AsyncIterator[None]:
    """The router's service for port mappings."""
    config = folder / "miniupnpd.conf"
    config.write_text(CONFIG.format(**switches))
    words = [
        "ip",
        "netns",
        "exec",
        home.name("router"),
        "miniupnpd",
        "-d",
        "-f",
        str(config),
        "-P",
        str(folder / "pid"),
    ]
    run = partial(trio.run_process, words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    async with trio.open_nursery() as nursery:
        process = await nursery.start(run)
        try:
            said = b""
            with trio.fail_after(10):
                while b"istening" not in said:
                    chunk = await process.stderr.receive_some()
                    assert chunk, f"miniupnpd ended: {said.decode()}"
                    said += chunk
            nursery.start_soon(drain, process.stderr)
            yield
        finally:
            process.kill()
            nursery.cancel_scope.cancel()


async def drain(stream: trio.abc.ReceiveStream) -> None:
    """Read and drop everything, so that the writer never waits."""
    while await stream.receive_some():
        pass


def forwards(home: Namespaces) -> bool:
    """True if the router forwards the port to the machine at home."""
    words = ["ip", "netns", "exec", home.name("router"), "nft", "list", "ruleset"]
    rules = subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout
    return "dnat" in rules and "192.168.77.2" in rules


@pytest.mark.parametrize(("method", "switches"), [("UPnP", ("yes", "no")), ("PCP", ("no", "yes"))])
async def test_the_port_is_opened_found_from_outside_and_gone_after_exit(
    method: str, switches: tuple[str, str], home: Namespaces, tmp_path: Path
) -> None:
    async with router_service(home, tmp_path, upnp=switches[0], pcp=switches[1]):
        listen = ("--listen", f"/ip4/0.0.0.0/tcp/{PORT}", "--map-port")
        async with (
            node_process("--netns", str(home.path("home")), *listen) as inside,
            node_process("--netns", str(home.path("out")), "--listen", "/ip4/0.0.0.0/tcp/0") as outside,
        ):
            said = await ask_until(inside, "mapping", ROUTER, 30)
            assert said == f"{method} {ROUTER}:{PORT}"
            assert forwards(home)
            [address] = [text for text in (await inside.ask("addresses")).split() if ROUTER in text]
            await outside.ask(f"learn {inside.peer_id} {address}")
            assert await outside.ask(f"echo {inside.peer_id} hello") == "hello"
            await ask_until(inside, "reach", "verified", 20)
            await inside.quit()
            assert not forwards(home)
            assert (await outside.ask(f"echo {inside.peer_id} anybody")).startswith("failed")
