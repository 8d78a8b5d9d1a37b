"""The node's state at one moment, as plain values: the API sends them, the command line and dashboard read them.

Reading one needs only the standard library. Unknown fields are ignored and missing ones get their defaults, so that
clients and nodes of neighbouring versions work together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from app.core.reasons import Reason

State = Literal[
    "starting", "idle", "joining", "fetching", "loading", "serving", "client", "paused", "draining", "stopping"
]
STATES: tuple[State, ...] = get_args(State)
JOINED: frozenset[str] = frozenset({"fetching", "loading", "serving", "client", "paused"})


@dataclass(frozen=True)
class PeerView:
    """Another member of the swarm as this node sees it; unknown figures are None."""

    peer: str
    name: str = ""
    start: int | None = None
    stop: int | None = None
    rtt_s: float | None = None
    link: str | None = None  # direct, lan, relayed; None: not connected
    score: float = 1.0
    state: str = ""
    device: str = ""
    tokens_per_s: float = 0.0
    why: str = ""  # reason for the score
    up_bytes: int = 0  # sent to it over the open connection
    down_bytes: int = 0
    unused: Reason | None = None  # why this node's sessions do not use it now
    fetched: float | None = None  # 0 to 1: part of its blocks that it has downloaded, while it downloads
    down_bytes_per_s: float | None = None  # measured speed at which it sends to this node
    prefill_tokens_per_s: float = 0.0  # of prompts
    host: str = ""  # the same for members on one machine, as far as their addresses say; empty: not known


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
class VisitView:
    """Another swarm in which this node asks, while it hosts in its own."""

    swarm: str
    manifest: str
    state: State
    reason: str
    model: str = ""
    members: int = 0  # that are present


@dataclass(frozen=True)
class PublicView:
    """This node in the public libp2p directory."""

    nodes: int = 0  # directory nodes that it knows
    connections: int = 0
    published: int = 0  # keys under which it can be found
    look_ups: int = 0
    bytes_used: int = 0  # in all, sent and received


@dataclass(frozen=True)
class NetworkView:
    """This node's addresses, reachability and connections."""

    advertised: tuple[str, ...] = ()
    reach: str = "unknown"  # unknown, unverified, verified (others have dialled in)
    verified: tuple[str, ...] = ()
    relaying: bool = False
    links: int = 0
    discovery: tuple[str, ...] = ()
    mapping: str = ""  # the protocol, external address and port that a router forwards to this node
    mapping_problem: str = ""  # why there is none; empty too if none is wanted
    relays: tuple[str, ...] = ()  # at which this node has a reservation
    public: PublicView | None = None  # unless it is not used
    strangers: tuple[str, ...] = ()  # a few connected peers that are not members, or not yet


@dataclass(frozen=True)
class DeviceView:
    """A device that computes here, with its memory and load; figures that cannot be read are None."""

    id: str
    name: str = ""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    limit_bytes: int | None = None  # the user's memory cap
    weights_bytes: int = 0
    cache_bytes: int = 0  # reserved for sessions
    cache_used_bytes: int = 0
    load: float | None = None  # 0 to 1
    temperature_c: float | None = None
    power_w: float | None = None
    step_s: float | None = None  # smoothed time of a decode step
    quantisation: str = "none"
    cache: str = "own"  # how keys and values are kept
    start: int | None = None  # the blocks that lie on it
    stop: int | None = None

    @property
    def cache_held_bytes(self) -> int:
        """Memory that the cache takes now: a processor's takes what sessions fill, a card's all of it at once."""
        return self.cache_used_bytes if self.id.startswith("cpu") else self.cache_bytes

    @property
    def held_bytes(self) -> int:
        """Memory that hosting takes now."""
        return self.weights_bytes + self.cache_held_bytes

    @property
    def reserved_bytes(self) -> int:
        """Memory that hosting takes once the cache is full."""
        return self.weights_bytes + self.cache_bytes

    @property
    def others_bytes(self) -> int | None:
        """Memory that is neither free nor taken by hosting: that of other programs, and of the rest of this one."""
        if self.memory_total_bytes is None or self.memory_free_bytes is None:
            return None
        return max(0, self.memory_total_bytes - self.held_bytes - self.memory_free_bytes)


