"""What one hostile member can do to a training job in rounds: it loses its own place, the others go on and agree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from trio.testing import MockClock

from app.core.canonical_json import canonical
from app.core.errors import RecordError
from app.core.wall_clock import wall_ms
from app.rounds import wire
from app.rounds.decisions import leading_order, share_ranges
from app.rounds.exchange import OwnChange, hashes_of
from app.rounds.greetings import Heard
from app.rounds.island import KEPT_ATTEMPTS, MAX_PEERS, Island, hashed
from app.rounds.log import make_entry
from app.rounds.record import DOMAIN
from app.rounds.statements import (
    ARRIVAL,
    MAX_ATTEMPTS,
    RESULT,
    Arrival,
    MemberList,
    MergedShare,
    Result,
    sign_arrival,
    sign_list,
    sign_result,
    sign_share,
    signed,
)
from app.training.waiting import what_it_waits_for
from engine.config import ModelConfig
from engine.errors import EngineError
from engine.island import LEAF
from engine.training import codecs
from engine.training.codecs import GROUP, encode
from p2p.envelope import NEVER, seal
from p2p.errors import P2PError, RemoteError
from tests.app.rounds.island_swarm import (
    CONFIG,
    SMALL,
    TIMING,
    IslandSwarm,
    Node,
    lesson_of,
    members_of,
    open_islands,
    plain_lesson,
)
from tests.app.rounds.statements import PEOPLE, RECORD
from tests.app.rounds.test_own_data import open_nodes, wish_in
from tests.app.swarms import identity

NOW_MS = 1_800_000_000_000


async def joined(swarm: IslandSwarm, count: int) -> None:
    """Wait until so many islands take part."""
    await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == count)


def took_part(swarm: IslandSwarm, name: str) -> list[int]:
    """Rounds in which an island's change counted."""
    return [entry.round for entry in swarm.nodes[0].island.log if name in entry.list.members]


# --- statements that cannot become a round ----------------------------------------------------------------------------


async def test_a_claim_of_too_many_tokens_costs_only_who_makes_it(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2) as swarm:
        liar = swarm.add(3)
        honest = liar.island._note_arrival

        def believed(arrival: Arrival) -> None:
            if arrival.peer != liar.name:
                honest(arrival)
                return
            claimed = Arrival(arrival.job, arrival.round, arrival.prev, arrival.steps, 2**50, arrival.change)
            liar.island._own.arrival = sign_arrival(identity(3), claimed, NOW_MS)  # type: ignore[union-attr]
            liar.island._arrivals[liar.name] = liar.island._own.arrival  # type: ignore[union-attr]
            liar.island._arrived_at[liar.name] = trio.current_time()

        liar.island._note_arrival = believed  # type: ignore[method-assign]
        said = liar.island._say

        async def own_claim(peer: str, raw: bytes) -> None:
            own = liar.island._own
            await said(peer, own.arrival.raw if own is not None and ARRIVAL.encode() in raw[:40] else raw)

        liar.island._say = own_claim  # type: ignore[method-assign]
        await swarm.finished(0, 1, 2)
        assert not any(node.failure for node in swarm.nodes.values() if node is not liar)
        assert took_part(swarm, liar.name) == []


async def test_a_list_of_the_last_attempt_ends_nobodys_part(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=15) as swarm:
        liar = swarm.add(3)

        async def lead(standing: Any) -> None:
            arrivals = list(liar.island._arrivals.values())
            found = sign_list(identity(3), swarm.record.id, MAX_ATTEMPTS, arrivals, NOW_MS + int(trio.current_time()))
            for peer in found.members:
                if peer != liar.name:
                    await liar.island._say(peer, found.raw)
            await trio.sleep(5)  # more of them help it no further

        liar.island._lead = lead  # type: ignore[method-assign]
        liar.island._lead_at = lambda *args, **more: 0.0  # type: ignore[method-assign]
        await swarm.finished(0, 1, 2)
        assert not any(node.failure for node in swarm.nodes.values() if node is not liar)


async def test_a_result_with_padding_costs_only_who_sends_it(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2) as swarm:
        liar = swarm.add(3)
        exchanged = liar.island._exchanged

        async def padded(members: MemberList, deadline: float) -> Result:
            made = await exchanged(members, deadline)
            values = {
                "job": made.job.hex(), "round": made.round, "list": made.list.hex(), "root": made.root.hex(),
                "failed": {}, "report": {}, "more": "x" * 60_000,
            }  # fmt: skip
            raw = signed(identity(3), "shoal/round/result", values, NOW_MS)
            return Result(made.job, made.round, made.list, made.root, {}, {}, liar.name, raw)

        liar.island._exchanged = padded  # type: ignore[method-assign]
        await swarm.finished(0, 1, 2)
        assert not any(node.failure for node in swarm.nodes.values() if node is not liar)
        assert took_part(swarm, liar.name) == []


