"""Newcomers at one home: who has a model and a slow upload gives it to all of them, if slowly."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.manifest.importing import HashedSource, hash_source, tokenizer_bytes
from app.weights.chunk_server import ChunkServer
from app.weights.download import Download
from app.weights.library import Library, remember_source, span_parts
from app.weights.manifest_store import ManifestStore
from p2p.errors import PeerUnreachable
from p2p.link.byte_stream import ByteStream
from p2p.values import Buffer
from tests.app.tiny_source import tiny_source
from tests.app.weights.models import WIDE, empty_library
from tests.p2p.networks import TrioByteStream, WiredNode, WiredWorld, wired_world

PIECE_BYTES = 16 * 1024  # that links send in turn
MODEL = dataclasses.replace(WIDE, n_blocks=2, intermediate_size=4096)  # blocks of 8 chunks
PARTS = span_parts(0, 2)


class Upload:
    """The way out of one home, which its links share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._turn = bytes_per_s, trio.Lock()

    async def carry(self, size: int) -> None:
        async with self._turn:
            await trio.sleep(size / self._bytes_per_s)


class HomeStream(TrioByteStream):
    """A byte stream that goes out of a home."""

    def __init__(self, stream: trio.abc.Stream, upload: Upload) -> None:
        super().__init__(stream)
        self._upload = upload

    async def write_parts(self, parts: Sequence[Buffer]) -> None:
        whole = memoryview(b"".join(parts))
        for start in range(0, len(whole), PIECE_BYTES):
            piece = whole[start : start + PIECE_BYTES]
            await self._upload.carry(len(piece))
            await super().write_parts((piece,))


class Homes:
    """Nodes of a world that each have a slow upload."""

    def __init__(self, world: WiredWorld) -> None:
        self._world = world
        self._uploads: dict[str, Upload] = {}

    async def node(self, bytes_per_s: float) -> WiredNode:
        node = await self._world.node()
        self._uploads[node.peer_id] = Upload(bytes_per_s)

        async def dial(peer: str, lane: str) -> ByteStream:
            await trio.lowlevel.checkpoint()
            if peer not in self._world.nodes:
                raise PeerUnreachable(f"no address of {peer} answers")
            here, there = self._world.pipe()
            self._world.connect(self._world.nodes[peer], node.peer_id, lane, HomeStream(there, self._uploads[peer]))
            return HomeStream(here, self._uploads[node.peer_id])

        node._dial = dial
        return node


def founded(folder: Path) -> HashedSource:
    source = tiny_source(folder / "model", MODEL)
    studied = hash_source(source)
    ManifestStore(folder / "founder").save_survey(studied, str(folder))
    remember_source(folder / "founder", studied.manifest, source, tokenizer_bytes(source))
    return studied


@pytest.mark.parametrize(
    ("newcomers", "bytes_per_s"),
    [
        (2, 32_000),  # four chunks for each of them, twice, take longer than a request may
        (4, 250_000),
        pytest.param(12, 250_000, marks=pytest.mark.soak),
    ],
)
async def test_newcomers_that_come_together_have_the_model_from_one_slow_home(
    tmp_path: Path, patient_clock: MockClock, newcomers: int, bytes_per_s: float
) -> None:
    studied = founded(tmp_path)
    size = sum(studied.manifest.by_name[name].size_bytes for name in PARTS)
    async with wired_world() as world:
        homes = Homes(world)
        founder = await homes.node(bytes_per_s)
        holders = {founder.peer_id: set(PARTS)}
        ChunkServer(Library(tmp_path / "founder", studied.manifest), lambda peer: True).serve(founder)
        downloads: list[Download] = []
        with trio.move_on_after(1.5 * newcomers * size / bytes_per_s):
            async with trio.open_nursery() as nursery:
                for _ in range(newcomers):
                    node = await homes.node(250_000)
                    library = empty_library(tmp_path / node.peer_id, studied)
                    sharing = ChunkServer(library, lambda peer: True)
                    sharing.serve(node)

                    def who_has(part: str, own: str = node.peer_id) -> list[str]:
                        return [peer for peer, parts in holders.items() if part in parts and peer != own]

                    downloads.append(Download(node, library, sharing, who_has))
                    own = holders[node.peer_id] = set()
                    nursery.start_soon(downloads[-1].fetch, PARTS, own.add)
                    await trio.sleep(5)
        assert [download.progress.bytes_done for download in downloads] == [size] * newcomers
