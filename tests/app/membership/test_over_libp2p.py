"""Swarms over real libp2p on loopback: joining, finding by name through the directory, changes, deaths, idle cost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from app.core.span import Span
from app.manifest.importing import hash_source
from app.membership import Membership, QueryService, fetch_manifest, resolve_swarm
from app.swarm.names import SwarmName
from app.swarm.records import sign_record
from app.weights.manifest_store import ManifestStore
from p2p.discovery.seeker import Means
from p2p.identity import Identity
from p2p.network import Libp2pNetwork
from tests.app.swarms import CREATOR
from tests.app.tiny_source import CONFIG, tiny_source
from tests.p2p.nodes import make_network, until

RECORD = sign_record(CREATOR, "attic", "1a2b3c4d" * 8, now_ms=int(time.time() * 1000))


@dataclass
class Node:
    """A real node in a swarm."""

    network: Libp2pNetwork
    swarm: Membership

    def knows(self) -> int:
        """How many it is in contact with."""
        return len(self.swarm.table.present())


@asynccontextmanager
async def real_nodes(count: int, *means: Means) -> AsyncIterator[list[Node]]:
    """Members that each know the first one's address."""
    async with trio.open_nursery() as nursery:
        nodes: list[Node] = []
        for _ in range(count):
            who = Identity.generate()
            network = make_network(*means, identity=who)
            await nursery.start(network.run)
            swarm = Membership(network, who, RECORD, CONFIG.n_blocks)
            nodes.append(Node(network, swarm))
            if len(nodes) > 1:
                first = nodes[0].network
                network.learn(first.peer_id, first.addresses())
                swarm.join_via([first.peer_id])
            await nursery.start(swarm.run)
        yield nodes
        nursery.cancel_scope.cancel()


async def test_members_meet_hear_changes_and_notice_a_crash() -> None:
    async with real_nodes(5) as nodes:
        await until(lambda: all(node.knows() == 4 for node in nodes), 10)
        await until(lambda: all(m.rtt_s is not None for node in nodes for m in node.swarm.members()), 20)
        said = nodes[2].swarm.announce(state="serving", span=Span(0, 2))
        peer = said.peer
        await until(lambda: all(n.swarm.table.number(peer) >= said.sequence for n in nodes if n is not nodes[2]), 5)
        await nodes[4].network.stop()
        await until(lambda: all(n.swarm.table.state(nodes[4].network.peer_id) == "dead" for n in nodes[:4]), 20)


async def test_a_stranger_resolves_the_name_fetches_the_manifest_and_joins(tmp_path: Path) -> None:
    manifest = hash_source(tiny_source(tmp_path / "model")).manifest
    record = sign_record(CREATOR, "tiny", manifest.hash, now_ms=int(time.time() * 1000))
    who, other = Identity.generate(), Identity.generate()
    member, guide, joiner = make_network("dht", identity=who), make_network("dht"), make_network("dht", identity=other)
    async with member.running(), guide.running(), joiner.running(), trio.open_nursery() as nursery:
        member.seek(guide.addresses()[0])
        store = ManifestStore(tmp_path / "cache")
        store.save(manifest)
        swarm = Membership(member, who, record, manifest.config.n_blocks)
        QueryService(member, store).take_part(swarm)
        await until(lambda: bool(member.links()))
        await nursery.start(swarm.run)
        joiner.seek(guide.addresses()[0])  # who is no member and knows no swarm
        await until(lambda: bool(joiner.links()))
        await trio.sleep(1)  # as long as a person takes to type the name
        with trio.fail_after(10):
            found = await resolve_swarm(joiner, SwarmName("tiny"))
            fetched = await fetch_manifest(joiner, found.peers, found.record.model_hash)
            assert fetched == manifest
            joined = Membership(joiner, other, found.record, fetched.config.n_blocks)
            joined.join_via(found.peers)
            await nursery.start(joined.run)
            await joined.joined()
        assert [m.peer for m in joined.members()] == [member.peer_id]
        nursery.cancel_scope.cancel()


@pytest.mark.soak
async def test_twenty_idle_nodes_cost_little(record_property: Callable[[str, object], None]) -> None:
    async with real_nodes(20, "dht") as nodes:
        await until(lambda: all(node.knows() == 19 for node in nodes), 120)
        await trio.sleep(20)
        started_at, used_s = time.monotonic(), time.process_time()
        await trio.sleep(60)
        share = (time.process_time() - used_s) / (time.monotonic() - started_at) / 20
        record_property("idle_cpu_share_per_node", round(share, 4))
        assert share < 0.02
        assert all(node.knows() == 19 for node in nodes)
