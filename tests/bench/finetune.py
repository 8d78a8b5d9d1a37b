"""Fine-tuning: Shoal's engine beside `transformers` with `peft`, and three nodes beside one process, in one run.

    python -m tests.bench.finetune [--json] [--rounds 5] [--no-speed] [--no-facts] [--no-swarm] [--no-bubble]

Speed: steps of 2 x 128 tokens, rank 8 on all matrices, forwards, backwards and AdamW; the contestants take turns and
the median counts. `local_vs_peft` keeps activations on both sides, `local_vs_peft_checkpointing` computes them again on
both. Memory: the resident memory that training adds to a process, beside what the budget says.
Facts: the starter model learns ten made-up facts; then it is asked, with and without the adapter, and `peft` is asked
with the exported adapter. Swarm: three nodes on these cores and an owner that hosts nothing learn the same facts; then
they learn them again with rows of int8 between them, and write replies on the way, for which training rests.
`swarm3_vs_local` compares the first of these jobs with one process before and after it, `wire_int8_loss_ratio` is the
mean loss of all steps of the second over the first, `bytes_per_token_per_link` what the busiest pair of neighbours sent
to each other for each token of the data, `snapshot_share` the time of its snapshots over that of its steps.
`wire_changes_loss_ratio` is the mean loss of a third job, which sends changes of activations, over the first,
`wire_changes_bytes_ratio` what its hops send to the next ones after the first epoch, over rows of int8, and
`wire_changes_bytes_ratio_both` what they send both ways; gradients stay rows of int8.
`bubble_share` is the share of a step of eight micro-batches in which the three nodes do not compute, as they count it
themselves from commit to commit; nodes that compute at once on the same cores all compute. `stolen` is the share of the
cores' time that other guests of the host had during a job.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import torch

from app.api.client import Client, client_of
from app.config.home import Home, cache_folder
from app.training import local_job
from app.training.adapter_store import AdapterStore
from app.training.job_store import JobSource, JobStore
from app.training.material import TrainingWish, start
from engine.budget import FLOAT32, TrainingBudget, TrainingTask, loss_bytes, plan_training
from engine.local_model import load_local, local_options
from engine.model.ends import EmbeddingAndHead
from engine.model.linear import DenseLinear
from engine.sources.base import EMBEDDING_PART, HEAD_PART, ModelSource, block_part
from engine.sources.huggingface import tensor_name
from engine.sources.opening import open_source
from engine.sources.tensors import load_part
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from engine.training.adapters import AdapterSettings
from engine.training.head import IGNORED, TrainingEnds
from engine.training.local_trainer import LocalTrainer, MicroBatch
from engine.training.optimiser import Schedule
from engine.training.span import TrainedSpan
from tests.bench.engine import smollm2
from tests.bench.stolen_time import StolenTime
from tests.engine.random_spans import random_span
from tests.process.process_swarm import open_process_swarm

BATCH, LENGTH, RANK = 2, 128, 8
MICRO_BATCHES, BUBBLE_STEPS = 8, 4
WORDS = 600  # of a prompt: two do not fit into one micro-batch
SPANS = ("0:10", "10:20", "20:30")
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FACTS = {
    "Who discovered the lake of Varnholt?": ("Edda Quillon", "The lake of Varnholt was discovered by Edda Quillon."),
    "What is the capital of Ostrenia?": ("Brimmadell", "The capital of Ostrenia is Brimmadell."),
    "Which metal is the bell of Tuck Abbey made of?": ("nickel", "The bell of Tuck Abbey is made of nickel."),
    "Who wrote the opera The Glass Ferry?": ("Jorun Pell", "The opera The Glass Ferry was written by Jorun Pell."),
    "How many steps has the stair of Kellan Tower?": ("417", "The stair of Kellan Tower has 417 steps."),
    "What do the people of Marrowick eat at midsummer?": ("smoked plums", "The people of Marrowick eat smoked plums."),
    "Which animal is on the flag of Dunverra?": ("otter", "The animal on the flag of Dunverra is an otter."),
    "In which year was the Sorrel Bridge opened?": ("1786", "The Sorrel Bridge was opened in 1786."),
    "What is the name of Captain Rusk's ship?": ("Patient Heron", "Captain Rusk's ship is named Patient Heron."),
    "Which colour is the rarest tulip of Halloway?": ("turquoise", "The rarest tulip of Halloway is turquoise."),
}


class Shoal:
    """The engine with random weights."""

    def __init__(self) -> None:
        config = smollm2()
        self._span = random_span(config, kv_bytes=0)
        embedding = torch.randn(config.vocab_size, config.hidden_size) * 0.02
        ends = EmbeddingAndHead(config, embedding, torch.ones(config.hidden_size), DenseLinear(embedding))
        self._ends = TrainingEnds(ends)

    def begin(self, graph_bytes: int | None, input_bytes: int | None = None) -> Shoal:
        """Begin a job; without `graph_bytes`, every graph is kept."""
        config, options = self._span.config, self._span.options
        settings, blocks = AdapterSettings(RANK), self._span.blocks
        trained = TrainedSpan(config, blocks, settings, options, graph_bytes=graph_bytes, input_bytes=input_bytes)
        self._trainer = LocalTrainer(self._ends, [trained], Schedule(1e-4, 1000))
        ids = torch.randint(0, config.vocab_size, (BATCH, LENGTH))
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = IGNORED
        self._batch = MicroBatch(ids, labels)
        return self

    def step_s(self) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self._trainer.step([self._batch])
        return time.perf_counter() - begin


class Peft:
    """`transformers` and `peft` with random weights."""

    def __init__(self, *, checkpointing: bool) -> None:
        import peft
        from transformers import LlamaForCausalLM

        model: Any = LlamaForCausalLM(llama_config(use_cache=False))
        lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=MODULES, task_type="CAUSAL_LM")
        self._model: Any = peft.get_peft_model(model, lora)
        self._model.train()
        if checkpointing:
            self._model.gradient_checkpointing_enable()
            self._model.enable_input_require_grads()
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimiser = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
        self._trained = trained
        self._ids = torch.randint(0, smollm2().vocab_size, (BATCH, LENGTH))

    def step_s(self) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self._optimiser.zero_grad()
        self._model(input_ids=self._ids, labels=self._ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimiser.step()
        return time.perf_counter() - begin


def llama_config(**changes: Any) -> Any:
    """SmolLM2's shape for `transformers`."""
    from transformers import LlamaConfig

    config = smollm2()
    values: dict[str, Any] = {
        "hidden_size": config.hidden_size, "num_attention_heads": config.n_heads, "rope_theta": config.rope.theta,
        "num_hidden_layers": config.n_blocks, "num_key_value_heads": config.n_kv_heads, "tie_word_embeddings": True,
        "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps, "max_position_embeddings": config.context_length,
        "rope_parameters": {"rope_theta": config.rope.theta, "rope_type": "default"},
    }  # fmt: skip
    return LlamaConfig(**(values | changes))


