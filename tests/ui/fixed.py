"""Fixed snapshots: the same figures in every run, for the screens' tests."""

from __future__ import annotations

from dataclasses import replace

from app.core.reasons import Reason
from app.snapshot.views import (
    CourtesyView,
    DeviceView,
    FlowView,
    GivenView,
    HopView,
    IslandView,
    JobHopView,
    JobLinkView,
    JobView,
    NetworkView,
    PeerView,
    RouteView,
    RuleView,
    SessionView,
    Snapshot,
    StepView,
    SwarmView,
    TrainedView,
    TrainingView,
    WeightsView,
)
from ui.state.store import ConnectionState, Store

GB = 10**9
ME = "12D3KooWMe"
MANIFEST = "1a2b3c4d" * 8

_PEERS = (
    ("tern", 0, 16, 100, 0.012, "direct", 1.0, "RTX 4090"),
    ("petrel", 0, 12, 61, 0.028, "direct", 0.99, "M2 Max"),
    ("gannet", 4, 20, 66, 0.031, "direct", 0.98, "RX 7900 XT"),
    ("murre", 12, 26, 72, 0.018, "direct", 0.91, "RTX 4070"),
    ("heron", 16, 34, 77, 0.009, "lan", 1.0, "RTX 3090"),
    ("avocet", 20, 36, 58, 0.044, "direct", 0.97, "RTX 3080"),
    ("puffin", 30, 42, 49, 0.022, "direct", 0.99, "RTX 4060 Ti"),
    ("skua", 40, 55, 66, 0.016, "direct", 1.0, "RTX 3090"),
    ("pike", 46, 55, 71, 0.019, "direct", 1.0, "RTX 3060 Ti"),
    ("mako", 55, 62, 48, 0.084, "relayed", 0.96, "GTX 1080 Ti"),
    ("osprey", 62, 80, 38, 0.017, "direct", 1.0, "RTX A4000"),
    ("eider", 62, 74, 55, 0.052, "direct", 0.99, "M1 Ultra"),
    ("dunlin", 70, 80, 31, None, None, 1.0, "Arc A770"),
)
PEERS = tuple(
    PeerView(f"12D3KooW{name}", name, start, stop, rtt, link, score, "serving", device, float(speed))
    for name, start, stop, speed, rtt, link, score, device in _PEERS
)
STEPS = (
    StepView("identity", "identity", "done", "12D3KooWMe"),
    StepView("peers", "peers", "done", "13 found"),
    StepView("manifest", "manifest", "done"),
    StepView("weights", "weights", "running", "from heron and puffin", 5 * GB // 2, 11 * GB // 2, 41.0),
    StepView("load", "load"),
    StepView("measure", "measure"),
    StepView("announce", "announce"),
)
ROUTE = RouteView(
    "s0",
    (
        HopView(PEERS[0].peer, 0, 16, "direct", 0.006, 0.010, 0.0),
        HopView(PEERS[4].peer, 16, 34, "lan", 0.008, 0.013, 0.0),
        HopView(ME, 34, 46, "direct", 0.005, 0.023, 0.0),
        HopView(PEERS[8].peer, 46, 55, "direct", 0.010, 0.014, 0.0),
        HopView(PEERS[9].peer, 55, 62, "relayed", 0.041, 0.021, 0.0),
        HopView(PEERS[10].peer, 62, 80, "relayed", 0.038, 0.026, 0.0),
    ),
    return_s=0.009,
    ends_s=0.0,
    token_s=0.224,
)
RULES = (
    RuleView("pause_busy", "another program uses the device", True, False, True, "other programs use 3 %"),
    RuleView("pause_battery", "on battery", True, False, True, "on mains"),
    RuleView("pause_heat", "too hot", True, False, True, "pauses at 83"),
    RuleView("pause_active", "somebody uses this machine", False, False, True),
    RuleView("pause_schedule", "by timetable", True, False, True),
)
_RUNNING = JobView(
    job="3f9a1c2b7d04",
    out="club-facts",
    model=MANIFEST,
    model_name="Llama-3.1-70B",
    data="/home/kelp/writing/club-facts.jsonl",
    swarm="swarm",
    status="running",
    step=148,
    steps=400,
    tokens=96_400,
    seconds=812.0,
    tokens_per_s=118.7,
    left_s=1390.0,
    loss=1.204,
    losses=tuple(0.9 + 2.6 / (1 + step / 12) + 0.1 * ((step * 7) % 11) / 11 for step in range(148)),
    validation=((0, 3.412), (100, 1.631)),
    why="",
    rank=8,
    alpha=16.0,
    targets=("q", "k", "v", "o", "gate", "up", "down"),
    hops=tuple(JobHopView(hop.peer, hop.start, hop.stop) for hop in ROUTE.hops),
    recoveries=2,
    micro_batches_again=11,
    rejected={PEERS[9].peer: 3},
    rejected_why={PEERS[9].peer: "numbers of size nan are not finite, or far beyond the usual"},
    lost=("pike: it has not answered for 20 s",),
    bytes_out=412 * 10**6,
    bytes_in=398 * 10**6,
    wire="int8",
    bytes_per_link=(
        JobLinkView(ME, ROUTE.hops[0].peer, 206 * 10**6),
        JobLinkView(ROUTE.hops[0].peer, ME, 199 * 10**6),
    ),
)
_IDLE = replace(
    _RUNNING, hops=(), left_s=None, recoveries=0, micro_batches_again=0, rejected=None, rejected_why=None, lost=(),
    bytes_out=0, bytes_in=0, bytes_per_link=(),
)  # fmt: skip
JOBS = (
    _RUNNING,
    replace(_IDLE, job="b81e55d0aa17", out="tone", status="failed", step=20, losses=_RUNNING.losses[:20],
            why="no step could be made in 5 attempts; the last failed with mako: it does not train"),
    replace(_IDLE, job="0c44e9f1d2b3", out="diary", status="paused", swarm="", step=0, tokens=0, seconds=0.0,
            tokens_per_s=None, loss=None, losses=(), validation=()),
    replace(_IDLE, job="77aa01bc93fe", out="birds", status="finished", step=400, loss=0.61),
)  # fmt: skip
TRAINING = TrainingView(
    job="9d20c7e41b68",
    name="poems",
    status="running",
    why="",
    round=12,
    step=600,
    steps=2000,
    loss=2.417,
    validation_loss=2.361,
    tokens=1_843_200,
    tokens_per_s=412.0,
    left_out={PEERS[9].peer: "its change agrees by -0.31 with the others, usual is 0.46"},
    bytes_per_round=12_400_000,
    utilisation=0.913,
    waiting="waits for pike, for 12 s at most",
    every=50,
    wire="int8",
    checkpoint_age_s=41.0,
    islands=(
        IslandView(ME, here=True, alive=True, steps=50, tokens=51_200, tokens_per_s=141.0, lag_s=0.0),
        IslandView(PEERS[0].peer, alive=True, steps=50, tokens=51_200, tokens_per_s=138.2, lag_s=1.4),
        IslandView(PEERS[4].peer, alive=True, steps=44, tokens=45_056, tokens_per_s=118.9, lag_s=2.0),
        IslandView(PEERS[8].peer, alive=False),
    ),
    losses=tuple(2.2 + 3.0 / (1 + step / 40) + 0.1 * ((step * 7) % 11) / 11 for step in range(400)),
    validation=tuple((50 * turn, 2.2 + 3.2 / (1 + turn / 1.2)) for turn in range(1, 13)),
    doubted={PEERS[4].peer: "its change has the norm 9.1, the median is 1.6"},
    left_s=8400.0,
)
HEALTHY = Snapshot(
    ME,
    "serving",
    "chosen: 36:40 had one holder when you joined",
    "http://127.0.0.1:7465",
    name="kelp",
    swarm="reading-club",
    manifest=MANIFEST,
    blocks_total=80,
    start=34,
    stop=46,
    device="cuda:0",
    sessions=3,
    tokens_per_s=43.0,
    version="0.1.0",
    network=NetworkView(reach="verified", links=13, mapping="UPnP 203.0.113.7:7464"),
    peers=PEERS,
    swarms=(SwarmView("reading-club", MANIFEST, "reading-club#1a2b3c4d1a2b3c4d1a2b", active=True),),
    model="Llama-3.1-70B",
    why=Reason("few_holders", "chosen: 36:40 had one holder when you joined"),
    hardware=DeviceView(
        "cuda:0", "RTX 3060", 12 * GB, 42 * GB // 10, 7 * GB, 55 * GB // 10, 9 * GB // 10, 0, 0.61, 68.0, 118.0, 0.023
    ),
    active_sessions=(
        SessionView("s0", "asking", ME, 312, 69.0, 4.5),
        SessionView("s1", "serving", PEERS[1].peer, 1204, 400.0, 4.1, 34, 46),
        SessionView("s2", "serving", PEERS[11].peer, 88, 19.0, 3.8, 34, 46, 1),
    ),
    route=ROUTE,
    flow=FlowView(28.4, 4.5, 475_000.0, 462_500.0, 40.0, 2.5, 0),
    today=GivenView(612_000, 38_000, 5 * GB, 4 * GB, 9, 212, 212),
    courtesy=CourtesyView(next_text="pauses at 18:00 (weekday schedule)", rules=RULES),
    steps=tuple(replace(step, state="done", done=None, total=None, seconds_left=None) for step in STEPS),
    weights=WeightsView(
        14,
        14,
        14,
        55 * GB // 10,
        55 * GB // 10,
        55 * GB // 10,
        giving=(PEERS[5].peer,),
        cache_bytes=56 * GB // 10,
        cache_limit_bytes=40 * GB,
    ),
    trained=(TrainedView(PEERS[4].peer, 34, 46),),
)
EMPTY = Snapshot(
    ME,
    "idle",
    "in no swarm",
    "http://127.0.0.1:7465",
    hardware=DeviceView("cpu", "", 16 * GB, 9 * GB),
    why=Reason("no_swarm", "in no swarm: join one or create one"),
)
HOLE = replace(HEALTHY, peers=tuple(peer for peer in PEERS if peer.name != "mako"), route=None, reason="", why=None)
PAUSED = replace(
    HEALTHY,
    state="paused",
    start=None,
    stop=None,
    active_sessions=(),
    sessions=0,
    tokens_per_s=0.0,
    route=None,
    flow=FlowView(),
    why=Reason("pause_busy", "another program uses the GPU", next_step="it resumes by itself"),
    courtesy=CourtesyView(True, "rule", rules=(replace(RULES[0], applies=True, text="blender uses 91 %"), *RULES[1:])),
)
COMING_UP = replace(
    HEALTHY,
    state="fetching",
    start=None,
    stop=None,
    active_sessions=(),
    sessions=0,
    route=None,
    flow=FlowView(),
    steps=STEPS,
    why=Reason("fetching", "weights come from heron and puffin"),
)
ERROR = replace(
    COMING_UP,
    state="joining",
    steps=(
        *STEPS[:3],
        StepView("weights", "weights", "failed", "the disk is full: 3.1 GB are missing in the cache folder"),
        *STEPS[4:],
    ),
    why=Reason("disk_full", "the disk is full", next_step="free 3.1 GB, then restart the node"),
)
_LONG = "a-name-that-goes-on-and-on-and-on-because-nobody-said-stop-" * 3
LONG = replace(
    HEALTHY,
    name=_LONG,
    swarm=_LONG,
    swarms=(SwarmView(_LONG, MANIFEST, f"{_LONG}#{MANIFEST[:20]}", active=True),),
    model=_LONG,
    why=Reason("x", "because " + "of many things " * 20),
    peers=tuple(replace(peer, name=f"{_LONG}{peer.name}", device=_LONG) for peer in PEERS),
)
WIDE = replace(
    HEALTHY,
    name="海藻",
    swarm="読書会",
    swarms=(SwarmView("読書会", MANIFEST, f"読書会#{MANIFEST[:20]}", active=True),),
    model="羊駝-70B",
    why=Reason("x", "選択: 36:40 の保持者は一人 🐟"),
    peers=tuple(replace(peer, name=f"鳥{'🐦' * (i % 3)}{peer.name[:3]}\x1b[31m") for i, peer in enumerate(PEERS)),
)


def five_hundred(tick: int = 0) -> Snapshot:
    """A swarm of 500, the figures of which move with `tick`."""
    peers = tuple(
        PeerView(
            f"12D3KooW{index:06}",
            f"peer{index:03}",
            start := (index * 7) % 70,
            start + 6 + index % 5,
            0.005 + ((index * 13 + tick) % 90) / 1000,
            ("direct", "lan", "relayed")[index % 3],
            1.0,
            "serving",
            "RTX 3060",
            20.0 + (index * 11 + tick * 3) % 80,
        )
        for index in range(500)
    )
    return replace(HEALTHY, peers=peers)


SNAPSHOTS: dict[str, Snapshot | None] = {
    "empty": EMPTY,
    "healthy": HEALTHY,
    "hole": HOLE,
    "paused": PAUSED,
    "coming-up": COMING_UP,
    "away": None,
    "error": ERROR,
    "500": five_hundred(),
    "long": LONG,
    "wide": WIDE,
}
NOTES = (
    ("swarm", "this node's swarm is reading-club#1a2b3c4d1a2b3c4d1a2b"),
    ("setting", "the setting max_vram was changed"),
    ("peer", "dunlin joined and took 70:80"),
    ("problem", "murre fell silent; 3 sessions went on over heron after 1.3 s"),
    ("peer", "murre is back with 12:26"),
)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def store_of(name: str, clock: Clock | None = None) -> Store:
    """A store that knows one of the fixed snapshots."""
    store = Store(clock or Clock())
    fill(store, name)
    return store


def fill(store: Store, name: str) -> None:
    """Let the store know one of the fixed snapshots, and nothing of the one before."""
    fresh = Store(store.now)
    store.__dict__.update(fresh.__dict__)
    for number, (kind, text) in enumerate(NOTES, 1):
        store.note({"number": number, "at_ms": 1_700_000_000_000 + number * 61_000, "kind": kind, "text": text})
    snapshot = SNAPSHOTS[name]
    if snapshot is None:
        away = ConnectionState("away", "the node has ended", store.now() + 4.0, next_step="press F5 to start it")
        store.connected(away)
        return
    store.connected(ConnectionState("live", url=snapshot.api_url))
    store.take(snapshot)
    for second in range(120):
        store.sample()
        flow = snapshot.flow
        wave = 0.6 + 0.4 * ((second * 7) % 20) / 20
        store.served[-1] = flow.served_tokens_per_s * wave
        store.up[-1], store.down[-1] = flow.up_bytes_per_s * wave, flow.down_bytes_per_s * (1.4 - wave)
