"""Guesses the next tokens of a reply, and decides how many of them go along with the next one. Pure: no I/O, no clock.

A guess costs a row at every hop and saves a whole trip through all of them if it is right. `PromptLookup` takes guesses
from the conversation itself: where its last tokens occurred before, the tokens that followed are likely to follow
again. A draft model guesses the rest (`engine.draft_model`). `Guesser` compares both by what they promise: it follows
how often guesses of each kind were right and what a row costs (`RowCost`), and guesses nothing where nothing is gained.

It never decides a token: `app.asker.reply` draws each one as it would without guesses, and keeps the guesses that are
equal to what was drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

MAX_GUESSES = 15
SHORTEST_MATCH = 2  # tokens that must have occurred before
LONGEST_MATCH = 16  # a longer match promises no more
MOST_PLACES = 24  # of earlier occurrences that are compared, the latest first
LEAST_GAIN = 1.05  # guesses must promise this many times the speed without them
PLAIN_EVERY = 32  # rounds after which one goes without guesses, to learn again what a single row takes
FIRST_ROW_SHARE = 0.25  # of a round's time, for a further row, until it is measured
LEAST_ROW_SHARE = 0.02  # a row never counts as cheaper than this: it takes room in the steps of others
FORGET_EVERY = 16  # rounds without guesses
_LATEST = 9  # rounds
_MEMORY = 0.9  # weight that is left to an observation after the next
_PRIOR_WEIGHT = 2.0
# How often the token after a match of this many tokens is right, before it is known.
_MATCH_PRIOR = {2: 0.25, 3: 0.35, 4: 0.45, 5: 0.55, 6: 0.65, 7: 0.75}
_LONG_MATCH_PRIOR = 0.85
_DRAFT_PRIOR = 0.6
SHORTEST_DRAFT_PAUSE, LONGEST_DRAFT_PAUSE = 16, 256  # tokens without a draft, after drafts that gain nothing


class Match(NamedTuple):
    """Guesses from an earlier part of the conversation, and how many tokens before them are the same here and there."""

    length: int
    tokens: tuple[int, ...]


class PromptLookup:
    """Finds where the end of a conversation occurred in it before."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # the shortest match -> positions after it, in order
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            if len(self._tokens) >= SHORTEST_MATCH:
                self._ends.setdefault(tuple(self._tokens[-SHORTEST_MATCH:]), []).append(len(self._tokens))
            self._tokens.append(token)

    def find(self, count: int) -> Match | None:
        """Return `count` tokens that followed the longest match; of equal ones the latest. None if there is none."""
        tokens = self._tokens
        places = self._ends.get(tuple(tokens[-SHORTEST_MATCH:]), ()) if len(tokens) >= SHORTEST_MATCH else ()
        best, length = -1, 0
        for place in reversed(places[-MOST_PLACES:]):
            same = self._match_length(place)
            if same > length:
                best, length = place, same
            if length == LONGEST_MATCH:
                break
        if best < 0 or count < 1:
            return None
        period = len(tokens) - best  # what follows may run into the guesses themselves: then it repeats
        return Match(length, tuple(tokens[best + index % period] for index in range(count)))

    def _match_length(self, place: int) -> int:
        tokens, end = self._tokens, len(self._tokens)
        length = SHORTEST_MATCH
        while length < min(place, LONGEST_MATCH) and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length


class HitRate:
    """How often guesses of one kind are right; old observations fade."""

    def __init__(self, prior: float) -> None:
        self._hits, self._weight = prior * _PRIOR_WEIGHT, _PRIOR_WEIGHT

    @property
    def value(self) -> float:
        """Probability that the next one is right."""
        return self._hits / self._weight

    def note(self, hit: bool) -> None:
        """Take one observation."""
        self._hits, self._weight = _MEMORY * self._hits + hit, _MEMORY * self._weight + 1


class RowCost:
    """Seconds of a round with one row, and of each further row; learned from rounds.

    Medians of the latest rounds, so that a machine that stalls for a moment does not count.
    """

    def __init__(self) -> None:
        self._rounds_s: deque[float] = deque(maxlen=_LATEST)
        self._row_shares: deque[float] = deque([FIRST_ROW_SHARE] * 2, maxlen=_LATEST)  # of a round's time
        self._drafts_s: deque[float] = deque(maxlen=_LATEST)
        self._plain_rounds = 0  # since the last with guesses

    def note(self, rows: int, seconds: float) -> None:
        """Take a round of these many rows, from the first hop to the tokens that were drawn."""
        if rows == 1:
            self._rounds_s.append(seconds)
            self._plain_rounds += 1
            if self._plain_rounds % FORGET_EVERY == 0:  # a bad figure must not keep guesses away for ever
                self._row_shares.append(FIRST_ROW_SHARE)
        elif self._rounds_s:
            self._plain_rounds = 0
            share = (seconds / max(median(self._rounds_s), 1e-9) - 1) / (rows - 1)
            self._row_shares.append(min(max(share, LEAST_ROW_SHARE), 1.0))

    def note_draft(self, tokens: int, seconds: float) -> None:
        """Take the time in which a draft model guessed these many tokens."""
        self._drafts_s.append(seconds / tokens)

    @property
    def is_known(self) -> bool:
        """True once a round of one row was seen."""
        return bool(self._rounds_s)

    def seconds(self, guesses: int, *, drafted: bool = False) -> float:
        """Seconds that a round with these many guesses takes."""
        round_s = median(self._rounds_s)
        draft_s = median(self._drafts_s) if drafted and self._drafts_s else 0.0
        return round_s + guesses * (median(self._row_shares) * round_s + draft_s)


