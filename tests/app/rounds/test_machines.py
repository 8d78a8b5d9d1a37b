"""Which machines an island of several is made of, and jobs that need them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import trio
import trio.lowlevel
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from app.config.home import Home
from app.config.settings import Settings
from app.core.device_thread import DeviceThread
from app.core.errors import AppError
from app.courtesy.pause import PauseControl
from app.node.active_swarm import ActiveSwarm
from app.planning.machines import MachineSpec
from app.rounds import machines, train_jobs
from app.rounds.founding import ROWS, TrainWish, block_needs
from app.rounds.machines import (
    ASK_AGAIN_S,
    ASK_S,
    ASKED_AT_ONCE,
    MOST_ROOMS,
    SEARCH_S,
    Helpers,
    NoMachines,
    Room,
    _useful,
    ask_rooms,
    divided_blocks,
    machine_routes,
)
from app.rounds.place import TrainPlace
from app.rounds.train_jobs import TrainJobs
from app.routing.trust import TrustBook
from app.swarm.records import Announcement
from app.training.hop import TrainingServer, TrainingTerms
from app.training.states import StateStore
from app.training.wire import ROOM
from app.training.wiring import FullBlocksOn
from engine.budget import plan_full, unquantised
from engine.sources.hf_config import parse_config
from p2p.memory.fabric import MemoryFabric, open_fabric
from tests.app.rounds.island_swarm import in_place
from tests.app.rounds.statements import PEOPLE, RECORD, history
from tests.app.rounds.test_pipeline import Maker
from tests.app.swarms import identity


def needs(blocks: int, under_way: int) -> int:
    """Ten bytes a block, one for each micro-batch of it, and five for the machine."""
    return blocks * (10 + under_way) + 5 if blocks else 0


def rooms(*sizes: int) -> list[Room]:
    return [Room(f"m{number}", size, 0.01) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((), None),
        ((100,), {"m0": (0, 6)}),
        ((70,), None),
        ((16, 70), None),
        ((50, 100), {"m1": (0, 6)}),  # one machine rather than two
        ((50, 50), {"m0": (0, 3), "m1": (3, 6)}),
        ((20, 70), {"m0": (0, 1), "m1": (1, 6)}),
        ((20, 0, 70), {"m0": (0, 1), "m2": (1, 6)}),
        ((40, 40, 40), {"m0": (0, 2), "m1": (2, 4), "m2": (4, 6)}),
    ],
)
def test_blocks_are_divided_among_the_fewest_machines(
    sizes: tuple[int, ...], wanted: dict[str, tuple[int, int]] | None
) -> None:
    route = divided_blocks(6, rooms(*sizes), needs)
    assert (None if route is None else {hop.peer: (hop.span.start, hop.span.stop) for hop in route}) == wanted


@given(st.integers(1, 40), st.lists(st.integers(0, 300), max_size=8))
def test_a_division_is_whole_and_fits(blocks: int, sizes: list[int]) -> None:
    route = divided_blocks(blocks, rooms(*sizes), needs)
    if route is None:
        # as many micro-batches as machines would be under way
        most = sum(max((k for k in range(blocks + 1) if needs(k, len(sizes) + 1) <= size), default=0) for size in sizes)
        assert most < blocks
        return
    assert [block for hop in route for block in hop.span.blocks()] == list(range(blocks))
    assert len({hop.peer for hop in route}) == len(route)
    for hop in route:
        assert needs(len(hop.span), len(route) + 1) <= sizes[int(hop.peer[1:])]


async def no_room() -> int:
    return 0


async def refuse(stream: Any) -> None:
    raise AssertionError("nobody trains here")


def helpers_of(fabric: MemoryFabric, name: str, *members: str) -> Helpers:
    return Helpers(fabric.node(name), lambda: members, no_room, refuse)


async def test_members_are_asked_for_room(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        for name, answer in {
            "a": b'{"bytes":100}',
            "b": b'{"bytes":200}',
            "none": b'{"bytes":0}',
            "wrong": b'{"bytes":-1}',
            "odd": b"\xff",
        }.items():

            async def answered(peer: str, body: bytes, answer: bytes = answer) -> bytes:
                return answer

            fabric.node(name).serve(ROOM, answered)
        helpers = helpers_of(fabric, "owner", "a", "b", "none", "wrong", "odd", "gone")
        assert [one.peer for one in await ask_rooms(helpers, frozenset(), {})] == ["b", "a"]
        assert [one.peer for one in await ask_rooms(helpers, frozenset({"b"}), {})] == ["a"]


async def test_too_little_room_is_said_and_asked_for_again_later(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        given, asked = [50], 0

        async def answered(peer: str, body: bytes) -> bytes:
            nonlocal asked
            asked += 1
            return json.dumps({"bytes": given[0]}).encode()

        fabric.node("a").serve(ROOM, answered)
        find = machine_routes(helpers_of(fabric, "owner", "a"), 6, needs)
        for _ in range(3):
            with pytest.raises(NoMachines, match="a 50 B"):
                await find(frozenset())
        assert asked == 1
        given[0] = 100
        await trio.sleep(ASK_AGAIN_S)
        assert [hop.peer for hop in await find(frozenset())] == ["a"]


async def test_what_members_answered_holds_whomever_the_next_question_avoids(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        asked = list[str]()

        def answering(name: str) -> Any:
            async def answered(peer: str, body: bytes) -> bytes:
                asked.append(name)
                return b'{"bytes":50}'

            return answered

        for name in "ab":
            fabric.node(name).serve(ROOM, answering(name))
        find = machine_routes(helpers_of(fabric, "owner", "a", "b"), 6, needs)
        for _ in range(2):
            with pytest.raises(NoMachines, match="too little: a 50 B;"):
                await find(frozenset("b"))
            assert [hop.peer for hop in await find(frozenset())] == ["a", "b"]
        assert asked == ["a", "b"] * 2  # after a route was found, all of it may be out of date


class Crowd:
    """Many members that answer or are silent, and one of them that has room for everything."""

    def __init__(self, fabric: MemoryFabric, count: int, *, is_silent: bool) -> None:
        self.names = [f"m{number}" for number in range(count)]
        self.friend = self.names[-1]  # which the table of members met last
        self.asked: list[str] = []
        self.under_way = self.most_at_once = 0

        def answering(name: str) -> Any:
            async def answered(peer: str, body: bytes) -> bytes:
                self.asked.append(name)
                self.under_way += 1
                self.most_at_once = max(self.most_at_once, self.under_way)
                try:
                    await trio.sleep(10**9 if is_silent and name != self.friend else 0.1)
                finally:
                    self.under_way -= 1
                return b'{"bytes":1000}' if name == self.friend else b'{"bytes":0}'

            return answered

        for name in self.names:
            fabric.node(name).serve(ROOM, answering(name))


async def test_members_are_asked_until_they_offer_enough(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        crowd = Crowd(fabric, 5 * ASKED_AT_ONCE, is_silent=False)
        find = machine_routes(helpers_of(fabric, "owner", *crowd.names), 6, needs)
        assert [hop.peer for hop in await find(frozenset())] == [crowd.friend]
        assert crowd.most_at_once <= ASKED_AT_ONCE
        assert len(crowd.asked) == len(set(crowd.asked))


async def test_silent_members_make_a_search_no_longer_than_is_said_and_hide_nobody(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        crowd = Crowd(fabric, 7 * ASKED_AT_ONCE, is_silent=True)
        find = machine_routes(helpers_of(fabric, "owner", *crowd.names), 6, needs)
        began = trio.current_time()
        with pytest.raises(NoMachines, match=f"nobody anything;.* {4 * ASKED_AT_ONCE - 1} could not be asked in time"):
            await find(frozenset({crowd.friend}))
        assert trio.current_time() - began <= SEARCH_S
        assert crowd.most_at_once <= ASKED_AT_ONCE
        # the others and the friend come next, whom nobody could ask so far
        assert [hop.peer for hop in await find(frozenset())] == [crowd.friend]
        assert trio.current_time() - began <= 2 * SEARCH_S


async def test_members_are_asked_in_another_order_each_time(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "ASKED_AT_ONCE", 1)
    async with open_fabric() as fabric:
        crowd = Crowd(fabric, 60, is_silent=False)
        helpers = helpers_of(fabric, "owner", *crowd.names)
        orders = set()
        for _ in range(3):
            crowd.asked.clear()
            await ask_rooms(helpers, frozenset(), {})
            assert sorted(crowd.asked) == sorted(crowd.names)
            orders.add(tuple(crowd.asked))
        assert len(orders) == 3


@pytest.mark.parametrize("why", ["trusted", "helped"])
async def test_trusted_members_and_those_that_helped_are_asked_first(autojump_clock: MockClock, why: str) -> None:
    async with open_fabric() as fabric:
        crowd = Crowd(fabric, 7 * ASKED_AT_ONCE, is_silent=True)
        helpers = helpers_of(fabric, "owner", *crowd.names)
        if why == "trusted":
            helpers = replace(helpers, is_trusted=lambda peer: peer == crowd.friend)
        find = machine_routes(helpers, 6, needs, [crowd.friend] if why == "helped" else [])
        for _ in range(2):  # whoever is in a route has helped from then on
            crowd.asked.clear()
            began = trio.current_time()
            assert [hop.peer for hop in await find(frozenset())] == [crowd.friend]
            assert trio.current_time() - began <= ASK_S
            assert len(crowd.asked) == ASKED_AT_ONCE


async def test_a_large_crowd_is_asked_again_more_seldom(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        crowd = Crowd(fabric, 4 * ASKED_AT_ONCE, is_silent=False)
        others = crowd.names[:-1]
        find = machine_routes(helpers_of(fabric, "owner", *others), 6, needs)
        for again_s in (2 * ASK_AGAIN_S, 2 * ASK_AGAIN_S):
            with pytest.raises(NoMachines, match="nobody anything"):
                await find(frozenset())
            assert len(crowd.asked) == len(others)
            await trio.sleep(again_s)
        with pytest.raises(NoMachines):
            await find(frozenset())
        assert len(crowd.asked) == 2 * len(others)


def test_of_very_many_rooms_the_largest_are_divided_among() -> None:
    """A crowd that offers a little each must not take the event loop long, nor hide who has room."""
    rooms = _useful([Room(f"m{number}", 1 + number, 0.01) for number in range(500)], {"m3"})
    assert len(rooms) == MOST_ROOMS
    assert {"m3", "m499", f"m{500 - MOST_ROOMS + 1}"} <= {one.peer for one in rooms}


async def test_whoever_announces_that_it_trains_for_nobody_is_not_asked() -> None:
    members = [
        Announcement(name, 1, 2**50, "ab" * 16, "client", train=train)
        for name, train in (("no", "never"), ("friend", "trusted"), ("all", "members"), ("newer", "on tuesdays"))
    ]
    settings = Settings(trusted=("friend",))
    swarm: Any = SimpleNamespace(
        weights=SimpleNamespace(sharing=SimpleNamespace(is_member=None)), swarm=SimpleNamespace(id="", secret=None),
        announcements=lambda: members, _others=None, _look_at_machine=None, _room_here=None, _train_self=None,
        _context=SimpleNamespace(
            identity=None, manifests=SimpleNamespace(cache=None), trust=None, pause_control=None,
            config=lambda: SimpleNamespace(settings=settings),
        ),
    )  # fmt: skip
    swarm._room_here = no_room
    place = ActiveSwarm._train_place(swarm, SimpleNamespace(peer_id="me"), None)  # type: ignore[arg-type]
    assert place.helpers is not None
    assert place.helpers.members() == ["friend", "all", "newer"]
    assert [place.helpers.is_trusted(one.peer) for one in members] == [False, True, False, False]


async def test_the_machines_of_a_job_are_asked_first_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def noted(helpers: Helpers, blocks: int, needs: Any, helped: Any = ()) -> Any:
        asked.append(helped)
        raise NoMachines("not in this test")

    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        node = JobNode(fabric, 0, tmp_path, None, 0)
        await nursery.start(node.jobs.run)
        await node.jobs.found(wish_in(tmp_path, steps=10**6, every=10**4))
        [running] = node.jobs.running.values()
        job, store = running.job, node.jobs._store
        await node.jobs.leave("fish")
        store.save_facts(job, store.stored_facts(job) | {"machines": [["here", 0, 2], ["there", 2, 6]]})
        await node.jobs._write(job, running.island, "running")  # an island that has not found machines again
        monkeypatch.setattr(train_jobs, "machine_routes", noted)
        node.jobs._place = replace(node.jobs._place, memory_limit=lambda: 1)
        for _ in range(2):
            with pytest.raises(NoMachines):
                await node.jobs._model(job, None)
        assert asked == [["here", "there"]] * 2
        store.save_facts(job, {"status": "left", "machines": [7, [], "x", [1, 2]]})  # the file may be damaged
        assert store.machines(job) == []
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("terms", "found"),
    [
        (TrainingTerms(memory_bytes=1000), 1000),
        (TrainingTerms(memory_bytes=10, refuses=lambda owner: None if owner == "friend" else "no"), 10),
        (TrainingTerms(refuses=lambda owner: "no"), 0),
        (TrainingTerms(jobs=0), 0),
    ],
)
async def test_a_machine_offers_what_its_user_allows(tmp_path: Path, terms: TrainingTerms, found: int) -> None:
    from tests.app.hash_model import InlineDevice

    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        network = fabric.node("machine")
        server = TrainingServer(
            network, InlineDevice(), StateStore(network, tmp_path, lambda peer: True), lambda: terms, Maker()
        )
        only_adapters = TrainingServer(network, InlineDevice(), server._states, lambda: terms)
        for one in (server, only_adapters):
            assert await one.room_for("friend") == 0  # it does not run yet
            await nursery.start(one.run)
        assert await server.room_for("friend") == found
        assert await only_adapters.room_for("friend") == 0
        nursery.cancel_scope.cancel()


async def test_who_is_left_out_of_a_job_loses_trust(tmp_path: Path) -> None:
    liar = PEOPLE[2].peer_id
    entries = history(3, PEOPLE[:4], liar=liar)
    assert liar in entries[-1].left_out
    book = TrustBook(clock=lambda: 0.0)
    async with open_fabric() as fabric:
        node = JobNode(fabric, 0, tmp_path, None, 0, trust=book)
        node.jobs._note_left_out(RECORD, entries[:-1])
        assert book.standing(liar).score == 1.0
        node.jobs._note_left_out(RECORD, entries)
        assert book.standing(liar).score == 0.5
        node.jobs._note_left_out(RECORD, [*entries, entries[-1]])  # it was left out before
        assert book.standing(liar).score == 0.5
        assert book.standing(PEOPLE[1].peer_id).score == 1.0


# --- a job that is too large for its founder --------------------------------------------------------------------------

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 264, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


class JobNode:
    """A node's training jobs, and its training server: one of so many nodes."""

    def __init__(
        self,
        fabric: MemoryFabric,
        number: int,
        folder: Path,
        limit: int | None,
        room: int,
        *,
        nodes: int = 2,
        **more: Any,
    ) -> None:
        self.network: Any = fabric.node(identity(number).peer_id)
        self.states = states = StateStore(self.network, folder / "states", lambda peer: True, in_place)
        states.serve()
        others = [identity(other).peer_id for other in range(nodes) if other != number]
        self.terms, self.full = TrainingTerms(memory_bytes=room), FullBlocksOn("cpu")
        self.server, self.serving = self.new_server(), trio.CancelScope()

        async def own_room() -> int:
            return await self.server.room_for(self.network.peer_id)

        async def own_server(stream: Any) -> None:
            await self.server.attend(stream)

        place = TrainPlace(
            swarm="s" * 32, public=True, network=self.network, identity=identity(number), states=states,
            members=lambda: others, is_member=lambda peer: True, cache=folder, memory_limit=lambda: limit,
            look=lambda: MachineSpec("here", 10**10, 1e10, 1e11, kind="cpu"),
            pause=PauseControl(folder / "pause.json", lambda: None),
            helpers=Helpers(self.network, lambda: others, own_room, own_server), **more,
        )  # fmt: skip
        self.jobs = TrainJobs(Home.open(folder / "home"), place)

    def new_server(self) -> TrainingServer:
        """A training server that does not run yet."""
        return TrainingServer(self.network, DeviceThread("cpu"), self.states, lambda: self.terms, self.full)

    async def serve(self, *, task_status: Any) -> None:
        """Run another training server until `serving` is cancelled, as hosting does."""
        self.server = self.new_server()
        with trio.CancelScope() as self.serving:
            await self.server.run(task_status=task_status)


