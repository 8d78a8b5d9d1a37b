"""Texts that never leave their members: what is said of them is checked, and no frame carries any of them."""

from __future__ import annotations

import gc
import json
import random
import struct
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.config.home import Home
from app.core.errors import AppError, RecordError
from app.courtesy.pause import PauseControl
from app.planning.machines import MachineSpec
from app.rounds import founding, train_jobs, wire
from app.rounds.founding import TokenText, TrainWish, own_texts
from app.rounds.island import RoundTiming
from app.rounds.place import TrainPlace
from app.rounds.record import DOMAIN, read_training, sign_training
from app.rounds.statements import DATA, OwnData, read_data, sign_data, signed, texts_of
from app.rounds.train_jobs import TrainJobs
from app.snapshot.views import JoinableView
from app.training.states import StateStore
from engine.sources.shape import config_values
from p2p.errors import RemoteError
from p2p.memory.fabric import MemoryFabric, open_fabric
from tests.app.rounds.founded import founded
from tests.app.rounds.island_swarm import CONFIG, members_of, open_islands, plain_lesson
from tests.app.rounds.statements import NOW_MS, PEOPLE, RECORD
from tests.app.swarms import identity

OWN = replace(RECORD, tokens=None, held=None, own_data=True)
# The clock is real, and they compute all the while.
HURRIED = RoundTiming(hello_s=0.5, alive_s=6.0, grace_least_s=0.2, lead_s=5.0)
LETTERS = "abcdefghijklmnopqrstuvwxyz ,."


def made_up(seed: int, count: int = 4000) -> str:
    """A text that no other text has eight letters in common with."""
    return "".join(random.Random(seed).choices(LETTERS, k=count))


@dataclass(frozen=True)
class Letters:
    """Sequences of a text."""

    text: str
    length: int = 16

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self.text) // self.length

    def sequence(self, number: int) -> list[int]:
        """One of them."""
        return list(self.text[number * self.length :][: self.length].encode())

    @property
    def held(self) -> list[list[int]]:
        """The last of them."""
        return [self.sequence(self.count - 1)]


# --- what is said of a text -------------------------------------------------------------------------------------------


def test_a_record_of_own_data_names_no_text() -> None:
    raw = sign_training(PEOPLE[0], OWN)
    assert read_training(raw, now_ms=NOW_MS) == OWN
    assert OWN.parts == (RECORD.tokenizer,)
    assert b"tokens" not in OWN.payload()
    assert b"own_data" not in RECORD.payload()  # the names of other jobs do not depend on it
    held = replace(OWN, held=RECORD.held)
    assert read_training(sign_training(PEOPLE[0], held), now_ms=NOW_MS) == held


@pytest.mark.parametrize(
    "values", [{"own_data": "yes"}, {"own_data": False}, {"tokens": ["ab" * 32, 9]}, {"held": None}]
)
def test_a_record_of_own_data_with_a_wrong_field_is_refused(values: dict[str, Any]) -> None:
    payload = json.loads(OWN.payload()) | values
    with pytest.raises(RecordError):
        read_training(signed(PEOPLE[0], DOMAIN, payload, NOW_MS), now_ms=NOW_MS)


def said(number: int = 1, **changes: Any) -> OwnData:
    """What an island says of its text."""
    return sign_data(PEOPLE[number], replace(OwnData(OWN.id, 1000, "letters.txt", "MIT"), **changes), NOW_MS)


@pytest.mark.parametrize(
    "values", [{"tokens": 0}, {"tokens": 2**51}, {"source": "s" * 401}, {"licence": "l" * 101}, {"job": "ab"}, {"v": 2}]
)
def test_a_word_for_a_text_with_a_wrong_field_is_refused(values: dict[str, Any]) -> None:
    right: dict[str, Any] = {"job": OWN.id.hex(), "tokens": 1, "source": "s", "licence": "l"}
    assert read_data(signed(PEOPLE[0], DATA, right, NOW_MS)).peer == PEOPLE[0].peer_id
    with pytest.raises(RecordError):
        read_data(signed(PEOPLE[0], DATA, right | values, NOW_MS))


