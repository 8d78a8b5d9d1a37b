"""Steps under every schedule of frames: each block counts each micro-batch exactly once, at one version."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.span import Span
from app.routing.route import Hop
from app.training.ledger import LEAST_USUAL, UNUSUAL, USUAL_FROM, JobLedger, PassVerdict, UsualSize
from app.training.progress import StepProgress
from app.training.ways import parts_of, plan_ways
from app.training.wire import HopWay, JobOrder, Pass, Tally

ORDER = JobOrder(Span(0, 2), "", "", 8, 16.0, ("q",), 0.0, 0, 0.0, 64, 4, "f32")
HOPS = ("h0", "h1", "h2")


def ledgers(under_way: int = 4) -> list[JobLedger]:
    """Three hops of two blocks each, at version 0 in epoch 1."""
    made = []
    for index in range(3):
        before = HOPS[index - 1] if index else ""
        after = HOPS[index + 1] if index < 2 else ""
        span = Span(2 * index, 2 * index + 2)
        order = replace(ORDER, span=span, predecessor=before, successor=after, under_way=under_way)
        made.append(JobLedger("owner", 1, order, 0))
    return made


def test_an_attempt_passes_once_each_way() -> None:
    hop = ledgers()[1]
    first, second = Pass(0, 5, 0), Pass(0, 5, 1)
    assert hop.back("h2", 1, first) is PassVerdict.UNKNOWN
    assert hop.forward("h0", 1, first) is PassVerdict.RUN
    assert hop.forward("h0", 1, first) is PassVerdict.REPEATED
    assert hop.back("h2", 1, first) is PassVerdict.RUN
    assert hop.count(first)
    assert hop.back("h2", 1, first) is PassVerdict.REPEATED
    assert hop.forward("h0", 1, second) is PassVerdict.RUN  # the owner runs it again
    assert hop.back("h2", 1, first) is PassVerdict.REPEATED
    assert hop.back("h2", 1, second) is PassVerdict.RUN
    assert not hop.count(second)
    assert dict(hop.counted) == {Span(2, 4): {5}}


def test_only_the_neighbours_and_the_owner_are_heard() -> None:
    hop = ledgers()[1]
    one = Pass(0, 0, 0)
    assert hop.forward("h2", 1, one) is PassVerdict.FOREIGN
    assert hop.forward("stranger", 1, one) is PassVerdict.FOREIGN
    assert hop.forward("owner", 1, one) is PassVerdict.RUN
    assert hop.back("h0", 1, one) is PassVerdict.FOREIGN
    assert hop.back("owner", 1, one) is PassVerdict.RUN


def test_nothing_of_another_epoch_or_version_is_accepted() -> None:
    hop = ledgers()[0]
    for epoch, version in ((0, 0), (2, 0), (1, 1)):
        assert hop.forward("owner", epoch, Pass(version, 0, 0)) is PassVerdict.STALE
    hop.made_step()
    assert hop.forward("owner", 1, Pass(0, 0, 0)) is PassVerdict.STALE


def test_no_more_micro_batches_are_held_than_agreed() -> None:
    hop = ledgers(under_way=2)[0]
    assert [hop.forward("owner", 1, Pass(0, number, 0)) for number in range(3)] == [
        PassVerdict.RUN,
        PassVerdict.RUN,
        PassVerdict.FULL,
    ]
    assert hop.forward("owner", 1, Pass(0, 1, 1)) is PassVerdict.RUN  # in place of its earlier attempt
    hop.failed(Pass(0, 1, 1))
    assert hop.forward("owner", 1, Pass(0, 2, 0)) is PassVerdict.RUN


def test_a_commit_needs_a_step_and_is_answered_again() -> None:
    hop = ledgers()[0]
    assert hop.commit(1, 1) is None
    hop.made_step()
    assert hop.commit(2, 1) is None
    assert hop.commit(1, 2) is None
    assert hop.commit(1, 1) is True
    assert hop.commit(1, 1) is False
    assert (hop.version, hop.counted) == (1, ((Span(0, 2), frozenset()),))


def test_an_epoch_drops_what_is_not_committed() -> None:
    hop = ledgers()[0]
    hop.forward("owner", 1, Pass(0, 0, 0))
    hop.count(Pass(0, 0, 0))
    hop.made_step()
    hop.begin_epoch(2, hop.order, 0)
    assert (hop.counted, hop.stepped) == (((Span(0, 2), frozenset()),), False)
    assert hop.commit(2, 1) is None
    assert hop.forward("owner", 2, Pass(0, 0, 0)) is PassVerdict.RUN


def test_sizes_far_beyond_the_usual_are_refused() -> None:
    usual = UsualSize()
    assert all(usual.accepts(size) for size in [1.0] * USUAL_FROM)
    assert not usual.accepts(1.01 * UNUSUAL)
    assert not usual.accepts(float("nan"))
    assert not usual.accepts(float("inf"))
    assert usual.accepts(0.99 * UNUSUAL)


def test_what_is_small_is_usual_whatever_came_before() -> None:
    usual = UsualSize()
    assert all(usual.accepts(1e-9) for _ in range(USUAL_FROM))
    assert usual.accepts(UNUSUAL * LEAST_USUAL)
    assert not usual.accepts(1.01 * UNUSUAL * LEAST_USUAL)


@pytest.mark.parametrize("size", [1e13, float("inf"), float("nan"), -1.0])
def test_the_first_sizes_are_not_taken_as_usual_whatever_they_are(size: float) -> None:
    assert not UsualSize().accepts(size)


def test_a_micro_batch_is_not_tried_for_ever() -> None:
    progress = StepProgress(1, 1)
    tries = 0
    while (number := progress.next_number) is not None:
        progress.start(number)
        tries += 1
        if not progress.run_again():
            break
    assert tries == 16


def test_sums_are_handed_over_once_and_new_ones_begin() -> None:
    order = replace(ORDER, span=Span(0, 4), shared=(Span(1, 3),))
    hop = JobLedger("owner", 1, order, 0)
    one = Pass(0, 0, 0)
    assert hop.forward("owner", 1, one) is hop.back("owner", 1, one) is PassVerdict.RUN
    assert hop.count(one) == [Span(0, 1), Span(1, 3), Span(3, 4)]
    assert hop.hand_over(1) is None
    assert hop.hand_over(0) is True
    assert hop.hand_over(0) is False  # the same again
    assert hop.awaits_sums
    assert dict(hop.counted) == {Span(0, 1): {0}, Span(1, 3): set(), Span(3, 4): {0}}
    again = Pass(0, 0, 1)
    assert hop.forward("owner", 1, again) is hop.back("owner", 1, again) is PassVerdict.RUN
    assert hop.count(again) == [Span(1, 3)]  # its own blocks have counted it
    assert hop.hand_over(1) is True
    hop.agreed()
    assert not hop.awaits_sums
    hop.made_step()
    assert hop.hand_over(2) is None
    assert hop.commit(1, 1) is True
    assert hop.hand_over(0) is True  # rounds are counted in each version


def test_neighbours_add_nothing_to_the_sums_of_all_holders() -> None:
    """The hop would make another step than all others, and be left out for it."""
    order = replace(ORDER, span=Span(2, 4), predecessor="h0", successor="h2", shared=(Span(2, 4),))
    hop = JobLedger("owner", 1, order, 0)
    one = Pass(0, 0, 0)
    assert hop.forward("h0", 1, one) is PassVerdict.RUN
    assert hop.hand_over(0) is True
    hop.agreed()
    assert hop.back("h2", 1, one) is PassVerdict.STALE
    assert hop.forward("h0", 1, Pass(0, 1, 0)) is PassVerdict.STALE
    hop.made_step()
    assert hop.commit(1, 1) is True
    assert hop.forward("h0", 1, Pass(1, 0, 0)) is PassVerdict.RUN


def test_who_shares_nothing_hands_nothing_over() -> None:
    assert ledgers()[0].hand_over(0) is None


def test_a_pass_goes_back_on_the_way_it_came() -> None:
    ways = (HopWay(0, Span(0, 2), "", "b"), HopWay(3, Span(0, 1), "a", "c"))
    hop = JobLedger("owner", 1, replace(ORDER, ways=ways), 0)
    assert hop.forward("a", 1, Pass(0, 0, 0, 0)) is PassVerdict.FOREIGN
    assert hop.forward("owner", 1, Pass(0, 0, 0, 1)) is PassVerdict.FOREIGN  # no such way here
    assert hop.forward("a", 1, Pass(0, 0, 0, 3)) is PassVerdict.RUN
    assert hop.back("b", 1, Pass(0, 0, 0, 3)) is PassVerdict.FOREIGN
    assert hop.back("b", 1, Pass(0, 0, 0, 0)) is PassVerdict.UNKNOWN
    assert hop.back("c", 1, Pass(0, 0, 0, 3)) is PassVerdict.RUN


def test_what_comes_on_one_way_does_not_keep_out_what_comes_on_another() -> None:
    ways = (HopWay(0, Span(0, 2), "a", ""), HopWay(1, Span(0, 2), "b", ""))
    hop = JobLedger("owner", 1, replace(ORDER, ways=ways, under_way=4), 0)
    assert [hop.forward("a", 1, Pass(0, number, 15, 0)) for number in range(4)] == [PassVerdict.RUN] * 4
    assert hop.forward("a", 1, Pass(0, 4, 0, 0)) is PassVerdict.FULL  # its own make no way
    assert not hop.take_displaced()
    assert [hop.forward("b", 1, Pass(0, number, 0, 1)) for number in range(3)] == [
        PassVerdict.RUN, PassVerdict.RUN, PassVerdict.FULL  # more than its share
    ]  # fmt: skip
    assert hop.take_displaced() == [Pass(0, 3, 15, 0), Pass(0, 2, 15, 0)]
    assert not hop.take_displaced()
    assert hop.back("owner", 1, Pass(0, 3, 15, 0)) is PassVerdict.REPEATED
    assert hop.back("owner", 1, Pass(0, 0, 0, 1)) is PassVerdict.RUN
    assert hop.back("owner", 1, Pass(0, 0, 15, 0)) is PassVerdict.RUN


# --- schedules --------------------------------------------------------------------------------------------------------

ROUTES = {
    "one holder each": {"h0": (0, 2), "h1": (2, 4), "h2": (4, 6)},
    "three of all": {"h0": (0, 6), "h1": (0, 6), "h2": (0, 6)},
    "overlapping": {"h0": (0, 4), "h1": (2, 6), "h2": (0, 6)},
    "one stage twice": {"h0": (0, 3), "h1": (3, 6), "h2": (3, 6)},
}
Wire = tuple[str, str, str, int, Pass]  # kind, to, sender, epoch, pass


class Swarm:
    """Hops, their owner, and a network that a schedule of choices drives."""

    def __init__(self, spans: dict[str, tuple[int, int]], count: int, choices: list[int]) -> None:
        self.plan = plan_ways(tuple(Hop(peer, Span(*span)) for peer, span in spans.items()))
        self.count, self.choices = count, deque(choices)
        self.hops: dict[str, JobLedger] = {}
        for peer, span in self.plan.hops:
            order = replace(
                ORDER,
                span=span,
                under_way=self.plan.depth + 1,
                ways=parts_of(self.plan, peer),
                shared=self.plan.shared(peer),
            )
            self.hops[peer] = JobLedger("owner", 1, order, 0)
        self.sums: dict[str, Counter[tuple[int, int, int]]] = {peer: Counter() for peer in self.hops}
        self.agreed: Counter[tuple[int, int, int]] = Counter()  # (version, block, micro-batch) in what is stepped with
        self.wires: list[Wire] = []
        self.past: list[Wire] = []

    def send(self, kind: str, to: str, sender: str, one: Pass) -> None:
        self.wires.append((kind, to, sender, 1, one))

    def choose(self) -> int:
        return self.choices.popleft() if self.choices else 0

    def deliver(self, progress: StepProgress) -> None:
        """Take some frame; deliver it, lose it, deliver and keep it, or deliver one from the past."""
        choice = self.choose()
        frame = self.wires.pop(choice // 8 % len(self.wires))
        self.past.append(frame)
        if choice % 8 == 1:
            return  # lost
        if choice % 8 == 2:
            self.wires.append(frame)  # doubled
        if choice % 8 == 3:
            self._arrive(self.past[choice // 8 % len(self.past)], progress)
        self._arrive(frame, progress)

    def _arrive(self, frame: Wire, progress: StepProgress) -> None:
        kind, to, sender, epoch, one = frame
        if to == "owner":
            self._at_owner(kind, one, progress)
            return
        hop = self.hops[to]
        way = hop.order.way(one.way)
        assert way is not None
        if kind == "forward":
            if hop.forward(sender, epoch, one) is PassVerdict.RUN:
                self.send("forward", way.successor or "owner", to, one)
        elif hop.back(sender, epoch, one) is PassVerdict.RUN:
            for run in hop.count(one):
                self.sums[to].update((one.version, block, one.number) for block in run.blocks())
            self.send("back", way.predecessor or "owner", to, one)

    def _at_owner(self, kind: str, one: Pass, progress: StepProgress) -> None:
        if one.version != self.hops["h0"].version or progress.ways.get(one.number) != one.way:
            return
        if kind == "forward" and progress.reached_end(one.number, one.attempt):
            self.send("back", self.plan.ways[one.way][-1].peer, "owner", one)
        elif kind == "back":
            progress.came_back(one.number, one.attempt)

    def run(self, progress: StepProgress) -> None:
        version = self.hops["h0"].version
        while not progress.is_back:
            while (number := progress.next_number) is not None:
                way = progress.ways.get(number, (number + self.choose()) % len(self.plan.ways))
                busy = Counter(hop.peer for each in progress.ways_under_way for hop in self.plan.ways[each])
                if any(busy[hop.peer] > self.plan.depth for hop in self.plan.ways[way]):
                    break
                one = Pass(version, number, progress.start(number, way), way)
                self.send("forward", self.plan.ways[way][0].peer, "owner", one)
            if self.wires:
                self.deliver(progress)
            else:
                assert progress.run_again(), "the schedule lost too much"

    def tally(self, progress: StepProgress) -> list[Tally]:
        tallies = {peer: Tally(hop.counted, ()) for peer, hop in self.hops.items()}
        assert not any(progress.is_overcounted(self.plan, peer, tally) for peer, tally in tallies.items())
        return list(tallies.values())

    def hand_over(self, number: int) -> Counter[tuple[int, int, int]]:
        """Sums of the blocks that several hold, which begin anew; the order may come twice."""
        taken: Counter[tuple[int, int, int]] = Counter()
        for peer, hop in self.hops.items():
            if not hop.order.shared:
                continue
            assert hop.hand_over(number) is True
            assert not self.choose() % 2 or hop.hand_over(number) is False
            shared = {block for run in hop.order.shared for block in run.blocks()}
            mine = Counter({key: times for key, times in self.sums[peer].items() if key[1] in shared})
            self.sums[peer] -= mine
            taken += mine
        return taken

    def step(self) -> None:
        progress = StepProgress(self.count, len(self.hops) + 1)
        while True:
            self.run(progress)
            missing = progress.missing(self.tally(progress))
            if not missing:
                break
            assert progress.run_again(missing)
        reduced = self.hand_over(0)
        if reduced and self.choose() % 3 == 1:  # an audit: a micro-batch runs again on another way, in a further round
            number = self.choose() % self.count
            ways = dict(progress.ways)
            progress.ways[number] = (ways[number] + 1) % len(self.plan.ways)
            assert progress.run_again([number])
            self.run(progress)
            self.tally(progress)
            self.hand_over(1)
            progress.ways.update(ways)
        self.agreed += reduced
        for hop in self.hops.values():
            hop.agreed()
            hop.made_step()
        for hop in self.hops.values():
            assert hop.commit(1, hop.version + 1) is True
        for peer in self.hops:
            self.agreed += self.sums[peer]
            self.sums[peer].clear()


@pytest.mark.parametrize("spans", ROUTES.values(), ids=ROUTES)
@settings(max_examples=60)
@given(count=st.integers(1, 7), choices=st.lists(st.integers(0, 255), max_size=120))
def test_every_block_counts_every_micro_batch_exactly_once(
    spans: dict[str, tuple[int, int]], count: int, choices: list[int]
) -> None:
    # Lost frames are bounded, so that no micro-batch needs more attempts than there are.
    lost = 0
    for index, choice in enumerate(choices):
        if choice % 8 == 1:
            lost += 1
            if lost > 10:
                choices[index] = choice - 1
    swarm = Swarm(spans, count, choices)
    for _ in range(3):
        swarm.step()
    assert {hop.version for hop in swarm.hops.values()} == {3}
    assert swarm.agreed == Counter({(v, b, n): 1 for v in range(3) for b in range(6) for n in range(count)})


@pytest.mark.parametrize(("numbers", "is_wrong"), [({3}, True), ({0, 2}, False), ({0, 1}, True), (set(), False)])
def test_a_hop_that_claims_more_than_it_was_sent_shows(numbers: set[int], is_wrong: bool) -> None:
    plan = plan_ways((Hop("a", Span(0, 2)), Hop("b", Span(0, 2))))
    progress = StepProgress(3, 9)
    for number in range(3):
        progress.start(number, 0 if number != 1 else 1)
    tally = Tally(((Span(0, 2), frozenset(numbers)),), (0.0, 0.0))
    assert progress.is_overcounted(plan, plan.ways[0][0].peer, tally) is is_wrong
