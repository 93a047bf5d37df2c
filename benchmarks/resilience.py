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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypedDict

from rich.table import Table

from benchmarks import detection, resilience_overhead, slow
from benchmarks import resilience_pause as pauses
from benchmarks.detection import spread
from benchmarks.lanes import Lanes
from benchmarks.pipeline import cores, setting
from benchmarks.resilience_losses import Cell, Ran, Scene, Tuned, best, grid, tries, under_losses, undisturbed
from benchmarks.resilience_overhead import Effort, Factory, Overhead, overhead, shape
from culm.cluster.setup import STRATEGIES as ABLE
from culm.errors import UsageError
from culm.providers.local import LocalNursery

PARTS = ("losses", "pause", "grid", "bamboo", "detection", "overhead", "real")
ORDER = ("none", "checkpoint", "migrate", "drop", "templates", "shadow-lazy", "shadow", "reroute", "auto")
STRATEGIES = tuple(name for name in ORDER if name in ABLE)
NOTICE_STEPS = 2.0
"""What `migrate` hears before a loss: without notice it is `checkpoint` by another name. The others hear nothing."""
RESTART_STEPS, WRITE_STEPS, BAMBOO_LOSS_EVERY = 17.0, 11.0, 45.0
"""Of the baseline that Bamboo's authors measured: a step took 8.3 s on 64 nodes, a restart with loading 138 s, a write
89 s."""


class Cost(TypedDict):
    """What one strategy costs; None: not measured, or there is nothing to measure."""

    vs_undisturbed: float | None
    """Goodput under losses over that of the undisturbed run."""
    vs_checkpoint: float | None
    """... and over that of the tuned checkpoint baseline under the same losses."""
    pause_steps: float | None
    pause_bound_steps: float | None
    pause_s: float | None
    pause_within: float | None
    """The share of losses with a pause of no more than the bound, a tenth of a step and half a second."""
    pause_step_s: float | None
    bubble_share: float | None
    preemptions: int | None
    notice_steps: float
    overhead: float | None
    overhead_ci: list[float] | None
    real: Overhead | None
    """All that was measured with real compute."""


class Losses(TypedDict):
    """Goodput under losses."""

    scene: dict[str, Any]
    checkpoint: dict[str, Any]
    """The baseline at its best."""
    strategies: dict[str, dict[str, Any]]
    """Those keys of `Cost` that come of it."""


class Real(TypedDict):
    """What was measured with real compute under losses."""

    losses: Losses
    pause: dict[str, float | None]
    """Of `reroute`."""
    bamboo: dict[str, Any]


class Result(TypedDict):
    """The JSON of the bench. None, or empty: that part was not asked for."""

    strategies: dict[str, Cost]
    detect_ms: dict[str, float | None]
    compute: str
    overhead_compute: str
    scene: dict[str, Any]
    checkpoint: dict[str, Any]
    grid: list[Cell]
    bamboo: dict[str, Any] | None
    real: Real | None
    """None as well where there are fewer cores than workers."""
    kills: dict[str, int]
    cores: int
    workers: int
    lanes: int
    """Runs with emulated compute that went on side by side."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long the bench looks, and at what."""

    scene: Scene
    strategies: tuple[str, ...] = STRATEGIES
    every: tuple[int, ...]
    """Steps between two checkpoints that the baseline is tuned over ..."""
    waits: tuple[bool, ...]
    """... and whether a restart waits for a node."""
    pause_kills: int
    pause_unit_s: float | None
    detect_kills: int = 0
    grid: tuple[tuple[float, float], ...] = ()
    """(seconds of an action, steps between two losses) of each cell."""
    bamboo: Scene | None
    effort: Effort = resilience_overhead.FULL
    real: Plan | None = None


_SCENE = Scene(pipelines=4, stages=4, each=4, unit_s=2 / 21, steps=40)
"""Steps of two seconds, 21 actions long; nine of them are bubbles, in which peers run a lost node's micro-batches."""
_REAL = Scene(pipelines=4, stages=3, each=4, unit_s=None, steps=30)
FULL = Plan(
    scene=_SCENE,
    every=(1, 2, 4),
    waits=(True, False),
    pause_kills=40,
    pause_unit_s=0.05,
    detect_kills=40,
    grid=tuple((unit_s, every) for unit_s in (0.01, 0.025, 0.05) for every in (5.0, 10.0, 20.0)),
    bamboo=replace(_SCENE, unit_s=0.02, steps=90, loss_every=BAMBOO_LOSS_EVERY),
    real=Plan(
        scene=_REAL,
        strategies=("checkpoint", "templates", "shadow", "reroute"),
        every=(1, 2),
        waits=(True,),
        pause_kills=12,
        pause_unit_s=None,
        bamboo=replace(_REAL, steps=90, loss_every=BAMBOO_LOSS_EVERY),
    ),
)
QUICK = Plan(
    scene=Scene(pipelines=4, stages=3, each=3, unit_s=0.025, steps=14),
    every=(4,),
    waits=(False,),
    pause_kills=2,
    pause_unit_s=0.03,
    detect_kills=4,
    bamboo=None,
    effort=resilience_overhead.QUICK,
)


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
    costs = {name: _cost() for name in plan.strategies}
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


def _cost() -> Cost:
    """Nothing measured yet."""
    known: dict[str, Any] = dict.fromkeys(Cost.__annotations__)
    return Cost(**{**known, "notice_steps": 0.0})  # type: ignore[typeddict-item]


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


def table(result: Result) -> Table:
    """The figures for people."""
    scene = result["scene"]
    told = "a node lost every {loss_every_steps:g} steps, back after {back_after_steps:g}"
    made = Table(
        title=told.format(**scene) if scene else None,
        caption=_caption(result),
    )
    made.add_column("strategy")
    for name in ("of undisturbed", "of checkpoint", "pause", "bound", "overhead", "95 %"):
        made.add_column(name, justify="right")
    for name, cost in result["strategies"].items():
        made.add_row(name, *_cells(cost))
    return made


def _caption(result: Result) -> str:
    detect = result["detect_ms"]["median"]
    parts = [
        "{pipelines} x {stages} nodes, compute emulated, steps of {step_s:.2f} s; overhead with real compute".format(
            **result["scene"]
        ),
        f"detected after {detect:.0f} ms (median)" if detect is not None else "",
        setting(result["cores"], result["workers"]),
    ]
    if result["bamboo"] is not None:
        parts.insert(1, "{ratio:.2f} times a checkpoint with Bamboo's costs".format(**result["bamboo"]))
    return "; ".join(filter(None, parts))


def _cells(cost: Cost) -> list[str]:
    interval = cost["overhead_ci"]
    return [
        _or_dash(cost["vs_undisturbed"], "{:.0%}"),
        _or_dash(cost["vs_checkpoint"], "{:.2f} x"),
        _or_dash(cost["pause_steps"], "{:.2f} steps"),
        _or_dash(cost["pause_bound_steps"], "{:.2f} steps"),
        _or_dash(cost["overhead"], "{:+.1%}"),
        "-" if interval is None else f"{interval[0]:+.1%} to {interval[1]:+.1%}",
    ]


def _or_dash(value: float | None, shown: str) -> str:
    return "-" if value is None else shown.format(value)


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
