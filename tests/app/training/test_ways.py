"""Who trains which blocks, which ways lead through them, and how micro-batches are drawn over the ways."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.core.span import Span
from app.routing.route import Hop, Route
from app.training.ways import Run, VirtualTimes, assigned, holder_of, plan_ways, taking_part
from app.training.wire import MAX_WAYS


def hops(**spans: tuple[int, int]) -> Route:
    return tuple(Hop(peer, Span(*span)) for peer, span in spans.items())


@pytest.mark.parametrize(
    ("route", "holders", "most", "wanted"),
    [
        pytest.param(hops(a=(0, 8)), hops(b=(0, 8), c=(0, 8)), 1, hops(a=(0, 8)), id="one holder"),
        pytest.param(hops(a=(0, 8)), hops(b=(0, 8), c=(0, 8)), 2, hops(a=(0, 8), b=(0, 8)), id="at most two"),
        pytest.param(hops(a=(0, 5), b=(5, 8)), hops(b=(3, 8)), 2, hops(a=(0, 5), b=(3, 8)), id="a hop takes more"),
        pytest.param(
            hops(a=(0, 4), b=(4, 8)),
            hops(c=(2, 6), d=(0, 8)),
            2,
            hops(a=(0, 4), b=(4, 8), c=(2, 6), d=(0, 2)),
            id="rest",
        ),
        pytest.param(hops(a=(0, 8)), (), 4, hops(a=(0, 8)), id="nobody else"),
    ],
)
def test_who_takes_part(route: Route, holders: Route, most: int, wanted: Route) -> None:
    assert taking_part(route, holders, most) == wanted


def test_runs_have_equal_holders_and_ways_lead_through_one_of_each() -> None:
    plan = plan_ways(hops(n0=(0, 5), n1=(3, 8), n2=(0, 8)))
    assert plan.runs == (
        Run(Span(0, 3), ("n0", "n2")),
        Run(Span(3, 5), ("n0", "n1", "n2")),
        Run(Span(5, 8), ("n1", "n2")),
    )
    assert set(plan.ways) == {
        hops(n2=(0, 8)),
        hops(n0=(0, 5), n1=(5, 8)),
        hops(n0=(0, 3), n1=(3, 8)),
        hops(n0=(0, 5), n2=(5, 8)),
        hops(n0=(0, 3), n2=(3, 8)),
        hops(n2=(0, 5), n1=(5, 8)),
        hops(n2=(0, 3), n1=(3, 8)),
        hops(n0=(0, 3), n1=(3, 5), n2=(5, 8)),
        hops(n2=(0, 3), n0=(3, 5), n1=(5, 8)),
        hops(n0=(0, 3), n2=(3, 5), n1=(5, 8)),
    }
    assert plan.ways[0] == hops(n2=(0, 8))
    assert plan.shared("n0") == (Span(0, 3), Span(3, 5))
    assert plan.can_lose("n0")


def test_a_single_route_has_one_way_and_nothing_shared() -> None:
    route = hops(a=(0, 2), b=(2, 6), c=(6, 8))
    plan = plan_ways(route)
    assert (plan.ways, plan.shared_runs) == ((route,), ())
    assert not any(plan.can_lose(hop.peer) for hop in route)


def test_who_is_on_no_way_does_not_take_part() -> None:
    assert plan_ways(hops(a=(0, 8), b=(3, 5))) == plan_ways(hops(a=(0, 8)))


def test_who_is_on_no_way_any_more_goes_with_the_one_that_was_lost() -> None:
    plan = plan_ways(hops(a=(0, 4), b=(4, 8), c=(2, 6), d=(0, 8)))
    assert {hop.peer for hop in plan.hops} == {"a", "b", "c", "d"}
    assert plan.without("a").without("b").hops == hops(d=(0, 8))


def test_a_way_around_a_peer_keeps_the_others() -> None:
    plan = plan_ways(hops(a1=(0, 4), a2=(0, 4), b1=(4, 8), b2=(4, 8)))
    way = plan.ways.index(hops(a1=(0, 4), b1=(4, 8)))
    for order in (range(4), range(3, -1, -1)):
        assert plan.ways[plan.way_around(way, Span(4, 8), "b2", order)] == hops(a1=(0, 4), b2=(4, 8))
        assert plan.ways[plan.way_around(way, Span(0, 4), "a2", order)] == hops(a2=(0, 4), b1=(4, 8))


def test_a_way_around_a_peer_leads_to_nobody_else_if_it_can() -> None:
    """A hop with blocks before the witness was asked though the audited one holds them too: it could spoil both."""
    plan = plan_ways(hops(a=(0, 4), s=(0, 8), w=(4, 8)))
    alone = plan.ways.index(hops(s=(0, 8)))
    for order in (range(len(plan.ways)), range(len(plan.ways) - 1, -1, -1)):
        assert plan.ways[plan.way_around(alone, Span(4, 8), "w", order)] == hops(s=(0, 4), w=(4, 8))


def test_of_equal_ways_around_a_peer_a_lot_chooses() -> None:
    plan = plan_ways(hops(a1=(0, 4), a2=(0, 4), b=(4, 8), c=(2, 8)))
    way = plan.ways.index(hops(a1=(0, 2), c=(2, 8)))
    order = list(range(len(plan.ways)))
    found = {plan.ways[plan.way_around(way, Span(4, 8), "b", one)] for one in (order, order[::-1])}
    assert found == {hops(a1=(0, 4), b=(4, 8)), hops(a1=(0, 2), c=(2, 4), b=(4, 8))}


members = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), min_size=1, max_size=9)


@given(members)
def test_every_way_covers_all_blocks_once_and_no_peer_twice(spans: list[tuple[int, int]]) -> None:
    held = [Hop(f"p{index}", Span(start, min(start + length, 10))) for index, (start, length) in enumerate(spans)]
    assume({block for hop in held for block in hop.span.blocks()} == set(range(10)))
    plan = plan_ways(tuple(held))
    assert 1 <= len(plan.ways) <= MAX_WAYS
    for way in plan.ways:
        assert [block for hop in way for block in hop.span.blocks()] == list(range(10))
        assert len({hop.peer for hop in way}) == len(way)
        for hop in way:
            assert next(one for one in held if one.peer == hop.peer).span.covers(hop.span)
            for run in plan.runs:  # a way takes a run whole or not at all
                assert hop.span.covers(run.span) or not set(hop.span.blocks()) & set(run.span.blocks())
    for run, after in zip(plan.runs, plan.runs[1:], strict=False):
        assert set(run.peers) != set(after.peers)
    assert {hop.peer for hop in plan.hops} == {hop.peer for way in plan.ways for hop in way}
    for run in plan.runs:
        assert run.span.stop in {hop.span.stop for hop in plan.hops} | {hop.span.start for hop in plan.hops}
        for peer in plan.trainers(run.span):
            around = plan.way_around(0, run.span, peer, range(len(plan.ways)))
            assert holder_of(plan.ways[around], run.span.start) == peer
    for hop in held:
        if plan.can_lose(hop.peer):
            assert hop.peer not in {other.peer for other in plan.without(hop.peer).hops}


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), st.integers(1, 60))
def test_work_ends_for_all_within_one_piece_of_each_other(costs: list[float], count: int) -> None:
    ways = [hops(**{f"p{index}": (0, 1)}) for index in range(len(costs))]
    times = VirtualTimes()
    for way, cost in zip(ways, costs, strict=True):  # everybody is observed once, alone
        times.begin_step()
        drawn = times.draw([way], 1, 0.0)
        times.came_back(way, drawn, cost)
    times.begin_step()
    loads = Counter({index: 0 for index in range(len(costs))})
    for _ in range(count):
        loads[times.draw(ways, 1, 0.0).way] += 1
    ends = [loads[index] * cost for index, cost in enumerate(costs)]
    for end in ends:
        for other, cost in zip(ends, costs, strict=True):
            assert end <= other + cost + 1e-6
    for index, cost in enumerate(costs):
        for other, slower in enumerate(costs):
            if cost < slower:
                assert loads[index] >= loads[other]  # faster holders take more


def test_costs_follow_what_is_observed() -> None:
    ways = [hops(a=(0, 1)), hops(b=(0, 1))]
    seconds = {"a": 0.1, "b": 0.4}
    times = VirtualTimes()
    for _ in range(40):
        times.begin_step()
        for way in ways:
            times.came_back(way, times.draw([way], 1, 0.0), seconds[way[0].peer])
    times.begin_step()
    assert Counter(times.draw(ways, 1, 0.0).way for _ in range(50)) == {0: 40, 1: 10}
    seconds["a"] = 1.6  # it became slow
    for _ in range(40):
        times.begin_step()
        for way in ways:
            times.came_back(way, times.draw([way], 1, 0.0), seconds[way[0].peer])
    times.begin_step()
    assert Counter(times.draw(ways, 1, 0.0).way for _ in range(50)) == {0: 10, 1: 40}


def test_a_newcomer_is_tried() -> None:
    times, old = VirtualTimes(), hops(a=(0, 1))
    times.came_back(old, times.draw([old], 1, 0.0), 0.5)
    assert times.draw([old, hops(new=(0, 1))], 1, 0.0).way == 1


def test_micro_batches_are_assigned_by_their_ways() -> None:
    plan = plan_ways(hops(a1=(0, 4), a2=(0, 4), b=(4, 8)))
    first = plan.ways.index(hops(a1=(0, 4), b=(4, 8)))
    ways = {0: first, 1: 1 - first, 2: first}
    assert assigned(plan, ways, "a1", Span(0, 4)) == {0, 2}
    assert assigned(plan, ways, "b", Span(4, 8)) == {0, 1, 2}
    assert holder_of(plan.ways[first], 5) == "b"
