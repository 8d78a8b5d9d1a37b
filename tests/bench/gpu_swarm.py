"""Whole nodes on one CUDA card, as a user meets them: do they start, keep their memory cap, and how fast are they?

    python -m tests.bench.gpu_swarm [--json] [--cap 7] [--mixed 120]

Three nodes of `--cap` GB share a random model of Llama-8B's shape in bf16, then one node holds all of it. Nothing warms
them up but their own start, so that the first figures are those of a first user. With `--mixed`, streams come and
go for so many seconds, with prompts of 10 to 6000 tokens and some of them cancelled, on the node alone.

Needs 17 GB of disk. Three processes take turns on the card; a hop takes about half a millisecond longer than its blocks
alone, and NVIDIA's MPS, with which they need not take turns, does not change that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pynvml
import torch
from safetensors.torch import save_file

from app.api.client import Client, Hangup, client_of
from app.core.errors import AppError
from engine.sources.opening import open_source
from tests.process.node_process import Place, Serving, wait_until

VOCAB = 264
READY_S = 240.0  # a first start compiles kernels
STREAMS = (1, 8, 16, 32)
MIXED_STREAMS = (1, 8, 20, 40)
LONG_WORDS = 330  # about 3000 tokens of the tiny model's tokenizer


@dataclass(frozen=True)
class Shape:
    """The numbers of a model's blocks."""

    blocks: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int = 8
    head_dim: int = 128


LLAMA_8B = Shape(32, 4096, 14336, 32)


@dataclass
class Heard:
    """One reply as its reader saw it."""

    times: list[float] = field(default_factory=list)  # of each piece
    done: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    hung_up: bool = False  # by its reader

    @property
    def gaps(self) -> list[float]:
        """Seconds between the pieces."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def write_model(folder: Path, cache: Path, shape: Shape = LLAMA_8B) -> None:
    """Write a random model of a shape, one file for each block, with the tiny model's tokenizer."""
    tiny = open_source("tiny-random", cache)
    config_file = tiny.parts["embedding"][0].file.parent / "config.json"
    folder.mkdir()
    for file in config_file.parent.glob("*.json"):
        if "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads(config_file.read_text()) | {
        "num_hidden_layers": shape.blocks, "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": VOCAB, "torch_dtype": "bfloat16", "max_position_embeddings": 8192, "rope_theta": 500_000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator("cuda").manual_seed(1)
    files: dict[str, str] = {}

    def matrix(*size: int) -> torch.Tensor:
        return (torch.randn(*size, device="cuda", generator=generator) * 0.02).bfloat16().cpu()

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for block in range(shape.blocks):
        prefix = f"model.layers.{block}."
        shapes = {
            "self_attn.q_proj": (query, shape.hidden), "self_attn.k_proj": (key, shape.hidden),
            "self_attn.v_proj": (key, shape.hidden), "self_attn.o_proj": (shape.hidden, query),
            "mlp.gate_proj": (shape.inner, shape.hidden), "mlp.up_proj": (shape.inner, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.inner),
        }  # fmt: skip
        tensors = {f"{prefix}{name}.weight": matrix(*size) for name, size in shapes.items()}
        norms = {f"{prefix}{name}.weight": ones.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        write(f"block-{block:02d}.safetensors", tensors | norms)
    ends = {"model.embed_tokens.weight": matrix(VOCAB, shape.hidden), "lm_head.weight": matrix(VOCAB, shape.hidden)}
    # The end is never the likeliest token: a reply that ended by itself would leave fewer streams than are counted.
    # Nor is a byte that is no character by itself: its piece of text would wait for the next token's.
    ends["lm_head.weight"][[config["eos_token_id"], *range(128, VOCAB)]] = 0
    write("ends.safetensors", ends | {"model.norm.weight": ones.clone()})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.cuda.empty_cache()


def used_mib(nodes: Sequence[Serving]) -> int:
    """The memory of the node that holds the most, as nvidia-smi would say; starting that holds up the card's work."""
    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    held: dict[int, int] = {
        own.pid: own.usedGpuMemory >> 20 for own in pynvml.nvmlDeviceGetComputeRunningProcesses(card)
    }
    return max(held.get(node.process.pid, 0) for node in nodes)


@contextlib.contextmanager
def serving(place: Place, cap: str, **variables: str) -> Iterator[tuple[Serving, float]]:
    """A node, and the seconds until it was ready."""
    began = time.monotonic()
    with Serving(place, "--discovery=invite", max_vram=cap, **variables) as node:
        node.ready(READY_S)
        yield node, round(time.monotonic() - began, 1)


@contextlib.contextmanager
def serving_together(
    places: Sequence[Place], cap: str, **variables: str
) -> Iterator[tuple[list[Serving], list[float]]]:
    """Nodes of the first one's swarm that hold all its blocks, and the seconds until each was ready."""
    nodes: list[Serving] = []
    ready: list[float] = []
    with contextlib.ExitStack() as stack:
        for place in places:
            node, seconds = stack.enter_context(serving(place, cap, **variables))
            nodes.append(node)
            ready.append(seconds)
            variables.setdefault("SHOAL_INVITE", places[0].shoal("invite").out.strip().splitlines()[-1])
        client = client_of(places[0].home)
        wait_until(lambda: all(block["holders"] for block in client.get("/control/blocks")), "every block is held")
        yield nodes, ready


def ask(client: Client, text: str, tokens: int, heard: Heard | None = None, hangup: Hangup | None = None) -> Heard:
    """A greedy reply to its end, or until it is hung up."""
    heard = heard or Heard()
    request = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0.0}
    try:
        for piece in client.chat(request, hangup=hangup):
            if "done" in piece:
                heard.done = piece["done"]
            elif "text" in piece:
                heard.times.append(time.perf_counter())
    except AppError as error:
        heard.refused = str(error)
    return heard


