"""A swarm's membership, with nobody in the middle: who is there, how changes spread, and how it is found by name.

member.py     the values: a member, a change
checking.py   the one place where statements are taken or refused
table.py      who is there, bounded and hard to fill
rumours.py    what is to be passed on, and to whom
allowance.py  how much each peer may ask
wire.py       the bodies of the calls (the protocol is specified there)
talk.py       asking, answering, hearing
prober.py     who is looked at, and when
pusher.py     pushes changes
seeking.py    how a node and its swarm find each other
swarm.py      all of these together: `Membership`
"""

from __future__ import annotations

from app.membership.failure_detector import Timing
from app.membership.member import Change, ChangeKind, Listener, Member, State
from app.membership.membership import AnnouncementFields, Membership, MembershipSetup
from app.membership.query_service import QueryService
from app.membership.swarm_search import FoundSwarm, fetch_manifest, resolve_swarm, value_check

__all__ = [
    "AnnouncementFields",
    "Change",
    "ChangeKind",
    "FoundSwarm",
    "Listener",
    "Member",
    "Membership",
    "MembershipSetup",
    "QueryService",
    "State",
    "Timing",
    "fetch_manifest",
    "resolve_swarm",
    "value_check",
]
