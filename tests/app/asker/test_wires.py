"""Rows of int8 on slow links: chosen by speed, the same tokens after a death, and peers that do not know them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from app.asker.asker import Asker
from app.core.span import Span
from app.routing.route import Hop
from app.routing.wire_choice import SLOW_BYTES_PER_S, choose_wires, keep_wires
from app.swarm.records import tail
from tests.app.hash_model import HashRunner
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, no_leaks, open_swarm

SLOW, FAST = SLOW_BYTES_PER_S / 10, 4 * SLOW_BYTES_PER_S
ROUTE = (Hop("a", Span(0, 3)), Hop("b", Span(3, 6)), Hop("c", Span(6, 8)))


class WatchedRunner(HashRunner):
    """Notes the number formats of the rows that it gets and is to send."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.formats: set[tuple[str, str]] = set()

    def _advance(self, item):  # type: ignore[no-untyped-def]
        self.formats.add((item.dtype, item.wire))
        return super()._advance(item)


def say(swarm: SessionSwarm, bytes_per_s: float, *, unable: tuple[str, ...] = ()) -> None:
    """Let all members announce that everything reaches them at this speed."""
    names = [*swarm.announcements, "asker"]
    for name, said in swarm.announcements.items():
        rates = tuple((tail(other), bytes_per_s) for other in names if other != name)
        wires = () if name in unable else ("int8",)
        swarm.announcements[name] = replace(said, rates=rates, wires=wires)


@asynccontextmanager
async def watched(*spans: tuple[int, int]) -> AsyncIterator[SessionSwarm]:
    async with open_swarm() as swarm:
        for index, (start, stop) in enumerate(spans):
            await swarm.serve(f"n{index}", WatchedRunner(start, stop))
        yield swarm


def formats(swarm: SessionSwarm) -> set[tuple[str, str]]:
    """The formats that all hops have seen."""
    return {pair for runner in swarm.runners.values() for pair in runner.formats}


async def replied(asker: Asker, count: int = 12) -> list[int]:
    return (await ask(asker, PROMPT, count)).token_ids


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_only_slow_links_between_those_who_understand_it_are_rounded() -> None:
    speeds = {("", "a"): SLOW, ("a", "b"): FAST, ("b", "c"): SLOW, ("c", ""): SLOW}
    rate = lambda sender, receiver: speeds.get((sender, receiver))  # noqa: E731
    assert choose_wires(ROUTE, rate, {"a", "b", "c"}) == {0: "int8", 6: "int8", 8: "int8"}
    assert choose_wires(ROUTE, rate, {"a", "b"}) == {0: "int8"}
    assert choose_wires(ROUTE, rate, ()) == {}
    assert choose_wires(ROUTE, lambda sender, receiver: None, {"a", "b", "c"}) == {}


def test_another_route_rounds_at_the_same_blocks_and_at_no_new_ones() -> None:
    wires = {0: "int8", 3: "int8", 6: "int8"}
    divided = (Hop("a", Span(0, 3)), Hop("x", Span(3, 4)), Hop("y", Span(4, 6)), Hop("c", Span(6, 8)))
    assert keep_wires(divided, wires, {"a", "x", "y", "c"}) == wires
    assert keep_wires(divided, wires, {"a", "y", "c"}) == {0: "int8", 6: "int8"}
    assert keep_wires((Hop("z", Span(0, 8)),), wires, {"z"}) == {0: "int8"}


# --- replies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bytes_per_s", "expected"), [(SLOW, {("int8", "int8"), ("int8", "")}), (FAST, {("f32", "")})])
async def test_replies_over_slow_links_are_int8_and_others_are_not(
    autojump_clock: MockClock, bytes_per_s: float, expected: set[tuple[str, str]]
) -> None:
    async with watched((0, 4), (4, 8)) as swarm:
        say(swarm, bytes_per_s)
        asker = await swarm.asker()
        assert len(await replied(asker)) == 12
        assert formats(swarm) == expected
        await no_leaks(swarm)


