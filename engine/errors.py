"""The engine's errors. Each message names the file or device and the fix; `reason_code` is the same for programs."""

from __future__ import annotations

import errno


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose; the text is shown to the user unchanged."""

    reason_code = "engine"


class SourceError(EngineError):
    """A model's files are missing, damaged, of an unknown kind, or contradict each other."""

    reason_code = "bad_source"


class ContextExceeded(EngineError):
    """A prompt, of so many tokens at least, does not fit into the model's context."""

    reason_code = "context_length_exceeded"

    def __init__(self, text: str, tokens: int = 0) -> None:
        super().__init__(text)
        self.tokens = tokens


class DeviceError(EngineError):
    """A device does not exist, is not usable, or has too little memory."""

    reason_code = "bad_device"


class DeviceFull(DeviceError):
    """A device's memory is full; hosting fewer blocks helps."""

    reason_code = "device_full"


class CacheFull(EngineError):
    """The KV cache has no room for this session now; another node may have."""

    reason_code = "cache_full"


class SessionError(EngineError):
    """A step does not fit its session: unknown or closed session, a gap in positions, or past the context."""

    reason_code = "bad_step"


class NotFinite(SessionError):
    """A session's input holds NaN, infinity, or a number too large for the compute dtype."""

    def __init__(self, text: str, session: bytes = b"") -> None:
        super().__init__(text)
        self.session = session


class TrainingError(EngineError):
    """A training job's settings, data or input do not fit the model, or belong to another version."""

    reason_code = "bad_training"


class TrainingFull(EngineError):
    """The memory for training has no room for a job, or for another micro-batch, now; the sender may try again later.

    `needed_bytes` are those of the job, if that is what has no room.
    """

    reason_code = "training_full"

    def __init__(self, text: str, needed_bytes: int = 0) -> None:
        super().__init__(text)
        self.needed_bytes = needed_bytes


def is_disk_full(error: BaseException) -> bool:
    """True for the system's error of a full disk, or of a quota that is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
