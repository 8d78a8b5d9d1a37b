"""The commands on invites and members of guarded swarms, for a running node: `app.joining.admission` on its files.

A change takes effect at once: the desk learns who still waits, and a new revocation list goes to the other members.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from app.config.home import Home
from app.core.terminal_text import peer_words, short_peer
from app.joining import admission
from app.joining.targets import named
from app.node.network_owner import NetworkOwner
from app.snapshot.views import GuestView, InviteView
from app.swarm.saved import SavedSwarm, SavedSwarms
from p2p.envelope import parse
from p2p.identity import Identity


class Admissions:
    """Lists invites, decides on those that ask to join, and revokes members."""

    def __init__(
        self,
        home: Home,
        identity: Identity,
        known: Callable[[], SavedSwarms],
        owner: NetworkOwner,
        note: Callable[[str, str], None],
    ) -> None:
        self._home, self._identity, self._known, self._owner, self._note = home, identity, known, owner, note

    def requests(self) -> tuple[GuestView, ...]:
        """Return the peers that wait for approval in the active swarm, for the snapshot."""
        desk = self._owner.desk
        return () if desk is None else tuple(admission.guest_view(guest) for guest in desk.waiting)

    async def invites(self, name: str | None) -> list[InviteView]:
        """List the limited invites that this node made for a swarm; None means the active one."""
        return await trio.to_thread.run_sync(admission.invite_views, self._home, self._swarm(name))

    async def decide(self, who: str, *, approve: bool) -> GuestView:
        """Let a peer in that waits for approval, or refuse it."""
        change = partial(admission.decide, self._home, self._swarm(None), who, approve=approve)
        guest = await trio.to_thread.run_sync(change)
        await self._reload()
        done = "approved" if approve else "refused"
        self._note("swarm", f"{peer_words(guest.peer, guest.name)} was {done}")
        return guest

    async def cancel(self, identifier: str) -> InviteView:
        """Make an invite useless."""
        cancelled = await trio.to_thread.run_sync(admission.cancel, self._home, self._swarm(None), identifier)
        await self._reload()
        return cancelled

    async def revoked(self) -> tuple[str, ...]:
        """Return the peers on this node's revocation list of the active swarm."""
        return await trio.to_thread.run_sync(admission.revoked_here, self._home, self._identity, self._swarm(None))

    async def revoke(self, peer: str, *, remove: bool) -> tuple[str, ...]:
        """Add a peer to this node's revocation list of the active swarm, or remove it; return the list."""
        swarm, guard = self._swarm(None), self._owner.guard
        change = partial(admission.revoke, self._home, self._identity, swarm, peer, remove=remove)
        raw = await trio.to_thread.run_sync(change)
        if raw is not None:
            if guard is not None and guard.authority == swarm.authority:
                guard.keep(parse(raw))
            self._note("swarm", f"{short_peer(peer)} {'may join again' if remove else 'was removed from the swarm'}")
        return await self.revoked()

    def _swarm(self, name: str | None) -> SavedSwarm:
        return named(self._known(), name)

    async def _reload(self) -> None:
        if self._owner.desk is not None:
            await trio.to_thread.run_sync(self._owner.desk.reload)