class Promise(NamedTuple):
    """A number of guesses, and how many times faster than without guesses they are likely to be."""

    guesses: int
    speed: float


def best_count(hit_rates: Sequence[float], seconds: Callable[[int], float]) -> Promise:
    """Return the number of guesses that promises most, with the probability that each is right if all before it were.

    `seconds` tells what a round with so many guesses takes.
    """
    best = Promise(0, 1.0)
    tokens, reached = 1.0, 1.0  # expected tokens of a round, and the probability that all guesses so far are right
    for count, rate in enumerate(hit_rates, 1):
        reached *= rate
        tokens += reached
        speed = tokens * seconds(0) / seconds(count)
        if speed > best.speed:
            best = Promise(count, speed)
    return best if best.speed >= LEAST_GAIN else Promise(0, 1.0)


@dataclass(frozen=True)
class Proposal:
    """Guesses to send with the next token, or how many a draft model is to make."""

    tokens: tuple[int, ...] = ()
    draft: int = 0


class Guesser:
    """The guesses of one reply."""

    def __init__(self, tokens: Sequence[int], cost: RowCost) -> None:
        self._lookup = PromptLookup(tokens)
        self._cost = cost
        self._match_rates = {
            length: HitRate(_MATCH_PRIOR.get(length, _LONG_MATCH_PRIOR))
            for length in range(SHORTEST_MATCH, LONGEST_MATCH + 1)
        }
        self._draft_rate = HitRate(_DRAFT_PRIOR)
        self._draft_pause = self._draft_wait = 0  # tokens without a draft: the last pause, and what is left of it
        self._found: Match | None = None
        self._plain_in = PLAIN_EVERY

    def propose(self, room: int, *, can_draft: bool = False) -> Proposal:
        """Return what to send with the next token: at most `room` guesses, drafted ones only if they can be had."""
        count = min(room, MAX_GUESSES)
        self._found = self._lookup.find(count)
        if count < 1 or not self._cost.is_known:
            return Proposal()
        self._plain_in -= 1
        if self._plain_in <= 0:
            return Proposal()
        found = self._lookup_promise()
        drafted = self._draft_promise(count) if can_draft else Promise(0, 1.0)
        if found.guesses and found.speed >= drafted.speed:
            assert self._found is not None
            return Proposal(self._found.tokens[: found.guesses])
        return Proposal(draft=drafted.guesses)

    def _lookup_promise(self) -> Promise:
        if self._found is None:
            return Promise(0, 1.0)
        length = self._found.length
        # A guess that is right makes the match longer.
        rates = [self._rate(length + index).value for index in range(len(self._found.tokens))]
        return best_count(rates, self._cost.seconds)

    def _draft_promise(self, count: int) -> Promise:
        if self._draft_wait > 0:
            return Promise(0, 1.0)
        promise = self._draft_worth(count)
        return promise if promise.guesses else Promise(1, 1.0)  # one, to learn whether the text has become easier

    def _draft_worth(self, count: int) -> Promise:
        return best_count([self._draft_rate.value] * count, partial(self._cost.seconds, drafted=True))

    def _rate(self, length: int) -> HitRate:
        return self._match_rates[min(length, LONGEST_MATCH)]

    def note(
        self, guesses: Sequence[int], drawn: Sequence[int], seconds: float | None, draft_s: float | None = None
    ) -> None:
        """Learn from a round: the guesses that went along, the tokens drawn, and its seconds if nothing disturbed it.

        `draft_s` are the seconds in which a draft model made the guesses, if it did. What the look-up would have
        guessed counts even if it was not sent.
        """
        if self._found is not None:
            for index, (guess, token) in enumerate(zip(self._found.tokens, drawn, strict=False)):
                self._rate(self._found.length + index).note(guess == token)
                if guess != token:
                    break
        if draft_s is not None and guesses:
            self._cost.note_draft(len(guesses), draft_s)
            for guess, token in zip(guesses, drawn, strict=False):
                self._draft_rate.note(guess == token)
                if guess != token:
                    break
            longer = min(max(2 * self._draft_pause, SHORTEST_DRAFT_PAUSE), LONGEST_DRAFT_PAUSE)
            self._draft_pause = self._draft_wait = 0 if self._draft_worth(MAX_GUESSES).guesses else longer
        else:
            self._draft_wait -= len(drawn)
        if seconds is not None:
            self._cost.note(1 + len(guesses), seconds)
        if not guesses:
            self._plain_in = PLAIN_EVERY
        self._found = None
        self._lookup.extend(drawn)


def right_guesses(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many of the guesses, from the first on, are the tokens that came."""
    for index, (guess, token) in enumerate(zip(guesses, tokens, strict=False)):
        if guess != token:
            return index
    return min(len(guesses), len(tokens))