async def test_who_says_nothing_true_of_its_text_does_not_take_part(tmp_path: Path, autojump_clock: MockClock) -> None:
    own = {number: Letters(made_up(number)) for number in range(2)}
    lesson = replace(plain_lesson(), text=own[0], own=own)
    async with open_islands(tmp_path, 0, 1, lesson=lesson, tokens=None, held=None, own_data=True, steps=40) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 2)
        island = swarm.nodes[0].island
        stranger = swarm.fabric.node(identity(7).peer_id)
        now_ms = island._wall_ms()
        right = OwnData(swarm.record.id, 1000, "letters.txt", "MIT")
        wrong = {
            "another peer": sign_data(identity(1), right, now_ms),
            "another job": sign_data(identity(7), replace(right, job=b"j" * 32), now_ms),
            "no licence": sign_data(identity(7), replace(right, licence=" "), now_ms),
        }
        for name, data in wrong.items():
            with pytest.raises(RemoteError) as caught:
                await hello(stranger, island, texts_of([data.raw]))
            assert caught.value.code == wire.WRONG, name
        for junk in (["x"], ["AAAA"], ["A" * 10**5], "text", [1], texts_of([said().raw] * 2)):
            with pytest.raises(RemoteError):
                await hello(stranger, island, junk)
        assert stranger.peer_id not in island.heard
        await hello(stranger, island, None)  # heard, but it says nothing of its text
        assert stranger.peer_id in island.heard
        before = island.standing.round
        await swarm.until(lambda: island.standing.round > before + 1)
        assert stranger.peer_id not in {peer for entry in island.log for peer in entry.next}
        await swarm.finished(0, 1)
        assert members_of(island.log)[-1] == 2
        assert island.data_of[swarm.nodes[1].name].source == "text 1"


async def hello(stranger: Any, island: Any, data: Any) -> None:
    """Greet an island in the name of a stranger that is as far as the island itself."""
    values = {"round": island.standing.round, "head": island.head.hex()} | ({} if data is None else {"data": data})
    await stranger.call(island.peer, wire.HELLO, wire.request(island.record.id, values), timeout_s=5)


async def test_an_island_reads_all_of_its_own_text_in_turn(tmp_path: Path, autojump_clock: MockClock) -> None:
    read: dict[int, list[int]] = {0: [], 1: []}

    class Counted(Letters):
        def sequence(self, number: int) -> list[int]:
            read[int(self.text[0])].append(number)
            return super().sequence(number)

    own = {number: Counted(str(number) + made_up(number, 319)) for number in range(2)}  # 20 sequences
    lesson = replace(plain_lesson(), text=own[0], own=own)
    async with open_islands(tmp_path, 0, 1, lesson=lesson, tokens=None, held=None, own_data=True, steps=30) as swarm:
        await swarm.finished(0, 1)
    trained = [number for number in read[0] if number != 19][:40]
    assert len({*trained[:19]}) >= 18  # a pass takes each once; the last one is read to validate as well


# --- nodes ------------------------------------------------------------------------------------------------------------


