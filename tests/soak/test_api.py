"""The long forms of the API's tests: more of what fits its document, and a thousand sessions opened and left."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.api.client import client_of
from tests.app.api.test_fuzz import api_in_thread, foreseen, fuzz
from tests.process.node_process import Place, Serving
from tests.process.test_api_fuzz import fuzz_moving, fuzz_serving
from tests.process.test_official_clients import check_nothing_leaks, swarm

__all__ = ["swarm"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_whatever_fits_the_document_is_answered() -> None:
    with api_in_thread() as client:
        fuzz(client, 200, foreseen)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_real_node_answers_whatever_fits_the_document(tmp_path: Path) -> None:
    place = Place(tmp_path / "home", tmp_path / "cache")
    assert place.shoal("create", "home", "--model", "tiny-random").status == 0
    with Serving(place, "--discovery=invite", "--device=cpu", max_vram="1GB") as node:
        node.ready()
        fuzz_serving(client_of(place.home), 40)
        fuzz_moving(client_of(place.home), 8)
        assert node.end() == 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_sessions_that_are_left_leak_nothing(swarm: list[Serving]) -> None:
    check_nothing_leaks(swarm, 1000)
