"""An island that leaves ends within a second or two, whatever it does then, and costs the others what a death does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.core.network import Payload
from app.rounds import wire
from app.rounds.exchange import ExchangeAttempt
from app.rounds.island import Island, RoundTiming
from app.rounds.steps import LocalSteps
from p2p.errors import RemoteError
from tests.app.rounds.island_swarm import IslandSwarm, members_of, open_islands

AT_ONCE_S = 2.0


def under_way(island: Island) -> ExchangeAttempt | None:
    """The exchange of three that an island is in."""
    attempts = [one for one in island._attempts.values() if one.members.round == island.standing.round]
    together = [one for one in attempts if len(one.members.members) == 3 and not one.has_failed]
    return together[-1] if together else None


class LongExchange:
    """Three islands in the middle of an exchange that goes on only once `may_end` is set; one of them leads it."""

    def __init__(self, swarm: IslandSwarm, *, leads: bool) -> None:
        self._swarm, self._leads, self.may_end = swarm, leads, False

    async def begin(self) -> int:
        """Return the number of an island that leads it, or of one that does not."""
        islands = {number: node.island for number, node in self._swarm.nodes.items()}
        for island in islands.values():
            self._swarm.fabric.nodes[island.peer].serve(wire.SHARE, self._held_back(island))
        await self._swarm.until(lambda: all(map(under_way, islands.values())))
        await trio.sleep(1)
        attempt = under_way(islands[0])
        assert attempt is not None
        return next(n for n, island in islands.items() if (island.peer == attempt.members.leader) == self._leads)

    def _held_back(self, island: Island) -> Any:
        async def share(peer: str, body: bytes) -> Payload:
            _, rest = wire.read_request(body)
            attempt = under_way(island)
            if attempt is not None and not self.may_end:
                raise RemoteError("the change is not there yet", wire.NOT_YET)
            return await island.answer(wire.SHARE, peer, rest)

        return share


async def seconds_lost(folder: Path, gone: Callable[[IslandSwarm, int], Any], *, leads: bool) -> float:
    """Seconds in which the others have made a round after one of three is gone in the middle of an exchange."""
    async with open_islands(folder, 0, 1, 2, timing=RoundTiming(), steps=10**6) as swarm:
        exchange = LongExchange(swarm, leads=leads)
        number = await exchange.begin()
        others = [node.island for other, node in swarm.nodes.items() if other != number]
        began, rounds, exchange.may_end = trio.current_time(), others[0].standing.round, True
        gone(swarm, number)
        await swarm.until(lambda: all(island.standing.round > rounds for island in others))
        assert members_of(others[0].log)[-1] == 2
        return trio.current_time() - began


def leave(swarm: IslandSwarm, number: int) -> None:
    swarm.nodes[number].island.leave()


def fail(swarm: IslandSwarm, number: int) -> None:
    swarm.nodes[number].scope.cancel()
    swarm.nodes[number].server.islands.clear()


@pytest.mark.parametrize("leads", [False, True], ids=["follows", "leads"])
async def test_leaving_ends_an_exchange_that_is_under_way(
    tmp_path: Path, patient_clock: MockClock, leads: bool
) -> None:
    async with open_islands(tmp_path, 0, 1, 2, timing=RoundTiming(), steps=10**6) as swarm:
        node = swarm.nodes[await LongExchange(swarm, leads=leads).begin()]
        before, state = node.island.standing, list(node.island.checkpoint.parts)
        node.island.leave()
        with trio.fail_after(AT_ONCE_S):
            await node.ended.wait()
        assert node.failure is None
        assert (node.island.standing, node.island.checkpoint.round) == (before, before.round)
        assert node.island.checkpoint.parts == state


@pytest.mark.parametrize("leads", [False, True], ids=["follows", "leads"])
async def test_one_that_leaves_costs_the_others_no_more_than_one_that_dies(
    tmp_path: Path, patient_clock: MockClock, leads: bool
) -> None:
    died_s = await seconds_lost(tmp_path / "killed", IslandSwarm.kill, leads=leads)
    left_s = await seconds_lost(tmp_path / "left", leave, leads=leads)
    assert left_s <= (died_s + AT_ONCE_S if leads else AT_ONCE_S)


@pytest.mark.parametrize("leads", [False, True], ids=["follows", "leads"])
async def test_one_that_ends_for_another_reason_is_not_waited_for_either(
    tmp_path: Path, patient_clock: MockClock, leads: bool
) -> None:
    """Its memory is full, say; its node goes on, and says that it takes no part to whoever greets it."""
    died_s = await seconds_lost(tmp_path / "killed", IslandSwarm.kill, leads=leads)
    failed_s = await seconds_lost(tmp_path / "failed", fail, leads=leads)
    assert failed_s <= died_s + RoundTiming().hello_s


async def test_leaving_ends_a_request_that_is_not_answered(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, timing=RoundTiming(), steps=10**6) as swarm:
        await swarm.until(lambda: swarm.nodes[0].island.standing.round >= 2)
        asked = trio.Event()

        async def never(peer: str, body: bytes) -> bytes:
            asked.set()
            await trio.sleep_forever()
            raise AssertionError

        swarm.fabric.nodes[swarm.nodes[0].name].serve(wire.PARTS, never)
        late = swarm.add(1, has_model=False)
        await asked.wait()
        late.island.leave()
        with trio.fail_after(AT_ONCE_S):
            await late.ended.wait()


async def test_a_round_that_is_over_is_kept_by_one_that_leaves_before_its_next_steps(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """It computes the loss on text that is not trained on, which may take minutes."""
    measuring = trio.Event()

    async def slow(self: LocalSteps, held: Any) -> float:
        measuring.set()
        await trio.sleep_forever()
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSteps, "loss", slow)
        async with open_islands(tmp_path, 0, steps=10**6) as swarm:
            node = swarm.nodes[0]
            await measuring.wait()
            node.island.leave()
            with trio.fail_after(AT_ONCE_S):
                await node.ended.wait()
            assert node.island.standing.round == node.island.checkpoint.round == 1
