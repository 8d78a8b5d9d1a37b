"""Sessions that rest at a hop: no stranger gets at their cache, and no asker can hold memory by resting."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from app.core.span import Span
from app.serving.admission import AdmissionLimits
from app.serving.block_server import BlockServer, ServerSettings
from app.session.frame import Frame, header, new_session_id, plain
from app.session.wire import KEEP, PROTOCOL, EpochOrder, Kind, Prefix, encode_turn
from engine.errors import CacheFull
from p2p.memory.fabric import MemoryFabric, MemoryStream, open_fabric
from tests.app.hash_model import WIDTH, HashEnds, HashRunner, InlineDevice
from tests.attacks.test_sessions import F32, next_frame

TURN = EpochOrder(Span(0, 4), "", "", 64, 0, 0)
TOKENS = list(range(40))


class Hop:
    """A block server, and the streams of those who ask it."""

    def __init__(self, server: BlockServer, runner: HashRunner, fabric: MemoryFabric) -> None:
        self.server, self.runner, self.fabric = server, runner, fabric
        self._streams: dict[str, MemoryStream] = {}

    async def send(self, asker: str, *messages: bytes) -> None:
        """Send frames on an asker's stream."""
        for message in messages:
            await (await self._stream(asker)).send(message)

    async def open(self, asker: str, id: bytes, turn: EpochOrder = TURN, epoch: int = 1) -> Frame:
        """Begin an epoch; returns the hop's answer."""
        await self.send(asker, encode_turn(id, epoch, KEEP, turn))
        return await next_frame(await self._stream(asker), Kind.READY)

    async def resting(self, asker: str, seconds: int = 600) -> bytes:
        """A session of 40 tokens that rests."""
        id = new_session_id(asker)
        await self.open(asker, id)
        await self.send(asker, data(id, 1, 0))
        await next_frame(await self._stream(asker), Kind.DATA)
        await self.send(asker, plain(Kind.CLOSE, id, 1, rows=seconds))
        await trio.sleep(0.1)
        return id

    async def _stream(self, asker: str) -> MemoryStream:
        if asker not in self._streams:
            self._streams[asker] = await self.fabric.node(asker).open("victim", PROTOCOL)
        return self._streams[asker]


def data(id: bytes, epoch: int, position: int, revision: int = 0) -> bytes:
    """All tokens as one frame."""
    body = HashEnds().embed(TOKENS)
    place: dict[str, int] = {"rows": len(TOKENS), "width": WIDTH, "length": len(body), "revision": revision}
    return header(Kind.DATA, id, epoch, position, dtype=F32, **place) + body


@asynccontextmanager
async def open_hop(kv_tokens: int = 1 << 20, settings: ServerSettings | None = None) -> AsyncIterator[Hop]:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        runner = HashRunner(0, 4, kv_tokens=kv_tokens)
        server = BlockServer(fabric.node("victim"), runner, InlineDevice(), settings or ServerSettings())
        await nursery.start(server.run)
        yield Hop(server, runner, fabric)
        nursery.cancel_scope.cancel()


async def test_a_stranger_cannot_begin_with_the_cache_of_another_asker(autojump_clock: MockClock) -> None:
    async with open_hop() as hop:
        rests = await hop.resting("honest")
        for ends in (False, True):
            turn = replace(TURN, prefix=Prefix(rests, 20, ends))
            ready = await hop.open("thief", new_session_id("thief"), turn)
            assert (ready.position, ready.rows) == (0, 0)
        ready = await hop.open("honest", new_session_id("honest"), replace(TURN, prefix=Prefix(rests, 20, True)))
        assert ready.position == 20


async def test_a_session_begins_with_no_more_than_is_cached_for_the_same_blocks(autojump_clock: MockClock) -> None:
    async with open_hop() as hop:
        rests = await hop.resting("asker")
        wanted = Prefix(rests, 1000, False)
        cases = [
            (replace(TURN, prefix=wanted), 40),
            (replace(TURN, prefix=wanted, tokens=10), 10),
            (replace(TURN, prefix=wanted, span=Span(0, 3)), 0),
            (replace(TURN, prefix=wanted, wire="f16"), 0),
            (replace(TURN, prefix=Prefix(new_session_id("asker"), 40, True)), 0),
        ]
        for turn, position in cases:
            ready = await hop.open("asker", new_session_id("asker"), turn)
            assert ready.position == position, turn


async def test_a_session_that_names_itself_begins_anew(autojump_clock: MockClock) -> None:
    async with open_hop() as hop:
        id = await hop.resting("asker")
        ready = await hop.open("asker", id, replace(TURN, prefix=Prefix(id, 40, True)), epoch=2)
        assert ready.position == 0
        assert hop.server.sessions == 1


async def test_a_resting_session_accepts_nothing(autojump_clock: MockClock) -> None:
    async with open_hop() as hop:
        id = await hop.resting("asker")
        (session,) = hop.server._sessions.values()
        for kind in (Kind.GO, Kind.PACE, Kind.PROBE, Kind.STATE, Kind.READY):
            await hop.send("asker", plain(kind, id, 1, 0))
        await hop.send("asker", data(id, 1, len(TOKENS)), data(id, 1, 0))
        await trio.sleep(1)
        assert (session.length, session.received, hop.server.queued_rows) == (40, 40, 0)
        state = await next_frame(hop._streams["asker"], Kind.STATE)
        assert state.position == 0
        await hop.send("asker", plain(Kind.CLOSE, id, 1))
        await trio.sleep(1)
        assert hop.runner.kv_free_tokens == hop.runner.kv_total_tokens


