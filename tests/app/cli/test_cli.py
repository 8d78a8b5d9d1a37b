"""The command line's frame: exit statuses, one line on failure, options before and after the command's name."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import app.cli
from app.cli.command import Command, print_json
from app.cli.failures import explain
from app.cli.registry import all_commands
from app.cli.status import coverage_lines
from app.core.errors import AppError, UsageError, first_error
from engine.errors import EngineError, SourceError
from p2p.errors import P2PError

Run = Callable[[argparse.Namespace], int]


@pytest.fixture
def with_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Makes `shoal try` run a function."""

    def install(run: Run) -> None:
        command = Command("try", "try it", run, prints_facts=True)
        monkeypatch.setattr(app.cli, "all_commands", lambda: (command,))
        monkeypatch.delenv("SHOAL_DEBUG", raising=False)

    return install


def raising(error: BaseException) -> Run:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (SourceError("model.gguf is cut short:\nfetch it again"), 1, "model.gguf is cut short: fetch it again"),
        (P2PError("peer 12D3 is gone"), 1, "peer 12D3 is gone"),
        (AppError("no node runs here; start one with `shoal serve`"), 1, "no node runs here; start one with"),
        (UsageError("12:4 is no span"), 2, "12:4 is no span"),
        (KeyboardInterrupt(), 1, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "/cache/part"), 1, "the disk is full: /cache/part: free"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 1, "the disk is full: free"),
        (PermissionError(errno.EACCES, "Permission denied", "/home/x"), 1, "no permission: /home/x: check"),
        (
            OSError(errno.EROFS, "Read-only file system", "/a/jobs"),
            1,
            "/a/jobs is on a read-only disk: make it writable,",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "/a"), 1, "No such file: /a"),
        (MemoryError(), 1, "out of memory"),
        (ZeroDivisionError("division by zero"), 1, "internal error: ZeroDivisionError: division by zero; run it again"),
        (BaseExceptionGroup("", [ExceptionGroup("", [ValueError("x"), AppError("the cause")])]), 1, "the cause"),
        (BaseExceptionGroup("", [ExceptionGroup("", [UsageError("so not")])]), 2, "so not"),
    ],
)
def test_a_failure_is_one_line_and_a_status(
    error: BaseException,
    status: int,
    line: str,
    with_command: Callable[[Run], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_command(raising(error))
    assert app.cli.main(["try"]) == status
    captured = capsys.readouterr()
    assert captured.err.startswith(f"shoal: {line}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_traceback_is_shown_when_asked_for(
    with_command: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_command(raising(AppError("no")))
    monkeypatch.setenv("SHOAL_DEBUG", "1")
    with pytest.raises(AppError):
        app.cli.main(["try"])


def test_an_error_without_words_says_its_kind() -> None:
    assert explain(SourceError()) == SourceError.__doc__


def test_an_error_has_no_control_characters_of_those_who_wrote_parts_of_it() -> None:
    assert explain(EngineError("the last failed with\n12D3KooW: \x1b]0;owned\x07\x1b[2J")) == (
        "the last failed with 12D3KooW: ]0;owned[2J"
    )


def test_of_several_errors_the_first_of_ours_is_told_however_deep_it_lies() -> None:
    ours = SourceError("no such file")
    group = BaseExceptionGroup("", [KeyError("bug"), BaseExceptionGroup("", [ExceptionGroup("", [OSError(), ours])])])
    assert first_error(group, (EngineError,)) is ours
    assert explain(group) == "no such file"
    assert isinstance(first_error(group), KeyError)
    assert isinstance(first_error(ExceptionGroup("", [ExceptionGroup("", [ValueError()])]), (EngineError,)), ValueError)
    assert first_error(ours) is ours


def with_command_that_notes_home(with_command: Callable[[Run], None]) -> list[Path]:
    """Makes `shoal try` add its home folder to the list that this returns."""
    seen: list[Path] = []

    def run(arguments: argparse.Namespace) -> int:
        seen.append(arguments.home)
        return 0

    with_command(run)
    return seen


@pytest.mark.parametrize("arguments", [["--home", "/a/b", "try"], ["try", "--home", "/a/b"]])
def test_home_goes_before_or_after_the_command(arguments: list[str], with_command: Callable[[Run], None]) -> None:
    seen = with_command_that_notes_home(with_command)
    assert app.cli.main(arguments) == 0
    assert seen == [Path("/a/b").absolute()]


def actions_of_commands() -> list[tuple[str, ...]]:
    """Each command that has actions, with one of them and what it needs."""
    values = {"config": {"get": "max_vram", "set": "max_vram 220MB", "unset": "max_vram", "list": ""}}
    values["id"] = {"show": "", "export": "file", "import": "file"}
    values["invites"] = {"list": "", "approve": "peer", "refuse": "peer", "cancel": "id"}
    return [(command, action, *words.split()) for command, of in values.items() for action, words in of.items()]


@pytest.mark.parametrize("words", actions_of_commands(), ids=lambda words: " ".join(words))
def test_actions_of_commands_take_the_options_of_all_commands(words: tuple[str, ...]) -> None:
    parser = app.cli.build_parser(all_commands())
    for argv in ([*words, "--home", "/a/b", "--json"], ["--home", "/a/b", words[0], "--json", *words[1:]]):
        parsed = parser.parse_all(argv)
        assert (parsed.home, parsed.json, parsed.action) == ("/a/b", True, words[1])
    assert parser.parse_all(words).json is False


def test_every_action_of_a_command_is_tested() -> None:
    parser = app.cli.build_parser(all_commands())
    commands = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction)).choices
    found = {
        (name, action)
        for name, command in commands.items()
        for group in command._actions
        if isinstance(group, argparse._SubParsersAction)
        for action in group.choices
    }
    assert {words[:2] for words in actions_of_commands()} == found


def test_an_unknown_option_of_an_action_is_compared_with_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app.cli.main(["id", "import", "--replce", "file"])
    assert "unknown option '--replce': did you mean --replace?" in capsys.readouterr().err


def test_home_comes_from_the_environment(with_command: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = with_command_that_notes_home(with_command)
    monkeypatch.setenv("SHOAL_HOME", "/from/environment")
    assert app.cli.main(["try"]) == 0
    assert seen == [Path("/from/environment").absolute()]


def test_facts_are_one_line_of_json(with_command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]) -> None:
    def run(arguments: argparse.Namespace) -> int:
        print_json({"größe": 1, "json": arguments.json})
        return 0

    with_command(run)
    assert app.cli.main(["try", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"größe": 1, "json": True}


@pytest.mark.parametrize("arguments", [["no-such-command"], ["--no-such-option"], ["doctor", "--max-vram", "6X"]])
def test_bad_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        app.cli.main(arguments)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_commands_have_distinct_names_and_help() -> None:
    commands = all_commands()
    assert len({command.name for command in commands}) == len(commands)
    assert all(command.help for command in commands)


@pytest.mark.parametrize("command", [command.name for command in all_commands()])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        app.cli.main([command, "--help"])
    assert stop.value.code == 0
    assert "--home" in capsys.readouterr().out


def shoal(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """The real program in a process of its own."""
    command = [sys.executable, "-m", "app.cli", *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )


def test_the_installed_program_knows_its_version() -> None:
    answer = shoal("--version")
    assert answer.returncode == 0
    assert answer.stdout.startswith("shoal ")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pipe whose reader is gone")
def test_a_reader_that_goes_away_is_no_noise() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    answer = shoal("completion", "bash", stdout=writer)
    os.close(writer)
    assert (answer.returncode, answer.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        answer = shoal("completion", "bash", stdout=full.fileno())
    assert answer.returncode == 1
    assert answer.stderr == "shoal: the disk is full: free some space and run it again\n"


@pytest.mark.parametrize("argv", [["--version"], ["models", "--json"], ["status"], ["nonsense"]])
def test_a_process_without_a_console_fails_in_order(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `pythonw` starts it on Windows: there are no streams at all."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    try:
        status = app.cli.main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    for name in ("stdin", "stdout", "stderr"):
        getattr(sys, name).close()
    assert status == {"--version": 0, "models": 0, "status": 1, "nonsense": 2}[argv[0]]


def test_who_hosts_which_block_is_short_and_names_you() -> None:
    own = "12D3KooWaaaaaa"
    mine, other = {"peer": own, "tokens_per_s": 1.5}, {"peer": "12D3KooWbbbbbb", "tokens_per_s": 1.5}
    blocks = [{"block": n, "holders": [mine] if n < 2 else [mine, other] if n < 4 else []} for n in range(5)]
    assert coverage_lines(blocks, own) == [
        "0:2  you (1.5 tokens/s)",
        "2:4  you (1.5 tokens/s), bbbbbb (1.5 tokens/s)",
        "4:5  nobody",
    ]
