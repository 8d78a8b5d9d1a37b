"""Real nodes in network namespaces, for tests of swarms whose members are far from each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from app.api.client import client_of
from app.config.home import cache_folder
from tests.p2p.namespaces import Namespaces
from tests.p2p.node_process import enter_namespace
from tests.process.node_process import Place, Serving

T = TypeVar("T")


class Inside:
    """What runs in a namespace: a node, and a thread that asks it."""

    def __init__(
        self,
        networks: Namespaces,
        name: str,
        folder: Path,
        *flags: str,
        max_vram: str = "0",
        cache: Path | None = None,
    ) -> None:
        path = networks.path(name)
        self.place = Place(folder / name, cache or cache_folder())
        self._flags = ("--discovery=dht,invite", "--device=cpu", *flags)
        self._program = ("-m", "tests.process.in_namespace", str(path))
        self._max_vram = max_vram
        self._thread = ThreadPoolExecutor(1, initializer=enter_namespace, initargs=(path,))

    def start(self, **variables: str) -> Serving:
        listen = "/ip4/0.0.0.0/tcp/0"
        return Serving(
            self.place, *self._flags, max_vram=self._max_vram, program=self._program, listen=listen, **variables
        )

    def run(self, function: Callable[[], T]) -> T:
        """Call a function in the namespace."""
        return self._thread.submit(function).result()

    def invite(self) -> str:
        return str(self.run(lambda: client_of(self.place.home).post("/control/invite", {})["invite"]))

    def has_relay(self) -> bool:
        """Whether others reach this node through a relay."""
        return bool(client_of(self.place.home).get("/control/snapshot")["network"]["relays"])

    def link_to(self, peer: str) -> str | None:
        """How this node is connected with another one."""
        peers: list[dict[str, Any]] = client_of(self.place.home).get("/control/peers")
        return next((found["link"] for found in peers if found["peer"] == peer), None)
