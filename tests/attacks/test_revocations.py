"""A delegate of a guarded swarm that signs one revocation list after another."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from app.config.home import Home
from app.membership import GuardedNetwork, wire
from app.node.context import NodeContext
from app.node.network_owner import NetworkOwner
from app.swarm import invitations
from app.swarm.certificates import sign_certificate, sign_revocations
from p2p.envelope import parse
from p2p.memory.fabric import open_fabric
from p2p.network import Libp2pNetwork
from tests.app.guarded import CREATOR, SWARM
from tests.app.swarms import identity

DELEGATE, MEMBER = identity(1), identity(2)
HERE = SWARM.authority
assert HERE is not None
RIGHT = sign_certificate(CREATOR, HERE, DELEGATE.peer_id, now_ms=1, admits=True)


def lists(first: int, count: int) -> list[bytes]:
    """Lists of the delegate, each newer than the one before."""
    assert HERE is not None
    return [sign_revocations(DELEGATE, HERE, [], sequence=first + n, by=RIGHT) for n in range(count)]


async def test_many_lists_are_saved_by_one_thread_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list took a thread that waited for the file, so that nothing else of the node had any."""
    assert HERE is not None
    home, update, may_write, writing = Home.open(tmp_path), invitations.update, threading.Event(), trio.Event()
    token, saves = trio.lowlevel.current_trio_token(), 0

    def slow(*arguments: Any) -> Any:
        nonlocal saves
        saves += 1
        token.run_sync_soon(writing.set)
        assert may_write.wait(20)
        return update(*arguments)

    monkeypatch.setattr(invitations, "update", slow)
    with trio.fail_after(30):
        async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
            network = fabric.node(MEMBER.peer_id)
            guard = GuardedNetwork(network, HERE)
            context = SimpleNamespace(identity=MEMBER, home=home, note=lambda kind, text: None, changed=lambda: None)
            owner = NetworkOwner(cast(NodeContext, context))
            await owner._start_guard(cast(Libp2pNetwork, network), guard, nursery)
            *early, latest = lists(2, 100)
            try:
                for raw in (*early, latest):
                    assert guard.keep(parse(raw))
                await writing.wait()
                await wait_all_tasks_blocked()
                assert saves == 1
            finally:
                may_write.set()
            while invitations.load(home, HERE.swarm).lists != (latest,):  # noqa: ASYNC110 - a file has no event
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert saves <= 2


async def test_lists_of_one_peer_are_looked_at_within_a_limit(autojump_clock: MockClock) -> None:
    """Those that came with a certificate were all verified and passed on, a thousand at once and 63 a second."""
    assert HERE is not None
    guard_id = bytes.fromhex(HERE.swarm)
    async with open_fabric(1) as fabric:
        member, delegate = fabric.node(MEMBER.peer_id), fabric.node(DELEGATE.peer_id)
        guard, kept = GuardedNetwork(member, HERE), 0

        def count(envelope: object) -> None:
            nonlocal kept
            kept += 1

        guard.listeners.append(count)
        for call in range(8):
            body = wire.Tell(guard_id, [RIGHT, *lists(2 + 60 * call, 60)]).encode()
            await delegate.call(member.peer_id, wire.PRESENT, body, timeout_s=5)
    assert guard.is_admitted(DELEGATE.peer_id)
    assert 0 < kept <= 80