def weight_words(quantisation: str) -> str:
    """Say how hosted weights are kept; empty for the usual numbers of 16 or 32 bits."""
    words = {"none": "", "int8": "8 bits", "int4": "4 bits", "stored": "the file's own bits"}
    return words.get(quantisation, quantisation)


def cache_words(cache: str) -> str:
    """Say how the cache of sessions is kept; empty if it has the numbers that blocks compute with."""
    return {"own": "", "int8": "a cache in 8 bits"}.get(cache, cache)


@dataclass(frozen=True)
class SessionView:
    """A sequence being generated: asked for by this node's user, or served for another peer."""

    id: str
    role: str  # asking, serving
    asker: str  # peer id
    tokens: int = 0
    age_s: float = 0.0
    tokens_per_s: float = 0.0
    start: int | None = None
    stop: int | None = None
    recoveries: int = 0
    prompt_done: int | None = None  # prompt tokens that have passed all blocks, before the first new token
    prompt_tokens: int | None = None  # of `tokens`; None: not known, as for the sessions of others
    guessed_tokens: int = 0  # sent along with others, of those asked here
    accepted_tokens: int = 0  # guesses that were right


@dataclass(frozen=True)
class HopView:
    """One hop of a route, and where a token's time is spent there."""

    peer: str
    start: int
    stop: int
    link: str | None = None  # kind of link into it: lan, direct, relayed
    link_s: float | None = None  # one way
    compute_s: float | None = None
    queue_s: float | None = None
    host_s: float | None = None  # to send its output on


@dataclass(frozen=True)
class RouteView:
    """The route of this node's latest reply."""

    session: str
    hops: tuple[HopView, ...] = ()
    return_s: float | None = None  # from the last hop back
    ends_s: float | None = None  # embedding, head and sampling here
    token_s: float | None = None
    host_s: float | None = None  # here: to send a token, to come back to the answer, and to pass the text on
    prompt_tokens: int = 0  # that the hops read before the first token
    prompt_s: float | None = None  # until they had; None if one of them was lost

    @property
    def known_s(self) -> float:
        """The parts of a token's time that are known, added up."""
        parts = [part for hop in self.hops for part in (hop.link_s, hop.compute_s, hop.queue_s, hop.host_s)]
        return sum(part for part in (*parts, self.return_s, self.ends_s, self.host_s) if part is not None)

    @property
    def is_reported(self) -> bool:
        """True if every hop has reported its times, as each does every 16 tokens."""
        return all(hop.compute_s is not None for hop in self.hops)


@dataclass(frozen=True)
class FlowView:
    """Current throughput of this node."""

    served_tokens_per_s: float = 0.0
    asked_tokens_per_s: float = 0.0
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    steps_per_s: float = 0.0
    batch_rows: float = 0.0  # mean rows of a step
    queued: int = 0  # sessions waiting for a step


@dataclass(frozen=True)
class ReuseView:
    """How much of the prompts was cached at the hops since the node joined the swarm, and what rests here."""

    prompt_tokens: int = 0  # of this node's replies
    cached_tokens: int = 0  # of these, not read again
    kept_sessions: int = 0  # of this node, whose cache rests at its hops now
    kept_tokens: int = 0
    resting_sessions: int = 0  # of any asker, whose cache rests here now
    resting_tokens: int = 0
    reused_tokens: int = 0  # cached here, that new sessions began with


@dataclass(frozen=True)
class GuessView:
    """Guessed tokens of this node's replies since it joined the swarm, and the model that guesses."""

    guessed_tokens: int = 0  # sent through the hops along with others
    accepted_tokens: int = 0  # guesses that were right: each saved a trip through all hops
    draft_model: str = ""  # empty: none, guesses come from the conversation alone


@dataclass(frozen=True)
class GivenView:
    """Totals of what this node contributed and used."""

    served_tokens: int = 0
    asked_tokens: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    peers: int = 0  # peers that were served
    audits: int = 0
    audits_passed: int = 0


@dataclass(frozen=True)
class RuleView:
    """One courtesy rule and its present state."""

    code: str
    label: str
    enabled: bool = False
    applies: bool = False
    available: bool = True  # this machine has the sensor
    text: str = ""


@dataclass(frozen=True)
class CourtesyView:
    """The pause of this node, its cause and end, and the rules that could pause it."""

    paused: bool = False
    by: str = ""  # hand, rule
    until_ms: int | None = None
    next_text: str = ""  # the next scheduled pause
    rules: tuple[RuleView, ...] = ()


