"""What the dashboard remembers: the store, the line to the node, conversations, a reply on its way."""

from __future__ import annotations

import json
import queue
import sqlite3
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.api.client import Client, Event, Hangup, NotAnswering
from app.asker.route_session import SessionSettings
from app.core.errors import NotRunning
from app.core.reasons import because
from app.core.terminal_text import without_controls
from app.snapshot.codec import to_json
from app.snapshot.views import CourtesyView, SessionView, Snapshot
from tests.ui.fixed import HEALTHY, ME, PEERS, Clock
from ui.draw.reply import (
    NEW_ROUTE_S,
    Hole,
    done_words,
    hole_in,
    live_rows,
    lost_hops,
    prompt_of,
    readers_words,
    way_row,
)
from ui.draw.rows import text_of
from ui.screens.logs import matching
from ui.state.conversations import (
    FILE,
    Conversations,
    ConversationsError,
    as_markdown,
    export_in,
    export_to,
    split_thinking,
)
from ui.state.coverage import coverage_of
from ui.state.follower import START_AGAIN, EventNote, Follower, Heard, RawSnapshot
from ui.state.reply_stream import ReplyProgress, Sampling, read_text_file, sampling_value
from ui.state.store import GLOW_S, ConnectionState, LogRow, Store

# --- the store -------------------------------------------------------------------------------------------------------


def live_store(clock: Clock) -> Store:
    store = Store(clock)
    store.connected(ConnectionState("live"))
    store.take(HEALTHY)
    return store


def test_what_the_node_last_said_is_not_shown_as_true_while_it_is_away() -> None:
    store = live_store(Clock())
    store.sample()
    store.connected(ConnectionState("away", "the node has ended"))
    store.sample()
    assert store.snapshot is None
    assert list(store.served) == [28.4, None]


def test_a_note_that_is_told_again_is_kept_once() -> None:
    store = Store()
    told = {"number": 1, "at_ms": 5, "kind": "peer", "text": "tern joined"}
    store.note(told)
    store.note(told)
    store.note({**told, "at_ms": 9})  # another run of the node counts from 1 again
    assert len(store.notes) == 2


def test_changes_of_peers_glow_and_fade() -> None:
    clock = Clock()
    store = live_store(clock)
    moved = replace(PEERS[0], start=4, stop=20)
    new = replace(PEERS[1], peer="12D3KooWnew", name="new")
    store.take(replace(HEALTHY, peers=(moved, new, *PEERS[2:])))
    assert {change.kind: change.peer.name for change in store.glowing().values()} == {
        "moved": "tern",
        "new": "new",
        "gone": "petrel",
    }
    clock.at += GLOW_S
    assert store.glowing() == {}


def test_the_name_of_a_peer_that_has_gone_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ui.state.store.KEPT_NAMES", len(PEERS))
    store = live_store(Clock())
    store.take(replace(HEALTHY, peers=PEERS[1:]))
    assert store.peer_name(PEERS[0].peer) == "“tern”"
    new = replace(PEERS[1], peer="12D3KooWnewone", name="new")
    store.take(replace(HEALTHY, peers=(new, *PEERS[1:])))
    assert store.peer_name(PEERS[0].peer) == PEERS[0].peer[-6:]  # one too many
    store.take(replace(HEALTHY, peers=(replace(new, name="newer"), *PEERS[1:])))
    assert store.peer_name(new.peer) == "“newer”"


def test_another_swarm_is_no_change_of_peers() -> None:
    store = live_store(Clock())
    store.take(replace(HEALTHY, swarm="another", peers=()))
    assert store.glowing() == {}


def test_names_of_peers() -> None:
    store = live_store(Clock())
    assert [store.peer_name(ME), store.peer_name(PEERS[0].peer), store.peer_name("12D3KooWxyz123")] == [
        "you",
        "“tern”",
        "xyz123",
    ]


