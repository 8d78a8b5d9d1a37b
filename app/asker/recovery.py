"""Decisions after a failure: which hop or link is at fault when an answer is late, and who sends what again. Pure.

`RouteSession._repair` in `app.asker.route_session` carries them out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from app.core.reasons import Reason, because
from app.routing.route import Hop, ReadingPace, Route
from app.session.frame import CHUNK_ROWS, Frame

# Tokens may be under way for as long as such a link takes: a fifth of 2 Mbit/s, as the rest may go to others.
SLOW_LINK_BYTES_PER_S = 50_000
CROWDED_S = 3.0  # and for so long at least: behind what others send, even few bytes wait in routers
STEP_TOKENS = 16  # of a prompt that a hop reads at once, at least; one that takes longer for fewer counts as stuck
OVERDUE_TIMES = 8.0  # what takes so many times as long as was believed is overdue: hops read for several askers in turn


class HopFailed(Exception):
    """A hop cannot be used now; `blameless` if that is not its fault, or was reported already.

    With `link`, sender and receiver, something was lost between these two, and neither of them may be at fault.
    """

    def __init__(
        self,
        peer: str,
        why: Reason,
        *,
        busy: bool = False,
        blameless: bool = False,
        link: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(why.text)
        self.peer, self.why, self.busy, self.blameless, self.link = peer, why, busy, blameless, link


class HopLoss(NamedTuple):
    """Something was lost on a route; `sender` is the hop that sent it, or empty if the asker did."""

    failure: HopFailed
    sender: str = ""
    stop: int = 0  # the sender says that it has computed the tokens before this position


def longest_quiet_s(row_bytes: int, stuck_s: float) -> float:
    """Seconds for which nothing may arrive over a slow link that carries chunks of a prompt."""
    return stuck_s + CHUNK_ROWS * row_bytes / SLOW_LINK_BYTES_PER_S


class LateHop(NamedTuple):
    """A hop that was waited for much longer than was believed."""

    hop: Hop
    unread: int  # tokens that it had to read
    waited_s: float


class _Crossing:
    """Rows on their way over a link."""

    def __init__(self, before: int) -> None:
        self._before, self._seconds = before, 0.0  # rows that had crossed it before, and how long the others take

    def beyond_s(self, since_s: float, rows: int, row_bytes: int) -> float:
        """Count more seconds; returns those of them by which a slow link would have carried so many rows."""
        self._seconds += since_s
        slow_s = CROWDED_S + (rows - self._before) * row_bytes / SLOW_LINK_BYTES_PER_S
        return min(max(self._seconds - slow_s, 0.0), since_s)


@dataclass(slots=True)
class _Wait:
    """Seconds for which a hop was the first that did not have all tokens."""

    hop_s: float = 0.0  # that nothing but the hop explains
    link_s: float = 0.0  # its part of those at a link to the hop before or after it, of which each end has half
    # Of this epoch alone:
    in_all_s: float = 0.0
    lost_s: float = 0.0  # that no slow link explains, but the hop before it may
    receiving: _Crossing | None = None
    sending: _Crossing | None = None


class HopProgress:
    """Follows the hops' progress while an answer is late, from their STATE frames, until it comes.

    A hop's claim counts up to the tokens that were fed. The first hop that does not have them all is the one that is
    waited for. One that claims a little now and then is not waited for without end; nor is one that has an excuse for
    another epoch now and then, since what a hop was waited for counts in later ones too:

    - It is `late` after `stuck_s` and `OVERDUE_TIMES` the seconds that it takes for what it has to read, by its own
      word. Seconds that a slow link explains do not count.
    - It is `overdue` after about `OVERDUE_TIMES` what was believed: more than its word, if it was late before. Another
      one takes the place of a hop that is both, if that is faster.
    - Whatever its word is, it counts as stuck after `stuck_s` for every `STEP_TOKENS`, and once more.
    """

    def __init__(self, row_bytes: int, stuck_s: float) -> None:
        self._row_bytes, self._stuck_s = row_bytes, stuck_s
        self._longest_quiet_s = longest_quiet_s(row_bytes, stuck_s)
        self.epoch = 0
        self._hops: dict[str, Hop] = {}  # of all epochs
        self._unread: dict[str, int] = {}
        self._paces: dict[str, ReadingPace] = {}
        self._waits = defaultdict[str, _Wait](_Wait)
        self._advanced_at, self._sum, self._looked_at = 0.0, -1, 0.0
        self.late = ""  # the hop that is waited for, if it is late

    def begin(
        self, epoch: int, route: Route, unread: Mapping[str, int], paces: Mapping[str, ReadingPace], now: float
    ) -> None:
        """Follow another epoch; `unread` are the tokens that each hop has to read until the answer comes."""
        self.epoch, self.late = epoch, ""
        self._advanced_at, self._sum, self._looked_at = now, -1, now
        self._hops |= {hop.peer: hop for hop in route}
        self._unread |= {peer: max(tokens, self._unread.get(peer, 0)) for peer, tokens in unread.items()}
        self._paces = {**paces, **self._paces}  # of before: waits of this answer are not excused by themselves
        for peer, wait in self._waits.items():
            self._waits[peer] = _Wait(wait.hop_s, wait.link_s)

    def loss(
        self,
        route: Route,
        states: Mapping[str, Frame],
        fed: int,
        now: float,
        took_at: Mapping[str, float] = MappingProxyType({}),
    ) -> HopLoss | None:
        """Return what was lost between hops that all answer; None while a hop still computes or receives.

        `took_at` are the times at which streams of this asker last took something that had waited, for the hops that it
        sends rows to: what was sent to such a hop lately is behind other rows.
        """
        progress = sum(min(state.position, fed) + min(state.rows, fed) for state in states.values())
        if progress > self._sum:
            self._advanced_at, self._sum = now, progress
        quiet_s, since_s = now - self._advanced_at, now - self._looked_at
        self._looked_at, self.late = now, ""
        before = ""
        for index, hop in enumerate(route):
            peer, state = hop.peer, states[hop.peer]  # `rows` it has received, and cached up to `position`
            if state.epoch != self.epoch:
                why = because("hop_forgot", "it has forgotten the session", peer)
                return HopLoss(HopFailed(peer, why, blameless=True))
            if state.rows < fed:
                is_behind_others = now - took_at.get(peer, -math.inf) < self._longest_quiet_s
                sender = "" if peer in took_at else before
                self._count_receiving(sender, peer, state.rows, fed, since_s, crowded=is_behind_others)
                is_lost = self._waits[peer].lost_s > self._stuck_s
                is_coming = quiet_s < self._transfer_s(fed - state.rows) and not is_lost
                may_take = self._may_take(peer, since_s)
                return None if (is_coming or is_behind_others) and may_take else _lost_tokens(before, peer, fed)
            if state.position < fed:
                after = route[index + 1].peer if index + 1 < len(route) else ""
                taken = min(states[after].rows, state.position) if after else state.position
                self._count_computing(peer, after, state.position, taken, since_s)
                step_s = self._patience_s(peer, min(fed, CHUNK_ROWS))  # it tells of a step when that is over
                longest_s = max(step_s, self._transfer_s(state.position - taken))
                if self._may_take(peer, since_s) and quiet_s <= longest_s:
                    return None
                if taken < state.position:  # it may have to wait until its successor has taken what it has computed
                    return _lost_tokens(peer, after, state.position)
                return HopLoss(HopFailed(peer, because("hop_stuck", "it answers but does not advance", peer)))
            before = peer
        if quiet_s < CROWDED_S:
            return None  # the answer may be behind what others send
        return HopLoss(HopFailed(before, because("answer_lost", "its answer is lost", before), blameless=True))

    def resume(self, now: float) -> None:
        """Count from then on."""
        self._looked_at = now

    def overdue(self, *, links: bool = False) -> list[LateHop]:
        """Return the hops that took much longer than was believed: what they have to read takes that long at least.

        With `links`, waits at links count too: half for each hop at an end.
        """
        found = []
        for peer, hop in self._hops.items():
            wait, unread = self._waits[peer], self._unread[peer]
            waited_s = wait.hop_s + (wait.link_s if links else 0.0)
            if waited_s > CROWDED_S + OVERDUE_TIMES * self._pace(peer).expected_s(unread):
                found.append(LateHop(hop, unread, waited_s))
        return found

    def _count_receiving(self, sender: str, peer: str, rows: int, fed: int, since_s: float, *, crowded: bool) -> None:
        """Count seconds in which rows were on their way to a hop; without a sender they come from this asker.

        Those may take as long as over a slow link, which may be its own, before they count.
        """
        wait = self._waits[peer]
        wait.receiving = wait.receiving or _Crossing(rows)
        beyond_s = wait.receiving.beyond_s(since_s, min(rows + CHUNK_ROWS, fed), self._row_bytes)
        if sender:
            self._count_link(sender, peer, since_s)
            wait.lost_s += beyond_s
        elif crowded:
            wait.link_s += beyond_s
        else:
            wait.hop_s += beyond_s

    def _count_computing(self, peer: str, after: str, position: int, taken: int, since_s: float) -> None:
        """Count seconds in which a hop computes, or waits for its successor to take more than so many tokens."""
        wait = self._waits[peer]
        wait.sending = wait.sending or _Crossing(taken)
        beyond_s = wait.sending.beyond_s(since_s, position, self._row_bytes) if taken < position else since_s
        wait.hop_s += beyond_s
        if after:
            self._count_link(peer, after, since_s - beyond_s)

    def _count_link(self, sender: str, receiver: str, since_s: float) -> None:
        for peer in (sender, receiver):
            self._waits[peer].link_s += since_s / 2

    def _transfer_s(self, tokens: int) -> float:
        """Seconds after which some of these tokens have arrived, if a slow link carries them."""
        crossing_s = tokens * self._row_bytes / SLOW_LINK_BYTES_PER_S
        return min(max(crossing_s, CROWDED_S), self._longest_quiet_s)

    def _pace(self, peer: str) -> ReadingPace:
        return self._paces.get(peer, ReadingPace())

    def _patience_s(self, peer: str, tokens: int) -> float:
        """Seconds that a hop may take for so many tokens by its own word; it cannot make them as many as it likes."""
        return self._stuck_s + min(OVERDUE_TIMES * self._pace(peer).claimed_s(tokens), self._slow_s(tokens))

    def _slow_s(self, tokens: int) -> float:
        return self._stuck_s * tokens / STEP_TOKENS

    def _may_take(self, peer: str, since_s: float) -> bool:
        """Count the seconds since the last look as a wait for this hop; False if those are too many in all."""
        wait, unread = self._waits[peer], self._unread[peer]
        wait.in_all_s += since_s
        self.late = peer if wait.hop_s > self._patience_s(peer, unread) else ""
        return wait.in_all_s <= self._stuck_s + self._slow_s(unread)


def _lost_tokens(sender: str, receiver: str, stop: int) -> HopLoss:
    why = because("tokens_lost", "what was sent to it is lost", receiver)
    return HopLoss(HopFailed(receiver, why, blameless=True), sender, stop)


class LostSeconds:
    """Seconds that a session takes beside its tokens, put down to the hops that may have cost them.

    A token that needs a repair loses all but its usual time, of which those that may have caused the failure have an
    equal part each. What hops take to begin an epoch is put down to those that were not ready, second by second.
    """

    def __init__(self) -> None:
        self._lost: dict[str, float] = {}  # by peer; of the tokens that were answered
        self._opening: dict[str, float] = {}  # the same of the present ones
        self.causers: set[str] = set()  # hops that may be why the present tokens need a repair
        self._begun_at = 0.0

    @property
    def total_s(self) -> float:
        """What the tokens that were answered have lost."""
        return sum(self._lost.values())

    def begin(self, now: float) -> None:
        """Note that the next tokens are on their way."""
        self._opening, self.causers, self._begun_at = {}, set(), now

    def failed(self, peers: Collection[str]) -> None:
        """Note that one of these hops caused a failure."""
        self.causers.update(peers)

    def opened(self, opening_s: Mapping[str, float]) -> None:
        """Note how long each hop took to begin an epoch; they did so at the same time."""
        order, before_s = sorted(opening_s, key=opening_s.__getitem__), 0.0
        for index, peer in enumerate(order):
            part_s = (opening_s[peer] - before_s) / (len(order) - index)
            _add(self._opening, dict.fromkeys(order[index:], part_s))
            before_s = opening_s[peer]

    def answered(self, until: float, usual_s: float) -> None:
        """Note that the tokens were answered; until then they had lost all but their usual time, if one failed."""
        self._lost = self.so_far(until, usual_s)
        self.begin(until)

    def so_far(self, until: float, usual_s: float, unready: Collection[str] = ()) -> dict[str, float]:
        """Return the lost seconds by peer; hops that are `unready` may be why the present tokens wait."""
        lost, causers = dict(self._lost), self.causers | {*unready}
        _add(lost, self._opening)
        rest_s = until - self._begun_at - usual_s - sum(self._opening.values())
        if causers and rest_s > 0:
            _add(lost, dict.fromkeys(causers, rest_s / len(causers)))
        return lost


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for peer, seconds in more.items():
        sums[peer] = sums.get(peer, 0.0) + seconds


class HopState(NamedTuple):
    """What a hop holds of a session: cached tokens, and kept outputs of positions [kept_from, length)."""

    length: int
    kept_from: int


def cache_sources(old: Route, new: Route, givers: Collection[str]) -> dict[str, str]:
    """For hops that are new on a route, the hops of the old route that can give them their cache.

    A giver leaves the route, has worked until now, and has all blocks of the hop that takes its place.
    """
    staying = {hop.peer for hop in new}
    leaving = [hop for hop in old if hop.peer in givers and hop.peer not in staying]
    sources = {}
    for hop in new:
        source = next((giver.peer for giver in leaving if giver.span.covers(hop.span)), None)
        if hop not in old and source is not None:
            sources[hop.peer] = source
    return sources


class ResumePlan(NamedTuple):
    """What each hop must do, and from which position the asker feeds the first."""

    lengths: tuple[int, ...]  # cached tokens that each hop keeps; it is cut if it has more
    send_from: tuple[int, ...]  # each hop's successor needs outputs from this position on
    feed_from: int


def plan_resume(states: Sequence[HopState], fed: int) -> ResumePlan:
    """Plan the least work after which all hops have cached all tokens and the asker gets the output of the last one.

    A hop that is ahead of its successor sends its kept outputs again. If it kept too few, it is cut back and computes
    them again from its own predecessor's outputs, in the end from the asker's tokens.
    """
    needed = fed - 1  # the asker needs the last output alone
    lengths, send_from = [], []
    for state in reversed(states):
        length = min(state.length, fed)
        if length > needed and state.kept_from > needed:
            length = needed
        lengths.append(length)
        send_from.append(needed)
        needed = length
    return ResumePlan(tuple(reversed(lengths)), tuple(reversed(send_from)), needed)