async def test_a_link_that_nobody_measured_is_not_rounded(autojump_clock: MockClock) -> None:
    async with watched((0, 4), (4, 8)) as swarm:
        for name, said in swarm.announcements.items():
            swarm.announcements[name] = replace(said, wires=("int8",))
        await replied(await swarm.asker())
        assert formats(swarm) == {("f32", "")}


async def test_members_of_an_older_version_get_what_they_understand(autojump_clock: MockClock) -> None:
    async with watched((0, 4), (4, 8)) as swarm:
        say(swarm, SLOW, unable=("n1",))
        await replied(await swarm.asker())
        assert swarm.runners["n0"].formats == {("int8", "")}
        assert swarm.runners["n1"].formats == {("f32", "")}


@pytest.mark.parametrize("victim", ["n0", "n1", "n2"])
async def test_a_killed_hop_changes_no_token(autojump_clock: MockClock, victim: str) -> None:
    spans = ((0, 3), (3, 6), (6, 8)) * 2
    async with watched(*spans) as swarm:
        say(swarm, SLOW)
        undisturbed = await replied(await swarm.asker())
    async with watched(*spans) as swarm:
        say(swarm, SLOW)
        for spare in ("n3", "n4", "n5"):
            swarm.announcements[spare] = replace(swarm.announcements[spare], decode_tokens_per_s=50.0)
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 12, max_tokens=12) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 5:
                    swarm.kill(victim)
                    del swarm.announcements[victim]
        assert reply.stats.recoveries == 1
        assert reply.stats.token_ids == undisturbed
        assert not reply.stats.notices
        assert formats(swarm) == {("int8", "int8"), ("int8", "")}  # nobody measured the way back to the asker


async def test_two_hops_in_place_of_one_change_no_token(autojump_clock: MockClock) -> None:
    async with watched((0, 3), (3, 8)) as swarm:
        say(swarm, SLOW)
        undisturbed = await replied(await swarm.asker())
    async with watched((0, 3), (3, 8), (3, 5), (5, 8)) as swarm:
        say(swarm, SLOW)
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 12, max_tokens=12) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 5:
                    swarm.kill("n1")
                    del swarm.announcements["n1"]
        assert [hop.peer for hop in reply.stats.route] == ["n0", "n2", "n3"]
        assert reply.stats.token_ids == undisturbed
        assert swarm.runners["n2"].formats == {("int8", "")}


async def test_a_successor_that_does_not_know_int8_takes_over_and_the_user_is_told(autojump_clock: MockClock) -> None:
    async with watched((0, 3), (3, 8), (3, 8)) as swarm:
        say(swarm, SLOW, unable=("n2",))
        swarm.announcements["n2"] = replace(swarm.announcements["n2"], decode_tokens_per_s=10.0)
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 12, max_tokens=12) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 5:
                    swarm.kill("n1")
                    del swarm.announcements["n1"]
        assert len(reply.stats.token_ids) == 12
        assert any("rounded" in notice for notice in reply.stats.notices)
        assert swarm.runners["n2"].formats == {("f32", "")}
        await no_leaks(swarm)


async def test_a_kept_session_goes_on_in_its_own_formats(autojump_clock: MockClock) -> None:
    async with watched((0, 4), (4, 8)) as swarm:
        say(swarm, SLOW)
        asker = await swarm.asker(keep=4)
        first = await ask(asker, PROMPT, 12)
        say(swarm, FAST)
        again = await ask(asker, [*PROMPT, *first.token_ids[:-1], 7], 4)
        assert again.cached_tokens > len(PROMPT)
        assert formats(swarm) == {("int8", "int8"), ("int8", "")}
        await trio.sleep(700)
        await ask(asker, PROMPT[::-1], 4)
        assert formats(swarm) == {("int8", "int8"), ("int8", ""), ("f32", "")}
