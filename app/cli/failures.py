"""Turns whatever a command raises into one line that says what to do."""

from __future__ import annotations

import errno

from app.core.errors import AppError
from engine.errors import EngineError
from p2p.errors import P2PError

DEBUG_VARIABLE = "SHOAL_DEBUG"
_OUR_OWN = (AppError, EngineError, P2PError)


def explain(error: BaseException) -> str:
    """The text after `shoal: `, without line breaks."""
    # A nursery wraps what its tasks raise, even a single error.
    if isinstance(error, BaseExceptionGroup):
        return explain(_most_telling(error))
    if isinstance(error, _OUR_OWN):
        text = str(error) or (type(error).__doc__ or type(error).__name__)
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, OSError):
        text = _explain_os_error(error)
    elif isinstance(error, MemoryError):
        text = "out of memory: close other programs, or choose a smaller model or fewer blocks"
    else:
        text = f"internal error: {type(error).__name__}: {error}; run it again with {DEBUG_VARIABLE}=1 and report this"
    return " ".join(text.split())


def exit_status(error: BaseException) -> int:
    """2 where the person's words make no sense, else 1."""
    if isinstance(error, BaseExceptionGroup):
        return exit_status(_most_telling(error))
    return error.exit_code if isinstance(error, AppError) else 1


def _most_telling(group: BaseExceptionGroup[BaseException]) -> BaseException:
    ours = group.subgroup(_OUR_OWN)
    return (ours or group).exceptions[0]


def _explain_os_error(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{where}: free some space and run it again"
    if isinstance(error, PermissionError):
        return f"no permission{where}: check its owner and mode"
    return f"{error.strerror or error}{where}"
