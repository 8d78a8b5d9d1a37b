"""Finds a swarm by its name, and a model's manifest by its hash, by asking reachable peers and the DHT.

A name is resolved once everybody has answered, or `QUIET_S` after the first answer, so that two swarms of the same name
are noticed and the user can choose. For a pinned name (`name#hash`) this node chooses: the hash in a record is its
signer's word, but only the true one has a manifest that can be fetched.
`app.swarm.name_resolution` decides from the records; `app.membership.query_service` is the answering side.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import trio

from app.core.errors import RecordError, UnknownSwarm
from app.core.network import Network
from app.core.signal import Signal
from app.manifest.manifest import MAX_MANIFEST_BYTES, Manifest
from app.membership import wire
from app.membership.clocks import PeerClocks
from app.swarm.name_resolution import NameCandidate, Resolution, resolve
from app.swarm.names import SwarmName
from app.swarm.records import ANNOUNCEMENT_DOMAIN, SwarmRecord, read_record, read_record_or_announcement
from app.swarm.rendezvous import ASK_AT_ONCE, keys_to_ask, record_key
from p2p.envelope import Envelope, parse
from p2p.errors import EnvelopeError, P2PError

log = logging.getLogger("shoal.membership")

FIND_TIMEOUT_S = 5.0  # for the whole search
PUBLIC_TIMEOUT_S = 20.0  # for a search that includes the public directory
ASK_TIMEOUT_S = 2.0
MANIFEST_TIMEOUT_S = 30.0
QUIET_S = 1.5  # from the first answer to a bare name until the search ends
_ASKS_AT_ONCE = 64
_POLL_S = 0.25
_MAX_STATEMENTS = 64  # of one answer; honest peers send up to 25
_STATEMENTS_AT_ONCE = 4
_MAX_ASKED = 512
_PATIENCE_S = 2.0  # for a manifest, before the next peer is asked as well; half, a third, … before further ones
_MANIFEST_ASKS = 64  # peers that are asked for one
_PROVED_AT_ONCE = 8  # models that fit a pin, whose manifests are asked for; 4 MiB each
_MAX_FOUND = 128  # peers that a search returns
_MAX_FAILURES_SHOWN = 3  # in the error, of peers that did not answer
DIRECTORY = "the directory"


@dataclass(frozen=True)
class FoundSwarm:
    """A swarm's record, and peers that are likely to be members of it: first those that sent it, then those told of."""

    record: SwarmRecord
    peers: tuple[str, ...]


