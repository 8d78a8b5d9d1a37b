"""A grammar of hostile messages, and the scenes in which they are sent: session frames and membership calls.

Every message is well-formed, almost, or not at all: fields come from small sets of usual values and edges, so that they
meet each other, and bodies may have another length than their header says. A message is a plain value that a failing
example prints, and that can be kept as an explicit example.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import trio
from hypothesis import strategies as st

from app.core.canonical_json import canonical
from app.core.errors import AppError
from app.core.network import FrameStream
from app.core.span import Span
from app.membership import wire as membership_wire
from app.serving.block_server import BlockServer
from app.session.frame import Frame, new_session_id, plain
from app.session.wire import KEEP, PROTOCOL, CacheGrant, EpochOrder, Kind, decode, encode_turn
from app.swarm.records import Announcement, sign_announcement, sign_suspicion
from p2p.errors import P2PError
from p2p.memory.fabric import open_fabric
from tests.app.hash_model import WIDTH, HashEnds, HashRunner, InlineDevice, greedy
from tests.app.session_swarm import PROMPT, ask, no_leaks, open_swarm
from tests.app.swarms import N_BLOCKS, RECORD, identity, open_sim, wall_clock

EDGES = (0, 1, 2, 3, 8, 64, 4095, 4096, 4097, 2**16, 2**24 - 1, 2**24, 2**31, 2**32 - 1)
HONEST_ID = new_session_id("honest", b"honestly")
IDS = (HONEST_ID, *(new_session_id(name, bytes(8)) for name in ("attacker", "second")))
NAMES = ("", "honest", "attacker", "second", "victim", "nobody", "x" * 128, "x" * 129, "ß", "\x00")


# --- session frames ---------------------------------------------------------------------------------------------------


class RawFrame(NamedTuple):
    """One frame as it is sent; `length` may be wrong."""

    session: bytes
    epoch: int
    position: int
    kind: int
    dtype: int
    rows: int
    width: int
    body: bytes
    length: int | None = None  # in the header; None: that of the body

    def encode(self) -> bytes:
        """The message."""
        length = len(self.body) if self.length is None else self.length
        fields = (self.session, self.epoch, self.position, self.kind, self.dtype, 0, self.rows, self.width, length)
        return struct.pack("<16sIIBBHIII", *fields) + self.body


_numbers = st.one_of(st.integers(0, 12), st.sampled_from(EDGES))
_epochs = st.one_of(st.integers(0, 5), st.sampled_from(EDGES))
_ids = st.sampled_from(IDS)


@st.composite
def data_frames(draw: st.DrawFn) -> RawFrame:
    """DATA and RELAY: mostly of the right width, sometimes with a body that does not fit."""
    rows, width = draw(st.integers(0, 9)), draw(st.sampled_from((WIDTH, WIDTH, WIDTH, 1, 0, 2**16, 2**16 + 1)))
    dtype = draw(st.sampled_from((1, 1, 1, 2, 3, 0, 4, 255)))
    size = rows * width * (4 if dtype == 1 else 2) if width <= WIDTH else 4
    body = draw(st.sampled_from((b"\x00", b"\xff", b"\x7f"))) * max(
        0, size + draw(st.sampled_from((0, 0, 0, 0, 1, -1)))
    )
    kind = draw(st.sampled_from((Kind.DATA, Kind.DATA, Kind.RELAY)))
    return RawFrame(draw(_ids), draw(_epochs), draw(_numbers), kind, dtype, rows, width, body)


@st.composite
def turn_frames(draw: st.DrawFn) -> RawFrame:
    """TURN with any mix of fields, some of them of another type or missing."""
    odd = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.integers(-1, 2**40), st.just([1, 2]))
    numbers = st.one_of(_numbers, _numbers, _numbers, odd)
    fields = {
        "v": draw(st.sampled_from((1, 1, 1, 1, 0, 2, "1"))),
        "start": draw(numbers),
        "stop": draw(numbers),
        "before": draw(st.one_of(st.sampled_from(NAMES), odd)),
        "after": draw(st.one_of(st.sampled_from(NAMES), odd)),
        "tokens": draw(numbers),
        "urgent": draw(numbers),
        "send": draw(numbers),
        "relay": draw(st.one_of(st.booleans(), odd)),
        "wire": draw(st.one_of(st.sampled_from(("", "f32", "bf16", "f16", "f8")), odd)),
        "cache": draw(st.one_of(st.just({"peer": "second", "tokens": 1}), odd)),
    }
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
        fields.pop(name, None)
    return RawFrame(
        draw(_ids), draw(_epochs), draw(st.one_of(_numbers, st.just(KEEP))), Kind.TURN, 0, 0, 0, canonical(fields)
    )


@st.composite
def good_turns(draw: st.DrawFn) -> RawFrame:
    """TURNs that a server carries out: with them sessions come into being, change and end."""
    start = draw(st.integers(0, 7))
    order = EpochOrder(
        Span(start, draw(st.integers(start + 1, 8))),
        draw(st.sampled_from(NAMES[:6])),
        draw(st.sampled_from(NAMES[:6])),
        draw(st.sampled_from((1, 8, 64, 4096))),
        draw(st.integers(0, 12)),
        draw(st.one_of(st.none(), st.integers(0, 12))),
        draw(st.booleans()),
        draw(st.sampled_from(("", "f32"))),
        cache=draw(st.one_of(st.none(), st.builds(CacheGrant, st.sampled_from(NAMES[:6]), st.just(64)))),
    )
    order = replace(order, cache=order.cache if order.tokens >= 64 else None)
    made = decode(encode_turn(draw(_ids), draw(_epochs), draw(st.one_of(_numbers, st.just(KEEP))), order))
    return RawFrame(made.session, made.epoch, made.position, made.kind, 0, 0, 0, bytes(made.body))


@st.composite
def other_frames(draw: st.DrawFn) -> RawFrame:
    """All other kinds, known and unknown, with and without a body."""
    kind = draw(st.one_of(st.sampled_from(list(Kind)), st.integers(0, 255)))
    known = st.sampled_from((b'{"code":"draining","text":"x"}', b'{"peer":"second","tokens":9}'))
    body = draw(st.one_of(st.just(b""), st.binary(max_size=40), known))
    length = draw(st.one_of(st.none(), st.none(), st.none(), _numbers))
    return RawFrame(
        draw(_ids),
        draw(_epochs),
        draw(_numbers),
        kind,
        draw(st.integers(0, 4)),
        draw(_numbers),
        draw(_numbers),
        body,
        length,
    )


frames = st.one_of(good_turns(), data_frames(), data_frames(), turn_frames(), other_frames())
conversations = st.lists(st.tuples(st.sampled_from(("attacker", "second")), frames), max_size=24)


async def _next(stream: FrameStream, kind: Kind) -> Frame:
    with trio.fail_after(60):
        while True:
            frame = decode(await stream.receive())
            if frame.kind == kind:
                return frame


async def attack_server(conversation: Sequence[tuple[str, RawFrame]]) -> None:
    """Send frames of two strangers to a block server; an honest asker's session must go on, and nothing may leak."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        runner = HashRunner(0, 8, kv_tokens=1 << 16)
        server = BlockServer(fabric.node("victim"), runner, InlineDevice())
        await nursery.start(server.run)
        honest = await fabric.node("honest").open("victim", PROTOCOL)
        await honest.send(encode_turn(HONEST_ID, 1, KEEP, EpochOrder(Span(0, 8), "", "", 64, 0, 0)))
        await _next(honest, Kind.READY)
        nodes = {name: fabric.node(name) for name in ("attacker", "second")}
        streams: dict[str, FrameStream] = {}
        for name, frame in conversation:
            with suppress(P2PError):  # the server hangs up on malformed frames; then it is dialled again
                if name not in streams:
                    streams[name] = await nodes[name].open("victim", PROTOCOL)
                await streams[name].send(frame.encode())
                continue
            streams.pop(name, None)
        await trio.sleep(7)  # longer than a dial may take
        ends = HashEnds()
        body = ends.embed(PROMPT)
        head = RawFrame(HONEST_ID, 1, 0, Kind.DATA, 1, len(PROMPT), WIDTH, body)
        await honest.send(head.encode())
        answer = await _next(honest, Kind.DATA)
        assert ends_with(answer, greedy(PROMPT, 1)[0]), "the honest session's answer is wrong"
        for name in nodes:
            fabric.kill(name)
        await trio.sleep(1)
        assert server.sessions == 1, "sessions of peers that are gone stay"
        await honest.send(plain(Kind.CLOSE, HONEST_ID, 1))
        await trio.sleep(1)
        assert (server.sessions, server.queued_rows, runner.kv_free_tokens) == (0, 0, runner.kv_total_tokens)
        nursery.cancel_scope.cancel()


