"""The errors that the engine raises; each message names the file or device and the mend."""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose; its text is shown to the person as it is."""


class SourceError(EngineError):
    """A model's files are missing, damaged, of an unknown kind, or contradict each other."""


class DeviceError(EngineError):
    """A device does not exist, is not usable, or has not enough memory."""


class CacheFull(EngineError):
    """The KV budget has no room for this session now; another node may have."""


class SessionError(EngineError):
    """A step does not fit the state of its session (unknown, closed, a gap, past the context)."""
