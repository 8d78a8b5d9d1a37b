"""`shoal chat`: one question or a conversation, streamed to the terminal.

The running node's swarm answers or, with --local, a whole model in this process (`engine.local_model`).
`app.cli.conversation` is the conversation itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.command import Command
from app.cli.models import progress_on_stderr
from app.cli.parser import MODELS, number_argument
from app.core.errors import AppError, NotRunning, UsageError
from app.core.terminal_text import short_peer, with_names, without_controls
from app.routing.route import MAX_PRIVATE_BLOCKS

if TYPE_CHECKING:
    from app.api.client import Client
    from app.cli.conversation import Chat
    from engine.config import ModelConfig
    from engine.local_model import LocalModel, LocalReply
    from engine.text.reply import ReplySettings
    from ui.state.reply_stream import ReplyProgress


def _stop_texts(text: str) -> list[str]:
    """Parse the value of `/set stop`: one text that ends a reply."""
    return [text]


# The sampling settings of the command line and of `/set`, with their parsers.
SAMPLING: dict[str, Callable[[str], Any]] = {
    "max_tokens": number_argument(int, 1, 10**6),
    "temperature": number_argument(float, 0.0, 2.0),
    "top_k": number_argument(int, 0, 10**6),
    "top_p": number_argument(float, 0.0, 1.0, above=True),
    "min_p": number_argument(float, 0.0, 1.0),
    "repetition_penalty": number_argument(float, 0.0, 10.0, above=True),
    "stop": _stop_texts,
    "private_blocks": number_argument(int, 0, MAX_PRIVATE_BLOCKS),
    "seed": number_argument(int, 0, 2**63 - 1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt, the model and the sampling options."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="one question; without it, a conversation")
    parser.add_argument(
        "--resume", action="store_true", help="continue the conversation used last, here or in the dashboard"
    )
    parser.add_argument("--local", action="store_true", help="run the whole model in this process")
    parser.add_argument("--model", metavar="M", help=f"with --local: {MODELS} (default: starter)")
    words = "ask in this swarm, by its name or an invite, while the node goes on hosting in its own"
    parser.add_argument("--swarm", metavar="NAME", help=words)
    parser.add_argument("--adapter", metavar="NAME", help="reply with this adapter (`shoal adapters`)")
    parser.add_argument("--device", metavar="D", help="with --local: cpu, cuda:0, … (default: the best available)")
    parser.add_argument("--system", metavar="TEXT", help="a system message at the start")
    for name, metavar, default, words in (
        ("max_tokens", "N", 512, "the longest reply (default: 512)"),
        ("temperature", "T", 0.7, "0 is greedy, at most 2 (default: 0.7)"),
        ("top_k", "K", 0, "choose among the K likeliest tokens; 0: all"),
        ("top_p", "P", 0.95, "choose among the likeliest tokens that make up P"),
        ("min_p", "P", 0.0, "leave out tokens below P times the likeliest"),
        ("repetition_penalty", "R", 1.0, "above 1 repeats less"),
        (
            "private_blocks",
            "K",
            None,
            "the first and last K blocks run only here or on peers that the setting `trusted` names",
        ),
        ("seed", "S", None, "the same seed gives the same reply"),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=SAMPLING[name], default=default, metavar=metavar, help=words)
    words = "end the reply at this text (repeatable)"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=words)


def run_chat(arguments: argparse.Namespace) -> int:
    """Answer one prompt, or what the user types until the input ends."""
    import sys

    from app.cli.conversation import TerminalChat, open_store

    if arguments.prompt is None and arguments.json:
        raise UsageError("--json answers a single prompt: give it as an argument")
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise UsageError("the prompt is empty: write a question, or leave it out for a conversation")
    _require_fitting(arguments)
    settings = {name: getattr(arguments, name) for name in SAMPLING}
    answers: LocalAnswers | SwarmAnswers
    if arguments.local:
        name = arguments.model or "starter"
        model = load_model(name, arguments.device, arguments.adapter, arguments.home)
        answers = LocalAnswers(model, name, arguments.device, settings)
        if arguments.adapter is not None:
            answers.adapter = adapter_facts(arguments.adapter, arguments.home, model.config)
    else:
        answers = SwarmAnswers(_node_client(arguments), settings, arguments.adapter, arguments.swarm)
    is_conversation = arguments.prompt is None and sys.stdin.isatty()
    chat = TerminalChat(answers, open_store(arguments.home if is_conversation or arguments.resume else None), SAMPLING)
    if arguments.resume:
        chat.resume()
    if arguments.system is not None:
        chat.set_system(arguments.system)
    if arguments.prompt is not None:
        chat.say(arguments.prompt, as_json=arguments.json)
        return 0
    if arguments.resume and is_conversation:
        chat.show_last()
    chat.converse()
    return 0


def _require_fitting(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for an option that the side that answers would ignore."""
    if arguments.local:
        if arguments.swarm is not None:
            raise UsageError("--swarm asks a swarm, --local asks none: give one of them")
        return
    for name in ("model", "device"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} is for --local: a swarm replies with its own model, where its members have it")


