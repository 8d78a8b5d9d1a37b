"""One island's part in a job: it trains, arrives, exchanges, and goes on from what all members agree on.

The main task (`_live`) is the only one that changes the model and where the job stands. A round, all of it in this
file: make the steps (`_train`), commit to a change and say so (`_arrive`), wait for a list or make one (`_lead`),
exchange (`app.rounds.exchange`), send the result to the one who leads, and take over the round's entry (`_adopt`).
Whoever comes first in the round's order leads; if it is silent, the next one does. An island that missed a round takes
over its result, by the merged change or by the parts of the state. Requests of others are answered in between.
Other histories are looked at beside the steps (`_look_around`), until one was verified and is better than the own one.
Whatever others say, the worst is a lost round: they can neither end this island's part nor keep it from its steps.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, Protocol, TypeVar

import trio

from app.core.canonical_json import Fields, canonical
from app.core.compute import Device
from app.core.errors import AppError, RecordError
from app.core.network import Network, Payload
from app.core.signal import Signal
from app.manifest.merkle import HASH_BYTES
from app.rounds import wire
from app.rounds.checkpoint import HELD_CHANGES, CheckpointWriter, MergedChange
from app.rounds.counting import Before, Islands, counts, joined, of_half_of_homes, taken_over
from app.rounds.decisions import (
    KEPT_RESTS,
    SLOWER,
    UNMEASURED_BYTES_PER_S,
    Missed,
    Rest,
    exchange_limit_s,
    first_to_commit,
    grace_s,
    in_line,
    lasting_overhead_s,
    leading_order,
    missed_after,
    next_codec,
    next_every,
    quorum,
    resting,
    rests_after,
    standings_of,
    to_leave_out,
)
from app.rounds.exchange import Exchange, ExchangeAttempt, ExchangeFailed, MergingModel, OwnChange, hashes_of
from app.rounds.greetings import MOST_NAMED, Greetings, Heard, JobPeers
from app.rounds.grid import network_of
from app.rounds.log import (
    ENTRY,
    MAX_ENTRY_BYTES,
    RECENT_ROUNDS,
    RoundEntry,
    Standing,
    beginning,
    check_arrivals,
    check_counts,
    follow,
    make_entry,
    read_entry,
    replay,
    shared,
    steps_s,
    took_part,
)
from app.rounds.moments import MomentsExchange, Question, parts_in
from app.rounds.reading import positions_of, sequence_at
from app.rounds.record import TrainingRecord
from app.rounds.statements import (
    ARRIVAL,
    GENESIS,
    LIST,
    MAX_ATTEMPTS,
    MAX_ROUNDS,
    RESULT,
    Arrival,
    MemberList,
    OwnData,
    Result,
    raws_in,
    read_arrival,
    read_data,
    read_list,
    read_result,
    sign_arrival,
    sign_list,
    sign_result,
    texts_of,
)
from app.rounds.steps import RoundTask, StepFigures, StepMaker
from app.rounds.testers import drawn_trace
from app.rounds.testing import ChangeTester, PastRound
from app.rounds.traces import StepTraces, Trace, pack_trace, trace_seed, traced_steps
from app.routing.route import Route
from app.serving.homes import Homes
from app.training.states import StateStore, part_of
from app.training.waiting import what_it_waits_for
from app.training.wire import StatePart
from app.weights.download import PartsAbsent
from engine.errors import EngineError
from p2p.envelope import MAX_PAYLOAD_BYTES, domain_of, parse
from p2p.errors import EnvelopeError, P2PError, RemoteError
from p2p.identity import PEER_ID_CHARS, Identity

log = logging.getLogger("shoal.rounds")
T = TypeVar("T")

OUTSIDE_LONG = 3  # rounds made without it, after which an island that has no moments takes over those of another
KEPT_ATTEMPTS = 4  # whose merged leaves are kept for members that are late, at most
KNOWN_ROUNDS = 16  # the last ones, of which nobody waits for a merged change that was dropped
MAX_PEERS = 256
MOST_ASKED = 8  # for a state
_LONGEST_DISREGARD = 7  # doublings
LOOKS, NEXT_LOOK_S = 8, 5.0  # at histories at once while there is no state, each begun so long after the one before
_LOOKS_APART = 4  # times as long as a look at a history that was of no use took, no other is looked at
LEAVE_S = 1.0  # in which an island that leaves tells that to the one who leads
_BRIEFLY_S = 0.5
_MUCH_SLOWER, _FAR_SLOWER = 8, 64  # times as long as steps take here, others are waited for; if they are more
_LONGEST_STATELESS = 6  # doublings of that, between the looks of an island that has no state
_NAMED = 4  # members that a round waits for, in words
_SAID_TRIES = 4
_OVERHEADS = 4  # rounds whose overhead counts, among them some in which another island led
_PACES = 4  # rounds of whose speed the median tells when the job will be done


@dataclass(frozen=True)
class RoundTiming:
    """How long islands wait for each other, in seconds."""

    hello_s: float = 5.0
    alive_s: float = 20.0  # an island that was not heard for so long is not waited for
    grace_least_s: float = 2.0  # for late members, see `decisions.grace_s`
    grace_most_s: float = 60.0
    lead_s: float = 15.0  # silence of the one who leads, before the next one does
    exchange_s: float = 60.0  # at least, see `decisions.exchange_limit_s`
    quorum_s: float = 30.0  # a round without quorum is made by those who are there after so long


class IslandMath(MergingModel, Protocol):
    """An island's model in rounds; `engine.island.RoundModel` has it."""

    def begin_round(self, number: int, codec: Any, steps: range, last_steps: range) -> None: ...
    def change(self) -> list[bytes]: ...
    def advance(self, leaves: Sequence[bytes]) -> list[bytes]: ...
    def commit(self, *, counted: bool) -> None: ...
    def states(self) -> list[bytes]: ...
    def load(self, states: Sequence[bytes]) -> None: ...


class TrainingText(Protocol):
    """The text of a job as sequences of one length."""

    @property
    def count(self) -> int: ...
    def sequence(self, number: int) -> Sequence[int]: ...
    @property
    def held(self) -> Sequence[Sequence[int]]: ...


class LeftOut(AppError):
    """This island takes no more part in a job: the others found its changes to be unlike theirs."""

    code = "left_out"


class WentOn(AppError):
    """An island whose history is the better one does not have the state after it any more."""


class _Candidate(NamedTuple):
    """The state that a round would lead to."""

    list_hash: bytes
    root: bytes
    states: list[bytes]
    parts: list[StatePart]


class _History(NamedTuple):
    """A log that another island has shown and that was verified here."""

    peer: str
    entries: list[RoundEntry]
    standing: Standing


class _Lead(NamedTuple):
    """How somebody led since a round of its own counted last, as seen from here."""

    times: int = 0  # in vain
    since: float = math.inf  # when it began to lead in this round
    until: float = math.inf  # when it leads


class Pace(NamedTuple):
    """How fast an island was in a round, as seen from here."""

    lag_s: float  # after the first one
    tokens_per_s: float


@dataclass
class IslandFigures:
    """Figures of one island for people and programs."""

    losses: list[float] = field(default_factory=list)  # of the latest steps
    validation: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0  # made here
    tokens: int = 0  # counted here
    step_s: float = 0.0  # that a step of the last round took
    arrive_s: float = 0.0  # that it took to commit to the last change
    settle_s: float = 0.0  # that it took to go on from the state after the last round
    settled_at: float = 0.0  # when that was
    bytes_in: int = 0  # of the last exchange
    repeated: int = 0  # exchanges that had to be made again
    fetched: int = 0  # states taken over as parts
    waiting: str = ""  # for whom a round waits, and until when
    measured_round: int = -1  # the last round that was made here from its steps on; the next figures are of it
    round_tokens_per_s: float = 0.0  # of all islands
    paces: dict[str, Pace] = field(default_factory=dict)  # of those that arrived here in the last round
    left_s: float | None = None  # until all steps are done, if rounds go on as the last ones did
    utilisation: float | None = None  # share of the measured round in which steps were made
    overheads_s: list[float] = field(default_factory=list)  # of the last rounds, without waiting for others
    paces_s: list[float] = field(default_factory=list)  # seconds a step of the job took in the last rounds