def wish_in(folder: Path, name: str, **more: Any) -> TrainWish:
    """A job on a made-up text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shape.json").write_text(json.dumps(config_values(replace(CONFIG, vocab_size=264))))
    (folder / f"{name}.txt").write_text(made_up(1))
    return TrainWish(
        "fish", (str(folder / f"{name}.txt"),), shape=str(folder / "shape.json"), steps=10**6, every=5, batch=32,
        length=16, licence="MIT", own_data=True, **more,
    )  # fmt: skip


def test_a_wish_for_own_data_founds_a_job_without_a_text(tmp_path: Path) -> None:
    made = founded(wish_in(tmp_path, "one"), tmp_path, PEOPLE[0].peer_id)
    assert (made.record.tokens, made.record.held, made.record.own_data) == (None, None, True)
    assert {*made.texts} == {"tokens", "held", "tokenizer.json"}
    (tmp_path / "two.txt").write_text(made_up(2))
    own = own_texts(made.record, [str(tmp_path / "two.txt")], made.texts["tokenizer.json"], None)
    text = TokenText(own["tokens"], own["held"], made.record)
    assert text.count > 200
    assert text.held
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(AppError, match="fewer than"):
        own_texts(made.record, [str(tmp_path / "short.txt")], made.texts["tokenizer.json"], None)


def test_a_public_text_validates_where_texts_are_own(tmp_path: Path) -> None:
    (tmp_path / "public.txt").write_text(made_up(9, 500))
    wish = wish_in(tmp_path, "one", validation=(str(tmp_path / "public.txt"),))
    made = founded(wish, tmp_path, PEOPLE[0].peer_id)
    assert made.record.held is not None
    assert made.texts["held"][:4] == struct.pack("<I", ord(made_up(9)[0]))
    with pytest.raises(AppError, match="--own-data"):
        founded(replace(wish, own_data=False), tmp_path, "f")


class Node:
    """One node's training jobs, with every byte that it sends and receives in calls."""

    def __init__(self, fabric: MemoryFabric, number: int, folder: Path, everybody: list[str]) -> None:
        network: Any = fabric.node(identity(number).peer_id)
        self.frames: list[bytes] = []
        call, serve = network.call, network.serve

        async def tapped(peer: str, method: str, body: Any, **more: Any) -> bytes:
            self.frames.append(joined(body))
            answer: bytes = await call(peer, method, body, **more)
            self.frames.append(answer)
            return answer

        def served(method: str, handler: Callable[[str, bytes], Any]) -> None:
            async def answered(peer: str, body: bytes) -> Any:
                answer = await handler(peer, body)
                self.frames.append(joined(answer))
                return answer

            serve(method, answered)

        async def no_streams(*args: Any, **more: Any) -> Any:
            raise AssertionError("a stream was opened, which this test does not read")

        network.call, network.serve, network.open = tapped, served, no_streams
        states = StateStore(network, folder / "states", lambda peer: True)
        states.serve()
        place = TrainPlace(
            swarm="s" * 32, public=True, network=network, identity=identity(number), states=states,
            members=lambda: [peer for peer in everybody if peer != network.peer_id], is_member=lambda peer: True,
            cache=folder, memory_limit=lambda: None, look=lambda: MachineSpec("here", 10**10, 1e10, 1e11, kind="cpu"),
            pause=PauseControl(folder / "pause.json", lambda: None), timing=HURRIED,
        )  # fmt: skip
        self.jobs = TrainJobs(Home.open(folder / "home"), place)


def joined(payload: Any) -> bytes:
    """The bytes of a payload, which may come in pieces."""
    return bytes(payload) if isinstance(payload, bytes | bytearray | memoryview) else b"".join(map(bytes, payload))


@asynccontextmanager
async def open_nodes(folder: Path) -> AsyncIterator[list[Node]]:
    """Two nodes on the in-memory network, with a real clock because they compute in threads."""
    everybody = [identity(number).peer_id for number in range(2)]
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        nodes = [Node(fabric, number, folder / str(number), everybody) for number in range(2)]
        for node in nodes:
            await nursery.start(node.jobs.run)
        yield nodes
        nursery.cancel_scope.cancel()


def state_files(folder: Path) -> list[Path]:
    """The files of states that the nodes in a folder keep for others."""
    return [path for path in folder.glob("**/states/**/*") if path.is_file()]


def forms_of(text: str) -> Iterator[bytes]:
    """Pieces of a text as bytes: the letters themselves, and their token ids in the usual formats."""
    for at in range(0, len(text) - 8, 61):
        ids = list(text[at : at + 8].encode())
        yield text[at : at + 8].encode()
        for form in ("<8H", ">8H", "<8I", ">8I", "<8Q", ">8Q"):
            yield struct.pack(form, *ids)
        yield json.dumps(ids).encode()
        yield json.dumps(ids, separators=(",", ":")).encode()


