"""Replies that nobody waits for any more: what the hops have read by then is not read again, and never wrong."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from app.asker.asker import Asker
from app.asker.kept_sessions import KEEP_S
from app.asker.reply import ReplyAdapter, ReplyStats
from app.routing.route import NoRoute
from app.serving.hop_session import HopSession
from app.session.wire import EpochOrder, Kind, decode
from p2p.memory.fabric import LinkProfile, MemoryStream
from tests.app.asker.test_guesses import ScriptedGuesser, forget_revisions
from tests.app.asker.test_session_schedules import Fault, events, faults, happen, meddled_swarm
from tests.app.hash_model import AdapterShelf, HashAdapter, HashRunner, greedy
from tests.app.session_swarm import SessionSwarm, ask, no_leaks, open_swarm

THIRDS = ((0, 3), (3, 6), (6, 8))
HALVES = ((0, 4), (4, 8))
CHUNK = 256
LONG = list(range(1000, 1000 + 12 * CHUNK))
SHORT = list(range(300))
SLOW_STEP_S = 4.0  # of a chunk of a prompt, as on home machines


@pytest.fixture(autouse=True)
def too_much(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No hop that still has a session is ever asked to go on from more tokens than it has."""
    usual, wrong = HopSession.shares_with, list[tuple[int, int]]()

    def shares_with(source: HopSession, turn: EpochOrder) -> int:
        assert turn.prefix is not None
        if turn.prefix.tokens > source.length:
            wrong.append((turn.prefix.tokens, source.length))
        return usual(source, turn)

    monkeypatch.setattr(HopSession, "shares_with", shares_with)
    yield
    assert not wrong


def slow_down(swarm: SessionSwarm) -> None:
    for device in swarm.devices.values():
        device.seconds = SLOW_STEP_S


def rows_read(swarm: SessionSwarm, name: str) -> int:
    """Tokens that went through a node's blocks."""
    return sum(rows for batch in swarm.runners[name].batches for _, _, rows in batch)


async def interrupted(asker: Asker, prompt: Sequence[int], after_s: float, count: int = 200) -> None:
    """Ask, and hang up after so many seconds, without a moment's delay."""
    begin = trio.current_time()
    with trio.move_on_after(after_s) as scope:
        await ask(asker, prompt, count)
    assert scope.cancelled_caught
    assert trio.current_time() == begin + after_s


async def right(asker: Asker, prompt: Sequence[int], count: int = 5) -> ReplyStats:
    """A whole reply, which is the one of an undisturbed model."""
    stats = await ask(asker, prompt, count)
    assert stats.token_ids == greedy(prompt, count)
    assert stats.recoveries == 0
    return stats


# --- what is kept -----------------------------------------------------------------------------------------------------


async def test_a_prompt_that_is_asked_again_is_read_on_from_where_it_was(autojump_clock: MockClock) -> None:
    """The client's patience is less than the prompt takes: without what was read before, there is never an answer."""
    async with open_swarm(*THIRDS) as swarm:
        slow_down(swarm)
        asker = await swarm.asker(keep=4)
        read = [0]
        for _ in range(3):
            await interrupted(asker, LONG, 7 * SLOW_STEP_S)
            await trio.sleep(SLOW_STEP_S)
            read.append(asker.stats().kept_tokens)
        assert all(later >= earlier + CHUNK for earlier, later in pairwise(read)), read
        stats = await right(asker, LONG)
        assert stats.cached_tokens == read[-1]
        for name in swarm.servers:  # a chunk or two of each attempt are not known to be cached everywhere
            assert rows_read(swarm, name) <= len(LONG) + 5 + 3 * 4 * CHUNK
        assert not asker.bans.active(trio.current_time())


async def test_whoever_hangs_up_in_the_middle_of_a_reply_goes_on_from_there(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        async with asker.reply(SHORT, 200, max_tokens=200) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 7:
                    break
        said = [*SHORT, *reply.stats.token_ids]
        assert said == [*SHORT, *greedy(SHORT, 7)]
        stats = await right(asker, [*said, 1, 2])
        assert stats.cached_tokens >= len(said) - 1
        await trio.sleep(2 * KEEP_S)
        await no_leaks(swarm)


async def test_a_source_of_pieces_that_is_closed_goes_on_from_there(autojump_clock: MockClock) -> None:
    """As the API closes it."""
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)

        async def pieces() -> AsyncGenerator[int, None]:
            async with asker.reply(SHORT, 200, max_tokens=200) as reply:
                async for piece in reply:
                    yield piece.token_id

        said = list(SHORT)
        async with aclosing(pieces()) as source:
            async for token_id in source:
                said.append(token_id)
                if len(said) == len(SHORT) + 3:
                    break
        assert (await right(asker, [*said, 1])).cached_tokens >= len(said) - 1


