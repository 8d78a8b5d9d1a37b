"""The log of a job: one signed entry a round, chained by hashes, which anybody can replay and check.

An entry is canonical JSON in an envelope of the domain `shoal/round/entry`:

    job, round, prev   as in `app.rounds.statements`
    list, results      the signed list of the attempt that counted, and every member's result (envelopes in base64)
    root               of the state after the round: SHA-256 over the roots of all parts, which all results name
    doubted            peer -> why its change is unlike the others', a copy, or a replay of the last merged one, or why
                       that of the round before did harm, or a step of it is not what its text gives, as those say who
                       were drawn to test it
    left_out           peer -> why it takes no more part in the job
    next               who takes part in the next round, in the order in which they take turns in reading
    every, codec       steps of the next round, and the number format of its changes, within the record's bounds
    step               steps of an island in all rounds so far
    start              position at which the next round begins to read
    tokens             counted in all rounds so far

An entry of a job whose record names `islands` has up to `MAX_ENTRY_BYTES`; that of an older job must fit into 64 KiB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_high, median_low
from typing import NamedTuple

from app.core.canonical_json import Fields, canonical
from app.core.errors import RecordError
from app.manifest.merkle import HASH_BYTES
from app.rounds.decisions import (
    DOUBTED_ROUNDS,
    MOST_GROWTH,
    copied,
    few_steps,
    leading_order,
    left_out_after,
    measured,
    odd_directions,
    odd_norms,
    past_likeness,
    quorum,
    replayed,
)
from app.rounds.grid import grid_of
from app.rounds.reading import next_start
from app.rounds.record import MAX_EVERY, MAX_STEPS, TrainingRecord
from app.rounds.statements import (
    FIELDS_BYTES,
    GENESIS,
    LIST,
    MAX_COUNTED_BYTES,
    MAX_MEMBERS,
    MAX_ROUNDS,
    MAX_TOKENS,
    MAX_WHY_CHARS,
    RESULT,
    TEXT_BYTES,
    Arrival,
    MemberList,
    Result,
    base64_bytes,
    list_bytes,
    opened,
    raws_in,
    read_list,
    read_result,
    reasons_in,
    signed,
    texts_of,
    verified_once,
)
from app.rounds.testers import HARM_ROUNDS, DrawnTest, drawn_tests, harmful, miscomputed, trained
from p2p.envelope import MAX_PAYLOAD_BYTES, envelope_bytes
from p2p.errors import IdentityError
from p2p.identity import PEER_ID_CHARS, Identity, public_key_of

ENTRY = "shoal/round/entry"
MEASURED_ROUNDS = 8  # the last ones, whose steps were timed
RECENT_ROUNDS = 16  # the last ones, who took part in which comes before newcomers; those are in memory
MAX_LEFT_OUT = 16  # that an entry of an older job can name, see `most_left_out`


def entry_bytes(members: int, left_out: int, result_bytes: int) -> int:
    """Return how long the payload of an entry is at most, with results of so many bytes and all that can be doubted."""
    list_raw = envelope_bytes(len(LIST), list_bytes(members))
    named = PEER_ID_CHARS + TEXT_BYTES
    reasons = (members + left_out) * (named + MAX_WHY_CHARS + TEXT_BYTES)  # the reasons of this module are ASCII
    return FIELDS_BYTES + base64_bytes(list_raw) + members * (base64_bytes(result_bytes) + named) + reasons


MAX_ENTRY_BYTES = entry_bytes(MAX_MEMBERS, MAX_MEMBERS, envelope_bytes(len(RESULT), MAX_COUNTED_BYTES))


@dataclass(frozen=True)
class RoundEntry:
    """One finished round."""

    job: bytes
    round: int
    prev: bytes
    list: MemberList
    results: tuple[Result, ...]
    root: bytes
    doubted: Mapping[str, str]
    left_out: Mapping[str, str]
    next: tuple[str, ...]
    every: int
    codec: str  # empty in old logs: that of the first round
    step: int
    start: int
    tokens: int
    raw: bytes = b""

    @cached_property
    def hash(self) -> bytes:
        """The hash by which the next round refers to this one."""
        return hashlib.sha256(self.raw).digest()


@dataclass(frozen=True)
class Standing:
    """Where a job stands between two rounds: what the next round begins with."""

    round: int  # number of the next round
    prev: bytes
    members: tuple[str, ...]  # who is expected in it
    every: int
    codec: str
    step: int
    start: int
    tokens: int
    root: bytes
    doubts: tuple[frozenset[str], ...] = ()  # whose changes of the last rounds are doubted
    left_out: Mapping[str, str] | None = None
    tests: tuple[DrawnTest, ...] = ()  # of changes of the last round, which the next round's results tell of
    last_every: int = 0  # steps of the last round; 0: there was none
    unlike: frozenset[str] = frozenset()  # doubted in the last round for nothing but the direction of their change
    harms: tuple[frozenset[str], ...] = ()  # whose changes did harm, as tests of earlier rounds found; the newest last

    @property
    def steps(self) -> range:
        """The steps of the next round."""
        return range(self.step, self.step + self.every)

    @property
    def last_steps(self) -> range:
        """The steps of the last round."""
        return range(self.step - self.last_every, self.step)

    @property
    def banned(self) -> Mapping[str, str]:
        """Those who take no more part, and why."""
        return self.left_out or {}


def beginning(record: TrainingRecord) -> Standing:
    """Return where a job stands before its first round, which its founder makes alone."""
    every = min(record.every, record.steps)
    return Standing(0, GENESIS, (record.founder,), every, record.codecs[0], 0, 0, 0, bytes.fromhex(record.start))


def most_left_out(record: TrainingRecord) -> int:
    """Return how many an entry of a job can name that take no more part."""
    return record.most_members if record.islands else MAX_LEFT_OUT


def most_entry_bytes(record: TrainingRecord) -> int:
    """Return how long the payload of an entry of a job may be."""
    return MAX_ENTRY_BYTES if record.islands else MAX_PAYLOAD_BYTES


def check_counts(record: TrainingRecord, members: int, result: Result) -> None:
    """Raise `RecordError` for a result with which the entry of a round of so many members may become too long."""
    if result.root and entry_bytes(members, most_left_out(record), len(result.raw)) > most_entry_bytes(record):
        raise RecordError(f"a result of {len(result.raw)} bytes is too long for a round of {members} members")


def make_entry(
    identity: Identity,
    record: TrainingRecord,
    standing: Standing,
    members: MemberList,
    results: Iterable[Result],
    *,
    every: int,
    codec: str,
    present: Iterable[str],
    now_ms: int,
) -> RoundEntry:
    """Sign the entry of a round in which all members ended with the same root.

    Those that took part do so in the next one as well. `present` are others that may, in the order in which they get
    the places that are left.
    """
    places = {peer: place for place, peer in enumerate(members.members)}
    ordered = sorted(results, key=lambda result: places[result.peer])
    doubts = _doubts(record, standing, members, ordered)
    left_out = _left_out(record, standing, doubts, len(members.members))
    step = standing.step + standing.every
    peers = dict.fromkeys((*members.members, *present))
    chosen = [peer for peer in peers if peer not in left_out][: record.most_members]
    following = leading_order(record.id, standing.round + 1, chosen)
    values = {
        "job": record.id.hex(), "round": standing.round, "prev": standing.prev.hex(),
        "list": texts_of([members.raw]), "results": texts_of([result.raw for result in ordered]),
        "root": ordered[0].root.hex(), "doubted": doubts.why, "left_out": left_out, "next": following,
        "every": max(1, min(every, record.steps - step)), "codec": codec, "step": step,
        "start": next_start(standing.start, len(standing.members), standing.every, record.batch),
        "tokens": standing.tokens + sum(arrival.tokens for arrival in members.arrivals),
    }  # fmt: skip
    return read_entry(signed(identity, ENTRY, values, now_ms, most_entry_bytes(record)))


@verified_once(4)
def read_entry(raw: bytes) -> RoundEntry:
    """Verify the signatures of an entry and read it; raises `RecordError`. `follow` checks what it says."""
    envelope, fields = opened(raw, ENTRY, MAX_ENTRY_BYTES)
    lists = raws_in(fields, "list", 1)
    if not lists:
        raise RecordError("a round's entry has no member list")
    members = read_list(lists[0])
    entry = RoundEntry(
        job=fields.hex_bytes("job", HASH_BYTES),
        round=fields.integer("round", 0, MAX_ROUNDS),
        prev=fields.hex_bytes("prev", HASH_BYTES),
        list=members,
        results=tuple(read_result(one) for one in raws_in(fields, "results", MAX_MEMBERS)),
        root=fields.hex_bytes("root", HASH_BYTES),
        doubted=reasons_in(fields, "doubted"),
        left_out=reasons_in(fields, "left_out"),
        next=_peers_in(fields, "next"),
        every=fields.integer("every", 1, MAX_EVERY),
        codec=fields.optional_text("codec", 8) or "",
        step=fields.integer("step", 1, MAX_STEPS + MAX_EVERY),
        start=fields.integer("start", 0, 2**62),
        tokens=fields.integer("tokens", 0, MAX_TOKENS),
        raw=raw,
    )
    if envelope.peer != members.leader:
        raise RecordError("a round's entry is not signed by the one who led it")
    return entry


def _peers_in(fields: Fields, name: str) -> tuple[str, ...]:
    peers = fields.texts(name, MAX_MEMBERS, PEER_ID_CHARS)
    try:
        for peer in peers:
            public_key_of(peer)
    except IdentityError:
        fields.refuse(name, "peer ids")
    return peers


def follow(record: TrainingRecord, standing: Standing, entry: RoundEntry) -> Standing:
    """Return where the job stands after an entry; raises `RecordError` if it does not follow from the one before."""
    where = f"round {entry.round}"
    if (entry.job, entry.round, entry.prev) != (record.id, standing.round, standing.prev):
        raise RecordError(f"{where} does not follow round {standing.round - 1} of this job")
    if len(entry.raw) > envelope_bytes(len(ENTRY), min(most_entry_bytes(record), _own_bytes(entry))):
        raise RecordError(f"{where} has an entry of {len(entry.raw)} bytes, too long for this job or for what it says")
    if (entry.list.job, entry.list.round, entry.list.prev) != (entry.job, entry.round, entry.prev):
        raise RecordError(f"{where} has the list of another round")
    if standing.step >= record.steps:
        raise RecordError(f"{where} comes after the last step of the job")
    check_arrivals(record, standing, entry.list.arrivals)
    if [result.peer for result in entry.results] != entry.list.members:
        raise RecordError(f"{where} lacks the result of a member")
    if any((one.list, one.root) != (entry.list.hash, entry.root) for one in entry.results):
        raise RecordError(f"{where}: its members did not end with the same state")
    doubts = _doubts(record, standing, entry.list, entry.results)
    left_out = _left_out(record, standing, doubts, len(entry.list.members))
    if (dict(entry.doubted), dict(entry.left_out)) != (doubts.why, left_out):
        raise RecordError(f"{where} doubts or leaves out others than its reports say")
    step = standing.step + standing.every
    start = next_start(standing.start, len(standing.members), standing.every, record.batch)
    tokens = standing.tokens + sum(arrival.tokens for arrival in entry.list.arrivals)
    if (entry.step, entry.start, entry.tokens) != (step, start, tokens):
        raise RecordError(f"{where} counts steps, positions or tokens wrongly")
    most = max(1, min(record.most_every, record.steps - step))
    if not min(record.least_every, most) <= entry.every <= most:
        raise RecordError(f"{where} wants {entry.every} steps of the next round, outside the job's bounds")
    if entry.every > max(record.least_every, round(standing.every * MOST_GROWTH)):
        raise RecordError(f"{where} wants {entry.every} steps of the next round, too many after {standing.every}")
    codec = entry.codec or record.codecs[0]
    if codec not in record.codecs:
        raise RecordError(f"{where} wants changes in {entry.codec}, which the job does not allow")
    expected = set(entry.list.members) - left_out.keys()
    if not expected <= set(entry.next) or set(entry.next) & left_out.keys():
        raise RecordError(f"{where} drops a member that took part, or keeps one that is left out")
    if len(entry.next) > record.most_members:
        raise RecordError(f"{where} names {len(entry.next)} members for the next one, more than a round has")
    if list(entry.next) != leading_order(record.id, entry.round + 1, entry.next):
        raise RecordError(f"{where} names the next members in another order")
    return Standing(
        entry.round + 1, entry.hash, entry.next, entry.every, codec, step, start, tokens, entry.root,
        doubts.by_round[-DOUBTED_ROUNDS - 1 :], left_out,
        drawn_tests(entry.root, entry.list.members, doubts.why.keys() - left_out.keys()), standing.every, doubts.unlike,
        (*standing.harms, doubts.harm)[1 - HARM_ROUNDS :],
    )  # fmt: skip


def _own_bytes(entry: RoundEntry) -> int:
    """Return how long the payload of an entry is at most that says what this one does, and nothing more."""
    most_list = envelope_bytes(len(LIST), list_bytes(len(entry.list.arrivals)))
    statements = base64_bytes(min(len(entry.list.raw), most_list)) + sum(
        base64_bytes(len(one.raw)) for one in entry.results
    )
    reasons = len(canonical({**entry.doubted})) + len(canonical({**entry.left_out}))
    return FIELDS_BYTES + statements + reasons + len(entry.next) * (PEER_ID_CHARS + TEXT_BYTES)


def check_arrivals(record: TrainingRecord, standing: Standing, arrivals: Iterable[Arrival]) -> None:
    """Raise `RecordError` unless all who arrived take part in this round, and claim no more than they were to read."""
    where = f"round {standing.round}"
    for arrival in arrivals:
        if arrival.peer in standing.banned:
            raise RecordError(f"{where} counts {arrival.peer}, who was left out")
        if arrival.peer not in standing.members:
            raise RecordError(f"{where} counts {arrival.peer}, who was not to take part in it")
        if arrival.steps > standing.every or arrival.tokens > arrival.steps * record.batch * record.length:
            raise RecordError(f"{where}: {arrival.peer} claims more tokens than it was to read")


def replay(record: TrainingRecord, entries: Iterable[RoundEntry]) -> Standing:
    """Check a whole log and return where the job stands; raises `RecordError` at the first entry that is wrong."""
    standing = beginning(record)
    for entry in entries:
        standing = follow(record, standing, entry)
    return standing


def steps_s(record: TrainingRecord, entries: Sequence[RoundEntry], every: int) -> float:
    """Return how long so many steps take, by the times of the last rounds' statements; 0 before the first round.

    All who have the log come to the same. Of three members or more, one with a wrong clock changes little; of two, it
    can make the time shorter only.
    """
    found = []
    for number in range(max(0, len(entries) - MEASURED_ROUNDS), len(entries)):
        began_ms, steps = record.created_ms, record.every
        if number:
            began_ms = median_high(result.at_ms for result in entries[number - 1].results)
            steps = entries[number - 1].every
        arrived_ms = median_low(arrival.at_ms for arrival in entries[number].list.arrivals)
        found.append((arrived_ms - began_ms) / 1000 / steps)
    return max(0.0, median_low(found)) * every if found else 0.0


def took_part(entries: Sequence[RoundEntry]) -> frozenset[str]:
    """Return who took part in one of the last rounds: it signed an arrival and a result of it."""
    return frozenset(arrival.peer for entry in entries[-RECENT_ROUNDS:] for arrival in entry.list.arrivals)


def codec_of(record: TrainingRecord, entries: Sequence[RoundEntry], number: int) -> str:
    """Return the number format of the changes of a round, which the entry before it named."""
    return (entries[number - 1].codec if number else "") or record.codecs[0]


def newly_left_out(entries: Sequence[RoundEntry]) -> dict[str, str]:
    """Return who takes no more part since the last round, and why; nobody before the first round."""
    if not entries:
        return {}
    before = entries[-2].left_out if len(entries) > 1 else {}
    return {peer: why for peer, why in entries[-1].left_out.items() if peer not in before}


def up_to(entries: Sequence[RoundEntry], root: bytes) -> list[RoundEntry]:
    """Return the entries up to the one that led to a state; none if no round did.

    A node writes a round's entry before the state after it, and may die in between.
    """
    count = next((count for count in range(len(entries), 0, -1) if entries[count - 1].root == root), 0)
    return list(entries[:count])


def shared(mine: Sequence[RoundEntry], theirs: Sequence[RoundEntry]) -> int:
    """Return how many rounds two histories have before they part."""
    pairs = zip(mine, theirs, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one.hash != other.hash), min(len(mine), len(theirs)))


def is_better(mine: Sequence[RoundEntry], theirs: Sequence[RoundEntry]) -> bool:
    """True if the other of two histories that parted is the one to go on with.

    It is the one with more tokens of those who made the last round before they parted, where rounds of a quorum of them
    count first: nobody makes up a long history alone, nor with members that were only to take part.
    """
    same = shared(mine, theirs)
    if same == len(mine) or same == len(theirs):
        return len(theirs) > len(mine)
    known = _known(mine[:same]) or {mine[0].list.leader, theirs[0].list.leader}
    ours, other = _worth(mine[same:], known), _worth(theirs[same:], known)
    return other > ours if other != ours else theirs[-1].hash < mine[-1].hash


def had_quorum(common: Sequence[RoundEntry], entries: Sequence[RoundEntry]) -> bool:
    """True if a quorum of those who made the last common round of two histories made a round after it."""
    return _worth(entries, _known(common))[0] > 0


def _known(common: Sequence[RoundEntry]) -> set[str]:
    return {*common[-1].list.members} if common else set()


def _worth(entries: Sequence[RoundEntry], known: set[str]) -> tuple[int, int]:
    """Tokens that known members counted, in rounds of a quorum of them and in all."""
    quorate = every = 0
    for entry in entries:
        counted = [arrival.tokens for arrival in entry.list.arrivals if arrival.peer in known]
        every += sum(counted)
        quorate += sum(counted) if known and len(counted) >= quorum(len(known)) else 0
    return quorate, every


class _Doubts(NamedTuple):
    why: dict[str, str]  # all that this round has brought
    by_round: tuple[frozenset[str], ...]  # whose changes are doubted, of the last rounds and of this one
    unlike: frozenset[str]  # of this one, for nothing but the direction of their change
    harm: frozenset[str]  # whose change of the last round did harm


def _doubts(record: TrainingRecord, standing: Standing, members: MemberList, results: Sequence[Result]) -> _Doubts:
    """Those whose change is unlike the others', that of another member, or that of the last round.

    Besides, those whose change of the round before did harm, or a step of which they have not computed: that counts for
    the round before. A change of that round which was only unlike the others' counts no more if testers found that it
    comes from training, or if there were too many such changes for all to be tested.
    """
    unlike, sure = dict[str, str](), dict[str, str]()
    steps = {arrival.peer: arrival.steps for arrival in members.arrivals}
    few = few_steps(steps)
    for row in grid_of(members, is_grid=record.grid).rows:  # only those of a row have seen its changes
        told = [result for result in results if result.peer in row]
        reports = [result.report for result in told]
        figures = measured(row, reports)
        unlike |= odd_directions(figures, few)
        sure |= odd_norms(figures, few, steps)
        sure |= replayed(past_likeness(row, reports, [result.past for result in told]))
    sure |= copied({arrival.peer: arrival.change for arrival in members.arrivals})
    tested = {result.peer: result.tested for result in results}
    harm = harmful(standing.tests, tested)
    if record.recompute:
        harm |= miscomputed(standing.tests, {result.peer: result.recomputed for result in results})
    untested = standing.unlike - {test.peer for test in standing.tests}
    cleared = standing.unlike & trained(standing.tests, tested) | untested
    *before, last = standing.doubts or (frozenset[str](),)
    by_round = (*before, (last - cleared) | harm.keys(), frozenset(unlike | sure))
    return _Doubts(unlike | harm | sure, by_round, frozenset(unlike.keys() - sure.keys()), frozenset(harm))


def _left_out(record: TrainingRecord, standing: Standing, doubts: _Doubts, members: int) -> dict[str, str]:
    """Those left out before, as many as an entry has room for, and those whom this round's doubts add.

    Several changes in a row have to be doubted, since a single one of an honest island may be odd; or tests have to
    find harm in two of `HARM_ROUNDS`, since a liar may send right changes between wrong ones.
    """
    again = left_out_after(doubts.by_round, members) | left_out_after(doubts.by_round[:-1], members)
    again |= doubts.harm & frozenset[str]().union(*standing.harms)
    added = sorted(again & doubts.why.keys())
    room = max(0, most_left_out(record) - len(added))
    banned = [peer for peer in sorted(standing.banned) if peer not in added][:room]
    return {**{peer: standing.banned[peer] for peer in banned}, **{peer: doubts.why[peer] for peer in added}}
