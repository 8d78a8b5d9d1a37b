"""The machines of a forecast and the links between them, as values, and their TOML files.

    [[machine]]
    name = "desk"                  # required
    memory_bytes = "24GB"          # required, what is free; sizes are numbers or texts like "24GB"
    reading_bytes_per_s = "900GB"  # required: speed at which it reads weights
    flops_per_s = 71e12            # required: speed at which it multiplies matrices, as measured
    kind = "gpu"                   # or cpu
    count = 1                      # machines alike, named desk-1, desk-2, …
    here = true                    # the machine that asks; default: the first
    island = "home"                # machines that train one copy of the model together; without it the faster of
                                   # one copy on all machines, and one on each that can hold it
    host = "rack"                  # machines of one host share its cores: what they compute at once adds up
    few_rows_flops_per_s = 20e12   # speed for eight rows at once, as of eight replies; default: flops_per_s
    block_floor_s = 0.0002
    watts = 350
    rtt_s = 0.02                   # to the machine that asks
    up_bytes_per_s = "12.5MB"
    down_bytes_per_s = "12.5MB"
    busy = 0.0                     # share of the time that others use it
    number_bytes = 2               # of a weight as it computes with it; default: 4 for a CPU, 2 for a GPU
    weight_bytes = 0.6             # of a weight in memory, if it is kept in fewer bits; default: number_bytes
    head_bytes_per_s = "900GB"     # speed at which it reads the output matrix; default: reading_bytes_per_s
    used_bytes = 0                 # memory that other programs use, besides what is free
    cap_bytes = "8GB"              # the owner's limit

    [[link]]
    from = "desk"
    to = "attic"
    rtt_s = 0.001
    up_bytes_per_s = "125MB"       # from → to; optional, as is down_bytes_per_s

A link with the machine that asks replaces that machine's own figures; one between two others replaces their round trip.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from app.core.errors import AppError
from app.core.units import parse_size
from app.routing.cost import ASSUMED_BYTES_PER_S, UNKNOWN_LINK_S
from engine.budget import BFLOAT16, FLOAT32, Precision, unquantised

MOST = 1e18  # no machine has more of anything
MAX_MACHINES = 4096
_SPEEDS = ("up_bytes_per_s", "down_bytes_per_s")
_SIZES = ("memory_bytes", "used_bytes", "cap_bytes", "reading_bytes_per_s", "head_bytes_per_s", *_SPEEDS)
_WORDS = ("island", "host")
_WHOLE = ("memory_bytes", "used_bytes", "cap_bytes", "number_bytes")
_REQUIRED = ("memory_bytes", "reading_bytes_per_s", "flops_per_s")


class PlanError(AppError):
    """A forecast is impossible: a value of a machine, link or task is missing or wrong."""


@dataclass(frozen=True)
class MachineSpec:
    """A machine of a forecast; it has the facts that `engine.budget` asks of a device."""

    name: str
    memory_bytes: int
    reading_bytes_per_s: float
    flops_per_s: float
    kind: str = "gpu"  # gpu, cpu
    few_rows_flops_per_s: float = 0.0  # for eight rows at once; 0: as for many
    block_floor_s: float = 0.0
    watts: float = 0.0  # 0: not known
    rtt_s: float = 2 * UNKNOWN_LINK_S  # to the machine that asks
    up_bytes_per_s: float = ASSUMED_BYTES_PER_S
    down_bytes_per_s: float = ASSUMED_BYTES_PER_S
    busy: float = 0.0
    island: str = ""
    number_bytes: int = 0  # of a weight as it computes with it; 0: as usual for its kind
    weight_bytes: float = 0.0  # of a weight in memory; 0: `number_bytes`
    head_bytes_per_s: float = 0.0  # speed at which it reads the output matrix; 0: as it reads blocks
    host: str = ""  # whose cores it shares with other machines of that host; empty: it has its own
    used_bytes: int = 0  # memory of the device that other programs use, besides `memory_bytes`
    cap_bytes: int | None = None  # the owner's limit

    @property
    def total_bytes(self) -> int:
        """All memory of the device."""
        return self.memory_bytes + self.used_bytes

    @property
    def free_bytes(self) -> int:
        """Memory that nothing else uses."""
        return self.memory_bytes

    @property
    def context_bytes(self) -> int:
        """Memory that the driver takes for itself: none is known."""
        return 0

    @property
    def precision(self) -> Precision:
        """Precision that this machine computes with."""
        usual = FLOAT32 if self.kind == "cpu" else BFLOAT16
        found = unquantised(self.number_bytes) if self.number_bytes else usual
        return replace(found, weight_bytes=self.weight_bytes) if self.weight_bytes else found

    @property
    def bytes_per_s(self) -> float:
        """The narrower direction of its connection."""
        return min(self.up_bytes_per_s, self.down_bytes_per_s)


@dataclass(frozen=True)
class LinkSpec:
    """A link between two machines by their names."""

    a: str
    b: str
    rtt_s: float


@dataclass(frozen=True)
class Fleet:
    """The machines of a forecast: the one that asks, all of them, and the links that are known between others."""

    here: MachineSpec
    machines: tuple[MachineSpec, ...]
    links: tuple[LinkSpec, ...] = ()
    assumed: tuple[str, ...] = ()
    _known: Mapping[frozenset[str], float] = field(init=False, repr=False, compare=False)
    _away_s: Mapping[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.here in self.machines, "the machine that asks is one of the machines"
        object.__setattr__(self, "_known", {frozenset((link.a, link.b)): link.rtt_s / 2 for link in self.links})
        object.__setattr__(self, "_away_s", {machine.name: self.away_s(machine) for machine in self.machines})

    @property
    def others(self) -> tuple[MachineSpec, ...]:
        """All machines but the one that asks."""
        return tuple(machine for machine in self.machines if machine.name != self.here.name)

    def away_s(self, machine: MachineSpec) -> float:
        """One-way seconds between the machine that asks and another."""
        return 0.0 if machine.name == self.here.name else machine.rtt_s / 2

    def link_s(self, a: str, b: str) -> float:
        """One-way seconds between two machines by name; "" is the one that asks.

        A pair without a known link is as far apart as its farther machine is from here, as routing assumes too.
        """
        a, b = a or self.here.name, b or self.here.name
        if a == b:
            return 0.0
        known = self._known.get(frozenset((a, b)))
        return known if known is not None else max(self._away_s[a], self._away_s[b])

    def alone(self) -> Fleet:
        """Return the fleet of the machine that asks and no other."""
        return Fleet(self.here, (self.here,), (), self.assumed)

    def first(self, count: int) -> Fleet:
        """Return the fleet of the machine that asks and as many others as make `count`."""
        machines = (self.here, *self.others)[:count]
        names = {machine.name for machine in machines}
        links = tuple(link for link in self.links if {link.a, link.b} <= names)
        return replace(self, machines=machines, links=links)


def read_machines(text: str, source: str) -> Fleet:
    """Read a file of machines; raises `PlanError` with the machine's name and the field that is wrong."""
    tables = _tables(text, source, "machine")
    machines: list[MachineSpec] = []
    here: MachineSpec | None = None
    assumed: set[str] = set()
    for number, table in enumerate(tables, 1):
        name = table.get("name")
        if not isinstance(name, str) or not 1 <= len(name) <= 64:
            raise PlanError(f'{source}: machine {number} has no name: write name = "…"')
        alike = _alike(table, f"{source}: machine {name!r}")
        assumed |= {name for name in ("rtt_s", "block_floor_s", *_SPEEDS) if name not in table}
        machines += alike
        here = alike[0] if table.get("here") is True else here
        if len(machines) > MAX_MACHINES:
            raise PlanError(f"{source}: more than {MAX_MACHINES} machines")
    if len({machine.name for machine in machines}) < len(machines):
        raise PlanError(f"{source}: two machines have the same name")
    said = (f"{', '.join(sorted(assumed))} of machines that do not give it",) if assumed else ()
    return Fleet(here or machines[0], tuple(machines), (), said)


