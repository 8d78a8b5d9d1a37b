"""`shoal record` and `shoal replay`: what is written, within which limits, and what never is."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.api.client import Event
from app.cli import main
from app.cli.record import Recorder, new_file
from app.core.errors import AppError
from app.snapshot.codec import to_json
from app.snapshot.recording import read_recording
from app.system.bug_report import without_secrets
from tests.ui.fixed import HEALTHY

BEGAN_MS = 1_700_000_000_000
NOTE = Event("note", json.dumps({"number": 1, "at_ms": BEGAN_MS, "kind": "peer", "text": "murre is back"}))


def snapshots(count: int) -> Iterator[Event]:
    for number in range(count):
        yield Event("snapshot", json.dumps(to_json(replace(HEALTHY, sessions=number, version="0.1.0"))))


def recorder(most_bytes: int = 10**7, hidden: tuple[str, ...] = ()) -> Recorder:
    times = iter(range(BEGAN_MS, BEGAN_MS + 10**6, 500))
    return Recorder(most_bytes, lambda text: without_secrets(text, hidden), lambda: next(times))


def test_events_become_a_recording() -> None:
    pieces: list[bytes] = []
    one = recorder()
    assert one.run([NOTE, *snapshots(3), Event("other", "{}"), NOTE], pieces.append) == "the node has ended"
    recording = read_recording(b"".join(pieces), "test")
    assert (len(recording), recording.version, len(recording.notes)) == (3, "0.1.0", 2)
    assert recording.times_ms == [1000, 1500, 2000]
    assert (one.frames, one.bytes, one.seconds) == (3, sum(map(len, pieces)), 3.0)
    assert all(piece.endswith(b"\n") for piece in pieces)  # each write is whole lines


def test_the_size_is_a_limit() -> None:
    pieces: list[bytes] = []
    one = recorder(most_bytes=20_000)
    assert "--size" in one.run(snapshots(10**6), pieces.append)
    assert sum(map(len, pieces)) == one.bytes <= 20_000
    assert len(read_recording(b"".join(pieces), "test")) == one.frames >= 100


def test_secrets_and_invites_are_removed() -> None:
    secret, invite = "a-token-that-is-long-enough", "shoal:" + "a2b3" * 12
    nasty = replace(HEALTHY, reason=f"token {secret}", name=invite, version="0.1.0")
    note = Event("note", json.dumps({"number": 1, "at_ms": 1, "kind": "x", "text": f"{secret} {invite}"}))
    pieces: list[bytes] = []
    recorder(hidden=(secret,)).run([note, Event("snapshot", json.dumps(to_json(nasty))), note], pieces.append)
    whole = b"".join(pieces)
    assert secret.encode() not in whole
    assert invite.encode() not in whole
    assert whole.count(b"[removed]") == 6
    read_recording(whole, "test")


def test_a_new_file_is_private_and_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "a.shoal"
    with new_file(path) as write:
        write(b"one\n")
        assert path.read_bytes() == b"one\n"  # nothing waits in a buffer for a crash
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(AppError, match="exists already"), new_file(path):
        pass
    with pytest.raises(AppError, match="cannot be written"), new_file(tmp_path / "missing" / "a"):
        pass


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file of this process may grow beyond this size: a write is cut short there, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    yield 30_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_written_before_the_disk_was_full_can_be_replayed(tmp_path: Path, small_files: int) -> None:
    path = tmp_path / "a.shoal"
    with pytest.raises(AppError, match="cannot be written any more: File too large"), new_file(path) as write:
        recorder().run(snapshots(10**6), write)
    assert path.stat().st_size == small_files
    assert len(read_recording(path.read_bytes(), "test")) > 100


def test_a_full_disk_is_said_in_plain_words(tmp_path: Path) -> None:
    words = f"cannot be written any more: {os.strerror(errno.ENOSPC)}; what was recorded until then"
    with pytest.raises(AppError, match=words), new_file(tmp_path / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["record", "x.shoal"], 1, "no node runs"),
        (["record", "--cast", "x.cast"], 1, "no node runs"),
        (["record", "x.shoal", "--size", "1kB"], 2, "--size must be from 100kB"),
        (["record", "x.shoal", "--size", "1TB"], 2, "--size must be from 100kB"),
        (["replay", "missing.shoal"], 1, "missing.shoal cannot be read"),
        (["replay", "."], 1, "cannot be read"),
        (["replay", "noise.shoal"], 1, "noise.shoal is not a recording of Shoal"),
        (["replay", "newer.shoal"], 1, "newer version of Shoal"),
        (["replay", "good.shoal"], 2, "needs a terminal"),
    ],
)
def test_failures_are_one_line(
    argv: list[str],
    status: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("noise.shoal").write_bytes(b"\x1b[2Jnoise\n")
    Path("newer.shoal").write_bytes(b'{"shoal_recording": 99, "node": "9", "at_ms": 1}\n')
    pieces: list[bytes] = []
    recorder().run(snapshots(1), pieces.append)
    Path("good.shoal").write_bytes(b"".join(pieces))
    assert main([*argv, "--home", str(tmp_path / "home")]) == status
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not Path("x.shoal").exists()


def test_the_time_is_a_limit_even_if_the_node_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node that sends one snapshot and then falls silent, as a frozen process does."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def silent_node() -> None:
        connected, _ = listener.accept()
        kept.append(connected)
        connected.recv(65_536)
        [event] = snapshots(1)
        answer = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        connected.sendall(f"{answer}event: snapshot\ndata: {event.text}\n\n".encode())

    threading.Thread(target=silent_node, daemon=True).start()
    from app.api.client import Client

    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setattr("app.api.client.client_of", lambda home: Client(url, "token"))
    path = tmp_path / "a.shoal"
    assert main(["record", str(path), "--for", "1s", "--json", "--home", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["ended"], facts["frames"]) == ("the time is over", 1)
    assert len(read_recording(path.read_bytes(), "a")) == 1
    for one in (*kept, listener):
        one.close()
