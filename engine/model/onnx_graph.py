"""Graphs for ONNX Runtime, whose products on a CPU read weights of 4 and 8 bits as they are.

A graph is written in ONNX's own format by hand (a few protobuf messages), because the `onnx` package is larger than the
runtime. Weights are not copied into it: the runtime gets their addresses, and packs them for its kernels. What a graph
computes is left to the callers. ONNX Runtime is an optional package: without it `runtime` returns None.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.sources.grid import Grid

log = logging.getLogger("shoal.engine.onnx")

_TYPES = {torch.float32: 1, torch.uint8: 2, torch.int32: 6, torch.int64: 7}
_MICROSOFT = "com.microsoft"  # the domain of the runtime's own operations
_IR_VERSION, _OPSET = 10, 21
# The runtime's numbers for its ways to multiply: in float32, or with rows rounded to 8 bits in groups like weights.
_FLOAT32, _INT8 = 1, 4
TIMED_ROWS = (16, 32, 64, 128, 256)  # numbers of rows at which both ways are timed
WEIGHTS_PER_THREAD = 4 << 20  # bytes of integers that make another thread worth its while, for few rows
MEASURED_RUNS, MEASURED_S = 30, 0.5  # most runs of a measurement, and seconds after which some are enough


@functools.cache
def runtime() -> Any:
    """Return the `onnxruntime` module, or None where it is missing or does not work."""
    try:
        import onnxruntime as ort

        ort.set_default_logger_severity(3)
        # One place for what all graphs need while they run. Each would keep its own otherwise: after a prompt of 500
        # tokens the 30 blocks of a small model kept a gigabyte.
        here = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(here, None)
    except Exception as error:  # a broken installation can raise almost any exception
        log.info("ONNX Runtime cannot be used (%s): blocks on this CPU are computed by torch", error)
        return None
    return ort


def _varint(number: int) -> bytes:
    out = bytearray()
    number &= (1 << 64) - 1  # negative numbers have ten bytes
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _attribute(name: str, value: int | float) -> bytes:
    if isinstance(value, float):
        return _field(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _field(20, 1)
    return _field(1, name) + _field(3, value) + _field(20, 2)


def _value_info(name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> bytes:
    sizes = (_field(1, _field(1 if isinstance(size, int) else 2, size)) for size in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, _TYPES[dtype]) + _field(2, b"".join(sizes))))


class GridConstants:
    """A grid and a bias in the form in which the runtime's product takes them; graphs share it.

    The product takes integers from a middle, and groups without minima. So a grid's minima, moved to that middle, are
    multiplied in float32 by the sums of the row's groups: a small product, 1/32 of the size.
    """

    def __init__(self, grid: Grid, bias: Tensor | None = None) -> None:
        (self.n_out, self.n_in), self.bits, self.group = grid.shape, grid.bits, grid.group
        groups = self.n_in // self.group
        self.packed = grid.quantised.view(self.n_out, groups, -1)  # the grid's own memory
        self.scale = grid.scale.float().view(-1)
        per_row, zero = ((groups + 1) // 2, grid.zero * 17) if grid.bits == 4 else (groups, grid.zero)
        self.zeros = torch.full((self.n_out * per_row,), zero, dtype=torch.uint8)
        self.bias = None if bias is None else bias.float()
        self.shift: Tensor | None = None  # (in / group, out)
        if grid.minimum is not None:
            self.shift = (grid.minimum.float() + grid.zero * grid.scale.float()).t().contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of the constants beside the grid's own."""
        return sum(each.nbytes for each in (self.scale, self.zeros, self.shift) if each is not None)