@dataclass(frozen=True)
class StepView:
    """One startup step, or the preparation of a model."""

    key: str  # identity, peers, manifest, weights, load, measure, announce; ends if downloaded; fetch, read
    title: str
    state: str = "pending"  # pending, running, done, failed
    detail: str = ""
    done: int | None = None
    total: int | None = None
    seconds_left: float | None = None
    took_s: float | None = None  # once it is done


@dataclass(frozen=True)
class WeightsView:
    """The model's parts on this machine."""

    parts_total: int = 0
    parts_held: int = 0
    parts_verified: int = 0
    bytes_total: int = 0
    bytes_held: int = 0
    from_peers_bytes: int = 0
    given_bytes: int = 0  # sent to peers since the node joined this swarm
    giving: tuple[str, ...] = ()  # peers that download from this node now
    cache_bytes: int = 0
    cache_limit_bytes: int | None = None


@dataclass(frozen=True)
class FitView:
    """Number of a model's blocks that fit on this machine's device."""

    blocks: int  # that fit now
    blocks_total: int
    lacking_bytes: int = 0  # free memory missing for all blocks
    too_large: bool = False  # would not fit even if nothing else ran


@dataclass(frozen=True)
class OfferView:
    """A swarm or model that this node could join or start; unknown figures are None."""

    target: str  # a remembered or nearby swarm, or `starter`
    model: str = ""
    fit: FitView | None = None
    fetch_bytes: int | None = None
    nearby: str = ""  # link to a neighbour in it: lan, direct, relayed; empty: none was met
    members: int | None = None
    tokens_per_s: float | None = None  # estimated for a reply through its present members
    missing_block: int | None = None  # a block that none of its members serves
    alone_tokens_per_s: float | None = None  # estimated on this machine alone; None: it does not fit
    private: bool = False
    size_bytes: int | None = None  # of the whole model
    context_length: int | None = None


@dataclass(frozen=True)
class ModelView:
    """A model that a swarm could be created of."""

    name: str  # as `create` takes it: a built-in name, a path, or a name of the Hugging Face Hub
    title: str
    size_bytes: int | None = None
    format: str = ""  # GGUF, safetensors; empty: not known
    here: bool = False  # on this machine


@dataclass(frozen=True)
class GuestView:
    """A peer that joined with an invite, or asks to; `name` is its own word."""

    peer: str
    name: str = ""
    at_ms: int = 0


@dataclass(frozen=True)
class InviteView:
    """One limited invite that this node made, without its token."""

    id: str
    state: str  # open, used, expired, cancelled
    made_at_ms: int
    expires_at_ms: int
    uses: int
    approve: bool = False
    delegate: bool = False
    admitted: tuple[GuestView, ...] = ()
    waiting: tuple[GuestView, ...] = ()


@dataclass(frozen=True)
class JobHopView:
    """One hop of a fine-tuning job, and the blocks that it trains; others may train them too."""

    peer: str
    start: int
    stop: int
    micro_batches: int = 0  # that went through it since the job runs


@dataclass(frozen=True)
class JobLinkView:
    """Bytes of hidden states and gradients that a fine-tuning job has sent from one peer to another."""

    sender: str
    receiver: str
    bytes: int


@dataclass(frozen=True)
class JobView:
    """A fine-tuning job of this home and how far it is; the last fields only while it runs over a swarm."""

    job: str
    out: str
    model: str  # hash
    model_name: str
    data: str
    swarm: str  # id; empty: it runs in one process
    status: str
    step: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float | None
    left_s: float | None  # until it is finished; None: not known, or it does not run
    loss: float | None
    losses: tuple[float, ...]  # of the latest steps
    validation: tuple[tuple[int, float], ...]  # (step, loss)
    why: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    left_out: dict[str, str] | None = None  # hop that trained wrongly, or may have -> how that was found
    cut: int = 0  # records that are longer than the job's length
    dropped: int = 0  # of these, those with no answer left
    hops: tuple[JobHopView, ...] = ()
    recoveries: int = 0
    micro_batches_again: int = 0
    rejected: dict[str, int] | None = None  # hop -> frames that were not computed with
    rejected_why: dict[str, str] | None = None  # hop -> the latest reason
    audits: int = 0  # of hops whose blocks others hold too
    lost: tuple[str, ...] = ()  # why the latest recoveries were needed
    bytes_out: int = 0
    bytes_in: int = 0
    snapshots_s: float = 0.0  # that snapshots of the job took, besides `seconds`
    wire: str = ""  # number format between the hops
    bytes_per_link: tuple[JobLinkView, ...] = ()
    waiting: str = ""  # what keeps a running job from its next step; it goes on by itself


