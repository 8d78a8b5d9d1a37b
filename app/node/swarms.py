"""Which swarm a node is in, and which it remembers: founding, joining, leaving, inviting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from app.api.control import Joining
from app.config.file import Config
from app.config.home import Home
from app.core.errors import HomeError
from app.core.reasons import Reason, because
from app.joining.create import SwarmSpec, found
from app.joining.name_lookup import resolve_aside, resolve_name
from app.joining.targets import invite_to, named, target_swarm, view_of
from app.node.network_owner import NetworkOwner
from app.snapshot.views import State, SwarmView
from app.swarm.invite import Invite
from app.swarm.names import SwarmName
from app.swarm.saved import SavedSwarm, SavedSwarms, load, update

JOIN_PATIENCE_S = 15.0  # after which a join goes on by itself, and the person is told that it does


class SwarmSwitcher:
    """The swarms of one home folder, and the way to one of them."""

    def __init__(
        self,
        home: Home,
        cache: Path,
        config: Callable[[], Config],
        note: Callable[[str, str], None],
        say: Callable[[State, Reason], None],
    ) -> None:
        self._home, self._cache, self._config, self._note, self._say = home, cache, config, note, say
        self.known: SavedSwarms = load(home)
        self.network_owner: NetworkOwner  # where the node is; it needs what is known of swarms first
        self._switching = trio.Lock()

    def views(self) -> tuple[SwarmView, ...]:
        """The swarms that are remembered."""
        return tuple(view_of(swarm, active=self._is_here(swarm)) for swarm in self.known.swarms)

    async def create(self, name: str, model: str, *, private: bool) -> Joining:
        """Found a swarm of a model on this machine, and go there."""
        wish = SwarmSpec(name, model, private)
        make = partial(found, self._home, self._cache, wish, _ignore_progress, _ignore_progress)
        swarm = await trio.to_thread.run_sync(make)
        await self.remember(swarm)
        return await self.join(f"{swarm.name}#{swarm.model_hash}")

    async def join(self, target: str) -> Joining:
        """Go to the swarm that a name or an invite means; what cannot be entered leaves the node where it was."""
        async with self._switching:
            known = await trio.to_thread.run_sync(load, self._home)
            meant = target_swarm(known, target)
            if isinstance(meant, SwarmName):
                meant = await self._resolve(meant)
            before = self.network_owner.active_swarm
            active_swarm = self.network_owner.switch_to(known.joined(meant).active)
            assert active_swarm is not None
            with trio.move_on_after(JOIN_PATIENCE_S):
                await active_swarm.settled.wait()
            if active_swarm.failure is not None:
                self.network_owner.switch_to(None if before is None else before.swarm)
                raise active_swarm.failure
            await self.remember(active_swarm.swarm)
            self._note("swarm", f"this node's swarm is {active_swarm.swarm}")
            return Joining(view_of(active_swarm.swarm, active=True), active_swarm.state, active_swarm.why.text)

    async def leave(self, name: str) -> SwarmView:
        """Forget a swarm, leaving it first where it is the active one."""
        async with self._switching:
            swarm = named(await trio.to_thread.run_sync(load, self._home), name)
            if self._is_here(swarm):
                self.network_owner.switch_to(None)
                self._say("idle", because("no_swarm", f"left {swarm}"))
            self.known = await trio.to_thread.run_sync(update, self._home, lambda known: known.left(swarm.id))
            self._note("swarm", f"{swarm} is forgotten")
            return view_of(swarm, active=False)

    async def invite(self, name: str | None) -> Invite:
        """An invite through this node, and through other members that can be reached."""
        swarm = named(await trio.to_thread.run_sync(load, self._home), name)
        own, others = self.network_owner.listen_addrs(), list(swarm.addresses)
        active_swarm, network = self.network_owner.active_swarm, self.network_owner.network
        if network is not None:
            own = tuple(network.addresses())
        if active_swarm is not None and self._is_here(swarm):
            others = [a for m in active_swarm.members() if m.present for a in m.announcement.addresses[:1]] + others
        return invite_to(swarm, own, others)

    async def remember(self, swarm: SavedSwarm) -> None:
        """Keep a swarm in the home folder; a disk that takes nothing costs the memory of it, not the stay."""
        try:
            self.known = await trio.to_thread.run_sync(update, self._home, lambda known: known.joined(swarm))
        except HomeError as error:
            self.known = self.known.joined(swarm)
            self._note("problem", f"a restart will not know of {swarm}: {error}")

    async def _resolve(self, wanted: SwarmName) -> SavedSwarm:
        """Ask whoever can be reached; from inside a private swarm, over a public network made for this."""
        network = self.network_owner.public_network()
        if network is None:
            return await resolve_aside(self._home, self._config(), wanted)
        return await resolve_name(network, self._config(), wanted, self.network_owner.refusals_to)

    def _is_here(self, swarm: SavedSwarm) -> bool:
        active_swarm = self.network_owner.active_swarm
        return active_swarm is not None and active_swarm.swarm.id == swarm.id


def _ignore_progress(done: int, total: int) -> None:
    """Whoever follows the API is told when the model has been read, and not before."""
