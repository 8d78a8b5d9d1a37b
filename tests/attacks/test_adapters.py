"""Adapters that an asker sends to a hop: a bad one costs its own session alone, and memory is bounded."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from app.core.errors import RecordError
from app.core.span import Span
from app.serving.adapters import AdapterLimits
from app.serving.block_server import BlockServer, ServerSettings
from app.session.adapter_index import AdapterIndex, AdapterRef, decode_index
from app.session.frame import decode_hop_error, new_session_id, plain
from app.session.loop_stream import loop_streams
from app.session.wire import KEEP, KNOWS_ADAPTERS, Kind, Prefix, encode_turn
from engine.errors import DeviceFull, TrainingError
from engine.model.hosted_span import HostedSpan
from engine.session_runner import SessionRunner
from p2p.memory.fabric import open_fabric
from tests.app.hash_model import ADAPTER_BYTES, AdapterShelf, HashAdapter, HashRunner, InlineDevice
from tests.attacks.test_resting import TOKENS, TURN, Hop, data
from tests.attacks.test_sessions import next_frame
from tests.engine.random_spans import random_span, small_config

POND, LAKE, SEA = HashAdapter(1), HashAdapter(2), HashAdapter(3)
ONE = 4 * ADAPTER_BYTES  # an adapter of rank 1 at a hop of four blocks
LIMITS = AdapterLimits(asker_bytes=2 * ONE, total_bytes=4 * ONE, loading=3, asker_loading=2, fetch_s=20.0)


@asynccontextmanager
async def adapted_hop(shelf: Any, runner: Any = None, limits: AdapterLimits = LIMITS) -> AsyncIterator[Hop]:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        runner = runner or HashRunner(0, 4)
        settings = ServerSettings(adapters=limits)
        server = BlockServer(fabric.node("victim"), runner, InlineDevice(), settings, shelf)
        await nursery.start(server.run)
        hop = Hop(server, runner, fabric)
        del runner  # a test looks whether anybody else holds it
        yield hop
        nursery.cancel_scope.cancel()


def adapted(adapter: HashAdapter) -> Any:
    return replace(TURN, adapter=adapter.ref)


async def refused(hop: Hop, adapter: AdapterRef, asker: str = "evil") -> tuple[str, str]:
    """The code and the text with which a session is refused."""
    await hop.send(asker, encode_turn(new_session_id(asker), 1, KEEP, replace(TURN, adapter=adapter)))
    error = decode_hop_error(await next_frame(hop._streams[asker], Kind.TROUBLE))
    return error.why, error.text


async def works(hop: Hop, asker: str = "honest") -> None:
    """Another asker's session without an adapter is answered."""
    id = new_session_id(asker)
    await hop.open(asker, id)
    await hop.send(asker, data(id, 1, 0))
    await next_frame(hop._streams[asker], Kind.DATA)
    await hop.send(asker, plain(Kind.CLOSE, id, 1))


def shelf_with(**changes: Any) -> tuple[AdapterShelf, AdapterRef]:
    made = HashAdapter(9)
    made.index = replace(made.index, **changes)
    return AdapterShelf(made), made.ref


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vector_bytes": 4}, "it belongs to another model"),
        ({"vector_bytes": 2**30}, "it belongs to another model"),
        ({"roots": (bytes(32),) * 3}, "it belongs to another model"),
        ({"rank": 256}, "it belongs to another model"),
        ({"rank": 256, "vector_bytes": 256 * ADAPTER_BYTES}, "this node takes adapters up to"),
    ],
)
async def test_an_index_that_does_not_fit_is_refused(
    autojump_clock: MockClock, changes: dict[str, Any], words: str
) -> None:
    shelf, ref = shelf_with(**changes)
    async with adapted_hop(shelf) as hop:
        why, text = await refused(hop, ref)
        assert why == "adapter_refused"
        assert words in text
        assert (hop.server.sessions, hop.server._adapters.total_bytes) == (0, 0)
        await works(hop)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (TrainingError("numbers that are not finite"), "adapter_refused"),
        (RecordError("the adapter's index: not valid JSON"), "adapter_refused"),
        (DeviceFull("the device's memory is full"), "adapters_full"),
    ],
)
async def test_an_adapter_that_cannot_be_loaded_costs_its_session_alone(
    autojump_clock: MockClock, error: Exception, why: str
) -> None:
    runner = HashRunner(0, 4)

    def fail(*values: Any) -> Any:
        raise error

    runner.load_adapter = fail  # type: ignore[assignment, method-assign]
    async with adapted_hop(AdapterShelf(POND), runner) as hop:
        assert (await refused(hop, POND.ref))[0] == why
        assert (await refused(hop, LAKE.ref))[0] == "adapter_refused"  # which the asker does not have
        assert hop.server._adapters.total_bytes == 0
        await works(hop)


