"""`python -m tests.sim [--twin] [--world NAME] [--seeds 1,2] [--hours 6]`: run simulated swarms, print how they did."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import trio
from trio.testing import MockClock

from tests.sim.model import Model
from tests.sim.routes import RouteSamples
from tests.sim.twin import Twin
from tests.sim.worlds import WORLDS


def main() -> None:
    """Run the swarms that were asked for, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--world", choices=[*WORLDS, "all"], default="unlike")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--twin", action="store_true", help="real memberships and hosting on the in-memory network")
    asked = parser.parse_args()
    for name in WORLDS if asked.world == "all" else [asked.world]:
        for seed in map(int, asked.seeds.split(",")):
            world = replace(WORLDS[name], seed=seed, hours=asked.hours)
            if asked.nodes is not None:
                world = replace(world, nodes=asked.nodes)
            began_s, routes = time.process_time(), RouteSamples()
            if asked.twin:
                verdict = trio.run(Twin(world).run, clock=MockClock(autojump_threshold=0))
            else:
                verdict = Model(world, routes).run()
            told = "" if asked.twin else f"; {routes}"
            took_s = time.process_time() - began_s
            sys.stdout.write(f"{name} seed {seed} {asked.hours:g} h: {verdict}{told} ({took_s:.0f} s of CPU)\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
