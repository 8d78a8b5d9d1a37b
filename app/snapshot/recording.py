"""Recordings of a node: its snapshots and events over time, as a file that `shoal replay` shows.

A recording is UTF-8 text with one JSON value on each line. The first line is the header, `{"shoal_recording": 1,
"node": VERSION, "at_ms": TIME}`. Every other line has `t`, milliseconds after the header's time, and one of

- `all`: a whole snapshot, in the form of `/control/snapshot`: the first frame, and one of every `KEY_EVERY` frames;
- `set`: what changed since the frame before, as `[path, value]` pairs; a path is a list of names and list positions;
- `note`: an event of the node: `number`, `at_ms`, `kind`, `text`.

A last line that is cut off is left out, because a recording may end with a crash or a full disk; any other line that
cannot be read is an error. A file may come from a stranger, so every value is checked against the type that the views
give it, and every number and length is bounded. Unknown fields are ignored.

Snapshots contain no prompts, replies, tokens or invites; `app.cli.record` and `app.system.bug_report` also remove
secrets from the text. Nothing here reads or writes files.
"""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from app.core.errors import AppError
from app.snapshot.codec import snapshot_from
from app.snapshot.views import Snapshot

FORMAT = 1
KEY_EVERY = 100  # frames; reaching a frame takes at most this many changes from the whole snapshot before it
MAX_FILE_BYTES = 256 * 2**20
MAX_LINE_BYTES = 16 * 2**20
MAX_ITEMS = 20_000  # of a list
MAX_CHARACTERS = 65_536  # of a text
MAX_NUMBER = 2**53
MAX_BLOCKS = 10_000
LATEST_MS = 4_102_444_800_000  # the year 2100; later times cannot be shown as a date everywhere
SUFFIX = ".shoal"

Path = tuple[str | int, ...]


class BadRecording(AppError):
    """The file is not a recording, is damaged, or was made by a newer version of Shoal."""


# --- writing ---------------------------------------------------------------------------------------------------------


class FrameEncoder:
    """Turns the snapshots and events of one recording into lines; `began_at_ms` is the header's time."""

    def __init__(self, began_at_ms: int) -> None:
        self.began_at_ms = began_at_ms
        self._last: dict[str, Any] | None = None
        self._frames = 0

    def header(self, version: str) -> bytes:
        """Return the first line."""
        return _line({"shoal_recording": FORMAT, "node": version, "at_ms": self.began_at_ms})

    def frame(self, at_ms: int, values: dict[str, Any]) -> bytes:
        """Return the line of a snapshot in its JSON form; empty if nothing has changed since the one before."""
        changes = None if self._last is None else list(_changes(self._last, values, ()))
        if changes == []:
            return b""
        is_whole = changes is None or self._frames % KEY_EVERY == 0
        self._last = values
        self._frames += 1
        content = {"all": values} if is_whole else {"set": changes}
        return _line({"t": self._since(at_ms), **content})

    def note(self, at_ms: int, data: Mapping[str, Any]) -> bytes:
        """Return the line of an event."""
        return _line({"t": self._since(at_ms), "note": dict(data)})

    def _since(self, at_ms: int) -> int:
        return max(0, at_ms - self.began_at_ms)  # a machine's clock may be set back


