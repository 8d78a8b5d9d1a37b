"""Hops that hold a reply: they say that they go on with its prompt, now and then, and send nothing.

The hostile hop announces five times the speed of the others, which can all read a prompt of 2000 tokens in 0.2 s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import trio
from trio.testing import MockClock

from app.asker import recovery, route_session
from app.asker.asker import Asker
from app.session.frame import Frame, HopError, plain
from app.session.wire import PROTOCOL, Kind, decode, encode_hop_error
from p2p.errors import P2PError
from p2p.memory import link
from p2p.memory.fabric import MemoryStream
from p2p.values import MESSAGE_COST_BYTES
from tests.app.hash_model import HashRunner, greedy
from tests.app.session_swarm import SessionSwarm, ask, open_swarm

FAST = 500.0
HELD_S = 45.0  # a hop may not advance for 30 s, which is its due; the rest is for what it has to read


class Claim(NamedTuple):
    """What a hop says of a prompt: tokens cached and received."""

    cached: int
    received: int


Claims = Callable[[float, int], Claim]  # of the seconds since the epoch began, and the tokens of the prompt

CLAIMS: dict[str, Claims] = {
    "a token now and then": lambda since_s, tokens: Claim(int(since_s / 25), tokens),
    "all but one at once": lambda since_s, tokens: Claim(tokens - 1, tokens),
    "a row now and then": lambda since_s, tokens: Claim(0, int(since_s / 2.5)),
    "one row is missing": lambda since_s, tokens: Claim(min(int(since_s / 2.5), tokens - 1), tokens - 1),
    "nothing came": lambda since_s, tokens: Claim(0, 0),
    "all is done": lambda since_s, tokens: Claim(tokens, tokens),
}


def crawling(
    tokens: int,
    claims: Claims = CLAIMS["a token now and then"],
    *,
    excuse_s: float = math.inf,
    excuses: int = 1,
    code: str = "closed",
) -> Callable[[MemoryStream], Awaitable[None]]:
    """A handler of streams that answers all that it is asked and computes nothing.

    It has an excuse after a while, so often in each session.
    """
    begun: dict[bytes, float] = {}
    excused: dict[bytes, int] = {}

    async def attend(stream: MemoryStream) -> None:
        while True:
            frame = decode(await stream.receive())
            now = trio.current_time()
            if frame.kind == Kind.TURN:
                begun[frame.session] = now
                await stream.send(plain(Kind.READY, frame.session, frame.epoch, 0, 0, 7))
            elif frame.kind == Kind.PROBE:
                since_s = now - begun.setdefault(frame.session, now)
                await stream.send(plain(Kind.STATE, frame.session, frame.epoch, *claims(since_s, tokens)))
                if since_s > excuse_s and excused.get(frame.session, 0) < excuses:
                    excused[frame.session] = excused.get(frame.session, 0) + 1
                    await stream.send(encode_hop_error(frame.session, frame.epoch, 0, HopError(code, "not now")))

    return attend


async def join(swarm: SessionSwarm, span: tuple[int, int], tokens: int, claims: Claims | None = None) -> None:
    """Let the hostile hop join."""
    await swarm.serve("liar", HashRunner(*span), speed=FAST)
    swarm.fabric.nodes["liar"].accept(PROTOCOL, crawling(tokens, claims or CLAIMS["a token now and then"]))


def numbered(tokens: int, number: int = 0) -> list[int]:
    """A prompt that no other number has."""
    return [number, *(token % 500 for token in range(1, tokens))]


async def replies_with_patience(asker: Asker, tokens: int, patience_s: float, count: int = 10) -> int:
    """Ask one thing after the other, and give up on each after a while; returns how many were answered."""
    answered = 0
    for number in range(count):
        with trio.move_on_after(patience_s):
            answered += len((await ask(asker, numbered(tokens, number), 2)).token_ids) == 2
        await trio.sleep(5)
    return answered


@pytest.mark.parametrize("tokens", [40, 500, pytest.param(2000, marks=pytest.mark.soak), 4000])
async def test_a_hop_that_claims_a_token_now_and_then_is_left_however_long_the_prompt_is(
    autojump_clock: MockClock, tokens: int
) -> None:
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        await join(swarm, (4, 8), tokens)
        stats = await ask(await swarm.asker(), numbered(tokens), 2)
        assert stats.token_ids == greedy(numbered(tokens), 2)
        assert stats.ttft_s is not None
        assert stats.ttft_s < HELD_S


@pytest.mark.parametrize("speed", [1100.0, 5000.0])
@pytest.mark.parametrize("busy", [0.5, 0.9, 1.0])
async def test_a_hop_that_calls_itself_busy_is_not_waited_for_longer_than_others_need(
    autojump_clock: MockClock, busy: float, speed: float
) -> None:
    """Others take 4 s by their word; to be busy may win it time only as far as it costs it askers."""
    tokens = 4000
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        await join(swarm, (4, 8), tokens)
        liar = swarm.announcements["liar"]
        swarm.announcements["liar"] = replace(liar, prefill_tokens_per_s=speed, busy=busy)
        stats = await ask(await swarm.asker(), numbered(tokens), 2)
        assert stats.token_ids == greedy(numbered(tokens), 2)
        assert stats.ttft_s is not None
        assert stats.ttft_s < 30 + recovery.OVERDUE_TIMES * 4 + 10


SPANS = {(4, 8): [(0, 4), (4, 8), (4, 8)], (0, 4): [(0, 4), (0, 4), (4, 8)], (3, 6): [(0, 3), (3, 6), (3, 6), (6, 8)]}


@pytest.mark.parametrize(
    ("span", "large_rows"),
    [
        pytest.param(span, rows, marks=() if span == (4, 8) or not rows else pytest.mark.soak)
        for span in SPANS
        for rows in (False, True)
    ],
)
@pytest.mark.parametrize("claim", list(CLAIMS))
async def test_whatever_a_hop_claims_and_wherever_it_is_others_are_asked_next(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, claim: str, span: tuple[int, int], large_rows: bool
) -> None:
    """Of rows of 8 KiB it can say that they are still on their way for minutes: its links may be as slow as that."""
    if large_rows:
        monkeypatch.setattr(recovery, "SLOW_LINK_BYTES_PER_S", recovery.SLOW_LINK_BYTES_PER_S * 16 / 8192)
        monkeypatch.setattr(link, "fits_window", lambda outstanding, cost, priority=0: outstanding < 4096)
    async with open_swarm(*SPANS[span]) as swarm:
        await join(swarm, span, 500, CLAIMS[claim])
        asker = await swarm.asker()
        assert await replies_with_patience(asker, 500, 60.0) >= 9
        honest = swarm.servers.keys() - {"liar"}
        assert not honest & asker.bans.active(trio.current_time()).keys()
        assert all(asker.planner.book.standing(peer).score == 1.0 for peer in honest)


@pytest.mark.parametrize("patience_s", [10.0, 20.0, 60.0, 120.0])
async def test_clients_that_give_up_do_not_meet_the_same_hop_again_and_again(
    autojump_clock: MockClock, patience_s: float
) -> None:
    """It answers what they gave up on to nobody, so that it was asked first each time: it had claimed to be fast."""
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        await join(swarm, (4, 8), 1000)
        asker = await swarm.asker()
        assert await replies_with_patience(asker, 1000, patience_s) >= 9


async def test_clients_that_give_up_do_not_meet_one_stranger_after_the_other(autojump_clock: MockClock) -> None:
    """Names are free: each request would meet another one."""
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        asker = await swarm.asker()
        for number in range(4):
            await ask(asker, numbered(30, number), 4)
        for number in range(20):
            await swarm.serve(f"liar {number}", HashRunner(4, 8), speed=FAST)
            swarm.fabric.nodes[f"liar {number}"].accept(PROTOCOL, crawling(1000))
        assert await replies_with_patience(asker, 1000, 20.0, 20) >= 14


async def test_a_hop_that_announces_another_speed_once_it_was_chosen_has_no_more_time(
    autojump_clock: MockClock,
) -> None:
    """Not even in another epoch, for which it asks with an excuse."""
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        await join(swarm, (4, 8), 500)
        swarm.fabric.nodes["liar"].accept(PROTOCOL, crawling(500, excuse_s=20.0))
        asker = await swarm.asker()

        async def slow_down() -> None:
            await trio.sleep(0.005)
            one = swarm.announcements["liar"]
            swarm.announcements["liar"] = replace(one, decode_tokens_per_s=0.1, prefill_tokens_per_s=0.1, busy=1.0)

        swarm.nursery.start_soon(slow_down)
        stats = await ask(asker, numbered(500), 2)
        assert stats.ttft_s is not None
        assert stats.ttft_s < 2 * HELD_S


EXCUSES = ("closed", "gap", "input", "draining", "link")


@pytest.mark.parametrize("code", EXCUSES)
@pytest.mark.parametrize("excuse_s", [9.0, pytest.param(25.0, marks=pytest.mark.soak)])
async def test_a_hop_with_an_excuse_now_and_then_has_no_more_time_than_others(
    autojump_clock: MockClock, code: str, excuse_s: float
) -> None:
    """An excuse begins another epoch; what the hop was waited for before it counts in that one, too."""
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        await join(swarm, (4, 8), 1000)
        crawl = crawling(1000, excuse_s=excuse_s, excuses=100, code=code)
        swarm.fabric.nodes["liar"].accept(PROTOCOL, crawl)
        asker, begin = await swarm.asker(), trio.current_time()
        for number in range(10):
            stats = await ask(asker, numbered(1000, number), 2)
            assert stats.token_ids == greedy(numbered(1000, number), 2)
            assert stats.ttft_s is not None
            assert stats.ttft_s < HELD_S
        assert trio.current_time() - begin < 2 * HELD_S, "it was asked again and again"
        honest = swarm.servers.keys() - {"liar"}
        assert not honest & asker.bans.active(trio.current_time()).keys()
        assert all(asker.planner.book.standing(peer).score == 1.0 for peer in honest)


@pytest.mark.parametrize("code", EXCUSES)
async def test_clients_that_give_up_after_an_excuse_do_not_meet_the_same_hop_again_and_again(
    autojump_clock: MockClock, code: str
) -> None:
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        await join(swarm, (4, 8), 1000)
        crawl = crawling(1000, excuse_s=7.0, excuses=100, code=code)
        swarm.fabric.nodes["liar"].accept(PROTOCOL, crawl)
        assert await replies_with_patience(await swarm.asker(), 1000, 20.0) >= 8


async def test_a_hop_that_reads_short_prompts_is_not_asked_with_each_long_one(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        server = await swarm.serve("liar", HashRunner(4, 8), speed=FAST)
        honest, crawl = server.attend, crawling(1000)
        is_hostile = False

        async def attend(stream: MemoryStream) -> None:
            await (crawl if is_hostile else honest)(stream)

        swarm.fabric.nodes["liar"].accept(PROTOCOL, attend)
        asker = await swarm.asker()
        for number in range(5):
            stats = await ask(asker, numbered(30, number), 4)
            assert stats.route[-1].peer == "liar"
        is_hostile = True
        await trio.sleep(100)  # the stream to it is closed as idle, and opened again
        assert await replies_with_patience(asker, 1000, 60.0) >= 9


@pytest.mark.parametrize("tokens", [pytest.param(200, marks=pytest.mark.soak), 2000])
async def test_a_running_reply_is_lured_to_such_a_hop_once_at_most(autojump_clock: MockClock, tokens: int) -> None:
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        for device in swarm.devices.values():
            device.seconds = 0.3
        asker = await swarm.asker(guesser=lambda *_: None)
        async with asker.reply(numbered(tokens), 1500, max_tokens=1500) as reply:
            async for _ in reply:
                if "liar" not in swarm.servers and trio.current_time() > 5:
                    await join(swarm, (4, 8), 2**20)
                if trio.current_time() > 600:
                    break
        assert (reply.stats.moves > 0, reply.stats.recoveries) == (True, 1)
        assert reply.stats.longest_gap_s < HELD_S
        assert reply.stats.token_ids == greedy(numbered(tokens), len(reply.stats.token_ids))


async def test_other_replies_of_the_same_owner_do_not_wait_for_a_prompt_that_a_hop_holds(
    autojump_clock: MockClock,
) -> None:
    """Nobody else can read it, so that the reply waits on; those of its owner wait behind prompts of so many tokens."""
    async with open_swarm() as swarm, trio.open_nursery() as nursery:
        await join(swarm, (0, 8), 3000)
        asker = await swarm.asker()
        for number in range(3):
            nursery.start_soon(ask, asker, numbered(3000, number), 2)
        await trio.sleep(20)
        assert len(asker._replies) == 1
        await trio.sleep(HELD_S)
        assert len(asker._replies) == 2
        await trio.sleep(HELD_S)
        assert len(asker._replies) == 3
        nursery.cancel_scope.cancel()


async def test_the_hops_beside_one_that_crawls_stay_as_fast_as_they_were_believed(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 3), (3, 6), (3, 6), (6, 8)) as swarm:
        await join(swarm, (3, 6), 500)
        asker = await swarm.asker()
        await replies_with_patience(asker, 500, 20.0, 1)
        assert set(asker.planner.measured.block_s(trio.current_time())) == {"liar"}


# --- rows that a first hop does not take ------------------------------------------------------------------------------


class DeafStream:
    """The stream of an honest server that grants no window for long prompts' rows, and gets all else."""

    def __init__(self, stream: MemoryStream) -> None:
        self._stream, self.peer = stream, stream.peer
        self._held = Counter[bytes]()  # bytes of each session
        self._usual = stream._in._consumed
        stream._in._consumed = self._consumed  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _consumed(self, message: bytes) -> bytes:
        frame, pipe = decode(message), self._stream._in
        if is_long(frame):
            self._held[frame.session] += len(message) + MESSAGE_COST_BYTES
            return message
        if frame.kind in (Kind.CLOSE, Kind.TURN):
            pipe.outstanding_bytes -= self._held.pop(frame.session, 0)
        return self._usual(message)

    async def receive(self) -> bytes:
        while is_long(decode(message := await self._stream.receive())):
            pass
        return message


