"""Finds out if this node can be dialled from outside, by asking peers to dial back.

`reach` is a call with the JSON body `{"version": 1, "address": …}` of at most 1024 bytes. The peer dials the address
only if its IP is the one that the asker's connection comes from, so that a node cannot be made to dial third parties.
It then checks the asker's identity there and answers `{"version": 1, "reached": …}`, of at most 1024 bytes too. For a
public address of its own, or one whose port its router forwards, a node needs the confirmation of one peer; for an
address at which peers merely see it, those of peers in two networks. A refusal or a failed call is no answer: others
are asked, and an address that was confirmed stays so until peers of two networks, or of the only one that can be
asked, say that they did not reach it.

A peer dials back for a few at once. It counts them by the address they come from: identities cost nothing.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import trio

from p2p.addresses import Address, BadAddress, IPAddress, Scope, in_turns, network_of, parse_address
from p2p.errors import P2PError, ProtocolError, Refused
from p2p.host.admission import source_of
from p2p.host.host import Host
from p2p.rate_limit import KeyedRateLimit

METHOD = "reach"
PEERS_ASKED = 4  # that answer
MAX_PEERS_TRIED = 16  # if others do not
VOTES_BEHIND_NAT = 2
VOTES_TO_WITHDRAW = 2  # a confirmation
MAX_OBSERVATIONS = 64
MAX_CANDIDATES = 4
_MAX_BODY_BYTES = 1024
_ASK_TIMEOUT_S = 8.0
_DIAL_TIMEOUT_S = 5.0
_AT_ONCE = 4
_AT_ONCE_PER_ADDRESS = 2
_SLOW_S = 2.0  # a dial-back under way for longer gives way to an address that has none
_BURST_PER_ADDRESS = 4
_BURST_S = 10.0  # until an address may ask for as many again
_RECHECK_S = 600.0
_RETRY_S = 15.0

log = logging.getLogger("shoal.p2p.reachability")

Call = Callable[[str, bytes, float], Awaitable[bytes]]


class Reach(StrEnum):
    """Result of the probes; UNKNOWN while no peer on the internet can be asked."""

    UNKNOWN = "unknown"
    VERIFIED = "verified"
    UNVERIFIED = "unverified"


@dataclass(eq=False)
class _DialBack:
    source: IPAddress  # of the asker
    began_at: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Reachability:
    """Collects the addresses at which peers see this node, has them dial back, and dials back for others."""

    def __init__(self, host: Host, call: Call, changed: Callable[[], None] = lambda: None) -> None:
        self._host = host
        self._call = call
        self._changed = changed
        # By the address of the peers that say so, which have one voice together: where they see this node, and from
        # which of this machine's addresses it went to them.
        self._seen: OrderedDict[IPAddress, tuple[Address, IPAddress | None]] = OrderedDict()
        self._probe_wanted = trio.Event()
        self._dialling: list[_DialBack] = []
        self._rate: KeyedRateLimit[IPAddress] = KeyedRateLimit(_BURST_PER_ADDRESS, _BURST_PER_ADDRESS / _BURST_S)
        self.state = Reach.UNKNOWN
        self.verified: list[Address] = []
        self.mapped: list[Address] = []  # addresses whose port a router says it forwards to this node

    def observed(self, ip: IPAddress | None, address: Address | None, local_ip: IPAddress | None = None) -> None:
        """Record that a peer at `ip` sees this node, dialling from `local_ip`, at `address`; only public ones count."""
        if ip is None or address is None or address.scope is not Scope.PUBLIC or address.ip is None:
            return
        self._seen[source_of(ip)] = address, local_ip
        self._seen.move_to_end(source_of(ip))
        if len(self._seen) > MAX_OBSERVATIONS:
            self._seen.popitem(last=False)

    def lost(self, local_ips: Container[IPAddress]) -> None:
        """Forget where peers saw this node while it dialled from addresses that this machine has no more."""
        for source in [source for source, (_, local_ip) in self._seen.items() if local_ip in local_ips]:
            del self._seen[source]

    def met(self, peer: str) -> None:
        """Probe soon if `peer`, newly connected, is on the internet and this node is not verified yet."""
        if self.state is not Reach.VERIFIED and peer in self._helpers():
            self._probe_wanted.set()

    def probe_soon(self) -> None:
        """Probe at once: this node has a new address."""
        self._probe_wanted.set()

    def seen_at(self) -> list[Address]:
        """Return the public addresses for hole punching, the most often reported first.

        Each reported IP address also counts with the listening port, since many NATs keep the port.
        """
        seen = [address for address, _ in self._seen.values()]
        exact = Counter(seen)
        kept_port = Counter(
            Address(address.kind, address.host, own.port)
            for address in seen
            for own in self._host.listening
            if own.kind == address.kind
        )
        return [address for address, _ in (exact + kept_port).most_common()]

    async def run(self) -> None:
        """Probe when a new peer can be asked, and every 10 minutes (15 s until verified), until cancelled."""
        while True:
            pause_s = _RECHECK_S if self.state is Reach.VERIFIED else _RETRY_S
            with trio.move_on_after(pause_s * random.uniform(0.8, 1.2)):
                await self._probe_wanted.wait()
            self._probe_wanted = trio.Event()
            await self.check()
            await trio.sleep(1.0)

    async def check(self) -> Reach:
        """Ask several peers to dial back each candidate address, and return the new state."""
        verified = []
        for address in self._candidates():
            if await self._is_confirmed(address):
                verified.append(address)
        state = Reach.VERIFIED if verified else Reach.UNVERIFIED if self._helpers() else Reach.UNKNOWN
        if (state, verified) != (self.state, self.verified):
            log.info("reachability: %s %s", state, " ".join(str(address) for address in verified))
            self.state, self.verified = state, verified
            self._changed()
        return state

    def _candidates(self) -> list[Address]:
        """Return the addresses to try; the kinds of them, and IPv4 and IPv6, take turns.

        A machine has a new IPv6 address every day and keeps each for a week: these must not crowd out the others.
        """
        own = [address for address in self._host.own_addresses if address.scope is Scope.PUBLIC]
        guessed = [address for address in self.seen_at() if any(address.port == o.port for o in self._host.listening)]
        queues = [
            [address.of(None) for address in kind if (address.kind == "ip6") is is_ip6]
            for kind in (self.verified, self.mapped, guessed, own)
            for is_ip6 in (False, True)
        ]
        return list(dict.fromkeys(in_turns(queues)))[:MAX_CANDIDATES]

    def _helpers(self) -> list[str]:
        """Return the directly connected peers on the internet, the latest first."""
        outside = [c for c in self._host.connections() if not c.relayed and c.address.scope is Scope.PUBLIC]
        return list(dict.fromkeys(c.peer for c in sorted(outside, key=lambda c: -c.opened_at)))

    async def _is_confirmed(self, address: Address) -> bool:
        """True if enough peers reached this node at `address`, counted by network: a liar may have many identities.

        An address that was confirmed stays so until peers of two networks say no, or of the only one that can be asked.
        """
        is_own = address in self.mapped or any(address.host == own.host for own in self._host.own_addresses)
        votes: dict[bool, set[str]] = {True: set(), False: set()}
        to_ask = self._peers_to_ask()
        peers = iter(to_ask)

        async def ask_until_one_answers() -> None:
            for peer, network in peers:
                reached = await self._ask(peer, address)
                if reached is not None:
                    votes[reached].add(network)
                    return

        async with trio.open_nursery() as nursery:
            for _ in range(PEERS_ASKED):
                nursery.start_soon(ask_until_one_answers)
        if len(votes[True]) >= (1 if is_own else VOTES_BEHIND_NAT):
            return True
        networks = {network for _, network in to_ask}
        return address in self.verified and len(votes[False]) < min(VOTES_TO_WITHDRAW, len(networks))

    def _peers_to_ask(self) -> list[tuple[str, str]]:
        """Return up to `MAX_PEERS_TRIED` (peer, network): the latest peer of each network first, then others."""
        found: dict[str, list[str]] = {}
        for peer in self._helpers():
            connection = self._host.connection(peer)
            if connection is not None and connection.ip is not None:
                found.setdefault(network_of(connection.ip), []).append(peer)
        queues = [[(peer, network) for peer in peers] for network, peers in found.items()]
        return in_turns(queues)[:MAX_PEERS_TRIED]

    async def _ask(self, peer: str, address: Address) -> bool | None:
        """Return what `peer` says after it dialled `address`; None if it does not say."""
        try:
            body = json.dumps({"version": 1, "address": str(address)}).encode()
            answer = await self._call(peer, body, _ASK_TIMEOUT_S)
            if len(answer) > _MAX_BODY_BYTES:
                raise ProtocolError(f"its answer has {len(answer)} bytes; at most {_MAX_BODY_BYTES} are read")
            said = json.loads(answer)
        except (P2PError, ValueError, RecursionError) as error:
            log.debug("%s did not dial back: %s", peer, error)
            return None
        reached = said.get("reached") if isinstance(said, dict) else None
        return reached if isinstance(reached, bool) else None

    async def handle(self, peer: str, body: bytes) -> bytes:
        """Answer a `reach` call of `peer`; raises `ProtocolError`, or `Refused` if there is no room or no connection.

        An address at another IP than the peer's is not dialled and counts as not reached: the peer may have lost it.
        """
        connection = self._host.connection(peer)
        if connection is None or connection.relayed or connection.ip is None:
            raise Refused("only a peer that is connected directly is dialled back")
        address = await connection.in_turn(_read_request, body)
        reached = address.ip == connection.ip and await self._dial_back(address, peer, source_of(connection.ip))
        return json.dumps({"version": 1, "reached": reached}).encode()

    async def _dial_back(self, address: Address, peer: str, source: IPAddress) -> bool:
        """Dial the asker; raises `Refused` if there is no room, or others need it before an answer is known."""
        now = trio.current_time()
        if not self._rate.take(source, now) or not self._make_room(source, now):
            raise Refused("too many dial-back requests; ask again later")
        dial_back = _DialBack(source, now)
        self._dialling.append(dial_back)
        try:
            with dial_back.scope, trio.fail_after(_DIAL_TIMEOUT_S):
                return await self._host.proves(address, peer)
        except (P2PError, OSError, trio.TooSlowError) as error:
            log.debug("%s is not reachable at %s: %s", peer, address, error)
            return False
        finally:
            if dial_back in self._dialling:
                self._dialling.remove(dial_back)
        raise Refused("others wait to be dialled back; ask again later")

    def _make_room(self, source: IPAddress, now: float) -> bool:
        """True if there is room for a dial-back of `source`.

        If all are taken, one of an address with two, or one that is slow, gives way to an address that has none.
        """
        held = Counter(dial_back.source for dial_back in self._dialling)
        if held[source] >= _AT_ONCE_PER_ADDRESS:
            return False
        if len(self._dialling) < _AT_ONCE:
            return True
        longest = max(self._dialling, key=lambda one: (held[one.source], now - one.began_at))
        if held[source] or (held[longest.source] == 1 and now - longest.began_at < _SLOW_S):
            return False
        self._dialling.remove(longest)
        longest.scope.cancel()
        return True


async def _read_request(body: bytes) -> Address:
    if len(body) > _MAX_BODY_BYTES:
        raise ProtocolError(f"a dial-back request has {len(body)} bytes; at most {_MAX_BODY_BYTES} are accepted")
    try:
        fields: Any = json.loads(body)
        return parse_address(fields["address"])
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError, BadAddress):
        raise ProtocolError("a dial-back request has no valid address") from None
