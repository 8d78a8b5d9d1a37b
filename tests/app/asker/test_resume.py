"""The plan after a change of route: enough for every hop, never more than what is missing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.asker.recovery import HopState, plan_resume

FED = 20


@st.composite
def states(draw: st.DrawFn) -> HopState:
    length = draw(st.integers(0, FED + 3))
    return HopState(length, draw(st.integers(0, length)))


@given(st.lists(states(), min_size=1, max_size=6))
def test_every_hop_can_serve_its_successor(hops: list[HopState]) -> None:
    plan = plan_resume(hops, FED)
    needs = [*plan.lengths[1:], FED - 1]  # what each hop's successor has already
    for state, length, send_from, need in zip(hops, plan.lengths, plan.send_from, needs, strict=True):
        assert length <= min(state.length, FED)
        assert send_from == need
        kept_from = state.kept_from if length == state.length else min(state.kept_from, length)
        # Outputs from `need` on are kept, or will be computed because the hop's cache ends there.
        assert length <= need or kept_from <= need
    assert plan.feed_from == plan.lengths[0]


@given(st.integers(1, 5), st.data())
def test_a_new_hop_among_whole_ones_is_the_only_one_to_compute_again(count: int, data: st.DataObject) -> None:
    new = data.draw(st.integers(0, count - 1))
    hops = [HopState(0, 0) if index == new else HopState(FED - 1, 0) for index in range(count)]
    plan = plan_resume(hops, FED)
    assert [state.length for state in hops] == list(plan.lengths)
    assert plan.feed_from == (0 if new == 0 else FED - 1)


def test_a_predecessor_that_kept_nothing_computes_again() -> None:
    plan = plan_resume([HopState(19, 0), HopState(19, 19), HopState(0, 0)], FED)
    assert plan.lengths == (19, 0, 0)
    assert plan.send_from == (0, 0, 19)
    assert plan.feed_from == 19


def test_a_lost_answer_is_sent_again_from_what_is_kept() -> None:
    plan = plan_resume([HopState(20, 0), HopState(20, 19)], FED)
    assert plan == ((20, 20), (20, 19), 20)
