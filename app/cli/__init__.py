"""The command line: runs one command; a failure is one line and an exit status.

Exit status 0 is success, 1 failure, 2 bad usage, 3 not done yet and still being tried. Each module here defines the
commands of one subject; `registry` lists the modules. Commands ask a running node through `app.api.client`, or else
work on the home folder's files; the work itself is done in the other packages of `app` and in `engine`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from app.cli.command import Command
from app.cli.parser import Parser
from app.cli.registry import all_commands
from app.system import console

ENVIRONMENT = "NO_COLOR=1 shows everything without colours; SHOAL_DEBUG=1 shows the traceback of an error."


def main(argv: Sequence[str] | None = None) -> int:
    """Run `shoal` with these arguments and return the exit status."""
    console.prepare()
    commands = all_commands()
    arguments = build_parser(commands).parse_all(argv)
    if os.environ.get("SHOAL_DEBUG"):
        return run(commands, arguments)
    try:
        status = run(commands, arguments)
        sys.stdout.flush()  # so that a closed pipe or a full disk raises here and not at exit
        return status
    except BrokenPipeError:
        # The reader of the pipe is gone (`shoal models | head`): without this, the flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        from app.cli.failures import exit_status, explain

        print(f"shoal: {explain(error)}", file=sys.stderr)
        return exit_status(error)


def run(commands: Sequence[Command], arguments: argparse.Namespace) -> int:
    """Run the chosen command, or the dashboard if none was given."""
    from app.config.home import home_folder

    arguments.home = home_folder(getattr(arguments, "home", None))
    chosen: Command | None = arguments.command
    if chosen is None:
        from app.cli.dashboard import run_dashboard

        return run_dashboard(arguments)
    return chosen.run(arguments)


def build_parser(commands: Sequence[Command]) -> Parser:
    """Build the parser of the whole command line."""
    words = "Run large language models together with other machines, peer to peer."
    parser = Parser(prog="shoal", description=words, epilog=ENVIRONMENT)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    _add_home(parser)
    parser.add_argument("--node", metavar="URL", help="show the dashboard of the node at this URL (token: SHOAL_TOKEN)")
    parser.set_defaults(command=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in commands:
        child = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(child)
        child.set_defaults(command=command, **({"json": False} if command.prints_facts else {}))
        for one in (child, *_actions_of(child)):
            _add_home(one)
            if command.prints_facts:
                words = "print JSON for programs"
                one.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=words)
            one.set_defaults(parser=one)
    return parser


def _actions_of(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of a command's actions, such as `shoal config set`; empty for most commands."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [one for group in groups for one in group.choices.values()]


def _add_home(parser: argparse.ArgumentParser) -> None:
    # SUPPRESS, here and for --json: the default of an inner parser would overwrite a value given before its name.
    where = "the node's home folder (default: SHOAL_HOME, else the user's data folder)"
    parser.add_argument("--home", metavar="DIR", default=argparse.SUPPRESS, help=where)


class _Version(argparse.Action):
    """Looks the version up only when asked for, because the look-up takes longer than the rest of the start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"shoal {importlib.metadata.version('shoal')}")
        parser.exit()