def reply_settings(settings: dict[str, Any]) -> ReplySettings:
    """Return the engine's settings of a reply; without a seed the clock gives one."""
    from engine.text.reply import ReplySettings
    from engine.text.sampler import Sampling

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = Sampling(**{name: settings[name] for name in names}, seed=_seed(settings))
    return ReplySettings(settings["max_tokens"], sampling, tuple(settings["stop"]))


def _seed(settings: dict[str, Any]) -> int:
    return time.time_ns() % 2**63 if settings["seed"] is None else int(settings["seed"])


def load_model(
    name: str, device_name: str | None, adapter_name: str | None = None, home: Path | None = None
) -> LocalModel:
    """Open a model and load all of it on a device, with progress on stderr; replies use the adapter if one is named.

    Raises `EngineError` if the adapter was trained for another model.
    """
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
    adapter = None
    if adapter_name is not None:
        from app.config.home import Home
        from app.manifest.importing import hash_source
        from app.training.adapter_store import AdapterStore

        adapter = AdapterStore(Home.open(home)).load(adapter_name, source.config, hash_source(source).manifest.hash)
    return load_local(source, options, adapter=adapter)


def adapter_facts(name: str, home: Path | None, config: ModelConfig) -> dict[str, object]:
    """Return the fields of `chat --json` that name an adapter."""
    from app.config.home import Home
    from app.training.adapter_store import AdapterStore
    from app.training.reply_adapters import adapter_ref
    from engine.training.peft_format import read_peft

    adapter = read_peft(AdapterStore(Home.open(home)).require(name), config)
    return {"adapter": name, "adapter_root": adapter_ref(adapter).short}


NO_ADAPTER: dict[str, object] = {"adapter": None, "adapter_root": None}


class LocalAnswers:
    """A whole model in this process answers."""

    def __init__(self, model: LocalModel, name: str, device: str | None, settings: dict[str, Any]) -> None:
        self._model, self._name, self._device, self.settings = model, name, device, settings
        self.adapter = NO_ADAPTER
        self.facts: dict[str, Any] = {}

    def answer(self, messages: Chat) -> Iterator[str]:
        """Yield the pieces of the reply."""
        prompt_ids = self._model.prompt_ids(messages)
        reply = self._model.reply(prompt_ids, reply_settings(self.settings))
        pieces: list[str] = []
        longest_gap_s, last = 0.0, None
        for piece in reply:
            now = time.perf_counter()
            longest_gap_s = max(longest_gap_s, now - last) if last is not None else 0.0
            last = now
            pieces.append(piece)
            yield piece
        blocks = self._model.config.n_blocks
        self.facts = reply_facts(reply, "".join(pieces), len(prompt_ids), longest_gap_s, blocks) | self.adapter

    def figures(self, *, is_whole: bool) -> dict[str, Any]:
        """Return the figures of the last reply; none of one that was stopped."""
        return self.facts if is_whole else {}

    def waits_for(self) -> str:
        """The model computes in this process: nothing else is waited for."""
        return ""

    def model(self) -> str:
        """Name the model and where it runs."""
        return f"{self._name}, in this process"

    def use_model(self, name: str) -> None:
        """Load another model instead of this one, without an adapter."""
        self._model, self._name, self.adapter = load_model(name, self._device), name, NO_ADAPTER


