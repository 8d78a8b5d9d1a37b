"""The API of a real node, fuzzed over its own OpenAPI document."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.api.client import Client, client_of
from tests.app.api.test_fuzz import ENDLESS, LOOKING_S, MOVING, fuzz, operations, well
from tests.process.node_process import Place, Serving


def fuzz_serving(client: Client, examples: int) -> None:
    """All that leaves a node serving; not a single answer says that it could not."""
    fuzz(client, examples, well, {ENDLESS, "/control/stop", *MOVING})
    assert client.get("/control/status")["state"] == "serving"


def fuzz_moving(client: Client, examples: int) -> None:
    """All that sends a node elsewhere or lets it rest."""
    fuzz(client, examples, well, {path for _, path in operations(client)} - MOVING, LOOKING_S)
    client.post("/control/resume", {})
    assert client.get("/healthz") == {"ok": True}


@pytest.mark.soak
def test_a_real_node_answers_whatever_fits_the_document(tmp_path: Path) -> None:
    place = Place(tmp_path / "home", tmp_path / "cache")
    assert place.shoal("create", "home", "--model", "tiny-random").status == 0
    with Serving(place, "--discovery=invite", "--device=cpu", max_vram="1GB", OMP_NUM_THREADS="1") as node:
        assert node.ready().startswith("ready serving")
        fuzz_serving(client_of(place.home), 2)
        assert node.end() == 0