async def test_no_moment_to_hang_up_costs_what_was_kept_before(autojump_clock: MockClock) -> None:
    """All through the first steps: before any order, between the orders to the hops, while rows are under way."""
    async with open_swarm(*THIRDS) as swarm:
        asker = await swarm.asker(keep=4)
        said = [*SHORT, *(await right(asker, SHORT)).token_ids]
        for milliseconds in range(0, 120, 3):
            said.append(milliseconds)
            await interrupted(asker, said, milliseconds / 1000)
            stats = await right(asker, said, 2)
            assert stats.cached_tokens >= len(said) - 2, milliseconds
            said += stats.token_ids
        assert asker.stats().kept_sessions == 1
        assert not asker.bans.active(trio.current_time())
        await trio.sleep(2 * KEEP_S)
        await no_leaks(swarm)


async def test_a_reply_that_never_had_its_turn_leaves_what_was_kept(autojump_clock: MockClock) -> None:
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        await right(asker, SHORT)
        (before,) = asker._kept
        async with asker.reply([*SHORT, 1], 5, max_tokens=5):
            assert not list(asker._kept), "it is to take over what was kept"
        assert list(asker._kept) == [before]
        assert (await right(asker, [*SHORT, 1])).cached_tokens == len(SHORT)


async def test_what_rests_is_free_room_for_others(autojump_clock: MockClock) -> None:
    """The hops' caches hold one of these prompts."""
    async with open_swarm() as swarm:
        for number, span in enumerate(HALVES):
            await swarm.serve(f"n{number}", HashRunner(*span, kv_tokens=len(LONG) + 300))
        slow_down(swarm)
        one, other = await swarm.asker("one", keep=4), await swarm.asker("other", keep=4)
        await interrupted(one, LONG, 5 * SLOW_STEP_S)
        await trio.sleep(SLOW_STEP_S)
        assert one.stats().kept_tokens > 0
        assert all(server.kv_free_tokens == server.kv_total_tokens for server in swarm.servers.values())
        await right(other, [7, *LONG])
        assert (await right(one, LONG)).cached_tokens == 0, "the other one needed the room"
        for asker in (one, other):
            assert not asker.bans.active(trio.current_time())


async def test_hanging_up_waits_for_no_hop(autojump_clock: MockClock) -> None:
    """One hop takes nothing from its stream any more, and so does not hear that the session rests."""
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        slow_down(swarm)
        swarm.fabric.set_link("asker", "n0", LinkProfile(bytes_per_s=500))
        swarm.fabric.freeze("n1")
        await interrupted(asker, LONG, 1.5)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_reply_that_fails_leaves_nothing_that_may_be_why(autojump_clock: MockClock, has_begun: bool) -> None:
    """But what was kept before, if the hops have not heard of it."""
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        await right(asker, SHORT)
        prompt = [*SHORT, 1]
        if not has_begun:
            swarm.kill("n1")

        async def ask_in_vain() -> None:
            async with asker.reply(prompt, 5, max_tokens=5) as reply:
                async for _ in reply:
                    swarm.kill("n1")

        with pytest.raises(NoRoute):
            await ask_in_vain()
        assert asker.stats().kept_sessions == (0 if has_begun else 1)
        await swarm.serve("spare", HashRunner(4, 8))
        del swarm.announcements["n1"], swarm.servers["n1"]
        await right(asker, prompt)


async def test_a_conversation_that_goes_on_elsewhere_takes_no_place_of_its_own(autojump_clock: MockClock) -> None:
    """A branch that is given up at once has nothing that the other session has not."""
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        await right(asker, SHORT)
        await interrupted(asker, [*SHORT[:100], 1], 0.001)
        assert asker.stats().kept_sessions == 1
        assert (await right(asker, [*SHORT, 1])).cached_tokens == len(SHORT)


