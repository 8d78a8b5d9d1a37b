"""A peer that takes a connection and vanishes in the handshake: it is named, and nothing waits for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.swarm.invite import Invite
from p2p.identity import Identity
from tests.process.node_process import Place, Serving, wait_until

GHOST = Identity(b"g" * 32).peer_id


@pytest.fixture
def ghost() -> Iterator[str]:
    """The address of somebody who hears the first bytes and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def vanish() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:  # the test is over
                    return
                with caller:
                    caller.recv(64)

        thread = threading.Thread(target=vanish, daemon=True)
        thread.start()
        yield f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{GHOST}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.soak
def test_a_peer_that_vanishes_in_the_handshake_is_named(ghost: str, tmp_path: Path) -> None:
    place = Place(tmp_path / "home", tmp_path / "cache")
    invite = str(Invite("ghost", "ab" * 32, (ghost,)))
    with Serving(place, "--discovery=invite", SHOAL_INVITE=invite) as node:
        node.up()

        words = f"ghost: no member answers (1 tried: {GHOST[-6:]}). They may be offline; still trying"
        wait_until(lambda: any(words in line for line in node.errors), "the peer is named")
        status = place.facts("status")
        assert (status["state"], status["reason"], status["why"]["peers"]) == ("joining", words, [GHOST])
        assert f"{GHOST} disconnected during the handshake" in (place.home / "logs" / "node.log").read_text()
        answer = place.shoal("chat", "hello")
        assert (answer.status, answer.err.count("\n")) == (1, 1)
        assert answer.seconds < 10
        assert node.end() == 0
