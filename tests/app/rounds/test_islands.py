"""Rounds between islands on the in-memory network: they agree bit for bit, whoever dies, lies, joins or is cut off."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from app.core.canonical_json import canonical
from app.core.errors import RecordError
from app.rounds import wire
from app.rounds.decisions import leading_order
from app.rounds.island import Island, LeftOut
from app.rounds.statements import LIST, Arrival, sign_arrival
from app.rounds.train_jobs import figures_of
from app.snapshot.codec import trainings_from
from engine.island import LEAF
from engine.training.codecs import encode
from p2p.envelope import domain_of
from p2p.errors import DeadlineExceeded, P2PError, RemoteError
from p2p.memory.fabric import LinkProfile
from tests.app.rounds.island_swarm import (
    CONFIG,
    SMALL,
    TIMING,
    UNHURRIED,
    IslandSwarm,
    lesson_of,
    members_of,
    open_islands,
    plain_lesson,
)
from tests.app.swarms import identity


async def test_a_founder_alone_goes_on_alone(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0) as swarm:
        await swarm.finished(0)
        island = swarm.nodes[0].island
        assert members_of(island.log) == [1] * 5
        assert island.standing.tokens == 25 * 2 * 15
        losses = [loss for _, loss in island.figures.validation]
        assert losses[-1] < losses[0]


async def test_a_loss_that_is_no_number_is_not_kept(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0) as swarm:
        island = swarm.nodes[0].island
        for loss in (2.5, math.nan, math.inf):
            island.validated(loss)
        assert [loss for _, loss in island.figures.validation] == [2.5]


@pytest.mark.parametrize("codec", ["f32", "int8", "int4"])
async def test_four_islands_end_every_round_alike(tmp_path: Path, codec: str, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, 3, lesson=lesson_of(SMALL), wire=codec) as swarm:
        await swarm.finished(0, 1, 2, 3)
        log = swarm.nodes[0].island.log
        assert members_of(log) == [1, 4, 4, 4, 4]
        assert len({entry.list.leader for entry in log}) > 1
        assert all(node.island.figures.repeated == 0 for node in swarm.nodes.values())
        assert not any(entry.doubted for entry in log)


async def test_small_changes_wait_and_save_bytes(tmp_path: Path, patient_clock: MockClock) -> None:
    taken = {}
    lesson = plain_lesson(CONFIG)
    for share in (0.0, 1.0):
        async with open_islands(tmp_path / str(share), 0, 1, 2, 3, lesson=lesson, significance=share) as swarm:
            await swarm.finished(0, 1, 2, 3)
            log = swarm.nodes[0].island.log
            assert members_of(log) == [1, 4, 4, 4, 4]
            assert all(node.island.figures.repeated == 0 for node in swarm.nodes.values())
            assert not any(entry.doubted for entry in log)
            taken[share] = sum(node.island.figures.bytes_in for node in swarm.nodes.values())
            losses = [loss for _, loss in swarm.nodes[0].island.figures.validation]
            assert losses[-1] < losses[0]
    assert taken[1.0] < 0.7 * taken[0.0]


async def test_the_founder_may_go_for_good(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2) as swarm:
        await swarm.until(lambda: swarm.nodes[1].island.standing.round >= 2)
        gone, islands = swarm.nodes[0].name, [swarm.nodes[number].island for number in (1, 2)]
        assert all(gone in island.alive() for island in islands)
        swarm.kill(0)
        await swarm.until(lambda: not any(gone in island.alive() for island in islands), 2 * TIMING.alive_s)
        await swarm.finished(1, 2)
        assert members_of(islands[0].log)[-1] == 2


@pytest.mark.soak
async def test_an_island_killed_in_every_phase_changes_nothing_for_the_others(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_islands(tmp_path, 0, 1, 2, 3, steps=60) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 4)
        phases = ("merge", "advance", "change", "commit")
        for number, phase in enumerate(phases):
            victim = 1 + number % 3
            if victim not in swarm.nodes:
                swarm.add(victim)
                await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 4)
            kill_within(swarm, victim, phase)
            await swarm.until(lambda gone=victim: gone not in swarm.nodes)  # type: ignore[misc]
            before = swarm.nodes[0].island.standing.round
            await swarm.until(lambda now=before: swarm.nodes[0].island.standing.round > now)  # type: ignore[misc]
            swarm.add(victim)
            await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 4)
        await swarm.finished(0, 1, 2, 3)


def kill_within(swarm: IslandSwarm, number: int, method: str) -> None:
    """Crash an island in the next call of a method of its model."""
    model: Any = swarm.nodes[number].model
    function = getattr(model, method)

    def dying(*args: Any, **more: Any) -> Any:
        result = function(*args, **more)
        if number in swarm.nodes:
            swarm.kill(number)
        return result

    setattr(model, method, dying)


async def test_whoever_leads_may_die_while_it_leads(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, 3, steps=40) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 4)
        killed: list[int] = []
        for node_number, node in list(swarm.nodes.items()):
            count: Any = node.island._count

            async def dying(*args: Any, number: int = node_number, count: Any = count) -> None:
                if not killed and len(args[1].members) == 4:
                    killed.append(number)
                    swarm.kill(number)
                    await trio.sleep_forever()
                await count(*args)

            node.island._count = dying  # type: ignore[method-assign, assignment]
        await swarm.until(lambda: bool(killed))
        rest = [number for number in range(4) if number not in killed]
        await swarm.finished(*rest)
        assert members_of(swarm.nodes[rest[0]].island.log)[-1] == 3


@pytest.mark.soak
async def test_a_frozen_island_is_left_behind_and_catches_up(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=100) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 3)
        swarm.fabric.freeze(swarm.nodes[2].name)
        before = swarm.nodes[0].island.standing.round
        await swarm.until(lambda: swarm.nodes[0].island.standing.round >= before + 4, within_s=120)
        swarm.fabric.resume(swarm.nodes[2].name)
        await swarm.finished(0, 1, 2)
        assert members_of(swarm.nodes[0].island.log)[-1] == 3


async def test_one_island_leads_however_long_the_others_have_waited(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, timing=replace(TIMING, lead_s=2.0)) as swarm:
        for number in (2, 3):
            swarm.add(number, step_s=2.0)
        led: list[int] = []
        for node in swarm.nodes.values():
            lead: Any = node.island._lead

            async def counted(standing: Any, *args: Any, lead: Any = lead) -> None:
                led.append(standing.round)
                await lead(standing, *args)

            node.island._lead = counted  # type: ignore[method-assign]
        await swarm.finished(0, 1, 2, 3)
        assert members_of(swarm.nodes[0].island.log) == [1, 4, 4, 4, 4]
        assert led == [0, 1, 2, 3, 4]


async def test_of_two_honest_leaders_at_once_one_gives_way_and_is_not_blamed(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """It went on with its own list, which nobody followed, and islands saw other orders of leaders from then on."""
    async with open_islands(tmp_path, 0, 1, 2, steps=100) as swarm:
        islands = {node.name: node.island for node in swarm.nodes.values()}
        watch = swarm.nodes[0].island
        await swarm.until(lambda: len(watch.recent) == 3)
        number = watch.standing.round + 1
        second = islands[leading_order(swarm.record.id, number, islands)[1]]
        lead_at = second._lead_at

        def at_once(standing: Any, began: float, leader: str, *, first: bool) -> float:
            if standing.round == number and leader == second.peer:
                return 0.0 if len(second._arrivals) == 3 else math.inf
            return lead_at(standing, began, leader, first=first)

        second._lead_at = at_once  # type: ignore[method-assign]
        for island in islands.values():
            island._on_statement = late(island, second.peer)  # type: ignore[method-assign, assignment]
        await swarm.until(lambda: watch.standing.round == number)
        began = trio.current_time()
        await swarm.until(lambda: watch.standing.round > number)
        assert trio.current_time() - began < 3.0
        await swarm.until(lambda: watch.standing.round > number + 1)
        assert not any(island._times_in_vain(peer) for island in islands.values() for peer in islands)


def late(island: Island, leader: str) -> Callable[[str, bytes], Awaitable[bytes]]:
    """Let the lists of a leader reach an island a while after they were sent."""
    honest = island._on_statement

    async def on_statement(peer: str, raw: bytes) -> bytes:
        if peer == leader and domain_of(raw) == LIST:
            await trio.sleep(0.3)
        return await honest(peer, raw)

    return on_statement


@pytest.mark.soak
async def test_a_slow_island_makes_fewer_steps_and_holds_nobody_up(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, every=10, least_every=10, most_every=10, steps=80) as swarm:
        slow = swarm.add(3, step_s=1.0)
        await swarm.finished(0, 1, 2, 3)
        counted = [
            arrival for entry in slow.island.log[3:] for arrival in entry.list.arrivals if arrival.peer == slow.name
        ]
        assert counted
        assert all(arrival.steps < 10 for arrival in counted)
        took = trio.current_time() / 8  # a round; ten slow steps alone would take ten seconds
        assert took < 9


async def test_the_figures_say_who_is_slow_and_for_whom_a_round_waits(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, steps=40) as swarm:
        slow = swarm.add(2, step_s=0.4)
        island = swarm.nodes[0].island
        await swarm.until(lambda: 3 in members_of(island.log))
        (shown,) = trainings_from([json.loads(json.dumps(figures_of(island, "running")))])
        by_peer = {one.peer: one for one in shown.islands}
        late, here = by_peer[slow.name], by_peer[island.peer]
        assert here.here
        assert here.alive
        assert not late.here
        assert late.lag_s is not None
        assert here.lag_s is not None
        assert late.lag_s > 1.0 > here.lag_s
        assert late.tokens_per_s is not None
        assert here.tokens_per_s is not None
        assert late.tokens_per_s < here.tokens_per_s
        assert len(shown.losses) >= 5
        assert tuple(shown.validation[-1]) == (shown.step, shown.validation_loss)
        assert shown.left_s is not None
        assert shown.left_s > 0
        swarm.kill(1)
        swarm.kill(2)
        await swarm.until(lambda: bool(island.figures.waiting))
        assert slow.name in island.figures.waiting
        assert figures_of(island, "left")["left_s"] is None


async def test_joining_takes_the_state_by_parts_and_enters_at_a_boundary(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_islands(tmp_path, 0, 1, steps=100) as swarm:
        await swarm.until(lambda: swarm.nodes[0].island.standing.round >= 3)
        late = swarm.add(4, has_model=False)
        await swarm.until(lambda: late.name in swarm.nodes[0].island.standing.members)
        await swarm.finished(0, 1, 4)
        assert late.island.figures.fetched == 1
        assert members_of(late.island.log)[-1] == 3
        # the others have lost no step
        assert all(arrival.steps == 5 for entry in late.island.log for arrival in entry.list.arrivals)


async def test_a_joiner_that_has_the_first_state_takes_the_newest_one(tmp_path: Path, patient_clock: MockClock) -> None:
    """It asked for the changes of all rounds since, one after the other, though nobody keeps them for it."""
    async with open_islands(tmp_path, 0, 1, steps=100) as swarm:
        await swarm.until(lambda: swarm.nodes[0].island.standing.round >= 8)
        late = swarm.add(4)
        joined_in = swarm.nodes[0].island.standing.round
        await swarm.until(lambda: late.name in swarm.nodes[0].island.standing.members)
        assert late.island.figures.fetched == 1
        assert swarm.nodes[0].island.standing.round <= joined_in + 10  # it listens first


async def test_a_joiner_whose_model_is_not_the_start_takes_it_over(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0) as swarm:
        late = swarm.add(1, has_model=False)
        await swarm.finished(0, 1)
        assert late.island.figures.fetched >= 1


async def test_a_partition_heals_to_one_history(tmp_path: Path, patient_clock: MockClock) -> None:
    await check_partition(tmp_path, (3, 4))


async def check_partition(folder: Path, cut: tuple[int, ...]) -> None:
    """Some of five islands are cut off for a while; all end with the history of the more numerous side."""
    async with open_islands(folder, 0, 1, 2, 3, 4, steps=60) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 5)
        swarm.fabric.partition([swarm.nodes[number].name for number in cut])
        others = tuple(number for number in range(5) if number not in cut)
        large, small = sorted((cut, others), key=len, reverse=True)
        most, few = (swarm.nodes[side[0]].island for side in (large, small))
        await swarm.until(lambda: most.head != few.head and len(small) in members_of(few.log)[1:])
        made = {entry.hash for entry in most.log}
        swarm.fabric.heal()
        await swarm.finished(0, 1, 2, 3, 4)
        # the history of those who were a quorum, with nothing of the few who went on without one
        assert made <= {entry.hash for entry in few.log}
        assert len(large) in members_of(few.log)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
async def test_lost_messages_cost_time_but_no_agreement(tmp_path: Path, seed: int, patient_clock: MockClock) -> None:
    profile = LinkProfile(delay_s=0.01, loss=0.03)
    async with open_islands(tmp_path, 0, 1, 2, profile=profile, timing=UNHURRIED, seed=seed) as swarm:
        await swarm.finished(0, 1, 2, within_s=2000)
        assert sum(node.island.figures.repeated for node in swarm.nodes.values()) <= 1
        assert members_of(swarm.nodes[0].island.log)[2:].count(3) >= 2


@pytest.mark.parametrize("method", [wire.HASHES, wire.SHARE, wire.SIGNED, wire.MERGED, wire.SAY])
async def test_an_exchange_survives_two_lost_answers_of_every_member(
    tmp_path: Path, method: str, patient_clock: MockClock
) -> None:
    async with open_islands(tmp_path, 0, 1, 2, timing=UNHURRIED, steps=15) as swarm:
        lost: Counter[tuple[str, str]] = Counter()
        for node in swarm.nodes.values():
            network = swarm.fabric.nodes[node.name]
            call = network.call

            async def losing(
                peer: str, what: str, *args: Any, call: Any = call, name: str = node.name, **more: Any
            ) -> bytes:
                answer = bytes(await call(peer, what, *args, **more))
                if what != method or lost[name, peer] >= 2:
                    return answer
                lost[name, peer] += 1
                await trio.sleep(more["timeout_s"])
                raise DeadlineExceeded("the answer was lost")

            network.call = losing  # type: ignore[method-assign, assignment]
        await swarm.finished(0, 1, 2)
        assert members_of(swarm.nodes[0].island.log) == [1, 3, 3]
        assert not any(node.island.figures.repeated for node in swarm.nodes.values())
        assert len(lost) >= 4  # of all, or of those who merge something
        assert {*lost.values()} == {2}


async def test_a_silent_member_costs_a_part_of_an_exchange(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, timing=UNHURRIED, steps=15) as swarm:
        silent, first = swarm.nodes[2], swarm.nodes[0].island
        await swarm.until(lambda: len(first.standing.members) == 3)
        for node in (swarm.nodes[0], swarm.nodes[1]):
            network = swarm.fabric.nodes[node.name]
            call = network.call

            async def unanswered(peer: str, what: str, *args: Any, call: Any = call, **more: Any) -> bytes:
                if peer == silent.name and what == wire.HASHES:
                    await trio.sleep(more["timeout_s"])
                    raise DeadlineExceeded("no answer")
                return bytes(await call(peer, what, *args, **more))

            network.call = unanswered  # type: ignore[method-assign, assignment]
        began = trio.current_time()
        await swarm.until(lambda: first.standing.round >= 2)
        assert trio.current_time() - began < UNHURRIED.exchange_s


async def test_statements_that_come_twice_change_nothing(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2) as swarm:
        for node in swarm.nodes.values():
            network = swarm.fabric.nodes[node.name]
            call = network.call

            async def doubled(peer: str, method: str, *args: Any, call: Any = call, **more: Any) -> bytes:
                if method == wire.SAY:
                    with contextlib.suppress(P2PError):
                        await call(peer, method, *args, **more)
                return bytes(await call(peer, method, *args, **more))

            network.call = doubled  # type: ignore[method-assign]
        await swarm.finished(0, 1, 2)
        assert members_of(swarm.nodes[0].island.log) == [1, 3, 3, 3, 3]


def flip(factor: float) -> Callable[[Any], None]:
    """Let an island send its change times a factor; it computes with the honest one itself."""

    def change(model: Any) -> None:
        honest = model.change

        def lie() -> list[bytes]:
            honest()
            return [encode(leaf, "int8") for leaf in (model._sent * factor).split(LEAF)]

        model.change = lie

    return change


def noise(model: Any) -> None:
    """Let an island send noise of the size of its change."""
    honest = model.change

    def lie() -> list[bytes]:
        honest()
        drawn = torch.randn(model._sent.shape, generator=torch.Generator().manual_seed(1))
        return [encode(leaf, "int8") for leaf in (drawn * model._sent.std()).split(LEAF)]

    model.change = lie


def replay(share: float) -> Callable[[Any], None]:
    """Let an island send what was merged in the last round, with noise of a share of its size."""

    def change(model: Any) -> None:
        honest = model.change

        def lie() -> list[bytes]:
            leaves: list[bytes] = honest()
            if model._past is None:
                return leaves
            last = model._joined(model._past, 0, model.leaves)
            drawn = torch.randn(last.shape, generator=torch.Generator().manual_seed(1))
            return [encode(leaf, model.codec) for leaf in (last + share * last.std() * drawn).split(LEAF)]

        model.change = lie

    return change


LIES = {
    "flip": flip(-1.0), "flip10": flip(-10.0), "zeros": flip(0.0), "huge": flip(100.0), "noise": noise,
    "replay": replay(0.0), "replay with noise": replay(0.1),
}  # fmt: skip
SHORT_LIES = ("flip10", "noise", "replay")


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, marks=() if lie in SHORT_LIES else pytest.mark.soak) for lie in LIES]
)
async def test_a_poisoner_is_left_out_within_three_rounds(tmp_path: Path, lie: str, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, lesson=lesson_of(SMALL), steps=35) as swarm:
        liar = swarm.add(3, change=LIES[lie])
        await swarm.until(lambda: liar.failure is not None)
        assert isinstance(liar.failure, LeftOut)
        await swarm.finished(0, 1, 2)
        log = swarm.nodes[0].island.log
        took_part = [entry.round for entry in log if liar.name in entry.list.members]
        assert len(took_part) <= 3
        assert log[-1].left_out.keys() == {liar.name}
        validation = [loss for _, loss in swarm.nodes[0].island.figures.validation]
        assert validation[-1] < validation[0]


async def test_who_sends_another_change_than_it_committed_to_is_left_out(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    def other_leaves(model: Any) -> None:
        honest = model.change
        model.change = lambda: _Shifting(honest())

    class _Shifting(list[bytes]):
        """Leaves that are other ones when they are sent than when they were hashed."""

        def __getitem__(self, index: Any) -> Any:
            found = list.__getitem__(self, index)
            return [bytes(len(leaf)) for leaf in found] if isinstance(index, slice) else found

    async with open_islands(tmp_path, 0, 1, 2) as swarm:
        liar = swarm.add(3, change=other_leaves)
        await swarm.finished(0, 1, 2)
        log = swarm.nodes[0].island.log
        assert all(liar.name not in entry.list.members for entry in log)
        assert any(node.island.figures.repeated for node in swarm.nodes.values())


async def test_a_merger_that_merges_wrongly_fails_alone(tmp_path: Path, patient_clock: MockClock) -> None:
    def wrong(model: Any) -> None:
        honest = model.advance
        model.advance = lambda leaves: [b"\0" * len(state) for state in honest(leaves)]

    async with open_islands(tmp_path, 0, 1, 2) as swarm:
        liar = swarm.add(3, change=wrong)
        await swarm.finished(0, 1, 2)
        assert all(liar.name not in entry.list.members for entry in swarm.nodes[0].island.log)


async def test_requests_that_are_not_understood_are_refused(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0) as swarm:
        stranger = swarm.fabric.node(identity(7).peer_id)
        name, job = swarm.nodes[0].name, swarm.record.id
        forged = sign_arrival(identity(6), Arrival(job, 0, bytes(32), 1, 1, bytes(32)), 1_800_000_000_000)
        bodies = {
            wire.HELLO: [b"", b"{}", job, job + b"{}", job + b'{"round":-1}', job + b"\xff" * 50],
            wire.SAY: [job, job + b"x" * 99, job + forged.raw],
            wire.LOG: [job + b'{"round":0,"count":10000}', job + b'{"round":"a","count":1}'],
            wire.SHARE: [job + b'{"list":"ab","first":0,"count":1}'],
            wire.MERGED: [job + b'{"list":"' + b"ab" * 32 + b'","first":0,"count":9999999}'],
            wire.PARTS: [job + b'{"round":99}'],
            wire.HASHES: [job + b'{"list":"' + b"ab" * 32 + b'"}'],
        }
        for method, each in bodies.items():
            for body in each:
                with pytest.raises(RemoteError) as caught:
                    await stranger.call(name, method, body, timeout_s=30)
                assert caught.value.code in (wire.WRONG, wire.UNKNOWN, wire.NOT_YET), (method, body)
        await swarm.finished(0)


async def test_what_was_signed_for_shares_is_told_of_all_or_of_one(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, lesson=plain_lesson(CONFIG)) as swarm:
        await swarm.finished(0, 1, 2)
        island, name = swarm.nodes[0].island, swarm.nodes[1].name
        found = island.log[-1].list.hash
        signed = {peer: share.raw for peer, share in island._attempts[found].shares.items()}
        assert name in signed
        assert len(signed) > 1
        for more, told in (({}, [*signed.values()]), ({"of": name}, [signed[name]]), ({"of": "nobody"}, [])):
            answer: Any = await island.answer(wire.SIGNED, name, canonical({"list": found.hex(), **more}))
            assert wire.unpack(b"".join(answer), 64) == told


@pytest.mark.parametrize("raw", [b"\0\0\0", b"\0\0\0\5abc", b"\0\0\0\1a\0\0\0\1b"])
def test_blobs_that_are_cut_off_or_too_many_are_refused(raw: bytes) -> None:
    with pytest.raises(RecordError):
        wire.unpack(raw, 1)
    assert wire.unpack(b"".join(wire.pack([b"a", b"", b"bc"])), 3) == [b"a", b"", b"bc"]