@dataclass
class _Search:
    """State of one search: who was asked, and the valid records and members received so far."""

    network: Network
    wanted: SwarmName
    secret: bytes | None
    wall_clock: Callable[[], float]
    look_up_s: float = ASK_TIMEOUT_S  # for providers of one key
    clocks: PeerClocks = field(default_factory=PeerClocks)
    records: dict[str, list[SwarmRecord]] = field(default_factory=dict)  # by the peer that sent them
    members: dict[str, dict[str, None]] = field(default_factory=dict)  # swarm id -> peers
    asked: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)  # peer -> why it did not answer
    waiting: int = 0
    idle: Signal = field(default_factory=Signal)  # every question has been answered
    answered: trio.Event = field(default_factory=trio.Event)
    slots: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(_ASKS_AT_ONCE))

    @property
    def now_ms(self) -> int:
        return int(self.wall_clock() * 1000)

    def start(self, nursery: trio.Nursery, peers: Iterable[str]) -> None:
        """Ask those of these peers that were not asked yet."""
        for peer in peers:
            if peer not in self.asked and peer != self.network.peer_id and len(self.asked) < _MAX_ASKED:
                self.asked.add(peer)
                self.spawn(nursery, self._ask, peer)

    def spawn(self, nursery: trio.Nursery, ask: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run one question in the background and count it in `waiting`."""
        self.waiting += 1

        async def run() -> None:
            try:
                await ask(*args)
            except P2PError as error:
                log.debug("a request about %s failed: %s", self.wanted, error)
            finally:
                self.waiting -= 1
                if self.waiting == 0:
                    self.idle.notify()

        nursery.start_soon(run)

    async def _ask(self, peer: str) -> None:
        async with self.slots:
            body = str(self.wanted).encode()
            try:
                answer = await self.network.call(peer, wire.FIND, body, timeout_s=ASK_TIMEOUT_S)
            except P2PError as error:
                self.failures[peer] = str(error)
                raise
            await self.take(peer, wire.unpack(answer, wire.MAX_BATCH_BYTES))

    async def ask_record(self, key: bytes) -> None:
        """Ask the DHT for the swarm's record."""
        value = await self.network.get_value(key, timeout_s=ASK_TIMEOUT_S)
        if value:
            await self.take(DIRECTORY, [value])

    async def ask_rendezvous(self, nursery: trio.Nursery, key: bytes) -> None:
        """Ask the DHT for providers of a rendezvous key, and then those."""
        found = await self.network.find_providers(key, timeout_s=self.look_up_s)
        self.start(nursery, found)

    def likely_members(self, swarm: str, via: tuple[str, ...]) -> tuple[str, ...]:
        """Return the peers that sent a swarm's record, those of `via` first, the others by lot; then those told of.

        Anybody can tell of members that do not exist, and answer first. One machine can be any number of senders: those
        at one address have one turn, and then one more each.
        """
        senders = {peer for peer, sent in self.records.items() if any(record.id == swarm for record in sent)}
        told = self.members.get(swarm, {})
        others = sorted(senders.intersection(told).difference(via))
        random.shuffle(others)
        others.sort(key=_turns((self.network.source(peer), peer) for peer in others).__getitem__)
        return tuple(dict.fromkeys((*(peer for peer in via if peer in senders), *others, *told)))[:_MAX_FOUND]

    async def take(self, peer: str, statements: list[bytes]) -> None:
        """Keep the matching records and the members that the statements name; invalid statements are skipped."""
        for count, raw in enumerate(statements[:_MAX_STATEMENTS], 1):
            if count % _STATEMENTS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()  # checking signatures takes CPU time
            try:
                self._read_clock(peer, parse(raw))
                said = read_record_or_announcement(raw, now_ms=self.now_ms)
                if not isinstance(said, SwarmRecord):
                    self.network.learn(said.peer, said.addresses)
                    self.members.setdefault(said.swarm, {})[said.peer] = None
                elif said.name == self.wanted.name and self.wanted.allows(said.model_hash):
                    self.records.setdefault(peer, []).append(said)
                    self.answered.set()
                    if peer != DIRECTORY:
                        self.members.setdefault(said.id, {})[peer] = None
            except EnvelopeError as error:
                log.debug("%s sent an invalid statement: %s", peer, error)

    def _read_clock(self, peer: str, envelope: Envelope) -> None:
        """Note the number of a member's own announcement: a record from the future may be one of this morning."""
        if envelope.domain == ANNOUNCEMENT_DOMAIN and envelope.peer == peer:
            self.clocks.heard(peer, envelope.sequence, self.wall_clock(), trio.current_time())


async def resolve_swarm(
    network: Network,
    wanted: SwarmName,
    *,
    via: Iterable[str] = (),
    secret: bytes | None = None,
    wall_clock: Callable[[], float] = time.time,
    timeout_s: float = FIND_TIMEOUT_S,
    clocks: PeerClocks | None = None,
) -> FoundSwarm:
    """Return the swarm that a name means, by asking linked peers, `via` and the DHT for at most `timeout_s`.

    Raises `NameConflict` if several swarms match and `UnknownSwarm` if nobody knows one.
    """
    look_up_s = max(ASK_TIMEOUT_S, timeout_s - FIND_TIMEOUT_S)
    search, via = _Search(network, wanted, secret, wall_clock, look_up_s, clocks or PeerClocks()), tuple(via)
    with trio.move_on_after(timeout_s):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_ask_around, search, nursery, via)
            await search.answered.wait()
            with trio.move_on_after(QUIET_S):  # several records of one swarm may be around
                await search.idle.wait_for(lambda: not search.waiting)
            nursery.cancel_scope.cancel()
    resolution = resolve(wanted, search.records)
    if wanted.pin is not None and len(resolution.candidates) > 1:
        resolution = await _with_manifest(search, resolution, via)
    try:
        record = resolution.one()
    except UnknownSwarm as error:
        failures = [search.failures[peer] for peer in via if peer in search.failures]
        raise UnknownSwarm("; ".join([str(error), *failures[:_MAX_FAILURES_SHOWN]])) from None
    return FoundSwarm(record, search.likely_members(record.id, via))


