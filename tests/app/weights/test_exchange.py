"""Parts between peers: from several at once, past liars and the dead, each chunk out of the first node about once."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.core.network import Payload
from app.manifest.importing import HashedSource
from app.manifest.manifest import Part
from app.manifest.merkle import CHUNK_BYTES, ChunkHasher, root_of
from app.weights import chunk_server as sharing
from app.weights import download as fetching
from app.weights import part_store as part_files
from app.weights import wire
from app.weights.chunk_server import ChunkServer
from app.weights.download import WINDOW, Download
from app.weights.extents import WeightsError
from app.weights.library import ENDS, Library, span_parts
from app.weights.part_set import PartSet
from app.weights.part_store import NewPart
from engine.sources.base import Extent
from p2p.errors import P2PError, Refused, RemoteError
from p2p.memory.fabric import MemoryFabric, MemoryNode, open_fabric
from p2p.platform import replace_file
from tests.app.weights.models import empty_library, import_model

ALL = (*ENDS, *span_parts(0, 4))
Answer = Callable[[str, bytes], Payload]


@dataclass
class Peer:
    """One node that has, gives and gets."""

    network: MemoryNode
    library: Library
    sharing: ChunkServer
    fetching: Download


@dataclass
class World:
    """A seed with the whole model, and others."""

    fabric: MemoryFabric
    folder: Path
    studied: HashedSource
    seed: Peer
    holders: dict[str, set[str]]  # peer -> parts

    def peer(self, name: str, library: Library | None = None) -> Peer:
        """One more node, with nothing."""
        network = self.fabric.node(name)
        if library is None:
            library = empty_library(self.folder / name, self.studied)
        return make_peer(network, library, self.holders, self.fabric.machine_of)

    def liar(self, name: str, answer: Answer) -> MemoryNode:
        """A node that says it has everything, and answers requests for chunks in its own way."""
        network = self.fabric.node(name)

        async def on_leaves(peer: str, body: bytes) -> Payload:
            part = self.seed.library.part(body)
            assert part is not None
            return b"".join(self.studied.leaves[part.name])

        async def on_chunk(peer: str, body: bytes) -> Payload:
            return answer(peer, body)

        network.serve(wire.LEAVES, on_leaves)
        network.serve(wire.CHUNK, on_chunk)
        self.holders[name] = set(ALL)
        return network


def make_peer(network: MemoryNode, library: Library, holders: dict[str, set[str]], homes: Mapping[str, str]) -> Peer:
    giving = ChunkServer(library, lambda peer: True)
    giving.serve(network)

    def who_has(part: str) -> list[str]:
        return [peer for peer, parts in holders.items() if part in parts and peer != network.peer_id]

    return Peer(network, library, giving, Download(network, library, giving, who_has, homes=lambda: homes))


@asynccontextmanager
async def world(tmp_path: Path) -> AsyncIterator[World]:
    studied = import_model(tmp_path / "model", tmp_path / "seed")
    async with open_fabric() as fabric:
        holders = {"seed": set(ALL)}
        seed = make_peer(fabric.node("seed"), Library(tmp_path / "seed", studied.manifest), holders, {})
        yield World(fabric, tmp_path, studied, seed, holders)


async def test_a_node_with_nothing_gets_the_parts_it_asks_for(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        peer = here.peer("newcomer")
        heard: list[str] = []
        with trio.fail_after(30):
            await peer.fetching.fetch(["tokenizer", "block.1", "block.2"], heard.append)
        assert sorted(heard) == ["block.1", "block.2", "tokenizer"]
        assert peer.library.held() == set(heard)
        assert peer.library.check(heard, again=True) == []
        progress = peer.fetching.progress
        assert progress.bytes_done == progress.bytes_total == sum(progress.from_peers.values())
        assert (progress.parts_done, progress.parts_total) == (3, 3)
        source = peer.library.source(["tokenizer", "block.1"])
        assert source.tokenizer.tokenizer_json


async def test_parts_that_belong_to_no_model_travel_the_same_way(tmp_path: Path) -> None:
    pieces = {"moments": bytes(range(256)) * 9000, "empty-ish": b"x"}
    parts = []
    for name, data in pieces.items():
        hasher = ChunkHasher()
        hasher.update(data)
        leaves = hasher.finish()
        parts.append(Part(name, len(data), root_of(leaves)))
        PartSet(tmp_path / "giver", parts, "a job").files.keep(parts[-1], leaves, data)
    given, taken = (PartSet(tmp_path / who, parts, "a job") for who in ("giver", "taker"))
    async with open_fabric() as fabric:
        ChunkServer(given, lambda peer: True).serve(fabric.node("giver"))
        network = fabric.node("taker")
        with trio.fail_after(30):
            sharing = ChunkServer(taken, lambda peer: True)
            await Download(network, taken, sharing, lambda part: ["giver"]).fetch(list(pieces))
    assert {name: taken.whole(taken.by_name[name]) for name in taken.held()} == pieces


async def test_what_is_here_is_not_fetched_again(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        peer = here.peer("newcomer")
        await peer.fetching.fetch(["block.1"])
        given = here.seed.sharing.total_bytes
        await peer.fetching.fetch(["block.1", "block.2"])
        assert here.seed.sharing.total_bytes - given == here.studied.manifest.by_name["block.2"].size_bytes


async def test_five_newcomers_pass_on_what_they_get(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        peers = [here.peer(f"newcomer-{number}") for number in range(5)]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for peer in peers:
                    nursery.start_soon(peer.fetching.fetch, ALL)
        assert all(peer.library.held() == set(ALL) for peer in peers)
        size = here.studied.manifest.size_bytes
        assert here.seed.sharing.total_bytes <= 1.5 * size
        assert sum(peer.sharing.total_bytes for peer in peers) >= 3.5 * size


def test_chunks_of_a_part_are_there_while_it_gets_its_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 9000
    hasher = ChunkHasher()
    hasher.update(data)
    leaves = hasher.finish()
    part = Part("moments", len(data), root_of(leaves))
    parts = PartSet(tmp_path, [part], "a job")
    new = parts.open_new(part, leaves)
    cut = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    for index, chunk in enumerate(cut):
        new.write(index, chunk)
    read: list[bytes | None] = []

    def replace_and_read(source: Path, target: Path) -> None:
        replace_file(source, target)
        if target == parts.files.path(part.root):
            read.extend(parts.chunk(part, index) for index in range(len(cut)))

    monkeypatch.setattr(part_files, "replace_file", replace_and_read)
    parts.finish(new)
    assert read == cut


def wrong_bytes(peer: str, body: bytes) -> Payload:
    return wire.chunk_answer(bytes(CHUNK_BYTES))


def truncated(peer: str, body: bytes) -> Payload:
    return wire.chunk_answer(b"short")


def nothing(peer: str, body: bytes) -> Payload:
    return b""


def garbage(peer: str, body: bytes) -> Payload:
    return b"\x07" * 100


def too_long(peer: str, body: bytes) -> Payload:
    return b"\x00" * (2 * CHUNK_BYTES)


def points_at_nobody(peer: str, body: bytes) -> Payload:
    return wire.elsewhere_answer("nobody")


def refuses(peer: str, body: bytes) -> Payload:
    raise Refused("busy")


def fails(peer: str, body: bytes) -> Payload:
    raise RemoteError("not here", wire.ABSENT)


@pytest.mark.parametrize(
    "answer", [wrong_bytes, truncated, nothing, garbage, too_long, points_at_nobody, refuses, fails]
)
async def test_a_bad_peer_is_found_out_at_the_chunk_and_the_rest_comes_from_others(
    tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "LOOK_AGAIN_S", 0.05)
    async with world(tmp_path) as here:
        asked: list[str] = []

        def count(peer: str, body: bytes) -> Payload:
            asked.append(peer)
            return answer(peer, body)

        here.liar("bad", count)
        peer = here.peer("newcomer")
        with trio.fail_after(30):
            await peer.fetching.fetch(ALL)
        assert asked  # it was believed at first
        assert peer.library.held() == set(ALL)
        assert "bad" not in peer.fetching.progress.from_peers
        assert peer.library.check(ALL, again=True) == []
        if answer is not refuses:
            assert len(asked) <= 2 * WINDOW


async def test_a_holder_of_one_wrong_chunk_gives_all_other_parts(tmp_path: Path, patient_clock: MockClock) -> None:
    """It may be the only one, and a bit has flipped on its disk; it does not check what it gives."""
    async with world(tmp_path) as here:
        damaged = here.studied.manifest.by_name["block.0"].root

        def gives(peer: str, body: bytes) -> Payload:
            request = wire.ChunkRequest.decode(body)
            if request.root == damaged:
                return wire.chunk_answer(bytes(CHUNK_BYTES))
            part = here.seed.library.part(request.root)
            assert part is not None
            chunks = (here.seed.library.chunk(part, request.index + number) for number in range(request.count))
            return wire.chunk_answer(*(chunk for chunk in chunks if chunk))

        here.holders.clear()
        here.liar("giver", gives)
        peer = here.peer("newcomer")
        with trio.move_on_after(60):
            await peer.fetching.fetch(ALL)
        assert peer.library.held() == set(ALL) - {"block.0"}
        assert peer.fetching.progress.wanted == ("block.0",)


def flip_bit(extent: Extent) -> None:
    before = extent.file.stat()
    data = bytearray(extent.file.read_bytes())
    data[extent.offset] ^= 1
    extent.file.write_bytes(data)
    os.utime(extent.file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("is_cached", [True, False])
async def test_a_chunk_whose_bit_has_flipped_on_the_disk_is_not_given(tmp_path: Path, is_cached: bool) -> None:
    """The file looks as before. Others would exclude this node for wrong bytes, and it would never hear of them."""
    async with world(tmp_path) as here:
        library, asker = here.seed.library, here.fabric.node("asker")
        part = library.by_name["block.0"]
        if is_cached:
            library = here.peer("cached").library
            library.files.keep(part, here.studied.leaves["block.0"], here.seed.library.whole(part))
        flip_bit(library._extents(part)[0])
        assert "block.0" in library.held()
        request = wire.ChunkRequest(part.root, 0, 4, tried=True).encode()
        for _ in range(2):
            with pytest.raises(RemoteError, match="is not here"):
                await asker.call("cached" if is_cached else "seed", wire.CHUNK, request, timeout_s=5)
        assert "block.0" not in library.held()


async def test_the_wrong_part_is_the_wrong_bytes(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        other = here.studied.manifest.by_name["block.3"]

        def swaps(peer: str, body: bytes) -> Payload:
            chunk = here.seed.library.chunk(other, 0)
            assert chunk is not None
            return wire.chunk_answer(chunk)

        here.liar("bad", swaps)
        peer = here.peer("newcomer")
        with trio.fail_after(30):
            await peer.fetching.fetch(["block.0", "block.1"])
        assert "bad" not in peer.fetching.progress.from_peers


async def test_wrong_hashes_of_chunks_are_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        bad = here.fabric.node("a-liar")

        async def on_leaves(peer: str, body: bytes) -> Payload:
            return bytes(32 * 4)

        bad.serve(wire.LEAVES, on_leaves)
        here.holders = {"a-liar": set(ALL), **here.holders}
        peer = here.peer("newcomer")
        with trio.fail_after(30):
            await peer.fetching.fetch(["block.0"])
        assert set(peer.fetching.progress.from_peers) == {"seed"}


async def test_a_giver_that_has_only_some_of_the_chunks_gives_those_before_the_first_it_lacks(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        giver, asker = here.peer("giver"), here.fabric.node("asker")
        part = here.studied.manifest.by_name["block.0"]
        new = giver.library.open_new(part, here.studied.leaves["block.0"])
        chunks = [here.seed.library.chunk(part, index) or b"" for index in range(4)]
        for index in (0, 1, 3):
            assert new.take(index, chunks[index])
        for first, count, given in ((0, 4, chunks[:2]), (1, 1, chunks[1:2]), (3, 4, chunks[3:])):
            request = wire.ChunkRequest(part.root, first, count, tried=True)
            raw = await asker.call("giver", wire.CHUNK, request.encode(), timeout_s=5)
            assert raw == b"\0" + b"".join(given)
        with pytest.raises(RemoteError, match="chunk 2 of"):
            await asker.call("giver", wire.CHUNK, wire.ChunkRequest(part.root, 2, 2, True).encode(), timeout_s=5)
        giver.library.abandon(new)


async def test_of_a_long_answer_only_what_is_right_is_kept(tmp_path: Path) -> None:
    async with world(tmp_path) as here:

        def half_right(peer: str, body: bytes) -> Payload:
            request = wire.ChunkRequest.decode(body)
            part = here.seed.library.part(request.root)
            assert part is not None
            return wire.chunk_answer(here.seed.library.chunk(part, request.index) or b"", bytes(CHUNK_BYTES))

        here.liar("bad", half_right)
        peer = here.peer("newcomer")
        with trio.fail_after(30):
            await peer.fetching.fetch(ALL)
        assert peer.library.check(ALL, again=True) == []
        assert "bad" not in peer.fetching.progress.from_peers


async def test_a_part_that_nobody_has_is_waited_for_and_named(tmp_path: Path, patient_clock: MockClock) -> None:
    async with world(tmp_path) as here:
        here.holders["seed"].remove("block.3")
        peer = here.peer("newcomer")
        came = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.fetching.fetch, ["block.3", "block.0"], lambda name: came.set())
            await came.wait()
            begun = trio.current_time()
            while not peer.fetching.progress.wanted:  # noqa: ASYNC110 - the download tells nobody
                await trio.sleep(0.1)
            assert list(peer.fetching.progress.wanted) == ["block.3"]
            assert trio.current_time() - begun == pytest.approx(fetching.WAITS_S, abs=2)
            assert not peer.fetching.progress.is_refused
            here.holders["seed"].add("block.3")
        assert peer.library.held() == {"block.0", "block.3"}
        assert peer.fetching.progress.wanted == ()


async def test_a_holder_that_only_refuses_is_no_holder(tmp_path: Path, patient_clock: MockClock) -> None:
    async with world(tmp_path) as here:
        here.holders["seed"].clear()

        def refuse(peer: str, body: bytes) -> Payload:
            raise RemoteError("never", code="internal")

        here.liar("liar", refuse)
        peer = here.peer("newcomer")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.fetching.fetch, ["block.3"])
            while not peer.fetching.progress.wanted:  # noqa: ASYNC110
                await trio.sleep(0.1)
            assert peer.fetching.progress.is_refused
            here.holders["seed"].add("block.3")
        assert peer.library.held() == {"block.3"}


async def test_a_part_that_nobody_has_is_taken_from_a_disk_that_is_mounted_late(tmp_path: Path) -> None:
    """The download waits for members that have it, and there are none."""
    async with world(tmp_path) as here:
        here.holders["seed"].clear()
        weights, away = tmp_path / "model" / "weights.bin", tmp_path / "away"
        weights.rename(away)
        peer = here.peer("owner", Library(tmp_path / "seed", here.studied.manifest))
        assert peer.library.check(ALL) == [name for name in ALL if name != "tokenizer"]
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(peer.fetching.fetch, ALL)
                while not peer.fetching._open:  # noqa: ASYNC110 - until it waits for chunks
                    await trio.sleep(0.01)
                away.rename(weights)
        progress = peer.fetching.progress
        assert (progress.parts_done, progress.bytes_done) == (len(ALL), progress.bytes_total)
        assert peer.library.check(ALL) == []


async def test_the_giver_dies_in_the_middle_and_another_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        second = here.peer("second", Library(tmp_path / "seed", here.studied.manifest))
        peer = here.peer("newcomer")
        async with trio.open_nursery() as nursery:

            def kill_once(name: str) -> None:
                if here.holders.pop("seed", None):
                    here.fabric.kill("seed")
                    here.holders["second"] = set(ALL)

            nursery.start_soon(peer.fetching.fetch, ALL, kill_once)
        assert peer.library.held() == set(ALL)
        assert second.sharing.total_bytes > 0


async def test_a_fetch_that_is_cancelled_goes_on_later_with_the_chunks_it_had(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        peer = here.peer("newcomer")
        with trio.CancelScope() as scope:
            await peer.fetching.fetch(ALL, lambda name: scope.cancel())
        had = here.seed.sharing.total_bytes
        again = here.peer("newcomer-again", empty_library(tmp_path / "newcomer", here.studied))
        with trio.fail_after(30):
            await again.fetching.fetch(ALL)
        in_flight = WINDOW * wire.MAX_RUN * CHUNK_BYTES
        assert here.seed.sharing.total_bytes <= here.studied.manifest.size_bytes + in_flight
        assert had > 0


async def test_a_full_disk_ends_the_fetch_in_plain_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path) as here:
        peer = here.peer("newcomer")

        def full(path: Path, data: bytes, *, durable: bool = True) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(part_files, "write_private", full)
        with pytest.raises(WeightsError, match="the disk is full"):
            await peer.fetching.fetch(ALL)
        monkeypatch.undo()
        original = part_files.NewPart.write

        def full_later(new: NewPart, index: int, chunk: bytes | memoryview) -> None:
            if index == 1:
                with part_files.writing(new.part.name):
                    raise OSError(errno.ENOSPC, "No space left on device")
            original(new, index, chunk)

        monkeypatch.setattr(part_files.NewPart, "write", full_later)
        with pytest.raises(WeightsError, match="the disk is full"):
            await peer.fetching.fetch(ALL)
        monkeypatch.undo()
        with trio.fail_after(30):
            await peer.fetching.fetch(ALL)  # somebody made room
        assert peer.library.check(ALL, again=True) == []


async def test_strangers_get_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.seed.sharing.is_member = lambda peer: False
        stranger = here.fabric.node("stranger")
        request = wire.ChunkRequest(here.studied.manifest.by_name["block.0"].root, 0)
        for method, body in ((wire.CHUNK, request.encode()), (wire.LEAVES, request.root)):
            with pytest.raises(Refused):
                await stranger.call("seed", method, body, timeout_s=5)


@pytest.mark.parametrize("body", [b"", b"x" * 37, b"x" * 38, b"x" * 1000])
async def test_senseless_requests_are_refused(tmp_path: Path, body: bytes) -> None:
    async with world(tmp_path) as here:
        peer = here.fabric.node("odd")
        for method in (wire.CHUNK, wire.LEAVES):
            with pytest.raises(P2PError):
                await peer.call("seed", method, body, timeout_s=5)


async def test_one_peer_cannot_take_all_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "chunk_at_hand", lambda library, part, index: None)  # as on a disk
    async with world(tmp_path) as here:
        greedy = here.fabric.node("greedy")
        root = here.studied.manifest.by_name["block.0"].root
        refused = 0

        async def ask() -> None:
            nonlocal refused
            try:
                await greedy.call("seed", wire.CHUNK, wire.ChunkRequest(root, 0, tried=True).encode(), timeout_s=10)
            except Refused:
                refused += 1

        async with trio.open_nursery() as nursery:
            for _ in range(sharing.SLOTS_PER_PEER * 3):
                nursery.start_soon(ask)
        assert refused >= sharing.SLOTS_PER_PEER
