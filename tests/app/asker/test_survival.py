"""Replies that survive: hops that die, freeze, wake, leave, forget or cannot reach each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from app.asker.asker import Asker
from app.asker.reply import ReplyStats
from app.asker.route_session import SessionLost
from app.core.network import FrameStream
from app.core.span import Span
from app.routing.route import NoRoute
from app.serving.block_server import ServerSettings
from app.session.wire import PROTOCOL
from p2p.memory.fabric import LinkProfile
from tests.app.hash_model import HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, bar, no_leaks, open_swarm

PAIRS = ((0, 3), (3, 6), (6, 8), (0, 3), (3, 6), (6, 8))


async def disturbed(asker: Asker, at: int, disturb: Callable[[], object], count: int = 12) -> ReplyStats:
    """A whole reply, disturbed behind token `at`; checks its tokens."""
    async with asker.reply(PROMPT, count, max_tokens=count) as reply:
        async for _ in reply:
            if len(reply.stats.token_ids) == at:
                disturb()
    assert reply.stats.token_ids == greedy(PROMPT, count)
    return reply.stats


def prefer_first_three(swarm: SessionSwarm) -> None:
    for name in ("n3", "n4", "n5"):
        swarm.fabric.set_link("asker", name, LinkProfile(delay_s=0.02))
        swarm.announcements[name] = replace(swarm.announcements[name], decode_tokens_per_s=50.0)


@pytest.mark.parametrize("victim", ["n0", "n1", "n2"])
async def test_a_hop_dies_and_a_replica_takes_over(autojump_clock: MockClock, victim: str) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 12, max_tokens=12) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 5:
                    assert victim in {hop.peer for hop in reply.stats.route}
                    swarm.kill(victim)
        assert reply.stats.token_ids == greedy(PROMPT, 12)
        assert reply.stats.recoveries == 1
        assert reply.stats.longest_gap_s < 0.5
        assert victim not in {hop.peer for hop in reply.stats.route}
        await no_leaks(swarm)


@pytest.mark.parametrize("victim", ["n0", "n1", "n2"])
async def test_a_frozen_hop_is_treated_as_a_dead_one_and_does_no_harm_when_it_wakes(
    autojump_clock: MockClock, victim: str
) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 200, max_tokens=200) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 5:
                    swarm.fabric.freeze(victim)
                if len(reply.stats.token_ids) == 30:
                    swarm.fabric.resume(victim)
        assert reply.stats.token_ids == greedy(PROMPT, 200)
        assert reply.stats.recoveries == 1
        assert reply.stats.longest_gap_s < 2.6
        await no_leaks(swarm)


@pytest.mark.parametrize(
    ("formats", "taken", "noticed"),
    [
        (("none", "int8", "none"), "n2", False),  # one of the same format, though it is slower
        (("none", "int8", "int8"), "n1", True),
        (("int8", "none", "int8"), "n2", False),
    ],
)
async def test_a_hop_of_the_same_number_format_takes_over_or_the_reply_says_so(
    autojump_clock: MockClock, formats: tuple[str, ...], taken: str, noticed: bool
) -> None:
    async with open_swarm((0, 8), (0, 8), (0, 8)) as swarm:
        for name, quantisation, speed in zip(("n0", "n1", "n2"), formats, (1000.0, 100.0, 10.0), strict=True):
            swarm.announcements[name] = replace(
                swarm.announcements[name], quantisation=quantisation, decode_tokens_per_s=speed
            )
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 20, max_tokens=20) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 8:
                    assert reply.stats.route[0].peer == "n0"
                    assert not reply.stats.notices
                    swarm.kill("n0")
                    del swarm.announcements["n0"]
        assert reply.stats.token_ids == greedy(PROMPT, 20)
        assert reply.stats.route[0].peer == taken
        assert bool(reply.stats.notices) is noticed
        assert all("int8" in notice and "f32" in notice for notice in reply.stats.notices)


async def test_two_hops_die_at_once(autojump_clock: MockClock) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)

        def kill() -> None:
            swarm.kill("n0")
            swarm.kill("n1")

        stats = await disturbed(await swarm.asker(), 5, kill)
        assert [hop.peer for hop in stats.route] == ["n3", "n4", "n2"]
        assert stats.longest_gap_s < 1
        await no_leaks(swarm)


async def test_a_hop_dies_while_the_prompt_is_under_way(autojump_clock: MockClock) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        asker = await swarm.asker()

        async def kill_soon() -> None:
            await trio.sleep(0.1)
            swarm.kill("n1")

        swarm.nursery.start_soon(kill_soon)
        prompt = list(range(3000))
        stats = await ask(asker, prompt, 3)
        assert stats.token_ids == greedy(prompt, 3)
        assert stats.recoveries == 1
        await no_leaks(swarm)


async def test_only_the_new_hop_computes_again(autojump_clock: MockClock) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        rows_before: dict[str, int] = {}

        def kill() -> None:
            rows_before.update({name: server.stats.rows for name, server in swarm.servers.items()})
            swarm.kill("n1")

        await disturbed(await swarm.asker(), 5, kill)
        rows = {name: server.stats.rows - rows_before[name] for name, server in swarm.servers.items()}
        assert rows["n4"] == len(PROMPT) + 11  # replayed by n0, then the rest of the reply
        assert rows["n0"] <= 9
        assert rows["n2"] <= 9


async def test_without_kept_outputs_the_asker_replays_from_tokens(autojump_clock: MockClock) -> None:
    async with open_swarm() as swarm:
        for index, (start, stop) in enumerate(PAIRS):
            await swarm.serve(f"n{index}", HashRunner(start, stop), settings=ServerSettings(kept_bytes=100))
        prefer_first_three(swarm)
        stats = await disturbed(await swarm.asker(), 7, lambda: swarm.kill("n1"))
        assert stats.recoveries == 1
        assert swarm.servers["n0"].stats.rows > 2 * len(PROMPT)
        await no_leaks(swarm)


async def test_the_only_holder_dies_and_the_reply_waits_for_a_new_one(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:

        def kill() -> None:
            swarm.kill("n1")
            swarm.nursery.start_soon(spare)

        async def spare() -> None:
            await trio.sleep(8)
            await swarm.serve("spare", HashRunner(4, 8))

        stats = await disturbed(await swarm.asker(), 5, kill)
        assert 8 < stats.longest_gap_s < 9
        assert stats.route[1].peer == "spare"
        await no_leaks(swarm)


async def test_a_hop_that_restarts_takes_its_session_up_again(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:

        async def again() -> None:
            await swarm.serve("n1", HashRunner(4, 8))

        def restart() -> None:
            swarm.kill("n1")
            swarm.nursery.start_soon(again)

        stats = await disturbed(await swarm.asker(), 5, restart)
        assert [hop.peer for hop in stats.route] == ["n0", "n1"]
        await no_leaks(swarm)


async def test_a_draining_hop_hands_over_without_a_gap(autojump_clock: MockClock) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        drained: list[bool] = []

        async def drain() -> None:
            drained.append(await swarm.servers["n1"].drain())

        stats = await disturbed(await swarm.asker(), 5, lambda: swarm.nursery.start_soon(drain), 20)
        assert drained == [True]
        assert [hop.peer for hop in stats.route] == ["n0", "n4", "n2"]
        assert stats.longest_gap_s < 0.5
        swarm.announcements.pop("n1")
        await no_leaks(swarm)


async def test_a_draining_hop_stays_until_somebody_can_take_over(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        drained: list[bool] = []

        async def drain() -> None:
            drained.append(await swarm.servers["n1"].drain())

        async def relief() -> None:
            await trio.sleep(3)
            await swarm.serve("relief", HashRunner(4, 8))

        def begin() -> None:
            swarm.nursery.start_soon(drain)
            swarm.nursery.start_soon(relief)

        stats = await disturbed(await swarm.asker(), 5, begin, 200)
        assert drained == [True]
        assert stats.longest_gap_s < 0.5
        assert [hop.peer for hop in stats.route] == ["n0", "relief"]
        await no_leaks(swarm)


async def test_hops_that_cannot_reach_each_other_go_through_the_asker(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        nodes = swarm.fabric.nodes
        for a, b in (("n0", "n1"), ("n1", "n2")):
            bar(nodes[a], b)
        stats = await ask(await swarm.asker(), PROMPT, 12)
        assert stats.token_ids == greedy(PROMPT, 12)
        assert stats.recoveries == 0
        assert stats.tokens_per_s == pytest.approx(1 / (6 * 0.005 + 3 * 0.01), rel=0.05)
        await no_leaks(swarm)


async def test_the_asker_changes_its_network(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8)) as swarm:
        asker = await swarm.asker()

        async def move() -> None:
            for peer in ("n0", "n1", "n2"):
                await swarm.fabric.nodes["asker"].disconnect(peer)

        stats = await disturbed(asker, 5, lambda: swarm.nursery.start_soon(move))
        assert stats.recoveries >= 1
        await no_leaks(swarm)


async def test_a_peer_that_vanishes_in_the_handshake_is_passed_over(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        node = swarm.fabric.node("mute")

        async def mute(stream: FrameStream) -> None:
            await stream.receive()
            await trio.sleep_forever()

        node.accept(PROTOCOL, mute)
        swarm.announcements["mute"] = replace(swarm.announcements["n1"], peer="mute", decode_tokens_per_s=1e6)
        swarm.announcements["gone"] = replace(swarm.announcements["n1"], peer="gone", decode_tokens_per_s=1e7)
        stats = await ask(await swarm.asker(), PROMPT, 6)
        assert stats.token_ids == greedy(PROMPT, 6)
        assert [hop.peer for hop in stats.route] == ["n0", "n1"]
        assert stats.ttft_s is not None
        assert stats.ttft_s < 7
        await no_leaks(swarm)


@pytest.mark.parametrize(
    ("name", "why"),
    [("mute", r"mute \(.*did not open the session in time"), ("gone", "no address of gone answers")],
)
async def test_an_only_holder_that_vanishes_in_the_handshake_is_named(
    autojump_clock: MockClock, name: str, why: str
) -> None:
    async with open_swarm((0, 4)) as swarm:
        node = swarm.fabric.node("mute")

        async def mute(stream: FrameStream) -> None:
            await stream.receive()
            await trio.sleep_forever()

        node.accept(PROTOCOL, mute)
        swarm.announcements[name] = replace(swarm.announcements["n0"], peer=name, span=Span(4, 8))
        begin = trio.current_time()
        with pytest.raises(NoRoute, match=f"block 4.*{why}"):
            await ask(await swarm.asker(), PROMPT, 6)
        assert trio.current_time() - begin < 22  # the wait for a first route, and one more try of 5 s
        await no_leaks(swarm)


async def test_a_hop_that_says_it_leaves_while_an_epoch_begins_is_heard(autojump_clock: MockClock) -> None:
    """The word is under way, under the old epoch, when the asker begins a new one."""
    async with open_swarm((0, 4), (4, 8), (4, 8), delay_s=0.05) as swarm:
        swarm.announcements["n1"] = replace(swarm.announcements["n1"], decode_tokens_per_s=10_000.0)
        asker = await swarm.asker()
        async with asker.session(64) as session:
            await session.advance(PROMPT)
            assert [hop.peer for hop in session.route] == ["n0", "n1"]
            swarm.nursery.start_soon(swarm.servers["n1"].drain, 60.0)
            session.cut(10)
            session._flowing = False  # as after a failure: begin an epoch
            await session.advance([7])
            assert swarm.servers["n1"].draining
            for token in range(3):
                await session.advance([token])
            assert [hop.peer for hop in session.route] == ["n0", "n2"]
        await no_leaks(swarm)


async def test_a_hop_that_leaves_says_so_in_each_epoch(autojump_clock: MockClock) -> None:
    """The word was lost with a stream: the order of the next epoch is answered with it again, and no other is taken."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.05) as swarm:
        asker = await swarm.asker()
        async with asker.session(64) as session:
            await session.advance(PROMPT)
            swarm.servers["n1"].draining = True  # and nobody was told
            begin = trio.current_time()
            for length in (30, 20, 10):
                session.cut(length)
                session._flowing = False
                await session.advance([7])
                assert session._hops.leaving == {"n1"}
            assert session.recoveries <= 3
            assert trio.current_time() - begin < 3
            assert not asker.bans.active(trio.current_time())
        await no_leaks(swarm)