async def test_an_adapter_that_never_arrives_holds_up_nobody(autojump_clock: MockClock) -> None:
    async with adapted_hop(AdapterShelf(POND, LAKE, SEA, seconds=1e6)) as hop:
        begin = trio.current_time()
        for adapter in (POND, LAKE, SEA):
            await hop.send("evil", encode_turn(new_session_id("evil"), 1, KEEP, adapted(adapter)))
        await works(hop)
        assert len(hop.server._adapters._coming) == LIMITS.asker_loading
        await hop.send("evil", plain(Kind.PROBE, new_session_id("evil"), 1))
        await next_frame(hop._streams["evil"], Kind.STATE)  # it is alive, and says so
        error = decode_hop_error(await next_frame(hop._streams["evil"], Kind.TROUBLE))
        assert "did not arrive in time" in error.text
        assert trio.current_time() - begin == pytest.approx(LIMITS.fetch_s, abs=1.0)
        await trio.sleep(LIMITS.fetch_s)
        assert not hop.server._awaited


class Senders(AdapterShelf):
    """Adapters of which bytes come evenly, of some askers not even the index."""

    def __init__(self, *adapters: HashAdapter, seconds: float, bytes_per_s: float = 0.0) -> None:
        super().__init__(*adapters, seconds=seconds)
        self.bytes_per_s = bytes_per_s

    async def index(self, asker: str, adapter: AdapterRef) -> AdapterIndex:
        if asker.startswith("silent"):
            await trio.sleep_forever()
        return await super().index(asker, adapter)

    async def vectors(self, asker: str, index: AdapterIndex, span: Span, arrived: Callable[[int], None]) -> list[bytes]:
        for _ in range(int(self.seconds)):
            await trio.sleep(1)
            arrived(int(self.bytes_per_s))
        return self.adapters[next(ref for ref, one in self.adapters.items() if one.index is index)].vectors[:4]


WIDE = AdapterLimits(late_s=5.0, index_s=20.0)


async def fill(hop: Hop, askers: str) -> None:
    """Have all places for adapters on their way taken, each by another home."""
    for number in range(WIDE.loading):
        asker = f"{askers}{number}"
        await hop.send(asker, encode_turn(new_session_id(asker), 1, KEEP, adapted(POND)))
    await trio.sleep(1)
    assert len(hop.server._adapters._coming) == WIDE.loading


@pytest.mark.parametrize("who", ["silent", "slow"])
async def test_adapters_that_do_not_come_keep_nobody_out(autojump_clock: MockClock, who: str) -> None:
    """Four identities held all places for adapters on their way, by naming some that they never sent."""
    shelf = Senders(POND, LAKE, SEA, seconds=200.0, bytes_per_s=WIDE.bytes_per_s / 3)
    async with adapted_hop(shelf, limits=WIDE) as hop:
        await fill(hop, who)
        begin, shelf.seconds = trio.current_time(), 1.0
        for number in range(3):
            asker = f"honest{number}"
            await hop.open(asker, new_session_id(asker), adapted(POND))
        assert trio.current_time() - begin < 3 * WIDE.late_s
        error = decode_hop_error(await next_frame(hop._streams[f"{who}0"], Kind.TROUBLE))
        assert (error.code, error.why) == ("busy", "adapters_full")


async def test_an_adapter_that_comes_as_fast_as_it_has_to_keeps_its_place(autojump_clock: MockClock) -> None:
    shelf = Senders(POND, LAKE, SEA, seconds=200.0, bytes_per_s=WIDE.bytes_per_s)
    async with adapted_hop(shelf, limits=WIDE) as hop:
        await fill(hop, "honest")
        begin = trio.current_time()
        assert (await refused(hop, POND.ref))[0] == "adapters_full"
        assert trio.current_time() - begin == pytest.approx(2 * WIDE.late_s, abs=WIDE.late_s / 4)
        await trio.sleep(200)
        assert len(hop.server._adapters._loaded) == WIDE.loading


