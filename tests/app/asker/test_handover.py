"""A hop that leaves hands its cache over: the same tokens, and next to nothing is read again.

Whatever the old hop sends, or does not send, the reply is the undisturbed one: wrong pages are refused, and what is
missing is read again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from app.asker import route_session
from app.asker.asker import Asker
from app.asker.recovery import cache_sources
from app.asker.reply import ReplyStats
from app.core.network import FrameStream, Payload, Priority
from app.core.span import Span
from app.routing.route import Hop
from app.serving import block_server, handover
from app.serving.handover import CacheTaker, is_faster
from app.session.cache_wire import PROTOCOL, encode_answer
from p2p.memory.fabric import LinkProfile
from tests.app.asker.test_session_schedules import TOKENS, Fault, disturbed_reply, events, faults
from tests.app.asker.test_survival import PAIRS, prefer_first_three
from tests.app.hash_model import ROW_BYTES, HashRunner, greedy, last_hidden
from tests.app.session_swarm import PROMPT, SessionSwarm, no_leaks, open_swarm

LONG_PROMPT = list(range(1000, 1600))
COUNT = 12
REPLY = greedy(LONG_PROMPT, COUNT)
Handler = Callable[[FrameStream], Awaitable[None]]


@pytest.mark.parametrize(
    ("arrived", "seconds", "read_tokens_per_s", "faster"),
    [
        (0, 0.0, 1000.0, True),
        (0, 0.29, 1e9, True),  # too early to tell
        (0, 0.3, 1.0, False),
        (100, 1.0, 99.0, True),
        (100, 1.0, 100.0, False),
        (100, 1.0, 5000.0, False),
        (4000, 2.0, 1999.0, True),
        (4000, 2.1, 1999.0, False),
    ],
)
def test_a_cache_is_fetched_while_it_comes_faster_than_it_is_read(
    arrived: int, seconds: float, read_tokens_per_s: float, faster: bool
) -> None:
    assert is_faster(arrived, seconds, read_tokens_per_s) is faster


def hop(peer: str, start: int, stop: int) -> Hop:
    return Hop(peer, Span(start, stop))


@pytest.mark.parametrize(
    ("new", "givers", "sources"),
    [
        ((hop("a", 0, 4), hop("c", 4, 8)), {"b"}, {"c": "b"}),
        ((hop("a", 0, 4), hop("c", 4, 6), hop("d", 6, 8)), {"b"}, {"c": "b", "d": "b"}),
        ((hop("c", 0, 8),), {"a", "b"}, {}),  # none of them has all blocks
        ((hop("a", 0, 5), hop("c", 5, 8)), {"b"}, {"c": "b"}),
        ((hop("a", 0, 8),), {"b"}, {}),  # it has more than what b gives
        ((hop("a", 0, 4), hop("b", 4, 8)), {"b"}, {}),
        ((hop("a", 0, 6), hop("b", 6, 8)), {"a", "b"}, {}),  # both stay
        ((hop("c", 0, 4), hop("d", 4, 8)), {"b"}, {"d": "b"}),  # a has failed
        ((hop("a", 0, 4), hop("c", 4, 8)), set(), {}),
    ],
)
def test_who_gives_a_new_hop_its_cache(new: tuple[Hop, ...], givers: set[str], sources: dict[str, str]) -> None:
    assert cache_sources((hop("a", 0, 4), hop("b", 4, 8)), new, givers) == sources


def leave(swarm: SessionSwarm, name: str) -> None:
    """Let a node drain."""
    swarm.nursery.start_soon(swarm.servers[name].drain)
    swarm.announcements[name] = replace(swarm.announcements[name], state="draining")


async def leaving_reply(swarm: SessionSwarm, victim: str, asker: Asker | None = None) -> ReplyStats:
    """A reply to a long prompt in which a hop leaves behind the fifth token; checks its tokens."""
    asker = asker or await swarm.asker()
    with trio.fail_after(120):
        async with asker.reply(LONG_PROMPT, COUNT, max_tokens=COUNT) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 5:
                    assert victim in {hop.peer for hop in reply.stats.route}
                    leave(swarm, victim)
    assert reply.stats.token_ids == REPLY
    assert victim not in {hop.peer for hop in reply.stats.route}
    return reply.stats


def computed(runner: HashRunner) -> int:
    """Tokens that went through a runner's blocks."""
    return sum(rows for batch in runner.batches for _, _, rows in batch)


