"""Activations that both ends of a link keep, so that data seen again is sent as changes of them (AQ-SGD).

Of each sequence, sender and receiver keep on disk what the receiver has: its hidden states as rows of int8. When the
sequence comes again, the sender writes what has changed since in 4 bits (`engine.int4_changes`), and both add it to
what they keep and round the sum to int8. So they keep the same bytes, and errors do not add up from visit to visit. If
the same rows are sent once more in a step, because a micro-batch runs again or is audited by another hop, its receiver
gets the same numbers as the first one, whole or as changes.

Nothing is assumed of the other end. The receiver says what it keeps (in the BACK of the same micro-batch), and the
sender builds on that alone; each change names the digest of what it builds on, and a receiver that does not have it
raises `NoBase`, whereupon the rows are sent whole. What does not fit on the disk is sent whole each time: nothing is
removed for what comes later, because data that comes in turns would be removed just before it is needed.

Blocking, for a thread; the activations of one job are used by one thread at a time.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from app.session.frame import DTYPES, INT8, Frame
from app.training.wire import NO_BASE, Form, Pass, SequenceRows, digest_of, join_sequences, split_sequences
from engine import int4_changes, int8_rows
from p2p.platform import private_directory

LEAST_BYTES = 2**14  # that a sequence counts as: files take more room than their bytes


class NoBase(Exception):
    """A change builds on what is not kept here."""


class Boundary(NamedTuple):
    """A link between two hops: the peer at the other end ("": the owner), and the block whose input crosses it."""

    peer: str
    block: int


class ActivationDisk:
    """The part of a disk for the activations of all jobs of a node; empty when it is made."""

    def __init__(
        self, folder: Path, budget_bytes: Callable[[], int], floor_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """`floor_bytes` of the disk are left to others: the setting `disk_floor`."""
        shutil.rmtree(folder, ignore_errors=True)  # what a killed node has left
        self._folder, self._budget_bytes, self._floor_bytes = folder, budget_bytes, floor_bytes
        self._lock = threading.Lock()
        self._opened = 0
        self.used_bytes = 0

    def open(self) -> Activations:
        """Return the activations of a new job; there are none yet."""
        with self._lock:
            self._opened += 1
            return Activations(self, self._folder / str(self._opened))

    def reserve(self, size_bytes: int) -> bool:
        """Count bytes as used; False if they are more than the budget or the disk has."""
        with self._lock:
            if self.used_bytes + size_bytes > self._budget_bytes():
                return False
            with suppress(OSError):
                private_directory(self._folder)  # hidden states can be turned back into text
                if shutil.disk_usage(self._folder).free < size_bytes + self._floor_bytes():
                    return False
            self.used_bytes += size_bytes
            return True

    def release(self, size_bytes: int) -> None:
        """Count bytes as free again."""
        with self._lock:
            self.used_bytes -= size_bytes


@dataclass
class _Kept:
    """The rows of one sequence in a file."""

    path: Path
    size_bytes: int  # that it counts as
    digest: bytes
    is_agreed: bool = False  # the receiver has said that it keeps them too


_Place = tuple[Boundary, int]  # link and sample
_Table = dict[_Place, _Kept]


class Arrival(NamedTuple):
    """A FORWARD of changes as rows of int8, with what there is to keep of it."""

    frame: Frame
    boundary: Boundary
    sequences: tuple[SequenceRows, ...]
    rows: tuple[bytes, ...]  # of each sequence, to be kept

    @property
    def samples(self) -> list[int]:
        """The sequences, by the owner's numbers."""
        return [one.sample for one in self.sequences]


