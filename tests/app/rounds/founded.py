"""A training job as its founder makes it, without a node."""

from __future__ import annotations

from pathlib import Path

from app.rounds.founding import Founded, TrainWish, plan, prepare, read_texts


def founded(
    wish: TrainWish, folder: Path, founder: str, *, public: bool = True, limit_bytes: int | None = None
) -> Founded:
    """Found a job of a swarm; models are kept in `folder`."""
    planned = plan(wish, public=public, cache=folder, limit_bytes=limit_bytes)
    return prepare(wish, planned, read_texts(wish, planned.source), swarm="s" * 32, founder=founder)
