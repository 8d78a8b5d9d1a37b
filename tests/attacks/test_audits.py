"""Audits of honest nodes: they must accuse nobody, and never end their asker."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import torch
import trio
from trio.testing import MockClock

from app.asker.asker import Asker, AskerOptions
from app.routing.trust import TrustBook
from engine.model.block import WeightOptions
from engine.model.hosted_span import HostedSpan
from engine.model.span import SpanOptions, load_span
from engine.session_runner import SessionRunner
from engine.sources.opening import open_source
from engine.swarm_ends import load_swarm_ends
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from p2p.memory.fabric import LinkProfile, open_fabric
from tests.app.hash_model import HashEnds, InlineDevice, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm

CPU = torch.device("cpu")
TOKENS = 8
HEAD_S = 0.05  # one pass through the model's head


async def paused_half_way(swarm: SessionSwarm, asker: Asker, name: str, prompt: list[int]) -> bool:
    """Ask for one reply and pause this node in the middle of it; returns whether the node took part until then."""
    settings = ReplySettings(TOKENS, Sampling(temperature=0.0))
    server, serving = swarm.servers[name], swarm.announcements[name]
    async with asker.reply(prompt, settings, max_tokens=TOKENS) as reply:
        for _ in range(TOKENS // 2):
            await anext(reply)
        took_part = name in {hop.peer for hop in reply.stats.route}
        swarm.announcements[name] = replace(serving, state="paused")
        swarm.nursery.start_soon(server.drain)
        await trio.sleep(1.5)
        async for _ in reply:
            pass
    assert name not in {hop.peer for hop in reply.stats.route}
    swarm.announcements[name], server.draining = serving, False
    return took_part


async def test_an_honest_hop_of_another_precision_that_leaves_early_is_not_accused(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A bfloat16 card is paused in the middle of each reply and float32 nodes go on: every audit must agree."""
    source = open_source("tiny-random", tmp_path)

    def runner(start: int, stop: int, dtype: torch.dtype = torch.float32) -> SessionRunner:
        span = load_span(source, start, stop, SpanOptions(CPU, dtype, kv_bytes=1 << 22))
        return SessionRunner(HostedSpan([span]))

    async with open_fabric(profile=LinkProfile(delay_s=0.002)) as fabric, trio.open_nursery() as nursery:
        swarm = SessionSwarm(fabric, nursery)
        for index, span in enumerate(((0, 4), (0, 4), (4, 8), (4, 8))):
            await swarm.serve(f"cpu{index}", runner(*span))
        await swarm.serve("card", runner(0, 4, torch.bfloat16), speed=400.0)
        swarm.announcements["card"] = replace(swarm.announcements["card"], dtype="bf16")
        book, rng = TrustBook(clock=trio.current_time), random.Random(3)
        ends = load_swarm_ends(source, WeightOptions(CPU, torch.float32))
        members = lambda: list(swarm.announcements.values())  # noqa: E731
        asker = Asker(fabric.node("asker"), ends, InlineDevice(), members, options=AskerOptions(rng=rng, book=book))
        await nursery.start(asker.run)
        prompts = random.Random(5)
        for number in range(1, 61):
            assert await paused_half_way(swarm, asker, "card", prompts.choices(range(20, 200), k=6)), number
            if number % 20 == 0:  # one more session may be an audit
                await trio.sleep(40)
            assert book.standing("card").trusted, book.standing("card").why
        audits = asker.stats().audits
        assert audits.passed > 0
        assert audits.failed == 0
        nursery.cancel_scope.cancel()


async def test_a_client_may_hang_up_at_any_moment(autojump_clock: MockClock) -> None:
    """One of two clients hangs up before its first token, at another moment each time: replies and audits go on."""
    async with open_swarm((0, 4), (0, 4), (4, 8), (4, 8)) as swarm, trio.open_nursery() as nursery:
        outlook, members = AskerOptions(rng=random.Random(1)), lambda: list(swarm.announcements.values())
        asker = Asker(swarm.fabric.node("asker"), HashEnds(), InlineDevice(HEAD_S), members, options=outlook)
        await nursery.start(asker.run)

        async def hang_up(after_s: float) -> None:
            await trio.sleep(0.01)  # the other reply's token is chosen first
            with trio.move_on_after(after_s):
                await ask(asker, PROMPT, 6)

        for _ in range(12):
            for hundredths in range(8, 16):  # the answer comes after 0.1 s, then the head is busy with the other reply
                async with trio.open_nursery() as both:
                    both.start_soon(ask, asker, PROMPT, 6)
                    both.start_soon(hang_up, hundredths / 100)
        await trio.sleep(60)
        assert asker.stats().audits.passed > 0
        assert (await ask(asker, PROMPT, 6)).token_ids == greedy(PROMPT, 6)
        nursery.cancel_scope.cancel()