class Island:
    """Takes part in one job with a whole model; `run` until all its steps are done."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        record: TrainingRecord,
        model: IslandMath,
        text: TrainingText,
        device: Device,
        states: StateStore,
        *,
        found: Callable[[], Iterable[str]],
        wall_ms: Callable[[], int],
        own_data: OwnData | None = None,
        steps: StepMaker,
        timing: RoundTiming | None = None,
        acquaintances: Iterable[str] = (),
        rng: random.Random | None = None,
        settled: Callable[[list[RoundEntry], list[bytes]], Awaitable[None]] | None = None,
        in_thread: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        """`found` names all members of the swarm, `acquaintances` are those that had the job when this node joined it.

        `settled` is called with the log and the state after each round.

        `steps` changes the model between rounds.

        `own_data` is what this island says of its text, signed, if the job has every member train on its own.
        """
        assert record.own_data == (own_data is not None), "a text is either of the job or of the member"
        self.record, self.timing, self._settled = record, timing or RoundTiming(), settled
        self.own_data = own_data
        self.data_of: dict[str, OwnData] = {} if own_data is None else {own_data.peer: own_data}
        self._network, self._identity, self._found, self._wall_ms = network, identity, found, wall_ms
        self._model, self._text, self._device, self._states = model, text, device, states
        self._steps = steps
        rng = rng or random.SystemRandom()
        self._greetings, self._secret = Greetings(acquaintances, rng), rng.randbytes(HASH_BYTES)
        self._in_thread = in_thread = in_thread or trio.to_thread.run_sync
        self._verifying = trio.Lock()
        self._turns: dict[str, trio.Lock] = {}  # of peers whose statements are being read
        self._exchange = Exchange(network, identity, device, model, record.id, wall_ms=wall_ms, in_thread=in_thread)
        self._moments = MomentsExchange(network, record.id, steps.whole, device, states)
        self._tester = ChangeTester(record, steps.whole, text, device, states, self._exchange, network.peer_id)
        self.standing: Standing = beginning(record)
        self.log: list[RoundEntry] = []
        self.checkpoint = CheckpointWriter(record.id[:16], states, kept=record.parts)
        self.recent: frozenset[str] = frozenset()  # those that took part in one of the last rounds
        self.heard: dict[str, Heard] = {}
        self._heads = {GENESIS}  # of all rounds in the log
        self._sizes: list[int] = []  # of the parts of a state
        self._disregarded: dict[str, tuple[int, float]] = {}  # peer -> how often its history was of no use, until when
        self._strangers_until = 0.0  # the same for all who took part in none of the last rounds
        self.figures = IslandFigures()
        self._arrivals: dict[str, Arrival] = {}  # of the current round
        self._arrived_at: dict[str, float] = {}
        self._complete_at: float | None = None  # when all who are there had arrived in the current round
        self._lags_s: list[float] = []
        self._own: OwnChange | None = None
        self._tested: OwnChange | None = None  # of the last round, for those who were drawn to test it
        self._lists: dict[str, MemberList] = {}  # the latest of each leader, if it names this island, until followed
        self._offered_at: dict[str, float] = {}  # when those came; an exchange has its time from then on
        self._listed: dict[str, int] = {}  # leader -> attempt of its latest list, this island's too
        self._leads: dict[str, _Lead] = {}
        self._first_list_at: dict[str, float] = {}  # by its leader
        self._tried: set[str] = set()  # members of exchanges of this round in which this island took part
        self._attempts: dict[bytes, ExchangeAttempt] = {}  # by the hash of the list
        self._results: dict[bytes, dict[str, Result]] = {}
        self._candidate: _Candidate | None = None
        self._ahead: RoundEntry | None = None
        self._better: _History | None = None  # than the own one
        self._homes = Homes(network)
        self._shown_by: dict[str, str] = {}  # whose history is being looked at, and its home
        self._rests: dict[str, Rest] = {}  # members that failed in exchanges of the last rounds, as seen from here
        self._failures: deque[set[str]] = deque(maxlen=KEPT_RESTS)  # who did so in each of the last rounds made here
        self._believed: dict[tuple[str, str], int] = {}  # whose word was taken here against whom, and in which round
        self._missed: dict[str, Missed] = {}  # members that did not arrive in the last rounds, as seen from here
        self._in_vain: set[str] = set()  # who was waited for though it had only said hello, and has not arrived since
        self._failed_here: set[str] = set()  # members whom this island accused in this round
        self._exchange_began = b"", 0.0  # the last one: hash of its list, and when
        self._lost_s = 0.0  # in exchanges of this round for which the time was too short
        self._rounds_behind = 0.0  # when changes were taken over last; infinity after a state for which they are held
        self._stands_down_until = 0.0  # others found this island at fault while it led
        self._news = Signal()
        self._nursery: trio.Nursery
        self._until_left = trio.CancelScope()  # of the main task
        self._listens_since = math.inf
        self._has_state = False
        self._asked_in = 0  # the latest round in which others were asked for moments
        self._outside_from = 0  # the first round without this island, since it last took part

    @property
    def peer(self) -> str:
        """This island's peer id."""
        return self._network.peer_id

    @property
    def is_finished(self) -> bool:
        """True if all steps of the job are done."""
        return self.standing.step >= self.record.steps

    @property
    def head(self) -> bytes:
        """Hash of the newest entry."""
        return self.standing.prev

    @property
    def held_tokens(self) -> int:
        """Tokens of the text that are not trained on, for validation after each round."""
        return sum(map(len, self._text.held))

    @property
    def resting(self) -> dict[str, str]:
        """Members that are not expected for some rounds, and why."""
        rests = {peer: self._rests[peer] for peer in resting(self._rests, self.standing.round)}
        words = "failed in {0.failures} exchanges in a row, is expected again in round {0.until}"
        return {peer: words.format(one) for peer, one in rests.items()}

    @property
    def machines(self) -> Route:
        """The machines of this island with their blocks, if it has several."""
        return self._steps.route

    @property
    def waiting(self) -> str:
        """What keeps this island from its next step, or its newest state from the disk, in words."""
        return self.figures.waiting or self._steps.waiting or self.checkpoint.trouble

    async def close(self) -> None:
        """Remove what is kept for this island's steps."""
        await self._steps.close()

    async def forget_states(self) -> None:
        """Remove the states and moments that others could fetch here."""
        for run in (self.record.id[:16], self._moments.run):
            await self._states.forget(run)

    def alive(self) -> set[str]:
        """Other islands of this job that were heard lately."""
        now = trio.current_time()
        return {peer for peer, one in self.heard.items() if now - one.at < self.timing.alive_s} - {
            *self.standing.banned
        }

    def validated(self, loss: float) -> None:
        """Note the loss, on text that is not trained on, of the state after the last round, unless it is not finite."""
        if math.isfinite(loss):
            self.figures.validation = [*self.figures.validation[-999:], (self.standing.step, loss)]

    def replace_entries(self, entries: Sequence[RoundEntry]) -> None:
        """Take entries of the log in another form, which needs less memory."""
        for at, (known, entry) in enumerate(zip(self.log, entries, strict=False)):
            if known.hash == entry.hash:
                self.log[at] = entry

    def leave(self) -> None:
        """End `run` within a second or two, whatever it computes or waits for; a round that is over is not lost."""
        self._until_left.cancel()
        self._tester.stop()  # which may compute for long, while the device does nothing else

    async def begin(self, entries: Sequence[RoundEntry] = (), states: Sequence[bytes] | None = None) -> None:
        """Go on from a log and the states after it; without them, begin before the first round.

        A model that is not in that state here is taken over from another island. Raises `RecordError` if the log is
        wrong.
        """
        if states is not None:
            self.standing = await self._in_thread(replay, self.record, entries)
            await self._device.run_beside(self._model.load, states)
            self.log, self.recent = list(entries), took_part(entries)
            self._heads |= {entry.hash for entry in entries}
        self._model.begin_round(self.standing.round, self.standing.codec, self.standing.steps, self.standing.last_steps)
        found = await self._device.run_beside(self._model.states) if states is None else states
        root, parts = await self._in_thread(hashed, found)
        self._sizes = [part.size_bytes for part in parts]
        self._has_state = root == self.standing.root
        if self._has_state:
            await self.checkpoint.keep(self.standing.round, found, parts)
            self.figures.settled_at = trio.current_time()

    async def run(self) -> None:
        """Take part until all steps are done or `leave` was called.

        Raises `LeftOut`, the `AppError` or `OSError` for which the last state is not on disk, and whatever the device
        raises; several errors at once as a group.
        """
        failure: Exception | None = None
        self._listens_since = trio.current_time()
        async with trio.open_nursery() as greeting:
            greeting.start_soon(self._greet)
            greeting.start_soon(self._look_around)
            async with trio.open_nursery() as self._nursery:
                try:
                    with self._until_left:
                        await self._live()
                except Exception as error:  # of torch, for one
                    failure = error
                await self.checkpoint.finish()
                if self.is_finished and failure is None:
                    failure = self.checkpoint.unsaved
                # what this island said last is still being told to the others
                told_s = LEAVE_S if self._leaves else self.timing.hello_s
                self._nursery.cancel_scope.deadline = trio.current_time() + told_s
            greeting.cancel_scope.cancel()
        if failure is not None:
            raise failure

    @property
    def _is_overtaken(self) -> bool:
        """True if others have made this round, or a better history."""
        return self._ahead is not None or self._better is not None

    @property
    def _leaves(self) -> bool:
        """True if this island ends before the job does."""
        return self._until_left.cancel_called and not self.is_finished

    # --- the main task ------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        while not self._is_over():
            standing = self.standing
            if why := standing.banned.get(self.peer):
                raise LeftOut(f"the others left this island out of {self.record.name}: {why}")
            if self._is_overtaken:
                await self._catch_up()
            elif self.is_finished or self.peer not in standing.members or not self._has_state:
                self._outside_from = self._outside_from or standing.round
                self.figures.waiting = self._why_outside(standing)
                with trio.move_on_after(self.timing.hello_s):
                    await self._news.wait()
            elif standing.round - max(self._asked_in, self._outside_from) >= OUTSIDE_LONG and self._moments.are_lacking:
                if len(standing.members) > 1 and not self._knows_others:  # it has just begun
                    await self._pause(self.timing.hello_s)
                    continue
                alive = self.alive()
                self._asked_in, question = standing.round, Question([one for one in standing.members if one in alive])
                self._nursery.start_soon(self._moments.ask, question)
                await self._moments.take(question, {})
            else:
                began, self._outside_from = trio.current_time(), 0
                self.figures.waiting = ""
                trained = await self._train(standing)
                if self._own is not None:
                    await self._guarded_round(standing)
                if self.standing is not standing:
                    self._measure(standing, began, trained)

    def _why_outside(self, standing: Standing) -> str:
        """Say what an island waits for that makes no steps now; nothing if all are done."""
        if self.is_finished:
            return ""
        if not self._has_state:
            return f"waits for a member that has the state before round {standing.round}, which is not here"
        return f"waits until round {standing.round} of the others is over"

    def _is_over(self) -> bool:
        """True if all steps are done, and nobody who was heard since then has another history or still has to finish.

        Islands that made the last round apart could not agree on one later; after `quorum_s` they are left to it.
        """
        since, now = self.figures.settled_at, trio.current_time()
        if not self.is_finished or now - since > self.timing.quorum_s:
            return self.is_finished
        return all(one.at > since and one.head == self.head for one in map(self.heard.__getitem__, self.alive()))

    async def _train(self, standing: Standing) -> float:
        """Make the steps of a round, fewer if most others are done already, and arrive; none if the round is over.

        Returns when the last step was made.
        """
        record, tokens, steps, began = self.record, 0, 0, trio.current_time()

        def sequences(step: int) -> list[Sequence[int]]:
            if record.own_data:  # nobody else reads this text, so no position is left to others
                places = positions_of(standing.step * record.batch, (self.peer,), self.peer, step, record.batch)
            else:
                places = positions_of(standing.start, standing.members, self.peer, step, record.batch)
            return [self._text.sequence(sequence_at(place, self._text.count, record.seed)) for place in places]

        def stop(made: int) -> bool:
            return self._is_overtaken or (made > 0 and self._is_late())

        def made(done: StepFigures) -> None:
            nonlocal steps, tokens
            steps, tokens = steps + 1, tokens + done.tokens
            self.figures.losses = [*self.figures.losses[-399:], done.loss]
            self.figures.steps += 1
            self.figures.tokens += done.tokens

        traces, whole = None, self._steps.whole
        if record.recompute and whole is not None:
            seed = trace_seed(record.id, standing.prev, self.peer)
            traces = StepTraces(traced_steps(standing.every, whole.trace_bytes), seed)
        task = RoundTask(standing.every, standing.step, sequences, stop, made, traces)
        counts = await self._steps.make(task)
        ended = trio.current_time()
        if counts and steps and not self._is_overtaken:
            self.figures.step_s = (ended - began) / steps
            await self._arrive(standing, steps, tokens, traces)
            self.figures.arrive_s = trio.current_time() - ended
        return ended

    async def _arrive(self, standing: Standing, steps: int, tokens: int, traces: StepTraces | None) -> None:
        """Commit to the change, and to traces of the steps if they are kept, and tell the others."""
        await self.checkpoint.finish()  # so that two states are never in memory
        leaves = await self._device.run_beside(self._model.change)
        hashes, change = await self._in_thread(hashes_of, leaves)
        made = Arrival(self.record.id, standing.round, standing.prev, steps, tokens, change)
        packed: list[bytes] = []
        if traces is not None:
            packed, root = await self._in_thread(committed_traces, traces)
            made = replace(made, traces=root)
        if self.record.grid:
            near = {link.peer for link in self._network.links() if link.kind == "lan"}
            made = replace(made, network=network_of(self.peer, near, standing.members))
        arrival = sign_arrival(self._identity, made, self._wall_ms())
        self._own = OwnChange(arrival, leaves, hashes, packed, [] if traces is None else traces.weights)
        self._note_arrival(arrival)
        for peer in {*standing.members, *self.alive()} - {self.peer}:
            self._nursery.start_soon(self._say, peer, arrival.raw)

    async def _guarded_round(self, standing: Standing) -> None:
        """Make a round; what others said and cannot be made a round of costs a pause, never this island's part."""
        while self.standing is standing:
            try:
                await self._round(standing)
            except (RecordError, ExchangeFailed, P2PError) as error:
                log.warning("round %s of %s begins again: %s", standing.round, self.record.name, error)
                await trio.sleep(self.timing.hello_s)

    async def _round(self, standing: Standing) -> None:
        """Wait for a list, or make one, until the round has an entry that this island has taken over."""
        began = trio.current_time()
        followed: dict[str, float] = {}  # leaders, and until when each may wait for the results of its first list
        while self.standing is standing:
            if self._is_overtaken:
                await self._catch_up()
                continue
            offered, now = self._best_list(), trio.current_time()
            lead_at = partial(self._lead_at, standing, began, first=not self._tried)
            given_until = max((followed[peer] for peer in followed.keys() & self.alive()), default=0.0)
            next_at = max(given_until, lead_at(self.peer))
            if offered is not None:
                # who led in vain has to wait for its place, so that it does not keep others from leading
                is_doubtful = self._times_in_vain(offered.leader) > 0
                follow_at = max(given_until, lead_at(offered.leader)) if is_doubtful else now
                # whoever signs a result agrees to the round
                follow_at = max(follow_at, self._may_count_at(standing, offered.members))
                deadline = self._offered_at[offered.leader] + self._exchange_s()
                if max(follow_at, now) + self.timing.lead_s > deadline:  # its leader will have given up
                    del self._lists[offered.leader]
                    continue
                if follow_at <= now:
                    del self._lists[offered.leader]
                    followed.setdefault(offered.leader, await self._attend(offered, deadline))
                    began = trio.current_time() + self.timing.lead_s
                    continue
                next_at = min(next_at, follow_at)
            if next_at <= now:
                await self._lead(standing)
                began = trio.current_time() + self.timing.lead_s
            else:
                await self._pause(next_at - now)
        self.figures.waiting = ""

    async def _pause(self, seconds: float) -> None:
        with trio.move_on_after(min(seconds, self.timing.hello_s)):
            await self._news.wait()

    def _lead_at(self, standing: Standing, began: float, leader: str, *, first: bool) -> float:
        """When a member is to lead: once all have arrived or were waited for, by its place in the order.

        The time of each in the order counts from the moment when the first one was to lead, which all see alike, not
        from its own arrival: otherwise all who were early would lead at once.
        """
        arrived = self._arrivals.keys() & {self.peer, *standing.members}
        # Whoever takes part in none of the last rounds, and misses one after the other, is waited for ever more seldom.
        idle = {peer for peer, one in self._missed.items() if one.rounds & (one.rounds - 1)} - self.recent
        alive = {self.peer, *self.alive()} & {*standing.members} - idle
        order = self._leaders(self._without_copies(arrived))
        ready_at = began
        if first:
            if self._complete_at is None and alive <= arrived:
                self._complete_at = trio.current_time()
            half = sorted(self._arrived_at[peer] for peer in arrived)[: -(-len(self._met(standing)) // 2)][-1]
            grace = grace_s(self._lags_s, least_s=self.timing.grace_least_s, most_s=self.timing.grace_most_s)
            waited_until = half + grace if self._complete_at is None else min(self._complete_at, half + grace)
            ready_at = max(waited_until, self._arrived_at[self.peer])
        may_at = max(self._may_count_at(standing, order), self._may_found_at())
        ready_at = max(ready_at, may_at)
        self.figures.waiting = self._why_not_yet(standing, order, may_at) if may_at > trio.current_time() else ""
        if leader == self.peer:
            ready_at = max(ready_at, self._stands_down_until)
        before = [peer for peer in self._leaders({*order, leader}) if peer == leader or peer not in self._failed_here]
        return ready_at + before.index(leader) * self.timing.lead_s

    def _leaders(self, peers: Iterable[str]) -> list[str]:
        """Peers in the order in which they are to lead, those last that led in vain most often."""
        return sorted(leading_order(self.record.id, self.standing.round, peers), key=self._times_in_vain)

    def _times_in_vain(self, leader: str) -> int:
        """How often somebody led, and no round came of it, since a round of its own counted last."""
        lead = self._leads.get(leader, _Lead())
        return lead.times + (lead.until <= trio.current_time())

    def _begin_lead(self, leader: str) -> None:
        """Note that somebody leads, if it did not yet: it has the time of two exchanges for all its lists."""
        lead, now = self._leads.get(leader, _Lead()), trio.current_time()
        if lead.until == math.inf or lead.until <= now:
            until = now + 2 * (self._exchange_s() + self.timing.lead_s)
            self._leads[leader] = _Lead(self._times_in_vain(leader), now, until)

    def _end_leads(self, entries: Sequence[RoundEntry]) -> None:
        """Note whose round counted, and who led in vain."""
        self._leads = {peer: _Lead(lead.times + (lead.until < math.inf)) for peer, lead in self._leads.items()}
        if entries:
            self._leads.pop(entries[-1].list.leader, None)
        while len(self._leads) > MAX_PEERS:
            del self._leads[next(iter(self._leads))]

    def _without_copies(self, peers: Collection[str]) -> list[str]:
        """Those of some who arrived that were not heard to repeat another's commitment; this island is one of them."""
        heard = sorted((peer for peer in self._arrivals if peer in peers), key=lambda peer: peer != self.peer)
        return first_to_commit({peer: self._arrivals[peer].change for peer in heard})

    def _best_list(self) -> MemberList | None:
        """The list to follow: by the one who comes first in the order of leading, of those that may count now."""
        lists = [self._lists[peer] for peer in self._leaders(self._lists.keys() - self._failed_here)]
        return min(lists, key=lambda one: not self._may_be_followed(one), default=None)

    def _may_be_followed(self, members: MemberList) -> bool:
        return self._may_count_at(self.standing, members.members) <= trio.current_time()

    async def _attend(self, members: MemberList, deadline: float) -> float:
        """Take part in an exchange that another island leads, and tell it how that ended.

        Returns until when it may still wait for the results of others. The round's entry may be here before its answer.
        """
        self._begin_lead(members.leader)
        result = await self._exchanged(members, deadline)
        self._give_way(members)
        self._nursery.start_soon(self._say, members.leader, result.raw)
        return deadline + 2 * self.timing.lead_s if result.root else 0.0

    async def _lead(self, standing: Standing) -> None:
        """Make lists until a round counts, another island leads better or the time for it is over.

        Who arrives after the first list waits for the next round: members that are not in the first one could not judge
        whether somebody is left out of the second one with cause.
        """
        self._begin_lead(self.peer)
        out, vain = set(self._failed_here), self._times_in_vain(self.peer)
        arrived = self._arrivals.keys() & {*standing.members}
        while self.standing is standing and not self._is_overtaken and self._times_in_vain(self.peer) == vain:
            began = trio.current_time()
            order = leading_order(self.record.id, standing.round, self._without_copies(arrived - out))
            if max(self._may_count_at(standing, order), self._may_found_at()) > began:
                break
            self._in_vain |= self._at_work(standing, arrived)
            arrivals = [self._arrivals[peer] for peer in order]
            attempt = self._listed.get(self.peer, -1) + 1
            if attempt > MAX_ATTEMPTS:
                break
            members = await self._in_thread(
                sign_list, self._identity, self.record.id, attempt, arrivals, self._wall_ms()
            )
            self._listed[self.peer] = attempt
            missing = await self._offer(members) - out - arrived
            if self._is_overtaken or self._give_way(members):
                break
            if missing:
                arrived |= missing
                continue
            deadline = trio.current_time() + self._exchange_s()
            own = await self._exchanged(members, deadline)
            results = await self._gather(members, own, deadline + self.timing.lead_s)
            if self._is_overtaken or results is None:
                break
            accusations = {peer: result.failed for peer, result in results.items() if result.failed}
            silent = [peer for peer in order if peer not in results]
            if (
                not silent
                and not accusations
                and own.root
                and {result.root for result in results.values()} == {own.root}
            ):
                await self._count(standing, members, results, began)
                break
            self.figures.repeated += 1
            roots = {peer: result.root for peer, result in results.items()}
            grid = self._attempts[members.hash].grid
            circles = await self._in_thread(grid.circles, self._model.leaves)
            wrong = {*silent} or await self._two_faced(members, roots)
            wrong = wrong or self._to_leave_out(order, accusations, roots, circles)
            if self.peer in wrong or not wrong:  # others cannot work with this island: let the next one lead
                self._stands_down_until = trio.current_time() + self.timing.quorum_s
                break
            out |= wrong
            log.info("round %s is repeated without %s", standing.round, ", ".join(sorted(out)))

    def _to_leave_out(
        self,
        members: Sequence[str],
        accusations: Mapping[str, Collection[str]],
        roots: Mapping[str, bytes],
        circles: Mapping[str, Iterable[Collection[str]]],
    ) -> set[str]:
        """Decide without whom an exchange is repeated, and remember whose word was taken."""
        number = self.standing.round
        self._believed = {pair: last for pair, last in self._believed.items() if last + KEPT_RESTS > number}
        standings = self._standings(members)
        wrong = to_leave_out(members, accusations, roots, circles, standings=standings, repeated=self._believed)
        for accuser in accusations.keys() - wrong:
            self._believed |= {(accuser, accused): number for accused in accusations[accuser]}
        return wrong

    def _standings(self, members: Iterable[str]) -> dict[str, float]:
        """How much members are to be believed, by the last rounds of the log and the failures seen here."""
        counted = [entry.list.members for entry in self.log[-RECENT_ROUNDS:]]
        return standings_of(members, counted, self._failures)

    async def _offer(self, members: MemberList) -> set[str]:
        """Tell all members of a list; return those who arrived, as some of them know, and are not in it."""
        unanswered = {*members.members} - {self.peer}
        self._results = {members.hash: {}}  # those of earlier lists are of no use any more

        async def offer(peer: str) -> None:
            await self._say(peer, members.raw)
            unanswered.discard(peer)
            self._news.notify()

        before = {*self._arrivals}
        for peer in unanswered:
            self._nursery.start_soon(offer, peer)
        with trio.move_on_after(self.timing.grace_least_s):
            await self._news.wait_for(lambda: not unanswered)
        return self._arrivals.keys() - before

    async def _two_faced(self, members: MemberList, roots: Mapping[str, bytes]) -> set[str]:
        """Return the members that gave another share to those who ended with another state than to this island."""
        attempt, own = self._attempts[members.hash], roots[self.peer]
        others = [peer for peer, root in roots.items() if root and own and root != own]
        found: set[str] = set()

        async def compare(peer: str) -> None:
            try:
                found.update(await self._exchange.two_faced(attempt, peer, trio.current_time() + 3 * wire.WAIT_S))
            except (P2PError, RecordError, ExchangeFailed) as error:
                log.debug("%s does not show the shares of round %s: %s", peer, members.round, error)

        async with trio.open_nursery() as nursery:
            for peer in others:
                nursery.start_soon(compare, peer)
        return found

    def _may_count_at(self, standing: Standing, order: Sequence[str]) -> float:
        """When these members may make the round: at once if they are a quorum, else when others were waited for.

        Those who are there and still make their steps are waited for as long again as steps usually take, but not if
        they were waited for like that and have not arrived since; and not much longer than steps took here, or far
        longer if they are at more homes than those who have arrived: alone, these make rounds that count for nobody
        else.
        """
        met = self._met(standing)
        if len(order) >= quorum(len(met)):
            return -math.inf
        until = self._arrived_at[self.peer] + self.timing.quorum_s
        slow = self._at_work(standing, order) - self._in_vain
        if len(order) + len(slow) >= quorum(len(met)):
            times = _FAR_SLOWER if self._homes_of(slow) > self._homes_of(order) else _MUCH_SLOWER
            most_s = times * self.figures.step_s * standing.every
            until += min(steps_s(self.record, self.log, standing.every), most_s)
        return until

    def _may_found_at(self) -> float:
        """When the founder may make the first round: others may have made it go on, if it has lost its disk."""
        if self.log or (self._knows_others and not self._shown_by and self._better is None):
            return -math.inf
        return self._listens_since + self.timing.alive_s + (self.timing.exchange_s if self._shown_by else 0.0)

    def _has_waited_for_others(self, members: Sequence[str]) -> bool:
        """True if these are no quorum, and this island has waited long enough for the others of the present round."""
        has_arrived = self.peer in self._arrived_at
        return has_arrived and -math.inf < self._may_count_at(self.standing, members) <= trio.current_time()

    def _homes_of(self, peers: Collection[str]) -> int:
        """At how many homes these are."""
        return len({*self._homes.machines({*peers} - {self.peer}).values()}) + (self.peer in peers)

    def _at_work(self, standing: Standing, order: Collection[str]) -> set[str]:
        """Members that are not among these, are there, and have not ended this round."""
        missing = (self._met(standing) & self.alive()) - {*order}
        return {peer for peer in missing if self.heard[peer].head == standing.prev}

    def _why_not_yet(self, standing: Standing, order: Sequence[str], until: float) -> str:
        missing = sorted(self._met(standing) - {*order})
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return f"waits for {', '.join(missing[:_NAMED])}{more}, for {until - trio.current_time():.0f} s at most"

    def _met(self, standing: Standing) -> set[str]:
        """Members of a round of whom a quorum makes it: those of the last one, who arrived, or who took part lately and
        were heard in its time.

        The leader of the last round can name anybody as members of this one, and whoever says hello may become one. A
        quorum of those that never arrive would never be there.
        """
        last = self.log[-1].list.members if self.log else [self.record.founder]
        since = self.figures.settled_at - self.timing.alive_s
        heard = {peer for peer, one in self.heard.items() if one.at > since and peer in self.recent}
        return {self.peer, *last, *self._arrivals, *heard} & {*standing.members}

    async def _gather(self, members: MemberList, own: Result, until: float) -> dict[str, Result] | None:
        """Wait for the results of all members; those of silent ones are missing. None: another list is better.

        Who is done with the exchange waits for members with slower links, `until` its time is over, if they are there.
        """
        results, expected = self._results[members.hash], {*members.members}
        results[self.peer], soon = own, trio.current_time() + self.timing.lead_s
        while (missing := expected - results.keys()) and not self._is_overtaken:
            if self._give_way(members):
                return None
            may_succeed = missing <= self.alive() and all(result.root for result in results.values())
            if (left_s := (until if may_succeed else soon) - trio.current_time()) <= 0:
                break
            await self._pause(left_s)
        return {peer: result for peer, result in results.items() if peer in expected}

    async def _count(self, standing: Standing, members: MemberList, results: dict[str, Result], began: float) -> None:
        """Sign the entry of a round that all members ended alike, spread it and take it over.

        Steps and number format of the next round follow from the time of the last steps, and from what the exchange
        since `began` cost with arriving before and settling after it. The one who leads is done before the others:
        rounds in which this island did not lead, if they were longer, say more, and so does an exchange of this round
        that was given up for want of time.
        """
        record, figures = self.record, self.figures
        # Whoever has the state before this round can go on with the next one; members that are late catch up.
        present = {peer for peer in self.alive() if peer in standing.members or self.heard[peer].head == standing.prev}
        if record.own_data:  # nobody comes in whose text has no source and licence
            present &= {*standing.members, *self.data_of}
        present -= resting(self._rests_after(members), standing.round + 1)
        lot = results[self.peer].root  # of the state, which nobody knows before all have shown their changes
        following = in_line(present, recent=self.recent, missed=self._missed_after(members), lot=lot)
        past_s, step_s = self._past_overheads_s(members), figures.step_s
        overhead_s = max(lasting_overhead_s(self._overhead_since(began), past_s), self._lost_s)
        every = next_every(standing.every, step_s, overhead_s, least=record.least_every, most=record.most_every)
        codec = standing.codec
        if len(members.members) > 1 or self._lost_s:
            codec = next_codec(codec, step_s, overhead_s, least=record.least_every, known=record.codecs)
        entry = await self._in_thread(partial(
            make_entry, self._identity, record, standing, members, results.values(), every=every, codec=codec,
            present=following, now_ms=self._wall_ms(),
        ))  # fmt: skip
        for peer in {*standing.members, *self.alive()} - {self.peer}:  # first, so that all settle at the same time
            self._nursery.start_soon(self._say, peer, entry.raw)
        await self._adopt(entry)

    def _overhead_since(self, began: float) -> float:
        """Seconds that the round has cost besides its steps, if its exchange began then.

        They begin with the last round's end, so that no moment counts in two rounds.
        """
        return self.figures.settle_s + self.figures.arrive_s + trio.current_time() - began

    def _past_overheads_s(self, members: MemberList) -> list[float]:
        """Overheads of the last rounds, if several islands made them, or one alone, as this one is made."""
        is_like = bool(self.log) and (len(self.log[-1].list.members) > 1) == (len(members.members) > 1)
        return self.figures.overheads_s if is_like else []

    def _note_overhead(self, members: MemberList, codec: str) -> None:
        """Remember what a round cost this island, if it took part in its exchange; `codec` is that of the next one."""
        exchange, began = self._exchange_began
        if codec != self.standing.codec:
            self.figures.overheads_s = []  # rounds in another number format are no measure
        elif exchange == members.hash:
            past_s = self._past_overheads_s(members)
            self.figures.overheads_s = [*past_s, self._overhead_since(began)][-_OVERHEADS:]

    def _rests_after(self, members: MemberList) -> dict[str, Rest]:
        """Who rests after a round that these members made, by what this island has seen of its exchanges."""
        return rests_after(self._rests, members.round, failed=self._failed_in(members), counted=members.members)

    def _failed_in(self, members: MemberList) -> set[str]:
        """Who failed in the exchanges of a round that these members made.

        Only one that made the round, and not alone, can tell that others failed in it.
        """
        counted = {*members.members}
        return self._tried - counted if self.peer in counted and len(counted) > 1 else set()

    def _missed_after(self, members: MemberList) -> dict[str, Missed]:
        """Who was there and missed a round that these members made, and the last ones, by what this island has seen.

        Only one that made the round, with a quorum of those that took part lately, can tell that others did not arrive.
        Without a quorum, it may be this island that did not reach them.
        """
        counted, expected = {*members.members}, {*self.standing.members}
        is_quorate = len(counted) >= quorum(len({self.peer, *self.recent} & expected))
        absent = (self.alive() & expected) - counted if self.peer in counted and is_quorate else set[str]()
        return missed_after(self._missed, members.round, absent=absent, counted=counted)

    async def _exchanged(self, members: MemberList, deadline: float) -> Result:
        """Run one attempt; the result says what state it leads to, or who failed."""
        assert self._own is not None
        began = trio.current_time()
        self._exchange_began = members.hash, began
        self._tester.stop()
        self._tried |= {*members.members}
        attempt = ExchangeAttempt(members, self.record.grid)
        self._keep(attempt)
        root, failed = b"", dict[str, str]()

        def result() -> Result:
            made = Result(
                self.record.id, members.round, members.hash, root, failed, attempt.report, past=attempt.past,
                tested=self._tester.told, recomputed=self._tester.recomputed,
            )  # fmt: skip
            return sign_result(self._identity, made, self._wall_ms())

        try:
            leaves = await self._exchange.run(attempt, self._own, deadline)
            self._candidate = None  # of another attempt
            states = await self._device.run_beside(self._model.advance, leaves)
            root, parts = await self._in_thread(hashed, states)
            self._candidate = _Candidate(members.hash, root, states, parts)
        except ExchangeFailed as error:
            failed = error.failed
            self._failed_here |= failed.keys() - {self.peer}
            if trio.current_time() > deadline - self.timing.lead_s:  # by which the deadlines of others may differ
                self._lost_s = max(self._lost_s, trio.current_time() - began)
        except EngineError as error:
            log.warning("the merged change of round %s cannot be used: %s", members.round, error)
        finally:
            if self._leaves:  # the others repeat it, and need not wait for that
                root, failed = b"", {self.peer: "it leaves"}
                attempt.fail(failed)
                if members.leader != self.peer:
                    self._nursery.start_soon(self._say, members.leader, result().raw)
        self.figures.bytes_in = attempt.bytes_in
        return result()

    def _exchange_s(self) -> float:
        """How long an exchange of this round may take, the same for all members."""
        took_s = steps_s(self.record, self.log, self.standing.every)
        return exchange_limit_s(self._change_bytes, took_s, least_s=self.timing.exchange_s)

    @property
    def _change_bytes(self) -> int:
        return self._model.leaves * self._model.leaf_bytes

    def _keep(self, attempt: ExchangeAttempt) -> None:
        """Show others an attempt, and forget the oldest ones: each has leaves as large as a whole change.

        Together they are no larger than a state, unless there are no more than two.
        """
        self._attempts[attempt.members.hash] = attempt
        most = max(2, min(KEPT_ATTEMPTS, sum(self._sizes) // self._change_bytes))
        while len(self._attempts) > most:
            del self._attempts[next(iter(self._attempts))]
        self._news.notify()

    # --- taking over --------------------------------------------------------------------------------------------------

    async def _adopt(self, entry: RoundEntry) -> None:
        """Go on from the state after a round; raises `RecordError`, `ExchangeFailed`, `EngineError` or `P2PError`."""
        standing = follow(self.record, self.standing, entry)
        counted = self._own is not None and self.peer in entry.list.members
        if self._has_waited_for_others(entry.list.members):
            self._in_vain |= self._at_work(self.standing, entry.list.members)
        await _to_the_end(self.checkpoint.finish)  # of the state before this round
        found = self._candidate
        if found is None or (found.list_hash, found.root) != (entry.list.hash, entry.root):
            self._candidate = None
            leaves, found = await self._result_of(entry)
            self._keep(ExchangeAttempt(entry.list, self.record.grid, merged=dict(enumerate(leaves))))
        await _to_the_end(self._device.run_beside, lambda: self._model.commit(counted=counted))
        self._rests, self._missed = self._rests_after(entry.list), self._missed_after(entry.list)
        self._failures.append(self._failed_in(entry.list))
        own = self._own.leaves if self._own is not None and counted else ()
        past = PastRound(self.standing, self.checkpoint.parts, entry, own)
        can_test = bool(own) and self.checkpoint.round == self.standing.round  # else that state is not on disk
        change = None
        if (made := self._attempts.get(entry.list.hash)) is not None:
            change = MergedChange(entry.list.hash, [made.merged[leaf] for leaf in range(self._model.leaves)])
        self._note_overhead(entry.list, standing.codec)
        await self._settle(standing, [*self.log, entry], found.states, found.parts, change)
        if can_test:
            self._nursery.start_soon(self._tester.run, past, standing.tests)

    async def _result_of(self, entry: RoundEntry) -> tuple[list[bytes], _Candidate]:
        """Return the merged leaves of a round and the state after it, from the first member whose leaves fit.

        Each member but the last has half of the time that is left.
        """
        failed: dict[str, str] = {}
        deadline = trio.current_time() + self._exchange_s()
        others = [peer for peer in entry.list.members if peer != self.peer]
        for peer in others:
            try:
                until = deadline if peer == others[-1] else (trio.current_time() + deadline) / 2
                leaves = await self._exchange.merged_of(entry.list, peer, until)
                states: list[bytes] = await self._device.run_beside(self._model.advance, leaves)
                root, parts = await self._in_thread(hashed, states)
                if root == entry.root:
                    return leaves, _Candidate(entry.list.hash, root, states, parts)
                failed[peer] = f"what it sent as the result of round {entry.round} is not that"
            except (P2PError, RecordError, EngineError, ExchangeFailed) as error:
                failed[peer] = str(error)
        raise ExchangeFailed(failed)

    async def _settle(
        self,
        standing: Standing,
        entries: list[RoundEntry],
        states: list[bytes],
        parts: list[StatePart],
        change: MergedChange | None = None,
    ) -> None:
        """Let the job stand where a new state is, and forget what belongs to the round before.

        `change` is the merged one, if that is what led here. The state is written while the next steps are made, and
        also if this island leaves or its device fails meanwhile.
        """
        began = trio.current_time()
        if len(self._arrived_at) > 1:  # a round alone says nothing of how late others are
            lags = [at - min(self._arrived_at.values()) for at in self._arrived_at.values()]
            self._lags_s = [*self._lags_s, *lags][-64:]
        self.figures.paces = self._paces()
        self.standing, self.log, self.recent = standing, entries, took_part(entries)
        self._model.begin_round(standing.round, standing.codec, standing.steps, standing.last_steps)
        self._heads = {GENESIS, *(entry.hash for entry in entries)}
        self._in_vain -= {*entries[-1].list.members} if entries else set()
        self._arrivals.clear()
        self._arrived_at.clear()
        self._results.clear()
        self._lists.clear()
        self._offered_at.clear()
        self._listed.clear()
        self._end_leads(entries)
        self._first_list_at.clear()
        self._tried.clear()
        self._failed_here.clear()
        self._stands_down_until, self._complete_at, self._lost_s = 0.0, None, 0.0
        self._tester.begin_round()
        self._tested = self._own if any(test.peer == self.peer for test in standing.tests) else None
        if self._tested is not None and self._tested.traces:  # nobody may see the others
            drawn = drawn_trace(standing.root, self.peer, len(self._tested.traces))
            self._tested.traced = self._tested.traced[drawn : drawn + 1]
        self._own = self._candidate = self._ahead = None

        async def save() -> None:
            if self._settled is not None:
                await self._settled(entries, states)

        try:
            if self._text.held and (loss := await self._steps.loss(self._text.held)) is not None:
                self.validated(loss)
        finally:
            await _to_the_end(self.checkpoint.finish)
            self.checkpoint.start(self._nursery, standing.round, states, parts, save, change)
        self.figures.settled_at = trio.current_time()
        self.figures.settle_s = self.figures.settled_at - began
        self._news.notify()

    async def _look_around(self) -> None:
        """Look at the histories of others beside the steps, and leave a better one to the main task.

        One at a time. Without a state another one begins every few seconds, one of each home, so that many who answer
        late do not hide the others; the first one once it is known who is there.
        """
        async with trio.open_nursery() as nursery:
            while self._is_lost and not self._knows_others:
                await self._pause(self.timing.hello_s)
            while True:
                peer, looks = self._next_to_show() if self._better is None else None, len(self._shown_by)
                if peer is None or looks >= (LOOKS if self._is_lost else 1):
                    await self._pause(self.timing.hello_s)
                else:
                    self._shown_by[peer] = self._homes.of(peer)
                    nursery.start_soon(self._look_at, peer, self.heard[peer].head)
                    await self._pause(NEXT_LOOK_S)
                await trio.lowlevel.checkpoint()

    def _next_to_show(self) -> str | None:
        """Return whose history to look at next, of those that name a round which is not known here.

        First come those that took part in one of the last rounds, then those that once named a round which is known
        here, and of these the one that was looked at in vain longest ago. A lot decides among equals.
        """
        known, now = self._heads if self._has_state else set(), trio.current_time()
        others_may = self._is_lost or self._strangers_until <= now
        found = [
            peer
            for peer in self.alive()
            if self.heard[peer].head not in known
            and peer not in self._shown_by
            and self._homes.of(peer) not in self._shown_by.values()
            and self._disregarded.get(peer, (0, 0.0))[1] <= now
            and (others_may or peer in self.recent)
        ]

        def rank(peer: str) -> tuple[bool, bool, float, int]:
            until = self._disregarded.get(peer, (0, 0.0))[1]
            return peer not in self.recent, not self.heard[peer].is_known, until, self._lot(peer)

        return min(found, key=rank, default=None)

    async def _look_at(self, peer: str, named: bytes) -> None:
        """Fetch and verify another island's log, and remember it if it is the better one."""
        began = trio.current_time()
        try:
            found = await self._newest(_History(peer, *await self._log_of(peer)))
            if await self._wanted(found.entries) is not None:
                self._better = self._better or found
                return
            if named in self._heads:  # this island has made that round meanwhile
                return
        except (RecordError, AppError, P2PError, OSError) as error:
            log.info("%s does not show what it has of %s: %s", peer, self.record.name, error)
        finally:
            del self._shown_by[peer]
            self._news.notify()
        self._disregard(peer, began)

    async def _newest(self, shown: _History) -> _History:
        """Return a history with the rounds that its island has made since it was shown; raises as `_log_of` does."""
        peer = shown.peer
        if peer in self.heard and self.heard[peer].head == shown.standing.prev:
            return shown
        return _History(peer, *await self._log_of(peer, shown))

    def _disregard(self, peer: str, began: float, *, is_brief: bool = False) -> None:
        """Do not look at the history of a peer for a while, longer each time, because a look since then was in vain.

        Nor at that of anybody else who took part in none of the last rounds: new names cost nothing. Briefly for one
        that made another round meanwhile; not as long while there is no state here.
        """
        times, now = self._disregarded.pop(peer, (0, 0.0))[0], trio.current_time()
        if is_brief:
            self._disregarded[peer] = times, now + _BRIEFLY_S
        elif self._is_lost:
            self._disregarded[peer] = times + 1, now + _BRIEFLY_S * 2 ** min(times, _LONGEST_STATELESS)
        else:
            self._disregarded[peer] = times + 1, now + self.timing.alive_s * 2 ** min(times, _LONGEST_DISREGARD)
            if peer not in self.recent:
                self._strangers_until = now + max(self.timing.hello_s, _LOOKS_APART * (now - began))
        while len(self._disregarded) > MAX_PEERS:
            del self._disregarded[next(iter(self._disregarded))]

    async def _wanted(self, entries: list[RoundEntry]) -> int | None:
        """Return how many rounds of another history to go on from, None for none of them."""
        founder, islands = self.record.founder, self._islands()
        if not self._has_state or (self._is_new and shared(self.log, entries) < len(entries)):
            log = list(self.log) if self._has_state else []
            return await self._in_thread(joined, log, entries, founder, islands)
        return await self._in_thread(taken_over, list(self.log), entries, founder, islands)  # reads entries from disk

    def _islands(self) -> Islands:
        """The islands of this job as they are known now."""
        alive = self.alive()
        heads = {peer: self.heard[peer].head for peer in alive}
        return Islands(self.peer, heads, self._knows_others, self._homes.machines(alive))

    @property
    def _is_new(self) -> bool:
        """True while this island has made no round, if it does not begin the job."""
        return self.peer not in self.recent and self.peer != self.record.founder

    @property
    def _is_lost(self) -> bool:
        """True while this island knows nothing of the job to go on from."""
        return not self._has_state or (self._is_new and not self.log)

    @property
    def _knows_others(self) -> bool:
        """True if it has listened for long enough to have heard all who are there, or all have answered."""
        listened_s = trio.current_time() - self._listens_since
        has_greeted = listened_s >= self.timing.hello_s  # before, few members may be known
        others = {*self._found()} - {self.peer}
        have_answered = has_greeted and self._greetings.have_all_answered(others, self.heard, trio.current_time())
        return have_answered or listened_s >= self.timing.alive_s

    async def _catch_up(self) -> None:
        """Take over the round that is over, or a better history; raises if there is no room for it here."""
        entry, better = self._ahead, self._better
        if entry is not None:
            self._ahead = None
            try:
                if entry.round == self.standing.round:
                    await self._adopt(entry)
            except (RecordError, ExchangeFailed, EngineError, P2PError) as error:
                log.info("round %s could not be taken over: %s", self.standing.round, error)
        elif better is not None:
            try:
                await self._take_over(better)
                if better.standing.prev in self._heads:
                    self._disregarded.pop(better.peer, None)
            except (RecordError, AppError, EngineError, P2PError, trio.TooSlowError) as error:
                if what_it_waits_for(error):
                    raise  # whoever gives the state, there is no room for it here
                log.info("what %s has of %s could not be taken over: %s", better.peer, self.record.name, error)
                self._disregard(better.peer, trio.current_time(), is_brief=isinstance(error, WentOn))
            finally:
                self._better = None
                self._news.notify()
        await trio.lowlevel.checkpoint()

    async def _take_over(self, better: _History) -> None:
        """Go on from another island's history, if it is still the better one, as far as its rounds count here."""
        peer, entries, standing = better
        wanted, same = await self._wanted(entries), len(self.log)
        if wanted is None:
            return
        goes_on = self._has_state and len(entries) > same and entries[same].prev == self.head
        if goes_on and await self._caught_up(entries[same:wanted]):
            return
        newest = await self._newest(better)
        if newest is not better:
            _, entries, standing = newest
            wanted = await self._wanted(entries)
        if wanted != len(entries):
            raise RecordError(f"{peer} goes on with rounds that were made past islands which are there")
        recent, others = took_part(entries), self._same_head(standing.prev)
        holders = list(dict.fromkeys([*(one for one in others if one in recent), peer, *others]))[:MOST_ASKED]
        parts = await self._parts(holders, standing)
        self._asked_in, gave, question = standing.round, Counter[str](), Question(holders)
        self._nursery.start_soon(self._moments.ask, question)
        try:
            states = await self._states.fetch(self.record.id[:16], parts, holders, gave, is_patient=True)
        except PartsAbsent as error:
            raise WentOn(f"{peer} has made other rounds meanwhile: {error}") from error
        await self._device.run_beside(self._model.load, states)
        if self._moments.are_lacking and not await self._moments.take(question, gave):
            log.info("%s goes on with fresh moments: nobody has given any", self.record.name)
        self.figures.fetched += 1
        if self._is_lost:
            self._disregarded.clear()  # they were counted while there was no state
        self._has_state, self._rounds_behind = True, math.inf
        await self._settle(standing, entries, states, parts)

    async def _parts(self, holders: Sequence[str], standing: Standing) -> list[StatePart]:
        """Return the parts of a state, from the first of these who names them; raises `WentOn` if none does.

        Each is asked a second after the one before.
        """
        found: list[list[StatePart]] = []

        async def ask(peer: str, scope: trio.CancelScope, answered: trio.Event) -> None:
            try:
                parts = parts_in(wire.fields_of(await self._ask(peer, wire.PARTS, {"round": standing.round}), "parts"))
                if root_over(parts) == standing.root and [part.size_bytes for part in parts] == self._sizes:
                    found.append(parts)
                    scope.cancel()
            except (P2PError, RecordError) as error:
                log.info("%s does not name the parts of round %s: %s", peer, standing.round, error)
            finally:
                answered.set()

        async with trio.open_nursery() as nursery:
            for peer in holders:
                answered = trio.Event()
                nursery.start_soon(ask, peer, nursery.cancel_scope, answered)
                with trio.move_on_after(1):
                    await answered.wait()
        if not found:
            raise WentOn(f"nobody names the parts of the state after round {standing.round - 1} any more")
        return found[0]

    async def _caught_up(self, entries: Sequence[RoundEntry]) -> bool:
        """Take over rounds one after the other by their merged changes; False if nobody has them all any more.

        Others hold several for whoever has just fetched a state. If they have made as many rounds meanwhile as were
        taken over the last time, a newer state is nearer. Raises as `_adopt` does if there is one round and nobody has
        its change.
        """
        before, self._rounds_behind = self._rounds_behind, len(entries)
        is_nearer = len(entries) == 1 or len(entries) < before
        if not is_nearer or len(entries) * self._change_bytes > HELD_CHANGES * sum(self._sizes):
            return False
        for entry in entries:
            try:
                await self._adopt(entry)
            except (RecordError, ExchangeFailed, EngineError, P2PError) as error:
                if len(entries) == 1:
                    raise
                log.info("round %s could not be taken over by its change: %s", entry.round, error)
                return False
        return True

    def _same_head(self, head: bytes) -> list[str]:
        """Islands that say they have the state after a round: first those that took part lately."""
        same = (peer for peer in self.alive() if self.heard[peer].head == head)
        return sorted(same, key=lambda peer: (peer not in self.recent, self._lot(peer)))

    async def _log_of(self, peer: str, known: _History | None = None) -> tuple[list[RoundEntry], Standing]:
        """Return another island's log and where the job stands after it; raises `RecordError` at the first wrong entry.

        It goes on with `known`, which that island has shown before, or with this island's own log if it has the same.
        Every entry is checked as it comes, so that nobody can send more of them than members of the job have signed. A
        peer that sends them far slower than its link can is given up.
        """
        entries, standing, may_differ = list(self.log), self.standing, bool(self.log)
        if known is not None:
            entries, standing, may_differ = list(known.entries), known.standing, False
        spare_s = self.timing.exchange_s
        while True:
            asked_at = trio.current_time()
            answer = await self._ask(peer, wire.LOG, {"round": len(entries), "count": wire.RUN_ENTRIES})
            spare_s -= trio.current_time() - asked_at
            spare_s += SLOWER * len(answer) / (self._exchange.speed_of(peer) or UNMEASURED_BYTES_PER_S)
            if spare_s < 0:
                raise RecordError(f"{peer} shows its log too slowly")
            raws = wire.unpack(answer, wire.RUN_ENTRIES)
            found = [await self._verified(peer, read_entry, raw) for raw in raws]
            if may_differ and (not found or found[0].prev != standing.prev):
                entries, standing, may_differ = [], beginning(self.record), False  # another history: all of it
                continue
            may_differ = False
            for entry in found:
                standing = follow(self.record, standing, entry)
                entries.append(entry)
                await trio.lowlevel.checkpoint()  # a millisecond each with many members
            if len(found) < wire.RUN_ENTRIES:
                return entries, standing

    # --- others -------------------------------------------------------------------------------------------------------

    async def _greet(self) -> None:
        """Tell others how far this island is, and learn how far they are."""
        while True:
            others = self.standing.banned.keys() | {self.peer}
            expected, swarm = {*self.standing.members} - others, {*self._found()} - others
            peers = JobPeers(expected, self.recent - others, self.alive(), self.heard, swarm)
            async with trio.open_nursery() as nursery:
                for peer in self._greetings.due(trio.current_time(), peers):
                    nursery.start_soon(self._hello, peer)
            await trio.sleep(self.timing.hello_s)

    async def _hello(self, peer: str) -> None:
        is_unknown = False
        try:
            answer = await self._ask(peer, wire.HELLO, self._own_hello(peer), timeout_s=self.timing.hello_s)
            self._note_hello(peer, wire.fields_of(answer, "hello"))
            return
        except RemoteError as error:
            is_unknown = error.code == wire.UNKNOWN
        except (P2PError, RecordError):
            pass
        self._greetings.failed(peer, trio.current_time(), is_unknown=is_unknown)

    def _own_hello(self, peer: str) -> dict[str, Any]:
        """What this island says of itself to a peer."""
        others = self._greetings.named(self.alive() & self.recent - {peer})
        data = {} if self.own_data is None else {"data": texts_of([self.own_data.raw])}
        return {"round": self.standing.round, "head": self.head.hex(), "others": others, **data}

    def _note_hello(self, peer: str, fields: Fields) -> None:
        """Remember how far another island is, and what it trains on; raises `RecordError`."""
        now, others = trio.current_time(), fields.texts("others", MOST_NAMED, PEER_ID_CHARS, [])
        number, head = fields.integer("round", 0, MAX_ROUNDS), fields.hex_bytes("head", HASH_BYTES)
        is_known = (head in self._heads and head != GENESIS) or (peer in self.heard and self.heard[peer].is_known)
        seen = Heard(now, number, head, others, is_known)
        self._homes.of(peer)  # to be known later as well, when its link may have ended
        self._note_data(peer, fields)
        self._greetings.answered(peer)
        if peer not in self.heard and len(self.heard) >= MAX_PEERS:
            displaced = self._displaced_by(peer)
            if displaced is None:
                return
            del self.heard[displaced]
            self.data_of.pop(displaced, None)
        news = peer not in self.heard or (self.heard[peer].round, self.heard[peer].head) != (seen.round, seen.head)
        self.heard[peer] = seen
        if news:
            self._news.notify()

    def _displaced_by(self, peer: str) -> str | None:
        """Who gives its place among those heard to another peer; None if that one is not remembered.

        Of many that train nothing here, those stay whom a lot names that is drawn anew in each round: however many say
        hello, and how often, any other one has the same chance. The secret keeps them from choosing names for the lot.
        """
        kept = self.recent.union(self.standing.members)
        strangers = self.heard.keys() - kept
        oldest = min(strangers or self.heard, key=lambda other: self.heard[other].at)
        if peer in kept or trio.current_time() - self.heard[oldest].at >= self.timing.alive_s:
            return oldest
        last = max({peer, *strangers}, key=self._lot)
        return None if last == peer else last

    def _lot(self, peer: str) -> int:
        """A peer's lot in this round, which nobody else can know."""
        return hash((self._secret, self.head, peer))

    def _note_data(self, peer: str, fields: Fields) -> None:
        """Remember what another island says of its own text; raises `RecordError` if that is wrong."""
        if not self.record.own_data or "data" not in fields.values:
            return
        raws = raws_in(fields, "data", 1)
        if not raws or (peer in self.data_of and self.data_of[peer].raw == raws[0]):
            return
        data = read_data(raws[0])
        if (data.job, data.peer) != (self.record.id, peer):
            raise RecordError("what is said of a text is of another job or another peer")
        if self.record.licence and not data.licence.strip():
            raise RecordError("the text of an island has no licence, which this job asks for")
        if peer in self.heard or len(self.data_of) < MAX_PEERS:
            self.data_of[peer] = data

    async def _say(self, peer: str, raw: bytes) -> None:
        """Tell a peer a signed statement; what it answers may be the entry of a round that is over."""
        # A fifth: whoever leads waits for `lead_s`, in which two lost answers must not cost a member its place. An
        # entry of many members goes to all of them over one link, which takes longer; nobody waits for the answer.
        timeout_s = self.timing.lead_s / (5 if len(raw) <= MAX_PAYLOAD_BYTES else 1)
        for attempt in range(_SAID_TRIES):
            try:
                answer = await self._network.call(peer, wire.SAY, self.record.id + raw, timeout_s=timeout_s)
                if answer:
                    await self._note_answer(peer, answer)
                return
            except (P2PError, RecordError) as error:
                log.debug("%s was not told of round %s: %s", peer, self.standing.round, error)
            await trio.sleep(0.2 * 2**attempt)

    async def _verified(self, peer: str, read: Callable[[bytes], T], raw: bytes) -> T:
        """Read a peer's statement with all its signatures, dozens in an entry: beside the loop, one at a time.

        Peers take turns, so that nobody waits for all that another one has sent.
        """
        turn = self._turns.setdefault(peer, trio.Lock())
        try:
            async with turn, self._verifying:
                found: T = await self._in_thread(read, raw)
                return found
        finally:
            if not turn.locked():  # nobody else waits for it
                self._turns.pop(peer, None)

    async def _note_answer(self, peer: str, raw: bytes) -> None:
        """Take what a statement was answered with: the entry of its round, or an arrival that a list leaves out."""
        if _domain(raw) != ARRIVAL:
            self._note_entry(await self._verified(peer, read_entry, raw))
            return
        arrival = read_arrival(raw)
        if arrival.peer != self.peer:
            self._note_arrival(arrival)

    async def _ask(self, peer: str, method: str, values: dict[str, Any], timeout_s: float | None = None) -> bytes:
        return await self._network.call(
            peer, method, wire.request(self.record.id, values), timeout_s=timeout_s or self.timing.lead_s
        )

    def _note_arrival(self, arrival: Arrival) -> None:
        """Remember who has arrived in this round; raises `RecordError` for whom it has not to do with."""
        standing = self.standing
        if (arrival.job, arrival.round, arrival.prev) != (self.record.id, standing.round, standing.prev):
            return
        check_arrivals(self.record, standing, [arrival])
        if arrival.peer not in self._arrivals:
            self._arrivals[arrival.peer] = arrival
            self._arrived_at[arrival.peer] = trio.current_time()
            self._in_vain.discard(arrival.peer)
            self._news.notify()

    def _note_entry(self, entry: RoundEntry) -> None:
        """Remember the entry of the current round if it follows; raises `RecordError`.

        A round that was made without a quorum counts only if none of the others is there either.
        """
        if entry.round == self.standing.round and self._ahead is None:
            follow(self.record, self.standing, entry)
            if self._counts(entry):
                self._ahead = entry
                self._news.notify()

    def _counts(self, entry: RoundEntry) -> bool:
        """True for the current round's entry if it is one to go on from."""
        islands = self._islands()
        made_it = self.peer in entry.list.members
        if self._is_new and not made_it and not of_half_of_homes(self._heads | {entry.hash}, islands):
            return False
        gone_on = {peer for peer, head in islands.heads.items() if head == entry.hash}
        before = Before({*self.standing.members}, {*self.recent}, {*self.standing.banned})
        return counts(entry, before, self._met(self.standing), gone_on, islands)

    def _is_late(self) -> bool:
        """True if most others have arrived, and the grace for the rest is over."""
        others = self._met(self.standing) - {self.peer}
        arrived = sorted(at for peer, at in self._arrived_at.items() if peer in others)
        if not others or 2 * len(arrived) < len(others):
            return False
        since = arrived[max(0, -(-len(others) // 2) - 1)]
        grace = grace_s(self._lags_s, least_s=self.timing.grace_least_s, most_s=self.timing.grace_most_s)
        return trio.current_time() - since > grace / 2

    def _measure(self, before: Standing, began: float, trained: float) -> None:
        """Note the figures of a round, if it is the one that followed; not of several that were taken over since."""
        steps, gained = self.standing.step - before.step, self.standing.tokens - before.tokens
        if self.log[-1].round != before.round or steps <= 0:
            return
        figures, seconds = self.figures, trio.current_time() - began
        figures.measured_round = before.round
        figures.round_tokens_per_s = gained / seconds if seconds > 0 else 0.0
        figures.utilisation = (trained - began) / seconds if seconds > 0 else None
        figures.paces_s = [*figures.paces_s, seconds / steps][-_PACES:]
        figures.left_s = max(0, self.record.steps - self.standing.step) * median(figures.paces_s)

    def _paces(self) -> dict[str, Pace]:
        """How fast each island was in the round that ends now, which began when the last one was settled."""
        began, first = self.figures.settled_at, min(self._arrived_at.values(), default=0.0)
        return {
            peer: Pace(at - first, self._arrivals[peer].tokens / (at - began))
            for peer, at in self._arrived_at.items()
            if at > began
        }

    # --- answers ------------------------------------------------------------------------------------------------------

    async def answer(self, method: str, peer: str, rest: bytes) -> Payload:
        """Answer a request of another island; raises `RecordError` for what is not understood."""
        if self._leaves:
            raise RemoteError("this island leaves the job", wire.UNKNOWN)
        if peer in self.standing.banned:
            raise RemoteError("this island was left out of the job", wire.WRONG)
        if method == wire.SAY:
            return await self._on_statement(peer, rest)
        fields = wire.fields_of(rest, method)
        if method == wire.HELLO:
            self._note_hello(peer, fields)
            return canonical(self._own_hello(peer))
        if method == wire.LOG:
            first = fields.integer("round", 0, MAX_ROUNDS)
            count = fields.integer("count", 1, wire.MOST_RUN_ENTRIES)
            some = self.log[first : first + count]
            return wire.pack(await self._in_thread(lambda: [entry.raw for entry in some]))  # older ones are on disk
        if method == wire.PARTS:
            wanted, kept = fields.integer("round", 0, MAX_ROUNDS), self.checkpoint
            if self._has_state:
                with trio.move_on_after(wire.WAIT_S):  # it may be just being written
                    await kept.changed.wait_for(lambda: wanted != self.standing.round or wanted == kept.round)
            if not self._has_state or wanted != kept.round:
                raise RemoteError(f"the state here is that of round {kept.round}", wire.NOT_YET)
            return canonical({"parts": [[part.root.hex(), part.size_bytes] for part in kept.parts]})
        if method == wire.MOMENTS:
            return await self._moments.answer(self.standing.round)
        return await self._on_exchange(method, peer, fields)

    async def _on_statement(self, peer: str, raw: bytes) -> bytes:
        domain = _domain(raw)
        if domain == ENTRY:
            # with 64 members it has 130 signatures: nobody else has these verified
            if _signer_of_entry(raw) in self.standing.members:
                self._note_entry(await self._verified(peer, read_entry, raw))
            return b""
        if domain == LIST and peer not in self.recent.union(self.standing.members):
            return b""  # nor a list, which has up to 65; who took part lately may learn that its round is over
        reader: Any = {ARRIVAL: read_arrival, LIST: read_list, RESULT: read_result}.get(domain)
        if reader is None:
            raise RecordError(f"the statement {domain!r} is not understood; update Shoal")
        said: Arrival | MemberList | Result = await self._verified(peer, reader, raw)
        signer = said.leader if isinstance(said, MemberList) else said.peer
        if said.job != self.record.id or signer != peer:
            raise RecordError("a statement of another job or another peer")
        if said.round < len(self.log):
            past = self.log[said.round]
            told: bytes = await self._in_thread(lambda: past.raw)
            return told
        if said.round != self.standing.round:
            return b""
        if isinstance(said, Result):
            check_counts(self.record, len(self.standing.members), said)
            if said.list in self._results and peer in self.standing.members:
                self._results[said.list][peer] = said
                self._news.notify()
        elif said.prev == self.standing.prev and isinstance(said, Arrival):
            self._note_arrival(said)
        elif isinstance(said, MemberList) and said.prev == self.standing.prev:
            return self._note_list(said)
        return b""

    def _note_list(self, members: MemberList) -> bytes:
        """Remember a list; return the arrival of somebody whom it leaves out without cause, if there is one.

        A leader has one list for each attempt, and later ones replace those before; any other is void.

        Raises `RecordError` for one with a copy, for which both the copier and the copied would be doubted.
        """
        check_arrivals(self.record, self.standing, members.arrivals)
        if len({one.change for one in members.arrivals}) < len(members.arrivals):
            raise RecordError("a member list names two who committed to the same change")
        if self._own is None or all(one.raw != self._own.arrival.raw for one in members.arrivals):
            return b""
        if members.attempt <= self._listed.get(members.leader, -1):
            return b""
        same = [one for one in self._attempts.values() if one.members.round == members.round]
        for attempt in same:
            if attempt.members.leader == members.leader and attempt.members.attempt < members.attempt:
                attempt.is_superseded = True
        if missing := self._left_out_of(members):
            return self._arrivals[missing].raw
        for attempt in same:
            if self._comes_before(members, attempt.members):
                attempt.is_superseded = True  # others attend the same one of two lists, else both would wait in vain
        self._lists[members.leader], self._listed[members.leader] = members, members.attempt
        self._offered_at[members.leader] = trio.current_time()
        self._news.notify()
        return b""

    def _comes_before(self, members: MemberList, other: MemberList) -> bool:
        """True if a list is to be followed rather than one of another leader that is under way."""
        is_trusted = members.leader not in self._failed_here and members.leader != other.leader
        is_first = self._leaders((members.leader, other.leader))[0] == members.leader
        return is_trusted and is_first and self._may_be_followed(members)

    def _give_way(self, members: MemberList) -> bool:
        """Return True if a known list is to be followed rather than this one.

        Its leader has not led in vain then if both lists came at once: neither could know of the other one.
        """
        if not any(self._comes_before(one, members) for one in self._lists.values()):
            return False
        lead = self._leads[members.leader]
        if trio.current_time() - lead.since < self.timing.grace_least_s:
            self._leads[members.leader] = _Lead(lead.times)
        return True

    def _left_out_of(self, members: MemberList) -> str | None:
        """Somebody who arrived in time for a list and is not in it, though no exchange with it has failed here."""
        in_time = self._first_list_at.setdefault(members.leader, trio.current_time()) - self.timing.grace_least_s / 2
        known = (peer for peer, at in self._arrived_at.items() if at <= in_time)
        with_cause = {*members.members, *self._tried, *self._failed_here}
        changes = {one.change for one in members.arrivals}
        left = (peer for peer in known if peer not in with_cause and self._arrivals[peer].change not in changes)
        return next(left, None)

    async def _on_exchange(self, method: str, peer: str, fields: Fields) -> Payload:
        key, until = fields.hex_bytes("list", HASH_BYTES), trio.current_time() + wire.WAIT_S
        if method == wire.MERGED and key not in self._attempts:
            first, count = fields.integer("first", 0, wire.MAX_LEAVES), fields.integer("count", 1, wire.RUN_LEAVES)
            if (kept := await self.checkpoint.leaves_of(key, first, count)) is not None:
                return kept
            if any(entry.list.hash == key for entry in self.log[-KNOWN_ROUNDS:]):
                raise RemoteError("the changes of this round are not kept any more", wire.WRONG)
        with trio.move_on_at(until):
            await self._news.wait_for(lambda: key in self._attempts)
        attempt = self._attempts.get(key)
        if attempt is None:
            raise RemoteError("this list is not known here", wire.NOT_YET)
        members, grid = attempt.members.members, attempt.grid
        if method == wire.SIGNED:
            if self.peer in members:
                await self._merged(attempt, attempt.merged, grid.shares(self._model.leaves)[self.peer][:1], until)
            of = fields.optional_text("of", 2 * PEER_ID_CHARS)
            return wire.pack(share.raw for peer, share in attempt.shares.items() if of in (None, peer))
        is_whole = method in (wire.HASHES, wire.TRACES)
        first = 0 if is_whole else fields.integer("first", 0, wire.MAX_LEAVES)
        count = 0 if is_whole else fields.integer("count", 1, wire.RUN_LEAVES)
        if method == wire.MERGED:
            return wire.pack(await self._merged(attempt, attempt.merged, range(first, first + count), until))
        if method == wire.ROW:
            if not _is_within(grid.shares(self._model.leaves).get(peer), first, count):
                raise RemoteError("only those see this who merge it", wire.WRONG)
            return wire.pack(await self._merged(attempt, attempt.of_row, range(first, first + count), until))
        own, testers = self._own, set[str]()
        if self._tested is not None and self._tested.arrival.round == attempt.members.round:
            own = self._tested
            testers = {peer for test in self.standing.tests if test.peer == self.peer for peer in test.testers}
        if own is None or peer not in members or own.arrival.round != attempt.members.round:
            raise RemoteError("the change of this round is not here any more", wire.WRONG)
        if method == wire.HASHES:
            return b"".join(own.hashes)
        share = grid.row_shares(len(own.leaves))[peer] if peer in grid.row_of(self.peer) else None
        if peer not in testers and not (method == wire.SHARE and _is_within(share, first, count)):
            if own is self._own:  # a tester that has ended the round before this island did
                raise RemoteError("who tests this change is not known here yet", wire.NOT_YET)
            raise RemoteError("only those see this who merge it, or were drawn to test it", wire.WRONG)
        if method == wire.TRACES:
            return wire.pack(own.traces)
        if method == wire.TRACE:
            return wire.pack(leaf for weights in own.traced for leaf in weights[first : first + count])
        return wire.pack(own.leaves[first : first + count])

    async def _merged(
        self, attempt: ExchangeAttempt, kept: Mapping[int, bytes], leaves: range, until: float
    ) -> list[bytes]:
        with trio.move_on_at(until):
            await attempt.changed.wait_for(lambda: attempt.has_failed or all(leaf in kept for leaf in leaves))
        if all(leaf in kept for leaf in leaves):
            return [kept[leaf] for leaf in leaves]
        if attempt.has_failed:
            raise RemoteError("the share could not be merged here", wire.FAILED)
        raise RemoteError("the share is not merged yet", wire.NOT_YET)


class RoundServer:
    """Answers the requests of other islands, for all jobs that this node takes part in."""

    def __init__(self, network: Network, is_member: Callable[[str], bool]) -> None:
        self._network, self._is_member = network, is_member
        self.islands: dict[bytes, Island] = {}
        self.records: dict[bytes, bytes] = {}  # signed records by job
        self.rejected = 0  # requests that were not understood

    def serve(self) -> None:
        """Answer from now on."""
        for method in wire.OF_ISLANDS:
            self._network.serve(method, self._handler(method))
        self._network.serve(wire.JOBS, self._on_jobs)

    def _handler(self, method: str) -> Callable[[str, bytes], Any]:
        async def handle(peer: str, body: bytes) -> Payload:
            try:
                job, rest = wire.read_request(body)
                is_member = self._is_member(peer)
                if method == wire.HELLO and not is_member:  # which it may be already, as others know
                    raise RemoteError("this node knows no such member of the swarm", wire.NOT_YET)
                island = self.islands.get(job) if is_member else None
                if island is None:
                    raise RemoteError("this node takes no part in that job", wire.UNKNOWN)
                return await island.answer(method, peer, rest)
            except RecordError as error:
                self.rejected += 1
                raise RemoteError(str(error)[:200], wire.WRONG) from error

        return handle

    async def _on_jobs(self, peer: str, body: bytes) -> Payload:
        return wire.pack(list(self.records.values())[: wire.MAX_JOBS]) if self._is_member(peer) else b""


async def _to_the_end(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Do something short on this machine in which leaving must not interrupt an island."""
    with trio.CancelScope(shield=True):
        return await function(*args)


def committed_traces(traces: StepTraces) -> tuple[list[bytes], bytes]:
    """Return the packed traces of a round and the root over them; a while for many of them: call it in a thread."""
    pairs = zip(traces.weights, traces.sketches, strict=True)
    packed = [pack_trace(Trace(hashes_of(weights)[1], sketch)) for weights, sketch in pairs]
    return packed, hashes_of(packed)[1]


def _is_within(share: range | None, first: int, count: int) -> bool:
    return share is not None and share.start <= first < first + count <= share.stop


def _domain(raw: bytes) -> str:
    try:
        return domain_of(raw)
    except EnvelopeError as error:
        raise RecordError(str(error)) from error


def _signer_of_entry(raw: bytes) -> str:
    """The peer that an entry names as its signer; its signature is not verified."""
    try:
        return parse(raw, MAX_ENTRY_BYTES).peer
    except EnvelopeError as error:
        raise RecordError(str(error)) from error


def hashed(states: Sequence[bytes]) -> tuple[bytes, list[StatePart]]:
    """Return the root of a state and its parts."""
    parts = [part_of(data)[0] for data in states]
    return root_over(parts), parts


def root_over(parts: Iterable[StatePart]) -> bytes:
    """Return the root of a state: a hash over the roots of all its parts."""
    return hashlib.sha256(b"".join(part.root for part in parts)).digest()