@pytest.mark.parametrize("name", ["you", "Only this machine", 'x” can read this chat. "Nobody else'])
def test_no_name_of_a_peer_passes_for_this_node_or_for_the_words_around_it(name: str) -> None:
    store = live_store(Clock())
    store.take(replace(HEALTHY, peers=(replace(PEERS[0], name=name), *PEERS[1:])))
    hops = [{"peer": ME}, {"peer": PEERS[0].peer}]
    words = readers_words(hops, store.snapshot, store.peer_name)
    shown = words.removeprefix("“").removesuffix("” can read this chat.")
    assert len(shown) == len(name)
    assert not set(shown) & set('“”"')
    way = way_row(hops, store.snapshot, store.peer_name)
    assert [text for text, style in way if style == "mine"] == ["you"] * 3
    assert f"“{shown}”" in text_of(way)


# --- the line to the node --------------------------------------------------------------------------------------------


class ScriptedClient(Client):
    """A client whose events are a script."""

    def events(self, *, silence_s: float = 60.0, hangup: Hangup | None = None) -> Iterator[Event]:
        note = {"number": 1, "at_ms": 1, "kind": "state", "text": "up"}
        yield Event("note", json.dumps(note))
        yield Event("snapshot", json.dumps(to_json(HEALTHY)))


class ScriptedDoor:
    """Each try has its outcome; the last one stays."""

    can_start = True

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.started = 0

    def client(self) -> Client:
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Client)
        return outcome

    def coming_up(self) -> bool:
        return False

    def ended(self) -> str | None:
        return None

    def start(self) -> None:
        self.started += 1

    def settings(self) -> list[dict[str, Any]]:
        return []

    def set_setting(self, name: str, text: str | None) -> None:
        """Nothing is kept."""


def test_the_follower_tells_that_the_node_is_away_and_finds_it_again() -> None:
    heard: queue.Queue[Heard] = queue.Queue()
    door = ScriptedDoor(NotRunning("no node runs"), ScriptedClient("http://x", "t"), NotRunning("gone"))
    follower = Follower(door, heard.put)
    follower.start()
    told = []
    for _ in range(5):
        told.append(heard.get(timeout=20))
        follower.hurry()
    follower.close()
    assert door.started == 1
    assert [type(item) for item in told] == [ConnectionState, ConnectionState, EventNote, RawSnapshot, ConnectionState]
    links = [item for item in told if isinstance(item, ConnectionState)]
    assert [link.kind for link in links] == ["away", "live", "away"]
    assert (links[0].text, links[2].text) == ("no node runs here", "the node has ended")
    assert [link.next_step for link in links] == [START_AGAIN, "", START_AGAIN]


def test_a_node_that_hangs_is_not_said_to_have_ended() -> None:
    heard: queue.Queue[Heard] = queue.Queue()
    follower = Follower(ScriptedDoor(NotAnswering("the node at http://x did not answer in time")), heard.put)
    follower.start()
    link = heard.get(timeout=20)
    follower.close()
    assert isinstance(link, ConnectionState)
    assert (link.kind, link.text) == ("away", "the node runs but does not answer")
    assert "F5" not in link.next_step
    assert "end its process" in link.next_step


# --- conversations ---------------------------------------------------------------------------------------------------


def test_conversations_are_kept_in_a_private_file(tmp_path: Path) -> None:
    kept = Conversations(tmp_path)
    first = kept.begin("Why   do fish\nswim in shoals? " + "x" * 80)
    question = kept.add(first.id, None, "user", "Why?")
    kept.add(first.id, question.id, "assistant", "Because.", {"tokens_per_s": 4.5})
    kept.choose("sampling", {"temperature": 0.5})
    kept.close()
    again = Conversations(tmp_path)
    (known,) = again.all()
    assert known.title.startswith("Why do fish swim in shoals? x")
    assert [message.content for message in again.messages(known.id)] == ["Why?", "Because."]
    assert again.messages(known.id)[1].figures == {"tokens_per_s": 4.5}
    assert again.choice("sampling") == {"temperature": 0.5}
    assert "**You**" in as_markdown(known, again.messages(known.id))
    again.set_system(known.id, "Be brief.")
    found = again.get(known.id)
    assert found
    path = export_in(tmp_path, found, again.messages(known.id))
    assert "Be brief." in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert export_in(tmp_path, found, []) != path
    with pytest.raises(FileExistsError):
        export_to(path, found, [])
    again.delete(known.id)
    assert again.all() == []
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    again.close()