async def test_no_frame_carries_text_or_token_ids_of_a_member(tmp_path: Path) -> None:
    (tmp_path / "public.txt").write_text(made_up(9, 500))
    wish = wish_in(tmp_path, "one", validation=(str(tmp_path / "public.txt"),))
    (tmp_path / "two.txt").write_text(made_up(2))
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish)
        (known,) = await nodes[0].jobs.facts()
        named = JoinableView(known["job"], "fish", identity(0).peer_id, wish.steps, own_data=True)
        assert (await nodes[0].jobs.joinable(), await nodes[1].jobs.joinable()) == ([], [named])
        with pytest.raises(AppError, match="--data"):
            await nodes[1].jobs.join("fish")
        with pytest.raises(AppError, match="--licence"):
            await nodes[1].jobs.join("fish", [str(tmp_path / "two.txt")])
        await nodes[1].jobs.join("fish", [str(tmp_path / "two.txt")], "CC0-1.0")
        assert await nodes[1].jobs.joinable() == []
        running = next(iter(nodes[1].jobs.running.values())).island
        with trio.fail_after(60):
            while sum(len(entry.list.members) == 2 for entry in running.log) < 3:  # noqa: ASYNC110
                await trio.sleep(0.05)
        [facts] = await nodes[0].jobs.facts()
        assert {one["data"]["source"] for one in facts["islands"]} == {"one.txt", "two.txt"}
        assert {one["data"]["licence"] for one in facts["islands"]} == {"MIT", "CC0-1.0"}
        seen = b"\0".join(frame for node in nodes for frame in node.frames)
    assert len(seen) > 100_000
    assert any(form in seen for form in forms_of(made_up(9)))  # the public text is sent, so the test would see others
    for seed in (1, 2):
        assert not any(form in seen for form in forms_of(made_up(seed)))


async def test_who_joins_a_model_before_the_first_round_is_over_stays(tmp_path: Path) -> None:
    """It takes the model over from a member, and saved that with a log which has no round yet."""
    (tmp_path / "text.txt").write_text(made_up(1))
    wish = TrainWish(
        "fish", (str(tmp_path / "text.txt"),), model="tiny-random", steps=10**6, every=10**4, batch=32, length=16,
        licence="MIT",
    )  # fmt: skip
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish)
        await nodes[1].jobs.join("fish")
        [running] = nodes[1].jobs.running.values()
        saved = running.job.folder / "state"
        with trio.fail_after(60):
            while not saved.exists() and not running.ended.is_set():  # noqa: ASYNC110
                await trio.sleep(0.05)
            await running.island.checkpoint.finish()
        assert (running.island.figures.fetched, running.island.log) == (1, [])
        [facts] = await nodes[1].jobs.facts()
        assert (facts["status"], facts["why"]) == ("running", "")


async def test_a_finished_job_serves_the_late_and_then_gives_its_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_jobs, "KEPT_FINISHED_S", 5.0)
    (tmp_path / "text.txt").write_text(made_up(1))
    wish = TrainWish(
        "fish", (str(tmp_path / "text.txt"),), model="tiny-random", steps=2, every=2, batch=32, length=16, licence="MIT"
    )
    async with open_nodes(tmp_path) as nodes:
        first, late = (node.jobs for node in nodes)
        await first.found(wish)
        [running] = first.running.values()
        model = weakref.ref(running.island._model)
        with trio.fail_after(60):
            await running.ended.wait()
            assert running.job.record.id in first._server.islands
            await late.join("fish")
            [other] = late.running.values()
            await other.ended.wait()
            assert other.island.is_finished
            del running, other
            while first._server.islands or first._server.records or late._server.islands:  # noqa: ASYNC110
                await trio.sleep(0.05)
            while state_files(tmp_path):  # noqa: ASYNC110
                await trio.sleep(0.05)
        gc.collect()
        assert model() is None


async def test_a_job_that_cannot_be_taken_up_ends_no_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card may be broken when the node starts again, and torch raises errors of its own; a full one is waited for."""
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path, "one"))

    def broken(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(founding, "make_model", broken)
    async with open_nodes(tmp_path) as nodes:
        with trio.fail_after(60):
            while (facts := await nodes[0].jobs.facts())[0]["status"] != "failed":  # noqa: ASYNC110
                await trio.sleep(0.05)
        assert facts[0]["why"] == "RuntimeError while computing: CUDA error: an illegal memory access was encountered"
        assert await nodes[0].jobs.joinable() == []