def with_links(fleet: Fleet, text: str, source: str) -> Fleet:
    """Return the fleet with the links of a file; raises `PlanError`, for a link to an unknown machine too."""
    machines = {machine.name: machine for machine in fleet.machines}
    links: list[LinkSpec] = []
    for number, table in enumerate(_tables(text, source, "link"), 1):
        where = f"{source}: link {number}"
        ends = (table.get("from"), table.get("to"))
        for end in ends:
            if not isinstance(end, str) or end not in machines:
                raise PlanError(f"{where} leads to {str(end)[:64]!r}, which is not one of the machines")
        a, b = str(ends[0]), str(ends[1])
        if a == b:
            raise PlanError(f"{where} leads from {a!r} to itself")
        rtt_s = _number(table, "rtt_s", where)
        links.append(LinkSpec(a, b, rtt_s))
        other = machines[b if a == fleet.here.name else a]
        if fleet.here.name in (a, b):
            up, down = (_number(table, name, where) if name in table else None for name in _SPEEDS)
            up, down = (up, down) if other.name == a else (down, up)
            machines[other.name] = replace(
                other,
                rtt_s=rtt_s,
                up_bytes_per_s=up or other.up_bytes_per_s,
                down_bytes_per_s=down or other.down_bytes_per_s,
            )
    return Fleet(machines[fleet.here.name], tuple(machines.values()), tuple(links), fleet.assumed)