def stream_speed(client: Client, count: int, tokens: int = 128) -> float:
    """Tokens per second of so many replies at once."""
    heard = [Heard() for _ in range(count)]
    threads = [
        threading.Thread(target=ask, args=(client, f"Hello there {number}", tokens, own))
        for number, own in enumerate(heard)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    assert all(len(own.done["token_ids"]) == tokens for own in heard), "a reply was cut short"
    return count * tokens / seconds


def speeds(client: Client) -> dict[str, float]:
    """The figures of one node or swarm, in the order in which a first user would meet them."""
    chats = [ask(client, "Hello there", 128).done for _ in range(3)]
    longs = [ask(client, f"{number} " + "abcdefgh " * LONG_WORDS, 8).done for number in range(3)]
    figures = {
        "first_chat_ttft_s": chats[0]["ttft_s"],
        "later_chat_ttft_s": chats[2]["ttft_s"],
        "chat_tokens_per_s": median(chat["tokens_per_s"] for chat in chats),
        "first_long_ttft_s": longs[0]["ttft_s"],
        "later_long_ttft_s": longs[2]["ttft_s"],
        "first_long_ratio": longs[0]["ttft_s"] / longs[2]["ttft_s"],
        "longest_gap_s": max(reply["longest_gap_s"] for reply in (*chats, *longs)),
    }
    for count in STREAMS:
        figures[f"streams_{count}_tokens_per_s"] = stream_speed(client, count)
    return figures


def mixed(client: Client, node: Serving, seconds: float) -> dict[str, float]:
    """Streams that come and go: refusals, memory, and the gaps between tokens, for each number of streams."""
    figures: dict[str, float] = {}
    most_mib = refused = cancelled = replies = 0
    for count in MIXED_STREAMS:
        heard: list[Heard] = []
        ends_at = time.monotonic() + seconds / len(MIXED_STREAMS)

        def stream(number: int, heard: list[Heard] = heard, ends_at: float = ends_at) -> None:
            rng = random.Random(number)
            client = client_of(node.place.home)
            while time.monotonic() < ends_at:
                words = int(math.exp(rng.uniform(math.log(1), math.log(650))))
                hangup, own = Hangup(), Heard()
                heard.append(own)
                if rng.random() < 0.2:
                    own.hung_up = True
                    threading.Timer(rng.uniform(0.05, 1.0), hangup.hang_up).start()
                ask(client, f"{number} " + "abcdefgh " * words, 64, own, hangup)

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most_mib = max(most_mib, used_mib([node]))
            time.sleep(0.5)
        gaps = sorted(gap for own in heard for gap in own.gaps)
        figures[f"mixed_{count}_gap_p50_s"] = median(gaps)
        figures[f"mixed_{count}_gap_p99_ratio"] = quantiles(gaps, n=100)[98] / median(gaps)
        cancelled += sum(own.hung_up for own in heard)
        refused += sum(bool(own.refused) and not own.hung_up for own in heard)
        replies += len(heard)
    return figures | {
        "mixed_replies": replies,
        "mixed_cancelled": cancelled,
        "mixed_refused": refused,
        "mixed_memory_mib": most_mib,
    }


def measure(folder: Path, cap: int, mixed_s: float) -> dict[str, Any]:
    """All figures of one run."""
    cache, model = folder / "cache", folder / "big"
    write_model(model, cache)
    places = [Place(folder / f"node{number}", cache) for number in range(3)]
    tiny = Place(folder / "tiny", cache)
    assert tiny.shoal("create", "tiny", "--model", "tiny-random").status == 0
    assert places[0].shoal("create", "big", "--model", str(model), patience_s=READY_S).status == 0
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "cap_mib": round(cap * 10**9 / 2**20)}
    for key in ("tiny_first_ready_s", "tiny_ready_s"):
        with serving(tiny, "1GB") as (_, figures[key]):
            pass
    with serving_together(places, f"{cap}GB") as (nodes, ready):
        client = client_of(places[0].home)
        figures |= {"ready_s": ready, "memory_mib": used_mib(nodes)}
        figures |= {f"swarm_{name}": value for name, value in speeds(client).items()}
        figures["loaded_memory_mib"] = used_mib(nodes)
    with serving(places[0], "60GB") as (node, figures["alone_ready_s"]):
        client = client_of(places[0].home)
        figures |= {f"alone_{name}": value for name, value in speeds(client).items()}
        if mixed_s:
            figures |= mixed(client, node, mixed_s)
    return figures


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cap", type=int, default=7, help="memory of each of the three nodes, in GB")
    parser.add_argument("--mixed", type=float, default=0.0, help="seconds of mixed load on the node alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    with tempfile.TemporaryDirectory(prefix="shoal-gpu-") as folder:
        figures = measure(Path(folder), args.cap, args.mixed)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>32}  {value:.3f}" if isinstance(value, float) else f"{name:>32}  {value}")


if __name__ == "__main__":
    main()
