"""The values that a swarm's table speaks in: a member, and a change of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from app.core.reasons import Reason, because
from app.swarm.records import Announcement

# Alive and draining are what a member says of itself; suspect and dead are what this node found; left is said again.
State = Literal["alive", "draining", "suspect", "dead", "left"]

# joined: it is new, or back from the dead. proven: this node was in contact with it for the first time. moved: it says
# another state or span. updated: it says something lesser, such as its speed. recovered: it was suspected wrongly.
ChangeKind = Literal["joined", "proven", "moved", "draining", "updated", "suspected", "recovered", "dead", "left"]

_GONE = {
    "suspect": ("peer_suspect", "it did not answer the last time"),
    "dead": ("peer_dead", "it has not answered for a while"),
    "left": ("peer_left", "it said goodbye"),
}


@dataclass(frozen=True, slots=True)
class Member:
    """Another node of the swarm, as this node knows it."""

    peer: str
    announcement: Announcement
    state: State
    seen_at: float | None  # on this node's clock (trio's): the last contact of its own
    rtt_s: float | None
    raw: bytes = field(repr=False, compare=False)  # the announcement's envelope

    @property
    def proven(self) -> bool:
        """Whether this node itself was ever in contact with it, and does not only know it from others."""
        return self.seen_at is not None

    @property
    def present(self) -> bool:
        """Whether it takes part, as far as this node knows."""
        return self.state not in _GONE

    @property
    def absence(self) -> Reason | None:
        """Why it takes no part, as far as this node knows; None where it does."""
        return None if self.present else because(*_GONE[self.state], self.peer)


@dataclass(frozen=True, slots=True)
class Change:
    """Something happened to a member; `before` is what was known until now."""

    kind: ChangeKind
    member: Member
    before: Member | None = None


Listener = Callable[[Change], None]  # must not block


def spoken_state(said: Announcement) -> State:
    """The state that an announcement claims."""
    if said.state == "left":
        return "left"
    return "draining" if said.state == "draining" else "alive"


def kind_of_news(before: Announcement, said: Announcement) -> ChangeKind:
    """What a newer announcement of a present member is: a change for all to hear, or a lesser update."""
    if said.state == "left":
        return "left"
    if said.state == "draining" and before.state != "draining":
        return "draining"
    return "moved" if (said.state, said.span) != (before.state, before.span) else "updated"


_BECAME = {"joined": "joined", "dead": "is gone: it does not answer", "left": "left", "draining": "is about to leave"}
_DOES = {"serving": "serves", "fetching": "fetches", "loading": "loads", "paused": "pauses", "client": "hosts nothing"}


def in_words(change: Change) -> str:
    """A change as a sentence for people; empty where it is not worth one."""
    said = change.member.announcement
    if change.kind == "moved":
        does = _DOES.get(said.state, f"is {said.state}")
        words = does if said.span is None else f"{does} blocks {said.span}"
    else:
        words = _BECAME.get(change.kind, "")
    return words and f"{change.member.peer} {words}"
