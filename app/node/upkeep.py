"""What a node does beside its swarm: courtesy to the machine's owner, accounts of what was given and got, and settings
that a person changed in the file by hand.

It looks at the node through the few things that it is given; what a pause or a changed setting means is the node's.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from app.asker.reply_service import ReplyService
from app.asker.stats import AuditCounts
from app.config.file import Config
from app.config.home import Home
from app.core.reasons import Reason
from app.courtesy.pause import PauseControl
from app.courtesy.sensors import Sensors, machine_sources
from app.courtesy.watch import CourtesyWatch
from app.node.network_owner import NetworkOwner
from app.node.statistics import Statistics
from app.serving.block_server import BlockServer
from app.snapshot.views import CourtesyView

LOOK_S = 2.0


@dataclass(frozen=True)
class UpkeepContext:
    """What the upkeep needs of its node."""

    home: Home
    cache: Path
    config: Callable[[], Config]
    network_owner: NetworkOwner
    pause_control: PauseControl
    note: Callable[[str, str], None]
    reload: Callable[[], Awaitable[None]]  # the configuration file has changed


class Upkeep:
    """Runs beside the node, which asks it for what can be seen."""

    def __init__(self, household: UpkeepContext) -> None:
        self._of = household
        self._statistics = Statistics(household.home.statistics_file)
        sensors = Sensors(machine_sources(self._device, household.cache))
        self._watch = CourtesyWatch(self, lambda: household.config().settings, sensors)
        self._seen_server: BlockServer | None = None
        self._seen_served: Mapping[str, int] = {}
        self._seen_replying: ReplyService | None = None
        self._seen_audits = AuditCounts()
        self._seen_bytes: dict[str, tuple[int, int]] = {}
        self._seen_file = _stamp(household.home.config_file)

    async def run(self) -> None:
        """Watch, count and write until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch.run)
            nursery.start_soon(self._statistics.run)
            try:
                while True:
                    await trio.sleep(LOOK_S)
                    self._count()
                    await self._look_at_file()
            finally:
                self._count()

    def facts(self) -> dict[str, Any]:
        """The snapshot's fields about courtesy and accounts."""
        statistics = self._statistics
        return {"courtesy": self.view(), "today": statistics.totals(), "ever": statistics.totals(ever=True)}

    def view(self) -> CourtesyView:
        """Whether this node rests, and how the rules stand."""
        seen = self._watch.view()
        return self._of.pause_control.view(seen.rules, seen.next_text)

    def settings_changed(self) -> None:
        """Follow the settings that are in force now."""
        self._seen_file = _stamp(self._of.home.config_file)
        self._watch.nudge()

    def asked(self, tokens: int, hops: Sequence[str]) -> None:
        """This node's user got tokens through these peers."""
        own = self._peer_id
        self._statistics.add_asked(tokens, [peer for peer in dict.fromkeys(hops) if peer != own])

    # --- what the watch needs of a node -------------------------------------------------------------------------------

    def pause_by_rule(self, reason: Reason) -> None:
        """Rest until `resume_by_rule`; a person's pause goes before."""
        self._of.pause_control.by_rule(reason)

    def resume_by_rule(self) -> None:
        """No rule asks for rest any more; what a person paused stays paused."""
        self._of.pause_control.rule_over()

    def is_only_holder(self) -> bool:
        """Whether some block that this node serves is served by nobody else."""
        active_swarm = self._of.network_owner.active_swarm
        hosted = {} if active_swarm is None else active_swarm.hosted()
        if active_swarm is None or hosted.get("start") is None:
            return False
        said = [member.announcement for member in active_swarm.members() if member.present]
        others = [one.span for one in said if one.state == "serving" and one.span is not None]
        return any(
            all(block not in other.blocks() for other in others) for block in range(hosted["start"], hosted["stop"])
        )

    def set_limits(self, upload: int | None, download: int | None) -> None:
        """Bytes a second at most from now on."""
        network = self._of.network_owner.network
        if network is not None:
            network.bandwidth.set_limits(upload, download)

    def note(self, kind: str, text: str) -> None:
        """Something happened that a person may want to know."""
        self._of.note(kind, text)

    # --- within -------------------------------------------------------------------------------------------------------

    @property
    def _peer_id(self) -> str:
        network = self._of.network_owner.network
        return "" if network is None else network.peer_id

    def _device(self) -> str | None:
        """What computes here, once that is chosen."""
        active_swarm = self._of.network_owner.active_swarm
        chosen = active_swarm.hosted().get("device") if active_swarm is not None else None
        wanted = self._of.config().settings.device
        return chosen or (None if wanted == "auto" else wanted)

    def _count(self) -> None:
        active_swarm, network, own = self._of.network_owner.active_swarm, self._of.network_owner.network, self._peer_id
        server = None if active_swarm is None or active_swarm.block_host is None else active_swarm.block_host.server
        if server is not self._seen_server:
            self._seen_server, self._seen_served = server, {}
        if server is not None:
            before, self._seen_served = self._seen_served, server.stats.served
            for peer, tokens in self._seen_served.items():
                if peer != own and tokens > before.get(peer, 0):  # what it computes for itself is given to nobody
                    self._statistics.add_served(peer, tokens - before.get(peer, 0))
        self._count_audits(None if active_swarm is None else active_swarm.replies)
        seen: dict[str, tuple[int, int]] = {}
        for link in network.links() if network is not None else ():
            up, down = self._seen_bytes.get(link.peer, (0, 0))
            if link.bytes_out < up or link.bytes_in < down:
                up = down = 0  # another link took the place of the one that was counted
            self._statistics.add_bytes(link.peer, link.bytes_out - up, link.bytes_in - down)
            seen[link.peer] = (link.bytes_out, link.bytes_in)
        self._seen_bytes = seen

    def _count_audits(self, replies: ReplyService | None) -> None:
        before = self._seen_audits if replies is self._seen_replying else AuditCounts()
        self._seen_replying = replies
        self._seen_audits = now = AuditCounts() if replies is None else replies.stats().audits
        passed, failed = now.passed - before.passed, now.failed - before.failed
        if passed or failed:
            self._statistics.add_audits(passed + failed, passed)

    async def _look_at_file(self) -> None:
        stamp = _stamp(self._of.home.config_file)
        if stamp != self._seen_file:
            self._seen_file = stamp
            await self._of.reload()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
