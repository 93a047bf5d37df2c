"""What a run came to, in the words of summary.json. Pure: the ledger and the workers' last letters in, facts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from culm.errors import RunError
from culm.runtime.state import total_digest

if TYPE_CHECKING:
    from culm.cluster.setup import Setup
    from culm.cluster.timeouts import Timeouts
    from culm.job import Job
    from culm.observe.ledger import Ledger
    from culm.runtime.epoch import Final


def begun(job: Job, setup: Setup, timeouts: Timeouts) -> dict[str, Any]:
    """What a run is, in the words of the event `run_started`: all that there is to know before its summary."""
    return {
        "job": setup.name,
        "nodes": setup.nodes,
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
        "why": setup.why,
    }


def summarise(job: Job, setup: Setup, ledger: Ledger, finals: Sequence[Final]) -> dict[str, Any]:
    """Everything but speed and checkpoints. Raises RunError if holders of a layer do not agree on it."""
    weights, state = digests(finals)
    return {
        "steps": setup.start + ledger.steps,
        "samples": ledger.samples,
        "samples_expected": ledger.steps * job.global_batch,
        "samples_lost": ledger.lost,
        "samples_duplicated": ledger.duplicated,
        "strategy": setup.strategy,
        "pipelines": setup.pipelines,
        "stages": setup.stages,
        "schedule": setup.schedule,
        "exact": job.exact,
        "final_loss": None if ledger.last is None else ledger.last.loss,
        "weights_sha256": weights,
        "state_sha256": state,
        "cost_usd": 0.0,
        "skipped_steps": ledger.skipped,
        "evaluations": dict(ledger.evaluations),
        "memory": {
            "peak_rss_bytes": max(f.peak_rss for f in finals),
            "kept_bytes": max(f.kept_bytes for f in finals),
            "live_activations": max(f.peak_tapes for f in finals),
        },
        "bubble_share": _bubble_share(finals),
    }


def _bubble_share(finals: Sequence[Final]) -> float | None:
    """The share of the replicas' forwards that found a bubble; None: nobody looked for one."""
    run, due = (sum(f.eager[part] for f in finals) for part in (0, 1))
    return run / due if due else None


def speed(samples: int, began: float, started: float, ended: float) -> dict[str, float]:
    """Seconds to the first step, seconds from there to the last, and samples a second over these."""
    wall = max(ended - started, 1e-9)
    return {"start_s": round(started - began, 6), "wall_s": round(wall, 6), "goodput": samples / wall}


def digests(finals: Sequence[Final]) -> tuple[str, str]:
    """Of the weights and of the whole state: all layers in order; holders of a layer must agree."""
    found: dict[int, tuple[str, str]] = {}
    for final in finals:
        for layer, digest in final.digests.items():
            if found.setdefault(layer, digest) != digest:
                raise RunError(f"holders of layer {layer} ended with different weights: please report this")
    ordered = [found[layer] for layer in sorted(found)]
    return total_digest(w for w, _ in ordered), total_digest(s for _, s in ordered)


def slot_label(slot: int, stages: int) -> str:
    """For people: 'pipeline 0 stage 1'."""
    return f"pipeline {slot // stages} stage {slot % stages}"
