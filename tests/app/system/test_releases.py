"""The list of releases: signatures, stale lists, hostile servers; and the key that signs it."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli import main
from app.core.errors import AppError, RecordError
from app.system import releases
from app.system.releases import BadSignature, StaleList, check_current, check_signature, newest_release, parse_list

ROOT = Path(__file__).resolve().parents[3]
NOW = time.time()
GOOD: dict[str, Any] = {
    "format": 1,
    "serial": 7,
    "issued_at": int(NOW) - 60,
    "expires_at": int(NOW) + 86_400,
    "releases": [
        {"version": "0.9.10", "date": "2030-01-02", "url": "https://example.org/0.9.10", "notes": "faster"},
        {"version": "0.9.9", "date": "2030-01-01", "url": "https://example.org/0.9.9"},
    ],
}
# Made by minisign itself, over the bytes "test".
MINISIGN_KEY = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3"
MINISIGN_SIGNATURE = (
    b"untrusted comment: signature from minisign secret key\n"
    b"RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n"
    b"trusted comment: timestamp:1633700835\tfile:test\tprehashed\n"
    b"wLMDjy9FLAuxZ3q4NlEvkgtyhrr0gtTu6KC4KBJdITbbOeAi1zBIYo0v4iTgt8jJpIidRJnp94ABQkJAgAooBQ==\n"
)


def _key_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_key", ROOT / "packaging" / "release_key.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release_key"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


KEYS = _key_module()
KEY = KEYS.ReleaseKey.generate()


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A signed list in a file, and a program that trusts its key."""
    monkeypatch.setattr(releases.newest_release, "__kwdefaults__", {"fetch": None, "key": KEY.public_line})
    return publish(tmp_path, GOOD)


def publish(folder: Path, content: dict[str, Any], key: Any = KEY) -> Path:
    """Write a list and its signature."""
    path, data = folder / "releases.json", json.dumps(content).encode()
    path.write_bytes(data)
    path.with_name("releases.json.minisig").write_bytes(key.sign(data, path.name))
    return path


def test_a_signature_of_minisign_itself() -> None:
    check_signature(b"test", MINISIGN_SIGNATURE, MINISIGN_KEY)
    with pytest.raises(BadSignature, match="changed or is damaged"):
        check_signature(b"Test", MINISIGN_SIGNATURE, MINISIGN_KEY)
    with pytest.raises(BadSignature, match="another key"):
        check_signature(b"test", MINISIGN_SIGNATURE)
    with pytest.raises(BadSignature, match="changed"):  # the comment is signed too
        check_signature(b"test", MINISIGN_SIGNATURE.replace(b"file:test", b"file:best"), MINISIGN_KEY)


@given(at=st.integers(0, len(MINISIGN_SIGNATURE) - 1), byte=st.integers(0, 255))
def test_no_changed_signature_passes(at: int, byte: int) -> None:
    changed = bytearray(MINISIGN_SIGNATURE)
    changed[at] = byte
    untrusted = MINISIGN_SIGNATURE.index(b"\n")
    try:
        check_signature(b"test", bytes(changed), MINISIGN_KEY)
    except BadSignature:
        return
    assert changed == MINISIGN_SIGNATURE or at < untrusted or bytes(changed).split() == MINISIGN_SIGNATURE.split()


@given(st.binary(max_size=4000))
def test_garbage_is_no_signature(garbage: bytes) -> None:
    with pytest.raises(BadSignature):
        check_signature(b"test", garbage, MINISIGN_KEY)


def test_the_programs_own_key_is_one() -> None:
    assert len(releases._decoded(releases.RELEASE_KEY, 42)) == 42


def test_a_key_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "release.key"
    KEY.save(path)
    assert KEYS.ReleaseKey.load(path) == KEY
    assert path.stat().st_mode & 0o077 == 0 or sys.platform == "win32"
    with pytest.raises(FileExistsError):
        KEY.save(path)
    path.write_text("untrusted comment: x\nAAAA\n")
    with pytest.raises(KEYS.KeyFileError, match="without a passphrase"):
        KEYS.ReleaseKey.load(path)


