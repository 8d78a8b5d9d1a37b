"""Islands that fail in every round, whose links become slow, and many unlike ones that come and go; the long forms are
in `tests/soak/test_rounds.py`."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
from trio.testing import MockClock

from app.rounds.decisions import MOST_REST
from app.rounds.statements import MAX_MEMBERS, RESULT, MemberList
from engine.config import ModelConfig, Rope
from engine.errors import TrainingError
from p2p.memory.fabric import LinkProfile
from tests.app.rounds.island_swarm import UNHURRIED, IslandSwarm, Lesson, members_of, open_islands, plain_lesson

MEMBERS = 4
WIDE = ModelConfig(  # as many weights as the bench's model, and quick steps
    family="llama", n_blocks=1, hidden_size=16, n_heads=1, n_kv_heads=1, head_dim=16, intermediate_size=16,
    vocab_size=10_000, context_length=64, norm_eps=1e-5, rope=Rope(), tied_embeddings=True,
)  # fmt: skip
MiB = 2**20


# --- a failure in each round ------------------------------------------------------------------------------------------


async def test_a_member_fails_in_each_of_eight_rounds(tmp_path: Path, patient_clock: MockClock) -> None:
    await check_failures(tmp_path, rounds=8, restart_every=4)


@pytest.mark.soak
async def test_a_member_of_a_grid_fails_in_each_of_twenty_rounds(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.island.LEAF", 256)
    await check_failures(tmp_path, rounds=20, restart_every=5, members=9, grid=True)


async def check_failures(
    folder: Path, *, rounds: int, restart_every: int, members: int = MEMBERS, **changes: Any
) -> None:
    """In every round another member cannot merge, or does not say how the round ended; some are killed besides."""
    last = members - 1
    async with open_islands(folder, *range(members), steps=5 * rounds, **changes) as swarm:
        for number in range(members):
            let_fail(swarm, number, members)
        islands = [swarm.nodes[number].island for number in range(last)]
        sizes: list[tuple[int, int, int]] = []
        for goal in range(restart_every, rounds, restart_every):
            await swarm.until(lambda goal=goal: islands[0].standing.round >= goal, within_s=3000)  # type: ignore[misc]
            swarm.kill(last)
            swarm.add(last, has_model=False)
            let_fail(swarm, last, members)
            gc.collect()
            kept = sum(bytes_in(vars(island), skip=("log", "standing", "record")) for island in islands)
            sizes.append((tasks(), kept, psutil.Process().memory_info().rss))
        await swarm.finished(*range(members), within_s=3000)
        log = islands[0].log
        assert sum(island.figures.repeated for island in islands) >= rounds // 2
        assert members_of(log)[1:].count(members) <= rounds // 2  # most rounds were made without the one that failed
        assert all(len(entry.list.members) >= 2 for entry in log[1:])
        (first_tasks, first_kept, first_rss), (last_tasks, last_kept, last_rss) = sizes[len(sizes) // 4], sizes[-1]
        assert last_tasks <= first_tasks + 4 * members, sizes
        assert last_kept <= 2 * first_kept + MiB // 4, sizes
        assert last_rss <= first_rss + 20 * MiB + 200 * 1024 * rounds, sizes  # the log of each island grows


async def test_who_fails_every_exchange_costs_few_rounds_and_comes_back(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    await check_broken_member(tmp_path, rounds=8, most=3)


async def check_broken_member(folder: Path, *, rounds: int, most: int) -> None:
    """One of the islands cannot merge for some rounds, and fails in a few of them only; then it takes part again."""
    async with open_islands(folder, *range(MEMBERS), steps=5 * (rounds + MOST_REST + 8)) as swarm:
        broken: Any = swarm.nodes[MEMBERS - 1]
        merge, exchanged = broken.model.merge, swarm.nodes[0].island._exchanged
        tried: set[int] = set()

        def failing(*args: Any) -> Any:
            raise TrainingError("the device is out of order")

        async def noted(members: MemberList, deadline: float) -> Any:
            tried.update({members.round} if broken.name in members.members else ())
            return await exchanged(members, deadline)

        broken.model.merge = failing
        swarm.nodes[0].island._exchanged = noted  # type: ignore[method-assign]
        island = swarm.nodes[0].island
        await swarm.until(lambda: island.standing.round >= rounds, within_s=3000)
        assert 3 <= len(tried) <= most, tried
        assert members_of(island.log)[-1] == MEMBERS - 1  # the others lose nothing
        await swarm.until(lambda: "until round" in broken.island.figures.waiting)
        assert "exchanges in a row" in island.resting[broken.name]
        broken.model.merge = merge
        await swarm.until(lambda: broken.name in island.log[-1].list.members, within_s=3000)
        before = island.standing.round
        assert before <= rounds + MOST_REST + 1
        await swarm.until(lambda: island.standing.round >= before + 2, within_s=3000)
        assert members_of(island.log)[before:] == [MEMBERS] * len(island.log[before:])


def let_fail(swarm: IslandSwarm, number: int, members: int) -> None:
    """Let an island fail whenever it is its turn: it cannot merge, or keeps its result to itself."""
    node = swarm.nodes[number]
    model: Any = node.model
    merge, say = model.merge, node.island._say

    def is_due(way: int) -> bool:
        turn, at = divmod(node.island.standing.round, members)
        return at == number and turn % 2 == way and len(node.island.standing.members) > 1

    def failing(*args: Any) -> Any:
        if is_due(0):
            raise TrainingError("the device is out of order")
        return merge(*args)

    async def silent(peer: str, raw: bytes) -> None:
        if not (is_due(1) and RESULT.encode() in raw[:40]):
            await say(peer, raw)

    model.merge = failing
    node.island._say = silent  # type: ignore[method-assign]


def tasks() -> int:
    """Number of all tasks of this run."""

    def below(task: trio.lowlevel.Task) -> int:
        return 1 + sum(below(child) for nursery in task.child_nurseries for child in nursery.child_tasks)

    root = trio.lowlevel.current_root_task()
    assert root is not None
    return below(root)


def bytes_in(value: Any, skip: Iterable[str] = (), seen: set[int] | None = None) -> int:
    """Bytes of all byte strings that our own objects and containers hold."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, Mapping):
        return sum(bytes_in(each, (), seen) for name, each in value.items() if name not in skip)
    if isinstance(value, list | tuple | set | frozenset):
        return sum(bytes_in(each, (), seen) for each in value)
    if type(value).__module__.startswith("app.rounds"):
        return bytes_in(vars(value), skip, seen)
    return 0


