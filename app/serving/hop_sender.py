"""What a hop sends: outputs to its successors, answers and complaints to the askers.

Knows streams and sessions, not the device. Where no way leads to a successor, outputs go through the asker.
"""

from __future__ import annotations

from typing import NamedTuple

import trio

from app.core.network import Network, Priority
from app.serving.hop_session import HopSession
from app.session.outbound import OutboundFrame, PeerOutbox, PeerOutboxes
from app.session.wire import DTYPES, PROTOCOL, HopError, Kind, encode_trouble, header


class HopFrame(NamedTuple):
    """A DATA or RELAY frame, with what is needed to send its body another way."""

    session: bytes
    parts: tuple[bytes, ...]  # header, body
    priority: Priority
    epoch: int
    position: int


class HopSender:
    """The outgoing side of all sessions at a hop."""

    def __init__(self, network: Network, nursery: trio.Nursery, chunk_rows: int) -> None:
        self._nursery, self._chunk_rows = nursery, chunk_rows
        self._outboxes: PeerOutboxes[HopFrame] = PeerOutboxes(
            network, PROTOCOL, nursery, lost=self._link_lost, undeliverable=self._undeliverable
        )
        self._sessions: dict[bytes, HopSession] = {}
        self._askers: dict[bytes, PeerOutbox] = {}  # the stream of each session's asker
        self.width = 0

    def begin(self, session: HopSession, asker: PeerOutbox) -> None:
        """A session begins, or goes on in a new epoch, ordered on this stream."""
        self._sessions[session.id], self._askers[session.id] = session, asker
        if session.turn.successor and not session.turn.relay:
            self._outboxes.prepare(session.turn.successor)

    def end(self, id: bytes) -> None:
        """Nothing more is sent for a session."""
        self._sessions.pop(id, None)
        self._askers.pop(id, None)

    def ordered_on(self, asker: PeerOutbox) -> list[bytes]:
        """The sessions whose asker speaks on this stream."""
        return [id for id, outbox in self._askers.items() if outbox is asker]

    async def resend(self, session: HopSession, start: int, stop: int, *, must: bool = True) -> None:
        """Send kept outputs of [start, stop), as far as the successor needs them."""
        if session.send_from is None:
            return
        start = max(start, session.send_from)
        chunk = self._chunk_rows
        for first in range(start, stop, chunk):
            data = session.kept_rows(first, min(first + chunk, stop))
            if data is None:
                if must:
                    await self.complain(session, "missing", f"outputs at {first} are no longer kept")
                return
            await self.send(session, first, data)

    async def send(self, session: HopSession, position: int, data: bytes) -> None:
        """Send outputs downstream: to the successor, or to the asker at the end of the route or where no way leads."""
        turn = session.turn
        urgent = position >= turn.urgent_from or not turn.successor
        priority = Priority.DECODE if urgent else Priority.PREFILL
        frame = self._data_frame(session, Kind.DATA, position, data, priority)
        if not turn.successor:
            await self._askers[session.id].push(frame)
        elif turn.relay or not await self._outboxes.push(turn.successor, frame):
            await self._relay(session, frame)

    def _data_frame(self, session: HopSession, kind: Kind, position: int, data: bytes, priority: Priority) -> HopFrame:
        rows, dtype = len(data) // session.row_bytes, DTYPES[session.dtype]
        head = header(
            kind, session.id, session.epoch, position, dtype=dtype, rows=rows, width=self.width, length=len(data)
        )
        session.counters.bytes_out += len(head) + len(data)
        return HopFrame(session.id, (head, data), priority, session.epoch, position)

    async def _relay(self, session: HopSession, frame: HopFrame) -> None:
        """Send through the asker what was meant for the successor, unless the session went on in another epoch."""
        if frame.epoch == session.epoch:
            again = self._data_frame(session, Kind.RELAY, frame.position, frame.parts[1], frame.priority)
            await self._askers[session.id].push(again)

    def _undeliverable(self, peer: str, frames: list[HopFrame]) -> None:
        self._nursery.start_soon(self._relay_all, frames)

    async def _relay_all(self, frames: list[HopFrame]) -> None:
        for frame in frames:
            session = self._sessions.get(frame.session)
            if session is not None:
                await self._relay(session, frame)

    def _link_lost(self, peer: str) -> None:
        self._nursery.start_soon(self._tell_link_lost, peer)

    async def _tell_link_lost(self, peer: str) -> None:
        for session in list(self._sessions.values()):
            if session.turn.successor == peer:
                await self.complain(session, "link", f"the link to the next hop {peer} broke")

    async def complain(self, session: HopSession, code: str, text: str) -> None:
        """Tell a session's asker of trouble."""
        outbox = self._askers.get(session.id)
        if outbox is not None:
            trouble = encode_trouble(session.id, session.epoch, session.kept_from, HopError(code, text))
            await outbox.push(control_frame(trouble))


def control_frame(message: bytes) -> OutboundFrame:
    """A message that goes before all data."""
    return OutboundFrame((message,), Priority.CONTROL)
