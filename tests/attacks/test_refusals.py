"""Hops that announce room and refuse every session: replies take others, are asked for rarely, and come to an end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import trio
from trio.testing import MockClock

from app.asker.route_session import SessionSettings
from app.core.errors import AppError
from app.core.span import Span
from app.session.frame import HopError, plain
from app.session.wire import CACHE_EXCEEDED, PROTOCOL, Kind, decode, encode_hop_error
from app.swarm.records import Announcement
from p2p.memory.fabric import MemoryStream
from tests.app.hash_model import greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm

FULL = HopError("busy", "no room", "cache_full")
NO_PLACE = HopError("busy", "no place for you", "asker_sessions_full")
TOO_LARGE = HopError("refused", "that is too much", CACHE_EXCEEDED)
LEAVES = HopError("draining", "this node is about to leave")


@dataclass
class Refuser:
    """Answers each order with a refusal, after a while; opens the session before if `opens`. Counts the orders."""

    error: HopError
    after_s: float = 0.0
    opens: bool = False
    asked: int = 0

    async def attend(self, stream: MemoryStream) -> None:
        while True:
            frame = decode(await stream.receive())
            if frame.kind == Kind.TURN:
                self.asked += 1
                if self.opens:
                    await stream.send(plain(Kind.READY, frame.session, frame.epoch))
                await trio.sleep(self.after_s)
                await stream.send(encode_hop_error(frame.session, frame.epoch, 0, self.error))


def add(swarm: SessionSwarm, refuser: Refuser, name: str = "hostile", speed: float = 500.0) -> None:
    """Add a member with the second half of the blocks that announces to be fast, and to have all the room there is."""
    swarm.fabric.node(name).accept(PROTOCOL, refuser.attend)
    room = 1 << 40
    swarm.announcements[name] = Announcement(name, 1, 0, "", "serving", Span(4, 8), speed, 10 * speed, room)


@pytest.mark.parametrize("error", [FULL, NO_PLACE, TOO_LARGE, LEAVES], ids=lambda error: error.why or error.code)
@pytest.mark.parametrize("opens", [pytest.param(False, marks=pytest.mark.soak), True])
async def test_a_hop_that_refuses_everything_is_tried_seldom(
    error: HopError, opens: bool, autojump_clock: MockClock
) -> None:
    async with open_swarm((0, 4), (4, 8), delay_s=0.02) as swarm:
        add(swarm, refuser := Refuser(error, opens=opens))
        asker = await swarm.asker()
        begin = trio.current_time()
        for _ in range(100):
            stats = await ask(asker, PROMPT, 4)
            assert stats.token_ids == greedy(PROMPT, 4)
            assert stats.ttft_s is not None
            assert stats.ttft_s < 1
        minutes = (trio.current_time() - begin) / 60
        assert 0 < refuser.asked <= 8 + 2 * minutes


@pytest.mark.parametrize("error", [FULL, LEAVES], ids=lambda error: error.code)
async def test_a_hop_that_takes_long_to_refuse_holds_up_few_replies(error: HopError, autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8), delay_s=0.02) as swarm:
        add(swarm, Refuser(error, after_s=4.5))
        asker = await swarm.asker()
        late = 0
        for _ in range(100):
            stats = await ask(asker, PROMPT, 4)
            assert stats.token_ids == greedy(PROMPT, 4)
            assert stats.ttft_s is not None
            assert stats.ttft_s < 7  # 5 s to begin, and one in which it answers no probe
            late += stats.ttft_s > 1
        assert late <= 8


async def test_a_crowd_that_says_it_has_room_and_refuses_costs_an_asker_little_time(autojump_clock: MockClock) -> None:
    """Hundreds of members announce to be fast: each refused each reply once before it found the ones that work."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.05) as swarm:
        asker = await swarm.asker()
        assert (await ask(asker, PROMPT, 4)).token_ids == greedy(PROMPT, 4)
        for number in range(300):
            add(swarm, Refuser(FULL), f"hostile {number}", 1e5)
        begin = trio.current_time()
        for _ in range(20):
            assert (await ask(asker, PROMPT, 4)).token_ids == greedy(PROMPT, 4)
        assert trio.current_time() - begin < 60


@pytest.mark.parametrize("error", [FULL, NO_PLACE, TOO_LARGE, LEAVES], ids=lambda error: error.why or error.code)
@pytest.mark.parametrize(("opens", "after_s"), [(False, 0.0), (False, 4.5), (True, 0.0), (True, 20.0)])
async def test_a_reply_over_the_only_holder_that_refuses_comes_to_an_end(
    error: HopError, opens: bool, after_s: float, autojump_clock: MockClock
) -> None:
    """As long as a first route is waited for; where the hop opens sessions before, as long as repairs may take."""
    limits = SessionSettings()
    async with open_swarm((0, 4), delay_s=0.02) as swarm:
        add(swarm, refuser := Refuser(error, after_s, opens))
        asker = await swarm.asker()
        with trio.move_on_after(1000) as patience, pytest.raises(AppError):
            await ask(asker, PROMPT, 4)
        assert not patience.cancelled_caught
        if not opens:
            assert trio.current_time() <= limits.first_route_s + after_s + 0.1  # the last attempt may begin at its end
        elif not after_s:
            assert trio.current_time() <= 3 * limits.new_route_s
        assert refuser.asked <= 12