def is_long(frame: Frame) -> bool:
    return frame.kind == Kind.DATA and frame.rows > 30


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("patience_s", [60.0, 1000.0])
async def test_a_first_hop_that_takes_no_rows_of_a_prompt_is_met_once(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, patience_s: float, is_known: bool
) -> None:
    """The prompt is longer than what may wait for a stream, so that the asker never gets to wait for the answer."""
    monkeypatch.setattr(link, "fits_window", lambda outstanding, cost, priority=0: outstanding < 2048 or priority < 2)
    monkeypatch.setattr(recovery, "SLOW_LINK_BYTES_PER_S", 100)  # rows of 16 bytes stand for those of 8 KiB
    monkeypatch.setattr(route_session, "FEED_AHEAD_BYTES", 8 * 1024)
    monkeypatch.setattr(route_session, "FEED_TOGETHER_BYTES", 32 * 1024)
    async with open_swarm((0, 4), (0, 4), (4, 8)) as swarm:
        server = await swarm.serve("liar", HashRunner(0, 4), speed=FAST)
        swarm.devices["liar"].seconds = 0.001

        async def attend(stream: MemoryStream) -> None:
            await server.attend(DeafStream(stream))

        swarm.fabric.nodes["liar"].accept(PROTOCOL, attend)
        asker = await swarm.asker()
        for number in range(4 if is_known else 0):
            assert (await ask(asker, numbered(30, number), 4)).route[0].peer == "liar"
        begin = trio.current_time()
        assert await replies_with_patience(asker, 1000, patience_s, 5) >= 4
        assert trio.current_time() - begin < 100 + 5 * 5, "one of them waited"
        assert "liar" in asker.planner.measured.block_s(trio.current_time())


