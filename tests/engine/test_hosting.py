"""From a memory limit to hosted blocks on this machine's CPU."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.core.compute import StepWork, TokenChoice
from engine import hosting
from engine.budget import BFLOAT16, FLOAT32, block_bytes, workspace_bytes
from engine.config import ModelConfig, Rope
from engine.device.kinds import Kind
from engine.device.probe import Device, chosen_devices
from engine.errors import CacheFull, DeviceError, DeviceFull, SessionError
from engine.hosting import (
    DeviceShare,
    HostingPlan,
    HostingWish,
    Weights,
    load_blocks,
    measured_host,
    plan_hosting,
    release,
)
from engine.model.hosted_span import HostedSpan, SessionLease, SessionRows
from engine.model.kv_cache import KVPool
from engine.session_runner import SessionRunner
from engine.sources.base import ModelSource, TensorEntry
from engine.sources.opening import open_source
from engine.stored_form import stored_bytes
from engine.swarm_ends import load_swarm_ends
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_source("tiny-random", Path(tmp_path_factory.mktemp("cache")))


def test_a_limit_decides_how_many_blocks_are_hosted(tiny: ModelSource) -> None:
    assert plan_hosting(tiny.config, "F32", HostingWish("cpu")).blocks == tiny.config.n_blocks
    assert plan_hosting(tiny.config, "F32", HostingWish("cpu", 0)).blocks == 0
    plan = plan_hosting(tiny.config, "F32", HostingWish("cpu", 3_000_000))
    assert 0 < plan.blocks < tiny.config.n_blocks
    assert plan.budget.total_bytes <= 3_000_000


@pytest.mark.parametrize(
    ("kind", "weights", "wanted", "quantisation"),
    [
        ("mps", "own", 4, "none"),
        ("mps", "int8", 0, "int8"),
        ("mps", "int4", 0, "int4"),
        ("mps", "auto", 1, "none"),  # fits as it is
        ("mps", "auto", 2, "int8"),  # fits only in int8
        ("mps", "auto", 8, "none"),  # does not fit either way
        ("cpu", "auto", 2, "none"),
        ("cpu", "int8", 2, "int8"),
        ("cpu", "int4", 2, "int4"),
    ],
)
def test_fewer_bits_are_chosen_where_they_make_the_difference(
    tiny: ModelSource, monkeypatch: pytest.MonkeyPatch, kind: Kind, weights: Weights, wanted: int, quantisation: str
) -> None:
    plan = _plan_beside(tiny, monkeypatch, kind, HostingWish(kind, None, weights, wanted), None)
    assert plan.quantisation == quantisation


@pytest.mark.parametrize(
    ("kind", "weights", "wanted", "pays", "quantisation"),
    [
        ("cpu", "auto", 1, True, "stored"),  # by measurement
        ("cpu", "auto", 1, False, "none"),
        ("cpu", "own", 1, True, "stored"),
        ("cpu", "int8", 1, True, "int8"),
        ("cpu", "int4", 1, False, "stored"),  # a grid is never rounded again
        ("cuda", "auto", 1, True, "none"),  # products of 16-bit numbers are faster
        ("cuda", "own", 2, True, "none"),
        ("cuda", "int4", 1, True, "stored"),
        ("mps", "own", 2, False, "none"),
        ("mps", "auto", 1, False, "none"),
        ("mps", "auto", 2, True, "stored"),  # fits only in the grid, which loses nothing
    ],
)
def test_weights_stay_in_the_grid_of_their_file_where_that_pays(
    tiny: ModelSource, monkeypatch: pytest.MonkeyPatch, kind: Kind, weights: Weights, wanted: int, pays: bool,
    quantisation: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(hosting, "computes_grids", lambda kind: pays)
    plan = _plan_beside(tiny, monkeypatch, kind, HostingWish(kind, None, weights, wanted), 0.625)
    assert plan.quantisation == quantisation
    assert plan.dtype == (torch.float32 if kind == "cpu" and quantisation == "stored" else torch.bfloat16)


def _plan_beside(
    tiny: ModelSource, monkeypatch: pytest.MonkeyPatch, kind: Kind, wish: HostingWish, stored: float | None
) -> HostingPlan:
    """The plan on a device with room for one and a half blocks in 16 bits."""
    monkeypatch.setattr(hosting, "probe_devices", lambda: [Device(kind, kind, "a device", 8 << 30, 8 << 30)])
    monkeypatch.setattr(hosting, "pick_dtype", lambda device, own: torch.bfloat16)
    room = int(1.5 * block_bytes(tiny.config, BFLOAT16)) + workspace_bytes(tiny.config, BFLOAT16, 512, head=False)
    return plan_hosting(tiny.config, "BF16", replace(wish, cap_bytes=int(room / 0.75)), stored)


def test_the_bytes_of_stored_weights_are_those_of_the_heaviest_block() -> None:
    def block(**kinds: str) -> list[TensorEntry]:
        roles = ("q", "k", "v", "o", "gate", "up", "down")
        return [TensorEntry(role, role, kinds.get(role, "Q4_0"), (64, 256), Path(), 0, 0) for role in roles]

    assert stored_bytes([block()]) == 4.5 / 8
    assert stored_bytes([block(), block(down="Q6_K")]) == pytest.approx((6 * 4.5 + 10) / 7 / 8)
    assert stored_bytes([block(v="Q8_0")]) == pytest.approx((3 * 10 + 4 * 4.5) / 7 / 8)  # q and k are widened with it
    assert stored_bytes([block(o="F16")]) == pytest.approx((6 * 4.5 + 32) / 7 / 8)
    plain = dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), "BF16")
    assert stored_bytes([block(**plain)]) is None


def test_hosted_blocks_run_and_stay_within_the_limit(tiny: ModelSource) -> None:
    plan = plan_hosting(tiny.config, "F32", HostingWish("cpu", 3_000_000))
    seen: list[tuple[int, int]] = []
    hosted = measured_host(load_blocks(tiny, 2, 2 + plan.blocks, plan, lambda done, total: seen.append((done, total))))
    assert seen[-1] == (plan.blocks, plan.blocks)
    assert hosted.weight_bytes <= plan.blocks * block_bytes(tiny.config, FLOAT32)
    assert hosted.throughput.decode_tokens_per_s > 0
    runner = hosted.runner
    assert (runner.start, runner.stop) == (2, 2 + plan.blocks)
    assert runner.kv_free_tokens == runner.kv_total_tokens > 0, "measuring left something in the cache"


def test_the_cache_takes_its_memory_after_the_blocks_and_when_it_may(
    tiny: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[object] = []

    class Pool(KVPool):
        def __init__(self, *args: Any) -> None:
            happened.append("cache")
            super().__init__(*args)

    monkeypatch.setattr("engine.model.span.KVPool", Pool)
    plan = plan_hosting(tiny.config, "F32", HostingWish("cpu"))
    load_blocks(tiny, 0, 2, plan, lambda done, _: happened.append(done), before_cache=lambda: happened.append("free"))
    assert happened == [1, 2, "free", "cache"]


def test_blocks_that_come_later_change_nothing_for_sessions_that_are_open(tiny: ModelSource) -> None:
    plan = plan_hosting(tiny.config, "F32", HostingWish("cpu"))
    whole, growing = load_blocks(tiny, 1, 5, plan), measured_host(load_blocks(tiny, 1, 3, plan, grows_to=5))
    span = growing.span
    hidden = torch.randn(6, tiny.config.hidden_size, generator=torch.Generator().manual_seed(1))
    old = {each: each.open(8) for each in (whole, span)}

    def step(each: HostedSpan, lease: SessionLease, rows: slice, stop: int) -> torch.Tensor:
        return each.step(hidden[rows], [SessionRows(lease, rows.start, rows.stop - rows.start)], (1, stop))

    for each, lease in old.items():
        step(each, lease, slice(0, 4), 3)
    growing.grow(tiny)
    growing.grow(tiny)
    assert growing.runner.stop == 5
    for stop, leases in ((3, old), (5, {each: each.open(8) for each in old})):
        rows = slice(4, 6) if leases is old else slice(0, 6)
        results = [step(each, lease, rows, stop) for each, lease in leases.items()]
        assert torch.equal(*results)
    assert growing.measured().throughput.decode_tokens_per_s > 0


# --- several devices --------------------------------------------------------------------------------------------------


def greedy(source: ModelSource, span: HostedSpan, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy replies to prompts, each read in two chunks, then written together in one batch."""
    ends = load_swarm_ends(source, hosting.CPU_ENDS)
    runner = SessionRunner(span)

    def work(session: bytes, position: int, ids: list[int]) -> StepWork:
        data = memoryview(ends.embed(ids))
        return StepWork(session, span.start, span.stop, position, len(ids), data, ends.dtype, "f32")

    sessions = [bytes([number]) for number in range(len(prompts))]
    writers = [ends.begin(ids, ReplySettings(tokens, Sampling(temperature=0))) for ids in prompts]
    outs = []
    for session, ids in zip(sessions, prompts, strict=True):
        runner.open(session, len(ids) + tokens)
        runner.step([work(session, 0, ids[:2])])
        outs += runner.step([work(session, 2, ids[2:])])
    found: list[list[int]] = [[] for _ in prompts]
    for step in range(tokens):
        choices = [TokenChoice(w, memoryview(out.data), out.dtype) for w, out in zip(writers, outs, strict=True)]
        for own, pieces in zip(found, ends.choose(choices), strict=True):
            own += [piece.token_id for piece in pieces]
        if step < tokens - 1:
            joined = zip(sessions, prompts, found, strict=True)
            outs = runner.step([work(session, len(ids) + step, own[-1:]) for session, ids, own in joined])
    for session in sessions:
        runner.close(session)
    assert span.free_tokens == span.total_tokens
    return found


