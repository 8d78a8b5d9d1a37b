"""Replies over the swarm with an adapter: real blocks on the in-memory network, against the model in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import trio.testing
from trio.testing import MockClock

from app.asker.asker import Asker
from app.asker.reply import ReplyStats
from app.config.home import Home
from app.core.errors import NoAdapter, RecordError
from app.core.span import Span
from app.routing.route import NoRoute
from app.session.adapter_index import AdapterRef, decode_index
from app.session.frame import Frame
from app.session.outbound import PeerOutbox
from app.session.wire import EpochOrder
from app.training.adapter_store import AdapterStore
from app.training.reply_adapters import (
    MAX_OFFERED,
    OFFERED_S,
    SWEEP_S,
    AdapterFetcher,
    HomeAdapters,
    adapter_ref,
)
from app.training.states import METHODS, StateStore
from app.weights.extents import WeightsError
from engine.local_model import load_local, local_options
from engine.model.block import WeightOptions
from engine.model.hosted_span import HostedSpan
from engine.model.span import SpanOptions, load_span
from engine.session_runner import SessionRunner
from engine.sources.base import ModelSource
from engine.sources.opening import open_source
from engine.swarm_ends import load_swarm_ends
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from engine.training.peft_format import Adapter, peft_files
from p2p.memory.fabric import open_fabric
from tests.app.session_swarm import SessionSwarm, no_leaks
from tests.engine.test_adapters import random_adapter

CPU = torch.device("cpu")
MODEL = "ab" * 32
SETTINGS = ReplySettings(8, Sampling(temperature=0))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_source("tiny-random", Path(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def adapter(tiny: ModelSource) -> Adapter:
    return random_adapter(tiny.config)


Expected = Callable[[Sequence[int], Adapter | None], list[int]]


@pytest.fixture(scope="module")
def expected(tiny: ModelSource) -> Expected:
    """The tokens of `chat --local`, with an adapter and without."""

    def tokens(prompt: Sequence[int], adapter: Adapter | None) -> list[int]:
        model = load_local(tiny, local_options(tiny, CPU, torch.float32, 1 << 32), adapter=adapter)
        reply = model.reply(prompt, SETTINGS)
        for _ in reply:
            pass
        return list(reply.writer.token_ids)

    return tokens


class AdapterSwarm(SessionSwarm):
    """Hops with real blocks, each with a store of its own, and askers with a home."""

    source: ModelSource
    folder: Path

    def states(self, name: str) -> StateStore:
        states = StateStore(self.fabric.node(name), self.folder / name, lambda peer: True)
        states.serve()
        return states

    async def hop(self, name: str, start: int, stop: int, *, knows_adapters: bool = True) -> None:
        options = SpanOptions(CPU, torch.float32, kv_bytes=1 << 22)
        middle = (start + stop) // 2  # two devices
        parts = [load_span(self.source, first, last, options) for first, last in ((start, middle), (middle, stop))]
        fetcher = AdapterFetcher(self.states(name)) if knows_adapters else None
        await self.serve(name, SessionRunner(HostedSpan(parts)), adapters=fetcher)

    async def home(self, name: str = "asker", keep: int = 0) -> tuple[Asker, HomeAdapters]:
        home, states = Home.open(self.folder / f"{name}-home"), self.states(name)
        ends = load_swarm_ends(self.source, WeightOptions(CPU, torch.float32))
        return await self.asker(name, ends, keep=keep), HomeAdapters(home, states, self.source.config, MODEL)

    def save(self, adapter: Adapter, name: str, asker: str = "asker") -> None:
        store = AdapterStore(Home.open(self.folder / f"{asker}-home"))
        store.save(name, peft_files(adapter, self.source.config, "tiny"))


@asynccontextmanager
async def adapter_swarm(source: ModelSource, folder: Path, **spans: tuple[int, int]) -> AsyncIterator[AdapterSwarm]:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        swarm = AdapterSwarm(fabric, nursery)
        swarm.source, swarm.folder = source, folder
        for name, span in spans.items():
            await swarm.hop(name, *span)
        with trio.fail_after(60):
            yield swarm
        nursery.cancel_scope.cancel()


async def ask(
    asker: Asker,
    adapters: HomeAdapters,
    prompt: Sequence[int],
    name: str | None,
    during: Callable[[ReplyStats], None] = lambda stats: None,
) -> ReplyStats:
    async def read(offered: object) -> ReplyStats:
        async with asker.reply(prompt, SETTINGS, max_tokens=8, adapter=offered) as reply:  # type: ignore[arg-type]
            async for _ in reply:
                during(reply.stats)
        return reply.stats

    if name is None:
        return await read(None)
    async with adapters.offered(name) as offered:
        return await read(offered)


PROMPT = list(range(40, 80))


async def test_a_reply_over_two_hops_has_the_tokens_of_one_process(
    tiny: ModelSource, adapter: Adapter, expected: Expected, tmp_path: Path
) -> None:
    """With the adapter and without, one after the other and at one time."""
    wanted = {"pond": expected(PROMPT, adapter), None: expected(PROMPT, None)}
    assert wanted["pond"] != wanted[None]
    async with adapter_swarm(tiny, tmp_path, a=(0, 4), b=(4, 8)) as swarm:
        asker, adapters = await swarm.home()
        swarm.save(adapter, "pond")
        for name in ("pond", None, "pond"):
            stats = await ask(asker, adapters, PROMPT, name)
            assert stats.token_ids == wanted[name]
            assert stats.adapter == name
            assert stats.adapter_root == (None if name is None else adapter_ref(adapter).short)

        async def check(name: str | None) -> None:
            assert (await ask(asker, adapters, PROMPT, name)).token_ids == wanted[name]

        async with trio.open_nursery() as together:
            for name in ("pond", None, "pond", None):
                together.start_soon(check, name)
        await no_leaks(swarm)


async def test_a_hop_that_dies_is_replaced_by_one_that_fetches_the_adapter(
    tiny: ModelSource, adapter: Adapter, expected: Expected, tmp_path: Path
) -> None:
    async with adapter_swarm(tiny, tmp_path, a=(0, 4), b=(4, 8), c=(4, 8)) as swarm:
        asker, adapters = await swarm.home()
        swarm.save(adapter, "pond")

        def kill(stats: ReplyStats) -> None:
            if len(stats.token_ids) == 5:
                swarm.kill(stats.route[1].peer)

        stats = await ask(asker, adapters, PROMPT, "pond", kill)
        assert stats.token_ids == expected(PROMPT, adapter)
        assert stats.recoveries == 1


async def test_kept_sessions_of_another_adapter_are_not_taken_over(
    tiny: ModelSource, adapter: Adapter, expected: Expected, tmp_path: Path
) -> None:
    other = replace(adapter, vectors={block: -vector for block, vector in adapter.vectors.items()})
    by_name = {"pond": adapter, "lake": other, None: None}
    async with adapter_swarm(tiny, tmp_path, a=(0, 4), b=(4, 8)) as swarm:
        asker, adapters = await swarm.home(keep=8)
        swarm.save(adapter, "pond")
        swarm.save(other, "lake")
        for name, cached in (("pond", False), (None, False), ("lake", False), ("pond", True), (None, True)):
            stats = await ask(asker, adapters, PROMPT, name)
            assert stats.token_ids == expected(PROMPT, by_name[name])
            assert bool(stats.cached_tokens) == cached, name


async def test_a_hop_that_knows_no_adapters_is_not_used(
    tiny: ModelSource, adapter: Adapter, expected: Expected, tmp_path: Path
) -> None:
    """Neither one of an older version, which ignores the field, nor one that refuses."""
    async with adapter_swarm(tiny, tmp_path, a=(0, 4)) as swarm:
        await swarm.hop("old", 4, 8, knows_adapters=False)

        def ignore(frame: Frame, turn: EpochOrder, peer: str, answers: PeerOutbox) -> None:
            server = swarm.servers["old"]
            server._order(partial(server._on_turn, frame, replace(turn, adapter=None), peer, answers), peer)

        swarm.servers["old"]._on_adapted_turn = ignore  # type: ignore[method-assign]
        asker, adapters = await swarm.home()
        swarm.save(adapter, "pond")
        with pytest.raises(NoRoute, match=r"no usable peer serves block 4 with the adapter: old .*knows no adapters"):
            await ask(asker, adapters, PROMPT, "pond")
        assert swarm.servers["old"].stats.rows == 0  # it was sent no token
        assert (await ask(asker, adapters, PROMPT, None)).token_ids == expected(PROMPT, None)
        await swarm.hop("refuses", 4, 8, knows_adapters=False)
        await swarm.hop("new", 4, 8)
        assert (await ask(asker, adapters, PROMPT, "pond")).token_ids == expected(PROMPT, adapter)
        assert not asker.bans.active(trio.current_time())


async def test_adapters_that_cannot_be_offered(tiny: ModelSource, adapter: Adapter, tmp_path: Path) -> None:
    async with adapter_swarm(tiny, tmp_path) as swarm:
        _, adapters = await swarm.home()
        swarm.save(replace(adapter, model="cd" * 32), "foreign")
        for name, words in (
            ("pond", "no adapter is named pond: there are foreign"),
            ("foreign", f"belongs to the model {'cd' * 32}, but this one is {MODEL}"),
        ):
            with pytest.raises(NoAdapter, match=words):
                async with adapters.offered(name):
                    pass


async def test_what_is_offered_can_be_fetched_until_it_is_withdrawn(
    tiny: ModelSource, adapter: Adapter, tmp_path: Path
) -> None:
    async with adapter_swarm(tiny, tmp_path) as swarm:
        _, adapters = await swarm.home()
        states = swarm.states("hop")
        fetcher = AdapterFetcher(states)
        for number in range(MAX_OFFERED + 1):
            swarm.save(replace(adapter, settings=replace(adapter.settings, alpha=1.0 + number)), f"pond{number}")
        async with adapters.offered("pond0") as first:
            assert first.ref == adapter_ref(replace(adapter, settings=replace(adapter.settings, alpha=1.0)))
            index = await fetcher.index("asker", first.ref)
            assert (index.rank, index.alpha, index.targets) == (4, 1.0, adapter.settings.targets)
            came: list[int] = []
            await fetcher.vectors("asker", index, Span(0, 2), came.append)
            assert sum(came) == index.vector_bytes * len({*index.roots[:2]})
        async with adapters.offered("pond0") as again:
            assert again is first
        for number in range(1, MAX_OFFERED + 1):
            async with adapters.offered(f"pond{number}"):
                pass
        assert first.withdrawn
        assert not list((swarm.folder / "hop").rglob("*.ok")), "a hop keeps no files"
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.3):
            await fetcher.index("asker", first.ref)
        with pytest.raises(WeightsError, match="no member that has it"):
            await AdapterFetcher(states).index("hop", AdapterRef(bytes(32), 9))


async def test_an_adapter_that_is_not_used_is_withdrawn(
    autojump_clock: MockClock, tiny: ModelSource, adapter: Adapter, tmp_path: Path
) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        home = Home.open(tmp_path / "home")
        states = StateStore(fabric.node("asker"), tmp_path / "states", lambda peer: True)
        adapters = HomeAdapters(home, states, tiny.config, MODEL)
        nursery.start_soon(adapters.run)
        AdapterStore(home).save("pond", peft_files(adapter, tiny.config, "tiny"))
        async with adapters.offered("pond") as offered:
            await trio.sleep(2 * OFFERED_S)
            assert not offered.withdrawn
        assert list((tmp_path / "states").rglob("*.ok"))
        await trio.sleep(OFFERED_S + 2 * SWEEP_S)
        assert offered.withdrawn
        async with adapters._lock:  # the sweep has ended
            assert not list((tmp_path / "states").rglob("*.ok"))
        nursery.cancel_scope.cancel()


async def test_what_an_asker_sends_is_checked(tiny: ModelSource, adapter: Adapter, tmp_path: Path) -> None:
    """Bytes that are no index are refused, and bytes of another hash never count as arrived."""
    async with adapter_swarm(tiny, tmp_path) as swarm:
        fetcher, evil = AdapterFetcher(swarm.states("hop")), swarm.states("evil")
        rubbish = await evil.keep(b"run", b"{}")
        with pytest.raises(RecordError, match="the adapter's index"):
            await fetcher.index("evil", AdapterRef(rubbish.root, rubbish.size_bytes))
        honest = evil._server._on_chunk

        lies = 0

        async def lie(peer: str, body: bytes) -> bytes:
            nonlocal lies
            answer: Any = await honest(peer, body)
            sent = answer if isinstance(answer, bytes) else b"".join(answer)
            lies += 1
            return sent[:-1] + bytes([sent[-1] ^ 1])

        swarm.fabric.nodes["evil"].serve(METHODS.chunk, lie)
        part = await evil.keep(b"run", b"some bytes")
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.5):
            await fetcher.index("evil", AdapterRef(part.root, part.size_bytes))
        assert lies
        assert not list((swarm.folder / "hop").rglob(f"{part.root.hex()}*"))


def test_an_index_is_checked(adapter: Adapter) -> None:
    ref = adapter_ref(adapter)
    assert len(ref.short) == 16
    assert adapter_ref(replace(adapter, settings=replace(adapter.settings, alpha=5.0))) != ref
    raw = b'{"alpha":2.0,"rank":4,"roots":["' + b"ab" * 32 + b'"],"size":64,"targets":["q"],"v":1}'
    assert decode_index(raw).encoded() == raw


async def test_an_asker_cannot_spoil_a_state_that_a_job_fetches(tiny: ModelSource, tmp_path: Path) -> None:
    """It asks for an adapter with the same hash, of another size, and while it gives nothing the job has its state."""
    data = bytes(1000)
    async with adapter_swarm(tiny, tmp_path) as swarm, trio.open_nursery() as nursery:
        states, holder = swarm.states("hop"), swarm.states("holder")
        swarm.fabric.node("evil")
        part = await holder.keep(b"run", data)
        give, honest, asked, may_give = METHODS.chunk, holder._server._on_chunk, trio.Event(), trio.Event()

        async def give_later(peer: str, body: bytes) -> Any:
            asked.set()
            await may_give.wait()
            return await honest(peer, body)

        async def ask(size_bytes: int) -> None:
            with suppress(WeightsError, trio.TooSlowError):
                await AdapterFetcher(states).index("evil", AdapterRef(part.root, size_bytes))

        swarm.fabric.nodes["holder"].serve(give, give_later)
        nursery.start_soon(ask, part.size_bytes)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(20):
            async with trio.open_nursery() as fetching:
                got: list[bytes] = []

                async def fetch() -> None:
                    got.extend(await states.fetch(b"job", [part], ["holder"]))

                fetching.start_soon(fetch)
                await asked.wait()
                nursery.start_soon(ask, 9)
                await trio.testing.wait_all_tasks_blocked()
                may_give.set()
        assert got == [data]
        nursery.cancel_scope.cancel()
