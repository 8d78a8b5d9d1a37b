"""The errors of the application, under one base; their messages are shown to the user as they are.

A message says what happened, to which file, swarm or peer, and what to do. The command line prints it on one line and
exits with `exit_code`; the API sends its `reason`.
"""

from __future__ import annotations

from app.core.reasons import Reason, because


class AppError(Exception):
    """A failure that the user can act on; `code` is a stable name of it for programs, and a key of `NEXT_STEPS`."""

    exit_code = 1
    code = "failed"

    def __init__(self, *words: object, code: str | None = None, peers: tuple[str, ...] = ()) -> None:
        super().__init__(*words)
        self.code, self.peers = code or self.code, peers

    @property
    def reason(self) -> Reason:
        """The error as a `Reason`: code, message, peers concerned, and next step."""
        return because(self.code, str(self) or type(self).__doc__ or self.code, *self.peers)


def first_error(error: BaseException, preferred: tuple[type[BaseException], ...] = ()) -> BaseException:
    """Return the first plain error in an exception group, one of the `preferred` types if there is any.

    A nursery wraps even a single error in a group. An error that is not a group is returned as it is.
    """
    while isinstance(error, BaseExceptionGroup):
        error = (error.subgroup(preferred) or error).exceptions[0]
    return error


def failure_text(error: BaseException) -> str:
    """Say in one short text why a job failed with an error that is none of ours, such as one of torch."""
    first = first_error(error)
    return f"{type(first).__name__} while computing: {first}"[:1000]


def reason_of(error: BaseException, *peers: str) -> Reason:
    """Convert any error to a `Reason` about `peers`, or about the error's own `peer` if none are given.

    Errors of `p2p` and `engine` name their code in `reason_code`; all others are `internal`.
    """
    if isinstance(error, AppError):
        return error.reason
    code = str(getattr(error, "reason_code", "internal"))
    peer = getattr(error, "peer", None)
    text = str(error) or type(error).__doc__ or code
    return because(code, " ".join(text.split()), *(peers or ((str(peer),) if peer else ())))


class UsageError(AppError):
    """A command, or a value given to it, is not valid."""

    exit_code = 2
    code = "bad_usage"


class ConfigError(AppError):
    """A setting, or the configuration file itself, is not valid."""

    code = "bad_config"


class BadValue(ConfigError):
    """A value that the user gave for a setting is not valid; one in the configuration file is a `ConfigError`."""

    exit_code = 2
    code = "bad_value"


class HomeError(AppError):
    """A file of the home folder cannot be read or written, or is damaged."""

    code = "bad_home"


class NotRunning(AppError):
    """No node runs in this home folder, and the command needs one."""

    code = "not_running"


class AlreadyRunning(AppError):
    """Another node already runs in this home folder."""

    code = "already_running"


class RecordError(AppError, ValueError):
    """The bytes of a manifest, swarm record, announcement or invite are not valid; the only error their parsers raise.

    It is a `ValueError` because `p2p`, which does not know records, expects that of the validators passed to it.
    """

    code = "bad_record"


class NoAdapter(AppError):
    """No adapter of this name is in this home, or it belongs to another model."""

    code = "adapter_not_found"


class UnknownSwarm(AppError):
    """No reachable peer knows a swarm of this name."""

    code = "unknown_swarm"


class NameConflict(AppError):
    """Several swarms have this name; the user must choose one as `name#hash`."""

    code = "name_conflict"