def two_devices(source: ModelSource, blocks: tuple[int, ...], device: str = "cpu") -> HostingPlan:
    """A plan of two or more devices, all of them this one, with so many blocks each."""
    plan = plan_hosting(source.config, "F32", HostingWish(device))
    share = DeviceShare(plan.device, plan.budget)
    return replace(plan.with_blocks([blocks[0]]), more=tuple(share.with_blocks(n) for n in blocks[1:]))


PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [1, 2, 3, 4]]


@pytest.mark.parametrize("blocks", [pytest.param((4, 4), marks=pytest.mark.soak), (1, 7), (3, 2, 3)])
def test_blocks_on_several_devices_write_the_tokens_of_one(tiny: ModelSource, blocks: tuple[int, ...]) -> None:
    one = load_blocks(tiny, 0, 8, two_devices(tiny, (8,)))
    several = load_blocks(tiny, 0, 8, two_devices(tiny, blocks))
    assert [(part.start, part.stop) for part in several.parts] == [
        (sum(blocks[:n]), sum(blocks[: n + 1])) for n in range(len(blocks))
    ]
    hidden = torch.randn(5, tiny.config.hidden_size, generator=torch.Generator().manual_seed(1))
    states = [span.step(hidden, [SessionRows(span.open(8), 0, 5)]) for span in (one, several)]
    assert torch.equal(*states)
    assert greedy(tiny, load_blocks(tiny, 0, 8, two_devices(tiny, blocks)), PROMPTS, 12) == greedy(
        tiny, load_blocks(tiny, 0, 8, two_devices(tiny, (8,))), PROMPTS, 12
    )


