"""The cache's pages and leases: budgets, refusals, truncation, no page lost or lent twice, and numbers in 8 bits."""

from __future__ import annotations

from collections import Counter
from time import process_time
from timeit import repeat
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.budget import CacheFormat, Precision, kv_bytes_per_token
from engine.errors import CacheFull, SessionError
from engine.model.kv_cache import PAGE_TOKENS, KVLease, KVPool, Pages, Segment, rounded
from tests.engine.random_spans import random_span, small_config

CONFIG = small_config()
CPU = torch.device("cpu")
both_forms = pytest.mark.parametrize("form", get_args(CacheFormat))


def pool_of(pages: int, form: CacheFormat = "own") -> KVPool:
    """A pool of so many pages."""
    budget = pages * PAGE_TOKENS * 2 * kv_bytes_per_token(CONFIG, Precision(4.0, 4, cache=form))
    return KVPool(CONFIG, 2, budget, CPU, torch.float32, form)


@both_forms
def test_a_token_takes_as_many_bytes_as_the_budget_says(form: CacheFormat) -> None:
    pool = pool_of(4, form)
    assert pool.total_tokens == 4 * PAGE_TOKENS
    held = sum(tensor.nbytes for cache in pool.blocks for tensor in cache.tensors)
    assert held == (pool.total_tokens + PAGE_TOKENS) * pool.bytes_per_token  # with the scratch page
    assert pool.bytes_per_token == 2 * kv_bytes_per_token(CONFIG, Precision(4.0, 4, cache=form))


def test_the_pool_stays_within_its_budget() -> None:
    pool = pool_of(4)
    assert pool.total_tokens == 4 * PAGE_TOKENS
    with pytest.raises(CacheFull, match="no room for 257 tokens: 256 of 256"):
        pool.open(257)
    assert pool.free_tokens == 256


def test_a_full_pool_refuses_and_a_closed_lease_makes_room() -> None:
    pool = pool_of(2)
    first = pool.open(100)
    with pytest.raises(CacheFull):
        pool.open(1)
    first.close()
    first.close()
    assert pool.open(100).capacity == 128


def test_a_lease_gets_a_run_of_pages_where_there_is_one() -> None:
    pool = pool_of(8)
    first, second = pool.open(64), pool.open(64)
    first.reserve(128)
    assert first.pages == [0, 2]
    assert first.first_slot is None
    second.close()
    third = pool.open(200)
    assert third.first_slot == 3 * PAGE_TOKENS


def test_truncation_gives_back_pages_but_keeps_the_promised_ones() -> None:
    pool = pool_of(8)
    lease = pool.open(100)
    lease.reserve(300)
    lease.length = 300
    lease.truncate(10)
    assert (lease.length, lease.capacity) == (10, 128)
    for wrong in (-1, 11):
        with pytest.raises(SessionError):
            lease.truncate(wrong)


@given(st.data())
def test_no_page_is_lost_or_lent_twice(data: st.DataObject) -> None:
    pages = Pages(12)
    lent: list[list[int]] = []
    for _ in range(30):
        returns: bool = data.draw(st.booleans())
        if lent and returns:
            index: int = data.draw(st.integers(0, len(lent) - 1))
            pages.give_back(lent.pop(index))
        else:
            count: int = data.draw(st.integers(0, 8))
            after = lent[-1][-1] if lent and lent[-1] else None
            taken = pages.take(count, after)
            assert (taken is None) == (count > 12 - sum(map(len, lent)))
            if taken is not None:
                assert len(taken) == count
                lent.append(taken)
        flat = [page for group in lent for page in group]
        assert len(set(flat)) == len(flat)
        assert all(0 <= page < 12 for page in flat)
        assert pages.free_count == 12 - len(flat)


BAD_STEPS: dict[str, Any] = {
    "a gap": (1, 5, 1),
    "a repeat": (1, 2, 1),
    "nothing": (0, 3, 0),
    "too many rows": (2, 3, 1),
    "past the context": (2048, 3, 2048),
}