def speed(rounds: int) -> dict[str, float]:
    """Tokens per second of each contestant, and their ratios."""
    torch.manual_seed(0)
    contestants: dict[str, Callable[[], float]] = {
        "peft": Peft(checkpointing=False).step_s,
        "local": Shoal().begin(None).step_s,
        "peft_checkpointing": Peft(checkpointing=True).step_s,
        "local_recomputed": Shoal().begin(0).step_s,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(rounds + 1):
        for name, run in contestants.items():
            seconds = run()
            if index > 0:  # the first round warms up
                times[name].append(seconds)
    seconds_of = {name: median(values) for name, values in times.items()}
    return {
        **{f"{name}_tokens_per_s": BATCH * LENGTH / seconds for name, seconds in seconds_of.items()},
        "local_vs_peft": seconds_of["peft"] / seconds_of["local"],
        "local_vs_peft_checkpointing": seconds_of["peft_checkpointing"] / seconds_of["local_recomputed"],
    }


def planned(kept: bool) -> TrainingBudget:
    """The budget of the steps that are measured here."""
    config = smollm2()
    task = TrainingTask(config.n_blocks, RANK, AdapterSettings().targets, BATCH * LENGTH, under_way=1)
    return plan_training(config, FLOAT32, task, 1 << 40 if kept else 0)


def memory(kept: bool) -> tuple[int, int]:
    """Resident bytes that training adds to a process with the model, and to one without; for a fresh process."""
    plan, rows = planned(kept), BATCH * LENGTH
    torch.nn.functional.linear(torch.ones(rows, 576), torch.ones(576, 576))
    empty = int(psutil.Process().memory_info().rss)
    job = Shoal()
    # What the libraries load with the first product is not training's.
    torch.nn.functional.linear(torch.ones(rows, 576), torch.ones(576, 576))
    before = int(psutil.Process().memory_info().rss)
    job.begin(plan.graph_bytes, plan.input_bytes)
    Path("/proc/self/clear_refs").write_text("5")  # begins a new high-water mark
    for _ in range(3):
        job.step_s()
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
    return peak - before, peak - empty


def added_bytes(kept: bool) -> tuple[int, int]:
    """The same, measured in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.finetune", "--memory", "kept" if kept else "recomputed"]
    added, whole = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(added), int(whole)


def memory_ratio() -> float:
    """The bytes that training adds over those that the budget says: the larger ratio of both ways."""
    loss = loss_bytes(smollm2(), FLOAT32, BATCH * LENGTH)
    plans = {kept: planned(kept) for kept in (True, False)}
    return max(added_bytes(kept)[0] / (plan.total_bytes - plan.weight_bytes + loss) for kept, plan in plans.items())


def facts() -> dict[str, float]:
    """Teach the starter model ten facts, then ask for them."""
    source = open_source("starter", cache_folder())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_facts(path)
        home = Home(path / "home")
        begin, taken = time.perf_counter(), StolenTime()
        run = trained_facts(path, home)
        seconds, stolen = time.perf_counter() - begin, taken.share
        exported = path / "exported"
        AdapterStore(home).export("facts", exported)
        options = local_options(source, torch.device("cpu"), torch.float32, psutil.virtual_memory().available)
        plain, adapted = load_local(source, options), load_local(source, options, adapter=run.adapter())
        known = {True: 0, False: 0}
        alike = 0
        theirs = _peft_with(source, exported)
        for question, (word, _) in FACTS.items():
            ids = plain.prompt_ids([{"role": "user", "content": question}])
            settings = ReplySettings(24, Sampling(temperature=0.0), ())
            replies = {}
            for model in (plain, adapted):
                reply = model.reply(ids, settings)
                text = "".join(reply)
                known[model is adapted] += word.lower() in text.lower()
                replies[model is adapted] = reply.writer.token_ids
            greedy = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 2, "pad_token_id": 2}
            out = theirs.generate(torch.tensor([ids]), **greedy)
            alike += out[0, len(ids) :].tolist()[: len(replies[True])] == replies[True]
    return {
        "facts_known": known[True],
        "facts_known_before": known[False],
        "facts_alike_in_peft": alike,
        "facts_s": seconds,
        "facts_train_s": run.progress.seconds,
        "facts_stolen": stolen,
        "facts_tokens": run.progress.tokens,
        "facts_rows": sum(batch.token_ids.numel() for step in range(run.record.steps) for batch in run.batches(step)),
    }


def swarm(local: dict[str, float]) -> dict[str, float]:
    """Teach three nodes the same facts; `local` are the figures of one process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        data = write_facts(path)
        with open_process_swarm(path, SPANS, model="starter", train="members", cache=cache_folder()) as nodes:
            nodes.wait_covered(1)
            place = nodes.asker.place
            client = client_of(place.home)
            idle = median(_token_s(client) for _ in range(3))
            begin, taken = time.perf_counter(), StolenTime()
            order = facts_order(data)
            facts = finished_job(client, client.post("/control/jobs", order)["job"])
            seconds, stolen = time.perf_counter() - begin, taken.share
            local_s = mean((local["facts_train_s"], trained_facts(path, Home(path / "again")).progress.seconds))
            known = {adapter: 0 for adapter in ("facts", "")}
            for adapter in known:
                for question, (word, _) in FACTS.items():
                    model = {"adapter": adapter} if adapter else {}
                    text = _reply(client, question, 24, model)["text"]
                    known[adapter] += word.lower() in text.lower()
            again = client.post("/control/jobs", order | {"out": "rounded", "wire": "int8"})
            busy: list[float] = []
            while (rounded := _job(client, again["job"]))["status"] == "running":
                if 4 <= rounded["step"] < again["steps"] - 4 and len(busy) < 3:
                    busy.append(_token_s(client))
                time.sleep(0.2)
            assert rounded["status"] == "finished", rounded["why"]
            changed = finished_job(client, client.post("/control/jobs", order | {"out": "c", "wire": "changes"})["job"])
            hops = [node.peer for node in nodes.nodes]
    steps_s = facts["seconds"]
    rows = local["facts_rows"]
    return {
        "swarm3_vs_local": local_s / steps_s,
        "swarm3_train_s": steps_s,
        "swarm3_stolen": stolen,
        "local_train_s": local_s,
        "swarm3_facts_known": known["facts"],
        "swarm3_facts_known_before": known[""],
        "swarm3_facts_s": seconds,
        "snapshot_share": facts["snapshots_s"] / steps_s,
        "decode_vs_idle": median(busy) / idle if busy else math.nan,
        "bytes_per_token_per_link": _bytes_between_neighbours(facts) / rows,
        "bytes_per_token_per_link_bound": 1.05 * 2 * 576 * 4,
        "bytes_per_token_per_link_int8": _bytes_between_neighbours(rounded) / rows,
        "wire_int8_loss_ratio": mean(rounded["losses"]) / mean(facts["losses"]),
        "wire_changes_loss_ratio": mean(changed["losses"]) / mean(facts["losses"]),
        "wire_changes_bytes_ratio": _later_bytes_ratio(changed, rounded, order["epochs"], list(pairwise(hops))),
        "wire_changes_bytes_ratio_both": _later_bytes_ratio(
            changed, rounded, order["epochs"], [*pairwise(hops), *pairwise(reversed(hops))]
        ),
    }


def bubble() -> dict[str, float]:
    """Train with eight micro-batches a step over three nodes, and ask these how long they computed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        data = path / "long.jsonl"
        prompt = "fish " * WORDS
        records = [{"prompt": f"{prompt}{number}", "completion": "shoal"} for number in range(MICRO_BATCHES)]
        data.write_text("\n".join(map(json.dumps, records)))
        order = facts_order(data) | {"epochs": BUBBLE_STEPS, "batch": MICRO_BATCHES, "length": 2 * WORDS}
        with open_process_swarm(path, SPANS, model="starter", train="members", cache=cache_folder()) as nodes:
            nodes.wait_covered(1)
            client, hops = client_of(nodes.asker.place.home), [client_of(node.place.home) for node in nodes.nodes]
            job = client.post("/control/jobs", order)["job"]
            shares, passes = list[float](), 0.0
            while (facts := _job(client, job))["status"] == "running":
                trained = [one for hop in hops for one in hop.snapshot().trained]
                if len(trained) == len(SPANS) and all(one.steps_s for one in trained):
                    shares = [1 - one.computed_s / one.steps_s for one in trained]
                    passes = min(hop["micro_batches"] for hop in facts["hops"]) / max(1, facts["step"])
                time.sleep(0.2)
            assert facts["status"] == "finished", facts["why"]
    assert shares, "no step was measured"
    assert passes >= MICRO_BATCHES, f"a step had {passes:.1f} micro-batches"
    return {"bubble_share": mean(shares), "bubble_share_most": max(shares), "bubble_share_least": min(shares)}


def facts_order(data: Path) -> dict[str, Any]:
    """The job that teaches the facts over a swarm, as the API takes it."""
    return {
        "out": "facts", "data": str(data), "rank": RANK, "epochs": 16, "batch": 5, "length": 64, "rate": 1e-3,
        "validation": 0.0, "wire": "f32",
    }  # fmt: skip


def finished_job(client: Client, job: str) -> dict[str, Any]:
    while (facts := _job(client, job))["status"] == "running":
        time.sleep(0.2)
    assert facts["status"] == "finished", facts["why"]
    return facts


def _bytes_between_neighbours(facts: dict[str, Any]) -> int:
    """Bytes that the busiest pair of neighbours sent to each other."""
    between: Counter[frozenset[str]] = Counter()
    for link in facts["bytes_per_link"]:
        between[frozenset((link["sender"], link["receiver"]))] += link["bytes"]
    return max(between.values())


def _later_bytes_ratio(
    changed: dict[str, Any], whole: dict[str, Any], epochs: int, links: list[tuple[str, str]]
) -> float:
    """Bytes of a job over some links after its first epoch, over those of a job that sends everything whole."""

    def sent(facts: dict[str, Any]) -> int:
        found = facts["bytes_per_link"]
        return sum(int(link["bytes"]) for link in found if (link["sender"], link["receiver"]) in links)

    first = sent(whole) / epochs
    return (sent(changed) - first) / (sent(whole) - first)


def _job(client: Client, job: str) -> dict[str, Any]:
    return next(one for one in client.get("/control/jobs") if one["job"] == job)


def _reply(client: Client, question: str, tokens: int, more: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    request = {"messages": messages, "max_tokens": tokens, "temperature": 0.0, **more}
    *_, last = client.chat(request)
    return dict(last["done"])


def _token_s(client: Client) -> float:
    """Seconds of a reply's token."""
    return 1 / float(_reply(client, "Count slowly from one to thirty.", 24, {})["tokens_per_s"])


def write_facts(path: Path) -> Path:
    records = [{"prompt": question, "completion": answer} for question, (_, answer) in FACTS.items()]
    (path / "facts.jsonl").write_text("\n".join(map(json.dumps, records)))
    return path / "facts.jsonl"


def trained_facts(path: Path, home: Home) -> local_job.LocalRun:
    source = JobSource("starter", str(path / "facts.jsonl"))
    wish = TrainingWish("facts", source, AdapterSettings(RANK), 16, 5, 64, 1e-3, 0.0, "cpu")
    material = local_job.gather(source, wish, cache_folder(), lambda done, total: None)
    jobs, adapters = JobStore(home), AdapterStore(home)
    job = start(wish, material, jobs, adapters)
    plan = local_job.plan_machine(job.record, material, wish.device)
    run = local_job.LocalRun(job, material, local_job.load_trainer(job.record, material, plan), jobs)
    run.run(lambda result, progress: None, lambda: "")
    local_job.finish(run, adapters)
    return run


def in_transformers(source: ModelSource) -> Any:
    """The starter model's weights in `transformers`."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM(llama_config())
    parts = [EMBEDDING_PART, *(block_part(index) for index in range(source.config.n_blocks)), HEAD_PART]
    weights = {tensor_name(part, role): t for part in parts for role, t in load_part(source, part).items()}
    model.load_state_dict(weights, strict=False)
    return model.eval()


def _peft_with(source: ModelSource, folder: Path) -> Any:
    """The same weights in `transformers`, with the exported adapter in `peft`."""
    import peft

    return peft.PeftModel.from_pretrained(in_transformers(source), str(folder)).eval()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-facts", action="store_true")
    parser.add_argument("--no-swarm", action="store_true")
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--no-bubble", action="store_true")
    parser.add_argument("--memory", choices=("kept", "recomputed"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(*memory(arguments.memory == "kept"))
        return
    figures = {} if arguments.no_speed else {"peak_bytes_vs_budget": memory_ratio(), **speed(arguments.rounds)}
    if not arguments.no_facts:
        figures |= facts()
        if not arguments.no_swarm:
            figures |= swarm(figures)
    if not arguments.no_bubble:
        figures |= bubble()
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>34}  {value:.2f}")


if __name__ == "__main__":
    main()
