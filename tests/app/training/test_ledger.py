"""Steps under every schedule of frames: each block counts each micro-batch exactly once, at one version."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.span import Span
from app.training.ledger import UNUSUAL, USUAL_FROM, JobLedger, PassVerdict, UsualSize
from app.training.progress import StepProgress, is_overcounted
from app.training.wire import JobOrder, Pass, Tally

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
    assert hop.counted == {5}


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
    assert (hop.version, hop.counted) == (1, frozenset())


def test_an_epoch_drops_what_is_not_committed() -> None:
    hop = ledgers()[0]
    hop.forward("owner", 1, Pass(0, 0, 0))
    hop.count(Pass(0, 0, 0))
    hop.made_step()
    hop.begin_epoch(2, hop.order, 0)
    assert (hop.counted, hop.stepped) == (frozenset(), False)
    assert hop.commit(2, 1) is None
    assert hop.forward("owner", 2, Pass(0, 0, 0)) is PassVerdict.RUN


def test_sizes_far_beyond_the_usual_are_refused() -> None:
    usual = UsualSize()
    assert all(usual.accepts(size) for size in [1.0] * USUAL_FROM)
    assert not usual.accepts(1.01 * UNUSUAL)
    assert not usual.accepts(float("nan"))
    assert not usual.accepts(float("inf"))
    assert usual.accepts(0.99 * UNUSUAL)


def test_a_micro_batch_is_not_tried_for_ever() -> None:
    progress = StepProgress(1, 1)
    tries = 0
    while progress.start():
        tries += 1
        if not progress.run_again():
            break
    assert tries == 16


# --- schedules --------------------------------------------------------------------------------------------------------


@dataclass
class Swarm:
    """Three hops, their owner, and a network that a schedule of choices drives."""

    hops: list[JobLedger]
    count: int
    choices: deque[int]
    sums: list[Counter[tuple[int, int]]] = field(default_factory=lambda: [Counter() for _ in HOPS])
    wires: list[tuple[str, int, str, int, Pass]] = field(default_factory=list)  # kind, to, sender, epoch, pass
    past: list[tuple[str, int, str, int, Pass]] = field(default_factory=list)

    def send(self, kind: str, to: int, sender: str, one: Pass) -> None:
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

    def _arrive(self, frame: tuple[str, int, str, int, Pass], progress: StepProgress) -> None:
        kind, to, sender, epoch, one = frame
        if to in (-1, len(HOPS)):
            self._at_owner(kind, one, progress)
            return
        hop = self.hops[to]
        if kind == "forward":
            if hop.forward(sender, epoch, one) is PassVerdict.RUN:
                self.send("forward", to + 1, HOPS[to], one)
        elif hop.back(sender, epoch, one) is PassVerdict.RUN:
            if hop.count(one):
                self.sums[to].update((one.version, one.number) for _ in hop.order.span.blocks())
            self.send("back", to - 1, HOPS[to], one)

    def _at_owner(self, kind: str, one: Pass, progress: StepProgress) -> None:
        if one.version != self.hops[0].version:
            return
        if kind == "forward" and progress.reached_end(one.number, one.attempt):
            self.send("back", len(HOPS) - 1, "owner", one)
        elif kind == "back":
            progress.came_back(one.number, one.attempt)

    def step(self) -> None:
        version = self.hops[0].version
        progress = StepProgress(self.count, len(HOPS) + 1)
        while True:
            while not progress.is_back:
                for number, attempt in progress.start():
                    self.send("forward", 0, "owner", Pass(version, number, attempt))
                if self.wires:
                    self.deliver(progress)
                else:
                    assert progress.run_again(), "the schedule lost too much"
            tallies = [Tally(((hop.order.span, hop.counted),), (0.0, 0.0)) for hop in self.hops]
            assert is_overcounted(tallies, self.count) is None
            missing = progress.missing(tallies)
            if not missing:
                break
            assert progress.run_again(missing)
        for hop in self.hops:
            hop.made_step()
        for hop in self.hops:
            assert hop.commit(1, version + 1) is True


@settings(max_examples=200)
@given(st.integers(1, 7), st.lists(st.integers(0, 255), max_size=120))
def test_every_block_counts_every_micro_batch_exactly_once(count: int, choices: list[int]) -> None:
    # Lost frames are bounded, so that no micro-batch needs more attempts than there are.
    lost = 0
    for index, choice in enumerate(choices):
        if choice % 8 == 1:
            lost += 1
            if lost > 12:
                choices[index] = choice - 1
    swarm = Swarm(ledgers(), count, deque(choices))
    for _ in range(3):
        swarm.step()
    for hop, sums in zip(swarm.hops, swarm.sums, strict=True):
        assert hop.version == 3
        assert sums == Counter({(v, n): 2 for v in range(3) for n in range(count)})


@pytest.mark.parametrize("numbers", [{3}, {0, 1, 2, 9}])
def test_a_hop_that_claims_more_than_there_is_shows(numbers: set[int]) -> None:
    assert is_overcounted([Tally(((Span(4, 6), frozenset(numbers)),), (0.0,))], 3) == Span(4, 6)
