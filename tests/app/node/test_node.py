"""Nodes in this process, over real libp2p on loopback: what joins, settings and refusals do to a running one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

import app.config.home
import app.courtesy.pause
import app.membership.swarm_search
import app.node.active_swarm
import app.node.node
import app.node.self_check
import app.node.swarm_switcher
import app.swarm.saved
import app.weights.download
import p2p.discovery.known_peers
from app.api.server import NoKeys
from app.asker.reply_service import NoModelHere, ReplyRequest
from app.cli.status import status_lines
from app.config.file import load_config, set_value
from app.config.home import Home, find_node, hold
from app.config.keys import add_key
from app.config.settings import Value
from app.core.errors import AppError, NameConflict, UnknownSwarm, UsageError
from app.core.wall_clock import wall_ms
from app.joining.create import Progress, SwarmSpec, create_swarm
from app.joining.name_lookup import NoMember
from app.joining.wrong_secret import SecretCheck
from app.manifest.importing import hash_source
from app.membership import PeerClocks
from app.node.node import Node
from app.rounds.record import sign_training
from app.rounds.train_jobs import TrainJobs
from app.rounds.train_store import TrainStore
from app.routing.route import NoRoute
from app.snapshot.codec import snapshot_from, status_facts, to_json, trainings_from
from app.snapshot.views import StepView
from app.swarm.invite import Invite, new_secret
from app.swarm.saved import SavedSwarm, load, update
from app.weights.extents import WeightsError
from app.weights.manifest_store import ManifestStore
from engine.sources.opening import open_source
from p2p.errors import WrongSecret
from p2p.identity import Identity
from p2p.memory.fabric import open_fabric
from tests.app.rounds.statements import PEOPLE, RECORD
from tests.engine.models import VARIANT, write_folder

QUIET: dict[str, Value] = {"listen": ("/ip4/127.0.0.1/tcp/0",), "api_port": 0, "discovery": ("invite",), "max_vram": 0}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def found_swarm(folder: Path, cache: Path, name: str, *, private: bool = False) -> SavedSwarm:
    """A home folder whose active swarm it founded itself."""
    home = Home.open(folder)
    swarm = create_swarm(
        home, cache, SwarmSpec(name, "tiny-random", private), lambda done, total: None, lambda done, total: None
    )
    update(home, lambda known: known.joined(swarm))
    return swarm


@asynccontextmanager
async def living(folder: Path, cache: Path, target: str | None = None, **flags: Value) -> AsyncIterator[Node]:
    """A node that lives as long as the block, and must end in order."""
    home = Home.open(folder)
    with hold(home):
        node = Node(home, load_config(home.config_file, {}).with_flags({**QUIET, **flags}), cache)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run, target)
            await until(node, lambda: find_node(home) is not None)
            yield node
            node.stop()


async def until(node: Node, check: Callable[[], bool]) -> None:
    """Wait until something that the feed tells of is so."""
    with trio.fail_after(60):
        while not check():
            await node.event_log.wait_beyond(node.event_log.version)


def sees(node: Node, other: Node) -> bool:
    return other.snapshot().peer_id in {peer.peer for peer in node.snapshot().peers if peer.link}


async def test_a_new_name_reaches_the_others(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache) as a:
        await until(a, lambda: a.snapshot().state == "client")
        async with living(tmp_path / "b", cache, str(await a.invite(None))) as b:
            await until(b, lambda: sees(b, a))
            await until(a, lambda: sees(a, b))
            await b.set_config("name", "loft")
            await until(a, lambda: [peer.name for peer in a.snapshot().peers] == ["loft"])
        await until(a, lambda: a.snapshot().peers == ())  # b said goodbye


async def test_members_know_the_models_name_and_the_length_of_its_context(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache) as a:
        await until(a, lambda: a.snapshot().model == "tiny-random")
        async with living(tmp_path / "b", tmp_path / "cache", str(await a.invite(None))) as b:
            await until(b, lambda: b.snapshot().blocks_total == 8)
            told = [(node.snapshot().model, node.snapshot().context_length) for node in (a, b)]
            assert told[0] == told[1]
            assert told[1][0] == "tiny-random"
            assert told[1][1]


async def test_a_model_that_is_read_for_a_new_swarm_has_its_progress_in_the_snapshot(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[StepView | None] = []
    async with living(tmp_path / "a", cache) as a:

        def watched(home: Home, cache: Path, spec: SwarmSpec, fetching: Progress, reading: Progress) -> SavedSwarm:
            def looked(done: int, total: int) -> None:
                reading(done, total)
                seen.append(trio.from_thread.run_sync(a.snapshot).preparing)

            return create_swarm(home, cache, spec, fetching, looked)

        monkeypatch.setattr(app.node.swarm_switcher, "create_swarm", watched)
        await a.create("home", "tiny-random", private=False)
        assert (last := seen[-1]) is not None
        assert (last.key, last.done, last.state) == ("read", last.total, "running")
        assert a.snapshot().preparing is None
        seen.clear()
        monkeypatch.setattr(ManifestStore, "save_survey", failing)
        with pytest.raises(OSError, match="no room"):
            await a.create("other", "tiny-random", private=False)
        assert seen
        assert a.snapshot().preparing is None


def failing(*_: object) -> None:
    raise OSError("no room")


async def test_a_swarm_is_joined_with_the_means_of_discovery_that_were_just_set(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(QUIET, "discovery")
    set_value(Home.open(tmp_path / "a").config_file, "discovery", "invite")
    async with living(tmp_path / "a", cache) as a:
        await until(a, lambda: a.snapshot().state == "idle")
        before = a._network_owner.network
        assert before is not None
        await a.set_config("discovery", "invite,remembered")
        await a.create("home", "tiny-random", private=False)
        await until(a, lambda: a.snapshot().state == "client")
        network = a._network_owner.network
        assert network is not None
        assert network is not before
        assert network._config.discovery == {"invite", "remembered"}


async def test_an_invite_says_where_it_leads_before_it_is_taken(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    found_swarm(tmp_path / "c", cache, "attic", private=True)
    async with (
        living(tmp_path / "a", cache) as a,
        living(tmp_path / "b", tmp_path / "cache") as b,
        living(tmp_path / "c", cache) as c,
    ):
        await until(a, lambda: a.snapshot().model != "")
        told = await b.preview(str(await a.invite(None)), None, None)
        assert (told.target.partition("#")[0], told.model, told.private) == ("home", "tiny-random", False)
        assert told.members
        assert told.size_bytes
        assert told.fit is not None
        await until(c, lambda: c.snapshot().model != "")
        hidden = await b.preview(str(await c.invite(None)), None, None)
        assert (hidden.private, hidden.members) == (True, None)
        assert b.snapshot().swarm is None
        network = b._network_owner.network
        assert network is not None
        assert not network._seeker.is_sticky(a.snapshot().peer_id), "an invite that was looked at is dialled for ever"
        with pytest.raises(UsageError, match="mistyped"):
            await b.preview("shoal:notaninvite", None, None)
        for name in ("Bad Name", "", "a#1a2b3c4d1a2b3c4d1a2b", "x" * 80):
            with pytest.raises(UsageError):
                await b.preview(None, name, None)


async def test_a_denied_peer_is_dropped_at_once_and_hosts_nothing_for_this_node(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache) as a, living(tmp_path / "b", cache, str(await a.invite(None))) as b:
        await until(a, lambda: sees(a, b))
        await a.set_config("deny", b.snapshot().peer_id)
        await until(a, lambda: a.snapshot().network.links == 0)
        assert a.config().settings.deny == (b.snapshot().peer_id,)
        await until(a, lambda: not a.snapshot().peers)


async def test_an_invite_to_nobody_is_remembered_and_tried_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.node.swarm_switcher, "JOIN_PATIENCE_S", 0.2)
    absent = Invite("gone", "cd" * 32, (f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}",))
    async with living(tmp_path, cache) as node:
        outcome = await node.join(str(absent))
        assert (outcome.state, outcome.swarm.name) == ("joining", "gone")
        assert node.snapshot().state == "joining"
        assert node.snapshot().blocks_total is None
    active = load(Home(tmp_path)).active
    assert active is not None
    assert active.name == "gone"


async def test_a_swarm_of_which_nobody_answers_is_not_worth_leaving_a_healthy_one(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.membership.swarm_search, "FIND_TIMEOUT_S", 0.3)
    monkeypatch.setattr(app.node.swarm_switcher, "JOIN_PATIENCE_S", 0.2)
    found_swarm(tmp_path / "a", cache, "reef")
    gone = Identity.generate().peer_id
    for secret in (None, new_secret()):
        absent = Invite("ghost", "cd" * 32, (f"/ip4/127.0.0.1/tcp/9/p2p/{gone}",), secret)
        async with living(tmp_path / "a", cache) as node:
            await until(node, lambda node=node: node.snapshot().state == "client")  # type: ignore[misc]
            with pytest.raises(NoMember) as refusal:
                await node.join(str(absent))
            words = f"ghost: no member answers (1 tried: {gone[-6:]}). They may be offline. This node stays in reef; "
            assert str(refusal.value) == words + "`shoal join --force` moves it anyway"
            assert refusal.value.peers == (gone,)
            assert (node.snapshot().state, node.snapshot().swarm) == ("client", "reef")
            assert [swarm.name for swarm in node.snapshot().swarms] == ["reef"]
    async with living(tmp_path / "a", cache) as node:
        assert (await node.join(str(absent), force=True)).state == "joining"
        assert node.snapshot().swarm == "ghost"
        await node.join("reef")
        assert (await node.leave("ghost")).name == "ghost"


async def test_a_peer_that_only_remembers_a_swarm_is_no_member(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.membership.swarm_search, "FIND_TIMEOUT_S", 1.0)
    swarm = found_swarm(tmp_path / "other", cache, "ghost")
    found_swarm(tmp_path / "a", cache, "reef")
    found_swarm(tmp_path / "b", tmp_path / "other cache", "reef")
    update(Home.open(tmp_path / "a"), lambda known: replace(known.joined(swarm), active_id=known.active_id))
    async with living(tmp_path / "a", cache) as a, living(tmp_path / "b", tmp_path / "other cache") as b:
        await until(a, lambda: a.snapshot().state == "client")
        await until(b, lambda: b.snapshot().state == "client")
        invite = Invite("ghost", swarm.model_hash, a.snapshot().listen_addrs)
        with pytest.raises(NoMember, match="ghost: no member answers"):
            await b.join(str(invite))
        assert b.snapshot().swarm == "reef"
        await a.join("ghost")
        assert (await b.join(str(invite))).swarm.name == "ghost"


async def test_a_refused_node_goes_back_to_where_it_was(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "den", private=True)
    found_swarm(tmp_path / "b", cache, "home")
    async with living(tmp_path / "a", cache) as a, living(tmp_path / "b", cache) as b:
        await until(b, lambda: b.snapshot().state == "client")
        wrong = replace((await a.invite(None)).invite, secret=new_secret())
        with pytest.raises(WrongSecret, match="has another swarm secret"):
            await b.join(str(wrong))
        await until(b, lambda: b.snapshot().state == "client" and b.snapshot().network.advertised != ())
        assert [swarm.name for swarm in b.snapshot().swarms] == ["home"]
        # A bare name asked at a private swarm's door is answered the same.
        address = a.snapshot().listen_addrs[0]
        await b.leave("home")
        await b.set_config("peers", address)
        with pytest.raises(WrongSecret, match="has another swarm secret"):
            await b.join("den")


def test_all_that_is_read_of_a_model_counts_to_its_size(tmp_path: Path, cache: Path) -> None:
    """The tokenizer was left out: a model of 98 MB had 97 while it was read."""
    steps: list[tuple[int, int]] = []
    spec = SwarmSpec("home", "tiny-random", private=False)
    create_swarm(Home.open(tmp_path), cache, spec, lambda done, total: None, lambda *step: steps.append(step))
    size = hash_source(open_source("tiny-random", cache)).manifest.size_bytes
    assert steps[-1] == (size, size)
    assert {total for _, total in steps} == {size}


async def test_a_node_in_a_swarm_of_its_own_says_that_a_named_peer_has_another_secret(
    tmp_path: Path, cache: Path
) -> None:
    """`serve --peer` of a member whose secret differs: the node serves alone, and tells why nobody comes."""
    found_swarm(tmp_path / "a", cache, "den", private=True)
    found_swarm(tmp_path / "b", cache, "den", private=True)
    async with living(tmp_path / "a", cache) as a:
        await until(a, lambda: a.snapshot().listen_addrs != ())
        async with living(tmp_path / "b", cache, peers=a.snapshot().listen_addrs[:1]) as b:
            await until(b, lambda: b.snapshot().state == "client" and b.snapshot().warnings != ())
            [warning] = b.snapshot().warnings
            assert (warning.code, warning.peers) == ("wrong_secret", (a.snapshot().peer_id,))
            assert snapshot_from(to_json(b.snapshot())).warnings == (warning,)
            lines = status_lines(status_facts(b.snapshot()))
            assert ("warning", warning.text) in lines
            assert ("", f"→ {warning.next_step}") in lines[lines.index(("warning", warning.text)) :]
            check = next(check for check in b.network_checks() if check.name == "warning")
            assert (check.status, check.detail, check.mend) == ("warn", warning.text, warning.next_step)
            assert a.snapshot().warnings == (), "anybody can knock at a node's door"
            await until(a, lambda: any(note.kind == "knock" for note in a.event_log.notes_after(0)))
            (told,) = [note.text for note in a.event_log.notes_after(0) if note.kind == "knock"]
            assert told == "turned away a node outside the swarm: it has used no invite yet"


async def test_the_event_loop_never_waits_for_the_disk(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    synced: list[int] = []
    known = ("invite", "remembered")
    really = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(threading.get_ident())
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(p2p.discovery.known_peers, "SAVE_S", 0.05)
    async with living(tmp_path / "a", cache, discovery=known) as a:
        await until(a, lambda: a.snapshot().state == "client")
        async with living(tmp_path / "b", cache, str(await a.invite(None)), discovery=known) as b:
            await until(a, lambda: sees(a, b))
            synced.clear()  # key and token of a new home are written once, before the node serves
            await b.set_config("name", "loft")
            b._written_addresses = ()  # as if the machine had moved to another network
            await b.pause(None)
            await b.resume()
            before = len(synced)
            with trio.fail_after(10):
                while len(synced) < before + 4 or not b._written_addresses:
                    await b.event_log.wait_beyond(b.event_log.version)
            assert threading.get_ident() not in synced


async def test_a_peer_that_accepts_this_node_later_is_no_longer_warned_of() -> None:
    async with open_fabric() as fabric:
        network, founder, stranger = fabric.node("n"), fabric.node("founder"), fabric.node("stranger")
        check = SecretCheck(["founder"])
        for peer in ("stranger", "founder"):
            error = WrongSecret("it has another secret")
            error.peer = peer
            check.hear(error)
        refusal = check.refusal(network)
        assert refusal is not None
        assert refusal.peer == "founder"
        stranger.serve("hello", _hello)
        founder.serve("hello", _hello)
        await network.call("stranger", "hello", b"", timeout_s=1)
        assert check.refusal(network) is refusal
        await network.call("founder", "hello", b"", timeout_s=1)
        assert check.refusal(network) is None


async def _hello(peer: str, body: bytes) -> bytes:
    return body


async def test_two_swarms_of_one_name_are_a_conflict(tmp_path: Path, cache: Path) -> None:
    from app.swarm.records import sign_record
    from p2p.identity import load_or_create

    found_swarm(tmp_path / "a", cache, "home")
    impostor = Home.open(tmp_path / "c")
    record = sign_record(load_or_create(impostor.key_file), "home", "ee" * 32, now_ms=1)
    update(impostor, lambda known: replace(known.joined(SavedSwarm.from_record(record, now_ms=1)), active_id=None))
    async with living(tmp_path / "a", cache) as a, living(tmp_path / "c", cache) as c:
        await until(c, lambda: c.snapshot().listen_addrs != ())
        doors = (a.snapshot().listen_addrs[0], c.snapshot().listen_addrs[0])
        async with living(tmp_path / "b", cache, peers=doors) as b:
            await until(b, lambda: b.snapshot().network.links == 2)
            with pytest.raises(NameConflict, match="several swarms are called home"):
                await b.join("home")
            pinned = a.snapshot().swarms[0].pinned
            assert (await b.join(pinned)).state == "client"


async def test_an_unknown_name_leaves_the_node_idle(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.membership.swarm_search, "FIND_TIMEOUT_S", 0.3)
    async with living(tmp_path, cache) as node:
        node_idle = node.snapshot().state
        with pytest.raises(UnknownSwarm, match="no reachable peer knows"):
            await node.join("nowhere")
        assert node.snapshot().state == node_idle == "idle"


async def test_the_secret_is_nowhere_but_in_the_invite(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    swarm = found_swarm(tmp_path, cache, "den", private=True)
    assert swarm.secret is not None
    async with living(tmp_path, cache) as node:
        await until(node, lambda: node.snapshot().state == "client")
        invite = str(await node.invite("den"))
        told = [repr(node.snapshot()), caplog.text, *(note.text for note in node.event_log.notes_after(0))]
    assert not any(secret in text for text in told for secret in (swarm.secret.hex(), repr(swarm.secret), invite[20:]))


@pytest.mark.parametrize("folder", ["manifests", "in_use"])
async def test_a_cache_that_cannot_be_written_is_the_reason_until_it_can(
    folder: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app.node.active_swarm, "JOIN_AGAIN_S", 0.1)
    found_swarm(tmp_path / "a", cache, "home")
    empty = tmp_path / "cache"
    empty.mkdir()
    (empty / folder).touch()  # a file where a folder is needed
    async with living(tmp_path / "a", cache) as a, living(tmp_path / "b", empty, str(await a.invite(None))) as b:
        await until(b, lambda: "cannot be written" in b.snapshot().reason)
        snapshot = b.snapshot()
        assert (snapshot.state, str(empty / folder) in snapshot.reason) == ("joining", True)
        assert snapshot.why is not None
        assert snapshot.why.next_step
        (empty / folder).unlink()
        await until(b, lambda: b.snapshot().state == "client")
    assert "Traceback" not in caplog.text
    assert len([record for record in caplog.records if record.levelname == "WARNING" and "joining" in record.msg]) == 1


async def test_too_little_room_on_the_disk_is_the_reason_for_hosting_nothing(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path / "a", cache, "home")
    room: dict[str, Value] = {"disk_floor": 10**18, "max_vram": 10**9, "device": "cpu"}
    async with living(tmp_path / "a", cache) as a:
        async with living(tmp_path / "b", tmp_path / "cache", str(await a.invite(None)), **room) as b:
            await until(b, lambda: b.snapshot().state == "client")
            why = b.snapshot().why
            assert why is not None
            assert (why.code, "do not fit in" in why.text, "SHOAL_CACHE" in why.next_step) == ("disk_full", True, True)


async def test_jobs_leave_as_much_of_the_disk_free_as_the_setting_says(tmp_path: Path, cache: Path) -> None:
    found_swarm(tmp_path, cache, "home")
    async with living(tmp_path, cache, max_vram=0) as node:
        await until(node, lambda: node.snapshot().state == "client")
        place = node._swarm_jobs()._place
        for floor, has_room in (("1000TB", False), ("0", True)):
            await node.set_config("disk_floor", floor)
            assert place.activations.reserve(1) is has_room
            with contextlib.nullcontext() if has_room else pytest.raises(WeightsError, match="lower disk_floor"):
                await place.states.require_room(1)


async def test_a_models_folder_that_is_gone_is_the_reason_everywhere_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app.weights.download, "WAITS_S", 0.2)
    monkeypatch.setattr(app.node.node, "TICK_S", 0.1)
    folder, away = tmp_path / "mymodel", tmp_path / "away"
    write_folder(folder, VARIANT["llama"])
    home = Home.open(tmp_path / "a")
    spec = SwarmSpec("pond", str(folder), False)
    swarm = create_swarm(home, tmp_path / "cache", spec, lambda done, total: None, lambda done, total: None)
    update(home, lambda known: known.joined(swarm))
    folder.rename(away)
    async with living(tmp_path / "a", tmp_path / "cache", max_vram=10**9, device="cpu") as a:
        await until(a, lambda: any("blocks" in warning.text for warning in a.snapshot().warnings))
        [warning] = a.snapshot().warnings
        assert (warning.code, a.snapshot().state) == ("model_gone", "fetching")
        assert warning.text.startswith(f"the model's folder {folder} is gone, and no member that is here has blocks 0:")
        assert "put it back, or wait for a member that has the weights" in warning.next_step
        lines = dict(status_lines(json.loads(json.dumps(status_facts(a.snapshot())))))
        assert lines["warning"] == warning.text
        checks = [check for check in a.network_checks() if check.status == "fail"]
        assert [(check.detail, check.mend) for check in checks] == [(warning.text, warning.next_step)]
        with pytest.raises(NoModelHere, match=f"the model's folder {folder} is gone.*put it back") as refused:
            await anext(a.reply(ReplyRequest(({"role": "user", "content": "hello"},))))
        assert refused.value.code == "model_gone"
        version = a.event_log.version
        await until(a, lambda: a.event_log.version > version + 5)
        [told] = [record.getMessage() for record in caplog.records if str(folder) in record.getMessage()]
        assert (told.startswith(f"the model's folder {folder} is gone"), "put it back" in told) == (True, True)
        assert len([note for note in a.event_log.notes_after(0) if note.kind == "problem"]) == 1
        away.rename(folder)
        await until(a, lambda: a.snapshot().state == "serving")
        assert a.snapshot().warnings == ()


async def test_a_clock_that_is_ahead_is_named_everywhere(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = PeerClocks.heard

    def three_hours_behind(clocks: PeerClocks, peer: str, sequence: int, now_s: float, at: float) -> None:
        """As a node hears its peers whose own clock is three hours ahead."""
        heard(clocks, peer, sequence - 3 * 3_600_000, now_s, at)

    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache) as a, living(tmp_path / "b", cache, str(await a.invite(None))) as b:
        await until(b, lambda: sees(b, a))
        assert b.snapshot().warnings == ()
        monkeypatch.setattr(PeerClocks, "heard", three_hours_behind)
        swarm = b._network_owner.active_swarm
        assert swarm is not None
        swarm._clocks._readings.clear()
        await until(b, lambda: b.snapshot().warnings != ())
        [warning] = b.snapshot().warnings
        assert warning.code == "clock_off"
        assert re.fullmatch(r"this machine's clock is about (2\.9|3\.0) h ahead of its peers'", warning.text)
        [check] = [check for check in b.network_checks() if check.status == "fail"]
        assert (check.name, "ahead of the other members: they refuse what it says" in check.detail) == ("clock", True)
        with pytest.raises(NoRoute, match=r"nobody serves block 0: this machine's clock is .*; set the clock"):
            async for _ in b.reply(ReplyRequest(prompt=(1, 2, 3), max_tokens=3)):
                pass
        monkeypatch.undo()


async def test_a_disk_that_takes_nothing_costs_the_memory_of_a_swarm_alone(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(app.node.swarm_switcher, "JOIN_PATIENCE_S", 0.2)
    monkeypatch.setattr(app.node.node, "TICK_S", 0.1)
    swarm = found_swarm(tmp_path / "other", cache, "home")
    async with living(tmp_path / "a", cache) as node:
        monkeypatch.setattr(app.swarm.saved, "write_private", full)
        monkeypatch.setattr(app.config.home, "write_private", full)
        monkeypatch.setattr(app.courtesy.pause, "write_private", full)
        node._written_addresses = ()
        assert (await node.join(str(Invite(swarm.name, swarm.model_hash)))).swarm.name == "home"
        assert any("will not know of home" in note.text for note in node.event_log.notes_after(0))
        assert (await node.pause(None)).paused
        version = node.event_log.version
        await until(node, lambda: node.event_log.version > version + 3)  # the node goes on telling
        monkeypatch.undo()


async def test_training_jobs_are_listed_without_a_swarm(tmp_path: Path, cache: Path) -> None:
    home = Home.open(tmp_path / "a")
    node = Node(home, load_config(home.config_file, {}).with_flags(QUIET), cache)
    assert await node.trainings() == []
    record = replace(RECORD, created_ms=wall_ms())
    store = TrainStore(home)
    job = store.create(sign_training(PEOPLE[0], record), {})
    (found,) = trainings_from(await node.trainings())
    assert (found.name, found.status, found.islands) == (record.name, "paused", ())  # the node was killed as it began
    store.save_facts(job, {**store.facts(job), "status": "running", "left_s": 9.0})
    (found,) = trainings_from(await node.trainings())
    assert (found.status, found.left_s) == ("paused", None)  # nobody runs it


async def test_training_jobs_are_left_and_removed_without_a_swarm(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "a")
    node = Node(home, load_config(home.config_file, {}).with_flags(QUIET), tmp_path)
    store = TrainStore(home)
    job = store.create(sign_training(PEOPLE[0], replace(RECORD, created_ms=wall_ms())), {})
    store.save_facts(job, {**store.facts(job), "status": "running", "swarm": "reef#1a2b3c4d1a2b3c4d1a2b"})
    (found,) = trainings_from(await node.trainings())
    assert (found.swarm, found.waiting.split(";")[0]) == (
        "reef#1a2b3c4d1a2b3c4d1a2b", "waits until this node is in reef#1a2b3c4d1a2b3c4d1a2b again"
    )  # fmt: skip
    with pytest.raises(AppError, match="fish is a training job of the swarm reef#1a2b3c4d1a2b3c4d1a2b"):
        await node.join_training("fish")
    with pytest.raises(AppError, match="has not joined a swarm"):
        await node.join_training("cod")
    with pytest.raises(AppError, match="takes part in fish"):
        await node.remove_training("fish")
    assert (await node.leave_training("fish"))["status"] == "left"
    await node.remove_training("fish")
    assert await node.trainings() == []


async def test_a_job_that_is_left_as_its_swarm_is_joined_does_not_go_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has read which jobs run just before that is written."""
    swarm = found_swarm(tmp_path, cache, "home")
    store = TrainStore(Home.open(tmp_path))
    record = replace(RECORD, created_ms=wall_ms(), swarm=swarm.id)
    store.save_facts(store.create(sign_training(PEOPLE[0], record), {}), {"status": "running"})
    leave, begun, may_leave = TrainStore.leave, trio.Event(), threading.Event()

    async def begin(*args: Any) -> None:
        begun.set()
        await trio.sleep_forever()

    def late(self: TrainStore, text: str) -> Any:
        assert may_leave.wait(30)
        return leave(self, text)

    monkeypatch.setattr(TrainJobs, "_begin", begin)
    monkeypatch.setattr(TrainStore, "leave", late)
    with monkeypatch.context() as patched:
        patched.setattr(Node, "_trainings_here", None)
        async with living(tmp_path, cache, max_vram=0) as node, trio.open_nursery() as nursery:
            nursery.start_soon(node.leave_training, "fish")
            await begun.wait()
            patched.undo()
            assert node._trainings()._waiting
            may_leave.set()
            await until(node, lambda: not node._trainings()._waiting)
            (found,) = await node.trainings()
            assert found["status"] == "left"


async def test_a_node_listens_to_other_machines_only_with_keys_and_tls(tmp_path: Path, cache: Path) -> None:
    home = Home.open(tmp_path / "a")
    node = Node(home, load_config(home.config_file, {}).with_flags({**QUIET, "api_host": "0.0.0.0"}), cache)
    with pytest.raises(NoKeys, match="but no program has a key"):
        await node.run()
    _, key = add_key(home.keys_file, "laptop", None, None)
    async with living(tmp_path / "a", cache, api_host="0.0.0.0") as a:
        shown = a.snapshot()
        assert shown.api_url.startswith("http://127.0.0.1:")
        assert shown.lan_url.startswith("https://")
        assert ("lan", f"{shown.lan_url}, certificate SHA-256 {shown.lan_fingerprint}") in status_lines(
            status_facts(shown)
        )
        port, headers = shown.lan_url.rpartition(":")[2], {"Authorization": f"Bearer {key}"}
        trusting = ssl.create_default_context(cafile=str(home.api_certificate_file))
        async with httpx.AsyncClient(verify=trusting, headers=headers) as client:
            assert (await client.get(f"https://localhost:{port}/v1/models")).status_code == 200
            assert (await client.get(f"https://localhost:{port}/control/status")).status_code == 403
