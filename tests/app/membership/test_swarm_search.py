"""Finding a swarm by name, and its manifest by hash: conflicts, pins, private swarms, liars and dead providers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.core.errors import NameConflict, UnknownSwarm
from app.manifest.importing import hash_source
from app.manifest.manifest import Manifest
from app.membership import QueryService, fetch_manifest, resolve_swarm, value_check, wire
from app.swarm.names import SwarmName
from app.swarm.records import SwarmRecord, sign_record
from app.swarm.rendezvous import SHARDS, keys_to_provide, record_key, rendezvous_key
from app.weights.manifest_store import ManifestStore
from p2p.addresses import Address
from p2p.dht.directory import Directory
from p2p.dht.wire import Contact, Message, provider_key
from p2p.errors import Refused
from p2p.identity import Identity
from p2p.memory.fabric import MemoryNode
from tests.app.swarms import CREATOR, RECORD, START_S, SimNode, identity, open_sim, wall_clock
from tests.app.tiny_source import tiny_source

ATTIC = SwarmName("attic")
OTHER_MODEL = "9f8e7d6c" * 8
OTHER = sign_record(Identity(b"o" * 32), "attic", OTHER_MODEL, now_ms=int(START_S * 1000))


class Shelf:
    """Manifests in memory."""

    def __init__(self, *manifests: Manifest) -> None:
        self._by_hash = {manifest.hash: manifest for manifest in manifests}

    def load(self, model_hash: str) -> Manifest | None:
        return self._by_hash.get(model_hash)


def serve(node: SimNode | MemoryNode, *records: SwarmRecord, gated: bool = False) -> QueryService:
    service = QueryService(node.network if isinstance(node, SimNode) else node, Shelf(), gated=gated)
    for record in records:
        service.know(record)
    if isinstance(node, SimNode):
        service.take_part(node.swarm)
    return service


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return hash_source(tiny_source(tmp_path_factory.mktemp("tiny"))).manifest


# --- names -----------------------------------------------------------------------------------------------------------


async def test_a_bare_name_is_resolved_by_a_connected_peer_that_names_members(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        nodes = await sim.grow(5)
        serve(nodes[0])
        asker = sim.fabric.node("asker")
        sim.fabric.directory.partition({"asker": 1}, -1.0)  # the directory is of no help
        await sim.fabric.dial(asker, nodes[0].peer)
        found = await resolve_swarm(asker, ATTIC, wall_clock=wall_clock)
        assert found.record == RECORD
        assert set(found.peers) == {node.peer for node in nodes}
        joiner = sim.add(50, found.peers)
        await sim.until(lambda: len(joiner.knows()) == 5, 1.0)


async def test_it_is_resolved_through_the_directory_alone(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        for node in await sim.grow(5):
            serve(node)
        await trio.sleep(2)
        found = await resolve_swarm(sim.fabric.node("asker"), ATTIC, wall_clock=wall_clock)
        assert found.record == RECORD
        assert found.peers


async def test_two_swarms_of_one_name_are_a_conflict_and_a_pin_settles_it(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        a, b, asker = (sim.fabric.node(name) for name in ("a", "b", "asker"))
        serve(a, RECORD)
        serve(b, OTHER)
        with pytest.raises(NameConflict) as conflict:
            await resolve_swarm(asker, ATTIC, via=["a", "b"], wall_clock=wall_clock)
        assert str(RECORD) in str(conflict.value)
        assert str(OTHER) in str(conflict.value)
        pinned = SwarmName("attic", OTHER_MODEL[:20])
        assert (await resolve_swarm(asker, pinned, via=["a", "b"], wall_clock=wall_clock)).record == OTHER


async def test_a_name_that_nobody_knows_is_refused_within_five_seconds(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        asker = sim.fabric.node("asker")
        started_at = trio.current_time()
        with pytest.raises(UnknownSwarm, match="invite"):
            await resolve_swarm(asker, ATTIC, via=["nobody"], wall_clock=wall_clock)
        assert trio.current_time() - started_at <= 5.0


async def test_liars_are_left_aside(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        asker, liar, honest = (sim.fabric.node(name) for name in ("asker", "liar", "honest"))
        serve(honest, RECORD)
        another = sign_record(CREATOR, "cellar", OTHER_MODEL, now_ms=int(START_S * 1000)).raw
        forged = bytearray(OTHER.raw)
        forged[-1] ^= 1
        answers = [b"garbage", wire.pack([bytes(forged), another, b"junk"]), bytes(200_000)]

        async def lie(peer: str, body: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            return answers.pop()

        liar.serve(wire.FIND, lie)
        while answers:
            found = await resolve_swarm(asker, ATTIC, via=["liar", "honest"], wall_clock=wall_clock)
            assert (found.record, found.peers) == (RECORD, ("honest",))


async def test_a_private_swarm_is_spoken_of_behind_its_secret_only(autojump_clock: MockClock) -> None:
    secret = b"s" * 32
    record = sign_record(CREATOR, "vault", RECORD.model_hash, now_ms=int(START_S * 1000), private=True)
    async with open_sim() as sim:
        outside, inside, asker = (sim.fabric.node(name) for name in ("outside", "inside", "asker"))
        serve(outside, record)
        with pytest.raises(UnknownSwarm):
            await resolve_swarm(asker, SwarmName("vault"), via=["outside"], wall_clock=wall_clock)
        serve(inside, record, gated=True)
        for key in keys_to_provide("vault", "inside", wall_clock(), secret):
            await inside.provide(key)
        with pytest.raises(UnknownSwarm):
            await resolve_swarm(asker, SwarmName("vault"), wall_clock=wall_clock)
        found = await resolve_swarm(asker, SwarmName("vault"), secret=secret, wall_clock=wall_clock)
        assert (found.record, found.peers) == (record, ("inside",))


def test_the_directory_keeps_records_under_their_own_keys_alone() -> None:
    secret = b"s" * 32
    is_valid, with_secret = value_check(wall_clock=lambda: START_S), value_check(secret, lambda: START_S)
    for pin in (None, RECORD.model_hash):
        assert is_valid(record_key("attic", pin), RECORD.raw)
        assert not is_valid(record_key("attic", pin, secret), RECORD.raw)
        assert with_secret(record_key("attic", pin, secret), RECORD.raw)
    assert not is_valid(record_key("attic", OTHER_MODEL), RECORD.raw)
    assert not is_valid(record_key("cellar"), RECORD.raw)
    assert not is_valid(record_key("attic"), b"junk")


async def test_the_oldest_record_of_a_swarm_is_the_one_that_is_told(autojump_clock: MockClock) -> None:
    younger = sign_record(Identity(b"y" * 32), "attic", RECORD.model_hash, now_ms=int(START_S * 1000) + 5)
    async with open_sim() as sim:
        serve(sim.fabric.node("a"), younger, RECORD, younger)
        asker = sim.fabric.node("asker")
        assert (await resolve_swarm(asker, ATTIC, via=["a"], wall_clock=wall_clock)).record == RECORD


# --- manifests -------------------------------------------------------------------------------------------------------


async def test_a_manifest_comes_from_whoever_has_it_and_lies_are_seen(
    autojump_clock: MockClock, manifest: Manifest
) -> None:
    async with open_sim() as sim:
        liar, honest, asker = (sim.fabric.node(name) for name in ("liar", "honest", "asker"))
        sim.fabric.node("frozen")

        async def lie(peer: str, body: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            return manifest.raw[:-1] + b" "

        liar.serve(wire.MANIFEST, lie)
        serve(honest).keep(manifest)
        sim.fabric.freeze("frozen")
        peers = ["nobody", "liar", "frozen", "honest"]
        with trio.fail_after(5):
            fetched = await fetch_manifest(asker, peers, manifest.hash)
        assert fetched == manifest
        with pytest.raises(UnknownSwarm, match=manifest.hash[:8]):
            await fetch_manifest(asker, ["liar", "nobody"], manifest.hash)


async def test_a_manifest_is_read_from_disk_and_greed_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    store = ManifestStore(tmp_path)
    store.save(manifest)
    async with open_sim() as sim:
        node, asker = sim.fabric.node("node"), sim.fabric.node("asker")
        QueryService(node, store)
        assert await fetch_manifest(asker, ["node"], manifest.hash) == manifest
        with pytest.raises(UnknownSwarm):
            await fetch_manifest(asker, ["node"], "0" * 64)

        async def ask() -> None:
            for _ in range(20):
                await asker.call("node", wire.MANIFEST, bytes.fromhex(manifest.hash), timeout_s=5)

        with pytest.raises(Refused, match="too many manifests"):
            await ask()


# --- dead providers --------------------------------------------------------------------------------------------------

PLACE = Address("ip4", "10.0.0.1", 7464)


class Surroundings:
    def __init__(self, node: MemoryNode) -> None:
        self._node = node

    def addresses(self) -> Sequence[Address]:
        return [PLACE.of(self._node.peer_id)]

    def addresses_of(self, peer: str) -> Sequence[Address]:
        return [PLACE.of(peer)]

    def network_of(self, peer: str) -> str | None:
        return None

    def own_record(self) -> bytes:
        return b""

    def record_of(self, peer: str) -> bytes:
        return b""

    def learn(self, contact: Contact) -> None: ...

    def is_connected(self, peer: str) -> bool:
        return False  # nobody helps by knowing who is alive

    def is_server(self, peer: str) -> bool:
        return True


def with_directory(node: MemoryNode) -> Directory:
    """Give a node the real directory in the place of the simulated one."""

    async def ask(peer: str, request: Message, timeout_s: float) -> bytes:
        return await node.call(peer, "kad", request.encode(), timeout_s=timeout_s)

    async def provide(key: bytes) -> None:
        await directory.provide(key)

    directory = Directory(node.peer_id, ask, Surroundings(node))
    node.serve("kad", directory.handle)
    node.provide = provide  # type: ignore[method-assign]
    node.find_providers = directory.find_providers  # type: ignore[method-assign]
    return directory


async def test_a_thousand_dead_providers_do_not_hide_the_living(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        others = [sim.fabric.node(identity(1000 + number).peer_id) for number in range(6)]
        directories = [with_directory(node) for node in others]
        dead = [identity(5000 + number).peer_id for number in range(1000)]
        for peer in dead[::5]:  # every fifth swallows what it is sent, the others refuse it
            sim.fabric.node(peer)
            sim.fabric.freeze(peer)
        hour = int(wall_clock() // 3600)
        keys = [rendezvous_key("attic", at, shard) for at in (hour, hour + 1) for shard in range(SHARDS)]

        def add(number: int, via: Sequence[MemoryNode]) -> SimNode:
            node = sim.add(number)
            directory = with_directory(node.network)
            directories.append(directory)
            for known in via:
                directory.saw(known.peer_id)
            return node

        members = [add(number, others) for number in range(5)]
        await sim.until(lambda: all(len(node.swarm.table.present()) == 4 for node in members), 30)
        for number, peer in enumerate(dead):  # now, fresher than all the living
            for directory in directories:
                for key in keys[number % SHARDS :: SHARDS]:
                    directory.providers.add(provider_key(key), Contact(peer, (PLACE.of(peer),)), trio.current_time())
        joiner = add(50, others[:1])
        took_s = await sim.until(lambda: len(joiner.swarm.table.present()) == 5, 5.0)
        assert took_s <= 5.0
