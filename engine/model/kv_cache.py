"""The KV cache of a span: one pool of token slots under a byte budget, leased to sessions in pages.

A lease prefers neighbouring pages, because a session whose slots are contiguous needs no copy for attention. Leases
that begin with the same tokens can share pages (`KVLease.fork`). Shared pages are full and never written: a lease
writes from its length on, and a truncation that reaches into a shared page replaces it by a copy first. The pool knows
no time: `app.serving` decides which idle sessions to close, and which sessions may share.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from engine.budget import kv_bytes_per_token, unquantised
from engine.config import ModelConfig
from engine.errors import CacheFull, SessionError

PAGE_TOKENS = 64


class Pages:
    """Free and used pages and how many leases hold each; hands out runs of neighbours if there are any."""

    def __init__(self, count: int) -> None:
        self._free = bytearray(b"\1" * count)
        self._holders = array("L", bytes(array("L").itemsize * count))
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

    def holders(self, page: int) -> int:
        """Number of leases that hold a page."""
        return self._holders[page]

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
        held = self.capacity
        self._set_pages(self.pages + taken)
        self._clear(held, self.capacity)

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
        lease.length, lease.promised = length, len(lease.pages)
        self.pool.leases.add(lease)
        return lease

    def read(self, blocks: slice, start: int, stop: int) -> Tensor:
        """Copy the keys and values of positions [start, stop): (blocks, 2, kv_heads, tokens, head_dim)."""
        if self.closed or not 0 <= start < stop <= self.length:
            raise SessionError(f"cannot read tokens {start}:{stop} of a session of {self.length}")
        kept = [tensor for cache in self.pool.blocks[blocks] for tensor in (cache.keys, cache.values)]
        if self.first_slot is not None:
            kept = [tensor.narrow(2, self.first_slot + start, stop - start) for tensor in kept]
        else:
            slots = self.slots(start, stop)
            kept = [tensor.index_select(2, slots) for tensor in kept]
        copies = torch.cat(kept)
        return copies.view(-1, 2, *copies.shape[1:])

    def write(self, blocks: slice, numbers: Tensor) -> None:
        """Append tokens with these keys and values, in the form that `read` gives; raises `CacheFull` without room."""
        count = numbers.shape[3]
        self.reserve(self.length + count)
        slots = None if self.first_slot is not None else self.slots(self.length, self.length + count)
        for cache, both in zip(self.pool.blocks[blocks], numbers.to(self.pool.device), strict=True):
            for tensor, new in zip((cache.keys, cache.values), both, strict=True):
                if slots is not None:
                    tensor.index_copy_(2, slots, new.unsqueeze(0))
                elif self.first_slot is not None:
                    tensor.narrow(2, self.first_slot + self.length, count).copy_(new)
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
        for index in shared:
            self._clear(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
        if shared[0] == first and length > first * PAGE_TOKENS:
            self.pool.copy_slots(kept, self.slots(first * PAGE_TOKENS, length))

    def close(self) -> None:
        """Return all pages to the pool; closing twice is harmless."""
        if not self.closed:
            self.closed = True
            self.pool.pages.give_back(self.pages)
            self.pool.leases.discard(self)
            self._set_pages([])

    def _clear(self, start: int, stop: int) -> None:
        """Zero positions [start, stop) in every block, if the pool's steps read slots that were not written yet."""
        if self.pool.clears_slots and start < stop:
            slots = self.slots(start, stop)
            for cache in self.pool.blocks:
                cache.keys.index_fill_(2, slots, 0)
                cache.values.index_fill_(2, slots, 0)

    def _set_pages(self, pages: list[int]) -> None:
        self.pages = pages
        one_run = all(b == a + 1 for a, b in pairwise(pages))
        self.first_slot = (pages[0] * PAGE_TOKENS if pages else 0) if one_run else None

    def slots(self, start: int, stop: int) -> Tensor:
        """Pool slots of positions [start, stop), on the pool's device."""
        if self.first_slot is not None:
            return torch.arange(self.first_slot + start, self.first_slot + stop, device=self.pool.device)
        positions = torch.arange(start, stop)
        pages = torch.tensor(self.pages, dtype=torch.int64)
        return (pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS).to(self.pool.device)


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
    """Keys and values of one block, each (1, kv_heads, slots, head_dim) as attention takes it."""

    keys: Tensor
    values: Tensor


class KVPool:
    """Keys and values of every block of a span, for all sessions."""

    def __init__(
        self, config: ModelConfig, n_blocks: int, budget_bytes: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        per_token = n_blocks * kv_bytes_per_token(config, unquantised(dtype.itemsize))
        self.pages = Pages(max(budget_bytes // (per_token * PAGE_TOKENS), 0))
        self.total_tokens = self.pages.free_count * PAGE_TOKENS
        self.bytes_per_token = per_token
        self.device = device
        self.leases: set[KVLease] = set()
        # True: slots are zeroed when they are leased or dropped. For steps that read whole pages: NaN or infinity of an
        # earlier session in a masked slot would make the row NaN.
        self.clears_slots = False
        # One extra page that is never leased: rows that only pad a batch write there.
        self.scratch_page = self.pages.free_count
        shape = (1, config.n_kv_heads, self.total_tokens + PAGE_TOKENS, config.head_dim)
        # On CPU, empty memory is committed only when written, and only written slots are read. On other devices masked
        # slots are read too and must not hold NaN.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.blocks = [BlockCache(*(make(shape, device=device, dtype=dtype) for _ in "kv")) for _ in range(n_blocks)]

    def keep(self, part: slice) -> None:
        """Free the keys and values of all blocks but these; leases stay."""
        self.bytes_per_token = self.bytes_per_token // len(self.blocks) * len(self.blocks[part])
        self.blocks = self.blocks[part]

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        """Copy the keys and values of these slots in every block."""
        for cache in self.blocks:
            for kept in (cache.keys, cache.values):
                kept.index_copy_(2, target, kept.index_select(2, source))

    def tokens_freed_by(self, leases: Iterable[KVLease]) -> int:
        """Slots that would be free if these leases were closed: a page that another lease shares would not be."""
        held = Counter(page for lease in leases for page in lease.pages)
        return PAGE_TOKENS * sum(self.pages.holders(page) == count for page, count in held.items())

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
