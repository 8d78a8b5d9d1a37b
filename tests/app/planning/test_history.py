"""Past forecasts: kept, bounded, and turned into a correction that is never large."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli import main
from app.config.home import Home
from app.core.errors import AppError
from app.planning import history
from app.planning.history import PastForecast, correction, past_forecasts, remember

SPEEDS = st.floats(0.01, 1e4)


def ended(forecast: float, measured: float, task: str = "chat", at_ms: int = 0) -> PastForecast:
    return PastForecast(at_ms, task, "ab" * 32, 3, forecast, measured)


def test_the_latest_come_first_and_only_so_many_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT", 5)
    file = tmp_path / "forecasts.db"
    assert past_forecasts(file) == []
    for number in range(8):
        remember(file, ended(10, 10 + number, at_ms=number))
    assert [one.at_ms for one in past_forecasts(file)] == [7, 6, 5, 4, 3]


@pytest.mark.parametrize("speeds", [(0.0, 3.0), (3.0, 0.0), (float("nan"), 1.0)])
def test_a_speed_that_is_none_is_not_kept(speeds: tuple[float, float], tmp_path: Path) -> None:
    remember(tmp_path / "forecasts.db", ended(*speeds))
    assert past_forecasts(tmp_path / "forecasts.db") == []


def test_a_damaged_file_is_replaced_and_named_where_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "forecasts.db"
    file.write_bytes(b"no database at all" * 100)
    with pytest.raises(AppError, match=r"forecasts\.db"):
        past_forecasts(file)
    remember(file, ended(10, 12))
    assert len(past_forecasts(file)) == 1


def test_a_folder_that_cannot_be_written_harms_nobody(tmp_path: Path) -> None:
    file = tmp_path / "forecasts.db"
    file.mkdir()
    remember(file, ended(10, 12))
    remember(tmp_path / "nowhere" / "forecasts.db", ended(10, 12))


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.8, 0.8], None),  # too few
        ([0.8, 0.9, 0.8], 0.8),
        ([9.0] * 3, 2.0),
        ([0.01] * 3, 0.5),
        ([1.5] * 20 + [0.6] * 50, 1.5),  # only the latest count
    ],
)
def test_the_correction_is_the_usual_ratio_within_bounds(ratios: list[float], expected: float | None) -> None:
    past = [ended(10, 10 * ratio) for ratio in ratios] + [ended(10, 10, "train")] * 2
    assert correction(past, "chat") == (None if expected is None else pytest.approx(expected))
    assert correction(past, "train") is None


@given(st.lists(st.tuples(SPEEDS, SPEEDS), min_size=3, max_size=40))
def test_a_correction_never_more_than_doubles_or_halves(speeds: list[tuple[float, float]]) -> None:
    factor = correction([ended(*pair) for pair in speeds], "chat")
    assert factor is not None
    assert 0.5 <= factor <= 2.0


def test_plan_check_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home.open(tmp_path / "home")
    assert main(["plan", "check", "--home", str(home.folder)]) == 0
    assert "No forecast has been compared" in capsys.readouterr().out
    for measured in (8.0, 9.0, 10.0):
        remember(home.forecasts_file, ended(10, measured))
    assert main(["plan", "check", "--home", str(home.folder)]) == 0
    text = capsys.readouterr().out
    assert "+25%" in text
    assert "multiplied by 0.90" in text
    assert "ab" * 32 not in text
    assert main(["plan", "check", "--json", "--home", str(home.folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["corrections"] == {"chat": 0.9}
    assert found["forecasts"][0]["error"] == 0.0
