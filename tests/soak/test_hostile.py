"""The long forms of the attacks in `tests.p2p`: a million frames, a thousand dead providers, attackers for minutes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from p2p.errors import P2PError
from p2p.link.frames import Kind
from tests.p2p import test_hostile_node, test_hostile_swarm
from tests.p2p.hostile import MIB, Victim, connection_to, open_lane, under_attack, until_cut

CANCELS = test_hostile_node.frame(Kind.CANCEL, 1) * 1000

Attack = Callable[[Victim], Awaitable[None]]

pytestmark = pytest.mark.soak


async def test_a_million_tiny_frames_about_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_hostile_node, "TINY_FRAMES", 1_000_000)
    await test_hostile_node.test_tiny_frames_about_nothing()


async def test_a_million_tiny_frames_that_mean_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_hostile_node, "TINY_FRAMES", 2_000_000)  # of which that test sends half
    await test_hostile_node.test_tiny_frames_that_mean_something()


@pytest.mark.timeout(400)
async def test_a_thousand_dead_providers() -> None:
    """Memory: 48 MiB."""
    await test_hostile_swarm.hide_a_provider(1000, grows_by=48 * MIB)


@pytest.mark.timeout(600)
async def test_every_attack_at_once_for_two_minutes() -> None:
    """Memory: 192 MiB. The honest peer waits longer, but is answered."""
    async with under_attack(grows_by=192 * MIB, slowest_s=8.0) as victim:
        with trio.move_on_after(120):
            async with trio.open_nursery() as nursery:

                async def again(attack: Attack) -> None:
                    while True:
                        try:
                            await attack(victim)
                        except (P2PError, OSError):
                            await trio.sleep(0.1)  # turned away at the door: it connects too often

                for _ in range(2):
                    nursery.start_soon(again, flood)
                for _ in range(6):
                    nursery.start_soon(again, test_hostile_node.ask_and_never_read)
                    nursery.start_soon(again, test_hostile_node.fill_windows)


async def flood(victim: Victim) -> None:
    async with connection_to(victim) as connection:
        await until_cut(await open_lane(connection), CANCELS, 500)
