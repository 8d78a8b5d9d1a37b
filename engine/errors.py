"""The errors that the engine raises; each message names the file or device and the mend, `reason_code` says it for
programs."""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose; its text is shown to the person as it is."""

    reason_code = "engine"


class SourceError(EngineError):
    """A model's files are missing, damaged, of an unknown kind, or contradict each other."""

    reason_code = "bad_source"


class DeviceError(EngineError):
    """A device does not exist, is not usable, or has not enough memory."""

    reason_code = "bad_device"


class CacheFull(EngineError):
    """The KV budget has no room for this session now; another node may have."""

    reason_code = "cache_full"


class SessionError(EngineError):
    """A step does not fit the state of its session (unknown, closed, a gap, past the context)."""

    reason_code = "bad_step"
