"""Owners of replies take turns: however much one asks for, the replies of another begin and go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from app.asker import fair_queue
from app.asker.asker import Asker, CutOff
from app.asker.fair_queue import EXTRA_PLACES, PLACES, READING_TOKENS, SHORT_AT_ONCE, SHORT_TOKENS, FairQueue, Turn
from app.asker.reply import ReplyStats
from app.asker.text_places import NODE_OWNER
from app.routing.route import NoRoute
from tests.app.hash_model import HashEnds, HashRunner, greedy
from tests.app.session_swarm import STEP_S, SessionSwarm, no_leaks, open_swarm

BLOCKS = 2
LONG = list(range(2500))  # ten steps of a hop
SHORT = list(range(5000, 5030))


@asynccontextmanager
async def one_hop(kv_tokens: int = 1 << 20) -> AsyncIterator[tuple[SessionSwarm, Asker]]:
    """A hop with all blocks, and an asker that guesses nothing."""
    async with open_swarm() as swarm:
        await swarm.serve("hop", HashRunner(0, BLOCKS, kv_tokens))
        yield swarm, await swarm.asker(ends=HashEnds(BLOCKS), guesser=lambda *_: None)


async def ask_as(owner: str, asker: Asker, prompt: list[int], count: int = 4) -> ReplyStats:
    async with asker.reply(prompt, count, max_tokens=count, owner=owner) as reply:
        async for _ in reply:
            pass
    assert reply.stats.token_ids == greedy(prompt, count, BLOCKS)
    return reply.stats


@pytest.mark.parametrize("crowd", [3, 12])
async def test_a_short_prompt_does_not_wait_for_the_long_ones_of_another_key(
    autojump_clock: MockClock, crowd: int
) -> None:
    """Without turns it waits for all of them: ten steps for each."""
    async with one_hop() as (swarm, asker), trio.open_nursery() as nursery:
        for number in range(crowd):
            nursery.start_soon(ask_as, "greedy", asker, [number, *LONG])
        await trio.sleep(2.5 * STEP_S)
        stats = await ask_as("modest", asker, SHORT)
        assert stats.ttft_s is not None
        assert stats.ttft_s < 8 * STEP_S
        assert swarm.servers["hop"].stats.rows < READING_TOKENS + len(LONG), "the others are still being read"
        nursery.cancel_scope.cancel()


async def test_the_prompts_of_one_key_are_read_in_their_order(autojump_clock: MockClock) -> None:
    """Side by side, each would take as long as all together."""
    async with one_hop() as (swarm, asker):
        first_tokens: list[float] = []

        async def note(number: int) -> None:
            first_tokens.append((await ask_as("greedy", asker, [number, *LONG])).ttft_s or 0.0)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(note, number)
                await wait_all_tasks_blocked()
        await no_leaks(swarm)
    steps = [seconds / STEP_S for seconds in sorted(first_tokens)]
    assert steps[0] < 20
    assert steps[3] < 75


async def test_short_prompts_of_one_key_are_read_together(autojump_clock: MockClock) -> None:
    async with one_hop() as (_, asker), trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(ask_as, "greedy", asker, [number, *SHORT])
        await wait_all_tasks_blocked()
        assert len(asker._replies) == 30
    assert trio.current_time() < 20 * STEP_S


async def test_embeddings_of_one_key_are_made_in_turn(autojump_clock: MockClock) -> None:
    async with one_hop() as (_, asker), trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(asker.hidden_states, [number, *LONG], "greedy")
        await wait_all_tasks_blocked()
        assert len(asker._queue._active) == 1
        stats = await ask_as("modest", asker, SHORT)
        assert stats.ttft_s is not None
        assert stats.ttft_s < 20 * STEP_S
        nursery.cancel_scope.cancel()


async def test_a_key_has_a_place_though_another_asks_for_hundreds_of_replies(autojump_clock: MockClock) -> None:
    async with one_hop() as (_, asker), trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(ask_as, "greedy", asker, [number, *SHORT[:3]], 40)
        await trio.sleep(5 * STEP_S)
        assert len(asker._replies) == (1 - fair_queue.RESERVE) * PLACES
        stats = await ask_as("modest", asker, SHORT)
        assert stats.ttft_s is not None
        assert stats.ttft_s < 8 * STEP_S
        nursery.cancel_scope.cancel()


async def test_room_that_becomes_free_at_a_full_hop_goes_to_the_key_that_has_none(autojump_clock: MockClock) -> None:
    """The hop's cache holds one of these replies: the next one of the same key would take the place each time."""
    async with one_hop(kv_tokens=int(1.5 * (len(SHORT) + 200))) as (_, asker), trio.open_nursery() as nursery:
        ended: list[str] = []

        async def note(owner: str, number: int, after_s: float) -> None:
            await trio.sleep(after_s)
            try:
                await ask_as(owner, asker, [number, *SHORT[1:]], 200)
                ended.append(owner)
            except NoRoute:
                ended.append(f"{owner}, refused")
            if len(ended) == 2:
                nursery.cancel_scope.cancel()

        nursery.start_soon(note, "greedy", 0, 0.0)
        nursery.start_soon(note, "modest", 1, 0.5)
        for number in range(2, 8):
            nursery.start_soon(note, "greedy", number, 0.5 + number / 2)
    assert ended == ["greedy", "modest"]


