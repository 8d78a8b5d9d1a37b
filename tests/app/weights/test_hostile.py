"""Hostile members: those who trickle, are silent, name victims or ask for too much; and a cache with traps in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.core.network import Payload
from app.manifest.merkle import CHUNK_BYTES
from app.weights import chunk_client as asking
from app.weights import chunk_schedule, wire
from app.weights import chunk_server as sharing
from app.weights import download as fetching
from app.weights.chunk_schedule import choose_peers
from app.weights.extents import WeightsError
from app.weights.library import ENDS, Library, span_parts
from app.weights.manifest_store import ManifestStore
from app.weights.part_store import PartFiles
from p2p.errors import P2PError, Refused
from p2p.memory.fabric import LinkProfile
from p2p.platform import write_private
from tests.app.weights.models import empty_library, import_model
from tests.app.weights.test_exchange import ALL, World, world


def test_the_slow_cannot_keep_the_fast_out_by_being_many() -> None:
    slow = [f"slow-{number:03}" for number in range(100)]
    pace = dict.fromkeys(slow, 15.0) | {"fast": 0.1}
    assert choose_peers([*slow, "fast"], pace, 8)[0] == "fast"
    untried = [*slow, "honest"]
    assert "honest" in choose_peers(untried, dict.fromkeys(slow, 15.0), 8)  # who was not tried yet has its turn
    assert choose_peers(["a", "b"], {}, 8) == ["a", "b"]
    assert choose_peers([*slow, "fast"], {"fast": 0.1}, 8) == ["fast", *slow[:7]]


def silent(here: World, name: str) -> list[str]:
    """A member that says it has all and never answers; whom it heard."""
    network, heard = here.fabric.node(name), list[str]()

    async def on_any(peer: str, body: bytes) -> Payload:
        heard.append(peer)
        await trio.sleep_forever()
        raise AssertionError

    network.serve(wire.LEAVES, on_any)
    network.serve(wire.CHUNK, on_any)
    here.holders[name] = set(ALL)
    return heard


async def test_many_silent_holders_do_not_hold_up_the_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "NEXT_ASKED_S", 0.02)
    monkeypatch.setattr(fetching, "LATE_S", 0.05)
    monkeypatch.setattr(fetching, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(asking, "CHUNK_S", 0.5)
    async with world(tmp_path) as here:
        for number in range(12):
            silent(here, f"silent-{number}")
        peer = here.peer("newcomer")
        with trio.fail_after(20):
            await peer.fetching.fetch(["block.0", "block.1"])
        assert set(peer.fetching.progress.from_peers) == {"seed"}


@pytest.mark.parametrize("gives_lists", [False, True])
async def test_silent_holders_of_one_machine_do_not_hold_up_those_of_others(
    tmp_path: Path, patient_clock: MockClock, gives_lists: bool
) -> None:
    """Also if they give the lists of chunks, which are public, and no chunk."""
    async with world(tmp_path) as here:
        lists = here.seed.sharing._on_leaves
        for number in range(100):
            name = f"silent-{number}"
            here.fabric.machine_of[name] = "one machine"
            silent(here, name)
            if gives_lists:
                here.fabric.nodes[name].serve(wire.LEAVES, lists)
        peer = here.peer("newcomer")
        begun = trio.current_time()
        await peer.fetching.fetch(["block.0", "block.1"])
        assert trio.current_time() - begun < 2 * asking.CHUNK_S, "one turn at most goes to them first"
        assert set(peer.fetching.progress.from_peers) == {"seed"}


async def test_a_holder_that_is_only_slow_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members with 2 Mbit/s up that serve others besides took longer than the deadline for each chunk, for ever."""
    monkeypatch.setattr(asking, "CHUNK_S", 0.5)
    async with world(tmp_path) as here:
        here.fabric.set_link("seed", "newcomer", LinkProfile(bytes_per_s=1.5 * CHUNK_BYTES))
        peer = here.peer("newcomer")
        with trio.fail_after(20):
            await peer.fetching.fetch(["block.0"])
        assert set(peer.fetching.progress.from_peers) == {"seed"}