async def test_a_stranger_that_does_nothing_costs_one_of_many_sessions_its_time(autojump_clock: MockClock) -> None:
    """It claims to be the fastest and never opens a session: one session finds out, the others do not wait for it."""
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker()
        await ask(asker, PROMPT, 2)

        async def mute(stream: FrameStream) -> None:
            await trio.sleep_forever()

        swarm.fabric.node("mute").accept(PROTOCOL, mute)
        like = swarm.announcements["n1"]
        swarm.announcements["mute"] = replace(like, peer="mute", span=Span(0, 8), decode_tokens_per_s=1e4)
        await swarm.fabric.nodes["asker"].open("mute", PROTOCOL)  # they have a link, and it is short
        waits: list[float | None] = []

        async def chat() -> None:
            waits.append((await ask(asker, PROMPT, 6)).ttft_s)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(chat)
        assert sum(wait is not None and wait > 2 for wait in waits) == 1, waits
        await no_leaks(swarm)


async def test_a_newcomer_that_works_is_soon_used_by_all(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker()
        await ask(asker, PROMPT, 2)
        await swarm.serve("new", HashRunner(0, 8), speed=1e4)
        await swarm.fabric.nodes["asker"].open("new", PROTOCOL)
        assert [hop.peer for hop in (await ask(asker, PROMPT, 6)).route] == ["new"]
        routes: list[list[str]] = []

        async def chat() -> None:
            routes.append([hop.peer for hop in (await ask(asker, PROMPT, 6)).route])

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(chat)
        assert routes == [["new"]] * 4
        await no_leaks(swarm)


async def test_a_reply_ends_in_words_if_its_node_leaves_the_swarm(autojump_clock: MockClock) -> None:
    """It ended in trio's `RuntimeError` that a nursery is closed, with its traceback in the node's terminal."""
    async with open_swarm((0, 8)) as swarm, trio.open_nursery() as nursery:
        asker = await swarm.asker(nursery=nursery)
        async with asker.reply(PROMPT, 40, max_tokens=40) as reply:
            await reply.__anext__()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True), pytest.raises(SessionLost, match="this node has left the swarm"):
                async for _ in reply:
                    pass


async def test_a_session_closes_at_all_hops_though_a_former_one_dies_meanwhile(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 4, max_tokens=4) as reply:
            await anext(reply)
            hops = reply._session._hops
            first, former = hops.route[0].peer, ({"n1", "n2"} - {hop.peer for hop in hops.route}).pop()
            assert asker._links is not None
            hops._open = {first: hops._open[first], former: await asker._links.to(former, timeout_s=5.0), **hops._open}
            usual = hops._open[first].send

            async def send(*parts: bytes) -> None:
                hops.on_stream_end(former)
                await usual(*parts)

            hops._open[first].send = send  # type: ignore[method-assign, assignment]
        await no_leaks(swarm)
