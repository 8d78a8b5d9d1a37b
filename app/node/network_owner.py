"""Opens and closes the libp2p network, and runs the active swarm on it.

A private swarm's secret is part of every handshake, so a swarm with another secret needs another network, on the same
ports. `switch_to` names the next swarm; the task in `run` leaves the old one cleanly before it joins the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from app.core.network import Network
from app.core.signal import Signal
from app.joining.admission import AdmissionDesk, save_lists
from app.joining.name_lookup import guard_of
from app.joining.network_setup import apply_live, network_config
from app.membership import GuardedNetwork, QueryService, value_check
from app.node.active_swarm import ActiveSwarm
from app.node.context import NodeContext
from app.swarm.certificates import Authority
from app.swarm.saved import SavedSwarm, record_of
from p2p.addresses import advertised
from p2p.envelope import Envelope
from p2p.errors import HandshakeError, WrongSecret
from p2p.host.listening import PortTaken
from p2p.network import Libp2pNetwork
from p2p.sockets import own_ips
from p2p.supervise import guarded, supervise

if TYPE_CHECKING:
    from trio_typing import TaskStatus

RefusalListener = Callable[[WrongSecret], None]
KNOCKS_APART_S = 600.0  # between two notes of rejected peers: nodes of no swarm dial all neighbours again and again


class NetworkOwner:
    """The node's network and active swarm; `run` ends after `close`."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self.network: Libp2pNetwork | None = None
        self.active_swarm: ActiveSwarm | None = None
        self.guard: GuardedNetwork | None = None  # of the network of a guarded swarm
        self.desk: AdmissionDesk | None = None
        self._secret: bytes | None = None
        self._authority: Authority | None = None
        self._discovery: tuple[str, ...] = ()  # means that the open network finds others by
        self._bound: tuple[str, ...] = ()  # addresses of the last network, to listen there again
        self._switched = Signal()
        self._closing = False
        self._refusal_listeners: list[RefusalListener] = []
        self._next_knock_note_at = 0.0

    def switch_to(self, swarm: SavedSwarm | None) -> ActiveSwarm | None:
        """Have `run` leave the active swarm and join `swarm`, or none; returns at once."""
        self.active_swarm = None if swarm is None else ActiveSwarm(swarm, self._context)
        self._switched.notify()
        self._context.changed()
        return self.active_swarm

    def close(self) -> None:
        """Have `run` leave the swarm, close the network and end; returns at once."""
        self._closing = True
        self._switched.notify()

    def network_of(self, secret: bytes | None) -> Libp2pNetwork | None:
        """Return the network if it is open and has this swarm secret; None stands for a public swarm."""
        return self.network if self._secret == secret else None

    def listen_addrs(self) -> tuple[str, ...]:
        """Return the addresses where this node listens, also those that it does not advertise."""
        if self.network is None:
            return ()
        bound = [address.of(self.network.peer_id) for address in self.network.host.listening]
        return tuple(str(address) for address in advertised(bound, own_ips()))

    @contextmanager
    def refusals_to(self, listener: RefusalListener) -> Iterator[None]:
        """Within the context, also call `listener` for each dialled peer that has another secret."""
        self._refusal_listeners.append(listener)
        try:
            yield
        finally:
            self._refusal_listeners.remove(listener)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run one network after another until `close`; reports started once the first one listens.

        Raises `PortTaken` (in a group) if the first port, or one from the settings, is taken.
        """
        while not self._closing:
            try:
                await self._run_network(task_status)
            except* PortTaken:
                if not self._bound or self._context.config().explicit("listen"):
                    raise
                self._bound = ()  # another program took the port between two networks: use any
            task_status = trio.TASK_STATUS_IGNORED

    async def _run_network(self, task_status: TaskStatus[None]) -> None:
        swarm = self.active_swarm.swarm if self.active_swarm is not None else None
        self._secret = swarm.secret if swarm is not None else None
        self._authority = swarm.authority if swarm is not None else None
        self._discovery = self._context.config().settings.discovery
        network = Libp2pNetwork(
            self._context.identity,
            network_config(self._context.peers_file, self._context.config(), swarm, self._bound),
            is_valid_value=value_check(self._secret),
            on_handshake_failure=self._on_handshake_failure,
        )
        guard = await trio.to_thread.run_sync(guard_of, self._context.home, network, swarm)
        service = self._query_service(guard or network)
        async with network.running(), trio.open_nursery() as nursery:
            if guard is not None:
                await self._start_guard(network, guard, nursery)
            await apply_live(network, self._context.config())
            self._bound = tuple(str(address) for address in network.host.listening)
            self.network = network
            self._context.changed()
            task_status.started()
            try:
                await self._run_swarms(network, service)
            finally:
                self.network = self.guard = self.desk = None
                nursery.cancel_scope.cancel()

    async def _start_guard(self, network: Libp2pNetwork, guard: GuardedNetwork, nursery: trio.Nursery) -> None:
        """Answer newcomers, close the links of peers without a certificate, and save new revocation lists."""
        context = self._context
        desk = AdmissionDesk(network, guard, context.identity, context.home, context.note)
        await trio.to_thread.run_sync(desk.reload)

        news = Signal()

        async def save() -> None:
            lists = tuple(guard.book.statements())
            await trio.to_thread.run_sync(save_lists, context.home, guard.authority, lists)

        async def save_news() -> None:
            """Save the lists after each change: one thread at a time, however many lists come meanwhile."""
            seen = 0
            while True:
                await news.wait_beyond(seen)
                seen = news.version
                await guarded("saving revocation lists", save)

        def on_list(envelope: Envelope) -> None:
            news.notify()
            context.changed()  # it may be this node that was removed

        guard.listeners.append(on_list)
        nursery.start_soon(save_news)
        nursery.start_soon(supervise, "the check of certificates", guard.run)
        self.guard, self.desk = guard, desk

    async def _run_swarms(self, network: Libp2pNetwork, service: QueryService) -> None:
        """Run one swarm after another until `close`, or until the next one needs another network.

        That is one with another secret, or found by other means: the first run changes these just before it joins.
        """
        while not self._closing:
            active_swarm = self.active_swarm
            if self._context.config().settings.discovery != self._discovery:
                return
            if (active_swarm.swarm.secret if active_swarm is not None else None) != self._secret:
                return
            if (None if active_swarm is None else active_swarm.swarm.authority) != self._authority:
                return
            seen = self._switched.version
            if active_swarm is None:
                await self._switched.wait()
                continue
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    supervise,
                    f"membership in {active_swarm.swarm}",
                    partial(active_swarm.run, network, service, self.guard),
                )
                await self._switched.wait_beyond(seen)
                await active_swarm.leave()
                nursery.cancel_scope.cancel()

    def _query_service(self, network: Network) -> QueryService:
        """Build the service that answers queries about this swarm and remembered ones with the same secret."""
        service = QueryService(network, self._context.manifests, gated=self._secret is not None)
        for swarm in self._context.known().swarms:
            record = record_of(swarm)
            if record is not None and swarm.secret == self._secret:
                service.know(record)
        return service

    def _on_handshake_failure(self, error: HandshakeError) -> None:
        knocked = isinstance(error, WrongSecret) and error.peer is None and self._secret is not None
        if knocked and trio.current_time() >= self._next_knock_note_at:
            self._next_knock_note_at = trio.current_time() + KNOCKS_APART_S
            self._context.note("knock", "turned away a node outside the swarm: it has used no invite yet")
        if isinstance(error, WrongSecret) and error.peer is not None:
            if self.active_swarm is not None:
                self.active_swarm.refused(error)
            for listener in tuple(self._refusal_listeners):
                listener(error)
