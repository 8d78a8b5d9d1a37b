"""Caches that outlive a reply: the tokens of an undisturbed model, read once, and never in anybody's way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from app.asker.asker import WAIT_FOR_READING_S, Asker
from app.asker.kept_sessions import KEEP_S, CachedSession, KeptSessions, best_prefix, packed, shared_tokens
from app.asker.reply import ReplyStats
from app.core.span import Span
from app.routing.route import Privacy
from app.serving.admission import AdmissionLimits
from app.serving.block_server import ServerSettings
from engine.local_model import load_local, local_options
from engine.model.block import WeightOptions
from engine.model.hosted_span import HostedSpan
from engine.model.span import SpanOptions, load_span
from engine.session_runner import SessionRunner
from engine.sources.opening import open_source
from engine.swarm_ends import load_swarm_ends
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from p2p.memory.fabric import open_fabric
from tests.app.asker.test_session_schedules import Fault, events, faults, happen, meddled_swarm
from tests.app.hash_model import HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, no_leaks, open_swarm

CPU = torch.device("cpu")
HALVES = ((0, 4), (4, 8))
LONG = list(range(1000, 1300))
ARRIVES_S = 0.1  # after which the last orders of a reply are carried out


def rows_read(swarm: SessionSwarm, name: str) -> int:
    """Tokens that went through a node's blocks."""
    return sum(rows for batch in swarm.runners[name].batches for _, _, rows in batch)


async def turn(asker: Asker, conversation: list[int], said: Sequence[int], count: int) -> ReplyStats:
    """One turn of a conversation, whose reply is checked."""
    conversation += said
    stats = await ask(asker, conversation, count)
    assert stats.token_ids == greedy(conversation, count)
    conversation += stats.token_ids
    return stats


# --- the choice, without a network ------------------------------------------------------------------------------------


def cached(tokens: Sequence[int], *, privacy: Privacy | None = None, at: float = 0.0, owner: str = "") -> CachedSession:
    return CachedSession(bytes(16), 1, packed(tokens), privacy or Privacy(), (), (), at, owner=owner)


@pytest.mark.parametrize(
    ("prompt", "tokens", "shared"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 2),  # the last token must be answered
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1], [1], 0),
        ([1, 2], [], 0),
    ],
)
def test_a_prompt_shares_the_tokens_before_the_first_difference(
    prompt: list[int], tokens: list[int], shared: int
) -> None:
    assert shared_tokens(packed(prompt), packed(tokens)) == shared


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_all_shared_tokens_are_found(prompt: list[int], tokens: list[int]) -> None:
    shared = shared_tokens(packed(prompt), packed(tokens))
    assert prompt[:shared] == tokens[:shared]
    assert shared in (max(len(prompt) - 1, 0), len(tokens)) or prompt[shared] != tokens[shared]


def test_a_prompt_is_compared_with_many_long_sessions_at_once() -> None:
    """Token by token in Python it takes 0.2 s, in which nothing else happens on the node."""
    long = range(131_072)
    sessions = [cached([*long, number]) for number in range(30)]
    prompt, begin = packed([*long, 50, 51]), time.thread_time()
    best = best_prefix(prompt, Privacy(), sessions)
    assert time.thread_time() - begin < 0.1
    assert best is not None
    assert best.tokens == len(long)


def test_the_longest_prefix_of_equal_privacy_is_chosen() -> None:
    short, long, strict = cached(LONG[:50]), cached(LONG[:90]), cached(LONG, privacy=Privacy(2, 8))
    best = best_prefix(packed(LONG), Privacy(), [short, long, strict])
    assert best is not None
    assert (best.source, best.tokens, best.replaces) == (long, 90, True)
    assert best_prefix(packed(LONG), Privacy(3, 8), [short, long, strict]) is None
    assert best_prefix(packed(PROMPT), Privacy(), [short, long]) is None
    branch = best_prefix(packed([*LONG[:30], 1, 2]), Privacy(), [long])
    assert branch is not None
    assert not branch.replaces, "most of the other conversation would be lost"


def test_old_sessions_and_those_above_the_limit_go() -> None:
    kept = KeptSessions()
    sessions = [cached([number], at=float(number)) for number in range(6)]
    for session in sessions:
        kept.add(session)
    assert kept.surplus(4, 5.0) == sessions[:2]
    assert kept.surplus(4, 3.0 + KEEP_S) == sessions[2:4]
    assert list(kept) == sessions[4:]
    assert kept.surplus(0, 5.0) == sessions[4:]