# --- seconds that pass beside the tokens ------------------------------------------------------------------------------


class Delays(NamedTuple):
    """How a hop that computes fast makes replies long all the same."""

    ready_s: float = 0.0  # until it says that it has begun an epoch
    excuses: int = 0  # in each 18 tokens: fewer than count as a failure
    second_s: float = 0.0  # for which it keeps the second token of each session back
    takes_back: bool = False  # after each output, that it knows revisions


class DelayingStream:
    """The stream of an honest server whose frames go out with these delays."""

    def __init__(self, stream: MemoryStream, nursery: trio.Nursery, delays: Delays) -> None:
        self._stream, self._nursery, self._delays, self.peer = stream, nursery, delays, stream.peer
        self._smooth = Counter[bytes]()  # session -> outputs since the last excuse, and
        self._excuses = Counter[bytes]()  # excuses since the last smooth stretch
        self._sent = Counter[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, message: Any, priority: int = 0) -> None:
        body = b"".join(message) if isinstance(message, tuple) else bytes(message)
        frame = decode(body)
        wait_s = 0.0
        if frame.kind == Kind.READY:
            wait_s = self._delays.ready_s
        elif frame.kind == Kind.DATA:
            if self._has_excuse(frame.session):
                body = encode_hop_error(frame.session, frame.epoch, 0, HopError("closed", "not now"))
            self._sent[frame.session] += 1
            wait_s = self._delays.second_s if self._sent[frame.session] == 2 else 0.0
        if wait_s:
            self._nursery.start_soon(self._send_later, body, priority, wait_s)
        else:
            await self._stream.send(body, priority)
        if frame.kind == Kind.DATA and self._delays.takes_back:
            end = frame.position + frame.rows
            await self._stream.send(plain(Kind.READY, frame.session, frame.epoch, end, end - 1))

    def _has_excuse(self, session: bytes) -> bool:
        self._smooth[session] += 1
        if self._smooth[session] == 18:
            self._smooth[session] = self._excuses[session] = 0
        if self._smooth[session] < 2 or self._excuses[session] == self._delays.excuses:
            return False
        self._smooth[session] = 0
        self._excuses[session] += 1
        return True

    async def _send_later(self, body: bytes, priority: int, wait_s: float) -> None:
        await trio.sleep(wait_s)
        with suppress(P2PError):
            await self._stream.send(body, priority)