@dataclass(frozen=True)
class IslandView:
    """One island of a training job, and what it did in the last round."""

    peer: str
    here: bool = False
    alive: bool = False
    steps: int = 0
    tokens: int = 0
    tokens_per_s: float | None = None  # until its change was there, as seen from this node
    lag_s: float | None = None  # after the first island
    data: dict[str, Any] | None = None  # tokens, source and licence, if it trains on a text of its own


@dataclass(frozen=True)
class TrainingView:
    """A training job that this node takes part in, or did: `app.rounds.train_store` has the same facts."""

    job: str
    name: str
    status: str
    why: str
    round: int
    step: int
    steps: int
    loss: float | None
    validation_loss: float | None
    tokens: int
    tokens_per_s: float | None  # of all islands, in the last round
    left_out: dict[str, str]  # island -> why it takes no more part
    bytes_per_round: int
    utilisation: float | None
    waiting: str  # for whom a round waits, and until when; or what the whole job waits for
    every: int
    wire: str
    checkpoint_age_s: float | None
    islands: tuple[IslandView, ...] = ()
    losses: tuple[float, ...] = ()  # of the latest steps made here
    validation: tuple[tuple[int, float], ...] = ()  # (step, loss), after the latest rounds
    doubted: dict[str, str] | None = None  # island -> how its change in the last round was unlike the others'
    resting: dict[str, str] | None = None  # island that failed in exchanges -> until when it is not expected
    left_s: float | None = None  # until the job is finished; None: not known, or it does not run
    swarm: str = ""  # the name of its swarm


@dataclass(frozen=True)
class JoinableView:
    """A training job of other members that this node could join."""

    job: str
    name: str
    founder: str  # peer id
    steps: int
    own_data: bool = False  # every member names a text of its own

    @property
    def join_command(self) -> str:
        """What to type to take part."""
        return f"`shoal train join {self.name}{' --data FILE' if self.own_data else ''}`"


@dataclass(frozen=True)
class TrainedView:
    """A fine-tuning job that trains blocks of this node now."""

    owner: str  # peer id
    start: int
    stop: int
    steps_s: float = 0.0  # of its steps here, without the first one on each route
    computed_s: float = 0.0  # of these, in which this node computed; in the rest it waited for other members


@dataclass(frozen=True)
class ProspectsView:
    """The swarms that this node could join, and the free space of its disk."""

    offers: tuple[OfferView, ...] = ()
    device: DeviceView | None = None  # device that would be used
    disk_free_bytes: int | None = None
    reading_bytes_per_s: float | None = None  # measured speed at which the device reads weights


@dataclass(frozen=True)
class Snapshot:
    """Everything that the user can see of a running node."""

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
    context_length: int | None = None  # most tokens of a conversation
    why: Reason | None = None  # reason for the state; `reason` is its text
    warnings: tuple[Reason, ...] = ()  # what is wrong, whatever the state; the worst first
    hardware: DeviceView | None = None  # the first of the devices
    devices: tuple[DeviceView, ...] = ()  # all of them, if there are several
    active_sessions: tuple[SessionView, ...] = ()
    route: RouteView | None = None
    flow: FlowView = FlowView()
    reuse: ReuseView = ReuseView()
    guesses: GuessView = GuessView()
    today: GivenView = GivenView()
    ever: GivenView = GivenView()
    courtesy: CourtesyView = CourtesyView()
    steps: tuple[StepView, ...] = ()
    weights: WeightsView | None = None
    visit: VisitView | None = None
    requests: tuple[GuestView, ...] = ()  # peers that ask to join with an invite of this node and wait for approval
    trained: tuple[TrainedView, ...] = ()  # jobs of any member that train blocks of this node now
    prefill_tokens_per_s: float = 0.0  # of prompts, through its own blocks
    lan_url: str = ""  # where other machines reach the API; empty: nowhere
    lan_fingerprint: str = ""  # SHA-256 of the certificate there
    preparing: StepView | None = None  # a model that is downloaded or read, to create a swarm of it
