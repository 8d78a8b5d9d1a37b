"""`shoal chat --local` from the outside: replies, facts, and one clear line for every kind of broken model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from app.cli.chat import SAMPLING
from app.cli.conversation import TerminalChat
from app.cli.reply_printer import MarkdownPrinter, finished_blocks, rendered
from app.core.errors import AppError
from tests.engine.gguf_models import write_gguf
from tests.engine.models import VARIANT, write_folder
from ui.state.conversations import Conversations

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
        "longest_gap_s", "route", "cached_tokens", "guessed_tokens", "accepted_tokens", "adapter", "adapter_root",
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


def test_a_mistyped_command_and_a_bad_value_in_a_pipe_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, words in (("/frob", "unknown command '/frob'"), ("/set top_p 2", "above 0.0 and at most 1.0")):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\n"))
        assert chat("--model", "tiny-random") == 2
        assert words in capsys.readouterr().err


class Terminal(io.StringIO):
    """An input that the program takes for a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_conversation_works_without_readline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "readline", None)  # makes `import readline` raise, as on native Windows
    monkeypatch.setattr("sys.stdin", Terminal("hello\nagain\n"))
    assert chat("--model", "tiny-random", "--max-tokens", "2", "--home", str(tmp_path / "home")) == 0
    assert capsys.readouterr().out.count("> ") == 3  # and a third, at which the input ends


def test_an_error_does_not_end_a_conversation_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("x" * 100_000 + "\nhello\n"))
    assert chat("--model", "tiny-random", "--max-tokens", "2", "--home", str(tmp_path)) == 0
    captured = capsys.readouterr()
    assert "context" in captured.err
    assert captured.out.count("> ") == 3


def test_a_conversation_that_cannot_be_kept_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "conversations.db").write_bytes(b"not a database" * 100)
    monkeypatch.setattr("sys.stdin", Terminal("hello\n"))
    assert chat("--model", "tiny-random", "--max-tokens", "2", "--home", str(tmp_path)) == 0
    assert "this conversation will not be kept" in capsys.readouterr().err


def test_settings_are_shown_changed_and_cleared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = ["/set temperature", "/set seed 5", '/set seed ""', "/set stop END", "/set stop ''", '/set top_p ""']
    monkeypatch.setattr("sys.stdin", Terminal("".join(f"{line}\n" for line in lines)))
    assert chat("--model", "tiny-random", "--home", str(tmp_path)) == 0
    said = capsys.readouterr().err.splitlines()[-6:]
    assert said == [
        "temperature = 0.7",
        "seed = 5",
        "seed = not set",
        "stop = 'END'",
        "stop = not set",
        "shoal: top_p: '\"\"' is not a number",
    ]


