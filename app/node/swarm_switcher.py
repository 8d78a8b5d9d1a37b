"""Creates, joins, leaves and invites to swarms, and saves them in the home folder.

`app.joining` finds out which swarm a name or an invite stands for; `app.node.network_owner` carries out the switch.
"""

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
from app.joining.admission import MadeInvite, NotAdmitted, issue
from app.joining.create import SwarmSpec, create_swarm
from app.joining.name_lookup import NoMember, require_member, require_member_aside, resolve_aside, resolve_name
from app.joining.targets import invite_to, named, target_swarm, view_of
from app.node.network_owner import NetworkOwner
from app.snapshot.startup import ModelPreparation
from app.snapshot.views import State, SwarmView
from app.swarm.invitations import InviteLimits
from app.swarm.names import SwarmName
from app.swarm.saved import SavedSwarm, SavedSwarms, load, record_of, update
from app.weights.manifest_store import ManifestStore
from p2p.identity import load_or_create

JOIN_PATIENCE_S = 15.0  # after which `join` returns the state so far, and joining continues in the background


class SwarmSwitcher:
    """The remembered swarms of one home folder, and switching between them."""

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
        self.preparation = ModelPreparation()
        self.network_owner: NetworkOwner  # set by `app.node.node`: the owner is built from `known` and `remember`
        self._switching = trio.Lock()

    def views(self) -> tuple[SwarmView, ...]:
        """Return the remembered swarms for the snapshot."""
        return tuple(view_of(swarm, active=self._is_active(swarm)) for swarm in self.known.swarms)

    async def create(self, name: str, model: str, *, private: bool) -> Joining:
        """Create a swarm for a model on this machine, and join it."""
        spec, steps = SwarmSpec(name, model, private), self.preparation
        create = partial(create_swarm, self._home, self._cache, spec, steps.fetching, steps.reading)
        try:
            swarm = await trio.to_thread.run_sync(create)
        finally:
            steps.over()
        await self.remember(swarm)
        return await self.join(f"{swarm.name}#{swarm.model_hash}")

    async def join(self, target: str, *, force: bool = False) -> Joining:
        """Leave the active swarm and join the one that a name or an invite stands for.

        A node that has joined a swarm first looks for a member of the other one, and stays and raises `AppError` if
        none answers, unless `force`. If joining fails within `JOIN_PATIENCE_S`, switch back to the previous swarm and
        raise the error.
        """
        async with self._switching:
            swarm = await self.find(target)
            known = await trio.to_thread.run_sync(load, self._home)
            before = self.network_owner.active_swarm
            merged = known.joined(swarm).active
            assert merged is not None
            if not force and before is not None and before.joined and before.swarm.id != merged.id:
                merged = await self._require_member(merged, before.swarm)
            active_swarm = self.network_owner.switch_to(merged)
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
        """Remove a swarm from the remembered ones, leaving it first if it is active."""
        async with self._switching:
            swarm = named(await trio.to_thread.run_sync(load, self._home), name)
            if self._is_active(swarm):
                self.network_owner.switch_to(None)
                self._say("idle", because("no_swarm", f"left {swarm}"))
            self.known = await trio.to_thread.run_sync(update, self._home, lambda known: known.left(swarm.id))
            self._note("swarm", f"removed {swarm} from the remembered swarms")
            return view_of(swarm, active=False)

    async def invite(self, name: str | None, limits: InviteLimits | None = None) -> MadeInvite:
        """Make an invite with the addresses of this node and of other present members."""
        swarm = named(await trio.to_thread.run_sync(load, self._home), name)
        own, others = self.network_owner.listen_addrs(), list(swarm.addresses)
        active_swarm, network = self.network_owner.active_swarm, self.network_owner.network
        if network is not None:
            own = tuple(network.addresses())
        if active_swarm is not None and self._is_active(swarm):
            others = [a for one in active_swarm.announcements() for a in one.addresses[:1]] + others
        identity = await trio.to_thread.run_sync(load_or_create, self._home.key_file)
        entry, invitation = await trio.to_thread.run_sync(issue, self._home, identity, swarm, limits)
        return MadeInvite(invite_to(swarm, own, others, entry), invitation)

    async def remember(self, swarm: SavedSwarm) -> None:
        """Save a swarm as the active one in the home folder; if that fails, record a problem and carry on."""
        await self._save(swarm, SavedSwarms.joined)

    async def remember_aside(self, swarm: SavedSwarm) -> None:
        """Save a swarm in the home folder, and leave the active one as it is."""
        await self._save(swarm, SavedSwarms.kept)

    async def _save(self, swarm: SavedSwarm, change: Callable[[SavedSwarms, SavedSwarm], SavedSwarms]) -> None:
        try:
            self.known = await trio.to_thread.run_sync(update, self._home, lambda known: change(known, swarm))
        except HomeError as error:
            self.known = change(self.known, swarm)
            self._note("problem", f"a restart will not know of {swarm}, which could not be saved: {error}")

    async def find(self, target: str) -> SavedSwarm:
        """Return the swarm that a name or an invite stands for, asking reachable peers about an unknown name."""
        swarm = target_swarm(await trio.to_thread.run_sync(load, self._home), target)
        return await self.resolve(swarm) if isinstance(swarm, SwarmName) else swarm

    async def resolve(self, wanted: SwarmName) -> SavedSwarm:
        """Ask reachable peers for a swarm by name; from a private swarm, over a temporary public network."""
        network = self.network_owner.network_of(None)
        if network is None:
            return await resolve_aside(self._home, self._config(), wanted)
        return await resolve_name(network, self._config(), wanted, self.network_owner.refusals_to)

    async def _require_member(self, swarm: SavedSwarm, here: SavedSwarm) -> SavedSwarm:
        """Raise `NoMember` or `WrongSecret` unless a member answers, or this node can open the swarm by itself.

        An invite's pass is used meanwhile: returns the swarm, with its new certificate, or raises `NotAdmitted`.
        """
        manifests = ManifestStore(self._cache)
        source = await trio.to_thread.run_sync(manifests.source, swarm.model_hash)
        if record_of(swarm) is not None and source is not None and swarm.entry is None:
            return swarm
        network = self.network_owner.network_of(swarm.secret)
        try:
            if network is None:
                return await require_member_aside(self._home, self._config(), swarm)
            await require_member(network, self._config(), swarm, self.network_owner.refusals_to)
            return swarm
        except NotAdmitted as error:
            again = "; once it has, run the same command again, or wait there with `shoal join --force`"
            text = f"{error}. This node stays in {here.name}{again if error.is_pending else ''}"
            raise NotAdmitted(text, code=error.code, peers=error.peers) from None
        except NoMember as error:
            text = f"{error}. This node stays in {here.name}; `shoal join --force` moves it anyway"
            raise NoMember(text, peers=error.peers) from None

    def _is_active(self, swarm: SavedSwarm) -> bool:
        active_swarm = self.network_owner.active_swarm
        return active_swarm is not None and active_swarm.swarm.id == swarm.id
