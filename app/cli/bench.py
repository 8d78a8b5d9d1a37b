"""`shoal bench`: how fast this machine runs a model's blocks."""

from __future__ import annotations

import argparse
import dataclasses

from app.cli.chat import load_model
from app.cli.command import Command, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and where."""
    parser.add_argument("--model", default="starter", metavar="M", help="starter, tiny-random, a folder or a GGUF file")
    parser.add_argument("--device", metavar="D", help="cpu, cuda:0, … (default: the best there is)")


def run_bench(arguments: argparse.Namespace) -> int:
    """Load a whole model and time its blocks."""
    from engine.measure import measure_span

    model = load_model(arguments.model, arguments.device)
    throughput = measure_span(model.span)
    facts = {
        "model": arguments.model,
        "device": str(model.span.options.device),
        "dtype": str(model.span.options.dtype).removeprefix("torch."),
        "blocks": model.config.n_blocks,
        "weight_bytes": model.span.weight_bytes,
        **dataclasses.asdict(throughput),
    }
    if arguments.json:
        print_json(facts)
        return 0
    print(f"{facts['model']}: {facts['blocks']} blocks on {facts['device']} in {facts['dtype']}")
    print(f"  decode           {throughput.decode_tokens_per_s:8.1f} tokens/s")
    if throughput.batch8_tokens_per_s is not None:
        print(f"  decode, 8 chats  {throughput.batch8_tokens_per_s:8.1f} tokens/s in all")
    print(f"  prompt           {throughput.prefill_tokens_per_s:8.1f} tokens/s")
    return 0


COMMANDS = (
    Command("bench", "measure how fast this machine runs a model", run_bench, add_arguments, prints_facts=True),
)
