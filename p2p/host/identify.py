"""The two protocols that every libp2p node expects of another: `identify` and `ping`."""

from __future__ import annotations

import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify

from p2p.channel.multistream import read_exactly
from p2p.channel.upgrade import libp2p_keys
from p2p.host.connection import Stream
from p2p.host.host import Host
from p2p.host.protobuf import address_bytes, send_message
from p2p.identity import Identity

IDENTIFY = "/ipfs/id/1.0.0"
PING = "/ipfs/ping/1.0.0"
AGENT = "shoal/1"
_PING_BYTES = 32
_PING_IDLE_S = 60.0


class StandardProtocols:
    """Serves `/ipfs/id` and `/ipfs/ping` to other libp2p implementations; Shoal nodes use the heartbeat instead."""

    def __init__(self, host: Host, identity: Identity) -> None:
        self._host = host
        self._public_key = libp2p_keys(identity).public_key.serialize()
        host.handle(IDENTIFY, self._identify)
        host.handle(PING, self._ping)

    async def _identify(self, stream: Stream) -> None:
        observed = stream.connection.address.of(None)
        message = Identify(
            protocol_version="ipfs/0.1.0",
            agent_version=AGENT,
            public_key=self._public_key,
            listen_addrs=[address_bytes(address.of(None)) for address in self._host.addresses[:16]],
            observed_addr=b"" if stream.connection.relayed else address_bytes(observed),
            protocols=self._host.protocols[:64],
        )
        await send_message(stream, message)
        await stream.close()

    async def _ping(self, stream: Stream) -> None:
        while True:
            with trio.fail_after(_PING_IDLE_S):
                await stream.write(await read_exactly(stream, _PING_BYTES))