async def test_the_cache_of_an_adapter_is_for_that_adapter_alone(autojump_clock: MockClock) -> None:
    pond = HashAdapter(1)
    offered = ReplyAdapter("pond", pond.ref)
    async with open_swarm() as swarm:
        await swarm.serve("n0", HashRunner(0, 8), adapters=AdapterShelf(pond))
        slow_down(swarm)
        asker = await swarm.asker(keep=4)

        async def with_pond(count: int) -> ReplyStats:
            async with asker.reply(LONG, count, max_tokens=count, adapter=offered) as reply:
                async for _ in reply:
                    pass
            return reply.stats

        with trio.move_on_after(8 * SLOW_STEP_S):
            await with_pond(5)
        read = asker.stats().kept_tokens
        assert read >= 4 * CHUNK
        assert (await right(asker, LONG)).cached_tokens == 0
        stats = await with_pond(5)
        assert stats.token_ids == greedy(LONG, 5, adapter=pond)
        assert stats.cached_tokens == read


async def test_hops_of_an_unfinished_prompt_are_known_to_have_computed_it(autojump_clock: MockClock) -> None:
    """A peer that is caught at wrong results later must not have read the beginning of a prompt."""
    async with open_swarm(*HALVES) as swarm:
        slow_down(swarm)
        asker = await swarm.asker(keep=4)
        await interrupted(asker, LONG, 6 * SLOW_STEP_S)
        (kept,) = asker._kept
        assert kept.route in kept.routes
        assert {hop.peer for route in kept.routes for hop in route} == {"n0", "n1"}


# --- hops that have less than was thought, or are in trouble ----------------------------------------------------------


@pytest.mark.parametrize("names", [("n0",), ("n1",), ("n2",), ("n0", "n2"), ("n0", "n1", "n2")])
async def test_hops_that_have_ended_it_meanwhile_read_again_without_blame(
    autojump_clock: MockClock, names: Sequence[str]
) -> None:
    async with open_swarm(*THIRDS) as swarm:
        slow_down(swarm)
        asker = await swarm.asker(keep=4)
        await interrupted(asker, LONG, 6 * SLOW_STEP_S)
        await trio.sleep(SLOW_STEP_S)
        for name in names:
            assert swarm.servers[name]._end_one_resting()
        await right(asker, LONG)
        assert not asker.bans.active(trio.current_time())
        assert all(asker.planner.book.standing(peer).score == 1.0 for peer in swarm.servers)


@pytest.mark.parametrize("victim", ["n0", "n1", "n2"])
async def test_hops_that_live_need_not_read_again_what_one_that_died_has_read(
    autojump_clock: MockClock, victim: str
) -> None:
    """Whoever asked hangs up while the session waits for another hop, which comes later."""
    async with open_swarm(*THIRDS) as swarm:
        slow_down(swarm)
        asker = await swarm.asker(keep=4)
        with trio.move_on_after(8 * SLOW_STEP_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, asker, LONG, 5)
                await trio.sleep(6 * SLOW_STEP_S)
                swarm.kill(victim)
        await trio.sleep(SLOW_STEP_S)
        read = asker.stats().kept_tokens
        assert read >= CHUNK
        others = [name for name in swarm.servers if name != victim]
        before = {name: rows_read(swarm, name) for name in others}
        span = swarm.announcements[victim].span
        assert span is not None
        del swarm.announcements[victim], swarm.servers[victim]
        await swarm.serve("spare", HashRunner(span.start, span.stop))
        await right(asker, LONG)
        for name in others:
            assert rows_read(swarm, name) - before[name] <= len(LONG) + 4 - read, name
        assert asker.bans.active(trio.current_time()).keys() <= {victim}


async def test_a_hop_at_fault_keeps_nothing(autojump_clock: MockClock) -> None:
    """It sends numbers that are not finite: what it has cached may be why."""
    async with open_swarm(*HALVES) as swarm:
        asker = await swarm.asker(keep=4)
        await right(asker, SHORT)
        runner = swarm.runners["n1"]
        usual = runner._advance
        runner._advance = lambda item: (made := usual(item))._replace(data=b"\xff" * len(made.data))
        with trio.move_on_after(2.0):
            await ask(asker, [*SHORT, 1], 5)
        await trio.sleep(0.1)
        assert not swarm.servers["n1"]._sessions
        assert len(swarm.servers["n0"]._sessions) == 1
        runner._advance = usual
        await trio.sleep(120)  # it is used again
        stats = await ask(asker, [*SHORT, 1], 5)
        assert stats.token_ids == greedy([*SHORT, 1], 5)


