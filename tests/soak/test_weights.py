"""Six machines, one of which has the model: the others get their spans from it and from each other, and serve.

The first one's line is narrow, so that there is a middle in which nodes can be killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from app.api.client import client_of
from app.config.home import cache_folder
from app.core.errors import NotRunning
from app.snapshot.views import WeightsView
from app.weights import wire
from app.weights.download import WINDOW
from app.weights.extents import chunk_length, matching_chunks
from app.weights.library import ENDS, span_parts
from app.weights.manifest_store import ManifestStore
from app.weights.part_store import PartFiles
from engine.errors import EngineError
from engine.sources.base import Extent
from engine.sources.opening import open_source
from engine.sources.starter import starter_file
from tests.bench.swarm_nodes import free_port, open_proxies
from tests.process.node_process import Place, Serving, wait_until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

LINE_BYTES_PER_S = 6e6
SPANS = ("0:10", "10:20", "20:30", "0:15", "15:30")
SERVING_S = 300.0
MIDDLE_BYTES = 8e6  # of some 60 MB for each
PROMPT = ("Once upon a time", "--temperature", "0", "--max-tokens", "16")
IN_FLIGHT_BYTES = WINDOW * wire.MAX_RUN * len(SPANS) * 2**20  # from each of the others


class Newcomer:
    """A machine with a cache of its own, and nothing in it."""

    def __init__(self, folder: Path, span: str) -> None:
        self.place, self.span = Place(folder / "home", folder / "cache"), span

    def start(self, invite: str) -> Serving:
        flags = ("--discovery=invite", "--device=cpu", f"--blocks={self.span}")
        return Serving(self.place, *flags, max_vram="2GB", SHOAL_INVITE=invite, OMP_NUM_THREADS="1")

    def weights(self) -> WeightsView:
        """What the running node says; nothing before it is up."""
        try:
            return client_of(self.place.home).snapshot().weights or WeightsView()
        except NotRunning:
            return WeightsView()

    def wanted(self) -> tuple[str, ...]:
        start, stop = map(int, self.span.split(":"))
        return (*ENDS, *span_parts(start, stop))

    def has_all(self) -> bool:
        return self.weights().parts_held >= len(self.wanted())

    def is_halfway(self) -> bool:
        return self.weights().from_peers_bytes > MIDDLE_BYTES

    def chunks_on_disk(self, seed_cache: Path) -> dict[str, list[int]]:
        """The right chunks of its parts, whole and half ones."""
        store, files = ManifestStore(seed_cache), PartFiles(self.place.cache)
        manifest = store.load(store.hashes()[0])
        assert manifest is not None
        found = {}
        for name in self.wanted():
            part = manifest.by_name[name]
            leaves = (store.leaves(manifest) or {}).get(name) or PartFiles(seed_cache).leaves(part)
            assert leaves is not None
            path = files.path(part.root)
            path = path if path.exists() else path.with_name(f"{path.name}.new")
            right = matching_chunks((Extent(path, 0, part.size_bytes),), part.size_bytes, leaves)
            found[name] = [chunk_length(part.size_bytes, index) for index, is_right in enumerate(right) if is_right]
        return found

    def bytes_on_disk(self, seed_cache: Path) -> int:
        return sum(sum(lengths) for lengths in self.chunks_on_disk(seed_cache).values())


@pytest.fixture
def seed(tmp_path: Path) -> Place:
    """The one that has the model."""
    try:
        open_source("starter", cache_folder())
    except EngineError as error:
        pytest.skip(f"the model cannot be had: {error}")
    place = Place(tmp_path / "seed", tmp_path / "seed-cache")
    file = starter_file(place.cache)
    file.parent.mkdir(parents=True)
    os.link(starter_file(cache_folder()), file)
    assert place.shoal("create", "reef", "--model", "starter").status == 0
    return place


@contextmanager
def serving_seed(seed: Place) -> Iterator[str]:
    """It serves behind its narrow line and hosts nothing; an invite."""
    port = free_port()
    with open_proxies([port], 0.0, LINE_BYTES_PER_S) as (proxy,):
        ways = (f"--listen=/ip4/127.0.0.1/tcp/{port}", f"--advertise=/ip4/127.0.0.1/tcp/{proxy.port}")
        with Serving(seed, "--discovery=invite", *ways) as first:
            first.ready()
            yield seed.shoal("invite").out.strip()


def check_all_serve(seed: Place, nodes: Sequence[Newcomer], running: Sequence[Serving]) -> None:
    for serving in running:
        serving.ready(SERVING_S)
    alone = seed.facts("chat", *PROMPT, "--local", "--model", "starter", "--device", "cpu")
    wait_until(lambda: all(block["holders"] for block in seed.facts("blocks")), "all blocks are held")
    assert seed.facts("chat", *PROMPT)["token_ids"] == alone["token_ids"]
    for node in nodes:
        wait_until(node.has_all, f"the ends and blocks {node.span} are held")


def given(seed: Place) -> float:
    """What the first one gave, in models."""
    weights = client_of(seed.home).snapshot().weights
    assert weights is not None
    return weights.given_bytes / weights.bytes_total


def test_five_machines_with_nothing_serve_and_the_first_gives_each_byte_about_once(seed: Place, tmp_path: Path) -> None:
    nodes = [Newcomer(tmp_path / f"n{index}", span) for index, span in enumerate(SPANS)]
    with ExitStack() as stack:
        invite = stack.enter_context(serving_seed(seed))
        running = [stack.enter_context(node.start(invite)) for node in nodes]
        check_all_serve(seed, nodes, running)
        print(f"the first node gave {given(seed):.3f} x the model")
        assert given(seed) <= 1.5


def test_killed_in_the_middle_they_go_on_with_what_they_have(seed: Place, tmp_path: Path) -> None:
    nodes = [Newcomer(tmp_path / f"n{index}", span) for index, span in enumerate(SPANS)]
    with ExitStack() as stack:
        invite = stack.enter_context(serving_seed(seed))
        running = [stack.enter_context(node.start(invite)) for node in nodes]
        for node in nodes:
            wait_until(node.is_halfway, "it is in the middle", SERVING_S)
        came = [node.weights().from_peers_bytes for node in nodes]
        for serving in running:
            serving.end(signal.SIGKILL)
        had = [node.bytes_on_disk(seed.cache) for node in nodes]
        again = [stack.enter_context(node.start(invite)) for node in nodes]
        check_all_serve(seed, nodes, again)
        for node, before, kept in zip(nodes, came, had, strict=True):
            size = node.bytes_on_disk(seed.cache)
            assert kept < size, "the kill came too late"
            later = node.weights().from_peers_bytes
            megabytes = [round(value / 1e6, 1) for value in (before, kept, later, size)]
            print(node.span, "came, kept, came later, in all [MB]:", megabytes)
            assert before - kept <= IN_FLIGHT_BYTES
            assert later <= size - kept + IN_FLIGHT_BYTES // 4  # late chunks are asked for twice
        print(f"the first node gave {given(seed):.3f} x the model")
        assert given(seed) <= 1.5