def test_another_version_of_a_question_is_a_branch_beside_the_old_one() -> None:
    kept = Conversations(None, lambda: 7)
    talk = kept.begin("Why?")
    first = kept.add(talk.id, None, "user", "Why?")
    reply = kept.add(talk.id, first.id, "assistant", "Because.")
    second = kept.add(talk.id, reply.id, "user", "Really?")
    kept.add(talk.id, second.id, "assistant", "Yes.")
    other = kept.add(talk.id, reply.id, "user", "Honestly?")
    assert [message.content for message in kept.messages(talk.id)] == ["Why?", "Because.", "Honestly?"]
    assert (other.version, other.versions, other.parent) == (2, 2, reply.id)
    branches = kept.branches(talk.id)
    assert [(branch.words, branch.is_shown) for branch in branches] == [("Really?", False), ("Honestly?", True)]
    kept.show_branch(talk.id, branches[0].leaf)
    assert [message.content for message in kept.messages(talk.id)] == ["Why?", "Because.", "Really?", "Yes."]
    kept.add(talk.id, None, "user", "How?")  # another first question
    assert [message.content for message in kept.messages(talk.id)] == ["How?"]
    assert [branch.words for branch in kept.branches(talk.id)] == ["Really?", "Honestly?", "How?"]


def test_conversations_are_found_by_title_and_by_what_was_said() -> None:
    kept = Conversations(None)
    fish, birds = kept.begin("Fish"), kept.begin("Birds")
    kept.add(birds.id, None, "user", "Do GULLS eat them? 50% of Ünder-fed ones")
    assert [found.title for found in kept.all("gulls")] == ["Birds"]
    assert [found.title for found in kept.all("ünder")] == ["Birds"]
    assert [found.title for found in kept.all("FISH")] == ["Fish"]
    assert kept.all("%o%") == []
    kept.rename(fish.id, "  Of   fish ")
    kept.set_draft(fish.id, "half a")
    kept.set_system(fish.id, "be brief")
    known = kept.get(fish.id)
    assert known is not None
    assert (known.title, known.draft, known.system) == ("Of fish", "half a", "be brief")


def test_conversations_of_an_older_version_are_kept(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / FILE)
    old.executescript(
        """
        create table conversation (id integer primary key, title text not null, used_ms integer not null);
        create table message (id integer primary key, conversation integer not null references conversation(id),
            role text not null, content text not null, at_ms integer not null, figures text not null);
        create table choice (name text primary key, value text not null);
        insert into conversation values (1, 'One', 5), (2, 'Two', 6);
        insert into message values (1, 1, 'user', 'a', 1, '{}'), (2, 2, 'user', 'x', 2, '{}'),
            (3, 1, 'assistant', 'b', 3, '{"tokens_per_s": 2}');
        insert into choice values ('sampling', '{"temperature": 0.1, "system": "be kind"}');
        pragma user_version = 1;
        """
    )
    old.close()
    kept = Conversations(tmp_path)
    assert [message.content for message in kept.messages(1)] == ["a", "b"]
    assert [message.content for message in kept.messages(2)] == ["x"]
    assert [known.system for known in kept.all()] == ["be kind", "be kind"]
    kept.close()
    Conversations(tmp_path).close()  # once is enough


def test_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(ConversationsError, match="move it away"):
        Conversations(tmp_path)


# --- a reply ---------------------------------------------------------------------------------------------------------


