"""Models by name: the active swarm's and its adapters, and the other swarms that this node has saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.api.keys import KeyRing, owned_by
from app.api.model_names import NamedModel, check_active, named_model, other_swarms
from app.api.openai_errors import OpenAIError
from app.asker.reply_service import ReplyRequest
from app.config.keys import add_key
from app.snapshot.views import Snapshot, SwarmView, VisitView
from tests.app.api.api_double import DoubleNode, running_api
from tests.app.api.test_openai import get, post

ACTIVE = SwarmView("reef", "aa" * 32, "reef#aaaaaaaaaaaaaaaaaaaa", active=True)
LAKE = SwarmView("lake", "bb" * 32, "lake#bbbbbbbbbbbbbbbbbbbb")
CLUB = SwarmView("club", "cc" * 32, "club#cccccccccccccccccccc", private=True)
TWIN = SwarmView("lake", "dd" * 32, "lake#dddddddddddddddddddd")
SNAPSHOT = Snapshot("me", "serving", "", "", swarm="reef", model="Llama", swarms=(ACTIVE, LAKE, CLUB))


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("reef", NamedModel()),
        ("Llama", NamedModel()),
        ("reef#aaaaaaaaaaaaaaaaaaaa", NamedModel()),
        ("reef+pond", NamedModel(None, "pond")),
        ("lake", NamedModel("lake#bbbbbbbbbbbbbbbbbbbb")),
        ("lake#bbbbbbbbbbbbbbbbbbbb", NamedModel("lake#bbbbbbbbbbbbbbbbbbbb")),
        ("lake+pond", NamedModel("lake#bbbbbbbbbbbbbbbbbbbb", "pond")),
        ("club", NamedModel("club#cccccccccccccccccccc")),
    ],
)
def test_a_name_is_that_of_a_swarm(wanted: str, expected: NamedModel) -> None:
    with owned_by("token"):
        assert named_model(SNAPSHOT, wanted) == expected
    asked = expected.asked_by(ReplyRequest(prompt="a"))
    assert (asked.swarm, asked.adapter) == (expected.swarm, expected.adapter)


@pytest.mark.parametrize("wanted", ["", "+", "lake+", "+pond", "gpt-9", "nowhere+pond", "lake#cccccccccccccccccccc"])
def test_an_unknown_name_is_refused_with_those_that_there_are(wanted: str) -> None:
    with owned_by("token"), pytest.raises(OpenAIError, match="'reef', 'lake', 'club'") as refused:
        named_model(SNAPSHOT, wanted)
    assert (refused.value.status, refused.value.param) == (404, "model")


def test_programs_with_keys_are_not_offered_private_swarms() -> None:
    for owner in ("", "a key's hash"):
        with owned_by(owner):
            assert list(other_swarms(SNAPSHOT)) == ["lake"]
            for wanted in ("club", "club#cccccccccccccccccccc", "club+pond"):
                with pytest.raises(OpenAIError, match="unknown model") as refused:
                    named_model(SNAPSHOT, wanted)
                assert "'club'" not in str(refused.value).split("serves")[1], "nor told of them"


def test_two_swarms_of_one_name_are_told_apart_by_their_models() -> None:
    with owned_by("token"):
        twins = replace(SNAPSHOT, swarms=(ACTIVE, LAKE, TWIN))
        assert list(other_swarms(twins)) == ["lake#bbbbbbbbbbbbbbbbbbbb", "lake#dddddddddddddddddddd"]
        with pytest.raises(OpenAIError):
            named_model(twins, "lake")
        namesake = replace(LAKE, name="reef", pinned="reef#bbbbbbbbbbbbbbbbbbbb")
        same = replace(SNAPSHOT, swarms=(ACTIVE, namesake))
        assert list(other_swarms(same)) == ["reef#bbbbbbbbbbbbbbbbbbbb"]
        assert named_model(same, "reef") == NamedModel(), "the active one"


def test_without_an_active_swarm_others_can_be_asked() -> None:
    with owned_by("token"):
        idle = replace(SNAPSHOT, swarm=None, model="", swarms=(LAKE,))
        assert named_model(idle, "lake") == NamedModel("lake#bbbbbbbbbbbbbbbbbbbb")
        with pytest.raises(OpenAIError, match="in no swarm") as refused:
            named_model(replace(idle, swarms=()), "lake")
        assert refused.value.status == 503


def test_tokens_and_embeddings_are_those_of_the_active_model() -> None:
    with owned_by("token"):
        check_active(SNAPSHOT, None)
        check_active(SNAPSHOT, "reef")
        for wanted in ("lake", "reef+pond"):
            with pytest.raises(OpenAIError) as refused:
                check_active(SNAPSHOT, wanted)
            assert (refused.value.status, refused.value.param) == (400, "model")


class Traveller(DoubleNode):
    counted: ReplyRequest | None = None

    async def tokenize(self, request: ReplyRequest, *, add_special: bool = True) -> list[int]:
        self.counted = request
        return await super().tokenize(request, add_special=add_special)

    def snapshot(self) -> Snapshot:
        here = super().snapshot()
        visit = VisitView("lake", LAKE.manifest, "client", "", "Qwen", 3)
        return replace(here, swarms=(*here.swarms, LAKE, CLUB), visit=visit)


async def test_every_family_lists_other_swarms_and_asks_in_them() -> None:
    node = Traveller()
    message = [{"role": "user", "content": "hi"}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": message},
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": message, "max_tokens": 9},
        "/api/chat": {"messages": message, "stream": False},
        "/api/generate": {"prompt": "hi", "stream": False},
    }
    async with running_api(node) as client:
        listed = {model["id"]: model for model in (await get(client, "/v1/models")).json()["data"]}
        assert list(listed) == ["home", "home+pond", "lake", "club"]
        assert (listed["lake"]["name"], listed["club"]["name"]) == ("Qwen", "")
        assert (await get(client, "/v1/models/lake")).json() == listed["lake"]
        tags = (await get(client, "/api/tags")).json()["models"]
        assert [(one["name"], one["digest"]) for one in tags[2:]] == [("lake", LAKE.manifest), ("club", CLUB.manifest)]
        shown = await post(client, "/api/show", {"model": "lake:latest"})
        assert shown.json()["digest"] == LAKE.manifest
        for path, body in asked.items():
            assert (await post(client, path, {"model": "lake", **body})).status_code == 200, path
        assert (await post(client, "/tokenize", {"model": "lake", "prompt": "hi"})).status_code == 400
        counted = await post(client, "/v1/messages/count_tokens", {"model": "lake", "messages": message})
        assert counted.status_code == 200
        assert node.counted is not None
        assert node.counted.swarm == "lake#bbbbbbbbbbbbbbbbbbbb"
    requests = [entry[1] for entry in node.asked if isinstance(entry[1], ReplyRequest)]
    assert [(request.swarm, request.owner) for request in requests] == [("lake#bbbbbbbbbbbbbbbbbbbb", "token")] * 6


async def test_a_key_asks_in_public_swarms_alone(tmp_path: Path) -> None:
    _, key = add_key(tmp_path / "keys.json", "laptop", None, None)
    async with running_api(Traveller(), KeyRing(tmp_path / "keys.json")) as client:
        ids = [model["id"] for model in (await get(client, "/v1/models", token=key)).json()["data"]]
        assert ids == ["home", "home+pond", "lake"]
        body = {"model": "club", "messages": [{"role": "user", "content": "hi"}]}
        assert (await post(client, "/v1/chat/completions", body, token=key)).status_code == 404
        assert (await post(client, "/v1/chat/completions", {**body, "model": "lake"}, token=key)).status_code == 200