async def test_a_copied_commitment_costs_only_who_makes_it(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2) as swarm:
        liar, victim = swarm.add(3), swarm.nodes[1].name
        island = liar.island
        arrive, honest, said = island._arrive, island._note_arrival, island._say

        async def after_the_victim(*made: Any) -> None:
            with trio.move_on_after(3):
                await island._news.wait_for(lambda: victim in island._arrivals)
            await arrive(*made)

        def believed(arrival: Arrival) -> None:
            theirs = island._arrivals.get(victim)
            if arrival.peer == liar.name and theirs is not None and island._own is not None:
                claimed = Arrival(
                    arrival.job, arrival.round, arrival.prev, arrival.steps, arrival.tokens, theirs.change
                )
                arrival = island._own.arrival = sign_arrival(identity(3), claimed, NOW_MS)
            honest(arrival)

        async def own_claim(peer: str, raw: bytes) -> None:
            own = island._own
            await said(peer, own.arrival.raw if own is not None and ARRIVAL.encode() in raw[:40] else raw)

        island._arrive = after_the_victim  # type: ignore[method-assign, assignment]
        island._note_arrival = believed  # type: ignore[method-assign]
        island._say = own_claim  # type: ignore[method-assign]
        await swarm.finished(0, 1, 2)
        log = swarm.nodes[0].island.log
        assert took_part(swarm, liar.name) == []
        assert all(victim in entry.list.members for entry in log if len(entry.list.members) > 1)
        assert not any(entry.doubted for entry in log)


class Copier:
    """A leader that commits to what another has, and gathers that change in several attempts, a share in each."""

    def __init__(self, swarm: IslandSwarm, node: Node, victim: str) -> None:
        self._swarm, self._node, self._island, self._victim = swarm, node, node.island, victim
        self._network = swarm.fabric.nodes[node.name]
        self._honest = self._island._lead
        self.tried = 0
        self._island._lead = self._lead  # type: ignore[method-assign]

    async def _lead(self, standing: Any) -> None:
        island = self._island
        peers = [peer for peer in island._arrivals if peer in standing.members]
        first = leading_order(self._swarm.record.id, standing.round, peers)[0]
        if island._tried or len(peers) < 4 or first != self._node.name or island._own is None:
            await self._honest(standing)
            return
        self.tried += 1
        claim = replace(island._own.arrival, change=island._arrivals[self._victim].change)
        own = sign_arrival(identity(3), claim, NOW_MS)
        others = [island._arrivals[peer] for peer in peers if peer != self._node.name]
        leaves = list[bytes]()
        for turn, share in enumerate(share_ranges(self._node.model.leaves, len(peers))):
            found = self._list([*others[:turn], own, *others[turn:]], turn)
            for peer in found.members:
                self._swarm._nursery.start_soon(island._say, peer, found.raw)
            leaves += (got := await self._leaves(found, share))
            if len(got) < len(share):
                return
        island._own = OwnChange(own, leaves, hashes_of(leaves)[0])
        found = self._list([own, *others], len(peers))
        await island._offer(found)
        deadline = trio.current_time() + island._exchange_s()
        results = await island._gather(found, await island._exchanged(found, deadline), deadline + island.timing.lead_s)
        if results is not None and len(results) == len(peers):
            await island._count(standing, found, results, trio.current_time())

    def _list(self, arrivals: list[Arrival], attempt: int) -> MemberList:
        return sign_list(identity(3), self._swarm.record.id, attempt, arrivals, NOW_MS)

    async def _leaves(self, members: MemberList, share: range) -> list[bytes]:
        """The victim's leaves of a share, if it takes part in such a list."""
        where = {"list": members.hash.hex(), "first": share.start, "count": len(share)}
        body = wire.request(self._swarm.record.id, where)
        for _ in range(3):
            try:
                return wire.unpack(await self._network.call(self._victim, wire.SHARE, body, timeout_s=5), len(share))
            except P2PError:
                await trio.sleep(0.1)
        return []


