"""The swarms that placement is judged on, by name."""

from __future__ import annotations

from tests.sim.world import World

WORLDS = {
    "unlike": World(),  # memory and tokens/s vary by themselves: 20 and 10 times
    "devices": World(shared_work=True),  # who holds more blocks runs each token through more of them
    "lean": World(memory=(1, 4)),  # about five holders a block, and every node only a few blocks
    "few": World(nodes=30, memory=(4, 20), churn_s=120.0),
    "thin": World(nodes=30, n_blocks=24, memory=(1, 4), churn_s=120.0),  # less than three holders a block
}
