"""A conversation with the swarm, through the node that runs in this home folder."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from app.cli.command import print_json
from app.cli.terminal import harmless
from app.core.errors import NotRunning

if TYPE_CHECKING:
    from app.api.client import Client


class SwarmConversation:
    """The messages so far; the running node's swarm answers."""

    def __init__(self, client: Client, settings: dict[str, Any], system: str | None) -> None:
        self._client = client
        self._settings = settings
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str, *, as_json: bool) -> None:
        """Stream the answer to one message, and remember both."""
        messages = [*self._messages, {"role": "user", "content": text}]
        for piece in self._client.chat({"messages": messages, **self._settings}):
            if "done" in piece:
                self._messages = [*messages, {"role": "assistant", "content": piece["done"]["text"]}]
                if as_json:
                    print_json(piece["done"])
                else:
                    print()
            elif not as_json:
                print(harmless(piece["text"]), end="", flush=True)


def swarm_conversation(arguments: argparse.Namespace) -> SwarmConversation:
    """A conversation with what the command line says of it; without a node, the ways to have one."""
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