async def test_who_has_an_adapter_on_its_way_takes_no_place_of_others(autojump_clock: MockClock) -> None:
    async with adapted_hop(Senders(POND, LAKE, SEA, seconds=200.0), limits=WIDE) as hop:
        await fill(hop, "silent")
        await hop.send("evil", encode_turn(new_session_id("evil"), 1, KEEP, adapted(POND)))
        await trio.sleep(WIDE.late_s)
        before = {one.key for one in hop.server._adapters._coming}
        assert "evil" in {key.asker for key in before}
        assert (await refused(hop, LAKE.ref))[0] == "adapters_full"
        assert {one.key for one in hop.server._adapters._coming} == before


async def test_an_index_that_does_not_come_is_given_up_soon(autojump_clock: MockClock) -> None:
    async with adapted_hop(Senders(POND, seconds=1.0), limits=WIDE) as hop:
        begin = trio.current_time()
        assert "did not arrive in time" in (await refused(hop, POND.ref, "silent"))[1]
        assert trio.current_time() - begin == pytest.approx(WIDE.index_s, abs=1.0)


async def test_orders_that_wait_for_an_adapter_are_counted(autojump_clock: MockClock) -> None:
    async with adapted_hop(AdapterShelf(POND, seconds=1e6)) as hop:
        limit = LIMITS.asker_orders
        for _ in range(limit):
            await hop.send("evil", encode_turn(new_session_id("evil"), 1, KEEP, adapted(POND)))
        assert (await refused(hop, POND.ref))[0] == "adapters_full"
        assert hop.server._awaited.total() == limit
        await works(hop)


async def test_blocks_that_are_given_up_are_not_held_by_adapters_on_their_way(autojump_clock: MockClock) -> None:
    async with adapted_hop(AdapterShelf(POND, LAKE, SEA, seconds=1e6)) as hop:
        for adapter in (POND, LAKE, SEA):
            await hop.send("asker", encode_turn(new_session_id("asker"), 1, KEEP, adapted(adapter)))
        await trio.sleep(1)
        blocks = weakref.ref(hop.runner)
        hop.runner = HashRunner(0, 4)
        await hop.server.host(hop.runner)
        await trio.sleep(1)
        gc.collect()
        assert blocks() is None
        assert not hop.server._awaited
        assert not hop.server._adapters._orders


@pytest.mark.parametrize("ending", ["close", "stream", "runner"])
async def test_a_session_that_ends_before_its_adapter_is_loaded_stays_ended(
    autojump_clock: MockClock, ending: str
) -> None:
    async with adapted_hop(AdapterShelf(POND, seconds=5.0)) as hop:
        id = new_session_id("asker")
        await hop.send("asker", encode_turn(id, 1, KEEP, adapted(POND)))
        await trio.sleep(1)
        if ending == "close":
            await hop.send("asker", plain(Kind.CLOSE, id, 1))
        elif ending == "stream":
            await hop._streams["asker"].reset()
        else:
            await hop.server.host(HashRunner(0, 4))
        await trio.sleep(10)
        assert hop.server.sessions == 0
        assert all(not one.users for one in hop.server._adapters._loaded.values())
        if ending == "close":
            assert (await hop.open("asker", id, adapted(POND), epoch=2)).width & KNOWS_ADAPTERS