class Listener:
    """Answers always the same, and keeps what it was asked."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.asked: list[list[dict[str, str]]] = []

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        self.asked.append(messages)
        yield from ("<think>hm", "</think>Yes.")

    def figures(self, *, is_whole: bool) -> dict[str, Any]:
        return self.facts if is_whole else {}

    def waits_for(self) -> str:
        return ""

    def model(self) -> str:
        return "a listener"

    def use_model(self, name: str) -> None:
        raise AssertionError(name)


def test_a_conversation_keeps_its_system_message_and_its_files_and_sends_no_thinking() -> None:
    listener, store = Listener(), Conversations(None)
    begun = TerminalChat(listener, store, SAMPLING)
    begun.set_system("be brief")
    begun.say("hello")
    begun.set_system("be a fish")
    begun.say("more")
    fish = {"role": "system", "content": "be a fish"}
    yes = {"role": "assistant", "content": "Yes."}
    assert listener.asked[-1] == [fish, {"role": "user", "content": "hello"}, yes, {"role": "user", "content": "more"}]
    (kept,) = store.all()
    leaf = store.messages(kept.id)[-1].id
    asked = store.add(kept.id, leaf, "user", "look", {"files": [{"name": "a.txt", "text": "herring"}]})
    store.add(kept.id, asked.id, "assistant", "<think>long</think>I see.")
    resumed = TerminalChat(listener, store, SAMPLING)
    resumed.resume()
    resumed.say("again")
    first, *_, look, seen, again = listener.asked[-1]
    assert first == fish
    assert "herring" in look["content"]
    assert (seen["content"], again["content"]) == ("I see.", "again")


def test_a_conversation_that_outgrew_the_context_says_how_to_begin_a_new_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Small(Listener):
        def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
            if len(messages) > 1:
                raise AppError("the prompt is too long: shorten it", code="context_length_exceeded")
            return super().answer(messages)

    monkeypatch.setattr("sys.stdin", Terminal("hello\nhi\n/clear\nhello\n"))
    TerminalChat(Small(), Conversations(None), SAMPLING).converse()
    captured = capsys.readouterr()
    assert captured.err.splitlines()[1:] == [
        "shoal: the prompt is too long: shorten it",
        "The conversation so far counts: /clear starts a new one.",
        "A new conversation.",
    ]
    assert captured.out.count("Yes.") == 2


def test_resuming_goes_on_with_the_conversation_used_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("--model", "tiny-random", "--max-tokens", "2", "--temperature", "0", "--home", str(tmp_path))
    assert chat(*arguments, "--resume", "more") == 1
    assert "there is no conversation to resume" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Terminal("hello\n"))
    assert chat(*arguments) == 0
    capsys.readouterr()
    assert chat(*arguments, "--resume", "--json", "more") == 0
    resumed = json.loads(capsys.readouterr().out)
    assert chat(*arguments, "--json", "more") == 0
    assert resumed["prompt_tokens"] > json.loads(capsys.readouterr().out)["prompt_tokens"]


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("a\n\nb", "a\n\n"),
        ("a\n\n", ""),  # what follows may be indented
        ("1. a\n\n   of a", ""),
        ("1. a\n\n   of a\n\nb", "1. a\n\n   of a\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("~~~\n```\n\nb\n", ""),
    ],
)
def test_finished_blocks_of_markdown(text: str, finished: str) -> None:
    assert finished_blocks(text) == (finished, text[len(finished) :])


def test_words_are_not_broken_and_markup_is_not_shown() -> None:
    from rich.console import Console

    words = "several ordinary words that make up one paragraph".split()
    console = Console(width=20, file=io.StringIO(), no_color=True)
    console.print(rendered("# Head\n\n" + " ".join(words) + "\n\n**bold** [site](http://a.b/c) [red]"))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.split()[: len(words) + 1] == ["Head", *words]
    assert "**" not in shown
    assert "(http://a.b/c)" in shown.replace("\n", "")
    assert "[red]" in shown


def test_code_on_a_terminal_has_one_colour() -> None:
    """The patterns of a highlighter take hours for some texts, and the reply names the language."""
    from rich.console import Console

    console = Console(width=40, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(rendered("```python\ndef f(x): return 1\n```\n\nor\n\n    def g(x): return 2"))
    assert isinstance(console.file, io.StringIO)
    assert "def f(x): return 1" in console.file.getvalue()
    assert "def g(x): return 2" in console.file.getvalue()


def test_a_silent_reply_says_what_it_waits_for_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, now = Terminal(), [100.0]
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "10"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)

    def refreshed_at(at: float) -> str:
        now[0] = at
        before = len(terminal.getvalue())
        printer._live.refresh()
        return terminal.getvalue()[before:]

    reason = ["pike left"]
    printer = MarkdownPrinter(lambda: reason[0], lambda: now[0])
    printer._live.auto_refresh = False
    assert "pike left" not in refreshed_at(101.9)
    assert "pike left · 2 s · Ctrl-C stops" in refreshed_at(102.0)
    printer.write("The sea")
    assert "pike left" not in refreshed_at(103.0)
    shown = refreshed_at(109.0)
    assert shown.index("The sea") < shown.index("pike left · 7 s · Ctrl-C stops")
    reason[0] = "pike left: waiting up to 60 s for another host of blocks 10:30"
    shown = refreshed_at(119.0)
    assert "of blocks 10:30 · 17 s · " in shown
    assert "Ctrl-C" in shown  # it was cut off at 80 columns
    printer.write(" is wide.")
    before = len(terminal.getvalue())
    printer.end()
    assert "pike left" not in terminal.getvalue()[before:]
    assert "The sea is wide." in terminal.getvalue()[before:]


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
        (["--model", "tiny-random", "--json"], 2, "--json"),
        (["--model", "tiny-random", " "], 2, "the prompt is empty"),
        (["--model", "tiny-random", "x" * 100_000], 1, "context"),
        (["--model", "tiny-random", "--device", "cuda:99", "hello"], 1, "cuda:99"),
        (["--swarm", "pond", "hello"], 2, "--swarm asks a swarm, --local asks none"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LOCAL, *arguments]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize("option", ["--model", "--device"])
def test_what_a_swarm_would_ignore_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", option, "cpu", "hello"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{option} is for --local: a swarm replies with its own model" in line


def test_without_a_node_the_way_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "hello"]) == 1
    assert "--local" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", "0"),
        ("--temperature", "9"),
        ("--top-p", "2"),
        ("--top-p", "0"),
        ("--min-p", "nan"),
        ("--seed", "x"),
    ],
)
def test_a_value_out_of_range_is_bad_usage(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chat(option, value, "hello")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option in line
