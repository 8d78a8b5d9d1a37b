"""How much peers may make a node hold for readers that do not read: on one connection, and on all of them. No I/O."""

from __future__ import annotations

from typing import Final

from p2p.channel.yamux_wire import BASE_WINDOW_BYTES
from p2p.errors import ProtocolError

CONNECTION_WINDOW_BYTES: Final = 64 << 20
UNREAD_BYTES: Final = 512 << 20  # of all connections of a node together
GROWN_WINDOW_BYTES: Final = 48 << 20  # growth stops here, so that new streams always find their base window


class UnreadBytes:
    """What all connections of a node hold for readers that have not read yet.

    Each connection's windows are bounded, but a hundred connections' windows together are not. So where the sum is too
    large, a connection that holds more than its share of it, and is sent yet more, has to go.
    """

    __slots__ = ("connections", "limit", "total")

    def __init__(self, limit: int = UNREAD_BYTES) -> None:
        self.limit = limit
        self.total = 0
        self.connections = 0


class WindowBudget:
    """The sum of a connection's receive windows, which is all a peer can make us buffer on it."""

    __slots__ = ("_node", "unread", "used")

    def __init__(self, node: UnreadBytes | None = None) -> None:
        self.used = 0
        self.unread = 0
        self._node = node or UnreadBytes()
        self._node.connections += 1

    def hold(self, size: int) -> None:
        """Bytes arrived; raises `ProtocolError` where this connection has to go to make room."""
        node = self._node
        self.unread += size
        node.total += size
        if node.total > node.limit and self.unread > node.limit // node.connections:
            raise ProtocolError(f"makes this node hold {self.unread} unread bytes while memory is short")

    def let_go(self, size: int) -> None:
        """Bytes were read, or nobody will read them."""
        self.unread -= size
        self._node.total -= size

    def leave(self) -> None:
        """The connection ended: what it still holds is its readers' own affair."""
        self._node.total -= self.unread
        self._node.connections -= 1
        self._node = UnreadBytes()
        self._node.total = self.unread
        self._node.connections = 1

    def admit(self) -> bool:
        """Take a base window for a new stream, if there is room for one."""
        if self.used + BASE_WINDOW_BYTES > CONNECTION_WINDOW_BYTES:
            return False
        self.used += BASE_WINDOW_BYTES
        return True

    def grow(self, wanted: int) -> int:
        """Take up to `wanted` bytes more for a stream that makes good use of its window."""
        granted = max(0, min(wanted, GROWN_WINDOW_BYTES - self.used))
        self.used += granted
        return granted

    def release(self, window: int) -> None:
        """Give a closed stream's window back."""
        self.used -= window
