"""The part of the snapshot about work: sessions, the latest route, rates, weights, startup steps and the device.

Figures are read where they are counted (`app.serving.stats`, `app.asker.stats`, the network's links); one that was not
measured is None. `app.node.rates` turns counters into rates.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import trio

from app.asker.stats import AskedSession, AskerStats
from app.core.network import Network
from app.node.active_swarm import ActiveSwarm
from app.node.rates import Counters, RateMeter, RateReading
from app.serving.stats import ServerStats
from app.snapshot.views import (
    DeviceView,
    FlowView,
    GuessView,
    HopView,
    ReuseView,
    RouteView,
    SessionView,
    StepView,
    TrainedView,
    WeightsView,
)

SENSE_S = 10.0  # between two readings of the device's sensors


@dataclass(frozen=True)
class WorkView:
    """The snapshot's fields about work; without an active swarm all but `flow` have their defaults."""

    flow: FlowView
    model: str = ""
    context_length: int | None = None
    active_sessions: tuple[SessionView, ...] = ()
    route: RouteView | None = None
    weights: WeightsView | None = None
    steps: tuple[StepView, ...] = ()
    hardware: DeviceView | None = None
    devices: tuple[DeviceView, ...] = ()
    reuse: ReuseView = field(default_factory=ReuseView)
    guesses: GuessView = field(default_factory=GuessView)
    trained: tuple[TrainedView, ...] = ()


class NodeViews:
    """Derives the node's work figures; `look` must be called every few seconds."""

    def __init__(self, own_peer: str) -> None:
        self._own = own_peer
        self._flow = RateMeter()
        self._sense_at = 0.0
        self._device: DeviceView | None = None  # as it was when blocks were last hosted

    async def look(self, active_swarm: ActiveSwarm | None, network: Network | None) -> None:
        """Read the counters and, every `SENSE_S`, the device's sensors."""
        links = network.links() if network is not None else ()
        sent = {link.peer: (link.bytes_out, link.bytes_in) for link in links}
        now = trio.current_time()
        self._flow.note(now, reading_of(self._own, *_stats(active_swarm), sent))
        if active_swarm is not None and active_swarm.block_host is not None and now >= self._sense_at:
            self._sense_at = now + SENSE_S
            await active_swarm.block_host.look_at_device()

    def work(self, active_swarm: ActiveSwarm | None, network: Network | None) -> WorkView:
        """Return the snapshot's fields about work."""
        served, asked = _stats(active_swarm)
        flow = self._flow.view(served.queued_sessions)
        if active_swarm is None:
            return WorkView(flow=flow)
        asking = [self._asking(session) for session in asked.sessions]
        latest = asked.sessions[-1] if asked.sessions else asked.latest
        kinds = {link.peer: link.kind for link in network.links()} if network is not None else {}
        return WorkView(
            model=active_swarm.model_name,
            context_length=active_swarm.manifest.config.context_length if active_swarm.manifest is not None else None,
            active_sessions=(*asking, *self._serving(served, {session.id for session in asking})),
            route=None if latest is None else route_view(latest, kinds),
            flow=flow,
            weights=None if active_swarm.weights is None else active_swarm.weights.view(),
            steps=active_swarm.steps.views(),
            hardware=self._hardware(active_swarm),
            devices=_several(active_swarm),
            reuse=reuse_view(served, asked),
            guesses=GuessView(asked.guessed_tokens, asked.accepted_tokens, asked.draft_model),
            trained=_trained(active_swarm),
        )

    def _hardware(self, active_swarm: ActiveSwarm) -> DeviceView | None:
        """Return the device; while nothing is hosted, the one that hosted last, with the figures of hosting removed."""
        block_host = active_swarm.block_host
        if block_host is not None and (devices := block_host.devices()):
            self._device = devices[0]
        elif self._device is not None:
            idle = DeviceView(self._device.id, self._device.name, self._device.memory_total_bytes)
            self._device = replace(idle, limit_bytes=active_swarm.memory_limit_bytes)
        return self._device

    def _asking(self, session: AskedSession) -> SessionView:
        return SessionView(
            id=session.id,
            role="asking",
            asker=self._own,
            tokens=session.prompt_tokens + session.tokens,
            prompt_tokens=session.prompt_tokens,
            prompt_done=session.prompt_done,
            age_s=session.age_s,
            tokens_per_s=session.tokens_per_s,
            start=session.route[0].start if session.route else None,
            stop=session.route[-1].stop if session.route else None,
            recoveries=session.recoveries,
            guessed_tokens=session.guessed_tokens,
            accepted_tokens=session.accepted_tokens,
        )

    def _serving(self, stats: ServerStats, asked_here: Container[str]) -> Sequence[SessionView]:
        """Return the sessions that this node serves; one that it also asks for is in the list of those already."""
        return [
            SessionView(
                id=session.session,
                role="serving",
                asker=session.asker,
                tokens=session.tokens,
                age_s=session.age_s,
                tokens_per_s=self._flow.session_rate(session.session),
                start=session.start,
                stop=session.stop,
            )
            for session in stats.sessions
            if session.asker != self._own or session.session not in asked_here
        ]