@pytest.mark.parametrize("reads", [True, False])
async def test_a_reply_that_reserves_a_whole_cache_makes_way(autojump_clock: MockClock, reads: bool) -> None:
    """It would keep all others out for as long as its client likes, also one that takes no token any more."""
    async with one_hop(kv_tokens=3000) as (swarm, asker), trio.open_nursery() as nursery:
        cut_off: list[float] = []

        async def reserve() -> None:
            with suppress(CutOff):
                async with asker.reply(SHORT, 10**6, max_tokens=2900, owner="greedy") as reply:
                    async for _ in reply:
                        await trio.sleep(0.1 if reads else 100.0)
            cut_off.append(trio.current_time())

        nursery.start_soon(reserve)
        await trio.sleep(1)
        await ask_as("modest", asker, SHORT)
        assert fair_queue.CUT_OFF_AFTER_S < trio.current_time() < fair_queue.CUT_OFF_AFTER_S + 4
        assert bool(cut_off) == reads
        await trio.sleep(100)
        assert cut_off
        await no_leaks(swarm)


async def test_this_nodes_owner_makes_way_for_nobody(autojump_clock: MockClock) -> None:
    queue, cut_off = FairQueue(), list[str]()
    async with queue.turn(NODE_OWNER, lambda: 1, 8000) as own, queue.turn("greedy", lambda: 1, 8000) as key:
        own.cut_off, key.cut_off = partial(cut_off.append, "own"), partial(cut_off.append, "key")
        for _ in range(2):
            queue.cut_off_one({"greedy", NODE_OWNER})
            await trio.sleep(fair_queue.CUT_OFF_EVERY_S)
    assert cut_off == ["key"]


@pytest.mark.parametrize(("tokens", "most"), [(600, 2), (200, 0)])
async def test_replies_are_cut_off_one_after_another_whoever_waits(
    autojump_clock: MockClock, tokens: int, most: int
) -> None:
    """Three that waited had three cut off at once; and replies of few tokens fill no hop."""
    queue, cut_off = FairQueue(), list[float]()

    async def write() -> None:
        async with queue.turn("agent", lambda: 1, tokens) as turn:
            turn.read()
            turn.cut_off = lambda: cut_off.append(trio.current_time())
            await trio.sleep_forever()

    async def wait() -> None:
        async with queue.turn("title", lambda: 1, 20) as turn:
            while True:
                turn.needs_room()
                await trio.sleep(0.2)

    with trio.move_on_after(fair_queue.CUT_OFF_AFTER_S + 1.5 * fair_queue.CUT_OFF_EVERY_S):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(write)
            await wait_all_tasks_blocked()
            for _ in range(3):
                nursery.start_soon(wait)
    assert len(cut_off) == most
    assert all(later - earlier >= fair_queue.CUT_OFF_EVERY_S for earlier, later in pairwise(cut_off))


async def test_who_has_little_room_begins_replies_though_others_need_more() -> None:
    """Else a key whose replies do not fit would keep back everybody who has one under way."""
    queue = FairQueue()
    async with queue.turn("modest", lambda: 1, 50), queue.turn("greedy", lambda: 1, 8000):
        async with queue.turn("greedy", lambda: 1, 8000) as greedy, queue.turn("modest", lambda: 1, 50) as modest:
            assert greedy.needs_room()
            assert not greedy.keeps_back("modest")
            assert modest.needs_room()
            assert modest.keeps_back("greedy")


async def test_a_reply_that_is_cancelled_while_it_waits_leaves_nothing(autojump_clock: MockClock) -> None:
    async with one_hop() as (swarm, asker):
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(ask_as, "greedy", asker, [number, *LONG])
            await trio.sleep(STEP_S)
            nursery.cancel_scope.cancel()
        assert (asker._queue._active, asker._queue._waiting) == ([], {})
        await ask_as("greedy", asker, SHORT)
        await no_leaks(swarm)


async def test_a_prompt_that_is_cached_counts_as_read() -> None:
    queue, unread = FairQueue(), 10 * READING_TOKENS
    async with queue.turn("one", lambda: unread) as first, trio.open_nursery() as nursery:
        begun = trio.Event()

        async def second() -> None:
            async with queue.turn("one", lambda: unread):
                begun.set()

        nursery.start_soon(second)
        await wait_all_tasks_blocked()
        assert not begun.is_set()
        unread = 5  # the first one's prompt is in the cache now
        first.read()
        await begun.wait()
        assert first.reading == 0


