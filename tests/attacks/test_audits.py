"""Audits of honest nodes: they must accuse nobody, and never end their asker. And of hops that announce 4 bits.

Honest results of weights that were rounded to 4 bits differ so much from those of other formats that an audit cannot
tell them from a lie of half their length, which is enough to choose every token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from app.asker import audit
from app.asker.asker import Asker, AskerOptions
from app.asker.audit import Auditor
from app.asker.evidence import Deviation
from app.asker.reply import AuditSample, AuditSampler, HiddenState, ReplyStats, Window
from app.core.span import Span
from app.routing.route import Hop, NoRoute, Privacy, Route, RouteTimes
from app.routing.trust import TrustBook
from app.swarm.records import Announcement
from engine.model.block import WeightOptions
from engine.model.hosted_span import HostedSpan
from engine.model.span import SpanOptions, load_span
from engine.session_runner import SessionRunner
from engine.sources.opening import open_source
from engine.swarm_ends import load_swarm_ends
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from p2p.memory.fabric import LinkProfile, open_fabric
from tests.app.asker.test_audit import AuditSwarm, Lie, audit_swarm, distrusted, random_numbers
from tests.app.hash_model import HashEnds, HashRunner, InlineDevice, Output, digest, greedy
from tests.app.routing.test_search import member
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm

CPU = torch.device("cpu")
TOKENS = 8
HEAD_S = 0.05  # one pass through the model's head


async def paused_half_way(swarm: SessionSwarm, asker: Asker, name: str, prompt: list[int]) -> bool:
    """Ask for one reply and pause this node in the middle of it; returns whether the node took part until then."""
    settings = ReplySettings(TOKENS, Sampling(temperature=0.0))
    server, serving = swarm.servers[name], swarm.announcements[name]
    async with asker.reply(prompt, settings, max_tokens=TOKENS) as reply:
        for _ in range(TOKENS // 2):
            await anext(reply)
        took_part = name in {hop.peer for hop in reply.stats.route}
        swarm.announcements[name] = replace(serving, state="paused")
        swarm.nursery.start_soon(server.drain)
        await trio.sleep(1.5)
        async for _ in reply:
            pass
    assert name not in {hop.peer for hop in reply.stats.route}
    swarm.announcements[name], server.draining = serving, False
    return took_part


async def test_an_honest_hop_of_another_precision_that_leaves_early_is_not_accused(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A bfloat16 card is paused in the middle of each reply and float32 nodes go on: every audit must agree."""
    source = open_source("tiny-random", tmp_path)

    def runner(start: int, stop: int, dtype: torch.dtype = torch.float32) -> SessionRunner:
        span = load_span(source, start, stop, SpanOptions(CPU, dtype, kv_bytes=1 << 22))
        return SessionRunner(HostedSpan([span]))

    async with open_fabric(profile=LinkProfile(delay_s=0.002)) as fabric, trio.open_nursery() as nursery:
        swarm = SessionSwarm(fabric, nursery)
        for index, span in enumerate(((0, 4), (0, 4), (4, 8), (4, 8))):
            await swarm.serve(f"cpu{index}", runner(*span))
        await swarm.serve("card", runner(0, 4, torch.bfloat16), speed=400.0)
        swarm.announcements["card"] = replace(swarm.announcements["card"], dtype="bf16")
        book, rng = TrustBook(clock=trio.current_time), random.Random(3)
        ends = load_swarm_ends(source, WeightOptions(CPU, torch.float32))
        members = lambda: list(swarm.announcements.values())  # noqa: E731
        asker = Asker(fabric.node("asker"), ends, InlineDevice(), members, options=AskerOptions(rng=rng, book=book))
        await nursery.start(asker.run)
        prompts = random.Random(5)
        for number in range(1, 41):
            assert await paused_half_way(swarm, asker, "card", prompts.choices(range(20, 200), k=6)), number
            if number % 20 == 0:  # one more session may be an audit
                await trio.sleep(40)
            assert book.standing("card").trusted, book.standing("card").why
        audits = asker.stats().audits
        assert audits.passed > 0
        assert audits.failed == 0
        nursery.cancel_scope.cancel()


