"""Compiles a grammar in a process of its own, so that one which the library cannot bear ends that process alone.

`llguidance` bounds the work for a token, but not that for a grammar: a few kilobytes can overflow its stack, which ends
the process, and a number of nine digits can compute for hours and take gigabytes, which nothing can interrupt. So
`engine.text.constraint` tries everything here first but what cannot be larger than its text. The trial's tokenizer has
the model's special tokens, but only bytes besides: it is made in a moment, and a grammar refers to nothing else of a
vocabulary.

Only what compiles here is compiled in the node, so it does not matter that the trial's vocabulary is another.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

CPU_S = 4  # a schema of 2000 fields takes 0.7 s
MASK_S = 0.25  # for the first token: all replies of the node wait while the tokens of one are found
WALL_S = 30.0  # on a busy machine
MEMORY_BYTES = 512 << 20  # of addresses: a schema of 2000 fields takes 160 MiB, and half of that is Python
STACK_BYTES = 1 << 20  # less than threads have on any system
AT_ONCE = 2

TOO_COMPLEX = "too complex to compile: simplify it"
_REFUSED = 3  # exit code: the library refuses the grammar, and the output says why

_places = threading.BoundedSemaphore(AT_ONCE)


def problem_of(text: str, names: Sequence[str], vocab_size: int) -> str | None:
    """Return what is wrong with a grammar in `llguidance`'s form, by a trial; None if it can be compiled.

    `names` are the model's special tokens. It blocks: call it in a thread.
    """
    request = json.dumps({"text": text, "names": list(names), "vocab_size": vocab_size})
    command = [sys.executable, "-P", str(Path(__file__).resolve())]
    flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
    try:
        with _places:
            done = subprocess.run(
                command, input=request.encode(), capture_output=True, timeout=WALL_S, check=False, creationflags=flags
            )
    except (OSError, subprocess.SubprocessError):
        return TOO_COMPLEX
    if done.returncode == _REFUSED:
        return done.stdout.decode(errors="replace")
    return TOO_COMPLEX if done.returncode else None


def _limit_resources() -> None:
    try:
        import resource
    except ImportError:  # Windows: there is the limit of time only
        return
    limits = ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0))
    for which, limit in limits:
        with contextlib.suppress(OSError, ValueError):  # some systems know no limit of this kind
            resource.setrlimit(which, (limit, limit))


def _tokenizer_json(names: Sequence[str]) -> str:
    added = [
        {
            "id": 256 + number,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, name in enumerate(names)
    ]
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "decoder": {"type": "ByteFallback"},
            "model": {"type": "BPE", "vocab": pieces, "merges": [], "byte_fallback": True},
        }
    )


def _try(ended: list[str]) -> None:
    """Compile the grammar that the input names, and append what the library says of it; empty: nothing is wrong."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    asked = json.load(sys.stdin)
    vocabulary = LLTokenizer(_tokenizer_json(asked["names"]), asked["vocab_size"])
    try:
        matcher = LLMatcher(vocabulary, asked["text"], log_level=0, limits=LLParserLimits(verbose_errors=False))
        begin = time.thread_time()
        if not matcher.is_error():
            matcher.compute_bitmask()
        is_slow = time.thread_time() - begin > MASK_S
        said = matcher.get_error() if matcher.is_error() else TOO_COMPLEX if is_slow else ""
    except BaseException as error:  # a Rust panic does not derive from Exception
        said = str(error) or type(error).__name__
    ended.append(said)


def _main() -> int:
    _limit_resources()
    threading.stack_size(STACK_BYTES)
    ended: list[str] = []
    trial = threading.Thread(target=_try, args=(ended,), daemon=True)
    trial.start()
    trial.join(WALL_S)  # the node that waits for it may be gone
    sys.stdout.buffer.write("".join(ended).encode(errors="replace"))
    return 1 if not ended else _REFUSED if ended[0] else 0


if __name__ == "__main__":
    sys.exit(_main())