def test_an_owner_with_many_sessions_displaces_its_own() -> None:
    kept = KeptSessions()
    only = cached([1], at=0.0, owner="agent")
    scripts = [cached([number], at=1.0 + number, owner="script") for number in range(8)]
    kept.add(only)
    for number, session in enumerate(scripts):
        kept.add(session)
        assert kept.surplus(4, 20.0) == ([scripts[number - 3]] if number > 2 else [])
    assert list(kept) == [only, *scripts[5:]]
    # Two owners with as many: the oldest of all goes.
    kept.add(cached([2], at=10.0, owner="agent"))
    kept.add(cached([3], at=11.0, owner="agent"))
    assert kept.surplus(5, 20.0) == [only]
    # Where each owner has one, there is nobody else whose could go.
    assert len(kept.surplus(1, 20.0)) == 4
    kept.add(cached([4], at=12.0, owner="other"))
    assert [session.at for session in kept.surplus(1, 20.0)] == [11.0]


@pytest.mark.parametrize(
    ("other", "has_all"),
    [
        (cached(LONG[:90]), True),
        (cached(LONG[:40]), True),
        (cached(LONG), False),
        (cached([*LONG[:40], 1]), False),
        (cached(LONG[:40], owner="other"), False),
        (cached(LONG[:40], privacy=Privacy(2, 8)), False),
    ],
)
def test_a_session_that_another_one_has_all_of_is_not_worth_a_place(other: CachedSession, has_all: bool) -> None:
    assert cached(LONG[:90]).has_all_of(other) == has_all


# --- conversations ----------------------------------------------------------------------------------------------------


