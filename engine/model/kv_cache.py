"""The KV cache of a span: one pool of token slots under a byte budget, leased to sessions in pages.

A lease prefers neighbouring pages, because a session whose slots are contiguous needs no copy for attention. Leases
that begin with the same tokens can share pages (`KVLease.fork`). Shared pages are full and never written: a lease
writes from its length on, and a truncation that reaches into a shared page replaces it by a copy first. The pool knows
no time: `app.serving` decides which idle sessions to close, and which sessions may share.

A cache in 8 bits has each key and value of a head and token as multiples of a scale, its largest number / 127, so each
number is off by half a scale at most. A token's own key and value are read back from the cache too, so that a prompt
is computed in chunks as it is token by token. But keys that differ in their last bit can be rounded to different
multiples, so results of the two differ by more than without: by 0.008 of their length after 30 blocks of SmolLM2.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.budget import SCALE_BYTES, CacheFormat, Precision, kv_bytes_per_token
from engine.config import ModelConfig
from engine.errors import CacheFull, SessionError

PAGE_TOKENS = 64
Slots = range | Tensor  # of a pool: neighbours, or one by one
_LARGEST = 127  # multiple of a scale
SMALLEST_SCALE = 2.0**-100  # so that zeros can be divided by it


class Pages:
    """Free and used pages and how many leases hold each; hands out runs of neighbours if there are any."""

    def __init__(self, count: int, *, are_zero: bool = False) -> None:
        self._free = bytearray(b"\1" * count)
        self._holders = array("L", bytes(array("L").itemsize * count))
        self._written = bytearray((b"\0" if are_zero else b"\1") * count)  # 1: it may hold anything but zeros
        self.free_count = count

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        """Take `count` pages, if possible one run (right after page `after`); None if there are too few."""
        if count > self.free_count:
            return None
        run = b"\1" * count
        start = -1 if after is None or not self._free.startswith(run, after + 1) else after + 1
        if start < 0:
            start = self._free.find(run)
        pages = list(range(start, start + count)) if start >= 0 else self._scattered(count)
        for page in pages:
            self._free[page], self._holders[page] = 0, 1
        self.free_count -= count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each of these pages."""
        for page in pages:
            assert not self._free[page], "only pages in use are shared"
            self._holders[page] += 1

    def mark_written(self, pages: Iterable[int]) -> None:
        """Note that these pages do not hold zeros any more."""
        for page in pages:
            self._written[page] = 1

    def take_written(self, pages: Iterable[int]) -> list[int]:
        """Return those of these pages that may not hold zeros, which are to be zeroed now."""
        found = [page for page in pages if self._written[page]]
        for page in found:
            self._written[page] = 0
        return found

    def holders(self, page: int) -> int:
        """Number of leases that hold a page."""
        return self._holders[page]

    def all_holders(self) -> np.ndarray:
        """Return the number of leases that hold each page, in memory that changes with it."""
        return np.frombuffer(self._holders, dtype=f"u{self._holders.itemsize}")

    def _scattered(self, count: int) -> list[int]:
        pages: list[int] = []
        page = -1
        while len(pages) < count:
            page = self._free.find(b"\1", page + 1)
            pages.append(page)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Remove a holder from each of these pages; those without any are free again."""
        for page in pages:
            assert not self._free[page], "a page was given back twice"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page] = 1
                self.free_count += 1


@dataclass(eq=False)
class KVLease:
    """One session's part of the pool: its pages in order, and how many tokens they hold."""

    pool: KVPool
    pages: list[int] = field(default_factory=list)
    length: int = 0
    closed: bool = False
    # First slot if the pages are contiguous, else None.
    first_slot: int | None = 0
    # Pages reserved by `open`: a truncated session keeps them for later tokens.
    promised: int = 0
    _numbers: tuple[list[int], np.ndarray] | None = None  # `pages`, and the same as an array

    @property
    def capacity(self) -> int:
        """Tokens that fit into the leased pages."""
        return len(self.pages) * PAGE_TOKENS

    def reserve(self, tokens: int) -> None:
        """Lease pages until `tokens` fit; raises `CacheFull` and changes nothing if there are too few."""
        if self.closed:
            raise SessionError("the session is closed: open it again")
        missing = -(-tokens // PAGE_TOKENS) - len(self.pages)
        if missing <= 0:
            return
        taken = self.pool.pages.take(missing, after=self.pages[-1] if self.pages else None)
        if taken is None:
            raise CacheFull(
                f"no room for {tokens} tokens: {self.pool.free_tokens} of {self.pool.total_tokens} cache slots are free"
            )
        self._set_pages(self.pages + taken)
        self._clear_pages(taken)

    def truncate(self, length: int) -> None:
        """Drop all tokens from position `length` on; return emptied pages beyond the reserved ones to the pool.

        Raises `CacheFull` and changes nothing if dropped tokens lie in shared pages and there is no room for copies.
        """
        if not 0 <= length <= self.length:
            raise SessionError(f"cannot cut a session of {self.length} tokens to {length}")
        self._unshare(length)
        self._clear(length, self.length)
        self.length = length
        self._shrink()

    def resize(self, tokens: int) -> None:
        """Reserve pages for `tokens` tokens instead of what `open` was asked for; cached tokens stay.

        Raises `CacheFull` and changes nothing without room.
        """
        self.reserve(tokens)
        self.promised = -(-tokens // PAGE_TOKENS)
        self._shrink()

    def fork(self, length: int, tokens: int) -> KVLease:
        """Lease room for a session of `tokens` tokens that begins with this one's first `length` tokens.

        Both share the full pages of these; the rest of the last page is copied. Raises `CacheFull` without room.
        """
        if self.closed or not 0 <= length <= min(self.length, tokens):
            raise SessionError(f"cannot begin a session of {tokens} tokens with {length} of {self.length}")
        full = length // PAGE_TOKENS
        lease = KVLease(self.pool)
        lease._set_pages(self.pages[:full])
        self.pool.pages.share(lease.pages)
        try:
            lease.reserve(tokens)
        except CacheFull:
            self.pool.pages.give_back(lease.pages)
            raise
        if length > full * PAGE_TOKENS:
            self.pool.copy_slots(self.slots(full * PAGE_TOKENS, length), lease.slots(full * PAGE_TOKENS, length))
            lease.mark_written(full * PAGE_TOKENS, length)
        lease.length, lease.promised = length, len(lease.pages)
        self.pool.leases.add(lease)
        return lease

    def read(self, blocks: slice, start: int, stop: int) -> Tensor:
        """Copy the keys and values of positions [start, stop) as they are kept: (blocks, 2, kv_heads, tokens, width).

        The width is head_dim or, of a cache in 8 bits, that and the bytes of a scale (`stored_form`).
        """
        if self.closed or not 0 <= start < stop <= self.length:
            raise SessionError(f"cannot read tokens {start}:{stop} of a session of {self.length}")
        slots = self.places(start, stop)
        copies = torch.cat([stored for cache in self.pool.blocks[blocks] for stored in cache.stored(slots)])
        return copies.view(-1, 2, *copies.shape[1:])

    def write(self, blocks: slice, numbers: Tensor) -> None:
        """Append tokens with these keys and values, in the form that `read` gives; raises `CacheFull` without room."""
        count = numbers.shape[3]
        self.reserve(self.length + count)
        slots = self.places(self.length, self.length + count)
        self.mark_written(self.length, self.length + count)
        for cache, both in zip(self.pool.blocks[blocks], numbers.to(self.pool.device), strict=True):
            cache.restore(slots, both)
        self.length += count

    def _shrink(self) -> None:
        keep = max(-(-self.length // PAGE_TOKENS), self.promised)
        if keep < len(self.pages):
            self.pool.pages.give_back(self.pages[keep:])
            self._set_pages(self.pages[:keep])

    def _unshare(self, length: int) -> None:
        """Replace shared pages that hold positions from `length` on by pages of this lease alone."""
        pool, first = self.pool.pages, length // PAGE_TOKENS
        shared = [index for index in range(first, len(self.pages)) if pool.holders(self.pages[index]) > 1]
        if not shared:
            return
        fresh = pool.take(len(shared))
        if fresh is None:
            raise CacheFull(f"no room for copies of {len(shared)} shared pages, {self.pool.free_tokens} slots are free")
        kept = self.slots(first * PAGE_TOKENS, length)
        pages = list(self.pages)
        for index, page in zip(shared, fresh, strict=True):
            pages[index] = page
        pool.give_back([self.pages[index] for index in shared])
        self._set_pages(pages)
        self._clear_pages(fresh)
        if shared[0] == first and length > first * PAGE_TOKENS:
            self.pool.copy_slots(kept, self.slots(first * PAGE_TOKENS, length))
            self.mark_written(first * PAGE_TOKENS, length)

    def close(self) -> None:
        """Return all pages to the pool; closing twice is harmless."""
        if not self.closed:
            self.closed = True
            self.pool.pages.give_back(self.pages)
            self.pool.leases.discard(self)
            self._set_pages([])

    def mark_written(self, start: int, stop: int) -> None:
        """Note that positions [start, stop) are written, or about to be."""
        self.pool.pages.mark_written(self.pages[start // PAGE_TOKENS : -(-stop // PAGE_TOKENS)])

    def _clear(self, start: int, stop: int) -> None:
        """Zero positions [start, stop), which were written to, if the pool's steps read whole pages."""
        if self.pool.clears_slots and start < stop:
            self.pool.clear(self.slots(start, stop))

    def _clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages that were just leased, as far as somebody has written to them.

        So to lease much and write nothing, again and again, costs the device nothing.
        """
        if self.pool.clears_slots and (written := self.pool.pages.take_written(pages)):
            starts = torch.tensor(written, device=self.pool.device)[:, None] * PAGE_TOKENS
            self.pool.clear((starts + torch.arange(PAGE_TOKENS, device=self.pool.device)).flatten())

    def numbers(self) -> np.ndarray:
        """Return the pages as an array, made once; another thread may change the lease meanwhile."""
        pages, made = self.pages, self._numbers
        if made is None or made[0] is not pages:
            made = self._numbers = pages, np.array(pages, dtype=np.int64)
        return made[1]

    def _set_pages(self, pages: list[int]) -> None:
        self.pages = pages
        one_run = all(b == a + 1 for a, b in pairwise(pages))
        self.first_slot = (pages[0] * PAGE_TOKENS if pages else 0) if one_run else None

    def slots(self, start: int, stop: int) -> Tensor:
        """Pool slots of positions [start, stop), one by one, on the pool's device."""
        if self.first_slot is not None:
            return torch.arange(self.first_slot + start, self.first_slot + stop, device=self.pool.device)
        positions = torch.arange(start, stop)
        pages = torch.tensor(self.pages, dtype=torch.int64)
        return (pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS).to(self.pool.device)

    def places(self, start: int, stop: int) -> Slots:
        """Pool slots of positions [start, stop): a range if they are neighbours."""
        if self.first_slot is not None:
            return range(self.first_slot + start, self.first_slot + stop)
        return self.slots(start, stop)


@dataclass(frozen=True)
class Segment:
    """`count` new tokens of one session, the first at position `start`."""

    lease: KVLease
    start: int
    count: int

    @property
    def stop(self) -> int:
        """Length of the session after the step."""
        return self.start + self.count


@dataclass(frozen=True)
class BlockCache:
    """Keys and values of one block, each (1, kv_heads, slots, head_dim): numbers, or int8 multiples of the scales."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None  # (1, kv_heads, slots, 1) float32, for a cache in 8 bits
    value_scales: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept; slots are the third dimension of each."""
        kept = (self.keys, self.values, self.key_scales, self.value_scales)
        return [tensor for tensor in kept if tensor is not None]

    def write(self, slots: Slots, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values of some tokens, each (1, kv_heads, tokens, head_dim)."""
        if self.key_scales is not None and self.value_scales is not None:
            multiples, scales = rounded(torch.cat((keys, values)))
            (keys, values), (key_scales, value_scales) = multiples.split(1), scales.split(1)
            _put(self.key_scales, slots, key_scales)
            _put(self.value_scales, slots, value_scales)
        _put(self.keys, slots, keys)
        _put(self.values, slots, values)

    def read(self, slots: Slots, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some slots as numbers, each (1, kv_heads, slots, head_dim).

        They are views of the cache if it holds numbers and the slots are neighbours; `dtype` is for a cache in 8 bits.
        """
        keys, values = _part(self.keys, slots), _part(self.values, slots)
        if self.key_scales is None or self.value_scales is None:
            return keys, values
        # In place: multiplied with the exact scale, and rounded to `dtype` once.
        return (
            keys.to(dtype).mul_(_part(self.key_scales, slots)),
            values.to(dtype).mul_(_part(self.value_scales, slots)),
        )

    def stored(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some slots as they are kept, each (1, kv_heads, slots, width)."""
        keys, values = _part(self.keys, slots), _part(self.values, slots)
        if self.key_scales is None or self.value_scales is None:
            return keys, values
        return (
            torch.cat((keys, _part(self.key_scales, slots).view(torch.int8)), dim=-1),
            torch.cat((values, _part(self.value_scales, slots).view(torch.int8)), dim=-1),
        )

    def restore(self, slots: Slots, both: Tensor) -> None:
        """Write what `stored` gave: (2, kv_heads, tokens, width), the keys first."""
        head_dim = self.keys.shape[3]
        _put(self.keys, slots, both[:1, ..., :head_dim])
        _put(self.values, slots, both[1:, ..., :head_dim])
        if self.key_scales is not None and self.value_scales is not None:
            scales = scales_of(both, head_dim)
            _put(self.key_scales, slots, scales[:1])
            _put(self.value_scales, slots, scales[1:])


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (…, head_dim) as whole multiples of a scale for each, up to 127, and the scales (…, 1) in float32."""
    rows = rows.float()
    scales = torch.linalg.vector_norm(rows, float("inf"), dim=-1, keepdim=True).div_(_LARGEST).clamp_(SMALLEST_SCALE)
    return rows.div(scales).round_(), scales


def stored_form(config: ModelConfig, dtype: torch.dtype, cache: CacheFormat) -> tuple[torch.dtype, int]:
    """Return the type and the width of a stored key or value: head_dim numbers or, in 8 bits, that and a scale."""
    return (dtype, config.head_dim) if cache == "own" else (torch.int8, config.head_dim + SCALE_BYTES)


def scales_of(stored: Tensor, head_dim: int) -> Tensor:
    """Return the scales (…, 1) of keys or values that are stored in 8 bits (…, width)."""
    return stored[..., head_dim:].contiguous().view(torch.float32)


def _part(kept: Tensor, slots: Slots) -> Tensor:
    if isinstance(slots, range):
        return kept.narrow(2, slots.start, len(slots))
    return kept.index_select(2, slots)


def _put(kept: Tensor, slots: Slots, new: Tensor) -> None:
    if isinstance(slots, range):
        kept.narrow(2, slots.start, len(slots)).copy_(new)
    else:
        kept.index_copy_(2, slots, new.to(kept.dtype))


class KVPool:
    """Keys and values of every block of a span, for all sessions."""

    def __init__(
        self,
        config: ModelConfig,
        n_blocks: int,
        budget_bytes: int,
        device: torch.device,
        dtype: torch.dtype,
        cache: CacheFormat = "own",
    ) -> None:
        per_token = n_blocks * kv_bytes_per_token(config, Precision(dtype.itemsize, dtype.itemsize, cache=cache))
        # On CPU, empty memory is committed only when written, and only written slots are read. On other devices masked
        # slots are read too and must not hold NaN.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.pages = Pages(max(budget_bytes // (per_token * PAGE_TOKENS), 0), are_zero=make is torch.zeros)
        self.total_tokens = self.pages.free_count * PAGE_TOKENS
        self.bytes_per_token = per_token
        self.device = torch.empty(0, device=device).device  # with its number: tensors on "cuda" are on "cuda:0"
        self.dtype = dtype  # of the numbers that attention computes with
        self.cache = cache
        self.leases: set[KVLease] = set()
        # True: slots are zeroed when they are leased or dropped. For steps that read whole pages: NaN or infinity of an
        # earlier session in a masked slot would make the row NaN.
        self.clears_slots = False
        # One extra page that is never leased: rows that only pad a batch write there.
        self.scratch_page = self.pages.free_count
        shape = (1, config.n_kv_heads, self.total_tokens + PAGE_TOKENS)

        def block_cache() -> BlockCache:
            kept = torch.int8 if cache == "int8" else dtype
            both = [make(*shape, config.head_dim, device=device, dtype=kept) for _ in "kv"]
            if cache == "int8":
                both += [make(*shape, 1, device=device, dtype=torch.float32) for _ in "kv"]
            return BlockCache(*both)

        self.blocks = [block_cache() for _ in range(n_blocks)]

    def keep(self, part: slice) -> None:
        """Free the keys and values of all blocks but these; leases stay."""
        self.bytes_per_token = self.bytes_per_token // len(self.blocks) * len(self.blocks[part])
        self.blocks = self.blocks[part]

    def clear(self, slots: Tensor) -> None:
        """Zero these slots in every block."""
        for cache in self.blocks:
            for kept in cache.tensors:
                kept.index_fill_(2, slots, 0)

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy the keys and values of these slots in every block."""
        for cache in self.blocks:
            for kept in cache.tensors:
                kept.index_copy_(2, target, kept.index_select(2, source))

    def tokens_freed_by(self, leases: Iterable[KVLease]) -> int:
        """Slots that would be free if these leases were closed: a page that another lease shares would not be.

        Every order for a session asks this, and hundreds of leases may share thousands of pages.
        """
        numbers = [lease.numbers() for lease in leases]
        if not numbers or not self.total_tokens:
            return 0
        held = np.bincount(np.concatenate(numbers), minlength=self.scratch_page)
        return PAGE_TOKENS * int(((held > 0) & (held == self.pages.all_holders())).sum())

    def open(self, expected_tokens: int = 0) -> KVLease:
        """Lease room for a new session; raises `CacheFull` if there is none."""
        lease = KVLease(self)
        lease.reserve(expected_tokens)
        lease.promised = len(lease.pages)
        self.leases.add(lease)
        return lease

    @property
    def free_tokens(self) -> int:
        """Slots that no session has leased."""
        return self.pages.free_count * PAGE_TOKENS


def page_table(rows: int, pages: int, segments: Sequence[Segment], scratch_page: int) -> Tensor:
    """Return (rows, 1 + pages) int32: position and pages of each row; unused rows point at the scratch page."""
    blank = [0] + [scratch_page] * pages
    places = row_places(segments)
    table = [[position, *lease.pages, *blank[1 + len(lease.pages) :]] for lease, position in places]
    return torch.tensor(table + [blank] * (rows - len(places)), dtype=torch.int32)


def row_places(segments: Sequence[Segment]) -> list[tuple[KVLease, int]]:
    """Return the session and the position of each row."""
    return [(segment.lease, position) for segment in segments for position in range(segment.start, segment.stop)]
