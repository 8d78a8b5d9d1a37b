"""Turns any exception of a command into one line for the user, and an exit status."""

from __future__ import annotations

import errno

from app.core.errors import AppError, first_error
from app.core.terminal_text import one_line
from engine.errors import EngineError, is_disk_full
from p2p.errors import P2PError

DEBUG_VARIABLE = "SHOAL_DEBUG"
_OUR_ERRORS = (AppError, EngineError, P2PError)


def explain(error: BaseException) -> str:
    """Return the text to print after `shoal: `, on one line and without control characters."""
    error = first_error(error, _OUR_ERRORS)
    if isinstance(error, _OUR_ERRORS):
        text = str(error) or (type(error).__doc__ or type(error).__name__)
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, OSError):
        text = _explain_os_error(error)
    elif isinstance(error, MemoryError):
        text = "out of memory: close other programs, or choose a smaller model or fewer blocks"
    else:
        text = f"internal error: {type(error).__name__}: {error}; run it again with {DEBUG_VARIABLE}=1 and report this"
    return " ".join(one_line(text).split())


def exit_status(error: BaseException) -> int:
    """Return the exit status: 2 for bad usage, 1 for any other failure."""
    error = first_error(error, _OUR_ERRORS)
    return error.exit_code if isinstance(error, AppError) else 1


def _explain_os_error(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    if is_disk_full(error):
        return f"the disk is full{where}: free some space and run it again"
    if error.errno == errno.EROFS:
        what = error.filename or "this"
        return f"{what} is on a read-only disk: make it writable, or choose another folder with --home or SHOAL_CACHE"
    if isinstance(error, PermissionError):
        return f"no permission{where}: check its owner and mode"
    return f"{error.strerror or error}{where}"