@pytest.mark.parametrize("victim", ["n0", "n1", "n2"])
async def test_a_leaving_hop_gives_its_cache_to_the_one_that_takes_its_place(
    autojump_clock: MockClock, victim: str
) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        stats = await leaving_reply(swarm, victim)
        new = swarm.runners[f"n{int(victim[1]) + 3}"]
        assert new.imported == swarm.runners[victim].exported >= len(LONG_PROMPT) + 4
        assert computed(new) <= COUNT
        assert stats.longest_gap_s < 0.3
        assert not swarm.servers[victim].sessions, "it may go"
        await no_leaks(swarm)


async def test_a_smaller_span_takes_its_part_of_the_cache(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8), (0, 5), (5, 8)) as swarm:
        swarm.announcements["n0"] = replace(swarm.announcements["n0"], decode_tokens_per_s=1e4)
        await leaving_reply(swarm, "n0")
        for name in ("n1", "n2"):
            assert swarm.runners[name].imported >= len(LONG_PROMPT)
            assert computed(swarm.runners[name]) <= COUNT
        await no_leaks(swarm)


async def test_blocks_that_are_given_back_hand_their_sessions_over(autojump_clock: MockClock) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        asker, done = await swarm.asker(), trio.Event()

        async def give_back() -> None:
            swarm.announcements["n1"] = replace(swarm.announcements["n1"], span=Span(3, 4))

            async def shrink() -> None:
                swarm.runners["n1"].stop = 4

            await swarm.servers["n1"].shrink(Span(3, 4), shrink)
            done.set()

        async with asker.reply(LONG_PROMPT, COUNT, max_tokens=COUNT) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 5:
                    swarm.nursery.start_soon(give_back)
        assert reply.stats.token_ids == REPLY
        assert done.is_set()
        assert swarm.runners["n4"].imported >= len(LONG_PROMPT)
        assert computed(swarm.runners["n4"]) <= COUNT
        await no_leaks(swarm)