def reply_facts(
    reply: LocalReply, text: str, prompt_tokens: int, longest_gap_s: float, blocks: int
) -> dict[str, object]:
    """Return the fields of `chat --json` for a reply of a model in this process."""
    assert reply.stats is not None, "the reply was read to its end"
    return {
        "text": text,
        "token_ids": reply.writer.token_ids,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": 0,
        "finish_reason": reply.writer.finish_reason,
        **dataclasses.asdict(reply.stats),
        "recoveries": 0,
        "guessed_tokens": 0,
        "accepted_tokens": 0,
        "moves": 0,
        "longest_gap_s": longest_gap_s,
        "route": [{"peer": "local", "start": 0, "stop": blocks}],
    }


class SwarmAnswers:
    """The running node's swarm answers."""

    def __init__(
        self, client: Client, settings: dict[str, Any], adapter: str | None = None, swarm: str | None = None
    ) -> None:
        self._client, self.settings = client, settings
        given = {"adapter": adapter, "swarm": swarm}
        self._choice = {name: value for name, value in given.items() if value is not None}
        self.facts: dict[str, Any] = {}
        self._progress: ReplyProgress | None = None
        self._route: list[dict[str, Any]] = []
        self._left: list[dict[str, Any]] = []  # hops that were in the route before

    def answer(self, messages: Chat) -> Iterator[str]:
        """Yield the pieces of the reply; closing this ends the session in the swarm. Errors name peers briefly."""
        from app.api.client import Hangup
        from ui.state.reply_stream import ReplyProgress

        progress = self._progress = ReplyProgress(time.monotonic())
        self._route, self._left = [], []
        hangup = Hangup()
        request = {"messages": messages, **self.settings, **self._choice, "seed": _seed(self.settings)}
        try:
            for piece in self._client.chat(request, hangup=hangup):
                progress.take(piece, time.monotonic())
                before, self._route = self._route, piece.get("route", self._route)
                self._left += [hop for hop in before if hop not in self._route]
                if "done" in piece:
                    self.facts = piece["done"]
                elif "waiting" in piece and not sys.stdout.isatty():  # a terminal shows `waits_for`
                    print(f"shoal: {without_controls(piece['waiting']['text'])}", file=sys.stderr, flush=True)
                elif "text" in piece:
                    if "notice" in piece:
                        print(f"shoal: {without_controls(piece['notice'])}", file=sys.stderr, flush=True)
                    yield piece["text"]
        except AppError as error:
            error.args = (with_names(str(error)),)
            raise
        finally:
            hangup.hang_up()

    def figures(self, *, is_whole: bool) -> dict[str, Any]:
        """Return the figures of the last reply, with every hop that has read the conversation for it."""
        tokens = self._progress.tokens if self._progress is not None else 0
        cut = {"token_ids": [0] * tokens, "stopped": True, "route": self._route}
        return (self.facts if is_whole else cut) | ({"left": self._left} if self._left else {})

    def waits_for(self) -> str:
        """Say what the reply waits for, in the dashboard's words, from the node's present state."""
        from app.api.client import NotAnswering
        from ui.draw.reply import hole_in, waiting_words
        from ui.state.coverage import coverage_of

        if self._progress is None:
            return ""
        hole = None
        if "swarm" not in self._choice:  # the node's state is that of its own swarm
            try:
                snapshot = self._client.snapshot()
            except NotAnswering:
                return "the node does not answer"
            except AppError:
                return ""
            hole = hole_in(snapshot, coverage_of(snapshot), self._route, short_peer)
        return waiting_words(self._progress, hole) or "waiting for the first token"

    def model(self) -> str:
        """Name the swarm and its model."""
        snapshot = self._client.snapshot()
        if snapshot.swarm is None:
            return "this node is in no swarm"
        model = f"model {snapshot.model}" if snapshot.model else f"model #{(snapshot.manifest or '')[:8]}"
        return f"swarm {snapshot.swarm}, {model}"

    def use_model(self, name: str) -> None:
        """Raise `AppError`: a swarm has one model."""
        raise AppError(
            "a swarm has one model: `shoal join` goes to another swarm, `shoal chat --local --model` runs one here"
        )


def _node_client(arguments: argparse.Namespace) -> Client:
    """Return the client of the running node; raises `NotRunning` with the alternatives if no node runs."""
    from app.api.client import running_client

    client = running_client(arguments.home)
    if client is None:
        raise NotRunning(
            f"no node runs in {arguments.home}: start one with `shoal serve`, "
            "or add --local to run the whole model in this process"
        )
    return client


COMMANDS = (Command("chat", "talk to a model", run_chat, add_arguments, prints_facts=True),)