class GraphWriter:
    """One graph in the making: inputs, operations, constants and outputs; `compile` makes it ready to run.

    With `many`, it is for so many rows that float32 is faster than rounding the rows to 8 bits (`many_rows`).
    """

    def __init__(self, *, many: bool = False) -> None:
        self._level = _FLOAT32 if many else _INT8
        self._nodes: list[bytes] = []
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []
        self._constants: dict[str, Tensor] = {}
        self._count = 0

    def input(self, name: str, shape: Sequence[int | str], dtype: torch.dtype = torch.float32) -> str:
        """Add an input; sizes that vary are named."""
        self._inputs.append(_value_info(name, dtype, shape))
        return name

    def output(self, name: str, shape: Sequence[int | str]) -> None:
        """Make a float32 result an output."""
        self._outputs.append(_value_info(name, torch.float32, shape))

    def constant(self, value: Tensor) -> str:
        """Add a constant; its memory stays the tensor's."""
        name = f"c{len(self._constants)}"
        self._constants[name] = value.contiguous()
        return name

    def shape(self, *sizes: int) -> str:
        """Add a shape as a constant; -1 stands for the size that varies."""
        return self.constant(torch.tensor(sizes, dtype=torch.int64))

    def add(
        self, op: str, inputs: Sequence[str], *, out: str = "", own: bool = False, **attributes: int | float
    ) -> str:
        """Add an operation with one result and return the result's name; `own`: it is the runtime's own."""
        return self.add_many(op, inputs, [out or self._name()], own=own, **attributes)[0]

    def add_many(
        self,
        op: str,
        inputs: Sequence[str],
        outs: Sequence[str | None],
        *,
        own: bool = False,
        **attributes: int | float,
    ) -> Sequence[str]:
        """Add an operation with several results; None stands for any name, "" for a result that nobody reads."""
        names = [self._name() if name is None else name for name in outs]
        node = b"".join(_field(1, name) for name in inputs) + b"".join(_field(2, name) for name in names)
        node += _field(4, op) + b"".join(_field(5, _attribute(*each)) for each in attributes.items())
        self._nodes.append(node + (_field(7, _MICROSOFT) if own else b""))
        return names

    def _name(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def product(self, x: str, weights: GridConstants, plus: str = "", out: str = "") -> str:
        """Multiply rows x (N, in) by a grid: (N, out), plus its bias, and plus another result if given."""
        w = weights
        # The zero point is given though it is the default: without it, kernels for ARM round a row's numbers with one
        # scale for the whole row, and the error doubles.
        inputs = [x, self.constant(w.packed), self.constant(w.scale), self.constant(w.zeros)]
        if w.bias is not None:
            inputs += ["", self.constant(w.bias)]
        sizes = {"K": w.n_in, "N": w.n_out, "bits": w.bits, "block_size": w.group, "accuracy_level": self._level}
        last = w.shift is None and not plus
        name = self.add("MatMulNBits", inputs, own=True, out=out if last else "", **sizes)
        if w.shift is not None:
            groups = self.add("Reshape", [x, self.shape(-1, w.n_in // w.group, w.group)])
            sums = self.add("ReduceSum", [groups, self.shape(2)], keepdims=0)
            name = self.add("Gemm", [sums, self.constant(w.shift), name], out="" if plus else out)
        return self.add("Add", [name, plus], out=out) if plus else name

    def _threads(self) -> int:
        """Threads of the graph: waking one takes longer than it saves for few rows and small matrices."""
        weights = sum(constant.numel() for constant in self._constants.values() if constant.dtype == torch.uint8)
        wanted = torch.get_num_threads() if self._level == _FLOAT32 else weights // WEIGHTS_PER_THREAD
        return max(1, min(wanted, torch.get_num_threads()))

    def compile(self, spin_us: int = 0) -> Graph:
        """Return the graph, ready to run.

        Each graph has its threads. Those that wait for work sleep, or first look for it in a loop for `spin_us`: for
        a graph of many operations, which runs alone, that saves waking them for each. Between two runs they sleep.
        """
        ort = runtime()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads = self._threads()
        settings = {"use_env_allocators": "1", "intra_op.allow_spinning": "0"}
        if spin_us:
            settings["intra_op.allow_spinning"] = settings["force_spinning_stop"] = "1"
            settings["intra_op.spin_duration_us"] = str(spin_us)
        if threads > 1 and (cores := _other_cores()):
            chosen = (cores[index % len(cores)] + 1 for index in range(threads - 1))  # the runtime counts from 1
            settings["intra_op_thread_affinities"] = ";".join(map(str, chosen))
        for name, value in settings.items():
            options.add_session_config_entry(f"session.{name}", value)
        constants, names, values = b"", [], []
        for name, tensor in self._constants.items():
            described = b"".join(_field(1, size) for size in tensor.shape) + _field(2, _TYPES[tensor.dtype])
            described += _field(8, name)
            if tensor.dtype == torch.int64:  # a shape, which is read while the graph is compiled
                described += _field(9, tensor.numpy().tobytes())
            else:
                described += _field(13, _field(1, "location") + _field(2, "memory")) + _field(14, 1)
                names.append(name)
                values.append(ort.OrtValue.ortvalue_from_numpy(tensor.numpy()))
            constants += _field(5, described)
        options.add_external_initializers(names, values)
        graph = b"".join(_field(1, node) for node in self._nodes) + _field(2, "g") + constants
        graph += b"".join(_field(11, each) for each in self._inputs)
        graph += b"".join(_field(12, each) for each in self._outputs)
        opsets = _field(8, _field(2, _OPSET)) + _field(8, _field(1, _MICROSOFT) + _field(2, 1))
        model = _field(1, _IR_VERSION) + _field(7, graph) + opsets
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return Graph(session, tuple(self._constants.values()))


def _other_cores() -> list[int]:
    """Return the cores for a graph's further threads, if this thread is bound to one; they would inherit it.

    A node has OpenMP bind torch's threads to cores that `OMP_PLACES` names, this thread to the first.
    """
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    named = {int(core) for core in re.findall(r"\d+", os.environ.get("OMP_PLACES", ""))}
    return sorted(named - own) if len(own) == 1 else []


class Shifted(NamedTuple):
    """Memory like that of a contiguous tensor, `shift` numbers further on; its end may lie behind the tensor's."""

    tensor: Tensor
    shift: int


class Graph:
    """A compiled graph."""

    def __init__(self, session: Any, constants: tuple[Tensor, ...]) -> None:
        self._session = session
        self._constants = constants  # whose memory the runtime reads
        self._inputs = [each.name for each in session.get_inputs()]

    @property
    def nbytes(self) -> int:
        """Bytes that the graph takes beside its constants: the runtime packs their integers again."""
        return sum(constant.nbytes for constant in self._constants if constant.dtype == torch.uint8)

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """Compute the outputs from contiguous inputs, in the order in which both were added."""
        feeds = {name: each.numpy() for name, each in zip(self._inputs, inputs, strict=True)}
        return [torch.from_numpy(out) for out in self._session.run(None, feeds)]

    def bind(self, inputs: Sequence[Tensor | Shifted], outputs: Sequence[Tensor | Shifted]) -> Callable[[], None]:
        """Return a function that computes the outputs from the inputs, all in memory that stays where it is."""
        binding = self._session.io_binding()
        names = [each.name for each in self._session.get_outputs()]
        for bind, all_names, places in (
            (binding.bind_input, self._inputs, inputs),
            (binding.bind_output, names, outputs),
        ):
            for name, place in zip(all_names, places, strict=True):
                tensor, shift = place if isinstance(place, Shifted) else (place, 0)
                address = tensor.data_ptr() + shift * tensor.itemsize
                bind(name, "cpu", 0, tensor.numpy().dtype, tuple(tensor.shape), address)
        return functools.partial(self._session.run_with_iobinding, binding)


class GridProduct:
    """The product with one grid on the CPU, as a graph of its own; that for many rows is made when it is needed."""

    def __init__(self, grid: Grid, bias: Tensor | None = None) -> None:
        self._weights = GridConstants(grid, bias)
        self._graphs: dict[bool, Graph] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product for float32 rows x (N, in): (N, out)."""
        many = x.shape[0] >= many_rows()
        if many not in self._graphs:
            self._graphs[many] = product_graph(self._weights, many=many)
        return self._graphs[many].run(x.contiguous())[0]

    @property
    def nbytes(self) -> int:
        """Bytes beside the grid's own."""
        return self._weights.nbytes + sum(graph.nbytes for graph in self._graphs.values())


def product_graph(weights: GridConstants, *, many: bool) -> Graph:
    """Return the graph of one product: rows (N, in) -> (N, out)."""
    writer = GraphWriter(many=many)
    writer.product(writer.input("x", ("N", weights.n_in)), weights, out="y")
    writer.output("y", ("N", weights.n_out))
    return writer.compile()


def grids_pay() -> bool:
    """True if products with grids are faster here than float32's, for one row; measured once (0.3 s)."""
    return grid_gain() > 1.1


@functools.cache
def grid_gain() -> float:
    """Return how many times as fast as float32's a product with a grid of 4 bits is here, for one row; measured once.

    0 if this machine cannot compute it.
    """
    if runtime() is None:
        return 0.0
    try:
        grid = _sample(8192)  # 67 MB in float32: weights of a whole model do not fit into the processor's cache either
        dense, x = grid.dense(torch.float32), torch.ones(1, grid.shape[1])
        graph = product_graph(GridConstants(grid), many=False)
        ours_s, plain_s = _fastest_s(lambda: graph.run(x), lambda: torch.nn.functional.linear(x, dense))
    except Exception as error:  # the runtime of an unknown machine can raise almost any exception
        log.warning("ONNX Runtime cannot multiply on this machine (%s): torch computes the blocks", error)
        return 0.0
    log.info("a product with 4 bits takes %.0f µs, one in float32 %.0f µs", 1e6 * ours_s, 1e6 * plain_s)
    return plain_s / ours_s


@functools.cache
def many_rows() -> int:
    """Return the number of rows from which on float32 is faster than rounding the rows; measured once (0.5 s)."""
    weights = GridConstants(_sample(1024))
    few, many = (product_graph(weights, many=each) for each in (False, True))
    for rows in TIMED_ROWS:
        x = torch.ones(rows, weights.n_in)
        rounded_s, exact_s = _fastest_s(functools.partial(few.run, x), functools.partial(many.run, x))
        if exact_s < 1.15 * rounded_s:  # near a tie, the way that rounds nothing
            return rows
    return sys.maxsize


def _sample(rows: int) -> Grid:
    """A grid of 4 bits with minima."""
    integers = torch.arange(rows * 1024, dtype=torch.int32).to(torch.uint8).view(rows, 1024)
    factors = torch.full((rows, 64), 0.5, dtype=torch.float16)
    return Grid(4, 32, 8, integers, factors, -factors)


def _fastest_s(one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the fastest run of each, after the first.

    In turns, and often enough that some runs of each are not interrupted: other programs must not change the choice.
    """
    times: list[tuple[float, float]] = []
    begin = time.perf_counter()
    with torch.inference_mode():
        for _ in range(MEASURED_RUNS):
            start = time.perf_counter()
            one()
            middle = time.perf_counter()
            other()
            times.append((middle - start, time.perf_counter() - middle))
            if len(times) > 4 and time.perf_counter() - begin > MEASURED_S:
                break
    return min(first for first, _ in times[1:]), min(second for _, second in times[1:])
