"""`shoal chat --local` from the outside: replies, facts, and one clear line for every kind of broken model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli import main
from app.cli.chat import prompts
from tests.engine.gguf_models import write_gguf
from tests.engine.models import VARIANT, write_folder

LOCAL = ["chat", "--local", "--device", "cpu"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SHOAL_CACHE", str(folder))
    return folder


def chat(*arguments: str) -> int:
    return main([*LOCAL, *arguments])


def test_facts_of_a_reply(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tiny-random", "--seed", "1", "--max-tokens", "6", "--json", "hello"]
    assert chat(*arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {
        "text", "token_ids", "prompt_tokens", "finish_reason", "ttft_s", "tokens_per_s", "recoveries", "moves",
        "longest_gap_s", "route",
    }  # fmt: skip
    assert len(facts["token_ids"]) <= 6
    assert facts["route"] == [{"peer": "local", "start": 0, "stop": 8}]
    assert chat(*arguments) == 0
    assert json.loads(capsys.readouterr().out)["text"] == facts["text"]


def test_a_conversation_by_pipe_remembers_what_was_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n/quit\nnever read\n"))
    assert chat("--model", "tiny-random", "--temperature", "0", "--max-tokens", "4") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


class Terminal(io.StringIO):
    """An input that the program takes for a terminal."""

    def isatty(self) -> bool:
        return True


def test_prompts_work_without_readline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "readline", None)  # makes `import readline` raise, as on native Windows
    monkeypatch.setattr("sys.stdin", Terminal("hello\nagain\n"))
    assert list(prompts()) == ["hello", "again"]


def _gguf(path: Path) -> Path:
    write_gguf(path, VARIANT["llama"], "Q8_0")
    return path


def _truncated(folder: Path) -> str:
    path = _gguf(folder / "cut.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    return str(path)


def _unknown_architecture(folder: Path) -> str:
    write_folder(folder / "model", VARIANT["llama"])
    _edit_config(folder / "model", lambda config: config | {"architectures": ["MambaForCausalLM"]})
    return str(folder / "model")


def _lying_config(folder: Path) -> str:
    write_folder(folder / "model", VARIANT["llama"])
    _edit_config(folder / "model", lambda config: config | {"intermediate_size": 95})
    return str(folder / "model")


def _missing_tensor(folder: Path) -> str:
    write_folder(folder / "model", VARIANT["llama"])
    _edit_config(folder / "model", lambda config: config | {"num_hidden_layers": 5})
    return str(folder / "model")


def _edit_config(folder: Path, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


DAMAGE: dict[str, tuple[Callable[[Path], str], str]] = {
    "truncated GGUF": (_truncated, "cut.gguf"),
    "unknown architecture": (_unknown_architecture, "MambaForCausalLM"),
    "lying config": (_lying_config, "model.safetensors"),
    "missing tensor": (_missing_tensor, "model.layers.4"),
    "no such model": (lambda folder: str(folder / "nowhere"), "nowhere"),
}


@pytest.mark.parametrize("case", sorted(DAMAGE))
def test_a_broken_model_is_one_line_that_names_it(
    case: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, named = DAMAGE[case]
    model = damage(tmp_path)
    capsys.readouterr()  # what the writer of the file said
    assert chat("--model", model, "hello") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("shoal: ")
    assert named in line
    assert not list(cache.rglob("*")), "something half-written was left in the cache"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model", "tiny-random", "--max-tokens", "0", "hello"], 1, "max_tokens"),
        (["--model", "tiny-random", "--top-p", "2", "hello"], 1, "top_p"),
        (["--model", "tiny-random", "--json"], 2, "--json"),
        (["--model", "tiny-random", "x" * 100_000], 1, "context"),
        (["--model", "tiny-random", "--device", "cuda:99", "hello"], 1, "cuda:99"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LOCAL, *arguments]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_without_a_node_the_way_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "hello"]) == 1
    assert "--local" in capsys.readouterr().err
