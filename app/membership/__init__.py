"""The members of a swarm as one node knows them: SWIM-like probes and gossip.

It knows who is a member, whether each one is alive (by this node's own probes only), how announcements spread, and how
a swarm, its record and its manifest are found by name. It does not know what members host or compute: `app.routing` and
`app.hosting` derive that from the announcements. The signed formats, names and rendezvous keys are in `app.swarm`.

member.py            values: a member, a change of one
table.py             the members, bounded in number and hard to flood
guard.py             serves and calls only peers with a certificate, in guarded swarms
gossip_queue.py      statements waiting to be sent to other members
wire.py              bodies of the calls, and their specification
clocks.py            how far this machine's clock is from its peers'
exchange.py          makes and answers the calls; parses, verifies and processes received statements
failure_detector.py  decides which member to probe, and when
gossip.py            pushes urgent statements
bootstrap.py         finds other members and lets them find this node
membership.py        `Membership`, which combines all of these
query_service.py     answers non-members that ask about swarms and manifests
swarm_search.py      asks others which swarm a name means, and for its manifest
"""

from __future__ import annotations

from app.membership.clocks import PeerClocks
from app.membership.failure_detector import Timing
from app.membership.guard import GuardedNetwork
from app.membership.member import Change, ChangeKind, Listener, Member, State
from app.membership.membership import AnnouncementFields, Membership, MembershipSetup
from app.membership.query_service import QueryService
from app.membership.swarm_search import FoundSwarm, fetch_manifest, resolve_swarm, value_check

__all__ = [
    "AnnouncementFields",
    "Change",
    "ChangeKind",
    "FoundSwarm",
    "GuardedNetwork",
    "Listener",
    "Member",
    "Membership",
    "MembershipSetup",
    "PeerClocks",
    "QueryService",
    "State",
    "Timing",
    "fetch_manifest",
    "resolve_swarm",
    "value_check",
]
