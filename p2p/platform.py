"""Private files, locks between processes, background processes and stop signals, on POSIX and Windows alike.

Where one system lacks a feature the nearest one is used and the docstring says which. This module does not know the
contents of the files; socket options are in `p2p.sockets`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


_fcntl = _optional("fcntl")  # POSIX only
_resource = _optional("resource")  # POSIX only
_msvcrt = _optional("msvcrt")  # Windows only

_windows = os.name == "nt"
_DETACHED_PROCESS, _CREATE_NEW_PROCESS_GROUP = 0x0008, 0x0200  # of Windows; `subprocess` has them only there

_RETRY_S = 0.02
_LONGEST_RETRY_S = 0.2
_LOOK_S = 0.001  # about as long as somebody looks whether a file is locked
_LOOKS, _LOOKS_ON_WINDOWS = 1000, 5
_REPLACE_TRIES = 9  # with the pauses above, about a second


# --- private files ---------------------------------------------------------------------------------------------------


def private_directory(path: Path) -> Path:
    """Create `path` and its parents; a new folder has mode 0700 (on Windows the profile's ACL protects it)."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def write_private(path: Path, data: bytes | Iterable[bytes], *, durable: bool = True) -> None:
    """Replace `path` by `data`, which may come in pieces, atomically with mode 0600.

    A reader sees either the old bytes or the new.

    Without `durable` the file is not flushed to disk and may be damaged after a power cut; use that only for files
    that are verified on reading and can be fetched again.
    """
    with _temporary(path, data, durable=durable) as temporary:
        replace_file(temporary, path)


def replace_file(source: str | Path, target: Path) -> None:
    """Rename a file over another one.

    Windows refuses that while any process has one of them open, as a virus scanner or a thread that reads it does for
    a moment; it is tried again for about a second there. May block for as long: call it in a thread.
    """
    for attempt in range(_REPLACE_TRIES if _windows else 1):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if not _windows or attempt == _REPLACE_TRIES - 1:
                raise
            time.sleep(min(_RETRY_S * 2**attempt, _LONGEST_RETRY_S))


def create_private(path: Path, data: bytes) -> bool:
    """Write `path` if it does not exist; False, and nothing written, if it does."""
    with _temporary(path, data) as temporary:
        try:
            if _windows:
                os.rename(temporary, path)  # fails on Windows if the target exists
            else:
                os.link(temporary, path)  # `rename` would replace the target on POSIX
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                raise
            return _create_without_links(path, temporary)
    return True


def _create_without_links(path: Path, temporary: str) -> bool:
    """Do the same under a lock file, for file systems without hard links (FAT, some network shares)."""
    with FileLock.acquire(path.with_name(path.name + ".lock"), timeout_s=10.0):
        if path.exists():
            return False
        replace_file(temporary, path)
        return True


@contextlib.contextmanager
def _temporary(path: Path, data: bytes | Iterable[bytes], *, durable: bool = True) -> Iterator[str]:
    """Yield the name of a temporary file beside `path` that holds `data`; it is removed if it was not renamed."""
    # mkstemp creates the file with mode 0600, so that other users can never read the bytes.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines([data] if isinstance(data, bytes | bytearray | memoryview) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield name
    except OSError as error:
        if error.filename is None:  # the system does not say on which disk there is no room
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def is_private(path: Path) -> bool:
    """True if no other user may read `path`; always True on Windows, where the profile's ACL is trusted."""
    return _windows or path.stat().st_mode & 0o077 == 0


# --- locks between processes -----------------------------------------------------------------------------------------


class FileLock:
    """An exclusive lock on a file, held until `release` or until the process ends, even by a crash."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    @classmethod
    def try_acquire(cls, path: Path) -> FileLock | None:
        """Acquire the lock; None if another process holds it. Only those who just look at it are waited for."""
        file = open(path, "a+b")  # stays open: closing it would release the lock
        try:
            if _lock_soon(file, shared=False):
                return cls(file)
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    @classmethod
    def acquire(cls, path: Path, *, timeout_s: float) -> FileLock:
        """Wait for the lock; raises `TimeoutError` after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (lock := cls.try_acquire(path)) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{path} is locked by another process")
            time.sleep(_RETRY_S)
        return lock

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_locked(path: Path) -> bool:
    """True if a process holds the lock on `path`; others that look at it at this moment do not count."""
    if not path.exists():
        return False
    with open(path, "a+b") as file:
        return not _lock_soon(file, shared=True)


def _lock_soon(file: IO[bytes], *, shared: bool) -> bool:
    """Lock a file, shared in order to look at it only; False if somebody holds it.

    Who looks at it has a lock too, for a moment: that is waited for. On Windows, which knows no shared locks, the two
    cannot be told apart.
    """
    for _ in range(_LOOKS if _fcntl else _LOOKS_ON_WINDOWS):
        if _lock(file, shared=shared):
            return True
        if _fcntl is not None:
            if not _lock(file, shared=True):
                return False
            _fcntl.flock(file.fileno(), _fcntl.LOCK_UN)
        time.sleep(_LOOK_S)
    return False


def _lock(file: IO[bytes], *, shared: bool) -> bool:
    """Lock a file that is open for reading, which NFS wants for shared locks, and for writing, for the others."""
    try:
        if _fcntl is not None:
            _fcntl.flock(file.fileno(), (_fcntl.LOCK_SH if shared else _fcntl.LOCK_EX) | _fcntl.LOCK_NB)
        elif _msvcrt is not None:
            # One byte far beyond the end, so that the file stays readable. A held lock raises PermissionError.
            file.seek(2**30)
            _msvcrt.locking(file.fileno(), _msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        return False
    return True


# --- memory and open files -------------------------------------------------------------------------------------------


def keep_freed_memory() -> None:
    """Make glibc keep freed buffers of a few megabytes for reuse instead of returning them to the kernel.

    glibc sets that threshold to the largest buffer ever freed, up to 32 MiB. Without this a transfer pays for new pages
    with every buffer, a tenth of its time. The buffer freed here is never written to, so it costs no memory.
    """
    bytearray(31 * 2**20)


def allow_open_files(wanted: int = 8192) -> None:
    """Let this process open so many files and sockets, as far as the system allows; it may be 256 or 1024 otherwise.

    Peers and their addresses are dialled in parallel, and a node without file descriptors can do nothing at all.
    """
    if _resource is not None:
        soft, hard = _resource.getrlimit(_resource.RLIMIT_NOFILE)
        most = wanted if hard == _resource.RLIM_INFINITY else min(wanted, hard)
        if soft != _resource.RLIM_INFINITY and soft < most:
            with contextlib.suppress(OSError, ValueError):
                _resource.setrlimit(_resource.RLIMIT_NOFILE, (most, hard))


# --- processes and signals -------------------------------------------------------------------------------------------


def system_program(name: str) -> str | None:
    """Return the path of a program of the system; None if there is none.

    Windows looks for a program in the folder first in which the user happens to be: a file of that name there, as in a
    folder of downloads, would be run. So only the folder of the system counts there.
    """
    if not _windows:
        return shutil.which(name)
    path = Path(os.environ.get("SystemRoot", r"C:\Windows"), "System32", f"{name}.exe")
    return str(path) if path.is_file() else None


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module of this program in a process of its own.

    The folder in which the user happens to be stays out of Python's path: a folder `app` there, or a file with the name
    of any module, would be run in place of this program's own. So do Python's variables if they were left out here.
    """
    return [sys.executable, "-I" if sys.flags.isolated else "-P", "-m", module, *words]


def apart_from_terminal() -> dict[str, Any]:
    """Options of `subprocess.Popen` for a process that this terminal's Ctrl-C and end do not reach."""
    if not _windows:
        return {"start_new_session": True}
    return {"creationflags": _DETACHED_PROCESS | _CREATE_NEW_PROCESS_GROUP}


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to finish its work and exit: SIGINT, and SIGTERM (Windows: Ctrl-Break)."""
    names = ("SIGINT", "SIGBREAK") if _windows else ("SIGINT", "SIGTERM")
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def ask_to_stop(pid: int) -> bool:
    """Ask another process of this user to finish its work and exit; False on Windows, where no other program can."""
    if _windows:
        return False
    os.kill(pid, signal.SIGTERM)
    return True
