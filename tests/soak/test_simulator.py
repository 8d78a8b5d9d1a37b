"""Hours of churn in swarms of two hundred unlike nodes: coverage, balance, restlessness, and the routes found there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from trio.testing import MockClock

from tests.sim.model import Model
from tests.sim.routes import RouteSamples
from tests.sim.twin import Twin
from tests.sim.worlds import WORLDS

pytestmark = pytest.mark.soak

TWIN = replace(WORLDS["unlike"], nodes=60, hours=0.5)  # 200 real nodes take minutes of CPU for each minute


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["unlike", "devices"])
def test_six_hours_of_churn(name: str, seed: int, record_property: Callable[[str, object], None]) -> None:
    routes = RouteSamples()
    verdict = Model(replace(WORLDS[name], seed=seed), routes).run()
    record_property("verdict", f"{verdict}; {routes}")
    assert verdict.coverage == 1.0, verdict
    assert verdict.weakest_share >= 0.75, verdict
    assert verdict.moves_per_node_hour <= 2, verdict
    assert routes.refused == 0, routes


async def test_real_nodes_through_churn(
    autojump_clock: MockClock, record_property: Callable[[str, object], None]
) -> None:
    verdict = await Twin(TWIN).run()
    record_property("verdict", str(verdict))
    assert verdict.coverage == 1.0, verdict
    assert verdict.weakest_share >= 0.65, verdict  # a third of the nodes: one that goes is missed more
    assert verdict.moves_per_node_hour <= 2, verdict