def test_a_prompt_is_shown_where_it_can_only_be_this_one() -> None:
    mine = SessionView("a", "asking", ME, 512, prompt_done=128, start=0, stop=80)
    other = SessionView("b", "asking", ME, 64, start=0, stop=80)
    alone = replace(HEALTHY, active_sessions=(mine, other))
    assert prompt_of(alone) == (128, 512)
    assert prompt_of(replace(HEALTHY, active_sessions=(mine, replace(other, prompt_done=3)))) is None
    assert (prompt_of(replace(HEALTHY, active_sessions=(other,))), prompt_of(None)) == (None, None)
    assert "reading the prompt: 128 of 512 tokens" in text_of(
        live_rows(ReplyProgress(10.0), prompt_of(alone), 12.0, "")[0]
    )
    without_route = replace(mine, prompt_done=0, start=None, stop=None)
    assert prompt_of(replace(HEALTHY, active_sessions=(without_route,))) is None


def test_a_prompt_is_said_to_be_read_before_the_first_part_of_it_is_through() -> None:
    """Until then, seconds with a long prompt, the line only waited for the first token."""
    unread = SessionView("s0", "asking", ME, 1044, start=0, stop=30, prompt_tokens=1044)
    known = replace(HEALTHY, active_sessions=(unread,))
    assert prompt_of(known) == (None, 1044)
    assert "reading the prompt: 1 044 tokens" in text_of(live_rows(ReplyProgress(10.0), prompt_of(known), 15.0, "")[0])
    hole = Hole("blocks 0:15")
    assert "blocks 0:15" in text_of(live_rows(ReplyProgress(10.0), prompt_of(known), 15.0, "", hole)[0])
    writing = replace(unread, tokens=1045)
    assert prompt_of(replace(HEALTHY, active_sessions=(writing,))) is None


def test_what_a_reply_waits_for_is_shown_until_it_has_a_route() -> None:
    progress = ReplyProgress(10.0)
    progress.take({"waiting": {"block": 3, "text": "waiting for a member\x1b[2J"}}, 11.0)
    assert "waiting for a member[2J" in text_of(live_rows(progress, None, 12.0, "")[0])
    assert "reading the prompt: 0 of 64 tokens" in text_of(
        live_rows(progress, (0, 64), 12.0, "")[0]
    )  # the member is there
    progress.take({"text": "a"}, 13.0)
    assert "waiting" not in text_of(live_rows(progress, None, 14.0, "")[0])


def test_a_reply_counts_its_tokens() -> None:
    progress = ReplyProgress(10.0)
    for tick in range(5):
        assert progress.take({"text": "a\x1b[2J\n"}, 11.0 + tick / 4) == "a[2J\n"
    assert progress.tokens == 5
    assert progress.speed(12.0) == pytest.approx(5.0)


def test_a_hop_that_left_the_way_is_named() -> None:
    before = [{"peer": "a", "start": 0, "stop": 4}, {"peer": "b", "start": 4, "stop": 8}]
    after = [{"peer": "a", "start": 0, "stop": 4}, {"peer": "c", "start": 4, "stop": 8}]
    assert lost_hops(before, after, str.upper) == "B dropped out · C took 4:8"
    names = {"a": "tern", "b": "you"}
    whole = [{"peer": "c", "start": 0, "stop": 8}]
    assert lost_hops(before, whole, lambda peer: names.get(peer, "gull")) == "tern dropped out · gull took 0:8"
    assert lost_hops(before, after, str.upper, moved=True) == "moved away from B · C took 4:8"
    assert (lost_hops([], after, str), lost_hops(before, before, str)) == ("", "")


