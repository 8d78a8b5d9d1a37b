"""The two protocols that every libp2p node expects of another: `identify` and `ping`.

An answer to `identify` is one protobuf message: 1 `publicKey`, 2 `listenAddrs` and 4 `observedAddr` (binary
multiaddrs), 3 `protocols`, 5 `protocolVersion`, 6 `agentVersion`, 8 `signedPeerRecord` (`p2p.host.peer_record`). A
`ping` of 32 bytes is answered with the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from p2p.channel.multistream import read_exactly
from p2p.errors import P2PError
from p2p.host.connection import Stream
from p2p.host.host import Host
from p2p.host.messages import address_bytes, send_bytes
from p2p.identity import Identity, key_message
from p2p.protobuf import encode
from p2p.rate_limit import PeerRateLimit

IDENTIFY = "/ipfs/id/1.0.0"
PING = "/ipfs/ping/1.0.0"
AGENT = "shoal/1"
BURST_REQUESTS = 64  # streams of these protocols that one peer may open at once, and pings
REQUESTS_PER_S = 4.0  # and how many a second after that
KEPT_S = 1.0  # for which what `identify` tells everybody alike is kept
_PING_BYTES = 32
_PING_IDLE_S = 60.0


class StandardProtocols:
    """Serves `/ipfs/id` and `/ipfs/ping` to other libp2p implementations; Shoal nodes use the heartbeat instead.

    Calls `on_flood` with a peer that opens too many streams; one that sends too many pings waits for the answers.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        own_record: Callable[[], bytes] = lambda: b"",
        on_flood: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self._host = host
        self._own_record = own_record
        self._on_flood = on_flood
        self._public_key = key_message(identity.public_key)
        self._streams = PeerRateLimit(BURST_REQUESTS, REQUESTS_PER_S)
        self._pings = PeerRateLimit(BURST_REQUESTS, REQUESTS_PER_S)
        self._kept = (b"", b"")
        self._kept_until = -math.inf
        host.handle(IDENTIFY, self._identify)
        host.handle(PING, self._ping)

    async def _identify(self, stream: Stream) -> None:
        self._count(stream.peer)
        await stream.connection.in_turn(self._tell, stream)
        await stream.close()

    async def _tell(self, stream: Stream) -> None:
        observed = b"" if stream.connection.relayed else address_bytes(stream.connection.address.of(None))
        before, after = self._same_for_all()
        await send_bytes(stream, before + encode((4, observed)) + after)

    def _same_for_all(self) -> tuple[bytes, bytes]:
        """Return the fields before and after `observedAddr`, up to `KEPT_S` old: to find the addresses takes long."""
        now = trio.current_time()
        if now >= self._kept_until:
            before = encode(
                (1, self._public_key),
                (2, [address_bytes(address.of(None)) for address in self._host.addresses[:16]]),
                (3, self._host.protocols[:64]),
            )
            after = encode((5, "ipfs/0.1.0"), (6, AGENT), (8, self._own_record() or None))
            self._kept, self._kept_until = (before, after), now + KEPT_S
        return self._kept

    async def _ping(self, stream: Stream) -> None:
        self._count(stream.peer)
        while True:
            with trio.fail_after(_PING_IDLE_S):
                await stream.write(await read_exactly(stream, _PING_BYTES))
            await trio.sleep(self._pings.delay_s(stream.peer, trio.current_time()))

    def _count(self, peer: str) -> None:
        if not self._streams.take(peer, trio.current_time()):
            self._on_flood(peer)
            raise P2PError(f"{peer} opens too many streams for identify and ping")