async def test_a_client_may_hang_up_at_any_moment(autojump_clock: MockClock) -> None:
    """One of two clients hangs up before its first token, at another moment each time: replies and audits go on."""
    async with open_swarm((0, 4), (0, 4), (4, 8), (4, 8)) as swarm, trio.open_nursery() as nursery:
        outlook, members = AskerOptions(rng=random.Random(1)), lambda: list(swarm.announcements.values())
        asker = Asker(swarm.fabric.node("asker"), HashEnds(), InlineDevice(HEAD_S), members, options=outlook)
        await nursery.start(asker.run)

        async def hang_up(after_s: float) -> None:
            await trio.sleep(0.01)  # the other reply's token is chosen first
            with trio.move_on_after(after_s):
                await ask(asker, PROMPT, 6)

        for _ in range(12):
            for hundredths in range(8, 16):  # the answer comes after 0.1 s, then the head is busy with the other reply
                async with trio.open_nursery() as both:
                    both.start_soon(ask, asker, PROMPT, 6)
                    both.start_soon(hang_up, hundredths / 100)
        await trio.sleep(60)
        assert asker.stats().audits.passed > 0
        assert (await ask(asker, PROMPT, 6)).token_ids == greedy(PROMPT, 6)
        nursery.cancel_scope.cancel()


# --- hops that announce 4 bits ----------------------------------------------------------------------------------------

ALLOWED = 20  # replies for each session of auditing


def turned(rows: torch.Tensor, memory: dict[bytes, torch.Tensor], session: bytes) -> torch.Tensor:
    """Results that are moved by half of their length, at a right angle."""
    side = torch.zeros_like(rows)
    side[:, 0] = 1
    side -= (side * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True) * rows
    moved: torch.Tensor = rows + 0.5 * rows.norm(dim=1, keepdim=True) * side / side.norm(dim=1, keepdim=True)
    return moved


async def hold_thirds(swarm: AuditSwarm, tmp_path: Path, lie: Lie) -> Asker:
    """Two honest float32 nodes for each third, and a liar for the last one that says that it is the fastest."""
    source = open_source("tiny-random", tmp_path)
    for third in range(3):
        for copy in "ab":
            await swarm.hold(source, f"{copy}{third}", third)
    await swarm.hold(source, "liar", 2, lie, speed=500.0)
    return await swarm.audited(load_swarm_ends(source, WeightOptions(CPU, torch.float32)), seed=1)


def says(swarm: AuditSwarm, quantisation: str) -> None:
    swarm.announcements["liar"] = replace(swarm.announcements["liar"], quantisation=quantisation)


def have_room(swarm: AuditSwarm, tokens: int) -> None:
    """Let the honest nodes of the last third announce this much room."""
    for name in ("a2", "b2"):
        swarm.announcements[name] = replace(swarm.announcements[name], kv_free_tokens=tokens)


async def asked(asker: Asker, number: int, meanwhile: Callable[[], None] = lambda: None) -> ReplyStats:
    prompt = random.Random(number).choices(range(20, 200), k=6)
    settings = ReplySettings(2, Sampling(temperature=0.0))
    async with asker.reply(prompt, settings, max_tokens=2) as reply:
        async for _ in reply:
            meanwhile()
    return reply.stats


def used(stats: ReplyStats) -> bool:
    return "liar" in {hop.peer for hop in stats.route}


