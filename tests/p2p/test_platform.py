"""Private files and locks, on this system and with what another system lacks taken away."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from p2p import platform
from p2p.platform import FileLock, write_private

HOLDER = """
import sys
import threading
from pathlib import Path
from p2p.platform import FileLock
lock = FileLock.try_acquire(Path(sys.argv[1]))
print("held" if lock else "refused", flush=True)
sys.stdin.read()
"""

posix_only = pytest.mark.skipif(os.name == "nt", reason="mode bits are POSIX's")


@posix_only
def test_private_files_and_folders_are_for_the_user_alone(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        folder = platform.private_directory(tmp_path / "a" / "b")
        platform.write_private(folder / "secret", b"one")
        assert platform.create_private(folder / "other", b"two")
    finally:
        os.umask(old_mask)
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("secret", "other"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
        assert platform.is_private(folder / name)
    (folder / "secret").chmod(0o644)
    assert not platform.is_private(folder / "secret")


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    before = tmp_path.stat().st_mode
    platform.private_directory(tmp_path)
    assert tmp_path.stat().st_mode == before


def test_write_replaces_and_create_does_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert platform.create_private(path, b"first")
    assert not platform.create_private(path, b"second")
    assert path.read_bytes() == b"first"
    platform.write_private(path, b"third")
    assert path.read_bytes() == b"third"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]  # no temporary is left behind


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    platform.write_private(path, b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space") as refused:
        platform.write_private(path, b"new")
    assert refused.value.filename == str(path)  # the system does not say on which disk
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_create_works_where_hard_links_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: str, target: Path) -> None:
        raise OSError(errno.EPERM, "operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "file"
    assert platform.create_private(path, b"first")
    assert not platform.create_private(path, b"second")
    assert path.read_bytes() == b"first"


def test_an_error_that_is_not_about_links_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: str, target: Path) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(OSError, match="input/output"):
        platform.create_private(tmp_path / "file", b"first")


def test_a_lock_excludes_other_processes_and_ends_with_them(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not platform.is_locked(path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert platform.is_locked(path)
        assert FileLock.try_acquire(path) is None
        with pytest.raises(TimeoutError, match="locked by another process"):
            FileLock.acquire(path, timeout_s=0.05)
    finally:
        holder.kill()
        holder.communicate()
    # Killed without a chance to tidy up: the kernel has given the lock back.
    with FileLock.acquire(path, timeout_s=5):
        assert platform.is_locked(path)
    assert not platform.is_locked(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no shared locks")
def test_who_looks_at_a_lock_is_no_holder_of_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with open(path, "ab") as looker:
        fcntl = importlib.import_module("fcntl")
        fcntl.flock(looker.fileno(), fcntl.LOCK_SH)
        assert not platform.is_locked(path)
        taken: list[FileLock | None] = []
        acquiring = threading.Thread(target=lambda: taken.append(FileLock.try_acquire(path)))
        acquiring.start()
        assert not platform.is_locked(path)
        fcntl.flock(looker.fileno(), fcntl.LOCK_UN)
        acquiring.join()
    [lock] = taken
    assert lock is not None
    assert platform.is_locked(path)
    assert FileLock.try_acquire(path) is None
    lock.release()
    assert not platform.is_locked(path)


class WindowsLocking:
    """The one call of `msvcrt` that is used, over bytes locked by anybody."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.busy = False

    def locking(self, handle: int, mode: int, length: int) -> None:
        assert (mode, length) == (self.LK_NBLCK, 1)
        if self.busy:
            raise PermissionError(errno.EACCES, "permission denied")


def test_locks_use_windows_own_call_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = WindowsLocking()
    monkeypatch.setattr(platform, "_fcntl", None)
    monkeypatch.setattr(platform, "_msvcrt", windows)
    first = FileLock.try_acquire(tmp_path / "lock")
    assert first is not None
    first.release()
    windows.busy = True
    assert FileLock.try_acquire(tmp_path / "lock") is None


def test_windows_renames_instead_of_linking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(source: str, target: Path) -> None:
        if Path(target).exists():
            raise FileExistsError(target)
        os.replace(source, target)

    path = tmp_path / "file"
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(platform, "_windows", True)
    assert platform.create_private(path, b"first")
    assert not platform.create_private(path, b"second")
    path.chmod(0o644)
    assert platform.is_private(path)  # mode bits mean nothing there
    assert path.read_bytes() == b"first"


@pytest.mark.parametrize(("refusals", "succeeds"), [(0, True), (3, True), (10**6, False)])
def test_a_file_that_is_open_is_replaced_a_moment_later_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int, succeeds: bool
) -> None:
    path, really, waits = tmp_path / "f", os.replace, list[float]()
    path.write_bytes(b"old")

    def replace(source: object, target: object) -> None:
        if len(waits) < refusals:
            raise PermissionError(13, "another program has it open")
        really(str(source), str(target))

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr("p2p.platform.time.sleep", waits.append)
    if refusals:  # POSIX replaces open files; an error there is another one, and raised at once
        with pytest.raises(PermissionError):
            write_private(path, b"new")
        assert waits == []
    monkeypatch.setattr("p2p.platform._windows", True)
    if succeeds:
        write_private(path, b"new")
        assert path.read_bytes() == b"new"
    else:
        with pytest.raises(PermissionError):
            write_private(path, b"new")
        assert path.read_bytes() == b"old"
        assert 0.5 < sum(waits) < 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_the_signals_that_ask_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_windows", False)
    assert platform.stop_signals() == (signal.SIGINT, signal.SIGTERM)
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGABRT, raising=False)
    monkeypatch.setattr(platform, "_windows", True)
    assert platform.stop_signals() == (signal.SIGINT, signal.SIGABRT)


def test_a_background_process_does_not_hear_this_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; print(os.getsid(0) == os.getpid())"
    if os.name != "nt":
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, **platform.apart_from_terminal()
        )
        assert done.stdout.strip() == "True"
    monkeypatch.setattr(platform, "_windows", True)
    assert platform.apart_from_terminal() == {"creationflags": 0x208}  # a console and a group of its own


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_a_process_may_open_more_files_than_shells_allow() -> None:
    code = """
import resource
from p2p.platform import allow_open_files
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
allow_open_files(512)
allow_open_files(64)
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (512, hard))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
