"""The long forms of the API's tests: more of what fits its document, and a thousand sessions opened and left."""

from __future__ import annotations

import pytest

from tests.app.node_process import Serving
from tests.app.test_api_fuzz import api_in_thread, fuzz
from tests.app.test_openai import check_nothing_leaks, swarm

__all__ = ["swarm"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_whatever_fits_the_document_is_answered() -> None:
    with api_in_thread() as client:
        fuzz(client, 200)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_sessions_that_are_left_leak_nothing(swarm: list[Serving]) -> None:
    check_nothing_leaks(swarm, 1000)