async def serve_delaying(swarm: SessionSwarm, delays: Delays) -> Asker:
    """Let a hop that claims to be the fastest join, with these delays; returns an asker that knows the others."""
    asker = await swarm.asker(guesser=lambda *_: None)
    await ask(asker, numbered(40), 4)
    server = await swarm.serve("liar", HashRunner(4, 8), speed=FAST)

    async def attend(stream: MemoryStream) -> None:
        await server.attend(DelayingStream(stream, swarm.nursery, delays))

    swarm.fabric.nodes["liar"].accept(PROTOCOL, attend)
    await swarm.fabric.dial(swarm.fabric.nodes["asker"], "liar")  # it shows that it is near
    return asker


@pytest.mark.parametrize(
    ("delays", "most_s"), [(Delays(4.8), 12), (Delays(4.8, excuses=3), 28), (Delays(second_s=9.0), 16)]
)
async def test_a_hop_that_makes_replies_long_beside_their_tokens_has_few_of_them(
    autojump_clock: MockClock, delays: Delays, most_s: float
) -> None:
    """Each reply took so much longer, and no measured token did: the next one came to the same hop."""
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        asker = await serve_delaying(swarm, delays)
        begin = trio.current_time()
        for number in range(4):
            stats = await ask(asker, numbered(40, number), 30)
            assert stats.token_ids == greedy(numbered(40, number), 30)
        assert trio.current_time() - begin < most_s, "one of them alone was long"
        await trio.sleep(70)  # it is tried again now and then
        begin = trio.current_time()
        for number in range(4):
            await ask(asker, numbered(40, number), 30)
        assert trio.current_time() - begin < most_s, "one of them tried it again"
        assert not {"n0", "n1", "n2"} & asker.bans.active(begin).keys()


async def test_clients_that_give_up_while_a_hop_begins_do_not_meet_it_each_time(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        asker = await serve_delaying(swarm, Delays(4.8))
        assert await replies_with_patience(asker, 40, 3.0, 8) >= 7


async def test_a_hop_that_takes_back_that_it_knows_revisions_begins_no_epochs(autojump_clock: MockClock) -> None:
    """Each wrong guess would begin one."""
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await serve_delaying(swarm, Delays(takes_back=True))
        async with asker.session(100) as session:
            await session.advance(numbered(40))
            assert session.route[-1].peer == "liar"
            for number in range(8):
                await session.advance([number], guesses=(1, 2, 3))
                session.cut(41 + number)
            assert session.epoch == 1
