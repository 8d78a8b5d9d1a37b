"""A node that rests and works again: its memory, those who ask it, and what it says when it starts paused."""

from __future__ import annotations

import contextlib
import weakref
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import trio

from app.api.event_log import KEPT_NOTES
from app.asker.reply import ReplyText
from app.asker.reply_service import NoModelHere, ReplyRequest
from app.cli.serve import say_ready
from app.config.file import load_config
from app.config.home import Home
from app.config.settings import Value
from app.core.reasons import Reason, because
from app.core.span import Span
from app.courtesy.pause import PauseControl
from app.membership.member import Change, Member
from app.node.active_swarm import PEER_EVENTS_AT_ONCE
from app.node.node import Node
from app.routing.route import NoRoute
from app.snapshot.views import Snapshot
from app.swarm.records import Announcement
from app.training.material import wish_of
from p2p.identity import Identity
from tests.app.node.test_node import QUIET, cache, found_swarm, living, until

__all__ = ["cache"]


def hosted_runner(node: Node) -> weakref.ref[object]:
    """The loaded blocks, without keeping them alive."""
    active_swarm = node._network_owner.active_swarm
    assert active_swarm is not None
    assert active_swarm.block_host is not None
    assert active_swarm.block_host._hosted is not None
    return weakref.ref(active_swarm.block_host._hosted.runner)


