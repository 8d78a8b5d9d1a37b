"""Directory nodes of py-libp2p's own KadDHT for the tests: `python -m tests.p2p.stock_directory PROTOCOL COUNT [IP]`.

They know each other; in the public directory the first one has an RSA key, as its entry points do. Prints their
addresses, then answers one JSON line on stdin, an order to the first of them, with one JSON line on stdout. Nothing of
`p2p` is imported here. py-libp2p has its protocol as a constant, which is replaced before anything reads it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

import libp2p.kad_dht.common as common
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair as ed25519_keys
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.rsa import create_new_key_pair as rsa_keys
from libp2p.custom_types import TProtocol
from libp2p.kad_dht import kad_dht, peer_routing, provider_store, value_store
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.records.validator import Validator
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr


class AnyValue(Validator):
    """Accepts every value: the test's own nodes check theirs."""

    def validate(self, key: str, value: bytes) -> None:
        """Accept it."""

    def select(self, key: str, values: list[bytes]) -> int:
        """Take the first."""
        return 0


async def start(stack: AsyncExitStack, ip: str, keys: KeyPair) -> tuple[Any, KadDHT]:
    """A host and its directory node, which run until `stack` is closed."""
    host = new_host(key_pair=keys)
    await stack.enter_async_context(host.run([Multiaddr(f"/ip4/{ip}/tcp/0")]))
    dht = KadDHT(host, DHTMode.SERVER)
    dht.register_validator("shoal", AnyValue())
    await stack.enter_async_context(background_trio_service(dht))
    return host, dht


async def meet(host: Any, dht: KadDHT, address: str) -> None:
    """Connect to a peer and put it into the routing table."""
    info = info_from_p2p_addr(Multiaddr(address))
    await host.connect(info)
    await dht.add_peer(info.peer_id, skip_server_mode_check=True)


async def obey(host: Any, dht: KadDHT, order: dict[str, str]) -> dict[str, Any]:
    """Carry one order out; `key` is the multihash of a CID in hex, or the path of a value."""
    match order["op"]:
        case "dial":
            await meet(host, dht, order["address"])
            return {}
        case "known":
            return {"peers": [str(peer) for peer in dht.routing_table.get_peer_ids()]}
        case "provide":
            return {"taken": int(await dht.provider_store.provide(bytes.fromhex(order["key"])))}
        case "find":
            found = await dht.provider_store.find_providers(bytes.fromhex(order["key"]))
            return {"peers": [str(info.peer_id) for info in found]}
        case "put":
            await dht.put_value(order["key"], bytes.fromhex(order["value"]))
            return {}
        case "get":
            value = await dht.get_value(order["key"])
            return {} if value is None else {"value": value.hex()}
    raise ValueError(f"unknown op {order['op']}")


async def main(count: int, ip: str) -> None:
    """Run the nodes, and obey stdin."""
    async with AsyncExitStack() as stack:
        has_rsa = common.PROTOCOL_ID == "/ipfs/kad/1.0.0"
        keys = [rsa_keys() if number == 0 and has_rsa else ed25519_keys() for number in range(count)]
        nodes = [await start(stack, ip, pair) for pair in keys]
        addresses = [str(host.get_addrs()[0]) for host, _ in nodes]
        for number, (host, dht) in enumerate(nodes):
            for address in addresses[:number] + addresses[number + 1 :]:
                await meet(host, dht, address)
        say(addresses=addresses)
        async for line in trio.wrap_file(sys.stdin):
            try:
                say(ok=True, **await obey(*nodes[0], json.loads(line)))
            except Exception as error:
                say(ok=False, error=repr(error))
        os._exit(0)  # whoever gave the orders is gone, and py-libp2p's hosts may take long to stop


def say(**message: Any) -> None:
    """Print one JSON line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    protocol, how_many, *where = sys.argv[1:]
    for module in (common, kad_dht, peer_routing, provider_store, value_store):
        assert module.PROTOCOL_ID == "/ipfs/kad/1.0.0"
        module.PROTOCOL_ID = TProtocol(protocol)  # type: ignore[attr-defined]
    trio.run(main, int(how_many), where[0] if where else "127.0.0.1")
