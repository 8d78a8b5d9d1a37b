"""Torch's threads get cores of their own, unless the person has said where they belong."""

from __future__ import annotations

import os

import pytest

from app.cli.serve import bind_threads

CORES = {2, 5, 7}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("OMP_PROC_BIND", "OMP_PLACES"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: CORES, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("pid", "places"), [(0, "{2},{5},{7}"), (1, "{5},{7},{2}"), (5, "{7},{2},{5}")])
def test_nodes_of_one_machine_begin_at_different_cores(environment: pytest.MonkeyPatch, pid: int, places: str) -> None:
    environment.setattr(os, "getpid", lambda: pid)
    bind_threads()
    assert (os.environ["OMP_PROC_BIND"], os.environ["OMP_PLACES"]) == ("true", places)


def test_what_the_person_chose_stays(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OMP_PROC_BIND", "false")
    bind_threads()
    assert os.environ["OMP_PROC_BIND"] == "false"
    assert "OMP_PLACES" not in os.environ


def test_a_system_that_tells_no_cores_is_left_alone(environment: pytest.MonkeyPatch) -> None:
    environment.delattr(os, "sched_getaffinity")
    bind_threads()
    assert "OMP_PROC_BIND" not in os.environ