async def test_unused_adapters_make_room_and_used_ones_do_not(autojump_clock: MockClock) -> None:
    shelf = AdapterShelf(POND, LAKE, SEA)
    async with adapted_hop(shelf) as hop:
        ids = {}
        for adapter in (POND, LAKE):
            ids[adapter] = new_session_id("asker")
            await hop.open("asker", ids[adapter], adapted(adapter))
            await trio.sleep(1)
        for other in ("one", "two"):
            await hop.open(other, new_session_id(other), adapted(SEA))
        assert hop.server._adapters.total_bytes == LIMITS.total_bytes
        assert (await refused(hop, SEA.ref))[0] == "adapters_full"
        await hop.send("asker", plain(Kind.CLOSE, ids[POND], 1))
        await trio.sleep(1)
        assert hop.server._adapters.total_bytes == LIMITS.total_bytes  # it stays until others need its room
        await hop.open("evil", new_session_id("evil"), adapted(SEA))
        assert {key.root for key in hop.server._adapters._loaded} == {LAKE.ref.root, SEA.ref.root}
        # What rests makes way too, as it does for everything else.
        await hop.send("asker", data(ids[LAKE], 1, 0))
        await next_frame(hop._streams["asker"], Kind.DATA)
        await hop.send("asker", plain(Kind.CLOSE, ids[LAKE], 1, rows=600))
        await trio.sleep(1)
        await hop.open("third", new_session_id("third"), adapted(POND))
        assert {key.root for key in hop.server._adapters._loaded} == {POND.ref.root, SEA.ref.root}
        assert hop.server._adapters.total_bytes == LIMITS.total_bytes


async def test_one_asker_leaves_room_for_the_adapters_of_others(autojump_clock: MockClock) -> None:
    shelf = AdapterShelf(POND, LAKE, SEA, seconds=1.0)
    async with adapted_hop(shelf, limits=replace(LIMITS, asker_bytes=ONE)) as hop:
        for adapter in (POND, LAKE):  # both are on their way at once
            await hop.send("evil", encode_turn(new_session_id("evil"), 1, KEEP, adapted(adapter)))
        error = decode_hop_error(await next_frame(hop._streams["evil"], Kind.TROUBLE))
        assert (error.why, "of your other sessions" in error.text) == ("adapters_full", True)
        await hop.open("honest", id := new_session_id("honest"), adapted(SEA))
        await hop.send("honest", data(id, 1, 0))
        await next_frame(hop._streams["honest"], Kind.DATA)
        await hop.send("honest", plain(Kind.CLOSE, id, 1, rows=600))
        await trio.sleep(1)
        assert (await refused(hop, SEA.ref))[0] == "adapters_full"
        assert len(hop.server._sessions) == 2  # what others have at rest does not make way for more than a share


def one_machine(hop: Hop, *askers: str) -> None:
    """Let these askers have one address."""
    for asker in askers:
        hop.fabric.machine_of[asker] = f"the machine of {askers[0]}"


async def test_orders_of_one_address_take_no_place_of_others(autojump_clock: MockClock) -> None:
    """Four identities had so many orders wait that nobody else's were taken."""
    async with adapted_hop(Senders(POND, LAKE, SEA, seconds=1.0), limits=AdapterLimits()) as hop:
        for home in ("a", "b"):
            askers = [f"silent {home}{number}" for number in range(4)]
            one_machine(hop, *askers)
            for asker in askers:
                for number in range(AdapterLimits().asker_orders):
                    adapter = (POND, LAKE, SEA)[number % 3]
                    await hop.send(asker, encode_turn(new_session_id(asker), 1, KEEP, adapted(adapter)))
            await trio.sleep(1)
        assert hop.server._awaited.total() == AdapterLimits().orders
        for number in range(3):
            begin, asker = trio.current_time(), f"honest{number}"
            await hop.open(asker, new_session_id(asker), adapted(POND))
            assert trio.current_time() - begin < AdapterLimits().late_s


async def test_adapters_on_their_way_beyond_a_fair_share_make_way(autojump_clock: MockClock) -> None:
    """They came just as fast as they had to, and all places and bytes were theirs again and again."""
    shelf = Senders(POND, LAKE, SEA, seconds=200.0, bytes_per_s=WIDE.bytes_per_s)
    async with adapted_hop(shelf, limits=replace(WIDE, total_bytes=8 * ONE)) as hop:
        for home in ("a", "b", "c"):
            askers = [f"evil {home}{number}" for number in range(4)]
            one_machine(hop, *askers)
            for asker in askers:
                for adapter in (POND, LAKE):
                    await hop.send(asker, encode_turn(new_session_id(asker), 1, KEEP, adapted(adapter)))
            await trio.sleep(1)
        homes = Counter(one.holder.home for one in hop.server._adapters._coming)
        assert sorted(homes.values()) == [2, 2, 4]
        await hop.send("honest", encode_turn(new_session_id("honest"), 1, KEEP, adapted(POND)))
        await trio.sleep(1)
        assert "honest" in {one.key.asker for one in hop.server._adapters._coming if one.size_bytes}


