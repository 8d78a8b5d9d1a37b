"""Long computations let other tasks run, and Python's collector rests while they are under way, but never for long."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import trio

from app.core import pieces
from app.core.pieces import Pieces, in_pieces


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


@pytest.fixture
def always_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LONGEST_S", -1.0)


def watching(seen: list[bool], count: int = 3) -> Pieces[str]:
    """Note whether the collector is on."""
    for _ in range(count):
        seen.append(gc.isenabled())
        yield
    return "result"


async def test_the_collector_is_off_meanwhile_and_on_again_at_the_end(always_breaks: None) -> None:
    seen: list[bool] = []
    assert await in_pieces(watching(seen)) == "result"
    assert seen == [False] * 3
    assert gc.isenabled()


async def test_it_stays_off_until_the_last_of_several_ends(always_breaks: None) -> None:
    short: list[bool] = []
    long: list[bool] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_pieces, watching(long, 9))
        nursery.start_soon(in_pieces, watching(short, 2))
    assert not any(short + long)
    assert gc.isenabled()


async def test_computations_that_follow_each_other_without_a_gap_do_not_keep_it_off(
    always_breaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "COLLECTOR_OFF_S", -1.0)
    seen: list[bool] = []
    await in_pieces(watching(seen))
    assert seen == [False, True, True]
    assert gc.isenabled()


async def test_who_turned_it_off_finds_it_off(always_breaks: None) -> None:
    gc.disable()
    await in_pieces(watching([]))
    assert not gc.isenabled()


async def test_an_error_or_a_cancellation_turns_it_on_again(always_breaks: None) -> None:
    def failing() -> Pieces[None]:
        yield
        raise LookupError

    with pytest.raises(LookupError):
        await in_pieces(failing())
    assert gc.isenabled()
    with trio.CancelScope() as scope:
        scope.cancel()
        await in_pieces(watching([]))
    assert gc.isenabled()
