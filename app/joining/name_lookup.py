"""Resolves a swarm's name over libp2p, with a running node's network or one opened for the question.

`app.membership.swarm_search` does the asking; this module adds the configured peers and the check for a wrong secret.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import trio

from app.config.file import Config
from app.config.home import Home
from app.core.errors import AppError, UnknownSwarm
from app.joining.network_setup import named_peers, network_config
from app.joining.wrong_secret import SecretCheck
from app.membership import resolve_swarm, value_check
from app.swarm.names import SwarmName
from app.swarm.records import SwarmRecord
from app.swarm.saved import SavedSwarm
from p2p.errors import HandshakeError, WrongSecret
from p2p.identity import load_or_create
from p2p.network import Libp2pNetwork

ROUNDS = 2  # of up to 5 s each; the second only if the first linked no peer at all

# Passes every `WrongSecret` of a handshake to a listener while the returned context is open.
RefusalsTo = Callable[[Callable[[WrongSecret], None]], AbstractContextManager[None]]


async def resolve_name(
    network: Libp2pNetwork, config: Config, wanted: SwarmName, refusals_to: RefusalsTo
) -> SavedSwarm:
    """Return the public swarm that a name means, according to reachable peers.

    Raises `UnknownSwarm`, `NameConflict`, `WrongSecret`, or `AppError` if the swarm is private.
    """
    named = named_peers(config, None)
    for peer, addresses in named.items():
        network.learn(peer, addresses)
    refusals = SecretCheck(named)
    answer: list[SwarmRecord] = []
    failure: list[Exception] = []

    async def ask() -> None:
        try:
            answer.append(await _ask(network, wanted, named))
        except AppError as error:
            failure.append(error)
        nursery.cancel_scope.cancel()

    with refusals_to(refusals.hear):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            failure.append(await refusals.conclusive(network))
            nursery.cancel_scope.cancel()
    if not answer:
        raise failure[0]
    record = answer[0]
    if record.private:
        words = f"{record} is a private swarm: ask a member for an invite (`shoal invite`)"
        raise AppError(words, code="private_swarm")
    return SavedSwarm.from_record(record, now_ms=time.time_ns() // 10**6)


async def _ask(network: Libp2pNetwork, wanted: SwarmName, named: dict[str, list[str]]) -> SwarmRecord:
    for turn in range(ROUNDS):
        try:
            return (await resolve_swarm(network, wanted, via=named)).record
        except UnknownSwarm:
            if turn == ROUNDS - 1 or network.links():
                raise
    raise AssertionError("ROUNDS is at least 1")


async def resolve_aside(home: Home, config: Config, wanted: SwarmName) -> SavedSwarm:
    """Run `resolve_name` over a temporary public network on any free port."""
    listeners: list[Callable[[WrongSecret], None]] = []

    def on_failure(error: HandshakeError) -> None:
        for listener in listeners:
            if isinstance(error, WrongSecret) and error.peer is not None:
                listener(error)

    def refusals_to(listener: Callable[[WrongSecret], None]) -> AbstractContextManager[None]:
        listeners.append(listener)
        return nullcontext()

    settings = replace(network_config(home, config, None), listen=("/ip4/0.0.0.0/tcp/0",), remember_at=home.peers_file)
    network = Libp2pNetwork(
        load_or_create(home.key_file), settings, is_valid_value=value_check(), on_handshake_failure=on_failure
    )
    async with network.running():
        return await resolve_name(network, config, wanted, refusals_to)


def resolve_blocking(home: Home, config: Config, wanted: SwarmName) -> SavedSwarm:
    """Run `resolve_aside` from a command, while no node runs."""
    return trio.run(resolve_aside, home, config, wanted)