async def test_a_turn_reads_only_what_is_new(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        asker = await swarm.asker(keep=4)
        conversation: list[int] = []
        first = await turn(asker, conversation, LONG, 10)
        assert first.cached_tokens == 0
        for number in range(4):
            before = rows_read(swarm, "n1")
            stats = await turn(asker, conversation, [number, number + 1], 10)
            assert stats.prompt_tokens - stats.cached_tokens == 3  # the last token of the reply was never fed
            assert rows_read(swarm, "n1") - before == 3 + 9
        figures = asker.stats()
        assert (figures.kept_sessions, figures.kept_tokens) == (1, len(conversation) - 1)
        assert figures.cached_tokens > 0.7 * figures.prompt_tokens
        await trio.sleep(ARRIVES_S)
        assert all(server.sessions == 0 for server in swarm.servers.values())
        assert all(server.kv_free_tokens == 1 << 20 for server in swarm.servers.values())


async def test_an_owner_learns_nothing_of_what_another_one_asked(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        first = await ask(asker, LONG, 10, "one")
        guessed = await ask(asker, LONG, 10, "other")
        assert (first.cached_tokens, guessed.cached_tokens) == (0, 0)
        assert first.token_ids == guessed.token_ids
        again = await ask(asker, LONG, 10, "one")
        assert again.cached_tokens == len(LONG) - 1, "what the other one asked took nothing from it"


async def test_an_owner_does_not_wait_for_a_prompt_that_another_one_reads(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        async with asker.reply(LONG, 10, max_tokens=10, owner="one"):
            begin = trio.current_time()
            guessed = await ask(asker, LONG, 10, "other")
            assert guessed.cached_tokens == 0
            assert trio.current_time() - begin < WAIT_FOR_READING_S / 2


async def test_another_keys_short_prompts_do_not_cost_a_conversation_its_cache(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        await ask(asker, LONG, 4, "agent")
        for number in range(8):
            await ask(asker, [number] * 40, 3, "script")
        assert asker.stats().kept_sessions == 4
        assert (await ask(asker, [*LONG, 1], 4, "agent")).cached_tokens == len(LONG)


async def test_a_reply_written_again_and_an_edited_question_share_what_comes_before(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        conversation: list[int] = []
        await turn(asker, conversation, LONG, 10)
        again = await turn(asker, list(LONG[:-1]), LONG[-1:], 10)
        assert again.cached_tokens == len(LONG) - 1
        edited = await turn(asker, list(LONG[:250]), [7, 8, 9], 10)
        assert edited.cached_tokens == 250
        branch = await turn(asker, list(LONG[:40]), [7, 8, 9], 10)
        assert branch.cached_tokens == 40
        # The branch has left the longer conversation its cache.
        assert (await turn(asker, [*LONG[:250], 7, 8], [9], 4)).cached_tokens == 252


async def test_replies_at_one_time_read_their_common_prompt_once(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        results: dict[int, ReplyStats] = {}

        async def agent(number: int) -> None:
            results[number] = await turn(asker, list(LONG), [number] * 8, 10)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(agent, number)
        assert sorted(stats.cached_tokens for stats in results.values()) == [0] + [len(LONG)] * 7
        assert rows_read(swarm, "n0") == len(LONG) + 8 * 8 + 8 * 9


async def test_a_reply_that_others_wait_for_may_fail(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        results: list[ReplyStats] = []

        async def second() -> None:
            await trio.sleep(0.01)
            results.append(await turn(asker, list(LONG), [1], 4))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(second)
            with trio.move_on_after(0.03):
                await ask(asker, [*LONG, 2], 4)
        assert len(results) == 1


async def test_without_the_setting_nothing_is_kept(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=0)
        conversation: list[int] = []
        await turn(asker, conversation, LONG, 4)
        assert (await turn(asker, conversation, [1], 4)).cached_tokens == 0
        await no_leaks(swarm)


async def test_the_setting_may_change_while_sessions_are_kept(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        limit = [4]
        asker = await swarm.asker(keep=lambda: limit[0])
        await ask(asker, LONG, 4)
        assert asker.stats().kept_sessions == 1
        limit[0] = 0
        assert (await ask(asker, [*LONG, 1], 4)).cached_tokens == 0
        assert asker.stats().kept_sessions == 0
        await no_leaks(swarm)


async def test_a_reply_that_was_cancelled_frees_its_hops(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        limit = [4]
        asker = await swarm.asker(keep=lambda: limit[0])
        conversation: list[int] = []
        await turn(asker, conversation, LONG, 4)
        limit[0] = 0
        with trio.move_on_after(0.3):
            await ask(asker, [*conversation, 1], 1000)
        assert asker.stats().kept_sessions == 0
        await no_leaks(swarm)


async def test_the_rest_ends_with_its_time_and_with_the_asker(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        await ask(asker, LONG, 4)
        await trio.sleep(KEEP_S / 2)
        assert (await ask(asker, [*LONG, 1], 4)).cached_tokens == len(LONG)
        await trio.sleep(KEEP_S + 60)
        assert asker.stats().kept_sessions == 0
        await no_leaks(swarm)
        async with trio.open_nursery() as nursery:
            other = await swarm.asker("other", keep=4, nursery=nursery)
            await ask(other, LONG, 4)
            nursery.cancel_scope.cancel()
        await no_leaks(swarm)


async def test_a_link_with_nothing_but_kept_sessions_is_closed_and_their_cache_stays(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        await ask(asker, LONG, 4)
        await trio.sleep(200)
        assert asker._links is not None
        assert not asker._links._links
        assert not any(server._attending for server in swarm.servers.values())
        assert (await ask(asker, [*LONG, 1], 4)).cached_tokens == len(LONG)


# --- hops that die, leave or need the room ----------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["n0", "n1", "n2"])
async def test_a_conversation_whose_hop_died_meanwhile_goes_on(autojump_clock: MockClock, victim: str) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        asker = await swarm.asker(keep=4)
        conversation: list[int] = []
        await turn(asker, conversation, LONG, 10)
        others = [name for name in swarm.servers if name != victim]
        before = {name: rows_read(swarm, name) for name in others}
        span = swarm.announcements[victim].span
        assert span is not None
        await swarm.serve("spare", HashRunner(span.start, span.stop))
        swarm.kill(victim)
        stats = await turn(asker, conversation, [1, 2], 4)
        assert stats.recoveries == 0, "nobody saw a failure"
        for name in others:  # each reads only what is new: the spare gets the rest from its predecessor
            assert rows_read(swarm, name) - before[name] == 3 + 3, name


async def test_a_hop_that_left_is_not_asked_again(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        asker = await swarm.asker(keep=4)
        conversation: list[int] = []
        stats = await turn(asker, conversation, LONG, 4)
        gone = stats.route[1].peer
        assert await swarm.servers[gone].drain(1.0), "resting sessions delay nobody"
        swarm.announcements[gone] = replace(swarm.announcements[gone], state="draining")
        assert swarm.servers[gone]._sessions == {}
        begin = trio.current_time()
        assert (await turn(asker, conversation, [1], 4)).recoveries == 0
        assert trio.current_time() - begin < 2


async def test_a_hop_that_gave_blocks_back_is_used_for_those_it_still_serves(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8)) as swarm:
        asker = await swarm.asker(keep=4)
        conversation: list[int] = []
        await turn(asker, conversation, LONG, 4)
        await swarm.servers["n0"].host(HashRunner(0, 4))
        swarm.announcements["n0"] = replace(swarm.announcements["n0"], span=Span(0, 4))
        await swarm.serve("n1", HashRunner(4, 8))
        begin = trio.current_time()
        assert [hop.peer for hop in (await turn(asker, conversation, [1], 4)).route] == ["n0", "n1"]
        assert trio.current_time() - begin < 2


async def test_nobody_is_refused_because_of_a_kept_session(autojump_clock: MockClock) -> None:
    """The cache has room for one conversation: whoever asks gets it, and the others read again."""
    async with open_swarm() as swarm:
        for name, span in (("a", (0, 4)), ("b", (4, 8))):
            await swarm.serve(name, HashRunner(*span, kv_tokens=400))
        askers = [await swarm.asker(name, keep=4) for name in ("one", "two")]
        conversations: list[list[int]] = [[], []]
        for number in range(6):
            which = number % 2
            await turn(askers[which], conversations[which], LONG if number < 2 else [number], 4)
            await trio.sleep(ARRIVES_S)
            assert swarm.servers["a"].kv_free_tokens == 400
        for asker in askers:
            assert not asker.bans.active(trio.current_time()), "no hop was busy"


async def test_session_places_are_given_up_for_others(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        for name, span in (("a", (0, 4)), ("b", (4, 8))):
            limits = ServerSettings(admission=AdmissionLimits(sessions=2, peer_sessions=2, reserve=0.0))
            await swarm.serve(name, HashRunner(*span), settings=limits)
        asker = await swarm.asker(keep=4)
        for number in range(5):
            await turn(asker, [], [number, *LONG], 4)
            assert len(swarm.servers["a"]._sessions) <= 2
        # A branch of the only conversation that fits: it takes the place of the other one.
        assert not asker.bans.active(trio.current_time())


async def test_an_asker_with_many_kept_sessions_displaces_its_own(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        for name, span in (("a", (0, 4)), ("b", (4, 8))):
            await swarm.serve(name, HashRunner(*span, kv_tokens=2000))
        modest, greedy_one = await swarm.asker("modest", keep=4), await swarm.asker("greedy", keep=64)
        await ask(modest, LONG, 4)
        for number in range(20):
            await ask(greedy_one, [number, *LONG], 4)
        assert (await ask(modest, [*LONG, 1], 4)).cached_tokens == len(LONG)


async def test_a_session_that_was_cut_below_what_it_shares_disturbs_nobody(autojump_clock: MockClock) -> None:
    """A hop that lost its kept outputs has its predecessor compute them again, in pages that others share."""
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        asker = await swarm.asker(keep=4)
        first = await turn(asker, [], LONG, 4)
        async with asker.reply([*LONG[:100], 5], 20, max_tokens=20) as branch:
            async for _ in branch:
                if len(branch.stats.token_ids) == 5:
                    for session in swarm.servers["n0"]._sessions.values():
                        session.evict()
                    swarm.kill(branch.stats.route[1].peer)
        assert branch.stats.token_ids == greedy([*LONG[:100], 5], 20)
        assert branch.stats.recoveries == 1
        assert first.route[0] == branch.stats.route[0]
        assert (await turn(asker, list(LONG), [6], 4)).cached_tokens == 0  # the dead hop had read all but the question


async def come_and_go(conversations: int) -> None:
    """So many conversations of two turns, eight at a time, over hops that hold a few of them."""
    async with open_swarm() as swarm:
        for name, span in (("a", (0, 4)), ("b", (4, 8))):
            await swarm.serve(name, HashRunner(*span, kv_tokens=4000))
        askers = [await swarm.asker(f"asker{number}", keep=4) for number in range(4)]

        async def converse(asker: Asker, number: int) -> None:
            conversation: list[int] = []
            for _ in range(2):
                await turn(asker, conversation, [number, *PROMPT], 3)

        for first in range(0, conversations, 8):
            async with trio.open_nursery() as nursery:
                for number in range(first, first + 8):
                    nursery.start_soon(converse, askers[number % 4], number)
            await trio.sleep(ARRIVES_S)
            for server in swarm.servers.values():
                assert server.sessions == 0
                assert len(server._sessions) <= 4 * 4
        for asker in askers:
            assert asker.stats().kept_sessions <= 4
            assert not asker.bans.active(trio.current_time())
        await trio.sleep(KEEP_S + 60)
        await no_leaks(swarm)


async def test_conversations_come_and_go(autojump_clock: MockClock) -> None:
    await come_and_go(40)


# --- any interleaving -------------------------------------------------------------------------------------------------

turns = st.lists(
    st.tuples(st.sampled_from(["on", "again", "edit", "other"]), st.integers(1, 6), st.integers(1, 5)),
    min_size=2,
    max_size=6,
)


def converse_under(
    schedule: dict[int, tuple[Fault, int]],
    happenings: list[tuple[int, str, int]],
    turns: list[tuple[str, int, int]],
    evictions: set[int],
) -> None:
    """Turns of a conversation, other versions, edits and other prompts, while frames, hops and caches get lost."""

    async def run() -> None:
        async with meddled_swarm(schedule, keep=2) as (swarm, asker):
            said: list[int] = list(PROMPT)
            reply: list[int] = []
            for number, (what, size, count) in enumerate(turns):
                if number in evictions:
                    for server in swarm.servers.values():
                        server._end_one_resting()
                for at, event, node in happenings:
                    if at == number:
                        happen(swarm, event, f"n{node}")
                new = [5000 + 10 * number + index for index in range(size)]
                if what == "on":
                    said += [*reply, *new]
                elif what == "edit":
                    said = [*said[: len(said) // 2 + 1], *new]
                elif what == "other":
                    said = [*new, *PROMPT]
                reply = (await ask(asker, said, count)).token_ids
                assert reply == greedy(said, count), number

    trio.run(run, clock=MockClock(autojump_threshold=0))


schedules = (faults, events, turns, st.sets(st.integers(0, 5)))
test_no_schedule_changes_a_reply_that_begins_with_a_cache = settings(max_examples=25)(given(*schedules)(converse_under))


# --- a real model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.9, seed=11)])
async def test_a_conversation_has_the_tokens_of_one_process(
    autojump_clock: MockClock, tmp_path: Path, sampling: Sampling
) -> None:
    """Five turns, some begun in vain before, the last one twice, a branch, and a hop that dies between two turns."""
    model = open_source("tiny-random", tmp_path)
    local = load_local(model, local_options(model, CPU, torch.float32, 1 << 32))
    settings = ReplySettings(12, sampling)

    def expected(prompt: Sequence[int]) -> list[int]:
        reply = local.reply(prompt, settings)
        for _ in reply:
            pass
        return list(reply.writer.token_ids)

    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        swarm = SessionSwarm(fabric, nursery)
        for name, start, stop in (("a", 0, 4), ("b", 4, 8), ("c", 4, 8)):
            span = load_span(model, start, stop, SpanOptions(CPU, torch.float32, kv_bytes=1 << 21))
            await swarm.serve(name, SessionRunner(HostedSpan([span])))
        asker = await swarm.asker("asker", load_swarm_ends(model, WeightOptions(CPU, torch.float32)), keep=4)

        async def reply_to(prompt: Sequence[int]) -> ReplyStats:
            async with asker.reply(prompt, settings, max_tokens=12) as reply:
                async for _ in reply:
                    pass
            assert reply.stats.token_ids == expected(prompt)
            return reply.stats

        prompt = local.prompt_ids([{"role": "user", "content": "Tell me of shoals. " * 12}])
        for number in range(5):
            for hundredths in (3, 6, 9) if number in (1, 2, 4) else ():
                with trio.move_on_after((hundredths + number) / 100) as given_up:
                    await reply_to(prompt)
                assert given_up.cancelled_caught
            stats = await reply_to(prompt)
            assert (stats.cached_tokens > 0) == (number not in (0, 3))
            if number == 2:
                swarm.kill(stats.route[1].peer)
            prompt = [*prompt, *stats.token_ids, number + 3, number + 4]
        async with trio.open_nursery() as both:
            both.start_soon(reply_to, prompt)
            both.start_soon(reply_to, [*prompt[:70], 9])
        assert (await reply_to([*prompt, 5])).cached_tokens == len(prompt)
        await trio.sleep(2 * KEEP_S)
        swarm.servers.pop("b" if "b" not in fabric.nodes else "c")
        await no_leaks(swarm)
        nursery.cancel_scope.cancel()
