"""An asker's knowledge of its swarm, and what one reply may change in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.routing.planner import PrivacyPreferences, RoutePlanner


@pytest.mark.parametrize(("wanted", "edge"), [(None, 2), (0, 2), (1, 2), (2, 2), (5, 5)])
def test_a_reply_may_ask_for_more_privacy_than_the_settings_and_never_for_less(wanted: int | None, edge: int) -> None:
    network: Any = SimpleNamespace(peer_id="me")
    planner = RoutePlanner(network, tuple, lambda: PrivacyPreferences(2, frozenset({"friend"})))
    privacy = planner.privacy(30, wanted)
    assert (privacy.edge, privacy.blocks, privacy.trusted) == (edge, 30, frozenset({"me", "friend"}))