def _tables(text: str, source: str, kind: str) -> list[dict[str, Any]]:
    try:
        read = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"{source} is not valid TOML: {error}") from error
    tables = read.get(kind)
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise PlanError(f"{source} lists no {kind}: write one [[{kind}]] table for each")
    return tables


def _alike(table: dict[str, Any], where: str) -> list[MachineSpec]:
    """Return the machines of one table."""
    known = {field.name: field for field in fields(MachineSpec)}
    unknown = [name for name in table if name not in known and name not in ("count", "here")]
    if unknown:
        raise PlanError(f"{where} has an unknown field {unknown[0][:64]!r}")
    values: dict[str, Any] = {"name": table["name"]}
    for name, spec in known.items():
        if name in ("name", "kind", *_WORDS):
            continue
        if name in table or spec.default is MISSING:
            values[name] = _number(table, name, where)
    values |= {name: int(values[name]) for name in _WHOLE if name in values}
    for name in _REQUIRED:
        if values[name] == 0:
            raise PlanError(f"{where}: {name} is 0; give what it has")
    for name in _SPEEDS:
        if values.get(name) == 0:
            raise PlanError(f"{where}: {name} is 0; leave out a machine without a connection")
    values["kind"] = kind = table.get("kind", "gpu")
    if kind not in ("gpu", "cpu"):
        raise PlanError(f"{where}: kind is {str(kind)[:64]!r}, expected gpu or cpu")
    if values.get("busy", 0.0) > 1:
        raise PlanError(f"{where}: busy is {values['busy']:g}, expected a share from 0 to 1")
    values |= {name: table.get(name, "") for name in _WORDS}
    for name in _WORDS:
        if not isinstance(values[name], str):
            raise PlanError(f"{where}: {name} is not a text")
    count = table.get("count", 1)
    if type(count) is not int or not 1 <= count <= MAX_MACHINES:
        raise PlanError(f"{where}: count is {str(count)[:64]}, expected 1 to {MAX_MACHINES}")
    if count == 1:
        return [MachineSpec(**values)]
    return [MachineSpec(**values | {"name": f"{values['name']}-{number}"}) for number in range(1, count + 1)]


def _number(table: Mapping[str, Any], name: str, where: str) -> float:
    """Return a number of a table, from 0 to `MOST`; raises `PlanError`."""
    value = table.get(name)
    if value is None:
        raise PlanError(f"{where} has no {name}: measure it (`shoal bench`), or take it from a data sheet")
    if isinstance(value, str) and name in _SIZES:
        try:
            value = parse_size(value)
        except ValueError as error:
            raise PlanError(f"{where}: {name}: {error}") from error
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"{where}: {name} is not a number")
    if not 0 <= value <= MOST:  # not true of nan either
        raise PlanError(f"{where}: {name} is {str(value)[:32]}, expected 0 to 1e18")
    return value
