"""Recordings: what is written is read again, and no file, however it came about, does more than be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.snapshot.codec import to_json
from app.snapshot.recording import (
    KEY_EVERY,
    MAX_BLOCKS,
    BadRecording,
    FrameEncoder,
    RecentFrames,
    Recording,
    read_recording,
)
from app.snapshot.views import FlowView, Snapshot
from tests.ui.fixed import HEALTHY, SNAPSHOTS

BEGAN_MS = 1_700_000_000_000
NOTE = {"number": 1, "at_ms": BEGAN_MS, "kind": "peer", "text": "murre fell silent"}


def values_of(snapshot: Snapshot) -> dict[str, Any]:
    """What a client of the node decodes."""
    decoded: dict[str, Any] = json.loads(json.dumps(to_json(snapshot)))
    return decoded


def recorded(*snapshots: Snapshot, apart_ms: int = 200) -> bytes:
    """A recording of these snapshots."""
    encoder = FrameEncoder(BEGAN_MS)
    lines = [encoder.header("0.1.0")]
    lines += [encoder.frame(BEGAN_MS + index * apart_ms, values_of(one)) for index, one in enumerate(snapshots)]
    return b"".join(lines)


def read(raw: bytes) -> Recording:
    return read_recording(raw, "kill.shoal")


STATES = tuple(one for one in SNAPSHOTS.values() if one is not None)


def test_every_frame_comes_back_as_it_was_in_any_order() -> None:
    moved = replace(HEALTHY, peers=HEALTHY.peers[1:], flow=FlowView(served_tokens_per_s=5.0))
    frames = [HEALTHY, moved, *STATES, HEALTHY]
    recording = read(recorded(*frames))
    for index in [*range(len(frames)), *reversed(range(len(frames))), 2, 0, 3]:
        assert recording.snapshot(index) == frames[index]
    assert recording.flows[1].served_tokens_per_s == 5.0
    assert recording.times_ms == [200 * index for index in range(len(frames))]
    assert (recording.began_at_ms, recording.version) == (BEGAN_MS, "0.1.0")


@given(st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 30)), min_size=1, max_size=8))
def test_changes_add_up_to_the_snapshots(steps: list[tuple[Snapshot, int]]) -> None:
    frames = [replace(one, sessions=number, peers=one.peers[:number]) for one, number in steps]
    recording = read(recorded(*frames))
    distinct = [one for before, one in zip([None, *frames], frames, strict=False) if one != before]
    assert [recording.snapshot(index) for index in range(len(recording))] == distinct


def test_only_changes_are_written_and_now_and_then_a_whole_snapshot() -> None:
    frames = [replace(HEALTHY, sessions=number) for number in range(3 * KEY_EVERY)]
    raw = recorded(*frames, frames[-1])
    lines = raw.splitlines()[1:]
    assert len(lines) == len(frames)  # nothing changed in the last one
    assert [index for index, line in enumerate(lines) if b'"all"' in line] == [0, KEY_EVERY, 2 * KEY_EVERY]
    assert max(len(line) for line in lines if b'"set"' in line) < 60
    assert read(raw).snapshot(2 * KEY_EVERY - 1) == frames[2 * KEY_EVERY - 1]


def test_the_frame_of_a_time() -> None:
    recording = read(recorded(*(replace(HEALTHY, sessions=number) for number in range(3))))
    assert [recording.frame_at(t_ms) for t_ms in (-1, 0, 199, 200, 399, 10**9)] == [0, 0, 0, 1, 1, 2]


def test_events_keep_their_time() -> None:
    encoder = FrameEncoder(BEGAN_MS)
    raw = encoder.header("0.1.0") + encoder.frame(BEGAN_MS, values_of(HEALTHY)) + encoder.note(BEGAN_MS + 70, NOTE)
    [note] = read(raw).notes
    assert (note.t_ms, note.data) == (70, NOTE)


def test_a_clock_that_is_set_back_does_no_harm() -> None:
    encoder = FrameEncoder(BEGAN_MS)
    times = (BEGAN_MS + 900, BEGAN_MS - 5000, BEGAN_MS + 1000)
    lines = [encoder.frame(at_ms, values_of(replace(HEALTHY, sessions=n))) for n, at_ms in enumerate(times)]
    assert read(encoder.header("1") + b"".join(lines)).times_ms == [900, 900, 1000]


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_is_left_out(cut: int) -> None:
    raw = recorded(HEALTHY, replace(HEALTHY, sessions=99))
    assert len(read(raw[:-cut])) == 1
    assert len(read(raw[:-cut] + b"\n")) == (1 if cut > 1 else 2)
    assert len(read(raw + b"\0" * 512)) == 2  # what a file system may leave after a power cut


def test_a_damaged_line_in_the_middle_is_named() -> None:
    lines = recorded(*(replace(HEALTHY, sessions=number) for number in range(3))).splitlines(keepends=True)
    lines[2] = lines[2][:-9] + b"\n"
    with pytest.raises(BadRecording, match=r"kill\.shoal is damaged at line 3"):
        read(b"".join(lines))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is not a recording"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is not a recording"),
        (b"{}\n", "is not a recording"),
        (b"[1]\n", "is not a recording"),
        (b'{"version": 2, "width": 80}\n', "is not a recording"),
        (b'{"shoal_recording": 0, "node": "1", "at_ms": 1}\n', "is not a recording"),
        (b'{"shoal_recording": 2, "node": "9.0", "at_ms": 1}\n', "newer version of Shoal"),
        (b'{"shoal_recording": 1, "node": "1", "at_ms": -1}\n', "is not a recording"),
        (b'{"shoal_recording": 1, "node": "1", "at_ms": 1}\n', "has no frame"),
        (b"[" * 100_000 + b"\n", "is not a recording"),
    ],
)
def test_a_file_of_another_kind_or_version_is_refused_with_a_reason(raw: bytes, words: str) -> None:
    with pytest.raises(BadRecording, match=words):
        read(raw)


def test_fields_of_another_version_are_ignored_or_have_their_defaults() -> None:
    values = {**values_of(HEALTHY), "from_the_future": {"figures": [1, 2]}}
    del values["guesses"]
    encoder = FrameEncoder(BEGAN_MS)
    raw = encoder.header("0.9") + encoder.frame(BEGAN_MS, values)
    raw += encoder.frame(BEGAN_MS + 1, {**values, "from_the_future": {"figures": [1, 3]}})
    assert read(raw).snapshot(1) == replace(HEALTHY, guesses=Snapshot("", "idle", "", "").guesses)


def set_(path: list[str | int], value: object) -> Callable[[], bytes]:
    return lambda: json.dumps({"t": 1, "set": [[path, value]]}).encode() + b"\n"


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a text for a number": set_(["flow", "up_bytes_per_s"], "fast"),
    "a number for a text": set_(["peers", 0, "name"], 5),
    "a truth for a number": set_(["sessions"], True),
    "an infinite number": set_(["flow", "up_bytes_per_s"], 1e999),
    "a number beyond any": set_(["sessions"], 10**400),
    "a float beyond any": set_(["tokens_per_s"], 10**300),
    "a number that is none": lambda: b'{"t": 1, "set": [[["flow", "up_bytes_per_s"], NaN]]}\n',
    "a time that is negative": set_(["route", "return_s"], -(2.0**52)),
    "a speed that is negative": set_(["flow", "up_bytes_per_s"], -1),
    "a state that does not exist": set_(["state"], "\x1b]0;owned\x07"),
    "a list for a view": set_(["flow"], []),
    "nothing for a view": set_(["flow"], None),
    "a view without its name": set_(["peers", 0], {"name": "x"}),
    "more blocks than memory": set_(["blocks_total"], MAX_BLOCKS + 1),
    "a date that no calendar has": set_(["swarms", 0, "joined_at_ms"], 10**15),
    "a path out of the list": set_(["peers", 10_000], {"peer": "x"}),
    "a path from behind": set_(["peers", -1, "name"], "x"),
    "a path into a text": set_(["reason", 0], "x"),
    "a path to the whole": set_([], {}),
    "a path to a new field": set_(["evil"], 1),
    "a path that is none": lambda: b'{"t": 1, "set": [[{"a": 1}, 2]]}\n',
    "a change that is none": lambda: b'{"t": 1, "set": [5]}\n',
    "changes that are none": lambda: b'{"t": 1, "set": {"state": 1}}\n',
    "no time": lambda: b'{"set": []}\n',
    "a time before the first": lambda: b'{"t": -5, "set": []}\n',
    "a long text": set_(["reason"], "x" * 70_000),
    "an event without its text": lambda: b'{"t": 1, "note": {"number": 1, "at_ms": 1, "kind": "peer"}}\n',
    "an event at no date": lambda: json.dumps({"t": 1, "note": {**NOTE, "at_ms": 10**18}}).encode() + b"\n",
    "a deep value": lambda: b'{"t": 1, "all": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n",
    "a snapshot that is none": lambda: b'{"t": 1, "all": {"peer_id": "x"}}\n',
    "bytes that are no text": lambda: b'{"t": 1, "note": "\xff\xfe"}\n',
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_lines_are_refused(what: str) -> None:
    good = recorded(HEALTHY, replace(HEALTHY, sessions=99)).splitlines(keepends=True)
    with pytest.raises(BadRecording, match="line 3"):
        read(b"".join([*good[:2], HOSTILE[what](), *good[2:]]))


def test_no_changes_before_the_first_snapshot_are_refused() -> None:
    good = recorded(HEALTHY).splitlines(keepends=True)
    with pytest.raises(BadRecording, match="line 2"):
        read(b"".join([good[0], b'{"t": 1, "set": []}\n', *good[1:]]))


@given(st.binary(max_size=400))
def test_no_bytes_do_more_than_be_refused(noise: bytes) -> None:
    start = recorded(HEALTHY)
    for raw in (noise, start + noise, start + noise + b"\n{}\n"):
        try:
            recording = read(raw)
        except BadRecording:
            continue
        assert recording.snapshot(len(recording) - 1)


# --- the last minutes, which the node keeps ---------------------------------------------------------------------------


def test_the_ring_holds_the_last_minutes_and_begins_with_a_whole_snapshot() -> None:
    ring = RecentFrames(kept_ms=600_000, kept_bytes=10**7)
    assert ring.entries("0.1.0") == []
    for second in range(0, 1800, 5):
        ring.take(BEGAN_MS + second * 1000, values_of(replace(HEALTHY, sessions=second)))
    notes = [{**NOTE, "at_ms": BEGAN_MS + second * 1000} for second in (0, 1300, 1790)]
    entries = ring.entries("0.1.0", notes)
    recording = read(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
    assert 595_000 <= recording.duration_ms < 665_000
    assert recording.snapshot(0).sessions == (recording.began_at_ms - BEGAN_MS) // 1000
    assert recording.snapshot(len(recording) - 1).sessions == 1795
    assert [note.data["at_ms"] for note in recording.notes] == [note["at_ms"] for note in notes[1:]]


def test_the_ring_is_bounded_in_bytes() -> None:
    ring = RecentFrames(kept_ms=600_000, kept_bytes=100_000)
    for second in range(0, 600, 5):
        peers = tuple(replace(peer, rtt_s=second + 0.5) for peer in HEALTHY.peers)
        ring.take(BEGAN_MS + second * 1000, values_of(replace(HEALTHY, peers=peers)))
    entries = ring.entries("0.1.0")
    assert len(json.dumps(entries)) < 150_000
    assert read(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)).duration_ms >= 55_000


def test_the_ring_forgets_all_when_the_clock_is_set_back() -> None:
    ring = RecentFrames(kept_ms=600_000, kept_bytes=10**7)
    for at_ms in (BEGAN_MS, BEGAN_MS + 5000, BEGAN_MS - 10_000, BEGAN_MS - 5000):
        ring.take(at_ms, values_of(replace(HEALTHY, sessions=at_ms - BEGAN_MS)))
    entries = ring.entries("0.1.0")
    recording = read(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
    assert [recording.snapshot(index).sessions for index in range(len(recording))] == [-10_000, -5000]