def reading_of(own_peer: str, served: ServerStats, asked: AskerStats, links: dict[str, tuple[int, int]]) -> RateReading:
    """Collect the counters for the rates; tokens computed for this node itself do not count as served."""
    for_others = sum(tokens for peer, tokens in served.served.items() if peer != own_peer)
    counters = Counters(for_others, asked.asked_tokens, served.steps, served.urgent_steps, served.urgent_rows)
    return RateReading(counters, links, {session.session: session.tokens for session in served.sessions})


def reuse_view(served: ServerStats, asked: AskerStats) -> ReuseView:
    """Return how much of the prompts was cached, asked here and served here."""
    return ReuseView(
        prompt_tokens=asked.prompt_tokens,
        cached_tokens=asked.cached_tokens,
        kept_sessions=asked.kept_sessions,
        kept_tokens=asked.kept_tokens,
        resting_sessions=served.resting_sessions,
        resting_tokens=served.kv_resting_tokens,
        reused_tokens=served.reused_tokens,
    )


def route_view(session: AskedSession, kinds: Mapping[str, str]) -> RouteView:
    """Return the session's route with the usual times of a token at each hop; `kinds` maps peers to kinds of link.

    The parts are averages over other times than the whole, so they may add up to more: then the whole is their sum.
    """
    hops = tuple(
        HopView(hop.peer, hop.start, hop.stop, kinds.get(hop.peer), hop.link_s, hop.compute_s, hop.queue_s, hop.host_s)
        for hop in session.route
    )
    view = RouteView(
        session.id,
        hops,
        session.return_s,
        session.ends_s,
        session.token_s,
        session.host_s,
        session.prompt_tokens - session.cached_tokens,
        session.prompt_s,
    )
    return view if view.token_s is None else replace(view, token_s=max(view.token_s, view.known_s))


def _several(active_swarm: ActiveSwarm) -> tuple[DeviceView, ...]:
    """Return the devices that host blocks, if there are several."""
    devices = () if active_swarm.block_host is None else active_swarm.block_host.devices()
    return devices if len(devices) > 1 else ()


def _trained(active_swarm: ActiveSwarm) -> tuple[TrainedView, ...]:
    """Return the jobs that train blocks of this node now."""
    training = None if active_swarm.hosting_loop is None else active_swarm.hosting_loop.training
    jobs = () if training is None else training.jobs
    return tuple(TrainedView(job.owner, job.start, job.stop, job.steps_s, job.computed_s) for job in jobs)


def _stats(active_swarm: ActiveSwarm | None) -> tuple[ServerStats, AskerStats]:
    served = (
        ServerStats()
        if active_swarm is None or active_swarm.block_host is None
        else active_swarm.block_host.server.stats
    )
    asked = AskerStats() if active_swarm is None or active_swarm.replies is None else active_swarm.replies.stats()
    return served, asked
