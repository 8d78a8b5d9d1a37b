"""The errors of the application, under one base; an error's text is what the person reads.

A message says what happened, to which file, swarm or peer, and what to do. The command line prints it on one line and
exits with `exit_code`.
"""

from __future__ import annotations

from app.core.reasons import Reason, because


class AppError(Exception):
    """Something the person can act upon went wrong; `code` says what, for programs."""

    exit_code = 1
    code = "failed"

    def __init__(self, *words: object, code: str | None = None, peers: tuple[str, ...] = ()) -> None:
        super().__init__(*words)
        self.code, self.peers = code or self.code, peers

    @property
    def reason(self) -> Reason:
        """What went wrong, about whom, and what to do."""
        return because(self.code, str(self) or type(self).__doc__ or self.code, *self.peers)


def reason_of(error: Exception, *peers: str) -> Reason:
    """An error as the reason that a person reads, about `peers` where the error does not name its peer itself.

    Errors of `p2p` and `engine` name their code in `reason_code`; anything else is `internal`.
    """
    if isinstance(error, AppError):
        return error.reason
    code = str(getattr(error, "reason_code", "internal"))
    peer = getattr(error, "peer", None)
    text = str(error) or type(error).__doc__ or code
    return because(code, " ".join(text.split()), *(peers or ((str(peer),) if peer else ())))


class UsageError(AppError):
    """The command or a value in it makes no sense as written."""

    exit_code = 2
    code = "bad_usage"


class ConfigError(AppError):
    """A setting, or the configuration file itself, is not valid."""

    code = "bad_config"


class HomeError(AppError):
    """A file of the home folder cannot be read, written or understood."""

    code = "bad_home"


class NotRunning(AppError):
    """No node runs in this home folder, and the command needs one."""

    code = "not_running"


class AlreadyRunning(AppError):
    """Another node already runs in this home folder."""

    code = "already_running"


class RecordError(AppError, ValueError):
    """The bytes of a manifest, swarm record, announcement or invite are not valid; the one error their parsers raise.

    It is a `ValueError` so that `p2p`, which knows nothing of records, can take it as a validator's refusal.
    """

    code = "bad_record"


class UnknownSwarm(AppError):
    """Nobody that could be asked knows a swarm of this name."""

    code = "unknown_swarm"


class NameConflict(AppError):
    """Two or more swarms claim one name; the person must pin one as `name#hash`."""

    code = "name_conflict"
