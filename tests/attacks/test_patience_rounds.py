"""A member that says for ever that a past round's change is on its way keeps nobody behind the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.core.network import Payload
from app.rounds import decisions, wire
from app.rounds.island import RoundTiming
from p2p.errors import RemoteError
from tests.app.rounds.island_swarm import CONFIG, SlowSteps, open_islands, plain_lesson


@pytest.mark.soak
async def test_a_member_that_never_shows_a_past_change_costs_who_catches_up_little(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes take as long as those of the starter model (134 MB) would over 1 Mbit/s; a round takes five minutes."""
    rounds: dict[str, Any] = {"every": 25, "least_every": 25, "most_every": 25, "steps": 10**6}
    async with open_islands(
        tmp_path, 0, 1, 2, lesson=plain_lesson(CONFIG), step_s=12.0, timing=RoundTiming(), **rounds
    ) as swarm:
        first, victim, hostile = (swarm.nodes[number] for number in range(3))
        model = victim.model
        speed = 125e3 * model.leaves * model.leaf_bytes / 134e6
        monkeypatch.setattr(decisions, "SLOWEST_BYTES_PER_S", speed, raising=False)
        await swarm.until(lambda: len(first.island.standing.members) == 3, within_s=3600)
        network = swarm.fabric.nodes[hostile.name]
        honest = network._handlers[wire.MERGED]

        async def not_yet(peer: str, body: bytes) -> Payload:
            key = wire.fields_of(body[32:], "merged").hex_bytes("list", 32)
            if peer == victim.name and any(entry.list.hash == key for entry in hostile.island.log):
                raise RemoteError("this list is not known here", wire.NOT_YET)
            return await honest(peer, body)

        async def until(*, is_member: bool, within_s: float) -> float:
            """Wait for a round with or without the victim, and return how long that took."""
            began, rounds = trio.current_time(), first.island.standing.round

            def is_so() -> bool:
                return any((victim.name in one.list.members) == is_member for one in first.island.log[rounds:])

            await swarm.until(is_so, within_s)
            return trio.current_time() - began

        network.serve(wire.MERGED, not_yet)
        await swarm.until(lambda: first.island.standing.round >= 3, within_s=7200)
        device, outside = victim.device, []
        assert isinstance(device, SlowSteps)
        for _ in range(3):
            device.step_s = 80.0  # somebody plays a game there for a while
            await until(is_member=False, within_s=7200)
            device.step_s = 12.0
            outside.append(await until(is_member=True, within_s=5 * 3600))
        assert max(outside) < 1800, outside
