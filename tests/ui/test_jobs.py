"""The jobs tab: what is drawn of a job, and what its keys do to the node."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, cast

import pytest
from textual.pilot import Pilot

from app.core.errors import AppError
from app.snapshot.codec import to_json, trainings_from
from app.snapshot.views import IslandView, JobHopView, JobView, JoinableView, TrainedView, TrainingView
from tests.ui.driving import DrivenDashboard, ScriptedNode, driven, until
from tests.ui.fixed import HEALTHY, JOBS, ME, PEERS, TRAINING
from tests.ui.rendering import settle, text_of_screen
from ui.draw.jobs import NO_JOBS, job_columns, job_facts, job_row, job_rows, loss_rows, loss_title, trained_rows
from ui.draw.rows import text_of, width_of
from ui.draw.trainings import training_facts, training_rows
from ui.screens.jobs import Jobs
from ui.state.store import ConnectionState

RUNNING, FAILED, PAUSED, FINISHED = JOBS
NAMES = {peer.peer: peer.name for peer in PEERS}
STRANGER = "12D3KooW" + "A" * 44
HOSTILE = replace(
    RUNNING,
    out="a\x1b[2Jb",
    losses=(math.nan, 2.0, math.inf),
    loss=math.nan,
    hops=tuple(JobHopView(f"{'鳥' * 20}{index}", index, index + 1) for index in range(40)),
    rejected={STRANGER: 2, ME: 9},
    rejected_why={STRANGER: "said\n\x1b[31m" + "nothing " * 40},
    lost=(f"{STRANGER}: it left",),
    data="/very" * 60 + "/facts.jsonl",
)
HOSTILE_TRAINING = replace(
    TRAINING,
    name="a\x1b[2Jb",
    losses=cast(Any, (math.nan, 2.0, math.inf, None)),  # the API writes what is no number as null
    validation=cast(Any, ((1, math.nan), (2, 3.0), (3, None))),
    waiting=f"waits for {STRANGER}\x1b[31m",
    left_out={STRANGER: "said\n\x1b[31m" + "nothing " * 40},
    islands=tuple(IslandView(f"{'鳥' * 20}{at}", data={"source": "\x1b[2J"}) for at in range(16)),
    wire="\x1b[2J",
)


def name_of(peer: str) -> str:
    return "you" if peer == ME else NAMES.get(peer, peer[-6:])


def shown(job: JobView, width: int = 78, height: int = 40) -> list[str]:
    return [text_of(line).rstrip() for line in job_rows(job, name_of, width, height)]


# --- drawing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 78, 80, 120, 156])
def test_a_job_takes_one_row_of_any_width(width: int) -> None:
    columns = job_columns(width, [job.out for job in JOBS])
    widths = {width_of(job_row(job, columns)[:-1]) for job in (*JOBS, HOSTILE)}
    assert len(widths) == 1  # every column begins at the same place


def test_a_row_says_how_far_a_job_is() -> None:
    columns = job_columns(78, ["club-facts"])
    rows = [text_of(job_row(job, columns)).split() for job in JOBS]
    assert rows[0] == "● club-facts 3f9a1c2b7d04 148 of 400 1.204 119 23 m running".split()
    assert rows[2] == "‖ diary 0c44e9f1d2b3 0 of 400 — — — paused".split()


def test_everything_about_a_running_job_is_told() -> None:
    rows = shown(RUNNING)
    assert "119 tok/s · 96 k tokens in 13 m · 23 m left" in rows[1]
    assert rows[2].endswith("hops       tern 0:16 ▸ heron 16:34 ▸ you 34:46 ▸ pike 46:55 ▸ mako 55:62 ▸")
    text = "\n".join(rows)
    assert "sent       412 MB  received 398 MB" in text
    assert "recovered  2 times, 11 micro-batches computed again\n           from pike: it has not answered" in text
    assert "rejected   mako 3 frames: numbers of size nan are not finite" in text


@pytest.mark.parametrize(
    ("job", "said", "unsaid"),
    [
        (FAILED, "failed     no step could be made in 5 attempts", "recovered"),
        (PAUSED, "hops       in one process", "rejected"),
        (FINISHED, "hops       over the swarm", "left"),
        (replace(RUNNING, recoveries=0, rejected={}, lost=(), micro_batches_again=0), "rejected   nothing", "again"),
        (replace(RUNNING, recoveries=1, lost=()), "recovered  once, 11 micro-batches", "from"),
        (replace(RUNNING, left_out={STRANGER: "its sums\x1b are wrong"}), "left out   ", "\x1b"),
        (
            replace(RUNNING, waiting=f"waits for members: {STRANGER} left\x1b"),
            "waiting    for members: AAAAAA left",
            "12D3",
        ),
        (RUNNING, "steps      ", "waiting"),
    ],
)
def test_only_what_is_known_of_a_job_is_told(job: JobView, said: str, unsaid: str) -> None:
    text = "\n".join(shown(job))
    assert said in text
    assert unsaid not in text


def test_what_a_job_failed_for_is_told_whole() -> None:
    """What can be done about it comes last, and was cut off in a panel that was half empty."""
    why = f"no route: nobody serves block 0 for this job; it is hosted by {STRANGER}, which will not train it: "
    why += "it trains only for peers that its user trusts: `shoal trust` there adds this node"
    job, training = replace(FAILED, why=why), replace(TRAINING, status="failed", why=why)
    for height in (22, 9):
        for rows in (job_rows(job, name_of, 56, height), training_rows(training, name_of, 56, height)):
            words = " ".join("\n".join(text_of(line) for line in rows).split())
            assert len(rows) <= height
            assert "`shoal trust` there adds this node" in words


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (FINISHED, f"`shoal chat --adapter {FINISHED.out}` uses it; in the chat ^g chooses it"),
        (replace(FAILED, swarm="reef"), "p tries again from the last step that was kept"),
        (replace(PAUSED, swarm="reef"), "p goes on with it"),
        (replace(PAUSED, swarm=""), f"`shoal jobs resume {PAUSED.job}` goes on with it"),
    ],
)
def test_a_fine_tuning_job_that_does_not_run_says_what_comes_next(job: JobView, words: str) -> None:
    assert f"next       {words}" in shown(job)
    assert ("next", words) in job_facts(job, name_of)
    assert not any(line.startswith("next") for line in shown(RUNNING))


@pytest.mark.parametrize("size", [(20, 4), (78, 8), (78, 40), (150, 12)])
@pytest.mark.parametrize("job", [*JOBS, HOSTILE], ids=lambda job: job.out[:1])
def test_a_job_keeps_to_its_panel(job: JobView, size: tuple[int, int]) -> None:
    width, height = size
    for rows in (job_rows(job, name_of, width, height), loss_rows(job, width, height)):
        assert len(rows) <= height
        assert all(width_of(line) <= width for line in rows)
        assert all(text_of(line).isprintable() for line in rows)


def test_a_reason_that_is_cut_says_so() -> None:
    whole, small = shown(RUNNING, 60), shown(RUNNING, 60, 10)
    assert len(whole) > 10
    assert any(line.startswith("rejected   mako 3 frames") and line.endswith("…") for line in small)


def test_losses_fill_the_width_and_gaps_stay_gaps() -> None:
    two = replace(RUNNING, losses=(2.0, 1.0), step=2)
    rows = [text_of(line) for line in loss_rows(two, 26, 5)]
    assert rows[0].startswith("   2  ⣿⣿⣿⣿⣿⣿⣿⣿⣿⣿ ")
    assert rows[-2] == "   0  " + "⣿" * 20
    assert rows[-1].split() == ["step", "1", "2"]
    assert "⣿" not in "".join(text_of(line) for line in loss_rows(replace(two, losses=(math.nan,)), 26, 5))
    assert text_of(loss_rows(PAUSED, 26, 5)[0]) == "No step is done yet."


@pytest.mark.parametrize(
    ("validation", "title"),
    [
        ((), "loss  1.204"),
        (((0, 3.0),), "loss  1.204 · unseen records 3.000"),
        (((0, 3.0), (9, 2.5), (18, 2.25)), "loss  1.204 · unseen records 3.000 to 2.250"),
    ],
)
def test_the_loss_on_unseen_records_is_in_the_title(validation: tuple[tuple[int, float], ...], title: str) -> None:
    assert text_of(loss_title(replace(RUNNING, validation=validation))) == title


def test_jobs_of_others_are_named_by_their_owner() -> None:
    own, other = TrainedView(ME, 34, 46), TrainedView(PEERS[4].peer, 34, 40)
    rows = trained_rows(replace(HEALTHY, trained=(own, other)), name_of)
    assert [text_of(line) for line in rows] == ["◆ trains blocks 34:40 for heron"]
    assert trained_rows(None, name_of) == []


def test_the_facts_of_a_job_name_its_peers() -> None:
    facts = job_facts(HOSTILE, name_of)
    assert ("lost", "AAAAAA: it left") in facts
    assert next(value for name, value in facts if name == "rejected") == "you 9 frames"
    assert ("model", "Llama-3.1-70B (1a2b3c4d)") in facts
    assert ("model", "model 1a2b3c4d") in job_facts(replace(RUNNING, model_name="model 1a2b3c4d"), name_of)
    waits = replace(RUNNING, waiting=f"waits for members: {STRANGER}: it left")
    assert ("waiting", "waits for members: AAAAAA: it left") in job_facts(waits, name_of)


# --- training jobs ---------------------------------------------------------------------------------------------------


def trained(job: TrainingView, width: int = 78, height: int = 40) -> list[str]:
    return [text_of(line).rstrip() for line in training_rows(job, name_of, width, height)]


def test_a_training_job_has_its_row_in_the_table() -> None:
    columns = job_columns(78, ["club-facts", "poems"])
    assert text_of(job_row(TRAINING, columns)).split() == (
        "● poems 9d20c7e41b68 600 of 2 000 2.417 412 2 h 20 m running".split()
    )
    assert width_of(job_row(TRAINING, columns)[:-1]) == width_of(job_row(RUNNING, columns)[:-1])


def test_everything_about_a_training_job_is_told() -> None:
    rows = trained(TRAINING)
    assert rows[0] == "waiting    for pike, for 12 s at most"
    assert rows[1].endswith("12 rounds, step 600 of 2 000")
    assert rows[2] == "speed      412 tok/s · 1.8 M tokens · 91 % computing · 2 h 20 m left"
    assert rows[3].startswith("unseen     █") and rows[3].endswith("2.361")  # noqa: PT018
    assert rows[4] == "exchange   12 MB a round of 50 steps, as int8 · checkpoint 41 s old"
    assert rows[5] == "left out   mako: its change agrees by -0.31 with the others, usual is 0.46"
    assert rows[6] == "doubted    heron: its change has the norm 9.1, the median is 1.6"
    assert rows[7:] == [
        "islands    you           50 steps, 51 k tokens, 141 tok/s, first",
        "           tern          50 steps, 51 k tokens, 138 tok/s, 1.4 s late",
        "           heron         44 steps, 45 k tokens, 119 tok/s, 2.0 s late",
        "           pike          not in the last round, silent",
    ]


def test_a_job_that_does_not_run_here_says_what_can_be_done_with_it() -> None:
    left = trained(replace(TRAINING, status="left", waiting=""))
    assert left[:2] == [
        "next       `shoal train join poems` goes on, `shoal train export poems FOLDER`",
        "           writes the model, x removes it",
    ]
    finished = replace(TRAINING, status="finished", waiting="")
    words = "`shoal train export poems FOLDER` writes the model, x removes it"
    assert trained(finished)[0] == f"next       {words}"
    assert ("next", words) in training_facts(finished, name_of)
    assert not any(line.startswith("next") for line in trained(TRAINING))
    paused = replace(TRAINING, status="paused", waiting="waits until this node is in reef again", losses=())
    assert trained(paused)[0] == "waiting    until this node is in reef again"
    assert ("swarm", "reef#1a2b3c4d1a2b3c4d1a2b") in training_facts(
        replace(paused, swarm="reef#1a2b3c4d1a2b3c4d1a2b"), name_of
    )
    assert text_of(loss_rows(paused, 60, 8)[0]) == "No step was made here since the node started."
    waits = replace(paused, waiting="waits for the end of the pause: this machine runs on battery")
    assert trained(waits)[0] == "waiting    for the end of the pause: this machine runs on battery"
    assert not any(line.startswith("next") for line in trained(waits))


def test_who_trains_alone_is_not_told_of_others_that_go_on() -> None:
    node = ScriptedNode()
    node.trainings = [replace(TRAINING, islands=TRAINING.islands[:1])]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        await until(app, pilot, lambda: "x leave job" in text_of_screen(app))
        await pilot.press("x")
        await until(app, pilot, lambda: "rests until you join again" in text_of_screen(app))
        assert "other islands" not in text_of_screen(app)

    driven(node, drive)


def test_islands_share_rows_where_these_are_few() -> None:
    assert trained(TRAINING, 78, 10)[7:] == [
        "islands    you 51 k tokens 141 tok/s · tern 51 k tokens 138 tok/s 1.4 s late",
        "           heron 45 k tokens 119 tok/s 2.0 s late · pike silent",
    ]


def test_islands_without_a_row_are_counted() -> None:
    many = replace(TRAINING, islands=TRAINING.islands * 16)
    assert len(trained(many, 78, 100)) == 7 + 64
    rows = trained(many, 78, 12)
    assert len(rows) == 12
    shown = sum(line.count(" tokens ") + line.count(" silent") for line in rows[7:-1])
    assert rows[-1].strip() == f"and {64 - shown} more"


@pytest.mark.parametrize(
    ("job", "said", "unsaid"),
    [
        (replace(TRAINING, waiting=""), "12 rounds", "waiting"),
        (replace(TRAINING, waiting=f"waits for {STRANGER}"), "waiting    for AAAAAA", "12D3"),
        (replace(TRAINING, status="failed", why="the disk is full"), "failed     the disk is full", "alone"),
        (replace(TRAINING, islands=TRAINING.islands[:1]), "step 600 of 2 000, alone", "tern"),
        (replace(TRAINING, resting={STRANGER: "failed in 3 exchanges"}), "resting    AAAAAA: failed in 3", "12D3"),
        (replace(TRAINING, left_s=None, utilisation=None), "— computing", "h 20 m left"),
        (replace(TRAINING, left_out={}, doubted=None), "islands    you", "doubted"),
        (replace(TRAINING, status="left", islands=(), validation=(), validation_loss=None), "unseen     —", "alone"),
    ],
)
def test_only_what_is_known_of_a_training_job_is_told(job: TrainingView, said: str, unsaid: str) -> None:
    text = "\n".join(trained(job))
    assert said in text
    assert unsaid not in text


@pytest.mark.parametrize("size", [(20, 4), (78, 8), (78, 40), (150, 12)])
@pytest.mark.parametrize("job", [TRAINING, HOSTILE_TRAINING], ids=["honest", "hostile"])
def test_a_training_job_keeps_to_its_panel(job: TrainingView, size: tuple[int, int]) -> None:
    width, height = size
    for rows in (training_rows(job, name_of, width, height), loss_rows(job, width, height)):
        assert len(rows) <= height
        assert all(width_of(line) <= width for line in rows)
        assert all(text_of(line).isprintable() for line in rows)


def test_the_losses_of_a_training_job_are_those_of_the_latest_steps_here() -> None:
    assert text_of(loss_rows(TRAINING, 40, 5)[-1]).strip() == "latest 400 steps here"
    assert text_of(loss_title(TRAINING)) == "loss  2.417 · unseen text 3.945 to 2.491"


def test_the_facts_of_a_training_job_name_its_islands() -> None:
    facts = training_facts(TRAINING, name_of)
    assert ("island", "tern: 50 steps, 51 k tokens, 138 tok/s, 1.4 s late") in facts
    assert ("waiting", "waits for pike, for 12 s at most") in facts
    own = replace(TRAINING, islands=(IslandView(ME, data={"tokens": 9, "source": "poems.txt", "licence": "MIT"}),))
    assert ("island", "you: not in the last round, silent; reads 9 tokens of poems.txt (MIT)") in training_facts(
        own, name_of
    )


def test_a_training_job_is_read_from_the_json_of_a_node() -> None:
    facts = json.loads(json.dumps(to_json(TRAINING)))
    (found,) = trainings_from([{**facts, "hash": "9d", "founder": ME}])
    assert json.loads(json.dumps(to_json(found))) == facts
    assert found.islands == TRAINING.islands
    for name in ("islands", "losses", "validation", "doubted", "left_s"):
        del facts[name]  # of a job that an earlier version wrote down
    assert trainings_from([facts])[0].islands == ()


def test_jobs_of_the_swarm_that_could_be_joined_are_shown() -> None:
    node = ScriptedNode()
    node.joinable = [
        JoinableView(TRAINING.job, "poems", PEERS[0].peer, 40),
        JoinableView("1a2b", "diaries", PEERS[0].peer, 9, own_data=True),
    ]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        await until(app, pilot, lambda: "○ poems can be joined: `shoal train join poems`" in text_of_screen(app))
        assert "○ diaries can be joined: `shoal train join diaries --data FILE`" in text_of_screen(app)
        node.trainings = [TRAINING]
        await until(app, pilot, lambda: "poems can be joined" not in text_of_screen(app))
        assert "diaries can be joined" in text_of_screen(app)

    driven(node, drive)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_a_job_is_paused_resumed_and_stopped_by_keys() -> None:
    node = ScriptedNode()
    node.jobs = jobs = [FINISHED, RUNNING]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        await until(app, pilot, lambda: "club-facts" in text_of_screen(app))
        jobs.insert(0, PAUSED)  # a newer job does not take the cursor
        await until(app, pilot, lambda: "diary" in text_of_screen(app))
        await pilot.press("p", "x")  # of a finished job: nothing, and hosting is not paused either
        await until(app, pilot, lambda: app.said)
        assert app.said == [f"job {FINISHED.job} is finished: nothing to pause; hosting is paused on the other tabs"]
        assert node.asked == []
        await pilot.press("down")
        await until(app, pilot, lambda: "p pause job" in text_of_screen(app))
        await pilot.press("p")
        await until(app, pilot, lambda: "p resume job" in text_of_screen(app))
        await pilot.press("p")
        await until(app, pilot, lambda: "p pause job" in text_of_screen(app))
        await pilot.press("x")
        await until(app, pilot, lambda: "What it has learned" in text_of_screen(app))
        await pilot.press("escape")
        await until(app, pilot, lambda: len(app.screen_stack) == 1)
        await pilot.press("x", "enter")
        await until(app, pilot, lambda: "x stop job" not in text_of_screen(app))
        assert app.said[1:] == [
            f"job {RUNNING.job} pauses after the step that it is at",
            f"job {RUNNING.job} goes on after step 148",
            f"job {RUNNING.job} is stopped, and what it had learned is removed",
        ]
        assert node.asked == [f"/control/jobs/{what} {RUNNING.job}" for what in ("pause", "resume", "stop")]
        await pilot.press("enter")
        await until(app, pilot, lambda: "148 of 400, 96400 tokens" in text_of_screen(app))

    driven(node, drive)


def test_jobs_are_asked_for_only_while_they_are_shown() -> None:
    node = ScriptedNode()
    node.jobs = AppError("the disk is broken")

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        screen = cast(Jobs, app.screen)
        await until(app, pilot, lambda: app.said and not screen._asking)
        screen._poll()
        await until(app, pilot, lambda: not screen._asking)
        assert app.said == ["the disk is broken"]  # once, not at every poll
        node.jobs = []
        screen._poll()
        await until(app, pilot, lambda: NO_JOBS in text_of_screen(app))
        await pilot.press("1")
        await until(app, pilot, lambda: not screen._asking)
        screen._poll()
        assert not screen._asking
        await pilot.press("4")
        app.store.connected(ConnectionState("away", "gone"))
        screen._take([RUNNING])  # it was on its way
        await settle(app, pilot)
        assert "club-facts" not in text_of_screen(app)
        assert app.store.jobs is None

    driven(node, drive)


@pytest.mark.parametrize("status", ["left", "finished", "failed"])
def test_a_training_job_that_is_over_is_removed_by_a_key(status: str) -> None:
    node = ScriptedNode()
    node.trainings = [replace(TRAINING, status=status)]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        await until(app, pilot, lambda: "x remove job" in text_of_screen(app))
        await pilot.press("x")
        await until(app, pilot, lambda: "Remove poems with its files?" in text_of_screen(app))
        await pilot.press("escape")
        await until(app, pilot, lambda: "with its files" not in text_of_screen(app))
        assert node.asked == []
        await pilot.press("x")
        await until(app, pilot, lambda: "Remove poems with its files?" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: app.said)
        assert node.asked == [f"/control/train/remove {TRAINING.job}"]
        await until(app, pilot, lambda: "x remove job" not in text_of_screen(app))

    driven(node, drive)


def test_a_training_job_is_left_by_a_key_and_never_paused() -> None:
    node = ScriptedNode()
    node.jobs, node.trainings = [RUNNING], [TRAINING]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("4")
        await until(app, pilot, lambda: "x leave job" in text_of_screen(app))
        await until(app, pilot, lambda: "12 rounds, step 600 of 2 000" in text_of_screen(app))
        assert "pause job" not in text_of_screen(app)
        await pilot.press("p")
        await until(app, pilot, lambda: app.said)
        assert "pauses together with hosting; hosting is paused on the other tabs" in app.said[0]
        await pilot.press("x")
        await until(app, pilot, lambda: "the other islands" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "x leave job" not in text_of_screen(app))
        assert node.asked == [f"/control/train/leave {TRAINING.job}"]
        await until(app, pilot, lambda: "next       `shoal train join poems` goes on" in text_of_screen(app))
        assert "x remove job" in text_of_screen(app)
        node.trainings = [replace(TRAINING, status="paused", waiting="")]  # of another swarm, perhaps
        await until(app, pilot, lambda: "x leave job" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "12400000 in the last round" in text_of_screen(app))
        await pilot.press("escape", "down")
        await until(app, pilot, lambda: "p pause job" in text_of_screen(app))
        assert "leave job" not in text_of_screen(app)

    driven(node, drive)
