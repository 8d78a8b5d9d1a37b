"""llama.cpp with the starter model, in one process or over its own RPC servers, for the bench of four bits.

    pip install llama-cpp-python       (CMAKE_ARGS=-DGGML_RPC=ON; builds from its source package in about 15 minutes)

Each contestant is a process of its own that answers a line with its seconds: a server that is registered once stays in
a process, and its threads would disturb those of torch. The three servers hold a third of the blocks each, as Shoal's
nodes do; the asker holds the embedding.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from app.config.home import cache_folder
from engine.sources.starter import starter_file
from tests.bench.swarm_nodes import free_port

BLOCKS = 30


def is_installed() -> bool:
    """Whether llama.cpp is here."""
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCpp:
    """A process of llama.cpp with the whole file, or with servers at these ports."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def token_s(self, prompt: int, tokens: int) -> float:
        """Seconds of a token behind a prompt."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(prompt, tokens, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


@contextmanager
def llama_cpp(threads: int, *, servers: int = 0) -> Iterator[LlamaCpp]:
    """llama.cpp with so many threads in each process."""
    with ExitStack() as stack:
        ports = [free_port() for _ in range(servers)]
        for port in ports:
            server = stack.enter_context(_started("serve", port, threads))
            assert server.stdout is not None
            assert server.stdout.readline(), "an RPC server ended"
        yield LlamaCpp(stack.enter_context(_started("ask", threads, *ports)))


@contextmanager
def _started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.bench.llama_cpp_rival", *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


class _Library:
    """The functions of its backends that the Python package does not have."""

    def __init__(self) -> None:
        llama: Any = importlib.import_module("llama_cpp")
        folder = Path(llama.__file__).parent / "lib"
        self._rpc, self._ggml = (ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml-rpc", "ggml"))
        for call in (self._rpc.ggml_backend_rpc_add_server, self._ggml.ggml_backend_dev_by_name):
            call.restype = ctypes.c_void_p

    def serve(self, port: int, threads: int) -> None:
        """Serve this machine's processor until the process is killed."""
        devices = (ctypes.c_void_p * 1)(self._ggml.ggml_backend_dev_by_name(b"CPU"))
        assert devices[0], "llama.cpp has no processor"
        print("serving", flush=True)
        count = ctypes.c_size_t
        self._rpc.ggml_backend_rpc_start_server(_endpoint(port), None, count(threads), count(1), devices)

    def use(self, port: int) -> None:
        """Use the server at a port from now on."""
        server = self._rpc.ggml_backend_rpc_add_server(_endpoint(port))
        assert server, "the RPC server does not answer"
        self._ggml.ggml_backend_register(ctypes.c_void_p(server))


def _endpoint(port: int) -> bytes:
    return f"127.0.0.1:{port}".encode()


def ask(threads: int, *ports: int) -> None:
    """Answer each line of the input, a prompt's length and a number of tokens, with the seconds of a token."""
    llama: Any = importlib.import_module("llama_cpp")
    own: dict[str, Any] = {"n_gpu_layers": 0}
    if ports:
        library = _Library()
        for port in ports:
            library.use(port)
        own = {"n_gpu_layers": BLOCKS + 1, "tensor_split": [1.0] * len(ports)}
    file = str(starter_file(cache_folder()))
    model = llama.Llama(file, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False, **own)
    for line in sys.stdin:
        prompt, tokens = map(int, line.split())
        model.reset()
        model.eval([5] * prompt)
        begin = perf_counter()
        for _ in range(tokens):
            model.eval([7])
        print((perf_counter() - begin) / tokens, flush=True)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[2:]]
    if sys.argv[1] == "serve":
        _Library().serve(*numbers)
    else:
        ask(*numbers)
