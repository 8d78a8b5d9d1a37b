"""What the tests of the dashboard share: its style sheets are parsed once, not for each dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from textual.css.stylesheet import Stylesheet


@pytest.fixture(autouse=True, scope="session")
def _parsed_styles() -> Iterator[None]:
    """Keep parsed rules for all dashboards of the same colours; Textual forgets them with each one."""
    parse, parsed = Stylesheet._parse_rules, dict[Any, Any]()

    def parse_once(sheet: Stylesheet, *args: Any, **options: Any) -> Any:
        key = (frozenset(sheet._variables.items()), args, *sorted(options.items()))
        if key not in parsed:
            parsed[key] = parse(sheet, *args, **options)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        yield
