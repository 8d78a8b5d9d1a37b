"""Kept sessions for longer: 200 conversations, and a thousand schedules of deaths, lost frames and evictions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from trio.testing import MockClock

from tests.app.asker.test_kept_sessions import come_and_go, converse_under, schedules

pytestmark = pytest.mark.soak


async def test_two_hundred_conversations_come_and_go(autojump_clock: MockClock) -> None:
    await come_and_go(200)


test_no_schedule_of_a_thousand_changes_a_reply = settings(max_examples=1000)(given(*schedules)(converse_under))
