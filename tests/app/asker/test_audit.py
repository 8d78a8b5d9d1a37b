"""Lying hops among honest ones, with a real small model: found out within the share of audits, and used no more."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from app.asker.asker import Asker, AskerOptions
from app.asker.audit import SHARE
from app.asker.reply import ReplyStats
from app.core.compute import StepWork, TokenChoice
from app.routing.planner import PrivacyPreferences
from app.routing.trust import TrustBook
from app.swarm.records import tail
from engine.budget import CacheFormat
from engine.errors import DeviceFull, SessionError
from engine.model.block import Quantisation, WeightOptions
from engine.model.hosted_span import HostedSpan
from engine.model.span import BlockAdapter, SpanOptions, load_span
from engine.session_runner import SessionRunner, StepResult
from engine.sources.base import ModelSource
from engine.sources.opening import open_source
from engine.swarm_ends import SwarmEnds, load_swarm_ends
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from engine.wire import to_bytes, to_tensor
from p2p.memory.fabric import LinkProfile, open_fabric
from tests.app.hash_model import InlineDevice
from tests.app.session_swarm import SessionSwarm, no_leaks

CPU = torch.device("cpu")
THIRDS = ((0, 3), (3, 6), (6, 8))
REQUESTS = 100
REPLY_TOKENS = 3

Lie = Callable[[torch.Tensor, dict[bytes, torch.Tensor], bytes], torch.Tensor]


def random_numbers(rows: torch.Tensor, memory: dict[bytes, torch.Tensor], session: bytes) -> torch.Tensor:
    return torch.randn_like(rows) * rows.std()


def scaled(rows: torch.Tensor, memory: dict[bytes, torch.Tensor], session: bytes) -> torch.Tensor:
    return rows * 1.05


def stale(rows: torch.Tensor, memory: dict[bytes, torch.Tensor], session: bytes) -> torch.Tensor:
    """What came out behind the prompt, again and again."""
    if session in memory:
        return memory[session].expand_as(rows)
    memory[session] = rows[-1:].clone()
    return rows


class LyingRunner(SessionRunner):
    """Computes well, and says something else."""

    def __init__(self, honest: SessionRunner, lie: Lie) -> None:
        super().__init__(honest._span)
        self._lie, self._memory = lie, dict[bytes, torch.Tensor]()

    def step(self, work: Sequence[Any]) -> list[StepResult]:
        return [self._falsified(item, output) for item, output in zip(work, super().step(work), strict=True)]

    def _falsified(self, item: StepWork, output: StepResult) -> StepResult:
        rows = to_tensor([memoryview(output.data)], output.dtype, self.hidden_size)
        lie = self._lie(rows, self._memory, item.session)
        return StepResult(bytes(to_bytes(lie, output.dtype)), output.dtype)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_source("tiny-random", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def ends(source: ModelSource) -> SwarmEnds:
    return load_swarm_ends(source, WeightOptions(CPU, torch.float32))


def runner(
    source: ModelSource, start: int, stop: int, quantisation: Quantisation = "none", cache: CacheFormat = "own"
) -> SessionRunner:
    options = SpanOptions(CPU, torch.float32, quantisation, kv_bytes=1 << 22, cache=cache)
    return SessionRunner(HostedSpan([load_span(source, start, stop, options)]))


class AuditSwarm(SessionSwarm):
    """Three thirds of a real model, each held several times."""

    async def hold(self, source: ModelSource, name: str, third: int, lie: Lie | None = None, **how: Any) -> None:
        speed = how.pop("speed", 100.0)
        held = runner(source, *THIRDS[third], **how)
        await self.serve(name, held if lie is None else LyingRunner(held, lie), speed=speed)
        self.announcements[name] = replace(self.announcements[name], **how)

    def slow_down(self, *names: str) -> None:
        """Let these members announce slow links from everybody, so that rows to them and from them are int8."""
        for name in names:
            rates = tuple((tail(other), 1e6) for other in (*self.announcements, "asker") if other != name)
            self.announcements[name] = replace(self.announcements[name], rates=rates, wires=("int8",))

    async def audited(self, ends: SwarmEnds, seed: int, preferences: PrivacyPreferences | None = None) -> Asker:
        outlook = AskerOptions(
            rng=random.Random(seed),
            preferences=lambda: preferences or PrivacyPreferences(),
            book=TrustBook(clock=trio.current_time),
        )
        members = lambda: list(self.announcements.values())  # noqa: E731
        asker = Asker(self.fabric.node("asker"), ends, InlineDevice(), members, options=outlook)
        await self.nursery.start(asker.run)
        return asker


@asynccontextmanager
async def audit_swarm() -> AsyncIterator[AuditSwarm]:
    async with open_fabric(profile=LinkProfile(delay_s=0.005)) as fabric, trio.open_nursery() as nursery:
        yield AuditSwarm(fabric, nursery)
        nursery.cancel_scope.cancel()


PROMPTS = [random.Random(number).choices(range(20, 200), k=6) for number in range(REQUESTS + 10)]
SETTINGS = ReplySettings(REPLY_TOKENS, Sampling(temperature=0.0))


async def request(asker: Asker, number: int) -> ReplyStats:
    async with asker.reply(PROMPTS[number], SETTINGS, max_tokens=REPLY_TOKENS) as reply:
        async for _ in reply:
            pass
    if asker.stats().replies % 20 == 0:  # one more session may be an audit
        await trio.sleep(40)
    return reply.stats


class Truth:
    """What one honest process replies."""

    def __init__(self, source: ModelSource, ends: SwarmEnds) -> None:
        self._runner, self._ends = runner(source, 0, 8), ends

    def reply(self, number: int) -> list[int]:
        session, tokens = b"truth", list[int]()
        text = self._ends.begin(PROMPTS[number], SETTINGS)
        self._runner.open(session, 64)
        new, position = PROMPTS[number], 0
        while text.finish_reason is None:
            work = StepWork(session, 0, 8, position, len(new), memoryview(self._ends.embed(new)), "f32", "")
            output = self._runner.step([work])[0]
            position += len(new)
            new = [self._ends.choose([TokenChoice(text, memoryview(output.data), output.dtype)])[0][0].token_id]
            tokens += new
        self._runner.close(session)
        return tokens


@pytest.fixture(scope="module")
def truth(source: ModelSource, ends: SwarmEnds) -> Truth:
    return Truth(source, ends)


def check_share(asker: Asker) -> None:
    """Audits took no more than their share of tokens and of sessions."""
    stats = asker.stats()
    assert stats.audits.tokens <= SHARE * (stats.asked_tokens + stats.prompt_tokens)
    assert stats.audits.sessions <= SHARE * stats.replies


async def until_found(asker: Asker, *liars: str) -> int:
    """Requests until all these are distrusted."""
    for number in range(REQUESTS):
        if not any(asker.planner.book.standing(liar).trusted for liar in liars):
            return number
        await request(asker, number)
        check_share(asker)
    raise AssertionError({p: asker.planner.book.standing(p) for p in liars})


def distrusted(asker: Asker) -> set[str]:
    return {m.peer for m in asker.planner.members() if not asker.planner.book.standing(m.peer).trusted}


@pytest.mark.parametrize(
    ("lie", "third", "rounding"),
    [
        (random_numbers, 0, ""),
        pytest.param(scaled, 1, "", marks=pytest.mark.soak),
        (stale, 2, ""),
        pytest.param(scaled, 0, "links", marks=pytest.mark.soak),
        pytest.param(scaled, 2, "links", marks=pytest.mark.soak),
        pytest.param(scaled, 0, "caches", marks=pytest.mark.soak),
        pytest.param(scaled, 2, "caches", marks=pytest.mark.soak),
    ],
)
async def test_a_lying_node_is_found_out_and_used_no_more(
    source: ModelSource, ends: SwarmEnds, truth: Truth, lie: Lie, third: int, rounding: str, autojump_clock: MockClock
) -> None:
    async with audit_swarm() as swarm:
        for index in range(3):
            for copy in "ab":
                cache = "int8" if rounding == "caches" and copy == "a" else "own"
                await swarm.hold(source, f"{copy}{index}", index, cache=cache)
        # It claims to be the fastest, so that all replies come through it.
        await swarm.hold(source, "liar", third, lie, speed=500.0)
        if rounding == "links":
            swarm.slow_down(*swarm.announcements)
        asker = await swarm.audited(ends, seed=third)
        first = await request(asker, 0)
        assert "liar" in {hop.peer for hop in first.route}
        asked = 1 + await until_found(asker, "liar")
        assert asked <= REQUESTS
        assert distrusted(asker) == {"liar"}
        assert "wrong activations" in asker.planner.book.standing("liar").why
        for number in range(3):
            stats = await request(asker, number)
            assert "liar" not in {hop.peer for hop in stats.route}
            assert rounding or stats.token_ids == truth.reply(number)
        await no_leaks(swarm)


class Forms(SessionRunner):
    """Honest; writes down the form of every session: its room, and the rows and the time of every frame."""

    def __init__(self, honest: SessionRunner) -> None:
        super().__init__(honest._span)
        self.forms: dict[bytes, list[tuple[float, int]]] = {}
        self.inputs: dict[bytes, list[bytes]] = {}
        self.ended: list[bytes] = []

    def open(self, session: bytes, tokens: int, adapter: BlockAdapter | None = None) -> None:
        self.forms[session], self.inputs[session] = [(0.0, tokens)], []
        super().open(session, tokens, adapter)

    def step(self, work: Sequence[Any]) -> list[StepResult]:
        for item in work:
            self.forms[item.session].append((trio.current_time(), item.rows))
            self.inputs[item.session].append(bytes(item.data))
        return super().step(work)

    def close(self, session: bytes) -> None:
        self.ended.append(session)
        super().close(session)


async def test_an_audit_has_the_form_of_a_reply(
    source: ModelSource, ends: SwarmEnds, autojump_clock: MockClock
) -> None:
    """The first hop of reply and audit sees the same room, prompt, single tokens and end; no time tells them apart."""
    async with audit_swarm() as swarm:
        spies = {}
        for copy in "ab":
            for index, (start, stop) in enumerate(THIRDS):
                held = Forms(runner(source, start, stop))
                await swarm.serve(f"{copy}{index}", held)
                if index == 0:
                    spies[copy] = held
        asker = await swarm.audited(ends, seed=4)
        for number in range(20):
            await request(asker, number)
        await trio.sleep(60)
        assert asker.stats().audits.passed == 1
        forms = {**spies["a"].forms, **spies["b"].forms}
        assert set(forms) == {*spies["a"].ended, *spies["b"].ended}
        inputs = {**spies["a"].inputs, **spies["b"].inputs}
        twins = [s for s in forms if sum(b"".join(inputs[s]) == b"".join(inputs[o]) for o in forms) == 2]
        assert len(twins) == 2, "one reply was repeated whole"
        assert len({tuple(rows for _, rows in forms[session]) for session in twins}) == 1
        assert inputs[twins[0]] == inputs[twins[1]]
        # Simulated links and devices take the same time for all: between two tokens it must be the same, too.
        gaps = [[b - a for (a, _), (b, _) in pairwise(form[1:])] for form in forms.values()]
        assert max(map(max, gaps)) - min(map(min, gaps)) < 0.005


@pytest.mark.parametrize("rounding", [{"quantisation": "int8"}, {"cache": "int8"}])
async def test_honest_nodes_that_round_or_fail_are_not_accused(
    source: ModelSource, ends: SwarmEnds, rounding: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with audit_swarm() as swarm:
        for index in range(3):
            await swarm.hold(source, f"exact{index}", index)
            await swarm.hold(source, f"rounds{index}", index, speed=200.0, **rounding)
        await swarm.hold(source, "flaky", 1, _fails_now_and_then(), speed=500.0)
        asker = await swarm.audited(ends, seed=5)
        for number in range(40):
            await request(asker, number)
            check_share(asker)
        audits = asker.stats().audits
        assert audits.passed >= 2
        assert audits.failed == 0
        assert distrusted(asker) == set()
        flaky = asker.planner.book.standing("flaky")
        assert flaky.score == 1 or flaky.why.startswith("failed: ")


@pytest.mark.parametrize(
    ("what", "error"), [("choose", torch.OutOfMemoryError("CUDA out of memory")), ("deviation", DeviceFull("no room"))]
)
async def test_a_device_that_is_full_for_a_moment_costs_an_audit_and_not_the_asker(
    source: ModelSource, what: str, error: Exception, autojump_clock: MockClock
) -> None:
    """The head is computed for audits too; here only they need it, and then it does not fit."""
    async with audit_swarm() as swarm:
        for index in range(3):
            await swarm.hold(source, f"a{index}", index)
            await swarm.hold(source, f"b{index}", index)
        own = load_swarm_ends(source, WeightOptions(CPU, torch.float32))
        asker = await swarm.audited(own, seed=5)
        full, right, failed = False, getattr(own, what), 0

        def fails(*args: Any) -> Any:
            nonlocal failed
            if not full:
                return right(*args)
            failed += 1
            raise error

        setattr(own, what, fails)
        for number in range(60):
            full = False
            async with asker.reply(PROMPTS[number], SETTINGS, max_tokens=REPLY_TOKENS) as reply:
                async for _ in reply:
                    pass
            full = number < 40
            await trio.sleep(40)
        assert failed
        assert asker.stats().audits.passed
        assert distrusted(asker) == set()


@pytest.mark.parametrize("slow", ["all", pytest.param("some", marks=pytest.mark.soak)])
async def test_rows_that_are_rounded_on_the_way_convict_nobody(
    source: ModelSource, ends: SwarmEnds, slow: str, autojump_clock: MockClock
) -> None:
    async with audit_swarm() as swarm:
        for index in range(3):
            await swarm.hold(source, f"a{index}", index, speed=200.0)
            await swarm.hold(source, f"b{index}", index)
        swarm.slow_down("a0", "a1", "a2", *(("b0", "b1", "b2") if slow == "all" else ()))
        asker = await swarm.audited(ends, seed=6)
        rounded = 0
        for number in range(40):
            async with asker.session(8) as session:
                await session.advance(PROMPTS[number])
                rounded += bool(session.wires)
            await request(asker, number)
        assert rounded
        audits = asker.stats().audits
        assert audits.passed >= 2
        assert audits.failed == 0
        assert distrusted(asker) == set()


def _fails_now_and_then() -> Lie:
    rng = random.Random(7)

    def fail(rows: torch.Tensor, memory: dict[bytes, torch.Tensor], session: bytes) -> torch.Tensor:
        if rng.random() < 0.05:
            raise SessionError("out of luck")
        return rows

    return fail


async def test_a_node_that_holds_the_blocks_itself_needs_no_third(
    source: ModelSource, ends: SwarmEnds, autojump_clock: MockClock
) -> None:
    """Two liars who tell the same lie are a majority, but not against a peer that the person trusts."""
    async with audit_swarm() as swarm:
        for index in range(3):
            await swarm.hold(source, f"friend{index}", index, speed=20.0)
        await swarm.hold(source, "liar", 1, scaled, speed=500.0)
        await swarm.hold(source, "accomplice", 1, scaled, speed=500.0)
        friends = PrivacyPreferences(trusted=frozenset({"friend0", "friend1", "friend2"}))
        asker = await swarm.audited(ends, 3, friends)
        await until_found(asker, "liar")
        assert distrusted(asker) <= {"liar", "accomplice"}


class TwoFaced(SessionRunner):
    """Computes well, except for one successor."""

    def __init__(self, honest: SessionRunner, is_for_victim: Callable[[bytes], bool]) -> None:
        super().__init__(honest._span)
        self._is_for_victim = is_for_victim

    def step(self, work: Sequence[Any]) -> list[StepResult]:
        return [self._said(item, output) for item, output in zip(work, super().step(work), strict=True)]

    def _said(self, item: StepWork, output: StepResult) -> StepResult:
        if not self._is_for_victim(item.session):
            return output
        rows = to_tensor([memoryview(output.data)], output.dtype, self.hidden_size)
        return StepResult(bytes(to_bytes(rows.roll(1, -1), output.dtype)), output.dtype)


@pytest.mark.soak
@pytest.mark.parametrize(("identities", "honest", "seed"), [(6, 1, 1), (6, 1, 3), (12, 2, 2), (2, 0, 1)])
async def test_identities_of_one_machine_that_lie_to_one_successor_do_not_convict_it(
    identities: int, honest: int, seed: int, source: ModelSource, ends: SwarmEnds, autojump_clock: MockClock
) -> None:
    async with audit_swarm() as swarm:
        for number in range(honest):
            await swarm.hold(source, f"honest {number}", 0)
        for number in range(identities):
            name = f"liar {number}"
            swarm.fabric.machine_of[name] = "the attacker's"

            def is_for_victim(session: bytes, name: str = name) -> bool:
                way = swarm.servers[name]._sender._ways.get(session)
                return way is not None and way.successor == "victim"

            await swarm.serve(name, TwoFaced(runner(source, *THIRDS[0]), is_for_victim), speed=500.0)
        await swarm.hold(source, "victim", 1, speed=200.0)
        for third, names in ((1, ("other", "third")), (2, ("first end", "second end"))):
            for name in names:
                await swarm.hold(source, name, third)
        asker = await swarm.audited(ends, seed)
        for number in range(160):
            prompt = random.Random(1000 * seed + number).choices(range(20, 200), k=6)
            async with asker.reply(prompt, SETTINGS, max_tokens=REPLY_TOKENS) as reply:
                async for _ in reply:
                    pass
            if asker.stats().replies % 20 == 0:
                await trio.sleep(40)
        assert asker.stats().audits.failed
        book, liars = asker.planner.book, [f"liar {number}" for number in range(identities)]
        assert book.standing("victim").trusted
        assert book.standing("victim").score >= min(book.standing(name).score for name in liars) - 1e-3
