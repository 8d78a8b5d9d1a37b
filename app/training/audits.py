"""Decides which holder of a job is audited after a step, and who lied if results differ. Pure.

An audit computes a holder's micro-batches of a step again, at another holder and the same version: all of them, because
their sum is all that a holder has answered for. Audited is at once who stands apart, a new holder in its first steps,
and every few steps who has agreed least with the others; so somebody who hides in the noise of the data is found too.
Holders see when somebody was audited, so anybody may be audited at any time besides, by lot.
Nobody is left out for being far from the others, only for sums that others contradict. Peer ids are free, so they do
not decide who is asked, and the holders of one home (`app.serving.homes`) count as one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.core.smoothing import Ewma
from app.core.span import Span
from app.training.reduction import TOLERANCE, HolderSums, Numbers, agreement, deviation, standing_apart


@dataclass(frozen=True)
class Caution:
    """How a job guards itself against holders that lie."""

    clips: bool = True  # sums of three or more holders
    # Most steps between two audits that nothing else prompted, and one in so many has one besides; None: no audits.
    audit_every: int | None = 10
    rest: int = 5  # steps in which a holder that an audit has cleared is audited for standing apart once in so many


class Suspect(NamedTuple):
    """A holder to be audited, for the blocks of a run."""

    peer: str
    span: Span

    def places(self) -> list[tuple[str, int]]:
        """The holder with each of these blocks."""
        return [(self.peer, block) for block in self.span.blocks()]


class AuditLots:
    """Remembers how well each holder agreed with the others, block by block, and chooses whom to audit for which.

    By block, since the runs of blocks change whenever a holder comes or goes. A holder that is right in some blocks may
    lie in others.
    """

    def __init__(self, caution: Caution, rng: random.Random | None = None) -> None:
        self._caution, self._rng = caution, rng or random.SystemRandom()
        self._agreement: dict[tuple[str, int], Ewma] = {}  # by peer and block
        self._cleared_at: dict[tuple[str, int], int] = {}
        self._waited = 0  # steps since the last audit that nothing else prompted

    def choose(self, runs: Mapping[Span, Sequence[HolderSums]], version: int) -> list[Suspect]:
        """Take a step's sums, by run of blocks, and return whom to audit now.

        They are those that stand apart, each for one run, and at most one besides.
        """
        every = self._caution.audit_every
        if every is None:
            return []
        apart: dict[str, list[Suspect]] = {}
        seen: list[Suspect] = []
        for span, shares in runs.items():
            seen += [Suspect(share.peer, span) for share in shares]
            if len(shares) > 1:
                for peer, cosine in agreement(shares).items():
                    for place in Suspect(peer, span).places():
                        self._agreement.setdefault(place, Ewma(0.2)).add(cosine)
            for suspect in (Suspect(peer, span) for peer in standing_apart(shares)):
                if not self._rests(suspect, version) or self._rng.random() < 1 / self._caution.rest:
                    apart.setdefault(suspect.peer, []).append(suspect)
        chosen = [self._rng.choice(each) for each in apart.values()]
        self._waited += 1
        due = seen if self._waited >= every else [one for one in seen if self._last_cleared(one) == -math.inf]
        besides = []
        if due:
            besides = [min(due, key=lambda one: (self._score(one, version), self._rng.random()))]
        elif seen and self._rng.random() < 1 / every:
            besides = [self._rng.choice(seen)]
        if besides:
            self._waited = 0
        return list(dict.fromkeys((*chosen, *besides)))

    def witnesses(
        self, suspect: str, others: Collection[str], homes: Mapping[str, str], not_accused: Collection[str]
    ) -> list[str]:
        """Return other holders in the order in which they are asked about one: by a lot that none of them can foresee.

        Those that are not accused come first, and last those of the suspect's own home.
        """
        drawn = self._rng.sample(sorted(others), len(others))
        return sorted(drawn, key=lambda peer: (peer not in not_accused, homes[peer] == homes[suspect]))

    def order(self, ways: int) -> list[int]:
        """Return in which order so many ways come into question for a witness: by a lot too."""
        return self._rng.sample(range(ways), ways)

    def cleared(self, suspect: Suspect, version: int) -> None:
        """An audit found a holder's sums of some blocks to be right."""
        self._cleared_at.update(dict.fromkeys(suspect.places(), version))

    def contradicted(self, suspect: Suspect) -> None:
        """An audit found a holder's sums to be wrong: it is audited first of all if it takes part again."""
        for place in suspect.places():
            self._cleared_at.pop(place, None)

    def _last_cleared(self, suspect: Suspect) -> float:
        """Return the version at which a holder was last cleared of all these blocks; -inf if it never was."""
        return min(self._cleared_at.get(place, -math.inf) for place in suspect.places())

    def _rests(self, suspect: Suspect, version: int) -> bool:
        """True if an audit has cleared a holder lately."""
        return version - self._last_cleared(suspect) < self._caution.rest

    def _score(self, suspect: Suspect, version: int) -> float:
        """Agreement of a holder with the others; the shorter ago it was cleared, the more is added."""
        every = self._caution.audit_every or 1
        known = [self._agreement[place].value for place in suspect.places() if place in self._agreement]
        return min(known, default=0.0) + max(0.0, 1 - (version - self._last_cleared(suspect)) / (10 * every))