def test_a_reply_that_ended_says_how_it_went() -> None:
    done = {"token_ids": [1, 2], "ttft_s": 1.94, "tokens_per_s": 4.6, "route": [{}, {}], "finish_reason": "length"}
    assert done_words(done) == ("first after 1.9 s · 2 tokens · 4.6 tok/s · 2 hops · cut off: max tokens reached")
    assert done_words({**done, "prompt_tokens": 393}).startswith("read 393 tokens in 1.9 s · 2 tokens · ")
    waited = {**done, "prompt_tokens": 393, "has_waited": True}
    assert done_words(waited).startswith("first after 1.9 s · 2 tokens · ")  # it was not read for so long
    cached = {**done, "prompt_tokens": 1530, "cached_tokens": 1518}
    assert done_words(cached).startswith("read 12 of 1 530 tokens in 1.9 s · 2 tokens · ")


def live_words(progress: ReplyProgress, now: float, hole: Hole | None = None) -> str:
    return "\n".join(text_of(line) for line in live_rows(progress, None, now, "", hole))


def test_a_reply_that_waits_says_for_what() -> None:
    progress = ReplyProgress(10.0)
    assert "waiting for the first token" in live_words(progress, 11.0)
    assert "waiting for block 12, which nobody hosts now · 3 s" in live_words(progress, 13.0, Hole("block 12"))
    assert "^p" not in live_words(progress, 13.0, Hole("block 12"))
    loading = Hole("blocks 0:30", is_loading=True)
    assert "waiting for blocks 0:30, which this node loads now · 3 s" in live_words(progress, 13.0, loading)
    assert "^p Resume hosting" in live_words(progress, 13.0, Hole("block 12", resume="^p Resume hosting"))
    progress.take({"waiting": {"text": "nobody serves block 12 now"}}, 11.0)
    assert "nobody serves block 12 now · 2 s" in live_words(progress, 12.0)
    progress.take({"waiting": {"text": "\x1b[2Jblock 13"}}, 11.0)
    assert " [2Jblock 13 · 2 s" in live_words(progress, 12.0)
    progress.take({"text": "So"}, 13.0)
    assert "tok/s" in live_words(progress, 14.0, Hole("block 12"))
    assert "waiting for the next token · 3 s" in live_words(progress, 16.0)  # since the last one


def test_a_reply_whose_host_left_says_who_how_long_and_what_can_be_done() -> None:
    assert SessionSettings().new_route_s == NEW_ROUTE_S
    progress = ReplyProgress(10.0)
    progress.take({"text": "So"}, 20.0)
    words = live_words(progress, 50.0, Hole("blocks 0:8", ("tern",)))
    assert words.startswith(" ◌ tern left: waiting up to 60 s for another host of blocks 0:8 · 30 s\n")
    assert "^p Memory cap" in words
    assert "^p Resume hosting" in live_words(progress, 50.0, Hole("blocks 0:8", ("tern",), resume="^p Resume hosting"))
    loading = live_words(progress, 50.0, Hole("blocks 0:8", ("tern",), is_loading=True))
    assert loading == " ◌ tern left: waiting up to 60 s for blocks 0:8: this node is loading · 30 s"


def test_a_hole_names_the_hops_that_left_it() -> None:
    gone, here = PEERS[0], PEERS[1]
    there = replace(here, state="serving", start=0, stop=40)
    known = replace(HEALTHY, start=40, stop=79, peers=(there, replace(gone, state="paused", start=79, stop=80)))
    route = [{"peer": here.peer, "start": 0, "stop": 40}, {"peer": gone.peer, "start": 40, "stop": 80}]

    def hole(snapshot: Snapshot | None, names: Callable[[str], str] = str) -> Hole | None:
        return hole_in(snapshot, coverage_of(snapshot), route, names)

    assert hole(known, lambda peer: f"\x1b{peer}") == Hole("block 79", (gone.peer,))
    assert hole_in(known, coverage_of(known), (), str) == Hole("block 79")
    assert hole(replace(known, stop=80)) is None
    assert hole(replace(known, state="loading")) == Hole("blocks 40:80", (gone.peer,), is_loading=True)
    paused = hole(replace(known, state="paused", courtesy=CourtesyView(True, "hand")))
    assert paused == Hole("blocks 40:80", (gone.peer,), resume="^p Resume hosting: then this node may host them")
    rule = because("pause_busy", "another program uses the device")
    paused = hole(replace(known, state="paused", courtesy=CourtesyView(True, "rule"), why=rule))
    assert paused == Hole("blocks 40:80", (gone.peer,), resume="`shoal config set pause_busy 0` turns this rule off")
    assert hole(None) is None


