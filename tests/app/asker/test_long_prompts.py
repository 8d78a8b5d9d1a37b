"""Prompts of which more rows are under way than may wait for a stream: links are slower than what feeds them."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from app.asker import recovery, route_session
from app.serving import block_server, hop_session
from app.serving.hop_session import FrameAction, HopSession
from app.session import outbound
from app.session.frame import Frame
from p2p.memory import link
from p2p.memory.fabric import LinkProfile
from tests.app.hash_model import HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm

SLOW = LinkProfile(bytes_per_s=20_000)
LONG = list(range(3000))  # 48 KB of rows


@pytest.fixture
def small_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that take 4 KiB and a message more, and outboxes of half a long prompt."""
    monkeypatch.setattr(link, "fits_window", lambda outstanding, cost, priority=0: outstanding < 4096)
    monkeypatch.setattr(outbound, "MAX_WAITING_BYTES", 24 * 1024)
    monkeypatch.setattr(route_session, "FEED_AHEAD_BYTES", 8 * 1024)
    monkeypatch.setattr(block_server, "AHEAD_BYTES", 8 * 1024)
    monkeypatch.setattr(hop_session, "KEPT_BYTES", 8 * 1024)


async def ask_long_and_short(swarm: SessionSwarm) -> None:
    """A long prompt, and a short one at the same time: both replies come, and nobody is blamed."""
    asker = await swarm.asker()
    async with trio.open_nursery() as nursery:

        async def one(prompt: list[int], owner: str) -> None:
            stats = await ask(asker, prompt, 2, owner)
            assert (stats.token_ids, stats.recoveries) == (greedy(prompt, 2), 0)

        nursery.start_soon(one, LONG, "long")
        nursery.start_soon(one, PROMPT, "short")
    assert not asker.bans.active(trio.current_time())
    assert all(asker.planner.book.standing(peer).score == 1.0 for peer in swarm.servers)


async def test_an_asker_feeds_a_long_prompt_as_fast_as_its_link_takes_it(
    autojump_clock: MockClock, small_streams: None
) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        swarm.fabric.set_link("asker", "n0", SLOW)
        await ask_long_and_short(swarm)


