"""The optimiser's moments of islands, which a newcomer takes over from one of them.

An island that begins with fresh moments makes larger and other steps than the rest, and its first change is unlike
theirs. Moments are each island's own, so nobody attests them: a newcomer asks several islands how large theirs are,
takes those nearest to the middle from one that has given what it promised before, and checks what comes. Without any
it begins with fresh ones. An island writes its moments down only when somebody asks, once a round at most.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

import trio

from app.core.canonical_json import Fields, canonical
from app.core.compute import Device
from app.core.errors import RecordError
from app.core.network import Network
from app.manifest.merkle import HASH_BYTES
from app.rounds import wire
from app.rounds.decisions import SLOWER, SPARE_S, UNMEASURED_BYTES_PER_S
from app.training.states import FETCH_S, StateStore
from app.training.wire import MAX_STATE_BYTES, StatePart
from p2p.errors import P2PError, RemoteError

log = logging.getLogger("shoal.rounds")

MAX_PARTS = 5000
ASK_S = 15.0
GRACE_S = 2.0  # for offers, once the state is here
MOST_ASKED = 8
NORM_FACTOR = 3.0  # moments so many times larger or smaller than the middle are taken from nobody
_MOST_NORM = 1e30
_MOST_STEPS = 10**12


class MomentsModel(Protocol):
    """What taking over moments needs of an island's model; `engine.island.IslandModel` has it."""

    @property
    def has_moments(self) -> bool: ...
    @property
    def moments_bytes(self) -> list[int]: ...
    def moments(self) -> Any: ...
    def take_moments(self, moments: Any) -> None: ...


@dataclass(frozen=True)
class Offer:
    """Moments that an island has: steps that they are of, norms of the first and the second, and the parts."""

    steps: int
    norms: tuple[float, float]
    parts: tuple[StatePart, ...]


@dataclass
class Question:
    """What islands were asked for, and have offered so far."""

    peers: Sequence[str]
    offers: dict[str, Offer] = field(default_factory=dict)
    answered: trio.Event = field(default_factory=trio.Event)  # by all, or they did not


class Taken(NamedTuple):
    """Moments as they came; `engine.island.InnerMoments` has the same fields."""

    steps: int
    parts: Sequence[bytes]
    norms: tuple[float, float]


def best_offers(offers: Mapping[str, Offer], gave: Mapping[str, int], rng: random.Random) -> list[str]:
    """Return whose moments to take, the best first: of those who gave the most, and by lot.

    The lot does not follow from peer ids: anybody can make ids until one comes first. Of three or more, those whose
    norms are far from the middle are left out.
    """
    left = [peer for peer, one in offers.items() if one.steps > 0]
    if len(left) >= 3:
        middles = [median(offers[peer].norms[side] for peer in left) for side in (0, 1)]
        left = [
            peer
            for peer in left
            if all(
                middle / NORM_FACTOR <= norm <= middle * NORM_FACTOR
                for norm, middle in zip(offers[peer].norms, middles, strict=True)
            )
        ]
    return sorted(left, key=lambda peer: (-gave.get(peer, 0), rng.random()))


