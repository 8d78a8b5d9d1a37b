"""Blocks and replies between real processes: the thinnest whole path of a swarm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.node_process import Place, Serving, is_covered, wait_until

PROMPT = ["Once upon a time", "--temperature", "0", "--max-tokens", "24"]
CHAT_FIELDS = {
    *("text", "token_ids", "prompt_tokens", "finish_reason", "ttft_s", "tokens_per_s"),
    *("recoveries", "moves", "longest_gap_s", "route"),
}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    """Two nodes that hold the blocks between them, and one that holds none."""
    folder = tmp_path_factory.mktemp("nodes")
    places = [Place(folder / name, folder / "cache") for name in ("left", "right", "asker")]
    assert places[0].shoal("create", "home", "--model", "tiny-random").status == 0
    with Serving(places[0], "--discovery=invite", "--blocks=0:4", "--device=cpu", max_vram="1GB") as left:
        left.ready()
        invite = places[0].shoal("invite").out.strip()
        right = Serving(
            places[1], "--discovery=invite", "--blocks=4:8", "--device=cpu", max_vram="1GB", SHOAL_INVITE=invite
        )
        with right, Serving(places[2], "--discovery=invite", SHOAL_INVITE=invite) as asker:
            right.ready()
            asker.ready()
            wait_until(lambda: is_covered(asker.place), "all blocks are held")
            yield [left, right, asker]


def test_the_swarm_says_what_one_process_says(swarm: list[Serving]) -> None:
    left, right, asker = swarm
    reply = asker.place.facts("chat", *PROMPT)
    assert CHAT_FIELDS <= reply.keys()
    alone = asker.place.facts("chat", *PROMPT, "--local", "--model", "tiny-random", "--device", "cpu")
    assert reply["token_ids"] == alone["token_ids"]
    assert reply["text"] == alone["text"]
    assert reply["prompt_tokens"] == alone["prompt_tokens"]
    peers = [node.place.node_file()["peer_id"] for node in (left, right)]
    assert reply["route"] == [
        {"peer": peers[0], "start": 0, "stop": 4},
        {"peer": peers[1], "start": 4, "stop": 8},
    ]


def test_a_hosting_node_asks_itself_too(swarm: list[Serving]) -> None:
    left, _, asker = swarm
    assert left.place.facts("chat", *PROMPT)["token_ids"] == asker.place.facts("chat", *PROMPT)["token_ids"]


def test_what_is_hosted_is_shown(swarm: list[Serving]) -> None:
    left, right, asker = swarm
    status = right.place.facts("status")
    assert (status["state"], status["start"], status["stop"], status["device"]) == ("serving", 4, 8, "cpu")
    spans = {(peer["start"], peer["stop"], peer["state"]) for peer in asker.place.facts("peers")}
    assert spans == {(0, 4, "serving"), (4, 8, "serving")}
    blocks = asker.place.facts("blocks")
    assert [block["block"] for block in blocks] == list(range(8))
    assert blocks[5]["holders"][0]["peer"] == right.place.node_file()["peer_id"]
    assert blocks[5]["holders"][0]["tokens_per_s"] > 0
    assert len(asker.place.shoal("blocks").out.splitlines()) == 2
    assert left.place.facts("status")["sessions"] == 0  # every reply gave its room back


def test_bad_questions_are_one_line(swarm: list[Serving]) -> None:
    asker = swarm[2].place
    long = asker.shoal("chat", "word " * 5000, "--temperature", "0")
    assert (long.status, long.err.count("\n")) == (1, 1)
    assert "shorten it" in long.err
    odd = asker.shoal("chat", "hello", "--temperature", "-1")
    assert (odd.status, "temperature" in odd.err) == (2, True)


def test_private_blocks_go_to_trusted_peers_or_nowhere(swarm: list[Serving]) -> None:
    left, right, asker = swarm
    private = [*PROMPT, "--private-blocks", "2"]
    refused = asker.place.shoal("chat", *private)
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert "no trusted peer serves block 0" in refused.err
    assert "first and last 2 blocks" in refused.err
    peers = [node.place.node_file()["peer_id"] for node in (left, right)]
    assert asker.place.shoal("config", "set", "trusted", peers[0]).status == 0
    assert "no trusted peer serves block 6" in asker.place.shoal("chat", *private).err
    assert asker.place.shoal("config", "set", "trusted", ",".join(peers)).status == 0
    assert [hop["peer"] for hop in asker.place.facts("chat", *private)["route"]] == peers
    refused = asker.place.shoal("chat", "hello", "--private-blocks", "-1")
    assert (refused.status, "--private-blocks" in refused.err) == (2, True)


def test_a_hole_is_named_and_a_departure_is_in_order(swarm: list[Serving]) -> None:
    _, right, asker = swarm
    assert right.end() == 0
    wait_until(lambda: not asker.place.facts("blocks")[4]["holders"], "the departure is known")
    answer = asker.place.shoal("chat", *PROMPT)
    assert answer.status == 1
    waits, error = answer.err.splitlines()
    assert waits == "shoal: waiting up to 15 s for a member that serves block 4"
    assert "nobody serves block 4" in error
