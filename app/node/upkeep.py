"""Background work of a node besides its swarm: courtesy, statistics, past forecasts, and the edited settings file.

`app.courtesy.watch` evaluates the rules, `app.node.statistics` stores the sums. `app.node.hosting_loop` carries out
pauses, `app.config.live` changed settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import trio

from app.asker.reply_service import ReplyService
from app.asker.stats import AuditCounts
from app.core.reasons import Reason
from app.core.wall_clock import wall_ms
from app.courtesy.sensors import Sensors, machine_sources
from app.courtesy.watch import CourtesyWatch
from app.node.context import NodeContext
from app.node.network_owner import NetworkOwner
from app.node.statistics import Statistics
from app.planning.history import PastForecast, remember
from app.serving.block_server import BlockServer
from app.snapshot.views import CourtesyView, GivenView

MAX_ENDED = 100  # replies whose forecasts wait to be written
LOOK_S = 2.0  # between two readings of the counters and of the settings file's time


@dataclass(frozen=True)
class UpkeepView:
    """The snapshot's fields about courtesy and statistics."""

    courtesy: CourtesyView
    today: GivenView
    ever: GivenView


class Upkeep:
    """Applies the courtesy rules to the node, and counts what it serves and uses; `run` until cancelled."""

    def __init__(self, context: NodeContext, network_owner: NetworkOwner) -> None:
        self._context, self._network_owner = context, network_owner
        self._statistics = Statistics(context.home.statistics_file)
        self._used_at: float | None = None  # when a session last used the blocks; None until the first look
        self._unused_s = 0.0
        sensors = Sensors(machine_sources(self._device, context.manifests.cache, lambda: self._unused_s))
        self._watch = CourtesyWatch(self, lambda: context.config().settings, sensors)
        self._seen_server: BlockServer | None = None
        self._seen_served: Mapping[str, int] = {}
        self._seen_replies: ReplyService | None = None
        self._seen_audits = AuditCounts()
        self._seen_bytes: dict[str, tuple[int, int]] = {}
        self._seen_file = _stamp(context.home.config_file)
        self._ended: list[PastForecast] = []  # replies whose forecasts are not written yet

    async def run(self) -> None:
        """Run the rules and the statistics until cancelled, and count once more at the end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch.run)
            nursery.start_soon(self._statistics.run)
            try:
                while True:
                    await trio.sleep(LOOK_S)
                    self._count()
                    self._look_at_use()
                    await self._keep_forecasts()
                    await self._reload_if_changed()
            finally:
                self._count()

    def view(self) -> UpkeepView:
        """Return the pause, the rules and the sums for the snapshot."""
        statistics = self._statistics
        return UpkeepView(self.courtesy(), statistics.totals(), statistics.totals(ever=True))

    def courtesy(self) -> CourtesyView:
        """Return the pause in force and the state of each rule."""
        seen = self._watch.view()
        return self._context.pause_control.view(seen.rules, seen.next_text)

    def settings_changed(self) -> None:
        """Evaluate the rules again with the settings now in force."""
        self._seen_file = _stamp(self._context.home.config_file)
        self._watch.nudge()

    def use(self) -> None:
        """Load the blocks again if they were unloaded because nobody used them: this node's user asks something."""
        self._used_at, self._unused_s = trio.current_time(), 0.0
        self._watch.nudge()

    def count_reply(self, tokens: int, peers: Iterable[str]) -> None:
        """Count tokens that this node's user received through these peers."""
        own = self._peer_id
        self._statistics.add_asked(tokens, [peer for peer in peers if peer != own])
        self._compare_with_forecast()

    # --- `app.courtesy.watch.PauseTarget` -----------------------------------------------------------------------------

    def pause_by_rule(self, reason: Reason) -> None:
        """Pause until `resume_by_rule`; a pause by hand overrides it."""
        self._context.pause_control.by_rule(reason)

    def resume_by_rule(self) -> None:
        """End the pause by rule; a pause by hand stays in force."""
        self._context.pause_control.rule_over()

    def is_only_holder(self) -> bool:
        """True if there are other members and this node hosts a block that none of them serves."""
        active_swarm = self._network_owner.active_swarm
        span = None if active_swarm is None or active_swarm.block_host is None else active_swarm.block_host.span
        if active_swarm is None or span is None:
            return False
        announced = active_swarm.announcements()
        others = [one.span for one in announced if one.state == "serving" and one.span is not None]
        return bool(announced) and any(all(block not in other for other in others) for block in span.blocks())

    def _compare_with_forecast(self) -> None:
        """Have the forecast of the reply that just ended kept beside its speed."""
        active_swarm = self._network_owner.active_swarm
        replies = None if active_swarm is None else active_swarm.replies
        reply = None if replies is None else replies.stats().latest
        if active_swarm is None or replies is None or reply is None:
            return
        forecast = replies.expected_tokens_per_s(reply)
        if forecast is not None and len(self._ended) < MAX_ENDED:
            now_ms, machines = wall_ms(), len({hop.peer for hop in reply.route})
            ended = PastForecast(now_ms, "chat", active_swarm.swarm.model_hash, machines, forecast, reply.tokens_per_s)
            self._ended.append(ended)

    async def _keep_forecasts(self) -> None:
        ended, self._ended = self._ended, []
        for one in ended:
            await trio.to_thread.run_sync(remember, self._context.home.forecasts_file, one)

    def _look_at_use(self) -> None:
        """Measure how long the blocks have been unused; 0 while other members need blocks that nobody else hosts."""
        active_swarm, now = self._network_owner.active_swarm, trio.current_time()
        is_used = active_swarm is not None and active_swarm.is_used
        if self._used_at is None or is_used or self._is_needed():
            self._used_at = now
        self._unused_s = now - self._used_at

    def _is_needed(self) -> bool:
        """True if there are other members, and they lack a host for some block without this node."""
        active_swarm = self._network_owner.active_swarm
        if active_swarm is None or active_swarm.manifest is None:
            return False
        present = active_swarm.announcements()
        spans = [one.span for one in present if one.state == "serving" and one.span is not None]
        blocks = range(active_swarm.manifest.config.n_blocks)
        return bool(present) and any(all(block not in span for span in spans) for block in blocks)

    def set_limits(self, upload: int | None, download: int | None) -> None:
        """Limit upload and download to these bytes per second; None: no limit."""
        network = self._network_owner.network
        if network is not None:
            network.bandwidth.set_limits(upload, download)

    def note(self, kind: str, text: str) -> None:
        """Record an event for the user."""
        self._context.note(kind, text)

    # --- counting -----------------------------------------------------------------------------------------------------

    @property
    def _peer_id(self) -> str:
        network = self._network_owner.network
        return "" if network is None else network.peer_id

    def _device(self) -> str | None:
        """Return the id of the device that computes: that of the hosted blocks, else the one in the settings."""
        active_swarm = self._network_owner.active_swarm
        chosen = active_swarm.hosted().device if active_swarm is not None else None
        configured = self._context.config().settings.device
        return chosen or (None if configured == "auto" else configured)

    def _count(self) -> None:
        active_swarm, network, own = self._network_owner.active_swarm, self._network_owner.network, self._peer_id
        server = None if active_swarm is None or active_swarm.block_host is None else active_swarm.block_host.server
        if server is not self._seen_server:
            self._seen_server, self._seen_served = server, {}
        if server is not None:
            before, self._seen_served = self._seen_served, server.stats.served
            for peer, tokens in self._seen_served.items():
                if peer != own and tokens > before.get(peer, 0):  # own replies are not a contribution
                    self._statistics.add_served(peer, tokens - before.get(peer, 0))
        self._count_audits(None if active_swarm is None else active_swarm.replies)
        seen: dict[str, tuple[int, int]] = {}
        for link in network.links() if network is not None else ():
            up, down = self._seen_bytes.get(link.peer, (0, 0))
            if link.bytes_out < up or link.bytes_in < down:
                up = down = 0  # a new link, which counts from zero
            self._statistics.add_bytes(link.peer, link.bytes_out - up, link.bytes_in - down)
            seen[link.peer] = (link.bytes_out, link.bytes_in)
        self._seen_bytes = seen

    def _count_audits(self, replies: ReplyService | None) -> None:
        before = self._seen_audits if replies is self._seen_replies else AuditCounts()
        self._seen_replies = replies
        self._seen_audits = now = AuditCounts() if replies is None else replies.stats().audits
        passed, failed = now.passed - before.passed, now.failed - before.failed
        if passed or failed:
            self._statistics.add_audits(passed + failed, passed)

    async def _reload_if_changed(self) -> None:
        stamp = _stamp(self._context.home.config_file)
        if stamp != self._seen_file:
            self._seen_file = stamp
            await self._context.reload()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
