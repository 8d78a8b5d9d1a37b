"""The sending side of a yamux connection: one writer task, and a short cut past it while it has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio
from libp2p.io.exceptions import ConnectionClosedError

from p2p.channel.noise_session import NoiseSession
from p2p.channel.yamux_flow import BATCH_BYTES, SendHalf, SendQueue
from p2p.channel.yamux_wire import DATA, pack_header

_SMALL_BYTES: Final = 16 << 10  # so little may always be given to the kernel, whatever it still holds

Buffer = bytes | bytearray | memoryview


class Sender:
    """Sends what the outbox holds; nothing here waits but the writer task."""

    def __init__(self, session: NoiseSession, on_lost: Callable[[str], None]) -> None:
        self.outbox = SendQueue()
        self._session = session
        self._on_lost = on_lost
        self._work = trio.Event()

    async def run(self) -> None:
        """The writer task: drain the outbox in batches for ever."""
        session, outbox = self._session, self.outbox
        try:
            while True:
                if session.has_unsent:
                    await session.flush()
                elif outbox.empty:
                    self._work = trio.Event()
                    await self._work.wait()
                else:
                    # Choose only when the kernel has room: what is most urgent then is not known before.
                    await session.pipe.wait_room()
                    if not session.has_unsent and not outbox.empty:
                        session.send_now(outbox.take())
        except ConnectionClosedError as error:
            self._on_lost(str(error))

    def send_at_once(self, half: SendHalf, parts: Sequence[Buffer]) -> bool:
        """Send a whole write as one frame from the calling task, if nothing else waits and there is credit and room."""
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
        """Send one batch from the calling task if that is possible without waiting; leave the rest to the writer."""
        session = self._session
        if self.outbox.empty:
            return
        if session.pipe.can_send_now and not session.has_unsent and session.pipe.has_room():
            self._send(self.outbox.take())
        if not self.outbox.empty:
            self._work.set()

    def send_last(self, frame: bytes) -> None:
        """Send a farewell if the kernel takes it; the connection ends either way."""
        if self._session.pipe.can_send_now and not self._session.has_unsent:
            self._send([frame])

    def _send(self, parts: Sequence[Buffer]) -> None:
        try:
            if not self._session.send_now(parts):
                self._work.set()
        except ConnectionClosedError as error:
            self._on_lost(str(error))
