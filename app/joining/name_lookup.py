"""Resolves a swarm's name, and checks that a swarm has a member that answers, over libp2p.

Both use a running node's network, or one opened for the question. `app.membership.swarm_search` does the asking; this
module adds the configured peers and the check for a wrong secret.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeVar

import trio

from app.config.file import Config
from app.config.home import Home
from app.core.errors import AppError, UnknownSwarm
from app.core.network import Network
from app.core.terminal_text import short_peer
from app.core.wall_clock import wall_ms
from app.joining.admission import ask_admission
from app.joining.network_setup import named_peers, network_config
from app.joining.wrong_secret import SecretCheck
from app.membership import GuardedNetwork, resolve_swarm, value_check, wire
from app.membership.swarm_search import FIND_TIMEOUT_S, PUBLIC_TIMEOUT_S, FoundSwarm
from app.swarm import invitations
from app.swarm.names import SwarmName
from app.swarm.records import SWARM_DOMAIN, read_record
from app.swarm.saved import SavedSwarm
from p2p.envelope import parse
from p2p.errors import EnvelopeError, HandshakeError, P2PError, WrongSecret
from p2p.identity import load_or_create
from p2p.network import Libp2pNetwork

ROUNDS = 2  # of up to 5 s each, 20 s with the public directory; the second only if the first linked no peer at all
ASK_TIMEOUT_S = 2.0
ADMIT_PATIENCE_S = 8.0  # for the issuer of an invite
ADMIT_AGAIN_S = 0.5
_MAX_ASKED = 32  # peers that are asked which swarm they are in
_SHOWN = 3  # peers that a message names

log = logging.getLogger("shoal.joining")

# Passes every `WrongSecret` of a handshake to a listener while the returned context is open.
RefusalsTo = Callable[[Callable[[WrongSecret], None]], AbstractContextManager[None]]
_Answer = TypeVar("_Answer")


async def resolve_name(
    network: Libp2pNetwork, config: Config, wanted: SwarmName, refusals_to: RefusalsTo
) -> SavedSwarm:
    """Return the public swarm that a name means, according to reachable peers.

    Raises `UnknownSwarm`, `NameConflict`, `WrongSecret`, or `AppError` if the swarm is private.
    """
    named = named_peers(config, None)
    timeout_s = _timeout_s(config)
    found = await _unless_refused(
        network, named, None, refusals_to, lambda: _ask(network, wanted, named, None, timeout_s)
    )
    record = found.record
    if record.private:
        words = f"{record} is a private swarm: ask a member for an invite (`shoal invite`)"
        raise AppError(words, code="private_swarm")
    return SavedSwarm.from_record(record, now_ms=wall_ms())


class NoMember(AppError):
    """No member of a swarm answers; `peers` are those that were tried."""

    code = "no_member"


async def require_member(network: Network, config: Config, swarm: SavedSwarm, refusals_to: RefusalsTo) -> None:
    """Return once a member of `swarm` answers; `network` must have its secret, and check its certificates.

    Raises `WrongSecret`, or `NoMember` that says who was tried.
    """
    named = named_peers(config, swarm)
    wanted, timeout_s = SwarmName(swarm.name, swarm.model_hash), _timeout_s(config)

    async def ask() -> FoundSwarm:
        return await _ask(network, wanted, named, swarm.secret, timeout_s)

    try:
        found = await _unless_refused(network, named, swarm, refusals_to, ask)
        tried = tuple(dict.fromkeys((*named, *found.peers)))
        if await _any_is_member(network, found.peers, swarm.id):
            return
    except UnknownSwarm:
        tried = tuple(named)
    raise NoMember(no_member_text(swarm.name, tried), peers=tried)


def no_member_text(name: str, tried: tuple[str, ...]) -> str:
    """Say that nobody of a swarm answers, and who was tried."""
    if not tried:
        return f"{name}: no member was found. They may be offline"
    shown = ", ".join(short_peer(peer) for peer in tried[:_SHOWN])
    more = f" and {len(tried) - _SHOWN} more" if len(tried) > _SHOWN else ""
    return f"{name}: no member answers ({len(tried)} tried: {shown}{more}). They may be offline"


async def _admitted(network: Network, config: Config, swarm: SavedSwarm, refusals_to: RefusalsTo) -> SavedSwarm:
    """Exchange the pass of an invite for a certificate; raises `NotAdmitted`, `WrongSecret` or `NoMember`."""
    named, entry = named_peers(config, swarm), swarm.entry
    assert entry is not None, "there is no pass to exchange"

    async def ask() -> SavedSwarm:
        give_up_at = trio.current_time() + ADMIT_PATIENCE_S
        while True:
            try:
                return await ask_admission(network, swarm, config.settings.name)
            except P2PError as error:
                log.info("the issuer of the invite did not answer: %s", error)
                if trio.current_time() >= give_up_at:
                    raise NoMember(no_issuer_text(swarm), peers=(entry.issuer,)) from None
                await trio.sleep(ADMIT_AGAIN_S)

    return await _unless_refused(network, named, swarm, refusals_to, ask)


def no_issuer_text(swarm: SavedSwarm) -> str:
    """Say that the member that made an invite does not answer."""
    who = "" if swarm.entry is None else f" {short_peer(swarm.entry.issuer)},"
    return f"{swarm.name}:{who} who made the invite, does not answer, and only that member can admit this node"


async def _any_is_member(network: Network, peers: tuple[str, ...], swarm: str) -> bool:
    """Ask these peers which swarm they are in: those that only remember the swarm know its record too."""
    members: list[str] = []

    async def ask(peer: str) -> None:
        try:
            answer = await network.call(peer, wire.FIND, b"", timeout_s=ASK_TIMEOUT_S)
            now_ms = wall_ms()
            records = [raw for raw in wire.unpack(answer, wire.MAX_BATCH_BYTES) if parse(raw).domain == SWARM_DOMAIN]
            if any(read_record(raw, now_ms=now_ms).id == swarm for raw in records):
                members.append(peer)
                nursery.cancel_scope.cancel()
        except (P2PError, EnvelopeError) as error:
            log.info("%s did not say which swarm it is in: %s", peer, error)

    async with trio.open_nursery() as nursery:
        for peer in peers[:_MAX_ASKED]:
            nursery.start_soon(ask, peer)
    return bool(members)


async def _unless_refused(
    network: Network,
    named: dict[str, list[str]],
    swarm: SavedSwarm | None,
    refusals_to: RefusalsTo,
    ask: Callable[[], Awaitable[_Answer]],
) -> _Answer:
    """Return the answer of `ask`; raises `WrongSecret` as soon as the named peers have refused this node for good.

    It is raised, too, if `ask` finds nobody and a named peer refused while the others did not answer.
    """
    for peer, addresses in named.items():
        network.learn(peer, addresses)
    refusals = SecretCheck(named, swarm)
    answer: list[_Answer] = []
    failure: list[Exception] = []

    async def run() -> None:
        try:
            answer.append(await ask())
        except (UnknownSwarm, NoMember) as error:
            failure.append(refusals.refusal(network) or error)
        except AppError as error:
            failure.append(error)
        nursery.cancel_scope.cancel()

    with refusals_to(refusals.hear):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            failure.append(await refusals.conclusive(network))
            nursery.cancel_scope.cancel()
    if not answer:
        raise failure[0]
    return answer[0]


def _timeout_s(config: Config) -> float:
    return PUBLIC_TIMEOUT_S if "public" in config.settings.discovery else FIND_TIMEOUT_S


async def _ask(
    network: Network, wanted: SwarmName, named: dict[str, list[str]], secret: bytes | None, timeout_s: float
) -> FoundSwarm:
    for turn in range(ROUNDS):
        try:
            return await resolve_swarm(network, wanted, via=named, secret=secret, timeout_s=timeout_s)
        except UnknownSwarm:
            if turn == ROUNDS - 1 or network.links():
                raise
    raise AssertionError("ROUNDS is at least 1")


async def resolve_aside(home: Home, config: Config, wanted: SwarmName) -> SavedSwarm:
    """Run `resolve_name` over a temporary public network."""
    return await _aside(home, config, None, lambda network, to: resolve_name(network, config, wanted, to))


async def require_member_aside(home: Home, config: Config, swarm: SavedSwarm) -> SavedSwarm:
    """Find a member over a temporary network with the swarm's secret, and use an invite's pass there.

    Returns the swarm, with its new certificate; raises the errors of `require_member`, and `NotAdmitted`.
    """

    async def ask(network: Libp2pNetwork, refusals_to: RefusalsTo) -> SavedSwarm:
        if swarm.entry is not None:
            return await _admitted(network, config, swarm, refusals_to)
        guard = await trio.to_thread.run_sync(guard_of, home, network, swarm)
        await require_member(guard or network, config, swarm, refusals_to)
        return swarm

    return await _aside(home, config, swarm, ask)


def guard_of(home: Home, network: Network, swarm: SavedSwarm | None) -> GuardedNetwork | None:
    """Return the guard of a swarm's network, with the saved revocation lists; None if the swarm is not guarded."""
    authority = None if swarm is None else swarm.authority
    if swarm is None or authority is None:
        return None
    return GuardedNetwork(network, authority, swarm.certificate, invitations.load(home, authority.swarm).lists)