async def test_a_peer_that_sends_to_a_silent_victim_is_soon_told_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ELSEWHERE_S", 0.1)
    monkeypatch.setattr(asking, "PROMPT_S", 0.05)
    monkeypatch.setattr(chunk_schedule, "SHUN_S", 0.0)  # or the victim is left alone after the first time
    monkeypatch.setattr(fetching, "MAX_AT_ONE", 1)
    async with world(tmp_path) as here:
        heard = silent(here, "victim")
        del here.holders["victim"], here.holders["seed"]

        def misleads(peer: str, body: bytes) -> Payload:
            request = wire.ChunkRequest.decode(body)
            if not request.tried:
                return wire.elsewhere_answer("victim")
            part = here.seed.library.part(request.root)
            assert part is not None
            return wire.chunk_answer(here.seed.library.chunk(part, request.index) or b"")

        here.liar("bad", misleads)
        peer = here.peer("newcomer")
        with trio.fail_after(20):
            await peer.fetching.fetch(ALL)
        assert 1 <= len(heard) <= chunk_schedule.MISLED_AT_MOST  # fewer if the rest was there before


async def test_a_member_that_asks_for_everything_and_helps_nobody_costs_the_others_little(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        greedy = here.fabric.node("greedy")

        async def absent(peer: str, body: bytes) -> Payload:
            raise Refused("no")

        greedy.serve(wire.CHUNK, absent)
        for part in here.studied.manifest.parts:
            for index in range(len(here.studied.leaves[part.name])):
                await greedy.call("seed", wire.CHUNK, wire.ChunkRequest(part.root, index).encode(), timeout_s=5)
        peer = here.peer("newcomer")
        with trio.fail_after(20):
            await peer.fetching.fetch(ALL)
        assert peer.library.held() == set(ALL)


async def test_hashes_are_given_to_a_few_at_a_time_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path) as here:
        greedy = here.fabric.node("greedy")
        root = here.studied.manifest.by_name["block.0"].root
        refused = 0

        async def ask() -> None:
            nonlocal refused
            try:
                await greedy.call("seed", wire.LEAVES, root, timeout_s=10)
            except Refused:
                refused += 1

        async with trio.open_nursery() as nursery:
            for _ in range(sharing.SLOTS_PER_PEER * 3):
                nursery.start_soon(ask)
        assert refused >= sharing.SLOTS_PER_PEER


async def test_what_is_remembered_of_peers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "REMEMBERED", 4)
    async with world(tmp_path) as here:
        root = here.studied.manifest.by_name["block.0"].root
        for number in range(12):
            node = here.fabric.node(f"sybil-{number}")
            for index in (0, 1, 2, 2**31):
                try:
                    await node.call("seed", wire.CHUNK, wire.ChunkRequest(root, index).encode(), timeout_s=5)
                except P2PError:
                    assert index == 2**31
        assert len(here.seed.sharing.given) <= 4


def test_a_link_in_the_cache_is_not_written_through(tmp_path: Path) -> None:
    studied = import_model(tmp_path / "model", tmp_path / "seed")
    library, part = empty_library(tmp_path / "cache", studied), studied.manifest.by_name["block.0"]
    mine = tmp_path / "mine"
    mine.write_bytes(b"precious")
    library.files.folder.mkdir(parents=True)
    os.symlink(mine, library.files.folder / f"{part.root.hex()}.new")
    with pytest.raises(WeightsError, match="cannot be written"):
        library.open_new(part, studied.leaves["block.0"])
    assert mine.read_bytes() == b"precious"


def test_other_names_in_the_cache_are_left_alone(tmp_path: Path) -> None:
    files = PartFiles(tmp_path)
    files.folder.mkdir()
    for name in ("x" * 64, "..", "readme.txt", "A" * 64):
        if name != "..":
            (files.folder / name).write_bytes(b"mine")
    assert files.names() == []


def damaged_name(raw: bytes) -> bytes:
    return raw.replace(b'"block.0"', b'"../../x"')


def cut_short(raw: bytes) -> bytes:
    return raw[:-10]


@pytest.mark.parametrize("damage", [damaged_name, cut_short])
def test_a_damaged_index_is_as_good_as_none(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    studied = import_model(tmp_path / "model", tmp_path / "seed")
    file = tmp_path / "seed" / "manifests" / f"{studied.manifest.hash}.index"
    write_private(file, damage(file.read_bytes()))
    library = Library(tmp_path / "seed", studied.manifest)
    assert library.held() <= {*ENDS, *span_parts(0, 4)}
    assert "block.0" not in library.held()
    assert "block.0" in library.check(ALL, again=True)
    assert ManifestStore(tmp_path / "seed").index(studied.manifest.hash) is not None