async def test_a_rest_has_an_end_whatever_the_asker_wishes(autojump_clock: MockClock) -> None:
    async with open_hop() as hop:
        id = await hop.resting("asker", seconds=2**32 - 1)
        for _ in range(20):
            await trio.sleep(60)
            await hop.send("asker", plain(Kind.CLOSE, id, 1, rows=2**32 - 1), plain(Kind.PROBE, id, 1))
        assert not hop.server._sessions
        assert hop.runner.kv_free_tokens == hop.runner.kv_total_tokens


async def test_resting_sessions_keep_nobody_out(autojump_clock: MockClock) -> None:
    """A hostile asker rests as many sessions as fit: others are admitted as if there were none."""
    async with open_hop(kv_tokens=640) as hop:
        for _ in range(40):
            await hop.resting("hostile")
        assert hop.server.kv_free_tokens == 640
        for number in range(5):
            ready = await hop.open(f"honest{number}", new_session_id(f"honest{number}"))
            assert ready.position == 0
        assert hop.server.sessions == 5


async def test_a_session_in_use_may_be_taken_over_by_its_asker_alone_while_its_tokens_wait(
    autojump_clock: MockClock,
) -> None:
    async with open_hop() as hop:
        id = new_session_id("asker")
        await hop.open("asker", id)
        await hop.send("asker", data(id, 1, 0), data(id, 1, 40))
        ready = await hop.open("asker", new_session_id("asker"), replace(TURN, prefix=Prefix(id, 40, True)))
        assert ready.position in (0, 40)
        await trio.sleep(1)
        assert (hop.server.sessions, hop.server.queued_rows) == (1, 0)


async def test_copies_of_a_session_keep_no_more_outputs_than_all_sessions_may(autojump_clock: MockClock) -> None:
    """Each begins with another session's tokens, of which outputs are kept, and computes nothing."""
    kept_bytes = 10 * len(TOKENS) * 4 * WIDTH
    turn = replace(TURN, send_from=None)
    async with open_hop(settings=ServerSettings(kept_bytes=kept_bytes)) as hop:
        ids = {asker: new_session_id(asker) for asker in ("honest", "attacker")}
        for asker, id in ids.items():
            await hop.open(asker, id, turn)
            await hop.send(asker, data(id, 1, 0))
        await trio.sleep(1)
        for _ in range(40):
            copy = new_session_id("attacker")
            ready = await hop.open("attacker", copy, replace(turn, prefix=Prefix(ids["attacker"], len(TOKENS), False)))
            assert ready.position == len(TOKENS)
            await hop.send("attacker", plain(Kind.CLOSE, copy, 1, rows=600))
            sessions = hop.server._sessions.values()
            assert sum(len(session.kept) for session in sessions) <= kept_bytes
        assert [len(session.kept) for session in sessions if session.asker == "honest"] == [kept_bytes // 10]


# So that the outputs of a small session cost as much as those of a large one.
COSTLY = AdmissionLimits(again_bytes=1)
KEPT_BYTES = len(TOKENS) * 4 * WIDTH


async def test_orders_for_which_many_outputs_are_sent_again_are_read_more_slowly(autojump_clock: MockClock) -> None:
    """An order of 250 bytes may have 64 MiB sent again, which takes time in which nobody is served."""
    turn, orders, seconds = replace(TURN, send_from=None), 100, 10
    async with open_hop(settings=ServerSettings(admission=COSTLY)) as hop:
        id = new_session_id("attacker")
        await hop.open("attacker", id, turn)
        await hop.send("attacker", data(id, 1, 0))
        await trio.sleep(1)
        for number in range(orders):
            await hop.send("attacker", encode_turn(id, 2 + number, KEEP, replace(turn, send_from=0)))
            await trio.sleep(seconds / orders)
        (session,) = hop.server._sessions.values()
        most = (COSTLY.frames_burst + (seconds + 1) * COSTLY.frames_per_s) / KEPT_BYTES + 1
        assert 1 < session.epoch <= 1 + most < orders
        ready = await hop.open("honest", new_session_id("honest"))
        assert ready.position == 0


async def test_resting_sessions_make_room_for_the_pages_that_a_cut_copies(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that was cut ended instead."""
    async with open_hop() as hop:
        await hop.resting("another")
        truncate = HashRunner.truncate

        def without_room(self: HashRunner, session: bytes, length: int) -> None:
            if len(hop.server._sessions) > 1:
                raise CacheFull("no room for a copy")
            truncate(self, session, length)

        monkeypatch.setattr(HashRunner, "truncate", without_room)
        id = new_session_id("asker")
        await hop.open("asker", id)
        await hop.send("asker", data(id, 1, 0), data(id, 1, 0, revision=1))
        await trio.sleep(1)
        (session,) = hop.server._sessions.values()
        assert (session.id, session.length, session.revision) == (id, len(TOKENS), 1)
