"""Sessions under bad schedules: frames doubled, held back, lost or come from the past, hops that die, freeze and wake.

Whatever the schedule, the reply is the undisturbed one: never a wrong cache, never a wrong token, never a leak.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from app.asker.asker import Asker
from app.asker.kept_sessions import KEEP_S
from app.core.network import FrameStream, Payload, Priority
from app.core.span import Span
from app.session.frame import HopError, header, plain
from app.session.wire import PROTOCOL, EpochOrder, Kind, decode, encode_hop_error, encode_turn
from p2p.errors import P2PError
from p2p.memory.fabric import MemoryNode
from tests.app.hash_model import ROW_BYTES, WIDTH, greedy, last_hidden
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, bar, no_leaks, open_swarm

PAIRS = ((0, 3), (3, 6), (6, 8), (0, 3), (3, 6), (6, 8))
TOKENS = 10
Fault = Literal["double", "hold", "lose", "past"]


class Meddler:
    """Stands on every session stream that a node opens, and does to the n-th frame what the schedule says."""

    def __init__(self, schedule: dict[int, tuple[Fault, int]]) -> None:
        self._schedule = schedule
        self._count = 0
        self._held: list[tuple[int, FrameStream, bytes, Priority]] = []

    def stand_between(self, node: MemoryNode) -> None:
        usual = node.open

        async def opened(peer: str, protocol: str, **options: Any) -> Any:
            stream = await usual(peer, protocol, **options)
            return MeddledStream(stream, self) if protocol == PROTOCOL else stream

        node.open = opened  # type: ignore[method-assign]

    async def send(self, stream: FrameStream, message: bytes, priority: Priority, past: list[bytes]) -> None:
        self._count += 1
        fault, number = self._schedule.get(self._count, ("", 0))
        is_data = decode(message).kind == Kind.DATA
        past.append(message)
        if fault == "hold" and is_data:
            self._held.append((self._count + number, stream, message, priority))
        elif not (
            fault == "lose" and is_data
        ):  # a reliable stream loses nothing but by breaking; orders would time out
            await stream.send(message, priority)
        if fault == "double":
            await stream.send(message, priority)
        if fault == "past":
            await stream.send(past[number % len(past)], priority)
        due = [held for held in self._held if held[0] <= self._count]
        self._held = [held for held in self._held if held[0] > self._count]
        for _, late_stream, late, late_priority in due:
            try:
                await late_stream.send(late, late_priority)
            except P2PError:
                pass


class MeddledStream:
    """A stream whose frames pass through the meddler."""

    def __init__(self, stream: FrameStream, meddler: Meddler) -> None:
        self._stream, self._meddler = stream, meddler
        self._past: list[bytes] = []
        self.peer = stream.peer
        self.receive, self.wait_room, self.is_clear = stream.receive, stream.wait_room, stream.is_clear
        self.aclose, self.reset = stream.aclose, stream.reset

    async def send(self, message: Payload, priority: Priority = Priority.DECODE) -> None:
        body = message if isinstance(message, bytes) else b"".join(message)  # type: ignore[arg-type]
        await self._meddler.send(self._stream, body, priority, self._past)


faults = st.dictionaries(
    st.integers(1, 120), st.tuples(st.sampled_from(["double", "hold", "lose", "past"]), st.integers(1, 12)), max_size=12
)
events = st.lists(
    st.tuples(
        st.integers(1, TOKENS - 1), st.sampled_from(["kill", "freeze", "resume", "drain", "part"]), st.integers(0, 5)
    ),
    max_size=4,
)


def happen(swarm: SessionSwarm, what: str, name: str) -> None:
    """Let something happen to a node, so that every block is still served by somebody."""
    twin = f"n{(int(name[1]) + 3) % 6}"
    nodes = swarm.fabric.nodes
    whole = twin in nodes and not nodes[twin].frozen and not swarm.servers[twin].draining
    if what == "kill" and name in nodes and whole:
        swarm.kill(name)
    elif what == "freeze" and name in nodes and whole:
        swarm.fabric.freeze(name)
    elif what == "resume":
        for node in nodes.values():
            if node.frozen:
                swarm.fabric.resume(node.peer_id)
    elif what == "drain" and name in nodes and whole:
        swarm.servers[name].draining = True
        swarm.nursery.start_soon(swarm.servers[name].drain)
        swarm.announcements[name] = replace(swarm.announcements[name], state="draining")
    elif what == "part" and name in nodes:
        swarm.nursery.start_soon(nodes[name].disconnect, "asker")


async def disturbed_reply(
    schedule: dict[int, tuple[Fault, int]], happenings: Sequence[tuple[int, str, int]]
) -> list[int]:
    async with meddled_swarm(schedule) as (swarm, asker):
        async with asker.reply(PROMPT, TOKENS, max_tokens=TOKENS) as reply:
            async for _ in reply:
                for at, what, number in happenings:
                    if at == len(reply.stats.token_ids):
                        happen(swarm, what, f"n{number}")
        return reply.stats.token_ids


@asynccontextmanager
async def meddled_swarm(
    schedule: dict[int, tuple[Fault, int]], keep: int = 0
) -> AsyncIterator[tuple[SessionSwarm, Asker]]:
    """A swarm whose frames are meddled with; what happens in it must end in good time and leave nothing behind."""
    async with open_swarm(*PAIRS) as swarm:
        meddler = Meddler(schedule)
        asker = await swarm.asker(keep=keep)
        for node in swarm.fabric.nodes.values():
            meddler.stand_between(node)
        with trio.fail_after(300):
            yield swarm, asker
        await trio.sleep(60 + (2 * KEEP_S if keep else 0))
        for node in swarm.fabric.nodes.values():
            if node.frozen:
                swarm.fabric.resume(node.peer_id)
        await no_leaks(swarm)


@settings(max_examples=60)
@given(faults, events)
def test_no_schedule_changes_a_reply(
    schedule: dict[int, tuple[Fault, int]], happenings: list[tuple[int, str, int]]
) -> None:
    tokens = trio.run(disturbed_reply, schedule, happenings, clock=MockClock(autojump_threshold=0))
    assert tokens == greedy(PROMPT, TOKENS)


@settings(max_examples=60)
@given(faults, events, st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), min_size=3, max_size=TOKENS))
def test_no_schedule_mixes_tokens_that_were_taken_back_with_those_that_came_instead(
    schedule: dict[int, tuple[Fault, int]], happenings: list[tuple[int, str, int]], feeds: list[tuple[int, int]]
) -> None:
    async def run() -> None:
        async with meddled_swarm(schedule) as (swarm, asker), asker.session(200) as session:
            history: list[int] = []
            for turn, (count, taken_back) in enumerate(feeds):
                for at, what, number in happenings:
                    if at == turn:
                        happen(swarm, what, f"n{number}")
                new = [1000 * turn + index for index in range(count)]
                history += new
                frame = await session.advance(new)
                assert bytes(frame.body[-ROW_BYTES:]) == last_hidden(history), turn
                if taken_back:
                    del history[max(len(history) - taken_back, 0) :]
                    session.cut(len(history))

    trio.run(run, clock=MockClock(autojump_threshold=0))


class Misfortune(NamedTuple):
    """Something that happens to the victim among two holders of the same blocks, at a time since the reply began."""

    at_s: float
    pair: int
    what: Literal["freeze", "kill", "part"]
    seconds: float


misfortunes = st.lists(
    st.builds(
        Misfortune,
        st.floats(0, 2),
        st.integers(0, 2),
        st.sampled_from(["freeze", "freeze", "freeze", "kill", "part"]),
        st.floats(0.01, 20),
    ),
    max_size=8,
)
LONG_PROMPT = list(range(300))  # more than one chunk


async def befall(swarm: SessionSwarm, victim: str, misfortune: Misfortune) -> None:
    """Let a misfortune happen in its time; a frozen node wakes again after some seconds."""
    await trio.sleep(misfortune.at_s)
    node = swarm.fabric.nodes.get(victim)
    if node is None:
        return
    if misfortune.what == "kill":
        swarm.kill(victim)
    elif misfortune.what == "part":
        await node.disconnect("asker")
    elif not node.frozen:
        swarm.fabric.freeze(victim)
        await trio.sleep(misfortune.seconds)
        if victim in swarm.fabric.nodes:
            swarm.fabric.resume(victim)


@settings(max_examples=40)
@given(misfortunes, st.tuples(*[st.sampled_from([0, 3])] * 3), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_freezes_thaws_and_deaths_change_no_token_and_no_other_hop_is_blamed(
    happenings: list[Misfortune], sides: tuple[int, ...], unreachable: set[tuple[int, int]]
) -> None:
    """Some hops cannot reach each other, either, so that their outputs go through the asker."""

    async def run() -> None:
        async with open_swarm(*PAIRS) as swarm:
            asker = await swarm.asker()
            victims = [f"n{pair + side}" for pair, side in enumerate(sides)]
            for number, barred in unreachable:
                bar(swarm.fabric.nodes[f"n{number}"], f"n{barred}")
            blamed: set[str] = set()
            for happening in happenings:
                swarm.nursery.start_soon(befall, swarm, victims[happening.pair], happening)
            with trio.fail_after(300):
                async with asker.reply(LONG_PROMPT, 40, max_tokens=40) as reply:
                    async for _ in reply:
                        blamed |= set(asker.bans.active(trio.current_time()))
            assert reply.stats.token_ids == UNDISTURBED
            assert blamed <= {victims[happening.pair] for happening in happenings}
            await trio.sleep(60)
            await no_leaks(swarm)

    trio.run(run, clock=MockClock(autojump_threshold=0))


UNDISTURBED = greedy(LONG_PROMPT, 40)


async def test_strangers_change_nothing(autojump_clock: MockClock) -> None:
    """A peer that knows the session's id, and even the epoch, is dropped unless it is the predecessor or the asker."""
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker, thief = await swarm.asker(), swarm.fabric.node("thief")
        async with asker.reply(PROMPT, TOKENS, max_tokens=TOKENS) as reply:
            async for _ in reply:
                for name, server in swarm.servers.items():
                    (session,) = server._sessions.values()
                    stream = await thief.open(name, PROTOCOL)
                    for epoch in (session.epoch, session.epoch + 1):
                        for message in forgeries(session.id, epoch, session.length):
                            await stream.send(message)
        assert reply.stats.token_ids == greedy(PROMPT, TOKENS)
        assert reply.stats.recoveries == 0
        await no_leaks(swarm)


def forgeries(session: bytes, epoch: int, position: int) -> list[bytes]:
    """All that a stranger might try."""
    turn = EpochOrder(Span(0, 4), "thief", "thief", 100, 0, 0)
    head = header(Kind.DATA, session, epoch, position, dtype=1, rows=1, width=WIDTH, length=ROW_BYTES)
    return [
        head + bytes(ROW_BYTES),
        encode_turn(session, epoch, 0, turn),
        plain(Kind.GO, session, epoch, 0),
        plain(Kind.CLOSE, session, epoch + 1),
        plain(Kind.READY, session, epoch, 7),
        encode_hop_error(session, epoch, 0, HopError("failed", "not true")),
    ]


async def test_a_bad_frame_costs_its_sender_the_stream_and_nobody_else(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker, thief = await swarm.asker(), swarm.fabric.node("thief")
        stream = await thief.open("n0", PROTOCOL)
        await stream.send(b"not a frame")
        with trio.move_on_after(1) as waited:
            try:
                await stream.receive()
            except P2PError:
                pass
        assert not waited.cancelled_caught
        stats = await ask(asker, PROMPT, 4)
        assert stats.token_ids == greedy(PROMPT, 4)