def test_several_devices_grow_block_by_block(tiny: ModelSource) -> None:
    plan = two_devices(tiny, (2, 3))
    whole = load_blocks(tiny, 1, 6, plan)
    progress: list[tuple[int, int]] = []
    growing = load_blocks(tiny, 1, 2, plan, lambda done, total: progress.append((done, total)), grows_to=6)
    assert progress == [(1, 1)]
    assert (growing.stop, growing.is_complete) == (2, False)
    old = growing.open(8)
    hidden = torch.randn(4, tiny.config.hidden_size, generator=torch.Generator().manual_seed(1))
    first = growing.step(hidden[:2], [SessionRows(old, 0, 2)], (1, 2))
    for stop in (3, 4, 5, 6):
        growing.grow(tiny)
        assert growing.stop == stop
    assert growing.is_complete
    assert torch.equal(first, whole.step(hidden[:2], [SessionRows(whole.open(8), 0, 2)], (1, 2)))
    results = [span.step(hidden, [SessionRows(span.open(8), 0, 4)]) for span in (whole, growing)]
    assert torch.equal(*results)
    old.truncate(1)  # its second device has nothing to drop
    assert torch.allclose(growing.step(hidden[1:2], [SessionRows(old, 1, 1)], (1, 2)), first[1:2], atol=1e-5)


