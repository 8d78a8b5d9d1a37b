"""Steps that are computed again: who did not compute them on its text is left out, and nobody else ever is."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from app.core.errors import RecordError
from app.core.network import Payload
from app.core.pieces import at_once
from app.rounds import testers, wire
from app.rounds.decisions import UNMEASURED_BYTES_PER_S
from app.rounds.exchange import Exchange, hashes_of
from app.rounds.island import LeftOut
from app.rounds.log import follow, make_entry, replay
from app.rounds.record import read_training, sign_training
from app.rounds.statements import ARRIVAL, MAX_ARRIVAL_BYTES, read_arrival, signed
from app.rounds.testers import MOST_RATIO, TESTERS, WRONG_STEP, DrawnTest, drawn_trace, miscomputed, step_error
from app.rounds.testing import TEST_S
from app.rounds.traces import MOST_TRACES, TRACE_BYTES, Trace, pack_trace, trace_seed, traced_steps, unpack_trace
from engine.island import LEAF
from engine.training.codecs import encoded_bytes
from engine.training.parameters import drawn_model
from p2p.envelope import parse
from p2p.errors import RemoteError
from p2p.memory.fabric import LinkProfile, open_fabric
from tests.app.hash_model import InlineDevice
from tests.app.rounds.island_swarm import (
    CONFIG,
    SMALL,
    UNHURRIED,
    IslandSwarm,
    Lesson,
    Node,
    Text,
    in_place,
    lesson_of,
    open_islands,
)
from tests.app.rounds.statements import BY_PEER, NOW_MS, PEOPLE, RECORD, arrival, history, members, result, round_of

CHECKED = replace(RECORD, recompute=True)


# --- decisions --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**5), st.integers(1, 2**40))
def test_the_steps_that_are_kept_fit_and_begin_with_the_first(every: int, size: int) -> None:
    steps = traced_steps(every, size)
    assert steps[0] == 0
    assert sorted({*steps}) == steps
    assert steps[-1] < every
    assert len(steps) <= MOST_TRACES
    assert len(steps) == 1 or len(steps) * size <= TRACE_BYTES


def test_every_step_of_a_small_model_is_kept() -> None:
    assert traced_steps(50, 2 * 10**6) == list(range(50))


def test_lots_fall_on_all_steps() -> None:
    drawn = Counter(drawn_trace(hashlib.sha256(bytes([at % 256, at // 256])).digest(), "a", 10) for at in range(2000))
    assert all(drawn[step] == pytest.approx(200, rel=0.35) for step in range(10))


def test_seeds_are_those_of_one_member_and_round() -> None:
    seeds = {trace_seed(job, prev, peer) for job in (b"j", b"k") for prev in (b"p", b"q") for peer in ("a", "b")}
    assert len(seeds) == 8


@given(st.binary(max_size=400))
def test_traces_are_read_as_they_are_written_and_others_refused(raw: bytes) -> None:
    try:
        trace = unpack_trace(raw)
    except RecordError:
        assert (len(raw) - 32) % 4 or not 32 < len(raw) <= 32 + 4 * 64
        return
    assert trace.root == raw[:32]
    if all(map(math.isfinite, trace.sketch)):  # the bits of other numbers may change
        assert pack_trace(trace) == raw


ONE = (3.0, 4.0)


@pytest.mark.parametrize(
    ("before", "after", "claimed", "found", "error"),
    [
        (2.0, 2.0, ONE, ONE, 1),  # never 0, which says that nothing was computed
        (2.0, 2.0, (3.0, 4.5), ONE, 92),
        (2.0, 2.0, (0.0, 0.0), ONE, 1000),
        (2.0, 2.0, (-3.0, -4.0), ONE, 2000),
        (2.0, 2.0, (300.0, 400.0), ONE, 990),
        (0.1, 0.9, ONE, ONE, 1),  # a model that knows its text nearly by heart
        (2.0, 5.5, ONE, ONE, MOST_RATIO),  # weights that nobody trains with
        (2.0, math.nan, ONE, ONE, MOST_RATIO),
        (2.0, 2.0, (math.nan, 4.0), ONE, MOST_RATIO),
        (2.0, 2.0, (math.inf, 4.0), ONE, MOST_RATIO),
        (2.0, 2.0, ONE, (math.nan, 4.0), MOST_RATIO),
        (2.0, 2.0, (0.0, 0.0), (0.0, 0.0), MOST_RATIO),  # a model that computes nothing
        (2.0, 2.0, (3.0,), ONE, MOST_RATIO),
    ],
)
def test_errors_as_thousandths(
    before: float, after: float, claimed: tuple[float, ...], found: tuple[float, ...], error: int
) -> None:
    assert step_error(before, after, claimed, found) == error


THREE = (DrawnTest("liar", ("a", "b", "c")),)
OFF = WRONG_STEP + 1


@pytest.mark.parametrize(
    ("tests", "told", "found"),
    [
        (THREE, {}, False),
        (THREE, {"a": (OFF,), "b": (OFF,), "c": (1,)}, True),
        (THREE, {"a": (OFF,), "b": (OFF,)}, True),
        (THREE, {"a": (MOST_RATIO,), "b": (1,), "c": (1,)}, False),  # one tester that lies
        (THREE, {"a": (MOST_RATIO,), "b": (1,)}, False),
        (THREE, {"a": (MOST_RATIO,)}, False),
        (THREE, {"a": (MOST_RATIO,), "b": (0,), "c": (0,)}, False),
        (THREE, {"a": (WRONG_STEP,), "b": (WRONG_STEP,)}, False),
        (THREE, {"x": (OFF,), "y": (OFF,)}, False),  # who was not drawn has no say
        (THREE, {"a": (OFF, 0), "b": (OFF, 0)}, False),  # about another number of tests
        ((DrawnTest("liar", ("a", "b")),), {"a": (OFF,), "b": (OFF,)}, True),
        ((DrawnTest("liar", ("a", "b")),), {"a": (OFF,), "b": (1,)}, False),
    ],
)
def test_two_testers_have_to_agree(tests: Sequence[DrawnTest], told: dict[str, tuple[int, ...]], found: bool) -> None:
    assert (miscomputed(tests, told).keys() == {"liar"}) is found


# --- statements -------------------------------------------------------------------------------------------------------


def test_a_record_with_an_own_text_has_no_steps_computed_again() -> None:
    assert read_training(sign_training(PEOPLE[0], CHECKED), now_ms=NOW_MS) == CHECKED
    assert b"recompute" not in RECORD.payload()
    with pytest.raises(RecordError, match="computed again"):
        sign_training(PEOPLE[0], replace(CHECKED, own_data=True, tokens=None))


def test_an_arrival_with_traces_is_short_enough() -> None:
    standing = replace(replay(RECORD, history(2)), round=10**7, every=10**6)
    made = arrival(PEOPLE[0], standing, 2**50, traces=b"t" * 32)
    assert made.traces == b"t" * 32
    assert len(parse(made.raw).payload) <= MAX_ARRIVAL_BYTES
    plain = arrival(PEOPLE[0], standing)
    assert (b"traces" in plain.raw, plain.traces) == (False, b"")
    with pytest.raises(RecordError):
        read_arrival(signed(PEOPLE[0], ARRIVAL, {"traces": "ab"}, NOW_MS))


@pytest.mark.parametrize("record", [RECORD, CHECKED])
def test_the_log_doubts_whom_testers_found_wrong_only_where_steps_are_computed_again(record: Any) -> None:
    people = PEOPLE[:4]
    standing = replay(RECORD, history(2, people))
    liar = people[1].peer_id
    _, standing = round_of(standing, people, liar=liar)
    at, test = next((at, test) for at, test in enumerate(standing.tests) if test.peer == liar)
    found = members(standing, people)
    errors = [1] * len(standing.tests)
    errors[at] = OFF
    after = hashlib.sha256(found.raw).digest()
    report = {peer: (1.0, 0.5) for peer in found.members}
    results = [
        result(BY_PEER[peer], found, after, report, recomputed=tuple(errors) if peer in test.testers else ())
        for peer in found.members
    ]
    leader = BY_PEER[found.leader]
    entry = make_entry(
        leader, record, standing, found, results, every=10, codec="int8", present=(), now_ms=NOW_MS
    )  # fmt: skip
    assert (entry.doubted.keys() == {liar}) is record.recompute
    if record is RECORD:
        assert follow(record, standing, entry).banned == {}


# --- swarms -----------------------------------------------------------------------------------------------------------


def told(swarm: IslandSwarm, peer: str) -> list[int]:
    """By how much testers found the steps of an island to be off, as the log says."""
    island = swarm.nodes[0].island
    found = []
    for before, entry in zip(island.log, island.log[1:], strict=False):
        standing = replay(swarm.record, island.log[: before.round + 1])
        for at, test in enumerate(standing.tests):
            if test.peer == peer:
                found += [one.recomputed[at] for one in entry.results if one.recomputed and one.peer in test.testers]
    return [error for error in found if error]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
async def test_honest_steps_are_found_right(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    lesson = Lesson(CONFIG, drawn_model(CONFIG, seed), Text())
    options: dict[str, Any] = {"recompute": True, "optimiser": "adamw", "rate": 3e-2 / seed}
    async with open_islands(tmp_path, 0, 1, 2, 3, steps=30, seed=seed, lesson=lesson, **options) as swarm:
        await swarm.finished(0, 1, 2, 3)
        log = swarm.nodes[0].island.log
        errors = [error for node in swarm.nodes.values() for error in told(swarm, node.name)]
        assert len(errors) >= TESTERS * (len(log) - 4)
        assert max(errors) <= WRONG_STEP / 5
        assert not any(entry.doubted for entry in log)


async def test_traces_change_no_bit_of_the_state(tmp_path: Path, patient_clock: MockClock) -> None:
    roots = []
    for recompute in (False, True):
        # alone: with others, the order in which they read depends on the job's hash
        async with open_islands(tmp_path / str(recompute), 0, lesson=lesson_of(SMALL), recompute=recompute) as swarm:
            await swarm.finished(0)
            log = swarm.nodes[0].island.log
            roots.append([entry.root for entry in log])
            assert {bool(one.traces) for entry in log for one in entry.list.arrivals} == {recompute}
    assert roots[0] == roots[1]


async def test_without_it_nobody_speaks_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    async with open_islands(tmp_path, 0, 1, 2) as swarm:
        await swarm.finished(0, 1, 2)
        log = swarm.nodes[0].island.log
        assert any(one.tested for entry in log for one in entry.results)
        for entry in log:
            assert all(b"traces" not in one.raw for one in entry.list.arrivals)
            assert all(b"recomputed" not in one.raw for one in entry.results)


def sketches(made_up: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Callable[[Any], None]:
    """Let an island commit to other sketches of its gradients than those that it computed."""

    def change(model: Any) -> None:
        honest = model.step

        def step(*args: Any) -> Any:
            made = at_once(honest(*args))
            return replace(made, sketch=made_up(made.sketch))

        model.step = step

    return change


@pytest.mark.parametrize(
    "made_up",
    [
        lambda sketch: sketch[::-1],
        pytest.param(lambda sketch: tuple(-2 * number for number in sketch), marks=pytest.mark.soak),
        pytest.param(lambda sketch: (0.0,) * len(sketch), marks=pytest.mark.soak),
        lambda sketch: (math.nan,) * len(sketch),
        pytest.param(lambda sketch: sketch[:5], marks=pytest.mark.soak),
    ],
    ids=["shuffled", "flipped", "zeros", "nan", "short"],
)
async def test_who_makes_its_gradients_up_is_left_out(
    made_up: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    async with open_islands(tmp_path, 0, 1, 2, lesson=lesson_of(SMALL), steps=400, recompute=True) as swarm:
        liar = swarm.add(3, change=sketches(made_up))
        await found_out(swarm, liar)


async def test_who_reads_another_text_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    """It trains, and its change is as good as the others', but not by what it was to read."""
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    async with open_islands(tmp_path, 0, 1, 2, lesson=lesson_of(SMALL), steps=400, recompute=True) as swarm:
        liar = swarm.add(3)

        class Elsewhere(Text):
            def sequence(self, number: int) -> list[int]:
                return super().sequence((number + 31) % self.count)

        liar.island._text = Elsewhere()
        await found_out(swarm, liar)