async def test_a_hop_that_says_four_bits_takes_part_in_no_reply_that_others_can_give(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with audit_swarm() as swarm:
        asker = await hold_thirds(swarm, tmp_path, turned)
        says(swarm, "int4")
        for number in range(6):
            assert not used(await asked(asker, number))
        have_room(swarm, 0)
        assert used(await asked(asker, 6)), "the others have no room"
        have_room(swarm, 1000)
        del swarm.announcements["a2"], swarm.announcements["b2"]
        assert used(await asked(asker, 7)), "there are no others"


@pytest.mark.parametrize(("lie", "failed"), [(turned, 0), (random_numbers, 1)])
async def test_a_lie_that_four_bits_could_explain_is_no_agreement_and_a_larger_one_is_a_lie(
    lie: Lie, failed: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with audit_swarm() as swarm:
        asker = await hold_thirds(swarm, tmp_path, lie)
        says(swarm, "int4")
        have_room(swarm, 0)
        for number in range(ALLOWED):
            assert used(await asked(asker, number))
        have_room(swarm, 1000)
        await trio.sleep(60)
        audits = asker.stats().audits
        assert (audits.sessions, audits.passed, audits.failed) == (1, 0, failed)
        assert not any(asker.planner.book.agreed(peer) for peer in swarm.announcements)
        assert distrusted(asker) == set()


async def test_a_format_that_is_announced_once_the_route_is_chosen_excuses_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with audit_swarm() as swarm:
        asker = await hold_thirds(swarm, tmp_path, turned)
        for number in range(ALLOWED):
            says(swarm, "none")
            assert used(await asked(asker, number, lambda: says(swarm, "int4")))
        await trio.sleep(60)
        assert asker.stats().audits.failed == 1


class Judge:
    """Two members of float32 and one of 4 bits, whose answers are apart from theirs; satisfies `AuditContext`."""

    def __init__(self) -> None:
        self.judged = Counter[str]()  # formats of the replies that were compared

    def members(self) -> list[Announcement]:
        return [member("a", 0, 6), member("b", 0, 6), replace(member("rough", 0, 6), quantisation="int4")]

    def not_accused(self) -> frozenset[str]:
        return frozenset()

    def home(self, peer: str) -> str:
        return peer

    def avoided(self) -> frozenset[str]:
        return frozenset()

    def full(self, tokens: int) -> frozenset[str]:
        return frozenset()

    @asynccontextmanager
    async def pinned(self, route: Route, room: int, adapter: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(wires={}, blamed=frozenset())

    async def times(self, prompt_tokens: int, room: int) -> Callable[[Route], RouteTimes]:
        return lambda route: RouteTimes(0.0, 0.0)

    async def sample_and_discard(self, *args: object) -> None:
        pass

    async def answers_of(self, session: object, tokens: object, guesses: object) -> list[HiddenState]:
        return [HiddenState(b"", "none f32")]

    async def deviation(self, one: Sequence[HiddenState], other: Sequence[HiddenState]) -> Deviation:
        self.judged[other[0].dtype] += 1
        return Deviation(0.0 if one == other else 0.5, 0.0)


async def test_audits_that_show_nothing_do_not_take_the_place_of_all_others(autojump_clock: MockClock) -> None:
    """Those who were audited least come first, and nobody ever agrees with the hop of 4 bits."""
    judge, book = Judge(), TrustBook(clock=trio.current_time)
    auditor = Auditor(judge, book, random.Random(1))

    def sample(peer: str, number_format: str) -> AuditSample:
        answer, settings = HiddenState(b"", number_format), ReplySettings(1, Sampling())
        windows, peers = (Window(1, (answer,)),), frozenset({peer})
        return AuditSample((1, 2), 1, windows, peers, (number_format,) * 6, 8, Privacy(), settings, ((),))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(auditor.run)
        for _ in range(40):
            auditor.ended(sample("a", "none f32"), 100)
            auditor.ended(sample("rough", "int4 f32"), 100)
            for _ in range(ALLOWED - 2):
                auditor.ended(None, 100)
            await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert judge.judged.total() == auditor.counts.sessions == 40
    assert judge.judged["none f32"] == auditor.counts.passed > 10
    assert judge.judged["int4 f32"] > 10
    assert not auditor.counts.failed
    assert book.agreed("rough") == 0


class LiesInEmbeddings(HashRunner):
    """Says nonsense in sessions that begin with one token, as no other does."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self._begun: dict[bytes, int] = {}

    def step(self, work: Sequence[Any]) -> list[Output]:
        made = super().step(work)
        for at, item in enumerate(work):
            if self._begun.setdefault(item.session, item.rows) == 1:
                made[at] = Output(b"".join(digest(b"lie", item.position + row) for row in range(item.rows)), "f32")
        return made


async def test_who_lies_in_embeddings_is_found(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (0, 4), (4, 8), (4, 8)) as swarm:
        await swarm.serve("liar", LiesInEmbeddings(4, 8), speed=400.0)
        asker = await swarm.asker()
        trust, number = asker.planner.book.standing, 0
        while trust("liar").trusted and number < 100:
            await asker.hidden_states([number, *PROMPT[: 9 + number % 20]])
            await trio.sleep(10)
            number += 1
    assert not trust("liar").trusted
    assert all(trust(honest).score == 1 for honest in ("n0", "n1", "n2", "n3"))


# --- sessions that take long or break ---------------------------------------------------------------------------------

PROMPT_TOKENS = 10
FORMATS = ("none f32",) * 6


@dataclass
class Sessions:
    """An auditor's context: a model whose answers are numbers of tokens, and members that misbehave in sessions."""

    peers: Sequence[Announcement]
    homes: dict[str, str] = field(default_factory=dict)  # of peers that have not one each
    liars: frozenset[str] = frozenset()
    breaks: dict[str, int] = field(default_factory=dict)  # peer -> number of tokens at which its sessions break
    token_s: dict[str, float] = field(default_factory=dict)  # peer -> seconds for a token
    routes: list[Route] = field(default_factory=list)  # of all sessions
    lasted_s: list[float] = field(default_factory=list)

    def members(self) -> Sequence[Announcement]:
        return self.peers

    def not_accused(self) -> frozenset[str]:
        return frozenset()

    def home(self, peer: str) -> str:
        return self.homes.get(peer, peer)

    def avoided(self) -> frozenset[str]:
        return frozenset()

    def full(self, tokens: int) -> frozenset[str]:
        return frozenset()

    async def times(self, prompt_tokens: int, room: int) -> Callable[[Route], RouteTimes]:
        return lambda route: RouteTimes(self._token_s(route), self._token_s(route))

    def _token_s(self, route: Route) -> float:
        return sum(self.token_s.get(hop.peer, 0.01) for hop in route)

    @asynccontextmanager
    async def pinned(self, route: Route, room: int, adapter: object) -> AsyncIterator[Any]:
        self.routes.append(route)
        begin = trio.current_time()
        try:
            yield SimpleNamespace(wires={}, blamed=frozenset(), route=route, fed=0)
        finally:
            self.lasted_s.append(trio.current_time() - begin)

    async def sample_and_discard(self, *args: object) -> None:
        pass

    async def answers_of(self, session: Any, tokens: Sequence[int], guesses: object) -> list[HiddenState]:
        session.fed += len(tokens)
        if any(session.fed >= self.breaks.get(hop.peer, 10**9) for hop in session.route):
            raise NoRoute(0)
        await trio.sleep(self._token_s(session.route))
        return [self.answer(session.route, session.fed)]

    def answer(self, route: Route, tokens: int) -> HiddenState:
        return HiddenState(b"%d" % tokens + b"a lie" * any(hop.peer in self.liars for hop in route), "none f32")

    async def deviation(self, one: Sequence[HiddenState], other: Sequence[HiddenState]) -> Deviation:
        assert len(one) == len(other) > 0
        return Deviation(0.0 if one == other else 1.0, 0.0)

    def sample(self, tokens: int, *peers: str, seed: int = 1) -> AuditSample:
        """A reply of so many tokens over these peers, which have as many blocks each."""
        part = len(FORMATS) // len(peers)
        route = tuple(Hop(peer, Span(at * part, (at + 1) * part)) for at, peer in enumerate(peers))
        sampler = AuditSampler(random.Random(seed))
        for number in range(tokens):
            sampler.note(self.answer(route, PROMPT_TOKENS + number), [route], rounded=False)
        return AuditSample(
            tuple(range(PROMPT_TOKENS + tokens)),
            PROMPT_TOKENS,
            sampler.windows(PROMPT_TOKENS),
            frozenset(peers),
            FORMATS,
            10**6,
            Privacy(),
            ReplySettings(1, Sampling()),
            ((),) * tokens,
            routes=(route,),
        )


async def audits_of(context: Sessions, samples: Sequence[AuditSample], seed: int = 1) -> tuple[Auditor, TrustBook]:
    """Audit each of these replies, with all the traffic that this takes."""
    book = TrustBook(clock=trio.current_time)
    auditor = Auditor(context, book, random.Random(seed))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(auditor.run)
        for sample in samples:
            auditor.ended(sample, 10**6)
            for _ in range(5):
                for _ in range(ALLOWED):
                    auditor.ended(None, 10**6)
                await trio.sleep(audit.AUDIT_S)
        nursery.cancel_scope.cancel()
    return auditor, book


@pytest.mark.parametrize("tokens", [170, 1500])
async def test_a_liar_is_found_though_all_others_are_far_slower(autojump_clock: MockClock, tokens: int) -> None:
    """A session of the others takes 10 minutes, or hours: it had ten minutes, and no verdict came of it."""
    members = [member(name, 0, 6) for name in ("liar", "a", "b")]
    context = Sessions(members, liars=frozenset({"liar"}), token_s={"a": 4.0, "b": 5.0})
    samples = [context.sample(tokens, "liar", seed=number) for number in range(3)]
    auditor, book = await audits_of(context, samples)
    assert auditor.counts.failed
    assert not book.standing("liar").trusted
    assert all(book.standing(honest).score == 1 for honest in ("a", "b"))


async def test_of_a_reply_that_nobody_repeats_in_time_what_can_be_is_compared(autojump_clock: MockClock) -> None:
    context = Sessions([member("fast", 0, 6), member("slow", 0, 6)], token_s={"slow": 10.0})
    samples = [context.sample(1000, "fast", seed=number) for number in range(15)]
    compared: list[int] = []
    usual = context.deviation

    async def note(one: Sequence[HiddenState], other: Sequence[HiddenState]) -> Deviation:
        compared.append(int(other[-1].data))
        return await usual(one, other)

    context.deviation = note  # type: ignore[method-assign]
    auditor, _ = await audits_of(context, samples)
    assert auditor.counts.passed == len(samples) == len(compared)
    assert max(compared) * 10.0 <= audit.AUDIT_S / 2 + 100
    assert len({at // 60 for at in compared}) == 4, "windows of all that is in reach"


async def test_a_route_that_repeats_the_reply_in_time_is_preferred(autojump_clock: MockClock) -> None:
    members = [member(name, 0, 6) for name in ("reply", "slow", "fine")]
    context = Sessions(members, token_s={"slow": 100.0})
    auditor, _ = await audits_of(context, [context.sample(200, "reply", seed=number) for number in range(20)])
    assert auditor.counts.passed == 20
    assert sum(route[0].peer == "fine" for route in context.routes) >= 14


async def test_a_hop_that_takes_longer_than_it_says_does_not_hold_audits_up(autojump_clock: MockClock) -> None:
    context = Sessions([member(name, 0, 6) for name in ("reply", "stalls", "fine")])
    usual = context.answers_of

    async def stall(session: Any, tokens: Sequence[int], guesses: object) -> list[HiddenState]:
        await trio.sleep(25 * (session.route[0].peer == "stalls"))
        return await usual(session, tokens, guesses)

    context.answers_of = stall  # type: ignore[method-assign]
    auditor, _ = await audits_of(context, [context.sample(40, "reply")], seed=3)
    assert [hop.peer for route in context.routes for hop in route] == ["stalls", "fine"]
    assert auditor.counts.passed == 1
    assert context.lasted_s[0] < 2 * audit.OPENING_S


async def test_answers_that_came_before_a_session_broke_count(autojump_clock: MockClock) -> None:
    context = Sessions([member("reply", 0, 6), member("judge", 0, 6)])
    sample = context.sample(400, "reply", seed=2)
    context.breaks["judge"] = sample.windows[-1].stop + 1
    assert sample.windows[-1].stop + 1 < len(sample.tokens) - 1
    auditor, _ = await audits_of(context, [sample])
    assert (auditor.counts.passed, len(context.routes)) == (1, 1)


MATES = [f"mate {number}" for number in range(16)]


@pytest.mark.parametrize("seed", range(5))
async def test_those_who_end_an_audit_have_it_made_without_them(autojump_clock: MockClock, seed: int) -> None:
    """The liar's other identities know the room and the prompt of its replies, and refuse such sessions."""
    members = [member(name, 0, 6) for name in ("liar", "honest", "other", *MATES)]
    context = Sessions(members, dict.fromkeys(MATES, "one home"), frozenset({"liar"}), breaks=dict.fromkeys(MATES, 1))
    _, book = await audits_of(context, [context.sample(20, "liar")], seed)
    assert not book.standing("liar").trusted
    assert len(context.routes) <= 4, "two judges, a second look at the liar, and one that refuses"


@pytest.mark.parametrize("span", [(0, 3), (0, 6)])
async def test_one_home_has_one_voice_among_those_who_judge(autojump_clock: MockClock, span: tuple[int, int]) -> None:
    """Whoever has many identities, or identities with many blocks, would judge alone, and tell the liar's lies."""
    honest = [member(f"{name}{start}", start, start + 3) for name in "abc" for start in (0, 3)]
    members = [*honest, member("one", 0, 3), member("two", 3, 6), *(member(name, *span) for name in MATES)]
    context = Sessions(members, dict.fromkeys(MATES, "one home"))
    auditor, _ = await audits_of(context, [context.sample(4, "one", "two", seed=number) for number in range(60)])
    assert auditor.counts.passed == len(context.routes) == 60
    judged = sum(any(hop.peer in MATES for hop in route) for route in context.routes)
    assert 5 <= judged <= 30