@pytest.mark.parametrize("case", sorted(BAD_STEPS))
def test_a_step_that_does_not_fit_its_session_is_refused_and_changes_nothing(case: str) -> None:
    rows, start, count = BAD_STEPS[case]
    span = random_span(CONFIG)
    lease = span.open()
    span.step(torch.randn(3, CONFIG.hidden_size), [Segment(lease, 0, 3)])
    before = span.pool.free_tokens
    with pytest.raises(SessionError):
        span.step(torch.randn(rows, CONFIG.hidden_size), [Segment(lease, start, count)])
    assert (lease.length, span.pool.free_tokens) == (3, before)


def test_a_closed_session_cannot_be_continued() -> None:
    span = random_span(CONFIG)
    lease = span.open()
    lease.close()
    with pytest.raises(SessionError, match="closed"):
        span.step(torch.randn(1, CONFIG.hidden_size), [Segment(lease, 0, 1)])


def test_a_session_longer_than_the_context_is_refused_when_it_opens() -> None:
    with pytest.raises(SessionError, match="2049 tokens are more than this model's context of 2048"):
        random_span(CONFIG).open(2049)


def test_a_large_pool_takes_no_memory_until_it_is_used() -> None:
    import psutil

    before = psutil.Process().memory_info().rss
    pool = KVPool(CONFIG, 2, 4 << 30, CPU, torch.float32)
    pool.open(100)
    assert psutil.Process().memory_info().rss - before < 200 << 20


# --- pages that leases share ------------------------------------------------------------------------------------------


def write(lease: KVLease, tokens: list[float]) -> None:
    """Append tokens to a lease, each a number that stands in all its keys and values."""
    lease.reserve(lease.length + len(tokens))
    slots = lease.slots(lease.length, lease.length + len(tokens))
    numbers = torch.tensor(tokens)[None, None, :, None].expand(1, CONFIG.n_kv_heads, -1, CONFIG.head_dim)
    for cache in lease.pool.blocks:
        cache.write(slots, numbers, numbers)
    lease.mark_written(lease.length, lease.length + len(tokens))
    lease.length += len(tokens)


def read(lease: KVLease) -> list[float]:
    """The tokens of a lease; every block must hold the same. All are multiples of 1/256, so rounding them is exact."""
    slots = lease.slots(0, lease.length)
    held = [seen[0, -1, :, -1] for cache in lease.pool.blocks for seen in cache.read(slots, torch.float32)]
    tokens = [(256 * one).round_().div_(256).tolist() for one in held]
    assert all(one == tokens[0] for one in tokens)
    return tokens[0]


@both_forms
def test_a_fork_shares_full_pages_and_copies_the_last(form: CacheFormat) -> None:
    pool = pool_of(8, form)
    first = pool.open(200)
    write(first, [float(number) for number in range(150)])
    second = first.fork(140, 200)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2:] != first.pages[2:]
    assert pool.free_tokens == (8 - 4 - 2) * PAGE_TOKENS
    write(second, [-1.0])
    write(first, [-2.0])
    assert read(second) == [*map(float, range(140)), -1.0]
    assert read(first) == [*map(float, range(150)), -2.0]
    assert pool.tokens_freed_by([first]) == pool.tokens_freed_by([second]) == 2 * PAGE_TOKENS
    assert pool.tokens_freed_by([first, second]) == 6 * PAGE_TOKENS
    first.close()
    assert read(second)[:140] == [*map(float, range(140))]
    second.close()
    assert pool.free_tokens == 8 * PAGE_TOKENS


