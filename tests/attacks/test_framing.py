"""A hop that lies about what it sends or receives is found out itself; the honest hops around it are not blamed.

Holders of a job that tell the same lie do not have others convicted of it either.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy
import pytest
import trio
from trio.testing import MockClock

from app.asker import route_session
from app.core.network import FrameStream
from app.routing.trust import TrustBook
from app.serving import block_server
from app.serving.block_server import ServerSettings
from app.serving.hop_session import HopSession
from app.session.frame import Frame, HopError, header, plain
from app.session.wire import PROTOCOL, EpochOrder, Kind, decode, encode_hop_error
from app.training.audits import Answer, AuditLots, Caution, judge
from app.training.trainer import JobHooks, Replicas
from engine.sources.tiny import open_tiny
from p2p.memory import link
from tests.app.hash_model import ROW_BYTES, WIDTH, HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm
from tests.app.training.job_swarm import ALL, UNHURRIED, Losses, batches_of, open_job_swarm

TOKENS = 4
LONG = list(range(3000))  # 48 KB of rows
SOON_S = 20.0

Lie = Callable[[SessionSwarm], Awaitable[None]]


async def claims_and_sends_nothing(swarm: SessionSwarm) -> None:
    """The hop begins every epoch, says that it has computed everything, and sends nothing."""

    async def claim(stream: FrameStream) -> None:
        while True:
            frame = decode(await stream.receive())
            if frame.kind == Kind.TURN:
                await stream.send(plain(Kind.READY, frame.session, frame.epoch))
            elif frame.kind == Kind.PROBE:
                await stream.send(plain(Kind.STATE, frame.session, frame.epoch, 2**24, 2**24))

    swarm.fabric.nodes["liar"].accept(PROTOCOL, claim)


async def sends_with_a_gap(swarm: SessionSwarm) -> None:
    """The hop computes well, but what it sends to its successor does not follow what it sent before."""

    async def leave_out(session: HopSession, position: int, data: bytes | memoryview) -> None:
        rows = len(data) // ROW_BYTES
        head = header(
            Kind.DATA, session.id, session.epoch, position + 7, dtype=1, rows=rows, width=WIDTH, length=len(data)
        )
        stream = await swarm.fabric.nodes["liar"].open(session.turn.successor, PROTOCOL)
        await stream.send(head + bytes(data))

    swarm.servers["liar"]._sender.send = leave_out  # type: ignore[method-assign]


async def leaves_out_the_first_row(swarm: SessionSwarm) -> None:
    """The hop computes well and sends all but the first row of a chunk, through the asker where it is told to."""
    sender = swarm.servers["liar"]._sender
    usual = sender.send

    async def leave_out(session: HopSession, position: int, data: bytes | memoryview) -> None:
        if len(data) > ROW_BYTES:
            await usual(session, position + 1, data[ROW_BYTES:])

    sender.send = leave_out  # type: ignore[method-assign]


LIES_TO_ITS_SUCCESSOR = [claims_and_sends_nothing, sends_with_a_gap, leaves_out_the_first_row]


async def denies_what_it_received(swarm: SessionSwarm) -> None:
    """The hop says that nothing has arrived."""

    async def deny(stream: FrameStream) -> None:
        while True:
            frame = decode(await stream.receive())
            if frame.kind == Kind.TURN:
                await stream.send(plain(Kind.READY, frame.session, frame.epoch))
            elif frame.kind == Kind.PROBE:
                await stream.send(plain(Kind.STATE, frame.session, frame.epoch))

    swarm.fabric.nodes["liar"].accept(PROTOCOL, deny)


async def calls_everything_a_gap(swarm: SessionSwarm) -> None:
    """The hop says of all that arrives that something before it is missing."""

    async def complain(stream: FrameStream) -> None:
        while True:
            frame = decode(await stream.receive())
            if frame.kind == Kind.TURN:
                await stream.send(plain(Kind.READY, frame.session, frame.epoch))
                error = HopError("gap", "tokens are missing")
                await stream.send(encode_hop_error(frame.session, frame.epoch, 0, error))

    swarm.fabric.nodes["liar"].accept(PROTOCOL, complain)


LIES_ABOUT_ITS_PREDECESSOR = [denies_what_it_received, calls_everything_a_gap]


async def banned_by_lies(swarm: SessionSwarm, liar: HashRunner, lie: Lie) -> set[str]:
    """Let a fast hop lie in several replies, which must be right and soon there; returns who was ever banned."""
    await swarm.serve("liar", liar, speed=5000.0)
    await lie(swarm)
    asker = await swarm.asker()
    banned: set[str] = set()
    for _ in range(6):
        began_at = trio.current_time()
        stats = await ask(asker, PROMPT, TOKENS)
        assert stats.token_ids == greedy(PROMPT, TOKENS)
        assert trio.current_time() - began_at < SOON_S
        banned |= set(asker.bans.active(trio.current_time()))
    return banned


@pytest.mark.parametrize("lie", LIES_TO_ITS_SUCCESSOR)
async def test_a_hop_that_withholds_its_outputs_is_blamed_itself(lie: Lie, autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8), (4, 8)) as swarm:
        assert await banned_by_lies(swarm, HashRunner(0, 4), lie) == {"liar"}


@pytest.mark.parametrize("lie", LIES_TO_ITS_SUCCESSOR)
async def test_a_hop_in_the_middle_that_withholds_its_outputs_is_blamed_itself(
    lie: Lie, autojump_clock: MockClock
) -> None:
    async with open_swarm((0, 3), (3, 6), (6, 8), (6, 8)) as swarm:
        assert await banned_by_lies(swarm, HashRunner(3, 6), lie) == {"liar"}


@pytest.mark.parametrize("lie", LIES_ABOUT_ITS_PREDECESSOR)
async def test_a_hop_that_denies_what_it_received_is_blamed_itself(lie: Lie, autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (0, 4), (4, 8)) as swarm:
        assert await banned_by_lies(swarm, HashRunner(4, 8), lie) == {"liar"}


async def test_a_hop_that_reads_nothing_from_its_predecessor_does_not_get_it_blamed(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predecessor computes no further than its link takes: the asker must not take that for standing still."""
    monkeypatch.setattr(link, "fits_window", lambda outstanding, cost, priority=0: outstanding < 4096)
    monkeypatch.setattr(block_server, "AHEAD_BYTES", 8 * 1024)
    async with open_swarm((0, 4), (0, 4), (4, 8)) as swarm:
        deaf = await swarm.serve("deaf", HashRunner(4, 8), speed=5000.0)

        async def attend_askers(stream: FrameStream) -> None:
            if stream.peer != "asker":
                await trio.sleep_forever()
            await deaf.attend(stream)

        swarm.fabric.nodes["deaf"].accept(PROTOCOL, attend_askers)
        asker = await swarm.asker()
        stats = await ask(asker, LONG, TOKENS)
        assert stats.token_ids == greedy(LONG, TOKENS)
        assert trio.current_time() < 45
        assert all(asker.planner.book.standing(peer).score == 1.0 for peer in ("n0", "n1"))


