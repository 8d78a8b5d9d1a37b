"""A job's state at one hop: which frames it accepts, and which micro-batches its sums contain. Pure: no I/O.

Invariants, by which duplicates, late frames and frames of dead routes do no harm:
- only the owner raises the epoch, and nothing of another epoch or version is accepted;
- each attempt of a micro-batch passes forwards once and backwards once at most, on each way;
- what comes on one way neither replaces nor keeps out what comes on another: each hop before this one has its share of
  the micro-batches that may be under way, and who takes more makes way;
- a micro-batch is counted once for a version and block, in whichever attempt it first comes back;
- sums of blocks that others hold too are handed over once; what is counted later is in the sums of the next round;
- once the sums of all holders are here, and after a step, no pass is accepted until the step is committed, or an epoch
  begins that drops it: hops before and after this one could have it make another step than all others.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from enum import Enum

from app.core.span import Span
from app.training.wire import JobOrder, Pass

USUAL_OF = 32  # latest sizes of which the median is the usual one
USUAL_FROM = 8  # sizes before one can be unusual
UNUSUAL = 100.0  # times the usual size
# A usual size counts as this at least: gradients of what is learned by heart are thousands of times smaller than those
# of a hard record, whose root mean square is far below `UNUSUAL`.
LEAST_USUAL = 1.0
LARGEST = 1e12  # whatever is usual: far beyond what models have, and its square is a float32


class PassVerdict(Enum):
    """Verdict on a FORWARD or BACK frame."""

    RUN = "run"
    STALE = "stale"  # of another epoch or version
    FOREIGN = "foreign"  # its sender is not the neighbour on that side of its way, or the hop is not on this way
    REPEATED = "repeated"  # this attempt, or a later one, has been accepted already
    FULL = "full"  # more micro-batches under way than were agreed
    UNKNOWN = "unknown"  # backwards, but its forward pass is not here


class JobLedger:
    """One job at one hop."""

    def __init__(self, owner: str, epoch: int, order: JobOrder, version: int) -> None:
        self.owner = owner
        self.begin_epoch(epoch, order, version)

    def begin_epoch(self, epoch: int, order: JobOrder, version: int) -> None:
        """Take the owner's order for a new epoch; everything that is not committed is dropped."""
        self.epoch, self.order, self.version = epoch, order, version
        self.stepped = False  # the next version has been made and waits for COMMIT
        self.clear()

    def clear(self) -> None:
        """Forget all of this version: passes, what was counted, and the rounds of sums."""
        self.forget_passes()
        self.round = 0  # of sums that others add up with theirs
        self.awaits_sums = False  # those of all holders, which the next step needs
        self._has_sums = False  # of all holders: the next step is made of them

    def forget_passes(self) -> None:
        """Forget the passes and what was counted; sums that were handed over stay so."""
        # By `Pass.place`: the latest attempt that was accepted forwards, and the one whose inputs are kept for the pass
        # backwards, in the order in which they came.
        self._forward: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], Pass] = {}
        self._displaced: list[Pass] = []
        self._counted: dict[Span, set[int]] = {run: set() for run in self.order.runs()}

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, sender: str, epoch: int, one: Pass) -> PassVerdict:
        """Judge a FORWARD frame; `RUN` accepts it, and the hop keeps the inputs for the pass backwards."""
        verdict = self._judge(sender, epoch, one, back=False)
        if verdict is not PassVerdict.RUN:
            return verdict
        if one.attempt <= self._forward.get(one.place, -1):
            return PassVerdict.REPEATED
        if one.place not in self._held and len(self._held) >= self.order.under_way and not self._makes_way(one):
            return PassVerdict.FULL
        self._forward[one.place] = one.attempt
        self._held[one.place] = one  # an earlier attempt will not come back
        return PassVerdict.RUN

    def _makes_way(self, one: Pass) -> bool:
        """Give up a pass of the hop that has most under way here, if it has more than its share and this one less."""
        before = {way.number: way.predecessor for way in self.order.ways}
        held = Counter(before.get(other.way) for other in self._held.values())
        share = max(1, self.order.under_way // max(1, len(set(before.values()))))
        most = max(held, key=held.__getitem__, default=None)
        if held[before.get(one.way)] >= share or held[most] <= share:
            return False
        latest = [other for other in self._held.values() if before.get(other.way) == most][-1]
        self._displaced.append(self._held.pop(latest.place))
        return True

    def take_displaced(self) -> list[Pass]:
        """Return the passes that were given up since the last call; they will not be accepted backwards."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def evaluate(self, sender: str, epoch: int, one: Pass) -> PassVerdict:
        """Judge an EVALUATE frame; `RUN` accepts it. Nothing is kept of it, so it may come twice."""
        return self._judge(sender, epoch, one, back=False)

    def back(self, sender: str, epoch: int, one: Pass) -> PassVerdict:
        """Judge a BACK frame; `RUN` accepts it."""
        verdict = self._judge(sender, epoch, one, back=True)
        if verdict is not PassVerdict.RUN:
            return verdict
        if self._held.get(one.place) != one:
            seen = one.attempt <= self._forward.get(one.place, -1)
            return PassVerdict.REPEATED if seen else PassVerdict.UNKNOWN
        del self._held[one.place]
        return PassVerdict.RUN

    def count(self, one: Pass) -> list[Span]:
        """Count a micro-batch that came back; return the blocks whose sums do not contain its gradient yet."""
        way = self.order.way(one.way)
        assert way is not None, "a pass that came back was judged before"
        uncounted = [run for run in self._counted if way.span.covers(run) and one.number not in self._counted[run]]
        for run in uncounted:
            self._counted[run].add(one.number)
        return uncounted

    def failed(self, one: Pass) -> None:
        """A pass forwards could not be computed: nothing is kept of it, and a later attempt may be."""
        self._held.pop(one.place, None)

    @property
    def counted(self) -> tuple[tuple[Span, frozenset[int]], ...]:
        """Micro-batches that the sums of this version contain, for each run of blocks."""
        return tuple((run, frozenset(numbers)) for run, numbers in self._counted.items())

    # --- steps --------------------------------------------------------------------------------------------------------

    def is_current(self, epoch: int, version: int) -> bool:
        """True if an order of the owner is about the current epoch and version."""
        return (epoch, version) == (self.epoch, self.version)

    def hand_over(self, number: int) -> bool | None:
        """Judge a REDUCE of a round: True hands the sums over, False if they were before, None refuses."""
        if number == self.round - 1:
            return False
        if number != self.round or self.stepped or not self.order.shared:
            return None
        self.round += 1
        self.awaits_sums = True
        for run in self.order.shared:
            self._counted[run].clear()
        return True

    def agreed(self) -> None:
        """The sums of all holders are here."""
        self.awaits_sums, self._has_sums = False, True

    def made_step(self) -> None:
        """The next version has been made; passes wait until it is committed."""
        self.stepped = True

    def commit(self, epoch: int, version: int) -> bool | None:
        """Judge a COMMIT to this version: True commits the step, False repeats the answer, None refuses."""
        if epoch != self.epoch:
            return None
        if version == self.version:
            return False
        if not self.stepped or version != self.version + 1:
            return None
        self.version, self.stepped = version, False
        self.clear()
        return True

    def _judge(self, sender: str, epoch: int, one: Pass, *, back: bool) -> PassVerdict:
        if epoch != self.epoch or one.version != self.version or self.stepped or self._has_sums:
            return PassVerdict.STALE
        way = self.order.way(one.way)
        if way is None:
            return PassVerdict.FOREIGN
        neighbour = way.successor if back else way.predecessor
        if sender not in (self.owner, neighbour or self.owner):
            return PassVerdict.FOREIGN
        return PassVerdict.RUN


class UsualSize:
    """Tells numbers of a usual size from those that are far too large: a peer that sends such would ruin the sums.

    There is one for each way: a model's numbers may grow by more than `UNUSUAL` from its first block to its last, and a
    hop that sends tiny ones must not make those of others unusual.
    """

    def __init__(self) -> None:
        self._sizes: deque[float] = deque(maxlen=USUAL_OF)

    def accepts(self, size: float) -> bool:
        """True if a size is at most `LARGEST`, and at most `UNUSUAL` times the median of those accepted before."""
        if not 0 <= size <= LARGEST:  # NaN too
            return False
        if len(self._sizes) >= USUAL_FROM and size > UNUSUAL * max(statistics.median(self._sizes), LEAST_USUAL):
            return False
        self._sizes.append(size)
        return True
