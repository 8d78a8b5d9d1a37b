"""Programs with keys that send long texts: what template and tokenizer compute for one keeps nobody else waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.keys import KeyRing
from app.api.openai import _numbered
from app.asker import reply_service, text_places
from app.asker.reply_service import ReplyRequest, ReplyService
from app.config.keys import add_key
from engine.errors import EngineError, SourceError
from engine.sources.opening import open_source
from engine.text.prompt import ModelText
from engine.text.tokenizer import Tokenizer
from tests.app.api.api_double import FAILURES, DoubleNode, running_api
from tests.app.api.test_openai import CHAT, post
from tests.attacks.test_model_files import BYTES, SENTENCE_PIECE, tokenizer_of


def service_that_prepares(monkeypatch: pytest.MonkeyPatch, prepare: Callable[[ReplyRequest], object]) -> ReplyService:
    """A reply service without a swarm: each reply fails with `AttributeError` once its prompt is prepared."""
    nobody: Any = SimpleNamespace(n_blocks=2)
    service = ReplyService(nobody, nobody, nobody, lambda: "")

    async def ready() -> Any:
        return SimpleNamespace(check_ids=lambda ids: None), None

    def prepared(_: object, request: ReplyRequest) -> Any:
        prepare(request)
        return SimpleNamespace(prompt_ids=[1], constraint=None, shown=(), end_ids=frozenset())

    monkeypatch.setattr(service, "_ready", ready)
    monkeypatch.setattr(reply_service, "_prepared", prepared)
    return service


def service_that_holds_texts_of(
    owner: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[ReplyService, trio.Semaphore, threading.Event]:
    """Such a service, in which texts of one owner compute until the event is set; the semaphore counts them."""
    over, begun = threading.Event(), trio.Semaphore(0)
    token = trio.lowlevel.current_trio_token()

    def prepare(request: ReplyRequest) -> None:
        if request.owner == owner:
            trio.from_thread.run_sync(begun.release, trio_token=token)
            over.wait(10)

    return service_that_prepares(monkeypatch, prepare), begun, over


async def ask(service: ReplyService, request: ReplyRequest) -> None:
    """Ask for a reply until it would begin."""
    with pytest.raises(AttributeError):
        async for _ in service.reply(request):
            pass


async def test_long_texts_of_one_key_keep_neither_the_owner_nor_other_keys_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forty requests of one key held all places for texts, in which the owner's own waited until they failed."""
    service, begun, over = service_that_holds_texts_of("greedy", monkeypatch)
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(ask, service, ReplyRequest(owner="greedy"))
            await begun.acquire()
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(5):
                for owner in ("token", "", "modest", "token"):
                    await ask(service, ReplyRequest(owner=owner))
            nursery.cancel_scope.cancel()
    finally:
        over.set()


async def test_who_hangs_up_and_asks_again_takes_no_further_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a text that nobody waits for any more computes on."""
    service, begun, over = service_that_holds_texts_of("greedy", monkeypatch)
    try:
        for _ in range(8):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, service, ReplyRequest(owner="greedy"))
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            await begun.acquire()
            await ask(service, ReplyRequest(owner="modest"))
        assert begun.value == 0
    finally:
        over.set()


async def test_the_time_for_a_text_begins_when_it_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that waited behind others failed as if they had taken that long themselves."""
    over = threading.Event()
    outcomes: list[str] = []
    service = service_that_prepares(monkeypatch, lambda _: over.wait(10))
    monkeypatch.setattr(text_places, "TEXT_S", 0.2)

    async def outcome() -> None:
        try:
            await ask(service, ReplyRequest(owner="one"))
            outcomes.append("begun")
        except SourceError:
            outcomes.append("failed")
            monkeypatch.setattr(text_places, "TEXT_S", 10.0)
            over.set()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(outcome)
    assert sorted(outcomes) == 5 * ["begun"] + ["failed"]


async def test_the_prompt_of_many_replies_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with `n` = 16 had its tokens found 16 times."""
    prepared: list[ReplyRequest] = []
    service = service_that_prepares(monkeypatch, prepared.append)
    async with trio.open_nursery() as nursery:
        for request in _numbered(ReplyRequest(owner="one"), 16):
            nursery.start_soon(ask, service, request)
    assert len(prepared) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_key_pays_for_a_prompt_that_is_refused_as_too_long(tmp_path: Path, path: str) -> None:
    """To find so many tokens took seconds, and counted nothing."""

    class Full(DoubleNode):
        async def embed(self, prompt: str | tuple[int, ...], owner: str = "") -> tuple[list[float], int]:
            raise FAILURES[2]

    file = tmp_path / "keys.json"
    _, key = add_key(file, "agent", 10, None)
    asked = {**CHAT, "max_tokens": 2} if path.endswith("completions") else {"model": "home", "input": "a"}
    async with running_api(Full(), KeyRing(file)) as client:
        codes = [(await post(client, path, asked, token=key)).status_code for _ in range(3)]
    assert codes == [400, 400, 429]


@pytest.fixture(scope="module")
def model_text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText(open_source("tiny-random", tmp_path_factory.mktemp("model")))


def test_a_prompt_that_cannot_fit_is_refused_before_its_tokens_are_found(
    model_text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a million letters took more than a second, and only then were they too many."""

    def never(*_: object, **__: object) -> Any:
        raise AssertionError("its tokens were looked for")

    monkeypatch.setattr(model_text.tokenizer, "encode", never)
    with pytest.raises(EngineError, match="tokens or more, but the model's context is"):
        model_text.prepare([{"role": "user", "content": 170_000 * "\n a"}])


DROPPING = {"type": "WhitespaceSplit"}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = {"a": 300, "b": 301, "ab": 302, "\u2581": 303, "\u2581a": 304, "é": 305}
ADDED = {"id": 400, "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
LETTERS = ["a", "b", "ab", " ", "\n", "é", "e\u0301", "èèè", "\u1f82", "漢", "漢\u0301", "<|é|>", " <|x|>", "\ud800"]
TOKENIZERS: dict[str, dict[str, Any]] = {
    "bytes": {"added_tokens": [{**ADDED, "content": "<|é|>"}]},
    "composed": {"normalizer": {"type": "NFC"}},
    "spaces are dropped": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, BYTES]}
    },
    "letters are made one": {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}},
    "marks are dropped": {"normalizer": {"type": "StripAccents"}},
    "spaces belong to a token": {"added_tokens": [{**ADDED, "content": "<|x|>", "lstrip": True}]},
    "pieces": {
        "model": {
            "type": "BPE",
            "vocab": {**FALLBACK, **WORDS},
            "merges": [["a", "b"], ["\u2581", "a"]],
            "byte_fallback": True,
        },
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
        "decoder": SENTENCE_PIECE,
    },
    "unknown letters are one token": {
        "model": {"type": "BPE", "vocab": {**WORDS, "?": 0}, "merges": [], "unk_token": "?", "fuse_unk": True},
        "pre_tokenizer": None,
        "decoder": SENTENCE_PIECE,
    },
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_has_fewer_tokens_than_it_is_refused_for(name: str) -> None:
    tokenizer = Tokenizer(tokenizer_of({"ab": 256, "ĠĠ": 257, "<|é": 258}, **TOKENIZERS[name]))

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from(LETTERS)))
    def check(pieces: list[str]) -> None:
        text = "".join(piece * 3 for piece in pieces)
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special=False))

    check()
    if name in ("bytes", "composed", "pieces"):
        assert tokenizer.fewest_tokens("ab" * 1000) >= 900
