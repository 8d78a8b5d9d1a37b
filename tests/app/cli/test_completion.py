"""Shell completion, suggestions, and the table of commands that scripts rely on."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import app.cli
from app.cli.completion import names_of, safe_name, script_for
from app.cli.registry import all_commands
from app.swarm.invite import Invite

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
    "stop": True,
    "restart": True,
    "logs": True,
    "record": True,
    "replay": False,
    "web": True,
    "ban": True,
    "trust": True,
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


@pytest.mark.parametrize("name", TABLE)
def test_every_command_of_the_contract_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        app.cli.main([name, "--help"])
    assert stop.value.code == 0
    assert ("--json" in capsys.readouterr().out) >= TABLE[name]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["statsu"], "unknown command 'statsu': did you mean status? `shoal --help` explains"),
        (["status", "--jsn"], "unknown option '--jsn': did you mean --json?"),
        (["serve", "--log-level", "inf"], "unknown choice 'inf' for --log-level: did you mean info?"),
        (["completion", "bsh"], "unknown choice 'bsh': did you mean bash?"),
        (["config", "gte"], "unknown command 'gte': did you mean get?"),
        (["invite", "--frob"], "unknown option '--frob'; `shoal invite --help` explains"),
        (["status", "surplus"], "unexpected argument 'surplus'; `shoal status --help` explains"),
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
    asked = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_shoal"
    ask = "\n".join([script_for("bash"), asked, "printf '%s\\n' \"${COMPREPLY[@]}\""])
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    assert {"status", "serve", "stop"} <= bash_completes("shoal", "s")
    assert "chat" not in bash_completes("shoal", "s")
    assert bash_completes("shoal", "status", "--j") == {"--json"}
    assert bash_completes("shoal", "--home", "/x", "completion", "f") == {"fish"}
    assert bash_completes("shoal", "config", "s") == {"set"}
    assert bash_completes("shoal", "serve", "--log-level", "i") == {"info"}
    assert bash_completes("shoal", "--home", str(tmp_path)) == {str(tmp_path)}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "shoal"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m app.cli "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(app.cli.__file__).parents[2]))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert app.cli.main(["join", str(Invite("reef", "ab" * 32, (), None)), "--home", str(tmp_path / "home")]) == 0
    assert bash_completes("shoal", "leave", "re") == {"reef#abababababababababab"}
    assert bash_completes("shoal", "join", "re") == {"reef#abababababababababab"}
    assert bash_completes("shoal", "chat", "--swarm", "re") == {"reef#abababababababababab"}
    assert bash_completes("shoal", "join", "bi") == {"bin"}  # or a file with an invite
    assert bash_completes("shoal", "create", "x", "--model", "st") == {"starter"}
    assert bash_completes("shoal", "config", "get", "max_v") == {"max_vram"}
    assert bash_completes("shoal", "config", "set", "disk") == {"disk_floor"}
    assert bash_completes("shoal", "ban", "x") == set()  # no node runs, so no peers


@pytest.mark.parametrize("name", ["$(touch owned)", "`id`", "a b", "a;b", "-f", "", "$HOME", "x" * 33, "é", "a\nb"])
def test_a_member_cannot_name_itself_so_that_the_shell_runs_it(name: str) -> None:
    assert safe_name(name, "12D3peer") == "12D3peer"
    assert safe_name("attic-2", "12D3peer") == "attic-2"


def test_the_names_of_models_are_the_built_in_and_the_downloaded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    assert names_of("models", tmp_path) == ["starter", "tiny-random"]
    for folder in ("org--bird", "org--$(touch owned)"):
        (tmp_path / "models" / "hub" / folder).mkdir(parents=True)
        (tmp_path / "models" / "hub" / folder / "shoal-hub.json").write_text("{}")
    (tmp_path / "models" / "hub" / "org--unfinished").mkdir()
    assert names_of("models", tmp_path) == ["starter", "tiny-random", "org/bird"]


def test_powershell_completes_the_same() -> None:
    script = script_for("powershell")
    assert all(command.name in script for command in all_commands())
    assert "Register-ArgumentCompleter" in script
    assert "shoal completion --names swarms" in script
    assert "max_vram" in script
    if shutil.which("pwsh") is None:
        pytest.skip("needs PowerShell")
    ask = f"{script}\n(TabExpansion2 'shoal st' 8).CompletionMatches.CompletionText"
    done = subprocess.run(["pwsh", "-NoProfile", "-Command", ask], capture_output=True, text=True, check=True)
    assert {"status", "stop"} <= set(done.stdout.split())


ZSH = """
autoload -U compinit && compinit -u -D && eval "$(<script)"
compadd() { local -a hits; builtin compadd -A hits "$@"; print -rl -- $hits >> hits; builtin compadd "$@" }
offer() { BUFFER=$asked; CURSOR=$#BUFFER; zle list-choices; exit }
zle -N offer; bindkey '^X' offer
"""


def zsh_completes(*words: str) -> set[str]:
    """What zsh offers after these words; it completes only in its line editor, on a terminal."""
    import pty

    environment = {**os.environ, "TERM": "dumb", "asked": " ".join(words)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script").write_text(script_for("zsh"))
        Path(folder, "setup").write_text(ZSH)
        ours, its = pty.openpty()
        zsh = subprocess.Popen(
            ["zsh", "-f", "-i"], cwd=folder, env=environment, stdin=its, stdout=its, stderr=its, start_new_session=True
        )
        os.close(its)
        os.write(ours, b"source ./setup\n\x18")
        with zsh, contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
            while os.read(ours, 65536):
                pass
        os.close(ours)
        return set(Path(folder, "hits").read_text().split())


def fish_completes(*words: str) -> set[str]:
    """What fish offers after these words."""
    ask = f"{script_for('fish')}\ncomplete -C '{' '.join(words)}'"
    done = subprocess.run(["fish", "--no-config", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {line.split("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize(("shell", "completes"), [("zsh", zsh_completes), ("fish", fish_completes)])
def test_the_other_shells_complete_the_same(shell: str, completes: Callable[..., set[str]]) -> None:
    script = script_for(shell)
    assert all(command.name in script for command in all_commands())
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    assert completes("shoal", "s") == {name.name for name in all_commands() if name.name.startswith("s")}
    assert completes("shoal", "status", "--j") == {"--json"}
    assert completes("shoal", "--home", "/x", "completion", "f") == {"fish"}
    assert "--max-vram" in completes("shoal", "serve", "--m")
    assert completes("shoal", "config", "s") == {"set"}
