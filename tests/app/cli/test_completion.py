"""Shell completion, suggestions, and the table of commands that scripts rely on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest

import app.cli
from app.cli import build_parser
from app.cli.completion import SCRIPTS, tree_of
from app.cli.registry import all_commands

# The contract, and whether a command prints facts.
TABLE = {
    "serve": False,
    "create": True,
    "join": True,
    "leave": True,
    "swarms": True,
    "invite": True,
    "status": True,
    "peers": True,
    "blocks": True,
    "sessions": True,
    "chat": True,
    "pause": True,
    "resume": True,
    "drain": True,
    "stop": False,
    "config": True,
    "pull": False,
    "models": True,
    "doctor": True,
    "bench": True,
    "id": True,
    "service": True,
    "uninstall": False,
    "demo": False,
}


def script(shell: str) -> str:
    return SCRIPTS[shell](tree_of(build_parser(all_commands())))


@pytest.mark.parametrize("name", TABLE)
def test_every_command_of_the_contract_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        app.cli.main([name, "--help"])
    assert stop.value.code == 0
    assert ("--json" in capsys.readouterr().out) >= TABLE[name]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["statsu"], "unknown command 'statsu': did you mean status?"),
        (["status", "--jsn"], "unknown option '--jsn': did you mean --json?"),
        (["serve", "--log-level", "inf"], "unknown choice 'inf' for --log-level: did you mean info?"),
        (["completion", "bsh"], "unknown choice 'bsh': did you mean bash?"),
        (["config", "gte"], "unknown command 'gte': did you mean get?"),
        (["status", "surplus"], "unexpected argument 'surplus'"),
        (["pause", "--for", "soon"], "write it like 90s, 30m, 2h"),
        (["create"], "required: NAME, --model"),
    ],
)
def test_a_mistake_is_one_line_with_a_suggestion(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        app.cli.main(argv)
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert words in told


def bash_completes(*words: str) -> set[str]:
    """What bash offers after these words, the last of which is being typed."""
    quoted = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shoal"
    ask = "\n".join([script("bash"), asked, "printf '%s\\n' \"${COMPREPLY[@]}\""])
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_choices() -> None:
    assert {"status", "serve", "stop"} <= bash_completes("shoal", "s")
    assert "chat" not in bash_completes("shoal", "s")
    assert bash_completes("shoal", "status", "--j") == {"--json"}
    assert bash_completes("shoal", "--home", "/x", "completion", "f") == {"fish"}


def zsh_completes(*words: str) -> set[str]:
    """What zsh is offered after these words; its own functions that show an offer say it instead."""
    quoted = " ".join(f"'{word}'" for word in words)
    said = 'compdef() { :; }; _files() { :; }; compadd() { shift; print -l -- "$@"; }'
    asked = f"words=({quoted}); CURRENT={len(words)}; _shoal"
    ask = "\n".join([said, script("zsh"), asked])
    done = subprocess.run(["zsh", "-f", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {word for word in done.stdout.split() if word.startswith(words[-1])}


def fish_completes(*words: str) -> set[str]:
    """What fish offers after these words."""
    ask = f"{script('fish')}\ncomplete -C '{' '.join(words)}'"
    done = subprocess.run(["fish", "--no-config", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {line.split("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize(("shell", "completes"), [("zsh", zsh_completes), ("fish", fish_completes)])
def test_the_other_shells_complete_the_same(shell: str, completes: Callable[..., set[str]]) -> None:
    assert all(command.name in script(shell) for command in all_commands())
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    assert completes("shoal", "s") == {name.name for name in all_commands() if name.name.startswith("s")}
    assert completes("shoal", "status", "--j") == {"--json"}
    assert completes("shoal", "--home", "/x", "completion", "f") == {"fish"}
    assert "--max-vram" in completes("shoal", "serve", "--m")
