"""Trouble of a job that may pass by itself: what the job waits for, in words, and how long until it is tried again."""

from __future__ import annotations

from app.asker.reply_service import NoModelHere
from app.core.errors import AppError, failure_text, first_error
from app.training.trainer import HopsAway
from engine.errors import EngineError, is_disk_full
from p2p.errors import P2PError

EXPECTED = (AppError, EngineError, P2PError, OSError)  # they say themselves what is wrong
AGAIN_S, AGAIN_MOST_S = 10.0, 60.0  # until a job is tried again


def why_ended(error: BaseException) -> str:
    """Say in one short text why a job does not go on."""
    error = first_error(error)
    return str(error)[:1000] if isinstance(error, EXPECTED) else failure_text(error)


def what_it_waits_for(error: BaseException, *too_small: type[Exception]) -> str:
    """Say what a job waits for that ended with an error which may pass; nothing for any other error.

    `too_small` are errors of a machine that has too little memory now.
    """
    from engine.device.probe import is_memory_full  # loads torch, which a node without jobs does without
    from engine.errors import DeviceFull

    if isinstance(error, BaseExceptionGroup):
        each = [what_it_waits_for(one, *too_small) for one in error.exceptions]
        return each[0] if all(each) else ""
    if isinstance(error, NoModelHere):
        return f"waits for the model: {error}"
    if isinstance(error, HopsAway):
        return f"waits for members: {why_ended(error)}"
    if isinstance(error, (*too_small, DeviceFull)) or is_memory_full(error):
        return f"waits for memory: {why_ended(error)}"
    if is_disk_full(error) or (isinstance(error, AppError) and error.code == "disk_full"):
        return f"waits for room on the disk: {why_ended(error)}"
    return ""
