"""Replies with guesses over a swarm: the same tokens as without, whatever is guessed and whoever dies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from app.asker.guessing import Proposal
from app.serving.batching import BatchLimits
from app.serving.block_server import ServerSettings, control_frame
from app.session.wire import Kind, decode
from tests.app.asker.test_session_schedules import Fault, Meddler, events, faults, happen
from tests.app.asker.test_survival import PAIRS, prefer_first_three
from tests.app.hash_model import HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, bar, no_leaks, open_swarm

TOKENS = 12
REPLY = greedy(PROMPT, 40)


class ScriptedGuesser:
    """Knows the reply, and guesses so many tokens right and so many wrong, as a script says for each round."""

    def __init__(self, script: Sequence[tuple[int, int]], reply: Sequence[int] = REPLY) -> None:
        self._script, self._reply = list(script), list(reply)
        self.drawn: list[int] = []
        self.third_round = trio.Event()
        self.rounds: list[tuple[tuple[int, ...], int]] = []  # the guesses that were answered, and how many were right

    def propose(self, room: int, *, can_draft: bool = False) -> Proposal:
        right, wrong = self._script.pop(0) if self._script else (0, 0)
        at = len(self.drawn)
        return Proposal((*self._reply[at : at + right], *(7_000_000 + n for n in range(wrong)))[: max(room, 0)])

    def note(
        self, guesses: Sequence[int], drawn: Sequence[int], seconds: float | None, draft_s: float | None = None
    ) -> None:
        self.drawn += drawn
        self.rounds.append((tuple(guesses), len(drawn) - 1))
        if len(self.rounds) == 3:
            self.third_round.set()


def scripted(*script: tuple[int, int]) -> tuple[ScriptedGuesser, Any]:
    guesser = ScriptedGuesser(script)
    return guesser, lambda prompt_ids, history: guesser


async def test_right_guesses_save_trips_and_wrong_ones_are_cut_without_one(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8), delay_s=0.05) as swarm:
        plain = await ask(await swarm.asker("other", guesser=lambda prompt, history: None), PROMPT, TOKENS)
        guesser, made = scripted((4, 0), (0, 3), (2, 2), (0, 0))
        guessed = await ask(await swarm.asker(guesser=made), PROMPT, TOKENS)
        assert guessed.token_ids == plain.token_ids == REPLY[:TOKENS]
        assert [right for _, right in guesser.rounds] == [0, 4, 0, 2, 0, 0]
        assert (guessed.guessed_tokens, guessed.accepted_tokens) == (11, 6)
        assert guessed.recoveries == 0
        # Five further rounds instead of eleven, and no trip for the two cuts.
        assert plain.tokens_per_s is not None
        assert guessed.tokens_per_s is not None
        assert guessed.tokens_per_s == pytest.approx(plain.tokens_per_s * 11 / 5, rel=0.01)
        await no_leaks(swarm)


@pytest.mark.parametrize("count", range(1, 8))
async def test_a_reply_ends_in_the_middle_of_right_guesses(autojump_clock: MockClock, count: int) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        _, made = scripted(*[(6, 0)] * 3)
        stats = await ask(await swarm.asker(guesser=made), PROMPT, count)
        assert stats.token_ids == REPLY[:count]
        assert stats.finish_reason == "length"
        await no_leaks(swarm)


async def test_a_hop_that_knows_no_revisions_gets_no_guesses(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        forget_revisions(swarm, "n1")
        _, made = scripted(*[(2, 2)] * 9)
        stats = await ask(await swarm.asker(guesser=made), PROMPT, TOKENS)
        assert stats.token_ids == REPLY[:TOKENS]
        assert stats.guessed_tokens == 0
        await no_leaks(swarm)


def forget_revisions(swarm: SessionSwarm, name: str) -> None:
    """Let a node answer as one that was built before revisions were known."""
    server = swarm.servers[name]

    class OldOutbox:
        def __init__(self, outbox: Any) -> None:
            self._outbox = outbox

        def __getattr__(self, field: str) -> Any:
            return getattr(self._outbox, field)

        async def push(self, frame: Any) -> Any:
            message = b"".join(frame.parts)
            if decode(message).kind == Kind.READY:
                frame = control_frame(message[:32] + bytes(4) + message[36:])
            return await self._outbox.push(frame)

    turn: Any = server._on_turn

    async def on_turn(frame: Any, order: Any, peer: str, answers: Any) -> None:
        await turn(frame, order, peer, OldOutbox(answers))

    server._on_turn = on_turn  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("victim", ["n0", "n1", "n2"])
async def test_a_hop_dies_with_guesses_under_way(autojump_clock: MockClock, victim: str) -> None:
    async with open_swarm(*PAIRS, delay_s=0.02) as swarm:
        prefer_first_three(swarm)
        guesser, made = scripted(*[(2, 2)] * 9)
        asker = await swarm.asker(guesser=made)

        async def kill_during_a_round() -> None:
            await guesser.third_round.wait()
            await trio.sleep(0.03)
            swarm.kill(victim)

        swarm.nursery.start_soon(kill_during_a_round)
        stats = await ask(asker, PROMPT, TOKENS)
        assert stats.token_ids == REPLY[:TOKENS]
        assert stats.recoveries == 1
        await no_leaks(swarm)


async def test_guesses_pass_through_the_asker_where_hops_cannot_reach_each_other(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        bar(swarm.fabric.nodes["n0"], "n1")
        bar(swarm.fabric.nodes["n1"], "n2")
        _, made = scripted(*[(1, 2), (3, 0)] * 4)
        stats = await ask(await swarm.asker(guesser=made), PROMPT, TOKENS)
        assert stats.token_ids == REPLY[:TOKENS]
        assert stats.accepted_tokens >= 6
        await no_leaks(swarm)


async def test_guesses_that_a_hop_splits_into_several_steps_are_put_together(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        limits = ServerSettings(BatchLimits(urgent_rows=2))
        for name, span in (("n0", (0, 4)), ("n1", (4, 8))):
            await swarm.serve(name, HashRunner(*span), settings=limits)
        _, made = scripted(*[(3, 2), (5, 0)] * 4)
        stats = await ask(await swarm.asker(guesser=made), PROMPT, TOKENS)
        assert stats.token_ids == REPLY[:TOKENS]
        assert stats.recoveries == 0
        await no_leaks(swarm)


async def test_a_reply_that_is_cancelled_with_guesses_under_way_frees_its_hops(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8), delay_s=0.1) as swarm:
        _, made = scripted(*[(1, 3)] * 9)
        asker = await swarm.asker(guesser=made)
        with trio.move_on_after(1.3):
            await ask(asker, PROMPT, 30)
        await no_leaks(swarm)


async def test_many_replies_with_and_without_guesses_share_the_hops(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        prompts = [[*PROMPT, n] for n in range(6)]
        done = []

        async def one(n: int) -> None:
            right = greedy(prompts[n], 20)
            guesser = ScriptedGuesser([(n, 3)] * 20 if n % 2 else [], right)
            asker = await swarm.asker(f"asker{n}", guesser=lambda prompt, history: guesser)
            done.append((await ask(asker, prompts[n], 20)).token_ids == right)

        async with trio.open_nursery() as nursery:
            for n in range(6):
                nursery.start_soon(one, n)
        assert done == [True] * 6
        await no_leaks(swarm)


scripts = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=TOKENS)


@settings(max_examples=25)
@given(scripts, faults, events)
def test_no_interleaving_of_guesses_cuts_and_deaths_changes_a_reply(
    script: list[tuple[int, int]], schedule: dict[int, tuple[Fault, int]], happenings: list[tuple[int, str, int]]
) -> None:
    async def run() -> list[int]:
        async with open_swarm(*PAIRS) as swarm:
            _, made = scripted(*script)
            asker = await swarm.asker(guesser=made)
            meddler = Meddler(schedule)
            for node in swarm.fabric.nodes.values():
                meddler.stand_between(node)
            with trio.fail_after(300):
                async with asker.reply(PROMPT, TOKENS, max_tokens=TOKENS) as reply:
                    count = 0
                    async for _ in reply:
                        count += 1
                        for at, what, number in happenings:
                            if at == count:
                                happen(swarm, what, f"n{number}")
            await trio.sleep(60)
            for node in swarm.fabric.nodes.values():
                if node.frozen:
                    swarm.fabric.resume(node.peer_id)
            await no_leaks(swarm)
            return reply.stats.token_ids

    assert trio.run(run, clock=MockClock(autojump_threshold=0)) == REPLY[:TOKENS]


class HashDraft:
    """A draft model of the model of hashes: it knows the reply, and is wrong at every `wrong_at`-th token."""

    def __init__(self, wrong_at: int = 5) -> None:
        self._wrong_at = wrong_at
        self.open = 0
        self.read_tokens = self.guessed = 0

    def begin(self, tokens: int, settings: Any) -> HashDraft:
        self.open += 1
        return self

    def read(self, tokens: Sequence[int]) -> bool:
        self.read_tokens += 16
        return self.read_tokens >= len(tokens)

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        self.guessed += count
        at = len(tokens) - len(PROMPT)
        return [REPLY[at + n] if (at + n) % self._wrong_at else 7 for n in range(count)]

    def close(self) -> None:
        self.open -= 1


async def test_a_draft_model_saves_trips_where_the_text_does_not_repeat(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8), delay_s=0.05) as swarm:
        model = HashDraft()
        stats = await ask(await swarm.asker(draft=lambda: model), PROMPT, 40)
        assert stats.token_ids == REPLY
        assert stats.accepted_tokens > 20
        assert model.read_tokens >= len(PROMPT)
        await no_leaks(swarm)
        assert model.open == 0


async def test_a_draft_model_without_room_or_that_is_never_right_costs_little(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8), delay_s=0.05) as swarm:

        class Full(HashDraft):
            def begin(self, tokens: int, settings: Any) -> Any:
                return None

        stats = await ask(await swarm.asker("one", draft=lambda: Full()), PROMPT, 40)
        assert (stats.token_ids, stats.guessed_tokens) == (REPLY, 0)
        wrong = HashDraft(wrong_at=1)
        stats = await ask(await swarm.asker("two", draft=lambda: wrong), PROMPT, 40)
        assert stats.token_ids == REPLY
        assert stats.guessed_tokens < 40
        assert stats.accepted_tokens == 0
        await no_leaks(swarm)


async def test_a_cancelled_reply_ends_its_draft(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8), delay_s=0.1) as swarm:
        model = HashDraft()
        asker = await swarm.asker(draft=lambda: model)
        for patience_s in (0.1, 0.4, 0.9):
            with trio.move_on_after(patience_s):
                await ask(asker, PROMPT, 30)
            await trio.sleep(1)
            assert model.open == 0
        await no_leaks(swarm)


@pytest.mark.parametrize("fails_in", ["begin", "read", "guess"])
async def test_a_draft_model_that_fails_costs_nothing_but_its_guesses(autojump_clock: MockClock, fails_in: str) -> None:
    async with open_swarm((0, 4), (4, 8), delay_s=0.05) as swarm:
        model = HashDraft()

        def fail(*arguments: Any) -> Any:
            raise RuntimeError("out of memory")

        setattr(model, fails_in, fail)
        asker = await swarm.asker(draft=lambda: model)
        stats = await ask(asker, PROMPT, 40)
        assert (stats.token_ids, stats.guessed_tokens) == (REPLY, 0)
        await no_leaks(swarm)
        assert model.open == 0
        assert (await ask(asker, PROMPT, 10)).token_ids == REPLY[:10]  # the asker goes on
