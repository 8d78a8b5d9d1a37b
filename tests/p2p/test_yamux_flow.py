"""The parts of yamux that do no I/O: the frame parser, the windows, the order of sending."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.channel.yamux_flow import (
    BATCH_BYTES,
    CONNECTION_WINDOW_BYTES,
    FIRST_WINDOW_BYTES,
    FRAME_BYTES,
    GROWN_WINDOW_BYTES,
    MAX_CONTROL_BYTES,
    MAX_PONGS,
    MAX_WINDOW_BYTES,
    ReceiveHalf,
    SendHalf,
    SendQueue,
    WindowBudget,
)
from p2p.channel.yamux_table import IDLE_FRAMES, IDLE_FRAMES_PER_S
from p2p.channel.yamux_wire import (
    BASE_WINDOW_BYTES,
    DATA,
    FIN,
    GO_AWAY,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    PING,
    SYN,
    WINDOW_UPDATE,
    FrameParser,
    YamuxFrame,
    pack_header,
)
from p2p.errors import ProtocolError
from p2p.rate_limit import FloodGuard

RTT_S = 0.05


def _frames() -> st.SearchStrategy[tuple[int, int, int, bytes]]:
    return st.tuples(st.sampled_from([DATA, WINDOW_UPDATE, PING]), st.integers(0, 15), st.integers(1, 9), st.binary())


@given(sent=st.lists(_frames(), max_size=12), sizes=st.lists(st.integers(0, 40)))
def test_frames_survive_any_cutting(sent: list[tuple[int, int, int, bytes]], sizes: list[int]) -> None:
    wire = b""
    for kind, flags, stream_id, body in sent:
        wire += pack_header(kind, flags, stream_id, len(body)) + (body if kind == DATA else b"")
    parser, seen = FrameParser(), list[YamuxFrame]()
    for size in [*sizes, len(wire)]:
        for frame in parser.feed(wire[:size]):
            if frame.length == 0 and frame.body:  # the rest of a body
                begun = seen.pop()
                frame = begun._replace(flags=begun.flags | frame.flags, body=begun.body + frame.body)
            seen.append(frame)
        wire = wire[size:]
    assert seen == [YamuxFrame(k, f, s, len(body), body if k == DATA else b"") for k, f, s, body in sent]


@given(pieces=st.lists(st.binary(max_size=60), max_size=10))
def test_arbitrary_bytes_raise_nothing_but_protocol_errors(pieces: list[bytes]) -> None:
    parser = FrameParser()
    for piece in pieces:
        try:
            list(parser.feed(piece))
        except ProtocolError:
            return


def test_a_body_is_refused_before_it_comes_when_no_window_is_that_large() -> None:
    with pytest.raises(ProtocolError):
        list(FrameParser().feed(pack_header(DATA, 0, 1, MAX_BODY_BYTES + 1)))


def test_an_end_comes_after_its_body() -> None:
    parser = FrameParser()
    [first] = parser.feed(pack_header(DATA, SYN | FIN, 1, 4) + b"ab")
    [last] = parser.feed(b"cd")
    assert (first.flags, last.flags) == (SYN, FIN)


def test_every_header_that_is_not_yamux_is_refused() -> None:
    for header in (b"\x01" + bytes(11), pack_header(GO_AWAY + 1, 0, 1, 0), pack_header(DATA, 16, 1, 0), bytes(12)):
        with pytest.raises(ProtocolError):
            list(FrameParser().feed(header))


@given(
    steps=st.lists(
        st.one_of(st.binary(min_size=1, max_size=5000), st.integers(-1, 6000)),
        max_size=60,
    )
)
def test_what_arrived_is_read_in_order(steps: list[bytes | int]) -> None:
    half, expected = ReceiveHalf(WindowBudget()), b""
    for step in steps:
        if isinstance(step, bytes):
            half.push(step, 0.0)
            expected += step
        elif half.buffered and step:
            taken = half.pop(step)
            assert taken == (expected if step < 0 else expected[:step])
            expected = expected[len(taken) :]
        assert half.buffered == len(expected)


@given(
    arrivals=st.lists(st.tuples(st.integers(1, FIRST_WINDOW_BYTES), st.floats(0, 1), st.booleans()), max_size=60),
    others=st.integers(0, 180),
)
def test_a_peer_never_has_more_credit_than_its_window(arrivals: list[tuple[int, float, bool]], others: int) -> None:
    budget = WindowBudget()
    admitted = [budget.admit() for _ in range(others)]
    assert budget.admit()
    half, now = ReceiveHalf(budget), 0.0
    half.open_window()
    for length, waits_s, reads in arrivals:
        now += waits_s
        length = min(length, half.credit)
        half.announce(length)
        if length:
            half.push(bytes(length), now)
        if reads and half.buffered:
            half.pop(-1)
        half.credit_due(now, RTT_S)
        assert half.credit + half.buffered <= half.window <= MAX_WINDOW_BYTES
        assert budget.used == sum(admitted) * BASE_WINDOW_BYTES + half.window
        assert budget.used <= CONNECTION_WINDOW_BYTES


def test_more_than_the_credit_is_a_violation() -> None:
    half = ReceiveHalf(WindowBudget())
    half.announce(BASE_WINDOW_BYTES)
    with pytest.raises(ProtocolError):
        half.announce(1)


def _rounds_until_sent(size: int, rtt_s: float) -> int:
    """Round trips that a sender with unlimited bandwidth waits for credit."""
    budget = WindowBudget()
    budget.admit()
    half, rounds = ReceiveHalf(budget), 0
    credit = BASE_WINDOW_BYTES + half.open_window()
    while size > credit:
        arriving, size, now = credit, size - credit, rounds * rtt_s
        half.announce(arriving)
        credit = 0
        for _ in range(arriving // FRAME_BYTES):
            half.push(bytes(FRAME_BYTES), now)
            half.pop(-1)
            credit += half.credit_due(now, rtt_s)
        rounds += 1
    return rounds


def test_four_mebibytes_need_few_round_trips() -> None:
    assert _rounds_until_sent(4 << 20, RTT_S) <= 2


def test_a_window_stays_small_for_a_slow_sender_and_for_a_slow_reader() -> None:
    budget = WindowBudget()
    budget.admit()
    slow_sender, now = ReceiveHalf(budget), 0.0
    for _ in range(200):
        now += 1.0
        slow_sender.announce(FRAME_BYTES)
        slow_sender.push(bytes(FRAME_BYTES), now)
        slow_sender.pop(-1)
        slow_sender.credit_due(now, RTT_S)
    assert slow_sender.window == BASE_WINDOW_BYTES


def test_growth_leaves_room_for_new_streams() -> None:
    budget = WindowBudget()
    while budget.grow(MAX_WINDOW_BYTES):
        pass
    assert budget.used == GROWN_WINDOW_BYTES
    admitted = 0
    while budget.admit():
        admitted += 1
    assert admitted == (CONNECTION_WINDOW_BYTES - GROWN_WINDOW_BYTES) // BASE_WINDOW_BYTES


def test_a_flood_of_tiny_pieces_costs_little_more_than_its_bytes() -> None:
    half = ReceiveHalf(WindowBudget())
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(100_000):
        half.push(number.to_bytes(3, "big"), 0.0)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert half.buffered == 300_000
    assert held < 2 * half.buffered


def _loaded(stream_id: int, size: int, priority: int, window: int = 1 << 30) -> SendHalf:
    half = SendHalf(stream_id)
    half.priority, half.window = priority, window
    half.load([memoryview(bytes(size))])
    return half


def _order(outbox: SendQueue, limit: int = BATCH_BYTES) -> list[tuple[int, int]]:
    """The streams and sizes of the DATA frames of one batch."""
    frames = FrameParser().feed(b"".join(outbox.take(limit)))
    return [(frame.stream_id, frame.length) for frame in frames if frame.kind == DATA]


def test_what_is_urgent_overtakes_between_batches() -> None:
    outbox = SendQueue()
    outbox.offer(_loaded(1, 1 << 20, priority=3))
    assert _order(outbox) == [(1, BATCH_BYTES)]
    outbox.offer(_loaded(3, 100, priority=1))
    assert [stream for stream, _ in _order(outbox)] == [3, 1]


def test_urgent_streams_without_end_leave_an_eighth_to_the_least_urgent_one() -> None:
    outbox, sent = SendQueue(), {1: 0, 3: 0}
    outbox.offer(_loaded(1, 100 * BATCH_BYTES, priority=3))
    for _ in range(80):
        outbox.offer(_loaded(3, BATCH_BYTES, priority=1))
        for stream_id, size in _order(outbox):
            sent[stream_id] += size
    assert sent[1] / (sent[1] + sent[3]) == pytest.approx(1 / 8, rel=0.05)


def _shares(waiting: dict[int, int]) -> dict[int, float]:
    """What each stream gets beside urgent ones without end; `waiting` are their priorities."""
    outbox, sent = SendQueue(), dict.fromkeys([1, *waiting], 0)
    for stream_id, priority in waiting.items():
        outbox.offer(_loaded(stream_id, 1 << 27, priority=priority))
    for _ in range(320):
        outbox.offer(_loaded(1, BATCH_BYTES, priority=1))
        for stream_id, size in _order(outbox):
            sent[stream_id] += size
    return {stream_id: size / sum(sent.values()) for stream_id, size in sent.items()}


def test_two_streams_that_wait_behind_urgent_ones_get_an_eighth_together() -> None:
    """They got 3 %: one frame of 64 KiB counted as their whole turn."""
    shares = _shares({3: 3, 5: 3})
    assert shares[3] + shares[5] == pytest.approx(1 / 8, rel=0.05)
    assert shares[3] == pytest.approx(shares[5], rel=0.1)


def test_a_stream_between_urgent_ones_and_bulk_gets_an_eighth_of_the_rest() -> None:
    """It got nothing: only the least urgent one had turns."""
    shares = _shares({3: 3, 5: 2})
    assert shares[3] == pytest.approx(1 / 8, rel=0.05)
    assert shares[5] == pytest.approx(7 / 64, rel=0.05)


def test_what_waits_alone_for_long_does_not_hold_up_urgent_streams_then() -> None:
    """Only bytes that pass what waits count, so that a token does not wait behind bulk because of tokens long ago."""
    outbox = SendQueue()
    for _ in range(100):
        outbox.offer(_loaded(3, BATCH_BYTES, priority=1))
        outbox.take()
    outbox.offer(_loaded(1, 100 * BATCH_BYTES, priority=3))
    outbox.offer(_loaded(3, 100, priority=1))
    assert [stream for stream, _ in _order(outbox)] == [3, 1]


def test_streams_of_one_priority_take_turns() -> None:
    outbox = SendQueue()
    for stream_id in (1, 3):
        outbox.offer(_loaded(stream_id, 10 * FRAME_BYTES, priority=2))
    streams = [stream for _ in range(4) for stream, _ in _order(outbox)]
    assert max(len(run) for run in "".join(map(str, streams)).replace("13", " ").split(" ")) <= 2
    assert abs(streams.count(1) - streams.count(3)) <= 1


def test_a_stream_without_credit_waits_and_comes_back() -> None:
    outbox = SendQueue()
    half = _loaded(1, 100, priority=0, window=40)
    outbox.offer(half)
    assert _order(outbox) == [(1, 40)]
    assert outbox.empty
    half.window += 60
    outbox.offer(half)
    assert _order(outbox) == [(1, 60)]
    assert half.taken.is_set()


def test_a_cancelled_write_leaves_nothing_behind() -> None:
    outbox = SendQueue()
    half = _loaded(1, 100, priority=0)
    outbox.offer(half)
    half.unload()
    assert _order(outbox) == []
    assert outbox.empty


def test_answers_are_bounded() -> None:
    outbox = SendQueue()
    for number in range(10_000):
        outbox.pong(number)
    assert sum(len(part) for part in outbox.take()) == MAX_PONGS * HEADER_BYTES
    with pytest.raises(ProtocolError):  # noqa: PT012 - which of them is one too many does not matter
        for _ in range(MAX_CONTROL_BYTES):
            outbox.control(pack_header(WINDOW_UPDATE, 0, 1, 1))


def test_nonsense_is_forgiven_slowly() -> None:
    guard = FloodGuard(IDLE_FRAMES, IDLE_FRAMES_PER_S, 0.0)
    for second in range(20):
        for _ in range(100):
            guard.count(float(second))
    with pytest.raises(ProtocolError):  # noqa: PT012 - the same
        for _ in range(IDLE_FRAMES + 1):
            guard.count(20.0)