async def test_a_pause_frees_the_blocks_and_resuming_loads_them_again(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu", blocks="0:8") as a:
        await until(a, lambda: a.snapshot().state == "serving")
        async with living(tmp_path / "b", cache, str(await a.invite(None))) as b:
            await until(b, lambda: [peer.state for peer in b.snapshot().peers] == ["serving"])
            blocks = hosted_runner(a)
            assert [step.state for step in a.snapshot().steps] == ["done"] * 7
            hardware = a.snapshot().hardware
            assert hardware is not None
            assert (hardware.id, hardware.weights_bytes > 0, hardware.limit_bytes) == ("cpu", True, 10**9)
            assert (await a.pause(None)).by == "hand"
            await until(a, lambda: a.snapshot().state == "paused")
            assert blocks() is None, "the blocks are still in memory"
            shown = a.snapshot()
            assert (shown.start, shown.why and shown.why.code) == (None, "pause_by_hand")
            await until(b, lambda: [peer.state for peer in b.snapshot().peers] == ["paused"])
            a._pause_control.by_rule(Reason("pause_battery", "on battery"))
            a._pause_control.rule_over()
            assert a.snapshot().courtesy.by == "hand", "no rule undoes a person's pause"
            a._pause_control.by_rule(Reason("pause_battery", "on battery"))
            assert (await a.resume()).by == "rule"
            await until(a, lambda: a.snapshot().reason == "on battery")
            a._pause_control.rule_over()
            await until(a, lambda: a.snapshot().state == "serving")
            await until(b, lambda: [peer.state for peer in b.snapshot().peers] == ["serving"])
        await a.drain()
        await until(a, lambda: a.snapshot().state == "paused")
    async with living(tmp_path / "a", cache) as a:
        await until(a, lambda: a.snapshot().state == "paused")  # a restart does not end a person's pause
        await a.resume()
        await until(a, lambda: a.snapshot().state == "client")


@pytest.mark.parametrize("by", ["hand", "rule"])
async def test_a_node_that_is_paused_when_it_starts_says_that_it_is_up_and_why_it_does_not_host(
    tmp_path: Path, cache: Path, by: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    said = "up and hosts nothing for now: paused by hand; `shoal resume`"
    found_swarm(tmp_path, cache, "home")
    flags: dict[str, Value] = {**QUIET, "max_vram": 10**9, "device": "cpu"}
    if by == "hand":
        await PauseControl(Home(tmp_path).pause_file, lambda: None).by_hand(None)
    else:
        flags["pause_times"] = "mon-sun 00:00-24:00"
    is_ready = trio.Event()

    def ready(snapshot: Snapshot) -> None:
        say_ready(snapshot)
        is_ready.set()

    node = Node(Home(tmp_path), load_config(Home(tmp_path).config_file, {}).with_flags(flags), cache, ready)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run)
        with trio.fail_after(60):
            await is_ready.wait()
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("ready paused swarm=home#")
        assert line.endswith({"hand": "(paused by hand)", "rule": "(paused by timetable)"}[by])
        assert node.snapshot().start is None
        with trio.fail_after(30):
            while by == "hand" and said not in caplog.text:  # noqa: ASYNC110
                await trio.sleep(0.01)
        node.stop()
    assert (said in caplog.text) is (by == "hand")


async def ask(node: Node) -> int:
    """How many tokens a question brings."""
    request = ReplyRequest(prompt=(1, 2, 3), max_tokens=3, temperature=0.0)
    return len([event async for event in node.reply(request) if isinstance(event, ReplyText)])


@pytest.mark.soak
async def test_those_who_asked_before_a_pause_ask_in_vain_while_it_lasts_and_not_after_it(
    tmp_path: Path, cache: Path
) -> None:
    """An asker keeps its streams to hops: they must not lead to blocks that are gone."""
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu", blocks="0:8") as a:
        await until(a, lambda: a.snapshot().state == "serving")
        async with living(tmp_path / "b", cache, str(await a.invite(None))) as b:
            await until(b, lambda: [peer.state for peer in b.snapshot().peers] == ["serving"])
            assert (await ask(a), await ask(b)) == (3, 3)
            await a.pause(None)
            await until(b, lambda: [peer.state for peer in b.snapshot().peers] == ["paused"])
            unused = b.snapshot().peers[0].unused
            assert unused is not None
            assert (unused.code, unused.peers) == ("peer_paused", (a.snapshot().peer_id,))
            with pytest.raises(NoRoute) as refused:
                await ask(a)
            assert refused.value.reason.code == "no_route"
            await a.resume()
            await until(b, lambda: [peer.state for peer in b.snapshot().peers] == ["serving"])
            assert (await ask(a), await ask(b)) == (3, 3)
            assert b.snapshot().peers[0].unused is None


async def test_a_reply_over_the_own_blocks_is_one_session_wherever_it_is_counted(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu", blocks="0:8") as a:
        await until(a, lambda: a.snapshot().state == "serving")
        async with aclosing(a.reply(ReplyRequest(prompt=(1, 2, 3), max_tokens=200, temperature=0.0))) as events:
            async for event in events:
                if isinstance(event, ReplyText):
                    shown = a.snapshot()
                    assert (shown.sessions, [one.role for one in shown.active_sessions]) == (1, ["asking"])
                    break
        await until(a, lambda: a.snapshot().sessions == 0)
        assert a.snapshot().active_sessions == ()


async def test_a_failure_to_host_is_forgotten_when_no_hosting_is_wanted(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, device="cpu") as a:
        a._settings._flags.pop("max_vram")
        await a.set_config("max_vram", "1KB")
        await until(a, lambda: any(step.state == "failed" for step in a.snapshot().steps))
        await a.set_config("max_vram", "0")
        await until(a, lambda: (why := a.snapshot().why) is not None and why.code == "limit_zero")
        assert {step.state for step in a.snapshot().steps} == {"done"}


async def test_a_changed_memory_limit_holds_at_once_and_zero_is_no_dead_end(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, device="cpu", blocks="0:8") as a:
        a._settings._flags.pop("max_vram")  # as if it had come from the file
        await a.set_config("max_vram", str(10**9))
        await until(a, lambda: a.snapshot().state == "serving")
        blocks = hosted_runner(a)
        await a.set_config("max_vram", "0")
        await until(a, lambda: a.snapshot().state == "client")
        assert blocks() is None, "the blocks are still in memory"
        shown = a.snapshot()
        assert (shown.start, shown.why and shown.why.code) == (None, "limit_zero")
        assert shown.hardware is not None
        assert (shown.hardware.id, shown.hardware.limit_bytes, shown.hardware.weights_bytes) == ("cpu", 0, 0)
        await a.set_config("max_vram", str(2 * 10**9))
        await until(a, lambda: a.snapshot().state == "serving")
        hardware = a.snapshot().hardware
        assert hardware is not None
        assert hardware.limit_bytes == 2 * 10**9
        await a.set_config("name", "kelp")  # another setting restarts nothing
        await a.set_config("max_vram", str(2 * 10**9))
        assert a.snapshot().state == "serving"


def _member(blocks: int, growing: Span | None = None, *, peer: str = "friend", home: str = "") -> Member:
    """A member that serves its first blocks."""
    span = Span(0, blocks) if blocks else None
    said = Announcement(peer, blocks, 2**50, "swarm", "serving", span, growing=growing)
    return Member(peer, said, "alive", 0.0, None, home)


async def test_blocks_that_load_one_by_one_are_one_event(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache) as a:
        await until(a, lambda: a.snapshot().state == "client")
        swarm = a._network_owner.active_swarm
        assert swarm is not None
        for part in range(1, 30):
            swarm.say("serving", because("growing", f"blocks 0:{part} of 0:30, the rest follows"))
        swarm.say("serving", because("worst_served", "the blocks with the fewest hosts"))
        for start, growing in ((1, Span(0, 8)), (2, Span(0, 8)), (3, Span(0, 8)), (8, None)):
            swarm._on_change(Change("moved", _member(start, growing), _member(start - 1, Span(0, 8))))
        others = [note.text for note in a.event_log.notes_after(0) if "serves" in note.text]
        assert others == ["friend serves blocks 0:8"]
        told = [note.text for note in a.event_log.notes_after(0) if "serving" in note.text]
        assert told == [
            "serving: blocks 0:1 of 0:30, the rest follows",
            "serving: the blocks with the fewest hosts",
        ]
        assert a.snapshot().reason == "the blocks with the fewest hosts"


async def test_members_at_one_address_do_not_fill_the_event_log(tmp_path: Path, cache: Path) -> None:
    """Each of its identities may say 64 times a second that it serves other blocks now."""
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache) as a:
        await until(a, lambda: a.snapshot().state == "client")
        swarm = a._network_owner.active_swarm
        assert swarm is not None
        for number in range(2 * KEPT_NOTES):
            liar = _member(1 + number % 7, peer=f"liar {number % 20}", home="203.0.113.7")
            swarm._on_change(Change("moved", liar, liar))
        friend = _member(3, home="198.51.100.4")
        swarm._on_change(Change("moved", friend, friend))
        told = [note.text for note in a.event_log.notes_after(0)]
        assert len([text for text in told if text.startswith("liar")]) <= PEER_EVENTS_AT_ONCE + 2
        assert told[-1] == "friend serves blocks 0:3"
        assert "state" in {note.kind for note in a.event_log.notes_after(0)}, "its own events are still kept"


async def test_blocks_that_nobody_uses_are_unloaded_until_somebody_asks(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu", blocks="0:8", pause_unused=30) as a:
        await until(a, lambda: a.snapshot().state == "serving")
        blocks = hosted_runner(a)
        upkeep = a._upkeep
        upkeep._look_at_use()
        assert upkeep._used_at is not None
        upkeep._used_at -= 1800
        upkeep._look_at_use()
        upkeep.settings_changed()  # look now
        await until(a, lambda: a.snapshot().state == "paused")
        assert blocks() is None, "the blocks are still in memory"
        assert a.snapshot().reason == "nobody uses its blocks, so they are unloaded"
        reply = a.reply(ReplyRequest(messages=({"role": "user", "content": "hi"},)))
        with contextlib.suppress(NoRoute):  # there may be none yet
            await anext(reply)
        await reply.aclose()
        await until(a, lambda: a.snapshot().state == "serving")


async def test_blocks_are_needed_though_a_member_tells_of_others_that_serve_them(tmp_path: Path, cache: Path) -> None:
    """A member that hosts nothing tells of one that serves all blocks, whom nobody met: this node does not unload."""
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache, max_vram=10**9, device="cpu", blocks="0:8") as a:
        await until(a, lambda: a.snapshot().state == "serving")
        active_swarm, upkeep = a._network_owner.active_swarm, a._upkeep
        assert active_swarm is not None
        assert active_swarm.membership is not None
        table, swarm, now = active_swarm.membership.table, active_swarm.swarm.id, trio.current_time()
        teller, made_up = (Identity.generate().peer_id for _ in "ab")
        table.update(Announcement(teller, 1, 2**60, swarm, "client"), sender=teller, now=now)
        table.seen(teller, now)
        table.update(Announcement(made_up, 1, 2**60, swarm, "serving", Span(0, 8)), sender=teller, now=now)
        assert upkeep.is_only_holder()
        assert upkeep._is_needed()
        table.seen(made_up, now)
        assert not upkeep.is_only_holder()
        assert not upkeep._is_needed()


@pytest.mark.soak
async def test_blocks_that_a_job_trains_are_not_unused(tmp_path: Path, cache: Path) -> None:
    """Neither those of a member's job, nor while this node's own user fine-tunes."""
    found_swarm(tmp_path / "a", cache, "home")
    data = tmp_path / "data.txt"
    data.write_text("The shoal swims. " * 200)
    hosting: Any = {"max_vram": 10**9, "device": "cpu", "blocks": "0:8", "train": "members"}
    async with living(tmp_path / "a", cache, **hosting) as a:
        await until(a, lambda: a.snapshot().state == "serving")
        async with living(tmp_path / "b", cache, str(await a.invite(None))) as b:
            await until(b, lambda: has_joined(b) and [peer.state for peer in b.snapshot().peers] == ["serving"])
            wish: dict[str, Any] = {
                "out": "endless", "data": str(data), "validation_file": None, "validation": 0.0, "rank": 4,
                "alpha": 8.0, "targets": ("q",), "dropout": 0.0, "epochs": 10**4, "batch": 1, "length": 32,
                "rate": 1e-3, "seed": 0, "wire": "f32",
            }  # fmt: skip
            for node in (b, a):
                assert not used(a)
                with trio.fail_after(60):
                    while True:  # the model's ends may still be on their way
                        with contextlib.suppress(NoModelHere):
                            job = await node.start_job(wish_of(wish))
                            break
                        await trio.sleep(0.1)
                await until(a, lambda: bool(a.snapshot().trained))
                assert used(a)
                assert used(node)
                await node.end_job(job.job, "stop")
                await until(a, lambda: not used(a))


def has_joined(node: Node) -> bool:
    """True if a node's jobs can run."""
    active_swarm = node._network_owner.active_swarm
    return active_swarm is not None and active_swarm.jobs is not None


def used(node: Node) -> bool:
    """True if the blocks of a node were used just now, as the rule sees it."""
    node._upkeep._look_at_use()
    active_swarm = node._network_owner.active_swarm
    assert active_swarm is not None
    assert (node._upkeep._unused_s == 0) >= active_swarm.is_used
    return active_swarm.is_used
