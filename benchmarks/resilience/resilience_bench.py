"""`culm bench resilience`: what each strategy costs, in parts.

losses     goodput under the same preemptions, next to the failure-free run and a tuned checkpoint baseline   emulated
pause      how long a loss delays a run, next to the planner's bound                                         emulated
grid       re-routing against the tuned baseline, by step length and frequency of losses                     emulated
bamboo     the same with a baseline that has the costs measured by Bamboo's authors                          emulated
detection  from SIGKILL until the last node has the new epoch                                                emulated
overhead   what a strategy costs in a failure-free run                                                       real
integrity  checksums, comparisons of holders and the ledger, as shares of a step                             real
real       losses, pause and bamboo again, if there is a core for each worker                                real

Emulated compute: layers sleep, so that more workers than cores can run side by side, as on separate machines, and
several runs at the same time. Nodes, sockets, checkpoints and SIGKILLs are real.

    python -m benchmarks.resilience --parts real,overhead [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from benchmarks.pipeline.pipeline_bench import available_core_count, describe_machine
from benchmarks.resilience.detection_latency import summarize_latencies
from benchmarks.resilience.integrity_cost import IntegrityShare, measure_integrity
from benchmarks.resilience.parallel_runs import ParallelRuns
from benchmarks.resilience.preemption_goodput import (
    FinishedRun,
    GridCell,
    PreemptionScenario,
    TunedCheckpoint,
    best_checkpoint,
    checkpoint_variants,
    measure_grid,
    run_failure_free,
    run_with_preemptions,
)
from benchmarks.resilience.resilience_result import GoodputResult, RealComputeResult, ResilienceResult, empty_cost
from benchmarks.resilience.resilience_settings import (
    FULL,
    NOTICE_STEPS,
    QUICK,
    RESTART_STEPS,
    WRITE_STEPS,
    ResilienceSettings,
)
from benchmarks.resilience.strategy_overhead import OverheadEffort, StrategyRunFactory, measure_overhead, overhead_shape

from benchmarks.resilience import detection_latency, slow_storage, strategy_overhead
from benchmarks.resilience import real_pause as pauses
from culm.errors import UsageError
from culm.providers.local_provider import ForkServerClient

PARTS = ("losses", "pause", "grid", "bamboo", "detection", "overhead", "integrity", "real")


class PipelinePool(StrategyRunFactory, Protocol):
    """Creates runs that are idle between rounds, and has the fork server they come from."""

    fork_server: ForkServerClient


def run(
    culm: PipelinePool,
    *,
    quick: bool = False,
    settings: ResilienceSettings | None = None,
    parts: Collection[str] = PARTS,
    progress: Callable[[str], object] = lambda _: None,
) -> ResilienceResult:
    """Measure every strategy; `progress` gets a line for each figure. Raises the error of a run that fails."""
    settings = settings or (QUICK if quick else FULL)
    costs = {name: empty_cost() for name in settings.strategies}
    result = ResilienceResult(
        strategies=costs,
        detect_ms=summarize_latencies([]),
        compute="emulated",
        overhead_compute="real",
        scene={},
        checkpoint={},
        grid=[],
        bamboo=None,
        real=None,
        integrity={},
        kills={"pause": settings.pause_kills, "detect": settings.detect_kills},
        cores=available_core_count(),
        workers=settings.scenario.nodes,
        lanes=min(6, available_core_count()),
    )
    progress(describe_machine(result["cores"], result["workers"]))
    with ParallelRuns(culm.fork_server, result["lanes"]) as lanes:
        if "losses" in parts:
            goodput = measure_goodput(settings, lanes, progress)
            result["scene"], result["checkpoint"] = goodput["scene"], goodput["checkpoint"]
            for name, shares in goodput["strategies"].items():
                costs[name] |= shares  # type: ignore[typeddict-item]  # its keys are among those of StrategyCost
        if "pause" in parts:
            for name in pauses.STRATEGIES:
                costs[name] |= measure_pause(settings, lanes, name, progress)  # type: ignore[typeddict-item]
        if "grid" in parts:
            result["grid"] = measure_grid(settings.scenario, lanes, settings.grid, every=settings.checkpoint_intervals)
            for cell in result["grid"]:
                progress(_format_cell(cell))
        if "bamboo" in parts and settings.bamboo_scenario is not None:
            result["bamboo"] = compare_with_bamboo_costs(settings.bamboo_scenario, culm.fork_server, progress)
    if "detection" in parts:
        result["detect_ms"] = summarize_latencies(
            detection_latency.measure_detection_ms(culm.fork_server, settings.detect_kills)
        )
        progress(f"detection: {result['detect_ms']['median']:.0f} ms")
    if "overhead" in parts:
        for name in strategy_overhead.STRATEGIES:
            costs[name] |= _measure_overhead(culm, settings.effort, name)  # type: ignore[typeddict-item]
            progress(f"{name}: overhead {costs[name]['overhead']:+.1%}, real compute")
    result["integrity"] = _measure_integrity(settings.integrity_rounds, progress) if "integrity" in parts else {}
    if (
        "real" in parts
        and settings.real_settings is not None
        and available_core_count() >= settings.real_settings.scenario.nodes
    ):
        result["real"] = run_with_real_compute(settings.real_settings, culm.fork_server, progress)
    return result


def _measure_integrity(rounds: int, progress: Callable[[str], object]) -> dict[str, IntegrityShare]:
    measured = measure_integrity(rounds)
    for name, found in measured.items():
        progress(f"{name}: {found['share']:.2%} of a step ({found['ci'][0]:.2%} to {found['ci'][1]:.2%})")
    return measured


def run_with_real_compute(
    settings: ResilienceSettings, fork_server: ForkServerClient, progress: Callable[[str], object]
) -> RealComputeResult:
    """Measure with real compute: one run at a time, on all cores."""
    assert settings.bamboo_scenario is not None
    with ParallelRuns(fork_server, 1) as single:
        progress("the following runs use real compute")
        goodput = measure_goodput(settings, single, progress)
        pause = measure_pause(settings, single, "reroute", progress)
    return RealComputeResult(
        losses=goodput, pause=pause, bamboo=compare_with_bamboo_costs(settings.bamboo_scenario, fork_server, progress)
    )


def measure_goodput(
    settings: ResilienceSettings, lanes: ParallelRuns, progress: Callable[[str], object]
) -> GoodputResult:
    """Goodput of the strategies under the same preemptions; failure-free runs are measured before and after them."""
    scenario = settings.scenario
    (before,) = lanes.run_all([partial(run_failure_free, scenario)])
    step_s = before.step_s
    progress(f"failure-free: a step of {step_s:.2f} s on {scenario.pipelines} x {scenario.stages} nodes")
    checkpoint = best_checkpoint(
        lanes.run_all(
            checkpoint_variants(scenario, step_s, every=settings.checkpoint_intervals, waits=settings.wait_options)
        )
    )
    runs = lanes.run_all([partial(_run_strategy, scenario, name, step_s, checkpoint) for name in settings.strategies])
    (after,) = lanes.run_all([partial(run_failure_free, scenario)])
    failure_free = fmean([before.goodput, after.goodput])
    shares = {
        name: _goodput_shares(run, failure_free, checkpoint)
        for name, run in zip(settings.strategies, runs, strict=True)
    }
    for name, share in shares.items():
        progress(f"{name}: {share['vs_undisturbed']:.0%} of failure-free")
    checkpoint_json = {
        "every": checkpoint.every,
        "waits": checkpoint.waits_for_node,
        "vs_undisturbed": checkpoint.run.goodput / failure_free,
    }
    return GoodputResult(scene=_scenario_json(scenario, step_s), checkpoint=checkpoint_json, strategies=shares)


def measure_pause(
    settings: ResilienceSettings, lanes: ParallelRuns, name: str, progress: Callable[[str], object]
) -> dict[str, float | None]:
    """Medians of the pauses of one strategy."""
    medians = pauses.summarize_pauses(
        pauses.measure_real_pauses(lanes, name, kills=settings.pause_kills, action_s=settings.pause_action_s)
    )
    progress(f"{name}: a pause of {medians['pause_s']:.2f} s, the bound is {medians['pause_bound_steps']:.2f} steps")
    return medians


def _run_strategy(
    scenario: PreemptionScenario, name: str, step_s: float, checkpoint: TunedCheckpoint, fork_server: ForkServerClient
) -> FinishedRun:
    """Run a strategy under the preemptions; the checkpoint baseline was measured before."""
    if name == "checkpoint":
        return checkpoint.run
    options = {"notice_s": NOTICE_STEPS * step_s, "checkpoint_every": checkpoint.every} if name == "migrate" else {}
    return run_with_preemptions(scenario, fork_server, name, step_s, **options)


def _goodput_shares(run: FinishedRun, failure_free: float, checkpoint: TunedCheckpoint) -> dict[str, Any]:
    return {
        "vs_undisturbed": run.goodput / failure_free,
        "vs_checkpoint": run.goodput / checkpoint.run.goodput if checkpoint.run.goodput else None,
        "bubble_share": run.summary.get("bubble_share"),
        "preemptions": run.summary.get("preemptions"),
        "notice_steps": NOTICE_STEPS if run.summary.get("strategy") == "migrate" else 0.0,
    }


def _measure_overhead(culm: StrategyRunFactory, effort: OverheadEffort, name: str) -> dict[str, Any]:
    measured = measure_overhead(culm, effort, name, *overhead_shape(name, available_core_count()))
    return {"overhead": measured["overhead"], "overhead_ci": measured["overhead_ci"], "real": measured}


def _scenario_json(scenario: PreemptionScenario, step_s: float) -> dict[str, Any]:
    return {
        "pipelines": scenario.pipelines,
        "stages": scenario.stages,
        "micro_batches": scenario.pipelines * scenario.micro_batches_per_pipeline,
        "schedule": scenario.schedule,
        "step_s": step_s,
        "steps": scenario.steps,
        "loss_every_steps": scenario.steps_between_losses,
        "back_after_steps": scenario.replaced_after,
    }


def _format_cell(cell: GridCell) -> str:
    template = "steps of {step_s:.2f} s, a loss every {loss_every_steps:.0f}: {ratio:.2f} times checkpoint"
    return template.format(**cell)


def compare_with_bamboo_costs(
    scenario: PreemptionScenario, fork_server: ForkServerClient, progress: Callable[[str], object]
) -> dict[str, Any]:
    """Re-routing next to a checkpoint baseline with the costs, in steps, that Bamboo's authors measured: slow storage
    takes as long to write a checkpoint in the background, and a restart, including the wait for the node, as long."""
    failure_free = run_failure_free(replace(scenario, steps=12), fork_server)
    reroute = run_with_preemptions(scenario, fork_server, "reroute", failure_free.step_s)
    loss_interval = f"a loss every {scenario.steps_between_losses:g} steps of {failure_free.step_s:.2f} s"
    progress(f"{loss_interval}: reroute {reroute.goodput / failure_free.goodput:.0%}")
    with tempfile.TemporaryDirectory(prefix="culm-bench-") as folder:
        read_s = max(0.0, RESTART_STEPS - scenario.replaced_after) * failure_free.step_s
        out = slow_storage.slow_url(str(Path(folder) / "run"), write_s=WRITE_STEPS * failure_free.step_s, read_s=read_s)
        checkpoint = run_with_preemptions(
            replace(scenario, steps=scenario.steps // 2),
            fork_server,
            "checkpoint",
            failure_free.step_s,
            out=out,
            checkpoint_every=round(WRITE_STEPS),
            replace_within=2 * scenario.replaced_after * failure_free.step_s,
        )
    progress(f"with Bamboo's costs: {reroute.goodput / checkpoint.goodput:.2f} times checkpoint")
    return {
        **_scenario_json(scenario, failure_free.step_s),
        "restart_steps": RESTART_STEPS,
        "write_steps": WRITE_STEPS,
        "reroute": reroute.goodput / failure_free.goodput,
        "checkpoint": checkpoint.goodput / failure_free.goodput,
        "ratio": reroute.goodput / checkpoint.goodput,
    }


def main() -> None:
    from benchmarks.pipeline.culm_pipeline import CulmPool

    parser = argparse.ArgumentParser(prog="benchmarks.resilience", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated names")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise UsageError(f"parts has {sorted(unknown)[0]!r}: use {', '.join(PARTS)}")
    with CulmPool() as pool:
        result = run(pool, quick=options.quick, parts=parts, progress=partial(print, file=sys.stderr, flush=True))
    if options.json is not None:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
