"""The sending side of a yamux connection: one writer task, and a direct path for callers while it is idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from p2p.channel.noise_session import NoiseSession
from p2p.channel.raw import ConnectionClosed
from p2p.channel.yamux_flow import BATCH_BYTES, SendHalf, SendQueue
from p2p.channel.yamux_wire import DATA, pack_header

_SMALL_BYTES: Final = 16 << 10  # a write up to this size is given to the kernel however much it still holds

Buffer = bytes | bytearray | memoryview


class Sender:
    """Sends the frames of a `SendQueue`; only the writer task (`run`) waits, all other methods return at once."""

    def __init__(self, session: NoiseSession, on_lost: Callable[[str], None]) -> None:
        self.outbox = SendQueue()
        self._session = session
        self._on_lost = on_lost
        self._work = trio.Event()

    async def run(self) -> None:
        """Send the queue's frames in batches until the connection is lost."""
        session, outbox = self._session, self.outbox
        try:
            while True:
                if session.has_unsent:
                    await session.flush()
                elif outbox.empty:
                    self._work = trio.Event()
                    await self._work.wait()
                else:
                    # Take a batch only when the kernel has room: a more urgent frame may be queued until then.
                    await session.pipe.wait_room()
                    if not session.has_unsent and not outbox.empty:
                        session.send_now(outbox.take(self._batch_bytes))
        except ConnectionClosed as error:
            self._on_lost(str(error))

    @property
    def _batch_bytes(self) -> int:
        return BATCH_BYTES // self._session.pipe.slowness

    def send_at_once(self, half: SendHalf, parts: Sequence[Buffer]) -> bool:
        """Send a whole write as one frame from the calling task.

        False, and nothing sent, if other frames wait or there is not enough credit or room in the kernel.
        """
        session = self._session
        size = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        if size > half.window or size > BATCH_BYTES or session.has_unsent or not self.outbox.empty:
            return False
        if not session.pipe.can_send_now or (size > _SMALL_BYTES and not session.pipe.has_room()):
            return False
        if size:
            half.window -= size
            self._send([pack_header(DATA, 0, half.stream_id, size), *parts])
        return True

    def pump(self) -> None:
        """Send one batch from the calling task if it need not wait; the writer task sends the rest."""
        session = self._session
        if self.outbox.empty:
            return
        if session.pipe.can_send_now and not session.has_unsent and session.pipe.has_room():
            self._send(self.outbox.take(self._batch_bytes))
        if not self.outbox.empty:
            self._work.set()

    def send_last(self, frame: bytes) -> None:
        """Send the last frame of the connection if the kernel accepts it at once, else drop it."""
        if self._session.pipe.can_send_now and not self._session.has_unsent:
            self._send([frame])

    def _send(self, parts: Sequence[Buffer]) -> None:
        try:
            if not self._session.send_now(parts):
                self._work.set()
        except ConnectionClosed as error:
            self._on_lost(str(error))
