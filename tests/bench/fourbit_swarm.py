"""A model that three small cards hold in 4 bits alone: whole nodes on one CUDA card, each held to a cap.

    python -m tests.bench.fourbit_swarm [--json]

`blocks_6gb`    blocks of Llama-8B's shape that a node hosts in 6 GB, by the setting `weights`
`cap_gb`        the smallest cap, in half gigabytes, with which three nodes host a model of 14 billion weights in 4 bits
`blocks`        blocks of that model, of its 48, that a node hosts within that cap, by the setting `weights`
Three nodes of that cap, with `weights = int4`, then answer: seconds until each was ready, tokens/s of a chat and of
eight at once, and the memory of the largest node. Needs 28 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any, get_args

import torch

from app.api.client import client_of
from engine.hosting import HostingWish, Weights, plan_hosting
from engine.sources.opening import open_source
from tests.bench.cuda import llama_8b
from tests.bench.gpu_swarm import READY_S, Shape, ask, serving_together, stream_speed, used_mib, write_model
from tests.process.node_process import Place

QWEN_14B = Shape(48, 5120, 13824, 40)


def blocks_in(config: Any, cap_bytes: int) -> dict[str, int]:
    """Blocks of a bf16 model that fit beside their cache, by the setting `weights`."""
    settings = [weights for weights in get_args(Weights) if weights != "auto"]
    return {
        weights: plan_hosting(config, "BF16", HostingWish("cuda", cap_bytes, weights)).blocks for weights in settings
    }


def measure(folder: Path) -> dict[str, Any]:
    """All figures of one run."""
    cache, model = folder / "cache", folder / "big"
    write_model(model, cache, QWEN_14B)
    config = open_source(str(model), cache).config
    cap = next(half / 2 for half in count(4) if 3 * blocks_in(config, half * 10**9 // 2)["int4"] >= config.n_blocks)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "blocks_6gb": blocks_in(llama_8b(32), 6 * 10**9),
        "cap_gb": cap,
        "blocks": blocks_in(config, int(cap * 10**9)),
        "cap_mib": round(cap * 10**9 / 2**20),
    }
    print(figures, file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
    places = [Place(folder / f"node{number}", cache) for number in range(3)]
    assert places[0].shoal("create", "big", "--model", str(model), patience_s=READY_S).status == 0
    with serving_together(places, f"{cap}GB", SHOAL_WEIGHTS="int4") as (nodes, ready):
        client = client_of(places[0].home)
        ask(client, "Hello there", 32)
        figures |= {
            "ready_s": ready,
            "chat_tokens_per_s": ask(client, "Hello there", 128).done["tokens_per_s"],
            "streams_8_tokens_per_s": stream_speed(client, 8),
            "memory_mib": used_mib(nodes),
        }
    return figures


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    with tempfile.TemporaryDirectory(prefix="shoal-gpu-") as folder:
        figures = measure(Path(folder))
    print(json.dumps(figures) if args.json else "\n".join(f"{name:>32}  {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
