"""Kept sessions for longer: 200 conversations, and thousands of schedules of deaths, lost frames and cancellations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from trio.testing import MockClock

from tests.app.asker.test_interrupted_replies import disturbed_moments, hang_up, hang_up_under, moments
from tests.app.asker.test_kept_sessions import come_and_go, converse_under, schedules

pytestmark = pytest.mark.soak


async def test_two_hundred_conversations_come_and_go(autojump_clock: MockClock) -> None:
    await come_and_go(200)


test_no_schedule_of_a_thousand_changes_a_reply = settings(max_examples=1000)(given(*schedules)(converse_under))
test_a_thousand_replies_are_hung_up_on = settings(max_examples=1000)(given(*moments)(hang_up))
test_a_thousand_disturbed_ones_too = settings(max_examples=1000)(given(*disturbed_moments)(hang_up_under))
