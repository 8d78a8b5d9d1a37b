"""A fine-tuning job as people and programs see it: the same facts for `shoal jobs`, the API and the dashboard."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from app.routing.route import Route
from app.training.job_store import Job
from app.training.swarm_jobs import RunningJob

SHOWN_LOSSES = 400


@dataclass(frozen=True)
class JobView:
    """One job and how far it is; the last fields only while it runs over a swarm."""

    job: str
    out: str
    model: str  # hash
    model_name: str
    data: str
    swarm: str  # id; empty: it runs in one process
    status: str
    step: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float | None
    left_s: float | None  # until it is finished; None: not known, or it does not run
    loss: float | None
    losses: tuple[float, ...]  # of the latest steps
    validation: tuple[tuple[int, float], ...]  # (step, loss)
    why: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    hops: tuple[dict[str, Any], ...] = ()
    recoveries: int = 0
    micro_batches_again: int = 0
    rejected: dict[str, int] | None = None  # hop -> frames that were not computed with
    bytes_out: int = 0
    bytes_in: int = 0


def job_view(job: Job, running: RunningJob | None = None) -> JobView:
    """Return the facts of a job; `running` has the newest, if it runs here."""
    record = job.record
    progress = job.progress if running is None else running.progress
    live: dict[str, Any] = {}
    left_s = None
    if running is not None:
        left_s = median(running.step_s) * (record.steps - progress.step) if running.step_s else None
        figures = running.trainer.figures
        live = {
            "hops": tuple(hop_facts(running.trainer.route)),
            "recoveries": max(0, figures.epochs - 1),
            "micro_batches_again": figures.micro_batches_again,
            "rejected": dict(figures.rejected),
            "bytes_out": figures.bytes_out,
            "bytes_in": figures.bytes_in,
        }
    return JobView(
        job=record.id,
        out=record.out,
        model=record.model,
        model_name=job.source.model,
        data=job.source.data,
        swarm=job.source.swarm,
        status=progress.status,
        step=progress.step,
        steps=record.steps,
        tokens=progress.tokens,
        seconds=progress.seconds,
        tokens_per_s=progress.tokens / progress.seconds if progress.seconds else None,
        left_s=left_s,
        loss=progress.losses[-1] if progress.losses else None,
        losses=progress.losses[-SHOWN_LOSSES:],
        validation=progress.validation,
        why=progress.why,
        rank=record.rank,
        alpha=record.alpha,
        targets=record.targets,
        **live,
    )


def hop_facts(route: Route) -> list[dict[str, Any]]:
    """Return the hops of a route as JSON."""
    return [{"peer": hop.peer, "start": hop.span.start, "stop": hop.span.stop} for hop in route]
