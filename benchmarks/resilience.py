"""`culm bench resilience`: what each strategy costs, in four measurements.

losses     goodput under the same losses, beside the undisturbed run and a tuned checkpoint baseline   emulated compute
pause      how long a loss holds a run up, beside the planner's bound                                   emulated compute
detection  from SIGKILL until the last node has the new epoch                                           emulated compute
overhead   what a strategy costs while nothing befalls a run                                            real compute

Emulated: layers sleep, so that more workers than cores run side by side, as on machines of their own. Nodes, sockets,
checkpoints and SIGKILLs are real.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypedDict

from rich.table import Table

from benchmarks import detection, resilience_overhead, slow
from benchmarks import resilience_pause as pauses
from benchmarks.detection import spread
from benchmarks.pipeline import cores, setting
from benchmarks.resilience_losses import Ran, Scene, Tuned, cell, tuned, under_losses, undisturbed
from benchmarks.resilience_overhead import Effort, Factory, Overhead, overhead, shape
from culm.cluster.setup import STRATEGIES as ABLE
from culm.providers.local import LocalNursery

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


class Result(TypedDict):
    """The JSON of the bench."""

    strategies: dict[str, Cost]
    detect_ms: dict[str, float | None]
    compute: str
    overhead_compute: str
    scene: dict[str, Any]
    checkpoint: dict[str, Any]
    grid: list[dict[str, Any]]
    bamboo: dict[str, Any] | None
    kills: dict[str, int]
    cores: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long the bench looks, and at what."""

    scene: Scene
    every: tuple[int, ...]
    """Steps between two checkpoints that the baseline is tuned over ..."""
    waits: tuple[bool, ...]
    """... and whether a restart waits for a node."""
    pause_kills: int
    pause_unit_s: float
    detect_kills: int
    grid: tuple[tuple[float, float], ...]
    """(seconds of an action, steps between two losses) of each cell."""
    bamboo: Scene | None
    effort: Effort


_SCENE = Scene(pipelines=4, stages=4, each=4, unit_s=2 / 21, steps=40)
"""Steps of two seconds, 21 actions long; nine of them are bubbles, in which peers run a lost node's micro-batches."""
FULL = Plan(
    scene=_SCENE,
    every=(1, 2, 4),
    waits=(True, False),
    pause_kills=40,
    pause_unit_s=0.05,
    detect_kills=40,
    grid=tuple((unit_s, every) for unit_s in (0.01, 0.025, 0.05) for every in (5.0, 10.0, 20.0)),
    bamboo=replace(_SCENE, unit_s=0.02, steps=90, loss_every=BAMBOO_LOSS_EVERY),
    effort=resilience_overhead.FULL,
)
QUICK = Plan(
    scene=Scene(pipelines=4, stages=3, each=3, unit_s=0.025, steps=14),
    every=(4,),
    waits=(False,),
    pause_kills=2,
    pause_unit_s=0.03,
    detect_kills=4,
    grid=(),
    bamboo=None,
    effort=resilience_overhead.QUICK,
)


class Pool(Factory, Protocol):
    """Runs that are idle between rounds, and the nursery that they come from."""

    nursery: LocalNursery


def run(
    culm: Pool, *, quick: bool = False, plan: Plan | None = None, progress: Callable[[str], object] = lambda _: None
) -> Result:
    """Measure every strategy; `progress` gets a line for each figure. Raises what a run raises."""
    plan = plan or (QUICK if quick else FULL)
    scene, nursery = plan.scene, culm.nursery
    progress(setting(cores(), scene.nodes))
    before = undisturbed(scene, nursery)
    step_s = before.step_s
    progress(f"undisturbed: a step of {step_s:.2f} s on {scene.pipelines} x {scene.stages} emulated nodes")
    base = tuned(scene, nursery, step_s, every=plan.every, waits=plan.waits)
    ran = {name: _lost(scene, nursery, name, step_s, base) for name in STRATEGIES}
    calm = fmean([before.goodput, undisturbed(scene, nursery).goodput])
    costs = {name: _cost(one, calm, base.ran.goodput) for name, one in ran.items()}
    for name, cost in costs.items():
        progress(f"{name}: {cost['vs_undisturbed']:.0%} of undisturbed")
    for name in pauses.STRATEGIES:
        held = pauses.held(nursery, name, kills=plan.pause_kills, unit_s=plan.pause_unit_s)
        costs[name] |= pauses.row(held)  # type: ignore[typeddict-item]  # its keys are among those of Cost
        progress(f"{name}: a pause of {costs[name]['pause_s']:.2f} s")
    for name in resilience_overhead.STRATEGIES:
        costs[name] |= _overhead(culm, plan.effort, name)  # type: ignore[typeddict-item]
        progress(f"{name}: overhead {costs[name]['overhead']:+.1%}, real compute")
    detect_ms = spread(detection.detected(nursery, plan.detect_kills))
    progress(f"detection: {detect_ms['median']:.0f} ms")
    return Result(
        strategies=costs,
        detect_ms=detect_ms,
        compute="emulated",
        overhead_compute="real",
        scene=_told(scene, step_s),
        checkpoint={"every": base.every, "waits": base.waits, "vs_undisturbed": base.ran.goodput / calm},
        grid=[_cell(plan, nursery, unit_s, every, progress) for unit_s, every in plan.grid],
        bamboo=None if plan.bamboo is None else bamboo(plan.bamboo, nursery),
        kills={"pause": plan.pause_kills, "detect": plan.detect_kills},
        cores=cores(),
        workers=scene.nodes,
    )


def _lost(scene: Scene, nursery: LocalNursery, name: str, step_s: float, base: Tuned) -> Ran:
    """A strategy under the losses; the baseline has been there already."""
    if name == "checkpoint":
        return base.ran
    options = {"notice_s": NOTICE_STEPS * step_s, "checkpoint_every": base.every} if name == "migrate" else {}
    return under_losses(scene, nursery, name, step_s, **options)


def _cost(ran: Ran, calm: float, checkpoint: float) -> Cost:
    return Cost(
        vs_undisturbed=ran.goodput / calm,
        vs_checkpoint=ran.goodput / checkpoint if checkpoint else None,
        pause_steps=None,
        pause_bound_steps=None,
        pause_s=None,
        pause_within=None,
        pause_step_s=None,
        bubble_share=ran.summary.get("bubble_share"),
        preemptions=ran.summary.get("preemptions"),
        notice_steps=NOTICE_STEPS if ran.summary.get("strategy") == "migrate" else 0.0,
        overhead=None,
        overhead_ci=None,
        real=None,
    )


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


def _cell(
    plan: Plan, nursery: LocalNursery, unit_s: float, every: float, progress: Callable[[str], object]
) -> dict[str, Any]:
    found: dict[str, Any] = cell(plan.scene, nursery, unit_s, every, every=plan.every)
    progress(
        "steps of {step_s:.2f} s, a loss every {loss_every_steps:.0f}: {ratio:.2f} times checkpoint".format(**found)
    )
    return found


def bamboo(scene: Scene, nursery: LocalNursery) -> dict[str, Any]:
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
    made = Table(
        title="a node lost every {loss_every_steps:g} steps, back after {back_after_steps:g}".format(**scene),
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
