"""A session belongs to its asker, and what one peer orders costs nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import pytest
import trio
from trio.testing import MockClock

from app.core.compute import StepWork
from app.core.span import Span
from app.serving.block_server import BlockServer
from app.session.frame import belongs_to, new_session_id
from app.session.wire import KEEP, PROTOCOL, EpochOrder, Kind, encode_turn
from engine.errors import NotFinite
from p2p.errors import P2PError
from p2p.memory.fabric import open_fabric
from tests.app.hash_model import WIDTH, HashRunner, InlineDevice, Output, greedy
from tests.app.session_swarm import PROMPT, ask, open_swarm
from tests.attacks.test_sessions import attacked, next_frame, zeros


def test_an_id_belongs_to_the_asker_that_made_it() -> None:
    id = new_session_id("asker")
    assert belongs_to(id, "asker")
    assert not belongs_to(id, "another")
    assert not belongs_to(bytes(16), "asker")
    assert id != new_session_id("asker")


async def test_a_hop_cannot_open_its_askers_session_elsewhere(autojump_clock: MockClock) -> None:
    """A hop knows the id of its asker's session and opens it at another hop, to read or change what goes there."""
    async with attacked(HashRunner(0, 4)) as scene:
        order = EpochOrder(Span(0, 1), "honest", "", 16, 0, send_from=0)
        await scene.attacker.send(encode_turn(scene.honest_id, 1, KEEP, order))
        with pytest.raises(P2PError), trio.fail_after(5):
            await next_frame(scene.attacker, Kind.READY)
        assert await scene.still_serves()


async def test_two_hops_that_are_each_others_predecessor_do_not_repeat_for_ever(autojump_clock: MockClock) -> None:
    """A stranger names two honest hops as each other's predecessor and successor: they fall silent by themselves."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        id, servers = new_session_id("stranger"), {}
        for name in ("n0", "n1"):
            servers[name] = BlockServer(fabric.node(name), HashRunner(0, 4), InlineDevice(0.001))
            await nursery.start(servers[name].run)
        stranger = fabric.node("stranger")
        for name, other in (("n0", "n1"), ("n1", "n0")):
            stream = await stranger.open(name, PROTOCOL)
            await stream.send(encode_turn(id, 1, KEEP, EpochOrder(Span(0, 4), other, other, 64, 0, send_from=0)))
            await next_frame(stream, Kind.READY)
            await stream.send(zeros(id, 1, 0, 8, WIDTH))
        await trio.sleep(5)
        before = sum(server.stats.bytes_out for server in servers.values())
        await trio.sleep(20)
        assert sum(server.stats.bytes_out for server in servers.values()) == before
        nursery.cancel_scope.cancel()


class Refusing(HashRunner):
    """Refuses the rows of one session as not finite."""

    refused = b""

    def step(self, work: Sequence[StepWork]) -> list[Output]:
        if any(item.session == self.refused for item in work):
            self.batches.append([(item.session, item.position, item.rows) for item in work])
            raise NotFinite("not finite", self.refused)
        return super().step(work)


async def test_one_bad_row_does_not_break_up_the_others_batch(autojump_clock: MockClock) -> None:
    """One of twelve sessions sends NaN: it ends, and the eleven others share the next step."""
    async with open_swarm() as swarm:
        runner = Refusing(0, 8)
        server = await swarm.serve("n0", runner)
        asker = await swarm.asker()
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(ask, asker, [*PROMPT, number], 400)
            await trio.sleep(2)
            assert server.sessions == 12
            runner.refused = next(iter(server._sessions))
            runner.batches.clear()
            await trio.sleep(1)
            shared = [len(batch) for batch in runner.batches if all(item[0] != runner.refused for item in batch)]
            nursery.cancel_scope.cancel()
        assert len(shared) > 10
        assert mean(shared) > 6, "the session at fault is named, not searched for"


async def test_an_order_that_fails_costs_nobody_else(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carrying out a stranger's order raises an error that nobody foresaw: the server goes on."""
    runner = HashRunner(0, 8)
    async with open_swarm() as swarm:
        server = await swarm.serve("n0", runner)

        def fail(session: bytes, tokens: int) -> None:
            raise KeyError("unforeseen")

        with monkeypatch.context() as patched:
            patched.setattr(runner, "open", fail)
            stream = await swarm.fabric.node("stranger").open("n0", PROTOCOL)
            await stream.send(encode_turn(new_session_id("stranger"), 1, KEEP, EpochOrder(Span(0, 8), "", "", 16, 0)))
            await trio.sleep(1)
        assert server.sessions == 0
        stats = await ask(await swarm.asker(), PROMPT, 8)
        assert stats.token_ids == greedy(PROMPT, 8)