def test_a_step_that_fails_on_the_second_device_advances_neither(
    tiny: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = load_blocks(tiny, 0, 8, two_devices(tiny, (4, 4)))
    runner = SessionRunner(span)
    runner.open(b"a", 8)
    work = StepWork(b"a", 0, 8, 0, 2, memoryview(bytes(2 * 4 * tiny.config.hidden_size)), "f32", "f32")
    right = span.parts[1].step

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    monkeypatch.setattr(span.parts[1], "step", full)
    with pytest.raises(DeviceFull, match="memory is full"):
        runner.step([work])
    monkeypatch.setattr(span.parts[1], "step", right)
    before = runner.step([work])
    again = SessionRunner(load_blocks(tiny, 0, 8, two_devices(tiny, (4, 4))))
    again.open(b"a", 8)
    assert before == again.step([work])


def test_a_cache_of_8_bits_is_hosted_as_it_was_planned(tiny: ModelSource) -> None:
    own, int8 = (
        plan_hosting(tiny.config, "F32", HostingWish("cpu", 50 * 10**6, "own", cache=cache))
        for cache in ("own", "int8")
    )
    spans = [load_blocks(tiny, 0, 8, plan) for plan in (own, int8)]
    tokens = [span.total_tokens for span in spans]
    assert tokens[1] > 2.5 * tokens[0]
    for plan, found in zip((own, int8), tokens, strict=True):
        assert plan.budget.kv_tokens - 64 < found <= plan.budget.kv_tokens
    assert {cache.keys.dtype for part in spans[1].parts for cache in part.pool.blocks} == {torch.int8}
    hidden = torch.randn(20, tiny.config.hidden_size)
    exact, rounded = (span.step(hidden, [SessionRows(span.open(20), 0, 20)]) for span in spans)
    assert 0 < (rounded - exact).norm() < 0.02 * exact.norm()


def test_a_session_gets_cache_on_all_devices_or_none(tiny: ModelSource) -> None:
    plan = two_devices(tiny, (4, 4))
    small = replace(
        plan.more[0], budget=replace(plan.more[0].budget, kv_bytes=plan.more[0].budget.kv_bytes_per_token * 64)
    )
    span = load_blocks(tiny, 0, 8, replace(plan, more=(small,)))
    assert span.total_tokens == 64
    with pytest.raises(CacheFull):
        span.open(65)
    assert [part.pool.free_tokens for part in span.parts] == [part.pool.total_tokens for part in span.parts]


def test_a_session_begins_with_tokens_of_another_on_all_devices(tiny: ModelSource) -> None:
    span, fresh = (load_blocks(tiny, 0, 8, two_devices(tiny, (4, 4))) for _ in range(2))
    hidden = torch.randn(20, tiny.config.hidden_size, generator=torch.Generator().manual_seed(1))
    first, alone = span.open(24), fresh.open(24)
    span.step(hidden[:18], [SessionRows(first, 0, 18)])
    expected = [
        fresh.step(hidden[:18], [SessionRows(alone, 0, 18)]),
        fresh.step(hidden[18:], [SessionRows(alone, 18, 2)]),
    ]
    second = span.fork(first, 18, 24)
    first.truncate(3)
    assert torch.equal(span.step(hidden[18:], [SessionRows(second, 18, 2)]), expected[1])
    with pytest.raises(SessionError):
        span.fork(first, 4, 24)
    with pytest.raises(CacheFull):
        span.fork(second, 4, 10**9)
    first.close()
    second.resize(40)
    assert span.tokens_freed_by([second]) == span.total_tokens - span.free_tokens
    second.close()
    assert span.free_tokens == span.total_tokens


@pytest.mark.parametrize("blocks", [(8,), pytest.param((4, 4), marks=pytest.mark.soak), (2, 6)])
@pytest.mark.parametrize(
    "kept", [(5, 8), (2, 6), *(pytest.param(kept, marks=pytest.mark.soak) for kept in [(0, 3), (0, 5)])]
)
def test_blocks_are_given_back_and_sessions_over_the_others_go_on(
    tiny: ModelSource, blocks: tuple[int, ...], kept: tuple[int, int]
) -> None:
    span = load_blocks(tiny, 0, 8, two_devices(tiny, blocks))
    hosted = measured_host(span)
    weight_bytes = hosted.weight_bytes
    hidden = torch.randn(6, tiny.config.hidden_size, generator=torch.Generator().manual_seed(1))
    lease, other = span.open(8), span.open(8)
    span.step(hidden[:4], [SessionRows(lease, 0, 4)], kept)
    span.step(hidden[:4], [SessionRows(other, 0, 4)])
    other.close()
    smaller = hosted.keep(*kept)
    assert (smaller.runner.start, smaller.runner.stop) == kept
    assert smaller.weight_bytes == weight_bytes * (kept[1] - kept[0]) // 8
    assert smaller.throughput.decode_tokens_per_s > 0
    found = span.step(hidden[4:], [SessionRows(lease, 4, 2)])
    fresh = load_blocks(tiny, *kept, two_devices(tiny, (kept[1] - kept[0],)))
    own = fresh.open(8)
    fresh.step(hidden[:4], [SessionRows(own, 0, 4)])
    assert torch.equal(found, fresh.step(hidden[4:], [SessionRows(own, 4, 2)]))
    lease.close()
    assert span.free_tokens == span.total_tokens


@pytest.mark.parametrize("blocks", [(8,), pytest.param((4, 4), marks=pytest.mark.soak), (2, 6)])
@pytest.mark.parametrize("kept", [(1, 4), pytest.param((0, 5), marks=pytest.mark.soak), (0, 1)])
def test_a_span_that_still_grows_gives_blocks_back_and_ends_to_grow(
    tiny: ModelSource, blocks: tuple[int, ...], kept: tuple[int, int]
) -> None:
    span = load_blocks(tiny, 0, 5, two_devices(tiny, blocks), grows_to=8)
    smaller = measured_host(span).keep(*kept)
    assert (smaller.runner.start, smaller.runner.stop) == kept
    assert span.is_complete
    assert sum(len(part.pool.blocks) for part in span.parts) == kept[1] - kept[0]
    hidden = torch.randn(4, tiny.config.hidden_size, generator=torch.Generator().manual_seed(1))
    fresh = load_blocks(tiny, *kept, two_devices(tiny, (kept[1] - kept[0],)))
    found, expected = (one.step(hidden, [SessionRows(one.open(4), 0, 4)]) for one in (span, fresh))
    assert torch.equal(found, expected)


GB = 10**9


def cards(*free_gb: int, kind: Kind = "mps") -> list[Device]:
    return [Device(f"{kind}:{number}", kind, "a card", 24 * GB, free * GB) for number, free in enumerate(free_gb)]


@pytest.mark.parametrize(
    ("free_gb", "device", "cap_gb", "expected"),
    [
        ((20, 22), None, None, {"mps:1": 32}),  # fits on one: the one with the most free memory
        ((8, 12), None, None, {"mps:1": 18, "mps:0": 11}),
        ((8, 12), "mps:0", None, {"mps:0": 11}),
        ((8, 12), "mps:0,mps:1", None, {"mps:0": 11, "mps:1": 18}),
        ((8, 12), "mps:1, mps:0", 13, {"mps:1": 18, "mps:0": 3}),  # a cap for all of them
        ((8, 12), None, 9, {"mps:1": 15}),
        ((1, 12), None, None, {"mps:1": 18}),  # nothing fits beside what else runs on the first
        ((1, 1), None, None, {"mps:0": 0}),
        ((24,), "mps:0,mps:0", None, {"mps:0": 32}),  # named twice: half of the memory each
        ((20, 10), "mps:0,mps:1", None, {"mps:0": 22, "mps:1": 10}),  # would fit on one, but both were named
    ],
)
def test_several_cards_are_filled_by_their_free_memory(
    monkeypatch: pytest.MonkeyPatch,
    free_gb: tuple[int, ...],
    device: str | None,
    cap_gb: int | None,
    expected: dict[str, int],
) -> None:
    config = ModelConfig("llama", 32, 4096, 32, 8, 128, 14336, 264, 8192, 1e-5, Rope())
    monkeypatch.setattr(hosting, "probe_devices", lambda: [*cards(*free_gb), *cards(64, kind="cpu")])
    monkeypatch.setattr(hosting, "pick_dtype", lambda device, own: torch.bfloat16)
    plan = plan_hosting(config, "BF16", HostingWish(device, None if cap_gb is None else cap_gb * GB, "own"))
    found: dict[str, int] = {}
    for share in plan.shares:
        found[share.device.id] = found.get(share.device.id, 0) + share.budget.blocks
    assert found == expected
    assert plan.blocks == sum(expected.values())
    assert plan.cap_bytes is None or sum(share.budget.total_bytes for share in plan.shares) <= plan.cap_bytes
    if plan.blocks:
        stops = [stop for _, _, stop in plan.parts(0, plan.blocks)]
        assert stops[-1] == plan.blocks


def test_a_card_that_computes_in_another_format_is_left_out(monkeypatch: pytest.MonkeyPatch, tiny: ModelSource) -> None:
    monkeypatch.setattr(hosting, "probe_devices", lambda: cards(2, 2))
    monkeypatch.setattr(
        hosting, "pick_dtype", lambda device, own: torch.bfloat16 if device == "mps:0" else torch.float32
    )
    assert len(plan_hosting(tiny.config, "BF16", HostingWish(None, 10**6)).shares) == 1
    assert {d.id for d in chosen_devices(None, cards(2, 2))} == {"mps:0", "mps:1"}


def test_an_unknown_device_in_a_list_is_refused() -> None:
    with pytest.raises(DeviceError, match="no device 'mps:7'"):
        chosen_devices("mps:0,mps:7", cards(2, 2))


def test_a_session_that_was_taken_over_frees_nothing_any_more(tiny: ModelSource) -> None:
    """Figures are read while the device's thread takes sessions over."""
    runner = SessionRunner(load_blocks(tiny, 0, 8, two_devices(tiny, (4, 4))))
    runner.open(b"old", 24)
    held = runner.tokens_freed_by([b"old"])
    runner.take_over(b"new", 24, b"old", 0)
    assert (runner.tokens_freed_by([b"old"]), runner.tokens_freed_by([b"old", b"new"])) == (0, held)
    assert held > 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are not known to keep freed memory")
def test_release_returns_what_the_allocator_keeps() -> None:
    """A piece at the end keeps glibc from returning the freed ones before it by itself."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    size = 64 * 2**10  # below the size that gets pages of its own
    pieces = [libc.malloc(size) for _ in range(2000)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces[:-1]:
        libc.free(piece)
    kept = resident_bytes()
    release("cpu")
    assert kept - resident_bytes() > 0.8 * size * len(pieces)
    libc.free(pieces[-1])


FREES_TENSORS = """
import torch
from engine.hosting import release
from tests.engine.test_hosting import resident_bytes

before = resident_bytes()
tensors = [torch.ones(2 << 20) for _ in range(40)]
held = resident_bytes() - before
tensors.clear()
release("cpu")
print(held, resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_release_returns_the_memory_of_tensors() -> None:
    """Torch's allocator for ARM keeps freed memory of its own; a new process has none yet of other tests."""
    done = subprocess.run([sys.executable, "-c", FREES_TENSORS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    held, kept = map(int, done.stdout.split())
    assert held > 300e6
    assert kept < 0.2 * held


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])