def ends_with(answer: Frame, token: int) -> bool:
    """True if the last hidden state of a frame stands for this token."""
    return int.from_bytes(bytes(answer.body[-4 * WIDTH :])[:4], "little") == token


answers = st.lists(st.tuples(st.sampled_from((0.0, 0.0, 0.3, 2.0)), frames, st.booleans()), max_size=12)


async def attack_asker(script: Sequence[tuple[float, RawFrame, bool]]) -> None:
    """Answer an asker with frames of the grammar; its reply must go on over honest hops, and end with right tokens.

    Of each line of the script: seconds to wait, the frame, and whether it bears the session's own id and epoch.
    """
    async with open_swarm((0, 4), (4, 8)) as swarm:
        node = swarm.fabric.node("evil")

        async def answer(stream: FrameStream) -> None:
            session, epoch = b"", 0
            with suppress(P2PError):
                first = decode(await stream.receive())
                session, epoch = first.session, first.epoch
                for wait_s, frame, own in script:
                    await trio.sleep(wait_s)
                    # Data that fits would be a lie, which only an audit finds.
                    if own and frame.kind != Kind.DATA:
                        frame = frame._replace(session=session, epoch=epoch)
                    await stream.send(frame.encode())
                while True:
                    await stream.receive()

        node.accept(PROTOCOL, answer)
        like = swarm.announcements["n1"]
        swarm.announcements["evil"] = Announcement(
            "evil", 1, 0, "", "serving", like.span, 1e4, 1e5, like.kv_free_tokens
        )
        asker = await swarm.asker()
        with trio.fail_after(300):
            stats = await ask(asker, PROMPT, 6)
        assert stats.token_ids == greedy(PROMPT, 6)
        assert "n0" not in asker.bans.active(trio.current_time()), "an honest hop was blamed"
        await no_leaks(swarm)


