"""Processes of these tests are forked from one that has imported what they need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process import fork_server


@pytest.fixture(autouse=True, scope="module")
def _forked() -> Iterator[None]:
    with fork_server.used():
        yield