async def test_a_hop_that_does_not_say_how_far_it_is_is_not_taken_at_more(autojump_clock: MockClock) -> None:
    """What is kept is what the hops said, not what they were sent."""
    async with open_swarm(*HALVES) as swarm:
        slow_down(swarm)
        asker = await swarm.asker(keep=4)
        usual = MemoryStream.send

        async def without_states(stream: MemoryStream, message: bytes, *more: object) -> None:
            is_state = isinstance(message, tuple) and decode(b"".join(message)).kind == Kind.STATE
            if not is_state:
                await usual(stream, message, *more)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryStream, "send", without_states)
            await interrupted(asker, LONG, 1.2)
        assert asker.stats().kept_sessions == 0


# --- any interleaving -------------------------------------------------------------------------------------------------

Turn = tuple[int, int, list[float]]  # new tokens, tokens of the reply, and after how long who asked hung up before
turns = st.lists(
    st.tuples(
        st.integers(1, 300),
        st.integers(1, 5),
        st.lists(st.one_of(st.floats(0, 0.1), st.floats(0, 3)), max_size=3),
    ),
    min_size=1,
    max_size=4,
)


def hang_up(turns: list[Turn]) -> None:
    """Nobody is blamed, nothing that was cached is read again, and nothing is left behind."""

    async def run() -> None:
        async with open_swarm(*THIRDS) as swarm:
            asker = await swarm.asker(keep=2)
            said, known = list(SHORT[:40]), 0
            for number, (size, count, patience) in enumerate(turns):
                said += [10_000 * number + index for index in range(size)]
                for after_s in patience:
                    with trio.move_on_after(after_s):
                        await ask(asker, said, 50)
                stats = await right(asker, said, count)
                assert stats.cached_tokens >= known
                said += stats.token_ids
                known = len(said) - 1
            assert not asker.bans.active(trio.current_time())
            await trio.sleep(2 * KEEP_S)
            await no_leaks(swarm)

    trio.run(run, clock=MockClock(autojump_threshold=0))


def hang_up_under(
    schedule: dict[int, tuple[Fault, int]], happenings: list[tuple[int, str, int]], turns: list[Turn]
) -> None:
    """The same while frames get lost and hops die, freeze and leave."""

    async def run() -> None:
        async with meddled_swarm(schedule, keep=2) as (swarm, asker):
            said = list(SHORT[:40])
            for number, (size, count, patience) in enumerate(turns):
                said += [10_000 * number + index for index in range(size)]
                for at, event, node in happenings:
                    if at == number:
                        happen(swarm, event, f"n{node}")
                for after_s in patience:
                    with trio.move_on_after(after_s):
                        await ask(asker, said, 50)
                stats = await ask(asker, said, count)
                assert stats.token_ids == greedy(said, count), number
                said += stats.token_ids

    trio.run(run, clock=MockClock(autojump_threshold=0))


guesses = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12)  # right and wrong ones, by round
WRONG = [7_000_000 + number for number in range(4)]  # as `ScriptedGuesser` makes them


def hang_up_on_guesses(turns: list[tuple[float, int]], script: list[tuple[int, int]], old: bool) -> None:
    """The next prompt may well be what was guessed in vain: hops had cached these tokens, and others instead."""

    async def run() -> None:
        async with open_swarm(*THIRDS) as swarm:
            if old:
                forget_revisions(swarm, "n1")
            asker = await swarm.asker(
                keep=2, guesser=lambda prompt, history: ScriptedGuesser(script, greedy(prompt, 60))
            )
            said = list(SHORT[:40])
            for after_s, wrong in turns:
                written: list[int] = []
                with trio.move_on_after(after_s):
                    async with asker.reply(said, 50, max_tokens=50) as reply:
                        async for piece in reply:
                            written.append(piece.token_id)
                assert written == greedy(said, 50)[: len(written)]
                was_read = len(said) if written else 0
                said += [*written, *WRONG[:wrong]]
                stats = await right(asker, said, 3)
                assert stats.cached_tokens >= was_read
                said += [*stats.token_ids, 8]
            assert not asker.bans.active(trio.current_time())

    trio.run(run, clock=MockClock(autojump_threshold=0))


impatient = st.lists(st.tuples(st.floats(0.05, 0.5), st.integers(0, 4)), min_size=1, max_size=4)
test_no_guess_in_vain_becomes_part_of_a_prompt = settings(max_examples=12)(
    given(impatient, guesses, st.booleans())(hang_up_on_guesses)
)
moments, disturbed_moments = (turns,), (faults, events, turns)
test_no_moments_to_hang_up_change_a_reply = settings(max_examples=12)(given(*moments)(hang_up))
test_no_moments_and_no_schedule_change_a_reply = settings(max_examples=12)(given(*disturbed_moments)(hang_up_under))
