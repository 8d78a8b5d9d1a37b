"""The node's state at one moment, as values that travel: the API sends them, the command line and dashboard read them.

Only the standard library is needed to read one. Fields that a reader does not know are ignored and missing ones have
their defaults, so that a client and a node of neighbouring versions understand each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from app.core.reasons import Reason

State = Literal[
    "starting", "idle", "joining", "fetching", "loading", "serving", "client", "paused", "draining", "stopping"
]
STATES: tuple[State, ...] = get_args(State)
JOINED: frozenset[str] = frozenset({"fetching", "loading", "serving", "client", "paused"})


@dataclass(frozen=True)
class PeerView:
    """Another member of the swarm as this node sees it; a figure that is not known is None."""

    peer: str
    name: str = ""
    start: int | None = None
    stop: int | None = None
    rtt_s: float | None = None
    link: str | None = None  # direct, lan, relayed; None: no connection is open
    score: float = 1.0
    state: str = ""
    device: str = ""
    tokens_per_s: float = 0.0
    why: str = ""  # what the score is about
    up_bytes: int = 0  # sent to it over the open link
    down_bytes: int = 0
    unused: Reason | None = None  # why this node's sessions do not go through it now
    fetched: float | None = None  # 0 to 1: how much of its blocks has come, while they come


@dataclass(frozen=True)
class SwarmView:
    """A swarm that this node remembers."""

    name: str
    manifest: str
    pinned: str
    private: bool = False
    active: bool = False
    joined_at_ms: int = 0


@dataclass(frozen=True)
class NetworkView:
    """How this node hangs on the network."""

    advertised: tuple[str, ...] = ()
    reach: str = "unknown"  # unknown, verified, unverified: whether others were seen to dial in
    verified: tuple[str, ...] = ()
    relaying: bool = False
    links: int = 0
    discovery: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()  # linked peers that are no members, or not yet; a few of them


@dataclass(frozen=True)
class DeviceView:
    """What computes here, and what it is doing; a figure that cannot be read is None."""

    id: str
    name: str = ""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    limit_bytes: int | None = None  # the person's cap
    weights_bytes: int = 0
    cache_bytes: int = 0  # set aside for sessions
    cache_used_bytes: int = 0
    load: float | None = None  # 0 to 1
    temperature_c: float | None = None
    power_w: float | None = None
    step_s: float | None = None  # a usual decode step
    quantisation: str = "none"


@dataclass(frozen=True)
class SessionView:
    """A sequence that is being generated: asked by this node's user, or served for somebody."""

    id: str
    role: str  # asking, serving
    asker: str  # peer id
    tokens: int = 0
    age_s: float = 0.0
    tokens_per_s: float = 0.0
    start: int | None = None
    stop: int | None = None
    recoveries: int = 0
    prompt_done: int | None = None  # of the tokens, those that went through all blocks before the first new one


@dataclass(frozen=True)
class HopView:
    """One hop of a route, and where a token's time goes there."""

    peer: str
    start: int
    stop: int
    link: str | None = None  # of the way into it: lan, direct, relayed
    link_s: float | None = None  # one way
    compute_s: float | None = None
    queue_s: float | None = None


@dataclass(frozen=True)
class RouteView:
    """The way of this node's latest reply."""

    session: str
    hops: tuple[HopView, ...] = ()
    return_s: float | None = None  # from the last hop back
    ends_s: float | None = None  # embedding, head and sampling here
    token_s: float | None = None


@dataclass(frozen=True)
class FlowView:
    """What goes through this node at the moment."""

    served_tokens_per_s: float = 0.0
    asked_tokens_per_s: float = 0.0
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    steps_per_s: float = 0.0
    batch_rows: float = 0.0  # mean rows of a step
    queued: int = 0  # sessions that wait for a step


@dataclass(frozen=True)
class GivenView:
    """What this node gave and got."""

    served_tokens: int = 0
    asked_tokens: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    peers: int = 0  # that were served
    audits: int = 0
    audits_passed: int = 0


