"""Patience with slow links, misused: members that send next to nothing keep nobody from what others would give."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count, islice
from pathlib import Path

import trio
from trio.testing import MockClock

from app.core.canonical_json import canonical
from app.core.network import Network, Payload
from app.manifest.merkle import leaf_hash
from app.rounds import wire as rounds_wire
from app.training.states import METHODS
from app.weights import wire as weights_wire
from app.weights.download import MAX_PEERS
from p2p.errors import P2PError, Refused
from p2p.memory.fabric import LinkProfile
from tests.app.rounds.island_swarm import open_islands
from tests.app.swarms import identity
from tests.app.weights.test_exchange import ALL, World, world


async def trickle(node: Network, peer: str) -> None:
    """Send a peer 5 kB/s of something."""
    while True:
        try:
            await node.call(peer, "anything", bytes(10_000), timeout_s=2)
        except P2PError:
            pass
        await trio.sleep(2)


async def test_a_member_that_trickles_an_old_state_does_not_keep_a_newcomer_out(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """It shows the log as it was some rounds ago, so that nobody else has the state after it."""
    async with open_islands(tmp_path, 0, 1, 2, steps=10**6, step_s=2.0) as swarm:
        first = swarm.nodes[1].island
        await swarm.until(lambda: len(first.standing.members) == 3)
        swarm.kill(0)  # jobs go on without their founder
        rounds = first.standing.round
        await swarm.until(lambda: first.standing.round >= rounds + 2 and first.checkpoint.round == first.standing.round)
        old, parts = [entry.raw for entry in first.log], list(first.checkpoint.parts)
        await swarm.until(lambda: first.standing.round >= len(old) + 4)

        trickler, newcomer = swarm.fabric.node(identity(7).peer_id), identity(4).peer_id

        async def hello(peer: str, body: bytes) -> Payload:
            return canonical({"round": 10**6, "head": "11" * 32})

        async def log(peer: str, body: bytes) -> Payload:
            asked = rounds_wire.fields_of(body[32:], "log")
            begin = asked.integer("round", 0, 10**6)
            return rounds_wire.pack(old[begin : begin + asked.integer("count", 1, 10**6)])

        async def named(peer: str, body: bytes) -> Payload:
            return canonical({"parts": [[part.root.hex(), part.size_bytes] for part in parts]})

        async def busy(peer: str, body: bytes) -> Payload:
            raise Refused("later")

        trickler.serve(rounds_wire.HELLO, hello)
        trickler.serve(rounds_wire.LOG, log)
        trickler.serve(rounds_wire.PARTS, named)
        trickler.serve(METHODS.leaves, busy)
        trickler.serve(METHODS.chunk, busy)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle, trickler, newcomer)
            late = swarm.add(4, has_model=False)
            await swarm.until(lambda: late.island.figures.steps > 0, within_s=1200)
            nursery.cancel_scope.cancel()


def tricklers(many: int) -> list[str]:
    """Names that the newcomer asks before the seed."""

    def turn(name: str) -> bytes:
        return leaf_hash(f"newcomer {name}".encode())

    names = (f"trickler-{number}" for number in count())
    return list(islice((name for name in names if turn(name) < turn("seed")), many))


async def test_eight_holders_that_trickle_do_not_hold_up_a_download(tmp_path: Path, patient_clock: MockClock) -> None:
    """Their names make them the first that this node tries; each sends 5 kB/s of something, but no chunk."""
    async with world(tmp_path) as here:

        async def never(peer: str, body: bytes) -> Payload:
            await trio.sleep_forever()
            raise AssertionError

        peer = here.peer("newcomer")
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for name in tricklers(MAX_PEERS):
                here.liar(name, lambda peer, body: b"").serve(weights_wire.CHUNK, never)
                nursery.start_soon(trickle, here.fabric.nodes[name], "newcomer")
            await peer.fetching.fetch(ALL)
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began < 300


class Withheld:
    """What holders answer that give all chunks but two runs, and those never: `refuse` is awaited instead."""

    def __init__(self, here: World, refuse: Callable[[], Awaitable[None]]) -> None:
        self._library, self._refuse = here.seed.library, refuse
        self.owed: set[tuple[bytes, int]] = set()  # root of a part, first chunk

    async def chunk(self, peer: str, body: bytes) -> Payload:
        request = weights_wire.ChunkRequest.decode(body)
        key = (request.root, request.index)
        if (len(self.owed) < 2 and request.count > 1) or key in self.owed:
            self.owed.add(key)
            await self._refuse()
        part = self._library.part(request.root)
        assert part is not None
        return weights_wire.chunk_answer(self._library.chunk(part, request.index) or b"")


async def test_two_holders_that_trickle_the_same_chunks_do_not_hold_up_a_download(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """They give the other chunks faster than anybody, so that they are chosen to repeat what one of them owes."""
    async with world(tmp_path) as here:
        withheld = Withheld(here, trio.sleep_forever)
        here.fabric.set_link("seed", "newcomer", LinkProfile(0.03))
        peer = here.peer("newcomer")
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for name in tricklers(2):
                here.liar(name, lambda peer, body: b"").serve(weights_wire.CHUNK, withheld.chunk)
                nursery.start_soon(trickle, here.fabric.nodes[name], "newcomer")
            await peer.fetching.fetch(ALL)
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began < 300