def test_who_can_read_a_chat_is_said_by_its_route() -> None:
    def hops(*peers: str) -> list[dict[str, str]]:
        return [{"peer": peer} for peer in peers]

    def name_of(peer: str) -> str:
        return {seen.peer: seen.name for seen in PEERS}.get(peer, "you")

    alone = replace(HEALTHY, state="serving", start=0, stop=HEALTHY.blocks_total, peers=())
    assert readers_words(hops(ME, ME), alone, name_of) == "This chat stays on this machine."
    assert readers_words((), alone, name_of) == "This chat stays on this machine."  # before the first question, too
    assert readers_words((), alone, name_of, is_visit=True) == "Hops can read this chat."
    only_so_far = "Only this machine has read this chat; hops can read your next message."
    other = replace(PEERS[0], state="serving")
    for changed in (
        replace(alone, stop=79),  # the last block is hosted elsewhere
        replace(alone, state="paused"),
        replace(alone, peers=(other,)),  # it may be faster
    ):
        assert readers_words(hops(ME, ME), changed, name_of) == only_so_far
    assert readers_words(hops(ME, ME), alone, name_of, is_visit=True) == only_so_far
    assert readers_words(hops(ME, PEERS[0].peer, ME), HEALTHY, name_of) == "tern can read this chat."
    many = hops(*(peer.peer for peer in PEERS[:5]))
    assert readers_words(many, HEALTHY, name_of) == "tern, petrel, gannet and 2 more can read this chat."
    assert readers_words((), HEALTHY, name_of) == "Hops can read this chat."
    assert readers_words((), None, name_of) == ""


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("hm</think>Yes.", "hm", "Yes."),
        ("<think>still", "still", ""),
        ("Yes.", "", "Yes."),
        ("a <think> tag", "", "a <think> tag"),
        ("<think></think>Yes", "", "Yes"),
    ],
)
def test_thinking_is_told_from_the_reply(text: str, thought: str, rest: str) -> None:
    assert split_thinking(text) == (thought, rest)


def test_only_small_text_files_are_attached(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("fish")
    assert read_text_file(path) == {"name": "notes.txt", "text": "fish"}
    for raw, words in ((b"\xff\xfe", "UTF-8"), (b"a\0b", "not a text file"), (b"x" * 300_000, "larger than")):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=words):
            read_text_file(path)
    with pytest.raises(ValueError, match="no such file"):
        read_text_file(tmp_path / "gone")
    with pytest.raises(ValueError, match="is a folder"):
        read_text_file(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"), [("temperature", "hot"), ("top_p", "0"), ("max_tokens", "1.5"), ("seed", "-1")]
)
def test_sampling_that_makes_no_sense_is_said(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        sampling_value(name, text)


def test_a_request_is_as_the_api_takes_it() -> None:
    request = Sampling(seed=7, system="be brief").request([{"role": "user", "content": "hi"}])
    assert request["messages"][0] == {"role": "system", "content": "be brief"}
    assert (request["seed"], "system" in request) == (7, False)
    assert without_controls("a\tb\n\x07") == "a\tb\n"


def test_logs_are_found_by_level_and_text() -> None:
    rows = [LogRow(1, level, "p2p", f"about {level}") for level in ("debug", "info", "warning", "error", "critical")]
    assert [row.level for row in matching(rows, "warning", "")] == ["warning", "error", "critical"]
    assert [row.level for row in matching(rows, "debug", "INFO")] == ["info"]