class RecentFrames:
    """The frames of the last minutes, in memory only.

    They are dropped in runs of a minute, once they are too old or too many bytes. Each run begins with a whole
    snapshot, so that what is left can be replayed.
    """

    RUN_MS = 60_000

    def __init__(self, kept_ms: int, kept_bytes: int) -> None:
        self._kept_ms, self._kept_bytes = kept_ms, kept_bytes
        self._runs: deque[tuple[FrameEncoder, list[tuple[int, bytes]]]] = deque()
        self._last_ms = 0

    def take(self, at_ms: int, values: dict[str, Any]) -> None:
        """Keep a snapshot in its JSON form, and forget what is too old; forget all if the clock was set back."""
        if at_ms < self._last_ms:
            self._runs.clear()
        self._last_ms = at_ms
        if not self._runs or at_ms - self._runs[-1][0].began_at_ms >= self.RUN_MS:
            self._runs.append((FrameEncoder(at_ms), []))
        encoder, lines = self._runs[-1]
        if line := encoder.frame(at_ms, values):
            lines.append((at_ms, line))
        while len(self._runs) > 1 and (self._is_first_too_old(at_ms) or self._size() > self._kept_bytes):
            self._runs.popleft()

    def _is_first_too_old(self, now_ms: int) -> bool:
        """True if the runs after the first one already reach back far enough."""
        return now_ms - self._runs[1][0].began_at_ms >= self._kept_ms

    def _size(self) -> int:
        return sum(len(line) for _, lines in self._runs for _, line in lines)

    def entries(self, version: str, notes: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """Return the lines of a recording of what is kept, decoded, with the events of that time; empty if none is."""
        if not self._runs:
            return []
        encoder = self._runs[0][0]
        timed = [(at_ms, json.loads(line)) for _, lines in self._runs for at_ms, line in lines]
        timed = [(at_ms, {**entry, "t": at_ms - encoder.began_at_ms}) for at_ms, entry in timed]
        for note in notes:
            if note["at_ms"] >= encoder.began_at_ms:
                timed.append((note["at_ms"], json.loads(encoder.note(note["at_ms"], note))))
        timed.sort(key=lambda pair: pair[0])
        return [json.loads(encoder.header(version)), *(entry for _, entry in timed)]


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _changes(old: Any, new: Any, path: Path) -> Iterator[list[Any]]:
    """Yield `[path, value]` for what differs: single values of objects and of lists that kept their length."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for name, value in new.items():
            if old[name] != value:
                yield from _changes(old[name], value, (*path, name))
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for index, value in enumerate(new):
            if old[index] != value:
                yield from _changes(old[index], value, (*path, index))
    else:
        yield [list(path), new]


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedNote:
    """An event of the node; `t_ms` counts from the recording's begin."""

    t_ms: int
    data: Mapping[str, Any]


@dataclass(frozen=True)
class FlowSample:
    """The rates of one frame, for the plots."""

    served_tokens_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float


class Recording:
    """A checked recording: frame by frame, in any order."""

    def __init__(self, version: str, began_at_ms: int) -> None:
        self.version, self.began_at_ms = version, began_at_ms
        self.times_ms: list[int] = []  # of each frame, after `began_at_ms`; never falling
        self.notes: list[RecordedNote] = []
        self.flows: list[FlowSample] = []  # of each frame
        self._lines: list[bytes] = []  # of each frame
        self._keys: list[int] = []  # frames that are whole snapshots
        self._reached: tuple[int, Any] = (-1, None)  # the frame that was made last, and its values

    def __len__(self) -> int:
        return len(self.times_ms)

    @property
    def duration_ms(self) -> int:
        """Time from the first frame to the last one."""
        return self.times_ms[-1] - self.times_ms[0]

    def frame_at(self, t_ms: float) -> int:
        """Return the number of the last frame that is not later than this time; 0 if all are."""
        return max(0, bisect_right(self.times_ms, t_ms) - 1)

    def snapshot(self, frame: int) -> Snapshot:
        """Build the snapshot of a frame; the next frame costs one change, any other at most `KEY_EVERY`."""
        begin, values = self._reached
        key = self._keys[bisect_right(self._keys, frame) - 1]
        if not key <= begin <= frame:
            begin, values = key - 1, None
        for index in range(begin + 1, frame + 1):
            values = _applied(values, json.loads(self._lines[index]))
        self._reached = (frame, values)
        return snapshot_from(values)

    def _add(self, t_ms: int, line: bytes, values: Mapping[str, Any], is_whole: bool) -> None:
        if is_whole:
            self._keys.append(len(self.times_ms))
        flow = values.get("flow") or {}
        rates = ((flow.get(field.name) or 0.0) for field in dataclasses.fields(FlowSample))
        self.times_ms.append(max(t_ms, self.times_ms[-1] if self.times_ms else 0))
        self.flows.append(FlowSample(*rates))
        self._lines.append(line)


def read_recording(raw: bytes, name: str) -> Recording:
    """Check the bytes of a recording and return it; raises `BadRecording`, which names the file and the line."""
    lines = raw.split(b"\n")
    is_cut = bool(lines.pop())  # what follows the last line break
    recording = _read_header(lines[0] if lines else b"", name)
    values: Any = None
    for number, line in enumerate(lines[1:], 2):
        try:
            entry = _decoded(line)
            t_ms = _checked(int, entry["t"], "t_ms")
            if "note" in entry:
                recording.notes.append(RecordedNote(t_ms, _checked_note(entry["note"])))
            elif "all" in entry or "set" in entry:
                _check_frame(entry)
                values = _applied(values, entry)
                if "all" in entry:
                    snapshot_from(values)
                recording._add(t_ms, line, values, "all" in entry)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            if number == len(lines) and not is_cut:
                break  # a cut line that happens to end with a line break
            raise BadRecording(f"{name} is damaged at line {number}: it cannot be replayed") from error
    if not recording.times_ms:
        raise BadRecording(f"{name} has no frame: it ended before the node's first snapshot")
    recording.notes.sort(key=lambda note: note.t_ms)
    return recording


def _read_header(line: bytes, name: str) -> Recording:
    try:
        header = _decoded(line)
        kind = _checked(int, header["shoal_recording"], "format")
        if kind > FORMAT:
            raise BadRecording(f"{name} was recorded by a newer version of Shoal (format {kind}): update this one")
        if kind < 1:
            raise ValueError("not a format")
        return Recording(_checked(str, header["node"], "node")[:80], _checked(int, header["at_ms"], "at_ms"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadRecording(f"{name} is not a recording of Shoal: `shoal record FILE` makes one") from error


def _decoded(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError("the line is too long")
    value = json.loads(line.decode("utf-8"), parse_constant=_refuse)
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _applied(values: Any, entry: Mapping[str, Any]) -> Any:
    """Return the values after a frame; changes those given. A change may replace values but add none."""
    if "all" in entry:
        return entry["all"]
    if values is None:
        raise ValueError("changes without a snapshot before them")
    for path, value in entry["set"]:
        target = values
        for part in path[:-1]:
            target = target[part]
        if isinstance(target, dict) and path[-1] not in target:
            raise KeyError(path[-1])
        target[path[-1]] = value
    return values


# --- checking --------------------------------------------------------------------------------------------------------


def _check_frame(entry: Mapping[str, Any]) -> None:
    """Raise `ValueError` or `TypeError` unless every value of a frame has the type of its field."""
    if "all" in entry:
        _checked(Snapshot, entry["all"], "")
        return
    if not isinstance(entry["set"], list) or len(entry["set"]) > 50 * MAX_ITEMS:
        raise TypeError("not a list of changes")
    for path, value in entry["set"]:
        if not isinstance(path, list) or not path or len(path) > 8:
            raise TypeError("not a path")
        hint: Any = Snapshot
        for part in path:
            hint = None if hint is None else _hint_below(hint, part)
        if hint is not None:
            _checked(hint, value, str(next((part for part in reversed(path) if isinstance(part, str)), "")))
        else:
            _bounded(value)


def _hint_below(hint: Any, part: str | int) -> Any:
    """Return the type of a field or of a list's items; None for a field that this version does not know."""
    for choice in _choices(hint):
        if isinstance(part, str) and dataclasses.is_dataclass(choice):
            return _hints(choice).get(part)  # type: ignore[arg-type]
        if type(part) is int and part >= 0 and get_origin(choice) is tuple:
            return get_args(choice)[0]
    raise TypeError("a path that leads nowhere")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _required(kind: type) -> frozenset[str]:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return frozenset(f.name for f in fields if f.default is missing and f.default_factory is missing)


def _choices(hint: Any) -> Sequence[Any]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _checked(hint: Any, value: Any, name: str) -> Any:
    """Return a value that has the type `hint` and is within bounds, those of the field `name` included."""
    for choice in _choices(hint):
        check = _CHECKS.get(choice)
        if choice is type(None) and value is None:
            return value
        if check is not None and check(value):
            low, high = _bounds(name, choice)
            if isinstance(value, int | float) and not low <= value <= high:
                raise ValueError(f"{name} is out of bounds")
            return value
        if get_origin(choice) is Literal and value in get_args(choice):
            return value
        if get_origin(choice) is tuple and isinstance(value, list) and len(value) <= MAX_ITEMS:
            for item in value:
                _checked(get_args(choice)[0], item, name)
            return value
        if dataclasses.is_dataclass(choice) and isinstance(value, dict):
            return _checked_view(choice, value)  # type: ignore[arg-type]
    raise TypeError(f"{name} has another type")


def _checked_view(kind: type, value: dict[str, Any]) -> dict[str, Any]:
    if not _required(kind) <= value.keys():
        raise TypeError(f"a field of {kind.__name__} is missing")
    for name, item in value.items():
        hint = _hints(kind).get(name)
        if hint is None:
            _bounded(item)
        else:
            _checked(hint, item, name)
    return value


def _checked_note(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not an event")
    hints = (("number", int), ("at_ms", int), ("kind", str), ("text", str))
    return {name: _checked(hint, value[name], name) for name, hint in hints}


def _bounded(value: Any) -> None:
    """Raise `ValueError` if an unknown field holds more than a known one could."""
    if len(json.dumps(value)) > MAX_CHARACTERS:
        raise ValueError("an unknown field is too long")


_CHECKS: dict[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    str: lambda value: isinstance(value, str) and len(value) <= MAX_CHARACTERS,
}


def _bounds(name: str, kind: Any) -> tuple[int, int]:
    """Return the least and the highest value of a number's field.

    Seconds, bytes and speeds are not negative: parts of a whole that cancel out have no width on any screen.
    """
    if name.endswith("_ms"):
        return 0, LATEST_MS
    if kind is float and name != "temperature_c":
        return 0, MAX_NUMBER
    return (0, MAX_BLOCKS) if name in ("blocks_total", "start", "stop") else (-MAX_NUMBER, MAX_NUMBER)
