"""What differs between POSIX and Windows: private files, locks between processes, asking a process to stop.

Every function works on both; where a system lacks the thing itself the nearest one is used and the docstring says
which. Nothing here knows peers, swarms or what the files mean; socket options are in `p2p.sockets`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


_fcntl = _optional("fcntl")  # POSIX only
_msvcrt = _optional("msvcrt")  # Windows only

_windows = os.name == "nt"

_RETRY_S = 0.02


# --- private files ---------------------------------------------------------------------------------------------------


def private_directory(path: Path) -> Path:
    """Make `path` and its parents; a folder made here is for this user alone (on Windows: by the profile's own ACL)."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def write_private(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` by `data` in one step, readable by this user alone; a reader sees the old bytes or the new.

    What is checked when it is read, and can be had again, need not be `durable`: after a power cut it may be damaged.
    """
    with _temporary(path, data, durable=durable) as temporary:
        os.replace(temporary, path)


def create_private(path: Path, data: bytes) -> bool:
    """Write `path` if it does not exist; False, and nothing is written, where somebody else was first."""
    with _temporary(path, data) as temporary:
        try:
            if _windows:
                os.rename(temporary, path)  # refuses an existing target there
            else:
                os.link(temporary, path)  # `rename` would replace it here
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                raise
            return _create_without_links(path, temporary)
    return True


def _create_without_links(path: Path, temporary: str) -> bool:
    """For file systems that know no hard links (FAT, some shares): every creator takes the same lock."""
    with FileLock.acquire(path.with_name(path.name + ".lock"), timeout_s=10.0):
        if path.exists():
            return False
        os.replace(temporary, path)
        return True


@contextlib.contextmanager
def _temporary(path: Path, data: bytes, *, durable: bool = True) -> Iterator[str]:
    """A complete, flushed copy of `data` beside `path`, removed at the end if it is still there."""
    # mkstemp creates with mode 0600 from the start, so that the bytes are never readable by others.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def is_private(path: Path) -> bool:
    """Whether no other user may read `path`; on Windows the profile's ACL is trusted and this is always True."""
    return _windows or path.stat().st_mode & 0o077 == 0


# --- locks between processes -----------------------------------------------------------------------------------------


class FileLock:
    """An exclusive lock on a file, held until `release` or the end of the process, however it ends."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    @classmethod
    def try_acquire(cls, path: Path) -> FileLock | None:
        """Take the lock now, or None where another holder has it."""
        file = open(path, "ab")  # stays open: closing it would give the lock back
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        return cls(file)

    @classmethod
    def acquire(cls, path: Path, *, timeout_s: float) -> FileLock:
        """Wait for the lock; raises `TimeoutError` naming the file."""
        deadline = time.monotonic() + timeout_s
        while (lock := cls.try_acquire(path)) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{path} is locked by another process")
            time.sleep(_RETRY_S)
        return lock

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _lock(file: IO[bytes]) -> None:
    if _fcntl is not None:
        _fcntl.flock(file.fileno(), _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    elif _msvcrt is not None:
        # One byte far behind the end, so that reading the file stays possible. A busy lock is a PermissionError.
        file.seek(2**30)
        _msvcrt.locking(file.fileno(), _msvcrt.LK_NBLCK, 1)


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock on `path` at this moment."""
    if not path.exists():
        return False
    lock = FileLock.try_acquire(path)
    if lock is None:
        return True
    lock.release()
    return False


# --- memory ----------------------------------------------------------------------------------------------------------


def keep_freed_memory() -> None:
    """Let the C library keep freed buffers of a few megabytes for the next ones, where it would give each back at once.

    glibc learns from the largest buffer that was ever freed, up to 32 MiB: without this, a transfer pays for the pages
    of every buffer anew, which is a tenth of its time. No page of this buffer is ever touched.
    """
    bytearray(31 * 2**20)


# --- signals ---------------------------------------------------------------------------------------------


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to drain and leave: SIGTERM on POSIX, Ctrl-Break on Windows, and SIGINT."""
    names = ("SIGINT", "SIGBREAK") if _windows else ("SIGINT", "SIGTERM")
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def ask_to_stop(pid: int) -> None:
    """Ask process `pid` to drain and leave; raises `ProcessLookupError` where there is none.

    On Windows it is Ctrl-Break, which reaches only a process that was started in its own group.
    """
    if pid <= 0:
        raise ProcessLookupError(f"{pid} is not a process")
    chosen = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM) if _windows else signal.SIGTERM
    os.kill(pid, chosen)
