"""The dashboard as an asciicast: a terminal that plays it shows the screen; limits and a full disk end it in order."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator

import pytest

from app.api.client import Event, Hangup
from app.core.errors import NotRunning
from app.snapshot.codec import to_json
from tests.ui.driving import ScriptedDoor, ScriptedNode
from tests.ui.fixed import HEALTHY
from ui.cast import CastDashboard, cast_header, cast_output

SIZE = (100, 30)
PATIENCE_S = 20.0
ESCAPES = "\x1b]0;owned\x07\x1b[2J"


class EventfulNode(ScriptedNode):
    """A node that sends one snapshot, and ends once the test says so."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.may_end = threading.Event()

    def events(self, *, silence_s: float = 60.0, hangup: Hangup | None = None) -> Iterator[Event]:
        yield Event("snapshot", json.dumps({**to_json(HEALTHY), "name": self._name}))
        self.may_end.wait(PATIENCE_S)
        raise NotRunning("gone")


def cast(name: str, write: Callable[[bytes], None], *, most_bytes: int = 10**6, tab: str = "overview") -> CastDashboard:
    """A cast of a node with this name, run until the name was painted or a limit was reached."""
    node = EventfulNode(name)

    def written(piece: bytes) -> None:
        write(piece)
        if b"tern" in piece or b"RTX" in piece:  # the snapshot is on the screen
            node.may_end.set()

    app = CastDashboard(ScriptedDoor(node), written, tab=tab, most_bytes=most_bytes, most_s=PATIENCE_S, size=SIZE)
    app.run(size=SIZE)
    node.may_end.set()
    return app


def outputs(raw: bytes) -> list[tuple[float, str]]:
    """The output of an asciicast, checked line by line against its version 2."""
    header, *lines = [json.loads(line) for line in raw.decode().splitlines()]
    assert (header["version"], header["width"], header["height"]) == (2, *SIZE)
    assert all(kind == "o" for _, kind, _ in lines)
    times = [at_s for at_s, _, _ in lines]
    assert times == sorted(times)
    return [(at_s, text) for at_s, _, text in lines]


def test_the_form_is_asciicast_two() -> None:
    assert cast_header((80, 24), 5) == b'{"version":2,"width":80,"height":24,"timestamp":5,"title":"shoal"}\n'
    assert cast_output(1.23456, "\x1b[1m│ü") == '[1.235,"o","\\u001b[1m│ü"]\n'.encode()
    assert json.loads(cast_output(0, "\ud800"))[2] == "?"  # what no terminal could be sent


def test_it_ends_with_the_node_and_shows_its_screen() -> None:
    pieces: list[bytes] = []
    app = cast("dory", pieces.append)
    shown = "".join(text for _, text in outputs(b"".join(pieces)))
    assert app.ended == "the node has ended"
    assert "dory" in shown
    assert app.bytes == sum(map(len, pieces))
    assert all(piece.endswith(b"\n") for piece in pieces)


def test_escape_sequences_of_peers_are_not_in_it() -> None:
    pieces: list[bytes] = []
    cast(ESCAPES, pieces.append)
    assert "\x1b]0;" not in "".join(text for _, text in outputs(b"".join(pieces)))


def test_the_size_is_a_limit() -> None:
    pieces: list[bytes] = []
    app = cast("dory", pieces.append, most_bytes=2000)
    assert "--size" in app.ended
    assert sum(map(len, pieces)) <= 2000


def test_a_full_disk_ends_it() -> None:
    def write(piece: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    app = cast("dory", write)
    assert app.trouble is not None
    assert app.trouble.errno == errno.ENOSPC


@pytest.mark.parametrize(("tab", "words"), [("overview", "this node"), ("swarm", "osprey")])
def test_it_shows_the_chosen_tab(tab: str, words: str) -> None:
    pieces: list[bytes] = []
    cast("dory", pieces.append, tab=tab)
    assert words in "".join(text for _, text in outputs(b"".join(pieces)))


def test_the_time_is_a_limit() -> None:
    app = CastDashboard(
        ScriptedDoor(EventfulNode("dory")), lambda piece: None, tab="overview", most_bytes=10**6, most_s=0.2, size=SIZE
    )
    app.run(size=SIZE)
    assert app.ended == "the time is over"
