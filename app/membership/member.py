"""Values of the membership table: a member, its state, and a change of it. Pure.

`app.membership.table` decides the states; this module only names and words them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from app.core.reasons import Reason, because
from app.swarm.records import Announcement

# Members announce alive, draining and left themselves; suspect and dead come from this node's own probes.
State = Literal["alive", "draining", "suspect", "dead", "left"]

# joined: new, or back after it was dead. proven: this node's first own contact with it. moved: it announced another
# state or span. updated: it announced a minor change, such as its speed. recovered: it was suspect and answered.
ChangeKind = Literal["joined", "proven", "moved", "draining", "updated", "suspected", "recovered", "dead", "left"]

_GONE = {
    "suspect": ("peer_suspect", "it did not answer the last probe"),
    "dead": ("peer_dead", "it has not answered for a while"),
    "left": ("peer_left", "it left the swarm"),
}


@dataclass(frozen=True, slots=True)
class Member:
    """Another node of the swarm, with the state that this node believes it to be in."""

    peer: str
    announcement: Announcement
    state: State
    seen_at: float | None  # time of this node's last own contact with it, on trio's clock; None: never
    rtt_s: float | None
    home: str = ""  # that it had at that contact (`app.serving.homes`)

    @property
    def proven(self) -> bool:
        """True if this node itself was ever in contact with it; False if it is known from other members only."""
        return self.seen_at is not None

    @property
    def present(self) -> bool:
        """True unless this node believes it suspect, dead or left."""
        return self.state not in _GONE

    @property
    def absence(self) -> Reason | None:
        """The reason why this node does not use the member; None if it is present."""
        return None if self.present else because(*_GONE[self.state], self.peer)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one member; `before` is its previous value, None if it was unknown."""

    kind: ChangeKind
    member: Member
    before: Member | None = None


Listener = Callable[[Change], None]  # called synchronously; must not block


def announced_state(announcement: Announcement) -> State:
    """Return the table state that corresponds to the state in an announcement."""
    if announcement.state == "left":
        return "left"
    return "draining" if announcement.state == "draining" else "alive"


def kind_of_news(before: Announcement, announcement: Announcement) -> ChangeKind:
    """Classify a newer announcement of a present member; all kinds except `updated` are pushed to everybody at once."""
    if announcement.state == "left":
        return "left"
    if announcement.state == "draining" and before.state != "draining":
        return "draining"
    return "moved" if (announcement.state, announcement.span) != (before.state, before.span) else "updated"


_BECAME = {
    "proven": "joined",
    "joined": "joined",  # again: it was dead
    "dead": "does not answer this node any more",  # it may be gone, or have banned this node
    "left": "left",
    "draining": "is about to stop serving its blocks",  # for good, to pause or to load others
}
_DOES = {"serving": "serves", "fetching": "fetches", "loading": "loads", "paused": "pauses", "client": "hosts nothing"}


def describe(change: Change) -> str:
    """Return a change as a sentence for the event log; empty for kinds that are not shown.

    Members that this node has not contacted itself are not mentioned: anybody can make up thousands of them.
    """
    announcement = change.member.announcement
    if not change.member.proven:
        return ""
    if change.kind == "moved":
        does = _DOES.get(announcement.state, f"is {announcement.state}")
        words = does if announcement.span is None else f"{does} blocks {announcement.span}"
    else:
        words = _BECAME.get(change.kind, "")
    return words and f"{change.member.peer} {words}"
