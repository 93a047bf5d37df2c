"""`culm bench resilience`: what each strategy costs, in parts.

losses     goodput under the same losses, beside the undisturbed run and a tuned checkpoint baseline   emulated compute
pause      how long a loss holds a run up, beside the planner's bound                                   emulated compute
grid       re-routing over the tuned baseline, by the length of steps and the frequency of losses       emulated compute
bamboo     the same where the baseline has the costs that Bamboo's authors measured                     emulated compute
detection  from SIGKILL until the last node has the new epoch                                           emulated compute
overhead   what a strategy costs while nothing befalls a run                                            real compute
real       losses, pause and bamboo again, where there is a core for each worker                        real compute

Emulated: layers sleep, so that more workers than cores run side by side, as on machines of their own, and several runs
beside each other. Nodes, sockets, checkpoints and SIGKILLs are real.

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

from benchmarks import detection, resilience_overhead, slow
from benchmarks import resilience_pause as pauses
from benchmarks.detection import spread
from benchmarks.lanes import Lanes
from benchmarks.pipeline import cores, setting
from benchmarks.resilience_losses import Cell, Ran, Scene, Tuned, best, grid, tries, under_losses, undisturbed
from benchmarks.resilience_overhead import Effort, Factory, overhead, shape
from benchmarks.resilience_plan import FULL, NOTICE_STEPS, QUICK, RESTART_STEPS, WRITE_STEPS, Plan
from benchmarks.resilience_result import Losses, Real, Result, unmeasured
from culm.errors import UsageError
from culm.providers.local import LocalNursery

PARTS = ("losses", "pause", "grid", "bamboo", "detection", "overhead", "real")


class Pool(Factory, Protocol):
    """Runs that are idle between rounds, and the nursery that they come from."""

    nursery: LocalNursery


def run(
    culm: Pool,
    *,
    quick: bool = False,
    plan: Plan | None = None,
    parts: Collection[str] = PARTS,
    progress: Callable[[str], object] = lambda _: None,
) -> Result:
    """Measure every strategy; `progress` gets a line for each figure. Raises what a run raises."""
    plan = plan or (QUICK if quick else FULL)
    costs = {name: unmeasured() for name in plan.strategies}
    found = Result(
        strategies=costs,
        detect_ms=spread([]),
        compute="emulated",
        overhead_compute="real",
        scene={},
        checkpoint={},
        grid=[],
        bamboo=None,
        real=None,
        kills={"pause": plan.pause_kills, "detect": plan.detect_kills},
        cores=cores(),
        workers=plan.scene.nodes,
        lanes=min(6, cores()),
    )
    progress(setting(found["cores"], found["workers"]))
    with Lanes(culm.nursery, found["lanes"]) as lanes:
        if "losses" in parts:
            lost = losses(plan, lanes, progress)
            found["scene"], found["checkpoint"] = lost["scene"], lost["checkpoint"]
            for name, shares in lost["strategies"].items():
                costs[name] |= shares  # type: ignore[typeddict-item]  # its keys are among those of Cost
        if "pause" in parts:
            for name in pauses.STRATEGIES:
                costs[name] |= paused(plan, lanes, name, progress)  # type: ignore[typeddict-item]
        if "grid" in parts:
            found["grid"] = grid(plan.scene, lanes, plan.grid, every=plan.every)
            for cell in found["grid"]:
                progress(_cell_told(cell))
        if "bamboo" in parts and plan.bamboo is not None:
            found["bamboo"] = bamboo(plan.bamboo, culm.nursery, progress)
    if "detection" in parts:
        found["detect_ms"] = spread(detection.detected(culm.nursery, plan.detect_kills))
        progress(f"detection: {found['detect_ms']['median']:.0f} ms")
    if "overhead" in parts:
        for name in resilience_overhead.STRATEGIES:
            costs[name] |= _overhead(culm, plan.effort, name)  # type: ignore[typeddict-item]
            progress(f"{name}: overhead {costs[name]['overhead']:+.1%}, real compute")
    if "real" in parts and plan.real is not None and cores() >= plan.real.scene.nodes:
        found["real"] = real(plan.real, culm.nursery, progress)
    return found


def real(plan: Plan, nursery: LocalNursery, progress: Callable[[str], object]) -> Real:
    """One run at a time, on all cores."""
    assert plan.bamboo is not None
    with Lanes(nursery, 1) as alone:
        progress("from here on compute is real")
        lost = losses(plan, alone, progress)
        pause = paused(plan, alone, "reroute", progress)
    return Real(losses=lost, pause=pause, bamboo=bamboo(plan.bamboo, nursery, progress))


def losses(plan: Plan, lanes: Lanes, progress: Callable[[str], object]) -> Losses:
    """The plan's strategies under the same losses; undisturbed runs come before and after them."""
    scene = plan.scene
    (before,) = lanes.map([partial(undisturbed, scene)])
    step_s = before.step_s
    progress(f"undisturbed: a step of {step_s:.2f} s on {scene.pipelines} x {scene.stages} nodes")
    base = best(lanes.map(tries(scene, step_s, every=plan.every, waits=plan.waits)))
    ran = lanes.map([partial(_lost, scene, name, step_s, base) for name in plan.strategies])
    (after,) = lanes.map([partial(undisturbed, scene)])
    calm = fmean([before.goodput, after.goodput])
    shares = {name: _shares(one, calm, base) for name, one in zip(plan.strategies, ran, strict=True)}
    for name, share in shares.items():
        progress(f"{name}: {share['vs_undisturbed']:.0%} of undisturbed")
    checkpoint = {"every": base.every, "waits": base.waits, "vs_undisturbed": base.ran.goodput / calm}
    return Losses(scene=_told(scene, step_s), checkpoint=checkpoint, strategies=shares)