# --- membership -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """A signed statement, or bytes that are none."""

    kind: str  # announcement, suspicion, garbage
    signer: int  # number of an identity: 0 the victim, 1 an honest member, from 100 on the attacker's
    about: int = 0
    state: str = "serving"
    span: tuple[int, int] | None = None
    age_s: float = 0.0
    lifetime_s: float = 600.0
    swarm: str = RECORD.id
    cut: int | None = None  # keep so many bytes
    flip: int | None = None  # change this byte

    def encode(self, now_ms: int) -> bytes:
        """The statement's bytes."""
        made_at = max(1, now_ms - int(1000 * self.age_s))
        who = identity(self.signer)
        if self.kind == "announcement":
            span = None if self.span is None else Span(*self.span)
            said = Announcement(
                who.peer_id, made_at, made_at + int(1000 * self.lifetime_s), self.swarm, self.state, span
            )
            raw = sign_announcement(who, said)
        elif self.kind == "suspicion":
            raw = sign_suspicion(who, self.swarm, identity(self.about).peer_id, made_at, sequence=made_at)
        else:
            raw = bytes([self.signer % 256]) * (1 + self.about)
        raw = raw[: self.cut] if self.cut else raw
        if self.flip is not None:
            at = self.flip % len(raw)
            raw = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        return raw