async def _aside(
    home: Home,
    config: Config,
    swarm: SavedSwarm | None,
    ask: Callable[[Libp2pNetwork, RefusalsTo], Awaitable[_Answer]],
) -> _Answer:
    """Run `ask` over a temporary network on any free port, with the secret of `swarm`, or public if None."""
    listeners: list[Callable[[WrongSecret], None]] = []

    def on_failure(error: HandshakeError) -> None:
        for listener in listeners:
            if isinstance(error, WrongSecret) and error.peer is not None:
                listener(error)

    def refusals_to(listener: Callable[[WrongSecret], None]) -> AbstractContextManager[None]:
        listeners.append(listener)
        return nullcontext()

    aside = network_config(home.peers_file, config, swarm)
    settings = replace(aside, listen=("/ip4/0.0.0.0/tcp/0",), map_port=False)
    network = Libp2pNetwork(
        load_or_create(home.key_file),
        settings,
        is_valid_value=value_check(settings.secret),
        on_handshake_failure=on_failure,
    )
    async with network.running():
        try:
            return await ask(network, refusals_to)
        except (AppError, P2PError) as error:
            failure = error  # raised outside the network's nursery, which would wrap it in a group
    raise failure


def resolve_blocking(home: Home, config: Config, wanted: SwarmName) -> SavedSwarm:
    """Run `resolve_aside` from a command, while no node runs."""
    return trio.run(resolve_aside, home, config, wanted)
