"""A fine-tuning job as people and programs see it: the same facts for `shoal jobs`, the API and the dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.routing.route import Route
from app.snapshot.views import JobHopView, JobLinkView, JobView
from app.training.job_store import Job
from app.training.swarm_jobs import RunningJob

SHOWN_LOSSES = 400
SHOWN_LOST = 8


def job_view(job: Job, running: RunningJob | None = None) -> JobView:
    """Return the facts of a job; `running` has the newest, if it runs here."""
    record = job.record
    progress = job.progress if running is None else running.progress
    live: dict[str, Any] = {}
    left_s = None
    if running is not None:
        left_s = running.left_s
        figures = running.trainer.figures
        live = {
            "cut": running.material.trained.cut,
            "dropped": running.material.trained.dropped,
            "hops": hop_views(running.trainer.route, figures.computed),
            "recoveries": max(0, figures.epochs - 1),
            "micro_batches_again": figures.micro_batches_again,
            "rejected": dict(figures.rejected),
            "rejected_why": dict(figures.rejected_why),
            "audits": figures.audits,
            "lost": tuple(figures.lost)[-SHOWN_LOST:],
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
        waiting=progress.waiting,
        left_out=dict(progress.left_out),
        rank=record.rank,
        alpha=record.alpha,
        targets=record.targets,
        wire=job.source.wire if job.source.swarm else "",
        snapshots_s=progress.snapshots_s if running is None else running.snapshots_s,
        bytes_per_link=tuple(JobLinkView(*link) for link in progress.links),
        **live,
    )


def hop_views(route: Route, computed: Mapping[str, int] | None = None) -> tuple[JobHopView, ...]:
    """Return the hops of a job by their blocks, and how many micro-batches went through each."""
    counts, hops = computed or {}, sorted(route, key=lambda hop: hop.span)
    return tuple(JobHopView(hop.peer, hop.span.start, hop.span.stop, counts.get(hop.peer, 0)) for hop in hops)