async def test_the_gradients_of_another_island_are_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    """The liar has all traces of another member, computes nothing, and sends that one's change a little changed."""
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    async with open_islands(tmp_path, 0, 1, 2, lesson=lesson_of(SMALL), steps=400, recompute=True) as swarm:
        liar, victim = swarm.add(3), swarm.nodes[1]
        arrive = liar.island._arrive

        async def copied(standing: Any, steps: int, tokens: int, traces: Any) -> None:
            with trio.move_on_after(3):
                await liar.island._news.wait_for(lambda: victim.name in liar.island._arrivals)
            theirs = victim.island._own
            if theirs is not None and len(theirs.traced) == len(traces.weights):
                traces.weights = list(theirs.traced)
                traces.sketches = [unpack_trace(raw).sketch for raw in theirs.traces]
            await arrive(standing, steps, tokens, traces)

        liar.island._arrive = copied  # type: ignore[method-assign]
        await found_out(swarm, liar)


@pytest.mark.parametrize("method", [wire.TRACE, pytest.param(wire.TRACES, marks=pytest.mark.soak)])
async def test_who_shows_another_step_is_left_out(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    async with open_islands(tmp_path, 0, 1, 2, steps=400, recompute=True) as swarm:
        liar = swarm.add(3)
        honest = liar.island._on_exchange

        async def answered(asked: str, peer: str, fields: Any) -> Any:
            return wire.pack([bytes(1000)]) if asked == method else await honest(asked, peer, fields)

        liar.island._on_exchange = answered  # type: ignore[method-assign, assignment]
        await found_out(swarm, liar)


async def silent() -> Any:
    await trio.sleep_forever()


async def refusing() -> Any:
    raise RemoteError("not here any more", wire.WRONG)


@pytest.mark.parametrize("answer", [silent, refusing])
async def test_who_does_not_show_its_step_is_not_doubted(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    """Its links may have become slow, or its job is paused."""
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    # steps are so long that testers see that nothing comes before the next round ends their test
    options: dict[str, Any] = {"step_s": 8.0, "timing": UNHURRIED, "recompute": True}
    async with open_islands(tmp_path, 0, 1, 2, steps=400, **options) as swarm:
        island = swarm.add(3, step_s=8.0).island
        shown, asked = island._on_exchange, Counter[str]()

        async def answered(method: str, peer: str, fields: Any) -> Any:
            if method == wire.TRACE:
                asked[peer] += 1
                return await answer()
            return await shown(method, peer, fields)

        island._on_exchange = answered  # type: ignore[method-assign]
        await swarm.until(lambda: len(asked) == TESTERS)
        number = island.standing.round
        await swarm.until(lambda: island.standing.round >= number + 2)
        assert not any(entry.doubted for entry in island.log)


async def test_a_link_slower_than_it_was_measured_still_carries_the_weights_of_a_step(patient_clock: MockClock) -> None:
    """They take four times the bytes of the same leaves of a change in int4, which slow links have."""
    leaves = [bytes(2 * LEAF)] * 50
    model: Any = SimpleNamespace(
        leaves=len(leaves), leaf_bytes=encoded_bytes(LEAF, "int4"), most_leaf_bytes=4 * LEAF, traced_leaf_bytes=2 * LEAF
    )
    standing = replay(RECORD, history(2))
    async with open_fabric(1, LinkProfile(delay_s=0.03, bytes_per_s=UNMEASURED_BYTES_PER_S / 6)) as fabric:
        giver, taker = fabric.node(PEOPLE[0].peer_id), fabric.node(PEOPLE[1].peer_id)

        async def answer(peer: str, body: bytes) -> Payload:
            fields = wire.fields_of(wire.read_request(body)[1], wire.TRACE)
            first, count = fields.integer("first", 0, len(leaves)), fields.integer("count", 1, len(leaves))
            return wire.pack(leaves[first : first + count])

        giver.serve(wire.TRACE, answer)
        exchange = Exchange(
            taker, PEOPLE[1], InlineDevice(), model, RECORD.id, wall_ms=lambda: NOW_MS, in_thread=in_place
        )
        deadline = trio.current_time() + TEST_S
        root = hashes_of(leaves)[1]
        assert await exchange.traced_weights(members(standing, PEOPLE[:3]), giver.peer_id, root, deadline) == leaves


async def found_out(swarm: IslandSwarm, liar: Node) -> None:
    """Wait until an island is left out for its steps alone, within a few tests of it, and nobody else is doubted."""
    await swarm.until(lambda: liar.failure is not None, within_s=20_000)
    assert isinstance(liar.failure, LeftOut)
    log = swarm.nodes[0].island.log
    assert log[-1].left_out.keys() == {liar.name}
    assert "computed again" in log[-1].left_out[liar.name]
    assert {peer for entry in log for peer in entry.doubted} == {liar.name}
    tests = [test for number in range(len(log)) for test in replay(swarm.record, log[: number + 1]).tests]
    assert sum(test.peer == liar.name for test in tests) <= 4


async def test_one_tester_that_lies_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    async with open_islands(tmp_path, 0, 1, 2, steps=40, recompute=True) as swarm:
        liar = swarm.add(3)
        liar.model.retrace = lambda *args: (1.0, 1.0, (math.nan,))  # type: ignore[assignment, method-assign]
        await swarm.finished(0, 1, 2, 3)
        log = swarm.nodes[0].island.log
        said = [one.recomputed for entry in log for one in entry.results if one.peer == liar.name and one.recomputed]
        assert any(MOST_RATIO in errors for errors in said)
        assert not any(entry.doubted for entry in log)


async def test_only_testers_see_the_drawn_step_and_nobody_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    monkeypatch.setattr(testers, "ROUNDS_A_TEST", 1)
    async with open_islands(tmp_path, 0, 1, 2, 3, 4, steps=400, recompute=True) as swarm:
        island = swarm.nodes[0].island
        await swarm.until(
            lambda: any(
                node.island._tested is not None and len(node.island.standing.members) == 5
                for node in swarm.nodes.values()
            )
        )
        shown = next(node for node in swarm.nodes.values() if node.island._tested is not None)
        own, island = shown.island._tested, shown.island
        assert own is not None
        assert (len(own.traces), len(own.traced)) == (5, 1)
        (test,) = (test for test in island.standing.tests if test.peer == shown.name)
        (other,) = {*island.log[-1].list.members} - {*test.testers, shown.name}
        for peer in (other, *test.testers):
            for method in (wire.TRACES, wire.TRACE):
                values = {"list": island.log[-1].list.hash.hex(), "first": 0, "count": 1}
                fields = wire.fields_of(wire.request(b"", values), method)
                if peer == other:
                    with pytest.raises(RemoteError) as caught:
                        await island._on_exchange(method, peer, fields)
                    assert caught.value.code == wire.WRONG
                else:
                    assert await island._on_exchange(method, peer, fields)


def test_a_trace_is_what_it_was_packed_from() -> None:
    trace = Trace(b"r" * 32, (1.0, -2.5, 0.0))
    assert unpack_trace(pack_trace(trace)) == trace