def test_a_fork_without_room_changes_nothing() -> None:
    pool = pool_of(4)
    first = pool.open(150)
    write(first, [1.0] * 150)
    with pytest.raises(CacheFull):
        first.fork(100, 250)
    assert pool.free_tokens == PAGE_TOKENS
    with pytest.raises(SessionError):
        first.fork(151, 200)
    second = first.fork(128, 192)
    with pytest.raises(CacheFull, match="shared"):
        second.truncate(0)
    assert read(second) == [1.0] * 128
    first.close()
    second.truncate(0)
    assert pool.pages.free_count == 1


@settings(max_examples=30, deadline=None)
@given(st.data(), st.booleans(), st.sampled_from(get_args(CacheFormat)))
def test_no_lease_ever_sees_what_another_writes(data: st.DataObject, clears: bool, form: CacheFormat) -> None:
    pool = pool_of(12, form)
    pool.clears_slots = clears
    held: list[tuple[KVLease, list[float]]] = []
    for number in range(25):
        what = data.draw(st.sampled_from(["open", "fork", "write", "cut", "resize", "close"]))
        lease, tokens = held[data.draw(st.integers(0, len(held) - 1))] if held else (pool.open(0), [])
        try:
            if what == "open" or not held:
                held.append((pool.open(data.draw(st.integers(0, 200))), []))
            elif what == "fork":
                length = data.draw(st.integers(0, lease.length))
                held.append((lease.fork(length, length + data.draw(st.integers(0, 100))), tokens[:length]))
            elif what == "write":
                new = [number + index / 256 for index in range(data.draw(st.integers(1, 150)))]
                write(lease, new)
                tokens += new
            elif what == "cut":
                length = data.draw(st.integers(0, lease.length))
                lease.truncate(length)
                del tokens[length:]
            elif what == "resize":
                lease.resize(data.draw(st.integers(0, 200)))
            else:
                lease.close()
                held = [one for one in held if one[0] is not lease]
        except CacheFull:
            pass
        for one, expected in held:
            assert read(one) == expected
            if clears:  # whole pages are read by some steps: nothing of others may be there
                rest = one.slots(one.length, one.capacity)
                assert not any(kept[:, :, rest].any() for kept in pool.blocks[0].tensors)
        assert pool.pages.free_count == 12 - len({page for one, _ in held for page in one.pages})