# --- links that become slow -------------------------------------------------------------------------------------------


@pytest.mark.soak
async def test_after_a_link_became_slow_most_of_the_time_is_steps_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """With as many weights as the bench's model, so that members merge shares of equal size."""
    lesson = plain_lesson(WIDE)
    await check_slower_link(tmp_path, lesson, fast=12.5e6, slow=1.25e6, step_s=0.01, steps=480, rate=1e-3, batch=2)


async def check_slower_link(
    folder: Path, lesson: Lesson, *, fast: float, slow: float, step_s: float, steps: int, **changes: Any
) -> float:
    """Links of three islands become ten times slower after a quarter of the steps; return the loss at the end."""
    bounds = {"every": 50, "least_every": 50, "most_every": 500, "steps": steps, "wire": "auto"}
    profile = LinkProfile(delay_s=0.002, bytes_per_s=fast)
    async with open_islands(
        folder, 0, 1, 2, lesson=lesson, profile=profile, step_s=step_s, **{**bounds, **changes}
    ) as swarm:
        islands = [node.island for node in swarm.nodes.values()]
        shares: dict[int, list[float | None]] = {}

        def note(is_over: Callable[[], bool]) -> bool:
            for island in islands:
                shares.setdefault(island.standing.round, []).append(island.figures.utilisation)
            return is_over()

        await swarm.until(lambda: note(lambda: islands[0].standing.step >= steps // 4))
        for first in swarm.nodes.values():
            for second in swarm.nodes.values():
                if first is not second:
                    swarm.fabric.set_link(first.name, second.name, LinkProfile(delay_s=0.002, bytes_per_s=slow))
        cut = islands[0].standing.round  # the round that is under way
        await swarm.until(lambda: note(lambda: all(island.is_finished for island in islands)))
        swarm.agree(0, 1, 2)
        if "most_every" not in changes:
            # shares[n] are those of the round before n; the last round may be too short to matter
            after = [share for number in range(cut + 3, islands[0].standing.round) for share in shares.get(number, [])]
            assert after, shares
            # 0.9 is aimed at; where a change is tested, members fetch it whole over the slow link: 0.894 was seen
            assert all(share is not None and share >= 0.88 for share in after), shares
        return islands[0].figures.validation[-1][1]


async def test_over_20_mbit_and_50_ms_short_rounds_leave_most_of_the_time_to_steps(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """The bench's `utilisation_20mbit` without the machine's noise: only steps and links take time here.

    Ten steps take as long as the bench's fifty.
    """
    lesson = plain_lesson(WIDE)
    profile = LinkProfile(delay_s=0.025, bytes_per_s=2.5e6)
    bounds: dict[str, Any] = {"every": 10, "least_every": 10, "most_every": 100, "steps": 80, "batch": 1}
    async with open_islands(
        tmp_path, 0, 1, lesson=lesson, profile=profile, step_s=0.35, wire="auto", **bounds
    ) as swarm:
        islands = [node.island for node in swarm.nodes.values()]
        seen: dict[int, list[tuple[int, float | None]]] = {}

        def note() -> bool:
            for island in islands:
                figures = island.figures
                seen.setdefault(figures.measured_round, []).append((island.standing.every, figures.utilisation))
            return all(island.is_finished for island in islands)

        await swarm.until(note)
        log = islands[0].log
        # from the third round of both on; the last round may be of few steps
        shares = [share for number in range(3, len(log) - 1) for _, share in seen[number]]
        assert shares
        assert all(share is not None and share >= 0.9 for share in shares), seen
        assert all(every <= 15 for number in range(3, len(log) - 2) for every, _ in seen[number]), seen
        assert {entry.codec for entry in log[2:]} == {"int8"}  # float32 would take longer rounds


# --- many unlike islands ----------------------------------------------------------------------------------------------


async def test_unlike_islands_come_and_go_for_minutes(tmp_path: Path, patient_clock: MockClock) -> None:
    await check_churn(tmp_path, islands=5, seconds=150, churn_s=50)


def doubts(swarm: IslandSwarm) -> str:
    """Who was doubted and left out in the latest rounds, and why."""
    longest = max((node.island.log for node in swarm.nodes.values()), key=len)
    return "; ".join(f"round {entry.round}: {entry.doubted}, left out {entry.left_out}" for entry in longest[-4:])


async def check_churn(folder: Path, *, islands: int, seconds: float, churn_s: float) -> str:
    """Of islands that differ tenfold in speed, some die and come back all the time; most tokens are counted."""
    rng = random.Random(islands)
    speeds = [0.4 * 10 ** rng.random() for _ in range(islands)]
    # With larger steps, or of fewer tokens, honest changes are so unlike each other that some are taken for lies.
    steps: dict[str, Any] = {
        "every": 10, "least_every": 10, "most_every": 10, "steps": 10**6, "batch": 4, "rate": 3e-3,
        "islands": MAX_MEMBERS,
    }  # fmt: skip
    async with open_islands(folder, timing=UNHURRIED, grid=True, **steps) as swarm:
        for number, step_s in enumerate(speeds):
            swarm.add(number, step_s=step_s)
        computed = 0
        until, dead = trio.current_time() + seconds, list[int]()
        while trio.current_time() < until:
            await trio.sleep(churn_s * rng.uniform(0.5, 1.5))
            assert not any(node.failure for node in swarm.nodes.values()), f"{swarm.words()} {doubts(swarm)}"
            if (dead and rng.random() < 0.5) or len(swarm.nodes) <= islands // 2:
                back = dead.pop(rng.randrange(len(dead)))
                swarm.add(back, step_s=speeds[back], has_model=False)
            else:
                gone = rng.choice(sorted(swarm.nodes))
                computed += swarm.nodes[gone].island.figures.tokens
                dead.append(gone)
                swarm.kill(gone)
        best = max((node.island for node in swarm.nodes.values()), key=lambda island: island.standing.tokens)
        before = best.standing.round
        await swarm.until(lambda: best.standing.round > before)  # what is under way is neither counted nor lost
        computed += sum(node.island.figures.tokens for node in swarm.nodes.values())
        share = best.standing.tokens / computed
        words = f"{islands} islands, {seconds:g} s: {share:.3f} of {computed} tokens in {len(best.log)} rounds"
        assert share >= 0.85, f"{words}: {swarm.words()}"
        assert len(best.log) >= seconds / 120, words
        return words