class Activations:
    """The activations that one job keeps at one node, for the links to it and from it."""

    def __init__(self, disk: ActivationDisk, folder: Path) -> None:
        self._disk, self._folder = disk, folder
        self._sent: _Table = {}
        self._received: _Table = {}
        self._files = 0
        self._under_way: dict[tuple[Boundary, int], tuple[Pass, list[tuple[int, bytes]]]] = {}  # by micro-batch
        self._made: dict[tuple[int, int], tuple[bytes, bytes, _Place]] = {}  # (block, sample) -> see `_same_as_before`
        self._version = -1  # of the passes under way

    # --- the sender's end ---------------------------------------------------------------------------------------------

    def pack(self, boundary: Boundary, one: Pass, samples: Sequence[int], data: bytes, width: int) -> bytes:
        """Return the body of a FORWARD of changes for a micro-batch's rows of int8."""
        if one.version != self._version:
            self._under_way.clear()
            self._made.clear()
            self._version = one.version
        size = len(data) // len(samples)
        packed, sent = list[SequenceRows](), list[tuple[int, bytes]]()
        for index, sample in enumerate(samples):
            place, computed = (boundary, sample), data[index * size : (index + 1) * size]
            rows = self._same_as_before(boundary.block, sample, computed)
            kept = self._sent.get(place)
            is_known = kept is not None and kept.is_agreed and one.attempt == 0
            sequence, result = _changed(sample, rows, self._read(self._sent, place) if is_known else None, width)
            is_kept = self._keep(self._sent, place, result)
            if not is_kept and sequence.form == Form.KEEP:
                sequence = sequence._replace(form=Form.WHOLE)
            packed.append(sequence)
            sent.append((sample, digest_of(result)))
            self._made[boundary.block, sample] = digest_of(computed), digest_of(result), place
        self._under_way[boundary, one.number] = one, sent
        return join_sequences(packed)

    def _same_as_before(self, block: int, sample: int, computed: bytes) -> bytes:
        """Return the rows that a receiver was given in this version for what was computed; else what was computed."""
        computed_digest, digest, place = self._made.get((block, sample), (b"", b"", None))
        if place is not None and computed_digest == digest_of(computed):
            kept = self._sent.get(place)
            if kept is not None and kept.digest == digest:
                return (self._read(self._sent, place) or computed)[: len(computed)]
        return computed

    def agreed(self, boundary: Boundary, one: Pass, kept: Sequence[bool]) -> None:
        """Note which sequences of a micro-batch the receiver keeps, now that it came back."""
        sent_pass, sent = self._under_way.pop((boundary, one.number), (None, []))
        if sent_pass != one or len(sent) != len(kept):
            return
        for (sample, digest), is_kept in zip(sent, kept, strict=True):
            entry = self._sent.get((boundary, sample))
            if entry is not None and entry.digest == digest:
                entry.is_agreed = is_kept

    # --- the receiver's end -------------------------------------------------------------------------------------------

    def unpack(self, boundary: Boundary, frame: Frame) -> Arrival:
        """Return a FORWARD of changes as rows of int8; raises `NoBase` if it builds on what is not here."""
        sequences, whole, to_keep = split_sequences(frame), [], []
        for one in sequences:
            rows, rest = _applied(one, self._base(boundary, one), frame.width)
            whole.append(rows)
            to_keep.append(rows + rest)
        as_rows = frame._replace(dtype=DTYPES[INT8], body=memoryview(b"".join(whole)))
        return Arrival(as_rows, boundary, tuple(sequences), tuple(to_keep))

    def keep(self, arrival: Arrival) -> list[bool]:
        """Keep the rows of an arrival whose numbers were checked; return which of them are kept."""
        return [
            one.form != Form.WHOLE and self._keep(self._received, (arrival.boundary, one.sample), rows)
            for one, rows in zip(arrival.sequences, arrival.rows, strict=True)
        ]

    def _base(self, boundary: Boundary, one: SequenceRows) -> bytes:
        """Return what a sequence builds on; raises `NoBase`."""
        if not one.known:
            return b""
        base = self._read(self._received, (boundary, one.sample))
        if base is None or digest_of(base) != one.base:
            raise NoBase(f"a change of sequence {one.sample} builds on what is not kept here")
        return base

    # --- files --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove everything."""
        for table in (self._sent, self._received):
            for place in list(table):
                self._drop(table, place)
        self._under_way.clear()
        self._made.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, table: _Table, place: _Place) -> bytes | None:
        """Return kept rows; None if there are none, or a file is not what was written."""
        kept = table.get(place)
        if kept is None:
            return None
        with suppress(OSError):
            data = kept.path.read_bytes()
            if digest_of(data) == kept.digest:
                return data
        self._drop(table, place)
        return None

    def _keep(self, table: _Table, place: _Place, rows: bytes) -> bool:
        """Keep rows in place of older ones; False if they do not fit, and then the older ones are gone too."""
        old, digest, size = table.get(place), digest_of(rows), max(len(rows), LEAST_BYTES)
        if old is not None and old.digest == digest:
            old.is_agreed = False
            return True
        more = size - (0 if old is None else old.size_bytes)
        if more > 0 and not self._disk.reserve(more):
            self._drop(table, place)
            return False
        self._files += old is None
        kept = _Kept(self._folder / str(self._files) if old is None else old.path, size, digest)
        table[place] = kept
        if more < 0:
            self._disk.release(-more)
        try:
            private_directory(self._folder)
            kept.path.write_bytes(rows)
        except OSError:
            self._drop(table, place)
            return False
        return True

    def _drop(self, table: _Table, place: _Place) -> None:
        kept = table.pop(place, None)
        if kept is not None:
            self._disk.release(kept.size_bytes)
            with suppress(OSError):
                kept.path.unlink(missing_ok=True)


def _changed(sample: int, rows: bytes, base: bytes | None, width: int) -> tuple[SequenceRows, bytes]:
    """Return how a sequence is sent that the receiver knows as `base`, and what both ends keep of it then."""
    if base is None:
        return SequenceRows(sample, Form.KEEP, 0, NO_BASE, b"", rows), rows
    size = min(len(base), len(rows))  # the longer one has more filling, which depends on nothing after it
    known, rest = size // int8_rows.row_bytes(width), rows[size:]
    if base[:size] == rows[:size]:
        sequence = SequenceRows(sample, Form.UNCHANGED, known, digest_of(base), b"", rest)
    else:
        off = int8_rows.decode(rows[:size], width) - int8_rows.decode(base[:size], width)
        sequence = SequenceRows(sample, Form.CHANGED, known, digest_of(base), int4_changes.encode(off), rest)
    return sequence, b"".join(_applied(sequence, base, width))


def _applied(one: SequenceRows, base: bytes, width: int) -> tuple[bytes, bytes]:
    """Return a sequence's rows, and further ones that are kept from before; raises `NoBase` if `base` is too short."""
    size = one.known * int8_rows.row_bytes(width)
    if len(base) < size:
        raise NoBase(f"a change of sequence {one.sample} builds on more rows than are kept here")
    known = base[:size]
    if one.form == Form.CHANGED:
        known = int8_rows.encode(int8_rows.decode(known, width) + int4_changes.decode(one.changes, width))
    rows = known + bytes(one.rest)
    return rows, base[len(rows) :]
