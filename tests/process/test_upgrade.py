"""A home and a cache that an earlier version left: identity, settings, swarms, conversations and weights are kept.

`data/home-VERSION.tar.gz` was made by that version: a member of a private swarm of `tiny-random`, which had fetched its
weights from another member; of those, the archive has both ends and block 0. A new version adds an archive and changes
none.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.process.node_process import Place, Serving
from ui.state.conversations import Conversations

ARCHIVES = sorted((Path(__file__).parent / "data").glob("home-*.tar.gz"))
PEER = "12D3KooWMzdKCBuqCKJHset9rYMRss36VTA15crYE6VVX5ghvBmQ"
SWARM = "reef#e58aca22e1eea3b68aa9"


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def former(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The folders as the former version left them."""
    with tarfile.open(request.param) as archive:
        # Debian 12's Python 3.11.2 has no filters yet.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    return Place(tmp_path / "home", tmp_path / "cache")


def test_there_is_a_home_of_every_release() -> None:
    assert "home-0.1.0.tar.gz" in [path.name for path in ARCHIVES]


def test_a_former_home_is_kept(former: Place) -> None:
    # A part's `.ok` names the time of its file, which unpacking changed.
    kept = [path for path in (former.cache / "parts").iterdir() if path.suffix != ".ok"]
    parts = {path: path.read_bytes() for path in kept}
    with Serving(former, "--blocks=0:1", "--discovery=invite", "--device=cpu", max_vram="200MB") as node:
        line = node.ready()
        assert line.startswith(f"ready serving swarm={SWARM} peer={PEER} ")  # its block came from the cache
        status = former.facts("status")
        assert (status["start"], status["stop"]) == (0, 1)
        assert [key["name"] for key in former.facts("keys")] == ["editor"]
        settings = {setting["name"]: setting["value"] for setting in former.facts("config", "list")}
        assert settings["keep_sessions"] == 7
        assert node.end() == 0
    assert {path: path.read_bytes() for path in parts} == parts
    store = Conversations(former.home)
    try:
        [conversation] = store.all()
        assert (conversation.title, conversation.system) == ("Why do fish swim in schools?", "Answer briefly.")
        assert [message.role for message in store.messages(conversation.id)] == ["user", "assistant"]
        assert store.choice("theme") == "light"
    finally:
        store.close()
