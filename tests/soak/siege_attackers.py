"""All attackers of the siege in one process: `python -m tests.soak.siege_attackers FILE`, until it is killed.

The file is JSON: `swarm` (name), `model` (hash of the manifest), `victims` (peer, address, and the span it serves).
Every attack goes on for ever; who is cut off comes back under another name. None of them computes a wrong result that
looks right: audits are for that.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from app.core.errors import AppError
from app.core.network import FrameStream, Priority
from app.core.span import Span
from app.membership import Membership, resolve_swarm, wire
from app.membership.link_probe import BURST
from app.rounds import wire as rounds
from app.session.frame import HopError, new_session_id, plain
from app.session.wire import KEEP, PROTOCOL, EpochOrder, Kind, decode, encode_hop_error, encode_turn
from app.swarm.names import SwarmName
from app.swarm.records import Announcement, SwarmRecord, sign_announcement, sign_suspicion
from app.training import wire as training
from p2p.addresses import Address, parse_address
from p2p.errors import P2PError
from p2p.identity import Identity
from p2p.link.frames import CHUNK_BYTES, FIRST, PREFACE, Frame, encode
from p2p.link.frames import Kind as LinkKind
from p2p.network import Libp2pNetwork
from p2p.values import MAX_BODY_BYTES
from tests.attacks.grammar import RawFrame
from tests.p2p.hostile import connection_to, open_protocol
from tests.p2p.nodes import make_network

WIDTH = 64  # of the tiny model
N_BLOCKS = 8
COMES_BACK_S = 0.5
HOLDS_S = 20.0


@dataclass(frozen=True)
class Victim:
    """A node of the swarm, with what `tests.p2p.hostile` needs to attack it by hand."""

    peer: str
    address: Address
    span: Span
    door: trio.CapacityLimiter


Attack = Callable[[Libp2pNetwork, Victim, SwarmRecord], Awaitable[None]]


# --- strangers --------------------------------------------------------------------------------------------------------


async def flood_of_statements(network: Libp2pNetwork, victim: Victim, record: SwarmRecord) -> None:
    """Sixty-four calls at once with worthless statements."""
    body = wire.Tell(bytes.fromhex(record.id), [b"x"] * 40).encode()

    async def tell() -> None:
        with suppress(P2PError):
            await network.call(victim.peer, wire.TELL, body, timeout_s=3)

    async with trio.open_nursery() as nursery:
        for _ in range(64):
            nursery.start_soon(tell)


async def forged_statements(network: Libp2pNetwork, victim: Victim, record: SwarmRecord) -> None:
    """Members that do not exist and serve everything, and suspicions of those that do."""
    now_ms = int(1000 * _wall())
    statements = []
    for _ in range(40):
        ghost = Identity.generate()
        said = Announcement(
            ghost.peer_id, now_ms, now_ms + 600_000, record.id, "serving", Span(0, N_BLOCKS), 1e6, 1e6, 1 << 20,
            addresses=("/ip4/127.0.0.1/tcp/9",),
        )  # fmt: skip
        statements += [sign_announcement(ghost, said)]
        statements += [sign_suspicion(ghost, record.id, victim.peer, now_ms, sequence=now_ms)]
    for start in range(0, len(statements), 20):
        body = wire.Tell(bytes.fromhex(record.id), statements[start : start + 20]).encode()
        await network.call(victim.peer, wire.TELL, body, timeout_s=3)
        await trio.sleep(0.2)


async def half_requests(network: Libp2pNetwork, victim: Victim, record: SwarmRecord) -> None:
    """Requests of 64 MiB of which 256 KiB are sent."""
    async with connection_to(victim) as connection:  # type: ignore[arg-type]
        lane = await open_protocol(connection, "/shoal/1/live")
        frames = [
            Frame(LinkKind.REQUEST, FIRST, id, MAX_BODY_BYTES, 1000, wire.TELL, bytes(CHUNK_BYTES)) for id in (1, 3)
        ]
        await lane.write(PREFACE + b"".join(map(encode, frames)))
        await trio.sleep(HOLDS_S)


async def half_handshakes(network: Libp2pNetwork, victim: Victim, record: SwarmRecord) -> None:
    """Connections that say a few bytes, or nothing."""
    for _ in range(8):
        with suppress(OSError, trio.BrokenResourceError):
            stream = await trio.open_tcp_stream(victim.address.host, victim.address.port)
            async with stream:
                await stream.send_all(b"\x13/multistream/1.0.0\n"[: random.randrange(20)])
                await trio.sleep(0.5)


async def slow_reads(network: Libp2pNetwork, victim: Victim, record: SwarmRecord) -> None:
    """A session whose outputs are asked for again and again, and never read."""
    stream, id = await network.open(victim.peer, PROTOCOL, timeout_s=5), new_session_id(network.peer_id)
    await _order(stream, id, 1, EpochOrder(victim.span, "", "", 256, 0, 0))
    await _data(stream, id, 1, 0, 64)
    for _ in range(200):
        await stream.send(plain(Kind.GO, id, 1, 0), Priority.CONTROL)
        await trio.sleep(0.02)
    await trio.sleep(HOLDS_S)


async def turn_storm(network: Libp2pNetwork, victim: Victim, record: SwarmRecord) -> None:
    """An epoch after another, each with another successor that nobody can reach."""
    stream, id = await network.open(victim.peer, PROTOCOL, timeout_s=5), new_session_id(network.peer_id)
    for epoch in range(1, 400):
        order = EpochOrder(victim.span, "", Identity.generate().peer_id, 64, 0, 0)
        await _order(stream, id, epoch, order)
        await trio.sleep(0.02)


async def odd_frames(network: Libp2pNetwork, victim: Victim, record: SwarmRecord) -> None:
    """Mixed wires, wrong widths, positions out of order, unknown kinds."""
    dice, id = random.Random(), new_session_id(network.peer_id)
    stream = await network.open(victim.peer, PROTOCOL, timeout_s=5)
    for epoch in range(1, 60):
        order = EpochOrder(
            victim.span, "", "", 64, 0, dice.choice((None, 0, 9)), wire=dice.choice(("f16", "f32", "bf16"))
        )
        await _order(stream, id, epoch, order)
        for _ in range(4):
            rows, width = dice.randrange(1, 9), dice.choice((WIDTH, WIDTH, 1, 2048))
            dtype = dice.choice((1, 2, 3))
            body = dice.choice((b"\x00", b"\xff", b"\x3f")) * (rows * width * (4 if dtype == 1 else 2))
            frame = RawFrame(id, epoch, dice.randrange(20), Kind.DATA, dtype, rows, width, body)
            await stream.send(frame.encode(), Priority.DECODE)
        await trio.sleep(0.05)
    await stream.send(RawFrame(id, 1, 0, 77, 0, 0, 0, b"x", 5).encode(), Priority.CONTROL)


async def _order(stream: FrameStream, id: bytes, epoch: int, order: EpochOrder) -> None:
    await stream.send(encode_turn(id, epoch, KEEP, order), Priority.CONTROL)


async def _data(stream: FrameStream, id: bytes, epoch: int, position: int, rows: int) -> None:
    frame = RawFrame(id, epoch, position, Kind.DATA, 1, rows, WIDTH, bytes(4 * WIDTH * rows))
    await stream.send(frame.encode(), Priority.PREFILL)


async def odd_training(network: Libp2pNetwork, victim: Victim, record: SwarmRecord) -> None:
    """Requests about training rounds and links that are worthless, and jobs that nobody agreed to."""
    job = secrets.token_bytes(32)
    bodies = (b"", job, job + b'{"round":0,"head":"' + b"ab" * 32 + b'"}', job + secrets.token_bytes(60_000))

    async def ask(method: str, body: bytes) -> None:
        with suppress(P2PError):
            await network.call(victim.peer, method, body, timeout_s=3)

    async with trio.open_nursery() as nursery:
        for method in (*rounds.OF_ISLANDS, rounds.JOBS, BURST):
            for body in bodies:
                nursery.start_soon(ask, method, body)
    stream, run = await network.open(victim.peer, training.PROTOCOL, timeout_s=5), new_session_id(network.peer_id)
    order = training.JobOrder(victim.span, "", "", 8, 16.0, ("q", "v"), 0.0, 1, 0.0, 64, 4, "f32")
    for epoch in range(1, 60):
        await stream.send(training.encode_open(run, epoch, 0, order), Priority.CONTROL)
        body = b"\xff" * (4 * WIDTH * 64)
        heading = training.Pass(0, epoch % 4, 0)
        head = training.pass_header(
            training.Kind.FORWARD, run, epoch, heading, dtype="f32", rows=64, width=WIDTH, length=len(body)
        )
        await stream.send(head + body, Priority.BULK)
        await trio.sleep(0.1)
    await stream.send(secrets.token_bytes(64), Priority.CONTROL)


STRANGERS: tuple[Attack, ...] = (
    flood_of_statements,
    forged_statements,
    half_requests,
    half_handshakes,
    slow_reads,
    turn_storm,
    odd_frames,
    odd_training,
)


# --- members ----------------------------------------------------------------------------------------------------------


class HostileHop:
    """A member that claims to be the fastest holder of every block, and does no work."""

    def __init__(self, network: Libp2pNetwork, identity: Identity, record: SwarmRecord) -> None:
        self._dice = random.Random()
        self._membership = Membership(network, identity, record, N_BLOCKS)
        network.accept(PROTOCOL, self._answer)

    async def run(self, via: list[str]) -> None:
        """Take part until cancelled."""
        self._membership.join_via(via)
        async with trio.open_nursery() as nursery:
            await nursery.start(self._membership.run)
            while True:
                self._membership.announce(
                    state="serving", span=Span(0, N_BLOCKS), decode_tokens_per_s=1e5, prefill_tokens_per_s=1e6,
                    kv_free_tokens=1 << 20,
                )  # fmt: skip
                await trio.sleep(30)

    async def _answer(self, stream: FrameStream) -> None:
        mood = self._dice.choice(("silent", "excuses", "breaks", "nan", "garbage", "unready"))
        with suppress(P2PError, AppError):
            while True:
                frame = decode(await stream.receive())
                if frame.kind == Kind.TURN and mood != "unready":
                    await stream.send(plain(Kind.READY, frame.session, frame.epoch), Priority.CONTROL)
                elif mood == "excuses":
                    excuse = encode_hop_error(frame.session, frame.epoch, 0, HopError("gap", "not my fault"))
                    await stream.send(excuse, Priority.CONTROL)
                elif mood == "nan" and frame.kind == Kind.DATA:
                    body = b"\x00\x00\xc0\x7f" * (WIDTH * frame.rows)
                    sent = RawFrame(frame.session, frame.epoch, frame.position, Kind.DATA, 1, frame.rows, WIDTH, body)
                    await stream.send(sent.encode(), Priority.DECODE)
                elif mood == "garbage":
                    await stream.send(secrets.token_bytes(64), Priority.DECODE)
                elif mood == "breaks" and frame.kind == Kind.DATA:
                    await stream.reset()
                    return


async def hostile_member(victims: list[Victim], record: SwarmRecord) -> None:
    """Be a hostile hop for a while, then another one."""
    while True:
        identity = Identity.generate()
        with suppress(Exception), trio.move_on_after(90):
            async with make_network(identity=identity).running() as network:
                for victim in victims:
                    network.learn(victim.peer, [str(victim.address)])
                await HostileHop(network, identity, record).run([victim.peer for victim in victims])
        await trio.sleep(COMES_BACK_S)


# --- all at once ------------------------------------------------------------------------------------------------------


async def repeat(attack: Attack, victims: list[Victim], record: SwarmRecord) -> None:
    """One attack after another, each under a new name and against another victim."""
    while True:
        victim = random.choice(victims)
        # An attacker's own errors do not matter: it comes back.
        with suppress(Exception), trio.move_on_after(60):
            async with make_network().running() as network:
                network.learn(victim.peer, [str(victim.address)])
                await attack(network, victim, record)
        await trio.sleep(COMES_BACK_S)


def _wall() -> float:
    import time

    return time.time()


async def besiege(plan: dict[str, Any]) -> None:
    """Run every attack until the process is killed."""
    victims = [
        Victim(v["peer"], parse_address(v["address"]), Span(*v["span"]), trio.CapacityLimiter(8))
        for v in plan["victims"]
    ]
    async with make_network().running() as network:
        for victim in victims:
            network.learn(victim.peer, [str(victim.address)])
        found = await resolve_swarm(
            network, SwarmName(plan["swarm"], plan["model"]), via=[victim.peer for victim in victims]
        )
    print("besieging", flush=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hostile_member, victims, found.record)
        for attack in STRANGERS:
            nursery.start_soon(repeat, attack, victims, found.record)


if __name__ == "__main__":
    trio.run(besiege, json.loads(Path(sys.argv[1]).read_text()))
