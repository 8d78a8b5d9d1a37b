"""`shoal chat` in a real terminal with a real node: Ctrl-C, pasting, commands, Markdown, and resuming."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from app.api.client import client_of
from tests.process.fork_server import ForkedProcess, is_used
from tests.process.node_process import Place, Serving, is_covered, wait_until
from ui.state.conversations import Conversations

pty = pytest.importorskip("pty", reason="a terminal of this kind is POSIX's")

PATIENCE_S = 60.0
PRESS_AGAIN_S = 5.0
CTRL_C, CTRL_D = b"\x03", b"\x04"
PROMPT = "> "
LONG = ["--max-tokens", "4000", "--temperature", "2", "--seed", "1"]


def in_terminal(
    arguments: Sequence[str], environment: Mapping[str, str], slave: int
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a command with a session of its own with this terminal, as else Ctrl-C would reach nobody."""
    if is_used():
        return ForkedProcess(arguments, environment, [slave] * 3, in_terminal=True)
    attach = "import os, pty, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
    if not hasattr(os, "login_tty"):
        attach = (
            "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "os.execv(sys.argv[1], sys.argv[1:])"
        )
    command = [sys.executable, "-c", attach, sys.executable, "-m", "app.cli", *arguments]
    return subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)


class Terminal:
    """A command in a terminal of its own: what it shows, and what is typed."""

    def __init__(self, place: Place, *arguments: str) -> None:
        import termios

        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        environment = place.environment({"TERM": "xterm-256color", "NO_COLOR": "1"})
        self.process = in_terminal(arguments, environment, slave)
        os.close(slave)
        self.shown = ""
        self._read = 0  # what the test has seen of it

    def type(self, text: str | bytes) -> None:
        os.write(self._master, text.encode() if isinstance(text, str) else text)

    def interrupt(self, text: str) -> None:
        """Press Ctrl-C at the prompt and wait for a text.

        Python's `input` heeds a signal only while it waits for a key: one that comes in the microseconds before that is
        heeded with the next key. So it is pressed again after a while without an effect.
        """
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown[self._read :]:
            assert time.monotonic() < deadline, f"{text!r} was not shown: {self.shown!r}"
            self.type(CTRL_C)
            again_at = time.monotonic() + PRESS_AGAIN_S
            while text not in self.shown[self._read :] and time.monotonic() < again_at:
                self._more()
        self.wait(text)

    def wait(self, text: str) -> str:
        """Wait until a text is shown after all that was waited for; returns what was shown up to its end."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown[self._read :]:
            assert time.monotonic() < deadline, f"{text!r} was not shown: {self.shown!r}"
            assert self._more() or self.process.poll() is None, f"it ended without {text!r}: {self.shown!r}"
        end = self.shown.index(text, self._read) + len(text)
        part, self._read = self.shown[self._read : end], end
        return part

    @property
    def echoes(self) -> bool:
        """True while the terminal shows what is typed before a program reads it."""
        import termios

        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def ended(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end: {self.shown!r}"
            self._more()
        while self._more():
            pass
        return self.process.wait()

    def _more(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 0.1)
        try:
            new = os.read(self._master, 65536) if ready else b""
        except OSError:  # Linux says so once the other side is closed
            new = b""
        self.shown += new.decode("utf-8", "replace")
        return bool(new)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("chat")
    place = Place(folder / "home", folder / "cache")
    assert place.shoal("create", "pond", "--model", "tiny-random").status == 0
    with Serving(place, "--discovery=invite", max_vram="1GB") as serving:
        assert serving.ready().startswith("ready serving")
        yield serving


def sessions(node: Serving) -> int:
    return len(client_of(node.place.home).snapshot().active_sessions)


def has_begun(place: Place) -> bool:
    """True once a reply that this node asked for has its first token."""
    asked = [one for one in client_of(place.home).snapshot().active_sessions if one.role == "asking"]
    return any(one.prompt_done is None and one.tokens > (one.prompt_tokens or 0) for one in asked)


def test_ctrl_c_stops_the_reply_and_twice_ends(node: Serving) -> None:
    with Terminal(node.place, "chat", *LONG) as terminal:
        terminal.wait(PROMPT)
        terminal.type("tell me all\r")
        wait_until(lambda: sessions(node) > 0, "the reply runs")
        terminal.type(CTRL_C)
        terminal.wait("Stopped. Ctrl-C again ends.")
        terminal.wait(PROMPT)
        wait_until(lambda: sessions(node) == 0, "the session has ended in the swarm too")
        terminal.type("/set max_tokens 3\r")
        terminal.wait("max_tokens = 3")
        terminal.wait(PROMPT)
        terminal.type("go on\r")  # the conversation is still there
        terminal.wait(PROMPT)
        terminal.interrupt("Ctrl-C again ends.")
        terminal.wait(PROMPT)
        terminal.interrupt("\r\n")
        assert terminal.ended() == 0
        assert "interrupted" not in terminal.shown


def test_keys_typed_during_a_reply_do_not_disturb_it(node: Serving) -> None:
    """The terminal showed them, and their Enter moved the cursor, so that rows of the reply stood there twice."""
    with Terminal(node.place, "chat", *LONG) as terminal:
        terminal.wait(PROMPT)
        terminal.type("tell me all\r")
        wait_until(lambda: has_begun(node.place), "the reply has begun")
        assert not terminal.echoes
        terminal.type("typed too early\r")
        terminal.type(CTRL_C)
        terminal.wait("Stopped. Ctrl-C again ends.")
        terminal.wait(PROMPT)
        assert "typed too early" not in terminal.shown
        terminal.type("/system be brief\r")
        terminal.wait("/system be brief")  # at the prompt keys are shown again
        terminal.wait(PROMPT)
        terminal.type("/set max_tokens 2\r")
        terminal.wait(PROMPT)
        terminal.type("hello\r")
        terminal.wait("Cut off")
        terminal.wait(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.ended() == 0
        assert terminal.echoes


def test_ctrl_c_clears_the_line_and_ctrl_d_ends(node: Serving) -> None:
    with Terminal(node.place, "chat", "--max-tokens", "2") as terminal:
        terminal.wait(PROMPT)
        terminal.type("half a ques")
        terminal.wait("half a ques")
        terminal.interrupt("Ctrl-C again ends.")
        terminal.wait(PROMPT)
        terminal.type("/system be brief\r")
        terminal.wait("System message: be brief")  # so the half question was not sent with it
        terminal.wait(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.ended() == 0


def test_a_pasted_text_is_one_message_and_is_kept_saved_and_resumed(node: Serving, tmp_path: Path) -> None:
    with Terminal(node.place, "chat", "--max-tokens", "3", "--temperature", "0") as terminal:
        terminal.wait(PROMPT)
        terminal.type("\x1b[200~first line\nsecond line\x1b[201~")
        terminal.wait("second line")
        terminal.type("\r")
        terminal.wait(PROMPT)
        terminal.type("/regenerate\r")
        terminal.wait(PROMPT)
        terminal.type(f"/save {tmp_path / 'chat.md'}\r")
        terminal.wait("Saved to")
        terminal.wait(PROMPT)
        terminal.type(f"/save {tmp_path / 'chat.md'}\r")
        terminal.wait("exists already: give another name")  # nothing is overwritten
        terminal.type("/quit\r")
        assert terminal.ended() == 0
    text = (tmp_path / "chat.md").read_text()
    assert text.count("**You**") == 1
    assert "first line\nsecond line" in text
    with Terminal(node.place, "chat", "--resume", "--max-tokens", "2") as terminal:
        terminal.wait("Resuming 'first line second line', 2 messages.")
        terminal.wait("first line\r\nsecond line")
        terminal.wait("Ctrl-D ends.")
        terminal.wait(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.ended() == 0


def test_commands_are_listed_and_a_mistyped_one_is_not_sent(node: Serving) -> None:
    with Terminal(node.place, "chat", "--max-tokens", "2") as terminal:
        terminal.wait(PROMPT)
        terminal.type("/help\r")
        for word in ("/help", "/clear", "/regenerate", "/save", "/system", "/set", "/model", "/quit"):
            terminal.wait(f"{word} ")
        terminal.wait(PROMPT)
        terminal.type("/regenrate\r")
        terminal.wait("unknown command '/regenrate': did you mean /regenerate?")
        terminal.type("/regenerate\r")
        terminal.wait("there is no question to ask again")
        terminal.type("/save\r")
        terminal.wait("there is nothing to save yet")
        terminal.type("/set temperature 9\r")
        terminal.wait("must be from 0.0 to 2.0, not 9")
        terminal.type("/set colour red\r")
        terminal.wait("unknown setting 'colour'")
        terminal.type("/model\r")
        terminal.wait("swarm pond, model tiny-random")
        terminal.type("/model other\r")
        terminal.wait("a swarm has one model")
        terminal.type("/clear\r")
        terminal.wait("A new conversation.")
        terminal.type("/quit\r")
        assert terminal.ended() == 0


def test_a_reply_that_was_cut_off_and_a_file_that_cannot_be_written_are_said(node: Serving, tmp_path: Path) -> None:
    with Terminal(node.place, "chat", "--max-tokens", "2", "--seed", "1") as terminal:
        terminal.wait(PROMPT)
        terminal.type("hello\r")
        terminal.wait("Cut off: /set max_tokens N allows longer replies.")
        terminal.wait(PROMPT)
        terminal.type(f"/save {tmp_path}/nowhere/x.md\r")
        terminal.wait("shoal: No such file or directory: ")  # and no error number
        terminal.type("/quit\r")
        assert terminal.ended() == 0


def test_a_reply_whose_hop_was_killed_says_who_left_and_for_what_it_waits(tmp_path: Path) -> None:
    here, there = (Place(tmp_path / name, tmp_path / "cache") for name in ("here", "there"))
    assert here.shoal("create", "pond", "--model", "tiny-random").status == 0
    with Serving(here, "--discovery=invite", "--blocks=0:4", max_vram="1GB") as asker:
        asker.ready()
        invite = here.shoal("invite").out.strip()
        with Serving(there, "--discovery=invite", "--blocks=4:8", f"--join={invite}", max_vram="1GB") as hop:
            peer = hop.ready().partition("peer=")[2].split()[0]
            wait_until(lambda: is_covered(here), "all blocks are served")
            with Terminal(here, "chat", *LONG) as terminal:
                terminal.wait(PROMPT)
                terminal.type("tell me all\r")
                wait_until(lambda: has_begun(here), "the reply has begun")
                hop.process.kill()
                terminal.wait(f"{peer[-6:]} left: waiting up to 60 s for another host of blocks 4:8 · ")
                terminal.type(CTRL_C)
                terminal.wait("Stopped. Ctrl-C again ends.")
                terminal.wait(PROMPT)
            kept = Conversations(here.home)
            (talk,) = kept.all()
            # A reply that was stopped named nobody, and the dashboard said that the chat had stayed on this machine.
            assert peer in [one["peer"] for one in kept.hops(talk.id)]
            assert kept.messages(talk.id)[-1].figures["stopped"]
            kept.close()


def test_a_node_in_a_terminal_says_what_it_does_until_it_is_ready(tmp_path: Path) -> None:
    place = Place(tmp_path / "home", tmp_path / "cache")
    assert place.shoal("create", "pond", "--model", "tiny-random").status == 0
    flags = ["--discovery=invite", "--listen=/ip4/127.0.0.1/tcp/0", "--api-port=0", "--max-vram=1GB"]
    with Terminal(place, "serve", *flags) as terminal:
        terminal.wait("shoal: the node is starting")
        terminal.wait("shoal: loading: ")
        terminal.wait("ready serving ")
        terminal.type(CTRL_C)
        assert terminal.ended() == 0


def test_whoever_ends_or_pauses_a_node_is_told_for_what_it_waits(tmp_path: Path) -> None:
    """Ctrl-C, `shoal stop` and `shoal pause` were silent for up to half a minute while a session ended."""
    place = Place(tmp_path / "home", tmp_path / "cache")
    assert place.shoal("create", "pond", "--model", "tiny-random").status == 0
    flags = ["--discovery=invite", "--listen=/ip4/127.0.0.1/tcp/0", "--api-port=0", "--max-vram=1GB"]
    with Terminal(place, "serve", *flags) as node:
        node.wait("ready serving ")
        with Terminal(place, "chat", *LONG) as chat:
            chat.wait(PROMPT)
            chat.type("tell me all\r")
            wait_until(lambda: has_begun(place), "the reply has begun")
            with Terminal(place, "pause") as pause:
                pause.wait("shoal: waiting until the node's sessions have ended or moved to another member")
                chat.type(CTRL_C)
                pause.wait("paused by hand; `shoal resume` hosts again")
                assert pause.ended() == 0
            chat.wait(PROMPT)
            assert place.shoal("resume").out == "resumed\n"
            wait_until(lambda: client_of(place.home).snapshot().state == "serving", "it hosts again")
            chat.type("tell me more\r")
            wait_until(lambda: has_begun(place), "the reply has begun")
            with Terminal(place, "stop") as stop:
                stop.wait("shoal: waiting until the node's sessions have ended")
                node.wait(
                    "shoal: leaving: 1 session ends or moves to another member first, within 30 s; Ctrl-C again ends"
                )
                node.type(CTRL_C)
                assert node.ended() == 0
                stop.wait("stopped")
        assert "Traceback" not in node.shown