class Holding:
    """Sessions with adapters that are kept open."""

    def __init__(self, hop: Hop) -> None:
        self.hop = hop
        self._open: dict[tuple[str, HashAdapter], tuple[bytes, int]] = {}  # asker and adapter -> id and next position

    async def begin(self, asker: str, *adapters: HashAdapter) -> None:
        """Open sessions, and use each a second later than the last one."""
        for adapter in adapters:
            self._open[asker, adapter] = new_session_id(asker), 0
            await self.hop.open(asker, self._open[asker, adapter][0], replace(adapted(adapter), tokens=4000))
            await self.use(asker, adapter)
            await trio.sleep(1)

    async def use(self, asker: str, adapter: HashAdapter) -> None:
        """Have something computed with an adapter."""
        id, position = self._open[asker, adapter]
        await self.hop.send(asker, data(id, 1, position))
        await next_frame(self.hop._streams[asker], Kind.DATA)
        self._open[asker, adapter] = id, position + len(TOKENS)

    async def stay(self, seconds: float, *, busy: str = "") -> None:
        """Say now and then that all sessions are needed; the `busy` asker uses its own."""
        for _ in range(int(seconds / 20)):
            await trio.sleep(20)
            for (asker, adapter), (id, _) in self._open.items():
                await self.hop.send(asker, plain(Kind.PROBE, id, 1))
                if asker == busy:
                    await self.use(asker, adapter)

    @property
    def left(self) -> set[tuple[str, HashAdapter]]:
        """Those that are still open."""
        ids = {session.id for session in self.hop.server._sessions.values()}
        return {one for one, (id, _) in self._open.items() if id in ids}


async def test_adapters_of_one_address_leave_room_for_others(autojump_clock: MockClock) -> None:
    """Two identities held all room for adapters."""
    async with adapted_hop(AdapterShelf(POND, LAKE, SEA)) as hop:
        one_machine(hop, "evil", "twin")
        holding = Holding(hop)
        await holding.begin("evil", POND, LAKE)
        await holding.begin("twin", POND)
        assert (await refused(hop, LAKE.ref, "twin"))[0] == "adapters_full"
        await hop.open("honest", new_session_id("honest"), adapted(POND))
        assert len(holding.left) == 3


async def test_adapters_that_were_unused_take_no_more_than_others(autojump_clock: MockClock) -> None:
    """An adapter stays loaded when its session ends: one after another, they could fill all room and be used again."""
    async with adapted_hop(AdapterShelf(POND, LAKE)) as hop:
        one_machine(hop, "evil", "twin")
        for asker in ("evil", "twin"):
            for adapter in (POND, LAKE):
                id = new_session_id(asker)
                await hop.open(asker, id, adapted(adapter))
                await hop.send(asker, plain(Kind.CLOSE, id, 1))
                await trio.sleep(1)
        assert hop.server._adapters.total_bytes == LIMITS.total_bytes
        for asker, adapter in (("evil", POND), ("evil", LAKE), ("twin", POND)):
            await hop.open(asker, new_session_id(asker), adapted(adapter))
        assert (await refused(hop, LAKE.ref, "twin"))[0] == "adapters_full"
        await hop.open("honest", new_session_id("honest"), adapted(POND))
        assert hop.server.sessions == 4


@pytest.mark.parametrize("busy", ["", "evil"])
async def test_adapters_beyond_a_fair_share_make_way(autojump_clock: MockClock, busy: str) -> None:
    async with adapted_hop(AdapterShelf(POND, LAKE, SEA)) as hop:
        holding, after = Holding(hop), LIMITS.turn_s if busy else LIMITS.idle_s
        await holding.begin("evil", POND, LAKE)
        for other in ("one", "two"):
            await holding.begin(other, SEA)
        begun = holding.left
        await holding.stay(after - 20, busy=busy)
        assert (await refused(hop, POND.ref, "honest"))[0] == "adapters_full"
        assert holding.left == begun
        await holding.stay(20, busy=busy)
        await holding.begin("honest", SEA)
        assert begun - holding.left == {("evil", POND)}  # idle for longest
        error = decode_hop_error(await next_frame(hop._streams["evil"], Kind.TROUBLE))
        assert (error.code, error.why) == ("busy", "adapters_full")
        left = holding.left
        await holding.stay(2 * LIMITS.turn_s)
        assert (await refused(hop, POND.ref, "late"))[0] == "adapters_full"
        assert holding.left == left  # nobody has more than one that comes would have


