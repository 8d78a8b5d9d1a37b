"""One directory of 20 or 50 nodes of ours and 4 or 10 of other implementations while nodes come and go.

The short form is in `tests/p2p/test_kad_interop.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.p2p.mixed_directory import look_up_under_churn

pytestmark = pytest.mark.soak


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ours", "each", "look_ups"), [(20, 2, 60), (50, 5, 200)])
async def test_look_ups_succeed_among_foreign_nodes_and_churn(
    ours: int, each: int, look_ups: int, record_property: Callable[[str, object], None]
) -> None:
    outcome = await look_up_under_churn(ours, {"js": each, "py": each}, lasting=8, look_ups=look_ups)
    record_property("found", f"{outcome.found} of {len(outcome.took_s)}")
    record_property("median_s", round(outcome.median_s, 3))
    record_property("slowest_s", round(max(outcome.took_s), 2))
    record_property("replaced", outcome.replaced)
    assert outcome.share >= 0.99
    assert outcome.median_s <= 1.0