@dataclass(frozen=True)
class RuleView:
    """One courtesy rule as it stands now."""

    code: str
    label: str
    enabled: bool = False
    applies: bool = False
    available: bool = True  # whether this machine has the sensor
    text: str = ""


@dataclass(frozen=True)
class CourtesyView:
    """Whether this node is paused, by whom and until when, and what would pause it."""

    paused: bool = False
    by: str = ""  # hand, rule
    until_ms: int | None = None
    next_text: str = ""  # the next pause that is known beforehand
    rules: tuple[RuleView, ...] = ()


@dataclass(frozen=True)
class StepView:
    """One step of coming up."""

    key: str  # identity, peers, manifest, weights, load, measure, announce; ends where they have to come
    title: str
    state: str = "pending"  # pending, running, done, failed
    detail: str = ""
    done: int | None = None
    total: int | None = None
    seconds_left: float | None = None


@dataclass(frozen=True)
class WeightsView:
    """The model's files on this machine."""

    parts_total: int = 0
    parts_held: int = 0
    parts_verified: int = 0
    bytes_total: int = 0
    bytes_held: int = 0
    from_peers_bytes: int = 0
    given_bytes: int = 0  # to peers, since the node is in this swarm
    giving: tuple[str, ...] = ()  # peers that fetch from here now
    cache_bytes: int = 0
    cache_limit_bytes: int | None = None


@dataclass(frozen=True)
class FitView:
    """Whether a model's blocks fit on this machine's device."""

    blocks: int  # that fit now
    blocks_total: int
    lacking_bytes: int = 0  # of free memory, until all fit
    too_large: bool = False  # all would not fit even if nothing else ran


@dataclass(frozen=True)
class OfferView:
    """Something that this node could go to; a figure that is not known is None."""

    target: str  # a swarm that is remembered or nearby, or `starter`
    model: str = ""
    fit: FitView | None = None
    fetch_bytes: int | None = None
    nearby: str = ""  # how the neighbour is linked that is in it: lan, direct, relayed; empty: none was met
    members: int | None = None
    tokens_per_s: float | None = None  # of a reply through its members as they are, estimated
    missing_block: int | None = None  # that none of its members serves
    alone_tokens_per_s: float | None = None  # of a reply on this machine alone, estimated; None: it would not fit


@dataclass(frozen=True)
class ProspectsView:
    """What this node could go to, and the disk's room."""

    offers: tuple[OfferView, ...] = ()
    device: DeviceView | None = None  # that would be used
    disk_free_bytes: int | None = None
    reading_bytes_per_s: float | None = None  # how fast the device goes through weights, measured


@dataclass(frozen=True)
class Snapshot:
    """Everything that a person can see of a running node."""

    peer_id: str
    state: State
    reason: str
    api_url: str
    name: str = ""
    swarm: str | None = None
    manifest: str | None = None
    private: bool = False
    blocks_total: int | None = None
    start: int | None = None
    stop: int | None = None
    device: str | None = None
    sessions: int = 0
    tokens_per_s: float = 0.0
    listen_addrs: tuple[str, ...] = ()
    version: str = ""
    pid: int = 0
    started_at_ms: int = 0
    network: NetworkView = NetworkView()
    peers: tuple[PeerView, ...] = ()
    swarms: tuple[SwarmView, ...] = ()
    model: str = ""  # the model's name
    why: Reason | None = None  # of the state; `reason` is its text
    hardware: DeviceView | None = None
    active_sessions: tuple[SessionView, ...] = ()
    route: RouteView | None = None
    flow: FlowView = FlowView()
    today: GivenView = GivenView()
    ever: GivenView = GivenView()
    courtesy: CourtesyView = CourtesyView()
    steps: tuple[StepView, ...] = ()
    weights: WeightsView | None = None
