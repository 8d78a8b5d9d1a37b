"""The frame codec against any bytes, any chunking and any interleaving."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2p.errors import ProtocolError
from p2p.link.frames import (
    CHUNK_BYTES,
    FIRST,
    HEADER,
    LAST,
    MAX_PARTIAL_MESSAGES,
    MAX_TEXT_BYTES,
    PREFACE,
    SMALLEST_CHUNK_BYTES,
    WHOLE,
    Assembler,
    Frame,
    FrameDecoder,
    Kind,
    encode,
    encode_header,
)
from p2p.link.outbox import Outbox, Outgoing
from p2p.values import BULK, DECODE, MAX_BODY_BYTES, PREFILL

NAMED = (Kind.REQUEST, Kind.ERROR, Kind.OPEN, Kind.RESET, Kind.SWITCH)
BODIES = {Kind.REQUEST: 2000, Kind.ANSWER: 2000, Kind.MESSAGE: 2000, Kind.ERROR: 1024, Kind.RESET: 1024}


@st.composite
def whole_frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(Kind))
    name = draw(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=128))
    body = draw(st.binary(max_size=BODIES.get(kind, 0)))
    priority, id, arg = draw(st.integers(0, 3)), draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**32 - 1))
    return Frame(kind, priority | WHOLE, id, len(body), arg, name if kind in NAMED else "", body)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The data in pieces, cut at these places (modulo its length)."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def decode(pieces: list[bytes]) -> list[Frame]:
    decoder = FrameDecoder()
    return [frame for piece in pieces for frame in decoder.feed(piece)]


@given(st.lists(whole_frames(), max_size=8), st.lists(st.integers(0, 2**16), max_size=12))
def test_frames_survive_any_cutting(frames: list[Frame], places: list[int]) -> None:
    data = PREFACE + b"".join(encode(frame) for frame in frames)
    assert decode(cut(data, places)) == frames
    assert decode([data[i : i + 1] for i in range(len(data))]) == frames


def outcome(pieces: list[bytes]) -> tuple[list[Frame], bool]:
    """What a decoder and an assembler make of some bytes, and whether they gave up."""
    decoder, assembler, seen = FrameDecoder(), Assembler(), []
    try:
        for piece in pieces:
            for frame in decoder.feed(piece):
                seen.append(frame)
                assembler.add(frame)
    except ProtocolError:
        return seen, True
    return seen, False


headers = st.builds(
    HEADER.pack,
    st.integers(0, 255),
    st.integers(0, 15),
    st.sampled_from([0, 1, 5, 128, 129, 65535]),
    st.integers(0, 3),
    st.sampled_from([0, 1, 7, 1024, CHUNK_BYTES, CHUNK_BYTES + 1, 2**32 - 1]),
    st.sampled_from([0, 1, 7, 1024, CHUNK_BYTES, MAX_BODY_BYTES, MAX_BODY_BYTES + 1, 2**32 - 1]),
    st.integers(0, 2**32 - 1),
)


@settings(max_examples=100)
@given(st.lists(st.one_of(st.binary(max_size=64), headers), max_size=10).map(b"".join), st.booleans())
@example(b"\xff" * 40, True)
def test_any_bytes_give_frames_or_the_one_error(data: bytes, greeted: bool) -> None:
    outcome([PREFACE + data if greeted else data])


@given(st.lists(st.one_of(st.binary(max_size=8), headers), max_size=6).map(b"".join), st.lists(st.integers(0, 500)))
def test_bad_bytes_fail_alike_however_they_are_cut(data: bytes, places: list[int]) -> None:
    whole_seen, whole_failed = outcome([PREFACE + data])
    cut_seen, cut_failed = outcome(cut(PREFACE + data, places))
    assert cut_failed == whole_failed
    # A decoder that fails says nothing of the good frames in the same piece, so cutting can only show more of them.
    assert cut_seen[: len(whole_seen)] == whole_seen


@pytest.mark.parametrize(
    "header",
    [
        encode_header(Kind.MESSAGE, WHOLE, 1, CHUNK_BYTES + 1, CHUNK_BYTES + 1),
        encode_header(Kind.MESSAGE, FIRST, 1, CHUNK_BYTES, MAX_BODY_BYTES + 1),
        encode_header(Kind.MESSAGE, FIRST, 1, 10, 1000),  # a short chunk that is not the last
        encode_header(Kind.MESSAGE, FIRST, 1, 0, 1000),
        encode_header(Kind.MESSAGE, WHOLE, 1, 10, 11),
        encode_header(Kind.MESSAGE, WHOLE, 1, 1, 1, 0, b"named"),
        encode_header(Kind.REQUEST, WHOLE, 1, 1, 1),  # no method
        encode_header(Kind.REQUEST, WHOLE, 1, 0, 0, 0, b"m" * 129),
        encode_header(Kind.ERROR, WHOLE, 1, MAX_TEXT_BYTES + 1, MAX_TEXT_BYTES + 1, 0, b"code"),
        encode_header(Kind.PING, WHOLE, 1, 1, 1),
        encode_header(Kind.PING, FIRST, 1, 0, 0),
        encode_header(13, WHOLE, 1, 0, 0),
    ],
)
def test_a_bad_header_is_refused_before_its_body_comes(header: bytes) -> None:
    decoder = FrameDecoder()
    decoder.feed(PREFACE)
    with pytest.raises(ProtocolError):
        decoder.feed(header[: HEADER.size])


def test_optional_kinds_break_nothing() -> None:
    unknown = Frame(200, WHOLE, 1, 3, 0, "new", b"abc")
    ping = Frame(Kind.PING, WHOLE, 1, 0, 0, "", b"")
    assert decode([PREFACE + encode(unknown) + encode(ping)]) == [unknown, ping]


def test_another_major_version_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="version 2"):
        FrameDecoder().feed(b"shoal\0\x02")
    with pytest.raises(ProtocolError, match="does not speak"):
        FrameDecoder().feed(b"GET / HTTP/1.1")


messages = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3 * CHUNK_BYTES)), max_size=6)


@settings(max_examples=20, deadline=None)
@given(messages, st.lists(st.booleans(), max_size=20))
def test_messages_sent_while_others_are_half_sent_arrive_whole_and_in_order(
    sizes: list[tuple[int, int, int]], turns: list[bool]
) -> None:
    """Messages are put in between takes; each (id, priority) keeps its order, whatever overtakes it."""
    outbox, decoder, assembler = Outbox(), FrameDecoder(), Assembler()
    decoder.feed(PREFACE)
    sent: dict[tuple[int, int], list[bytes]] = {}
    got: dict[tuple[int, int], list[bytes]] = {}

    def take() -> None:
        for frame in decoder.feed(b"".join(outbox.take()[0])):
            if (whole := assembler.add(frame)) is not None:
                got.setdefault((whole.id, whole.priority), []).append(whole.body)

    for number, (id, priority, size) in enumerate(sizes):
        body = bytes([number]) * size
        outbox.put(Outgoing(Kind.MESSAGE, id, priority, (body[: size // 3], memoryview(body)[size // 3 :]), size))
        sent.setdefault((id, priority), []).append(body)
        if number < len(turns) and turns[number]:
            take()
    while outbox.urgency() is not None:
        take()
    assert got == sent
    assert len(assembler) == 0


def test_an_urgent_message_overtakes_at_the_next_chunk() -> None:
    outbox, decoder = Outbox(), FrameDecoder()
    decoder.feed(PREFACE)
    outbox.put(Outgoing(Kind.ANSWER, 1, 3, (bytes(4 * CHUNK_BYTES),), 4 * CHUNK_BYTES))
    (first,) = decoder.feed(b"".join(outbox.take()[0]))
    outbox.put(Outgoing(Kind.MESSAGE, 2, 1, (b"now",), 3))
    (second,) = decoder.feed(b"".join(outbox.take()[0]))
    assert (first.id, second.id) == (1, 2)


def _shares(sizes: dict[int, int], takes: int = 4000) -> dict[int, float]:
    """What messages of each priority, of these sizes and without end, get of a link."""
    outbox, decoder, sent = Outbox(), FrameDecoder(), dict.fromkeys(sizes, 0)
    outbox.allow_small_chunks()
    decoder.feed(PREFACE)
    for _ in range(takes):
        for priority, size in sizes.items():
            if outbox.has_room(priority):
                outbox.put(Outgoing(Kind.MESSAGE, 2 * priority + 1, priority, (bytes(size),), size))
        for frame in decoder.feed(b"".join(outbox.take()[0])):
            sent[frame.id // 2] += len(frame.body)
    return {priority: size / sum(sent.values()) for priority, size in sent.items()}


@pytest.mark.parametrize("size", [1000, 2**16, 2**20])
def test_prompts_without_end_leave_an_eighth_of_a_link_to_training(size: int) -> None:
    """The frames of training go over the same link as the rows of prompts, and came to a stop behind them."""
    assert _shares({PREFILL: size, BULK: 5000})[BULK] == pytest.approx(1 / 8, rel=0.1)
    assert _shares({PREFILL: 5000, BULK: size})[BULK] == pytest.approx(1 / 8, rel=0.1)


def test_each_priority_has_its_share_of_a_link() -> None:
    shares = _shares({DECODE: 20_000, PREFILL: 2**16, BULK: 2**16})
    assert shares[BULK] == pytest.approx(1 / 8, rel=0.1)
    assert shares[PREFILL] == pytest.approx(7 / 64, rel=0.1)


def test_a_token_now_and_then_never_waits_behind_a_turn() -> None:
    """Only what passes others while they wait counts, and a turn that was not due by then comes later."""
    outbox, decoder = Outbox(), FrameDecoder()
    outbox.allow_small_chunks()
    decoder.feed(PREFACE)
    outbox.put(Outgoing(Kind.ANSWER, 1, BULK, (bytes(2**24),), 2**24))
    for _ in range(200):
        decoder.feed(b"".join(outbox.take()[0]))
        outbox.put(Outgoing(Kind.MESSAGE, 3, DECODE, (b"now",), 3))
        (frame,) = decoder.feed(b"".join(outbox.take()[0]))
        assert frame.id == 3


def test_chunks_are_so_large_that_a_link_takes_a_moment_for_one() -> None:
    """At 250 kB/s a chunk of 256 KiB took a second, and whatever was urgent waited behind it."""
    outbox = Outbox()
    outbox.allow_small_chunks()
    for speed, wanted in ((250e3, SMALLEST_CHUNK_BYTES), (2e6, 32 * 1024), (1e9, CHUNK_BYTES), (250e3, 16 * 1024)):
        outbox.put(Outgoing(Kind.ANSWER, 1, 3, (bytes(8 * CHUNK_BYTES),), 8 * CHUNK_BYTES))
        taken = []
        while outbox.urgency() is not None:
            outbox.allow_small_chunks()  # as every read does
            taken.append(outbox.take()[1] - HEADER.size)
            outbox.wrote(taken[-1] + HEADER.size, taken[-1] / speed)
        assert sum(taken) == 8 * CHUNK_BYTES
        assert taken[-2] == wanted


def test_a_stream_is_nearly_sent_once_less_than_a_chunk_of_it_waits() -> None:
    outbox, large, small = Outbox(), 3 * CHUNK_BYTES, 1000
    outbox.put(Outgoing(Kind.MESSAGE, 1, 2, (bytes(small),), small))
    assert outbox.is_nearly_sent(1, 2)
    outbox.put(Outgoing(Kind.MESSAGE, 1, 2, (bytes(large),), large))
    outbox.put(Outgoing(Kind.MESSAGE, 3, 2, (bytes(large),), large))
    for id, priority, nearly in ((1, 2, False), (1, 1, True), (3, 2, False), (5, 2, True)):
        assert outbox.is_nearly_sent(id, priority) == nearly
    outbox.drop(3)
    assert outbox.is_nearly_sent(3, 2)
    while outbox.urgency() is not None:
        assert not outbox.is_nearly_sent(1, 2)
        outbox.take()
    assert outbox.is_nearly_sent(1, 2)
    assert not outbox._of_id


def test_a_peer_of_an_older_version_gets_full_chunks() -> None:
    outbox = Outbox()
    outbox.put(Outgoing(Kind.ANSWER, 1, 3, (bytes(3 * CHUNK_BYTES),), 3 * CHUNK_BYTES))
    for _ in range(3):
        assert outbox.take()[1] == HEADER.size + CHUNK_BYTES
        outbox.wrote(HEADER.size + CHUNK_BYTES, 10.0)


def test_a_small_message_says_nothing_of_the_speed() -> None:
    outbox = Outbox()
    outbox.allow_small_chunks()
    for took_s in (1e-6, 10.0):
        for _ in range(20):
            outbox.wrote(1000, took_s)
    outbox.put(Outgoing(Kind.ANSWER, 1, 3, (bytes(CHUNK_BYTES),), CHUNK_BYTES))
    assert outbox.take()[1] == HEADER.size + 32 * 1024


@pytest.mark.parametrize(("speed", "at_once"), [(100e6, 16), (125e3, 2)])
def test_what_may_wait_of_a_stream_fits_the_speed_at_which_small_messages_leave(speed: float, at_once: int) -> None:
    """The tokens of eight replies left by fours: each message was too small to tell how fast the link is."""
    outbox, size = Outbox(), 8192
    outbox.allow_small_chunks()
    for _ in range(12):
        for _ in range(16):
            outbox.put(Outgoing(Kind.MESSAGE, 1, 1, (bytes(size),), size))
        while outbox.urgency() is not None:
            written = outbox.take()[1]
            outbox.wrote(written, written / speed)
    waiting = 0
    while outbox.is_nearly_sent(1, 1) and waiting < 16:
        outbox.put(Outgoing(Kind.MESSAGE, 1, 1, (bytes(size),), size))
        waiting += 1
    assert waiting == at_once


def test_the_version_of_the_peer_is_known_from_its_first_bytes() -> None:
    for minor in (0, 1, 7):
        decoder = FrameDecoder()
        for byte in PREFACE[:-1] + bytes([minor]):
            assert decoder.minor == 0
            decoder.feed(bytes([byte]))
        assert decoder.minor == minor


def test_a_message_is_not_cut_into_tiny_pieces() -> None:
    small = chunk(1, FIRST, SMALLEST_CHUNK_BYTES)
    assert decode([PREFACE + encode(small)]) == [small]
    with pytest.raises(ProtocolError, match="cut wrongly"):
        decode([PREFACE + encode(chunk(1, FIRST, SMALLEST_CHUNK_BYTES - 1))])


def test_what_is_dropped_is_not_sent_and_makes_room() -> None:
    outbox = Outbox()
    for id in (1, 2):
        outbox.put(Outgoing(Kind.REQUEST, id, 2, (bytes(8 * 2**20),), 8 * 2**20, b"m"))
    outbox.take()
    assert not outbox.has_room(2)
    outbox.drop(1)
    outbox.drop(2)
    assert outbox.has_room(2)  # at once, though the writer may be stuck
    assert outbox.urgency() is None
    assert outbox.take() == ([], 0)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3 * CHUNK_BYTES + 77), st.integers(1, 2 * CHUNK_BYTES), st.binary(min_size=1, max_size=40))
@example(CHUNK_BYTES + 1, HEADER.size - 1, b"m")
@example(2 * CHUNK_BYTES, HEADER.size, b"m")
def test_long_messages_survive_any_cutting(size: int, piece_bytes: int, seed: bytes) -> None:
    """Also where a piece ends within a header, at its end, or within a method's name."""
    body = (seed * (size // len(seed) + 1))[:size]
    outbox, decoder, assembler, got = Outbox(), FrameDecoder(), Assembler(), []
    outbox.put(Outgoing(Kind.REQUEST, 1, 3, (body,), size, b"a method"))
    outbox.put(Outgoing(Kind.ANSWER, 2, 3, (body,), size))
    data = PREFACE
    while outbox.urgency() is not None:
        parts, length = outbox.take()
        assert sum(len(part) for part in parts) == length
        data += b"".join(parts)
    for start in range(0, len(data), piece_bytes):
        for frame in decoder.feed(data[start : start + piece_bytes]):
            if (whole := assembler.add(frame)) is not None:
                got.append((whole.kind, whole.name, whole.body, whole.pieces))
    assert got == [(Kind.REQUEST, "a method", body, ()), (Kind.ANSWER, "", body, ())]


def test_what_is_held_of_a_message_keeps_little_else_in_memory() -> None:
    """A chunk whose last bytes came with much of something else, as a hostile peer would send them."""
    decoder, held = FrameDecoder(), []
    decoder.feed(PREFACE)
    full = encode(chunk(1, FIRST))
    skipped = encode_header(200, WHOLE, 1, CHUNK_BYTES, CHUNK_BYTES) + bytes(CHUNK_BYTES)
    for _ in range(3):
        decoder.feed(full[:-5])
        held += [frame for frame in decoder.feed(full[-5:] + skipped) if frame.pieces]
    assert len(held) == 3
    for frame in held:
        kept = sum(len(bytes(piece.obj)) if isinstance(piece, memoryview) else len(piece) for piece in frame.pieces)
        assert kept <= 2 * CHUNK_BYTES


@pytest.mark.parametrize("read_bytes", [1, 64])
def test_what_comes_in_tiny_reads_takes_little_more_memory_than_its_bytes(read_bytes: int) -> None:
    """Of a frame that is not complete, and of chunks of a message that wait for the last one."""
    decoder, assembler = FrameDecoder(), Assembler()
    first = encode(chunk(1, FIRST, SMALLEST_CHUNK_BYTES))
    data = PREFACE + first + encode(chunk(1, 0, SMALLEST_CHUNK_BYTES))[:-1]
    tracemalloc.start()
    for start in range(0, len(data), read_bytes):
        for frame in decoder.feed(data[start : start + read_bytes]):
            assembler.add(frame)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(assembler) == 1
    assert decoder.is_inside
    assert held < 2 * len(data)


def chunk(id: int, flags: int, length: int = CHUNK_BYTES, total: int = 2 * CHUNK_BYTES) -> Frame:
    return Frame(Kind.MESSAGE, flags, id, total, 0, "", bytes(length))


def test_chunks_that_do_not_add_up_are_refused() -> None:
    for bad in (
        chunk(1, FIRST),  # begins again
        chunk(1, LAST, 5),  # ends short
        chunk(1, LAST, CHUNK_BYTES, 3 * CHUNK_BYTES),  # another total
        chunk(1, 0),  # full, and not the last
        chunk(1, LAST)._replace(kind=Kind.ANSWER),
    ):
        assembler = Assembler()
        assembler.add(chunk(1, FIRST))
        with pytest.raises(ProtocolError):
            assembler.add(bad)


def test_later_chunks_of_what_was_dropped_are_ignored() -> None:
    assembler = Assembler()
    assembler.add(chunk(1, FIRST))
    assembler.drop(1)
    assert assembler.add(chunk(1, LAST)) is None
    assert len(assembler) == 0


def test_begun_messages_are_bounded() -> None:
    assembler = Assembler()
    for id in range(MAX_PARTIAL_MESSAGES):
        assembler.add(chunk(id, FIRST))
    with pytest.raises(ProtocolError, match="unfinished"):
        assembler.add(chunk(9999, FIRST))