async def test_a_prompt_that_is_late_is_not_waited_for() -> None:
    queue = FairQueue()
    async with queue.turn("one", lambda: READING_TOKENS) as first, queue.turn("two", lambda: 1) as other:
        async with trio.open_nursery() as nursery:

            async def second() -> None:
                async with queue.turn("one", lambda: SHORT_TOKENS + 1):
                    pass

            nursery.start_soon(second)
            await wait_all_tasks_blocked()
            other.late()
            await wait_all_tasks_blocked()
            assert queue._waiting
            first.late()
        assert not queue._waiting


async def test_a_short_prompt_does_not_wait_for_the_long_one_of_its_own_key(autojump_clock: MockClock) -> None:
    """An agent's main conversation is read for minutes over slow hops; what else it asks meanwhile is short."""
    async with one_hop() as (swarm, asker), trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(ask_as, "agent", asker, [number, *LONG])
        await trio.sleep(2.5 * STEP_S)
        stats = await ask_as("agent", asker, SHORT)
        assert stats.ttft_s is not None
        assert stats.ttft_s < 8 * STEP_S
        assert swarm.servers["hop"].stats.rows < len(LONG), "the first long one is still being read"
        nursery.cancel_scope.cancel()


class Prompts:
    """Prompts of one key in a queue: those that have begun, in order."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.queue, self._nursery = FairQueue(), nursery
        self.begun: list[str] = []
        self.turns: dict[str, Turn] = {}

    async def ask(self, name: str, unread: int) -> None:
        self._nursery.start_soon(self._hold, name, unread)
        await wait_all_tasks_blocked()

    async def _hold(self, name: str, unread: int) -> None:
        async with self.queue.turn("one", lambda: unread) as turn:
            self.begun.append(name)
            self.turns[name] = turn
            await trio.sleep_forever()


async def test_a_few_short_prompts_pass_those_that_wait_for_a_long_one() -> None:
    async with trio.open_nursery() as nursery:
        prompts = Prompts(nursery)
        await prompts.ask("first", 10 * READING_TOKENS)
        await prompts.ask("second", SHORT_TOKENS + 1)
        for number in range(SHORT_AT_ONCE + 2):
            await prompts.ask(f"short {number}", SHORT_TOKENS)
        passed = [f"short {number}" for number in range(SHORT_AT_ONCE)]
        assert prompts.begun == ["first", *passed]
        prompts.turns["short 2"].read()
        assert prompts.begun == ["first", *passed]
        await wait_all_tasks_blocked()
        assert prompts.begun == ["first", *passed, f"short {SHORT_AT_ONCE}"]
        # Short ones that keep coming do not keep the second long one from its turn.
        prompts.turns["first"].read()
        await wait_all_tasks_blocked()
        assert set(prompts.begun[-2:]) == {"second", f"short {SHORT_AT_ONCE + 1}"}
        nursery.cancel_scope.cancel()


async def test_short_prompts_alone_are_as_many_as_ever() -> None:
    async with trio.open_nursery() as nursery:
        prompts = Prompts(nursery)
        for number in range(READING_TOKENS // SHORT_TOKENS + SHORT_AT_ONCE):
            await prompts.ask(f"short {number}", SHORT_TOKENS)
        assert len(prompts.begun) == READING_TOKENS // SHORT_TOKENS
        nursery.cancel_scope.cancel()


async def test_places_are_kept_for_those_who_come_later() -> None:
    queue = FairQueue()
    begun: list[str] = []
    async with trio.open_nursery() as nursery:

        async def stay(owner: str) -> None:
            async with queue.turn(owner, lambda: 1) as turn:
                turn.read()
                begun.append(owner)
                await trio.sleep_forever()

        for owner in ("a", "b", "c"):
            for _ in range(2 * PLACES):
                nursery.start_soon(stay, owner)
            await wait_all_tasks_blocked()
        counts = {owner: begun.count(owner) for owner in "abc"}
        assert sum(counts.values()) <= PLACES + EXTRA_PLACES
        assert counts["a"] == 0.75 * PLACES
        assert min(counts["b"], counts["c"]) >= 1
        nursery.cancel_scope.cancel()
    assert (queue._active, queue._waiting) == ([], {})


async def test_prompts_that_wait_are_looked_at_once_a_second(autojump_clock: MockClock) -> None:
    """To compare one with all caches takes milliseconds, and the queue is gone through several times a reply."""
    queue, looks = FairQueue(), [0] * 8

    async def wait(number: int) -> None:
        def unread() -> int:
            looks[number] += 1
            return 2 * READING_TOKENS

        async with queue.turn("owner", unread):
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(wait, number)
            await wait_all_tasks_blocked()
        before = looks[2:]  # behind the one that is read, and the first one that waits
        for _ in range(10):
            queue.update()
        assert looks[2:] == before
        await trio.sleep(fair_queue.LOOK_AGAIN_S)
        queue.update()
        assert looks[2:] == [times + 1 for times in before]
        nursery.cancel_scope.cancel()