@pytest.fixture
def slow_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of a model of 8192 numbers and their times on slow links, at a thousandth: chunks of 4 KiB, not MiB."""
    monkeypatch.setattr(recovery, "SLOW_LINK_BYTES_PER_S", 250)
    monkeypatch.setattr(link, "fits_window", lambda outstanding, cost, priority=0: outstanding < 2048 or priority < 2)
    monkeypatch.setattr(outbound, "MAX_WAITING_BYTES", 128 * 1024)
    monkeypatch.setattr(route_session, "FEED_AHEAD_BYTES", 16 * 1024)
    monkeypatch.setattr(route_session, "FEED_TOGETHER_BYTES", 64 * 1024)


async def test_a_short_prompt_does_not_wait_for_a_long_one_that_goes_over_the_same_link(
    autojump_clock: MockClock, slow_times: None
) -> None:
    """At 10 Mbit/s it would be behind 16 MiB, and what was sent to the hop would count as lost long before."""
    async with open_swarm((0, 8)) as swarm:
        swarm.fabric.set_link("asker", "n0", LinkProfile(bytes_per_s=1250))
        asker = await swarm.asker()
        async with trio.open_nursery() as nursery:

            async def ask_long() -> None:
                assert (await ask(asker, LONG, 2, "long")).recoveries == 0

            nursery.start_soon(ask_long)
            await trio.sleep(5)
            stats = await ask(asker, PROMPT[:20], 2, "short")
            assert (stats.token_ids, stats.recoveries) == (greedy(PROMPT[:20], 2), 0)
            assert trio.current_time() < 15
        assert asker.planner.book.standing("n0").score == 1.0


@pytest.mark.soak
async def test_long_prompts_share_a_slow_link_and_nobody_is_blamed(autojump_clock: MockClock, slow_times: None) -> None:
    async with open_swarm((0, 8)) as swarm:
        swarm.fabric.set_link("asker", "n0", LinkProfile(bytes_per_s=500))
        asker = await swarm.asker()
        async with trio.open_nursery() as nursery:

            async def one(number: int) -> None:
                prompt = [token + number for token in LONG[:1500]]
                stats = await ask(asker, prompt, 2, f"owner {number}")
                assert stats.token_ids == greedy(prompt, 2)

            for number in range(6):
                nursery.start_soon(one, number)
        assert asker.planner.book.standing("n0").score == 1.0


async def test_what_others_send_does_not_excuse_a_hop_that_denies_its_rows(
    autojump_clock: MockClock, slow_times: None
) -> None:
    async with open_swarm((0, 8)) as swarm:
        swarm.fabric.set_link("asker", "n0", LinkProfile(bytes_per_s=500))
        server = swarm.servers["n0"]
        usual = server._act_on

        async def deny(action: FrameAction, session: HopSession, frame: Frame) -> None:
            if session.turn.tokens > 100:
                await usual(action, session, frame)

        server._act_on = deny  # type: ignore[method-assign]
        asker = await swarm.asker()
        async with trio.open_nursery() as nursery, asker.session(40) as session:
            nursery.start_soon(ask, asker, LONG, 2, "long")
            await trio.sleep(5)
            nursery.start_soon(session.advance, PROMPT)
            await trio.sleep(20)
            assert asker._links is not None
            outbox = (await asker._links.to("n0", timeout_s=1.0)).outbox
            assert not outbox.waiting_for((session.id.hex(),))
            before, taken_at = session._hops.took_at(), outbox.took_at
            assert before
            await trio.sleep(15)
            assert outbox.took_at > taken_at
            assert session._hops.took_at() == before
            nursery.cancel_scope.cancel()


async def test_rows_of_a_reply_that_was_given_up_do_not_wait_for_a_stream(
    autojump_clock: MockClock, slow_times: None
) -> None:
    async with open_swarm((0, 8)) as swarm:
        swarm.fabric.set_link("asker", "n0", LinkProfile(bytes_per_s=500))
        asker = await swarm.asker()
        with trio.move_on_after(10):
            await ask(asker, LONG, 2)
        assert asker._links is not None
        assert (await asker._links.to("n0", timeout_s=1.0)).outbox.waiting_bytes == 0


async def test_a_first_hop_that_reads_nothing_of_a_long_prompt_is_left(
    autojump_clock: MockClock, small_streams: None
) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        hostile = await swarm.serve("hostile", HashRunner(0, 4), speed=500.0)

        async def stop(action: FrameAction, session: HopSession, frame: Frame) -> None:
            await trio.sleep_forever()

        hostile._act_on = stop  # type: ignore[method-assign]
        asker = await swarm.asker()
        stats = await ask(asker, LONG, 2)
        assert stats.token_ids == greedy(LONG, 2)
        assert trio.current_time() < 45


async def test_a_hop_computes_a_long_prompt_as_fast_as_its_link_takes_it(
    autojump_clock: MockClock, small_streams: None
) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        swarm.fabric.set_link("n0", "n1", SLOW)
        await ask_long_and_short(swarm)


async def test_a_reply_with_a_long_prompt_survives_a_hop(autojump_clock: MockClock, small_streams: None) -> None:
    """More outputs are kept than may wait for the link to the new hop: they are computed again instead."""
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        asker = await swarm.asker()
        async with asker.reply(LONG, 4, max_tokens=4) as reply:
            await anext(reply)
            swarm.kill(reply.stats.route[-1].peer)
            async for _ in reply:
                pass
        assert (reply.stats.token_ids, reply.stats.recoveries) == (greedy(LONG, 4), 1)
        assert asker.planner.book.standing("n0").score == 1.0
