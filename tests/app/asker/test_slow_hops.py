"""Hops that take long for a prompt and are honest: those that said so are waited for, and so are those whose
alternatives are worse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import trio
from trio.testing import MockClock

from app.asker import recovery, route_session
from app.asker.asker import Asker
from app.asker.reply import ReplyStats
from p2p.memory import link
from p2p.memory.fabric import LinkProfile
from tests.app.hash_model import HashRunner, InlineDevice, greedy, whole_result
from tests.app.session_swarm import SessionSwarm, ask, open_swarm

T = TypeVar("T")


class ReadingDevice(InlineDevice):
    """Takes as long for a step as it has rows."""

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__()
        self.tokens_per_s = tokens_per_s

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        if getattr(function, "__name__", "") == "step":
            await trio.sleep(sum(work.rows for work in args[0]) / self.tokens_per_s)
        else:
            await trio.lowlevel.checkpoint()
        result: T = whole_result(function(*args))
        return result


class SlowingDevice(ReadingDevice):
    """Reads slowly from some token on."""

    def __init__(self, tokens_per_s: float, later: float, at: int) -> None:
        super().__init__(tokens_per_s)
        self._later, self._left = later, at

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        if getattr(function, "__name__", "") == "step":
            self._left -= sum(work.rows for work in args[0])
            self.tokens_per_s = self._later if self._left < 0 else self.tokens_per_s
        return await super().run(function, *args)


async def serve(
    swarm: SessionSwarm, name: str, *, announced: float, actual: float | None = None, busy: float = 0.0
) -> None:
    """A hop with all blocks that says how many tokens of a prompt it reads in a second; it may be mistaken."""
    server = await swarm.serve(name, HashRunner(0, 8), speed=announced)
    server._device = swarm.devices[name] = ReadingDevice(actual or announced)
    one = swarm.announcements[name]
    swarm.announcements[name] = replace(one, prefill_tokens_per_s=announced, busy=busy)


def prompt(tokens: int, number: int = 0) -> list[int]:
    return [number, *(token % 500 for token in range(1, tokens))]


async def ask_unhindered(asker: Asker, tokens: Sequence[int], peer: str) -> ReplyStats:
    """Ask, and see to it that the reply stayed at one hop."""
    stats = await ask(asker, tokens, 2)
    assert (stats.token_ids, stats.recoveries) == (greedy(tokens, 2), 0)
    assert [hop.peer for hop in stats.route] == [peer]
    return stats


def is_blameless(asker: Asker, peer: str) -> bool:
    return not asker.bans.active(trio.current_time()) and asker.planner.book.standing(peer).score == 1.0


@pytest.mark.parametrize("tokens_per_s", [1.0, 5.0, 50.0])
async def test_a_slow_hop_that_says_so_is_waited_for(autojump_clock: MockClock, tokens_per_s: float) -> None:
    """A step of 256 tokens takes it longer than others may go without any sign of progress."""
    async with open_swarm() as swarm:
        await serve(swarm, "slow", announced=tokens_per_s)
        await serve(swarm, "slower", announced=tokens_per_s / 2)
        asker = await swarm.asker()
        stats = await ask_unhindered(asker, prompt(600), "slow")
        assert stats.ttft_s == pytest.approx(600 / tokens_per_s, rel=0.1)
        assert is_blameless(asker, "slow")


async def test_a_hop_that_reads_the_prompts_of_several_askers_in_turn_is_waited_for(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        await serve(swarm, "slow", announced=20.0)
        await serve(swarm, "slower", announced=3.0)
        askers = [await swarm.asker(f"asker {number}") for number in range(7)]
        async with trio.open_nursery() as nursery:
            for number, asker in enumerate(askers):
                nursery.start_soon(ask_unhindered, asker, prompt(500, number), "slow")
        assert trio.current_time() > 6 * 500 / 20
        assert all(is_blameless(asker, "slow") for asker in askers)


async def test_a_hop_that_said_that_it_is_busy_is_waited_for_longer(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        await serve(swarm, "busy", announced=1000.0, actual=10.0, busy=0.9)
        await serve(swarm, "slow", announced=9.0)
        await ask_unhindered(await swarm.asker(), prompt(1000), "busy")


async def test_the_only_holder_is_waited_for_though_it_is_late(autojump_clock: MockClock) -> None:
    """It reads a hundredth of what it announced: to leave it would help nobody."""
    async with open_swarm() as swarm:
        await serve(swarm, "late", announced=1000.0, actual=10.0)
        asker = await swarm.asker()
        await ask_unhindered(asker, prompt(2000), "late")
        assert is_blameless(asker, "late")


async def test_a_late_hop_is_waited_for_if_the_others_are_slower_still(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        await serve(swarm, "late", announced=1000.0, actual=20.0)
        await serve(swarm, "slow", announced=5.0)
        asker = await swarm.asker()
        stats = await ask_unhindered(asker, prompt(2000), "late")
        assert stats.ttft_s == pytest.approx(100, rel=0.1)
        assert is_blameless(asker, "late")


async def test_a_late_hop_is_left_when_a_faster_one_comes(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm, trio.open_nursery() as nursery:
        await serve(swarm, "late", announced=1000.0, actual=10.0)
        asker = await swarm.asker()

        async def join() -> None:
            await trio.sleep(100)
            await serve(swarm, "fast", announced=1000.0)

        nursery.start_soon(join)
        stats = await ask(asker, prompt(2000), 2)
        assert stats.token_ids == greedy(prompt(2000), 2)
        assert [hop.peer for hop in stats.route] == ["fast"]
        assert stats.ttft_s is not None
        assert stats.ttft_s < 100 + route_session.LOOK_FOR_OTHERS_S + 10
        again = await ask(asker, prompt(2000, 1), 2)
        assert [hop.peer for hop in again.route] == ["fast"]


@pytest.mark.parametrize("comes_later", [False, True])
async def test_a_prompt_that_was_hung_up_on_is_not_taken_back_to_the_hop_that_became_slow(
    autojump_clock: MockClock, *, comes_later: bool
) -> None:
    async with open_swarm() as swarm:
        await serve(swarm, "slowing", announced=1000.0)
        swarm.servers["slowing"]._device = SlowingDevice(1000.0, 8.0, 2100)
        if not comes_later:
            await serve(swarm, "steady", announced=500.0)
        asker = await swarm.asker(keep=4)
        with trio.move_on_after(45 if comes_later else 34) as patience:
            await ask(asker, prompt(3500), 2)
        assert patience.cancelled_caught
        assert asker.stats().kept_tokens > 2000
        if comes_later:
            await serve(swarm, "steady", announced=500.0)
        stats = await ask_unhindered(asker, prompt(3500), "steady")
        assert stats.ttft_s is not None
        assert stats.ttft_s < 10


async def test_hops_that_are_all_late_are_not_left_in_turn_for_ever(autojump_clock: MockClock) -> None:
    """Each would be left before it is done, if each had the same patience each time."""
    async with open_swarm() as swarm:
        for name in ("one", "two"):
            await serve(swarm, name, announced=1000.0, actual=8.0)
        stats = await ask(await swarm.asker(), prompt(2000), 2)
        assert stats.token_ids == greedy(prompt(2000), 2)
        assert stats.recoveries <= 3


async def test_who_gives_up_on_a_hop_that_keeps_its_word_reports_nothing(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        await serve(swarm, "slow", announced=5.0)
        asker = await swarm.asker()
        with trio.move_on_after(100):
            await ask(asker, prompt(1000), 2)
        assert is_blameless(asker, "slow")
        assert not asker.planner.measured.block_s(trio.current_time())


@pytest.mark.parametrize("patience_s", [10.0, 30.0, 45.0])
async def test_a_hop_is_not_blamed_for_the_slow_link_of_its_asker(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """The sizes of rows of 8192 numbers and the times of a slow link at a thousandth; the prompt takes 48 s."""
    monkeypatch.setattr(recovery, "SLOW_LINK_BYTES_PER_S", 250)
    monkeypatch.setattr(link, "fits_window", lambda outstanding, cost, priority=0: outstanding < 2048 or priority < 2)
    async with open_swarm((0, 4), (4, 8), (0, 4)) as swarm:
        for name in ("n0", "n2"):
            swarm.fabric.set_link("asker", name, LinkProfile(bytes_per_s=500))
        asker = await swarm.asker()
        with trio.move_on_after(patience_s):
            await ask(asker, prompt(1500), 2)
        assert all(is_blameless(asker, peer) for peer in swarm.servers)
        assert not asker.planner.measured.block_s(trio.current_time())


async def test_a_hop_that_stops_for_a_while_is_waited_for(autojump_clock: MockClock) -> None:
    """As its device may for a step of training, or its machine for a moment."""
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        asker = await swarm.asker()
        usual_s = swarm.devices["n1"].seconds
        swarm.devices["n1"].seconds = swarm.devices["n2"].seconds = 25.0

        async def go_on() -> None:
            await trio.sleep(10)
            swarm.devices["n1"].seconds = swarm.devices["n2"].seconds = usual_s

        swarm.nursery.start_soon(go_on)
        stats = await ask(asker, prompt(40), 2)
        assert stats.ttft_s == pytest.approx(25, rel=0.1)
        assert (stats.token_ids, stats.recoveries) == (greedy(prompt(40), 2), 0)
        assert all(is_blameless(asker, peer) for peer in swarm.servers)
        assert not asker.planner.measured._at_least
