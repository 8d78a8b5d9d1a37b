"""What a whole node costs while nothing happens: twenty real processes in one swarm on this machine.

    python -m tests.bench.idle [--json] [--nodes 20] [--seconds 30]

Every node is a `shoal serve` that hosts nothing and has joined by invite. CPU is counted by the system over a stretch
that begins once the last one knows all the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 240.0


def shoal(home: Path, *arguments: str) -> list[str]:
    """The command line of one `shoal` command."""
    return [sys.executable, "-m", "app.cli", *arguments, "--home", str(home)]


def facts(home: Path, *arguments: str) -> Any:
    """What a command with `--json` prints, or None while it fails."""
    done = subprocess.run(shoal(home, *arguments, "--json"), capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
    """A node that has said it is ready."""
    serve = shoal(home, "serve", "--max-vram", "0", "--listen", "/ip4/127.0.0.1/tcp/0", "--api-port", "0", *arguments)
    node = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert node.stdout is not None
    line = node.stdout.readline()
    if not line.startswith("ready"):
        raise SystemExit(f"a node did not get ready: {line!r}")
    return node


def measure(count: int, seconds: float) -> dict[str, float]:
    """Start the swarm, wait until everybody knows everybody, and watch it do nothing."""
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / str(index) for index in range(count)]
        os.environ["SHOAL_CACHE"] = str(Path(folder) / "cache")
        subprocess.run(shoal(homes[0], "create", "idle", "--model", "tiny-random"), check=True, capture_output=True)
        nodes = [start(homes[0])]
        try:
            invite = subprocess.run(
                shoal(homes[0], "invite"), check=True, capture_output=True, text=True
            ).stdout.strip()
            nodes += [start(home, "--join", invite) for home in homes[1:]]
            _wait_for_company(homes, count)
            return _watch(nodes, seconds)
        finally:
            for node in nodes:
                node.terminate()
            for node in nodes:
                node.wait(timeout=60)


def _wait_for_company(homes: list[Path], count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    for home in homes:
        while len(facts(home, "peers") or ()) < count - 1:
            if time.monotonic() > deadline:
                raise SystemExit(f"a node knows only {len(facts(home, 'peers') or ())} of {count - 1} others")
            time.sleep(0.5)


def _watch(nodes: list[subprocess.Popen[str]], seconds: float) -> dict[str, float]:
    processes = [psutil.Process(node.pid) for node in nodes]

    def spent() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    before, begin = spent(), time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - begin
    shares = [(after - then) / elapsed for after, then in zip(spent(), before, strict=True)]
    memory = [process.memory_info().rss for process in processes]
    return {
        "nodes": len(nodes),
        "cpu_share_mean": sum(shares) / len(shares),
        "cpu_share_max": max(shares),
        "rss_mb_mean": sum(memory) / len(memory) / 1e6,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    figures = measure(arguments.nodes, arguments.seconds)
    print(json.dumps(figures) if arguments.json else "\n".join(f"{k:>16}  {v:.4f}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