async def test_a_leader_cannot_have_another_doubted_as_its_copy(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=60) as swarm:
        copier = Copier(swarm, swarm.add(3), swarm.nodes[1].name)
        await swarm.finished(0, 1, 2)
        assert copier.tried
        assert not any(entry.doubted for entry in swarm.nodes[0].island.log)


async def test_answers_larger_than_leaves_are_not_kept(tmp_path: Path, patient_clock: MockClock) -> None:
    config = ModelConfig(**{**CONFIG.__dict__, "vocab_size": 20_000})
    async with open_islands(tmp_path, 0, lesson=plain_lesson(config), steps=500) as swarm:
        island = swarm.nodes[0].island
        await swarm.until(lambda: bool(island.log))
        giver, asked = swarm.fabric.node(identity(7).peer_id), Counter[str]()

        async def large(peer: str, body: bytes) -> Any:
            asked[peer] += 1
            count = wire.fields_of(wire.read_request(body)[1], "merged").integer("count", 1, wire.RUN_LEAVES)
            return wire.pack([bytes(10**6)] * count)

        giver.serve(wire.MERGED, large)
        with pytest.raises(RecordError):
            await island._exchange.merged_of(island.log[-1].list, giver.peer_id, trio.current_time() + 60)
        assert asked.total() == 1


def largest(model: Any) -> None:
    """Let an island send the largest numbers that the format can hold."""
    honest = model.change

    def lie() -> list[bytes]:
        return [_largest(leaf) for leaf in honest()]

    model.change = lie


