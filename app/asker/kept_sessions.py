"""Sessions of replies that are over, whose cache rests at its hops, and which of them a prompt can begin with. No I/O.

A kept session is a record: its tokens, and where they are cached. Hops may have ended it meanwhile; the new session
then reads again what is missing (`app.asker.route_session`). It may end within the prompt: whoever hangs up while a
long prompt is read, and asks again, has only the rest read. Caches are shared within one asker alone, and only
between requests of one owner, with the same rules for private blocks and the same adapter: how much of a prompt was
cached tells whoever asked for it what was asked before.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from app.routing.route import Privacy, Route
from app.routing.wire_choice import Wires
from app.session.adapter_index import AdapterRef

KEEP_S = 600  # that a session is kept after its reply
MIN_SHARED = 16  # fewer tokens are read again sooner than they are looked up


@dataclass(frozen=True, eq=False)
class CachedSession:
    """A session whose tokens are cached at the hops of its route; kept after its reply, or of a reply under way."""

    id: bytes
    epoch: int
    tokens: array[int]
    privacy: Privacy
    route: Route
    routes: tuple[Route, ...]  # all that its cache was computed on, the last one included
    at: float = 0.0  # when it was kept
    adapter: AdapterRef | None = None  # with which its cache was computed
    wires: Wires = field(default_factory=dict)  # number formats of its rows
    owner: str = ""  # whose request it was
    formats: frozenset[tuple[str, str]] = frozenset()  # peers of `routes`, each with its number format when chosen

    def has_all_of(self, other: CachedSession) -> bool:
        """True if whatever prompt may begin with the other session may as well begin with this one."""
        is_alike = (self.privacy, self.adapter, self.owner) == (other.privacy, other.adapter, other.owner)
        return is_alike and self.tokens[: len(other.tokens)] == other.tokens


@dataclass(frozen=True)
class SharedPrefix:
    """The tokens that a prompt and a cached session begin with."""

    source: CachedSession
    tokens: int

    @property
    def replaces(self) -> bool:
        """True if the source is worth little beside the new session, which has most of its tokens."""
        return 2 * self.tokens >= len(self.source.tokens)


def packed(tokens: Iterable[int]) -> array[int]:
    """Return tokens in a form that is compared as fast as memory is read: prompts are compared with many sessions."""
    return array("I", tokens)


def shared_tokens(prompt: array[int], tokens: array[int]) -> int:
    """Number of tokens that a prompt may take from a cache of `tokens`: never all, as the last one must be answered."""
    shared, most = 0, max(min(len(prompt) - 1, len(tokens)), 0)
    while shared < most:  # the first `shared` are the same, and at most `most` are
        stop = (shared + most + 1) // 2
        if prompt[shared:stop] == tokens[shared:stop]:
            shared = stop
        else:
            most = stop - 1
    return shared


def best_prefix(
    prompt: array[int],
    privacy: Privacy,
    sessions: Iterable[CachedSession],
    adapter: AdapterRef | None = None,
    owner: str = "",
) -> SharedPrefix | None:
    """Return the owner's session that shares most tokens with a prompt, of equal ones the shortest.

    None if all share few.
    """
    alike = [one for one in sessions if (one.privacy, one.adapter, one.owner) == (privacy, adapter, owner)]
    shared = [SharedPrefix(session, shared_tokens(prompt, session.tokens)) for session in alike]
    best = max(shared, key=lambda prefix: (prefix.tokens, -len(prefix.source.tokens)), default=None)
    return best if best is not None and best.tokens >= MIN_SHARED else None


class KeptSessions:
    """The sessions that this asker keeps."""

    def __init__(self) -> None:
        self._kept: list[CachedSession] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[CachedSession]:
        return iter(tuple(self._kept))

    @property
    def tokens(self) -> int:
        """Tokens of all of them."""
        return sum(len(session.tokens) for session in self._kept)

    def add(self, session: CachedSession) -> None:
        """Keep one more session."""
        self._kept.append(session)

    def remove(self, session: CachedSession) -> None:
        """Keep a session no longer: another one goes on with its cache."""
        self._kept.remove(session)

    def surplus(self, limit: int, now: float) -> list[CachedSession]:
        """Remove and return those that are too old, and those beyond `limit`.

        The oldest goes of the owner with the most, or of such owners: whoever keeps many displaces its own.
        """
        gone = [session for session in self._kept if session.at <= now - KEEP_S]
        staying = [session for session in self._kept if session.at > now - KEEP_S]
        while len(staying) > limit:
            held = Counter(session.owner for session in staying)
            gone.append(min(staying, key=lambda session: (-held[session.owner], session.at)))
            staying.remove(gone[-1])
        self._kept = staying
        return gone
