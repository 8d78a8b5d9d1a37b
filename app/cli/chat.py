"""`shoal chat`: one question or a conversation, streamed to the terminal.

The running node's swarm answers or, with --local, a whole model in this process (`engine.local_model`).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.cli.models import progress_on_stderr
from app.core.errors import NotRunning, UsageError
from app.core.terminal_text import without_controls

if TYPE_CHECKING:
    from app.api.client import Client
    from engine.local_model import LocalModel, LocalReply
    from engine.text.reply import ReplySettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt, the model and the sampling options."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="one question; without it, a conversation")
    parser.add_argument("--local", action="store_true", help="run the whole model in this process")
    parser.add_argument("--model", default="starter", metavar="M", help="starter, tiny-random, a folder or a GGUF file")
    parser.add_argument("--device", metavar="D", help="cpu, cuda:0, … (default: the best available)")
    parser.add_argument("--system", metavar="TEXT", help="a system message at the start")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="the longest reply (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default: 0.7)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest tokens; 0: all")
    parser.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="choose among the likeliest tokens that make up P"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="leave out tokens below P times the likeliest"
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1 repeats less")
    words = "end the reply at this text (repeatable)"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=words)
    parser.add_argument(
        "--private-blocks",
        type=int,
        metavar="K",
        help="the first and last K blocks run only here or on peers that the setting `trusted` names",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same reply")


def run_chat(arguments: argparse.Namespace) -> int:
    """Answer one prompt, or each line of the input until it ends."""
    if arguments.prompt is None and arguments.json:
        raise UsageError("--json answers a single prompt: give it as an argument")
    conversation = local_conversation(arguments) if arguments.local else swarm_conversation(arguments)
    if arguments.prompt is not None:
        conversation.say(arguments.prompt, as_json=arguments.json)
        return 0
    for line in prompts():
        conversation.say(line, as_json=False)
    return 0


def local_conversation(arguments: argparse.Namespace) -> Conversation:
    """Start a conversation with a whole model in this process."""
    settings = reply_settings(arguments)
    return Conversation(load_model(arguments.model, arguments.device), settings, arguments.system)


def reply_settings(arguments: argparse.Namespace) -> ReplySettings:
    """Return the reply's settings from the command line; without --seed the clock gives the seed."""
    from engine.text.reply import ReplySettings
    from engine.text.sampler import Sampling

    seed = time.time_ns() if arguments.seed is None else arguments.seed
    sampling = Sampling(
        arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p, arguments.repetition_penalty, seed
    )
    return ReplySettings(arguments.max_tokens, sampling, tuple(arguments.stop))


def load_model(name: str, device_name: str | None) -> LocalModel:
    """Open a model and load all of it on a device, with progress on stderr."""
    import torch

    from app.config.home import cache_folder
    from engine.device.dtypes import pick_dtype
    from engine.device.probe import find_device, probe_devices
    from engine.local_model import load_local, local_options
    from engine.sources.opening import open_source

    device = find_device(device_name, probe_devices())
    with progress_on_stderr(name) as progress:
        source = open_source(name, cache_folder(), progress)
    options = local_options(source, torch.device(device.id), pick_dtype(device.id), device.free_bytes)
    return load_local(source, options)


def prompts() -> Iterator[str]:
    """Yield the non-empty lines that the user types, until the end of the input or `/quit`."""
    interactive = sys.stdin.isatty()
    if interactive:
        try:
            import readline  # noqa: F401  (gives `input` line editing and history)
        except ImportError:
            pass  # Python on native Windows has no `readline`; the console there edits lines itself

        print("Type a message; ctrl+d or /quit ends.", file=sys.stderr)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line:
            yield line


class Conversation:
    """The messages so far; a model in this process answers."""

    def __init__(self, model: LocalModel, settings: ReplySettings, system: str | None) -> None:
        self._model = model
        self._settings = settings
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str, *, as_json: bool) -> None:
        """Print the reply to one message, and append both to the conversation."""
        self._messages.append({"role": "user", "content": text})
        prompt_ids = self._model.prompt_ids(self._messages)
        reply = self._model.reply(prompt_ids, self._settings)
        pieces, longest_gap_s = [], 0.0
        last = None
        for piece in reply:
            now = time.perf_counter()
            longest_gap_s = max(longest_gap_s, now - last) if last is not None else 0.0
            last = now
            pieces.append(piece)
            if not as_json:
                print(without_controls(piece), end="", flush=True)
        answer = "".join(pieces)
        self._messages.append({"role": "assistant", "content": answer})
        if as_json:
            print_json(reply_facts(reply, answer, len(prompt_ids), longest_gap_s, self._model.config.n_blocks))
        else:
            print()


def reply_facts(
    reply: LocalReply, text: str, prompt_tokens: int, longest_gap_s: float, blocks: int
) -> dict[str, object]:
    """Return the fields of `chat --json` for a reply of a model in this process."""
    assert reply.stats is not None, "the reply was read to its end"
    return {
        "text": text,
        "token_ids": reply.writer.token_ids,
        "prompt_tokens": prompt_tokens,
        "finish_reason": reply.writer.finish_reason,
        **dataclasses.asdict(reply.stats),
        "recoveries": 0,
        "moves": 0,
        "longest_gap_s": longest_gap_s,
        "route": [{"peer": "local", "start": 0, "stop": blocks}],
    }


class SwarmConversation:
    """The messages so far; the running node's swarm answers."""

    def __init__(self, client: Client, settings: dict[str, Any], system: str | None) -> None:
        self._client = client
        self._settings = settings
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str, *, as_json: bool) -> None:
        """Print the reply to one message, and append both to the conversation."""
        messages = [*self._messages, {"role": "user", "content": text}]
        for piece in self._client.chat({"messages": messages, **self._settings}):
            if "done" in piece:
                self._messages = [*messages, {"role": "assistant", "content": piece["done"]["text"]}]
                if as_json:
                    print_json(piece["done"])
                else:
                    print()
            elif not as_json:
                print(without_controls(piece["text"]), end="", flush=True)


def swarm_conversation(arguments: argparse.Namespace) -> SwarmConversation:
    """Start a conversation with the running node's swarm; raises `NotRunning` with the alternatives if no node runs."""
    from app.api.client import running_client

    client = running_client(arguments.home)
    if client is None:
        raise NotRunning(
            f"no node runs in {arguments.home}: start one with `shoal serve`, "
            "or add --local to run the whole model in this process"
        )
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "private_blocks")
    settings = {name: getattr(arguments, name) for name in names}
    settings["seed"] = (time.time_ns() if arguments.seed is None else arguments.seed) % 2**63
    return SwarmConversation(client, settings, arguments.system)


COMMANDS = (Command("chat", "talk to a model", run_chat, add_arguments, prints_facts=True),)
