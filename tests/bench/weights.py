"""How fast parts come from a peer, beside the bare channel; and what giving them costs those who chat meanwhile.

    python -m tests.bench.weights --json [--folder DIR]

Bulk: two processes on loopback; one has a made-up model of 185 MB in its own files, the other fetches all of it onto
its disk, every chunk checked. Rounds alternate with rounds of the channel (`tests.bench.channel`), and the best counts.
The getter has the memory for it at hand, as the channel has: a virtual machine may have given it back to its
host, and every page that it has to fetch from there costs more than all that is measured here.
`disk_mb_s` is what the same bytes take on that disk with no network at all: where it is below the channel's figure, it
bounds the ratio, and `--folder /dev/shm` shows the transfer without it.
Decode: an asker and a node that hosts the starter model; a third member draws chunks from that node at a set pace.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import trio

from app.api.client import client_of
from app.config.home import cache_folder
from app.core.network import Network, Priority
from app.manifest.importing import hash_source, tokenizer_bytes
from app.manifest.merkle import CHUNK_BYTES
from app.membership import Membership, fetch_manifest, resolve_swarm
from app.swarm.invite import parse_invite
from app.swarm.names import SwarmName
from app.weights import wire
from app.weights.chunk_server import ChunkServer
from app.weights.download import Download
from app.weights.library import Library, remember_source
from app.weights.manifest_store import ManifestStore
from p2p.identity import Identity
from p2p.platform import keep_freed_memory
from tests.app.tiny_source import CONFIG, tiny_source
from tests.bench import channel
from tests.p2p.nodes import make_network, until
from tests.process.node_process import Place, Serving, wait_until

BIG = dataclasses.replace(CONFIG, n_blocks=4, hidden_size=2048, head_dim=64, n_heads=32, intermediate_size=5632)
TOKENS = 96
PULL_BYTES_PER_S = 24e6
PULL_AT_ONCE = 2
SWITCH_S = 0.0005  # as `shoal serve` has it
PROMPT = "Tell me about the sea."


# --- bulk -------------------------------------------------------------------------------------------------------------


def _import(cache: Path) -> str:
    source = tiny_source(cache / "model", BIG)
    studied = hash_source(source)
    ManifestStore(cache).save_survey(studied, "made up")
    remember_source(cache, studied.manifest, source, tokenizer_bytes(source))
    return studied.manifest.hash


def _library(cache: Path) -> Library:
    store = ManifestStore(cache)
    manifest = store.load(store.hashes()[0])
    assert manifest is not None
    return Library(cache, manifest)


async def give(cache: Path) -> None:
    """Print an address and give until killed."""
    network = make_network()
    ChunkServer(_library(cache), lambda peer: True).serve(network)
    async with network.running():
        print(network.peer_id, network.addresses()[0], flush=True)
        await trio.sleep_forever()


async def get(cache: Path, peer: str, address: str) -> dict[str, float]:
    """Fetch everything; what that took."""
    network, library = make_network(), _library(cache)
    async with network.running():
        network.learn(peer, [address])
        fetching = Download(network, library, ChunkServer(library, lambda who: True), lambda part: [peer])
        # As the channel is measured: from when it stands.
        await network.call(peer, wire.LEAVES, library.manifest.parts[0].root, timeout_s=20, priority=Priority.BULK)
        _have_memory(cache, library.manifest.size_bytes)
        own = psutil.Process()
        before_bytes = own.memory_info().rss
        cpu_s, begun = time.process_time(), time.perf_counter()
        await fetching.fetch([part.name for part in library.manifest.parts])
        taken_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
        assert not library.missing(part.name for part in library.manifest.parts)
        size = library.manifest.size_bytes
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes  # at its peak
        return {"mb_s": size / 1e6 / taken_s, "cpu_s": cpu_s, "memory_mb": memory / 1e6, "size_mb": size / 1e6}


def _have_memory(folder: Path, size: int) -> None:
    """Write as much as will be fetched, and delete it: its pages are free then, and this machine's."""
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(-(-size // CHUNK_BYTES)):
            file.write(bytes(CHUNK_BYTES))


def _run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.bench.weights", *arguments]


@contextmanager
def _process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A role in a process of its own, and the line it prints first."""
    with subprocess.Popen(_run(*arguments), stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def _one_round(folder: Path, seed: Path, number: int) -> dict[str, float]:
    cache = folder / f"round{number}"
    store = ManifestStore(seed)
    manifest = store.load(store.hashes()[0])
    assert manifest is not None
    ManifestStore(cache).save(manifest)
    with _process("--give", str(seed)) as (giver, line):
        watched = psutil.Process(giver.pid)
        before = watched.memory_info().rss
        begun = sum(watched.cpu_times()[:2])
        done = subprocess.run(_run("--get", str(cache), *line.split()), stdout=subprocess.PIPE, text=True, check=True)
        figures: dict[str, float] = json.loads(done.stdout)
        figures["giver_cpu_s"] = sum(watched.cpu_times()[:2]) - begun
        figures["giver_memory_mb"] = (watched.memory_info().rss - before) / 1e6
        return figures


def _disk_mb_s(folder: Path, size: int) -> float:
    """How fast as many bytes are written and flushed there."""
    chunk = os.urandom(CHUNK_BYTES)
    begun = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(-(-size // CHUNK_BYTES)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size / 1e6 / (time.perf_counter() - begun)


def measure_bulk(rounds: int, where: str | None) -> dict[str, Any]:
    """Parts beside the bare channel."""
    parts, bare, disk = [], [], []
    with tempfile.TemporaryDirectory(dir=where) as name:
        folder = Path(name)
        _import(folder / "seed")
        for number in range(rounds):
            with channel.serving("shoal") as address:
                bare.append(channel.run_client("shoal", address, "--client")["bulk_mb_s"])
            parts.append(_one_round(folder, folder / "seed", number))
            shutil.rmtree(folder / f"round{number}")
            disk.append(_disk_mb_s(folder, int(parts[-1]["size_mb"] * 1e6)))
    best = max(parts, key=lambda figures: figures["mb_s"])
    return {
        "channel_mb_s": round(max(bare), 1),
        "weights_mb_s": round(best["mb_s"], 1),
        "disk_mb_s": round(max(disk), 1),
        "ratio": round(best["mb_s"] / max(bare), 3),
        "getter_cpu_s_per_gb": round(best["cpu_s"] / best["size_mb"] * 1e3, 2),
        "giver_cpu_s_per_gb": round(best["giver_cpu_s"] / best["size_mb"] * 1e3, 2),
        "getter_peak_memory_mb": round(max(figures["memory_mb"] for figures in parts), 1),
        "giver_memory_mb": round(max(figures["giver_memory_mb"] for figures in parts), 1),
    }


# --- decode -----------------------------------------------------------------------------------------------------------


class _Puller:
    """A member that draws chunks from another one, at a set pace and no others' use."""

    def __init__(self, network: Network, peer: str, chunks: Sequence[tuple[bytes, int]]) -> None:
        self._network, self._peer, self._chunks = network, peer, chunks
        self._came, self._begun = 0, 0.0

    async def until(self, line: Callable[[], Awaitable[object]]) -> float:
        """Draw until `line` returns; how many MB a second came."""
        self._came, self._begun = 0, trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(PULL_AT_ONCE):
                nursery.start_soon(self._draw, number)
            await line()
            nursery.cancel_scope.cancel()
        return self._came / 1e6 / (trio.current_time() - self._begun)

    async def _draw(self, number: int) -> None:
        while True:
            root, index = self._chunks[number % len(self._chunks)]
            number += PULL_AT_ONCE
            body = wire.ChunkRequest(root, index, tried=True).encode()
            chunk = await self._network.call(self._peer, wire.CHUNK, body, timeout_s=20, priority=Priority.BULK)
            self._came += len(chunk)
            await trio.sleep_until(self._begun + self._came / PULL_BYTES_PER_S)


async def pull(invite_text: str, peer: str) -> None:
    """Join and print a line; between two lines of input draw chunks from a member, and print how fast they came."""
    invite, who = parse_invite(invite_text), Identity.generate()
    network = make_network(identity=who)
    async with network.running(), trio.open_nursery() as nursery:
        for address in invite.addresses:
            network.seek(address)
        via = [address.rpartition("/")[2] for address in invite.addresses]
        await until(lambda: bool(network.links()))
        found = await resolve_swarm(network, SwarmName(invite.name, invite.model_hash), via=via)
        manifest = await fetch_manifest(network, via, invite.model_hash)
        swarm = Membership(network, who, found.record, manifest.config.n_blocks)
        swarm.announce(state="client")
        swarm.join_via(via)
        await nursery.start(swarm.run)
        await until(lambda: peer in swarm.table.present(), 30)
        whole = [(part.root, index) for part in manifest.parts for index in range(part.size_bytes // CHUNK_BYTES)]
        puller, lines = _Puller(network, peer, whole), trio.wrap_file(sys.stdin)
        print("joined", flush=True)
        while await lines.readline():
            print(await puller.until(lines.readline), flush=True)
        nursery.cancel_scope.cancel()


def _step_ms(asker: Any) -> list[float]:
    """The time between two tokens of one reply."""
    times = []
    request = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "temperature": 0.0}
    for piece in asker.chat(request):
        if "text" in piece:
            times.append(time.perf_counter())
    return [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times[8:])]


def measure_decode(rounds: int, model: str) -> dict[str, Any]:
    """Decode steps with and without a member drawing chunks from the hop, in turns."""
    calm: list[float] = []
    drawn: list[float] = []
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place, host = Place(folder / "asker", cache_folder()), Place(folder / "host", cache_folder())
        assert place.shoal("create", "bench", "--model", model).status == 0
        with Serving(place, "--discovery=invite", OMP_NUM_THREADS="1") as asking:
            asking.ready()
            invite = place.shoal("invite").out.strip()
            flags = ("--discovery=invite", "--device=cpu")
            with Serving(host, *flags, max_vram="3GB", SHOAL_INVITE=invite, OMP_NUM_THREADS="1") as hosting:
                hosting.ready(300)
                asker, peer = client_of(place.home), str(host.node_file()["peer_id"])
                wait_until(
                    lambda: all(block["holders"] for block in asker.get("/control/blocks")), "all blocks are held"
                )
                with _process("--pull", invite, peer) as (puller, line):
                    assert line == "joined", line
                    _step_ms(asker)
                    for _ in range(rounds):
                        calm += _step_ms(asker)
                        _tell(puller)
                        drawn += _step_ms(asker)
                        _tell(puller)
                        assert puller.stdout is not None
                        rates.append(float(puller.stdout.readline()))
    p50, drawn_p50 = statistics.median(calm), statistics.median(drawn)
    return {
        "decode_p50_ms": round(p50, 2),
        "decode_p50_while_giving_ms": round(drawn_p50, 2),
        "decode_rise": round(drawn_p50 / p50 - 1, 3),
        "giving_mb_s": round(statistics.median(rates), 1),
    }


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def main() -> None:
    """Parse the command line and run what it names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="starter", help="what is decoded")
    parser.add_argument("--folder", help="where the parts are written")
    parser.add_argument("--only", choices=("bulk", "decode"))
    for role in ("--give", "--get", "--pull"):
        parser.add_argument(role, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    keep_freed_memory()
    if arguments.give:
        trio.run(give, Path(arguments.give[0]))
    elif arguments.get:
        cache, peer, address = arguments.get
        print(json.dumps(trio.run(get, Path(cache), peer, address)))
    elif arguments.pull:
        trio.run(pull, *arguments.pull)
    else:
        figures = measure_bulk(arguments.rounds, arguments.folder) if arguments.only != "decode" else {}
        if arguments.only != "bulk":
            figures |= measure_decode(arguments.rounds, arguments.model)
        print(json.dumps(figures) if arguments.json else "\n".join(f"{key}: {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
