"""The long form of `tests/attacks/test_grammar_fuzz.py`: thousands of conversations, other ones each time.

A failing example is printed and kept by hypothesis; keep it for good as an `@example` of the short form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.attacks.grammar import answers, attack_asker, attack_membership, attack_server, calls, conversations

pytestmark = pytest.mark.soak

ATTACKS: list[tuple[Callable[[Sequence[Any]], Awaitable[None]], st.SearchStrategy[Any], int]] = [
    (attack_server, conversations, 3000),
    (attack_asker, answers, 3000),
    (attack_membership, calls, 1000),
]


@pytest.mark.parametrize(("attack", "scripts", "examples"), ATTACKS, ids=["server", "asker", "member"])
def test_messages_from_the_grammar_do_no_harm(
    attack: Callable[[Sequence[Any]], Awaitable[None]], scripts: st.SearchStrategy[Any], examples: int
) -> None:
    @settings(max_examples=examples, derandomize=False, suppress_health_check=list(HealthCheck))
    @given(script=scripts)
    def check(script: Sequence[Any]) -> None:
        trio.run(attack, script, clock=MockClock(autojump_threshold=0))

    check()
