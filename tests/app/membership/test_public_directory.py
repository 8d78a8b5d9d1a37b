"""Two nodes that share nothing but a swarm's name meet through a directory of other libp2p nodes alone.

Each is in a network namespace of its own, which takes root and `ip`; without them this is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import trio

from p2p.dht.public_directory import PROTOCOL
from tests.p2p.foreign_directory import directory
from tests.p2p.namespaces import Namespaces, made
from tests.p2p.nodes import node_process

# Public addresses, as far as anybody inside can tell; nothing leaves the namespaces.
DIRECTORY, A, B = "5.5.1.1", "5.5.2.1", "5.5.3.1"


def make_internet(networks: Namespaces) -> None:
    networks.add_switch()
    for name, ip in (("dir", DIRECTORY), ("a", A), ("b", B)):
        networks.add(name)
        networks.plug(name, "wan", f"{ip}/16")


@pytest.fixture(scope="module")
def internet() -> Iterator[Namespaces]:
    with made("shoalpub", make_internet) as networks:
        yield networks


@pytest.mark.parametrize("kind", ["js", pytest.param("py", marks=pytest.mark.soak)])
async def test_two_nodes_meet_by_name_through_foreign_nodes_alone(
    kind: str, internet: Namespaces, record_property: Callable[[str, object], None]
) -> None:
    async with directory(kind, PROTOCOL, 4, inside=internet.name("dir"), ip=DIRECTORY) as theirs:
        anywhere = ("--listen", "/ip4/0.0.0.0/tcp/0", "--discovery", "public", "--public-entry", theirs.addresses[0])
        async with (
            node_process("--netns", str(internet.path("a")), *anywhere) as a,
            node_process("--netns", str(internet.path("b")), *anywhere) as b,
        ):
            assert await a.ask("found by-name-alone") == "founded"
            with trio.fail_after(20):
                while "published=0" in await a.ask("public"):  # noqa: ASYNC110
                    await trio.sleep(0.1)
            started_at = trio.current_time()
            assert await b.ask("join by-name-alone") == a.peer_id
            took_s = trio.current_time() - started_at
            record_property("met_after_s", round(took_s, 2))
            for name, node in (("a", a), ("b", b)):
                record_property(name, await node.ask("public"))
                record_property(f"{name}_bytes_on_the_wire", internet.carried_bytes(name, "wan"))
            assert took_s < 10