def test_pages_that_nobody_wrote_to_are_not_zeroed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leases the whole cache again and again would have the device zero gigabytes each time."""
    pool = pool_of(12)
    pool.clears_slots = True
    zeroed, clear = list[int](), pool.clear

    def counted(slots: torch.Tensor) -> None:
        zeroed.append(len(slots))
        clear(slots)

    pool.open(pool.total_tokens).close()  # a CPU's memory may hold anything at first
    monkeypatch.setattr(pool, "clear", counted)
    for _ in range(3):
        pool.open(pool.total_tokens).close()
    assert zeroed == []
    lease = pool.open(pool.total_tokens)
    write(lease, [1.0] * 65)
    lease.close()
    for _ in range(3):
        pool.open(pool.total_tokens).close()
    assert zeroed == [2 * PAGE_TOKENS]


@both_forms
def test_sessions_that_share_pages_compute_what_they_would_alone(form: CacheFormat) -> None:
    torch.manual_seed(0)
    span = random_span(CONFIG, cache=form)
    prompt, tails = torch.randn(100, CONFIG.hidden_size), [torch.randn(30, CONFIG.hidden_size) for _ in range(3)]
    alone = []
    for tail in tails:
        lease = span.open(130)
        span.step(prompt, [Segment(lease, 0, 100)])
        alone.append(span.step(tail, [Segment(lease, 100, 30)]))
        lease.close()
    source = span.open(100)
    span.step(prompt, [Segment(source, 0, 100)])
    forks = [source.fork(100, 130) for _ in tails]
    together = span.step(torch.cat(tails), [Segment(fork, 100, 30) for fork in forks])
    expected = torch.cat(alone)
    assert (together - expected).norm() <= (1e-6 if form == "own" else ONE_STEP) * expected.norm()


# --- numbers in 8 bits ------------------------------------------------------------------------------------------------

# Keys that differ in the last bit can be rounded to different multiples: some numbers are off by a whole scale then.
# Rounding all of them moves the results of these spans by ten times as much and more.
ONE_STEP = 2e-4


def drawn(seed: int, tokens: int) -> torch.Tensor:
    """Keys of some tokens: most are ordinary, some have outliers, are tiny, huge or zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, CONFIG.n_kv_heads, tokens, CONFIG.head_dim, generator=generator)
    rows *= 10.0 ** torch.randint(-12, 12, (1, CONFIG.n_kv_heads, tokens, 1), generator=generator)
    rows[:, :, ::7, 3] *= 300
    rows[:, :, ::11] = 0
    return rows


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 130), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_number_is_off_by_half_a_scale_at_most(seed: int, tokens: int, scattered: bool, dtype: torch.dtype) -> None:
    pool = KVPool(CONFIG, 2, 1 << 20, CPU, dtype, "int8")
    lease = pool.open(1 if scattered else tokens)
    pool.open(1)
    lease.reserve(tokens)
    assert (lease.first_slot is None) == (scattered and tokens > PAGE_TOKENS)
    keys, values = drawn(seed, tokens).to(dtype), drawn(seed + 1, tokens).to(dtype)
    places = lease.places(0, tokens)
    pool.blocks[1].write(places, keys, values)
    for exact, found in zip((keys, values), pool.blocks[1].read(places, dtype), strict=True):
        scales = exact.float().abs().amax(-1, keepdim=True) / 127
        # Half a scale, and where numbers have 8 significant bits the rounding to these.
        allowed = scales * 0.50001 + exact.float().abs() * (0 if dtype == torch.float32 else 2**-7)
        assert found.dtype == dtype
        assert ((found.float() - exact.float()).abs() <= allowed).all()
        assert (found[exact == 0].abs() <= 1e-30).all()


def test_numbers_that_were_rounded_are_not_changed_by_rounding_them_again() -> None:
    rows = drawn(5, 100)
    multiples, scales = rounded(rows)
    again, same = rounded(multiples * scales)
    assert multiples.abs().max() == 127
    assert torch.equal(multiples.to(torch.int8).float(), multiples)
    assert torch.equal(again, multiples)
    torch.testing.assert_close(same, scales, rtol=1e-6, atol=0)


def test_nan_stays_in_its_token_and_head() -> None:
    pool = pool_of(2, "int8")
    rows = drawn(6, 10)
    rows[0, 1, 4, 2], rows[0, 0, 7, 5] = torch.nan, torch.inf
    pool.blocks[0].write(range(10), rows, rows)
    for found in pool.blocks[0].read(range(10), torch.float32):
        bad = ~found.isfinite().all(dim=-1)
        assert bad.nonzero().tolist() == [[0, 0, 7], [0, 1, 4]]


def test_what_hundreds_of_leases_would_free_is_found_soon() -> None:
    """Every order for a session asks it, and one asker can have 255 sessions that share a long prompt at rest."""
    pool = pool_of(512)
    first = pool.open(256 * PAGE_TOKENS)
    first.length = 256 * PAGE_TOKENS
    leases = [first, *(first.fork(first.length, first.length) for _ in range(254))]

    def one_by_one() -> int:
        held = Counter(page for lease in leases for page in lease.pages)
        return PAGE_TOKENS * sum(pool.pages.holders(page) == count for page, count in held.items())

    assert pool.tokens_freed_by(leases) == one_by_one() == 256 * PAGE_TOKENS
    assert pool.tokens_freed_by(leases[1:]) == pool.tokens_freed_by([]) == 0
    ours_s = min(repeat(lambda: pool.tokens_freed_by(leases), number=10, repeat=5, timer=process_time))
    plain_s = min(repeat(one_by_one, number=10, repeat=5, timer=process_time))
    assert ours_s < plain_s / 4
