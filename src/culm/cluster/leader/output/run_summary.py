"""The fields of summary.json and of the event `run_started`. Pure: from the ledger and the workers' final reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from culm.errors import RunError
from culm.runtime.compute.snapshot import total_digest

if TYPE_CHECKING:
    from culm.cluster.run_setup import RunSetup
    from culm.cluster.timeouts import Timeouts
    from culm.job import Job
    from culm.observe.ledger import Ledger
    from culm.runtime.messages import FinalReport


def run_started_fields(job: Job, setup: RunSetup, timeouts: Timeouts) -> dict[str, Any]:
    """The fields of the event `run_started`: shape, schedule, strategy, batch and timeouts."""
    return {
        "job": setup.name,
        "job_file": setup.job_file,
        "overrides": setup.overrides,
        "nodes": setup.nodes,
        "workers_per_node": setup.workers_per_node,
        "pipelines": setup.pipelines,
        "stages": setup.stages,
        "schedule": setup.schedule,
        "strategy": setup.strategy,
        "exact": job.exact,
        "layers": len(job.layers),
        "global_batch": job.global_batch,
        "micro_batch": job.micro_batch,
        "start": setup.start,
        "steps": setup.steps,
        "timeouts": asdict(timeouts),
        "why": setup.reason,
        "config": setup.config,
    }


def summary_fields(job: Job, setup: RunSetup, ledger: Ledger, finals: Sequence[FinalReport]) -> dict[str, Any]:
    """The summary without speed and checkpoints. Raises RunError if replicas of a layer have different digests."""
    weights, state = weight_and_state_digests(finals)
    return {
        "steps": setup.start + ledger.steps,
        "samples": ledger.samples,
        "samples_expected": ledger.steps * job.global_batch,
        "samples_lost": ledger.samples_lost,
        "samples_duplicated": ledger.samples_duplicated,
        "strategy": setup.strategy,
        "pipelines": setup.pipelines,
        "stages": setup.stages,
        "schedule": setup.schedule,
        "exact": job.exact,
        "final_loss": None if ledger.last_step is None else ledger.last_step.loss,
        "weights_sha256": weights,
        "state_sha256": state,
        "cost_usd": 0.0,
        "cost_on_demand_usd": None,
        "skipped_steps": ledger.skipped_steps,
        "evaluations": dict(ledger.evaluations),
        "memory": {
            "peak_rss_bytes": max(f.peak_rss for f in finals),
            "kept_bytes": max(f.kept_bytes for f in finals),
            "peak_device_bytes": max(f.peak_device_bytes for f in finals),
            "peak_slab_bytes": max(f.peak_slab_bytes for f in finals),
            "live_activations": max(f.peak_tapes for f in finals),
        },
        "bubble_share": _bubble_share(finals),
        "schedule_prediction": setup.schedule_prediction,
        "verified": 0,
        "config": setup.config,
    }


def _bubble_share(finals: Sequence[FinalReport]) -> float | None:
    """The share of shadow forwards that ran in a bubble; None: there were no shadow forwards."""
    run, due = (sum(f.eager_forwards[part] for f in finals) for part in (0, 1))
    return run / due if due else None


def speed_fields(samples: int, launched_at: float, first_step_at: float, last_step_at: float) -> dict[str, float]:
    """Seconds to the first step, seconds from there to the last, and samples per second over the latter."""
    wall = max(last_step_at - first_step_at, 1e-9)
    return {"start_s": round(first_step_at - launched_at, 6), "wall_s": round(wall, 6), "goodput": samples / wall}


def weight_and_state_digests(finals: Sequence[FinalReport]) -> tuple[str, str]:
    """Digests of the weights and of the whole state over all layers. Raises RunError if replicas of a layer differ."""
    found: dict[int, tuple[str, str]] = {}
    for final in finals:
        for layer, digest in final.digests.items():
            if found.setdefault(layer, digest) != digest:
                raise RunError(f"holders of layer {layer} ended with different weights: please report this")
    ordered = [found[layer] for layer in sorted(found)]
    return total_digest(w for w, _ in ordered), total_digest(s for _, s in ordered)


def slot_label(slot: int, stages: int) -> str:
    """A slot as text: 'pipeline 0 stage 1'."""
    return f"pipeline {slot // stages} stage {slot % stages}"