async def test_a_hop_that_denies_a_part_of_a_long_prompt_is_blamed_itself(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is not sent before all hops have that part, so its predecessor cannot have sent more."""
    monkeypatch.setattr(route_session, "UNCOMPUTED_BYTES", 512 * ROW_BYTES)
    async with open_swarm((0, 4), (0, 4), (4, 8)) as swarm:
        await swarm.serve("liar", HashRunner(4, 8), speed=5000.0)
        await denies_what_it_received(swarm)
        asker = await swarm.asker()
        stats = await ask(asker, LONG, TOKENS)
        assert stats.token_ids == greedy(LONG, TOKENS)
        assert set(asker.bans.active(trio.current_time())) == {"liar"}
        assert all(asker.planner.book.standing(peer).score == 1.0 for peer in ("n0", "n1"))


async def test_a_hop_that_forgets_more_than_it_is_told_to_is_blamed_itself(autojump_clock: MockClock) -> None:
    """Its predecessor keeps few outputs, so that it has to forget as much itself, again and again."""
    async with open_swarm((4, 8)) as swarm:
        honest = await swarm.serve("honest", HashRunner(0, 4), settings=ServerSettings(kept_bytes=0))
        liar = await swarm.serve("liar", HashRunner(4, 8), speed=5000.0)
        usual = liar._go_on

        def forget_more(session: HopSession, frame: Frame, turn: EpochOrder) -> HopSession | HopError:
            length = min(frame.position, session.length)
            return usual(session, frame._replace(position=length // 2), turn)

        liar._go_on = forget_more  # type: ignore[method-assign]
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 100, max_tokens=100) as reply:
            for count in range(100):
                await reply.__anext__()
                if count == 70:
                    assert all(session.kept.start > 0 for session in honest._sessions.values())
                    for session in list(liar._sessions.values()):
                        await liar._sender.report_error(session, "missing", "it needs another epoch")
        assert reply.stats.token_ids == greedy(PROMPT, 100)
        assert {peer for peer in swarm.servers if asker.planner.book.standing(peer).score < 1} == {"liar"}


# --- audits of a job --------------------------------------------------------------------------------------------------

RIGHT = numpy.ones(10, numpy.float32)


def found(honest: str, lying: str, homes: dict[str, str]) -> str | None:
    """Who is found to have lied, if holders of one letter each answer the same, or tell the same lie."""
    answers = [*(Answer(peer, RIGHT) for peer in honest), *(Answer(peer, -RIGHT) for peer in lying)]
    return judge(answers, homes, ()).liar


def at(homes: str) -> dict[str, str]:
    """The holders a, b, c, ... live at these homes, of one letter each."""
    return dict(zip("abcdefgh", homes, strict=False))


def test_only_more_than_half_of_all_holders_convict() -> None:
    assert found("c", "ab", at("1234")) is None  # one was not asked yet
    assert found("cd", "ab", at("1234")) is None
    assert found("cde", "a", at("12345")) == "a"
    assert found("cde", "ab", at("12345")) == "a"  # and the other one in the next audit


def test_holders_of_one_home_are_one_voice() -> None:
    assert found("d", "abc", at("1112")) is None
    assert found("de", "abc", at("11123")) == "a"
    unknown = dict.fromkeys("abc", "")
    assert found("d", "abc", {**unknown, "d": "1"}) is None


def test_a_home_that_contradicts_itself_has_no_voice() -> None:
    assert found("bc", "a", at("112")) is None
    assert found("bcd", "a", at("1123")) == "a"  # those of the other homes are enough


def test_no_peer_id_makes_a_holder_the_first_witness() -> None:
    lots, homes = AuditLots(Caution(), random.Random(0)), at("123455")
    orders = [lots.witnesses("f", "abcde", homes, ()) for _ in range(400)]
    firsts = Counter(order[0] for order in orders)
    assert firsts.keys() == {*"abcd"}
    assert all(70 < count < 130 for count in firsts.values())
    assert all(order[-1] == "e" for order in orders)  # of the same home
    assert all(lots.witnesses("f", "abcde", homes, "e")[0] == "e" for _ in range(10))


async def test_two_holders_of_four_that_tell_one_lie_have_no_honest_one_left_out(tmp_path: Path) -> None:
    """Theirs are the least peer ids, so they were the first two witnesses of every audit.

    Nor do they while one of the honest ones rests, since nobody can tell which two lied.
    """
    book = TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(open_tiny(tmp_path), tmp_path, ALL, ALL, ALL, ALL) as swarm:
        for name in ("n0", "n1"):
            swarm.poison(name, lambda sums: -sums)
        owner = swarm.owner(replicas=Replicas(swarm.holders, frozenset, book), patience=UNHURRIED)
        owner._lots = AuditLots(Caution(), random.Random(0))
        with trio.fail_after(60):
            hooks = JobHooks(lambda: len(owner.figures.lost) >= 2)
            await owner.run(12, lambda version: batches_of(version)[:4], Losses(), hooks)
        assert len(owner.figures.lost) >= 2
        assert all("nobody can tell" in why for why in owner.figures.lost)
        assert not owner.figures.left_out
        assert all(book.standing(name).trusted for name in swarm.nodes)