class Answer(NamedTuple):
    """What a holder says the gradients of the same micro-batches add up to."""

    peer: str
    sums: Numbers


class AuditVerdict(NamedTuple):
    """Who lied, and who says so; nobody, if all agree or if it cannot be told."""

    liar: str | None
    agree: bool
    accusers: tuple[str, ...] = ()


def judge(answers: Sequence[Answer], homes: Mapping[str, str], not_accused: Collection[str]) -> AuditVerdict:
    """Compare answers about the same micro-batches, and say who lied.

    A liar differs from what more than half of all homes say, or from a holder that is not to be accused. `homes` are
    those of all holders, also of those that were not asked: the first two may tell the same lie. A home whose holders
    contradict each other has no say.
    """
    groups: list[list[Answer]] = []
    for answer in answers:
        for group in groups:
            if deviation(group[0].sums, answer.sums) <= TOLERANCE:
                group.append(answer)
                break
        else:
            groups.append([answer])
    if len(groups) == 1:
        return AuditVerdict(None, True)
    told = [{homes[answer.peer] for answer in group} for group in groups]
    times = Counter(home for each in told for home in each)
    voices = [sum(times[home] == 1 for home in each) for each in told]
    trusted = [at for at, group in enumerate(groups) if any(answer.peer in not_accused for answer in group)]
    right = trusted[0] if len(trusted) == 1 else max(range(len(groups)), key=voices.__getitem__)
    wrong = [answer.peer for at, group in enumerate(groups) if at != right for answer in group]
    is_known = (len(trusted) == 1 and len(wrong) == 1) or 2 * voices[right] > len({*homes.values()})
    if not is_known:
        return AuditVerdict(None, False)
    return AuditVerdict(wrong[0], False, tuple(answer.peer for answer in groups[right]))


def other_causes(verdict: AuditVerdict, met: Mapping[str, Collection[str]], home: Callable[[str], str]) -> set[str]:
    """Return who else may have caused what a holder is accused of, by numbers that it sent.

    They are the hops that the accused `met` on its ways, and those of any home that all its accusers met: these agree
    with each other, and not with the accused, if the same was done to all of them.
    """
    assert verdict.liar is not None, "nobody is accused"
    homes = set.intersection(*({home(peer) for peer in met[accuser]} for accuser in verdict.accusers))
    everywhere = {peer for accuser in verdict.accusers for peer in met[accuser] if home(peer) in homes}
    return {*met[verdict.liar], *everywhere} - {verdict.liar}