async def test_own_replies_make_way_for_nobody(autojump_clock: MockClock) -> None:
    async with adapted_hop(AdapterShelf(POND, LAKE, SEA)) as hop:
        holding, (here, there) = Holding(hop), loop_streams("victim")
        assert hop.server._nursery is not None
        hop.server._nursery.start_soon(hop.server.attend, there)
        hop._streams["victim"] = here  # type: ignore[assignment]
        await holding.begin("victim", POND, LAKE)
        for other in ("one", "two"):
            await holding.begin(other, SEA)
        begun = holding.left
        await holding.stay(2 * LIMITS.turn_s)
        assert (await refused(hop, POND.ref, "honest"))[0] == "adapters_full"
        assert holding.left == begun


async def test_askers_do_not_share_an_adapter(autojump_clock: MockClock) -> None:
    shelf = AdapterShelf(POND)
    async with adapted_hop(shelf) as hop:
        for asker in ("asker", "asker", "thief"):
            await hop.open(asker, new_session_id(asker), adapted(POND))
        assert [asker for asker, _ in shelf.asked] == ["asker", "thief"]


async def test_a_cache_is_never_used_with_another_adapter(autojump_clock: MockClock) -> None:
    async with adapted_hop(AdapterShelf(POND, LAKE)) as hop:
        id = new_session_id("asker")
        assert (await hop.open("asker", id, adapted(POND))).position == 0
        await hop.send("asker", data(id, 1, 0))
        await next_frame(hop._streams["asker"], Kind.DATA)
        assert (await hop.open("asker", id, adapted(POND), epoch=2)).position == len(TOKENS)
        wanted = Prefix(id, 20, False)
        for turn, position in ((adapted(POND), 20), (adapted(LAKE), 0), (TURN, 0)):
            ready = await hop.open("asker", new_session_id("asker"), replace(turn, prefix=wanted))
            assert ready.position == position
        for epoch, turn in ((3, adapted(LAKE)), (4, TURN), (5, adapted(POND))):
            assert (await hop.open("asker", id, turn, epoch=epoch)).position == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"alpha":2.0,"rank":4,"roots":[],"size":64,"targets":["q"],"v":2}',
        b'{"alpha":0,"rank":4,"roots":[],"size":64,"targets":["q"],"v":1}',
        b'{"alpha":1e999,"rank":4,"roots":[],"size":64,"targets":["q"],"v":1}',
        b'{"alpha":2.0,"rank":257,"roots":[],"size":64,"targets":["q"],"v":1}',
        b'{"alpha":2.0,"rank":4,"roots":["zz"],"size":64,"targets":["q"],"v":1}',
        b'{"alpha":2.0,"rank":4,"roots":[],"size":2000000000,"targets":["q"],"v":1}',
        b'{"alpha":2.0,"rank":4,"roots":[],"size":64,"targets":"q","v":1}',
    ],
)
def test_a_bad_index_raises_only_the_one_error(raw: bytes) -> None:
    with pytest.raises(RecordError):
        decode_index(raw)


def test_real_blocks_refuse_weights_that_do_not_fit() -> None:
    runner = SessionRunner(HostedSpan([random_span(small_config(), dtype=torch.float16, kv_bytes=1 << 20)]))
    size = runner.adapter_bytes(4, ("q",))
    good = torch.ones(size // 4)
    runner.load_adapter(4, 8.0, ("q",), {0: good.numpy().tobytes()})
    for vector in (good[1:], torch.cat([good, good]), good * float("nan"), good * 1e30):
        with pytest.raises(TrainingError):
            runner.load_adapter(4, 8.0, ("q",), {0: vector.numpy().tobytes()})
    with pytest.raises(TrainingError):
        runner.load_adapter(4, 8.0, ("q",), {99: good.numpy().tobytes()})
    for rank, targets in ((0, ("q",)), (257, ("q",)), (4, ("x",)), (4, ())):
        with pytest.raises(TrainingError):
            runner.adapter_bytes(rank, targets)