class MomentsExchange:
    """Gives the moments of one island to newcomers, and takes those of others."""

    def __init__(
        self, network: Network, job: bytes, model: MomentsModel | None, device: Device, states: StateStore
    ) -> None:
        """Without a model that is whole here, there are no moments to give or to take."""
        self._network, self._job, self._model = network, job, model
        self._device, self._states = device, states
        self.run = b"moments" + job[:16]  # that the moments belong to among the states
        self._taken_in = -1  # the round in which the moments were written down last
        self._offer: Offer | None = None
        self._writing = trio.Lock()

    @property
    def are_lacking(self) -> bool:
        """True if this island would begin with fresh moments, and could take over those of another."""
        return self._model is not None and not self._model.has_moments

    async def answer(self, number: int) -> bytes:
        """Return what this island's moments are, in round `number`; raises `RemoteError` if it has none."""
        async with self._writing:
            if self._taken_in != number:
                if self._model is None or not self._model.has_moments:
                    raise RemoteError("this island has no moments yet", wire.NOT_YET)
                before = self._offer.parts if self._offer is not None else ()
                made = await self._device.run_beside(self._model.moments)
                parts = tuple([await self._states.keep(self.run, data) for data in made.parts])
                await self._states.forget(self.run, [*before, *parts])
                self._offer, self._taken_in = Offer(made.steps, made.norms, parts), number
            offer = self._offer
        assert offer is not None
        named = [[part.root.hex(), part.size_bytes] for part in offer.parts]
        return canonical({"steps": offer.steps, "norms": list(offer.norms), "parts": named})

    async def ask(self, question: Question) -> None:
        """Ask islands what moments they have; their offers are in the question as they come."""
        model = self._model

        async def ask(peer: str) -> None:
            try:
                body = wire.request(self._job, {})
                answer = await self._network.call(peer, wire.MOMENTS, body, timeout_s=ASK_S)
                offer = offer_in(wire.fields_of(answer, "moments"))
            except (P2PError, RecordError) as error:
                log.debug("%s offers no moments: %s", peer, error)
                return
            if model is not None and [part.size_bytes for part in offer.parts] == model.moments_bytes:
                question.offers[peer] = offer

        async with trio.open_nursery() as nursery:
            for peer in question.peers[:MOST_ASKED] if self.are_lacking else ():
                nursery.start_soon(ask, peer)
        question.answered.set()

    async def take(self, question: Question, gave: Mapping[str, int]) -> bool:
        """Take over moments that were offered; False if none can be used. `gave` is what islands gave of the state."""
        with trio.move_on_after(GRACE_S):
            await question.answered.wait()
        model, offers = self._model, dict(question.offers)
        for peer in best_offers(offers, gave, random.SystemRandom()):
            if model is not None and await self._took(model, peer, offers[peer]):
                return True
        return False

    async def _took(self, model: MomentsModel, peer: str, offer: Offer) -> bool:
        patience_s = self._patience_s(peer, offer)
        until = trio.current_time() + patience_s

        def gives(size: int) -> None:
            scope.deadline = until

        with trio.move_on_after(min(FETCH_S, patience_s)) as scope:  # until it has shown that it has any
            try:
                parts = await self._states.fetch(self.run, offer.parts, [peer], is_patient=True, arrived=gives)
                await self._device.run_beside(model.take_moments, Taken(offer.steps, parts, offer.norms))
                return True
            except Exception as error:  # of torch, for one, if the card is full; fresh ones will do
                log.info("the moments of %s could not be taken over: %r", peer, error)
            finally:
                with trio.CancelScope(shield=True):
                    await self._states.forget(self.run, self._offer.parts if self._offer is not None else ())
        return False

    def _patience_s(self, peer: str, offer: Offer) -> float:
        size = sum(part.size_bytes for part in offer.parts)
        speed = next((link.down_bytes_per_s for link in self._network.links() if link.peer == peer), None)
        return ASK_S + SPARE_S + SLOWER * size / (speed or UNMEASURED_BYTES_PER_S)


def offer_in(fields: Fields) -> Offer:
    """Return the moments that an island offers; raises `RecordError`."""
    norms = fields.items("norms", 2)
    numbers = Fields(fields.what, {str(at): norm for at, norm in enumerate(norms)})
    return Offer(
        fields.integer("steps", 1, _MOST_STEPS),
        (numbers.number("0", 0, _MOST_NORM), numbers.number("1", 0, _MOST_NORM)),
        tuple(parts_in(fields)),
    )


def parts_in(fields: Fields) -> list[StatePart]:
    """Return the parts in an answer; raises `RecordError`."""
    parts = []
    for item in fields.items("parts", MAX_PARTS):
        match item:
            case [str(root), int(size)] if 0 < size <= MAX_STATE_BYTES:
                parts.append(StatePart(Fields(fields.what, {"root": root}).hex_bytes("root", HASH_BYTES), size))
            case _:
                fields.refuse("parts", "pairs of a hash and a number of bytes")
    return parts