async def test_blocks_are_given_back_in_time_though_nobody_can_take_their_sessions(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker()
        async with asker.reply(LONG_PROMPT, COUNT, max_tokens=COUNT) as reply:
            for _ in range(5):
                await anext(reply)
            begin = trio.current_time()

            async def shrink() -> float:
                swarm.runners["n1"].stop = 7
                return trio.current_time() - begin

            assert await swarm.servers["n1"].shrink(Span(4, 7), shrink) <= block_server.SHRINK_S + 0.1
            assert not swarm.servers["n1"].sessions


async def test_a_reply_that_waits_for_lost_blocks_does_not_hold_up_the_hop_that_will_host_them(
    autojump_clock: MockClock,
) -> None:
    """The hop had to drain before it could load more blocks, and waited 30 s for a session that waited for them."""
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker()

        async def take_over() -> None:
            await trio.sleep(3.0)
            swarm.announcements["n1"] = replace(swarm.announcements["n1"], state="draining")
            begin = trio.current_time()
            assert await swarm.servers["n1"].drain()
            assert trio.current_time() - begin < 1.0
            await swarm.servers["n1"].host(HashRunner(0, 8))
            swarm.announcements["n1"] = replace(swarm.announcements["n1"], state="serving", span=Span(0, 8))

        async with asker.reply(LONG_PROMPT, COUNT, max_tokens=COUNT) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 5:
                    swarm.announcements.pop("n0")
                    swarm.kill("n0")
                    swarm.nursery.start_soon(take_over)
        assert reply.stats.token_ids == REPLY
        assert reply.stats.longest_gap_s < 6.0
        await trio.sleep(1.0)
        assert swarm.servers["n1"].sessions == 0


async def test_a_hop_that_leaves_carries_a_reply_on_for_want_of_another(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker()
        async with asker.reply(LONG_PROMPT, COUNT, max_tokens=COUNT) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 5:
                    leave(swarm, "n1")
        assert reply.stats.token_ids == REPLY
        assert computed(swarm.runners["n1"]) < len(LONG_PROMPT) + 2 * COUNT, "nothing was read again"
        assert reply.stats.longest_gap_s < 1.0


async def test_an_answer_is_also_that_of_the_hop_whose_cache_was_taken(autojump_clock: MockClock) -> None:
    """A hop leaves while it reads the prompt, before any answer: an audit must know that it took part."""
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        asker, last = await swarm.asker(), swarm.runners["n2"]
        usual = last.step

        def step(work: Any) -> Any:
            if computed(last) >= 256 and not swarm.servers["n1"].draining:
                leave(swarm, "n1")
            return usual(work)

        last.step = step
        async with asker.reply(LONG_PROMPT, COUNT, max_tokens=COUNT) as reply:
            async for _ in reply:
                pass
        assert reply.stats.token_ids == REPLY
        assert swarm.runners["n4"].imported > 200
        assert {"n1", "n4"} <= {hop.peer for route in reply.sampler.routes for hop in route}
        await no_leaks(swarm)


async def test_a_cache_goes_from_hop_to_hop(autojump_clock: MockClock) -> None:
    """The second hop gives on what it took itself."""
    async with open_swarm((0, 4), (4, 8), (4, 8), (4, 8)) as swarm:
        for name, speed in (("n1", 1e4), ("n2", 1e3)):
            swarm.announcements[name] = replace(swarm.announcements[name], decode_tokens_per_s=speed)
        asker = await swarm.asker()
        async with asker.reply(LONG_PROMPT, COUNT, max_tokens=COUNT) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) in (3, 7):
                    leave(swarm, reply.stats.route[1].peer)
        assert reply.stats.token_ids == REPLY
        assert computed(swarm.runners["n2"]) + computed(swarm.runners["n3"]) <= COUNT
        await no_leaks(swarm)


# --- old hops that are hostile, old or gone ---------------------------------------------------------------------------


class TamperedStream:
    """A stream whose outgoing messages are changed."""

    def __init__(self, stream: FrameStream, change: Callable[[int, bytes], bytes | None]) -> None:
        self._stream, self._change, self._count = stream, change, 0
        self.peer, self.receive = stream.peer, stream.receive
        self.wait_room, self.is_clear = stream.wait_room, stream.is_clear
        self.aclose, self.reset = stream.aclose, stream.reset

    async def send(self, message: Payload, priority: Priority = Priority.DECODE) -> None:
        """Send the changed message; None stands for none at all, and for silence from then on."""
        body = message if isinstance(message, bytes) else b"".join(message)  # type: ignore[arg-type]
        changed = self._change(self._count, body)
        self._count += 1
        if changed is None:
            await trio.sleep_forever()
        else:
            await self._stream.send(changed, priority)


def flip(message: bytes, at: int) -> bytes:
    """Change one bit."""
    return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


WRONG: dict[str, Callable[[int, bytes], bytes | None]] = {
    "a wrong page": lambda n, message: flip(message, 5000) if n == 2 else message,
    "a wrong hash": lambda n, message: flip(message, 20) if n == 1 else message,
    "a wrong position": lambda n, message: flip(message, 0) if n == 1 else message,
    "a page too long": lambda n, message: message + b"0" if n == 1 else message,
    "a page cut off": lambda n, message: message[:-1] if n == 2 else message,
    "no page": lambda n, message: b"" if n == 1 else message,
    "an odd answer": lambda n, message: b'{"v":1,"tokens":-1}' if n == 0 else message,
    "more than was asked for": lambda n, message: encode_answer(10**6) if n == 0 else message,
    "no JSON": lambda n, message: b"\xff" * 50 if n == 0 else message,
    "silence": lambda n, message: None,
    "silence in the middle": lambda n, message: None if n == 2 else message,
}


def tamper(swarm: SessionSwarm, name: str, change: Callable[[int, bytes], bytes | None]) -> None:
    """Let a node change what it sends of its cache."""
    giver = swarm.servers[name]._giver

    async def attend(stream: FrameStream) -> None:
        await giver.attend(TamperedStream(stream, change))

    swarm.fabric.nodes[name].accept(PROTOCOL, attend)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few dozen tokens in each chunk."""
    monkeypatch.setattr("app.session.cache_wire.CHUNK_BYTES", 8192)


@pytest.mark.parametrize("what", WRONG)
async def test_what_is_wrong_is_refused_and_read_again(
    autojump_clock: MockClock, small_chunks: None, what: str
) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        tamper(swarm, "n1", WRONG[what])
        stats = await leaving_reply(swarm, "n1")
        new = swarm.runners["n4"]
        if "silence" not in what:
            assert computed(new) >= len(LONG_PROMPT), "nothing of what a liar sent is used"
        assert stats.longest_gap_s < 2
        assert [hop.peer for hop in stats.route] == ["n0", "n4", "n2"]
        await no_leaks(swarm)


async def endless(stream: FrameStream) -> None:
    """Send for ever."""
    await stream.receive()
    await stream.send(encode_answer(len(LONG_PROMPT)), Priority.CONTROL)
    while True:
        await handover._send(stream, bytes(100))


async def flood(stream: FrameStream) -> None:
    """Send one page that is far too large."""
    await stream.receive()
    await stream.send(encode_answer(len(LONG_PROMPT)), Priority.CONTROL)
    await handover._send(stream, bytes(32 * 2**20))
    await trio.sleep_forever()


async def mute(stream: FrameStream) -> None:
    """Never answer."""
    await trio.sleep_forever()


@pytest.mark.parametrize("hostile", [endless, flood, mute])
async def test_an_old_hop_that_answers_otherwise_costs_little_time(autojump_clock: MockClock, hostile: Handler) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        swarm.fabric.nodes["n1"].accept(PROTOCOL, hostile)
        stats = await leaving_reply(swarm, "n1")
        assert computed(swarm.runners["n4"]) >= len(LONG_PROMPT)
        assert stats.longest_gap_s < 2
        await no_leaks(swarm)


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("dies", ["n1", "n4"])
async def test_either_hop_dies_in_the_middle(
    autojump_clock: MockClock, small_chunks: None, dies: str, after_s: float
) -> None:
    async with open_swarm(*PAIRS, (3, 6)) as swarm:
        prefer_first_three(swarm)
        swarm.announcements["n6"] = replace(swarm.announcements["n6"], decode_tokens_per_s=1.0)
        asker = await swarm.asker()

        async def die() -> None:
            await trio.sleep(after_s)
            swarm.kill(dies)

        async with asker.reply(LONG_PROMPT, COUNT, max_tokens=COUNT) as reply:
            async for _ in reply:
                if len(reply.stats.token_ids) == 5:
                    leave(swarm, "n1")
                    swarm.nursery.start_soon(die)
        assert reply.stats.token_ids == REPLY
        assert reply.stats.longest_gap_s < 8
        await no_leaks(swarm)


async def test_a_reply_that_ends_while_its_cache_is_on_its_way_leaves_nothing(
    autojump_clock: MockClock, small_chunks: None
) -> None:
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        asker, new, scope = await swarm.asker(), swarm.runners["n4"], trio.CancelScope()
        usual = new.import_cache

        def import_and_end(*chunk: Any) -> None:
            usual(*chunk)
            scope.cancel()

        new.import_cache = import_and_end
        async with asker.reply(LONG_PROMPT, COUNT, max_tokens=COUNT) as reply:
            with scope:
                async for _ in reply:
                    if len(reply.stats.token_ids) == 5:
                        leave(swarm, "n1")
        assert scope.cancelled_caught
        await trio.sleep(0.1)
        assert 0 < swarm.runners["n4"].imported < len(LONG_PROMPT)
        assert not swarm.servers["n4"]._fetches
        await no_leaks(swarm)


async def test_a_slow_link_is_given_up_and_what_came_is_kept(autojump_clock: MockClock, small_chunks: None) -> None:
    """A node that reads 1000 tokens a second gets 48 bytes of cache a token at 40 kB a second."""
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        swarm.fabric.set_link("n1", "n4", LinkProfile(bytes_per_s=4e4))
        stats = await leaving_reply(swarm, "n1")
        assert 0 < swarm.runners["n4"].imported < len(LONG_PROMPT)
        assert swarm.runners["n4"].imported + computed(swarm.runners["n4"]) <= len(LONG_PROMPT) + COUNT
        assert stats.longest_gap_s < 2.5
        await no_leaks(swarm)


async def test_a_long_fetch_is_waited_for(autojump_clock: MockClock, small_chunks: None) -> None:
    """Reading would take far longer: the asker asks the new hop for signs of life and waits."""
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        swarm.servers["n4"]._prompt_tokens_per_s = 20.0
        swarm.fabric.set_link("n1", "n4", LinkProfile(bytes_per_s=3e3))
        stats = await leaving_reply(swarm, "n1")
        assert swarm.runners["n4"].imported >= len(LONG_PROMPT)
        assert 5 < stats.longest_gap_s < 15
        assert stats.recoveries == 1
        await no_leaks(swarm)


async def test_a_hop_of_another_form_reads_again(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherForm(HashRunner):
        cache_format = "other hashes"

    async with open_swarm((0, 4), (4, 8)) as swarm:
        await swarm.serve("n2", OtherForm(4, 8), speed=10.0)
        await leaving_reply(swarm, "n1")
        assert (swarm.runners["n1"].exported, swarm.runners["n2"].imported) == (0, 0)
        await no_leaks(swarm)


async def test_hops_that_know_nothing_of_it_work_as_before(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "GIVES_CACHE", 0)
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        sent: list[Any] = []
        monkeypatch.setattr(route_session, "encode_give", lambda *order: sent.append(order))
        await leaving_reply(swarm, "n1")
        assert not sent, "an old hop would close the stream"
        assert swarm.runners["n4"].imported == 0
        await no_leaks(swarm)


async def test_a_new_hop_that_ignores_the_order_reads_again(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheTaker, "reserve", lambda self, session: None)
    async with open_swarm(*PAIRS) as swarm:
        prefer_first_three(swarm)
        stats = await leaving_reply(swarm, "n1")
        assert swarm.runners["n4"].imported == 0
        assert stats.longest_gap_s < 0.5
        await no_leaks(swarm)


# --- any schedule -----------------------------------------------------------------------------------------------------


@contextmanager
def every_cache_moves() -> Iterator[None]:
    """Hand over caches of a single token, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route_session, "MIN_TOKENS", 1)
        patch.setattr(handover, "MIN_TOKENS", 1)
        patch.setattr("app.session.cache_wire.CHUNK_BYTES", 500)
        yield


