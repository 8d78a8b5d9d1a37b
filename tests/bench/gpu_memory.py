"""Nodes on a CUDA card whose memory others want: two devices, a program that fills the card, two nodes at once.

    python -m tests.bench.gpu_memory [--json] [--blocks 32]

Writes a random model of Llama-8B's shape (0.44 GB a block). Then, each with nodes of its own:

- one node on the card, on the card named twice, and on the card and the CPU: do they write the same tokens, how fast?
- a node without a limit, and a program that takes the card's memory but for a little: after how many seconds has the
  node given blocks back, how much is free then, does it answer, and was there an error?
- two nodes without limits that start at the same moment: which blocks does each host in the end?
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from app.api.client import client_of
from tests.bench.gpu_swarm import LLAMA_8B, READY_S, ask, used_mib, write_model
from tests.process.node_process import Place, Serving

GIB = 2**30
SETTLE_S = 90.0  # for two nodes that load at once

# Takes all of the card's memory but `sys.argv[1]` bytes, says so, and holds it until its input ends.
HOG = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def hog(left_bytes: int) -> Iterator[int]:
    """A program that leaves so much of the card's memory; yields what is really left."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOG, str(left_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.communicate()


@contextlib.contextmanager
def node(place: Place, *flags: str, cap: str = "", **variables: str) -> Iterator[Serving]:
    """A node that is ready."""
    with Serving(place, "--discovery=invite", *flags, max_vram=cap or "1000GB", **variables) as serving:
        serving.ready(READY_S)
        yield serving


def split(place: Place, figures: dict[str, Any]) -> None:
    """One node on one and on two devices."""
    said: dict[str, list[int]] = {}
    for name, devices in (("one", "cuda:0"), ("twice", "cuda:0,cuda:0"), ("with_cpu", "cuda:0,cpu")):
        with node(place, f"--device={devices}", cap="30GB"):
            tokens = 32 if name == "with_cpu" else 128
            heard = ask(client_of(place.home), "Hello there", tokens)
            status = place.facts("status")
            said[name] = heard.done.get("token_ids", [])
            figures[f"split_{name}_tokens_per_s"] = heard.done.get("tokens_per_s")
            figures[f"split_{name}_blocks"] = [[d["id"], d["start"], d["stop"]] for d in status["devices"]]
            figures[f"split_{name}_error"] = heard.refused
    figures["split_twice_same_tokens"] = said["one"] == said["twice"]
    figures["split_with_cpu_same_tokens"] = sum(a == b for a, b in zip(said["one"], said["with_cpu"], strict=False))


def blocks_of(place: Place) -> int:
    """How many blocks a node serves now."""
    status = place.facts("status")
    return 0 if status["start"] is None or status["state"] != "serving" else status["stop"] - status["start"]


def squeeze(place: Place, figures: dict[str, Any]) -> None:
    """A program takes the memory around a node that hosts the whole model, first some of it and then all."""
    total = torch.cuda.get_device_properties(0).total_memory
    with node(place, "--device=cuda:0", cap="40GB") as serving:
        figures["squeeze_blocks"] = whole = blocks_of(place)
        for name, left in (("some", int(0.02 * total)), ("all", GIB // 8)):
            before = blocks_of(place)
            with hog(left) as free:
                began = time.monotonic()
                while blocks_of(place) == before and time.monotonic() < began + 60:
                    time.sleep(0.1)
                figures[f"squeeze_{name}_s"] = time.monotonic() - began
                time.sleep(5)
                figures[f"squeeze_{name}_left_gb"] = free / 1e9
                figures[f"squeeze_{name}_blocks"] = blocks_of(place)
                figures[f"squeeze_{name}_free_gb"] = torch.cuda.mem_get_info()[0] / 1e9
                figures[f"squeeze_{name}_node_mib"] = used_mib([serving])
                status = place.facts("status")
                figures[f"squeeze_{name}_state"] = f"{status['state']}: {status['reason']}"
                heard = ask(client_of(place.home), "Hello there", 8)
                figures[f"squeeze_{name}_answer"] = heard.refused or len(heard.times)
        began = time.monotonic()
        while blocks_of(place) < whole and time.monotonic() < began + SETTLE_S:
            time.sleep(0.5)
        figures["squeeze_back_s"], figures["squeeze_back_blocks"] = time.monotonic() - began, blocks_of(place)
        figures["squeeze_alive"] = serving.process.poll() is None
        figures["squeeze_errors"] = [line for line in serving.errors if "ERROR" in line or "Traceback" in line]


def two_at_once(places: list[Place], figures: dict[str, Any]) -> None:
    """Two nodes start at the same moment, and what others hold leaves room for one and a half of them."""
    whole_bytes = figures["squeeze_blocks"] * 560 * 10**6
    with hog(int(1.5 * whole_bytes)), contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Serving(p, "--discovery=invite", max_vram="1000GB")) for p in places]
        began = time.monotonic()
        for each in nodes:
            each.ready(READY_S)
        while time.monotonic() < began + SETTLE_S and not all(blocks_of(place) for place in places):
            time.sleep(0.5)
        time.sleep(5)
        figures["two_s"] = time.monotonic() - began - 5
        figures["two_blocks"] = [blocks_of(place) for place in places]
        figures["two_free_gb"] = torch.cuda.mem_get_info()[0] / 1e9
        figures["two_alive"] = all(each.process.poll() is None for each in nodes)
        figures["two_errors"] = [line for each in nodes for line in each.errors if "ERROR" in line]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=32, help="blocks of the model")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    with tempfile.TemporaryDirectory(prefix="shoal-gpu-") as name:
        folder = Path(name)
        write_model(folder / "big", folder / "cache", replace(LLAMA_8B, blocks=args.blocks))
        places = [Place(folder / f"node{number}", folder / "cache") for number in range(2)]
        for place in places:
            created = place.shoal("create", "big", "--model", str(folder / "big"), patience_s=READY_S)
            assert created.status == 0, created.err
        split(places[0], figures)
        print(json.dumps(figures), file=sys.stderr, flush=True)
        squeeze(places[0], figures)
        print(json.dumps(figures), file=sys.stderr, flush=True)
        two_at_once(places, figures)
    if args.json:
        print(json.dumps(figures))
    else:
        for key, value in figures.items():
            print(f"{key:>32}  {value:.3f}" if isinstance(value, float) else f"{key:>32}  {value}")


if __name__ == "__main__":
    main()