def _largest(leaf: bytes) -> bytes:
    groups = -(-len(leaf) // (GROUP + 4))
    scales = np.full(groups, np.nextafter(np.float32(codecs._MOST), np.float32(0)), dtype="<f4")
    return scales.tobytes() + b"\x7f" * (len(leaf) - 4 * groups)


async def test_a_change_of_the_largest_numbers_ends_nobodys_part(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, lesson=lesson_of(SMALL)) as swarm:
        liar = swarm.add(3, change=largest)
        await swarm.finished(0, 1, 2)
        assert not any(node.failure for node in swarm.nodes.values() if node is not liar)
        assert len(took_part(swarm, liar.name)) <= 3


def merges_largest(model: Any) -> None:
    """Let a model make the largest numbers of the share that it merges."""
    honest = model.merge

    def lie(rows: Any, first: int, weights: Any) -> Any:
        found = honest(rows, first, weights)
        return found._replace(leaves=[_largest(leaf) for leaf in found.leaves]) if len(rows) > 2 else found

    model.merge = lie


def merges_hundreds(model: Any) -> None:
    """Let an island merge its share to numbers of hundreds of times the norm of a change."""
    usual = model.merge

    def merge(rows: Any, first: int, weights: Any) -> Any:
        found = usual(rows, first, weights)
        sizes = [model._leaf_size(first + number) for number in range(len(found.leaves))]
        if not sizes:
            return found
        long = torch.full((sum(sizes),), -900 * float(model._sent.double().norm()) / sum(sizes) ** 0.5)
        return found._replace(leaves=[encode(part, model.codec) for part in long.split(sizes)])

    model.merge = merge


@pytest.mark.parametrize("change", [merges_largest, merges_hundreds])
async def test_a_share_of_large_numbers_ends_nobodys_part(
    tmp_path: Path, patient_clock: MockClock, change: Callable[[Any], None]
) -> None:
    """Whoever merges a share is believed, but no model could go on with such numbers."""
    async with open_islands(tmp_path, 0, 1, 2, lesson=lesson_of(SMALL)) as swarm:
        liar = swarm.add(3, change=change)
        await swarm.finished(0, 1, 2)
        assert not any(node.failure for node in swarm.nodes.values() if node is not liar)
        assert all(swarm.nodes[number].island.figures.losses[-1] < 20 for number in (0, 1, 2))


# --- histories that nobody else made ----------------------------------------------------------------------------------


def made_up(swarm: IslandSwarm, island: Island, numbers: tuple[int, ...], root: bytes = b"r" * 32) -> bytes:
    """An entry of the current round by islands that were not asked."""
    standing, record = island.standing, swarm.record
    people = [identity(number) for number in numbers]
    arrivals = [
        sign_arrival(one, Arrival(record.id, standing.round, standing.prev, 1, 1, bytes(32)), NOW_MS) for one in people
    ]
    found = sign_list(people[0], record.id, 0, arrivals, NOW_MS)
    results = [sign_result(one, Result(record.id, standing.round, found.hash, root, {}, {}), NOW_MS) for one in people]
    entry = make_entry(
        people[0], record, standing, found, results, every=5, codec="int8", present=standing.members, now_ms=NOW_MS
    )
    return entry.raw


async def test_strangers_make_no_round(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=60) as swarm:
        await joined(swarm, 3)
        stranger, seen = swarm.fabric.node(identity(7).peer_id), list[bytes]()

        def noted(read: Any) -> Any:
            async def reading(peer: str, reader: Any, raw: bytes) -> Any:
                seen.append(raw)
                return await read(peer, reader, raw)

            return reading

        made = []
        for number in (0, 1, 2):
            node = swarm.nodes[number]
            node.island._verified = noted(node.island._verified)  # type: ignore[method-assign]
            made.append(made_up(swarm, node.island, (5, 6, 7)))
            assert await stranger.call(node.name, wire.SAY, swarm.record.id + made[-1], timeout_s=10) == b""
        await swarm.finished(0, 1, 2)
        assert seen
        assert not {*made} & {*seen}  # none of their signatures was looked at


async def test_a_member_and_strangers_make_no_round(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=60) as swarm:
        await joined(swarm, 3)
        liar = swarm.fabric.nodes[swarm.nodes[2].name]
        for number in (0, 1):
            node = swarm.nodes[number]
            raw = made_up(swarm, node.island, (2, 6, 7))
            with pytest.raises(RemoteError) as caught:
                await liar.call(node.name, wire.SAY, swarm.record.id + raw, timeout_s=10)
            assert caught.value.code == wire.WRONG
        await swarm.finished(0, 1, 2)


async def test_many_statements_of_one_peer_do_not_hold_up_those_of_others(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_islands(tmp_path, 0, steps=500) as swarm:
        node, job = swarm.nodes[0], swarm.record.id
        flooder, other = (swarm.fabric.node(identity(number).peer_id) for number in (6, 7))

        async def reading(function: Any, *args: Any) -> Any:
            await trio.sleep(0.1)
            return function(*args)

        async def say(network: Any, raw: bytes) -> None:
            try:
                await network.call(node.name, wire.SAY, job + raw, timeout_s=60)
            except RemoteError:
                pass

        node.island._in_thread = reading
        raw = made_up(swarm, node.island, (0, 6, 7))
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(say, flooder, raw)
            await trio.sleep(0.5)
            began = trio.current_time()
            await say(other, raw)
            assert trio.current_time() - began < 1
        assert not node.island._turns


async def test_one_member_alone_makes_no_round_while_others_are_there(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=60) as swarm:
        await joined(swarm, 3)
        honest, liar = swarm.nodes[0].island, swarm.nodes[2]
        await swarm.until(lambda: honest.head == liar.island.head and honest._own is None)
        # a round in which nothing was learned, with all that others need to take it over
        leaves = [codecs.encode(leaf, "int8") for leaf in liar.model._shared.values.mul(0).split(LEAF)]
        raw = made_up(swarm, honest, (2,), hashed(liar.model.advance(leaves))[0])
        network = swarm.fabric.nodes[liar.name]
        asked = []

        async def log_with_more(peer: str, body: bytes) -> Any:
            asked.append(peer)
            fields = wire.fields_of(wire.read_request(body)[1], "log")
            entries = [*(entry.raw for entry in honest.log), raw]
            return wire.pack(entries[fields.integer("round", 0, 10**7) :])

        async def merged(peer: str, body: bytes) -> Any:
            fields = wire.fields_of(wire.read_request(body)[1], "merged")
            first = fields.integer("first", 0, 10**7)
            return wire.pack(leaves[first : first + fields.integer("count", 1, 10**7)])

        liar.scope.cancel()
        network.serve(wire.LOG, log_with_more)
        network.serve(wire.MERGED, merged)
        before = honest.standing.round
        hello = wire.request(swarm.record.id, {"round": before + 1, "head": "ab" * 32})
        await network.call(swarm.nodes[0].name, wire.HELLO, hello, timeout_s=5)
        await swarm.until(lambda: bool(asked) and honest.standing.round > before)
        assert honest.log[before].raw != raw
        await swarm.finished(0, 1)


async def test_a_log_without_end_is_given_up_at_its_first_wrong_entry(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, steps=60) as swarm:
        await joined(swarm, 2)
        stranger = swarm.fabric.node(identity(7).peer_id)
        asked: list[int] = []
        raw = made_up(swarm, swarm.nodes[0].island, (7,))

        async def endless(peer: str, body: bytes) -> Any:
            asked.append(len(body))
            return wire.pack([raw] * wire.RUN_ENTRIES)

        stranger.serve(wire.LOG, endless)
        hello = wire.request(swarm.record.id, {"round": 10**6, "head": "ab" * 32})
        await stranger.call(swarm.nodes[0].name, wire.HELLO, hello, timeout_s=5)
        await swarm.finished(0, 1)
        assert 1 <= len(asked) <= 4


@pytest.mark.soak
async def test_a_log_that_is_shown_slowly_is_given_up(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_islands(tmp_path, 0, 1, steps=300) as swarm:
        island = swarm.nodes[0].island
        await swarm.until(lambda: len(island.log) >= 40)
        stranger, asked = swarm.fabric.node(identity(7).peer_id), list[float]()
        log = [entry.raw for entry in island.log]
        monkeypatch.setattr(wire, "RUN_ENTRIES", 2)  # of an answer, so that forty rounds are a long log

        async def slow(peer: str, body: bytes) -> Any:
            asked.append(trio.current_time())
            first = wire.fields_of(wire.read_request(body)[1], "log").integer("round", 0, 10**7)
            await trio.sleep(0.9 * island.timing.lead_s)
            return wire.pack(log[first : first + 2] if first < len(log) else log[:2])

        stranger.serve(wire.LOG, slow)
        hello = wire.request(swarm.record.id, {"round": 10**6, "head": "ab" * 32})
        await stranger.call(swarm.nodes[0].name, wire.HELLO, hello, timeout_s=5)
        await swarm.until(lambda: bool(asked))
        rounds = island.standing.round
        await swarm.until(lambda: island.standing.round > rounds)
        assert trio.current_time() - asked[0] < 2 * island.timing.exchange_s
        await swarm.finished(0, 1)


def counted(swarm: IslandSwarm, asker: Node, *numbers: int) -> Counter[str]:
    """What islands are asked by another one from now on."""
    calls = Counter[str]()
    for number in numbers:
        island = swarm.nodes[number].island
        honest = island.answer

        async def answer(method: str, peer: str, rest: bytes, honest: Any = honest) -> Any:
            calls[method] += peer == asker.name
            return await honest(method, peer, rest)

        island.answer = answer  # type: ignore[method-assign]
    return calls


async def test_a_newcomer_without_room_for_the_state_ends_with_the_reason(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """It asked the members for their whole log twice a second, for ever, and said that nobody has the state."""
    async with open_islands(tmp_path, 0, 1, steps=10**6) as swarm:
        await swarm.until(lambda: swarm.nodes[0].island.standing.round >= 3)
        newcomer = swarm.add(2, has_model=False)
        calls = counted(swarm, newcomer, 0, 1)
        newcomer.island._states._floor_bytes = lambda: 2**60
        await newcomer.ended.wait()
        assert what_it_waits_for(newcomer.failure).startswith("waits for room on the disk")  # type: ignore[arg-type]
        assert calls[wire.LOG] <= 4


async def test_a_newcomer_that_can_use_no_state_asks_ever_more_seldom(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_islands(tmp_path, 0, 1, steps=10**6, step_s=1.0) as swarm:
        await swarm.until(lambda: swarm.nodes[0].island.standing.round >= 3)
        newcomer = swarm.add(2, has_model=False)
        calls, is_broken = counted(swarm, newcomer, 0, 1), True
        load = newcomer.model.load

        def load_or_fail(states: Any) -> None:
            if is_broken:
                raise EngineError("the device gives wrong results")
            load(states)

        monkeypatch.setattr(newcomer.model, "load", load_or_fail)
        await trio.sleep(60)
        assert 2 * 4 <= calls[wire.LOG] <= 2 * 12  # 118 before
        is_broken = False
        await swarm.until(lambda: newcomer.name in swarm.nodes[0].island.standing.members, 120)


@pytest.mark.soak
async def test_a_history_that_is_never_shown_holds_nobody_up(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=100) as swarm:
        await joined(swarm, 3)
        stranger = swarm.fabric.node(identity(7).peer_id)

        async def silent(peer: str, body: bytes) -> Any:
            await trio.sleep_forever()

        stranger.serve(wire.LOG, silent)
        done = trio.Event()

        async def boast() -> None:
            number = 0
            while not done.is_set():
                number += 1
                hello = wire.request(swarm.record.id, {"round": 10**6, "head": f"{number:064x}"})
                for node in swarm.nodes.values():
                    with trio.move_on_after(1):
                        try:
                            await stranger.call(node.name, wire.HELLO, hello, timeout_s=1)
                        except P2PError:
                            pass
                await trio.sleep(0.5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(boast)
            began = trio.current_time()
            await swarm.finished(0, 1, 2)
            done.set()
        assert trio.current_time() - began < 90  # 19 rounds of half a second, and some vain looks of four seconds


async def test_histories_of_members_that_are_never_shown_cost_little_time(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """Three names that were taken into the rounds claim other histories in turn: most of the time is left for steps."""
    async with open_islands(tmp_path, 0, 1, 2, steps=60) as swarm:
        island, ghosts = swarm.nodes[0].island, [swarm.fabric.node(identity(number).peer_id) for number in (7, 8, 9)]
        looks: list[float] = []

        async def silent(peer: str, body: bytes) -> Any:
            began = trio.current_time()
            try:
                await trio.sleep_forever()
            finally:
                if peer == island.peer:
                    looks.append(trio.current_time() - began)

        async def say(round_number: int, head: str) -> None:
            body = wire.request(swarm.record.id, {"round": round_number, "head": head})
            for ghost in ghosts:
                ghost.serve(wire.LOG, silent)
                for node in swarm.nodes.values():
                    await ghost.call(node.name, wire.HELLO, body, timeout_s=5)

        names = {ghost.peer_id for ghost in ghosts}
        while not names <= {*island.standing.members}:
            await say(island.standing.round, island.head.hex())
            await trio.sleep(0.2)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def boast() -> None:
                number = 0
                while True:
                    number += 1
                    await say(10**6, f"{number:064x}")
                    await trio.sleep(1)

            nursery.start_soon(boast)
            await swarm.finished(0, 1, 2)
            nursery.cancel_scope.cancel()
        took = trio.current_time() - began
        assert looks
        assert sum(looks) < took / 3


async def test_who_waits_for_a_place_does_not_keep_the_changes_of_all_rounds(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """It takes over the merged change of every round, as large as the model, and takes part in none."""
    async with open_islands(tmp_path, 0, 1, 2, 3, steps=45, grid=True, islands=3) as swarm:
        await swarm.finished(0, 1, 2, 3)
        waited = [node.island for node in swarm.nodes.values() if not node.island.figures.steps]
        assert len(waited) == 1
        assert len(waited[0].log) > KEPT_ATTEMPTS + 1
        assert len(waited[0]._attempts) <= KEPT_ATTEMPTS


@pytest.mark.soak
async def test_many_hellos_do_not_push_out_a_member(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, steps=60) as swarm:
        island = swarm.nodes[0].island
        fields = wire.fields_of(b'{"round":0,"head":"' + b"00" * 32 + b'"}', "hello")
        await swarm.until(lambda: island.standing.round >= 1)
        for number in range(2 * MAX_PEERS):
            island._note_hello(f"ghost{number}", fields)
        assert len(island.heard) <= MAX_PEERS
        swarm.add(1)
        await joined(swarm, 2)
        await swarm.finished(0, 1)


async def test_wrong_sizes_of_a_state_do_not_keep_a_newcomer_out(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=150) as swarm:
        await joined(swarm, 3)
        for number in (1, 2):
            network = swarm.fabric.nodes[swarm.nodes[number].name]
            island = swarm.nodes[number].island

            async def parts(peer: str, body: bytes, island: Island = island) -> bytes:
                from app.core.canonical_json import canonical

                return canonical(
                    {"parts": [[part.root.hex(), part.size_bytes + 1] for part in island.checkpoint.parts]}
                )

            network.serve(wire.PARTS, parts)
        late = swarm.add(4, has_model=False)
        await swarm.until(lambda: late.name in swarm.nodes[0].island.standing.members)
        await swarm.until(lambda: late.island.figures.steps > 0)
        assert late.failure is None


# --- framing ----------------------------------------------------------------------------------------------------------


async def test_who_merges_one_thing_for_one_member_and_another_for_the_next_is_found(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_islands(tmp_path, 0, 1, 2, lesson=plain_lesson(CONFIG)) as swarm:
        liar = swarm.add(3)
        victim = swarm.nodes[1].name
        answered = liar.island._on_exchange

        async def two_faced(method: str, peer: str, fields: Any) -> Any:
            answer: Any = await answered(method, peer, fields)
            attempt = liar.island._attempts[fields.hex_bytes("list", 32)]
            if peer != victim or len(attempt.members.members) < 3:
                return answer
            if method == wire.MERGED:
                leaves = wire.unpack(b"".join(answer), wire.RUN_LEAVES)
                return wire.pack([bytes(len(leaf)) for leaf in leaves])
            if method == wire.SIGNED:
                from app.rounds.exchange import hashes_of

                own = [bytes(len(attempt.merged[leaf])) for leaf in own_share(liar, attempt.members)]
                share = MergedShare(swarm.record.id, attempt.members.hash, hashes_of(own)[1])
                return wire.pack([sign_share(identity(3), share, NOW_MS).raw])
            return answer

        liar.island._on_exchange = two_faced  # type: ignore[method-assign]
        await swarm.finished(0, 1, 2)
        log = swarm.nodes[0].island.log
        assert all(victim in entry.list.members for entry in log if len(entry.list.members) > 1)
        assert all(liar.name not in entry.list.members for entry in log if entry.list.leader != liar.name)
        assert any(node.island.figures.repeated for node in swarm.nodes.values())


def own_share(node: Node, members: MemberList) -> range:
    """The leaves that an island merges."""
    from app.rounds.decisions import share_ranges

    return share_ranges(node.model.leaves, len(members.members))[members.members.index(node.name)]


def deaf_to(victim: str, island: Island) -> None:
    """Let an island lead without one who has arrived, whoever says so."""
    honest: Callable[[Arrival], None] = island._note_arrival

    def note(arrival: Arrival) -> None:
        if arrival.peer != victim:
            honest(arrival)

    island._note_arrival = note  # type: ignore[method-assign]


async def test_a_leader_leaves_nobody_out_who_was_heard(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=50) as swarm:
        liar = swarm.add(3)
        await joined(swarm, 4)
        deaf_to(swarm.nodes[1].name, liar.island)
        since = len(swarm.nodes[0].island.log) + 1
        await swarm.finished(0, 1, 2, within_s=1500)
        log = swarm.nodes[0].island.log
        assert any(entry.round >= since for entry in log)
        assert all(swarm.nodes[1].name in entry.list.members for entry in log if entry.round >= since)


async def test_members_that_a_leader_made_up_are_not_waited_for(tmp_path: Path, patient_clock: MockClock) -> None:
    ghosts = {identity(number).peer_id for number in range(100, 112)}
    async with open_islands(tmp_path, 0, 1, 2, steps=60) as swarm:
        liar = swarm.add(3)
        count = liar.island._count

        async def with_ghosts(standing: Any, *more: Any) -> None:
            now = trio.current_time()
            liar.island.heard |= {peer: Heard(now, standing.round, standing.prev) for peer in ghosts}
            await count(standing, *more)

        liar.island._count = with_ghosts  # type: ignore[assignment, method-assign]
        began = trio.current_time()
        await swarm.finished(0, 1, 2)
        assert any(ghosts <= {*entry.next} for entry in swarm.nodes[0].island.log)
        assert trio.current_time() - began < TIMING.quorum_s


@pytest.mark.soak
async def test_a_leader_that_missed_an_arrival_is_told_of_it(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=50) as swarm:
        await joined(swarm, 3)
        deaf = swarm.nodes[0].island
        statement = deaf._on_statement

        async def lost(peer: str, raw: bytes) -> bytes:
            """Arrivals of one island never reach another one directly."""
            return (
                b""
                if peer == swarm.nodes[1].name and b"shoal/round/arrival" in raw[:40]
                else await statement(peer, raw)
            )

        deaf._on_statement = lost  # type: ignore[method-assign]
        since = len(deaf.log) + 1
        await swarm.finished(0, 1, 2, within_s=1500)
        led = [entry for entry in deaf.log if entry.round >= since and entry.list.leader == swarm.nodes[0].name]
        assert led
        assert members_of(deaf.log)[since:] == [3] * len(deaf.log[since:])


async def test_a_false_accusation_costs_the_accuser_its_place(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0, 1, 2, 3) as swarm:
        liar = swarm.add(4)
        victim = swarm.nodes[1].name
        exchanged = liar.island._exchanged
        accused: set[int] = set()  # rounds

        async def accusing(members: MemberList, deadline: float) -> Result:
            made = await exchanged(members, deadline)
            if victim not in members.members:
                return made
            accused.add(made.round)
            false = Result(made.job, made.round, made.list, b"", {victim: "it is silent"}, made.report)
            return sign_result(identity(4), false, NOW_MS)

        liar.island._exchanged = accusing  # type: ignore[method-assign]
        await swarm.finished(0, 1, 2, 3)
        assert accused
        made = [entry.list for entry in swarm.nodes[0].island.log if entry.list.round in accused]
        assert all(liar.name not in one.members for one in made if victim not in one.members)


def accuses(swarm: IslandSwarm, number: int) -> None:
    """Let an island accuse a member of every exchange, another one in each round."""
    island, me = swarm.nodes[number].island, swarm.nodes[number].name
    exchanged = island._exchanged

    async def accusing(members: MemberList, deadline: float) -> Result:
        made = await exchanged(members, deadline)
        others = sorted({*members.members} - {me})
        if len(others) < 2:
            return made
        victim = others[(made.round + number) % len(others)]
        false = Result(made.job, made.round, made.list, b"", {victim: "it is silent"}, made.report)
        return sign_result(identity(number), false, NOW_MS)

    island._exchanged = accusing  # type: ignore[method-assign]


@pytest.mark.soak
async def test_as_many_newcomers_as_members_take_nobody_with_them(tmp_path: Path, patient_clock: MockClock) -> None:
    """Each false accusation cost a member its place in the round, and with it most of a job's time."""
    async with open_islands(tmp_path, 0, 1, 2, 3, steps=100, every=2, least_every=2, most_every=2) as swarm:
        honest = {node.name for node in swarm.nodes.values()}
        island = swarm.nodes[0].island
        await swarm.until(lambda: island.standing.round >= 17)
        began = len(island.log)
        for number in (4, 5, 6, 7):
            swarm.add(number)
            accuses(swarm, number)
        await swarm.finished(0, 1, 2, 3)
        assert island.figures.repeated or any(swarm.nodes[number].island.figures.repeated for number in (1, 2, 3))
        lost = sum(len(honest - {*entry.list.members}) for entry in island.log[began:])
        assert lost <= 0.05 * len(honest) * len(island.log[began:])


@pytest.mark.soak
async def test_an_accomplice_that_is_no_member_does_not_end_the_wait_for_results(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_islands(tmp_path, 0, 1, 2, steps=60) as swarm:
        await joined(swarm, 3)
        since = len(swarm.nodes[0].island.log) + 1
        stranger = swarm.fabric.node(identity(7).peer_id)
        done = trio.Event()
        said = swarm.nodes[2].island._say

        async def late(peer: str, raw: bytes) -> None:
            if RESULT.encode() in raw[:40]:
                await trio.sleep(1)
            await said(peer, raw)

        swarm.nodes[2].island._say = late  # type: ignore[method-assign]

        async def interfere() -> None:
            while not done.is_set():
                for node in swarm.nodes.values():
                    for found in list(node.island._results):
                        forged = Result(swarm.record.id, node.island.standing.round, found, b"x" * 32, {}, {})
                        raw = sign_result(identity(7), forged, NOW_MS).raw
                        await stranger.call(node.name, wire.SAY, swarm.record.id + raw, timeout_s=5)
                await trio.sleep(0.05)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(interfere)
            await swarm.finished(0, 1, 2)
            done.set()
        assert {*members_of(swarm.nodes[0].island.log)[since:]} == {3}


# --- the machine ------------------------------------------------------------------------------------------------------


async def test_a_full_disk_ends_an_island_with_its_own_error(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_islands(tmp_path, 0) as swarm:

        async def full(entries: Any, states: Any) -> None:
            raise OSError(28, "No space left on device")

        swarm.nodes[0].island._settled = full
        await swarm.until(lambda: swarm.nodes[0].failure is not None)
        assert isinstance(swarm.nodes[0].failure, OSError)  # and no group of exceptions, which would end the node


# --- jobs that members name ------------------------------------------------------------------------------------------


async def test_a_record_nested_deeply_keeps_nobody_from_founding_or_joining(tmp_path: Path) -> None:
    shape = '{"layer_types":' + "[" * 600 + "]" * 600 + "}"
    payload = canonical({"v": 1, **json.loads(RECORD.payload()), "shape": json.loads(shape)})
    deep = seal(PEOPLE[0], DOMAIN, payload, sequence=wall_ms(), expires_at_ms=NEVER)
    async with open_nodes(tmp_path) as nodes:
        hostile: Any = nodes[1].jobs._place.network

        async def name_it(peer: str, body: bytes) -> Any:
            return wire.pack([deep])

        hostile.serve(wire.JOBS, name_it)
        assert await nodes[0].jobs.joinable() == []
        await nodes[0].jobs.found(wish_in(tmp_path, "one"))
        [facts] = await nodes[0].jobs.facts()
        assert facts["status"] == "running"
