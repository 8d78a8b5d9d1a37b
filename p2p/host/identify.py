"""The two protocols that every libp2p node expects of another: `identify` and `ping`.

An answer to `identify` is one protobuf message: 1 `publicKey`, 2 `listenAddrs` and 4 `observedAddr` (binary
multiaddrs), 3 `protocols`, 5 `protocolVersion`, 6 `agentVersion`, 8 `signedPeerRecord` (`p2p.host.peer_record`). A
`ping` of 32 bytes is answered with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from p2p.channel.multistream import read_exactly
from p2p.host.connection import Stream
from p2p.host.host import Host
from p2p.host.messages import address_bytes, send_bytes
from p2p.identity import Identity, key_message
from p2p.protobuf import encode

IDENTIFY = "/ipfs/id/1.0.0"
PING = "/ipfs/ping/1.0.0"
AGENT = "shoal/1"
_PING_BYTES = 32
_PING_IDLE_S = 60.0


class StandardProtocols:
    """Serves `/ipfs/id` and `/ipfs/ping` to other libp2p implementations; Shoal nodes use the heartbeat instead."""

    def __init__(self, host: Host, identity: Identity, own_record: Callable[[], bytes] = lambda: b"") -> None:
        self._host = host
        self._own_record = own_record
        self._public_key = key_message(identity.public_key)
        host.handle(IDENTIFY, self._identify)
        host.handle(PING, self._ping)

    async def _identify(self, stream: Stream) -> None:
        observed = stream.connection.address.of(None)
        message = encode(
            (1, self._public_key),
            (2, [address_bytes(address.of(None)) for address in self._host.addresses[:16]]),
            (3, self._host.protocols[:64]),
            (4, b"" if stream.connection.relayed else address_bytes(observed)),
            (5, "ipfs/0.1.0"),
            (6, AGENT),
            (8, self._own_record() or None),
        )
        await send_bytes(stream, message)
        await stream.close()

    async def _ping(self, stream: Stream) -> None:
        while True:
            with trio.fail_after(_PING_IDLE_S):
                await stream.write(await read_exactly(stream, _PING_BYTES))