def paused(plan: Plan, lanes: Lanes, name: str, progress: Callable[[str], object]) -> dict[str, float | None]:
    """Medians of the pauses of one strategy."""
    found = pauses.row(pauses.held(lanes, name, kills=plan.pause_kills, unit_s=plan.pause_unit_s))
    progress(f"{name}: a pause of {found['pause_s']:.2f} s, the bound is {found['pause_bound_steps']:.2f} steps")
    return found


def _lost(scene: Scene, name: str, step_s: float, base: Tuned, nursery: LocalNursery) -> Ran:
    """A strategy under the losses; the baseline has been there already."""
    if name == "checkpoint":
        return base.ran
    options = {"notice_s": NOTICE_STEPS * step_s, "checkpoint_every": base.every} if name == "migrate" else {}
    return under_losses(scene, nursery, name, step_s, **options)


def _shares(ran: Ran, calm: float, base: Tuned) -> dict[str, Any]:
    return {
        "vs_undisturbed": ran.goodput / calm,
        "vs_checkpoint": ran.goodput / base.ran.goodput if base.ran.goodput else None,
        "bubble_share": ran.summary.get("bubble_share"),
        "preemptions": ran.summary.get("preemptions"),
        "notice_steps": NOTICE_STEPS if ran.summary.get("strategy") == "migrate" else 0.0,
    }


def _overhead(culm: Factory, effort: Effort, name: str) -> dict[str, Any]:
    found = overhead(culm, effort, name, *shape(name, cores()))
    return {"overhead": found["overhead"], "overhead_ci": found["overhead_ci"], "real": found}


def _told(scene: Scene, step_s: float) -> dict[str, Any]:
    return {
        "pipelines": scene.pipelines,
        "stages": scene.stages,
        "micro_batches": scene.pipelines * scene.each,
        "schedule": scene.schedule,
        "step_s": step_s,
        "steps": scene.steps,
        "loss_every_steps": scene.loss_every,
        "back_after_steps": scene.back_after,
    }


def _cell_told(cell: Cell) -> str:
    told = "steps of {step_s:.2f} s, a loss every {loss_every_steps:.0f}: {ratio:.2f} times checkpoint"
    return told.format(**cell)


def bamboo(scene: Scene, nursery: LocalNursery, progress: Callable[[str], object]) -> dict[str, Any]:
    """Re-routing beside a checkpoint baseline with the costs that Bamboo's authors measured, in steps: storage takes as
    long to write a checkpoint, aside, and a restart, the wait for the node included, as long as theirs."""
    calm = undisturbed(replace(scene, steps=12), nursery)
    ours = under_losses(scene, nursery, "reroute", calm.step_s)
    progress(
        f"a loss every {scene.loss_every:g} steps of {calm.step_s:.2f} s: reroute {ours.goodput / calm.goodput:.0%}"
    )
    with tempfile.TemporaryDirectory(prefix="culm-bench-") as folder:
        read_s = max(0.0, RESTART_STEPS - scene.back_after) * calm.step_s
        out = slow.place(str(Path(folder) / "run"), write_s=WRITE_STEPS * calm.step_s, read_s=read_s)
        theirs = under_losses(
            replace(scene, steps=scene.steps // 2),
            nursery,
            "checkpoint",
            calm.step_s,
            out=out,
            checkpoint_every=round(WRITE_STEPS),
            replace_within=2 * scene.back_after * calm.step_s,
        )
    progress(f"with Bamboo's costs: {ours.goodput / theirs.goodput:.2f} times checkpoint")
    return {
        **_told(scene, calm.step_s),
        "restart_steps": RESTART_STEPS,
        "write_steps": WRITE_STEPS,
        "reroute": ours.goodput / calm.goodput,
        "checkpoint": theirs.goodput / calm.goodput,
        "ratio": ours.goodput / theirs.goodput,
    }


def main() -> None:
    from benchmarks.ours import CulmPool

    parser = argparse.ArgumentParser(prog="benchmarks.resilience", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise UsageError(f"parts has {sorted(unknown)[0]!r}: there is {', '.join(PARTS)}")
    with CulmPool() as pool:
        found = run(pool, quick=given.quick, parts=parts, progress=partial(print, file=sys.stderr, flush=True))
    if given.json is not None:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
