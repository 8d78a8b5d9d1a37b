"""What people read holds nothing that only programmers understand: no long hash, class name, `torch.` or errno.

Read from the texts themselves (reasons, settings, rules, start-up steps, literals of the dashboard), from the kept
screens, and from a dashboard whose node says such things.
"""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.config.settings import SETTINGS
from app.core.reasons import NEXT_STEPS, Reason
from app.courtesy.rules import RULES
from app.snapshot.startup import ASIDE, TITLES
from app.snapshot.views import StepView
from tests.ui.fixed import HEALTHY
from tests.ui.rendering import FIXTURES, KEYS, settle, still, text_of_screen
from ui.draw.rows import tidy

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "a raw hash": re.compile(r"(?<![0-9A-Za-z#])(?=[0-9]*[a-f])[0-9a-f]{13,}(?![0-9A-Za-z])|#[0-9a-f]{21}"),
    "the name of a Python class": re.compile(
        r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)*(?:Error|Exception|Failure)\b|\bNoneType\b|<class |\bdict\[|\blist\["
    ),
    "torch.": re.compile(r"\btorch\."),
    "a bare errno": re.compile(r"\[Errno -?\d+\]|\berrno\b"),
}
HASH = "1a2b3c4d" * 8
NASTY = f"swarm ghost#{HASH}: WeightsError: [Errno 111] Connection refused in torch.float32"


def wrong_in(text: str) -> list[str]:
    """What a text holds that it must not."""
    return [what for what, pattern in FORBIDDEN.items() if pattern.search(text)]


def literals_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every text in a module but docstrings and the names of an `__all__`, with its line."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            body[0].value = ast.Constant(None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def reasons_in(path: Path) -> Iterator[tuple[int, str]]:
    """The texts given to `because` and to our own errors in a module."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "because":
            for argument in node.args[1:2]:
                for part in ast.walk(argument):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.lineno, part.value


def test_the_patterns_find_what_they_are_for() -> None:
    assert wrong_in(NASTY) == list(FORBIDDEN)
    assert wrong_in("birds#5e6f7a8b: the connection was refused; float32; 12D3KooWMe; 12345678901234567890") == []


def test_reasons_settings_rules_and_steps_are_for_people() -> None:
    texts = [*NEXT_STEPS.values(), *TITLES.values(), *ASIDE.values(), *(rule.label for rule in RULES)]
    texts += [text for setting in SETTINGS.values() for text in (setting.help, setting.expected)]
    assert [text for text in texts if wrong_in(text)] == []
    said = [item for path in sorted((ROOT / "app").rglob("*.py")) for item in reasons_in(path)]
    assert len(said) > 20
    assert [item for item in said if wrong_in(item[1])] == []


def test_literals_of_the_dashboard_are_for_people() -> None:
    modules = sorted((ROOT / "ui").rglob("*.py"))
    patterns = ROOT / "ui" / "draw" / "rows.py"  # holds the very patterns that remove such things
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {text[:60]!r}: {wrong_in(text)}"
        for path in modules
        if path != patterns
        for line, text in literals_of(path)
        if wrong_in(text)
    ]
    assert wrong == []


def test_the_dashboard_shows_no_name_of_a_type() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "ui").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("__name__", "__qualname__", "__class__")
    ]
    assert named == []


def test_the_kept_screens_are_for_people() -> None:
    pages = [page for page in sorted(FIXTURES.glob("*.txt")) if not page.name.startswith("invite-")]  # a code to send
    assert pages
    assert [page.name for page in pages if wrong_in(page.read_text("utf-8").partition("---")[0])] == []


@pytest.mark.parametrize(
    ("text", "tidied"),
    [
        (NASTY, f"swarm ghost#{HASH[:20]}: Connection refused in float32"),
        (f"the manifest {HASH} is gone", "the manifest 1a2b3c4d is gone"),
        (f"birds#{HASH[:20]} is fine: 12 of 30", f"birds#{HASH[:20]} is fine: 12 of 30"),
        ("peer 12D3KooWMeabcdef0123456789", "peer 12D3KooWMeabcdef0123456789"),
    ],
)
def test_a_text_is_tidied(text: str, tidied: str) -> None:
    assert tidy(text) == tidied


@pytest.mark.parametrize("screen", ["overview", "swarm", "chat"])
def test_what_a_node_says_is_shown_for_people(screen: str) -> None:
    async def look() -> None:
        async with still((160, 48)) as (app, pilot):
            await pilot.press(KEYS[screen])
            failed = (StepView("load", "load", "failed", NASTY),)
            app.store.take(replace(HEALTHY, why=Reason("cannot_host", NASTY), reason=NASTY, steps=failed))
            app.store.note({"number": 99, "at_ms": 1_700_000_999_000, "kind": "problem", "text": NASTY})
            await settle(app, pilot)
            seen = text_of_screen(app)
            assert "Connection refused" in seen
            assert wrong_in(seen) == []

    asyncio.run(look())