def test_the_highest_version_is_the_newest(published: Path, tmp_path: Path) -> None:
    assert newest_release(str(published), tmp_path / "seen").version == "0.9.10"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 2}, "version 2 is not understood"),
        ({"serial": 0}, "serial"),
        ({"serial": "7"}, "serial"),
        ({"expires_at": None}, "expires_at"),
        ({"releases": []}, "at least one release"),
        ({"releases": ["0.9.9"]}, "not an object"),
        ({"releases": [{"version": "1.0.0rc1", "date": "", "url": ""}]}, "not a version"),
        ({"releases": [{"version": "1.0.0", "date": "", "url": "\x1b]0;owned\x07"}]}, "cannot be shown"),
        ({"releases": GOOD["releases"] * 200}, "at most 256"),
    ],
)
def test_lists_that_are_signed_but_wrong(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RecordError, match=complaint):
        parse_list(json.dumps(GOOD | change).encode())


def test_old_lists_are_refused() -> None:
    found = parse_list(json.dumps(GOOD).encode())
    check_current(found, NOW, 7)
    with pytest.raises(StaleList, match="older than one seen before"):
        check_current(found, NOW, 8)
    with pytest.raises(StaleList, match="has expired"):
        check_current(found, NOW + 90_000, 0)
    with pytest.raises(StaleList, match="in the future"):
        check_current(found, NOW - 90_000, 0)


def test_a_list_is_remembered_and_a_rollback_refused(published: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    newest_release(str(publish(tmp_path, GOOD | {"serial": 8})), seen)
    assert seen.read_text() == "8\n"
    with pytest.raises(StaleList, match="older than one seen before"):
        newest_release(str(publish(tmp_path, GOOD)), seen)
    seen.write_text("not a number")
    newest_release(str(published), seen)
    assert seen.read_text() == "7\n"


def test_a_refused_list_is_not_remembered(published: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    publish(tmp_path, GOOD | {"serial": 2**50}, KEYS.ReleaseKey(KEY.number, bytes(32)))
    with pytest.raises(BadSignature, match="changed or is damaged"):
        newest_release(str(published), seen)
    publish(tmp_path, GOOD | {"serial": 2**50, "expires_at": 1})
    with pytest.raises(StaleList):
        newest_release(str(published), seen)
    assert not seen.exists()


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--home", str(tmp_path / "home"), "update", "--check", "--from", str(published)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Shoal 0.9.10 was released on 2030-01-02" in said
    assert "https://example.org/0.9.10" in said
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["is_newer"] is True
    assert answer["newest"]["version"] == "0.9.10"
    old = {"version": "0.0.1", "date": "2020-01-01", "url": "https://example.org"}
    publish(tmp_path, GOOD | {"releases": [old]})
    assert main(words) == 0
    assert "the newest release is 0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "does not update itself"),
        (["--check"], 2, "name the list of releases"),
        (["--check", "--from", "no-such-file"], 1, "no-such-file cannot be read: No such file"),
        (["--check", "--from", "http://127.0.0.1:9/releases.json"], 1, "cannot be read: "),
        (["--check", "--from", "https://"], 1, "cannot be read: "),
    ],
)
def test_failures_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, said: str
) -> None:
    assert main(["--home", str(tmp_path), "update", *words]) == status
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends the given bytes to whoever connects."""
    answers: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    try:
                        connection.sendall(answers.pop(0))
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/releases.json", answers
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_list_from_a_server(
    published: Path, tmp_path: Path, server: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    url, answers = server
    for path in (published, published.with_name("releases.json.minisig")):
        answers.append(b"HTTP/1.0 200 OK\r\n\r\n" + path.read_bytes())
    assert newest_release(url, tmp_path / "seen").version == "0.9.10"


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"", "cannot be read"),
        (b"HTTP/1.0 404 Gone\r\n\r\n", "cannot be read: Gone"),
        (b"nonsense\r\n\r\n", "cannot be read"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + bytes(2 << 20), "more than 1048576 bytes"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\nshort", "not in minisign's format"),
    ],
    ids=["nothing", "gone", "nonsense", "too much", "cut off"],
)
def test_servers_that_lie(
    server: tuple[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, complaint: str
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    url, answers = server
    answers += [answer, b"HTTP/1.0 200 OK\r\n\r\nno signature"]
    with pytest.raises(AppError, match=complaint):
        newest_release(url, tmp_path / "seen")


def test_a_server_that_drips_is_given_up(server: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    url, answers = server
    answers.append(b"HTTP/1.0 200 OK\r\n\r\n" + bytes(1000))
    clock = iter([0.0, *(100.0 for _ in range(1000))])
    monkeypatch.setattr("app.system.releases.time.monotonic", lambda: next(clock))
    with pytest.raises(AppError, match="took more than 30 s"):
        releases.read_address(url, 10_000)
