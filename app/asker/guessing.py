"""Guesses the next tokens of a reply, and decides how many of them go along with the next one. Pure: no I/O, no clock.

A guess costs a row at every hop and saves a whole trip through all of them if it is right. `PromptLookup` takes guesses
from the conversation itself: where its last tokens occurred before, the tokens that followed are likely to follow
again. A draft model guesses the rest (`engine.draft_model`). `Guesser` compares both by what they promise: it follows
how often guesses of each kind were right and what they cost (`GuessHistory`), and guesses nothing where nothing is
gained. It runs for every token of every reply, on the event loop: what it computes must stay within microseconds.

It never decides a token: `app.asker.reply` draws each one as it would without guesses, and keeps the guesses that are
equal to what was drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

MAX_GUESSES = 15
SHORTEST_MATCH = 2  # tokens that must have occurred before
LONGEST_MATCH = 16  # a longer match promises no more
INDEXED_AT_ONCE = 4096  # tokens of a prompt for each token of the reply: 131,072 at once would take 70 ms
MOST_PLACES = 24  # of earlier occurrences that are compared, the latest first
LEAST_GAIN = 1.05  # guesses must promise this many times the speed without them
PLAIN_EVERY = 32  # rounds after which one goes without guesses, to learn again what a single row takes
FIRST_ROW_SHARE = 0.25  # of a round's time, for a further row, until it is measured
FEW_GUESSES = 2  # of a reply's first look-up, and of the next after one that was wholly wrong: a long wait for nothing
MOST_FIXED_SHARE = 4.0
LEAST_ROW_SHARE = 0.05  # a row never counts as cheaper than this: it takes room in the steps of others
SHORTEST_PATIENCE, LONGEST_PATIENCE = 64, 2048  # rounds without guesses, until what guesses cost is measured again
DRAFT_EVERY = 16  # of the replies for which a draft promises nothing, one has it, to learn again
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
        self._tokens = list(tokens)
        self._ends: dict[tuple[int, ...], list[int]] = {}  # the shortest match -> positions after it, in order
        self._indexed = SHORTEST_MATCH  # the next position that belongs there

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        self._tokens += tokens

    def find(self, count: int) -> Match | None:
        """Return `count` tokens that followed the longest match; of equal ones the latest. None if there is none.

        Of a long prompt the first calls know a part only.
        """
        self._index()
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

    def _index(self) -> None:
        tokens, stop = self._tokens, min(self._indexed + INDEXED_AT_ONCE, len(self._tokens))
        for place in range(self._indexed, stop):
            self._ends.setdefault(tuple(tokens[place - SHORTEST_MATCH : place]), []).append(place)
        self._indexed = max(self._indexed, stop)

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


class GuessHistory:
    """What the rounds of all replies have taught: how long one takes, what a guess adds, how often drafts are right.

    Medians of the latest rounds, so that a machine that stalls for a moment does not count.
    """

    def __init__(self) -> None:
        self._rounds_s: deque[float] = deque(maxlen=_LATEST)
        # Of a round's time: what the rounds of few guesses say that guesses cost whatever their number (a device that
        # has begun the next step has to begin again), and what those of many say that each row adds.
        self._fixed_shares: deque[float] = deque([0.0] * 2, maxlen=_LATEST)
        self._row_shares: deque[float] = deque([FIRST_ROW_SHARE] * 2, maxlen=_LATEST)
        self._drafts_s: deque[float] = deque(maxlen=_LATEST)
        self._plain_rounds, self._patience = 0, SHORTEST_PATIENCE  # rounds since the last with guesses, and how many
        self._undrafted = 0  # replies since the last with a draft
        self.round_s: float | None = None  # with one row; None: not known yet
        self._fixed_share, self._row_share = 0.0, FIRST_ROW_SHARE
        self.draft_s: float | None = None  # for each token that a draft model guesses; None: not known yet
        self.draft_rate = HitRate(_DRAFT_PRIOR)

    def note(self, rows: int, seconds: float) -> None:
        """Take a round of these many rows, from the first hop to the tokens that were drawn."""
        if rows == 1:
            self._rounds_s.append(seconds)
            self.round_s = median(self._rounds_s)
            self._plain_rounds += 1
            if self._plain_rounds == self._patience:  # a bad figure must not keep guesses away for ever
                self._fixed_shares.clear()
                self._row_shares.clear()
                self._note_fixed_share(0.0)
                self._note_row_share(FIRST_ROW_SHARE)
                self._patience = min(2 * self._patience, LONGEST_PATIENCE)
        elif self.round_s is not None:
            self._plain_rounds, guesses = 0, rows - 1
            share = seconds / max(self.round_s, 1e-9) - 1
            if share <= guesses:
                self._patience = SHORTEST_PATIENCE
            if guesses <= FEW_GUESSES:
                self._note_fixed_share(share - guesses * self._row_share)
            else:
                self._note_row_share((share - self._fixed_share) / guesses)

    def _note_fixed_share(self, share: float) -> None:
        self._fixed_shares.append(min(max(share, 0.0), MOST_FIXED_SHARE))
        self._fixed_share = median(self._fixed_shares)

    def _note_row_share(self, share: float) -> None:
        self._row_shares.append(min(max(share, LEAST_ROW_SHARE), 1.0))
        self._row_share = median(self._row_shares)

    def note_draft(self, tokens: int, seconds: float) -> None:
        """Take the time in which a draft model guessed these many tokens."""
        self._drafts_s.append(seconds / tokens)
        self.draft_s = median(self._drafts_s)

    @property
    def fixed_s(self) -> float:
        """Seconds that guesses add to a round, however many they are."""
        return self._fixed_share * (self.round_s or 0.0)

    @property
    def row_s(self) -> float:
        """Seconds that each guess adds to a round."""
        return self._row_share * (self.round_s or 0.0)

    def promise(self, hit_rates: Sequence[float], guess_s: float = 0.0) -> Promise:
        """What guesses promise that are right so often, if it takes `guess_s` to make each."""
        if self.round_s is None:
            return NO_GUESSES
        return best_count(hit_rates, self.round_s, self.row_s + guess_s, self.fixed_s)

    def draft_promise(self, count: int) -> Promise:
        """What up to `count` guesses of a draft model promise; one, to learn what it takes, if that is not known."""
        if self.round_s is None:
            return NO_GUESSES
        if self.draft_s is None:
            return Promise(min(count, 1), 1.0)
        return self.promise([self.draft_rate.value] * count, self.draft_s)

    def wants_draft(self) -> bool:
        """True if a new reply should have a draft model beside it, which reads the whole prompt."""
        if self.draft_s is None or self.draft_promise(MAX_GUESSES).guesses or self._undrafted >= DRAFT_EVERY:
            self._undrafted = 0
            return True
        self._undrafted += 1
        return False


class Promise(NamedTuple):
    """A number of guesses, and how many times faster than without guesses they are likely to be."""

    guesses: int
    speed: float


NO_GUESSES = Promise(0, 1.0)


def best_count(hit_rates: Sequence[float], round_s: float, guess_s: float, fixed_s: float = 0.0) -> Promise:
    """Return the number of guesses that promises most, with the probability that each is right if all before it were.

    A round takes `round_s`, with guesses `fixed_s` more, and each guess `guess_s` more.
    """
    tokens, seconds, count = 1.0, round_s + fixed_s, 0  # of a round, expected
    reached = 1.0  # probability that all guesses so far are right
    for rate in hit_rates:
        reached *= rate
        # `reached` only falls and the speed so far only grows, so no later guess gains if this one does not.
        if reached * seconds <= tokens * guess_s:
            break
        tokens, seconds, count = tokens + reached, seconds + guess_s, count + 1
    speed = tokens * round_s / seconds if seconds > 0 else 1.0
    return Promise(count, speed) if count and speed >= LEAST_GAIN else NO_GUESSES


@dataclass(frozen=True)
class Proposal:
    """Guesses to send with the next token, or how many a draft model is to make."""

    tokens: tuple[int, ...] = ()
    draft: int = 0


class Guesser:
    """The guesses of one reply."""

    def __init__(self, tokens: Sequence[int], history: GuessHistory) -> None:
        self._lookup = PromptLookup(tokens)
        self._history = history
        self._match_rates = {
            length: HitRate(_MATCH_PRIOR.get(length, _LONG_MATCH_PRIOR))
            for length in range(SHORTEST_MATCH, LONGEST_MATCH + 1)
        }
        self._draft_pause = self._draft_wait = 0  # tokens without a draft: the last pause, and what is left of it
        self._found: Match | None = None
        self._most_found = FEW_GUESSES  # that go along; doubled by rounds that were right
        self._plain_in = PLAIN_EVERY

    def propose(self, room: int, *, can_draft: bool = False) -> Proposal:
        """Return what to send with the next token: at most `room` guesses, drafted ones only if they can be had."""
        count = min(room, MAX_GUESSES)
        self._found = self._lookup.find(count)
        if count < 1 or self._history.round_s is None:
            return Proposal()
        self._plain_in -= 1
        if self._plain_in <= 0:
            return Proposal()
        found = self._lookup_promise()
        drafted = self._draft_promise(count) if can_draft else NO_GUESSES
        if found.guesses and found.speed >= drafted.speed:
            assert self._found is not None
            return Proposal(self._found.tokens[: found.guesses])
        return Proposal(draft=drafted.guesses)

    def _lookup_promise(self) -> Promise:
        if self._found is None:
            return NO_GUESSES
        length = self._found.length
        # A guess that is right makes the match longer.
        rates = [self._rate(length + index).value for index in range(min(len(self._found.tokens), self._most_found))]
        return self._history.promise(rates)

    def _draft_promise(self, count: int) -> Promise:
        if self._draft_wait > 0:
            return NO_GUESSES
        promise = self._history.draft_promise(count)
        return promise if promise.guesses else Promise(1, 1.0)  # one, to learn whether the text has become easier

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
            self._history.note_draft(len(guesses), draft_s)
            for guess, token in zip(guesses, drawn, strict=False):
                self._history.draft_rate.note(guess == token)
                if guess != token:
                    break
            longer = min(max(2 * self._draft_pause, SHORTEST_DRAFT_PAUSE), LONGEST_DRAFT_PAUSE)
            is_worth_it = self._history.draft_promise(MAX_GUESSES).guesses > 0
            self._draft_pause = self._draft_wait = 0 if is_worth_it else longer
        else:
            self._draft_wait -= len(drawn)
            right = right_guesses(guesses, drawn)
            if guesses and right == len(guesses):
                self._most_found = min(2 * self._most_found, MAX_GUESSES)
            elif guesses and not right:
                self._most_found = FEW_GUESSES
        if seconds is not None:
            self._history.note(1 + len(guesses), seconds)
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