@settings(max_examples=60)
@given(faults, events)
def test_no_schedule_changes_a_reply_whose_cache_moves(
    schedule: dict[int, tuple[Fault, int]], happenings: list[tuple[int, str, int]]
) -> None:
    moving = [(at, "drain" if what == "part" else what, number) for at, what, number in happenings]
    with every_cache_moves():
        tokens = trio.run(disturbed_reply, schedule, moving, clock=MockClock(autojump_threshold=0))
    assert tokens == greedy(PROMPT, TOKENS)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 8), st.integers(-1, 2)), min_size=3, max_size=8),
    st.sampled_from([0.0, 0.01, 0.3]),
)
def test_tokens_that_were_taken_back_do_not_move(feeds: list[tuple[int, int, int]], pause_s: float) -> None:
    """Cut, feed, and let hops leave in any order: what the next hop begins with is what was not taken back."""

    async def run() -> None:
        async with open_swarm(*PAIRS) as swarm:
            asker = await swarm.asker()
            async with asker.session(400) as session:
                history: list[int] = []
                for turn, (count, taken_back, leaves) in enumerate(feeds):
                    names = [f"n{leaves}", f"n{leaves + 3}"]
                    if leaves >= 0 and not any(swarm.servers[name].draining for name in names):
                        route = {hop.peer for hop in session.route}
                        leave(swarm, names[0] if names[0] in route else names[1])
                    await trio.sleep(pause_s)  # the asker hears of it before the next tokens, with them or after them
                    new = [1000 * turn + index for index in range(count)]
                    history += new
                    frame = await session.advance(new)
                    assert bytes(frame.body[-ROW_BYTES:]) == last_hidden(history), turn
                    if taken_back:
                        del history[max(len(history) - taken_back, 0) :]
                        session.cut(len(history))
            await no_leaks(swarm)

    with every_cache_moves():
        trio.run(run, clock=MockClock(autojump_threshold=0))