async def _with_manifest(search: _Search, found: Resolution, via: tuple[str, ...]) -> Resolution:
    """Return the candidate whose manifest arrives first, or all if none does within `MANIFEST_TIMEOUT_S`.

    Anybody can sign a record with a hash that begins with the pin, but not make a manifest of such a hash. One machine
    can be any number of peers: those at one address have one voice, and then one more each.
    """
    proved: list[NameCandidate] = []
    turns = _turns(
        (search.network.source(peer), record.model_hash) for peer, sent in search.records.items() for record in sent
    )
    in_order = iter(sorted(found.candidates, key=lambda candidate: turns[candidate.record.model_hash]))

    async def prove() -> None:
        for candidate in in_order:
            record = candidate.record
            with suppress(UnknownSwarm):
                await fetch_manifest(search.network, search.likely_members(record.id, via), record.model_hash)
                proved.append(candidate)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + MANIFEST_TIMEOUT_S
        for _ in range(_PROVED_AT_ONCE):
            nursery.start_soon(prove)
    return replace(found, candidates=tuple(proved[:1])) if proved else found


def _turns(named: Iterable[tuple[str, str]]) -> dict[str, tuple[int, int]]:
    """Return a rank for each of the values that addresses named: each address has one voice, and then one more each.

    Of the values that have the same turn, those that most addresses named come first.
    """
    of_address: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for address, value in named:
        of_address[address].setdefault(value, len(of_address[address]))
    turns: defaultdict[str, list[int]] = defaultdict(list)
    for values in of_address.values():
        for value, turn in values.items():
            turns[value].append(turn)
    return {value: (min(some), -len(some)) for value, some in turns.items()}


async def _ask_around(search: _Search, nursery: trio.Nursery, via: tuple[str, ...]) -> None:
    """Ask `via`, the DHT, and linked peers, including those that are linked during the search."""
    network, wanted = search.network, search.wanted
    search.start(nursery, via)
    search.spawn(nursery, search.ask_record, record_key(wanted.name, wanted.pin, search.secret))
    keys = keys_to_ask(wanted.name, network.peer_id, search.wall_clock(), search.secret)
    turn = 0
    while True:
        search.start(nursery, [link.peer for link in network.links()])
        if turn % 4 == 0:
            for key in keys[turn : turn + ASK_AT_ONCE]:
                search.spawn(nursery, search.ask_rendezvous, nursery, key)
        turn += 1
        await trio.sleep(_POLL_S)


async def fetch_manifest(
    network: Network,
    peers: Iterable[str],
    model_hash: str,
    *,
    timeout_s: float = MANIFEST_TIMEOUT_S,
    max_bytes: int = MAX_MANIFEST_BYTES,
) -> Manifest:
    """Return a model's manifest from the first of `peers` that sends one with this hash.

    The first `_MANIFEST_ASKS` are asked in order, each further one after a shorter wait: many may never answer. Raises
    `UnknownSwarm` if none sends one of at most `max_bytes`: to read 4 MiB may take a second, in which nothing else is
    done.
    """
    found: list[Manifest] = []

    async def ask(peer: str, done: trio.Event) -> None:
        try:
            raw = await network.call(peer, wire.MANIFEST, bytes.fromhex(model_hash), timeout_s=timeout_s)
            if len(raw) <= max_bytes and hashlib.sha256(raw).hexdigest() == model_hash:
                found.append(Manifest.from_bytes(raw))
                nursery.cancel_scope.cancel()
        except (P2PError, RecordError) as error:
            log.info("%s did not send the manifest: %s", peer, error)
        done.set()

    async with trio.open_nursery() as nursery:
        for number, peer in enumerate(list(dict.fromkeys(peers))[:_MANIFEST_ASKS], 1):
            done = trio.Event()
            nursery.start_soon(ask, peer, done)
            with trio.move_on_after(_PATIENCE_S / number):
                await done.wait()
    if not found:
        raise UnknownSwarm(f"no member that was asked sent the manifest {model_hash[:8]}; try again later")
    return found[0]


def value_check(
    secret: bytes | None = None, wall_clock: Callable[[], float] = time.time
) -> Callable[[bytes, bytes], bool]:
    """Return the check for values in the DHT: True only for swarm records under their own keys."""

    def is_valid(key: bytes, value: bytes) -> bool:
        try:
            record = read_record(value, now_ms=int(wall_clock() * 1000))
        except EnvelopeError:
            return False
        pins = (None, record.model_hash)
        return any(key == record_key(record.name, pin, one) for pin in pins for one in {None, secret})

    return is_valid
