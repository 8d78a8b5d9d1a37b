"""Fifty kills at random moments while config, identity, statistics, manifests and parts are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.test_killed_writes import survive

pytestmark = pytest.mark.soak


@pytest.mark.timeout(1800)
def test_fifty_kills_leave_everything_intact(tmp_path: Path) -> None:
    survive(tmp_path, 50, print)
