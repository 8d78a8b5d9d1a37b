"""Can strangers dial this node? Found out by asking peers to dial back, never guessed.

`reach` is a call with the JSON body `{"version": 1, "address": …}`; the peer dials the address, if it is the very IP
address that it sees the asker at, proves that the asker answers there, and says `{"version": 1, "reached": …}`. So
nobody can make a node dial somebody else. A node with a public address of its own believes one peer; one behind a NAT
needs two that agree.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

import trio

from p2p.addresses import Address, BadAddress, Scope, network_of, parse_address
from p2p.errors import P2PError, ProtocolError, Refused
from p2p.host.host import Host

METHOD = "reach"
PEERS_ASKED = 4
VOTES_BEHIND_NAT = 2
MAX_OBSERVATIONS = 64
_MAX_BODY_BYTES = 1024
_ASK_TIMEOUT_S = 8.0
_DIAL_TIMEOUT_S = 5.0
_AT_ONCE = 4
_RECHECK_S = 600.0
_RETRY_S = 15.0
_PER_PEER_S = 10.0

log = logging.getLogger("shoal.p2p.reachability")

Call = Callable[[str, bytes, float], Awaitable[bytes]]


class Reach(StrEnum):
    """What is known of this node's reachability."""

    UNKNOWN = "unknown"
    VERIFIED = "verified"
    UNVERIFIED = "unverified"


class Reachability:
    """Collects where peers see this node, has them dial back, and dials back for others."""

    def __init__(self, host: Host, call: Call, changed: Callable[[], None] = lambda: None) -> None:
        self._host = host
        self._call = call
        self._changed = changed
        self._seen: OrderedDict[str, Address] = OrderedDict()  # peer -> where it sees this node
        self._news = trio.Event()
        self._dialling = 0
        self._served_at: OrderedDict[str, float] = OrderedDict()
        self.state = Reach.UNKNOWN
        self.verified: list[Address] = []

    def observed(self, peer: str, address: Address | None) -> None:
        """`peer` sees this node at `address`."""
        if address is None or address.scope is not Scope.PUBLIC or address.ip is None:
            return
        self._seen[peer] = address
        self._seen.move_to_end(peer)
        if len(self._seen) > MAX_OBSERVATIONS:
            self._seen.popitem(last=False)

    def met(self, peer: str) -> None:
        """There is a new connection; if `peer` is out on the internet it can be asked."""
        if self.state is not Reach.VERIFIED and peer in self._helpers():
            self._news.set()

    def seen_at(self) -> list[Address]:
        """Where this node seems to be from outside, the most often reported first; for hole punching."""
        exact = Counter(self._seen.values())
        kept_port = Counter(
            Address(address.kind, address.host, own.port)
            for address in self._seen.values()
            for own in self._host.listening
            if own.kind == address.kind
        )
        return [address for address, _ in (exact + kept_port).most_common()]

    async def run(self) -> None:
        """Check whenever something new is heard, and now and then."""
        while True:
            pause_s = _RECHECK_S if self.state is Reach.VERIFIED else _RETRY_S
            with trio.move_on_after(pause_s * random.uniform(0.8, 1.2)):
                await self._news.wait()
            self._news = trio.Event()
            await self.check()
            await trio.sleep(1.0)

    async def check(self) -> Reach:
        """Ask several peers to dial back; returns what is known then."""
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
        own = [address for address in self._host.addresses if address.scope is Scope.PUBLIC]
        guessed = [address for address in self.seen_at() if any(address.port == o.port for o in self._host.listening)]
        return list(dict.fromkeys([*(address.of(None) for address in own), *guessed]))[:4]

    def _helpers(self) -> list[str]:
        """Peers out on the internet that can be asked, the latest first."""
        outside = [c for c in self._host.connections() if not c.relayed and c.address.scope is Scope.PUBLIC]
        return list(dict.fromkeys(c.peer for c in sorted(outside, key=lambda c: -c.opened_at)))

    async def _is_confirmed(self, address: Address) -> bool:
        """Whether peers of several networks say that they reached this node there: one liar may have many names."""
        is_own = any(address.host == own.host for own in self._host.addresses)
        votes: set[str] = set()

        async def ask(peer: str, network: str) -> None:
            if await self._ask(peer, address):
                votes.add(network)

        async with trio.open_nursery() as nursery:
            for peer, network in self._jury():
                nursery.start_soon(ask, peer, network)
        return len(votes) >= (1 if is_own else VOTES_BEHIND_NAT)

    def _jury(self) -> list[tuple[str, str]]:
        """Whom to ask, each with its network: of each network the latest, then others."""
        found: dict[str, list[str]] = {}
        for peer in self._helpers():
            connection = self._host.connection(peer)
            if connection is not None and connection.address.ip is not None:
                found.setdefault(network_of(connection.address.ip), []).append(peer)
        rounds = itertools.zip_longest(*([(peer, network) for peer in peers] for network, peers in found.items()))
        return [juror for turn in rounds for juror in turn if juror is not None][:PEERS_ASKED]

    async def _ask(self, peer: str, address: Address) -> bool:
        try:
            body = json.dumps({"version": 1, "address": str(address)}).encode()
            answer = json.loads(await self._call(peer, body, _ASK_TIMEOUT_S))
        except (P2PError, ValueError, RecursionError) as error:
            log.debug("%s does not dial back: %s", peer, error)
            return False
        return isinstance(answer, dict) and answer.get("reached") is True

    async def handle(self, peer: str, body: bytes) -> bytes:
        """Dial back for `peer`."""
        address = _read_request(body)
        connection = self._host.connection(peer)
        now = trio.current_time()
        if connection is None or connection.relayed or address.ip is None or address.ip != connection.address.ip:
            raise Refused("a peer is dialled back only at the IP address it comes from")
        if self._dialling >= _AT_ONCE or now - self._served_at.get(peer, float("-inf")) < _PER_PEER_S / _AT_ONCE:
            raise Refused("too many are dialled back at once; ask again later")
        self._served_at[peer] = now
        self._served_at.move_to_end(peer)
        if len(self._served_at) > MAX_OBSERVATIONS:
            self._served_at.popitem(last=False)
        self._dialling += 1
        try:
            reached = await self._dial_back(address, peer)
        finally:
            self._dialling -= 1
        return json.dumps({"version": 1, "reached": reached}).encode()

    async def _dial_back(self, address: Address, peer: str) -> bool:
        try:
            with trio.fail_after(_DIAL_TIMEOUT_S):
                return await self._host.proves(address, peer)
        except (P2PError, OSError, trio.TooSlowError) as error:
            log.debug("%s is not reachable at %s: %s", peer, address, error)
            return False


def _read_request(body: bytes) -> Address:
    if len(body) > _MAX_BODY_BYTES:
        raise ProtocolError("a request to dial back that is too long")
    try:
        fields: Any = json.loads(body)
        return parse_address(fields["address"])
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError, BadAddress):
        raise ProtocolError("a request to dial back without an address") from None