_signers = st.sampled_from((100, 100, 101, 102, 103))  # nobody has the honest ones' keys
_spans = st.one_of(st.none(), st.integers(0, 30).flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, a + 30))))
statements = st.one_of(
    st.builds(
        Statement,
        st.sampled_from(("announcement", "announcement", "suspicion", "garbage")),
        _signers,
        about=st.sampled_from((0, 1, 100, 101)),
        state=st.sampled_from(("serving", "joining", "draining", "left", "loading", "odd")),
        span=_spans,
        age_s=st.sampled_from((0.0, 0.0, 1.0, 3600.0, 1e6, -1.0, -300.0, -1e6)),
        lifetime_s=st.sampled_from((600.0, 0.0, 3600.0, 1e7)),
        swarm=st.sampled_from((RECORD.id, RECORD.id, RECORD.id, "00" * 16)),
        cut=st.one_of(st.none(), st.none(), st.integers(1, 80)),
        flip=st.one_of(st.none(), st.none(), st.integers(0, 400)),
    )
)


@dataclass(frozen=True)
class Call:
    """One call of a stranger or of a member."""

    method: str
    statements: tuple[Statement, ...]
    number: int = 0
    vector: tuple[tuple[bytes, int], ...] = ()
    swarm: bytes = bytes.fromhex(RECORD.id)
    cut: int | None = None
    tail: bytes = b""

    def encode(self, now_ms: int) -> bytes:
        """The call's body."""
        raw = [one.encode(now_ms) for one in self.statements]
        if self.method == membership_wire.TELL:
            body = membership_wire.Tell(self.swarm, raw).encode()
        elif self.method == membership_wire.PROBE:
            body = membership_wire.ProbeRequest(self.swarm, self.number, raw).encode()
        else:
            body = membership_wire.TableRequest(self.swarm, dict(self.vector), raw).encode()
        return (body if self.cut is None else body[: self.cut]) + self.tail


calls = st.lists(
    st.builds(
        Call,
        st.sampled_from((membership_wire.TELL, membership_wire.PROBE, membership_wire.TABLE)),
        st.lists(statements, max_size=6).map(tuple),
        number=st.one_of(st.integers(0, 3), st.sampled_from((2**63, 2**64 - 1))),
        vector=st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.integers(0, 2**64 - 1)), max_size=4).map(tuple),
        swarm=st.sampled_from((bytes.fromhex(RECORD.id), bytes.fromhex(RECORD.id), bytes(16))),
        cut=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 40)),
        tail=st.one_of(st.just(b""), st.just(b""), st.just(b""), st.binary(max_size=8)),
    ),
    max_size=16,
)


async def attack_membership(script: Sequence[Call]) -> None:
    """Call a member as a stranger; it lives on, keeps its honest member, and its table stays within bounds."""
    async with open_sim() as sim:
        victim, honest = await sim.grow(2)
        attacker = sim.fabric.node(identity(100).peer_id)
        for call in script:
            now_ms = int(1000 * wall_clock())
            with suppress(P2PError, AppError):
                await attacker.call(victim.peer, call.method, call.encode(now_ms), timeout_s=5)
        await trio.sleep(20)  # strangers are met in vain, suspicions looked into
        assert victim.state_of(honest.peer) == honest.state_of(victim.peer) == "alive"
        assert len(victim.swarm.table) <= 8
        assert all(one.span is None or one.span.stop <= N_BLOCKS for one in victim.swarm.announcements())
        victim.swarm.announce(state="serving", span=Span(0, 4))
        said = victim.swarm.own
        await sim.until(lambda: said in honest.swarm.announcements(), 30)
