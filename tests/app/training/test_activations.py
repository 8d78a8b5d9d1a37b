"""Activations that both ends of a link keep: the same at both, near what was computed, and within the disk's budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.errors import RecordError
from app.session.frame import DTYPES, MAX_ROWS, Frame, header
from app.training import activations, wire
from app.training.activations import ActivationDisk, Activations, Boundary, NoBase
from app.training.wire import Form, Kind, Pass
from engine import int4_changes, int8_rows

RUN, WIDTH, BLOCK = bytes(16), 50, 7
ROW = int8_rows.row_bytes(WIDTH)


def rows_of(seed: int, length: int, step: float = 0.0) -> np.ndarray:
    """Hidden states of a sequence after some steps; those of fewer tokens are the first of them."""
    rng = np.random.default_rng(seed)
    at, along = rng.normal(size=(2, 40, WIDTH))
    rows: np.ndarray = (at + 0.05 * step * along)[:length].astype(np.float32)
    return rows


class Link:
    """Two ends of a link, with a disk each."""

    def __init__(self, folder: Path, sender_bytes: int = 2**40, receiver_bytes: int = 2**40) -> None:
        self.floor_bytes = 0  # of both disks, to stay free
        self.disks = [ActivationDisk(folder / name, budget, lambda: self.floor_bytes) for name, budget in (
            ("sender", lambda: sender_bytes), ("receiver", lambda: receiver_bytes))]  # fmt: skip
        self.sender, self.receiver = (disk.open() for disk in self.disks)
        self.to, self.by = Boundary("receiver", BLOCK), Boundary("sender", BLOCK)

    def send(self, one: Pass, samples: list[int], rows: list[np.ndarray]) -> Frame:
        """Return the frame as it arrives."""
        data = int8_rows.encode(np.concatenate(rows))
        body = self.sender.pack(self.to, one, samples, data, WIDTH)
        head = wire.pass_header(
            Kind.FORWARD, RUN, 1, one, dtype="changes", rows=len(rows[0]), width=WIDTH, length=len(body)
        )
        frame = wire.decode(head + body)
        assert (wire.pass_of(frame), wire.sequences_of(frame), wire.length_of(frame)) == (one, len(rows), len(rows[0]))
        return frame

    def visit(self, version: int, samples: list[int], rows: list[np.ndarray], attempt: int = 0) -> Frame:
        """Send a micro-batch there and back; return it as the receiver computes with it."""
        one = Pass(version, 0, attempt)
        arrival = self.receiver.unpack(self.by, self.send(one, samples, rows))
        assert arrival.samples == samples
        self.sender.agreed(self.to, one, self.receiver.keep(arrival))
        return arrival.frame


def numbers(frame: Frame) -> np.ndarray:
    assert frame.dtype == DTYPES["int8"]
    return int8_rows.decode(frame.body, WIDTH)


def forms(frame: Frame) -> list[Form]:
    return [one.form for one in wire.split_sequences(frame)]


@pytest.fixture
def link(tmp_path: Path) -> Link:
    return Link(tmp_path)


def test_what_comes_again_is_sent_as_a_change_and_arrives_almost_as_computed(link: Link) -> None:
    first, second = (rows_of(1, 8, step) for step in (0, 1))
    assert forms(link.send(Pass(0, 0, 0), [3], [first])) == [Form.KEEP]
    link.visit(1, [3], [first])
    frame = link.send(Pass(2, 0, 0), [3], [second])
    assert forms(frame) == [Form.CHANGED]
    assert len(frame.body) == 2 + 15 + 8 * int4_changes.row_bytes(WIDTH)
    arrived = numbers(link.receiver.unpack(link.by, frame).frame)
    change = np.abs(second - first).max()
    assert np.abs(arrived - second).max() < change / 10 + 0.03  # what 4 bits lose of the change, and int8 of the whole


def test_what_has_not_changed_costs_no_bytes(link: Link) -> None:
    link.visit(0, [3, 4], [rows_of(1, 8), rows_of(2, 8)])
    frame = link.send(Pass(1, 0, 0), [4, 3], [rows_of(2, 8), rows_of(1, 8, 1)])
    assert forms(frame) == [Form.UNCHANGED, Form.CHANGED]
    assert len(frame.body) == 2 + 2 * 15 + 8 * int4_changes.row_bytes(WIDTH)


def test_errors_do_not_add_up(link: Link) -> None:
    off = []
    for version in range(30):
        rows = rows_of(1, 8, version)
        off.append(np.abs(numbers(link.visit(version, [3], [rows])) - rows).max())
    assert max(off[20:]) <= 1.5 * max(off[1:10])


visits = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), min_size=1, max_size=3),  # samples
        st.integers(1, 40),  # tokens of the longest
        st.sampled_from(["back", "back", "back", "lost there", "lost back", "again"]),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=30)
@given(visits, st.integers(0, 6), st.integers(0, 6))
def test_both_ends_agree_whatever_is_lost_and_budgets_hold(
    plan: list[tuple[list[int], int, str]], sender_places: int, receiver_places: int
) -> None:
    """A receiver either has exactly what the sender thinks it has, or says that it has not."""
    least = activations.LEAST_BYTES
    with TemporaryDirectory() as folder:
        link = Link(Path(folder), sender_places * least, receiver_places * least)
        for version, (samples, length, fate) in enumerate(plan):
            rows = [rows_of(sample, length, version) for sample in samples]
            one = Pass(version, 0, 0)
            frame = link.send(one, samples, rows)
            if fate == "lost there":
                continue
            arrival = link.receiver.unpack(link.by, frame)  # never `NoBase`: only what is agreed is built on
            found = numbers(arrival.frame)
            assert np.abs(found - np.concatenate(rows)).max() < 1.0
            kept = link.receiver.keep(arrival)
            if fate == "again":
                found = numbers(link.visit(version, samples, rows, attempt=1))
                assert np.abs(found - np.concatenate(rows)).max() < 1.0
            elif fate == "back":
                link.sender.agreed(link.to, one, kept)
            for disk, places in zip(link.disks, (sender_places, receiver_places), strict=True):
                assert 0 <= disk.used_bytes <= places * least
            for name in ("sender", "receiver"):
                files = [path.stat().st_size for path in Path(folder, name).rglob("*") if path.is_file()]
                assert sum(files) <= link.disks[name == "receiver"].used_bytes
        for end, disk in zip((link.sender, link.receiver), link.disks, strict=True):
            end.close()
            assert disk.used_bytes == 0
        assert not [path for path in Path(folder).rglob("*") if path.is_file()]


def test_data_that_has_no_room_is_sent_whole_each_time_and_the_rest_as_changes(tmp_path: Path) -> None:
    link = Link(tmp_path, receiver_bytes=2 * activations.LEAST_BYTES)
    for version in range(4):
        samples = [0, 1, 2] if version % 2 == 0 else [2, 1, 0]
        frame = link.send(Pass(version, 0, 0), samples, [rows_of(sample, 8, version) for sample in samples])
        found = dict(zip(samples, forms(frame), strict=True))
        expected = Form.CHANGED if version else Form.KEEP
        assert found == {0: expected, 1: expected, 2: Form.KEEP}
        arrival = link.receiver.unpack(link.by, frame)
        link.sender.agreed(link.to, Pass(version, 0, 0), link.receiver.keep(arrival))


def test_a_receiver_without_the_base_says_so_and_is_sent_the_whole(link: Link, tmp_path: Path) -> None:
    link.visit(0, [3], [rows_of(1, 8)])
    link.receiver = ActivationDisk(tmp_path / "fresh", lambda: 2**40).open()  # restarted
    frame = link.send(Pass(1, 0, 0), [3], [rows_of(1, 8, 1)])
    with pytest.raises(NoBase):
        link.receiver.unpack(link.by, frame)
    again = link.send(Pass(1, 0, 1), [3], [rows_of(1, 8, 1)])
    assert forms(again) == [Form.KEEP]
    link.receiver.unpack(link.by, again)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x00")])
def test_a_damaged_file_is_no_base(link: Link, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    link.visit(0, [3], [rows_of(1, 8)])
    for path in (tmp_path / "receiver").rglob("*"):
        if path.is_file():
            damage(path)
    with pytest.raises(NoBase):
        link.receiver.unpack(link.by, link.send(Pass(1, 0, 0), [3], [rows_of(1, 8, 1)]))
    for path in (tmp_path / "sender").rglob("*"):
        if path.is_file():
            damage(path)
    link.visit(2, [3], [rows_of(1, 8, 1)])  # the sender finds out by itself


def test_rows_of_one_step_are_the_same_for_every_receiver_and_in_every_attempt(link: Link) -> None:
    """What one hop has computed with, another that audits it must be given too."""
    link.visit(0, [3], [rows_of(1, 8)])
    rows = rows_of(1, 8, 1)
    first = numbers(link.visit(1, [3], [rows]))
    assert not np.array_equal(first, int8_rows.decode(int8_rows.encode(rows), WIDTH))
    assert np.array_equal(numbers(link.visit(1, [3], [rows], attempt=1)), first)
    body = link.sender.pack(Boundary("auditor", BLOCK), Pass(1, 0, 2, 1), [3], int8_rows.encode(rows), WIDTH)
    head = wire.pass_header(
        Kind.FORWARD, RUN, 1, Pass(1, 0, 2, 1), dtype="changes", rows=8, width=WIDTH, length=len(body)
    )
    auditor: Activations = link.disks[1].open()
    assert np.array_equal(numbers(auditor.unpack(link.by, wire.decode(head + body)).frame), first)
    other = rows_of(1, 8, 2)  # not the same rows: somebody before this hop computes otherwise now
    assert not np.array_equal(numbers(link.visit(1, [3], [other], attempt=3)), first)


def test_a_disk_that_cannot_be_written_costs_bytes_and_nothing_else(tmp_path: Path) -> None:
    for name in ("sender", "receiver"):
        link = Link(tmp_path / name)
        link.visit(0, [3], [rows_of(1, 8)])
        folder = tmp_path / name / name
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        folder.rmdir()
        folder.write_bytes(b"in the way")
        for version in (1, 2):
            one, rows = Pass(version, 0, version - 1), [rows_of(1, 8, version)]
            frame = link.send(one, [3], rows)
            if version == 2 or name == "sender":
                arrival = link.receiver.unpack(link.by, frame)
                assert np.abs(numbers(arrival.frame) - rows[0]).max() < 0.1
                assert link.receiver.keep(arrival) == [False]
            else:
                with pytest.raises(NoBase):
                    link.receiver.unpack(link.by, frame)
        assert link.disks[name == "receiver"].used_bytes == 0


def test_a_disk_that_is_almost_full_is_left_alone(link: Link) -> None:
    link.floor_bytes = 2**80
    assert forms(link.send(Pass(0, 0, 0), [3], [rows_of(1, 8)])) == [Form.WHOLE]
    assert link.disks[0].used_bytes == 0


def test_what_a_killed_node_has_left_is_removed(tmp_path: Path) -> None:
    Link(tmp_path).visit(0, [3], [rows_of(1, 8)])
    assert list((tmp_path / "sender").rglob("*"))
    Link(tmp_path)
    assert not list((tmp_path / "sender").rglob("*"))


# --- hostile frames ---------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1), st.integers(0, 70000), st.sampled_from([3, 4]))
def test_no_bytes_raise_anything_but_the_one_error(body: bytes, rows: int, width: int, kind: int) -> None:
    head = header(kind, RUN, 1, 0, dtype=5, rows=rows, width=width, length=len(body))
    try:
        frame = wire.decode(head + body)
    except RecordError:
        return
    assert 0 < wire.sequences_of(frame) * wire.length_of(frame) <= MAX_ROWS


@pytest.mark.parametrize(
    ("form", "known", "base", "size"),
    [
        (4, 0, bytes(8), 2 * ROW),  # no form
        (Form.CHANGED, 0, b"12345678", 2 * ROW),  # of nothing
        (Form.CHANGED, 3, b"12345678", 3 * int4_changes.row_bytes(WIDTH)),  # more rows than the sequence has
        (Form.CHANGED, 2, bytes(8), 2 * int4_changes.row_bytes(WIDTH)),  # builds on nothing
        (Form.KEEP, 1, b"12345678", ROW),
        (Form.KEEP, 0, b"12345678", 2 * ROW),
        (Form.KEEP, 0, bytes(8), 2 * ROW - 1),
        (Form.UNCHANGED, 2, b"12345678", 1),
    ],
)
def test_impossible_sequences_are_refused(form: int, known: int, base: bytes, size: int) -> None:
    body = b"\x01\x00" + wire._SEQUENCE.pack(3, form, known, base) + bytes(size)
    head = header(Kind.FORWARD, RUN, 1, 0, dtype=5, rows=2, width=WIDTH, length=len(body))
    with pytest.raises(RecordError):
        wire.decode(head + body)


def test_a_change_to_numbers_that_are_not_finite_arrives_as_such_and_is_not_kept_unless_asked(link: Link) -> None:
    link.visit(0, [3], [rows_of(1, 8)])
    frame = link.send(Pass(1, 0, 0), [3], [rows_of(1, 8, 1)])
    body = bytearray(frame.body)
    body[17:19] = b"\xff\x7f"  # the first row's largest scale
    spoilt = link.receiver.unpack(link.by, frame._replace(body=memoryview(bytes(body))))
    assert np.isnan(numbers(spoilt.frame)[0]).all()  # which the hop refuses
    assert np.isfinite(numbers(link.receiver.unpack(link.by, frame).frame)).all()


def test_a_flood_of_samples_stays_within_the_budget(tmp_path: Path) -> None:
    least = activations.LEAST_BYTES
    link = Link(tmp_path, receiver_bytes=5 * least)
    for sample in range(40):
        link.visit(0, [sample], [rows_of(1, 1)])
        assert link.disks[1].used_bytes <= 5 * least
    assert len([path for path in (tmp_path / "receiver").rglob("*") if path.is_file()]) == 5
