"""Short forms of the simulations; the long ones are in `tests/soak/test_simulator.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trio.testing import MockClock

from tests.sim.model import Model
from tests.sim.optimum import best_placement, fractional_bound
from tests.sim.routes import RouteSamples
from tests.sim.twin import Twin
from tests.sim.world import NodeSpec, World
from tests.sim.worlds import WORLDS

SMALL = World(seed=3, nodes=40, n_blocks=24, memory=(1, 12), hours=0.5, churn_s=60.0)


def test_half_an_hour_of_churn() -> None:
    routes = RouteSamples()
    verdict = Model(SMALL, routes).run()
    assert verdict.coverage == 1.0, verdict
    assert verdict.weakest_share >= 0.7, verdict
    assert verdict.moves_per_node_hour <= 2, verdict
    assert routes.asked > 0
    assert routes.refused == 0, routes


async def test_real_nodes_on_the_in_memory_network_agree(autojump_clock: MockClock) -> None:
    world = replace(SMALL, nodes=12, n_blocks=16, hours=3 / 60, churn_s=30.0)
    real = await Twin(world).run()
    model = Model(world).run()
    assert real.coverage == model.coverage == 1.0, f"real: {real}; modelled: {model}"
    assert abs(real.weakest_share - model.weakest_share) <= 0.25, f"real: {real}; modelled: {model}"


def test_a_world_is_the_same_each_time() -> None:
    assert WORLDS["unlike"].events() == World().events()


def test_somebody_who_knows_all_finds_the_placement_without_a_rest() -> None:
    nodes = [NodeSpec(number, 2, 10.0, 1.0, (0.0, 0.0)) for number in range(8)]
    best = best_placement(nodes, 8, tries=4000)
    assert best.weakest_share == pytest.approx(1.0)
    assert all(sum(block in span for span in best.spans) == 2 for block in range(8))
    lopsided = [NodeSpec(0, 3, 10.0, 1.0, (0.0, 0.0)), NodeSpec(1, 1, 20.0, 1.0, (0.0, 0.0))]
    assert fractional_bound(lopsided, 4) == 12.5
    assert best_placement(lopsided, 4, tries=1000).weakest_share == pytest.approx(10 / 12.5)
