"""Runs a hosted span for a server: sessions by id, many sessions per step, bytes in and bytes out.

Not thread-safe: one thread at a time. Knows no peers and no time; `app.serving` decides which sessions to open and
close.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.device.probe import first_line, is_memory_full
from engine.errors import DeviceFull, NotFinite, SessionError, TrainingError
from engine.model.cuda_graphs import StepUnderWay, UnderWay
from engine.model.hosted_span import HostedSpan, SessionLease, SessionRows
from engine.model.kv_cache import PAGE_TOKENS, scales_of, stored_form
from engine.model.span import BlockAdapter
from engine.training.adapters import AdapterSettings, layout, weight_count
from engine.training.peft_format import Adapter
from engine.training.serving import ServedAdapter
from engine.wire import is_finite, to_bytes, to_tensor, wire_name


class StepInput(Protocol):
    """One session's part of a step: `rows` tokens at `position` through blocks [start, stop)."""

    @property
    def session(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def data(self) -> memoryview: ...
    @property
    def dtype(self) -> str: ...
    @property
    def wire(self) -> str: ...


class StepResult(NamedTuple):
    """One session's output rows, in wire format `dtype`."""

    data: bytes
    dtype: str


class SessionRunner:
    """Open sessions of one span, each with its lease of the KV cache."""

    def __init__(self, span: HostedSpan) -> None:
        self._span = span
        self._leases: dict[bytes, SessionLease] = {}
        self._adapters: dict[bytes, BlockAdapter] = {}  # of the sessions that use one
        self.hidden_size = span.config.hidden_size
        self.context_length = span.config.context_length
        self._native = wire_name(span.options.dtype)

    @property
    def start(self) -> int:
        """The first block."""
        return self._span.start

    @property
    def stop(self) -> int:
        """One past the last block; increases while the span grows."""
        return self._span.stop

    @property
    def kv_free_tokens(self) -> int:
        """KV cache slots (one per token) that no session has leased."""
        return self._span.free_tokens

    @property
    def kv_total_tokens(self) -> int:
        """KV cache slots (one per token) in all."""
        return self._span.total_tokens

    @property
    def kv_page_tokens(self) -> int:
        """KV cache slots that are leased together."""
        return PAGE_TOKENS

    def adapter_bytes(self, rank: int, targets: tuple[str, ...]) -> int:
        """Return the bytes of one block's vector of such an adapter; raises `TrainingError` if there is none."""
        settings = AdapterSettings(rank, targets=targets)
        return 4 * weight_count(layout(self._span.config, settings.rank, settings.targets))

    def load_adapter(
        self, rank: int, alpha: float, targets: tuple[str, ...], vectors: Mapping[int, bytes]
    ) -> ServedAdapter:
        """Load the adapter of some blocks, each a vector of float32, beside the blocks' weights.

        Raises `TrainingError` for a vector of another size or with numbers that are not finite in the blocks' format,
        `DeviceFull` if the device's memory is full.
        """
        settings, size = AdapterSettings(rank, alpha, targets), self.adapter_bytes(rank, targets)
        places = {block: part.options for part in self._span.parts for block in range(part.start, part.stop)}
        numbers = {}
        for block, data in vectors.items():
            if len(data) != size or block not in places:
                raise TrainingError(f"the adapter's {len(data)} bytes for block {block} are not the {size} of its rank")
            numbers[block] = torch.frombuffer(bytearray(data), dtype=torch.float32)
            if not _within(numbers[block], torch.finfo(places[block].dtype).max):
                raise TrainingError(f"the adapter of block {block} has numbers that are not finite in {self._native}")
        try:
            own = {block: places[block] for block in vectors}
            return ServedAdapter(Adapter(settings, numbers), self._span.config, own)
        except Exception as error:
            if is_memory_full(error):
                raise DeviceFull(f"the device's memory is full: {first_line(error)}") from error
            raise

    def open(self, session: bytes, tokens: int, adapter: BlockAdapter | None = None) -> None:
        """Lease cache for `tokens` tokens of a new session, all of which are computed with the adapter if one is given.

        Raises `CacheFull` without room, and `SessionError` if `tokens` exceeds the model's context.
        """
        assert session not in self._leases, "a session is opened once"
        self._leases[session] = self._span.open(tokens)
        if adapter is not None:
            self._adapters[session] = adapter

    def fork(self, session: bytes, tokens: int, source: bytes, length: int) -> None:
        """Open a session whose first `length` tokens are those of `source`; both share cache pages and adapter.

        Raises `CacheFull` without room, and `SessionError` if `source` does not hold so many tokens.
        """
        assert session not in self._leases, "a session is opened once"
        self._check_context(tokens)
        self._leases[session] = self._span.fork(self._lease(source), length, tokens)
        if source in self._adapters:
            self._adapters[session] = self._adapters[source]

    def take_over(self, session: bytes, tokens: int, source: bytes, length: int) -> None:
        """Open a session with the cache and the adapter of `source`, cut to `length` tokens; `source` ends.

        Raises `CacheFull` without room; `source` is cut then, and open.
        """
        assert session not in self._leases, "a session is opened once"
        self._check_context(tokens)
        lease = self._lease(source)
        lease.truncate(length)
        lease.resize(tokens)
        self._leases[session] = self._leases.pop(source)
        if source in self._adapters:
            self._adapters[session] = self._adapters.pop(source)

    def resize(self, session: bytes, tokens: int) -> None:
        """Reserve cache for `tokens` tokens of an open session from now on, or what it holds if that is more."""
        self._lease(session).resize(tokens)

    def tokens_freed_by(self, sessions: Iterable[bytes]) -> int:
        """KV cache slots that closing these sessions would free; unknown sessions are ignored.

        It may be called while another thread takes a session over, whose lease goes to the new one then.
        """
        leases = [self._leases.get(session) for session in sessions]
        return self._span.tokens_freed_by([lease for lease in leases if lease is not None])

    def _check_context(self, tokens: int) -> None:
        if tokens > self.context_length:
            raise SessionError(f"{tokens} tokens are more than this model's context of {self.context_length}")

    def close(self, session: bytes) -> None:
        """Free a session's cache; unknown sessions are ignored."""
        self._adapters.pop(session, None)
        lease = self._leases.pop(session, None)
        if lease is not None:
            lease.close()

    def truncate(self, session: bytes, length: int) -> None:
        """Drop a session's tokens from position `length` on."""
        self._lease(session).truncate(length)

    @property
    def cache_format(self) -> str:
        """The form of cached numbers and the weights' form: a cache goes on only under the same."""
        config, options = self._span.config, self._span.options
        kept = "" if options.cache == "own" else f" {options.cache} cache"
        return f"{self._native} {config.n_kv_heads}x{config.head_dim} {options.quantisation}{kept}"

    @property
    def cache_row_bytes(self) -> int:
        """Bytes of one token in one block's cache."""
        form, width = self._stored_form
        return 2 * self._span.config.n_kv_heads * width * form.itemsize

    @property
    def _stored_form(self) -> tuple[torch.dtype, int]:
        options = self._span.options
        return stored_form(self._span.config, options.dtype, options.cache)

    def export_cache(self, session: bytes, blocks: tuple[int, int], start: int, stop: int) -> memoryview:
        """Return the cache of a session's tokens [start, stop) in these blocks; raises `SessionError` without it."""
        numbers = self._span.read_cache(self._lease(session), blocks, start, stop)
        return numbers.contiguous().view(torch.uint8).flatten().numpy().data

    def import_cache(self, session: bytes, blocks: tuple[int, int], position: int, data: memoryview) -> None:
        """Append tokens to a session with the cache that `export_cache` returned elsewhere.

        Raises `SessionError` if it does not fit the session, `NotFinite` for NaN, `CacheFull` without room.
        """
        lease = self._lease(session)
        rows, rest = divmod(len(data), (blocks[1] - blocks[0]) * self.cache_row_bytes)
        if lease.length != position or not rows or rest:
            raise SessionError(f"{len(data)} bytes of cache at {position} do not continue {lease.length} tokens")
        config, (form, width) = self._span.config, self._stored_form
        stored = torch.frombuffer(bytearray(data), dtype=form)
        stored = stored.view(blocks[1] - blocks[0], 2, config.n_kv_heads, rows, width)
        numbers = stored
        if self._span.options.cache == "int8":  # the scale of each head and token bounds its numbers
            numbers = (128 * scales_of(stored, config.head_dim)).to(self._span.options.dtype)
        if not is_finite(numbers):
            raise NotFinite(f"the cache for session {session.hex()[:8]} has numbers that are not finite", session)
        self._span.write_cache(lease, blocks, stored)

    def prepare(self) -> bool:
        """Capture one decode step that ran uncaptured so far; False if none is left."""
        return self._span.capture_pending() and self._span.has_pending

    def step(self, work: Sequence[StepInput]) -> list[StepResult]:
        """Run one step; inputs for the same blocks and adapter are batched. All sessions advance or, on an error, none.

        Raises `SessionError` for input that does not fit its session, `NotFinite` for NaN, `CacheFull` without room in
        the cache, `DeviceFull` if the device's memory is full.
        """
        groups: dict[tuple[int, int, BlockAdapter | None], list[int]] = {}
        for index, item in enumerate(work):
            groups.setdefault((item.start, item.stop, self._adapters.get(item.session)), []).append(index)
        inputs: list[Tensor] = []
        for indices in groups.values():  # all before the first is computed: a bad one costs no other's time
            items = [work[index] for index in indices]
            inputs.append(self._joined(items))
            self._check_finite(inputs[-1], items)
        outputs: dict[int, StepResult] = {}
        advanced: list[SessionRows] = []
        try:
            for ((start, stop, adapter), indices), rows in zip(groups.items(), inputs, strict=True):
                items = [work[index] for index in indices]
                taken = [SessionRows(self._lease(item.session), item.position, item.rows) for item in items]
                hidden = self._span.step(rows, taken, (start, stop), adapter)
                advanced += taken
                outputs.update(zip(indices, self._split(hidden, items), strict=True))
        except BaseException as error:
            for own in advanced:  # undo the groups that have advanced already
                own.lease.truncate(own.start)
            if is_memory_full(error):
                raise DeviceFull(f"the device's memory is full: {first_line(error)}") from error
            raise
        return [outputs[index] for index in range(len(work))]

    def launch(self, work: Sequence[StepInput]) -> UnderWay[list[StepResult]] | None:
        """Start a step without waiting for it where the device can; None: nothing was started, use `step`.

        Raises as `step` does. Until its result is taken, nothing but `is_done` may be called.
        """
        blocks = {(item.start, item.stop) for item in work}
        if len(blocks) > 1 or any(item.session in self._adapters for item in work):
            return None
        items = list(work)
        taken = [SessionRows(self._lease(item.session), item.position, item.rows) for item in items]
        rows = self._joined(items)
        self._check_finite(rows, items)
        started = self._span.launch(rows, taken, blocks.pop())
        return None if started is None else started.then(lambda hidden: self._split(hidden, items))

    def launch_ahead(self, work: Sequence[StepInput], rows: Tensor | None) -> StepUnderWay[list[StepResult]] | None:
        """Start a step of one token for each session whose input the device is about to compute; None: it cannot.

        `rows` come from `SwarmEnds.launch`; the data of `work` is not looked at. No session advances: those that the
        step turns out to be right for do by `accept`, in order. A second one may be launched behind it; until both are
        done, nothing else may be called.
        """
        blocks = {(item.start, item.stop) for item in work}
        if rows is None or len(blocks) > 1 or any(item.session in self._adapters for item in work):
            return None
        items = list(work)
        taken = [SessionRows(self._lease(item.session), item.position, 1) for item in items]
        started = self._span.launch(rows, taken, blocks.pop(), ahead=True)
        return None if started is None else started.then(lambda hidden: self._split(hidden, items))

    def accept(self, session: bytes, length: int) -> None:
        """Count a token that a step ahead has written to the cache: the session has `length` tokens now."""
        self._lease(session).accept(length)

    def _lease(self, session: bytes) -> SessionLease:
        lease = self._leases.get(session)
        if lease is None:
            raise SessionError(f"unknown session {session.hex()[:8]}: open it again")
        return lease

    def _joined(self, items: list[StepInput]) -> Tensor:
        """Concatenate the inputs' rows to (N, hidden), converted to the compute dtype if their formats differ."""
        dtype = items[0].dtype
        if all(item.dtype == dtype for item in items):
            return to_tensor([item.data for item in items], dtype, self.hidden_size)
        compute = self._span.options.dtype
        return torch.cat([to_tensor([item.data], item.dtype, self.hidden_size).to(compute) for item in items])

    def _check_finite(self, rows: Tensor, items: list[StepInput]) -> None:
        """Raise `NotFinite` for the first session with NaN, infinity, or a number too large for the compute dtype.

        Reads `rows` on the CPU, before they are uploaded: on the device the check would have to wait for the result.
        """
        if rows.dtype == self._span.options.dtype and is_finite(rows):
            return
        largest = torch.finfo(self._span.options.dtype).max
        if _within(rows, largest):
            return
        first = 0
        for item in items:
            if not _within(rows[first : first + item.rows], largest):
                name = item.session.hex()[:8]
                text = f"session {name} sent numbers that are not finite in {self._native}"
                raise NotFinite(text, item.session)
            first += item.rows

    def _split(self, hidden: Tensor, items: list[StepInput]) -> list[StepResult]:
        """Cut the output (N, hidden) into one result per input, each in the format that the input asked for."""
        wires = [item.wire or self._native for item in items]
        views = {wire: to_bytes(hidden, wire) for wire in set(wires)}
        outputs, row = [], 0
        for item, wire in zip(items, wires, strict=True):
            size = len(views[wire]) // hidden.shape[0]
            outputs.append(StepResult(bytes(views[wire][row * size : (row + item.rows) * size]), wire))
            row += item.rows
        return outputs


def _within(rows: Tensor, largest: float) -> bool:
    """True if all numbers are in [-largest, largest]; NaN never is."""
    if not rows.numel():
        return True
    low, high = rows.aminmax()  # one pass; NaN in the input makes both NaN
    return bool(low >= -largest) and bool(high <= largest)
