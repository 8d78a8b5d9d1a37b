"""The errors of the application, under one base; an error's text is what the person reads.

A message says what happened, to which file, swarm or peer, and what to do. The command line prints it on one line and
exits with `exit_code`.
"""

from __future__ import annotations


class AppError(Exception):
    """Something the person can act upon went wrong."""

    exit_code = 1


class UsageError(AppError):
    """The command or a value in it makes no sense as written."""

    exit_code = 2


class ConfigError(AppError):
    """A setting, or the configuration file itself, is not valid."""


class HomeError(AppError):
    """A file of the home folder cannot be read, written or understood."""


class NotRunning(AppError):
    """No node runs in this home folder, and the command needs one."""


class AlreadyRunning(AppError):
    """Another node already runs in this home folder."""


class RecordError(AppError, ValueError):
    """The bytes of a manifest, swarm record, announcement or invite are not valid; the one error their parsers raise.

    It is a `ValueError` so that `p2p`, which knows nothing of records, can take it as a validator's refusal.
    """


class UnknownSwarm(AppError):
    """Nobody that could be asked knows a swarm of this name."""


class NameConflict(AppError):
    """Two or more swarms claim one name; the person must pin one as `name#hash`."""
