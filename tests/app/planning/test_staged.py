"""The planner's advice in staged cases."""

from __future__ import annotations

import pytest

from app.planning.machines import MachineSpec
from tests.app.planning.staged import StagedCase, staged_cases

# A desktop CPU, and one with a quarter of its speed.
DESKTOP = MachineSpec("desktop", 64 * 10**9, 12e9, 60e9, kind="cpu", few_rows_flops_per_s=25e9, watts=100)
OLD = MachineSpec("old", 64 * 10**9, 4e9, 15e9, kind="cpu", few_rows_flops_per_s=8e9, watts=60)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=f"{m.name}-{c.name}") for m in (DESKTOP, OLD) for c in staged_cases(m)]
)
def test_advice(case: StagedCase) -> None:
    found = case.forecast
    assert case.is_right, (found.advice, found.limit, found.why)


def test_the_advice_of_three_nodes_on_one_machine_says_why() -> None:
    (tuned,) = (case.forecast for case in staged_cases(DESKTOP) if case.name == "shared_cores_finetune")
    assert tuned.swarm == tuned.alone
    assert tuned.why == "no other machine would make it faster."
