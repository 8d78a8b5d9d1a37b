"""Asks in another swarm than the one that this node takes part in.

A visit is a client's membership with a network, a port and a key of its own, so that no member of either swarm can tell
that both are one machine. It begins with the first question and ends when nothing was asked for `IDLE_S`. One swarm is
visited at a time; the node goes on hosting in its own meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from app.asker.reply_service import ReplyService
from app.config.file import Config
from app.core.errors import AppError
from app.node.active_swarm import ActiveSwarm
from app.node.context import NodeContext
from app.node.network_owner import NetworkOwner
from app.node.swarm_switcher import JOIN_PATIENCE_S
from app.snapshot.views import VisitView
from app.swarm.saved import SavedSwarm
from p2p.identity import Identity, load_or_create
from p2p.supervise import guarded

if TYPE_CHECKING:
    from trio_typing import TaskStatus

IDLE_S = 600.0
LOOK_S = 60.0  # between two looks at how long nothing was asked


class Visits:
    """The one swarm that is visited, if any; `run` until cancelled."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._nursery: trio.Nursery | None = None
        self._running = trio.Event()
        self._changing = trio.Lock()
        self._visit: _Visit | None = None

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the visit; when cancelled, its swarm is not told."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._running.set()
            task_status.started()
            await trio.sleep_forever()

    def view(self) -> VisitView | None:
        """Return the visit for the snapshot."""
        return None if self._visit is None else self._visit.view()

    async def end(self) -> None:
        """Leave the visited swarm."""
        async with self._changing:
            await self._leave()

    @asynccontextmanager
    async def replies(self, swarm: SavedSwarm) -> AsyncIterator[ReplyService]:
        """Yield what replies in a swarm, visiting it first; the visit lasts at least as long.

        Raises `AppError` or `P2PError` if it cannot be joined, or while a reply of another visited swarm is written.
        """
        async with self._changing:
            visit = self._visit
            if visit is None or visit.swarm.id != swarm.id:
                if visit is not None and visit.replies:
                    words = f"this node asks in {visit.swarm.name} at the moment, and in one other swarm at a time"
                    raise AppError(f"{words}: ask again when that reply has ended", code="busy")
                await self._leave()
                visit = await self._begin(swarm)
            visit.replies += 1  # so that it does not end for want of questions
        try:
            yield await visit.joined()
        finally:
            visit.replies -= 1
            visit.asked_at = trio.current_time()

    async def _begin(self, swarm: SavedSwarm) -> _Visit:
        await self._running.wait()  # a node answers requests before its last parts have started
        assert self._nursery is not None
        context = await trio.to_thread.run_sync(visitor_context, self._context, swarm)
        self._visit = visit = _Visit(swarm, context)
        self._nursery.start_soon(guarded, f"the visit of {swarm}", self._hold, visit)
        self._context.note("visit", f"asking in {swarm}")
        return visit

    async def _hold(self, visit: _Visit) -> None:
        try:
            await visit.run()
        finally:
            if self._visit is visit:
                self._visit = None
            self._context.changed()

    async def _leave(self) -> None:
        visit, self._visit = self._visit, None
        if visit is not None:
            visit.close()
            await visit.ended.wait()


class _Visit:
    """A client's membership in one swarm."""

    def __init__(self, swarm: SavedSwarm, context: NodeContext) -> None:
        self.swarm = swarm
        self.replies = 0  # under way
        self.asked_at = trio.current_time()
        self.ended = trio.Event()
        self._owner = NetworkOwner(context)
        self._active: ActiveSwarm | None = self._owner.switch_to(swarm)

    def view(self) -> VisitView:
        active = self._active
        assert active is not None
        present = sum(member.present for member in active.members())
        return VisitView(
            self.swarm.name, self.swarm.model_hash, active.state, active.why.text, active.model_name, present
        )

    async def run(self) -> None:
        """Take part until nothing was asked for `IDLE_S`, or until `close`."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._close_when_idle)
                await self._owner.run()
                nursery.cancel_scope.cancel()
        finally:
            self.ended.set()

    async def _close_when_idle(self) -> None:
        while True:
            await trio.sleep(LOOK_S)
            if not self.replies and trio.current_time() >= self.asked_at + IDLE_S:
                self.close()

    def close(self) -> None:
        """Have `run` leave the swarm and end."""
        self._owner.close()

    async def joined(self) -> ReplyService:
        """Return what replies, once the swarm is joined; raises `AppError` or `P2PError` if it is not in time."""
        active = self._active
        assert active is not None
        with trio.move_on_after(JOIN_PATIENCE_S):
            await active.settled.wait()
        if active.failure is not None:
            self.close()
            raise active.failure
        if active.replies is None:
            raise AppError(active.why.text, code=active.why.code)
        return active.replies


def visitor_context(context: NodeContext, swarm: SavedSwarm) -> NodeContext:
    """Return a node's context with what a visitor has of its own: key, port, known peers, and no memory to host in."""
    return replace(
        context,
        identity=_identity(context, swarm),
        peers_file=context.home.visit_peers_file,
        config=lambda: visitor_config(context.config()),
        remember=context.remember_aside,
        is_visit=True,
        note=lambda kind, text: context.note("visit", f"{swarm.name}: {text}"),
    )


def visitor_config(config: Config) -> Config:
    """Return the settings of a visitor: it hosts nothing, listens on any free port, and asks nothing of the router."""
    listen = tuple(re.sub(r"/tcp/\d+", "/tcp/0", address) for address in config.settings.listen)
    return config.with_flags({"max_vram": 0, "listen": listen, "map_port": False})


def _identity(context: NodeContext, swarm: SavedSwarm) -> Identity:
    """A key of its own, except where a certificate names this node's; such a swarm's network is closed to others."""
    return context.identity if swarm.creator is not None else load_or_create(context.home.visit_key_file)
