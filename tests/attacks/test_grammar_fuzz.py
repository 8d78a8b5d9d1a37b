"""Messages from a grammar against a block server, an asker and a member; the long form is in `tests/soak`."""

from __future__ import annotations

import trio
from hypothesis import HealthCheck, example, given, settings
from trio.testing import MockClock

from app.session.wire import KEEP, Kind
from tests.attacks.grammar import (
    Call,
    RawFrame,
    Statement,
    answers,
    attack_asker,
    attack_membership,
    attack_server,
    calls,
    conversations,
)

SHORT = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
ID = b"a" * 16
TURN = b'{"after":"nobody","before":"","send":0,"start":0,"stop":8,"tokens":64,"urgent":0,"v":1,"wire":"%s"}'


def turn(epoch: int, wire: bytes) -> tuple[str, RawFrame]:
    return "attacker", RawFrame(ID, epoch, KEEP, Kind.TURN, 0, 0, 0, TURN % wire)


def rows(epoch: int, position: int, count: int) -> tuple[str, RawFrame]:
    return "attacker", RawFrame(ID, epoch, position, Kind.DATA, 1, count, 4, bytes(16 * count))


@SHORT
@example(conversation=[turn(1, b"f16"), rows(1, 0, 9), turn(2, b"f32"), rows(2, 9, 1)])
@example(conversation=[turn(1, b""), rows(1, 0, 4), *[("attacker", RawFrame(ID, 1, 0, Kind.GO, 0, 0, 0, b""))] * 8])
@example(conversation=[turn(2**32 - 1, b""), ("attacker", RawFrame(ID, 2**32 - 1, 0, Kind.CLOSE, 0, 0, 0, b""))])
@given(conversation=conversations)
def test_frames_of_strangers_do_no_harm_to_a_block_server(conversation: list[tuple[str, RawFrame]]) -> None:
    trio.run(attack_server, conversation, clock=MockClock(autojump_threshold=0))


@SHORT
@example(script=[(0.0, RawFrame(ID, 1, 0, Kind.READY, 0, 0, 0, b""), True)])
@example(script=[(0.0, RawFrame(ID, 1, 0, Kind.TROUBLE, 0, 0, 0, b'{"code":"gap","text":"x"}'), True)] * 4)
@example(script=[(0.0, RawFrame(ID, 1, 0, Kind.TROUBLE, 0, 0, 0, b'{"code":"input","text":"x"}'), True)] * 4)
@given(script=answers)
def test_frames_of_a_hop_do_no_harm_to_an_asker(script: list[tuple[float, RawFrame, bool]]) -> None:
    trio.run(attack_asker, script, clock=MockClock(autojump_threshold=0))


@SHORT
@example(script=[Call("swarm.tell", (Statement("garbage", 1),) * 40)] * 8)
@example(script=[Call("swarm.probe", (Statement("suspicion", 100, about=1), Statement("announcement", 100)))] * 2)
@given(script=calls)
def test_calls_of_strangers_do_no_harm_to_a_member(script: list[Call]) -> None:
    trio.run(attack_membership, script, clock=MockClock(autojump_threshold=0))
