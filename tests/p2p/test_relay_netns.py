"""Two nodes behind two NATs find each other through a third, then punch through to a direct link.

The networks are made of network namespaces, which takes root, `ip` and `nft`; without them this is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from tests.p2p.namespaces import Namespaces, made
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


def make_internet(networks: Namespaces) -> None:
    """A switch with a public host and two NATs on it, each NAT with one host behind."""
    networks.add_switch()
    networks.add("relay", "nata", "natb", "a", "b")
    for name, ip in (("relay", RELAY), ("nata", NAT_A), ("natb", NAT_B)):
        networks.plug(name, "wan", f"{ip}/24")
    for nat, host, network in (("nata", "a", "10.1.0"), ("natb", "b", "10.2.0")):
        networks.wire(nat, f"{network}.1/24", host, f"{network}.2/24")
        networks.inside(nat, "nft", "-f", "-", given=RULES)


@pytest.fixture(scope="module")
def internet() -> Iterator[Namespaces]:
    with made("shoal", make_internet, "nft") as networks:
        yield networks


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


async def test_two_nodes_behind_nats_meet_through_a_relay_and_then_directly(internet: Namespaces) -> None:
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
            assert await b.ask(f"count {a.peer_id}") == "counting"  # a stream that begins through the relay
            await ask_until(b, "kinds", f"{a.peer_id}=direct", 30)
            await ask_until(a, "kinds", f"{b.peer_id}=direct", 30)
            await ask_until(b, f"carrier {a.peer_id}", "direct", 10)
            # The direct link does not need the relay any more, nor does the stream: no number is lost or doubled.
            await relay.quit()
            assert await b.ask(f"echo {a.peer_id} directly") == "directly"
            count = int(await b.ask("count"))
            with trio.fail_after(20):
                while int(await b.ask("count")) < count + 10:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            counted = await b.ask("counted")
            assert not counted.startswith("failed"), counted