def wish_in(folder: Path, **more: Any) -> TrainWish:
    data, shape = folder / "words.txt", folder / "shape.json"
    data.write_text("The shoal swims, and every fish of it learns from all the others. " * 60)
    shape.write_text(json.dumps(SHAPE))
    wish: dict[str, Any] = {"every": 5, "batch": 64, "length": 32, "steps": 15, "licence": "CC0-1.0"}
    return TrainWish("fish", (str(data),), shape=str(shape), **(wish | more))


async def test_a_job_too_large_for_its_founder_is_trained_by_two(tmp_path: Path) -> None:
    config = parse_config(dict(SHAPE), "the test", {})
    whole = plan_full(config, unquantised(2), ROWS, 0).total_bytes
    limit = min(whole, plan_full(config, unquantised(4), ROWS, 0).total_bytes) - 1
    part = block_needs(config, 32)
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        owner = JobNode(fabric, 0, tmp_path / "0", limit, part(2, 3))
        other = JobNode(fabric, 1, tmp_path / "1", None, part(3, 3))
        for node in (owner, other):
            await nursery.start(node.serve)
            await nursery.start(node.jobs.run)
        with pytest.raises(NoMachines, match=r"to spare: give .*\. With other machines: the 6 blocks take"):
            await owner.jobs.found(wish_in(tmp_path))
        other.terms = TrainingTerms(memory_bytes=part(4, 3))
        await trio.lowlevel.checkpoint()
        with pytest.raises(AppError, match="to spare"):  # a text of one's own is trained on by nobody else
            await owner.jobs.found(wish_in(tmp_path, own_data=True))
        with trio.fail_after(120):
            await owner.jobs.found(wish_in(tmp_path))
            running = next(iter(owner.jobs.running.values()))
            await running.ended.wait()
        [facts] = await owner.jobs.facts()
        assert facts["status"] == "finished", facts
        assert facts["step"] == 15
        assert [tuple(one) for one in facts["machines"]] == [
            (owner.network.peer_id, 0, 2), (other.network.peer_id, 2, 6),
        ]  # fmt: skip
        assert facts["losses"][-1] < facts["losses"][0]
        with pytest.raises(AppError, match="fish is finished: `shoal train export fish FOLDER`"):
            await owner.jobs.join("fish")
        assert await owner.jobs.facts() == [{**facts, "checkpoint_age_s": ANY}], "its figures are gone"
        await other.server.no_jobs()
        nursery.cancel_scope.cancel()
