"""Where a node is: one task owns its network, and the swarm that it is in.

A private swarm's secret gates every handshake, so that going to a swarm with another secret means another network, on
the same ports. Whoever wants to go elsewhere says so with `switch_to`; the owner leaves in order and goes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from app.config.home import Home
from app.joining.network_setup import apply_live, network_config
from app.membership import QueryService, value_check
from app.node.active_swarm import ActiveSwarm
from app.node.context import NodeContext
from app.swarm.saved import SavedSwarm, record_of
from p2p.addresses import advertised
from p2p.errors import HandshakeError, WrongSecret
from p2p.host.listening import PortTaken
from p2p.network import Libp2pNetwork
from p2p.sockets import own_ips
from p2p.supervise import supervise

if TYPE_CHECKING:
    from trio_typing import TaskStatus

RefusalListener = Callable[[WrongSecret], None]
KNOCKS_APART_S = 30.0  # strangers could fill the log otherwise


class NetworkOwner:
    """The node's network and its stay in a swarm; `run` ends after `close`."""

    def __init__(self, home: Home, around: NodeContext) -> None:
        self._home, self._context = home, around
        self.network: Libp2pNetwork | None = None
        self.active_swarm: ActiveSwarm | None = None
        self._secret: bytes | None = None
        self._bound: tuple[str, ...] = ()
        self._moved = trio.Event()
        self._leaving = False
        self._refusal_listeners: list[RefusalListener] = []
        self._told_of_knock_at = 0.0

    def switch_to(self, swarm: SavedSwarm | None) -> ActiveSwarm | None:
        """Leave where this node is, and go to `swarm`, or nowhere; returns at once."""
        self.active_swarm = None if swarm is None else ActiveSwarm(swarm, self._context)
        self._moved.set()
        self._context.changed()
        return self.active_swarm

    def close(self) -> None:
        """Leave the swarm and the network."""
        self._leaving = True
        self._moved.set()

    def public_network(self) -> Libp2pNetwork | None:
        """The network, if strangers can be spoken with on it."""
        return self.network if self._secret is None else None

    def listen_addrs(self) -> tuple[str, ...]:
        """Where this node can be dialled on its own network, whatever it tells others."""
        if self.network is None:
            return ()
        bound = [address.of(self.network.peer_id) for address in self.network.host.listening]
        return tuple(str(address) for address in advertised(bound, own_ips()))

    @contextmanager
    def refusals_to(self, listener: RefusalListener) -> Iterator[None]:
        """Tell `listener` too of each peer that this node dialled and that holds another secret."""
        self._refusal_listeners.append(listener)
        try:
            yield
        finally:
            self._refusal_listeners.remove(listener)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own one network after another; reports started once the first one listens."""
        while not self._leaving:
            try:
                await self._own_network(task_status)
            except* PortTaken:
                if not self._bound or self._context.config().explicit("listen"):
                    raise
                self._bound = ()  # somebody took the port between two networks: any other will do
            task_status = trio.TASK_STATUS_IGNORED

    async def _own_network(self, task_status: TaskStatus[None]) -> None:
        swarm = self.active_swarm.swarm if self.active_swarm is not None else None
        self._secret = swarm.secret if swarm is not None else None
        network = Libp2pNetwork(
            self._context.identity,
            network_config(self._home, self._context.config(), swarm, self._bound),
            is_valid_value=value_check(self._secret),
            on_handshake_failure=self._on_handshake_failure,
        )
        service = self._service(network)
        async with network.running():
            await apply_live(network, self._context.config())
            self._bound = tuple(str(address) for address in network.host.listening)
            self.network = network
            self._context.changed()
            task_status.started()
            try:
                await self._dwell_on(network, service)
            finally:
                self.network = None

    async def _dwell_on(self, network: Libp2pNetwork, service: QueryService) -> None:
        """Be in one swarm after another, as long as this network can speak with their members."""
        while not self._leaving:
            active_swarm = self.active_swarm
            if (active_swarm.swarm.secret if active_swarm is not None else None) != self._secret:
                return
            self._moved = moved = trio.Event()
            if active_swarm is None:
                await moved.wait()
                continue
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    supervise, f"the stay in {active_swarm.swarm}", partial(active_swarm.run, network, service)
                )
                await moved.wait()
                await active_swarm.leave()
                nursery.cancel_scope.cancel()

    def _service(self, network: Libp2pNetwork) -> QueryService:
        """Answers for the remembered swarms too: on a public network, for those that are public."""
        service = QueryService(network, self._context.manifests, gated=self._secret is not None)
        for swarm in self._context.known().swarms:
            record = record_of(swarm)
            if record is not None and swarm.secret == self._secret:
                service.know(record)
        return service

    def _on_handshake_failure(self, error: HandshakeError) -> None:
        knocks = isinstance(error, WrongSecret) and error.peer is None and self._secret is not None
        if knocks and trio.current_time() >= self._told_of_knock_at:
            self._told_of_knock_at = trio.current_time() + KNOCKS_APART_S
            self._context.note("knock", "somebody was turned away who has another secret: give them a new invite")
        if isinstance(error, WrongSecret) and error.peer is not None:
            if self.active_swarm is not None:
                self.active_swarm.refused(error)
            for listener in tuple(self._refusal_listeners):
                listener(error)
