"""A job through three nodes with real sockets between them: the numbers of one process, bit for bit."""

from __future__ import annotations

from pathlib import Path

from app.training.trainer import Patience
from engine.sources.tiny import open_tiny
from tests.app.training.job_swarm import Losses, batches_of, open_job_swarm, undisturbed
from tests.p2p.nodes import libp2p_world


async def test_losses_and_states_over_real_links_are_those_of_one_process(tmp_path: Path) -> None:
    source = open_tiny(tmp_path)
    wanted, states = undisturbed(source, 2)
    losses = Losses()
    async with libp2p_world() as world, open_job_swarm(source, tmp_path) as swarm:
        networks = [await world.node() for _ in range(4)]
        for network in networks:
            for other in networks:
                if other is not network:
                    network.learn(other.peer_id, other.addresses())
        for index, (start, stop) in enumerate(((0, 2), (2, 6), (6, 8))):
            await swarm.train(f"real{index}", start, stop, network=networks[index])
        owner = swarm.owner(network=networks[3], patience=Patience())
        await owner.run(2, batches_of, losses)
        losses.check(wanted)
        assert dict(enumerate(await owner.final_states())) == states
        assert (owner.figures.epochs, owner.figures.micro_batches_again) == (1, 0)
