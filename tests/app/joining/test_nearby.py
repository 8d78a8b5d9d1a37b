"""Swarms of neighbours: what a node that is in none learns of them, and from whom it learns nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from app.core.pieces import at_once
from app.core.span import Span
from app.joining.nearby import MAX_SWARMS_TOLD, ExpectedSpeed, NearbySwarms, expectation_of
from app.manifest.importing import hash_source
from app.manifest.manifest import Manifest
from app.membership import QueryService, wire
from app.routing.cost import HOP_S, UNKNOWN_LINK_S
from app.routing.estimates import link_seconds
from app.swarm.records import Announcement, sign_record
from p2p.errors import Refused
from tests.app.swarms import CREATOR, START_S, SimNode, open_sim, wall_clock
from tests.app.tiny_source import tiny_source

NOW_MS = int(START_S * 1000)


class NoManifests:
    """Nothing on the disk."""

    def load(self, model_hash: str) -> Manifest | None:
        return None


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return hash_source(tiny_source(tmp_path_factory.mktemp("tiny"))).manifest


def serve(node: SimNode, *manifests: Manifest) -> None:
    service = QueryService(node.network, NoManifests())
    service.take_part(node.swarm)
    for manifest in manifests:
        service.keep(manifest)


async def test_a_neighbours_swarm_is_found_with_its_members_and_its_model(
    autojump_clock: MockClock, manifest: Manifest
) -> None:
    record = sign_record(CREATOR, "pond", manifest.hash, now_ms=NOW_MS)
    async with open_sim(record=record) as sim:
        nodes = await sim.grow(3)
        for node in nodes:
            serve(node, manifest)
        nodes[0].swarm.announce(  # all of it, at ten tokens a second
            state="serving", span=Span(0, manifest.config.n_blocks), decode_tokens_per_s=10.0, kv_free_tokens=10_000
        )
        await trio.sleep(2)
        looker = sim.fabric.node("looker")
        around = NearbySwarms(wall_clock)
        assert await around.look(looker) == []
        await sim.fabric.dial(looker, nodes[1].peer)
        (found,) = await around.look(looker)
        assert found.record == record
        assert {member.peer for member in found.members} == {node.peer for node in nodes}
        assert found.manifest == manifest
        assert found.expectation.token_s == pytest.approx(0.1 + HOP_S + 2 * UNKNOWN_LINK_S)


async def test_a_private_swarm_is_not_spoken_of(autojump_clock: MockClock, manifest: Manifest) -> None:
    record = sign_record(CREATOR, "cellar", manifest.hash, now_ms=NOW_MS, private=True)
    async with open_sim(record=record) as sim:
        (node,) = await sim.grow(1)
        serve(node, manifest)
        looker = sim.fabric.node("looker")
        await sim.fabric.dial(looker, node.peer)
        assert await NearbySwarms(wall_clock).look(looker) == []


async def test_a_swarm_whose_manifest_nobody_sends_has_no_figures(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        (node,) = await sim.grow(1)
        serve(node)
        looker = sim.fabric.node("looker")
        await sim.fabric.dial(looker, node.peer)
        (found,) = await NearbySwarms(wall_clock).look(looker)
        assert (found.manifest, found.expectation) == (None, ExpectedSpeed())


async def test_a_strangers_long_manifest_is_not_read(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one of 4 MiB takes a second, and a look around may find eight."""
    long = b'{"kind":"shoal-manifest","version":1,"x":[' + b'{"a":{"b":{}}},' * 250_000 + b"0]}"
    record = sign_record(CREATOR, "pond", hashlib.sha256(long).hexdigest(), now_ms=NOW_MS)
    read: list[bytes] = []
    monkeypatch.setattr(Manifest, "from_bytes", read.append)

    async def find(peer: str, body: bytes) -> bytes:
        return wire.pack([record.raw])

    async def send(peer: str, body: bytes) -> bytes:
        return long

    async with open_sim() as sim:
        looker, stranger = sim.fabric.node("looker"), sim.fabric.node("stranger")
        stranger.serve(wire.FIND, find)
        stranger.serve(wire.MANIFEST, send)
        await sim.fabric.dial(looker, "stranger")
        (found,) = await NearbySwarms(wall_clock).look(looker)
    assert (found.record, found.manifest, read) == (record, None, [])


async def test_liars_and_the_silent_cost_little(autojump_clock: MockClock) -> None:
    many = [sign_record(CREATOR, f"name-{n}", "ab" * 32, now_ms=NOW_MS).raw for n in range(9 * MAX_SWARMS_TOLD)]

    async def lie(peer: str, body: bytes) -> bytes:
        return wire.pack(many)

    async def babble(peer: str, body: bytes) -> bytes:
        return b"\xff" * 100

    async def sleep(peer: str, body: bytes) -> bytes:
        await trio.sleep_forever()
        return b""

    async with open_sim() as sim:
        looker = sim.fabric.node("looker")
        for name, handler in (("liar", lie), ("babbler", babble), ("sleeper", sleep)):
            node = sim.fabric.node(name)
            node.serve(wire.FIND, handler)
            node.serve(wire.MANIFEST, sleep)
            await sim.fabric.dial(looker, name)
        began = trio.current_time()
        found = await NearbySwarms(wall_clock).look(looker)
        assert len(found) == MAX_SWARMS_TOLD
        assert trio.current_time() - began < 5.0


async def test_who_asks_too_often_is_refused(autojump_clock: MockClock) -> None:
    async with open_sim() as sim:
        (node,) = await sim.grow(1)
        serve(node)
        looker = sim.fabric.node("looker")

        async def ask_often() -> None:
            for _ in range(20):
                await looker.call(node.peer, wire.FIND, b"", timeout_s=1.0)

        with pytest.raises(Refused, match="too often"):
            await ask_often()


def said(peer: str, start: int, stop: int, tokens_per_s: float) -> Announcement:
    return Announcement(peer, 1, 2, "s", "serving", Span(start, stop), tokens_per_s, kv_free_tokens=10_000)


def test_a_large_model_with_many_members_is_looked_at_in_pieces() -> None:
    """A stranger's manifest may have thousands of blocks: other tasks run in between."""
    members = [said(f"peer {number}", 0, 2000, 20.0) for number in range(50)]
    assert sum(1 for _ in expectation_of(members, 2000, link_seconds("", {}, ()))) > 100


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([said("a", 0, 4, 20.0), said("b", 4, 8, 10.0)], ExpectedSpeed(0.05 + 0.1 + 2 * HOP_S + 3 * 0.01)),
        ([said("a", 0, 4, 20.0)], ExpectedSpeed(missing_block=4)),
        ([], ExpectedSpeed(missing_block=0)),
    ],
)
def test_what_a_reply_would_take(members: Sequence[Announcement], expected: ExpectedSpeed) -> None:
    found = at_once(expectation_of(members, 8, lambda a, b: 0.01))
    assert found.missing_block == expected.missing_block
    assert found.token_s == (None if expected.token_s is None else pytest.approx(expected.token_s))
