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
from app.joining.create import Wish, found
from app.joining.name_lookup import resolve_aside, resolve_name
from app.joining.targets import invite_to, named, remembered_target, view_of
from app.node.network_owner import Dwelling
from app.snapshot.views import State, SwarmView
from app.swarm.invite import Invite
from app.swarm.names import SwarmName
from app.swarm.saved import Memberships, Remembered, load, update

JOIN_PATIENCE_S = 15.0  # after which a join goes on by itself, and the person is told that it does


class Whereabouts:
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
        self.known: Memberships = load(home)
        self.dwelling: Dwelling  # where the node is; it needs what is known of swarms first
        self._switching = trio.Lock()

    def views(self) -> tuple[SwarmView, ...]:
        """The swarms that are remembered."""
        return tuple(view_of(swarm, active=self._is_here(swarm)) for swarm in self.known.swarms)

    async def create(self, name: str, model: str, *, private: bool) -> Joining:
        """Found a swarm of a model on this machine, and go there."""
        wish = Wish(name, model, private)
        make = partial(found, self._home, self._cache, wish, _ignore_progress, _ignore_progress)
        swarm = await trio.to_thread.run_sync(make)
        await self.remember(swarm)
        return await self.join(f"{swarm.name}#{swarm.model_hash}")

    async def join(self, target: str) -> Joining:
        """Go to the swarm that a name or an invite means; what cannot be entered leaves the node where it was."""
        async with self._switching:
            known = await trio.to_thread.run_sync(load, self._home)
            meant = remembered_target(known, target)
            if isinstance(meant, SwarmName):
                meant = await self._resolve(meant)
            before = self.dwelling.stay
            stay = self.dwelling.go(known.joined(meant).active)
            assert stay is not None
            with trio.move_on_after(JOIN_PATIENCE_S):
                await stay.settled.wait()
            if stay.failure is not None:
                self.dwelling.go(None if before is None else before.swarm)
                raise stay.failure
            await self.remember(stay.swarm)
            self._note("swarm", f"this node's swarm is {stay.swarm}")
            return Joining(view_of(stay.swarm, active=True), stay.state, stay.why.text)

    async def leave(self, name: str) -> SwarmView:
        """Forget a swarm, leaving it first where it is the active one."""
        async with self._switching:
            swarm = named(await trio.to_thread.run_sync(load, self._home), name)
            if self._is_here(swarm):
                self.dwelling.go(None)
                self._say("idle", because("no_swarm", f"left {swarm}"))
            self.known = await trio.to_thread.run_sync(update, self._home, lambda known: known.left(swarm.id))
            self._note("swarm", f"{swarm} is forgotten")
            return view_of(swarm, active=False)

    async def invite(self, name: str | None) -> Invite:
        """An invite through this node, and through other members that can be reached."""
        swarm = named(await trio.to_thread.run_sync(load, self._home), name)
        own, others = self.dwelling.listen_addrs(), list(swarm.addresses)
        stay, network = self.dwelling.stay, self.dwelling.network
        if network is not None:
            own = tuple(network.addresses())
        if stay is not None and self._is_here(swarm):
            others = [a for m in stay.members() if m.present for a in m.announcement.addresses[:1]] + others
        return invite_to(swarm, own, others)

    async def remember(self, swarm: Remembered) -> None:
        """Keep a swarm in the home folder; a disk that takes nothing costs the memory of it, not the stay."""
        try:
            self.known = await trio.to_thread.run_sync(update, self._home, lambda known: known.joined(swarm))
        except HomeError as error:
            self.known = self.known.joined(swarm)
            self._note("problem", f"a restart will not know of {swarm}: {error}")

    async def _resolve(self, wanted: SwarmName) -> Remembered:
        """Ask whoever can be reached; from inside a private swarm, over a public network made for this."""
        network = self.dwelling.public_network()
        if network is None:
            return await resolve_aside(self._home, self._config(), wanted)
        return await resolve_name(network, self._config(), wanted, self.dwelling.refusals_to)

    def _is_here(self, swarm: Remembered) -> bool:
        stay = self.dwelling.stay
        return stay is not None and stay.swarm.id == swarm.id


def _ignore_progress(done: int, total: int) -> None:
    """Whoever follows the API is told when the model has been read, and not before."""
