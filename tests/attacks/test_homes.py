"""Attacks on the room of a hop by one machine with several identities: they are one home, and gain nothing together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import trio
from trio.testing import MockClock

from app.core.span import Span
from app.serving.admission import IDLE_S, AdmissionLimits
from app.serving.block_server import BlockServer, ServerSettings
from app.serving.hop_session import HopSession, first_to_evict, resting_to_end
from app.session.frame import new_session_id, plain
from app.session.wire import KEEP, PROTOCOL, EpochOrder, Kind, decode, encode_turn
from p2p.errors import P2PError
from p2p.memory.fabric import MemoryFabric, MemoryStream, open_fabric
from tests.app.hash_model import HashRunner, InlineDevice

CACHE = 1000
PLACES = 60
ASKED_EVERY_S = 10


class Hop:
    """A hop with a small cache, and the sessions that others hold there."""

    def __init__(self, fabric: MemoryFabric, server: BlockServer, nursery: trio.Nursery) -> None:
        self.fabric, self.server, self._nursery = fabric, server, nursery
        self._streams: dict[str, MemoryStream] = {}
        self._answers: dict[bytes, trio.Event] = {}
        self.held: dict[str, dict[bytes, int]] = {}  # tokens of each session, by asker

    async def open(self, asker: str, tokens: int, machine: str = "") -> bool:
        """Order a session and keep it open with probes; True if it was admitted."""
        if asker not in self._streams:
            self.fabric.machine_of[asker] = machine or asker
            node = self.fabric.nodes.get(asker) or self.fabric.node(asker)
            self._streams[asker] = await node.open("victim", PROTOCOL)
            self.held[asker] = {}
            self._nursery.start_soon(self._listen, asker)
            self._nursery.start_soon(self._probe, asker)
        id = new_session_id(asker)
        self._answers[id] = trio.Event()
        self.held[asker][id] = tokens
        await self._streams[asker].send(encode_turn(id, 1, KEEP, EpochOrder(Span(0, 4), "", "", tokens, 0)))
        await self._answers[id].wait()
        return id in self.held[asker]

    async def opened_within(self, asker: str, tokens: int, seconds: float, machine: str = "") -> bool:
        """Order a session again and again for some time; True if it was admitted."""
        for _ in range(0, int(seconds), ASKED_EVERY_S):
            if await self.open(asker, tokens, machine):
                return True
            await trio.sleep(ASKED_EVERY_S)
        return False

    def tokens(self, *askers: str) -> int:
        """Tokens of the sessions that these askers have open."""
        return sum(sum(self.held[asker].values()) for asker in askers if asker in self.held)

    async def _listen(self, asker: str) -> None:
        with suppress(P2PError):  # a stream without sessions is closed
            while True:
                frame = decode(await self._streams[asker].receive())
                if frame.kind == Kind.TROUBLE:
                    self.held[asker].pop(frame.session, None)
                self._answers[frame.session].set()
        del self._streams[asker]

    async def _probe(self, asker: str) -> None:
        while asker in self._streams:
            await trio.sleep(30)
            for id in self.held[asker]:
                await self._streams[asker].send(plain(Kind.PROBE, id, 1))


@asynccontextmanager
async def open_hop() -> AsyncIterator[Hop]:
    settings = ServerSettings(admission=AdmissionLimits(sessions=PLACES), unused_s=1e9)
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server = BlockServer(fabric.node("victim"), HashRunner(0, 4, kv_tokens=CACHE), InlineDevice(), settings)
        await nursery.start(server.run)
        yield Hop(fabric, server, nursery)
        nursery.cancel_scope.cancel()


async def test_who_holds_the_cache_and_does_nothing_makes_way_within_a_minute(autojump_clock: MockClock) -> None:
    async with open_hop() as hop:
        assert await hop.open("squatter", CACHE)
        assert not await hop.open("honest", 100)
        assert await hop.opened_within("honest", 100, IDLE_S + 2 * ASKED_EVERY_S)


async def test_identities_that_take_turns_do_not_keep_the_cache(autojump_clock: MockClock) -> None:
    """Whenever one of them had made way, the next one took the room before those who had been refused came back."""
    names = [f"squatter {number}" for number in range(4)]
    async with open_hop() as hop, trio.open_nursery() as nursery:

        async def squat() -> None:
            while True:
                for name in names:
                    for tokens in (CACHE, 600, 300, 100, 20):
                        while await hop.open(name, tokens, "the attacker's"):
                            pass
                await trio.sleep(1)

        nursery.start_soon(squat)
        await trio.sleep(1)
        assert hop.tokens(*names) > 0.9 * CACHE
        for number in range(4):  # the first one waits for a minute, the others for nothing
            within_s = 1 if number else IDLE_S + 2 * ASKED_EVERY_S
            assert await hop.opened_within(f"honest {number}", CACHE // 6, within_s), number
            await trio.sleep(60)
        assert hop.tokens(*(f"honest {number}" for number in range(4))) == CACHE // 6 * 4, "nobody lost anything"
        nursery.cancel_scope.cancel()


async def test_more_identities_of_one_machine_do_not_shrink_the_share_of_others(autojump_clock: MockClock) -> None:
    """Eight of them made the fair share of an honest asker a tenth of the cache, where it is a third."""
    async with open_hop() as hop:
        for number in range(8):
            await hop.open(f"squatter {number}", CACHE // 10, "the attacker's")
        for _ in range(3):
            assert await hop.opened_within("honest", CACHE // 10, IDLE_S + 2 * ASKED_EVERY_S)
        assert hop.tokens("honest") == CACHE // 10 * 3


async def test_more_identities_of_one_machine_get_no_more_places(autojump_clock: MockClock) -> None:
    async with open_hop() as hop:
        for number in range(6):
            for _ in range(PLACES):
                await hop.open(f"squatter {number}", 1, "the attacker's")
        for _ in range(PLACES // 3 - 1):
            assert await hop.open("honest", 1)
        await hop.open("squatter 6", 1, "the attacker's")
        assert len(hop.held["honest"]) == PLACES // 3 - 1


async def test_askers_of_one_machine_share_its_part_among_themselves(autojump_clock: MockClock) -> None:
    """Somebody in the same house who took all of it makes way as anybody else does."""
    async with open_hop() as hop:
        while await hop.open("hog", 50, "the house's"):
            pass
        assert await hop.opened_within("neighbour", 100, IDLE_S + 2 * ASKED_EVERY_S, "the house's")
        await trio.sleep(1)  # until it was told
        assert hop.tokens("hog") == 650


async def test_askers_of_one_machine_share_its_places_among_themselves(autojump_clock: MockClock) -> None:
    async with open_hop() as hop:
        while await hop.open("hog", 1, "the house's"):
            pass
        sessions = hop.server.sessions
        while await hop.open("neighbour", 1, "the house's"):
            pass
        assert abs(len(hop.held["neighbour"]) - len(hop.held["hog"])) <= 1
        assert hop.server.sessions == sessions, "the house has no more than before"


async def test_sessions_count_where_their_asker_is_now(autojump_clock: MockClock) -> None:
    """Else one that moves would be in the way of itself, and what it begins with could end for it."""
    async with open_hop() as hop:
        assert await hop.open("asker", 100, "a relay")
        hop.fabric.machine_of["asker"] = "its address"
        assert await hop.open("asker", 100)
        assert {session.home for session in hop.server._sessions.values()} == {"its address"}


def test_what_several_identities_rest_or_keep_counts_together() -> None:
    """Each of four had less of it than an honest asker, which lost its own first."""
    sessions = []
    for number in range(5):
        asker, home = ("honest", "honest's") if number == 4 else (f"squatter {number}", "the attacker's")
        turn = EpochOrder(Span(0, 4), "", "", 1000, 0)
        session = HopSession(bytes([number]) * 16, asker, 1, turn, 10.0 - number, home)
        session.received = 100 + number
        session.computed(100 + number, bytes(100 + number), "f32")
        sessions.append(session)
    assert first_to_evict(sessions).asker == "squatter 3"
    for session in sessions:
        session.rest(900.0)
    found = resting_to_end(sessions)
    assert found is not None
    assert found.asker == "squatter 3"


async def test_who_holds_less_than_its_share_loses_nothing(autojump_clock: MockClock) -> None:
    async with open_hop() as hop:
        for number in range(3):
            assert await hop.open(f"honest {number}", CACHE // 5)
        while await hop.open("squatter", 50):
            pass
        for number in range(60):
            await hop.open(f"squatter {number}", 50, "the attacker's")
            await trio.sleep(ASKED_EVERY_S)
        assert [hop.tokens(f"honest {number}") for number in range(3)] == [CACHE // 5] * 3
